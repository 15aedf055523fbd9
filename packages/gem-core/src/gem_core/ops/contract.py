"""What an op is: its tensors in order, what may be saved for backward, and what a choice of implementation may depend on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

ElementFormat = Literal["e4m3", "e5m2", "e3m2", "e2m3", "e2m1", "bf16"]


@dataclass(frozen=True)
class OpPrecision:
    """Operand formats of a low-precision op; None in a Problem means plain arithmetic in the tensors' dtype.

    ``block`` is the shape of the region that shares one scale, ``probabilities`` and ``dscores`` say how P and dS are quantised before
    the second matmul of each pass ("bf16": left in bf16).
    """

    operands: ElementFormat = "e4m3"
    block: tuple[int, int] = (32, 32)
    scale_rule: Literal["rceil", "floor", "ceil", "even"] = "rceil"
    probabilities: ElementFormat = "e4m3"
    dscores: ElementFormat = "bf16"
    backward: ElementFormat = "e4m3"


@dataclass(frozen=True)
class Problem:
    """Everything that the choice of an implementation may depend on. Frozen, hashable, never holds exact lengths.

    ``options`` holds the op's non-tensor arguments (causal, window, scale, activation, eps, ...) as sorted (name, value) pairs, with
    ``max_q_len`` and ``max_k_len`` rounded up to powers of two; ``present`` names the optional tensors that were given.
    """

    op: str
    device: str
    arch: int | None
    dtypes: tuple[tuple[str, torch.dtype], ...]
    dims: tuple[tuple[str, int], ...]
    options: tuple[tuple[str, Any], ...] = ()
    present: frozenset[str] = frozenset()
    precision: OpPrecision | None = None
    needs_grad: bool = False
    deterministic: bool = False

    def dim(self, name: str) -> int:
        return dict(self.dims)[name]

    def dtype(self, tensor: str) -> torch.dtype:
        return dict(self.dtypes)[tensor]

    def option(self, name: str, default: Any = None) -> Any:
        return dict(self.options).get(name, default)


def arch_of(device: torch.device) -> int | None:
    """``Problem.arch`` of a device: 90 for compute capability 9.0; None for one without."""
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@dataclass(frozen=True)
class Supported:
    """Answer of ``KernelSpec.supports``: true, or false with the reason that `gemrec plugins --ops` prints."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


YES = Supported(True)


def no(reason: str) -> Supported:
    """A refusal with its reason."""
    return Supported(False, reason)


@dataclass(frozen=True)
class OpContract:
    """One op's promise. Implementations receive ``tensors`` in this order, None where an optional one is absent.

    ``forward(problem, *tensors, **sizes) -> (result, saved)``: ``result`` is a tensor where ``outputs`` has one name and a tuple in that
    order otherwise (None for ``residual_out`` without a residual); contiguous, never an alias of an input. ``sizes`` are exact host
    integers that only data-movement ops need; attention implementations find their bounds rounded up in the problem.

    ``saved`` names what forward returns as its second value, in order: inputs, outputs, and results made for backward only. "normed" is
    ``residual_out`` where a residual was given and ``x`` otherwise. Core keeps the tensors itself, so the forward of one implementation
    may be paired with the backward of another.

    ``backward(problem, saved, dout, needs) -> grads``: ``dout`` is the gradient of ``differentiable_outputs`` (a tensor for one name, else
    a tuple in which absent gradients are None), ``needs`` a bool for each of ``differentiable``; the result has a gradient of the input's
    dtype for each of them, None where not needed. A residual is not among them: its gradient is that of ``x``.
    """

    op: str
    tensors: tuple[str, ...]
    outputs: tuple[str, ...]
    saved: tuple[str, ...]
    differentiable: tuple[str, ...]
    optional: frozenset[str] = field(default_factory=frozenset)
    differentiable_outputs: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()

    @property
    def made(self) -> tuple[str, ...]:
        """Saved results that are neither inputs nor outputs."""
        return tuple(n for n in self.saved if n not in self.tensors and n not in self.outputs and n != NORMED)


NORMED = "normed"
"""Name, among saved tensors, of the input a norm was taken of: x + residual where a residual was given, else x."""
