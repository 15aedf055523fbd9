"""`norm_gdpa` on Hopper: the portable passes around `gdpa`, which may take q and its statistics in place of l, and adds dQ to dO."""

from __future__ import annotations

import torch
from torch import Tensor

from gem_core.ops import row_sums
from gem_core.ops.contract import Problem
from gem_kernels.triton.attention.inputs import Inputs
from gem_kernels.triton.attention.plan import plan
from gem_kernels.triton.common import tune
from gem_kernels.triton.common.configs import choose
from gem_kernels.triton.common.launch import launch
from gem_kernels.triton.dense import norm_gdpa as portable
from gem_kernels.triton.dense.norm_gdpa import Gdpa, Saved
from gem_kernels.triton.dense.support import power_of_two
from gem_kernels.triton.hopper import launch as attention

_MANY = 512
"""Rows of a program that reads sums over them."""


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, gdpa: Gdpa) -> tuple[Tensor, Saved]:
    """See `gem_kernels.triton.dense.norm_gdpa.forward`."""
    return portable.forward(problem, q, k, v, q_offsets, k_offsets, gdpa, _from_q)


def _from_q(problem: Problem, tensors: Saved, mean: Tensor, rstd: Tensor, eps: float) -> Tensor | None:
    """`gdpa` of the normalised q, and its statistics; None, and nothing is done, where another kernel serves. Workspace: 4 bytes a key and
    head."""
    from gem_kernels.triton.dense.norm_gdpa_kernels import norm_gdpa_stats_kernel
    from gem_kernels.triton.hopper.norm_gdpa_fwd import hopper_norm_gdpa_fwd_kernel

    p = plan(problem)
    x = Inputs(p, tensors)
    if not attention.few(p) or attention._nothing(x):
        return None
    attention._by_box(x)
    rows, keys, batch = x.q.shape[0], x.k.shape[0], x.q_offsets.numel() - 1
    sums = torch.empty((p.heads, keys), dtype=torch.float32, device=x.device)
    width = power_of_two(p.heads * p.d)
    each = max(1, 4096 // width)
    of_keys = -(-keys // each)
    strides = [t.stride(i) for t in (x.q, x.k) for i in (0, 1)]
    of_rows = row_sums.found(tensors[0])
    launch(
        norm_gdpa_stats_kernel, (of_keys + -(-rows // (each if of_rows is None else _MANY)),), x.device,
        x.q, of_rows, x.k, mean, rstd, sums, x.q_offsets, batch, rows, keys, of_keys, eps, *strides,
        H=p.heads, D=p.d, COLUMNS=width, ROWS=each, PARTS=0 if of_rows is None else of_rows.shape[1], MANY=_MANY, num_warps=4,
    )  # fmt: skip
    out = torch.empty(x.q.shape, dtype=x.q.dtype, device=x.device)
    tiles = x.q_tiles(attention._ROWS, True)
    constants = {name: value for name, value in attention._constants(x).items() if name not in ("CAUSAL", "WINDOW", "GROUP", "SOFTMAX")}
    launch(
        hopper_norm_gdpa_fwd_kernel, (min(x.info.sms, tiles.bound * p.heads),), x.device,
        attention._box(x.q, 64), attention._box(x.k, 64), attention._box(x.v, 64), attention._box(out, 64), mean, rstd, sums,
        tiles.table, tiles.count, x.act_ids, keys, p.scale, attention._value_scale(p),
        H=p.heads, BLOCK_N=64, STAGES=3, **constants,
    )  # fmt: skip
    return out


def backward(problem: Problem, saved: Saved, dout: Tensor, needs: tuple[bool, ...], gdpa: Gdpa) -> Saved:
    """See `gem_kernels.triton.dense.norm_gdpa.backward`."""
    return portable.backward(problem, saved, dout, needs, gdpa, _adding)


def _adding(problem: Problem, tensors: Saved, do: Tensor) -> Saved | None:
    """dK and dV of `gdpa`, its dQ added to ``do`` in place, by the kernel for few keys, which reads dO once; None, and nothing is done,
    where another kernel is chosen."""
    p = plan(problem)
    x = Inputs(p, tensors)
    if not attention.few(p) or attention._nothing(x) or tune.forced():
        return None
    name, facts = "hopper.backward", (*p.facts, ("only", False))
    config = choose(name, facts, x.info, lambda: attention.candidates(name, p, False), lambda _: None)
    if not config["GLUON"] or not config["FUSED"]:
        return None
    attention._by_box(x)
    return attention._few(x, do, do)[1:]
