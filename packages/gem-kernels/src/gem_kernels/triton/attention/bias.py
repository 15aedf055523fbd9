"""The relative bias of a tile of pairs: position table by clamped distance, time table by the bucket of a time difference.

Both are looked up per pair only where they differ inside the tile. A tile further than R from the diagonal has one position value; a tile
whose time differences all fall in one bucket has one time value, and one that spans few buckets takes one select a bucket and pair. In
what remains a pair's bucket is found by its cell (`bias_tables`). Tiles with times more than FAR from the sample's first, or with
crowded edges, take a select for each edge.

    edges     e0      e1          e2            bucket of |ti - tj| = number of edges <= |ti - tj|
    bucket  0  |   1   |    2      |     3

Positions, indices and times come as columns ``[M, 1]`` and rows ``[1, N]`` of the tile, in either orientation. With LOADS (NVIDIA) a
pair is looked up in the layout that the tile has; `tl.load` would move the tile to a layout for coalesced loads and back.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gem_kernels.triton.attention.bias_tables import CELLS, FAR, FIRST_CELL, cell_of

# Buckets of a tile up to which one select a bucket and pair is cheaper than two look-ups.
_FEW = tl.constexpr(4)


@triton.jit
def load_times(times, row0, start, rows, BLOCK: tl.constexpr):
    """Relative times of rows start .. start + BLOCK of a sample of ``rows`` rows, and their smallest and largest; zeros without times."""
    i = start + tl.arange(0, BLOCK)
    if times is None:
        return i, tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    else:
        live = i < rows
        t = tl.load(times + row0 + i, live, 0)
        return t, tl.min(tl.where(live, t, FAR), 0), tl.max(tl.where(live, t, -FAR), 0)


@triton.jit
def count_edges(difference, edges, count, STEPS: tl.constexpr):
    """How many of the ascending ``edges [count]`` are <= ``difference``, by bisection; 2**STEPS > count."""
    low = (difference * 0).to(tl.int32)
    for step in tl.static_range(STEPS):
        probe = low + (1 << (STEPS - 1 - step))
        inside = probe <= count
        edge = tl.load(edges + probe - 1, inside, 0)
        low = tl.where(inside & (edge <= difference), probe, low)
    return low


@triton.jit
def _plus_entry(s, table, column, row, LOADS: tl.constexpr):
    """``s + table[column - row]``."""
    if LOADS:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 d;
            .reg .b64 a;
            .reg .f32 v;
            sub.s32 d, $3, $4;
            mad.wide.s32 a, d, 4, $2;
            ld.global.nc.f32 v, [a];
            add.f32 $0, $1, v;
            }
            """,
            "=f,f,l,r,r", [s, table.to(tl.int64), column, row], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return s + tl.load(table + column - row)


@triton.jit
def _plus_cell(s, tq, tk, cell_edges, cell_values, LOADS: tl.constexpr):
    """``s`` and the value of each pair's cell; see `bias_tables`."""
    if LOADS:
        # Offsets of 4 bytes a cell, from where cell 0 would begin if its number were the bits of the float.
        first: tl.constexpr = FIRST_CELL
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 d, c, e;
            .reg .b64 a, o;
            .reg .f32 f, v;
            .reg .pred p;
            sub.s32 d, $2, $3;
            abs.s32 d, d;
            cvt.rn.f32.s32 f, d;
            max.f32 f, f, 0f3F000000;
            mov.b32 c, f;
            shr.u32 c, c, 17;
            and.b32 c, c, 0xFFFFFFFC;
            cvt.u64.u32 o, c;
            add.s64 a, o, $4;
            ld.global.nc.b32 e, [a];
            setp.ge.s32 p, d, e;
            @p add.s32 c, c, 4;
            cvt.u64.u32 o, c;
            add.s64 a, o, $5;
            ld.global.nc.f32 v, [a];
            add.f32 $0, $1, v;
            }
            """,
            "=f,f,r,r,l,l",
            [s, tq, tk, (cell_edges - first).to(tl.int64), (cell_values - first).to(tl.int64)],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        difference = tl.abs(tq - tk)
        cell = cell_of(difference)
        cell += tl.where(difference >= tl.load(cell_edges + cell), 1, 0)
        return s + tl.load(cell_values + cell)


@triton.jit
def bucket_range(q_low, q_high, k_low, k_high, index, count, STEPS: tl.constexpr):
    """First and last bucket that |tq - tk| can fall into, for relative times that are not cut off."""
    near = tl.maximum(tl.maximum(q_low - k_high, k_low - q_high), 0)
    far = tl.maximum(tl.maximum(q_high - k_low, k_high - q_low), near)
    return count_edges(near, index, count, STEPS), count_edges(far, index, count, STEPS)


@triton.jit
def uncut(q_low, q_high, k_low, k_high):
    """Whether all relative times of a tile are what they say."""
    return (tl.minimum(q_low, k_low) > -FAR) & (tl.maximum(q_high, k_high) < FAR)


@triton.jit
def add_position(s, p, j, nearest, farthest, table, radius, LOADS: tl.constexpr):
    """``s + table[clamp(j - p, -R, R) + R]``; of the pairs that count, j - p lies within [nearest, farthest]."""
    if (nearest >= radius) | (farthest <= -radius):
        s += tl.load(table + tl.where(nearest >= radius, 2 * radius, 0))
    else:
        s = _plus_entry(s, table + radius, j, p, LOADS)
    return s


@triton.jit
def add_buckets(s, tq, tk, first, last, table, index, count, LOADS: tl.constexpr):
    """``s + table[bucket(|tq - tk|)]`` of relative times that are not cut off, where all buckets lie in first .. last."""
    if first == last:
        s += tl.load(table + first)
    elif (last - first <= _FEW) | (tl.load(index + count + CELLS) != 0):
        s += tl.load(table + first)
        difference = tl.abs(tq - tk)
        for edge in range(first, last):
            more = tl.load(table + edge + 1) - tl.load(table + edge)
            s = tl.where(difference >= tl.load(index + edge), s + more, s)
    else:
        s = _plus_cell(s, tq, tk, index + count, table + count + 1, LOADS)
    return s


@triton.jit
def add_far(s, i, j, lq, h, q_row, k_row, table, time_edges, q_times, k_times, count):
    """``s + table[bucket(|ti - tj|)]`` in 64 bits. Sums of a time and an edge are few; differences would be twice as many registers."""
    ti = tl.load(q_times + q_row + i, i < lq, 0).to(tl.int64)
    tj = tl.load(k_times + k_row + j, j < h, 0).to(tl.int64)
    s += tl.load(table)
    for edge in range(0, count):
        more = tl.load(table + edge + 1) - tl.load(table + edge)
        from_here = tl.maximum(tl.load(time_edges + edge), 0)
        s = tl.where((tj <= ti - from_here) | (tj >= ti + from_here), s + more, s)
    return s


@triton.jit
def add_time(
    s, i, j, tq, tk, q_low, q_high, k_low, k_high, lq, h, q_row, k_row, table, index, time_edges, q_times, k_times, count,
    STEPS: tl.constexpr, LOADS: tl.constexpr,
):  # fmt: skip
    """``s + table[bucket(|tq - tk|)]``; the scalars are the ranges of the relative times tq and tk."""
    if uncut(q_low, q_high, k_low, k_high):
        first, last = bucket_range(q_low, q_high, k_low, k_high, index, count, STEPS)
        s = add_buckets(s, tq, tk, first, last, table, index, count, LOADS)
    else:
        s = add_far(s, i, j, lq, h, q_row, k_row, table, time_edges, q_times, k_times, count)
    return s


@triton.jit
def add_bias(
    s, p, i, j, nearest, farthest, tq, tk, q_low, q_high, k_low, k_high, lq, h, q_row, k_row, head,
    bias_position, bias_time, time_index, time_edges, q_times, k_times, stride_bp, stride_bt, radius, edges,
    TIME_STEPS: tl.constexpr, LOADS: tl.constexpr,
):  # fmt: skip
    """``s`` of a tile of pairs with the position and the time bias of one head, natural units."""
    if bias_position is not None:
        s = add_position(s, p, j, nearest, farthest, bias_position + head.to(tl.int64) * stride_bp, radius, LOADS)
    if bias_time is not None:
        s = add_time(
            s, i, j, tq, tk, q_low, q_high, k_low, k_high, lq, h, q_row, k_row, bias_time + head.to(tl.int64) * stride_bt,
            time_index, time_edges, q_times, k_times, edges, TIME_STEPS, LOADS,
        )  # fmt: skip
    return s


@triton.jit
def own_bias(
    head, own_row, q_row, i, candidate, bias_position, bias_time, time_edges, q_times, k_times,
    stride_bp, stride_bt, radius, edges, TIME_STEPS: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Bias of a candidate row and its own key: distance 0; the key's time is the row's own under request sharing. ``[M]``."""
    bias = (i * 0).to(tl.float32)
    if bias_position is not None:
        bias += tl.load(bias_position + head.to(tl.int64) * stride_bp + radius)
    if bias_time is not None:
        bucket = own_bucket(own_row, q_row, i, candidate, time_edges, q_times, k_times, edges, TIME_STEPS, SHARED)
        bias += tl.load(bias_time + head.to(tl.int64) * stride_bt + bucket)
    return bias


@triton.jit
def own_bucket(own_row, q_row, i, candidate, time_edges, q_times, k_times, edges, TIME_STEPS: tl.constexpr, SHARED: tl.constexpr):
    """Time bucket of a candidate row and its own key."""
    difference = (i * 0).to(tl.int64)
    if not SHARED:
        own = tl.load(k_times + own_row + i, candidate, 0).to(tl.int64)
        difference = tl.abs(tl.load(q_times + q_row + i, candidate, 0).to(tl.int64) - own)
    return count_edges(difference, time_edges, edges, TIME_STEPS)
