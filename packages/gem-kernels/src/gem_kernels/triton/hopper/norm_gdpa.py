"""Backward pass of `norm_gdpa` on Hopper: the portable passes around `gdpa`, which adds dQ to dO."""

from __future__ import annotations

from torch import Tensor

from gem_core.ops.contract import Problem
from gem_kernels.triton.attention.inputs import Inputs
from gem_kernels.triton.attention.plan import plan
from gem_kernels.triton.common import tune
from gem_kernels.triton.common.configs import choose
from gem_kernels.triton.dense import norm_gdpa as portable
from gem_kernels.triton.dense.norm_gdpa import Gdpa, Saved
from gem_kernels.triton.hopper import launch as attention


def backward(problem: Problem, saved: Saved, dout: Tensor, needs: tuple[bool, ...], gdpa: Gdpa) -> Saved:
    """See `gem_kernels.triton.dense.norm_gdpa.backward`."""
    return portable.backward(problem, saved, dout, needs, gdpa, _adding)


def _adding(problem: Problem, tensors: Saved, do: Tensor) -> Saved | None:
    """dK and dV of `gdpa`, its dQ added to ``do`` in place, by the kernel for few keys, which reads dO once; None, and nothing is done,
    where another kernel is chosen."""
    p = plan(problem)
    x = Inputs(p, tensors)
    if not attention.few(p) or attention._nothing(x) or tune.forced():
        return None
    name, facts = "hopper.backward", (*p.facts, ("only", False))
    config = choose(name, facts, x.info, lambda: attention.candidates(name, p, False), lambda _: None)
    if not config["GLUON"] or not config["FUSED"]:
        return None
    attention._by_box(x)
    return attention._few(x, do, do)[1:]
