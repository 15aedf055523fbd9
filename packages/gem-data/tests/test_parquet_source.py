"""The Parquet source: conformance, and every declaration of [features] against a slow row-by-row oracle."""

from __future__ import annotations

import math
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import gem_core
from gem_core.config import config_from_dict
from gem_core.config.features import Dense, EventField, Features, Label, Sequence, Sparse, Table, Vector
from gem_core.errors import ConfigError, DataError, RunError
from gem_core.sources.hashing import hash_bytes, hash_integers, salt_of
from gem_core.testing.sources import assert_same_batch, ids_of, source_checks
from gem_data import ParquetSource
from gem_data.spec import SPEC, ParquetConfig

FEATURES = Features(
    sample_id="id",
    timestamp="when",
    weight="w",
    columns=("user", "country"),
    tables={"item": Table(rows=50)},
    dense={
        "price": Dense(transform="log1p", mean=1.0, std=2.0, clip=(0.0, 100.0)),
        "age": Dense(default=30.0),
    },
    vectors={"text": Vector(dim=3)},
    sparse={
        "item": Sparse(table="item"),
        "country": Sparse(rows=1000, hash=True),
        "tags": Sparse(rows=20, pooling="mean", max_length=3, weights="tag_weights"),
    },
    sequences={
        "history": Sequence(
            fields={
                "item": EventField(column="h_item", table="item"),
                "dwell": EventField(column="h_dwell", kind="float", transform="log1p", std=2.0),
                "topics": EventField(column="h_topics", rows=9),
                "embedding": EventField(column="h_embedding", kind="vector", dim=2),
            },
            timestamps="h_time",
            max_length=6,
            drop_first=1,
        )
    },
    labels={"ctr": Label(column="click"), "cvr": Label(column="buy", mask="click"), "liked": Label(column="stars", threshold=4.0)},
)


def rows(n, seed=0, start=0):
    """Plain Python rows, so that the oracle shares nothing with the reader."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(n):
        k = int(rng.integers(0, 12))
        tags = rng.integers(0, 20, int(rng.integers(0, 6))).tolist()
        click = bool(rng.random() < 0.4)
        found.append(
            {
                "id": start + i,
                "user": int(rng.integers(0, 9)),
                "when": 1_700_000_000 + int(rng.integers(0, 1000)),
                "w": float(np.float32(rng.random() + 0.5)),
                "price": float(rng.normal(20, 60)),
                "age": None if rng.random() < 0.2 else float(rng.integers(10, 80)),
                "text": rng.normal(0, 1, 3).tolist(),
                "item": int(rng.integers(0, 50)),
                "country": ["DE", "FR", "日本", ""][int(rng.integers(0, 4))],
                "tags": tags,
                "tag_weights": rng.random(len(tags)).tolist(),
                "h_item": rng.integers(0, 50, k).tolist(),
                "h_dwell": rng.exponential(5, k).tolist(),
                "h_topics": [rng.integers(0, 9, int(rng.integers(0, 4))).tolist() for _ in range(k)],
                "h_embedding": [rng.normal(0, 1, 2).tolist() for _ in range(k)],
                "h_time": sorted(rng.integers(0, 10**6, k).tolist()),
                "click": click,
                "buy": int(rng.random() < 0.5) if click else None,
                "stars": int(rng.integers(1, 6)),
            }
        )
    return found


SCHEMA = pa.schema(
    {
        "id": pa.int64(), "user": pa.int32(), "when": pa.timestamp("ms"), "w": pa.float32(), "price": pa.float64(), "age": pa.float32(),
        "text": pa.list_(pa.float32()), "item": pa.int16(), "country": pa.string(), "tags": pa.list_(pa.uint8()),
        "tag_weights": pa.list_(pa.float64()), "h_item": pa.list_(pa.int32()), "h_dwell": pa.list_(pa.float32()),
        "h_topics": pa.list_(pa.list_(pa.int8())), "h_embedding": pa.list_(pa.list_(pa.float32(), 2)), "h_time": pa.list_(pa.int64()),
        "click": pa.bool_(), "buy": pa.int8(), "stars": pa.int32(),
    }
)  # fmt: skip


def write(path, data, schema=SCHEMA, **how):
    shown = [{**r, "when": r["when"] * 1000} if "when" in r and "when" in schema.names else r for r in data]
    pq.write_table(pa.Table.from_pylist(shown, schema), path, **{"row_group_size": 17, **how})
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Train: three files with unequal row groups, one file empty; eval and test: one each."""
    base = tmp_path_factory.mktemp("log")
    for split in ("train", "eval", "test"):
        (base / split).mkdir()
    data = rows(150)
    write(base / "train" / "a.parquet", data[:61])
    write(base / "train" / "b.parquet", [])
    write(base / "train" / "c.parquet", data[61:66], row_group_size=2)
    write(base / "train" / "d.parquet", data[66:], row_group_size=40)
    write(base / "eval" / "a.parquet", rows(33, 1, 1000))
    write(base / "test" / "a.parquet", rows(21, 2, 2000))
    return base


def build(folder, features=FEATURES, **how):
    options = {k: how.pop(k) for k in ("window", "prefetch") if k in how}
    config = ParquetConfig(root=str(folder), train="train", eval="eval", test="test", **{"window": 30, **options})
    return SPEC.build(config, features, **{"split": "train", "batch_size": 16, **how})


@pytest.mark.parametrize("check", source_checks(FEATURES), ids=lambda c: c.__name__)
def test_conformance(check, folder):
    check(lambda **how: build(folder, prefetch=0, **how))


@pytest.mark.parametrize(
    "check", [c for c in source_checks() if any(w in c.__name__ for w in ("resum", "abandoned", "ahead"))], ids=lambda c: c.__name__
)
def test_conformance_with_threads(check, folder):
    check(lambda **how: build(folder, prefetch=3, **how))


def test_no_thread_is_left_behind(folder):
    before = threading.active_count()
    iterator = iter(build(folder, prefetch=2))
    next(iterator)
    assert threading.active_count() > before
    iterator.close()
    assert threading.active_count() == before


# --- the oracle: one row at a time, in plain Python -------------------------------------------------------------------------------------


def expected(row):
    """What the declaration above makes of one row."""
    price = (math.log1p(min(max(row["price"], 0.0), 100.0)) - 1.0) / 2.0
    age = 30.0 if row["age"] is None else row["age"]
    code = row["country"].encode()
    hashed = int(hash_bytes(np.frombuffer(code, np.uint8), np.array([0, len(code)]), salt_of("sparse.country"))[0])
    country = int(hash_bytes(np.frombuffer(code, np.uint8), np.array([0, len(code)]), 0).view(np.int64)[0])
    events = slice(max(1, len(row["h_item"]) - 6), None)
    return {
        "dense": [price, age],
        "text": row["text"],
        "item": [row["item"]],
        "country": [hashed % 1000],
        "tags": row["tags"][-3:],
        "tag_weights": row["tag_weights"][-3:],
        "h_item": row["h_item"][events],
        "h_dwell": [math.log1p(d) / 2.0 for d in row["h_dwell"][events]],
        "h_topics": row["h_topics"][events],
        "h_embedding": row["h_embedding"][events],
        "h_time": row["h_time"][events],
        "labels": [float(row["click"]), float(row["buy"] or 0), float(row["stars"] >= 4)],
        "mask": [True, bool(row["click"]), True],
        "weight": row["w"],
        "when": row["when"],
        "columns": [row["user"], country],
    }


def unpacked(batch):
    """The same, taken out of a batch sample by sample."""
    history = batch.sequences["history"]
    found = []
    for b in range(len(batch)):
        one = batch.select_range(b, b + 1)
        group = one.sequences["history"]
        assert torch.equal(group.lengths, history.lengths[b : b + 1])
        found.append(
            {
                "dense": one.dense[0].tolist(),
                "text": one.vectors["text"][0].tolist(),
                **{name: one.sparse[name].values.tolist() for name in ("item", "country", "tags")},
                "tag_weights": one.sparse.jagged("tags", one.sparse.weights).values.tolist(),
                "h_item": group.fields["item"].tolist(),
                "h_dwell": group.fields["dwell"].tolist(),
                "h_topics": [t.tolist() for t in group.fields["topics"].to_list()],
                "h_embedding": group.fields["embedding"].tolist(),
                "h_time": group.timestamps.tolist(),
                "labels": one.labels[0].tolist(),
                "mask": one.label_mask[0].tolist(),
                "weight": float(one.weights[0]),
                "when": int(one.timestamps[0]),
                "columns": [int(one.columns["user"][0]), int(one.columns["country"][0])],
            }
        )
    return found


@pytest.mark.parametrize("shuffle", [False, True])
def test_every_declaration_against_the_oracle(folder, shuffle):
    data = {r["id"]: r for r in rows(150)}
    source = ParquetSource(str(folder / "train"), FEATURES, batch_size=13, shuffle=shuffle, window=30)
    seen = 0
    for batch in source:
        batch.validate()
        for sample, got in zip(batch.sample_ids.tolist(), unpacked(batch)):
            want = expected(data[sample])
            assert got.keys() == want.keys()
            for key, value in want.items():
                nested = key in ("h_topics", "h_embedding")
                assert [len(v) for v in got[key]] == [len(v) for v in value] if nested else True, key
                flat = [x for v in value for x in v] if nested else value
                assert ([x for v in got[key] for x in v] if nested else got[key]) == pytest.approx(flat, rel=2e-6, abs=1e-6), key
            seen += 1
    assert seen == 150


def test_dtypes_are_those_of_the_contract(folder):
    batch = next(iter(build(folder)))
    group = batch.sequences["history"]
    assert batch.dense.dtype == batch.vectors["text"].dtype == batch.labels.dtype == batch.weights.dtype == torch.float32
    assert batch.sparse.values.dtype == batch.sparse.lengths.dtype == group.offsets.dtype == group.timestamps.dtype == torch.int64
    assert group.fields["dwell"].dtype == torch.float32
    assert batch.label_mask.dtype == torch.bool
    assert batch.sparse.weights.dtype == torch.float32


def test_order_of_files_is_kept_without_shuffle(folder):
    assert ids_of(ParquetSource(str(folder / "train"), FEATURES, batch_size=7)) == list(range(150))


def test_more_ranks_than_row_groups(folder):
    parts = [ids_of(build(folder, split="eval", shard=(r, 13), batch_size=2)) for r in range(13)]
    assert sorted(i for p in parts for i in p) == list(range(1000, 1033))


def test_shuffle_reaches_over_row_groups_of_a_window(folder):
    """With a window over everything, the first batch draws from all over the files."""
    first = next(iter(build(folder, window=10_000)))
    assert first.sample_ids.max() - first.sample_ids.min() > 75
    assert len(set((first.sample_ids // 17).tolist())) > 4


def test_paths_patterns_and_hive_folders(tmp_path):
    features = Features(sample_id="id", sparse={"day": Sparse(rows=40), "kind": Sparse(rows=100, hash=True)}, labels={"click": Label()})
    schema = pa.schema({"id": pa.int64(), "click": pa.bool_()})
    for day in (1, 2, 10):
        place = tmp_path / f"kind=web/day={day}"
        place.mkdir(parents=True)
        write(place / "part.parquet", [{"id": day * 10 + i, "click": True} for i in range(3)], schema)
    (tmp_path / "_temporary").mkdir()
    write(tmp_path / "_temporary" / "x.parquet", [{"id": 99, "click": True}], schema)
    (tmp_path / "kind=web/day=1/notes.txt").write_text("not data")
    source = ParquetSource(str(tmp_path), features, batch_size=100)
    batch = next(iter(source))
    assert batch.sparse["day"].values.tolist() == [1] * 3 + [10] * 3 + [2] * 3
    assert batch.sample_ids.tolist() == [10, 11, 12, 100, 101, 102, 20, 21, 22]
    filtered = ParquetSource(str(tmp_path), features, batch_size=100, filter="day >= 2 and kind == 'web'")
    assert ids_of(filtered) == [100, 101, 102, 20, 21, 22]
    pattern = ParquetSource(
        [str(tmp_path / "kind=web/day=1*/*.parquet")], Features(sample_id="id", labels={"click": Label()}), batch_size=9
    )
    assert ids_of(pattern) == [10, 11, 12, 100, 101, 102]
    url = ParquetSource(f"file://{tmp_path}/kind=web/day=2", Features(sample_id="id", labels={"click": Label()}), batch_size=9)
    assert ids_of(url) == [20, 21, 22]


def test_fsspec_urls(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    local = write(tmp_path / "a.parquet", [{"id": i, "click": True} for i in range(5)], pa.schema({"id": pa.int64(), "click": pa.bool_()}))
    with open(local, "rb") as source, memory.open("/bucket/logs/a.parquet", "wb") as target:
        target.write(source.read())
    features = Features(sample_id="id", labels={"click": Label()})
    assert ids_of(ParquetSource("memory://bucket/logs", features, batch_size=2)) == [0, 1, 2, 3, 4]
    with pytest.raises(DataError, match="no such file"):
        ParquetSource("memory://bucket/nothing", features, batch_size=2)


def test_history_as_a_list_of_structs(tmp_path):
    kind = pa.list_(pa.struct({"item": pa.int32(), "at": pa.int64(), "unread": pa.string()}))
    data = [{"events": [{"item": 3, "at": 1, "unread": "x"}, {"item": 4, "at": 2, "unread": "y"}]}, {"events": []}, {"events": None}]
    path = write(tmp_path / "a.parquet", data, pa.schema({"events": kind}))
    features = Features(sequences={"h": Sequence(fields={"item": EventField(column="events.item", rows=9)}, timestamps="events.at")})
    group = next(iter(ParquetSource(path, features, batch_size=4))).sequences["h"]
    assert group.fields["item"].tolist() == [3, 4]
    assert group.timestamps.tolist() == [1, 2]
    assert group.lengths.tolist() == [2, 0, 0]


def test_a_schema_with_metadata(tmp_path):
    """As pandas writes it."""
    pq.write_table(pa.table({"x": [1, 2], "y": [0, 1]}).replace_schema_metadata({"pandas": "{}"}), tmp_path / "f.parquet")
    (batch,) = ParquetSource(tmp_path / "f.parquet", Features(sparse={"x": Sparse(rows=9)}, labels={"y": Label()}), batch_size=2)
    assert batch.sparse["x"].values.tolist() == [1, 2]


def test_column_pruning_reads_only_what_is_declared(tmp_path, monkeypatch):
    from gem_data import files

    path = write(tmp_path / "a.parquet", rows(10))
    asked = []
    real = files.Reader.row_group
    monkeypatch.setattr(files.Reader, "row_group", lambda self, f, i, leaves: asked.append(tuple(leaves)) or real(self, f, i, leaves))
    list(ParquetSource(path, Features(sparse={"item": Sparse(rows=50)}, labels={"click": Label()}), batch_size=4, prefetch=0))
    assert asked == [("item", "click")]


def test_row_groups_without_a_match_are_not_read(folder, monkeypatch):
    """One look at the filters' columns; then only row groups with matches, with all columns."""
    from gem_data import files

    want = [r["id"] for r in rows(150) if r["stars"] >= 3 and r["country"] in ("DE", "FR") and r["id"] >= 66]
    features = FEATURES.model_copy(update={"filter": "stars >= 3 and country in ['DE', 'FR']"})
    read = []
    real = files.Reader.row_group
    monkeypatch.setattr(
        files.Reader, "row_group", lambda self, f, i, leaves: read.append((f.path, set(leaves))) or real(self, f, i, leaves)
    )
    source = ParquetSource(str(folder / "train"), features, batch_size=8, filter="id >= 66", prefetch=0)
    assert source.rows == len(want)
    assert all(leaves == {"stars", "country", "id"} for _, leaves in read)
    read.clear()
    assert ids_of(source) == want
    assert {p.rsplit("/", 1)[1] for p, _ in read} == {"d.parquet"}


@pytest.mark.parametrize(
    ("text", "keep"),
    [
        ("x == 1", [1]), ("x != 1", [0, 2]), ("1 < x", [2]), ("x <= 1", [0, 1]), ("x in [0, 2]", [0, 2]), ("x not in (0, 2)", [1]),
        ("x is None", [3]), ("x is not None and not x == 0", [1, 2]), ("name == 'b'", [1]), ("(x == 0 or x == 2) and flag", [2]),
        ("not flag", [0, 3]), ('col("spätes Ding") > 0.5', [2, 3]), ("when >= '2024-01-03'", [2, 3]), ("d == 'q'", [0]),
    ],
)  # fmt: skip
def test_filter_language(tmp_path, text, keep):
    table = pa.table(
        {
            "id": [0, 1, 2, 3],
            "x": [0, 1, 2, None],
            "name": ["a", "b", "c", "d"],
            "flag": [False, True, True, False],
            "spätes Ding": [0.0, 0.5, 1.0, 2.0],
            "when": pa.array([1704067200 + 86400 * i for i in range(4)], pa.timestamp("s")),
            "d": pa.array(["q", "r", "r", "r"]).dictionary_encode(),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    source = ParquetSource(str(tmp_path / "a.parquet"), Features(sample_id="id", sparse={"id": Sparse(rows=9)}, filter=text), batch_size=9)
    assert ids_of(source) == keep


@pytest.mark.parametrize("text", ["x +", "f(x) == 1", "x == y", "1 == 2", "x", "x < 1 < 2", "__import__('os').system('true') == 0"])
def test_filters_that_cannot_be(tmp_path, text):
    pq.write_table(pa.table({"x": [1], "y": [1]}), tmp_path / "a.parquet")
    if text == "x":
        assert (
            len(ids_of(ParquetSource(str(tmp_path / "a.parquet"), Features(sample_id="x", columns=("x",), filter="x"), batch_size=1))) == 1
        )
        return
    with pytest.raises(ConfigError, match="row filter"):
        ParquetSource(str(tmp_path / "a.parquet"), Features(columns=("x",), filter=text), batch_size=1)


INT64, FLOAT64 = pa.int64(), pa.float64()


# --- id policies, order, quarantine -------------------------------------------------------------------------------------------------------


def ids_with(tmp_path, spec, values, kind=INT64, **how):
    path = write(tmp_path / "a.parquet", [{"x": v} for v in values], pa.schema({"x": kind}))
    batches = list(ParquetSource(path, Features(sparse={"x": spec}), batch_size=100, **how))
    return batches[0].sparse["x"].values.tolist()


def test_id_policies(tmp_path):
    values = [-5, 3, 12]
    assert ids_with(tmp_path, Sparse(rows=10, policy="clip"), values) == [0, 3, 9]
    assert ids_with(tmp_path, Sparse(rows=10, policy="default", default=7), values) == [7, 3, 7]
    assert ids_with(tmp_path, Sparse(rows=10, default=7), [None, 3]) == [7, 3]
    assert ids_with(tmp_path, Sparse(rows=10, default=7), [[None, 3], None, []], pa.list_(pa.int8())) == [7, 3]
    assert ids_with(tmp_path, Sparse(rows=3), [True, False], pa.bool_()) == [1, 0]


def test_hash_is_salted_by_table_and_the_same_for_every_width(tmp_path):
    def want(salt):
        return (hash_integers(np.array([5, 2**40]), salt) % np.uint64(1000)).tolist()

    assert ids_with(tmp_path, Sparse(rows=1000, hash=True), [5, 2**40]) == want(salt_of("sparse.x"))
    assert ids_with(tmp_path, Sparse(rows=1000, hash=True, salt=3), [5, 2**40], pa.uint64()) == want(3)
    one = ids_with(tmp_path, Sparse(rows=1000, hash=True, salt=3), [5], pa.int8())
    assert one == want(3)[:1]
    text = ids_with(tmp_path, Sparse(rows=1000, hash=True), ["a", "a", "b"], pa.large_string())
    assert text[0] == text[1] != text[2]
    assert ids_with(tmp_path, Sparse(rows=1000, hash=True), [b"a", b"b"], pa.binary(1)) == [text[0], text[2]]
    assert ids_with(tmp_path, Sparse(rows=1000, hash=True), ["a", "b"], pa.dictionary(pa.int32(), pa.string())) == [text[0], text[2]]


def test_features_that_share_a_table_agree_on_the_hash(tmp_path):
    path = write(tmp_path / "a.parquet", [{"item": "x", "h": ["y", "x"]}], pa.schema({"item": pa.string(), "h": pa.list_(pa.string())}))
    features = Features(
        tables={"item": Table(rows=100_000)},
        sparse={"item": Sparse(table="item", hash=True)},
        sequences={"s": Sequence(fields={"h": EventField(table="item", hash=True)})},
    )
    batch = next(iter(ParquetSource(path, features, batch_size=1)))
    assert batch.sequences["s"].fields["h"].tolist()[1] == batch.sparse["item"].values.item()


@pytest.mark.parametrize(("order", "want"), [("sort", [1, 0, 2, 3]), ("trust", [0, 1, 2, 3])])
def test_events_out_of_order(tmp_path, order, want):
    data = [{"h": [0, 1, 2], "t": [5, 3, 5]}, {"h": [3], "t": [0]}]
    path = write(tmp_path / "a.parquet", data, pa.schema({"h": pa.list_(pa.int64()), "t": pa.list_(pa.int64())}))
    features = Features(sequences={"s": Sequence(fields={"h": EventField(rows=9)}, timestamps="t", order=order)})
    group = next(iter(ParquetSource(path, features, batch_size=2))).sequences["s"]
    assert group.fields["h"].tolist() == want
    assert group.timestamps.tolist() == ([3, 5, 5, 0] if order == "sort" else [5, 3, 5, 0])


def test_a_run_of_which_every_row_was_refused_has_failed(tmp_path):
    pq.write_table(
        pa.table({"price": pa.array([None] * 8, pa.float64()), "x": list(range(8)), "click": [0, 1] * 4}), tmp_path / "a.parquet"
    )
    files = {"root": str(tmp_path), "train": "a.parquet", "eval": "a.parquet", "quarantine": str(tmp_path / "refused")}
    config = config_from_dict(
        {
            "run": {"device": "cpu"},
            "data": {"source": "parquet", "batch_size": 4, "parquet": files},
            "features": {
                "dense": {"price": {"policy": "quarantine"}},
                "sparse": {"x": {"rows": 8}},
                "labels": {"ctr": {"column": "click"}},
            },
            "model": {"name": "dlrm"},
            "train": {"tensorboard": False},
        }
    )
    with pytest.raises(RunError, match="2 steps held no sample"):
        gem_core.train(config, run_dir=tmp_path / "run", quiet=True)
    assert sum(pq.read_metadata(path).num_rows for path in (tmp_path / "refused").glob("*.parquet")) == 8


def test_quarantine_keeps_refused_rows_with_the_reason(tmp_path):
    data = [
        {"id": i, "x": 99 if i in (3, 8) else i % 5, "h": [0, -1] if i == 5 else [1], "d": math.nan if i == 6 else 1.0} for i in range(12)
    ]
    path = write(
        tmp_path / "a.parquet",
        data,
        pa.schema({"id": pa.int64(), "x": pa.int64(), "h": pa.list_(pa.int64()), "d": pa.float64()}),
        row_group_size=5,
    )
    features = Features(
        sample_id="id",
        dense={"d": Dense(policy="quarantine")},
        sparse={"x": Sparse(rows=5, policy="quarantine")},
        sequences={"s": Sequence(fields={"h": EventField(rows=5, policy="quarantine")})},
    )
    for shuffle in (False, True):
        source = ParquetSource(path, features, batch_size=4, shuffle=shuffle, quarantine=str(tmp_path / "bad"))
        assert sorted(ids_of(source)) == [0, 1, 2, 4, 7, 9, 10, 11]
        assert source.quarantined == 4
        bad = pq.read_table(tmp_path / "bad").sort_by("_row").to_pylist()
        assert [r["_row"] for r in bad] == [r["id"] for r in bad] == [3, 5, 6, 8]
        too_large = "x: the id 99 does not fit its table of 5 rows (0 to 4)"
        assert [r["_reason"] for r in bad] == [too_large, "h: the id -1 is negative", "d: a value is null or NaN", too_large]
    with pytest.raises(ConfigError, match="quarantine"):
        ParquetSource(path, features, batch_size=4)


def test_full_disk_for_the_quarantine(tmp_path):
    """A limit on the size of files stands in for the full disk; what was there before stays as it was."""
    import resource

    values = np.random.default_rng(0).integers(5, 2**62, 20_000).tolist()
    path = write(tmp_path / "a.parquet", [{"x": v} for v in values], pa.schema({"x": INT64}), row_group_size=20_000)
    bad = tmp_path / "bad"
    source = ParquetSource(path, Features(sparse={"x": Sparse(rows=5, policy="quarantine")}), batch_size=4, quarantine=str(bad))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(DataError, match="cannot be written"):
            list(source)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(bad.iterdir()) == []
    assert sum(len(b) for b in source) == 0
    assert pq.read_table(bad).num_rows == 20_000


def test_dense_policies(tmp_path):
    def read(spec, values, kind=FLOAT64):
        path = write(tmp_path / "a.parquet", [{"x": v} for v in values], pa.schema({"x": kind}))
        return next(iter(ParquetSource(path, Features(dense={"x": spec}), batch_size=99))).dense[:, 0].tolist()

    assert read(Dense(default=2.0), [None, math.nan, 1.0]) == [2.0, 2.0, 1.0]
    assert read(Dense(policy="clip"), [math.inf, -math.inf, 1.0]) == [torch.finfo(torch.float32).max, torch.finfo(torch.float32).min, 1.0]
    assert read(Dense(policy="clip", transform="log1p"), [-3.0, 0.0]) == [0.0, 0.0]
    # what can be used stays as it is, whatever its neighbours are
    assert read(Dense(policy="clip", transform="log1p"), [-3.0, -0.5]) == [0.0, pytest.approx(math.log(0.5))]
    assert read(Dense(policy="default", default=1.0, transform="log1p"), [-3.0]) == pytest.approx([math.log(2)])
    assert read(Dense(clip=(0, 5)), [-3, 9], pa.int16()) == [0.0, 5.0]
    assert read(Dense(), [True, False], pa.bool_()) == [1.0, 0.0]
    assert read(Dense(default=0.0), [None, 1.5], pa.float32()) == [0.0, 1.5]
    from decimal import Decimal

    assert read(Dense(), [Decimal("1.25")], pa.decimal128(9, 2)) == [1.25]


def test_a_missing_number_that_is_carried_along_is_no_zero(tmp_path):
    path = write(tmp_path / "a.parquet", [{"x": 0.0}, {"x": None}, {"x": math.nan}], pa.schema({"x": FLOAT64}))
    (batch,) = ParquetSource(path, Features(columns=("x",), dense={"x": Dense(default=1.0)}), batch_size=9)
    assert batch.columns["x"].isnan().tolist() == [False, True, True]


def test_schemas_may_differ_in_order_and_width(tmp_path):
    write(tmp_path / "a.parquet", [{"x": 1, "y": [1]}], pa.schema({"x": pa.int8(), "y": pa.list_(pa.int16())}))
    write(
        tmp_path / "b.parquet", [{"x": 2, "y": [2, 3]}], pa.schema({"y": pa.large_list(pa.int64()), "x": pa.uint32(), "more": pa.string()})
    )
    batch = next(iter(ParquetSource(str(tmp_path), Features(sparse={"x": Sparse(rows=9), "y": Sparse(rows=9)}), batch_size=9)))
    assert batch.sparse["x"].values.tolist() == [1, 2]
    assert batch.sparse["y"].values.tolist() == [1, 2, 3]


def test_text_sample_ids(tmp_path):
    path = write(tmp_path / "a.parquet", [{"k": "ü", "x": 1}, {"k": "b", "x": 2}], pa.schema({"k": pa.string(), "x": pa.int8()}))
    batch = next(iter(ParquetSource(path, Features(sample_id="k", sparse={"x": Sparse(rows=9)}), batch_size=9)))
    assert batch.sample_ids == ["ü", "b"]


def test_state_of_other_files_is_refused(folder, tmp_path):
    source = build(folder)
    next(iter(source))
    state = source.state_dict()
    write(tmp_path / "x.parquet", rows(150))
    other = ParquetSource(str(tmp_path), FEATURES, batch_size=16, seed=0, shuffle=True, window=30)
    with pytest.raises(DataError, match="another reading"):
        other.load_state_dict(state)
    with pytest.raises(DataError, match="seed was 0, now it is 5"):
        build(folder, seed=5).load_state_dict(state)


def test_batches_equal_with_and_without_threads(folder):
    for a, b in zip(build(folder, prefetch=0), build(folder, prefetch=3), strict=True):
        assert_same_batch(a, b)


def test_a_hashed_column_has_one_type_in_all_files(tmp_path):
    """Numbers in one file and text in another would be two ids for one thing."""
    features = Features.model_validate({"sparse": {"user": {"hash": True, "rows": 9}, "both": {"cross": ["user", "place"], "rows": 9}}})
    for name, kind in (("a", pa.int32()), ("b", pa.int64()), ("c", pa.string())):
        columns = {"user": pa.array([1, 2], pa.int64()).cast(kind), "place": ["here", None]}
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    alike = ParquetSource([tmp_path / "a.parquet", tmp_path / "b.parquet"], features, batch_size=2)
    assert alike.hashed == {"sparse.user": ["integers"], "sparse.both": ["integers", "text"]}
    with pytest.raises(DataError, match=r"holds integers, and text elsewhere[^$]*user"):
        ParquetSource(tmp_path, features, batch_size=2)
