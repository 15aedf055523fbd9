"""Launching the `norm_gdpa` kernels."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from gem_core.ops.activations import per_head
from gem_core.ops.contract import Problem, Supported, no
from gem_kernels.triton.attention.activations import IDS, PER_HEAD, fast, gain
from gem_kernels.triton.common.configs import Config, choose
from gem_kernels.triton.common.device import DeviceInfo, device_info
from gem_kernels.triton.common.launch import launch
from gem_kernels.triton.dense.support import HALF, NAMES, common_support, power_of_two, precision, rows_contiguous

Saved = tuple[Tensor | None, ...]


def supports(problem: Problem) -> Supported:
    """Head dims up to 256 (128 in fp32); any number of heads."""
    widest = 256 if problem.dtype("q") in HALF else 128
    if problem.dim("D") > widest:
        return no(f"head dims up to {widest} in this dtype, got {problem.dim('D')}")
    return common_support(problem, ("q", "k", "v"))


def facts(problem: Problem) -> tuple[tuple[str, Any], ...]:
    activation = problem.option("activation")
    return (
        ("activation", activation if isinstance(activation, str) else "mixed"),
        ("d", power_of_two(problem.dim("D"))),
        ("dtype", NAMES[problem.dtype("q")]),
        ("h", problem.dim("H")),
        ("k", min(problem.option("max_k_len", 1 << 16), 1 << 16)),
        ("q", min(problem.option("max_q_len", 1 << 16), 1 << 16)),
    )


def candidates(problem: Problem, info: DeviceInfo, kernel: str) -> list[Config]:
    """Tiles of BLOCK_M query rows by BLOCK_N keys."""
    d = power_of_two(problem.dim("D"))
    if info.key == "interpreter":
        shapes = [(64, 64, 4, 1)]
    elif problem.dtype("q") not in HALF:
        shapes = [(32, 32, 4, 1)]
    elif not info.nvidia or info.key == "sm_80" or d > 128:
        shapes = [(64, 32, 8, 1), (32, 32, 4, 1)]
    elif kernel == "forward":
        shapes = [(64, 64, 4, 2), (64, 64, 8, 2, 128), (64, 128, 8, 2), (128, 64, 8, 2), (64, 64, 8, 2), (64, 64, 4, 2, 168)]
    elif kernel == "dq":
        shapes = [(64, 64, 8, 2), (64, 32, 8, 2, 128), (64, 64, 8, 2, 128), (64, 32, 8, 2), (64, 32, 4, 2, 168)]
    else:
        shapes = [(32, 128, 8, 2), (64, 128, 8, 2), (64, 64, 4, 2), (64, 128, 8, 3), (32, 64, 4, 2)]
    keys = max(16, min(problem.option("max_k_len", 128), 128))
    found = [{"BLOCK_M": m, "BLOCK_N": min(n, keys), "num_warps": w, "num_stages": s} for m, n, w, s, *_ in shapes]
    for config, (*_, cap) in zip(found, (s if len(s) == 5 else (0,) for s in shapes)):
        if cap:
            config["maxnreg"] = cap
    return found


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor) -> tuple[Tensor, Saved]:
    """See `gem_core.ops.norm_gdpa`: reads q, k, v, writes out; neither norm's result is in memory."""
    rows = q.shape[0]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    stats = [torch.empty(rows, dtype=torch.float32, device=q.device) for _ in range(3)]
    tensors = [rows_contiguous(t) for t in (q, k, v)]
    info = device_info(q.device)

    def run(config: Config) -> None:
        from gem_kernels.triton.dense.norm_gdpa_fwd import norm_gdpa_fwd_kernel

        batch = q_offsets.numel() - 1
        launch(
            norm_gdpa_fwd_kernel, (rows // config["BLOCK_M"] + batch + 1,), q.device,
            *tensors, out, *stats, q_offsets, k_offsets, _act_ids(problem, q.device), batch, rows,
            problem.option("scale_in"), _gain(problem), problem.option("eps"), *_strides(*tensors), **_constants(problem, info), **config,
        )  # fmt: skip

    if rows:
        run(choose("norm_gdpa.forward", facts(problem), info, lambda: candidates(problem, info, "forward"), run))
    return out, (q, k, v, q_offsets, k_offsets, out, *stats)


def backward(problem: Problem, saved: Saved, dout: Tensor, needs: tuple[bool, ...]) -> Saved:
    """Workspace: the gradient of o, as large as q."""
    q, k, v, q_offsets, k_offsets, out, mean, rstd, out_rstd = saved
    tensors = [rows_contiguous(t) for t in (q, k, v)]
    grad = rows_contiguous(dout)
    dq, do, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, q, k, v))
    info = device_info(q.device)
    batch = q_offsets.numel() - 1
    shared = (_act_ids(problem, q.device),)

    def run_dq(config: Config) -> None:
        from gem_kernels.triton.dense.norm_gdpa_bwd import norm_gdpa_bwd_dq_kernel

        launch(
            norm_gdpa_bwd_dq_kernel, (q.shape[0] // config["BLOCK_M"] + batch + 1,), q.device,
            *tensors, out, grad, mean, rstd, out_rstd, do, dq, q_offsets, k_offsets, *shared,
            batch, q.shape[0], problem.option("scale_in"), _gain(problem), *_strides(*tensors, grad), **_constants(problem, info), **config,
        )  # fmt: skip

    def run_dkdv(config: Config) -> None:
        from gem_kernels.triton.dense.norm_gdpa_bwd import norm_gdpa_bwd_dkdv_kernel

        slots = k.shape[0] // config["BLOCK_N"] + batch + 1
        launch(
            norm_gdpa_bwd_dkdv_kernel, (slots * problem.dim("H"),), q.device,
            *tensors, do, mean, rstd, dk, dv, q_offsets, k_offsets, *shared,
            batch, k.shape[0], problem.option("scale_in"), _gain(problem), *_strides(*tensors), **_constants(problem, info), **config,
        )  # fmt: skip

    if q.shape[0]:
        run_dq(choose("norm_gdpa.dq", facts(problem), info, lambda: candidates(problem, info, "dq"), run_dq))
    if k.shape[0] and (needs[1] or needs[2]):
        run_dkdv(choose("norm_gdpa.dkdv", facts(problem), info, lambda: candidates(problem, info, "dkdv"), run_dkdv))
    return tuple(g if need else None for g, need in zip((dq, dk, dv), needs))


def _strides(*tensors: Tensor) -> list[int]:
    return [t.stride(i) for t in tensors for i in (0, 1)]


def _names(problem: Problem) -> set[str]:
    return set(per_head(problem.option("activation"), problem.dim("H")))


def _gain(problem: Problem) -> float:
    names = _names(problem)
    return problem.option("scale_out") * (gain(IDS[names.pop()]) if len(names) == 1 else 1.0)


def _constants(problem: Problem, info: DeviceInfo) -> dict[str, Any]:
    names, dtype = _names(problem), problem.dtype("q")
    act = IDS[next(iter(names))] if len(names) == 1 else PER_HEAD
    return {
        "H": problem.dim("H"), "D": problem.dim("D"), "DP": power_of_two(problem.dim("D")),
        "ACT": act, "ACT_SET": sum(1 << IDS[n] for n in names) if act == PER_HEAD else 0,
        "FAST": fast(info.nvidia, dtype), "PRECISION": precision(dtype, info),
    }  # fmt: skip


def _act_ids(problem: Problem, device: torch.device) -> Tensor | None:
    names = per_head(problem.option("activation"), problem.dim("H"))
    return None if len(set(names)) == 1 else _ids_on(names, device)


@functools.lru_cache(maxsize=64)
def _ids_on(names: tuple[str, ...], device: torch.device) -> Tensor:
    return torch.tensor([IDS[n] for n in names], dtype=torch.int32, device=device)
