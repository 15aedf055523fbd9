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
    """One op family's promise. Implementations receive ``tensors`` in this order, None where an optional one is absent.

    ``differentiable`` are the tensors that receive gradients, in the order of ``backward``'s result. ``saved`` names what ``forward``
    returns as its second value, in order: inputs by their name, plus results such as ``out`` and ``lse``. ``outputs`` names the results.
    """

    op: str
    tensors: tuple[str, ...]
    outputs: tuple[str, ...]
    saved: tuple[str, ...]
    differentiable: tuple[str, ...]
    optional: frozenset[str] = field(default_factory=frozenset)
