"""AdamW's update in one pass against its definition, and against torch's."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from gem_core.ops.adamw import Update, reference
from gem_core.ops.contract import Problem
from gem_kernels.triton.adamw.spec import forward, supports
from gem_kernels.triton.common.device import on_cpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
PROBLEM = Problem("adamw", DEVICE, None, (), ())


def update(n, *, gradient=torch.float32, copy=None, scale=None, ok=True, step=3, decay=0.1):
    torch.manual_seed(0)
    betas = 0.9, 0.999

    def scalars(*values):
        return torch.tensor(values if len(values) > 1 else values[0], dtype=torch.float32, device=DEVICE)

    made = [torch.randn(n, device=DEVICE) for _ in range(3)]
    return Update(
        made[0],
        torch.randn(n, device=DEVICE).to(gradient),
        made[1] * 0.1,
        made[2].square(),
        None if copy is None else torch.zeros(n, device=DEVICE, dtype=copy),
        scalars(0.01),
        scalars(*(1 - b**step for b in betas)),
        None if scale is None else scalars(scale),
        torch.tensor(ok, device=DEVICE),
        betas,
        1e-8,
        decay,
    )


def twin(u):
    return replace(u, **{name: getattr(u, name).clone() for name in ("parameter", "exp_avg", "exp_avg_sq")}, copy=None)


def run(u):
    with nullcontext() if DEVICE == "cuda" else on_cpu():
        assert supports(PROBLEM)
        forward(PROBLEM, u)


@pytest.mark.parametrize("n", [1, 2047, 2048, 5000])
@pytest.mark.parametrize(
    ("gradient", "copy", "scale"),
    [
        (torch.float32, None, None),
        (torch.bfloat16, torch.bfloat16, None),
        (torch.bfloat16, torch.bfloat16, 0.25),
        (torch.float16, torch.float16, 3.0),
    ],
)
def test_definition(n, gradient, copy, scale):
    u = update(n, gradient=gradient, copy=copy, scale=scale)
    expected = twin(u)
    reference(expected)
    run(u)
    for name in ("parameter", "exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(getattr(u, name), getattr(expected, name), rtol=2e-6, atol=1e-7)
    if copy is not None:
        # the interpreter cuts bf16 where a GPU rounds
        ulp = torch.finfo(copy).eps if DEVICE == "cpu" else 0.0
        torch.testing.assert_close(u.copy, u.parameter.to(copy), rtol=ulp, atol=0.0)


def test_nothing_changes_where_the_step_does_not_count():
    u = update(3000, copy=torch.bfloat16, ok=False)
    u.gradient[5] = float("nan")
    before = twin(u)
    run(u)
    for name in ("parameter", "exp_avg", "exp_avg_sq"):
        assert torch.equal(getattr(u, name), getattr(before, name))
    assert not u.copy.any()


def test_steps_are_those_of_torch():
    parameter = torch.nn.Parameter(torch.randn(33, 70, device=DEVICE))
    own = parameter.detach().clone()
    theirs = torch.optim.AdamW([parameter], lr=0.01, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    m, v = torch.zeros_like(own), torch.zeros_like(own)
    first = update(1)
    for step in range(1, 5):
        parameter.grad = torch.randn_like(own)
        u = update(1, step=step)
        run(replace(first, parameter=own, gradient=parameter.grad, exp_avg=m, exp_avg_sq=v, corrections=u.corrections))
        theirs.step()
        torch.testing.assert_close(own, parameter.detach(), rtol=1e-6, atol=1e-6)
