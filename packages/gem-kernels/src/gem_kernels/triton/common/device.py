"""Facts of the device a kernel is about to run on. Asking starts no CUDA context by itself: the tensors are on the device already."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from gem_core.errors import DeviceError
from gem_core.ops.contract import YES, Supported, no


@dataclass(frozen=True)
class DeviceInfo:
    """``key`` names the configuration table (``sm_90``, ``gfx942``, ``interpreter``), ``smem`` is the shared memory a program may use."""

    key: str
    name: str
    sms: int
    smem: int
    nvidia: bool

    @property
    def tma(self) -> bool:
        """Whether tensor descriptors are turned into bulk tensor copies."""
        return self.nvidia and int(self.key.removeprefix("sm_")) >= 90


INTERPRETER = DeviceInfo("interpreter", "Triton interpreter", 3, 1 << 20, False)
TARGETS = {
    "sm_80": DeviceInfo("sm_80", "A100", 108, 163 << 10, True),
    "sm_90": DeviceInfo("sm_90", "H100/H200", 132, 227 << 10, True),
    "sm_100": DeviceInfo("sm_100", "B200", 148, 227 << 10, True),
}
"""What can be compiled for without being there."""
_assumed: ContextVar[DeviceInfo | None] = ContextVar("gem_triton_assumed_device", default=None)


def interpreting() -> bool:
    """Whether kernels defined in this process run in Triton's interpreter (``TRITON_INTERPRET=1`` when triton was imported)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


@contextlib.contextmanager
def on_cpu(target: str = "interpreter") -> Iterator[DeviceInfo]:
    """For tests: let implementations accept CPU tensors, either to interpret them or, with an architecture's name, to compile only."""
    if target == "interpreter" and not interpreting():
        raise DeviceError(
            "kernels run on CPU tensors in Triton's interpreter only",
            where="gem_kernels.triton",
            fix="set TRITON_INTERPRET=1 before triton is imported",
        )
    if target == "interpreter":
        _mend_interpreter()
    info = INTERPRETER if target == "interpreter" else TARGETS[target]
    token = _assumed.set(info)
    try:
        yield info
    finally:
        _assumed.reset(token)


@functools.lru_cache(maxsize=1)
def _mend_interpreter() -> None:
    """Triton 3.6's interpreter takes int() of one-element arrays for loop bounds, which numpy 2.4 and later refuse."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


@functools.lru_cache(maxsize=64)
def _cuda_info(index: int) -> DeviceInfo:
    props = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return DeviceInfo(props.gcnArchName.split(":")[0], props.name, props.multi_processor_count, 64 << 10, False)
    smem = getattr(props, "shared_memory_per_block_optin", 99 << 10)
    return DeviceInfo(f"sm_{props.major}{props.minor}", props.name, props.multi_processor_count, smem, True)


def assumed() -> bool:
    """Whether the device is assumed by `on_cpu`: nothing can be measured."""
    return _assumed.get() is not None


def device_info(device: torch.device) -> DeviceInfo:
    """What ``device`` is; the assumed device inside `on_cpu`."""
    info = _assumed.get()
    if info is not None:
        return info
    return _cuda_info(device.index if device.index is not None else torch.cuda.current_device())


@functools.lru_cache(maxsize=1)
def _triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def runs_on(device_type: str) -> Supported:
    """Whether Triton kernels can run on tensors of this device type; the reason where they cannot."""
    if not _triton_installed():
        return no("triton is not installed")
    if device_type == "cuda" or _assumed.get() is not None:
        return YES
    return no(f"needs a CUDA or ROCm device, the tensors are on {device_type}")
