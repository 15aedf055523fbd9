"""What gem-data-acme offers. Imported at every start of the command, so it imports nothing heavy before a hook is called."""

from __future__ import annotations

from gem_core import SourceSpec, hookimpl


class Plugin:
    """Hooks of gem-data-acme."""

    gem_api = 1

    @hookimpl
    def gem_sources(self) -> list[SourceSpec]:
        from gem_data_acme.source import SqliteConfig, build

        return [SourceSpec("sqlite", SqliteConfig, build)]


plugin = Plugin()
