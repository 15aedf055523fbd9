"""The update of AdamW as an op of its own kind: in place, without gradients, on one parameter a call.

PyTorch's fused kernel wants gradients in fp32 and leaves the copies of the weights that matrix products read to a pass of their own. An
implementation of the op "adamw" takes gradients in the copies' dtype, applies the clipping factor, and writes the copy too: every value
moves once. Implementations are `KernelSpec`s whose forward takes the problem and an `Update`, and gives (None, ()).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gem_core.ops import dispatch
from gem_core.ops.contract import Problem

OP = "adamw"


@dataclass(frozen=True, eq=False)
class Update:
    """One step of AdamW for ``parameter``, in place. All tensors are contiguous and on one device.

    ``parameter``, ``exp_avg`` and ``exp_avg_sq`` are fp32 of one shape, ``gradient`` fp32, bf16 or fp16 of that shape; ``copy``, where
    given, gets the new parameter in its own dtype. ``lr``, ``corrections [2]`` (1 - beta1^t, 1 - beta2^t) and ``scale`` (a factor of the
    gradient, None for 1) are fp32 on the device, ``ok`` is a bool there: where it is false nothing changes.
    """

    parameter: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    copy: Tensor | None
    lr: Tensor
    corrections: Tensor
    scale: Tensor | None
    ok: Tensor
    betas: tuple[float, float]
    eps: float
    decay: float


def implementation(device: str) -> Callable[[Update], object] | None:
    """The fastest implementation on such a device; None without one, or where the configuration's choice for all ops is not the fastest."""
    problem = Problem(OP, device, None, (("parameter", torch.float32),), ())
    spec = dispatch.fastest(problem)
    return None if spec is None else partial(spec.forward, problem)


def reference(u: Update) -> None:
    """The definition (Loshchilov and Hutter 2019, as `torch.optim.AdamW` computes it)."""
    gradient = u.gradient.to(u.parameter.dtype)
    gradient = gradient if u.scale is None else gradient * u.scale
    m = u.betas[0] * u.exp_avg + (1 - u.betas[0]) * gradient
    v = u.betas[1] * u.exp_avg_sq + (1 - u.betas[1]) * gradient.square()
    step = u.lr / u.corrections[0] * m / ((v / u.corrections[1]).sqrt() + u.eps)
    for own, new in ((u.parameter, u.parameter * (1 - u.lr * u.decay) - step), (u.exp_avg, m), (u.exp_avg_sq, v)):
        own.copy_(torch.where(u.ok, new, own))
    if u.copy is not None:
        u.copy.copy_(u.parameter)
