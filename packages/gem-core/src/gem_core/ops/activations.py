"""Pointwise activations of `gdpa` and `mlp`, and their derivatives (semantics of AMKL's kernels; every one has act(0) = 0).

``fast_*`` names ask a kernel for cheap hardware instructions; here they have their exact form, but for ``fast_gelu_taylor``, whose
polynomial is the definition: it holds on \\|x\\| <= 1.5 and is continued with slope 1 above and slope 0 below.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable

import torch
from torch import Tensor

from gem_core.errors import OpError

Activation = str | tuple[str, ...]

_SQRT_2_PI = math.sqrt(2 / math.pi)
TAYLOR_LIMIT = 1.5
TAYLOR = (0.3989422804, -0.0664903801, 0.0099735570)
"""Coefficients of x², x⁴, x⁶; the linear one is 0.5."""


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))


def _gelu_grad(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(x * math.sqrt(0.5))) + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(_SQRT_2_PI * x * (1 + 0.044715 * x * x)))


def _gelu_tanh_grad(x: Tensor) -> Tensor:
    t = torch.tanh(_SQRT_2_PI * x * (1 + 0.044715 * x * x))
    return 0.5 * x * (1 - t * t) * _SQRT_2_PI * (1 + 3 * 0.044715 * x * x) + 0.5 * (1 + t)


def _taylor(x: Tensor) -> Tensor:
    c2, c4, c6 = TAYLOR
    z = x.clamp(-TAYLOR_LIMIT, TAYLOR_LIMIT)
    s = z * z
    return 0.5 * z + s * (c2 + s * (c4 + s * c6)) + (x - TAYLOR_LIMIT).clamp(min=0)


def _taylor_grad(x: Tensor) -> Tensor:
    c2, c4, c6 = TAYLOR
    s = x * x
    inside = 0.5 + x * (2 * c2 + s * (4 * c4 + s * 6 * c6))
    return torch.where(x.abs() <= TAYLOR_LIMIT, inside, (x > 0).to(x.dtype))


def _silu_grad(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 + x * (1 - s))


def _hardswish_grad(x: Tensor) -> Tensor:
    return torch.where(x <= -3, 0.0, torch.where(x < 3, x / 3 + 0.5, 1.0)).to(x.dtype)


ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "raw": (lambda x: x, torch.ones_like),
    "gelu": (_gelu, _gelu_grad),
    "gelu_approx": (_gelu_tanh, _gelu_tanh_grad),
    "fast_gelu": (_gelu_tanh, _gelu_tanh_grad),
    "fast_gelu_bf16": (_gelu_tanh, _gelu_tanh_grad),
    "fast_gelu_taylor": (_taylor, _taylor_grad),
    "leaky_relu": (lambda x: torch.where(x > 0, x, 0.01 * x), lambda x: torch.full_like(x, 0.01).masked_fill_(x > 0, 1.0)),
    "relu": (lambda x: x.clamp(min=0), lambda x: (x > 0).to(x.dtype)),
    "silu": (lambda x: x * torch.sigmoid(x), _silu_grad),
    "fast_silu": (lambda x: x * torch.sigmoid(x), _silu_grad),
    "hardswish": (lambda x: x * (x + 3).clamp(0, 6) / 6, _hardswish_grad),
    "relu_square": (lambda x: x.clamp(min=0).square(), lambda x: 2 * x.clamp(min=0)),
}
"""Name -> (function, derivative)."""

_NONZERO_AT_ZERO = {"sigmoid": "0.5", "softplus": "0.69", "exp": "1", "softmax": "1/L", "cos": "1", "hardsigmoid": "0.5"}


def act(name: str, x: Tensor) -> Tensor:
    """``name`` applied elementwise, in x's dtype."""
    return ACTIVATIONS[name][0](x)


def act_grad(name: str, x: Tensor) -> Tensor:
    """Derivative of ``name`` at x."""
    return ACTIVATIONS[name][1](x)


def per_head(activation: Activation, heads: int) -> tuple[str, ...]:
    """One name a head."""
    return (activation,) * heads if isinstance(activation, str) else activation


def check_activation(op: str, activation: object, heads: int | None) -> None:
    """Raise OpError unless ``activation`` is a known name or, where ``heads`` is given, a tuple of ``heads`` known names."""
    if isinstance(activation, (tuple, list)):
        if heads is None or len(activation) != heads:
            raise OpError(
                f"{op}: {len(activation)} activations were given" + (f" for {heads} heads" if heads is not None else ""),
                where="activation",
                fix="pass one name" + (f", or a tuple with one name for each of the {heads} heads" if heads is not None else ""),
            )
        names: tuple[object, ...] = tuple(activation)
    else:
        names = (activation,)
    for name in names:
        if not isinstance(name, str) or name not in ACTIVATIONS:
            raise _unknown(op, name)


def _unknown(op: str, name: object) -> OpError:
    there = ", ".join(ACTIVATIONS)
    if not isinstance(name, str):
        return OpError(f"{op}: an activation is chosen by name, got {type(name).__name__}", where="activation", fix=f"one of: {there}")
    if name in _NONZERO_AT_ZERO:
        return OpError(
            f"{op}: activation {name!r} has act(0) = {_NONZERO_AT_ZERO[name]}, so masked pairs would contribute",
            where="activation",
            fix=f"use one with act(0) = 0: {there}" + ("; for softmax call jagged_attention" if name == "softmax" else ""),
        )
    near = difflib.get_close_matches(name, ACTIVATIONS, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return OpError(f"{op}: there is no activation {name!r}", where="activation", fix=f"{hint}names are: {there}")
