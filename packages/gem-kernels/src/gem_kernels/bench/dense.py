"""The dense rows of ``gemrec bench kernels``: block_attention, norms, mlp and norm_gdpa beside what a user would run.

Columns: ms (median of CUDA-graph replays, variants in shuffled rounds), eager_ms (launched from Python), tflops and gbs (of the least
arithmetic and the least bytes), of_gemm and of_copy (shares of the rates measured in this run), error (largest relative error of results
and gradients against float64), of_torch (that error over the one of the same computation in eager PyTorch bf16), peak_mib (memory an eager
call allocates), speedup (over the named peer), target.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor

from gem_core.bench.ceilings import Ceilings, ceilings
from gem_core.ops.contracts import contracts
from gem_kernels.bench._dense_rows import ROWS, Case, Named, Row
from gem_kernels.bench.report import environment, say, write
from gem_kernels.bench.settings import Settings, compile_ahead
from gem_kernels.bench.timing import capture, interleaved_ms, peak_bytes, relative_error, release, stream
from gem_kernels.triton import specs
from gem_kernels.triton.common import tune
from gem_kernels.triton.common.launch import compile_only

COLUMNS = [
    "row", "pass", "impl", "ms", "eager_ms", "tflops", "gbs", "of_gemm", "of_copy", "error", "of_torch", "peak_mib", "speedup", "target",
]  # fmt: skip
OURS = ("triton", "hopper")
WORSE_THAN_TORCH = 1.5
"""An error over this many times that of eager PyTorch in the same dtype is not timed."""


def run(settings: Settings) -> None:
    """Check and time the wanted rows; print them, and write ``dense.json``, ``.md`` and ``.svg``."""
    started = time.monotonic()
    named = {r.name: r for r in ROWS}
    rows = [named[n] for n in settings.rows if n in named] if settings.rows else list(ROWS)
    if not rows:
        return
    # compiled backward passes are replayed many times, so they must not reuse the memory of what forward saved
    torch._functorch.config.donated_buffer = False
    jobs = [(r.name, pass_, impl, settings.tune) for r in rows for pass_ in ("forward", "backward") for impl in settings.impls]
    compile_ahead(jobs, _compile_row, settings.workers)
    say(f"compiled ahead: {time.monotonic() - started:.0f} s")
    limits = ceilings(torch.device("cuda"))
    say(f"ceilings: matrix product {limits.gemm:.0f} TFLOP/s (best {limits.best_gemm:.0f}), copy {limits.copy:.2f} TB/s")
    about = environment(settings.command, gemm_tflops=limits.gemm, best_gemm_tflops=limits.best_gemm, copy_tbs=limits.copy)
    data: dict[str, Any] = {"environment": about, "results": [], "tuned": []}
    for row in rows:
        if time.monotonic() - started > settings.budget:
            say(f"{row.name}: not run, the budget of {settings.budget:.0f} s is used up")
            continue
        try:
            run_row(row, settings, limits, data)
        except Exception as error:
            say(f"{row.name}: {type(error).__name__}: {str(error)[:500]}")
        write(settings.out, "dense", data, COLUMNS)
        torch._dynamo.reset()
        release()


def _compile_row(job: tuple[str, str, str, bool, str]) -> str | None:
    name, pass_, impl, everything, target = job
    try:
        with compile_only(target, every_candidate=everything):
            case = next(r for r in ROWS if r.name == name).build("cpu")
            spec, problem = next((s for s in specs() if (s.op, s.name) == (case.op, impl)), None), case.problem()
            if spec is None:
                return None
            result, saved = spec.forward(problem, *case.tensors())
            if pass_ == "backward":
                spec.backward(problem, saved, _douts(case, result, seed=3), _needs(case))
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:500]}"
    return None


def run_row(row: Row, settings: Settings, limits: Ceilings, data: dict[str, Any]) -> None:
    """Check and time every variant of a row, print the lines, add them to ``data``."""
    began = time.monotonic()
    case = row.build("cuda")
    problem = case.problem()
    ours = {s.name: s for s in specs() if s.op == case.op and s.name in settings.impls and s.supports(problem)}
    needs = _needs(case)
    runs: dict[str, dict[str, Any]] = {"forward": {}, "backward": {}}
    for name, spec in ours.items():
        result, saved = spec.forward(problem, *case.tensors())
        douts = _douts(case, result, seed=3)
        runs["forward"][name] = functools.partial(spec.forward, problem, *case.tensors())
        runs["backward"][name] = functools.partial(spec.backward, problem, saved, douts, needs)
    for pass_, implementations in runs.items():
        notes: dict[str, dict[str, Any]] = {}
        variants: dict[str, Any] = {}
        for name, run in implementations.items():
            if settings.tune:
                with tune.tuning() as timings:
                    run()
                data["tuned"] += timings
                for entry in timings:
                    tried = sorted(entry["tried"], key=lambda t: t["ms"])[:4]
                    say(f"  tuned {entry['kernel']} {entry['facts']}: " + "; ".join(f"{t['use']} {t['ms']:.4g} ms" for t in tried))
            got = _first(run()[0]) if pass_ == "forward" else run()
            error, yardstick = check(case, pass_, got, _first(douts))
            notes[name] = {"error": error, "of_torch": error / yardstick}
            del got
            if error > WORSE_THAN_TORCH * yardstick:
                say(f"  {row.name} {pass_} {name}: error {error:.2e} against float64, eager PyTorch {yardstick:.2e}: not timed")
                continue
            if settings.eager:
                notes[name]["peak_mib"] = peak_bytes(run) / 2**20
                notes[name]["eager_ms"] = statistics.median(interleaved_ms({"eager": run}, rounds=3, target_ms=15)["eager"])
            variants[name] = capture(run)
        for name, peer in (case.peers if settings.peers and variants else {}).items():
            with contextlib.suppress(_Skipped):
                variants[name] = _peer(row, case, name, peer, pass_, _first(douts))
        times = {n: statistics.median(ms) for n, ms in interleaved_ms(variants, rounds=settings.rounds).items()}
        for name, ms in times.items():
            line = _line(row, case, pass_, name, ms, times, limits) | notes.get(name, {})
            data["results"].append(line)
            shown = " ".join(f"{c}={line[c]:.4g}" if isinstance(line[c], float) else f"{c}={line[c]}" for c in COLUMNS[3:] if c in line)
            say(f"{row.name:26s} {pass_:8s} {name:28s} {shown}")
        del variants
        torch.cuda.synchronize()
        release()
    say(f"  ({time.monotonic() - began:.0f} s)")


def _line(row: Row, case: Case, pass_: str, name: str, ms: float, times: dict[str, float], limits: Ceilings) -> dict[str, Any]:
    backward = pass_ == "backward"
    least = case.backward_bytes if backward else case.forward_bytes
    flops = case.backward_flops if backward else case.forward_flops
    line: dict[str, Any] = {"row": row.name, "pass": pass_, "impl": name, "ms": ms, "gbs": least / ms * 1e-6}
    line["of_copy"] = least / ms * 1e-9 / limits.copy
    if flops:
        line |= {"tflops": flops / ms * 1e-9, "of_gemm": flops / ms * 1e-9 / limits.gemm}
    if name not in OURS:
        return line
    peer = next((p for p in times if p not in (*OURS, "linear alone")), None)
    if peer:
        line["speedup"] = times[peer] / ms
    if pass_ in row.targets:
        what, least_value = row.targets[pass_]
        value = line["of_copy"] if what == "copy" else times[what] / ms if what in times else None
        line["target"] = f"{what} >= {least_value}: " + ("?" if value is None else "met" if value >= least_value else f"{value:.2f}")
    return line


class _Skipped(Exception):
    """The variant is not timed; the reason was printed."""


def _peer(row: Row, case: Case, name: str, peer: Any, pass_: str, dout: Tensor) -> Any:
    """The replay of a peer. Its backward can only be captured on the stream that its forward ran on."""
    try:
        leaves = {n: t.detach().requires_grad_(n in case.leaves) if _floating(t) else t for n, t in case.named.items()}
        stream().wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream()):
            result = peer(leaves)
        torch.cuda.synchronize()
        if pass_ == "forward":
            with torch.no_grad():
                peer(leaves)
                return capture(lambda: peer(leaves))
        wanted = [leaves[n] for n in case.leaves]
        return capture(lambda: torch.autograd.grad(result, wanted, dout, retain_graph=True, allow_unused=True))
    except Exception as error:
        say(f"  {row.name} {pass_} {name}: {type(error).__name__}: {str(error)[:300]}")
        torch.cuda.synchronize()
        raise _Skipped from None


def check(case: Case, pass_: str, got: Any, dout: Tensor) -> tuple[float, float]:
    """Largest relative error of our results against float64, and that of the plain computation in the row's dtype.

    Errors are pooled over the parts of a row: a gradient that vanishes in one sample has no relative error of its own.
    """
    pooled: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}
    everything = slice(None)
    for named, where in case.parts or [(case.named, {})]:
        wanted, rough = (_plain(case, named, dout[where.get("out", everything)], fine, pass_) for fine in (True, False))
        if pass_ == "forward":
            mine = {"out": got}
        else:
            mine = dict(zip(contracts()[case.op].differentiable, got))
        for name, value in wanted.items():
            pooled.setdefault(name, []).append((mine[name][where.get(name, everything)], rough[name], value))
    worst = (0.0, 1e-30)
    for found in pooled.values():
        ours, theirs, truth = (torch.cat([f[i].flatten() for f in found]) for i in range(3))
        pair = relative_error(ours, truth), relative_error(theirs, truth)
        if pair[0] / pair[1] > worst[0] / worst[1]:
            worst = pair
    return worst


def _plain(case: Case, named: Named, dout: Tensor, fine: bool, pass_: str) -> dict[str, Tensor]:
    given = {n: t.double() if fine and _floating(t) else t for n, t in named.items()}
    if pass_ == "forward":
        with torch.no_grad():
            return {"out": case.plain(given)}
    leaves = {n: t.detach().requires_grad_(n in case.leaves) if _floating(t) else t for n, t in given.items()}
    result = case.plain(leaves)
    grads = torch.autograd.grad(result, [leaves[n] for n in case.leaves], dout.to(result.dtype))
    return dict(zip(case.leaves, grads))


def _floating(t: Any) -> bool:
    return isinstance(t, Tensor) and t.is_floating_point()


def _first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def _douts(case: Case, result: Any, seed: int) -> Any:
    """A gradient for the op's result; none for x + residual, which the peers do not return."""
    first = _first(result)
    dout = torch.randn(first.shape, device=first.device, generator=torch.Generator(first.device).manual_seed(seed)).to(first.dtype)
    return dout if len(contracts()[case.op].differentiable_outputs) == 1 else (dout, None)


def _needs(case: Case) -> tuple[bool, ...]:
    return tuple(n in case.leaves for n in contracts()[case.op].differentiable)
