"""Launching the `linear_norm` kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gem_core.ops.contract import Problem, Supported
from gem_kernels.triton.common.configs import Config, choose
from gem_kernels.triton.common.device import DeviceInfo, device_info
from gem_kernels.triton.common.launch import launch
from gem_kernels.triton.dense import norm as plain
from gem_kernels.triton.dense.norm_linear import programs_at_once
from gem_kernels.triton.dense.support import (
    HALF,
    NAMES,
    cast,
    column_sum,
    common_support,
    descriptors_possible,
    power_of_two,
    precision,
    rows_contiguous,
    source,
    stride,
    unique,
    weight_grad,
)

WIDEST_FUSED = 1024
"""A program holds whole rows of the result; wider ones are a matrix product and then the `norm` kernel."""

Saved = tuple[Tensor | None, ...]


def supports(problem: Problem) -> Supported:
    answer = plain.supports_width(problem.dim("N"))
    return common_support(problem, ("x", "w")) if answer else answer


def facts(problem: Problem) -> tuple[tuple[str, Any], ...]:
    return (
        ("dtype", NAMES[problem.dtype("x")]),
        ("k", power_of_two(problem.dim("K"))),
        ("kind", problem.option("kind")),
        ("n", power_of_two(problem.dim("N"))),
    )


def candidates(n: int, k: int, dtype: torch.dtype, info: DeviceInfo) -> list[Config]:
    """At most four chunks of BLOCK_N columns a row block, all but the last in registers."""
    width, step = power_of_two(n), power_of_two(k)
    if dtype not in HALF:
        shapes = [(32, min(width, 64) if width <= 256 else 256, 32, 4 if width <= 256 else 8, 2)]
    elif info.key == "sm_80" or not info.nvidia:
        shapes = [(64, min(width, 128) if width <= 512 else 256, 32, 8, 3)]
    elif width <= 512:
        shapes = [(128, min(width, 256), 64, 8, 3), (128, min(width, 128), 64, 8, 4), (64, min(width, 256), 64, 8, 3)]
    else:
        shapes = [(64, 256, 64, 8, 4), (64, 256, 64, 8, 3)]
    return unique([{"BLOCK_M": m, "BLOCK_N": c, "BLOCK_K": min(r, step), "num_warps": w, "num_stages": s} for m, c, r, w, s in shapes])


def forward(problem: Problem, x: Tensor, w: Tensor, b: Tensor | None, norm_weight: Tensor | None,
            norm_bias: Tensor | None) -> tuple[Tensor, Saved]:  # fmt: skip
    """See `gem_core.ops.linear_norm`: x wᵀ is never in memory for rows of up to 1024 columns."""
    rows, k = x.shape
    n = w.shape[0]
    if n > WIDEST_FUSED:
        made, kept = plain.forward(problem, F.linear(x, w, b), norm_weight, norm_bias, None)
        return made[0], (x, w, b, norm_weight, norm_bias, made[0], kept[-1])
    y = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    x_rows, weight = rows_contiguous(x), w.contiguous()
    info = device_info(x.device)
    tma = descriptors_possible(info, x_rows, weight, y)

    def run(config: Config) -> None:
        from gem_kernels.triton.dense.linear_norm_kernels import linear_norm_fwd_kernel

        m, c, r = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
        programs = min(-(-rows // m), programs_at_once(config, info))
        launch(
            linear_norm_fwd_kernel, (programs,), x.device,
            source(x_rows, m, r, tma), source(weight, c, r, tma), source(y, m, c, tma), b, norm_weight, norm_bias, rstd,
            stride(x_rows), rows, problem.option("eps"),
            K=k, N=n, LAYER=problem.option("kind") == "layer", LINEAR_BIAS=b is not None,
            WEIGHT=norm_weight is not None, BIAS=norm_bias is not None, TMA=tma, PRECISION=precision(x.dtype, info), **config,
        )  # fmt: skip

    if rows:
        run(choose("linear_norm.forward", facts(problem), info, lambda: candidates(n, k, x.dtype, info), run))
    return y, (x, w, b, norm_weight, norm_bias, y, rstd)


def backward(problem: Problem, saved: Saved, dout: Tensor, needs: tuple[bool, ...]) -> Saved:
    """Workspace: the gradient of z = x wᵀ + b, as large as y. An affine norm (or rows over 4096) recomputes z first."""
    x, w, b, norm_weight, norm_bias, y, rstd = saved
    dy = rows_contiguous(dout)
    dnorm_weight = dnorm_bias = None
    if norm_weight is None and norm_bias is None and power_of_two(w.shape[0]) <= 4096:
        dz, dx, db = _fused(problem, dy, y, w.contiguous(), rstd, needs[2])
    else:
        layer = problem.option("kind") == "layer"
        z = F.linear(x, w, b)
        mean = z.mean(1, dtype=torch.float32) if layer else None
        dz, dnorm_weight, dnorm_bias = plain.norm_grads(z, norm_weight, dy, None, mean, rstd, needs[3], needs[4], layer)
        dx = dz @ w if needs[0] else None
        db = column_sum(dz) if needs[2] else None
    dw = weight_grad(dz, x) if needs[1] else None
    return cast(needs, (x, w, b, norm_weight, norm_bias), (dx, dw, db, dnorm_weight, dnorm_bias))


def _fused(problem: Problem, dy: Tensor, y: Tensor, w: Tensor, rstd: Tensor, bias: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """dz, dx and the column sums of dz."""
    rows, n = dy.shape
    k = w.shape[1]
    dz = torch.empty((rows, n), dtype=dy.dtype, device=dy.device)
    dx = torch.empty((rows, k), dtype=dy.dtype, device=dy.device)
    sums: list[Tensor | None] = [torch.zeros((1, n), dtype=torch.float32, device=dy.device) if bias else None]
    info = device_info(dy.device)
    tma = descriptors_possible(info, w, dx)
    width = power_of_two(n)

    def run(config: Config) -> None:
        from gem_kernels.triton.dense.linear_norm_kernels import linear_norm_bwd_dx_kernel

        m, c, r = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
        programs = min(-(-rows // m), programs_at_once(config, info))
        if bias:
            sums[0] = torch.empty((programs, n), dtype=torch.float32, device=dy.device)
        launch(
            linear_norm_bwd_dx_kernel, (programs,), dy.device,
            dy, y, source(w, r, c, tma), dz, source(dx, m, c, tma), rstd, sums[0], stride(dy), rows,
            K=k, N=n, N_PAD=width, LAYER=problem.option("kind") == "layer", DBIAS=bias, TMA=tma, NVIDIA=info.nvidia,
            PRECISION=precision(dy.dtype, info), **config,
        )  # fmt: skip

    def guesses() -> list[Config]:
        found = candidates(min(k, 512), n, dy.dtype, info)
        return unique([{**c, "ROWS": min(c["BLOCK_M"], max(1, elements // width))} for elements in (8192, 16384) for c in found])

    if rows:
        run(choose("linear_norm.dx", facts(problem), info, guesses, run))
    return dz, dx, None if sums[0] is None else sums[0].sum(0)
