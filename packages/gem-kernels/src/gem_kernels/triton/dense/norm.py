"""Launching the `norm` kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gem_core.ops.contract import YES, Problem, Supported, no
from gem_kernels.triton.common.configs import Config, choose
from gem_kernels.triton.common.device import device_info
from gem_kernels.triton.common.launch import launch
from gem_kernels.triton.dense.support import NAMES, cast, common_support, power_of_two, rows_contiguous, stride, unique

WIDEST = 16384
PASS_ELEMENTS = 2048
"""What a program of a pass over rows works on."""

MANY_ROWS, SUMMED_BLOCKS = 1 << 15, 16
"""From so many rows on, programs of a pass add up the columns of so many blocks: their partial sums are a fraction of what they move."""

Saved = tuple[Tensor | None, ...]


def supports(problem: Problem) -> Supported:
    """Rows of up to 16,384 elements, which stay in registers."""
    answer = supports_width(problem.dim("C"))
    return common_support(problem, ("x",)) if answer else answer


def supports_width(c: int) -> Supported:
    """Whether whole rows of ``c`` elements fit in a program's registers."""
    return YES if c <= WIDEST else no(f"rows of up to {WIDEST} elements, got {c}")


def facts(c: int, dtype: torch.dtype) -> tuple[tuple[str, Any], ...]:
    return ("c", power_of_two(c)), ("dtype", NAMES[dtype])


def candidates(c: int) -> list[Config]:
    """About 8192 elements a program, 16 or more bytes a thread; others differ by powers of two."""
    width = power_of_two(c)
    found = []
    for elements in (8192, 4096, 16384):
        rows = max(1, elements // width)
        warps = min(16, max(4, rows * width // 2048))
        found.append({"ROWS": rows, "num_warps": warps})
    return unique(found)


def forward(problem: Problem, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None) -> tuple[Any, Saved]:
    """See `gem_core.ops.norm`: x (and residual) read once, y (and x + residual) written once."""
    x_rows, residual = rows_contiguous(x), rows_contiguous(residual)
    rows, c = x.shape
    layer = problem.option("kind") == "layer"
    y, total = (torch.empty((rows, c), dtype=x.dtype, device=x.device) if t is not None else None for t in (x, residual))
    mean, rstd = (torch.empty(n, dtype=torch.float32, device=x.device) for n in (rows if layer else 0, rows))

    def run(config: Config) -> None:
        from gem_kernels.triton.dense.norm_kernels import norm_fwd_kernel

        grid = (-(-rows // config["ROWS"]),)
        launch(
            norm_fwd_kernel, grid, x.device, x_rows, residual, _row(weight), _row(bias), y, total, mean, rstd,
            stride(x_rows), stride(residual), rows, problem.option("eps"),
            C=c, C_PAD=power_of_two(c), LAYER=layer, WEIGHT=weight is not None, BIAS=bias is not None, RESIDUAL=residual is not None,
            **config,
        )  # fmt: skip

    if rows:
        info = device_info(x.device)
        run(choose("norm.forward", facts(c, x.dtype), info, lambda: candidates(c), run))
    return (y, total), (x if total is None else total, weight, bias, mean, rstd)


def backward(problem: Problem, saved: Saved, dout: tuple[Tensor | None, ...], needs: tuple[bool, ...]) -> Saved:
    """Gradients of x, weight and bias; partial sums of the latter two take 4·C bytes a program, a few programs an SM."""
    x, weight, bias, mean, rstd = saved
    dy, dtotal = (rows_contiguous(t) for t in dout)
    if dy is None:
        zeros = (None if t is None else torch.zeros_like(t) for t in (weight, bias))
        return cast(needs, (x, weight, bias), (dtotal.clone(), *zeros))
    grads = norm_grads(rows_contiguous(x), weight, dy, dtotal, mean, rstd, needs[1], needs[2], problem.option("kind") == "layer")
    return cast(needs, (x, weight, bias), grads[:3])


def norm_grads(
    x: Tensor, weight: Tensor | None, dy: Tensor, dtotal: Tensor | None, mean: Tensor | None, rstd: Tensor,
    want_weight: bool, want_bias: bool, layer: bool, *, normed: bool = False, want_sum: bool = False, xhat: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """dx (+ dtotal) in x's dtype, dweight, dbias and the column sums of dx (+ dtotal) in fp32, of y = x̂ · weight + bias.

    ``normed``: x is x̂ already. ``xhat`` is filled with x̂.
    """
    rows, c = x.shape
    info = device_info(x.device)
    dx = torch.empty((rows, c), dtype=x.dtype, device=x.device)
    wanted = (want_weight, want_bias, want_sum)
    config, each = pass_sizes(c), (SUMMED_BLOCKS if rows >= MANY_ROWS else 0) if any(wanted) else 1
    if each:
        programs = -(-rows // (config["ROWS"] * each))
    else:  # at least 4 rows each, since a program's partial sums are as long as a row, in fp32
        programs = max(1, min(-(-rows // 4), 4 * info.sms))
    partial = torch.empty((programs, sum(wanted), c), dtype=torch.float32, device=x.device)
    parts = iter(partial.unbind(1))
    given = [next(parts) if w else None for w in wanted]

    def run(config: Config) -> None:
        from gem_kernels.triton.dense.norm_kernels import norm_bwd_kernel

        launch(
            norm_bwd_kernel, (programs,), x.device, x, _row(weight), dy, dtotal, mean, rstd, dx, xhat, *given,
            stride(x), stride(dy), stride(dtotal), stride(partial), rows,
            C=c, C_PAD=power_of_two(c), LAYER=layer, NORMED=normed, WEIGHT=weight is not None, DTOTAL=dtotal is not None,
            DWEIGHT=want_weight, DBIAS=want_bias, DSUM=want_sum, EACH=each, **config,
        )  # fmt: skip

    if rows and not each:
        config = choose("norm.backward", facts(c, x.dtype), info, lambda: _backward_candidates(c), run)
    if rows:
        run(config)
    if not any(wanted):
        return dx, None, None, None
    from gem_kernels.triton.common.sums import sum_rows

    found = sum_rows(partial.view(1, programs, -1)) if rows else partial.new_zeros(sum(wanted) * c)
    sums = iter(found.view(-1, c).unbind())
    dweight, dbias, dsum = (next(sums) if w else None for w in wanted)
    return dx, dweight, dbias, dsum


def _backward_candidates(c: int) -> list[Config]:
    width = power_of_two(c)
    found = []
    for elements in (8192, 4096, 2048):
        rows = max(1, elements // width)
        found.append({"ROWS": rows, "num_warps": min(16, max(4, rows * width // 1024))})
    return unique(found)


def pass_sizes(c: int) -> Config:
    """Rows and warps of a program that reads and writes its rows once. Many small programs come nearest to the copy rate."""
    width = power_of_two(c)
    rows = max(1, PASS_ELEMENTS // width)
    return {"ROWS": rows, "num_warps": min(16, max(4, rows * width // 1024))}


def _row(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()
