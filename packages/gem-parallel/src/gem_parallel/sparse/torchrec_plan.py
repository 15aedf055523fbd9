"""From the tables of a model to TorchRec's collections, sharders and plan."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gem_core.errors import ConfigError
from gem_core.model.contract import Lookup, TableSet
from gem_parallel.sparse.config import TableOptions, TorchrecConfig
from gem_parallel.sparse.layout import BYTES
from gem_parallel.sparse.need import need
from gem_parallel.sparse.rowwise import RowwiseOptions

KERNELS = {"hbm": "fused", "uvm": "fused_uvm", "uvm_caching": "fused_uvm_caching"}


class Collections(nn.Module):
    """The collections as children, so that TorchRec finds them by name."""

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self.names = tuple(parts)

    def forward(self, features: Mapping[str, Any]) -> dict[str, Any]:
        return {name: getattr(self, name)(features[name]) for name in self.names}


class Plans:
    """Builds for ``ranks`` ranks. ``alias``: the names that tables have inside of TorchRec, where a dot would end a module's name."""

    def __init__(
        self, tables: TableSet, options: Mapping[str, TableOptions], config: TorchrecConfig, alias: Mapping[str, str], ranks: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.tables, self.options, self.config, self.alias, self.ranks, self.device = tables, options, config, alias, ranks, device

    def collections(self) -> tuple[dict[str, nn.Module], dict[str, list[Lookup]]]:
        configs = need("torchrec.modules.embedding_configs", "this strategy")
        modules = need("torchrec.modules.embedding_modules", "this strategy")
        types = {"fp32": configs.DataType.FP32, "fp16": configs.DataType.FP16, "bf16": configs.DataType.BF16}
        groups: dict[str, list[str]] = {}
        for t in self.tables.tables:
            if self.options[t.name].ids == "zch" and t.rows % self.ranks:
                raise ConfigError(
                    f"table {t.name!r} has {t.rows} rows, and collision management wants a multiple of the {self.ranks} ranks",
                    where=f"features.tables.{t.name}.rows",
                    fix=f"set {-(-t.rows // self.ranks) * self.ranks} rows",
                )
            pooled = all(k.pooling != "none" for k in self.tables.lookups if k.table == t.name)
            kind = "bags" if pooled else f"events{t.dim}"
            kind = f"zch_{kind}" if self.options[t.name].ids == "zch" else kind
            groups.setdefault(kind, []).append(t.name)
        parts: dict[str, nn.Module] = {}
        reads: dict[str, list[Lookup]] = {}
        for name, members in groups.items():
            specs = [self.tables.table(m) for m in members]
            common = [
                {
                    "name": self.alias[t.name],
                    "embedding_dim": t.dim,
                    "num_embeddings": t.rows,
                    "feature_names": [k.key for k in self.tables.lookups if k.table == t.name],
                    "data_type": types[self.options[t.name].dtype or "fp32"],
                }
                for t in specs
            ]
            meta = torch.device("meta")
            if "bags" in name:
                tables = [configs.EmbeddingBagConfig(pooling=configs.PoolingType.SUM, **c) for c in common]
                part = modules.EmbeddingBagCollection(tables=tables, is_weighted=self.config.weighted, device=meta)
            else:
                part = modules.EmbeddingCollection(tables=[configs.EmbeddingConfig(**c) for c in common], device=meta)
            parts[name] = self._managed(part) if name.startswith("zch") else part
            reads[name] = [k for t in specs for k in self.tables.lookups if k.table == t.name]
        return parts, reads

    def _managed(self, part: Any) -> nn.Module:
        """``part`` with ids managed by TorchRec: every id gets a row of its own; the least used rows are taken back."""
        collisions = need("torchrec.modules.mc_modules", 'ids = "zch"')
        embedding = need("torchrec.modules.mc_embedding_modules", 'ids = "zch"')
        bags = hasattr(part, "embedding_bag_configs")
        configs = part.embedding_bag_configs() if bags else part.embedding_configs()
        managed = {
            c.name: collisions.MCHManagedCollisionModule(
                zch_size=c.num_embeddings,
                device=self.device,
                eviction_policy=collisions.DistanceLFU_EvictionPolicy(),
                eviction_interval=self.config.zch_interval,
            )
            for c in configs
        }
        collection = collisions.ManagedCollisionCollection(managed_collision_modules=managed, embedding_configs=configs)
        kind = embedding.ManagedCollisionEmbeddingBagCollection if bags else embedding.ManagedCollisionEmbeddingCollection
        return kind(part, collection)  # type: ignore[no-any-return]

    def sharders(self, optimizer: RowwiseOptions) -> list[Any]:
        optimizers = need("fbgemm_gpu.split_embedding_configs", "this strategy").EmbOptimType
        common = need("fbgemm_gpu.split_table_batched_embeddings_ops_common", "this strategy")
        fused = {
            "optimizer": optimizers.EXACT_ROWWISE_ADAGRAD,
            "learning_rate": optimizer.lr,
            "eps": optimizer.eps,
            "cache_load_factor": self.config.cache_fraction,
            "bounds_check_mode": common.BoundsCheckMode.FATAL,
        }
        bag = need("torchrec.distributed.embeddingbag", "this strategy").EmbeddingBagCollectionSharder(fused_params=fused)
        event = need("torchrec.distributed.embedding", "this strategy").EmbeddingCollectionSharder(fused_params=fused)
        sharders = [bag, event]
        if any(o.ids == "zch" for o in self.options.values()):
            managed = need("torchrec.distributed.mc_modules", 'ids = "zch"').ManagedCollisionCollectionSharder()
            bags = need("torchrec.distributed.mc_embeddingbag", 'ids = "zch"')
            events = need("torchrec.distributed.mc_embedding", 'ids = "zch"')
            sharders.append(bags.ManagedCollisionEmbeddingBagCollectionSharder(bag, managed))
            sharders.append(events.ManagedCollisionEmbeddingCollectionSharder(event, managed))
        return sharders

    def plan(self, holder: Collections, sharders: list[Any]) -> Any:
        types, ranks = need("torchrec.distributed.types", "this strategy"), self.ranks
        if self.config.sharding == "planner":
            return self._planned(holder, sharders)
        plans = need("torchrec.distributed.sharding_plan", "this strategy")
        held = [0.0] * ranks
        found = {}
        names = {a: n for n, a in self.alias.items()}
        for name in holder.names:
            part = getattr(holder, name)
            sharder = next(s for s in sharders if isinstance(part, s.module_type) and type(part) is s.module_type)
            ways = {}
            for alias in sharder.shardable_parameters(part):
                table = self.tables.table(names[alias])
                option = self.options[table.name]
                kernel = KERNELS[option.placement or "hbm"]
                how = "row" if option.ids == "zch" else (option.sharding or self.config.sharding)
                size = table.rows * table.dim * BYTES[option.dtype or "fp32"]
                if how == "auto":
                    how = "row" if size > sum(held) / ranks and table.rows >= ranks else "table"
                if how == "row":
                    ways[alias] = plans.row_wise(compute_kernel=kernel)
                elif how == "column":
                    ways[alias] = plans.column_wise(
                        ranks=_columns(table.dim, self.config.column_parts, ranks, table.name), compute_kernel=kernel
                    )
                elif how == "data":
                    ways[alias] = plans.data_parallel()
                else:
                    rank = min(range(ranks), key=lambda r: (held[r], r))
                    held[rank] += size
                    ways[alias] = plans.table_wise(rank=rank, compute_kernel=kernel)
            found[name] = plans.construct_module_sharding_plan(
                part, ways, sharder=sharder, local_size=self._local(ranks), world_size=ranks, device_type=self.device.type
            )
        return types.ShardingPlan(plan=found)

    def _planned(self, holder: Collections, sharders: list[Any]) -> Any:
        planner, ranks = need("torchrec.distributed.planner", "this strategy"), self.ranks
        kinds = need("torchrec.distributed.planner.types", "this strategy")
        words = {"row": "row_wise", "table": "table_wise", "column": "column_wise", "data": "data_parallel"}
        constraints = {}
        for name, option in self.options.items():
            ways = [words[option.sharding]] if option.sharding in words else ["table_wise", "row_wise"]
            ways = ["row_wise"] if option.ids == "zch" else ways
            kernels = ["dense"] if ways == ["data_parallel"] else [KERNELS[option.placement or "hbm"]]
            constraints[self.alias[name]] = kinds.ParameterConstraints(sharding_types=ways, compute_kernels=kernels)
        topology = kinds.Topology(world_size=ranks, compute_device=self.device.type, local_world_size=self._local(ranks))
        try:
            return planner.EmbeddingShardingPlanner(topology=topology, constraints=constraints, debug=False).collective_plan(
                holder, sharders, dist.group.WORLD
            )
        except kinds.PlannerError as error:
            total = sum(t.rows * t.dim * BYTES[self.options[t.name].dtype or "fp32"] for t in self.tables.tables)
            raise ConfigError(
                f"TorchRec's planner places {total / 2**30:.2f} GiB of tables on no {ranks} ranks: {str(error).splitlines()[0]}",
                where="parallel.torchrec",
                fix='use more ranks, placement = "auto" or a smaller dtype, or say sharding = "row"',
            ) from error

    @staticmethod
    def _local(ranks: int) -> int:
        return min(int(os.environ.get("LOCAL_WORLD_SIZE", ranks)), ranks)


def _columns(dim: int, parts: int, ranks: int, table: str) -> list[int]:
    """Ranks of a table's column parts."""
    if dim % parts or (dim // parts) % 4:
        raise ConfigError(
            f"table {table!r} of width {dim} does not split into {parts} column parts of a multiple of 4",
            where="parallel.torchrec.column_parts",
            fix="choose other parts, or another sharding for this table",
        )
    return [i % ranks for i in range(parts)]


def plan_lines(plan: Any, names: Mapping[str, str]) -> list[str]:
    lines = ["tables: TorchRec plan"]
    for part, module in plan.plan.items():
        for alias, sharding in module.items():
            ranks = ",".join(map(str, sharding.ranks or []))
            lines.append(f"  {names[alias]} ({part}): {sharding.sharding_type}, {sharding.compute_kernel}, ranks {ranks}")
    return lines
