"""gemrec predict: every row in its place, equal to evaluation, without labels, in flat memory, and every refusal named."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from gem_core.cli.groups import CommandGroups
from gem_core.config import load_config
from gem_core.errors import CheckpointError, ConfigError, DataError
from gem_core.sources.synthetic import SyntheticConfig
from gem_core.train.build import build_source
from gem_core.train.predict import by_length, predictor
from gem_data import predict as predicting
from gem_data.commands import register
from gem_data.predict import write_predictions
from gem_data.synth import write_synthetic

ROWS = 3000


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folder of a log and of a short training of `tiny` on it."""
    from gem_core.train import train  # type: ignore[attr-defined]

    folder = tmp_path_factory.mktemp("predict")
    config = SyntheticConfig(rows=2000, eval_rows=ROWS, test_rows=10, users=300, length={"law": "lognormal", "mean": 8.0})
    write_synthetic(folder, config)
    train(
        load_config(folder / "config.toml", [f"data.parquet.root={folder}", "train.steps=5", "eval.max_batches=1", "data.batch_size=128"]),
        run_dir=folder / "run",
        quiet=True,
    )
    return folder


@pytest.fixture(scope="module")
def evaluated(trained):
    """Probabilities of the evaluation split from the model called on one batch after the other, as evaluation does."""
    with predictor(trained / "run") as model, torch.no_grad():
        batches = build_source(model.run.resolved, "eval", model.run.runtime)
        return torch.cat([torch.sigmoid(model.run.parts.module(b).logits.double()) for b in batches]).numpy()


def gemrec(*arguments):
    app = CommandGroups()
    app.owner = "gem-data"
    register(app)
    result = CliRunner().invoke(app.assemble(), [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def probabilities(path):
    table = pq.read_table(path)
    return np.stack([table["ctr_probability"].to_numpy(), table["cvr_probability"].to_numpy()], 1)


def test_predictions_are_evaluations_in_the_order_of_the_rows(trained, evaluated, tmp_path):
    out = gemrec("predict", trained / "run", trained / "eval.parquet", "--out", tmp_path / "p.parquet", "--column", "user_id", "--logit")
    assert f"{ROWS:,} rows, step 5" in out
    found, source = pq.read_table(tmp_path / "p.parquet"), pq.read_table(trained / "eval.parquet")
    assert found.schema.names == ["sample_id", "user_id", "ctr_probability", "ctr_logit", "cvr_probability", "cvr_logit"]
    for name in ("sample_id", "user_id"):
        assert found[name].equals(source[name])
    assert np.abs(probabilities(tmp_path / "p.parquet") - evaluated).max() <= 1e-6
    assert np.ptp(evaluated[:, 0]) > 0.01, "the model tells samples apart, so a wrong order would show"
    logits = torch.from_numpy(found["ctr_logit"].to_numpy().copy()).double()
    assert float((torch.sigmoid(logits) - torch.from_numpy(evaluated[:, 0])).abs().max()) <= 1e-6


@pytest.mark.parametrize(("batch", "samples", "events"), [(32_768, 64, 200), (500, 7, 10**9), (1, 1024, 1), (700, 1024, 300)])
def test_cuts_do_not_matter(trained, evaluated, tmp_path, monkeypatch, batch, samples, events):
    """Row groups of 211 rows, several files and folders, any size of batch and of its parts: the same rows and predictions."""
    table = pq.read_table(trained / "eval.parquet")
    (tmp_path / "in").mkdir()
    bounds = [0, 1, 900, 900, 2500, ROWS]
    for i, (a, b) in enumerate(zip(bounds, bounds[1:])):
        pq.write_table(table.slice(a, b - a), tmp_path / "in" / f"{i}.parquet", row_group_size=211)
    monkeypatch.setattr(predicting, "BATCH", batch if batch > 1 else 300)
    monkeypatch.setattr("gem_core.train.predict.PART_SAMPLES", samples)
    monkeypatch.setattr("gem_core.train.predict.PART_EVENTS", events)
    rows = ROWS if events > 1 else 120
    data = [str(tmp_path / "in")] if events > 1 else [str(tmp_path / "in" / "4.parquet")]
    with predictor(trained / "run") as model:
        if events == 1:
            pq.write_table(table.slice(0, rows), tmp_path / "in" / "4.parquet")
        assert write_predictions(model, data, tmp_path / "p.parquet").rows == rows
    found = pq.read_table(tmp_path / "p.parquet")
    assert found["sample_id"].equals(table["sample_id"].slice(0, rows))
    assert np.abs(probabilities(tmp_path / "p.parquet") - evaluated[:rows]).max() <= 1e-6


def test_neither_labels_nor_carried_columns_nor_the_filter_are_needed(trained, evaluated, tmp_path):
    table = pq.read_table(trained / "eval.parquet")
    drop = [n for n in table.schema.names if n in ("clicked", "converted", "user_id", "sample_id") or n.startswith(("true_", "label"))]
    assert len(drop) >= 4
    with predictor(trained / "run", overrides=['features.filter="clicked == 1"']) as model:
        read = {c for f in model.features.dense.values() for c in (f.column,)} | {f.column for f in model.features.sparse.values()}
        drop = [n for n in drop if n not in read and n not in model.features.sparse]
        pq.write_table(table.drop_columns(drop), tmp_path / "bare.parquet")
        done = write_predictions(model, [str(tmp_path / "bare.parquet")], tmp_path / "p.parquet")
    assert done.rows == ROWS
    assert pq.read_schema(tmp_path / "p.parquet").names == ["ctr_probability", "cvr_probability"]
    assert np.abs(probabilities(tmp_path / "p.parquet") - evaluated).max() <= 1e-6


def test_columns_of_any_type_come_out_as_they_are(trained, tmp_path):
    table = pq.read_table(trained / "eval.parquet").slice(0, 50)
    more = {
        "big": pa.array([2**64 - 1 - i for i in range(50)], pa.uint64()),
        "text": pa.array([None if i % 7 == 0 else f"é{i}" for i in range(50)]),
        "lists": pa.array([list(range(i % 4)) for i in range(50)]),
        "when": pa.array(range(50), pa.timestamp("us", "UTC")),
    }
    for name, values in more.items():
        table = table.append_column(name, values)
    (tmp_path / "in" / "day=07").mkdir(parents=True)
    pq.write_table(table, tmp_path / "in" / "day=07" / "a.parquet")
    with predictor(trained / "run") as model:
        write_predictions(model, [str(tmp_path / "in")], tmp_path / "p.parquet", columns=[*more, "day"])
    found = pq.read_table(tmp_path / "p.parquet")
    for name, values in more.items():
        assert found[name].combine_chunks().equals(values)
    assert set(found["day"].to_pylist()) == {7}


def test_refused_rows_have_no_prediction_and_are_counted(trained, evaluated, tmp_path):
    table = pq.read_table(trained / "eval.parquet").slice(0, 400)
    with predictor(trained / "run") as model:
        name, spec = next((n, f) for n, f in model.features.sparse.items() if f.table is not None)
    at = table.schema.get_field_index(spec.column or name)
    ids = table.column(at).to_numpy().copy()
    ids[[3, 77, 399]] = 10**9
    pq.write_table(table.set_column(at, table.schema.names[at], pa.array(ids)), tmp_path / "in.parquet")
    with predictor(trained / "run") as model, pytest.raises(DataError, match="does not fit its table"):
        write_predictions(model, [str(tmp_path / "in.parquet")], tmp_path / "p.parquet")
    assert not (tmp_path / "p.parquet").exists(), "nothing half-written"
    option = f"features.sparse.{name}.policy=quarantine"
    out = gemrec("predict", trained / "run", tmp_path / "in.parquet", "--out", tmp_path / "p.parquet", "--set", option)
    assert "3 rows have no prediction" in out
    found = pq.read_table(tmp_path / "p.parquet")["ctr_probability"].to_pylist()
    assert [i for i, p in enumerate(found) if p is None] == [3, 77, 399]
    kept = [i for i, p in enumerate(found) if p is not None]
    assert np.abs(np.array([found[i] for i in kept]) - evaluated[kept, 0]).max() <= 1e-6


def test_what_is_wrong_is_named(trained, tmp_path):
    data = str(trained / "eval.parquet")
    with pytest.raises(CheckpointError, match="no run folder"), predictor(tmp_path):
        pass
    with predictor(trained / "run") as model:
        with pytest.raises(DataError, match="'nothing' is missing"):
            write_predictions(model, [data], tmp_path / "p.parquet", columns=["nothing"])
        with pytest.raises(DataError, match="no such file"):
            write_predictions(model, [str(tmp_path / "none.parquet")], tmp_path / "p.parquet")
        with pytest.raises(DataError, match="would take the place of their input"):
            write_predictions(model, [str(trained)], trained / "eval.parquet")
        clash = pq.read_table(data).slice(0, 5).append_column("ctr_probability", pa.array([0.5] * 5))
        pq.write_table(clash, tmp_path / "clash.parquet")
        with pytest.raises(ConfigError, match="has the name of a result"):
            write_predictions(model, [str(tmp_path / "clash.parquet")], tmp_path / "p.parquet", columns=["ctr_probability"])
        other = clash.set_column(0, clash.schema.names[0], pa.array([f"x{i}" for i in range(5)]))
        pq.write_table(other, tmp_path / "other.parquet")
        name = clash.schema.names[0]
        with pytest.raises(DataError, match=f"column {name!r}"):
            write_predictions(model, [data, str(tmp_path / "other.parquet")], tmp_path / "p.parquet", columns=[name])
        pq.write_table(clash.slice(0, 0), tmp_path / "empty.parquet")
        assert write_predictions(model, [str(tmp_path / "empty.parquet")], tmp_path / "e.parquet").rows == 0
    assert pq.read_table(tmp_path / "e.parquet").num_rows == 0


def test_memory_is_flat(trained, tmp_path):
    """Peak resident memory of predicting eight files, with which everything that is read ahead is full, and of predicting 24: the least of
    up to three, because what allocators keep beside other processes differs from run to run, and what grows with the files does not."""
    script = (
        "import sys; from pathlib import Path; from gem_core.train.measure import peak_resident\n"
        "from gem_core.train.predict import predictor; from gem_data import predict\n"
        "predict.BATCH = 2048\n"
        "with predictor(sys.argv[1]) as model: predict.write_predictions(model, sys.argv[3:], Path(sys.argv[2]))\n"
        "print(peak_resident())"
    )
    table = pq.read_table(trained / "eval.parquet")
    pq.write_table(table, tmp_path / "0.parquet", row_group_size=1000)
    paths = [tmp_path / "0.parquet"]
    for i in range(1, 24):
        paths.append(tmp_path / f"{i}.parquet")
        paths[-1].write_bytes(paths[0].read_bytes())

    def peak(some):
        done = subprocess.run(
            [sys.executable, "-c", script, trained / "run", tmp_path / "p.parquet", *some], capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    few, more = peak(paths[:8]), []
    while not more or (min(more) >= 1.05 * few and len(more) < 3):
        more.append(peak(paths))
    assert min(more) < 1.05 * few, (few, more)
    assert pq.read_metadata(tmp_path / "p.parquet").num_rows == 24 * ROWS


def test_parts_hold_every_sample_once_within_the_bounds(trained, monkeypatch):
    monkeypatch.setattr("gem_core.train.predict.PART_SAMPLES", 50)
    monkeypatch.setattr("gem_core.train.predict.PART_EVENTS", 120)
    with predictor(trained / "run") as model:
        batch = next(iter(build_source(model.run.resolved, "eval", model.run.runtime)))
    order, cuts = by_length(batch)
    assert sorted(order.tolist()) == list(range(batch.size))
    lengths = batch.sequences["history"].lengths[order]
    assert torch.equal(lengths, lengths.sort().values)
    assert (cuts[0], cuts[-1]) == (0, batch.size)
    for a, b in zip(cuts, cuts[1:]):
        assert 0 < b - a <= 50
        assert b - a == 1 or int(lengths[a:b].sum()) <= 120
