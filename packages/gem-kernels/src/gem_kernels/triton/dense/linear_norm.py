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
    """The norm's gradient in one pass, then two matrix products, which are best left to the vendor's library.

    Workspace: the gradient of z = x wᵀ + b, as large as y. An affine norm recomputes z first.
    """
    x, w, b, norm_weight, norm_bias, y, rstd = saved
    dy = rows_contiguous(dout)
    layer = problem.option("kind") == "layer"
    affine = norm_weight is not None or norm_bias is not None
    z = F.linear(x, w, b) if affine else y
    mean = z.mean(1, dtype=torch.float32) if affine and layer else None
    dz, dnorm_weight, dnorm_bias, db = plain.norm_grads(
        z, norm_weight, dy, None, mean, rstd, needs[3], needs[4], layer, normed=not affine, want_sum=needs[2]
    )
    dx = dz @ w if needs[0] else None
    dw = weight_grad(dz, x) if needs[1] else None
    return cast(needs, (x, w, b, norm_weight, norm_bias), (dx, dw, db, dnorm_weight, dnorm_bias))
