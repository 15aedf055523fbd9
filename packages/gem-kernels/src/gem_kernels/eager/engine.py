"""Runs a plan: batched matmuls, softmax or activation, and their backward, group by group.

Everything is computed in float64 for float64 inputs and in float32 otherwise. Gradients of the scores never outlive their group, so memory
is bounded by a few batches of `plan.BATCH_ELEMENTS` beside the packed tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gem_core.ops import activations
from gem_core.ops.activations import Activation
from gem_kernels.eager.plan import Group, Plan, relative_rows


@dataclass(frozen=True)
class Bias:
    """Tables ``[H, ...]`` and times of a RelativeBias; ``own_times`` are those of candidates under request sharing."""

    position: Tensor
    time: Tensor | None
    edges: Tensor | None
    q_times: Tensor | None
    k_times: Tensor | None


@dataclass(frozen=True)
class Score:
    """How scores become weights: ``scale`` and bias before; softmax (``activation`` None) or an activation; ``out_scale`` after."""

    scale: float
    out_scale: float
    activation: Activation | None = None
    bias: Bias | None = None


class Packed:
    """q, k and v of a call as rows of [N·heads, D] in the compute dtype."""

    def __init__(self, plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.plan = plan
        self.heads, self.kv_heads, self.d, self.dv = q.shape[1], k.shape[1], q.shape[2], v.shape[2]
        self.dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.q, self.k, self.v = (x.reshape(-1, x.shape[2]) for x in (q, k, v))

    def take(self, x: Tensor, index: Tensor, n: int, width: int) -> Tensor:
        """Gather ``[n, width, D]`` rows in the compute dtype."""
        return x.index_select(0, index).to(self.dtype).view(n, width, x.shape[1])

    def queries(self, group: Group, x: Tensor | None = None) -> Tensor:
        """``[n·Hkv, (H/Hkv)·rows, D]``: heads that share a key side by side."""
        x = self.q if x is None else x
        return self.take(x, group.q_index, group.n * self.kv_heads, self.heads // self.kv_heads * group.rows)

    def keys(self, group: Group, x: Tensor) -> Tensor:
        """``[n·Hkv, keys, D]``."""
        return self.take(x, group.k_index, group.n * self.kv_heads, group.keys)

    def by_row(self, scores: Tensor, group: Group) -> Tensor:
        """View scores ``[n·Hkv, (H/Hkv)·rows, X]`` as ``[n, H, rows, X]``."""
        return scores.view(group.n, self.heads, group.rows, -1)


def forward(plan: Plan, score: Score, q: Tensor, k: Tensor, v: Tensor, *, want_lse: bool) -> tuple[Tensor, Tensor | None]:
    """``[out rows, H, Dv]`` in q's dtype, and the log-sum-exp ``[H, out rows]``."""
    packed = Packed(plan, q, k, v)
    out = q.new_empty(plan.places + 1, packed.dv, dtype=packed.dtype)
    out[-1] = 0
    lse = None
    if want_lse:
        lse = q.new_empty(plan.places + 1, dtype=packed.dtype)
        lse[-1] = -torch.inf
    for group in plan.groups:
        scores = _scores(packed, score, group, packed.queries(group), packed.keys(group, packed.k))
        weights, row_lse = _weights(score, packed.by_row(scores, group), group, want_lse)
        end = group.begin + group.q_index.numel()
        place = out[group.begin : end].view(*scores.shape[:2], packed.dv)
        torch.bmm(weights.view(scores.shape), packed.keys(group, packed.v), out=place)
        if lse is not None and row_lse is not None:
            lse[group.begin : end] = row_lse.flatten()
    if score.out_scale != 1.0:
        out *= score.out_scale
    result = out.index_select(0, plan.out_inverse).view(-1, packed.heads, packed.dv).to(q.dtype)
    if lse is None:
        return result, None
    return result, lse.index_select(0, plan.out_inverse).view(-1, packed.heads).t().contiguous()


def backward(
    plan: Plan, score: Score, q: Tensor, k: Tensor, v: Tensor, dout: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of q, k, v and of the bias tables, in the compute dtype."""
    packed = Packed(plan, q, k, v)
    douts = dout.reshape(-1, packed.dv)
    dq = _Sums(q, packed, plan.places, plan.out_inverse if plan.q_unique else None)
    dk, dv = (_Sums(x, packed, plan.key_places, plan.k_inverse) for x in (k, v))
    tables = _TableGradients(score.bias, packed.dtype)
    for group in plan.groups:
        queries, keys = packed.queries(group), packed.keys(group, packed.k)
        scores = _scores(packed, score, group, queries, keys)
        rows = packed.by_row(scores, group)
        d = _douts(packed, score, group, douts)
        dweights = torch.bmm(d, packed.keys(group, packed.v).transpose(1, 2))
        weights, dscores = _dscores(score, rows, packed.by_row(dweights, group), group)
        tables.add(packed, group, dscores)
        dscores = dscores.view(scores.shape)
        dv.add(group.key_begin, group.k_index, weights.view(scores.shape).transpose(1, 2), d)
        if score.scale != 1.0:
            queries *= score.scale
            keys *= score.scale
        dq.add(group.begin, group.q_index, dscores, keys)
        dk.add(group.key_begin, group.k_index, dscores.transpose(1, 2), queries)
    return dq.result(), dk.result(), dv.result(), tables.position, tables.time


class _Sums:
    """Gradient of one packed tensor: places of all groups, gathered at the end, or added up where rows are in several items."""

    def __init__(self, like: Tensor, packed: Packed, places: int, inverse: Tensor | None) -> None:
        self.shape, self.inverse = like.shape, inverse
        width = like.shape[2]
        if inverse is None:
            self.rows = like.new_zeros(like.shape[0] * like.shape[1], width, dtype=packed.dtype)
        else:
            self.rows = like.new_empty(places + 1, width, dtype=packed.dtype)
            self.rows[-1] = 0

    def add(self, begin: int, index: Tensor, left: Tensor, right: Tensor) -> None:
        """The group's rows are ``left @ right``."""
        if self.inverse is None:
            self.rows.index_add_(0, index, torch.bmm(left, right).view(-1, right.shape[2]))
        else:
            torch.bmm(left, right, out=self.rows[begin : begin + index.numel()].view(*left.shape[:2], right.shape[2]))

    def result(self) -> Tensor:
        rows = self.rows if self.inverse is None else self.rows.index_select(0, self.inverse)
        return rows.view(self.shape)


def _scores(packed: Packed, score: Score, group: Group, queries: Tensor, keys: Tensor) -> Tensor:
    """``[n·Hkv, (H/Hkv)·rows, keys]``: scaled product plus bias, not yet masked."""
    scores = torch.baddbmm(queries.new_empty(1, 1, 1), queries, keys.transpose(1, 2), beta=0, alpha=score.scale)
    if score.bias is not None:
        rows = packed.by_row(scores, group)
        bias = score.bias
        columns = relative_rows(packed.plan, group, (bias.position.shape[1] - 1) // 2, scores.device)
        rows += bias.position.to(packed.dtype)[:, columns].transpose(0, 1)
        if bias.time is not None:
            rows += bias.time.to(packed.dtype)[:, _time_rows(packed, bias, group)].transpose(0, 1)
    return scores


def _time_rows(packed: Packed, bias: Bias, group: Group) -> Tensor:
    """Columns of the time table ``[n, rows, keys]``."""
    assert bias.q_times is not None
    assert bias.k_times is not None
    assert bias.edges is not None
    q_rows = group.q_index.view(group.n, packed.heads, group.rows)[:, 0] // packed.heads
    k_rows = group.k_index.view(group.n, packed.kv_heads, group.keys)[:, 0] // packed.kv_heads
    gap = (bias.q_times[q_rows][:, :, None] - bias.k_times[k_rows][:, None, :]).abs()
    return torch.bucketize(gap, bias.edges, right=True)


def _weights(score: Score, rows: Tensor, group: Group, want_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Weights ``[n, H, rows, keys]`` without out_scale, overwriting the scores, and the log-sum-exp ``[n, H, rows]``."""
    mask, some_blind = group.mask()
    if score.activation is not None:
        weights = activate(score.activation, rows)
        return weights if mask is None else weights.masked_fill_(~mask, 0.0), None
    if mask is not None:
        rows.masked_fill_(~mask, -torch.inf)
    weights = torch.softmax(rows, -1)
    if mask is not None and some_blind:
        weights.masked_fill_(~mask, 0.0)
    if not want_lse:
        return weights, None
    # the largest weight is exp(largest score − lse)
    lse = rows.amax(-1) - weights.amax(-1).log()
    return weights, lse.masked_fill_(lse.isnan(), -torch.inf) if some_blind else lse


def _dscores(score: Score, rows: Tensor, dweights: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Weights and gradient of the biased scores, ``[n, H, rows, keys]`` each."""
    if score.activation is None:
        weights, _ = _weights(score, rows, group, False)
        return weights, torch._softmax_backward_data(dweights, weights, -1, weights.dtype)
    mask, _ = group.mask()
    weights = activate(score.activation, rows)
    dscores = activate_backward(score.activation, rows, dweights)
    if mask is not None:
        hidden = ~mask
        weights = weights.masked_fill_(hidden, 0.0)
        dscores = dscores.masked_fill_(hidden, 0.0)
    return weights, dscores


def _douts(packed: Packed, score: Score, group: Group, douts: Tensor) -> Tensor:
    """Gradient of the output times out_scale, zero at padding."""
    index = group.q_index if group.out_index is None else group.out_index
    d = packed.take(douts, index, group.n * packed.kv_heads, packed.heads // packed.kv_heads * group.rows)
    if group.row_valid is not None:
        packed.by_row(d, group).mul_(group.row_valid)
    return d if score.out_scale == 1.0 else d.mul_(score.out_scale)


class _TableGradients:
    """Sums of the scores' gradients by column of the bias tables."""

    def __init__(self, bias: Bias | None, dtype: torch.dtype) -> None:
        self.bias = bias
        self.position = None if bias is None else torch.zeros_like(bias.position, dtype=dtype)
        self.time = None if bias is None or bias.time is None else torch.zeros_like(bias.time, dtype=dtype)

    def add(self, packed: Packed, group: Group, dscores: Tensor) -> None:
        if self.bias is None or self.position is None:
            return
        columns = relative_rows(packed.plan, group, (self.position.shape[1] - 1) // 2, dscores.device)
        one = dscores.sum(0, keepdim=True) if columns.shape[0] == 1 else dscores
        self.position.index_add_(1, columns.flatten(), one.transpose(0, 1).flatten(1))
        if self.time is not None:
            self.time.index_add_(1, _time_rows(packed, self.bias, group).flatten(), dscores.transpose(0, 1).flatten(1))


def activate(activation: Activation, x: Tensor) -> Tensor:
    """``activation`` of ``x [n, H, rows, keys]``."""
    if isinstance(activation, str):
        return _ACT[activation](x) if activation in _ACT else activations.act(activation, x)
    return torch.cat([activate(name, x[:, heads]) for name, heads in _runs(activation)], 1)


def activate_backward(activation: Activation, x: Tensor, dout: Tensor) -> Tensor:
    """``dout`` times the derivative at ``x``."""
    if isinstance(activation, str):
        return _ACT_BACKWARD[activation](dout, x) if activation in _ACT_BACKWARD else dout * activations.act_grad(activation, x)
    return torch.cat([activate_backward(name, x[:, heads], dout[:, heads]) for name, heads in _runs(activation)], 1)


def _runs(names: tuple[str, ...]) -> Iterator[tuple[str, slice]]:
    """Neighbouring heads of one activation."""
    begin = 0
    for end in range(1, len(names) + 1):
        if end == len(names) or names[end] != names[begin]:
            yield names[begin], slice(begin, end)
            begin = end


_aten = torch.ops.aten
_ACT: dict[str, Callable[[Tensor], Tensor]] = {
    "raw": lambda x: x,
    "gelu": F.gelu,
    "gelu_approx": lambda x: F.gelu(x, approximate="tanh"),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.01),
    "relu": F.relu,
    "silu": F.silu,
    "hardswish": F.hardswish,
}
_ACT_BACKWARD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "raw": lambda d, x: d,
    "gelu": lambda d, x: _aten.gelu_backward(d, x),
    "gelu_approx": lambda d, x: _aten.gelu_backward(d, x, approximate="tanh"),
    "leaky_relu": lambda d, x: _aten.leaky_relu_backward(d, x, 0.01, False),
    "relu": lambda d, x: _aten.threshold_backward(d, x, 0.0),
    "silu": lambda d, x: _aten.silu_backward(d, x),
    "hardswish": lambda d, x: _aten.hardswish_backward(d, x),
}
for _fast, _exact in (("fast_gelu", "gelu_approx"), ("fast_gelu_bf16", "gelu_approx"), ("fast_silu", "silu")):
    _ACT[_fast], _ACT_BACKWARD[_fast] = _ACT[_exact], _ACT_BACKWARD[_exact]
