"""The Triton block_attention passes the conformance kit: on the GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from gem_core import ops
from gem_core.jagged import lengths_to_offsets
from gem_core.ops import siblings
from gem_core.ops.explain import problem_of
from gem_core.testing.kernels import KernelConformance, compare
from gem_kernels.triton import block
from gem_kernels.triton.common.device import on_cpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
# the interpreter of Triton 3.6 multiplies bf16 bit patterns, hence fp16 there
DTYPES = (torch.float32, torch.bfloat16, torch.float16) if DEVICE == "cuda" else (torch.float32, torch.float16)


@pytest.fixture(autouse=True)
def _where_it_runs() -> Iterator[None]:
    with nullcontext() if DEVICE == "cuda" else on_cpu():
        yield


class TestBlockAttention(KernelConformance):
    spec = block.specs()[0]
    device = DEVICE
    dtypes = DTYPES


def _inputs(lengths: list[int], heads: int = 4, d: int = 16, slack: int = 0) -> tuple[list[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = sum(lengths) + slack
    tensors = [torch.randn(rows, heads, d, generator=generator).to(DEVICE) for _ in range(3)]
    return tensors, lengths_to_offsets(torch.tensor(lengths, dtype=torch.int32)).to(DEVICE)


@pytest.mark.parametrize("heads_per_program", [1, 2, 4])
def test_every_grouping_of_heads_gives_the_same(heads_per_program: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from gem_kernels.triton.block import launch

    config = {"HEADS": heads_per_program, "STAGES": 1, "num_warps": 4}
    monkeypatch.setattr(launch, "choose", lambda *a: config)
    (q, k, v), offsets = _inputs([70, 0, 3])
    for t in (q, k, v):
        t.requires_grad_()
    angle = torch.randn(70, 8, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    found = {}
    for backend in ("triton", ops.REFERENCE):
        out = ops.block_attention(q, k, v, offsets, rotary=(angle.cos(), angle.sin()), backend=backend)
        found[backend] = (out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v)))
    for got, want in zip(found["triton"], found[ops.REFERENCE]):
        compare(got, want.double(), 1e-5, f"{heads_per_program} heads a program")


def test_gradients_of_one_projection_are_written_side_by_side() -> None:
    """Slices of one tensor get gradients that are slices of one tensor: joining them copies nothing."""
    _, offsets = _inputs([70, 0, 3])
    x = torch.randn(75, 3, 4, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    found = {}
    for backend in ("triton", ops.REFERENCE):
        given = x.clone().requires_grad_()
        ops.block_attention(*siblings.unbind(given), offsets, backend=backend).square().sum().backward()
        found[backend] = given.grad
    compare(found["triton"], found[ops.REFERENCE].double(), 1e-5, "gradient of the projection")
    q, k, v = x.unbind(1)
    spec, problem = block.specs()[0], problem_of("block_attention", q=q, k=k, v=v, offsets=offsets)
    out, saved = spec.forward(problem, q, k, v, offsets, None, None, None)
    dq, dk, dv = spec.backward(problem, saved, torch.ones_like(out), (True, True, True))
    assert dq.untyped_storage().data_ptr() == dk.untyped_storage().data_ptr() == dv.untyped_storage().data_ptr()
    assert [g.storage_offset() for g in (dq, dk, dv)] == [0, 64, 128]


def test_angle_outside_the_table_is_loud() -> None:
    from gem_kernels.triton.block import launch

    (q, k, v), offsets = _inputs([9])
    table = torch.ones(4, 8, device=DEVICE)
    problem = problem_of("block_attention", q=q, k=k, v=v, offsets=offsets, rotary=(torch.ones(9, 8, device=DEVICE),) * 2)
    out, _ = launch.forward(problem, q, k, v, offsets, table, table, None)
    assert out.isnan().all(), "rows whose position is past the rotary table must not look like results"


def test_refusals_say_why() -> None:
    spec = block.specs()[0]
    (q, k, v), offsets = _inputs([9])
    double = problem_of("block_attention", q=q.double(), k=k.double(), v=v.double(), offsets=offsets)
    assert "float64" in spec.supports(double).reason
    assert "64 or 128" in spec.supports(problem_of("block_attention", q=q, k=k, v=v, offsets=offsets, block_size=32)).reason
    wide = torch.zeros(9, 1, 256, device=DEVICE)
    assert "shared memory" in spec.supports(problem_of("block_attention", q=wide, k=wide, v=wide, offsets=offsets)).reason


def test_cpu_tensors_are_refused_outside_the_interpreter_context() -> None:
    if DEVICE == "cuda":
        pytest.skip("a rule about machines without a GPU")
    from gem_kernels.triton.common import device

    (q, k, v), offsets = _inputs([9])
    problem = problem_of("block_attention", q=q, k=k, v=v, offsets=offsets)
    token = device._assumed.set(None)
    try:
        assert "CUDA" in block.specs()[0].supports(problem).reason
    finally:
        device._assumed.reset(token)
