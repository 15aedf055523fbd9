"""``gemrec plugins``: what is installed, what it offers, and what is wrong with it."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from gem_core.cli.groups import CommandGroups


def register(app: CommandGroups) -> None:
    app.command()(plugins)


def plugins(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ops: Annotated[bool, typer.Option("--ops", help="Print the implementations of every op, and why one would be passed over.")] = False,
) -> None:
    """List the installed plug-ins and what they offer.

    Example: gemrec plugins --json
    """
    if ops:
        _ops(as_json)
        return
    from gem_core.plugins import manager

    status = manager().status()
    if as_json:
        print(json.dumps([dataclasses.asdict(s) for s in status], indent=2))
        return
    for s in status:
        print(f"{s.name} {s.version}  {s.state}" + (f": {s.reason}" if s.reason else ""))
        print(f"  api {s.api if s.api is not None else '-'}; hooks: {', '.join(s.hooks) or 'none'}")
        for kind, names in s.offers.items():
            print(f"  {kind.replace('_', ' ')}: {', '.join(names)}")


def _ops(as_json: bool) -> None:
    from gem_core.ops.dispatch import table

    rows = table()
    if as_json:
        print(json.dumps(rows, indent=2))
