"""gem-2d trains as one process does wherever its arithmetic is that of unsharded row-wise AdaGrad."""

from __future__ import annotations

from importlib.util import find_spec
from typing import ClassVar

import pytest

from gem_core.testing.strategies import StrategyConformance


class TestTouchedRows(StrategyConformance):
    parallel: ClassVar = {
        "dense": "ddp", "sparse": "gem-2d", "model": 2, "replica": 2, "gem-2d": {"exchange": "touched", "sharding": "row"},
    }  # fmt: skip
    worlds = (4,)


class TestTouchedTables(StrategyConformance):
    parallel: ClassVar = {"dense": "ddp", "sparse": "gem-2d", "model": 1, "replica": -1, "gem-2d": {"exchange": "touched"}}
    worlds = (2,)


class TestWithoutReplicas(StrategyConformance):
    parallel: ClassVar = {"dense": "ddp", "sparse": "gem-2d", "gem-2d": {"sharding": "table"}}
    worlds = (3,)


@pytest.mark.skipif(find_spec("fbgemm_gpu") is None, reason="FBGEMM is not installed")
class TestFbgemm(StrategyConformance):
    """FBGEMM's kernels in one process."""

    parallel: ClassVar = {"sparse": "fbgemm"}
    worlds = (1,)
    model: ClassVar = {"name": "gem", "layers": 1, "dim": 8, "embedding_dim": 8}

    @staticmethod
    def scenarios(world):
        found = StrategyConformance.scenarios(2)
        return {name: [[(sum(cut),) for cut in micro] for micro in steps] for name, steps in found.items()}
