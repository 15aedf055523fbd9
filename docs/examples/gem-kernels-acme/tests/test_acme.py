"""The implementation against the reference, and what it refuses. Run with the package installed: ``pytest tests``."""

from __future__ import annotations

import pytest
import torch

from gem_core import ops
from gem_core.errors import OpError
from gem_core.plugins import manager

LENGTHS = [([3, 0, 5, 1], [4, 4, 4, 4]), ([], []), ([0, 0], [2, 0]), ([4], [7]), ([1, 9], [0, 3])]


def offsets(lengths: list[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.long).cumsum(0).tolist()], dtype=dtype)


@pytest.mark.parametrize("offset_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("activation", ["gelu", "silu", "relu_square"])
@pytest.mark.parametrize(("q_lengths", "k_lengths"), LENGTHS)
def test_agrees_with_the_reference(q_lengths, k_lengths, activation: str, offset_dtype: torch.dtype):
    generator = torch.Generator().manual_seed(len(q_lengths))

    def rows(n: int, width: int) -> torch.Tensor:
        """``n`` rows and two of slack, which hold NaN and must not matter."""
        x = torch.randn(n + 2, 2, width, dtype=torch.float64, generator=generator)
        x[n:] = torch.nan
        return x

    inputs = rows(sum(q_lengths), 8), rows(sum(k_lengths), 8), rows(sum(k_lengths), 6)
    results = []
    for backend in ("acme", "reference"):
        q, k, v = (x.clone().requires_grad_() for x in inputs)
        out = ops.gdpa(
            q, k, v, offsets(q_lengths, offset_dtype), offsets(k_lengths, offset_dtype),
            activation=activation, scale_in=0.3, scale_out=0.7, backend=backend,
        )  # fmt: skip
        weights = torch.arange(out.numel(), dtype=out.dtype).view_as(out).cos()
        results.append((out.detach(), *torch.autograd.grad(out, (q, k, v), weights)))
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_it_is_registered_and_never_chosen_before_faster_ones():
    spec = manager().find("kernel", "gdpa/acme")
    assert manager().distribution_of("kernel", "gdpa/acme") == "gem-kernels-acme"
    assert spec.priority == 1


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"causal": True}, "causal not implemented"),
        ({"window": 3}, "window not implemented"),
        ({"num_targets": torch.tensor([1])}, "num_targets not implemented"),
        ({"activation": ("gelu", "silu")}, "one activation for all heads only"),
        ({"max_k_len": 1000}, "made for at most 256 keys a sample, the bound is 1024"),
    ],
)
def test_what_it_cannot_do_is_refused_with_the_reason(asked: dict, reason: str):
    x = torch.ones(4, 2, 8)
    with pytest.raises(OpError, match=reason):
        ops.gdpa(x, x, x, offsets([4], torch.int64), backend="acme", **asked)
