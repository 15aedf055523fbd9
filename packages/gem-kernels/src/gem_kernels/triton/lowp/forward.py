"""Forward pass of low-precision `jagged_attention` and `gdpa`: a program holds one tile of query rows and walks over the keys.

    Q  [BLOCK_M, D]  codes, K [BLOCK_N, D] codes        S = Q Kᵀ, mask, softmax step or activation, P to E4M3, O += P V
    Vᵀ [DV, BLOCK_N] codes

P of the softmax lies in [0, 1] since the row maximum is taken out first, so its scale is the constant 2^-8 that puts 1 at 256; the
denominator is summed before P is rounded. P of gdpa is scaled by its own largest magnitude, a strip of 32 keys (or a whole tile for FP8)
at a time.

MODE      S                                             O
SCALED    block-scaled product                          block-scaled product (sm_100)
DECODED   product of decoded tiles                      product of decoded tiles
NATIVE    FP8 product x one number                      O += FP8 product x (a number, or one a row)

Tiles that no row may see are never visited (`attention.masks.key_walk`). Softmax is the online one of FlashAttention (arXiv 2205.14135).
"""

# ruff: noqa: SIM102 - a constexpr condition stands alone, so that what it guards is not compiled when it is false

from __future__ import annotations

import triton
import triton.language as tl

from gem_kernels.triton.attention.activations import activate
from gem_kernels.triton.attention.forward import zero_lse
from gem_kernels.triton.attention.masks import key_walk, sample_geometry, visible
from gem_kernels.triton.attention.tiles import store_rows, zero_slack
from gem_kernels.triton.lowp.codec import decode, encode, scale_value, spread, strips

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
SCALED, DECODED, NATIVE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def row_scales(scales, first, start, rows, B: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """E8M0 bytes ``[ROWS, WIDTH]`` of the rows start ... of a sample whose blocks begin at ``first``; 127 outside."""
    r = start + tl.arange(0, ROWS)
    at = scales + (first + r // B)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    return tl.load(at, (r < rows)[:, None], 127)


@triton.jit
def key_scales(scales, first, start, keys, WIDTH: tl.constexpr, DV_PAD: tl.constexpr, BLOCK_N: tl.constexpr):
    """E8M0 bytes ``[DV_PAD, BLOCK_N / 32]`` of Vᵀ in squares of 32; 127 outside."""
    i = start // 32 + tl.arange(0, BLOCK_N // 32)
    c = tl.arange(0, DV_PAD) // 32
    return tl.load(scales + (first + i)[None, :] * WIDTH + c[:, None], (i * 32 < keys)[None, :], 127)


@triton.jit(do_not_specialize=["batch", "q_len", "rows", "left", "right", "q_blocks", "k_blocks", "v_columns"])
def lowp_attention_fwd_kernel(
    q, k, vt, q_scales, k_scales, v_scales, out, lse, q_offsets, k_offsets, kv_index, act_ids, tiles, tile_count,
    stride_on, stride_oh, batch, q_len, rows: tl.int64, left, right, q_blocks: tl.int64, k_blocks: tl.int64, v_columns: tl.int64,
    scale, out_scale,
    H: tl.constexpr, GROUP: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    SOFTMAX: tl.constexpr, ACT: tl.constexpr, ACT_SET: tl.constexpr, FAST: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    B: tl.constexpr, MODE: tl.constexpr, HARDWARE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    DW: tl.constexpr = D_PAD // min(B, D_PAD)
    VW: tl.constexpr = DV_PAD // min(B, DV_PAD)
    HKV: tl.constexpr = H // GROUP
    if q_offsets is not None:
        zero_slack(out, q_offsets, batch, rows, stride_on, stride_oh, H, DV, DV_PAD)
        if SOFTMAX:
            zero_lse(lse, q_offsets, batch, rows, H)
    item = tl.program_id(0)
    if item < tl.load(tile_count) * H:
        head = item % H
        kv_head = head // GROUP
        entry = tl.load(tiles + item // H)
        sample = (entry >> 32).to(tl.int32)
        m0 = (entry & 0xFFFFFFFF).to(tl.int32) * BLOCK_M
        q_row, out_row, lq, k_row, h, _t, c = sample_geometry(sample, q_offsets, k_offsets, None, None, kv_index, q_len)
        keys = sample
        if kv_index is not None:
            keys = tl.load(kv_index + sample).to(tl.int32)
        shift = h - lq
        m1 = tl.minimum(m0 + BLOCK_M, lq)
        i = m0 + tl.arange(0, BLOCK_M)
        p = tl.minimum(i + shift, h)
        blocks, _head, walk_first, free0, free1 = key_walk(m0, m1, shift, h, c, left, right, BLOCK_N, CAUSAL, WINDOW, False)

        d = tl.arange(0, D_PAD)
        q_at = q + ((q_row + i)[:, None] * H + head) * D_PAD + d[None, :]
        if HARDWARE:
            q_tile = tl.load(q_at, (i < lq)[:, None], 0.0)
        else:
            q_tile = tl.load(q_at, (i < lq)[:, None], 0)
        q_first = q_row // B
        if q_offsets is not None:
            q_first += sample
        q_first += head.to(tl.int64) * q_blocks
        k_first = kv_head.to(tl.int64) * k_blocks + k_row // B + keys
        v_first = (k_row // 32 + keys) * 32
        step = scale
        if MODE == SCALED:
            q_bytes = row_scales(q_scales, q_first, m0, lq, B, DW, BLOCK_M)
            # a zero that the compiler does not see: Triton 3.6 fails on a block-scaled product without or with a constant accumulator
            zero = tl.zeros([BLOCK_M, BLOCK_N], tl.float32) * scale
        elif MODE == DECODED:
            q_value = scale_value(row_scales(q_scales, q_first, m0, lq, B, DW, BLOCK_M))
            q_plain = decode(q_tile, HARDWARE)
            q_plain = (q_plain * spread(q_value, D_PAD // DW, BLOCK_M, D_PAD)).to(q_plain.dtype)
        else:
            step *= scale_value(tl.load(q_scales + q_first + m0 // B))

        act_id = 0
        if act_ids is not None:
            act_id = tl.load(act_ids + head)
        m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l_i = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
        dv = tl.arange(0, DV_PAD)
        for x in tl.range(0, blocks):
            n0 = (walk_first + x) * BLOCK_N
            j = n0 + tl.arange(0, BLOCK_N)
            k_at = k + ((k_row + j)[:, None] * HKV + kv_head) * D_PAD + d[None, :]
            column = tl.multiple_of(v_first + n0, 32) + tl.arange(0, BLOCK_N)
            v_at = vt + (kv_head.to(tl.int64) * DV_PAD + dv)[:, None] * v_columns + column[None, :]
            if HARDWARE:
                k_tile = tl.load(k_at, (j < h)[:, None], 0.0)
                v_tile = tl.load(v_at, (j < h)[None, :], 0.0)
            else:
                k_tile = tl.load(k_at, (j < h)[:, None], 0)
                v_tile = tl.load(v_at, (j < h)[None, :], 0)

            if MODE == SCALED:
                k_bytes = row_scales(k_scales, k_first, n0, h, B, DW, BLOCK_N)
                s = tl.dot_scaled(q_tile, q_bytes, "e4m3", tl.trans(k_tile), k_bytes, "e4m3", zero) * step
            elif MODE == DECODED:
                k_value = scale_value(row_scales(k_scales, k_first, n0, h, B, DW, BLOCK_N))
                k_plain = decode(k_tile, HARDWARE)
                k_plain = (k_plain * spread(k_value, D_PAD // DW, BLOCK_N, D_PAD)).to(k_plain.dtype)
                s = tl.dot(q_plain, tl.trans(k_plain), input_precision="ieee") * step
            elif HARDWARE:
                s = tl.dot(q_tile, tl.trans(k_tile)) * (step * scale_value(tl.load(k_scales + k_first + n0 // B)))
            else:
                s = tl.dot(decode(q_tile, False), tl.trans(decode(k_tile, False)), input_precision="ieee")
                s = s * (step * scale_value(tl.load(k_scales + k_first + n0 // B)))

            if SOFTMAX:
                if (n0 < free0) | (n0 + BLOCK_N > free1):
                    seen = (j < h)[None, :] & visible(p[:, None], j[None, :], c, left, right, CAUSAL, WINDOW, False)
                    s = tl.where(seen, s, float("-inf"))
                m_new = tl.maximum(m_i, tl.max(s, 1) * LOG2E)
                m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
                prob = tl.exp2(s * LOG2E - m_safe[:, None])
                alpha = tl.exp2(m_i - m_safe)
                l_i = l_i * alpha + tl.sum(prob, 1)
                acc = acc * alpha[:, None]
                m_i = m_new
            else:
                prob = activate(s, act_id, ACT, ACT_SET, FAST).to(tl.float32)
                if CAUSAL or WINDOW:
                    if (n0 < free0) | (n0 + BLOCK_N > free1):
                        seen = (j < h)[None, :] & visible(p[:, None], j[None, :], c, left, right, CAUSAL, WINDOW, False)
                        prob = tl.where(seen, prob, 0.0)

            if MODE == NATIVE:
                value = scale_value(tl.load(v_scales + k_first + n0 // B))
                if SOFTMAX:
                    codes = encode(prob * 256.0, HARDWARE)
                    factor = tl.full([BLOCK_M], 0.00390625, tl.float32) * value
                else:
                    codes, byte = strips(prob, BLOCK_N, HARDWARE, BLOCK_M, BLOCK_N)
                    factor = tl.reshape(scale_value(byte), (BLOCK_M,)) * value
                if HARDWARE:
                    part = tl.dot(codes, tl.trans(v_tile))
                else:
                    part = tl.dot(decode(codes, False), tl.trans(decode(v_tile, False)), input_precision="ieee")
                acc += part * factor[:, None]
            else:
                v_bytes = key_scales(v_scales, k_first, n0, h, VW, DV_PAD, BLOCK_N)
                if SOFTMAX:
                    codes = encode(prob * 256.0, HARDWARE)
                    byte = tl.full([BLOCK_M, BLOCK_N // 32], 119, tl.int32)
                else:
                    codes, byte = strips(prob, 32, HARDWARE, BLOCK_M, BLOCK_N)
                if MODE == SCALED:
                    acc = tl.dot_scaled(codes, byte.to(tl.uint8), "e4m3", tl.trans(v_tile), v_bytes, "e4m3", acc)
                else:
                    left_tile = decode(codes, HARDWARE)
                    left_tile = (left_tile * spread(scale_value(byte), 32, BLOCK_M, BLOCK_N)).to(left_tile.dtype)
                    right_tile = decode(v_tile, HARDWARE)
                    right_tile = (right_tile * spread(scale_value(v_bytes), 32, DV_PAD, BLOCK_N)).to(right_tile.dtype)
                    acc = tl.dot(left_tile, tl.trans(right_tile), acc, input_precision="ieee")

        if SOFTMAX:
            # rows that see no key have 0; a NaN passes
            acc = acc * tl.where(l_i <= 0, 0.0, out_scale / l_i)[:, None]
            value = tl.where(l_i <= 0, float("-inf"), (m_i + tl.log2(l_i)) * LN2)
            tl.store(lse + head.to(tl.int64) * rows + out_row + i, value, i < lq)
        else:
            acc = acc * out_scale
        store_rows(out, out_row, m0, lq, head, stride_on, stride_oh, acc, BLOCK_M, DV, DV_PAD)
