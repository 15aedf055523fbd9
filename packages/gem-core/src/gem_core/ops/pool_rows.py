"""Pooling by queries that all samples share, of the normed rows themselves, as an op of its own kind.

With x̂ = RMSNorm(x) of ``x [N, C]``, the rows of B samples by ``offsets``, and ``a [M, C]``, for each sample::

    y = softmax(scale · a x̂ᵀ) x̂        [M, C]; zeros of a sample without rows

Attention of queries q to keys x̂ W_kᵀ and values x̂ W_vᵀ needs nothing else: its scores are (q W_k) x̂ᵀ and its result is (P x̂) W_vᵀ, so that
with fewer queries than columns no row is projected. A vector added to all keys changes nothing, one added to all values is added to the
result.

Implementations are `KernelSpec`s of the op "pool_rows" whose forward takes the problem (dims C, M and G, options scale and eps), x, a and
offsets, and gives (y ``[G, B, M / G, C]``, saved). Their backward takes the problem, (x, a, offsets, y, saved...), (gradient of y, gradient
that is added to that of x, or None, (o, do, b)) and which gradients are wanted, and gives those of x and a. Of ``o, do [G, B M / G, D]``
and ``b [G D]`` or None, the sums of (o − b) do over D are those of y and its gradient over C: each row of o is the projected one of y, plus
b.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gem_core.hookspecs import KernelSpec
from gem_core.ops import dispatch, meeting, remember, row_sums
from gem_core.ops.contract import YES, Problem, arch_of

OP = "pool_rows"
MANY_ROWS = 16_384
"""Fewer rows are projected."""
_counted: ContextVar[bool] = ContextVar("pool_rows counted", default=False)


@contextmanager
def counted() -> Iterator[None]:
    """Inside, rows are pooled as an implementation on a device would, whatever their number; nothing is computed. For whoever counts what
    such a pass keeps, on fake tensors."""
    token = _counted.set(True)
    try:
        yield
    finally:
        _counted.reset(token)


def counting() -> bool:
    """Whether this is inside of `counted`."""
    return _counted.get()


@dataclass(frozen=True)
class Implementation:
    """A kernel chosen for a problem."""

    spec: KernelSpec
    problem: Problem

    def __call__(self, x: Tensor, a: Tensor, to_values: Tensor, bias: Tensor | None, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """(y to_valuesᵀ + bias ``[B, M / G, G D]``, x) for ``to_values [G, D, C]`` and ``bias [G D]``, which samples without rows do not
        get; a later use of that x costs no addition of gradients, as with `gem_core.ops.norm_linear`."""
        later = meeting.Later() if meeting.kept_as_they_are() else None
        read, passed = _PoolRows.apply(self, x, a, to_values, bias, offsets, later)
        row_sums.hand_on(x, passed)
        if later is not None:
            meeting.note_later(passed, later)
        return read, passed


def implementation(x: Tensor, queries: int, groups: int, scale: float, eps: float) -> Implementation | None:
    """The fastest implementation for ``x [N, C]`` and ``queries`` rows of a in ``groups``; None without one, for fewer than `MANY_ROWS`,
    or where the configuration's choice for all ops is not the fastest."""
    dims = ("C", x.shape[1]), ("M", queries), ("G", groups)
    problem = Problem(OP, x.device.type, arch_of(x.device), (("x", x.dtype),), dims, (("eps", eps), ("scale", scale)))
    if counting():
        return Implementation(_COUNTED, problem) if x.dtype in (torch.bfloat16, torch.float16) else None
    spec = dispatch.fastest(problem) if x.shape[0] >= MANY_ROWS else None
    return None if spec is None else Implementation(spec, problem)


class _PoolRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: Implementation, x: Tensor, a: Tensor, to_values: Tensor, bias: Tensor | None, offsets: Tensor,
        later: meeting.Later | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        y, saved = run.spec.forward(run.problem, x, a, offsets)
        (_, batch, queries, _), (groups, d, _) = y.shape, to_values.shape
        read = y.new_empty(batch, queries, groups * d)
        if bias is None:
            torch.bmm(y.flatten(1, 2), to_values.transpose(1, 2), out=_by_groups(read, groups))
        else:
            torch.mul(bias.expand_as(read), _there(offsets, 1, bias.dtype), out=read)
            _by_groups(read, groups).baddbmm_(y.flatten(1, 2), to_values.transpose(1, 2))
        ctx.save_for_backward(x, a, offsets, to_values, bias, read, y, *saved)
        ctx.run, ctx.later = run, later
        ctx.set_materialize_grads(False)
        return read, x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dread: Tensor | None, dx: Tensor | None) -> tuple[Tensor | None, ...]:
        run, (x, a, offsets, to_values, bias, read, y, *saved) = ctx.run, ctx.saved_tensors
        need_x, need_a, need_values, need_bias = ctx.needs_input_grad[1:5]
        if dread is None:
            return None, *meeting.with_late(ctx.later, dx, lambda beside: (beside,)), None, None, None, None, None
        groups, dread = to_values.shape[0], dread.contiguous()
        by_groups = _by_groups(dread, groups)
        dvalues = torch.bmm(by_groups.transpose(1, 2), y.flatten(1, 2)) if need_values else None
        dbias = _sums(dread, offsets) if bias is not None and need_bias else None
        found: tuple[Tensor | None, ...] = (None, None)
        if need_x or need_a:
            dy = torch.bmm(by_groups, to_values).view_as(y)
            pair = _by_groups(read, groups), by_groups, bias

            def gradients(beside: Tensor | None) -> tuple[Tensor | None, ...]:
                return run.spec.backward(run.problem, (x, a, offsets, y, *saved), (dy, beside, pair), (need_x, need_a))  # type: ignore[no-any-return]

            found = meeting.with_late(ctx.later, dx, gradients)
        return None, found[0] if need_x else None, found[1] if need_a else None, dvalues, dbias, None, None


def _by_groups(read: Tensor, groups: int) -> Tensor:
    """``[B, M / G, G D]`` as ``[G, B M / G, D]``, a view."""
    return read.view(read.shape[0] * read.shape[1], groups, read.shape[2] // groups).transpose(0, 1)


def _there(offsets: Tensor, columns: int, dtype: torch.dtype, queries: int = 1) -> Tensor:
    """``[B, queries, columns]``: 1 of samples that have rows, else 0."""

    def build() -> Tensor:
        there = (offsets[1:] > offsets[:-1]).to(dtype)
        return there.view(-1, 1, 1).expand(-1, queries, columns).contiguous()

    return remember.remembered([offsets], ("samples with rows", queries, columns, dtype), build)


def _sums(dread: Tensor, offsets: Tensor) -> Tensor:
    """Sum of ``dread [B, n, C]`` over the queries of samples that have rows; on a device a product, as `model.layers.column_sums`."""
    if dread.is_cuda:
        return (_there(offsets, 8, dread.dtype, dread.shape[1]).flatten(0, 1).t() @ dread.flatten(0, 1))[0]
    return (dread * _there(offsets, 1, dread.dtype)).sum((0, 1))


def _kept(problem: Problem, x: Tensor, a: Tensor, offsets: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Tensors of the sizes that implementations give and save: weights ``[N, M]`` and rstd ``[N]``."""
    m, groups = problem.dim("M"), problem.dim("G")
    y = x.new_empty(groups, offsets.shape[0] - 1, m // groups, x.shape[1])
    return y, (x.new_empty(x.shape[0], m), x.new_empty(x.shape[0], dtype=torch.float32))


def _gradients(problem: Problem, saved: tuple[Tensor | None, ...], douts: Any, needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if t is None else torch.empty_like(t) for t in saved[:2])


_COUNTED = KernelSpec(OP, "counted", _kept, _gradients, lambda problem: YES, 0)
