"""What gem-data registers with gem-core."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gem_core.hookspecs import SourceSpec, hookimpl

if TYPE_CHECKING:
    from gem_core.cli.groups import CommandGroups


class Plugin:
    """Hooks of gem-data."""

    gem_api = 1

    @hookimpl
    def gem_sources(self) -> list[SourceSpec]:
        from gem_data.spec import FOLLOW, SPEC

        return [SPEC, FOLLOW]

    @hookimpl
    def gem_commands(self, app: CommandGroups) -> None:
        from gem_data.commands import register

        register(app)


plugin = Plugin()
