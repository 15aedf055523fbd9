"""``gemrec distill``: the student's files with the teacher's predictions as columns, then the student's training."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from gem_core.config import load_config, resolve
from gem_core.config.load import source_config
from gem_core.errors import ConfigError, DataError
from gem_core.train.predict import Predictor, predictor
from gem_core.train.runfolder import RunFolder
from gem_data.config import FollowConfig, ParquetConfig
from gem_data.files import DataFile, find_files
from gem_data.predict import write_predictions
from gem_data.writer import write_text

if TYPE_CHECKING:
    from gem_core.train.contract import RunResult

COLUMN = "teacher"
"""The teacher's probability of a task is in the column ``<task>_teacher``."""


def distill(
    teacher: Path,
    student: Path,
    *,
    scores: Path,
    run_dir: Path | None = None,
    overrides: Iterable[str] = (),
    step: int | None = None,
    overwrite: bool = False,
    quiet: bool = False,
) -> RunResult:
    """Write the student's training files with the teacher's predictions below ``scores``, and train the student with ``[train.distill]``.

    Files that hold this teacher's predictions of unchanged files already are used as they are.

    :raises ConfigError: the student does not train on Parquet files, shares no task with the teacher, or would train in its run folder.
    :raises CheckpointError: the run folder is not free.
    """
    import gem_core

    given = list(overrides)
    config = load_config(student, given)
    options = source_config(config)
    if not isinstance(options, ParquetConfig) or isinstance(options, FollowConfig):
        raise ConfigError(
            f"the source {config.data.source!r} has no files for the teacher to predict",
            where="data.source",
            fix='set source = "parquet"; a followed log gets the column where it is written, by gemrec predict; set train.distill.teacher',
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "the teacher predicts in one process",
            where="gemrec distill",
            fix="let one process write the scores, then train the student by torchrun gemrec train with [train.distill.teacher]",
        )
    resolve(config)  # predicting takes long, and whatever stands against training is to be known before
    _check_free(run_dir or Path(config.run.dir) / config.run.name, teacher, overwrite)
    with predictor(teacher, overrides=[f"run.device={json.dumps(config.run.device)}"], step=step) as model:
        tasks = [task for task in model.tasks if task in config.features.labels]
        if not tasks:
            raise ConfigError(
                f"the teacher predicts {', '.join(model.tasks)}, the student learns {', '.join(config.features.labels)}",
                where=str(teacher),
                fix="give the tasks one name in both configurations",
            )
        # A teacher that was trained again in its folder has the same steps.
        sums = RunFolder(teacher).checkpoints.load(model.step).meta["crc32"]
        about = {"teacher": str(teacher.resolve()), "step": model.step, "crc32": sums, "tasks": tasks}
        written = [
            _scored(model, find_files([path], options.root, options.section), scores / f"train-{i}.parquet", about, quiet)
            for i, path in enumerate(options.paths("train"))
        ]
    columns = [f"train.distill.teacher.{task}={task}_{COLUMN}" for task in tasks]
    paths = json.dumps([str(path.resolve()) for path in written])
    changes = [*given, *columns, f"data.{config.data.source}.train={paths}"]
    result: RunResult = gem_core.train(load_config(student, changes), run_dir=run_dir, overwrite=overwrite, quiet=quiet)
    return result


def _check_free(path: Path, teacher: Path, overwrite: bool) -> None:
    """:raises ConfigError: the student's run folder is the teacher's.
    :raises CheckpointError: it holds another run that is not to be overwritten."""
    if path.resolve() == teacher.resolve():
        raise ConfigError(
            "the student would train in the teacher's run folder", where=str(path), fix="give another one: --run-dir or --set run.name=…"
        )
    folder = RunFolder(path)
    try:
        folder.check(resume=False, overwrite=overwrite)
    finally:
        folder.release()


def _check_ours(out: Path) -> None:
    """:raises DataError: a file of that name is there that holds no teacher's predictions."""
    if out.is_file():
        with suppress(pa.ArrowException):
            if any(name.endswith(f"_{COLUMN}") for name in pq.read_schema(out).names):
                return
        raise DataError("the scores would take the place of a file that is none", where=str(out), fix="choose another --scores")


def _scored(model: Predictor, files: list[DataFile], out: Path, about: dict[str, Any], quiet: bool) -> Path:
    """The rows of ``files``, with every column and the teacher's, in one file."""
    record = {**about, "files": [[file.path, file.size, file.modified] for file in files]}
    told = out.with_suffix(".json")
    if out.is_file() and told.is_file():
        with suppress(ValueError):
            if json.loads(told.read_text()) == record:
                return out
    _check_ours(out)
    with suppress(OSError):  # writing the first file tells of a folder that cannot be
        told.unlink()
    columns = [*files[0].schema.names, *(key for key, _ in files[0].partition if key not in files[0].schema.names)]
    done = write_predictions(model, files, out, columns=columns, tasks=about["tasks"], result=COLUMN)
    write_text(told, json.dumps(record, indent=1) + "\n")
    if not quiet:
        print(f"{out}: {done.rows:,} rows with the teacher's predictions (step {model.step})")
    return out
