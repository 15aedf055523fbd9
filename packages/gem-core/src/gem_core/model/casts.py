"""The weights of matrix products cast for autocast in one pass over all of them, and their gradients back in another.

Autocast casts each weight by itself where it is used: hundreds of launches a step for a deep model. The numbers are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class CastWeights(torch.autograd.Function):
    """``(dtype, *weights)`` -> the weights in ``dtype``; gradients come back in the weights' own dtypes, exactly."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.dtypes = [w.dtype for w in weights]
        ctx.set_materialize_grads(False)
        return tuple(_cast(weights, [dtype] * len(weights)))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        found = [(g, dtype) for g, dtype in zip(grads, ctx.dtypes) if g is not None]
        cast = iter(_cast([g for g, _ in found], [dtype for _, dtype in found]))
        return None, *(None if g is None else next(cast) for g in grads)


def _cast(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    # one call copies many only where all of them lie alike
    made = [torch.empty(t.shape, dtype=dtype, device=t.device) for t, dtype in zip(tensors, dtypes)]
    alike = [t.is_contiguous() for t in tensors]
    if any(alike):
        torch._foreach_copy_([m for m, a in zip(made, alike) if a], [t for t, a in zip(tensors, alike) if a])
    for m, t, a in zip(made, tensors, alike):
        if not a:
            m.copy_(t)
    return made


def product_weights(module: nn.Module, without: Sequence[nn.Module] = ()) -> list[tuple[nn.Module, str]]:
    """(owner, name) of the floating parameters in ``module`` that only matrix products read: those of exact `torch.nn.Linear`, and what
    modules name in ``cast_with_products``. What is inside of ``without`` is left out, and so are parameters with several owners.
    """
    apart = {id(m) for top in without for m in top.modules()}
    owners: dict[int, int] = {}
    found = []
    for owner in module.modules():
        for parameter in owner._parameters.values():
            if parameter is not None:
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
        if id(owner) not in apart:
            names = ("weight", "bias") if type(owner) is nn.Linear else getattr(owner, "cast_with_products", ())
            found += [(owner, name) for name in names if owner._parameters.get(name) is not None]
    return [(owner, name) for owner, name in found if owners[id(owner._parameters[name])] == 1]


@contextmanager
def cast_once(places: Sequence[tuple[nn.Module, str]], dtype: torch.dtype) -> Iterator[None]:
    """Inside, the parameters at ``places`` are their values in ``dtype``, with gradients to the parameters.

    Only for what is neither compiled nor distributed: the gradients of all these parameters are there at the end of the backward pass only,
    so that nothing could be sent meanwhile.
    """
    own = [owner._parameters[name] for owner, name in places]
    if not own:
        yield
        return
    try:
        for (owner, name), cast in zip(places, CastWeights.apply(dtype, *own)):
            owner._parameters[name] = cast
        yield
    finally:
        for (owner, name), parameter in zip(places, own):
            owner._parameters[name] = parameter
