"""Finding, opening and reading Parquet files, with every failure named."""

from __future__ import annotations

import glob
import logging
import os
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from gem_core.errors import DataError
from gem_data.writer import UNFINISHED

Path = str | os.PathLike[str]
_MAGIC = b"PAR1"
_OPEN_AT_ONCE = 4
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DataFile:
    """One readable Parquet file as it was when the source was made.

    ``rows``: of each row group; ``leaves``: dotted paths of its leaf columns; ``partition``: from ``key=value`` folders;
    ``places``: where columns were found (`columns.locate`).
    """

    path: str
    filesystem: pafs.FileSystem
    size: int
    modified: int | None
    rows: tuple[int, ...]
    schema: pa.Schema
    leaves: tuple[str, ...]
    partition: tuple[tuple[str, str], ...] = ()
    places: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def first_row(self, row_group: int) -> int:
        """Number of the row group's first row within the file."""
        return sum(self.rows[:row_group])


def find_files(paths: Path | Sequence[Path], root: str | None = None, section: str = "data.parquet") -> list[DataFile]:
    """Open all files under ``paths`` (files, folders, patterns with ``*``, fsspec URLs) and read their footers.

    :param root: ``root`` of the ``section`` of the configuration, where relative paths start; None: the working folder.

    :raises DataError: a path that matches nothing, a folder without Parquet files, a file that is not Parquet or is cut off.
    """
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    if not paths:
        raise DataError("no paths were given", fix="name at least one file, folder or pattern")
    found: list[tuple[pafs.FileSystem, str, str]] = []
    for path in paths:
        found += _expand(path, root, section)
    unique: dict[str, tuple[pafs.FileSystem, str, str]] = {}
    again = []
    for place in found:
        key = os.path.realpath(place[1]) if isinstance(place[0], pafs.LocalFileSystem) else place[1]
        if unique.setdefault(key, place) is not place:
            again.append(place[1])
    if again:
        shown = ", ".join(again[:3]) + (", ..." if len(again) > 3 else "")
        _log.warning("%d paths lead to files that are read already; each is read once: %s", len(again), shown)
    for folder in sorted(
        {f for system, path, base in unique.values() if isinstance(system, pafs.LocalFileSystem) for f in _above(path, base)}
    ):
        with suppress(OSError), open(os.path.join(folder, UNFINISHED)) as file:
            command = file.read().strip()
            what = "the files are not complete: the command that writes them was stopped, or has not ended"
            raise DataError(what, where=folder, fix=f"run it again, or wait for it: {command}")
    with ThreadPoolExecutor(min(8, len(unique))) as pool:
        return list(pool.map(lambda f: _footer(*f), unique.values()))


def _above(path: str, base: str) -> list[str]:
    """The folder of a file, and those above it up to the one that was named."""
    folders = [os.path.dirname(path)]
    while base and len(folders[-1]) > len(base):
        folders.append(os.path.dirname(folders[-1]))
    return folders


def _expand(path: Path, root: str | None, section: str) -> list[tuple[pafs.FileSystem, str, str]]:
    """(filesystem, path in it, base folder for partitions) of every file that ``path`` stands for, sorted."""
    filesystem, inner, full = filesystem_of(path, root or ".")
    start = "this folder is" if root is None else f'[{section}] root = "{root}" is'
    fix = "check the path" if "://" in full or os.path.isabs(path) else f"check the path; {start} {os.path.abspath(root or '.')}"
    local = isinstance(filesystem, pafs.LocalFileSystem)
    if local and any(c in inner for c in "*?[") and not os.path.exists(inner):
        matches = sorted(glob.glob(inner, recursive=True))
        if not matches:
            raise DataError("no file matches the pattern", where=full, fix=fix)
        return [f for match in matches for f in _expand(match, None, section)]
    info = _info(filesystem, inner, full)
    if info.type == pafs.FileType.NotFound:
        raise DataError("there is no such file or folder", where=full, fix=fix)
    if info.type == pafs.FileType.File:
        return [(filesystem, info.path, "")]
    if info.type != pafs.FileType.Directory:
        raise DataError("this is neither a file nor a folder", where=full, fix=fix)
    files = sorted(_walk(inner) if local else _listed(filesystem, inner, full))
    if not files:
        raise DataError(
            "the folder holds no Parquet file", where=full, fix="name a folder with *.parquet files, or run 'gemrec data convert' first"
        )
    return [(filesystem, f, inner) for f in files]


def _listed(filesystem: pafs.FileSystem, inner: str, shown: str) -> list[str]:
    """Parquet files below a folder; hidden ones and those that writers still work on (``._``) are none."""
    try:
        below = filesystem.get_file_info(pafs.FileSelector(inner, recursive=True))
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"the folder cannot be read: {error}", where=shown, fix="check permissions and the connection") from error
    hidden = tuple(f"{part.path}/" for part in below if part.base_name[:1] in "._")
    return [f.path for f in below if f.type == pafs.FileType.File and _is_ours(f.base_name) and not f.path.startswith(hidden)]


def _walk(folder: str) -> list[str]:
    """`_listed` of the local file system, each folder once: links may lead back to where they are."""
    found: list[str] = []
    todo, seen = [folder], {os.path.realpath(folder)}
    while todo:
        try:
            with os.scandir(todo.pop()) as listed:
                entries = sorted((entry for entry in listed if entry.name[:1] not in "._"), key=lambda e: (e.is_symlink(), e.name))
        except OSError as error:
            fix = "check its permissions"
            raise DataError(f"the folder cannot be read: {error.strerror}", where=error.filename or folder, fix=fix) from error
        for entry in entries:
            if entry.is_dir():
                real = os.path.realpath(entry.path)
                if real not in seen:
                    seen.add(real)
                    todo.insert(0, entry.path)
            elif entry.is_file() and _is_ours(entry.name):
                found.append(entry.path)
            elif _is_ours(entry.name):
                what = "the link leads nowhere" if entry.is_symlink() else "this is neither a file nor a folder"
                raise DataError(what, where=entry.path, fix="mend or remove it")
    return found


def _is_ours(name: str) -> bool:
    return name.endswith((".parquet", ".pq", ".parq")) and name[:1] not in "._"


def filesystem_of(path: Path, root: str) -> tuple[pafs.FileSystem, str, str]:
    """(filesystem, path in it, whole path) of a path that may be relative to ``root``."""
    path = os.fspath(path)
    full = path if "://" in path or os.path.isabs(path) else (f"{root.rstrip('/')}/{path}" if "://" in root else os.path.join(root, path))
    return *_filesystem(full), full


def _filesystem(path: str) -> tuple[pafs.FileSystem, str]:
    if "://" not in path:
        return pafs.LocalFileSystem(), path
    try:
        if path.startswith("file://"):
            filesystem, inner = pafs.FileSystem.from_uri(path)
            return filesystem, inner
        import fsspec

        fs, inner = fsspec.core.url_to_fs(path)
        return pafs.PyFileSystem(pafs.FSSpecHandler(fs)), inner
    except ImportError as error:
        raise DataError(
            f"the URL needs a package that is not installed: {error}", where=path, fix="pip install fsspec and the named package"
        ) from error
    except (ValueError, pa.ArrowException, OSError) as error:
        raise DataError(
            f"the URL cannot be used: {error}", where=path, fix="use a local path or an fsspec URL such as s3://bucket/folder"
        ) from error


def _info(filesystem: pafs.FileSystem, inner: str, shown: str) -> pafs.FileInfo:
    try:
        return filesystem.get_file_info(inner)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"the path cannot be read: {error}", where=shown, fix="check permissions and the connection") from error


def _footer(filesystem: pafs.FileSystem, path: str, base: str) -> DataFile:
    info = _info(filesystem, path, path)
    if info.type != pafs.FileType.File:
        raise DataError("the file has vanished", where=path, fix="keep the files in place while they are read")
    with _open(filesystem, path, info.size) as file:
        metadata = file.metadata
        rows = tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
        if sum(rows) != metadata.num_rows or min(rows, default=0) < 0:
            raise damaged(path, f"the footer promises {metadata.num_rows} rows, its row groups {sum(rows)}")
        leaves = tuple(metadata.schema.column(i).path for i in range(metadata.num_columns))
        folders = os.path.dirname(path)[len(base) :].split("/") if base else []
        partition = tuple((unquote(k), unquote(v)) for k, eq, v in (p.partition("=") for p in folders) if eq)
        return DataFile(path, filesystem, info.size, info.mtime_ns, rows, file.schema_arrow, leaves, partition)


def damaged(path: str, why: str) -> DataError:
    return DataError(
        f"the Parquet file is damaged: {why}", where=path, fix="write or copy the file again; check the disk if it happens with other files"
    )


def _open(filesystem: pafs.FileSystem, path: str, size: int) -> pq.ParquetFile:
    stream = None
    try:
        stream = filesystem.open_input_file(path)
        # Reading ahead pays over a network; a local file would only sit in memory twice.
        remote = not isinstance(filesystem, pafs.LocalFileSystem)
        return pq.ParquetFile(stream, pre_buffer=remote, page_checksum_verification=True)
    except (pa.ArrowException, OSError, ValueError, MemoryError, OverflowError) as error:
        reason = error
    if stream is None:
        raise DataError(f"the file cannot be opened: {reason}", where=path, fix="check that it exists and may be read")
    with stream:
        head = stream.read_at(4, 0) if size >= 4 else b""
        tail = stream.read_at(4, size - 4) if size >= 8 else b""
    if not size:
        raise DataError("the file is empty (0 bytes)", where=path, fix="remove it, or write it again: even a table of no rows has a footer")
    if head != _MAGIC:
        raise DataError(
            "this is not a Parquet file", where=path, fix="name Parquet files; `gemrec data import` makes them of CSV and JSON lines"
        )
    if tail != _MAGIC:
        raise DataError(
            f"the Parquet file is cut off: {size} bytes without a footer at the end",
            where=path,
            fix="write or copy the file again, completely",
        )
    raise damaged(path, str(reason)) from reason


class Reader:
    """Reads row groups; keeps a few files open. Not thread-safe: one a thread."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, pq.ParquetFile] = OrderedDict()

    def row_group(self, file: DataFile, index: int, leaves: Sequence[str]) -> pa.Table:
        """Row group ``index`` with the columns of ``leaves`` (dotted paths).

        :raises DataError: the file has changed since the source was made, or its pages cannot be decoded.
        """
        try:
            table = self._read(self._file(file), file, index, leaves)
            if isinstance(file.filesystem, pafs.LocalFileSystem) and os.path.exists(file.path):
                self._check_unchanged(file)  # one that was written over in place may still decode
            for column in table.columns:
                column.validate(full=True)
        except (pa.ArrowException, OSError, ValueError, MemoryError, OverflowError) as error:
            self._check_unchanged(file)
            raise damaged(file.path, f"row group {index}: {error}") from error
        if leaves and table.num_rows != file.rows[index]:
            raise damaged(file.path, f"row group {index} holds {table.num_rows} rows, its footer says {file.rows[index]}")
        return table

    @staticmethod
    def _read(source: pq.ParquetFile, file: DataFile, index: int, leaves: Sequence[str]) -> pa.Table:
        """All columns, as many lists at a time as there are threads: decoding needs about as much memory again as what it decodes.

        Sizes of columns would divide better, but pyarrow ends the process when it is asked for the metadata of a damaged column chunk.
        """
        columns: dict[str, list[str]] = {}
        for leaf in leaves:
            columns.setdefault(_top(file, leaf), []).append(leaf)
        nested = [own for top, own in columns.items() if pa.types.is_nested(file.schema.field(top).type)]
        flat = [leaf for top, own in columns.items() if not pa.types.is_nested(file.schema.field(top).type) for leaf in own]
        width = pa.cpu_count()
        parts = [[leaf for own in nested[i : i + width] for leaf in own] for i in range(0, len(nested), width)]
        parts = [flat + parts[0]] if len(parts) == 1 else [flat, *parts] if flat or not parts else parts
        tables = [source.read_row_group(index, columns=part, use_threads=True) for part in parts]
        for more in tables[1:]:
            for name, column in zip(more.schema.names, more.columns):
                tables[0] = tables[0].append_column(name, column)
        return tables[0]

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def _file(self, file: DataFile) -> pq.ParquetFile:
        held = self._open.pop(file.path, None)
        if held is None:
            self._check_unchanged(file)
            held = _open(file.filesystem, file.path, file.size)
            if len(self._open) >= _OPEN_AT_ONCE:
                self._open.popitem(last=False)[1].close()
        self._open[file.path] = held
        return held

    @staticmethod
    def _check_unchanged(file: DataFile) -> None:
        now = _info(file.filesystem, file.path, file.path)
        if now.type != pafs.FileType.File:
            raise DataError("the file has vanished while it was in use", where=file.path, fix="put it back and resume the run")
        if now.size != file.size or (file.modified is not None and now.mtime_ns != file.modified):
            raise DataError(
                "the file was replaced while it was in use",
                where=file.path,
                fix="put the old file back and resume, or start a new run; write new data under a new name",
            )


def _top(file: DataFile, leaf: str) -> str:
    """The column that a leaf belongs to. A column's own name may hold dots."""
    names: list[str] = file.schema.names
    return max((name for name in names if leaf == name or leaf.startswith(f"{name}.")), key=len)
