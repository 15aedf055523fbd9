"""The attention rows of ``gemrec bench kernels``: `jagged_attention` and `gdpa` beside their peers, forward and backward.

Columns: ms (median of CUDA-graph replays; all variants of a row, and of rows that are compared, in the same shuffled rounds), eager_ms (the
same call launched from Python), tflops, gbs (least bytes over time), of_gemm and of_floor (share of the in-run matrix product rate, and of
the nearer of the arithmetic and the byte floor), error (largest relative error of the results against float64 on a few samples), peak_mib
(memory an eager call allocates), vs_best (rate over the best peer's), goal (TFLOP/s, see `attention_goals`) and met.

The implementation ``auto`` is the one that a call would get; rows with precisions are then timed with these too.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor

from gem_core.bench.ceilings import Ceilings, ceilings
from gem_core.hookspecs import KernelSpec
from gem_core.ops import attention_reference
from gem_core.ops.contract import OpPrecision, Problem
from gem_core.ops.contracts import GDPA
from gem_kernels.bench.attention_goals import goal
from gem_kernels.bench.attention_peers import PEERS, Unavailable
from gem_kernels.bench.attention_rows import ROWS, Data, Row, small
from gem_kernels.bench.report import environment, say, write
from gem_kernels.bench.settings import Settings, compile_ahead
from gem_kernels.bench.timing import Run, capture, interleaved_ms, peak_bytes, relative_error, release, stream
from gem_kernels.triton import specs
from gem_kernels.triton.common import tune
from gem_kernels.triton.common.launch import compile_only

COLUMNS = [
    "row", "pass", "op", "impl", "ms", "eager_ms", "tflops", "gbs", "of_gemm", "of_floor", "error", "peak_mib", "vs_best", "goal",
    "met", "note",
]  # fmt: skip
_LIMIT = {"forward": 1e-2, "backward": 1.5e-2}
"""Largest relative error that is timed: bf16 operands and fp32 accumulation give 2e-3 to 5e-3."""
_LOW_LIMIT = {"forward": 0.1, "backward": 0.2}
_PRECISIONS = {"fp8": OpPrecision(block=(128, 128)), "mxfp8": OpPrecision()}
_RECORDED = "ads_mkl"
_CHECKED = 4


def run(settings: Settings) -> None:
    """Check and time the wanted rows; print them, and write ``attention.json``, ``.md`` and ``.svg``."""
    started = time.monotonic()
    by_name = {r.name: r for r in ROWS}
    rows = [by_name[name] for name in settings.rows or by_name if name in by_name]
    if not rows:
        return
    # compiled backward passes are replayed many times, so they must not reuse the memory of what forward saved
    torch._functorch.config.donated_buffer = False
    jobs = [
        (row.name, op, name, pass_, settings.tune)
        for row in rows for op in row.ops if settings.wants(op) for name in _asked(row, settings) for pass_ in ("forward", "backward")
    ]  # fmt: skip
    jobs.sort(key=_occurrence())
    compile_ahead(jobs, _compile_row, settings.workers)
    say(f"compiled ahead: {time.monotonic() - started:.0f} s")
    limits = ceilings(torch.device("cuda"))
    say(f"ceilings: matrix product {limits.gemm:.0f} TFLOP/s (best {limits.best_gemm:.0f}), copy {limits.copy:.2f} TB/s")
    about = environment(settings.command, gemm_tflops=limits.gemm, best_gemm_tflops=limits.best_gemm, copy_tbs=limits.copy)
    data: dict[str, Any] = {"environment": about, "results": [], "tuned": []}
    for together in groups(rows):
        if time.monotonic() - started > settings.budget:
            say(f"{', '.join(row.name for row in together)}: not run, the budget of {settings.budget:.0f} s is used up")
            continue
        run_rows(together, settings, limits, data)
        write(settings.out, "attention", data, COLUMNS)
        release()


def groups(rows: list[Row]) -> list[list[Row]]:
    """The rows in lists that are timed together, each where the first of its rows stands."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(f"group {row.group}" if row.group else row.name, []).append(row)
    return list(found.values())


def _asked(row: Row, settings: Settings) -> list[str]:
    """Names of implementations; "auto:fp8" stands for the one that a call with that precision would get."""
    return [*settings.impls, *(f"auto:{p}" for p in row.precisions if "auto" in settings.impls)]


def _occurrence() -> Callable[[tuple[str, str, str, str, bool]], int]:
    """How many jobs before this one most likely compile the same kernels: those come last, and find them compiled."""
    seen: Counter[object] = Counter()

    def count(job: tuple[str, str, str, str, bool]) -> int:
        row = next(r for r in ROWS if r.name == job[0])
        key = (job[1:4], row.heads, row.dim, row.causal, row.window is None, row.broadcast, row.bias, row.activation)
        seen[key] += 1
        return seen[key]

    return count


def _find(op: str, name: str, problem: Problem) -> tuple[KernelSpec | None, Problem]:
    """The implementation that ``name`` means for the problem, None where there is none, and the problem with the precision it names."""
    name, _, precision = name.partition(":")
    if precision:
        problem = replace(problem, precision=_PRECISIONS[precision])
    able = [s for s in specs() if s.op == op and name in (s.name, "auto") and s.supports(problem)]
    return max(able, key=lambda s: s.priority, default=None), problem


def _compile_row(job: tuple[str, str, str, str, bool, str]) -> str | None:
    row_name, op, name, pass_, everything, target = job
    row = next(r for r in ROWS if r.name == row_name)
    try:
        with compile_only(target, every_candidate=everything):
            data = Data(small(row), "cpu")
            there = replace(data.problem(op), device="cuda", arch=int(target.removeprefix("sm_")))
            spec, problem = _find(op, name, there)
            if spec is None:
                return None
            problem, tensors = replace(data.problem(op), precision=problem.precision), tuple(data.tensors.values())
            if pass_ == "forward":
                spec.forward(problem, *tensors)
            else:
                saved = tensors if op == "gdpa" else (*tensors, data.dout, torch.zeros(row.heads, data.dout.shape[0]))
                spec.backward(problem, saved, data.dout, _needs(data))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def run_rows(rows: list[Row], settings: Settings, limits: Ceilings, data: dict[str, Any]) -> None:
    """Check every variant of the rows, time them in the same rounds pass by pass, print the lines, add them to ``data``."""
    began = time.monotonic()
    inputs = {row.name: Data(row, "cuda") for row in rows}
    lines: list[dict[str, Any]] = []
    for pass_ in ("forward", "backward"):
        ready = {(row.name, *v): made for row in rows for v, made in _variants(inputs[row.name], pass_, settings, data).items()}
        times = interleaved_ms({name: run for name, (run, _) in ready.items()}, rounds=settings.rounds)
        for row in rows:
            for (name, op, impl), (_, note) in ready.items():
                if name == row.name:
                    ms = statistics.median(times[name, op, impl])
                    lines.append(_line(inputs[name], row, pass_, op, impl, ms, limits) | note)
            if row.recorded is not None and pass_ == "forward" and settings.peers and settings.wants("gdpa"):
                ms = inputs[row.name].flops(False) / (row.recorded * limits.gemm / 680) * 1e-9
                line = _line(inputs[row.name], row, pass_, "gdpa", _RECORDED, ms, limits)
                lines.append({**line, "note": "recorded, scaled to this card"})
        del ready
        release()
    for row in rows:
        for line in (found for found in lines if found["row"] == row.name):
            _judge(line, inputs[row.name], lines, limits, data)
            data["results"].append(line)
            values = {c: line[c] for c in COLUMNS[4:] if line.get(c) is not None}
            shown = " ".join(f"{c}={v:.4g}" if isinstance(v, float) else f"{c}={v}" for c, v in values.items())
            say(f"{line['row']:30s} {line['pass']:8s} {line['op']:16s} {line['impl']:14s} {shown}")
    say(f"  ({time.monotonic() - began:.0f} s)")


def _variants(inputs: Data, pass_: str, settings: Settings, data: dict[str, Any]) -> dict[tuple[str, str], tuple[Run, dict[str, Any]]]:
    """Replays and notes, by op and implementation, of those that gave right results."""
    row = inputs.row
    found: dict[tuple[str, str], tuple[Run, dict[str, Any]]] = {}
    if settings.peers:
        for name in row.peers:
            with contextlib.suppress(_Skipped):
                found["jagged_attention", name] = _prepare_peer(inputs, name, pass_)
    for op in row.ops:
        if not settings.wants(op):
            continue
        for name in _asked(row, settings):
            spec, problem = _find(op, name, inputs.problem(op))
            if spec is None:
                continue
            precision = name.partition(":")[2]
            name = f"{spec.name} {precision}" if precision else spec.name
            try:
                found[op, name] = _prepare(inputs, spec, problem, pass_, settings, data)
            except Exception as error:
                say(f"  {row.name} {pass_} {op} {name}: {type(error).__name__}: {str(error)[:300]}")
    return found


def _judge(line: dict[str, Any], inputs: Data, lines: list[dict[str, Any]], limits: Ceilings, data: dict[str, Any]) -> None:
    """Compare one of our lines with the peers of its row among ``lines``, and with its goal."""
    if line["impl"] in (*PEERS, _RECORDED):
        return
    theirs = (*PEERS, _RECORDED) if line["op"] == "gdpa" else PEERS
    peers = [x["tflops"] for x in lines if (x["row"], x["pass"]) == (line["row"], line["pass"]) and x["impl"] in theirs]
    if peers:
        line["vs_best"] = line["tflops"] / max(peers)
    wanted = None if " " in line["impl"] else goal(inputs, line, max(peers, default=0.0), limits, data["results"])
    if wanted is not None:
        line["goal"], line["met"] = wanted, "yes" if line["tflops"] >= wanted else "no"


def _line(inputs: Data, row: Row, pass_: str, op: str, name: str, ms: float, limits: Ceilings) -> dict[str, Any]:
    backward = pass_ == "backward"
    flops, least = inputs.flops(backward), inputs.least_bytes(op == "jagged_attention", backward)
    floor = max(flops / limits.gemm * 1e-9, least / limits.copy * 1e-9)
    tflops = flops / ms * 1e-9
    return {
        "row": row.name, "pass": pass_, "op": op, "impl": name, "ms": ms, "tflops": tflops, "gbs": least / ms * 1e-6,
        "of_gemm": tflops / limits.gemm, "of_floor": floor / ms,
    }  # fmt: skip


class _Skipped(Exception):
    """The variant is not timed; the reason was printed."""


def _needs(data: Data) -> tuple[bool, ...]:
    return tuple(data.tensors[n] is not None for n in GDPA.differentiable)


def _prepare(
    inputs: Data, spec: KernelSpec, problem: Problem, pass_: str, settings: Settings, data: dict[str, Any]
) -> tuple[Run, dict[str, Any]]:
    """Replay and notes of one of our implementations, after its results were checked."""
    tensors = tuple(inputs.tensors.values())
    needs = _needs(inputs)
    result, saved = spec.forward(problem, *tensors)

    def forward() -> Any:
        return spec.forward(problem, *tensors)

    def backward() -> Any:
        return spec.backward(problem, saved, inputs.dout, needs)

    run = forward if pass_ == "forward" else backward
    if settings.tune:
        with tune.tuning() as timings:
            run()
        data["tuned"] += timings
    got = (result if spec.op == "gdpa" else result[0],) if pass_ == "forward" else backward()
    error = check(inputs, spec.op, pass_, got)
    if error > (_LIMIT if problem.precision is None else _LOW_LIMIT)[pass_]:
        raise ArithmeticError(f"relative error {error:.2e} against float64: not timed")
    note: dict[str, Any] = {"error": error}
    del got
    if settings.eager:
        note["peak_mib"] = peak_bytes(run) / 2**20
        note["eager_ms"] = statistics.median(interleaved_ms({"eager": run}, rounds=3, target_ms=15)["eager"])
    return capture(run), note


def _prepare_peer(inputs: Data, name: str, pass_: str) -> tuple[Run, dict[str, Any]]:
    row, t = inputs.row, inputs.tensors
    try:
        peer = PEERS[name](inputs)
        leaves = getattr(peer, "leaves", None) or tuple(t[n].detach().requires_grad_() for n in ("q", "k", "v"))
        dout = inputs.dout
        stream().wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream()):
            result = peer(*leaves)
        torch.cuda.synchronize()
        if result.shape != dout.shape:
            dout = torch.randn_like(result)
        error = None
        if hasattr(peer, "leaves"):
            note = {"note": peer.note}
        else:
            got = (result.detach(),) if pass_ == "forward" else torch.autograd.grad(result, leaves, dout, retain_graph=True)
            error = check(inputs, "jagged_attention", pass_, tuple(got))
            note = {"error": error}
            if error > _LIMIT[pass_]:
                raise Unavailable(f"relative error {error:.2e} against float64")
        if pass_ == "forward":
            with torch.no_grad():
                return capture(lambda: peer(*leaves)), note
        return capture(lambda: torch.autograd.grad(result, leaves, dout, retain_graph=True)), note
    except Exception as error:
        say(f"  {row.name} {pass_} {name}: {type(error).__name__}: {str(error)[:200]}")
        torch.cuda.synchronize()
        raise _Skipped from None


def check(inputs: Data, op: str, pass_: str, got: tuple[Tensor | None, ...]) -> float:
    """Largest relative error of the results on a few samples (first, last, longest, shortest) against the reference in float64.

    Errors are pooled over the samples: the softmax gradients of a sample of one row are zero, so it has no relative error of its own.
    """
    row = inputs.row
    by_length = inputs.k_lengths.argsort()
    chosen = sorted({0, row.batch - 1, int(by_length[0]), int(by_length[-1])})[:_CHECKED]
    pairs: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for b in chosen:
        one = _sample(inputs, b)
        problem = inputs.problem(op)
        if pass_ == "forward":
            run = attention_reference.gdpa_forward if op == "gdpa" else attention_reference.jagged_attention_forward
            want, _ = run(problem, *one.tensors)
            pairs.setdefault("out", []).append((got[0][one.out], want if op == "gdpa" else want[0]))
            continue
        run = attention_reference.gdpa_backward if op == "gdpa" else attention_reference.jagged_attention_backward
        extra = () if op == "gdpa" else attention_reference.jagged_attention_forward(problem, *one.tensors)[0]
        names = GDPA.differentiable[:3]
        want = run(problem, (*one.tensors, *extra), inputs.dout[one.out].double(), tuple(n in names for n in GDPA.differentiable))
        for name, mine, reference in zip(names, got, want):
            if name == "q" and row.broadcast:
                continue
            pairs.setdefault(name, []).append((mine[one.q if name == "q" else one.k], reference))
    return max(relative_error(*(torch.cat([p[i].flatten() for p in found]) for i in (0, 1))) for found in pairs.values())


class _sample:
    """Sample ``b`` of a row by itself, in float64: its tensors, and where its rows are in the whole."""

    def __init__(self, inputs: Data, b: int) -> None:
        t, row = inputs.tensors, inputs.row
        k0, k1 = (int(x) for x in t["k_offsets"][b : b + 2])
        q0, q1 = (0, row.q[0]) if row.broadcast else (int(x) for x in t["q_offsets"][b : b + 2])
        self.q, self.k = slice(q0, q1), slice(k0, k1)
        self.out = slice(b * row.q[0], (b + 1) * row.q[0]) if row.broadcast else self.q
        own: dict[str, Tensor | None] = dict(t)
        own["q"], own["k"], own["v"] = t["q"][self.q].double(), t["k"][self.k].double(), t["v"][self.k].double()
        own["k_offsets"] = torch.tensor([0, k1 - k0], device=t["q"].device)
        if not row.broadcast:
            own["q_offsets"] = torch.tensor([0, q1 - q0], device=t["q"].device)
        for name in ("num_targets", "context_len"):
            own[name] = None if t[name] is None else t[name][b : b + 1]
        for name, rows in (("bias_q_times", self.q), ("bias_k_times", self.k)):
            own[name] = None if t[name] is None else t[name][rows]
        self.tensors = tuple(own.values())
