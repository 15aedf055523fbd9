"""Pooling of the normed rows themselves: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gem_core import ops
from gem_core.jagged import lengths_to_offsets
from gem_core.model import pooling
from gem_core.model.pooling import SeedPooling
from gem_core.model.rows import Rows
from gem_core.ops import dispatch, meeting, pool_rows
from gem_core.ops.contract import Problem
from gem_kernels.triton import dense
from gem_kernels.triton import pool_rows as family
from gem_kernels.triton.common.device import on_cpu
from gem_kernels.triton.dense import norm_gdpa
from gem_kernels.triton.hopper import pool_rows as hopper
from gem_kernels.triton.pool_rows import spec as kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
HOPPER = DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0)
WIDE, HEADS, SEEDS = (512, 4, 32) if DEVICE == "cuda" else (128, 2, 16)
LENGTHS = (0, 5, 130, 1, 64, 0, 65) if DEVICE == "cpu" else (0, 5, 1300, 1, 64, 0, 65, 700, 128)
SMALL = {"BLOCK_N": 32, "BLOCK_C": 64, "num_warps": 1, "num_stages": 1}


@pytest.fixture(autouse=True)
def _where_it_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(pool_rows, "MANY_ROWS", 0)
    if DEVICE == "cpu":
        for name in ("SCORES", "SUMS", "DSCORES", "DROWS"):
            monkeypatch.setattr(kernels, name, SMALL)
        monkeypatch.setattr(kernels, "FACTORS", {"BLOCK_M": 16, "CHUNK": 2, "num_warps": 1})
    with nullcontext() if DEVICE == "cuda" else on_cpu(), dispatch.offering(*dense.specs(), *family.specs(), *hopper.specs()):
        yield


def _module(seed: int = 0) -> SeedPooling:
    torch.manual_seed(seed)
    module = SeedPooling(WIDE, HEADS, WIDE // HEADS, 32, seeds=SEEDS)
    torch.nn.init.normal_(module.kv.linear.bias)
    return module.to(DEVICE, DTYPE)


def _rows(lengths: Sequence[int], slack: int) -> tuple[Tensor, Rows]:
    generator = torch.Generator().manual_seed(1)
    s = torch.randn(sum(lengths) + slack, WIDE, generator=generator).to(DEVICE, DTYPE).requires_grad_()
    return s, Rows(lengths_to_offsets(torch.tensor(lengths)).to(DEVICE), sum(lengths) + slack, max(lengths))


def _step(module: SeedPooling, s: Tensor, rows: Rows) -> tuple[Tensor, list[Tensor]]:
    """Tokens, and gradients of s and of all parameters; the rows go on."""
    tokens, passed = module(s * 1, rows)
    loss = tokens.float().square().mean() + (passed.float().cos().mean() if passed is not s else 0.0)
    return tokens, list(torch.autograd.grad(loss, (s, *module.parameters())))


@pytest.mark.parametrize(("slack", "calls"), [(0, 1), (9, 1), (9, 2)])
def test_as_the_projected_rows(slack: int, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and gradients of float64 by the module's own formula; samples without rows give the output's bias."""
    monkeypatch.setattr(pooling, "QUERIES", HEADS // calls * SEEDS)
    module = _module()
    s, rows = _rows(LENGTHS, slack)
    taken: list[str] = []
    run = kernels.launch

    def noted(kernel: Any, *args: Any, **sizes: Any) -> None:
        taken.append(kernel.fn.__name__)
        run(kernel, *args, **sizes)

    for launching in (kernels, hopper):
        monkeypatch.setattr(launching, "launch", noted)
    tokens, grads = _step(module, s, rows)
    passes = ("scores", "factors", "weights", "sums") * calls, ("delta", "dscores", "drows") * calls
    whole = HOPPER and calls == 1  # two calls have 64 rows of queries each, which the portable kernel takes
    assert taken == [f"{'hopper_' if whole and name == 'drows' else ''}pool_rows_{name}_kernel" for name in sum(passes, ())]
    exact = _module().double()
    with monkeypatch.context() as usual:
        usual.setattr(pool_rows, "MANY_ROWS", 1 << 60)
        other, expected = _step(exact, s.detach().double().requires_grad_(), rows)
    near = 1e-5 if torch.float32 == DTYPE else 2e-2
    assert float((tokens - other).norm() / other.norm()) < near
    names = ["s", *(name for name, _ in module.named_parameters())]
    for name, one, two in zip(names, grads, expected):
        if name == "kv.linear.bias":  # keys' part is zero: a vector added to all keys changes nothing
            assert not one[:WIDE].any()
            one, two = one[WIDE:], two[WIDE:]
        assert float((one - two).norm() / two.norm()) < near, name
    assert torch.equal(tokens[0], module.out.bias.expand_as(tokens[0]))


def test_repeated_runs_agree() -> None:
    module = _module()
    s, rows = _rows(LENGTHS, 3)
    first, second = (_step(module, s, rows) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(a, b) for a, b in zip(first[1], second[1]))


@pytest.mark.skipif(DEVICE == "cpu", reason="a quarter of a million rows take a GPU")
@pytest.mark.parametrize("family", ["triton", "hopper"])
def test_many_rows_agree_with_projecting_and_from_run_to_run(family: str) -> None:
    """Every output by itself, with as many tiles under way as in a training step."""
    if family == "hopper" and not HOPPER:
        pytest.skip("needs an sm_90 device")
    backward = hopper.backward if family == "hopper" else kernels.backward
    lengths = torch.randint(0, 1000, (512,), generator=torch.Generator().manual_seed(2)).tolist()
    module = _module()
    s, rows = _rows(lengths, 7)
    problem = Problem(pool_rows.OP, "cuda", None, (("x", DTYPE),), (("C", WIDE), ("M", 128), ("G", 4)), (("eps", 1e-6), ("scale", 0.1)))
    a = torch.randn(128, WIDE, generator=torch.Generator().manual_seed(3)).to(DEVICE, DTYPE)
    dy = torch.randn(4, len(lengths), 32, WIDE, generator=torch.Generator().manual_seed(4)).to(DEVICE, DTYPE)

    def outputs() -> list[Tensor]:
        y, saved = kernels.forward(problem, s.detach(), a, rows.offsets)
        douts = dy, None, (y.flatten(1, 2), dy.flatten(1, 2), None)
        return [y, *saved, *backward(problem, (s.detach(), a, rows.offsets, y, *saved), douts, (True, True))]

    first, live = outputs(), sum(lengths)
    for _ in range(5):
        for name, one, two in zip(("y", "w", "r", "dx", "da"), first, outputs()):
            whole = name in ("y", "da")
            assert torch.equal(one if whole else one[:live], two if whole else two[:live]), name
    tokens, grads = _step(module, s, rows)
    with pytest.MonkeyPatch.context() as usual:
        usual.setattr(pool_rows, "MANY_ROWS", 1 << 60)
        other, expected = _step(module, s.detach().requires_grad_(), rows)
    assert float((tokens - other).norm() / other.norm()) < 1e-2
    for (name, _), one, two in zip([("s", s), *module.named_parameters()], grads, expected):
        if name != "kv.linear.bias":
            assert float((one - two).norm() / two.norm()) < 3e-2, name


def test_the_next_norm_gdpas_last_part_is_done_beside_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    module = _module()
    s, rows = _rows(LENGTHS, 9)
    kv = [torch.randn(3 * len(LENGTHS), HEADS, WIDE // HEADS, generator=torch.Generator().manual_seed(i)).to(DEVICE, DTYPE) for i in (2, 3)]

    def gradients(once: bool) -> list[Tensor]:
        tokens, passed = module(s * 1, rows)
        if once:
            meeting.read_once(passed)
        q = meeting.in_heads(passed, HEADS, WIDE // HEADS)
        out = ops.norm_gdpa(q, *kv, rows.offsets, rows.uniform(3), max_q_len=rows.max_length, max_k_len=3, backend="triton")
        loss = tokens.float().square().mean() + out.float().square().mean()
        return list(torch.autograd.grad(loss, (s, *module.parameters())))

    ran: list[str] = []
    launch = norm_gdpa.launch
    monkeypatch.setattr(
        norm_gdpa, "launch", lambda kernel, *args, **sizes: ran.append(kernel.fn.__name__) or launch(kernel, *args, **sizes)
    )
    expected, found = gradients(False), gradients(True)
    assert ran.count("norm_gdpa_bwd_late_kernel") == 1
    assert ran.count("norm_gdpa_bwd_dq_kernel") == 1
    for one, two in zip(found, expected):
        torch.testing.assert_close(one, two, rtol=2**-6 if torch.bfloat16 == DTYPE else 1e-5, atol=1e-3)


def test_under_a_checkpoint_and_without_gradients() -> None:
    module = _module()
    s, rows = _rows(LENGTHS, 0)
    tokens, grads = _step(module, s, rows)
    again, passed = checkpoint(lambda t: module(t, rows), s, use_reentrant=False)
    loss = again.float().square().mean() + passed.float().cos().mean()
    for one, two in zip(grads, torch.autograd.grad(loss, (s, *module.parameters()))):
        torch.testing.assert_close(one, two)
    with torch.no_grad():
        assert torch.equal(module(s, rows)[0], tokens)


@pytest.mark.parametrize("change", ["hook", "layer norm", "candidate", "recipe", "few rows"])
def test_elsewhere_rows_are_projected(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = _module()
    s, rows = _rows((5, 3), 0)
    monkeypatch.setattr(family.spec, "forward", lambda *_: pytest.fail("not plain"))
    if change == "hook":
        module.kv.linear.register_forward_hook(lambda *_: None)
    elif change == "layer norm":
        module.kv.kind = "layer"
    elif change == "recipe":
        module.attention_precision = object()
    elif change == "few rows":
        monkeypatch.setattr(pool_rows, "MANY_ROWS", 9)
    else:
        module = SeedPooling(WIDE, HEADS, WIDE // HEADS, 32, seeds=SEEDS, candidate_queries=1).to(DEVICE, DTYPE)
    assert module._of_rows(s, rows) is None
