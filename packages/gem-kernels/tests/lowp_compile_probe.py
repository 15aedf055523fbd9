"""Compiles the low-precision attention kernels for an architecture, without a GPU, and prints what the compiler made of them as JSON.

TRITON_INTERPRET=0 python lowp_compile_probe.py sm_90 gdpa:32 jagged_attention:128 ...
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import torch

from gem_core.ops.contract import OpPrecision
from gem_core.ops.contracts import GDPA
from gem_kernels.bench.attention_rows import ROWS, Data, small
from gem_kernels.triton.common.launch import compile_only
from gem_kernels.triton.lowp.spec import specs

COUNTED = ("wgmma.mma_async", "e4m3.e4m3", "tcgen05.mma", "block_scale", "mma.sync", "cvt.rn.satfinite.e4m3x2")


def main(target: str, jobs: list[str]) -> None:
    row = small(next(r for r in ROWS if r.name == "self-1024-s0.5"))
    for job in jobs:
        op, block = job.split(":")
        data = Data(row, "cpu", dtype=torch.bfloat16)
        spec = next(s for s in specs() if s.op == op)
        problem = replace(data.problem(op), precision=OpPrecision(block=(int(block), int(block))))
        tensors = tuple(data.tensors.values())
        with compile_only(target) as built:
            answer = spec.supports(problem)
            assert answer, answer.reason
            spec.forward(problem, *tensors)
            saved = tensors if op == "gdpa" else (*tensors, data.dout, torch.zeros(row.heads, data.dout.shape[0]))
            spec.backward(problem, saved, data.dout, tuple(data.tensors[n] is not None for n in GDPA.differentiable))
        ours = [b for b in built if b.kernel.startswith(("lowp", "quantize_rows"))]
        told = [
            {"kernel": b.kernel, "registers": b.registers, "spills": b.spills, "stack": b.stack, "shared": b.shared, "warnings": b.warnings,
             "counts": {name: b.ptx.count(name) for name in COUNTED}, "meta": b.meta}
            for b in ours
        ]  # fmt: skip
        print(json.dumps({"job": job, "kernels": told, "all": sorted({b.kernel for b in built})}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
