"""Launch a Triton kernel, or compile it for another architecture where there is no GPU."""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gem_kernels.triton.common import triton_key
from gem_kernels.triton.common.device import on_cpu


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of one launch: ``ttgir``, ``ptx``, and ptxas's account of registers, stack, spills (bytes) and warnings."""

    kernel: str
    meta: dict[str, Any]
    ttgir: str
    ptx: str
    registers: int
    stack: int
    spills: int
    shared: int
    warnings: tuple[str, ...]


_recorder: ContextVar[_Recorder | None] = ContextVar("gem_triton_recorder", default=None)


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **meta: Any) -> None:
    """``kernel[grid](*args, **meta)`` on ``device``; an empty grid launches nothing."""
    recorder = _recorder.get()
    triton_key.keep()
    settle(kernel)
    if recorder is not None:
        recorder.compile(kernel, args, meta)
    elif 0 in grid:
        return
    elif device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
        with torch.cuda.device(device):
            kernel[grid](*args, **meta)
    else:
        kernel[grid](*args, **meta)


def settle(function: Any) -> None:
    """Give ``function`` and all that it calls their hashes, callees first. Triton 3.6 lets a callee's constants enter the hash only if the
    callee has been hashed by then, so that what another process compiled, after other kernels, was not found in the cache."""
    if getattr(function, "hash", "") is None:
        for name in function.fn.__code__.co_names:
            settle(function.__globals__.get(name))
        _ = function.cache_key


@contextlib.contextmanager
def compile_only(target: str, every_candidate: bool = False) -> Iterator[list[Compiled]]:
    """Inside, every `launch` compiles for ``target`` (``sm_90``, ``sm_100``) and runs nothing. Needs no GPU; CPU tensors are accepted.

    With ``every_candidate``, `configs.choose` goes through all candidate configurations instead of taking one, so that tuning later finds
    them compiled. What is compiled goes to Triton's disk cache under the same key as at run time.
    Must not be used in a process with ``TRITON_INTERPRET=1``: functions decorated there cannot be compiled.
    """
    recorder = _Recorder(int(target.removeprefix("sm_")), every_candidate)
    token = _recorder.set(recorder)
    try:
        with on_cpu(target):
            yield recorder.done
    finally:
        _recorder.reset(token)


def compiling() -> bool:
    """Whether launches only compile: nothing is computed."""
    return _recorder.get() is not None


def compiling_every_candidate() -> bool:
    """Whether `compile_only` asked for all candidates."""
    recorder = _recorder.get()
    return recorder is not None and recorder.every_candidate


class _Recorder:
    def __init__(self, arch: int, every_candidate: bool) -> None:
        self.arch, self.every_candidate = arch, every_candidate
        self.done: list[Compiled] = []
        self._seen: set[str] = set()

    def compile(self, kernel: Any, args: tuple[Any, ...], meta: dict[str, Any]) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource, make_backend
        from triton.experimental.gluon._runtime import GluonASTSource
        from triton.runtime.jit import create_function_from_signature

        backend = make_backend(GPUTarget("cuda", self.arch, 32))
        bound, specialization, options = create_function_from_signature(kernel.signature, kernel.params, backend)(*args, **meta)
        options, signature, constexprs, attrs = kernel._pack_args(backend, options, bound, specialization, options)
        key = repr((kernel, signature, constexprs, attrs, options))
        if key in self._seen:
            return
        self._seen.add(key)
        source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constexprs, attrs)
        built = triton.compile(source, target=GPUTarget("cuda", self.arch, 32), options=options.__dict__)
        ptx = built.asm["ptx"]
        shown = {k: v for k, v in meta.items() if isinstance(v, int | str | bool | tuple)}
        log = _run_ptxas(ptx, self.arch)
        self.done.append(
            Compiled(
                kernel.__name__,
                shown,
                built.asm["ttgir"],
                ptx,
                registers=_largest(r"Used (\d+) registers", log),
                stack=_largest(r"(\d+) bytes stack frame", log),
                spills=_largest(r"(\d+) bytes spill stores", log),
                shared=built.metadata.shared,
                warnings=tuple(line for line in log.splitlines() if "C75" in line),
            )
        )


def _run_ptxas(ptx: str, arch: int) -> str:
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        output = str(Path(folder, "kernel.cubin"))
        command = [get_ptxas(arch).path, "-v", f"--gpu-name={sm_arch_from_capability(arch)}", str(source), "-o", output]
        return subprocess.run(command, check=True, capture_output=True, text=True).stderr


def _largest(pattern: str, log: str) -> int:
    return max((int(n) for n in re.findall(pattern, log)), default=0)
