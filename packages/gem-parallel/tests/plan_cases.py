"""Clusters and workloads for the tests of the planner."""

from __future__ import annotations

from typing import Any

import numpy as np

from gem_parallel.plan.activations import Saved
from gem_parallel.plan.cluster import Cluster
from gem_parallel.plan.workload import Curve, Experts, PartWork, Table, Unit, Workload


def cluster(
    *tiers: tuple[int, float, float, float], memory_gb: float = 40.0, slowdown: float = 1.1, message_us: float = 0.5, **gpu: Any
) -> Cluster:
    """``tiers``: (size, GB/s, latency in us, oversubscription), innermost first."""
    rates = {"default": 0.4}
    return Cluster.model_validate(
        {
            "name": "test",
            "gpu": {
                "name": "G", "memory_gb": memory_gb, "reserved_gb": min(4.0, memory_gb / 4), "memory_gbs": 5000,
                "peak_tflops": {"bf16": 1000, "fp32": 60}, "mfu": {"forward": rates, "backward": rates}, **gpu,
            },
            "collectives": {"launch_us": 20, "message_us": message_us, "slowdown": slowdown},
            "tiers": [
                {"name": f"tier {i}", "size": size, "bandwidth_gbs": rate, "latency_us": latency, "oversubscription": over}
                for i, (size, rate, latency, over) in enumerate(tiers)
            ],
        }
    )  # fmt: skip


def workload(
    *,
    layers: int = 3,
    experts: int = 4,
    expert_parameters: int = 10_000_000,
    trunk_parameters: int = 4_000_000,
    batch: int = 256,
    elements: int = 192 * 256,
    flops: float = 3e9,
    tables: tuple[Table, ...] = (),
    saved: float = 2e6,
    by_event: float = 0.0,
    lengths: np.ndarray | None = None,
) -> Workload:
    """Equal layers, 0.4 of whose FLOPs are the experts'; ``by_event`` FLOPs of every layer for each event of a history "h"."""
    top = 0 if lengths is None else int(lengths.max())
    history = {} if lengths is None else {"h": np.arange(top + 1) * by_event}

    def unit(name: str) -> Unit:
        inside = Experts(experts, expert_parameters, {"x": PartWork(Curve(0.4 * flops / experts))}, elements, elements) if experts else None
        return Unit(name, trunk_parameters, {"x": PartWork(Curve(flops * (0.6 if experts else 1.0), history))}, Saved(0, saved, 0), inside)

    ends = {"x": PartWork(Curve(1e7))}
    units = (Unit("front", 500_000, ends, Saved()), *(unit(f"layer {i}") for i in range(layers)), Unit("heads", 300_000, ends, Saved()))
    pool = {"": np.zeros(64, dtype=np.int64)} if lengths is None else {"h": lengths.astype(np.int64)}
    return Workload("test", "bf16", batch, units, tables, pool)
