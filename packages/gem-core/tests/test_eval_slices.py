"""gemrec eval --by: every slice against the metrics of its own rows, warm and cold against the ids of the training data."""

from __future__ import annotations

import datetime
import json
import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from gem_core.batch import Batch
from gem_core.cli.app import build
from gem_core.cli.eval import slice_lines
from gem_core.config import Features, load_config
from gem_core.config.features import Sparse
from gem_core.config.schema import Eval
from gem_core.errors import ConfigError, DataError
from gem_core.metrics.collect import MetricSet
from gem_core.metrics.slices import SlicedMetrics, Slicing, record, slicing
from gem_core.train import quickstart_path, train
from gem_core.train.build import build_source
from gem_core.train.evaluate import metric_builders
from gem_core.train.offline import evaluate_run, loaded_run
from gem_core.train.predict import predictor

BUILDERS = metric_builders(Eval(group="user"))


def batches(seed: int = 0, count: int = 3) -> list[tuple[Batch, torch.Tensor]]:
    g = torch.Generator().manual_seed(seed)
    made = []
    for n in (40, 1, 60)[:count]:
        batch = Batch(
            n,
            labels=(torch.rand(n, 2, generator=g) < 0.3).float(),
            label_names=("ctr", "cvr"),
            label_mask=torch.stack([torch.ones(n, dtype=torch.bool), torch.rand(n, generator=g) < 0.5], 1),
            weights=torch.rand(n, generator=g),
            timestamps=torch.randint(1_700_000_000, 1_700_300_000, (n,), generator=g),
            columns={"user": torch.randint(0, 5, (n,), generator=g), "position": torch.randint(1, 4, (n,), generator=g)},
        )
        made.append((batch, torch.randn(n, 2, generator=g)))
    return made


def values(results: object) -> dict[tuple[str, str], object]:
    return {(t, m): v.value if v.value is None else round(v.value, 12) for t, ms in results.items() for m, v in ms.items()}


@pytest.mark.parametrize("by", ["day", "position"])
def test_a_slice_has_the_metrics_of_its_rows(by: str) -> None:
    sliced = SlicedMetrics(slicing(by, Features(timestamp="t"), lambda _: torch.empty(0)), ("ctr", "cvr"), BUILDERS, "user")
    data = batches()
    for batch, logits in data:
        sliced.update(batch, logits, ("ctr", "cvr"))
    found = sliced.compute()
    rows: dict[str, MetricSet] = {}
    for batch, logits in data:
        for i in range(batch.size):
            time = datetime.datetime.fromtimestamp(int(batch.timestamps[i]), datetime.UTC)
            key = f"{time:%Y-%m-%d}" if by == "day" else str(int(batch.columns["position"][i]))
            one = batch.select_range(i, i + 1)
            rows.setdefault(key, MetricSet(("ctr", "cvr"), BUILDERS, "user")).update(one, logits[i : i + 1], ("ctr", "cvr"))
    assert list(found) == sorted(rows)
    assert len(found) >= 3
    for key, (samples, results) in found.items():
        assert samples == rows[key].samples
        assert values(results) == pytest.approx(values(rows[key].compute()), nan_ok=False)


def test_ranks_with_different_slices_add_up() -> None:
    """Two ranks, of which one has a slice that the other lacks, against one that saw everything."""
    data = batches()
    by = Slicing("position", lambda batch: batch.columns["position"])
    data[0][0].columns["position"].fill_(7)
    ranks = [SlicedMetrics(by, ("ctr",), BUILDERS, "user") for _ in range(2)]
    whole = SlicedMetrics(by, ("ctr",), BUILDERS, "user")
    for i, (batch, logits) in enumerate(data):
        ranks[i % 2 if i else 1].update(batch, logits, ("ctr", "cvr"))
        whole.update(batch, logits, ("ctr", "cvr"))
    boxes: tuple[queue.Queue[torch.Tensor], ...] = (queue.Queue(), queue.Queue())

    def gather(rank: int) -> Callable[[torch.Tensor], list[torch.Tensor]]:
        def exchange(tensor: torch.Tensor) -> list[torch.Tensor]:
            boxes[rank].put(tensor.clone())
            return [boxes[1 - rank].get(timeout=30)]

        return exchange

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(ranks[i].merge, gather(i)) for i in range(2)]:
            done.result(timeout=60)
    assert values(ranks[1].compute()["7"][1]) == pytest.approx(values(ranks[0].compute()["7"][1]))
    a, b = ranks[0].compute(), whole.compute()
    assert list(a) == list(b)
    for key in a:
        assert a[key][0] == b[key][0]
        assert values(a[key][1]) == pytest.approx(values(b[key][1]))


def test_undefined_slices_say_why() -> None:
    batch, logits = batches()[0]
    batch.labels[batch.columns["position"] == 2] = 0
    sliced = SlicedMetrics(slicing("position", Features(), lambda _: torch.empty(0)), ("ctr",), BUILDERS, "user")
    sliced.update(batch, logits, ("ctr", "cvr"))
    found = record([sliced])["position"]
    assert found["2"]["tasks"]["ctr"]["ne"] is None
    assert found["2"]["undefined"]["ctr"]["ne"] == "no evaluated row has a positive label"
    text = slice_lines("position", found)
    assert text[2].startswith("2 ")
    assert "(a)" in text[2]
    assert "(a) undefined: no evaluated row has a positive label" in text


def test_slices_that_make_no_sense_are_refused() -> None:
    batch, logits = batches()[0]
    features = Features.model_validate({"sparse": {"item": {"rows": 4}}})
    with pytest.raises(ConfigError, match="need the time of the impression"):
        slicing("day", features, lambda _: torch.empty(0))
    with pytest.raises(ConfigError, match="no sparse feature 'nothing'"):
        slicing("warm:nothing", features, lambda _: torch.empty(0))
    with pytest.raises(DataError, match=r"neither a column nor a sparse feature(.|\n)*--by nothing"):
        SlicedMetrics(slicing("nothing", features, lambda _: torch.empty(0)), ("ctr",), BUILDERS).update(batch, logits, ("ctr", "cvr"))
    odd = replace(batch, columns={"price": torch.rand(batch.size)})
    with pytest.raises(DataError, match="not whole"):
        SlicedMetrics(slicing("price", features, lambda _: torch.empty(0)), ("ctr",), BUILDERS).update(odd, logits, ("ctr", "cvr"))
    many = replace(batch, size=1001, labels=torch.zeros(1001, 2), label_mask=None, weights=None, columns={"user": torch.arange(1001)})
    with pytest.raises(DataError, match="more than 1000 slices by 'user'"):
        SlicedMetrics(slicing("user", features, lambda _: torch.empty(0)), ("ctr",), BUILDERS).update(
            many, torch.zeros(1001, 2), ("ctr", "cvr")
        )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("slices") / "run"
    options = ["train.steps=4", "data.batch_size=64", "data.eval_batch_size=256", "eval.max_batches=1", "train.checkpoint_every=1000"]
    sizes = [
        "data.synthetic.rows=256",
        "data.synthetic.eval_rows=600",
        "data.synthetic.users=400",
        "data.synthetic.length.law=lognormal",
        "data.synthetic.length.mean=3",
    ]
    train(load_config(quickstart_path(), [*options, *sizes]), run_dir=folder, quiet=True)
    return folder


def test_warm_samples_are_those_whose_ids_training_has_seen(run) -> None:
    found = evaluate_run(run, overrides=["eval.max_batches=3"], by=["warm:item", "day", "warm"])
    with loaded_run(run) as loaded:
        features = loaded.resolved.config.features
        same = [("sparse", "item")] + [
            ("sequences", g, f) for g, s in features.sequences.items() for f, c in s.fields.items()
            if c.kind == "id" and features.table_of(f"sequences.{g}.fields.{f}") == features.table_of("sparse.item")
        ]  # fmt: skip
        seen: set[int] = set()
        for batch in build_source(loaded.resolved, "train", loaded.runtime):
            for path in same:
                seen |= set((batch.sparse["item"].values if path[0] == "sparse" else batch.sequences[path[1]].fields[path[2]]).tolist())
        warm = cold = 0
        for batch in build_source(loaded.resolved, "eval", loaded.runtime):
            known = [i in seen for i in batch.sparse["item"].values.tolist()]
            warm, cold = warm + sum(known), cold + len(known) - sum(known)
    assert cold > 5
    assert {k: v["samples"] for k, v in found.slices["warm:item"].items()} == {"cold": cold, "warm": warm}
    assert sum(v["samples"] for v in found.slices["day"].values()) == found.samples == 600
    assert found.slices["warm"]["warm"]["samples"] <= warm


def test_the_command_prints_tables_and_json(run) -> None:
    def gemrec(*words: str) -> str:
        result = CliRunner().invoke(build(), ["eval", str(run), "--set", "eval.max_batches=2", *words], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    text = gemrec("--by", "day", "--by", "category")
    assert "day " in text
    assert "category  " in text
    found = json.loads(gemrec("--by", "day", "--json"))
    assert sum(s["samples"] for s in found["slices"]["day"].values()) == found["samples"] == 512
    assert "slices" not in json.loads(gemrec("--json"))


def test_predictions_of_the_run_have_the_metrics_of_its_evaluation(run) -> None:
    """The predictor's logits, in the order of the batches, give evaluation's own numbers."""
    found = evaluate_run(run, overrides=["eval.max_batches=3"])
    with predictor(run) as model:
        metrics = MetricSet(model.tasks, metric_builders(model.run.resolved.config.eval), model.run.resolved.config.eval.group)
        for batch, logits in model.source("eval"):
            metrics.update(batch, logits, model.tasks)
    for task, own in metrics.compute().items():
        for name, value in own.items():
            want = found.results[task][name].value
            assert value.value == (None if want is None else pytest.approx(want, rel=1e-5, abs=1e-7))


def test_a_hashed_feature_is_sliced_by_the_rows_of_its_table():
    """The hash of a country is not the country, and is not shown as if it were."""
    hashed, plain = Sparse(rows=9, hash=True), Sparse(rows=9)
    features = Features(sparse={"country": hashed, "position": plain, "device": hashed}, columns=("device",))
    labels = {name: slicing(name, features, lambda _: torch.empty(0)).label(7) for name in features.sparse}
    assert labels == {"country": "row 7", "position": "7", "device": "7"}
