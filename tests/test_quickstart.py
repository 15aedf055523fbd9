"""The main job end to end, everything installed: train without an argument (shortened), look at the run, evaluate it again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

GEMREC = (sys.executable, "-c", "import sys; from gem_core.cli import main; sys.exit(main())")
SHORT = ("--set", "train.steps=20", "--set", "train.log_every=5", "--set", "eval.max_batches=4", "--set", "run.device=cpu")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("quickstart")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GEM_PLUGINS_STRICT": "1"}
    done = subprocess.run([*GEMREC, "train", *SHORT], cwd=here, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (here / "printed").write_text(done.stdout + done.stderr)
    return here


def run_folder(here: Path) -> Path:
    (folder,) = (here / "runs").iterdir()
    return folder


def test_the_run_folder_is_complete(finished: Path):
    folder = run_folder(finished)
    assert {"config.toml", "run.json", "metrics.jsonl", "eval.jsonl", "summary.json", "checkpoints"} <= {p.name for p in folder.iterdir()}
    assert [p.name for p in (folder / "checkpoints").glob("step-*")] == ["step-20"]
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [5, 10, 15, 20]
    assert set(json.loads((folder / "run.json").read_text())["plugins"]) >= {"gem-core", "gem-data", "gem-kernels", "gem-precision"}


def test_ne_is_told_beside_the_bayes_ne(finished: Path):
    summary = json.loads((run_folder(finished) / "summary.json").read_text())
    ctr = summary["tasks"]["ctr"]
    assert 0 < ctr["bayes_ne"] <= 0.85
    assert ctr["bayes_ne"] < ctr["ne"] < 1.5
    assert summary["steps"] == 20
    printed = (finished / "printed").read_text().lower()
    assert "bayes" in printed


def test_the_resolved_configuration_reproduces_the_run(finished: Path, run: Callable, tmp_path: Path):
    folder = run_folder(finished)
    done = run(*GEMREC, "train", folder / "config.toml", "--set", "run.name=again", GEM_PLUGINS_STRICT="1")
    assert done.returncode == 0, done.stderr

    def losses(path: Path) -> list[float]:
        return [json.loads(line)["loss"] for line in path.read_text().splitlines()]

    assert losses(tmp_path / "here/runs/again/metrics.jsonl") == losses(folder / "metrics.jsonl")
