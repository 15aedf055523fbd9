"""The MX codec in plain PyTorch: the definition that every kernel must equal bit for bit.

A block shares one scale 2^(e - 127), stored as the byte e (E8M0); 255 is NaN. With amax the block's largest magnitude and ``largest =
c * 2^emax`` the largest element (1 <= c < 2), the exponent of the scale is

========  ===================================================  ========================================
rule      exponent                                             in integers, from the bits of amax
========  ===================================================  ========================================
floor     floor(log2 amax) - emax                              exponent
ceil      ceil(log2 amax) - emax                               exponent + (mantissa > 0)
even      floor(log2(amax rounded to mbits bits)) - emax       exponent of (bits + half a unit of mbits)
rceil     ceil(log2(amax / largest))                           exponent + (mantissa > c - 1)
========  ===================================================  ========================================

clamped to -127. "rceil" is the rule of ``cvt.rp.satfinite.ue8m0x2`` on an amax / largest that is not rounded first.

Edges: a zero block has byte 0 and zero elements (signs kept). A block that holds NaN **or Inf** has byte 255 and NaN elements (0 in the
formats without NaN): it decodes to NaN. Elements are exact quotients rounded once, also where the scale is 2^-127. A border block is
shorter, never padded in the payload. fp32 and bf16 denormals count as what they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from gem_core.errors import OpError
from gem_precision.formats.elements import Element, decode, element, encode
from gem_precision.formats.random import draw_seed, random_bits

ScaleRule = Literal["rceil", "floor", "ceil", "even"]
Rounding = Literal["nearest", "stochastic"]
SCALE_RULES = ("rceil", "floor", "ceil", "even")
BLOCKS = ((1, 32), (32, 1), (32, 32))
NAN_SCALE = 255


@dataclass(frozen=True, eq=False)
class MX:
    """A quantised tensor ``[..., R, C]``.

    ``data [..., R, C]``: float8_e4m3fn or float8_e5m2, or uint8 codes, one a byte, for the 6- and 4-bit formats (`packed` makes them
    dense). ``scales [..., ceil(R/r), ceil(C/c)]``: uint8, E8M0, for blocks of r x c.
    """

    data: Tensor
    scales: Tensor
    elem: str
    block: tuple[int, int]

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def nbytes(self) -> int:
        """Bytes of payload and scales when stored densely."""
        return (self.data.numel() * element(self.elem).bits + 7) // 8 + self.scales.numel()

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """``[..., R, C]`` in ``dtype``: element x scale, rounded once; finite codes decode to finite values (saturating)."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        values = times_scales(decode(self.data, element(self.elem), wide), scale_values(self.scales, wide), self.block)
        if dtype == torch.float64:
            return values
        top = torch.finfo(dtype).max
        return values.clamp(-top, top).to(dtype)

    def transpose(self) -> MX:
        """The quantised transpose of the last two dims (views). A 32x32 block stays one; 1x32 becomes 32x1."""
        return MX(self.data.transpose(-1, -2), self.scales.transpose(-1, -2), self.elem, (self.block[1], self.block[0]))


def quantize_mx(
    x: Tensor,
    *,
    elem: str = "e4m3",
    block: tuple[int, int] = (1, 32),
    scale_rule: ScaleRule = "rceil",
    rounding: Rounding = "nearest",
    generator: torch.Generator | None = None,
) -> MX:
    """Quantise ``x [..., R, C]`` (fp32, bf16 or fp16; a vector counts as one row) in blocks of ``block`` rows x columns.

    :param elem: e4m3, e5m2, e3m2, e2m3 or e2m1.
    :param block: (1, 32), (32, 1) or (32, 32), over the last two dims.
    :param generator: source of stochastic rounding; None: torch's default generator. See `rank_generator`.
    :raises OpError: a dtype, format, block or rule that does not exist.
    """
    chosen, block = _checked(x, elem, block, scale_rule, rounding)
    bits = None
    if rounding == "stochastic":
        bits = random_bits(draw_seed(generator, x.device), tuple(x.shape))
    rows = x.reshape(1, -1) if x.dim() < 2 else x
    q = quantize_blocks(rows, chosen, block, scale_rule, bits if bits is None else bits.view(rows.shape))
    return MX(q.data.view(x.shape), q.scales.view(-1), elem, block) if x.dim() < 2 else q


def quantize_blocks(x: Tensor, elem: Element, block: tuple[int, int], scale_rule: ScaleRule, bits: Tensor | None = None) -> MX:
    """`quantize_mx` of ``x [..., R, C]`` in blocks of any size: no MX format, but how FP8 attention scales."""
    exponents = scale_exponents(block_amax(x, block), elem, scale_rule)
    return MX(encode_scaled(x, exponents, block, elem, bits), exponents, elem.name, block)


def _checked(x: Tensor, elem: str, block: tuple[int, int], scale_rule: str, rounding: str) -> tuple[Element, tuple[int, int]]:
    chosen, block = element(elem), (int(block[0]), int(block[1]))
    if block not in BLOCKS:
        raise OpError(f"MX has no blocks of {block[0]}x{block[1]}", where="block", fix="choose (1, 32), (32, 1) or (32, 32)")
    if x.dim() < 2 and block != (1, 32):
        raise OpError(f"a tensor of {x.dim()} dims has no columns to block by {block}", where="block", fix="use block=(1, 32)")
    if scale_rule not in SCALE_RULES:
        raise OpError(f"there is no scale rule called {scale_rule!r}", where="scale_rule", fix=f"choose one of {', '.join(SCALE_RULES)}")
    if rounding not in ("nearest", "stochastic"):
        raise OpError(f"there is no rounding called {rounding!r}", where="rounding", fix="choose nearest or stochastic")
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        # a float64 would be rounded twice, a thing that bit-exact scales do not survive
        raise OpError(f"cannot quantise {x.dtype}", where="x", fix="convert to float32, bfloat16 or float16 first")
    return chosen, block


def block_amax(x: Tensor, block: tuple[int, int]) -> Tensor:
    """``[..., ceil(R/r), ceil(C/c)]`` fp32: largest magnitude a block, NaN where the block holds one."""
    (r, c), (rows, columns) = block, x.shape[-2:]
    pad = (0, -columns % c, 0, -rows % r)
    padded = F.pad(x, pad) if any(pad) else x
    blocks = padded.abs().reshape(*x.shape[:-2], padded.shape[-2] // r, r, padded.shape[-1] // c, c)
    if blocks.numel() == 0:
        return x.new_zeros(*x.shape[:-2], blocks.shape[-4], blocks.shape[-2], dtype=torch.float32)
    return blocks.amax(dim=(-3, -1)).to(torch.float32)


def scale_exponents(amax: Tensor, elem: Element, rule: ScaleRule) -> Tensor:
    """uint8 E8M0 bytes for ``amax`` (fp32, non-negative or NaN)."""
    bits = amax.view(torch.int32)
    if rule == "even":
        bits = bits + (1 << (22 - elem.mbits))
    exponent = bits >> 23
    mantissa = bits & 0x7FFFFF
    if rule == "ceil":
        exponent = exponent + (mantissa > 0)
    elif rule == "rceil":
        exponent = exponent + (mantissa > round((elem.largest / 2.0**elem.emax - 1) * 2**23))
    byte = (exponent - elem.emax).clamp_(min=0)
    return torch.where(amax.isfinite(), byte, NAN_SCALE).to(torch.uint8)


def scale_values(scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """2^(e - 127) of E8M0 bytes in float32 or float64; NaN for 255."""
    return scales.view(torch.float8_e8m0fnu).to(dtype)


def times_scales(x: Tensor, values: Tensor, block: tuple[int, int]) -> Tensor:
    """``x [..., R, C]`` (or ``[C]``) times one value a block of r x c."""
    if x.dim() < 2:
        return times_scales(x.view(1, -1), values.view(1, -1), block).view(x.shape)
    (r, c), (rows, columns) = block, x.shape[-2:]
    if rows % r or columns % c:
        padded = F.pad(x, (0, -columns % c, 0, -rows % r))
        return times_scales(padded, values, block)[..., :rows, :columns].contiguous()
    blocks = x.unflatten(-2, (-1, r)).unflatten(-1, (-1, c)) if x.numel() else x
    return (blocks * values[..., :, None, :, None]).reshape(x.shape) if x.numel() else x


def encode_scaled(x: Tensor, exponents: Tensor, block: tuple[int, int], elem: Element, bits: Tensor | None = None) -> Tensor:
    """Codes of ``x / 2^(e - 127)`` for given scale bytes."""
    e = exponents.to(torch.int32)
    inverse = ((254 - e).clamp_(min=0) << 23).view(torch.float32)
    inverse = torch.where(e == NAN_SCALE, torch.nan, inverse)
    return encode(times_scales(x.to(torch.float32), inverse, block), elem, bits)
