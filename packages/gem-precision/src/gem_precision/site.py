"""A site: one place of the model where numbers are quantised, with its ladder of precisions and what was measured there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gem_precision.formats import decode, element
from gem_precision.policy import LinearPolicy

SUMS = ("amax", "saturated", "flushed", "count", "signal", "error", "dot", "coded", "relative", "bad")
"""What `measure` returns, in this order, as float64: largest magnitude, elements that the format's largest value cut off, non-zero elements
that became zero, elements that count, the sums of x^2, (x - q)^2, x q, q^2 and |x - q| / |x|, and how many elements are not finite (they,
and the block they spoil, are left out of everything else)."""


@dataclass
class Site:
    """``levels``: (name, policy), from the recipe's precision to the safest; ``level`` is the one in force."""

    name: str
    kind: str
    levels: Sequence[tuple[str, Any]]
    why: str = ""
    level: int = 0
    generator: torch.Generator | None = None
    sampling: bool = False
    samples: dict[str, Tensor] = field(default_factory=dict)

    @property
    def policy(self) -> Any:
        return self.levels[self.level][1]

    @property
    def precision(self) -> str:
        return self.levels[self.level][0]

    def record(self, operand: str, x: Tensor, quantised: Any) -> None:
        """While sampling: measure what quantising did to ``x`` (the same orientation as ``quantised``). Stays on the device."""
        if self.sampling and quantised is not None:
            self.samples[operand] = measure(x, quantised)

    def record_gradient(self, operand: str, x: Tensor) -> None:
        """While sampling: norm and finiteness of a tensor that is not quantised."""
        if self.sampling:
            self.samples[operand] = measure(x, None)


def linear_levels(name: str, policy: LinearPolicy) -> list[tuple[str, LinearPolicy]]:
    """The ladder of a linear: the recipe's policy, the same with wgrad in bf16, and bf16."""
    levels = [(name, policy)]
    if policy.wgrad.quantised and (policy.fprop.quantised or policy.dgrad.quantised):
        levels.append((f"{name.removesuffix('-wgrad-bf16')}-wgrad-bf16", policy.with_wgrad_bf16()))
    if policy != policy.all_bf16():
        levels.append(("bf16", policy.all_bf16()))
    return levels


@torch.no_grad()
def measure(x: Tensor, quantised: Any) -> Tensor:
    """``[10]`` float64 on x's device, see `SUMS`."""
    if x.numel() == 0:
        return torch.zeros(len(SUMS), dtype=torch.float64, device=x.device)
    wide = x.to(torch.float32)
    finite = wide.isfinite()
    bad = (~finite).sum(dtype=torch.float64)
    wide = torch.where(finite, wide, 0.0)
    coded = wide if quantised is None else quantised.dequantize(torch.float32)
    # blocks with a NaN scale decode to NaN throughout: the bad count tells, the sums must not be poisoned
    good = finite & coded.isfinite()
    wide, coded = torch.where(good, wide, 0.0), torch.where(good, coded, 0.0)
    error = (wide - coded).abs()
    flushed = (coded == 0) & (wide != 0)
    sums = [
        wide.abs().amax().double(),
        _cut_off(wide, quantised),
        flushed.sum(dtype=torch.float64),
        good.sum(dtype=torch.float64),
        wide.square().sum(dtype=torch.float64),
        error.square().sum(dtype=torch.float64),
        (wide * coded).sum(dtype=torch.float64),
        coded.square().sum(dtype=torch.float64),
        (error / wide.abs()).nan_to_num_(0.0).sum(dtype=torch.float64),
        bad,
    ]
    return torch.stack(sums)


def _cut_off(x: Tensor, quantised: Any) -> Tensor:
    """How many elements lie more than half a step beyond the largest value of their block's scale."""
    if quantised is None:
        return x.new_zeros((), dtype=torch.float64)
    elem = element(quantised.elem)
    at_top = decode(quantised.data, elem).abs() == elem.largest
    edge = 1 + 2.0 ** (elem.emax - elem.mbits - 1) / elem.largest
    return (at_top & (x.abs() > quantised.dequantize(torch.float32).abs() * edge)).sum(dtype=torch.float64)
