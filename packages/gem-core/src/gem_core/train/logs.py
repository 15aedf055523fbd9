"""Callbacks that write: JSON lines, TensorBoard, and what a person watches."""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gem_core.errors import RunWarning
from gem_core.ops.dispatch import begin_anew
from gem_core.train.contract import Callback, Results, RunInfo
from gem_core.train.runfolder import RunFolder


class JsonLines(Callback):
    """``metrics.jsonl`` and ``eval.jsonl`` of the run folder."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    def on_step(self, run: RunInfo, record: Mapping[str, Any] | None) -> None:
        if record is not None:
            self.folder.append(self.folder.metrics, record)

    def on_eval(self, run: RunInfo, results: Results, record: Mapping[str, Any]) -> None:
        self.folder.append(self.folder.evals, record)


class TensorBoard(Callback):
    """Scalars under ``train/`` and ``eval/<task>/`` in the run folder's ``tensorboard``."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.writer: Any = None

    def on_start(self, run: RunInfo) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            warnings.warn(
                "TensorBoard logs are off: tensorboard is not installed (pip install 'gem-core[log]'); train.tensorboard = false "
                "silences this",
                RunWarning,
                stacklevel=2,
            )
            return
        self.writer = SummaryWriter(str(self.folder.tensorboard), purge_step=run.step + 1)

    def on_step(self, run: RunInfo, record: Mapping[str, Any] | None) -> None:
        if self.writer is not None and record is not None:
            for key, value in record.items():
                if isinstance(value, int | float) and key not in ("step", "time"):
                    self.writer.add_scalar(f"train/{key}", value, run.step)

    def on_eval(self, run: RunInfo, results: Results, record: Mapping[str, Any]) -> None:
        if self.writer is not None:
            for task, metrics in results.items():
                for name, value in metrics.items():
                    if value.value is not None:
                        self.writer.add_scalar(f"eval/{task}/{name}", value.value, run.step)
            self.writer.flush()

    def on_error(self, run: RunInfo, error: BaseException) -> None:
        self.on_end(run, {})

    def on_end(self, run: RunInfo, summary: Mapping[str, Any]) -> None:
        if self.writer is not None:
            self.writer.close()


@contextmanager
def kernel_choices() -> Iterator[list[str]]:
    """Meanwhile, what the dispatcher of the ops says about its choices, of which it begins anew, is added to the list."""

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            kept.append(record.getMessage())

    kept: list[str] = []
    logger, handler = logging.getLogger("gem_core.ops"), Keep()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(min(level or logging.INFO, logging.INFO))
    begin_anew()
    try:
        yield kept
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def clock(seconds: float) -> str:
    """h:mm:ss."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


class Progress(Callback):
    """A progress bar on a terminal, a plain line at each log step elsewhere."""

    def __init__(self) -> None:
        self.bar: Any = None
        self.task: Any = None
        self.text = ""
        self.started, self.first = 0.0, 0

    def say(self, line: str) -> None:
        """One line, above the bar where there is one."""
        if self.bar is not None:
            self.bar.console.print(line, highlight=False, markup=False, emoji=False)
        else:
            print(line, flush=True)

    def on_start(self, run: RunInfo) -> None:
        self.started, self.first = time.monotonic(), run.step
        if not sys.stdout.isatty():
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}"), TimeRemainingColumn()
        )
        self.task = self.bar.add_task("step", total=run.total_steps, completed=run.step, text="")
        self.bar.start()

    def on_step(self, run: RunInfo, record: Mapping[str, Any] | None) -> None:
        if record is not None:
            self.text = _training_text(record)
        if self.bar is not None:
            self.bar.update(self.task, completed=run.step, text=self.text)
        elif record is not None:
            self.say(f"step {run.step}{f'/{run.total_steps}' if run.total_steps else ''}  {self.text}{self._left(run)}")

    def _left(self, run: RunInfo) -> str:
        done = run.step - self.first
        if not run.total_steps or not done:
            return ""
        return f"  left {clock((time.monotonic() - self.started) / done * (run.total_steps - run.step))}"

    def on_eval(self, run: RunInfo, results: Results, record: Mapping[str, Any]) -> None:
        for line in result_lines(results):
            self.say(f"eval {run.step}  {line}")

    def on_checkpoint(self, run: RunInfo, path: Path, seconds: float) -> None:
        self.say(f"checkpoint {path} ({seconds:.1f} s)")

    def on_error(self, run: RunInfo, error: BaseException) -> None:
        self._stop()

    def on_end(self, run: RunInfo, summary: Mapping[str, Any]) -> None:
        self._stop()

    def _stop(self) -> None:
        if self.bar is not None:
            self.bar.stop()


def _training_text(record: Mapping[str, Any]) -> str:
    parts = [f"loss {_number(record['loss'])}", f"lr {record['lr']:.3g}"]
    if record.get("samples_per_s") is not None:
        parts.append(f"{record['samples_per_s']:,.0f} samples/s")
    if record.get("mfu") is not None:
        parts.append(f"MFU {record['mfu']:.1%}")
    if record.get("data_wait") is not None and record["data_wait"] >= 0.05:
        parts.append(f"data wait {record['data_wait']:.0%}")
    if record.get("skipped"):
        parts.append(f"skipped {record['skipped']}")
    return "  ".join(parts)


def result_lines(results: Results) -> list[str]:
    """One line a task: its metrics, undefined ones with their reason, and the Bayes-optimal NE beside the model's."""
    lines = []
    for task, metrics in results.items():
        parts: list[str] = []
        reasons: dict[str | None, list[str]] = {}
        for name, value in metrics.items():
            if value.value is not None:
                parts.append(f"{'Bayes NE' if name == 'bayes_ne' else name} {value.value:.5f}")
            elif name != "bayes_ne":
                parts.append(f"{name} undefined")
                reasons.setdefault(value.reason, []).append(name)
        note = "".join(f"  ({', '.join(names)}: {reason})" for reason, names in reasons.items())
        lines.append(f"{task}: {'  '.join(parts)}{note}")
    return lines


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.5f}"
