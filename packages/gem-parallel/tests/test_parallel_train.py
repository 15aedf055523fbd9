"""The benchmark of training in several processes, at a tiny size on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "docs" / "benchmarks" / "parallel_train.py"


@pytest.mark.skipif(not SCRIPT.exists(), reason="the repository's docs are not here")
def test_losses_and_steps_of_two_processes(tmp_path):
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SCRIPT), "equal", "speed"]
    words += ["--preset", "tiny", "--preset-equal", "tiny", "--steps-equal", "3", "--batch", "8", "--steps", "1", "--warmup", "1"]
    words += ["--recipe", "fp32", "--set", 'run.device="cpu"', "--row", "1", "--row", "2: replicate 2, touched rows"]
    done = subprocess.run(
        [*words, "--out", str(tmp_path)], capture_output=True, text=True, timeout=200, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads((tmp_path / "parallel-equal.json").read_text())["rows"]
    found = {row["row"]: row for row in rows if row.get("recipe") == "fp32"}
    for name in ("1D: DDP", "1D: FSDP", "fully sharded, touched"):
        assert len(found[name]["losses"]) == 3
        assert found[name]["off"] < 1e-5, name
    assert found["fully sharded, whole"]["off"] > 1e-4  # replicas train alone between their averages
    speed = json.loads((tmp_path / "train-tiny-scaling.json").read_text())["rows"]
    assert [(row["row"], row["gpus"], "error" in row) for row in speed] == [("1", 1, False), ("2: replicate 2, touched rows", 2, False)]
    assert speed[1]["scaling"] == pytest.approx(speed[1]["samples_per_s"] / 2 / speed[0]["samples_per_s"])
