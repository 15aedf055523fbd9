"""The rows of the dense benchmark: tensors, a plain PyTorch form of each op, and what a user would run instead.

Shapes are those of the project's anchors: BlockAttention B 1152, H 4, d 128, lengths up to 2000 at s 0.7; norm beside a linear layer
M 262,144, K = N = 512; mlp M 262,144, hidden 4 d; norm_gdpa B 768, H 4, d 128, up to 1024 rows at s 0.5 against 128 keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gem_core.hookspecs import KernelSpec
from gem_core.jagged import lengths_to_offsets
from gem_core.ops.contract import Problem
from gem_core.ops.contracts import contracts
from gem_core.ops.explain import problem_of
from gem_kernels.bench.attention_rows import lengths

EPS = 1e-6
ROWS_M = 262_144
Named = dict[str, Any]


@dataclass
class Case:
    """One row on a device.

    ``named`` holds the op's tensors by the contract's names, ``arguments`` its other arguments. ``plain(named)`` is the op in PyTorch, used
    in float64 as the reference, in bf16 as the yardstick of the error, and compiled as a peer. ``parts`` cut the tensors down for that:
    each gives (tensors of the part, where its results lie: name -> rows). No parts: everything at once.
    """

    op: str
    named: Named
    arguments: Named
    plain: Callable[[Named], Tensor]
    leaves: tuple[str, ...]
    forward_bytes: int
    backward_bytes: int
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    peers: dict[str, Callable[[Named], Tensor]] = field(default_factory=dict)
    parts: list[tuple[Named, dict[str, slice]]] = field(default_factory=list)

    def problem(self) -> Problem:
        """What the op's frontend makes of the row, gradients wanted."""
        given = {n: t.detach().requires_grad_(n in self.leaves) if isinstance(t, Tensor) else t for n, t in self.named.items()}
        if self.op == "block_attention" and given.get("rotary_cos") is not None:
            self_rotary = given.pop("rotary_cos").detach(), given.pop("rotary_sin").detach()
            given["rotary"] = self_rotary
        return problem_of(self.op, **{n: t for n, t in given.items() if t is not None or n in ("b1", "b2")}, **self.arguments)

    def tensors(self) -> tuple[Tensor | None, ...]:
        return tuple(self.named.get(n) for n in contracts()[self.op].tensors)


@dataclass(frozen=True)
class Row:
    """``targets``: pass -> (what is compared, least value): "compile" is the speed-up over torch.compile, "copy" the share of copy rate."""

    name: str
    build: Callable[..., Case]
    targets: dict[str, tuple[str, float]] = field(default_factory=dict)
    tuned: bool = True


def _size(*tensors: Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def _draw(device: str, *shape: int, scale: float = 1.0, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return (torch.randn(*shape, device=device, generator=generator, dtype=torch.float32) * scale).to(dtype)


def _rows(device: str) -> int:
    """Full size on the GPU; enough to compile for it elsewhere."""
    return ROWS_M if device == "cuda" else 256


# --- BlockAttention ---


def block(device: str, rotary: bool, size: int = 64, heads: int = 4, d: int = 128) -> Case:
    """1.617 M tokens. The byte floors are 4 tensors forward and 7 backward."""
    count = lengths(1152, 2000, 0.7, torch.Generator().manual_seed(0)) if device == "cuda" else torch.tensor([100, 28])
    n = int(count.sum())
    offsets = lengths_to_offsets(count)
    named: Named = {x: _draw(device, n, heads, d, seed=i) for i, x in enumerate("qkv")}
    named["offsets"] = offsets.to(device, torch.int32)
    if rotary:
        angle = torch.outer(torch.arange(2048.0), 10000.0 ** (-torch.arange(0, d, 2) / d)).to(device)
        named |= {"rotary_cos": angle.cos(), "rotary_sin": angle.sin()}
    case = Case(
        "block_attention", named, {"block_size": size}, lambda t: _block_plain(t, size), ("q", "k", "v"),
        4 * _size(named["q"]), 7 * _size(named["q"]),
    )  # fmt: skip
    pairs = float(((count // size) * size * size + (count % size) ** 2).sum())
    case.forward_flops, case.backward_flops = 4.0 * heads * d * pairs, 10.0 * heads * d * pairs
    for b in {0, len(count) - 1, int(count.argmax()), int(count.argmin())}:
        rows = slice(int(offsets[b]), int(offsets[b + 1]))
        part = {x: named[x][rows] for x in "qkv"} | {"offsets": torch.tensor([0, int(count[b])], dtype=torch.int32, device=device)}
        part |= {x: named[x] for x in ("rotary_cos", "rotary_sin") if x in named}
        case.parts.append((part, {"out": rows, "q": rows, "k": rows, "v": rows}))
    if not rotary and size == 64:
        pieces = torch.cat([torch.tensor([size] * (c // size) + ([c % size] if c % size else [])) for c in count.tolist()])
        cut = lengths_to_offsets(pieces).to(device, torch.int32)
        case.peers["varlen_attn on pieces"] = lambda t: _varlen(t, cut, size)
    return case


def _varlen(t: Named, cut: Tensor, size: int) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(t["q"], t["k"], t["v"], cut, cut, size, size, scale=t["q"].shape[-1] ** -0.5)


def _block_plain(t: Named, size: int) -> Tensor:
    """One sample: rotate in fp32 (or finer), pad to whole blocks, attend a block at a time."""
    n, h, d = t["q"].shape
    x = [t[name] for name in "qkv"]
    if t.get("rotary_cos") is not None:
        fine = torch.float64 if x[0].dtype == torch.float64 else torch.float32
        c, s = (t[name][:n].to(fine)[:, None] for name in ("rotary_cos", "rotary_sin"))
        x = [_rotated(y.to(fine), c, s).to(y.dtype) for y in x]
    blocks = -(-n // size)
    q, k, v = (F.pad(y, (0, 0, 0, 0, 0, blocks * size - n)).view(blocks, size, h, d).transpose(1, 2) for y in x)
    seen = (torch.arange(blocks * size, device=q.device) < n).view(blocks, 1, 1, size)
    scores = (q @ k.transpose(2, 3) * d**-0.5).masked_fill(~seen, -torch.inf)
    fine = torch.float64 if q.dtype == torch.float64 else torch.float32
    p = torch.softmax(scores, -1, dtype=fine).to(q.dtype)
    return (p @ v).transpose(1, 2).reshape(blocks * size, h, d)[:n]


def _rotated(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * c - b * s, a * s + b * c], -1).flatten(-2)


# --- norms and linear layers ---


def _normed(x: Tensor, kind: str) -> Tensor:
    width = (x.shape[-1],)
    return F.rms_norm(x, width, eps=EPS) if kind == "rms" else F.layer_norm(x, width, eps=EPS)


def norm(device: str, kind: str, residual: bool = False, c: int = 512) -> Case:
    named: Named = {"x": _draw(device, _rows(device), c)}
    if residual:
        named["residual"] = _draw(device, _rows(device), c, seed=1)
    plain = lambda t: _normed(t["x"] + t["residual"] if residual else t["x"], kind)  # noqa: E731
    x = _size(named["x"])
    case = Case("norm", named, {"kind": kind, "eps": EPS}, plain, ("x",), (4 if residual else 2) * x, 3 * x)
    case.peers["compile"] = torch.compile(plain)
    return case


def norm_linear(device: str, kind: str, residual: bool = False, k: int = 512, n: int = 512) -> Case:
    named: Named = {"x": _draw(device, _rows(device), k), "w": _draw(device, n, k, scale=k**-0.5, seed=1)}
    if residual:
        named["residual"] = _draw(device, _rows(device), k, seed=2)
    plain = lambda t: F.linear(_normed(t["x"] + t["residual"] if residual else t["x"], kind), t["w"])  # noqa: E731
    return _linear_case("norm_linear", named, kind, plain, n)


def linear_norm(device: str, kind: str, k: int = 512, n: int = 512) -> Case:
    named: Named = {"x": _draw(device, _rows(device), k), "w": _draw(device, n, k, scale=k**-0.5, seed=1)}
    return _linear_case("linear_norm", named, kind, lambda t: _normed(F.linear(t["x"], t["w"]), kind), n)


def _linear_case(op: str, named: Named, kind: str, plain: Callable[[Named], Tensor], n: int) -> Case:
    x, w = named["x"], named["w"]
    y = x.shape[0] * n * x.element_size()
    extra = 2 * _size(x) if "residual" in named else 0
    forward = _size(x, w) + y + extra
    backward = 2 * _size(x, w) + y + (y if op == "linear_norm" else 0)
    case = Case(op, named, {"kind": kind, "eps": EPS}, plain, ("x", "w"), forward, backward)
    case.forward_flops = 2.0 * x.shape[0] * w.numel()
    case.backward_flops = 2 * case.forward_flops
    case.peers = {"compile": torch.compile(plain), "linear alone": lambda t: F.linear(t["x"], t["w"])}
    return case


def mlp(device: str, d: int, kind: str | None = None) -> Case:
    named: Named = {
        "x": _draw(device, _rows(device), d),
        "w1": _draw(device, 4 * d, d, scale=d**-0.5, seed=1),
        "b1": _draw(device, 4 * d, seed=2),
        "w2": _draw(device, d, 4 * d, scale=(4 * d) ** -0.5, seed=3),
        "b2": _draw(device, d, seed=4),
    }

    def plain(t: Named) -> Tensor:
        x = t["x"] if kind is None else _normed(t["x"], kind)
        return F.linear(F.gelu(F.linear(x, t["w1"], t["b1"])), t["w2"], t["b2"])

    x = named["x"]
    case = Case("mlp", named, {"activation": "gelu", "norm": kind, "eps": EPS}, plain, tuple(named), 2 * _size(x), 3 * _size(x))
    case.forward_flops = 16.0 * x.shape[0] * d * d
    case.backward_flops = 2 * case.forward_flops
    case.peers["compile"] = torch.compile(plain)
    return case


# --- norm_gdpa ---


def norm_gdpa(device: str, heads: int = 4, d: int = 128, keys: int = 128, activation: str = "fast_gelu") -> Case:
    count = lengths(768, 1024, 0.5, torch.Generator().manual_seed(0)) if device == "cuda" else torch.tensor([100, 28])
    n, batch = int(count.sum()), len(count)
    offsets = lengths_to_offsets(count)
    k_offsets = torch.arange(batch + 1, dtype=torch.int32, device=device) * keys
    named: Named = {
        "q": _draw(device, n, heads, d),
        "k": _draw(device, batch * keys, heads, d, scale=d**-0.5, seed=1),
        "v": _draw(device, batch * keys, heads, d, scale=0.1, seed=2),
        "q_offsets": offsets.to(device, torch.int32),
        "k_offsets": k_offsets,
    }
    bounds = {"max_q_len": 1024, "max_k_len": keys}
    arguments = {"activation": activation, "eps": EPS, **bounds}
    q, kv = _size(named["q"]), _size(named["k"], named["v"])
    case = Case("norm_gdpa", named, arguments, _norm_gdpa_plain, ("q", "k", "v"), 2 * q + kv, 4 * q + 2 * kv)
    case.forward_flops = 4.0 * heads * d * n * keys
    case.backward_flops = 2.5 * case.forward_flops
    for b in {0, batch - 1, int(count.argmax()), int(count.argmin())}:
        rows, own = slice(int(offsets[b]), int(offsets[b + 1])), slice(b * keys, (b + 1) * keys)
        part = {"q": named["q"][rows], "k": named["k"][own], "v": named["v"][own]}
        case.parts.append((part, {"out": rows, "q": rows, "k": own, "v": own}))
    case.peers["compiled norms around gdpa"] = _around_gdpa(heads * d, {"activation": activation, **bounds})
    return case


def _norm_gdpa_plain(t: Named) -> Tensor:
    """One sample."""
    q, k, v = (t[x].transpose(0, 1) for x in "qkv")
    width = (t["q"][0].numel(),)
    l = F.layer_norm(t["q"].flatten(1), width, eps=EPS).view(t["q"].shape)
    p = F.gelu(l.transpose(0, 1) @ k.transpose(1, 2), approximate="tanh")
    o = (p @ v).transpose(0, 1) + l
    return F.rms_norm(o.flatten(1), width, eps=EPS).view(q.transpose(0, 1).shape) + t["q"]


class _Gdpa(torch.autograd.Function):
    """Our gdpa without the public function's checks of values, which a captured graph would run every time."""

    @staticmethod
    def forward(ctx: Any, problem: Problem, *tensors: Tensor | None) -> Tensor:
        ctx.problem = problem
        out, saved = _gdpa_spec(problem).forward(problem, *tensors)
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        needs = (True, True, True, False, False, False, False)
        dq, dk, dv, *_ = _gdpa_spec(ctx.problem).backward(ctx.problem, ctx.saved_tensors, dout, needs)
        return None, dq, dk, dv, *(None for _ in contracts()["gdpa"].tensors[3:])


def _gdpa_spec(problem: Problem) -> KernelSpec:
    """The implementation that would be chosen."""
    from gem_kernels.triton import attention, hopper

    able = [s for s in (*attention.specs(), *hopper.specs()) if s.op == "gdpa" and s.supports(problem)]
    return max(able, key=lambda s: s.priority)


def _around_gdpa(width: int, arguments: Named) -> Callable[[Named], Tensor]:
    before = torch.compile(lambda q: F.layer_norm(q.flatten(1), (width,), eps=EPS).view(q.shape))
    after = torch.compile(lambda o, l, q: F.rms_norm((o + l).flatten(1), (width,), eps=EPS).view(q.shape) + q)

    def run(t: Named) -> Tensor:
        l = before(t["q"])
        given = {"q": l, "k": t["k"], "v": t["v"], "q_offsets": t["q_offsets"], "k_offsets": t["k_offsets"]}
        problem = problem_of("gdpa", **given, **arguments)
        o = _Gdpa.apply(problem, *(given.get(name) for name in contracts()["gdpa"].tensors))
        return after(o, l, t["q"])

    return run


ROWS = (
    Row("block-64", lambda device: block(device, rotary=False), {"forward": ("copy", 0.88), "backward": ("copy", 0.68)}),
    Row("block-64-rotary", lambda device: block(device, rotary=True), {"forward": ("copy", 0.80), "backward": ("copy", 0.50)}),
    Row("norm_linear-rms", lambda device: norm_linear(device, "rms"), {"forward": ("compile", 1.30), "backward": ("compile", 1.18)}),
    Row("linear_norm-rms", lambda device: linear_norm(device, "rms"), {"forward": ("compile", 1.30), "backward": ("compile", 1.18)}),
    Row("mlp-64", lambda device: mlp(device, 64), {"forward": ("compile", 1.4), "backward": ("compile", 1.2)}),
    Row("mlp-128", lambda device: mlp(device, 128), {"forward": ("compile", 1.4), "backward": ("compile", 1.2)}),
    Row("mlp-256", lambda device: mlp(device, 256), {"forward": ("compile", 1.4), "backward": ("compile", 1.2)}),
    Row("norm_gdpa", norm_gdpa, {"forward": ("compiled norms around gdpa", 1.2), "backward": ("compiled norms around gdpa", 1.1)}),
    Row("norm_linear-layer", lambda device: norm_linear(device, "layer")),
    Row("norm_linear-rms-residual", lambda device: norm_linear(device, "rms", residual=True)),
    Row("linear_norm-layer", lambda device: linear_norm(device, "layer")),
    Row("mlp-128-rms", lambda device: mlp(device, 128, "rms")),
    Row("norm-rms", lambda device: norm(device, "rms")),
    Row("norm-layer-residual", lambda device: norm(device, "layer", residual=True)),
    Row("block-128", lambda device: block(device, rotary=False, size=128)),
)
