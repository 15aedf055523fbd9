"""Writing Parquet files and configuration files, the same bytes every time."""

from __future__ import annotations

import fcntl
import logging
import os
import shlex
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import tomli_w

from gem_core.config.features import Features
from gem_core.errors import DataError

_HEAD = "# Run it where this file is, or name its folder"
UNFINISHED = ".gem-unfinished"
"""In a folder of data while it is written, and if that did not come to its end: the command that writes."""

_log = logging.getLogger(__name__)


def write_parquet(path: Path, schema: pa.Schema, tables: Iterable[pa.Table]) -> int:
    """Write the tables, one row group each, with page checksums; the file appears only when it is complete. Returns the rows.

    :raises DataError: the file cannot be written.
    """
    rows = 0
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with pq.ParquetWriter(temporary, schema, compression="zstd", write_page_checksum=True) as writer:
            for table in tables:
                writer.write_table(table, row_group_size=max(1, table.num_rows))
                rows += table.num_rows
        os.replace(temporary, path)
    except OSError as error:
        raise DataError(
            f"the file cannot be written: {error.strerror or error}", where=str(path), fix="free space, or choose another folder"
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    return rows


def features_toml(features: Features) -> dict[str, Any]:
    """The ``[features]`` table without what is left at its default."""
    table: dict[str, Any] = features.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    return table


def config_toml(
    name: str,
    features: Features,
    splits: dict[str, Any],
    group: str | None,
    *,
    model: dict[str, Any] | None = None,
    source: str = "parquet",
    evaluation: dict[str, Any] | None = None,
) -> str:
    """A configuration that trains on files ``splits`` (split -> path or paths relative to ``root``, the folder of the file; filters too).

    ``model`` is the ``[model]`` table; None: `tiny` of GEM. ``splits`` may hold further options of the ``source``; ``evaluation`` is added
    to ``[eval]``.
    """
    data = {
        "run": {"name": name},
        "data": {"source": source, source: {"root": ".", **splits}},
        "features": features_toml(features),
        "model": model or {"name": "gem", "preset": "tiny"},
        "eval": {**({"group": group} if group else {}), **(evaluation or {})},
    }
    body = tomli_w.dumps({k: v for k, v in data.items() if v})
    seal = f"# {zlib.crc32(body.encode()):08x}: a file that was edited is not written over"
    return f"{_HEAD}: gemrec train config.toml --set data.{source}.root=FOLDER\n{seal}\n\n{body}"


def check_free(out: Path) -> None:
    """Before data is written with its configuration into ``out``: a folder of Parquet files that this package did not write is somebody's.

    :raises DataError: it is one, or somebody has edited the configuration.
    """
    config = out / "config.toml"
    if config.is_file() and config.read_bytes().startswith(_HEAD.encode()):
        if _edited(config.read_bytes()):
            fix = "choose another --out, or move it and the Parquet files away; nothing was written"
            raise DataError("the configuration that is there was edited", where=str(config), fix=fix)
        return
    found = sorted(path.name for path in (*out.glob("*.parquet"), *out.glob("config.toml")))
    if found:
        fix = "choose another --out, or remove them"
        raise DataError(f"the folder holds files that would be written over: {', '.join(found[:4])}", where=str(out), fix=fix)


def write_config(out: Path, text: str) -> None:
    """``config.toml`` of a folder of data.

    :raises DataError: there is one that somebody has edited.
    """
    path = out / "config.toml"
    there = path.read_bytes() if path.is_file() else text.encode()
    if there != text.encode() and _edited(there):
        fix = "move it away and run the command again; the data is written already"
        raise DataError("the configuration that is there was edited", where=str(path), fix=fix)
    write_text(path, text)


def _edited(text: bytes) -> bool:
    head, _, body = text.partition(b"\n\n")
    return f"# {zlib.crc32(body):08x}:".encode() not in head


@contextmanager
def unfinished(out: Path) -> Iterator[None]:
    """Around the writing of data with its configuration into ``out``: a file says meanwhile, and after a kill or an error, that the folder
    is not complete and whose it is, so that it is read by nobody and the next command may write there.

    :raises DataError: the folder is somebody's (`check_free`), another process writes there, or it cannot be written.
    """
    marker, was_there, before = out / UNFINISHED, out.is_dir(), _data(out)
    began = marker.read_text(errors="replace").strip() if marker.is_file() else None
    if began is None:
        check_free(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = open(marker, "a+")  # noqa: SIM115 (closed below: the lock goes with it)
    except OSError as error:
        fix = "free space, or choose another folder"
        raise DataError(f"the folder cannot be written: {error.strerror or error}", where=str(out), fix=fix) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fix = "wait until it has ended, or choose another --out"
            raise DataError(f"another process writes into the folder: {began or 'just begun'}", where=str(out), fix=fix) from None
        except OSError as error:
            _log.info("%s cannot be locked: %s", marker, error.strerror)
        if began is not None:
            _log.warning("%s: what %s was writing is not complete; all is written anew", out, began or "another command")
            for part in out.rglob(".*.part"):
                part.unlink()
        file.truncate(0)
        file.write(shlex.join(["gemrec", *sys.argv[1:]]) + "\n")
        file.flush()
        try:
            yield
        except BaseException:
            now = _data(out)
            # What was complete and has not been touched, as after a mistyped path of the input, still is.
            if not now or (began is None and now == before):
                marker.unlink()
                if not was_there:
                    with suppress(OSError):  # something else is there
                        out.rmdir()
            raise
        marker.unlink()


def _data(out: Path) -> dict[Path, tuple[int, int]]:
    """Parquet files below ``out``, each with what a file that was written anew has of its own."""
    return {path: (found.st_ino, found.st_mtime_ns) for path in out.rglob("*.parquet") for found in [path.lstat()]}


def write_text(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DataError(
            f"the file cannot be written: {error.strerror or error}", where=str(path), fix="free space, or choose another folder"
        ) from error
