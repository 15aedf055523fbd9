"""The three GEMMs of a low-precision linear as custom ops, so that a compiled graph holds them whole.

``gem_precision::linear`` and ``gem_precision::linear_backward`` are told their site and level by a key (`Site.key`) and ask the site
itself, when they run, whether to sample: sampling neither breaks a graph nor compiles one anew. A move of a site does, once a level: what
is saved for backward has another shape there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gem_precision import kernels
from gem_precision.formats import element
from gem_precision.fused import fused_operands, through
from gem_precision.gemm import PAD, Quantised, gemm, high_precision_gemm, quantise, quantise_both
from gem_precision.kernels.quantize import column_sums, takes
from gem_precision.policy import Gemm, LinearPolicy, Operand
from gem_precision.site import Site, site_of


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
        self, names: tuple[str, str], x: Tensor, rows: Gemm, row: Operand, columns: Gemm, column: Operand, sums: bool = False
    ) -> tuple[Quantised, Quantised, Tensor | None]:
        first, second, found = quantise_both(x, rows, row, columns, column, sums=sums, **self.options)
        if rows.hadamard is None:
            self.site.record(names[0], x, first)
        if columns.hadamard is None:
            self.site.record(names[1], x.t(), second)
        return first, second, found

    def probe(self, gemm_name: str, operand: str, x: Tensor, *, along: int = 1) -> None:
        """While a demoted site is measured: what its recipe would do to ``x`` now."""
        if self.site.live and self.site.level:
            how: Gemm = getattr(self.site.levels[0][1], gemm_name)
            chosen = how.a if operand == "dy" or (operand, gemm_name) == ("x", "fprop") else how.b
            if chosen is not None:
                self.one(f"{gemm_name}.{operand}", x, how, chosen, along=along)


def parse_before(before: str, eps: float) -> tuple[str, Any] | None:
    """("rms" | "layer", eps) or ("act", name): what is applied to x first, in the pass that quantises it."""
    if not before:
        return None
    return ("act", before.removeprefix("act:")) if before.startswith("act:") else (before, eps)


Made = tuple[Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op("gem_precision::linear", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def linear(
    x: Tensor, w: Tensor, b: Tensor | None, key: str, dtype: torch.dtype, before: str, eps: float, wants_dw: bool, samples: bool,
    plus: Tensor | None,
) -> Made:  # fmt: skip
    """``x [M, K]``, ``w [N, K]``, ``b [N]`` -> ``y [M, N]`` in ``dtype``; x as the operand of wgrad (data as bytes, and scales), where
    ``wants_dw`` and the policy quantises it; the statistics of the norm in ``before``. What is not made is empty. ``samples``: a sample
    may be taken. ``plus [M, N]`` in ``dtype`` is added to y."""
    site, policy = site_of(key)
    site.enter(samples)
    fprop, wgrad, operands = policy.fprop, policy.wgrad, _Operands(policy, site)
    keeps = wants_dw and wgrad.b is not None
    qx = saved_x = stats = None
    with torch.autocast(x.device.type, enabled=False):
        if (first := parse_before(before, eps)) is not None:
            qx, saved_x, stats, plain = fused_operands(x, first, fprop.a, wgrad.b if keeps else None, dtype, site.generator, site.live)
            if plain is not None:
                site.record("fprop.x", plain, qx)
                if saved_x is not None:
                    site.record("wgrad.x", plain.t(), saved_x)
        elif fprop.a is not None and keeps:
            qx, saved_x, _ = operands.both(("fprop.x", "wgrad.x"), x, fprop, fprop.a, wgrad, wgrad.b)  # type: ignore[arg-type]
        elif fprop.a is not None:
            qx = operands.one("fprop.x", x, fprop, fprop.a)
        elif keeps:
            saved_x = operands.one("wgrad.x", x, wgrad, wgrad.b, along=0)  # type: ignore[arg-type]
        if fprop.a is None:
            operands.probe("fprop", "x", x)
            operands.probe("fprop", "w", w)
        if wants_dw and wgrad.b is None:
            operands.probe("wgrad", "x", x, along=0)
        bias = None if b is None else b.to(dtype)
        if qx is None:
            y = high_precision_gemm(x, w, dtype, bias, plus)
        else:
            y = gemm(qx, operands.one("fprop.w", w, fprop, fprop.b), dtype, policy.backend, bias, plus)  # type: ignore[arg-type]
    none = x.new_empty(0)
    data = none if saved_x is None else saved_x.data.contiguous().view(torch.uint8)
    # through one dimension: sides of length 1 may have any stride, and a compiled graph relies on the fake's
    scales = x.new_empty(0) if saved_x is None else saved_x.scales.contiguous().view(-1).view(saved_x.scales.shape)
    return y, data, scales, x.new_empty(0, dtype=torch.float32) if stats is None else stats


@linear.register_fake
def _(
    x: Tensor, w: Tensor, b: Tensor | None, key: str, dtype: torch.dtype, before: str, eps: float, wants_dw: bool, samples: bool,
    plus: Tensor | None,
) -> Made:  # fmt: skip
    _, policy = site_of(key)
    m = x.shape[0]
    y = x.new_empty((m, w.shape[0]), dtype=dtype)
    stats = x.new_empty((2, m) if before in ("rms", "layer") else (0,), dtype=torch.float32)
    how = policy.wgrad
    if not wants_dw or how.b is None:
        return y, x.new_empty(0), x.new_empty(0), stats
    return y, *saved_operand(x, how.b, how.hadamard), stats


def saved_operand(x: Tensor, operand: Operand, hadamard: int | None) -> tuple[Tensor, Tensor]:
    """Data and scales, not filled, of ``x [M, K]`` as the operand ``[K, M]`` of wgrad."""
    m, k = x.shape
    if hadamard is not None:
        m = -(-m // hadamard) * hadamard
    rows, width = operand.block
    blocks = -(-m // (width or m)) if width else 1
    data = -(-m // PAD) * PAD if hadamard is None and kernels.usable(x) and takes(operand) else m
    scale = torch.uint8 if operand.format == "mx" else torch.float32
    return x.new_empty((k, data), dtype=torch.uint8), x.new_empty((-(-k // rows), blocks), dtype=scale)


@torch.library.custom_op("gem_precision::linear_backward", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def linear_backward(
    g: Tensor, w: Tensor, x: Tensor | None, data: Tensor, scales: Tensor, stats: Tensor, key: str, dtype: torch.dtype, before: str,
    eps: float, wants_dx: bool, wants_dw: bool, wants_db: bool, plus: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dx ``[M, K]``, dw ``[N, K]``, db ``[N]`` fp32) for ``g [M, N]``; empty where not wanted. ``x``: what the forward op was given, where
    it is needed. ``plus``: behind a norm, another gradient of x, which dx then contains."""
    site, policy = site_of(key)
    dgrad, wgrad, operands = policy.dgrad, policy.wgrad, _Operands(policy, site)
    first = parse_before(before, eps)
    with torch.autocast(g.device.type, enabled=False):
        site.record("dy", g, None)
        low_dx, low_dw = wants_dx and dgrad.a is not None, wants_dw and wgrad.a is not None
        row = column = dx = dw = db = None
        if low_dx and low_dw:
            row, column, db = operands.both(("dgrad.dy", "wgrad.dy"), g, dgrad, dgrad.a, wgrad, wgrad.a, wants_db)  # type: ignore[arg-type]
        elif low_dx:
            row = operands.one("dgrad.dy", g, dgrad, dgrad.a)  # type: ignore[arg-type]
        elif low_dw:
            column = operands.one("wgrad.dy", g, wgrad, wgrad.a, along=0)  # type: ignore[arg-type]
        if wants_dx and dgrad.a is None:
            operands.probe("dgrad", "dy", g)
        if wants_dw and wgrad.a is None:
            operands.probe("wgrad", "dy", g, along=0)
        if row is not None:
            dx = gemm(row, operands.one("dgrad.w", w, dgrad, dgrad.b, along=0), dtype, policy.backend)  # type: ignore[arg-type]
        elif wants_dx:
            dx = high_precision_gemm(g, w.t(), dtype)
        if column is not None:
            assert wgrad.b is not None
            codes = data.view(element(wgrad.b.elem).torch_dtype or torch.uint8)
            dw = gemm(column, type(column)(codes, scales, wgrad.b.elem, wgrad.b.block), w.dtype, policy.backend)
        elif wants_dw:
            assert x is not None
            dw = high_precision_gemm(g.t(), x.t(), w.dtype)
        if dx is not None and first is not None:
            assert x is not None
            dx = through(first, (x, stats), dx, plus)
        if db is None:
            db = column_sums(g) if wants_db else g.new_empty(0, dtype=torch.float32)
    return g.new_empty(0) if dx is None else dx, g.new_empty(0) if dw is None else dw, db


@linear_backward.register_fake
def _(
    g: Tensor, w: Tensor, x: Tensor | None, data: Tensor, scales: Tensor, stats: Tensor, key: str, dtype: torch.dtype, before: str,
    eps: float, wants_dx: bool, wants_dw: bool, wants_db: bool, plus: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    out = x.dtype if before and x is not None else dtype
    dx = g.new_empty((g.shape[0], w.shape[1]), dtype=out) if wants_dx else g.new_empty(0)
    return dx, w.new_empty(w.shape) if wants_dw else g.new_empty(0), g.new_empty(g.shape[1] if wants_db else 0, dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Made) -> None:
    x, w, b, key, dtype, before, eps, wants_dw, *_ = inputs
    _, data, scales, stats = output
    # the site must live as long as the graph
    ctx.site, policy = site_of(key)
    needs_x = bool(before) or (wants_dw and policy.wgrad.b is None)
    ctx.save_for_backward(w, x if needs_x else None, data, scales, stats)
    ctx.told = key, dtype, before, eps
    ctx.bias_dtype = None if b is None else b.dtype


def _backward(ctx: Any, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    w, x, data, scales, stats = ctx.saved_tensors
    wants_dx, wants_dw, wants_db = ctx.needs_input_grad[:3]
    dx, dw, db = linear_backward(g, w, x, data, scales, stats, *ctx.told, wants_dx, wants_dw, wants_db)
    rest = (None,) * 6
    d_plus = g if ctx.needs_input_grad[9] else None
    return dx if wants_dx else None, dw if wants_dw else None, db.to(ctx.bias_dtype) if wants_db else None, *rest, d_plus


linear.register_autograd(_backward, setup_context=_keep)


class Through(torch.autograd.Function):
    """`linear` behind a norm of ``x [M, K]``, and x itself: one backward call gets the gradients of both."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, site: Site, dtype: torch.dtype, kind: str, eps: float, samples: bool
    ) -> tuple[Tensor, Tensor]:
        wants_dw = ctx.needs_input_grad[1]
        y, data, scales, stats = linear(x, w, b, site.key, dtype, kind, eps, wants_dw, samples, None)
        ctx.save_for_backward(w, x, data, scales, stats)
        # the site must live as long as the graph
        ctx.site, ctx.told, ctx.bias_dtype = site, (site.key, dtype, kind, eps), None if b is None else b.dtype
        ctx.set_materialize_grads(False)
        return y, x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor | None, dx: Tensor | None) -> tuple[Tensor | None, ...]:
        rest = (None,) * 5
        if g is None:
            return dx, None, None, *rest
        needs = ctx.needs_input_grad[:3]
        made = linear_backward(g, *ctx.saved_tensors, *ctx.told, *needs, dx)
        dx, dw, db = (grad if need else None for grad, need in zip(made, needs))
        return dx, dw, None if db is None else db.to(ctx.bias_dtype), *rest
