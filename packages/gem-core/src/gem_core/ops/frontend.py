"""What every public op function does between its arguments and the custom op. Traced by torch.compile, hence plain code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gem_core.ops import checks, dispatch, library
from gem_core.ops.contract import OpPrecision
from gem_core.ops.contracts import contracts

CONTRACTS = contracts()
Options = Sequence[tuple[str, Any]]


def finish(op: str, tensors: Sequence[Tensor | None], options: Options, backend: str | None, precision: OpPrecision | None = None) -> str:
    """The ``spec`` argument: options, which optional tensors are there, gradients wanted, and the implementation asked for."""
    contract = CONTRACTS[op]
    present = [n for n, t in zip(contract.tensors, tensors) if t is not None and n in contract.optional]
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    choice = dispatch.policy().backend(op) if backend is None else backend
    return library.encode(options, present, needs_grad, choice, library.encode_precision(precision))


def bound(op: str, name: str, value: int | None) -> int:
    """−1 for None."""
    if value is None:
        return -1
    checks.require(value >= 0, op, name, "{} is {}", name, value, fix="pass the longest sample's length, or None")
    return value


def check_window(op: str, window: int | tuple[int, int] | None) -> tuple[int, int]:
    """(left, right), −1 for unbounded."""
    if window is None:
        return -1, -1
    left, right = (window, window) if isinstance(window, int) else window
    checks.require(left >= -1 and right >= -1, op, "window", "window is {}", window, fix="sides are >= 0, or -1 for unbounded")
    return int(left), int(right)


def autocast(*tensors: Any) -> tuple[Any, ...]:
    """Under autocast, float32 tensors in the autocast dtype: what torch does for its own linear and matmul."""
    device = next((t.device.type for t in tensors if isinstance(t, Tensor)), "cpu")
    if device == "meta" or not torch.is_autocast_enabled(device):  # torch refuses the question for meta
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if isinstance(t, Tensor) and t.dtype == torch.float32 else t for t in tensors)


def host_values(t: Tensor) -> Tensor | None:
    """``t`` on the CPU, or None for a tensor without values (fake, meta): what FLOP formulas read lengths from."""
    from torch._subclasses.fake_tensor import FakeTensor

    return None if t.is_meta or isinstance(t, FakeTensor) else t.cpu()
