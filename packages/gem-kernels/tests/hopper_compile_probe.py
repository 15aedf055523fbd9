"""Compiles the Hopper kernels of benchmark rows for sm_90, without a GPU, and prints what the compiler made of them as JSON.

    TRITON_INTERPRET=0 python hopper_compile_probe.py self-1024-s0.5:gdpa:forward ...

A process of its own: where kernels are interpreted, they cannot be compiled.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import torch

from gem_core.ops.contracts import GDPA
from gem_kernels.bench import _dense_rows
from gem_kernels.bench.attention_rows import ROWS, Data, small
from gem_kernels.triton.attention.activations import IDS
from gem_kernels.triton.attention.inputs import Inputs
from gem_kernels.triton.attention.plan import plan
from gem_kernels.triton.common.launch import Compiled, compile_only
from gem_kernels.triton.hopper import launch
from gem_kernels.triton.hopper.spec import specs

INSTRUCTIONS = (
    "wgmma.mma_async", "cp.async.bulk.tensor.4d.shared", "cp.async.bulk.tensor.4d.global", "setmaxnreg", "red.global", "atom.global",
)  # fmt: skip


def attention(name: str, op: str, pass_: str) -> None:
    row = small(next(r for r in ROWS if r.name == name))
    data = Data(row, "cpu")
    spec = next(s for s in specs() if (s.op, s.name) == (op, "hopper-only"))
    problem, tensors = data.problem(op), tuple(data.tensors.values())
    if pass_ == "forward":
        spec.forward(problem, *tensors)
    else:
        saved = tensors if op == "gdpa" else (*tensors, data.dout, torch.zeros(row.heads, data.dout.shape[0]))
        spec.backward(problem, saved, data.dout, tuple(data.tensors[n] is not None for n in GDPA.differentiable))


def every_activation() -> None:
    """One kernel a pass that has them all, a head each."""
    row = replace(small(ROWS[0]), heads=len(IDS), dim=64, activation=tuple(IDS))
    data = Data(row, "cpu")
    spec = next(s for s in specs() if (s.op, s.name) == ("gdpa", "hopper-only"))
    problem, tensors = data.problem("gdpa"), tuple(data.tensors.values())
    spec.forward(problem, *tensors)
    spec.backward(problem, tensors, data.dout, tuple(data.tensors[n] is not None for n in GDPA.differentiable))


def few_keys() -> None:
    """The backward kernel of `gdpa` with up to 128 keys, which is taken with others that are compiled already."""
    data = Data(small(next(r for r in ROWS if r.name == "cross-1024x128-s0.5")), "cpu")
    inputs = Inputs(plan(data.problem("gdpa")), tuple(data.tensors.values()))
    assert launch.few(inputs.plan)
    launch._few(inputs, data.dout)


def norm_linear() -> None:
    case = next(r for r in _dense_rows.ROWS if r.name == "norm_linear-rms").build("cpu")
    next(s for s in specs() if s.op == "norm_linear").forward(case.problem(), *case.tensors())


def table_reads(ttgir: str) -> list[list[int]]:
    """Of each consumer: reads of the tile table before its loop over tiles, and in it for the next tile. A value that is read for the first
    tile alone was taken for dead by the compiler (`gem_kernels.triton.hopper.common.alive`). A walking consumer reads all in its loop."""
    _before, _found, rest = ttgir.partition("default {")
    consumers = rest.split("partition1(")[0].split("partition0(")
    loops = [" = scf.while " if " = scf.while " in c else " = scf.for " for c in consumers]
    return [[part.count(" : !tt.ptr<i32> ") for part in c.split(loop, 1)] for c, loop in zip(consumers, loops)]


def told(job: str, built: Compiled) -> dict[str, object]:
    use = {name: getattr(built, name) for name in ("kernel", "spills", "stack", "shared", "warnings")}
    return {"job": job, **use, "table_reads": table_reads(built.ttgir), "counts": {name: built.ptx.count(name) for name in INSTRUCTIONS}}


def main(jobs: list[str]) -> None:
    named = {"norm_linear": norm_linear, "every_activation": every_activation, "few_keys": few_keys}
    for job in jobs:
        # The activations do not depend on the tiles: one candidate is enough for them.
        with compile_only("sm_90", every_candidate=job != "every_activation") as built:
            named[job]() if job in named else attention(*job.split(":"))
        for b in built:
            if b.kernel.startswith("hopper"):
                print(json.dumps(told(job, b)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
