"""Ranking all items: ranks against a loop in Python, metrics by hand, and a retrieval run from configuration to summary."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import types
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gem_core.train
from gem_core import plugins
from gem_core.batch import Batch, SequenceGroup, SparseGroup
from gem_core.config import Features, FrozenConfig, config_from_dict
from gem_core.config.schema import Ranking
from gem_core.errors import ConfigError, DataError
from gem_core.hookspecs import SourceSpec, hookimpl
from gem_core.jagged import Jagged
from gem_core.metrics.retrieval import RankMetrics, names
from gem_core.train import ranking
from gem_core.train.offline import evaluate_run

CPU = torch.device("cpu")


class Scorer:
    """Item vectors from a table."""

    def __init__(self, vectors, pad=None):
        self.vectors, self.items = vectors, vectors.shape[0]
        self.features = Features.model_validate(
            {
                "tables": {"item": {"rows": self.items}},
                "sparse": {"item": {"table": "item"}},
                "sequences": {"h": {"fields": {"item": {"table": "item"}}, "target": {"item": "item"}}},
                "next_item": {"item": "item"} | ({} if pad is None else {"pad": pad}),
            }
        )

    def item_vectors(self, ids):
        return self.vectors[ids]


def ranks_by_hand(query, vectors, target, seen, mode, pad):
    ranks = []
    for q, t, own in zip(query, target, seen):
        scores = (vectors @ q).tolist()
        others = [j for j in range(len(scores)) if j not in (t, pad)]
        if mode != "keep":
            others = [j for j in others if j not in own]
        if mode == "mask" and t in own:
            ranks.append(math.inf)
        else:
            ranks.append(1 + sum(scores[j] > scores[t] for j in others) + 0.5 * sum(scores[j] == scores[t] for j in others))
    return ranks


@pytest.mark.parametrize("mode", ["mask", "filter", "keep"])
@pytest.mark.parametrize("chunk", [1000, 37, 8, 1])
@pytest.mark.parametrize("pad", [None, 0, 20])
def test_ranks_are_those_of_a_loop(mode, chunk, pad):
    """Small integers as vectors: scores are exact and many are equal."""
    g = torch.Generator().manual_seed(1)
    vectors = torch.randint(-2, 3, (37, 3), generator=g).float()
    query = torch.randint(-2, 3, (12, 3), generator=g).float()
    query[4] = 0
    target = torch.randint(1, 20, (12,), generator=g)
    lengths = torch.randint(0, 9, (12,), generator=g)
    lengths[2] = 0
    items = torch.randint(1, 37, (int(lengths.sum()),), generator=g)
    seen = Jagged.from_lengths(items, lengths)
    items[seen.offsets[5]] = target[5]  # a target that was had before
    got = ranking.item_ranks(Scorer(vectors, pad), query, target, None if mode == "keep" else seen, Ranking(seen=mode, item_chunk=chunk))
    expected = ranks_by_hand(query, vectors, target.tolist(), [s.tolist() for s in seen.to_list()], mode, pad)
    assert got.tolist() == expected
    assert (got[5] == math.inf) == (mode == "mask")


def test_scores_that_are_not_finite_have_no_rank():
    vectors, query = torch.randn(9, 4), torch.randn(3, 4)
    query[1, 2] = float("nan")
    got = ranking.item_ranks(Scorer(vectors), query, torch.tensor([1, 2, 3]), None, Ranking())
    assert got.isnan().tolist() == [False, True, False]
    vectors[8] = float("nan")
    assert ranking.item_ranks(Scorer(vectors), query[:1], torch.tensor([1]), None, Ranking(item_chunk=3)).isnan().all()
    metrics = RankMetrics((1,), CPU)
    metrics.update(got)
    assert metrics.compute()["hr@1"].reason == "1 of the queries or scores are not finite"


def test_metrics_by_hand_and_merged():
    ranks = [1.0, 2.5, 10.0, 11.0, math.inf]
    metrics, other = RankMetrics((1, 10), CPU), RankMetrics((1, 10), CPU)
    metrics.update(torch.tensor(ranks[:2], dtype=torch.float64))
    other.update(torch.tensor(ranks[2:], dtype=torch.float64))
    theirs = iter([other.sums, other.samples, other.broken])
    metrics.merge(lambda tensor: [next(theirs).unsqueeze(0)])
    expected = {
        "hr@1": 1 / 5,
        "hr@10": 3 / 5,
        "ndcg@1": 1 / 5,
        "ndcg@10": (1 + 1 / math.log2(3.5) + 1 / math.log2(11)) / 5,
        "mrr": (1 + 1 / 2.5 + 1 / 10 + 1 / 11) / 5,
    }
    values = metrics.compute()
    assert list(values) == list(names((1, 10)))
    assert {k: v.value for k, v in values.items()} == pytest.approx(expected)
    assert values["hr@10"].details["standard_error"] == pytest.approx(math.sqrt(0.6 * 0.4 / 5))
    assert int(metrics.samples) == 5
    assert RankMetrics((1,), CPU).compute()["mrr"].reason == "no history was evaluated"


def test_evaluation_holds_a_chunk_not_the_scores_of_all_items():
    """20,000 items for 64 users would be 5 MB of scores at a time; a chunk of 500 items is 130 kB."""
    scorer = Scorer(torch.randn(20_000, 8))
    query, target = torch.randn(64, 8), torch.randint(20_000, (64,))
    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, torch.Tensor))
            return out

    with Watch():
        chunked = ranking.item_ranks(scorer, query, target, None, Ranking(item_chunk=500))
    assert max(sizes) <= 64 * 501
    assert (chunked - ranking.item_ranks(scorer, query, target, None, Ranking())).abs().max() <= 1


# --- a run ----------------------------------------------------------------------------------------------------------------------------


def _toys():
    spec = importlib.util.spec_from_file_location("trainer_toys", Path(__file__).with_name("trainer_toys.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["trainer_toys"] = module
    spec.loader.exec_module(module)
    return module


toys = _toys()
ITEMS = 30


class Walks:
    """Users walk through the items in steps of 1 or 2: the next item follows from the last two."""

    def __init__(self, config, features, *, split, batch_size, shard=(0, 1), seed=0, drop_last=False):
        self.first, self.count = {"train": (0, 600), "eval": (600, 60), "test": (700, 60)}[split]
        self.features, self.batch_size, self.at, self.epoch = features, batch_size, 0, 0

    def __len__(self):
        return -(-self.count // self.batch_size)

    def __iter__(self):
        while self.at < self.count:
            begin, self.at = self.at, min(self.at + self.batch_size, self.count)
            yield self.batch(range(self.first + begin, self.first + self.at))
        self.at = 0

    def batch(self, users):
        rows = [[1 + (7 * u + (1 + u % 2) * i) % (ITEMS - 1) for i in range(4 + u % 5)] for u in users]
        history = Jagged.from_list([torch.tensor(r[:-1]) for r in rows])
        one = torch.ones(len(rows), dtype=torch.int64)
        sparse = {"item": Jagged.from_lengths(torch.tensor([r[-1] for r in rows]), one)}
        return Batch(
            size=len(rows), sparse=SparseGroup.from_jagged(sparse),
            sequences={"h": SequenceGroup(history.offsets, {"item": history.values}, None, 16)},
        )  # fmt: skip

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Plugin:
    gem_api = 1

    @hookimpl
    def gem_sources(self):
        return [SourceSpec("walks", FrozenConfig, Walks)]


def config(**sections):
    base = {
        "run": {"device": "cpu"},
        "data": {"source": "walks", "batch_size": 24},
        "features": {
            "tables": {"item": {"rows": ITEMS, "dim": 16, "init_std": 0.1}},
            "sparse": {"item": {"table": "item"}},
            "sequences": {"h": {"fields": {"item": {"table": "item"}}, "target": {"item": "item"}, "max_length": 16}},
            "next_item": {"item": "item", "pad": 0},
        },
        "model": {"name": "sasrec", "dim": 16, "ffn": 32, "dropout": 0.0, "retrieval": {"loss": "softmax"}},
        "train": {"steps": 60, "tensorboard": False, "tables": {"kind": "adamw"}, "optimizer": {"lr": 0.02}},
        "eval": {"ranking": {"k": [1, 5], "seen": "keep"}, "every": 30, "restore_best": True},
    }
    for name, values in sections.items():
        base[name] = values if name == "model" else {**base[name], **values}
    return config_from_dict(base)


@pytest.fixture
def _walks(monkeypatch):
    module = types.ModuleType("retrieval_walks")
    module.plugin = Plugin()
    monkeypatch.setitem(sys.modules, "retrieval_walks", module)
    found = [EntryPoint("walks", "retrieval_walks:plugin", "gem"), EntryPoint("toys", "trainer_toys:plugin", "gem")]
    plugins._manager = plugins.PluginManager(entry_points=found)
    yield
    plugins.reset()


MODELS = {
    "sasrec": {"name": "sasrec", "layers": 1, "dim": 16, "ffn": 32, "dropout": 0.0},
    "hstu": {"name": "hstu", "layers": 1, "dim": 16, "qk_dim": 8, "v_dim": 8, "position_bias": 4},
    "gem": {
        "name": "gem",
        "layers": 1,
        "sequence": {"dim": 16, "attention": "causal", "ffn": 32, "rotary": "position", "pffn": {"kind": "none"}},
    },
}


LOSSES = {
    "sasrec": {"loss": "softmax"},
    "hstu": {"loss": "sampled_softmax", "negatives": 16},
    "gem": {"loss": "softmax", "normalize": True, "temperature": 0.1},
}


@pytest.mark.usefixtures("_walks")
@pytest.mark.parametrize("name", MODELS)
def test_a_run_learns_to_retrieve(tmp_path, name):
    chosen = config(model={**MODELS[name], "retrieval": LOSSES[name]})
    result = gem_core.train(chosen, run_dir=tmp_path / "run", quiet=True)
    found = result.tasks["next_item"]
    assert set(found) == {"hr@1", "hr@5", "ndcg@1", "ndcg@5", "mrr"}
    assert found["hr@1"] > 0.8
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["tasks"] == {"next_item": found}
    lines = [json.loads(line) for line in (tmp_path / "run" / "eval.jsonl").read_text().splitlines()]
    assert lines[0]["step"] == 30
    assert lines[0]["eval_samples"] == 60
    header = json.loads((tmp_path / "run" / "run.json").read_text())
    assert header["flops_per_sample"] > 0
    test = evaluate_run(tmp_path / "run", split="test")
    assert test.samples == 60
    assert test.results["next_item"]["hr@1"].value > 0.8
    train = evaluate_run(tmp_path / "run", split="train", overrides=["eval.max_batches=1"])
    assert train.samples == 24
    again = gem_core.load_config(tmp_path / "run" / "config.toml")
    assert gem_core.config.dump_toml(again) == (tmp_path / "run" / "config.toml").read_text()


@pytest.mark.usefixtures("_walks")
def test_resuming_continues_exactly(tmp_path):
    """Negatives, popularity counts and AdamW's state of the table included."""
    model = {**MODELS["sasrec"], "dropout": 0.2, "retrieval": {"loss": "bce", "negatives": 2, "sampling": "popularity"}}
    for folder, stops in (("a", [10]), ("b", [4, 10])):
        for i, steps in enumerate(stops):
            chosen = config(
                model=model, train={"steps": steps, "tables": {"kind": "adamw"}, "tensorboard": False}, eval={"restore_best": False}
            )
            gem_core.train(chosen, run_dir=tmp_path / folder, resume=i > 0, quiet=True)
    states = []
    for folder in ("a", "b"):
        checkpoint = gem_core.train.runfolder.RunFolder(tmp_path / folder).checkpoints.load(10)
        states.append({f"{p}.{k}": v.clone() for p in ("model", "optimizer", "tables") for k, v in checkpoint.tensors(p).items()})
    assert states[0].keys() == states[1].keys()
    assert "optimizer.tables.item.exp_avg" in states[0]
    assert "model.sampler.counts" in states[0]
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key]), key


@pytest.mark.usefixtures("_walks")
def test_row_wise_adagrad_is_the_default_of_tables(tmp_path):
    chosen = config(train={"steps": 20, "tables": {"lr": 0.1}, "tensorboard": False, "log_every": 10})
    gem_core.train(chosen, run_dir=tmp_path / "run", quiet=True)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < 0.8 * math.log(ITEMS - 1)
    checkpoint = gem_core.train.runfolder.RunFolder(tmp_path / "run").checkpoints.load(20)
    assert bool((checkpoint.tensors("tables")["item.accumulator"][1:] > 0).all())


@pytest.mark.usefixtures("_walks")
@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"eval": {"ranking": {"k": [1, 30]}}}, "first 30 of 29 items"),
        ({"eval": {"monitor": "auc"}}, "is not evaluated"),
        ({"model": {"name": "din"}}, "scores candidates"),
        ({"model": {"name": "toy"}}, "'toy' does not predict the next item"),
    ],
)
def test_refused_before_anything_runs(tmp_path, sections, message):
    chosen = config(**sections)
    with pytest.raises(ConfigError, match=message):
        gem_core.train(chosen, run_dir=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_an_item_that_is_the_pad_is_refused():
    features = config().features
    host = Walks(None, features, split="eval", batch_size=4).batch(range(3))
    ranking.check_batch(host, features)
    pad = torch.zeros_like(host.sparse.values)
    with pytest.raises(DataError, match="3 samples have the pad id 0"):
        ranking.check_batch(host.map(lambda t: pad if t is host.sparse.values else t), features)
