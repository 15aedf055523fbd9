"""torch.compile without graph breaks, dynamic lengths without recompilation, and FLOP counts from true lengths."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from gem_core import ops
from gem_core.jagged import lengths_to_offsets

_spec = importlib.util.spec_from_file_location("dense_oracle", Path(__file__).with_name("dense_oracle.py"))
assert _spec is not None
assert _spec.loader is not None
oracle = importlib.util.module_from_spec(_spec)
sys.modules["dense_oracle"] = oracle
_spec.loader.exec_module(oracle)


def offsets(lengths: list[int]) -> Tensor:
    return lengths_to_offsets(torch.tensor(lengths, dtype=torch.int64))


class Layer(torch.nn.Module):
    """A sequence layer that uses every op."""

    def __init__(self, d: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.up, self.down = torch.nn.Linear(d, 3 * d), torch.nn.Linear(d, 16), torch.nn.Linear(16, d)
        self.table = torch.nn.Parameter(torch.randn(heads, 5))
        self.seeds = torch.nn.Parameter(torch.randn(2, heads, d // heads))

    def forward(self, x: Tensor, o: Tensor, longest: int) -> Tensor:
        n, d = x.shape
        x = ops.norm_linear(x, self.qkv.weight, self.qkv.bias)
        q, k, v = x.view(n, 3, self.heads, -1).unbind(1)
        bias = ops.RelativeBias(self.table)
        kw: dict[str, Any] = {"max_q_len": longest, "max_k_len": longest}
        a = ops.jagged_attention(q, k, v, o, causal=True, bias=bias, **kw) + ops.gdpa(
            q, k, v, o, activation=("gelu", "silu"), window=(3, 1), **kw
        )
        a = a + ops.block_attention(q, k, v, o, block_size=4) + ops.norm_gdpa(q, k, v, o, **kw)
        y, total = ops.mlp(
            a.reshape(n, d), self.up.weight, self.up.bias, self.down.weight, self.down.bias, norm="rms", residual=a.reshape(n, d)
        )
        y = ops.linear_norm(y, self.up.weight[:8], kind="layer")
        y, total = ops.norm(y, residual=total)
        joined, jo = ops.jagged_concat([(y, o), (total, o)])
        pooled = ops.jagged_attention(self.seeds, k, v, None, o, broadcast_q=True).view(o.shape[0] - 1, -1)
        back = ops.padded_to_jagged(ops.jagged_to_padded(y, o, longest), o, rows=n)
        return torch.cat([ops.jagged_mean(joined, jo), ops.jagged_sum(back, o), pooled], 1)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_layer_of_all_ops_compiles_without_graph_breaks_or_recompilation() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    layer = Layer()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for lengths in ([3, 0, 7], [5, 2, 0, 9], [1, 4], [12, 3, 3]):
        x = torch.randn(sum(lengths), 8)
        expected, found = layer(x, offsets(lengths), max(lengths)), compiled(x, offsets(lengths), max(lengths))
        torch.testing.assert_close(found, expected)
        grads = [torch.autograd.grad(out.square().sum(), list(layer.parameters())) for out in (expected, found)]
        for a, b in zip(*grads):
            torch.testing.assert_close(b, a)
    assert counter.frame_count <= 2, "static shapes, then dynamic ones, and no more"


def counted(run: Any) -> dict[str, int]:
    with FlopCounterMode(display=False) as counter:
        run()
    return {str(op).removeprefix("gem."): n for op, n in counter.get_flop_counts()["Global"].items() if str(op).startswith("gem.")}


FLOPS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "causal window": {"causal": True, "window": (2, 9)},
    "window": {"window": (1, 3)},
    "one side": {"window": (-1, 0)},
    "context": {"context": [2, 0, 9, 1], "causal": True},
    "candidates": {"targets": [1, 0, 3, 2], "causal": True},
    "candidates context window": {"targets": [1, 0, 3, 2], "context": [2, 0, 1, 4], "window": 2},
    "sharing": {"index": [0, 1, 0, 2]},
    "sharing candidates": {"index": [0, 1, 0, 2], "targets": [2, 0, 3, 2], "causal": True, "window": (2, 0)},
    "broadcast": {"broadcast": 3},
}
Q_LENGTHS, K_LENGTHS = [4, 0, 7, 3], [3, 5, 9, 2]


@pytest.mark.parametrize("name", FLOPS)
def test_attention_flops_count_attended_pairs(name: str) -> None:
    kw = FLOPS[name]
    index, targets, context, shared = kw.get("index"), kw.get("targets"), kw.get("context"), kw.get("broadcast", 0)
    keys = K_LENGTHS[:3] if index else K_LENGTHS
    nq = shared or sum(Q_LENGTHS)
    q, k, v = torch.randn(nq, 4, 6, requires_grad=True), torch.randn(sum(keys), 2, 6), torch.randn(sum(keys), 2, 10)
    options: dict[str, Any] = {"causal": kw.get("causal", False), "window": kw.get("window"), "broadcast_q": bool(shared)}
    own = None
    if index:
        options["kv_index"] = torch.tensor(index)
    if targets:
        options["num_targets"] = torch.tensor(targets)
        if index:
            own = torch.randn(nq, 2, 6), torch.randn(nq, 2, 10)
            options["target_kv"] = own
    if context:
        options["context_len"] = torch.tensor(context)
    masks = targets, own, context, options["causal"], options["window"]
    pairs = len(oracle.Dense(q, k, v, Q_LENGTHS, keys, index, *masks, broadcast=bool(shared)).pairs())
    both = None if shared else offsets(Q_LENGTHS), offsets(keys)
    found = counted(lambda: ops.jagged_attention(q, k, v, *both, **options).sum().backward())
    assert found == {"jagged_attention": 2 * 4 * pairs * (6 + 10), "jagged_attention_backward": 2 * 4 * pairs * (3 * 6 + 2 * 10)}
    assert counted(lambda: ops.gdpa(q, k, v, *both, **options)) == {"gdpa": 8 * pairs * 16}


def test_other_flops() -> None:
    q = torch.randn(14, 2, 4, requires_grad=True)
    pairs = sum(min(i // 4 * 4 + 4, n) - i // 4 * 4 for n in Q_LENGTHS for i in range(n))
    assert counted(lambda: ops.block_attention(q, q, q, offsets(Q_LENGTHS), block_size=4)) == {"block_attention": 2 * 2 * pairs * 8}
    pairs = sum(n * n for n in Q_LENGTHS)
    found = counted(lambda: ops.norm_gdpa(q, q, q, offsets(Q_LENGTHS)).sum().backward())
    assert found == {"norm_gdpa": 2 * 2 * pairs * 8, "norm_gdpa_backward": 2 * 2 * pairs * 20}
    x, w, w1, w2 = (torch.randn(*s, requires_grad=True) for s in ((5, 6), (7, 6), (9, 6), (4, 9)))
    assert counted(lambda: ops.norm_linear(x, w).sum().backward()) == {"norm_linear": 420, "norm_linear_backward": 840}
    assert counted(lambda: ops.linear_norm(x.detach(), w).sum().backward()) == {"linear_norm": 420, "linear_norm_backward": 420}
    forward = 2 * 5 * (9 * 6 + 4 * 9)
    assert counted(lambda: ops.mlp(x, w1, None, w2, None).sum().backward()) == {"mlp": forward, "mlp_backward": 2 * forward}
    only_w2 = counted(lambda: ops.mlp(x.detach(), w1.detach(), None, w2, None).sum().backward())
    assert only_w2["mlp_backward"] == 2 * 5 * 4 * 9
    assert counted(lambda: ops.norm(x)) == {"norm": 0}


def test_slack_rows_are_not_counted() -> None:
    q = torch.randn(30, 2, 4)
    assert counted(lambda: ops.jagged_attention(q, q, q, offsets([3, 4]), max_q_len=20)) == {"jagged_attention": 2 * 2 * 25 * 8}


def test_without_values_every_sample_counts_with_its_bound() -> None:
    with FakeTensorMode():
        q, o = torch.empty(50, 2, 4), torch.empty(6, dtype=torch.int64)
        found = counted(lambda: ops.jagged_attention(q, q, q, o, max_q_len=16, max_k_len=8))
    assert found == {"jagged_attention": 2 * 2 * 5 * 16 * 8 * 8}


def test_pairs_of_long_samples() -> None:
    lengths = torch.tensor([70_000, 0, 3])
    assert ops.attended_pairs(lengths, lengths, causal=True).tolist() == [70_000 * 70_001 // 2, 0, 6]
    assert ops.block_pairs(lengths, 64).tolist() == [1093 * 4096 + 48 * 48, 0, 9]


CHECK = """
import sys
from gem_core import ops
heavy = {"triton", "torchrec", "torch._dynamo", "torch._inductor", "pydantic", "typer", "torch.utils.flop_counter"} & set(sys.modules)
assert not heavy, heavy
import torch
import torch._dynamo.testing
assert not torch.cuda.is_initialized()
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    ops.norm_linear(torch.ones(2, 3), torch.ones(4, 3))
assert counter.get_total_flops() == 48, counter.get_total_flops()
"""


def test_importing_the_ops_is_light_and_the_counter_knows_them_all_the_same() -> None:
    subprocess.run([sys.executable, "-c", CHECK], check=True)


def test_cached_graphs_are_keyed_by_the_schemas_of_the_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.compiler import config

    from gem_core.ops import library

    with config.patch(cache_key_tag="mine"):
        library.tag_compiled_graphs()
        tagged = config.cache_key_tag
        library.tag_compiled_graphs()
        assert config.cache_key_tag == tagged
        assert tagged.startswith("mine gem ")
    monkeypatch.setattr(library, "_schemas", [*library._schemas, "another(Tensor x) -> Tensor"])
    with config.patch(cache_key_tag="mine"):
        library.tag_compiled_graphs()
        assert config.cache_key_tag not in ("mine", tagged)
