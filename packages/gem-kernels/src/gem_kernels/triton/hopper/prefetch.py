"""Rows of a matrix ahead into the L2 cache: worth it where a ring is too short for the latency of memory, measured to cost elsewhere."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def prefetch_rows(x, row, rows, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Ask for rows row .. row + ROWS of a contiguous [rows, COLUMNS] matrix of 2-byte elements where all of them exist; one warp's work.
    ``x`` is None for a matrix that is not contiguous: nothing happens."""
    if x is not None:
        lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
        each: gl.constexpr = ROWS * COLUMNS // 32
        if row + ROWS <= rows:
            at = (x + (row.to(gl.int64) * COLUMNS + lane * each)).to(gl.int64)
            size = lane * 0 + 2 * each
            asm: gl.constexpr = "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;"
            gl.inline_asm_elementwise(asm, "=r,l,r", [at, size], dtype=gl.int32, is_pure=False, pack=1)
