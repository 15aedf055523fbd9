"""Sums beside a product on Hopper: compiled anywhere, computed on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from gem_core.model.layers import added_linear
from gem_core.ops import add_linear
from gem_core.ops.contract import Problem
from gem_kernels.triton.hopper.add_linear import supports

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
PROBE = """
import torch
from gem_core.ops.contract import Problem
from gem_kernels.triton.common.launch import compile_only
from gem_kernels.triton.hopper.add_linear import forward
with compile_only("sm_90") as done:
    for k, n in ((512, 512), (1024, 1024)):
        residual, x, w, b = (torch.zeros(s, dtype=torch.bfloat16) for s in ((256, n), (256, k), (n, k), (n,)))
        forward(Problem("add_linear", "cuda", 90, (), ()), residual, x, w, b)
for made in done:
    assert "wgmma" in made.ptx and "cp.async.bulk" in made.ptx
    assert made.spills == 0 and made.stack == 0 and not made.warnings, made.warnings
    assert made.shared < 227 * 1024
print(len(done))
"""


def problem(k=512, n=512, dtype=torch.bfloat16, arch=90):
    return Problem("add_linear", "cuda", arch, (("x", dtype),), (("K", k), ("N", n)))


def test_what_is_supported():
    assert supports(problem())
    assert "sm_90" in supports(problem(arch=100)).reason
    assert "bf16" in supports(problem(dtype=torch.float32)).reason
    for k, n in ((64, 512), (520, 512), (512, 192)):
        assert "steps" in supports(problem(k, n)).reason


@pytest.mark.skipif(not supports(problem()), reason="no Triton with the Gluon dialect of these kernels")
def test_compiles_for_hopper():
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    found = subprocess.run([sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr[-3000:]
    assert found.stdout.strip() == "2"


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs an sm_90 device")
@pytest.mark.parametrize(("k", "n"), [(512, 512), (1024, 1024), (128, 256), (512, 768)])
@pytest.mark.parametrize("rows", [16_384, 20_001])
def test_sums_and_gradients(k, n, rows):
    torch.manual_seed(0)
    linear = nn.Linear(k, n).cuda().bfloat16()
    x, residual, dy = (torch.randn(rows, c, device="cuda").bfloat16() for c in (k, n, n))
    x.requires_grad_()
    residual.requires_grad_()
    assert add_linear.implementation(x, linear.weight) is not None
    y = added_linear(linear, x, residual, nn.Dropout(0.0))
    assert type(y.grad_fn).__name__ == "_AddedLinearBackward"
    y.backward(dy)
    leaves = [t.detach().double().requires_grad_() for t in (x, residual, linear.weight, linear.bias)]
    expected = leaves[1] + nn.functional.linear(leaves[0], *leaves[2:])
    expected.backward(dy.double())
    for found, wanted in zip((y, x.grad, residual.grad, linear.weight.grad, linear.bias.grad), (expected, *(t.grad for t in leaves))):
        assert float((found.double() - wanted).norm() / wanted.norm()) < 4e-3
