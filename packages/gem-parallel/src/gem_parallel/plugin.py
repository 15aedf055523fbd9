"""What gem-parallel registers with gem-core."""

from __future__ import annotations


class Plugin:
    """Hooks of gem-parallel."""

    gem_api = 1


plugin = Plugin()
