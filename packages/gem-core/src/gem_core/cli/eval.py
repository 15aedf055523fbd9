"""``gemrec eval``: metrics of a run's checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from gem_core.cli.groups import CommandGroups

Run = Annotated[Path, typer.Argument(help="Run folder of gemrec train.", show_default=False)]
Data = Annotated[list[str] | None, typer.Option("--data", metavar="PATH", help="Evaluate these files or URLs instead; may be repeated.")]
Split = Annotated[str, typer.Option("--split", help="Split of the run's data: eval, test or train.")]
Step = Annotated[int | None, typer.Option("--step", metavar="N", help="Checkpoint of this step; otherwise the newest.")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the run's configuration.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: CommandGroups) -> None:
    app.command("eval")(evaluate)


def evaluate(run: Run, data: Data = None, split: Split = "eval", step: Step = None, overrides: Set = None, as_json: Json = False) -> None:
    """Evaluate a trained model: pooled metrics of each task.

    Example: gemrec eval runs/mine --split test
    Example: gemrec eval runs/mine --data day-08.parquet --set 'eval.metrics=["ne", "auc", "ece"]' --json
    """
    from gem_core.cli.train import task_text
    from gem_core.train.offline import evaluate_run, run_config
    from gem_core.train.runfolder import clean, result_record

    changes = list(overrides or ())
    if data:
        source = run_config(run, changes).data.source
        # absolute, since the run's own paths may be relative to a root that it names
        paths = [path if "://" in path else str(Path(path).resolve()) for path in data]
        changes.append(f"data.{source}.{split}={json.dumps(paths)}")
    found = evaluate_run(run, split=split, overrides=changes, step=step)
    if not found.main:
        return
    record = {"run": str(run), "step": found.step, "split": split, "samples": found.samples, **result_record(found.results)}
    if as_json:
        print(json.dumps(clean(record), indent=1))
        return
    print(f"{run}, step {found.step}, {split}: {found.samples:,} samples")
    for task, metrics in record["tasks"].items():
        print(f"{task}: {task_text(metrics, record['undefined'][task])}")
