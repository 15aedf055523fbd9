"""From a problem and its tensors to the launches: quantise Q, K and V, then one attention kernel; and the backward pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gem_core.ops.contract import Problem
from gem_core.ops.contracts import GDPA
from gem_kernels.triton.attention.inputs import Inputs, row_strides
from gem_kernels.triton.attention.launch_backward import backward as plain_backward
from gem_kernels.triton.attention.plan import plan
from gem_kernels.triton.common.device import DeviceInfo
from gem_kernels.triton.common.launch import launch
from gem_kernels.triton.lowp.forward import DECODED, NATIVE, SCALED, lowp_attention_fwd_kernel
from gem_kernels.triton.lowp.quantize import pad_of, quantize_rows, rounded_rows

TILES: dict[int, dict[str, Any]] = {
    SCALED.value: {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 2},
    DECODED.value: {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 2},
    NATIVE.value: {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3},
}
"""By mode. Strips of P are a tile wide in mode NATIVE, so its BLOCK_N is part of the numbers; BLOCK_M divides 128."""


def mode_of(block: int, info: DeviceInfo) -> int:
    """How products are made on this chip."""
    if block == 128:
        return NATIVE.value
    blackwell = info.nvidia and int(info.key.removeprefix("sm_")) >= 100
    return SCALED.value if blackwell else DECODED.value


def forward(problem: Problem, tensors: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor | None]:
    """Output ``[rows, H, Dv]`` and, for softmax, lse ``[H, rows]`` (else None)."""
    assert problem.precision is not None
    p, block = plan(problem), problem.precision.block[0]
    x = Inputs(p, tensors)
    out = torch.empty(x.out_rows, p.heads, p.dv, dtype=x.q.dtype, device=x.device)
    lse = torch.empty(p.heads, x.out_rows, dtype=torch.float32, device=x.device) if p.softmax else None
    if x.out_rows == 0:
        return out, lse
    if x.batch == 0:
        return out.zero_(), None if lse is None else lse.fill_(float("-inf"))
    q_offsets = _q_offsets(x)
    q = quantize_rows(x.q, q_offsets, block, p.q_bound, x.info)
    k = quantize_rows(x.k, x.k_offsets, block, p.k_bound, x.info)
    v = quantize_rows(x.v, x.k_offsets, block, p.k_bound, x.info, transpose=True)
    mode = mode_of(block, x.info)
    tile = TILES[mode]
    tiles = x.q_tiles(tile["BLOCK_M"])
    constants = p.constants(x.info.nvidia, "D", "D_PAD", "DV_PAD", "PRECISION")
    launch(
        lowp_attention_fwd_kernel, (tiles.bound * p.heads,), x.device,
        q.codes, k.codes, v.codes, q.scales, k.scales, v.scales, out, lse, x.q_offsets, x.k_offsets, x.kv_index, x.act_ids,
        tiles.tiles, tiles.count, *row_strides(out), x.batch, x.q_len, x.out_rows, p.left, p.right, q.blocks, k.blocks, v.columns,
        p.scale, p.out_scale * p.folded_gain,
        **constants, D_PAD=pad_of(p.d), DV_PAD=pad_of(p.dv), B=block, MODE=mode, HARDWARE=x.info.nvidia, **tile,
    )  # fmt: skip
    return out, lse


def _q_offsets(x: Inputs) -> Tensor:
    """Queries that all samples share are one sample of their own."""
    if x.q_offsets is not None:
        return x.q_offsets
    return torch.arange(2, device=x.device, dtype=torch.int32) * x.q_len


def backward(problem: Problem, saved: tuple[Tensor | None, ...], dout: Tensor, needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    """The plain backward pass at the quantised operands, with the low-precision forward's output and lse."""
    assert problem.precision is not None
    p, block = plan(problem), problem.precision.block[0]
    x = Inputs(p, saved[: len(GDPA.tensors)])
    rounded = {
        "q": rounded_rows(x.q, _q_offsets(x), block, p.q_bound, x.info),
        "k": rounded_rows(x.k, x.k_offsets, block, p.k_bound, x.info),
        "v": rounded_rows(x.v, x.k_offsets, block, p.k_bound, x.info),
    }
    tensors = [rounded.get(name, t) for name, t in zip(GDPA.tensors, saved)]
    return plain_backward(replace(problem, precision=None), (*tensors, *saved[len(GDPA.tensors) :]), dout, needs, None)
