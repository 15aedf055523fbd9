"""``gemrec config``: show a resolved configuration, describe what there is, and start a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from gem_core.cli.groups import CommandGroups
from gem_core.errors import ConfigError

Config = Annotated[Path | None, typer.Argument(help="TOML file; none: the defaults.", show_default=False)]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, as in train.steps=100.")]


def register(app: CommandGroups) -> None:
    group = app.group("config")
    group.command()(show)
    group.command()(schema)
    group.command()(init)


def show(config: Config = None, overrides: Set = None) -> None:
    """Print the configuration with every default and every option of the chosen plug-ins, as TOML.

    Example: gemrec config show my.toml --set model.preset=small
    """
    from gem_core.config import dump_toml, load_config, resolve

    print(dump_toml(resolve(load_config(config, overrides or ())).config), end="")


def schema() -> None:
    """Print the JSON schema of the configuration, including the tables of installed plug-ins.

    Example: gemrec config schema > gem.schema.json
    """
    from gem_core.config.describe import json_schema

    print(json.dumps(json_schema(), indent=2))


def init(
    path: Annotated[Path, typer.Argument(help="File to write.")] = Path("gem.toml"),
    overrides: Set = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Write a configuration file to start from: every key with its default and a comment.

    Example: gemrec config init my.toml --set model.preset=tiny
    """
    from gem_core.config import load_config
    from gem_core.config.describe import starter_toml

    text = starter_toml(load_config(None, overrides or ()))
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError("the file exists already", where=str(path), fix="choose another name, or overwrite it with --force") from None
    except OSError as fault:
        raise ConfigError(f"the file cannot be written: {fault.strerror}", where=str(path), fix="name another file") from None
    print(f"wrote {path}; try: gemrec train {path}")
