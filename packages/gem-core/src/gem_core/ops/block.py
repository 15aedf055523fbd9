"""`block_attention`: every row attends the rows of its own block, blocks aligned to each sample's start.

Options of the problem: ``block_size`` and ``scale``. Rotation by angle θ acts on interleaved pairs, (a, b) -> (a cos θ − b sin θ,
a sin θ + b cos θ), on q, k and v; gradients are rotated back by −θ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gem_core.errors import OpError
from gem_core.ops import checks, library, masks
from gem_core.ops.attention import attention_flops
from gem_core.ops.attention_reference import Saved, compute_dtype
from gem_core.ops.contract import OpPrecision, Problem
from gem_core.ops.contracts import BLOCK_ATTENTION
from gem_core.ops.frontend import autocast, finish, host_values
from gem_core.ops.library import Named, OpDefinition, Sizes, Spec
from gem_core.ops.remember import remembered

OP = "block_attention"


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    block_size: int = 64,
    scale: float | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
    rotary_rows: Tensor | None = None,
    precision: OpPrecision | None = None,
    backend: str | None = None,
) -> Tensor:
    """Softmax attention within blocks: row i sees row j of its sample where i // block_size == j // block_size (not causal).

    :param q: ``[N, H, D]``. :param k: ``[N, Hkv, D]``, H a multiple of Hkv. :param v: ``[N, Hkv, Dv]``.
    :param offsets: ``[B+1]`` int32 or int64, common to q, k and v; the last block of a sample may be partial.
    :param scale: None: D^−½.
    :param rotary: (cos, sin), each ``[P, D/2]`` fp32, applied to q, k **and** v (even D = Dv); they get no gradient. The table's row is the
        position within the sample (P >= the longest sample), or ``rotary_rows [N]`` int for per-event angles.
    :return: ``[N, H, Dv]`` in q's dtype; rows past the last offset are 0.
    :raises OpError: shapes or dtypes that do not fit, or an implementation that was asked for and cannot do the problem.
    """
    q, k, v = autocast(q, k, v)
    _check_shapes(q, k, v, offsets, block_size, rotary, rotary_rows)
    cos, sin = (None, None) if rotary is None else rotary
    tensors = (q, k, v, offsets, cos, sin, rotary_rows)
    options = [("block_size", int(block_size)), ("scale", float(q.shape[2]) ** -0.5 if scale is None else float(scale))]
    return torch.ops.gem.block_attention.default(*tensors, finish(OP, tensors, options, backend, precision))


def _check_shapes(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, block_size: int, rotary: tuple[Tensor, Tensor] | None, rotary_rows: Tensor | None
) -> None:
    checks.check_qkv(OP, q, k, v)
    checks.require(q.shape[0] == k.shape[0], OP, "k", "q has {} rows, k and v have {}", q.shape[0], k.shape[0])
    checks.check_float(OP, q=q, k=k, v=v)
    checks.check_offsets_arg(OP, "offsets", offsets, q)
    checks.require(block_size >= 1, OP, "block_size", "block_size is {}", block_size, fix="64 or 128 suit the hardware")
    if rotary is None:
        if rotary_rows is not None:
            raise OpError(f"{OP}: rotary_rows is given without rotary", where="rotary_rows", fix="pass rotary=(cos, sin)")
        return
    width = q.shape[2]
    checks.require(width % 2 == 0 and v.shape[2] == width, OP, "rotary", "rotary needs even D = Dv, got {} and {}", width, v.shape[2])
    for name, t in zip(("cos", "sin"), rotary):
        checks.check_tensor(OP, f"rotary {name}", t, 2, "[P, D/2]")
        checks.require(t.shape[1] == width // 2, OP, "rotary", "rotary {} has {} columns, not D/2 = {}", name, t.shape[1], width // 2)
        checks.require(
            t.device == q.device, OP, "rotary", "rotary {} is on {}, q on {}", name, t.device, q.device, fix="move them to one device"
        )
    checks.require(rotary[0].shape == rotary[1].shape, OP, "rotary", "cos and sin differ in shape")
    checks.check_float(OP, cos=rotary[0], sin=rotary[1])
    if rotary_rows is not None:
        checks.check_index(OP, "rotary_rows", rotary_rows, q, "[N]")
        checks.require(
            rotary_rows.shape[0] == q.shape[0], OP, "rotary_rows", "rotary_rows has {} values", rotary_rows.shape[0], fix="one a row"
        )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the interleaved pairs of ``x [n, H, D]`` by the angles of ``cos, sin [n, D/2]``; −sin rotates back."""
    a, b = x[..., 0::2], x[..., 1::2]
    c, s = cos[:, None, :].to(x.dtype), sin[:, None, :].to(x.dtype)
    return torch.stack([a * c - b * s, a * s + b * c], dim=-1).flatten(-2)


class _Inputs:
    """The tensors of a call and their blocks, in the compute dtype."""

    def __init__(self, problem: Problem, tensors: Saved) -> None:
        self.t: dict[str, Any] = dict(zip(BLOCK_ATTENTION.tensors, tensors))
        self.dtype = compute_dtype(self.t["q"].dtype)
        self.groups = problem.dim("H") // problem.dim("Hkv")
        self.size, self.scale = problem.option("block_size"), problem.option("scale")

    def blocks(self) -> Iterator[tuple[slice, Tensor | slice]]:
        """(rows of q, k and v; their rows of the rotary tables) of every block."""
        bounds = self.t["offsets"].tolist()
        for begin, end in zip(bounds, bounds[1:]):
            for start in range(begin, end, self.size):
                rows = slice(start, min(start + self.size, end))
                own = self.t["rotary_rows"]
                yield rows, slice(rows.start - begin, rows.stop - begin) if own is None else own[rows]

    def rotated(self, x: Tensor, angles: Tensor | slice, sign: float = 1.0) -> Tensor:
        cos, sin = self.t["rotary_cos"], self.t["rotary_sin"]
        return x if cos is None else rotate(x, cos[angles].to(self.dtype), sign * sin[angles].to(self.dtype))

    def block(self, name: str, rows: slice, angles: Tensor | slice) -> Tensor:
        """``[H, n, D]``, rotated, heads of k and v repeated for their group."""
        x = self.rotated(self.t[name][rows].to(self.dtype), angles).transpose(0, 1)
        return x if name == "q" else x.repeat_interleave(self.groups, dim=0)

    def probabilities(self, rows: slice, angles: Tensor | slice) -> Tensor:
        scores = self.scale * (self.block("q", rows, angles) @ self.block("k", rows, angles).transpose(1, 2))
        return torch.softmax(scores, dim=2)


def forward(problem: Problem, *tensors: Tensor | None) -> tuple[Tensor, Saved]:
    inputs = _Inputs(problem, tensors)
    q, v = inputs.t["q"], inputs.t["v"]
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    for rows, angles in inputs.blocks():
        out[rows] = (inputs.probabilities(rows, angles) @ inputs.block("v", rows, angles)).transpose(0, 1).to(q.dtype)
    return out, tensors


def backward(problem: Problem, saved: Saved, dout: Tensor, needs: tuple[bool, ...]) -> Saved:
    inputs = _Inputs(problem, saved)
    grads = {n: torch.zeros(inputs.t[n].shape, dtype=inputs.dtype, device=dout.device) for n in BLOCK_ATTENTION.differentiable}
    for rows, angles in inputs.blocks():
        p, d = inputs.probabilities(rows, angles), dout[rows].to(inputs.dtype).transpose(0, 1)
        dp = d @ inputs.block("v", rows, angles).transpose(1, 2)
        dscores = inputs.scale * p * (dp - (p * dp).sum(2, keepdim=True))
        found = {
            "q": dscores @ inputs.block("k", rows, angles),
            "k": dscores.transpose(1, 2) @ inputs.block("q", rows, angles),
            "v": p.transpose(1, 2) @ d,
        }
        for name, grad in found.items():
            if name != "q":
                grad = grad.unflatten(0, (-1, inputs.groups)).sum(1)
            grads[name][rows] = inputs.rotated(grad.transpose(0, 1), angles, -1.0)
    return tuple(grads[n].to(inputs.t[n].dtype) if need else None for n, need in zip(BLOCK_ATTENTION.differentiable, needs))


def _dims(named: Named) -> tuple[tuple[str, int], ...]:
    q, k, v = named["q"], named["k"], named["v"]
    return ("H", q.shape[1]), ("Hkv", k.shape[1]), ("D", q.shape[2]), ("Dv", v.shape[2])


def _check(named: Named, sizes: Sizes, spec: Spec) -> None:
    offsets, rows, cos = named["offsets"], named["rotary_rows"], named["rotary_cos"]
    table, n = None if cos is None else cos.shape[0], named["q"].shape[0]

    def values() -> None:
        check = checks.Values(OP, offsets.device)
        bound = table if rows is None else None
        check.offsets("offsets", offsets, n, bound, "the rows of the rotary tables")
        if rows is not None:
            live = torch.arange(n, device=rows.device) < offsets[-1]
            check.expect(
                ~live | ((rows >= 0) & (rows < table)),
                lambda: (f"rotary_rows holds a value outside [0, {table})", "rotary_rows", "values are rows of cos and sin"),
            )

    remembered((offsets, rows), (n, table), values)


def _flops(named: Named, sizes: Sizes, spec: Spec, needs: Sequence[bool] | None) -> int:
    q, v, offsets = named["q"], named["v"], host_values(named["offsets"])
    size = spec.option("block_size")
    pairs = q.shape[0] * size if offsets is None else int(masks.block_pairs(offsets.diff(), size).sum())
    return attention_flops(pairs, q.shape[1], q.shape[2], v.shape[2], backward=needs is not None)


def _fake(named: Named, sizes: Sizes, spec: Spec) -> list[Tensor]:
    q, v = named["q"], named["v"]
    return [q.new_empty(q.shape[0], q.shape[1], v.shape[2])]


def _weights(named: Named, spec: Spec) -> float | None:
    """Angles turn keys and values, so that what is added to all of them is not the same for every row."""
    return 1.0 if named["rotary_cos"] is None else None


library.define(OpDefinition(BLOCK_ATTENTION, dims=_dims, fake=_fake, flops=_flops, check=_check, weights=_weights))
