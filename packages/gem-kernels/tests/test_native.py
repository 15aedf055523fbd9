"""The C kernels pass the conformance kit: with gradients of the default backward, which the kit asks for and inference does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gem_core import KernelSpec, ops
from gem_core.ops import program
from gem_core.ops.explain import problem_of
from gem_core.testing.kernels import KernelConformance
from gem_kernels import native
from gem_kernels.native import build, calls

pytestmark = pytest.mark.skipif(bool(build.reason()), reason=build.reason() or "compiled")
SPECS = {s.op: KernelSpec(s.op, s.name, s.forward, None, calls.can) for s in native.specs()}


class TestJaggedAttention(KernelConformance):
    spec = SPECS["jagged_attention"]


class TestGdpa(KernelConformance):
    spec = SPECS["gdpa"]


class TestNorm(KernelConformance):
    spec = SPECS["norm"]


class TestNormLinear(KernelConformance):
    spec = SPECS["norm_linear"]


class TestJaggedConcat(KernelConformance):
    spec = SPECS["jagged_concat"]


class TestJaggedExpand(KernelConformance):
    spec = SPECS["jagged_expand"]


def _call() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.arange(400) % 41
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return *(torch.randn(int(offsets[-1]), 2, 16, generator=generator) for _ in range(3)), offsets


def test_chosen_for_inference_only() -> None:
    q, k, v, offsets = _call()
    chosen = [next(n for n, ok, _ in ops.available("jagged_attention", t, k, v, offsets) if ok) for t in (q, q.clone().requires_grad_())]
    assert chosen == ["native", "eager"]


def test_threads_change_nothing() -> None:
    q, k, v, offsets = _call()
    rows, w = q.flatten(1), torch.randn(70, 32, generator=torch.Generator().manual_seed(4))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            attended = ops.jagged_attention(q, k, v, offsets, causal=True, return_lse=True, backend="native")
            found.append((*attended, ops.norm_linear(rows, w, backend="native")))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found))


@pytest.mark.parametrize(("compiler", "reason"), [("a-compiler-that-is-not-there", "no C compiler"), ("false", "false failed")])
def test_without_a_working_compiler(compiler: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The answer is a reason, which the log and `gemrec plugins --ops` show, and the call goes to another implementation."""
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("GEM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build, "_loaded", build._loaded.__wrapped__)
    q, k, v, offsets = _call()
    answer = calls.supports(problem_of("jagged_attention", q, k, v, offsets))
    assert not answer
    assert answer.reason.startswith(reason)


def test_one_file_for_all_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GEM_CACHE_DIR", str(tmp_path))
    build._loaded.__wrapped__()
    (made,) = (tmp_path / "native").iterdir()
    stamp = made.stat().st_mtime_ns
    build._loaded.__wrapped__()
    assert [p.name for p in (tmp_path / "native").iterdir()] == [made.name]
    assert made.stat().st_mtime_ns == stamp


@pytest.mark.parametrize("threads", [1, 3])
@torch.no_grad()
def test_programs(threads: int) -> None:
    """Tiles of many samples and samples longer than a tile; every kind of step, rows and views."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    lengths = torch.cat([torch.arange(300) % 23, torch.tensor([1300, 0, 390])])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()])
    samples, events = len(lengths), int(lengths.sum())
    p = program.Program(samples)
    s = p.given(draw(events, 40)[:, :20], offsets)
    tokens = p.linear(p.given(draw(5 * samples, 12), each=5), draw(48, 12), draw(48), norm="layer")
    q = p.linear(s, draw(24, 20), norm="rms", eps=1e-3)
    o = p.attention(q, tokens.columns(0, 24), tokens.columns(24, 24), heads=2, width=12, activation=("gelu", "silu"), out_scale=0.4)
    s = p.linear(o, draw(20, 24) * 0.1, draw(20), add=s)
    qkv = p.linear(s, draw(96, 20) * 0.2, norm="rms")
    q, k, v = (qkv.columns(i * 32, 32) for i in range(3))
    o = p.attention(q, k, v, heads=4, width=8, causal=True)
    end = p.linear(o, draw(20, 32), add=s)
    seeds = p.attention(draw(3, 4, 8), k, v, heads=4, width=8, scale=0.2)
    asked = p.linear(p.given(draw(samples, 16)), draw(64, 16), norm="rms").split(2)
    read = p.attention(asked, k, v, heads=4, width=8)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        found = p.run(end, seeds, read)
    finally:
        torch.set_num_threads(before)
    for got, want in zip(found, program.reference(p, (end, seeds, read)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_programs_too_wide_are_refused() -> None:
    p = program.Program(2)
    p.linear(p.given(torch.zeros(2, 600)), torch.zeros(8, 600))
    answer = calls.supports(p.problem())
    assert not answer
    assert "larger than" in answer.reason
