"""Launching the block_attention kernels on the tensors of the op's contract."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gem_core.ops import siblings
from gem_core.ops.contract import Problem
from gem_kernels.triton.block import kernels
from gem_kernels.triton.common.configs import Config, choose
from gem_kernels.triton.common.device import DeviceInfo, device_info
from gem_kernels.triton.common.launch import launch

Saved = tuple[Tensor | None, ...]


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, cos: Tensor | None, sin: Tensor | None,
            rotary_rows: Tensor | None) -> tuple[Tensor, Saved]:  # fmt: skip
    """See `gem_core.ops.block_attention`; one read of q, k and v, one write of the result, no other memory."""
    saved = (q, k, v, offsets, cos, sin, rotary_rows)
    q, k, v = (_rows_last_contiguous(t) for t in (q, k, v))
    out = torch.empty((*q.shape[:2], v.shape[2]), dtype=q.dtype, device=q.device)

    def run(config: Config) -> None:
        strides = _strides(q, k, v, out)
        _launch(kernels.block_fwd_kernel, problem, (q, k, v, out), strides, offsets, cos, sin, rotary_rows, config)

    if out.numel():
        info = device_info(q.device)
        run(choose("block.forward", facts(problem), info, lambda: candidates(problem, info), run))
    return out, saved


def backward(problem: Problem, saved: Saved, dout: Tensor, needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    """Gradients of q, k and v from one kernel without atomics: 4 tensors read, 3 written, bit-equal from run to run. Those of slices of one
    projection are slices of one tensor."""
    q, k, v, offsets, cos, sin, rotary_rows = saved
    q, k, v, dout = (_rows_last_contiguous(t) for t in (q, k, v, dout))
    dq, dk, dv = grads = [g for g in siblings.empty_grads((q, k, v), (True, True, True)) if g is not None]

    def run(config: Config) -> None:
        strides = [*_strides(q, k, v, dout), *(g.stride(0) for g in grads)]
        _launch(kernels.block_bwd_kernel, problem, (q, k, v, dout, dq, dk, dv), strides, offsets, cos, sin, rotary_rows, config)

    if q.numel():
        info = device_info(q.device)
        run(choose("block.backward", facts(problem), info, lambda: candidates(problem, info), run))
    return tuple(g if need else None for g, need in zip((dq, dk, dv), needs))


def facts(problem: Problem) -> tuple[tuple[str, Any], ...]:
    """What the choice of a tile configuration depends on."""
    return (
        ("block", problem.option("block_size", 64)),
        ("d", max(problem.dim("D"), problem.dim("Dv"))),
        ("dtype", str(problem.dtype("q")).removeprefix("torch.")),
        ("group", problem.dim("H") // problem.dim("Hkv")),
        ("kv_heads", problem.dim("Hkv")),
        ("rotary", "rotary_cos" in problem.present),
    )


def candidates(problem: Problem, info: DeviceInfo) -> list[Config]:
    """Best guess first. ``HEADS`` key/value heads a program share its rotary angles; more heads in flight hide the loads' latency."""
    block, d, kv_heads = problem.option("block_size", 64), max(problem.dim("D"), problem.dim("Dv")), problem.dim("Hkv")
    wide, grouped = problem.dtype("q") == torch.float32, problem.dim("H") > kv_heads
    guess = {"HEADS": 1, "STAGES": 1, "num_warps": 8 if grouped or block * d > 64 * 128 else 4}
    if wide:
        # Eight warps on 64 rows make both warpgroups compute all rows, which gives wrong products of tf32 where a side has 16 columns.
        narrow = min(problem.dim("D"), problem.dim("Dv"))
        guess["num_warps"] = 4 if block == 64 and (d <= 64 or narrow <= 16) else 8
    found = [guess]
    if wide:
        return found
    for heads in (h for h in (1, 2, 4) if kv_heads % h == 0):
        for warps in (4, 8):
            for stages in (1,) if heads == 1 else (1, 2):
                found.append({"HEADS": heads, "STAGES": stages, "num_warps": warps})
    if info.nvidia:
        found += [{"HEADS": 1, "STAGES": 1, "num_warps": 4, "maxnreg": 168}, {"HEADS": 1, "STAGES": 1, "num_warps": 8, "maxnreg": 128}]
    return [guess, *(c for c in found[1:] if c != guess)]


def _strides(*tensors: Tensor) -> list[int]:
    return [t.stride(i) for t in tensors for i in (0, 1)]


def _launch(kernel: Any, problem: Problem, tensors: tuple[Tensor, ...], strides: list[int], offsets: Tensor,
            cos: Tensor | None, sin: Tensor | None, rotary_rows: Tensor | None, config: Config) -> None:  # fmt: skip
    n, _, d = tensors[0].shape
    dv = problem.dim("Dv")
    kv_heads, block, batch = problem.dim("Hkv"), problem.option("block_size", 64), offsets.numel() - 1
    scale = problem.option("scale")
    # fp32 on NVIDIA: three tf32 products (error about 1e-6) run on tensor cores, "ieee" would be scalar code that spills
    precision = "tf32x3" if device_info(tensors[0].device).nvidia else "ieee"
    meta = dict(config)
    heads = math.gcd(meta.pop("HEADS"), kv_heads)
    slots = n // block + batch + 1
    launch(
        kernel, (slots * (kv_heads // heads),), tensors[0].device,
        *tensors, offsets, cos if cos is None else cos.contiguous(), sin if sin is None else sin.contiguous(), rotary_rows,
        batch, n, 0 if cos is None else cos.shape[0], d**-0.5 if scale is None else scale,
        *strides,
        GROUP=problem.dim("H") // kv_heads, KV_HEADS=kv_heads, HEADS=heads, D=d, DP=_padded(d), DV=dv, DVP=_padded(dv), BLOCK=block,
        ROTARY=cos is not None, BY_ROW=rotary_rows is not None, PRECISION=precision, **meta,
    )  # fmt: skip


def _padded(d: int) -> int:
    return max(16, 1 << (d - 1).bit_length())


def _rows_last_contiguous(t: Tensor) -> Tensor:
    """Views of a fused projection are read where they are; only where elements of a head are not adjacent, or rows so far apart that
    32 bits do not address a tile, a copy is made."""
    return t if t.numel() == 0 or (t.stride(-1) == 1 and t.stride(0) < 1 << 23) else t.contiguous()
