"""Launching the Hopper kernels of `mlp`; the products behind the hidden layer are the vendor's, as in the portable implementation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gem_core.ops.contract import Problem
from gem_kernels.triton.attention.activations import IDS, fast, gain
from gem_kernels.triton.common.device import device_info
from gem_kernels.triton.common.launch import launch
from gem_kernels.triton.dense import mlp as portable
from gem_kernels.triton.dense.support import column_sum, rows_contiguous
from gem_kernels.triton.hopper.norm_linear import addressable, box

BLOCK_H = 128
_ROOM = 224 << 10
"""Shared memory for tiles; the rest is barriers and what reductions need."""


def forward(problem: Problem, x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None,
            residual: Tensor | None) -> tuple[Any, portable.Saved]:  # fmt: skip
    """See `gem_core.ops.mlp`: reads x once, writes y once. The portable kernel where it is faster (64 columns), and for a residual or two
    widths."""
    width = x.shape[1]
    if residual is not None or w2.shape[0] != width or width not in (128, 256):
        return portable.forward(problem, x, w1, b1, w2, b2, residual)
    from gem_kernels.triton.hopper.mlp_fwd import hopper_mlp_fwd_kernel

    rows = x.shape[0]
    norm, layer = problem.option("norm") is not None, problem.option("norm") == "layer"
    y = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    mean, rstd = (torch.empty(n, dtype=torch.float32, device=x.device) for n in (rows if layer else 0, rows if norm else 0))
    if rows:
        given, up, down = (addressable(t) for t in (rows_contiguous(x), w1.contiguous(), w2.contiguous()))
        act = IDS[problem.option("activation")]
        launch(
            hopper_mlp_fwd_kernel, (min(device_info(x.device).sms, -(-rows // 128)),), x.device,
            box(given, 64, width), box(up, 64, width), box(down, width, 64), box(y, 64, width), b1, b2,
            up.float().sum(1) if layer else None, mean, rstd, rows, problem.option("eps"), gain(act),
            IN=width, HIDDEN=w1.shape[0], BLOCK_H=64, ACT=act, FAST=fast(True, x.dtype), NORM=norm, LAYER=layer, num_warps=4, maxnreg=168,
        )  # fmt: skip
    return (y, None), (x, w1, b1, w2, b2, mean, rstd)


def backward(problem: Problem, saved: Any, dout: Any, needs: tuple[bool, ...]) -> portable.Saved:
    """See `gem_kernels.triton.dense.mlp.backward`."""
    return portable.backward(problem, saved, dout, needs, _hidden)


def shared_bytes(width: int, out: int, stages: int, buffers: int) -> int:
    """Of both weights' slices, the ring of 128 x 64 tiles and the buffers that results leave through."""
    return 2 * BLOCK_H * (width + out) + stages * 2 * 128 * 64 + buffers * 2 * 2 * 64 * BLOCK_H


def plan(width: int, out: int) -> tuple[int, int]:
    """(slots of the ring, whole buffers' worth of room for results a warpgroup): two where at least six slots fit beside them."""
    for buffers, least in ((2, 6), (1, 3)):
        stages = (_ROOM - shared_bytes(width, out, 0, buffers)) // (2 * 128 * 64)
        if stages >= least:
            return min(stages, 8), buffers
    raise ValueError(f"no room for {width} and {out} columns")


def _hidden(
    problem: Problem, x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, dy: Tensor, mean: Tensor | None, rstd: Tensor | None,
    want_db1: bool, want_db2: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """act(z) and dz of these rows, and the column sums of dz and dy (no columns where they are not wanted)."""
    if max(x.shape[1], w2.shape[0]) > 128 and problem.option("norm") is None:
        return _hidden_wide(problem, x, w1, b1, w2, dy, want_db1, want_db2)
    from gem_kernels.triton.hopper.mlp_bwd import hopper_mlp_bwd_kernel

    rows, width = x.shape
    size, out = w1.shape[0], w2.shape[0]
    layer = problem.option("norm") == "layer"
    hidden, dhidden = (torch.empty((rows, size), dtype=x.dtype, device=x.device) for _ in range(2))
    slices = size // BLOCK_H
    walks = max(1, min(device_info(x.device).sms // slices, -(-rows // 128)))
    sums = torch.empty((8 * walks, size if want_db1 else 0), dtype=torch.float32, device=x.device)
    stages, buffers = plan(width, out)
    parts = 3 - buffers
    own = max(width, out) > 128  # the ring is short there
    # a program adds up one chunk of 64 columns of dy; of narrower ones that was not timed
    beside = want_db2 and own and slices >= out // 64
    dy_sums = torch.empty((8 * walks, out if beside else 0), dtype=torch.float32, device=x.device)
    ring_rows = 64 if own else 128
    if rows:
        given, grad, up, down = (addressable(t) for t in (x, dy, w1.contiguous(), w2.contiguous()))
        act = IDS[problem.option("activation")]
        launch(
            hopper_mlp_bwd_kernel, (walks * slices,), x.device,
            box(given, ring_rows, 64), box(grad, ring_rows, 64), box(up, BLOCK_H, 64), box(down, 64, BLOCK_H),
            *(t if t.is_contiguous() else None for t in (given, grad)), *(box(t, 64, BLOCK_H // parts) for t in (hidden, dhidden)),
            b1, up.float().sum(1) if layer else None, mean, rstd,
            sums if want_db1 else None, dy_sums if beside else None, rows, slices, gain(act),
            HIDDEN=size, KX=width // 64, KD=out // 64, OWN=own, BLOCK_H=BLOCK_H, STAGES=stages, PARTS=parts, ACT=act,
            FAST=fast(True, x.dtype), NORM=problem.option("norm") is not None, LAYER=layer, num_warps=4, maxnreg=168,
        )  # fmt: skip
    else:
        sums.zero_()
        dy_sums.zero_()
    db2 = column_sum(dy) if want_db2 and not beside else dy_sums.sum(0)
    return hidden, dhidden, sums.sum(0), db2


def _hidden_wide(
    problem: Problem, x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, dy: Tensor, want_db1: bool, want_db2: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`_hidden` of more than 128 columns without a norm: twice as many hidden columns a program, half as many loads."""
    from gem_kernels.triton.hopper.mlp_bwd_wide import hopper_mlp_bwd_wide_kernel

    rows, width = x.shape
    size, out = w1.shape[0], w2.shape[0]
    hidden, dhidden = (torch.empty((rows, size), dtype=x.dtype, device=x.device) for _ in range(2))
    slices = -(-size // 256)
    walks = max(1, min(device_info(x.device).sms // slices, -(-rows // 64)))
    beside = want_db2 and slices >= out // 64  # a program adds up one chunk of 64 columns of dy
    parts = torch.empty((walks, size + 8 * out), dtype=torch.float32, device=x.device)
    if rows:
        given, grad, up, down = (addressable(t) for t in (x, dy, w1.contiguous(), w2.contiguous()))
        act = IDS[problem.option("activation")]
        launch(
            hopper_mlp_bwd_wide_kernel, (walks * slices,), x.device,
            box(given, 64, 64), box(grad, 64, 64), box(up, 128, 64), box(down, 64, 64),
            *(t if t.is_contiguous() else None for t in (given, grad)), *(box(t, 32, 64) for t in (hidden, dhidden)),
            b1, parts, rows, gain(act),
            HIDDEN=size, KX=width // 64, KD=out // 64, TILES=max(1, 8 * 64 // (width + out)), ACT=act, FAST=fast(True, x.dtype),
            DB1=want_db1, DB2=beside, num_warps=4, maxnreg=168,
        )  # fmt: skip
    else:
        parts.zero_()
    db1 = parts[:, :size].sum(0) if want_db1 else parts[0, :0]
    if beside:
        db2 = parts[:, size:].reshape(-1, out).sum(0)
    else:
        db2 = column_sum(dy) if want_db2 else parts[0, :0]
    return hidden, dhidden, db1, db2
