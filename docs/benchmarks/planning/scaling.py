"""Predicted scaling of a preset on a cluster: the plan against tables over all ranks (1D), plain FSDP, and both.

    cd docs/benchmarks/planning
    python scaling.py xl ../../examples/clusters/b200-3-tier.toml --worlds 128 256 512 1024 4096 16384 --out .

Needs no GPU. Writes ``scaling-<preset>.json`` and ``.md``.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from gem_core.errors import ConfigError
from gem_parallel.plan.cluster import load_cluster
from gem_parallel.plan.command import configuration, workload_of
from gem_parallel.plan.explain import baselines, cuts_text, efficiency, sparse_text
from gem_parallel.plan.search import Space, plan
from gem_parallel.plan.simulate import simulate


def row(space: Space) -> dict[str, Any]:
    begun = time.perf_counter()
    try:
        chosen = plan(space).runnable
    except ConfigError as fault:
        return {"world": space.world, "error": fault.what}
    seconds = time.perf_counter() - begun
    simulation = simulate(space.workload, space.cluster, chosen.dense, chosen.sparse)
    others = {
        name: {
            "step_ms": e.seconds * 1e3,
            "scaling_ratio": efficiency(space, e.seconds).scaling,
            "fits": e.memory.bytes <= space.room,
            "exposed_all_to_all_ms": e.collectives.get("embedding all-to-all", (0.0, 0.0))[1] * 1e3,
        }
        for name, e in baselines(space, chosen).items()
    }
    eff = efficiency(space, chosen.seconds)
    return {
        "world": space.world,
        "dense": f"{chosen.dense.strategy}: " + ", ".join(f"{a} {d}" for a, d in chosen.dense.degrees().items() if d > 1),
        "tables": f"{sparse_text(chosen.sparse)}: "
        + ", ".join(f"{a} {d}" for a, d in chosen.sparse.degrees().items() if d > 1)
        + f"; {cuts_text(space, chosen.sparse)}",
        "step_ms": chosen.seconds * 1e3,
        "simulated_ms": simulation.seconds * 1e3,
        "imbalance": simulation.imbalance,
        "memory_gb": chosen.memory.bytes / 1e9,
        "local_mfu": eff.local,
        "mfu": eff.step,
        "scaling_ratio": eff.scaling,
        "baselines": others,
        "search_s": seconds,
    }


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("preset")
    p.add_argument("cluster", type=Path)
    p.add_argument("--worlds", type=int, nargs="+", required=True)
    p.add_argument("--set", dest="overrides", action="append", default=[])
    p.add_argument("--out", type=Path, required=True)
    args = p.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    cluster = load_cluster(args.cluster)
    work = workload_of(configuration(args.preset, args.overrides), args.preset, None, 4096)
    rows = []
    for world in args.worlds:
        rows.append(row(Space.build(work, cluster, world)))
        print(json.dumps(rows[-1]), flush=True)
    result = {"preset": args.preset, "cluster": cluster.name, "batch_size": work.batch, "recipe": work.recipe, "rows": rows}
    (args.out / f"scaling-{args.preset}.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.out / f"scaling-{args.preset}.md").write_text(table(result))


def table(result: dict[str, Any]) -> str:
    lines = [
        f"# Predicted scaling of `{result['preset']}` on {result['cluster']}",
        "",
        f"{result['batch_size']} samples a GPU, recipe {result['recipe']}. Predictions of `gemrec plan`, not measurements.",
        "Scaling ratio: MFU of the step over local MFU. (x): does not fit into memory; all-to-all: exposed. Made by scaling.py.",
        "",
        "| GPUs | plan | tables | step ms | scaling ratio | slowest / mean rank | 1D tables | their all-to-all | plain FSDP | both |",
        "|" + "---|" * 10,
    ]
    for r in result["rows"]:
        if "error" in r:
            lines.append(f"| {r['world']:,} | {r['error']} |" + " |" * 8)
            continue
        other = r["baselines"]

        def ratio(name: str, other: dict[str, Any] = other) -> str:
            return f"{other[name]['scaling_ratio']:.1%}" + ("" if other[name]["fits"] else " (x)")

        lines.append(
            f"| {r['world']:,} | {r['dense']} | {r['tables']} | {r['step_ms']:,.0f} | {r['scaling_ratio']:.1%} | {r['imbalance']:.2f} "
            f"| {ratio('1D tables')} | {other['1D tables']['exposed_all_to_all_ms']:.0f} ms | {ratio('plain FSDP')} "
            f"| {ratio('1D tables, plain FSDP')} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
