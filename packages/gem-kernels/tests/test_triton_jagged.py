"""The Triton jagged ops: conformance kit, and every dtype bit for bit against the reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_core import ops
from gem_core.jagged import lengths_to_offsets
from gem_core.testing.kernels import KernelConformance
from gem_kernels.triton import jagged
from gem_kernels.triton.common.device import on_cpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
SPECS = {spec.op: spec for spec in jagged.specs()}
DTYPES = (torch.float32, torch.bfloat16)
LENGTHS = st.lists(st.sampled_from([0, 1, 2, 7, 8, 63, 64, 65]), max_size=6)


def _context():
    return nullcontext() if DEVICE == "cuda" else on_cpu()


@pytest.fixture(autouse=True)
def _where_it_runs() -> Iterator[None]:
    with _context():
        yield


for _op, _spec in SPECS.items():
    _name = f"Test{_op.title().replace('_', '')}"
    globals()[_name] = type(_name, (KernelConformance,), {"spec": _spec, "device": DEVICE, "dtypes": DTYPES})


def _values(rows: int, dtype: torch.dtype, width: int = 3) -> torch.Tensor:
    bits = torch.randint(-(1 << 30), 1 << 30, (rows, width), generator=torch.Generator().manual_seed(rows))
    return (bits % 2 == 0 if dtype == torch.bool else bits.to(dtype)).to(DEVICE)


def _offsets(lengths: list[int]) -> torch.Tensor:
    return lengths_to_offsets(torch.tensor(lengths, dtype=torch.int64)).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool, torch.float64, torch.float16], ids=str)
def test_every_dtype_moves_unchanged(dtype: torch.dtype) -> None:
    a, b = [3, 0, 65, 2], [1, 4, 0, 9]
    va, oa, vb, ob = _values(sum(a) + 2, dtype), _offsets(a), _values(sum(b), dtype), _offsets(b)
    mine, reference = {"backend": "triton"}, {"backend": ops.REFERENCE}
    whole, offsets = ops.jagged_concat([(va, oa), (vb, ob)], **mine)
    assert torch.equal(whole, ops.jagged_concat([(va, oa), (vb, ob)], **reference)[0])
    (first, _), (rest, _) = ops.jagged_split(whole, offsets, oa.diff(), first_rows=sum(a), **mine)
    assert torch.equal(first, va[: sum(a)])
    assert torch.equal(rest[: sum(b)], vb)
    padded = ops.jagged_to_padded(va, oa, 70, 1.0, **mine)
    assert torch.equal(padded, ops.jagged_to_padded(va, oa, 70, 1.0, **reference))
    assert torch.equal(ops.padded_to_jagged(padded, oa, rows=sum(a), **mine), va[: sum(a)])
    spread = ops.jagged_expand(vb[:4], oa, rows=sum(a) + 2, **mine)
    assert torch.equal(spread, ops.jagged_expand(vb[:4], oa, rows=sum(a) + 2, **reference))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_integer_sums_are_exact(dtype: torch.dtype) -> None:
    lengths = [200, 0, 3]
    values, offsets = _values(203, torch.int32).remainder(1000).to(dtype), _offsets(lengths)
    assert torch.equal(ops.jagged_sum(values, offsets, backend="triton"), ops.jagged_sum(values, offsets, backend=ops.REFERENCE))


@settings(max_examples=8, deadline=None, derandomize=True)
@given(a=LENGTHS, data=st.data())
def test_concat_then_split_gives_the_parts_back(a: list[int], data: st.DataObject) -> None:
    b = data.draw(st.lists(st.sampled_from([0, 1, 63, 65]), min_size=len(a), max_size=len(a)))
    with _context():
        va, vb = _values(sum(a), torch.int32), _values(sum(b), torch.int32)
        whole, offsets = ops.jagged_concat([(va, _offsets(a)), (vb, _offsets(b))], backend="triton")
        (first, _), (rest, _) = ops.jagged_split(whole, offsets, _offsets(a).diff(), first_rows=sum(a), backend="triton")
    assert torch.equal(first, va)
    assert torch.equal(rest, vb)


def test_what_cannot_be_summed_is_refused_with_the_reason() -> None:
    from gem_core.errors import OpError

    with pytest.raises(OpError, match="bool"):
        ops.jagged_sum(_values(4, torch.bool), _offsets([4]), backend="triton")
