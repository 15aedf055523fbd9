"""Dense strategies ``fsdp`` and ``hsdp`` on PyTorch's FSDP2 (``fully_shard``).

Parameters are sharded over the axis ``shard`` and, in ``hsdp``, replicated over ``replicate``: gradients are reduce-scattered over the
first and all-reduced over the second. With ``expert`` > 1 every summed expert lives in the processes of its place on that axis and is
sharded over ``shard`` there; all other parameters are sharded over ``shard x expert``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
from pydantic import Field
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from gem_core.config import FrozenConfig
from gem_core.errors import ConfigError
from gem_core.plugins import manager
from gem_core.train.mesh import Mesh
from gem_parallel.dense.common import tables_of
from gem_parallel.dense.experts import spread_experts
from gem_parallel.dense.gather import use_collective
from gem_parallel.dense.gathered import quantise_gathers
from gem_parallel.mesh import data_mesh, dense_mesh

Kind = Literal["fp32", "bf16"]
_DTYPES = {"fp32": None, "bf16": torch.bfloat16}


class FsdpConfig(FrozenConfig):
    """``[parallel.fsdp]`` and ``[parallel.hsdp]``"""

    reshard_after_forward: bool = Field(True, description="free a layer's parameters after forward, gather them again in backward")
    keep_last: int = Field(1, ge=0, description="last layers that stay gathered for the backward pass, which begins with them")
    prefetch: int = Field(1, ge=0, description="layers gathered ahead of the one that computes, in forward and in backward")
    param_dtype: Kind = Field("fp32", description="axis shard: what the layers' parameters are gathered and used in; fp32 masters stay")
    reduce_dtype: Kind = Field("fp32", description="axes shard and replicate: what gradients are reduced in")
    expert_dtype: Kind = Field("fp32", description="axis expert: what activations and their gradients travel in; fp32: as they are")
    gather: str = Field("none", description="codec that the layers' matrices travel in over shard (mxfp8, say); none: in param_dtype")
    collective: str = Field(
        "default",
        description="back end of the gathers over shard: default; low-cta, zero-cta (NCCL, few or no SMs); copy-engine (copies, no SM)",
    )
    per_host: int | None = Field(None, gt=0, description="processes that count as one host for collective; None: by the hosts' names")
    accumulate: Literal["reduced", "whole"] = Field(
        "reduced", description="micro-batches: reduce the gradients of each one, or keep whole gradients and reduce once (more memory)"
    )


def build_fsdp(model: nn.Module, mesh: Mesh, config: FsdpConfig) -> nn.Module:
    """Shard ``model`` in place over ``shard`` (times ``expert``); in a world of one process it is returned as it is.

    :raises ConfigError: ``replicate`` > 1, or experts that cannot be spread.
    :raises DeviceError: several processes without a process group.
    """
    if mesh.replicate != 1:
        raise ConfigError(
            f'dense = "fsdp" shards over all {mesh.world} processes, but replicate = {mesh.replicate} asks for copies',
            where="parallel.replicate",
            fix='set parallel.replicate = 1, or choose dense = "hsdp"',
        )
    return _build(model, mesh, config)


def build_hsdp(model: nn.Module, mesh: Mesh, config: FsdpConfig) -> nn.Module:
    """Shard ``model`` in place over ``shard`` (times ``expert``) and keep ``replicate`` copies of that; any mesh is valid.

    :raises ConfigError: experts that cannot be spread.
    :raises DeviceError: several processes without a process group.
    """
    return _build(model, mesh, config)


def _build(model: nn.Module, mesh: Mesh, config: FsdpConfig) -> nn.Module:
    if mesh.world == 1:
        return model
    # Nothing writes into the outputs of a layer, which is what this warns of.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(\w+\) returned a view tensor")
    device = next(model.parameters()).device
    axes, data = dense_mesh(mesh, device.type), data_mesh(mesh, device.type)
    experts = spread_experts(model, mesh, axes, _DTYPES[config.expert_dtype]) if mesh.expert > 1 else []
    layers = layers_of(model)
    if config.param_dtype == "bf16" and layers:
        layers[0].register_forward_pre_hook(_need_autocast)
    codec = None if config.gather == "none" else manager().find("codec", config.gather)
    quantised: tuple[list[str], list[str]] = [], []
    units: list[tuple[FSDPModule, DeviceMesh]] = []

    def shard(part: nn.Module, over: DeviceMesh, reshard: bool) -> None:
        if codec is not None:
            for known, found in zip(quantised, quantise_gathers(part, codec, over.size(-1))):
                known += found
        units.append((fully_shard(part, mesh=over, mp_policy=inside, reshard_after_forward=reshard), over))

    inside = MixedPrecisionPolicy(_DTYPES[config.param_dtype], _DTYPES[config.reduce_dtype], cast_forward_inputs=False)
    outside = MixedPrecisionPolicy(None, _DTYPES[config.reduce_dtype], cast_forward_inputs=False)
    compiled = model._compiled_call_impl is not None
    if compiled:
        # A graph of the whole model would take the gathers of all layers into one; layer by layer they stay where they are.
        model._compiled_call_impl = None
    for i, layer in enumerate(layers):
        reshard = config.reshard_after_forward and i < len(layers) - config.keep_last
        for expert in experts:
            if any(part is expert for part in layer.modules()):
                shard(expert, _over(axes, mesh), reshard)
        if compiled:
            layer.compile(dynamic=True)
        shard(layer, _over(data, mesh), reshard)
    for expert in experts:
        if not isinstance(expert, FSDPModule):
            units.append((fully_shard(expert, mesh=_over(axes, mesh), mp_policy=outside), _over(axes, mesh)))
    found = tables_of(model)
    ignored = set(found[1].parameters()) if found else set()
    units.append((fully_shard(model, mesh=_over(data, mesh), mp_policy=outside, ignored_params=ignored), _over(data, mesh)))
    _prefetch(layers, config.prefetch)
    lines = _told(mesh, layers, experts, config, *quantised)
    if config.collective != "default":
        ahead = max(1, config.prefetch * max(1, len(units) // max(1, len(layers))))
        lines += use_collective(config.collective, units, ahead + 2, config.per_host)
    model.describe = lambda: lines  # type: ignore[assignment]
    if config.accumulate == "whole":
        model.no_sync = _no_sync(cast(FSDPModule, model))  # type: ignore[assignment]
    return model


def _told(
    mesh: Mesh, layers: Sequence[nn.Module], experts: Sequence[nn.Module], config: FsdpConfig, taken: Sequence[str], left: Sequence[str]
) -> list[str]:
    lines = [f"dense part: {len(layers)} layers sharded over {mesh.shard * mesh.expert} processes, {config.prefetch} gathered ahead"]
    if experts:
        lines.append(f"experts: {len(experts)} in this process, each sharded over {mesh.shard}")
    if config.gather != "none":
        lines.append(f"gathered in {config.gather}: {len(taken)} matrices; not {len(left)}, whose shards are no multiple of its blocks")
    return lines


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The units that are gathered one after another: the model's ``layers``. Everything else is one unit, gathered for the whole step."""
    layers = getattr(model, "layers", None)
    return list(layers) if isinstance(layers, nn.ModuleList) else []


def _over(devices: DeviceMesh, mesh: Mesh) -> DeviceMesh:
    """The axes of ``devices`` to shard and reduce over; one-dimensional where there are no copies."""
    return devices["shard"] if mesh.replicate == 1 else devices["replicate", "shard"]


def _prefetch(layers: Sequence[nn.Module], ahead: int) -> None:
    def sharded(some: Sequence[nn.Module]) -> list[FSDPModule]:
        return [part for layer in some for part in layer.modules() if isinstance(part, FSDPModule)]

    for i, layer in enumerate(layers):
        unit = cast(FSDPModule, layer)
        unit.set_modules_to_forward_prefetch(sharded(layers[i + 1 : i + 1 + ahead]))
        unit.set_modules_to_backward_prefetch(sharded(layers[max(0, i - ahead) : i][::-1]))


def _no_sync(model: FSDPModule) -> Any:
    @contextmanager
    def no_sync() -> Iterator[None]:
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)

    return no_sync


def _need_autocast(layer: nn.Module, _inputs: Any) -> None:
    device = next(layer.parameters()).device.type
    if not torch.is_autocast_enabled(device):
        raise ConfigError(
            'param_dtype = "bf16" gathers bf16 parameters, and the model computes in fp32',
            where="parallel.fsdp.param_dtype",
            fix='choose a precision recipe that computes in bf16 ([precision] recipe = "bf16"), or param_dtype = "fp32"',
        )
