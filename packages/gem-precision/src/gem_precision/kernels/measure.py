"""`gem_precision.site.measure` in two launches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gem_precision.formats import element
from gem_precision.formats.mx import MX
from gem_precision.kernels import interpreting, launch, usable

PROGRAMS = 512
WINDOWS = 16


def measures(x: Tensor, quantised: Any) -> bool:
    """Whether the kernels measure this: CUDA matrices with a side that lies dense, of 8-bit elements in blocks that windows hold whole."""
    return usable(x) and fits(x, quantised)


def fits(x: Tensor, quantised: Any) -> bool:
    """`measures` but for the device."""
    if x.dim() != 2 or 1 not in x.stride():
        return False
    if quantised is None:
        return True
    scales = quantised.scales
    dense = scales.is_contiguous() or scales.t().is_contiguous()
    return quantised.elem in ("e4m3", "e5m2") and 0 not in quantised.block and dense


def measure_on_device(x: Tensor, quantised: Any, window: tuple[int, int, int, int]) -> Tensor:
    """``[12]`` fp64, see `gem_precision.site.SUMS`. ``x [rows, K]``; ``window``: first and last row and column, at most 128 x 2048."""
    from gem_precision.kernels.measure_kernels import FOUND, add_up_kernel, measure_kernel

    programs = WINDOWS if interpreting() else PROGRAMS
    found = torch.zeros(programs, FOUND.value, dtype=torch.float32, device=x.device)
    sums = torch.empty(12, dtype=torch.float64, device=x.device)
    flat = x if x.stride(1) == 1 else x.t()
    rows, cols = (1, flat.numel()) if flat.is_contiguous() else flat.shape
    data = scales = x
    meta: dict[str, Any] = {
        "QUANTISED": quantised is not None,
        "MX": False,
        "E5M2": False,
        "BR": 32,
        "BC": 128,
        "LARGEST": 0.0,
        "EDGE": 0.0,
    }
    if quantised is not None:
        elem = element(quantised.elem)
        data, scales = quantised.data.view(torch.uint8), quantised.scales
        meta |= {
            "MX": isinstance(quantised, MX), "E5M2": quantised.elem == "e5m2", "BR": quantised.block[0], "BC": quantised.block[1],
            "LARGEST": elem.largest, "EDGE": 1 + 2.0 ** (elem.emax - elem.mbits - 1) / elem.largest,
        }  # fmt: skip
    launch(
        measure_kernel, programs, x.device, x, data, scales, found, rows, cols, flat.stride(0), scales.numel(), *x.stride(), *data.stride(),
        *scales.stride(), *window, CHUNK=4096, num_warps=8, **meta,
    )  # fmt: skip
    launch(add_up_kernel, 1, x.device, found, sums, programs, WINDOWS=WINDOWS, MANY=PROGRAMS)
    return sums
