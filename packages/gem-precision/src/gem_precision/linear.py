"""Linear and grouped linear whose three GEMMs are quantised, each operand along its own K."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gem_core import ops
from gem_core.errors import OpError
from gem_precision.formats.jagged import padded_rows
from gem_precision.fused import ACTIVATIONS, can_fuse, fused_operands, through
from gem_precision.gemm import PAD, Quantised, gemm, high_precision_gemm, quantise, quantise_both
from gem_precision.policy import Gemm, LinearPolicy, Operand
from gem_precision.site import Site


def low_precision_linear(x: Tensor, w: Tensor, b: Tensor | None, site: Site) -> Tensor:
    """``y = x w^T + b`` with ``x [..., in]``, ``w [out, in]``, ``b [out]``; y has x's dtype, under autocast that of autocast.

    Weights are quantised from the dtype they are kept in, never by way of bf16. Saved for backward: w, and x quantised along M (8 bits) or,
    where wgrad is in bf16, x itself.
    """
    site.enter()
    return eager()(x, w, b, site)


_eager: Callable[..., Tensor] | None = None


def eager() -> Callable[..., Tensor]:
    """The computation, kept out of compiled graphs. Made at first use, since the decorator imports the compiler and that imports triton."""
    global _eager
    if _eager is None:
        _eager = torch.compiler.disable(_linear)
    return _eager


def _linear(x: Tensor, w: Tensor, b: Tensor | None, site: Site, before: tuple[str, Any] | None = None) -> Tensor:
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    with torch.autocast(device, enabled=False):
        rows = x.reshape(-1, x.shape[-1])
        y: Tensor = _Linear.apply(rows if before else rows.to(dtype), w, site, dtype, before)  # type: ignore[no-untyped-call]
        if b is not None:
            y = y + b.to(dtype)
    return y.unflatten(0, x.shape[:-1]) if x.dim() != 2 else y


class _Operands:
    """Quantises the tensors of one call and reports them to the site. Operands behind a Hadamard transform are not measured: what they
    should be compared with is not at hand."""

    def __init__(self, policy: LinearPolicy, site: Site) -> None:
        self.policy, self.site = policy, site
        self.options: dict[str, Any] = {"hadamard_seed": policy.hadamard_seed, "generator": site.generator}

    def one(self, name: str, x: Tensor, how: Gemm, operand: Operand, *, along: int = 1) -> Quantised:
        pad = PAD if name.startswith("wgrad") else 1
        q = quantise(x, operand, along=along, hadamard=how.hadamard, pad=pad, **self.options)
        if how.hadamard is None:
            self.site.record(name, x if along == 1 else x.t(), q)
        return q

    def both(
        self, names: tuple[str, str], x: Tensor, rows: Gemm, row: Operand, columns: Gemm, column: Operand
    ) -> tuple[Quantised, Quantised]:
        first, second = quantise_both(x, rows, row, columns, column, **self.options)
        if rows.hadamard is None:
            self.site.record(names[0], x, first)
        if columns.hadamard is None:
            self.site.record(names[1], x.t(), second)
        return first, second

    def probe(self, gemm_name: str, operand: str, x: Tensor, *, along: int = 1) -> None:
        """While a demoted site is measured: what its recipe would do to ``x`` now."""
        if self.site.live and self.site.level:
            how: Gemm = getattr(self.site.levels[0][1], gemm_name)
            chosen = how.a if operand == "dy" or (operand, gemm_name) == ("x", "fprop") else how.b
            if chosen is not None:
                self.one(f"{gemm_name}.{operand}", x, how, chosen, along=along)


class _Linear(torch.autograd.Function):
    """``before``: ("rms" | "layer", eps) or ("act", name): what is applied to x first, in the pass that quantises it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, site: Site, dtype: torch.dtype, before: tuple[str, Any] | None) -> Tensor:
        policy: LinearPolicy = site.policy
        fprop, wgrad = policy.fprop, policy.wgrad
        operands = _Operands(policy, site)
        keeps = ctx.needs_input_grad[1] and wgrad.b is not None
        stats = qx = saved_x = None
        raw = x
        if before is not None:
            qx, saved_x, stats = fused_operands(x, before, fprop.a, wgrad.b if keeps else None, dtype, site.generator)
        elif fprop.a is not None and keeps:
            qx, saved_x = operands.both(("fprop.x", "wgrad.x"), x, fprop, fprop.a, wgrad, wgrad.b)
        elif fprop.a is not None:
            qx = operands.one("fprop.x", x, fprop, fprop.a)
        elif keeps:
            saved_x = operands.one("wgrad.x", x, wgrad, wgrad.b, along=0)
        if fprop.a is None:
            operands.probe("fprop", "x", x)
            operands.probe("fprop", "w", w)
        if ctx.needs_input_grad[1] and wgrad.b is None:
            operands.probe("wgrad", "x", x, along=0)
        if qx is None:
            y = high_precision_gemm(x, w, dtype)
        else:
            y = gemm(qx, operands.one("fprop.w", w, fprop, fprop.b), dtype, policy.backend)
        ctx.operands, ctx.before, ctx.x_dtype, ctx.saved_x = operands, before, dtype, None
        saved = [w]
        if saved_x is not None:
            ctx.saved_x = (type(saved_x), saved_x.elem, saved_x.block)
            saved += [saved_x.data, saved_x.scales]
        elif ctx.needs_input_grad[1]:
            saved.append(x)
        if before is not None:
            saved += [raw] if stats is None else [raw, stats]
        ctx.save_for_backward(*saved)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        operands: _Operands = ctx.operands
        policy = operands.policy
        dgrad, wgrad = policy.dgrad, policy.wgrad
        w, *rest = ctx.saved_tensors
        operands.site.record("dy", g, None)
        wants_dx, wants_dw = ctx.needs_input_grad[:2]
        low_dx, low_dw = wants_dx and dgrad.a is not None, wants_dw and ctx.saved_x is not None
        row = column = dx = dw = None
        if low_dx and low_dw:
            row, column = operands.both(("dgrad.dy", "wgrad.dy"), g, dgrad, dgrad.a, wgrad, wgrad.a)
        elif low_dx:
            row = operands.one("dgrad.dy", g, dgrad, dgrad.a)
        elif low_dw:
            column = operands.one("wgrad.dy", g, wgrad, wgrad.a, along=0)
        if wants_dx and dgrad.a is None:
            operands.probe("dgrad", "dy", g)
        if wants_dw and ctx.saved_x is None:
            operands.probe("wgrad", "dy", g, along=0)
        if row is not None:
            dx = gemm(row, operands.one("dgrad.w", w, dgrad, dgrad.b, along=0), ctx.x_dtype, policy.backend)
        elif wants_dx:
            dx = high_precision_gemm(g, w.t(), ctx.x_dtype)
        if column is not None:
            family, elem, block = ctx.saved_x
            dw = gemm(column, family(rest[0], rest[1], elem, block), w.dtype, policy.backend)
        elif wants_dw:
            dw = high_precision_gemm(g.t(), rest[0].t(), w.dtype)
        if dx is not None and ctx.before is not None:
            dx = through(ctx.before, rest[2:], dx)
        return dx, dw, None, None, None


class LowPrecisionLinear(nn.Linear):
    """`torch.nn.Linear` whose GEMMs follow ``site.policy``. Made in place by `convert_linear`, so that parameters, their names, hooks and
    references to the module stay what they were."""

    site: Site

    def forward(self, x: Tensor) -> Tensor:
        self.site.enter(self.training)
        return (_eager or eager())(x, self.weight, self.bias, self.site)

    def after_norm(self, x: Tensor, kind: str, eps: float) -> Tensor:
        """``self(ops.norm(x, kind=kind, eps=eps))``, with the norm and the quantising of its result in one pass where the kernels can."""
        return self._after(x, (kind, eps), lambda: ops.norm(x, kind=kind, eps=eps))

    def after_activation(self, x: Tensor, name: str) -> Tensor:
        """``self(act(x))`` for relu, gelu (erf) or silu, likewise in one pass."""
        return self._after(x, ("act", name), lambda: ACTIVATIONS[name](x))

    def _after(self, x: Tensor, before: tuple[str, Any], unfused: Callable[[], Tensor]) -> Tensor:
        self.site.enter(self.training)
        # a sample compares operands with what they came from, which the fused pass never writes
        if self.site.live or not can_fuse(x.reshape(-1, x.shape[-1]), before, self.site.policy):
            return self(unfused())
        return (_eager or eager())(x, self.weight, self.bias, self.site, before)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, precision={self.site.precision}"


def convert_linear(linear: nn.Linear, site: Site) -> LowPrecisionLinear:
    """Turn ``linear`` into a `LowPrecisionLinear` in place.

    :raises OpError: it is a subclass with a forward of its own.
    """
    if type(linear) is not nn.Linear:
        raise OpError(f"{site.name} is a {type(linear).__name__}, not a torch.nn.Linear", where=site.name, fix="leave it out of the recipe")
    eager()
    linear.__class__ = LowPrecisionLinear
    linear.site = site  # type: ignore[assignment]
    return linear  # type: ignore[return-value]


def restore_linear(linear: LowPrecisionLinear) -> nn.Linear:
    """Undo `convert_linear`."""
    del linear.site
    linear.__class__ = nn.Linear  # type: ignore[assignment]
    return linear


def grouped_linear(x: Tensor, w: Tensor, offsets: Tensor, b: Tensor | None = None, *, site: Site) -> Tensor:
    """One linear a group of packed rows: ``y[a:b] = x[a:b] w[g]^T + b[g]``.

    :param x: ``[N, in]``; rows past ``offsets[-1]`` give zero and are not read.
    :param w: ``[G, out, in]``; ``b [G, out]``.
    :param offsets: ``[G+1]`` int32 or int64. Groups may be empty and of any length: the blocks of wgrad, which runs along the rows, begin
        anew at every group.
    :raises OpError: a policy that is neither MX nor bf16.
    """
    site.enter()
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
