"""``gemrec predict``: Parquet files in, one Parquet file with a prediction for every row out, in the order of the rows.

Row groups are decoded while those before them are computed, small ones several together; memory depends on the largest row group, not on
the number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import torch

from gem_core.errors import ConfigError, DataError
from gem_core.train.predict import Predictor
from gem_data.block import Block
from gem_data.columns import Chunk, carried_columns, check_alike, locate
from gem_data.decode import Decoder
from gem_data.files import DataFile, Reader, find_files
from gem_data.prefetch import Ahead
from gem_data.writer import write_parquet

BATCH = 32_768
"""Rows handed to the model at once; it sorts them by length and cuts them further, so more of them waste less."""

EVENTS = 524_288
"""Events that are enough of them, so that reading and computing overlap where histories are long."""


@dataclass(frozen=True)
class Predicted:
    """What was written: ``rows``, and how many of them have no prediction because a feature with policy "quarantine" refused them."""

    rows: int
    refused: int


def write_predictions(
    predict: Predictor,
    paths: Sequence[str] | Sequence[DataFile],
    out: Path,
    *,
    columns: Sequence[str] = (),
    logits: bool = False,
    tasks: Sequence[str] | None = None,
    result: str = "probability",
) -> Predicted:
    """Write ``out`` with the run's sample id (where the input has it), ``columns`` of the input as they are, and for each task
    ``<task>_probability`` float32 (and ``<task>_logit``); rows in the order of the input. Labels are not needed, row filters not applied.

    :param tasks: of the run's tasks those to write; None: all. :param result: what stands for "probability" in the columns' names.

    :raises DataError: files that cannot be read, rows that the features refuse, columns that are missing or appear twice.
    """
    opened = [path for path in paths if isinstance(path, DataFile)]
    files = opened or find_files([str(path) for path in paths])
    if any(isinstance(file.filesystem, pafs.LocalFileSystem) and _same(Path(file.path), out) for file in files):
        raise DataError("the predictions would take the place of their input", where=str(out), fix="choose another --out")
    decoder = Decoder(predict.features, predict.hashed)
    for file in files:
        decoder.check(file)
    check_alike(files, decoder.columns, carried_columns(decoder.features))
    kept = _columns(predict, files, columns)
    wanted = [i for i, task in enumerate(predict.tasks) if tasks is None or task in tasks]
    results = [f"{predict.tasks[i]}_{kind}" for i in wanted for kind in (result, *(("logit",) if logits else ()))]
    clash = [name for name in results if name in kept]
    if clash:
        raise ConfigError(f"the input's column {clash[0]!r} has the name of a result", where="--column", fix="leave it out")
    types = [_type(files[0], name) for name in kept]
    schema = pa.schema([*zip(kept, types), *((name, pa.float32()) for name in results)])
    refused = 0

    def tables() -> Iterator[pa.Table]:
        nonlocal refused
        make = _decoded(files, decoder, kept)
        ahead = Ahead(lambda: make, 1, "gem-data predict")
        try:
            for carried, block in ahead:
                scores = _scores(predict, block)
                refused += int(scores.isnan().any(1).sum()) if block.good is not None else 0
                arrays = [_as(carried[name], kind, name) for name, kind in zip(kept, types)]
                yield pa.table([*arrays, *_results(scores[:, wanted], block, logits)], schema=schema)
        finally:
            ahead.close()

    rows = write_parquet(out, schema, tables())
    return Predicted(rows, refused)


def _same(a: Path, b: Path) -> bool:
    return a.exists() and b.exists() and a.samefile(b)


def _columns(predict: Predictor, files: list[DataFile], columns: Sequence[str]) -> list[str]:
    sample_id = predict.run.resolved.config.features.sample_id
    kept = list(dict.fromkeys(columns))
    if sample_id is not None and sample_id not in kept and sample_id in files[0].schema.names:
        kept.insert(0, sample_id)
    for file in files:
        for name in kept:
            locate(file, name)
    return kept


def _type(file: DataFile, name: str) -> pa.DataType:
    return Chunk(file, 0, file.schema.empty_table(), 0).array(name).type


def _decoded(files: list[DataFile], decoder: Decoder, kept: list[str]) -> Iterator[tuple[dict[str, pa.ChunkedArray], Block]]:
    """The kept columns and the features of row groups, together until they have ``BATCH`` rows or ``EVENTS`` events."""
    held: list[tuple[list[pa.Array], Block]] = []

    def joined() -> tuple[dict[str, pa.ChunkedArray], Block]:
        columns = zip(kept, zip(*(arrays for arrays, _ in held)))
        found = {name: _joined(name, parts) for name, parts in columns}, Block.join([block for _, block in held])
        held.clear()
        return found

    with closing(Reader()) as reader:
        for file in files:
            leaves = decoder.leaves(file, tuple(kept))
            for index, rows in enumerate(file.rows):
                if rows:
                    chunk = Chunk(file, index, reader.row_group(file, index, leaves), rows)
                    held.append(([chunk.array(name) for name in kept], decoder.decode(chunk)))
                if sum(block.size for _, block in held) >= BATCH or sum(_events(block) for _, block in held) >= EVENTS:
                    yield joined()
    if held:
        yield joined()


def _events(block: Block) -> int:
    return sum(int(bag.offsets[-1]) for name, bag in block.bags.items() if name.startswith("sequences."))


def _joined(name: str, parts: Sequence[pa.Array]) -> pa.ChunkedArray:
    """The parts in the type that the first has."""
    try:
        return pa.chunked_array([part.cast(parts[0].type) for part in parts])
    except pa.ArrowException as error:
        raise _unlike(name, parts[0].type, error) from error


def _scores(predict: Predictor, block: Block) -> torch.Tensor:
    """Logits ``[n, T]``; NaN in refused rows."""
    parts = []
    for start in range(0, block.size, BATCH):
        rows = slice(start, min(start + BATCH, block.size))
        found = predict(block.take(rows).to_batch(predict.features))
        if block.good is not None:
            whole = found.new_full((rows.stop - start, found.shape[1]), torch.nan)
            whole[torch.from_numpy(np.flatnonzero(block.good[rows]))] = found
            found = whole
        parts.append(found)
    return torch.cat(parts)


def _results(scores: torch.Tensor, block: Block, logits: bool) -> list[pa.Array]:
    missing = None if block.good is None else ~block.good
    arrays = []
    for task in scores.unbind(1):
        shown = [torch.sigmoid(task.double()).float(), *([task] if logits else [])]
        arrays += [pa.array(values.numpy(), mask=missing) for values in shown]
    return arrays


def _as(array: pa.ChunkedArray, kind: pa.DataType, name: str) -> pa.ChunkedArray:
    """``array`` in the type that the first file has."""
    try:
        return array.cast(kind)
    except pa.ArrowException as error:
        raise _unlike(name, kind, error) from error


def _unlike(name: str, kind: pa.DataType, error: Exception) -> DataError:
    return DataError(
        f"the column {name!r} has the type {kind} in the first file and another later: {error}",
        fix="write the files alike, or leave it out",
    )
