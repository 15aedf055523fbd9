"""Launching the Hopper kernels of `norm_gdpa`: forward one that holds whole rows; backward passes around `gdpa`, which adds dQ to dO."""

from __future__ import annotations

import torch
from torch import Tensor

from gem_core.ops.contract import Problem
from gem_kernels.triton.attention.inputs import Inputs
from gem_kernels.triton.attention.plan import Plan, plan
from gem_kernels.triton.common import tune
from gem_kernels.triton.common.configs import choose
from gem_kernels.triton.common.launch import launch
from gem_kernels.triton.dense import norm_gdpa as portable
from gem_kernels.triton.dense.norm_gdpa import Gdpa, Saved, inner
from gem_kernels.triton.hopper import launch as attention

BLOCK_N = 128
WIDEST = 512
"""Columns of a row over all heads: 128 rows of them take 128 KB of shared memory."""
MOST_KEYS = 256
"""Every tile of rows reads its sample's keys and values."""
_RING = 96 << 10


def fits(p: Plan) -> bool:
    """Whether whole rows fit on the chip and the keys are few."""
    return p.d in (64, 128) and p.heads * p.d <= WIDEST and p.k_bound <= MOST_KEYS


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, gdpa: Gdpa) -> tuple[Tensor, Saved]:
    """See `gem_core.ops.norm_gdpa`: q is read from memory once, out is written once. No workspace."""
    p = plan(inner(problem))
    rows = q.shape[0]
    if not fits(p) or rows == 0 or k.shape[0] == 0 or q_offsets.numel() == 1:
        return portable.forward(problem, q, k, v, q_offsets, k_offsets, gdpa)
    from gem_kernels.triton.hopper.norm_gdpa_fwd import hopper_norm_gdpa_fwd_kernel

    x = Inputs(p, (q, k, v, q_offsets, k_offsets, *portable._ABSENT))
    attention._by_box(x)
    out = torch.empty(rows, p.heads, p.d, dtype=q.dtype, device=q.device)
    mean, rstd, out_rstd = stats = [torch.empty(rows, dtype=torch.float32, device=q.device) for _ in range(3)]
    tiles = x.q_tiles(128)
    constants = {n: c for n, c in attention._constants(x).items() if n not in ("GROUP", "SOFTMAX", "CAUSAL", "WINDOW")}
    launch(
        hopper_norm_gdpa_fwd_kernel, (min(x.info.sms, tiles.bound),), q.device,
        attention._box(x.q, 64), attention._box(x.k, BLOCK_N), attention._box(x.v, BLOCK_N), x.q, x.q if x.q.is_contiguous() else None,
        out, mean, rstd, out_rstd, attention._table(tiles, x.q_offsets, x.k_offsets, 0), tiles.count, x.q_offsets, x.act_ids, x.batch, rows,
        p.scale, attention._value_scale(p), problem.option("eps"), x.q.stride(0),
        H=p.heads, BLOCK_N=BLOCK_N, STAGES=_RING // (2 * BLOCK_N * p.d), **constants,
    )  # fmt: skip
    return out, (q, k, v, q_offsets, k_offsets, out, *stats)


def backward(problem: Problem, saved: Saved, dout: Tensor, needs: tuple[bool, ...], gdpa: Gdpa) -> Saved:
    """See `gem_kernels.triton.dense.norm_gdpa.backward`."""
    return portable.backward(problem, saved, dout, needs, gdpa, _adding)


def _adding(problem: Problem, tensors: Saved, do: Tensor) -> Saved | None:
    """dK and dV of `gdpa`, its dQ added to ``do`` in place, by the kernel for few keys, which reads dO once; None, and nothing is done,
    where another kernel is chosen."""
    p = plan(problem)
    x = Inputs(p, tensors)
    if not attention.fuses(p) or not attention.few(p) or attention._nothing(x) or tune.forced():
        return None
    name, facts = "hopper.backward", (*p.facts, ("only", False))
    config = choose(name, facts, x.info, lambda: attention.candidates(name, p, False), lambda _: None)
    if not config["GLUON"] or not config["FUSED"]:
        return None
    attention._by_box(x)
    return attention._few(x, do, do)[1:]
