"""Where a declared column is in a file, and the rows of one row group with their place in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from gem_core.config.features import Features
from gem_core.errors import DataError
from gem_data.arrow import Ints, Lists, WrongType, is_list, lists, plain
from gem_data.files import DataFile


@dataclass(frozen=True)
class Located:
    """``leaves`` to read; ``top`` column and ``child`` of its struct, or the ``constant`` of a ``key=value`` folder."""

    leaves: tuple[str, ...]
    top: str
    child: str | None = None
    constant: str | None = None


def locate(file: DataFile, name: str) -> Located:
    """Find ``name``: a column, ``column.child`` of a struct or a list of structs, or a folder of the path.

    :raises DataError: no such column, or two of the name.
    """
    found: Located | None = file.places.get(name)
    if found is None:
        found = file.places[name] = _search(file, name)
    return found


def _search(file: DataFile, name: str) -> Located:
    names = file.schema.names
    if names.count(name) > 1:
        raise DataError(f"{names.count(name)} columns have the name {name!r}", where=file.path, fix="rename all but one")
    if name in names:
        return Located(tuple(leaf for leaf in file.leaves if leaf == name or leaf.startswith(f"{name}.")), name)
    for key, value in file.partition:
        if key == name:
            return Located((), name, constant=value)
    for top in sorted((t for t in names if name.startswith(f"{t}.")), key=len, reverse=True):
        kind, child = file.schema.field(top).type, name[len(top) + 1 :]
        nested = is_list(kind)
        struct = kind.value_type if nested else kind
        if pa.types.is_struct(struct) and len(struct.get_all_field_indices(child)) > 1:
            raise DataError(f"several fields of {top!r} have the name {child!r}", where=file.path, fix="rename all but one")
        if pa.types.is_struct(struct) and struct.get_field_index(child) >= 0:
            # A list of structs has two levels of its own (three-level lists) or one (old writers) before the child's name.
            ends = [
                f"{top}.{way}{child}"
                for way in (("list.element.", "list.item.", "list.array.", "array.", "element.", "item.") if nested else ("",))
            ]
            leaves = tuple(leaf for leaf in file.leaves if any(leaf == e or leaf.startswith(f"{e}.") for e in ends))
            return Located(leaves or tuple(leaf for leaf in file.leaves if leaf.startswith(f"{top}.")), top, child)
    raise missing(file, name)


def missing(file: DataFile, name: str) -> DataError:
    names = [*file.schema.names, *(key for key, _ in file.partition)]
    near = get_close_matches(name, names, 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    shown = ", ".join(map(repr, names[:30])) + (", ..." if len(names) > 30 else "")
    return DataError(
        f"the column {name!r} is missing",
        where=file.path,
        fix=f'{hint}the file has {shown}; set column = "..." in [features], or write the column',
    )


def form_of(file: DataFile, name: str) -> tuple[str, str]:
    """("single values", "lists" or "lists of lists", what they are of: "integers", "numbers", "booleans", "times" or "text"; "" where it is
    not known: folders hold text as well as numbers)."""
    place = locate(file, name)
    if place.constant is not None:
        return "single values", ""
    kind, depth = file.schema.field(place.top).type, 0
    child = place.child
    while is_list(kind) or pa.types.is_struct(kind) or pa.types.is_dictionary(kind):
        if pa.types.is_struct(kind):
            if child is None:
                break
            kind, child = kind.field(child).type, None
        else:
            depth, kind = depth + is_list(kind), kind.value_type
    return ("single values", "lists", "lists of lists")[min(depth, 2)], next((word for word, of in _KINDS if of(kind)), "text")


_KINDS: tuple[tuple[str, Callable[[pa.DataType], bool]], ...] = (
    ("", pa.types.is_null),
    ("integers", pa.types.is_integer),
    ("booleans", pa.types.is_boolean),
    ("times", pa.types.is_temporal),
    ("numbers", lambda kind: pa.types.is_floating(kind) or pa.types.is_decimal(kind)),
)


def carried_columns(features: Features) -> tuple[str, ...]:
    """Columns whose values are told apart by their kind."""
    return tuple(name for name in (features.sample_id, features.request, *features.columns) if name)


def check_alike(files: Sequence[DataFile], names: Iterable[str], carried: Iterable[str]) -> None:
    """All files hold a column of ``names`` as single values, or all as lists; those ``carried`` as they are, also of one kind.

    :raises DataError: they do not; batches are put together of several files.
    """
    carried = set(carried)
    for name in dict.fromkeys((*names, *carried)):
        first: dict[int, tuple[str, DataFile]] = {}
        for file in files:
            for part, found in enumerate(form_of(file, name)[: 2 if name in carried else 1]):
                known, other = first.setdefault(part, (found, file)) if found else (found, file)
                if known != found:
                    raise DataError(
                        f"the column holds {found}, and {known} in {other.path}",
                        where=f"{file.path}, column {name!r}",
                        fix="store it in one type in all files",
                    )


def folder_value(text: str) -> pa.Scalar:
    """What a folder ``key=value`` says: nothing, a number where 64 bits hold it, or text."""
    if text == _NO_VALUE:
        return pa.scalar(None)
    for kind in (pa.int64(), pa.uint64()) if re.fullmatch(r"-?\d+", text) else ():
        with suppress(OverflowError, pa.ArrowInvalid):
            return pa.scalar(int(text), kind)
    return pa.scalar(text)


_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
"""The folder of rows whose key is null, as Hive and Spark write it."""


class Chunk:
    """The rows of one row group that pass the filter. ``kept``: their numbers in the row group, None if all are there."""

    def __init__(self, file: DataFile, row_group: int, table: pa.Table, size: int, kept: Ints | None = None) -> None:
        self.file, self.row_group, self.table, self.size, self.kept = file, row_group, table, size, kept
        self.reasons: dict[int, str] = {}  # why a row goes to the quarantine
        self._lists: dict[str, Lists] = {}

    def array(self, name: str) -> pa.Array:
        """The column as one plain array ``[n]`` of whatever type."""
        place = locate(self.file, name)
        if place.constant is not None:
            return pa.repeat(folder_value(place.constant), self.size)
        array = plain(self.table[place.top])
        return plain(pc.struct_field(array, place.child)) if place.child is not None and pa.types.is_struct(array.type) else array

    def scalar(self, name: str) -> pa.Array:
        """The column as one plain array ``[n]`` of single values."""
        array = self.array(name)
        if is_list(array.type):
            fix = "declare the feature as a list (a sparse feature or an event field), or flatten the column"
            self.wrong_type(name, WrongType(array.type, "one value a row", fix))
        return array

    def is_list(self, name: str) -> bool:
        place = locate(self.file, name)
        return place.constant is None and is_list(self.table.schema.field(place.top).type)

    def lists(self, name: str) -> Lists:
        """The list column's items and offsets; of a list of structs, the items of one child."""
        place = locate(self.file, name)
        if place.top not in self._lists:
            try:
                if place.constant is not None:
                    raise WrongType(pa.string(), "a list", "a folder name holds one value for all rows")
                self._lists[place.top] = lists(self.table[place.top])
            except WrongType as error:
                self.wrong_type(name, error)
        found = self._lists[place.top]
        return found if place.child is None else Lists(plain(pc.struct_field(found.values, place.child)), found.offsets)

    @cached_property
    def good(self) -> NDArray[np.bool_] | None:
        """False at rows with a reason; None if there are none."""
        if not self.reasons:
            return None
        mask = np.ones(self.size, dtype=bool)
        mask[list(self.reasons)] = False
        return mask

    def row_in_group(self, row: int) -> int:
        return int(row if self.kept is None else self.kept[row])

    def where(self, columns: str | Iterable[str], row: int | None = None, feature: str | None = None) -> str:
        named = [columns] if isinstance(columns, str) else list(columns)
        parts = [self.file.path]
        if row is not None:
            at = self.row_in_group(row)
            parts.append(f"row group {self.row_group}, row {at} (row {self.file.first_row(self.row_group) + at} of the file)")
        if named:
            parts.append(("column " if len(named) == 1 else "columns ") + ", ".join(map(repr, named)))
        if feature:
            parts.append(f"features.{feature}")
        return ", ".join(parts)

    def fail(self, what: str, fix: str, columns: str | Iterable[str], row: int | None = None, feature: str | None = None) -> NoReturn:
        raise DataError(what, where=self.where(columns, row, feature), fix=fix)

    def wrong_type(self, column: str, error: WrongType, feature: str | None = None) -> NoReturn:
        raise DataError(str(error), where=self.where(column, feature=feature), fix=error.fix) from error
