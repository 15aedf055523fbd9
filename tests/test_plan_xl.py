"""Planning a trillion table parameters, with every package installed: in the precision that such a model is trained in."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from gem_core.cli import main

B200 = "docs/examples/clusters/b200-3-tier.toml"


@pytest.mark.slow
def test_trillion_parameters_on_4096_gpus(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    begun = time.process_time()
    out = tmp_path / "plan.json"
    assert main(["plan", "xl", "--cluster", str(root / B200), "--world", "4096", "--samples", "1024", "--json", str(out)]) == 0
    assert time.process_time() - begun < 60
    text = capsys.readouterr().out
    assert "1D tables" in text
    plan = json.loads(out.read_text())["plan"]
    assert plan["memory_bytes"]["total"] < 189e9
    flat = plan["baselines"]["1D tables"]
    assert plan["step_s"] < flat["step_s"] / 1.15
    assert flat["breakdown_s"]["embedding all-to-all"] > 0.1
    assert 0.4 < plan["scaling_ratio"] < 1
    assert plan["scaling_ratio"] > plan["baselines"]["1D tables, plain FSDP"]["scaling_ratio"]


@pytest.mark.slow
def test_full_precision_where_little_fits_takes_no_longer(root: Path, capsys: pytest.CaptureFixture[str]):
    """Nearly every pair of arrangements recomputes then; their bounds count that, so that most are never simulated."""
    begun = time.process_time()
    given = ["plan", "xl", "--cluster", str(root / B200), "--world", "4096", "--samples", "1024", "--set", "precision.recipe=fp32"]
    assert main(given) == 0
    assert time.process_time() - begun < 60
    assert "recomputed in backward" in capsys.readouterr().out
