"""Where the backward passes of `norm_linear` and `norm_gdpa` meet: one writes what the other begins by reading, and both read the rows.

`norm_gdpa`, then `norm_linear`: `norm_gdpa` notes with its result what it was made of. `norm_linear` with ``through``, if its input is such
a result, hands that to its implementation, which may do the first part of the other's backward pass beside its own (`leave_gradients`); the
other looks for it (`left_gradients`) and does it itself where there is none.

`norm_linear`, then `norm_gdpa`: of rows that ``through`` handed on and that only one `norm_gdpa` reads (`read_once` promises that), its
backward pass may leave out the last part, the norm's (`later_of`, `Later.leave`). `norm_linear` gets it with the gradient; its
implementation may do it beside its own (`late_with`), and where it does not, it is done before.

Nothing of this where saved tensors are recomputed, packed or moved (`kept_as_they_are`): what was noted would be kept beside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gem_core.errors import OpError
from gem_core.ops import remember

_MADE, _LEFT, _LATER, _LATE = "made by norm_gdpa", "gradient of o and LN(q)", "part of a backward pass", "what was left of it"


class Made(NamedTuple):
    """What a result of `norm_gdpa` was made of: ``q [Nq, H, D]``, its offsets and one value a row of each statistic."""

    q: Tensor
    q_offsets: Tensor
    mean: Tensor
    rstd: Tensor
    out_rstd: Tensor


def kept_as_they_are() -> bool:
    """Whether what is saved for backward passes now stays as it is until then."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is None  # type: ignore[attr-defined,no-any-return,unused-ignore]


def note_made(out: Tensor, made: Made) -> None:
    """Note with ``out``, a result of `norm_gdpa` or its rows, what it was made of."""
    remember.note(out, _MADE, made)


def made_of(out: Tensor) -> Made | None:
    """Of a result of `norm_gdpa`, or of its rows ``[Nq, H D]``; None of other tensors."""
    found: Made | None = remember.noted(out, _MADE)
    return found


def leave_gradients(dout: Tensor, do: Tensor, l: Tensor) -> None:
    """Note with the gradient of a result of `norm_gdpa` that of o, and LN(q), ``[Nq, H, D]``. Who takes them may write them."""
    remember.note(dout, _LEFT, (do, l))


def left_gradients(dout: Tensor) -> tuple[Tensor, Tensor] | None:
    """(gradient of o, LN(q)) where they came with the gradient ``dout``."""
    found: tuple[Tensor, Tensor] | None = remember.noted(dout, _LEFT)
    return found


@dataclass
class Late:
    """What is left of `norm_gdpa`'s backward pass: with l = LN(q) and its gradient ``dl [Nq, H, D]``, of which ``do`` is a summand that is
    not in it yet (None: it is), the gradient of q is LayerNorm's of dl plus ``grad``. ``finish`` does it, and gives that gradient."""

    q: Tensor
    q_offsets: Tensor
    mean: Tensor
    rstd: Tensor
    dl: Tensor
    do: Tensor | None
    grad: Tensor
    finish: Callable[[], Tensor]
    taken: bool = False
    """Whether it has been done; who does it sets this, or calls `finished`."""

    def finished(self) -> Tensor:
        """The gradient of q."""
        self.taken = True
        return self.finish()


class Later:
    """Goes with rows that `norm_linear` handed on. ``read_once``: a `norm_gdpa` is all that reads them."""

    def __init__(self) -> None:
        self.read_once = False
        self._left: tuple[Late, int] | None = None

    def leave(self, late: Late) -> None:
        """What `norm_gdpa` leaves undone; its gradient of q is then ``late.dl``, unfinished."""
        self._left = late, late.dl._version

    def take(self, grad: Tensor | None) -> Late | None:
        """What was left, if ``grad``, of the rows, is the unfinished one.

        :raises OpError: something was left, and the gradient is another one.
        """
        left, self._left = self._left, None
        if left is None:
            return None
        late, version = left
        if grad is None or grad.data_ptr() != late.dl.data_ptr() or grad.numel() != late.dl.numel() or late.dl._version != version:
            raise OpError(
                "the gradient of rows that only norm_gdpa was to read was written, or another one was added to it",
                where="norm_linear, through",
                fix="remove the hook that writes it, or choose kernels that leave nothing undone (kernels.ops.norm_gdpa = eager)",
            )
        return late


def note_later(rows: Tensor, later: Later) -> None:
    """Note with rows that `norm_linear` hands on where the rest of their gradient may be done."""
    remember.note(rows, _LATER, later)


def read_once(rows: Tensor) -> None:
    """Promise that of ``rows [N, C]``, which `norm_linear` handed on, only the next `norm_gdpa` makes use."""
    later: Later | None = None if torch.compiler.is_compiling() else remember.noted(rows, _LATER)
    if later is not None:
        later.read_once = True


def in_heads(rows: Tensor, heads: int, d: int) -> Tensor:
    """``rows [N, C]`` as ``[N, heads, d]``, with what is noted with them."""
    q = rows.view(-1, heads, d)
    if not torch.compiler.is_compiling():
        remember.hand_on(rows, q)
    return q


def later_of(q: Tensor) -> Later | None:
    """Where `norm_gdpa` of q may leave the last part of its backward pass."""
    later: Later | None = remember.noted(q, _LATER)
    return later if later is not None and later.read_once else None


def note_late(grad: Tensor, late: Late) -> None:
    """Note with the unfinished gradient what finishes it."""
    remember.note(grad, _LATE, late)


def late_with(grad: Tensor | None) -> Late | None:
    """What finishes ``grad``, where it is unfinished."""
    late: Late | None = None if grad is None else remember.noted(grad, _LATE)
    return late


def with_late(
    later: Later | None, dx: Tensor | None, gradients: Callable[[Tensor | None], tuple[Tensor | None, ...]]
) -> tuple[Tensor | None, ...]:
    """``gradients(dx)``, dx being the gradient of rows that were handed on; finished by the implementation, or before it runs again."""
    late = None if later is None else later.take(dx)
    if late is None or dx is None:
        return gradients(dx)
    note_late(dx, late)
    found = gradients(dx)
    return found if late.taken else gradients(late.finished().view_as(dx))
