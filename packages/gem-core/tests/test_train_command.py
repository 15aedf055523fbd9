"""``gemrec train`` and ``gemrec eval`` as a user types them, on the built-in source and model."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys

import pytest

from gem_core.cli import main
from gem_core.cli.train import task_text

TINY = """
[run]
device = "cpu"
seed = 1

[data]
batch_size = 64

[data.synthetic]
rows = 2000
eval_rows = 600
test_rows = 300
users = 200
length = { law = "lognormal", mean = 5.0, max = 40 }

[model]
name = "din"

[train]
steps = 12
log_every = 4
tensorboard = false

[eval]
group = "user_id"
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def run(*words):
    return main([str(w) for w in words])


def test_train_eval_and_resume(config, tmp_path, capsys):
    folder = tmp_path / "run"
    assert run("train", config, "--run-dir", folder) == 0
    out = capsys.readouterr().out
    assert "step 4/12  loss" in out
    assert "finished after 12 steps, 768 samples" in out
    assert "of the explainable gain" in out
    summary = json.loads((folder / "summary.json").read_text())
    header = json.loads((folder / "run.json").read_text())
    assert header["flops_per_sample"] > 1000
    assert header["command"][0]

    assert run("eval", folder, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["samples"] == 600
    assert found["step"] == 12
    assert found["tasks"]["ctr"] == pytest.approx(summary["tasks"]["ctr"])

    assert run("eval", folder, "--split", "test", "--set", 'eval.metrics=["auc", "ece"]') == 0
    out = capsys.readouterr().out
    assert "300 samples" in out
    assert "ece" in out
    assert "gauc" not in out

    assert run("train", config, "--run-dir", folder) == 2
    assert "--resume continues it" in capsys.readouterr().err
    assert run("train", "--resume", "--run-dir", folder, "--set", "train.steps=16", "--quiet") == 0
    out = capsys.readouterr().out
    assert out.startswith("finished after 16 steps")
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [4, 8, 12, 16]
    assert run("train", config, "--run-dir", folder, "--overwrite", "--quiet", "--set", "train.steps=2") == 0


def test_resume_of_a_mistyped_folder_begins_nothing(config, tmp_path, capsys):
    """The quick start trained there, since no file was named."""
    assert run("train", "--resume", "--run-dir", tmp_path / "typo", "--set", "train.steps=2") == 2
    assert "there is no run to continue" in capsys.readouterr().err
    assert not (tmp_path / "typo").exists()
    (tmp_path / "folder").mkdir()
    assert run("train", "--resume", "--run-dir", tmp_path / "folder") == 2
    assert "no run folder" in capsys.readouterr().err
    assert run("train", config, "--resume", "--run-dir", tmp_path / "typo", "--set", "train.steps=2") == 0
    assert "the run starts at step 0" in capsys.readouterr().out


def test_the_first_line_says_what_is_trained(config, tmp_path, capsys):
    """And what one process does not use of a file for many."""
    assert run("train", config, "--run-dir", tmp_path / "run", "--set", "train.steps=2", "--set", "parallel.shard=3") == 0
    head, unused, *_ = capsys.readouterr().out.splitlines()
    counts = json.loads((tmp_path / "run" / "run.json").read_text())["parameters"]
    assert re.fullmatch(
        rf"din on .* CPU, \d+ threads, fp32: {counts['dense']:,} parameters, {counts['sparse']:,} in tables; 2 steps, batch size \d+", head
    )
    assert unused == "one process: parallel.shard = 3 not used"


def test_user_errors_exit_with_2_and_failed_runs_with_1(config, tmp_path, capsys):
    assert run("train", tmp_path / "none.toml") == 2
    assert run("train", config, "--set", "train.stepz=3") == 2
    assert "steps" in capsys.readouterr().err
    assert run("train", config, "--set", 'eval.group="nobody"', "--run-dir", tmp_path / "r") == 2
    out, err = capsys.readouterr()
    assert "neither a column nor a sparse feature called 'nobody'" in err
    assert "step" not in out, "a wrong group key must be refused before training"
    assert run("eval", tmp_path) == 2
    assert "no run folder" in capsys.readouterr().err
    assert run("train", config, "--run-dir", tmp_path / "bad", "--set", "train.tables.lr=1e30", "--set", "train.optimizer.lr=1e30") == 1
    assert "not finite" in capsys.readouterr().err


def test_eval_of_a_checkpoint_that_does_not_fit(config, tmp_path, capsys):
    folder = tmp_path / "run"
    assert run("train", config, "--run-dir", folder, "--set", "train.steps=2", "--quiet") == 0
    assert run("eval", folder, "--set", "model.embedding_dim=8") == 2
    err = capsys.readouterr().err
    assert "does not fit" in err
    assert "of another shape" in err
    assert run("eval", folder, "--step", 1) == 2
    assert "there are: 2" in capsys.readouterr().err
    assert run("eval", folder, "--data", tmp_path / "x.parquet") == 2
    assert "data.synthetic.eval" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_ends_the_run_with_a_checkpoint_and_resuming_finishes_it(config, tmp_path, number):
    folder, whole = tmp_path / "run", tmp_path / "whole"
    command = [sys.executable, "-c", "import sys; from gem_core.cli import main; sys.exit(main())", "train", str(config)]
    options = ["--run-dir", str(folder), "--set", "train.log_every=1", "--set", "train.steps=400", "--set", "data.synthetic.rows=20000"]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("step 5/"):
            process.send_signal(number)
    assert process.wait() == 0, "".join(lines)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert 5 <= summary["steps"] < 60
    assert f"({number.name})" in "".join(lines)
    assert "continue with: gemrec train --resume" in lines[-1]
    steps = summary["steps"] + 3
    for target in (folder, whole):
        options[1], options[5] = str(target), f"train.steps={steps}"
        assert run("train", config, *options, "--quiet", *(["--resume"] if target is folder else [])) == 0
    losses = [[json.loads(x)["loss"] for x in (p / "metrics.jsonl").read_text().splitlines()] for p in (folder, whole)]
    assert len(losses[0]) == steps
    assert losses[0] == losses[1]


def test_the_header_tells_which_implementation_each_op_chose(config, tmp_path):
    """In a process of its own, because each choice is told once a process."""
    command = [sys.executable, "-c", "import sys; from gem_core.cli import main; sys.exit(main())", "train", str(config)]
    options = ["--run-dir", str(tmp_path / "run"), "--set", "train.steps=1", "--quiet"]
    subprocess.run([*command, *options], check=True, capture_output=True)
    chosen = json.loads((tmp_path / "run" / "run.json").read_text())["kernels"]
    assert chosen
    assert all(": " in line for line in chosen)


def test_the_quick_start_configuration_is_valid_and_names_a_group():
    from gem_core.config import load_config, resolve
    from gem_core.train import quickstart_path

    resolved = resolve(load_config(quickstart_path()))
    assert resolved.config.eval.group in resolved.config.features.columns
    assert resolved.config.train.steps


def test_profile_writes_a_trace_and_a_summary(tmp_path, capsys):
    words = ["--set", "data.synthetic.rows=2048", "--set", "data.synthetic.eval_rows=64", "--set", "data.synthetic.test_rows=64"]
    words += ["--set", "data.batch_size=64", "--set", "train.steps=16", "--set", "model.layers=1", "--set", "eval.max_batches=1"]
    assert main(["train", "--run-dir", str(tmp_path / "run"), "--quiet", "--profile", *words]) == 0
    assert "trace and summary" in capsys.readouterr().out
    folder = tmp_path / "run" / "profile" / "rank-0"
    assert (folder / "trace.json.gz").stat().st_size > 0
    assert json.loads((folder / "summary.json").read_text())["steps"] == 5
    assert "aten::" in (folder / "summary.txt").read_text()


def test_the_share_of_the_explainable_is_told_where_something_is() -> None:
    """On a few held-out rows the planted probabilities may do worse than the base rate."""
    assert task_text({"ne": 0.9, "bayes_ne": 0.8}, {}) == "NE 0.9000 (Bayes 0.8000: 50% of the explainable gain)"
    assert task_text({"ne": 1.1, "bayes_ne": 1.0}, {}) == "NE 1.1000 (Bayes 1.0000; worse than always predicting the base rate)"
    assert task_text({"ne": 1.1, "bayes_ne": 0.8}, {}) == "NE 1.1000 (Bayes 0.8000; worse than always predicting the base rate)"
    assert task_text({"ne": 1.1}, {}) == "NE 1.1000 (worse than always predicting the base rate)"
