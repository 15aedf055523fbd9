"""Quantising along the packed row dimension: blocks of 32 rows begin anew at every group and never cross a border.

The GEMM of a weight gradient contracts over the rows of one group (an expert's tokens). Groups have any length; the padding that the
blocks need is inside this module, in a scratch copy, and the payload stays packed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gem_core.errors import OpError
from gem_precision.formats.elements import decode, element
from gem_precision.formats.mx import Rounding, ScaleRule, quantize_mx, scale_values


@dataclass(frozen=True, eq=False)
class JaggedMX:
    """``data [N, C]`` packed like the input, ``scales [S, C]`` (uint8) with S = N // 32 + G (a bound known without reading the device);
    the blocks of group g are the rows ``scale_offsets[g] ...``. ``block_of_row [N]`` maps a row to its row of scales, S for slack rows."""

    data: Tensor
    scales: Tensor
    scale_offsets: Tensor
    block_of_row: Tensor
    elem: str

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """``[N, C]``; slack rows are 0."""
        one = torch.cat([scale_values(self.scales), self.scales.new_zeros(1, self.scales.shape[1], dtype=torch.float32)])
        values = decode(self.data, element(self.elem)) * one[self.block_of_row]
        return torch.where((self.block_of_row < self.scales.shape[0])[:, None], values, 0.0).to(dtype)


def padded_rows(offsets: Tensor, rows: int, multiple: int = 32) -> tuple[Tensor, Tensor, int]:
    """Where each of ``rows`` packed rows goes when every group begins at a multiple of ``multiple``.

    :returns: ``target [rows]`` int64 (slack rows go past the end, to row ``total``), ``starts [G+1]`` int64 in units of ``multiple``, and
        the bound ``total`` of padded rows; nothing is read from the device.
    """
    lengths = offsets.diff().to(torch.int64)
    blocks = (lengths + multiple - 1) // multiple
    starts = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=offsets.device)
    torch.cumsum(blocks, 0, out=starts[1:])
    total = (rows // multiple + lengths.numel()) * multiple
    row = torch.arange(rows, device=offsets.device)
    group = torch.bucketize(row, offsets[1:].to(torch.int64), right=True)
    inside = group < lengths.numel()
    group = group.clamp(max=max(lengths.numel() - 1, 0))
    if lengths.numel() == 0:
        return torch.full_like(row, total), starts, total
    target = starts[group] * multiple + row - offsets.to(torch.int64)[group]
    return torch.where(inside, target, total), starts, total


def quantize_mx_groups(
    x: Tensor,
    offsets: Tensor,
    *,
    elem: str = "e4m3",
    scale_rule: ScaleRule = "rceil",
    rounding: Rounding = "nearest",
    generator: torch.Generator | None = None,
) -> JaggedMX:
    """Quantise packed rows ``x [N, C]`` in blocks of 32x1 that stay inside the groups of ``offsets [G+1]``.

    Equal, group by group, to ``quantize_mx(x[a:b], block=(32, 1))`` (for nearest rounding). Slack rows past ``offsets[-1]`` are not read.
    :raises OpError: not a matrix, or what `quantize_mx` refuses.
    """
    if x.dim() != 2:
        raise OpError(f"packed rows must be a matrix [N, C], got {tuple(x.shape)}", where="x")
    target, starts, total = padded_rows(offsets, x.shape[0])
    scratch = x.new_zeros(total + 1, x.shape[1])
    scratch[target] = torch.where((target < total)[:, None], x, 0)
    quantised = quantize_mx(scratch[:total], elem=elem, block=(32, 1), scale_rule=scale_rule, rounding=rounding, generator=generator)
    data = torch.cat([quantised.data.view(torch.uint8), quantised.data.new_zeros(1, x.shape[1]).view(torch.uint8)])[target]
    return JaggedMX(data.view(quantised.data.dtype), quantised.scales, starts, target // 32, elem)
