"""The relative bias of a tile of pairs: position table by clamped distance, time table by the bucket of a time difference.

Both are looked up per pair only where they differ inside the tile. A tile further than R from the diagonal has one position value; a tile
whose time differences all fall in one bucket has one time value, and one that spans few buckets takes one select a bucket and pair. Only
what remains is searched: log2(T) steps, each a gather from the edges.

    edges     e0      e1          e2            bucket of |ti - tj| = number of edges <= |ti - tj|
    bucket  0  |   1   |    2      |     3

Positions and times come as columns ``[M, 1]`` and rows ``[1, N]`` of the tile, in either orientation.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Times of rows outside a tile must not widen its range: far apart, yet their differences fit int64.
_FAR = tl.constexpr(1 << 61)
# Below this, differences from the tile's earliest query fit int32.
_SHORT = tl.constexpr(1 << 30)
# Buckets of a tile up to which one select a bucket and pair is cheaper than a search.
_FEW = tl.constexpr(16)


@triton.jit
def load_times(times, row0, start, rows, BLOCK: tl.constexpr):
    """Times of rows start .. start + BLOCK of a sample of ``rows`` rows, and their smallest and largest; zeros without times."""
    i = start + tl.arange(0, BLOCK)
    if times is None:
        return i.to(tl.int64), tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    else:
        live = i < rows
        t = tl.load(times + row0 + i, live, 0).to(tl.int64)
        return t, tl.min(tl.where(live, t, _FAR), 0), tl.max(tl.where(live, t, -_FAR), 0)


@triton.jit
def count_edges(difference, edges, count, STEPS: tl.constexpr):
    """How many of the ascending ``edges [count]`` are <= ``difference`` (int64, or int32 below _SHORT), by bisection; 2**STEPS > count."""
    low = (difference * 0).to(tl.int32)
    for step in tl.static_range(STEPS):
        probe = low + (1 << (STEPS - 1 - step))
        inside = probe <= count
        edge = tl.load(edges + probe - 1, inside, 0)
        if difference.dtype == tl.int32:
            edge = tl.minimum(edge, _SHORT).to(tl.int32)
        low = tl.where(inside & (edge <= difference), probe, low)
    return low


@triton.jit
def bucket_range(q_low, q_high, k_low, k_high, edges, count, STEPS: tl.constexpr):
    """First and last bucket that |tq - tk| can fall into, and its largest value."""
    near = tl.maximum(tl.maximum(q_low - k_high, k_low - q_high), 0)
    far = tl.maximum(tl.maximum(q_high - k_low, k_high - q_low), near)
    return count_edges(near, edges, count, STEPS), count_edges(far, edges, count, STEPS), far


@triton.jit
def position_bias(p, j, nearest, farthest, table, radius):
    """``table[clamp(j - p, -R, R) + R]``; j - p lies within [nearest, farthest]."""
    bias = (p * 0 + j * 0).to(tl.float32)
    if (nearest >= radius) | (farthest <= -radius):
        bias += tl.load(table + tl.where(nearest >= radius, 2 * radius, 0)).to(tl.float32)
    else:
        bias += tl.load(table + tl.minimum(tl.maximum(j - p, -radius), radius) + radius).to(tl.float32)
    return bias


@triton.jit
def time_bias(tq, tk, q_low, q_high, k_low, k_high, table, edges, count, STEPS: tl.constexpr):
    """``table[bucket(|tq - tk|)]`` for times (int64) whose ranges the scalars give."""
    first, last, far = bucket_range(q_low, q_high, k_low, k_high, edges, count, STEPS)
    bias = (tq * 0 + tk * 0).to(tl.float32) + tl.load(table + first).to(tl.float32)
    if last > first:
        if far < _SHORT:
            difference = tl.abs((tq - q_low).to(tl.int32) - (tk - q_low).to(tl.int32))
            if last - first <= _FEW:
                for edge in range(first, last):
                    from_here = tl.minimum(tl.load(edges + edge), _SHORT).to(tl.int32)
                    bias = tl.where(difference >= from_here, tl.load(table + edge + 1).to(tl.float32), bias)
            else:
                bias = tl.load(table + count_edges(difference, edges, count, STEPS)).to(tl.float32)
        else:
            bias = tl.load(table + count_edges(tl.abs(tq - tk), edges, count, STEPS)).to(tl.float32)
    return bias


@triton.jit
def pair_bias(
    p, j, nearest, farthest, tq, tk, q_low, q_high, k_low, k_high, head,
    bias_position, bias_time, time_edges, stride_bp, stride_bt, radius, edges, TIME_STEPS: tl.constexpr,
):  # fmt: skip
    """Position and time bias of a tile of pairs for one head, natural units."""
    bias = (p * 0 + j * 0).to(tl.float32)
    if bias_position is not None:
        bias += position_bias(p, j, nearest, farthest, bias_position + head * stride_bp, radius)
    if bias_time is not None:
        bias += time_bias(tq, tk, q_low, q_high, k_low, k_high, bias_time + head * stride_bt, time_edges, edges, TIME_STEPS)
    return bias


@triton.jit
def own_bias(
    head, tq, own_row, i, candidate, bias_position, bias_time, time_edges, k_times,
    stride_bp, stride_bt, radius, edges, TIME_STEPS: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Bias of a candidate row and its own key: distance 0; the key's time is the row's own under request sharing. ``[M]``."""
    bias = (i * 0).to(tl.float32)
    if bias_position is not None:
        bias += tl.load(bias_position + head * stride_bp + radius).to(tl.float32)
    if bias_time is not None:
        bucket = own_bucket(tq, own_row, i, candidate, time_edges, k_times, edges, TIME_STEPS, SHARED)
        bias += tl.load(bias_time + head * stride_bt + bucket).to(tl.float32)
    return bias


@triton.jit
def own_bucket(tq, own_row, i, candidate, time_edges, k_times, edges, TIME_STEPS: tl.constexpr, SHARED: tl.constexpr):
    """Time bucket of a candidate row and its own key."""
    difference = (i * 0).to(tl.int64)
    if not SHARED:
        difference = tl.abs(tq - tl.load(k_times + own_row + i, candidate, 0).to(tl.int64))
    return count_edges(difference, time_edges, edges, TIME_STEPS)
