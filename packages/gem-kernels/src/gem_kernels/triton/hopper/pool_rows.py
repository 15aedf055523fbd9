"""The Hopper implementation of the op "pool_rows": the portable one with another kernel for the gradient of the rows."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gem_core.hookspecs import KernelSpec
from gem_core.ops.contract import Problem, Supported, no
from gem_core.ops.pool_rows import OP
from gem_kernels.triton.common.device import device_info
from gem_kernels.triton.common.launch import launch
from gem_kernels.triton.hopper import spec
from gem_kernels.triton.pool_rows import spec as portable

SHAPE = 512, 128
"""Columns, and rows of queries, that the kernel was timed with; a takes more than half of the shared memory."""
STAGES = 2


def supports(problem: Problem) -> Supported:
    """Half precision, rows of 512 columns, 128 rows of queries in groups of 8 and more."""
    answer = spec._portable(problem, "pool_rows.spec")
    if not answer:
        return answer
    sizes = problem.dim("C"), problem.dim("M")
    if sizes != SHAPE or problem.dim("M") % problem.dim("G") or problem.dim("M") // problem.dim("G") % 8:
        return no(f"128 rows of queries, in groups of 8 and more, of 512 columns; they are {sizes[1]} in {problem.dim('G')} of {sizes[0]}")
    return spec._dialect()


def backward(problem: Problem, saved: tuple[Tensor, ...], douts: tuple[Any, ...], needs: tuple[bool, ...]) -> tuple[Tensor, Tensor]:
    """See `gem_kernels.triton.pool_rows.spec.backward`."""
    return portable.backward(problem, saved, douts, needs, rows_gradient)


def rows_gradient(e: Tensor, w: Tensor, a: Tensor, dy: Tensor, r: Tensor, offsets: Tensor, g: Tensor) -> None:
    """Fills ``g [N, C]`` with (e a + w dy) / r, zeros past the last offset; ``e, w [N, M]``, ``a [M, C]``, ``dy [G, B, M / G, C]``."""
    from gem_kernels.triton.attention.schedule import tile_list
    from gem_kernels.triton.hopper.launch import _box
    from gem_kernels.triton.hopper.norm_linear import addressable, box
    from gem_kernels.triton.hopper.pool_rows_bwd import hopper_pool_rows_drows_kernel

    (rows, c), m, groups, batch = g.shape, a.shape[0], dy.shape[0], dy.shape[1]
    tiles = tile_list(batch, 128, g.device, rows=rows, offsets=offsets)
    shared = box(addressable(a), m, 64), box(addressable(dy.view(-1, c)), m // groups, 64)
    launch(
        hopper_pool_rows_drows_kernel, (min(device_info(g.device).sms, tiles.bound),), g.device,
        _box(e.view(rows, 1, m), 64), _box(w.view(rows, 1, m), 64), *shared, _box(g.view(rows, 1, c), 64, 64), g, r,
        tiles.tiles, tiles.count, offsets, batch, rows, C=c, M=m, G=groups, STAGES=STAGES, num_warps=4, maxnreg=168,
    )  # fmt: skip


def specs() -> list[KernelSpec]:
    """One implementation called "hopper"."""
    return [KernelSpec(OP, "hopper", portable.forward, backward, supports, 60)]
