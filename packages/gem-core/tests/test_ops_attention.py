"""jagged_attention and gdpa: the reference against an independent dense computation, gradcheck, isolation by perturbation."""

from __future__ import annotations

import dataclasses
import importlib.util
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from gem_core import ops
from gem_core.errors import OpError
from gem_core.jagged import lengths_to_offsets

_spec = importlib.util.spec_from_file_location("dense_oracle", Path(__file__).with_name("dense_oracle.py"))
assert _spec is not None
assert _spec.loader is not None
oracle = importlib.util.module_from_spec(_spec)
sys.modules["dense_oracle"] = oracle
_spec.loader.exec_module(oracle)

LENGTHS = (0, 1, 2, 7, 8, 9)
EDGES = [2, 6, 15]


def offsets(lengths: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return lengths_to_offsets(torch.tensor(lengths, dtype=dtype))


@dataclasses.dataclass
class Problem:
    """A random call: dense form, arguments of the op beside q, k, v and the tables, and the leaves."""

    dense: Any
    offsets: tuple[Tensor | None, Tensor]
    options: dict[str, Any]
    leaves: dict[str, Tensor]
    times: tuple[Tensor, Tensor, Tensor] | None = None

    def run(self, op: Any, leaves: dict[str, Tensor] | None = None, **extra: Any) -> Any:
        t = self.leaves if leaves is None else leaves
        kw = dict(self.options)
        if "target_k" in t:
            kw["target_kv"] = t["target_k"], t["target_v"]
        if "position" in t:
            kw["bias"] = ops.RelativeBias(t["position"], t.get("time"), *(self.times or ()))
        return op(t["q"], t["k"], t["v"], *self.offsets, **kw, **extra, backend="reference")


def make(
    seed: int, q_lengths: list[int], k_lengths: list[int] | None = None, *, heads: int = 2, kv_heads: int = 2, d: int = 4, dv: int = 3,
    targets: bool = False, context: bool = False, position: bool = False, time: bool = False, sharing: bool = False,
    broadcast: int = 0, causal: bool = False, window: Any = None, slack: int = 2,
) -> Problem:  # fmt: skip
    torch.manual_seed(seed)
    rng = random.Random(seed)
    own_keys = k_lengths is None
    keys = list(q_lengths) if k_lengths is None else k_lengths
    index = [rng.randrange(len(keys)) for _ in q_lengths] if sharing else None
    seen = [keys[i] for i in index] if index is not None else keys
    nq, nk = (broadcast or sum(q_lengths) + slack), sum(keys) + slack
    x = {"q": torch.randn(nq, heads, d), "k": torch.randn(nk, kv_heads, d), "v": torch.randn(nk, kv_heads, dv)}
    options: dict[str, Any] = {"causal": causal, "window": window, "broadcast_q": bool(broadcast)}
    counts = [rng.randint(0, a if sharing else min(a, b)) for a, b in zip(q_lengths, seen)] if targets else None
    prefix = [rng.choice([0, 1, 3, 6]) for _ in q_lengths] if context else None
    if counts is not None:
        options["num_targets"] = torch.tensor(counts, dtype=torch.int32)
        if sharing:
            x |= {"target_k": torch.randn(nq, kv_heads, d), "target_v": torch.randn(nq, kv_heads, dv)}
    if prefix is not None:
        options["context_len"] = torch.tensor(prefix, dtype=torch.int64)
    if index is not None:
        options["kv_index"] = torch.tensor(index, dtype=torch.int64)
    if position:
        x["position"] = torch.randn(heads, 7)
    times = None
    if time:
        x["time"] = torch.randn(heads, len(EDGES) + 1)
        times = torch.tensor(EDGES), torch.randint(0, 25, (nq,)), torch.randint(0, 25, (nk,))
    leaves = {n: t.double().requires_grad_() for n, t in x.items()}
    q_times, k_times = (None, None) if times is None else (times[1].tolist(), times[2].tolist())
    dense = oracle.Dense(
        leaves["q"], leaves["k"], leaves["v"], list(q_lengths), keys, index, counts,
        (leaves["target_k"], leaves["target_v"]) if "target_k" in leaves else None, prefix, causal, window,
        leaves.get("position"), leaves.get("time"), EDGES, q_times, k_times, bool(broadcast),
    )  # fmt: skip
    given_k = None if own_keys and not sharing and not broadcast else offsets(keys)
    return Problem(dense, (None if broadcast else offsets(list(q_lengths)), given_k), options, leaves, times)


OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "cross": {"k_lengths": [2, 5, 0, 3, 9]},
    "causal": {"causal": True},
    "causal cross": {"causal": True, "k_lengths": [2, 5, 0, 3, 9]},
    "window": {"window": 2},
    "window asymmetric": {"window": (-1, 1), "k_lengths": [2, 5, 0, 3, 9]},
    "window causal": {"window": (3, 5), "causal": True},
    "candidates": {"targets": True},
    "candidates causal window": {"targets": True, "causal": True, "window": (3, -1), "k_lengths": [3, 7, 0, 2, 9]},
    "context": {"context": True, "causal": True},
    "context candidates window": {"context": True, "targets": True, "window": (1, 0)},
    "context cross": {"context": True, "causal": True, "k_lengths": [1, 6, 2, 0, 4]},
    "position bias": {"position": True, "k_lengths": [2, 5, 0, 3, 9]},
    "time bias": {"position": True, "time": True, "causal": True},
    "bias candidates": {"position": True, "time": True, "targets": True, "context": True},
    "grouped heads": {"heads": 4, "kv_heads": 2},
    "sharing": {"sharing": True, "k_lengths": [4, 0, 7]},
    "sharing candidates": {"sharing": True, "k_lengths": [4, 0, 7], "targets": True, "causal": True},
    "sharing candidates bias": {"sharing": True, "k_lengths": [4, 0, 7], "targets": True, "position": True, "time": True, "context": True},
    "broadcast": {"broadcast": 3, "k_lengths": [4, 0, 7]},
    "broadcast sharing": {"broadcast": 2, "sharing": True, "k_lengths": [4, 0, 7]},
}
Q_LENGTHS = [3, 1, 0, 7, 5]


def check_against_dense(problem: Problem) -> None:
    names = list(problem.leaves)
    out, lse = problem.run(ops.jagged_attention, scale=0.6, out_scale=0.3, return_lse=True)
    expected, expected_lse = problem.dense.softmax(0.6, 0.3)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    compare_gradients(out, expected, problem, names)
    out = problem.run(ops.gdpa, activation="silu", scale_in=0.7, scale_out=0.4)
    expected = problem.dense.pointwise(F.silu, 0.7, 0.4)
    torch.testing.assert_close(out, expected)
    compare_gradients(out, expected, problem, names)


def compare_gradients(out: Tensor, expected: Tensor, problem: Problem, names: list[str]) -> None:
    weight = torch.randn_like(out)
    leaves = [problem.leaves[n] for n in names]
    found, wanted = (torch.autograd.grad(o, leaves, weight, allow_unused=True) for o in (out, expected))
    for name, a, b in zip(names, found, wanted):
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b, msg=lambda m, n=name: f"gradient of {n}: {m}")


@pytest.mark.parametrize("name", OPTIONS)
def test_reference_equals_dense(name: str) -> None:
    check_against_dense(make(1, Q_LENGTHS, **OPTIONS[name]))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_reference_equals_dense_at_random(data: Any) -> None:
    flag = st.booleans()
    q_lengths = data.draw(st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=4))
    sharing = data.draw(flag)
    size = data.draw(st.integers(1, 3)) if sharing else len(q_lengths)
    k_lengths = data.draw(st.one_of(st.none(), st.lists(st.sampled_from(LENGTHS), min_size=size, max_size=size)))
    window = data.draw(st.sampled_from([None, 0, 1, 3, (2, -1), (-1, 0), (0, 4)]))
    position = data.draw(flag)
    kv_heads = data.draw(st.sampled_from([1, 2]))
    check_against_dense(
        make(
            data.draw(st.integers(0, 99)), q_lengths, [5, 0, 8][:size] if sharing and k_lengths is None else k_lengths, kv_heads=kv_heads,
            targets=data.draw(flag), context=data.draw(flag), position=position, time=position and data.draw(flag), sharing=sharing,
            causal=data.draw(flag), window=window,
        )
    )  # fmt: skip


@pytest.mark.parametrize("length", [63, 64, 65])
def test_reference_equals_dense_around_64(length: int) -> None:
    check_against_dense(make(3, [length, 1], [65, 0], causal=True, window=(40, 9), heads=1, kv_heads=1))


@pytest.mark.parametrize(
    "name", ["causal cross", "bias candidates", "sharing candidates bias", "broadcast sharing", "context candidates window"]
)
def test_gradcheck(name: str) -> None:
    problem = make(2, [2, 0, 4], **{**OPTIONS[name], **({"k_lengths": [3, 1, 2]} if "k_lengths" in OPTIONS[name] else {})}, d=2, dv=2)
    names = list(problem.leaves)

    def softmax(*values: Tensor) -> Tensor:
        return problem.run(ops.jagged_attention, dict(zip(names, values)), scale=0.6, out_scale=0.3)

    def pointwise(*values: Tensor) -> Tensor:
        return problem.run(ops.gdpa, dict(zip(names, values)), activation=("gelu", "fast_gelu"), scale_in=0.7, scale_out=0.4)

    leaves = tuple(problem.leaves.values())
    assert gradcheck(softmax, leaves)
    assert gradcheck(pointwise, leaves)


def perturbed(problem: Problem, op: Any, rows: list[int], **extra: Any) -> Tensor:
    """Result rows that change when these rows of k and v do: ``[N]`` bool."""
    before = problem.run(op, **extra)
    leaves = {n: t.detach().clone() for n, t in problem.leaves.items()}
    for name in ("k", "v"):
        leaves[name][rows] += 1.0
    return (problem.run(op, leaves, **extra) != before).flatten(1).any(1)


ATTEND = [(ops.jagged_attention, {}), (ops.gdpa, {"activation": "gelu", "scale_in": 0.5})]


@pytest.mark.parametrize(("op", "extra"), ATTEND)
def test_causal_rows_do_not_see_the_future(op: Any, extra: dict[str, Any]) -> None:
    problem = make(5, [6, 5], causal=True, slack=0)
    for key in range(6):
        changed = perturbed(problem, op, [key], **extra)
        assert changed.tolist() == [i >= key for i in range(6)] + [False] * 5


@pytest.mark.parametrize(("op", "extra"), ATTEND)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"context": True}, {"window": (2, 2)}])
def test_candidates_are_seen_by_themselves_only(op: Any, extra: dict[str, Any], options: dict[str, Any]) -> None:
    problem = make(5, [6, 5], slack=0, **options)
    problem.options["num_targets"] = torch.tensor([3, 2])
    for key in (3, 4, 5, 9, 10):
        assert perturbed(problem, op, [key], **extra).nonzero().flatten().tolist() == [key]


@pytest.mark.parametrize(("op", "extra"), ATTEND)
def test_samples_do_not_see_each_other(op: Any, extra: dict[str, Any]) -> None:
    problem = make(5, [4, 0, 3, 5], position=True, slack=1)
    changed = perturbed(problem, op, [4, 5, 6], **extra)
    assert changed.nonzero().flatten().tolist() == [4, 5, 6]


@pytest.mark.parametrize(("op", "extra"), ATTEND)
def test_order_of_samples_does_not_matter(op: Any, extra: dict[str, Any]) -> None:
    problem = make(5, [4, 0, 3, 5], causal=True, position=True, slack=0)
    out = problem.run(op, **extra).split([4, 0, 3, 5])
    order = [2, 3, 0, 1]
    lengths = [[4, 0, 3, 5][b] for b in order]
    leaves = dict(problem.leaves)
    for name in ("q", "k", "v"):
        parts = problem.leaves[name].split([4, 0, 3, 5])
        leaves[name] = torch.cat([parts[b] for b in order])
    problem.offsets = (offsets(lengths), None)
    again = problem.run(op, leaves, **extra).split(lengths)
    for place, b in enumerate(order):
        assert torch.equal(again[place], out[b])


def test_request_without_samples_gets_no_gradient() -> None:
    problem = make(5, [2, 3], [4, 2, 3], sharing=True, slack=0)
    problem.options["kv_index"] = torch.tensor([2, 0])
    grads = torch.autograd.grad(problem.run(ops.jagged_attention).sum(), [problem.leaves["k"], problem.leaves["v"]])
    assert all(not g[4:6].any() and g[:4].any() and g[6:].any() for g in grads)


def test_a_row_that_sees_no_key() -> None:
    problem = make(5, [4], [2], causal=True, slack=0)
    out, lse = problem.run(ops.jagged_attention, return_lse=True)
    assert not out[:2].any()
    assert (lse[:, :2] == -torch.inf).all()
    assert lse[:, 2:].isfinite().all()
    assert not torch.autograd.grad(out.sum(), problem.leaves["q"])[0][:2].any()


def test_slack_is_never_read() -> None:
    problem = make(5, [4, 2], position=True, slack=3)
    for name in ("q", "k", "v"):
        problem.leaves[name].data[6:] = torch.nan
    for op in (ops.jagged_attention, ops.gdpa):
        out = problem.run(op)
        grads = torch.autograd.grad(out.sum(), list(problem.leaves.values()))
        assert out.isfinite().all()
        assert not out[6:].any()
        assert all(g.isfinite().all() for g in grads)
        assert all(not g[6:].any() for g in grads[:3])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_of_both_types(dtype: torch.dtype) -> None:
    problem = make(5, [4, 2], [3, 5])
    expected = problem.run(ops.jagged_attention)
    problem.offsets = tuple(o.to(dtype) for o in problem.offsets)
    assert torch.equal(problem.run(ops.jagged_attention), expected)


def test_lse_has_no_gradient() -> None:
    _, lse = make(5, [4, 2]).run(ops.jagged_attention, return_lse=True)
    assert not lse.requires_grad


def test_low_precision_inputs_give_their_dtype() -> None:
    q = torch.randn(5, 2, 8, dtype=torch.bfloat16)
    out, lse = ops.jagged_attention(q, q, q, offsets([2, 3]), return_lse=True, backend="reference")
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)


def test_autocast_casts_as_linear_does() -> None:
    q = torch.randn(5, 2, 8, requires_grad=True)
    table = torch.randn(2, 5, requires_grad=True)
    for backend in ("reference", "auto"):
        with torch.autocast("cpu", torch.bfloat16):
            out = ops.jagged_attention(q, q, q, offsets([2, 3]), bias=ops.RelativeBias(table), backend=backend)
        assert out.dtype == torch.bfloat16
        grads = torch.autograd.grad(out.float().sum(), [q, table])
        assert [g.dtype for g in grads] == [torch.float32, torch.float32]
        exact = ops.jagged_attention(
            *(q.bfloat16().double() for _ in range(3)), offsets([2, 3]), bias=ops.RelativeBias(table.double()), backend="reference"
        )
        torch.testing.assert_close(out.double(), exact, rtol=8e-3, atol=1e-3)


def test_second_derivative_is_refused() -> None:
    problem = make(5, [3])
    (grad,) = torch.autograd.grad(problem.run(ops.gdpa).sum(), problem.leaves["q"], create_graph=True)
    with pytest.raises(OpError, match="no second derivative"):
        torch.autograd.grad(grad.sum(), problem.leaves["q"])
