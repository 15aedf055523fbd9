"""What a run of the kernel benchmarks is asked for, and compiling ahead of it."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from gem_kernels.bench.report import say
from gem_kernels.triton.common.device import TARGETS

Job = TypeVar("Job", bound=tuple[Any, ...])


@dataclass(frozen=True)
class Settings:
    """``rows`` (in the order of their timing) and ``ops`` empty: all. ``budget``: start no row after so many seconds. ``out``: folder of
    the results, if any."""

    command: str
    rows: tuple[str, ...] = ()
    impls: tuple[str, ...] = ("triton",)
    ops: tuple[str, ...] = ()
    budget: float = 540.0
    peers: bool = True
    eager: bool = True
    tune: bool = False
    workers: int = 0
    rounds: int = 7
    out: str | None = None

    def wants(self, op: str) -> bool:
        return not self.ops or op in self.ops


def compile_ahead(jobs: list[Job], compile_one: Callable[[Job], str | None], workers: int) -> None:
    """Fill Triton's disk cache from several processes, so that the rows do not wait for the compiler one kernel at a time.

    ``compile_one(job)`` gives the fault, if any; the last element of a job tuple is the architecture to compile for, added here.
    """
    target = "sm_{}{}".format(*torch.cuda.get_device_capability())
    if not workers or target not in TARGETS:
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for job, fault in zip(jobs, pool.map(compile_one, [(*job, target) for job in jobs])):
            if fault:
                say(f"compiling {' '.join(map(str, job))}: {fault}")
