"""The eager implementations on a GPU, where they serve what no kernel supports."""

from __future__ import annotations

import pytest
import torch

from gem_core.testing.kernels import KernelConformance
from gem_kernels import eager

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SPECS = {spec.op: spec for spec in eager.specs()}


class _OnGpu(KernelConformance):
    device = "cuda"
    dtypes = (torch.float32, torch.bfloat16)


class TestJaggedAttention(_OnGpu):
    spec = SPECS["jagged_attention"]


class TestGdpa(_OnGpu):
    spec = SPECS["gdpa"]


class TestBlockAttention(_OnGpu):
    spec = SPECS["block_attention"]


class TestNorm(_OnGpu):
    spec = SPECS["norm"]


class TestNormLinear(_OnGpu):
    spec = SPECS["norm_linear"]


class TestLinearNorm(_OnGpu):
    spec = SPECS["linear_norm"]


class TestMlp(_OnGpu):
    spec = SPECS["mlp"]


class TestNormGdpa(_OnGpu):
    spec = SPECS["norm_gdpa"]


class TestJaggedConcat(_OnGpu):
    spec = SPECS["jagged_concat"]


class TestJaggedSplit(_OnGpu):
    spec = SPECS["jagged_split"]


class TestJaggedSum(_OnGpu):
    spec = SPECS["jagged_sum"]


class TestJaggedMean(_OnGpu):
    spec = SPECS["jagged_mean"]


class TestJaggedExpand(_OnGpu):
    spec = SPECS["jagged_expand"]


class TestJaggedToPadded(_OnGpu):
    spec = SPECS["jagged_to_padded"]


class TestPaddedToJagged(_OnGpu):
    spec = SPECS["padded_to_jagged"]
