"""Quantised all-gather: what arrives is what quantising the whole parameter would give, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gem_core.errors import PluginError
from gem_core.hookspecs import CodecSpec
from gem_core.testing.strategies import run_processes, train_rank
from gem_parallel.dense.gathered import quantise_gathers

BLOCK = 8
ENCODED = []
"""Elements of every shard that was encoded in this process."""


def encode(shard):
    """8 bits and one scale a block of 8: a codec of this test's own."""
    ENCODED.append(shard.numel())
    blocks = shard.reshape(-1, BLOCK)
    scales = blocks.abs().amax(1).clamp(min=1e-12) / 127
    return (blocks / scales.unsqueeze(1)).round().to(torch.int8).view(torch.uint8).reshape(-1), scales


def decode(payload, scales, dtype):
    return (payload.view(torch.int8).reshape(-1, BLOCK).float() * scales.reshape(-1, 1)).to(dtype).reshape(-1)


CODEC = CodecSpec("test8", BLOCK, encode, decode)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.odd = nn.Linear(8, 12), nn.Linear(12, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.odd(torch.relu(self.b(torch.relu(self.a(x)))))


def seen_by_forward(rank, world, _):
    torch.manual_seed(0)
    net = Net()
    masters = {name: p.detach().clone() for name, p in net.named_parameters()}
    taken, left = quantise_gathers(net, CODEC, world)
    fully_shard(net, mesh=init_device_mesh("cpu", (world,)), reshard_after_forward=True)
    seen = []
    for part in net.children():
        part.register_forward_pre_hook(lambda module, _: seen.append((module.weight.detach().clone(), module.bias.detach().clone())))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    found = []
    for step in range(2):
        seen.clear()
        net(torch.ones(2, 8) * (step + 1)).square().sum().backward()
        found.append([t for pair in seen for t in pair])
        whole = {n: p.grad.full_tensor() for n, p in net.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        after = {n: p.full_tensor().detach().clone() for n, p in net.named_parameters()}
        plain = all(type(t) is torch.Tensor for t in found[-1])
        found[-1] = {"seen": found[-1], "grads": whole, "after": after, "plain": plain}
    return {"taken": taken, "left": left, "masters": masters, "steps": found, "encoded": list(ENCODED)}


def test_forward_sees_the_quantised_whole_and_masters_stay_exact(tmp_path):
    for result in run_processes(2, seen_by_forward, None, tmp_path):
        assert result["taken"] == ["a.weight", "b.weight"]
        assert result["left"] == ["odd.weight"]
        assert set(result["encoded"]) == {8 * 12 // 2, 12 * 4 // 2}, "each process encodes its shard only"
        weights = result["masters"]
        for step in result["steps"]:
            names = ["a.weight", "a.bias", "b.weight", "b.bias", "odd.weight", "odd.bias"]
            for name, seen in zip(names, step["seen"], strict=True):
                want = decode(*encode(weights[name]), torch.float32).view_as(seen) if name in result["taken"] else weights[name]
                assert torch.equal(seen, want), name
            assert step["plain"]
            for name, after in step["after"].items():
                assert torch.equal(after, weights[name] - 0.5 * step["grads"][name]), name
            weights = step["after"]


CONFIG = {
    "model": {"name": "gem", "layers": 2, "dim": 32, "embedding_dim": 8, "interaction": {"experts": ["wukong", "wukong"]}},
    "parallel": {"dense": "hsdp", "expert": 2},
}  # fmt: skip


def losses(rank, world, task):
    try:
        result = train_rank(rank, world, task)["s"]
    except PluginError as error:
        return {"error": error.what}
    return {"losses": result["losses"], "differs": result["differs"]}


def test_a_strategy_gathers_in_the_codec_that_the_configuration_names(tmp_path):
    pytest.importorskip("gem_precision")
    from gem_core.testing.strategies import StrategyConformance

    runs = {}
    for codec in ("none", "mxfp8"):
        parallel = {**CONFIG["parallel"], "hsdp": {"gather": codec}}
        config = {**StrategyConformance.config(parallel), "model": CONFIG["model"]}
        folder = tmp_path / codec
        folder.mkdir()
        runs[codec] = run_processes(4, losses, {"config": config, "scenarios": {"s": [[(4,) * 4]] * 3}}, folder)
        assert all(r["differs"] == "" and r["losses"] == runs[codec][0]["losses"] for r in runs[codec])
    exact, rough = (runs[codec][0]["losses"] for codec in ("none", "mxfp8"))
    assert exact != rough
    for a, b in zip(exact, rough):
        assert b[0] == pytest.approx(a[0], rel=0.05)


def test_an_unknown_codec_is_refused(tmp_path):
    from gem_core.testing.strategies import StrategyConformance

    config = {**StrategyConformance.config({"dense": "fsdp", "fsdp": {"gather": "mxfp9"}}), "model": CONFIG["model"]}
    for said in run_processes(2, losses, {"config": config, "scenarios": {"s": [[(4, 4)]]}}, tmp_path):
        assert "mxfp9" in said["error"]
