"""The dense, block and jagged kernels on a GPU at sizes that matter: error beside PyTorch's, large tensors, many and long samples.

    python -m pytest -m gpu packages/gem-kernels/tests/test_triton_dense_gpu.py

The whole contract runs there too: test_triton_block.py, test_triton_dense.py and test_triton_jagged.py use the GPU where there is one.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gem_core import ops
from gem_core.hookspecs import KernelSpec
from gem_core.jagged import lengths_to_offsets
from gem_core.ops.contract import Problem
from gem_core.ops.explain import problem_of
from gem_core.testing.kernels import deterministic
from gem_kernels import triton

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
BF16 = torch.bfloat16
Room = Callable[[float], None]
OVER_INT32 = (1 << 31) + (1 << 20)
NAMES = [
    "block-64", "block-64-rotary", "block-128", "norm_linear-rms", "norm_linear-layer", "norm_linear-rms-residual", "linear_norm-rms",
    "linear_norm-layer", "mlp-64", "mlp-128", "mlp-256", "mlp-128-rms", "norm_gdpa", "norm-rms", "norm-layer-residual",
]  # fmt: skip


def _draw(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = BF16) -> Tensor:
    x = torch.empty(shape, dtype=dtype, device="cuda")
    return x.normal_(generator=torch.Generator("cuda").manual_seed(seed)).mul_(scale)


def _spec(op: str, impl: str, problem: Problem) -> KernelSpec:
    spec = next((s for s in triton.specs() if (s.op, s.name) == (op, impl)), None)
    if spec is None or not spec.supports(problem):
        pytest.skip(f"{impl} does not do it")
    return spec


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("impl", ["triton", "hopper"])
def test_error_is_at_most_one_and_a_half_times_that_of_pytorch(name: str, impl: str, room: Room) -> None:
    """bf16 results and gradients of the benchmark's rows against float64, beside eager PyTorch in bf16."""
    from gem_kernels.bench import _dense_rows, dense

    room(20)
    case = next(r for r in _dense_rows.ROWS if r.name == name).build("cuda")
    problem = case.problem()
    spec = _spec(case.op, impl, problem)
    result, saved = spec.forward(problem, *case.tensors())
    douts = dense._douts(case, result, seed=3)
    grads = spec.backward(problem, saved, douts, dense._needs(case))
    for pass_, got in (("forward", dense._first(result)), ("backward", grads)):
        error, yardstick = dense.check(case, pass_, got, dense._first(douts))
        assert error <= 1.5 * yardstick, f"{pass_}: {error:.2e}, PyTorch {yardstick:.2e}"
        if case.op == "block_attention" and pass_ == "backward":
            assert -20 * math.log10(error) > 45, f"gradients have {-20 * math.log10(error):.1f} dB"


@pytest.mark.parametrize("name", ["block-64-rotary", "norm_linear-rms", "linear_norm-rms", "mlp-128", "norm_gdpa"])
@pytest.mark.parametrize("impl", ["triton", "hopper"])
def test_repeated_runs_are_bit_equal(name: str, impl: str, room: Room) -> None:
    from gem_kernels.bench import _dense_rows, dense

    room(20)
    case = next(r for r in _dense_rows.ROWS if r.name == name).build("cuda")
    with deterministic():
        problem = case.problem()
        assert problem.deterministic
        spec = _spec(case.op, impl, problem)
        result, saved = spec.forward(problem, *case.tensors())
        douts = dense._douts(case, result, seed=3)
        first = spec.backward(problem, saved, douts, dense._needs(case))
        for _ in range(3):
            again = spec.backward(problem, saved, douts, dense._needs(case))
            assert all(torch.equal(a, b) for a, b in zip(first, again) if a is not None)


def _same_as_alone(q: Tensor, k: Tensor, v: Tensor, out: Tensor, grads: tuple[Tensor, ...], dout: Tensor, rows: slice) -> None:
    """The sample in ``rows`` by itself gives the same bits."""
    leaves = [t[rows].detach().clone().requires_grad_() for t in (q, k, v)]
    offsets = torch.tensor([0, rows.stop - rows.start], device="cuda")
    alone = ops.block_attention(*leaves, offsets, backend="triton")
    assert torch.equal(alone, out[rows])
    for mine, whole in zip(torch.autograd.grad(alone, leaves, dout[rows]), grads):
        assert torch.equal(mine, whole[rows])


@pytest.mark.parametrize("lengths", [[200_000], [OVER_INT32 // 512 - 70, 70]], ids=["one of 200,000", "over 2^31 elements"])
def test_block_attention_of_long_samples(lengths: list[int], room: Room) -> None:
    n = sum(lengths)
    room(9 * n * 512 * 2 / 2**30)
    q, k, v = (_draw(n, 4, 128, seed=i).requires_grad_() for i in range(3))
    dout = _draw(n, 4, 128, seed=5)
    out = ops.block_attention(q, k, v, lengths_to_offsets(torch.tensor(lengths)).cuda(), backend="triton")
    grads = torch.autograd.grad(out, (q, k, v), dout)
    with torch.no_grad():
        tail = slice(n - 70 if len(lengths) > 1 else (n - 70) // 64 * 64, n)
        head = slice(0, 64)
    for rows in (head, tail):
        _same_as_alone(q, k, v, out.detach(), grads, dout, rows)


def test_block_attention_of_many_short_samples() -> None:
    lengths = torch.randint(0, 4, (100_000,), generator=torch.Generator().manual_seed(0))
    offsets, n = lengths_to_offsets(lengths), int(lengths.sum())
    q, k, v = (_draw(n, 4, 64, seed=i).requires_grad_() for i in range(3))
    dout = _draw(n, 4, 64, seed=5)
    out = ops.block_attention(q, k, v, offsets.cuda(), backend="triton")
    grads = torch.autograd.grad(out, (q, k, v), dout)
    # every sample fits in one block, so that a dense computation over three padded rows is the reference
    position = torch.arange(n) - offsets[:-1].repeat_interleave(lengths)
    at = torch.repeat_interleave(torch.arange(100_000), lengths).cuda() * 3 + position.cuda()
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    pq, pk, pv = (torch.zeros(300_000, 4, 64, dtype=torch.float64, device="cuda").index_copy(0, at, t).view(-1, 3, 4, 64) for t in leaves)
    seen = torch.arange(3, device="cuda") < lengths.cuda()[:, None]
    scores = torch.einsum("bihd,bjhd->bhij", pq, pk) / 8
    p = torch.softmax(scores.masked_fill(~seen[:, None, None, :], -1e30), -1)
    want = torch.einsum("bhij,bjhd->bihd", p, pv).reshape(-1, 4, 64)[at]
    for got, expected in zip((out, *grads), (want, *torch.autograd.grad(want, leaves, dout.double()))):
        assert (got - expected).norm() <= 6e-3 * expected.norm()


def _tail_is_right(op: str, rows: int, width: int, wanted: tuple[str, ...], **arguments: object) -> None:
    """Results and dx of the last rows of a tensor over 2^31 elements equal those of a tensor of these rows only."""
    x = _draw(rows, width).requires_grad_()
    given = {n: t.requires_grad_() if isinstance(t, Tensor) else t for n, t in arguments.items()}
    y = getattr(ops, op)(x, **given, backend="triton")
    dy = _draw(*y.shape, seed=7)
    (dx,) = torch.autograd.grad(y, (x,), dy)
    last = slice(rows - 300, rows)
    alone = x[last].detach().requires_grad_()
    y_alone = getattr(ops, op)(alone, **given, backend="triton")
    (dx_alone,) = torch.autograd.grad(y_alone, (alone,), dy[last])
    for got, want in ((y[last], y_alone), (dx[last], dx_alone)):
        assert (got.double() - want.double()).norm() <= 4e-3 * want.double().norm()


@pytest.mark.parametrize("op", ["norm", "norm_linear", "linear_norm", "mlp"])
def test_rows_over_2_31_elements(op: str, room: Room) -> None:
    width = 64 if op == "mlp" else 512
    rows = OVER_INT32 // width
    room(8 * rows * width * 2 / 2**30 + 4)
    w = _draw(width, width, seed=1, scale=width**-0.5)
    arguments = {"norm": {}, "mlp": {"w1": w, "b1": None, "w2": w.clone(), "b2": None}}.get(op, {"w": w})
    _tail_is_right(op, rows, width, ("x",), **arguments)


def test_norm_gdpa_over_2_31_elements(room: Room) -> None:
    lengths = torch.tensor([OVER_INT32 // 512 - 300, 300])
    n = int(lengths.sum())
    room(9 * n * 512 * 2 / 2**30)
    q = _draw(n, 4, 128).requires_grad_()
    k, v = (_draw(200, 4, 128, seed=i, scale=0.1).requires_grad_() for i in (1, 2))
    q_offsets, k_offsets = lengths_to_offsets(lengths).cuda(), torch.tensor([0, 100, 200], device="cuda")
    out = ops.norm_gdpa(q, k, v, q_offsets, k_offsets, backend="triton")
    dout = _draw(n, 4, 128, seed=4)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    tail, own = slice(n - 300, n), slice(100, 200)
    alone = [q[tail].detach().requires_grad_(), k[own].detach().requires_grad_(), v[own].detach().requires_grad_()]
    one = ops.norm_gdpa(*alone, torch.tensor([0, 300], device="cuda"), torch.tensor([0, 100], device="cuda"), backend="triton")
    for got, want in zip((out[tail], dq[tail], dk[own], dv[own]), (one, *torch.autograd.grad(one, alone, dout[tail]))):
        assert torch.equal(got, want)


def test_jagged_ops_over_2_31_elements(room: Room) -> None:
    rows, width = OVER_INT32 // 256, 256
    room(8 * rows * width * 2 / 2**30)
    a, b = _draw(rows, width), _draw(9, width, seed=1)
    oa, ob = torch.tensor([0, 5, rows], device="cuda"), torch.tensor([0, 4, 9], device="cuda")
    whole, offsets = ops.jagged_concat([(a, oa), (b, ob)], backend="triton")
    assert torch.equal(whole[:5], a[:5])
    assert torch.equal(whole[5:9], b[:4])
    assert torch.equal(whole[-5:], b[4:])
    assert torch.equal(whole[-1000:-5], a[-995:])
    (first, _), (rest, _) = ops.jagged_split(whole, offsets, oa.diff(), first_rows=rows, backend="triton")
    assert torch.equal(first[-1000:], a[-1000:])
    assert torch.equal(rest, b)


def test_new_lengths_do_not_recompile() -> None:
    """Batches of new sizes run the kernels that are there. (0 and 1 rows are among them.)"""
    from gem_kernels.triton.block import kernels
    from gem_kernels.triton.dense import linear_norm_kernels, mlp_kernels, norm_gdpa_kernels, norm_kernels, norm_linear_kernels

    modules = (kernels, linear_norm_kernels, mlp_kernels, norm_gdpa_kernels, norm_kernels, norm_linear_kernels)
    jitted = [f for m in modules for n, f in vars(m).items() if n.endswith("_kernel")]

    def compiled() -> int:
        return sum(len(per_device[0]) for f in jitted for per_device in f.device_caches.values())

    w = _draw(64, 64, scale=0.1).requires_grad_()
    up, down = _draw(256, 64, scale=0.1).requires_grad_(), _draw(64, 256, scale=0.1).requires_grad_()

    def step(lengths: list[int]) -> None:
        n = sum(lengths)
        offsets = lengths_to_offsets(torch.tensor(lengths)).cuda()
        q = _draw(n, 2, 64).requires_grad_()
        x = _draw(n, 64).requires_grad_()
        o = ops.block_attention(q, q, q, offsets, backend="triton").sum()
        o = o + ops.norm_gdpa(q, q, q, offsets, max_q_len=4096, max_k_len=4096, backend="triton").sum()
        o = o + ops.norm(x, backend="triton").sum() + ops.norm_linear(x, w, backend="triton").sum()
        o = o + ops.linear_norm(x, w, backend="triton").sum() + ops.mlp(x, up, None, down, None, backend="triton").sum()
        o.backward()

    step([5, 64, 100])
    there = compiled()
    for lengths in ([1], [17, 0, 3], [2048, 16], [0, 0], [4096, 4096, 1, 31], [100] * 333):
        step(lengths)
    assert compiled() == there


def _worse_than_torch(run: Callable[..., torch.Tensor], plain: Callable[..., torch.Tensor], given: dict[str, torch.Tensor]) -> list[str]:
    """Of the result and the gradients of ``run(**given)``, those whose error against ``plain`` in float64 is more than 1.5 times that of
    ``plain`` in the tensors' dtype."""

    def results(function: Callable[..., torch.Tensor], dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        leaves = {n: t.detach().to(dtype or t.dtype).requires_grad_() for n, t in given.items()}
        y = function(**leaves)
        dout = _draw(*y.shape, seed=99).to(next(iter(given.values())).dtype).to(y.dtype)
        return [y.detach(), *torch.autograd.grad(y, list(leaves.values()), dout)]

    found = []
    for name, mine, rough, exact in zip(("y", *given), results(run), results(plain), results(plain, torch.float64)):
        error, theirs = (float((t.double() - exact).norm() / exact.norm()) for t in (mine, rough))
        if not error <= 1.5 * theirs + 1e-4:
            found.append(f"{name}: {error:.2e}, PyTorch {theirs:.2e}")
    return found


def _normed(x: torch.Tensor, kind: str, norm_weight: torch.Tensor | None, norm_bias: torch.Tensor | None) -> torch.Tensor:
    if kind == "layer":
        return torch.nn.functional.layer_norm(x, x.shape[1:], norm_weight, norm_bias, eps=1e-6)
    y = torch.nn.functional.rms_norm(x, x.shape[1:], norm_weight, eps=1e-6)
    return y if norm_bias is None else y + norm_bias


def _affine(of: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {"norm_weight": (1 + 0.1 * _draw(of, seed=3)).to(dtype), "norm_bias": _draw(of, seed=4).to(dtype)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    ("rows", "k", "n"),
    [
        (1, 64, 8),
        (191, 512, 512),
        (192, 64, 256),
        (193, 192, 264),
        (385, 64, 520),
        (5000, 512, 1536),
        (40000, 320, 64),
        (20000, 512, 512),
        (300, 1024, 512),
    ],
)
@pytest.mark.parametrize("affine", [False, True])
def test_hopper_norm_linear(rows: int, k: int, n: int, affine: bool, dtype: torch.dtype) -> None:
    """The rows' statistics serve the portable backward pass."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("written for sm_90")
    given = {"x": _draw(rows, k).to(dtype), "w": _draw(n, k, seed=1, scale=k**-0.5).to(dtype)}
    given |= {"b": _draw(n, seed=2).to(dtype), **_affine(k, dtype)} if affine else {}

    def plain(x, w, b=None, norm_weight=None, norm_bias=None):
        return torch.nn.functional.linear(_normed(x, "rms", norm_weight, norm_bias), w, b)

    worse = _worse_than_torch(lambda **t: ops.norm_linear(**t, eps=1e-6, backend="hopper"), plain, given)
    assert not worse, worse


@pytest.mark.parametrize(
    ("rows", "k", "n", "affine", "dtype"),
    [
        (1, 512, 8, False, torch.bfloat16),
        (5000, 512, 1536, False, torch.bfloat16),
        (40000, 512, 512, True, torch.bfloat16),
    ],
)
def test_hopper_norm_linear_of_many_rows(
    rows: int, k: int, n: int, affine: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient of x from pairs of programs that tell one another their sums: error, and bit-equal when repeated."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("written for sm_90")
    from gem_kernels.triton.hopper import norm_linear

    monkeypatch.setattr(norm_linear, "MANY_ROWS", 1)
    ran, usual = [], norm_linear._input_grad
    monkeypatch.setattr(norm_linear, "_input_grad", lambda *t: ran.append(usual(*t)) or ran[-1])
    given = {"x": _draw(rows, k).to(dtype) + 1, "w": _draw(n, k, seed=1, scale=k**-0.5).to(dtype)}
    given |= {"b": _draw(n, seed=2).to(dtype), **_affine(k, dtype)} if affine else {}

    def plain(x, w, b=None, norm_weight=None, norm_bias=None):
        return torch.nn.functional.linear(_normed(x, "rms", norm_weight, norm_bias), w, b)

    worse = _worse_than_torch(lambda **t: ops.norm_linear(**t, eps=1e-6, backend="hopper"), plain, given)
    assert not worse, worse
    leaves = {n: t.detach().requires_grad_() for n, t in given.items()}
    y = ops.norm_linear(**leaves, eps=1e-6, backend="hopper")
    dy = _draw(*y.shape, seed=5).to(dtype)
    one, other = (torch.autograd.grad(y, list(leaves.values()), dy, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, other))
    assert len(ran) == 3
    assert all(t is not None for t in ran)


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize(
    ("lengths", "slack", "heads", "dtype"),
    [
        ((70, 0, 3, 64, 128, 1, 200), 9, 4, torch.bfloat16),
        ((1,), 0, 1, torch.float16),
        ((0,), 70, 2, torch.bfloat16),
        ((0, 0, 2000, 5), 200, 3, torch.bfloat16),
    ],
)
def test_hopper_block_with_rotary(lengths: tuple[int, ...], slack: int, heads: int, dtype: torch.dtype, by_row: bool) -> None:
    """Result and gradients are the portable kernel's up to rounding, of slices of one projection too; slack rows are NaN."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("written for sm_90")
    n = sum(lengths)
    qkv = _draw(n + slack, 3, heads, 128).to(dtype)
    qkv[n:] = torch.nan
    angle = _draw(max(lengths) + 3, 64, seed=1, dtype=torch.float32)
    rows = torch.randint(0, angle.shape[0], (n + slack,), device="cuda", dtype=torch.int32) if by_row else None
    offsets = lengths_to_offsets(torch.tensor(lengths, dtype=torch.int64)).to("cuda", torch.int32)
    dout, found = _draw(n + slack, heads, 128, seed=2).to(dtype), {}
    for backend, parts in (("hopper", qkv.unbind(1)), ("triton", [t.contiguous() for t in qkv.unbind(1)])):
        leaves = [t.detach().requires_grad_() for t in parts]
        out = ops.block_attention(*leaves, offsets, rotary=(angle.cos(), angle.sin()), rotary_rows=rows, backend=backend)
        found[backend] = out.detach(), *torch.autograd.grad(out, leaves, dout)
    for mine, theirs in zip(found["hopper"], found["triton"]):
        assert not mine[n:].any()
        assert (mine[:n].double() - theirs[:n].double()).norm() <= 4e-3 * theirs[:n].double().norm()


def test_hopper_block_says_what_it_serves() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("written for sm_90")
    from gem_kernels.triton.hopper.spec import block_supports

    q, offsets = _draw(70, 4, 128), torch.tensor([0, 70], device="cuda", dtype=torch.int32)
    angle = _draw(70, 64, dtype=torch.float32)
    assert "rotary" in block_supports(problem_of("block_attention", q=q, k=q, v=q, offsets=offsets)).reason
    given = {"offsets": offsets, "rotary": (angle, angle)}
    assert block_supports(problem_of("block_attention", q=q, k=q, v=q, **given))
    assert "64 rows" in block_supports(problem_of("block_attention", q=q, k=q, v=q, **given, block_size=128)).reason


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize(
    ("rows", "k", "n", "affine", "dtype"),
    [
        (1, 8, 64, False, torch.bfloat16),
        (130, 512, 512, False, torch.float16),
        (130, 512, 512, True, torch.bfloat16),
        (300, 64, 392, True, torch.float16),
        (1000, 264, 192, False, torch.bfloat16),
        (5000, 1024, 264, False, torch.bfloat16),
        (40000, 128, 512, False, torch.bfloat16),
        (40000, 512, 128, True, torch.float16),
    ],
)
def test_hopper_linear_norm(rows: int, k: int, n: int, affine: bool, dtype: torch.dtype, kind: str) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("written for sm_90")
    given = {"x": _draw(rows, k).to(dtype), "w": _draw(n, k, seed=1, scale=k**-0.5).to(dtype), "b": _draw(n, seed=2).to(dtype)}
    given |= _affine(n, dtype) if affine else {}

    def plain(x, w, b, norm_weight=None, norm_bias=None):
        return _normed(torch.nn.functional.linear(x, w, b), kind, norm_weight, norm_bias)

    worse = _worse_than_torch(lambda **t: ops.linear_norm(**t, kind=kind, eps=1e-6, backend="hopper"), plain, given)
    assert not worse, worse


@pytest.mark.parametrize(
    ("rows", "width", "hidden", "out", "norm", "activation", "dtype"),
    [
        (1, 64, 128, 64, None, "gelu", torch.bfloat16),
        (200, 128, 512, 64, "layer", "gelu", torch.bfloat16),
        (5000, 256, 1024, 256, None, "gelu", torch.bfloat16),
        (129, 256, 512, 128, "layer", "gelu", torch.bfloat16),
        (63, 64, 128, 256, None, "gelu", torch.float16),
        (65, 192, 384, 192, None, "gelu", torch.bfloat16),
        (40001, 256, 1024, 256, "rms", "gelu", torch.bfloat16),
        (0, 256, 1024, 256, "rms", "gelu", torch.bfloat16),
        (5000, 256, 1024, 256, "rms", "silu", torch.float16),
        (40000, 128, 256, 128, "layer", "relu", torch.bfloat16),
        (70000, 64, 256, 64, "rms", "gelu", torch.float16),
    ],
)
def test_hopper_mlp(
    rows: int, width: int, hidden: int, out: int, norm: str | None, activation: str, dtype: torch.dtype
) -> None:  # fmt: skip
    """Result and gradients are those of the portable kernels up to rounding."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("written for sm_90")
    scales = {"x": ((rows, width), 1.0), "w1": ((hidden, width), width**-0.5), "b1": ((hidden,), 1.0)}
    scales |= {"w2": ((out, hidden), hidden**-0.5), "b2": ((out,), 1.0)}
    given = {n: _draw(*shape, seed=i, scale=s).to(dtype).requires_grad_() for i, (n, (shape, s)) in enumerate(scales.items())}
    dout = _draw(rows, out, seed=9).to(dtype)
    found = {}
    for backend in ("hopper", "triton"):
        y = ops.mlp(**given, activation=activation, norm=norm, backend=backend)
        found[backend] = y.detach(), *torch.autograd.grad(y, list(given.values()), dout)
    for name, mine, theirs in zip(("y", *given), found["hopper"], found["triton"]):
        assert mine.shape == theirs.shape
        assert torch.isfinite(mine).all()
        assert (mine.double() - theirs.double()).norm() <= 6e-3 * theirs.double().norm(), name


@pytest.mark.parametrize("norm", [None, "rms"])
@pytest.mark.parametrize("width", [128, 256])
def test_hopper_mlp_of_a_part_of_the_columns(width: int, norm: str | None) -> None:
    """Rows that do not follow one another: as from copies."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("written for sm_90")
    wide, dwide = _draw(3000, 2 * width), _draw(3000, 2 * width, seed=1)
    weights = [_draw(4 * width, width, seed=2, scale=width**-0.5), _draw(4 * width, seed=3), _draw(width, 4 * width, seed=4, scale=0.05)]
    found = []
    for x, dout in ((wide[:, width:], dwide[:, :width]), (wide[:, width:].contiguous(), dwide[:, :width].contiguous())):
        leaves = [t.detach().requires_grad_() for t in (x, *weights)]
        y = ops.mlp(*leaves, None, norm=norm, backend="hopper")
        found.append([y.detach(), *torch.autograd.grad(y, leaves, dout)])
    for mine, theirs in zip(*found):
        assert (mine.double() - theirs.double()).norm() <= 4e-3 * theirs.double().norm()


@pytest.mark.parametrize(
    ("lengths", "keys", "heads", "d", "activation", "dtype"),
    [
        ((0, 1, 64, 65, 200, 700), (128, 0, 1, 77, 128, 128), 4, 128, "fast_gelu", torch.bfloat16),
        ((300, 5, 1000), (128, 256, 130), 4, 128, "gelu", torch.bfloat16),
        ((300, 5, 1000), (128, 128, 100), 2, 128, ("gelu", "silu"), torch.bfloat16),
        ((300, 5, 1000), (128, 128, 100), 8, 64, "silu", torch.float16),
        ((300, 40), (128, 20), 8, 128, "relu", torch.bfloat16),
    ],
)
def test_hopper_norm_gdpa(
    lengths: tuple[int, ...], keys: tuple[int, ...], heads: int, d: int, activation: str | tuple[str, ...], dtype: torch.dtype
) -> None:
    """Passes around the Hopper `gdpa`, for few keys S from q itself and dQ added to dO: as the portable ones up to rounding. Slack rows
    are NaN."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("written for sm_90")
    n, slack = sum(lengths), 9
    given = {
        "q": _draw(n + slack, heads, d) + 0.5,
        "k": _draw(sum(keys), heads, d, seed=1, scale=d**-0.5),
        "v": _draw(sum(keys), heads, d, seed=2),
    }
    given["q"][n:] = torch.nan
    given = {name: t.to(dtype).requires_grad_() for name, t in given.items()}
    offsets = {"q_offsets": lengths_to_offsets(torch.tensor(lengths)).cuda(), "k_offsets": lengths_to_offsets(torch.tensor(keys)).cuda()}
    bounds = {"max_q_len": max(lengths), "max_k_len": max(keys), "scale_out": 0.1}
    dout = _draw(n + slack, heads, d, seed=9).to(dtype)
    found = {}
    for backend in ("hopper", "triton"):
        out = ops.norm_gdpa(**given, **offsets, **bounds, activation=activation, backend=backend)
        found[backend] = out.detach(), *torch.autograd.grad(out, list(given.values()), dout)
    for name, mine, theirs in zip(("out", *given), found["hopper"], found["triton"]):
        if mine.shape[0] > n and name in ("out", "q"):
            assert not mine[n:].any(), name
        assert (mine.double() - theirs.double()).norm() <= 6e-3 * theirs.double().norm(), name


@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("op", ["jagged_attention", "gdpa"])
def test_gradients_of_one_projection(op: str, backend: str) -> None:
    """Slices of one tensor, as q, k and v are, equal to the gradients of copies; rows past the last sample get zeros."""
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("written for sm_90")
    lengths = torch.tensor([300, 0, 129, 512])
    used = int(lengths.sum())
    qkv = _draw(used + 40, 3, 4, 128, scale=0.3)
    offsets, dout = lengths_to_offsets(lengths).cuda(), _draw(used + 40, 4, 128, seed=1)
    more = {"activation": "gelu"} if op == "gdpa" else {}
    found = []
    for parts in (qkv.requires_grad_().unbind(1), [t.clone().detach().requires_grad_() for t in qkv.unbind(1)]):
        out = getattr(ops, op)(*parts, offsets, max_q_len=512, max_k_len=512, backend=backend, **more)
        found.append(torch.autograd.grad(out, parts, dout))
    assert len({g.untyped_storage().data_ptr() for g in found[0]}) == 1
    for mine, theirs in zip(*found):
        assert torch.equal(mine, theirs)
        assert not mine[used:].any()
