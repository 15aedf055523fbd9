"""A small held-out slice that a guard may evaluate during training, to compare precisions of one model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from gem_core.batch import Batch
from gem_core.config import ResolvedConfig
from gem_core.sources.contract import Source
from gem_core.train.build import Parts, build_source, task_names
from gem_core.train.evaluate import evaluate
from gem_core.train.runtime import Runtime


class HeldOut:
    """``self(rows)``: NE of the first task over the first ``rows`` samples of the evaluation split (whole batches), as the model computes
    now; the same on every rank, NaN where NE is undefined. The batches are read at the first call and kept on the host."""

    def __init__(self, resolved: ResolvedConfig, parts: Parts, runtime: Runtime) -> None:
        self.resolved, self.parts, self.runtime = resolved, parts, runtime
        self.tasks = task_names(resolved.config.features)
        self.config = resolved.config.eval.model_copy(update={"metrics": ("ne",), "group": None, "max_batches": None})
        self._kept: dict[int, _Kept] = {}

    def __call__(self, rows: int) -> float:
        if rows not in self._kept:
            self._kept[rows] = _Kept(build_source(self.resolved, "eval", self.runtime), -(-rows // self.runtime.world))
        results, _ = evaluate(self.parts.module, self.parts.model, self._kept[rows], self.config, self.tasks, self.runtime)
        value = results[self.tasks[0]]["ne"].value
        return math.nan if value is None else value


class _Kept:
    """The first batches of a source that hold ``rows`` samples, as a source."""

    def __init__(self, source: Source, rows: int) -> None:
        self.batches: list[Batch] = []
        for batch in source:
            self.batches.append(batch)
            rows -= batch.size
            if rows <= 0:
                break

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("a held-out slice is always read from its beginning")
