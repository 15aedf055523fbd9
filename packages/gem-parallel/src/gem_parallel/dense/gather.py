"""FSDP2's all-gathers by a back end of ``gem_collectives``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from gem_core.train.collective import Gatherer, GatherOptions
from gem_parallel import collectives


class ShardGather:
    """What `FSDPModule.set_custom_all_gather` takes: FSDP2 asks for memory, writes this process's part into it, and calls."""

    def __init__(self, gatherer: Gatherer) -> None:
        self.gatherer = gatherer

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.gatherer.allocate(int(size[0]), dtype)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        self.gatherer.gather(output_tensor)


def use_collective(name: str, units: Sequence[tuple[FSDPModule, DeviceMesh]], slots: int, per_host: int | None) -> list[str]:
    """Let ``units`` (with the meshes they are sharded over) gather by the back end ``name``; returns lines for the head of a run.

    :param slots: results that live at once: those gathered ahead, the one in use and the one before.
    """
    made: dict[Any, ShardGather] = {}
    lines = []
    for unit, mesh in units:
        group = mesh.get_group(mesh.ndim - 1)
        if group.size() == 1:
            continue
        if group not in made:
            device = torch.device(mesh.device_type, torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
            options = GatherOptions(device, collectives.topology(group, device, per_host), slots=slots)
            gatherer, told = collectives.gatherer(name, group, options)
            made[group] = ShardGather(gatherer)
            lines.append(f"gathers of the dense part: {told}")
        unit.set_custom_all_gather(made[group])  # type: ignore[arg-type]
    return lines
