"""Element formats of the OCP microscaling formats (MX v1.0, table 1), and rounding real numbers to them.

An element format has one sign bit, ``ebits`` of exponent and ``mbits`` of mantissa. A magnitude y lies on the grid of step
``2^(max(floor(log2 y), emin) - mbits)``; with k = y / step rounded to an integer, the code is ``(e - emin) * 2^mbits + k``, for normal and
subnormal numbers alike, and a carry into the next binade needs no special case.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from gem_core.errors import OpError


@dataclass(frozen=True)
class Element:
    """``emax``: exponent of the largest number, ``largest``: that number, ``emin``: exponent of the smallest normal number.

    ``torch_dtype``: the torch dtype with the same codes, or None where codes live in uint8, one a byte (sign in bit ``bits - 1``).
    """

    name: str
    ebits: int
    mbits: int
    emax: int
    largest: float
    torch_dtype: torch.dtype | None
    nan_code: int

    @property
    def bits(self) -> int:
        return 1 + self.ebits + self.mbits

    @property
    def emin(self) -> int:
        return 2 - (1 << (self.ebits - 1))

    @property
    def sign_code(self) -> int:
        return 1 << (self.bits - 1)


ELEMENTS = {
    e.name: e
    for e in (
        Element("e4m3", 4, 3, 8, 448.0, torch.float8_e4m3fn, 0x7F),
        Element("e5m2", 5, 2, 15, 57344.0, torch.float8_e5m2, 0x7F),
        Element("e3m2", 3, 2, 4, 28.0, None, 0),
        Element("e2m3", 2, 3, 2, 7.5, None, 0),
        Element("e2m1", 2, 1, 2, 6.0, None, 0),
    )
}


def element(name: str) -> Element:
    """The format called ``name``.

    :raises OpError: there is none.
    """
    if name not in ELEMENTS:
        raise OpError(f"there is no element format called {name!r}", where="elem", fix=f"choose one of {', '.join(ELEMENTS)}")
    return ELEMENTS[name]


def encode(y: Tensor, elem: Element, random_bits: Tensor | None = None) -> Tensor:
    """Codes of ``y`` (fp32, any shape), saturating at ±largest: the elem's torch dtype, or uint8.

    Nearest, ties to even; with ``random_bits`` (int32 in [0, 2^24), y's shape) stochastic: up with probability (y - lo)/(hi - lo), exact to
    2^-25. NaN gives ``nan_code``, or 0 where the format has no NaN.
    """
    y = y.clamp(-elem.largest, elem.largest)
    if random_bits is None and elem.torch_dtype is not None:
        # one NaN code, whatever sign the hardware's NaN had
        return torch.where(y.isnan(), elem.nan_code, y.to(elem.torch_dtype).view(torch.uint8)).view(elem.torch_dtype)
    magnitude = y.abs()
    exponent = (magnitude.view(torch.int32) >> 23) - 127
    exponent = exponent.clamp_(elem.emin, elem.emax)
    inverse_step = ((elem.mbits + 127 - exponent) << 23).view(torch.float32)
    steps = magnitude * inverse_step
    if random_bits is None:
        rounded = steps.round()
    else:
        low = steps.floor()
        # integers below 2^24 are exact in fp32, so the comparison is too
        threshold = ((steps - low) * 2.0**24).round_()
        rounded = low + (random_bits.to(torch.float32) < threshold)
    codes = ((exponent - elem.emin) << elem.mbits) + rounded.nan_to_num_(0.0).to(torch.int32)
    codes = codes | torch.where(y.signbit(), elem.sign_code, 0)
    codes = torch.where(y.isnan(), elem.nan_code, codes).to(torch.uint8)
    return codes if elem.torch_dtype is None else codes.view(elem.torch_dtype)


@lru_cache(maxsize=16)
def code_values(elem: Element) -> Tensor:
    """``[2^bits]`` float64 CPU: the value of every code, from the definition of the format."""
    values = []
    for code in range(1 << elem.bits):
        sign = -1.0 if code & elem.sign_code else 1.0
        magnitude = code & (elem.sign_code - 1)
        field, mantissa = magnitude >> elem.mbits, magnitude & ((1 << elem.mbits) - 1)
        if field == 0:
            value = mantissa * 2.0 ** (elem.emin - elem.mbits)
        else:
            value = (mantissa + (1 << elem.mbits)) * 2.0 ** (field - 1 + elem.emin - elem.mbits)
        if elem.name == "e4m3" and magnitude == 0x7F:
            value = float("nan")
        if elem.name == "e5m2" and field == 31:
            value = float("inf") if mantissa == 0 else float("nan")
        values.append(sign * value)
    return torch.tensor(values, dtype=torch.float64)


def decode(codes: Tensor, elem: Element, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of ``codes`` in ``dtype`` (float32 or float64), exact."""
    if elem.torch_dtype is not None and codes.dtype == elem.torch_dtype:
        return codes.to(dtype)
    return code_values(elem).to(device=codes.device, dtype=dtype)[codes.view(torch.uint8).to(torch.int32)]
