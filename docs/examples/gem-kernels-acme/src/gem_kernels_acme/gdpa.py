"""gdpa for few keys a sample, on padded tensors: ``O = P V``, ``P = scale_out · act(scale_in · Q Kᵀ)``.

Padding needs no mask: a padded key has V = 0, so whatever its P is adds nothing, and a padded query is never read back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gem_core.ops import YES, Problem, Supported, no
from gem_core.ops.activations import ACTIVATIONS

MAX_KEYS = 256

Saved = tuple[Any, ...]
"""Tensors, and None where one of the contract's is absent."""


def supports(problem: Problem) -> Supported:
    """Full attention to at most `MAX_KEYS` keys, as many heads in K as in Q, one activation for all heads."""
    if problem.precision is not None:
        return no("no low-precision arithmetic")
    asked = [name for name in ("causal", "broadcast_q", "window") if problem.option(name)]
    asked += sorted(problem.present - {"q", "k", "v", "q_offsets", "k_offsets"})
    if asked:
        return no(f"{', '.join(asked)} not implemented")
    if problem.option("activation") not in ACTIVATIONS:
        return no("one activation for all heads only")
    if problem.dim("H") != problem.dim("Hkv"):
        return no("no grouped heads")
    if problem.option("max_k_len") > MAX_KEYS:
        return no(f"made for at most {MAX_KEYS} keys a sample, the bound is {problem.option('max_k_len')}")
    return YES


def forward(problem: Problem, *tensors: Any) -> tuple[Tensor, Saved]:
    """``tensors`` in the order of the op's contract; returns ``[Nq, H, Dv]`` and the saved tensors, which for gdpa are the inputs."""
    q, k, v, q_offsets, k_offsets = tensors[:5]
    call = _Call(problem, q, k, v, q_offsets, k_offsets)
    activation, _ = ACTIVATIONS[problem.option("activation")]
    out = problem.option("scale_out") * activation(call.scores()) @ call.v
    return _pack(out, q_offsets, q.shape[0]).to(q.dtype), tensors


def backward(problem: Problem, saved: Saved, dout: Tensor, needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v; the other differentiable tensors of the contract are absent in every problem that `supports` accepts."""
    q, k, v, q_offsets, k_offsets = saved[:5]
    call = _Call(problem, q, k, v, q_offsets, k_offsets)
    activation, derivative = ACTIVATIONS[problem.option("activation")]
    scale_in, scale_out = problem.option("scale_in"), problem.option("scale_out")
    scores = call.scores()
    dout = _pad(dout, q_offsets, problem.option("max_q_len"))
    dscores = scale_in * scale_out * derivative(scores) * (dout @ call.v.mT)
    dq = _pack(dscores @ call.k, q_offsets, q.shape[0]).to(q.dtype) if needs[0] else None
    dk = _pack(dscores.mT @ call.q, k_offsets, k.shape[0]).to(k.dtype) if needs[1] else None
    dv = _pack(scale_out * activation(scores).mT @ dout, k_offsets, v.shape[0]).to(v.dtype) if needs[2] else None
    return dq, dk, dv, *[None] * (len(needs) - 3)


class _Call:
    """The padded tensors of one call, ``[B, H, L, D]``."""

    def __init__(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor) -> None:
        self.scale_in: float = problem.option("scale_in")
        self.q = _pad(q, q_offsets, problem.option("max_q_len"))
        self.k = _pad(k, k_offsets, problem.option("max_k_len"))
        self.v = _pad(v, k_offsets, problem.option("max_k_len"))

    def scores(self) -> Tensor:
        return self.scale_in * self.q @ self.k.mT


def _pad(x: Tensor, offsets: Tensor, length: int) -> Tensor:
    """``[N, H, D]`` -> ``[B, H, length, D]``, zero past each sample's end; in float64 for float64 and in float32 otherwise."""
    starts, ends = offsets[:-1, None].long(), offsets[1:, None].long()
    rows = starts + torch.arange(length, device=x.device)
    # Row N is a row of zeros: rows past offsets[-1] may hold anything and must not be read.
    rows = torch.where(rows < ends, rows, x.shape[0])
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    return torch.cat([wide, wide.new_zeros(1, *x.shape[1:])])[rows].transpose(1, 2)


def _pack(padded: Tensor, offsets: Tensor, rows: int) -> Tensor:
    """``[B, H, L, D]`` -> ``[rows, H, D]``; rows past the last offset are zero."""
    batch, heads, length, width = padded.shape
    row = torch.arange(rows, device=padded.device)
    ends = offsets[1:].long()
    sample = torch.bucketize(row, ends, right=True)
    starts = torch.cat([offsets.long(), offsets.new_zeros(1, dtype=torch.long)])
    flat = torch.where(sample < batch, sample * length + row - starts[sample], batch * length)
    table = padded.transpose(1, 2).reshape(batch * length, heads, width)
    return torch.cat([table, table.new_zeros(1, heads, width)])[flat]
