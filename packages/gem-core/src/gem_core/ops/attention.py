"""`jagged_attention` and `gdpa`: attention over packed samples, softmax or pointwise.

Implementations get the bounds as ``max_q_len`` and ``max_k_len`` in the problem's options, rounded up to powers of two, beside causal,
window, broadcast_q, return_lse, and scale and out_scale (jagged_attention) or activation, scale_in and scale_out (gdpa).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gem_core.errors import OpError
from gem_core.ops import attention_reference as reference
from gem_core.ops import checks, library, masks
from gem_core.ops.activations import Activation, check_activation
from gem_core.ops.contract import OpPrecision
from gem_core.ops.contracts import GDPA, JAGGED_ATTENTION
from gem_core.ops.frontend import autocast, bound, check_window, finish, host_values
from gem_core.ops.library import Named, OpDefinition, Sizes, Spec
from gem_core.ops.remember import remembered

Call = tuple[str, tuple[Tensor | None, ...], tuple[int, ...], str]
"""Op, tensors, sizes, spec: the arguments of the custom op."""
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class RelativeBias:
    """Learned additive bias by relative position and by time gap, per head.

    ``position [H, 2R+1]``: indexed by clamp(j − p, −R, R) + R. ``time [H, T]``, with ``time_edges [T−1]`` int64 ascending and int64 times
    ``q_times [Nq]``, ``k_times [Nk]``: indexed by the number of edges <= \\|tᵢ − tⱼ\\|. A candidate's own time is read from q_times under
    request sharing. Both tables receive gradients.
    """

    position: Tensor
    time: Tensor | None = None
    time_edges: Tensor | None = None
    q_times: Tensor | None = None
    k_times: Tensor | None = None


def jagged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor | None = None,
    *,
    max_q_len: int | None = None,
    max_k_len: int | None = None,
    scale: float | None = None,
    causal: bool = False,
    window: int | tuple[int, int] | None = None,
    bias: RelativeBias | None = None,
    num_targets: Tensor | None = None,
    target_kv: tuple[Tensor, Tensor] | None = None,
    context_len: Tensor | None = None,
    broadcast_q: bool = False,
    kv_index: Tensor | None = None,
    out_scale: float = 1.0,
    return_lse: bool = False,
    precision: OpPrecision | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Jagged Flash Attention: ``O = out_scale · softmax(scale · Q Kᵀ + bias) V`` for each sample by itself.

    :param q: ``[Nq, H, D]``; with ``broadcast_q`` ``[Lq, H, D]``, shared by all samples (then ``q_offsets`` is None).
    :param k: ``[Nk, Hkv, D]``, H a multiple of Hkv. :param v: ``[Nk, Hkv, Dv]``.
    :param q_offsets: ``[B+1]`` int32 or int64; ``k_offsets=None`` means the same. Rows past the last offset give 0 and get no gradient.
    :param max_q_len: bound of the sample lengths known on the host; None: the total. A value below the true maximum is an error.
    :param scale: None: D^−½. ``out_scale`` multiplies after the softmax.
    :param causal: key j is seen where j <= p, p = i + (Lk − Lq). ``window``: (l, r) or an int, p − l <= j <= p + r, −1: unbounded.
    :param num_targets: ``[B]``: the last rows of Q and K are candidates; each sees the history and itself, and nothing sees it.
    :param context_len: ``[B]``: positions below it see and are seen by every row but candidates, whatever causal and window say.
    :param kv_index: ``[B]``: sample b reads the keys of request kv_index[b]; with ``num_targets`` the candidates' own rows are in
        ``target_kv = ([Nq, Hkv, D], [Nq, Hkv, Dv])``.
    :return: ``[Nq, H, Dv]`` in q's dtype (``[B·Lq, H, Dv]`` with broadcast_q), and with ``return_lse`` the log-sum-exp ``[H, Nq]`` in fp32
        (fp64 for fp64), natural log, without gradient. A row that sees no key gives 0 and −inf.
    :raises OpError: arguments that contradict each other, or an implementation that was asked for and cannot do the problem.
    """
    options = [("scale", None if scale is None else float(scale)), ("out_scale", float(out_scale)), ("return_lse", bool(return_lse))]
    call = _prepare(
        "jagged_attention", options, q, k, v, q_offsets, k_offsets, max_q_len, max_k_len, causal, window, bias, num_targets, target_kv,
        context_len, broadcast_q, kv_index, precision, backend,
    )  # fmt: skip
    out, lse = torch.ops.gem.jagged_attention.default(*call[1], *call[2], call[3])
    return (out, lse) if return_lse else out


def gdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor | None = None,
    *,
    activation: Activation = "gelu",
    scale_in: float = 1.0,
    scale_out: float = 1.0,
    max_q_len: int | None = None,
    max_k_len: int | None = None,
    causal: bool = False,
    window: int | tuple[int, int] | None = None,
    bias: RelativeBias | None = None,
    num_targets: Tensor | None = None,
    target_kv: tuple[Tensor, Tensor] | None = None,
    context_len: Tensor | None = None,
    broadcast_q: bool = False,
    kv_index: Tensor | None = None,
    precision: OpPrecision | None = None,
    backend: str | None = None,
) -> Tensor:
    """Generalised dot-product attention: ``O = P V``, ``P = scale_out · act(scale_in · Q Kᵀ + bias)``, 0 where a pair is masked.

    ``activation`` is a name of `gem_core.ops.activations.ACTIVATIONS` or a tuple with one name a head. HSTU attention is
    ``gdpa(activation="silu", scale_in=α, scale_out=1/N, causal=True, ...)``. All other arguments are those of `jagged_attention`.

    :return: ``[Nq, H, Dv]`` in q's dtype (``[B·Lq, H, Dv]`` with broadcast_q).
    :raises OpError: an unknown activation, one with act(0) ≠ 0, or whatever `jagged_attention` refuses.
    """
    check_activation("gdpa", activation, q.shape[1] if isinstance(q, Tensor) and q.dim() == 3 else None)
    name = activation if isinstance(activation, str) else "+".join(activation)
    options = [("scale_in", float(scale_in)), ("scale_out", float(scale_out)), ("activation", name)]
    call = _prepare(
        "gdpa", options, q, k, v, q_offsets, k_offsets, max_q_len, max_k_len, causal, window, bias, num_targets, target_kv, context_len,
        broadcast_q, kv_index, precision, backend,
    )  # fmt: skip
    return torch.ops.gem.gdpa.default(*call[1], *call[2], call[3])


def _prepare(
    op: str,
    options: list[tuple[str, Any]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor | None,
    max_q_len: int | None,
    max_k_len: int | None,
    causal: bool,
    window: int | tuple[int, int] | None,
    bias: RelativeBias | None,
    num_targets: Tensor | None,
    target_kv: Pair | None,
    context_len: Tensor | None,
    broadcast_q: bool,
    kv_index: Tensor | None,
    precision: OpPrecision | None,
    backend: str | None,
) -> Call:
    target_k, target_v = (None, None) if target_kv is None else target_kv
    q, k, v, target_k, target_v = autocast(q, k, v, target_k, target_v)
    if k_offsets is None:
        k_offsets = q_offsets
    _check_shapes(op, q, k, v, q_offsets, k_offsets, num_targets, target_kv, context_len, broadcast_q, kv_index)
    _check_combination(op, causal, window, bias, num_targets, target_kv, context_len, broadcast_q, kv_index, q_offsets)
    if bias is not None:
        _check_bias(op, bias, q, k)
    if op == "jagged_attention" and options[0][1] is None:
        options[0] = ("scale", float(q.shape[2]) ** -0.5)
    left, right = check_window(op, window)
    options += [("causal", bool(causal)), ("window_left", left), ("window_right", right), ("broadcast_q", bool(broadcast_q))]
    sizes = bound(op, "max_q_len", max_q_len), bound(op, "max_k_len", max_k_len)
    parts = (None,) * 5 if bias is None else (bias.position, bias.time, bias.time_edges, bias.q_times, bias.k_times)
    tensors = (q, k, v, q_offsets, k_offsets, num_targets, target_k, target_v, context_len, kv_index, *parts, None, None, None)
    return op, tensors, sizes, finish(op, tensors, options, backend, precision)


def _check_shapes(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor | None,
    num_targets: Tensor | None,
    target_kv: Pair | None,
    context_len: Tensor | None,
    broadcast_q: bool,
    kv_index: Tensor | None,
) -> None:
    checks.check_qkv(op, q, k, v)
    target_k, target_v = (None, None) if target_kv is None else target_kv
    checks.check_float(op, q=q, k=k, v=v, target_k=target_k, target_v=target_v)
    if not broadcast_q:
        if q_offsets is None:
            raise OpError(f"{op}: q_offsets is missing", where="q_offsets", fix="pass [B+1] offsets, or broadcast_q=True for a shared q")
        checks.check_offsets_arg(op, "q_offsets", q_offsets, q)
    if k_offsets is None:
        raise OpError(f"{op}: k_offsets is missing", where="k_offsets", fix="broadcast_q needs the offsets of k")
    checks.check_offsets_arg(op, "k_offsets", k_offsets, k)
    if kv_index is not None:
        checks.check_index(op, "kv_index", kv_index, q, "[B]")
    if not broadcast_q:
        assert q_offsets is not None  # checked above
        samples = q_offsets.shape[0] - 1
        keyed = k_offsets.shape[0] - 1 if kv_index is None else kv_index.shape[0]
        name = "k_offsets" if kv_index is None else "kv_index"
        checks.require(samples == keyed, op, name, "q_offsets describes {} samples, {} {}", samples, name, keyed)
        for label, t in (("num_targets", num_targets), ("context_len", context_len)):
            if t is not None:
                checks.check_index(op, label, t, q, "[B]")
                checks.require(t.shape[0] == samples, op, label, "{} has {} values for {} samples", label, t.shape[0], samples)
    if target_kv is not None:
        for label, own, like in (("target_kv[0]", target_kv[0], k), ("target_kv[1]", target_kv[1], v)):
            checks.check_tensor(op, label, own, 3, "[Nq, Hkv, D]")
            want = (q.shape[0], like.shape[1], like.shape[2])
            checks.require(tuple(own.shape) == want, op, "target_kv", "{} has shape {}, not {}", label, tuple(own.shape), want)


def _check_combination(
    op: str,
    causal: bool,
    window: int | tuple[int, int] | None,
    bias: RelativeBias | None,
    num_targets: Tensor | None,
    target_kv: Pair | None,
    context_len: Tensor | None,
    broadcast_q: bool,
    kv_index: Tensor | None,
    q_offsets: Tensor | None,
) -> None:
    if broadcast_q:
        given = {
            "q_offsets": q_offsets, "causal": causal or None, "window": window, "num_targets": num_targets, "context_len": context_len,
            "bias": bias, "target_kv": target_kv,
        }  # fmt: skip
        for name, value in given.items():
            checks.require(
                value is None, op, name, "broadcast_q cannot be combined with {}", name, fix="a shared q has no position in a sample"
            )
    if target_kv is not None and (kv_index is None or num_targets is None):
        raise OpError(f"{op}: target_kv needs kv_index and num_targets", where="target_kv", fix="without kv_index candidates are rows of k")
    if kv_index is not None and num_targets is not None and target_kv is None:
        raise OpError(f"{op}: kv_index with num_targets needs target_kv", where="target_kv", fix="pass the candidates' own (k, v) rows")


def _check_bias(op: str, bias: RelativeBias, q: Tensor, k: Tensor) -> None:
    position = bias.position
    checks.check_tensor(op, "bias.position", position, 2, "[H, 2R+1]")
    checks.require(
        position.shape[0] == q.shape[1], op, "bias.position", "bias.position has {} rows for {} heads", position.shape[0], q.shape[1]
    )
    checks.require(position.shape[1] % 2 == 1, op, "bias.position", "bias.position has {} columns", position.shape[1], fix="2R+1 is odd")
    for name in ("position", "time", "time_edges", "q_times", "k_times"):
        t = getattr(bias, name)
        if isinstance(t, Tensor):
            checks.require(t.device == q.device, op, f"bias.{name}", "bias.{} is on {}, q on {}", name, t.device, q.device)
    checks.check_float(op, **{"bias.position": position, "bias.time": bias.time})
    rest: dict[str, Any] = {"time_edges": bias.time_edges, "q_times": bias.q_times, "k_times": bias.k_times}
    if bias.time is None:
        for name, t in rest.items():
            checks.require(t is None, op, f"bias.{name}", "bias.{} is given without bias.time", name)
        return
    checks.check_tensor(op, "bias.time", bias.time, 2, "[H, T]")
    checks.require(bias.time.shape[0] == q.shape[1], op, "bias.time", "bias.time has {} rows for {} heads", bias.time.shape[0], q.shape[1])
    lengths = {"time_edges": bias.time.shape[1] - 1, "q_times": q.shape[0], "k_times": k.shape[0]}
    for name, t in rest.items():
        checks.check_tensor(op, f"bias.{name}", t, 1, "[T-1]" if name == "time_edges" else "[N]")
        checks.require(t.dtype == torch.int64, op, f"bias.{name}", "bias.{} has dtype {}", name, t.dtype, fix="times and edges are int64")
        checks.require(
            t.shape[0] == lengths[name],
            op,
            f"bias.{name}",
            "bias.{} has {} values, not {}",
            name,
            t.shape[0],
            lengths[name],
            fix="time_edges: one fewer than bias.time has columns; q_times, k_times: one a row of q, k",
        )


def dims(named: Named) -> tuple[tuple[str, int], ...]:
    q, k, v = named["q"], named["k"], named["v"]
    sizes = (("H", q.shape[1]), ("Hkv", k.shape[1]), ("D", q.shape[2]), ("Dv", v.shape[2]))
    return sizes if named.get("q_offsets") is not None else (*sizes, ("Lq", q.shape[0]))


def bounds(named: Named, sizes: Sizes) -> tuple[tuple[str, int], ...]:
    q_bound, k_bound = sizes["max_q_len"], sizes["max_k_len"]
    return (("max_q_len", named["q"].shape[0] if q_bound < 0 else q_bound), ("max_k_len", named["k"].shape[0] if k_bound < 0 else k_bound))


def out_rows(named: Named) -> int:
    if named.get("q_offsets") is not None:
        return named["q"].shape[0]
    return named["q"].shape[0] * batch_size(named)


def batch_size(named: Named) -> int:
    index = named.get("kv_index")
    return named["k_offsets"].shape[0] - 1 if index is None else index.shape[0]


def _fake(named: Named, sizes: Sizes, spec: Spec) -> list[Tensor]:
    q, v, rows = named["q"], named["v"], out_rows(named)
    out = q.new_empty(rows, q.shape[1], v.shape[2])
    lse = q.new_empty(q.shape[1], rows, dtype=reference.compute_dtype(q.dtype))
    return [out, lse]


def _check(op: str, named: Named, sizes: Sizes, spec: Spec) -> None:
    names = ("k_offsets", "q_offsets", "num_targets", "context_len", "kv_index", "bias_time_edges")
    tensors = [named[n] for n in names]
    rows = named["q"].shape[0], named["k"].shape[0]
    remembered(tensors, (rows, *sizes.values()), lambda: _check_values(op, named, sizes, rows))


def _check_values(op: str, named: Named, sizes: Sizes, rows: tuple[int, int]) -> None:
    values = checks.Values(op, named["q"].device)
    q_bound, k_bound = (None if n < 0 else n for n in sizes.values())
    index, targets, context, edges = (named[n] for n in ("kv_index", "num_targets", "context_len", "bias_time_edges"))
    q_lengths = None
    if named["q_offsets"] is not None:
        q_lengths = values.offsets("q_offsets", named["q_offsets"], rows[0], q_bound, "max_q_len")
    k_lengths = values.offsets("k_offsets", named["k_offsets"], rows[1], k_bound, "max_k_len")
    if index is not None:
        requests = k_lengths.numel()
        values.expect(
            (index >= 0) & (index < requests),
            lambda: (f"kv_index holds {int(index.min())} to {int(index.max())}, there are {requests} requests", "kv_index", None),
        )
    if edges is not None:
        values.expect(edges.diff() >= 0, lambda: ("bias.time_edges decreases", "bias.time_edges", "edges are ascending"))
    if q_lengths is None:
        return
    if targets is not None:
        limit = q_lengths if index is not None else torch.minimum(q_lengths, k_lengths)
        values.expect(
            (targets >= 0) & (targets <= limit),
            lambda: (
                f"num_targets of sample {int(((targets < 0) | (targets > limit)).int().argmax())} is not within its rows",
                "num_targets",
                "candidates are the last rows of a sample: 0 <= num_targets <= its length",
            ),
        )
    if context is not None:
        values.expect(context >= 0, lambda: (f"context_len holds {int(context.min())}", "context_len", "lengths are >= 0"))


def sample_lengths(named: Named, sizes: Sizes) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """q lengths, k lengths (candidates included), num_targets, context_len ``[B]`` on the CPU, for FLOP formulas.

    Fake tensors have no values: then every sample counts with its bound.
    """
    batch, rows = batch_size(named), dict(bounds(named, sizes))
    if host_values(named["k_offsets"]) is None:
        q_lengths = torch.full((int(batch),), int(named["q"].shape[0] if named.get("q_offsets") is None else rows["max_q_len"]))
        return q_lengths, torch.full((int(batch),), int(rows["max_k_len"])), None, None
    host = {n: t.cpu() for n in ("q_offsets", "k_offsets", "num_targets", "context_len", "kv_index") if (t := named.get(n)) is not None}
    k_lengths = host["k_offsets"].diff().long()
    if "kv_index" in host:
        k_lengths = k_lengths[host["kv_index"].long()]
        if "num_targets" in host:
            k_lengths = k_lengths + host["num_targets"]
    q_lengths = torch.full_like(k_lengths, named["q"].shape[0]) if "q_offsets" not in host else host["q_offsets"].diff().long()
    return q_lengths, k_lengths, host.get("num_targets"), host.get("context_len")


def attention_flops(pairs: int, heads: int, d: int, dv: int, *, backward: bool = False) -> int:
    """2·H·(D + Dv) FLOPs an attended pair forward; backward recomputes S and has dP, dV, dQ, dK: 2·H·(3 D + 2 Dv), 2.5 times for D = Dv."""
    return 2 * heads * pairs * (3 * d + 2 * dv if backward else d + dv)


def _flops(named: Named, sizes: Sizes, spec: Spec, needs: Sequence[bool] | None) -> int:
    q_lengths, k_lengths, targets, context = sample_lengths(named, sizes)
    pairs = masks.attended_pairs(
        q_lengths, k_lengths, num_targets=targets, context_len=context, causal=spec.option("causal", False), window=spec.option("window")
    )
    q, v = named["q"], named["v"]
    return attention_flops(int(pairs.sum()), q.shape[1], q.shape[2], v.shape[2], backward=needs is not None)


def _weights(named: Named, spec: Spec) -> float | None:
    """Self-attention shows every row to itself, so that all have weights. Products in other formats round these."""
    q, k = named["q_offsets"], named["k_offsets"]
    own = q is not None and k is not None and q.data_ptr() == k.data_ptr() and named["target_k"] is None and named["kv_index"] is None
    return float(spec.option("out_scale", 1.0)) if own and spec.precision is None else None


_SHARED: dict[str, Any] = {"dims": dims, "flops": _flops, "bounds": bounds, "sizes": ("max_q_len", "max_k_len")}
library.define(OpDefinition(JAGGED_ATTENTION, fake=_fake, check=partial(_check, "jagged_attention"), weights=_weights, **_SHARED))
library.define(OpDefinition(GDPA, fake=lambda n, s, o: _fake(n, s, o)[:1], check=partial(_check, "gdpa"), **_SHARED))
