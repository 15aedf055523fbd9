"""The retrieval configurations under docs/examples build what they say, and their driver trains, tests and writes its table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gem_core.config import load_config, resolve
from gem_core.plugins import manager
from gem_core.train.build import task_names

ROOT = Path(__file__).parents[1]
DATA = Path(os.environ.get("GEM_TEST_DATA") or ROOT.parent / "shared" / "data")
ITEMS = {"ml-1m": 3_416, "s3rec": 12_101}


CONFIGS = [p for p in sorted((ROOT / "docs/examples/configs").glob("*.toml")) if "[features.next_item]" in p.read_text()]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_retrieval_configurations_build(path):
    config = resolve(load_config(path)).config
    assert config.run.name == path.stem
    assert task_names(config.features) == ("next_item",)
    items = next(n for prefix, n in ITEMS.items() if path.stem.startswith(prefix))
    with torch.device("meta"):
        model = manager().find("model", config.model.name).build(resolve(config).model, config.features)
    assert model.items == items + 1
    assert model.pad == 0
    assert isinstance(model.out, torch.nn.Identity), "states and items have one width"
    assert config.train.tables.kind == "adamw"


@pytest.mark.data
@pytest.mark.slow
def test_the_driver_trains_tests_and_keeps_other_rows(tmp_path):
    if not (DATA / "s3rec" / "LastFM.txt").is_file():
        pytest.skip(f"{DATA / 's3rec'} is not there (set GEM_TEST_DATA)")
    out = tmp_path / "out"
    out.mkdir()
    kept = {"row": "gem Yelp", "seed": 0, "command": "c", "device": "d", "versions": {"torch": "1"}, "commit": "e"}
    kept |= {"test": dict.fromkeys(("hr@10", "ndcg@10", "hr@50", "ndcg@50", "mrr"), 0.5)}
    kept |= {"standard_error": kept["test"]}
    (out / "retrieval-s3rec.json").write_text(json.dumps({"runs": [kept]}))
    words = ["s3rec", "--data", DATA, "--models", "sasrec LastFM", "--seeds", "4", "--work", tmp_path / "work", "--out", out]
    small = ["train.steps=2", "run.device=cpu", "model.dim=16", "model.embedding_dim=16", "model.ffn=16"]
    command = [sys.executable, str(ROOT / "docs/benchmarks/retrieval.py"), *map(str, words), *(w for s in small for w in ("--set", s))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = json.loads((out / "retrieval-s3rec.json").read_text())["runs"]
    assert [(r["row"], r["seed"]) for r in runs] == [("gem Yelp", 0), ("sasrec LastFM", 4)]
    own = next(r for r in runs if r["row"] == "sasrec LastFM")
    assert own["steps"] == 2
    assert 0 < own["test"]["hr@50"] < 1
    table = (out / "retrieval-s3rec.md").read_text()
    assert "| sasrec LastFM |" in table
    assert "| gem Yelp | 0.5000" in table
