"""How much of the exchange between table replicas a dense tower can hide: the planner's simulation, and what bytes through memory cost.

    python docs/benchmarks/planning/hidden.py --out docs/benchmarks/planning

The case is that of `gem_parallel.bench.embeddings` on two H200s: 8 tables of 2 M x 128, 4,096 samples of 10 ids a GPU, two replicas, a
tower of 54 ms. The simulation gives the exchange alone and what of it the tower waits for. It knows no contention by copies, for which
embeddings-2-beside.md measured 0.19 ms a GB that passes through a GPU's memory; those bytes are counted by hand below. Hidden: 1 less
waiting and contention over the exchange alone.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from gem_core.bench.page import table
from gem_parallel.plan.activations import Saved
from gem_parallel.plan.candidates import Sparse
from gem_parallel.plan.cluster import Cluster, load_cluster
from gem_parallel.plan.engine import run
from gem_parallel.plan.program import UnitTimes, step
from gem_parallel.plan.workload import Curve, PartWork, Table, Unit, Workload

CLUSTER = Path(__file__).parents[2] / "examples/clusters/h200-x8-host.toml"
MS_A_GB = 6.9 / 37
FORWARD, BACKWARD, LAYERS = 18e-3, 36e-3, 24
TABLES, ROWS, DIM, SAMPLES, POOLING = 8, 2_000_000, 128, 4096, 10
READS = SAMPLES * POOLING * TABLES
WHOLE = {"exchange": "whole", "schedule": "torchrec", "collective": "copy-engine"}


def case(cluster: Cluster, sparse: Sparse) -> tuple[float, float]:
    """Milliseconds of the exchange alone, and of waiting for it in a step."""
    unit = Unit("", 1, {"x": PartWork(Curve(0.0))}, Saved())
    units = (unit, *(Unit(f"layer {i}", 1, unit.work, Saved()) for i in range(LAYERS)), unit)
    tables = tuple(Table(f"t{i}", ROWS, DIM, 1, float(POOLING)) for i in range(TABLES))
    work = Workload("tower", "bf16", SAMPLES, units, tables, {"": np.zeros(8, dtype=np.int64)}, captured=True)
    none, layer = UnitTimes(0.0, 0.0), UnitTimes(FORWARD / LAYERS, BACKWARD / LAYERS)

    def seconds(times: UnitTimes, sparse: Sparse) -> float:
        ops = step(work, cluster, (none, *[times] * LAYERS, none), None, sparse)
        return float(run(ops, slowdown=cluster.collectives.slowdown).step)

    still = Sparse("fbgemm", 1, 1, element=sparse.element)
    return tuple(1e3 * (seconds(times, sparse) - seconds(times, still)) for times in (none, layer))  # type: ignore[return-value]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    cluster, shard = load_cluster(CLUSTER), TABLES * ROWS * DIM * 4 / 2 / 1e9
    moved = READS / 2 * DIM * 4 / 1e9
    copies = 4 * shard  # what a gather and an average send and receive, each read on one GPU and written on the other
    fewer = "no copy of the own part, sums straight from the peer"
    cases = [
        ("whole, fp32", Sparse("gem-2d", 1, 2, **WHOLE), 1.0, copies + 5 * shard),
        (f"whole, fp32, {fewer}", Sparse("gem-2d", 1, 2, **WHOLE), 1.0, copies + shard),
        ("whole, tables in fp16", Sparse("gem-2d", 1, 2, stored=(2,) * TABLES, **WHOLE), 0.5, copies + 5 * shard),
        # conversions read and write masters: the own part (1.5), staging (1.5), own mean (0.5 + 2); halves of the rest
        ("whole, fp32 tables that travel in bf16", Sparse("gem-2d", 1, 2, stored=(2,) * TABLES, **WHOLE), 1.0, 7.5 * shard),
        ("touched, rows in fp32", Sparse("gem-2d", 1, 2, exchange="touched"), 1.0, 4 * moved),
        ("touched, rows in bf16", Sparse("gem-2d", 1, 2, exchange="touched", element=2), 0.5, 4 * moved),
    ]  # fmt: skip
    rows: list[dict[str, Any]] = []
    for name, sparse, width, gigabytes in cases:
        alone, waited = case(cluster, sparse)
        contention = gigabytes * width * MS_A_GB
        rows.append({
            "exchange": name, "alone ms": alone, "waited for ms": max(0.0, waited), "GB through memory": gigabytes * width,
            "contention ms": contention, "step grows by ms": max(0.0, waited) + contention,
            "hidden %": max(0.0, 100 * (1 - (max(0.0, waited) + contention) / alone)),
        })  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "hidden.json").write_text(
        json.dumps({"command": "python docs/benchmarks/planning/hidden.py", "rows": rows}, indent=1) + "\n"
    )
    print(table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
