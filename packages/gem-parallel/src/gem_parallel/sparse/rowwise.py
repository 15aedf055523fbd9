"""Segment sums, stochastic rounding and row-wise AdaGrad on plain tensors: the portable path, and what others must match."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class RowwiseOptions:
    """``v_r += mean_d(g_r^2)``, ``w_r -= lr * g_r / (sqrt(v_r / scale) + eps)``.

    ``scale`` is the c of momentum-scaled row-wise AdaGrad: with M replicas that update on their own, each one's squared gradients carry
    M times the noise of the mean gradient's, so v would grow M times too fast.
    """

    lr: float = 0.05
    eps: float = 1e-8
    scale: float = 1.0

    @property
    def plain(self) -> tuple[float, float]:
        """(lr, eps) of the same update in the form without a scale: ``g / (sqrt(v / c) + eps) = sqrt(c) g / (sqrt(v) + sqrt(c) eps)``."""
        root = self.scale**0.5
        return self.lr * root, self.eps * root


def segment_sum(
    values: Tensor,
    rows: Tensor,
    offsets: Tensor,
    weights: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
) -> Tensor:
    """``[S, D]`` of ``dtype``: ``scale`` times the sum, in fp32, over i in segment s of ``weights[i] * values[rows[i]]``; zeros for an
    empty segment.

    ``values [N, D]``, ``rows [V]`` int64, ``offsets [S+1]`` int64.
    """
    if rows.numel() == 0 or offsets.numel() == 1:
        return values.new_zeros(offsets.numel() - 1, values.shape[1], dtype=dtype)
    if values.is_cuda and find_spec("triton") is not None:
        from gem_parallel.sparse.bag_sums import bag_sums

        return bag_sums(values, rows, offsets, weights, dtype, scale)
    if values.dtype != torch.float32:
        values, rows = values.index_select(0, rows).float(), torch.arange(rows.numel(), device=rows.device)
    found = F.embedding_bag(rows, values, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True)
    return (found if scale == 1.0 else found * scale).to(dtype)


@dataclass(frozen=True)
class Reads:
    """Reads of rows, by distinct row: ``rows [U]`` ascending, ``place [V]`` of each read among them, and the reads in order of their row:
    ``bag [V]`` with ``bounds [U+1]``, ``weights [V]`` alike."""

    rows: Tensor
    place: Tensor
    bag: Tensor
    bounds: Tensor
    weights: Tensor | None

    @classmethod
    def of(cls, ids: Tensor, offsets: Tensor, weights: Tensor | None, below: int | None = None) -> Reads:
        """``ids [V]``, less than ``below``, in bags ``offsets [B+1]``. Waits for the device: the number of distinct rows must be known."""
        keys = ids.int() if below is not None and below < 2**31 else ids  # half the bytes to sort by
        ordered, order = keys.sort(stable=True)
        first = torch.ones_like(ordered, dtype=torch.bool)
        first[1:] = ordered[1:] != ordered[:-1]
        starts = first.nonzero().squeeze(1)
        place = torch.empty_like(order).scatter_(0, order, first.cumsum(0) - 1)
        bags = torch.arange(offsets.numel() - 1, device=ids.device)
        bag = torch.repeat_interleave(bags, offsets.diff(), output_size=ids.numel())[order]
        bounds = torch.cat([starts, starts.new_full((1,), ids.numel())])
        rows = ordered[starts].to(ids.dtype)
        return cls(rows, place, bag, bounds, None if weights is None else weights[order])

    def gradients(self, bag_gradients: Tensor, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        """``[U, D]`` of ``dtype``: ``scale`` times the gradient of each distinct row from those of the bags ``[B, D]``, summed in an order
        that its own reads decide."""
        return segment_sum(bag_gradients, self.bag, self.bounds, self.weights, dtype, scale)


def update_rows(
    weight: Tensor, accumulator: Tensor, rows: Tensor, gradients: Tensor, options: RowwiseOptions, generator: torch.Generator
) -> None:
    """Row-wise AdaGrad on the distinct ``rows [U]`` of ``weight [N, D]``; rows with zero gradient stay bit for bit."""
    if rows.numel() == 0:
        return
    lr, eps = options.plain
    v = accumulator.index_select(0, rows) + gradients.square().mean(1)
    accumulator.index_copy_(0, rows, v)
    w = weight.index_select(0, rows).float() - gradients * (lr / (v.sqrt() + eps)).unsqueeze(1)
    weight.index_copy_(0, rows, rounded(w, weight.dtype, generator))


def rounded(x: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """``x`` fp32 in ``dtype``; fp16 and bf16 round up or down at random so that the mean is ``x``. Values that ``dtype`` holds stay."""
    if dtype == torch.float32:
        return x
    dropped = 16 if dtype == torch.bfloat16 else 13
    bits = x.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << dropped, x.shape, dtype=torch.int32, device=x.device, generator=generator)
    near = ((bits + noise) & ~((1 << dropped) - 1)).view(torch.float32)
    if dtype == torch.float16:
        step = 2.0**-24  # below the smallest normal fp16 number, neighbours are a constant step apart
        uniform = torch.rand(x.shape, device=x.device, generator=generator)
        near = torch.where(x.abs() < 2.0**-14, torch.floor(x / step + uniform) * step, near.clamp(-65504.0, 65504.0))
    return torch.where(torch.isfinite(x), near, x).to(dtype)
