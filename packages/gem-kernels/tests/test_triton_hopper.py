"""The Hopper kernels without a GPU: what the compiler makes of them, what they refuse, and that asking imports no triton."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gem_core.ops.contract import Problem
from gem_kernels.bench.attention_rows import ROWS, Data, small
from gem_kernels.triton.common.configs import committed_rules, matches
from gem_kernels.triton.hopper import spec

PROBE = Path(__file__).with_name("hopper_compile_probe.py")
JOBS = (
    "self-1024-s0.5:gdpa:forward", "causal-1024-s0.5:jagged_attention:forward", "self-1024-s0.5:jagged_attention:backward",
    "window128-4096:gdpa:backward", "cross-1024x128-s0.5:jagged_attention:backward", "hstu-4099-d256:gdpa:backward", "every_activation",
    "few_keys", "norm_linear", "self-2048-s0.5:gdpa:backward",
)  # fmt: skip
PROBLEM = Problem(
    "gdpa", "cuda", 90, (("q", torch.bfloat16), ("k", torch.bfloat16), ("v", torch.bfloat16)),
    (("H", 4), ("Hkv", 2), ("D", 64), ("Dv", 64)), (("broadcast_q", False),), frozenset({"q_offsets", "k_offsets"}),
)  # fmt: skip


@pytest.fixture(scope="module")
def compiled() -> list[dict]:
    pytest.importorskip("triton")
    if importlib.util.find_spec("triton.backends.nvidia") is None:
        pytest.skip("this triton has no NVIDIA back end")
    if not spec._dialect():
        pytest.skip(spec._dialect().reason)
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(PROBE), *JOBS], capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_instructions(compiled: list[dict]) -> None:
    """Warpgroup products that are not serialised, bulk tensor copies in and out, registers moved to the consumers, no atomics."""
    assert {k["kernel"] for k in compiled} == {
        "hopper_fwd_kernel", "hopper_bwd_dq_kernel", "hopper_bwd_dkdv_kernel", "hopper_bwd_few_kernel", "hopper_norm_linear_fwd_kernel",
    }  # fmt: skip
    for kernel in compiled:
        counts = kernel["counts"]
        assert counts["wgmma.mma_async"], kernel
        assert counts["setmaxnreg"], kernel
        assert not kernel["warnings"], kernel
        assert not counts["red.global"], kernel
        assert not counts["atom.global"], kernel
        if kernel["job"] != "norm_linear":
            assert counts["cp.async.bulk.tensor.4d.shared"], kernel
            assert counts["cp.async.bulk.tensor.4d.global"], kernel


@pytest.mark.slow
def test_resources(compiled: list[dict]) -> None:
    """Everything fits on an SM; what is on the stack are values about a tile, of which the backward pass has most (no tiles)."""
    limits = {"hopper_bwd_dkdv_kernel": 448, "hopper_bwd_few_kernel": 300, "hopper_bwd_dq_kernel": 48}
    for kernel in compiled:
        assert kernel["shared"] <= 227 << 10, kernel
        wide = 256 if "d256" in kernel["job"] else 0
        assert kernel["spills"] <= limits.get(kernel["kernel"], 0) + wide, kernel


@pytest.mark.slow
def test_lengths_of_every_tile_are_read(compiled: list[dict]) -> None:
    """What a consumer knows of its first tile it reads for each tile that follows, or none before its loop."""
    for kernel in compiled:
        if kernel["job"] not in ("norm_linear", "every_activation"):
            for first, following in kernel["table_reads"]:
                assert following >= 2, kernel
                assert first in (0, following), kernel


def test_supported() -> None:
    if not spec._dialect():
        pytest.skip(spec._dialect().reason)
    assert spec.supports(PROBLEM)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"arch": 100}, "sm_90"),
        ({"device": "cpu", "arch": None}, "sm_90"),
        ({"dims": (("H", 4), ("Hkv", 2), ("D", 96), ("Dv", 96))}, "96"),
        ({"dims": (("H", 4), ("Hkv", 2), ("D", 64), ("Dv", 128))}, "128"),
        ({"present": frozenset({"num_targets"})}, "candidates"),
        ({"dims": (("H", 4), ("Hkv", 2), ("D", 256), ("Dv", 256))}, "a key head for every query head"),
        ({"dtypes": tuple((n, torch.float32) for n in "qkv")}, "bf16"),
    ],
)
def test_refusals_say_why(change: dict, reason: str) -> None:
    answer = spec.supports(replace(PROBLEM, **change), only=True)
    assert not answer
    assert reason in answer.reason


TAKEN = {
    "self-1024-s0.5": (1, 1), "self-1024-s1": (1, 1), "self-256-s0.5": (1, 1), "self-2048-s0.5": (1, 1), "cross-1024x256-s1": (1, 1),
    "cross-1024x128-s0.5": (1, 1), "cross-1024x32-s0.5": (1, 0), "pma-128x4096-s0.5": (1, 1), "pma-32x4096-s0.5": (0, 0),
    "window128-4096": (1, 1), "causal-1024-s0.5": (1, 1), "self-1024-s0.5-d64": (1, 1), "causal-200-s0.3-d32": (0, 0),
    "hstu-4099-d256": (1, 1),
}  # fmt: skip
"""Rows whose (forward, backward) pass the Hopper kernels were measured to do faster than the portable ones."""


@pytest.mark.parametrize("name", list(TAKEN))
def test_rules_take_what_was_measured(name: str) -> None:
    """A rule for every pass that these kernels win, with a configuration that the compile tests know, and none for the others."""
    pytest.importorskip("triton")
    from gem_kernels.triton.attention.plan import plan
    from gem_kernels.triton.hopper import launch

    data = Data(small(next(r for r in ROWS if r.name == name)), "cpu")
    for op in data.row.ops:
        p = plan(data.problem(op))
        facts = dict((*p.facts, ("only", False)))
        for kernel, taken in zip(("hopper.forward", "hopper.backward"), TAKEN[name]):
            rules = [r for r in committed_rules("sm_90", "hopper") if r["kernel"] == kernel and matches(r["when"], facts)]
            assert bool(rules) == bool(taken), (op, kernel)
            if rules:
                assert rules[0]["use"] in launch.candidates(kernel, p, only=True)


def test_another_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec._dialect.cache_clear()
    monkeypatch.setattr(spec.importlib.metadata, "version", lambda name: "3.9.1")
    answer = spec.supports(PROBLEM)
    spec._dialect.cache_clear()
    assert not answer
    assert "3.9.1" in answer.reason


def test_asking_imports_no_triton() -> None:
    code = (
        "import sys, torch\n"
        "from gem_core.ops.contract import Problem\n"
        "from gem_kernels.triton.hopper.spec import specs\n"
        "p = Problem('gdpa', 'cuda', 90, (('q', torch.bfloat16),), (('H', 1), ('Hkv', 1), ('D', 64), ('Dv', 64)))\n"
        "specs()[0].supports(p)\n"
        "assert 'triton' not in sys.modules, 'triton was imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
