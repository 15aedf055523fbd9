"""Arrow arrays to NumPy, straight from the buffers: no Python object a row.

A null is returned as a mask, never as a value; what it means is the feature's business (`decode`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from gem_core.sources.hashing import U64, hash_bytes, hash_integers

Array = NDArray[Any]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

LARGEST = 2**63 - 1
"""What `integers` gives for it and for every larger number."""

UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_LEAST = ((1e17, "ns"), (1e14, "us"), (1e11, "ms"), (0, "s"))


def unit_of(largest: float) -> str:
    """The unit in which the largest of some times since 1970 is one of our days."""
    return next((unit for least, unit in _LEAST if largest >= least), "s")


class WrongType(TypeError):
    """The Arrow type does not fit the feature; ``str`` says what is there and ``fix`` how to mend it."""

    def __init__(self, found: pa.DataType, wanted: str, fix: str) -> None:
        super().__init__(f"the column has the type {found}, the feature needs {wanted}")
        self.fix = fix


@dataclass(frozen=True)
class Lists:
    """A list column: ``values`` (Arrow, all items one after another) and ``offsets [n+1]``; a null list is an empty one."""

    values: pa.Array
    offsets: Ints

    @property
    def lengths(self) -> Ints:
        return np.diff(self.offsets)


def plain(array: pa.Array | pa.ChunkedArray) -> pa.Array:
    """One contiguous array, its extension type and dictionary resolved."""
    if isinstance(array, pa.ChunkedArray):
        array = array.chunk(0) if array.num_chunks == 1 else array.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    if isinstance(array.type, pa.BaseExtensionType):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        array = array.cast(array.type.value_type)
    return array


def is_list(kind: pa.DataType) -> bool:
    """Any of list, large list, fixed-size list, list view, large list view."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)) or _is_view(kind)


def _is_view(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind))


def lists(array: pa.Array) -> Lists:
    """Values and offsets of a list array of any kind and slicing; no copy but for list views and nulls."""
    array = plain(array)
    if not is_list(array.type):
        raise WrongType(array.type, "a list", "use a list column here, or declare the feature as a scalar one")
    n = len(array)
    lengths: Ints | None = None
    if pa.types.is_fixed_size_list(array.type):
        lengths = np.full(n, array.type.list_size, dtype=np.int64)
    elif _is_view(array.type):
        lengths = array.sizes.to_numpy().astype(np.int64)
    elif array.null_count:
        lengths = np.diff(array.offsets.to_numpy()).astype(np.int64)
    if lengths is not None:
        # flatten() drops whatever lies below a null list; the offsets must skip it too.
        if array.null_count:
            lengths[nulls(array)] = 0
        return Lists(plain(array.flatten()), _running(lengths))
    offsets = array.offsets.to_numpy()
    start = offsets[0] if n else 0
    stop = offsets[-1] if n else 0
    shifted = offsets.astype(np.int64)
    shifted -= start
    return Lists(plain(array.values.slice(start, stop - start)), shifted if n else np.zeros(1, dtype=np.int64))


def nulls(array: pa.Array) -> Bools:
    """True where ``array`` is null ``[n]``."""
    mask: Bools = array.is_null().to_numpy(zero_copy_only=False)
    return mask


def integers(array: pa.Array) -> tuple[Ints, Bools | None]:
    """int64 values ``[n]`` (0 at nulls, at most ``LARGEST``) and the null mask, or None without nulls.

    :raises WrongType: text, floats and other types that are not whole numbers.
    """
    kind = array.type
    if pa.types.is_null(kind):
        return np.zeros(len(array), dtype=np.int64), np.ones(len(array), dtype=bool)
    if pa.types.is_boolean(kind):
        array = array.cast(pa.uint8())
    elif not pa.types.is_integer(kind):
        if pa.types.is_string(kind) or pa.types.is_large_string(kind) or _is_bytes(kind):
            raise WrongType(kind, "whole numbers", "set hash = true and rows = <table size>, or store numbers")
        raise WrongType(
            kind, "whole numbers", "store the column as int64 (a float column of ids usually hides missing values: fill them first)"
        )
    mask = nulls(array) if array.null_count else None
    values = _numbers(array, 0)
    if values.dtype == np.uint64 and values.size and values.max() > LARGEST:
        values = np.minimum(values, np.uint64(LARGEST))
    return values.astype(np.int64, copy=False), mask


def keys(array: pa.Array) -> tuple[Ints, Bools | None]:
    """As `integers`, but different numbers stay different: those above ``LARGEST`` come by their bits, as negative ones."""
    if array.type != pa.uint64():
        return integers(array)
    return _numbers(array, 0).view(np.int64), nulls(array) if array.null_count else None


def floats(array: pa.Array) -> tuple[NDArray[np.floating[Any]], Bools | None]:
    """Float values ``[n]`` (float32 for float16 and float32, else float64) and the mask of nulls and NaN, or None without any."""
    kind = array.type
    if pa.types.is_null(kind):
        return np.zeros(len(array)), np.ones(len(array), dtype=bool)
    if pa.types.is_boolean(kind):
        array = array.cast(pa.uint8())
    elif pa.types.is_decimal(kind):
        array = array.cast(pa.float64())
    elif kind == pa.float16():
        array = array.cast(pa.float32())  # before pyarrow 21 nulls among float16 cannot be filled
    elif not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise WrongType(kind, "a number", "store the column as numbers, or declare it as an id feature (text: hash = true)")
    mask = nulls(array) if array.null_count else None
    values = _numbers(array, 0)
    if values.dtype.kind == "f":
        missing = np.isnan(values)
        if missing.any():
            mask = missing if mask is None else mask | missing
    return values.astype(np.float32 if values.dtype == np.float32 else np.float64, copy=False), mask


def hashed_kind(kind: pa.DataType) -> str | None:
    """What `hashes` takes a type for: the integer 7 and the text "7" have different hashes."""
    return None if pa.types.is_null(kind) else "integers" if pa.types.is_integer(kind) or pa.types.is_boolean(kind) else "text"


def hashes(array: pa.Array, salt: int) -> tuple[U64, Bools | None]:
    """The stated 64-bit hash of integers, booleans, text and bytes ``[n]``, and the null mask."""
    kind = array.type
    mask = nulls(array) if array.null_count else None
    if pa.types.is_null(kind):
        return np.zeros(len(array), dtype=np.uint64), np.ones(len(array), dtype=bool)
    if pa.types.is_boolean(kind):
        array, kind = array.cast(pa.uint8()), pa.uint8()
    if pa.types.is_integer(kind):
        return hash_integers(_numbers(array, 0), salt), mask
    if pa.types.is_fixed_size_binary(kind):
        array, kind = array.cast(pa.binary()), pa.binary()
    elif pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        array = array.cast(pa.large_string() if pa.types.is_string_view(kind) else pa.large_binary())
        kind = array.type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or _is_bytes(kind)):
        raise WrongType(kind, "integers, text or bytes to hash", "store the column as one of these")
    wide = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
    _, at, data = array.buffers()
    offsets = (
        np.frombuffer(at, dtype=np.int64 if wide else np.int32)[array.offset : array.offset + len(array) + 1]
        if at
        else np.zeros(1, np.int64)
    )
    bytes_ = np.frombuffer(data, dtype=np.uint8) if data is not None and data.size else np.zeros(0, np.uint8)
    if not len(array):
        return np.zeros(0, dtype=np.uint64), mask
    first = int(offsets[0])
    return hash_bytes(bytes_[first : int(offsets[-1])], offsets.astype(np.int64) - first, salt), mask


def places(array: pa.Array, words: pa.Array) -> tuple[Ints, Bools | None, Bools]:
    """Places ``[n]`` of integers or text in ``words`` (0 where they are not there), the null mask, and which are there.

    :raises WrongType: numbers against text, or other types.
    """
    mask = nulls(array) if array.null_count else None
    if pa.types.is_null(array.type):
        return np.zeros(len(array), np.int64), np.ones(len(array), bool), np.zeros(len(array), bool)
    if pa.types.is_integer(words.type):
        # Numbers above LARGEST, which no vocabulary holds, come as it.
        values = pa.array(integers(array)[0], mask=_numbers(array, 0) > LARGEST if array.type == pa.uint64() else None)
    elif pa.types.is_string(array.type) or pa.types.is_large_string(array.type) or pa.types.is_string_view(array.type):
        values = array.cast(words.type)
    else:
        raise WrongType(array.type, "text, as its vocabulary does", "make the vocabulary again, or store the column as text")
    found = pc.index_in(values, value_set=words)
    return pc.fill_null(found, 0).to_numpy(zero_copy_only=False).astype(np.int64), mask, found.is_valid().to_numpy(zero_copy_only=False)


def times(array: pa.Array, unit: str) -> tuple[Ints, Bools | None]:
    """Integers as they are; timestamps, dates (midnight) of any unit and zone as whole ``unit`` since 1970 UTC, rounded down."""
    kind = array.type
    if pa.types.is_date(kind):
        array, kind = array.cast(pa.timestamp("ms")), pa.timestamp("ms")
    if not pa.types.is_timestamp(kind):
        if pa.types.is_integer(kind) or pa.types.is_null(kind):
            return integers(array)
        raise WrongType(kind, "integers or timestamps", "store times as int64 since 1970 or as Arrow timestamps")
    mask = nulls(array) if array.null_count else None
    values = _numbers(array.cast(pa.int64()) if kind.tz is None else array.cast(pa.timestamp(kind.unit)).cast(pa.int64()), 0)
    have, want = UNITS[kind.unit], UNITS[unit]
    scaled = values // (have // want) if have >= want else values * (want // have)
    return scaled.astype(np.int64, copy=False), mask


def booleans(array: pa.Array) -> tuple[Bools, Bools | None]:
    """Booleans, or numbers that are 0 or 1, and the null mask; another number raises ValueError."""
    values, mask = floats(array)
    if values.size and bool(((values != 0) & (values != 1)).any()):
        raise ValueError("a mask holds numbers other than 0 and 1")
    return values != 0, mask


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _numbers(array: pa.Array, fill: int) -> Array:
    """NumPy view where there are no nulls, else a copy with ``fill`` at nulls."""
    if array.null_count:
        array = pc.fill_null(array, pa.scalar(fill, array.type))
    values: Array = array.to_numpy(zero_copy_only=False)
    return values


def _running(lengths: Ints) -> Ints:
    offsets = np.zeros(lengths.size + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
