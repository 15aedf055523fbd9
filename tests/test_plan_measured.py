"""The planner beside captured steps of the presets that were measured on an H200."""

from __future__ import annotations

from pathlib import Path

import pytest

from gem_parallel.plan.cluster import load_cluster
from gem_parallel.plan.command import configuration, workload_of
from gem_parallel.plan.measured import compare, load_measurements

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["base", "base-window", "large"])
def test_captured_steps_on_an_h200_are_predicted(preset: str) -> None:
    """One rate was fitted to a step, of `base`; windows and the width of `large` come from parts that were measured alone."""
    loaded = configuration(preset, [])
    rows = [row for row in load_measurements(DOCS / "benchmarks" / f"train-{preset}.json") if row.settings.get("train", {}).get("capture")]
    cluster = load_cluster(str(DOCS / "examples/clusters/h200-x8-host.toml"))
    found = compare(loaded, workload_of(loaded, preset, None, 4096), cluster, rows)
    assert found
    for one in found:
        assert one.time_error == pytest.approx(0, abs=0.12)
        assert one.memory_error == pytest.approx(0, abs=0.1)
