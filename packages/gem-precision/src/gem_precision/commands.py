"""``gemrec precision``: which module computes in which precision, and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from gem_core.cli.groups import CommandGroups

Config = Annotated[Path | None, typer.Argument(help="TOML file; none: the defaults.", show_default=False)]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, as in precision.recipe=mxfp8.")]
Device = Annotated[str, typer.Option("--device", help="Decide for this device: cpu, or cuda for the one that is here.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: CommandGroups) -> None:
    app.group("precision").command()(explain)


def explain(config: Config = None, overrides: Set = None, device: Device = "cpu", as_json: Json = False) -> None:
    """Print every module that holds parameters or attention: its precision under the configuration's recipe, and why.

    The model is not built on the device and nothing is trained.

    Example: gemrec precision explain my.toml --set precision.recipe=mxfp8-attention
    """
    import torch

    from gem_core.config import load_config, resolve
    from gem_precision.explain import decisions

    rows = decisions(resolve(load_config(config, overrides or ())), torch.device(device))
    if as_json:
        print(json.dumps([{"module": m, "precision": p, "why": w} for m, p, w in rows], indent=2))
        return
    widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
    for module, precision, why in rows:
        print(f"{module:<{widths[0]}}  {precision:<{widths[1]}}  {why}")
