"""Every op of the core in plain torch without a read of values on the host, so that `torch.export` can follow it with symbolic shapes.

What a graph that leaves for an environment without this package computes with: attention on histories padded to the longest one of the
batch, the other ops on packed rows. Results are those of the references up to the order of sums; memory is that of the padding, which
matters little at the batch sizes that serving has. Arithmetic is fp32 (fp64 for fp64), as the references'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gem_core.errors import OpError
from gem_core.ops import activations
from gem_core.ops.attention_reference import compute_dtype
from gem_core.ops.block import rotate
from gem_core.ops.contracts import BLOCK_ATTENTION, GDPA
from gem_core.ops.library import Spec, decode
from gem_core.ops.norms import Norm


def table() -> dict[Any, Callable[..., Any]]:
    """Op overload -> its plain form, as `torch.export.ExportedProgram.run_decompositions` takes it."""
    forms: dict[str, Callable[..., Any]] = {
        "jagged_attention": _jagged_attention,
        "gdpa": _gdpa,
        "block_attention": _block_attention,
        "norm": _norm,
        "norm_linear": _norm_linear,
        "linear_norm": _linear_norm,
        "mlp": _mlp,
        "norm_gdpa": _norm_gdpa,
        "jagged_concat": _concat,
        "jagged_split": _split,
        "jagged_sum": _sum,
        "jagged_mean": _mean,
        "jagged_expand": _expand,
        "jagged_to_padded": _to_padded,
        "padded_to_jagged": _from_padded,
    }
    return {getattr(torch.ops.gem, name).default: form for name, form in forms.items()}


# --- rows and their samples ---


def _samples(offsets: Tensor, rows: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Of each of ``rows`` packed rows: its sample, its place in it, and whether it belongs to one (slack rows get sample B - 1)."""
    at = torch.arange(rows, device=offsets.device, dtype=offsets.dtype)
    sample = torch.searchsorted(offsets[1:], at, right=True).clamp(max=offsets.shape[0] - 2)
    return sample, at - offsets[sample], at < offsets[-1]


def _where_rows(keep: Tensor, x: Tensor) -> Tensor:
    """``x [N, ...]``, zero in rows that are not kept, whatever they hold."""
    return torch.where(keep.view(-1, *(1,) * (x.dim() - 1)), x, torch.zeros((), dtype=x.dtype, device=x.device))


def _padded(x: Tensor, offsets: Tensor, longest: Any) -> tuple[Tensor, Tensor]:
    """``[B, L, ...]`` with zeros past each sample's end, and which rows are real ``[B, L]``."""
    place = offsets[:-1, None] + torch.arange(longest, device=offsets.device, dtype=offsets.dtype)
    real = place < offsets[1:, None]
    rows = x[place.where(real, torch.zeros_like(place))]
    return _masked(rows, real), real


def _masked(rows: Tensor, real: Tensor) -> Tensor:
    return torch.where(real.view(*real.shape, *(1,) * (rows.dim() - 2)), rows, torch.zeros((), dtype=rows.dtype, device=rows.device))


def _packed(x: Tensor, offsets: Tensor, rows: Any) -> Tensor:
    """``[B, L, ...]`` back to packed rows; slack rows are zero."""
    sample, place, real = _samples(offsets, rows)
    return _where_rows(real, x[sample, place.clamp(max=x.shape[1] - 1)])


# --- attention ---


class _Attention:
    """A call of jagged_attention or gdpa on padded queries ``[B, H, Lq, D]`` and keys ``[B, H, Lk, D]``."""

    def __init__(self, op: str, tensors: Sequence[Tensor | None], sizes: Sequence[Any], spec: Spec) -> None:
        t: dict[str, Any] = dict(zip(GDPA.tensors, tensors))
        if t["kv_index"] is not None or spec.precision is not None:
            what = "request sharing" if t["kv_index"] is not None else "low precision"
            raise OpError(f"{op}: {what} has no plain form to export", where=op, fix="export a model that reads one history a sample")
        self.t, self.spec = t, spec
        q, k, v = t["q"], t["k"], t["v"]
        self.dtype = compute_dtype(q.dtype)
        self.q_offsets, self.k_offsets = t["q_offsets"], t["k_offsets"]
        self.shared_q = self.q_offsets is None
        if self.k_offsets is self.q_offsets:
            # one layout: either bound holds for both
            known = [bound for bound in sizes if bound >= 0]
            sizes = (known[0], known[0]) if known else sizes
        longest_q, longest_k = (n if bound < 0 else bound for n, bound in zip((q.shape[0], k.shape[0]), sizes))
        samples = self.k_offsets.shape[0] - 1
        if self.shared_q:
            self.q = q.to(self.dtype).expand(samples, -1, -1, -1).transpose(1, 2)
            self.lq = torch.full((samples,), q.shape[0], dtype=self.k_offsets.dtype, device=q.device)
        else:
            self.q = _padded(q, self.q_offsets, longest_q)[0].to(self.dtype).transpose(1, 2)
            self.lq = self.q_offsets.diff()
        keys, self.real = _padded(k, self.k_offsets, longest_k)
        values, _ = _padded(v, self.k_offsets, longest_k)
        groups = q.shape[1] // k.shape[1]
        self.k, self.v = (x.to(self.dtype).transpose(1, 2).repeat_interleave(groups, dim=1) for x in (keys, values))
        self.lk = self.k_offsets.diff()
        targets, context = t["num_targets"], t["context_len"]
        self.t_n = torch.zeros_like(self.lk) if targets is None else targets.to(self.lk.dtype)
        self.c = None if context is None else context.to(self.lk.dtype)

    def positions(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Positions of query and key rows ``[B, Lq]`` and ``[B, Lk]``, and which of them are candidates."""
        i = torch.arange(self.q.shape[2], device=self.lk.device, dtype=self.lk.dtype)[None]
        j = torch.arange(self.k.shape[2], device=self.lk.device, dtype=self.lk.dtype)[None]
        lq, lk, h = self.lq[:, None], self.lk[:, None], (self.lk - self.t_n)[:, None]
        asks, asked = i >= lq - self.t_n[:, None], j >= h
        return torch.where(asks, h, i + (lk - lq)), torch.where(asked, h, j.expand_as(asked)), asks, asked

    def visible(self) -> Tensor:
        """``[B, 1, Lq, Lk]``: `gem_core.ops.masks.visible` for all samples at once, False on padding."""
        q_pos, k_pos, asks, asked = self.positions()
        p, k = q_pos[:, :, None], k_pos[:, None, :]
        seen = self.real[:, None, :].expand(-1, self.q.shape[2], -1)
        if self.spec.option("causal"):
            seen = seen & (k <= p)
        window = self.spec.option("window")
        if window is not None:
            left, right = window
            seen = seen & (k >= p - left) if left >= 0 else seen
            seen = seen & (k <= p + right) if right >= 0 else seen
        if self.c is not None:
            c = self.c[:, None, None]
            seen = seen | (self.real[:, None, :] & ((k < c) | ((p < c) & ~asks[:, :, None])))
        if self.t["num_targets"] is not None:
            i = torch.arange(self.q.shape[2], device=self.lk.device, dtype=self.lk.dtype)[None, :, None]
            j = torch.arange(self.k.shape[2], device=self.lk.device, dtype=self.lk.dtype)[None, None, :]
            itself = asks[:, :, None] & (j - self.lk[:, None, None] == i - self.lq[:, None, None])
            seen = torch.where(asked[:, None, :], itself & self.real[:, None, :], seen)
        return seen[:, None]

    def scores(self, scale: float) -> Tensor:
        """``[B, H, Lq, Lk]``"""
        scores = scale * (self.q @ self.k.transpose(2, 3))
        position = self.t["bias_position"]
        if position is None:
            return scores  # type: ignore[no-any-return]
        radius = (position.shape[1] - 1) // 2
        q_pos, k_pos, _, _ = self.positions()
        shift = (k_pos[:, None, :] - q_pos[:, :, None]).clamp(-radius, radius) + radius
        scores = scores + position.to(self.dtype)[:, shift].transpose(0, 1)
        time = self.t["bias_time"]
        if time is None:
            return scores  # type: ignore[no-any-return]
        q_times, _ = _padded(self.t["bias_q_times"], self.q_offsets, self.q.shape[2])
        k_times, _ = _padded(self.t["bias_k_times"], self.k_offsets, self.k.shape[2])
        gap = torch.bucketize((q_times[:, :, None] - k_times[:, None, :]).abs(), self.t["bias_time_edges"], right=True)
        return scores + time.to(self.dtype)[:, gap].transpose(0, 1)  # type: ignore[no-any-return]

    def out(self, weights: Tensor) -> Tensor:
        """Packed rows ``[Nq, H, Dv]`` in q's dtype of probabilities ``[B, H, Lq, Lk]``."""
        mixed = (weights @ self.v).transpose(1, 2).to(self.t["q"].dtype)
        return mixed.flatten(0, 1) if self.shared_q else _packed(mixed, self.q_offsets, self.t["q"].shape[0]).contiguous()


def _jagged_attention(*args: Any) -> tuple[Tensor, Tensor]:
    *tensors, q_bound, k_bound, spec = args
    decoded = decode(spec)
    call = _Attention("jagged_attention", tensors, (q_bound, k_bound), decoded)
    if decoded.option("return_lse"):
        raise OpError("jagged_attention: the log-sum-exp has no plain form to export", where="return_lse", fix="export without it")
    visible = call.visible()
    scores = call.scores(decoded.option("scale")).masked_fill(~visible, -torch.inf)
    # A row that sees nothing would be NaN in softmax.
    top = scores.amax(3, keepdim=True)
    e = torch.exp(scores - top.where(top > -torch.inf, torch.zeros_like(top)))
    weights = e / e.sum(3, keepdim=True).clamp(min=torch.finfo(e.dtype).tiny)
    q = call.t["q"]
    out = call.out(decoded.option("out_scale") * weights)
    return out, q.new_full((q.shape[1], out.shape[0]), -torch.inf, dtype=call.dtype)


def _pointwise(spec: Spec, scores: Tensor) -> Tensor:
    names = activations.per_head(spec.option("activation"), scores.shape[1])
    if len(set(names)) == 1:
        return spec.option("scale_out") * activations.act(names[0], scores)  # type: ignore[no-any-return]
    return spec.option("scale_out") * torch.stack([activations.act(n, scores[:, h]) for h, n in enumerate(names)], 1)  # type: ignore[no-any-return]


def _gdpa(*args: Any) -> Tensor:
    *tensors, q_bound, k_bound, spec = args
    decoded = decode(spec)
    call = _Attention("gdpa", tensors, (q_bound, k_bound), decoded)
    weights = _pointwise(decoded, call.scores(decoded.option("scale_in")))
    return call.out(weights.masked_fill(~call.visible(), 0.0))


def _norm_gdpa(q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, q_bound: Any, k_bound: Any, spec: str) -> Any:
    decoded = decode(spec)
    eps, rows = decoded.option("eps"), q.shape[0]
    alive = _samples(q_offsets, rows)[2]
    dtype = compute_dtype(q.dtype)
    first = Norm(_where_rows(alive, q).flatten(1), "layer", eps)
    wide = first.out.view(q.shape)
    tensors = {"q": wide, "k": k.to(dtype), "v": v.to(dtype), "q_offsets": q_offsets, "k_offsets": k_offsets}
    call = _Attention("norm_gdpa", [tensors.get(n) for n in GDPA.tensors], (q_bound, k_bound), decoded)
    weights = _pointwise(decoded, call.scores(decoded.option("scale_in"))).masked_fill(~call.visible(), 0.0)
    second = Norm((call.out(weights) + wide).flatten(1), "rms", eps)
    out = _where_rows(alive, second.out.view(q.shape) + q.to(dtype)).to(q.dtype)
    return out, first.mean, first.rstd, second.rstd


def _block_attention(*args: Any) -> Tensor:
    *tensors, spec = args
    t: dict[str, Any] = dict(zip(BLOCK_ATTENTION.tensors, tensors))
    decoded = decode(spec)
    q, offsets, size = t["q"], t["offsets"], decoded.option("block_size")
    dtype, rows = compute_dtype(q.dtype), q.shape[0]
    sample, place, real = _samples(offsets, rows)
    q, k, v = (t[n].to(dtype) for n in "qkv")
    if t["rotary_cos"] is not None:
        angle = (place if t["rotary_rows"] is None else t["rotary_rows"]).where(real, torch.zeros_like(place))
        cos, sin = t["rotary_cos"].to(dtype)[angle], t["rotary_sin"].to(dtype)[angle]
        q, k, v = rotate(q, cos, sin), rotate(k, cos, sin), rotate(v, cos, sin)
    # There are at most rows // size whole blocks and one partial block a sample; what is beyond the last one is padding.
    count = -(-offsets.diff() // size)
    ends = count.cumsum(0)
    block = torch.arange(rows // size + offsets.shape[0] - 1, device=offsets.device, dtype=offsets.dtype)
    of = torch.searchsorted(ends, block, right=True).clamp(max=offsets.shape[0] - 2)
    begin = offsets[of] + (block - (ends - count)[of]) * size
    at = begin[:, None] + torch.arange(size, device=offsets.device, dtype=offsets.dtype)
    seen = (at < offsets[of + 1][:, None]) & (block < ends[-1])[:, None]
    at = at.where(seen, torch.zeros_like(at))
    groups = q.shape[1] // k.shape[1]
    queries, keys, values = (_masked(x[at], seen).transpose(1, 2) for x in (q, k, v))
    keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
    scores = decoded.option("scale") * (queries @ keys.transpose(2, 3))
    # A block of padding alone must not become NaN; its rows are never read.
    weights = torch.softmax(scores.masked_fill(~(seen | ~seen[:, :1])[:, None, None, :], -torch.inf), 3)
    mixed = (weights @ values).transpose(1, 2)
    own = (ends - count)[sample] + place // size
    return _where_rows(real, mixed[own, place % size]).to(t["q"].dtype)


# --- norms and linear layers ---


def _normed(x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """What is normed, and residual_out (empty without a residual)."""
    return (x, x.new_empty(0)) if residual is None else (x + residual, x + residual)


def _stats(x: Tensor, norm: Norm | None) -> tuple[Tensor, Tensor]:
    none = x.new_empty(0, dtype=compute_dtype(x.dtype))
    return (none, none) if norm is None else (none if norm.mean is None else norm.mean, norm.rstd)


def _linear(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return F.linear(x, w.to(x.dtype), None if b is None else b.to(x.dtype))


def _norm(x: Tensor, weight: Any, bias: Any, residual: Any, spec: str) -> Any:
    decoded = decode(spec)
    rows, total = _normed(x, residual)
    norm = Norm(rows, decoded.option("kind"), decoded.option("eps"), weight, bias)
    return norm.out.to(x.dtype), total, *_stats(x, norm)


def _norm_linear(x: Tensor, w: Tensor, b: Any, norm_weight: Any, norm_bias: Any, residual: Any, spec: str) -> Any:
    decoded = decode(spec)
    rows, total = _normed(x, residual)
    norm = Norm(rows, decoded.option("kind"), decoded.option("eps"), norm_weight, norm_bias)
    return _linear(norm.out, w, b).to(x.dtype), total, *_stats(x, norm)


def _linear_norm(x: Tensor, w: Tensor, b: Any, norm_weight: Any, norm_bias: Any, spec: str) -> Any:
    decoded = decode(spec)
    norm = Norm(_linear(x.to(compute_dtype(x.dtype)), w, b), decoded.option("kind"), decoded.option("eps"), norm_weight, norm_bias)
    return norm.out.to(x.dtype), norm.rstd


def _mlp(x: Tensor, w1: Tensor, b1: Any, w2: Tensor, b2: Any, residual: Any, spec: str) -> Any:
    decoded = decode(spec)
    rows, total = _normed(x, residual)
    norm = Norm(rows, decoded.option("norm"), decoded.option("eps")) if decoded.option("norm") else None
    inner = rows.to(compute_dtype(x.dtype)) if norm is None else norm.out
    y = _linear(activations.act(decoded.option("activation"), _linear(inner, w1, b1)), w2, b2)
    return y.to(x.dtype), total, *_stats(x, norm)


# --- moving rows ---


def _concat(values: list[Tensor], offsets: list[Tensor], spec: str) -> Tensor:
    whole = offsets[0]
    for o in offsets[1:]:
        whole = whole + o
    rows = sum(v.shape[0] for v in values)
    out = values[0].new_zeros((rows + 1, *values[0].shape[1:]))
    before = torch.zeros_like(offsets[0][:-1])
    for v, o in zip(values, offsets):
        sample, place, real = _samples(o, v.shape[0])
        at = (whole[sample] + before[sample] + place).where(real, torch.full_like(place, rows))
        out = out.index_put((at,), _where_rows(real, v))
        before = before + o.diff()
    return out[:-1]


def _split(values: Tensor, offsets: list[Tensor], rows: list[Any], spec: str) -> list[Tensor]:
    whole = offsets[0]
    for o in offsets[1:]:
        whole = whole + o
    before, parts = torch.zeros_like(offsets[0][:-1]), []
    for o, n in zip(offsets, rows):
        sample, place, real = _samples(o, n)
        at = (whole[sample] + before[sample] + place).where(real, torch.zeros_like(place))
        parts.append(_where_rows(real, values[at]))
        before = before + o.diff()
    return parts


def _sum(values: Tensor, offsets: Tensor, spec: str) -> Tensor:
    sample, _, real = _samples(offsets, values.shape[0])
    wide = values.to(compute_dtype(values.dtype)) if values.is_floating_point() else values
    sums = wide.new_zeros((offsets.shape[0] - 1, *values.shape[1:]))
    return sums.index_add(0, sample, _where_rows(real, wide)).to(values.dtype)


def _mean(values: Tensor, offsets: Tensor, spec: str) -> Tensor:
    dtype = compute_dtype(values.dtype)
    count = offsets.diff().clamp(min=1).to(dtype).view(-1, *(1,) * (values.dim() - 1))
    return (_sum(values.to(dtype), offsets, spec) / count).to(values.dtype)


def _expand(values: Tensor, offsets: Tensor, rows: Any, spec: str) -> Tensor:
    sample, _, real = _samples(offsets, rows)
    return _where_rows(real, values[sample])


def _to_padded(values: Tensor, offsets: Tensor, max_len: Any, spec: str) -> Tensor:
    padded, real = _padded(values, offsets, max_len)
    fill = torch.full((), decode(spec).option("fill"), dtype=values.dtype, device=values.device)
    return torch.where(real.view(*real.shape, *(1,) * (padded.dim() - 2)), padded, fill)


def _from_padded(padded: Tensor, offsets: Tensor, rows: Any, spec: str) -> Tensor:
    return _packed(padded, offsets, rows)
