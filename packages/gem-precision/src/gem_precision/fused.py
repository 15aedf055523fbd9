"""Norm + quantise and activation + quantise as the first step of a linear: the unquantised result is never written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gem_precision import kernels
from gem_precision.gemm import PAD, Quantised
from gem_precision.kernels.quantize import norm_backward, norm_quantize, quantize_matrix, serves_mixed, takes
from gem_precision.policy import LinearPolicy, Operand

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}


def can_fuse(x: Tensor, before: str, policy: LinearPolicy) -> bool:
    """Whether one pass can make every quantised form of ``x [..., K]`` that the linear needs; ``before``: "rms", "layer" or "act:NAME"."""
    if not kernels.usable(x.reshape(-1, x.shape[-1])):
        return False
    a, b = policy.fprop.a, policy.wgrad.b
    if a is None or b is None or policy.fprop.hadamard or policy.wgrad.hadamard:
        return False
    alike = (a.format, a.elem, a.scale_rule, a.block) == (b.format, b.elem, b.scale_rule, b.block)
    if not takes(a) or not (alike or serves_mixed(a, b)) or a.block[0] != 1:
        return False
    return not before.startswith("act:") or before.removeprefix("act:") in ACTIVATIONS


def fused_operands(
    x: Tensor, before: tuple[str, Any], rows: Operand | None, columns: Operand | None, dtype: torch.dtype,
    generator: torch.Generator | None, write: bool,
) -> tuple[Quantised | None, Quantised | None, Tensor | None, Tensor | None]:  # fmt: skip
    """(operand of fprop, operand of wgrad, statistics of the norm, what was quantised if ``write``)."""
    kind, what = before
    if kind == "act":
        done = quantize_matrix(x, rows, columns, act=what, dtype=dtype, write_y=write, generator=generator, pad=PAD)
    else:
        done = norm_quantize(x, rows, columns, kind=kind, eps=what, dtype=dtype, write_y=write, generator=generator, pad=PAD)
    return done.rows, done.columns, done.stats, done.y


def through(before: tuple[str, Any], saved: Sequence[Tensor], g: Tensor, plus: Tensor | None = None) -> Tensor:
    """The gradient of x from that of the norm's or activation's result; ``saved``: x, and the norm's statistics. ``plus``: behind a norm,
    another gradient of x, which is added."""
    kind, what = before
    x = saved[0]
    if kind != "act":
        return norm_backward(x, g, saved[1], kind, plus)
    g = g.to(x.dtype)
    if what == "relu":
        return torch.ops.aten.threshold_backward(g, x, 0)
    if what == "silu":
        return torch.ops.aten.silu_backward(g, x)
    return torch.ops.aten.gelu_backward(g, x, approximate="none")
