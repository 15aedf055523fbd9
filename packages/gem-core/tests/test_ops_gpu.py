"""The ops on a GPU: the references, device-side asserts, and no device sync in the public functions."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from gem_core import ops
from gem_core.jagged import lengths_to_offsets
from gem_core.testing.kernels import KernelConformance

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
REFERENCE = {spec.op: spec for spec in ops.builtin_specs()}
SOME = (
    "full",
    "causal, fewer keys than queries",
    "bias, candidates, context",
    "sharing, candidates, bias",
    "shared q",
    "empty batch",
    "no rows",
)


class TestJaggedAttention(KernelConformance):
    spec = REFERENCE["jagged_attention"]
    device = "cuda"
    only = SOME


class TestGdpa(KernelConformance):
    spec = REFERENCE["gdpa"]
    device = "cuda"
    only = SOME


class TestNormLinear(KernelConformance):
    spec = REFERENCE["norm_linear"]
    device = "cuda"
    only = ("rms", "layer, affine", "rms, residual", "layer, no rows")


ASSERT = """
import torch
from gem_core import ops
q = torch.ones(5, 1, 16, device="cuda")
ops.jagged_attention(q, q, q, torch.tensor([0, 1, 5], device="cuda"), max_q_len={bound}, backend="reference")
torch.cuda.synchronize()
"""


@pytest.mark.parametrize(("bound", "fine"), [(4, True), (3, False)])
def test_a_bound_below_the_longest_sample_trips_an_assert(bound: int, fine: bool) -> None:
    run = subprocess.run([sys.executable, "-c", ASSERT.format(bound=bound)], capture_output=True, text=True, check=False)
    assert (run.returncode == 0) is fine, run.stderr


def test_public_functions_do_not_wait_for_the_device() -> None:
    """Data movement with shapes that the host knows, and the checks of attention, must not sync."""
    offsets = lengths_to_offsets(torch.tensor([3, 0, 5])).cuda()
    values, lengths = torch.randn(8, 2, 16, device="cuda"), torch.tensor([1, 0, 2], device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in (
            lambda: ops.available("jagged_attention", values, values, values, offsets, max_q_len=5),
            lambda: ops.available("jagged_split", values, offsets, lengths, first_rows=3),
            lambda: ops.available("jagged_to_padded", values, offsets, 5),
        ):
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
