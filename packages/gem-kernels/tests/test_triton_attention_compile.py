"""The attention kernels as compiled for GPUs that are not there: tensor-core instructions present, no spilled registers."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROBE = Path(__file__).with_name("attention_compile_probe.py")
HOPPER = {
    "jagged_attention": [
        "self-1024-s0.5",
        "cross-1024x32-s0.5",
        "cross-1024x128-s0.5",
        "window128-4096",
        "causal-bias-targets-1024-s0.5",
        "causal-200-s0.3-d32",
    ],
    "gdpa": ["self-1024-s0.5-d64", "causal-1024-s0.5", "pma-32x4096-s0.5", "hstu-4099-d256", "causal-200-s0.3-d32"],
}
BLACKWELL = {"jagged_attention": ["self-1024-s0.5"], "gdpa": ["causal-1024-s0.5"]}
PRODUCTS = {"attention_fwd_kernel", "attention_fwd_resident_kernel", "attention_bwd_dq_kernel", "attention_bwd_dkdv_kernel"}


def jobs(rows: dict[str, list[str]]) -> list[str]:
    return [f"{name}:{op}:{pass_}" for op, names in rows.items() for name in names for pass_ in ("forward", "backward")]


def probe(target: str, wanted: list[str]) -> dict[str, dict]:
    pytest.importorskip("triton")
    if importlib.util.find_spec("triton.backends.nvidia") is None:
        pytest.skip("this triton has no NVIDIA back end")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(PROBE), target, *wanted], capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return {line["job"]: line for line in map(json.loads, done.stdout.splitlines())}


@pytest.fixture(scope="module")
def hopper() -> dict[str, dict]:
    return probe("sm_90", jobs(HOPPER))


@pytest.fixture(scope="module")
def blackwell() -> dict[str, dict]:
    return probe("sm_100", jobs(BLACKWELL))


def _named(kernel: dict) -> str:
    return f"{kernel['kernel']} {kernel['meta']}"


@pytest.mark.parametrize("job", jobs(HOPPER))
def test_hopper(hopper: dict[str, dict], job: str) -> None:
    """wgmma (at least one product a kernel; tiles of 32 rows use mma.sync for the others), descriptors, nothing spilled or serialised."""
    kernels = hopper[job]["kernels"]
    assert kernels
    for kernel in kernels:
        assert kernel["spills"] == 0, f"{_named(kernel)} spills {kernel['spills']} bytes"
        assert kernel["stack"] == 0, f"{_named(kernel)} uses {kernel['stack']} bytes of stack"
        assert not kernel["warnings"], f"{_named(kernel)}: {kernel['warnings']}"
        assert not kernel["overrun"], f"{_named(kernel)} overwrites what a product reads: {kernel['overrun']}"
        assert kernel["shared"] <= 227 << 10
        if kernel["kernel"] in PRODUCTS:
            counts = kernel["counts"]
            assert counts["wgmma.mma_async"] or counts["mma.sync"], f"{_named(kernel)} multiplies without tensor cores"
            assert counts["cp.async.bulk.tensor"], f"{_named(kernel)} loads no tile by descriptor"
            if kernel["meta"]["BLOCK_M"] >= 64 and kernel["meta"]["BLOCK_N"] >= 64:
                assert counts["wgmma.mma_async"], f"{_named(kernel)} has no wgmma"


@pytest.mark.parametrize("job", jobs(BLACKWELL))
def test_blackwell(blackwell: dict[str, dict], job: str) -> None:
    for kernel in blackwell[job]["kernels"]:
        assert kernel["spills"] == 0, f"{_named(kernel)} spills {kernel['spills']} bytes"
        assert kernel["shared"] <= 227 << 10
        assert kernel["counts"]["tcgen05.mma"], f"{_named(kernel)} has no tcgen05"


def test_new_lengths_compile_nothing() -> None:
    """Batch sizes 2 and 37 with other lengths: one tile list kernel and one attention kernel serve both."""
    job = "self-1024-s0.5:gdpa:lengths"
    assert probe("sm_90", [job])[job]["launched"] == 2


def test_offers_without_triton() -> None:
    """Offering the implementations and asking what they support imports no triton."""
    code = (
        "import sys, torch, gem_kernels\n"
        "from gem_kernels import triton\n"
        "from gem_core.ops.contract import Problem\n"
        "p = Problem('gdpa', 'cuda', 90, (('q', torch.bfloat16),), (('H', 1), ('Hkv', 1), ('D', 64), ('Dv', 64)))\n"
        "s = [s for s in triton.specs() if (s.op, s.name) == ('gdpa', 'triton')][0]\n"
        "assert s.supports(p)\n"
        "assert 'triton' not in sys.modules, 'triton was imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
