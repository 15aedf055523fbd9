"""Gradients of rows that many samples share: what splitting their reads over programs is worth.

    python docs/benchmarks/bag_sums.py --out OUT

2^20 reads of a table of 2^20 rows x 128, every read with a gradient of its own: ids drawn alike ("uniform"), by a Zipf law of 1.2, of which
the first id makes 18 % of all reads, one id in every eighth read, and one id in all. ``sums``: `gem_parallel.sparse.bag_sums` alone on
sorted reads, in a CUDA graph; ``serial`` with one program a row, as it was. ``update``: sort, sums and row-wise AdaGrad of fp32 rows in
the PyTorch engine, and FBGEMM's own backward pass of the same. Results are checked against sums in fp64 before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gem_core.bench.page import table
from gem_core.train.runfolder import environment
from gem_parallel.sparse import bag_sums as kernels
from gem_parallel.sparse.engines import Engine, build_engine
from gem_parallel.sparse.rowwise import Reads, RowwiseOptions

ROWS, READS, DIM = 1 << 20, 1 << 20, 128
SERIAL = 1 << 40


def ids_of(kind: str, device: str, rows: int = ROWS, reads: int = READS) -> torch.Tensor:
    g = torch.Generator().manual_seed(5)
    ids = torch.randint(0, rows, (reads,), generator=g)
    if kind == "zipf 1.2":
        weights = torch.arange(1, rows + 1, dtype=torch.float64).pow(-1.2)
        edges = weights.cumsum(0) / weights.sum()
        ids = torch.randperm(rows, generator=g)[
            torch.searchsorted(edges, torch.rand(reads, generator=g, dtype=torch.float64)).clamp(max=rows - 1)
        ]
    elif kind == "one id in 1/8":
        ids[::8] = rows // 3
    elif kind == "one id in all":
        ids.fill_(rows // 3)
    return ids.to(device)


def replayed(work: Callable[[], Any], rounds: int = 7) -> float:
    """Median milliseconds of ``work`` in a CUDA graph."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return timed(graph.replay, rounds)


def timed(work: Callable[[], Any], rounds: int, before: Callable[[], Any] = lambda: None) -> float:
    found = []
    for _ in range(rounds):
        before()
        torch.cuda.synchronize()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        stop.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(stop))
    return statistics.median(found)


def sums(kind: str, dtype: torch.dtype, variants: list[tuple[int, int]]) -> list[dict[str, Any]]:
    device = "cuda"
    reads = Reads.of(ids_of(kind, device), torch.arange(READS + 1, device=device), None, below=ROWS)
    gradients = torch.randn(READS, DIM, device=device).to(dtype)
    distinct = reads.rows.numel()
    want = torch.zeros(distinct, DIM, device=device, dtype=torch.float64).index_add_(0, reads.place, gradients.double())
    size = want.abs().amax(1, keepdim=True).clamp(min=1.0)
    gigabytes = (READS + distinct) * DIM * gradients.element_size() / 1e9
    rows = []
    for chunk, bags in variants:
        kernels.CHUNK, kernels.BAGS = chunk, bags
        found = reads.gradients(gradients, dtype)
        off = float(((found.double() - want).abs() / size).max())
        assert chunk == SERIAL or off < (1e-2 if dtype == torch.bfloat16 else 1e-5), (kind, chunk, off)
        ms = timed(lambda: reads.gradients(gradients, dtype), 1)
        if ms < 50:
            assert torch.equal(found, reads.gradients(gradients, dtype))
            ms = replayed(lambda: reads.gradients(gradients, dtype))
        rows.append(
            {
                "ids": kind,
                "distinct": distinct,
                "gradients": str(dtype).removeprefix("torch."),
                "way": "serial" if chunk == SERIAL else f"chunks of {chunk}",
                "bags a program": bags,
                "ms": ms,
                "GB/s": 1e3 * gigabytes / ms,
                "error": off,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def updates(kind: str, chunk: int) -> list[dict[str, Any]]:
    device = torch.device("cuda")
    ids, offsets = ids_of(kind, "cuda"), torch.arange(READS + 1, device=device)
    gradients, rows = torch.randn(READS, DIM, device=device).to(torch.bfloat16), []
    ways = {"PyTorch engine": ("torch", chunk), "FBGEMM": ("fbgemm", chunk), "PyTorch engine, serial": ("torch", SERIAL)}
    for name, (kernel, kernels.CHUNK) in ways.items():
        engine = build_engine(kernel, ROWS, DIM, "fp32", device, RowwiseOptions(), output=torch.bfloat16)
        rows.append({"ids": kind, "update by": name, "ms": _update_ms(engine, ids, offsets, gradients)})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def _update_ms(engine: Engine, ids: torch.Tensor, offsets: torch.Tensor, gradients: torch.Tensor) -> float:
    tickets: list[Any] = []

    def look_up() -> None:
        tickets.append(engine.look_up(ids, offsets, None, True)[1])

    def update() -> None:
        engine.update(tickets.pop(), gradients)

    first = timed(update, 1, look_up)
    return first if first > 500 else timed(update, 5, look_up)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--only", choices=("sums", "update"))
    parser.add_argument("--tune", action="store_true", help="other chunks and tiles too")
    args = parser.parse_args()
    begun, (chunk, bags) = time.monotonic(), (kernels.CHUNK, kernels.BAGS)
    kinds = ("zipf 1.2", "uniform", "one id in 1/8", "one id in all")
    data: dict[str, Any] = {"environment": environment(torch.device("cuda")), "sums": [], "update": []}
    data["environment"]["command"] = " ".join(["python", "docs/benchmarks/bag_sums.py", *sys.argv[1:]])
    variants = [(chunk, bags), (SERIAL, bags)]
    more = [(c, b) for c in (32, 64, 128, 256) for b in (8, 16) if (c, b) != (chunk, bags)] if args.tune else []
    todo: list[tuple[str, Callable[[], list[dict[str, Any]]]]] = []
    todo += [("sums", lambda k=k: sums(k, torch.bfloat16, variants)) for k in kinds]
    todo += [("sums", lambda k=k: sums(k, torch.bfloat16, more)) for k in kinds if more]
    todo += [("sums", lambda k=k: sums(k, torch.float32, variants[:1])) for k in kinds]
    todo += [("update", lambda k=k: updates(k, chunk)) for k in kinds]
    for section, work in todo:
        if args.only not in (None, section):
            continue
        if time.monotonic() - begun > args.seconds:
            print("time is up: not everything was measured", flush=True)
            break
        data[section] += work()
        kernels.CHUNK, kernels.BAGS = chunk, bags
        write(args.out, data)
    return 0


def write(out: Path, data: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "bag-sums.json").write_text(json.dumps(data, indent=1) + "\n")
    v = data["environment"]
    head = f"{v['device']}; " + ", ".join(f"{k} {n}" for k, n in v["versions"].items()) + f"\n\n`{v['command']}`"
    parts = [f"## {name}\n\n{table(data[name])}" for name in ("sums", "update") if data[name]]
    (out / "bag-sums.md").write_text(f"# Gradients of shared rows\n\n{head}\n\n" + "\n\n".join(parts) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
