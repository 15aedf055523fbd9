"""``gemrec train``: run a configuration, or the quick start."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gem_core.cli.groups import CommandGroups

if TYPE_CHECKING:
    from gem_core.train.contract import RunResult

Config = Annotated[Path | None, typer.Argument(help="TOML file; none: the quick start, on a generated log.", show_default=False)]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, as in train.steps=100.")]
RunDir = Annotated[Path | None, typer.Option("--run-dir", metavar="DIR", help="The run folder; otherwise run.dir/run.name.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue from the newest checkpoint in the run folder; given CONFIG, begin where there is none.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Delete what the run folder holds.")]
Profile = Annotated[bool, typer.Option("--profile", help="Profile five steps after the tenth: trace and summary in the run folder.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print the result only.")]


def register(app: CommandGroups) -> None:
    app.command()(train)


def train(
    config: Config = None,
    overrides: Set = None,
    run_dir: RunDir = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    profile: Profile = False,
    quiet: Quiet = False,
) -> None:
    """Train a model and evaluate it; everything about the run is in its folder afterwards.

    SIGINT or SIGTERM ends it after the current step with a checkpoint. On several processes: torchrun --no-python --nproc-per-node 4
    gemrec train my.toml

    Example: gemrec train my.toml --set train.steps=2000 --run-dir runs/mine
    """
    import gem_core.train
    from gem_core.config import load_config
    from gem_core.errors import CheckpointError
    from gem_core.train.offline import run_config

    if config is None and resume and run_dir is not None:
        if not run_dir.is_dir():  # without this the quick start would train under a mistyped name
            raise CheckpointError(
                "there is no run to continue",
                where=str(run_dir),
                fix=f"check the folder; --resume begins a run only of a named file: gemrec train my.toml --resume --run-dir {run_dir}",
            )
        loaded = run_config(run_dir, overrides or ())
    else:
        loaded = load_config(gem_core.train.quickstart_path() if config is None else config, overrides or ())
    callbacks = []
    if profile:
        from gem_core.train.profile import Profiler

        callbacks.append(Profiler())
    result = gem_core.train(loaded, run_dir=run_dir, resume=resume, overwrite=overwrite, callbacks=callbacks, quiet=quiet)
    if result.main:
        print("\n".join(report(result)))
        for profiled in callbacks:
            print(profiled.told(result.directory))


def report(result: RunResult) -> list[str]:
    """The lines that end a run: a task each, the model's NE beside the Bayes-optimal one where that is known."""
    from gem_core.train.logs import clock

    s = result.summary
    done = f"{result.status.replace('_', ' ')} after {result.steps:,} steps, {result.samples:,} samples, {clock(s['wall_s'])}"
    lines = [f"{done}: {result.directory}"]
    lines += [f"{task}: {task_text(metrics, s['undefined'].get(task, {}))}" for task, metrics in result.tasks.items()]
    if result.status == "interrupted":
        lines.append(f"continue with: gemrec train --resume --run-dir {result.directory}")
    return lines


def task_text(metrics: Mapping[str, float | None], undefined: Mapping[str, str]) -> str:
    """Values of one task in one line, with the share of the explainable gain ``(1 - NE) / (1 - Bayes NE)`` and why values are missing."""
    ne, bayes = metrics.get("ne"), metrics.get("bayes_ne")
    parts = []
    if ne is not None:
        told = (
            []
            if bayes is None
            else [f"Bayes {bayes:.4f}" + (f": {(1 - ne) / (1 - bayes):.0%} of the explainable gain" if bayes < 1 >= ne else "")]
        )
        told += ["worse than always predicting the base rate"] if ne > 1 else []
        parts.append(f"NE {ne:.4f}" + (f" ({'; '.join(told)})" if told else ""))
    parts += [f"{name} {value:.4f}" for name, value in metrics.items() if value is not None and name not in ("ne", "bayes_ne")]
    reasons: dict[str, list[str]] = {}
    for name, reason in undefined.items():
        if name != "bayes_ne":
            reasons.setdefault(reason, []).append(name)
    parts += [f"{', '.join(names)} undefined: {reason}" for reason, names in reasons.items()]
    return "  ".join(parts) or "not evaluated"
