"""Launching the `mlp` kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gem_core.ops.contract import Problem, Supported, no
from gem_kernels.triton.attention.activations import IDS, fast, gain
from gem_kernels.triton.common.configs import Config, choose
from gem_kernels.triton.common.device import DeviceInfo, device_info
from gem_kernels.triton.common.launch import launch
from gem_kernels.triton.dense import norm as plain
from gem_kernels.triton.dense.support import (
    HALF,
    NAMES,
    cast,
    common_support,
    descriptors_possible,
    power_of_two,
    precision,
    rows_contiguous,
    source,
    stride,
    unique,
    weight_grad,
)

WORKSPACE_BYTES = 1 << 30
"""Most that backward keeps of act(z) and dz at a time; more rows are done in turns."""

Saved = tuple[Tensor | None, ...]
Hidden = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
"""Another implementation of `_hidden`."""


def supports(problem: Problem) -> Supported:
    """Input and output rows of up to 512 elements (128 in fp32), which stay on the chip together with a hidden tile."""
    answer = common_support(problem, ("x", "w1", "w2"))
    if not answer:
        return answer
    widest = 512 if problem.dtype("x") in HALF else 128
    for name in ("in", "out"):
        if problem.dim(name) > widest:
            return no(f"{name} up to {widest} in {NAMES[problem.dtype('x')]}, got {problem.dim(name)}: a row block must stay on the chip")
    return answer


def facts(problem: Problem) -> tuple[tuple[str, Any], ...]:
    return (
        ("activation", problem.option("activation")),
        ("dtype", NAMES[problem.dtype("x")]),
        ("in", power_of_two(problem.dim("in"))),
        ("norm", problem.option("norm") or "none"),
        ("out", power_of_two(problem.dim("out"))),
    )


def candidates(problem: Problem, info: DeviceInfo, backward: bool) -> list[Config]:
    """Row blocks of 128 where input, accumulators and two stages of both weights' tiles fit in shared memory."""
    width = max(power_of_two(problem.dim("in")), power_of_two(problem.dim("out")))
    hidden = power_of_two(problem.dim("hidden"))
    if info.key == "interpreter":
        shapes = [(64, 32, 4, 1)]
    elif problem.dtype("x") not in HALF:
        shapes = [(32, 32, 4, 1)]
    elif not info.nvidia or info.key == "sm_80":
        shapes = [(64, 32, 4, 2), (64, 64, 4, 1)] if width <= 128 else [(32, 32, 4, 1)]
    elif backward:
        if width <= 128:
            shapes = [(64, 64, 4, 2), (128, 64, 8, 3), (128, 64, 8, 1, 128), (128, 32, 8, 2, 128), (64, 64, 4, 1), (64, 32, 4, 2)]
        elif width == 256:
            shapes = [(128, 64, 8, 1), (128, 32, 8, 2), (64, 64, 4, 1), (64, 32, 4, 1)]
        else:
            shapes = [(64, 32, 8, 1), (64, 16, 8, 2)]
    elif width <= 128:
        shapes = [(64, 64, 4, 2), (128, 64, 8, 2), (128, 32, 8, 3), (128, 128, 8, 2), (128, 64, 8, 3), (64, 32, 4, 3)]
    elif width == 256:
        shapes = [(128, 64, 8, 2), (128, 32, 8, 3), (64, 32, 4, 2)]
    else:
        shapes = [(64, 32, 8, 2), (64, 16, 8, 2)]
    found = [{"BLOCK_M": m, "BLOCK_H": min(h, hidden), "num_warps": w, "num_stages": s} for m, h, w, s, *_ in shapes]
    for config, shape in zip(found, shapes):
        if len(shape) == 5:
            config["maxnreg"] = shape[4]
    return unique(found)


def forward(problem: Problem, x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None,
            residual: Tensor | None) -> tuple[Any, Saved]:  # fmt: skip
    """See `gem_core.ops.mlp`: reads x once, writes y once; the weights come from the cache."""
    rows, width = x.shape
    norm, layer = problem.option("norm") is not None, problem.option("norm") == "layer"
    hidden, out = w2.shape[1], w2.shape[0]
    y = torch.empty((rows, out), dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.empty((rows, width), dtype=x.dtype, device=x.device)
    mean, rstd = (torch.empty(n, dtype=torch.float32, device=x.device) for n in (rows if layer else 0, rows if norm else 0))
    x_rows, added, up, down = rows_contiguous(x), rows_contiguous(residual), w1.contiguous(), w2.contiguous()
    info = device_info(x.device)
    tma = descriptors_possible(info, up, down)
    act = IDS[problem.option("activation")]

    def run(config: Config) -> None:
        from gem_kernels.triton.dense.mlp_kernels import mlp_fwd_kernel

        h, in_pad, out_pad = config["BLOCK_H"], power_of_two(width), power_of_two(out)
        launch(
            mlp_fwd_kernel, (-(-rows // config["BLOCK_M"]),), x.device,
            x_rows, added, source(up, h, in_pad, tma), b1, source(down, out_pad, h, tma), b2, up.float().sum(1) if layer else None,
            y, total, mean, rstd, stride(x_rows), stride(added), rows, problem.option("eps"), gain(act),
            IN=width, IN_PAD=in_pad, HIDDEN=hidden, OUT=out, OUT_PAD=out_pad, ACT=act, FAST=fast(info.nvidia, x.dtype),
            NORM=norm, LAYER=layer, BIAS1=b1 is not None, BIAS2=b2 is not None, RESIDUAL=residual is not None, TMA=tma,
            PRECISION=precision(x.dtype, info), **config,
        )  # fmt: skip

    if rows:
        run(choose("mlp.forward", facts(problem), info, lambda: candidates(problem, info, backward=False), run))
    return (y, total), (x if total is None else total, w1, b1, w2, b2, mean, rstd)


def backward(
    problem: Problem, saved: Saved, dout: tuple[Tensor | None, ...], needs: tuple[bool, ...], hidden_layer: Hidden | None = None
) -> Saved:
    """One kernel computes the hidden layer again and leaves act(z) and dz; the three products behind it are best left to the vendor's
    library.

    Workspace: act(z) and dz of as many rows as fit in 1 GiB, x̂ and its gradient under a norm, and column sums of dz and dy by row block.
    """
    x, w1, b1, w2, b2, mean, rstd = saved
    dy, dtotal = (rows_contiguous(t) for t in dout)
    inputs = (x, w1, b1, w2, b2)
    if dy is None:
        return cast(needs, inputs, (dtotal.clone(), *(None if t is None else torch.zeros_like(t) for t in inputs[1:])))
    x = rows_contiguous(x)
    rows, size = x.shape[0], w1.shape[0]
    norm, layer = problem.option("norm") is not None, problem.option("norm") == "layer"
    dx: list[Tensor] = []
    dw1 = db1 = dw2 = db2 = None
    turn = max(128, WORKSPACE_BYTES // (2 * x.element_size() * size) // 128 * 128)
    for begin in range(0, max(rows, 1), turn):
        part = slice(begin, min(begin + turn, rows))
        stats = tuple(t if t is None or t.numel() == 0 else t[part] for t in (mean, rstd))
        rows_x, rows_dy, given = x[part], dy[part], None if dtotal is None else dtotal[part]
        hidden, dhidden, sums1, sums2 = (hidden_layer or _hidden)(problem, rows_x, w1, b1, w2, rows_dy, *stats, needs[2], needs[4])
        if norm:
            normed = torch.empty(rows_x.shape, dtype=x.dtype, device=x.device)
            dx.append(plain.norm_grads(rows_x, None, dhidden @ w1, given, *stats, False, False, layer, xhat=normed)[0])
        else:
            normed = rows_x
            dx.append(dhidden @ w1 if given is None else torch.addmm(given, dhidden, w1))
        dw1 = weight_grad(dhidden, normed, dw1) if needs[1] else None
        dw2 = weight_grad(rows_dy, hidden, dw2) if needs[3] else None
        db1 = sums1 if db1 is None else db1.add_(sums1)
        db2 = sums2 if db2 is None else db2.add_(sums2)
    return cast(needs, inputs, (dx[0] if len(dx) == 1 else torch.cat(dx), dw1, db1, dw2, db2))


def _hidden(
    problem: Problem, x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, dy: Tensor, mean: Tensor | None, rstd: Tensor | None,
    want_db1: bool, want_db2: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """act(z) and dz of these rows, and the column sums of dz and dy (no columns where they are not wanted)."""
    rows, width = x.shape
    norm, layer = problem.option("norm") is not None, problem.option("norm") == "layer"
    size, out = w1.shape[0], w2.shape[0]
    hidden, dhidden = (torch.empty((rows, size), dtype=x.dtype, device=x.device) for _ in range(2))
    columns = size if want_db1 else 0, out if want_db2 else 0
    sums = [torch.empty((0, c), dtype=torch.float32, device=x.device) for c in columns]
    up, down = w1.contiguous(), w2.contiguous()
    info = device_info(x.device)
    tma = descriptors_possible(info, up, down, hidden)
    act = IDS[problem.option("activation")]

    def run(config: Config) -> None:
        from gem_kernels.triton.dense.mlp_kernels import mlp_bwd_kernel

        m, h, in_pad, out_pad = config["BLOCK_M"], config["BLOCK_H"], power_of_two(width), power_of_two(out)
        blocks = -(-rows // m)
        sums[:] = [torch.empty((blocks, c), dtype=torch.float32, device=x.device) for c in columns]
        launch(
            mlp_bwd_kernel, (blocks,), x.device,
            x, dy, source(up, h, in_pad, tma), b1, source(down, out_pad, h, tma), up.float().sum(1) if layer else None,
            mean, rstd, source(hidden, m, h, tma), source(dhidden, m, h, tma), *(s if s.numel() else None for s in sums),
            stride(x), stride(dy), rows, gain(act),
            IN=width, IN_PAD=in_pad, HIDDEN=size, OUT=out, OUT_PAD=out_pad, ACT=act, FAST=fast(info.nvidia, x.dtype),
            NORM=norm, LAYER=layer, BIAS1=b1 is not None, TMA=tma, PRECISION=precision(x.dtype, info), **config,
        )  # fmt: skip

    if rows:
        run(choose("mlp.backward", facts(problem), info, lambda: candidates(problem, info, backward=True), run))
    return hidden, dhidden, sums[0].sum(0), sums[1].sum(0)
