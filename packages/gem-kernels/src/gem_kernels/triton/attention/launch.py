"""From a problem and its tensors to kernel launches."""

from __future__ import annotations

import torch
from torch import Tensor

from gem_core.ops.contract import Problem
from gem_kernels.triton.attention import candidates
from gem_kernels.triton.attention.forward import attention_fwd_kernel
from gem_kernels.triton.attention.inputs import Inputs, bias_strides, choose_and_run, descriptors, grid_size, row_strides
from gem_kernels.triton.attention.plan import plan
from gem_kernels.triton.attention.tiles import tma_fits
from gem_kernels.triton.common.configs import Config
from gem_kernels.triton.common.launch import launch

Saved = tuple[Tensor | None, ...]


def forward(problem: Problem, *tensors: Tensor | None) -> tuple[Tensor, Tensor | None, Inputs]:
    """Output ``[rows, H, Dv]`` and, for softmax, lse ``[H, rows]``."""
    p = plan(problem)
    x = Inputs(p, tensors)
    out = torch.empty(x.out_rows, p.heads, p.dv, dtype=x.q.dtype, device=x.device)
    lse = torch.empty(p.heads, x.out_rows, dtype=torch.float32, device=x.device) if p.softmax else None
    if x.out_rows == 0:
        return out, lse, x
    if x.batch == 0:
        return out.zero_(), None if lse is None else lse.fill_(float("-inf")), x
    choose_and_run(x, "attention.forward", candidates.forward, lambda c: _forward(x, out, lse, c))
    return out, lse, x


def _forward(x: Inputs, out: Tensor, lse: Tensor | None, config: Config) -> None:
    p, meta = x.plan, dict(config)
    tma = meta.pop("TMA") and all(tma_fits(t) for t in (x.q, x.k, x.v))
    m, n, persistent = meta["BLOCK_M"], meta["BLOCK_N"], meta.pop("PERSISTENT")
    tiles = x.q_tiles(m)
    q, k, v = descriptors(tma, (x.q, m), (x.k, n), (x.v, n))
    launch(
        attention_fwd_kernel, (grid_size(tiles.bound, p.heads, persistent, x.info.sms),), x.device,
        q, k, v, out, lse, *x.sample_args(), *x.bias_args(), tiles.tiles, tiles.count,
        *row_strides(x.q, x.k, x.v, out, x.target_k, x.target_v), *bias_strides(x),
        x.batch, x.q_len, x.out_rows, p.left, p.right, x.radius, x.edges, p.scale, p.out_scale * p.folded_gain,
        **p.constants(x.info.nvidia), TIME_STEPS=x.time_steps, SUBTRACT=False, POSITIVE=p.scale > 0, TMA=tma, **meta,
    )  # fmt: skip
