"""Mesh, measurement, feed, evaluation, logs: the trainer's parts by themselves."""

from __future__ import annotations

import io
import itertools
import math
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import gem_core
import gem_core.train.measure as measure
from gem_core.batch import Batch
from gem_core.config import load_config, resolve
from gem_core.config.schema import Eval
from gem_core.errors import CheckpointError, ConfigError, DataError, DeviceError, RunError
from gem_core.metrics import Value
from gem_core.model.contract import ModelOutput
from gem_core.train import build
from gem_core.train.build import Parts, build_parts
from gem_core.train.builtin import Fp32Config, PlainGuard, SingleConfig, fp32, single
from gem_core.train.contract import RecipeContext, RunInfo
from gem_core.train.evaluate import Best, evaluate
from gem_core.train.feed import Feed, grouped
from gem_core.train.logs import Progress, result_lines
from gem_core.train.measure import Meter, Peak, peak, peak_resident
from gem_core.train.mesh import Mesh
from gem_core.train.pack import read_json
from gem_core.train.runfolder import clean
from gem_core.train.runtime import Runtime, choose_device, runtime

CPU = torch.device("cpu")


@pytest.mark.parametrize("world", [1, 2, 6, 8])
def test_every_factorisation_is_accepted_and_every_other_refused(world):
    for replicate, shard, expert in itertools.product([-1, 1, 2, 3, 4], repeat=3):
        degrees = (replicate, shard, expert)
        known = math.prod(d for d in degrees if d != -1)
        valid = (degrees.count(-1) == 0 and known == world) or (degrees.count(-1) == 1 and world % known == 0)
        if valid:
            mesh = Mesh(world, replicate, shard, expert)
            assert mesh.replicate * mesh.shard * mesh.expert == world == mesh.model * mesh.replica
            assert mesh.inferred >= {
                a for a in ("replicate", "shard", "expert") if dict(zip(("replicate", "shard", "expert"), degrees))[a] == -1
            }
        else:
            with pytest.raises(ConfigError):
                Mesh(world, replicate, shard, expert)


def test_a_wrong_mesh_is_refused_with_the_arithmetic():
    with pytest.raises(ConfigError, match="replicate 2 x shard 3 x expert 1: 6 is not the world of 8 processes"):
        Mesh(8, 2, 3)
    with pytest.raises(ConfigError, match="model -1 x replica 3: 3 does not divide the world of 8 processes"):
        Mesh(8, replica=3)
    with pytest.raises(ConfigError, match="only one degree of a side can be inferred"):
        Mesh(8, -1, -1)
    with pytest.raises(ConfigError, match="expert = 0 is no degree"):
        Mesh(8, expert=0)
    with pytest.raises(ConfigError, match="for one process, and 2 were started"):
        single(nn.Linear(1, 1), Mesh(2), SingleConfig())


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"WORLD_SIZE": "2", "RANK": "1"}, "WORLD_SIZE is 2, and MASTER_ADDR is not set"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, and RANK, MASTER_ADDR is not set"),
        ({"WORLD_SIZE": "two", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}, "the processes cannot meet: .*'two'"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1"}, "the processes cannot meet: .*MASTER_PORT"),
    ],
)
def test_processes_that_cannot_meet_do_not_train_alone(given: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RunError, match=told) as error, runtime(load_config(None, ["run.device=cpu"])):
        pass
    assert "torchrun" in error.value.fix


def test_a_device_that_is_not_there_is_an_error_not_a_fall_back():
    assert choose_device("cpu") == CPU
    if not torch.cuda.is_available():
        assert choose_device("auto") == CPU
        with pytest.raises(DeviceError, match="no usable CUDA device"):
            choose_device("cuda")


# Measurement


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells the peak of a process there")
def test_the_peak_of_memory_is_of_this_process_and_not_of_the_one_that_started_it():
    held = bytearray(400 << 20)
    held[::4096] = b"1" * len(held[::4096])
    code = (
        "from gem_core.train.measure import peak_resident; before = peak_resident(); x = b'1' * (100 << 20); print(before, peak_resident())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert before < peak_resident() - (50 << 20)
    assert after - before > 90 << 20


@pytest.mark.parametrize("given", ["my.toml", {"train": {"steps": 1}}, None])
def test_what_is_no_configuration_is_refused(given):
    with pytest.raises(ConfigError, match=r"(?s)takes a Config, not (str|dict|NoneType).*load_config\('my\.toml'\)"):
        gem_core.train(given)


def test_tables_larger_than_the_machine_are_refused_before_they_are_made(monkeypatch):
    """Each of them might be given: what kills the process is that all are filled."""
    resolved = resolve(load_config(None, ["run.device=cpu", "data.synthetic.rows=64"]))
    with runtime(resolved.config) as rt:
        tables = build_parts(resolved, rt).tables.table_set
        for room, fits in ((4 * tables.parameters, True), (4 * tables.parameters - 1, False), (None, True)):
            monkeypatch.setattr(build, "machine_memory", lambda room=room: room)
            with nullcontext() if fits else pytest.raises(DeviceError, match=r"(?s)tables take .* GiB.*largest table is '.*gemrec plan"):
                build_parts(resolved, rt)
    monkeypatch.setattr(build, "machine_memory", lambda: 11 * tables.parameters)
    build.check_room(tables, 2)
    with pytest.raises(DeviceError, match="in 3 processes"):
        build.check_room(tables, 3)


@pytest.mark.parametrize(
    ("device", "precisions", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", {"bf16", "fp32"}, 989.0),
        ("NVIDIA H200", {"bf16"}, 989.0),
        ("NVIDIA A100-SXM4-80GB", {"bf16"}, 312.0),
        ("NVIDIA B200", {"bf16", "fp32"}, 2250.0),
        ("NVIDIA GB200", {"bf16"}, 2500.0),
        ("NVIDIA H100 PCIe", {"bf16"}, None),
        ("NVIDIA H200", {"fp32"}, None),
        ("NVIDIA H200", {"bf16", "mxfp8"}, None),
        ("x86_64 CPU, 2 threads", {"bf16"}, None),
    ],
)
def test_peaks_are_named_and_missing_ones_have_a_reason(device, precisions, tflops):
    found = peak(device, precisions)
    assert found.flops == (None if tflops is None else tflops * 1e12)
    assert bool(found.reason) == (tflops is None)
    assert device in found.name
    if "mxfp8" in precisions:
        assert "quantised (mxfp8)" in found.reason


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    return now


def advance(clock, meter, seconds, phase):
    clock[0] += seconds
    meter.mark(phase)


def test_a_window_adds_up_phases_and_leaves_out_what_is_no_training(clock):
    meter = Meter(CPU, Peak("toy", 1000.0))
    meter.mark(None)
    for _ in range(2):
        for phase, seconds in (("data", 1.0), ("forward", 2.0), ("backward", 3.0), ("optimizer", 4.0)):
            advance(clock, meter, seconds, phase)
        meter.steps += 1
        meter.count(samples=30, tokens=500, flops=2500.0)
        advance(clock, meter, 60.0, None)  # an evaluation
    record = meter.window(world=4)
    assert record == {
        "samples_per_s": pytest.approx(60 * 4 / 20),
        "tokens_per_s": pytest.approx(1000 * 4 / 20),
        "mfu": pytest.approx(5000 / 20 / 1000),
        "tflops": pytest.approx(5000 / 20 / 1e12),
        "data_wait": pytest.approx(0.1),
        "data_s": pytest.approx(1),
        "forward_s": pytest.approx(2),
        "backward_s": pytest.approx(3),
        "optimizer_s": pytest.approx(4),
    }
    advance(clock, meter, 5.0, "forward")
    meter.steps += 1
    meter.count(10, 0, None)
    second = meter.window()
    assert second["samples_per_s"] == pytest.approx(2)
    assert second["mfu"] is None


def test_an_mfu_above_one_is_an_error(clock):
    meter = Meter(CPU, Peak("toy, bf16 dense", 100.0))
    meter.mark(None)
    advance(clock, meter, 1.0, "forward")
    meter.count(1, 1, 133.0)
    with pytest.raises(RunError, match=r"133%.*toy, bf16 dense"):
        meter.window()


# Feed


class Numbers:
    """Batches of sizes 1, 2, ..., ``n``; an epoch can be continued."""

    def __init__(self, n):
        self.n, self.at, self.epoch = n, 0, 0

    def __iter__(self):
        while self.at < self.n:
            self.at += 1
            yield Batch(size=self.at, weights=torch.full((self.at,), 0.5), labels=torch.zeros(self.at, 1), label_names=("y",))
        self.at, self.epoch = 0, self.epoch + 1

    def state_dict(self):
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.at, self.epoch = state["at"], state["epoch"]


def test_feed_counts_on_the_host_and_can_be_continued_at_every_position():
    whole = list(Feed(Numbers(4), CPU, epochs=3, flops=lambda b: 7.0 * b.size))
    assert [f.host.size for f in whole] == [1, 2, 3, 4] * 3
    assert [f.weight for f in whole[:4]] == [0.5, 1.0, 1.5, 2.0]
    assert whole[3].flops == 28.0
    for i, fed in enumerate(whole):
        feed = Feed(Numbers(4), CPU, epochs=3)
        feed.load_position(fed.position)
        assert [f.host.size for f in feed] == [f.host.size for f in whole[i + 1 :]], f"after batch {i}"


def test_an_empty_source_is_an_error_also_in_an_endless_run():
    with pytest.raises(DataError, match="yields no batch"):
        next(iter(Feed(Numbers(0), CPU, epochs=None)))
    feed = Feed(Numbers(0), CPU, epochs=None)
    feed.load_position({"epoch": 2, "source": {"at": 0, "epoch": 2}})
    with pytest.raises(DataError, match="yields no batch"):
        next(iter(feed))


def test_a_stop_while_an_endless_run_waits_for_data_ends_it():
    """Not the epoch: the source goes on from there, and is not asked again."""

    class Waits(Numbers):
        progress, asked = staticmethod(lambda: False), 0

        def __iter__(self):
            self.asked += 1
            assert self.asked == 1, "the source was asked again"
            yield from super().__iter__()
            while not self.progress():
                pass

    feed = Feed(Waits(2), CPU, epochs=None, stops=lambda: True)
    assert [f.host.size for f in feed] == [1, 2]
    assert (feed.stopped, feed.epoch) == (True, 0)


class Arrives(Numbers):
    """Waits for each batch from the third on until the consumer has had all before it, and ends its iteration where it is told to."""

    progress = staticmethod(lambda: False)

    def __init__(self, n, had):
        super().__init__(n)
        self.had, self.waits = had, 0

    def __iter__(self):
        while self.at < self.n:
            while self.at >= 2 and len(self.had) < self.at:
                self.waits += 1
                assert self.waits < 20, f"batch {self.at + 1} does not come before {self.at} is done, and only {self.had} are"
                if self.progress():
                    return
            self.at += 1
            yield Batch(size=self.at, weights=torch.full((self.at,), 0.5), labels=torch.zeros(self.at, 1), label_names=("y",))
        self.at, self.epoch = 0, self.epoch + 1


def on_a_device(feed: Feed) -> Feed:
    """The way of batches to a CUDA device, without one."""
    feed._stream = object()
    feed._copy = lambda host, imbalance: (feed._take(host, None, imbalance), None)
    feed._received = lambda fed, copied: fed
    return feed


@pytest.mark.parametrize("look_ahead", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_batch_that_is_there_is_not_held_until_the_next_one_arrives(device, look_ahead):
    had, positions, following = [], [], []
    feed = Feed(Arrives(5, had), CPU, epochs=2)
    for (fed,), then in grouped(on_a_device(feed) if device == "cuda" else feed, 1, look_ahead):
        had.append(fed.host.size)
        positions.append(fed.position)
        following.append(None if then is None else then.host.size)
    assert had == [1, 2, 3, 4, 5] * 2
    assert positions[:5] == [{"epoch": 0, "source": {"at": n, "epoch": 0}} for n in range(1, 6)]
    # of the first epoch; in the second nothing is waited for any more
    assert following == ([2, None, None, None, 1, 2, 3, 4, 5, None] if look_ahead else [None] * 10)


def test_a_stop_while_a_batch_is_held_ends_the_run_with_it():
    had = []
    feed = on_a_device(Feed(Arrives(5, had), CPU, epochs=2, stops=lambda: len(had) >= 2))
    for fed in feed:
        had.append(fed.host.size)
    assert (had, feed.stopped, feed.epoch) == ([1, 2, 3], True, 0)


# Evaluation


class Identity(nn.Module):
    def forward(self, batch):
        assert not self.training
        return ModelOutput(batch.dense, ("b", "a"))


def test_evaluation_pools_batches_and_puts_the_mode_back():
    torch.manual_seed(0)
    z, y = torch.randn(50, 2), (torch.rand(50, 2) < 0.4).float()

    class Two:
        def __init__(self, cuts):
            self.cuts = cuts

        def __iter__(self):
            for a, b in itertools.pairwise(self.cuts):
                yield Batch(size=b - a, dense=z[a:b], dense_names=("x", "y"), labels=y[a:b].flip(1), label_names=("a", "b"))

        def state_dict(self):
            return {}

    results = []
    for cuts in ([0, 50], [0, 1, 17, 50]):
        module = Identity()
        module.train()
        found, samples = evaluate(module, module, Two(cuts), Eval(metrics=("ne", "auc", "ece")), ("a", "b"), Runtime(CPU))
        assert module.training
        assert samples == 50
        results.append(found)
    for task in ("a", "b"):
        for name in ("ne", "auc", "ece"):
            assert results[0][task][name].value == pytest.approx(results[1][task][name].value, rel=1e-12)
    assert results[0]["a"]["bayes_ne"].value is None


def results(**values):
    return {"ctr": {name: Value(v) for name, v in values.items()}, "cvr": {"auc": Value(0.5)}}


def test_best_knows_what_better_is():
    tasks = ("ctr", "cvr")
    ne = Best.of(Eval(), tasks)
    assert [ne.update(results(ne=v), s) for s, v in enumerate((0.9, 0.95, None, 0.8))] == [True, False, False, True]
    assert (ne.step, ne.worse, ne.value) == (3, 0, 0.8)
    auc = Best.of(Eval(monitor="ctr.auc"), tasks)
    assert [auc.update(results(auc=v), s) for s, v in enumerate((0.6, 0.5, 0.7))] == [True, False, True]
    assert auc.worse == 0
    for _ in range(3):  # one class says nothing of the model, predictions that are not finite do
        assert not auc.update(results(auc=None), 4)
    assert auc.says_nothing(results(auc=None)) is not None
    assert (auc.worse, auc.step) == (0, 2)
    broken = {"ctr": {"auc": Value(None, "3 of the predictions are not finite", broken=True)}}
    assert auc.says_nothing(broken) is None
    assert not auc.update(broken, 5)
    assert not auc.update(results(auc=float("nan")), 6)
    assert auc.worse == 2
    fresh = Best.of(Eval(monitor="ctr.auc"), tasks)
    assert [fresh.update(results(auc=v), s) for s, v in enumerate((float("nan"), 0.4))] == [False, True]
    near_one = Best.of(Eval(monitor="calibration"), tasks)
    assert [near_one.update(results(calibration=v), s) for s, v in enumerate((0.5, 1.2, 0.9, 1.3))] == [True, True, True, False]
    again = Best.of(Eval(), tasks)
    again.load_state_dict(ne.state_dict())
    assert again == ne
    with pytest.raises(ConfigError, match="monitor = 'ne' is not evaluated"):
        Best.of(Eval(metrics=()), tasks)


def test_a_damaged_file_of_a_run_is_named_with_what_to_do(tmp_path):
    (tmp_path / "run.json").write_text("{")
    for name, fault in (("run.json", "is damaged"), ("meta.json", "cannot be read")):
        with pytest.raises(CheckpointError, match=f"{name} {fault}") as error:
            read_json(tmp_path / name)
        assert error.value.fix == "put it back from a copy, or use an older checkpoint"


# What people read


def test_result_lines_show_bayes_beside_the_model_and_say_why_values_are_missing():
    found = {"ctr": {"ne": Value(0.8), "bayes_ne": Value(0.7)}, "cvr": {"auc": Value(None, "no evaluated row has a positive label")}}
    first, second = result_lines(found)
    assert first == "ctr: ne 0.80000  Bayes NE 0.70000"
    assert second == "cvr: auc undefined  (auc: no evaluated row has a positive label)"


def test_progress_writes_plain_lines_where_there_is_no_terminal(capsys):
    run = RunInfo(config=None, directory=None, model=None, total_steps=10, rank=0, world=1, step=5)
    progress = Progress()
    progress.on_start(run)
    run.step = 6
    progress.on_step(run, None)
    record = {"loss": 0.25, "lr": 0.001, "samples_per_s": 1234.5, "mfu": None, "data_wait": 0.5, "skipped": 2}
    progress.on_step(run, record)
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert out.startswith("step 6/10  loss 0.25000  lr 0.001  1,23")
    assert "data wait 50%" in out
    assert "skipped 2" in out
    assert "left 0:00:0" in out


def test_progress_draws_a_bar_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "150")
    run = RunInfo(config=None, directory=None, model=None, total_steps=10, rank=0, world=1)
    progress = Progress()
    progress.on_start(run)
    for step in range(1, 11):
        run.step = step
        progress.on_step(run, {"loss": 0.5, "lr": 0.1} if step == 5 else None)
    progress.say("a line above of runs/[bold]:key:[/x]")
    progress.on_end(run, {})
    text = screen.getvalue()
    assert "10/10" in text
    assert "loss 0.50000" in text
    assert "a line above of runs/[bold]:key:[/x]" in text
    assert "\x1b[" in text


def test_clean_makes_json_of_what_is_not_finite():
    assert clean({"a": math.nan, "b": [math.inf, 1.0, (2, "x")], 3: None}) == {"a": None, "b": [None, 1.0, [2, "x"]], "3": None}


def test_fp32_changes_nothing_and_names_every_site():
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.LayerNorm(2))
    before = net(torch.ones(1, 2))
    guard = fp32(net, Fp32Config(), RecipeContext())
    assert torch.equal(net(torch.ones(1, 2)), before)
    assert [name for name, _, _ in guard.describe()] == ["0", "2"]


def test_table_parameters_are_told_apart_from_the_dense_part():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tables = nn.Embedding(10, 2)
            self.body = nn.Linear(2, 1)
            self.register_buffer("running", torch.zeros(1))
            self.register_buffer("constant", torch.zeros(1), persistent=False)

    model = Model()
    parts = Parts(model, model, model.tables, PlainGuard(()), Mesh(1))
    assert set(parts.dense_parameters()) == {"body.weight", "body.bias"}
    assert set(parts.dense_state()) == {"body.weight", "body.bias", "running"}
    assert len(parts.buffers()) == 1


def test_importing_the_package_imports_no_trainer():
    code = "import sys, gem_core.train; print('gem_core.train.trainer' in sys.modules, 'torchmetrics' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_a_profile_tells_exposed_communication_and_idle_time():
    from gem_core.train.profile import Event, summarise, text

    def kernel(name, start, end):
        return Event(name, start, end, True, 0.0)

    events = [
        Event("aten::mm", 0, 10_000, False, 10_000),
        kernel("gemm", 1000, 3000),
        kernel("gemm", 4000, 6000),
        kernel("ncclDevKernel_AllReduce", 2000, 5000),
        kernel("ncclDevKernel_AllReduce", 7000, 8000),
        kernel("add", 4500, 5500),
    ]
    found = summarise(events, steps=2)
    assert found["wall_ms"] == pytest.approx(5.0)
    assert found["busy_ms"] == pytest.approx(3.0)
    assert found["idle_ms"] == pytest.approx(2.0)
    assert found["communication_ms"] == pytest.approx(2.0)
    assert found["exposed_ms"] == pytest.approx(1.0)
    assert found["top"][0] == {"name": "gemm", "calls": 1.0, "ms": pytest.approx(2.0), "share": pytest.approx(4 / 9)}
    assert "exposed 1.00" in text(found)
    assert found["communication"] == [{"kind": "AllReduce", "ms": pytest.approx(2.0), "exposed_ms": pytest.approx(1.0)}]
    assert found["contention"] == {"beside_ms": 0.0, "slowdown": None, "compared": None}
    host = summarise(events[:1], steps=1)
    assert host["busy_ms"] is None
    assert host["top"][0]["name"] == "aten::mm"


def test_a_profile_tells_where_kernels_are_launched_from():
    from gem_core.train import profile

    def operator(name, parent=None, *durations):
        return SimpleNamespace(name=name, cpu_parent=parent, kernels=[SimpleNamespace(duration=d) for d in durations])

    backward = operator("autograd::engine::evaluate_function: MmBackward0")
    op = operator("gem::norm_linear")
    events = [backward, operator("aten::mm", operator("MmBackward0", backward), 100.0, 50.0), operator("aten::mm", backward, 50.0)]
    events += [op, operator("aten::copy_", operator("aten::to", op), 10.0), operator("aten::copy_", None, 4.0)]
    assert profile.origins(events, 2) == [
        {"origin": "MmBackward0 > aten::mm", "launches": 1.5, "ms": 0.1},
        {"origin": "gem::norm_linear > aten::copy_", "launches": 0.5, "ms": 0.005},
        {"origin": "aten::copy_", "launches": 0.5, "ms": 0.002},
    ]
    shown = profile.text({**profile.summarise([], 1), "origins": profile.origins(events, 2)})
    assert "    0.100             1.5  MmBackward0 > aten::mm" in shown


def test_a_profile_tells_what_kernels_lose_beside_communication():
    from gem_core.train.profile import Event, summarise, text

    def kernels(name, start, times):
        return [Event(name, start + 1000 * i, start + 1000 * i + time, True, 0.0) for i, time in enumerate(times)]

    gather = [
        Event("ncclDevKernel_AllGather_RING", 10_000, 20_000, True, 0.0),
        Event("Memcpy PtoP (Device -> Device)", 15_000, 22_000, True, 0.0),
    ]
    one_shape = [*kernels("gemm", 0, [400, 404, 396]), *kernels("gemm", 11_000, [500, 520])]
    many_shapes = [*kernels("jagged", 4000, [100, 900]), *kernels("jagged", 13_000, [300])]
    half = kernels("half", 9900, [200])
    found = summarise([*gather, *one_shape, *many_shapes, *half], steps=1)
    assert found["contention"] == {
        "beside_ms": pytest.approx(1.32),
        "slowdown": pytest.approx(1020 / 800),
        "compared": pytest.approx(1020 / 1320),
    }
    kinds = {row["kind"]: (row["ms"], row["exposed_ms"]) for row in found["communication"]}
    assert kinds == {
        "AllGather": (pytest.approx(10.0), pytest.approx(10.0 - 1.02 - 0.3 - 0.1)),
        "Memcpy PtoP": (pytest.approx(7.0), pytest.approx(7.0)),
    }
    assert "kernels beside it take x1.275" in text(found)
