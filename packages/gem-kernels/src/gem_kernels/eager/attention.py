"""Eager `jagged_attention`, `gdpa` and `block_attention`: plans for the tensors of a call, then the engine.

The lengths are read on the host, once for given offsets; on CUDA that is a device sync.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gem_core.ops.block import rotate
from gem_core.ops.contract import YES, Problem, Supported, no
from gem_core.ops.contracts import BLOCK_ATTENTION, GDPA
from gem_core.ops.remember import remembered
from gem_kernels.eager import engine, runs
from gem_kernels.eager.engine import Bias, Score
from gem_kernels.eager.plan import Masking, Plan, Samples, Shape, host_lengths, make_plan

Saved = tuple[Tensor | None, ...]


def supports(problem: Problem) -> Supported:
    if problem.precision is not None:
        return no("no low-precision arithmetic")
    if problem.device == "cuda" and problem.deterministic:
        return no("sums of shared rows are not deterministic on CUDA")
    return YES


class Call:
    """The tensors of a jagged_attention or gdpa call by name, its plan and its score."""

    def __init__(self, problem: Problem, tensors: Saved) -> None:
        t: dict[str, Any] = dict(zip(GDPA.tensors, tensors))
        self.problem, self.t = problem, t
        self.q, self.k, self.v = t["q"], t["k"], t["v"]
        self.k_rows = self.k.shape[0]
        if t["target_k"] is not None:
            self.k, self.v = torch.cat([self.k, t["target_k"]]), torch.cat([self.v, t["target_v"]])

    def plan(self) -> Plan:
        p = self.problem
        shape, masking = Shape(p.dim("H"), p.dim("Hkv")), self._masking()
        by_shift = self.t["bias_position"] is not None
        rows = self.q.shape[0], self.k.shape[0]
        return remembered(self._layout(), (shape, masking, by_shift, rows), lambda: self._make(shape, masking, by_shift))

    def forward(self, score: Score, want_lse: bool) -> tuple[Tensor, Tensor | None]:
        """By runs of equal lengths where there are such, else by the plan."""
        masking, shared_q = self._masking(), self.t["q_offsets"] is None
        if runs.usable(self.q, self.k, self.v, score) and self.t["kv_index"] is None:
            key = "runs", masking, self.q.shape[0] if shared_q else None, score.activation is None
            found = remembered(
                self._layout(), key, lambda: runs.find(self._samples(), masking, shared_q=shared_q, softmax=score.activation is None)
            )
            if found is not None:
                return runs.forward(found, score, self.q, self.k, self.v, causal=masking.causal, shared_q=shared_q)
        return engine.forward(self.plan(), score, self.q, self.k, self.v, want_lse=want_lse)

    def _masking(self) -> Masking:
        return Masking(self.problem.option("causal", False), self.problem.option("window"))

    def _layout(self) -> list[Tensor | None]:
        return [self.t[n] for n in ("k_offsets", "q_offsets", "num_targets", "context_len", "kv_index")]

    def _make(self, shape: Shape, masking: Masking, by_shift: bool) -> Plan:
        samples = self._samples()
        shared_q = self.t["q_offsets"] is None
        return make_plan(
            samples,
            shape,
            masking,
            out_rows=self.q.shape[0] * len(samples.lq) if shared_q else self.q.shape[0],
            key_rows=self.k.shape[0],
            shared_keys=self.t["kv_index"] is not None,
            shared_q=shared_q,
            device=self.q.device,
            by_shift=by_shift,
        )

    def _samples(self) -> Samples:
        t = self.t
        k_start, lk = host_lengths(t["k_offsets"])
        if t["kv_index"] is not None:
            request = _host(t["kv_index"])
            k_start, lk = k_start[request], lk[request]
        if t["q_offsets"] is None:
            lq = np.full_like(lk, self.q.shape[0])
            return Samples(np.zeros_like(lk), np.arange(len(lk)) * self.q.shape[0], k_start, lq, lk)
        q_start, lq = host_lengths(t["q_offsets"])
        targets = None if t["num_targets"] is None else _host(t["num_targets"])
        own_start = None
        if t["target_k"] is not None:
            lk = lk + targets
            own_start = self.k_rows + q_start + lq - targets
        context = None if t["context_len"] is None else _host(t["context_len"])
        return Samples(q_start, q_start, k_start, lq, lk, targets, context, own_start)

    def score(self) -> Score:
        p, t = self.problem, self.t
        bias = None
        if t["bias_position"] is not None:
            k_times = t["bias_k_times"]
            if k_times is not None and t["target_k"] is not None:
                k_times = torch.cat([k_times, t["bias_q_times"]])
            bias = Bias(t["bias_position"], t["bias_time"], t["bias_time_edges"], t["bias_q_times"], k_times)
        if p.op == "gdpa":
            return Score(p.option("scale_in"), p.option("scale_out"), p.option("activation"), bias)
        return Score(p.option("scale"), p.option("out_scale"), None, bias)

    def gradients(self, dout: Tensor, needs: tuple[bool, ...]) -> Saved:
        dq, dk, dv, position, time = engine.backward(self.plan(), self.score(), self.q, self.k, self.v, dout)
        n = self.k_rows
        own_k, own_v = (None, None) if self.t["target_k"] is None else (dk[n:], dv[n:])
        found = (dq, dk[:n], dv[:n], own_k, own_v, position, time)
        names = GDPA.differentiable
        return tuple(g.to(self.t[m].dtype) if need and g is not None else None for g, m, need in zip(found, names, needs))


def jagged_attention_forward(problem: Problem, *tensors: Tensor | None) -> tuple[tuple[Tensor, Tensor | None], Saved]:
    call = Call(problem, tensors)
    out, lse = call.forward(call.score(), want_lse=True)
    return (out, lse), (*tensors, out, lse)


def gdpa_forward(problem: Problem, *tensors: Tensor | None) -> tuple[Tensor, Saved]:
    call = Call(problem, tensors)
    return call.forward(call.score(), want_lse=False)[0], tensors


def backward(problem: Problem, saved: Saved, dout: Tensor, needs: tuple[bool, ...]) -> Saved:
    return Call(problem, saved[: len(GDPA.tensors)]).gradients(dout, needs)


class BlockCall:
    """A block_attention call: every block is a sample of its own, q, k and v rotated beforehand."""

    def __init__(self, problem: Problem, tensors: Saved) -> None:
        t: dict[str, Any] = dict(zip(BLOCK_ATTENTION.tensors, tensors))
        self.problem, self.t = problem, t
        self.dtype = torch.float64 if t["q"].dtype == torch.float64 else torch.float32
        self.angles = None
        if t["rotary_cos"] is not None:
            rows = self._table_rows()
            self.angles = t["rotary_cos"].to(self.dtype)[rows], t["rotary_sin"].to(self.dtype)[rows]

    def _table_rows(self) -> Tensor:
        """Rows of the rotary tables ``[N]``; slack rows, whose angles do not matter, have 0."""
        t, n = self.t, self.t["q"].shape[0]
        at = torch.arange(n, device=t["q"].device)
        offsets = t["offsets"].long()
        if t["rotary_rows"] is not None:
            return torch.where(at < offsets[-1], t["rotary_rows"].long(), 0)
        sample = torch.bucketize(at, offsets, right=True) - 1
        return torch.where(at < offsets[-1], at - offsets[sample], 0)

    def rotated(self, x: Tensor, back: bool = False) -> Tensor:
        if self.angles is None:
            return x
        cos, sin = self.angles
        return rotate(x.to(self.dtype), cos, -sin if back else sin)

    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.rotated(self.t["q"]), self.rotated(self.t["k"]), self.rotated(self.t["v"])

    def plan(self) -> Plan:
        p, rows = self.problem, self.t["q"].shape[0]
        shape, size = Shape(p.dim("H"), p.dim("Hkv")), p.option("block_size")
        return remembered([self.t["offsets"]], ("block", shape, size, rows), lambda: self._make(shape, size, rows))

    def _make(self, shape: Shape, size: int, rows: int) -> Plan:
        begin, lengths = host_lengths(self.t["offsets"])
        count = -(-lengths // size)
        sample = np.repeat(np.arange(len(lengths)), count)
        number = np.arange(len(sample)) - np.repeat(count.cumsum() - count, count)
        start = begin[sample] + number * size
        length = np.minimum(size, lengths[sample] - number * size)
        return make_plan(
            Samples(start, start, start, length, length.copy()),
            shape,
            Masking(),
            out_rows=rows,
            key_rows=rows,
            shared_keys=False,
            shared_q=False,
            device=self.t["q"].device,
        )

    def score(self) -> Score:
        return Score(self.problem.option("scale"), 1.0)


def block_forward(problem: Problem, *tensors: Tensor | None) -> tuple[Tensor, Saved]:
    call = BlockCall(problem, tensors)
    out, _ = engine.forward(call.plan(), call.score(), *call.qkv(), want_lse=False)
    return out.to(call.t["q"].dtype), tensors


def block_backward(problem: Problem, saved: Saved, dout: Tensor, needs: tuple[bool, ...]) -> Saved:
    call = BlockCall(problem, saved)
    grads = engine.backward(call.plan(), call.score(), *call.qkv(), dout)[:3]
    return tuple(call.rotated(g, back=True).to(call.t[n].dtype) if need else None for g, n, need in zip(grads, "qkv", needs))


def _host(t: Tensor) -> np.ndarray:
    return t.cpu().numpy().astype(np.int64)
