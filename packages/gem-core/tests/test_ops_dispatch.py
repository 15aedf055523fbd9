"""Which implementation is chosen: explicit choice, policy, priority; refusals, faults, and what is said about them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gem_core import ops
from gem_core.errors import OpError, PluginError
from gem_core.hookspecs import KernelSpec
from gem_core.jagged import lengths_to_offsets
from gem_core.ops import dispatch
from gem_core.ops.contract import YES, Problem, Supported, no

REFERENCE = next(s for s in ops.builtin_specs() if s.op == "gdpa")


def spec(name: str, priority: int = 1000, supports: Any = lambda p: YES, **changes: Any) -> KernelSpec:
    return dataclasses.replace(REFERENCE, name=name, priority=priority, supports=supports, **changes)


def call(**options: Any) -> torch.Tensor:
    q = torch.ones(3, 1, 2, requires_grad=True)
    return ops.gdpa(q, q, q, lengths_to_offsets(torch.tensor([1, 2])), **options)


def arguments() -> tuple[torch.Tensor, ...]:
    q = torch.ones(3, 1, 2)
    return q, q, q, lengths_to_offsets(torch.tensor([1, 2]))


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    dispatch._said.clear()
    yield
    dispatch._said.clear()


def ran(calls: list[str], name: str) -> Any:
    def forward(problem: Problem, *tensors: Any) -> Any:
        calls.append(name)
        return REFERENCE.forward(problem, *tensors)

    return forward


def test_highest_priority_that_supports_the_problem() -> None:
    calls: list[str] = []
    slow, fast, refusing = (
        spec("slow", 900, forward=ran(calls, "slow")),
        spec("fast", 1000, forward=ran(calls, "fast")),
        spec("refusing", 1100, lambda p: no("not today"), forward=ran(calls, "refusing")),
    )
    with dispatch.offering(slow, fast, refusing):
        call()
        call(backend="slow")
        with ops.use_policy(ops={"gdpa": "slow"}):
            call()
            call(backend="fast")
            call(backend="auto")
        with ops.use_policy("slow", {"gdpa": "fast"}):
            call()
        with ops.use_policy("slow"):
            call()
    assert calls == ["fast", "slow", "slow", "fast", "fast", "fast", "slow"]


def test_automatic_choice_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "gem_core.ops"), dispatch.offering(spec("picky", supports=lambda p: no("D is 2"))):
        call()
        call()
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("gdpa: ")
    assert "passed over: picky: D is 2" in caplog.messages[0]


def test_explicit_choice_is_refused_with_the_reason() -> None:
    with dispatch.offering(spec("picky", supports=lambda p: no("D is 2"))):
        with pytest.raises(OpError, match=r"'picky' of gdpa was asked for, but cannot do this problem: D is 2") as refusal:
            call(backend="picky")
        assert refusal.value.where == "backend='picky'"
        assert (refusal.value.fix or "").startswith("choose '")
        for policy, key in (({"ops": {"gdpa": "picky"}}, "kernels.ops.gdpa"), ({"default": "picky"}, "kernels.default")):
            with ops.use_policy(**policy), pytest.raises(OpError, match="D is 2") as refusal:
                call()
            assert refusal.value.where == key


def test_unknown_names() -> None:
    with pytest.raises(PluginError, match=r"gdpa/acme.*there are.*gdpa/reference"):
        call(backend="acme")
    with pytest.raises(PluginError, match=r"no op with an implementation called 'acme'; there are: .*reference"), ops.use_policy("acme"):
        pass
    with pytest.raises(PluginError, match="there is no op called 'gpda'") as refusal, ops.use_policy(ops={"gpda": "reference"}):
        pass
    assert "did you mean 'gdpa'" in (refusal.value.fix or "")
    assert ops.policy() == ops.Policy()


def test_default_policy_leaves_ops_without_that_implementation_automatic() -> None:
    with dispatch.offering(spec("only-gdpa")), ops.use_policy("only-gdpa"):
        call()
        assert ops.norm(torch.ones(2, 3)).shape == (2, 3)


def broken(problem: Problem) -> Supported:
    raise ZeroDivisionError("one over none")


def test_a_supports_that_raises_is_passed_over_when_automatic(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "gem_core.ops"), dispatch.offering(spec("broken", supports=broken)):
        call()
        assert "broken: broke when asked: ZeroDivisionError: one over none" in caplog.text
        table = {name: (ok, reason) for name, ok, reason in ops.available(ops.gdpa, *arguments())}
    assert table["broken"] == (False, "broke when asked: ZeroDivisionError: one over none")


def test_a_supports_that_raises_is_an_error_when_asked_for() -> None:
    with dispatch.offering(spec("broken", supports=broken)), pytest.raises(PluginError, match="one over none"):
        call(backend="broken")


def test_forward_without_backward_takes_the_default_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "gem_core.ops"), dispatch.offering(spec("half", backward=None)):
        call(backend="half").sum().backward()
        call(backend="half").sum().backward()
    assert [m for m in caplog.messages if "'half' has no backward" in m] == caplog.messages
    assert len(caplog.messages) == 1


def test_backward_keeps_the_choice_of_its_forward() -> None:
    calls: list[str] = []

    def backward(*args: Any) -> Any:
        calls.append("backward")
        return REFERENCE.backward(*args)

    with dispatch.offering(spec("mine", backward=backward)):
        with ops.use_policy(ops={"gdpa": "mine"}):
            out = call()
        with ops.use_policy(ops={"gdpa": "reference"}):
            out.sum().backward()
    assert calls == ["backward"]


def test_the_gradient_of_a_move_follows_its_forward_or_the_policy() -> None:
    calls: list[str] = []
    moves = {s.op: s for s in ops.builtin_specs()}

    def counting(op: str, name: str) -> KernelSpec:
        def forward(problem: Problem, *tensors: Any, **sizes: Any) -> Any:
            calls.append(f"{op}/{name}")
            return moves[op].forward(problem, *tensors, **sizes)

        return dataclasses.replace(moves[op], name=name, forward=forward, priority=-1)

    values, offsets = torch.ones(2, 3, requires_grad=True), lengths_to_offsets(torch.tensor([1, 2]))
    with dispatch.offering(*(counting(op, name) for op in ("jagged_expand", "jagged_sum") for name in ("mine", "theirs"))):
        ops.jagged_expand(values, offsets, backend="mine").sum().backward()
        with ops.use_policy("mine", {"jagged_sum": "theirs"}):
            ops.jagged_expand(values, offsets).sum().backward()
    assert calls == ["jagged_expand/mine", "jagged_sum/mine", "jagged_expand/mine", "jagged_sum/theirs"]


def test_available_and_explain() -> None:
    with dispatch.offering(spec("picky", supports=lambda p: no("D is 2"))):
        rows = ops.available("gdpa", *arguments())
        assert rows[0] == ("picky", False, "D is 2")
        assert rows[-1] == ("reference", True, "")
        text = ops.explain(ops.gdpa, *arguments(), backend="reference")
        assert text.splitlines()[0] == "gdpa: reference (asked for: reference)"
        assert "    picky: D is 2" in text
        assert "  * reference: supported" in text
        assert "cannot do this problem" in ops.explain("gdpa", *arguments(), backend="picky")
    with pytest.raises(OpError, match="no activation"):
        ops.available("gdpa", *arguments(), activation="gleu")
    for op, args in (("norm", (torch.ones(2, 3),)), ("jagged_sum", (torch.ones(3, 2), arguments()[3]))):
        # behind it there are at most peers that are taken by name only
        assert ("reference", True, "") in ops.available(op, *args)


def test_problem_holds_what_a_choice_may_depend_on() -> None:
    seen: list[Problem] = []

    def supports(problem: Problem) -> Supported:
        seen.append(problem)
        return no("only looking")

    q = torch.randn(100, 4, 8, dtype=torch.float64, requires_grad=True)
    k = torch.randn(100, 2, 8, dtype=torch.float64)
    bias = ops.RelativeBias(torch.zeros(4, 3, dtype=torch.float64))
    offsets = lengths_to_offsets(torch.tensor([33, 67]))
    with dispatch.offering(spec("curious", supports=supports)):
        ops.gdpa(q, k, k[:, :, :6], offsets, bias=bias, window=(3, -1), activation=("gelu",) * 4, max_q_len=67)
        ops.gdpa(q, k, k[:, :, :6], offsets, bias=bias, window=(3, -1), activation=("gelu",) * 4, max_q_len=127)
    problem = seen[0]
    assert (problem.op, problem.device, problem.arch, problem.needs_grad) == ("gdpa", "cpu", None, True)
    assert dict(problem.dims) == {"H": 4, "Hkv": 2, "D": 8, "Dv": 6}
    assert problem.dtype("q") == torch.float64
    assert problem.option("window") == (3, -1)
    assert problem.option("activation") == ("gelu",) * 4
    assert (problem.option("max_q_len"), problem.option("max_k_len")) == (128, 128)
    assert problem.present == {"q_offsets", "bias_position"}
    assert len(set(seen)) == 1, "lengths must not make another problem"
    assert hash(problem) == hash(dataclasses.replace(problem))


NORM = next(s for s in ops.builtin_specs() if s.op == "norm")


def _altered(part: str, alter: Any) -> KernelSpec:
    whole = getattr(NORM, part)
    return dataclasses.replace(NORM, name="mine", **{part: lambda *args: alter(whole(*args))})


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (
            _altered("forward", lambda a: (a[0][0], a[1])),
            r"the result of forward is a tensor; the contract wants a tuple \(y, residual_out\)",
        ),
        (_altered("forward", lambda a: a[0][0]), r"forward returned a tensor; the contract wants \(result, saved\)"),
        (
            _altered("forward", lambda a: (a[0], a[1][:-1])),
            r"forward saved 4 values; the contract wants \(normed, weight, bias, mean, rstd\)",
        ),
        (_altered("backward", lambda a: a[0]), r"backward returned a tensor; .* for each of \(x, weight, bias\)"),
        (_altered("backward", lambda a: a[:2]), r"backward returned 2 values; .* for each of \(x, weight, bias\)"),
    ],
)
def test_a_kernel_that_breaks_the_contract_is_told_where(kernel: KernelSpec, words: str) -> None:
    with dispatch.offering(kernel), pytest.raises(OpError, match=f"'mine' does not keep the contract of norm: {words}"):
        ops.norm(torch.ones(3, 4, requires_grad=True), backend="mine").sum().backward()
