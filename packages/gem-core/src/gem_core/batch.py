"""The batch every source produces and every model consumes: packed, pinned on request, never padded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from gem_core.errors import BatchError
from gem_core.jagged import Jagged, check_offsets, lengths_to_offsets, places


@dataclass(frozen=True)
class SparseGroup:
    """Multi-valued id features, packed feature by feature (the layout of TorchRec's KeyedJaggedTensor).

    ``values [V]`` int64 holds all ids of the first key (sample by sample), then of the second key, and so on; ``lengths [F*B]`` int32 or
    int64 in the same order; ``weights [V]`` float or None. ``offsets_per_key`` (F+1 host integers into ``values``) is known to the reader
    and saves a device sync. ``slack``: a key may have more values than its lengths ask for, valid ids all of them, which no sample has.
    """

    keys: tuple[str, ...]
    values: Tensor
    lengths: Tensor
    weights: Tensor | None = None
    offsets_per_key: tuple[int, ...] | None = None
    slack: bool = False

    @property
    def batch_size(self) -> int:
        return self.lengths.numel() // max(1, len(self.keys))

    def key_bounds(self) -> tuple[int, ...]:
        """F+1 host integers: where each key's values begin. Reads the lengths on the host unless the reader provided the bounds."""
        if self.offsets_per_key is not None:
            return self.offsets_per_key
        per_key = self.lengths.view(len(self.keys), -1).sum(1).tolist() if self.keys else []
        return tuple(accumulate(per_key, initial=0))

    def __getitem__(self, key: str) -> Jagged:
        """The ids of one feature as Jagged views ``values [V_key]``, ``offsets [B+1]``."""
        return self.jagged(key, self.values)

    def jagged(self, key: str, flat: Tensor) -> Jagged:
        """``flat [V, ...]`` (aligned with ``values``) cut to one feature."""
        try:
            i = self.keys.index(key)
        except ValueError:
            raise BatchError(f"the batch has no sparse feature {key!r}", fix=f"it has: {', '.join(self.keys) or 'none'}") from None
        bounds, b = self.key_bounds(), self.batch_size
        return Jagged(flat[bounds[i] : bounds[i + 1]], lengths_to_offsets(self.lengths[i * b : (i + 1) * b]))

    @classmethod
    def from_jagged(cls, features: Mapping[str, Jagged], weights: Mapping[str, Tensor] | None = None) -> SparseGroup:
        """Pack features that share a batch size. Without ``weights`` nothing but the concatenation is copied."""
        if not features:
            return cls((), torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64), None, (0,))
        sizes = {k: j.batch_size for k, j in features.items()}
        if len(set(sizes.values())) > 1:
            raise BatchError(f"sparse features have different batch sizes: {sizes}", where=", ".join(features))
        packed = None
        if weights:
            packed = torch.cat(
                [weights[k] if k in weights else torch.ones_like(j.values, dtype=torch.float32) for k, j in features.items()]
            )
        return cls(
            tuple(features),
            torch.cat([j.values for j in features.values()]),
            torch.cat([j.lengths for j in features.values()]),
            packed,
            tuple(accumulate((j.values.shape[0] for j in features.values()), initial=0)),
        )

    def to_kjt(self) -> Any:
        """TorchRec's KeyedJaggedTensor over the same storage (needs torchrec)."""
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        return KeyedJaggedTensor(list(self.keys), self.values, weights=self.weights, lengths=self.lengths, stride=self.batch_size)

    @classmethod
    def from_kjt(cls, kjt: Any) -> SparseGroup:
        """The same storage as a TorchRec KeyedJaggedTensor."""
        return cls(tuple(kjt.keys()), kjt.values(), kjt.lengths(), kjt.weights_or_none())


@dataclass(frozen=True)
class SequenceGroup:
    """One jagged history a sample with aligned per-event fields.

    ``offsets [B+1]``; ``fields``: name -> ``[N]``, ``[N, d]`` or, for multi-valued fields inside an event, a Jagged over the N events.
    ``timestamps [N]`` int64 (unit of the feature declaration, seconds unless said otherwise) or None. ``max_length`` bounds the lengths.
    ``slack``: there may be rows past the last offset, which hold valid values and belong to no sample.
    """

    offsets: Tensor
    fields: Mapping[str, Tensor | Jagged]
    timestamps: Tensor | None = None
    max_length: int | None = None
    slack: bool = False

    @property
    def batch_size(self) -> int:
        return self.offsets.numel() - 1

    @property
    def lengths(self) -> Tensor:
        return self.offsets.diff()

    def jagged(self, field_name: str) -> Jagged:
        values = self.fields[field_name]
        if isinstance(values, Jagged):
            raise BatchError(f"field {field_name!r} is multi-valued inside the event; use group.fields[{field_name!r}]", where=field_name)
        return Jagged(values, self.offsets, self.max_length)


@dataclass(frozen=True)
class Requests:
    """Request-level features stored once for several impressions.

    ``kv_index [B]`` maps a sample to its request; ``sequences`` and ``sparse`` have batch size R <= B.
    """

    kv_index: Tensor
    sequences: Mapping[str, SequenceGroup] = field(default_factory=dict)
    sparse: SparseGroup | None = None


@dataclass(frozen=True)
class Batch:
    """B samples. Every tensor is packed; nothing is padded. All members but ``size`` may be None or empty.

    - ``dense [B, F]`` float, ``dense_names`` its F column names
    - ``vectors``: name -> ``[B, d]`` float (fixed-width embeddings of creatives or texts)
    - ``sparse``: the id features, ``sequences``: the histories by group name
    - ``labels [B, T]`` float in [0, 1], ``label_names`` its T task names, ``label_mask [B, T]`` bool (True: the label counts)
    - ``weights [B]`` or ``[B, T]`` float of at least 0 (0: the sample does not count)
    - ``targets [N]`` int64 with ``target_mask [N]`` bool: next-item supervision over the events of a sequence
    - ``num_targets [B]``: candidates at the end of each sequence
    - ``requests``: request-level groups
    - ``timestamps [B]`` int64: when the sample happened
    - ``columns``: name -> ``[B]``: values that no model reads, for group metrics and slices
    - ``sample_ids [B]`` int64, or a list of strings
    """

    size: int
    dense: Tensor | None = None
    dense_names: tuple[str, ...] = ()
    vectors: Mapping[str, Tensor] = field(default_factory=dict)
    sparse: SparseGroup | None = None
    sequences: Mapping[str, SequenceGroup] = field(default_factory=dict)
    labels: Tensor | None = None
    label_names: tuple[str, ...] = ()
    label_mask: Tensor | None = None
    weights: Tensor | None = None
    targets: Tensor | None = None
    target_mask: Tensor | None = None
    num_targets: Tensor | None = None
    requests: Requests | None = None
    timestamps: Tensor | None = None
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    sample_ids: Tensor | list[str] | None = None

    def __len__(self) -> int:
        return self.size

    @property
    def tokens(self) -> int:
        """Events over all sequence groups (host integers, no device read)."""
        groups = [*self.sequences.values(), *(self.requests.sequences.values() if self.requests else ())]
        return sum(_rows(g) for g in groups)

    def map(self, fn: Callable[[Tensor], Tensor]) -> Batch:
        """A copy with ``fn`` applied to every tensor."""
        mapped: Batch = _map(self, fn)
        return mapped

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        return self.map(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        return self.map(lambda t: t.pin_memory())

    def record_stream(self, stream: Any) -> None:
        """Tell the allocator that ``stream`` uses these tensors."""

        def record(t: Tensor) -> Tensor:
            t.record_stream(stream)
            return t

        self.map(record)

    def split(self, n: int) -> list[Batch]:
        """At most ``n`` consecutive parts of nearly equal sample count, none empty unless the batch is. Reads offsets on the host."""
        n = max(1, min(n, self.size))
        edges = [self.size * i // n for i in range(n + 1)]
        return [self.select_range(a, b) for a, b in zip(edges, edges[1:])]

    def select_range(self, start: int, stop: int) -> Batch:
        """Samples ``start:stop``. Request-level groups are kept whole; ``kv_index`` is cut."""
        rows = target_rows = slice(start, stop)
        if self.targets is not None and self.sequences:
            offsets = next(iter(self.sequences.values())).offsets
            target_rows = slice(int(offsets[start]), int(offsets[stop]))
        return self._picked(
            lambda values: values[rows],
            size=stop - start,
            sparse=None if self.sparse is None else _cut_sparse(self.sparse, start, stop),
            sequences={k: _cut_sequence(g, start, stop) for k, g in self.sequences.items()},
            targets=None if self.targets is None else self.targets[target_rows],
            target_mask=None if self.target_mask is None else self.target_mask[target_rows],
        )

    def take(self, rows: Tensor) -> Batch:
        """Samples ``rows`` (int64, in any order) of a batch on the host, packed anew. Request-level groups are kept whole; next-item
        targets are left out."""
        return self._picked(
            lambda values: [values[i] for i in rows.tolist()] if isinstance(values, list) else values[rows],
            size=rows.numel(),
            sparse=None if self.sparse is None else _take_sparse(self.sparse, rows),
            sequences={k: take_events(g, rows) for k, g in self.sequences.items()},
            targets=None,
            target_mask=None,
        )

    def _picked(self, pick: Callable[[Any], Any], **others: Any) -> Batch:
        """``pick`` applied to whatever has a row a sample; ``others`` take the place of the rest."""
        names = ("dense", "labels", "label_mask", "weights", "num_targets", "timestamps", "sample_ids")
        return replace(
            self,
            **{name: pick(values) for name in names if (values := getattr(self, name)) is not None},
            vectors={k: pick(v) for k, v in self.vectors.items()},
            columns={k: pick(v) for k, v in self.columns.items()},
            requests=None if self.requests is None else replace(self.requests, kv_index=pick(self.requests.kv_index)),
            **others,
        )

    def validate(self) -> Batch:
        """Return self, or raise BatchError naming the feature whose tensors do not fit. Reads offsets on the host."""
        b = self.size
        per_sample: dict[str, Any] = {
            "dense": self.dense, "labels": self.labels, "label_mask": self.label_mask, "weights": self.weights,
            "num_targets": self.num_targets, "timestamps": self.timestamps, "sample_ids": self.sample_ids,
        }  # fmt: skip
        per_sample |= {f"vectors.{k}": v for k, v in self.vectors.items()} | {f"columns.{k}": v for k, v in self.columns.items()}
        for name, value in per_sample.items():
            if value is not None and len(value) != b:
                raise BatchError(f"{name} has {len(value)} rows, the batch has {b} samples", where=name)
        for name, tensor, names in (("dense", self.dense, self.dense_names), ("labels", self.labels, self.label_names)):
            if tensor is not None and (tensor.dim() != 2 or tensor.shape[1] != len(names)):
                raise BatchError(f"{name} has shape {tuple(tensor.shape)} but {len(names)} names: {', '.join(names)}", where=name)
        if self.sparse is not None:
            _validate_sparse(self.sparse, b)
        for name, group in self.sequences.items():
            _validate_sequence(name, group, b)
        if self.requests is not None:
            shared = [g.batch_size for g in self.requests.sequences.values()]
            shared += [] if self.requests.sparse is None else [self.requests.sparse.batch_size]
            index, r = self.requests.kv_index, max(shared, default=0)
            if index.numel() != b or (b and (int(index.min()) < 0 or int(index.max()) >= r)):
                raise BatchError(f"kv_index must hold {b} values in [0, {r})", where="requests.kv_index")
            for name, group in self.requests.sequences.items():
                _validate_sequence(f"requests.{name}", group, r)
            if self.requests.sparse is not None:
                _validate_sparse(self.requests.sparse, r)
        return self


def _rows(group: SequenceGroup) -> int:
    for value in group.fields.values():
        return value.batch_size if isinstance(value, Jagged) else value.shape[0]
    return 0 if group.timestamps is None else group.timestamps.shape[0]


def _map(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, Batch | SparseGroup | SequenceGroup | Requests | Jagged):
        return replace(value, **{f.name: _map(getattr(value, f.name), fn) for f in fields(value)})
    if isinstance(value, Mapping):
        return {k: _map(v, fn) for k, v in value.items()}
    return value


def _cut_sparse(group: SparseGroup, start: int, stop: int) -> SparseGroup:
    jagged = {k: group[k].slice(start, stop) for k in group.keys}
    weights = None if group.weights is None else {k: group.jagged(k, group.weights).slice(start, stop).values for k in group.keys}
    return SparseGroup.from_jagged(jagged, weights)


def _cut_sequence(group: SequenceGroup, start: int, stop: int) -> SequenceGroup:
    a, b = int(group.offsets[start]), int(group.offsets[stop])
    cut = {k: v.slice(a, b) if isinstance(v, Jagged) else v[a:b] for k, v in group.fields.items()}
    times = None if group.timestamps is None else group.timestamps[a:b]
    return SequenceGroup(group.offsets[start : stop + 1] - a, cut, times, group.max_length)


def _take_sparse(group: SparseGroup, rows: Tensor) -> SparseGroup:
    if not group.keys:
        return group
    bounds, lengths = group.key_bounds(), group.lengths.view(len(group.keys), -1)
    if bool((lengths == 1).all()):
        at = (torch.tensor(bounds[:-1]).unsqueeze(1) + rows).flatten()
        bounds = tuple(i * rows.numel() for i in range(len(group.keys) + 1))
    else:
        parts = [places(lengths_to_offsets(n), rows)[1] + start for n, start in zip(lengths, bounds)]
        at = torch.cat(parts)
        bounds = tuple(accumulate((p.numel() for p in parts), initial=0))
    weights = None if group.weights is None else group.weights[at]
    return SparseGroup(group.keys, group.values[at], lengths[:, rows].flatten(), weights, bounds)


def take_events(group: SequenceGroup, rows: Tensor, events: int | None = None, inner: Mapping[str, int] | None = None) -> SequenceGroup:
    """The histories ``rows`` (int64, in any order), packed anew. ``events`` they have, and ``inner`` values by multi-valued field, are host
    integers that save waiting for the device."""
    offsets, at = places(group.offsets, rows, events)
    fields: dict[str, Tensor | Jagged] = {}
    for name, value in group.fields.items():
        if isinstance(value, Jagged):
            bounds, chosen = places(value.offsets, at, None if inner is None else inner[name])
            fields[name] = Jagged(value.values[chosen], bounds, value.max_length)
        else:
            fields[name] = value[at]
    return SequenceGroup(offsets, fields, None if group.timestamps is None else group.timestamps[at], group.max_length)


def _validate_sparse(group: SparseGroup, batch_size: int) -> None:
    if group.lengths.numel() != batch_size * len(group.keys):
        raise BatchError(
            f"{group.lengths.numel()} lengths for {len(group.keys)} features of {batch_size} samples", where=", ".join(group.keys)
        )
    bounds = group.key_bounds()
    for i, key in enumerate(group.keys):
        lengths = group.lengths[i * batch_size : (i + 1) * batch_size]
        if batch_size and int(lengths.min()) < 0:
            raise BatchError("a length is negative", where=key)
        if int(lengths.sum()) != bounds[i + 1] - bounds[i]:
            raise BatchError(f"the lengths sum to {int(lengths.sum())} but {bounds[i + 1] - bounds[i]} ids are stored", where=key)
    if bounds[-1] > group.values.numel():
        raise BatchError(f"the lengths ask for {bounds[-1]} ids, {group.values.numel()} are stored", where=group.keys[-1])
    if group.weights is not None and group.weights.shape != group.values.shape:
        raise BatchError(f"weights {tuple(group.weights.shape)} do not fit ids {tuple(group.values.shape)}", where=", ".join(group.keys))


def _validate_sequence(name: str, group: SequenceGroup, batch_size: int) -> None:
    if group.batch_size != batch_size:
        raise BatchError(f"the group has {group.batch_size} samples, the batch {batch_size}", where=name)
    rows = {k: v.batch_size if isinstance(v, Jagged) else v.shape[0] for k, v in group.fields.items()}
    if group.timestamps is not None:
        rows["timestamps"] = group.timestamps.shape[0]
    for key, n in rows.items():
        check_offsets(group.offsets, n, f"{name}.{key}")
    if len(set(rows.values())) > 1:
        raise BatchError(f"the fields of one event group have different row counts: {rows}", where=name)
    if group.max_length is not None and batch_size and int(group.lengths.max()) > group.max_length:
        raise BatchError(f"a history of {int(group.lengths.max())} events is longer than max_length {group.max_length}", where=name)
