"""The eager implementations pass the conformance kit; also with tiny batches and chunks, so that every call is cut into many pieces."""

from __future__ import annotations

import pytest
import torch

from gem_core.testing.kernels import KernelConformance
from gem_kernels import eager
from gem_kernels.eager import plan

SPECS = {spec.op: spec for spec in eager.specs()}
FLOAT32, FLOAT64, BFLOAT16, FLOAT16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
DTYPES = {
    **dict.fromkeys(("jagged_attention", "gdpa", "norm", "norm_linear", "norm_gdpa"), (FLOAT32, FLOAT64, BFLOAT16)),
    "block_attention": (FLOAT32, FLOAT64, FLOAT16),
    **dict.fromkeys(("linear_norm", "mlp", "jagged_concat", "jagged_sum", "jagged_mean"), (FLOAT32, BFLOAT16)),
}

for _op, _spec in SPECS.items():
    _name = f"Test{_op.title().replace('_', '')}"
    globals()[_name] = type(_name, (KernelConformance,), {"spec": _spec, "dtypes": DTYPES.get(_op, (FLOAT32,))})


class _Cut(KernelConformance):
    @pytest.fixture(autouse=True)
    def _small_pieces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(plan, "BATCH_ELEMENTS", 700)
        monkeypatch.setattr(plan, "CHUNK_ROWS", 8)


class TestJaggedAttentionInPieces(_Cut):
    spec = SPECS["jagged_attention"]


class TestGdpaInPieces(_Cut):
    spec = SPECS["gdpa"]
