"""The arrangement of ranks (the core holds it, because the trainer builds it from ``[parallel]``), and its process groups."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gem_core.errors import DeviceError
from gem_core.train.mesh import DENSE, SPARSE, Mesh

__all__ = ["Mesh", "data_mesh", "dense_mesh", "sparse_mesh"]


def dense_mesh(mesh: Mesh, device_type: str) -> DeviceMesh:
    """``[replicate, shard, expert]`` over the world, expert innermost.

    :raises DeviceError: no process group of ``mesh.world`` processes.
    """
    return _device_mesh(mesh, device_type, (DENSE,))


def data_mesh(mesh: Mesh, device_type: str) -> DeviceMesh:
    """``[replicate, shard]`` for parameters that every expert rank uses: the expert axis is folded into shard.

    :raises DeviceError: no process group of ``mesh.world`` processes.
    """
    return _device_mesh(mesh, device_type, (("replicate",), ("shard", "expert")))


def sparse_mesh(mesh: Mesh, device_type: str) -> DeviceMesh:
    """``[model, replica]`` over the world, replica innermost.

    :raises DeviceError: no process group of ``mesh.world`` processes.
    """
    return _device_mesh(mesh, device_type, (SPARSE,))


def _device_mesh(mesh: Mesh, device_type: str, axes: tuple[tuple[str, ...], ...]) -> DeviceMesh:
    if not dist.is_initialized() or dist.get_world_size() != mesh.world:
        there = dist.get_world_size() if dist.is_initialized() else 0
        raise DeviceError(
            f"a mesh of {mesh.world} processes needs a process group of {mesh.world}, and there is "
            + (f"one of {there}" if there else "none"),
            fix="start the processes with torchrun, or call torch.distributed.init_process_group",
        )
    single = axes[0] if len(axes) == 1 else None
    names = single or tuple(group[0] for group in axes)
    shape = tuple(getattr(mesh, a) for a in single) if single else tuple(_product(mesh, group) for group in axes)
    return _shared(dist.group.WORLD, device_type, shape, names)


def _product(mesh: Mesh, axes: tuple[str, ...]) -> int:
    degree = 1
    for axis in axes:
        degree *= getattr(mesh, axis)
    return degree


@lru_cache(maxsize=32)
def _shared(world: dist.ProcessGroup, device_type: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """One mesh for all who ask for the same: every further process group costs communicators and memory on the device."""
    return DeviceMesh(device_type, torch.arange(dist.get_world_size()).view(shape), mesh_dim_names=names)
