"""The weights of matrix products cast for autocast in one pass over all of them, and their gradients back in another.

Autocast casts each weight by itself where it is used: hundreds of launches a step for a deep model. The numbers are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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


class WeightCasts:
    """The weights of a module's matrix products in ``dtype`` during its forward passes (`swapped`), with gradients to the parameters.

    Those that are kept (`keep`) have a copy of their own in ``dtype`` instead, which persists and is a leaf: gradients stay at the copy.
    Who updates the parameter behind PyTorch's back writes the copy as well; other changes of it are noticed by `refresh`.

    Not for what is compiled. Gradients of parameters without a copy are there at the end of the backward pass only, so that several
    processes, which send some while the pass goes on, swap those with copies only, unless ``all_at_end`` says that these wait.

    :param find: gives the places, (owner, name) each; asked at first use.
    """

    def __init__(self, find: Callable[[], Sequence[tuple[nn.Module, str]]], dtype: torch.dtype) -> None:
        self._find, self.dtype = find, dtype
        self._places: list[tuple[nn.Module, str]] | None = None
        self._kept: dict[tuple[int, str], Kept] = {}
        self.all_at_end = False

    @property
    def places(self) -> list[tuple[nn.Module, str]]:
        if self._places is None:
            self._places = list(self._find())
        return self._places

    def keep(self, least: int) -> list[Kept]:
        """From now on parameters of at least ``least`` values that want gradients have copies that persist."""
        for owner, name in self.places:
            parameter = owner._parameters[name]
            assert parameter is not None
            large = parameter.numel() >= least and parameter.requires_grad and parameter.is_contiguous()
            if large and (id(owner), name) not in self._kept:
                copy = torch.empty_like(parameter, dtype=self.dtype, requires_grad=True)
                self._kept[id(owner), name] = Kept(parameter, copy)
        self.refresh()
        return list(self._kept.values())

    @torch.no_grad()
    def refresh(self) -> None:
        """Write the copies of parameters that have changed."""
        changed = [k for k in self._kept.values() if k.seen != k.state()]
        if changed:
            torch._foreach_copy_([k.copy for k in changed], [k.parameter for k in changed])
        for k in changed:
            k.seen = k.state()

    @contextmanager
    def swapped(self, *, kept_only: bool = False) -> Iterator[None]:
        """Inside, the parameters at the places, or at those with a copy only, are their values in ``dtype``."""
        self.refresh()
        places = [(owner, name) for owner, name in self.places if not kept_only or (id(owner), name) in self._kept]
        own = [owner._parameters[name] for owner, name in places]
        kept = [self._kept.get((id(owner), name)) for owner, name in places]
        others = [p for p, k in zip(own, kept) if k is None]
        cast = iter(CastWeights.apply(self.dtype, *others) if others else ())
        try:
            for (owner, name), k in zip(places, kept):
                value: Any = next(cast) if k is None else k.copy
                owner._parameters[name] = value
            yield
        finally:
            for (owner, name), parameter in zip(places, own):
                owner._parameters[name] = parameter


@dataclass(eq=False)
class Kept:
    """A parameter and its copy; ``seen`` is the parameter's state when the copy was last written."""

    parameter: nn.Parameter
    copy: Tensor
    seen: tuple[int, int] | None = None

    def state(self) -> tuple[int, int]:
        return self.parameter.data_ptr(), self.parameter._version
