"""Histories stored once a request: made from a batch that repeats them, and repeated for its samples, on any device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gem_core.batch import Batch, Requests, SparseGroup, take_events
from gem_core.jagged import Jagged, places


@dataclass(frozen=True)
class Sizes:
    """Rows that the request-level groups have when they are repeated: host integers, without which a device would be waited for.

    ``events``: by history; ``inner``: values of multi-valued fields, by (history, field); ``ids``: by sparse feature of the requests.
    """

    events: Mapping[str, int] = field(default_factory=dict)
    inner: Mapping[tuple[str, str], int] = field(default_factory=dict)
    ids: Mapping[str, int] = field(default_factory=dict)


def sizes(batch: Batch) -> Sizes:
    """Sizes of `expanded`; waits for the device that ``batch`` is on, so give it the batch of the host."""
    requests = batch.requests
    if requests is None:
        return Sizes()
    index, inner = requests.kv_index, {}
    for name, group in requests.sequences.items():
        for key, value in group.fields.items():
            if isinstance(value, Jagged):
                inner[name, key] = int(value.offsets[group.offsets.long()].diff()[index].sum())
    sparse = requests.sparse
    ids = {} if sparse is None else {key: int(sparse[key].lengths[index].sum()) for key in sparse.keys}
    return Sizes({name: int(group.lengths[index].sum()) for name, group in requests.sequences.items()}, inner, ids)


def history_lengths(batch: Batch) -> dict[str, Tensor]:
    """Events of each history ``[B]``, the requests' ones repeated."""
    found = {name: group.lengths for name, group in batch.sequences.items()}
    if batch.requests is not None:
        found |= {name: group.lengths[batch.requests.kv_index] for name, group in batch.requests.sequences.items()}
    return found


def expanded(batch: Batch, known: Sizes | None = None) -> Batch:
    """The batch with what its requests hold repeated for every sample, as if it had been stored so; on the batch's own device.

    :param known: `sizes` of the batch on the host; None: taken from this one.
    """
    requests = batch.requests
    if requests is None:
        return batch
    known = sizes(batch) if known is None else known
    index = requests.kv_index.to(torch.int64)
    groups = {}
    for name, group in requests.sequences.items():
        inner = {key: values for (history, key), values in known.inner.items() if history == name}
        groups[name] = take_events(group, index, known.events[name], inner)
    sparse = batch.sparse
    if requests.sparse is not None:
        sparse = _joined(sparse, requests.sparse, index, known)
    return replace(batch, requests=None, sequences={**batch.sequences, **groups}, sparse=sparse)


def by_request(batch: Batch, index: Tensor, first: Tensor) -> Batch:
    """The batch with its histories stored once a request: ``index [B]`` maps samples to requests, ``first [R]`` requests to a sample
    that has its history. On the host."""
    samples = replace(batch, requests=None).take(first)
    return replace(batch, sequences={}, requests=Requests(index, samples.sequences))


def _joined(own: SparseGroup | None, shared: SparseGroup, index: Tensor, known: Sizes) -> SparseGroup:
    features = {} if own is None else {key: own[key] for key in own.keys}
    weights = {} if own is None or own.weights is None else {key: own.jagged(key, own.weights).values for key in own.keys}
    for key in shared.keys:
        found = shared[key]
        offsets, at = places(found.offsets, index, known.ids[key])
        features[key] = Jagged(found.values[at], offsets)
        if shared.weights is not None:
            weights[key] = shared.jagged(key, shared.weights).values[at]
    return SparseGroup.from_jagged(features, weights or None)
