"""Declared transforms against plain Python, and fitted state: made, versioned, kept with the run and used again."""

from __future__ import annotations

import bisect
import json
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gem_core.cli import main
from gem_core.config.features import Features
from gem_core.errors import ConfigError, DataError
from gem_core.sources.fitted import Fitted
from gem_core.sources.hashing import key_of, mix64, salt_of
from gem_data import ParquetSource, arrow
from gem_data.config import ParquetConfig
from gem_data.fit import fit

RNG = np.random.default_rng(5)
N = 240


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """Countries with nulls, numbers with NaN, histories with times; 3 row groups."""
    lengths = RNG.integers(0, 9, N)
    table = {
        "id": list(range(N)),
        "time": (1000 + RNG.integers(0, 50, N)).tolist(),
        "country": [None if i % 17 == 0 else f"c{i % 7}" for i in range(N)],
        "device": RNG.integers(0, 5, N).tolist(),
        "price": [None if i % 19 == 0 else float("nan") if i % 23 == 0 else float(x) for i, x in enumerate(RNG.lognormal(size=N))],
        "seen": [[f"c{int(x)}" for x in RNG.integers(0, 9, n)] for n in lengths],
        "paid": [RNG.normal(size=n).tolist() for n in lengths],
        "at": [np.sort(RNG.integers(0, 1000, n)).tolist() for n in lengths],
        "click": (np.arange(N) % 2).tolist(),
    }
    path = tmp_path_factory.mktemp("log") / "a.parquet"
    pq.write_table(pa.table(table), path, row_group_size=90)
    return path, table


def declared(**more):
    return Features.model_validate({"sample_id": "id", "labels": {"click": {}}, **more})


def read(path, features, **options):
    """Values by sample id: sparse features as lists of ids, event fields as lists."""
    rows: dict[int, dict[str, list]] = {}
    for batch in ParquetSource(path, features, batch_size=32, shuffle=True, window=90, **options):
        for i, sample in enumerate(batch.validate().sample_ids.tolist()):
            rows[sample] = {k: batch.sparse[k].to_list()[i].tolist() for k in features.sparse}
            for group in features.sequences:
                found = batch.sequences[group]
                rows[sample] |= {k: found.jagged(k).to_list()[i].tolist() for k in found.fields}
    return rows


def test_edges(log):
    path, table = log
    edges = [0.3, 1.0, 2.5]
    features = declared(sparse={"price": {"rows": 5, "edges": edges, "default": 4}})
    for sample, row in read(path, features).items():
        x = table["price"][sample]
        assert row["price"] == [4 if x is None or x != x else bisect.bisect_right(edges, x)]


def test_cross_of_two_columns(log):
    path, table = log
    features = declared(sparse={"place": {"rows": 1000, "cross": ["country", "device"], "default": 0}})
    key = key_of(salt_of("sparse.place"))

    def hashed(value):
        if isinstance(value, int):
            return mix64(key ^ value)
        data = value.encode()
        h = mix64(key ^ (~len(data) & (2**64 - 1)))
        for i in range(0, len(data), 8):
            h = mix64(h ^ int.from_bytes(data[i : i + 8], "little"))
        return h

    seen = Counter()
    for sample, row in read(path, features).items():
        a, b = table["country"][sample], table["device"][sample]
        want = 0 if a is None else mix64(hashed(a) ^ mix64((hashed(b) + 0x9E3779B97F4A7C15) % 2**64)) % 1000
        assert row["place"] == [want]
        seen[want] += 1
    assert len(seen) > 30


def test_time_gaps_clip_and_newest(log):
    path, table = log
    fields = {
        "paid": {"kind": "float", "clip": [-0.5, 0.5]},
        "since": {"kind": "float", "gap": "sample", "transform": "log1p"},
        "step": {"rows": 3, "gap": "previous", "edges": [1, 100]},
    }
    history = {"fields": fields, "timestamps": "at", "max_length": 4}
    features = declared(timestamp="time", sequences={"h": history})
    for sample, row in read(path, features).items():
        times, now = table["at"][sample], table["time"][sample]
        steps = [0, *np.diff(times).tolist()] if times else []
        assert row["paid"] == pytest.approx(np.clip(table["paid"][sample], -0.5, 0.5)[-4:].tolist())
        assert row["since"] == pytest.approx([float(np.log1p(now - t)) for t in times][-4:], rel=1e-6)
        assert row["step"] == [bisect.bisect_right([1, 100], s) for s in steps][-4:]


FITTED = {
    "tables": {"place": {"rows": 12}},
    "sparse": {
        "country": {"table": "place", "vocabulary": True, "default": 0, "policy": "default"},
        "price": {"rows": 5, "buckets": 4, "default": 4},
    },
    "sequences": {
        "h": {
            "fields": {
                "seen": {"table": "place", "vocabulary": True, "default": 0, "policy": "default"},
                "step": {"rows": 4, "gap": "previous", "buckets": 4},
            },
            "timestamps": "at",
        }
    },
}


def test_fitted_state_against_an_oracle(log, tmp_path):
    path, table = log
    made = fit(ParquetConfig(train=(str(path),)), declared(**FITTED), least=20, most=8)
    counts = Counter(c for c in table["country"] if c is not None) + Counter(c for row in table["seen"] for c in row)
    often = [c for c, n in sorted(counts.items(), key=lambda item: (-item[1], item[0])) if n >= 20][:8]
    assert made.vocabularies == {"place": often}
    prices = [x for x in table["price"] if x is not None and x == x]
    assert made.edges["sparse.price"] == np.quantile(prices, [0.25, 0.5, 0.75]).tolist()
    steps = [s for row in table["at"] if row for s in [0, *np.diff(row)]]
    assert made.edges["sequences.h.fields.step"] == np.unique(np.quantile(steps, [0.25, 0.5, 0.75])).tolist()

    (tmp_path / "fitted.json").write_text(made.dumps())
    for sample, row in read(path, declared(**FITTED, fitted=str(tmp_path / "fitted.json"))).items():
        place = {c: i + 1 for i, c in enumerate(often)}
        assert row["country"] == [place.get(table["country"][sample], 0)]
        assert row["seen"] == [place.get(c, 0) for c in table["seen"][sample]]


def test_unknown_values_follow_the_policy(log, tmp_path):
    path, _ = log
    state = tmp_path / "fitted.json"
    state.write_text(Fitted({"sparse.country": ["c0", "c1"]}).dumps())
    spec = {"rows": 3, "vocabulary": True, "default": 0}
    with pytest.raises(DataError, match=r"(?s)'c2' is not in the vocabulary.*sparse.country.*id 0 is left") as error:
        read(path, declared(fitted=str(state), sparse={"country": spec}))
    assert "row 2" in str(error.value)
    with pytest.raises(ConfigError, match=r"2 values, the table 2 rows"):
        read(path, declared(fitted=str(state), sparse={"country": spec | {"rows": 2}}))
    state.write_text(Fitted({"sparse.country": [1, 2]}).dumps())
    with pytest.raises(DataError, match=r"sparse\.country"):
        read(path, declared(fitted=str(state), sparse={"country": spec}))


@pytest.mark.parametrize(
    ("text", "what"),
    [(None, "cannot be read"), ("{", "is damaged"), ('{"format": 9}', "has the format 9"), (Fitted().dumps(), "has no vocabulary")],
)
def test_fitted_files_that_cannot_be_used(log, tmp_path, text, what):
    state = tmp_path / "fitted.json"
    if text is not None:
        state.write_text(text)
    with pytest.raises((DataError, ConfigError), match=what):
        read(log[0], declared(fitted=str(state), sparse={"country": {"rows": 3, "vocabulary": True}}))


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"sparse": {"a": {"rows": 3, "hash": True, "edges": [1]}}}, "exclude each other"),
        ({"sparse": {"a": {"rows": 3, "edges": [2, 1]}}}, "edges"),
        ({"sparse": {"a": {"rows": 3, "cross": ["b", "c"], "column": "d"}}}, "cross names its columns"),
        ({"sequences": {"h": {"fields": {"g": {"kind": "float", "gap": "previous"}}}}}, "needs timestamps"),
        ({"sequences": {"h": {"fields": {"g": {"rows": 3, "gap": "previous"}}, "timestamps": "t"}}}, "a gap is a number"),
    ],
)
def test_declarations_that_contradict_themselves(more, what):
    with pytest.raises(ValueError, match=what):
        declared(**more)


def test_a_vocabulary_of_numbers_that_int64_does_not_hold_is_refused(tmp_path):
    pq.write_table(pa.table({"user": pa.array([1, 2**63], pa.uint64()), "click": [0, 1]}), tmp_path / "a.parquet")
    features = Features.model_validate({"sparse": {"user": {"rows": 9, "vocabulary": True}}, "labels": {"click": {}}})
    with pytest.raises(DataError, match=r"(?s)larger than 9223372036854775807.*a.parquet.*hash = true"):
        fit(ParquetConfig(root=str(tmp_path), train=("a.parquet",)), features)


def test_numbers_that_int64_does_not_hold_are_in_no_vocabulary():
    known = pa.array([5, 2**63 - 1], pa.int64())
    found, missing, there = arrow.places(pa.array([2**63 - 1, 2**63, None, 2**64 - 1, 5], pa.uint64()), known)
    assert found.tolist() == [1, 0, 0, 0, 0]
    assert missing.tolist() == [False, False, True, False, False]
    assert there.tolist() == [True, False, False, False, True]


def test_vocabulary_without_a_file(log):
    with pytest.raises(ConfigError, match="gemrec data vocab"):
        read(log[0], declared(sparse={"country": {"rows": 3, "vocabulary": True}}))


def test_a_run_keeps_its_fitted_state(log, tmp_path, capsys):
    """From the command to training, resuming and evaluating: with the original file gone, and with one that has changed."""
    path, _ = log
    state, run = tmp_path / "fitted.json", tmp_path / "run"
    toml = f"""
    [data]
    source = "parquet"
    batch_size = 60
    [data.parquet]
    train = ["{path}"]
    eval = ["{path}"]
    [features]
    fitted = "{state}"
    sample_id = "id"
    [features.sparse.country]
    rows = 9
    vocabulary = true
    default = 0
    policy = "default"
    [features.labels.click]
    [model]
    name = "gem"
    preset = "tiny"
    sequence = false
    [train]
    steps = 4
    tensorboard = false
    """
    config = tmp_path / "my.toml"
    config.write_text(toml)

    def gemrec(*arguments, code=0):
        got, said = main([str(a) for a in arguments]), capsys.readouterr()
        assert got == code, said
        return said.out + said.err

    assert "table sparse.country: 7 values" in gemrec("data", "vocab", config)
    gemrec("train", config, "--run-dir", run)
    kept = run / "fitted.json"
    assert kept.read_text() == state.read_text()
    assert json.loads((run / "run.json").read_text())["fitted"] is not None
    whole = gemrec("eval", run)

    state.unlink()
    assert gemrec("eval", run) == whole
    changed = json.loads(kept.read_text())
    changed["vocabularies"]["sparse.country"].reverse()
    state.write_text(json.dumps(changed))
    assert gemrec("eval", run) == whole
    assert "fitted" in gemrec("train", config, "--run-dir", run, "--resume", "--set", "train.steps=8", code=2)
    state.write_text(kept.read_text())
    gemrec("train", config, "--run-dir", run, "--resume", "--set", "train.steps=8")
