"""TorchRec as its users set it up, on the benchmark's tables: 1D, 2D with averages, 2D fully sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gem_core.batch import SparseGroup
from gem_core.model.contract import TableSet
from gem_parallel.sparse.need import need
from gem_parallel.sparse.torchrec_tables import kernels_of


class Bags(nn.Module):
    """An EmbeddingBagCollection that gives ``[B, sum of dims]``; ``order``: the features in the order of its columns."""

    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self.bags = collection
        self.order: list[str] = []

    def forward(self, features: Any) -> Tensor:
        pooled = self.bags(features)
        pooled = pooled.wait() if hasattr(pooled, "wait") else pooled
        self.order = list(pooled.keys())
        return pooled.values()  # type: ignore[no-any-return]


def torchrec_module(tables: TableSet, kind: str, model: int, lr: float, eps: float, device: torch.device) -> nn.Module:
    """``kind`` "1d", "2d" or "fully-sharded"; tables whole, dealt out to the ranks of a sharding group in turn."""
    parallel, plans = need("torchrec.distributed.model_parallel", "this peer"), need("torchrec.distributed.sharding_plan", "this peer")
    types, modules = need("torchrec.distributed.types", "this peer"), need("torchrec.modules.embedding_configs", "this peer")
    sharder_type = need("torchrec.distributed.embeddingbag", "this peer").EmbeddingBagCollectionSharder
    collection_type = need("torchrec.modules.embedding_modules", "this peer").EmbeddingBagCollection
    optimizer = need("fbgemm_gpu.split_embedding_configs", "this peer").EmbOptimType.EXACT_ROWWISE_ADAGRAD
    configs = [
        modules.EmbeddingBagConfig(
            name=t.name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=[k.key for k in tables.lookups if k.table == t.name],
            pooling=modules.PoolingType.SUM,
        )
        for t in tables.tables
    ]  # fmt: skip
    bags = Bags(collection_type(tables=configs, device=torch.device("meta")))
    sharder = sharder_type(fused_params={"optimizer": optimizer, "learning_rate": lr, "eps": eps})
    ranks = dist.get_world_size() if kind == "1d" else model
    module_plan = plans.construct_module_sharding_plan(
        bags.bags,
        per_param_sharding={t.name: plans.table_wise(rank=i % ranks, compute_kernel="fused") for i, t in enumerate(tables.tables)},
        sharder=sharder,
        local_size=ranks,
        world_size=ranks,
        device_type="cuda",
    )
    plan = types.ShardingPlan(plan={"bags": module_plan})
    world = dist.group.WORLD
    if kind == "1d":
        env = types.ShardingEnv.from_process_group(world)
        return parallel.DistributedModelParallel(module=bags, env=env, device=device, plan=plan, sharders=[sharder])  # type: ignore[no-any-return]
    strategy = types.ShardingStrategy.FULLY_SHARDED if kind == "fully-sharded" else types.ShardingStrategy.DEFAULT
    return parallel.DMPCollection(  # type: ignore[no-any-return]
        module=bags,
        device=device,
        plan=plan,
        world_size=dist.get_world_size(),
        sharding_group_size=model,
        global_pg=world,
        sharding_strategy=strategy,
        sharders=[sharder],
    )


@torch.no_grad()
def fill(module: nn.Module, tables: TableSet, rows_of: Callable[[int, Tensor], Tensor]) -> None:
    """Give every table on this rank the values ``rows_of(table number, rows)``."""
    numbers = {t.name: i for i, t in enumerate(tables.tables)}
    for kernel, configs in kernels_of(module):
        for config, weight in zip(configs, kernel.split_embedding_weights()):
            for first in range(0, weight.shape[0], 1 << 18):
                rows = torch.arange(first, min(first + (1 << 18), weight.shape[0]), device=weight.device)
                weight[first : first + rows.numel()] = rows_of(numbers[config.name], rows)


def inputs(batches: Sequence[SparseGroup]) -> list[Any]:
    return [b.to_kjt() for b in batches]
