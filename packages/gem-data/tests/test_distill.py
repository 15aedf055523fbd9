"""``gemrec distill``: the teacher's columns, when they are written anew, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from gem_core import load_config, train
from gem_core.cli import main
from gem_core.errors import ConfigError, DataError, GemError
from gem_core.sources.synthetic import SyntheticConfig
from gem_data.distill import distill
from gem_data.synth import write_synthetic

SMALL = ["run.device=cpu", "data.batch_size=100", "train.tensorboard=false", "train.log_every=10", "train.steps=4"]


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    folder = tmp_path_factory.mktemp("log")
    write_synthetic(folder, SyntheticConfig(rows=600, eval_rows=200, test_rows=10, users=50, length={"law": "lognormal", "mean": 4}))
    text = (folder / "config.toml").read_text().replace('preset = "tiny"\n', "").replace('name = "gem"', 'name = "dlrm"')
    (folder / "config.toml").write_text(text)
    train(load_config(folder / "config.toml", changes(folder)), run_dir=folder / "teacher", quiet=True)
    return folder


def changes(folder):
    return [*SMALL, f"data.parquet.root={json.dumps(str(folder))}"]


def student(log, out, **options):
    options = {"overrides": changes(log), "scores": out / "scores", "run_dir": out / "run", "quiet": True, **options}
    return distill(log / "teacher", log / "config.toml", **options)


def test_the_teachers_predictions_stand_beside_every_column(log, tmp_path):
    done = student(log, tmp_path)
    assert done.status == "finished"
    assert main(["predict", str(log / "teacher"), str(log / "train.parquet"), "--out", str(tmp_path / "p.parquet")]) == 0
    scored, plain = pq.read_table(tmp_path / "scores" / "train-0.parquet"), pq.read_table(log / "train.parquet")
    assert scored.select(plain.schema.names).equals(plain)
    predicted = pq.read_table(tmp_path / "p.parquet")
    for task in ("ctr", "cvr"):
        got, want = scored[f"{task}_teacher"].to_numpy(), predicted[f"{task}_probability"].to_numpy()
        assert np.array_equal(got, want)
        assert got.std() > 0
    config = load_config(tmp_path / "run" / "config.toml")
    assert config.train.distill.teacher == {"ctr": "ctr_teacher", "cvr": "cvr_teacher"}


def test_scores_are_written_anew_only_where_something_changed(log, tmp_path):
    student(log, tmp_path)
    path = tmp_path / "scores" / "train-0.parquet"
    first = path.stat().st_mtime_ns
    student(log, tmp_path, overwrite=True)
    assert path.stat().st_mtime_ns == first
    told = path.with_suffix(".json")
    told.write_text(told.read_text().replace('"step": 4', '"step": 3'))
    student(log, tmp_path, overwrite=True)
    assert path.stat().st_mtime_ns > first
    assert json.loads(told.read_text())["step"] == 4
    told.write_text("{")
    student(log, tmp_path, overwrite=True)
    assert json.loads(told.read_text())["step"] == 4


def test_a_teacher_that_was_trained_again_is_asked_again(log, tmp_path):
    def scores(*more):
        train(load_config(log / "config.toml", [*changes(log), *more]), run_dir=tmp_path / "teacher", overwrite=True, quiet=True)
        options = {"overrides": changes(log), "scores": tmp_path / "scores", "overwrite": True, "quiet": True}
        distill(tmp_path / "teacher", log / "config.toml", run_dir=tmp_path / "run", **options)
        return pq.read_table(tmp_path / "scores" / "train-0.parquet")["ctr_teacher"].to_numpy()

    assert not np.allclose(scores(), scores("run.seed=5"))


def test_filters_and_columns_of_the_student_hold(log, tmp_path):
    more = [c for c in changes(log) if "steps" not in c] + ['data.parquet.train_filter="sample_id >= 500"']
    assert student(log, tmp_path, overrides=more).samples == 100


def test_what_is_refused(log, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="no files for the teacher"):
        student(log, tmp_path, overrides=["data.source=synthetic"])
    text = (
        (log / "config.toml")
        .read_text()
        .replace("[features.labels.ctr]", "[features.labels.click]")
        .replace("[features.labels.cvr]", "[features.labels.sale]")
    )
    (tmp_path / "other.toml").write_text(text)
    with pytest.raises(ConfigError, match="the student learns click, sale"):
        distill(log / "teacher", tmp_path / "other.toml", scores=tmp_path / "s", overrides=changes(log))
    with pytest.raises(DataError, match="cannot be written"):
        student(log, tmp_path, scores=log / "config.toml")
    (tmp_path / "mine").mkdir()
    for content in ((log / "eval.parquet").read_bytes(), b"no Parquet"):
        (tmp_path / "mine" / "train-0.parquet").write_bytes(content)
        with pytest.raises(DataError, match="take the place of a file"):
            student(log, tmp_path, scores=tmp_path / "mine")
        assert (tmp_path / "mine" / "train-0.parquet").read_bytes() == content
    for options, words in (
        ({"run_dir": log / "teacher", "overwrite": True}, "in the teacher's run folder"),
        ({"run_dir": tmp_path / "mine"}, "the run folder is not empty"),
        ({"overrides": [*changes(log), "model.embeding_dim=8"]}, "embeding_dim"),
    ):
        with pytest.raises(GemError, match=words):
            distill(
                log / "teacher", log / "config.toml", **{"overrides": changes(log), "scores": tmp_path / "none", "quiet": True, **options}
            )
        assert not (tmp_path / "none").exists()
    assert (log / "teacher" / "run.json").is_file()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="in one process"):
        student(log, tmp_path)
