"""Moving packed rows: concat, split, sum, mean, expand, to padded and back. The gradient of each is another one of them.

Shapes never depend on values, so nothing waits for the device: a result whose exact row count only the device knows is allocated with the
bound that the host knows, its surplus rows (zeros) last, unless the caller tells the count. On CPU, outside of torch.compile, the count is
read from the offsets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from gem_core.errors import OpError
from gem_core.ops import checks, dispatch, flop_registry, library
from gem_core.ops.contract import OpContract, Problem, arch_of
from gem_core.ops.contracts import (
    JAGGED_CONCAT,
    JAGGED_EXPAND,
    JAGGED_MEAN,
    JAGGED_SPLIT,
    JAGGED_SUM,
    JAGGED_TO_PADDED,
    PADDED_TO_JAGGED,
)
from gem_core.ops.frontend import finish
from gem_core.ops.remember import remembered

Part = tuple[Tensor, Tensor]


def jagged_concat(parts: Sequence[Part], *, backend: str | None = None) -> Part:
    """Concatenate packed sequences sample by sample.

    :param parts: pairs (values ``[N_i, ...]``, offsets ``[B+1]``) with one B, one row shape and one dtype (any).
    :return: values ``[ΣN_i, ...]`` (slack rows of the parts become zero rows at the end) and offsets ``[B+1]``.
    :raises OpError: parts of different B, row shape or dtype.
    """
    op = "jagged_concat"
    if not parts:
        raise OpError(f"{op}: there is nothing to concatenate", where="parts", fix="pass one or more (values, offsets) pairs")
    values, offsets = [p[0] for p in parts], [p[1] for p in parts]
    for i, (v, o) in enumerate(zip(values, offsets)):
        _check_part(op, f"parts[{i}]", v, o)
        checks.require(
            v.shape[1:] == values[0].shape[1:],
            op,
            "parts",
            "part {} has rows {}, part 0 {}",
            i,
            tuple(v.shape[1:]),
            tuple(values[0].shape[1:]),
        )
        checks.require(v.dtype == values[0].dtype, op, "parts", "part {} has dtype {}, part 0 {}", i, v.dtype, values[0].dtype)
        checks.require(
            o.shape == offsets[0].shape, op, "parts", "part {} has {} samples, part 0 {}", i, o.shape[0] - 1, offsets[0].shape[0] - 1
        )
    total = offsets[0]
    for o in offsets[1:]:
        total = total + o
    return torch.ops.gem.jagged_concat.default(values, offsets, _spec(op, values, backend)), total


def jagged_split(
    values: Tensor, offsets: Tensor, lengths: Tensor, *, first_rows: int | None = None, backend: str | None = None
) -> tuple[Part, Part]:
    """Split every sample in two: its first ``lengths[b]`` rows, and the rest.

    :param values: ``[N, ...]``. :param offsets: ``[B+1]``. :param lengths: ``[B]`` int, 0 <= lengths[b] <= length of sample b.
    :param first_rows: sum of ``lengths`` where the host knows it. None: read on CPU; elsewhere both results have N rows, surplus rows last.
    :return: (values, offsets) of the first parts, (values, offsets) of the rests.
    :raises OpError: shapes that do not fit.
    """
    op = "jagged_split"
    _check_part(op, "values", values, offsets)
    checks.check_index(op, "lengths", lengths, values, "[B]")
    checks.require(
        lengths.shape[0] == offsets.shape[0] - 1, op, "lengths", "{} lengths for {} samples", lengths.shape[0], offsets.shape[0] - 1
    )
    first = pad(lengths.cumsum(0), (1, 0)).to(offsets.dtype)
    rest = offsets - first
    n = values.shape[0]
    if first_rows is None and _readable(offsets):
        first_rows = int(first[-1])
    rows = [n, n] if first_rows is None else [first_rows, n - first_rows]
    a, b = torch.ops.gem.jagged_split.default(values, [first, rest], rows, _spec(op, (values,), backend))
    return (a, first), (b, rest)


def jagged_sum(values: Tensor, offsets: Tensor, *, backend: str | None = None) -> Tensor:
    """Sum of each sample's rows: ``[N, ...]`` to ``[B, ...]``, accumulated in fp32 (fp64 for fp64); 0 for an empty sample.

    :raises OpError: shapes that do not fit.
    """
    _check_part("jagged_sum", "values", values, offsets)
    return torch.ops.gem.jagged_sum.default(values, offsets, _spec("jagged_sum", (values,), backend))


def jagged_mean(values: Tensor, offsets: Tensor, *, backend: str | None = None) -> Tensor:
    """Mean of each sample's rows: ``[N, ...]`` float to ``[B, ...]``, accumulated in fp32 (fp64 for fp64); 0 for an empty sample.

    :raises OpError: shapes that do not fit, or integers.
    """
    _check_part("jagged_mean", "values", values, offsets)
    checks.require(
        values.is_floating_point(), "jagged_mean", "values", "values have dtype {}", values.dtype, fix="cast them to a float dtype"
    )
    return torch.ops.gem.jagged_mean.default(values, offsets, _spec("jagged_mean", (values,), backend))


def jagged_expand(values: Tensor, offsets: Tensor, *, rows: int | None = None, backend: str | None = None) -> Tensor:
    """Repeat a sample's value for each of its rows: ``[B, ...]`` to ``[rows, ...]``; rows past the last offset are 0.

    :param rows: N of the packed tensor that ``offsets [B+1]`` belong to. None: read on CPU, an error elsewhere.
    :raises OpError: shapes that do not fit, or ``rows`` unknown on a device.
    """
    op = "jagged_expand"
    checks.check_offsets_arg(op, "offsets", offsets, values)
    checks.require(
        values.dim() >= 1 and values.shape[0] == offsets.shape[0] - 1,
        op,
        "values",
        "values have shape {}",
        tuple(values.shape),
        fix="[B, ...]",
    )
    if rows is None:
        if not _readable(offsets):
            raise OpError(f"{op}: rows must be given here", where="rows", fix="pass the number of rows of the packed tensor")
        rows = int(offsets[-1])
    return torch.ops.gem.jagged_expand.default(values, offsets, rows, _spec(op, (values,), backend))


def jagged_to_padded(values: Tensor, offsets: Tensor, max_len: int, fill: float = 0.0, *, backend: str | None = None) -> Tensor:
    """``[N, ...]`` to ``[B, max_len, ...]``, rows past a sample's end set to ``fill``; a sample longer than ``max_len`` is an error.

    :raises OpError: shapes that do not fit.
    """
    op = "jagged_to_padded"
    _check_part(op, "values", values, offsets)
    checks.require(max_len >= 0, op, "max_len", "max_len is {}", max_len)
    spec = _spec(op, (values,), backend, fill=float(fill))
    return torch.ops.gem.jagged_to_padded.default(values, offsets, max_len, spec)


def padded_to_jagged(padded: Tensor, offsets: Tensor, *, rows: int | None = None, backend: str | None = None) -> Tensor:
    """``[B, M, ...]`` to ``[rows, ...]``, the first length(b) rows of each sample; a sample longer than M is an error.

    :param rows: last offset where the host knows it. None: read on CPU; elsewhere B·M, surplus rows (zeros) last.
    :raises OpError: shapes that do not fit.
    """
    op = "padded_to_jagged"
    checks.check_offsets_arg(op, "offsets", offsets, padded)
    samples = offsets.shape[0] - 1
    checks.require(
        padded.dim() >= 2 and padded.shape[0] == samples,
        op,
        "padded",
        "padded has shape {} for {} samples",
        tuple(padded.shape),
        samples,
        fix="[B, M, ...]",
    )
    if rows is None:
        rows = int(offsets[-1]) if _readable(offsets) else padded.shape[0] * padded.shape[1]
    return torch.ops.gem.padded_to_jagged.default(padded, offsets, rows, _spec(op, (padded,), backend))


def _check_part(op: str, name: str, values: Tensor, offsets: Tensor) -> None:
    if not isinstance(values, Tensor) or values.dim() < 1:
        raise OpError(f"{op}: {name} must be a tensor [N, ...]", where=name)
    checks.check_offsets_arg(op, "offsets" if name == "values" else f"{name} offsets", offsets, values)


def _readable(t: Tensor) -> bool:
    """Can the host read ``t`` now, without a device sync and outside of tracing?"""
    return t.device.type == "cpu" and not torch.compiler.is_compiling() and type(t) is Tensor


def _spec(op: str, values: Sequence[Tensor], backend: str | None, **options: float) -> str:
    return finish(op, values, list(options.items()), backend)


# --- registration: Tensor[] arguments do not fit the generic machinery of library.define ---


def _problem(op: str, values: Tensor, offsets: Tensor, spec: str, parts: int = 1) -> Problem:
    decoded = library.decode(spec)
    width = math.prod(values.shape[2:] if op == "padded_to_jagged" else values.shape[1:])
    return Problem(
        op,
        values.device.type,
        arch_of(values.device),
        (("values", values.dtype), ("offsets", offsets.dtype)),
        (("width", width), ("parts", parts)),
        decoded.options,
        needs_grad=decoded.needs_grad,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


def _run(problem: Problem, spec: str, *tensors: Tensor, **sizes: Any) -> Any:
    kernel = dispatch.choose(problem, library.decode(spec).backend)
    with library.without_autocast(problem.device):
        return kernel.forward(problem, *tensors, **sizes)[0]


def _check_offsets(op: str, offsets: Tensor, rows: int, bound: int | None = None, bound_name: str = "") -> None:
    check = checks.Values(op, offsets.device)
    remembered((offsets,), (op, rows, bound), lambda: check.offsets("offsets", offsets, rows, bound, bound_name))


def _concat(values: list[Tensor], offsets: list[Tensor], spec: str) -> Tensor:
    for v, o in zip(values, offsets):
        _check_offsets("jagged_concat", o, v.shape[0])
    problem = _problem("jagged_concat", values[0], offsets[0], spec, len(values))
    return _run(problem, spec, *values, *offsets)


def _split(values: Tensor, offsets: list[Tensor], rows: list[int], spec: str) -> list[Tensor]:
    whole = offsets[0]
    for o in offsets[1:]:
        whole = whole + o
    _check_offsets("jagged_split", whole, values.shape[0])
    for i, (o, n) in enumerate(zip(offsets, rows)):
        _check_split_part(i, o, n)
    problem = _problem("jagged_split", values, offsets[0], spec, len(offsets))
    return list(_run(problem, spec, values, *offsets, rows=tuple(rows)))


def _check_split_part(index: int, offsets: Tensor, rows: int) -> None:
    check = checks.Values("jagged_split", offsets.device)

    def values() -> None:
        lengths = offsets.diff()
        check.expect(
            lengths >= 0,
            lambda: (
                f"lengths of sample {int((lengths < 0).int().argmax())} are not within the sample",
                "lengths",
                "0 <= lengths[b] <= length of sample b",
            ),
        )
        check.expect(offsets[-1] <= rows, lambda: (f"part {index} has {int(offsets[-1])} rows, more than {rows}", "first_rows", None))

    remembered((offsets,), ("jagged_split", rows), values)


def _pool(op: str, values: Tensor, offsets: Tensor, spec: str) -> Tensor:
    _check_offsets(op, offsets, values.shape[0])
    return _run(_problem(op, values, offsets, spec), spec, values, offsets)


def _expand(values: Tensor, offsets: Tensor, rows: int, spec: str) -> Tensor:
    _check_offsets("jagged_expand", offsets, rows)
    return _run(_problem("jagged_expand", values, offsets, spec), spec, values, offsets, rows=rows)


def _to_padded(values: Tensor, offsets: Tensor, max_len: int, spec: str) -> Tensor:
    _check_offsets("jagged_to_padded", offsets, values.shape[0], max_len, "max_len")
    return _run(_problem("jagged_to_padded", values, offsets, spec), spec, values, offsets, max_len=max_len)


def _from_padded(padded: Tensor, offsets: Tensor, rows: int, spec: str) -> Tensor:
    _check_offsets("padded_to_jagged", offsets, rows, padded.shape[1], "the padded length")
    return _run(_problem("padded_to_jagged", padded, offsets, spec), spec, padded, offsets, rows=rows)


def _plain_spec(spec: str, op: str) -> str:
    """``spec`` of one op for the op that is its gradient: the same implementation, if ``op`` has it and the policy names no other."""
    backend = dispatch.policy().ops.get(op) or spec.split("|")[-1]
    if backend != dispatch.AUTO and op not in dispatch.policy().ops and not backend.startswith("~"):
        backend = f"~{backend}"
    return library.encode([("fill", 0.0)] if op == "jagged_to_padded" else [], (), False, backend)


def _register(
    contract: OpContract,
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    setup: Callable[..., Any],
    backward: Callable[..., Any],
) -> None:
    name = f"{library.NAMESPACE}::{contract.op}"
    library.LIBRARY.define(f"{contract.op}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    library.LIBRARY.impl(contract.op, run, "CompositeExplicitAutograd")
    torch.library.register_fake(name, fake, lib=library.LIBRARY)
    torch.library.register_autograd(name, backward, setup_context=setup, lib=library.LIBRARY)
    flop_registry.register(getattr(torch.ops.gem, contract.op), lambda *args, **kwargs: 0)


def _setup_concat(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    values, offsets, ctx.spec = inputs
    ctx.rows = [v.shape[0] for v in values]
    ctx.save_for_backward(*offsets)


def _concat_backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    grads = torch.ops.gem.jagged_split.default(dout, list(ctx.saved_tensors), ctx.rows, _plain_spec(ctx.spec, "jagged_split"))
    return grads, [None] * len(grads), None


def _setup_split(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    values, offsets, _, ctx.spec = inputs
    ctx.rows = values.shape[0]
    ctx.save_for_backward(*offsets)


def _split_backward(ctx: Any, douts: list[Tensor]) -> tuple[Any, ...]:
    offsets = list(ctx.saved_tensors)
    grad = torch.ops.gem.jagged_concat.default(list(douts), offsets, _plain_spec(ctx.spec, "jagged_concat"))
    return _with_rows(grad, ctx.rows), [None] * len(offsets), None, None


def _with_rows(x: Tensor, rows: int) -> Tensor:
    """``x`` cut to ``rows`` rows: what is beyond them is slack."""
    return x if x.shape[0] == rows else x[:rows]


def _setup_rows(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.rows, ctx.spec = inputs[0].shape[0], inputs[-1]
    ctx.save_for_backward(inputs[1])


def _sum_backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    (offsets,) = ctx.saved_tensors
    return torch.ops.gem.jagged_expand.default(dout, offsets, ctx.rows, _plain_spec(ctx.spec, "jagged_expand")), None, None


def _mean_backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    (offsets,) = ctx.saved_tensors
    count = offsets.diff().clamp(min=1).view(-1, *(1,) * (dout.dim() - 1))
    return torch.ops.gem.jagged_expand.default(dout / count, offsets, ctx.rows, _plain_spec(ctx.spec, "jagged_expand")), None, None


def _expand_backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    (offsets,) = ctx.saved_tensors
    return torch.ops.gem.jagged_sum.default(dout, offsets, _plain_spec(ctx.spec, "jagged_sum")), None, None, None


def _to_padded_backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    (offsets,) = ctx.saved_tensors
    return torch.ops.gem.padded_to_jagged.default(dout, offsets, ctx.rows, _plain_spec(ctx.spec, "padded_to_jagged")), None, None, None


def _setup_from_padded(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.max_len, ctx.spec = inputs[0].shape[1], inputs[-1]
    ctx.save_for_backward(inputs[1])


def _from_padded_backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    (offsets,) = ctx.saved_tensors
    return torch.ops.gem.jagged_to_padded.default(dout, offsets, ctx.max_len, _plain_spec(ctx.spec, "jagged_to_padded")), None, None, None


def _fake_concat(values: list[Tensor], offsets: list[Tensor], spec: str) -> Tensor:
    return values[0].new_empty((sum(v.shape[0] for v in values), *values[0].shape[1:]))


def _fake_pool(values: Tensor, offsets: Tensor, spec: str) -> Tensor:
    return values.new_empty((offsets.shape[0] - 1, *values.shape[1:]))


_register(JAGGED_CONCAT, "(Tensor[] values, Tensor[] offsets, str spec) -> Tensor", _concat, _fake_concat, _setup_concat, _concat_backward)
_register(
    JAGGED_SPLIT,
    "(Tensor values, Tensor[] offsets, SymInt[] rows, str spec) -> Tensor[]",
    _split,
    lambda values, offsets, rows, spec: [values.new_empty((n, *values.shape[1:])) for n in rows],
    _setup_split,
    _split_backward,
)
_register(
    JAGGED_SUM,
    "(Tensor values, Tensor offsets, str spec) -> Tensor",
    lambda *a: _pool("jagged_sum", *a),
    _fake_pool,
    _setup_rows,
    _sum_backward,
)
_register(
    JAGGED_MEAN,
    "(Tensor values, Tensor offsets, str spec) -> Tensor",
    lambda *a: _pool("jagged_mean", *a),
    _fake_pool,
    _setup_rows,
    _mean_backward,
)
_register(
    JAGGED_EXPAND,
    "(Tensor values, Tensor offsets, SymInt rows, str spec) -> Tensor",
    _expand,
    lambda values, offsets, rows, spec: values.new_empty((rows, *values.shape[1:])),
    _setup_rows,
    _expand_backward,
)
_register(
    JAGGED_TO_PADDED,
    "(Tensor values, Tensor offsets, SymInt max_len, str spec) -> Tensor",
    _to_padded,
    lambda values, offsets, max_len, spec: values.new_empty((offsets.shape[0] - 1, max_len, *values.shape[1:])),
    _setup_rows,
    _to_padded_backward,
)
_register(
    PADDED_TO_JAGGED,
    "(Tensor padded, Tensor offsets, SymInt rows, str spec) -> Tensor",
    _from_padded,
    lambda padded, offsets, rows, spec: padded.new_empty((rows, *padded.shape[2:])),
    _setup_from_padded,
    _from_padded_backward,
)


# --- references: one slice a sample ---


def _bounds(offsets: Tensor) -> list[tuple[int, int]]:
    return list(pairwise(offsets.tolist()))


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def concat_reference(problem: Problem, *tensors: Tensor) -> tuple[Tensor, tuple[()]]:
    n = problem.dim("parts")
    values, bounds = tensors[:n], [_bounds(o) for o in tensors[n:]]
    pieces = [v[a:b] for sample in zip(*bounds) for v, (a, b) in zip(values, sample)]
    rows = sum(v.shape[0] for v in values)
    out = values[0].new_zeros((rows, *values[0].shape[1:]))
    if pieces:
        packed = torch.cat(pieces)
        out[: packed.shape[0]] = packed
    return out, ()


def split_reference(problem: Problem, values: Tensor, *offsets: Tensor, rows: Sequence[int]) -> tuple[list[Tensor], tuple[()]]:
    outs = [values.new_zeros((n, *values.shape[1:])) for n in rows]
    at = 0
    for sample in zip(*(_bounds(o) for o in offsets)):
        for out, (a, b) in zip(outs, sample):
            out[a:b] = values[at : at + b - a]
            at += b - a
    return outs, ()


def sum_reference(problem: Problem, values: Tensor, offsets: Tensor) -> tuple[Tensor, tuple[()]]:
    sums = [values[a:b].sum(0, dtype=_sum_dtype(values.dtype)) for a, b in _bounds(offsets)]
    out = torch.stack(sums) if sums else values.new_empty((0, *values.shape[1:]))
    return out.to(values.dtype), ()


def mean_reference(problem: Problem, values: Tensor, offsets: Tensor) -> tuple[Tensor, tuple[()]]:
    means = [values[a:b].sum(0, dtype=_sum_dtype(values.dtype)) / max(1, b - a) for a, b in _bounds(offsets)]
    out = torch.stack(means) if means else values.new_empty((0, *values.shape[1:]))
    return out.to(values.dtype), ()


def expand_reference(problem: Problem, values: Tensor, offsets: Tensor, *, rows: int) -> tuple[Tensor, tuple[()]]:
    out = values.new_zeros((rows, *values.shape[1:]))
    for value, (a, b) in zip(values, _bounds(offsets)):
        out[a:b] = value
    return out, ()


def to_padded_reference(problem: Problem, values: Tensor, offsets: Tensor, *, max_len: int) -> tuple[Tensor, tuple[()]]:
    out = values.new_full((offsets.shape[0] - 1, max_len, *values.shape[1:]), problem.option("fill"))
    for row, (a, b) in zip(out, _bounds(offsets)):
        row[: b - a] = values[a:b]
    return out, ()


def from_padded_reference(problem: Problem, padded: Tensor, offsets: Tensor, *, rows: int) -> tuple[Tensor, tuple[()]]:
    out = padded.new_zeros((rows, *padded.shape[2:]))
    for row, (a, b) in zip(padded, _bounds(offsets)):
        out[a:b] = row[: b - a]
    return out, ()
