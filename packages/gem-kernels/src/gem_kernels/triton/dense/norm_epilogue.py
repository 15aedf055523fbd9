"""A norm's backward as the epilogue of a matrix product: g, the gradient of x̂, is in accumulators, and dx = r (g − x̂ mean(g x̂) − mean(g)).

Wide accumulators are taken apart PIECE columns at a time, because x̂ beside all of g would not fit in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gem_kernels.triton.dense.tiles import halves, load_tile, store_tile


@triton.jit
def row_sums(g, x, mu, r, g_sum, gx_sum, m, c, rows, stride_x, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
              PIECE: tl.constexpr):  # fmt: skip
    """Add the row sums of g and g x̂ over COLUMNS columns from c, PIECE columns at a time to spare registers."""
    if COLUMNS > PIECE:
        left, right = halves(g, ROWS, COLUMNS)
        g_sum, gx_sum = row_sums(left, x, mu, r, g_sum, gx_sum, m, c, rows, stride_x, K, ROWS, COLUMNS // 2, PIECE)
        g_sum, gx_sum = row_sums(right, x, mu, r, g_sum, gx_sum, m, c + COLUMNS // 2, rows, stride_x, K, ROWS, COLUMNS // 2, PIECE)
    else:
        hat = (load_tile(x, stride_x, m, c, rows, K, ROWS, COLUMNS, False).to(tl.float32) - mu[:, None]) * r[:, None]
        g_sum += tl.sum(g, 1)
        gx_sum += tl.sum(g * hat, 1)
    return g_sum, gx_sum


@triton.jit
def park(g, dx, m, c, rows, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PIECE: tl.constexpr):
    """Leave COLUMNS columns of g in dx."""
    if COLUMNS > PIECE:
        left, right = halves(g, ROWS, COLUMNS)
        park(left, dx, m, c, rows, K, ROWS, COLUMNS // 2, PIECE)
        park(right, dx, m, c + COLUMNS // 2, rows, K, ROWS, COLUMNS // 2, PIECE)
    else:
        store_tile(dx, K, g, m, c, rows, K, ROWS, COLUMNS, False)


@triton.jit
def finish_piece(g, x, dtotal, dx, mu, r, g_mean, gx_mean, m, c, rows, stride_x, stride_dt, K: tl.constexpr, ROWS: tl.constexpr,
                  COLUMNS: tl.constexpr, LAYER: tl.constexpr, DTOTAL: tl.constexpr):  # fmt: skip
    """Store dx of COLUMNS columns from c."""
    hat = (load_tile(x, stride_x, m, c, rows, K, ROWS, COLUMNS, False).to(tl.float32) - mu[:, None]) * r[:, None]
    out = g.to(tl.float32) - hat * gx_mean[:, None]
    if LAYER:
        out -= g_mean[:, None]
    out *= r[:, None]
    if DTOTAL:
        out += load_tile(dtotal, stride_dt, m, c, rows, K, ROWS, COLUMNS, False).to(tl.float32)
    store_tile(dx, K, out, m, c, rows, K, ROWS, COLUMNS, False)


@triton.jit
def finish(g, x, dtotal, dx, mu, r, g_mean, gx_mean, m, c, rows, stride_x, stride_dt, K: tl.constexpr, ROWS: tl.constexpr,
            COLUMNS: tl.constexpr, PIECE: tl.constexpr, LAYER: tl.constexpr, DTOTAL: tl.constexpr):  # fmt: skip
    """Store dx of COLUMNS columns from c, whose g is in registers."""
    if COLUMNS > PIECE:
        left, right = halves(g, ROWS, COLUMNS)
        finish(left, x, dtotal, dx, mu, r, g_mean, gx_mean, m, c, rows, stride_x, stride_dt, K, ROWS, COLUMNS // 2, PIECE, LAYER, DTOTAL)
        finish(right, x, dtotal, dx, mu, r, g_mean, gx_mean, m, c + COLUMNS // 2, rows, stride_x, stride_dt, K, ROWS, COLUMNS // 2, PIECE,
                LAYER, DTOTAL)  # fmt: skip
    else:
        finish_piece(g, x, dtotal, dx, mu, r, g_mean, gx_mean, m, c, rows, stride_x, stride_dt, K, ROWS, COLUMNS, LAYER, DTOTAL)
