"""Delimited text files of any size as Arrow tables: streamed block by block, plain or gzip, every refused line known by its number.

For the logs of public data sets: one sample a line, no quotes, no line breaks inside a field. A byte-order mark and CRLF line ends are
understood. All tables that a file gives have ``ROW_GROUP`` rows but for the last, however the bytes arrive, so that converting a file
again, or its compressed form, writes the same Parquet file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
from numpy.typing import NDArray

from gem_core.errors import ConfigError, DataError
from gem_core.sources.hashing import hash_integers
from gem_data.arrow import hashes

ROW_GROUP = 65_536
_BLOCK = 1 << 22
_NEVER = "\x01"  # stands in no text file: a whole line is one field
POLICIES = ("error", "quarantine")


class BadLines:
    """What happens to lines that cannot be used: "error" stops at the first; "quarantine" counts them and writes each to ``file`` with its
    place and the reason. A file of an earlier conversion is removed."""

    def __init__(self, policy: str, folder: Path) -> None:
        if policy not in POLICIES:
            raise ConfigError(f"there is no policy {policy!r}", where="--bad-lines", fix=f"use {' or '.join(POLICIES)}")
        self.policy, self.file, self.count = policy, folder / "bad_lines.tsv", 0
        self._open: IO[bytes] | None = None
        with suppress(OSError):
            self.file.unlink(missing_ok=True)

    def __enter__(self) -> BadLines:
        return self

    def __exit__(self, *_: object) -> None:
        if self._open is not None:
            self._open.close()

    def take(self, path: Path, number: int, why: str, line: bytes) -> None:
        """:raises DataError: policy "error", or the file cannot be written."""
        if self.policy == "error":
            raise _unusable(path, number, why, "mend or remove the line, or --bad-lines quarantine")
        self.count += 1
        try:
            if self._open is None:
                self.file.parent.mkdir(parents=True, exist_ok=True)
                self._open = open(self.file, "wb")  # noqa: SIM115 (closed by close)
            self._open.write(f"{path.name}\t{number}\t{why}\t".encode() + line + b"\n")
            self._open.flush()
        except OSError as error:
            raise DataError(f"a refused line cannot be kept: {error}", where=str(self.file), fix="free space") from error


class Rows:
    """The lines of one block that have a field for each name, as columns. ``size`` of them; ``refuse`` takes more away."""

    def __init__(self, path: Path, first: int, lines: pa.Array, names: Sequence[str], delimiter: str) -> None:
        self.path, self.first, self.lines, self.names = path, first, lines, list(names)
        self.reasons: dict[int, str] = {}
        parts = pc.split_pattern(lines, delimiter)
        widths = parts.value_lengths().to_numpy(zero_copy_only=False)
        whole = widths == len(names)
        self.at = np.flatnonzero(whole)
        for i in np.flatnonzero(~whole).tolist():
            found = "it is empty" if not lines[i].as_py() else f"it has {widths[i]} fields instead of {len(names)}"
            self.reasons[i] = found
        self.size = int(self.at.size)
        self._values = (parts if whole.all() else parts.filter(pa.array(whole))).flatten()

    def raw(self, name: str) -> pa.Array:
        """The bytes of a column ``[size]``."""
        places = np.arange(self.names.index(name), self.size * len(self.names), len(self.names))
        return self._values.take(pa.array(places))

    def refuse(self, bad: NDArray[np.bool_], why: Callable[[int], str]) -> None:
        """Take the rows where ``bad [size]`` away; ``why(row)`` says for what reason."""
        for row in np.flatnonzero(bad).tolist():
            self.reasons.setdefault(int(self.at[row]), why(row))

    def column(self, name: str, what: str, convert: Callable[[pa.Array], pa.Array], *, required: bool = True) -> pa.Array:
        """``convert`` of the column's bytes, in which empty fields are null; rows that it raises ArrowInvalid for are refused."""
        raw = self.raw(name)
        raw = pc.if_else(pc.equal(pc.binary_length(raw), 0), pa.scalar(None, raw.type), raw)
        try:
            found = convert(raw)
        except pa.ArrowInvalid:
            fits = np.array([_fits(raw.slice(i, 1), convert) for i in range(self.size)])
            self.refuse(~fits, lambda row: f"{name} = {_shown(raw[row].as_py())} is not {what}")
            found = convert(pc.if_else(pa.array(fits), raw, pa.scalar(None, raw.type)))
        if required and found.null_count:
            self.refuse(raw.is_null().to_numpy(zero_copy_only=False), lambda row: f"{name} is empty")
        return found

    def integers(self, name: str, kind: pa.DataType, *, required: bool = True) -> pa.Array:
        return self.column(name, f"a whole number ({kind})", lambda raw: raw.cast(pa.string()).cast(kind), required=required)

    def floats(self, name: str) -> pa.Array:
        return self.column(name, "a number", lambda raw: raw.cast(pa.string()).cast(pa.float64()))

    def text(self, name: str) -> pa.Array:
        return self.column(name, "UTF-8 text", lambda raw: raw.cast(pa.string()))

    def hexadecimal(self, name: str, *, required: bool = True) -> pa.Array:
        """uint32 of 8 hexadecimal digits: what the text says, in a third of its size."""
        return self.column(name, "8 hexadecimal digits", _hexadecimal, required=required)

    def binary(self, name: str) -> pa.Array:
        """int8 labels; anything but 0 and 1 is refused."""
        values = self.integers(name, pa.int8())
        wrong = pc.fill_null(pc.greater(pc.bit_wise_and(values, pa.scalar(~1, pa.int8())), 0), False)
        wrong = pc.or_(wrong, pc.fill_null(pc.less(values, 0), False)).to_numpy(zero_copy_only=False)
        self.refuse(wrong, lambda row: f"{name} = {values[row].as_py()} is neither 0 nor 1")
        return values

    def table(self, columns: dict[str, pa.Array], bad: BadLines | None = None) -> pa.Table:
        """The columns without refused rows, which go to ``bad`` in the order of the lines; None: any is an error."""
        for i in sorted(self.reasons):
            if bad is None:
                raise _unusable(self.path, self.first + i, self.reasons[i], "use the file as it was distributed")
            bad.take(self.path, self.first + i, self.reasons[i], self.lines[i].as_py())
        table = pa.table(columns)
        keep = ~np.isin(self.at, list(self.reasons)) if self.reasons else None
        return table if keep is None else table.filter(pa.array(keep))


def first_line(path: Path, delimiter: str) -> list[str]:
    """The fields of the first line.

    :raises DataError: the file cannot be read.
    """
    try:
        with pa.input_stream(str(path), compression="gzip" if _gzipped(path) else None) as stream:
            head: bytes = stream.read(1 << 16)
    except (OSError, EOFError, pa.ArrowException) as error:
        raise _unreadable(path, str(error), 1) from error
    return head.removeprefix(b"\xef\xbb\xbf").split(b"\n")[0].rstrip(b"\r").decode("utf-8", "replace").split(delimiter)


def read_rows(path: Path, delimiter: str, names: Sequence[str] | None = None) -> Iterator[Rows]:
    """Blocks of the file's lines as rows. ``names`` None: the first line holds them.

    :raises DataError: the file cannot be read, is empty, or is damaged.
    """
    number = 1
    try:
        with pa.input_stream(str(path), compression="gzip" if _gzipped(path) else None) as stream:
            for lines in csv.open_csv(
                stream,
                read_options=csv.ReadOptions(column_names=["line"], block_size=_BLOCK, use_threads=False),
                parse_options=csv.ParseOptions(delimiter=_NEVER, quote_char=False, ignore_empty_lines=False),
                convert_options=csv.ConvertOptions(column_types={"line": pa.binary()}, strings_can_be_null=False),
            ):
                block = lines.column(0)
                if names is None:
                    names = [n.decode("utf-8", "replace") for n in block[0].as_py().split(delimiter.encode())]
                    block, number = block.slice(1), number + 1
                if len(block):
                    yield Rows(path, number, block, names, delimiter)
                number += len(block)
    except (OSError, EOFError, pa.ArrowException) as error:
        reason = "it is empty" if "Empty CSV" in str(error) else str(error)
        raise _unreadable(path, reason, number) from error


def need(path: Path, names: Sequence[str], wanted: Iterable[str]) -> None:
    """:raises DataError: the header lacks a column."""
    missing = [name for name in wanted if name not in names]
    if missing:
        raise DataError(
            f"the header lacks {', '.join(map(repr, missing))}", where=f"{path}, line 1", fix="use the file as it was distributed"
        )


def regrouped(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """The same rows in tables of ROW_GROUP rows, the last one smaller."""
    held: list[pa.Table] = []
    count = 0
    for table in tables:
        held.append(table)
        count += table.num_rows
        while count >= ROW_GROUP:
            joined = pa.concat_tables(held)
            yield joined.slice(0, ROW_GROUP).combine_chunks()
            held, count = [joined.slice(ROW_GROUP)], count - ROW_GROUP
    if count:
        yield pa.concat_tables(held).combine_chunks()


class Distinct:
    """About how many different values a column has, in 2 MiB: linear counting (Whang et al., 1990) over the stated hash."""

    _BITS = 21

    def __init__(self) -> None:
        self._seen = np.zeros(1 << self._BITS, dtype=bool)

    def add(self, array: pa.Array) -> None:
        array = array.drop_null()
        whole = pa.types.is_integer(array.type)
        hashed = hash_integers(array.to_numpy(), 0) if whole else hashes(array, 0)[0]
        self._seen[hashed >> np.uint64(64 - self._BITS)] = True

    def rows(self, least: int = 16, most: int = 1 << 22) -> int:
        """A power of two that is at least twice the estimate: few values of a hashed column then share a row."""
        free = max(1, int((~self._seen).sum()))
        estimate = -self._seen.size * np.log(free / self._seen.size)
        return int(min(most, max(least, 1 << int(np.ceil(np.log2(2 * max(estimate, 1)))))))


def text_files(path: Path, named: Callable[[str], bool], what: str) -> list[Path]:
    """``path`` itself, or the files in it whose stem (up to the first dot) ``named`` accepts, day_2 before day_10.

    :raises DataError: there are none.
    """
    if path.is_file():
        return [path]
    found = [p for p in path.iterdir() if p.is_file() and named(stem_of(p))] if path.is_dir() else []
    if not found:
        raise DataError(f"no {what} was found", where=str(path), fix="name the file, or the folder that holds the files as distributed")
    unique: dict[str, Path] = {}
    for p in sorted(found):
        if stem_of(p) in unique:
            raise DataError(
                f"{unique[stem_of(p)].name} and {p.name} would both become {stem_of(p)}.parquet", where=str(path), fix="remove one"
            )
        unique[stem_of(p)] = p
    return sorted(found, key=lambda p: [int(t) if t.isdigit() else t for t in _digits(stem_of(p))])


def stem_of(path: Path) -> str:
    return path.name.split(".")[0]


def splits_of(files: dict[str, int]) -> dict[str, Any]:
    """``[data.parquet]`` of labelled files (stem -> rows, in time order) whose rows are numbered by the column ``row``.

    Files called test... and valid... are those splits. What is missing is held out of the training files: of several the last one, half for
    evaluation and half for test; of a single one its newest tenths.
    """
    test = [s for s in files if s.startswith("test")]
    held = [s for s in files if s.startswith(("val", "eval"))]
    train = [s for s in files if s not in test and s not in held]

    def paths(stems: Sequence[str]) -> list[str]:
        return [f"{s}.parquet" for s in stems]

    if not train or (test and held):
        return {k: paths(v) for k, v in (("train", train), ("eval", held), ("test", test)) if v}
    missing = [split for split, there in (("eval", held), ("test", test)) if not there]
    last, parts = train[-1], len(missing)
    rows = files[last]
    start = 0 if len(train) > 1 else rows * (10 - parts) // 10
    edges = [start + (rows - start) * i // parts for i in range(parts + 1)]
    found: dict[str, Any] = {"train": paths(train[:-1] or train)}
    if len(train) == 1:
        found["train_filter"] = f"row < {start}"
    found |= {"eval": paths(held)} if held else {}
    found |= {"test": paths(test)} if test else {}
    for split, low, high in zip(missing, edges, edges[1:]):
        found[split] = paths([last])
        found[f"{split}_filter"] = f"row >= {low} and row < {high}"
    return found


def _unreadable(path: Path, reason: str, number: int) -> DataError:
    return DataError(f"the file cannot be read: {reason}", where=f"{path}, at or after line {number}", fix="use the file as distributed")


def _unusable(path: Path, number: int, why: str, fix: str) -> DataError:
    return DataError(f"the line cannot be used: {why}", where=f"{path}, line {number}", fix=fix)


def _digits(text: str) -> list[str]:
    parts, number = [""], False
    for c in text:
        if c.isdigit() != number:
            parts.append("")
            number = c.isdigit()
        parts[-1] += c
    return parts


def _gzipped(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == b"\x1f\x8b"


def _fits(one: pa.Array, convert: Callable[[pa.Array], pa.Array]) -> bool:
    try:
        convert(one)
    except pa.ArrowInvalid:
        return False
    return True


def _shown(value: bytes | None) -> str:
    return repr((value or b"")[:80].decode("utf-8", "replace"))


_DIGITS = np.full(256, 255, dtype=np.uint8)
for _i, _c in enumerate(b"0123456789abcdef"):
    _DIGITS[_c] = _DIGITS[ord(chr(_c).upper())] = _i


def _hexadecimal(raw: pa.Array) -> pa.Array:
    there = raw.drop_null()
    lengths = pc.binary_length(there).to_numpy(zero_copy_only=False)
    if (lengths != 8).any():
        raise pa.ArrowInvalid("not 8 digits")
    _, at, text = there.buffers()
    first = int(np.frombuffer(at, dtype=np.int32)[there.offset]) if len(there) else 0
    data = np.frombuffer(text or b"", dtype=np.uint8)[first : first + 8 * len(there)].reshape(-1, 8)
    digits = _DIGITS[data].astype(np.uint32)
    if (digits == 255).any():
        raise pa.ArrowInvalid("not hexadecimal")
    found = (digits << np.arange(28, -4, -4, dtype=np.uint32)).sum(1, dtype=np.uint32)
    mask = raw.is_null().to_numpy(zero_copy_only=False)
    values = np.zeros(len(raw), dtype=np.uint32)
    values[~mask] = found
    return pa.array(values, mask=mask)
