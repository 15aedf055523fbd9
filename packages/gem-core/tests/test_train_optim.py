"""The optimizers against loops written from their definitions."""

from __future__ import annotations

import math
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from gem_core.config.schema import DenseOptimizer, Schedule, TableOptimizer
from gem_core.errors import ConfigError
from gem_core.hookspecs import KernelSpec
from gem_core.model.contract import TableState
from gem_core.ops import adamw
from gem_core.ops.contract import YES as YES_IT_CAN
from gem_core.ops.dispatch import offering
from gem_core.train.optim import DenseAdamW, RowwiseAdagrad, schedule_factor, sums_without_waiting
from gem_core.train.runtime import Runtime

CPU = Runtime(torch.device("cpu"))
YES, NO = torch.tensor(True), torch.tensor(False)


def table(rows, dim, dtype=torch.float32):
    return TableState(nn.Parameter(torch.randn(rows, dim).to(dtype)), torch.zeros(rows))


def adagrad_by_hand(weight, accumulator, reads, lr, eps):
    """``reads``: (row, gradient) pairs of one step, in float64."""
    weight, accumulator = weight.double().clone(), accumulator.double().clone()
    sums = {}
    for row, gradient in reads:
        sums[row] = sums.get(row, 0) + gradient.double()
    for row, g in sums.items():
        accumulator[row] += g.square().mean()
        weight[row] -= lr * g / (accumulator[row].sqrt() + eps)
    return weight, accumulator


@given(st.integers(1, 40), st.integers(0, 25), st.integers(1, 5), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_rowwise_adagrad_equals_its_definition(rows, reads, dim, seed):
    """Few reads of a big table, many of a small one (the two ways of summing), repeated rows, no reads; three steps."""
    torch.manual_seed(seed)
    state = table(rows, dim)
    optimizer = RowwiseAdagrad({"t": state}, TableOptimizer(lr=0.1, eps=1e-6, initial_accumulator=0.01), CPU)
    weight, accumulator = state.weight.detach().double(), state.accumulator.double()
    for _ in range(3):
        ids = torch.randint(rows, (reads,))
        factors = torch.randn(reads, dim)
        (F.embedding(ids, state.weight, sparse=True) * factors).sum().backward()
        norm = optimizer.step(YES)
        weight, accumulator = adagrad_by_hand(weight, accumulator, list(zip(ids.tolist(), factors)), 0.1, 1e-6)
        torch.testing.assert_close(state.weight.detach().double(), weight, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(state.accumulator.double(), accumulator, rtol=1e-5, atol=1e-7)
        assert state.weight.grad is None
        assert math.isfinite(float(norm))


@given(st.integers(1, 30), st.integers(1, 40), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_sums_without_waiting_are_those_of_the_distinct_rows(rows, reads, seed):
    torch.manual_seed(seed)
    ids, values = torch.randint(rows, (reads,)), torch.randn(reads, 3)
    got_rows, got, norm = sums_without_waiting(ids, values, YES)
    want_rows, slot = ids.unique(return_inverse=True)
    want = torch.zeros(want_rows.numel(), 3).index_add_(0, slot, values)
    n = want_rows.numel()
    assert got_rows[:n].tolist() == want_rows.tolist()
    torch.testing.assert_close(got[:n], want)
    assert set(got_rows[n:].tolist()) <= {int(want_rows[-1])}
    assert torch.equal(got[n:], got[n - 1].expand(reads - n, -1))
    torch.testing.assert_close(norm, want.square().sum())


def test_dense_gradients_give_the_same():
    torch.manual_seed(0)
    results = []
    for sparse in (True, False):
        torch.manual_seed(1)
        state = table(50, 4)
        optimizer = RowwiseAdagrad({"t": state}, TableOptimizer(), CPU)
        for step in range(3):
            ids = torch.randint(50, (20,), generator=torch.Generator().manual_seed(step))
            (F.embedding(ids, state.weight, sparse=sparse) ** 3).sum().backward()
            norm = optimizer.step(YES)
        results.append((state.weight.detach(), state.accumulator, norm))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)


def test_rows_that_were_not_read_keep_their_bits():
    state = table(100, 3)
    before = state.weight.detach().clone()
    optimizer = RowwiseAdagrad({"t": state}, TableOptimizer(initial_accumulator=0.5), CPU)
    F.embedding(torch.tensor([7, 7, 9]), state.weight, sparse=True).sum().backward()
    optimizer.step(YES)
    changed = (state.weight != before).any(1).nonzero().flatten().tolist()
    assert changed == [7, 9]
    assert (state.accumulator != 0.5).nonzero().flatten().tolist() == [7, 9]


@pytest.mark.parametrize("rows", [4, 400])
@pytest.mark.parametrize("cause", ["flag", "nan", "inf"])
def test_nothing_changes_where_the_step_is_not_ok(rows, cause):
    state = table(rows, 3)
    optimizer = RowwiseAdagrad({"t": state}, TableOptimizer(), CPU)
    before = state.weight.detach().clone()
    factor = {"flag": 1.0, "nan": math.nan, "inf": math.inf}[cause]
    (F.embedding(torch.tensor([1, 2, 1, 3, 0]), state.weight, sparse=True) * factor).sum().backward()
    norm = optimizer.step(NO if cause == "flag" else YES)
    assert torch.equal(state.weight, before)
    assert not state.accumulator.any()
    assert math.isfinite(float(norm)) == (cause == "flag")


def test_half_precision_tables_are_updated_in_fp32():
    state = table(6, 4, torch.bfloat16)
    weight = state.weight.detach().clone()
    ids, factors = torch.tensor([2, 2, 5]), torch.randn(3, 4).bfloat16()
    (F.embedding(ids, state.weight, sparse=True) * factors).sum().backward()
    RowwiseAdagrad({"t": state}, TableOptimizer(lr=0.1), CPU).step(YES)
    expected, _ = adagrad_by_hand(weight, torch.zeros(6), list(zip(ids.tolist(), factors)), 0.1, 1e-8)
    assert state.weight.dtype == torch.bfloat16
    torch.testing.assert_close(state.weight.detach().double(), expected, rtol=2**-7, atol=2**-8)


def dense(**options):
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    return net, DenseAdamW(dict(net.named_parameters()), DenseOptimizer(**options))


def test_adamw_equals_its_definition_and_decays_matrices_only():
    net, optimizer = dense(lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.5)
    by_hand = {n: (p.detach().double().clone(), 0.0, 0.0) for n, p in net.named_parameters()}
    for step in range(1, 4):
        x = torch.randn(5, 3)
        net(x).square().sum().backward()
        gradients = {n: p.grad.double().clone() for n, p in net.named_parameters()}
        optimizer.step(YES, None, optimizer.grad_norm())
        for name, (w, m, v) in by_hand.items():
            g = gradients[name]
            m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g.square()
            w = w * (1 - 0.1 * (0.5 if name == "weight" else 0.0))
            w = w - 0.1 * (m / (1 - 0.8**step)) / ((v / (1 - 0.9**step)).sqrt() + 1e-6)
            by_hand[name] = (w, m, v)
            torch.testing.assert_close(net.get_parameter(name).detach().double(), w, rtol=1e-5, atol=1e-6)


def test_a_step_that_is_not_ok_leaves_parameters_moments_and_count():
    net, optimizer = dense()

    def once(ok, scale=1.0):
        (net(torch.ones(1, 3)) * scale).sum().backward()
        optimizer.step(ok, 1.0, optimizer.grad_norm())

    once(YES)
    before = {k: v.clone() for k, v in {**net.state_dict(), **dict(optimizer.state_items())}.items()}
    once(NO, math.nan)
    after = {**net.state_dict(), **dict(optimizer.state_items())}
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert before["weight.step"] == 1
    assert net.weight.grad is None
    once(YES)
    assert dict(optimizer.state_items())["weight.step"] == 2


def test_clipping_scales_to_the_norm():
    net, optimizer = dense()
    (net(torch.ones(1, 3)) * 100).sum().backward()
    norm = optimizer.grad_norm()
    by_hand = sum(float(p.grad.square().sum()) for p in net.parameters()) ** 0.5
    assert float(norm) == pytest.approx(by_hand)
    seen = {}
    optimizer.adamw.register_step_pre_hook(lambda o, *_: seen.update(n=sum(float(p.grad.square().sum()) for p in net.parameters()) ** 0.5))
    optimizer.step(YES, 0.5, norm)
    assert seen["n"] == pytest.approx(0.5, rel=1e-4)


def test_optimizer_state_goes_into_fresh_targets_of_the_parameters_that_are_here():
    net, optimizer = dense()
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step(YES, None, None)
    items = dict(optimizer.state_items())
    _, other = dense()
    targets = other.targets([*items, "elsewhere.exp_avg"])
    assert targets.keys() == items.keys()
    for name, target in targets.items():
        target.copy_(items[name])
    assert all(torch.equal(a, dict(other.state_items())[k]) for k, a in items.items())


def test_schedule():
    linear = Schedule(warmup_steps=4, decay="linear", final=0.1)
    assert [schedule_factor(linear, s, 14) for s in range(5)] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert schedule_factor(linear, 9, 14) == pytest.approx(0.55)
    assert schedule_factor(linear, 14, 14) == pytest.approx(0.1)
    cosine = Schedule(decay="cosine")
    assert schedule_factor(cosine, 5, 10) == pytest.approx(0.5)
    assert schedule_factor(cosine, 25, 10) == pytest.approx(0.0)
    assert schedule_factor(Schedule(), 10**6, None) == 1.0
    with pytest.raises(ConfigError):
        schedule_factor(cosine, 5, None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_updates_equal_the_cpu_and_wait_for_nothing():
    device = torch.device("cuda")
    results = []
    for where in (torch.device("cpu"), device):
        torch.manual_seed(0)
        state = TableState(nn.Parameter(torch.randn(1000, 8).to(where)), torch.zeros(1000, device=where))
        optimizer = RowwiseAdagrad({"t": state}, TableOptimizer(), Runtime(where))
        ok = torch.ones((), dtype=torch.bool, device=where)
        ids = torch.randint(1000, (300,)).to(where)
        factors = torch.randn(300, 8).to(where)
        for _ in range(3):
            (F.embedding(ids, state.weight, sparse=True) * factors).sum().backward()
            if where.type == "cuda":
                torch.cuda.set_sync_debug_mode("error")
            try:
                optimizer.step(ok)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        results.append((state.weight.detach().cpu(), state.accumulator.cpu()))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@contextmanager
def an_implementation():
    """Of the update, on CPUs: its definition."""
    with offering(
        KernelSpec(adamw.OP, "definition", lambda _problem, update: (adamw.reference(update), ()), None, lambda _: YES_IT_CAN, 10)
    ):
        yield


@pytest.mark.parametrize("clip", [None, 0.3])
def test_parameters_with_copies_are_updated_as_without(clip):
    """Gradients in bf16 at the copies: the same steps as from the same gradients in fp32, and the copies are the parameters, rounded."""
    options = DenseOptimizer(lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.5)
    torch.manual_seed(0)
    nets = [nn.Linear(5, 4), nn.Linear(5, 4)]
    nets[1].load_state_dict(nets[0].state_dict())
    copy = nets[1].weight.detach().bfloat16().requires_grad_()
    with an_implementation():
        with_copy = DenseAdamW(dict(nets[1].named_parameters()), options, copies={"weight": copy})
    plain = DenseAdamW(dict(nets[0].named_parameters()), options)
    for step in range(6):
        for optimizer in (plain, with_copy):
            optimizer.set_lr(0.1 / (step + 1))
        if step != 2:  # a step without its gradient
            gradient = torch.randn(4, 5).bfloat16()
            nets[0].weight.grad, copy.grad = gradient.float(), gradient
        for net in nets:
            net.bias.grad = torch.full((4,), float(step))
        ok = NO if step == 3 else YES
        norms = [optimizer.grad_norm() for optimizer in (plain, with_copy)]
        torch.testing.assert_close(norms[0], norms[1])
        for optimizer, norm in zip((plain, with_copy), norms):
            optimizer.step(ok, clip, norm)
        assert copy.grad is None
        assert torch.equal(copy, nets[1].weight.bfloat16())
        for a, b in zip(nets[0].parameters(), nets[1].parameters()):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    states = [dict(optimizer.state_items()) for optimizer in (plain, with_copy)]
    assert states[0].keys() == states[1].keys()
    assert states[1]["weight.step"] == 4
    for key, value in states[0].items():
        torch.testing.assert_close(states[1][key], value, rtol=1e-5, atol=1e-6)


class Waits(TorchDispatchMode):
    """Fails where a value of the device would be waited for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("all_of_them", [True, False])
def test_a_step_with_copies_waits_for_nothing(all_of_them):
    parameters = {name: nn.Parameter(torch.randn(5, 4)) for name in ("a", "b", "c")}
    copies = {name: parameters[name].detach().bfloat16().requires_grad_() for name in ("a", "b")}
    # as a captured step has it: the learning rate and all that a step depends on are tensors
    with an_implementation():
        optimizer = DenseAdamW(parameters, DenseOptimizer(), lr_on_device=True, copies=copies)
    optimizer.adamw = (
        None if optimizer.adamw is None else SimpleNamespace(state=optimizer.adamw.state, step=lambda: None, zero_grad=lambda **_: None)
    )
    for copy in list(copies.values())[: 2 if all_of_them else 1]:
        copy.grad = torch.ones(5, 4).bfloat16()
    with Waits():
        optimizer.step(YES, 1.0, optimizer.grad_norm())
    assert optimizer._steps.tolist() == ([1, 1] if all_of_them else [1, 0])


def test_state_of_parameters_with_copies_can_be_restored():
    torch.manual_seed(0)
    net = nn.Linear(5, 4, bias=False)
    copy = net.weight.detach().bfloat16().requires_grad_()
    results = []
    with an_implementation():
        optimizer = DenseAdamW({"weight": net.weight}, DenseOptimizer(lr=0.1), copies={"weight": copy})
        for gradient in torch.randn(3, 4, 5):
            copy.grad = gradient.bfloat16()
            optimizer.step(YES, None, None)
        kept = {key: value.clone() for key, value in optimizer.state_items()}, net.weight.detach().clone()
        again = DenseAdamW({"weight": net.weight}, DenseOptimizer(lr=0.1), copies={"weight": copy})
    for key, target in again.targets(kept[0]).items():
        target.copy_(kept[0][key])
    for each in (optimizer, again):
        with torch.no_grad():
            net.weight.copy_(kept[1])
        copy.grad = torch.ones(4, 5).bfloat16()
        each.step(YES, None, None)
        results.append(net.weight.detach().clone())
    assert torch.equal(*results)


def test_copies_need_an_implementation():
    net = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="adamw"):
        DenseAdamW(dict(net.named_parameters()), DenseOptimizer(), copies={"weight": torch.zeros(2, 2).bfloat16()})
