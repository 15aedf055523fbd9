"""What evaluations decide of a run: early stopping, the best parameters and what becomes of them at stops and kills."""

from __future__ import annotations

import importlib.util
import re
import signal
import sys
from pathlib import Path

import pytest
import torch

import gem_core
from gem_core import plugins
from gem_core.errors import ConfigError
from gem_core.metrics.contract import Value
from gem_core.train import trainer
from gem_core.train.checkpoint import CheckpointStore


def _toys():
    spec = importlib.util.spec_from_file_location("trainer_toys", Path(__file__).with_name("trainer_toys.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["trainer_toys"] = module
    spec.loader.exec_module(module)
    return module


toys = _toys()
train, lines, losses, tensors = toys.train, toys.lines, toys.losses, toys.tensors


@pytest.fixture(autouse=True)
def _installed():
    toys.install()
    yield
    plugins.reset()


def test_early_stop_and_restore_best(tmp_path):
    overfit = {
        "train": {"steps": 400, "optimizer": {"lr": 0.05}, "tables": {"lr": 0.5}, "log_every": 100},
        "data": {"toy": {"rows": 64}},
    }
    result = train(tmp_path / "run", eval={"every": 5, "patience": 4, "restore_best": True, "monitor": "ctr.logloss"}, **overfit)
    evals = lines(tmp_path / "run" / "eval.jsonl")
    best = min(evals[:-1], key=lambda e: e["tasks"]["ctr"]["logloss"])
    assert result.status == "early_stopped"
    assert result.steps == best["step"] + 20
    assert result.summary["best_step"] == best["step"]
    assert result.tasks["ctr"] == best["tasks"]["ctr"]
    final, kept = tensors(tmp_path / "run", result.steps), tensors(tmp_path / "run", best["step"])
    assert all(torch.equal(final[k], kept[k]) for k in final if not k.startswith("optimizer."))


def test_the_best_parameters_are_kept_of_a_run_that_was_stopped_at_its_last_step(tmp_path):
    class Stop:
        def on_step(self, run, record):
            if run.step == 39:
                signal.raise_signal(signal.SIGTERM)

    overfit = {
        "train": {"steps": 40, "optimizer": {"lr": 0.05}, "tables": {"lr": 0.5}, "log_every": 100},
        "data": {"toy": {"rows": 64}},
        "eval": {"every": 5, "restore_best": True, "monitor": "ctr.logloss"},
    }
    run = tmp_path / "run"
    assert train(run, callbacks=[Stop()], **overfit).status == "interrupted"
    result = train(run, resume=True, **overfit)
    assert result.summary["best_step"] < 40
    final, kept = tensors(run, 40), tensors(run, result.summary["best_step"])
    assert all(torch.equal(final[k], kept[k]) for k in final if not k.startswith("optimizer."))


def test_the_best_parameters_survive_a_kill_before_they_are_marked(tmp_path, monkeypatch):
    overfit = {
        "train": {"steps": 60, "optimizer": {"lr": 0.02}, "tables": {"lr": 0.1}, "log_every": 100, "keep_checkpoints": 1},
        "data": {"toy": {"rows": 320}},
        "eval": {"every": 4, "restore_best": True, "monitor": "ctr.logloss"},
    }
    best = train(tmp_path / "whole", **overfit).summary["best_step"]
    assert 4 < best < 60
    real = CheckpointStore.mark_best

    def killed(store, step):
        if step == best:
            raise KeyboardInterrupt
        real(store, step)

    monkeypatch.setattr(CheckpointStore, "mark_best", killed)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", **overfit)
    monkeypatch.undo()
    assert train(tmp_path / "run", resume=True, **overfit).summary["best_step"] == best
    assert [e["step"] for e in lines(tmp_path / "run" / "eval.jsonl")] == [e["step"] for e in lines(tmp_path / "whole" / "eval.jsonl")]
    a, b = (tensors(tmp_path / name, 60) for name in ("whole", "run"))
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_asking_for_the_best_parameters_of_a_run_that_kept_none(tmp_path, capsys):
    how = {"train": {"steps": 8, "checkpoint_every": 8}, "eval": {"every": 2, "monitor": "ctr.calibration"}}
    best = train(tmp_path / "run", **how).summary["best_step"]
    assert best < 8
    config = toys.config(train={"steps": 12}, eval={**how["eval"], "restore_best": True})
    result = gem_core.train(config, run_dir=tmp_path / "run", resume=True)
    assert f"there is no checkpoint of step {best}, the best so far" in capsys.readouterr().out
    assert result.summary["best_step"] >= 8


@pytest.mark.parametrize("within", [1, 2])
def test_a_stop_ends_an_evaluation_which_is_made_up_for(tmp_path, monkeypatch, within):
    """``within``: the first evaluation, or the last one, after training."""
    how = {"train": {"steps": 8, "log_every": 1}, "eval": {"every": 4}, "data": {"eval_batch_size": 20}}
    train(tmp_path / "whole", **how)
    calls, seen = iter(range(1, 9)), []
    real = trainer.evaluate

    def evaluate(*arguments, stops):
        def asked():
            seen.append(call)
            if call == within and seen.count(call) == 3:
                signal.raise_signal(signal.SIGTERM)
            return stops()

        call = next(calls)
        return real(*arguments, stops=asked)

    monkeypatch.setattr(trainer, "evaluate", evaluate)
    result = train(tmp_path / "run", **how)
    assert (result.status, result.steps) == ("interrupted", 4 * within)
    assert seen.count(within) == 3, "the evaluation went on"
    result = train(tmp_path / "run", resume=True, **how)
    assert (result.status, result.steps) == ("finished", 8)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    made = [[(e["step"], e["tasks"]) for e in lines(tmp_path / name / "eval.jsonl")] for name in ("run", "whole")]
    assert made[0] == made[1]


def evaluated(run):
    return [(e["step"], e["tasks"]) for e in lines(run / "eval.jsonl")]


@pytest.mark.parametrize("at", [3, 7])
def test_an_evaluation_is_made_up_for_after_a_stop_in_its_very_step(tmp_path, at):
    """``at``: the step in which the signal comes, the one before an evaluation within the run or before its last."""

    class Stop:
        def on_step(self, run, record):
            if run.step == at:
                signal.raise_signal(signal.SIGTERM)

    how = {"train": {"steps": 8}, "eval": {"every": 4}}
    train(tmp_path / "whole", **how)
    result = train(tmp_path / "run", callbacks=[Stop()], **how)
    assert (result.status, result.steps) == ("interrupted", at + 1)
    assert train(tmp_path / "run", resume=True, **how).status == "finished"
    assert evaluated(tmp_path / "run") == evaluated(tmp_path / "whole")


def test_a_run_that_is_prolonged_counts_the_evaluation_at_its_former_end(tmp_path):
    """Of each step one line, whether the run went on from it, ended with it again, or neither."""
    how = {"every": 4, "monitor": "ctr.logloss"}
    train(tmp_path / "whole", train={"steps": 12}, eval=how)
    for steps in (8, 8, 12, 12):
        train(tmp_path / "run", train={"steps": steps}, eval=how, resume=(tmp_path / "run").exists())
    assert evaluated(tmp_path / "run") == evaluated(tmp_path / "whole")
    kept = [CheckpointStore(tmp_path / name / "checkpoints").load(12).state("shared")["best"] for name in ("whole", "run")]
    assert kept[0] == kept[1]


@pytest.mark.parametrize("stops", [False, True])
def test_what_is_due_at_the_planned_end_of_epochs_that_grow(tmp_path, stops):
    """Two epochs of 10 batches are planned, and the second has 13: step 20 is not the last one."""

    class Stop:
        def on_step(self, run, record):
            if run.step == 19:
                signal.raise_signal(signal.SIGTERM)

    how = {
        "train": {"steps": None, "epochs": 2, "checkpoint_every": 5, "keep_checkpoints": 9},
        "data": {"toy": {"rows": 320, "grows": 96}},
        "eval": {"every": 4},
    }
    run = tmp_path / "run"
    result = train(run, callbacks=[Stop()] if stops else [], **how)
    if stops:
        assert (result.status, result.steps) == ("interrupted", 20)
        result = train(run, resume=True, **how)
    assert (result.status, result.steps) == ("finished", 23)
    assert [e["step"] for e in lines(run / "eval.jsonl")] == [4, 8, 12, 16, 20, 23]
    assert CheckpointStore(run / "checkpoints").steps() == [5, 10, 15, 20, 23]
    assert [r["step"] for r in lines(run / "metrics.jsonl")] == list(range(1, 24))


@pytest.mark.parametrize("grows", [0, 96])
def test_patience_that_is_lost_at_the_planned_end_ends_epochs_that_go_on(tmp_path, monkeypatch, grows):
    values = iter([Value(0.4), Value(0.5), Value(0.6)])
    real = trainer.evaluate

    def evaluate(*arguments, **more):
        results, samples = real(*arguments, **more)
        return {**results, "ctr": {**results["ctr"], "ne": next(values)}}, samples

    monkeypatch.setattr(trainer, "evaluate", evaluate)
    data = {"toy": {"rows": 192, "grows": grows}}
    result = train(tmp_path / "run", train={"steps": None, "epochs": 2}, data=data, eval={"every": 4, "patience": 2})
    assert (result.status, result.steps) == ("early_stopped" if grows else "finished", 12)


def test_the_search_for_the_best_begins_anew_with_all_its_patience(tmp_path):
    """Evaluations after the best, whose checkpoint is gone, do not count against those to come."""
    stopped = {"every": 2, "patience": 2, "monitor": "ctr.calibration"}
    first = train(tmp_path / "run", train={"steps": 40, "checkpoint_every": 2, "keep_checkpoints": 1}, eval=stopped)
    assert first.status == "early_stopped"
    best = {"eval": {**stopped, "restore_best": True}}
    result = train(tmp_path / "run", resume=True, train={"steps": 40, "keep_checkpoints": 1}, **best)
    assert result.steps > first.steps


def test_an_undefined_monitor_neither_stops_a_run_nor_keeps_it_going(tmp_path, monkeypatch, capsys):
    """An evaluation whose labels are of one class says nothing; that is said where something depends on it."""
    values = iter([Value(0.6), *[Value(None, "only one class")] * 3, Value(0.5), Value(None, "only one class"), Value(0.4)])
    real = trainer.evaluate

    def evaluate(*arguments, **more):
        results, samples = real(*arguments, **more)
        return {**results, "ctr": {**results["ctr"], "auc": next(values)}}, samples

    monkeypatch.setattr(trainer, "evaluate", evaluate)
    how = {"monitor": "ctr.auc", "every": 2, "patience": 2}
    result = gem_core.train(toys.config(train={"steps": 40, "log_every": 100}, eval=how), run_dir=tmp_path / "run")
    assert (result.status, result.steps) == ("early_stopped", 14)
    told = r"step (\d+): ctr.auc is undefined \(only one class\): .* neither as better nor as worse"
    assert re.findall(told, capsys.readouterr().out) == ["4", "6", "8", "12"]
    values = iter([Value(0.6), Value(None, "only one class")])
    gem_core.train(toys.config(train={"steps": 4}, eval={"monitor": "ctr.auc", "every": 2}), run_dir=tmp_path / "other")
    assert not re.findall(told, capsys.readouterr().out)


def test_monitor_must_be_evaluated(tmp_path):
    with pytest.raises(ConfigError, match=r"eval\.monitor"):
        train(tmp_path / "run", eval={"monitor": "ctr.sharpness"})
