"""FP8 with fp32 scales, as Hopper's matrix instructions take it: one scale a row, a 1x128 strip or a 128x128 square.

``scale = amax / largest`` and ``inverse = largest / amax``, each rounded once in fp32; data = x * inverse rounded to nearest even and
saturated. A zero block has scale 1. A block that holds NaN or Inf has scale NaN and NaN elements. An amax below largest * 2^-126 counts as
that, so that neither quotient leaves the normal range.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gem_core.errors import OpError
from gem_precision.formats.elements import element, encode
from gem_precision.formats.mx import block_amax, times_scales

FP8_BLOCKS = ((1, 0), (0, 1), (1, 128), (128, 1), (128, 128))
"""Rows x columns that share a scale; 0: the whole row or column."""


@dataclass(frozen=True, eq=False)
class FP8:
    """``data [..., R, C]`` float8, ``scales [..., ceil(R/r), ceil(C/c)]`` fp32: multiply to decode."""

    data: Tensor
    scales: Tensor
    elem: str
    block: tuple[int, int]

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def nbytes(self) -> int:
        return self.data.numel() + 4 * self.scales.numel()

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """``[..., R, C]`` in ``dtype``."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return times_scales(self.data.to(wide), self.scales.to(wide), self._full()).to(dtype)

    def transpose(self) -> FP8:
        """The quantised transpose of the last two dims (views)."""
        return FP8(self.data.transpose(-1, -2), self.scales.transpose(-1, -2), self.elem, (self.block[1], self.block[0]))

    def _full(self) -> tuple[int, int]:
        return self.block[0] or max(self.shape[-2], 1), self.block[1] or max(self.shape[-1], 1)


def quantize_fp8(x: Tensor, *, elem: str = "e4m3", block: tuple[int, int] = (1, 128), random_bits: Tensor | None = None) -> FP8:
    """Quantise ``x [..., R, C]`` (fp32, bf16, fp16) with fp32 scales.

    :param block: (1, 0) a row, (0, 1) a column, (1, 128), (128, 1) or (128, 128).
    :param random_bits: `gem_precision.formats.random_bits` of x's shape for stochastic rounding, None for nearest.
    :raises OpError: a format or block that does not exist.
    """
    chosen = element(elem)
    if block not in FP8_BLOCKS:
        raise OpError(f"FP8 has no blocks of {block}", where="block", fix=f"choose one of {FP8_BLOCKS}; 0 is the whole dimension")
    if chosen.torch_dtype is None:
        raise OpError(f"{elem} is not an 8-bit format", where="elem", fix="choose e4m3 or e5m2")
    if x.dim() < 2 or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise OpError(f"cannot quantise {x.dtype} of {x.dim()} dims", where="x", fix="give fp32, bf16 or fp16 of two or more dims")
    full = block[0] or max(x.shape[-2], 1), block[1] or max(x.shape[-1], 1)
    amax = block_amax(x, full)
    floored = torch.where(amax == 0, chosen.largest, amax.clamp(min=chosen.largest * 2.0**-126))
    floored = torch.where(amax.isfinite(), floored, torch.nan)
    # tensors on both sides: with a number, PyTorch multiplies by a rounded reciprocal
    largest = torch.full_like(floored, chosen.largest)
    scales, inverse = floored / largest, largest / floored
    data = encode(times_scales(x.to(torch.float32), inverse, full), chosen, random_bits)
    return FP8(data, scales, elem, block)
