"""The attention kernels where only a GPU shows: accuracy at real sizes, addresses past 2³¹, very many and very long samples, bit-equal
repetition, no compilation for new lengths, no memory beyond the stated.

    python -m pytest packages/gem-kernels/tests/test_triton_attention_gpu.py packages/gem-kernels/tests/test_triton_attention.py -n 8
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gem_core import ops, plugins
from gem_core.jagged import lengths_to_offsets
from gem_core.ops import masks
from gem_core.ops.activations import act, act_grad

DEVICE = "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    """A checkout on PYTHONPATH has no entry points: register the plug-in by hand where it is not installed."""
    if not any(s.name == "triton" and s.op == "gdpa" for s in plugins.manager().offers("kernel")):
        from gem_kernels.plugin import plugin

        plugins.manager().add("gem-kernels-checkout", plugin)


def packed(lengths: Tensor, heads: int, d: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(int(lengths.sum()), heads, d, device=DEVICE, dtype=dtype, generator=generator)


def drawn(batch: int, low: int, high: int, seed: int = 0) -> Tensor:
    return torch.randint(low, high + 1, (batch,), generator=torch.Generator().manual_seed(seed))


def public(
    op: str, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, backend: str = "triton", **more: object
) -> Tensor:
    if op == "gdpa":
        more = {"activation": "silu", "scale_in": q.shape[2] ** -0.5, **more}
    return getattr(ops, op)(q, k, v, q_offsets, k_offsets, backend=backend, **more)


def dense(
    op: str, q: Tensor, k: Tensor, v: Tensor, do: Tensor, round_to: Callable[[Tensor], Tensor], causal: bool, activation: str = "silu"
) -> list[Tensor]:
    """out, dq, dk, dv of one sample in the dtype of the inputs; P and dS pass through ``round_to`` before they are multiplied on."""
    groups = q.shape[1] // k.shape[1]
    q, k, v, do = (x.transpose(0, 1) for x in (q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), do))
    scale = q.shape[2] ** -0.5
    seen = masks.visible(q.shape[1], k.shape[1], causal=causal, device=q.device)
    s = scale * (q @ k.transpose(1, 2))
    dp = do @ v.transpose(1, 2)
    if op == "gdpa":
        p = torch.where(seen, act(activation, s), 0.0)
        out = round_to(p) @ v
        ds = torch.where(seen, act_grad(activation, s), 0.0) * dp
    else:
        p = torch.softmax(s.masked_fill(~seen, -torch.inf), 2).nan_to_num(0.0)
        out = round_to(p) @ v
        ds = p * (dp - (out * do).sum(2, keepdim=True))
    ds = round_to(ds)
    grads = [out, scale * (ds @ k), scale * (ds.transpose(1, 2) @ q), round_to(p).transpose(1, 2) @ do]
    for i in (2, 3):
        grads[i] = grads[i].unflatten(0, (-1, groups)).sum(1)
    return [g.transpose(0, 1) for g in grads]


def errors(got: list[Tensor], want: list[Tensor]) -> list[float]:
    return [float((g.double() - w).norm() / w.norm().clamp_min(1e-300)) for g, w in zip(got, want)]


SHAPES = {
    "self": {"q": (1, 1024), "heads": 4, "d": 128},
    "causal": {"q": (1, 700), "heads": 4, "d": 128, "causal": True},
    "cross 32": {"q": (1, 1024), "k": (32, 32), "heads": 4, "d": 128},
    "cross 128": {"q": (1, 600), "k": (100, 128), "heads": 4, "d": 128},
    "cross 256": {"q": (1, 600), "k": (200, 256), "heads": 4, "d": 128},
    "few queries": {"q": (1, 32), "k": (1, 2000), "heads": 4, "d": 128},
    "grouped": {"q": (1, 300), "heads": 8, "kv_heads": 2, "d": 64, "causal": True},
    "d 64": {"q": (1, 600), "heads": 4, "d": 64},
    "d 32": {"q": (1, 600), "heads": 4, "d": 32, "causal": True},
    "d 256": {"q": (1, 500), "heads": 2, "d": 256, "causal": True},
    "d 96": {"q": (1, 500), "heads": 2, "d": 96},
    "d 40": {"q": (0, 90), "heads": 3, "d": 40},
}


def needs_hopper(d: int, dtype: torch.dtype = torch.bfloat16, op: str = "gdpa") -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("written for sm_90")
    if d not in ((64, 128, 256) if op == "gdpa" else (64, 128)) or dtype == torch.float32:
        pytest.skip("head widths 64, 128 and, for gdpa, 256 in half precision")


BACKENDS = ["triton", "hopper-only"]


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
IN_FP16 = ("self", "causal", "cross 128", "grouped", "d 32", "d 256", "d 40")
"""Every kernel once: fp16 takes those of bf16, in the same configurations."""


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [pytest.param(s, dtype, id=f"{s}-{name}") for s in SHAPES for name, dtype in DTYPES.items() if name != "fp16" or s in IN_FP16],
)
@pytest.mark.parametrize("op", ["jagged_attention", "gdpa"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_accuracy(backend: str, op: str, shape: str, dtype: torch.dtype) -> None:
    """At most 1.5 times the error of PyTorch in the same dtype with fp32 accumulation; 1e-5 in fp32."""
    case = dict(SHAPES[shape])
    batch = 24
    q_lengths = drawn(batch, *case["q"])
    k_lengths = drawn(batch, *case["k"], seed=1) if "k" in case else q_lengths
    heads, kv_heads, d, causal = case["heads"], case.get("kv_heads", case["heads"]), case["d"], case.get("causal", False)
    if backend == "hopper-only":
        needs_hopper(d, dtype, op)
    q, do = packed(q_lengths, heads, d, dtype, 0), packed(q_lengths, heads, d, dtype, 3)
    k, v = packed(k_lengths, kv_heads, d, dtype, 1), packed(k_lengths, kv_heads, d, dtype, 2)
    qo, ko = lengths_to_offsets(q_lengths).to(DEVICE), lengths_to_offsets(k_lengths).to(DEVICE)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = public(op, *leaves, qo, ko, backend=backend, max_q_len=int(q_lengths.max()), max_k_len=int(k_lengths.max()), causal=causal)
    got = [out.detach(), *torch.autograd.grad(out, leaves, do)]
    exact: list[list[Tensor]] = [[], [], [], []]
    like: list[list[Tensor]] = [[], [], [], []]
    round_to = (lambda x: x) if dtype == torch.float32 else (lambda x: x.to(dtype).float())
    for a, b, c, e in zip(qo.tolist(), qo.tolist()[1:], ko.tolist(), ko.tolist()[1:]):
        part = q[a:b], k[c:e], v[c:e], do[a:b]
        for parts, result in zip(exact, dense(op, *(x.double() for x in part), lambda x: x, causal)):
            parts.append(result)
        for parts, result in zip(like, dense(op, *(x.float() for x in part), round_to, causal)):
            parts.append(result.to(dtype))
    want = [torch.cat(x) for x in exact]
    ours, theirs = errors(got, want), errors([torch.cat(x) for x in like], want)
    for name, mine, other in zip(("out", "dq", "dk", "dv"), ours, theirs):
        limit = 1e-5 if dtype == torch.float32 else 1.5 * other
        assert mine <= limit, f"{name}: relative error {mine:.2e}, limit {limit:.2e}"


@pytest.mark.parametrize("op", ["jagged_attention", "gdpa"])
@pytest.mark.parametrize("backend", ["triton", "triton-split", "triton-sample", "triton-atomic", "hopper-only"])
def test_schemes_agree(op: str, backend: str) -> None:
    """Every backward scheme gives the gradients of the split one."""
    if backend == "hopper-only":
        needs_hopper(64)
    lengths = drawn(200, 0, 400)
    offsets = lengths_to_offsets(lengths).to(DEVICE)
    leaves = [packed(lengths, 4, 64, torch.bfloat16, s).requires_grad_() for s in range(3)]
    do = packed(lengths, 4, 64, torch.bfloat16, 4)
    results = []
    for name in ("triton-split", backend):
        out = public(op, *leaves, offsets, offsets, backend=name, max_q_len=400, max_k_len=400)
        results.append(torch.autograd.grad(out, leaves, do))
    assert max(errors(list(results[1]), [g.double() for g in results[0]])) < 3e-3


MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (33, 70)},
    "causal window": {"causal": True, "window": (200, 0)},
    "one side": {"window": (-1, 5)},
}


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("mask", list(MASKS))
@pytest.mark.parametrize("op", ["jagged_attention", "gdpa"])
def test_hopper_like_portable(op: str, mask: str, d: int) -> None:
    """Masks, different lengths of queries and keys (none on one side), grouped heads, slack rows: as the portable kernels have them."""
    needs_hopper(d)
    q_lengths = torch.cat([torch.tensor([0, 1, 63, 64, 65, 127, 128, 129, 5, 0]), drawn(60, 0, 500)])
    k_lengths = torch.cat([torch.tensor([5, 0, 64, 63, 1, 300, 128, 129, 0, 0]), drawn(60, 0, 500, seed=1)])
    qo, ko = lengths_to_offsets(q_lengths).to(DEVICE), lengths_to_offsets(k_lengths).to(DEVICE)
    slack = torch.tensor([7])
    leaves = [
        packed(torch.cat([lengths, slack]), heads, d, torch.bfloat16, s)
        for s, (lengths, heads) in enumerate([(q_lengths, 4), (k_lengths, 2), (k_lengths, 2)])
    ]
    for x in leaves:
        x[-7:] = torch.nan
        x.requires_grad_()
    do = packed(torch.cat([q_lengths, slack]), 4, d, torch.bfloat16, 4)
    results = []
    for backend in ("triton-split", "hopper-only"):
        out = public(op, *leaves, qo, ko, backend=backend, max_q_len=500, max_k_len=500, **MASKS[mask])
        results.append([out.detach(), *torch.autograd.grad(out, leaves, do)])
    for name, mine, other in zip(("out", "dq", "dk", "dv"), results[1], results[0]):
        assert not mine[-7:].any(), f"slack rows of {name}"
        error = errors([mine], [other.double()])[0]
        assert error < 4e-3, f"{name}: {error:.2e}"


@pytest.mark.parametrize("mask", list(MASKS))
def test_hopper_wide_heads(mask: str) -> None:
    """Heads of 256 columns, backward in three kernels of which two see the problem transposed."""
    needs_hopper(256)
    q_lengths = torch.cat([torch.tensor([0, 1, 63, 64, 65, 127, 128, 129, 5, 0]), drawn(30, 0, 400)])
    k_lengths = torch.cat([torch.tensor([5, 0, 64, 63, 1, 300, 128, 129, 0, 0]), drawn(30, 0, 400, seed=1)])
    qo, ko = lengths_to_offsets(q_lengths).to(DEVICE), lengths_to_offsets(k_lengths).to(DEVICE)
    slack = torch.tensor([7])
    leaves = [packed(torch.cat([n, slack]), 2, 256, torch.bfloat16, s) for s, n in enumerate([q_lengths, k_lengths, k_lengths])]
    for x in leaves:
        x[-7:] = torch.nan
        x.requires_grad_()
    do = packed(torch.cat([q_lengths, slack]), 2, 256, torch.bfloat16, 4)
    results = []
    for backend in ("triton-split", "hopper-only"):
        out = public("gdpa", *leaves, qo, ko, backend=backend, max_q_len=400, max_k_len=400, **MASKS[mask])
        results.append([out.detach(), *torch.autograd.grad(out, leaves, do)])
    for name, mine, other in zip(("out", "dq", "dk", "dv"), results[1], results[0]):
        assert not mine[-7:].any(), f"slack rows of {name}"
        error = errors([mine], [other.double()])[0]
        assert error < 4e-3, f"{name}: {error:.2e}"


@pytest.mark.parametrize("longest", [250, 500, None])
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
@pytest.mark.parametrize("op", ["jagged_attention", "gdpa"])
def test_hopper_every_candidate(op: str, mask: str, longest: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every configuration that is offered gives the portable kernels' results, the same in every run; ``longest`` None: a sequence with
    itself, for which some have forms of their own."""
    needs_hopper(128)
    from gem_kernels.triton.attention import inputs
    from gem_kernels.triton.hopper import launch

    q_lengths = torch.cat([torch.tensor([0, 1, 63, 64, 65, 127, 128, 129, 5, 0]), drawn(40, 0, 500)])
    k_lengths = torch.cat([torch.tensor([5, 0, 64, 63, 1, 200, 128, 129, 0, 0]), drawn(40, 0, longest or 500, seed=1)])
    qo, ko = lengths_to_offsets(q_lengths).to(DEVICE), lengths_to_offsets(k_lengths).to(DEVICE)
    if longest is None:
        k_lengths, ko = q_lengths, qo
    leaves = [packed(n, 4, 128, torch.bfloat16, s).requires_grad_() for s, n in enumerate([q_lengths, k_lengths, k_lengths])]
    do = packed(q_lengths, 4, 128, torch.bfloat16, 4)
    most = 0

    def run(backend: str) -> list[Tensor]:
        out = public(op, *leaves, qo, ko, backend=backend, max_q_len=500, max_k_len=longest or 500, **MASKS[mask])
        return [out.detach(), *torch.autograd.grad(out, leaves, do)]

    want = run("triton-split")

    def take(index: int) -> None:
        def choose(kernel: str, facts: object, info: object, candidates: Callable[[], list[dict]], run: object) -> dict:
            nonlocal most
            offered = candidates()
            most = max(most, len(offered))
            return offered[min(index, len(offered) - 1)]

        monkeypatch.setattr(launch, "choose", choose)
        monkeypatch.setattr(inputs, "choose", choose)

    # programs walk also for so few samples
    monkeypatch.setattr(launch, "_LEAST_TILES", 0)
    index = 0
    while index <= most:
        take(index)
        got, again = run("hopper-only"), run("hopper-only")
        assert all(torch.equal(a, b) for a, b in zip(got, again)), index
        for name, mine, other in zip(("out", "dq", "dk", "dv"), got, want):
            error = errors([mine], [other.double()])[0]
            assert error < 4e-3, f"candidate {index}, {name}: {error:.2e}"
        index += 1


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("op", ["jagged_attention", "gdpa"])
def test_hopper_gradients_are_there_for_what_follows(op: str, captured: bool) -> None:
    """The key side is launched before the query side has ended, and here is done long before it (4 programs with all keys); the kernel
    after both must still find dQ."""
    needs_hopper(128)
    lengths = [torch.tensor([64]), torch.tensor([60_000])]
    offsets = [lengths_to_offsets(n).to(DEVICE) for n in lengths]
    leaves = [packed(n, 4, 128, torch.bfloat16, s).requires_grad_() for s, n in enumerate([lengths[0], lengths[1], lengths[1]])]
    do = packed(lengths[0], 4, 128, torch.bfloat16, 4)

    def copied() -> list[Tensor]:
        out = public(op, *leaves, *offsets, backend="hopper-only", max_q_len=64, max_k_len=60_000)
        found = torch.autograd.grad(out, leaves, do)
        copies = [g.clone() for g in found]
        for g in found:
            g.fill_(torch.nan)
        return copies

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        want = copied()
        torch.cuda.synchronize()
        again = copied
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                kept = copied()

            def again() -> list[Tensor]:
                graph.replay()
                return kept

        for _ in range(5):
            got = again()
            torch.cuda.synchronize()
            assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_hopper_tile_tables_know_both_sides() -> None:
    """The same offsets on one side and others on the other side, one call after the other: few keys, and shared queries."""
    needs_hopper(128)
    q_lengths = drawn(30, 0, 300)
    qo = lengths_to_offsets(q_lengths).to(DEVICE)
    q = packed(q_lengths, 2, 128, torch.bfloat16, 0).requires_grad_()
    for seed in (1, 2):
        k_lengths = drawn(30, 0, 120, seed=seed)
        ko = lengths_to_offsets(k_lengths).to(DEVICE)
        k, v = (packed(k_lengths, 2, 128, torch.bfloat16, s).requires_grad_() for s in (3, 4))
        found = [torch.autograd.grad(public("gdpa", q, k, v, qo, ko, b).float().square().sum(), (q, k, v)) for b in BACKENDS]
        assert max(errors(list(found[1]), [g.double() for g in found[0]])) < 1e-2
    for rows in (70, 150):
        q = packed(torch.tensor([rows]), 2, 128, torch.bfloat16, 5).requires_grad_()
        found = [
            torch.autograd.grad(public("gdpa", q, k, v, None, ko, b, broadcast_q=True).float().square().sum(), (q, k, v))
            for b in BACKENDS
        ]  # fmt: skip
        assert max(errors(list(found[1]), [g.double() for g in found[0]])) < 1e-2


@pytest.mark.parametrize(("scale_in", "scale_out"), [(0.1, 3.0), (-0.2, 1.0)])
@pytest.mark.parametrize("longest", [100, 250, 600])
@pytest.mark.parametrize("activation", ["fast_gelu", "silu", "fast_silu"])
def test_hopper_folded_scales(activation: str, longest: int, scale_in: float, scale_out: float) -> None:
    """Activations in bf16 whose constants and scale_in wait for the epilogue."""
    needs_hopper(128)
    q_lengths, k_lengths = drawn(40, 0, 300), drawn(40, 0, longest, seed=1)
    qo, ko = lengths_to_offsets(q_lengths).to(DEVICE), lengths_to_offsets(k_lengths).to(DEVICE)
    leaves = [packed(n, 4, 128, torch.bfloat16, s).requires_grad_() for s, n in enumerate([q_lengths, k_lengths, k_lengths])]
    do = packed(q_lengths, 4, 128, torch.bfloat16, 4)
    more = {"activation": activation, "scale_in": scale_in, "scale_out": scale_out, "max_q_len": 300, "max_k_len": longest}
    results = []
    for backend in ("triton-split", "hopper-only"):
        out = public("gdpa", *leaves, qo, ko, backend=backend, **more)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, do)])
    for name, mine, other in zip(("out", "dq", "dk", "dv"), results[1], results[0]):
        error = errors([mine], [other.double()])[0]
        assert error < 5e-3, f"{name}: {error:.2e}"


@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("longest", [100, 250])
@pytest.mark.parametrize("op", ["jagged_attention", "gdpa"])
def test_hopper_few_keys(op: str, longest: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few keys, backward in one kernel where it is offered, and forward with keys held over several query tiles in one loop: samples
    without keys, without queries, with one and with two key tiles."""
    needs_hopper(128)
    from gem_kernels.triton.hopper import launch

    monkeypatch.setattr(launch, "choose", lambda kernel, facts, info, candidates, run: candidates()[-1])
    q_lengths = torch.cat([torch.tensor([0, 5, 64, 65, 0, 512, 513, 1030]), drawn(40, 0, 300)])
    k_lengths = torch.cat([torch.tensor([5, 0, 64, 99, 0, 99, 65, 100]), drawn(40, 0, longest, seed=1)])
    qo, ko = lengths_to_offsets(q_lengths).to(DEVICE), lengths_to_offsets(k_lengths).to(DEVICE)
    leaves = [
        packed(n, h, 128, torch.bfloat16, s).requires_grad_()
        for s, (n, h) in enumerate([(q_lengths, 4), (k_lengths, kv_heads), (k_lengths, kv_heads)])
    ]  # fmt: skip
    do = packed(q_lengths, 4, 128, torch.bfloat16, 4)
    results = []
    for backend in ("triton-split", "hopper-only"):
        out = public(op, *leaves, qo, ko, backend=backend, max_q_len=1030, max_k_len=longest)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, do)])
    for name, mine, other in zip(("out", "dq", "dk", "dv"), results[1], results[0]):
        error = errors([mine], [other.double()])[0]
        assert error < 4e-3, f"{name}: {error:.2e}"


@pytest.mark.parametrize("rows", [1, 100, 128, 200])
@pytest.mark.parametrize("op", ["jagged_attention", "gdpa"])
def test_hopper_shared_queries(op: str, rows: int) -> None:
    """One Q for all samples, some of which have no keys."""
    needs_hopper(128)
    k_lengths = torch.cat([torch.tensor([0, 1, 64, 129, 0]), drawn(40, 0, 700)])
    ko = lengths_to_offsets(k_lengths).to(DEVICE)
    leaves = [packed(n, 4, 128, torch.bfloat16, s).requires_grad_() for s, n in enumerate([torch.tensor([rows]), k_lengths, k_lengths])]
    do = packed(torch.full_like(k_lengths, rows), 4, 128, torch.bfloat16, 4)
    results = []
    for backend in ("triton", "hopper-only"):
        out = public(op, *leaves, None, ko, backend=backend, broadcast_q=True, max_q_len=rows, max_k_len=700)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, do)])
    for name, mine, other in zip(("out", "dq", "dk", "dv"), results[1], results[0]):
        error = errors([mine], [other.double()])[0]
        assert error < 4e-3, f"{name}: {error:.2e}"


@pytest.mark.parametrize("op", ["jagged_attention", "gdpa"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_neighbours_do_not_leak(backend: str, op: str) -> None:
    """Every other sample full of NaN changes no bit of the others' results and gradients."""
    if backend == "hopper-only":
        needs_hopper(128)
    lengths = drawn(40, 0, 300)
    offsets = lengths_to_offsets(lengths).to(DEVICE)
    odd = torch.repeat_interleave(torch.arange(40) % 2 == 1, lengths).to(DEVICE)
    runs = []
    for poisoned in (False, True):
        leaves = [packed(lengths, 4, 128, torch.bfloat16, s) for s in range(3)]
        do = packed(lengths, 4, 128, torch.bfloat16, 4)
        for x in (*leaves, do):
            x[odd] = torch.nan if poisoned else x[odd]
        leaves = [x.requires_grad_() for x in leaves]
        out = public(op, *leaves, offsets, offsets, backend=backend, max_q_len=300, max_k_len=300)
        runs.append([x[~odd] for x in (out.detach(), *torch.autograd.grad(out, leaves, do))])
    for name, clean, beside in zip(("out", "dq", "dk", "dv"), *runs):
        assert torch.isfinite(beside).all(), f"{name}: NaN of a neighbour"
        assert torch.equal(clean, beside), name


@pytest.mark.parametrize("op", ["jagged_attention", "gdpa"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_more_than_two_to_the_31_elements(backend: str, op: str, room: Callable[[float], None]) -> None:
    """4.5 million rows of 4 x 128: addresses beyond 32 bits. First, middle and last samples are compared."""
    if backend == "hopper-only":
        needs_hopper(128)
    batch, length, heads, d = 4400, 1024, 4, 128
    lengths = torch.full((batch,), length)
    offsets = lengths_to_offsets(lengths).to(DEVICE)
    assert batch * length * heads * d > 2**31
    room(9 * batch * length * heads * d * 2 / 2**30)
    q, k, v, do = (torch.empty(batch * length, heads, d, device=DEVICE, dtype=torch.bfloat16) for _ in range(4))
    for i, x in enumerate((q, k, v, do)):
        x.normal_(generator=torch.Generator(DEVICE).manual_seed(i))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = public(op, *leaves, offsets, offsets, backend=backend, max_q_len=length, max_k_len=length)
    got = [out.detach(), *torch.autograd.grad(out, leaves, do)]
    for b in (0, 2047, 2048, batch - 1):
        rows = slice(b * length, (b + 1) * length)
        want = dense(op, *(x[rows].detach().double() for x in (q, k, v, do)), lambda x: x, False)
        assert max(errors([g[rows] for g in got], want)) < 1e-2, f"sample {b}"


@pytest.mark.parametrize("op", ["jagged_attention", "gdpa"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_hundred_thousand_tiny_samples(backend: str, op: str) -> None:
    """Lengths 0 to 3, against one padded computation in float64."""
    dtype, d, bound = (torch.float32, 32, 1e-5) if backend == "triton" else (torch.bfloat16, 64, 6e-3)
    if backend == "hopper-only":
        needs_hopper(d)
    batch, heads = 100_000, 2
    lengths = drawn(batch, 0, 3)
    offsets = lengths_to_offsets(lengths).to(DEVICE)
    leaves = [packed(lengths, heads, d, dtype, s).requires_grad_() for s in range(3)]
    do = packed(lengths, heads, d, dtype, 5)
    out = public(op, *leaves, offsets, offsets, backend, max_q_len=3, max_k_len=3, causal=True)
    got = [out.detach(), *torch.autograd.grad(out, leaves, do)]
    there = torch.arange(3)[None] < lengths[:, None]
    wide = []
    for x in (*leaves, do):
        p = torch.zeros(batch, 3, heads, d, dtype=torch.float64, device=DEVICE)
        p[there.to(DEVICE)] = x.detach().double()
        wide.append(p.transpose(1, 2).requires_grad_())
    q, k, v, dout = wide
    s = d**-0.5 * (q @ k.transpose(2, 3))
    seen = torch.ones(3, 3, device=DEVICE).tril().bool() & there.to(DEVICE)[:, None, None, :]
    p = torch.softmax(s.masked_fill(~seen, -1e30), 3) * seen if op == "jagged_attention" else act("silu", s) * seen
    o = p @ v
    grads = torch.autograd.grad(o, (q, k, v), dout)
    want = [x.transpose(1, 2)[there.to(DEVICE)].detach() for x in (o, *grads)]
    assert max(errors(got, want)) < bound


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_sample_of_200_000(backend: str) -> None:
    """One very long sample among short ones: rows of the result and of dQ, columns of dK and dV, against float64."""
    if backend == "hopper-only":
        needs_hopper(64)
    long, heads, d = 200_000, 1, 64
    lengths = torch.cat([drawn(300, 1, 50), torch.tensor([long]), drawn(300, 1, 50, seed=2)])
    offsets = lengths_to_offsets(lengths).to(DEVICE)
    leaves = [packed(lengths, heads, d, torch.bfloat16, s).requires_grad_() for s in range(3)]
    do = packed(lengths, heads, d, torch.bfloat16, 7)
    out, lse = ops.jagged_attention(*leaves, offsets, offsets, return_lse=True, backend=backend)
    dq, dk, dv = torch.autograd.grad(out, leaves, do)
    start = int(offsets[300])
    rows = slice(start, start + long)
    q, k, v, g = (x[rows, 0].detach().double() for x in (*leaves, do))
    pick = torch.tensor([0, 1, 777, 100_003, long - 1], device=DEVICE)
    s = d**-0.5 * (q[pick] @ k.T)
    p = torch.softmax(s, 1)
    o = p @ v
    ds = p * (g[pick] @ v.T - (o * g[pick]).sum(1, keepdim=True))
    assert max(errors([out[rows, 0][pick], dq[rows, 0][pick]], [o, d**-0.5 * ds @ k])) < 2e-2
    assert torch.allclose(lse[0, rows][pick].double(), torch.logsumexp(s, 1), atol=1e-3)
    all_delta = (out[rows, 0].detach().double() * g).sum(1)
    p = torch.exp(d**-0.5 * (q @ k[pick].T) - lse[0, rows, None].double())
    ds = p * (g @ v[pick].T - all_delta[:, None])
    assert max(errors([dk[rows, 0][pick], dv[rows, 0][pick]], [d**-0.5 * ds.T @ q, p.T @ g])) < 2e-2


@pytest.mark.parametrize("op", ["jagged_attention", "gdpa"])
def test_bit_equal(op: str) -> None:
    """With deterministic algorithms on, five runs of everything that sums across programs agree bit for bit."""
    lengths = drawn(300, 0, 500)
    offsets = lengths_to_offsets(lengths).to(DEVICE)
    n = int(lengths.sum())
    position, time = torch.randn(4, 257, device=DEVICE, requires_grad=True), torch.randn(4, 16, device=DEVICE, requires_grad=True)
    times = torch.randint(1, 2000, (n,), device=DEVICE).cumsum(0)
    bias = ops.RelativeBias(position, time, torch.logspace(0, 18, 15, base=2).long().to(DEVICE), times, times)
    leaves = [packed(lengths, 4, 64, torch.bfloat16, s).requires_grad_() for s in range(3)]
    do = packed(lengths, 4, 64, torch.bfloat16, 9)
    targets = torch.minimum(lengths, torch.tensor(8)).to(DEVICE)
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(5):
            out = public(op, *leaves, offsets, offsets, causal=True, bias=bias, num_targets=targets, max_q_len=500, max_k_len=500)
            runs.append(torch.autograd.grad(out, (*leaves, position, time), do))
    finally:
        torch.use_deterministic_algorithms(False)
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0]))


def test_broadcast_q_bit_equal_and_right() -> None:
    """dQ of a shared q is the sum over samples, the same in every run."""
    lengths = drawn(700, 0, 300)
    offsets = lengths_to_offsets(lengths).to(DEVICE)
    q = torch.randn(32, 4, 128, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    k, v = (packed(lengths, 4, 128, torch.bfloat16, s).requires_grad_() for s in (1, 2))
    do = torch.randn(700 * 32, 4, 128, device=DEVICE, dtype=torch.bfloat16)
    runs = []
    for backend in ("triton", "triton", "triton-split"):
        out = ops.jagged_attention(q, k, v, None, offsets, broadcast_q=True, max_k_len=300, backend=backend)
        runs.append(torch.autograd.grad(out, (q, k, v), do))
    assert all(torch.equal(a, b) for a, b in zip(runs[0], runs[1]))
    want = torch.zeros(32, 4, 128, device=DEVICE, dtype=torch.float64)
    bounds = offsets.tolist()
    for b in range(700):
        rows, out_rows = slice(bounds[b], bounds[b + 1]), slice(32 * b, 32 * b + 32)
        parts = (x.detach().double() for x in (q, k[rows], v[rows], do[out_rows]))
        want += dense("jagged_attention", *parts, lambda x: x, False)[1]
    for run in (runs[0], runs[2]):
        assert errors([run[0]], [want])[0] < 5e-3


def test_new_lengths_compile_nothing() -> None:
    """Other lengths, another batch size: no kernel is compiled."""
    import triton.knobs

    compiled: list[str] = []
    before = triton.knobs.runtime.jit_post_compile_hook
    leaves_of = lambda lengths: [packed(lengths, 2, 64, torch.bfloat16, s).requires_grad_() for s in range(3)]  # noqa: E731

    def once(batch: int, high: int, seed: int) -> None:
        lengths = drawn(batch, 1, high, seed)
        offsets = lengths_to_offsets(lengths).to(DEVICE)
        out = public("gdpa", *leaves_of(lengths), offsets, offsets, causal=True, max_q_len=512, max_k_len=512)
        out.sum().backward()

    once(33, 500, 0)
    triton.knobs.runtime.jit_post_compile_hook = lambda **kw: compiled.append(str(kw.get("repr")))
    try:
        once(32, 511, 1)
        once(1, 16, 2)
        once(1000, 3, 3)
    finally:
        triton.knobs.runtime.jit_post_compile_hook = before
    assert not compiled, compiled


@pytest.mark.parametrize("op", ["jagged_attention", "gdpa"])
def test_memory(op: str) -> None:
    """Forward allocates the result and lse, backward the gradients and delta, beside tile lists of 16 bytes a tile."""
    lengths = torch.full((256,), 1000)
    offsets = lengths_to_offsets(lengths).to(DEVICE)
    leaves = [packed(lengths, 4, 128, torch.bfloat16, s).requires_grad_() for s in range(3)]
    do = torch.randn_like(leaves[0])
    size = leaves[0].numel() * 2
    rows = 4 * leaves[0].shape[0] * 4
    spare = 4 << 20

    def peak(run: Callable[[], object]) -> tuple[int, object]:
        run()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before, result

    used, out = peak(lambda: public(op, *leaves, offsets, offsets, max_q_len=1000, max_k_len=1000))
    assert used <= size + (rows if op == "jagged_attention" else 0) + spare
    used, _ = peak(lambda: torch.autograd.grad(out, leaves, do, retain_graph=True))
    assert used <= 3 * size + (rows if op == "jagged_attention" else 0) + spare
