"""A flat log, one row an impression, as Parquet: with histories, where the log says whose rows they are and when they were.

A row's history is its user's events of a strictly earlier time, the oldest first: what was known when the impression was served, as long as
the columns of an event were. Rows of one user and one time do not see each other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.json as json
import pyarrow.parquet as pq
from numpy.typing import NDArray

from gem_core.errors import DataError
from gem_data.arrow import UNITS, Ints, unit_of
from gem_data.columns import folder_value
from gem_data.filters import Filter
from gem_data.lines import ROW_GROUP
from gem_data.writer import check_free, write_parquet

USER, TIME = b"gem.user", b"gem.time"
"""Keys of the written file's metadata: whose rows they are and when they were, as `gemrec data inspect` asks."""
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_JSON = (".jsonl", ".ndjson", ".json")
_MARKS = (b",", b";", b"\t", b"|")
_BLOCK = 64 << 20
_OURS = (946_684_800, 4_102_444_800)
"""The years 2000 to 2100 in seconds."""
EVENTS = 1 << 22
PREFIX = "history_"


def import_log(
    paths: Sequence[Path],
    out: Path,
    *,
    user: str | None = None,
    time: str | None = None,
    events: Sequence[str] = (),
    where: str | None = None,
    rows: str | None = None,
    max_history: int = 512,
    text: Sequence[str] = (),
) -> tuple[int, int]:
    """Write ``out/log.parquet``, rows in the order of ``time`` where it is given; returns (rows, events in all histories).

    :param paths: CSV (by commas, semicolons, tabs or bars), TSV (both also as .gz), JSON lines or Parquet files, or folders of them, in
        which folders ``key=value`` are columns too; all have the same columns.
    :param time: timestamps, dates, or numbers since 1970; numbers with fractions are written as timestamps.
    :param events: columns of an event; ``history_NAME`` lists their values, ``history_TIME`` the times.
    :param where: row filter: which rows become events of later histories (all). Numbers are compared as they are in the log.
    :param rows: row filter: which rows are written, their histories made of all (all).
    :param text: columns of text files that are text, whatever they look like (zip codes).
    :raises DataError: files that cannot be read or differ, a column that is not there, rows without user or time, times that are no
        ISO text or of several units, a ``where`` or ``rows`` that no row matches.
    """
    check_free(out)
    parts = [part for path in paths for part in _read(path, text)]
    _check_columns(parts)
    unknown = [name for name in text if name not in parts[0][1].column_names]
    if unknown:
        raise _missing(unknown[0], parts[0][1], paths)
    try:
        table = pa.concat_tables([part for _, part in parts], promote_options="permissive")
    except pa.ArrowException as error:
        fix = "write all files with the same types, or read a column of text files as text: --text COLUMN"
        raise DataError(f"the files do not fit together: {error}", where=_names(paths), fix=fix) from error
    if not table.num_rows:
        raise DataError("the log holds no row", where=_names(paths), fix="check what wrote it, and that these are the files you mean")
    if user is None or time is None or not events:
        missing = [option for option, given in (("--user", user), ("--time", time), ("--event", events)) if not given]
        if len(missing) < 3 or where is not None or rows is not None:
            fix = "give all three, or none and neither --where nor --rows"
            raise DataError(f"histories need {', '.join(missing)} too", where=_names(paths), fix=fix)
        return write_parquet(out / "log.parquet", table.schema, _groups(table)), 0
    clash = sorted({PREFIX + name for name in (*events, time)} & set(table.column_names))
    if clash:
        raise DataError(f"the log has a column {clash[0]!r} already", where=_names(paths), fix="rename it, or leave it out")
    table = _with_read_times(table, time, paths)
    # before numbers become timestamps: a filter compares them as they are written
    histories = None if where is None else _mask(table, where, paths, "--where", "all histories are empty")
    written = None if rows is None else _mask(table, rows, paths, "--rows", "none would be written")
    table = _with_whole_times(table, time, paths)
    _check_units(_times(table, time, paths), time, paths)
    sort = np.argsort(_times(table, time, paths), kind="stable")
    table = table.take(pa.array(sort))
    who = _complete(table, user, paths).dictionary_encode().indices.to_numpy().astype(np.int64)
    moments, when = np.unique(_times(table, time, paths), return_inverse=True)
    order = np.arange(table.num_rows) if histories is None else np.flatnonzero(histories[sort])
    order = order[np.lexsort((when[order], who[order]))]
    # one number a (user, time), in the order of both: the events before a row are those of smaller numbers, down to the user's first
    key, first = who * moments.size + when, who * moments.size
    ends = np.searchsorted(key[order], key)
    begins = np.maximum(np.searchsorted(key[order], first), ends - max_history)
    made = {PREFIX + name: _column(table, name, paths).take(pa.array(order)) for name in dict.fromkeys((*events, time))}
    schema = table.schema
    for name, values in made.items():
        schema = schema.append(pa.field(name, pa.list_(values.type)))
    schema = schema.with_metadata({**(schema.metadata or {}), USER: user.encode(), TIME: time.encode()})
    if written is not None:
        chosen = np.flatnonzero(written[sort])
        table, begins, ends = table.take(pa.array(chosen)), begins[chosen], ends[chosen]
    count = write_parquet(out / "log.parquet", schema, _with_histories(table, made, begins, ends, schema))
    return count, int((ends - begins).sum())


def _check_columns(parts: Sequence[tuple[Path, pa.Table]]) -> None:
    """All files have the same columns, in any order; one that a file lacks would become nulls in its rows."""
    first, known = parts[0][0], set(parts[0][1].column_names)
    for file, part in parts:
        names = part.column_names
        twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
        if twice is not None:
            raise DataError(f"several columns are called {twice!r}", where=str(file), fix="rename all but one")
        for there, other, lacking in ((first, file, known - set(names)), (file, first, set(names) - known)):
            if lacking:
                raise DataError(
                    f"the files have different columns: {min(lacking)!r} of {there} is not there",
                    where=str(other),
                    fix="write it in all files (in JSON lines as null, in one row at least), or import them apart",
                )


def _read(path: Path, text: Sequence[str]) -> Iterator[tuple[Path, pa.Table]]:
    """Each file with its rows."""
    if path.is_dir():
        inside = [p for p in sorted(path.rglob("*")) if p.is_file() and _form(p) is not None]
        if not inside:
            raise DataError("the folder holds no log", where=str(path), fix="name files ending in .csv, .tsv, .jsonl or .parquet")
        for file in inside:
            for _, table in _read(file, text):
                yield file, _with_folders(table, file.relative_to(path).parts[:-1])
        return
    form = _form(path)
    try:
        if form == ".parquet":
            yield path, pq.read_table(path, partitioning=None)
        elif form in _JSON:
            yield path, _read_json(path, text)
        elif form is not None:
            table = csv.read_csv(
                path,
                read_options=csv.ReadOptions(block_size=_BLOCK),
                parse_options=csv.ParseOptions(delimiter=_delimiter(path, form)),
                convert_options=csv.ConvertOptions(column_types=dict.fromkeys(text, pa.string()), strings_can_be_null=True),
            )
            _check_text(path, table)
            yield path, table
        else:
            raise DataError("this is no log that can be read", where=str(path), fix="name files ending in .csv, .tsv, .jsonl or .parquet")
    except (pa.ArrowException, OSError) as error:
        what, fix = str(error), _cure(path, str(error))
        if isinstance(error, OSError) and error.errno:
            what, fix = os.strerror(error.errno), "check the path and its permissions"
        raise DataError(f"the file cannot be read: {what}", where=str(path), fix=fix) from error


def _cure(path: Path, what: str) -> str:
    """What to do about what pyarrow says of a file."""
    if what.startswith("Empty "):
        return "check what wrote it: it holds no line, not even the names of columns"
    if _form(path) == ".parquet":
        return "write or copy the file again"
    if "columns, got" in what:
        return "mend that line; a field that holds the separator, a quote or a line end stands in quotes"
    if _form(path) not in _JSON:
        return "mend the file; a column of numbers that holds other text too is read as text by --text COLUMN"
    if "to array in row 0" in what:
        return f"write one object a line in place of an array of all, as in jq -c '.[]' {path.name} > {path.stem}.jsonl"
    return "mend the file: one object a line, and a name's values of one type (text, or numbers) in all lines"


def _check_text(path: Path, table: pa.Table) -> None:
    """:raises DataError: text in another encoding, whose bytes would become ids that UTF-8 of the same words does not have."""
    try:
        kinds = dict(zip(table.column_names, table.schema.types))
        at = next((f"column {name!r}" for name, kind in kinds.items() if pa.types.is_binary(kind)), None)
    except UnicodeDecodeError:
        at = "names of columns"
    if at is not None:
        raise DataError("the text is not UTF-8", where=f"{path}, {at}", fix="convert the file, as in iconv -f LATIN1 -t UTF-8")


def _delimiter(path: Path, form: str) -> str:
    """What separates fields: in .csv files whose header has no comma, the semicolons, tabs or bars that it has."""
    if form != ".csv":
        return _DELIMITERS[form]
    with pa.input_stream(str(path)) as file:
        header = file.read(1 << 16).partition(b"\n")[0]
    return next((mark.decode() for mark in _MARKS if mark in header), _DELIMITERS[form])


def _read_json(path: Path, text: Sequence[str]) -> pa.Table:
    """Columns of ``text`` stay what is written: others become times where all their values look like some."""
    how = json.ReadOptions(block_size=_BLOCK)
    table = json.read_json(path, read_options=how)
    kept = [name for name in text if name in table.column_names and table.schema.field(name).type != pa.string()]
    if not kept:
        return table
    schema = pa.schema([(name, pa.string()) for name in kept])
    return json.read_json(path, read_options=how, parse_options=json.ParseOptions(explicit_schema=schema)).select(table.column_names)


def _with_folders(table: pa.Table, folders: Sequence[str]) -> pa.Table:
    """The table, and what folders ``key=value`` say of its rows."""
    for folder in folders:
        key, equals, value = (unquote(part) for part in folder.partition("="))
        if equals and key not in table.column_names:
            table = table.append_column(key, pa.repeat(folder_value(value), table.num_rows))
    return table


def _form(path: Path) -> str | None:
    suffixes = [s.lower() for s in path.suffixes]
    last = suffixes[-2] if suffixes[-1:] == [".gz"] and len(suffixes) > 1 else suffixes[-1] if suffixes else ""
    return last if last in (*_DELIMITERS, *_JSON, ".parquet") else None


def _column(table: pa.Table, name: str, paths: Sequence[Path]) -> pa.Array:
    """The column in one piece.

    :raises DataError: it is not there.
    """
    if name not in table.column_names:
        raise _missing(name, table, paths)
    return pa.concat_arrays(table[name].chunks) if table[name].num_chunks else pa.array([], table[name].type)


def _missing(name: str, table: pa.Table, paths: Sequence[Path]) -> DataError:
    near = get_close_matches(name, table.column_names, 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return DataError(
        f"there is no column {name!r}", where=_names(paths), fix=f"{hint}the log has {', '.join(map(repr, table.column_names))}"
    )


def _complete(table: pa.Table, name: str, paths: Sequence[Path]) -> pa.Array:
    column = _column(table, name, paths)
    if column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise DataError(
            f"{column.null_count:,} rows have no {name!r}, without which they belong to no history",
            where=f"{_names(paths)}, first in row {row}",
            fix="remove these rows, or name another column",
        )
    return column


def _times(table: pa.Table, name: str, paths: Sequence[Path]) -> Ints:
    column = _complete(table, name, paths)
    if pa.types.is_timestamp(column.type) or pa.types.is_date64(column.type) or pa.types.is_integer(column.type):
        return np.asarray(column.cast(pa.int64()), dtype=np.int64)
    if pa.types.is_date32(column.type):
        return np.asarray(column.cast(pa.int32()), dtype=np.int64)
    raise DataError(
        f"the times are of type {column.type}",
        where=f"{_names(paths)}, column {name!r}",
        fix="write them as in 2025-10-09T08:53:34Z, or as whole numbers since 1970",
    )


def _with_read_times(table: pa.Table, name: str, paths: Sequence[Path]) -> pa.Table:
    """Times that are written as ISO text become timestamps."""
    column = _complete(table, name, paths)
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        for kind in (pa.timestamp("us"), pa.timestamp("us", "UTC")):
            with suppress(pa.ArrowInvalid):
                return table.set_column(table.column_names.index(name), name, column.cast(kind))
    return table


def _with_whole_times(table: pa.Table, name: str, paths: Sequence[Path]) -> pa.Table:
    """Times that are written as 1760000000.25 become timestamps, and those as 1760000000.0 whole numbers."""
    column = _complete(table, name, paths)
    if not pa.types.is_floating(column.type) and not pa.types.is_decimal(column.type):
        return table
    numbers = column.cast(pa.float64()).to_numpy()
    whole = (numbers == np.rint(numbers)).all()
    scaled = numbers if whole else numbers * (UNITS["us"] / UNITS[unit_of(numbers.max(initial=0))])
    wrong = np.flatnonzero(~(np.abs(scaled) < 2.0**62))
    if wrong.size:
        where = f"{_names(paths)}, column {name!r}, row {wrong[0]}"
        raise DataError(f"{numbers[wrong[0]]} is no time", where=where, fix="mend the row, or remove it")
    times = pa.array(np.rint(scaled).astype(np.int64))
    return table.set_column(table.column_names.index(name), name, times if whole else times.cast(pa.timestamp("us")))


def _check_units(times: Ints, name: str, paths: Sequence[Path]) -> None:
    """:raises DataError: all numbers are times of our days, but some in another unit, which would put them out of order."""
    of = {unit: (times >= _OURS[0] * scale) & (times < _OURS[1] * scale) for unit, scale in UNITS.items()}
    first = {unit: int(np.argmax(mask)) for unit, mask in of.items() if mask.any()}
    if len(first) > 1 and np.logical_or.reduce(list(of.values())).all():
        seen = ", ".join(f"{times[row]} in row {row} ({unit})" for unit, row in first.items())
        raise DataError(
            f"the times are of several units: {seen}", where=f"{_names(paths)}, column {name!r}", fix="write all of them in one unit"
        )


def _mask(table: pa.Table, text: str, paths: Sequence[Path], option: str, otherwise: str) -> NDArray[np.bool_]:
    """Rows ``[n]`` that the filter ``text`` of an option lets pass.

    :raises DataError: none does.
    """
    chosen = Filter(text)
    for name in chosen.columns:
        _column(table, name, paths)
    mask: NDArray[np.bool_] = chosen.mask(table, _names(paths)).to_numpy(zero_copy_only=False)
    if not mask.any():
        raise DataError(f"no row matches {text!r}, so that {otherwise}", where=_names(paths), fix=f"mend {option}, or leave it out")
    return mask


def _with_histories(table: pa.Table, events: dict[str, pa.Array], begins: Ints, ends: Ints, schema: pa.Schema) -> Iterator[pa.Table]:
    """A row group at a time, so that repeated events take memory for one group only. Row i has the events ``begins[i]`` to ``ends[i]``.

    A group has at most ROW_GROUP rows and EVENTS events, but for a row that has more by itself.
    """
    total = np.concatenate([[0], np.cumsum(ends - begins)])
    start = 0
    while start < table.num_rows:
        most = int(np.searchsorted(total, total[start] + EVENTS, side="right")) - 1
        stop = min(start + ROW_GROUP, max(start + 1, most), table.num_rows)
        begin, end = begins[start:stop], ends[start:stop]
        offsets = total[start : stop + 1] - total[start]
        index = pa.array(np.arange(offsets[-1]) + np.repeat(begin - offsets[:-1], end - begin))
        lists = [pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values.take(index)) for values in events.values()]
        yield pa.Table.from_arrays([*table.slice(start, stop - start).combine_chunks().columns, *lists], schema=schema)
        start = stop


def _groups(table: pa.Table) -> Iterator[pa.Table]:
    for start in range(0, table.num_rows, ROW_GROUP):
        yield table.slice(start, ROW_GROUP).combine_chunks()


def _names(paths: Sequence[Path]) -> str:
    return ", ".join(map(str, paths))
