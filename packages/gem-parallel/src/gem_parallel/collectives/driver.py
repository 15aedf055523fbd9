"""Flags in memory that streams write and wait for, by the CUDA driver's stream memory operations: no kernel, no SM."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

from gem_core.errors import DeviceError

_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ, cyclic
_FENCED = 0  # CU_STREAM_WRITE_VALUE_DEFAULT: what the stream wrote before is visible before the flag


@lru_cache(maxsize=1)
def _library() -> Any:
    """:raises DeviceError: no CUDA driver, or one without these operations."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        for name in ("cuStreamWaitValue32_v2", "cuStreamWriteValue32_v2"):
            function = getattr(library, name)
            function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
            function.restype = ctypes.c_int
    except (OSError, AttributeError) as fault:
        raise DeviceError(f"the CUDA driver offers no stream memory operations: {fault}") from None
    return library


def wait_at_least(stream: int, address: int, value: int) -> None:
    """Let a stream (its handle) go on once the 32-bit word at ``address``, in memory of its own device, is at least ``value``."""
    _check(_library().cuStreamWaitValue32_v2(stream, address, value & 0xFFFFFFFF, _AT_LEAST), "wait for")


def write(stream: int, address: int, value: int) -> None:
    """Write the 32-bit word at ``address``, here or in mapped memory of a peer, after everything that the stream holds."""
    _check(_library().cuStreamWriteValue32_v2(stream, address, value & 0xFFFFFFFF, _FENCED), "write")


def _check(code: int, what: str) -> None:
    if code:
        raise DeviceError(f"the CUDA driver refused to {what} a flag in memory (error {code})")
