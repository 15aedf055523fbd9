"""What a student gains from a teacher: NE on the planted log, with and without `gemrec distill`.

    python docs/benchmarks/distill.py --out docs/benchmarks [--rows 140000] [--student-rows 20000] [--seeds 0,1,2] [--work DIR]

The teacher (preset `tiny`, two layers) trains on the older rows, once. The student, smaller (one layer of width 16), has the newest rows
only, which the teacher has not seen: once with its labels alone, once with the teacher's predictions of the same rows beside them; all else
is equal, seeds included. Evaluated on the test split, which follows both. Written: NE, and the share of the gap between student and teacher
that the teacher closes.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import gem_core
from gem_core.config import load_config
from gem_core.sources.synthetic import SyntheticConfig
from gem_core.train.runfolder import environment
from gem_data.distill import distill
from gem_data.synth import write_synthetic

WANTED = 0.2
STUDENT = ["model.layers=1", "model.dim=16", "model.embedding_dim=16", "model.sequence.dim=16"]
HOW = {"train.distill.weight": 1.0, "train.distill.alpha": 1.0, "train.distill.beta": 1.0}


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--rows", type=int, default=140_000)
    options.add_argument("--student-rows", type=int, default=20_000)
    options.add_argument("--epochs", type=int, default=1, help="passes of the student, with and without a teacher")
    options.add_argument("--mean", type=float, default=12.0)
    options.add_argument("--batch", type=int, default=128)
    options.add_argument("--seeds", default="0,1,2")
    options.add_argument("--weight", type=float, default=1.0)
    options.add_argument("--work", type=Path)
    options.add_argument("--out", type=Path, required=True)
    args = options.parse_args()
    changed = {k: v for k, v in vars(args).items() if k not in ("out", "work") and v != options.get_default(k)}
    args.given = "".join(f" --{k.replace('_', '-')} {v}" for k, v in changed.items())
    with tempfile.TemporaryDirectory() as temporary:
        record = run(args, args.work or Path(temporary))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "distill.json").write_text(json.dumps(record, indent=1) + "\n")
    (args.out / "distill.md").write_text(table(record))
    print(table(record))


def run(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    length: Any = {"law": "lognormal", "mean": args.mean, "max": 256}
    world = SyntheticConfig(rows=args.rows, eval_rows=20_000, test_rows=20_000, users=10_000, length=length)
    write_synthetic(work, world)
    common = [
        "run.device=cpu",
        f"data.batch_size={args.batch}",
        "data.eval_batch_size=1000",
        "train.tensorboard=false",
        f"data.parquet.root={json.dumps(str(work))}",
        "data.parquet.eval=test.parquet",
    ]
    began = time.perf_counter()
    edge = args.rows - args.student_rows
    older = f'data.parquet.train_filter="sample_id < {edge}"'
    teacher = gem_core.train(load_config(work / "config.toml", [*common, older]), run_dir=work / "teacher", quiet=True)
    print("teacher", teacher.tasks["ctr"], round(time.perf_counter() - began), "s", flush=True)
    newest = f'data.parquet.train_filter="sample_id >= {edge}"'
    how = {**HOW, "train.distill.weight": args.weight}
    runs = []
    for seed in map(int, args.seeds.split(",")):
        changes = [*common, *STUDENT, newest, f"run.seed={seed}", f"train.epochs={args.epochs}"]
        alone = gem_core.train(load_config(work / "config.toml", changes), run_dir=work / f"alone-{seed}", quiet=True)
        taught = distill(
            work / "teacher",
            work / "config.toml",
            scores=work / "scored",
            run_dir=work / f"taught-{seed}",
            overrides=[*changes, *(f"{key}={value}" for key, value in how.items())],
            quiet=True,
        )
        runs.append({"seed": seed, "alone": alone.tasks, "taught": taught.tasks})
        print(seed, {k: runs[-1][k]["ctr"]["ne"] for k in ("alone", "taught")}, round(time.perf_counter() - began), "s", flush=True)
    closed = {task: [_closed(r, teacher.tasks, task) for r in runs] for task in ("ctr", "cvr")}
    return {
        "teacher": teacher.tasks,
        "runs": runs,
        "closed": closed,
        "wanted": WANTED,
        "met": min(closed["ctr"]) >= WANTED,
        "distill": how,
        "student": STUDENT,
        "world": world.model_dump(mode="json"),
        "options": {k: v for k, v in vars(args).items() if k not in ("work", "out", "given")},
        "seconds": time.perf_counter() - began,
        "command": "python docs/benchmarks/distill.py --out docs/benchmarks" + args.given,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "commit": environment(torch.device("cpu"))["commit"],
    }


def _closed(run: dict[str, Any], teacher: Any, task: str) -> float:
    """Share of the gap between the student alone and the teacher."""
    alone = run["alone"][task]["ne"]
    share: float = (alone - run["taught"][task]["ne"]) / (alone - teacher[task]["ne"])
    return share


def table(record: dict[str, Any]) -> str:
    o, world = record["options"], record["world"]
    lines = [
        "# A student with and without a teacher, planted log",
        "",
        f"`{record['command']}`: teacher `tiny` on the older {o['rows'] - o['student_rows']:,} samples, student "
        f"({', '.join(record['student'])}) on the newest {o['student_rows']:,}, {o['epochs']} pass(es), batch {o['batch']}; "
        f"test split of {world['test_rows']:,}. CPU, "
        + ", ".join(f"{k} {v}" for k, v in record["versions"].items())
        + f", commit {record['commit']}. "
        + ", ".join(f"{k.rpartition('.')[2]} {v:g}" for k, v in record["distill"].items())
        + ", adapter on.",
        "",
        "| task | seed | teacher NE | student alone | student with teacher | Bayes | share of the gap closed |",
        "|---|---|---|---|---|---|---|",
    ]
    for task, closed in record["closed"].items():
        for r, share in zip(record["runs"], closed):
            t = record["teacher"][task]
            lines.append(
                f"| {task} | {r['seed']} | {t['ne']:.4f} | {r['alone'][task]['ne']:.4f} | {r['taught'][task]['ne']:.4f} "
                f"| {t['bayes_ne']:.4f} | {share:.0%} |"
            )
        lines.append(f"| {task} | mean | | | | | {statistics.mean(closed):.0%} |")
    lines += ["", f"Wanted: {record['wanted']:.0%} of the gap of the clicks' NE."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
