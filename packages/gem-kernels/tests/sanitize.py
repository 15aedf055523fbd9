"""Every implementation of this package at small shapes, to be run under compute-sanitizer::

compute-sanitizer --tool memcheck  --error-exitcode 1 python packages/gem-kernels/tests/sanitize.py
compute-sanitizer --tool racecheck --error-exitcode 1 python packages/gem-kernels/tests/sanitize.py

Arguments, if any, are the names of the ops to run.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from gem_core import ops, plugins
from gem_core.ops import dispatch
from gem_core.ops.explain import problem_of
from gem_core.testing.kernel_cases import Call, Draw, cases
from gem_core.testing.kernels import flat
from gem_kernels import triton


def hopper_call(op: str) -> Call:
    """The conformance kit's cases are too narrow for the Hopper kernels."""
    draw = Draw(torch.bfloat16, "cuda")
    offsets = draw.offsets((0, 1, 65, 200, 128))
    more = {"activation": "silu"} if op == "gdpa" else {}
    fixed = {"q_offsets": offsets, "max_q_len": 200, "max_k_len": 200, "causal": True, **more}
    return Call({n: draw.packed(394, 2, 64) for n in ("q", "k", "v")}, lambda t: t | fixed, dict.fromkeys(("q", "k", "v"), 394), 394)


def run(call: Call, op: str, backend: str) -> None:
    leaves = {n: t.detach().requires_grad_() for n, t in call.tensors.items()}
    results: list[Tensor] = [r for r in flat(getattr(ops, op)(**call.arguments(leaves), backend=backend)) if r.requires_grad]
    if results:
        torch.autograd.grad(results, list(leaves.values()), [torch.ones_like(r) for r in results], allow_unused=True)


def main(wanted: list[str]) -> None:
    plugins.manager()
    ran = 0
    for spec in triton.specs():
        if wanted and spec.op not in wanted:
            continue
        with dispatch.offering(spec):
            calls = {name: case for name, case in cases(spec.op).items() if name != "many short samples" and not name.startswith("width")}
            if spec.name.startswith("hopper"):
                calls = {"hopper": lambda _draw, op=spec.op: hopper_call(op)}
            for case in calls.values():
                call = case(Draw(torch.bfloat16, "cuda"))
                if spec.supports(problem_of(spec.op, **call.arguments(call.tensors))):
                    run(call, spec.op, spec.name)
                    ran += 1
    torch.cuda.synchronize()
    print(f"{ran} calls, forward and backward")


if __name__ == "__main__":
    main(sys.argv[1:])
