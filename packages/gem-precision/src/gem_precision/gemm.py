"""Quantised matrix products: quantise an operand along its K, then multiply with one of three back ends.

``emulated`` decodes both operands and multiplies in bf16 or fp32 (exact for E4M3 x 2^e: four significant bits); it runs anywhere and is
what the others are tested against. ``torch`` is cuBLAS through ``torch._scaled_mm``. ``triton`` is this package's ``tl.dot_scaled`` kernel.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from gem_core.errors import OpError
from gem_core.ops.contract import YES, Supported, no
from gem_precision import kernels
from gem_precision.formats import FP8, MX, quantize_fp8, quantize_mx, swizzle_scales
from gem_precision.formats.random import draw_seed, random_bits
from gem_precision.hadamard import random_hadamard
from gem_precision.kernels.block_gemm import block_gemm, parts_of, serves
from gem_precision.kernels.decode import decode_matrix, decodes
from gem_precision.kernels.quantize import column_sums, quantize_matrix, serves_mixed, takes
from gem_precision.policy import Gemm, Operand

Quantised = MX | FP8
log = logging.getLogger("gem_precision")

PAD = 32
"""Multiple that the kernels fill K of wgrad's operands up to: token counts are what they are, and cuBLAS wants 16 (FP8) or 32 (MX)."""

ROWS = 4
"""Multiple that cuBLAS wants of the rows of strips of 1x128: their scales lie column after column, 16 bytes aligned."""

_said: set[str] = set()


def quantise(
    x: Tensor,
    operand: Operand,
    *,
    along: int = 1,
    hadamard: int | None = None,
    hadamard_seed: int = 0,
    generator: torch.Generator | None = None,
    pad: int = 1,
) -> Quantised:
    """Matrix ``x`` as the operand ``[rows, K]``, K being dim ``along`` of x (0: the result is of x transposed).
    ``pad``: with the kernels and ``along`` 0, K is filled up with zeros to a multiple of this."""
    if hadamard is not None:
        # fp32, so that the quotient is rounded once
        wide = x.to(torch.float32)
        x, along = random_hadamard(wide if along == 1 else wide.t(), hadamard, hadamard_seed), 1
    if kernels.usable(x) and takes(operand):
        done = quantize_matrix(x, *((operand, None) if along == 1 else (None, operand)), generator=generator, pad=pad)
        found = done.rows if along == 1 else done.columns
        assert found is not None
        return found
    block = operand.block if along == 1 else (operand.block[1], operand.block[0])
    if operand.format == "mx":
        q: Quantised = quantize_mx(
            x, elem=operand.elem, block=block, scale_rule=operand.scale_rule, rounding=operand.rounding, generator=generator
        )
    else:
        bits = None
        if operand.rounding == "stochastic":
            bits = random_bits(draw_seed(generator, x.device), tuple(x.shape))
        q = quantize_fp8(x, elem=operand.elem, block=block, random_bits=bits)
    return q if along == 1 else q.transpose()


def quantise_both(
    x: Tensor,
    rows: Gemm,
    row_operand: Operand,
    columns: Gemm,
    column_operand: Operand,
    *,
    hadamard_seed: int = 0,
    generator: torch.Generator | None = None,
    sums: bool = False,
) -> tuple[Quantised, Quantised, Tensor | None]:
    """``x`` as an operand of two GEMMs: ``[R, K = C]`` of ``rows`` and, transposed, ``[C, K = R]`` of ``columns``; in one read of x
    where the kernels can. With ``sums`` also the sums of x's columns ``[C]``, fp32."""
    one_read = (
        rows.hadamard is None and columns.hadamard is None and kernels.usable(x) and takes(row_operand)
        and (replace(row_operand, rounding="nearest") == replace(column_operand, rounding="nearest")
             or serves_mixed(row_operand, column_operand))
        and (row_operand.block[0] == 1 or row_operand == column_operand)
    )  # fmt: skip
    if one_read:
        done = quantize_matrix(x, row_operand, column_operand, generator=generator, pad=PAD, sums=sums)
        assert done.rows is not None
        assert done.columns is not None
        return done.rows, done.columns, done.sums
    options = {"hadamard_seed": hadamard_seed, "generator": generator}
    first = quantise(x, row_operand, hadamard=rows.hadamard, **options)  # type: ignore[arg-type]
    second = quantise(x, column_operand, along=0, hadamard=columns.hadamard, pad=PAD, **options)  # type: ignore[arg-type]
    return first, second, column_sums(x) if sums else None


def high_precision_gemm(a: Tensor, b: Tensor, out_dtype: torch.dtype, bias: Tensor | None = None, plus: Tensor | None = None) -> Tensor:
    """``a [M, K] @ b [N, K]^T`` (+ ``bias [N]`` and ``plus [M, N]`` in ``out_dtype``) with bf16 operands and fp32 accumulation."""
    a, b = a.to(torch.bfloat16), b.to(torch.bfloat16)
    if bias is not None and a.is_cuda and out_dtype == torch.bfloat16:
        return _plus(torch.addmm(bias, a, b.t()), plus)
    return _plus(_accumulate(a, b, out_dtype), bias, plus)


def _plus(y: Tensor, *others: Tensor | None) -> Tensor:
    for other in others:
        y = y if other is None else y.add_(other)
    return y


def _accumulate(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    if a.is_cuda:
        if out_dtype == torch.bfloat16:
            return torch.mm(a, b.t())
        return torch.mm(a, b.t(), out_dtype=torch.float32).to(out_dtype)
    return torch.mm(a.float(), b.float().t()).to(out_dtype)


def gemm(
    a: Quantised, b: Quantised, out_dtype: torch.dtype, backend: str = "auto", bias: Tensor | None = None, plus: Tensor | None = None
) -> Tensor:
    """``a [M, K] @ b [N, K]^T`` (+ ``bias [N]`` and ``plus [M, N]`` in ``out_dtype``) of quantised operands, accumulated in fp32.

    :raises OpError: K differs, or the named back end cannot do it.
    """
    if a.shape[1] != b.shape[1]:
        raise OpError(f"K differs: {_say(a)} and {_say(b)}", where="gemm")
    if backend == "auto":
        backend = next(name for name in _ORDER if supports(name, a, b))
        if backend == "emulated" and a.data.is_cuda:
            _warn_once(a, b)
    else:
        answer = supports(backend, a, b)
        if not answer:
            raise OpError(
                f"back end {backend!r} cannot multiply {_say(a)} by {_say(b)}: {answer.reason}",
                where="backend",
                fix='choose backend = "auto" or "emulated"',
            )
    if backend == "torch":
        return _scaled_mm(a, b, out_dtype, bias, plus)
    if backend == "triton":
        from gem_precision.kernels.scaled_gemm import scaled_gemm

        return _plus(scaled_gemm(cast(MX, a), cast(MX, b), out_dtype), bias, plus)
    return _plus(_emulated(a, b, out_dtype), bias, plus)


def _warn_once(a: Quantised, b: Quantised) -> None:
    """Once a pair of formats, with the reasons that the first such product has."""
    what = f"{type(a).__name__} {a.elem} {a.block} and {b.block}"
    if what not in _said:
        _said.add(what)
        reasons = "; ".join(f"{name}: {supports(name, a, b).reason}" for name in _ORDER[:-1])
        log.warning("emulated products of %s, slower than bf16; the first because %s", what, reasons)


_ORDER = ("torch", "triton", "emulated")
_MX_STRIPS = ((1, 32), (32, 32))


def strip_scales(q: MX) -> Tensor:
    """Scale bytes ``[rows, ceil(K/32)]``, one a strip of 1x32, also of an operand in squares of 32x32."""
    return q.scales if q.block[0] == 1 else q.scales.repeat_interleave(32, dim=0)[: q.shape[0]]


def supports(backend: str, a: Quantised, b: Quantised) -> Supported:
    """Whether a back end multiplies these operands on their device; the reason where it does not."""
    if backend == "emulated":
        return YES
    if backend not in _ORDER:
        raise OpError(f"there is no back end called {backend!r}", where="backend", fix=f"choose one of auto, {', '.join(_ORDER)}")
    device = a.data.device
    if type(a) is not type(b):
        return no("the operands are of different families")
    if device.type != "cuda":
        return no(f"the tensors are on {device.type}")
    arch = _arch(device)
    if backend == "torch":
        return _torch_supports(a, b, arch)
    if not isinstance(a, MX):
        return no("the kernel takes MX operands")
    if not kernels.triton_installed():
        return no("triton is not installed")
    if a.block not in _MX_STRIPS or b.block not in _MX_STRIPS:
        return no(f"the kernel takes blocks of 1x32 along K, got {a.block} and {b.block}")
    if a.elem not in ("e4m3", "e5m2") or b.elem not in ("e4m3", "e5m2"):
        return no("the kernel takes 8-bit elements")
    if arch < 100:
        return no(f"sm_{arch} has no block-scaled instructions: the kernel would emulate them more slowly than a bf16 GEMM")
    return YES


def _torch_supports(a: Quantised, b: Quantised, arch: int) -> Supported:
    k, n = a.shape[1], b.shape[0]
    if a.elem == b.elem == "e5m2":
        return no("cuBLAS has no E5M2 x E5M2")
    if k % 16 or n % 16:
        return no(f"K = {k} and N = {n} must be multiples of 16")
    if isinstance(a, MX):
        if arch < 100:
            return no(f"block-scaled MX needs sm_100, this is sm_{arch}")
        if a.block not in _MX_STRIPS or b.block not in _MX_STRIPS or k % 32:
            return no("needs blocks of 1x32 or 32x32 and K a multiple of 32")
        return YES if a.elem == b.elem == "e4m3" else no("needs E4M3")
    blocks = a.block, b.block
    if blocks == ((1, 0), (1, 0)):
        return YES if arch >= 89 else no(f"FP8 needs sm_89, this is sm_{arch}")
    if blocks in (((1, 128), (128, 128)), ((1, 128), (1, 128))):
        if arch != 90:
            return no(f"blocks of 128 are for sm_90, this is sm_{arch}")
        return YES
    return no(f"no kernel for the blocks {blocks}")


def _arch(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _say(q: Quantised) -> str:
    return f"{type(q).__name__} {q.elem} {q.block} {tuple(q.shape)} on {q.data.device}"


def _emulated(a: Quantised, b: Quantised, out_dtype: torch.dtype) -> Tensor:
    narrow = a.data.is_cuda and isinstance(a, MX) and isinstance(b, MX)
    # E8M0 x a few bits is exact in bf16; fp32 scales are not, so FP8 is decoded to fp32
    if narrow:
        return _accumulate(_decoded(a, torch.bfloat16), _decoded(b, torch.bfloat16), out_dtype)
    return torch.mm(_decoded(a, torch.float32), _decoded(b, torch.float32).t()).to(out_dtype)


def _decoded(q: Quantised, dtype: torch.dtype) -> Tensor:
    return decode_matrix(q, dtype) if q.data.is_cuda and decodes(q) else q.dequantize(dtype)


def _scaled_mm(
    a: Quantised, b: Quantised, out_dtype: torch.dtype, bias: Tensor | None = None, plus: Tensor | None = None
) -> Tensor:  # fmt: skip
    rows = a.shape[0]
    if isinstance(a, FP8) and isinstance(b, FP8) and serves(a, b) and (parts := parts_of(a, b)):
        return block_gemm(a, b, parts, out_dtype, bias, plus)
    if isinstance(a, FP8) and a.block == (1, 128) and rows % ROWS:
        a = FP8(with_spare_rows(a.data), F.pad(a.scales, (0, 0, 0, -rows % ROWS), value=1.0), a.elem, a.block)
    if bias is not None and not (
        out_dtype == torch.bfloat16 and bias.is_contiguous() and adds_bias(a.data.device, type(a).__name__, a.block, b.block)
    ):
        return _plus(_aligned_scaled_mm(a, b, out_dtype)[:rows], bias, plus)
    return _plus(_aligned_scaled_mm(a, b, out_dtype, bias)[:rows], plus)


@functools.lru_cache(maxsize=16)
def adds_bias(device: torch.device, family: str, a_block: tuple[int, int], b_block: tuple[int, int]) -> bool:
    """Whether cuBLAS adds a bias to such a product before it is rounded; asked of the library by a product of 128 each, once."""
    x = torch.zeros(128, 128, dtype=torch.bfloat16, device=device)
    bias = torch.ones(128, dtype=torch.bfloat16, device=device)
    quantize: Any = quantize_mx if family == "MX" else quantize_fp8
    a, b = (quantize(x, block=block) for block in (a_block, b_block))
    try:
        return bool((_aligned_scaled_mm(a, b, torch.bfloat16, bias) == 1).all())
    except (RuntimeError, ValueError):
        return False


def with_spare_rows(data: Tensor) -> Tensor:
    """``data [M, K]`` with rows up to a multiple of ROWS: those that its storage has behind it (the kernels leave some), whatever they
    hold, since each row makes only its own row of the product; else a copy."""
    m, k = data.shape
    padded = -(-m // ROWS) * ROWS
    if data.is_contiguous() and data.untyped_storage().nbytes() >= (data.storage_offset() + padded * k) * data.element_size():
        return data.as_strided((padded, k), (k, 1))
    return F.pad(data.view(torch.uint8), (0, 0, 0, padded - m)).view(data.dtype)


def _aligned_scaled_mm(a: Quantised, b: Quantised, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    left, right = _k_innermost(a.data), _k_innermost(b.data).t()
    if isinstance(a, MX) and isinstance(b, MX):
        scale_a = swizzle_scales(strip_scales(a)).view(torch.float8_e8m0fnu)
        scale_b = swizzle_scales(strip_scales(b)).view(torch.float8_e8m0fnu)
    elif a.block == (1, 0):
        scale_a, scale_b = a.scales.contiguous(), b.scales.contiguous().t()
    else:
        # strips want the rows innermost, squares want K innermost
        scale_a = a.scales.t().contiguous().t()
        if b.block == (128, 128) and b.scales.shape[1] % 4:
            return _plus(_blockwise_padded(left, right, scale_a, b.scales, out_dtype), bias)
        scale_b = (b.scales.contiguous() if b.block == (128, 128) else b.scales.t().contiguous().t()).t()
    kernel_dtype = torch.bfloat16 if isinstance(a, FP8) and a.block == (1, 0) else out_dtype
    return torch._scaled_mm(left, right, scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=kernel_dtype).to(out_dtype)


def _k_innermost(data: Tensor) -> Tensor:
    return data if data.stride(1) == 1 else data.contiguous()


def _blockwise_padded(left: Tensor, right: Tensor, strips: Tensor, squares: Tensor, out_dtype: torch.dtype) -> Tensor:
    out = torch.empty(left.shape[0], right.shape[1], dtype=out_dtype, device=left.device)
    return _blockwise(left, right, strips, _rows_of_four(squares), out)


def _rows_of_four(squares: Tensor) -> Tensor:
    """``[N/128, K/128]`` as ``[K/128, N/128]``, K innermost and up to a multiple of four: cuBLAS reads them so, and `torch._scaled_mm`
    refuses rows that are padded to that."""
    return F.pad(squares, (0, -squares.shape[1] % 4)).contiguous().t()


def _blockwise(left: Tensor, right: Tensor, strips: Tensor, squares: Tensor, out: Tensor) -> Tensor:
    """``left [M, K] @ right [K, N]`` into ``out``; scales ``strips [M, K/128]``, ``squares [K/128, N/128]``, see `_rows_of_four`."""
    from torch.nn.functional import ScalingType

    return torch.ops.aten._scaled_mm_v2.out(
        left, right, [strips], [ScalingType.BlockWise1x128.value], [], [squares], [ScalingType.BlockWise128x128.value], [], None, out.dtype,
        out=out,
    )  # fmt: skip
