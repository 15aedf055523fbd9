"""``gemrec export``: a run as a folder that is served without this package.

- ``model.pt2``: the dense part as a `torch.export` program; it takes a dictionary of tensors (`gem_core.export.graph.Input`), any number of
  samples and events, and gives logits ``[B, T]``, or for retrieval queries ``[B, width]``. fp32, whatever recipe trained it.
- ``tables.safetensors``: the embedding tables ``[rows, dim]`` by name; or ``tables/NAME.parquet`` with the columns id and embedding.
- ``items.safetensors``, retrieval only: ``items [items, width]``, whose products with a query are the scores.
- ``manifest.json``: how a row of columns becomes the program's inputs, what its outputs mean, and what it was made by; see `manifest`.
- ``vocabularies.json``, where features have any: table -> values; the id of a value is 1 + its place.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gem_core.config import Config, Features, resolve
from gem_core.config.features import Ids, Sparse
from gem_core.errors import CheckpointError, ConfigError
from gem_core.export.graph import Input, Servable, trace
from gem_core.model.contract import Retrieval, TableSet
from gem_core.model.tables import LocalTables, deferred_tables
from gem_core.plugins import manager
from gem_core.sources.fitted import Fitted, load_fitted
from gem_core.sources.hashing import salt_of
from gem_core.train.build import task_names
from gem_core.train.checkpoint import Checkpoint, check_fit
from gem_core.train.offline import hashed_in, lists_in, run_config
from gem_core.train.runfolder import RunFolder, environment, read_lines
from gem_core.train.runtime import Runtime
from gem_core.train.state import opened
from gem_core.train.tensorfile import write_tensors

FORMAT = 1
ITEM_CHUNK = 65_536
TableFormat = Literal["safetensors", "parquet"]


@dataclass(frozen=True)
class Exported:
    """What was written: bytes by file, relative to ``folder``."""

    folder: Path
    kind: Literal["ranking", "retrieval"]
    step: int
    files: Mapping[str, int]
    recipe: str


def export_run(
    run: Path,
    out: Path,
    *,
    step: int | None = None,
    tables: TableFormat = "safetensors",
    device: Literal["cpu", "cuda"] = "cpu",
    overrides: Iterable[str] = (),
) -> Exported:
    """Write the run's newest checkpoint, or that of ``step``, to the folder ``out``, which appears when it is complete.

    :param device: where the program will run; what it makes itself is made there.
    :raises CheckpointError: no run folder, no usable checkpoint, or ``out`` holds something; ConfigError: a model that cannot be exported;
        RunError: `torch.export` cannot follow it.
    """
    out = out.absolute()  # "." has no name of its own
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError("the folder is not empty", where=str(out), fix="choose another --out")
    config = run_config(run, overrides)
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("there is no GPU here", where="--device cuda", fix="export on a machine with one, or with --device cpu")
    where = torch.device(device)
    checkpoint = opened(RunFolder(run).checkpoints, step, Runtime(where))
    model = _model(config, checkpoint, where)
    features = getattr(model, "inputs", config.features)
    program, inputs = trace(model, features, where)
    folder = out.with_name(f".tmp-{out.name}")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True)
        # in memory first: on a full disk PyTorch's own writer ends the process
        written = io.BytesIO()
        torch.export.save(program, written)
        (folder / "model.pt2").write_bytes(written.getbuffer())
        own = {t.name for t in model.table_set.tables}
        stored = {n: t for n, t in _weights(checkpoint).items() if n in own}
        files = _write_tables(folder, stored, tables)
        if isinstance(model, Retrieval):
            write_tensors(folder / "items.safetensors", {"items": _items(model, stored, where)})
        fitted = load_fitted(config.features)
        if fitted.vocabularies:
            (folder / "vocabularies.json").write_text(json.dumps(fitted.vocabularies, ensure_ascii=False), encoding="utf-8")
        told = manifest(config, model, features, inputs, fitted, checkpoint, where, files, RunFolder(run))
        told["evaluation"] = _evaluation(RunFolder(run), checkpoint.step)
        (folder / "manifest.json").write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        if out.exists():
            out.rmdir()
        os.replace(folder, out)
    except OSError as error:
        raise CheckpointError(
            f"the export cannot be written: {error.strerror or error}", where=str(out), fix="free space, or choose another --out"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sizes = {p.relative_to(out).as_posix(): p.stat().st_size for p in sorted(out.rglob("*")) if p.is_file()}
    return Exported(out, told["kind"], checkpoint.step, sizes, config.precision.recipe)


def manifest(
    config: Config,
    model: Servable,
    features: Features,
    inputs: list[Input],
    fitted: Fitted,
    checkpoint: Checkpoint,
    device: torch.device,
    files: Mapping[str, str],
    run: RunFolder,
) -> dict[str, Any]:
    """The content of manifest.json.

    ``program.inputs``: name, dtype, what its rows count, and for embedding rows the table and how ids are pooled. ``features``: the part of
    the run's ``[features]`` that the program reads, and in ``ids`` how values become rows of tables: ``way`` is "hash" (``salt``), "cross"
    (two columns, ``salt``), "vocabulary", "edges" (``edges``) or "id" (the value itself), into ``rows`` rows, with ``default`` and
    ``policy`` for what is missing or unknown; ``holds``: for hashes "integers" or "text" (for a cross of each column), what training read,
    if it is known; ``lists``: whether the column held a list for each sample or event, whose missing ones are empty, or null where that is
    not known. The hash is that of `gem_core.sources.hashing`.
    """
    retrieval = isinstance(model, Retrieval)
    read = {i.feature for i in inputs if i.feature is not None} | {"dense"}
    known = {path: ids for path, ids in features.id_features().items() if path in read}
    histories = {i.history for i in inputs if i.history is not None}
    hashed, lists = hashed_in(run), lists_in(run)
    read_features = {
        "timestamp": features.timestamp if any(i.name == "timestamps" for i in inputs) or _gaps(features) else None,
        "timestamp_unit": features.timestamp_unit,
        "dense": {n: s.model_dump(mode="json") for n, s in features.dense.items()} if any(i.name == "dense" for i in inputs) else {},
        "vectors": {n: s.model_dump(mode="json") for n, s in features.vectors.items() if f"vectors.{n}" in read},
        "sparse": {n: s.model_dump(mode="json") for n, s in features.sparse.items() if f"sparse.{n}" in read},
        "sequences": {n: s.model_dump(mode="json") for n, s in features.sequences.items() if n in histories},
        "ids": {
            path: {**_way(path, ids, features, fitted), "holds": hashed.get(path), "lists": lists.get(path)} for path, ids in known.items()
        },
    }
    kind = "retrieval" if retrieval else "ranking"
    return {
        "format": FORMAT,
        "kind": kind,
        "outputs": ["query"] if retrieval else list(task_names(config.features)),
        "program": {"file": "model.pt2", "device": device.type, "inputs": [asdict(i) for i in inputs]},
        "tables": {
            t.name: {"rows": t.rows, "dim": t.dim, "file": files[t.name], "tensor": t.name}
            for t in model.table_set.tables
            if t.name in files
        },
        "items": _item_record(model) if retrieval else None,
        "vocabularies": "vocabularies.json" if fitted.vocabularies else None,
        "features": read_features,
        "model": config.model.name,
        "run": config.run.name,
        "step": checkpoint.step,
        "samples": int(checkpoint.meta["samples"]),
        "trained_with": {k: checkpoint.meta.get(k) for k in ("versions", "plugins", "commit")},
        "exported_with": {k: v for k, v in environment(device).items() if k in ("versions", "plugins", "commit")},
        "precision": {"trained": config.precision.recipe, "program": "fp32"},
    }


def _gaps(features: Features) -> bool:
    return any(f.gap == "sample" for s in features.sequences.values() for f in s.fields.values())


def _item_record(model: Any) -> dict[str, Any]:
    task = model.features.next_item
    path = f"sparse.{task.item}"
    return {"file": "items.safetensors", "tensor": "items", "items": model.items, "pad": model.pad, "table": model.features.table_of(path)}


def _way(path: str, ids: Ids, features: Features, fitted: Fitted) -> dict[str, Any]:
    table, edges = features.table_of(path), ids.edges if ids.buckets is None else fitted.edges_of(path)
    cross = isinstance(ids, Sparse) and ids.cross is not None
    way = "cross" if cross else "edges" if edges is not None else "vocabulary" if ids.vocabulary else "hash" if ids.hash else "id"
    return {
        "way": way,
        "table": table,
        "rows": features.rows_of(path),
        "salt": (salt_of(table) if ids.salt is None else ids.salt) if way in ("hash", "cross") else None,
        "edges": None if edges is None else list(edges),
        "default": ids.default,
        "policy": ids.policy,
    }


def _model(config: Config, checkpoint: Checkpoint, device: torch.device) -> Any:
    """The model with the checkpoint's dense part; its tables are not allocated."""
    resolved = resolve(config)
    with torch.device(device), deferred_tables():
        model: nn.Module = manager().find("model", config.model.name).build(resolved.model, config.features)
    if not isinstance(model, Servable) or not isinstance(model.table_set, TableSet):
        raise ConfigError(
            f"the model {config.model.name!r} cannot be exported: it has no serve(batch, embedded)",
            where=config.origin.where(("model", "name")),
            fix="give it that method (gem_core.export.graph.Servable), or export another model",
        )
    tables = {id(t) for t in (*model.tables.parameters(), *model.tables.buffers())}  # type: ignore[union-attr]
    state = {n: t for n, t in model.state_dict(keep_vars=True).items() if id(t) not in tables}
    # what only training has is not served
    stored = {n: t for n, t in checkpoint.tensors("model").items() if not n.startswith("distillation.")}
    check_fit({n: tuple(t.shape) for n, t in state.items()}, {n: tuple(t.shape) for n, t in stored.items()}, "model", checkpoint.path)
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(stored[name])
    model.eval()
    return model


def _weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    return {n.removesuffix(".weight"): t for n, t in checkpoint.tensors("tables").items() if n.endswith(".weight")}


def _write_tables(folder: Path, tables: Mapping[str, Tensor], form: TableFormat) -> dict[str, str]:
    """Table -> file."""
    if form == "safetensors":
        write_tensors(folder / "tables.safetensors", tables)
        return dict.fromkeys(tables, "tables.safetensors")
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ConfigError("tables as Parquet need pyarrow", where="--tables parquet", fix="pip install pyarrow") from error
    (folder / "tables").mkdir()
    for name, table in tables.items():
        kind = pa.list_(pa.float32(), table.shape[1])
        schema = pa.schema([("id", pa.int64()), ("embedding", kind)])
        with pq.ParquetWriter(folder / "tables" / f"{name}.parquet", schema) as writer:
            for start in range(0, table.shape[0], ITEM_CHUNK):
                rows = table[start : start + ITEM_CHUNK].float().cpu()
                values = pa.FixedSizeListArray.from_arrays(pa.array(rows.flatten().numpy()), type=kind)
                writer.write_table(pa.table([pa.array(range(start, start + rows.shape[0]), pa.int64()), values], schema=schema))
    return {name: f"tables/{name}.parquet" for name in tables}


@torch.no_grad()
def _items(model: Any, stored: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """``[items, width]`` fp32 of all items."""
    tables: LocalTables = model.tables
    for name in (t.name for t in model.table_set.tables):
        tables.register_parameter(tables.slot(name), nn.Parameter(stored[name].to(device), requires_grad=False))
    parts = [
        model.item_vectors(torch.arange(start, min(start + ITEM_CHUNK, model.items), device=device)).cpu()
        for start in range(0, model.items, ITEM_CHUNK)
    ]
    return torch.cat(parts)


def _evaluation(folder: RunFolder, step: int) -> dict[str, Any]:
    """Metrics of what is exported, if the run evaluated it; ``calibration`` is the mean prediction over the mean label, 1 for a calibrated
    model. The last of several evaluations of a step is that of its checkpoint: the best parameters take the place of others."""
    lines = read_lines(folder.evals) if folder.evals.is_file() else ()
    found: dict[str, Any] = {}
    for line in lines:
        if line["step"] == step and "partition" not in line:
            found = line["tasks"]
    return found
