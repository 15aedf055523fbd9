"""The embedding tables of a model, the reads of them, and the built-in module that holds them in one process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn import functional as F

from gem_core import ops
from gem_core.batch import Batch, SequenceGroup, SparseGroup
from gem_core.config.features import Features
from gem_core.errors import BatchError, DataError
from gem_core.jagged import Jagged, lengths_to_offsets
from gem_core.model.contract import Lookup, TableSet, TableSpec, TableState

_DEFERRED: ContextVar[bool] = ContextVar("deferred_tables", default=False)


def table_set(features: Features, embedding_dim: int) -> TableSet:
    """Tables and lookups of ``features``; tables without a width get ``embedding_dim``, and without init_std ``dim ** -0.5``.

    Keys of the lookups are feature paths: ``sparse.NAME`` (pooled) and ``sequences.GROUP.fields.NAME`` (one row an id).
    """
    tables = []
    for name, table in features.all_tables().items():
        dim = table.dim or embedding_dim
        tables.append(TableSpec(name, table.rows, dim, table.init_std if table.init_std is not None else dim**-0.5))
    lookups = [
        Lookup(
            path, features.table_of(path), features.sparse[path.removeprefix("sparse.")].pooling if path.startswith("sparse.") else "none"
        )
        for path in features.id_features()
    ]
    used = {lookup.table for lookup in lookups}
    return TableSet(tuple(t for t in tables if t.name in used), tuple(lookups))


def sparse_group(batch: Batch, lookups: tuple[Lookup, ...]) -> SparseGroup:
    """All ids of ``batch`` that the lookups read, as one group with the lookups' keys in their order.

    Pooled features come from ``batch.sparse``; an event field gives one id an event, or for a multi-valued field all ids of the sample's
    events. Reads nothing from the device as long as the batch knows its ``offsets_per_key``.

    :raises BatchError: a feature that the batch lacks, or event rows that belong to no sample.
    """
    pooled = [k.key.removeprefix("sparse.") for k in lookups if k.pooling != "none"]
    values: list[Tensor] = []
    lengths: list[Tensor] = []
    weights: list[Tensor] | None = None
    bounds, slack = [0], False
    if pooled:
        group = _pooled(batch, pooled)
        slack = group.slack
        values, lengths, bounds = [group.values], [group.lengths], list(group.key_bounds())
        weights = None if group.weights is None else [group.weights]
    for lookup in lookups[len(pooled) :]:
        ids = event_ids(batch, lookup.key)
        values.append(ids.values)
        lengths.append(ids.lengths)
        bounds.append(bounds[-1] + ids.values.shape[0])
        if weights is not None:
            weights.append(torch.ones_like(ids.values, dtype=weights[0].dtype))
    if not values:
        empty = torch.empty(0, dtype=torch.int64)
        return SparseGroup((), empty, empty, None, (0,))
    dtype = lengths[0].dtype
    return SparseGroup(
        tuple(k.key for k in lookups),
        values[0] if len(values) == 1 else torch.cat(values),
        lengths[0] if len(lengths) == 1 else torch.cat([n.to(dtype) for n in lengths]),
        None if weights is None else torch.cat(weights),
        tuple(bounds),
        slack,
    )


def _pooled(batch: Batch, names: list[str]) -> SparseGroup:
    group = batch.sparse if batch.sparse is not None else SparseGroup((), torch.empty(0), torch.empty(0))
    missing = [n for n in names if n not in group.keys]
    if missing:
        raise BatchError(
            f"the batch has no sparse feature {missing[0]!r}",
            where=f"features.sparse.{missing[0]}",
            fix=f"the batch has: {', '.join(group.keys) or 'none'}; make the source deliver every declared feature",
        )
    if list(group.keys) == names and group.values.shape[0] == group.key_bounds()[-1]:
        return replace(group, offsets_per_key=group.key_bounds())
    weights = None if group.weights is None else {n: group.jagged(n, group.weights).values for n in names}
    return replace(SparseGroup.from_jagged({n: group[n] for n in names}, weights), slack=group.slack)


def sequence_of(batch: Batch, name: str) -> SequenceGroup:
    """The history ``name`` of the batch.

    :raises BatchError: the batch lacks it, or its rows go past the last offset (read on the host, so only checked for batches there).
    """
    group = batch.sequences.get(name)
    if group is None:
        shared = batch.requests is not None and name in batch.requests.sequences
        raise BatchError(
            f"the batch has no history {name!r}" + (" of its own: it is stored once for a request" if shared else ""),
            where=f"features.sequences.{name}",
            fix="this model reads one history a sample: let the source repeat it"
            if shared
            else f"the batch has: {', '.join(batch.sequences) or 'none'}; make the source deliver every declared history",
        )
    return group


def event_ids(batch: Batch, path: str) -> Jagged:
    """The ids of one event field by sample: ``path`` is ``sequences.GROUP.fields.NAME``."""
    _, name, _, field = path.split(".", 3)
    group = sequence_of(batch, name)
    if field not in group.fields:
        raise BatchError(f"the history {name!r} has no field {field!r}", where=f"features.{path}", fix=f"it has: {', '.join(group.fields)}")
    ids = group.fields[field]
    if isinstance(ids, Jagged):
        return Jagged(ids.values, ids.offsets[group.offsets.to(torch.int64)])
    readable = ids.device.type == "cpu" and not torch.compiler.is_compiling()
    if readable and not group.slack and int(group.offsets[-1]) != ids.shape[0]:
        raise BatchError(
            f"{ids.shape[0]} events are stored, the offsets end at {int(group.offsets[-1])}",
            where=f"features.{path}",
            fix="this model takes histories without slack rows",
        )
    return Jagged(ids, group.offsets)


@contextmanager
def deferred_tables() -> Iterator[None]:
    """Inside, new `LocalTables` are on the device "meta": for models whose tables a strategy will hold."""
    token = _DEFERRED.set(True)
    try:
        yield
    finally:
        _DEFERRED.reset(token)


class LocalTables(nn.Module):
    """All tables in this process as plain fp32 parameters ``[rows, dim]``, normal with the table's ``init_std``.

    ``forward(SparseGroup)`` gives, by lookup key, pooled ``[B, dim]`` or ``(rows [N, dim], offsets [B+1])`` as `Lookup` says. Per-id
    weights multiply the rows; "mean" divides by the sum of the weights (an empty bag gives 0). ``sparse``: gradients are COO over the
    touched rows, else dense. With ``small_dense`` those of a table with fewer rows than it is asked for in a pass are dense all the same,
    as recorded steps need it: to add sparse gradients may be to merge them, which waits for the device. The accumulators of row-wise
    AdaGrad live here as buffers, so that table and state stay together.
    """

    optimizer_in_backward = False

    def __init__(self, tables: TableSet, *, sparse: bool = True) -> None:
        super().__init__()
        self.table_set = tables
        self.sparse, self.small_dense = sparse, False
        self._slots = {t.name: f"t{i}" for i, t in enumerate(tables.tables)}
        device = torch.device("meta") if _DEFERRED.get() else None
        for t in tables.tables:
            self.register_parameter(self._slots[t.name], nn.Parameter(torch.empty(t.rows, t.dim, device=device)))
            self.register_buffer(f"{self._slots[t.name]}_accumulator", torch.empty(t.rows, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for t in self.table_set.tables:
            nn.init.normal_(self.weight(t.name), std=t.init_std)
            self.accumulator(t.name).zero_()

    def slot(self, table: str) -> str:
        """The name of the table's parameter in this module."""
        return self._slots[table]

    def weight(self, table: str) -> nn.Parameter:
        return self.get_parameter(self._slots[table])

    def accumulator(self, table: str) -> Tensor:
        return self.get_buffer(f"{self._slots[table]}_accumulator")

    def table_states(self) -> Mapping[str, TableState]:
        return {name: TableState(self.weight(name), self.accumulator(name)) for name in self._slots}

    def state_items(self) -> Iterable[tuple[str, Tensor]]:
        for name in self._slots:
            yield f"{name}.weight", self.weight(name)
            yield f"{name}.accumulator", self.accumulator(name)

    def forward(self, group: SparseGroup) -> dict[str, Tensor | tuple[Tensor, Tensor]]:
        # torch.compile cannot trace a backward that gives sparse gradients: with them the lookups stay outside its graphs.
        return self._look_up_eagerly(group) if self.sparse and torch.compiler.is_compiling() else self._look_up(group)

    @_disable_dynamo  # torch.compiler.disable would import the compiler, and triton with it, along with this module
    def _look_up_eagerly(self, group: SparseGroup) -> dict[str, Tensor | tuple[Tensor, Tensor]]:
        return self._look_up(group)

    def _look_up(self, group: SparseGroup) -> dict[str, Tensor | tuple[Tensor, Tensor]]:
        bounds, b = group.key_bounds(), group.batch_size
        places = {key: i for i, key in enumerate(group.keys)}
        dense = self._dense(group) if self.small_dense else ()
        result: dict[str, Tensor | tuple[Tensor, Tensor]] = {}
        for lookup in self.table_set.lookups:
            i = places[lookup.key]
            ids = group.values[bounds[i] : bounds[i + 1]]
            offsets = lengths_to_offsets(group.lengths[i * b : (i + 1) * b])
            weights = None if group.weights is None else group.weights[bounds[i] : bounds[i + 1]]
            try:
                result[lookup.key] = self._read(lookup, ids, offsets, weights, group.slack, self.sparse and lookup.table not in dense)
            except (IndexError, RuntimeError):
                self._check_ids(lookup, ids)
                raise
        return result

    def _dense(self, group: SparseGroup) -> set[str]:
        """Tables that ``group`` asks for at least as many rows as they have."""
        bounds, asked = group.key_bounds(), dict.fromkeys(self._slots, 0)
        places = {key: i for i, key in enumerate(group.keys)}
        for lookup in self.table_set.lookups:
            i = places[lookup.key]
            asked[lookup.table] += bounds[i + 1] - bounds[i]
        return {t.name for t in self.table_set.tables if asked[t.name] >= t.rows}

    def _read(
        self, lookup: Lookup, ids: Tensor, offsets: Tensor, weights: Tensor | None, slack: bool, sparse: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        table = self.weight(lookup.table)
        if lookup.pooling == "none":
            return F.embedding(ids, table, sparse=sparse), offsets
        if weights is not None:
            weights = weights.to(table.dtype)
        mode = lookup.pooling if weights is None else "sum"
        ends = offsets.to(ids.dtype)
        if slack:  # embedding_bag takes all ids that are left into its last bag: they get one of their own
            ends = F.pad(ends, (0, 1), value=ids.shape[0])
        pooled = F.embedding_bag(ids, table, ends, mode=mode, sparse=sparse, per_sample_weights=weights, include_last_offset=True)
        pooled = pooled[:-1] if slack else pooled
        if weights is None or lookup.pooling == "sum":
            return pooled
        total = ops.jagged_sum(weights.unsqueeze(-1), offsets)
        return pooled / total.where(total != 0, torch.ones_like(total))

    def _check_ids(self, lookup: Lookup, ids: Tensor) -> None:
        rows = self.table_set.table(lookup.table).rows
        wrong = ids[(ids < 0) | (ids >= rows)] if ids.device.type == "cpu" else ids[:0]
        if wrong.numel():
            raise DataError(
                f"id {int(wrong[0])} is outside [0, {rows}), the rows of table {lookup.table!r}",
                where=f"features.{lookup.key}",
                fix='raise rows, set hash = true, or set policy = "clip" or "default" with a default id',
            )
