"""Retrieval in two processes: replicas stay equal under AdamW for tables and under row-wise AdaGrad, and ranks are counted over all."""

from __future__ import annotations

import json
import math

import pytest

from gem_core.config import config_from_dict, resolve
from gem_core.testing.strategies import run_processes, run_training
from gem_core.train.offline import evaluate_run

LOG = {"rows": 640, "eval_rows": 151, "test_rows": 50, "users": 60, "length": {"law": "lognormal", "mean": 6.0, "max": 30}}


def config(tables):
    base = {"run": {"device": "cpu", "seed": 1}, "data": {"batch_size": 16, "synthetic": LOG}}
    features = resolve(config_from_dict(base)).config.features.model_dump(exclude_none=True)
    history = features["sequences"].popitem()
    field, item = next(iter(history[1]["target"].items()))
    history[1]["fields"] = {field: history[1]["fields"][field]}
    history[1]["target"] = {field: item}
    kept = {
        "tables": features["tables"],
        "sparse": {item: features["sparse"][item]},
        "sequences": dict([history]),
        "next_item": {"item": item},
    }
    return {
        **base,
        "features": kept,
        "model": {"name": "sasrec", "layers": 1, "dim": 16, "embedding_dim": 16, "ffn": 16, "retrieval": {"loss": "bce", "negatives": 4}},
        "train": {"steps": 40, "log_every": 10, "tensorboard": False, "tables": tables, "optimizer": {"lr": 0.01}},
        "eval": {"ranking": {"k": [10, 100], "seen": "keep"}, "every": 20},
        "parallel": {"dense": "ddp"},
    }


@pytest.mark.parametrize("tables", [{"kind": "adamw"}, {"lr": 0.1}], ids=["adamw", "rowwise_adagrad"])
def test_two_processes_train_and_rank_as_one(tmp_path, tables):
    ranks = run_processes(2, run_training, {"config": config(tables), "run_dir": str(tmp_path / "run")}, tmp_path)
    assert ranks[0]["tasks"] == ranks[1]["tasks"]
    assert ranks[0]["samples"] == 40 * 2 * 16
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert 0.7 < lines[0]["loss"] / (5 * math.log(2)) < 1.4, "five terms a position, whatever the number of ranks and positions"
    assert lines[-1]["loss"] < lines[0]["loss"]
    alone = evaluate_run(tmp_path / "run", overrides=['parallel.dense="single"'])
    assert alone.samples == 151
    for name, value in alone.results["next_item"].items():
        assert ranks[0]["tasks"]["next_item"][name] == pytest.approx(value.value, rel=1e-6), name
