"""Embedding tables of a run as a file of their own."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from gem_core.errors import CheckpointError
from gem_core.train.offline import run_config
from gem_core.train.runfolder import RunFolder
from gem_core.train.runtime import Runtime
from gem_core.train.state import opened
from gem_core.train.tensorfile import write_tensors


def write_embeddings(run: Path, out: Path, *, step: int | None = None) -> dict[str, tuple[int, int]]:
    """Write the tables of the newest checkpoint, or of that of ``step``, to ``out``; table -> (rows, dim).

    A checkpoint of one process is copied from a map of its file, so the tables need not fit into memory; parts of a sharded one are put
    together there first. The file appears when it is complete. Metadata: ``features`` (JSON, feature -> table), ``step``.

    :raises CheckpointError: no run folder, no usable checkpoint, or a model without tables.
    """
    features, store = run_config(run).features, RunFolder(run).checkpoints
    checkpoint = opened(store, step, Runtime(torch.device("cpu")))
    stored = checkpoint.tensors("tables")
    tables = {name.removesuffix(".weight"): tensor for name, tensor in stored.items() if name.endswith(".weight")}
    if not tables:
        raise CheckpointError("the run's model has no embedding tables", where=str(run), fix="give a run whose model has some")
    reads = {path: features.table_of(path) for path in features.id_features()}
    temporary = out.with_name(f".tmp-{out.name}")
    try:
        write_tensors(temporary, tables, {"features": json.dumps(reads), "step": str(checkpoint.step)})
        os.replace(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)
    return {name: (int(t.shape[0]), int(t.shape[1])) for name, t in tables.items()}
