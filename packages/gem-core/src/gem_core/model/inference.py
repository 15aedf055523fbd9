"""A model for inference: what a layer does to a history is one program of ops (`gem_core.ops.program`), and so is every small linear map.

The parameters stay those of the model, and results differ from it by rounding only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from gem_core.model.gem import GemLayer
from gem_core.model.history import History
from gem_core.model.layers import FeedForward, NormLinear, side_by_side
from gem_core.model.pooling import Pooling, SeedPooling
from gem_core.model.sequence import Pffn, SelfAttention, SequenceBlock
from gem_core.ops.program import Program, Rows

WIDEST = 512
"""Inputs and outputs of the linear maps that are done by a program; wider ones are left to torch."""


@contextmanager
def for_inference(model: nn.Module) -> Iterator[None]:
    """For a with-block, whose forward passes are in evaluation mode and without gradients, ``model`` computes by programs what it can."""
    changed: list[tuple[nn.Module, str]] = []

    def put(module: nn.Module, name: str, function: object) -> None:
        object.__setattr__(module, name, function)
        changed.append((module, name))

    for module in model.modules():
        if isinstance(module, GemLayer):
            if all(_fits(module, name) for name in {*module.blocks, *module.pools}):
                put(module, "_next", partial(_next, module))
        elif not isinstance(module, (NormLinear, FeedForward)):
            for child in module.children():
                if type(child) is nn.Linear and max(child.weight.shape) <= WIDEST:
                    put(child, "forward", partial(_linear, child))
    try:
        yield
    finally:
        for module, name in changed:
            object.__delattr__(module, name)


def _linear(module: nn.Linear, x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    p = Program(rows.shape[0])
    return p.run(p.linear(p.given(rows), module.weight, module.bias))[0].view(*x.shape[:-1], module.out_features)


def _fits(layer: GemLayer, name: str) -> bool:
    """Whether `_next` computes what the layer's own method does."""
    block, pool = dict(layer.blocks.items()).get(name), dict(layer.pools.items()).get(name)
    maps: list[nn.Module] = []
    if isinstance(block, SequenceBlock):
        if block.ffn is not None:
            return False
        if block.pffn is not None:
            if block.pffn.q is None or block.pffn.out is None or block.pffn.attention_precision is not None:
                return False
            maps += [block.pffn.kv.linear, block.pffn.q.linear, block.pffn.out]
        a = block.attention
        if a is not None:
            if a.kind == "block" or a.qk_norm or a.attention_precision is not None:
                return False
            maps += [a.qkv.linear, a.out]
    seeds = pool.attention if isinstance(pool, Pooling) else None
    if seeds is not None:
        if seeds.attention_precision is not None:
            return False
        maps += [seeds.kv.linear, *([] if seeds.queries is None else [seeds.queries.linear])]
    return all(type(m) is nn.Linear for m in maps)


def _next(layer: GemLayer, name: str, h: History, x: Tensor) -> History:
    if h.rotary is not None or h.rows.cls:
        return GemLayer._next(layer, name, h, x)
    rows = h.rows
    block, pool = dict(layer.blocks.items()).get(name), dict(layer.pools.items()).get(name)
    p = Program(rows.batch_size)
    s = first = p.given(h.s, rows.offsets)
    if isinstance(block, SequenceBlock):
        if block.pffn is not None:
            s = _pffn(p, block.pffn, s, x)
        if block.attention is not None:
            s = _attention(p, block.attention, s, int(rows.candidate))
    if not isinstance(pool, Pooling):
        return h if s is first else replace(h, s=p.run(s)[0])
    read = [] if pool.attention is None else _read(p, pool.attention, s, h.candidate)
    if not p.steps:
        return GemLayer._next(layer, name, h, x)
    wanted = ([] if s is first else [s]) + read
    found = p.run(*wanted)
    states = h.s if s is first else found.pop(0)
    tokens = []
    if pool.attention is not None:
        tokens.append(
            pool.attention.out(side_by_side([f.view(rows.batch_size, f.shape[0] // max(1, rows.batch_size), f.shape[1]) for f in found]))
        )
    taken = []
    if pool.recent:
        taken.append(rows.newest(states, pool.recent))
    if pool.last:
        taken.append(rows.last(states))
    if pool.rows is not None:
        tokens.append(pool.rows(side_by_side(taken)))
    return replace(h, s=states, pooled=side_by_side(tokens))


def _pffn(p: Program, m: Pffn, s: Rows, x: Tensor) -> Rows:
    assert m.q is not None
    assert m.out is not None
    tokens = x if m.mix is None else m.mix(x)
    kv = _normed(p, m.kv, p.given(tokens.flatten(0, 1), each=m.keys))
    width = m.heads * m.head_dim
    o = p.attention(
        _normed(p, m.q, s), kv.columns(0, width), kv.columns(width, width),
        heads=m.heads, width=m.head_dim, scale=m.scale_in, out_scale=m.scale_out, activation=m.config.activation,
    )  # fmt: skip
    return p.linear(o, m.out.weight, m.out.bias, add=s)


def _attention(p: Program, m: SelfAttention, s: Rows, candidates: int) -> Rows:
    width = m.heads * m.head_dim
    qkv = _normed(p, m.qkv, s)
    q, k, v = (qkv.columns(i * width, width) for i in range(3))
    o = p.attention(q, k, v, heads=m.heads, width=m.head_dim, causal=m.causal, window=m.window, candidates=candidates)
    return p.linear(o, m.out.weight, m.out.bias, add=s)


def _read(p: Program, m: SeedPooling, s: Rows, candidate: Tensor | None) -> list[Rows]:
    """What the queries read, ``[B * queries, heads * head_dim]`` each."""
    width = m.heads * m.head_dim
    kv = _normed(p, m.kv, s)
    k, v = kv.columns(0, width), kv.columns(width, width)
    read = []
    if m.seeds is not None:
        read.append(p.attention(m.seeds, k, v, heads=m.heads, width=m.head_dim))
    if m.queries is not None:
        assert candidate is not None
        q = _normed(p, m.queries, p.given(candidate)).split(m.count)
        read.append(p.attention(q, k, v, heads=m.heads, width=m.head_dim))
    return read


def _normed(p: Program, m: NormLinear, x: Rows) -> Rows:
    return p.linear(x, m.linear.weight, m.linear.bias, norm=m.kind, eps=m.eps)
