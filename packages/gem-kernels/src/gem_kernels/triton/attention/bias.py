"""The relative bias of a tile of pairs: position table by clamped distance, time table by the bucket of a time difference.

Both are looked up per pair only where they differ inside the tile. A tile further than R from the diagonal has one position value; a tile
whose time differences all fall in one bucket has one time value, and one that spans up to three buckets takes two selects a pair. Only what
remains is searched: log2(T) steps, each a gather from the edges.

    edges     e0      e1          e2            bucket of |ti - tj| = number of edges <= |ti - tj|
    bucket  0  |   1   |    2      |     3
"""

from __future__ import annotations

import triton
import triton.language as tl

# Times of rows outside a tile must not widen its range: far apart, yet their differences fit int64.
_FAR = tl.constexpr(1 << 61)


@triton.jit
def position_bias(p, j, p_min, p_max, j_min, j_max, table, radius):
    """``table[clamp(j - p, -R, R) + R]`` for positions ``p [M, 1]``, ``j [1, N]`` whose ranges the scalars give."""
    if (j_min - p_max >= radius) | (j_max - p_min <= -radius):
        at = tl.where(j_min - p_max >= radius, 2 * radius, 0)
        bias = tl.zeros([p.shape[0], j.shape[1]], tl.float32) + tl.load(table + at).to(tl.float32)
    else:
        distance = tl.minimum(tl.maximum(j - p, -radius), radius) + radius
        bias = tl.load(table + distance).to(tl.float32)
    return bias


@triton.jit
def count_edges(difference, edges, count, STEPS: tl.constexpr):
    """How many of the ascending ``edges [count]`` are <= ``difference`` (any shape, int64), by bisection; 2**STEPS > count."""
    low = tl.zeros(difference.shape, tl.int32)
    for step in tl.static_range(STEPS):
        half = 1 << (STEPS - 1 - step)
        probe = low + half
        inside = probe <= count
        edge = tl.load(edges + probe - 1, inside, 0)
        low = tl.where(inside & (edge <= difference), probe, low)
    return low


@triton.jit
def time_range(times, live):
    """Smallest and largest of a vector of times, rows that are not live apart."""
    return tl.min(tl.where(live, times, _FAR), 0), tl.max(tl.where(live, times, -_FAR), 0)


@triton.jit
def bucket_range(q_low, q_high, k_low, k_high, edges, count, STEPS: tl.constexpr):
    """First and last bucket that |tq - tk| can fall into."""
    near = tl.maximum(tl.maximum(q_low - k_high, k_low - q_high), 0)
    far = tl.maximum(tl.maximum(q_high - k_low, k_high - q_low), near)
    return count_edges(near, edges, count, STEPS), count_edges(far, edges, count, STEPS)


@triton.jit
def time_bias(tq, tk, q_low, q_high, k_low, k_high, table, edges, count, STEPS: tl.constexpr):
    """``table[bucket(|tq - tk|)]`` for times ``tq [M, 1]``, ``tk [1, N]`` (int64) whose ranges the scalars give."""
    first, last = bucket_range(q_low, q_high, k_low, k_high, edges, count, STEPS)
    value = tl.load(table + first).to(tl.float32)
    bias = tl.zeros([tq.shape[0], tk.shape[1]], tl.float32) + value
    if last > first:
        difference = tl.abs(tq - tk)
        if last <= first + 2:
            bias = tl.where(difference >= tl.load(edges + first), tl.load(table + first + 1).to(tl.float32), bias)
            second = tl.minimum(first + 1, last - 1)
            bias = tl.where(difference >= tl.load(edges + second), tl.load(table + second + 1).to(tl.float32), bias)
        else:
            bias = tl.load(table + count_edges(difference, edges, count, STEPS)).to(tl.float32)
    return bias


@triton.jit
def pair_bias(
    p, j, p_min, p_max, j_min, j_max, tq, tq_low, tq_high, k_times, key_row, h,
    bias_position, bias_time, time_edges, radius, edges, TIME_STEPS: tl.constexpr,
):  # fmt: skip
    """Sum of the position and time bias of a tile of pairs, natural units. ``p [M]``, ``tq [M]``, ``j [N]``."""
    bias = tl.zeros([p.shape[0], j.shape[0]], tl.float32)
    if bias_position is not None:
        bias += position_bias(p[:, None], j[None, :], p_min, p_max, j_min, j_max, bias_position, radius)
    if bias_time is not None:
        tk = tl.load(k_times + key_row + j, j < h, 0).to(tl.int64)
        tk_low, tk_high = time_range(tk, j < h)
        bias += time_bias(tq[:, None], tk[None, :], tq_low, tq_high, tk_low, tk_high, bias_time, time_edges, edges, TIME_STEPS)
    return bias


@triton.jit
def own_bias(
    head, tq, own_row, i, candidate, bias_position, bias_time, time_edges, k_times,
    stride_bp, stride_bt, radius, edges, TIME_STEPS: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Bias of a candidate row and its own key: distance 0; the key's time is the row's own under request sharing. ``[M]``."""
    bias = tl.zeros(i.shape, tl.float32)
    if bias_position is not None:
        bias += tl.load(bias_position + head * stride_bp + radius).to(tl.float32)
    if bias_time is not None:
        bucket = own_bucket(tq, own_row, i, candidate, time_edges, k_times, edges, TIME_STEPS, SHARED)
        bias += tl.load(bias_time + head * stride_bt + bucket).to(tl.float32)
    return bias


@triton.jit
def own_bucket(tq, own_row, i, candidate, time_edges, k_times, edges, TIME_STEPS: tl.constexpr, SHARED: tl.constexpr):
    """Time bucket of a candidate row and its own key."""
    difference = tl.zeros(i.shape, tl.int64)
    if not SHARED:
        difference = tl.abs(tq - tl.load(k_times + own_row + i, candidate, 0).to(tl.int64))
    return count_edges(difference, time_edges, edges, TIME_STEPS)
