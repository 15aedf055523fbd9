"""How a jagged attention call is cut into a few padded batches of similar shape.

An *item* is a run of query rows of one sample with the run of key rows that they can see: a whole sample, or, where causality or a window
hides most keys of a long sample, a chunk of its rows::

      keys 0 ...              Lk
    q  ┌────┐                        chunk 0: rows 0–63    keys 0–63
    r  │////└────┐                   chunk 1: rows 64–127  keys 0–127 (causal), or only those within the window
    o  │/////////└────┐
    w  └──────────────┘

Items of similar (rows, keys) form a *group* that runs as one batched matmul; a small dynamic program chooses the groups so that padding
plus the overhead of each batch is least. Padded places repeat a valid row of the item, so that they are finite, and are masked out. All
index tensors are built once for given offsets and remembered: every layer and the backward pass use them again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from gem_core.ops.masks import Window

GROUP_COST = 60_000
"""Overhead of one batch, in score elements."""

BATCH_ELEMENTS = 1 << 18
"""Score elements of one batch: what stays in cache and bounds the memory in use."""

DEVICE_ELEMENTS, DEVICE_COST = 1 << 28, 1 << 24
"""Both on a device, where nothing stays in cache and it is launches that cost."""

CHUNK_ROWS = 64
"""Rows of a chunk where a mask hides keys; half of that in a narrow window."""


@dataclass(frozen=True)
class Masking:
    """What decides visibility, apart from the lengths."""

    causal: bool = False
    window: Window = None

    @property
    def banded(self) -> bool:
        return self.causal or self.window is not None

    @property
    def chunk_rows(self) -> int:
        left, right = (-1, -1) if self.window is None else self.window
        right = 0 if self.causal else right
        return CHUNK_ROWS // 2 if min(left, right) >= 0 and left + right <= CHUNK_ROWS else CHUNK_ROWS


@dataclass(frozen=True)
class Shape:
    """Head counts and the widths of q and v rows."""

    heads: int
    kv_heads: int


@dataclass
class Items:
    """Parallel int64 arrays, one value an item. ``row0`` and ``key0`` count within the sample."""

    sample: np.ndarray
    row0: np.ndarray
    rows: np.ndarray
    key0: np.ndarray
    keys: np.ndarray

    def take(self, index: np.ndarray) -> Items:
        return Items(self.sample[index], self.row0[index], self.rows[index], self.key0[index], self.keys[index])

    def __len__(self) -> int:
        return len(self.sample)


@dataclass
class Samples:
    """Parallel int64 arrays, one value a sample: where its rows are, how many there are, candidates and context."""

    q_start: np.ndarray
    out_start: np.ndarray
    k_start: np.ndarray
    lq: np.ndarray
    lk: np.ndarray
    targets: np.ndarray | None = None
    context: np.ndarray | None = None
    own_start: np.ndarray | None = None
    """First own candidate row in the concatenation of k and target_k; None: candidates are rows of k."""


@dataclass
class Group:
    """One padded batch of ``n`` items: ``rows`` query places and ``keys`` key places each.

    ``q_index [n·H·rows]`` and ``k_index [n·Hkv·keys]`` are rows of q and k seen as [N·heads, D]; ``out_index`` those of the result where it
    has other rows than q (a shared q). ``row_valid [n, 1, rows, 1]`` is None where no query place is padding. ``begin``, ``key_begin``: the
    group's first place in the concatenation of all groups. ``shift``: p − j of the first row and key where it is the same for all items.
    """

    n: int
    rows: int
    keys: int
    q_index: Tensor
    k_index: Tensor
    out_index: Tensor | None
    row_valid: Tensor | None
    begin: int
    key_begin: int
    shift: int | None
    items: Items
    build_mask: Callable[[], tuple[Tensor | None, bool]]
    _mask: tuple[Tensor | None, bool] | None = field(default=None, repr=False)
    keep_mask: bool = True

    def mask(self) -> tuple[Tensor | None, bool]:
        """(bool mask that broadcasts to [n, 1, rows, keys], None: all visible; whether some place sees no key)."""
        if self._mask is not None:
            return self._mask
        found = self.build_mask()
        if self.keep_mask:
            self._mask = found
        return found


@dataclass
class Plan:
    """Groups, and where each row of the results is among the groups' places (the last place, always zero, for rows of no item).

    ``k_inverse`` is None where a key row belongs to several items, whose gradients must be added up; ``q_unique`` False: likewise for q.
    """

    groups: list[Group]
    places: int
    key_places: int
    out_inverse: Tensor
    k_inverse: Tensor | None
    q_unique: bool
    samples: Samples
    masking: Masking


def host_lengths(offsets: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """First rows and lengths of the samples, int64 on the host."""
    host = offsets.cpu().numpy().astype(np.int64)
    return host[:-1], np.diff(host)


def make_plan(
    samples: Samples,
    shape: Shape,
    masking: Masking,
    *,
    out_rows: int,
    key_rows: int,
    shared_keys: bool,
    shared_q: bool,
    device: torch.device,
    by_shift: bool = False,
) -> Plan:
    """Cut the samples into items, group these and build the index tensors. ``by_shift``: groups of one relative position only."""
    elements, cost = (BATCH_ELEMENTS, GROUP_COST) if device.type == "cpu" else (DEVICE_ELEMENTS, DEVICE_COST)
    items = cut(samples, shape, masking, elements)
    groups: list[Group] = []
    places = key_places = pairs = 0
    out_inverse = _Inverse(out_rows)
    unique_keys = not shared_keys and len(np.unique(items.sample)) == len(items)
    k_inverse = _Inverse(key_rows) if unique_keys else None
    for index in _group(items, samples, shape, cost, by_shift):
        members = items.take(index)
        rows, keys = int(members.rows.max()), int(members.keys.max())
        step = max(1, elements // (shape.heads * rows * keys))
        for at in range(0, len(members), step):
            part = members.take(np.arange(at, min(at + step, len(members))))
            q_rows, row_ok = _places(samples.q_start[part.sample] + part.row0, part.rows, rows)
            k_rows, key_ok = _key_places(samples, part, keys)
            q_index, k_index = _by_head(q_rows, shape.heads), _by_head(k_rows, shape.kv_heads)
            result_rows = _places(samples.out_start[part.sample] + part.row0, part.rows, rows)[0] if shared_q else q_rows
            out_inverse.note(result_rows, row_ok, shape.heads, places)
            if k_inverse is not None:
                k_inverse.note(k_rows, key_ok, shape.kv_heads, key_places)
            groups.append(
                Group(
                    n=len(part),
                    rows=rows,
                    keys=keys,
                    q_index=torch.from_numpy(q_index.reshape(-1)).to(device),
                    k_index=torch.from_numpy(k_index.reshape(-1)).to(device),
                    out_index=torch.from_numpy(_by_head(result_rows, shape.heads).reshape(-1)).to(device) if shared_q else None,
                    row_valid=None if row_ok.all() else torch.from_numpy(row_ok[:, None, :, None]).to(device),
                    begin=places,
                    key_begin=key_places,
                    shift=_shift(samples, part),
                    items=part,
                    build_mask=_mask_builder(samples, part, masking, rows, keys, device),
                )
            )
            places += q_index.size
            key_places += k_index.size
            pairs += len(part) * rows * keys
    if pairs > (64 * elements if device.type == "cpu" else 4 * elements):
        for group in groups:
            group.keep_mask = False
    return Plan(
        groups,
        places,
        key_places,
        out_inverse.tensor(shape.heads, places).to(device),
        None if k_inverse is None else k_inverse.tensor(shape.kv_heads, key_places).to(device),
        not shared_q,
        samples,
        masking,
    )


def cut(samples: Samples, shape: Shape, masking: Masking, elements: int) -> Items:
    """Items of all samples, of at most ``elements`` scores; those without rows or without visible keys are left out."""
    limit = np.maximum(16, elements // np.maximum(1, shape.heads * samples.lk))
    size = np.minimum(limit, masking.chunk_rows) if masking.banded else limit
    count = np.where((samples.lq > 0) & (samples.lk > 0), -(-samples.lq // size), 0)
    sample = np.repeat(np.arange(len(count)), count)
    number = np.arange(len(sample)) - np.repeat(count.cumsum() - count, count)
    row0 = number * size[sample]
    rows = np.minimum(size[sample], samples.lq[sample] - row0)
    items = Items(sample, row0, rows, np.zeros_like(row0), samples.lk[sample].copy())
    return _see(items, samples, masking) if masking.banded else items


def _see(items: Items, samples: Samples, masking: Masking) -> Items:
    """Narrow each item's keys to the hull of what its rows see."""
    s = items.sample
    lq, lk = samples.lq[s], samples.lk[s]
    t = np.zeros_like(lq) if samples.targets is None else samples.targets[s]
    c = np.full_like(lq, -1) if samples.context is None else samples.context[s]
    h, last = lk - t, items.row0 + items.rows - 1
    first_target = lq - t
    plain, own = items.row0 < first_target, last >= first_target
    # the row before the first candidate has position h − 1, so positions never decrease within a chunk
    low_p, high_p = np.minimum(items.row0 + lk - lq, h), np.minimum(last + lk - lq, h)
    left, right = (-1, -1) if masking.window is None else masking.window
    low = np.maximum(0, low_p - left) if left >= 0 else np.zeros_like(lq)
    high = h.copy()
    if masking.causal:
        high = np.minimum(high, high_p + 1)
    if right >= 0:
        high = np.minimum(high, high_p + right + 1)
    has_context = c >= 0
    prefix = np.minimum(c, h)
    context_row = has_context & plain & (low_p < c)
    high = np.where(context_row, h, np.where(has_context, np.maximum(high, prefix), high))
    low = np.where(context_row | (has_context & (prefix > 0)), 0, low)
    # a chunk with candidates ends with the last one's own key
    high = np.where(own, h + last - first_target + 1, high)
    return Items(s, items.row0, items.rows, low, high - low).take(np.flatnonzero(high > low))


def _group(items: Items, samples: Samples, shape: Shape, cost: int, by_shift: bool) -> list[np.ndarray]:
    if len(items) == 0:
        return []
    if not by_shift:
        return _group_by_shape(np.arange(len(items)), items, shape, cost)
    shift = _shifts(samples, items)
    return [g for value in np.unique(shift) for g in _group_by_shape(np.flatnonzero(shift == value), items, shape, cost)]


def _group_by_shape(index: np.ndarray, items: Items, shape: Shape, group_cost: int) -> list[np.ndarray]:
    """Partition ``index`` so that padded work plus ``group_cost`` a group is least among runs of the items sorted by shape."""
    rows, keys = items.rows[index], items.keys[index]
    for grain in (1, 2, 4, 8, 16, 32, 64, 128, 1 << 40):
        code = -(-keys // grain) * (1 << 32) + -(-rows // grain)
        kinds, kind = np.unique(code, return_inverse=True)
        if len(kinds) <= 64:
            break
    count = np.bincount(kind)
    max_rows, max_keys = np.zeros(len(kinds), dtype=np.int64), np.zeros(len(kinds), dtype=np.int64)
    np.maximum.at(max_rows, kind, rows)
    np.maximum.at(max_keys, kind, keys)
    # neighbours should be alike in both lengths: coarse classes of keys first, then rows
    order = np.lexsort((max_keys, max_rows, np.ceil(np.log(max_keys) / np.log(1.2))))
    count, max_rows, max_keys = count[order], max_rows[order], max_keys[order]
    m = len(order)
    best, cut_at = np.full(m + 1, np.inf), np.zeros(m + 1, dtype=np.int64)
    best[0] = 0
    for j in range(m):
        r = np.maximum.accumulate(max_rows[j::-1])[::-1]
        k = np.maximum.accumulate(max_keys[j::-1])[::-1]
        n = count[j::-1].cumsum()[::-1]
        cost = best[: j + 1] + group_cost + n * (shape.heads * (r * k + 16 * (r + k)))
        cut_at[j + 1] = cost.argmin()
        best[j + 1] = cost.min()
    rank = np.empty(m, dtype=np.int64)
    rank[order] = np.arange(m)
    place = rank[kind]
    groups, end = [], m
    while end > 0:
        begin = int(cut_at[end])
        groups.append(index[(place >= begin) & (place < end)])
        end = begin
    return groups


def _places(start: np.ndarray, length: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows ``[n, width]`` of runs, the last one repeated beyond a run's end, and which places are within the run."""
    at = np.arange(width)[None, :]
    return start[:, None] + np.minimum(at, length[:, None] - 1), at < length[:, None]


def _key_places(samples: Samples, part: Items, width: int) -> tuple[np.ndarray, np.ndarray]:
    rows, ok = _places(samples.k_start[part.sample] + part.key0, part.keys, width)
    if samples.own_start is not None:
        assert samples.targets is not None
        history = (samples.lk - samples.targets)[part.sample]
        j = rows - samples.k_start[part.sample][:, None]
        own = samples.own_start[part.sample][:, None] + j - history[:, None]
        rows = np.where(j >= history[:, None], own, rows)
    return rows, ok


def _by_head(rows: np.ndarray, heads: int) -> np.ndarray:
    """``[n, heads, width]`` rows of the tensor seen as [N·heads, D]."""
    return rows[:, None, :] * heads + np.arange(heads)[None, :, None]


class _Inverse:
    """Place of each row's first head among the groups' places, and how far the next head is from it."""

    def __init__(self, rows: int) -> None:
        self.first, self.step = np.full(rows, -1, dtype=np.int64), np.zeros(rows, dtype=np.int64)

    def note(self, rows: np.ndarray, ok: np.ndarray, heads: int, begin: int) -> None:
        """``rows [n, width]`` are at the places from ``begin``, item by item, head by head."""
        n, width = rows.shape
        place = begin + np.arange(n)[:, None] * (heads * width) + np.arange(width)
        self.first[rows[ok]] = place[ok]
        self.step[rows[ok]] = width

    def tensor(self, heads: int, nowhere: int) -> Tensor:
        """``[rows·heads]``; ``nowhere`` for rows of no item."""
        places = np.where(self.first < 0, nowhere, self.first)[:, None] + self.step[:, None] * np.arange(heads)
        return torch.from_numpy(places.reshape(-1))


def _shifts(samples: Samples, items: Items) -> np.ndarray:
    """p − j of each item's first row and first key."""
    s = items.sample
    return items.row0 + samples.lk[s] - samples.lq[s] - items.key0


def _shift(samples: Samples, part: Items) -> int | None:
    if samples.targets is not None:
        return None
    shift = _shifts(samples, part)
    return int(shift[0]) if (shift == shift[0]).all() else None


def _mask_builder(
    samples: Samples, part: Items, masking: Masking, rows: int, keys: int, device: torch.device
) -> Callable[[], tuple[Tensor | None, bool]]:
    def build() -> tuple[Tensor | None, bool]:
        mask = _mask(samples, part, masking, rows, keys, device)
        if mask is None:
            return None, False
        return mask, bool((~mask.any(-1)).any())

    return build


def _mask(samples: Samples, part: Items, masking: Masking, rows: int, keys: int, device: torch.device) -> Tensor | None:
    """The mask of a group, as small as it can be: None, [n, 1, 1, keys], [1, 1, rows, keys] or [n, 1, rows, keys]."""

    def tensor(x: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x)).to(device)

    padded = bool((part.keys < keys).any())
    at = torch.arange(keys, device=device)
    valid = (at < tensor(part.keys)[:, None])[:, None, None, :] if padded else None
    plain = samples.targets is None and (samples.context is None or not masking.banded)
    if plain and not masking.banded:
        return valid
    i = torch.arange(rows, device=device)
    if plain:
        shift = _shift(samples, part)
        shifts = tensor(_shifts(samples, part)) if shift is None else torch.tensor([shift], device=device)
        seen = _band(at[None, None, :] - i[None, :, None] - shifts[:, None, None], masking)
        # no valid row reaches beyond its item's keys where causality alone ends them
        ends = part.row0 + part.rows + (samples.lk - samples.lq)[part.sample] == part.key0 + part.keys
        if valid is None or (masking.causal and bool(ends.all())):
            return seen[:, None]
        return seen[:, None] & valid
    return _general_mask(samples, part, masking, i, at, valid, tensor)[:, None]


def _band(distance: Tensor, masking: Masking) -> Tensor:
    """Causality and window on ``distance`` = j − p."""
    seen = distance <= 0 if masking.causal else torch.ones_like(distance, dtype=torch.bool)
    if masking.window is not None:
        left, right = masking.window
        if left >= 0:
            seen &= distance >= -left
        if right >= 0:
            seen &= distance <= right
    return seen


def _general_mask(
    samples: Samples, part: Items, masking: Masking, i: Tensor, at: Tensor, valid: Tensor | None, tensor: Callable[..., Tensor]
) -> Tensor:
    """``[n, rows, keys]``: `masks.visible` for a batch of items."""
    s = part.sample
    zeros = np.zeros_like(s)
    targets = tensor(zeros if samples.targets is None else samples.targets[s])[:, None]
    lq, lk = tensor(samples.lq[s])[:, None], tensor(samples.lk[s])[:, None]
    row, key = tensor(part.row0)[:, None] + i, tensor(part.key0)[:, None] + at
    h, first_target = lk - targets, lq - targets
    candidate_q, candidate_k = row >= first_target, key >= h
    p = torch.where(candidate_q, h, row + lk - lq)[:, :, None]
    k = torch.where(candidate_k, h, key)[:, None, :]
    seen = _band(k - p, masking)
    if samples.context is not None:
        c = tensor(samples.context[s])[:, None, None]
        seen |= (k < c) | ((p < c) & ~candidate_q[:, :, None])
    itself = candidate_q[:, :, None] & ((key - h)[:, None, :] == (row - first_target)[:, :, None])
    seen = torch.where(candidate_k[:, None, :], itself, seen)
    return seen if valid is None else seen & valid[:, 0]


def relative_rows(plan: Plan, group: Group, radius: int, device: torch.device) -> Tensor:
    """Columns of a position table ``[1 or n, rows, keys]`` for a group."""
    i, at = torch.arange(group.rows, device=device), torch.arange(group.keys, device=device)
    if group.shift is not None:
        return ((at[None, :] - i[:, None] - group.shift).clamp(-radius, radius) + radius)[None]
    samples, part = plan.samples, group.items
    s = part.sample
    targets = np.zeros_like(s) if samples.targets is None else samples.targets[s]
    lq, lk, t, row0, key0 = (
        torch.from_numpy(x).to(device)[:, None] for x in (samples.lq[s], samples.lk[s], targets, part.row0.copy(), part.key0.copy())
    )
    row, key, h = row0 + i, key0 + at, lk - t
    p, k = torch.where(row >= lq - t, h, row + lk - lq), torch.where(key >= h, h, key)
    return (k[:, None, :] - p[:, :, None]).clamp(-radius, radius) + radius
