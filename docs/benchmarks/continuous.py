"""Continuous training beside retraining from scratch: NE of every hour of a day whose planted truth drifts.

    python docs/benchmarks/continuous.py --out docs/benchmarks [--rows 96000] [--drift 3] [--epochs 1] [--work DIR]

The log has 24 partitions. The continuous run evaluates each, then trains on it, once; a second one also gives back rows that no sample read
for 6 hours. For every hour t from the second on, a model is trained from scratch on hours 0 … t - 1, shuffled together, and evaluated on
hour t: the same samples, seed, model and options. Written: NE of clicks by hour, and the ratio of the continuous run's to the other's.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import gem_core
from gem_core.config import load_config
from gem_core.sources.synthetic import SyntheticConfig
from gem_core.train.runfolder import environment
from gem_data.synth import write_partitions

HOURS, ALLOWED = 24, 1.05


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--rows", type=int, default=96_000)
    options.add_argument("--drift", type=float, default=3.0)
    options.add_argument("--mean", type=float, default=8.0)
    options.add_argument("--batch", type=int, default=128)
    options.add_argument("--epochs", type=int, default=1, help="passes of the training from scratch")
    options.add_argument("--every", type=int, default=1, help="compare every so many hours")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--work", type=Path)
    options.add_argument("--out", type=Path, required=True)
    args = options.parse_args()
    changed = {k: v for k, v in vars(args).items() if k not in ("out", "work") and v != options.get_default(k)}
    args.given = "".join(f" --{k.replace('_', '-')} {v}" for k, v in changed.items())
    with tempfile.TemporaryDirectory() as temporary:
        record = run(args, args.work or Path(temporary))
    args.out.mkdir(parents=True, exist_ok=True)
    name = "continuous" if args.epochs == 1 else f"continuous-{args.epochs}-passes"
    (args.out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    (args.out / f"{name}.md").write_text(table(record))
    print(table(record))


def run(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    length: Any = {"law": "lognormal", "mean": args.mean, "max": 256}
    world = SyntheticConfig(rows=args.rows, eval_rows=1, test_rows=1, days=1, drift=args.drift, users=5000, length=length)
    write_partitions(work, world, HOURS)
    names = sorted(p.name for p in (work / "log").iterdir())
    common = [
        "run.device=cpu",
        f"run.seed={args.seed}",
        f"data.batch_size={args.batch}",
        "data.eval_batch_size=1000",
        "train.tensorboard=false",
    ]
    began = time.perf_counter()
    follow = [*common, f"data.parquet-follow.root={json.dumps(str(work))}"]
    hours = {
        "continuous": _by_hour(work, "continuous", follow),
        "continuous, rows given back": _by_hour(work, "evicting", [*follow, "train.tables.evict_after=6"]),
        "from scratch": {},
    }
    for t in range(1, HOURS, args.every):
        past = json.dumps([str(work / "log" / name) for name in names[:t]])
        changes = [
            *common,
            "data.source=parquet",
            f"data.parquet.train={past}",
            f"data.parquet.eval={json.dumps(str(work / 'log' / names[t]))}",
            "eval.before_training=false",
            f"train.epochs={args.epochs}",
        ]
        done = gem_core.train(load_config(work / "config.toml", changes), run_dir=work / f"scratch-{t:02d}", quiet=True)
        hours["from scratch"][names[t]] = done.tasks
        print(names[t], {how: round(found[names[t]]["ctr"]["ne"], 4) for how, found in hours.items()}, flush=True)
    compared = list(hours["from scratch"])
    ratio = [hours["continuous"][name]["ctr"]["ne"] / hours["from scratch"][name]["ctr"]["ne"] for name in compared]
    return {
        "hours": hours,
        "ratio": dict(zip(compared, ratio)),
        "worst": max(ratio),
        "allowed": ALLOWED,
        "met": max(ratio) <= ALLOWED,
        "world": world.model_dump(mode="json"),
        "options": {k: v for k, v in vars(args).items() if k not in ("work", "out", "given")},
        "seconds": time.perf_counter() - began,
        "command": "python docs/benchmarks/continuous.py --out docs/benchmarks" + args.given,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "commit": environment(torch.device("cpu"))["commit"],
    }


def _by_hour(work: Path, name: str, changes: list[str]) -> dict[str, Any]:
    """Partition -> task -> metrics of the evaluation before training on it, and of the last one."""
    gem_core.train(load_config(work / "config.toml", changes), run_dir=work / name, quiet=True)
    lines = [json.loads(line) for line in (work / name / "eval.jsonl").read_text().splitlines()]
    return {line.get("partition", f"part-{HOURS - 1:03d}"): line["tasks"] for line in lines}


def table(record: dict[str, Any]) -> str:
    world, o = record["world"], record["options"]
    columns = list(record["hours"])
    lines = [
        "# Continuous training over 24 hours of a drifting truth" + ("" if o["epochs"] == 1 else f", {o['epochs']} passes from scratch"),
        "",
        f"`{record['command']}`: {world['rows']:,} samples, effects turning by {world['drift']} rad a day, histories of law mean "
        f"{o['mean']:g}, preset `tiny`, batch {o['batch']}; from scratch: all past hours shuffled, {o['epochs']} pass(es). CPU, "
        + ", ".join(f"{k} {v}" for k, v in record["versions"].items())
        + f", seed {o['seed']}, commit {record['commit']}.",
        "",
        f"NE of clicks in the hour before training on it. Worst ratio of the continuous run to training from scratch: "
        f"**{record['worst']:.4f}** (wanted at most {record['allowed']}).",
        "",
        "| hour | Bayes | " + " | ".join(columns) + " | ratio |",
        "|---|---|" + "---|" * (len(columns) + 1),
    ]
    given_back = columns[1]
    if all(record["hours"][given_back][name] == record["hours"][columns[0]][name] for name in record["ratio"]):
        lines.insert(6, "No row went unread for so long that it was given back: both continuous runs are the same.\n")
    for name, ratio in record["ratio"].items():
        found = [record["hours"][how][name]["ctr"]["ne"] for how in columns]
        bayes = record["hours"]["continuous"][name]["ctr"]["bayes_ne"]
        lines.append(f"| {int(name[-3:])} | {bayes:.4f} | " + " | ".join(f"{v:.4f}" for v in found) + f" | {ratio:.4f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
