"""Where TorchRec's planner would put the tables, beside this one's choice."""

from __future__ import annotations

from typing import Any

from rich.table import Table as RichTable

from gem_core.errors import PluginError
from gem_parallel.plan.candidates import table_classes
from gem_parallel.plan.search import Estimate, Space
from gem_parallel.plan.shards import layout
from gem_parallel.plan.workload import Table


def torchrec_plan(space: Space, ranks: int) -> dict[str, str]:
    """TorchRec's sharding type of each table for one sharding group of ``ranks``, on this cluster's memory and bandwidths.

    :raises PluginError: TorchRec is not installed.
    """
    try:
        from torchrec.distributed.embedding import EmbeddingCollectionSharder
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
        from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
        from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
        from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
    except ImportError as fault:
        raise PluginError(
            f"TorchRec's planner cannot be asked: {fault}", where="--torchrec", fix="pip install gem-parallel[torchrec], or leave it out"
        ) from None
    from torch import nn

    def split(tables: tuple[Table, ...], pooled: bool) -> list[Table]:
        return [t for t in tables if (t.bags > 0 and not t.event_ids) == pooled]

    bags, events = split(space.workload.tables, True), split(space.workload.tables, False)
    parts: dict[str, nn.Module] = {}
    sharders: list[Any] = []
    if bags:
        configs = [EmbeddingBagConfig(num_embeddings=t.rows, embedding_dim=t.dim, name=t.name, feature_names=[t.name]) for t in bags]
        parts["bags"] = EmbeddingBagCollection(tables=configs, device=_meta())
        sharders.append(EmbeddingBagCollectionSharder())
    if events:
        single = [EmbeddingConfig(num_embeddings=t.rows, embedding_dim=t.dim, name=t.name, feature_names=[t.name]) for t in events]
        parts["events"] = EmbeddingCollection(tables=single, device=_meta())
        sharders.append(EmbeddingCollectionSharder())
    tiers = space.cluster.tiers
    hbm = int(space.room - sum(v for k, v in space.memory(space.dense[0], space.sparse[0]).at_peak.items() if k == "activations"))
    topology = Topology(
        world_size=ranks,
        compute_device="cuda",
        hbm_cap=hbm,
        local_world_size=min(ranks, space.cluster.domains[0]),
        intra_host_bw=tiers[0].rate / 1e3,
        inter_host_bw=tiers[min(1, len(tiers) - 1)].rate / 1e3,
    )
    planner = EmbeddingShardingPlanner(
        topology=topology, batch_size=space.workload.batch, storage_reservation=FixedPercentageStorageReservation(0.0)
    )
    found = planner.plan(nn.ModuleDict(parts), sharders)
    return {name: str(one.sharding_type) for module in found.plan.values() for name, one in module.items()}


def _meta() -> Any:
    import torch

    return torch.device("meta")


def cross_check(space: Space, chosen: Estimate) -> RichTable:
    """Both choices for each class of tables of the chosen sharding group."""
    ranks = chosen.sparse.model
    theirs = torchrec_plan(space, ranks) if ranks > 1 else {}
    table = RichTable("tables", "rows", "ids a sample", "this planner", "TorchRec's planner", title=f"Tables over {ranks} ranks")
    by_name = {t.name: t for t in space.workload.tables}
    cuts = chosen.sparse.cuts or ("whole",) * len(table_classes(space.workload.tables))
    for group, cut in zip(table_classes(space.workload.tables), cuts):
        kinds = sorted({theirs[n] for n in group.names if n in theirs})
        first = by_name[group.names[0]]
        table.add_row(str(len(group.names)), f"{first.rows:,}", f"{first.ids:.1f}", cut, ", ".join(kinds) or "-")
    where = layout(chosen.sparse.tables(space.workload), chosen.sparse.cuts, ranks)
    table.caption = f"busiest rank sends {where.sent_max / max(where.sent_mean, 1e-30):.2f} x the mean, holds {where.held_max / 1e9:.2f} GB"
    return table
