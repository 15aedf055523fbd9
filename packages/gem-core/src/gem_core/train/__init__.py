"""Training: ``gem_core.train(config)`` runs one, and this package holds the trainer's parts.

The package itself is callable, so that ``import gem_core.train`` and ``from gem_core import train`` give one and the same thing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, cast

from gem_core.hookspecs import CallbackSpec, RecipeSpec, StrategySpec

if TYPE_CHECKING:
    from gem_core.config import Config
    from gem_core.train.contract import Callback, RunResult


def builtin_recipes() -> list[RecipeSpec]:
    """What the core offers through ``gem_recipes``."""
    from gem_core.train import builtin

    return [RecipeSpec("fp32", builtin.Fp32Config, builtin.fp32)]


def builtin_dense_strategies() -> list[StrategySpec]:
    """What the core offers through ``gem_dense_strategies``."""
    from gem_core.train import builtin

    return [StrategySpec("single", builtin.SingleConfig, builtin.single)]


def builtin_sparse_strategies() -> list[StrategySpec]:
    """What the core offers through ``gem_sparse_strategies``."""
    from gem_core.train import builtin

    return [StrategySpec("local", builtin.LocalConfig, builtin.local)]


def builtin_callbacks() -> list[CallbackSpec]:
    """What the core offers through ``gem_callbacks``."""
    from gem_core.train import trackers

    return [
        CallbackSpec("mlflow", trackers.MLflowConfig, trackers.MLflow),
        CallbackSpec("wandb", trackers.WandbConfig, trackers.Wandb),
    ]


def quickstart_path() -> Path:
    """The configuration that ``gemrec train`` runs without an argument."""
    return Path(__file__).with_name("quickstart.toml")


class _CallableModule(ModuleType):
    """``gem_core.train`` is a package and also the function that runs a training."""

    def __call__(
        self,
        config: Config,
        *,
        run_dir: str | Path | None = None,
        resume: bool = False,
        overwrite: bool = False,
        callbacks: Sequence[Callback] = (),
        quiet: bool = False,
    ) -> RunResult:
        """Train as ``config`` says and return how it ended; under torchrun every process calls this.

        :param run_dir: the run folder; None: ``run.dir / run.name``.
        :param resume: continue the run in that folder from its newest checkpoint.
        :param overwrite: delete what the folder holds.
        :param callbacks: further callbacks, after those of the configuration.
        :param quiet: print nothing.
        :raises GemError: everything a user can cause; `NumericsError` and other `RunError` for a run that fails.
        """
        from gem_core.config import Config
        from gem_core.errors import ConfigError
        from gem_core.train.trainer import Trainer

        if not isinstance(config, Config):
            fix = "pass load_config('my.toml'), or gem_core.config.config_from_dict({...})"
            raise ConfigError(f"a training takes a Config, not {type(config).__name__}", where="gem_core.train", fix=fix)
        return Trainer(config, run_dir=run_dir, resume=resume, overwrite=overwrite, callbacks=callbacks, quiet=quiet).run()


train = cast(_CallableModule, sys.modules[__name__])
train.__class__ = _CallableModule
