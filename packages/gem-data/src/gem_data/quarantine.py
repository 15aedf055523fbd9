"""Rows that features refuse, kept with the reason instead of dropped."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pyarrow as pa

from gem_data.columns import Chunk
from gem_data.files import Reader
from gem_data.writer import write_parquet


def write(folder: str, chunk: Chunk, reader: Reader) -> Path:
    """Write the refused rows of ``chunk``, all their columns and why, to one Parquet file; the same rows always give the same file.

    :raises DataError: the folder cannot be written (a full disk, say). Nothing half-written is left behind.
    """
    rows = sorted(chunk.reasons)
    at = [chunk.row_in_group(row) for row in rows]
    table = reader.row_group(chunk.file, chunk.row_group, chunk.file.leaves).take(pa.array(at, pa.int64()))
    first = chunk.file.first_row(chunk.row_group)
    table = table.append_column("_reason", pa.array([chunk.reasons[row] for row in rows], pa.string()))
    table = table.append_column("_file", pa.array([chunk.file.path] * len(rows), pa.string()))
    table = table.append_column("_row", pa.array([first + a for a in at], pa.int64()))
    stem = Path(chunk.file.path).stem
    tag = hashlib.sha256(chunk.file.path.encode()).hexdigest()[:8]
    target = Path(folder) / f"{stem}-{tag}-rg{chunk.row_group}.parquet"
    write_parquet(target, table.schema, [table])
    return target
