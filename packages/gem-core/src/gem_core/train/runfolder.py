"""The run folder: what is written where, and who may write into one that exists."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from gem_core.config import Config, dump_toml, load_config
from gem_core.errors import CheckpointError, ConfigError, RunError
from gem_core.metrics.contract import result_record
from gem_core.plugins import manager
from gem_core.train.checkpoint import CheckpointStore, replace_file
from gem_core.train.contract import Results, RunInfo
from gem_core.train.runlock import RunLock

SUMMARY_METRICS = ("ne", "auc", "logloss", "calibration", "gauc", "bayes_ne")

_log = logging.getLogger(__name__)

FREE_ON_RESUME = ("run", "eval", "train", "kernels", "parallel")
"""Sections that may change when a run is resumed; the others say what the parameters mean. Of ``[data]`` the sizes of batches may, and what
the source declares (`SourceSpec.free`)."""


class RunFolder:
    """Paths and files of one run."""

    def __init__(self, path: Path, keep: int = 2) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.header = path / "run.json"
        self.metrics = path / "metrics.jsonl"
        self.evals = path / "eval.jsonl"
        self.decisions = path / "guard.jsonl"
        self.summary = path / "summary.json"
        self.tensorboard = path / "tensorboard"
        self.nonfinite = path / "nonfinite"
        self.fitted = path / "fitted.json"
        self.checkpoints = CheckpointStore(path / "checkpoints", keep)
        self.lock = RunLock(path)

    def check(self, resume: bool, overwrite: bool) -> bool:
        """Whether there is a checkpoint to continue from. Changes nothing but what an interrupted save of a checkpoint left behind.

        :raises CheckpointError: the folder holds something and neither ``resume`` nor ``overwrite`` was said, it is no run folder, another
            process trains in it, or all its checkpoints are gone.
        """
        if resume and overwrite:
            raise ConfigError("--resume and --overwrite exclude each other", where=str(self.path), fix="leave one of them out")
        if self.path.exists() and not self.path.is_dir():
            raise CheckpointError("the run folder is a file", where=str(self.path), fix="give another one: --run-dir")
        # What is not published yet is what a run that was killed at its very start leaves.
        holds = sorted(p.name for p in self.path.iterdir() if not p.name.startswith(".tmp-")) if self.path.is_dir() else []
        if holds and not resume and not overwrite:
            raise CheckpointError(
                f"the run folder is not empty ({', '.join(holds[:4])}{', …' if len(holds) > 4 else ''})",
                where=str(self.path),
                fix="--resume continues it, --overwrite deletes it, --run-dir or --set run.name=… takes another one",
            )
        if holds and not self.config.is_file():
            raise CheckpointError(
                "the folder is no run folder (it has no config.toml)", where=str(self.path), fix="give another one, or empty it by hand"
            )
        # Converted data have a config.toml beside them.
        strange = [] if self.header.is_file() else [name for name in holds if not self._is_own(name)]
        if strange:
            raise CheckpointError(
                f"the folder is no run folder (it has no run.json) and holds {', '.join(strange[:4])}{', …' if len(strange) > 4 else ''}",
                where=str(self.path),
                fix="give another one: --run-dir",
            )
        if holds:
            self.hold()
        if resume:
            self.checkpoints.recover()
            gone = {} if self.checkpoints.steps() else self.checkpoints.gone()
            if gone:
                raise self.checkpoints.unusable(gone)
        return resume and bool(self.checkpoints.steps())

    def _is_own(self, name: str) -> bool:
        """Whether ``name`` is what a run has that was killed or hung before it wrote its header, or was copied without it."""
        early = self.config, self.fitted, self.checkpoints.directory, self.metrics, self.evals, self.decisions, self.summary
        return self.path / name in (*early, self.tensorboard, self.nonfinite) or name.startswith(("hang-rank-", "flight-rank-"))

    def create(self, config: Config, resume: bool) -> None:
        """Make the folder with its configuration, empty but for that unless ``resume``; call after `check`, when everything else about
        the run is known to be right. Killed at any point, it leaves a folder that `check` knows for one of a run.

        :raises CheckpointError: another process trains in it, or has since `check` found it empty.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        was_empty = not self.lock.held
        self.hold()
        if was_empty and self.config.is_file():
            self.release()
            fix = "--resume continues it, --run-dir or --set run.name=… takes another one"
            raise CheckpointError("another process has trained in this run folder meanwhile", where=str(self.path), fix=fix)
        if not resume:
            # the header last: it is what tells that the rest is a run's
            for path in sorted(self.path.iterdir(), key=lambda p: p == self.header):
                # The lock's own, and what others who wait for it make for a moment, is theirs.
                if path != self.config and not path.name.startswith(self.lock.file.name):
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        if not (resume and self.config.is_file()):
            self.write_config(config)

    def hold(self) -> None:
        """Until `release`, or the end of this process however it comes, nobody else can train here: they would save over each other.

        :raises CheckpointError: another process does.
        """
        self.lock.hold()

    def release(self) -> None:
        """Let others train here."""
        self.lock.release()

    def write_config(self, config: Config) -> None:
        replace_file(self.config, dump_toml(config))

    def check_config(self, config: Config) -> None:
        """:raises ConfigError: a section that must not change differs from the run's own configuration."""
        if not self.config.is_file():
            return
        before, now = load_config(self.config).model_dump(mode="json"), config.model_dump(mode="json")
        source = config.data.source
        free = {"data.batch_size", "data.eval_batch_size", *(f"data.{source}.{o}" for o in manager().find("source", source).free)}
        changed = [
            f"{key}: was {old}, is {new}"
            for section in sorted(set(before) - set(FREE_ON_RESUME))
            for key, old, new in _differences(section, before[section], now[section])
            if key not in free
        ]
        if changed:
            raise ConfigError(
                "the configuration differs from that of the run to resume: " + "; ".join(changed[:5]) + ("; …" if len(changed) > 5 else ""),
                where=str(self.config),
                fix=f"only [{'], ['.join(FREE_ON_RESUME)}], {', '.join(sorted(free))} may change; start a new run for the rest",
            )

    def check_fitted(self, config: Config) -> None:
        """:raises ConfigError: ``features.fitted`` holds something else than the copy that the run was begun with."""
        named = config.features.fitted
        if named is not None and self.fitted.is_file() and _bytes(named) != self.fitted.read_bytes():
            raise ConfigError(
                f"the fitted state {named!r} is not the one that the run was begun with",
                where="features.fitted",
                fix=f"--set features.fitted={self.fitted} continues with the run's own copy; or start a new run",
            )

    def keep_fitted(self, config: Config) -> str | None:
        """Copy the file of ``features.fitted`` into the folder; returns its SHA-256, None where no file is named."""
        named = config.features.fitted
        if named is None:
            return None
        data = _bytes(named)
        if not self.fitted.is_file():
            replace_file(self.fitted, data.decode())
        return hashlib.sha256(data).hexdigest()

    def write_json(self, path: Path, record: Mapping[str, Any]) -> None:
        with writing(path):
            replace_file(path, json.dumps(clean(record), indent=1) + "\n")

    def append(self, path: Path, record: Mapping[str, Any]) -> None:
        """Add a line to a .jsonl file, with one write call."""
        with writing(path), open(path, "a") as file:
            file.write(json.dumps(clean(record)) + "\n")

    def trim(self, step: int, *, evaluates: bool = False) -> None:
        """Drop lines of steps after ``step``, and those of partitions that begin behind it: a resumed run writes them again. A line cut
        short by a crash goes too. ``evaluates``: the run goes on with an evaluation at ``step``, whose line, if one is there, goes."""
        for path in (self.metrics, self.evals, self.decisions):
            if path.is_file():
                until = step - (evaluates and path == self.evals)
                kept = (r for r in read_lines(path) if r["step"] < step or (r["step"] <= until and "partition" not in r))
                replace_file(path, "".join(json.dumps(r) + "\n" for r in kept))


def _bytes(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"the fitted state cannot be read: {error.strerror}", where=f"features.fitted = {path}", fix="make it with 'gemrec data vocab'"
        ) from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """:raises RunError: the file system refuses what is written meanwhile."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"the run folder cannot be written: {error.strerror or error}",
            where=str(path),
            fix="free space or mend the file system, then resume from the last checkpoint (--resume)",
        ) from error


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Records of a .jsonl file. A last line that a crash cut short is left out; so is any other damaged one, and that is said."""
    lines = path.read_text(errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            yield record
        elif number < len(lines):
            _log.warning("%s: line %d is damaged and left out", path, number)


def clean(value: Any) -> Any:
    """JSON without NaN and infinities, which become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [clean(v) for v in value]
    return value


def summary_record(
    run: RunInfo,
    status: str,
    results: Results | None,
    evaluation: Mapping[str, Any],
    best_step: int | None,
    wall_s: float,
    peak_memory_bytes: int,
) -> dict[str, Any]:
    """The content of summary.json. Each task with labels lists at least `SUMMARY_METRICS`."""
    record = result_record(results or {})
    features = run.config.features
    tasks = {} if features.next_item is not None else {task: dict.fromkeys(SUMMARY_METRICS) for task in features.labels}
    return {
        "model": run.config.model.name,
        "status": status,
        "steps": run.step,
        "samples": run.samples,
        "tasks": {**record["tasks"], **{task: known | record["tasks"].get(task, {}) for task, known in tasks.items()}},
        "undefined": record["undefined"],
        "evaluated_step": evaluation.get("step"),
        "eval_samples": evaluation.get("eval_samples"),
        "best_step": best_step,
        "wall_s": wall_s,
        "peak_memory_bytes": peak_memory_bytes,
    }


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, plug-ins, machine and commit, for run.json and checkpoints."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("gem-core", "triton", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "pyarrow"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "versions": versions,
        "plugins": manager().active(),
        "device": device_name(device),
        "host": platform.node(),
        "command": sys.argv,
        "commit": _commit(),
    }


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


@cache
def _commit() -> str | None:
    """Git commit of the working directory, with "-dirty" if tracked files differ; None outside a repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--match", ""]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, env={**os.environ, "LC_ALL": "C"})
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _differences(key: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted(set(old) | set(new)):
            yield from _differences(f"{key}.{name}", old.get(name), new.get(name))
    elif old != new:
        yield key, old, new
