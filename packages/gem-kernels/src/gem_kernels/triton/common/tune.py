"""Measure candidate configurations once a machine, and remember the best on disk.

The file is ``$GEM_CACHE_DIR/triton/<architecture>-<device>.json`` (``~/.cache/gem`` without the variable). A lock file beside it lets one
process of many measure while the others wait for its answer.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import statistics
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gem_core.errors import DeviceError
from gem_kernels.triton.common.device import DeviceInfo

Config = dict[str, Any]
Facts = tuple[tuple[str, Any], ...]

_RUNS = 7


@dataclass
class _Session:
    """Inside `tuning`: which keys were measured already, and every timing for the report."""

    done: dict[str, Config] = field(default_factory=dict)
    timings: list[dict[str, Any]] = field(default_factory=list)


sessions = 0
"""How many `tuning` blocks ended: choices made before them are made anew."""

_session: ContextVar[_Session | None] = ContextVar("gem_triton_tuning", default=None)
_loaded: dict[Path, dict[str, Any]] = {}


@contextlib.contextmanager
def tuning() -> Iterator[list[dict[str, Any]]]:
    """Inside, every kernel measures its candidates anew and the results replace what was remembered. Gives the list of timings."""
    global sessions
    session = _Session()
    token = _session.set(session)
    try:
        yield session.timings
    finally:
        _session.reset(token)
        sessions += 1


def forced() -> bool:
    """Whether a `tuning` block is active."""
    return _session.get() is not None


def cache_folder() -> Path:
    """Where this package keeps what it learnt about the machine."""
    base = os.environ.get("GEM_CACHE_DIR") or os.path.join(os.path.expanduser("~"), ".cache", "gem")
    return Path(base, "triton")


def cache_file(info: DeviceInfo) -> Path:
    """Where this machine's measurements are kept."""
    return cache_folder() / f"{info.key}-{re.sub(r'[^A-Za-z0-9]+', '_', info.name)}.json"


def entry_key(kernel: str, facts: Facts) -> str:
    """One line of text for a kernel and its facts."""
    return kernel + "|" + "|".join(f"{name}={value}" for name, value in facts)


def remembered(kernel: str, facts: Facts, info: DeviceInfo) -> Config | None:
    """What an earlier measurement on this machine chose. The file is read once a process."""
    path = cache_file(info)
    if path not in _loaded:
        _loaded[path] = _read(path)
    entry = _loaded[path].get(entry_key(kernel, facts))
    return None if entry is None else dict(entry["use"])


def measured(kernel: str, facts: Facts, info: DeviceInfo, candidates: Callable[[], list[Config]], run: Callable[[Config], None]) -> Config:
    """Time every candidate with ``run``, store the best and return it. Candidates that do not compile or do not fit are passed over."""
    key = entry_key(kernel, facts)
    session = _session.get()
    if session is not None and key in session.done:
        return session.done[key]
    path = cache_file(info)
    with _locked(path):
        table = _read(path)
        offered = candidates()
        if session is None and key in table and table[key]["use"] in offered:
            best = dict(table[key]["use"])
        else:
            best, ms, tried = _fastest(key, offered, run)
            # Candidates may themselves have tuned kernels meanwhile.
            table = {**_read(path), key: {"use": best, "ms": ms}}
            _write(path, table)
            if session is not None:
                session.done[key] = best
                session.timings.append({"kernel": kernel, "facts": dict(facts), "use": best, "ms": ms, "tried": tried})
        _loaded[path] = table
    return best


_held: set[Path] = set()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process measures at a time. Inside a measurement a nested one keeps the lock."""
    if path in _held:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _held.add(path)
        try:
            yield
        finally:
            _held.discard(path)


def _fastest(key: str, candidates: list[Config], run: Callable[[Config], None]) -> tuple[Config, float, list[dict[str, Any]]]:
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    best, best_ms, tried, faults = None, float("inf"), [], []
    for config in candidates:
        try:
            run(config)
            ms = _median_ms(lambda c=config: run(c))
        except (OutOfResources, PTXASError, CompilationError) as error:
            faults.append(f"{config}: {type(error).__name__}")
            continue
        tried.append({"use": config, "ms": ms})
        if ms < best_ms:
            best, best_ms = config, ms
    if best is None:
        raise DeviceError(
            "no tile configuration of this kernel compiles for the device",
            where=key + "\n    " + "\n    ".join(faults),
            fix="choose another implementation with backend= or in [kernels]",
        )
    return best, best_ms, tried


def _median_ms(run: Callable[[], None]) -> float:
    run()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(_RUNS)]
    for start, stop in marks:
        start.record()
        run()
        stop.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in marks)


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}


def _write(path: Path, table: dict[str, Any]) -> None:
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(table, indent=1, sort_keys=True))
    os.replace(part, path)
