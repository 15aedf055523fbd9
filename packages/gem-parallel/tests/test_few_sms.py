"""The kernels that copy and add with few SMs, and that of sums of bags: interpreted on a CPU, real on a GPU."""

from __future__ import annotations

import contextlib
import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.skipif(
        DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a CUDA device, or TRITON_INTERPRET=1 from the start"
    ),
    *([pytest.mark.gpu] if DEVICE == "cuda" else []),
]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    if DEVICE == "cuda":
        return
    from triton.runtime import interpreter

    patch = getattr(interpreter, "_patch_lang_tensor", None)
    if patch is None:
        return

    def patched(tensor, scope):
        """numpy refuses int() of the arrays of one element that Triton 3.6 takes for loop bounds."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: contextlib.nullcontext())


@pytest.mark.parametrize("n", [1, 7, 16384, 40_000, 100_003])
@pytest.mark.parametrize("peers", [1, 3])
def test_means(n, peers):
    from gem_parallel.collectives import few_sms

    stride, g = -(-n // 16) * 16 + 16, torch.Generator().manual_seed(n)
    own, sent = torch.randn(n, generator=g), torch.randn(peers * stride, generator=g)
    out = torch.full((n + 4,), float("nan")).to(DEVICE)
    few_sms.mean(own.to(DEVICE), sent.to(DEVICE), peers, stride, out[:n], sms=3)
    want = torch.stack([own, *(sent[i * stride : i * stride + n] for i in range(peers))]).mean(0)
    torch.testing.assert_close(out[:n].cpu(), want, rtol=1e-6, atol=1e-6)
    assert out[n:].isnan().all()


@pytest.mark.parametrize("n", [4, 28, 65536, 400_012])
def test_copies(n):
    from gem_parallel.collectives import few_sms

    source = torch.randint(0, 256, (n,), dtype=torch.uint8).to(DEVICE)
    target = torch.zeros(n + 4, dtype=torch.uint8).to(DEVICE)
    few_sms.copy(source, target[:n], sms=3)
    assert torch.equal(source, target[:n])
    assert not target[n:].any()


@pytest.mark.parametrize(("dim", "dtype", "output"), [
    (128, torch.bfloat16, torch.bfloat16), (64, torch.float32, torch.float32), (20, torch.bfloat16, torch.float32),
])  # fmt: skip
def test_sums_of_bags(dim, dtype, output):
    """Empty ones, of one row, of many; more than a program takes."""
    from gem_parallel.sparse.bag_sums import bag_sums

    g = torch.Generator().manual_seed(dim)
    lengths = torch.randint(0, 3, (37,), generator=g)
    lengths[[3, 20]] = torch.tensor([0, 41])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    values, rows = torch.randn(50, dim, generator=g).to(dtype), torch.randint(0, 50, (int(offsets[-1]),), generator=g)
    got = bag_sums(values.to(DEVICE), rows.to(DEVICE), offsets.to(DEVICE), output)
    want = torch.zeros(37, dim).index_add(0, torch.repeat_interleave(torch.arange(37), lengths), values.float()[rows])
    assert got.dtype == output
    torch.testing.assert_close(got.cpu().float(), want.to(output).float(), rtol=1e-2 if output == torch.bfloat16 else 1e-5, atol=1e-5)
