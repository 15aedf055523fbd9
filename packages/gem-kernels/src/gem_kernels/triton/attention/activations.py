"""The pointwise activations of `gdpa` and their derivatives, as device functions.

A folded activation returns f(x) / gain(f): the constant goes into the epilogue's scale (the GELU family computes x + x·t instead of
0.5·x·(1 + t), one instruction less a score). ``gain`` is 1 where nothing is folded. ``FAST`` 1 (NVIDIA, half-precision tensors) allows the
hardware tanh (within the erf of GELU too), whose absolute error of 2⁻¹¹ is below the rounding of P, and reciprocal; 2 (bf16 tensors) also
packed bf16 arithmetic where the activation names it. Everything else computes the exact form in fp32.
Formulas: `gem_core.ops.activations`; the tanh form of GELU after Hendrycks and Gimpel, arXiv 1606.08415.
"""

# ruff: noqa: SIM102 - a constexpr condition stands alone, so that what it guards is not compiled when it is false

from __future__ import annotations

import torch
import triton
import triton.language as tl

RAW, GELU, GELU_APPROX, FAST_GELU, LEAKY_RELU, RELU, FAST_GELU_BF16, SILU, FAST_SILU, HARDSWISH, RELU_SQUARE, FAST_GELU_TAYLOR = range(12)
IDS = {
    "raw": RAW,
    "gelu": GELU,
    "gelu_approx": GELU_APPROX,
    "fast_gelu": FAST_GELU,
    "leaky_relu": LEAKY_RELU,
    "relu": RELU,
    "fast_gelu_bf16": FAST_GELU_BF16,
    "silu": SILU,
    "fast_silu": FAST_SILU,
    "hardswish": HARDSWISH,
    "relu_square": RELU_SQUARE,
    "fast_gelu_taylor": FAST_GELU_TAYLOR,
}
PER_HEAD = 64
"""``ACT`` of a kernel whose heads differ; ``ACT_SET`` then has a bit for every id in use."""

_HALF_GAIN = frozenset({GELU, GELU_APPROX, FAST_GELU, FAST_GELU_BF16})


def fast(nvidia: bool, dtype: torch.dtype) -> int:
    """``FAST`` of a kernel on tensors of ``dtype``."""
    return {torch.float16: 1, torch.bfloat16: 2}.get(dtype, 0) if nvidia else 0


def gain(act: int) -> float:
    """What a folded activation's result must still be multiplied with."""
    return 0.5 if act in _HALF_GAIN else 1.0


@triton.jit
def _exact_tanh(x):
    # 2σ(2x) - 1 loses nothing that matters: the callers add 1 or multiply with x.
    return 2.0 / (1.0 + tl.exp2(-2.8853900817779268 * x)) - 1.0


@triton.jit
def _tanh(x, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return _exact_tanh(x)


@triton.jit
def _fast_erf(x, s):
    """erf(x / √2) for s = x², within 3e-5 / x before the error of the hardware tanh: tanh of a polynomial fitted to atanh(erf)."""
    c = tl.minimum(s, 40.0)
    return _tanh(x * (0.7974715616954575 + c * (0.03703858594548714 - 0.0003568485767211807 * c)), True)


@triton.jit
def _reciprocal(x, FAST: tl.constexpr):
    """1 / x for x >= 1; FAST: one instruction, to a unit in the last place, where a division also guards against overflow."""
    if FAST:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return 1.0 / x


@triton.jit
def _exp2(x, FAST: tl.constexpr):
    """2^x; FAST: one instruction, which takes subnormal results for 0 (three more would scale around them)."""
    if FAST:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.exp2(x)


@triton.jit
def _gelu_bf16(x):
    """x + x·tanh(...) in packed bf16 arithmetic: half the instructions of fp32, the rounding of bf16 in every step."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 sq, u, t, c0, c1;
        mov.b32 c0, 0x3f4c3f4c;
        mov.b32 c1, 0x3d123d12;
        mul.rn.bf16x2 sq, $1, $1;
        fma.rn.bf16x2 u, sq, c1, c0;
        mul.rn.bf16x2 u, u, $1;
        tanh.approx.bf16x2 t, u;
        fma.rn.bf16x2 $0, $1, t, $1;
        }
        """,
        "=r,r",
        [x.to(tl.bfloat16)],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def _value(x, ACT: tl.constexpr, FAST: tl.constexpr):
    """f(x) / gain."""
    if ACT == 0:
        return x
    elif ACT == 1 and FAST:
        return x + x * _fast_erf(x, x * x)
    elif ACT == 1:
        return x + x * tl.erf(x * 0.7071067811865476)
    elif ACT == 2 or (ACT == 3 and not FAST) or (ACT == 6 and not FAST):
        return 2.0 * x * _reciprocal(1.0 + _exp2(x * (-2.302208198 - 0.1029432397 * x * x), FAST), FAST)
    elif ACT == 3 or (ACT == 6 and FAST == 1):
        return x + x * _tanh(x * (0.7978845608 + 0.0356774081 * x * x), True)
    elif ACT == 4:
        return tl.where(x > 0, x, 0.01 * x)
    elif ACT == 5:
        return tl.maximum(x, 0.0)
    elif ACT == 6:
        return _gelu_bf16(x)
    elif ACT == 7 or (ACT == 8 and not FAST):
        return x * _reciprocal(1.0 + _exp2(-1.4426950408889634 * x, FAST), FAST)
    elif ACT == 8:
        half = 0.5 * x
        return half + half * _tanh(half, True)
    elif ACT == 9:
        return x * tl.minimum(tl.maximum(x * 0.16666666666666666 + 0.5, 0.0), 1.0)
    elif ACT == 10:
        r = tl.maximum(x, 0.0)
        return r * r
    else:
        c = tl.minimum(tl.maximum(x, -1.5), 1.5)
        s = c * c
        poly = 0.5 * c + s * (0.3989422804 + s * (-0.0664903801 + s * 0.0099735570))
        return poly + tl.maximum(x - 1.5, 0.0)


@triton.jit
def _value_and_slope(x, ACT: tl.constexpr, FAST: tl.constexpr):
    """f(x) / gain and f'(x) / gain."""
    if ACT == 0:
        return x, tl.where(x > 0, 1.0, 1.0)
    elif ACT == 1:
        s = x * x
        if FAST:
            e = 1.0 + _fast_erf(x, s)
        else:
            e = 1.0 + tl.erf(x * 0.7071067811865476)
        return x * e, e + x * (0.7978845608028654 * _exp2(-0.7213475204444817 * s, FAST))
    elif ACT == 2 or ACT == 3 or ACT == 6:
        s = x * x
        if (ACT == 3 or ACT == 6) and FAST:
            t = _tanh(x * (0.7978845608 + 0.0356774081 * s), True)
            e = 1.0 + t
            rest = 1.0 - t
        else:
            e = 2.0 * _reciprocal(1.0 + _exp2(x * (-2.302208198 - 0.1029432397 * s), FAST), FAST)
            rest = 2.0 - e
        return x * e, e + x * e * rest * (0.7978845608 + 0.1070322243 * s)
    elif ACT == 4:
        return tl.where(x > 0, x, 0.01 * x), tl.where(x > 0, 1.0, 0.01)
    elif ACT == 5:
        return tl.maximum(x, 0.0), tl.where(x > 0, 1.0, 0.0)
    elif ACT == 7 or ACT == 8:
        if ACT == 8 and FAST:
            sig = 0.5 + 0.5 * _tanh(0.5 * x, True)
        else:
            sig = _reciprocal(1.0 + _exp2(-1.4426950408889634 * x, FAST), FAST)
        y = x * sig
        return y, sig + y * (1.0 - sig)
    elif ACT == 9:
        ramp = tl.minimum(tl.maximum(x * 0.16666666666666666 + 0.5, 0.0), 1.0)
        slope = tl.where(x <= -3.0, 0.0, tl.where(x >= 3.0, 1.0, x * 0.3333333333333333 + 0.5))
        return x * ramp, slope
    elif ACT == 10:
        r = tl.maximum(x, 0.0)
        return r * r, 2.0 * r
    else:
        c = tl.minimum(tl.maximum(x, -1.5), 1.5)
        s = c * c
        poly = 0.5 * c + s * (0.3989422804 + s * (-0.0664903801 + s * 0.0099735570))
        slope = 0.5 + c * (0.7978845608 + s * (-0.2659615204 + s * 0.0598413420))
        return poly + tl.maximum(x - 1.5, 0.0), tl.where(x > 1.5, 1.0, tl.where(x < -1.5, 0.0, slope))


@triton.jit
def activate(x, act_id, ACT: tl.constexpr, ACT_SET: tl.constexpr, FAST: tl.constexpr):
    """``f(x) / gain``; with ``ACT == PER_HEAD`` the head's ``act_id`` chooses at run time and the gain is applied here."""
    if ACT == 64:
        y = x
        for a in tl.static_range(12):
            if (ACT_SET >> a) & 1:
                if act_id == a:
                    y = _value(x, a, FAST).to(tl.float32)
                    if a == 1 or a == 2 or a == 3 or a == 6:
                        y = y * 0.5
    else:
        y = _value(x, ACT, FAST)
    return y


@triton.jit
def activate_with_slope(x, act_id, ACT: tl.constexpr, ACT_SET: tl.constexpr, FAST: tl.constexpr):
    """Value and derivative, with the same folding as `activate`."""
    if ACT == 64:
        y = x
        slope = x
        for a in tl.static_range(12):
            if (ACT_SET >> a) & 1:
                if act_id == a:
                    value, rate = _value_and_slope(x, a, FAST)
                    y = value.to(tl.float32)
                    slope = rate.to(tl.float32)
                    if a == 1 or a == 2 or a == 3 or a == 6:
                        y = y * 0.5
                        slope = slope * 0.5
    else:
        y, slope = _value_and_slope(x, ACT, FAST)
    return y, slope
