"""Launching the kernels of the jagged ops. Values move as integers of their size, so every dtype of up to 8 bytes does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gem_core.ops.contract import YES, Problem, Supported, no
from gem_kernels.triton.common.configs import Config, choose
from gem_kernels.triton.common.device import device_info, runs_on
from gem_kernels.triton.common.launch import launch

_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SUMMED = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32)

Result = tuple[Any, tuple[()]]


def supports(problem: Problem) -> Supported:
    where = runs_on(problem.device)
    if not where:
        return where
    dtype = problem.dtype("values")
    if problem.op in ("jagged_sum", "jagged_mean"):
        return YES if dtype in _SUMMED else no(f"adds up {', '.join(str(d).removeprefix('torch.') for d in _SUMMED)}, got {dtype}")
    return YES if dtype.itemsize in _CARRIERS else no(f"values of up to 8 bytes, got {dtype}")


def concat(problem: Problem, *tensors: Tensor) -> Result:
    """One scatter a part, none for a part without rows."""
    n = problem.dim("parts")
    parts, offsets = tensors[:n], tensors[n:]
    rows = [p.shape[0] for p in parts]
    out = torch.empty((sum(rows), *parts[0].shape[1:]), dtype=parts[0].dtype, device=parts[0].device)
    # slack rows of all parts become the last rows of the whole, as zeros
    slack = torch.zeros((), dtype=torch.int64, device=out.device)
    for part, own, base in zip(parts, offsets, _bases(offsets)):
        base[-1] += slack
        slack = slack + (part.shape[0] - own[-1])
        _move(problem, part.contiguous(), out, own, base, part.shape[0], gather=False)
    return out, ()


def split(problem: Problem, values: Tensor, *offsets: Tensor, rows: tuple[int, ...]) -> Result:
    """One gather a part."""
    whole = values.contiguous()
    outs = [torch.empty((n, *values.shape[1:]), dtype=values.dtype, device=values.device) for n in rows]
    for out, own, base in zip(outs, offsets, _bases(offsets)):
        _move(problem, out, whole, own, base, out.shape[0], gather=True)
    return outs, ()


def expand(problem: Problem, values: Tensor, offsets: Tensor, *, rows: int) -> Result:
    out = torch.empty((rows, *values.shape[1:]), dtype=values.dtype, device=values.device)
    base = torch.arange(offsets.numel(), device=values.device)
    _move(problem, out, values.contiguous(), offsets, base, rows, gather=True, advance=False)
    return out, ()


def from_padded(problem: Problem, padded: Tensor, offsets: Tensor, *, rows: int) -> Result:
    out = torch.empty((rows, *padded.shape[2:]), dtype=padded.dtype, device=padded.device)
    base = torch.arange(offsets.numel(), device=padded.device) * padded.shape[1]
    _move(problem, out, padded.contiguous(), offsets, base, rows, gather=True)
    return out, ()


def to_padded(problem: Problem, values: Tensor, offsets: Tensor, *, max_len: int) -> Result:
    from gem_kernels.triton.jagged.kernels import to_padded_kernel

    batch = offsets.numel() - 1
    out = torch.empty((batch, max_len, *values.shape[1:]), dtype=values.dtype, device=values.device)
    width = problem.dim("width")
    if out.numel() == 0:
        return out, ()
    fill = torch.full((), problem.option("fill", 0.0), device=values.device).to(values.dtype)
    carried = _carried(values.contiguous()), _carried(out), offsets, _carried(fill)

    def run(config: Config) -> None:
        grid = (-(-batch * max_len // config["ROWS"]),)
        launch(to_padded_kernel, grid, values.device, *carried, batch * max_len, max_len, WIDTH=width, **config)

    _tuned(problem, "jagged.to_padded", values.device, values.dtype, run)
    return out, ()


def reduce(problem: Problem, values: Tensor, offsets: Tensor) -> Result:
    """jagged_sum and jagged_mean: one program a sample and column tile, always in the same order."""
    batch, width = offsets.numel() - 1, problem.dim("width")
    out = torch.empty((batch, *values.shape[1:]), dtype=values.dtype, device=values.device)
    rows = values.contiguous()

    def run(config: Config) -> None:
        import triton.language as tl

        from gem_kernels.triton.jagged.kernels import reduce_rows_kernel

        kind = {torch.float64: tl.float64, torch.int64: tl.int64, torch.int32: tl.int32}.get(values.dtype, tl.float32)
        grid = (batch, -(-width // config["COLUMNS"]))
        launch(
            reduce_rows_kernel, grid, values.device, rows, out, offsets, WIDTH=width, MEAN=problem.op == "jagged_mean", TYPE=kind, **config
        )

    if out.numel():
        _tuned(problem, "jagged.reduce", values.device, values.dtype, run, rows=-(-rows.shape[0] // batch))
    return out, ()


def _bases(offsets: tuple[Tensor, ...]) -> list[Tensor]:
    """For every part, the row of the whole at which its rows of each sample begin, int64 [B+1]."""
    bounds = [o.to(torch.int64) for o in offsets]
    base = torch.stack(bounds).sum(0)
    found = []
    for own in bounds:
        found.append(base.clone())
        base[:-1] += own.diff()
    return found


def _move(problem: Problem, packed: Tensor, other: Tensor, offsets: Tensor, base: Tensor, rows: int, *, gather: bool,
          advance: bool = True) -> None:  # fmt: skip
    from gem_kernels.triton.jagged.kernels import move_rows_kernel

    batch, width = offsets.numel() - 1, problem.dim("width")
    if rows == 0 or width == 0:
        return
    carried = _carried(packed), _carried(other), offsets, base

    def run(config: Config) -> None:
        grid = (-(-rows // config["ROWS"]),)
        launch(
            move_rows_kernel, grid, packed.device, *carried, rows, batch, batch.bit_length(),
            WIDTH=width, GATHER=gather, ADVANCE=advance, **config,
        )  # fmt: skip

    _tuned(problem, "jagged.move", packed.device, packed.dtype, run)


def _tuned(problem: Problem, kernel: str, device: torch.device, dtype: torch.dtype, run: Any, rows: int | None = None) -> None:
    """``rows``: of a sample on average, where a program takes one sample."""
    info, width = device_info(device), problem.dim("width")
    facts: tuple[tuple[str, Any], ...] = (("bytes", dtype.itemsize), ("width", 1 << (width - 1).bit_length()))
    most = 1024 if rows is None else 2 << max(0, rows - 1).bit_length()
    if rows is not None:
        facts = (*facts, ("rows", min(most, 64)))
    run(choose(kernel, facts, info, lambda: _candidates(width, dtype.itemsize, most), run))


def _candidates(width: int, size: int, most: int) -> list[Config]:
    """16 bytes a thread and access; about 8 KiB a program, or ``most`` rows: what samples of one or two rows leave idle costs more than
    programs do (table gradients on an H200: 2.1 ms for 250,000 samples of one row by programs of 16)."""
    columns = min(1 << (width - 1).bit_length(), 1024)
    found: list[Config] = []
    for per in (8192, 16384, 4096):
        rows = min(max(1, per // (columns * size)), most)
        config = {"ROWS": rows, "COLUMNS": columns, "num_warps": max(1, min(4, rows * columns * size // 2048))}
        if config not in found:
            found.append(config)
    return found


def _carried(t: Tensor) -> Tensor:
    return t.view(_CARRIERS[t.dtype.itemsize])
