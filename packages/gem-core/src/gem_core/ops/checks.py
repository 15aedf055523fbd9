"""Argument checks: shapes and dtypes in the public functions, values where the op runs.

Values on the CPU raise OpError; on CUDA they become device-side asserts, so that nothing waits for the device. A set of tensors whose
values were found good is not looked at again until one of them is written to (`remember.remembered`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gem_core.errors import OpError

INDEX_DTYPES = (torch.int32, torch.int64)
FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def require(ok: bool, op: str, where: str, what: str, *values: object, fix: str | None = None) -> None:
    """Raise OpError at argument ``where`` unless ``ok``; ``what`` is formatted with ``values`` only then."""
    if not ok:
        raise OpError(f"{op}: {what.format(*values)}", where=where, fix=fix)


def check_tensor(op: str, name: str, t: object, dims: int, shape: str) -> None:
    if not isinstance(t, Tensor):
        raise OpError(f"{op}: {name} must be a tensor {shape}, got {type(t).__name__}", where=name)
    if t.dim() != dims:
        raise OpError(f"{op}: {name} must have shape {shape}, got {tuple(t.shape)}", where=name)


def check_float(op: str, **tensors: Tensor | None) -> None:
    """All given tensors are floating and share one dtype and device."""
    first: tuple[str, Tensor] | None = None
    for name, t in tensors.items():
        if t is None:
            continue
        if t.dtype not in FLOAT_DTYPES:
            raise OpError(f"{op}: {name} has dtype {t.dtype}", where=name, fix="use float64, float32, bfloat16 or float16")
        if first is None:
            first = (name, t)
        elif t.dtype != first[1].dtype:
            raise OpError(f"{op}: {name} has dtype {t.dtype}, {first[0]} has {first[1].dtype}", where=name, fix="cast them to one dtype")
        elif t.device != first[1].device:
            raise OpError(f"{op}: {name} is on {t.device}, {first[0]} on {first[1].device}", where=name, fix="move them to one device")


def check_qkv(op: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """``q [Nq, H, D]``, ``k [Nk, Hkv, D]``, ``v [Nk, Hkv, Dv]``; H is a multiple of Hkv."""
    check_tensor(op, "q", q, 3, "[Nq, H, D]")
    check_tensor(op, "k", k, 3, "[Nk, Hkv, D]")
    check_tensor(op, "v", v, 3, "[Nk, Hkv, Dv]")
    require(q.shape[2] == k.shape[2], op, "k", "q has head width {}, k has {}", q.shape[2], k.shape[2])
    require(k.shape[0] == v.shape[0], op, "v", "k has {} rows, v has {}", k.shape[0], v.shape[0])
    require(k.shape[1] == v.shape[1], op, "v", "k has {} heads, v has {}", k.shape[1], v.shape[1])
    divides, fix = k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0, "the heads of q are a multiple of k's"
    require(divides, op, "k", "q has {} heads, k has {}", q.shape[1], k.shape[1], fix=fix)


def check_index(op: str, name: str, t: object, like: Tensor, shape: str) -> None:
    """``t`` is a 1-D int32 or int64 tensor on the device of ``like``."""
    check_tensor(op, name, t, 1, shape)
    assert isinstance(t, Tensor)
    if t.dtype not in INDEX_DTYPES:
        raise OpError(f"{op}: {name} has dtype {t.dtype}", where=name, fix="use int32 or int64")
    if t.device != like.device:
        raise OpError(f"{op}: {name} is on {t.device}, the values on {like.device}", where=name, fix="move them to one device")


def check_offsets_arg(op: str, name: str, t: object, like: Tensor) -> None:
    check_index(op, name, t, like, "[B+1]")
    assert isinstance(t, Tensor)
    require(t.shape[0] >= 1, op, name, "{} is empty", name, fix="offsets hold B+1 values: 0, then the running sum of the lengths")


class Values:
    """Collects conditions on tensor values, to be raised on the CPU and asserted on CUDA."""

    def __init__(self, op: str, device: torch.device) -> None:
        self.op, self.on_host = op, device.type == "cpu"

    def expect(self, ok: Tensor, say: Callable[[], tuple[str, str, str | None]]) -> None:
        """``ok`` is a bool tensor of any shape; ``say`` gives (what, where, fix) when one is false."""
        if self.on_host:
            if not bool(ok.all()):
                what, where, fix = say()
                raise OpError(f"{self.op}: {what}", where=where, fix=fix)
        else:
            torch._assert_async(ok.all(), f"{self.op}: a value of an index tensor is out of range; run on CPU for the full message")

    def offsets(self, name: str, offsets: Tensor, rows: int, bound: int | None, bound_name: str) -> Tensor:
        """Check B+1 offsets of ``rows`` rows and return the lengths ``[B]``."""
        lengths = offsets.diff()
        running = "offsets are the running sum of the sample lengths, starting with 0"
        self.expect(offsets[0] == 0, lambda: (f"{name} begins with {int(offsets[0])}", name, running))
        self.expect(lengths >= 0, lambda: (f"{name} decreases at sample {int((lengths < 0).int().argmax())}", name, running))
        self.expect(offsets[-1] <= rows, lambda: (f"{name} ends with {int(offsets[-1])}, but there are {rows} rows", name, running))
        if bound is not None and lengths.numel():
            self.expect(
                lengths <= bound,
                lambda: (
                    f"sample {int(lengths.argmax())} has {int(lengths.max())} rows, more than {bound_name} = {bound}",
                    bound_name,
                    "pass the true maximum length, a larger bound, or None",
                ),
            )
        return lengths
