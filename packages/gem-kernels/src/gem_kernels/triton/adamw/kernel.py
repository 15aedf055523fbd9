"""Triton kernel of AdamW: memory-bound, every value is read and written once."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def adamw_kernel(
    parameter, gradient, exp_avg, exp_avg_sq, copy, lr, corrections, scale, ok, n,
    beta1, rest1, beta2, rest2, eps, decay, COPY: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK values. ``rest`` is 1 - beta, which fp32 would round coarsely if it were computed here; so are the corrections 1 - beta^t."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    g = tl.load(gradient + at, mask=mask, other=0.0).to(tl.float32)
    p = tl.load(parameter + at, mask=mask, other=0.0)
    m = tl.load(exp_avg + at, mask=mask, other=0.0)
    v = tl.load(exp_avg_sq + at, mask=mask, other=0.0)
    if SCALE:
        g = g * tl.load(scale)
    rate = tl.load(lr)
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    size = rate / tl.load(corrections)
    unbias = 1.0 / tl.sqrt(tl.load(corrections + 1))
    p = p * (1.0 - rate * decay) - size * m / (tl.sqrt(v) * unbias + eps)
    written = mask & (tl.load(ok).to(tl.int32) != 0)
    tl.store(exp_avg + at, m, mask=written)
    tl.store(exp_avg_sq + at, v, mask=written)
    tl.store(parameter + at, p, mask=written)
    if COPY:
        tl.store(copy + at, p.to(copy.dtype.element_ty), mask=written)
