"""The eager implementations pass the conformance kit; also with tiny batches and chunks, so that every call is cut into many pieces."""

from __future__ import annotations

import pytest
import torch

from gem_core.testing.kernels import KernelConformance
from gem_kernels import eager
from gem_kernels.eager import plan

SPECS = {spec.op: spec for spec in eager.specs()}
WIDE_AND_NARROW = (torch.float32, torch.bfloat16)


class TestJaggedAttention(KernelConformance):
    spec = SPECS["jagged_attention"]
    dtypes = (torch.float32, torch.float64, torch.bfloat16)


class TestGdpa(KernelConformance):
    spec = SPECS["gdpa"]
    dtypes = (torch.float32, torch.float64, torch.bfloat16)


class TestBlockAttention(KernelConformance):
    spec = SPECS["block_attention"]
    dtypes = (torch.float32, torch.float64, torch.float16)


class _Cut(KernelConformance):
    @pytest.fixture(autouse=True)
    def _small_pieces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(plan, "BATCH_ELEMENTS", 700)
        monkeypatch.setattr(plan, "CHUNK_ROWS", 8)


class TestJaggedAttentionInPieces(_Cut):
    spec = SPECS["jagged_attention"]


class TestGdpaInPieces(_Cut):
    spec = SPECS["gdpa"]


class TestNorm(KernelConformance):
    spec = SPECS["norm"]
    dtypes = (torch.float32, torch.float64, torch.bfloat16)


class TestNormLinear(KernelConformance):
    spec = SPECS["norm_linear"]
    dtypes = (torch.float32, torch.float64, torch.bfloat16)


class TestLinearNorm(KernelConformance):
    spec = SPECS["linear_norm"]
    dtypes = WIDE_AND_NARROW


class TestMlp(KernelConformance):
    spec = SPECS["mlp"]
    dtypes = WIDE_AND_NARROW


class TestNormGdpa(KernelConformance):
    spec = SPECS["norm_gdpa"]
    dtypes = (torch.float32, torch.float64, torch.bfloat16)


class TestJaggedConcat(KernelConformance):
    spec = SPECS["jagged_concat"]
    dtypes = WIDE_AND_NARROW


class TestJaggedSplit(KernelConformance):
    spec = SPECS["jagged_split"]


class TestJaggedSum(KernelConformance):
    spec = SPECS["jagged_sum"]
    dtypes = WIDE_AND_NARROW


class TestJaggedMean(KernelConformance):
    spec = SPECS["jagged_mean"]
    dtypes = WIDE_AND_NARROW


class TestJaggedExpand(KernelConformance):
    spec = SPECS["jagged_expand"]


class TestJaggedToPadded(KernelConformance):
    spec = SPECS["jagged_to_padded"]


class TestPaddedToJagged(KernelConformance):
    spec = SPECS["padded_to_jagged"]
