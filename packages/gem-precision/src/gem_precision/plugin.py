"""What gem-precision registers with gem-core."""

from __future__ import annotations


class Plugin:
    """Hooks of gem-precision."""

    gem_api = 1


plugin = Plugin()
