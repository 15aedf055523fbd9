"""What is computed row by row, before the tiles: memory-bound, a small part of the work.

- A candidate's own pair (i, i) belongs to no tile of history keys. Forward: its score ``own [H, rows]``, scaled and biased. Backward: its
  dS in ``ds_own [H, rows]``, and the gradients of the own key and value, dk = dS q and dv = P dO, summed over the heads of a group.
- delta = rowsum(O ∘ dO), for backward schemes whose query side does not compute it on the way.

Candidates are the last rows of a sample. PARTS programs for every sample and head take blocks of these rows in turn.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gem_kernels.triton.attention.activations import activate_with_slope
from gem_kernels.triton.attention.bias import own_bias
from gem_kernels.triton.attention.masks import sample_geometry
from gem_kernels.triton.attention.tiles import load_own, load_rows, zero_slack

LOG2E = tl.constexpr(1.4426950408889634)
OWN_ROWS = 16
"""Candidates that are worked on at a time; more of them take so many registers that few programs share an SM."""
OWN_PARTS = 4


@triton.jit(do_not_specialize=["rows"])
def attention_delta_kernel(
    out, dout, delta,
    stride_on, stride_oh, stride_don, stride_doh, rows: tl.int64, delta_scale,
    H: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """``delta [H, rows]``; slack rows get whatever they hold, nobody reads them."""
    head = tl.program_id(0) % H
    start = (tl.program_id(0) // H).to(tl.int64) * BLOCK_M
    r = start + tl.arange(0, BLOCK_M)
    c = tl.arange(0, DV_PAD)
    mask = (r < rows)[:, None] & (c < DV)[None, :]
    o = tl.load(out + head.to(tl.int64) * stride_oh + r[:, None] * stride_on + c[None, :], mask, 0.0)
    do = tl.load(dout + head.to(tl.int64) * stride_doh + r[:, None] * stride_don + c[None, :], mask, 0.0)
    tl.store(delta + head * rows + r, tl.sum(o.to(tl.float32) * do.to(tl.float32), 1) * delta_scale, r < rows)


@triton.jit(do_not_specialize=["rows", "radius", "edges"])
def attention_fwd_own_kernel(
    q, own, q_offsets, k_offsets, num_targets, target_k, kv_index,
    bias_position, bias_time, time_edges, q_times, k_times,
    stride_qn, stride_qh, stride_tkn, stride_tkh, stride_bp, stride_bt,
    rows: tl.int64, radius, edges, scale,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, TIME_STEPS: tl.constexpr, BLOCK_M: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0) % PARTS
    head = tl.program_id(0) // PARTS % H
    sample = tl.program_id(0) // (PARTS * H)
    q_row, out_row, lq, k_row, h, t, _c = sample_geometry(sample, q_offsets, k_offsets, num_targets, None, kv_index, 0)
    own_row = q_row if kv_index is not None else k_row + h - (lq - t)
    for m0 in range(lq - t + part * BLOCK_M, lq, PARTS * BLOCK_M):
        i = m0 + tl.arange(0, BLOCK_M)
        candidate = i < lq
        q_tile = load_rows(q, q_row, m0, lq, head, stride_qn, stride_qh, BLOCK_M, D, D_PAD, False).to(tl.float32)
        k_own = load_own(target_k, own_row, i, candidate, head // GROUP, stride_tkn, stride_tkh, D, D_PAD).to(tl.float32)
        score = tl.sum(q_tile * k_own, 1) * scale
        score += own_bias(
            head, own_row, q_row, i, candidate, bias_position, bias_time, time_edges, q_times, k_times,
            stride_bp, stride_bt, radius, edges, TIME_STEPS, kv_index is not None,
        )  # fmt: skip
        tl.store(own + head.to(tl.int64) * rows + out_row + i, score, candidate)


@triton.jit(do_not_specialize=["batch", "rows", "radius", "edges"])
def attention_bwd_own_kernel(
    q, out, dout, lse, ds_own, dk, dv,
    q_offsets, k_offsets, num_targets, target_k, target_v, kv_index,
    bias_position, bias_time, time_edges, q_times, k_times, act_ids,
    stride_qn, stride_qh, stride_on, stride_oh, stride_don, stride_doh, stride_dkn, stride_dkh, stride_dvn, stride_dvh,
    stride_tkn, stride_tkh, stride_tvn, stride_tvh, stride_bp, stride_bt,
    batch, rows: tl.int64, radius, edges, scale, ds_scale, dv_scale, delta_scale,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    SOFTMAX: tl.constexpr, ACT: tl.constexpr, ACT_SET: tl.constexpr, FAST: tl.constexpr, TIME_STEPS: tl.constexpr,
    BLOCK_M: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """dk, dv (None: not wanted) are the gradients of the rows that hold the candidates: those of target_k, target_v under request sharing,
    where every other row becomes zero, and otherwise the last rows of each sample of k, v."""
    HKV: tl.constexpr = H // GROUP
    SHARED: tl.constexpr = kv_index is not None
    if SHARED and dk is not None:
        zero_slack(dk, q_offsets, batch, rows, stride_dkn, stride_dkh, HKV, D, D_PAD)
        zero_slack(dv, q_offsets, batch, rows, stride_dvn, stride_dvh, HKV, DV, DV_PAD)
    part = tl.program_id(0) % PARTS
    kv_head = tl.program_id(0) // PARTS % HKV
    sample = tl.program_id(0) // (PARTS * HKV)
    q_row, out_row, lq, k_row, h, t, _c = sample_geometry(sample, q_offsets, k_offsets, num_targets, None, kv_index, 0)
    own_row = q_row if SHARED else k_row + h - (lq - t)
    first = 0 if SHARED else lq - t
    for m0 in range(first + part * BLOCK_M, lq, PARTS * BLOCK_M):
        i = m0 + tl.arange(0, BLOCK_M)
        candidate = (i >= lq - t) & (i < lq)
        dk_acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
        dv_acc = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
        if m0 + BLOCK_M > lq - t:
            k_own = load_own(target_k, own_row, i, candidate, kv_head, stride_tkn, stride_tkh, D, D_PAD).to(tl.float32)
            v_own = load_own(target_v, own_row, i, candidate, kv_head, stride_tvn, stride_tvh, DV, DV_PAD).to(tl.float32)
            for g in range(GROUP):
                head = kv_head * GROUP + g
                q_tile = load_rows(q, q_row, m0, lq, head, stride_qn, stride_qh, BLOCK_M, D, D_PAD, False).to(tl.float32)
                do_tile = load_rows(dout, out_row, m0, lq, head, stride_don, stride_doh, BLOCK_M, DV, DV_PAD, False).to(tl.float32)
                score = tl.sum(q_tile * k_own, 1) * scale
                score += own_bias(
                    head, own_row, q_row, i, candidate, bias_position, bias_time, time_edges, q_times, k_times,
                    stride_bp, stride_bt, radius, edges, TIME_STEPS, SHARED,
                )  # fmt: skip
                dp = tl.sum(do_tile * v_own, 1)
                at = head.to(tl.int64) * rows + out_row + i
                if SOFTMAX:
                    o_tile = load_rows(out, out_row, m0, lq, head, stride_on, stride_oh, BLOCK_M, DV, DV_PAD, False).to(tl.float32)
                    prob = tl.exp2((score - tl.load(lse + at, candidate, 0.0)) * LOG2E)
                    slope = prob
                    dp -= tl.sum(o_tile * do_tile, 1) * delta_scale
                else:
                    act_id = 0
                    if act_ids is not None:
                        act_id = tl.load(act_ids + head)
                    prob, slope = activate_with_slope(score, act_id, ACT, ACT_SET, FAST)
                ds = tl.where(candidate, slope * dp, 0.0)
                tl.store(ds_own + at, ds, candidate)
                dk_acc += ds[:, None] * q_tile
                dv_acc += tl.where(candidate, prob, 0.0)[:, None] * do_tile
        if dk is not None:
            cd = tl.arange(0, D_PAD)
            cv = tl.arange(0, DV_PAD)
            to_k = dk + kv_head.to(tl.int64) * stride_dkh + (own_row + i)[:, None] * stride_dkn + cd[None, :]
            to_v = dv + kv_head.to(tl.int64) * stride_dvh + (own_row + i)[:, None] * stride_dvn + cv[None, :]
            tl.store(to_k, (dk_acc * ds_scale).to(dk.dtype.element_ty), (i < lq)[:, None] & (cd < D)[None, :])
            tl.store(to_v, (dv_acc * dv_scale).to(dv.dtype.element_ty), (i < lq)[:, None] & (cv < DV)[None, :])
