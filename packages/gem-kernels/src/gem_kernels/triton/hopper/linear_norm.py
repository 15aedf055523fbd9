"""Launching the Hopper kernel of `linear_norm`; the backward pass is the portable one."""

from __future__ import annotations

import torch
from torch import Tensor

from gem_core.ops.contract import Problem
from gem_kernels.triton.common.device import device_info
from gem_kernels.triton.common.launch import launch
from gem_kernels.triton.dense import linear_norm as portable
from gem_kernels.triton.dense.support import rows_contiguous
from gem_kernels.triton.hopper.norm_linear import addressable, box, row_tiles

BLOCK_K, STAGES = 32, 8

WIDEST = 512
"""A program holds whole rows of the result."""


def forward(problem: Problem, x: Tensor, w: Tensor, b: Tensor | None, norm_weight: Tensor | None,
            norm_bias: Tensor | None) -> tuple[Tensor, portable.Saved]:  # fmt: skip
    """See `gem_core.ops.linear_norm`: x wᵀ is never in memory."""
    from gem_kernels.triton.hopper.linear_norm_fwd import hopper_linear_norm_fwd_kernel

    rows, n = x.shape[0], w.shape[0]
    y = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        tiles, block = row_tiles(n)
        given, weight = addressable(rows_contiguous(x)), addressable(w.contiguous())
        launch(
            hopper_linear_norm_fwd_kernel, (min(device_info(x.device).sms, -(-rows // 128)),), x.device,
            box(given, 128, BLOCK_K), box(weight, block, BLOCK_K), box(y, 64, min(block, 128)), b, norm_weight, norm_bias, rstd,
            rows, problem.option("eps"),
            N=n, K=x.shape[1], BLOCK_C=block, TILES=tiles, BLOCK_K=BLOCK_K, STAGES=STAGES, LAYER=problem.option("kind") == "layer",
            num_warps=4, maxnreg=168,
        )  # fmt: skip
    return y, (x, w, b, norm_weight, norm_bias, y, rstd)
