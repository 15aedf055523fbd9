"""What the compiler makes of the dense, block and jagged kernels for sm_90, without a GPU: tensor cores, spills, atomics. One
shape of each op also for sm_100."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PRODUCTS = ("block_", "norm_linear_", "linear_norm_", "mlp_", "hopper_", "pool_rows_s", "pool_rows_dr", "pool_rows_ds")
SERIAL = ("C7512", "C7513", "C7514", "C7515")
"""ptxas warnings that products wait for one another."""


@functools.cache
def _compiled(arch: str) -> tuple[dict[str, Any], ...]:
    labels = [] if arch == "sm_90" else ["block d128 rotary", "norm_linear rms", "linear_norm rms", "mlp d128"]
    script = Path(__file__).with_name("compile_dense.py")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script), arch, *labels], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return tuple(json.loads(line) for line in done.stdout.splitlines())


def _named(kernels: list[dict[str, Any]]) -> list[str]:
    return [f"{k['label']}: {k['kernel']} ({k['spills']} bytes spilled, {k['registers']} registers)" for k in kernels]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_products_run_on_tensor_cores(arch: str) -> None:
    instruction = "wgmma" if arch == "sm_90" else "tcgen05"
    # 32-row fp32 tiles are too small for a warp group's product; that they compile at all is what their rows are for
    products = [k for k in _compiled(arch) if k["kernel"].startswith(PRODUCTS) and "fp32" not in k["label"]]
    assert products
    without = [k for k in products if not k[instruction]]
    assert not without, _named(without)


@pytest.mark.slow
def test_nothing_spills_in_the_chosen_configurations() -> None:
    spilling = [k for k in _compiled("sm_90") if k["spills"] or k["stack"]]
    assert not spilling, _named(spilling)


@pytest.mark.slow
def test_shared_memory_fits() -> None:
    too_large = [k for k in _compiled("sm_90") if k["shared"] > 227 * 1024]
    assert not too_large, _named(too_large)


@pytest.mark.slow
def test_products_are_not_serialised() -> None:
    """But where an operand comes from registers (`norm_linear`, scores of `pool_rows`)."""
    waiting = [k for k in _compiled("sm_90") if any(code in w for w in k["warnings"] for code in SERIAL)]
    known = {"norm_linear_fwd_kernel"}
    assert {k["kernel"] for k in waiting} <= known, _named(waiting)


@pytest.mark.slow
def test_no_load_overwrites_what_a_product_reads() -> None:
    overrun = [f"{k['label']} {k['kernel']}: {k['overrun']}" for k in _compiled("sm_90") if k["overrun"]]
    assert not overrun, overrun


@pytest.mark.slow
def test_no_kernel_uses_atomics() -> None:
    """So that sums have one order, and gradients are bit-equal from run to run."""
    assert not [k for k in _compiled("sm_90") if k["atomics"]]


@pytest.mark.slow
def test_rows_are_read_in_16_bytes() -> None:
    """A thread's access is as wide as the hardware has, by vector loads or bulk copies; not for partial sums, which are few."""
    narrow = [k for k in _compiled("sm_90") if not (k["vectors"] or k["tma"]) and k["kernel"] != "sum_rows_kernel"]
    assert not narrow, _named(narrow)
