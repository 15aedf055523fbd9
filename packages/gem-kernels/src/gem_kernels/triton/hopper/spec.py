"""The Hopper implementations of attention, norms, products and `mlp` that gem-kernels offers.

``hopper`` takes these kernels or the portable ones pass by pass, by its configuration table; ``hopper-only`` takes no others, and refuses a
relative bias with more time buckets than its kernels hold (32 with gradients, 256 without) or a wider table of positions than a row's bins.
Where only some of a bias's gradients are asked for, or a batch is empty, both take the portable ones.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from gem_core.hookspecs import KernelSpec
from gem_core.ops.contract import YES, Problem, Supported, no
from gem_kernels.triton.attention import spec as portable

if TYPE_CHECKING:
    from torch import Tensor

_FORCED = 5
_MEASURED = 60
"""Above the portable kernels: right and faster on an H200 (docs/kernels). Attention takes the portable kernels itself where those are."""
_TRITON = "3.6"
_WIDTHS = (64, 128, 256)
_BEYOND = frozenset({"num_targets", "target_k", "target_v", "context_len", "kv_index", "bias_position", "bias_time"})
_BIAS = frozenset({"bias_position", "bias_time"})
_LEAST_SCALE = 1e-6
_LONGEST_BIASED = 4096
"""A row's time buckets take a byte for each key that it sees, of which a causal mask leaves half: 2 KiB beside a row's kilobyte of q."""


@functools.lru_cache(maxsize=1)
def _dialect() -> Supported:
    """Whether the installed triton has the Gluon dialect that the kernels are written in; does not import it."""
    try:
        found = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return no("triton is not installed")
    if found.rpartition(".")[0] != _TRITON:
        return no(f"written in the Gluon dialect of Triton {_TRITON}, which is not stable from version to version; this is {found}")
    return YES


def _on_hopper(problem: Problem) -> Supported:
    if problem.device != "cuda" or problem.arch is None or problem.arch // 10 != 9:
        return no(f"written for CUDA devices of sm_90; this is {problem.device} {problem.arch or ''}".rstrip())
    return YES


def _portable(problem: Problem, module: str) -> Supported:
    """On Hopper, whatever the portable kernels of ``gem_kernels.triton.<module>`` can do."""
    answer = _on_hopper(problem)
    return importlib.import_module(f"gem_kernels.triton.{module}").supports(problem) if answer else answer


def _late(module: str, function: str, *args: Any, **options: Any) -> Any:
    """Call ``function`` of ``gem_kernels.triton.<module>``, with which triton is imported."""
    return getattr(importlib.import_module(f"gem_kernels.triton.{module}"), function)(*args, **options)


def supports(problem: Problem, only: bool = False) -> Supported:
    """Answers from the problem alone; does not touch the device and imports no triton. ``only``: whether both passes have such a kernel."""
    answer = _on_hopper(problem)
    if not answer:
        return answer
    answer = portable.supports(problem)
    if not answer:
        return answer
    if problem.dtype("q") == torch.float32:
        return no("multiplies bf16 or fp16")
    d, dv = problem.dim("D"), problem.dim("Dv")
    if d != dv or d not in _WIDTHS:
        return no(f"head widths D = Dv of {', '.join(map(str, _WIDTHS))}; they are {d} and {dv}")
    if only and d == 256 and (problem.op != "gdpa" or problem.dim("H") != problem.dim("Hkv") or problem.option("broadcast_q")):
        return no("gradients of 256 columns for gdpa with a key head for every query head, queries not shared")
    answer = _beyond(problem)
    return _dialect() if answer else answer


def _beyond(problem: Problem) -> Supported:
    """Of what goes beyond masks: relative bias by position and time, with or without candidates."""
    found = problem.present & _BEYOND
    if not found:
        return YES
    if not found >= _BIAS:
        return no("candidates only with a relative bias by position and time, bias only by both")
    if found - _BIAS - {"num_targets"} or problem.option("window") is not None or problem.dim("D") > 128:
        return no("relative bias without windows, context or request sharing, heads of up to 128 columns")
    scale = float(problem.option("scale" if problem.op == "jagged_attention" else "scale_in"))
    if not scale >= _LEAST_SCALE:
        return no(f"relative bias beside scores that are scaled by at least {_LEAST_SCALE}, since it is held over the scale; it is {scale}")
    longest = max(int(problem.option(name, 0)) for name in ("max_q_len", "max_k_len"))
    if longest > _LONGEST_BIASED:
        return no(f"relative bias for samples of at most {_LONGEST_BIASED} rows and keys; max_q_len and max_k_len allow {longest}")
    return YES


def forward(problem: Problem, *tensors: Tensor | None, only: bool = False) -> tuple[Any, tuple[Tensor | None, ...]]:
    """See the op's contract: (out, lse) or out, and the saved tensors."""
    if problem.present & _BEYOND:
        from gem_kernels.triton.hopper.launch_bias import forward as run_biased

        out, lse = run_biased(problem, tensors, only)
    else:
        from gem_kernels.triton.hopper.launch import forward as run

        out, lse = run(problem, tensors, only)
    if problem.op == "gdpa":
        return out, tensors
    return (out, lse), (*tensors, out, lse)


def backward(
    problem: Problem, saved: tuple[Tensor | None, ...], dout: Tensor, needs: tuple[bool, ...], only: bool = False
) -> tuple[Tensor | None, ...]:
    """See the op's contract: gradients of its differentiable tensors."""
    if problem.present & _BEYOND:
        from gem_kernels.triton.hopper.launch_bias import backward as run_biased

        return run_biased(problem, saved, dout, needs, only)
    from gem_kernels.triton.hopper.launch import backward as run

    return run(problem, saved, dout, needs, only)


def norm_linear_supports(problem: Problem) -> Supported:
    """RMSNorm in half precision, a reduction in whole steps of 64."""
    answer = _portable(problem, "dense.norm_linear")
    if not answer:
        return answer
    if problem.dtype("x") == torch.float32 or problem.option("kind") != "rms" or "residual" in problem.present:
        return no("RMSNorm of bf16 or fp16 without a residual")
    if problem.dim("K") % 64 or problem.dim("N") % 8:
        return no(f"K in steps of 64 and N in steps of 8; they are {problem.dim('K')} and {problem.dim('N')}")
    return _dialect()


def linear_norm_supports(problem: Problem) -> Supported:
    """Half precision, result rows of up to 512 columns, which a program holds whole."""
    answer = _portable(problem, "dense.linear_norm")
    if not answer:
        return answer
    if problem.dtype("x") == torch.float32:
        return no("multiplies bf16 or fp16")
    if problem.dim("K") % 8 or problem.dim("N") % 8 or problem.dim("N") > 512:
        return no(f"K and N in steps of 8, N up to 512; they are {problem.dim('K')} and {problem.dim('N')}")
    return _dialect()


def block_supports(problem: Problem) -> Supported:
    """Rotary positions, blocks of 64 rows, heads of 128 columns and as many of keys, in half precision."""
    answer = _portable(problem, "block.spec")
    if not answer:
        return answer
    if problem.dtype("q") == torch.float32 or "rotary_cos" not in problem.present:
        return no("rotary positions and bf16 or fp16")
    sizes = problem.option("block_size", 64), problem.dim("D"), problem.dim("Dv"), problem.dim("H") // problem.dim("Hkv")
    if sizes != (64, 128, 128, 1):
        return no(f"blocks of 64 rows, heads of 128 columns, a key head for every query head; they are {sizes}")
    return _dialect()


def mlp_supports(problem: Problem) -> Supported:
    """Half precision; widths of 64, 128, 192 or 256, a hidden layer in steps of 128."""
    answer = _portable(problem, "dense.mlp")
    if not answer:
        return answer
    if problem.dtype("x") == torch.float32:
        return no("multiplies bf16 or fp16")
    sizes = problem.dim("in"), problem.dim("out"), problem.dim("hidden")
    if sizes[0] % 64 or sizes[1] % 64 or max(sizes[:2]) > 256 or sizes[2] % 128 or sizes[2] > 8192:
        return no(f"in and out in steps of 64 up to 256, hidden in steps of 128 up to 8192; they are {sizes}")
    return _dialect()


def norm_gdpa_supports(problem: Problem) -> Supported:
    """Whatever the `gdpa` of this family does."""
    answer = _on_hopper(problem)
    if not answer:
        return answer
    from gem_kernels.triton.dense import norm_gdpa

    return norm_gdpa.supports(problem, sys.modules[__name__])


def specs() -> list[KernelSpec]:
    """``hopper`` of all ops, and ``hopper-only`` of the two attention ops."""
    found = [KernelSpec(op, "hopper", forward, backward, supports, _MEASURED) for op in ("jagged_attention", "gdpa")]
    for op in ("jagged_attention", "gdpa"):
        only = partial(forward, only=True), partial(backward, only=True)
        found.append(KernelSpec(op, "hopper-only", *only, partial(supports, only=True), _FORCED))
    gdpa = {"gdpa": sys.modules[__name__]}
    for op, gradients, can, options in (
        ("block_attention", "block.launch", block_supports, {}),
        ("norm_linear", "hopper.norm_linear", norm_linear_supports, {}),
        ("linear_norm", "dense.linear_norm", linear_norm_supports, {}),
        ("norm_gdpa", "hopper.norm_gdpa", norm_gdpa_supports, gdpa),
        ("mlp", "hopper.mlp", mlp_supports, {}),
    ):
        module = "hopper.block" if op == "block_attention" else f"hopper.{op}"
        passes = partial(_late, module, "forward", **options), partial(_late, gradients, "backward", **options)
        found.append(KernelSpec(op, "hopper", *passes, can, _MEASURED))
    return found
