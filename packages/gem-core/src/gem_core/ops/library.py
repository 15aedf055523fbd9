"""Registers ops with torch: schema, dispatching kernel, fake kernels, autograd and FLOP formula, all from the op's contract.

Schema of an op: its contract's tensors, its sizes (SymInt), then ``spec``, a string with every other argument. A custom op cannot return
None nor a tuple as argument, hence the string, and an empty tensor where a result is absent. The string is readable in graph dumps and
stable between processes, so compiled graphs may be cached on disk.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gem_core.errors import OpError
from gem_core.ops import dispatch, flop_registry, siblings
from gem_core.ops.contract import NORMED, OpContract, OpPrecision, Problem, arch_of

NAMESPACE = "gem"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")
_schemas: list[str] = []
Named = Mapping[str, Any]
"""Tensors, or None where an optional one is absent, by name."""
Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Spec:
    """The decoded ``spec`` argument."""

    options: tuple[tuple[str, Any], ...]
    present: frozenset[str]
    precision: OpPrecision | None
    needs_grad: bool
    backend: str

    def option(self, name: str, default: Any = None) -> Any:
        return dict(self.options).get(name, default)


def encode(options: Sequence[tuple[str, Any]], present: Sequence[str], needs_grad: bool, backend: str, precision: str = "") -> str:
    """Plain string building, so that torch.compile can trace the public functions. Values: bool, int, float, str, None."""
    parts = [f"{name}={value!r}" for name, value in options]
    return ";".join(parts) + f"|{','.join(present)}|{precision}|{int(needs_grad)}|{backend}"


def encode_precision(precision: OpPrecision | None) -> str:
    if precision is None:
        return ""
    rows, columns = precision.block
    return (
        f"{precision.operands},{rows},{columns},{precision.scale_rule},{precision.probabilities},{precision.dscores},{precision.backward}"
    )


@lru_cache(maxsize=4096)
def decode(spec: str) -> Spec:
    """Inverse of `encode`; "a+b" of an activation becomes a tuple, window_left and window_right become window."""
    text, present, precision, needs_grad, backend = spec.split("|")
    options = {n: ast.literal_eval(v) for n, v in (p.split("=", 1) for p in text.split(";") if p)}
    if "window_left" in options:
        window = options.pop("window_left"), options.pop("window_right")
        options["window"] = None if window == (-1, -1) else window
    if "+" in options.get("activation", ""):
        options["activation"] = tuple(options["activation"].split("+"))
    return Spec(
        tuple(sorted(options.items())), frozenset(filter(None, present.split(","))), _precision(precision), needs_grad == "1", backend
    )


def _precision(text: str) -> OpPrecision | None:
    if not text:
        return None
    operands, rows, columns, *rest = text.split(",")
    values: tuple[Any, ...] = (operands, (int(rows), int(columns)), *rest)
    return OpPrecision(**{f.name: value for f, value in zip(fields(OpPrecision), values)})


@dataclass(frozen=True)
class OpDefinition:
    """What core knows of an op beside its contract.

    ``dims(named)`` are the Problem's dims, from tensors that are inputs *and* saved. ``bounds(named, sizes)`` are further options such as
    max_q_len, to be rounded up to powers of two. ``fake(named, sizes, spec)`` gives empty results: outputs, then those made for backward.
    ``check(named, sizes, spec)`` looks at values. ``flops(named, sizes, spec, needs)``: forward for needs None, else backward.
    ``weights(named, spec)``: of attention, what the weights of every row add up to, None where they do not; ``named`` are saved tensors.
    """

    contract: OpContract
    dims: Callable[[Named], tuple[tuple[str, int], ...]]
    fake: Callable[[Named, Sizes, Spec], Sequence[Tensor]]
    flops: Callable[[Named, Sizes, Spec, Sequence[bool] | None], int]
    bounds: Callable[[Named, Sizes], tuple[tuple[str, int], ...]] = lambda named, sizes: ()
    check: Callable[[Named, Sizes, Spec], None] = lambda named, sizes, spec: None
    weights: Callable[[Named, Spec], float | None] = lambda named, spec: None
    sizes: tuple[str, ...] = ()

    @property
    def op(self) -> str:
        return self.contract.op


DEFINITIONS: dict[str, OpDefinition] = {}


def problem_for(definition: OpDefinition, named: Named, sizes: Sizes, spec: str) -> Problem:
    """The Problem of a call, the same from the inputs and from the saved tensors."""
    contract = definition.contract
    some = next(t for t in named.values() if t is not None)
    names = ("x" if n == NORMED else n for n in contract.saved)
    dtypes = tuple((n, t.dtype) for n in names if n in contract.tensors and (t := named[n]) is not None)
    bounds = tuple((n, _power_of_two(v)) for n, v in definition.bounds(named, sizes))
    deterministic = torch.are_deterministic_algorithms_enabled()
    return _problem(contract.op, spec, some.device, dtypes, definition.dims(named), bounds, deterministic)


@lru_cache(maxsize=8192)
def _problem(op: str, spec: str, device: torch.device, dtypes: Any, dims: Any, bounds: Any, deterministic: bool) -> Problem:
    decoded = decode(spec)
    options = tuple(sorted((*decoded.options, *bounds)))
    return Problem(
        op, device.type, arch_of(device), dtypes, dims, options, decoded.present, decoded.precision, decoded.needs_grad, deterministic
    )


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """Implementations compute in the dtypes that they choose."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def _power_of_two(n: int) -> int:
    return 1 << max(0, int(n) - 1).bit_length()


def define(definition: OpDefinition) -> None:
    """Register ``gem::<op>`` and ``gem::<op>_backward``."""
    contract = definition.contract
    DEFINITIONS[contract.op] = definition
    _define_forward(definition)
    _define_backward(definition)
    _define_autograd(definition)


def tag_compiled_graphs() -> None:
    """Put the schemas of the ops into the key of torch's cache of compiled graphs, before anything is compiled: torch does not look at the
    schema of a custom op, and would take a graph from the cache that calls the ops of another version of this package."""
    from torch.compiler import config

    digest = hashlib.sha256("\n".join(_schemas).encode()).hexdigest()[:16]
    if digest not in config.cache_key_tag:
        config.cache_key_tag += f" {NAMESPACE} {digest}"


def _define(schema: str) -> None:
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _schemas.append(schema)


def _define_forward(definition: OpDefinition) -> None:
    contract, op = definition.contract, definition.op
    arguments = [f"Tensor? {n}" if n in contract.optional else f"Tensor {n}" for n in contract.tensors]
    arguments += [f"SymInt {n}" for n in definition.sizes]
    results = ", ".join(["Tensor"] * (len(contract.outputs) + len(contract.made)))
    _define(f"{op}({', '.join(arguments)}, str spec) -> ({results})")

    def run(*args: Any) -> tuple[Tensor, ...] | Tensor:
        named, sizes, spec = _unpack(definition, args)
        decoded = decode(spec)
        definition.check(named, sizes, decoded)
        problem = problem_for(definition, named, sizes, spec)
        kernel = dispatch.choose(problem, decoded.backend)
        with without_autocast(problem.device):
            answer = kernel.forward(problem, *named.values(), **{n: sizes[n] for n in contract.sizes})
        return _plain([_dense(t, args[0]) for t in _results(contract, kernel.name, answer)])

    def fake(*args: Any) -> tuple[Tensor, ...] | Tensor:
        named, sizes, spec = _unpack(definition, args)
        return _plain(definition.fake(named, sizes, decode(spec)))

    def flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        named, sizes, spec = _unpack(definition, args)
        return definition.flops(named, sizes, decode(spec), None)

    LIBRARY.impl(op, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{op}", fake, lib=LIBRARY)
    flop_registry.register(getattr(torch.ops.gem, op), flops)


def _define_backward(definition: OpDefinition) -> None:
    contract, op = definition.contract, f"{definition.op}_backward"
    names, douts = contract.saved, contract.differentiable_outputs
    arguments = [f"Tensor? {n}" for n in names] + [f"Tensor? d_{n}" for n in douts] + [f"SymInt {n}" for n in definition.sizes]
    results = ", ".join(["Tensor"] * len(contract.differentiable))
    _define(f"{op}({', '.join(arguments)}, bool[] needs, str spec, int[] together) -> ({results})")

    # ``together``: first, one past the last differentiable tensor of each group of siblings. It is found where the formula of autograd runs
    # and given on, since a compiler that runs the parts by themselves shows them other views of the same tensors.
    def unpack(args: Sequence[Any]) -> tuple[dict[str, Tensor | None], tuple[Tensor | None, ...], Sizes, tuple[bool, ...], str]:
        n = len(names)
        named = dict(zip(names, args[:n]))
        if NORMED in named:
            named["x"] = named[NORMED]
        sizes = dict(zip(definition.sizes, args[n + len(douts) : -3]))
        return named, tuple(args[n : n + len(douts)]), sizes, tuple(args[-3]), args[-2]

    def run(*args: Any) -> tuple[Tensor, ...] | Tensor:
        named, given, sizes, needs, spec = unpack(args)
        problem = problem_for(definition, named, sizes, spec)
        kernel = dispatch.choose_backward(problem, decode(spec).backend)
        dout = given[0] if len(given) == 1 else given
        assert kernel.backward is not None  # what was chosen has one
        with without_autocast(problem.device):
            result = kernel.backward(problem, args[: len(names)], dout, needs)
        if not isinstance(result, (tuple, list)) or len(result) != len(contract.differentiable):
            wanted = f"a gradient, or None, for each of ({', '.join(contract.differentiable)})"
            raise _broken(contract, kernel.name, f"backward returned {_described(result)}; the contract wants {wanted}")
        like = next(t for t in named.values() if t is not None)
        grads: list[Any] = [t if need else None for t, need in zip(result, needs)]
        together = _ranges(args[-1])
        siblings_of_one = siblings.place(together, grads)
        if together == [range(3)] and isinstance(dout, Tensor) and (total := definition.weights(named, decode(spec))) is not None:
            siblings.leave_softmax_sums(grads[:3], dout, total)
        return _plain([t if i in siblings_of_one else _dense(t, like) for i, t in enumerate(grads)])

    def fake(*args: Any) -> tuple[Tensor, ...] | Tensor:
        named, _, _, needs, _ = unpack(args)
        like = next(t for t in named.values() if t is not None)
        grads = siblings.empty_grads([named.get(n) for n in contract.differentiable], needs, _ranges(args[-1]))
        return _plain([like.new_empty(0) if t is None else t for t in grads])

    def flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        named, _, sizes, needs, spec = unpack(args)
        return definition.flops(named, sizes, decode(spec), needs)

    def refuse(ctx: Any, *grads: Tensor) -> None:
        raise OpError(f"{definition.op} has no second derivative", fix="do not use create_graph=True through this op")

    LIBRARY.impl(op, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{op}", fake, lib=LIBRARY)
    torch.library.register_autograd(f"{NAMESPACE}::{op}", refuse, lib=LIBRARY)
    flop_registry.register(getattr(torch.ops.gem, op), flops)


def _define_autograd(definition: OpDefinition) -> None:
    contract = definition.contract
    outputs = (*contract.outputs, *contract.made)
    constant = [n for n in outputs if n not in contract.differentiable_outputs]
    backward_op = getattr(torch.ops.gem, f"{definition.op}_backward").default

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        named, sizes, spec = _unpack(definition, inputs)
        results = dict(zip(outputs, output if isinstance(output, (tuple, list)) else (output,)))
        normed = results["residual_out"] if named.get("residual") is not None else named.get("x")
        everything = {**named, **results, NORMED: normed}
        ctx.save_for_backward(*(everything[n] for n in contract.saved))
        ctx.sizes, ctx.spec = tuple(sizes.values()), spec
        ctx.set_materialize_grads(False)
        # without a residual, residual_out is a placeholder
        absent = ["residual_out"] if "residual_out" in results and named["residual"] is None else []
        ctx.mark_non_differentiable(*(results[n] for n in (*constant, *absent)))

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        wanted = dict(zip(contract.tensors, ctx.needs_input_grad))
        needs = [bool(wanted[n]) or (n == "x" and bool(wanted.get("residual", False))) for n in contract.differentiable]
        by_output = dict(zip(outputs, grads))
        douts = [by_output[n] for n in contract.differentiable_outputs]
        found: dict[str, Tensor] = {}
        if any(d is not None for d in douts):
            saved = ctx.saved_tensors  # once: activation checkpointing gives every tensor out once
            named = dict(zip(contract.saved, saved))
            together = [
                edge for run in siblings.groups([named.get(n) for n in contract.differentiable], needs) for edge in (run.start, run.stop)
            ]
            result = backward_op(*saved, *douts, *ctx.sizes, needs, ctx.spec, together)
            result = result if isinstance(result, (tuple, list)) else (result,)
            found = {n: g for n, g, need in zip(contract.differentiable, result, needs) if need}
        if "residual" in wanted and "x" in found:
            found["residual"] = found["x"]
        return (*(found.get(n) if wanted[n] else None for n in contract.tensors), *(None for _ in definition.sizes), None)

    torch.library.register_autograd(f"{NAMESPACE}::{definition.op}", backward, setup_context=setup, lib=LIBRARY)


def _unpack(definition: OpDefinition, args: Sequence[Any]) -> tuple[dict[str, Tensor | None], Sizes, str]:
    n = len(definition.contract.tensors)
    return dict(zip(definition.contract.tensors, args[:n])), dict(zip(definition.sizes, args[n:-1])), args[-1]


def _results(contract: OpContract, kernel: str, answer: Any) -> tuple[Tensor | None, ...]:
    """What a kernel's forward gave: outputs, then what was made for backward.

    :raises OpError: it is not what the contract says; torch would tell it by a schema that the kernel's author never wrote.
    """
    if not isinstance(answer, (tuple, list)) or len(answer) != 2:
        raise _broken(contract, kernel, f"forward returned {_described(answer)}; the contract wants (result, saved)")
    result, saved = answer
    outputs = result if isinstance(result, (tuple, list)) else (result,)
    if len(outputs) != len(contract.outputs):
        names = ", ".join(contract.outputs)
        wanted = f"a tuple ({names}), None for what is absent" if len(contract.outputs) > 1 else f"a tensor ({names})"
        raise _broken(contract, kernel, f"the result of forward is {_described(result)}; the contract wants {wanted}")
    if contract.made and (not isinstance(saved, (tuple, list)) or len(saved) != len(contract.saved)):
        raise _broken(contract, kernel, f"forward saved {_described(saved)}; the contract wants ({', '.join(contract.saved)})")
    return *outputs, *(saved[contract.saved.index(n)] for n in contract.made)


def _broken(contract: OpContract, kernel: str, what: str) -> OpError:
    fix = f"mend the kernel by gem_core.ops.contracts()[{contract.op!r}], or choose another one (gemrec plugins --ops)"
    return OpError(f"the kernel {kernel!r} does not keep the contract of {contract.op}: {what}", fix=fix)


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return "a tensor"
    return f"{len(value)} values" if isinstance(value, (tuple, list)) else f"a {type(value).__name__}"


def _dense(t: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if t is None else t.contiguous()


def _ranges(edges: Sequence[int]) -> list[range]:
    return [range(a, b) for a, b in zip(edges[::2], edges[1::2])]


def _plain(results: Sequence[Tensor]) -> tuple[Tensor, ...] | Tensor:
    return results[0] if len(results) == 1 else tuple(results)
