"""Reference of `jagged_attention` and `gdpa`: one dense computation a sample, in float64 for float64 inputs and in float32 otherwise.

The oracle that every other implementation is held to. Written to be read beside the formulas::

    S = scale · Q Kᵀ + bias                      S = scale_in · Q Kᵀ + bias
    P = out_scale · softmax over visible keys    P = scale_out · act(S), 0 where not visible
    O = P V                                      O = P V
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gem_core.ops import activations, masks
from gem_core.ops.contract import YES, Problem, Supported, no
from gem_core.ops.contracts import GDPA

Saved = tuple[Any, ...]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What the references compute in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def supports(problem: Problem) -> Supported:
    if problem.precision is not None:
        return no("the reference has no low-precision arithmetic")
    return YES


@dataclass(frozen=True)
class Sample:
    """Rows of one sample: ``q`` of Q, ``out`` of the result, ``k`` of K and V (the history under sharing), ``own`` of target_kv."""

    q: slice
    out: slice
    k: slice
    own: slice
    lq: int
    lk: int
    t: int
    c: int | None

    @property
    def shared(self) -> bool:
        return self.own.stop > self.own.start


class Inputs:
    """The tensors of a call, by name, and its samples. Implementations in other arithmetic derive from it (`queries`, `keys`)."""

    def __init__(self, problem: Problem, tensors: Saved) -> None:
        self.problem = problem
        self.t: dict[str, Any] = dict(zip(GDPA.tensors, tensors))
        self.dtype = compute_dtype(self.t["q"].dtype)
        self.groups = problem.dim("H") // problem.dim("Hkv")

    def samples(self) -> Iterator[Sample]:
        t = self.t
        k_bounds = t["k_offsets"].tolist()
        request = range(len(k_bounds) - 1) if t["kv_index"] is None else t["kv_index"].tolist()
        targets = None if t["num_targets"] is None else t["num_targets"].tolist()
        context = None if t["context_len"] is None else t["context_len"].tolist()
        rows = t["q"].shape[0]
        bounds = None if t["q_offsets"] is None else t["q_offsets"].tolist()
        for b, r in enumerate(request):
            k = slice(k_bounds[r], k_bounds[r + 1])
            if bounds is None:
                yield Sample(slice(0, rows), slice(b * rows, (b + 1) * rows), k, slice(0, 0), rows, k.stop - k.start, 0, None)
                continue
            q = slice(bounds[b], bounds[b + 1])
            n = 0 if targets is None else targets[b]
            own = slice(q.stop - n, q.stop) if t["target_k"] is not None else slice(0, 0)
            lk = k.stop - k.start + (own.stop - own.start)
            yield Sample(q, q, k, own, q.stop - q.start, lk, n, None if context is None else context[b])

    def queries(self, s: Sample) -> Tensor:
        """``[H, Lq, D]``"""
        return self.t["q"][s.q].to(self.dtype).transpose(0, 1)

    def keys(self, s: Sample, name: str) -> Tensor:
        """``[H, Lk, D]`` of "k" or "v": the sample's or its request's rows, then its own candidates' under sharing."""
        rows = self.t[name][s.k]
        if s.shared:
            rows = torch.cat([rows, self.t[f"target_{name}"][s.own]])
        return rows.to(self.dtype).transpose(0, 1).repeat_interleave(self.groups, dim=0)

    def visible(self, s: Sample) -> Tensor:
        causal, window = self.problem.option("causal", False), self.problem.option("window")
        return masks.visible(s.lq, s.lk, t=s.t, c=s.c, causal=causal, window=window, device=self.t["q"].device)

    def bias_rows(self, s: Sample) -> tuple[Tensor, Tensor | None]:
        """``[Lq, Lk]`` columns of the position table and of the time table."""
        radius = (self.t["bias_position"].shape[1] - 1) // 2
        p, k = masks.positions(s.lq, s.lk, s.t, self.t["q"].device)
        by_position = (k[None, :] - p[:, None]).clamp(-radius, radius) + radius
        if self.t["bias_time"] is None:
            return by_position, None
        q_times, k_times = self.t["bias_q_times"][s.q], self.t["bias_k_times"][s.k]
        if s.shared:
            k_times = torch.cat([k_times, self.t["bias_q_times"][s.own]])
        gap = (q_times[:, None] - k_times[None, :]).abs()
        return by_position, torch.bucketize(gap, self.t["bias_time_edges"], right=True)

    def scores(self, s: Sample, scale: float) -> Tensor:
        """``[H, Lq, Lk]``: scaled product plus bias."""
        scores = scale * (self.queries(s) @ self.keys(s, "k").transpose(1, 2))
        if self.t["bias_position"] is not None:
            by_position, by_time = self.bias_rows(s)
            scores = scores + self.t["bias_position"].to(self.dtype)[:, by_position]
            if by_time is not None:
                scores = scores + self.t["bias_time"].to(self.dtype)[:, by_time]
        return scores

    def out_rows(self) -> int:
        q = self.t["q"]
        return q.shape[0] if self.t["q_offsets"] is not None else q.shape[0] * self.batch

    @property
    def batch(self) -> int:
        index, offsets = self.t["kv_index"], self.t["k_offsets"]
        return offsets.numel() - 1 if index is None else index.numel()


class Gradients:
    """Accumulators of the gradients in the compute dtype, shaped like the inputs."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        present = {n: inputs.t[n] for n in GDPA.differentiable if inputs.t[n] is not None}
        self.grad = {n: torch.zeros(x.shape, dtype=inputs.dtype, device=x.device) for n, x in present.items()}

    def add(self, s: Sample, dscores: Tensor, dv: Tensor, scale: float) -> None:
        """``dscores [H, Lq, Lk]`` is the gradient of the biased score, ``dv [H, Lk, Dv]`` that of the sample's values."""
        inputs = self.inputs
        q = inputs.queries(s)
        self.grad["q"][s.q] += (scale * (dscores @ inputs.keys(s, "k"))).transpose(0, 1)
        self._add_keys(s, "k", scale * (dscores.transpose(1, 2) @ q))
        self._add_keys(s, "v", dv)
        if "bias_position" in self.grad:
            by_position, by_time = inputs.bias_rows(s)
            self.grad["bias_position"].index_add_(1, by_position.flatten(), dscores.flatten(1))
            if by_time is not None:
                self.grad["bias_time"].index_add_(1, by_time.flatten(), dscores.flatten(1))

    def _add_keys(self, s: Sample, name: str, grad: Tensor) -> None:
        """``grad [H, Lk, D]``; heads of one group share a key."""
        rows = grad.unflatten(0, (-1, self.inputs.groups)).sum(1).transpose(0, 1)
        length = s.k.stop - s.k.start
        self.grad[name][s.k] += rows[:length]
        if s.shared:
            self.grad[f"target_{name}"][s.own] += rows[length:]

    def result(self, needs: tuple[bool, ...]) -> Saved:
        t = self.inputs.t
        return tuple(self.grad[n].to(t[n].dtype) if need and n in self.grad else None for n, need in zip(GDPA.differentiable, needs))


def softmax(scores: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities ``[H, Lq, Lk]`` and log-sum-exp ``[H, Lq]``; a row that sees no key has 0 and −inf."""
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(scores, dim=2)
    return torch.where(visible, torch.exp(scores - lse[:, :, None]), 0.0), lse


def jagged_attention_forward(problem: Problem, *tensors: Tensor | None) -> tuple[tuple[Tensor, Tensor], Saved]:
    inputs = Inputs(problem, tensors)
    q, v = inputs.t["q"], inputs.t["v"]
    out = q.new_zeros(inputs.out_rows(), q.shape[1], v.shape[2])
    lse = torch.full((q.shape[1], out.shape[0]), -torch.inf, dtype=inputs.dtype, device=q.device)
    for s in inputs.samples():
        probabilities, sample_lse = softmax(inputs.scores(s, problem.option("scale")), inputs.visible(s))
        out[s.out] = (problem.option("out_scale") * (probabilities @ inputs.keys(s, "v"))).transpose(0, 1).to(q.dtype)
        lse[:, s.out] = sample_lse
    return (out, lse), (*tensors, out, lse)


def jagged_attention_backward(problem: Problem, saved: Saved, dout: Tensor, needs: tuple[bool, ...]) -> Saved:
    inputs = Inputs(problem, saved[: len(GDPA.tensors)])
    gradients = Gradients(inputs)
    for s in inputs.samples():
        probabilities, _ = softmax(inputs.scores(s, problem.option("scale")), inputs.visible(s))
        d = problem.option("out_scale") * dout[s.out].to(inputs.dtype).transpose(0, 1)
        dp = d @ inputs.keys(s, "v").transpose(1, 2)
        dscores = probabilities * (dp - (probabilities * dp).sum(2, keepdim=True))
        gradients.add(s, dscores, probabilities.transpose(1, 2) @ d, problem.option("scale"))
    return gradients.result(needs)


def gdpa_forward(problem: Problem, *tensors: Tensor | None) -> tuple[Tensor, Saved]:
    inputs = Inputs(problem, tensors)
    q, v = inputs.t["q"], inputs.t["v"]
    out = q.new_zeros(inputs.out_rows(), q.shape[1], v.shape[2])
    for s in inputs.samples():
        weights = pointwise(problem, inputs.scores(s, problem.option("scale_in")), activations.act, inputs.visible(s))
        out[s.out] = (weights @ inputs.keys(s, "v")).transpose(0, 1).to(q.dtype)
    return out, tensors


def gdpa_backward(problem: Problem, saved: Saved, dout: Tensor, needs: tuple[bool, ...]) -> Saved:
    inputs = Inputs(problem, saved)
    gradients = Gradients(inputs)
    for s in inputs.samples():
        scores, visible = inputs.scores(s, problem.option("scale_in")), inputs.visible(s)
        d = dout[s.out].to(inputs.dtype).transpose(0, 1)
        dv = pointwise(problem, scores, activations.act, visible).transpose(1, 2) @ d
        slope = pointwise(problem, scores, activations.act_grad, visible)
        gradients.add(s, slope * (d @ inputs.keys(s, "v").transpose(1, 2)), dv, problem.option("scale_in"))
    return gradients.result(needs)


def pointwise(problem: Problem, scores: Tensor, fn: Callable[[str, Tensor], Tensor], visible: Tensor) -> Tensor:
    """``scale_out · fn(scores)`` with each head's activation, 0 where not visible."""
    names = activations.per_head(problem.option("activation"), scores.shape[0])
    values = torch.stack([fn(name, scores[h]) for h, name in enumerate(names)])
    return torch.where(visible, problem.option("scale_out") * values, 0.0)
