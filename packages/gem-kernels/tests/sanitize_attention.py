"""Every scheme and option of the attention kernels at small shapes, to be run under compute-sanitizer::

compute-sanitizer --tool memcheck  --error-exitcode 1 python packages/gem-kernels/tests/sanitize_attention.py
compute-sanitizer --tool racecheck --error-exitcode 1 python packages/gem-kernels/tests/sanitize_attention.py
"""

from __future__ import annotations

import torch

from gem_core import ops, plugins
from gem_core.ops import dispatch
from gem_core.ops.explain import problem_of
from gem_core.testing.kernel_cases import Draw, cases
from gem_kernels.triton import attention


def main() -> None:
    plugins.manager()
    ran = 0
    for spec in attention.specs():
        with dispatch.offering(spec):
            for name, case in cases(spec.op).items():
                if name == "many short samples" or name.startswith("width"):
                    continue
                call = case(Draw(torch.bfloat16, "cuda"))
                leaves = {n: t.detach().requires_grad_() for n, t in call.tensors.items()}
                if not spec.supports(problem_of(spec.op, **call.arguments(leaves))):
                    continue
                result = getattr(ops, spec.op)(**call.arguments(leaves), backend=spec.name)
                out = result[0] if isinstance(result, tuple) else result
                if out.requires_grad:
                    torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out), allow_unused=True)
                ran += 1
    torch.cuda.synchronize()
    print(f"{ran} calls, forward and backward")


if __name__ == "__main__":
    main()
