"""Following a folder: order, completeness, late partitions, exact positions, and evaluation before training."""

from __future__ import annotations

import json
import signal
import threading
import time
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from gem_core import load_config, train
from gem_core.config.features import Features
from gem_core.errors import ConfigError, DataError, GemError
from gem_core.report.run import read
from gem_core.testing.sources import ids_of
from gem_core.testing.strategies import run_processes
from gem_core.train import trainer
from gem_core.train.checkpoint import CheckpointStore
from gem_core.train.feed import Feed
from gem_core.train.offline import evaluate_run, loaded_run
from gem_core.train.predict import predictor
from gem_core.train.runtime import Runtime
from gem_core.train.step import TrainStep
from gem_core.train.watchdog import Watchdog
from gem_data.config import FollowConfig
from gem_data.spec import build_follow
from gem_data.validate import validate

FEATURES = Features.model_validate({"sample_id": "id", "sparse": {"item": {"rows": 20}}, "labels": {"click": {}}})
ROWS = 40


def add(folder, hour, *, marker=True):
    """A partition of 40 rows in two files; ids say the hour."""
    target = folder / f"hour={hour:02}"
    target.mkdir(parents=True)
    rng = np.random.default_rng(hour)
    for part in range(2):
        n = ROWS // 2
        ids = hour * 1000 + part * n + np.arange(n)
        table = pa.table({"id": ids, "item": rng.integers(0, 20, n), "click": rng.integers(0, 2, n)})
        pq.write_table(table, target / f"{part}.parquet", row_group_size=7)
    if marker:
        (target / "_SUCCESS").touch()


def follow(folder, *, batch_size=8, shard=(0, 1), **options):
    config = FollowConfig(train=(str(folder),), **{"idle_s": 0, "poll_s": 0.02, "window": 14, **options})
    return build_follow(config, FEATURES, split="train", batch_size=batch_size, shard=shard, seed=5)


STEPS = ROWS // 8


def hours(ids):
    return [i // 1000 for i in ids]


@pytest.fixture
def folder(tmp_path):
    for hour in (1, 2, 3):
        add(tmp_path / "log", hour)
    return tmp_path / "log"


def test_partitions_come_in_order_and_shuffled_within(folder):
    source = follow(folder)
    ids = ids_of(source)
    assert hours(ids) == [1] * ROWS + [2] * ROWS + [3] * ROWS
    assert len(set(ids)) == 3 * ROWS
    assert ids != sorted(ids)
    assert [i % 1000 for i in ids[:ROWS]] != [i % 1000 for i in ids[ROWS : 2 * ROWS]], "two partitions have one order"
    assert (source.partition, source.watermark) == ("hour=03", "hour=03")
    assert ids_of(source) == []
    add(folder, 4)
    assert hours(ids_of(source)) == [4] * ROWS


def test_start_stop_and_lag(folder):
    assert set(hours(ids_of(follow(folder, start="hour=02")))) == {2, 3}
    assert set(hours(ids_of(follow(folder, stop="hour=02", idle_s=None)))) == {1, 2}
    assert set(hours(ids_of(follow(folder, lag=1)))) == {1, 2}


def test_what_is_not_complete_is_waited_for(folder, caplog):
    """A later complete partition does not overtake; the marker makes the earlier one readable."""
    add(folder, 4, marker=False)
    add(folder, 5)
    assert set(hours(ids_of(follow(folder)))) == {1, 2, 3}
    assert "hour=04 of" in caplog.text
    assert "has no _SUCCESS: the run ends without it; later partitions that wait for it: hour=05" in caplog.text
    caplog.clear()
    assert set(hours(ids_of(follow(folder, start="hour=05")))) == {5}, "what is before the first one is not waited for"
    assert set(hours(ids_of(follow(folder, stop="hour=03", idle_s=None)))) == {1, 2, 3}
    assert not caplog.records
    source, got = follow(folder, idle_s=None, stop="hour=05"), []
    reading = threading.Thread(target=lambda: got.extend(ids_of(source)))
    reading.start()
    time.sleep(0.3)
    assert max(hours(got), default=0) <= 3
    assert caplog.text.count("it is waited for") == 1
    (folder / "hour=04" / "_SUCCESS").touch()
    reading.join(20)
    assert hours(got) == sorted(h for h in (1, 2, 3, 4, 5) for _ in range(ROWS))


def test_late_partitions_are_said_and_counted(folder, caplog):
    source = follow(folder)
    ids_of(source)
    add(folder, 0)
    add(folder, 4)
    assert set(hours(ids_of(source))) == {4}
    assert source.late == 1
    assert "hour=00" in caplog.text
    resumed = follow(folder)
    resumed.load_state_dict(source.state_dict())
    add(folder, 6)
    (folder / "hour=03b").mkdir()
    (folder / "hour=03b" / "_SUCCESS").touch()
    assert set(hours(ids_of(resumed))) == {6}
    assert resumed.late == 2


@pytest.mark.parametrize("steps", [1, 5, 6, 11])
def test_positions_are_exact_twice_and_for_other_ranks(folder, steps):
    want = ids_of(follow(folder))
    first = follow(folder)
    got = ids_of(islice(first, steps))
    state = json.loads(json.dumps(first.state_dict()))
    second = [follow(folder, shard=(rank, 2), batch_size=3) for rank in range(2)]
    parts = []
    for source in second:
        source.load_state_dict(state)
        parts.append(ids_of(islice(source, 2)))
    assert second[0].state_dict() == second[1].state_dict()
    third = follow(folder)
    third.load_state_dict(json.loads(json.dumps(second[1].state_dict())))
    rest = ids_of(third)
    assert sorted([*got, *parts[0], *parts[1], *rest]) == sorted(want)


def test_an_iterator_left_behind_is_gone_on_with(folder):
    source = follow(folder)
    got = ids_of(islice(source, 3))
    assert got + ids_of(source) == ids_of(follow(folder))


def test_faults(folder, tmp_path):
    with pytest.raises(DataError, match="followed folder cannot be read"):
        ids_of(follow(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="one folder"):
        build_follow(FollowConfig(train=("a", "b")), FEATURES, split="train", batch_size=4)
    with pytest.raises(ConfigError, match=r"(?s)split 'eval'.*\[data\.parquet-follow\].*data\.parquet-follow\.eval="):
        build_follow(FollowConfig(train=("a",)), FEATURES, split="eval", batch_size=4)
    (folder / "hour=02" / "0.parquet").write_bytes(b"PAR1 not at all")
    with pytest.raises(DataError, match=r"hour=02/0\.parquet"):
        ids_of(follow(folder))


CONFIG = """
[run]
seed = 1
[data]
source = "parquet-follow"
batch_size = 8
[data.parquet-follow]
train = ["{folder}"]
eval = ["{folder}/hour=03"]
idle_s = 0
[features]
sample_id = "id"
[features.sparse.item]
rows = 20
[features.labels.click]
[model]
name = "gem"
preset = "tiny"
sequence = false
[train]
epochs = 1
checkpoint_every = 3
tensorboard = false
[eval]
before_training = true
"""


def test_hashed_ids_keep_their_type_over_partitions_and_resumption(tmp_path):
    for hour, ids in ((1, [1, 2]), (2, ["1", "2"])):
        (tmp_path / f"hour={hour}").mkdir()
        pq.write_table(pa.table({"id": [10 * hour, 10 * hour + 1], "item": ids}), tmp_path / f"hour={hour}" / "0.parquet")
        (tmp_path / f"hour={hour}" / "_SUCCESS").touch()
    features = Features.model_validate({"sample_id": "id", "sparse": {"item": {"rows": 20, "hash": True}}})
    config = FollowConfig(train=(str(tmp_path),), idle_s=0, poll_s=0.02)
    source = build_follow(config, features, split="train", batch_size=2)
    first = list(islice(source, 1))
    resumed = build_follow(config, features, split="train", batch_size=2)
    resumed.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert len(first) == 1
    for again in (source, resumed):
        with pytest.raises(DataError, match=r"holds text, in partitions before it integers.*\n.*hour=2"):
            list(again)


def test_which_columns_hold_lists_is_kept_over_partitions_and_resumption(tmp_path):
    """A partition without any value, for which writers know no type, does not tell."""
    empty = pa.nulls(2), pa.array([[None], []], pa.list_(pa.null()))
    for hour, (tags, events) in enumerate([empty, ([[1, 2], []], [[[1]], []]), empty], 1):
        (tmp_path / f"hour={hour}").mkdir()
        pq.write_table(pa.table({"id": [10 * hour, 10 * hour + 1], "tags": tags, "seen": events}), tmp_path / f"hour={hour}" / "0.parquet")
        (tmp_path / f"hour={hour}" / "_SUCCESS").touch()
    ids = {"rows": 20, "policy": "default", "default": 0}
    history = {"seen": {"fields": {"tags": {"column": "seen", **ids}}, "max_length": 4}}
    features = Features.model_validate({"sample_id": "id", "sparse": {"tags": ids}, "sequences": history})
    config = FollowConfig(train=(str(tmp_path),), idle_s=0, poll_s=0.02)
    source = build_follow(config, features, split="train", batch_size=2)
    both = dict.fromkeys(("sparse.tags", "sequences.seen.fields.tags"), True)
    assert [dict(source.lists) for _ in source] == [{}, both, both]
    resumed = build_follow(config, features, split="train", batch_size=2)
    resumed.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert (list(resumed), resumed.lists) == ([], both)


def test_each_partition_is_evaluated_before_it_is_trained_on(folder, tmp_path):
    path = tmp_path / "follow.toml"
    path.write_text(CONFIG.format(folder=folder))
    train(load_config(path), run_dir=tmp_path / "whole", quiet=True)

    def evaluations(run):
        records = [json.loads(line) for line in (tmp_path / run / "eval.jsonl").read_text().splitlines()]
        return [(r["step"], r.get("partition"), r["eval_samples"], r["tasks"]["click"]["ne"]) for r in records]

    whole = evaluations("whole")
    assert [w[:3] for w in whole] == [(0, "hour=01", ROWS), (5, "hour=02", ROWS), (10, "hour=03", ROWS), (15, None, ROWS)]

    # Stopped within the second partition and gone on with: the same evaluations, none of them twice.
    train(load_config(path, {"train.steps": 7}), run_dir=tmp_path / "parts", quiet=True)
    train(load_config(path), run_dir=tmp_path / "parts", resume=True, quiet=True)
    assert [e for e in evaluations("parts") if e[1]] == [e for e in whole if e[1]]


@pytest.mark.parametrize(("accumulate", "fails_at"), [(1, 6), (2, 4)])
def test_a_run_that_fails_behind_a_border_evaluates_each_partition_once(folder, tmp_path, accumulate, fails_at):
    """A checkpoint may stand between two partitions, or a step hold the last batch of one and the first of the next."""
    path = tmp_path / "follow.toml"
    path.write_text(CONFIG.format(folder=folder).replace("checkpoint_every = 3", "checkpoint_every = 1"))
    options = {"train.accumulate": accumulate}

    class Fails:
        def on_step(self, run, record):
            if run.step == fails_at:
                raise ValueError("out of luck")

    def evaluations(run):
        records = [json.loads(line) for line in (tmp_path / run / "eval.jsonl").read_text().splitlines()]
        return [(r["step"], r["partition"], r["tasks"]["click"]["ne"]) for r in records if "partition" in r]

    train(load_config(path, options), run_dir=tmp_path / "whole", quiet=True)
    assert [(step * accumulate // 5, name) for step, name, _ in evaluations("whole")] == [
        (0, "hour=01"),
        (0 if accumulate == 2 else 1, "hour=02"),
        (2, "hour=03"),
    ]
    with pytest.raises(GemError, match="out of luck"):
        train(load_config(path, options), run_dir=tmp_path / "parts", quiet=True, callbacks=[Fails()])
    train(load_config(path, options), run_dir=tmp_path / "parts", resume=True, quiet=True)
    assert evaluations("parts") == evaluations("whole")


def test_a_run_that_waits_for_a_partition_lives_and_stops_when_it_is_told_to(folder, tmp_path, monkeypatch):
    path = tmp_path / "follow.toml"
    path.write_text(CONFIG.format(folder=folder).replace("idle_s = 0\n", "poll_s = 60\n"))
    signs = []
    monkeypatch.setattr(Watchdog, "progress", lambda self: signs.append(time.monotonic()))
    stop = threading.Timer(4, signal.raise_signal, (signal.SIGTERM,))

    class Begins:
        def on_step(self, run, record):
            if run.step == 15:
                stop.start()

    started = time.monotonic()
    result = train(load_config(path), run_dir=tmp_path / "run", quiet=True, callbacks=[Begins()])
    assert (result.status, result.steps) == ("interrupted", 15)
    assert time.monotonic() - started < 40
    assert max(b - a for a, b in zip(signs, signs[1:])) < 3, "waiting gave no sign of life"
    add(folder, 4)
    more = train(load_config(path, {"train.steps": 20}), run_dir=tmp_path / "run", resume=True, quiet=True)
    assert (more.status, more.steps) == ("finished", 20)


class OnADevice(Feed):
    """The way of batches to a CUDA device, without one: a batch is held until the next one is fetched."""

    def __init__(self, *arguments, **more):
        super().__init__(*arguments, **more)
        self._stream = object()

    def _copy(self, host, imbalance):
        return self._take(host, None, imbalance), None

    def _received(self, fed, copied):
        return fed


@pytest.mark.parametrize("way", ["a device", "looking ahead"])
def test_a_partition_is_trained_to_its_end_before_the_next_arrives(folder, tmp_path, monkeypatch, way):
    """Hour 4 comes when all of hour 3 was trained on; nothing else would bring it."""
    if way == "a device":
        monkeypatch.setattr(trainer, "Feed", OnADevice)
    else:
        monkeypatch.setattr(TrainStep, "looks_ahead", True)

    class Adds:
        def on_step(self, run, record):
            if run.step == 3 * STEPS:
                add(folder, 4)

    path = tmp_path / "follow.toml"
    path.write_text(CONFIG.format(folder=folder).replace("idle_s = 0\n", "poll_s = 0.1\nidle_s = 20\n"))
    settings = {"data.parquet-follow.stop": "hour=04"}
    result = train(load_config(path, settings), run_dir=tmp_path / "run", quiet=True, callbacks=[Adds()])
    assert (result.status, result.steps, result.samples) == ("finished", 4 * STEPS, 4 * ROWS)
    straight = train(load_config(path, settings), run_dir=tmp_path / "straight", quiet=True)
    kept = [CheckpointStore(tmp_path / name / "checkpoints").load(straight.steps) for name in ("run", "straight")]
    first, second = (k.tensors("tables") | k.tensors("model") for k in kept)
    assert all(torch.equal(first[name], second[name]) for name in second)


def test_a_run_is_gone_on_with_until_another_partition(folder, tmp_path):
    path = tmp_path / "follow.toml"
    path.write_text(CONFIG.format(folder=folder))
    first = train(load_config(path, {"data.parquet-follow.stop": "hour=02"}), run_dir=tmp_path / "run", quiet=True)
    folder.rename(tmp_path / "moved")
    more = {"data.parquet-follow.train": str(tmp_path / "moved"), "data.parquet-follow.eval": str(tmp_path / "moved" / "hour=03")}
    more |= {"data.parquet-follow.stop": "hour=03", "data.batch_size": 20}
    second = train(load_config(path, more), run_dir=tmp_path / "run", resume=True, quiet=True)
    assert (first.samples, second.samples, second.steps - first.steps) == (2 * ROWS, 3 * ROWS, 2)
    with pytest.raises(ConfigError, match=r"data\.parquet-follow\.marker: was _SUCCESS, is DONE"):
        train(load_config(path, more | {"data.parquet-follow.marker": "DONE"}), run_dir=tmp_path / "run", resume=True, quiet=True)


def test_what_a_followed_column_of_hashed_ids_holds_is_known_from_its_first_partition_on(folder, tmp_path):
    path = tmp_path / "follow.toml"
    path.write_text(CONFIG.format(folder=folder))
    hashed = {"train.steps": 2, "features.sparse.item.hash": True}
    train(load_config(path, hashed), run_dir=tmp_path / "run", quiet=True)
    header = json.loads((tmp_path / "run" / "run.json").read_text())
    assert header["hashed"] == {"sparse.item": ["integers"]}
    (tmp_path / "run" / "run.json").write_text(json.dumps(header | {"hashed": {"sparse.item": ["text"]}}))
    with pytest.raises(DataError, match="holds integers, in training text"):
        train(load_config(path, hashed | {"train.warm_start": str(tmp_path / "run")}), run_dir=tmp_path / "next", quiet=True)


def test_what_looks_at_a_followed_log_waits_for_nothing(folder, tmp_path):
    path = tmp_path / "follow.toml"
    path.write_text(CONFIG.format(folder=folder).replace("idle_s = 0\n", ""))
    train(load_config(path, {"train.steps": 5}), run_dir=tmp_path / "run", quiet=True)
    assert evaluate_run(tmp_path / "run", split="train").samples == 3 * ROWS
    with predictor(tmp_path / "run") as model:
        assert sum(logits.shape[0] for _, logits in model.source("train")) == 3 * ROWS
    assert read(tmp_path / "run").inspection.step == 5


def followed_apart(rank, world, task):
    """Hours that each of two ranks reads: the second one sees new partitions later, and alone is asked to stop. The fourth hour comes when
    both have had the third."""
    log, feeds = Path(task[0]), {"host": Feed, "device": OnADevice}
    source = follow(log, batch_size=20, shard=(rank, world), idle_s=None)
    looks = iter(range(100))
    if rank:
        seen = source._complete
        source._complete = lambda: seen()[: next(looks)]
    read = []
    runtime = Runtime(torch.device("cpu"), rank, world)
    feed = feeds[task[1]](source, torch.device("cpu"), 1, runtime=runtime, stops=lambda: rank == 1 and len(read) == 4)
    for fed in feed:
        read.append(sorted(set(hours(fed.host.sample_ids.tolist()))))
        if len(read) == 3 and min(runtime.numbers(3.0)) == 3 and rank == 0:
            add(log, 4)
    return read, feed.stopped, feed.source.state_dict()["watermark"]


def test_faults_of_a_followed_log_name_its_section(folder, tmp_path):
    """What is said of its files and of how they are read is of [data.parquet-follow]."""

    def build(split="train", features=FEATURES, **options):
        config = FollowConfig(**{"train": (str(folder),), "idle_s": 0, **options})
        return build_follow(config, features, split=split, batch_size=8)

    refuses = Features.model_validate({"sparse": {"item": {"rows": 20, "policy": "quarantine"}}, "labels": {"click": {}}})
    cases = {
        r'\[data\.parquet-follow\] root = "other"': lambda: build("eval", root="other", eval=("nowhere",)),
        r'set \[data\.parquet-follow\] quarantine = "folder"': lambda: next(iter(build(features=refuses))),
        r"where: \[data\.parquet-follow\.batching\]": lambda: next(iter(build(batching={"kind": "tokens", "budget": 100}))),
        r'\[data\.parquet-follow\] root = "else"': lambda: validate(FollowConfig(train=(), eval=("no",), root="else"), FEATURES, "eval"),
    }
    for said, build_it in cases.items():
        with pytest.raises(GemError, match=said):
            build_it()


@pytest.mark.parametrize("way", ["host", "device"])
def test_ranks_read_the_same_partitions_and_stop_together(folder, tmp_path, way):
    found = run_processes(2, followed_apart, (str(folder), way), tmp_path)
    assert found == [([[1], [2], [3], [4]], True, "hour=04")] * 2


def test_rows_are_given_back_alike_when_a_run_is_gone_on_with(tmp_path):
    log = tmp_path / "log"
    for hour, low in ((1, 0), (2, 10), (3, 10), (4, 10)):
        target = log / f"hour={hour:02}"
        target.mkdir(parents=True)
        rng = np.random.default_rng(hour)
        table = pa.table({"id": hour * 1000 + np.arange(ROWS), "item": low + np.arange(ROWS) % 10, "click": rng.integers(0, 2, ROWS)})
        pq.write_table(table, target / "rows.parquet", row_group_size=7)
        (target / "_SUCCESS").touch()
    path = tmp_path / "follow.toml"
    path.write_text(CONFIG.format(folder=log) + "[train.tables]\nevict_after = 1\n")

    def tables(run):
        with loaded_run(tmp_path / run) as loaded:
            return {name: tensor.clone() for name, tensor in loaded.parts.table_state().items()}

    train(load_config(path), run_dir=tmp_path / "whole", quiet=True)
    found = tables("whole")
    # items 0 to 9 came in the first hour alone, and were given back when the third began
    assert not found["sparse.item.accumulator"][:10].any()
    assert found["sparse.item.accumulator"][10:].all()
    train(load_config(path, {"train.steps": 7}), run_dir=tmp_path / "parts", quiet=True)
    train(load_config(path), run_dir=tmp_path / "parts", resume=True, quiet=True)
    resumed = tables("parts")
    assert all(torch.equal(found[name], resumed[name]) for name in found)
    train(load_config(path, {"train.tables.evict_after": None}), run_dir=tmp_path / "kept", quiet=True)
    assert tables("kept")["sparse.item.accumulator"].all()


def test_other_sources_have_no_partitions(folder, tmp_path):
    path = tmp_path / "plain.toml"
    path.write_text(CONFIG.format(folder=folder).replace("parquet-follow", "parquet").replace("idle_s = 0\n", ""))
    with pytest.raises(ConfigError, match="no partitions to evaluate"):
        train(load_config(path), run_dir=tmp_path / "run", quiet=True)
