"""Launching the Hopper kernel of `norm_gdpa`: o between the norms, without the normalised q in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from gem_core.ops.contract import Problem
from gem_kernels.triton.attention.inputs import Inputs
from gem_kernels.triton.attention.plan import plan
from gem_kernels.triton.common.launch import launch
from gem_kernels.triton.hopper import launch as attention

BLOCK_N, STAGES = 64, 3


def heads(problem: Problem, tensors: tuple[Tensor | None, ...], mean: Tensor, rstd: Tensor) -> Tensor:
    """gdpa(l, k, v) + l ``[rows, H, D]`` with l = (q − mean) · rstd; ``problem`` and ``tensors`` are those of `gdpa`, with q as it is."""
    from gem_kernels.triton.hopper.norm_gdpa_fwd import hopper_norm_gdpa_fwd_kernel

    p = plan(problem)
    x = Inputs(p, tensors)
    out = torch.empty(x.out_rows, p.heads, p.d, dtype=x.q.dtype, device=x.device)
    attention._by_box(x)
    tiles = x.q_tiles(attention._ROWS)
    constants = attention._constants(x)
    launch(
        hopper_norm_gdpa_fwd_kernel, (min(x.info.sms, tiles.bound * p.heads),), x.device,
        attention._box(x.q, 64), attention._box(x.k, BLOCK_N), attention._box(x.v, BLOCK_N), attention._box(out, 64), out, mean, rstd,
        attention._table(tiles, x.q_offsets, x.k_offsets, x.q_len), tiles.count, x.q_offsets, x.act_ids, x.batch, x.out_rows,
        p.scale, attention._value_scale(p), H=p.heads, BLOCK_N=BLOCK_N, STAGES=STAGES,
        **{n: constants[n] for n in ("D", "ACT", "ACT_SET", "FAST", "FOLDED", "num_warps", "maxnreg")},
    )  # fmt: skip
    return out
