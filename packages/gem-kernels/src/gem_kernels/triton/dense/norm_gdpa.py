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
from gem_kernels.triton.dense.norm import supports_width
from gem_kernels.triton.dense.support import HALF, NAMES, common_support, power_of_two, precision, rows_contiguous, unique

ROW_ELEMENTS = 4096
"""What a program of a pass over rows works on."""
RESIDENT_KEYS = 128
"""So many keys and values of a head stay on the chip while a program walks over rows."""
Saved = tuple[Tensor | None, ...]


def supports(problem: Problem) -> Supported:
    """Head dims up to 256 (128 in fp32); rows of up to 16,384 elements over all heads."""
    widest = 256 if problem.dtype("q") in HALF else 128
    if problem.dim("D") > widest:
        return no(f"head dims up to {widest} in this dtype, got {problem.dim('D')}")
    answer = supports_width(problem.dim("H") * problem.dim("D"))
    return common_support(problem, ("q", "k", "v")) if answer else answer


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
    """Tiles of BLOCK_M query rows by BLOCK_N keys; of the kernels over heads, SPAN rows a program."""
    d = power_of_two(problem.dim("D"))
    if info.key == "interpreter":
        shapes = [(64, 64, 4, 1)]
    elif problem.dtype("q") not in HALF:
        shapes = [(32, 32, 4, 1)]
    elif not info.nvidia or info.key == "sm_80" or d > 128:
        shapes = [(64, 32, 8, 1), (32, 32, 4, 1)]
    elif kernel == "dkdv":
        shapes = [(64, 128, 8, 3), (32, 64, 4, 2), (64, 128, 8, 2), (64, 64, 4, 2)]
    else:
        shapes = [(64, 128, 4, 2), (64, 128, 4, 1), (128, 128, 8, 2), (64, 64, 4, 2), (64, 64, 4, 1), (64, 128, 8, 2)]
    keys = max(16, min(problem.option("max_k_len", 128), 128))
    found = unique([{"BLOCK_M": m, "BLOCK_N": min(n, keys), "num_warps": w, "num_stages": s} for m, n, w, s in shapes])
    if kernel == "dkdv":
        return found
    longest = problem.option("max_k_len", 1 << 16)
    spans = [128] if info.key == "interpreter" else [1024, 256]
    resident = [-(-longest // c["BLOCK_N"]) if longest <= RESIDENT_KEYS else 0 for c in found]
    return [{**c, "RESIDENT": tiles, "SPAN": max(span, c["BLOCK_M"])} for span in spans for c, tiles in zip(found, resident)]


def _row_config(problem: Problem) -> Config:
    """Of the passes over rows. Not measured: two of them work in place, so they must not be repeated."""
    width = power_of_two(problem.dim("H") * problem.dim("D"))
    rows = max(1, ROW_ELEMENTS // width)
    return {"ROWS": rows, "num_warps": min(16, max(4, rows * width // 1024))}


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor) -> tuple[Tensor, Saved]:
    """See `gem_core.ops.norm_gdpa`."""
    heads = problem.dim("H")
    rows, batch = q.shape[0], q_offsets.numel() - 1
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    mean, rstd, out_rstd = stats = [torch.empty(rows, dtype=torch.float32, device=q.device) for _ in range(3)]
    tensors = [rows_contiguous(t) for t in (q, k, v)]
    info, eps, wide = device_info(q.device), problem.option("eps"), _wide(problem)

    def run_stats(config: Config) -> None:
        from gem_kernels.triton.dense.norm_gdpa_fwd import norm_gdpa_stats_kernel

        args = (tensors[0], mean, rstd, q_offsets, batch, rows, eps, *_strides(tensors[0]))
        launch(norm_gdpa_stats_kernel, _row_grid(rows, config), q.device, *args, **wide, **config)

    def run_heads(config: Config) -> None:
        from gem_kernels.triton.dense.norm_gdpa_fwd import norm_gdpa_fwd_kernel

        launch(
            norm_gdpa_fwd_kernel, ((rows // config["SPAN"] + batch + 1) * heads,), q.device,
            *tensors, out, mean, rstd, q_offsets, k_offsets, _act_ids(problem, q.device), batch, rows,
            problem.option("scale_in"), _gain(problem), *_strides(*tensors), **_constants(problem, info), **config,
        )  # fmt: skip

    def run_out(config: Config) -> None:
        from gem_kernels.triton.dense.norm_gdpa_fwd import norm_gdpa_out_kernel

        args = (tensors[0], out, out_rstd, q_offsets, batch, rows, eps, *_strides(tensors[0]))
        launch(norm_gdpa_out_kernel, _row_grid(rows, config), q.device, *args, **wide, **config)

    if rows:
        known = facts(problem)
        run_stats(_row_config(problem))
        run_heads(choose("norm_gdpa.forward", known, info, lambda: candidates(problem, info, "forward"), run_heads))
        run_out(_row_config(problem))
    return out, (q, k, v, q_offsets, k_offsets, out, *stats)


def backward(problem: Problem, saved: Saved, dout: Tensor, needs: tuple[bool, ...]) -> Saved:
    """Workspace: the gradient of o, as large as q."""
    q, k, v, q_offsets, k_offsets, out, mean, rstd, out_rstd = saved
    heads = problem.dim("H")
    rows, batch = q.shape[0], q_offsets.numel() - 1
    tensors = [rows_contiguous(t) for t in (q, k, v)]
    grad = rows_contiguous(dout)
    dq, do, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, q, k, v))
    info, wide = device_info(q.device), _wide(problem)
    scalars = problem.option("scale_in"), _gain(problem)

    def run_do(config: Config) -> None:
        from gem_kernels.triton.dense.norm_gdpa_bwd import norm_gdpa_bwd_do_kernel

        args = (tensors[0], out, grad, out_rstd, do, q_offsets, batch, rows, *_strides(tensors[0], grad))
        launch(norm_gdpa_bwd_do_kernel, _row_grid(rows, config), q.device, *args, **wide, **config)

    def run_dl(config: Config) -> None:
        from gem_kernels.triton.dense.norm_gdpa_bwd import norm_gdpa_bwd_dl_kernel

        launch(
            norm_gdpa_bwd_dl_kernel, ((rows // config["SPAN"] + batch + 1) * heads,), q.device,
            *tensors, do, mean, rstd, dq, q_offsets, k_offsets, _act_ids(problem, q.device), batch, rows, *scalars,
            *_strides(*tensors), **_constants(problem, info), **config,
        )  # fmt: skip

    def run_dq(config: Config) -> None:
        from gem_kernels.triton.dense.norm_gdpa_bwd import norm_gdpa_bwd_dq_kernel

        args = (tensors[0], grad, mean, rstd, dq, q_offsets, batch, rows, *_strides(tensors[0], grad))
        launch(norm_gdpa_bwd_dq_kernel, _row_grid(rows, config), q.device, *args, **wide, **config)

    def run_dkdv(config: Config) -> None:
        from gem_kernels.triton.dense.norm_gdpa_bwd import norm_gdpa_bwd_dkdv_kernel

        launch(
            norm_gdpa_bwd_dkdv_kernel, ((k.shape[0] // config["BLOCK_N"] + batch + 1) * heads,), q.device,
            *tensors, do, mean, rstd, dk, dv, q_offsets, k_offsets, _act_ids(problem, q.device), batch, k.shape[0], *scalars,
            *_strides(*tensors), **_constants(problem, info), **config,
        )  # fmt: skip

    known = facts(problem)
    if rows:
        run_do(_row_config(problem))
    if rows and needs[0]:
        run_dl(choose("norm_gdpa.dl", known, info, lambda: candidates(problem, info, "dl"), run_dl))
        run_dq(_row_config(problem))
    if k.shape[0] and (needs[1] or needs[2]):
        run_dkdv(choose("norm_gdpa.dkdv", known, info, lambda: candidates(problem, info, "dkdv"), run_dkdv))
    return tuple(g if need else None for g, need in zip((dq, dk, dv), needs))


def _row_grid(rows: int, config: Config) -> tuple[int]:
    return (-(-rows // config["ROWS"]),)


def _wide(problem: Problem) -> dict[str, int]:
    heads, d = problem.dim("H"), problem.dim("D")
    return {"H": heads, "D": d, "COLUMNS": power_of_two(heads * d)}


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
