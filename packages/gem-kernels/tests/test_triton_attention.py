"""The Triton jagged_attention and gdpa pass the conformance kit: on a GPU, else in Triton's interpreter. And what the kit cannot know:
tile lists, variants, schemes of the backward pass, subtraction masking, strided inputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gem_core import ops
from gem_core.jagged import lengths_to_offsets
from gem_core.ops import dispatch
from gem_core.ops.contract import OpPrecision, Problem
from gem_core.ops.explain import problem_of
from gem_core.testing.kernel_cases import Case, Draw, cases
from gem_core.testing.kernels import KernelConformance
from gem_kernels.triton import attention
from gem_kernels.triton.common.device import on_cpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPECS = {(spec.op, spec.name): spec for spec in attention.specs()}
# The interpreter of Triton 3.6 multiplies bf16 bit patterns, hence no bf16 there; fp16 is tested by the cases below.
DTYPES = (torch.float32, torch.bfloat16, torch.float16) if DEVICE == "cuda" else (torch.float32,)
# Both ops are one template: the kit's rules are interpreted for one of them, and of the other the cases that differ.
POINTWISE = (
    "no bounds", "empty batch", "causal, fewer keys than queries", "window, one side", "candidates, window", "candidates only",
    "context, candidates", "bias, candidates, context", "grouped heads", "narrow v", "width 24", "sharing, candidates", "shared q, sharing",
    *(name for name in cases("gdpa") if name.startswith("activation")),
)  # fmt: skip

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning", "ignore:All-NaN slice:RuntimeWarning"),
    *([pytest.mark.gpu] if DEVICE == "cuda" else []),
]


@pytest.fixture(autouse=True)
def _where_it_runs() -> Iterator[None]:
    with nullcontext() if DEVICE == "cuda" else on_cpu():
        yield


class TestJaggedAttention(KernelConformance):
    spec, device, dtypes = SPECS["jagged_attention", "triton"], DEVICE, DTYPES
    only = None if DEVICE == "cuda" else tuple(n for n in cases("jagged_attention") if n != "many short samples")


class TestGdpa(KernelConformance):
    spec, device, dtypes = SPECS["gdpa", "triton"], DEVICE, DTYPES
    __test__ = DEVICE == "cuda"


def right(op: str, name: str, case: Case, dtype: torch.dtype = torch.float32) -> None:
    """Result and gradients of the implementation ``name`` are the reference's."""
    kit = KernelConformance()
    spec = kit.spec = SPECS[op, name]
    with dispatch.offering(spec):
        call = case(Draw(dtype, DEVICE))
        answer = spec.supports(kit.problem(call))
        assert answer, answer.reason
        results, grads = kit.run(call, name)
        kit.check(call, results, grads, dtype)


@pytest.mark.skipif(DEVICE == "cuda", reason="TestGdpa has them all")
@pytest.mark.parametrize("case", POINTWISE)
def test_gdpa(case: str) -> None:
    right("gdpa", "triton", cases("gdpa")[case])


@pytest.mark.parametrize("op", ["jagged_attention", "gdpa"])
@pytest.mark.parametrize("case", ["cross", "window, causal", "sharing, candidates"])
def test_half_precision(op: str, case: str) -> None:
    right(op, "triton", cases(op)[case], torch.float16)


@pytest.mark.parametrize("op", ["jagged_attention", "gdpa"])
@pytest.mark.parametrize("name", ["triton-split", "triton-sample", "triton-atomic"])
@pytest.mark.parametrize("case", ["short keys", "window, causal", "one key head"])
def test_backward_schemes(op: str, name: str, case: str) -> None:
    right(op, name, cases(op)[case])


@pytest.mark.parametrize("case", ["full", "cross", "grouped heads", "sharing", "shared q", "scores near -60"])
def test_subtraction_masking(case: str) -> None:
    right("jagged_attention", "triton-subtract", cases("jagged_attention")[case])


@pytest.mark.parametrize("score", [-30.0, -60.0, -100.0, 30.0])
def test_subtraction_among_large_neighbours(score: float) -> None:
    """Scores far from 0, and neighbours of 10⁴ just behind a sample's keys: the surplus is exactly that of zero scores, or is not used."""
    lengths = torch.tensor([40, 33, 7, 70])
    offsets = lengths_to_offsets(lengths).to(DEVICE)
    q, k, v = (torch.randn(150, 2, 16, generator=torch.Generator().manual_seed(i)).to(DEVICE) for i in range(3))
    q[:, :, 0], k[:, :, 0] = (abs(score) * 4) ** 0.5, (abs(score) * 4) ** 0.5 * (1 if score > 0 else -1)
    k[40:73], v[40:73] = 1e4, 1e4
    arguments = {"max_q_len": 70, "max_k_len": 70, "return_lse": True}
    with dispatch.offering(SPECS["jagged_attention", "triton-subtract"]):
        out, lse = ops.jagged_attention(q, k, v, offsets, backend="triton-subtract", **arguments)
    want, want_lse = ops.jagged_attention(q.double(), k.double(), v.double(), offsets, backend=ops.REFERENCE, **arguments)
    sound = torch.ones(150, dtype=torch.bool)
    sound[40:73] = False
    assert torch.allclose(out[sound].double(), want[sound], rtol=0, atol=2e-5 * float(want[sound].abs().max()))
    assert torch.allclose(lse[:, sound].double(), want_lse[:, sound], atol=1e-4)


@pytest.mark.parametrize("gap", [3, 1 << 24, 1 << 34], ids=["many buckets", "large edges", "beyond 32 bits"])
def test_time_bias_by_any_path(gap: int) -> None:
    """Tiles that span more buckets than are selected one by one, edges beyond 32 bits, and differences beyond 32 bits; times on edges."""
    lengths = torch.tensor([90, 0, 70])
    offsets = lengths_to_offsets(lengths).to(DEVICE)
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(160, 2, 16, generator=draw).to(DEVICE) for _ in range(3))
    times = (gap * torch.randint(0, 4, (160,), generator=draw).cumsum(0)).to(DEVICE)
    edges = torch.tensor([gap * i for i in range(1, 40)] + [1 << 40], device=DEVICE)
    bias = ops.RelativeBias(
        torch.randn(2, 9, generator=draw).to(DEVICE), torch.randn(2, 41, generator=draw).to(DEVICE), edges, times, times
    )
    more = {"max_q_len": 90, "max_k_len": 90, "bias": bias, "causal": True}
    with dispatch.offering(SPECS["jagged_attention", "triton"]):
        out = ops.jagged_attention(q, k, v, offsets, backend="triton", **more)
    want = ops.jagged_attention(q, k, v, offsets, backend=ops.REFERENCE, **more)
    assert torch.allclose(out, want, rtol=0, atol=1e-5 * float(want.abs().max()))


VARIANTS = {
    "streamed by descriptors": {"RESIDENT": 0, "TMA": True},
    "resident": {"RESIDENT": 1},
    "resident by descriptors": {"RESIDENT": 1, "TMA": True},
    "resident in two tiles": {"RESIDENT": 2},
}


@pytest.mark.skipif(DEVICE == "cuda", reason="the GPU's configurations are its own")
@pytest.mark.parametrize("op", ["jagged_attention", "gdpa"])
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_forward_variants(op: str, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that the interpreter's own configuration does not choose."""
    from gem_kernels.triton.attention import candidates

    config = {"BLOCK_M": 16, "BLOCK_N": 16, "PERSISTENT": 1, "CHUNK": 3, "TMA": False, "num_warps": 1, "num_stages": 1, **VARIANTS[variant]}
    monkeypatch.setattr(candidates, "forward", lambda *_: [config])
    right(op, "triton", cases(op)["cross"])
    right(op, "triton", cases(op)["shared q, sharing"])


@pytest.mark.skipif(DEVICE == "cuda", reason="the GPU's configurations are its own")
@pytest.mark.parametrize("op", ["jagged_attention", "gdpa"])
def test_backward_by_descriptors(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from gem_kernels.triton.attention import candidates

    config = {"BLOCK_M": 32, "BLOCK_N": 16, "TMA": True, "PERSISTENT": 1, "num_warps": 1, "num_stages": 1}
    monkeypatch.setattr(candidates, "query_side", lambda *_: [config])
    monkeypatch.setattr(candidates, "key_side", lambda *_: [config])
    for case in ("causal, fewer keys than queries", "short keys", "shared q"):
        right(op, "triton", cases(op)[case])


LENGTH = st.sampled_from((0, 1, 7, 8, 15, 16, 17, 33))


@settings(max_examples=6, deadline=None)
@given(st.lists(st.tuples(LENGTH, LENGTH), max_size=5), st.booleans())
def test_any_lengths(lengths: list[tuple[int, int]], causal: bool) -> None:
    """Forward and backward at lengths around the tile's edges."""
    q_lengths, k_lengths = [q for q, _ in lengths], [k for _, k in lengths]
    q, k, v = (torch.randn(sum(n), 2, 16, device=DEVICE, requires_grad=True) for n in (q_lengths, k_lengths, k_lengths))
    q_offsets, k_offsets = (lengths_to_offsets(torch.tensor(n, dtype=torch.int32)).to(DEVICE) for n in (q_lengths, k_lengths))
    grads = []
    with dispatch.offering(SPECS["jagged_attention", "triton"]):
        for backend in ("triton", ops.REFERENCE):
            out = ops.jagged_attention(q, k, v, q_offsets, k_offsets, causal=causal, backend=backend)
            grads.append((out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))))
    for got, want in zip(*grads):
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-4)


def listed(batch: int, block: int, **arguments: object) -> tuple[list[tuple[int, int]], int]:
    from gem_kernels.triton.attention.schedule import tile_list

    found = tile_list(batch, block, torch.device(DEVICE), **arguments)
    tiles = found.tiles[: int(found.count)].tolist()
    return [(t >> 32, t & 0xFFFFFFFF) for t in tiles], found.bound


def offsets_of(lengths: Tensor) -> Tensor:
    return lengths_to_offsets(lengths).to(DEVICE)


@pytest.fixture(params=["ranks", "classes"])
def builder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both kernels that build lists: that of few samples and that of many."""
    from gem_kernels.triton.attention import schedule

    if request.param == "classes":
        monkeypatch.setattr(schedule, "_MOST_RANKED", 0)
    return str(request.param)


@pytest.mark.parametrize("batch", [1, 255, 256, 257, 700])
def test_tile_list(batch: int, builder: str) -> None:
    """Every valid tile once, heavy samples first, blocks from the last to the first; never more than the host's bound."""
    lengths = torch.randint(0, 300, (batch,), generator=torch.Generator().manual_seed(batch))
    offsets = offsets_of(lengths)
    tiles, bound = listed(batch, 64, rows=int(lengths.sum()), offsets=offsets, longest=300, work_offsets=offsets, reverse=True)
    assert len(tiles) <= bound
    assert sorted(tiles) == [(b, m) for b in range(batch) for m in range(-(-int(lengths[b]) // 64))]
    if builder == "ranks":
        assert tiles == sorted(tiles, key=lambda tile: (-int(lengths[tile[0]]) // 64, tile[0], -tile[1]))
    else:
        work = [int(lengths[b]) for b, _ in tiles]
        assert all(later < 1.5 * earlier or later < 12 for earlier, later in zip(work, work[1:])), (
            "a sample comes after one with much less work"
        )
    inside = [(m, n) for (b, m), (c, n) in zip(tiles, tiles[1:]) if b == c]
    assert all(n == m - 1 for m, n in inside)


@pytest.mark.usefixtures("builder")
@pytest.mark.parametrize("shared", [False, True])
def test_tile_list_spelt_out(shared: bool) -> None:
    """The same tiles in the same order, with the rows of both sides; with a shared Q every sample has as many there."""
    from gem_kernels.triton.attention.schedule import tile_list

    lengths, others = (torch.randint(0, 300, (300,), generator=torch.Generator().manual_seed(n)) for n in (1, 2))
    offsets, other_offsets = offsets_of(lengths), None if shared else offsets_of(others)
    arguments = {"rows": int(lengths.sum()), "offsets": offsets, "length": 40, "work_offsets": other_offsets}
    tiles, _ = listed(300, 64, **arguments)
    found = tile_list(300, 64, torch.device(DEVICE), sides=(offsets, other_offsets), **arguments)
    assert int(found.count) == len(tiles)
    begin, other = offsets.tolist(), (torch.arange(301) * 40).tolist() if shared else other_offsets.tolist()
    entries = [[begin[b], begin[b + 1] - begin[b], other[b], other[b + 1] - other[b], 64 * m] for b, m in tiles]
    assert found.table[: len(tiles), :5].tolist() == entries


@pytest.mark.usefixtures("builder")
def test_tile_list_balances() -> None:
    """Programs that walk with a stride get nearly equal work from lengths that differ by 1000."""
    lengths = torch.cat([torch.full((40,), 4000), torch.full((900,), 4)])[torch.randperm(940, generator=torch.Generator().manual_seed(1))]
    offsets = offsets_of(lengths)
    tiles, _ = listed(940, 64, rows=int(lengths.sum()), offsets=offsets, work_offsets=offsets)
    programs = 132
    load = [sum(-(-int(lengths[b]) // 64) for b, _ in tiles[p::programs]) for p in range(programs)]
    assert max(load) - min(load) <= 63 + 1


def test_tile_list_of_one_length_and_of_less() -> None:
    tiles, bound = listed(3, 16, rows=99, length=33)
    assert sorted(tiles) == [(b, m) for b in range(3) for m in range(3)]
    assert bound == 9
    less = torch.tensor([0, 16, 33], device=DEVICE)
    tiles, _ = listed(3, 16, rows=99, offsets=offsets_of(torch.tensor([33, 33, 33])), subtract=less)
    assert sorted(tiles) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]


def test_tile_list_is_kept_until_written() -> None:
    from gem_kernels.triton.attention.schedule import tile_list

    offsets = offsets_of(torch.tensor([5, 40]))
    arguments = {"rows": 45, "offsets": offsets, "work_offsets": offsets}
    first = tile_list(2, 16, offsets.device, **arguments)
    assert tile_list(2, 16, offsets.device, **arguments) is first
    assert tile_list(2, 32, offsets.device, **arguments) is not first
    offsets[1] = 20
    second = tile_list(2, 16, offsets.device, **arguments)
    assert second is not first
    assert int(second.count) == 4


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")
def test_tile_list_is_built_once_a_graph_and_anew_by_its_replays() -> None:
    from gem_core.ops.remember import recording
    from gem_kernels.triton.attention.schedule import tile_list

    offsets = offsets_of(torch.tensor([5, 40]))
    arguments = {"rows": 45, "offsets": offsets, "work_offsets": offsets}
    before = tile_list(2, 16, offsets.device, **arguments)
    graphs, lists = [torch.cuda.CUDAGraph() for _ in range(2)], []
    for graph in graphs:
        with recording(), torch.cuda.graph(graph):
            lists += [tile_list(2, 16, offsets.device, **arguments) for _ in range(2)]
    assert lists[0] is lists[1]
    assert lists[2] is lists[3]
    assert len({id(x) for x in (before, lists[0], lists[2])}) == 3
    offsets[1:] = torch.tensor([17, 45], device=DEVICE)
    for graph, found in zip(graphs, lists[::2]):
        graph.replay()
        assert sorted(t >> 32 for t in found.tiles[: int(found.count)].tolist()) == [0, 0, 1, 1]


def test_views_of_a_fused_projection_are_not_copied() -> None:
    from gem_kernels.triton.attention.inputs import Inputs
    from gem_kernels.triton.attention.plan import plan

    fused = torch.randn(40, 3 * 2 * 16, device=DEVICE)
    q, k, v = (x.view(40, 2, 16) for x in fused.chunk(3, dim=1))
    offsets = offsets_of(torch.tensor([15, 25]))
    arguments = {"q": q, "k": k, "v": v, "q_offsets": offsets}
    x = Inputs(plan(problem_of("gdpa", **arguments)), (q, k, v, offsets, offsets, *[None] * 13))
    assert [t.data_ptr() for t in (x.q, x.k, x.v)] == [t.data_ptr() for t in (q, k, v)]


def _problem(**changes: object) -> Problem:
    given: dict = {
        "op": "jagged_attention", "device": "cuda", "arch": 90, "dtypes": (("q", torch.bfloat16),),
        "dims": (("H", 4), ("Hkv", 4), ("D", 64), ("Dv", 64)),
        "options": (("max_k_len", 64), ("max_q_len", 64), ("out_scale", 1.0), ("scale", 0.125)),
    }  # fmt: skip
    return Problem(**{**given, **changes})


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("triton", {"dtypes": (("q", torch.float64),)}, "computes in float32"),
        ("triton", {"dims": (("H", 1), ("Hkv", 1), ("D", 300), ("Dv", 64))}, "D is 300"),
        ("triton", {"precision": OpPrecision()}, "low-precision"),
        ("triton-atomic", {"deterministic": True}, "deterministic"),
        ("triton-sample", {"present": frozenset({"bias_position"})}, "no candidates, bias or request sharing"),
        ("triton-subtract", {"present": frozenset({"num_targets"})}, "without candidates or bias"),
    ],
)
def test_refusals_give_their_reason(name: str, changes: dict, reason: str) -> None:
    answer = SPECS["jagged_attention", name].supports(_problem(**changes))
    assert not answer
    assert reason in answer.reason


def test_refuses_the_cpu_outside_the_interpreter() -> None:
    import contextvars

    # a fresh context: without the assumed device of the fixture
    answer = contextvars.Context().run(SPECS["gdpa", "triton"].supports, _problem(op="gdpa", device="cpu"))
    assert not answer
    assert "CUDA" in answer.reason
