"""The dense strategy ddp, with the built-in local tables as replicas."""

from __future__ import annotations

from typing import ClassVar

import pytest
from torch import nn

from gem_core.errors import ConfigError, DeviceError
from gem_core.plugins import manager
from gem_core.testing.strategies import StrategyConformance
from gem_parallel import Mesh
from gem_parallel.dense.ddp import DdpConfig, build_ddp


class TestDdp(StrategyConformance):
    parallel: ClassVar = {"dense": "ddp"}
    worlds = (2,)


class TestDdpDenseTableGradients(StrategyConformance):
    parallel: ClassVar = {"dense": "ddp", "ddp": {"bucket_mb": 1}, "local": {"gradients": "dense"}}
    worlds = (3,)


def test_it_is_offered_by_name():
    assert manager().find("dense_strategy", "ddp").build is build_ddp


def test_one_process_needs_no_wrapping():
    model = nn.Linear(2, 2)
    assert build_ddp(model, Mesh(1), DdpConfig()) is model


@pytest.mark.parametrize(("axis", "degrees"), [("shard", {"shard": 2, "replicate": 2}), ("expert", {"expert": 4, "shard": 1})])
def test_a_mesh_that_splits_the_dense_part_is_refused(axis, degrees):
    with pytest.raises(ConfigError, match=f"{axis} = {degrees[axis]} asks to split") as caught:
        build_ddp(nn.Linear(2, 2), Mesh(4, **degrees), DdpConfig())
    assert caught.value.where == f"parallel.{axis}"


def test_several_processes_need_a_process_group():
    with pytest.raises(DeviceError, match="torchrun"):
        build_ddp(nn.Linear(2, 2), Mesh(2), DdpConfig())
