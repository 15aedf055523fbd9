"""`gemrec predict` on a GPU beside the forward pass of training: samples a second of both, for one model on a planted log.

    python docs/benchmarks/predict_gpu.py --preset base --recipe bf16 --out docs/benchmarks

Training's forward pass is timed in training mode, gradients wanted, on batches that lie on the device already; predicting goes from a
Parquet file to a Parquet file, reading and writing included. Nothing is reported unless the predictions agree with the model called batch
by batch.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

import gem_core
from gem_core.config import load_config
from gem_core.errors import RunError
from gem_core.sources.synthetic import SyntheticConfig
from gem_core.train.build import build_source
from gem_core.train.predict import Predictor, predictor
from gem_core.train.runfolder import environment
from gem_data.predict import write_predictions
from gem_data.synth import write_synthetic

WANTED = 0.8


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--preset", default="base")
    options.add_argument("--recipe", default="bf16")
    options.add_argument("--device", default="cuda")
    options.add_argument("--rows", type=int, default=24_576)
    options.add_argument("--batch", type=int, default=512)
    options.add_argument("--batches", type=int, default=16)
    options.add_argument("--mean", type=float, default=560.0)
    options.add_argument("--longest", type=int, default=4096)
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--allowed", type=float, default=1e-2, help="largest difference of probabilities: that of bf16 in another order")
    options.add_argument("--write", type=Path, help="only write the log there")
    options.add_argument("--out", type=Path, required=True)
    args = options.parse_args()
    changed = {k: v for k, v in vars(args).items() if k not in ("out", "write") and v != options.get_default(k)}
    args.given = "".join(f" --{k.replace('_', '-')} {v}" for k, v in changed.items())
    if args.write is not None:
        write_synthetic(args.write, _world(args))
        # Histories of this length make row groups of so few rows in a file of the usual size.
        pq.write_table(pq.read_table(args.write / "test.parquet"), args.write / "test.parquet", row_group_size=1024)
        return
    with tempfile.TemporaryDirectory() as folder:
        record = run(args, Path(folder))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "predict-gpu.json").write_text(json.dumps(record, indent=1) + "\n")
    (args.out / "predict-gpu.md").write_text(table(record))
    print(table(record))


def _world(args: argparse.Namespace, rows: int | None = None, test_rows: int | None = None) -> SyntheticConfig:
    length: Any = {"law": "lognormal", "mean": args.mean, "max": args.longest}
    rows = args.batches * args.batch if rows is None else rows
    return SyntheticConfig(rows=rows, eval_rows=min(rows, 2 * args.batch), test_rows=test_rows or args.rows, length=length)


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    began = time.perf_counter()

    def say(what: str) -> None:
        print(f"{time.perf_counter() - began:6.1f} s  {what}", flush=True)

    small = _world(args, rows=64, test_rows=64)
    # The large log is written beside the warm-up: what that compiles does not depend on it.
    writing = subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--write", str(folder / "log")])
    write_synthetic(folder / "small", small)
    options = [
        f"model.preset={args.preset}",
        f"precision.recipe={args.recipe}",
        "train.steps=1",
        "eval.max_batches=1",
        "train.tensorboard=false",
    ]
    root = f"data.parquet.root={json.dumps(str(folder / 'small'))}"
    few = ["run.device=cpu", "data.batch_size=2", "precision.recipe=fp32", root]
    gem_core.train(load_config(folder / "small" / "config.toml", [*options, *few]), run_dir=folder / "run", quiet=True)
    say("a run is there, after one step")
    changes = [
        f"data.parquet.root={json.dumps(str(folder / 'log'))}",
        f"data.batch_size={args.batch}",
        f"precision.recipe={args.recipe}",
        f"run.device={args.device}",
    ]
    with predictor(folder / "run", overrides=[*changes, root]) as model:
        write_predictions(model, [str(folder / "small" / "test.parquet")], folder / "small.parquet")
        say("predicted 64 rows: kernels of prediction are compiled")
        _training_forward(model, 1)
        say("kernels of training's forward pass are compiled")
    if writing.wait():
        raise RunError("the log could not be written", where=str(folder))
    say("log written")
    data, out = folder / "log" / "test.parquet", folder / "predictions.parquet"
    with predictor(folder / "run", overrides=changes) as model:
        difference = _difference(model, folder / "log", args.allowed)
        say(f"largest difference from the model called batch by batch {difference:.1e}")
        forward = _training_forward(model, args.batches)
        say(f"forward pass of training {forward['samples_per_s']:,.0f} samples/s, {forward['events_per_s']:,.0f} events/s")
        rates = []
        for _ in range(args.repeats):
            start = time.perf_counter()
            done = write_predictions(model, [str(data)], out)
            rates.append(done.rows / (time.perf_counter() - start))
            say(f"predicting {rates[-1]:,.0f} rows/s")
        alone = _device_alone(model, args.batches)
        say(f"predicting without files {alone:,.0f} rows/s")
        if done.rows != args.rows or not pq.read_table(out)["sample_id"].equals(pq.read_table(data, columns=["sample_id"])["sample_id"]):
            raise RunError("the predictions are not those of the input's rows in their order", where=str(data))
        name = torch.cuda.get_device_name() if args.device == "cuda" else platform.machine()
    lengths = pq.read_table(data, columns=["history_item"])["history_item"].combine_chunks().value_lengths().to_numpy()
    return {
        "preset": args.preset,
        "recipe": args.recipe,
        "rows": args.rows,
        "history": {"mean": float(lengths.mean()), "quantiles": {str(q): float(np.quantile(lengths, q)) for q in (0.5, 0.9, 0.99, 1.0)}},
        "training_forward": forward,
        "predict_rows_per_s": rates,
        "without_files_rows_per_s": alone,
        "ratio": max(rates) / forward["samples_per_s"],
        "wanted": WANTED,
        "largest_difference": difference,
        "device": name,
        "command": "python docs/benchmarks/predict_gpu.py --out docs/benchmarks" + args.given,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "commit": environment(torch.device("cpu"))["commit"],
    }


def _wait(model: Predictor) -> None:
    if model.run.runtime.device.type == "cuda":
        torch.cuda.synchronize()


def _training_forward(model: Predictor, batches: int, warm: int = 4) -> dict[str, Any]:
    """Samples and events a second of the forward pass of training over one epoch of its batches; the better of two passes."""
    device, module = model.run.runtime.device, model.run.parts.model
    there = [batch.to(device) for batch in build_source(model.run.resolved, "train", model.run.runtime)][:batches]
    module.train()
    seconds = []
    with torch.enable_grad():
        for batch in there[:warm]:
            module(batch)
        for _ in range(2):
            _wait(model)
            began = time.perf_counter()
            for batch in there:
                module(batch)
            _wait(model)
            seconds.append(time.perf_counter() - began)
    module.eval()
    best = min(seconds)
    return {
        "samples_per_s": sum(batch.size for batch in there) / best,
        "events_per_s": sum(batch.tokens for batch in there) / best,
        "batch": there[0].size,
        "batches": len(there),
    }


def _device_alone(model: Predictor, batches: int) -> float:
    """Rows a second of the predictor on batches of the host: what reading and writing files leave of it."""
    there = [*build_source(model.run.resolved, "train", model.run.runtime)][:batches]
    began = time.perf_counter()
    for batch in there:
        model(batch)
    return sum(batch.size for batch in there) / (time.perf_counter() - began)


@torch.no_grad()
def _difference(model: Predictor, folder: Path, allowed: float) -> float:
    write_predictions(model, [str(folder / "eval.parquet")], folder / "eval-predictions.parquet")
    found = pq.read_table(folder / "eval-predictions.parquet")
    device, module = model.run.runtime.device, model.run.parts.module
    batches = build_source(model.run.resolved, "eval", model.run.runtime)
    want = torch.cat([module(batch.to(device)).logits.double().sigmoid().cpu() for batch in batches]).numpy()
    got = np.stack([found[f"{task}_probability"].to_numpy() for task in model.tasks], 1)
    worst = float(np.abs(got - want).max())
    if not worst <= allowed:
        raise RunError(f"predictions differ from the model's by {worst:.1e}", where=str(folder))
    return worst


def table(record: dict[str, Any]) -> str:
    h, forward = record["history"], record["training_forward"]
    lengths = ", ".join(f"{float(q):.0%} {v:,.0f}" for q, v in h["quantiles"].items())
    lines = [
        "# gemrec predict on a GPU",
        "",
        f"`{record['command']}`: preset `{record['preset']}`, {record['recipe']}, {record['rows']:,} rows, histories of mean "
        f"{h['mean']:.0f} ({lengths}). {record['device']}, "
        + ", ".join(f"{k} {v}" for k, v in record["versions"].items())
        + f", commit {record['commit']}.",
        "",
        "| measured | value |",
        "|---|---|",
        f"| forward pass of training, {forward['batch']} samples on the device, samples a second | {forward['samples_per_s']:,.0f} |",
        f"| predicting, Parquet to Parquet, rows a second, best of {len(record['predict_rows_per_s'])} "
        f"| {max(record['predict_rows_per_s']):,.0f} |",
        f"| predicting batches of {forward['batch']} on the host, no files | {record['without_files_rows_per_s']:,.0f} |",
        f"| predicting over the forward pass of training | {record['ratio']:.2f} (wanted {record['wanted']}) |",
        f"| largest difference of probabilities from the model called batch by batch | {record['largest_difference']:.1e} |",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
