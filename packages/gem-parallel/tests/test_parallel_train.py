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
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SCRIPT), "exact", "copies", "speed"]
    words += ["--preset", "tiny", "--preset-exact", "tiny", "--steps-equal", "3", "--batch", "8", "--batch-copies", "8"]
    words += ["--steps-eager", "1", "--warmup-eager", "1", "--recipe", "fp32", "--set", 'run.device="cpu"']
    words += [word for row in ("1", "2: replicate 2, touched rows", "2: tables 1D", "2: tables 1D, copy engine") for word in ("--row", row)]
    done = subprocess.run(
        [*words, "--out", str(tmp_path)], capture_output=True, text=True, timeout=200, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads((tmp_path / "parallel-exact.json").read_text())["rows"]
    found = {row["row"]: row for row in rows}
    for name in ("1D: DDP", "1D: FSDP", "EP 2", "fully sharded, touched"):
        assert len(found[name]["losses"]) == 3
        assert found[name]["off"] < 1e-5, name
    assert found["fully sharded, whole"]["off"] > 1e-4  # replicas train alone between their averages
    speed = json.loads((tmp_path / "train-tiny-speed.json").read_text())["rows"]
    assert [(row["row"], row["gpus"], "error" in row) for row in speed] == [
        ("1", 1, False), ("2: tables 1D", 2, False), ("2: replicate 2, touched rows", 2, False), ("2: tables 1D, copy engine", 2, False)
    ]  # fmt: skip
    assert speed[1]["scaling"] == pytest.approx(speed[1]["samples_per_s"] / 2 / speed[0]["samples_per_s"])
    copies = json.loads((tmp_path / "train-tiny-copies.json").read_text())["rows"]
    (both,) = copies
    assert [way["row"] for way in both["ways"]] == ["2: tables 1D", "2: tables 1D, copy engine"]
    assert both["losses_same"] == len(both["losses"][0]) == 2
    assert both["ratio"] > 0
