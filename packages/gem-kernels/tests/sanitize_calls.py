"""The calls of `sanitize.py`: the conformance kit's cases for every implementation, shapes that the Hopper kernels take with several of
their configurations, and kernels that only many rows or another op's backward pass get otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gem_core import ops
from gem_core.hookspecs import KernelSpec
from gem_core.ops import adamw, dispatch, expert_tokens, meeting, pool_rows, row_sums, siblings
from gem_core.ops.contract import OpPrecision, Problem
from gem_core.ops.contracts import contracts
from gem_core.ops.explain import problem_of
from gem_core.testing.kernel_cases import Call, Case, Draw, cases
from gem_core.testing.kernels import flat
from gem_kernels import triton
from gem_kernels.triton.adamw import spec as adamw_spec
from gem_kernels.triton.attention import inputs, schedule
from gem_kernels.triton.dense import norm
from gem_kernels.triton.hopper import add_linear, launch, launch_bias, norm_linear
from gem_kernels.triton.hopper import pool_rows as hopper_pool_rows
from gem_kernels.triton.pool_rows import spec as pool_rows_spec
from gem_kernels.triton.tokens import spec as tokens_spec

Change = tuple[ModuleType, str, Any]
DEVICE = "cuda"
LENGTHS, LONGEST = (0, 1, 65, 200, 128), 200
ATTENTION = ("jagged_attention", "gdpa")
LAST = 99
"""Of the configurations that a kernel offers, the last one."""


@dataclass(frozen=True)
class Entry:
    """``run`` makes the call, forward and backward; False where the implementation refuses it."""

    op: str
    implementation: str
    name: str
    run: Callable[[], bool]


@contextmanager
def changed(*changes: Change) -> Iterator[None]:
    before = [(module, name, getattr(module, name)) for module, name, _ in changes]
    for module, name, value in changes:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def candidate(number: int) -> list[Change]:
    """Every Hopper kernel takes this one of its configurations, the last one where there are fewer; for few samples, too."""
    usual = inputs.choose

    def choose(kernel: str, facts: Any, info: Any, offered: Callable[[], list[dict]], run: Any) -> dict:
        if not kernel.startswith("hopper."):
            return usual(kernel, facts, info, offered, run)
        found = offered()
        return found[min(number, len(found) - 1)]

    return [(launch, "_LEAST_TILES", 0), *((module, "choose", choose) for module in (inputs, launch, launch_bias))]


def gradients(results: Any, leaves: list[Tensor]) -> None:
    found = [r for r in flat(results) if r.requires_grad]
    if found:
        torch.autograd.grad(found, leaves, [torch.ones_like(r) for r in found], allow_unused=True)


def of_op(spec: KernelSpec, case: Case, *changes: Change, index: torch.dtype = torch.int64) -> bool:
    call = case(Draw(torch.bfloat16, DEVICE, index))
    with dispatch.offering(spec), changed(*changes):
        if not spec.supports(problem_of(spec.op, **call.arguments(call.tensors))):
            return False
        leaves = {n: t.detach().requires_grad_() for n, t in call.tensors.items()}
        gradients(getattr(ops, spec.op)(**call.arguments(leaves), backend=spec.name), list(leaves.values()))
    return True


def rows_of(draw: Draw, lengths: dict[str, tuple[int, ...]], heads: int, d: int) -> dict[str, Tensor]:
    return {n: draw.packed(sum(given), heads, d) for n, given in lengths.items()}


def self_attention(op: str, draw: Draw, d: int, biased: int = 0, **options: Any) -> Call:
    """A sequence with itself; ``biased``: buckets of a bias by position and time, with candidates."""
    rows = rows_of(draw, dict.fromkeys("qkv", LENGTHS), 2, d)
    fixed = {"q_offsets": draw.offsets(LENGTHS), "max_q_len": LONGEST, "max_k_len": LONGEST, **options}
    if op == "gdpa":
        fixed["activation"] = "silu"
    if not biased:
        return Call(rows, lambda t: t | fixed)
    fixed["num_targets"] = draw.counts([min(n, 5) for n in LENGTHS])
    times = draw.integers(0, 50_000, rows["q"].shape[0])
    tables = {"position": draw.table(2, 201), "time": draw.table(2, biased)}
    edges = 40 * torch.arange(1, biased, device=draw.device).cumsum(0)

    def arguments(t: dict[str, Tensor]) -> dict[str, Any]:
        bias = ops.RelativeBias(t["position"], t["time"], edges, times, times)
        return {n: t[n] for n in "qkv"} | fixed | {"bias": bias}

    return Call(rows | tables, arguments)


def few_keys(op: str, draw: Draw) -> Call:
    """Samples with up to 128 keys, some without keys or rows; as many as there are SMs."""
    q, k = (0, 1, 65, 200, 128) * 14, (3, 0, 64, 99, 128) * 14
    fixed = {"q_offsets": draw.offsets(q), "k_offsets": draw.offsets(k), "max_q_len": 200, "max_k_len": 128}
    if op == "gdpa":
        fixed["activation"] = "fast_gelu"
    return Call(rows_of(draw, {"q": q, "k": k, "v": k}, 2, 128), lambda t: t | fixed)


def shared_queries(op: str, draw: Draw) -> Call:
    k = (3, 0, 64, 199, 128)
    fixed = {"q_offsets": None, "k_offsets": draw.offsets(k), "broadcast_q": True, "max_q_len": 70, "max_k_len": 199}
    if op == "gdpa":
        fixed["activation"] = "silu"
    return Call({"q": draw.normal(70, 2, 128), **rows_of(draw, {"k": k, "v": k}, 2, 128)}, lambda t: t | fixed)


def hopper_attention(op: str) -> dict[str, Case]:
    """What goes through `launch` and `launch_bias`; wide heads only where they have a backward pass."""
    own = partial(self_attention, op)
    found: dict[str, Case] = {
        "relative bias": lambda draw: own(draw, 128, 20, causal=True),
        "window": lambda draw: own(draw, 128, window=(33, 70)),
        "few keys": partial(few_keys, op),
        "causal": lambda draw: own(draw, 64, causal=True),
        "shared queries": partial(shared_queries, op),
    }
    return found | ({"256 columns": lambda draw: own(draw, 256, causal=True)} if op == "gdpa" else {})


def shaped(shapes: dict[str, tuple[int, ...]], **options: Any) -> Case:
    return lambda draw: Call({n: draw.normal(*shape) for n, shape in shapes.items()}, lambda t: t | options)


def mlp_shapes(width: int, rows: int = 200) -> dict[str, tuple[int, ...]]:
    return {"x": (rows, width), "w1": (2 * width, width), "b1": (2 * width,), "w2": (width, 2 * width), "b2": (width,)}


def norm_gdpa_call(draw: Draw) -> Call:
    q, k = (300, 5), (128, 70)
    fixed = {"q_offsets": draw.offsets(q), "k_offsets": draw.offsets(k), "max_q_len": 300, "max_k_len": 128}
    return Call(rows_of(draw, {"q": q, "k": k, "v": k}, 2, 128), lambda t: t | fixed)


def block_call(by_row: bool, draw: Draw) -> Call:
    angle = draw.normal(200, 64).float()
    fixed = {"offsets": draw.offsets(LENGTHS), "rotary": (angle.cos(), angle.sin())}
    if by_row:
        fixed["rotary_rows"] = draw.integers(0, 200, 397)
    return Call(rows_of(draw, dict.fromkeys("qkv", LENGTHS), 2, 128), lambda t: t | fixed)


HOPPER_DENSE: dict[str, dict[str, tuple[Case, list[Change]]]] = {
    "norm_linear": {
        "rows that fill no tile": (shaped({"x": (200, 320), "w": (136, 320), "b": (136,)}), []),
        "gradient of x by pairs": (shaped({"x": (700, 512), "w": (264, 512), "b": (264,)}), [(norm_linear, "MANY_ROWS", 1)]),
    },
    "linear_norm": {
        "rows of two tiles": (shaped({"x": (200, 136), "w": (320, 136), "b": (320,)}), []),
        "rows of 512": (shaped({"x": (200, 512), "w": (512, 512), "b": (512,)}, kind="layer"), []),
    },
    "mlp": {f"width {width}": (shaped(mlp_shapes(width)), []) for width in (64, 128, 256)}
    | {f"width {width}, {kind} norm": (shaped(mlp_shapes(width), norm=kind), []) for width in (128, 256) for kind in ("rms", "layer")},
    "norm_gdpa": {
        "few keys": (norm_gdpa_call, []),
    },
    "block_attention": {
        "rotary": (partial(block_call, False), []),
        "rotary by row": (partial(block_call, True), []),
    },
}


def hopper(spec: KernelSpec) -> Iterator[Entry]:
    if spec.name == "hopper-only":
        for name, case in hopper_attention(spec.op).items():
            for number in (0, LAST) if name.startswith("relative bias") else (0, 1, LAST):
                told = f"{name}, {'last' if number == LAST else f'{number}.'} configuration"
                yield Entry(spec.op, spec.name, told, partial(of_op, spec, case, *candidate(number)))
        case = hopper_attention(spec.op)["window"]
        yield Entry(
            spec.op, spec.name, "lists of many samples", partial(of_op, spec, case, (schedule, "_MOST_RANKED", 0), *candidate(LAST))
        )
    elif spec.op in ATTENTION:  # forward in these kernels, backward in the portable ones
        many = partial(of_op, spec, lambda draw: self_attention(spec.op, draw, 128, 90), *candidate(LAST))
        yield Entry(spec.op, spec.name, "relative bias, many buckets, last configuration", many)
    for name, (case, changes) in HOPPER_DENSE.get(spec.op, {}).items():
        yield Entry(spec.op, spec.name, name, partial(of_op, spec, case, *changes))


def portable(spec: KernelSpec) -> Iterator[Entry]:
    more: dict[str, tuple[Case, list[Change]]] = {}
    if spec.name == "triton-lowp":
        for name, block in (("MXFP8", (32, 32)), ("FP8", (128, 128))):
            more[name] = (lambda draw, b=block: self_attention(spec.op, draw, 64, precision=OpPrecision(block=b)), [])
    if spec.op == "norm":
        shapes = {"x": (1100, 48), "weight": (48,), "bias": (48,)}
        more["many rows"] = (shaped(shapes, kind="layer"), [(norm, "MANY_ROWS", 0)])
    wide = spec.name.startswith("hopper")
    found = {n: (case, []) for n, case in cases(spec.op).items() if n != "many short samples" and (wide or not n.startswith("width"))}
    for name, (case, changes) in (found | more).items():
        # as the kit's tests draw them, whose compiled kernels are taken where they ran before
        index = torch.int32 if len(name) % 2 else torch.int64
        yield Entry(spec.op, spec.name, name, partial(of_op, spec, case, *changes, index=index))


def meeting_passes(backend: str) -> bool:
    """The backward passes of `norm_gdpa` and of the norms before it and after it, in two."""
    draw, q, k = Draw(torch.bfloat16, DEVICE), (65, 0, 200), (3, 2, 128)
    leaves = [t.requires_grad_() for t in (*rows_of(draw, {"q": q, "k": k, "v": k}, 2, 128).values(), draw.normal(64, 256))]
    x, *kv, w = leaves
    bounds = {"max_q_len": 200, "max_k_len": 128, "backend": backend}
    y, rows = ops.norm_linear(x.flatten(1), w, None, through=True, backend=backend)
    meeting.read_once(rows)
    rows = siblings.flat(ops.norm_gdpa(meeting.in_heads(rows, 2, 128), *kv, draw.offsets(q), draw.offsets(k), **bounds))
    gradients((y, *ops.norm_linear(rows, w, None, through=True, backend=backend)), leaves)
    return True


def sum_beside_product() -> bool:
    draw = Draw(torch.bfloat16, DEVICE)
    given = [draw.normal(*shape) for shape in ((300, 512), (300, 128), (512, 128), (512,))]
    y, _ = add_linear.forward(Problem("add_linear", DEVICE, 90, (), ()), *given)
    k = (3, 2, 128)
    kv, offsets = [draw.normal(sum(k), 4, 128) for _ in range(2)], draw.offsets((90, 0, 210))
    bounds = {"max_q_len": 210, "max_k_len": 128, "backend": "hopper"}
    ops.norm_gdpa(meeting.in_heads(y, 4, 128), *kv, offsets, draw.offsets(k), **bounds)  # takes the sums over rows that were left
    return True


def adamw_update() -> bool:
    draw = Draw(torch.float32, DEVICE)
    state = [draw.normal(5000) for _ in range(3)]
    scalars = [draw.normal(n) if n > 1 else draw.normal(1)[0] for n in (1, 2, 1)]
    for copy, scale in ((torch.zeros(5000, dtype=torch.bfloat16, device=DEVICE), scalars[2]), (None, None)):
        gradient = state[0].bfloat16() if scale is not None else state[0]
        ok = torch.tensor(True, device=DEVICE)
        u = adamw.Update(state[0], gradient, state[1], state[2].abs(), copy, *scalars[:2], scale, ok, (0.9, 0.999), 1e-8, 0.1)
        adamw_spec.forward(Problem(adamw.OP, DEVICE, None, (), ()), u)
    return True


def summed_experts(n: int, d: int, experts: int, rank: int, f: int) -> bool:
    draw, samples = Draw(torch.bfloat16, DEVICE), 300
    dims = ("N", n), ("D", d), ("E", experts), ("R", rank), ("F", f)
    problem = Problem(expert_tokens.OP, DEVICE, 90, (("x", torch.bfloat16),), dims)
    run = expert_tokens.Implementation(tokens_spec.specs()[0], problem)
    x, w, bias = draw.normal(samples, n, d), draw.normal(experts * rank + n - f, n), draw.normal(f * d)
    run.forward(x, w, bias)
    run.backward(x, w, x, tuple(draw.normal(samples, n * rank) for _ in range(experts)))
    return True


def pooled_rows() -> bool:
    """Samples without rows, of one block, of several, and slack; with sums over the rows and without."""
    draw, lengths = Draw(torch.bfloat16, DEVICE), (0, 5, 300, 1, 0, 64)
    problem = Problem(
        pool_rows.OP, DEVICE, 90, (("x", torch.bfloat16),), (("C", 512), ("M", 128), ("G", 4)), (("eps", 1e-6), ("scale", 0.1))
    )
    shapes = (sum(lengths) + 9, 512), (128, 512), (4, 128, 512), (512,)
    x, a, to_values, bias = leaves = [draw.normal(*shape).requires_grad_() for shape in shapes]
    for sums, spec in (
        (None, pool_rows_spec.specs()[0]),
        (draw.normal(2, 2, x.shape[0]).float().square(), hopper_pool_rows.specs()[0]),
    ):
        if sums is not None:
            row_sums.leave(x, sums)
        gradients(pool_rows.Implementation(spec, problem)(x, a, to_values, bias, draw.offsets(lengths)), leaves)
    return True


def beside() -> Iterator[Entry]:
    """Ops of their own kinds."""
    for backend in ("hopper", "triton"):
        yield Entry("norm_gdpa", backend, "passes that meet", partial(meeting_passes, backend))
    yield Entry("add_linear", "hopper", "rows that fill no tile, and the norm of them", sum_beside_product)
    yield Entry("adamw", "triton", "with a copy and a scale, and without", adamw_update)
    for sizes in ((128, 192, 2, 24, 64), (17, 40, 1, 5, 9)):
        yield Entry("expert_tokens", "triton", f"{sizes[0]} tokens", partial(summed_experts, *sizes))
    yield Entry("pool_rows", "triton and hopper", "samples without rows, and slack", pooled_rows)


def entries(wanted: list[str], impls: list[str]) -> Iterator[Entry]:
    """Calls of these ops and implementations (all where none is given): those of the Hopper family first, attention last."""
    specs = sorted((spec for spec in triton.specs() if spec.op in contracts()), key=lambda spec: spec.op in ATTENTION)
    of_hopper = [spec for spec in specs if spec.name.startswith("hopper")]
    everything = [*beside(), *(entry for spec in of_hopper for entry in hopper(spec))]
    everything += [entry for spec in specs if spec not in of_hopper or spec.op == "norm_gdpa" for entry in portable(spec)]
    yield from (e for e in everything if (not wanted or e.op in wanted) and (not impls or e.implementation in impls))
