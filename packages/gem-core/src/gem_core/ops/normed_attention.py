"""`norm_gdpa`: pointwise attention between a LayerNorm and an RMSNorm, both over all heads of a row.

l = LN(q), o = gdpa(l, k, v) + l, out = RMSNorm(o) + q; norms affine-free over H·D with one eps; H = Hkv, D = Dv. The normalised o is
out − q, so that backward needs no second pass over the keys for the RMSNorm's statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from gem_core.ops import activations, attention, checks, library, meeting
from gem_core.ops.activations import Activation
from gem_core.ops.attention_reference import Saved, compute_dtype
from gem_core.ops.contract import Problem
from gem_core.ops.contracts import NORM_GDPA
from gem_core.ops.frontend import autocast, bound, finish
from gem_core.ops.library import Named, OpDefinition, Sizes, Spec
from gem_core.ops.norms import Norm
from gem_core.ops.remember import remembered

OP = "norm_gdpa"


def norm_gdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor | None = None,
    *,
    activation: Activation = "gelu",
    scale_in: float = 1.0,
    scale_out: float = 1.0,
    eps: float = 1e-6,
    max_q_len: int | None = None,
    max_k_len: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """``RMSNorm(gdpa(LN(q), k, v) + LN(q)) + q`` over packed samples.

    :param q: ``[Nq, H, D]``. :param k: ``[Nk, H, D]``. :param v: ``[Nk, H, D]``. :param q_offsets: ``[B+1]``; ``k_offsets=None`` means the
        same. Activation, scales and bounds as in `gdpa`.
    :return: ``[Nq, H, D]`` in q's dtype; rows past the last offset are 0. A sample without keys gives RMSNorm(LN(q)) + q.
    :raises OpError: heads or widths that differ, or an implementation that was asked for and cannot do the problem.
    """
    q, k, v = autocast(q, k, v)
    k_offsets = q_offsets if k_offsets is None else k_offsets
    for name, t in (("q", q), ("k", k), ("v", v)):
        checks.check_tensor(OP, name, t, 3, "[N, H, D]")
        checks.require(
            t.shape[1:] == q.shape[1:],
            OP,
            name,
            "{} has heads {}, q {}",
            name,
            tuple(t.shape[1:]),
            tuple(q.shape[1:]),
            fix="H = Hkv, D = Dv",
        )
    checks.check_float(OP, q=q, k=k, v=v)
    checks.require(k.shape[0] == v.shape[0], OP, "v", "k has {} rows, v has {}", k.shape[0], v.shape[0])
    checks.check_offsets_arg(OP, "q_offsets", q_offsets, q)
    checks.check_offsets_arg(OP, "k_offsets", k_offsets, k)
    checks.require(
        q_offsets.shape == k_offsets.shape,
        OP,
        "k_offsets",
        "q_offsets describes {} samples, k_offsets {}",
        q_offsets.shape[0] - 1,
        k_offsets.shape[0] - 1,
    )
    activations.check_activation(OP, activation, q.shape[1])
    name = activation if isinstance(activation, str) else "+".join(activation)
    options = [("activation", name), ("scale_in", float(scale_in)), ("scale_out", float(scale_out)), ("eps", float(eps))]
    tensors = (q, k, v, q_offsets, k_offsets)
    sizes = bound(OP, "max_q_len", max_q_len), bound(OP, "max_k_len", max_k_len)
    out, *stats = torch.ops.gem.norm_gdpa.default(*tensors, *sizes, finish(OP, tensors, options, backend))
    if out.requires_grad and not torch.compiler.is_compiling() and meeting.kept_as_they_are():
        meeting.note_made(out, meeting.Made(q.detach(), q_offsets, *stats))
    return out  # type: ignore[no-any-return]


def _samples(q_offsets: Tensor, k_offsets: Tensor) -> Iterator[tuple[slice, slice]]:
    q, k = q_offsets.tolist(), k_offsets.tolist()
    return ((slice(a, b), slice(c, d)) for a, b, c, d in zip(q, q[1:], k, k[1:]))


class _Sample:
    """One sample's forward pass in the compute dtype: everything its backward needs."""

    def __init__(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.problem, self.shape, self.dtype = problem, q.shape, compute_dtype(q.dtype)
        eps = problem.option("eps")
        self.k, self.v = k.to(self.dtype).transpose(0, 1), v.to(self.dtype).transpose(0, 1)
        self.first = Norm(q.flatten(1), "layer", eps)
        self.l = self.first.out.view(q.shape).transpose(0, 1)
        self.scores = problem.option("scale_in") * (self.l @ self.k.transpose(1, 2))
        self.p = self._each_head(activations.act)
        o = (self.p @ self.v + self.l).transpose(0, 1)
        self.second = Norm(o.flatten(1), "rms", eps)

    def _each_head(self, fn: Callable[[str, Tensor], Tensor]) -> Tensor:
        names = activations.per_head(self.problem.option("activation"), self.scores.shape[0])
        return self.problem.option("scale_out") * torch.stack([fn(n, self.scores[h]) for h, n in enumerate(names)])

    def backward(self, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        d = dout.to(self.dtype)
        do = self.second.backward(d.flatten(1))[0].view(self.shape).transpose(0, 1)
        dscores = self.problem.option("scale_in") * self._each_head(activations.act_grad) * (do @ self.v.transpose(1, 2))
        dl = dscores @ self.k + do
        dq = self.first.backward(dl.transpose(0, 1).flatten(1))[0].view(self.shape) + d
        return dq, (dscores.transpose(1, 2) @ self.l).transpose(0, 1), (self.p.transpose(1, 2) @ do).transpose(0, 1)


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor) -> tuple[Tensor, Saved]:
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    mean, rstd, out_rstd = (torch.zeros(q.shape[0], dtype=compute_dtype(q.dtype), device=q.device) for _ in range(3))
    for rows, keys in _samples(q_offsets, k_offsets):
        s = _Sample(problem, q[rows], k[keys], v[keys])
        out[rows] = (s.second.out.view(s.shape) + q[rows].to(s.dtype)).to(q.dtype)
        assert s.first.mean is not None  # a layer norm has one
        mean[rows], rstd[rows], out_rstd[rows] = s.first.mean, s.first.rstd, s.second.rstd
    return out, (q, k, v, q_offsets, k_offsets, out, mean, rstd, out_rstd)


def backward(problem: Problem, saved: Saved, dout: Tensor, needs: tuple[bool, ...]) -> Saved:
    q, k, v, q_offsets, k_offsets, *_ = saved
    grads = [torch.zeros(t.shape, dtype=compute_dtype(t.dtype), device=t.device) for t in (q, k, v)]
    for rows, keys in _samples(q_offsets, k_offsets):
        found = _Sample(problem, q[rows], k[keys], v[keys]).backward(dout[rows])
        for grad, part, where in zip(grads, found, (rows, keys, keys)):
            grad[where] = part
    return tuple(g.to(t.dtype) if need else None for g, t, need in zip(grads, (q, k, v), needs))


def _check(named: Named, sizes: Sizes, spec: Spec) -> None:
    rows = named["q"].shape[0], named["k"].shape[0]

    def values() -> None:
        check = checks.Values(OP, named["q"].device)
        for side, n, size in zip("qk", rows, sizes.values()):
            check.offsets(f"{side}_offsets", named[f"{side}_offsets"], n, None if size < 0 else size, f"max_{side}_len")

    remembered((named["q_offsets"], named["k_offsets"]), (OP, rows, *sizes.values()), values)


def _fake(named: Named, sizes: Sizes, spec: Spec) -> list[Tensor]:
    q = named["q"]
    stats = [q.new_empty(q.shape[0], dtype=compute_dtype(q.dtype)) for _ in range(3)]
    return [q.new_empty(q.shape), *stats]


def _flops(named: Named, sizes: Sizes, spec: Spec, needs: Sequence[bool] | None) -> int:
    q_lengths, k_lengths, _, _ = attention.sample_lengths(named, sizes)
    _, heads, d = named["q"].shape
    return attention.attention_flops(int((q_lengths * k_lengths).sum()), heads, d, d, backward=needs is not None)


library.define(
    OpDefinition(
        NORM_GDPA,
        dims=lambda n: (("H", n["q"].shape[1]), ("D", n["q"].shape[2])),
        fake=_fake,
        flops=_flops,
        bounds=attention.bounds,
        check=_check,
        sizes=("max_q_len", "max_k_len"),
    )
)
