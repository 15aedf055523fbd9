"""Expert parallelism for experts whose outputs are summed (every sample uses every expert): ``y = sum_e expert_e(x)``.

The processes of an expert group hold different experts. Forward: all-gather x over the group, the own experts on the joint batch,
reduce-scatter (sum) of y. Backward: all-gather dy, reduce-scatter (sum) of dx. An expert's gradient is then the sum over the batches of the
group, while the average that follows divides by the processes that hold the expert, P times fewer than the world; so the gradient that
enters the experts is scaled by 1/P, and what leaves them by P.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.distributed.device_mesh import DeviceMesh

from gem_core.errors import ConfigError
from gem_core.model.experts import Elsewhere, SummedExperts
from gem_core.train.mesh import Mesh

# Newer releases of torch have renamed both.
_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def spread_experts(model: nn.Module, mesh: Mesh, devices: DeviceMesh, dtype: torch.dtype | None) -> list[nn.Module]:
    """Leave each process of an expert group its share of every layer's experts; returns those it keeps.

    :param devices: the mesh ``[replicate, shard, expert]``.
    :param dtype: of the activations while they travel; None: their own.
    :raises ConfigError: a layer whose experts cannot be divided evenly, or a model without any.
    """
    layers = {name: part for name, part in model.named_modules() if isinstance(part, SummedExperts)}
    if not layers:
        raise ConfigError(
            f"expert = {mesh.expert}, and {type(model).__name__} has no summed experts",
            where="parallel.expert",
            fix="set parallel.expert = 1",
        )
    for name, layer in layers.items():
        if len(layer.experts) % mesh.expert:
            raise ConfigError(
                f"{name} has {len(layer.experts)} experts: {len(layer.experts)} / {mesh.expert} processes is no whole number",
                where="parallel.expert",
                fix="choose a divisor of the experts, or change the number of experts of the model (its `experts`)",
            )
    group = devices.get_group("expert")
    rows = AgreedRows(group)
    model.register_forward_pre_hook(rows.agree)
    kept: list[nn.Module] = []
    place = mesh.coordinate("expert")
    for layer in layers.values():
        share = len(layer.experts) // mesh.expert
        mine = range(place * share, (place + 1) * share)
        own = [layer.experts[i] for i in mine]
        for i in range(len(layer.experts)):
            if i not in mine:
                layer.experts[i] = Elsewhere(layer.experts[i])
        layer.spread = SpreadExperts(own, group, rows, dtype)
        kept += own
    return kept


class AgreedRows:
    """Before every forward pass the processes of a group tell each other how many samples they have; collectives need equal sizes."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.count = 1

    @_disable_dynamo  # torch.compiler.disable would import the compiler, and triton with it, along with this module
    def agree(self, _module: nn.Module, inputs: Any) -> None:
        """A forward pre-hook of a module that is called on a batch. A host exchange: no device waits for it."""
        most = torch.tensor([max(1, inputs[0].size)])
        dist.all_reduce(most, dist.ReduceOp.MAX, self.group)
        self.count = int(most)


class SpreadExperts:
    """``[B, n, d] -> [B, tokens, d]``: the sum over all experts of the group."""

    def __init__(self, own: Sequence[nn.Module], group: dist.ProcessGroup, rows: AgreedRows, dtype: torch.dtype | None) -> None:
        self.own, self.group, self.rows, self.dtype = tuple(own), group, rows, dtype

    @_disable_dynamo
    def __call__(self, x: Tensor) -> Tensor:
        count, missing = x.shape[0], self.rows.count - x.shape[0]
        # Rows of zeros make sizes equal; their outputs are cut off again, so that their gradient is zero.
        even = torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x
        joint = _Join.apply(even, self.group, self.dtype)
        y = self.own[0](joint)
        for expert in self.own[1:]:
            y = y + expert(joint)
        return _Divide.apply(y, self.group, self.dtype)[:count]  # type: ignore[no-any-return]


class _Join(torch.autograd.Function):
    """All-gather of rows; backward reduce-scatter (sum), times the size of the group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dtype: torch.dtype | None) -> Tensor:
        ctx.group, ctx.dtype = group, dtype
        return _all_gather(x, group, dtype)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        return _reduce_scatter(dx, ctx.group, ctx.dtype) * ctx.group.size(), None, None


class _Divide(torch.autograd.Function):
    """Reduce-scatter (sum) of rows; backward all-gather, divided by the size of the group."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, group: dist.ProcessGroup, dtype: torch.dtype | None) -> Tensor:
        ctx.group, ctx.dtype = group, dtype
        return _reduce_scatter(y, group, dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return _all_gather(dy, ctx.group, ctx.dtype) / ctx.group.size(), None, None


def _all_gather(x: Tensor, group: dist.ProcessGroup, dtype: torch.dtype | None) -> Tensor:
    sent = x.to(dtype or x.dtype).contiguous()
    joint = sent.new_empty(sent.shape[0] * group.size(), *sent.shape[1:])
    _GATHER(joint, sent, group=group)
    return joint.to(x.dtype)


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup, dtype: torch.dtype | None) -> Tensor:
    sent = x.to(dtype or x.dtype).contiguous()
    own = sent.new_empty(sent.shape[0] // group.size(), *sent.shape[1:])
    _SCATTER(own, sent, group=group)
    return own.to(x.dtype)
