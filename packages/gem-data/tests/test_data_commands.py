"""gemrec data inspect, convert and synth, through the command and end to end into the reader."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from gem_core.cli.groups import CommandGroups
from gem_core.config.features import Features, Label
from gem_core.config.load import load_config, source_config
from gem_core.errors import ConfigError, DataError
from gem_core.sources.synthetic import SyntheticConfig, SyntheticSource
from gem_core.testing.sources import ids_of
from gem_data import ParquetSource, movielens
from gem_data.commands import register
from gem_data.files import find_files
from gem_data.inspect import propose
from gem_data.spec import SPEC, ParquetConfig
from gem_data.writer import UNFINISHED

DATA = Path(os.environ.get("GEM_TEST_DATA") or Path(__file__).parents[4] / "shared" / "data")


def data(name):
    if not (DATA / name).exists():
        pytest.skip(f"{DATA / name} is not there (set GEM_TEST_DATA)")
    return DATA / name


def gemrec(*arguments):
    app = CommandGroups()
    app.owner = "gem-data"
    register(app)
    result = CliRunner().invoke(app.group("data"), [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def source_of(text_or_path, split="train", **how):
    """The source that a configuration file describes, as the trainer builds it."""
    raw = tomllib.loads(text_or_path) if isinstance(text_or_path, str) else tomllib.loads(text_or_path.read_text())
    options = raw["data"]["parquet"] | ({"root": str(text_or_path.parent)} if isinstance(text_or_path, Path) else {})
    return SPEC.build(ParquetConfig(**options), Features(**raw["features"]), split=split, **{"batch_size": 64, **how})


def bytes_of(folder):
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


# --- synth ----------------------------------------------------------------------------------------------------------------------------


def test_synth_writes_the_log_of_the_synthetic_source(tmp_path):
    out = gemrec("synth", "--out", tmp_path / "log", "--rows", 20_000, "--eval-rows", 500, "--test-rows", 300, "--users", 50)
    assert "20,000 rows" in out
    own = SyntheticSource(SyntheticConfig(rows=20_000, eval_rows=500, test_rows=300, users=50), split="eval", batch_size=500)
    read = source_of(tmp_path / "log" / "config.toml", "eval", batch_size=500)
    a, b = next(iter(own)), next(iter(read))
    assert torch.equal(a.sample_ids, b.sample_ids)
    assert torch.equal(a.sparse.values, b.sparse.values)
    assert torch.allclose(a.dense, b.dense, rtol=1e-5, atol=1e-5)
    assert torch.equal(a.labels, b.labels)
    assert torch.equal(a.label_mask, b.label_mask)
    assert torch.equal(a.timestamps, b.timestamps)
    assert torch.equal(a.sequences["history"].timestamps, b.sequences["history"].timestamps)
    for name in ("item", "category", "action"):
        assert torch.equal(a.sequences["history"].fields[name], b.sequences["history"].fields[name])
    assert torch.equal(a.columns["true_probability.ctr"], b.columns["true_probability.ctr"])
    assert load_config(tmp_path / "log" / "config.toml").model.preset == "tiny"
    lengths = json.loads((tmp_path / "log" / "lengths.json").read_text())
    assert lengths["law"]["law"] == "lognormal"
    stored = a.sequences["history"].lengths.float()
    assert (lengths["eval"]["n"], lengths["eval"]["max"]) == (500, int(stored.max()))
    assert lengths["eval"]["mean"] == pytest.approx(stored.mean().item())
    assert sum(lengths["train"]["counts"].values()) == 20_000


def test_synth_again_gives_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        gemrec("synth", "--out", tmp_path / name, "--rows", 300, "--law", "zipf", "--max-history", 20)
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b")
    gemrec("synth", "--out", tmp_path / "c", "--rows", 300, "--law", "zipf", "--max-history", 20, "--seed", 8)
    assert bytes_of(tmp_path / "a")["train.parquet"] != bytes_of(tmp_path / "c")["train.parquet"]


def test_files_of_others_are_never_written_over(tmp_path):
    """Neither a log that is there under a name of ours, nor a configuration that was edited."""
    logs = tmp_path / "logs"
    logs.mkdir()
    pq.write_table(pa.table({"mine": [1]}), logs / "train.parquet")
    for words in (["synth", "--rows", 50], ["synth", "--rows", 50, "--partitions", 2], ["convert", "movielens", logs]):
        with pytest.raises(DataError, match="would be written over: train"):
            gemrec(*words, "--out", logs)
    assert pq.read_table(logs / "train.parquet").to_pydict() == {"mine": [1]}
    gemrec("synth", "--rows", 50, "--out", tmp_path / "ours")
    gemrec("synth", "--rows", 50, "--partitions", 2, "--out", tmp_path / "ours")
    config = tmp_path / "ours" / "config.toml"
    edited = config.read_text() + "\n[train]\nsteps = 3\n"
    config.write_text(edited)
    with pytest.raises(DataError, match="was edited"):
        gemrec("synth", "--rows", 60, "--out", tmp_path / "ours")
    assert config.read_text() == edited


KILLED = """
import os, sys
from gem_data import synth
from gem_core.sources.synthetic import SyntheticConfig
from gem_data.writer import unfinished
from pathlib import Path

real = synth.write_parquet
def write_parquet(path, *rest):
    done = real(path, *rest)
    (path.parent / f".test.parquet.{os.getpid()}.part").write_bytes(b"half")
    print(path.name, flush=True)
    sys.stdin.read()
    return done
synth.write_parquet = write_parquet
with unfinished(Path(sys.argv[1])):
    synth.write_synthetic(Path(sys.argv[1]), SyntheticConfig(rows=50, eval_rows=5, test_rows=5))
"""


def test_a_killed_command_can_be_run_again(tmp_path, caplog):
    """Its folder says of itself that it is not complete, is read by nobody, and is no one else's."""
    out, whole = tmp_path / "log", tmp_path / "whole"
    command = ["synth", "--rows", 50, "--eval-rows", 5, "--test-rows", 5]
    process = subprocess.Popen([sys.executable, "-c", KILLED, out], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "train.parquet\n"
        with pytest.raises(DataError, match="another process writes into the folder: gemrec"):
            gemrec(*command, "--out", out)
    finally:
        process.kill()
        process.communicate()
    assert (out / "train.parquet").is_file()
    with pytest.raises(DataError, match=r"(?s)not complete: the command that writes them was stopped.*run it again.*gemrec"):
        ParquetSource(out / "train.parquet", Features(sample_id="sample_id"), batch_size=5)
    gemrec(*command, "--out", out)
    assert "what gemrec" in caplog.text
    assert "is not complete; all is written anew" in caplog.text
    gemrec(*command, "--out", whole)
    assert bytes_of(out) == bytes_of(whole)


def test_a_command_that_fails_leaves_nothing_in_its_way(tmp_path):
    text = "\t".join(["1", *["2"] * 13, *["0000abcd"] * 26]) + "\n"
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "train.txt").write_text(text)
    (logs / "valid.txt").write_text(text + "broken\n")
    with pytest.raises(DataError, match="valid"):
        gemrec("convert", "criteo", logs, "--out", tmp_path / "out")
    with pytest.raises(DataError, match="not complete"):
        ParquetSource(tmp_path / "out" / "train.parquet", Features(labels={"label": Label()}), batch_size=5)
    (logs / "valid.txt").write_text(text)
    gemrec("convert", "criteo", logs, "--out", tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"train.parquet", "valid.parquet", "config.toml"}
    with pytest.raises(DataError):
        gemrec("convert", "criteo", tmp_path / "nothing", "--out", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_partitions_of_a_folder_that_is_not_complete_are_not_read(tmp_path):
    gemrec("synth", "--rows", 60, "--partitions", 3, "--out", tmp_path)
    assert len(find_files(f"{tmp_path}/")) == 3
    (tmp_path / UNFINISHED).write_text("gemrec data synth\n")
    for path in (tmp_path, f"{tmp_path}/"):
        with pytest.raises(DataError, match="not complete"):
            find_files(path)


def test_a_command_that_fails_before_it_writes_leaves_data_complete(tmp_path):
    """A mistyped input does not make unreadable what an earlier command wrote there."""
    out, sizes = tmp_path / "log", ["--rows", 50, "--eval-rows", 5, "--test-rows", 5]
    gemrec("synth", *sizes, "--out", out)
    before = bytes_of(out)
    with pytest.raises(DataError, match="no Criteo file"):
        gemrec("convert", "criteo", tmp_path / "nothing", "--out", out)
    assert bytes_of(out) == before
    assert not (out / UNFINISHED).exists()
    (out / UNFINISHED).write_text("gemrec data synth\n")  # it was killed in an earlier run: still not complete
    with pytest.raises(DataError, match="no Criteo file"):
        gemrec("convert", "criteo", tmp_path / "nothing", "--out", out)
    assert (out / UNFINISHED).exists()


def test_synth_refuses_an_unknown_law(tmp_path):
    with pytest.raises(ConfigError, match="no law 'normal'"):
        gemrec("synth", "--out", tmp_path, "--law", "normal")


def test_help_has_an_example():
    for command in ("inspect", "convert", "synth"):
        assert "Example: gemrec data" in gemrec(command, "--help").replace("\n", " ")


# --- inspect --------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def log(tmp_path):
    """A log of a made-up user: names, types and quirks as they come."""
    rng = np.random.default_rng(0)
    n = 600
    k = rng.integers(0, 8, n)
    histories = [rng.integers(1, 90, c).tolist() for c in k]
    table = pa.table(
        {
            "impression_id": [f"i{i}" for i in range(n)],
            "user_id": rng.integers(10**12, 10**13, n),
            "item_id": rng.integers(0, 90, n),
            "device": rng.choice(["ios", "android"], n),
            "price": pa.array([None if rng.random() < 0.1 else float(x) for x in rng.exponential(30, n)]),
            "balance": rng.normal(-3, 2, n),
            "title": [f"A rather long title of item number {i}, in words" for i in range(n)],
            "constant": np.ones(n, dtype=np.int8),
            "embedding": pa.array(rng.normal(0, 1, (n, 4)).tolist(), pa.list_(pa.float32())),
            "tags": [rng.integers(0, 12, 2 + i % 3).tolist() for i in range(n)],
            "hist_item_ids": pa.array(histories, pa.list_(pa.int64())),
            "hist_dwell": pa.array([rng.exponential(3, c).tolist() for c in k], pa.list_(pa.float64())),
            "hist_time": pa.array([np.sort(rng.integers(1.6e12, 1.7e12, c)).tolist() for c in k], pa.list_(pa.int64())),
            "event_time": pa.array(np.sort(rng.integers(1_700_000_000, 1_700_100_000, n)) * 1000, pa.timestamp("ms")),
            "click": (rng.random(n) < 0.3).astype(np.int8),
            "conversion": (rng.random(n) < 0.1).astype(np.int8),
            "split": rng.integers(0, 2, n),
        }
    )
    pq.write_table(table, tmp_path / "day.parquet", row_group_size=100)
    return tmp_path / "day.parquet"


def test_inspect_proposes_what_works_as_it_is(log, tmp_path):
    text = gemrec("inspect", log)
    (tmp_path / "mine.toml").write_text(text)
    features = load_config(tmp_path / "mine.toml").features
    assert features.sample_id == "impression_id"
    assert features.timestamp == "event_time"
    assert features.columns == ("user_id",)
    assert set(features.dense) == {"price", "balance"}
    assert features.dense["price"].default is not None
    assert set(features.sparse) == {"user_id", "item_id", "device", "tags"}
    assert features.sparse["user_id"].hash
    assert features.vectors["embedding"].dim == 4
    history = features.sequences["history"]
    assert history.timestamps == "hist_time"
    assert history.time_unit == "ms"
    assert history.fields["item"].table == features.sparse["item_id"].table == "item"
    assert history.fields["dwell"].kind == "float"
    assert history.target == {"item": "item_id"}
    assert features.labels["ctr"].column == "click"
    assert features.labels["cvr"].mask == "click"
    for left in ("title: free text", "constant: holds one value", "split: looks like a split"):
        assert f"# left out: {left}" in text
    train, held = source_of(text, "train"), source_of(text, "eval")
    assert train.rows + held.rows == 600
    assert 50 <= held.rows <= 70
    for source in (train, held):
        for batch in source:
            batch.validate()
    assert max(int(b.timestamps.max()) for b in train) <= min(int(b.timestamps.min()) for b in held)


def test_inspect_of_the_synthetic_log_carries_the_truth_along(tmp_path):
    gemrec("synth", "--out", tmp_path, "--rows", 2000, "--users", 100)
    text = gemrec("inspect", tmp_path)
    assert tomllib.loads(text)["eval"] == {"group": "user_id"}
    proposed = tomllib.loads(text)["features"]
    assert "true_probability.ctr" in proposed["columns"]
    assert not any(name.startswith("true_probability") for name in proposed.get("dense", {}))
    assert proposed["sequences"]["history"]["target"] == {"item": "item", "category": "category"}
    assert len(ids_of(source_of(text, "test"))) == 200


def test_inspect_graded_labels_and_label_option(tmp_path):
    pq.write_table(pa.table({"user_id": [1, 2, 3, 4], "rating": [1, 5, 4, 2], "opened": [0, 1, 1, 0]}), tmp_path / "a.parquet")
    assert tomllib.loads(propose(tmp_path / "a.parquet"))["features"]["labels"] == {"ctr": {"column": "rating", "threshold": 3.0}}
    assert tomllib.loads(propose(tmp_path / "a.parquet", label="opened"))["features"]["labels"] == {"ctr": {"column": "opened"}}
    with pytest.raises(DataError, match="--label must be one of"):
        propose(tmp_path / "a.parquet", label="nothing")
    pq.write_table(pa.table({"x": [1.5, 2.5]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match="no column looks like a label"):
        propose(tmp_path / "b.parquet")


def inspected(folder, *tables):
    """The proposal for files of these tables, read whole by the source that it configures."""
    for i, table in enumerate(tables):
        pq.write_table(table if isinstance(table, pa.Table) else pa.table(table), folder / f"{i}.parquet")
    text = propose(folder)
    assert sum(len(b) for b in source_of(text)) == sum(pq.read_metadata(path).num_rows for path in folder.glob("*.parquet"))
    return text, tomllib.loads(text)["features"]


def test_inspect_leaves_out_columns_without_a_value(tmp_path):
    empty = {"tags": pa.array([[], []], pa.list_(pa.int64())), "seen": pa.array([[], []], pa.list_(pa.int64())), "n": [None, None]}
    text, features = inspected(
        tmp_path, {"item_id": [1, 2], "hist_ids": pa.array([None, []], pa.list_(pa.int64())), **empty, "click": [0, 1]}
    )
    assert set(features["sparse"]) == {"item_id"}
    assert "sequences" not in features
    assert text.count(": holds no value\n") == 3
    assert "# left out: n: type null" in text


def test_inspect_hashes_integers_that_are_hashes(tmp_path):
    unsigned = pa.array([2**64 - 1 - i for i in range(50)], pa.uint64())
    signed = [(-1) ** i * (2**60 + i) for i in range(50)]
    _, features = inspected(tmp_path, {"u": unsigned, "s": signed, "click": [0, 1] * 25})
    assert {name: spec["hash"] for name, spec in features["sparse"].items()} == {"u": True, "s": True}


def test_inspect_keeps_events_whose_columns_differ_in_what_marks_an_id(tmp_path):
    table = {"h_item": [[1], [2, 3]], "h_item_id": [[4], [5, 6]], "item": [1, 2], "x": [0.5, 0.7], "click": [0, 1]}
    _, features = inspected(tmp_path, table)
    assert {f["column"] for f in features["sequences"]["history"]["fields"].values()} == {"h_item", "h_item_id"}


def test_inspect_clips_infinite_numbers(tmp_path):
    x = [float(i) for i in range(38)] + [math.inf, -math.inf]
    lists = {"v": [[v] for v in x], "h": [[v] * (1 + i % 2) for i, v in enumerate(x)], "h_id": [[i] * (1 + i % 2) for i in range(40)]}
    text, features = inspected(tmp_path, {"x": x, "none": [math.inf, -math.inf] * 20, **lists, "click": [0, 1] * 20})
    assert "# left out: none: holds no finite number" in text
    assert features["dense"]["x"]["clip"] == [0.0, 37.0]
    (field,) = (f for f in features["sequences"]["history"]["fields"].values() if f["column"] == "h")
    assert field["clip"] == [0.0, 37.0]
    assert "# left out: v: holds infinite numbers" in text


@pytest.mark.parametrize("sample_rows", [4, 1000])
def test_inspect_tells_of_folders_of_numbers_and_text(tmp_path, sample_rows):
    for value in (*range(5), "none"):
        (tmp_path / f"c={value}").mkdir()
        pq.write_table(pa.table({"x": [0.5, 0.7], "click": [0, 1]}), tmp_path / f"c={value}" / "a.parquet")
    with pytest.raises(DataError, match=r"(?s)'c' has the type int64.*string in another file.*c=none"):
        propose(tmp_path, sample_rows=sample_rows)
    (tmp_path / "c=none").rename(tmp_path / "c=9")
    assert "rows = 10\n" in propose(tmp_path, sample_rows=sample_rows)


def test_inspect_reads_files_of_other_types(tmp_path):
    """Widths of numbers and text, and columns that are empty in one file, differ between writers."""
    one = {"a": pa.array([1, 2], pa.int32()), "t": pa.array(["x", "y"]), "f": pa.array([1, 2]), "n": pa.nulls(2), "click": [0, 1]}
    two = {"a": pa.array([3, 4]), "t": pa.array(["x", "z"], pa.large_string()), "f": pa.array([1.5, 2.5]), "n": [7, 8], "click": [0, 1]}
    lists = [pa.array([[1], [2]], pa.list_(kind)) for kind in (pa.int32(), pa.int64())]
    _, features = inspected(tmp_path, {**one, "tags": lists[0]}, {**two, "tags": lists[1]})
    assert set(features["sparse"]) == {"a", "t", "n", "tags"}
    assert set(features["dense"]) == {"f"}


@pytest.mark.parametrize("same", [2, 3])
def test_inspect_of_rows_of_one_time_leaves_some_to_train_on(tmp_path, same):
    text, _ = inspected(tmp_path, {"time": [1_700_000_000] * same, "x": list(range(same)), "y": [0.5] * same, "click": [1] * same})
    assert "train_filter" not in text


@pytest.mark.parametrize(
    ("table", "label", "words"),
    [
        ({"x": pa.array([], pa.int64()), "click": pa.array([], pa.int64())}, None, "the files hold no rows"),
        ({"x": [[1], [2]], "click": [0, 1]}, "x", "a label is one number a row"),
        ({"x": ["no", "yes"]}, "x", "the type string, a label is one number a row"),
        (pa.table([[1], [2], [0]], names=["x", "x", "click"]), None, "2 columns have the name 'x'"),
        ([{"x": [1], "click": [0]}, {"x": ["a"], "click": [0]}], None, "the type int64 in .*0.parquet and string in another file"),
        ([{"x": [1], "click": [0]}, {"click": [0]}], None, "'x' is missing"),
    ],
)
def test_inspect_tells_what_it_cannot_use(tmp_path, table, label, words):
    for i, one in enumerate(table if isinstance(table, list) else [table]):
        pq.write_table(one if isinstance(one, pa.Table) else pa.table(one), tmp_path / f"{i}.parquet")
    with pytest.raises(DataError, match=words) as error:
        propose(tmp_path, label=label)
    assert error.value.where
    assert error.value.fix


def test_inspect_ranges_cover_rows_outside_the_sample(tmp_path):
    """The largest id is in a row group that the sample does not touch, once with statistics and once without."""
    for statistics in (True, False):
        ids = np.arange(3000) % 50
        ids[1500] = 777
        pq.write_table(
            pa.table({"item_id": ids, "label": ids % 2}), tmp_path / "a.parquet", row_group_size=100, write_statistics=statistics
        )
        text = propose(tmp_path / "a.parquet", sample_rows=200)
        assert tomllib.loads(text)["features"]["sparse"]["item_id"]["rows"] == 778
        assert sum(len(b) for b in source_of(text)) == 3000


@pytest.mark.data
@pytest.mark.parametrize("name", ["ml-1m-ctr", "ml-1m-popneg", "tiny-formats/tiny_parquet"])
def test_inspect_public_data(name):
    text = propose(data(name))
    for split in ("train", "eval", "test"):
        source = source_of(text, split, batch_size=4096)
        assert sum(len(b.validate()) for b in source) == source.rows
    if name.startswith("ml-1m"):
        history = tomllib.loads(text)["features"]["sequences"]["history"]
        assert history["target"] == {"item": "item_id"}
        assert history.get("drop_first", 0) == (1 if name == "ml-1m-ctr" else 0)


# --- convert --------------------------------------------------------------------------------------------------------------------------

MOVIES = {
    1: ("Toy Story (1995)", "Animation|Children's"),
    2: ("Cité des enfants perdus, La (1995)", "Sci-Fi"),
    7: ("X: Part 2", "Drama|Sci-Fi"),
}


@pytest.fixture
def original(tmp_path):
    """Original :: files of 20 users, in Latin-1."""
    rng = np.random.default_rng(1)
    folder = tmp_path / "ml"
    folder.mkdir()
    ratings = []
    for user in range(1, 21):
        for _ in range(int(rng.integers(6, 30))):
            ratings.append((user, int(rng.choice([1, 2, 7])), int(rng.integers(1, 6)), int(rng.integers(9e8, 10e8))))
    rng.shuffle(ratings)
    (folder / "ratings.dat").write_text("".join("::".join(map(str, r)) + "\n" for r in ratings), encoding="latin-1")
    (folder / "users.dat").write_text(
        "".join(f"{u}::{'FM'[u % 2]}::{25 + u % 2}::{u % 5}::0{u}55-1\n" for u in range(1, 21)), encoding="latin-1"
    )
    (folder / "movies.dat").write_text("".join(f"{i}::{t}::{g}\n" for i, (t, g) in MOVIES.items()), encoding="latin-1")
    return folder, ratings


def test_convert_original_files(original, tmp_path):
    folder, ratings = original
    out = tmp_path / "out"
    gemrec("convert", "movielens", folder, "--out", out, "--max-history", 8)
    rows = [r for split in ("train", "valid", "test") for r in pq.read_table(out / f"{split}.parquet").to_pylist()]
    by_user = {u: sorted([r for r in ratings if r[0] == u], key=lambda r: r[3]) for u in range(1, 21)}
    assert len(rows) == sum(max(0, len(v) - 5) for v in by_user.values())
    assert [r["timestamp"] for r in rows] == sorted(r["timestamp"] for r in rows)
    genres = {name: i + 1 for i, name in enumerate(["Animation", "Children's", "Drama", "Sci-Fi"])}
    for r in rows:
        earlier = [x for x in by_user[r["user_id"]] if x[3] < r["timestamp"]][-8:]
        assert r["hist_item_ids"] == [x[1] for x in earlier]
        assert r["hist_ratings"] == [x[2] for x in earlier]
        assert r["hist_timestamps"] == [x[3] for x in earlier]
        assert r["label"] == int(r["rating"] >= 4)
        assert r["genre_ids"] == [genres[g] for g in MOVIES[r["item_id"]][1].split("|")]
        assert r["gender"] == r["user_id"] % 2
        assert r["zip"] == f"0{r['user_id']}55-1"
    for split in ("train", "eval", "test"):
        for batch in source_of(out / "config.toml", split):
            batch.validate()
    load_config(out / "config.toml")


def test_convert_again_gives_the_same_bytes(original, tmp_path):
    for name in ("a", "b"):
        gemrec("convert", "movielens", original[0], "--out", tmp_path / name)
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b")


def test_convert_damaged_ratings(original, tmp_path):
    with open(original[0] / "ratings.dat", "a") as file:
        file.write("1::2::five::3\n")
    with pytest.raises(DataError, match=r"cannot be read.*five"):
        movielens.convert(original[0], tmp_path / "out")


def test_convert_unknown_form_and_folder(tmp_path):
    with pytest.raises(ConfigError, match="no converter for 'netflix'"):
        gemrec("convert", "netflix", tmp_path, "--out", tmp_path / "out")
    with pytest.raises(DataError, match="no MovieLens data"):
        gemrec("convert", "movielens", tmp_path, "--out", tmp_path / "out")


@pytest.mark.data
def test_convert_sequences(tmp_path):
    """Against the sequences: next items, prefixes, unseen negatives, positions; twice the same bytes."""
    for name in ("a", "b"):
        movielens.convert(data("ml-1m"), tmp_path / name)
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b")
    users = {
        r["user_id"]: r["item_ids"]
        for r in pq.read_table(data("ml-1m") / "ml1m_sequences.parquet", columns=["user_id", "item_ids"]).to_pylist()
    }
    for split, limit in (("train", None), ("valid", 2), ("test", 1)):
        table = pq.read_table(tmp_path / "a" / f"{split}.parquet")
        assert table.num_rows == (120_800 if split == "train" else 12_080)
        for r in table.slice(0, 400).to_pylist() + table.slice(table.num_rows - 400).to_pylist():
            items = users[r["user_id"]]
            assert r["hist_item_ids"] == items[: r["position"]]
            assert r["position"] == len(items) - limit if limit else 5 <= r["position"] < len(items) - 2
            assert (r["item_id"] == items[r["position"]]) if r["label"] else (r["item_id"] not in items)
    train = pq.read_table(tmp_path / "a" / "train.parquet", columns=["user_id", "position"]).to_pylist()
    assert len({(r["user_id"], r["position"]) for r in train}) == 60_400, "positions of a user are different ones"
    source = source_of(tmp_path / "a" / "config.toml", "test", batch_size=4096)
    assert sum(len(b.validate()) for b in source) == 12_080


@pytest.mark.data
def test_convert_ctr_forms(tmp_path):
    movielens.convert(data("ml-1m-ctr"), tmp_path / "ctr")
    before, after = (pq.read_table(p / "valid.parquet") for p in (data("ml-1m-ctr"), tmp_path / "ctr"))
    assert [h[1:] for h in before["hist_item_ids"].to_pylist()] == after["hist_item_ids"].to_pylist()
    assert before.drop_columns("hist_item_ids").to_pydict() == after.drop_columns("hist_item_ids").to_pydict()
    movielens.convert(data("ml-1m-popneg"), tmp_path / "popneg")
    before, after = (pq.read_table(p / "valid.parquet") for p in (data("ml-1m-popneg"), tmp_path / "popneg"))
    assert before["hist_item_ids"].to_pylist() == after["hist_item_ids"].to_pylist()
    assert [int(g == "M") for g in before["gender"].to_pylist()] == after["gender"].to_pylist()
    for name in ("ctr", "popneg"):
        source = source_of(tmp_path / name / "config.toml", "eval", batch_size=4096)
        assert sum(len(b.validate()) for b in source) == source.rows


@pytest.mark.data
def test_original_movies_and_users_are_latin_1():
    movies = movielens._movies(data("ml-1m") / "movies.dat")
    assert movies.num_rows == 3883
    assert "City of Lost Children, The (1995)" in movies["title"].to_pylist()
    assert any("é" in t for t in movies["title"].to_pylist())
    assert movielens._users(data("ml-1m") / "users.dat").num_rows == 6040


@pytest.mark.data
def test_reader_on_the_distributed_files():
    """Every history of the CTR form as pyarrow gives it, pad dropped, newest 20 kept."""
    folder = data("ml-1m-ctr")
    features = Features.model_validate(
        {
            "tables": {"item": {"rows": 4000}},
            "sparse": {"item_id": {"table": "item"}},
            "sequences": {"h": {"fields": {"item": {"column": "hist_item_ids", "table": "item"}}, "drop_first": 1, "max_length": 20}},
            "labels": {"ctr": {"column": "label"}},
        }
    )
    want = [h[1:][-20:] for h in pq.read_table(folder / "test.parquet", columns=["hist_item_ids"])["hist_item_ids"].to_pylist()]
    got = [
        h.tolist()
        for b in ParquetSource(folder / "test.parquet", features, batch_size=512)
        for h in b.sequences["h"].jagged("item").to_list()
    ]
    assert got == want


# --- example configurations -----------------------------------------------------------------------------------------------------------

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples" / "configs"


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "folder"),
    [("ml-1m-popneg-gem", "ml-1m-popneg"), ("ml-1m-popneg-din", "ml-1m-popneg"), ("movielens-ctr", "ml-1m-ctr")],
)
def test_example_configurations_read_the_public_data(name, folder):
    config = load_config(EXAMPLES / f"{name}.toml", [f"data.parquet.root={data(folder)}"])
    for split in ("train", "eval", "test"):
        source = SPEC.build(source_config(config), config.features, split=split, batch_size=4096)
        assert sum(len(b.validate()) for b in source) == source.rows
