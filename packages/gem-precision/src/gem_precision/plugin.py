"""What gem-precision registers with gem-core."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gem_core.hookspecs import CodecSpec, KernelSpec, RecipeSpec, hookimpl

if TYPE_CHECKING:
    from gem_core.cli.groups import CommandGroups


class Plugin:
    """Hooks of gem-precision."""

    gem_api = 1

    @hookimpl
    def gem_kernels(self) -> list[KernelSpec]:
        from gem_precision import attention

        return attention.specs()

    @hookimpl
    def gem_recipes(self) -> list[RecipeSpec]:
        from gem_precision import bf16, recipe

        return [RecipeSpec("bf16", bf16.Bf16Config, bf16.apply_bf16), *recipe.specs()]

    @hookimpl
    def gem_codecs(self) -> list[CodecSpec]:
        from gem_precision import codecs

        return codecs.specs()

    @hookimpl
    def gem_commands(self, app: CommandGroups) -> None:
        from gem_precision import commands

        commands.register(app)


plugin = Plugin()
