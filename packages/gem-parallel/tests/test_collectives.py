"""All-gathers by copies out of peers' memory, in processes on CPUs: the protocol that GPUs run, with threads for streams."""

from __future__ import annotations

import random
import re
import time

import pytest
import torch
import torch.distributed as dist

from gem_core.testing.strategies import StrategyConformance, run_processes, train_rank
from gem_core.train.collective import GatherOptions, Topology
from gem_parallel.collectives import gatherer, members, topology
from gem_parallel.collectives.copy_engine import CopyEngineGather, HierarchicalGather
from gem_parallel.collectives.pushed_mean import PushedMean

CPU = torch.device("cpu")
KINDS = [torch.float32, torch.bfloat16, torch.uint8, torch.int64]


def part(iteration, rank, size, kind):
    """What a rank sends in an iteration: differs in every place from other ranks, iterations and offsets."""
    numbers = torch.arange(size, dtype=torch.int64) * 31 + iteration * 7919 + rank * 104729
    return (numbers % 251).to(kind)


def draws(iterations, most):
    """The same sizes and types on all ranks: elements a member, 0 among them."""
    g = random.Random(5)
    return [(g.choice([0, 1, 3, g.randrange(most), g.randrange(most)]), g.choice(KINDS)) for _ in range(iterations)]


def gather_often(rank, world, task):
    if not task.get("waits", True):
        members.Window.reclaim = lambda self: None
    hosts = tuple(i // task["mates"] for i in range(world))
    options = GatherOptions(CPU, Topology("cpu", hosts), slots=task.get("slots", 2), timeout_s=30)
    made = (
        HierarchicalGather(dist.group.WORLD, options, chunk=4096)
        if task["kind"] == "hosts"
        else CopyEngineGather(dist.group.WORLD, options)
    )
    g, wrong = random.Random(rank), []
    for i, (size, kind) in enumerate(draws(task["iterations"], task["most"])):
        out = made.allocate(size * world, kind)
        out.view(world, size)[rank] = part(i, rank, size, kind)
        if task["sleeps"] and g.random() < task["sleeps"]:
            time.sleep(g.random() * 2e-3)
        made.gather(out)
        expected = torch.cat([part(i, r, size, kind) for r in range(world)])
        if not torch.equal(out, expected):
            wrong.append(i)
        del out
    return {"wrong": torch.tensor(wrong)}


@pytest.mark.parametrize("slots", [1, 2])
def test_a_thousand_gathers_of_random_sizes(slots, tmp_path):
    task = {"kind": "host", "mates": 3, "iterations": 1000, "most": 5000, "sleeps": 0.05, "slots": slots}
    assert all(not found["wrong"].numel() for found in run_processes(3, gather_often, task, tmp_path))


@pytest.mark.parametrize(("world", "mates"), [(4, 2), (2, 1), (4, 4)])
def test_across_hosts(world, mates, tmp_path):
    task = {"kind": "hosts", "mates": mates, "iterations": 200, "most": 20000, "sleeps": 0.05}
    assert all(not found["wrong"].numel() for found in run_processes(world, gather_often, task, tmp_path))


def test_without_waiting_for_readers_results_are_wrong(tmp_path):
    """The runs above would notice a member that writes into memory which others still read."""
    task = {"kind": "host", "mates": 3, "iterations": 300, "most": 500_000, "sleeps": 0.3, "slots": 1, "waits": False}
    assert any(found["wrong"].numel() for found in run_processes(3, gather_often, task, tmp_path))


def source_often(rank, world, task):
    """Rows that are written between gathers, as tables are."""
    made = CopyEngineGather(dist.group.WORLD, GatherOptions(CPU, Topology("cpu", (0,) * world), timeout_s=30))
    source, g, wrong = made.source(4096 + 512), random.Random(rank), []
    for i in range(task["iterations"]):
        source.reclaim()
        source.memory.copy_(part(i, rank, source.memory.numel(), torch.uint8))
        if g.random() < 0.1:
            time.sleep(g.random() * 2e-3)
        outs = [(torch.zeros(world * 1024, dtype=torch.float32), 0), (torch.zeros(world * 512, dtype=torch.uint8), 4096)]
        source.gather(outs)
        for out, at in outs:
            n = out.numel() * out.itemsize // world
            want = torch.cat([part(i, r, source.memory.numel(), torch.uint8)[at : at + n] for r in range(world)])
            if not torch.equal(out.view(torch.uint8), want):
                wrong.append(i)
    return {"wrong": torch.tensor(wrong)}


def test_memory_that_is_gathered_from_again_and_again(tmp_path):
    assert all(not found["wrong"].numel() for found in run_processes(3, source_often, {"iterations": 300}, tmp_path))


def mean_often(rank, world, task):
    """Chunks of a few hundred numbers, so that many are under way."""
    members_of = CopyEngineGather(dist.group.WORLD, GatherOptions(CPU, Topology("cpu", (0,) * world), timeout_s=30))._members()
    mean, g, off = PushedMean(members_of, chunk=1024), random.Random(7), 0.0
    for i in range(task["iterations"]):
        n = g.choice([0, 1, 255, 256, 257, g.randrange(3000)])
        parts = [torch.randn(world * n, generator=torch.Generator().manual_seed(i * 100 + r)) for r in range(world)]
        if random.Random(i + rank).random() < 0.1:
            time.sleep(2e-3)
        out = torch.full((n,), float("nan"))
        mean(out, parts[rank])
        if n:
            off = max(off, float((out - torch.stack(parts).mean(0).view(world, n)[rank]).abs().max()))
    return {"off": off}


@pytest.mark.parametrize("world", [2, 3])
def test_means_of_parts_that_others_send(world, tmp_path):
    for found in run_processes(world, mean_often, {"iterations": 300}, tmp_path):
        assert found["off"] < 1e-6  # and no NaN: all of the result was written


MODEL = {"name": "gem", "layers": 3, "dim": 8, "embedding_dim": 8, "interaction": {"experts": ["wukong", "dcnv2", "wukong", "dot"]}}
COPIES = {"collective": "copy-engine"}
PAIRS = {
    "one host": ({"dense": "fsdp"}, COPIES),
    "two hosts": ({"dense": "fsdp", "fsdp": {"prefetch": 2}}, {**COPIES, "per_host": 2}),
    "replicas": ({"dense": "hsdp", "replicate": 2}, COPIES),
    "experts": ({"dense": "fsdp", "expert": 2, "fsdp": {"prefetch": 2, "keep_last": 0}}, COPIES),
}


def train_pairs(rank, world, task):
    sizes = {"s": [[(3,) * world], [(5, *range(world - 1))], [(0, *(2,) * (world - 1))], [(1,) * world, (2,) * world]]}
    found = {}
    for name, (parallel, options) in PAIRS.items():
        strategy = parallel["dense"]
        both = [parallel, {**parallel, strategy: {**parallel.get(strategy, {}), **options}}]
        found[name] = [
            train_rank(rank, world, {"config": {**StrategyConformance.config(p), "model": MODEL}, "scenarios": sizes})["s"] for p in both
        ]
    return found


def test_fsdp_trains_the_same_bit_for_bit(tmp_path):
    for rank, found in enumerate(run_processes(4, train_pairs, {}, tmp_path, timeout=240)):
        for name, (plain, copied) in found.items():
            assert plain["losses"] == copied["losses"], (rank, name)
            for key, tensor in plain["state"].items():
                assert torch.equal(tensor, copied["state"][key]), (rank, name, key)


def choose(rank, world, task):
    told = []
    for hosts in ((0, 0, 1), (0, 1, 2), (0, 0, 0)):
        made, line = gatherer("copy-engine", dist.group.WORLD, GatherOptions(CPU, Topology("cpu", hosts)))
        out = made.allocate(2 * world, torch.float32)
        out.view(world, 2)[rank] = float(rank)
        made.gather(out)
        told.append((type(made).__name__, line, out.tolist()))
    told.append(mute(world))
    members._HostWindow.__init__ = broken
    told.append(gatherer("copy-engine", dist.group.WORLD, GatherOptions(CPU, Topology("cpu", (0,) * world)))[1])
    return {"told": told, "hosts": topology(dist.group.WORLD, CPU).hosts, "declared": topology(dist.group.WORLD, CPU, 2).hosts}


def mute(world):
    """Where flags are written and never seen."""
    signal, members._HostWindow._signal = members._HostWindow._signal, lambda self, peer, flag, value: None
    options = GatherOptions(CPU, Topology("cpu", (0,) * world), timeout_s=0.5)
    told = gatherer("copy-engine", dist.group.WORLD, options)[1]
    members._HostWindow._signal = signal
    return told


def broken(self, members, size):
    raise OSError("no space left in shared memory")


def test_what_cannot_be_used_is_replaced_and_told(tmp_path):
    for found in run_processes(3, choose, {}, tmp_path):
        uneven, apart, one, unseen, fault = found["told"]
        assert [uneven[0], apart[0], one[0]] == ["GroupGather", "GroupGather", "CopyEngineGather"]
        assert "default: 3 members by gloo; not copy-engine, because the hosts of the group do not have equally many" in uneven[1]
        assert "no two members of the group share a host" in apart[1]
        assert one[1] == "copy-engine: shared memory, 3 members of one host, 3 results in turn"
        assert all(result == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0] for _, _, result in found["told"][:3])
        # the member that is asked for first may not be the second
        assert re.search(r"not copy-engine, because member \d of the host did not publish its memory within 0", unseen)
        assert "not copy-engine, because no space left in shared memory" in fault
        assert found["hosts"] == (0, 0, 0)
        assert found["declared"] == (0, 0, 1)


def hold(rank, world, task):
    made = CopyEngineGather(dist.group.WORLD, GatherOptions(CPU, Topology("cpu", (0,) * world), slots=2))
    kept = [made.allocate(4, torch.float32) for _ in range(2)]
    try:
        made.allocate(4, torch.float32)
    except Exception as fault:
        return {"told": str(fault), "kept": len(kept)}
    return {"told": "", "kept": 0}


def test_more_results_than_slots_are_refused(tmp_path):
    for found in run_processes(2, hold, {}, tmp_path):
        assert "2 gathered results are in use at once" in found["told"]


def test_nobody_waits_for_ever(tmp_path):
    with pytest.raises(RuntimeError, match="member 1 of the host did not publish its memory within 1 s"):
        run_processes(2, leave, {}, tmp_path)


def leave(rank, world, task):
    made = CopyEngineGather(dist.group.WORLD, GatherOptions(CPU, Topology("cpu", (0,) * world), timeout_s=1))
    out = made.allocate(4, torch.float32)
    if rank == 0:
        made.gather(out)
    return {}


@pytest.mark.parametrize(("hosts", "mates"), [((0, 0, 1, 1), 2), ((0, 1, 0, 1), None), ((0, 0, 1), None), ((0, 1), 1), ((0,), 1)])
def test_members_of_a_host(hosts, mates):
    assert Topology("cuda", hosts).mates == mates
