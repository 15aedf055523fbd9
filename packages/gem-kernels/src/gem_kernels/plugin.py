"""What gem-kernels registers with gem-core."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gem_core import KernelSpec, hookimpl

if TYPE_CHECKING:
    from gem_core.cli.groups import CommandGroups


class Plugin:
    """Hooks of gem-kernels."""

    gem_api = 1

    @hookimpl
    def gem_kernels(self) -> list[KernelSpec]:
        from gem_kernels import eager, native, peers, triton

        return [*eager.specs(), *native.specs(), *triton.specs(), *peers.specs()]

    @hookimpl
    def gem_commands(self, app: CommandGroups) -> None:
        from gem_kernels import commands

        commands.register(app)


plugin = Plugin()
