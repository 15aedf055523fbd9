"""Checkpoints: a folder ``checkpoints/step-N`` of tensor files and JSON, published at once or not at all.

A checkpoint is written to ``.tmp-step-N``, flushed to the disk, renamed, and only then named in the file ``latest``; whatever kills
the process, the previous one stays usable. Names of tensors are canonical: ``model.<parameter>``, ``optimizer.<parameter>.<state>``,
``tables.<table>.weight`` and ``tables.<table>.accumulator``, whatever strategy held them. Nothing is unpickled when one is read.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from gem_core.errors import CheckpointError
from gem_core.train.pack import load_packed, read_json, save_packed, write_json
from gem_core.train.tensorfile import read_tensors, write_tensors

FORMAT = 1
PARTS = ("model", "optimizer", "tables")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as read: ``meta`` (step, samples, versions, plug-ins, …), tensors of a part, and nested states."""

    path: Path
    meta: Mapping[str, Any]

    @property
    def step(self) -> int:
        return int(self.meta["step"])

    def tensors(self, part: str) -> dict[str, Tensor]:
        """Tensors of "model", "optimizer" or "tables" by canonical name, mapped from the disk."""
        return read_tensors(self.path / f"{part}.safetensors")

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
    ) -> Path:
        """Write and publish ``step-<step>`` from one process; ``ranks`` holds every rank's own state."""
        self.directory.mkdir(parents=True, exist_ok=True)
        final, temporary = self.path(step), self.directory / f".tmp-step-{step}"
        try:
            self._sweep()
            temporary.mkdir()
            files = {f"{part}.safetensors": write_tensors(temporary / f"{part}.safetensors", tensors) for part, tensors in parts.items()}
            for name, state in {"shared": shared, **{f"rank-{rank}": state for rank, state in enumerate(ranks)}}.items():
                files |= save_packed(temporary / name, state)
            record = {**meta, "format": FORMAT, "step": step, "world": len(ranks), "files": files}
            write_json(temporary / "meta.json", record)
            _sync_directory(temporary)
            if final.exists():
                final.rename(self.directory / f".old-step-{step}")
            temporary.rename(final)
            _sync_directory(self.directory)
            replace_file(self.directory / "latest", f"step-{step}\n")
            self._sweep()
            self._retain()
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written: {error.strerror or error}",
                where=str(final),
                fix="free space or mend the file system, then resume; the previous checkpoint is untouched",
            ) from error
        return final

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
            raise CheckpointError(f"there is no checkpoint of step {step}; there are: {there}", where=str(self.directory))
        meta = read_json(path / "meta.json")
        if not isinstance(meta, dict) or meta.get("format") != FORMAT:
            raise CheckpointError(
                f"the checkpoint has format {meta.get('format') if isinstance(meta, dict) else None!r}, this version reads {FORMAT}",
                where=str(path),
                fix="use the version of gem-core that wrote it",
            )
        for name, size in meta["files"].items():
            actual = (path / name).stat().st_size if (path / name).is_file() else None
            if actual != size:
                found = "is missing" if actual is None else f"has {actual} bytes instead of {size}"
                raise CheckpointError(f"the checkpoint is damaged: {name} {found}", where=str(path), fix="use an older checkpoint")
        return Checkpoint(path, meta)

    def latest(self) -> tuple[Checkpoint, list[str]]:
        """The newest usable checkpoint, and what was wrong with newer ones.

        :raises CheckpointError: there is no usable one.
        """
        pointed = self._pointed("latest")
        order = sorted(self.steps(), key=lambda s: (s == pointed, s), reverse=True)
        problems: list[str] = []
        for step in order:
            try:
                return self.load(step), problems
            except CheckpointError as error:
                problems.append(f"step {step}: {error.what}")
        raise CheckpointError(
            "no usable checkpoint" + (f": {'; '.join(problems)}" if problems else ""),
            where=str(self.directory),
            fix="start the run anew (--overwrite), or give another run folder",
        )

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
            elif path.name.startswith(".tmp-"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _retain(self) -> None:
        kept = {self._pointed("latest"), self._pointed("best")}
        for step in self.steps()[: -self.keep]:
            if step not in kept:
                doomed = self.directory / f".tmp-gone-{step}"
                self.path(step).rename(doomed)
                shutil.rmtree(doomed)


def copy_into(targets: Mapping[str, Tensor], stored: Mapping[str, Tensor], part: str, path: Path) -> None:
    """Copy stored tensors into the tensors of the same names, all or nothing.

    :raises CheckpointError: names or shapes differ; the message lists them.
    """
    missing, extra = sorted(set(targets) - set(stored)), sorted(set(stored) - set(targets))
    shapes = [
        f"{name}: stored {tuple(stored[name].shape)}, here {tuple(targets[name].shape)}"
        for name in sorted(set(targets) & set(stored))
        if stored[name].shape != targets[name].shape
    ]
    problems = [
        f"{label} {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
        for label, names in (("not stored:", missing), ("stored but unknown here:", extra), ("of another shape:", shapes))
        if names
    ]
    if problems:
        raise CheckpointError(
            f"the checkpoint does not fit the {part} of this configuration; " + "; ".join(problems),
            where=str(path),
            fix="use the configuration that it was written with (config.toml of its run folder)",
        )
    for name, target in targets.items():
        target.copy_(stored[name])


def replace_file(path: Path, text: str) -> None:
    """Write so that a reader sees the old content or the new one, never a part."""
    temporary = path.with_name(f".tmp-{path.name}")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
