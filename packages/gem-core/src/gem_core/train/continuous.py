"""Training that goes on and on: rows of ids that no longer come are given back, and a new run begins with what another one learned.

``train.tables.evict_after``: a row of a table that no sample has read for more than so many partitions becomes a new one: drawn anew, its
optimizer state as at the start. An id that comes back, or another one that hashes to the row, begins afresh instead of with what was true
long ago.

``train.warm_start``: the run begins with parameters, tables and optimizer state of another run's newest checkpoint. Tables may have grown:
the rows that are new are drawn as they always are, all others keep weight and optimizer state.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gem_core.batch import Batch
from gem_core.config import Config, Features
from gem_core.config.features import Sparse
from gem_core.errors import CheckpointError, ConfigError
from gem_core.model.contract import Shards, TableSet
from gem_core.model.tables import sparse_group
from gem_core.sources.fitted import Fitted, load_fitted
from gem_core.sources.hashing import key_of, mix64, salt_of
from gem_core.train import state
from gem_core.train.build import Parts
from gem_core.train.checkpoint import Checkpoint, check_fit
from gem_core.train.offline import run_config
from gem_core.train.optim import DenseAdamW
from gem_core.train.runfolder import RunFolder
from gem_core.train.runtime import Runtime
from gem_core.train.shards import State, shards_of
from gem_core.train.state import tables_loaded

NEVER = -1


class Recency:
    """Knows the partition in which each row of each table was read last, and gives back those read last more than ``after`` ago.

    Every process knows it of every row, 4 bytes a row, wherever the rows themselves are.

    :raises ConfigError: rows that ids do not name themselves, or whose optimizer state is not theirs alone.
    """

    def __init__(self, parts: Parts, config: Config, runtime: Runtime, after: int) -> None:
        tables = parts.tables
        found: TableSet | None = getattr(tables, "table_set", None)
        names = {f"{t.name}.{what}" for t in found.tables for what in ("weight", "accumulator")} if found else set()
        if found is None or config.train.tables.kind != "rowwise_adagrad" or set(parts.table_state()) != names:
            raise ConfigError(
                "rows are given back only where row-wise AdaGrad updates tables whose rows the ids name, without collision management",
                where="train.tables.evict_after",
                fix='set train.tables.kind = "rowwise_adagrad", and ids = "hash" for all tables, or leave it out',
            )
        self.parts, self.table_set, self.runtime, self.after, self.seed = parts, found, runtime, after, config.run.seed
        self.initial = config.train.tables.initial_accumulator
        # what a retrieval model scores is no sign of life: negatives are drawn from all items
        self.lookups = tuple(k for k in found.lookups if k.key.startswith(("sparse.", "sequences.")))
        self.partition = 0
        self.last = {t.name: torch.full((t.rows,), NEVER, dtype=torch.int32, device=runtime.device) for t in found.tables}

    def note(self, batch: Batch) -> None:
        """The rows that ``batch``, on the device, reads were read in this partition."""
        group = sparse_group(batch, self.lookups)
        bounds = group.key_bounds()
        for lookup, a, b in zip(self.lookups, bounds, bounds[1:]):
            self.last[lookup.table].index_fill_(0, group.values[a:b].long(), self.partition)

    @torch.no_grad()
    def turn(self) -> dict[str, int]:
        """A new partition begins: rows given back, by table. Called by all ranks alike; every rank then knows the same."""
        self._agree()
        self.partition += 1
        freed = {}
        for i, spec in enumerate(self.table_set.tables):
            last = self.last[spec.name]
            old = torch.nonzero((last != NEVER) & (self.partition - last > self.after)).flatten()
            if old.numel():
                seed = mix64(key_of(self.seed) ^ mix64(self.partition << 16 | i)) >> 1
                drawn = torch.empty(old.numel(), spec.dim).normal_(0, spec.init_std, generator=torch.Generator().manual_seed(seed))
                freed[spec.name] = (old, drawn.to(last.device))
                last[old] = NEVER
        if freed:
            state = self.parts.table_state()
            for name, (old, drawn) in freed.items():
                _write_rows(state[f"{name}.weight"], old, drawn)
                _write_rows(state[f"{name}.accumulator"], old, drawn.new_full(old.shape, self.initial))
            tables_loaded(self.parts)
        return {name: int(old.numel()) for name, (old, _) in freed.items()}

    def _agree(self) -> None:
        for last in self.last.values():
            self.runtime.maximum(last)

    def state_dict(self) -> dict[str, Any]:
        """The same on every rank, which all call it."""
        self._agree()
        return {"partition": self.partition, "last": {name: t.cpu().clone() for name, t in self.last.items()}}

    def load_state_dict(self, stored: Mapping[str, Any]) -> None:
        self.partition = stored["partition"]
        for name, last in self.last.items():
            last[: stored["last"][name].numel()] = stored["last"][name].to(last.device)


def _write_rows(state: State, rows: Tensor, values: Tensor) -> None:
    """``values [n, ...]`` into the ``rows [n]`` of a table's state, as far as this process holds them."""
    for offsets, part in shards_of(state).parts:
        here = (rows >= offsets[0]) & (rows < offsets[0] + part.shape[0])
        columns = tuple(slice(o, o + n) for o, n in zip(offsets[1:], part.shape[1:]))
        part[rows[here] - offsets[0]] = values[here][(slice(None), *columns)].to(part)


def warm_start(parts: Parts, dense: DenseAdamW, config: Config, runtime: Runtime) -> dict[str, Any]:
    """Load the newest checkpoint of the run ``train.warm_start`` into ``parts`` and ``dense``; what of it, for run.json.

    :raises CheckpointError: no usable checkpoint, another model, or a table that became smaller; ConfigError: a table whose ids would
        change their meaning, by growing or since they are made another way.
    """
    before = Path(str(config.train.warm_start))
    trained = run_config(before)
    checkpoint = state.opened(RunFolder(before).checkpoints, None, runtime)
    tables, stored = parts.table_state(), checkpoint.shapes("tables")
    _check_growth(tables, stored, trained.features, config.features, checkpoint)
    checkpoint.fill("model", parts.dense_state(), "model")
    if {n: tuple(t.shape) for n, t in tables.items()} == stored:
        checkpoint.fill("tables", tables, "embedding tables")
    else:
        whole = checkpoint.tensors("tables")
        for name, target in tables.items():
            _fill_first(target, whole[name])
    tables_loaded(parts)
    state.load_optimizer(parts, dense, checkpoint)
    grown = {n.removesuffix(".weight"): [stored[n][0], t.shape[0]] for n, t in tables.items() if n.endswith(".weight")}
    return {"run": str(before), "step": checkpoint.step, "grown": {n: rows for n, rows in grown.items() if rows[0] != rows[1]}}


@torch.no_grad()
def _fill_first(target: Tensor | Shards, stored: Tensor) -> None:
    """The stored rows into the first rows of what this process holds."""
    for offsets, part in ((((0,) * target.dim()), target),) if isinstance(target, Tensor) else target.parts:
        rows = max(0, min(stored.shape[0] - offsets[0], part.shape[0]))
        other = tuple(slice(o, o + n) for o, n in zip(offsets[1:], part.shape[1:]))
        part[:rows] = stored[(slice(offsets[0], offsets[0] + rows), *other)].to(part)


def _check_growth(
    tables: Mapping[str, Any], stored: Mapping[str, tuple[int, ...]], before: Features, now: Features, checkpoint: Checkpoint
) -> None:
    check_fit(
        {n: tuple(t.shape)[1:] for n, t in tables.items()}, {n: s[1:] for n, s in stored.items()}, "embedding tables", checkpoint.path
    )
    shrunk = [n for n, t in tables.items() if t.shape[0] < stored[n][0]]
    if shrunk:
        name = shrunk[0].rpartition(".")[0]
        raise CheckpointError(
            f"the table {name!r} has {tables[shrunk[0]].shape[0]} rows here and {stored[shrunk[0]][0]} in the run to start from",
            where=str(checkpoint.path),
            fix=f"give it {stored[shrunk[0]][0]} rows or more",
        )
    grown = {n.removesuffix(".weight") for n, t in tables.items() if n.endswith(".weight") and t.shape[0] > stored[n][0]}
    for path, ids in now.id_features().items():
        if now.table_of(path) in grown and (ids.hash or (isinstance(ids, Sparse) and ids.cross)):
            raise ConfigError(
                f"the ids of {path!r} are hashes modulo the rows of {now.table_of(path)!r}: in a table that grew they would be other ids",
                where=f"features.{path}",
                fix="keep its rows, or use a vocabulary, which grows at its end (gemrec data vocab --extend)",
            )
    old, new = load_fitted(before), load_fitted(now)
    ways = _ways(before, old)
    for path, way in _ways(now, new).items():
        changed = [f"{key} was {ways[path][key]}, is {value}" for key, value in way.items() if ways.get(path, way)[key] != value]
        if changed:
            raise ConfigError(
                f"the ids of {path!r} are made in another way than in the run to start from: {changed[0]}",
                where=f"features.{path}",
                fix="declare the feature as that run did (config.toml in its folder); bucket edges are kept by gemrec data vocab --extend",
            )
    for table, words in old.vocabularies.items():
        if new.vocabularies.get(table, words)[: len(words)] != words:
            raise ConfigError(
                f"the vocabulary of {table!r} does not begin with that of the run to start from: ids would change their meaning",
                where="features.fitted",
                fix="make it with 'gemrec data vocab CONFIG --extend OLD', which keeps the places of what was there",
            )


def _ways(features: Features, fitted: Fitted) -> dict[str, dict[str, Any]]:
    """How ids are made, by the feature's path."""
    found = {}
    for path, ids in features.id_features().items():
        hashed = ids.hash or (isinstance(ids, Sparse) and ids.cross is not None)
        edges = ids.edges if ids.buckets is None else fitted.edges_of(path)
        found[path] = {
            "hash": hashed,
            "salt": (salt_of(features.table_of(path)) if ids.salt is None else ids.salt) if hashed else None,
            "vocabulary": ids.vocabulary,
            "edges": None if edges is None else list(edges),
        }
    return found
