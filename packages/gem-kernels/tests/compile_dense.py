"""Compiles the dense, block and jagged kernels for one architecture, without a GPU, and prints what became of them as JSON lines.

    TRITON_INTERPRET=0 python compile_dense.py sm_90 [LABEL ...]

Run by test_triton_dense_compile.py in a process of its own, because Triton interprets or compiles for a whole process. The shapes are those
of the benchmark, whose configurations are the committed ones (on a chip without a table, the best guess).
"""

from __future__ import annotations

import json
import re
import sys

import torch
from pipeline_rings import overrun

from gem_core import ops
from gem_core.jagged import lengths_to_offsets
from gem_core.ops import dispatch, row_sums
from gem_core.ops.contract import Problem
from gem_core.ops.explain import problem_of
from gem_kernels.triton import block, dense, jagged
from gem_kernels.triton.common.launch import Compiled, compile_only, launch
from gem_kernels.triton.dense.norm_gdpa_kernels import norm_gdpa_stats_kernel
from gem_kernels.triton.hopper import block as hopper_block
from gem_kernels.triton.hopper import linear_norm as hopper_linear_norm
from gem_kernels.triton.hopper import mlp as hopper_mlp
from gem_kernels.triton.hopper import norm_linear as hopper_norm_linear
from gem_kernels.triton.hopper import pool_rows as hopper_pool_rows
from gem_kernels.triton.pool_rows import spec as pool_rows

BF16 = torch.bfloat16
SPECS = {spec.op: spec for family in (block, dense, jagged) for spec in family.specs()}


def _t(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


def _calls() -> list[tuple[str, str, dict]]:
    """(label, op, arguments)."""
    offsets, few = lengths_to_offsets(torch.tensor([100, 28])), lengths_to_offsets(torch.tensor([128, 128]))
    heads = {d: _t(128, 4, d) for d in (64, 128)}
    found = []
    for d, q in heads.items():
        angle = _t(100, d // 2, dtype=torch.float32)
        found.append((f"block d{d}", "block_attention", {"q": q, "k": q, "v": q, "offsets": offsets}))
        rotary = {"q": q, "k": q, "v": q, "offsets": offsets, "rotary": (angle, angle)}
        found.append((f"block d{d} rotary", "block_attention", rotary))
        keys = _t(256, 4, d)
        found.append((f"norm_gdpa d{d}", "norm_gdpa", {"q": q, "k": keys, "v": keys, "q_offsets": offsets, "k_offsets": few}))
    found.append(("block of 128", "block_attention", {"q": q, "k": q, "v": q, "offsets": offsets, "block_size": 128}))
    x = _t(256, 512)
    for kind in ("rms", "layer"):
        found.append((f"norm {kind}", "norm", {"x": x, "kind": kind, "weight": _t(512), "bias": _t(512), "residual": x}))
        found.append((f"norm_linear {kind}", "norm_linear", {"x": x, "w": _t(512, 512), "b": _t(512), "kind": kind}))
        found.append((f"linear_norm {kind}", "linear_norm", {"x": x, "w": _t(512, 512), "b": _t(512), "kind": kind}))
    found.append(("norm_linear residual", "norm_linear", {"x": x, "w": _t(512, 512), "residual": x}))
    found.append(("linear_norm 1024", "linear_norm", {"x": x, "w": _t(1024, 512)}))
    for d in (64, 128, 256):
        weights = {"w1": _t(4 * d, d), "b1": _t(4 * d), "w2": _t(d, 4 * d), "b2": _t(d)}
        found.append((f"mlp d{d}", "mlp", {"x": _t(256, d), **weights}))
        found.append((f"mlp d{d} norm", "mlp", {"x": _t(256, d), **weights, "norm": "layer", "residual": _t(256, d)}))
    fast = {"x": _t(256, 64), "w1": _t(256, 64), "b1": None, "w2": _t(64, 256), "b2": None, "activation": "fast_gelu_bf16"}
    found.append(("mlp packed activation", "mlp", fast))
    narrow = {"x": _t(256, 32, dtype=torch.float32), "w": _t(32, 32, dtype=torch.float32)}
    found.append(("norm_linear narrow fp32", "norm_linear", narrow))
    found.append(("linear_norm narrow fp32", "linear_norm", narrow))
    values = _t(128, 96)
    found.append(("concat", "jagged_concat", {"parts": [(values, offsets), (values, offsets)]}))
    found.append(("sum", "jagged_sum", {"values": values, "offsets": offsets}))
    found.append(("to_padded", "jagged_to_padded", {"values": values, "offsets": offsets, "max_len": 128}))
    return found


def main(arch: str, *labels: str) -> None:
    for label, op, arguments in _calls():
        if not labels or label in labels:
            _compile(arch, label, op, arguments)
    if arch == "sm_90" and not labels:
        for d, norm in ((64, "rms"), (128, "layer"), (256, None), (256, "rms")):
            _compile_hopper_mlp(d, norm)
        for kind, affine in (("rms", False), ("layer", True)):
            _compile_hopper_rows(kind, affine)
        _compile_hopper_block()
        _compile_hopper_input_grad()
        _compile_pool_rows()
        _compile_statistics()


def _compile(arch: str, label: str, op: str, arguments: dict) -> None:
    with compile_only(arch) as done, dispatch.offering(SPECS[op]):
        result = getattr(ops, op)(**_leaves(arguments), backend="triton")
        first = result[0] if isinstance(result, tuple) else result
        first.sum().backward()
    _tell(label, done)


def _compile_hopper_mlp(d: int, norm: str | None) -> None:
    """Directly: the implementation refuses tensors that are on no Hopper GPU."""
    named = {"x": _t(256, d), "w1": _t(4 * d, d), "b1": _t(4 * d), "w2": _t(d, 4 * d), "b2": _t(d)}
    with compile_only("sm_90") as done:
        problem = problem_of("mlp", **_leaves(named), norm=norm)
        (y, _total), saved = hopper_mlp.forward(problem, *(t.detach() for t in named.values()), None)
        hopper_mlp.backward(problem, saved, (torch.ones_like(y), None), (True,) * 5)
    _tell(f"hopper mlp d{d}", done)


def _compile_hopper_rows(kind: str, affine: bool) -> None:
    """linear_norm, which holds whole rows of 512 columns."""
    named, norm = {"x": _t(256, 512), "w": _t(512, 512)}, {"norm_weight": _t(512), "norm_bias": _t(512)} if affine else {}
    tensors = (named["x"], named["w"], None, norm.get("norm_weight"), norm.get("norm_bias"))
    with compile_only("sm_90") as done:
        problem = problem_of("linear_norm", **_leaves(named), **norm, kind=kind)
        hopper_linear_norm.forward(problem, *tensors)
    _tell(f"hopper rows {kind}", done)


def _compile_hopper_block() -> None:
    q, angle, offsets = _t(128, 4, 128), _t(100, 64, dtype=torch.float32), lengths_to_offsets(torch.tensor([100, 28]))
    with compile_only("sm_90") as done:
        problem = problem_of("block_attention", q=q, k=q, v=q, offsets=offsets, rotary=(angle, angle))
        hopper_block.forward(problem, q, q, q, offsets, angle, angle, None)
    _tell("hopper block", done)


def _compile_hopper_input_grad() -> None:
    """The gradient of x of norm_linear, which many rows get."""
    hopper_norm_linear.MANY_ROWS = 1
    x = _t(256, 512)
    with compile_only("sm_90") as done:
        hopper_norm_linear._input_grad(x, _t(512, 512), x, _t(256, dtype=torch.float32), x)
    _tell("hopper input gradient", done)


def _compile_pool_rows() -> None:
    x, a, offsets = _t(300, 512), _t(128, 512), lengths_to_offsets(torch.tensor([100, 200]))
    options = ("eps", 1e-6), ("scale", 0.1)
    problem = Problem("pool_rows", "cuda", 90, (("x", BF16),), (("C", 512), ("M", 128), ("G", 4)), options)
    with compile_only("sm_90") as done:
        pool_rows.forward(problem, x, a, offsets)
        row_sums.leave(x, _t(2, 2, 300, dtype=torch.float32))
        y, saved = pool_rows.forward(problem, x, a, offsets)
        read = _t(64, 4, 128).transpose(0, 1)
        pool_rows.backward(problem, (x, a, offsets, y, *saved), (torch.ones_like(y), None, (read, read, _t(512))), (True, True))
        hopper_pool_rows.rows_gradient(saved[0], saved[0], a, torch.ones_like(y), saved[1], offsets, x)
    _tell("pool_rows", done)


def _compile_statistics() -> None:
    """Of rows, and from sums over them."""
    q, k, stats, sums = _t(256, 4, 128), _t(64, 4, 128), _t(256, dtype=torch.float32), _t(2, 2, 256, dtype=torch.float32)
    shape = {"H": 4, "D": 128, "COLUMNS": 512, "ROWS": 8, "MANY": 512, "num_warps": 4}
    with compile_only("sm_90") as done:
        for given, parts in ((None, 0), (sums, 2)):
            args = q, given, k, stats, stats, sums, lengths_to_offsets(torch.tensor([128, 128])), 2, 256, 64, 8, 1e-6, 512, 128, 512, 128
            launch(norm_gdpa_stats_kernel, (9,), q.device, *args, PARTS=parts, **shape)
    _tell("statistics of rows", done)


def _tell(label: str, done: list[Compiled]) -> None:
    for made in done:
        if made.kernel.startswith(("attention_", "tile_")):
            continue  # of the gdpa inside norm_gdpa: test_triton_attention_compile.py
        print(
            json.dumps(
                {
                    "label": label, "kernel": made.kernel, "registers": made.registers, "stack": made.stack, "spills": made.spills,
                    "shared": made.shared, "warnings": made.warnings, "overrun": overrun(made.ttgir),
                    "wgmma": "wgmma.mma_async" in made.ptx, "tcgen05": "tcgen05.mma" in made.ptx, "tma": "cp.async.bulk.tensor" in made.ptx,
                    "vectors": "ld.global.v4" in made.ptx or "cp.async.cg" in made.ptx,
                    "atomics": bool(re.search(r"\b(atom|red)\.", made.ptx)),
                }
            ),
            flush=True,
        )  # fmt: skip


def _leaves(arguments: dict) -> dict:
    """The same arguments, float tensors as leaves that want gradients (but for rotary tables, which get none)."""
    found = {n: a.requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for n, a in arguments.items()}
    if "parts" in found:
        found["parts"] = [(values.requires_grad_(), offsets) for values, offsets in found["parts"]]
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
