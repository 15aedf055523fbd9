"""Launching the `norm_linear` kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gem_core.ops import meeting
from gem_core.ops.contract import Problem, Supported
from gem_kernels.triton.common.configs import Config, choose
from gem_kernels.triton.common.device import DeviceInfo, device_info
from gem_kernels.triton.common.launch import launch
from gem_kernels.triton.dense import norm as plain
from gem_kernels.triton.dense import norm_gdpa
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

Saved = tuple[Tensor | None, ...]


def supports(problem: Problem) -> Supported:
    """Rows of x of up to 16,384 elements, because the norm's backward pass holds whole ones."""
    answer = plain.supports_width(problem.dim("K"))
    return common_support(problem, ("x", "w")) if answer else answer


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


def backward(
    problem: Problem, saved: Saved, dout: tuple[Tensor | None, ...], needs: tuple[bool, ...],
    input_grad: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor | None] | None = None,
) -> Saved:  # fmt: skip
    """Two matrix products, which are best left to the vendor's library, and between them one pass for the norm's gradient.

    Workspace: the gradient of x̂, and x̂, each as large as x. ``input_grad`` (x, w with the norm's weight, dy, rstd, xhat) may return dx of
    an RMSNorm and fill xhat with x̂; its None means the usual way.
    """
    x, w, b, norm_weight, norm_bias, mean, rstd = saved
    dy, dtotal = (rows_contiguous(t) for t in dout)
    inputs = (x, w, b, norm_weight, norm_bias)
    if dy is None:
        return cast(needs, inputs, (dtotal.clone(), *(None if t is None else torch.zeros_like(t) for t in inputs[1:])))
    given, x = x, rows_contiguous(x)
    layer = problem.option("kind") == "layer"
    dx = dw = dnorm_weight = dnorm_bias = None
    xhat = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needs[1] or needs[3] else None
    made = None if layer or dtotal is None or xhat is None else meeting.made_of(given)
    late = meeting.late_with(dout[1])
    if late is not None and (layer or made is not None or xhat is None or not needs[0] or late.q.data_ptr() != x.data_ptr()):
        dtotal, late = late.finished().view(x.shape), None
    if late is not None and xhat is not None:
        dx = norm_gdpa.meet_late(late, rstd, dy @ fold(w, norm_weight), xhat)
    elif needs[0] and made is not None and xhat is not None and made.q.dtype == x.dtype:
        dx = norm_gdpa.meet(made, x, rstd, dy @ fold(w, norm_weight), dtotal, xhat)
    elif needs[0]:
        folded = fold(w, norm_weight)
        if input_grad is not None and xhat is not None and dtotal is None and not layer:
            dx = input_grad(x, folded, dy, rstd, xhat)
        if dx is None:
            dx = plain.norm_grads(x, None, dy @ folded, dtotal, mean, rstd, False, False, layer, xhat=xhat)[0]
    elif xhat is not None:
        xhat = plain.forward(problem, x, None, None, None)[0][0]
    db = column_sum(dy) if needs[2] or (norm_bias is not None and (needs[1] or needs[4])) else None
    if xhat is not None:
        dw = weight_grad(dy, xhat)
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
