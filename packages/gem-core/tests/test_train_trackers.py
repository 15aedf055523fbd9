"""The trackers against the real libraries, without a network: MLflow with a local store, Weights & Biases offline."""

from __future__ import annotations

import builtins
import json

import pytest

from gem_core.config import load_config
from gem_core.errors import ConfigError, RunError
from gem_core.train import quickstart_path, train
from gem_core.train.trackers import MLflow, MLflowConfig

OPTIONS = [
    "train.steps=6", "train.log_every=2", "data.batch_size=32", "eval.every=3", "eval.max_batches=1", "data.synthetic.rows=600",
    "data.synthetic.eval_rows=100", "train.tensorboard=false", "run.name=tracked", "run.device=cpu", "train.checkpoint_every=2",
]  # fmt: skip


def options(tracker, *more):
    return load_config(quickstart_path(), [*OPTIONS, *(f"train.callbacks.{tracker}.{m}" for m in more)])


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class Stop:
    """Fails the run at a step, as a callback of the user may."""

    def __init__(self, at):
        self.at = at

    def on_step(self, run, record):
        if run.step == self.at:
            raise RunError("stopped by the test")


@pytest.fixture
def store(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return (tmp_path / "mlruns").as_uri()


def test_mlflow_holds_parameters_metrics_and_how_the_run_ended(tmp_path, store):
    import mlflow

    config = options("mlflow", f'tracking_uri="{store}"', 'experiment="ads"')
    with pytest.raises(RunError, match="stopped by the test"):
        train(config, run_dir=tmp_path / "run", quiet=True, callbacks=[Stop(5)])
    client = mlflow.MlflowClient(tracking_uri=store)
    (failed,) = client.search_runs([client.get_experiment_by_name("ads").experiment_id])
    assert failed.info.status == "FAILED"
    train(config, run_dir=tmp_path / "run", quiet=True, resume=True)
    (run,) = client.search_runs([client.get_experiment_by_name("ads").experiment_id])
    assert run.info.run_id == failed.info.run_id, "a resumed run goes on in the same one"
    assert (run.info.status, run.info.run_name) == ("FINISHED", "tracked")
    assert run.data.params["train.steps"] == "6"
    assert run.data.tags["gem.model"] == "gem"
    told = {m.step: m.value for m in client.get_metric_history(run.info.run_id, "train/loss")}
    assert told == {r["step"]: pytest.approx(r["loss"]) for r in lines(tmp_path / "run" / "metrics.jsonl")}
    evals = {m.step: m.value for m in client.get_metric_history(run.info.run_id, "eval/ctr/ne")}
    assert evals == {r["step"]: pytest.approx(r["tasks"]["ctr"]["ne"]) for r in lines(tmp_path / "run" / "eval.jsonl")}
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert run.data.metrics["final/tasks/ctr/ne"] == pytest.approx(summary["tasks"]["ctr"]["ne"])


def test_a_tracker_that_cannot_be_reached_at_the_start_is_an_error(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    config = options("mlflow", 'tracking_uri="http://127.0.0.1:9"')
    with pytest.raises(RunError, match=r"(?s)mlflow cannot begin a run.*train.callbacks.mlflow"):
        train(config, run_dir=tmp_path / "run", quiet=True)


def test_a_tracker_that_fails_later_costs_its_numbers_only(tmp_path, store, capfd):
    tracker = MLflow(MLflowConfig(tracking_uri=store))

    class Unplug:
        def on_step(self, run, record):
            if run.step == 3:
                tracker.client = None

    config = load_config(quickstart_path(), OPTIONS)
    result = train(config, run_dir=tmp_path / "run", quiet=True, callbacks=[tracker, Unplug()])
    assert result.status == "finished"
    err = capfd.readouterr().err
    assert err.count("the tracker fails") == 1
    assert f"{tracker.lost} messages did not reach the tracker" in err
    assert tracker.lost >= 4
    assert len(lines(tmp_path / "run" / "metrics.jsonl")) == 3


def test_wandb_writes_an_offline_run_and_resumes_it(tmp_path):
    pytest.importorskip("wandb")
    config = options("wandb", 'mode="offline"', 'project="ads"', 'tags=["a"]')
    with pytest.raises(RunError, match="stopped by the test"):
        train(config, run_dir=tmp_path / "run", quiet=True, callbacks=[Stop(5)])
    train(config, run_dir=tmp_path / "run", quiet=True, resume=True)
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    assert len({f.name for f in files}) == 1, "a resumed run goes on under the same id"
    written = b"".join(f.read_bytes() for f in files)
    for name in (b"train/loss", b"eval/ctr/ne", b"train.steps", b"tracked"):
        assert name in written, name


@pytest.mark.parametrize("package", ["mlflow", "wandb"])
def test_a_missing_library_is_said_before_anything_runs(tmp_path, monkeypatch, package):
    real = builtins.__import__

    def without(name, *rest):
        if name.partition(".")[0] == package:
            raise ImportError(f"No module named {package!r}")
        return real(name, *rest)

    monkeypatch.setattr("gem_core.train.trackers.import_module", without)
    config = load_config(quickstart_path(), [*OPTIONS, f"train.callbacks.{package}={{}}"])
    with pytest.raises(ConfigError, match=rf"(?s){package} is not usable.*pip install 'gem-core\[{package}\]'"):
        train(config, run_dir=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
