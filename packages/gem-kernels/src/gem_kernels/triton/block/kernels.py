"""Triton kernels of block_attention: every row attends to the rows of its own 64- or 128-row block.

One program owns one slot (a block of rows of one sample) and a few key/value heads with all their query heads. A block is one tile, so
there is no loop over keys, no running maximum, and nothing to keep for backward, which recomputes P from q and k:

      rows of the sample            keys: the same rows
    start ┌──────────────┐   q ┌────────┬──┐ rows >= `rows` belong to the next sample: loaded as zeros (never read),
          │   `rows`     │     │ valid  │  │ their score columns are masked, their result rows are not stored
    ......│..............│     ├────────┘  │
          │ not ours     │     │           │
          └──────────────┘     └───────────┘

Slots without a table and without a host sync: sample b owns the slots offsets[b] // BLOCK + b and up. Consecutive samples are
offsets[b + 1] // BLOCK - offsets[b] // BLOCK + 1 >= ceil(length / BLOCK) slots apart, so a search over the offsets themselves finds the
sample of a slot (128 probes at a time, since every step is a trip to the cache), and surplus slots (at most one a sample) are empty. The
rows past offsets[B] are handled as one more sample whose results are zero.

Rotary: pairs (2i, 2i + 1) of q, k and v are turned by the angle of their row in fp32 right after the load; backward turns dq, dk and dv
back in fp32 before their only store.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
PROBES: tl.constexpr = tl.constexpr(128)


@triton.jit
def locate(offsets, slot, batch, total_rows, BLOCK: tl.constexpr):
    """(sample, first row of its slot, rows in the slot, position of the first row in the sample); sample == batch is the slack."""
    low = batch * 0
    high = batch
    probe = tl.arange(0, PROBES) + 1
    while low < high:
        step = (high - low + PROBES - 1) // PROBES
        middle = low + probe * step
        first = tl.load(offsets + middle, mask=middle <= high, other=0).to(tl.int64) // BLOCK + middle
        passed = tl.sum(((middle <= high) & (first <= slot)).to(tl.int32), 0)
        high = tl.minimum(high, low + (passed + 1) * step - 1)
        low += passed * step
    begin = tl.load(offsets + low).to(tl.int64)
    end = tl.load(offsets + low + 1, mask=low < batch, other=0).to(tl.int64)
    end = tl.where(low < batch, end, total_rows)
    position = (slot - (begin // BLOCK + low)) * BLOCK
    return low, begin + position, tl.minimum(end - begin - position, BLOCK), position


@triton.jit
def _load_angles(cos, sin, rotary_rows, start, position, rows, table_rows, D: tl.constexpr, BLOCK: tl.constexpr, DP: tl.constexpr,
                 BY_ROW: tl.constexpr):  # fmt: skip
    """cos and sin [BLOCK, DP / 2] fp32. A row outside the table gives NaN: a wrong table must be loud."""
    i = tl.arange(0, BLOCK)
    half = tl.arange(0, DP // 2)
    if BY_ROW:
        row = tl.load(rotary_rows + start + i, mask=i < rows, other=0).to(tl.int64)
    else:
        row = position + i
    known = (row >= 0) & (row < table_rows)
    at = tl.where(known, row, 0)[:, None] * (D // 2) + half[None, :]
    mask = ((i < rows) & known)[:, None] & (half < D // 2)[None, :]
    lost = tl.where((i < rows) & (known == 0), float("nan"), 0.0)[:, None]
    return tl.load(cos + at, mask=mask, other=0.0).to(tl.float32) + lost, tl.load(sin + at, mask=mask, other=0.0).to(tl.float32) + lost


@triton.jit
def _rotate(x, c, s, ROWS: tl.constexpr, DP: tl.constexpr):
    """Turn the pairs of x [ROWS, DP] fp32 by the angles whose cosine and sine are c and s [ROWS, DP / 2]."""
    a, b = tl.split(tl.reshape(x, [ROWS, DP // 2, 2]))
    return tl.reshape(tl.join(a * c - b * s, a * s + b * c), [ROWS, DP])


@triton.jit
def _load_tile(pointer, rows, stride_row, c, s, BLOCK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROTARY: tl.constexpr):
    """[BLOCK, DP] of one head, zero beyond `rows` and D, rotated if ROTARY."""
    i = tl.arange(0, BLOCK)
    d = tl.arange(0, DP)
    mask = (i < rows)[:, None] & (d < D)[None, :]
    x = tl.load(pointer + (i[:, None] * stride_row + d[None, :]), mask=mask, other=0.0)
    if ROTARY:
        x = _rotate(x.to(tl.float32), c, s, BLOCK, DP).to(x.dtype)
    return x


@triton.jit
def _store_tile(pointer, x, rows, stride_row, BLOCK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    i = tl.arange(0, BLOCK)
    d = tl.arange(0, DP)
    mask = (i < rows)[:, None] & (d < D)[None, :]
    tl.store(pointer + (i[:, None] * stride_row + d[None, :]), x.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _store_grad(pointer, x, rows, stride_row, c, s, BLOCK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROTARY: tl.constexpr):
    """Store a gradient tile, turned back if ROTARY."""
    if ROTARY:
        x = _rotate(x, c, -s, BLOCK, DP)
    _store_tile(pointer, x, rows, stride_row, BLOCK, D, DP)


@triton.jit
def _probabilities(q, k, rows, scale, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """exp(scores - maximum) with masked columns 0, and one over its row sum: P = e * r."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2_E)
    scores = tl.where((tl.arange(0, BLOCK) < rows)[None, :], scores, float("-inf"))
    e = tl.exp2(scores - tl.max(scores, 1)[:, None])
    return e, 1.0 / tl.sum(e, 1)


@triton.jit(do_not_specialize=["batch", "total_rows", "table_rows"])
def block_fwd_kernel(
    q, k, v, out, offsets, cos, sin, rotary_rows,
    batch, total_rows, table_rows, scale,
    stride_qn: tl.constexpr, stride_qh: tl.constexpr, stride_kn: tl.constexpr, stride_kh: tl.constexpr,
    stride_vn: tl.constexpr, stride_vh: tl.constexpr, stride_on: tl.constexpr, stride_oh: tl.constexpr,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr,
    DVP: tl.constexpr, BLOCK: tl.constexpr,
    ROTARY: tl.constexpr, BY_ROW: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out of HEADS key/value heads (GROUP query heads each) of one slot."""
    pid = tl.program_id(0).to(tl.int64)
    GROUPS: tl.constexpr = KV_HEADS // HEADS
    slot = pid // GROUPS
    first_head = pid % GROUPS * HEADS
    sample, start, rows, position = locate(offsets, slot, batch, total_rows, BLOCK)
    if rows > 0:
        if sample == batch:
            zero = tl.zeros([BLOCK, DVP], tl.float32)
            for h in range(HEADS * GROUP):
                _store_tile(out + start * stride_on + (first_head * GROUP + h) * stride_oh, zero, rows, stride_on, BLOCK, DV, DVP)
        else:
            c = 0.0
            s = 0.0
            if ROTARY:
                c, s = _load_angles(cos, sin, rotary_rows, start, position, rows, table_rows, D, BLOCK, DP, BY_ROW)
            for i in tl.range(HEADS, num_stages=STAGES):
                hk = first_head + i
                k_tile = _load_tile(k + start * stride_kn + hk * stride_kh, rows, stride_kn, c, s, BLOCK, D, DP, ROTARY)
                v_tile = _load_tile(v + start * stride_vn + hk * stride_vh, rows, stride_vn, c, s, BLOCK, DV, DVP, ROTARY)
                for g in tl.range(GROUP, num_stages=STAGES):
                    h = hk * GROUP + g
                    q_tile = _load_tile(q + start * stride_qn + h * stride_qh, rows, stride_qn, c, s, BLOCK, D, DP, ROTARY)
                    e, r = _probabilities(q_tile, k_tile, rows, scale, BLOCK, PRECISION)
                    o = tl.dot(e.to(v_tile.dtype), v_tile, input_precision=PRECISION) * r[:, None]
                    _store_tile(out + start * stride_on + h * stride_oh, o, rows, stride_on, BLOCK, DV, DVP)


@triton.jit(do_not_specialize=["batch", "total_rows", "table_rows"])
def block_bwd_kernel(
    q, k, v, do, dq, dk, dv, offsets, cos, sin, rotary_rows,
    batch, total_rows, table_rows, scale,
    stride_qn: tl.constexpr, stride_qh: tl.constexpr, stride_kn: tl.constexpr, stride_kh: tl.constexpr,
    stride_vn: tl.constexpr, stride_vh: tl.constexpr, stride_don: tl.constexpr, stride_doh: tl.constexpr,
    stride_dqn: tl.constexpr, stride_dkn: tl.constexpr, stride_dvn: tl.constexpr,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr,
    DVP: tl.constexpr, BLOCK: tl.constexpr,
    ROTARY: tl.constexpr, BY_ROW: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq, dk and dv (the heads of a row side by side) of HEADS key/value heads of one slot.

    The row term of dS is rowsum(P * dP), so out is not needed.
    """
    pid = tl.program_id(0).to(tl.int64)
    GROUPS: tl.constexpr = KV_HEADS // HEADS
    slot = pid // GROUPS
    first_head = pid % GROUPS * HEADS
    sample, start, rows, position = locate(offsets, slot, batch, total_rows, BLOCK)
    if rows > 0:
        if sample == batch:
            zero = tl.zeros([BLOCK, DP], tl.float32)
            zero_v = tl.zeros([BLOCK, DVP], tl.float32)
            for i in range(HEADS):
                hk = first_head + i
                for g in range(GROUP):
                    _store_tile(dq + start * stride_dqn + (hk * GROUP + g) * D, zero, rows, stride_dqn, BLOCK, D, DP)
                _store_tile(dk + start * stride_dkn + hk * D, zero, rows, stride_dkn, BLOCK, D, DP)
                _store_tile(dv + start * stride_dvn + hk * DV, zero_v, rows, stride_dvn, BLOCK, DV, DVP)
        else:
            c = 0.0
            s = 0.0
            if ROTARY:
                c, s = _load_angles(cos, sin, rotary_rows, start, position, rows, table_rows, D, BLOCK, DP, BY_ROW)
            for i in tl.range(HEADS, num_stages=STAGES):
                hk = first_head + i
                k_tile = _load_tile(k + start * stride_kn + hk * stride_kh, rows, stride_kn, c, s, BLOCK, D, DP, ROTARY)
                v_tile = _load_tile(v + start * stride_vn + hk * stride_vh, rows, stride_vn, c, s, BLOCK, DV, DVP, ROTARY)
                dk_tile = tl.zeros([BLOCK, DP], tl.float32)
                dv_tile = tl.zeros([BLOCK, DVP], tl.float32)
                for g in tl.range(GROUP, num_stages=STAGES):
                    h = hk * GROUP + g
                    q_tile = _load_tile(q + start * stride_qn + h * stride_qh, rows, stride_qn, c, s, BLOCK, D, DP, ROTARY)
                    do_tile = _load_tile(do + start * stride_don + h * stride_doh, rows, stride_don, c, s, BLOCK, DV, DVP, False)
                    e, r = _probabilities(q_tile, k_tile, rows, scale, BLOCK, PRECISION)
                    p = e * r[:, None]
                    dv_tile = tl.dot(tl.trans(p.to(do_tile.dtype)), do_tile, dv_tile, input_precision=PRECISION)
                    if GROUP == 1:  # stored at once: its registers are needed for dk
                        _store_grad(dv + start * stride_dvn + hk * DV, dv_tile, rows, stride_dvn, c, s, BLOCK, DV, DVP, ROTARY)
                    dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
                    ds = (p * (dp - tl.sum(p * dp, 1)[:, None])).to(k_tile.dtype)
                    dk_tile = tl.dot(tl.trans(ds), q_tile, dk_tile, input_precision=PRECISION)
                    if GROUP == 1:
                        _store_grad(dk + start * stride_dkn + hk * D, dk_tile * scale, rows, stride_dkn, c, s, BLOCK, D, DP, ROTARY)
                    dq_tile = tl.dot(ds, k_tile, input_precision=PRECISION) * scale
                    _store_grad(dq + start * stride_dqn + h * D, dq_tile, rows, stride_dqn, c, s, BLOCK, D, DP, ROTARY)
                if GROUP > 1:
                    _store_grad(dv + start * stride_dvn + hk * DV, dv_tile, rows, stride_dvn, c, s, BLOCK, DV, DVP, ROTARY)
                    _store_grad(dk + start * stride_dkn + hk * D, dk_tile * scale, rows, stride_dkn, c, s, BLOCK, D, DP, ROTARY)
