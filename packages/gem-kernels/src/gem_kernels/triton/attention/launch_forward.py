"""From a problem and its tensors to the launch of a forward kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from gem_core.ops.contract import YES, Problem, Supported, no
from gem_kernels.triton.attention import candidates
from gem_kernels.triton.attention.forward import attention_fwd_kernel
from gem_kernels.triton.attention.forward_resident import attention_fwd_resident_kernel
from gem_kernels.triton.attention.inputs import Inputs, bias_strides, choose_and_run, descriptors, grid_size, row_strides
from gem_kernels.triton.attention.plan import Plan, plan
from gem_kernels.triton.attention.rows import OWN_PARTS, OWN_ROWS, attention_fwd_own_kernel
from gem_kernels.triton.attention.tiles import tma_fits
from gem_kernels.triton.common.configs import Config
from gem_kernels.triton.common.launch import launch


def subtraction_supports(p: Plan) -> Supported:
    """Whether surplus keys may be subtracted instead of masked."""
    if not p.softmax:
        return no("subtraction masking is for softmax; an activation with f(0) = 0 needs no mask at the end")
    if p.mask != "full" or p.targets or p.bias:
        return no("subtraction masking needs full attention without candidates or bias")
    return YES


def forward(problem: Problem, tensors: tuple[Tensor | None, ...], subtract: bool = False) -> tuple[Tensor, Tensor | None]:
    """Output ``[rows, H, Dv]`` and, for softmax, lse ``[H, rows]`` (else None)."""
    p = plan(problem)
    x = Inputs(p, tensors)
    out = torch.empty(x.out_rows, p.heads, p.dv, dtype=x.q.dtype, device=x.device)
    lse = torch.empty(p.heads, x.out_rows, dtype=torch.float32, device=x.device) if p.softmax else None
    if x.out_rows == 0:
        return out, lse
    if x.batch == 0:
        return out.zero_(), None if lse is None else lse.fill_(float("-inf"))
    if subtract:
        choose_and_run(x, "attention.forward_subtract", candidates.forward, lambda c: _stream(x, out, lse, c, subtract=True))
    else:
        fill(x, out, lse)
    return out, lse


def fill(x: Inputs, out: Tensor, lse: Tensor | None) -> None:
    """Compute ``out`` and ``lse`` with the kernel and configuration for the call."""
    choose_and_run(x, "attention.forward", candidates.forward, lambda c: run_forward(x, out, lse, c))


def run_forward(x: Inputs, out: Tensor, lse: Tensor | None, config: Config) -> None:
    """Launch the kernel that ``config`` asks for: with RESIDENT key tiles held on chip, or (0) streaming."""
    if config["RESIDENT"]:
        _resident(x, out, lse, config)
    else:
        _stream(x, out, lse, config, subtract=False)


def _stream(x: Inputs, out: Tensor, lse: Tensor | None, config: Config, *, subtract: bool) -> None:
    p, meta = x.plan, dict(config)
    del meta["RESIDENT"], meta["CHUNK"]
    tma = meta.pop("TMA") and all(tma_fits(t) for t in (x.q, x.k, x.v))
    m, n, persistent = meta["BLOCK_M"], meta["BLOCK_N"], meta.pop("PERSISTENT")
    tiles = x.q_tiles(m)
    q, k, v = descriptors(tma, (x.q, m), (x.k, n), (x.v, n))
    own = _own_scores(x) if p.targets else None
    launch(
        attention_fwd_kernel, (grid_size(tiles.bound, p.heads, persistent, x.info.sms),), x.device,
        q, k, v, out, lse, *x.sample_args(own, x.target_v), *x.bias_args(), x.act_ids, tiles.tiles, tiles.count,
        *row_strides(x.q, x.k, x.v, out, x.target_v), *bias_strides(x),
        x.batch, x.q_len, x.out_rows, p.left, p.right, x.radius, x.edges, p.scale, p.out_scale * p.folded_gain,
        **p.constants(x.info.nvidia), TIME_STEPS=x.time_steps, SUBTRACT=subtract, POSITIVE=p.scale > 0, TMA=tma, **meta,
    )  # fmt: skip


def _own_scores(x: Inputs) -> Tensor:
    """``[H, rows]`` fp32: every candidate's score with its own key; other rows are not set."""
    p = x.plan
    own = torch.empty(p.heads, x.out_rows, dtype=torch.float32, device=x.device)
    launch(
        attention_fwd_own_kernel, (x.batch * p.heads * OWN_PARTS,), x.device,
        x.q, own, x.q_offsets, x.k_offsets, x.num_targets, x.target_k, x.kv_index, *x.own_bias_args(),
        *row_strides(x.q, x.target_k), *bias_strides(x), x.out_rows, x.radius, x.edges, p.scale,
        H=p.heads, GROUP=p.group, D=p.d, D_PAD=p.d_pad, TIME_STEPS=x.time_steps, BLOCK_M=OWN_ROWS, PARTS=OWN_PARTS, num_warps=4,
    )  # fmt: skip
    return own


def _resident(x: Inputs, out: Tensor, lse: Tensor | None, config: Config) -> None:
    p, meta = x.plan, dict(config)
    meta["TILES"] = meta.pop("RESIDENT")
    tma = meta.pop("TMA") and all(tma_fits(t) for t in (x.q, x.k, x.v))
    m, persistent = meta["BLOCK_M"], meta.pop("PERSISTENT")
    meta["BLOCK_N"] = n = max(meta["BLOCK_N"], p.k_bound // meta["TILES"])
    tiles = x.q_tiles(m * meta["CHUNK"])
    q, k, v = descriptors(tma, (x.q, m), (x.k, n), (x.v, n))
    launch(
        attention_fwd_resident_kernel, (grid_size(tiles.bound, p.heads, persistent, x.info.sms),), x.device,
        q, k, v, out, lse, x.q_offsets, x.k_offsets, x.kv_index, x.act_ids, tiles.tiles, tiles.count,
        *row_strides(x.q, x.k, x.v, out), x.batch, x.q_len, x.out_rows, p.scale, p.out_scale * p.folded_gain,
        **p.constants(x.info.nvidia, "CAUSAL", "WINDOW"), TMA=tma, **meta,
    )  # fmt: skip
