"""How fast each part of the model runs at other widths of events: the curve that cluster files hold under ``[gpu.width]``.

    python docs/benchmarks/planning/widths.py --out docs/benchmarks/planning

`gem_core.bench.local` on the preset family at event widths of 256 to 2048 (layers repeat, so fewer of the wide ones will do), in bf16 on
the reference log of `base`. ``speed``: local MFU over that of `base` (512), whose rates the cluster file states.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from gem_core.bench.local import measure
from gem_core.bench.page import table
from gem_core.config import load_config

POINTS: dict[int, tuple[str, ...]] = {
    512: ('model.preset="base"', "data.batch_size=512"),
    1024: ('model.preset="large"', "model.layers=4", "data.batch_size=192"),
    2048: ('model.preset="xl"', "model.layers=2", "data.batch_size=96"),
    256: ('model.preset="base"', "model.sequence.dim=256", "model.sequence.heads=2", "data.batch_size=512"),
}
LOG = ('data.source="random"', 'data.random.preset="base"')


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    parser.add_argument("--widths", type=int, nargs="*", default=list(POINTS))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    found: dict[int, dict[str, Any]] = {}
    for width in args.widths:
        start = time.perf_counter()
        found[width] = measure(load_config(None, [*LOG, *POINTS[width], *args.overrides]), repeats=args.repeats)
        rates = {p["part"]: p["tflops"] for p in found[width]["parts"] if p["flops"]}
        print(f"{width}: {time.perf_counter() - start:.1f} s, TFLOP/s", {k: round(v, 1) for k, v in rates.items()}, flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        write(args.out, found)
    return 0


def write(out: Path, found: dict[int, dict[str, Any]]) -> None:
    first = next(iter(found.values()))
    where = {k: first[k] for k in ("device", "host", "versions", "commit")}
    where["command"] = " ".join(["python", "docs/benchmarks/planning/widths.py", *sys.argv[1:]])
    rows = [
        {
            "events' width": width,
            "part": p["part"],
            "samples": result["samples"],
            "calls": p["calls"],
            "GFLOP a sample": p["flops"] / result["samples"] / 1e9,
            "forward ms": p["forward_ms"],
            "total ms": p["total_ms"],
            "TFLOP/s": p["tflops"],
        }
        for width, result in found.items()
        for p in result["parts"]
        if p["flops"]
    ]
    reference = {r["part"]: r["TFLOP/s"] for r in rows if r["events' width"] == next(iter(found))}
    for row in rows:
        row["speed"] = row["TFLOP/s"] / reference[row["part"]]
    (out / "widths.json").write_text(json.dumps({"environment": where, "parts": rows}, indent=1) + "\n")
    head = f"{where['device']}; " + ", ".join(f"{k} {v}" for k, v in where["versions"].items())
    curve = []
    for part in reference:
        speeds = {str(r["events' width"]): round(r["speed"], 3) for r in rows if r["part"] == part}
        curve.append({"part": part, **{w: speeds.get(w) for w in map(str, sorted(found))}})
    text = f"# Rates of parts by the width of events\n\n{head}\n\n`{where['command']}`\n\n"
    (out / "widths.md").write_text(text + f"## speed\n\n{table(curve)}\n\n## parts\n\n{table(rows)}\n")


if __name__ == "__main__":
    raise SystemExit(main())
