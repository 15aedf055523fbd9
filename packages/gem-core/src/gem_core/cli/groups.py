"""Where commands come from: the groups that the core owns, and the top level, filled by the core and by plug-ins.

In a plug-in::

    @hookimpl
    def gem_commands(self, app):
        @app.group("data").command()
        def inspect(path: Path) -> None: ...

        @app.command()
        def plan(config: Path) -> None: ...
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.main import get_command_name

from gem_core.errors import PluginError
from gem_core.plugins import CORE

GROUPS = {
    "bench": "Measure training, its parts, kernels, low precision, reading and prediction.",
    "data": "Look at, convert and generate training data.",
    "kernels": "Tune kernels. `gemrec plugins --ops` lists them.",
    "precision": "Look at low-precision formats and recipes.",
    "config": "Show, describe and start configuration files.",
    "plugin": "Start a plug-in package.",
}
"""The groups of the command and their help. A plug-in adds commands to them; it cannot add a group beside them."""


class _Commands(typer.Typer):
    """A Typer application that knows who registered each command."""

    def __init__(self, owners: CommandGroups, path: str, **settings: Any) -> None:
        super().__init__(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown", **settings)
        self._owners, self._path = owners, path
        self.names: dict[str, str] = {}

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        decorate = super().command(name, **settings)

        def register(function: Any) -> Any:
            self._claim(name or get_command_name(function.__name__))
            return decorate(function)

        return register

    def add_typer(self, typer_instance: typer.Typer, *, name: str | None = None, **settings: Any) -> None:
        if name is None:
            raise PluginError("a group of commands was added without a name", fix='write add_typer(app, name="...")')
        self._claim(name)
        super().add_typer(typer_instance, name=name, **settings)

    def _claim(self, name: str) -> None:
        if name in self.names:
            raise PluginError(f"the command 'gemrec {self._path}{name}' is offered by {self.names[name]} and by {self._owners.owner}")
        self.names[name] = self._owners.owner

    def withdraw(self, owner: str) -> None:
        """Take back everything that ``owner`` registered."""
        gone = {name for name, of in self.names.items() if of == owner}
        self.registered_commands = [
            c for c in self.registered_commands if (c.name or get_command_name(getattr(c.callback, "__name__", ""))) not in gone
        ]
        self.registered_groups = [g for g in self.registered_groups if g.name not in gone]
        self.names = {name: of for name, of in self.names.items() if name not in gone}


class CommandGroups:
    """What ``gem_commands(app)`` receives. ``owner`` is the distribution whose turn it is."""

    def __init__(self, **settings: Any) -> None:
        self.owner = CORE
        self.top = _Commands(self, "", **settings)
        self._groups = {name: _Commands(self, f"{name} ", help=text) for name, text in GROUPS.items()}
        self.top.names = dict.fromkeys(GROUPS, CORE)

    def group(self, name: str) -> typer.Typer:
        """The group called ``name``, to add commands to.

        :raises PluginError: the core owns no such group.
        """
        if name not in self._groups:
            raise PluginError(f"there is no command group {name!r}; there are: {', '.join(GROUPS)}", fix="use one, or app.command()")
        return self._groups[name]

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        """Decorator that adds a command at the top level; takes what ``typer.Typer.command`` takes."""
        return self.top.command(name, **settings)

    def withdraw(self, owner: str) -> None:
        """Take back every command of ``owner``, whose registration failed half-way."""
        for app in (self.top, *self._groups.values()):
            app.withdraw(owner)

    def assemble(self) -> typer.Typer:
        """The whole application. A group that nobody filled says so when it is called, and is not listed."""
        for name, app in self._groups.items():
            if app.names:
                typer.Typer.add_typer(self.top, app, name=name)
            else:
                settings = {"allow_extra_args": True, "ignore_unknown_options": True}
                typer.Typer.command(self.top, name, hidden=True, context_settings=settings, add_help_option=False)(_empty(name))
        return self.top


def _empty(name: str) -> Callable[[], None]:
    def refuse() -> None:
        raise PluginError(
            f"no installed plug-in adds commands to 'gemrec {name}'", fix="install one that does; `gemrec plugins` lists them"
        )

    return refuse
