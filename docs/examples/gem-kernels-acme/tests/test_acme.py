"""The conformance kit pointed at the implementation, and what it refuses. Run with the package installed: ``pytest tests``."""

from __future__ import annotations

import pytest
import torch

from gem_core import ops
from gem_core.errors import OpError
from gem_core.plugins import manager
from gem_core.testing.kernels import KernelConformance
from gem_core.testing.plugins import PluginConformance

SPEC = manager().find("kernel", "gdpa/acme")


class TestPackage(PluginConformance):
    distribution = "gem-kernels-acme"


class TestAcme(KernelConformance):
    spec = SPEC
    dtypes = (torch.float32, torch.float64, torch.bfloat16)


def test_it_comes_from_this_distribution_and_is_never_chosen_before_faster_ones():
    assert manager().distribution_of("kernel", "gdpa/acme") == "gem-kernels-acme"
    assert SPEC.priority == 1


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
        ops.gdpa(x, x, x, torch.tensor([0, 4]), backend="acme", **asked)
