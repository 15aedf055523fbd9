"""A site: one place of the model where numbers are quantised, with its ladder of precisions and what was measured there."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gem_precision.formats import decode, element
from gem_precision.formats.mx import NAN_SCALE, block_amax
from gem_precision.kernels.measure import measure_on_device, measures
from gem_precision.policy import LinearPolicy

SUMS = ("amax", "saturated", "flushed", "count", "signal", "error", "dot", "coded", "relative", "dead", "spoiled", "bad")
"""What `measure` returns, in this order, as float64. Of the whole tensor: its largest magnitude (of the finite elements of the window where
that is not finite). Of the window: elements that the format's largest value cut off, non-zero elements that became zero, elements that
count, the sums of x^2, (x - q)^2, x q, q^2 and |x - q| / |x|, and blocks that are not zero and came out zero. Of the whole tensor again:
blocks whose scale is not a number, and whether x has elements that are not finite (these count in nothing else)."""

WINDOW_ROWS, WINDOW_COLUMNS = 128, 2048
"""A sample looks at a window of this size, at another place each time; multiples of every block."""


_numbers = itertools.count()
_sites: weakref.WeakValueDictionary[int, Site] = weakref.WeakValueDictionary()
"""Sites by number: ops take no objects, so they are told a `Site.key`."""


def site_of(key: str) -> tuple[Site, Any]:
    """The site of a `Site.key`, and the policy of the level in it."""
    number, level = key.split("/")
    site = _sites[int(number)]
    return site, site.levels[int(level)][1]


@dataclass
class Site:
    """``levels``: (name, policy), from the recipe's precision to the safest; ``level`` is the one in force. ``changed`` is called with the
    new policy. ``live`` is whether the forward now running is being measured. ``key`` names site and level to an op. A linear with fewer
    rows than ``min_rows`` stays in bf16; ``few_rows``: how many the last such call had."""

    name: str
    kind: str
    levels: Sequence[tuple[str, Any]]
    why: str = ""
    level: int = 0
    generator: torch.Generator | None = None
    sampling: bool = False
    live: bool = False
    samples: dict[str, Tensor] = field(default_factory=dict)
    turn: int = 0
    changed: Callable[[Any], None] | None = None
    min_rows: int = 0
    few_rows: int | None = None
    number: int = field(init=False)
    key: str = field(init=False)

    def __post_init__(self) -> None:
        self.number = next(_numbers)
        _sites[self.number] = self
        self.key = f"{self.number}/{self.level}"

    @property
    def policy(self) -> Any:
        return self.levels[self.level][1]

    @property
    def precision(self) -> str:
        return self.levels[self.level][0]

    def move(self, level: int) -> None:
        """Put another level in force."""
        self.level, self.key = level, f"{self.number}/{level}"
        if self.changed is not None:
            self.changed(self.policy)

    def enter(self, samples: bool) -> None:
        """At the beginning of a forward: measure it if a sample is due and it is one of training (``samples``)."""
        self.live = self.sampling and samples

    def record(self, operand: str, x: Tensor, quantised: Any) -> None:
        """While live: measure what quantising did to ``x`` (the same orientation as ``quantised``). Stays on the device; several
        micro-batches of a step add up."""
        if self.live:
            new, old = measure(x, quantised, self.turn), self.samples.get(operand)
            if old is not None:
                new = torch.cat([torch.maximum(new[:1], old[:1]), new[1:] + old[1:]])
            self.samples[operand] = new


def linear_levels(name: str, policy: LinearPolicy) -> list[tuple[str, LinearPolicy]]:
    """The ladder of a linear: the recipe's policy, the same with wgrad in bf16, and bf16."""
    levels = [(name, policy)]
    if policy.wgrad.quantised and (policy.fprop.quantised or policy.dgrad.quantised):
        levels.append((f"{name.removesuffix('-wgrad-bf16')}-wgrad-bf16", policy.with_wgrad_bf16()))
    if policy != policy.all_bf16():
        levels.append(("bf16", policy.all_bf16()))
    return levels


@torch.no_grad()
def measure(x: Tensor, quantised: Any, turn: int = 0) -> Tensor:
    """``[12]`` float64 on x's device, see `SUMS`. ``x [rows, K]`` in the orientation of ``quantised``, or anything where that is None (then
    x alone is measured). ``turn`` moves the window; consecutive turns reach every part."""
    if x.numel() == 0:
        return torch.zeros(len(SUMS), dtype=torch.float64, device=x.device)
    if measures(x, quantised):
        r0, c0 = _corner(x, turn)
        window = r0, min(r0 + WINDOW_ROWS, x.shape[0]), c0, min(c0 + WINDOW_COLUMNS, x.shape[1])
        return measure_on_device(x, quantised, window)
    # a maximum does not depend on the order: read the memory straight through
    top = torch.linalg.vector_norm(x if x.is_contiguous() else x.transpose(-1, -2), torch.inf, dtype=torch.float32)
    spoiled = top.new_zeros(()) if quantised is None else _nan_scales(quantised)
    if x.dim() == 2:
        x, quantised = _window(x, quantised, turn)
    wide = x.to(torch.float32)
    coded = wide if quantised is None else quantised.dequantize(torch.float32)
    good = wide.isfinite() & coded.isfinite()
    wide, coded = torch.where(good, wide, 0.0), torch.where(good, coded, 0.0)
    error, size = (wide - coded).abs(), wide.abs()
    elements = torch.stack(
        [
            _cut_off(size, coded.abs(), quantised),
            ((coded == 0) & (wide != 0)).float(),
            good.float(),
            wide * wide,
            error * error,
            wide * coded,
            coded * coded,
            (error / size).nan_to_num_(0.0),
        ]
    ).view(8, -1)
    amax = torch.where(top.isfinite(), top, size.amax())
    others = (amax, _dead(wide, coded, quantised).sum(), spoiled.sum(), ~top.isfinite())
    first, dead, nan, bad = (t.to(torch.float64).reshape(1) for t in others)
    return torch.cat([first, elements.sum(1, dtype=torch.float64), dead, nan, bad])


def _nan_scales(quantised: Any) -> Tensor:
    scales = quantised.scales
    return scales == NAN_SCALE if scales.dtype == torch.uint8 else scales.isnan()


def _corner(x: Tensor, turn: int) -> tuple[int, int]:
    rows, columns = (-(-size // width) for size, width in zip(x.shape, (WINDOW_ROWS, WINDOW_COLUMNS)))
    return turn % rows * WINDOW_ROWS, turn // rows % columns * WINDOW_COLUMNS


def _window(x: Tensor, quantised: Any, turn: int) -> tuple[Tensor, Any]:
    r0, c0 = _corner(x, turn)
    r1, c1 = min(r0 + WINDOW_ROWS, x.shape[0]), min(c0 + WINDOW_COLUMNS, x.shape[1])
    if quantised is None:
        return x[r0:r1, c0:c1], None
    br, bc = (n or size for n, size in zip(quantised.block, x.shape))
    scales = quantised.scales[r0 // br : -(-r1 // br), c0 // bc : -(-c1 // bc)]
    return x[r0:r1, c0:c1], type(quantised)(quantised.data[r0:r1, c0:c1], scales, quantised.elem, quantised.block)


def _dead(x: Tensor, coded: Tensor, quantised: Any) -> Tensor:
    if quantised is None:
        return x.new_zeros(())
    r, c = (n or size for n, size in zip(quantised.block, x.shape))
    return (block_amax(coded, (r, c)) == 0) & (block_amax(x, (r, c)) > 0)


def _cut_off(size: Tensor, coded: Tensor, quantised: Any) -> Tensor:
    """Which elements (magnitudes ``size``, ``coded`` after quantising) lie more than half a step beyond the largest value of their block's
    scale."""
    if quantised is None:
        return torch.zeros_like(size)
    elem = element(quantised.elem)
    at_top = decode(quantised.data, elem).abs() == elem.largest
    edge = 1 + 2.0 ** (elem.emax - elem.mbits - 1) / elem.largest
    return (at_top & (size > coded * edge)).float()
