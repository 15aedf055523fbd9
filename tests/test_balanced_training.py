"""Training in two processes on Parquet files: every log line says how uneven the ranks' work was, and balancing makes it more even."""

from __future__ import annotations

import json

import pytest

from gem_core.sources.synthetic import SyntheticConfig
from gem_core.testing.strategies import run_processes, run_training

pytest.importorskip("gem_data")
pytest.importorskip("gem_parallel")


def test_imbalance_is_reported_and_mended(tmp_path):
    from gem_data.synth import parquet_features, write_synthetic

    law = {"law": "lognormal", "mean": 20.0, "sigma": 1.2, "max": 200}
    log = SyntheticConfig(rows=960, eval_rows=32, test_rows=32, users=60, length=law)
    write_synthetic(tmp_path / "log", log)
    means = {}
    for name, batching in {
        "fixed": {"kind": "fixed"},
        "bbs": {"kind": "bbs", "base": 4, "window": 5},
        "global": {"kind": "global"},
    }.items():
        files = {split: f"{split}.parquet" for split in ("train", "eval", "test")}
        config = {
            "run": {"device": "cpu"},
            "data": {
                "source": "parquet",
                "batch_size": 32,
                "parquet": {"root": str(tmp_path / "log"), **files, "shuffle": False, "batching": batching},
            },
            "features": parquet_features(log).model_dump(mode="json", exclude_defaults=True, exclude_none=True),
            "model": {"name": "din"},
            "train": {"steps": 15, "log_every": 5, "tensorboard": False},
            "parallel": {"dense": "ddp"},
        }
        scratch = tmp_path / f"{name}-results"
        scratch.mkdir()
        run_processes(2, run_training, {"config": config, "run_dir": str(tmp_path / name)}, scratch)
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert all(1 <= line["imbalance"] <= line["imbalance_max"] <= 2 for line in lines)
        means[name] = sum(line["imbalance"] for line in lines) / len(lines)
    assert means["fixed"] > 1.05
    assert means["bbs"] - 1 < 0.7 * (means["fixed"] - 1)
    assert means["global"] < 1.02
