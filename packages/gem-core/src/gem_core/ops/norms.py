"""`norm`, `norm_linear`, `linear_norm`: RMSNorm and LayerNorm, alone or fused with a linear layer.

With row statistics μ (LayerNorm only) and r = rstd, x̂ = (x − μ) r and n(x) = x̂ · norm_weight + norm_bias. Backward of a norm from the
gradient g of x̂: RMSNorm r (g − x̂ mean(g x̂)), LayerNorm r (g − mean(g) − x̂ mean(g x̂)).

Implementations get two-dimensional ``x [M, C]`` (possibly with a row stride) and options ``kind`` and ``eps``. FLOP formulas count matrix
products only, so that of `norm` is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gem_core.errors import OpError
from gem_core.ops import checks, library, meeting
from gem_core.ops.attention_reference import Saved, compute_dtype
from gem_core.ops.contract import Problem
from gem_core.ops.contracts import LINEAR_NORM, NORM, NORM_LINEAR
from gem_core.ops.frontend import autocast, finish
from gem_core.ops.library import Named, OpDefinition, Sizes, Spec

KINDS = ("rms", "layer")
Normed = tuple[Tensor, Tensor | None]
"""A result, and x + residual where there is one."""


def norm(
    x: Tensor,
    *,
    kind: str = "rms",
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """RMSNorm or LayerNorm over the last dimension, optionally of x + residual.

    :param x: ``[..., C]``. :param kind: "rms" or "layer".
    :param weight: ``[C]``. :param bias: ``[C]``; both may have another float dtype than x.
    :param residual: shape and dtype of x.
    :return: ``[..., C]`` in x's dtype; with ``residual`` the pair (that, x + residual).
    :raises OpError: shapes or dtypes that do not fit, or an implementation that was asked for and cannot do the problem.
    """
    op = "norm"
    check_rows(op, x, residual)
    check_kind(op, kind)
    check_vector(op, "weight", weight, x, x.shape[-1])
    check_vector(op, "bias", bias, x, x.shape[-1])
    tensors = (rows_of(x), weight, bias, rows_of(residual))
    y, total, _, _ = torch.ops.gem.norm.default(*tensors, finish(op, tensors, [("kind", kind), ("eps", float(eps))], backend))
    return y.view(x.shape) if residual is None else (y.view(x.shape), total.view(x.shape))


def norm_linear(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    *,
    kind: str = "rms",
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    residual: Tensor | None = None,
    through: bool = False,
    eps: float = 1e-6,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``n(x) wᵀ + b``: norm of x (or of x + residual), then a linear layer.

    :param x: ``[..., K]``. :param w: ``[N, K]``. :param b: ``[N]``, w's dtype. :param norm_weight: ``[K]``. :param norm_bias: ``[K]``.
    :param through: return the pair (result, x) and use this x from then on, as for a skip connection: its gradient is added where that of
        the norm is computed, not in a pass of its own. Not together with ``residual``.
    :return: ``[..., N]`` in x's dtype; with ``residual`` the pair (that, x + residual). Under autocast x, residual, w and b are cast.
    :raises OpError: shapes or dtypes that do not fit, ``through`` with ``residual``, or an implementation that was asked for
        and cannot do the problem.
    """
    op = "norm_linear"
    if through and residual is not None:
        raise OpError("norm_linear: x + residual is returned anyway", where="through", fix="leave through or residual out")
    given = x
    x, w, b, residual = autocast(x, w, b, residual)
    check_rows(op, x, residual)
    check_kind(op, kind)
    check_weight(op, "w", w, x, x.shape[-1], "b", b)
    check_vector(op, "norm_weight", norm_weight, x, x.shape[-1])
    check_vector(op, "norm_bias", norm_bias, x, x.shape[-1])
    tensors = (rows_of(x), w, b, norm_weight, norm_bias, rows_of(residual))
    spec = finish(op, tensors, [("kind", kind), ("eps", float(eps))], backend)
    if through and x is given and torch.is_grad_enabled() and x.requires_grad and not torch.compiler.is_compiling():
        later = meeting.Later() if meeting.kept_as_they_are() else None
        y, passed = _Through.apply(*tensors[:-1], spec, later)
        passed = _shaped(passed, x)
        if later is not None:
            meeting.note_later(passed, later)
        return _shaped(y, x), passed
    y, total, _, _ = torch.ops.gem.norm_linear.default(*tensors, spec)
    y = _shaped(y, x)
    if through:
        return y, given
    return y if residual is None else (y, total.view(x.shape))


class _Through(torch.autograd.Function):
    """`norm_linear` of ``x [M, K]``, and x itself: one backward call gets the gradients of both."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None, spec: str,
        later: meeting.Later | None,
    ) -> Any:  # fmt: skip
        y, _, mean, rstd = torch.ops.gem.norm_linear.default(x, w, b, norm_weight, norm_bias, None, spec)
        made = meeting.made_of(x) if meeting.kept_as_they_are() else None
        ctx.save_for_backward(x, w, b, norm_weight, norm_bias, mean, rstd, *(made or ()))
        ctx.spec, ctx.later = spec, later
        ctx.set_materialize_grads(False)
        return y, x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dx: Tensor | None) -> tuple[Tensor | None, ...]:
        needs = list(ctx.needs_input_grad[:-2])
        both = ctx.saved_tensors  # once: under a checkpoint each access unpacks
        saved, made = both[:7], both[7:]
        if made:
            meeting.note_made(saved[0], meeting.Made(*made))

        def gradients(beside: Tensor | None) -> tuple[Tensor | None, ...]:
            if dy is None:
                return beside, None, None, None, None
            return torch.ops.gem.norm_linear_backward.default(*saved, dy, beside, needs, ctx.spec, [])  # type: ignore[no-any-return]

        grads = meeting.with_late(ctx.later, dx, gradients)
        return *(g if need else None for g, need in zip(grads, needs)), None, None


def linear_norm(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    *,
    kind: str = "rms",
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-6,
    backend: str | None = None,
) -> Tensor:
    """``n(x wᵀ + b)``: a linear layer, then the norm of its output.

    :param x: ``[..., K]``. :param w: ``[N, K]``. :param b: ``[N]``, w's dtype. :param norm_weight: ``[N]``. :param norm_bias: ``[N]``.
    :return: ``[..., N]`` in x's dtype. Under autocast x, w and b are cast.
    :raises OpError: shapes or dtypes that do not fit, or an implementation that was asked for and cannot do the problem.
    """
    op = "linear_norm"
    x, w, b = autocast(x, w, b)
    check_rows(op, x, None)
    check_kind(op, kind)
    check_weight(op, "w", w, x, x.shape[-1], "b", b)
    check_vector(op, "norm_weight", norm_weight, x, w.shape[0])
    check_vector(op, "norm_bias", norm_bias, x, w.shape[0])
    tensors = (rows_of(x), w, b, norm_weight, norm_bias)
    spec = finish(op, tensors, [("kind", kind), ("eps", float(eps))], backend)
    y, _ = torch.ops.gem.linear_norm.default(*tensors, spec)
    return y.view(*x.shape[:-1], w.shape[0])


def rows_of(x: Tensor | None) -> Tensor | None:
    """``[M, C]``, a view wherever possible."""
    return x if x is None or x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _shaped(y: Tensor, x: Tensor) -> Tensor:
    """Rows ``y [M, C]`` as ``[..., C]``, as the rows of x are: y itself where they are plain rows, so that its gradient is the tensor that
    came (see `gem_core.ops.siblings`)."""
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[1])


def check_kind(op: str, kind: object) -> None:
    if kind not in KINDS:
        raise OpError(f"{op}: there is no norm called {kind!r}", where="kind", fix="rms or layer")


def check_rows(op: str, x: Tensor, residual: Tensor | None) -> None:
    if not isinstance(x, Tensor) or x.dim() < 1:
        raise OpError(f"{op}: x must be a tensor [..., C]", where="x")
    checks.require(x.shape[-1] > 0, op, "x", "x has no columns")
    checks.check_float(op, x=x, residual=residual)
    if residual is not None:
        checks.require(x.shape == residual.shape, op, "residual", "residual has shape {}, x {}", tuple(residual.shape), tuple(x.shape))


def check_vector(op: str, name: str, t: Tensor | None, x: Tensor, width: int) -> None:
    if t is None:
        return
    checks.check_tensor(op, name, t, 1, "[C]")
    checks.require(t.shape[0] == width, op, name, "{} has {} values, not {}", name, t.shape[0], width)
    checks.require(t.is_floating_point(), op, name, "{} has dtype {}", name, t.dtype, fix="use a float dtype")
    checks.require(t.device == x.device, op, name, "{} is on {}, x on {}", name, t.device, x.device, fix="move them to one device")


def check_weight(op: str, name: str, w: Tensor, x: Tensor, width: int, bias_name: str, bias: Tensor | None) -> None:
    checks.check_tensor(op, name, w, 2, "[out, in]")
    checks.require(w.shape[1] == width, op, name, "{} has {} columns, its input {}", name, w.shape[1], width, fix="weights are [out, in]")
    checks.check_float(op, **{"x": x, name: w, bias_name: bias})
    check_vector(op, bias_name, bias, x, w.shape[0])


class Norm:
    """The norm of ``x [M, C]`` in the compute dtype and its backward: what the references of this family share."""

    def __init__(self, x: Tensor, kind: str, eps: float, weight: Tensor | None = None, bias: Tensor | None = None) -> None:
        self.kind, self.dtype = kind, compute_dtype(x.dtype)
        x = x.to(self.dtype)
        self.mean = x.mean(1) if kind == "layer" else None
        centred = x if self.mean is None else x - self.mean[:, None]
        self.rstd = torch.rsqrt(centred.square().mean(1) + eps)
        self.hat = centred * self.rstd[:, None]
        self.weight = None if weight is None else weight.to(self.dtype)
        self.out = self.hat if self.weight is None else self.hat * self.weight
        if bias is not None:
            self.out = self.out + bias.to(self.dtype)

    def backward(self, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of x, weight and bias from that of ``out``, in the compute dtype."""
        g = dout if self.weight is None else dout * self.weight
        dx = g - self.hat * (g * self.hat).mean(1, keepdim=True)
        if self.kind == "layer":
            dx = dx - g.mean(1, keepdim=True)
        return dx * self.rstd[:, None], (dout * self.hat).sum(0), dout.sum(0)


def pick(grads: Sequence[Tensor], like: Sequence[Tensor | None], needs: Sequence[bool]) -> Saved:
    """The needed gradients in their inputs' dtypes."""
    return tuple(g.to(t.dtype) if need and t is not None else None for g, t, need in zip(grads, like, needs))


def zeros_for_none(dout: Tensor | None, shape: Sequence[int], like: Tensor) -> Tensor:
    """An absent gradient as zeros, in the compute dtype."""
    dtype = compute_dtype(like.dtype)
    return like.new_zeros(tuple(shape), dtype=dtype) if dout is None else dout.to(dtype)


def norm_forward(problem: Problem, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None) -> tuple[Normed, Saved]:
    total = None if residual is None else x + residual
    normed = x if total is None else total
    n = Norm(normed, problem.option("kind"), problem.option("eps"), weight, bias)
    return (n.out.to(x.dtype), total), (normed, weight, bias, n.mean, n.rstd)


def norm_backward(problem: Problem, saved: Saved, dout: tuple[Tensor | None, ...], needs: tuple[bool, ...]) -> Saved:
    x, weight, bias, _, _ = saved
    n = Norm(x, problem.option("kind"), problem.option("eps"), weight, bias)
    dx, dweight, dbias = n.backward(zeros_for_none(dout[0], x.shape, x))
    if dout[1] is not None:
        dx = dx + dout[1].to(n.dtype)
    return pick((dx, dweight, dbias), (x, weight, bias), needs)


def norm_linear_forward(
    problem: Problem,
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    residual: Tensor | None,
) -> tuple[Normed, Saved]:
    total = None if residual is None else x + residual
    normed = x if total is None else total
    n = Norm(normed, problem.option("kind"), problem.option("eps"), norm_weight, norm_bias)
    y = n.out @ w.to(n.dtype).T
    y = y if b is None else y + b.to(n.dtype)
    return (y.to(x.dtype), total), (normed, w, b, norm_weight, norm_bias, n.mean, n.rstd)


def norm_linear_backward(problem: Problem, saved: Saved, dout: tuple[Tensor | None, ...], needs: tuple[bool, ...]) -> Saved:
    x, w, b, norm_weight, norm_bias, _, _ = saved
    n = Norm(x, problem.option("kind"), problem.option("eps"), norm_weight, norm_bias)
    dy = zeros_for_none(dout[0], (x.shape[0], w.shape[0]), x)
    dx, dnorm_weight, dnorm_bias = n.backward(dy @ w.to(n.dtype))
    if dout[1] is not None:
        dx = dx + dout[1].to(n.dtype)
    return pick((dx, dy.T @ n.out, dy.sum(0), dnorm_weight, dnorm_bias), (x, w, b, norm_weight, norm_bias), needs)


def _linear(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    dtype = compute_dtype(x.dtype)
    z = x.to(dtype) @ w.to(dtype).T
    return z if b is None else z + b.to(dtype)


def linear_norm_forward(
    problem: Problem, x: Tensor, w: Tensor, b: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None
) -> tuple[Tensor, Saved]:
    n = Norm(_linear(x, w, b), problem.option("kind"), problem.option("eps"), norm_weight, norm_bias)
    y = n.out.to(x.dtype)
    return y, (x, w, b, norm_weight, norm_bias, y, n.rstd)


def linear_norm_backward(problem: Problem, saved: Saved, dout: Tensor, needs: tuple[bool, ...]) -> Saved:
    x, w, b, norm_weight, norm_bias, _, _ = saved
    n = Norm(_linear(x, w, b), problem.option("kind"), problem.option("eps"), norm_weight, norm_bias)
    dz, dnorm_weight, dnorm_bias = n.backward(dout.to(n.dtype))
    grads = (dz @ w.to(n.dtype), dz.T @ x.to(n.dtype), dz.sum(0), dnorm_weight, dnorm_bias)
    return pick(grads, (x, w, b, norm_weight, norm_bias), needs)


def stats(x: Tensor, rows: int, kind: str | None) -> list[Tensor]:
    """Empty mean and rstd of ``rows`` rows; mean is empty unless the norm has one, both are without a norm."""
    dtype = compute_dtype(x.dtype)
    return [x.new_empty(rows if kind == "layer" else 0, dtype=dtype), x.new_empty(rows if kind else 0, dtype=dtype)]


def residual_like(named: Named) -> Tensor:
    x = named["x"]
    return x.new_empty(0) if named.get("residual") is None else x.new_empty(x.shape)


def linear_flops(rows: int, w: Tensor, needs: Sequence[bool] | None) -> int:
    """2·M·N·K forward, and as much for each needed gradient of input and weight."""
    return 2 * rows * w.shape[0] * w.shape[1] * (1 if needs is None else int(needs[0]) + int(needs[1]))


def _norm_fake(named: Named, sizes: Sizes, spec: Spec) -> list[Tensor]:
    x = named["x"]
    return [x.new_empty(x.shape), residual_like(named), *stats(x, x.shape[0], spec.option("kind"))]


def _norm_linear_fake(named: Named, sizes: Sizes, spec: Spec) -> list[Tensor]:
    x = named["x"]
    return [x.new_empty(x.shape[0], named["w"].shape[0]), residual_like(named), *stats(x, x.shape[0], spec.option("kind"))]


def _linear_norm_fake(named: Named, sizes: Sizes, spec: Spec) -> list[Tensor]:
    x = named["x"]
    return [x.new_empty(x.shape[0], named["w"].shape[0]), stats(x, x.shape[0], "rms")[1]]


def _linear_dims(named: Named) -> tuple[tuple[str, int], ...]:
    return ("K", named["w"].shape[1]), ("N", named["w"].shape[0])


def _linear_flops(named: Named, sizes: Sizes, spec: Spec, needs: Sequence[bool] | None) -> int:
    return linear_flops(named["x"].shape[0], named["w"], needs)


library.define(OpDefinition(NORM, dims=lambda n: (("C", n["x"].shape[1]),), fake=_norm_fake, flops=lambda n, s, o, needs: 0))
library.define(OpDefinition(NORM_LINEAR, dims=_linear_dims, fake=_norm_linear_fake, flops=_linear_flops))
library.define(OpDefinition(LINEAR_NORM, dims=_linear_dims, fake=_linear_norm_fake, flops=_linear_flops))
