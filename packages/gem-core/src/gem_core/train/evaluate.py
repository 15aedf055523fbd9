"""One pass over an evaluation split: pooled metrics of all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from gem_core.config.features import Features
from gem_core.config.schema import Eval
from gem_core.errors import ConfigError
from gem_core.metrics.collect import ALWAYS, Collector, MetricSet, fresh
from gem_core.metrics.contract import Metric
from gem_core.metrics.retrieval import names
from gem_core.model.contract import Retrieval
from gem_core.plugins import manager
from gem_core.sources.contract import Source
from gem_core.train import ranking
from gem_core.train.contract import Results
from gem_core.train.feed import Fed, Feed
from gem_core.train.runtime import OnItsWay, Runtime
from gem_core.train.signals import Stopped


def metric_builders(config: Eval) -> dict[str, Callable[[], Metric]]:
    """The configured metrics and those that are always computed, by name.

    :raises PluginError: a metric that nobody offers.
    """
    specs = {name: manager().find("metric", name) for name in dict.fromkeys((*config.metrics, *ALWAYS))}
    return {name: partial(spec.build, config) for name, spec in specs.items()}


def rehearse(source: Source, config: Eval, tasks: tuple[str, ...], features: Features) -> None:
    """Evaluate the first batch with made-up predictions, so that what an evaluation would refuse is refused before hours of training.

    :raises DataError: no batch, no labels, no group key, no following item.
    :raises ConfigError: more places to look at than items.
    """
    if features.next_item is not None:
        ranking.check_config(config.ranking, features)
        ranking.check_batch(next(iter(Feed(source, torch.device("cpu")))).host, features)
        return
    metrics = MetricSet(tasks, metric_builders(config), config.group)
    first = next(iter(Feed(source, torch.device("cpu"))))
    metrics.update(first.host, torch.zeros(first.host.size, len(tasks)), tasks)
    metrics.compute()


@torch.no_grad()
def evaluate(
    module: nn.Module | Callable[..., Any],
    model: nn.Module,
    source: Source,
    config: Eval,
    tasks: tuple[str, ...],
    runtime: Runtime,
    also: Sequence[Collector] = (),
    stops: Callable[[], bool] = lambda: False,
) -> tuple[Results, int]:
    """Metrics of ``tasks`` and the samples seen, over all ranks. ``module`` is called (``model``, wrapped or not); ``model`` is put into
    evaluation mode meanwhile. Logits are read one batch late, so that the device never waits for the host.

    ``also`` are fed likewise, and hold all ranks' rows afterwards. A model of `Retrieval` takes none.

    :raises Stopped: ``stops``, asked before each batch, said so on some rank."""
    feed = Feed(source, runtime.device, runtime=runtime, stops=stops, at_once=True)
    if isinstance(model, Retrieval):
        return ranking.evaluate(module, model, feed, config, runtime)
    metrics = MetricSet(tasks, metric_builders(config), config.group)
    was_training = model.training
    model.eval()
    late: tuple[Fed, OnItsWay, tuple[str, ...]] | None = None
    try:
        for index, fed in enumerate(feed):
            if config.max_batches is not None and index >= config.max_batches:
                break
            output = module(fed.batch)
            ready, late = late, (fed, OnItsWay(output.logits.float()), output.task_names)
            _add((metrics, *also), ready)
        _add((metrics, *also), late)
    finally:
        model.train(was_training)
    if feed.stopped:
        raise Stopped
    if runtime.world > 1:
        for kept in (metrics, *also):
            kept.merge(lambda tensor: [t.cpu() for t in runtime.gather_others(tensor.to(runtime.device))])
    # One rank computes: the others add the same numbers in another order, and must not draw other conclusions from the last bit.
    return runtime.on_main(lambda: (metrics.compute(), metrics.samples))


def _add(kept: Sequence[Collector], item: tuple[Fed, OnItsWay, tuple[str, ...]] | None) -> None:
    if item is not None:
        fed, logits, names = item
        for metrics in kept:
            metrics.update(fed.host, logits.received(), names)


@dataclass
class Best:
    """The best evaluation so far by ``eval.monitor``, and how many have come since."""

    task: str
    metric: str
    better: str
    value: float | None = None
    step: int | None = None
    worse: int = 0

    @classmethod
    def of(cls, config: Eval, tasks: tuple[str, ...], *, retrieval: bool = False) -> Best:
        """:raises ConfigError: ``eval.monitor`` names a task or metric that is not evaluated."""
        ranks = config.ranking
        default = f"ndcg@{10 if 10 in ranks.k else ranks.k[0]}" if retrieval else "ne"
        task, _, metric = (config.monitor or default).rpartition(".")
        task = task or tasks[0]
        known = (
            dict.fromkeys(names(ranks.k), "higher") if retrieval else {n: fresh(n, b).better for n, b in metric_builders(config).items()}
        )
        if task not in tasks or metric not in known:
            raise ConfigError(
                f"monitor = {config.monitor or default!r} is not evaluated",
                where="eval.monitor",
                fix=f"tasks: {', '.join(tasks)}; metrics: {', '.join(known)} (more in eval.{'ranking.k' if retrieval else 'metrics'})",
            )
        return cls(task, metric, known[metric])

    def says_nothing(self, results: Results) -> str | None:
        """Why these results say nothing of the model: the value is undefined for the samples' sake (labels of one class, say)."""
        found = results[self.task][self.metric]
        return (found.reason or "no reason given") if found.value is None and not found.broken else None

    def update(self, results: Results, step: int) -> bool:
        """Whether these results are better than all before. Predictions that are not finite are worse; what says nothing counts neither
        way."""
        if self.says_nothing(results) is not None:
            return False
        value = results[self.task][self.metric].value
        if value is not None and math.isfinite(value) and (self.value is None or self._rank(value) < self._rank(self.value)):
            self.value, self.step, self.worse = value, step, 0
            return True
        self.worse += 1
        return False

    def _rank(self, value: float) -> float:
        return {"lower": value, "higher": -value, "one": abs(value - 1)}[self.better]

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "step": self.step, "worse": self.worse}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.step, self.worse = state["value"], state["step"], state["worse"]
