"""The jagged ops as PyTorch operators: checks of values, the choice of an implementation, gradients. ``Tensor[]`` arguments do not fit the
generic machinery of `library.define`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

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
from gem_core.ops.remember import remembered


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
