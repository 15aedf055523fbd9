"""Q, K and V to E4M3, once a call. A program owns one head's tile of one sample; blocks begin at the sample's first row::

                 D columns of one head
        row 0 +-------+-------+
              | B x B | B x B |      codes   [N, H, D_PAD], or for V transposed [H, D_PAD, columns]: an FP8 product wants both operands
       row 32 +-------+-------+              with the contraction innermost, which for P V are the keys
              | B x B | B x B |      scales  [H, blocks, D_PAD / min(B, D_PAD)], uint8
              +-------+-------+

Sample b, whose first row is o_b, has its blocks from ``o_b // B + b`` on, and its transposed columns from ``(o_b // 32 + b) * 32`` on: both
leave room for the blocks that every sample before may have had to open, without a prefix sum, and columns are aligned for wide loads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels.triton.attention.schedule import tile_list
from gem_kernels.triton.attention.tiles import load_rows
from gem_kernels.triton.common.device import DeviceInfo
from gem_kernels.triton.common.launch import launch
from gem_kernels.triton.lowp.codec import decode, encode, inverse_value, magnitude_bits, scale_byte, scale_value


@triton.jit(do_not_specialize=["columns", "blocks"])
def quantize_rows_kernel(
    x, codes, scales, wide, offsets, tiles, tile_count, stride_n, stride_h, columns: tl.int64, blocks: tl.int64,
    H: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, B: tl.constexpr, TRANSPOSE: tl.constexpr, DECODE: tl.constexpr,
    HARDWARE: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """``DECODE``: write what the codes stand for to ``wide [N, H, D]`` instead."""
    BC: tl.constexpr = min(B, D_PAD)
    item = tl.program_id(0)
    if item < tl.load(tile_count) * H:
        head = item % H
        entry = tl.load(tiles + item // H)
        sample = (entry >> 32).to(tl.int32)
        m0 = (entry & 0xFFFFFFFF).to(tl.int32) * BLOCK_R
        row0 = tl.load(offsets + sample).to(tl.int64)
        rows = (tl.load(offsets + sample + 1).to(tl.int64) - row0).to(tl.int32)
        y = load_rows(x, row0, m0, rows, head, stride_n, stride_h, BLOCK_R, D, D_PAD, False).to(tl.float32)
        grid = tl.reshape(magnitude_bits(y), (BLOCK_R // B, B, D_PAD // BC, BC))
        byte = scale_byte(tl.max(tl.max(grid, axis=3), axis=1))
        spread = tl.broadcast_to(inverse_value(byte)[:, None, :, None], (BLOCK_R // B, B, D_PAD // BC, BC))
        code = encode(y * tl.reshape(spread, (BLOCK_R, D_PAD)), HARDWARE)
        r = m0 + tl.arange(0, BLOCK_R)
        c = tl.arange(0, D_PAD)
        inside = (r < rows)[:, None]
        head64 = head.to(tl.int64)
        if DECODE:
            value = tl.broadcast_to(scale_value(byte)[:, None, :, None], (BLOCK_R // B, B, D_PAD // BC, BC))
            plain = decode(code, HARDWARE).to(tl.float32)
            at = wide + (row0 + r)[:, None] * (H * D) + head64 * D + c[None, :]
            tl.store(at, (plain * tl.reshape(value, (BLOCK_R, D_PAD))).to(wide.dtype.element_ty), inside & (c < D)[None, :])
        else:
            if TRANSPOSE:
                first = (row0 // 32 + sample) * 32
                at = codes + (head64 * D_PAD + c)[:, None] * columns + (first + r)[None, :]
                tl.store(at, tl.trans(code), (r < rows)[None, :])
            else:
                tl.store(codes + ((row0 + r)[:, None] * H + head64) * D_PAD + c[None, :], code, inside)
            i = m0 // B + tl.arange(0, BLOCK_R // B)
            k = tl.arange(0, D_PAD // BC)
            at = scales + (head64 * blocks + row0 // B + sample + i)[:, None] * (D_PAD // BC) + k[None, :]
            tl.store(at, byte.to(tl.uint8), (i < (rows + B - 1) // B)[:, None])


@dataclass(frozen=True)
class Coded:
    """``codes`` and ``scales`` as drawn above; ``columns``: of transposed codes, ``blocks``: rows of ``scales`` a head."""

    codes: Tensor
    scales: Tensor
    columns: int
    blocks: int


def pad_of(d: int) -> int:
    """Columns of a head's codes: a power of two, at least one block of 32."""
    return max(32, 1 << (d - 1).bit_length())


def quantize_rows(x: Tensor, offsets: Tensor, block: int, longest: int, info: DeviceInfo, *, transpose: bool = False) -> Coded:
    """``x [N, H, D]`` with dense columns, cut into samples by ``offsets [S+1]``; ``longest``: a bound on a sample's rows."""
    n, h, d = x.shape
    samples, pad = offsets.shape[0] - 1, pad_of(d)
    columns, blocks = (n // 32 + samples + 1) * 32, n // block + samples + 1
    dtype = torch.float8_e4m3fn if info.nvidia else torch.uint8
    codes = torch.empty((h, pad, columns) if transpose else (n, h, pad), dtype=dtype, device=x.device)
    scales = torch.empty(h, blocks, pad // min(block, pad), dtype=torch.uint8, device=x.device)
    _run(x, codes, scales, None, offsets, columns, blocks, block, longest, info, transpose)
    return Coded(codes, scales, columns, blocks)


def rounded_rows(x: Tensor, offsets: Tensor, block: int, longest: int, info: DeviceInfo) -> Tensor:
    """``x`` through the format and back, contiguous, slack rows zero."""
    wide = torch.zeros_like(x, memory_format=torch.contiguous_format)
    _run(x, None, None, wide, offsets, 0, 0, block, longest, info, False)
    return wide


def _run(
    x: Tensor, codes: Tensor | None, scales: Tensor | None, wide: Tensor | None, offsets: Tensor, columns: int, blocks: int, block: int,
    longest: int, info: DeviceInfo, transpose: bool,
) -> None:  # fmt: skip
    n, h, d = x.shape
    rows = 64 if pad_of(d) > 128 else 128
    samples = offsets.shape[0] - 1
    if n == 0 or samples == 0:
        return
    tiles = tile_list(samples, rows, x.device, rows=n, offsets=offsets, longest=longest)
    launch(
        quantize_rows_kernel, (tiles.bound * h,), x.device,
        x, codes, scales, wide, offsets, tiles.tiles, tiles.count, x.stride(0), x.stride(1), columns, blocks,
        H=h, D=d, D_PAD=pad_of(d), B=block, TRANSPOSE=transpose, DECODE=wide is not None, HARDWARE=info.nvidia, BLOCK_R=rows, num_warps=8,
    )  # fmt: skip
