"""Several ops on packed rows as one call, for inference: an implementation may run them sample by sample, so that what lies between them
never leaves the caches.

A `Program` is built anew for each batch, from tensors and the results of earlier steps::

    p = Program(samples=B)
    s = p.given(rows, offsets)                     # a sample's rows by offsets
    q = p.linear(s, w_q, b_q, norm="rms")
    o = p.attention(q, k, v, heads=2, width=16, activation="gelu")
    out = p.linear(o, w_o, b_o, add=s)
    (result,) = p.run(out)                         # tensors of the asked results

Implementations are `KernelSpec`s of the op "program" whose forward takes the program; without one, the package's ops run the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from gem_core.ops import dispatch
from gem_core.ops.attention import gdpa, jagged_attention
from gem_core.ops.contract import Problem
from gem_core.ops.norms import norm

OP = "program"


@dataclass(eq=False)
class Rows:
    """Packed rows ``[N, width]``: a sample's rows by ``offsets [B+1]``, or ``each`` rows a sample. ``tensor`` is what was given; ``of`` the
    rows that these are ``width`` columns of, from ``column`` on."""

    width: int
    offsets: Tensor | None = None
    each: int = 1
    tensor: Tensor | None = None
    of: Rows | None = None
    column: int = 0

    def columns(self, begin: int, width: int) -> Rows:
        """A part of each row."""
        return Rows(width, self.offsets, self.each, None, self, begin)

    def split(self, parts: int) -> Rows:
        """Each row cut into ``parts`` rows."""
        assert self.offsets is None
        return Rows(self.width // parts, None, self.each * parts, None, self)


@dataclass(frozen=True, eq=False)
class Linear:
    """``y = n(x) wᵀ + b (+ add)``, n the affine-free norm of ``kind`` or nothing."""

    x: Rows
    y: Rows
    weight: Tensor
    bias: Tensor | None
    norm: str | None
    eps: float
    add: Rows | None


@dataclass(frozen=True, eq=False)
class Attention:
    """`jagged_attention` (``activation`` None) or `gdpa` of rows of ``heads * width``; ``q`` is a tensor ``[n, heads, width]`` where all
    samples share it. ``candidates``: the last rows of every sample, as ``num_targets``."""

    q: Rows | Tensor
    k: Rows
    v: Rows
    out: Rows
    heads: int
    width: int
    scale: float
    out_scale: float
    activation: str | tuple[str, ...] | None
    causal: bool
    window: tuple[int, int] | None
    candidates: int


@dataclass
class Program:
    """Steps in their order; see the module."""

    samples: int
    steps: list[Linear | Attention] = field(default_factory=list)

    def given(self, tensor: Tensor, offsets: Tensor | None = None, each: int = 1) -> Rows:
        """``tensor [N, width]`` as rows."""
        return Rows(tensor.shape[1], offsets, each, tensor)

    def linear(
        self, x: Rows, weight: Tensor, bias: Tensor | None = None, *, norm: str | None = None, eps: float = 1e-6, add: Rows | None = None
    ) -> Rows:
        y = Rows(weight.shape[0], x.offsets, x.each)
        self.steps.append(Linear(x, y, weight, bias, norm, eps, add))
        return y

    def attention(
        self, q: Rows | Tensor, k: Rows, v: Rows, *, heads: int, width: int, scale: float | None = None, out_scale: float = 1.0,
        activation: str | tuple[str, ...] | None = None, causal: bool = False, window: tuple[int, int] | None = None, candidates: int = 0,
    ) -> Rows:  # fmt: skip
        out = Rows(heads * width, None, q.shape[0]) if isinstance(q, Tensor) else Rows(heads * width, q.offsets, q.each)
        options = activation, causal, window, candidates
        self.steps.append(Attention(q, k, v, out, heads, width, width**-0.5 if scale is None else scale, out_scale, *options))
        return out

    def run(self, *wanted: Rows) -> list[Tensor]:
        """The tensors ``[N, width]`` of ``wanted``."""
        problem = self.problem()
        for spec, answer in dispatch.candidates(problem):
            if answer:
                return cast("list[Tensor]", spec.forward(problem, self, wanted))
        return reference(self, wanted)

    def problem(self) -> Problem:
        """What a choice may depend on: device and dtype, and the widest rows, heads and matrices."""
        first = next(s.x.tensor if isinstance(s, Linear) else s.k.tensor for s in self.steps)
        weight = next((s.weight for s in self.steps if isinstance(s, Linear)), first)
        assert weight is not None
        linear = [s for s in self.steps if isinstance(s, Linear)]
        sizes = {
            "K": max((s.weight.shape[1] for s in linear), default=0),
            "N": max((s.weight.shape[0] for s in linear), default=0),
            "D": max((s.width for s in self.steps if isinstance(s, Attention)), default=0),
        }
        return Problem(OP, weight.device.type, None, (("x", weight.dtype),), tuple(sizes.items()))


def offered(device: str, dtype: torch.dtype) -> bool:
    """Whether an implementation takes programs of such tensors, and the choice of implementations is left to the fastest."""
    problem = Problem(OP, device, None, (("x", dtype),), (("K", 1), ("N", 1), ("D", 1)))
    return dispatch.policy() == dispatch.Policy() and any(answer for _, answer in dispatch.candidates(problem))


def reference(program: Program, wanted: Sequence[Rows]) -> list[Tensor]:
    """The steps one after another with the ops of this package."""
    found: dict[Rows, Tensor] = {}

    def tensor(rows: Rows) -> Tensor:
        if rows.tensor is not None:
            return rows.tensor
        if rows.of is None:
            return found[rows]
        if rows.each != rows.of.each:
            return tensor(rows.of).reshape(-1, rows.width)
        return tensor(rows.of)[:, rows.column : rows.column + rows.width]

    def offsets(rows: Rows, like: Tensor) -> Tensor:
        return torch.arange(program.samples + 1, device=like.device) * rows.each if rows.offsets is None else rows.offsets

    for step in program.steps:
        if isinstance(step, Linear):
            x = tensor(step.x)
            normed: Any = x if step.norm is None else norm(x, kind=step.norm, eps=step.eps)
            y = F.linear(normed, step.weight, step.bias)
            found[step.y] = y if step.add is None else tensor(step.add) + y
            continue
        k, v = (tensor(r).reshape(-1, step.heads, step.width) for r in (step.k, step.v))
        shared = isinstance(step.q, Tensor)
        q_offsets = offsets(step.q, k) if isinstance(step.q, Rows) else None
        q = tensor(step.q).reshape(-1, step.heads, step.width) if isinstance(step.q, Rows) else step.q
        targets = torch.full((program.samples,), step.candidates, dtype=torch.int32, device=k.device) if step.candidates else None
        options: dict[str, Any] = {"causal": step.causal, "window": step.window, "num_targets": targets, "broadcast_q": shared}
        op: Callable[..., Any] = jagged_attention
        if step.activation is None:
            options |= {"scale": step.scale, "out_scale": step.out_scale}
        else:
            op, options = gdpa, options | {"activation": step.activation, "scale_in": step.scale, "scale_out": step.out_scale}
        found[step.out] = op(q, k, v, q_offsets, offsets(step.k, k), **options).flatten(1)
    return [tensor(rows) for rows in wanted]
