"""Where a sample's rows are, which keys a query row sees, and which tiles that leaves to visit.

A sample has Lq query rows and h history keys; the last t query rows are candidates. Query row i has position p = min(i + shift, h), with
shift = h + t - Lq: history rows keep i + (Lk - Lq), every candidate has h. Over history keys j in [0, h)::

            j = 0     c           p-l        p       p+r        h
    row i     |context|............|#########|########|..........|  own key (candidates)
              seen by all           window, cut at p when causal

A candidate's own key is no column of this picture: its score is a dot product of two rows and is handled apart, element by element.

Row side (K tiles walk over Q): rows that see a K tile [n0, n1) form up to three runs: context rows, the band, the candidates::

    rows   0 .. context | ........ | n0-r .. n1-1+l (positions) | ........ | Lq-t .. Lq

A walk is numbered 0 .. blocks-1 over the blocks of its runs, skipping what lies between, so that one pipelined loop serves all masks.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sample_geometry(
    sample, q_offsets, k_offsets, num_targets, context_len, kv_index, q_len,
):  # fmt: skip
    """Of one sample: first q row, first output row, Lq, first k row, h, t, c.

    Rows are int64, lengths int32. Without q_offsets (broadcast) every sample has the q_len rows of q.
    """
    if q_offsets is None:
        q_row = tl.zeros([], tl.int64)
        out_row = sample.to(tl.int64) * q_len
        lq = tl.zeros([], tl.int32) + q_len
    else:
        q_row = tl.load(q_offsets + sample).to(tl.int64)
        out_row = q_row
        lq = (tl.load(q_offsets + sample + 1).to(tl.int64) - q_row).to(tl.int32)
    keys = sample
    if kv_index is not None:
        keys = tl.load(kv_index + sample).to(tl.int32)
    k_row = tl.load(k_offsets + keys).to(tl.int64)
    h = (tl.load(k_offsets + keys + 1).to(tl.int64) - k_row).to(tl.int32)
    t = tl.zeros([], tl.int32)
    if num_targets is not None:
        t = tl.load(num_targets + sample).to(tl.int32)
        if kv_index is None:
            h -= t
    c = tl.zeros([], tl.int32)
    if context_len is not None:
        c = tl.load(context_len + sample).to(tl.int32)
    return q_row, out_row, lq, k_row, h, t, c


@triton.jit
def visible(p, j, c, left, right, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CONTEXT: tl.constexpr):
    """Which pairs of positions (broadcast against each other) see each other, bounds of the sample apart."""
    seen = j == j
    if CAUSAL:
        seen = j <= p
    if WINDOW:
        near = (j >= p - left) & (j <= p + right)
        seen = (seen & near) if CAUSAL else near
    if CONTEXT:
        seen = seen | (j < c) | (p < c)
    return seen


@triton.jit
def key_walk(
    m0, m1, shift, h, c, left, right,
    BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CONTEXT: tl.constexpr,
):  # fmt: skip
    """K blocks for query rows [m0, m1): (blocks, blocks of the context run, first band block, all-visible range [free0, free1) of keys)."""
    p0 = tl.minimum(m0 + shift, h)
    p1 = tl.minimum(m1 - 1 + shift, h)
    lo = tl.zeros([], tl.int32)
    hi = h
    free0 = lo
    free1 = h
    if CAUSAL:
        hi = tl.minimum(hi, p1 + 1)
        free1 = tl.minimum(free1, p0 + 1)
    if WINDOW:
        lo = tl.maximum(lo, p0 - left)
        hi = tl.minimum(hi, p1 + right + 1)
        free0 = tl.maximum(free0, p1 - left)
        free1 = tl.minimum(free1, p0 + right + 1)
    head = tl.zeros([], tl.int32)
    if CONTEXT:
        if p0 < c:
            lo = tl.zeros([], tl.int32)
            hi = h
        head = (tl.minimum(c, h) + BLOCK_N - 1) // BLOCK_N
    first = tl.maximum(lo // BLOCK_N, head)
    last = tl.maximum((tl.maximum(hi, 0) + BLOCK_N - 1) // BLOCK_N, first)
    return head + last - first, head, first, free0, free1


@triton.jit
def query_walk(
    n0, n1, shift, lq, t, h, c, left, right,
    BLOCK_M: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CONTEXT: tl.constexpr, TARGETS: tl.constexpr,
):  # fmt: skip
    """Q blocks that see keys [n0, n1): (blocks, blocks of the context run, first band block, band end, first candidate block)."""
    history = lq - t
    lo = tl.zeros([], tl.int32)
    hi = history
    if CAUSAL:
        lo = tl.maximum(lo, n0 - shift)
    if WINDOW:
        lo = tl.maximum(lo, n0 - right - shift)
        hi = tl.minimum(hi, n1 + left - shift)
    head = tl.zeros([], tl.int32)
    if CONTEXT:
        if n0 < c:
            lo = tl.zeros([], tl.int32)
            hi = history
        head = (tl.minimum(tl.maximum(c - shift, 0), history) + BLOCK_M - 1) // BLOCK_M
    end = (lq + BLOCK_M - 1) // BLOCK_M
    first = tl.minimum(tl.maximum(lo // BLOCK_M, head), end)
    last = tl.maximum((tl.maximum(hi, 0) + BLOCK_M - 1) // BLOCK_M, first)
    tail = end
    if TARGETS:
        sees = t > 0
        if WINDOW:
            sees = sees & ((h - left <= n1 - 1) | (n0 < c))
        tail = tl.where(sees, tl.maximum(history // BLOCK_M, last), end)
    return head + (last - first) + (end - tail), head, first, last, tail


@triton.jit
def key_block(x, head, first, CONTEXT: tl.constexpr):
    """Block number of step x of `key_walk`."""
    if CONTEXT:
        return tl.where(x < head, x, first + x - head)
    else:
        return first + x


@triton.jit
def query_block(x, head, first, last, tail, CONTEXT: tl.constexpr, TARGETS: tl.constexpr):
    """Block number of step x of `query_walk`."""
    block = first + x
    if CONTEXT:
        block = tl.where(x < head, x, block - head)
    if TARGETS:
        beyond = x - head - (last - first)
        block = tl.where(beyond >= 0, tail + beyond, block)
    return block
