"""Where the backward passes of `norm_linear` and `norm_gdpa` meet: the first writes the gradient of its input, the second begins by reading
that gradient and this input once more.

`norm_gdpa` notes with its result what it was made of. `norm_linear` with ``through``, if its input is such a result, hands that to its
implementation, which may do the first part of the other's backward pass beside its own (`leave_gradients`); the other looks for it
(`left_gradients`) and does it itself where there is none. Nothing of this where saved tensors are recomputed, packed or moved
(`kept_as_they_are`): what was noted would be kept beside.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gem_core.ops import remember

_MADE, _LEFT = "made by norm_gdpa", "gradient of o and LN(q)"


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
