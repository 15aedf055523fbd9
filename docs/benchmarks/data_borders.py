"""How long training waits for Parquet where an epoch ends: a preset's log is written, and a consumer that takes a fixed time a batch goes
through three epochs of it, each epoch read by itself and with reading ahead over the border.

    python docs/benchmarks/data_borders.py base --rows 153600 --step-ms 80 --out docs/benchmarks

With row groups of 10,240 rows and windows of 65,536 the default makes two windows of 71,680 rows and a short one, which is the hard case:
little is left to train on while the next epoch's first window is decoded. Every variant runs in a process of its own. ``--against FOLDER``
measures the source tree of another commit beside (`git archive COMMIT packages | tar -x -C FOLDER`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from train_overheads import tables

from gem_core.model.presets import find
from gem_core.train.measure import peak_resident
from gem_core.train.runfolder import _commit
from gem_data.parquet import ParquetSource
from gem_data.writer import write_parquet, write_text

EPOCHS = 3
VARIANTS = {"each epoch by itself": False, "ahead over the border": True}


def consume(path: Path, preset: str, step_ms: float, workers: int, ahead: bool) -> dict[str, Any]:
    """Waits in ms: for the first batch of all, of the batches that begin a later epoch, and the longest of the others."""
    chosen = find(preset)
    start = peak_resident()
    source = ParquetSource(path, chosen.features(), batch_size=chosen.batch_size, shuffle=True, workers=workers)
    waits: list[list[float]] = []
    for epoch in range(EPOCHS):
        if ahead:
            source.following = EPOCHS - 1 - epoch
        waits.append([])
        asked = time.perf_counter()
        for _ in source:
            waits[-1].append((time.perf_counter() - asked) * 1e3)
            time.sleep(step_ms / 1e3)
            asked = time.perf_counter()
    later = [wait for own in waits for wait in own[1:]]
    return {
        "batches": [len(own) for own in waits],
        "first_ms": waits[0][0],
        "border_ms": [own[0] for own in waits[1:]],
        "within_ms": max(later),
        "share": (sum(later) + sum(own[0] for own in waits[1:])) / (step_ms * sum(map(len, waits))),
        "start_bytes": start,
        "peak_bytes": peak_resident(),
    }


def table(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    machine = record["machine"]
    lines = [
        f"`{record['command']}`, commit {record['commit']}: `{record['preset']}`, {record['rows']:,} rows, {EPOCHS} epochs, a consumer "
        f"that takes {record['step_ms']:g} ms a batch; {machine['cores']} cores of {machine['cpu']} (load {machine['load']:.1f}), "
        f"pyarrow {record['versions']['pyarrow']}.",
        "",
        "| reading | longest wait at the two borders | longest within an epoch | waiting in all, of the consumer's time | peak memory |",
        "|---|---|---|---|---|",
    ]
    for name, found in record["variants"].items():
        lines.append(
            f"| {name} | {max(found['border_ms']):,.0f} ms | {found['within_ms']:,.0f} ms | {found['share']:.2%} "
            f"| {(found['peak_bytes'] - found['start_bytes']) / 1e9:.2f} GB |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("preset", nargs="?", default="base")
    options.add_argument("--rows", type=int, default=153_600)
    options.add_argument("--step-ms", type=float, default=80.0)
    options.add_argument("--workers", type=int, default=0)
    options.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    options.add_argument("--file", type=Path, help="a log that is there already, of these rows")
    options.add_argument("--against", type=Path, metavar="FOLDER", help="source tree of another commit, measured too")
    options.add_argument("--out", type=Path, help="also write data-borders.json and .md there")
    args = options.parse_args()
    if args.variant is not None:
        print(json.dumps(consume(args.file, args.preset, args.step_ms, args.workers, VARIANTS[args.variant])))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = args.file or Path(folder) / "train.parquet"
        if args.file is None:
            written = list(tables(args.preset, "train", args.rows))
            write_parquet(path, written[0].schema, iter(written))
        own = ["--step-ms", str(args.step_ms), "--workers", str(args.workers), "--file", str(path)]
        found = {}
        trees = [(f"{args.against.name}, each epoch by itself", args.against, next(iter(VARIANTS)))] if args.against else []
        for label, tree, name in (*trees, *((name, None, name) for name in VARIANTS)):
            sources = {} if tree is None else {"PYTHONPATH": ":".join(str(path) for path in sorted(tree.glob("packages/*/src")))}
            command = [sys.executable, __file__, args.preset, "--variant", name, *own]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env={**os.environ, **sources})
            found[label] = json.loads(done.stdout)
            print(label, found[label], flush=True)
    cpu = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    record = {
        "command": shlex.join(["python", "docs/benchmarks/data_borders.py", *sys.argv[1:]]),
        "commit": str(_commit())[:9],
        "preset": args.preset,
        "rows": args.rows,
        "step_ms": args.step_ms,
        "machine": {"cpu": cpu[0] if cpu else platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()[0]},
        "versions": {"python": platform.python_version(), "pyarrow": pa.__version__, "torch": torch.__version__},
        "variants": found,
    }
    text = table(record)
    print(text)
    if args.out is not None:
        write_text(args.out / "data-borders.json", json.dumps(record, indent=1) + "\n")
        write_text(args.out / "data-borders.md", "# Parquet where an epoch ends\n\n" + text)


if __name__ == "__main__":
    main()
