"""Rows that are given back, and runs that begin with what another one learned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import gem_core
from gem_core.batch import Batch, SequenceGroup, SparseGroup
from gem_core.config import config_from_dict, resolve
from gem_core.config.features import Features
from gem_core.errors import CheckpointError, ConfigError, DataError
from gem_core.model.contract import Shards
from gem_core.sources.planted import PlantedLog
from gem_core.sources.synthetic import SyntheticConfig, SyntheticSource, synthetic_features
from gem_core.train.build import build_parts
from gem_core.train.continuous import NEVER, Recency, _fill_first
from gem_core.train.offline import loaded_run
from gem_core.train.runtime import runtime

FEATURES = {
    "tables": {"item": {"rows": 6, "dim": 4}},
    "sparse": {"item": {"table": "item"}, "tag": {"rows": 3, "dim": 4}},
    "sequences": {"history": {"fields": {"item": {"table": "item"}}, "target": {"item": "item"}}},
    "labels": {"ctr": {}},
}
WORLD = {"rows": 300, "eval_rows": 100, "test_rows": 10, "users": 40, "length": {"law": "lognormal", "mean": 4, "max": 20}}


def batch(items: list[int], tags: list[int], events: list[int]) -> Batch:
    n = len(items)
    sparse = SparseGroup(("item", "tag"), torch.tensor([*items, *tags]), torch.ones(2 * n, dtype=torch.int64))
    history = SequenceGroup(torch.tensor([0, len(events), *[len(events)] * (n - 1)]), {"item": torch.tensor(events, dtype=torch.int64)})
    return Batch(n, sparse=sparse, sequences={"history": history}, labels=torch.zeros(n, 1), label_names=("ctr",))


@pytest.fixture
def recency():
    config = config_from_dict(
        {
            "run": {"device": "cpu"},
            "features": FEATURES,
            "model": {"name": "din"},
            "data": {"source": "synthetic"},
            "train": {"tables": {"initial_accumulator": 0.5}},
        }
    )
    resolved = resolve(config.model_copy(update={"features": Features.model_validate(FEATURES)}))
    with runtime(resolved.config) as rt:
        parts = build_parts(resolved, rt)
        for name in ("item", "sparse.tag"):
            parts.tables.accumulator(name).fill_(2.0)
        yield Recency(parts, resolved.config, rt, 2)


def test_rows_unread_for_more_than_so_many_partitions_begin_anew(recency: Recency):
    table, sums = recency.parts.tables.weight("item"), recency.parts.tables.accumulator("item")
    before = table.detach().clone()
    recency.turn()  # partition 1
    recency.note(batch([0, 1], [0, 0], [2]))
    assert recency.turn() == {}  # 2
    recency.note(batch([1], [0], []))
    assert recency.turn() == {}  # 3: rows 0 and 2 were read two partitions ago
    assert recency.turn() == {"item": 2}  # 4
    changed = (table != before).any(1)
    assert changed.tolist() == [True, False, True, False, False, False]
    assert sums.tolist() == [0.5, 2, 0.5, 2, 2, 2]
    assert recency.last["item"].tolist() == [NEVER, 2, NEVER, NEVER, NEVER, NEVER]
    assert recency.turn() == {"item": 1, "sparse.tag": 1}  # 5
    # rows that were never read hold nothing to give back
    assert (table != before).any(1).tolist() == [True, True, True, False, False, False]


def test_new_rows_are_drawn_like_the_first_ones_and_the_same_again(recency: Recency):
    recency.turn()
    recency.note(batch([0, 1, 2, 3, 4, 5], [0] * 6, []))
    kept = recency.state_dict()
    rows = []
    for _ in range(2):
        recency.load_state_dict(kept)
        for _ in range(3):
            recency.turn()
        rows.append(recency.parts.tables.weight("item").detach().clone())
    assert torch.equal(*rows)
    assert 0.2 < float(rows[0].std()) < 1.0  # dim 4: 0.5


def test_eviction_needs_whole_tables_and_partitions(tmp_path: Path):
    for changes, what in (({"kind": "adamw"}, "has no partitions"), ({}, "has no partitions")):
        config = {"run": {"device": "cpu"}, "data": {"source": "synthetic", "synthetic": WORLD}, "model": {"name": "din"},
                  "train": {"steps": 1, "tensorboard": False, "tables": {"evict_after": 1, **changes}}}  # fmt: skip
        with pytest.raises(ConfigError, match=what):
            gem_core.train(config_from_dict(config), run_dir=tmp_path / "run", quiet=True)


# --- warm start ---


def config(features: Features | None = None, *, steps: int = 3, start: Path | None = None, **train):
    made = synthetic_features(SyntheticConfig(**WORLD)) if features is None else features
    return config_from_dict(
        {
            "run": {"device": "cpu", "seed": 4},
            "data": {"source": "synthetic", "batch_size": 50, "synthetic": WORLD},
            "features": made.model_dump(),
            "model": {"name": "din"},
            "train": {"steps": steps, "tensorboard": False, **({} if start is None else {"warm_start": str(start)}), **train},
        }
    )


def with_rows(rows: int, **item) -> Features:
    made = synthetic_features(SyntheticConfig(**WORLD))
    sparse = {**made.sparse, "advertiser": made.sparse["advertiser"].model_copy(update={"rows": rows, **item})}
    return made.model_copy(update={"sparse": sparse})


def states(run: Path):
    with loaded_run(run) as live:
        return {n: t.detach().clone() for n, t in live.parts.table_state().items()}


def test_a_warm_start_goes_on_with_parameters_tables_and_optimizers(tmp_path: Path):
    gem_core.train(config(steps=3), run_dir=tmp_path / "a", quiet=True)
    gem_core.train(config(steps=1, start=tmp_path / "a", optimizer={"lr": 1e-12}, tables={"lr": 1e-12}), run_dir=tmp_path / "b", quiet=True)
    a, b = states(tmp_path / "a"), states(tmp_path / "b")
    assert all(torch.equal(a[n], b[n]) for n in a if n.endswith("weight"))
    assert all((b[n] >= a[n]).all() and (b[n] > a[n]).any() for n in a if n.endswith("accumulator"))
    header = json.loads((tmp_path / "b" / "run.json").read_text())
    assert header["warm_start"] == {"run": str(tmp_path / "a"), "step": 3, "grown": {}}
    # the choices of the ops are told of every run of a process
    told = [json.loads((tmp_path / run / "run.json").read_text())["kernels"] for run in ("a", "b")]
    assert told[0]
    assert told[0] == told[1]
    # AdamW's second moments came along: with them the first step is not the large one of a fresh optimizer
    warm = gem_core.train(config(steps=1, start=tmp_path / "a"), run_dir=tmp_path / "c", quiet=True)
    assert warm.steps == 1


def test_a_table_that_grew_keeps_its_rows_and_their_state(tmp_path: Path):
    gem_core.train(config(steps=3), run_dir=tmp_path / "a", quiet=True)
    grown = config(with_rows(260), steps=1, start=tmp_path / "a", tables={"lr": 1e-12}, optimizer={"lr": 1e-12})
    gem_core.train(grown, run_dir=tmp_path / "b", quiet=True)
    a, b = states(tmp_path / "a"), states(tmp_path / "b")
    name = "sparse.advertiser"
    assert b[f"{name}.weight"].shape[0] == 260
    assert torch.equal(b[f"{name}.weight"][:200], a[f"{name}.weight"])
    assert (b[f"{name}.accumulator"][:200] >= a[f"{name}.accumulator"]).all()
    assert a[f"{name}.accumulator"].any()
    assert not b[f"{name}.accumulator"][200:].any()
    assert float(b[f"{name}.weight"][200:].std()) > 0
    assert json.loads((tmp_path / "b" / "run.json").read_text())["warm_start"]["grown"] == {name: [200, 260]}


def test_parts_of_a_table_that_is_spread_are_filled_where_they_lie():
    stored = torch.arange(10.0).view(5, 2)
    boxes = [((0, 0), torch.full((3, 2), -1.0)), ((3, 0), torch.full((4, 1), -1.0)), ((3, 1), torch.full((4, 1), -1.0))]
    _fill_first(Shards((7, 2), torch.float32, tuple(boxes)), stored)
    whole = torch.cat([boxes[0][1], torch.cat([boxes[1][1], boxes[2][1]], 1)])
    assert torch.equal(whole[:5], stored)
    assert (whole[5:] == -1).all()
    beyond = torch.full((2, 2), -1.0)
    _fill_first(Shards((9, 2), torch.float32, (((6, 0), beyond),)), stored)
    assert (beyond == -1).all()


def test_growth_that_would_change_ids_is_refused(tmp_path: Path):
    gem_core.train(config(with_rows(260), steps=1), run_dir=tmp_path / "a", quiet=True)
    with pytest.raises(CheckpointError, match="has 200 rows here and 260"):
        gem_core.train(config(steps=1, start=tmp_path / "a"), run_dir=tmp_path / "b", quiet=True)
    with pytest.raises(CheckpointError, match="no run folder"):
        gem_core.train(config(steps=1, start=tmp_path / "none"), run_dir=tmp_path / "c", quiet=True)
    assert not (tmp_path / "b").exists()
    assert not (tmp_path / "c").exists()


def test_ids_that_are_made_in_another_way_are_refused(tmp_path: Path):
    gem_core.train(config(with_rows(200, edges=(1.0, 2.0)), steps=1), run_dir=tmp_path / "a", quiet=True)
    for item, what in (({"edges": (1.0, 3.0)}, r"edges was \[1.0, 2.0\], is \[1.0, 3.0\]"), ({}, "edges was .*, is None")):
        with pytest.raises(ConfigError, match=f"'sparse.advertiser' are made in another way.*{what}"):
            gem_core.train(config(with_rows(200, **item), steps=1, start=tmp_path / "a"), run_dir=tmp_path / "b", quiet=True)
    header = json.loads((tmp_path / "a" / "run.json").read_text())
    (tmp_path / "a" / "run.json").write_text(json.dumps(header | {"hashed": {"sparse.advertiser": ["text"]}}))
    SyntheticSource.hashed = {"sparse.advertiser": ["integers"]}
    try:
        with pytest.raises(DataError, match="holds integers, in training text"):
            gem_core.train(config(with_rows(200, edges=(1.0, 2.0)), steps=1, start=tmp_path / "a"), run_dir=tmp_path / "b", quiet=True)
    finally:
        del SyntheticSource.hashed


# --- drift ---


def test_the_truth_turns_by_the_drift_and_not_without():
    still, turning = (PlantedLog(SyntheticConfig(rows=4000, eval_rows=1, test_rows=1, days=1, drift=d)) for d in (0.0, torch.pi))
    first, last = torch.arange(0, 400).numpy(), torch.arange(3600, 4000).numpy()
    # half a turn: in the last hours the effects are nearly the first ones' opposite
    for rows, sign in ((first, 1), (last, -1)):
        now, before = turning.samples(rows), still.samples(rows)
        names = ("category", "advertiser", "item", "age", "country")
        plain = sum(still._of[n][before.sparse[n]] for n in names)
        fixed = before.context_logit - plain
        turned = now.context_logit - fixed
        assert torch.corrcoef(torch.tensor([plain, turned]))[0, 1] * sign > 0.9


def test_the_position_of_an_older_log_is_still_good():
    source = SyntheticSource(SyntheticConfig(**WORLD), batch_size=50)
    next(iter(source))
    state = source.state_dict()
    del state["log"]["drift"]
    SyntheticSource(SyntheticConfig(**WORLD), batch_size=50).load_state_dict(state)
