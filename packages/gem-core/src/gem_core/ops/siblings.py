"""Gradients of tensors that are slices of one projection, side by side in memory, so that joining them again costs nothing.

``q, k, v = unbind(x)`` of ``x [N, 3, H, D]`` are views; the gradient of x is their gradients stacked. Ops whose differentiable tensors are
such siblings leave the gradients of these as slices of one tensor too (`empty_grads`), and the backward of `unbind` finds them to be the
parts of what it has to return. Gradients that lie elsewhere are stacked.

What computes a gradient may also leave the sums of its columns (`leave_sums`): these are the gradient of a linear layer's bias, for which
its backward pass would read all of it once more (`column_sums`). For the gradients of softmax attention they follow from those of the
gradient of its result (`leave_softmax_sums`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gem_core.ops import remember

_SUMS = "column sums"


def groups(tensors: Sequence[Tensor | None], needs: Sequence[bool]) -> list[range]:
    """Which runs of ``tensors`` whose gradients are needed are all the slices of one contiguous ``[N, count, H, D]``."""
    found, i = [], 0
    while i < len(tensors):
        t = tensors[i]
        count = 0
        if t is not None and t.dim() == 3 and needs[i] and t.stride()[1:] == (t.shape[2], 1):
            count = t.stride(0) // max(1, t.shape[1] * t.shape[2])
        run = range(i, i + max(count, 1))
        if count > 1 and run.stop <= len(tensors) and all(needs[j] and _follows(t, tensors[j], j - i, count) for j in run):
            found.append(run)
        i = found[-1].stop if found and found[-1].start == i else i + 1
    return found


def _follows(first: Tensor | None, t: Tensor | None, place: int, count: int) -> bool:
    """Whether ``t`` is slice number ``place`` of ``count``, ``first`` being number 0."""
    if first is None or t is None:
        return False
    if t.shape != first.shape or t.stride() != first.stride() or t.dtype != first.dtype or t.device != first.device:
        return False
    size = t.shape[1] * t.shape[2]
    return t.stride(0) == count * size and t.storage_offset() == first.storage_offset() + place * size


def empty_grads(tensors: Sequence[Tensor | None], needs: Sequence[bool], together: Sequence[range] | None = None) -> list[Tensor | None]:
    """Empty gradients: contiguous, siblings as the slices of one tensor, None where none is needed. ``together``: the groups if known."""
    grads = [None if t is None or not need else torch.empty(t.shape, dtype=t.dtype, device=t.device) for t, need in zip(tensors, needs)]
    for run in groups(tensors, needs) if together is None else together:
        n, h, d = tensors[run.start].shape  # type: ignore[union-attr]
        joined = tensors[run.start].new_empty((n, len(run), h, d))  # type: ignore[union-attr]
        grads[run.start : run.stop] = joined.unbind(1)
    return grads


def place(together: Sequence[range], grads: list[Any]) -> set[int]:
    """Puts the gradients of each group side by side, copying those that an implementation did not leave so; which these are."""
    placed: set[int] = set()
    for run in together:
        if _joined(grads[run.start : run.stop]) is None:
            grads[run.start : run.stop] = torch.stack(grads[run.start : run.stop], 1).unbind(1)
        placed.update(run)
    return placed


def _joined(parts: Sequence[Tensor]) -> Tensor | None:
    """The tensor ``[N, count, H, D]`` whose slices ``parts`` are."""
    first, count = parts[0], len(parts)
    if first.numel() == 0 or first.dim() != 3 or first.stride()[1:] != (first.shape[2], 1):
        return None
    if any(t.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() for t in parts):
        return None
    if not all(_follows(first, t, i, count) for i, t in enumerate(parts)):
        return None
    n, h, d = first.shape
    return first.as_strided((n, count, h, d), (count * h * d, h * d, d, 1), first.storage_offset())


def leave_sums(parts: Sequence[Tensor], sums: Tensor) -> None:
    """Note column sums in fp32 with a gradient, ``[C]`` of ``[N, C]``, or with those that are the slices of one ``[N, count, H, D]``,
    ``[count · H · D]``."""
    remember.note(parts[0], _SUMS, sums)


def sums_of(x: Tensor) -> Tensor | None:
    """Column sums ``[C]`` fp32 of ``x [N, C]`` where they came with it, unwritten since."""
    found: Tensor | None = remember.noted(x, _SUMS)
    return found


def column_sums(x: Tensor) -> Tensor:
    """Column sums ``[C]`` fp32 (fp64 of fp64) of ``x [N, C]``: those that came with it, else, on a device and in 16 bits, a product with
    ones, which reads the rows twice as fast as PyTorch's reduction does.

    The ones lie row by row: side by side, their stride would be the number of rows, and one that is no multiple of 8 brings the library's
    slowest kernel.
    """
    known = sums_of(x)
    if known is not None:
        return known
    if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and x.shape[0]:
        return torch.mm(x.new_ones((x.shape[0], 8)).t(), x, out_dtype=torch.float32)[0]
    return x.sum(0, dtype=torch.promote_types(x.dtype, torch.float32))


def leave_softmax_sums(grads: Sequence[Tensor], dout: Tensor, scale: float = 1.0) -> None:
    """Notes the column sums of dQ, dK and dV, slices of one tensor, of attention whose rows have weights that add up to ``scale``; nothing
    where those of ``dout [N, H, D]`` are not known.

    A vector added to all values of a head is added to all of its results, so that the sums of dV are those of dO; one added to all keys
    moves all scores of a row alike, so that the sums of dK are zero. Only dQ is read.
    """
    known = sums_of(dout)
    if known is None:
        return
    own = column_sums(grads[0].flatten(1))
    leave_sums(grads, torch.cat([own, torch.zeros_like(own), known if scale == 1 else scale * known]))


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
        ctx.columns_of, ctx.widths = x, widths
        return x.split(list(widths), 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None]:
        rows, some = ctx.columns_of.shape[0], next(g for g in grads if g is not None)
        return torch.cat([some.new_zeros(rows, n) if g is None else g for g, n in zip(grads, ctx.widths)], 1), None


def columns(x: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
    """``x.split(widths, 1)`` of ``x [N, C]``, which `whole` puts together again for nothing, in the backward pass too."""
    return _Columns.apply(x, widths)  # type: ignore[no-any-return]


def whole(parts: Sequence[Tensor]) -> Tensor | None:
    """The tensor that `columns` cut into ``parts``, all of them in order; None where they are not that."""
    if torch.compiler.is_compiling():
        return None
    node: Any = parts[0].grad_fn
    x: Tensor | None = getattr(node, "columns_of", None)
    if x is None or len(node.widths) != len(parts):
        return None
    return x if all(p.grad_fn is node and p.output_nr == i for i, p in enumerate(parts)) else None


class _Flat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.given = x.shape
        return x.flatten(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        turned = grad.reshape(ctx.given)
        if not torch.is_grad_enabled():
            remember.hand_on(grad, turned)
        return turned


def flat(x: Tensor) -> Tensor:
    """``x.flatten(1)`` of ``x [N, H, D]``; hands on what is noted with x (`gem_core.ops.remember`) and with its gradient."""
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and x.requires_grad):
        return x.flatten(1)
    y: Tensor = _Flat.apply(x)
    remember.hand_on(x, y)
    return y


class _Unbind(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
        ctx.given = x.shape
        x = x.view(-1, *shape)
        ctx.like = x.shape[0], *x.shape[2:]
        return x.unbind(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None]:
        some = next(g for g in grads if g is not None)
        parts = [some.new_zeros(ctx.like) if g is None else g for g in grads]
        joined = None if torch.is_grad_enabled() else _joined(parts)  # as one tensor they would be differentiated as the first of them
        if joined is None:
            return torch.stack(parts, 1).view(ctx.given), None
        joined = joined.view(ctx.given)
        if (sums := remember.noted(parts[0], _SUMS)) is not None:
            remember.note(joined, _SUMS, sums)
        return joined, None


def unbind(x: Tensor, *shape: int) -> tuple[Tensor, ...]:
    """``x.unbind(1)`` of ``x [N, count, H, D]``, whose backward pass copies nothing where the gradients are siblings. Of ``x [N, C]``
    with (count, H, D) as ``shape``: the gradient of x then is the very tensor that column sums may be known of (`sums_of`)."""
    shape = shape or tuple(x.shape[1:])
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and x.requires_grad):
        return x.view(-1, *shape).unbind(1)
    return _Unbind.apply(x, shape)  # type: ignore[no-any-return]
