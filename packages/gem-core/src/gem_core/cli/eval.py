"""``gemrec eval``: metrics of a run's checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from gem_core.cli.groups import CommandGroups

Run = Annotated[Path, typer.Argument(help="Run folder of gemrec train.", show_default=False)]
Data = Annotated[list[str] | None, typer.Option("--data", metavar="PATH", help="Evaluate these files or URLs instead; may be repeated.")]
Split = Annotated[str, typer.Option("--split", help="Split of the run's data: eval, test or train.")]
Step = Annotated[int | None, typer.Option("--step", metavar="N", help="Checkpoint of this step; otherwise the newest.")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the run's configuration.")]
By = Annotated[
    list[str] | None,
    typer.Option("--by", metavar="WHAT", help="Also by day, warm, warm:FEATURE, or the values of a column; may be repeated."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: CommandGroups) -> None:
    app.command("eval")(evaluate)


def evaluate(
    run: Run, data: Data = None, split: Split = "eval", step: Step = None, by: By = None, overrides: Set = None, as_json: Json = False
) -> None:
    """Evaluate a trained model: pooled metrics of each task, of all samples and by slices.

    A sample is warm if training has updated the table rows of all its ids (warm:FEATURE: of that feature's).

    Example: gemrec eval runs/mine --split test

    Example: gemrec eval runs/mine --data day-08.parquet --set 'eval.metrics=["ne", "auc", "ece"]' --json

    Example: gemrec eval runs/mine --by day --by position --by warm:item
    """
    from gem_core.cli.train import task_text
    from gem_core.metrics.contract import result_record
    from gem_core.train.offline import evaluate_run, run_config
    from gem_core.train.runfolder import clean

    changes = list(overrides or ())
    if data:
        source = run_config(run, changes).data.source
        # absolute, since the run's own paths may be relative to a root that it names
        paths = [path if "://" in path else str(Path(path).resolve()) for path in data]
        changes.append(f"data.{source}.{split}={json.dumps(paths)}")
    found = evaluate_run(run, split=split, overrides=changes, step=step, by=by or ())
    if not found.main:
        return
    record = {"run": str(run), "step": found.step, "split": split, "samples": found.samples, **result_record(found.results)}
    if by:
        record["slices"] = found.slices
    if as_json:
        print(json.dumps(clean(record), indent=1))
        return
    print(f"{run}, step {found.step}, {split}: {found.samples:,} samples")
    for task, metrics in record["tasks"].items():
        print(f"{task}: {task_text(metrics, record['undefined'][task])}")
    for name, slices in found.slices.items():
        print("\n".join(["", *slice_lines(name, slices)]))


def slice_lines(by: str, slices: Mapping[str, Any]) -> list[str]:
    """An aligned table with a line a slice and task; a metric without a value shows a letter, and the reasons follow below."""
    reasons: dict[str, str] = {}
    metrics = list(dict.fromkeys(m for s in slices.values() for values in s["tasks"].values() for m in values if m != "bayes_ne"))
    rows = [[by, "samples", "task", *metrics]]
    for label, found in slices.items():
        for i, (task, values) in enumerate(found["tasks"].items()):
            cells = []
            for metric in metrics:
                value = values.get(metric)
                if value is None:
                    reason = found["undefined"][task].get(metric) or "not computed"
                    cells.append(f"({reasons.setdefault(reason, chr(ord('a') + len(reasons)))})")
                else:
                    cells.append(f"{value:.4f}")
            rows.append([label if not i else "", f"{found['samples']:,}" if not i else "", task, *cells])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    left = (0, 2)
    lines = ["  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))).rstrip() for row in rows]
    return [*lines, *(f"({letter}) undefined: {reason}" for reason, letter in reasons.items())]
