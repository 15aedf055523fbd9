"""Predicting with a finished run: its newest checkpoint as a function from a batch to logits.

On a CPU the samples of a batch are sorted by length, cut into parts, and computed by one thread each on as many threads as torch has:
operations on such parts are too short to be shared out themselves. Results come back in the order of the batch. Where an installed package
runs programs of ops (`gem_core.ops.program`), a float32 model computes by them, which changes its results by rounding only.
On a CUDA device parts of the batch are computed one after another, while the next ones are on their way.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gem_core.batch import Batch
from gem_core.config import Features
from gem_core.errors import ConfigError
from gem_core.model.contract import Retrieval
from gem_core.model.inference import for_inference
from gem_core.ops import program
from gem_core.requests import expanded
from gem_core.train.build import build_source, present, task_names
from gem_core.train.offline import LoadedRun, loaded_run

PART_SAMPLES, PART_EVENTS = 4096, 65_536
"""Most samples and, where there are several samples, most events that are computed at once on a CPU."""


DEVICE_SAMPLES, DEVICE_EVENTS = 16_384, 524_288
"""The same on a device, whose kernels balance histories of any length themselves."""


class Predictor:
    """Maps batches on the host to logits ``[B, T]`` fp32 on the host, in the order of ``tasks``. Made by `predictor`.

    ``features`` is what a batch must hold: the run's ``[features]`` without labels, weight, row filter, sample ids and carried columns.
    """

    def __init__(self, run: LoadedRun, pool: ThreadPoolExecutor | None) -> None:
        self.run, self._pool = run, pool
        self.tasks = task_names(run.resolved.config.features)
        bare: dict[str, Any] = {"labels": {}, "weight": None, "filter": None, "sample_id": None, "columns": ()}
        self.hashed = run.hashed
        self.features: Features = run.resolved.config.features.model_copy(update=bare)

    @property
    def step(self) -> int:
        """The optimizer step of the checkpoint."""
        return self.run.step

    def __call__(self, batch: Batch) -> Tensor:
        module = self.run.parts.module
        if not batch.size:
            return torch.empty(0, len(self.tasks))
        if self._pool is None:
            return self._on_device(batch)
        order, cuts = by_length(batch)
        parts = (order[a:b] for a, b in zip(cuts, cuts[1:]))
        context = copy_context()
        waiting = [self._pool.submit(context.copy().run, _part, module, batch, rows, self.tasks) for rows in parts]
        out = torch.empty(batch.size, len(self.tasks))
        out[order] = torch.cat([w.result() for w in waiting])
        return out

    @torch.no_grad()
    def _on_device(self, batch: Batch) -> Tensor:
        """Parts of the batch in its own order, each copied while those before it are computed; the device is waited for once."""
        module, device = self.run.parts.module, self.run.runtime.device
        out = torch.empty(batch.size, len(self.tasks), pin_memory=True)
        copies, current = torch.cuda.Stream(device), torch.cuda.current_stream(device)  # type: ignore[no-untyped-call]
        held = []
        batch = expanded(batch)
        cuts = in_order(batch)
        for a, b in zip(cuts, cuts[1:]):
            with torch.cuda.stream(copies):
                host = batch.select_range(a, b).pin_memory()
                part = host.to(device, non_blocking=True)
            current.wait_stream(copies)
            part.record_stream(current)
            out[a:b].copy_(_logits(module, part, self.tasks), non_blocking=True)
            held.append(host)
        current.synchronize()
        return out

    def source(self, split: str) -> Iterator[tuple[Batch, Tensor]]:
        """(batch, its logits) over a split of the run's own data, labels included."""
        for batch in present(build_source(self.run.resolved, split, self.run.runtime)):
            yield batch, self(batch)


@contextmanager
def predictor(path: str | Path, *, overrides: Iterable[str] = (), step: int | None = None) -> Iterator[Predictor]:
    """The model of the run folder ``path`` at its newest checkpoint, or at that of ``step``.

    :param overrides: ``KEY=VALUE`` on the run's configuration, such as another device.
    :raises CheckpointError: no run folder, or no usable checkpoint; ConfigError: a model that ranks all items instead of scoring samples.
    """
    with loaded_run(path, overrides=overrides, step=step) as run:
        if isinstance(run.parts.model, Retrieval):
            raise ConfigError(
                "this run's model retrieves items: it has no prediction for a sample", where=str(path), fix="use gemrec eval for its ranks"
            )
        run.parts.model.eval()
        if run.runtime.device.type != "cpu":
            yield Predictor(run, None)
            return
        threads = torch.get_num_threads()
        plain = run.resolved.config.precision.recipe == "fp32" and program.offered("cpu", torch.float32)
        form = for_inference(run.parts.model) if plain else nullcontext()
        with form, _kept_pages(), ThreadPoolExecutor(threads, "gem predict", initializer=torch.set_num_threads, initargs=(1,)) as pool:
            try:
                yield Predictor(run, pool)
            finally:
                torch.set_num_threads(threads)


@contextmanager
def _kept_pages() -> Iterator[None]:
    """For a with-block, freed tensors' memory stays with the process where the C library is glibc, which else maps and clears that of every
    large tensor anew: a twentieth of the time. The most that is held at once does not grow by it."""
    try:
        library = ctypes.CDLL(None)
        set_option, trim = library.mallopt, library.malloc_trim
    except (AttributeError, OSError, TypeError):
        yield
        return
    map_from, trim_from = -3, -1
    set_option(map_from, 1 << 30)
    set_option(trim_from, (1 << 31) - 1)
    try:
        yield
    finally:
        set_option(map_from, 32 << 20)  # the largest that glibc chooses itself
        set_option(trim_from, 64 << 20)
        trim(0)


def in_order(batch: Batch) -> list[int]:
    """Where to cut the samples, as they follow one another, into parts for a device."""
    return _cuts(_events(batch).cumsum(0), DEVICE_SAMPLES, DEVICE_EVENTS)


def by_length(batch: Batch) -> tuple[Tensor, list[int]]:
    """Sample numbers ``[B]`` in the order of their events, and where in it to cut for a CPU."""
    events = _events(batch)
    order = torch.argsort(events, stable=True)
    return order, _cuts(events[order].cumsum(0), PART_SAMPLES, PART_EVENTS)


def _events(batch: Batch) -> Tensor:
    """``[B]``"""
    groups = [*batch.sequences.values()]
    return torch.stack([g.lengths for g in groups]).sum(0) if groups else torch.zeros(batch.size, dtype=torch.int64)


def _cuts(ends: Tensor, samples: int, events: int) -> list[int]:
    """Edges of parts of at most ``samples`` samples and, where there are several, ``events`` events; ``ends [B]``: their running sum."""
    cuts, size = [0], ends.numel()
    while cuts[-1] < size:
        before = int(ends[cuts[-1] - 1]) if cuts[-1] else 0
        fits = int(torch.searchsorted(ends, before + events, right=True))
        cuts.append(min(max(fits, cuts[-1] + 1), cuts[-1] + samples, size))
    return cuts


@torch.no_grad()
def _part(module: nn.Module, batch: Batch, rows: Tensor, tasks: tuple[str, ...]) -> Tensor:
    return _logits(module, batch.take(rows), tasks)


def _logits(module: nn.Module, batch: Batch, tasks: tuple[str, ...]) -> Tensor:
    output = module(batch)
    at = [output.task_names.index(task) for task in tasks]
    logits: Tensor = output.logits.float()
    return logits if at == list(range(logits.shape[1])) else logits[:, at]
