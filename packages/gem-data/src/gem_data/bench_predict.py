"""``gemrec bench predict``: rows a second of `predict.write_predictions`, files to file, for the preset ``tiny`` on a generated log.

Nothing is reported unless the predictions equal those of the evaluation loop to 1e-6 and come in the order of the rows. Memory is that of
predicting the file and of predicting it four times over, each in a process of its own: a stream's peak does not grow.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from gem_core.config import load_config
from gem_core.errors import RunError
from gem_core.sources.synthetic import SyntheticConfig
from gem_core.train.build import build_source
from gem_core.train.offline import loaded_run
from gem_core.train.predict import Predictor, predictor
from gem_data.predict import write_predictions
from gem_data.synth import write_synthetic

CHECKED = 20_000
"""Rows whose predictions are compared with evaluation's."""


def run(rows: int, mean: float, repeats: int, threads: int, seed: int, folder: Path | None) -> dict[str, Any]:
    """The record; see `table`.

    :raises RunError: the predictions are wrong.
    """
    with tempfile.TemporaryDirectory(dir=folder) as name:
        return _run(Path(name), rows, mean, repeats, threads, seed)


def _run(folder: Path, rows: int, mean: float, repeats: int, threads: int, seed: int) -> dict[str, Any]:
    length: Any = {"law": "lognormal", "mean": mean}
    write_synthetic(folder, SyntheticConfig(rows=20_000, eval_rows=CHECKED, test_rows=rows, seed=seed, length=length))
    trained = _train(folder)
    torch.set_num_threads(threads)
    pa.set_cpu_count(threads)
    data, out = folder / "test.parquet", folder / "predictions.parquet"
    lengths = np.concatenate(
        [
            pq.ParquetFile(data).read_row_group(i, columns=["history_item"])[0].combine_chunks().value_lengths().to_numpy()
            for i in _groups(data)
        ]
    )
    evaluated = _evaluated(trained)
    with predictor(trained) as model:
        difference = _difference(model, folder, evaluated)
        seconds = []
        for _ in range(repeats):
            began = time.perf_counter()
            done = write_predictions(model, [str(data)], out)
            seconds.append(time.perf_counter() - began)
    if done.rows != rows or not pq.read_table(out)["sample_id"].equals(pq.read_table(data, columns=["sample_id"])["sample_id"]):
        raise RunError("the predictions are not those of the input's rows in their order", where=str(data))
    peaks = {str(copies): _peak(trained, data, out, copies, threads) for copies in (1, 4)}
    return {
        "rows": rows,
        "history": {"mean": float(lengths.mean()), "quantiles": {str(q): float(np.quantile(lengths, q)) for q in (0.5, 0.9, 0.99, 1.0)}},
        "threads": threads,
        "seconds": seconds,
        "rows_per_s": rows / min(seconds),
        "largest_difference_from_evaluation": difference,
        "peak_memory_mb": {copies: peak / 1e6 for copies, peak in peaks.items()},
        "seed": seed,
        "command": "gemrec bench predict " + " ".join(sys.argv[3:]),
        "cpu": _cpu(),
        "load_before": os.getloadavg()[0],
        "real_time_priority": hasattr(os, "sched_getscheduler") and os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "pyarrow": pa.__version__},
        "commit": _commit(),
    }


def table(record: dict[str, Any]) -> str:
    h, peaks = record["history"], record["peak_memory_mb"]
    lengths = ", ".join(f"{float(q):.0%} {v:,.0f}" for q, v in h["quantiles"].items())
    rates = ", ".join(f"{record['rows'] / s:,.0f}" for s in record["seconds"])
    lines = [
        f"`{record['command'].strip()}`: preset `tiny`, {record['rows']:,} rows, histories of mean {h['mean']:.1f} ({lengths}), "
        f"{record['threads']} threads. {record['cpu']}, load {record['load_before']:.1f} before"
        + (" (others' work; measured at real-time priority); " if record["real_time_priority"] else "; ")
        + ", ".join(f"{k} {v}" for k, v in record["versions"].items())
        + f", commit {record['commit']}.",
        "",
        "| measured | value |",
        "|---|---|",
        f"| rows a second, best of {len(record['seconds'])}, Parquet to Parquet | {record['rows_per_s']:,.0f} |",
        f"| all: rows a second | {rates} |",
        f"| peak memory, the file once | {peaks['1']:,.0f} MB |",
        f"| peak memory, the file four times over | {peaks['4']:,.0f} MB |",
        f"| largest difference from evaluation's probabilities | {record['largest_difference_from_evaluation']:.1e} |",
    ]
    return "\n".join(lines) + "\n"


def _train(folder: Path) -> Path:
    """A short training: what is measured does not depend on how good the model is, but it must not predict from zeros."""
    import gem_core

    options = [f"data.parquet.root={folder}", "train.steps=20", "eval.max_batches=1", "train.tensorboard=false", "run.device=cpu"]
    gem_core.train(load_config(folder / "config.toml", options), run_dir=folder / "run", quiet=True)
    return folder / "run"


def _evaluated(run: Path) -> np.ndarray:
    """Probabilities on the evaluation split by the model called batch by batch, as evaluation calls it."""
    with loaded_run(run) as loaded, torch.no_grad():
        loaded.parts.model.eval()
        batches = build_source(loaded.resolved, "eval", loaded.runtime)
        return torch.sigmoid(torch.cat([loaded.parts.module(batch).logits.double() for batch in batches])).numpy()


def _difference(model: Predictor, folder: Path, want: np.ndarray) -> float:
    """Largest difference of probabilities on the evaluation split from ``want``."""
    write_predictions(model, [str(folder / "eval.parquet")], folder / "eval-predictions.parquet")
    found = pq.read_table(folder / "eval-predictions.parquet")
    got = np.stack([found[f"{task}_probability"].to_numpy() for task in model.tasks], 1)
    worst = float(np.abs(got - want).max())
    if worst > 1e-6:
        raise RunError(f"predictions differ from evaluation's by {worst:.1e}", where=str(folder))
    return worst


def _peak(run: Path, data: Path, out: Path, copies: int, threads: int) -> int:
    """Peak resident bytes of a process that predicts ``copies`` copies of the file."""
    paths = []
    for i in range(copies):
        paths.append(data.with_name(f"copy-{i}.parquet"))
        if not paths[-1].exists():
            os.link(data, paths[-1])
    script = (
        "import sys, json, torch; from pathlib import Path; from gem_core.train.predict import predictor\n"
        "from gem_data.predict import write_predictions; run, out, threads, paths = json.loads(sys.argv[1])\n"
        "torch.set_num_threads(threads)\n"
        "with predictor(run) as model: write_predictions(model, paths, Path(out))\n"
        "from gem_core.train.measure import peak_resident; print(peak_resident())"
    )
    given = json.dumps([str(run), str(out), threads, [str(p) for p in paths]])
    done = subprocess.run([sys.executable, "-c", script, given], capture_output=True, text=True, check=True)
    return int(done.stdout)


def _groups(path: Path) -> range:
    return range(pq.ParquetFile(path).metadata.num_row_groups)


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {os.cpu_count()} cores" if names else platform.machine()


def _commit() -> str | None:
    done = subprocess.run(["git", "describe", "--always", "--dirty", "--match", ""], capture_output=True, text=True)
    return done.stdout.strip() or None
