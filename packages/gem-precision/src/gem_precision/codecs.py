"""Codecs for gathers and saved tensors: a flat shard becomes bytes and E8M0 scales, one a 32 elements.

With shard borders at multiples of 32, ``encode`` of the whole tensor equals the concatenation of ``encode`` of its shards bit for bit, so
that quantising before an all-gather loses nothing against quantising after it, at 8.25 bits an element.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from gem_core.errors import OpError
from gem_core.hookspecs import CodecSpec
from gem_precision.formats import MX, element, pack_codes, quantize_mx, unpack_codes


def encode(shard: Tensor, *, elem: str) -> tuple[Tensor, Tensor]:
    """``shard`` (any shape, read flat) -> payload uint8 ``[ceil(n * bits / 8)]``, scales uint8 ``[ceil(n / 32)]``."""
    q = quantize_mx(shard.reshape(-1), elem=elem)
    bits = element(elem).bits
    payload = q.data.view(torch.uint8) if bits == 8 else pack_codes(q.data, bits)
    return payload, q.scales


def decode(payload: Tensor, scales: Tensor, dtype: torch.dtype, *, elem: str) -> Tensor:
    """Flat ``[n]`` in ``dtype``. For 4-bit codes n is even: an odd shard has one more element, 0."""
    chosen = element(elem)
    n = payload.numel() * 8 // chosen.bits
    if scales.numel() != -(-n // 32) and scales.numel() != -(-(n - 1) // 32):
        raise OpError(f"{payload.numel()} bytes of payload do not go with {scales.numel()} scales", where=f"codec {elem}")
    codes = payload if chosen.bits == 8 else unpack_codes(payload, chosen.bits, n)
    data = codes if chosen.torch_dtype is None else codes.view(chosen.torch_dtype)
    if scales.numel() * 32 < n:
        data = data[: scales.numel() * 32]
    return MX(data, scales, elem, (1, 32)).dequantize(dtype)


def specs() -> list[CodecSpec]:
    return [
        CodecSpec(name, 32, partial(encode, elem=elem), partial(decode, elem=elem))
        for name, elem in (("mxfp8", "e4m3"), ("mxfp8_e5m2", "e5m2"), ("mxfp4", "e2m1"))
    ]
