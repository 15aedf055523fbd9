"""Dense strategy ``ddp``: every process holds the whole dense part, gradients are averaged by PyTorch's DistributedDataParallel."""

from __future__ import annotations

import torch.distributed as dist
from pydantic import Field
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gem_core.config import FrozenConfig
from gem_core.errors import ConfigError, DeviceError
from gem_core.train.mesh import Mesh
from gem_parallel.dense.common import table_names


class DdpConfig(FrozenConfig):
    """``[parallel.ddp]``"""

    bucket_mb: int = Field(25, gt=0, description="gradients are reduced in buckets of this size while backward goes on")
    find_unused: bool = Field(False, description="for models that leave parameters out of some batches; costs a walk over the graph a step")


def build_ddp(model: nn.Module, mesh: Mesh, config: DdpConfig) -> nn.Module:
    """Wrap ``model``; in a world of one process it is returned as it is.

    Tables (``model.tables``) stay outside: the sparse strategy keeps them, and the built-in ``local`` one keeps equal replicas by sending
    every process's (row, gradient) pairs to all of them.

    :raises ConfigError: a mesh with a dense degree other than ``replicate``.
    :raises DeviceError: several processes without a process group.
    """
    check_mesh(mesh)
    if mesh.world == 1:
        return model
    if not dist.is_initialized():
        raise DeviceError(
            "there is no process group", fix="start the processes with torchrun, or call torch.distributed.init_process_group"
        )
    device = next(model.parameters()).device
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # type: ignore[no-untyped-call]
        model, table_names(model)
    )
    return DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        bucket_cap_mb=config.bucket_mb,
        gradient_as_bucket_view=True,
        find_unused_parameters=config.find_unused,
    )


def check_mesh(mesh: Mesh) -> None:
    """An inferred ``shard`` is the default of the configuration and means replicas here; one that was asked for is refused."""
    for axis in ("shard", "expert"):
        degree = getattr(mesh, axis)
        if degree != 1 and axis not in mesh.inferred:
            raise ConfigError(
                f'dense = "ddp" replicates the dense part on all {mesh.world} processes, but {axis} = {degree} asks to split it',
                where=f"parallel.{axis}",
                fix=f'set parallel.{axis} = 1 (or -1), or choose dense = "fsdp" or "hsdp"',
            )
