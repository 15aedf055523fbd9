"""block_attention, norms, mlp, norm_gdpa, activations: references against torch's own functions in float64, and gradcheck."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from gem_core import ops
from gem_core.jagged import lengths_to_offsets
from gem_core.ops.activations import ACTIVATIONS, act, act_grad

LENGTHS = [0, 1, 7, 5, 12, 0]


def offsets(lengths: list[int]) -> Tensor:
    return lengths_to_offsets(torch.tensor(lengths, dtype=torch.int64))


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def same(found: Any, expected: Any, leaves: list[Tensor]) -> None:
    """Equal results, and equal gradients of a random weighting of them."""
    found, expected = ([x] if isinstance(x, Tensor) else list(x) for x in (found, expected))
    weights = [torch.randn_like(x) for x in found]
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b)
    grads = [torch.autograd.grad(side, leaves, weights, retain_graph=True) for side in (found, expected)]
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b)


# --- block attention ---


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Interleaved pairs as complex numbers, turned by complex multiplication."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.complex(cos, sin)[:, None]).flatten(-2)


def dense_block(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], size: int, scale: float) -> Tensor:
    """One masked softmax over the whole batch."""
    sample = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
    place = torch.cat([torch.arange(n) for n in lengths]) if lengths else torch.zeros(0, dtype=torch.int64)
    block = sample * 10_000 + place // size
    mask = block[:, None] == block[None, :]
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) * scale
    weights = scores.masked_fill(~mask, -torch.inf).softmax(2)
    return torch.einsum("hij,jhd->ihd", weights, v)


@pytest.mark.parametrize("rotary", [None, "position", "rows"])
@pytest.mark.parametrize("size", [2, 5, 64])
def test_block_attention_equals_dense(size: int, rotary: str | None) -> None:
    torch.manual_seed(0)
    n = sum(LENGTHS)
    q, k, v = leaf(n, 4, 6), leaf(n, 2, 6), leaf(n, 2, 6)
    options: dict[str, Any] = {}
    turned = [q, k, v]
    if rotary:
        angle = torch.rand(12, 3) * 6
        rows = torch.cat([torch.arange(length) for length in LENGTHS])
        if rotary == "rows":
            rows = torch.randint(0, 12, (n,))
            options["rotary_rows"] = rows
        options["rotary"] = angle.cos(), angle.sin()
        cos, sin = (t.double()[rows] for t in options["rotary"])
        turned = [rotated(x, cos, sin) for x in (q, k, v)]
    expected = dense_block(*turned, LENGTHS, size, 6**-0.5)
    same(ops.block_attention(q, k, v, offsets(LENGTHS), block_size=size, **options, backend="reference"), expected, [q, k, v])


def test_block_attention_is_attention_within_one_block() -> None:
    q, k, v = leaf(9, 2, 4), leaf(9, 2, 4), leaf(9, 2, 4)
    o = offsets([4, 5])
    same(ops.block_attention(q, k, v, o, backend="reference"), ops.jagged_attention(q, k, v, o, backend="reference"), [q, k, v])


def test_block_attention_gradcheck() -> None:
    torch.manual_seed(0)
    angle, o = torch.rand(4, 1) * 6, offsets([3, 0, 4])
    assert gradcheck(
        lambda q, k, v: ops.block_attention(q, k, v, o, block_size=2, rotary=(angle.cos(), angle.sin()), scale=0.4, backend="reference"),
        (leaf(7, 2, 2), leaf(7, 1, 2), leaf(7, 1, 2)),
    )


@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from([0, 1, 7, 8, 63, 64, 65]), max_size=3), st.sampled_from([7, 64]))
def test_block_attention_at_random_lengths(lengths: list[int], size: int) -> None:
    torch.manual_seed(len(lengths))
    n = sum(lengths)
    q, k, v = leaf(n, 2, 4), leaf(n, 2, 4), leaf(n, 2, 4)
    same(
        ops.block_attention(q, k, v, offsets(lengths), block_size=size, backend="reference"),
        dense_block(q, k, v, lengths, size, 0.5),
        [q, k, v],
    )


# --- norms ---


def torch_norm(x: Tensor, kind: str, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    if kind == "layer":
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    y = F.rms_norm(x, x.shape[-1:], weight, eps)
    return y if bias is None else y + bias


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_norm_family_equals_torch(kind: str, affine: bool, residual: bool) -> None:
    torch.manual_seed(0)
    x, w, b = leaf(2, 3, 5), leaf(4, 5), leaf(4)
    extra = leaf(2, 3, 5) if residual else None
    weight, bias = (leaf(5), leaf(5)) if affine else (None, None)
    total = x if extra is None else x + extra
    leaves = [t for t in (x, weight, bias, extra) if t is not None]
    normed = torch_norm(total, kind, weight, bias, 1e-3)
    kw: dict[str, Any] = {"kind": kind, "eps": 1e-3, "backend": "reference"}
    found = ops.norm(x, weight=weight, bias=bias, residual=extra, **kw)
    same(found, (normed, total) if residual else normed, leaves)
    found = ops.norm_linear(x, w, b, norm_weight=weight, norm_bias=bias, residual=extra, **kw)
    projected = F.linear(normed, w, b)
    same(found, (projected, total) if residual else projected, [*leaves, w, b])
    if not residual:
        after_weight, after_bias = (leaf(4), leaf(4)) if affine else (None, None)
        found = ops.linear_norm(x, w, b, norm_weight=after_weight, norm_bias=after_bias, **kw)
        after = [t for t in (x, w, b, after_weight, after_bias) if t is not None]
        same(found, torch_norm(F.linear(x, w, b), kind, after_weight, after_bias, 1e-3), after)


def test_layer_norm_linear_identity() -> None:
    """n(x) wᵀ is rstd (x wᵀ − μ Σw)."""
    x, w = leaf(6, 5), leaf(3, 5)
    mean, rstd = x.mean(1, keepdim=True), (x.var(1, correction=0, keepdim=True) + 1e-6).rsqrt()
    expected = rstd * (x @ w.T - mean * w.sum(1))
    same(ops.norm_linear(x, w, kind="layer", backend="reference"), expected, [x, w])


def test_norm_parameters_may_be_wider_than_the_rows() -> None:
    x = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(8, requires_grad=True)
    y = ops.norm(x, weight=weight, backend="reference")
    grads = torch.autograd.grad(y.float().sum(), [x, weight])
    assert [t.dtype for t in (y, *grads)] == [torch.bfloat16, torch.bfloat16, torch.float32]


def test_unused_result_of_a_residual_norm() -> None:
    x, r = leaf(3, 4), leaf(3, 4)
    y, total = ops.norm(x, residual=r, backend="reference")
    same(y, torch_norm(x + r, "rms"), [x, r])
    (grad,) = torch.autograd.grad(ops.norm(x, residual=r, backend="reference")[1].sum(), x)
    assert torch.equal(grad, torch.ones_like(x))
    assert torch.equal(total, x + r)


TORCH_ACTIVATIONS = {
    "raw": lambda x: x,
    "gelu": F.gelu,
    "gelu_approx": lambda x: F.gelu(x, approximate="tanh"),
    "fast_gelu": lambda x: F.gelu(x, approximate="tanh"),
    "fast_gelu_bf16": lambda x: F.gelu(x, approximate="tanh"),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.01),
    "relu": F.relu,
    "silu": F.silu,
    "fast_silu": F.silu,
    "hardswish": F.hardswish,
    "relu_square": lambda x: F.relu(x).square(),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation(name: str) -> None:
    x = torch.linspace(-6, 6, 241, dtype=torch.float64, requires_grad=True)
    assert act(name, torch.zeros(1, dtype=torch.float64)) == 0
    if name in TORCH_ACTIVATIONS:
        expected = TORCH_ACTIVATIONS[name](x)
        torch.testing.assert_close(act(name, x), expected)
        smooth = (x.detach().abs() > 1e-9) & ((x.detach().abs() - 3).abs() > 1e-9)
        torch.testing.assert_close(act_grad(name, x.detach())[smooth], torch.autograd.grad(expected.sum(), x)[0][smooth])
    else:
        step = 1e-6
        at = x.detach()[(x.detach().abs() - 1.5).abs() > 1e-3]
        torch.testing.assert_close(act_grad(name, at), (act(name, at + step) - act(name, at - step)) / (2 * step), rtol=1e-6, atol=1e-8)


def test_taylor_gelu_keeps_its_error_table() -> None:
    for limit, error, gradient_error in ((0.5, 4.6e-6, None), (1.0, 1.2e-3, 9e-3), (1.5, 2.6e-2, 0.14)):
        x = torch.linspace(-limit, limit, 401, dtype=torch.float64)
        off = float((act("fast_gelu_taylor", x) - F.gelu(x)).abs().max())
        assert error / 2 < off <= error
        if gradient_error:
            assert float((act_grad("fast_gelu_taylor", x) - act_grad("gelu", x)).abs().max()) <= gradient_error
    far = torch.tensor([-50.0, -2.0, 2.0, 50.0], dtype=torch.float64)
    assert act_grad("fast_gelu_taylor", far).tolist() == [0, 0, 1, 1]
    edge = torch.tensor([-1.5, 1.5], dtype=torch.float64)
    torch.testing.assert_close(act("fast_gelu_taylor", far), act("fast_gelu_taylor", edge)[[0, 0, 1, 1]] + (far - 1.5).clamp(min=0))


@pytest.mark.parametrize("norm", [None, "rms", "layer"])
@pytest.mark.parametrize("name", ["gelu", "silu", "relu_square"])
def test_mlp_equals_torch(norm: str | None, name: str) -> None:
    torch.manual_seed(0)
    x, r, w1, b1, w2, b2 = leaf(2, 3, 5), leaf(2, 3, 5), leaf(7, 5), leaf(7), leaf(4, 7), leaf(4)

    def expected(total: Tensor, b1: Tensor | None, b2: Tensor | None) -> Tensor:
        inner = total if norm is None else torch_norm(total, norm)
        return F.linear(TORCH_ACTIVATIONS[name](F.linear(inner, w1, b1)), w2, b2)

    kw: dict[str, Any] = {"activation": name, "norm": norm, "backend": "reference"}
    same(ops.mlp(x, w1, b1, w2, b2, **kw), expected(x, b1, b2), [x, w1, b1, w2, b2])
    same(ops.mlp(x, w1, None, w2, None, residual=r, **kw), (expected(x + r, None, None), x + r), [x, r, w1, w2])


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norm_family_gradcheck(kind: str) -> None:
    torch.manual_seed(0)
    kw: dict[str, Any] = {"kind": kind, "eps": 1e-2, "backend": "reference"}
    x, r, nw, nb, w, b = leaf(3, 4), leaf(3, 4), leaf(4), leaf(4), leaf(2, 4), leaf(2)
    assert gradcheck(lambda x, nw, nb, r: ops.norm(x, weight=nw, bias=nb, residual=r, **kw), (x, nw, nb, r))
    assert gradcheck(
        lambda x, w, b, nw, nb, r: ops.norm_linear(x, w, b, norm_weight=nw, norm_bias=nb, residual=r, **kw), (x, w, b, nw, nb, r)
    )
    after = x, leaf(3, 4), leaf(3), leaf(3), leaf(3)
    assert gradcheck(lambda x, w, b, nw, nb: ops.linear_norm(x, w, b, norm_weight=nw, norm_bias=nb, **kw), after)
    feed = x, leaf(5, 4), leaf(5), leaf(2, 5), b, r
    assert gradcheck(lambda *t: ops.mlp(*t[:5], residual=t[5], norm=kind, activation="gelu", backend="reference"), feed)


# --- norm_gdpa ---


def dense_norm_gdpa(q: Tensor, k: Tensor, v: Tensor, q_lengths: list[int], k_lengths: list[int], eps: float) -> Tensor:
    wide = q.flatten(1)
    normed = F.layer_norm(wide, wide.shape[1:], eps=eps).view_as(q)
    owner_q, owner_k = (torch.repeat_interleave(torch.arange(len(n)), torch.tensor(n)) for n in (q_lengths, k_lengths))
    mask = owner_q[:, None] == owner_k[None, :]
    scores = 0.3 * torch.einsum("ihd,jhd->hij", normed, k)
    o = 0.5 * torch.einsum("hij,jhd->ihd", F.silu(scores) * mask, v) + normed
    return F.rms_norm(o.flatten(1), o.flatten(1).shape[1:], eps=eps).view_as(q) + q


@pytest.mark.parametrize("k_lengths", [LENGTHS, [3, 0, 8, 1, 2, 5]])
def test_norm_gdpa_equals_composition(k_lengths: list[int]) -> None:
    torch.manual_seed(0)
    q, k, v = leaf(sum(LENGTHS), 2, 4), leaf(sum(k_lengths), 2, 4), leaf(sum(k_lengths), 2, 4)
    found = ops.norm_gdpa(
        q, k, v, offsets(LENGTHS), offsets(k_lengths), activation="silu", scale_in=0.3, scale_out=0.5, eps=1e-3, backend="reference"
    )
    same(found, dense_norm_gdpa(q, k, v, LENGTHS, k_lengths, 1e-3), [q, k, v])


def test_norm_gdpa_gradcheck() -> None:
    torch.manual_seed(0)
    o, p = offsets([2, 0, 3]), offsets([1, 2, 2])
    assert gradcheck(
        lambda q, k, v: ops.norm_gdpa(q, k, v, o, p, activation=("gelu", "fast_gelu"), scale_in=0.7, scale_out=1.3, backend="reference"),
        (leaf(5, 2, 2), leaf(5, 2, 2), leaf(5, 2, 2)),
    )


def test_norm_gdpa_of_a_sample_without_keys() -> None:
    q = leaf(3, 2, 4)
    empty = torch.zeros(0, 2, 4, dtype=torch.float64)
    found = ops.norm_gdpa(q, empty, empty, offsets([3]), offsets([0]), backend="reference")
    wide = q.flatten(1)
    expected = F.rms_norm(F.layer_norm(wide, (8,), eps=1e-6), (8,), eps=1e-6) + wide
    torch.testing.assert_close(found.flatten(1), expected)
    assert math.isclose(float((found - q).detach().square().mean()), 1.0, rel_tol=1e-4)
