"""The Triton jagged_attention and gdpa pass the conformance kit: on a GPU, else in Triton's interpreter. And what the kit cannot know:
tile lists, configurations, schemes of the backward pass, subtraction masking, strides."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from gem_core.testing.kernels import KernelConformance
from gem_kernels.triton import attention
from gem_kernels.triton.common.device import on_cpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPECS = {(spec.op, spec.name): spec for spec in attention.specs()}
# the interpreter of Triton 3.6 multiplies bf16 bit patterns, hence fp16 there
DTYPES = (torch.float32, torch.bfloat16, torch.float16) if DEVICE == "cuda" else (torch.float32,)


@pytest.fixture(autouse=True)
def _where_it_runs() -> Iterator[None]:
    with nullcontext() if DEVICE == "cuda" else on_cpu():
        yield


class TestJaggedAttention(KernelConformance):
    spec, device, dtypes = SPECS["jagged_attention", "triton"], DEVICE, DTYPES


class TestGdpa(KernelConformance):
    spec, device, dtypes = SPECS["gdpa", "triton"], DEVICE, DTYPES
