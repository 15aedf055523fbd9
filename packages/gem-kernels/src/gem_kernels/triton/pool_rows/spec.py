"""What the kernels of `pool_rows` can do, and their launches. Nothing here imports triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gem_core.hookspecs import KernelSpec
from gem_core.ops import meeting, row_sums
from gem_core.ops.contract import Problem, Supported, no
from gem_core.ops.pool_rows import OP
from gem_kernels.triton.common.device import runs_on
from gem_kernels.triton.common.launch import launch

PRIORITY = 50
ROOMY = (9, 10)
"""NVIDIA's generations whose multiprocessors have the shared memory: 140 KiB for a program."""
SCORES: dict[str, Any] = {"BLOCK_N": 64, "BLOCK_C": 64, "num_warps": 4, "num_stages": 3}
FACTORS: dict[str, Any] = {"BLOCK_M": 32, "CHUNK": 32, "num_warps": 4}
WEIGHTS: dict[str, Any] = {"num_warps": 4}
SUMS: dict[str, Any] = {"BLOCK_N": 64, "BLOCK_C": 128, "num_warps": 4, "num_stages": 3}
DELTA_ROWS = 32
DSCORES: dict[str, Any] = {"BLOCK_N": 64, "BLOCK_C": 64, "num_warps": 4, "num_stages": 3}
DROWS: dict[str, Any] = {"BLOCK_N": 128, "BLOCK_C": 64, "num_warps": 8, "num_stages": 3}


def supports(problem: Problem) -> Supported:
    dtype, c, m = problem.dtype("x"), problem.dim("C"), problem.dim("M")
    if dtype not in (torch.bfloat16, torch.float16) and (problem.device == "cuda" or dtype != torch.float32):
        return no("bf16 and fp16")
    if m & (m - 1) or not 16 <= m <= 128 or c % 128 or c > 1024 or m * 2 > c:
        return no(f"16 to 128 queries, a power of two, of rows of at least twice as many columns, in steps of 128 up to 1024; got {m}, {c}")
    if problem.device == "cuda" and (torch.version.hip or (problem.arch is not None and problem.arch // 10 not in ROOMY)):
        return no(f"written for the shared memory of sm_90 and sm_100; this is {'ROCm' if torch.version.hip else f'sm_{problem.arch}'}")
    return runs_on(problem.device)


def _sizes(problem: Problem, dtype: torch.dtype) -> dict[str, Any]:
    return {"C": problem.dim("C"), "M": problem.dim("M"), "PRECISION": "ieee" if dtype == torch.float32 else "tf32"}


def forward(problem: Problem, x: Tensor, a: Tensor, offsets: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """See `gem_core.ops.pool_rows`. Saves w ``[N, M]`` in x's dtype and r ``[N]``."""
    from gem_kernels.triton.attention.schedule import tile_list
    from gem_kernels.triton.pool_rows import kernels

    x, a = x.contiguous(), a.contiguous()
    rows, batch, (m, groups) = x.shape[0], offsets.numel() - 1, (problem.dim("M"), problem.dim("G"))
    sizes = _sizes(problem, x.dtype)
    new = torch.empty if batch else torch.zeros  # a batch without samples has slack rows alone
    r = new(rows, dtype=torch.float32, device=x.device)
    w = torch.empty(rows, m, dtype=x.dtype, device=x.device)
    y = torch.empty(groups, batch, m // groups, x.shape[1], dtype=x.dtype, device=x.device)
    if rows and batch:
        block = SCORES["BLOCK_N"]
        tiles = tile_list(batch, block, x.device, rows=rows, offsets=offsets)
        listed = offsets, tiles.tiles, tiles.count
        most, total = (torch.empty(rows // block + batch, m, dtype=torch.float32, device=x.device) for _ in range(2))
        scalars = batch, rows, problem.option("scale"), problem.option("eps")
        sums = row_sums.found(x)
        run = {**sizes, "PARTS": 0 if sums is None else sums.shape[1], **SCORES}
        launch(kernels.pool_rows_scores_kernel, (tiles.bound,), x.device, x, a, sums, *listed, w, r, most, total, *scalars, **run)
    if batch:
        samples = tile_list(batch, 1, x.device, rows=batch, length=1, work_offsets=offsets).tiles
        if rows:
            parts = m // min(m, FACTORS["BLOCK_M"])
            split = {**FACTORS, "BLOCK_M": m // parts}
            launch(kernels.pool_rows_factors_kernel, (batch * parts,), x.device, most, total, offsets, samples, M=m, BLOCK_N=block, **split)
            launch(kernels.pool_rows_weights_kernel, (tiles.bound,), x.device, w, total, *listed, M=m, BLOCK_N=block, **WEIGHTS)
        parts = x.shape[1] // SUMS["BLOCK_C"]
        launch(kernels.pool_rows_sums_kernel, (batch * parts,), x.device, w, x, offsets, samples, y, batch, G=groups, **sizes, **SUMS)
    return y, (w, r)


def backward(
    problem: Problem, saved: tuple[Tensor, ...], douts: tuple[Any, ...], needs: tuple[bool, ...],
    rows_gradient: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of x and a. Workspace: the gradient of x̂, as large as x, and ``[N, M]``.

    ``rows_gradient`` (e, w, a, dy, r, offsets, g) fills g in place of the kernel of the rows' gradient.
    """
    from gem_kernels.triton.attention.schedule import tile_list
    from gem_kernels.triton.dense import norm, norm_gdpa
    from gem_kernels.triton.dense.support import weight_grad
    from gem_kernels.triton.pool_rows import kernels

    x, a, offsets, _, w, r = saved
    dy, beside, (o, do, bias) = douts
    x, a, dy = x.contiguous(), a.contiguous(), dy.contiguous()
    rows, batch, (m, groups) = x.shape[0], offsets.numel() - 1, (problem.dim("M"), problem.dim("G"))
    sizes = {**_sizes(problem, x.dtype), "G": groups}
    new = torch.empty if batch else torch.zeros  # a batch without samples has slack rows alone
    g, e = (new(rows, width, dtype=x.dtype, device=x.device) for width in (x.shape[1], m))
    if rows and batch:
        delta = torch.empty(batch * m, dtype=torch.float32, device=x.device)
        widths = {"D": o.shape[2], "D_PAD": 1 << (o.shape[2] - 1).bit_length(), "ROWS": DELTA_ROWS, "num_warps": 4}
        strides = (t.stride(i) for t in (o, do) for i in (1, 0))
        grid = (-(-batch * m // DELTA_ROWS),)
        launch(kernels.pool_rows_delta_kernel, grid, x.device, o, do, bias, delta, batch * m, o.shape[1], *strides, **widths)
        passes: list[tuple[Any, ...]] = [
            (kernels.pool_rows_dscores_kernel, DSCORES, (w, x, r), (dy, delta, e, batch, rows, problem.option("scale")))
        ]
        if rows_gradient is None:
            passes.append((kernels.pool_rows_drows_kernel, DROWS, (e, w, r), (a, dy, g, batch, rows)))
        for kernel, block, args, scalars in passes:
            tiles = tile_list(batch, block["BLOCK_N"], x.device, rows=rows, offsets=offsets)
            launch(kernel, (tiles.bound,), x.device, *args, offsets, tiles.tiles, tiles.count, *scalars, **sizes, **block)
        if rows_gradient is not None:
            rows_gradient(e, w, a, dy, r, offsets, g)
    late = meeting.late_with(beside)
    if late is not None and late.q.data_ptr() == x.data_ptr():
        dx = norm_gdpa.meet_late(late, r, g, None)
    else:
        beside = beside if late is None else late.finished().view(x.shape)
        dx = norm.norm_grads(x, None, g, None if beside is None else beside.contiguous(), None, r, False, False, False)[0]
    return dx, weight_grad(e, x).to(a.dtype)


def specs() -> list[KernelSpec]:
    """One implementation called "triton"."""
    return [KernelSpec(op=OP, name="triton", forward=forward, backward=backward, supports=supports, priority=PRIORITY)]
