"""What gem-kernels-acme offers. Imported at every start of the command, so it imports nothing heavy before a hook is called."""

from __future__ import annotations

from gem_core import KernelSpec, hookimpl


class Plugin:
    """Hooks of gem-kernels-acme."""

    gem_api = 1

    @hookimpl
    def gem_kernels(self) -> list[KernelSpec]:
        from gem_kernels_acme import gdpa

        # Priority 1: chosen by itself before the reference (0) only; a configuration chooses it by name.
        return [KernelSpec("gdpa", "acme", gdpa.forward, gdpa.backward, gdpa.supports, priority=1)]


plugin = Plugin()
