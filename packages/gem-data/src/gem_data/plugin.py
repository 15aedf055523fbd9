"""What gem-data registers with gem-core."""

from __future__ import annotations


class Plugin:
    """Hooks of gem-data."""

    gem_api = 1


plugin = Plugin()
