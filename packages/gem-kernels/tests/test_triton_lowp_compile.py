"""The low-precision attention kernels as compiled for GPUs that are not there: the instructions that they exist for, nothing spilled."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest

PROBE = Path(__file__).with_name("lowp_compile_probe.py")
JOBS = ("jagged_attention:32", "gdpa:32", "jagged_attention:128", "gdpa:128")


@lru_cache(maxsize=2)
def compiled(target: str) -> dict[str, dict]:
    pytest.importorskip("triton")
    if importlib.util.find_spec("triton.backends.nvidia") is None:
        pytest.skip("this triton has no NVIDIA back end")
    jobs = JOBS if target == "sm_90" else JOBS[:2]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(PROBE), target, *jobs], capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return {line["job"]: line for line in map(json.loads, done.stdout.splitlines())}


def checked(target: str, job: str) -> tuple[dict, list[dict]]:
    """(the attention kernel, the quantise kernels), none of which spills."""
    kernels = compiled(target)[job]["kernels"]
    for kernel in kernels:
        assert kernel["spills"] == 0, kernel
        assert kernel["stack"] == 0, kernel
        assert not kernel["warnings"], kernel
        assert kernel["counts"]["cvt.rn.satfinite.e4m3x2"], kernel
    attention = [k for k in kernels if k["kernel"].startswith("lowp")]
    assert len(attention) == 1
    return attention[0], [k for k in kernels if k["kernel"].startswith("quantize")]


@pytest.mark.parametrize("job", JOBS)
def test_hopper(job: str) -> None:
    """wgmma; with blocks of 128 every one of them multiplies E4M3 codes as they are."""
    attention, quantise = checked("sm_90", job)
    counts = attention["counts"]
    assert counts["wgmma.mma_async"]
    assert not counts["mma.sync"]
    assert counts["e4m3.e4m3"] == (counts["wgmma.mma_async"] if job.endswith(":128") else 0)
    # Q and K, V transposed, and the rounded rows of the backward pass
    assert len(quantise) == 3


@pytest.mark.parametrize("job", JOBS[:2])
def test_blackwell(job: str) -> None:
    """Every product is a block-scaled tensor-core instruction."""
    counts = checked("sm_100", job)[0]["counts"]
    assert counts["tcgen05.mma"]
    assert counts["block_scale"] == counts["tcgen05.mma"]


@pytest.mark.parametrize("job", JOBS)
def test_backward_is_the_plain_one(job: str) -> None:
    assert {"attention_bwd_dq_kernel", "attention_bwd_dkdv_kernel"} & set(compiled("sm_90")[job]["all"])
