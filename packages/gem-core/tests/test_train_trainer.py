"""The trainer as a whole, on a toy model and a toy source: files, exact resumption, non-finite steps, the length of a run."""

from __future__ import annotations

import importlib.util
import json
import shutil
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch

import gem_core
import gem_core.train
from gem_core import plugins
from gem_core.errors import CheckpointError, ConfigError, NumericsError, RunError
from gem_core.train import trainer
from gem_core.train.checkpoint import CheckpointStore
from gem_core.train.pack import load_packed
from gem_core.train.step import Outcomes
from gem_core.train.trainer import Trainer


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


def test_the_package_is_the_function():
    assert gem_core.train is sys.modules["gem_core.train"]
    from gem_core import train as imported

    assert imported is gem_core.train
    assert callable(imported)


def test_a_run_leaves_its_folder_and_learns(tmp_path):
    result = train(
        tmp_path / "run", train={"steps": 80, "checkpoint_every": 25, "log_every": 10, "optimizer": {"lr": 0.02}}, eval={"every": 40}
    )
    run = tmp_path / "run"
    assert result.status == "finished"
    assert (result.steps, result.samples) == (80, 80 * 32)
    header = json.loads((run / "run.json").read_text())
    assert header["plugins"]["gem-core"] == header["versions"]["gem-core"]
    assert header["parameters"] == {"dense": 15 * 8 + 8 + 8 * 2 + 2 + 1, "sparse": 52 * 4}
    assert header["flops_per_sample"] == 6 * (15 * 8 + 8 * 2)
    assert header["mfu_peak"]["reason"]
    assert header["seed"] == 3
    records = lines(run / "metrics.jsonl")
    assert [r["step"] for r in records] == list(range(10, 81, 10))
    for key in ("loss", "lr", "samples", "samples_per_s", "tokens_per_s", "data_wait", "forward_s", "backward_s", "optimizer_s"):
        assert all(isinstance(r[key], int | float) for r in records), key
    assert records[0]["mfu"] is None
    assert [r["step"] for r in records if r["checkpoint_s"] > 0] == [30, 60, 80]  # steps 25, 50 and 75 were saved
    assert records[-1]["loss"] < 0.9 * records[0]["loss"]
    evals = lines(run / "eval.jsonl")
    assert [e["step"] for e in evals] == [40, 80]
    assert evals[0]["eval_samples"] == 200
    summary = json.loads((run / "summary.json").read_text())
    assert summary["tasks"]["ctr"] == evals[1]["tasks"]["ctr"]
    assert set(summary["tasks"]["ctr"]) >= {"ne", "auc", "logloss", "calibration", "gauc", "bayes_ne"}
    assert 0.5 < summary["tasks"]["ctr"]["bayes_ne"] < summary["tasks"]["ctr"]["ne"] < 1.0
    assert summary["tasks"]["cvr"]["bayes_ne"] is None
    assert "true probabilities" in summary["undefined"]["cvr"]["bayes_ne"]
    assert summary["peak_memory_bytes"] > 10**7
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["latest", "step-75", "step-80"]
    again = gem_core.load_config(run / "config.toml")
    assert gem_core.config.dump_toml(again) == (run / "config.toml").read_text()


def test_two_runs_are_equal_and_another_seed_is_not(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train(tmp_path / name, train={"steps": 5}, run={"seed": seed}, model={"dropout": 0.2})
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert losses(tmp_path / "a") != losses(tmp_path / "c")


@pytest.mark.parametrize("log_every", [1, 4])
def test_resuming_twice_continues_exactly(tmp_path, log_every):
    base = {
        "model": {"dropout": 0.3, "batch_norm": True},
        "eval": {"every": 7},
        "data": {"batch_size": 48, "toy": {"rows": 500}},  # an epoch of 11 batches: the resumed runs cross its end
    }
    schedule = {"warmup_steps": 4, "decay": "cosine"}
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    settings = {"steps": 30, "log_every": log_every, "schedule": schedule, "accumulate": 2, "clip_norm": 0.5}
    train(straight, train=settings, **base)
    recorder = toys.Recorder()
    for stop, resume in ((9, False), (22, True), (99, True)):
        saves = {"checkpoint_every": 5, "checkpoint_async": log_every == 4}
        result = train_until(broken, stop, resume, recorder, settings | saves, base)
        assert len([e for e in recorder.events if e[0] == "checkpoint"]) == {9: 2, 22: 4, 99: 2}[stop]
        recorder = toys.Recorder()
    assert result.status == "finished"
    assert losses(broken) == losses(straight)
    assert [(e["step"], e["tasks"]) for e in lines(broken / "eval.jsonl")] == [
        (e["step"], e["tasks"]) for e in lines(straight / "eval.jsonl")
    ]
    a, b = tensors(straight, 30), tensors(broken, 30)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[k], b[k]) for k in a)


def train_until(path, stop, resume, recorder, settings, base):
    """Run as if a signal came during step ``stop`` - 1; the configured length stays the same."""
    trainer = Trainer(toys.config(train=settings, **base), run_dir=path, resume=resume, callbacks=[recorder], quiet=True)

    def at_step(run, record):
        recorder.steps += 1
        if run.step == stop - 1:
            trainer.stop.requested = "SIGTERM"

    recorder.on_step = at_step
    result = trainer.run()
    given_up = (stop - 1) % base["eval"]["every"] == 0  # an evaluation ends at once, and is made up for
    assert result.steps == min(stop - given_up, settings["steps"])
    assert recorder.steps == result.steps  # its state was saved and restored
    return result


def test_resume_after_a_crash_drops_the_lines_after_the_checkpoint(tmp_path):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    train(straight, train={"steps": 20})
    with pytest.raises(RunError, match="Recorder failed in on_step: KeyError"):
        train(broken, train={"steps": 20, "checkpoint_every": 6}, callbacks=[toys.Recorder(fail_at=17)])
    assert [r["step"] for r in lines(broken / "metrics.jsonl")][-1] == 17
    train(broken, train={"steps": 20, "checkpoint_every": 6}, resume=True)
    assert losses(broken) == losses(straight)


@pytest.mark.parametrize(("data", "accumulate", "steps"), [({"batch_size": 20}, 1, 65), ({"batch_size": 5}, 1, 110), ({}, 4, 58)])
def test_epochs_that_go_on_in_other_steps_are_trained_to_their_end(tmp_path, data, accumulate, steps):
    """80 steps were planned; after 50 there are 300 samples left, and the schedule ends with them."""
    base = {"source": "random", "batch_size": 10, "random": {"rows": 400, "eval_rows": 40}}
    length = {"steps": None, "epochs": 2, "schedule": {"decay": "linear"}}
    recorder = toys.Recorder()

    def stop(trainer, at):
        recorder.on_step = lambda run, record: setattr(trainer.stop, "requested", "SIGTERM") if run.step == at else None
        return trainer.run()

    def again(at, **changed):
        settings = {"data": base | data, "train": length | {"accumulate": accumulate}, "eval": {"group": "item"}, **changed}
        resume = (tmp_path / "run").exists()
        return stop(Trainer(toys.config(**settings), run_dir=tmp_path / "run", resume=resume, callbacks=[recorder], quiet=True), at)

    assert again(49, data=base, train=length).steps == 50
    assert again(53).steps == 54
    result = again(None)
    assert (result.status, result.steps, result.samples) == ("finished", steps, 800)
    records = lines(tmp_path / "run" / "metrics.jsonl")
    lr, first = [r["lr"] for r in records], records[0]["lr"]
    assert lr[:54] == pytest.approx([first * (1 - k / (80 if k < 50 else steps)) for k in range(54)])
    assert lr[54:] == pytest.approx([first * (1 - k / steps) for k in range(54, steps)])
    assert again(None).steps == steps


def test_resuming_a_finished_run_and_then_prolonging_it(tmp_path):
    train(tmp_path / "long", train={"steps": 12})
    for steps in (8, 8, 12):
        result = train(tmp_path / "run", train={"steps": steps}, resume=(tmp_path / "run").exists())
        assert result.steps == steps
        assert result.summary["tasks"]["ctr"]["ne"] is not None
    assert losses(tmp_path / "run") == losses(tmp_path / "long")


def test_an_existing_run_is_not_overwritten_by_accident(tmp_path):
    train(tmp_path / "run", train={"steps": 2})
    with pytest.raises(CheckpointError, match=r"(?s)not empty.*--resume"):
        train(tmp_path / "run", train={"steps": 2})
    for wrong in ({"eval": {"group": "nobody"}}, {"parallel": {"dense": "nobody"}}, {"train": {"callbacks": {"nobody": {}}}}):
        with pytest.raises(gem_core.GemError):
            train(tmp_path / "run", overwrite=True, **wrong)
        assert len(losses(tmp_path / "run")) == 2, "a configuration that is refused must not delete the run that it would replace"
        with pytest.raises(gem_core.GemError):
            train(tmp_path / "new", **wrong)
        assert not (tmp_path / "new").exists()
    train(tmp_path / "run", train={"steps": 3}, overwrite=True)
    assert len(losses(tmp_path / "run")) == 3
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match="no run folder"):
        train(tmp_path / "mine", overwrite=True)
    assert (tmp_path / "mine" / "thesis.tex").exists()
    (tmp_path / "mine" / "config.toml").write_text("")  # as it stands beside converted data
    for way in ({"overwrite": True}, {"resume": True}):
        with pytest.raises(CheckpointError, match=r"no run folder \(it has no run.json\) and holds thesis.tex"):
            train(tmp_path / "mine", **way)
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == ["config.toml", "thesis.tex"]
    with pytest.raises(gem_core.GemError, match="exclude each other"):
        train(tmp_path / "run", resume=True, overwrite=True)


def test_resuming_with_another_model_is_refused_key_by_key(tmp_path):
    train(tmp_path / "run", train={"steps": 2})
    with pytest.raises(ConfigError, match=r"model.width: was 8, is 16"):
        train(tmp_path / "run", train={"steps": 4}, model={"width": 16}, resume=True)


def test_callbacks_hear_everything_in_order(tmp_path):
    recorder = toys.Recorder()
    train(
        tmp_path / "run",
        train={"steps": 4, "log_every": 2, "checkpoint_every": 3, "callbacks": {"recorder": {}}},
        eval={"every": 2},
        callbacks=[recorder],
    )
    assert recorder.events == [
        "start", ("log", 2), ("eval", 2), ("checkpoint", 3), ("log", 4), ("checkpoint", 4), ("eval", 4), "end",
    ]  # fmt: skip


def test_a_failing_callback_of_the_configuration_ends_the_run_and_others_hear_of_it(tmp_path):
    recorder = toys.Recorder()
    with pytest.raises(RunError, match="KeyError"):
        train(tmp_path / "run", train={"callbacks": {"recorder": {"fail_at": 3}}}, callbacks=[recorder])
    assert recorder.events[-1] == ("error", "RunError")


# Non-finite steps


@pytest.mark.parametrize("accumulate", [1, 2])
def test_tables_that_update_inside_backward_train_alike(tmp_path, accumulate):
    schedule = {"warmup_steps": 3, "decay": "linear"}
    for sparse in ("local", "fused"):
        train(tmp_path / sparse, parallel={"sparse": sparse}, train={"steps": 12, "schedule": schedule, "accumulate": accumulate})
    assert [x[1] for x in losses(tmp_path / "fused")] == pytest.approx([x[1] for x in losses(tmp_path / "local")], rel=1e-5)


@pytest.mark.parametrize("sparse", ["local", "fused"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_skipped_step_touches_nothing(tmp_path, accumulate, sparse):
    """The NaN row is in the third step's (first) batch: parameters, running statistics and tables must stay bit for bit."""
    captured = {}

    class Capture:
        def on_step(self, run, record):
            state = {k: v.clone() for k, v in run.model.state_dict().items()}
            captured[run.step] = (state, record)

    train(
        tmp_path / "run",
        train={"steps": 4, "nonfinite": "skip", "accumulate": accumulate},
        model={"batch_norm": True},
        data={"batch_size": 32 // accumulate, "toy": {"nan_at": 70}},
        parallel={"sparse": sparse},
        callbacks=[Capture()],
    )
    before, after = captured[2][0], captured[3][0]
    if accumulate == 1:
        assert all(torch.equal(before[k], after[k]) for k in before)
    else:  # the NaN is in the first of its step's micro-batches: the second one's tables are updated, the dense part is not
        dense = [k for k in before if not k.startswith("tables.")]
        assert all(torch.equal(before[k], after[k]) for k in dense)
    assert any(not torch.equal(after[k], captured[4][0][k]) for k in after)
    assert all(torch.isfinite(v).all() for v in captured[4][0].values())
    assert captured[3][1]["loss"] is None
    assert captured[4][1]["loss"] is not None
    assert captured[4][1]["skipped"] == 1
    saved = load_packed(tmp_path / "run" / "nonfinite" / "step-3-rank-0")
    assert any(float(batch.dense.max()) > 1e6 for batch in saved)
    assert sum(batch.size for batch in saved) == 32


def test_stopping_at_a_non_finite_loss_leaves_the_last_checkpoint_and_the_batch(tmp_path):
    with pytest.raises(NumericsError, match=r"loss of step 3 is not finite.*step-3-rank-0") as caught:
        train(tmp_path / "run", train={"steps": 9, "checkpoint_every": 2}, data={"toy": {"nan_at": 70}})
    assert "resume from step 2" in caught.value.fix
    assert caught.value.exit_code == 1
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").glob("step-*")) == ["step-2"]
    assert not (tmp_path / "run" / "summary.json").exists()


def test_non_finite_gradients_after_a_finite_loss_stop_even_when_skipping(tmp_path):
    class Poison:
        def on_start(self, run):
            run.model.scale.register_hook(lambda g: g * float("nan") if run.step == 3 else g)

        def on_step(self, run, record):
            self.last = {k: v.clone() for k, v in run.model.state_dict().items() if not k.startswith("tables.")}

    poison = Poison()
    with pytest.raises(NumericsError, match="gradients of step 3 are not finite"):
        train(tmp_path / "run", train={"steps": 9, "nonfinite": "skip"}, callbacks=[poison])
    assert all(torch.isfinite(v).all() for v in poison.last.values())


def test_what_is_known_late_is_known_when_a_run_stops(tmp_path, monkeypatch):
    """As on a device, whose outcomes the host learns of some steps later."""

    def late(device):
        outcomes = Outcomes(device)
        outcomes.lag = 2
        return outcomes

    class Stop:
        def on_step(self, run, record):
            if run.step == 5:
                signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(trainer, "Outcomes", late)
    result = train(tmp_path / "run", train={"steps": 20, "log_every": 100}, callbacks=[Stop()])
    assert (result.status, result.samples) == ("interrupted", result.steps * 32)
    monkeypatch.undo()
    assert train(tmp_path / "run", resume=True, train={"steps": 20, "log_every": 100}).samples == 20 * 32


def test_a_checkpoint_that_is_written_behind_training_holds_what_was_then(tmp_path, monkeypatch):
    begun, kept = threading.Event(), {}
    publish = CheckpointStore.publish

    def later(store, step, folder, **what):
        if step == 4:
            assert begun.wait(20)  # three steps on
            kept.update(what["shared"])
        return publish(store, step, folder, **what)

    class Counts:
        def __init__(self):
            self.state = {"steps": 0}

        def on_step(self, run, record):
            self.state["steps"] += 1
            if run.step == 7:
                begun.set()

        def state_dict(self):
            return self.state

        def load_state_dict(self, state):
            self.state = dict(state)

    train(tmp_path / "four", train={"steps": 4, "log_every": 1})
    monkeypatch.setattr(CheckpointStore, "publish", later)
    behind = {"steps": 8, "log_every": 100, "checkpoint_every": 4, "checkpoint_async": True}
    train(tmp_path / "behind", train=behind, callbacks=[Counts()])
    assert kept["callbacks"] == {"given 0": {"steps": 4}}
    assert kept["window"]["weight"] == 4 * 32
    assert kept["window"]["loss"] == pytest.approx(32 * sum(x[1] for x in losses(tmp_path / "four")), rel=1e-6)


# Length of a run


def test_epochs_decide_where_steps_do_not(tmp_path):
    result = train(tmp_path / "run", train={"steps": None, "epochs": 2, "accumulate": 3}, data={"toy": {"rows": 320}})
    assert result.steps == 7  # 20 batches in groups of 3
    assert result.samples == 640
    unknown = train(tmp_path / "unknown", train={"steps": None, "epochs": 2}, data={"toy": {"rows": 320, "told_length": False}})
    assert unknown.steps == 20


def test_decay_needs_an_end(tmp_path):
    with pytest.raises(ConfigError, match=r"train.schedule.decay"):
        train(
            tmp_path / "run",
            train={"steps": None, "schedule": {"decay": "linear"}},
            data={"toy": {"told_length": False}},
        )


def test_an_empty_split_is_said(tmp_path):
    with pytest.raises(gem_core.GemError, match="yields no batch"):
        train(tmp_path / "run", data={"toy": {"rows": 0}})


def test_accumulation_equals_the_joined_batch_for_the_dense_part(tmp_path):
    """Tables are updated after each micro-batch, so their learning rate is set to next to nothing here."""
    for name, size, n in (("joined", 64, 1), ("parts", 16, 4)):
        train(tmp_path / name, train={"steps": 3, "accumulate": n, "tables": {"lr": 1e-12}}, data={"batch_size": size})
    for x, y in zip(losses(tmp_path / "joined"), losses(tmp_path / "parts"), strict=True):
        assert x == pytest.approx(y, rel=1e-5)


def test_sample_weights_weigh_the_loss(tmp_path):
    """Weights 1, 2, 3, 1, 2, 3, …: the first loss is the weighted mean over the untrained model's predictions."""
    seen = {}

    class Capture:
        def on_start(self, run):
            self.hook = run.model.register_forward_hook(
                lambda m, inputs, output: seen.update(batch=inputs[0], logits=output.logits.detach())
            )

        def on_step(self, run, record):
            self.hook.remove()

    train(tmp_path / "run", train={"steps": 1}, data={"toy": {"weighted": True}}, callbacks=[Capture()])
    batch, z = seen["batch"], seen["logits"].double()
    ce = torch.nn.functional.softplus(z) - z * batch.labels.double()
    expected = (ce * batch.label_mask * torch.tensor([1.0, 0.5]) * batch.weights.unsqueeze(1)).sum() / batch.weights.sum()
    assert losses(tmp_path / "run")[0][1] == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile on a CPU needs a C++ compiler")
def test_compile_trains(tmp_path):
    a = train(tmp_path / "eager", train={"steps": 3})
    b = train(tmp_path / "compiled", train={"steps": 3, "compile": True})
    assert b.tasks["ctr"]["logloss"] == pytest.approx(a.tasks["ctr"]["logloss"], rel=1e-4)


def test_layers_alike_are_compiled_once():
    """The units that `train.compile` compiles share what is compiled: a deeper model compiles no more."""
    from gem_core.config.features import Features
    from gem_core.model.config import GemConfig
    from gem_core.model.gem import Gem
    from gem_core.sources.drawn import RandomConfig, RandomSource
    from gem_core.train.build import compiled_units

    features = Features.model_validate({"sparse": {"item": {"rows": 50}, "user": {"rows": 50}}, "labels": {"ctr": {}}})
    batch = next(iter(RandomSource(RandomConfig(), features, batch_size=8)))

    def graphs(layers):
        torch._dynamo.reset()
        made = []
        model = Gem(GemConfig(layers=layers, dim=8, embedding_dim=8, feature_tokens=4, interaction={"tokens": 4}), features)
        expected = model(batch).logits

        def backend(graph, inputs):
            made.append(graph)
            return graph.forward

        for unit in compiled_units(model):
            unit.compile(backend=backend, dynamic=True)
        torch.testing.assert_close(model(batch).logits, expected)
        return len(made)

    assert compiled_units(torch.nn.Linear(2, 2))[0].in_features == 2
    assert graphs(2) == graphs(5)


def test_missing_tensorboard_is_said_once(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.warns(UserWarning, match=r"gem-core\[log\]") as found:
        train(tmp_path / "run", train={"steps": 2, "tensorboard": True})
    assert len(found) == 1


def test_tensorboard_is_written(tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train(tmp_path / "run", train={"steps": 3, "tensorboard": True})
    events = reader.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    logged = [(e.step, e.value) for e in events.Scalars("train/loss")]
    assert [s for s, _ in logged] == [1, 2, 3]
    assert [v for _, v in logged] == pytest.approx([x[1] for x in losses(tmp_path / "run")])
    assert "eval/ctr/ne" in events.Tags()["scalars"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_step_waits_for_nothing_and_a_run_resumes_exactly(tmp_path):
    """Sync debug mode turns every wait of the host between two log steps into an error."""

    class Watch:
        def on_step(self, run, record):
            torch.cuda.set_sync_debug_mode("error" if 5 <= run.step < 19 else "default")

    base = {
        "run": {"device": "cuda"},
        "data": {"source": "synthetic", "batch_size": 64, "synthetic": {"rows": 4000, "eval_rows": 500, "users": 200}},
        "features": {},
        "model": {"name": "gem", "preset": "tiny"},
        "eval": {"group": "user_id"},
    }
    try:
        train(tmp_path / "straight", train={"steps": 20, "log_every": 20, "checkpoint_every": 20}, callbacks=[Watch()], **base)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for steps in (12, 20):
        train(tmp_path / "parts", train={"steps": steps, "log_every": 1}, resume=steps == 20, **base)
    train(tmp_path / "whole", train={"steps": 20, "log_every": 1}, **base)
    a, b = ([x[1] for x in losses(tmp_path / n)] for n in ("parts", "whole"))
    assert a == pytest.approx(b, rel=1e-4)
    header = json.loads((tmp_path / "whole" / "run.json").read_text())
    assert header["mfu_peak"]["reason"], "an fp32 run has no peak in the table"
