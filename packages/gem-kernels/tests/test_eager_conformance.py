"""The eager implementations pass the conformance kit."""

from __future__ import annotations

import torch

from gem_core.testing.kernels import KernelConformance
from gem_kernels import eager

SPECS = {spec.op: spec for spec in eager.specs()}


class TestJaggedAttention(KernelConformance):
    spec = SPECS["jagged_attention"]
    dtypes = (torch.float32, torch.float64, torch.bfloat16)


class TestGdpa(KernelConformance):
    spec = SPECS["gdpa"]
    dtypes = (torch.float32, torch.float64, torch.bfloat16)


class TestBlockAttention(KernelConformance):
    spec = SPECS["block_attention"]
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
