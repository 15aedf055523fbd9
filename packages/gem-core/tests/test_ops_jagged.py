"""Data-movement ops: references against lists of rows, gradients, shapes that need no values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from gem_core import ops
from gem_core.errors import OpError
from gem_core.jagged import lengths_to_offsets

BACKENDS = ("reference", "auto")


def offsets(lengths: list[int]) -> Tensor:
    return lengths_to_offsets(torch.tensor(lengths, dtype=torch.int64))


def rows(lengths: list[int], *shape: int, slack: int = 0) -> tuple[Tensor, list[Tensor]]:
    values = torch.randn(sum(lengths) + slack, *shape, dtype=torch.float64)
    return values, list(values[: sum(lengths)].split(lengths))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.sampled_from([0, 1, 7, 8, 65]), st.sampled_from([0, 1, 2, 9]), st.floats(0, 1)), max_size=5),
    st.sampled_from([(), (3,), (2, 3)]),
    st.sampled_from([0, 2]),
    st.sampled_from(BACKENDS),
)
def test_against_lists(samples: list[tuple[int, int, float]], shape: tuple[int, ...], slack: int, backend: str) -> None:
    a_lengths, b_lengths = [s[0] for s in samples], [s[1] for s in samples]
    first = [int(s[0] * s[2]) for s in samples]
    a, a_parts = rows(a_lengths, *shape, slack=slack)
    b, b_parts = rows(b_lengths, *shape)
    a_offsets, n = offsets(a_lengths), sum(a_lengths)
    joined, joined_offsets = ops.jagged_concat([(a, a_offsets), (b, offsets(b_lengths))], backend=backend)
    assert torch.equal(joined_offsets, offsets([x + y for x, y in zip(a_lengths, b_lengths)]))
    expected = torch.cat([x for pair in zip(a_parts, b_parts) for x in pair] or [a[:0]])
    assert torch.equal(joined[: len(expected)], expected)
    assert joined.shape[0] == len(a) + len(b)
    assert not joined[len(expected) :].any()

    (left, left_offsets), (right, right_offsets) = ops.jagged_split(a, a_offsets, torch.tensor(first, dtype=torch.int64), backend=backend)
    assert torch.equal(left_offsets, offsets(first))
    assert torch.equal(right_offsets, a_offsets - left_offsets)
    assert torch.equal(left, torch.cat([p[:k] for p, k in zip(a_parts, first)] or [a[:0]]))
    assert torch.equal(right[: n - sum(first)], torch.cat([p[k:] for p, k in zip(a_parts, first)] or [a[:0]]))
    assert right.shape[0] == len(a) - sum(first)

    summed, mean = ops.jagged_sum(a, a_offsets, backend=backend), ops.jagged_mean(a, a_offsets, backend=backend)
    for b_, part in enumerate(a_parts):
        torch.testing.assert_close(summed[b_], part.sum(0))
        torch.testing.assert_close(mean[b_], part.mean(0) if len(part) else torch.zeros(shape, dtype=torch.float64))

    padded = ops.jagged_to_padded(a, a_offsets, 66, fill=-2.0, backend=backend)
    for b_, part in enumerate(a_parts):
        assert torch.equal(padded[b_, : len(part)], part)
        assert (padded[b_, len(part) :] == -2).all()
    assert torch.equal(ops.padded_to_jagged(padded, a_offsets, backend=backend), a[:n])

    spread = ops.jagged_expand(summed, a_offsets, rows=len(a), backend=backend)
    assert torch.equal(spread[:n], torch.cat([summed[b_ : b_ + 1].expand(len(p), *shape) for b_, p in enumerate(a_parts)] or [a[:0]]))
    assert not spread[n:].any()


def _call(name: str) -> tuple[Callable[..., object], tuple[Tensor, ...]]:
    o, p = offsets([2, 0, 3]), offsets([1, 2, 0])
    a, b = rows([2, 0, 3], 2, slack=1)[0].requires_grad_(), rows([1, 2, 0], 2)[0].requires_grad_()
    per_sample, padded = torch.randn(3, 2).double().requires_grad_(), torch.randn(3, 4, 2).double().requires_grad_()
    calls = {
        "concat": (lambda a, b: ops.jagged_concat([(a, o), (b, p)])[0], (a, b)),
        "split": (lambda a: [part[0] for part in ops.jagged_split(a, o, torch.tensor([1, 0, 3]))], (a,)),
        "split, rows unknown": (lambda a: [part[0] for part in _blind_split(a, o)], (a,)),
        "sum": (lambda a: ops.jagged_sum(a, o), (a,)),
        "mean": (lambda a: ops.jagged_mean(a, o), (a,)),
        "expand": (lambda x: ops.jagged_expand(x, o, rows=6), (per_sample,)),
        "to padded": (lambda a: ops.jagged_to_padded(a, o, 4, 1.0), (a,)),
        "from padded": (lambda x: ops.padded_to_jagged(x, o, rows=7), (padded,)),
    }
    return calls[name]


def _blind_split(a: Tensor, o: Tensor) -> list[tuple[Tensor, Tensor]]:
    """What jagged_split does where the host cannot read the lengths: both results as long as the input."""
    first = torch.tensor([0, 1, 1, 4])
    spec = ops.jagged_ops._spec("jagged_split", (a,), None)
    parts = torch.ops.gem.jagged_split.default(a, [first, o - first], [len(a), len(a)], spec)
    return [(parts[0], first), (parts[1], o - first)]


@pytest.mark.parametrize("name", ["concat", "split", "split, rows unknown", "sum", "mean", "expand", "to padded", "from padded"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradcheck(name: str, backend: str) -> None:
    torch.manual_seed(0)
    function, leaves = _call(name)
    with ops.use_policy(backend):
        assert gradcheck(function, leaves)


@pytest.mark.parametrize("backend", BACKENDS)
def test_integers_move_too(backend: str) -> None:
    o = offsets([2, 0, 1])
    ids = torch.tensor([5, 6, 7])
    assert ops.jagged_concat([(ids, o), (ids, o)], backend=backend)[0].tolist() == [5, 6, 5, 6, 7, 7]
    assert ops.jagged_to_padded(ids, o, 2, fill=-1, backend=backend).tolist() == [[5, 6], [-1, -1], [7, -1]]
    assert ops.jagged_sum(ids, o, backend=backend).tolist() == [11, 0, 7]
    with pytest.raises(OpError, match="cast them to a float"):
        ops.jagged_mean(ids, o)


def test_sums_accumulate_in_fp32() -> None:
    values = torch.full((4096,), 1.0, dtype=torch.bfloat16)
    for backend in BACKENDS:
        assert ops.jagged_sum(values, offsets([4096]), backend=backend) == 4096


def test_without_values_shapes_are_bounds() -> None:
    values, o = torch.empty(9, 2, device="meta"), torch.empty(4, dtype=torch.int64, device="meta")
    (a, _), (b, _) = ops.jagged_split(values, o, torch.empty(3, dtype=torch.int64, device="meta"))
    assert a.shape == b.shape == (9, 2)
    assert ops.padded_to_jagged(torch.empty(3, 4, 2, device="meta"), o).shape == (12, 2)
    with pytest.raises(OpError, match="rows must be given"):
        ops.jagged_expand(torch.empty(3, 2, device="meta"), o)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda v, o: ops.jagged_to_padded(v, o, 2), "sample 2 has 3 rows, more than max_len = 2"),
        (lambda v, o: ops.padded_to_jagged(torch.zeros(3, 2, 1), o), "more than the padded length = 2"),
        (lambda v, o: ops.jagged_split(v, o, torch.tensor([0, 1, 0])), "lengths of sample 1 are not within the sample"),
        (lambda v, o: ops.jagged_split(v, o, torch.tensor([-1, 0, 0])), "lengths of sample 0 are not within the sample"),
        (lambda v, o: ops.jagged_split(v, o, torch.tensor([2, 0, 1]), first_rows=2), "part 0 has 3 rows, more than 2"),
        (lambda v, o: ops.jagged_split(v, o, torch.tensor([1])), "1 lengths for 3 samples"),
        (lambda v, o: ops.jagged_concat([]), "nothing to concatenate"),
        (lambda v, o: ops.jagged_concat([(v, o), (v[:, :1], o)]), "part 1 has rows"),
        (lambda v, o: ops.jagged_concat([(v, o), (v, o[:2])]), "part 1 has 1 samples"),
        (lambda v, o: ops.jagged_sum(v[:3], o), "offsets ends with 5, but there are 3 rows"),
        (lambda v, o: ops.jagged_sum(v, o + 1), "offsets begins with 1"),
        (lambda v, o: ops.jagged_sum(v, o.float()), "offsets has dtype torch.float32"),
        (lambda v, o: ops.jagged_sum(v, torch.tensor([0, 3, 2, 5])), "offsets decreases at sample 1"),
    ],
)
def test_bad_arguments(call: Callable[[Tensor, Tensor], object], message: str) -> None:
    with pytest.raises(OpError, match=message):
        call(torch.zeros(5, 2), offsets([2, 0, 3]))
