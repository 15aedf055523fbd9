"""What gem-kernels registers with gem-core."""

from __future__ import annotations


class Plugin:
    """Hooks of gem-kernels."""

    gem_api = 1


plugin = Plugin()
