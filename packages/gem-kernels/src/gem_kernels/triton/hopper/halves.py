"""Accumulators in two."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def halves(z):
    """The columns of accumulators z [64, N] in two tensors, which moves nothing."""
    N: gl.constexpr = z.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N // 2, 16])
    a, b = gl.split(gl.permute(gl.reshape(z, [64, 2, N // 2]), (0, 2, 1)))
    return gl.convert_layout(a, layout, assert_trivial=True), gl.convert_layout(b, layout, assert_trivial=True)
