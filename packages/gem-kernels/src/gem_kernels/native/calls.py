"""From a problem and its tensors to the C functions: which problems they take, strides, and threads.

Rows are shared out over as many threads as torch has; a call from a thread that torch computes with alone stays in it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gem_core.ops.activations import per_head
from gem_core.ops.contract import YES, Problem, Supported, no
from gem_core.ops.contracts import GDPA
from gem_kernels.native import build

Saved = tuple[Tensor | None, ...]
MAX_D, MAX_K = 256, 512
"""Widest head, and widest input of a norm with a linear map: those of the C sources."""
MAX_N = 1024
"""Widest output of a norm with a linear map: beyond, the library's own product is faster."""
LEAST = 2048
"""Rows of a call that are worth a thread more."""
POINTER = ctypes.c_void_p
_NAMES = ("raw", "gelu", "gelu_approx", "fast_gelu_taylor", "leaky_relu", "relu", "silu", "hardswish", "relu_square")
_SAME = {"fast_gelu": "gelu_approx", "fast_gelu_bf16": "gelu_approx", "fast_silu": "silu"}
KINDS = {"rms": 0, "layer": 1, None: 2}
_REFUSED = ("context_len", "kv_index", "target_k", "bias_position")


class Attention(ctypes.Structure):
    _fields_ = [
        *((n, POINTER) for n in ("q", "k", "v", "out", "lse", "q_offsets", "k_offsets", "targets", "activation")),
        *((n, ctypes.c_int64) for n in ("q_row", "q_head", "k_row", "k_head", "v_row", "v_head", "heads", "shared", "d", "dv", "rows")),
        *((n, ctypes.c_int64) for n in ("q_count", "k_count", "q_shared", "candidates", "causal", "left", "right")),
        ("scale", ctypes.c_float),
        ("out_scale", ctypes.c_float),
    ]


class LinearRows(ctypes.Structure):
    _fields_ = [
        *((n, POINTER) for n in ("x", "residual", "norm_weight", "norm_bias", "y", "total", "mean", "rstd", "w", "b", "add")),
        *((n, ctypes.c_int64) for n in ("x_row", "residual_row", "add_row", "k", "n", "kind")),
        ("eps", ctypes.c_float),
    ]


def supports(problem: Problem) -> Supported:
    """Float32 on a CPU without gradients, and what the C sources are written for; last of all that they compile."""
    answer = can(problem)
    if answer and problem.needs_grad:
        return no("inference only")
    return answer


def can(problem: Problem) -> Supported:
    """`supports`, but for gradients."""
    if problem.device != "cpu":
        return no("for CPUs")
    if problem.precision is not None:
        return no("no low-precision arithmetic")
    if any(dtype != torch.float32 for name, dtype in problem.dtypes if not name.endswith(("offsets", "targets"))):
        return no("float32 only")
    answer = _CHECKS[problem.op](problem)
    if answer and build.reason():
        return no(build.reason())
    return answer


def _attention_fits(problem: Problem) -> Supported:
    for name in _REFUSED:
        if name in problem.present:
            return no(f"no {name}")
    if max(problem.dim("D"), problem.dim("Dv")) > MAX_D:
        return no(f"heads wider than {MAX_D}")
    return YES


def _linear_fits(problem: Problem) -> Supported:
    if problem.dim("K") > MAX_K or problem.dim("N") > MAX_N:
        return no(f"a matrix larger than {MAX_N} x {MAX_K}: the library's product is faster")
    return YES


def _program_fits(problem: Problem) -> Supported:
    return no(f"heads wider than {MAX_D}") if problem.dim("D") > MAX_D else _linear_fits(problem)


def _always(problem: Problem) -> Supported:
    return YES


_CHECKS: dict[str, Callable[[Problem], Supported]] = {
    "jagged_attention": _attention_fits,
    "gdpa": _attention_fits,
    "norm": _always,
    "norm_linear": _linear_fits,
    "jagged_concat": _always,
    "jagged_expand": _always,
    "program": _program_fits,
}


def jagged_attention(problem: Problem, *tensors: Tensor | None) -> tuple[tuple[Tensor, Tensor], Saved]:
    out, lse = _attention(problem, tensors, problem.option("scale"), problem.option("out_scale"), None)
    assert lse is not None
    return (out, lse), (*tensors, out, lse)


def gdpa(problem: Problem, *tensors: Tensor | None) -> tuple[Tensor, Saved]:
    names = per_head(problem.option("activation"), problem.dim("H"))
    out, _ = _attention(problem, tensors, problem.option("scale_in"), problem.option("scale_out"), names)
    return out, tensors


def _attention(
    problem: Problem, tensors: Saved, scale: float, out_scale: float, names: Sequence[str] | None
) -> tuple[Tensor, Tensor | None]:
    t: dict[str, Any] = dict(zip(GDPA.tensors, tensors))
    q, k, v = (_last_dense(t[n]) for n in "qkv")
    k_offsets = t["k_offsets"].long().contiguous()
    q_offsets = None if t["q_offsets"] is None else t["q_offsets"].long().contiguous()
    targets = None if t["num_targets"] is None else t["num_targets"].long().contiguous()
    samples, heads = k_offsets.numel() - 1, q.shape[1]
    rows = samples * q.shape[0] if q_offsets is None else q.shape[0]
    used = rows if q_offsets is None else int(q_offsets[-1])
    out = q.new_empty(rows, heads, v.shape[2])
    lse = q.new_empty(heads, rows) if names is None else None
    out[used:] = 0
    if lse is not None:
        lse[:, used:] = -torch.inf
    codes = None if names is None else activation_codes(names)
    left, right = problem.option("window") or (-1, -1)
    strides = (s for x in (q, k, v) for s in x.stride()[:2])
    pointers = map(at, (q, k, v, out, lse, q_offsets, k_offsets, targets, codes))
    sizes = (heads, heads // max(1, k.shape[1]), q.shape[2], v.shape[2], rows, q.shape[0], 0, q_offsets is None, 0)
    call = Attention(*pointers, *strides, *sizes, problem.option("causal", False), left, right, scale, out_scale)
    shared_out("gem_attention", call, samples, k.shape[0] + used)
    return out, lse


def norm(problem: Problem, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None) -> Any:
    y = x.new_empty(x.shape)
    total, mean, rstd = _normed(problem, "gem_norm", x, residual, weight, bias, y, None, None)
    return (y, total), (x if total is None else total, weight, bias, mean, rstd)


def norm_linear(
    problem: Problem, x: Tensor, w: Tensor, b: Tensor | None, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None
) -> Any:
    turned, shift = packed(w, b)
    y = x.new_empty(x.shape[0], w.shape[0])
    total, mean, rstd = _normed(problem, "gem_linear", x, residual, weight, bias, y, turned, shift)
    return (y, total), (x if total is None else total, w, b, weight, bias, mean, rstd)


def _normed(
    problem: Problem, function: str, x: Tensor, residual: Any, weight: Any, bias: Any, y: Tensor, w: Tensor | None, b: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Total, mean, rstd; ``y`` is written."""
    x, layer = _last_dense(x), problem.option("kind") == "layer"
    residual = None if residual is None else _last_dense(residual)
    weight, bias = (None if v is None else v.contiguous() for v in (weight, bias))
    total = None if residual is None else x.new_empty(x.shape)
    mean, rstd = (x.new_empty(x.shape[0]) if layer else None), x.new_empty(x.shape[0])
    pointers = map(at, (x, residual, weight, bias, y, total, mean, rstd, w, b, None))
    stride = 0 if residual is None else residual.stride(0)
    kind = KINDS[problem.option("kind")]
    call = LinearRows(*pointers, x.stride(0), stride, 0, x.shape[1], y.shape[1], kind, problem.option("eps"))
    shared_out(function, call, x.shape[0], x.shape[0])
    return total, mean, rstd


def packed(w: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor]:
    """``w [N, K]`` turned to ``[K, padded]`` and the bias ``[padded]``: N rounded up to whole vectors, zeros there."""
    vector = int(library().gem_vector())
    padded = -(-w.shape[0] // vector) * vector
    turned, shift = w.new_zeros(w.shape[1], padded), w.new_zeros(padded)
    turned[:, : w.shape[0]] = w.t()
    if b is not None:
        shift[: w.shape[0]] = b
    return turned, shift


def activation_codes(names: Sequence[str]) -> Tensor:
    """The activation of each head as the C source numbers them."""
    return torch.tensor([_NAMES.index(_SAME.get(n, n)) for n in names], dtype=torch.int32)


def concat(problem: Problem, *tensors: Tensor) -> tuple[Tensor, tuple[()]]:
    n = problem.dim("parts")
    values = [v.contiguous() for v in tensors[:n]]
    offsets = [o.long().contiguous() for o in tensors[n:]]
    out = values[0].new_empty(sum(v.shape[0] for v in values), *values[0].shape[1:])
    parts, bounds = ((POINTER * n)(*map(at, given)) for given in (values, offsets))
    size = ctypes.c_int64(out[:1].numel() * out.element_size())
    rows = (
        library().gem_concat(parts, bounds, ctypes.c_int64(n), ctypes.c_int64(offsets[0].numel() - 1), size, at(out)) if size.value else 0
    )
    out[rows:] = 0
    return out, ()


def expand(problem: Problem, values: Tensor, offsets: Tensor, *, rows: int) -> tuple[Tensor, tuple[()]]:
    values, offsets = values.contiguous(), offsets.long().contiguous()
    out = values.new_empty(rows, *values.shape[1:])
    size = ctypes.c_int64(values[:1].numel() * values.element_size())
    library().gem_expand(at(values), at(offsets), ctypes.c_int64(offsets.numel() - 1), size, at(out))
    out[int(offsets[-1]) :] = 0
    return out, ()


def _last_dense(x: Tensor) -> Tensor:
    return x if x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()


def at(x: Tensor | None) -> POINTER:
    return POINTER(None if x is None else x.data_ptr())


def shared_out(function: str, call: ctypes.Structure, count: int, rows: int) -> list[int]:
    """``function(call, begin, end)`` over ``count`` units that have ``rows`` rows together; what the calls return."""
    run = getattr(library(), function)
    if not count:
        return []
    threads = min(torch.get_num_threads(), rows // LEAST)
    pieces = min(count, 8 * threads) if threads > 1 else 1  # more than threads, for their lengths differ
    cuts = [count * i // pieces for i in range(pieces + 1)]
    spans: list[tuple[Any, ...]] = [(ctypes.byref(call), ctypes.c_int64(a), ctypes.c_int64(b)) for a, b in zip(cuts, cuts[1:])]
    if pieces == 1:
        return [run(*spans[0])]
    return [job.result() for job in [_pool(threads).submit(run, *span) for span in spans]]


@lru_cache(maxsize=1)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "gem native")


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    loaded = build.load()
    loaded.gem_concat.restype = ctypes.c_int64
    return loaded
