"""Dense storage of 4- and 6-bit codes, and the order in which block-scaled matrix instructions want their scales."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor
from torch.nn import functional as F

from gem_core.errors import OpError


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes ``[..., n]`` of 4 or 6 bits to dense bytes ``[..., ceil(n * bits / 8)]``, first code in the low bits."""
    group = _group(bits)
    n = codes.shape[-1]
    codes = F.pad(codes, (0, -n % group)).unflatten(-1, (-1, group)).to(torch.int32)
    word = reduce(torch.bitwise_or, (codes[..., i] << (bits * i) for i in range(group)))
    count = group * bits // 8
    packed = torch.stack([(word >> (8 * i)) & 0xFF for i in range(count)], dim=-1).to(torch.uint8).flatten(-2)
    return packed[..., : (n * bits + 7) // 8].contiguous()


def unpack_codes(packed: Tensor, bits: int, n: int) -> Tensor:
    """Inverse of `pack_codes`: ``[..., n]`` uint8 codes."""
    group = _group(bits)
    count = group * bits // 8
    if packed.shape[-1] != (n * bits + 7) // 8:
        raise OpError(f"{n} codes of {bits} bits take {(n * bits + 7) // 8} bytes, got {packed.shape[-1]}", where="packed")
    padded = F.pad(packed, (0, -packed.shape[-1] % count)).unflatten(-1, (-1, count)).to(torch.int32)
    word = sum(padded[..., i] << (8 * i) for i in range(count))
    codes = torch.stack([(word >> (bits * i)) & ((1 << bits) - 1) for i in range(group)], dim=-1).to(torch.uint8)
    return codes.flatten(-2)[..., :n].contiguous()


def _group(bits: int) -> int:
    if bits not in (4, 6):
        raise OpError(
            f"codes of {bits} bits are not packed", where="bits", fix="only 4- and 6-bit codes are; 8-bit codes are dense already"
        )
    return 2 if bits == 4 else 4


def swizzle_scales(scales: Tensor) -> Tensor:
    """Scale bytes ``[M, S]`` to the 128x4-tile layout of block-scaled MMA (cuBLAS, "1D block scaling factors layout"), flat uint8.

    Padded to M' = ceil128(M) rows and S' = ceil4(S) columns; tiles follow one another along a row of tiles; inside a tile, row r and column
    c is byte ``(r % 32) * 16 + (r // 32) * 4 + c``. Padding is 0.
    """
    m, s = scales.shape
    padded = F.pad(scales, (0, -s % 4, 0, -m % 128))
    tiles = padded.reshape(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).contiguous()


def unswizzle_scales(flat: Tensor, rows: int, columns: int) -> Tensor:
    """Inverse of `swizzle_scales`: ``[rows, columns]``."""
    m, s = (rows + 127) // 128, (columns + 3) // 4
    if flat.numel() != m * s * 512:
        raise OpError(f"scales of {rows}x{columns} take {m * s * 512} bytes in tiles, got {flat.numel()}", where="flat")
    tiles = flat.view(m, s, 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(m * 128, s * 4)
    return tiles[:rows, :columns].contiguous()
