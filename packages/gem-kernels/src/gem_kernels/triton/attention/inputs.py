"""The tensors of one call by name, and what every launch of the family derives from them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gem_core.ops.contracts import GDPA
from gem_kernels.triton.attention.activations import IDS
from gem_kernels.triton.attention.bias_tables import BiasTables, bias_tables
from gem_kernels.triton.attention.plan import Plan
from gem_kernels.triton.attention.schedule import TileList, tile_list
from gem_kernels.triton.attention.tiles import descriptor
from gem_kernels.triton.common.configs import Config, choose
from gem_kernels.triton.common.device import DeviceInfo, device_info


class Inputs:
    """Attributes carry the contract's tensor names; q, k, v and target rows have dense columns (``stride(2) == 1``)."""

    def __init__(self, plan: Plan, tensors: tuple[Tensor | None, ...]) -> None:
        named = dict(zip(GDPA.tensors, tensors))
        for name in ("q", "k", "v", "target_k", "target_v"):
            setattr(self, name, dense_columns(named[name]))
        for name in ("q_offsets", "k_offsets", "num_targets", "kv_index", "bias_position", "bias_time", "bias_time_edges"):
            setattr(self, name, named[name])
        self.context_len = named["context_len"] if plan.context else None
        self.q_times, self.k_times = named["bias_q_times"], named["bias_k_times"]
        if plan.targets and not plan.shared:
            self.target_k, self.target_v = self.k, self.v
        self.plan = plan
        self.device: torch.device = self.q.device
        self.info: DeviceInfo = device_info(self.device)
        self.requests = self.k_offsets.shape[0] - 1
        self.batch = self.requests if self.kv_index is None else self.kv_index.shape[0]
        self.q_len = self.q.shape[0] if plan.broadcast else 0
        self.out_rows = self.q_len * self.batch if plan.broadcast else self.q.shape[0]
        self.radius = 0 if self.bias_position is None else (self.bias_position.shape[1] - 1) // 2
        self.edges = 0 if self.bias_time is None else self.bias_time.shape[1] - 1
        self.act_ids = _act_ids(plan.activation, self.device) if isinstance(plan.activation, tuple) else None

    @property
    def time_steps(self) -> int:
        return self.edges.bit_length()

    def q_tiles(self, block: int, spelt_out: bool = False) -> TileList:
        """Tiles of query rows, by the keys their sample has."""
        plan = self.plan
        return tile_list(
            self.batch, block, self.device,
            rows=self.out_rows, offsets=self.q_offsets, length=self.q_len, longest=plan.q_bound,
            work_offsets=self.k_offsets, work_map=self.kv_index, reverse=plan.causal,
            sides=(self.q_offsets, self.k_offsets) if spelt_out else None,
        )  # fmt: skip

    def sample_tiles(self, work_offsets: Tensor | None, spelt_out: bool = False) -> TileList:
        """One tile for every sample, also an empty one; heaviest by ``work_offsets`` first. Spelt out for the key side."""
        return tile_list(
            self.batch, 1, self.device, rows=self.batch, length=1, work_offsets=work_offsets,
            work_map=None if work_offsets is self.q_offsets else self.kv_index,
            sides=(self.k_offsets, self.q_offsets) if spelt_out else None,
        )  # fmt: skip

    def k_tiles(self, block: int, spelt_out: bool = False) -> TileList:
        """Tiles of history keys, by request under sharing and by sample otherwise, with as much work as the sample has query rows."""
        plan = self.plan
        return tile_list(
            self.requests, block, self.device,
            rows=self.k.shape[0], offsets=self.k_offsets, length=self.q_len, longest=plan.k_bound,
            work_offsets=self.q_offsets if self.kv_index is None else None,
            subtract=None if plan.shared else self.num_targets,
            sides=(self.k_offsets, self.q_offsets) if spelt_out else None,
        )  # fmt: skip

    def sample_args(self, *own: Tensor | None) -> tuple[Any, ...]:
        """q_offsets, k_offsets, num_targets, the given tensors about candidates, context_len, kv_index of a kernel."""
        return self.q_offsets, self.k_offsets, self.num_targets, *own, self.context_len, self.kv_index

    @functools.cached_property
    def tables(self) -> BiasTables | None:
        """The prepared tables of the bias, built when first asked for; None without a bias."""
        if self.bias_position is None:
            return None
        return bias_tables(
            self.bias_position, self.bias_time, self.bias_time_edges, self.q_times, self.k_times,
            self.q_offsets, self.k_offsets, self.kv_index, self.batch, self.plan.scale,
        )  # fmt: skip

    def own_bias_args(self) -> tuple[Any, ...]:
        """bias_position, bias_time, time_edges, q_times, k_times of a row-wise kernel."""
        t = self.tables
        return (None,) * 5 if t is None else (t.position, t.time, self.bias_time_edges, self.q_times, self.k_times)

    def bias_args(self) -> tuple[Any, ...]:
        """bias_position, bias_time, time_index, time_edges, q_times, k_times, q_relative, k_relative of a kernel."""
        t = self.tables
        if t is None:
            return (None,) * 8
        return t.position, t.time, t.index, self.bias_time_edges, self.q_times, self.k_times, t.q_times, t.k_times


def row_strides(*tensors: Tensor | None) -> list[int]:
    """stride(0), stride(1) of each; zeros for an absent one."""
    return [s for t in tensors for s in ((0, 0) if t is None else (t.stride(0), t.stride(1)))]


def dense_columns(x: Tensor | None) -> Tensor | None:
    return x if x is None or x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous()


def bias_strides(x: Inputs) -> list[int]:
    """Row strides of the prepared position and time tables."""
    tables = () if x.tables is None else (x.tables.position, x.tables.time)
    return [0 if t is None else t.stride(0) for t in tables] or [0, 0]


def descriptors(tma: bool, *boxes: tuple[Tensor, int]) -> list[Any]:
    """A descriptor of each (tensor, rows of a box), or the tensors themselves."""
    return [descriptor(t, rows) if tma else t for t, rows in boxes]


def grid_size(bound: int, heads: int, persistent: int, sms: int) -> int:
    """Programs for at most ``bound`` tiles a head: one each, or ``persistent`` on every SM, walking over the tiles."""
    return min(bound * heads, persistent * sms) if persistent else bound * heads


def choose_and_run(x: Inputs, kernel: str, propose: Callable[[str, Plan, DeviceInfo], list[Config]], run: Callable[[Config], None]) -> None:
    """Launch ``kernel`` with the configuration for the call's facts."""
    run(choose(kernel, x.plan.facts, x.info, lambda: propose(kernel, x.plan, x.info), run))


_cached_ids: dict[tuple[tuple[str, ...], torch.device], Tensor] = {}


def _act_ids(names: tuple[str, ...], device: torch.device) -> Tensor:
    key = (names, device)
    if key not in _cached_ids:
        _cached_ids[key] = torch.tensor([IDS[n] for n in names], dtype=torch.int32, device=device)
    return _cached_ids[key]
