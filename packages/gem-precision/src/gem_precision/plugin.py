"""What gem-precision registers with gem-core."""

from __future__ import annotations

from gem_core.hookspecs import KernelSpec, RecipeSpec, hookimpl


class Plugin:
    """Hooks of gem-precision."""

    gem_api = 1

    @hookimpl
    def gem_kernels(self) -> list[KernelSpec]:
        from gem_precision import attention

        return attention.specs()

    @hookimpl
    def gem_recipes(self) -> list[RecipeSpec]:
        from gem_precision import bf16

        return [RecipeSpec("bf16", bf16.Bf16Config, bf16.apply_bf16)]


plugin = Plugin()
