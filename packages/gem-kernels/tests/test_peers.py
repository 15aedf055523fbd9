"""torch's own implementations pass the conformance kit: on a CPU without compilation, on a GPU with it."""

from __future__ import annotations

import pytest
import torch

from gem_core.errors import OpError
from gem_core.testing.kernels import KernelConformance
from gem_kernels import peers

SPECS = {(s.op, s.name): s for s in peers.specs()}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


class _Peer(KernelConformance):
    device = DEVICE

    @pytest.fixture(autouse=True)
    def _uncompiled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        if DEVICE == "cpu":
            monkeypatch.setattr(peers, "_compiled", lambda function: function)


class TestNormLinear(_Peer):
    spec = SPECS["norm_linear", "compiled"]


class TestMlp(_Peer):
    spec = SPECS["mlp", "compiled"]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="FlashAttention needs a GPU")
class TestVarlen(_Peer):
    spec = SPECS["jagged_attention", "varlen"]
    dtypes = (torch.bfloat16,)

    def test_many_samples(self) -> None:
        with pytest.raises(AssertionError, match="grid holds 65,535"):
            super().test_many_samples()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="FlashAttention needs a GPU")
@pytest.mark.parametrize("shared", [False, True])
def test_sdpa_of_equal_lengths(shared: bool) -> None:
    from gem_core import ops

    generator = torch.Generator().manual_seed(2)
    rows = [torch.randn(n, 2, 64, generator=generator).to("cuda", torch.bfloat16) for n in (6 if shared else 4 * 40, 4 * 40, 4 * 40)]
    offsets = torch.arange(5, device="cuda") * 40
    found = {}
    for backend, dtype in (("sdpa", torch.bfloat16), ("reference", torch.float32)):
        leaves = [t.to(dtype).requires_grad_() for t in rows]
        out = ops.jagged_attention(*leaves, None if shared else offsets, offsets, broadcast_q=shared, causal=not shared, backend=backend)
        weights = torch.linspace(-1, 1, out.numel(), device="cuda").view(out.shape).to(dtype)
        found[backend] = [t.float() for t in (out, *torch.autograd.grad(out, leaves, weights))]
    for got, want in zip(*found.values(), strict=True):
        assert float((got - want).norm() / want.norm()) < 1e-2


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="FlashAttention needs a GPU")
def test_sdpa_refuses_other_lengths() -> None:
    from gem_core import ops

    q, _, _, offsets, _ = _case(torch.bfloat16)
    with pytest.raises(OpError, match="differ in length"):
        ops.jagged_attention(q, q, q, offsets, backend="sdpa")


def _case(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(2)
    lengths = torch.tensor([3, 0, 17, 1, 40])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    q = torch.randn(int(offsets[-1]) + 2, 2, 16, generator=generator, dtype=dtype)
    q[-2:] = torch.nan
    k, v = (torch.randn(5 * 8, 2, 16, generator=generator, dtype=dtype) for _ in range(2))
    return tuple(t.to(DEVICE) for t in (q, k, v, offsets, torch.arange(6) * 8))


@pytest.mark.parametrize("activation", ["gelu", "silu", "fast_gelu_taylor"])
def test_norm_gdpa_by_matrix_products(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results and gradients in double precision are the reference's; what slack rows hold does not matter."""
    from gem_core import ops

    monkeypatch.setattr(peers, "_compiled", lambda function: function)
    monkeypatch.setattr(peers.Tensor, "float", torch.Tensor.double)
    q, k, v, q_offsets, k_offsets = _case()
    found = {}
    for backend in ("matmul", "reference"):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out = ops.norm_gdpa(*leaves, q_offsets, k_offsets, activation=activation, scale_in=0.3, scale_out=0.7, backend=backend)
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)
        found[backend] = out, *torch.autograd.grad(out, leaves, weights)
    for got, want in zip(*found.values(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_keys_of_different_lengths_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from gem_core import ops

    monkeypatch.setattr(peers, "_compiled", lambda function: function)
    q, k, v, q_offsets, k_offsets = _case(torch.float32)
    k_offsets[1] = 3
    with pytest.raises(OpError, match="differ in keys"):
        ops.norm_gdpa(q, k, v, q_offsets, k_offsets, backend="matmul")
