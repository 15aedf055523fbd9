"""Triton kernels, bit-equal to the PyTorch codec. Importing this package imports no triton."""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

import torch

_installed: bool | None = None


def triton_installed() -> bool:
    """Whether triton can be imported. Once asked, the answer is a constant for compiled graphs."""
    global _installed
    if _installed is None:
        _installed = importlib.util.find_spec("triton") is not None
    return _installed


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter (``TRITON_INTERPRET=1`` when triton was imported)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


@functools.lru_cache(maxsize=16)
def lays_out_by_hand(device: torch.device) -> bool:
    """Whether the kernels in Gluon, Triton's dialect of explicit layouts, can be had for ``device``: it is in Triton from 3.6 on, and
    conversions to FP8 are instructions from sm_89 on."""
    if device.type != "cuda" or interpreting() or not triton_installed():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9) and importlib.util.find_spec("triton.experimental.gluon") is not None


@functools.lru_cache(maxsize=16)
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def usable(x: torch.Tensor) -> bool:
    """Whether the quantise kernels take this tensor: a CUDA matrix of a dtype they load, and triton is there."""
    return x.is_cuda and x.dim() == 2 and x.dtype in (torch.float32, torch.bfloat16, torch.float16) and triton_installed()


def launch(kernel: Any, programs: int, device: torch.device, *args: Any, **meta: Any) -> None:
    """Run ``kernel`` with a one-dimensional grid on ``device``; nothing where the grid is empty."""
    if programs == 0:
        return
    if device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
        with torch.cuda.device(device):
            kernel[(programs,)](*args, **meta)
    else:
        kernel[(programs,)](*args, **meta)
