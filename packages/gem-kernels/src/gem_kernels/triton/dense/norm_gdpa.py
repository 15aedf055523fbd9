"""Launching the `norm_gdpa` kernels: passes over rows around an implementation of `gdpa`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from gem_core.ops import meeting
from gem_core.ops.contract import Problem, Supported
from gem_kernels.triton.attention import spec as portable
from gem_kernels.triton.common.configs import Config
from gem_kernels.triton.common.launch import launch
from gem_kernels.triton.dense.norm import pass_sizes, supports_width
from gem_kernels.triton.dense.support import common_support, power_of_two, rows_contiguous

_ABSENT = (None,) * 13
"""The tensors of `gdpa` after k_offsets."""

Saved = tuple[Tensor | None, ...]


class Gdpa(Protocol):
    """An implementation of `gdpa`: a module with the functions of a kernel specification."""

    def supports(self, problem: Problem) -> Supported: ...
    def forward(self, problem: Problem, *tensors: Tensor | None) -> tuple[Any, Saved]: ...
    def backward(self, problem: Problem, saved: Saved, dout: Tensor, needs: tuple[bool, ...]) -> Saved: ...


@functools.lru_cache(maxsize=256)
def inner(problem: Problem) -> Problem:
    """The `gdpa` between the norms."""
    heads, d = problem.dim("H"), problem.dim("D")
    options = {n: v for n, v in problem.options if n != "eps"} | {"broadcast_q": False, "causal": False, "window": None}
    options = {"max_q_len": 1 << 16, "max_k_len": 1 << 16} | options
    return replace(
        problem, op="gdpa", dims=(("H", heads), ("Hkv", heads), ("D", d), ("Dv", d)), options=tuple(sorted(options.items())),
        present=frozenset({"q_offsets"}),
    )  # fmt: skip


def supports(problem: Problem, gdpa: Gdpa = portable) -> Supported:
    """What the implementation of `gdpa` does, for rows of up to 16,384 elements over all heads."""
    for answer in (common_support(problem, ("q", "k", "v")), supports_width(problem.dim("H") * problem.dim("D"))):
        if not answer:
            return answer
    return gdpa.supports(inner(problem))


def forward(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, gdpa: Gdpa = portable,
    from_q: Callable[[Problem, Saved, Tensor, Tensor, float], Tensor | None] | None = None,
) -> tuple[Tensor, Saved]:  # fmt: skip
    """See `gem_core.ops.norm_gdpa`. Workspace: the normalised q.

    ``from_q`` (problem of `gdpa`, its tensors with q itself, mean, rstd, eps) may return what `gdpa` makes of the normalised q, and fill
    mean and rstd; its None means the usual way.
    """
    from gem_kernels.triton.dense.norm_gdpa_kernels import norm_gdpa_l_kernel, norm_gdpa_out_kernel

    rows, batch, eps = q.shape[0], q_offsets.numel() - 1, problem.option("eps")
    mean, rstd, out_rstd = stats = [torch.empty(rows, dtype=torch.float32, device=q.device) for _ in range(3)]
    given = rows_contiguous(q)
    grid, sizes = _rows(problem, rows)
    out = None
    if from_q is not None and rows:
        out = from_q(inner(problem), (given, k, v, q_offsets, k_offsets, *_ABSENT), mean, rstd, eps)
    if out is None:
        l = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if rows:
            launch(norm_gdpa_l_kernel, grid, q.device, given, l, mean, rstd, q_offsets, batch, rows, eps, *_strides(given), **sizes)
        out = gdpa.forward(inner(problem), l, k, v, q_offsets, k_offsets, *_ABSENT)[0]
    if rows:
        args = (given, out, mean, rstd, out_rstd, q_offsets, batch, rows, eps, *_strides(given))
        launch(norm_gdpa_out_kernel, grid, q.device, *args, **sizes)
    return out, (q, k, v, q_offsets, k_offsets, out, *stats)


def backward(
    problem: Problem, saved: Saved, dout: Tensor, needs: tuple[bool, ...], gdpa: Gdpa = portable,
    adding: Callable[[Problem, Saved, Tensor], Saved | None] | None = None,
) -> Saved:  # fmt: skip
    """Workspace: the normalised q and the gradient of o, each as large as q.

    ``adding`` (problem of `gdpa`, its tensors, do) may return its dk and dv and add its dq to do in place: the last pass reads less.
    """
    from gem_kernels.triton.dense.norm_gdpa_kernels import norm_gdpa_bwd_do_kernel, norm_gdpa_bwd_dq_kernel

    q, k, v, q_offsets, k_offsets, out, mean, rstd, out_rstd = saved
    rows, batch = q.shape[0], q_offsets.numel() - 1
    given, grad = rows_contiguous(q), rows_contiguous(dout)
    grid, sizes = _rows(problem, rows)
    strides = _strides(given, grad)
    left = meeting.left_gradients(dout)
    do, l = left or (torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(2))
    if rows and left is None:
        args = (given, out, grad, mean, rstd, out_rstd, do, l, q_offsets, batch, rows)
        launch(norm_gdpa_bwd_do_kernel, grid, q.device, *args, *strides, **sizes)
    tensors = (l, k, v, q_offsets, k_offsets, *_ABSENT)
    added = None if adding is None or not all(needs) else adding(inner(problem), tensors, do)
    if added is None:
        dq, dk, dv, *_ = gdpa.backward(inner(problem), tensors, do, (*needs[:3], False, False, False, False))
    else:
        dq, (dk, dv) = do, added
    beside = do if added is None else None

    def finish() -> Tensor:
        args = (given, beside, grad, mean, rstd, dq, q_offsets, batch, rows)
        launch(norm_gdpa_bwd_dq_kernel, grid, q.device, *args, *strides, **sizes)
        return dq

    later = meeting.later_of(q)
    if later is not None and rows and needs[0]:
        later.leave(meeting.Late(given, q_offsets, mean, rstd, dq, beside, grad, finish))
    elif rows and needs[0]:
        finish()
    return dq, dk, dv


def meet(made: meeting.Made, out: Tensor, rstd: Tensor, grad: Tensor, dout: Tensor, hat: Tensor) -> Tensor:
    """The backward pass of an RMSNorm without weight of ``out [N, H D]``, made by `norm_gdpa`, from the gradient ``grad`` of its result and
    the gradient ``dout`` that is added; ``hat`` is filled with that result. Leaves with the gradient what `norm_gdpa` begins with."""
    from gem_kernels.triton.dense.norm_gdpa_kernels import norm_gdpa_bwd_met_kernel

    q, q_offsets, mean, q_rstd, out_rstd = made
    rows, heads, d = q.shape
    given, rows_out, grad, beside = (rows_contiguous(t) for t in (q, out, grad, dout))
    dx = torch.empty((rows, heads * d), dtype=out.dtype, device=out.device)
    do, l = (torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(2))
    grid, sizes = _grid(heads, d, rows)
    if rows:
        launch(
            norm_gdpa_bwd_met_kernel, grid, out.device, rows_out, grad, beside, rstd, given, mean, q_rstd, out_rstd, dx, hat, do, l,
            q_offsets, q_offsets.numel() - 1, rows, *_strides(given), *(t.stride(0) for t in (rows_out, grad, beside)), **sizes,
        )  # fmt: skip
    meeting.leave_gradients(dx, do, l)
    return dx


def meet_late(late: meeting.Late, rstd: Tensor, grad: Tensor, hat: Tensor | None) -> Tensor:
    """The backward pass of an RMSNorm without weight of the rows that `norm_gdpa` reads as q, from the gradient ``grad [N, H D]`` of its
    result, plus what `norm_gdpa` left of its own; ``hat``, if given, is filled with the result."""
    from gem_kernels.triton.dense.norm_gdpa_kernels import norm_gdpa_bwd_late_kernel

    late.taken = True
    q = late.q
    rows, heads, d = q.shape
    grad = rows_contiguous(grad)
    dx = torch.empty((rows, heads * d), dtype=q.dtype, device=q.device)
    grid, sizes = _grid(heads, d, rows)
    launch(
        norm_gdpa_bwd_late_kernel, grid, q.device, q, late.dl, late.do, late.grad, late.mean, late.rstd, grad, rstd, dx, hat,
        late.q_offsets, late.q_offsets.numel() - 1, rows, *_strides(q, late.grad), grad.stride(0), **sizes,
    )  # fmt: skip
    return dx


def _rows(problem: Problem, rows: int) -> tuple[tuple[int], Config]:
    """Grid and sizes of the passes over rows. Not measured: two of them work in place, so they must not be repeated."""
    return _grid(problem.dim("H"), problem.dim("D"), rows)


def _grid(heads: int, d: int, rows: int) -> tuple[tuple[int], Config]:
    sizes = {"H": heads, "D": d, "COLUMNS": power_of_two(heads * d), **pass_sizes(heads * d)}
    return (-(-rows // sizes["ROWS"]),), sizes


def _strides(*tensors: Tensor) -> list[int]:
    return [t.stride(i) for t in tensors for i in (0, 1)]
