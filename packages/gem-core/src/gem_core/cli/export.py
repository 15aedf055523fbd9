"""``gemrec export``: a run as a folder that torch alone can serve from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from gem_core.cli.eval import Run, Set, Step
from gem_core.cli.groups import CommandGroups

Folder = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write; must not hold anything.", show_default=False)]
Tables = Annotated[Literal["safetensors", "parquet"], typer.Option("--tables", help="Form of the embedding tables.")]
Device = Annotated[Literal["cpu", "cuda"], typer.Option("--device", help="Where the program will run.")]


def register(app: CommandGroups) -> None:
    app.command()(export)


def export(run: Run, out: Folder, step: Step = None, tables: Tables = "safetensors", device: Device = "cpu", overrides: Set = None) -> None:
    """Write a trained model as a torch.export program, its embedding tables and a manifest: served without this package.

    Retrieval models give the query tower and the vectors of all items. The program computes in fp32 in plain torch ops.

    Example: gemrec export runs/mine --out package
    """
    from gem_core.export.package import export_run

    done = export_run(run, out, step=step, tables=tables, device=device, overrides=overrides or ())
    for name, size in done.files.items():
        print(f"{out / name}: {size / 2**20:,.2f} MiB")
    if done.recipe != "fp32":
        print(f"the run was trained with the recipe {done.recipe}; the program computes in fp32")
    print(f"{done.kind} model, step {done.step}; serving example: docs/examples/serving")
