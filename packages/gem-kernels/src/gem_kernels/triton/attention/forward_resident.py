"""Forward pass for short keys: a program loads the K and V of one (sample, head) once and streams query tiles past them.

             K, V (one or two tiles of BLOCK_N keys, on chip)
            +--------+--------+
     rows   |   Q tile x K    |     each Q tile is finished at once: one softmax without running maximum, or the activation
      |     +--------+--------+
      v     |   next Q tile   |     Q streams, pipelined; O is written tile by tile
            +--------+--------+

Right for full attention only, where the longest sample has at most TILES · BLOCK_N keys. Keys past the end are zero rows: they are masked
for softmax, while an activation has f(0) = 0 and V's zero rows add nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gem_kernels.triton.attention.activations import activate
from gem_kernels.triton.attention.forward import LN2, LOG2E, zero_lse
from gem_kernels.triton.attention.masks import sample_geometry
from gem_kernels.triton.attention.tiles import load_rows, store_rows, zero_slack


@triton.jit(do_not_specialize=["batch", "q_len", "rows"])
def attention_fwd_resident_kernel(
    q, k, v, out, lse, q_offsets, k_offsets, kv_index, act_ids, tiles, tile_count,
    stride_qn, stride_qh, stride_kn, stride_kh, stride_vn, stride_vh, stride_on, stride_oh,
    batch, q_len, rows: tl.int64, scale, out_scale,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    SOFTMAX: tl.constexpr, ACT: tl.constexpr, ACT_SET: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr, CHUNK: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
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
        start = (entry & 0xFFFFFFFF).to(tl.int32) * (BLOCK_M * CHUNK)
        q_row, out_row, lq, k_row, h, _t, _c = sample_geometry(sample, q_offsets, k_offsets, None, None, kv_index, q_len)
        act_id = 0
        if act_ids is not None:
            act_id = tl.load(act_ids + head)
        j = tl.arange(0, BLOCK_N)
        k0 = load_rows(k, k_row, 0, h, kv_head, stride_kn, stride_kh, BLOCK_N, D, D_PAD, TMA)
        v0 = load_rows(v, k_row, 0, h, kv_head, stride_vn, stride_vh, BLOCK_N, DV, DV_PAD, TMA)
        if TILES == 2:
            k1 = load_rows(k, k_row, BLOCK_N, h, kv_head, stride_kn, stride_kh, BLOCK_N, D, D_PAD, TMA)
            v1 = load_rows(v, k_row, BLOCK_N, h, kv_head, stride_vn, stride_vh, BLOCK_N, DV, DV_PAD, TMA)
        for m0 in tl.range(start, tl.minimum(start + BLOCK_M * CHUNK, lq), BLOCK_M):
            i = m0 + tl.arange(0, BLOCK_M)
            q_tile = load_rows(q, q_row, m0, lq, head, stride_qn, stride_qh, BLOCK_M, D, D_PAD, TMA)
            s0 = tl.dot(q_tile, tl.trans(k0), input_precision=PRECISION)
            if TILES == 2:
                s1 = tl.dot(q_tile, tl.trans(k1), input_precision=PRECISION)
            if SOFTMAX:
                s0 = s0 * (scale * LOG2E)
                if h < BLOCK_N:
                    s0 = tl.where((j < h)[None, :], s0, float("-inf"))
                m_i = tl.max(s0, 1)
                if TILES == 2:
                    s1 = s1 * (scale * LOG2E)
                    if h < 2 * BLOCK_N:
                        s1 = tl.where((BLOCK_N + j < h)[None, :], s1, float("-inf"))
                    m_i = tl.maximum(m_i, tl.max(s1, 1))
                m_safe = tl.where(m_i == float("-inf"), 0.0, m_i)
                p0 = tl.exp2(s0 - m_safe[:, None])
                l_i = tl.sum(p0, 1)
                acc = tl.dot(p0.to(v0.dtype), v0, input_precision=PRECISION)
                if TILES == 2:
                    p1 = tl.exp2(s1 - m_safe[:, None])
                    l_i += tl.sum(p1, 1)
                    acc = tl.dot(p1.to(v1.dtype), v1, acc, input_precision=PRECISION)
                acc = acc * tl.where(l_i > 0, out_scale / l_i, 0.0)[:, None]
                value = tl.where(l_i > 0, (m_i + tl.log2(l_i)) * LN2, float("-inf"))
                tl.store(lse + head.to(tl.int64) * rows + out_row + i, value, i < lq)
            else:
                p0 = activate(s0 * scale, act_id, ACT, ACT_SET, FAST)
                acc = tl.dot(p0.to(v0.dtype), v0, input_precision=PRECISION)
                if TILES == 2:
                    p1 = activate(s1 * scale, act_id, ACT, ACT_SET, FAST)
                    acc = tl.dot(p1.to(v1.dtype), v1, acc, input_precision=PRECISION)
                acc = acc * out_scale
            store_rows(out, out_row, m0, lq, head, stride_on, stride_oh, acc, BLOCK_M, DV, DV_PAD)
