"""`gemrec bench train` and `bench local`: what they record, how rows fail, and that the numbers are of real events."""

from __future__ import annotations

import json
import re
import time

import pytest
import torch

from gem_core.bench import ceilings, ladder, local, overheads, page, step
from gem_core.bench.checkpoint import costs
from gem_core.cli import main
from gem_core.config import config_from_dict, resolve
from gem_core.errors import ConfigError, DeviceError, PluginError, RunError
from gem_core.hookspecs import LadderSpec
from gem_core.train.build import build_parts
from gem_core.train.runtime import Runtime


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
    fastest, slowest = found["step_ms_range"]
    assert fastest <= found["step_ms"] <= slowest
    assert 0.5 * 16e3 / slowest < found["samples_per_s"] < 1.5 * 16e3 / fastest
    assert len(found["losses"]) == 7
    assert found["wasted"] == 0.0
    assert found["mfu"] is None
    assert "not known" in found["mfu_peak"]["reason"]


def test_a_step_that_a_cpu_has_no_memory_for_is_refused_with_what_it_has_memory_for(monkeypatch):
    many = config().model_copy(update={"data": config().data.model_copy(update={"batch_size": 512})})
    monkeypatch.setattr(local, "machine_memory", lambda: 6 * 2**20)
    with pytest.raises(DeviceError, match=r"a step of 512 samples takes at least 0\.0 GiB") as refused:
        local.measure(many, repeats=1)
    said = re.search(r"to less than (\d+)", str(refused.value))
    assert said is not None
    fewer = int(0.8 * int(said[1]))
    assert 16 < fewer < 400
    less = many.model_copy(update={"data": many.data.model_copy(update={"batch_size": fewer})})
    assert local.measure(less, repeats=1)["samples"] == fewer
    monkeypatch.setattr(local, "machine_memory", lambda: 2**20)
    with pytest.raises(DeviceError, match="measure a smaller preset"):
        local.measure(many, repeats=1)


def test_a_window_in_which_a_captured_step_recorded_is_repeated(monkeypatch):
    recorded = iter([0, 1, 1, 1, 1, 1])
    monkeypatch.setattr(step.TrainStep, "news", property(lambda _self: next(recorded)))
    found = step.measure(config(), steps=6, warmup=1)
    assert found["repeated_windows"] == 1
    assert len(found["losses"]) == 1 + 5 + 5 + 1


def test_padding_is_waste_and_adds_no_flops():
    plain, padded = (step.measure(config(padded=p), steps=1, warmup=1) for p in (False, True))
    assert padded["wasted"] > 0.3
    flops = [m["tflops"] * m["step_ms"] for m in (plain, padded)]
    assert flops[0] == pytest.approx(flops[1], rel=0.02)


def test_a_batch_is_cut_into_micro_batches_of_at_most_so_many_samples():
    assert ladder.Row("whole").cut(512) == (512, 1)
    assert ladder.Row("cut", at_once=32).cut(512) == (32, 16)
    assert ladder.Row("cut", at_once=128).cut(200) == (100, 2)


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
    layers = {"features", "events", "pffn", "attention", "pooling", "interaction", "heads"}
    assert set(parts) == layers | {"tables", "optimizer"}
    assert {name for name, p in parts.items() if p["layer"]} == layers
    assert all(p["total_ms"] > 0 and p["floor_ms"] > 0 for p in parts.values())
    assert found["floors_s"] * 1e3 == pytest.approx(sum(p["floor_ms"] for p in parts.values()))
    assert parts["optimizer"]["bytes"] == 28 * found["parameters"]["dense"]
    # of all looked-up rows the features' part reads those of samples alone: 8 tables, 16 samples, 8 columns
    model = build_parts(resolve(config()), Runtime(torch.device("cpu"))).model
    read = 8 * 16 * 8 + sum(p.numel() for p in model.features.parameters())
    assert parts["features"]["bytes"] == 4 * (3 * read + 2 * 16 * model.features.count * 16)
    assert found["local_mfu"] is None
    local.write(found, tmp_path, "tiny")
    told = (tmp_path / "local-tiny.md").read_text()
    assert "| attention | 1 |" in told
    assert f"(the best one {found['best_gemm_tflops']:.0f})" in told
    assert "| step | | |" in told
    assert "not captured" in told
    # a step has all parts, and more: between a half, on a busy machine, and many times their time
    assert 0.3 < found["step_s"] / found["parts_s"] < 50
    assert found["step_floor_share"] == pytest.approx(found["floors_s"] / found["step_s"])
    assert found["step_floor_share_by_definition"] >= found["step_floor_share"]
    assert all(p["least_flops"] <= p["flops"] for p in parts.values())


def test_ceilings_are_rates_of_the_same_product_and_copy(monkeypatch):
    """G is what stretches of products have, the best one what a single one has; the copy counts what is read and what is written."""
    taken = {"mm": 0.5, "neg": 0.25}
    monkeypatch.setattr(ceilings, "seconds", lambda run, device, repeats, warmup=2: [taken[_called(run)]] * 2 + [0.1])
    found = ceilings.ceilings(torch.device("cpu"))
    assert found.gemm == pytest.approx(2 * 512**3 / 0.5 / 1e12)
    assert found.best_gemm == pytest.approx(2 * 512**3 / 0.1 / 1e12)
    assert found.copy == pytest.approx(2 * 2**24 / 0.25 / 1e12)


def _called(run):
    return next(name for name in ("mm", "neg") if name in run.__code__.co_names)


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


def test_what_metrics_and_data_add_is_told_by_rounds():
    seconds = {"bare": [1.0, 2.0, 1.0], "logged": [1.01, 2.04, 1.01], "fed": [1.01 * 1.1, 2.04, 1.01 * 1.2]}
    found = overheads.shares(seconds)
    assert found["step_ms"] == 1000
    assert found["metrics"] == pytest.approx(0.01)
    assert found["metrics_range"] == pytest.approx([0.01, 0.02])
    assert found["data"] == pytest.approx(0.1)
    assert found["data_range"] == pytest.approx([0.0, 0.2])


def test_a_slow_source_and_a_slow_log_are_found(tmp_path, monkeypatch):
    """The trainer's own loop is measured: what a log takes and what a source takes land in their own rows."""
    overrides = {"train": {"log_every": 2, "tensorboard": False, "steps": 1000}, "eval": {"max_batches": 1, "every": 1000}}
    options = config().model_dump(exclude_defaults=True) | overrides
    plain = overheads.Probe(config_from_dict(options), tmp_path / "a", steps=4, rounds=2, warmup=2)
    calls = {"log": 0, "read": 0}
    record, following = overheads.Trainer._log_record, overheads.grouped

    def slow_log(self, lr):
        calls["log"] += 1
        time.sleep(0.08)
        return record(self, lr)

    def slow_source(*arguments):
        for group in following(*arguments):
            calls["read"] += 1
            time.sleep(0.08)
            yield group

    monkeypatch.setattr(overheads.Trainer, "_log_record", slow_log)
    monkeypatch.setattr(overheads, "grouped", slow_source)
    with pytest.raises(RunError, match="measured"):
        plain.run()
    bare, logged, fed = (min(plain.seconds[k]) for k in ("bare", "logged", "fed"))
    assert logged - bare > 0.015  # 0.04 and 0.08, on a host that others use too
    assert fed - logged > 0.03
    assert calls["read"] == 1 + 2 + 2 * (overheads.LEAD + 4)
    assert len(plain.waits.seen) == 4
    assert min(plain.waits.seen) > 0.2


def test_rows_that_compute_something_else_are_found():
    def row(name, loss=0.7, norm=2.0, reason=None, kind="equal"):
        return {"row": name, "mfu_peak": {"reason": reason}, "check": {kind: {"loss": loss, "grad_norm": norm}}}

    quantised = "the run is quantised (fp8): one peak would be a lie"
    cases = [
        (row("same", 0.7005, 2.04), False),
        (row("other loss", 0.705), True),
        (row("other gradients", norm=2.2), True),
        (row("quantised", 0.705, 2.2, quantised), False),
        (row("quantised, wrong", 0.71, 2.2, quantised), True),
        (row("not a number", float("nan")), True),
        (row("first of its kind", 9.0, kind="jagged"), False),
        ({"row": "failed", "error": "x"}, False),
    ]
    for record, wrong in cases:
        records = [{"row": "failed", "error": "x"}, row("first"), row("second", 0.6), record]
        ladder._compare(records)
        assert ("differs" in record) == wrong, record["row"]


def test_a_row_is_checked_on_the_same_samples_whatever_its_batches_are():
    found = [
        step.measure(config(**options), steps=1, warmup=1)["check"]
        for options in ({}, {"padded": True}, {"window": 4})
    ]  # fmt: skip
    assert set(found[0]) == {"equal", "jagged"}
    assert set(found[1]) == {"equal"}
    assert found[1]["equal"] == pytest.approx(found[0]["equal"], rel=1e-6)
    assert found[2] == found[0]
    assert found[0]["equal"] != found[0]["jagged"]
    assert found[0]["jagged"]["grad_norm"] > 0


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [
        ("train", "--steps", "0"),
        ("train", "--warmup", "-1"),
        ("train", "--batch-size", "0"),
        ("train", "--cluster", "gone.toml"),
        ("local", "--repeats", "0"),
        ("local", "--batch-size", "0"),
    ],
)
def test_options_that_measure_nothing_are_refused(command, option, value, capsys):
    assert main(["bench", command, "tiny", option, value]) == 2
    assert option in capsys.readouterr().err


def test_a_ladder_of_which_no_row_ran_is_a_failure(tmp_path, capsys):
    """A table of errors alone must not look like a result to a script."""
    arguments = ["--row", "the core's tables", "--steps", "1", "--warmup", "0", "--set", "run.device=cpu", "--out", str(tmp_path)]
    assert main(["bench", "train", "tiny", *arguments]) == 1
    assert "no row was measured" in capsys.readouterr().err
    (row,) = json.loads((tmp_path / "train-tiny.json").read_text())["rows"]
    assert "only CUDA devices" in row["error"]


def test_a_result_and_its_page_are_left_beside_each_other(tmp_path):
    result = {"device": "G", "versions": {"torch": "2", "python": "3"}, "rows": [{"a": 1.23456, "b": None}, {"a": 12345.6, "c": "x"}]}
    text = page.table(result["rows"])
    assert text.splitlines() == [
        "| a       | b | c |",
        "|---------|---|---|",
        "| 1.23    |   |   |",
        "| 12345.6 |   | x |",
    ]
    page.write(tmp_path / "new", "found", result, page.machine(result) + "\n")
    assert json.loads((tmp_path / "new" / "found.json").read_text()) == result
    assert (tmp_path / "new" / "found.md").read_text() == "G; torch 2, python 3\n"
