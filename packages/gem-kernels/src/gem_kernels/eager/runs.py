"""Forward passes on a CPU over samples sorted by length: neighbours of equal lengths are one strided batch.

Nothing is gathered, padded or masked::

    lengths  3 3 3 3 5 5 9        three runs: [4, 3], [2, 5], [1, 9]

Evaluation and prediction sort their samples for this. Where the lengths change too often for it to pay, or where a mask other than plain
causality is wanted, there are no runs, and the plan of padded groups serves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gem_kernels.eager.engine import Score, activate
from gem_kernels.eager.plan import Masking, Samples

ROWS_A_RUN = 48
"""Rows of queries and keys that a run must have on average: below, the calls of each run cost more than gathering does."""


@dataclass(frozen=True)
class Run:
    """``n`` samples of ``lq`` query rows from row ``q`` on and ``lk`` key rows from row ``k`` on."""

    n: int
    lq: int
    lk: int
    q: int
    k: int


def find(samples: Samples, masking: Masking, *, shared_q: bool, softmax: bool) -> list[Run] | None:
    """The runs of neighbouring samples of equal lengths, or None where `forward` cannot or should not be used.

    A single candidate at the end of a causal sample is what plain causality gives. Causality needs softmax: only its kernel has a mask.
    """
    lq, lk = samples.lq, samples.lk
    if masking.window is not None or samples.context is not None or samples.own_start is not None or not lk.size:
        return None
    if masking.causal and not (softmax and np.array_equal(lq, lk)):
        return None
    if samples.targets is not None and not (masking.causal and bool((samples.targets <= 1).all())):
        return None
    ends = np.flatnonzero((lq[1:] != lq[:-1]) | (lk[1:] != lk[:-1])) + 1
    begins = np.concatenate([[0], ends])
    if begins.size * ROWS_A_RUN > lq.sum() + lk.sum():
        return None
    counts = np.diff(np.append(begins, lk.size))
    q_start = np.zeros_like(lq) if shared_q else samples.q_start
    return [Run(*map(int, r)) for r in zip(counts, lq[begins], lk[begins], q_start[begins], samples.k_start[begins])]


def usable(q: Tensor, k: Tensor, v: Tensor, score: Score) -> bool:
    """Whether `forward` takes these tensors: plain heads of one width in single or double precision on a CPU."""
    plain = q.device.type == "cpu" and q.dtype in (torch.float32, torch.float64) and k.dtype == v.dtype == q.dtype
    return plain and score.bias is None and q.shape[1] == k.shape[1] and q.shape[2] == v.shape[2]


def forward(
    runs: list[Run], score: Score, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, shared_q: bool
) -> tuple[Tensor, Tensor | None]:
    """``[out rows, H, D]``, and with softmax the log-sum-exp ``[H, out rows]``. ``shared_q``: q is ``[lq, H, D]``, the same for all."""
    heads, width = q.shape[1:]
    rows = sum(r.n for r in runs) * q.shape[0] if shared_q else q.shape[0]
    out, end = q.new_empty(rows, heads, width), 0
    lse = None if score.activation is not None else q.new_empty(rows, heads)
    for run in runs:
        begin, end = end, end + run.n * run.lq
        if not run.lq or not run.lk:
            out[begin:end] = 0
            if lse is not None:
                lse[begin:end] = -torch.inf
            continue
        queries = q.unsqueeze(0).expand(run.n, -1, -1, -1) if shared_q else _split(q, run.q, run.n, run.lq)
        keys, values = _split(k, run.k, run.n, run.lk), _split(v, run.k, run.n, run.lk)
        place = out[begin:end].view(run.n, run.lq, heads, width)
        if score.activation is not None:
            _activated(score, queries, keys, values, place)
            continue
        turned = (x.transpose(1, 2) for x in (queries, keys, values))
        attended, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*turned, 0.0, causal, scale=score.scale)
        place.copy_(attended.transpose(1, 2))
        assert lse is not None
        lse[begin:end].view(run.n, run.lq, heads).copy_(sums.transpose(1, 2))
    out[end:] = 0
    if lse is not None:
        lse[end:] = -torch.inf
        lse = lse.t().contiguous()
    if score.out_scale != 1.0:
        out *= score.out_scale
    return out, lse


def _split(x: Tensor, start: int, n: int, length: int) -> Tensor:
    """``[n, length, H, D]``, a view."""
    return x[start : start + n * length].view(n, length, *x.shape[1:])


def _activated(score: Score, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """Heads side by side cost one batched product each, without a copy to lay them out."""
    assert score.activation is not None
    none = q.new_empty(1, 1, 1)
    for head in range(q.shape[2]):
        name = score.activation if isinstance(score.activation, str) else score.activation[head]
        scores = torch.baddbmm(none, q[:, :, head], k[:, :, head].transpose(1, 2), beta=0, alpha=score.scale)
        out[:, :, head] = torch.bmm(_gelu(scores) if name == "gelu" else activate(name, scores), v[:, :, head])


def _gelu(x: Tensor) -> Tensor:
    """Exact GELU, overwriting nothing. torch's own generates code anew for every shape on a CPU, which costs more than short runs do."""
    return torch.erf(x * 0.5**0.5).add_(1.0).mul_(x).mul_(0.5)
