"""Decodes a quantised matrix, element times scale, in one launch: what emulated products multiply."""

from __future__ import annotations

import triton
import triton.language as tl

from gem_precision.kernels.measure_kernels import decoded, scale_value


@triton.jit(do_not_specialize=["rows", "ss0", "ss1"])
def decode_kernel(
    data, scales, out, rows, cols, sd0, sd1, ss0, ss1, MX: tl.constexpr, E5M2: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    LARGEST: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """``out [rows, cols]`` dense; strides of data and scales sd, ss; blocks of BR x BC share a scale. ``LARGEST``: of out's dtype."""
    program, across = tl.program_id(0).to(tl.int64), tl.cdiv(cols, BLOCK_C)
    r = program // across * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)
    c = program % across * BLOCK_C + tl.arange(0, BLOCK_C).to(tl.int64)
    inside = (r < rows)[:, None] & (c < cols)[None, :]
    value = decoded(tl.load(data + r[:, None] * sd0 + c[None, :] * sd1, mask=inside, other=0), E5M2)
    value *= scale_value(tl.load(scales + r[:, None] // BR * ss0 + c[None, :] // BC * ss1, mask=inside, other=0), MX)
    if MX:
        # as the codec: finite codes decode to finite values
        value = tl.where(value > LARGEST, LARGEST, tl.where(value < -LARGEST, -LARGEST, value))
    tl.store(out + r[:, None] * cols + c[None, :], value.to(out.dtype.element_ty), mask=inside)
