"""Embedding tables alone, and beside a dense tower: TorchRec's strategies and gem-2d in one run.

    torchrun --nproc-per-node 4 -m gem_parallel.bench.embeddings --out OUT

First every strategy must be right: gem-2d against its single-process simulators on small tables, and what each strategy, TorchRec's
included, looks up in the full tables against values computed from the ids. Then every strategy is timed in ``--rounds`` rounds: medians of
single steps by CUDA events, the slowest rank's; memory peaks are of the steps after warm-up, with the counters reset.

The share of gathers and reduce-scatters that a dense tower hides is ``1 - (t - t0) / x``: t the step with tower and exchange between
replicas, t0 the same without that exchange, x the exchange alone. Of ``t - t0`` the tower stands still, waiting for rows, for
``waiting``; the rest is slower products. By the copy engine, the step is also timed without what takes SMs: sums, and copies of the own
part.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gem_core.batch import SparseGroup
from gem_core.config.schema import TableOptimizer
from gem_core.jagged import Jagged
from gem_core.model.contract import Lookup, TableSet, TableSpec
from gem_core.train.mesh import Mesh
from gem_parallel.bench import peers, report
from gem_parallel.collectives import pushed_mean
from gem_parallel.collectives.copy_engine import CopyEngineGather, CopyEngineSource
from gem_parallel.collectives.members import CudaMembers
from gem_parallel.sparse.comm import Lane, axes
from gem_parallel.sparse.config import Gem2dConfig
from gem_parallel.sparse.rowwise import segment_sum
from gem_parallel.sparse.simulate import Simulator, groups_of, joined, run_rank, toy_tables
from gem_parallel.sparse.twod import Tables2d

OPTIMIZER = TableOptimizer(lr=0.02, eps=1e-3)
GEM: dict[str, dict[str, Any]] = {
    "gem-2d whole, torchrec order": {"schedule": "torchrec"},
    "gem-2d whole, torchrec order, copy engine": {"schedule": "torchrec", "collective": "copy-engine"},
    "gem-2d whole, article order": {"schedule": "article"},
    "gem-2d whole, article order, copy engine": {"schedule": "article", "collective": "copy-engine"},
    "gem-2d touched": {"exchange": "touched"},
}
BASE = "TorchRec FULLY_SHARDED"
PEERS = {BASE: "fully-sharded", "TorchRec 1D": "1d", "TorchRec 2D, no average": "2d", "TorchRec 2D, average each step": "2d"}


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tables", type=int, default=8)
    p.add_argument("--rows", type=int, default=2_000_000)
    p.add_argument("--dim", type=int, default=128)
    p.add_argument("--samples", type=int, default=4096, help="a rank")
    p.add_argument("--pooling", type=int, default=10, help="ids a bag")
    p.add_argument("--model", type=int, default=2, help="degree of the model axis; replicas take the rest")
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--warmup", type=int, default=8)
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--tower", type=int, nargs="+", default=[24], help="layers of the dense tower (8192 x 8192, bf16)")
    p.add_argument(
        "--by",
        nargs="+",
        default=["copy-engine", "8", "0"],
        help="beside the tower: a back end, or NCCL, with at most so many SMs (copy-engine:24; 8; 0: no limit); copy-engine:4:32: means "
        "through 32 MiB",
    )
    p.add_argument("--orders", nargs="+", choices=["torchrec", "article"], default=["torchrec", "article"], help="beside the tower")
    p.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    p.add_argument("--budget", type=float, default=1e9, help="seconds after which nothing more is begun")
    p.add_argument("--only", nargs="+", default=[""], help="strategies whose names hold one of these")
    p.add_argument("--skip-peers", action="store_true")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "out")))
    return p.parse_args()


class Bench:
    """The tables, the batches of this rank, and the measuring."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.started = time.monotonic()
        self.args, self.rank, self.world = args, dist.get_rank(), dist.get_world_size()
        self.cuda = args.device == "cuda"
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if self.cuda else torch.device("cpu")
        self.mesh = Mesh(self.world, model=args.model, replica=-1, rank=self.rank)
        tables = tuple(TableSpec(f"t{i}", args.rows, args.dim, 0.01) for i in range(args.tables))
        self.tables = TableSet(tables, tuple(Lookup(f"f{i}", f"t{i}", "sum") for i in range(args.tables)))
        g = torch.Generator().manual_seed(args.seed * 1000 + self.rank)
        self.batches = [self._batch(g) for _ in range(4)]
        self.gradient = (torch.randn(args.samples, args.tables * args.dim, generator=g) / args.samples).to(self.device)

    def _batch(self, g: torch.Generator) -> SparseGroup:
        a = self.args
        lengths = torch.full((a.samples,), a.pooling, dtype=torch.int32)
        features = {
            k.key: Jagged.from_lengths(torch.randint(0, a.rows, (a.samples * a.pooling,), generator=g), lengths)
            for k in self.tables.lookups
        }
        group = SparseGroup.from_jagged(features)
        return SparseGroup(group.keys, group.values.to(self.device), group.lengths.to(self.device), None, group.offsets_per_key)

    def values(self, table: int, rows: Tensor) -> Tensor:
        """The initial rows of a table, computed from their numbers: ``[n, dim]``."""
        columns = torch.arange(self.args.dim, device=rows.device) * 0.1
        return torch.sin(((rows * 7919 + table * 104729) % 100003).float().unsqueeze(1) * 1e-3 + columns) * 0.05

    def expected(self, group: SparseGroup) -> Tensor:
        parts = []
        for i, k in enumerate(self.tables.lookups):
            ids = group[k.key]
            rows = self.values(i, ids.values)
            parts.append(segment_sum(rows, torch.arange(rows.shape[0], device=rows.device), ids.offsets.long()))
        return torch.cat(parts, 1)

    # Strategies

    def gem(self, options: dict[str, Any]) -> Tables2d:
        config = Gem2dConfig.model_validate({"sharding": "table", **options})
        with torch.device(self.device):
            module = Tables2d(self.tables, axes(self.mesh, self.device, ctas=config.ctas), config)
        module.configure_optimizer(OPTIMIZER)
        module.train()
        with torch.no_grad():
            for i, table in enumerate(self.tables.tables):
                for piece, unit in module._held(table.name):
                    first, last = piece.rows_of(module.axes.replica_rank)
                    for at in range(first, last, 1 << 18):
                        rows = torch.arange(at, min(at + (1 << 18), last), device=self.device)
                        start = piece.base + at - first
                        unit.weight[start : start + rows.numel()] = self.values(i, rows)
        return module

    def gem_step(self, options: dict[str, Any], prefetch: bool) -> tuple[Any, Callable[[int], Tensor]]:
        module, ok = self.gem(options), torch.ones((), dtype=torch.bool, device=self.device)
        gradients = list(self.gradient.split(self.args.dim, 1))

        def step(i: int) -> Tensor:
            results = list(module(self.batches[i % 4]).values())
            if prefetch:
                module.prefetch(self.batches[(i + 1) % 4])
            torch.autograd.backward(results, gradients)
            module.after_backward(ok)
            return torch.cat([r.detach() for r in results], 1) if i == 0 else results[0]

        return module, step

    def peer_step(self, name: str) -> tuple[Any, Callable[[int], Tensor]]:
        module = peers.torchrec_module(self.tables, PEERS[name], self.args.model, OPTIMIZER.lr, OPTIMIZER.eps, self.device)
        peers.fill(module, self.tables, self.values)
        batches, average = peers.inputs(self.batches), "average each" in name

        def step(i: int) -> Tensor:
            out: Tensor = module(batches[i % 4])
            out.backward(self.gradient)  # type: ignore[no-untyped-call]
            if average:
                module.sync()  # type: ignore[operator]
            if i:
                return out.detach()
            order: Any = module.module
            columns = dict(zip(order.order, out.detach().split(self.args.dim, 1)))  # type: ignore[no-untyped-call]
            return torch.cat([columns[k.key] for k in self.tables.lookups], 1)

        return module, step

    # Measuring

    def timed(self, step: Callable[[int], Any], steps: int, warmup: int) -> list[float]:
        """Milliseconds of each step on this rank."""
        for i in range(warmup):
            step(i + 1)
        self.settle()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        marks = [self.mark()]
        for i in range(steps):
            step(warmup + i + 1)
            marks.append(self.mark())
        self.settle()
        return [self.between(a, b) for a, b in zip(marks, marks[1:])]

    def between(self, a: Any, b: Any) -> float:
        """Milliseconds between two marks."""
        return (b - a) * 1e3 if isinstance(a, float) else float(a.elapsed_time(b))

    def mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def time_left(self) -> bool:
        """Whether the budget allows something more: rank 0's clock decides for all."""
        left = torch.tensor([float(time.monotonic() - self.started < self.args.budget)])
        dist.broadcast(left, 0)
        return bool(left)

    def settle(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)
        dist.barrier()

    def slowest(self, number: float) -> float:
        worst = torch.tensor([number], dtype=torch.float64, device=self.device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return float(worst)

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(f"{time.monotonic() - self.started:.1f} s: {text}", flush=True)

    def clean(self) -> None:
        gc.collect()
        if self.cuda:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
        dist.barrier()

    def measured(self, name: str, build: Callable[[], tuple[Any, Callable[[int], Tensor]]]) -> dict[str, Any] | None:
        """Check the first look-up, then time."""
        self.clean()
        started = torch.cuda.memory_allocated(self.device) if self.cuda else 0
        module, step = build()
        error = float((step(0) - self.expected(self.batches[0])).abs().max())
        worst = self.slowest(error)
        if not worst < 1e-4:
            self.say(f"{name}: wrong by {worst:.3g}, not timed")
            return None
        times = self.timed(step, self.args.steps, self.args.warmup)
        row: dict[str, Any] = {
            "strategy": name,
            "ms": self.slowest(statistics.median(times)),
            "best ms": self.slowest(min(times)),
            "error": worst,
        }
        if self.cuda:
            outside = getattr(module, "outside_bytes", 0)
            row["peak GiB"] = self.slowest((torch.cuda.max_memory_allocated(self.device) - started + outside) / 2**30)
            row["reserved GiB"] = self.slowest(torch.cuda.max_memory_reserved(self.device) / 2**30)
        self.say(str(row))
        del module, step
        return row


# Correctness on small tables


Mode = tuple[str, str, str, bool]
"""Schedule, exchange, back end, and whether ids travel ahead."""


def mode_of(options: dict[str, Any], ahead: bool = True) -> Mode:
    config = Gem2dConfig.model_validate(options)
    return config.schedule, config.exchange, config.collective, ahead


def check_simulators(bench: Bench, modes: Iterable[Mode]) -> list[dict[str, Any]]:
    """gem-2d on the device against the single-process simulators: results of twenty steps and final state."""
    world, device, kernel = bench.world, str(bench.device), "fbgemm" if bench.cuda else "torch"
    rows: list[dict[str, Any]] = []
    for schedule, exchange, by, prefetch in modes:
        task = {
            "strategy": "gem-2d", "model": bench.args.model, "steps": 20, "weighted": prefetch, "prefetch": prefetch,
            "samples": [s[:world] for s in ([4, 3, 0, 5] * (world // 4 + 1), [1, 0, 6, 2] * (world // 4 + 1))],
            "optimizer": {"lr": 0.1, "eps": 1e-3},
            "config": {"schedule": schedule, "exchange": exchange, "kernel": kernel, "sharding": "row", "collective": by},
        }  # fmt: skip
        replicas = world // bench.args.model
        kind = {"schedule": schedule, "scale": float(replicas)} if exchange == "whole" else {"schedule": "mean"}
        error = _against_simulator(bench, task, device, kind)
        rows.append(
            {"exchange": exchange, "schedule": schedule, "by": by, "kernel": kernel, "ids ahead": str(prefetch), "largest error": error}
        )
        bench.say(str(rows[-1]))
    return rows


def wrong(rows: list[dict[str, Any]], mode: Mode) -> bool:
    """Whether the mode was not checked, or is off by more than fp32 rounding."""
    found = [r for r in rows if (r["schedule"], r["exchange"], r["by"], r["ids ahead"] == "True") == mode]
    return not found or any(not r["largest error"] < 1e-4 for r in found)


def check_torchrec(bench: Bench) -> list[dict[str, Any]]:
    """The strategy ``torchrec-2d``, averaged each step and fully sharded, likewise."""
    found: list[dict[str, Any]] = []
    for name, config, kind in (
        ("TorchRec 2D", {}, {"schedule": "local"}), (BASE, {"fully_sharded": True}, {"schedule": "torchrec", "own_states": True})
    ):  # fmt: skip
        if not bench.time_left():
            break
        task = {
            "strategy": "torchrec-2d", "config": {"sharding": "table", **config}, "model": bench.args.model, "steps": 20,
            "samples": [s[: bench.world] for s in ([4, 3, 2, 5] * (bench.world // 4 + 1), [1, 2, 6, 2] * (bench.world // 4 + 1))],
            "optimizer": {"lr": 0.1, "eps": 1e-3},
        }  # fmt: skip
        found.append({"strategy": name, "largest error": _against_simulator(bench, task, str(bench.device), kind)})
        bench.say(str(found[-1]))
    return found


def _against_simulator(bench: Bench, task: dict[str, Any], device: str, kind: dict[str, Any]) -> float:
    """Largest difference in 20 steps; infinite where a rank fails, which is told."""
    ranks: list[Any] = [None] * bench.world
    try:
        dist.all_gather_object(ranks, run_rank(bench.rank, bench.world, task, device))
        return _difference(ranks, task, bench.world, kind)
    except Exception:
        print(f"rank {bench.rank}: {traceback.format_exc()}", flush=True)
        return float("inf")


def _difference(ranks: list[Any], task: dict[str, Any], world: int, kind: dict[str, Any]) -> float:
    tables, replicas = toy_tables(), world // task["model"]
    first, last = joined([r["first"] for r in ranks]), joined([r["last"] for r in ranks])
    simulator = Simulator(
        tables, {t.name: first[f"{t.name}.weight"] for t in tables.tables}, model=task["model"], replicas=replicas,
        optimizer=TableOptimizer(**task["optimizer"]), **kind,
    )  # fmt: skip
    worst = 0.0
    for step in range(task["steps"]):
        for rank, want in enumerate(simulator.step(groups_of(task, tables, step), [7 * step + r for r in range(world)])):
            for got, rows in zip(ranks[rank]["steps"][step], want.values()):
                worst = max(worst, float((got - rows).abs().max()) if rows.numel() else 0.0)
    simulator.average()
    for name, weight in simulator.weights[0].items():
        worst = max(worst, float((last[f"{name}.weight"] - weight).abs().max()))
        worst = max(worst, float((last[f"{name}.accumulator"] - simulator.states[0][name]).abs().max()))
    return worst


# Overlap with a dense tower


class Tower(nn.Module):
    """Square linear layers in bf16 with their optimizer left out: GEMMs as a dense part has them."""

    def __init__(self, width: int, hidden: int, layers: int, device: torch.device) -> None:
        super().__init__()
        sizes = [width, *[hidden] * layers]
        kind = torch.bfloat16
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False, device=device, dtype=kind) for a, b in zip(sizes, sizes[1:]))

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(torch.bfloat16)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.float().mean()


EXCHANGE = ((Lane, "all_gather"), (Lane, "reduce_mean"), (CopyEngineSource, "gather"), (CopyEngineGather, "mean"))
STAGING = pushed_mean.STAGING
SUMS, OWN_COPIES = (CudaMembers, "mean"), (CudaMembers, "copy")
"""Of the copy engine's exchange: the parts that take SMs."""


@contextmanager
def without(*places: tuple[type, str]) -> Iterator[None]:
    """Methods do nothing: only for timing."""
    kept = [getattr(kind, name) for kind, name in places]
    for kind, name in places:
        setattr(kind, name, lambda self, *given: None)
    try:
        yield
    finally:
        for (kind, name), method in zip(places, kept):
            setattr(kind, name, method)


@contextmanager
def waits_marked(bench: Bench) -> Iterator[list[tuple[Any, Any]]]:
    """Marks before and after every wait of the tower's stream for the exchange."""
    kept, marks = Lane.wait, []

    def wait(self: Lane, event: Any) -> None:
        begin = bench.mark()
        kept(self, event)
        marks.append((begin, bench.mark()))

    Lane.wait = wait  # type: ignore[method-assign]
    try:
        yield marks
    finally:
        Lane.wait = kept  # type: ignore[method-assign]


def back_end(by: str) -> tuple[str, int | None, int]:
    """Of ``--by``: the back end, the most SMs that it may take, and bytes that a member receives means into."""
    name, sms, staging = [*by.split(":"), "", ""][:3]
    name, sms = ("default", name) if name.isdigit() else (name, sms)
    return name, int(sms or 0) or None, int(staging or 0) << 20 or STAGING


def overlap(bench: Bench, schedule: str, layers: int, by: str) -> dict[str, Any]:
    a = bench.args
    bench.clean()
    name, sms, staging = back_end(by)
    options = {"schedule": schedule, "window": a.tables, "ctas": sms, "collective": name}
    pushed_mean.STAGING = staging
    module, ok = bench.gem(options), torch.ones((), dtype=torch.bool, device=bench.device)
    tower = Tower(a.tables * a.dim, 8192 if bench.cuda else 64, layers, bench.device)

    def step(i: int) -> None:
        results = list(module(bench.batches[i % 4]).values())
        loss = tower(torch.cat(results, 1))
        module.prefetch(bench.batches[(i + 1) % 4])
        loss.backward()
        module.after_backward(ok)
        for p in tower.parameters():
            p.grad = None

    def exchange(i: int) -> None:
        with torch.no_grad():
            module._gather_ahead(with_state=True)
            for unit in module.whole_units:
                unit.arrive()
            for unit in module.whole_units:
                unit.scatter()
            for unit in module.whole_units:
                unit.settle()
            module._release()

    full = bench.slowest(statistics.median(bench.timed(step, a.steps, a.warmup)))
    with waits_marked(bench) as marks:
        bench.timed(step, a.steps, a.warmup)
    waiting = bench.slowest(sum(bench.between(*pair) for pair in marks) / (a.steps + a.warmup))
    left_out: dict[str, tuple[tuple[type, str], ...]] = {"without exchange ms": EXCHANGE}
    if name == "copy-engine":
        left_out |= {"without sums ms": (SUMS,), "without own copies ms": (OWN_COPIES,), "without both ms": (SUMS, OWN_COPIES)}
    partly = {}
    for what, places in left_out.items():
        with without(*places):
            partly[what] = bench.slowest(statistics.median(bench.timed(step, a.steps, a.warmup)))
    module._settle()
    alone = bench.slowest(statistics.median(bench.timed(exchange, a.steps, a.warmup)))
    rounds = 2 if schedule == "article" else 1  # gathers a step
    gathers = bench.slowest(statistics.median(bench.timed(lambda i: _gathers(module), a.steps, a.warmup))) if rounds == 2 else 0.0
    total = alone + gathers
    told = ("NCCL" if name == "default" else name) + (f", {sms} SMs" if sms else "")
    told += f", means through {staging >> 20} MiB" if staging != STAGING else ""
    row = {
        "schedule": schedule, "tower layers": layers, "by": told, "step ms": full, **partly, "waiting ms": waiting,
        "exchange alone ms": total, "hidden %": 100 * (1 - max(0.0, full - partly["without exchange ms"]) / total),
        "not waited for %": 100 * (1 - waiting / total),
    }  # fmt: skip
    bench.say(str(row))
    return row


def _gathers(module: Tables2d) -> None:
    with torch.no_grad():
        module._gather_ahead(with_state=False)
        for unit in module.whole_units:
            unit.arrive()
            unit.drop()
        module._release()


def main() -> None:
    args = arguments()
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo", timeout=timedelta(seconds=45))
    bench = Bench(args)
    chosen = {f"{name}{', ids ahead' if ahead else ''}": (options, ahead) for ahead in (True, False) for name, options in GEM.items()}
    chosen = {name: mode for name, mode in chosen.items() if any(word in name for word in args.only)}
    towers = [(n, schedule, by) for n in args.tower for by in (args.by if bench.cuda else ["0"]) for schedule in args.orders]
    modes = [mode_of(options, ahead) for options, ahead in chosen.values()]
    modes += [mode_of({"schedule": schedule, "collective": back_end(by)[0]}) for _, schedule, by in towers]
    data: dict[str, Any] = {
        "environment": {}, "correctness": check_simulators(bench, dict.fromkeys(modes)), "steps": [], "overlap": [], "failed": []
    }  # fmt: skip
    builds: dict[str, Callable[[], Any]] = {}
    peers_too = bench.cuda and not args.skip_peers
    if peers_too:
        builds[BASE] = partial(bench.peer_step, BASE)
    for name, (options, ahead) in chosen.items():
        if wrong(data["correctness"], mode_of(options, ahead)):
            data["failed"].append({"strategy": name, "error": "wrong on small tables, not timed"})
        else:
            builds[name] = partial(bench.gem_step, options, ahead)
    if peers_too:
        builds |= {name: partial(bench.peer_step, name) for name in PEERS if name != BASE and any(word in name for word in args.only)}
    found: dict[str, list[dict[str, Any]]] = {}
    timed(bench, data, found, builds)
    for layers, schedule, by in towers:
        if wrong(data["correctness"], mode_of({"schedule": schedule, "collective": back_end(by)[0]})) or not bench.time_left():
            continue
        try:
            data["overlap"].append(overlap(bench, schedule, layers, by))
        except Exception:
            data["failed"].append({"strategy": f"tower, {schedule}, {by}", "error": traceback.format_exc().splitlines()[-1]})
            print(f"rank {bench.rank}: {traceback.format_exc()}", flush=True)
        save(bench, data)
    if peers_too and bench.time_left():
        data["TorchRec in training"] = check_torchrec(bench)
        save(bench, data)
    for round_ in range(1, args.rounds):
        timed(bench, data, found, dict(reversed(builds.items())) if round_ % 2 else builds)
    dist.barrier()
    dist.destroy_process_group()


def timed(bench: Bench, data: dict[str, Any], found: dict[str, list[dict[str, Any]]], builds: dict[str, Callable[[], Any]]) -> None:
    """One round over all strategies."""
    for name, build in builds.items():
        if not bench.time_left():
            continue
        try:
            row = bench.measured(name, build)
        except Exception:
            data["failed"].append({"strategy": name, "error": traceback.format_exc().splitlines()[-1]})
            print(f"rank {bench.rank}: {name}: {traceback.format_exc()}", flush=True)
            row = None
        if row is not None:
            found.setdefault(name, []).append(row)
        data["steps"] = summary(found)
        save(bench, data)


def summary(found: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Medians over the rounds, and ratios to TorchRec's fully sharded strategy."""
    rows: list[dict[str, Any]] = []
    for name, measured in found.items():
        row: dict[str, Any] = {k: statistics.median(m[k] for m in measured) if k != "strategy" else name for k in measured[0]}
        row["rounds ms"] = " ".join(f"{m['ms']:.2f}" for m in measured)
        rows.append(row)
    base = next((r for r in rows if r["strategy"] == BASE), None)
    for row in rows if base is not None else ():
        row["time / FULLY_SHARDED"] = row["ms"] / base["ms"]  # type: ignore[index]
        row["peak / FULLY_SHARDED"] = row["peak GiB"] / base["peak GiB"]  # type: ignore[index]
    return rows


def save(bench: Bench, data: dict[str, Any]) -> None:
    if bench.rank:
        return
    a = vars(bench.args)
    data["environment"] = report.environment(
        "gem_parallel.bench.embeddings", **{k: str(v) for k, v in a.items() if k not in ("out", "device")}
    )
    report.write(bench.args.out, "embeddings", data)


if __name__ == "__main__":
    main()
