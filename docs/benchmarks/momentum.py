"""Whole copies of tables on two replicas against one copy: held-out NE by the factor c of momentum-scaled row-wise AdaGrad.

    torchrun --nproc-per-node 2 docs/benchmarks/momentum.py --out docs/benchmarks

CPU processes train the preset `tiny` in fp32 on the planted log, 512 samples a step in all: one copy of every table ("1D"), and replicas
that update copies of their own, which are averaged every step ("whole", c = 1 to 4). Everything else is the same: samples, order, start.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gem_core.bench.page import table
from gem_core.config import load_config
from gem_core.train.runfolder import environment
from gem_core.train.trainer import Trainer

TWO = ("parallel.dense=ddp", "parallel.sparse=gem-2d", "parallel.model=1", "parallel.replica=2")
ROWS = {
    "1D": ("parallel.dense=ddp", "parallel.sparse=gem-2d", "parallel.model=2"),
    "1D, lr x 1.41": ("parallel.dense=ddp", "parallel.sparse=gem-2d", "parallel.model=2", "train.tables.lr=0.0707"),
    "whole, c = 2": TWO,
    "whole, c = 1": (*TWO, "parallel.gem-2d.momentum_scale=1.0"),
    "whole, c = 1.41": (*TWO, "parallel.gem-2d.momentum_scale=1.41"),
    "whole, c = 4": (*TWO, "parallel.gem-2d.momentum_scale=4.0"),
    "touched": (*TWO, "parallel.gem-2d.exchange=touched"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, nargs="+", default=[200, 2000])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batch", type=int, default=256, help="samples a process")
    parser.add_argument("--eval-rows", type=int, default=50_000)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--runs", default="/tmp/momentum-runs")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    args.out.mkdir(parents=True, exist_ok=True)
    begun, found = time.monotonic(), []
    for seed in args.seeds:
        for steps in args.steps:
            for name in args.rows:
                found.append({"steps": steps, "seed": seed, "tables": name, **train(args, steps, seed, name)})
                if dist.get_rank() == 0:
                    print(f"{time.monotonic() - begun:6.0f} s  {found[-1]}", flush=True)
                    write(args.out, found)
    dist.destroy_process_group()
    return 0


def train(args: argparse.Namespace, steps: int, seed: int, name: str) -> dict[str, Any]:
    given = [
        'data.source="synthetic"', f"data.synthetic.rows={args.batch * dist.get_world_size() * steps}",
        f"data.synthetic.eval_rows={args.eval_rows}", "data.synthetic.test_rows=1", f"data.batch_size={args.batch}", 'model.preset="tiny"',
        f"train.steps={steps}", f"run.seed={seed}", "train.tensorboard=false", 'run.device="cpu"',
    ]  # fmt: skip
    config = load_config(None, [*given, *args.overrides, *ROWS[name]])
    folder = Path(args.runs) / f"{steps}-{seed}-{name}".replace(" ", "").replace(",", "-")
    result = Trainer(config, run_dir=folder, quiet=True, overwrite=True).run()
    return {task: values["ne"] for task, values in result.tasks.items()}


def write(out: Path, found: list[dict[str, Any]]) -> None:
    where = environment(torch.device("cpu"))
    where["command"] = " ".join([f"torchrun --nproc-per-node {dist.get_world_size()}", "docs/benchmarks/momentum.py", *sys.argv[1:]])
    tasks = [k for k in found[0] if k not in ("steps", "seed", "tables")]
    lines = []
    for steps, name in sorted(dict.fromkeys((r["steps"], r["tables"]) for r in found), key=lambda row: row[0]):
        line: dict[str, Any] = {"steps": steps, "tables": name}
        for task in tasks:
            off = []
            for r in found:
                one = next((o for o in found if (o["steps"], o["seed"], o["tables"]) == (r["steps"], r["seed"], "1D")), None)
                if (r["steps"], r["tables"]) == (steps, name) and one is not None:
                    off.append(100 * (r[task] / one[task] - 1))
            line[f"NE of {task}"] = ", ".join(f"{r[task]:.5f}" for r in found if (r["steps"], r["tables"]) == (steps, name))
            line[f"{task} against 1D, %"] = f"{statistics.mean(off):+.3f} ({', '.join(f'{x:+.3f}' for x in off)})" if off else None
        lines.append(line)
    (out / "momentum.json").write_text(json.dumps({"environment": where, "rows": found}, indent=1) + "\n")
    head = f"{where['device']}; " + ", ".join(f"{k} {v}" for k, v in where["versions"].items())
    (out / "momentum.md").write_text(f"# Whole copies of tables against one copy\n\n{head}\n\n`{where['command']}`\n\n{table(lines)}\n")


if __name__ == "__main__":
    raise SystemExit(main())
