"""What gem-kernels registers with gem-core."""

from __future__ import annotations

from gem_core import KernelSpec, hookimpl


class Plugin:
    """Hooks of gem-kernels."""

    gem_api = 1

    @hookimpl
    def gem_kernels(self) -> list[KernelSpec]:
        from gem_kernels import eager, triton

        return [*eager.specs(), *triton.specs()]


plugin = Plugin()
