"""What the attention benchmark asks of a row, and which implementations it takes, without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gem_core.bench.ceilings import Ceilings
from gem_kernels.bench import attention, timing
from gem_kernels.bench.attention_goals import fill, goal
from gem_kernels.bench.attention_rows import ROWS, Data, Row
from gem_kernels.bench.settings import Settings

LIMITS = Ceilings(gemm=700.0, best_gemm=800.0, copy=4.27)


FILLS = {"self-256-s0.5": 0.72, "self-1024-s0.5": 0.91, "self-2048-s0.5": 0.96, "self-1024-s1": 1.0}


def thin(name: str) -> Data:
    """A row with one column a head: its counts over those of the real one are a constant."""
    return Data(replace(next(r for r in ROWS if r.name == name), heads=1, dim=1), "cpu")


def brute_fill(row: Row, lq: int, lk: int) -> tuple[int, int]:
    """Attended pairs and pairs of 64-row tiles that have one, pair by pair."""
    i, j = torch.arange(lq)[:, None] + lk - lq, torch.arange(lk)[None, :]
    seen = torch.ones(lq, lk, dtype=torch.bool)
    if row.causal:
        seen &= j <= i
    if row.window:
        seen &= (j >= i - row.window[0]) & (j <= i + row.window[1])
    tiles = torch.zeros(-(-lq // 64), -(-lk // 64), dtype=torch.bool)
    for a, b in seen.nonzero().tolist():
        tiles[a // 64, b // 64] = True
    return int(seen.sum()), int(tiles.sum()) * 64**2


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (70, 40)}], ids=str)
def test_fill_counts_tiles(options: dict) -> None:
    row = Row("r", (200, 0.3), batch=5, heads=1, dim=1, **options)
    data = Data(row, "cpu")
    counts = [brute_fill(row, int(n), int(n)) for n in data.q_lengths]
    assert fill(data) == pytest.approx(sum(c[0] for c in counts) / sum(c[1] for c in counts))


@pytest.mark.parametrize(("name", "value"), list(FILLS.items()))
def test_fill_of_the_rows(name: str, value: float) -> None:
    assert fill(thin(name)) == pytest.approx(value, abs=0.02)


def test_goals() -> None:
    """Each of the bounds where it binds; rates that peers do not decide; nothing where no peer ran."""

    def of(name: str, pass_: str, best: float, op: str = "jagged_attention", done: tuple[dict, ...] = ()) -> float | None:
        return goal(thin(name), {"pass": pass_, "op": op}, best, LIMITS, list(done))

    assert of("self-1024-s1", "forward", 545) == pytest.approx(0.75 * 700)
    assert of("self-1024-s1", "forward", 335) == pytest.approx(1.3 * 335)
    assert of("self-1024-s1", "forward", 100) == pytest.approx(0.6 * 700)
    assert of("cross-1024x32-s0.5", "forward", 200) == pytest.approx(0.8 * 129, rel=0.02)
    assert of("self-256-s0.5", "backward", 100) == pytest.approx(0.5 * 457, rel=0.04)
    assert of("self-256-s0.5", "backward", 100, "gdpa") == pytest.approx(0.5 * 522, rel=0.04)
    assert of("self-1024-s0.5-d64", "forward", 100) == pytest.approx(130)
    assert of("pma-32x4096-s0.5", "backward", 0) == 111
    assert of("window128-8192", "forward", 0) is None
    window = thin("window128-4096")
    assert of("window128-4096", "backward", 215) == pytest.approx(window.flops(True) / 2.33 * 1e-9)
    plain = [
        {"row": "causal-1024-s0.5", "pass": "forward", "op": "jagged_attention", "impl": impl, "tflops": rate}
        for impl, rate in (("hopper", 300.0), ("fa4", 900.0))
    ]  # fmt: skip
    assert of("causal-bias-targets-1024-s0.5", "forward", 0, done=tuple(plain)) == pytest.approx(210)
    assert of("causal-bias-targets-1024-s0.5", "backward", 0, done=tuple(plain)) is None


def test_auto_is_what_a_call_would_get() -> None:
    problem = replace(thin("self-1024-s1").problem("gdpa"), device="cuda", arch=90, dims=(("H", 4), ("Hkv", 4), ("D", 128), ("Dv", 128)))
    hopper = next(s for s in attention.specs() if (s.op, s.name) == ("gdpa", "hopper"))
    best, _ = attention._find("gdpa", "auto", problem)
    assert best.name == ("hopper" if hopper.supports(problem) else "triton")
    low, asked = attention._find("gdpa", "auto:fp8", problem)
    assert low.name == "triton-lowp"
    assert asked.precision.block == (128, 128)
    assert attention._find("gdpa", "triton-split", problem)[0].name == "triton-split"
    assert attention._find("gdpa", "hopper-only", replace(problem, arch=100))[0] is None


def test_precisions_are_rows_of_auto_only() -> None:
    row = next(r for r in ROWS if r.precisions)
    assert attention._asked(row, Settings("c", impls=("triton",))) == ["triton"]
    assert attention._asked(row, Settings("c", impls=("auto",))) == ["auto", "auto:fp8", "auto:mxfp8"]


def test_compared_rows_are_timed_together() -> None:
    named = {r.name: r for r in ROWS}
    asked = [named[n] for n in ("window256-4096", "self-1024-s1", "causal-1024-s0.5", "window128-4096", "causal-bias-targets-1024-s0.5")]
    found = [[row.name for row in together] for together in attention.groups(asked)]
    assert found == [
        ["window256-4096", "window128-4096"], ["self-1024-s1"], ["causal-1024-s0.5", "causal-bias-targets-1024-s0.5"],
    ]  # fmt: skip
    for row in ROWS:
        if row.like:
            assert named[row.like[0]].group == row.group is not None


def test_rounds_are_shuffled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round has every variant once, in orders that differ between rounds and not between runs."""
    ran: list[str] = []

    def elapsed(run: object, repeats: int) -> float:
        run()
        return 4.0 if ran[-1] == "slow" else 1.0

    monkeypatch.setattr(timing, "_elapsed", elapsed)
    variants = {name: lambda name=name: ran.append(name) for name in ("a", "slow", "b", "c")}

    def orders() -> tuple[list[tuple[str, ...]], dict[str, list[float]]]:
        ran.clear()
        times = timing.interleaved_ms(variants, rounds=6)
        timed = ran[2 * len(variants) :]
        return [tuple(timed[i : i + 4]) for i in range(0, len(timed), 4)], times

    rounds, times = orders()
    assert len(rounds) == 6
    assert all(sorted(r) == sorted(variants) for r in rounds)
    assert len(set(rounds)) > 2
    assert times == {name: [4.0 if name == "slow" else 1.0] * 6 for name in variants}
    assert orders()[0] == rounds
