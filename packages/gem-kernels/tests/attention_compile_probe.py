"""Compiles the attention kernels of benchmark rows for an architecture, without a GPU, and prints what the compiler made of them as JSON.

    TRITON_INTERPRET=0 python attention_compile_probe.py sm_90 self-1024-s0.5:gdpa:forward ...

A process of its own: where kernels are interpreted, they cannot be compiled. With ``lengths`` in place of a pass, the row's forward is
launched with two sets of lengths and batch sizes, and only the number of kernels is told.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import torch
from pipeline_rings import overrun

from gem_core.ops.contracts import GDPA
from gem_kernels.bench.attention_rows import ROWS, Data, Row, small
from gem_kernels.triton.attention.spec import specs
from gem_kernels.triton.common.launch import Compiled, compile_only


def run(row: Row, op: str, pass_: str, dtype: torch.dtype = torch.bfloat16) -> None:
    data = Data(row, "cpu", dtype=dtype)
    spec = next(s for s in specs() if (s.op, s.name) == (op, "triton"))
    problem, tensors = data.problem(op), tuple(data.tensors.values())
    if pass_ == "forward":
        spec.forward(problem, *tensors)
        return
    saved = tensors if op == "gdpa" else (*tensors, data.dout, torch.zeros(row.heads, data.dout.shape[0]))
    spec.backward(problem, saved, data.dout, tuple(data.tensors[n] is not None for n in GDPA.differentiable))


def told(built: Compiled) -> dict[str, object]:
    counts = {name: built.ptx.count(name) for name in ("wgmma.mma_async", "tcgen05.mma", "mma.sync", "cp.async.bulk.tensor")}
    meta = {k: v for k, v in built.meta.items() if k.startswith(("BLOCK", "num_"))}
    use = {name: getattr(built, name) for name in ("kernel", "registers", "stack", "spills", "shared", "warnings")}
    return {**use, "meta": meta, "counts": counts, "overrun": overrun(built.ttgir)}


def main(target: str, jobs: list[str]) -> None:
    rows = {r.name: r for r in ROWS}
    for job in jobs:
        name, op, pass_ = job.split(":")
        with compile_only(target) as built:
            if pass_ == "lengths":
                for batch in (2, 37):
                    run(replace(rows[name], batch=batch), op, "forward")
            else:
                run(small(rows[name]), op, pass_)
        kernels = [b for b in built if not b.kernel.startswith("tile_")]
        print(json.dumps({"job": job, "kernels": [told(b) for b in kernels], "launched": len(built)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
