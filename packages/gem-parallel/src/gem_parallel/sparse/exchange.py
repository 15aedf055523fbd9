"""Ids to the model ranks that hold their rows, and the looked-up rows back.

Everything is a sum of bags: a pooled feature has one bag a sample, a feature that is read event by event one bag an id. What one rank
sends to another is ordered by unit; within a unit pooled features come first (feature by feature, sample by sample), then single ids::

    lengths   pooled bags of unit 0, of unit 1, ...          int32, one a bag
    ids       unit 0: pooled, single; unit 1: ...            int64, positions in the unit's full copy
    rows back unit 0: pooled bags, single ids; unit 1: ...   [bags, dim] one unit after another

A feature whose table is cut over the axis has a bag of each sample at every piece, and its sums are added up where they arrive.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gem_core.batch import SparseGroup
from gem_core.errors import BatchError, DataError
from gem_core.jagged import lengths_to_offsets
from gem_core.model.contract import TableSet
from gem_parallel.sparse.comm import Axes
from gem_parallel.sparse.layout import Layout


@dataclass
class Demand:
    """What this rank's units are asked for by all model ranks: per unit ``positions [V]``, ``offsets [bags+1]`` and weights."""

    positions: list[Tensor]
    offsets: list[Tensor]
    weights: list[Tensor | None]
    bags: list[list[int]]
    """Bags by asking rank and unit."""


@dataclass
class Asked:
    """How the answers of all model ranks come together on the asking rank."""

    group: SparseGroup
    batch_size: int
    segment_ids: list[int]
    """Ids of this rank in each segment."""
    order: Tensor | None
    """Place in the batch of each sent id, or None where ids are sent in the order of `Routes.key_order`."""
    bags: list[list[int]]
    """Bags by answering rank and unit."""
    offsets: dict[str, Tensor] = field(default_factory=dict)
    divisors: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Sizes:
    """An exchange under way: what is to be sent, and the numbers of ids, on the host once ``ready`` has happened."""

    group: SparseGroup
    position: Tensor
    lengths: Tensor
    order: Tensor | None
    numbers: Tensor
    ready: Any


@dataclass(frozen=True)
class Segment:
    """The part of one feature's ids that goes to one piece of its table."""

    owner: int
    unit: int
    single: bool
    key: int
    piece: int


class Routes:
    """The exchange of a fixed set of look-ups over a fixed layout; collective over the model axis."""

    def __init__(self, tables: TableSet, layout: Layout, axes: Axes, output: torch.dtype = torch.float32) -> None:
        self.tables, self.layout, self.axes, self.output = tables, layout, axes, output
        self.lookups = tables.lookups
        self.dims = [tables.table(k.table).dim for k in self.lookups]
        self.units = layout.units[axes.model_rank]
        self.row_limits = [tables.table(k.table).rows for k in self.lookups]
        self.segments = sorted(
            (
                Segment(piece.owner, piece.unit, k.pooling == "none", i, number)
                for i, k in enumerate(self.lookups)
                for number, piece in enumerate(layout.pieces[k.table])
            ),
            key=lambda s: (s.owner, s.unit, s.single, s.key),
        )
        self.pooled = [i for i, s in enumerate(self.segments) if not s.single]
        self.cut = any(len(layout.pieces[k.table]) > 1 for k in self.lookups)
        self.cut_pooled = any(len(layout.pieces[k.table]) > 1 for k in self.lookups if k.pooling != "none")
        self.key_order = [s.key for s in self.segments]
        self._by_place: dict[tuple[int, int], list[int]] = {(m, u): [] for m, units in enumerate(layout.units) for u in range(len(units))}
        for i, s in enumerate(self.segments):
            self._by_place[s.owner, s.unit].append(i)
        self._constants()

    def _constants(self) -> None:
        layout, device = self.layout, self.axes.device
        most = max(len(layout.pieces[k.table]) for k in self.lookups)
        columns = {"segment": 0, "block": 1, "base": 0, "rows": 1}
        tables = {name: torch.full((len(self.lookups), most), fill, dtype=torch.int64) for name, fill in columns.items()}
        place = {(s.key, s.piece): i for i, s in enumerate(self.segments)}
        for i, k in enumerate(self.lookups):
            for number, piece in enumerate(layout.pieces[k.table]):
                unit = layout.units[piece.owner][piece.unit]
                tables["segment"][i, number] = place[i, number]
                tables["block"][i, number], tables["base"][i, number] = piece.block, piece.base
                tables["rows"][i, number] = unit.rows // layout.chunks
        self._tables = {name: t.flatten().to(device) for name, t in tables.items()}
        self._most = most
        self._cuts = torch.tensor([layout.row_blocks[k.table] for k in self.lookups], device=device)
        self._limits = torch.tensor(self.row_limits, device=device)
        width = layout.most_units * 2
        kind = torch.tensor([(s.owner * layout.most_units + s.unit) * 2 + int(s.single) for s in self.segments])
        self._kind, self._kinds, self._kind_numbers = kind.to(device), layout.model * width, kind.tolist()
        order = {s: n for n, s in enumerate(self.pooled)}
        self._pooled_row = torch.tensor([order.get(i, 0) for i in range(len(self.segments))], device=device)
        pooled_keys = [i for i, k in enumerate(self.lookups) if k.pooling != "none"]
        self._pooled_key = torch.tensor([self.segments[i].key for i in self.pooled], device=device)
        self._is_pooled = torch.tensor([k.pooling != "none" for k in self.lookups], device=device)
        self._all_pooled = len(pooled_keys) == len(self.lookups)

    # Asking

    @torch.no_grad()
    def begin(self, group: SparseGroup) -> Sizes:
        """Begin to exchange how many ids of ``group`` (the look-ups' keys) go where, without waiting for the device.

        Collective over the model axis, like `finish`; ranks may have different numbers of samples, or none.

        :raises BatchError: the group lacks a key.
        """
        lane, layout, device = self.axes.inputs, self.layout, self.axes.device
        group = self._ordered(group)
        bounds, samples = group.key_bounds(), group.batch_size
        ids = group.values[: bounds[-1]].to(torch.int64)
        # which look-up an id is of; repeat_interleave gives a look-up's ids to one warp
        ends, place = _uploaded(list(bounds[1:]), device), torch.arange(bounds[-1], device=device)
        key = torch.searchsorted(ends, place, right=True)
        bad = ((ids < 0) | (ids >= self._limits[key])).sum()
        if self.cut:
            number = (ids // self._cuts[key]).clamp(0, self._most - 1)
            place = key * self._most + number
            position = self._positions(ids - number * self._cuts[key], place)
        else:
            place = key * self._most
            position = self._positions(ids, place)
        sizes = torch.zeros(layout.model, layout.most_units * 2 + 3, dtype=torch.int64, device=device)
        if self.cut:
            segment = self._tables["segment"][place]
            per_segment = torch.zeros(len(self.segments), dtype=torch.int64, device=device)
            per_segment.scatter_add_(0, segment, torch.ones_like(segment))
            kinds = torch.zeros(self._kinds, dtype=torch.int64, device=device).scatter_add_(0, self._kind, per_segment)
        else:  # a feature is one segment, whose ids the host has counted; a million of them would be added up in a few places
            segment = place
            counted = [bounds[s.key + 1] - bounds[s.key] for s in self.segments]
            by_kind = [0] * self._kinds
            for kind, n in zip(self._kind_numbers, counted):
                by_kind[kind] += n
            per_segment, kinds = _uploaded(counted + by_kind, device).split([len(counted), self._kinds])
        lengths = self._pooled_lengths(group, samples, key, segment, bounds)
        sizes[:, : layout.most_units * 2] = kinds.view(layout.model, -1)
        sizes[:, -3:] = _uploaded([0, int(group.weights is not None), samples], device)
        sizes[:, -3] = bad
        received = lane.all_to_all(sizes, [1] * layout.model, [1] * layout.model)
        numbers, ready = _downloaded(torch.cat([per_segment, received.flatten()]))
        return Sizes(group, position, lengths, self._send_order(segment, bounds), numbers, ready)

    @torch.no_grad()
    def finish(self, sizes: Sizes) -> tuple[Demand, Asked]:
        """Exchange the ids: what this rank's units shall look up, and how its own answers come together. Waits for the sizes.

        :raises DataError: an id outside its table, on this rank or on one that asks this one.
        """
        if sizes.ready is not None:
            sizes.ready.synchronize()
        host, group, model = sizes.numbers.tolist(), sizes.group, self.layout.model
        segment_ids, tail = host[: len(self.segments)], host[len(self.segments) :]
        width = len(tail) // model
        per_rank = [tail[m * width : (m + 1) * width] for m in range(model)]
        bounds = group.key_bounds()
        self._check(per_rank, group, bounds)
        weights, position, order = group.weights, sizes.position, sizes.order
        if weights is None and any(row[-2] for row in per_rank):
            weights = torch.ones(bounds[-1], device=self.axes.device)
        if order is not None:
            position = position[order]
            weights = None if weights is None else weights[order]
        return self._exchange(group, group.batch_size, position, sizes.lengths, weights, segment_ids, per_rank, order)

    def _ordered(self, group: SparseGroup) -> SparseGroup:
        keys = tuple(k.key for k in self.lookups)
        if group.keys == keys:
            return group
        missing = [k for k in keys if k not in group.keys]
        if missing and group.values.numel() == 0 and not group.keys:
            empty = torch.zeros(0, dtype=torch.int64, device=self.axes.device)
            return SparseGroup(keys, empty, empty, None, (0,) * (len(keys) + 1))
        if missing:
            raise BatchError(f"the batch has no ids of {missing[0]!r}", where=f"features.{missing[0]}")
        weights = None if group.weights is None else {k: group.jagged(k, group.weights).values for k in keys}
        return SparseGroup.from_jagged({k: group[k] for k in keys}, weights)

    def _positions(self, row: Tensor, place: Tensor) -> Tensor:
        """Where a row of a piece stands in the full copy of its unit."""
        t, replica = self._tables, self.layout.replica
        if replica == 1:
            return row + t["base"][place]
        block, size = t["block"][place], t["rows"][place]
        holder = row // block
        stored = t["base"][place] + row - holder * block
        if self.layout.chunks == 1:
            return holder * size + stored
        chunk = stored // size
        return (chunk * (replica - 1) + holder) * size + stored

    def _pooled_lengths(self, group: SparseGroup, samples: int, key: Tensor, segment: Tensor, bounds: tuple[int, ...]) -> Tensor:
        """``[pooled segments * B]`` int32: the length of every pooled bag at every piece."""
        if not self.cut_pooled:
            return group.lengths.view(len(self.lookups), samples)[self._pooled_key].to(torch.int32).flatten()
        bags = torch.arange(len(self.lookups) * samples, device=key.device)
        bag = torch.repeat_interleave(bags, group.lengths, output_size=bounds[-1])
        lengths = torch.zeros(len(self.pooled) * samples, dtype=torch.int32, device=key.device)
        counted = torch.ones_like(bag, dtype=torch.int32) if self._all_pooled else self._is_pooled[key].to(torch.int32)
        return lengths.scatter_add_(0, self._pooled_row[segment] * samples + bag - key * samples, counted)

    def _send_order(self, segment: Tensor, bounds: tuple[int, ...]) -> Tensor | None:
        if self.cut:
            return segment.argsort(stable=True)
        if self.key_order == sorted(self.key_order):
            return None
        place = torch.arange(bounds[-1], device=segment.device)
        return torch.cat([place[bounds[k] : bounds[k + 1]] for k in self.key_order])

    def _check(self, per_rank: list[list[int]], group: SparseGroup, bounds: tuple[int, ...]) -> None:
        bad = [m for m, row in enumerate(per_rank) if row[-3]]
        if not bad:
            return
        if self.axes.model_rank in bad:
            for i, k in enumerate(self.lookups):
                ids, rows = group.values[bounds[i] : bounds[i + 1]], self.row_limits[i]
                wrong = ids[(ids < 0) | (ids >= rows)]
                if wrong.numel():
                    raise DataError(
                        f"id {int(wrong[0])} is outside [0, {rows}), the rows of table {k.table!r}",
                        where=f"features.{k.key}",
                        fix='raise rows, set hash = true, or set policy = "clip" or "default" with a default id',
                    )
        raise DataError(f"the rank with model index {bad[0]} has ids outside their tables", fix="its own message names feature and id")

    def _exchange(
        self,
        group: SparseGroup,
        samples: int,
        position: Tensor,
        lengths: Tensor,
        weights: Tensor | None,
        segment_ids: list[int],
        per_rank: list[list[int]],
        order: Tensor | None,
    ) -> tuple[Demand, Asked]:
        lane, model, mine = self.axes.inputs, self.layout.model, self.axes.model_rank
        pooled_here = [sum(not self.segments[i].single for i in self._by_place[mine, u]) for u in range(len(self.units))]
        pooled_to = [sum(1 for i in self.pooled if self.segments[i].owner == m) for m in range(model)]
        ids_to = [sum(n for s, n in zip(self.segments, segment_ids) if s.owner == m) for m in range(model)]
        ids_from = [sum(row[:-3]) for row in per_rank]
        bags_from = [sum(pooled_here) * row[-1] for row in per_rank]
        lengths = lane.all_to_all(lengths, bags_from, [n * samples for n in pooled_to])
        position = lane.all_to_all(position, ids_from, ids_to)
        if weights is not None:
            weights = lane.all_to_all(weights.float(), ids_from, ids_to)
        reads = Demand([], [], [], [[] for _ in range(model)])
        ids_at, bags_at = _starts(ids_from), _starts(bags_from)
        for u, pooled in enumerate(pooled_here):
            ranges, sizes = [], []
            for m, row in enumerate(per_rank):
                a, b, n = row[2 * u], row[2 * u + 1], pooled * row[-1]
                ranges.append((ids_at[m], ids_at[m] + a + b))
                sizes.append(lengths[bags_at[m] : bags_at[m] + n])
                if b:
                    sizes.append(lengths.new_ones(b))
                ids_at[m], bags_at[m] = ids_at[m] + a + b, bags_at[m] + n
                reads.bags[m].append(n + b)
            reads.positions.append(_joined(position, ranges))
            reads.weights.append(None if weights is None else _joined(weights, ranges))
            reads.offsets.append(lengths_to_offsets(torch.cat(sizes).to(torch.int64)))
        bags = [[0] * len(units) for units in self.layout.units]
        for s, n in zip(self.segments, segment_ids):
            bags[s.owner][s.unit] += n if s.single else samples
        return reads, self._asked(group, samples, segment_ids, order, bags)

    def _asked(self, group: SparseGroup, samples: int, segment_ids: list[int], order: Tensor | None, bags: list[list[int]]) -> Asked:
        asked = Asked(group, samples, segment_ids, order if self.cut else None, bags)
        bounds = group.key_bounds()
        for i, k in enumerate(self.lookups):
            lengths = group.lengths[i * samples : (i + 1) * samples]
            if k.pooling == "none":
                asked.offsets[k.key] = lengths_to_offsets(lengths)
            elif k.pooling == "mean":
                if group.weights is None:
                    total = lengths.clamp(min=1).float()
                else:
                    bag = torch.repeat_interleave(
                        torch.arange(samples, device=lengths.device), lengths, output_size=bounds[i + 1] - bounds[i]
                    )
                    total = torch.zeros(samples, device=lengths.device)
                    total.index_add_(0, bag, group.weights[bounds[i] : bounds[i + 1]].float())
                    total = total.where(total != 0, torch.ones_like(total))
                asked.divisors[k.key] = total.unsqueeze(1)
        return asked

    # Answers

    def answer(self, found: list[Tensor], reads: Demand, asked: Asked) -> list[Tensor]:
        """From the sums of this rank's units (``[bags, dim]`` each) to the results of its own look-ups, in their order."""
        dims = [[u.dim for u in units] for units in self.layout.units]
        mine = dims[self.axes.model_rank]
        sent = [sum(n * d for n, d in zip(bags, mine)) for bags in reads.bags]
        received = [sum(n * d for n, d in zip(bags, ds)) for bags, ds in zip(asked.bags, dims)]
        flat = self.axes.outputs.all_to_all(by_rank(found, reads.bags, self.axes.device, self.output), received, sent)
        return self._collected(flat, asked)

    def _views(self, flat: Tensor, asked: Asked) -> list[Tensor]:
        """``flat`` cut to ``[rows, dim]`` by segment."""
        views, at = [], 0
        for s, n in zip(self.segments, asked.segment_ids):
            rows, dim = n if s.single else asked.batch_size, self.dims[s.key]
            views.append(flat[at : at + rows * dim].view(rows, dim))
            at += rows * dim
        return views

    def _collected(self, flat: Tensor, asked: Asked) -> list[Tensor]:
        parts: list[list[tuple[int, Tensor]]] = [[] for _ in self.lookups]
        for i, view in enumerate(self._views(flat, asked)):
            parts[self.segments[i].key].append((i, view))
        places = self._places(asked)
        results = []
        for k, found in zip(self.lookups, parts):
            if len(found) == 1:
                result = found[0][1]
            elif k.pooling == "none":
                result = torch.empty_like(torch.cat([v for _, v in found]))
                for i, view in found:
                    result[places[i]] = view
            else:
                result = torch.stack([v for _, v in found]).sum(0)
            divisor = asked.divisors.get(k.key)
            results.append(result if divisor is None else (result / divisor).to(self.output))
        return results

    def _places(self, asked: Asked) -> dict[int, Tensor]:
        """For segments of single ids whose table is cut: the places of their ids within the feature."""
        if asked.order is None:
            return {}
        bounds, starts = asked.group.key_bounds(), _starts(asked.segment_ids)
        return {
            i: asked.order[starts[i] : starts[i] + asked.segment_ids[i]] - bounds[s.key] for i, s in enumerate(self.segments) if s.single
        }

    def give_back(
        self, gradients: list[Tensor | None], reads: Demand, asked: Asked, factor: float, ok: Tensor | None = None
    ) -> list[Tensor]:
        """Gradients of the results, times ``factor``, to those of the sums of this rank's units; the reverse of `answer`. Where the flag
        ``ok`` is false they are zeros, whatever they hold."""
        places, pieces = self._places(asked), []
        scaled: dict[int, Tensor] = {}
        for s, n, i in zip(self.segments, asked.segment_ids, range(len(self.segments))):
            rows, dim = n if s.single else asked.batch_size, self.dims[s.key]
            g = scaled.get(s.key)
            if g is None:
                given = gradients[s.key]
                if given is None:
                    count = asked.batch_size if not s.single else sum(c for t, c in zip(self.segments, asked.segment_ids) if t.key == s.key)
                    given = torch.zeros(count, dim, dtype=self.output, device=self.axes.device)
                divisor = asked.divisors.get(self.lookups[s.key].key)
                g = given.to(self.output)
                if divisor is not None or factor != 1.0:
                    g = (g * (factor if divisor is None else factor / divisor)).to(self.output)
                scaled[s.key] = g
            piece = g[places[i]] if i in places else g
            assert piece.shape == (rows, dim)
            pieces.append(piece)
        dims = [[u.dim for u in units] for units in self.layout.units]
        mine = dims[self.axes.model_rank]
        received = [sum(n * d for n, d in zip(bags, mine)) for bags in reads.bags]
        sent = [sum(n * d for n, d in zip(bags, ds)) for bags, ds in zip(asked.bags, dims)]
        flat = self.axes.outputs.all_to_all(_one_after_another(pieces, ok), received, sent)
        return by_unit(flat, reads.bags, mine)


def _uploaded(numbers: list[int], device: torch.device) -> Tensor:
    host = torch.tensor(numbers, device="cpu")
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def _downloaded(numbers: Tensor) -> tuple[Tensor, Any]:
    """On the host after the event (None: already there)."""
    if not numbers.is_cuda:
        return numbers, None
    host = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True).copy_(numbers, non_blocking=True)
    ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
    ready.record()
    return host, ready


def _starts(sizes: list[int]) -> list[int]:
    starts = [0]
    for n in sizes:
        starts.append(starts[-1] + n)
    return starts[:-1]


def _one_after_another(pieces: list[Tensor], ok: Tensor | None = None) -> Tensor:
    """All values of ``pieces``, not empty; columns of wider tensors are copied once, to where they belong. Zeros where the flag ``ok`` is
    false: values are multiplied as integers, of which any times 0 is 0."""
    flat, at, run = pieces[0].new_empty(sum(p.numel() for p in pieces)), 0, []
    for i, piece in enumerate(pieces):
        whole = piece.is_contiguous()
        if whole:
            run.append(piece.reshape(-1))
        if run and (not whole or i + 1 == len(pieces)):
            size = sum(p.numel() for p in run)
            torch.cat(run, out=flat[at : at + size])
            if ok is not None:
                words = flat[at : at + size].view(_INTEGERS[flat.element_size()])
                words.mul_(ok.to(words.dtype))
            at, run = at + size, []
        if not whole:
            _copy_columns(flat[at : at + piece.numel()].view(piece.shape), piece, ok)
            at += piece.numel()
    return flat


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _copy_columns(place: Tensor, piece: Tensor, ok: Tensor | None = None) -> None:
    """``piece [rows, dim]``, columns of a wider tensor, into ``place``, or zeros (see `_one_after_another`); by words of 8 bytes where both
    allow it, since a thread copies so many elements, however small these are."""
    each = 8 // piece.element_size()
    if piece.stride(1) == 1 and all(n % each == 0 for t in (place, piece) for n in (t.shape[1], t.stride(0), t.storage_offset())):
        place, piece = place.view(torch.int64), piece.view(torch.int64)
    if ok is None:
        place.copy_(piece)
        return
    if place.is_floating_point():
        place, piece = (t.view(_INTEGERS[t.element_size()]) for t in (place, piece))
    torch.mul(piece, ok.to(piece.dtype), out=place)


def _joined(flat: Tensor, ranges: list[tuple[int, int]]) -> Tensor:
    if all(b == c for (_, b), (c, _) in zip(ranges, ranges[1:])):
        return flat[ranges[0][0] : ranges[-1][1]]
    return torch.cat([flat[a:b] for a, b in ranges])


def by_rank(units: list[Tensor], counts: list[list[int]], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows by unit, in each ``counts[0]`` for rank 0, then those for rank 1, and so on, to one flat buffer, rank after rank. ``dtype``: of
    the rows, which a rank without units must know of those that it receives."""
    if not units:
        return torch.zeros(0, dtype=dtype, device=device)
    if len(units) == 1:
        return units[0].reshape(-1)
    at, pieces = [0] * len(units), []
    for row in counts:
        for u, n in enumerate(row):
            pieces.append(units[u][at[u] : at[u] + n].reshape(-1))
            at[u] += n
    return torch.cat(pieces)


def by_unit(flat: Tensor, counts: list[list[int]], dims: list[int]) -> list[Tensor]:
    """The reverse of `by_rank`: ``[rows, dim]`` by unit."""
    if len(dims) == 1:
        return [flat.view(-1, dims[0])]
    parts: list[list[Tensor]] = [[] for _ in dims]
    at = 0
    for row in counts:
        for u, n in enumerate(row):
            parts[u].append(flat[at : at + n * dims[u]].view(n, dims[u]))
            at += n * dims[u]
    return [torch.cat(p) for p in parts]
