"""Puts the application together: the core's commands, then the plug-ins'."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Annotated

import typer

from gem_core import plugins
from gem_core.__about__ import __version__
from gem_core.cli.groups import CommandGroups
from gem_core.errors import ConfigError

_HELP = """Train GEM-style ad recommendation models.

`gemrec train` with no argument runs the quick start. Docs of a command: `gemrec COMMAND --help`.
"""


def split_globals(argv: list[str]) -> tuple[list[str], bool, tuple[str, ...]]:
    """Take ``--debug`` and ``--no-plugin NAME`` out of ``argv``, wherever they stand: plug-ins decide which commands there are.

    Returns the remaining arguments, whether to debug, and the names of the plug-ins that are switched off.
    """
    rest: list[str] = []
    disabled: list[str] = []
    debug = False
    words = iter(argv)
    for word in words:
        if word == "--":
            rest += [word, *words]
        elif word == "--debug":
            debug = True
        elif word == "--no-plugin":
            name = next(words, None)
            if name is None:
                raise ConfigError("--no-plugin needs a name", fix="for example --no-plugin NAME; `gemrec plugins` lists the names")
            disabled.append(name)
        elif word.startswith("--no-plugin="):
            disabled.append(word.partition("=")[2])
        else:
            rest.append(word)
    return rest, debug, tuple(disabled)


def build(disabled: Iterable[str] = ()) -> typer.Typer:
    """The application with the commands of every plug-in but those in ``disabled``."""
    names = tuple(disabled)
    if names:
        plugins.reset(disabled=names)
    groups = CommandGroups(help=_HELP, add_completion=True)
    groups.top.callback()(_globals)
    for module in ("train", "eval", "report", "export", "plugins", "doctor", "config", "plugin", "bench"):
        importlib.import_module(f"gem_core.cli.{module}").register(groups)
    manager = plugins.manager()

    def turn(owner: str) -> None:
        groups.owner = owner

    manager.call("gem_commands", before=turn, failed=groups.withdraw, app=groups)
    return groups.assemble()


def _version(wanted: bool) -> None:
    if wanted:
        print(f"gemrec {__version__}")
        raise typer.Exit


def _globals(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.", is_eager=True, callback=_version)] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error. May stand anywhere.")] = False,
    no_plugin: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Leave a plug-in out. May stand anywhere.")] = None,
) -> None:
    del version, debug, no_plugin  # --version is eager; the others were taken by split_globals and stand here for --help
