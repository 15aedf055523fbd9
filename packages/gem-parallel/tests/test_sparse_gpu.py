"""The FBGEMM engine against the PyTorch one, on a GPU (and, for what FBGEMM has there, on the CPU)."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("fbgemm_gpu", reason="FBGEMM is not installed")

from gem_core.config.schema import TableOptimizer
from gem_core.errors import ConfigError
from gem_parallel.sparse.engines import TorchEngine, build_engine
from gem_parallel.sparse.rowwise import RowwiseOptions
from gem_parallel.sparse.simulate import Simulator, groups_of, joined, run_rank, toy_tables

ROWS, DIM = 500, 16
DEVICES = [pytest.param("cuda", marks=pytest.mark.gpu), "cpu"]


def engines(device, dtype="fp32", placement="hbm", rows=ROWS, **options):
    torch.manual_seed(0)
    values = torch.randn(rows, DIM)
    made = []
    for kernel, place in (("torch", "hbm"), ("fbgemm", placement)):
        engine = build_engine(kernel, rows, DIM, dtype, torch.device(device), RowwiseOptions(**options), place)
        engine.weight.copy_(values)
        engine.accumulator.zero_()
        made.append(engine)
    return made


def bags(device, seed, count=40, weighted=False, rows=ROWS):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 6, (count,), generator=g)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.randint(0, rows, (int(lengths.sum()),), generator=g)
    weights = torch.rand(ids.numel(), generator=g) if weighted else None
    return ids.to(device), offsets.to(device), None if weights is None else weights.to(device)


def skip_without(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def flushed(engine):
    engine.flush()
    return engine.weight.float().cpu(), engine.accumulator.cpu()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("options", [{"lr": 0.1, "eps": 1e-3}, {"lr": 0.1, "eps": 1e-3, "scale": 4.0}])
def test_the_engines_agree(device, weighted, options):
    skip_without(device)
    one, other = engines(device, **options)
    for step in range(5):
        batch = bags(device, step, weighted=weighted)
        found = [e.look_up(*batch, True) for e in (one, other)]
        torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-5)
        for e, (out, ticket) in zip((one, other), found):
            e.update(ticket, out.square() - 0.5)
    for a, b in zip(flushed(one), flushed(other)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_storage_can_move_between_the_passes(device):
    skip_without(device)
    one, other = engines(device, lr=0.1, eps=1e-3)
    batch = bags(device, 1)
    kept = [t.clone() for t in other.bound]
    found = [e.look_up(*batch, True) for e in (one, other)]
    other.bind(None, None)
    assert sum(t.untyped_storage().nbytes() for t in other.bound) == 0
    other.bind(kept[0].view(ROWS, DIM), kept[1])
    for e, (out, ticket) in zip((one, other), found):
        e.update(ticket, torch.ones_like(out))
    assert other.bound[1].data_ptr() == kept[1].data_ptr()
    torch.testing.assert_close(one.weight, kept[0].view(ROWS, DIM), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(one.accumulator, kept[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_no_ids_and_no_bags(device):
    skip_without(device)
    for engine in engines(device):
        before = flushed(engine)
        for count in (0, 3):
            offsets = torch.zeros(count + 1, dtype=torch.int64, device=device)
            out, ticket = engine.look_up(torch.zeros(0, dtype=torch.int64, device=device), offsets, None, True)
            assert out.shape == (count, DIM)
            assert not out.any()
            engine.update(ticket, torch.ones_like(out))
        for a, b in zip(before, flushed(engine)):
            assert torch.equal(a, b)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_small_updates_survive_in_expectation(device, dtype):
    """Each update is a tenth of the distance between neighbours: rounding to nearest would lose every one."""
    skip_without(device)
    for kernel in ("torch", "fbgemm"):
        if (device, kernel) == ("cpu", "fbgemm"):
            with pytest.raises(ConfigError, match="round 16-bit tables to nearest"):
                build_engine(kernel, 10, DIM, dtype, torch.device(device), RowwiseOptions())
            continue
        if (device, kernel, dtype) == ("cuda", "fbgemm", "bf16"):
            with pytest.raises(ConfigError, match="read fp32 and fp16 tables"):
                build_engine(kernel, 10, DIM, dtype, torch.device(device), RowwiseOptions())
            assert isinstance(build_engine("auto", 10, DIM, dtype, torch.device(device), RowwiseOptions()), TorchEngine)
            continue
        step = 2.0**-10 if dtype == "fp16" else 2.0**-7
        engine = build_engine(kernel, 4000, DIM, dtype, torch.device(device), RowwiseOptions(lr=1e5 * step, eps=0.0))
        engine.weight.fill_(1.0)
        engine.accumulator.fill_(1e12)  # no gradient changes it in fp32, so the update is lr * g * 1e-6
        ids, offsets = torch.arange(4000, device=device), torch.arange(4001, device=device)
        for _ in range(20):
            out, ticket = engine.look_up(ids, offsets, None, True)
            engine.update(ticket, torch.full_like(out, -1.0))
        moved = flushed(engine)[0].mean().item() - 1.0
        assert moved == pytest.approx(20 * 0.1 * step, rel=0.05), kernel


@pytest.mark.gpu
@pytest.mark.parametrize("placement", ["uvm", "uvm_caching"])
def test_tables_outside_of_device_memory(placement):
    skip_without("cuda")
    one, other = engines("cuda", placement=placement, lr=0.1, eps=1e-3)
    for step in range(5):
        batch = bags("cuda", step)
        for e in (one, other):
            out, ticket = e.look_up(*batch, True)
            e.update(ticket, out.square() - 0.5)
    for a, b in zip(flushed(one), flushed(other)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("placement", ["hbm", "uvm", "uvm_caching"])
@pytest.mark.parametrize("prefetch", [False, True])
def test_the_strategy_equals_its_simulator(device, placement, prefetch):
    """All tables in one process: exchange of ids ahead, weighted bags, the state as a checkpoint sees it."""
    skip_without(device)
    if device == "cpu" and placement != "hbm":
        pytest.skip("host memory for tables needs a CUDA device")
    task = {
        "strategy": "fbgemm", "config": {"placement": placement, "cache_fraction": 0.5}, "model": 1, "steps": 8, "samples": [[5], [0], [9]],
        "optimizer": {"lr": 0.1, "eps": 1e-3}, "weighted": True, "prefetch": prefetch,
    }  # fmt: skip
    found = run_rank(0, 1, task, device)
    tables, first, last = toy_tables(), joined([found["first"]]), joined([found["last"]])
    weights = {t.name: first[f"{t.name}.weight"] for t in tables.tables}
    simulator = Simulator(tables, weights, model=1, replicas=1, schedule="mean", optimizer=TableOptimizer(lr=0.1, eps=1e-3))
    for step in range(8):
        for got, rows in zip(found["steps"][step], simulator.step(groups_of(task, tables, step), [7 * step])[0].values()):
            torch.testing.assert_close(got, rows, rtol=2e-5, atol=2e-5)
    for name, weight in simulator.weights[0].items():
        torch.testing.assert_close(last[f"{name}.weight"], weight, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(last[f"{name}.accumulator"], simulator.states[0][name], rtol=2e-5, atol=2e-5)


@pytest.mark.gpu
def test_positions_past_two_to_the_31_elements():
    skip_without("cuda")
    rows = (1 << 31) // DIM + 1000
    engine = build_engine("fbgemm", rows, DIM, "fp32", torch.device("cuda"), RowwiseOptions(lr=0.1, eps=1e-3))
    engine.accumulator.zero_()
    last = torch.tensor([rows - 1], device="cuda")
    engine.weight[rows - 1] = 2.0
    out, ticket = engine.look_up(last, torch.tensor([0, 1], device="cuda"), None, True)
    assert (out == 2.0).all()
    engine.update(ticket, torch.ones_like(out))
    torch.testing.assert_close(engine.weight[rows - 1], torch.full((DIM,), 2.0 - 0.1 / 1.001, device="cuda"))
