"""Launching the Hopper kernels of `norm_linear`; the backward pass is the portable one, its gradient of x another where that is faster."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gem_core.ops.contract import Problem
from gem_kernels.triton.common.device import device_info
from gem_kernels.triton.common.launch import launch
from gem_kernels.triton.dense import norm_linear as portable
from gem_kernels.triton.dense.norm_linear import fold
from gem_kernels.triton.dense.support import power_of_two, rows_contiguous

BLOCK_K, STAGES = 32, 6

MANY_ROWS = 1 << 17
"""From here on the kernel for the gradient of x was timed, with rows of 512."""


def forward(problem: Problem, x: Tensor, w: Tensor, b: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None,
            residual: Tensor | None) -> tuple[Any, tuple[Tensor | None, ...]]:  # fmt: skip
    """See `gem_core.ops.norm_linear`: x is read once and not written in normalised form."""
    from gem_kernels.triton.hopper.norm_linear_fwd import hopper_norm_linear_fwd_kernel

    rows, k = x.shape
    n = w.shape[0]
    y = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    shift = None if b is None else b.float()
    if norm_bias is not None:
        moved = w.float() @ norm_bias.float()
        shift = moved if shift is None else shift + moved
    if rows:
        given, folded = addressable(rows_contiguous(x)), addressable(fold(w, norm_weight))
        tiles = -(-rows // 192) * -(-n // 256)
        launch(
            hopper_norm_linear_fwd_kernel, (min(device_info(x.device).sms, tiles),), x.device,
            box(given, 64, BLOCK_K), box(folded, 256, BLOCK_K), box(y, 64, 64), rstd, shift, rows, problem.option("eps"),
            N=n, K=k, BLOCK_K=BLOCK_K, STAGES=STAGES, num_warps=4, maxnreg=128,
        )  # fmt: skip
    mean = torch.empty(0, dtype=torch.float32, device=x.device)
    return (y, None), (x, w, b, norm_weight, norm_bias, mean, rstd)


def backward(problem: Problem, saved: portable.Saved, dout: tuple[Tensor | None, ...], needs: tuple[bool, ...]) -> portable.Saved:
    """See `gem_kernels.triton.dense.norm_linear.backward`."""
    return portable.backward(problem, saved, dout, needs, _input_grad)


def _input_grad(x: Tensor, w: Tensor, dy: Tensor, rstd: Tensor, xhat: Tensor) -> Tensor | None:
    """dx, with x̂ in ``xhat``; None, and nothing is done, where the kernel does not serve or was not timed. Workspace: 8 bytes a row."""
    rows, k = x.shape
    n = w.shape[0]
    if rows < MANY_ROWS or k != 512 or n % 8 or x.dtype != torch.bfloat16:
        return None
    from gem_kernels.triton.hopper.norm_linear_bwd import hopper_norm_linear_dx_kernel

    dx = torch.empty((rows, k), dtype=x.dtype, device=x.device)
    tiles = -(-rows // 128)
    told = torch.full((256 * tiles,), -1, dtype=torch.int32, device=x.device).view(torch.float32)
    launch(
        hopper_norm_linear_dx_kernel, (2 * min(device_info(x.device).sms // 2, tiles),), x.device,
        box(addressable(dy), 128, 32), box(addressable(w), 32, 256), box(addressable(x), 64, 256), box(dx, 64, 256), box(xhat, 64, 256),
        rstd, told, rows, N=n, K=k, BLOCK_C=256, BLOCK_R=32, STAGES=6, num_warps=4, maxnreg=168,
    )  # fmt: skip
    return dx


def row_tiles(columns: int) -> tuple[int, int]:
    """(tiles, columns of one) of whole rows: one or two tiles of up to 256 columns."""
    return (2, 256) if columns > 256 else (1, power_of_two(columns, least=64))


def addressable(t: Tensor) -> Tensor:
    """A base or a row step that is no multiple of 16 bytes is copied."""
    return t if t.data_ptr() % 16 == 0 and t.stride(0) * 2 % 16 == 0 else t.clone(memory_format=torch.contiguous_format)


def box(t: Tensor, rows: int, columns: int) -> Any:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    dtype = gl.float16 if t.dtype == torch.float16 else gl.bfloat16
    return TensorDescriptor.from_tensor(t, [rows, columns], gl.NVMMASharedLayout.get_default_for([rows, columns], dtype))
