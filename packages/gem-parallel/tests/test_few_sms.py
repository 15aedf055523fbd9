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


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("dim", "dtype", "output"), [
    (128, torch.bfloat16, torch.bfloat16), (64, torch.float32, torch.float32), (20, torch.bfloat16, torch.float32),
])  # fmt: skip
def test_sums_of_bags(dim, dtype, output, weighted):
    """Empty ones, of one row, of many; more than a program takes; lengths on both sides of those that are split, also one after another."""
    from gem_parallel.sparse.bag_sums import CHUNK, bag_sums

    g = torch.Generator().manual_seed(dim)
    lengths = torch.randint(0, 3, (43,), generator=g)
    lengths[[3, 20]] = torch.tensor([0, 41])
    lengths[[7, 8, 9, 21, 30, 41, 42]] = torch.tensor([CHUNK - 1, CHUNK, 2 * CHUNK - 1, 2 * CHUNK, 7 * CHUNK + 13, 3, 5 * CHUNK - 3])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    values, rows = torch.randn(50, dim, generator=g).to(dtype), torch.randint(0, 50, (int(offsets[-1]),), generator=g)
    weights = torch.rand(rows.numel(), generator=g) if weighted else None
    got = bag_sums(values.to(DEVICE), rows.to(DEVICE), offsets.to(DEVICE), weights.to(DEVICE) if weighted else None, output, 0.5)
    read = values.double()[rows] * (weights.double().unsqueeze(1) if weighted else 1.0)
    want = torch.zeros(43, dim, dtype=torch.float64).index_add(0, torch.repeat_interleave(torch.arange(43), lengths), read) * 0.5
    assert got.dtype == output
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-2 if output == torch.bfloat16 else 1e-5, atol=2e-5)


def test_a_bag_of_most_reads_is_split_and_does_not_depend_on_its_place():
    """One running sum of 20,000 reads in fp32 is off by more than 1e-5, sums of chunks are not; and the same bag behind others gives the
    same bits."""
    from gem_parallel.sparse.bag_sums import bag_sums

    n = 20_000
    values = torch.tensor([[0.1], [1.0]]).expand(2, 8).contiguous()
    found = []
    for before in ([], [1] * 5, [3, 70, 0, 1]):
        lengths = torch.tensor([*before, n, 2])
        rows = torch.ones(int(lengths.sum()), dtype=torch.int64)
        rows[sum(before) : sum(before) + n] = 0
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        got = bag_sums(values.to(DEVICE), rows.to(DEVICE), offsets.to(DEVICE), None, torch.float32).cpu()
        torch.testing.assert_close(got[-1], torch.full((8,), 2.0))
        found.append(got[len(before)])
    torch.testing.assert_close(found[0].double(), torch.full((8,), n * float(values[0, 0]), dtype=torch.float64), rtol=2e-6, atol=0)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
