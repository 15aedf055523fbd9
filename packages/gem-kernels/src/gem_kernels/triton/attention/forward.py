"""Forward pass of `jagged_attention` and `gdpa`: a program holds one tile of query rows and walks over the keys.

                     keys j of the sample ->
            +--------+--------+--------+--------+
     rows   | BLOCK_M x BLOCK_N tiles, left to  |     S = Q Kᵀ, mask, softmax step or activation, O += P V
            | right; Q stays, K and V stream    |
            +--------+--------+--------+--------+

Tiles that no row of the program may see are never visited and tiles that all rows see wholly are not masked (`masks.key_walk`). Softmax is
the online one of FlashAttention (arXiv 2205.14135), in powers of two. A candidate's own key comes last; its score was computed row by row
beforehand (`rows`).

MASKING "subtract": keys past the sample's end were loaded as zeros, so they score exactly 0; nothing is masked, and the surplus
n_pad · 2^(0 - m) leaves the denominator at the end. Where that surplus is most of the denominator (all real scores far below 0) the
difference would cancel, and the program repeats its tile with masks. For plain full attention without bias only.
"""

# ruff: noqa: SIM102 - a constexpr condition stands alone, so that what it guards is not compiled when it is false

from __future__ import annotations

import triton
import triton.language as tl

from gem_kernels.triton.attention.activations import activate
from gem_kernels.triton.attention.bias import add_bias, load_times
from gem_kernels.triton.attention.masks import key_block, key_walk, sample_geometry, visible
from gem_kernels.triton.attention.tiles import load_own, load_rows, store_rows, zero_slack

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# The surplus may be at most this multiple of what remains: 4 of the 24 bits of the fp32 denominator.
_CANCEL = tl.constexpr(15.0)


@triton.jit(do_not_specialize=["batch", "q_len", "rows", "left", "right", "radius", "edges"])
def attention_fwd_kernel(
    q, k, v, out, lse,
    q_offsets, k_offsets, num_targets, own, target_v, context_len, kv_index,
    bias_position, bias_time, time_index, time_edges, q_times, k_times, q_relative, k_relative, act_ids,
    tiles, tile_count,
    stride_qn, stride_qh, stride_kn, stride_kh, stride_vn, stride_vh, stride_on, stride_oh,
    stride_tvn, stride_tvh, stride_bp, stride_bt,
    batch, q_len, rows: tl.int64, left, right, radius, edges,
    scale, out_scale,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    SOFTMAX: tl.constexpr, ACT: tl.constexpr, ACT_SET: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, TIME_STEPS: tl.constexpr, SUBTRACT: tl.constexpr, POSITIVE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    TARGETS: tl.constexpr = num_targets is not None
    CONTEXT: tl.constexpr = context_len is not None
    BIAS: tl.constexpr = (bias_position is not None) or (bias_time is not None)
    # The row maximum may be taken of raw scores where scaling keeps their order.
    FOLD: tl.constexpr = POSITIVE and not BIAS
    if q_offsets is not None:
        zero_slack(out, q_offsets, batch, rows, stride_on, stride_oh, H, DV, DV_PAD)
        if SOFTMAX:
            zero_lse(lse, q_offsets, batch, rows, H)
    total = tl.load(tile_count) * H
    for item in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        head = item % H
        kv_head = head // GROUP
        entry = tl.load(tiles + item // H)
        sample = (entry >> 32).to(tl.int32)
        m0 = (entry & 0xFFFFFFFF).to(tl.int32) * BLOCK_M
        q_row, out_row, lq, k_row, h, t, c = sample_geometry(sample, q_offsets, k_offsets, num_targets, context_len, kv_index, q_len)
        shift = h + t - lq
        m1 = tl.minimum(m0 + BLOCK_M, lq)
        i = m0 + tl.arange(0, BLOCK_M)
        p = tl.minimum(i + shift, h)
        p_min = tl.minimum(m0 + shift, h)
        p_max = tl.minimum(m1 - 1 + shift, h)
        blocks, walk_head, walk_first, free0, free1 = key_walk(m0, m1, shift, h, c, left, right, BLOCK_N, CAUSAL, WINDOW, CONTEXT)
        q_tile = load_rows(q, q_row, m0, lq, head, stride_qn, stride_qh, BLOCK_M, D, D_PAD, TMA)
        act_id = 0
        if act_ids is not None:
            act_id = tl.load(act_ids + head)
        tq, tq_low, tq_high = load_times(q_relative, q_row, m0, lq, BLOCK_M)

        m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l_i = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
        m_i, l_i, acc = walk_keys(
            q_tile, k, v, m_i, l_i, acc, i, p, p_min, p_max, tq, tq_low, tq_high, act_id, head, kv_head, q_row, lq, k_row, h, c,
            blocks, walk_head, walk_first, free0, free1,
            bias_position, bias_time, time_index, time_edges, q_times, k_times, q_relative, k_relative,
            stride_kn, stride_kh, stride_vn, stride_vh, stride_bp, stride_bt,
            left, right, radius, edges, scale, D, DV, D_PAD, DV_PAD, SOFTMAX, ACT, ACT_SET, FAST, PRECISION,
            CAUSAL, WINDOW, CONTEXT, TIME_STEPS, FOLD, SUBTRACT, BLOCK_N, TMA,
        )  # fmt: skip
        if SUBTRACT:
            surplus = (blocks * BLOCK_N - h).to(tl.float32) * tl.exp2(-m_i)
            surplus = tl.where(blocks > 0, surplus, 0.0)
            l_i -= surplus
            if tl.max(tl.where((i < lq) & (surplus > _CANCEL * l_i), 1, 0), 0) > 0:
                m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
                l_i = tl.zeros([BLOCK_M], tl.float32)
                acc = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
                m_i, l_i, acc = walk_keys(
                    q_tile, k, v, m_i, l_i, acc, i, p, p_min, p_max, tq, tq_low, tq_high, act_id, head, kv_head, q_row, lq, k_row, h, c,
                    blocks, walk_head, walk_first, free0, free1,
                    bias_position, bias_time, time_index, time_edges, q_times, k_times, q_relative, k_relative,
                    stride_kn, stride_kh, stride_vn, stride_vh, stride_bp, stride_bt,
                    left, right, radius, edges, scale, D, DV, D_PAD, DV_PAD, SOFTMAX, ACT, ACT_SET, FAST, PRECISION,
                    CAUSAL, WINDOW, CONTEXT, TIME_STEPS, FOLD, False, BLOCK_N, TMA,
                )  # fmt: skip

        if TARGETS:
            if m1 > lq - t:
                candidate = (i >= lq - t) & (i < lq)
                own_row = q_row if kv_index is not None else k_row + h - (lq - t)
                v_own = load_own(target_v, own_row, i, candidate, kv_head, stride_tvn, stride_tvh, DV, DV_PAD)
                score = tl.load(own + head.to(tl.int64) * rows + out_row + i, candidate, 0.0)
                if SOFTMAX:
                    score = tl.where(candidate, score * LOG2E, float("-inf"))
                    m_new = tl.maximum(m_i, score)
                    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
                    alpha = tl.exp2(m_i - m_safe)
                    weight = tl.exp2(score - m_safe)
                    l_i = l_i * alpha + weight
                    acc = acc * alpha[:, None]
                    m_i = m_new
                else:
                    weight = activate(score, act_id, ACT, ACT_SET, FAST).to(tl.float32)
                acc += weight[:, None] * v_own.to(tl.float32)

        if SOFTMAX:
            scaled = tl.where(l_i > 0, out_scale / l_i, 0.0)
            acc = acc * scaled[:, None]
            value = tl.where(l_i > 0, (m_i + tl.log2(l_i)) * LN2, float("-inf"))
            tl.store(lse + head.to(tl.int64) * rows + out_row + i, value, i < lq)
        else:
            acc = acc * out_scale
        store_rows(out, out_row, m0, lq, head, stride_on, stride_oh, acc, BLOCK_M, DV, DV_PAD)


@triton.jit
def walk_keys(
    q_tile, k, v, m_i, l_i, acc, i, p, p_min, p_max, tq, tq_low, tq_high, act_id, head, kv_head, q_row, lq, k_row, h, c,
    blocks, walk_head, walk_first, free0, free1,
    bias_position, bias_time, time_index, time_edges, q_times, k_times, q_relative, k_relative,
    stride_kn, stride_kh, stride_vn, stride_vh, stride_bp, stride_bt,
    left, right, radius, edges, scale,
    D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    SOFTMAX: tl.constexpr, ACT: tl.constexpr, ACT_SET: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CONTEXT: tl.constexpr, TIME_STEPS: tl.constexpr,
    FOLD: tl.constexpr, SUBTRACT: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Row maximum (scaled, in powers of two), denominator and accumulator after all key blocks of the walk."""
    BIAS: tl.constexpr = (bias_position is not None) or (bias_time is not None)
    for x in tl.range(0, blocks):
        n0 = key_block(x, walk_head, walk_first, CONTEXT) * BLOCK_N
        k_tile = load_rows(k, k_row, n0, h, kv_head, stride_kn, stride_kh, BLOCK_N, D, D_PAD, TMA)
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        j = n0 + tl.arange(0, BLOCK_N)
        if BIAS:
            tk, tk_low, tk_high = load_times(k_relative, k_row, n0, h, BLOCK_N)
            s = add_bias(
                s * scale, p[:, None], i[:, None], j[None, :], n0 - p_max, tl.minimum(n0 + BLOCK_N, h) - 1 - p_min,
                tq[:, None], tk[None, :], tq_low, tq_high, tk_low, tk_high, lq, h, q_row, k_row, head,
                bias_position, bias_time, time_index, time_edges, q_times, k_times, stride_bp, stride_bt, radius, edges,
                TIME_STEPS, FAST > 0,
            )  # fmt: skip
        elif not FOLD:
            s = s * scale
        if SOFTMAX:
            if not SUBTRACT:
                if (n0 < free0) | (n0 + BLOCK_N > free1):
                    seen = (j < h)[None, :] & visible(p[:, None], j[None, :], c, left, right, CAUSAL, WINDOW, CONTEXT)
                    s = tl.where(seen, s, float("-inf"))
            step = scale * LOG2E if FOLD else LOG2E
            m_new = tl.maximum(m_i, tl.max(s, 1) * step)
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
            prob = tl.exp2(s * step - m_safe[:, None])
            alpha = tl.exp2(m_i - m_safe)
            l_i = l_i * alpha + tl.sum(prob, 1)
            acc = acc * alpha[:, None]
            m_i = m_new
        else:
            if FOLD:
                s = s * scale
            prob = activate(s, act_id, ACT, ACT_SET, FAST)
            if CAUSAL or WINDOW:
                if (n0 < free0) | (n0 + BLOCK_N > free1):
                    seen = (j < h)[None, :] & visible(p[:, None], j[None, :], c, left, right, CAUSAL, WINDOW, CONTEXT)
                    prob = tl.where(seen, prob, 0.0)
        v_tile = load_rows(v, k_row, n0, h, kv_head, stride_vn, stride_vh, BLOCK_N, DV, DV_PAD, TMA)
        acc = tl.dot(prob.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
    return m_i, l_i, acc


@triton.jit
def zero_lse(lse, offsets, batch, rows, HEADS: tl.constexpr):
    """lse of slack rows becomes -inf."""
    BLOCK: tl.constexpr = 256
    used = tl.load(offsets + batch).to(tl.int64)
    for start in range(used + tl.program_id(0) * BLOCK, rows, tl.num_programs(0) * BLOCK):
        r = start + tl.arange(0, BLOCK)
        for head in range(HEADS):
            tl.store(lse + head * rows + r, float("-inf"), r < rows)
