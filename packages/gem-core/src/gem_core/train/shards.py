"""Tensors that are spread over processes, seen as the boxes of the whole that this process holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gem_core.errors import CheckpointError
from gem_core.model.contract import Shards

if TYPE_CHECKING:
    from gem_core.train.runtime import Runtime

State = Tensor | Shards
"""What may stand for a tensor in a state: the whole, a DTensor, or `Shards`."""

_REPORT = "report it to the package of the strategy: its processes tell of parts that do not fit each other"


def here(tensor: Tensor) -> Tensor:
    """The values of ``tensor`` in this process: a DTensor's local tensor (the same storage), or the tensor itself. A local tensor of a
    strategy's own type tells its plain one as ``plain_values``."""
    if not is_dtensor(tensor):
        return tensor
    local: Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    return getattr(local, "plain_values", local)


def is_dtensor(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and hasattr(tensor, "device_mesh")


def copies(tensor: Tensor, world: int) -> int:
    """How many processes of ``world`` hold each value of ``tensor``."""
    if not is_dtensor(tensor):
        return world
    mesh, count = tensor.device_mesh, 1  # type: ignore[attr-defined]
    for size, placement in zip(mesh.shape, tensor.placements):  # type: ignore[attr-defined]
        count *= 1 if placement.is_shard() else size
    return count


def like(tensor: Tensor, local: Tensor) -> Shards:
    """``local``, this process's values of something that is spread as the DTensor ``tensor`` is."""
    (box,) = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
    parts = ((tuple(box.offsets), local),) if local.numel() else ()
    return Shards(tuple(tensor.shape), local.dtype, parts)


def shards_of(state: State) -> Shards:
    """Any state as `Shards` over the same storage; of a whole tensor, one box."""
    if isinstance(state, Shards):
        return state
    if is_dtensor(state):
        return like(state, here(state))
    return Shards(tuple(state.shape), state.dtype, (((0,) * state.dim(), state.detach()),))


def spread(state: State) -> bool:
    """Whether this process may hold less than the whole."""
    return isinstance(state, Shards) or is_dtensor(state)


def gather(states: Mapping[str, State], runtime: Runtime) -> dict[str, Tensor]:
    """The whole tensors on every rank, on the CPU: for tests and small models, since they travel pickled.

    :raises CheckpointError: boxes that two ranks hold differ, or do not cover the whole.
    """
    mine = {name: shards_of(state) for name, state in states.items()}
    sent = {name: (s.shape, s.dtype, [(at, t.cpu().clone()) for at, t in s.parts]) for name, s in mine.items()}
    whole: dict[str, Tensor] = {}
    filled: dict[str, Tensor] = {}
    for rank, received in enumerate(runtime.gather_objects(sent)):
        for name, (shape, dtype, parts) in received.items():
            if name not in whole:
                whole[name], filled[name] = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=torch.bool)
            for at, tensor in parts:
                box = box_of(at, tensor.shape)
                if filled[name][box].any() and not torch.equal(whole[name][box], tensor):
                    raise CheckpointError(f"rank {rank} holds other values of {name} at {at} than a rank before it", fix=_REPORT)
                whole[name][box] = tensor
                filled[name][box] = True
    gaps = [name for name, mask in filled.items() if not mask.all()]
    if gaps:
        raise CheckpointError(f"no rank holds all of {', '.join(gaps[:5])}", fix=_REPORT)
    return whole


def box_of(offsets: Iterable[int], sizes: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offsets, sizes))
