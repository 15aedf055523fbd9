"""Moving packed rows: concat, split, sum, mean, expand, to padded and back. The gradient of each is another one of them.

Shapes never depend on values, so nothing waits for the device: a result whose exact row count only the device knows is allocated with the
bound that the host knows, its surplus rows (zeros) last, unless the caller tells the count. On CPU, outside of torch.compile, the count is
read from the offsets.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from gem_core.errors import OpError
from gem_core.ops import (
    checks,
    jagged_library,  # noqa: F401 - makes torch.ops.gem.jagged_*
)
from gem_core.ops.frontend import finish

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
