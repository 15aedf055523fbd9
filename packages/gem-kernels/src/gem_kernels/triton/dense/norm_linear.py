"""Launching the `norm_linear` kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gem_core.ops.contract import Problem, Supported
from gem_kernels.triton.common.configs import Config, choose
from gem_kernels.triton.common.device import DeviceInfo, device_info
from gem_kernels.triton.common.launch import launch
from gem_kernels.triton.dense import norm as plain
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

COMPOSITE = True
Saved = tuple[Tensor | None, ...]


def supports(problem: Problem) -> Supported:
    """Any width: a program never holds whole rows."""
    return common_support(problem, ("x", "w"))


def facts(problem: Problem) -> tuple[tuple[str, Any], ...]:
    return (
        ("dtype", NAMES[problem.dtype("x")]),
        ("k", power_of_two(problem.dim("K"))),
        ("kind", problem.option("kind")),
        ("n", power_of_two(problem.dim("N"))),
        ("residual", "residual" in problem.present),
    )


def candidates(columns: int, reduction: int, dtype: torch.dtype, info: DeviceInfo) -> list[Config]:
    """Tiles of a product with ``columns`` result columns. Wide tiles: the products are bound by what they read from the L2 cache."""
    widest, step = power_of_two(columns), power_of_two(reduction)
    if info.key == "interpreter":
        shapes = [(64, 128, 64, 4, 1)]
    elif dtype not in HALF:
        shapes = [(64, 64, 32, 4, 2), (128, 64, 32, 8, 2)]
    elif info.key == "sm_80" or not info.nvidia:
        shapes = [(128, 128, 32, 8, 3), (128, 64, 64, 4, 2), (64, 128, 64, 4, 2)]
    else:
        shapes = [(128, 256, 64, 8, 3), (128, 128, 64, 8, 4), (128, 128, 64, 8, 3), (256, 128, 64, 8, 3), (128, 128, 64, 4, 3)]
    return unique(
        [
            {"BLOCK_M": m, "BLOCK_N": min(n, widest), "BLOCK_K": min(k, step), "num_warps": warps, "num_stages": stages}
            for m, n, k, warps, stages in shapes
        ]
    )


def forward(problem: Problem, x: Tensor, w: Tensor, b: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None,
            residual: Tensor | None) -> tuple[Any, Saved]:  # fmt: skip
    """See `gem_core.ops.norm_linear`: x is read once and not written in normalised form."""
    rows, k = x.shape
    n = w.shape[0]
    layer = problem.option("kind") == "layer"
    y = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.empty((rows, k), dtype=x.dtype, device=x.device)
    mean, rstd = (torch.empty(size, dtype=torch.float32, device=x.device) for size in (rows if layer else 0, rows))
    x_rows, added = rows_contiguous(x), rows_contiguous(residual)
    folded = fold(w, norm_weight)
    shift = None if b is None else b.float()
    if norm_bias is not None:
        moved = w.float() @ norm_bias.float()
        shift = moved if shift is None else shift + moved
    info = device_info(x.device)
    tma = descriptors_possible(info, x_rows, added, folded, y)

    def run(config: Config) -> None:
        from gem_kernels.triton.dense.norm_linear_kernels import norm_linear_fwd_kernel

        m, c, r = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
        programs = min(-(-rows // m) * -(-n // c), programs_at_once(config, info))
        launch(
            norm_linear_fwd_kernel, (programs,), x.device,
            source(x_rows, m, r, tma), source(added, m, r, tma), source(folded, c, r, tma), source(y, m, c, tma),
            total, x_rows, added, shift, folded.float().sum(1) if layer else None, mean, rstd,
            stride(x_rows), stride(added), rows, problem.option("eps"),
            K=k, N=n, LAYER=layer, SHIFT=shift is not None, RESIDUAL=residual is not None, TMA=tma,
            PRECISION=precision(x.dtype, info), **config,
        )  # fmt: skip

    if rows:
        run(choose("norm_linear.forward", facts(problem), info, lambda: candidates(n, k, x.dtype, info), run))
    return (y, total), (x if total is None else total, w, b, norm_weight, norm_bias, mean, rstd)


def backward(problem: Problem, saved: Saved, dout: tuple[Tensor | None, ...], needs: tuple[bool, ...]) -> Saved:
    """Workspace: 4·N·K bytes for every split of the rows in dw (about two a multiprocessor in all)."""
    x, w, b, norm_weight, norm_bias, mean, rstd = saved
    dy, dtotal = (rows_contiguous(t) for t in dout)
    inputs = (x, w, b, norm_weight, norm_bias)
    if dy is None:
        return cast(needs, inputs, (dtotal.clone(), *(None if t is None else torch.zeros_like(t) for t in inputs[1:])))
    x = rows_contiguous(x)
    folded = fold(w, norm_weight)
    want_dw = needs[1] or needs[3]
    if COMPOSITE and x.dtype in HALF and power_of_two(x.shape[1]) <= plain.WIDEST and needs[0]:
        xhat = torch.empty(x.shape, dtype=x.dtype, device=x.device) if want_dw else None
        layer = problem.option("kind") == "layer"
        dx = plain.norm_grads(x, None, dy @ folded, dtotal, mean, rstd, False, False, layer, xhat=xhat)[0]
        dw = None if xhat is None else weight_grad(dy, xhat)
    else:
        dx = _dx(problem, x, folded, dy, dtotal, mean, rstd) if needs[0] else None
        dw = _products(problem, x, dy, mean, rstd) if want_dw else None
    db = column_sum(dy) if needs[2] or (norm_bias is not None and (needs[1] or needs[4])) else None
    dnorm_weight = dnorm_bias = None
    if dw is not None:
        if norm_weight is not None:
            dnorm_weight = (dw * w.float()).sum(0)
            dw = dw * norm_weight.float()
        if norm_bias is not None and needs[1]:
            dw = torch.addr(dw, db, norm_bias.float())
    if needs[4] and norm_bias is not None:
        dnorm_bias = db @ w.float()
    return cast(needs, inputs, (dx, dw, db, dnorm_weight, dnorm_bias))


def fold(w: Tensor, norm_weight: Tensor | None) -> Tensor:
    """w · diag(norm_weight), rounded as w is, contiguous."""
    return (w if norm_weight is None else (w.float() * norm_weight.float()).to(w.dtype)).contiguous()


def programs_at_once(config: Config, info: DeviceInfo) -> int:
    """Persistent programs: two an SM for small ones."""
    small = config["BLOCK_M"] * config["BLOCK_N"] <= 128 * 128 and config["num_warps"] * config["num_stages"] <= 16
    return info.sms * (2 if small else 1)


def _dx(problem: Problem, x: Tensor, folded: Tensor, dy: Tensor, dtotal: Tensor | None, mean: Tensor | None, rstd: Tensor) -> Tensor:
    rows, k = x.shape
    n = folded.shape[0]
    dx = torch.empty((rows, k), dtype=x.dtype, device=x.device)
    info = device_info(x.device)
    tma = descriptors_possible(info, dy, folded)

    def run(config: Config) -> None:
        from gem_kernels.triton.dense.norm_linear_kernels import norm_linear_bwd_dx_kernel

        m, c, r = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
        programs = min(-(-rows // m), programs_at_once(config, info))
        launch(
            norm_linear_bwd_dx_kernel, (programs,), x.device,
            source(dy, m, r, tma), source(folded, r, c, tma), x, dtotal, dx, mean, rstd, stride(dy), stride(x), stride(dtotal), rows,
            K=k, N=n, LAYER=problem.option("kind") == "layer", DTOTAL=dtotal is not None, TMA=tma, NVIDIA=info.nvidia,
            PRECISION=precision(x.dtype, info), **config,
        )  # fmt: skip

    if rows:
        pieces = (32, 64) if problem.option("kind") == "layer" else (64, 32)
        run(
            choose(
                "norm_linear.dx",
                facts(problem),
                info,
                lambda: unique([{**c, "PIECE": min(p, c["BLOCK_N"])} for p in pieces for c in candidates(k, n, x.dtype, info)]),
                run,
            )
        )
    return dx


def _products(problem: Problem, x: Tensor, dy: Tensor, mean: Tensor | None, rstd: Tensor) -> Tensor:
    """dyᵀ x̂ [N, K] in fp32."""
    rows, k = x.shape
    n = dy.shape[1]
    info = device_info(x.device)
    tma = descriptors_possible(info, x, dy)
    found: list[Tensor] = []

    def run(config: Config) -> None:
        from gem_kernels.triton.dense.norm_linear_kernels import norm_linear_bwd_dw_kernel

        m, c, r = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
        tiles = -(-n // c) * -(-k // r)
        splits = max(1, min(programs_at_once({**config, "BLOCK_M": r}, info) // tiles, -(-rows // (4 * m))))
        span = -(-rows // (splits * m)) * m
        partial = torch.empty((splits, n, k), dtype=torch.float32, device=x.device)
        launch(
            norm_linear_bwd_dw_kernel, (tiles, splits), x.device,
            source(x, m, r, tma), source(dy, m, c, tma), mean, rstd, partial, stride(x), stride(dy), rows, span,
            K=k, N=n, LAYER=problem.option("kind") == "layer", TMA=tma, PRECISION=precision(x.dtype, info), **config,
        )  # fmt: skip
        found[:] = [partial]

    if not rows:
        return torch.zeros((n, k), dtype=torch.float32, device=x.device)
    run(choose("norm_linear.dw", facts(problem), info, lambda: _dw_candidates(n, k, x.dtype, info), run))
    return found[0].sum(0)


def _dw_candidates(n: int, k: int, dtype: torch.dtype, info: DeviceInfo) -> list[Config]:
    if dtype not in HALF:
        shapes = [(32, 64, 64, 4, 2)]
    elif info.key == "sm_80" or not info.nvidia:
        shapes = [(32, 128, 128, 8, 3), (64, 128, 64, 4, 2)]
    else:
        shapes = [(64, 128, 256, 8, 3), (64, 256, 128, 8, 3), (64, 128, 128, 8, 3), (64, 128, 128, 8, 2), (128, 128, 128, 8, 2)]
    return unique(
        [
            {"BLOCK_M": m, "BLOCK_N": min(c, power_of_two(n)), "BLOCK_K": min(r, power_of_two(k)), "num_warps": warps, "num_stages": stages}
            for m, c, r, warps, stages in shapes
        ]
    )
