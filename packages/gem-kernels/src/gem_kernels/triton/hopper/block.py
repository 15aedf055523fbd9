"""Launching the Hopper kernel of `block_attention`; the backward pass is the portable one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gem_core.ops.contract import Problem
from gem_kernels.triton.common.launch import launch
from gem_kernels.triton.hopper.launch import _addressable, _box

BLOCK = 64


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, cos: Tensor, sin: Tensor,
            rotary_rows: Tensor | None) -> tuple[Tensor, tuple[Any, ...]]:  # fmt: skip
    """See `gem_core.ops.block_attention`; one read of q, k and v, one write of the result."""
    from gem_kernels.triton.hopper.block_fwd import hopper_block_fwd_kernel

    saved = (q, k, v, offsets, cos, sin, rotary_rows)
    (n, heads, d), batch, scale = q.shape, offsets.numel() - 1, problem.option("scale")
    out = torch.empty((n, heads, d), dtype=q.dtype, device=q.device)
    if out.numel():
        launch(
            hopper_block_fwd_kernel, ((n // BLOCK + batch + 1) * heads,), q.device,
            *(_box(_addressable(t), BLOCK) for t in (q, k, v)), _box(out, BLOCK), offsets, cos.contiguous(), sin.contiguous(), rotary_rows,
            batch, n, cos.shape[0], d**-0.5 if scale is None else scale,
            H=heads, D=d, BLOCK=BLOCK, BY_ROW=rotary_rows is not None, num_warps=4,
        )  # fmt: skip
    return out, saved
