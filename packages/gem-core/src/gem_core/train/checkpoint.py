"""Checkpoints: a folder ``checkpoints/step-N`` of tensor files and JSON, published at once or not at all.

A checkpoint is written to ``.tmp-step-N-…``, flushed to the disk, renamed, and only then named in the file ``latest``; whatever kills
the process, the previous one stays usable. Names of tensors are canonical: ``model.<parameter>``, ``optimizer.<parameter>.<state>``,
``tables.<table>.weight`` and ``tables.<table>.accumulator``, whatever strategy held them. Nothing is unpickled when one is read.

State that is whole in every process is written by one of them, a file a part (format 1); state that is spread over processes is written
by all, a file a process (format 2, `gem_core.train.storage`). Either can be loaded into any strategy, mesh and number of processes.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from gem_core.errors import CheckpointError
from gem_core.train.pack import load_packed, read_json, save_packed, write_json
from gem_core.train.shards import State, spread
from gem_core.train.tensorfile import Written, crc32_of, nothing, read_tensors, write_tensors

WHOLE, SHARDED = 1, 2
"""Values of ``format`` in meta.json."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as read: ``meta`` (step, samples, versions, plug-ins, …), tensors of a part, and nested states."""

    path: Path
    meta: Mapping[str, Any]

    @property
    def step(self) -> int:
        return int(self.meta["step"])

    def tensors(self, part: str) -> dict[str, Tensor]:
        """Whole tensors of "model", "optimizer" or "tables" by canonical name: mapped from the disk, or put together in memory."""
        if self.meta["format"] == WHOLE:
            return read_tensors(self.path / f"{part}.safetensors")
        from gem_core.train import storage

        return storage.whole(self.path, part)

    def shapes(self, part: str) -> dict[str, tuple[int, ...]]:
        """The whole shape of each stored tensor of a part."""
        if self.meta["format"] == WHOLE:
            return {name: tuple(tensor.shape) for name, tensor in self.tensors(part).items()}
        from gem_core.train import storage

        entries = storage.describe(self.path).items()
        return {key.partition("/")[2]: tuple(entry["shape"]) for key, entry in entries if key.partition("/")[0] == part}

    def fill(self, part: str, targets: Mapping[str, State], label: str, *, partial: bool = False) -> None:
        """Copy the stored tensors of a part into what this process holds of those of the same names; every process for itself.

        :param partial: the process may lack some of the stored names.
        :raises CheckpointError: names or shapes differ; nothing was copied then.
        """
        check_fit({n: _shape(t) for n, t in targets.items()}, self.shapes(part), label, self.path, partial=partial)
        if self.meta["format"] == WHOLE and not any(spread(t) for t in targets.values()):
            stored = self.tensors(part)
            for name, target in targets.items():
                target.copy_(stored[name])  # type: ignore[union-attr]
            return
        from gem_core.train import storage

        storage.read(self.path, part, targets)

    def state(self, name: str) -> Any:
        """A nested state: "shared", or "rank-K"."""
        return load_packed(self.path / name)


class CheckpointStore:
    """The folder ``checkpoints`` of a run."""

    def __init__(self, directory: Path, keep: int = 2) -> None:
        self.directory, self.keep = directory, keep

    def save(
        self,
        step: int,
        *,
        meta: Mapping[str, Any],
        parts: Mapping[str, Mapping[str, Tensor]],
        shared: Any,
        ranks: Sequence[Any],
        progress: Callable[[], None] = nothing,
    ) -> Path:
        """Write and publish ``step-<step>`` from one process; ``ranks`` holds every rank's own state. ``progress``: see `write_tensors`."""
        folder, names = self.begin(step), {part: f"{part}.safetensors" for part in parts}
        with self._whole_or_not_at_all(step, folder):
            files = {names[part]: write_tensors(folder / names[part], tensors, progress=progress) for part, tensors in parts.items()}
        return self.publish(step, folder, meta={**meta, "format": WHOLE}, files=files, shared=shared, ranks=ranks)

    def begin(self, step: int) -> Path:
        """An empty folder to write the tensors of ``step`` into, not seen by readers; `publish` makes it a checkpoint. No other save has
        its name: a process of a run that has failed may still write the same step."""
        folder = self.directory / f".tmp-step-{step}-{uuid.uuid4().hex[:8]}"
        with self._whole_or_not_at_all(step, folder):
            self.directory.mkdir(parents=True, exist_ok=True)
            self._sweep()
            folder.mkdir()
        return folder

    def publish(
        self, step: int, folder: Path, *, meta: Mapping[str, Any], files: Mapping[str, Written], shared: Any, ranks: Sequence[Any]
    ) -> Path:
        """Add the states, and make ``folder``, that of `begin`, the newest checkpoint. ``files``: the tensor files in it."""
        final = self.path(step)
        with self._whole_or_not_at_all(step, folder):
            if not folder.is_dir():
                raise FileNotFoundError(errno.ENOENT, f"{folder.name} was removed meanwhile, by another process that saves here")
            written = dict(files)
            for name, state in {"shared": shared, **{f"rank-{rank}": state for rank, state in enumerate(ranks)}}.items():
                written |= save_packed(folder / name, state)
            sums = {"files": {n: w.bytes for n, w in written.items()}, "crc32": {n: w.crc32 for n, w in written.items()}}
            record = {**meta, "step": step, "world": len(ranks), **sums}
            write_json(folder / "meta.json", {**record, "own_crc32": _own_crc32(record)})
            _sync_directory(folder)
            if final.exists():
                final.rename(self.directory / f".old-step-{step}")
            folder.rename(final)
            _sync_directory(self.directory)
            replace_file(self.directory / "latest", f"step-{step}\n")
            self._sweep()
            self._retain()
        return final

    @contextmanager
    def _whole_or_not_at_all(self, step: int, folder: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written: {error.strerror or error}",
                where=str(self.path(step)),
                fix="free space or mend the file system, then resume; the previous checkpoint is untouched",
            ) from error

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step}"

    def steps(self) -> list[int]:
        """Steps that have a published checkpoint, ascending."""
        if not self.directory.is_dir():
            return []
        names = (p.name.removeprefix("step-") for p in self.directory.iterdir() if p.name.startswith("step-"))
        return sorted(int(n) for n in names if n.isdigit())

    def load(self, step: int) -> Checkpoint:
        """Open one checkpoint after checking that all its files have the recorded sizes.

        :raises CheckpointError: missing, damaged, or of a newer format.
        """
        path = self.path(step)
        if not path.is_dir():
            there = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(
                f"there is no checkpoint of step {step}; there are: {there}",
                where=str(self.directory),
                fix="name a step that is there, or put this one back from a copy",
            )
        meta = read_json(path / "meta.json")
        if not isinstance(meta, dict) or meta.get("format") not in (WHOLE, SHARDED):
            raise CheckpointError(
                f"the checkpoint has format {meta.get('format') if isinstance(meta, dict) else None!r}, "
                f"this version reads {WHOLE} and {SHARDED}",
                where=str(path),
                fix="use the version of gem-core that wrote it",
            )
        if not isinstance(meta.get("files"), dict) or not isinstance(meta.get("step"), int):
            raise CheckpointError("meta.json is damaged: it lacks the step or the files", where=str(path), fix="use an older checkpoint")
        for name, size in meta["files"].items():
            actual = (path / name).stat().st_size if (path / name).is_file() else None
            if actual != size:
                found = "is missing" if actual is None else f"has {actual} bytes instead of {size}"
                raise CheckpointError(f"the checkpoint is damaged: {name} {found}", where=str(path), fix="use an older checkpoint")
        return Checkpoint(path, meta)

    def problem(self, step: int, share: tuple[int, int] = (0, 1), progress: Callable[[], None] = nothing) -> str | None:
        """What is wrong with a checkpoint: its files are read and held against their checksums. ``share`` (i, n): every n-th of them.
        ``progress``: see `crc32_of`."""
        try:
            checkpoint = self.load(step)
            if checkpoint.meta.get("own_crc32", _own_crc32(checkpoint.meta)) != _own_crc32(checkpoint.meta):
                return "the checkpoint is damaged: meta.json has not the content that was written"
            for name, crc32 in list(checkpoint.meta.get("crc32", {}).items())[share[0] :: share[1]]:
                if crc32_of(checkpoint.path / name, progress) != crc32:
                    return f"the checkpoint is damaged: {name} has not the content that was written"
        except CheckpointError as error:
            return error.what
        except OSError as error:
            return f"the checkpoint cannot be read: {error.strerror or error}"
        return None

    def latest(self) -> tuple[Checkpoint, list[str]]:
        """The newest checkpoint whose files have the recorded sizes, and what was wrong with newer ones.

        :raises CheckpointError: there is no usable one.
        """
        problems = self.gone()
        for step in self.order():
            try:
                return self.load(step), [f"step {s}: {what}" for s, what in problems.items()]
            except CheckpointError as error:
                problems[step] = error.what
        raise self.unusable(problems)

    def set_aside(self, steps: Iterable[int]) -> list[Path]:
        """Rename damaged checkpoints to ``damaged-step-N``, so that nothing takes them for good ones; returns where they are."""
        moved = []
        for step in filter(set(self.steps()).__contains__, steps):
            aside = self.directory / f"damaged-step-{step}"
            with suppress(OSError):
                shutil.rmtree(aside, ignore_errors=True)
                self.path(step).rename(aside)
                moved.append(aside)
        return moved

    def order(self) -> list[int]:
        """Published steps, newest first; the one that the file ``latest`` names before all."""
        pointed = self._pointed("latest")
        return sorted(self.steps(), key=lambda s: (s == pointed, s), reverse=True)

    def gone(self) -> dict[int, str]:
        """The step that the file ``latest`` names and what became of its folder, if that is not there; else nothing."""
        step = self._pointed("latest")
        if step is None or self.path(step).is_dir():
            return {}
        aside = self.directory / f"damaged-step-{step}"
        where = f"it was set aside as {aside.name}" if aside.is_dir() else "put it back from a copy to go on from there"
        return {step: f"the file 'latest' names {self.path(step).name}, which is gone; {where}"}

    def unusable(self, found: Mapping[int, str]) -> CheckpointError:
        """The error of there being no usable checkpoint; ``found``: what is wrong with those there."""
        problems = [f"step {step}: {what}" for step, what in found.items()]
        return CheckpointError(
            "no usable checkpoint" + (f": {'; '.join(problems)}" if problems else ""),
            where=str(self.directory),
            fix="put a good one back from a copy, start the run anew (--overwrite), or give another run folder",
        )

    def recover(self) -> None:
        """Bring back a checkpoint that an interrupted save of the same step had set aside, and remove what it left behind."""
        if self.directory.is_dir():
            self._sweep()

    def mark_best(self, step: int) -> None:
        """Keep this checkpoint until another one is marked."""
        replace_file(self.directory / "best", f"step-{step}\n")

    def best(self) -> Checkpoint | None:
        """The checkpoint of the best evaluation, if one was marked."""
        step = self._pointed("best")
        return None if step is None else self.load(step)

    def _pointed(self, name: str) -> int | None:
        try:
            text = (self.directory / name).read_text().strip().removeprefix("step-")
        except OSError:
            return None
        return int(text) if text.isdigit() else None

    def _sweep(self) -> None:
        """Remove what an interrupted save left behind; a set-aside checkpoint comes back if its successor was never published."""
        for path in self.directory.iterdir():
            if path.name.startswith(".old-"):
                published = self.directory / path.name.removeprefix(".old-")
                if published.exists():
                    shutil.rmtree(path)
                else:
                    path.rename(published)
            elif path.name.startswith(".tmp-") and path.is_dir():
                shutil.rmtree(path, ignore_errors=True)  # what is still written into goes with the next save
            elif path.name.startswith(".tmp-"):
                path.unlink()

    def _retain(self) -> None:
        kept = {self._pointed("latest"), self._pointed("best")}
        for step in self.steps()[: -self.keep]:
            if step not in kept:
                doomed = self.directory / f".tmp-gone-{step}"
                self.path(step).rename(doomed)
                shutil.rmtree(doomed)


def check_fit(
    here: Mapping[str, tuple[int, ...]], stored: Mapping[str, tuple[int, ...]], label: str, path: Path, *, partial: bool = False
) -> None:
    """Compare names and whole shapes.

    :raises CheckpointError: they differ; the message lists how.
    """
    missing, extra = sorted(set(here) - set(stored)), [] if partial else sorted(set(stored) - set(here))
    shapes = [
        f"{name}: stored {tuple(stored[name])}, here {tuple(here[name])}"
        for name in sorted(set(here) & set(stored))
        if tuple(stored[name]) != tuple(here[name])
    ]
    problems = [
        f"{label_} {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
        for label_, names in (("not stored:", missing), ("stored but unknown here:", extra), ("of another shape:", shapes))
        if names
    ]
    if problems:
        raise CheckpointError(
            f"the checkpoint does not fit the {label} of this configuration; " + "; ".join(problems),
            where=str(path),
            fix="use the configuration that it was written with (config.toml of its run folder)",
        )


def _own_crc32(meta: Mapping[str, Any]) -> int:
    """The CRC-32 of the rest of meta.json, in whatever form it was written."""
    rest = {key: value for key, value in meta.items() if key != "own_crc32"}
    return zlib.crc32(json.dumps(json.loads(json.dumps(rest)), sort_keys=True).encode())


def _shape(state: State) -> tuple[int, ...]:
    return tuple(state.shape)


def replace_file(path: Path, text: str) -> None:
    """Write so that a reader sees the old content or the new one, never a part."""
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        with open(temporary, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
