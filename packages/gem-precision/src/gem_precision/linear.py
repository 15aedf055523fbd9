"""Linear and grouped linear whose three GEMMs are quantised, each operand along its own K."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gem_core import ops
from gem_core.errors import OpError
from gem_core.model.layers import product_dtype
from gem_precision import kernels, linear_op
from gem_precision.formats.jagged import padded_rows
from gem_precision.fused import ACTIVATIONS, can_fuse
from gem_precision.gemm import Quantised, quantise
from gem_precision.policy import Gemm, LinearPolicy
from gem_precision.site import Site


def low_precision_linear(
    x: Tensor, w: Tensor, b: Tensor | None, site: Site, before: str = "", eps: float = 0.0, training: bool = True,
    plus: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``y = x w^T + b`` with ``x [..., in]``, ``w [out, in]``, ``b [out]``; y has x's dtype, under autocast that of autocast.

    Weights are quantised from the dtype they are kept in, never by way of bf16. Saved for backward: w, and x quantised along M (8 bits) or,
    where wgrad is in bf16, x itself. ``before``: what x goes through in the same pass, "rms" or "layer" with ``eps``, or "act:NAME";
    ``plus [..., out]`` is added to y.
    """
    dtype = product_dtype(x)
    grad = torch.is_grad_enabled()
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if before else rows.to(dtype)
    y = linear_op.linear(rows, w, b, site.key, dtype, before, eps, grad and w.requires_grad, grad and training, plus)[0]
    return y.unflatten(0, x.shape[:-1]) if x.dim() != 2 else y


class LowPrecisionLinear(nn.Linear):
    """`torch.nn.Linear` whose GEMMs follow ``site.policy``. Made in place by `convert_linear`, so that parameters, their names, hooks and
    references to the module stay what they were. Calls of fewer rows than ``site.min_rows`` compute as `torch.nn.Linear` does."""

    site: Site

    def forward(self, x: Tensor) -> Tensor:
        if self._has_few_rows(x):
            return self._plain(x)
        return low_precision_linear(x, self.weight, self.bias, self.site, training=self.training)

    def _has_few_rows(self, x: Tensor) -> bool:
        return self.site.min_rows > 0 and x.numel() // self.in_features < self.site.min_rows

    def _plain(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.site.few_rows = x.numel() // self.in_features
        if torch.is_autocast_enabled(x.device.type):
            return F.linear(x, self.weight, self.bias)
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))

    def after_norm(self, x: Tensor, kind: str, eps: float) -> Tensor:
        """``self(ops.norm(x, kind=kind, eps=eps))``, with the norm and the quantising of its result in one pass where the kernels can."""
        if self._has_few_rows(x) or not can_fuse(x, kind, self.site.policy):
            return self(ops.norm(x, kind=kind, eps=eps))
        return low_precision_linear(x, self.weight, self.bias, self.site, kind, eps, training=self.training)

    def after_norm_through(self, x: Tensor, kind: str, eps: float) -> tuple[Tensor, Tensor]:
        """`after_norm`, and x for what uses it afterwards, as a skip connection does: that use's gradient is added where the norm's is
        computed, not in a pass of its own."""
        asks = x.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if not asks or self._has_few_rows(x) or not can_fuse(x, kind, self.site.policy):
            return self.after_norm(x, kind, eps), x
        rows = x.reshape(-1, x.shape[-1])
        y, passed = linear_op.Through.apply(rows, self.weight, self.bias, self.site, product_dtype(x), kind, eps, self.training)
        return y.view(*x.shape[:-1], self.out_features), passed.view(x.shape)

    def after_activation(self, x: Tensor, name: str) -> Tensor:
        """``self(act(x))`` for relu, gelu (erf) or silu, likewise in one pass."""
        if self._has_few_rows(x) or not can_fuse(x, f"act:{name}", self.site.policy):
            return self(ACTIVATIONS[name](x))
        return low_precision_linear(x, self.weight, self.bias, self.site, f"act:{name}", training=self.training)

    def added(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual + self(x)`` of matrices; where the result has residual's dtype, the sum is beside the product and rounded once."""
        if self._has_few_rows(x) or residual.dtype != product_dtype(x) or x.dim() != 2:
            return residual + self(x)
        return low_precision_linear(x, self.weight, self.bias, self.site, training=self.training, plus=residual)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, precision={self.site.precision}"


def convert_linear(linear: nn.Linear, site: Site) -> LowPrecisionLinear:
    """Turn ``linear`` into a `LowPrecisionLinear` in place.

    :raises OpError: it is a subclass with a forward of its own.
    """
    if type(linear) is not nn.Linear:
        raise OpError(f"{site.name} is a {type(linear).__name__}, not a torch.nn.Linear", where=site.name, fix="leave it out of the recipe")
    kernels.triton_installed()
    linear.__class__ = LowPrecisionLinear
    linear.site = site  # type: ignore[assignment]
    return linear  # type: ignore[return-value]


def grouped_linear(x: Tensor, w: Tensor, offsets: Tensor, b: Tensor | None = None, *, site: Site) -> Tensor:
    """One linear a group of packed rows: ``y[a:b] = x[a:b] w[g]^T + b[g]``.

    :param x: ``[N, in]``; rows past ``offsets[-1]`` give zero and are not read.
    :param w: ``[G, out, in]``; ``b [G, out]``.
    :param offsets: ``[G+1]`` int32 or int64. Groups may be empty and of any length: the blocks of wgrad, which runs along the rows, begin
        anew at every group.
    :raises OpError: a policy that is neither MX nor bf16.
    """
    site.enter(torch.is_grad_enabled())
    policy: LinearPolicy = site.policy
    for how in (policy.fprop, policy.dgrad, policy.wgrad):
        if how.a is not None and how.a.format != "mx":
            raise OpError(f"{site.name}: grouped linears take MX or bf16, not {how}", where=site.name, fix="choose an mxfp8 recipe for it")
    inside = torch.arange(x.shape[0], device=x.device) < offsets[-1]
    x = torch.where(inside[:, None], x, 0)
    y: Tensor = _Grouped.apply(x, w, offsets, site)  # type: ignore[no-untyped-call]
    if b is not None:
        group = torch.bucketize(torch.arange(x.shape[0], device=x.device), offsets[1:].to(torch.int64), right=True)
        y = y + b.to(y.dtype)[group.clamp(max=b.shape[0] - 1)]
        y = torch.where(inside[:, None], y, 0)
    return y


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, offsets: Tensor, site: Site) -> Tensor:
        policy: LinearPolicy = site.policy
        ctx.site, ctx.policy = site, policy
        ctx.save_for_backward(x, w, offsets)
        xa, wa = _decoded_pair(x, w, policy.fprop, policy, site, "fprop", "x", along=1)
        return _rows_times_weights(xa, wa, offsets).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        site, policy = ctx.site, ctx.policy
        x, w, offsets = ctx.saved_tensors
        inside = torch.arange(x.shape[0], device=x.device) < offsets[-1]
        g = torch.where(inside[:, None], g, 0)
        site.record("dy", g, None)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            ga, wa = _decoded_pair(g, w, policy.dgrad, policy, site, "dgrad", "dy", along=0)
            dx = _rows_times_weights(ga, wa, offsets).to(x.dtype)
        if ctx.needs_input_grad[1]:
            multiple = 32
            target, starts, total = padded_rows(offsets, x.shape[0], multiple)
            ga, xa = (_decoded_columns(t, target, total, policy, site, n) for t, n in ((g, "dy"), (x, "x")))
            dw = w.new_zeros(w.shape)
            for i, (a, b) in enumerate(zip((starts * multiple).tolist(), (starts[1:] * multiple).tolist())):
                dw[i] = (ga[:, a:b] @ xa[:, a:b].t()).to(w.dtype)
        return dx, dw, None, None


def _decoded_pair(
    x: Tensor, w: Tensor, how: Gemm, policy: LinearPolicy, site: Site, gemm_name: str, operand: str, *, along: int
) -> tuple[Tensor, Tensor]:
    """x ``[N, K]`` and w as ``[G, rows, K]``, quantised along K and decoded; ``along``: which dim of each ``w[g]`` is K."""
    if how.a is None or how.b is None:
        wide = w if along == 1 else w.transpose(1, 2)
        return x.to(torch.bfloat16).float(), wide.to(torch.bfloat16).float()
    options = {"hadamard": how.hadamard, "hadamard_seed": policy.hadamard_seed, "generator": site.generator}
    qx = quantise(x, how.a, **options)  # type: ignore[arg-type]
    site.record(f"{gemm_name}.{operand}", x, qx if how.hadamard is None else None)
    decoded = [quantise(w[i], how.b, along=along, **options).dequantize() for i in range(w.shape[0])]  # type: ignore[arg-type]
    return qx.dequantize(), torch.stack(decoded)


def _decoded_columns(x: Tensor, target: Tensor, total: int, policy: LinearPolicy, site: Site, operand: str) -> Tensor:
    """``[columns, total]``: x with every group begun at a multiple of 32 rows, quantised along the rows and decoded."""
    scratch = x.new_zeros(total + 1, x.shape[1])
    scratch[target] = x
    padded = scratch[:total]
    how = policy.wgrad
    chosen = how.a if operand == "dy" else how.b
    if chosen is None:
        return padded.t().to(torch.bfloat16).float()
    q: Quantised = quantise(padded, chosen, along=0, hadamard=how.hadamard, hadamard_seed=policy.hadamard_seed, generator=site.generator)
    site.record(f"wgrad.{operand}", padded.t(), q if how.hadamard is None else None)
    return q.dequantize()


def _rows_times_weights(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    """``y[a:b] = x[a:b] @ w[g]^T`` in fp32 for fp32 operands ``x [N, K]``, ``w [G, rows, K]``."""
    y = x.new_zeros(x.shape[0], w.shape[1])
    bounds = offsets.tolist()
    for i, (a, b) in enumerate(zip(bounds, bounds[1:])):
        y[a:b] = x[a:b] @ w[i].t()
    return y


class GroupedLinear(nn.Module):
    """``groups`` linears over packed rows, ``forward(x [N, in], offsets [G+1]) -> [N, out]``. Without a site it computes in x's dtype."""

    def __init__(self, groups: int, in_features: int, out_features: int, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(groups, out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(groups, out_features)) if bias else None
        self.site: Site | None = None
        nn.init.normal_(self.weight, std=in_features**-0.5)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        if self.site is not None:
            return grouped_linear(x, self.weight, offsets, self.bias, site=self.site)
        group = torch.bucketize(torch.arange(x.shape[0], device=x.device), offsets[1:].to(torch.int64), right=True)
        inside = group < self.weight.shape[0]
        x = torch.where(inside[:, None], x, 0)
        y = _rows_times_weights(x, self.weight.to(x.dtype), offsets)
        if self.bias is not None:
            y = torch.where(inside[:, None], y + self.bias.to(x.dtype)[group.clamp(max=self.weight.shape[0] - 1)], 0)
        return y
