"""How eager attention cuts a call into batches: nothing lost, nothing twice, memory bounded, plans kept, and faster than the reference."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_core import ops
from gem_core.jagged import lengths_to_offsets
from gem_core.ops import masks
from gem_kernels.eager import bench, engine, runs
from gem_kernels.eager import plan as planning
from gem_kernels.eager.plan import Masking, Plan, Samples, Shape, make_plan

LENGTH = st.sampled_from([0, 1, 7, 8, 63, 64, 65, 200])


def plan_of(lq: list[int], lk: list[int], masking: Masking, heads: int = 2, device: str = "cpu", **more: Any) -> Plan:
    q, k = np.array(lq, dtype=np.int64), np.array(lk, dtype=np.int64)
    q_start, k_start = q.cumsum() - q, k.cumsum() - k
    samples = Samples(q_start, q_start, k_start, q, k, **{n: np.array(v, dtype=np.int64) for n, v in more.items()})
    return make_plan(
        samples, Shape(heads, heads), masking, out_rows=sum(lq), key_rows=sum(lk), shared_keys=False, shared_q=False,
        device=torch.device(device),
    )  # fmt: skip


def seen_pairs(plan: Plan, heads: int) -> dict[tuple[int, int], int]:
    """(row of q, row of k) -> how many places of head 0 see it, valid query places only."""
    found: dict[tuple[int, int], int] = {}
    for group in plan.groups:
        mask, _ = group.mask()
        visible = torch.ones(group.n, 1, group.rows, group.keys, dtype=torch.bool)
        if mask is not None:
            visible = visible & mask
        if group.row_valid is not None:
            visible = visible & group.row_valid
        rows = group.q_index.view(group.n, heads, group.rows)[:, 0] // heads
        keys = group.k_index.view(group.n, heads, group.keys)[:, 0] // heads
        for n, _, i, j in visible.nonzero().tolist():
            pair = int(rows[n, i]), int(keys[n, j])
            found[pair] = found.get(pair, 0) + 1
    return found


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.data())
def test_every_visible_pair_once(data: Any) -> None:
    lq = data.draw(st.lists(LENGTH, min_size=1, max_size=4))
    lk = data.draw(st.one_of(st.just(lq), st.lists(LENGTH, min_size=len(lq), max_size=len(lq))))
    masking = Masking(data.draw(st.booleans()), data.draw(st.sampled_from([None, (3, 2), (70, -1), (-1, 5)])))
    targets = [data.draw(st.integers(0, min(a, b, 9))) for a, b in zip(lq, lk)]
    context = [data.draw(st.sampled_from([0, 2, 66])) for _ in lq]
    found = seen_pairs(plan_of(lq, lk, masking, targets=targets, context=context), 2)
    expected: dict[tuple[int, int], int] = {}
    q_start = k_start = 0
    for a, b, t, c in zip(lq, lk, targets, context):
        for i, j in masks.visible(a, b, t=t, c=c, causal=masking.causal, window=masking.window).nonzero().tolist():
            expected[q_start + i, k_start + j] = 1
        q_start, k_start = q_start + a, k_start + b
    assert found == expected


def test_batches_are_bounded_even_for_one_long_sample() -> None:
    for masking in (Masking(), Masking(True), Masking(True, (100, 0))):
        plan = plan_of([30_000], [30_000], masking, heads=4)
        assert max(g.n * g.rows * g.keys * 4 for g in plan.groups) <= max(planning.BATCH_ELEMENTS, 16 * 4 * 30_000)
    assert sum(g.n * g.rows * g.keys for g in plan.groups) < 30_000 * 200, "a window needs no more keys than it shows"


def test_batches_of_a_device_are_larger_and_bounded() -> None:
    """Samples padded to one length, as a batch has them, are a few products there, not a hundred each."""
    plan = plan_of([4096] * 8, [4096] * 8, Masking(), heads=4, device="meta")
    assert [(g.n, g.rows, g.keys) for g in plan.groups] == [(4, 4096, 4096)] * 2
    assert len(plan_of([4096], [4096], Masking(), heads=4).groups) == 256
    lengths = bench.lengths(512, 50.0).tolist()
    assert len(plan_of(lengths, lengths, Masking(), heads=4, device="meta").groups) < 5


def test_padding_is_modest() -> None:
    lengths = bench.lengths(512, 50.0).tolist()
    plan = plan_of(lengths, lengths, Masking(), heads=4)
    work = sum(g.n * g.rows * g.keys for g in plan.groups)
    assert work <= 1.2 * sum(n * n for n in lengths)
    assert len(plan.groups) < 120


def test_a_plan_serves_every_layer_and_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    before = planning.make_plan
    monkeypatch.setattr("gem_kernels.eager.attention.make_plan", lambda *a, **kw: made.append(1) or before(*a, **kw))
    q, offsets = torch.randn(9, 2, 8, requires_grad=True), lengths_to_offsets(torch.tensor([4, 5]))
    for _ in range(3):
        ops.jagged_attention(q, q, q, offsets, causal=True, backend="eager").sum().backward()
        ops.gdpa(q, q, q, offsets, causal=True, backend="eager")
    assert len(made) == 1
    offsets[1] = 2
    out = ops.gdpa(q, q, q, offsets, causal=True, backend="eager")
    assert len(made) == 2, "offsets that were written to need a new plan"
    torch.testing.assert_close(out, ops.gdpa(q, q, q, offsets, causal=True, backend="reference"))


def test_inference_mode() -> None:
    with torch.inference_mode():
        q, offsets = torch.randn(9, 2, 8), lengths_to_offsets(torch.tensor([4, 5]))
        torch.testing.assert_close(ops.gdpa(q, q, q, offsets, backend="eager"), ops.gdpa(q, q, q, offsets, backend="reference"))


@pytest.mark.parametrize("name", ["softmax causal", "gdpa gelu, 16 keys"])
def test_faster_than_the_reference(name: str) -> None:
    args = bench.parser().parse_args(["--batch", "128", "--mean", "30"])
    ours, _, leaves = bench.cases(args)[name]
    times = bench.measure({b: ours(b) for b in ("eager", "reference")}, leaves, 3, time.process_time)
    assert sum(times["eager"]) < sum(times["reference"]), times


def test_bench_refuses_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    right = engine.forward
    monkeypatch.setattr(engine, "forward", lambda *a, **kw: (right(*a, **kw)[0] * 1.01, right(*a, **kw)[1]))
    with pytest.raises(AssertionError, match="block 64"):
        bench.main(["--batch", "8", "--mean", "10", "--rows", "block 64", "--repeats", "1"])


def test_bench_writes_what_it_measured(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    bench.main(["--batch", "8", "--mean", "10", "--rows", "pooling", "--repeats", "1", "--json", str(tmp_path / "b.json")])
    assert "pooling by 8 seeds" in capsys.readouterr().out
    assert '"eager"' in (tmp_path / "b.json").read_text()


# --- runs of equal lengths ------------------------------------------------------------------------------------------------------------


def sorted_lengths(draw: str) -> torch.Tensor:
    rng = np.random.default_rng(len(draw))
    law = {"none empty": rng.integers(1, 9, 300), "some empty": rng.integers(0, 5, 300), "long tail": rng.lognormal(2.5, 1, 400)}[draw]
    return torch.from_numpy(np.sort(law).astype(np.int64))


@pytest.mark.parametrize("draw", ["none empty", "some empty", "long tail"])
@pytest.mark.parametrize("kind", ["full", "causal", "candidate", "seeds", "queries", "gdpa", "slack"])
def test_runs_of_equal_lengths_give_what_the_groups_give(draw: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples sorted by length: output, log-sum-exp and gradients against the padded groups; the runs are really used."""
    torch.manual_seed(0)
    lengths = sorted_lengths(draw)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    n, b = int(offsets[-1]), len(lengths)
    k, v = (torch.randn(n + 5 * (kind == "slack"), 2, 16, requires_grad=True) for _ in range(2))
    uniform = torch.arange(b + 1) * 3
    options: dict[str, Any] = {}
    q_offsets: torch.Tensor | None = offsets
    q, k_offsets = torch.randn(k.shape, requires_grad=True), offsets
    if kind == "seeds":
        q, q_offsets, options = torch.randn(3, 2, 16, requires_grad=True), None, {"broadcast_q": True}
    elif kind == "queries":
        q, q_offsets = torch.randn(3 * b, 2, 16, requires_grad=True), uniform
    elif kind == "gdpa":
        q_offsets, k_offsets = offsets, uniform
        k, v = (torch.randn(3 * b, 2, 16, requires_grad=True) for _ in range(2))
    elif kind == "candidate":
        options = {"causal": True, "num_targets": (lengths > 0).int()}
    else:
        options = {"causal": kind == "causal"}
    used: list[int] = []
    run = runs.forward

    def counted(*args: Any, **named: Any) -> Any:
        used.append(len(args[0]))
        return run(*args, **named)

    monkeypatch.setattr(runs, "forward", counted)
    found = []
    for by_runs in (True, False):
        if not by_runs:
            monkeypatch.setattr(runs, "usable", lambda *_: False)
        copies = [torch.empty_like(t).copy_(t) for t in (k_offsets, *([] if q_offsets is None else [q_offsets]))]
        own_k, own_q = copies[0], copies[1] if q_offsets is not None else None
        if q_offsets is k_offsets:
            own_q = own_k
        if kind == "gdpa":
            out = ops.gdpa(q, k, v, own_q, own_k, backend="eager")
            results = (out,)
        else:
            results = ops.jagged_attention(q, k, v, own_q, own_k, return_lse=True, backend="eager", **options)
        weight = torch.cos(torch.arange(results[0].numel(), dtype=torch.float32)).view_as(results[0])
        gradients = torch.autograd.grad((results[0] * weight).sum(), (q, k, v))
        found.append([t.detach() for t in (*results, *gradients)])
    assert used, "the runs were used"
    for a, c in zip(*found):
        assert torch.equal(a.isinf(), c.isinf()), "rows that see nothing"
        a, c = a.masked_fill(a.isinf(), 0), c.masked_fill(c.isinf(), 0)
        assert float((a - c).norm()) <= 2e-6 * float(c.norm())
        assert float((a - c).abs().max()) <= 1e-5 * float(c.abs().max())


def test_runs_are_refused_where_lengths_jump_about() -> None:
    lengths = np.arange(300) % 7
    starts = np.cumsum(lengths) - lengths
    jumping = Samples(starts, starts, starts, lengths, lengths)
    assert runs.find(jumping, Masking(), shared_q=False, softmax=True) is None
    ordered = np.sort(lengths)
    starts = np.cumsum(ordered) - ordered
    found = runs.find(Samples(starts, starts, starts, ordered, ordered), Masking(causal=True), shared_q=False, softmax=True)
    assert found is not None
    assert [(r.n, r.lq) for r in found] == [(int((lengths == n).sum()), n) for n in range(7)]
    assert runs.find(Samples(starts, starts, starts, ordered, ordered), Masking(causal=True), shared_q=False, softmax=False) is None
    assert runs.find(Samples(starts, starts, starts, ordered, ordered), Masking(window=(2, 0)), shared_q=False, softmax=True) is None
