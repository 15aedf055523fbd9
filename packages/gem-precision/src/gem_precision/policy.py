"""How a GEMM's operands are quantised: small frozen values that recipes are made of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from gem_core.errors import ConfigError
from gem_precision.formats.elements import ELEMENTS
from gem_precision.formats.fp8 import FP8_BLOCKS
from gem_precision.formats.mx import BLOCKS, SCALE_RULES
from gem_precision.hadamard import SIZES

Backend = Literal["auto", "emulated", "torch", "triton"]


@dataclass(frozen=True)
class Operand:
    """One operand of a GEMM, seen as ``[rows, K]``. ``block``: rows x K that share a scale (0: the whole dimension).

    "mx" has E8M0 scales and blocks (1, 32) or (32, 32); "fp8" has fp32 scales and blocks (1, 0), (1, 128) or (128, 128).
    """

    format: Literal["mx", "fp8"] = "mx"
    elem: str = "e4m3"
    block: tuple[int, int] = (1, 32)
    scale_rule: Literal["rceil", "floor", "ceil", "even"] = "rceil"
    rounding: Literal["nearest", "stochastic"] = "nearest"

    def __post_init__(self) -> None:
        blocks = [b for b in (BLOCKS if self.format == "mx" else FP8_BLOCKS) if b not in ((32, 1), (0, 1), (128, 1))]
        for what, given, allowed in (
            ("element format", self.elem, list(ELEMENTS) if self.format == "mx" else ["e4m3", "e5m2"]),
            (f"block of {self.format}", self.block, blocks),
            ("scale rule", self.scale_rule, SCALE_RULES),
        ):
            if given not in allowed:
                raise ConfigError(f"there is no {what} {given!r}", fix=f"choose one of {', '.join(map(str, allowed))}")

    def __str__(self) -> str:
        rows, k = (n or "K" for n in self.block)
        rounding = "" if self.rounding == "nearest" else ", stochastic"
        return f"{self.format} {self.elem} {rows}x{k}{rounding}"


@dataclass(frozen=True)
class Gemm:
    """One GEMM ``A [M, K] x B [N, K]^T``. None: bf16 operands. ``hadamard``: tile of the random Hadamard transform along K, of both
    operands, since only then it cancels."""

    a: Operand | None = None
    b: Operand | None = None
    hadamard: int | None = None

    def __post_init__(self) -> None:
        if (self.a is None) != (self.b is None):
            raise ConfigError("one operand of a GEMM is quantised and the other is not", fix="quantise both or none")
        if self.hadamard is not None and (self.hadamard not in SIZES or self.a is None):
            raise ConfigError(
                f"hadamard = {self.hadamard} needs quantised operands and one of the tiles {SIZES}", fix="choose 16 or 32, or leave it out"
            )

    @property
    def quantised(self) -> bool:
        return self.a is not None

    def __str__(self) -> str:
        if self.a is None:
            return "bf16"
        what = str(self.a) if self.a == self.b else f"{self.a} | {self.b}"
        return what if self.hadamard is None else f"{what}, RHT {self.hadamard}"


BF16 = Gemm()


@dataclass(frozen=True)
class LinearPolicy:
    """The three GEMMs of ``y = x w^T``, each ``A [., K] x B [., K]^T``:

    ========  ==============  ==============  ====
    GEMM      A               B               K
    ========  ==============  ==============  ====
    fprop     x  [M, in]      w  [out, in]    in
    dgrad     dy [M, out]     w^T [in, out]   out
    wgrad     dy^T [out, M]   x^T [in, M]     M
    ========  ==============  ==============  ====
    """

    fprop: Gemm
    dgrad: Gemm
    wgrad: Gemm
    backend: Backend = "auto"
    hadamard_seed: int = 0

    def with_wgrad_bf16(self) -> LinearPolicy:
        return replace(self, wgrad=BF16)

    def all_bf16(self) -> LinearPolicy:
        return replace(self, fprop=BF16, dgrad=BF16, wgrad=BF16)


def mx_linear(
    *,
    elem: str = "e4m3",
    scale_rule: str = "rceil",
    weight_block: tuple[int, int] = (1, 32),
    stochastic_gradients: bool = False,
    hadamard: int | None = None,
    wgrad: bool = True,
    backend: Backend = "auto",
) -> LinearPolicy:
    """MX for all three GEMMs; stochastic rounding for the gradients only, the Hadamard transform for wgrad only, as is customary."""
    x = Operand("mx", elem, (1, 32), scale_rule)  # type: ignore[arg-type]
    w = replace(x, block=weight_block)
    g = replace(x, rounding="stochastic" if stochastic_gradients else "nearest")
    return LinearPolicy(Gemm(x, w), Gemm(g, w), Gemm(g, x, hadamard) if wgrad else BF16, backend)


def fp8_linear(kind: Literal["rowwise", "block"], *, wgrad: bool = True, backend: Backend = "auto") -> LinearPolicy:
    """Hopper's FP8: one scale a row, or 1x128 strips against 128x128 squares: of weights, and of x in wgrad, since cuBLAS multiplies strips
    by strips a quarter slower."""
    if kind == "rowwise":
        x = w = Operand("fp8", block=(1, 0))
    else:
        x, w = Operand("fp8", block=(1, 128)), Operand("fp8", block=(128, 128))
    return LinearPolicy(Gemm(x, w), Gemm(x, w), Gemm(x, w) if wgrad else BF16, backend)
