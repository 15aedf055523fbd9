"""The recipe and strategies of a run in one process: ``fp32``, ``single``, ``local``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from pydantic import Field
from torch import Tensor, nn

from gem_core.config.base import FrozenConfig
from gem_core.errors import ConfigError
from gem_core.hookspecs import Guard
from gem_core.model.contract import TableSet
from gem_core.model.tables import LocalTables
from gem_core.train.contract import RecipeContext
from gem_core.train.mesh import Mesh


class Fp32Config(FrozenConfig):
    """``[precision.fp32]``: no options."""


class PlainGuard:
    """Guard of a recipe that has nothing to watch: it only tells the precision of each site."""

    capturable = True

    def __init__(self, sites: Sequence[tuple[str, str, str]]) -> None:
        self.sites = tuple(sites)

    def describe(self) -> Sequence[tuple[str, str, str]]:
        return self.sites

    def on_step(self, step: int, loss: Tensor) -> Mapping[str, Any]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def fp32(module: nn.Module, config: Fp32Config, context: RecipeContext) -> Guard:
    """Leaves the module as it is."""
    return PlainGuard([(name, "fp32", "recipe fp32") for name in sites(module)])


def sites(module: nn.Module) -> list[str]:
    """Names of the modules that own parameters themselves."""
    return [name for name, part in module.named_modules() if next(part.parameters(recurse=False), None) is not None]


class SingleConfig(FrozenConfig):
    """``[parallel.single]``: no options."""


def single(model: nn.Module, mesh: Mesh, config: SingleConfig) -> nn.Module:
    """The model itself, in one process."""
    if mesh.world > 1:
        raise ConfigError(
            f'dense = "single" is for one process, and {mesh.world} were started',
            where="parallel.dense",
            fix='choose a strategy for several processes (dense = "ddp", say; `gemrec plugins` lists them), or start one',
        )
    return model


class LocalConfig(FrozenConfig):
    """``[parallel.local]``"""

    gradients: str = Field("sparse", pattern="^(sparse|dense)$", description="sparse: only touched rows have gradients")


def local(tables: TableSet, mesh: Mesh, config: LocalConfig) -> nn.Module:
    """All tables in every process. Over several, each holds a replica: rank 0's initial values, and equal updates afterwards because the
    trainer's row-wise AdaGrad sends every (row, gradient) pair to all ranks. Meant for tables that fit one device."""
    held = LocalTables(tables, sparse=config.gradients == "sparse")
    if mesh.world > 1:
        for _, tensor in held.state_items():
            dist.broadcast(tensor.detach(), 0)
    return held
