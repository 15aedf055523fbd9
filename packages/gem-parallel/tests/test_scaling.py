"""The ladder `scaling`: which rows there are, what the planner says of each, and a run in eight processes on the CPU."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from gem_core.bench.ladder import climb
from gem_core.config import load_config
from gem_core.train.mesh import Mesh
from gem_parallel.bench import scaling

CLUSTER = Path(__file__).parents[3] / "docs" / "examples" / "clusters" / "h200-x8-host.toml"
SMALL = [
    'run.device="cpu"', 'data.source="random"', 'data.random.preset="tiny"', 'model.preset="tiny"', "model.layers=1",
    "train.tensorboard=false",
]  # fmt: skip


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_every_row_is_a_mesh_of_its_processes(devices, cuda, monkeypatch):
    monkeypatch.setattr(scaling.torch.cuda, "is_available", lambda: cuda)
    config = load_config(None, SMALL[1:])
    rows = scaling.rows(config, devices)
    assert rows[0].gpus == 1
    assert {row.gpus for row in rows} == {n for n in (1, 2, 4, 8) if n <= devices}
    assert len({row.name for row in rows}) == len(rows)
    if devices > 1:
        assert sum(row.gpus == devices for row in rows) == (12 if cuda else 8)
    for row in rows:
        p = load_config(None, [*SMALL[1:], *row.overrides]).parallel
        mesh = Mesh(row.gpus, p.replicate, p.shard, p.expert, p.model, p.replica)
        assert mesh.world == row.gpus
        assert p.timeout_s <= 30 or row.gpus == 1
    text = str(rows)
    wanted = (
        "replicate=2",
        "expert=2",
        "replica=2",
        "copy-engine",
        *(("fully_sharded=true", "torchrec-2d", "capture=true") if cuda else ()),
    )
    assert devices == 1 or all(word in text for word in wanted)


def test_eight_processes_on_the_cpu(tmp_path):
    config = tmp_path / "c.toml"
    config.write_text("[run]\n")
    said = []
    done = climb(
        str(config), "scaling", preset="tiny", overrides=SMALL, rows=["1", "8: fully sharded, copy engine"], batch_size=4, steps=1,
        warmup=1, budget_s=200, row_limit_s=150, out=tmp_path, devices=8, cluster=CLUSTER, say=said.append,
    )  # fmt: skip
    alone, eight = done
    assert "error" not in alone, alone
    assert "error" not in eight, eight
    assert eight["world"] == 8
    assert all(math.isfinite(loss) for loss in eight["losses"])
    assert eight["scaling"] == pytest.approx(eight["samples_per_s"] / 8 / alone["samples_per_s"])
    assert eight["imbalance"] >= 1.0
    assert eight["profile"]["steps"] == 3
    assert alone["predicted"]["step_ms"] > 0
    assert eight["predicted"]["memory_bytes"] > 0
    assert "predicted ms" in said[0]
    assert len(said) == 3
    stored = json.loads((tmp_path / "train-tiny-scaling.json").read_text())
    assert [row["row"] for row in stored["rows"]] == ["1", "8: fully sharded, copy engine"]
    assert "<line" in (tmp_path / "train-tiny-scaling.svg").read_text()


def test_time_that_is_up_starts_no_row(tmp_path):
    config = tmp_path / "c.toml"
    config.write_text("[run]\n")
    done = climb(str(config), "scaling", preset="tiny", overrides=SMALL, batch_size=4, budget_s=10, devices=8, say=lambda line: None)
    assert len(done) == 1 + 2 + 2 + 8
    assert all("time is up" in row["error"] for row in done)
