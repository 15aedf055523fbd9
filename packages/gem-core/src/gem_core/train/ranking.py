"""Evaluation of retrieval: the rank of the right item among all items, for every history. Memory holds one batch and one chunk of items."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gem_core.batch import Batch
from gem_core.config.features import Features
from gem_core.config.schema import Eval, Ranking
from gem_core.errors import ConfigError, DataError
from gem_core.jagged import Jagged
from gem_core.metrics.retrieval import RankMetrics
from gem_core.model.contract import Retrieval
from gem_core.model.retrieval import TASK, following_items
from gem_core.model.tables import sequence_of
from gem_core.train.contract import Results
from gem_core.train.feed import Feed
from gem_core.train.runtime import Runtime
from gem_core.train.signals import Stopped


def check_config(config: Ranking, features: Features) -> None:
    """:raises ConfigError: a cut-off beyond the number of items."""
    assert features.next_item is not None
    items = features.rows_of(f"sparse.{features.next_item.item}") - int(features.next_item.pad is not None)
    if max(config.k) > items:
        raise ConfigError(
            f"a hit among the first {max(config.k)} of {items} items says nothing", where="eval.ranking.k", fix="use smaller cut-offs"
        )


def check_batch(host: Batch, features: Features) -> None:
    """:raises DataError: a sample without exactly one following item, or whose item is the pad."""
    assert features.next_item is not None
    items, pad = following_items(host, features), features.next_item.pad
    if pad is not None and bool((items == pad).any()):
        raise DataError(
            f"{int((items == pad).sum())} samples have the pad id {pad} as the item to be found",
            where=f"features.sparse.{features.next_item.item}",
            fix="remove these rows (features.filter), or correct features.next_item.pad",
        )
    _seen(host, features)


@torch.no_grad()
def evaluate(module: nn.Module | Callable[..., Any], model: Any, feed: Feed, config: Eval, runtime: Runtime) -> tuple[Results, int]:
    """Metrics of the task ``next_item`` and the histories seen, over all ranks. ``module`` is called (``model``, wrapped or not).

    :raises Stopped: the feed was."""
    features: Features = model.features
    metrics = RankMetrics(config.ranking.k, runtime.device)
    was_training = model.training
    model.eval()
    try:
        for index, fed in enumerate(feed):
            if config.max_batches is not None and index >= config.max_batches:
                break
            check_batch(fed.host, features)
            query = module(fed.batch).query
            target = following_items(fed.batch, features, checked=True)
            seen = None if config.ranking.seen == "keep" else _seen(fed.batch, features)
            metrics.update(item_ranks(model, query.float(), target, seen, config.ranking))
    finally:
        model.train(was_training)
    if feed.stopped:
        raise Stopped
    if runtime.world > 1:
        metrics.merge(lambda tensor: [t.cpu() for t in runtime.gather_others(tensor.to(runtime.device))])
    return runtime.on_main(lambda: ({TASK: metrics.compute()}, int(metrics.samples)))


def item_ranks(model: Retrieval, query: Tensor, target: Tensor, seen: Jagged | None, config: Ranking) -> Tensor:
    """``[B]`` float64: ``1 + #better + #equal / 2`` over the other items for ``query [B, width]`` and ``target [B]``.

    Infinite for a target that "mask" hides; NaN where the target's score is not finite.
    """
    assert model.features.next_item is not None
    pad, size, items = model.features.next_item.pad, query.shape[0], model.items
    chunks = [(a, min(a + config.item_chunk, items)) for a in range(0, items, config.item_chunk)]

    def scores(a: int, b: int) -> Tensor:
        return query @ model.item_vectors(torch.arange(a, b, device=query.device)).T

    def column(ids: Tensor, a: int, b: int) -> Tensor:
        """Where the ids are in the chunk's scores; outside ones in a column of their own."""
        return torch.where((ids >= a) & (ids < b), ids - a, b - a)

    # The target's score comes from the very product that it is compared with: another one might round it differently.
    kept = scores(*chunks[0]) if len(chunks) == 1 else None
    own = query.new_zeros(size, 1)
    for a, b in chunks:
        found = F.pad(kept if kept is not None else scores(a, b), (0, 1)).gather(1, column(target, a, b).unsqueeze(1))
        own = own + found
    place, hidden = None, torch.zeros(size, dtype=torch.bool, device=query.device)
    if seen is not None:
        rows = torch.arange(seen.values.shape[0], device=query.device, dtype=seen.offsets.dtype)
        place = torch.searchsorted(seen.offsets[1:], rows, right=True)
        if config.seen == "mask":
            hidden = torch.zeros(size, device=query.device).index_add_(0, place, (seen.values == target[place]).float()) > 0
    better, equal, broken = (torch.zeros(size, dtype=torch.int64, device=query.device) for _ in range(3))
    others = torch.arange(size, device=query.device)
    for a, b in chunks:
        found = F.pad(kept if kept is not None else scores(a, b), (0, 1))
        found[others, column(target, a, b)] = float("-inf")
        if seen is not None and place is not None:
            found[place, column(seen.values, a, b)] = float("-inf")
        if pad is not None and a <= pad < b:
            found[:, pad - a] = float("-inf")
        found = found[:, :-1]
        better += (found > own).sum(1)
        equal += (found == own).sum(1)
        broken += found.isnan().sum(1)
    ranks = 1 + better.double() + 0.5 * equal.double()
    ranks = torch.where(hidden, float("inf"), ranks)
    return torch.where(own.squeeze(1).isfinite() & (broken == 0), ranks, float("nan"))


def _seen(batch: Batch, features: Features) -> Jagged:
    """The items that each sample had before."""
    task = features.next_item
    assert task is not None
    if task.seen is None:
        name, field = features.next_item_field()
        return sequence_of(batch, name).jagged(field)
    if batch.sparse is None:
        raise DataError(
            f"the data has no sparse feature {task.seen!r}", where="features.next_item.seen", fix="declare it, or leave seen out"
        )
    return batch.sparse[task.seen]
