"""`mlp`: two linear layers with an activation between them, whose hidden rows no backward needs saved."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gem_core.ops import activations, library
from gem_core.ops.attention_reference import Saved
from gem_core.ops.contract import Problem
from gem_core.ops.contracts import MLP
from gem_core.ops.frontend import autocast, finish
from gem_core.ops.library import Named, OpDefinition, Sizes, Spec
from gem_core.ops.norms import Norm, check_kind, check_rows, check_weight, linear_flops, pick, residual_like, rows_of, stats, zeros_for_none

OP = "mlp"


def mlp(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    *,
    activation: str = "gelu",
    norm: str | None = None,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``y = act(n(x′) w1ᵀ + b1) w2ᵀ + b2`` with x′ = x (+ residual) and n an affine-free norm or nothing.

    :param x: ``[..., in]``. :param w1: ``[hidden, in]``. :param w2: ``[out, hidden]``. :param b1: ``[hidden]``. :param b2: ``[out]``.
    :param activation: a name of `gem_core.ops.activations.ACTIVATIONS`. :param norm: None, "rms" or "layer".
    :return: ``[..., out]`` in x's dtype; with ``residual`` the pair (that, x′). Under autocast all float32 tensors are cast.
    :raises OpError: shapes or dtypes that do not fit, an unknown activation or norm, or an implementation that was asked for
        and cannot do the problem.
    """
    x, w1, b1, w2, b2, residual = autocast(x, w1, b1, w2, b2, residual)
    check_rows(OP, x, residual)
    activations.check_activation(OP, activation, None)
    if norm is not None:
        check_kind(OP, norm)
    check_weight(OP, "w1", w1, x, x.shape[-1], "b1", b1)
    check_weight(OP, "w2", w2, x, w1.shape[0], "b2", b2)
    tensors = (rows_of(x), w1, b1, w2, b2, rows_of(residual))
    spec = finish(OP, tensors, [("activation", activation), ("norm", norm), ("eps", float(eps))], backend)
    y, total, _, _ = torch.ops.gem.mlp.default(*tensors, spec)
    y = y.view(*x.shape[:-1], w2.shape[0])
    return y if residual is None else (y, total.view(x.shape))


def _hidden(problem: Problem, x: Tensor, w1: Tensor, b1: Tensor | None) -> tuple[Norm, Tensor, Tensor]:
    """The norm, its result (or x itself) and the hidden rows before the activation, in the compute dtype."""
    n = Norm(x, problem.option("norm") or "rms", problem.option("eps"))
    inner = n.out if problem.option("norm") else x.to(n.dtype)
    hidden = inner @ w1.to(n.dtype).T
    return n, inner, hidden if b1 is None else hidden + b1.to(n.dtype)


def forward(
    problem: Problem, x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, residual: Tensor | None
) -> tuple[tuple[Tensor, Tensor | None], Saved]:
    total = None if residual is None else x + residual
    normed = x if total is None else total
    n, _, hidden = _hidden(problem, normed, w1, b1)
    y = activations.act(problem.option("activation"), hidden) @ w2.to(n.dtype).T
    y = y if b2 is None else y + b2.to(n.dtype)
    mean, rstd = (n.mean, n.rstd) if problem.option("norm") else (None, None)
    return (y.to(x.dtype), total), (normed, w1, b1, w2, b2, mean, rstd)


def backward(problem: Problem, saved: Saved, dout: tuple[Tensor | None, ...], needs: tuple[bool, ...]) -> Saved:
    x, w1, b1, w2, b2, _, _ = saved
    n, inner, hidden = _hidden(problem, x, w1, b1)
    name = problem.option("activation")
    dy = zeros_for_none(dout[0], (x.shape[0], w2.shape[0]), x)
    dhidden = (dy @ w2.to(n.dtype)) * activations.act_grad(name, hidden)
    dx = dhidden @ w1.to(n.dtype)
    if problem.option("norm"):
        dx = n.backward(dx)[0]
    if dout[1] is not None:
        dx = dx + dout[1].to(n.dtype)
    grads = (dx, dhidden.T @ inner, dhidden.sum(0), dy.T @ activations.act(name, hidden), dy.sum(0))
    return pick(grads, (x, w1, b1, w2, b2), needs)


def _fake(named: Named, sizes: Sizes, spec: Spec) -> list[Tensor]:
    x = named["x"]
    return [x.new_empty(x.shape[0], named["w2"].shape[0]), residual_like(named), *stats(x, x.shape[0], spec.option("norm"))]


def _dims(named: Named) -> tuple[tuple[str, int], ...]:
    return ("in", named["w1"].shape[1]), ("hidden", named["w1"].shape[0]), ("out", named["w2"].shape[0])


def _flops(named: Named, sizes: Sizes, spec: Spec, needs: Sequence[bool] | None) -> int:
    rows, w1, w2 = named["x"].shape[0], named["w1"], named["w2"]
    if needs is None:
        return linear_flops(rows, w1, None) + linear_flops(rows, w2, None)
    x, d_w1, d_b1, d_w2, _ = needs
    inner = x or d_w1 or d_b1
    return linear_flops(rows, w1, (x, d_w1)) + linear_flops(rows, w2, (inner, d_w2))


library.define(OpDefinition(MLP, dims=_dims, fake=_fake, flops=_flops))
