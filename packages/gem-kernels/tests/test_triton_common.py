"""What the Triton implementations share: configuration tables and their tuning."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
import time
from importlib import resources
from pathlib import Path

import pytest

from gem_core.errors import DeviceError
from gem_kernels.triton.attention.plan import Plan
from gem_kernels.triton.common import configs, tune
from gem_kernels.triton.common.device import DeviceInfo

CHIP = DeviceInfo("sm_77", "Some Chip", 10, 100_000, True)
FACTS = (("d", 64), ("op", "silu"))
TABLES = resources.files("gem_kernels.triton").joinpath("configs")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEM_CACHE_DIR", str(tmp_path))
    forget(monkeypatch)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a new process does not know."""
    monkeypatch.setattr(tune, "_loaded", {})
    monkeypatch.setattr(configs, "_chosen", {})


def test_matching() -> None:
    facts = {"d": 64, "op": "silu", "bias": False}
    assert configs.matches({"d": [32, 64], "op": ["silu", "gelu"], "bias": False}, facts)
    assert not configs.matches({"d": [65, 128]}, facts)
    assert not configs.matches({"op": "gelu"}, facts)
    with pytest.raises(KeyError):
        configs.matches({"misspelt": 1}, facts)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_committed_attention_rules(arch: str) -> None:
    """Every rule speaks of facts that attention problems have, and gives what its kernel needs."""
    problem = Plan(
        softmax=True, heads=4, kv_heads=4, d=128, dv=128, scale=1.0, out_scale=1.0, activation="raw", causal=False, window=False, left=-1,
        right=-1, targets=False, context=False, bias=False, time=False, shared=False, broadcast=False, q_bound=1024, k_bound=1024,
        dtype="bf16", deterministic=False,
    )  # fmt: skip
    known = dict(problem.facts)
    tile = {"BLOCK_M", "BLOCK_N", "TMA", "PERSISTENT", "num_warps", "num_stages"}
    for rule in json.loads(TABLES.joinpath(arch, "attention.json").read_text())["rules"]:
        assert set(rule["when"]) <= set(known), rule
        wanted = {"SCHEME"} if rule["kernel"] == "attention.backward" else tile
        if rule["kernel"].startswith("attention.forward"):
            wanted = wanted | {"RESIDENT", "CHUNK"}
        assert set(rule["use"]) - {"maxnreg"} == wanted, rule


def candidates() -> list[dict]:
    return [{"BLOCK": 64}, {"BLOCK": 128}, {"BLOCK": 32}]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """Runs instead of measuring: the wider the block, the faster."""
    seen: list[dict] = []

    def median(run: object) -> float:
        run()
        return 1.0 / seen[-1]["BLOCK"]

    monkeypatch.setattr(tune, "_median_ms", median)
    return seen


def test_a_chip_without_a_table_is_measured_once(timed: list[dict], monkeypatch: pytest.MonkeyPatch) -> None:
    assert configs.choose("made_up.kernel", FACTS, CHIP, candidates, timed.append) == {"BLOCK": 128}
    assert len(timed) == 6
    assert configs.choose("made_up.kernel", FACTS, CHIP, candidates, timed.append) == {"BLOCK": 128}
    forget(monkeypatch)
    assert configs.choose("made_up.kernel", FACTS, CHIP, candidates, timed.append) == {"BLOCK": 128}
    assert len(timed) == 6
    stored = json.loads(tune.cache_file(CHIP).read_text())
    assert stored["made_up.kernel|d=64|op=silu"]["use"] == {"BLOCK": 128}


def test_what_another_version_measured_is_not_taken(timed: list[dict], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel had other keys, which this one's launch would miss."""
    path = tune.cache_file(CHIP)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"made_up.kernel|d=64|op=silu": {"use": {"WIDTH": 256}, "ms": 1.0}}))
    assert configs.choose("made_up.kernel", FACTS, CHIP, candidates, timed.append) == {"BLOCK": 128}
    forget(monkeypatch)
    assert configs.choose("made_up.kernel", FACTS, CHIP, candidates, timed.append) == {"BLOCK": 128}
    assert len(timed) == 6


def test_tuning_measures_anew_and_reports(timed: list[dict]) -> None:
    with tune.tuning() as timings:
        configs.choose("made_up.kernel", FACTS, CHIP, candidates, timed.append)
        configs.choose("made_up.kernel", FACTS, CHIP, candidates, timed.append)
    assert len(timed) == 6
    assert timings[0]["use"] == {"BLOCK": 128}
    assert len(timings[0]["tried"]) == 3


def test_measuring_inside_a_measurement(timed: list[dict]) -> None:
    """A scheme is timed as a whole while its kernels are tuned: the lock is the process's own already."""

    def outer(config: dict) -> None:
        timed.append(configs.choose("made_up.inner", FACTS, CHIP, candidates, timed.append) | config)

    assert configs.choose("made_up.outer", FACTS, CHIP, lambda: [{"SCHEME": "a"}, {"SCHEME": "b"}], outer)["SCHEME"] == "a"
    assert set(json.loads(tune.cache_file(CHIP).read_text())) == {"made_up.inner|d=64|op=silu", "made_up.outer|d=64|op=silu"}


def test_candidates_that_do_not_fit_are_passed_over(timed: list[dict]) -> None:
    from triton.runtime.errors import OutOfResources

    def run(config: dict) -> None:
        if config["BLOCK"] > 64:
            raise OutOfResources(300_000, 200_000, "shared memory")
        timed.append(config)

    assert configs.choose("made_up.kernel", FACTS, CHIP, candidates, run) == {"BLOCK": 64}
    with pytest.raises(DeviceError, match="no tile configuration"):
        configs.choose("made_up.other", FACTS, CHIP, lambda: [{"BLOCK": 128}], run)


def _measure_slowly(folder: str, started: float) -> tuple[int, dict]:
    import os

    os.environ["GEM_CACHE_DIR"] = folder
    runs: list[dict] = []
    tune._median_ms = lambda run: (run(), time.sleep(0.05), 1.0 / runs[-1]["BLOCK"])[2]
    time.sleep(max(0.0, started - time.time()))
    found = configs.choose("made_up.kernel", FACTS, CHIP, candidates, runs.append)
    return len(runs), found


def test_many_processes_measure_once(tmp_path: Path) -> None:
    """Of processes that start together one measures; all get its answer."""
    with multiprocessing.get_context("fork").Pool(4) as pool:
        results = pool.starmap(_measure_slowly, [(str(tmp_path), time.time() + 0.5)] * 4)
    assert [found for _, found in results] == [{"BLOCK": 128}] * 4
    assert sum(runs > 0 for runs, _ in results) == 1


KERNELS = """
import triton.language as tl
from triton.runtime.jit import JITFunction

BIG = tl.constexpr(7)

def helper(x):
    return x * BIG

helper = JITFunction(helper)

def first(at):
    tl.store(at, helper(tl.load(at)))

def second(at):
    tl.store(at, helper(2.0))

first, second = JITFunction(first), JITFunction(second)
"""


def test_hashes_do_not_depend_on_what_was_hashed_before(tmp_path: Path) -> None:
    """Kernels that share a function with a constant, in either order: what one process compiled, another finds."""
    pytest.importorskip("triton")
    from gem_kernels.triton.common.launch import settle

    file = tmp_path / "kernels.py"
    file.write_text(KERNELS)
    found = []
    for order in (("first", "second"), ("second", "first")):
        made = importlib.util.spec_from_file_location("kernels", file)
        module = importlib.util.module_from_spec(made)
        made.loader.exec_module(module)
        for name in order:
            settle(getattr(module, name))
        found.append((module.first.cache_key, module.second.cache_key))
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


KEY = """
from triton.runtime import cache
own = cache.triton_key
from gem_kernels.triton.common.triton_key import keep
keep()
print(cache.triton_key(), own.cache_info().misses, sep="\\n")
"""


def test_tritons_key_is_worked_out_once_a_machine(tmp_path: Path) -> None:
    """The second process finds what the first one, which hashed Triton's files, has left, and hashes nothing."""
    cache = pytest.importorskip("triton.runtime.cache")
    environment, found = {**os.environ, "GEM_CACHE_DIR": str(tmp_path)}, []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", KEY], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.splitlines())
    key = cache.triton_key()
    assert found == [[key, "1"], [key, "0"]]
    (file,) = (tmp_path / "triton").iterdir()
    assert file.read_text() == key


def test_another_triton_has_its_own_key(tmp_path: Path) -> None:
    """What is found depends on sizes and times of all files that the key is of."""
    from gem_kernels.triton.common.triton_key import files

    for name in ("compiler/a.py", "backends/nvidia/b.py", "language/c.py", "runtime/cache.py", "_C/libtriton.so"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    before = files(tmp_path)
    assert len(before) == 5
    (tmp_path / "_C" / "libtriton.so").write_text("2")
    assert files(tmp_path) != before
