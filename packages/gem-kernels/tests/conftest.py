"""The order of tests on a GPU, and device memory for large ones that run beside others."""

from __future__ import annotations

import fcntl
import gc
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

import pytest
import torch

LONGEST = (
    "test_many_samples", "test_first_call", "test_sums_in_registers", "test_hopper_every_candidate", "test_hopper_like_portable",
    "test_resources", "test_requests", "test_hopper_tile_tables", "test_hopper", "test_accuracy", "test_edges", "test_times",
    "test_block_attention_of_long_samples", "test_only_wanted_gradients", "test_cross_attention", "test_deterministic",
)  # fmt: skip
"""Beginnings of the names of tests that compile or compute for ten seconds and more on a GPU machine, longest first."""
if "PYTEST_XDIST_WORKER" in os.environ:
    # read when torch.compile is first used: test processes are as many as cores already, and none starts a pool of compilers
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
PLACE = 20
"""GiB of device memory that a place stands for. Test processes share the places of a device, a fifth of which is left to small tests."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a GPU the longest tests come first, so that no process is left with one of them when the others are done."""
    here = Path(__file__).parent

    def rank(item: pytest.Item) -> int:
        names = LONGEST if here in item.path.parents else ()
        return next((n for n, name in enumerate(names) if item.name.startswith(name)), len(LONGEST))

    if torch.cuda.is_available():
        items.sort(key=rank)


def _enter(count: int, total: float) -> list[IO[str]]:
    """That many places, held until they are closed, or none."""
    device, held = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid, []
    for i in range(int(0.8 * total // PLACE)):
        try:
            place = _opened(Path(tempfile.gettempdir(), f"gem-gpu-memory-{device}-{i}"))
        except OSError:
            continue
        try:
            fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            place.close()
            continue
        held.append(place)
        if len(held) == count:
            return held
    for place in held:
        place.close()
    return []


def _opened(path: Path) -> IO[str]:
    """The file, to be read, which is enough for a lock: it may be another user's."""
    if not path.exists():
        with suppress(FileExistsError):
            made = os.open(path, os.O_CREAT | os.O_EXCL)
            os.fchmod(made, 0o444)
            os.close(made)
    return path.open()


@pytest.fixture
def room() -> Iterator[Callable[[float], None]]:
    """``room(gib)`` waits until so much device memory is free and, among the tests that ask, this one's; skips where that does not come.
    Once a test. What PyTorch keeps for reuse is given back before and after."""
    held: list[IO[str]] = []

    def wait(gib: float) -> None:
        free, total = (n / 2**30 for n in torch.cuda.mem_get_info())
        for _ in range(360 if 0.8 * total >= gib else 0):
            held[:] = held or _enter(math.ceil(gib / PLACE), total)
            free = torch.cuda.mem_get_info()[0] / 2**30
            if held and free >= gib:
                return
            time.sleep(0.5)
        pytest.skip(f"needs {gib:.0f} GiB of {total:.0f} of device memory, {free:.0f} are free")

    torch.cuda.empty_cache()
    yield wait
    torch.cuda.empty_cache()
    for place in held:
        place.close()


@pytest.fixture(autouse=True)
def _memory_is_given_back() -> Iterator[None]:
    """What a test took on a GPU and PyTorch would keep for the next ones of this process is there for other processes."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 1 << 30:
        gc.collect()  # tensors of a failed test hang in its traceback's cycles
        torch.cuda.empty_cache()
