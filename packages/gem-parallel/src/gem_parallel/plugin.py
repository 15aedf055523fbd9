"""What gem-parallel registers with gem-core."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gem_core.hookspecs import CallbackSpec, CollectiveSpec, LadderSpec, StrategySpec, hookimpl

if TYPE_CHECKING:
    from gem_core.cli.groups import CommandGroups


class Plugin:
    """Hooks of gem-parallel."""

    gem_api = 1

    @hookimpl
    def gem_dense_strategies(self) -> list[StrategySpec]:
        from gem_parallel.dense import ddp, fsdp

        return [
            StrategySpec("ddp", ddp.DdpConfig, ddp.build_ddp, averages=ddp.check_mesh),
            StrategySpec("fsdp", fsdp.FsdpConfig, fsdp.build_fsdp),
            StrategySpec("hsdp", fsdp.FsdpConfig, fsdp.build_hsdp),
        ]

    @hookimpl
    def gem_sparse_strategies(self) -> list[StrategySpec]:
        from gem_parallel import sparse

        return sparse.specs()

    @hookimpl
    def gem_collectives(self) -> list[CollectiveSpec]:
        from gem_parallel import collectives

        return collectives.specs()

    @hookimpl
    def gem_ladders(self) -> list[LadderSpec]:
        from gem_parallel.bench import scaling

        return [scaling.SPEC]

    @hookimpl
    def gem_callbacks(self) -> list[CallbackSpec]:
        from gem_parallel.recompute import SPEC

        return [SPEC]

    @hookimpl
    def gem_commands(self, app: CommandGroups) -> None:
        from gem_parallel.plan.command import register

        register(app)


plugin = Plugin()
