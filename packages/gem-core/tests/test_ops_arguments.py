"""What the ops refuse, and in which words."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gem_core import ops
from gem_core.errors import OpError
from gem_core.ops import remember

O = torch.tensor([0, 2, 5])
Q, K = torch.zeros(5, 4, 8), torch.zeros(5, 2, 8)
BIAS = ops.RelativeBias(torch.zeros(4, 5))
TIMES = {"q_times": torch.zeros(5, dtype=torch.int64), "k_times": torch.zeros(5, dtype=torch.int64)}


def timed(**changes: Any) -> ops.RelativeBias:
    return ops.RelativeBias(torch.zeros(4, 5), **(TIMED | changes))


TIMED = {"time": torch.zeros(4, 3), "time_edges": torch.tensor([1, 2]), **TIMES}


def attend(**changes: Any) -> Callable[[], Any]:
    given: dict[str, Any] = {"q": Q, "k": K, "v": K, "q_offsets": O}
    return lambda: ops.jagged_attention(**(given | changes))


def point(**changes: Any) -> Callable[[], Any]:
    given: dict[str, Any] = {"q": Q, "k": K, "v": K, "q_offsets": O}
    return lambda: ops.gdpa(**(given | changes))


def block(**changes: Any) -> Callable[[], Any]:
    given: dict[str, Any] = {"q": Q, "k": K, "v": K, "offsets": O}
    return lambda: ops.block_attention(**(given | changes))


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


ANGLES = torch.zeros(3, 4)
CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "shape": (attend(q=Q[0]), r"q must have shape \[Nq, H, D\], got \(4, 8\)"),
    "not a tensor": (attend(q=[1.0]), "q must be a tensor"),
    "head widths": (attend(k=torch.zeros(5, 2, 6)), "q has head width 8, k has 6"),
    "rows of v": (attend(v=K[:4]), "k has 5 rows, v has 4"),
    "heads of v": (attend(v=Q), "k has 2 heads, v has 4"),
    "group": (attend(k=torch.zeros(5, 3, 8), v=torch.zeros(5, 3, 8)), "q has 4 heads, k has 3"),
    "mixed dtypes": (attend(k=K.double(), v=K.double()), "k has dtype torch.float64, q has torch.float32"),
    "integers": (attend(q=Q.int(), k=K.int(), v=K.int()), "q has dtype torch.int32"),
    "no offsets": (attend(q_offsets=None), "q_offsets is missing"),
    "offsets of floats": (attend(q_offsets=O.float()), "q_offsets has dtype torch.float32"),
    "empty offsets": (attend(q_offsets=O[:0]), "q_offsets is empty"),
    "offsets from 1": (attend(q_offsets=ints(1, 2, 5)), "q_offsets begins with 1"),
    "offsets decrease": (attend(q_offsets=ints(0, 4, 2)), "q_offsets decreases at sample 1"),
    "offsets too far": (attend(k_offsets=ints(0, 2, 6)), "k_offsets ends with 6, but there are 5 rows"),
    "sample counts": (attend(k_offsets=ints(0, 5)), "q_offsets describes 2 samples, k_offsets 1"),
    "bound": (attend(max_q_len=2), "sample 1 has 3 rows, more than max_q_len = 2"),
    "key bound": (attend(max_k_len=2), "more than max_k_len = 2"),
    "negative bound": (attend(max_k_len=-3), "max_k_len is -3"),
    "window": (attend(window=(-2, 3)), r"window is \(-2, 3\)"),
    "candidates": (attend(num_targets=ints(1, 4)), "num_targets of sample 1 is not within its rows"),
    "negative candidates": (attend(num_targets=ints(-1, 0)), "num_targets of sample 0"),
    "candidates shape": (attend(num_targets=ints(1)), "num_targets has 1 values for 2 samples"),
    "context": (attend(context_len=ints(1, -1)), "context_len holds -1"),
    "sharing range": (attend(k_offsets=O, kv_index=ints(0, 2)), "kv_index holds 0 to 2, there are 2 requests"),
    "sharing count": (attend(k_offsets=O, kv_index=ints(0)), "q_offsets describes 2 samples, kv_index 1"),
    "sharing, candidates": (attend(k_offsets=O, kv_index=ints(0, 1), num_targets=ints(1, 0)), "kv_index with num_targets needs target_kv"),
    "own keys alone": (attend(target_kv=(K, K)), "target_kv needs kv_index and num_targets"),
    "own keys shape": (
        attend(k_offsets=O, kv_index=ints(0, 1), num_targets=ints(1, 0), target_kv=(K[:3], K)), r"target_kv\[0\] has shape \(3, 2, 8\)",
    ),
    "shared q": (attend(broadcast_q=True, q_offsets=None, k_offsets=O, causal=True), "broadcast_q cannot be combined with causal"),
    "shared q, offsets": (attend(broadcast_q=True, k_offsets=O), "broadcast_q cannot be combined with q_offsets"),
    "shared q, bias": (attend(broadcast_q=True, q_offsets=None, k_offsets=O, bias=BIAS), "broadcast_q cannot be combined with bias"),
    "shared q, keys": (attend(broadcast_q=True, q_offsets=None), "k_offsets is missing"),
    "bias heads": (attend(bias=ops.RelativeBias(torch.zeros(2, 5))), "bias.position has 2 rows for 4 heads"),
    "bias width": (attend(bias=ops.RelativeBias(torch.zeros(4, 4))), "bias.position has 4 columns"),
    "bias device": (attend(bias=ops.RelativeBias(torch.zeros(4, 5, device="meta"))), "bias.position is on meta, q on cpu"),
    "edges without table": (attend(bias=ops.RelativeBias(torch.zeros(4, 5), **TIMES)), "bias.q_times is given without bias.time"),
    "edge count": (attend(bias=timed(time_edges=ints(1))), "bias.time_edges has 1 values, not 2"),
    "time type": (
        attend(bias=timed(q_times=torch.zeros(5))), "bias.q_times has dtype torch.float32",
    ),
    "time missing": (attend(bias=timed(k_times=None)), "bias.k_times must be a tensor"),
    "edges unsorted": (attend(bias=timed(time_edges=ints(2, 1))), "bias.time_edges decreases"),
    "activation": (point(activation="gleu"), "there is no activation 'gleu'"),
    "act(0)": (point(activation="sigmoid"), r"activation 'sigmoid' has act\(0\) = 0.5"),
    "softmax": (point(activation="softmax"), "act"),
    "activation count": (point(activation=("gelu", "silu")), "2 activations were given for 4 heads"),
    "activation object": (point(activation=torch.relu), "chosen by name"),
    "block size": (block(block_size=0), "block_size is 0"),
    "block rows": (block(k=K[:4], v=K[:4]), "q has 5 rows, k and v have 4"),
    "rotary rows alone": (block(rotary_rows=ints(0, 1, 2, 0, 1)), "rotary_rows is given without rotary"),
    "rotary odd": (block(q=Q[:, :, :7], k=K[:, :, :7], v=K[:, :, :7], rotary=(ANGLES, ANGLES)), "rotary needs even D = Dv, got 7 and 7"),
    "rotary width": (block(rotary=(ANGLES[:, :3], ANGLES)), "rotary cos has 3 columns, not D/2 = 4"),
    "rotary short": (block(rotary=(ANGLES[:2], ANGLES[:2])), "sample 1 has 3 rows, more than the rows of the rotary tables = 2"),
    "rotary row range": (block(rotary=(ANGLES, ANGLES), rotary_rows=ints(0, 1, 2, 3, 0)), r"rotary_rows holds a value outside \[0, 3\)"),
    "norm kind": (lambda: ops.norm(torch.zeros(2, 3), kind="batch"), "there is no norm called 'batch'"),
    "norm width": (lambda: ops.norm(torch.zeros(2, 3), weight=torch.zeros(2)), "weight has 2 values, not 3"),
    "residual": (lambda: ops.norm(torch.zeros(2, 3), residual=torch.zeros(3, 3)), r"residual has shape \(3, 3\), x \(2, 3\)"),
    "weight": (lambda: ops.norm_linear(torch.zeros(2, 3), torch.zeros(3, 4)), "w has 4 columns, its input 3"),
    "weight dtype": (lambda: ops.linear_norm(torch.zeros(2, 3), torch.zeros(4, 3).double()), "w has dtype torch.float64"),
    "hidden": (lambda: ops.mlp(torch.zeros(2, 3), torch.zeros(5, 3), None, torch.zeros(2, 4), None), "w2 has 4 columns, its input 5"),
    "mlp norm": (lambda: ops.mlp(torch.zeros(2, 3), torch.zeros(5, 3), None, torch.zeros(2, 5), None, norm="l2"), "no norm called 'l2'"),
    "norm_gdpa heads": (lambda: ops.norm_gdpa(Q, K, K, O), r"k has heads \(2, 8\), q \(4, 8\)"),
    "norm_gdpa bound": (lambda: ops.norm_gdpa(Q, Q, Q, O, max_k_len=2), "sample 1 has 3 rows, more than max_k_len = 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_refused(name: str) -> None:
    call, message = CASES[name]
    with pytest.raises(OpError, match=message) as refusal:
        call()
    assert refusal.value.where, "the message must say which argument"


def test_values_are_looked_at_once_for_the_same_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    from gem_core.ops import checks

    looks = []
    monkeypatch.setattr(checks.Values, "expect", lambda self, ok, say: looks.append(1))
    offsets = O.clone()
    ops.gdpa(Q, K, K, offsets)
    first = len(looks)
    ops.gdpa(Q, K, K, offsets)
    assert len(looks) == first
    offsets += 0
    ops.gdpa(Q, K, K, offsets)
    assert len(looks) == 2 * first


def test_an_overwritten_offset_is_noticed() -> None:
    offsets = O.clone()
    ops.gdpa(Q, K, K, offsets, max_q_len=3)
    offsets[1] = 1
    with pytest.raises(OpError, match="sample 1 has 4 rows"):
        ops.gdpa(Q, K, K, offsets, max_q_len=3)


def test_rows_of_unknown_rotation_are_fine_past_the_end() -> None:
    rows = ints(0, 1, 2, 77, -5)
    out = ops.block_attention(Q, K, K, ints(0, 3), rotary=(ANGLES, ANGLES), rotary_rows=rows)
    assert out.isfinite().all()


def test_tensors_stay_free_of_what_is_remembered_of_them() -> None:
    offsets = O.clone()
    ops.gdpa(Q, K, K, offsets, causal=True)
    assert not offsets.__dict__
    assert torch.equal(pickle.loads(pickle.dumps(offsets)), offsets)
    alive = weakref.ref(offsets)
    del offsets
    gc.collect()
    assert alive() is None


def test_a_recorded_graph_builds_once_what_belongs_to_it(monkeypatch) -> None:
    """What was remembered before would be of the values that its inputs had then, and must not be known after it either."""
    built, stream = [], [None]
    monkeypatch.setattr(remember, "_stream_of_graph", lambda t: stream[0])

    def ask(t: torch.Tensor) -> int:
        return remember.remembered([t], "key", lambda: built.append(0) or len(built))

    offsets = O.clone()
    assert [ask(offsets), ask(offsets)] == [1, 1]
    stream[0] = 7
    assert [ask(offsets), ask(offsets)] == [2, 3]  # recorded by someone who tells nobody
    with remember.recording():
        assert [ask(offsets), ask(offsets)] == [4, 4]
        stream[0] = 8
        assert ask(offsets) == 5
        stream[0] = 7
        assert ask(offsets) == 4
        offsets.add_(0)
        assert [ask(offsets), ask(offsets)] == [6, 6]
        with remember.recording():
            assert ask(offsets) == 7
        assert ask(offsets) == 6
    with remember.recording():
        assert ask(offsets) == 8
    stream[0] = None
    assert [ask(offsets), ask(offsets)] == [9, 9]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_replayed_graph_reads_its_offsets_anew() -> None:
    """Plans are shared by the ops of one graph and still follow the lengths that a replay finds."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(300, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    offsets = torch.tensor([0, 100, 140, 300], device="cuda")
    side = torch.cuda.Stream()

    def run() -> torch.Tensor:
        first = ops.jagged_attention(q, k, v, offsets, max_q_len=300)
        return ops.jagged_attention(first, k, v, offsets, max_q_len=300)

    with torch.cuda.stream(side):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with remember.recording(), torch.cuda.graph(graph, stream=side):
        out = run()
    for bounds in ([0, 100, 140, 300], [0, 5, 290, 300], [0, 0, 1, 250]):
        offsets.copy_(torch.tensor(bounds))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, run()), bounds
