"""`gemrec bench train` and `bench local`: what they record, how rows fail, and that the numbers are of real events."""

from __future__ import annotations

import json

import pytest
import torch

from gem_core.bench import ladder, local, step
from gem_core.bench.checkpoint import costs
from gem_core.cli import main
from gem_core.config import config_from_dict
from gem_core.errors import ConfigError, PluginError, RunError
from gem_core.hookspecs import LadderSpec


def config(**data):
    model = {"layers": 1, "dim": 16, "embedding_dim": 8, "sequence": {"dim": 16, "heads": 2}, "interaction": {"tokens": 4}}
    law = {"law": "lognormal", "mean": 8.0, "max": 32}
    return config_from_dict(
        {
            "run": {"device": "cpu"},
            "data": {"source": "random", "batch_size": 16, "random": {"preset": "tiny", "length": law, **data}},
            "model": model,
            "kernels": {"default": "reference"},
        }
    )


def test_a_step_is_measured():
    found = step.measure(config(), steps=6, warmup=1)
    assert found["step_ms_range"][0] <= found["step_ms"] <= found["step_ms_range"][1]
    assert found["samples_per_s"] == pytest.approx(16e3 / found["step_ms"], rel=0.5)
    assert len(found["losses"]) == 7
    assert found["wasted"] == 0.0
    assert found["mfu"] is None
    assert "not known" in found["mfu_peak"]["reason"]


def test_padding_is_waste_and_adds_no_flops():
    plain, padded = (step.measure(config(padded=p), steps=1, warmup=1) for p in (False, True))
    assert padded["wasted"] > 0.3
    flops = [m["tflops"] * m["step_ms"] for m in (plain, padded)]
    assert flops[0] == pytest.approx(flops[1], rel=0.02)


def test_rows_are_written_one_by_one_and_a_failing_one_tells_why(tmp_path, monkeypatch):
    rows = (ladder.Row("good"), ladder.Row("bad", ("model.sequence.heads=3",)), ladder.Row("late"))
    spec = LadderSpec("test", lambda config, devices: rows, lambda config, gpus, cluster: {"step_ms": 50.0, "memory_bytes": 2.0**30})
    path = tmp_path / "c.toml"
    path.write_text(
        '[run]\ndevice="cpu"\n[data]\nsource="random"\n[data.random]\npreset="tiny"\n[model]\nlayers=1\n[model.sequence]\ndim=32\nheads=2\n'
    )
    clock = iter([0.0, 0.0, 0.0, 1.0, 1.0, 1e6, 1e6])
    monkeypatch.setattr(ladder.time, "monotonic", lambda: next(clock))
    said = []
    done = ladder.climb(str(path), spec, preset="tiny", batch_size=8, steps=1, warmup=1, out=tmp_path, cluster=tmp_path, say=said.append)
    assert done[0]["step_ms"] > 0
    assert "heads 3" in done[1]["error"]
    assert "time is up" in done[2]["error"]
    assert len(said) == 4
    assert "predicted ms" in said[0]
    assert f"50.0 ({50 / done[0]['step_ms'] - 1:+.0%})" in said[1]
    assert (tmp_path / "train-tiny-test.svg").read_text().count("<line") == 1
    stored = json.loads((tmp_path / "train-tiny-test.json").read_text())
    assert [r["row"] for r in stored["rows"]] == ["good", "bad", "late"]
    assert "| good | 1 |" in (tmp_path / "train-tiny-test.md").read_text()


def test_unknown_ladders_and_rows_are_errors():
    with pytest.raises(PluginError, match="no ladder called 'x'"):
        ladder.climb(None, "x", preset="tiny")
    with pytest.raises(ConfigError, match="no row 'y'"):
        ladder.climb(None, "efficiency", preset="tiny", rows=["y"])


def test_parts_cover_the_models_flops(tmp_path):
    found = local.measure(config(), repeats=1)
    parts = {p["part"]: p for p in found["parts"]}
    assert set(parts) == {"features", "events", "pffn", "attention", "pooling", "interaction", "heads"}
    assert all(p["total_ms"] > 0 and p["floor_ms"] > 0 for p in parts.values())
    assert found["local_mfu"] is None
    local.write(found, tmp_path, "tiny")
    assert "| attention | 1 |" in (tmp_path / "local-tiny.md").read_text()


def test_parts_run_under_the_recipes_autocast():
    calls = {}

    class Part(torch.nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            calls.setdefault("dtypes", []).append(y.dtype)
            return y

    model = torch.nn.ModuleDict({"heads": Part(4, 4)})

    def run():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model["heads"](torch.randn(2, 4))

    recorded = local._record(model, torch.device("cpu"), run)
    recorded["heads"][0](torch.device("cpu"))
    assert calls["dtypes"] == [torch.bfloat16, torch.bfloat16]


def test_another_model_has_no_known_parts():
    other = config_from_dict({"data": {"source": "random", "random": {"preset": "tiny"}}, "model": {"name": "din"}})
    with pytest.raises(ConfigError, match="parts of the model 'din'"):
        local.measure(other)


def test_the_command_prints_a_table(tmp_path, capsys):
    words = ["bench", "local", "tiny", "--batch-size", "4", "--repeats", "1", "--set", "kernels.default=reference", "--out", str(tmp_path)]
    assert main(words) == 0
    assert "| attention |" in capsys.readouterr().out


def test_what_a_checkpoint_costs_is_what_its_steps_take_beyond_the_others():
    seconds = [0.1] * 100
    seconds[39] = 0.12  # step 40 saves: it waits for the device
    seconds[40] = 0.6  # the stall falls into the step after
    for i in range(41, 50):
        seconds[i] = 0.11  # the writer runs
    ends = [sum(seconds[: i + 1]) for i in range(100)]
    saves = [{"step": 40, "seen_after": 50, "stall_s": 0.5, "bytes": 10}]
    found = costs(ends, saves)
    assert found["step_ms"] == pytest.approx(100)
    (save,) = found["saves"]
    assert save["lost_s"] == pytest.approx(0.02 + 0.5 + 9 * 0.01)
    assert save["share"] == pytest.approx(0.61 / 60)
    assert save["longest_step_ms"] == pytest.approx(600)
    assert save["step_ms"] == pytest.approx((9 * 110 + 100) / 10)
    with pytest.raises(RunError, match="still being written"):
        costs(ends, [saves[0], {**saves[0], "step": 50, "seen_after": 60}])
    with pytest.raises(RunError, match="still being written"):
        costs(ends, [])
