"""The whole trainer in two processes: one run folder, exact resumption, another number of processes, merged metrics."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import tomli_w

from gem_core.plugins import manager
from gem_core.testing.strategies import run_processes, run_training
from gem_core.train.offline import evaluate_run

CONFIG = {
    "run": {"device": "cpu", "seed": 1},
    "data": {
        "batch_size": 32,
        "synthetic": {
            "rows": 1000, "eval_rows": 301, "test_rows": 100, "users": 100, "length": {"law": "lognormal", "mean": 5.0, "max": 40},
        },
    },
    "model": {"name": "din", "dropout": 0.2},
    "train": {"steps": 24, "log_every": 1, "tensorboard": False, "accumulate": 2, "checkpoint_every": 10},
    "eval": {"group": "user_id", "every": 12},
    "parallel": {"dense": "ddp"},
}  # fmt: skip
if any(recipe.name == "mxfp8" for recipe in manager().offers("recipe")):
    # each rank rounds with noise of its own, which goes on where it was
    CONFIG["precision"] = {"recipe": "mxfp8", "mxfp8": {"stochastic_gradients": True, "min_features": 8, "guard": {"sample_every": 6}}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One run straight through, and one that rank 0 alone was told to stop, resumed by two processes."""
    folder = tmp_path_factory.mktemp("ddp")

    def train(world, name, **task):
        scratch = tmp_path_factory.mktemp("results")
        return run_processes(world, run_training, {"config": CONFIG, "run_dir": str(folder / name), **task}, scratch)

    straight = train(2, "straight")
    stopped = train(2, "broken", stop_at=9)
    resumed = train(2, "broken", resume=True)
    return folder, straight, stopped, resumed


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_all_ranks_end_alike(runs):
    _, straight, stopped, resumed = runs
    for ranks, status, steps in ((straight, "finished", 24), (stopped, "interrupted", 9), (resumed, "finished", 24)):
        assert [(r["status"], r["steps"]) for r in ranks] == [(status, steps)] * 2
        assert ranks[0]["samples"] == ranks[1]["samples"]
        assert ranks[0]["tasks"] == ranks[1]["tasks"]


def test_resumption_is_exact(runs):
    folder, *_ = runs
    a, b = ([(r["step"], r["loss"], r["samples"]) for r in lines(folder / n / "metrics.jsonl")] for n in ("straight", "broken"))
    assert a == b
    assert [e["tasks"] for e in lines(folder / "straight" / "eval.jsonl")] == [e["tasks"] for e in lines(folder / "broken" / "eval.jsonl")]


def test_merged_metrics_are_those_of_one_process(runs):
    folder, straight, *_ = runs
    alone = evaluate_run(folder / "straight")
    assert alone.samples == 301
    assert lines(folder / "straight" / "eval.jsonl")[-1]["eval_samples"] == 301
    for task, metrics in alone.results.items():
        for name, value in metrics.items():
            assert straight[0]["tasks"][task][name] == pytest.approx(value.value, rel=1e-6), (task, name)


def test_one_process_continues_what_two_began(runs, tmp_path):
    folder, *_ = runs
    config = {**CONFIG, "train": {**CONFIG["train"], "steps": 30}}
    result = run_training(0, 1, {"config": config, "run_dir": str(folder / "broken"), "resume": True})
    records = lines(folder / "broken" / "metrics.jsonl")
    assert result["status"] == "finished"
    assert [r["step"] for r in records] == list(range(1, 31))
    assert records[-1]["samples"] - records[23]["samples"] == 6 * 2 * 32


def test_the_command_under_torchrun(tmp_path):
    """As a user types it: the processes find each other, one of them prints, and the result is that of the same processes without it."""
    (tmp_path / "config.toml").write_text(tomli_w.dumps({**CONFIG, "train": {**CONFIG["train"], "steps": 3}}))
    command = [sys.executable, "-c", "import sys; from gem_core.cli import main; sys.exit(main())"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "--no-python"]
    train = ["train", str(tmp_path / "config.toml"), "--run-dir", str(tmp_path / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launcher, *command, *train], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished after 3 steps, 384 samples") == 1
    assert json.loads((tmp_path / "run" / "run.json").read_text())["world"] == 2


def test_several_processes_without_a_strategy_for_them_are_refused(tmp_path):
    config = {**CONFIG, "parallel": {}}
    with pytest.raises(RuntimeError, match='dense = "single" is for one process, and 2 were started'):
        run_processes(2, run_training, {"config": config, "run_dir": str(tmp_path / "run")}, tmp_path)
    assert not (tmp_path / "run").exists()
