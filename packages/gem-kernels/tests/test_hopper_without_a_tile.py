"""Hopper kernels where all samples are empty: the lists of tiles have no entry, and nothing may be taken from what their memory held."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gem_core import ops

DEVICE = "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
MASKS = {"full": {}, "causal": {"causal": True}, "window": {"window": (64, 64)}}
FAR = -(1 << 30)
"""As a row number of what is left in memory, far outside of any tensor."""


@pytest.fixture(autouse=True)
def _on_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("written for sm_90")


def leave_behind() -> None:
    """Memory that PyTorch hands out next holds numbers by which no row is found."""
    for size in (128, 512, 1024, 4096, 1 << 16, 1 << 20):
        held = [torch.full((size,), FAR, dtype=torch.int32, device=DEVICE) for _ in range(64)]
        del held


def samples(count: int) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    rows = [torch.randn(300, 4, 128, device=DEVICE, dtype=torch.bfloat16, generator=generator).requires_grad_() for _ in range(3)]
    return rows, torch.zeros(count + 1, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("mask", list(MASKS))
@pytest.mark.parametrize("op", ["jagged_attention", "gdpa"])
@pytest.mark.parametrize("longest", [200, 600])
def test_attention(op: str, mask: str, longest: int) -> None:
    """All results are 0, with the tiles of short samples and of long ones."""
    leaves, offsets = samples(5)
    more = {"activation": "silu", "scale_in": 0.1} if op == "gdpa" else {}
    leave_behind()
    out = getattr(ops, op)(*leaves, offsets, offsets, backend="hopper-only", max_q_len=longest, max_k_len=longest, **MASKS[mask], **more)
    leave_behind()
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    torch.cuda.synchronize()
    assert not any(x.any() for x in (out, *grads))


@pytest.mark.parametrize("keys", [128, 600])
def test_norm_gdpa(keys: int) -> None:
    leaves, offsets = samples(5)
    leave_behind()
    out = ops.norm_gdpa(
        *leaves, offsets, offsets, max_q_len=600, max_k_len=keys, activation="silu", scale_in=0.1, scale_out=0.1, backend="hopper"
    )
    leave_behind()
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    torch.cuda.synchronize()
    assert not any(x.any() for x in (out, *grads))
