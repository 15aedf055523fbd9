"""The relative bias and its gradients in the Triton kernels: however a tile's times lie, and the sums in a warp's registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gem_core import ops
from gem_core.errors import OpError
from gem_core.jagged import lengths_to_offsets
from gem_core.ops import dispatch
from gem_kernels.bench.attention_rows import ROWS, Data, small
from gem_kernels.triton import attention
from gem_kernels.triton.attention import inputs, warp_sums
from gem_kernels.triton.attention.plan import plan
from gem_kernels.triton.common.configs import committed_rules, matches
from gem_kernels.triton.common.device import on_cpu
from gem_kernels.triton.hopper import launch_bias
from gem_kernels.triton.hopper import spec as hopper_spec
from gem_kernels.triton.hopper.spec import specs as hopper_specs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HOPPER = DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0)
SPECS = {(spec.op, spec.name): spec for spec in (*attention.specs(), *hopper_specs())}
PROBE = Path(__file__).with_name("hopper_compile_probe.py")
LENGTHS = [0, 1, 31, 64, 65, 0, 97]

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
    *([pytest.mark.gpu] if DEVICE == "cuda" else []),
]


@pytest.fixture(autouse=True)
def _where_it_runs() -> Iterator[None]:
    with nullcontext() if DEVICE == "cuda" else on_cpu():
        yield


class Computing(warp_sums.Lanes):
    """Lanes as arrays of 32 numbers."""

    def lane(self) -> Any:
        return np.arange(32)

    def integer(self, operation: str, a: Any, b: Any) -> Any:
        return {
            "add": np.add, "sub": np.subtract, "and": np.bitwise_and, "xor": np.bitwise_xor,
            "shl": np.left_shift, "shr": np.right_shift, "mul.lo": np.multiply,
        }[operation](a, b)  # fmt: skip

    def equals(self, a: Any, b: int) -> Any:
        return a == b

    def both(self, p: Any, q: Any) -> Any:
        return p & q

    def select(self, p: Any, a: Any, b: Any) -> Any:
        return np.where(p, 0 if a is None else a, 0 if b is None else b)

    def add(self, a: Any, b: Any) -> Any:
        return a + b

    def from_lane(self, x: Any, source: Any) -> Any:
        return x[source]


def warp_tile(columns: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """A tile of 16 rows, and the registers of a warp that holds it."""
    tile = np.random.default_rng(columns).integers(-9, 10, (16, columns))
    g, c = np.arange(32) // 4, np.arange(32) % 4
    return tile, [tile[g + 8 * (r // 2 % 2), 8 * (r // 4) + 2 * c + r % 2] for r in range(columns // 2)]


@pytest.mark.parametrize("columns", [32, 64, 128])
def test_diagonals_of_a_warp(columns: int) -> None:
    tile, registers = warp_tile(columns)
    sums, first = warp_sums.diagonal_sums(Computing(), registers)
    found = dict.fromkeys(range(-15, columns), 0)
    for n, values in enumerate(sums):
        diagonals = (first + 8 * n).tolist()
        assert len(set(diagonals)) == 32, "two lanes add to one address at once"
        for diagonal, value in zip(diagonals, values):
            assert value == 0 or diagonal in found
            if value:
                found[diagonal] += value
    assert found == {d: np.trace(tile, d) for d in found}


@pytest.mark.parametrize("columns", [32, 64, 128])
def test_columns_of_a_warp(columns: int) -> None:
    tile, registers = warp_tile(columns)
    sums, first = warp_sums.column_sums(Computing(), registers)
    found = [(int(c), int(v)) for n, values in enumerate(sums) for c, v in zip(first + 8 * (n // 2) + n % 2, values)]
    assert sorted(found) == list(enumerate(tile.sum(0).tolist()))


@pytest.mark.parametrize("keys", [False, True])
def test_tiles_are_dealt_by_size(keys: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tile once, and programs that take them in turn have as many steps as any other has, to a fiftieth; tiles that are worked on at
    the same time are of samples that are neighbours in the list."""
    row = replace(small(next(r for r in ROWS if r.bias is not None)), q=(1024, 0.5), batch=24)
    data = Data(row, DEVICE)
    x = inputs.Inputs(plan(data.problem("gdpa")), tuple(data.tensors.values()))
    tiles = x.k_tiles(128) if keys else x.q_tiles(128)
    at_once = 4
    monkeypatch.setattr(x, "info", replace(x.info, sms=at_once * row.heads))
    dealt = launch_bias.table(x, tiles, keys)[: int(tiles.count)]
    monkeypatch.setattr(launch_bias, "_WAVES", 0)
    listed = launch_bias.table(x, tiles, keys)[: int(tiles.count)]
    group = 4 * at_once
    for start in range(0, len(listed), group):
        assert sorted(dealt[start : start + group].tolist()) == sorted(listed[start : start + group].tolist())

    def most_over_mean(table: Tensor) -> float:
        lq, h, start, shift = (table[: len(table) // group * group, k] for k in (1, 3, 4, 5))
        if keys:
            steps = (lq + 63) // 64 - (start - shift).clamp(min=0) // 64
        else:
            steps = (torch.minimum(h, torch.minimum(start + 128, lq) + shift) + 63) // 64
        sums = steps.view(-1, at_once).sum(0)
        return float(sums.max() / sums.float().mean())

    assert most_over_mean(dealt) < 1.02 < most_over_mean(listed)


@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.parametrize(("causal", "same"), [(True, True), (True, False), (False, True)])
def test_codes_have_room(causal: bool, same: bool, keys: bool) -> None:
    """The units of all tiles lie apart, and in what is allocated."""
    row = replace(small(next(r for r in ROWS if r.bias is not None)), q=(700, 0.5), batch=9, causal=causal)
    data = Data(row, DEVICE)
    if not same:
        data.tensors["q_offsets"] = data.tensors["k_offsets"].clone()
    x = inputs.Inputs(plan(data.problem("gdpa")), tuple(data.tensors.values()))
    tiles = x.k_tiles(128) if keys else x.q_tiles(128)
    taken: list[int] = []
    for _q_row, lq, _k_row, h, start, shift, _t, unit in launch_bias.table(x, tiles, keys)[: int(tiles.count)].tolist():
        if keys:
            blocks = -(-lq // 64) - (max(start - shift, 0) // 64 if causal else 0)
        else:
            blocks = -(-(min(h, min(start + 128, lq) + shift) if causal else h) // 64)
        taken += range(unit, unit + max(blocks, 0))
    assert len(taken) == len(set(taken)) > 0
    assert max(taken) < launch_bias.room(x, keys)[2]


TIMES = {
    "ascending": lambda draw, n: torch.randint(0, 2000, (n,), generator=draw).cumsum(0),
    "all equal": lambda draw, n: torch.full((n,), 1_700_000_000),
    "bursts": lambda draw, n: (torch.rand(n, generator=draw) < 0.05).cumsum(0) * 86_400 + torch.arange(n) % 7,
    "in any order": lambda draw, n: torch.randint(0, 1 << 20, (n,), generator=draw),
    "descending": lambda draw, n: -torch.randint(0, 2000, (n,), generator=draw).cumsum(0),
    "gaps of centuries": lambda draw, n: (torch.rand(n, generator=draw) < 0.03).cumsum(0) * (1 << 33) + torch.arange(n) * 60,
    "around 2**29": lambda draw, n: (torch.randint(-3, 3, (n,), generator=draw) + (1 << 29)) * (torch.arange(n) % 2),
    "nanoseconds": lambda draw, n: 1_700_000_000_000_000_000 + torch.randint(0, 1 << 40, (n,), generator=draw).cumsum(0),
}  # fmt: skip
EDGES = {
    "powers": torch.logspace(0, 20, 31, base=2.0).long(),
    "crowded": torch.arange(-3, 70_000, 3_000),
    "one": torch.tensor([1]),
    "many": 40 * torch.arange(1, 90).cumsum(0),
    "zero and far": torch.tensor([-5, 0, 0, 1, 2, (1 << 29) - 1, 1 << 29, 1 << 30, (1 << 30) + 1, 1 << 33, 1 << 62]),
}


def compare(
    op: str, times: str, edges: str, dtype: torch.dtype, d: int, lengths: list[int], most: float, radius: int = 9, sharing: bool = False,
    backend: str = "triton", candidates: bool = True, kv_heads: int = 2, same_times: bool = True, **more: Any,
) -> None:  # fmt: skip
    draw = torch.Generator().manual_seed(1)
    if sharing:
        # Every request's keys serve two samples.
        k_lengths, kv_index = torch.tensor(lengths), torch.arange(2 * len(lengths)) // 2
        q_lengths = torch.tensor([n // 2 for n in lengths for _ in range(2)])
    else:
        k_lengths = q_lengths = torch.tensor(lengths)
        kv_index = None
    nq, nk, heads, buckets = int(q_lengths.sum()), int(k_lengths.sum()), 2, EDGES[edges].numel() + 1

    def made(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=draw).to(DEVICE, of)

    q, do = made(nq, heads, d), made(nq, heads, d)
    k, v = made(nk, kv_heads, d), made(nk, kv_heads, d)
    position, time = 0.5 * made(heads, 2 * radius + 1, of=torch.float32), 0.5 * made(heads, buckets, of=torch.float32)
    k_times = TIMES[times](draw, nk).to(DEVICE)
    q_times = TIMES[times](draw, nq).to(DEVICE) if sharing else k_times if same_times else k_times.clone()
    targets = torch.minimum(q_lengths, torch.tensor([5, 0, 64] * 6)[: len(q_lengths)]).to(DEVICE) if candidates else None
    own = (made(nq, heads, d), made(nq, heads, d)) if sharing else None
    q_offsets, k_offsets = (lengths_to_offsets(x).to(DEVICE) for x in (q_lengths, k_lengths))
    if op == "gdpa":
        more = {"activation": "silu", "scale_in": d**-0.5, **more}

    def grads(backend: str, to: torch.dtype) -> list[Tensor]:
        wide = to == torch.float64
        leaves = [x.detach().to(to if wide else x.dtype).requires_grad_() for x in (q, k, v, position, time, *(own or ()))]
        bias = ops.RelativeBias(leaves[3], leaves[4], EDGES[edges].to(DEVICE), q_times, k_times)
        out = getattr(ops, op)(
            *leaves[:3], q_offsets, k_offsets, bias=bias, num_targets=targets, backend=backend, max_q_len=256, max_k_len=256,
            kv_index=None if kv_index is None else kv_index.to(DEVICE), target_kv=tuple(leaves[5:]) or None, **more,
        )  # fmt: skip
        return [out.detach(), *torch.autograd.grad(out, leaves, do.to(out.dtype))]

    with dispatch.offering(SPECS[op, backend]):
        got = grads(backend, dtype)
    want = grads(ops.REFERENCE, torch.float64)
    names = ("out", "dq", "dk", "dv", "d position", "d time", "d target k", "d target v")
    far = {n: float((g.double() - w).norm() / w.norm().clamp_min(1e-30)) for n, g, w in zip(names, got, want)}
    assert max(far.values()) < most, far


@pytest.mark.parametrize("times", list(TIMES))
def test_times(times: str) -> None:
    compare("gdpa", times, "powers", torch.float32, 16, LENGTHS, 1e-5, causal=True)


@pytest.mark.parametrize("times", ["ascending", "around 2**29"])
@pytest.mark.parametrize("edges", ["crowded", "one", "zero and far"])
def test_edges(edges: str, times: str) -> None:
    compare("jagged_attention", times, edges, torch.float32, 16, LENGTHS[3:5], 1e-5)


def test_requests() -> None:
    compare("jagged_attention", "bursts", "powers", torch.float32, 16, [40, 0, 66], 1e-5, sharing=True)


@pytest.mark.skipif(not HOPPER, reason="sums in registers are for sm_90")
@pytest.mark.parametrize(
    ("op", "d", "columns", "case"),
    [
        ("gdpa", 128, 64, "ascending:powers"), ("jagged_attention", 128, 64, "bursts:powers"), ("gdpa", 128, 32, "in any order:crowded"),
        ("jagged_attention", 64, 32, "gaps of centuries:zero and far"), ("gdpa", 64, 64, "gaps of centuries:powers"),
        ("gdpa", 128, 32, "ascending:zero and far"),
    ],
)  # fmt: skip
def test_sums_in_registers(op: str, d: int, columns: int, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables wider and narrower than a tile, history masks of all kinds, shared requests.

    Not softmax where nearly all pairs of a row share a bucket: their dS add up to 0, but for the rounding of O in delta.
    """
    sums = {"BLOCK_M": 64, "BLOCK_N": columns, "TMA": True, "PERSISTENT": 2, "num_warps": 4, "num_stages": 2, "LANES": True}
    chosen = []

    def choose(kernel: str, facts: Any, info: Any, candidates: Any, run: Any) -> dict[str, Any]:
        config = sums if kernel == "attention.bias" else candidates()[0]
        chosen.append(config)
        run(config)
        return config

    monkeypatch.setattr(inputs, "choose", choose)
    times, edges = case.split(":")
    lengths = [*LENGTHS, 200, 256, 191]
    compare(op, times, edges, torch.bfloat16, d, lengths, 8e-3, radius=100, causal=True)
    compare(op, times, edges, torch.bfloat16, d, lengths, 8e-3, radius=20)
    compare(op, times, edges, torch.bfloat16, d, lengths, 8e-3, radius=100, window=(40, 30))
    compare(op, times, edges, torch.bfloat16, d, [40, 0, 97, 64, 256], 8e-3, radius=20, sharing=True)
    assert sums in chosen


def test_rules_take_candidates() -> None:
    """What was measured for the benchmark's row is chosen, and is known to the tests of every candidate."""
    data = Data(small(next(r for r in ROWS if r.bias is not None)), "cpu")
    for op in data.row.ops:
        p = plan(data.problem(op))
        offered = {
            "hopper.bias_forward": launch_bias.candidates("hopper.bias_forward", True),
            "hopper.bias_backward": launch_bias.candidates("hopper.bias_backward", True),
            "hopper.bias_dq": launch_bias.dq_candidates("", p, None),
            "hopper.bias_dkdv": launch_bias.dkdv_candidates("", p, None),
        }
        facts = {**dict(p.facts), "only": False}
        for kernel, found in offered.items():
            uses = [r["use"] for r in committed_rules("sm_90", "hopper") if r["kernel"] == kernel and matches(r["when"], facts)]
            assert uses, kernel
            assert uses[0] in found, kernel


HOPPER_CASES = {
    "times that may differ": ("gdpa", "ascending:powers", {"d": 128, "radius": 100, "causal": True, "same_times": False}),
    "causal": ("gdpa", "ascending:powers", {"d": 128, "radius": 100, "causal": True}),
    "causal softmax": ("jagged_attention", "ascending:powers", {"d": 128, "radius": 100, "causal": True}),
    "no candidates, one key head": ("gdpa", "bursts:powers", {"d": 64, "radius": 100, "candidates": False, "kv_heads": 1}),
    "far times": ("jagged_attention", "gaps of centuries:zero and far", {"d": 128, "radius": 9, "causal": True, "candidates": False}),
    "crowded edges": ("jagged_attention", "in any order:crowded", {"d": 64, "radius": 9}),
    "more buckets than lanes": ("gdpa", "ascending:many", {"d": 128, "radius": 300, "causal": True}),
}


@pytest.mark.skipif(not HOPPER, reason="written for sm_90")
@pytest.mark.parametrize("which", [0, -1])
@pytest.mark.parametrize("case", list(HOPPER_CASES))
def test_hopper(case: str, which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables wider and narrower than a tile; the first and the last candidate of each kernel."""
    op, kind, more = HOPPER_CASES[case]

    def choose(kernel: str, facts: Any, info: Any, candidates: Any, run: Any) -> dict[str, Any]:
        config = candidates()[which if kernel.startswith("hopper.") else 0]
        run(config)
        return config

    for module in (inputs, launch_bias):
        monkeypatch.setattr(module, "choose", choose)
    times, edges = kind.split(":")
    backend = "hopper" if edges == "many" else "hopper-only"
    compare(op, times, edges, torch.bfloat16, lengths=[*LENGTHS, 200, 256, 191, 0, 127], most=8e-3, backend=backend, **more)


@pytest.mark.parametrize(("buckets", "radius", "grads", "fits"), [
    (32, 40, True, True), (33, 40, True, False), (33, 40, False, True), (256, 40, False, True), (257, 40, False, False),
    (20, 2100, True, False), (20, 2100, False, True),
])  # fmt: skip
def test_hopper_only_takes_no_others(buckets: int, radius: int, grads: bool, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that its kernels do not hold is refused before anything runs, where ``hopper`` takes the portable kernels."""
    taken = []
    monkeypatch.setattr(launch_bias, "_choose", lambda x, kernel, only, run: taken.append(kernel))
    row = next(r for r in ROWS if r.bias is not None)
    data = Data(small(row), "cpu")
    problem = replace(data.problem("gdpa"), needs_grad=grads)
    tables = {"bias_position": torch.zeros(data.row.heads, 2 * radius + 1), "bias_time": torch.zeros(data.row.heads, buckets)}
    tensors = {**data.tensors, **tables, "bias_time_edges": torch.arange(buckets - 1)}
    with nullcontext() if fits else pytest.raises(OpError, match=rf"{buckets} time buckets.*hold 256 buckets, with gradients 32"):
        launch_bias.forward(problem, tuple(tensors.values()), True)
    assert taken == (["hopper.bias_forward"] if fits else [])


@pytest.mark.parametrize("scale", [0.0, -0.1, 1e-9, float("nan")])
def test_scales_that_the_bias_is_not_divided_by(scale: float) -> None:
    problem = Data(small(next(r for r in ROWS if r.bias is not None)), "cpu").problem("gdpa")
    problem = replace(problem, device="cuda", arch=90)
    assert hopper_spec.supports(problem)
    options = {**dict(problem.options), "scale_in": scale}
    answer = hopper_spec.supports(replace(problem, options=tuple(sorted(options.items()))))
    assert not answer
    assert "over the scale" in answer.reason


@pytest.mark.slow
def test_resources_on_hopper() -> None:
    """Of every configuration: products not serialised; on the stack a few scalars (no tiles), which loops over tiles hardly touch."""
    row = next(r for r in ROWS if r.bias is not None).name
    jobs = [f"{row}:jagged_attention:forward", f"{row}:gdpa:backward"]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(PROBE), *jobs], capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    limits = {"hopper_bias_fwd_kernel": 20, "hopper_bias_dq_kernel": 96, "hopper_bias_dkdv_kernel": 40}
    every = [json.loads(line) for line in done.stdout.splitlines()]
    assert {built["kernel"] for built in every} == set(limits)
    for built in every:
        assert built["spills"] <= limits[built["kernel"]], built
        assert not built["warnings"], built
        assert built["shared"] <= 227 << 10, built
