"""The sparse strategies ``torchrec`` and ``torchrec-2d``: TorchRec's sharded collections behind the core's contract of tables.

Tables that are only read pooled form an EmbeddingBagCollection; those that some feature reads event by event, an EmbeddingCollection for
each width, whose pooled readers are summed where the rows arrive (TorchRec cannot share a table between the two). Bags are sums; means are
divided on the asking rank. Collision-managed tables form collections of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gem_core.batch import SparseGroup
from gem_core.config.schema import TableOptimizer
from gem_core.errors import BatchError, CheckpointError, ConfigError, DataError, DeviceError
from gem_core.jagged import lengths_to_offsets
from gem_core.model.contract import Lookup, Shards, TableSet
from gem_core.train.mesh import Mesh
from gem_parallel.sparse.config import Torchrec2dConfig, TorchrecConfig
from gem_parallel.sparse.engines import DTYPES
from gem_parallel.sparse.initial import drawn
from gem_parallel.sparse.need import need
from gem_parallel.sparse.place import placed
from gem_parallel.sparse.rowwise import RowwiseOptions
from gem_parallel.sparse.torchrec_ahead import IdsAhead, Prepared
from gem_parallel.sparse.torchrec_plan import Collections, Plans, plan_lines

SPREAD = -7046029254386353131
"""2^64 over the golden ratio, as a signed 64-bit number."""
Box = tuple[tuple[int, ...], Tensor]


def build_torchrec(tables: TableSet, mesh: Mesh, config: TorchrecConfig) -> nn.Module:
    """Tables sharded over all ranks by TorchRec.

    :raises DeviceError: TorchRec or FBGEMM cannot be imported, or there is no process group.
    :raises ConfigError: replicas are asked for.
    """
    if mesh.replica != 1:
        raise ConfigError(
            f"torchrec shards every table over all ranks, and parallel.replica = {mesh.replica} asks for replicas",
            where="parallel.replica",
            fix='set replica = 1, or sparse = "gem-2d" or "torchrec-2d"',
        )
    return TorchrecTables(tables, mesh, config, "torchrec")


def build_torchrec_2d(tables: TableSet, mesh: Mesh, config: Torchrec2dConfig) -> nn.Module:
    """TorchRec's DMPCollection, which exists for CUDA only.

    :raises DeviceError: the device is another one.
    """
    device = torch.empty(0).device
    if device.type != "cuda":
        raise DeviceError(
            f"TorchRec's DMPCollection runs on CUDA only, and the device is {device.type}",
            where="parallel.sparse",
            fix='use sparse = "gem-2d", which has the same arrangement on the CPU',
        )
    if mesh.replica == 1:
        raise ConfigError(
            "torchrec-2d needs at least two replicas", where="parallel.replica", fix='set replica (and model), or sparse = "torchrec"'
        )
    return TorchrecTables(tables, mesh, config, "torchrec-2d")


class TorchrecTables(nn.Module):
    """See the module's text. The sharded module is kept outside of this module's parameters: `state_items` tells the state."""

    optimizer_in_backward = True

    def __init__(self, tables: TableSet, mesh: Mesh, config: TorchrecConfig, strategy: str) -> None:
        super().__init__()
        need("torchrec", strategy)
        self.table_set, self.mesh, self.config = tables, mesh, config
        self.device = torch.empty(0).device
        if not dist.is_initialized():
            raise DeviceError(
                "TorchRec needs a process group, even for one process", fix="start with torchrun (--nproc-per-node 1 for one process)"
            )
        self.options = placed(tables, config, strategy)
        unread = [name for name, option in self.options.items() if option.dtype == "bf16" and self.device.type == "cuda"]
        if unread:
            raise ConfigError(
                f"FBGEMM's CUDA kernels read fp32 and fp16 tables, and table {unread[0]!r} is bf16",
                where=f"parallel.{strategy}",
                fix='choose dtype = "fp16" or "fp32", or sparse = "gem-2d", which reads bf16 tables by PyTorch',
            )
        self.optimizer = RowwiseOptions()
        self.alias = {t.name: f"t{i}" for i, t in enumerate(tables.tables)}
        self.steps = 0
        """Since the replicas were averaged last."""
        plans = Plans(tables, self.options, config, self.alias, mesh.model, self.device)
        parts, self.reads = plans.collections()
        holder = Collections(parts)
        sharders = plans.sharders(self.optimizer)
        self.plan = plans.plan(holder, sharders)
        names = {a: n for n, a in self.alias.items()}
        self.lines = plan_lines(self.plan, names)
        self.columns = {
            name: self.config.column_parts if self.config.sharding != "planner" else len(sharding.ranks)
            for part in self.plan.plan.values()
            for alias, sharding in part.items()
            for name in [names[alias]]
            if sharding.sharding_type == "column_wise"
        }
        self.means: dict[str, Tensor] = {}
        with _generators_kept(self.device):
            self._module = [self._distribute(holder, sharders)]
        replicated = {names[a] for part in self.plan.plan.values() for a, s in part.items() if s.sharding_type == "data_parallel"}
        self.replicated = self._replicated(names, replicated)
        self.zch_ranks = {n: torch.tensor([mesh.model], device=self.device) for n, o in self.options.items() if o.ids == "zch"}
        if self.device.type != "cuda":
            for kernel, _ in kernels_of(self._module[0]):
                kernel.reset_embedding_weight_momentum = _Reset(kernel)
        self.replicated_accumulators = {n: torch.zeros(w.shape[0], device=self.device) for n, w in self.replicated.items()}
        self._fill()
        # What else hangs on the forward call of TorchRec's module: whole copies, DistributedDataParallel, the collision manager.
        whole = isinstance(config, Torchrec2dConfig) and config.fully_sharded
        self._ahead = None if whole or self.replicated or self.zch_ranks else IdsAhead(self.device)

    # Building

    def _replicated(self, names: Mapping[str, str], wanted: set[str]) -> dict[str, Tensor]:
        """The parameters of data-parallel tables, whose gradients TorchRec averages over the ranks."""
        found = {}
        for key, parameter in self._module[0].named_parameters():
            alias = key.rpartition(".")[0].rpartition(".")[2]
            if names.get(alias) in wanted:
                found[names[alias]] = parameter
        assert set(found) == wanted
        return found

    def _distribute(self, holder: Collections, sharders: list[Any]) -> Any:
        parallel = need("torchrec.distributed.model_parallel", "this strategy")
        types = need("torchrec.distributed.types", "this strategy")
        config = self.config
        if isinstance(config, Torchrec2dConfig):
            strategies = types.ShardingStrategy
            return parallel.DMPCollection(
                module=holder,
                device=self.device,
                plan=self.plan,
                world_size=self.mesh.world,
                sharding_group_size=self.mesh.model,
                global_pg=dist.group.WORLD,
                sharding_strategy=strategies.FULLY_SHARDED if config.fully_sharded else strategies.DEFAULT,
                sharders=sharders,
                use_inter_host_allreduce=config.inter_host,
            )
        env = types.ShardingEnv.from_process_group(dist.group.WORLD)
        return parallel.DistributedModelParallel(module=holder, env=env, device=self.device, plan=self.plan, sharders=sharders)

    # State

    @torch.no_grad()
    def _fill(self) -> None:
        held = {n: list(w) for n, w in self._weights().items()}
        for name, whole in drawn(self.table_set, self.device, lambda name: DTYPES[self.options[name].dtype or "fp32"]):
            for offsets, part in held[name]:
                part.copy_(whole[tuple(slice(o, o + n) for o, n in zip(offsets, part.shape))])
        for kernel, _ in kernels_of(self._module[0]):
            for (accumulator,) in kernel.split_optimizer_states():
                accumulator.zero_()

    def _weights(self) -> dict[str, list[Box]]:
        """By table, the (offsets, tensor) boxes of the weight that are here."""
        found: dict[str, list[Box]] = {n: [] for n in self.alias}
        names = {a: n for n, a in self.alias.items()}
        for kernel, configs in kernels_of(self._module[0]):
            for config, weight in zip(configs, kernel.split_embedding_weights()):
                found[names[config.name]].append((tuple(config.local_metadata.shard_offsets), weight))
        for name, replicated in self.replicated.items():
            found[name].append(((0, 0), replicated.detach()))
        return found

    def _accumulators(self) -> dict[str, list[Box]]:
        """By table, the (offsets of the rows' weights, accumulator) that are here."""
        found: dict[str, list[Box]] = {n: [] for n in self.alias}
        names = {a: n for n, a in self.alias.items()}
        for kernel, configs in kernels_of(self._module[0]):
            for config, (accumulator,) in zip(configs, kernel.split_optimizer_states(), strict=True):
                found[names[config.name]].append((tuple(config.local_metadata.shard_offsets), accumulator))
        for name, accumulator in self.replicated_accumulators.items():
            found[name].append(((0, 0), accumulator))
        return found

    def state_items(self) -> Iterator[tuple[str, Tensor | Shards]]:
        """Weights and accumulators, and of collision-managed tables ``<table>.zch_<what>``.

        The parts of a column-wise table have accumulators of their own; telling the state first replaces them by their mean over the
        parts, which is the accumulator of the whole row.
        """
        self._flush()
        weights, accumulators = self._weights(), self._accumulators()
        for table in self.table_set.tables:
            name, option = table.name, self.options[table.name]
            boxes = accumulators[name]
            if name in self.columns:
                boxes = [self._column_mean(name, table.rows, boxes)]
            yield f"{name}.weight", self._shards((table.rows, table.dim), DTYPES[option.dtype or "fp32"], weights[name])
            yield f"{name}.accumulator", self._shards((table.rows,), torch.float32, [((o[0],), t) for o, t in boxes])
            for what, value in self._collisions(name):
                yield f"{name}.zch_{what}", value

    def _shards(self, shape: tuple[int, ...], dtype: torch.dtype, boxes: list[Box]) -> Shards:
        return Shards(shape, dtype, tuple((offsets, part) for offsets, part in boxes if part.numel()))

    def _column_mean(self, name: str, rows: int, boxes: list[Box]) -> Box:
        """The mean accumulator of all parts, on every rank, and in the parts."""
        mean = torch.zeros(rows, device=self.device)
        for _, part in boxes:
            mean += part / (self.columns[name] * self.mesh.replica)
        dist.all_reduce(mean)
        for _, part in boxes:
            part.copy_(mean)
        self.means[name] = mean
        return (0,), mean

    def state_loaded(self) -> None:
        """:raises CheckpointError: collision-managed tables were saved by another number of ranks: each keeps the ids that hash to it."""
        for name, ranks in self.zch_ranks.items():
            if int(ranks) != self.mesh.model:
                raise CheckpointError(
                    f"the ids of the collision-managed table {name!r} were spread over {int(ranks)} ranks, here are {self.mesh.model}",
                    where=f"parallel.torchrec.tables.{name}.ids",
                    fix=f"resume with parallel.model = {int(ranks)}",
                )
        for part in self._module[0].modules():
            if hasattr(part, "_mch_sorted_raw_ids"):
                part._current_iter = -1  # read again from the loaded tensor
        held = self._accumulators()
        for name, mean in self.means.items():
            for _, part in held[name]:
                part.copy_(mean)
        for kernel, _ in kernels_of(self._module[0]):
            if hasattr(kernel, "reset_cache_states"):
                kernel.reset_cache_states()

    def _flush(self) -> None:
        self._average()
        if self.device.type == "cuda":
            for kernel, _ in kernels_of(self._module[0]):
                kernel.flush()

    def configure_optimizer(self, config: TableOptimizer) -> None:
        self.optimizer.eps = config.eps
        for kernel, _ in kernels_of(self._module[0]):
            kernel.optimizer_args = kernel.optimizer_args._replace(eps=config.eps)
        if config.initial_accumulator:
            for boxes in self._accumulators().values():
                for _, accumulator in boxes:
                    accumulator.fill_(config.initial_accumulator)
        self.set_learning_rate(config.lr)

    def set_learning_rate(self, lr: float) -> None:
        self.optimizer.lr = lr
        for kernel, _ in kernels_of(self._module[0]):
            kernel.set_learning_rate(lr)

    def train(self, mode: bool = True) -> TorchrecTables:
        for module in getattr(self, "_module", ()):
            module.train(mode)
        return super().train(mode)

    # Passes

    def forward(self, group: SparseGroup) -> dict[str, Tensor | tuple[Tensor, Tensor]]:
        """Results as `gem_core.model.contract.Lookup` says, fp32. Collective over all ranks."""
        if group.weights is not None and not self.config.weighted:
            raise ConfigError(
                "the batch has per-id weights", where="parallel.torchrec.weighted", fix="set weighted = true: TorchRec must know beforehand"
            )
        ahead = None if self._ahead is None else self._ahead.take(group)
        batch = self._prepared(group) if ahead is None else ahead
        if ahead is None:
            raw = self._module[0](batch.features)
        else:
            raw = {n: m.compute_and_output_dist(batch.contexts[n], batch.inputs[n]) for n, m in self._sharded().items()}
        samples, found = batch.samples, {}
        for name, part in batch.parts.items():
            out = raw[name]
            out = out.wait() if hasattr(out, "wait") else out
            out = out[0] if isinstance(out, tuple) else out
            for k in self.reads[name]:
                found[k.key] = self._result(k, out, part, samples, bags="bags" in name)
        return {k.key: found[k.key] for k in self.table_set.lookups}

    def prefetch(self, group: SparseGroup) -> None:
        """Begin the exchange of the next batch's ids on a side stream."""
        if self._ahead is not None:
            with self._ahead.beside(wait=True):
                batch = self._prepared(group)
            self._ahead.begin(self._sharded(), batch)

    def _sharded(self) -> dict[str, Any]:
        holder = self._module[0].module
        return {name: getattr(holder, name) for name in self.reads}

    def _prepared(self, group: SparseGroup) -> Prepared:
        self._check(group)
        samples = group.batch_size
        wide = self._widest(samples)
        parts = {name: select(group, [k.key for k in reads]) for name, reads in self.reads.items()}
        return Prepared(group, samples, parts, {n: self._features(part, samples, wide, n) for n, part in parts.items()})

    def _widest(self, samples: int) -> int:
        """Samples of the largest rank: TorchRec's row-wise tables want equal batches, so smaller ones get empty bags."""
        if self.mesh.world == 1:
            return max(samples, 1)
        widest = torch.tensor([max(samples, 1)], device="cpu")
        dist.all_reduce(widest, op=dist.ReduceOp.MAX)
        return int(widest)

    def _features(self, part: SparseGroup, samples: int, wide: int, name: str) -> Any:
        lengths, bags, values = part.lengths, "bags" in name, part.values
        if name.startswith("zch"):
            # TorchRec deals out ids by ranges of 63 bits; an odd factor spreads small ids over them, one to one.
            values = (values * SPREAD) & (2**63 - 1)
        if wide != samples:
            lengths = torch.nn.functional.pad(lengths.view(len(part.keys), samples), (0, wide - samples)).flatten()
        weights = part.weights if bags else None
        if bags and self.config.weighted and weights is None:
            weights = torch.ones(part.values.shape[0], device=part.values.device)
        return SparseGroup(part.keys, values, lengths, weights, part.offsets_per_key).to_kjt()

    def _result(self, lookup: Lookup, out: Any, part: SparseGroup, samples: int, *, bags: bool) -> Tensor | tuple[Tensor, Tensor]:
        lengths = part.jagged(lookup.key, part.values).lengths
        weights = None if part.weights is None else part.jagged(lookup.key, part.weights).values.float()
        rows: Tensor = (out[lookup.key] if bags else out[lookup.key].values()).float()
        if bags:
            pooled = rows[:samples]
        else:
            if weights is not None:
                rows = rows * weights.unsqueeze(1)
            if lookup.pooling == "none":
                return rows, lengths_to_offsets(lengths)
            pooled = rows.new_zeros(samples, rows.shape[1]).index_add(0, _bag(lengths, rows.shape[0]), rows)
        if lookup.pooling != "mean":
            return pooled
        total = lengths.float() if weights is None else pooled.new_zeros(samples).index_add(0, _bag(lengths, weights.shape[0]), weights)
        return pooled / total.where(total != 0, torch.ones_like(total)).unsqueeze(1)

    def _check(self, group: SparseGroup) -> None:
        if group.values.device.type != "cpu":
            return  # FBGEMM's kernels check there, without waiting
        bounds = group.key_bounds()
        places = {key: i for i, key in enumerate(group.keys)}
        for k in self.table_set.lookups:
            if k.key not in places:
                raise BatchError(f"the batch has no ids of {k.key!r}", where=f"features.{k.key}")
            if self.options[k.table].ids == "zch":
                continue
            rows = self.table_set.table(k.table).rows
            ids = group.values[bounds[places[k.key]] : bounds[places[k.key] + 1]]
            wrong = ids[(ids < 0) | (ids >= rows)]
            if wrong.numel():
                raise DataError(
                    f"id {int(wrong[0])} is outside [0, {rows}), the rows of table {k.table!r}",
                    where=f"features.{k.key}",
                    fix='raise rows, set hash = true, or ids = "zch" for the table',
                )

    @torch.no_grad()
    def after_backward(self, ok: Tensor) -> None:
        """Row-wise AdaGrad on data-parallel tables, the average over replicas where it is due; the next batch's ids go on their way."""
        if self._ahead is not None:
            self._ahead.go_on()
        for name, weight in self.replicated.items():
            grad, weight.grad = weight.grad, None
            if grad is None:
                continue
            grad = torch.where(ok, grad.float(), 0.0)
            accumulator = self.replicated_accumulators[name]
            accumulator += grad.square().mean(1)
            weight -= (grad * (self.optimizer.lr / (accumulator.sqrt() + self.optimizer.eps)).unsqueeze(1)).to(weight.dtype)
        self.steps += 1
        config = self.config
        if isinstance(config, Torchrec2dConfig) and not config.fully_sharded and self.steps == config.sync_every:
            self._average()

    def _average(self) -> None:
        """Weights and optimizer state become their means over the replicas; between steps every rank has its whole shard. The next average
        is counted from here, so that a run resumed from this state has it in the same step as the run that goes on."""
        self.steps = 0
        if isinstance(self.config, Torchrec2dConfig):
            self._module[0].sync(include_optimizer_state=True)

    def _collisions(self, table: str) -> Iterator[tuple[str, Tensor | Shards]]:
        """What a collision-managed table knows of its ids: raw ids, their rows, counts and last uses, and the step."""
        if self.options[table].ids != "zch":
            return
        at = f"._managed_collision_modules.{self.alias[table]}._"
        for key, value in self._module[0].state_dict().items():
            _, found, what = key.partition(at)
            if not found or what == "output_segments_tensor":
                continue
            what = what.removeprefix("mch_")
            if hasattr(value, "local_shards"):
                parts = tuple((tuple(s.metadata.shard_offsets), s.tensor) for s in value.local_shards())
                yield what, Shards(tuple(value.shape), parts[0][1].dtype, parts)
            else:
                yield what, value
        yield "ranks", self.zch_ranks[table]

    def describe(self) -> list[str]:
        """TorchRec's plan, bytes, and what overlaps what."""
        if self._ahead is None:
            return [
                *self.lines,
                "not pipelined: ids and rows of TorchRec's tables (fully sharded, data-parallel or collision-managed ones)",
            ]
        when = "" if self.device.type == "cuda" else " (on CUDA only)"
        return [*self.lines, f"pipelined: ids of the next batch with the backward pass{when}", "not pipelined: rows, and their gradients"]


class _Reset:
    """Rows of evicted ids begin anew; FBGEMM has this for CUDA only."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __call__(self, pruned_indices: Tensor, pruned_indices_offsets: Tensor, logical_table_ids: Tensor, buffer_ids: Tensor) -> None:
        table = int(logical_table_ids[0])
        self.kernel.split_embedding_weights()[table][pruned_indices] = 0.0
        self.kernel.split_optimizer_states()[table][0][pruned_indices] = 0.0


@contextmanager
def _generators_kept(device: torch.device) -> Iterator[None]:
    """TorchRec draws initial rows while it builds; the core's rows are drawn as if it had not."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield


def kernels_of(module: nn.Module) -> Iterator[tuple[Any, Any]]:
    """FBGEMM modules with an optimizer in backward, and the configurations of their tables."""
    for part in module.modules():
        for lookup in getattr(part, "_lookups", ()):
            for below in lookup.modules():
                kernel, held = getattr(below, "_emb_module", None), getattr(below, "_config", None)
                if kernel is not None and held is not None and hasattr(kernel, "split_optimizer_states"):
                    yield kernel, held.embedding_tables


def select(group: SparseGroup, keys: list[str]) -> SparseGroup:
    """The features ``keys`` of a group, in this order; without a copy where they follow one another."""
    missing = [k for k in keys if k not in group.keys]
    if missing:
        raise BatchError(f"the batch has no ids of {missing[0]!r}", where=f"features.{missing[0]}")
    at, bounds, samples = group.keys.index(keys[0]), group.key_bounds(), group.batch_size
    last = at + len(keys)
    if list(group.keys[at:last]) == keys:
        cut = slice(bounds[at], bounds[last])
        return SparseGroup(
            tuple(keys),
            group.values[cut],
            group.lengths[at * samples : last * samples],
            None if group.weights is None else group.weights[cut],
            tuple(b - bounds[at] for b in bounds[at : last + 1]),
        )
    weights = None if group.weights is None else {k: group.jagged(k, group.weights).values for k in keys}
    return SparseGroup.from_jagged({k: group[k] for k in keys}, weights)


def _bag(lengths: Tensor, rows: int) -> Tensor:
    return torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths, output_size=rows)
