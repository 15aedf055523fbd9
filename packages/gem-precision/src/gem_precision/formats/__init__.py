"""Number formats: MX (E8M0 scales), FP8 with fp32 scales, their dense storage, and seeded stochastic rounding."""

from __future__ import annotations

from gem_precision.formats.elements import ELEMENTS, Element, code_values, decode, element, encode
from gem_precision.formats.fp8 import FP8, quantize_fp8
from gem_precision.formats.jagged import JaggedMX, quantize_mx_groups
from gem_precision.formats.mx import BLOCKS, MX, SCALE_RULES, encode_scaled, quantize_blocks, quantize_mx, scale_exponents, scale_values
from gem_precision.formats.packing import pack_codes, swizzle_scales, unpack_codes, unswizzle_scales
from gem_precision.formats.random import draw_seed, random_bits, rank_generator

__all__ = [
    "BLOCKS",
    "ELEMENTS",
    "FP8",
    "MX",
    "SCALE_RULES",
    "Element",
    "JaggedMX",
    "code_values",
    "decode",
    "draw_seed",
    "element",
    "encode",
    "encode_scaled",
    "pack_codes",
    "quantize_blocks",
    "quantize_fp8",
    "quantize_mx",
    "quantize_mx_groups",
    "random_bits",
    "rank_generator",
    "scale_exponents",
    "scale_values",
    "swizzle_scales",
    "unpack_codes",
    "unswizzle_scales",
]
