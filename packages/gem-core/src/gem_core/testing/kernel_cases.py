"""The calls that a kernel must do right: every option of every op at lengths where kernels break, with slack rows full of NaN."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gem_core.jagged import lengths_to_offsets
from gem_core.ops import RelativeBias
from gem_core.ops.activations import ACTIVATIONS

SLACK = 3
"""Rows past the last offset in every packed tensor of a case."""

EDGE = (0, 1, 7, 8, 63, 64, 65, 2, 0)
"""Sample lengths: none, one, around 8 and around 64."""

OTHER = (5, 0, 33, 8, 64, 70, 1, 2, 0)
"""Key lengths for the samples of EDGE: longer, shorter, none."""


@dataclass
class Call:
    """One call of an op: ``tensors`` that receive gradients by name, and ``arguments(tensors)`` for the public function.

    ``slack``: first row of a tensor that holds NaN and must get a zero gradient; ``out_slack``: first result row that must be zero.
    """

    tensors: dict[str, Tensor]
    arguments: Callable[[dict[str, Tensor]], dict[str, Any]]
    slack: dict[str, int] = field(default_factory=dict)
    out_slack: int | None = None


class Draw:
    """Draws the tensors of a case: seeded, so that every implementation and every precision sees the same numbers."""

    def __init__(self, dtype: torch.dtype, device: str, index: torch.dtype = torch.int64, seed: int = 0) -> None:
        self.dtype, self.device, self.index = dtype, device, index
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        x = torch.randn(*shape, generator=self._generator, dtype=torch.float64)
        return x.to(self.dtype if dtype is None else dtype).to(self.device)

    def table(self, *shape: int) -> Tensor:
        """Parameters: fp32 beside 16-bit activations."""
        return self.normal(*shape, dtype=self.dtype if self.dtype in (torch.float64, torch.float32) else torch.float32)

    def packed(self, rows: int, *shape: int) -> Tensor:
        """``rows`` rows and SLACK rows of NaN."""
        x = self.normal(rows + SLACK, *shape)
        x[rows:] = torch.nan
        return x

    def integers(self, low: int, high: int, size: int) -> Tensor:
        return torch.randint(low, high, (size,), generator=self._generator).to(self.device)

    def offsets(self, lengths: Sequence[int]) -> Tensor:
        return lengths_to_offsets(torch.tensor(lengths, dtype=self.index)).to(self.device)

    def counts(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=self.index, device=self.device)


Case = Callable[[Draw], Call]


def _attention(
    q_lengths: Sequence[int] = EDGE,
    k_lengths: Sequence[int] | None = None,
    *,
    heads: int = 2,
    kv_heads: int = 2,
    d: int = 16,
    dv: int | None = None,
    targets: Callable[[int, int], int] | None = None,
    context: int | None = None,
    position: int | None = None,
    time: bool = False,
    index: Sequence[int] | None = None,
    queries: int | None = None,
    bounds: bool = True,
    **options: Any,
) -> Case:
    """A call of jagged_attention or gdpa. ``queries``: a shared q of that many rows; ``index``: request sharing."""

    def build(draw: Draw) -> Call:
        keys = q_lengths if k_lengths is None else k_lengths
        width = d if dv is None else dv
        nq, nk = sum(q_lengths), sum(keys)
        q = draw.normal(queries, heads, d) if queries else draw.packed(nq, heads, d)
        tensors = {"q": q, "k": draw.packed(nk, kv_heads, d), "v": draw.packed(nk, kv_heads, width)}
        slack = {"k": nk, "v": nk} | ({} if queries else {"q": nq})
        fixed: dict[str, Any] = dict(options)
        fixed["k_offsets"] = None if k_lengths is None and index is None and not queries else draw.offsets(keys)
        fixed["q_offsets"] = None if queries else draw.offsets(q_lengths)
        seen = [keys[i] for i in index] if index is not None else keys
        if index is not None:
            fixed["kv_index"] = draw.counts(index)
        if queries:
            fixed["broadcast_q"] = True
        if targets is not None:
            count = [targets(a, a if index is not None else b) for a, b in zip(q_lengths, seen)]
            fixed["num_targets"] = draw.counts(count)
            if index is not None:
                tensors |= _own_rows(draw, q_lengths, count, nq, kv_heads, d, width)
        if context is not None:
            fixed["context_len"] = draw.counts([(context * (i % 3)) // 2 for i in range(len(q_lengths))])
        if bounds:
            fixed["max_q_len"], fixed["max_k_len"] = queries or max(q_lengths, default=0), max(keys, default=0)
        if position is not None:
            tensors["position"] = draw.table(heads, 2 * position + 1)
        times = None
        if time:
            tensors["time"] = draw.table(heads, 5)
            edges = torch.tensor([1, 8, 40, 300], device=draw.device)
            times = edges, draw.integers(0, 500, nq + SLACK), draw.integers(0, 500, nk + SLACK)

        def arguments(t: dict[str, Tensor]) -> dict[str, Any]:
            given = {n: t[n] for n in ("q", "k", "v")} | fixed
            if "target_k" in t:
                given["target_kv"] = t["target_k"], t["target_v"]
            if "position" in t:
                given["bias"] = RelativeBias(t["position"]) if times is None else RelativeBias(t["position"], t["time"], *times)
            return given

        out_slack = queries * (len(keys) if index is None else len(index)) if queries else nq
        return Call(tensors, arguments, slack, out_slack)

    return build


def _own_rows(draw: Draw, lengths: Sequence[int], count: Sequence[int], rows: int, heads: int, d: int, dv: int) -> dict[str, Tensor]:
    """target_k and target_v: NaN in every row that is not a candidate's."""
    candidate = torch.zeros(rows + SLACK, dtype=torch.bool)
    end = 0
    for length, t in zip(lengths, count):
        end += length
        candidate[end - t : end] = True
    tensors = {"target_k": draw.normal(rows + SLACK, heads, d), "target_v": draw.normal(rows + SLACK, heads, dv)}
    for x in tensors.values():
        x[~candidate.to(x.device)] = torch.nan
    return tensors


def _few(a: int, b: int) -> int:
    return min(a, b, 3)


def _all(a: int, b: int) -> int:
    return min(a, b)


_SHARED: dict[str, dict[str, Any]] = {
    "full": {},
    "no bounds": {"bounds": False},
    "empty batch": {"q_lengths": ()},
    "no rows": {"q_lengths": (0, 0, 0)},
    "one event": {"q_lengths": (1,)},
    "cross": {"k_lengths": OTHER},
    "short keys": {"k_lengths": (8,) * len(EDGE)},
    "causal": {"causal": True},
    "causal, fewer keys than queries": {"k_lengths": OTHER, "causal": True},
    "causal, long": {"q_lengths": (200, 3, 129), "causal": True},
    "window": {"window": 5},
    "window, one side": {"window": (-1, 2), "k_lengths": OTHER},
    "window, causal": {"window": (9, 30), "causal": True, "q_lengths": (150, 65, 0, 33)},
    "window, zero": {"window": 0},
    "candidates": {"targets": _few},
    "candidates, causal": {"targets": _few, "causal": True},
    "candidates, window": {"targets": _few, "window": (6, 1), "k_lengths": OTHER},
    "candidates only": {"targets": _all, "causal": True},
    "context": {"context": 6, "causal": True},
    "context, window": {"context": 9, "window": (4, 0)},
    "context, candidates": {"context": 6, "targets": _few, "causal": True, "window": (12, -1)},
    "context, cross": {"context": 6, "causal": True, "k_lengths": OTHER},
    "position bias": {"position": 4},
    "position bias, causal, cross": {"position": 20, "causal": True, "k_lengths": OTHER},
    "position and time bias": {"position": 4, "time": True},
    "bias, candidates, context": {"position": 4, "time": True, "targets": _few, "context": 5, "causal": True},
    "grouped heads": {"heads": 4, "kv_heads": 2},
    "one key head": {"heads": 3, "kv_heads": 1, "causal": True},
    "narrow v": {"dv": 24, "d": 32},
    "width 24": {"d": 24},
    "width 80, v 48": {"d": 80, "dv": 48, "q_lengths": (0, 33, 64)},
    "width 128": {"d": 128, "q_lengths": (0, 33, 64)},
    "width 256": {"d": 256, "q_lengths": (0, 17, 40)},
    "sharing": {"k_lengths": (33, 0, 65, 7), "index": (2, 0, 0, 1, 2, 2, 0, 1, 2)},
    "sharing, causal": {"k_lengths": (33, 0, 65), "index": (2, 0, 0, 1, 2, 2, 0, 1, 2), "causal": True},
    "sharing, candidates": {"k_lengths": (33, 0, 65), "index": (2, 0, 0, 1, 2, 2, 0, 1, 2), "targets": _few, "causal": True},
    "sharing, candidates only": {"k_lengths": (33, 0, 65), "index": (2, 0, 0, 1, 2, 2, 0, 1, 2), "targets": _all},
    "sharing, candidates, bias": {
        "k_lengths": (33, 0, 65), "index": (2, 0, 0, 1, 2, 2, 0, 1, 2), "targets": _few, "position": 8, "time": True, "context": 4,
    },
    "shared q": {"q_lengths": (), "k_lengths": OTHER, "queries": 8},
    "shared q, one row, grouped": {"q_lengths": (), "k_lengths": EDGE, "queries": 1, "heads": 4},
    "shared q, sharing": {"q_lengths": (), "k_lengths": (33, 0, 65), "index": (2, 0, 0, 1), "queries": 5},
    "shared q, empty batch": {"q_lengths": (), "k_lengths": (), "queries": 4},
    "many short samples": {"q_lengths": tuple(i % 4 for i in range(150))},
}  # fmt: skip


def _with_lse(case: Case) -> Case:
    def build(draw: Draw) -> Call:
        call = case(draw)
        return Call(call.tensors, lambda t: call.arguments(t) | {"return_lse": True}, call.slack, call.out_slack)

    return build


def _jagged_attention_cases() -> dict[str, Case]:
    cases = {name: _with_lse(_attention(**kw)) for name, kw in _SHARED.items()}
    cases["scale and out_scale"] = _with_lse(_attention(scale=0.4, out_scale=0.125))
    # scores far below zero, where subtracting masked exponentials would cancel
    cases["scores near -60"] = _with_lse(_far_below(60.0))
    return cases


def _far_below(score: float) -> Case:
    def build(draw: Draw) -> Call:
        call = _attention(d=16)(draw)
        d = 16
        call.tensors["q"][:, :, 0], call.tensors["k"][:, :, 0] = (score * d**0.5) ** 0.5, -((score * d**0.5) ** 0.5)
        for name in ("q", "k"):
            call.tensors[name][call.slack[name] :] = torch.nan
        return call

    return build


def _gdpa_cases() -> dict[str, Case]:
    cases = {name: _attention(activation="silu", scale_in=0.3, scale_out=0.25, **kw) for name, kw in _SHARED.items()}
    for name in ACTIVATIONS:
        cases[f"activation {name}"] = _attention((0, 1, 33, 64, 5), activation=name, scale_in=0.3)
    cases["activation per head"] = _attention(
        (0, 1, 33, 64, 5), heads=4, kv_heads=2, activation=("gelu", "relu", "relu", "raw"), scale_in=0.3, causal=True
    )
    return cases


def _block(lengths: Sequence[int] = EDGE, *, heads: int = 2, kv_heads: int = 2, d: int = 32, dv: int | None = None, **options: Any) -> Case:
    rotary, by_row = options.pop("rotary", False), options.pop("by_row", False)

    def build(draw: Draw) -> Call:
        n = sum(lengths)
        width = d if dv is None else dv
        tensors = {"q": draw.packed(n, heads, d), "k": draw.packed(n, kv_heads, d), "v": draw.packed(n, kv_heads, width)}
        fixed: dict[str, Any] = {"offsets": draw.offsets(lengths), **options}
        if rotary:
            table = 17 if by_row else max(lengths, default=1)
            angle = draw.normal(table, d // 2, dtype=torch.float32) * 2
            fixed["rotary"] = angle.cos(), angle.sin()
            if by_row:
                rows = draw.integers(0, table, n + SLACK)
                rows[n:] = 1 << 30
                fixed["rotary_rows"] = rows
        return Call(tensors, lambda t: t | fixed, dict.fromkeys(("q", "k", "v"), n), n)

    return build


def _block_cases() -> dict[str, Case]:
    return {
        "blocks of 64": _block(),
        "blocks of 128": _block((0, 1, 127, 128, 129, 300), block_size=128),
        "several blocks": _block((200, 0, 65, 192)),
        "empty batch": _block(()),
        "no rows": _block((0, 0)),
        "grouped heads": _block(heads=4, kv_heads=2),
        "scale": _block(scale=0.3),
        "rotary": _block((0, 1, 64, 130, 33), rotary=True),
        "rotary, grouped, 128": _block((0, 130, 33), heads=4, kv_heads=2, rotary=True, block_size=128),
        "rotary rows": _block((0, 1, 64, 130, 33), rotary=True, by_row=True),
        "width 128": _block((0, 65, 33), d=128, rotary=True),
        "width 24": _block((0, 65, 33), d=24, rotary=True),
        "narrow v": _block((0, 65, 33), d=32, dv=16),
    }


def _rows(op: str, shape: tuple[int, ...] = (37, 48), out: int = 40, **options: Any) -> Case:
    """A call of norm, norm_linear, linear_norm or mlp; flags ``affine``, ``bias``, ``residual`` say which tensors are given."""
    affine, bias, residual = (options.pop(n, False) for n in ("affine", "bias", "residual"))
    hidden = options.pop("hidden", 96)

    def build(draw: Draw) -> Call:
        width = shape[-1]
        tensors = {"x": draw.normal(*shape) + 0.5}
        normed = out if op == "linear_norm" else width
        if residual:
            tensors["residual"] = draw.normal(*shape)
        if affine:
            name = "weight" if op == "norm" else "norm_weight"
            tensors[name] = draw.table(normed)
            tensors["bias" if op == "norm" else "norm_bias"] = draw.table(normed)
        if op in ("norm_linear", "linear_norm"):
            tensors["w"] = draw.normal(out, width) * width**-0.5
            if bias:
                tensors["b"] = draw.normal(out)
        if op == "mlp":
            tensors |= {"w1": draw.normal(hidden, width) * width**-0.5, "w2": draw.normal(out, hidden) * hidden**-0.5}
            if bias:
                tensors |= {"b1": draw.normal(hidden), "b2": draw.normal(out)}
        absent = {} if op != "mlp" or bias else {"b1": None, "b2": None}
        return Call(tensors, lambda t: t | absent | options)

    return build


def _norm_cases(op: str) -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for kind in ("rms", "layer"):
        cases[kind] = _rows(op, kind=kind)
        cases[f"{kind}, affine"] = _rows(op, kind=kind, affine=True, bias=True)
        cases[f"{kind}, large eps"] = _rows(op, kind=kind, eps=0.5)
        cases[f"{kind}, one row"] = _rows(op, (1, 48), kind=kind)
        cases[f"{kind}, no rows"] = _rows(op, (0, 48), kind=kind, affine=True)
        cases[f"{kind}, odd width"] = _rows(op, (65, 33), 17, kind=kind, affine=True)
        cases[f"{kind}, wide"] = _rows(op, (9, 520), 264, kind=kind)
        cases[f"{kind}, three dimensions"] = _rows(op, (3, 5, 32), kind=kind)
        if op != "linear_norm":
            cases[f"{kind}, residual"] = _rows(op, kind=kind, residual=True, affine=True)
        if op == "norm_linear":
            cases[f"{kind}, through"] = _rows(op, kind=kind, through=True, bias=True)
    return cases


def _mlp_cases() -> dict[str, Case]:
    cases = {f"activation {name}": _rows("mlp", activation=name, bias=True) for name in ACTIVATIONS}
    for norm in (None, "rms", "layer"):
        cases[f"norm {norm}"] = _rows("mlp", norm=norm)
        cases[f"norm {norm}, biases, residual"] = _rows("mlp", norm=norm, bias=True, residual=True)
        cases[f"norm {norm}, no rows"] = _rows("mlp", (0, 48), norm=norm, bias=True)
    cases["odd widths"] = _rows("mlp", (65, 33), 17, hidden=70, norm="rms", bias=True)
    cases["wide"] = _rows("mlp", (70, 128), 128, hidden=512, bias=True)
    return cases


def _norm_gdpa(
    q_lengths: Sequence[int] = EDGE,
    k_lengths: Sequence[int] | None = None,
    *,
    heads: int = 2,
    d: int = 16,
    bounds: bool = True,
    **options: Any,
) -> Case:
    def build(draw: Draw) -> Call:
        keys = q_lengths if k_lengths is None else k_lengths
        nq, nk = sum(q_lengths), sum(keys)
        tensors = {"q": draw.packed(nq, heads, d), "k": draw.packed(nk, heads, d), "v": draw.packed(nk, heads, d)}
        fixed = {
            "q_offsets": draw.offsets(q_lengths),
            "k_offsets": None if k_lengths is None else draw.offsets(keys),
            "scale_in": 0.3,
            **options,
        }
        if bounds:
            fixed["max_q_len"], fixed["max_k_len"] = max(q_lengths, default=0), max(keys, default=0)
        return Call(tensors, lambda t: t | fixed, {"q": nq, "k": nk, "v": nk}, nq)

    return build


def _norm_gdpa_cases() -> dict[str, Case]:
    return {
        "self": _norm_gdpa(),
        "no bounds": _norm_gdpa(bounds=False),
        "cross": _norm_gdpa(EDGE, OTHER),
        "short keys": _norm_gdpa(EDGE, (8,) * len(EDGE), scale_out=0.5),
        "empty batch": _norm_gdpa(()),
        "no rows": _norm_gdpa((0, 0)),
        "four heads, per-head activation": _norm_gdpa((0, 1, 33, 64), heads=4, activation=("gelu", "silu", "relu", "raw")),
        "large eps": _norm_gdpa((0, 1, 33, 64), eps=0.1, activation="silu"),
        "width 64": _norm_gdpa((0, 33, 64), (128, 128, 128), d=64),
        "width 128": _norm_gdpa((0, 33, 64), (128, 128, 128), d=128),
    }


def _jagged(op: str, lengths: Sequence[int] = EDGE, shape: tuple[int, ...] = (5,)) -> Case:
    """A call of a data-movement op on rows of ``shape``."""

    def build(draw: Draw) -> Call:
        n, offsets = sum(lengths), draw.offsets(lengths)
        if op == "jagged_concat":
            others = [OTHER[i % len(OTHER)] for i in range(len(lengths))]
            m, other_offsets = sum(others), draw.offsets(others)
            tensors = {"a": draw.packed(n, *shape), "b": draw.packed(m, *shape), "c": draw.packed(n, *shape)}
            return Call(
                tensors,
                lambda t: {"parts": [(t["a"], offsets), (t["b"], other_offsets), (t["c"], offsets)]},
                {"a": n, "b": m, "c": n},
                2 * n + m,
            )
        if op in ("jagged_expand", "padded_to_jagged"):
            padded = (max(lengths, default=1) + 2, *shape) if op == "padded_to_jagged" else shape
            name = "padded" if op == "padded_to_jagged" else "values"
            tensors = {name: draw.normal(len(lengths), *padded)}
            return Call(tensors, lambda t: {name: t[name], "offsets": offsets, "rows": n + SLACK}, {}, n)
        fixed: dict[str, Any] = {"offsets": offsets}
        if op == "jagged_split":
            first = [(i * 3) % (length + 1) for i, length in enumerate(lengths)]
            fixed |= {"lengths": draw.counts(first), "first_rows": sum(first)}
        if op == "jagged_to_padded":
            fixed |= {"max_len": max(lengths, default=0) + 1, "fill": -1.5}
        return Call({"values": draw.packed(n, *shape)}, lambda t: t | fixed, {"values": n})

    return build


def _jagged_cases(op: str) -> dict[str, Case]:
    return {
        "rows of 5": _jagged(op),
        "rows of 4 x 16": _jagged(op, shape=(4, 16)),
        "scalars": _jagged(op, shape=()),
        "wide rows": _jagged(op, (3, 0, 9), shape=(300,)),
        "empty batch": _jagged(op, ()),
        "no rows": _jagged(op, (0, 0)),
        "many short samples": _jagged(op, tuple(i % 4 for i in range(150))),
    }


def cases(op: str) -> dict[str, Case]:
    """Every case of ``op`` by name."""
    if op == "padded_to_jagged" or (op.startswith("jagged_") and op != "jagged_attention"):
        return _jagged_cases(op)
    if op in ("norm", "norm_linear", "linear_norm"):
        return _norm_cases(op)
    others = {
        "jagged_attention": _jagged_attention_cases,
        "gdpa": _gdpa_cases,
        "block_attention": _block_cases,
        "mlp": _mlp_cases,
        "norm_gdpa": _norm_gdpa_cases,
    }
    return others[op]()


_MANY = tuple(i % 3 for i in range(70_000))
MANY_SAMPLES: dict[str, Case] = {
    "jagged_attention": _with_lse(_attention(_MANY, causal=True)),
    "gdpa": _attention(_MANY, activation="silu", scale_in=0.3),
    "block_attention": _block(_MANY),
    "norm_gdpa": _norm_gdpa(_MANY),
    **{
        op: _jagged(op, _MANY)
        for op in ("jagged_concat", "jagged_split", "jagged_sum", "jagged_mean", "jagged_expand", "jagged_to_padded", "padded_to_jagged")
    },
}
"""Cases of 70,000 samples, for grids; the reference takes some ten seconds for one."""
