"""Eager norm, norm_linear, linear_norm, mlp and norm_gdpa.

Matrix products run in the tensors' dtype (torch accumulates them in fp32), norms in fp32 (fp64 for fp64). Backward starts from the row
statistics that the forward saved: RMSNorm dx = r g − x r³ mean(g x), LayerNorm by torch's own fused kernel wherever the dtypes agree.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gem_core.ops.contract import Problem
from gem_core.ops.remember import remembered
from gem_kernels.eager import engine
from gem_kernels.eager.engine import Score
from gem_kernels.eager.plan import Masking, Samples, Shape, host_lengths, make_plan

Saved = tuple[Tensor | None, ...]


def compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class RowNorm:
    """The norm of rows ``x [M, C]``; ``mean`` and ``rstd [M]`` are computed, or those that the forward saved."""

    def __init__(
        self, x: Tensor, kind: str, eps: float, weight: Tensor | None = None, bias: Tensor | None = None, *, stats: Any = None
    ) -> None:
        self.x, self.kind, self.eps, self.weight, self.bias = x, kind, eps, weight, bias
        self.dtype = compute_dtype(x)
        self.fused = kind == "layer" and all(t is None or t.dtype == x.dtype for t in (weight, bias))
        self.mean: Tensor | None
        self.rstd: Tensor | None
        self.mean, self.rstd = (None, None) if stats is None else stats

    def forward(self) -> Tensor:
        """``[M, C]`` in x's dtype."""
        if self.fused:
            y, mean, rstd = torch.native_layer_norm(self.x, self.x.shape[1:], self.weight, self.bias, self.eps)
            self.mean, self.rstd = mean[:, 0].to(self.dtype), rstd[:, 0].to(self.dtype)
            return y
        x = self.x.to(self.dtype)
        if self.rstd is None:
            self.mean = x.mean(1) if self.kind == "layer" else None
            centred = x if self.mean is None else x - self.mean[:, None]
            size = torch.linalg.vector_norm(centred, dim=1)
            self.rstd = torch.rsqrt(size * size / x.shape[1] + self.eps)
        y = x * self.rstd[:, None] if self.kind == "rms" else (x - self.mean[:, None]) * self.rstd[:, None]  # type: ignore[index]
        if self.weight is not None:
            y = y * self.weight
        if self.bias is not None:
            y = y + self.bias
        return y.to(self.x.dtype)

    def backward(self, dout: Tensor, *, parameters: bool = True) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Gradients of x, weight and bias in the compute dtype."""
        assert self.rstd is not None
        x, d = self.x.to(self.dtype), dout.to(self.dtype)
        if self.fused:
            weight, bias = (None if t is None else t.to(self.dtype) for t in (self.weight, self.bias))
            mask = [True, weight is not None and parameters, bias is not None and parameters]
            assert self.mean is not None
            return torch.ops.aten.native_layer_norm_backward(d, x, x.shape[1:], self.mean[:, None], self.rstd[:, None], weight, bias, mask)
        r = self.rstd[:, None]
        centred = x if self.mean is None else x - self.mean[:, None]
        g = d if self.weight is None else d * self.weight
        dweight = torch.einsum("mc,mc,m->c", d, centred, self.rstd) if parameters and self.weight is not None else None
        dx = torch.addcmul(g * r, centred, (g * centred).mean(1, keepdim=True) * r**3, value=-1)
        if self.kind == "layer":
            dx -= g.mean(1, keepdim=True) * r
        return dx, dweight, d.sum(0) if parameters and self.bias is not None else None


def _total(x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The rows to be normed, and residual_out."""
    total = None if residual is None else x + residual
    return (x if total is None else total), total


def _plus(grad: Tensor, more: Tensor | None) -> Tensor:
    return grad if more is None else grad + more


def _pick(grads: tuple[Tensor | None, ...], like: tuple[Tensor | None, ...], needs: tuple[bool, ...]) -> Saved:
    return tuple(g.to(t.dtype) if need and g is not None and t is not None else None for g, t, need in zip(grads, like, needs))


def norm_forward(problem: Problem, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None) -> Any:
    normed, total = _total(x, residual)
    norm = RowNorm(normed, problem.option("kind"), problem.option("eps"), weight, bias)
    y = norm.forward()
    return (y, total), (normed, weight, bias, norm.mean, norm.rstd)


def norm_backward(problem: Problem, saved: Saved, dout: tuple[Tensor | None, ...], needs: tuple[bool, ...]) -> Saved:
    x, weight, bias, *stats = saved
    assert x is not None
    norm = RowNorm(x, problem.option("kind"), problem.option("eps"), weight, bias, stats=_stats(problem.option("kind"), stats))
    if dout[0] is None:
        grads: tuple[Tensor | None, ...] = (dout[1], *(None if t is None else torch.zeros_like(t) for t in (weight, bias)))
    else:
        dx, dweight, dbias = norm.backward(dout[0], parameters=any(needs[1:]))
        grads = _plus(dx, dout[1]), dweight, dbias
    return _pick(grads, (x, weight, bias), needs)


def _stats(kind: str, stats: Any) -> tuple[Tensor | None, Tensor]:
    mean, rstd = stats
    return (mean if kind == "layer" else None), rstd


def norm_linear_forward(problem: Problem, x: Tensor, w: Tensor, b: Any, norm_weight: Any, norm_bias: Any, residual: Any) -> Any:
    normed, total = _total(x, residual)
    norm = RowNorm(normed, problem.option("kind"), problem.option("eps"), norm_weight, norm_bias)
    y = F.linear(norm.forward(), w, b)
    return (y, total), (normed, w, b, norm_weight, norm_bias, norm.mean, norm.rstd)


def norm_linear_backward(problem: Problem, saved: Saved, dout: tuple[Tensor | None, ...], needs: tuple[bool, ...]) -> Saved:
    x, w, b, norm_weight, norm_bias, *stats = saved
    assert x is not None
    assert w is not None
    kind = problem.option("kind")
    norm = RowNorm(x, kind, problem.option("eps"), norm_weight, norm_bias, stats=_stats(kind, stats))
    dy = dout[0] if dout[0] is not None else x.new_zeros(x.shape[0], w.shape[0])
    dw = dy.t() @ norm.forward() if needs[1] else None
    dx = dnorm_weight = dnorm_bias = None
    if needs[0] or needs[3] or needs[4]:
        dx, dnorm_weight, dnorm_bias = norm.backward(dy @ w, parameters=needs[3] or needs[4])
        dx = _plus(dx, dout[1])
    return _pick((dx, dw, _column_sum(dy), dnorm_weight, dnorm_bias), (x, w, b, norm_weight, norm_bias), needs)


def _column_sum(x: Tensor) -> Tensor:
    return x.sum(0, dtype=compute_dtype(x))


def linear_norm_forward(problem: Problem, x: Tensor, w: Tensor, b: Any, norm_weight: Any, norm_bias: Any) -> Any:
    norm = RowNorm(F.linear(x, w, b), problem.option("kind"), problem.option("eps"), norm_weight, norm_bias)
    y = norm.forward()
    return y, (x, w, b, norm_weight, norm_bias, y, norm.rstd)


def linear_norm_backward(problem: Problem, saved: Saved, dout: Tensor, needs: tuple[bool, ...]) -> Saved:
    x, w, b, norm_weight, norm_bias, _, _ = saved
    assert x is not None
    assert w is not None
    norm = RowNorm(F.linear(x, w, b), problem.option("kind"), problem.option("eps"), norm_weight, norm_bias)
    norm.forward()
    dz, dnorm_weight, dnorm_bias = norm.backward(dout, parameters=needs[3] or needs[4])
    narrow = dz.to(x.dtype)
    dx = narrow @ w if needs[0] else None
    dw = narrow.t() @ x if needs[1] else None
    return _pick((dx, dw, _column_sum(dz), dnorm_weight, dnorm_bias), (x, w, b, norm_weight, norm_bias), needs)


def mlp_forward(problem: Problem, x: Tensor, w1: Tensor, b1: Any, w2: Tensor, b2: Any, residual: Any) -> Any:
    normed, total = _total(x, residual)
    inner, mean, rstd = normed, None, None
    if problem.option("norm"):
        norm = RowNorm(normed, problem.option("norm"), problem.option("eps"))
        inner = norm.forward()
        mean, rstd = norm.mean, norm.rstd
    y = F.linear(engine.activate(problem.option("activation"), F.linear(inner, w1, b1)), w2, b2)
    return (y, total), (normed, w1, b1, w2, b2, mean, rstd)


def mlp_backward(problem: Problem, saved: Saved, dout: tuple[Tensor | None, ...], needs: tuple[bool, ...]) -> Saved:
    x, w1, b1, w2, b2, *stats = saved
    assert x is not None
    assert w1 is not None
    assert w2 is not None
    kind, name = problem.option("norm"), problem.option("activation")
    norm = RowNorm(x, kind, problem.option("eps"), stats=_stats(kind, stats)) if kind else None
    inner = x if norm is None else norm.forward()
    hidden = F.linear(inner, w1, b1)
    dy = dout[0] if dout[0] is not None else x.new_zeros(x.shape[0], w2.shape[0])
    dw2 = dy.t() @ engine.activate(name, hidden) if needs[3] else None
    dhidden = engine.activate_backward(name, hidden, dy @ w2)
    dx = None
    if needs[0]:
        dx = dhidden @ w1
        dx = _plus(dx if norm is None else norm.backward(dx)[0], dout[1])
    dw1 = dhidden.t() @ inner if needs[1] else None
    return _pick((dx, dw1, _column_sum(dhidden), dw2, _column_sum(dy)), (x, w1, b1, w2, b2), needs)


def _gdpa(problem: Problem, q_offsets: Tensor, k_offsets: Tensor, q: Tensor, k: Tensor) -> tuple[Any, Score]:
    """Plan and score of the attention inside norm_gdpa."""
    shape = Shape(problem.dim("H"), problem.dim("H"))
    score = Score(problem.option("scale_in"), problem.option("scale_out"), problem.option("activation"))

    def build() -> Any:
        q_start, lq = host_lengths(q_offsets)
        k_start, lk = host_lengths(k_offsets)
        samples = Samples(q_start, q_start, k_start, lq, lk)
        return make_plan(
            samples,
            shape,
            Masking(),
            out_rows=q.shape[0],
            key_rows=k.shape[0],
            shared_keys=False,
            shared_q=False,
            device=q.device,
        )

    return remembered((k_offsets, q_offsets), ("norm_gdpa", shape, q.shape[0], k.shape[0]), build), score


def _live(q: Tensor, q_offsets: Tensor) -> Tensor:
    """q as rows ``[Nq, H·D]`` in the compute dtype, slack rows zero."""
    alive = torch.arange(q.shape[0], device=q.device) < q_offsets[-1]
    return q.flatten(1).to(compute_dtype(q)).masked_fill(~alive[:, None], 0)


def norm_gdpa_forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor) -> Any:
    plan, score = _gdpa(problem, q_offsets, k_offsets, q, k)
    rows = _live(q, q_offsets)
    first = RowNorm(rows, "layer", problem.option("eps"))
    wide = first.forward().view(q.shape)
    attended, _ = engine.forward(plan, score, wide, k.to(wide.dtype), v.to(wide.dtype), want_lse=False)
    second = RowNorm((attended + wide).flatten(1), "rms", problem.option("eps"))
    out = (second.forward() + rows).view(q.shape).to(q.dtype)
    return out, (q, k, v, q_offsets, k_offsets, out, first.mean, first.rstd, second.rstd)


def norm_gdpa_backward(problem: Problem, saved: Saved, dout: Tensor, needs: tuple[bool, ...]) -> Saved:
    q, k, v, q_offsets, k_offsets, _, mean, rstd, out_rstd = saved
    assert q is not None
    assert k is not None
    assert v is not None
    assert q_offsets is not None
    assert k_offsets is not None
    plan, score = _gdpa(problem, q_offsets, k_offsets, q, k)
    rows, d = _live(q, q_offsets), _live(dout, q_offsets)
    first = RowNorm(rows, "layer", problem.option("eps"), stats=(mean, rstd))
    wide = torch.where(rstd[:, None] > 0, (rows - mean[:, None]) * rstd[:, None], 0).view(q.shape)  # type: ignore[index]
    keys, values = k.to(wide.dtype), v.to(wide.dtype)
    attended, _ = engine.forward(plan, score, wide, keys, values, want_lse=False)
    second = RowNorm((attended + wide).flatten(1), "rms", problem.option("eps"), stats=(None, out_rstd))
    do = second.backward(d)[0].view(q.shape)
    dl, dk, dv, _, _ = engine.backward(plan, score, wide, keys, values, do)
    dq = first.backward((dl + do).flatten(1))[0] + d
    return _pick((dq.view(q.shape), dk, dv), (q, k, v), needs)
