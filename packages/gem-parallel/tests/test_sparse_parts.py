"""Parts of the sparse strategies in one process: layout, placement, rounding, errors, imports."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_core.batch import SparseGroup
from gem_core.config import config_from_dict, resolve
from gem_core.config.schema import TableOptimizer
from gem_core.errors import ConfigError, DataError, DeviceError
from gem_core.jagged import Jagged
from gem_core.model.contract import Lookup, TableSet, TableSpec
from gem_core.train.build import build_parts
from gem_core.train.mesh import Mesh
from gem_core.train.runtime import runtime
from gem_parallel.sparse import need as needs
from gem_parallel.sparse import place, specs
from gem_parallel.sparse.config import Gem2dConfig, SparseConfig, TableOptions
from gem_parallel.sparse.exchange import _one_after_another
from gem_parallel.sparse.layout import arrange
from gem_parallel.sparse.rowwise import Reads, rounded, segment_sum
from gem_parallel.sparse.simulate import look_up, random_group, toy_loss, toy_tables

SPECS = {s.name: s for s in specs()}
ONE = Mesh(1)


def table_set(*rows, dim=8):
    tables = tuple(TableSpec(f"t{i}", n, dim, 0.1) for i, n in enumerate(rows))
    return TableSet(tables, tuple(Lookup(f"f{i}", t.name, "sum") for i, t in enumerate(tables)))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    model=st.integers(1, 4),
    replica=st.integers(1, 4),
    chunks=st.integers(1, 3),
    way=st.sampled_from(["auto", "row", "table"]),
)
def test_every_row_is_stored_once(rows, model, replica, chunks, way):
    tables = table_set(*rows)
    options = {t.name: TableOptions(sharding=way, placement="hbm", dtype="fp32") for t in tables.tables}
    layout = arrange(tables, options, model, replica, chunks=chunks, unit_bytes=600)
    for table in tables.tables:
        held = []
        for piece in layout.pieces[table.name]:
            unit = layout.units[piece.owner][piece.unit]
            for r in range(replica):
                first, last = piece.rows_of(r)
                held += range(first, last)
                assert piece.base + last - first <= unit.rows
        assert sorted(held) == list(range(table.rows))
    for units in layout.units:
        for unit in units:
            assert unit.rows % chunks == 0
            ends = [(p.base, p.base + p.block) for p in unit.pieces]
            assert all(b <= c for (_, b), (c, _) in zip(ends, ends[1:])), "pieces of a unit overlap"


def test_whole_tables_are_dealt_out_by_bytes():
    tables = table_set(100, 10, 60, 50)
    options = {t.name: TableOptions(sharding="table", placement="hbm", dtype="fp32") for t in tables.tables}
    layout = arrange(tables, options, 2, 1)
    owners = {name: pieces[0].owner for name, pieces in layout.pieces.items()}
    assert owners["t0"] != owners["t2"] == owners["t3"]
    assert layout.pieces["t1"][0].owner == owners["t0"]


def test_a_large_table_is_cut_under_auto():
    tables = table_set(1000, 10, 10)
    options = {t.name: TableOptions(sharding="auto", placement="hbm", dtype="fp32") for t in tables.tables}
    layout = arrange(tables, options, 4, 1)
    assert [len(layout.pieces[f"t{i}"]) for i in range(3)] == [4, 1, 1]


def test_the_largest_tables_move_to_the_host_until_the_rest_fits(monkeypatch):
    monkeypatch.setattr(place, "_device", lambda: torch.device("cuda"))
    tables = table_set(1000, 100, 5000, dim=8)  # 36 bytes a row with its accumulator
    for budget, moved in ((250_000, []), (100_000, ["t2"]), (47_000, ["t0", "t2"])):
        config = SparseConfig(placement="auto", hbm_gb=budget / 2**30, cache_fraction=0.2)
        options = place.placed(tables, config, "fbgemm")
        assert sorted(n for n, o in options.items() if o.placement == "uvm_caching") == moved
    with pytest.raises(ConfigError, match="even with every table cached a rank needs"):
        place.placed(tables, SparseConfig(placement="auto", hbm_gb=40_000 / 2**30), "fbgemm")
    own = SparseConfig(placement="auto", hbm_gb=100_000 / 2**30, tables={"t2": {"placement": "uvm"}})
    assert [place.placed(tables, own, "fbgemm")[n].placement for n in ("t0", "t1", "t2")] == ["hbm", "hbm", "uvm"]


def test_host_memory_needs_a_device():
    for placement in ("uvm", "uvm_caching"):
        with pytest.raises(ConfigError, match="outside of device memory, and there is no device"):
            SPECS["gem-2d"].build(toy_tables(), ONE, Gem2dConfig(placement=placement))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"exchange": "touched", "schedule": "torchrec"}, 'exchange = "touched" has none'),
        ({"tables": {"a": {"sharding": "column"}}}, "table 'a' asks for"),
        ({"tables": {"a": {"ids": "zch"}}}, 'use sparse = "torchrec"'),
        ({"tables": {"zzz": {}}}, "the tables are: a, b, c, d"),
    ],
)
def test_options_that_gem_2d_cannot_follow_are_refused(options, what):
    with pytest.raises(ConfigError, match=what):
        SPECS["gem-2d"].build(toy_tables(), ONE, Gem2dConfig.model_validate(options))


@pytest.mark.parametrize(
    "name",
    ["gem-2d", pytest.param("torchrec", marks=pytest.mark.skipif(find_spec("torchrec") is None, reason="TorchRec is not installed"))],
)
def test_several_processes_need_a_process_group(name):
    with pytest.raises(DeviceError, match="torchrun"):
        SPECS[name].build(toy_tables(), Mesh(2), SPECS[name].config_type())


@pytest.mark.skipif(find_spec("fbgemm_gpu") is None, reason="FBGEMM is not installed")
def test_rows_of_fbgemm_in_bf16():
    """Rows are those in fp32, rounded; bf16 gradients change the tables as the same numbers in fp32 do."""
    tables, states = toy_tables(4), []
    for output, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        torch.manual_seed(0)
        made = SPECS["fbgemm"].build(tables, ONE, SPECS["fbgemm"].config_type(output=output))
        made.configure_optimizer(TableOptimizer(lr=0.1))
        found = [v[0] if isinstance(v, tuple) else v for v in made(random_group(tables, 6, 1)).values()]
        assert {t.dtype for t in found} == {dtype}
        g = torch.Generator().manual_seed(2)
        grads = [torch.randn(t.shape, generator=g).bfloat16().to(dtype) for t in found]
        torch.autograd.backward(found, grads)
        states.append((found, {name: shards.parts[0][1].clone() for name, shards in made.state_items()}))
    (rows, after), (exact, expected) = states
    for lookup, got, want in zip(tables.lookups, rows, exact):
        # a mean is the rounded sum, divided and rounded again
        same = torch.allclose(got.float(), want, rtol=1e-2) if lookup.pooling == "mean" else torch.equal(got, want.bfloat16())
        assert same, lookup.key
    for name, value in after.items():
        # the gradient of b's mean is divided, and then rounded once more
        assert torch.allclose(value, expected[name], rtol=1e-2 if name.startswith("b") else 1e-6, atol=1e-6), name


@pytest.mark.skipif(find_spec("fbgemm_gpu") is None, reason="FBGEMM is not installed")
def test_rows_in_bf16_need_products_in_bf16():
    options = {
        "run": {"device": "cpu"},
        "data": {"source": "random", "random": {"preset": "tiny"}},
        "model": {"preset": "tiny", "layers": 1},
    }
    config = config_from_dict({**options, "parallel": {"sparse": "fbgemm", "fbgemm": {"output": "bf16"}}})
    with runtime(config) as rt, pytest.raises(ConfigError, match="rows in bfloat16, and the recipe 'fp32'"):
        build_parts(resolve(config), rt)


def test_one_process_only_for_fbgemm():
    with pytest.raises(ConfigError, match=r'keeps all tables in one process, and 2 were started(.|\n)*"gem-2d"'):
        SPECS["fbgemm"].build(toy_tables(), Mesh(2), SPECS["fbgemm"].config_type())


@pytest.mark.parametrize(("torch_version", "command"), [
    ("2.13.0+cpu", "pip install fbgemm-gpu-cpu==1.8.0; pip install --no-deps torchrec==1.8.0"),
    ("2.11.0+cpu", "pip install fbgemm-gpu-cpu==1.6.0; pip install --no-deps torchrec==1.6.1"),
    ("2.99.0", "belong to torch 2.99"),
])  # fmt: skip
def test_a_missing_library_comes_with_the_commands_that_install_it(monkeypatch, torch_version, command):
    monkeypatch.setattr(torch, "__version__", torch_version)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setitem(sys.modules, "torchrec", None)
    with pytest.raises(DeviceError) as caught:
        needs.need("torchrec", "torchrec")
    assert "cannot be imported" in str(caught.value)
    assert command in str(caught.value)


def test_nothing_of_torchrec_is_imported_before_it_is_needed():
    """Offering, configuring and building a strategy that does without."""
    code = """
import sys
from gem_core.train.mesh import Mesh
from gem_parallel.plugin import plugin
from gem_parallel.sparse.simulate import toy_tables
found = {s.name: s for s in plugin.gem_sparse_strategies()}
assert set(found) == {"gem-2d", "fbgemm", "torchrec", "torchrec-2d"}, found
for spec in found.values():
    spec.config_type()
found["gem-2d"].build(toy_tables(), Mesh(1), found["gem-2d"].config_type())
loaded = {name.partition(".")[0] for name in sys.modules} & {"torchrec", "fbgemm_gpu", "triton"}
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


@pytest.mark.parametrize("weighted", [False, True])
def test_reads_by_row_are_the_transpose_of_bags(weighted):
    ids, offsets = torch.tensor([5, 2, 5, 5, 0, 2]), torch.tensor([0, 3, 3, 4, 6])
    weights = torch.tensor([1.0, 2.0, 0.5, 3.0, 4.0, 1.5]) if weighted else None
    reads = Reads.of(ids, offsets, weights)
    assert reads.rows.tolist() == [0, 2, 5]
    table = torch.randn(6, 3, requires_grad=True)
    rows = table[ids] if weights is None else table[ids] * weights.unsqueeze(1)
    bags = torch.zeros(4, 3).index_add(0, torch.tensor([0, 0, 0, 2, 3, 3]), rows)
    assert torch.allclose(segment_sum(table.detach(), ids, offsets, weights), bags.detach())
    dout = torch.randn(4, 3)
    (grad,) = torch.autograd.grad(bags, table, dout)
    assert torch.allclose(reads.gradients(dout), grad[[0, 2, 5]], atol=1e-6)
    assert torch.equal(reads.rows[reads.place], ids)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stochastic_rounding_gives_neighbours_with_the_right_mean(dtype):
    g = torch.Generator().manual_seed(0)
    subnormal = 3.3 * 2.0**-24 if dtype == torch.float16 else 3.3 * 2.0**-133
    for value in (1.0003, -0.7701, 3.14159e-3, subnormal, 100.37):
        x = torch.full((200_000,), value)
        y = rounded(x, dtype, g)
        near = y.unique().float().sort().values
        assert near.numel() == 2
        assert near[0] < value < near[1]
        gap = float(near[1] - near[0])
        assert float(y.double().mean()) == pytest.approx(value, abs=5 * gap / 200_000**0.5)
        above = torch.nextafter(near[0].to(dtype), torch.tensor(float("inf"), dtype=dtype))
        assert float(above) == float(near[1]), "the two values are neighbours"
    kept = torch.randn(1000).to(dtype)
    assert torch.equal(rounded(kept.float(), dtype, g), kept)
    special = torch.tensor([float("inf"), float("-inf"), 0.0])
    assert torch.equal(rounded(special, dtype, g).float(), special)
    assert rounded(torch.tensor([float("nan")]), dtype, g).isnan().all()


@pytest.mark.parametrize("weighted", [False, True])
def test_one_process_gives_the_contract_of_look_ups(weighted):
    tables = toy_tables()
    module = SPECS["gem-2d"].build(tables, ONE, Gem2dConfig())
    state = {n: s.parts[0][1] for n, s in module.state_items()}
    group = random_group(tables, 7, 5, weighted=weighted)
    want = look_up(tables, {t.name: state[f"{t.name}.weight"] for t in tables.tables}, group)
    for key, value in module(group).items():
        expected = want[key]
        if isinstance(value, tuple):
            assert torch.equal(value[1].long(), expected[1].long())
            value, expected = value[0], expected[0]
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)


def test_unused_results_and_zero_gradients_change_nothing():
    tables = toy_tables()
    module = SPECS["gem-2d"].build(tables, ONE, Gem2dConfig())
    module.configure_optimizer(TableOptimizer(lr=0.1))
    before = {n: s.parts[0][1].clone() for n, s in module.state_items()}
    results = module(random_group(tables, 5, 1))
    (results["b.mean"] * 0.0).sum().backward()
    for name, state in module.state_items():
        assert torch.equal(state.parts[0][1], before[name])
    results = module(random_group(tables, 5, 1))
    results["b.mean"].sum().backward()
    changed = {n for n, s in module.state_items() if not torch.equal(s.parts[0][1], before[n])}
    assert changed == {"b.weight", "b.accumulator"}


def test_another_batch_than_the_prefetched_one_may_come_between():
    """Evaluation between the announcement of a batch and its turn."""
    tables = toy_tables()
    module = SPECS["gem-2d"].build(tables, ONE, Gem2dConfig())
    module.configure_optimizer(TableOptimizer(lr=0.1))
    first, second, other = (random_group(tables, 4, s) for s in (1, 2, 3))
    loss = toy_loss(module(first), 1)
    module.prefetch(second)
    loss.backward()
    module.after_backward(torch.ones((), dtype=torch.bool))
    with torch.no_grad():
        module.eval()
        apart = module(other)
        module.train()
        again = module(second)
    state = {t.name: dict(module.state_items())[f"{t.name}.weight"].parts[0][1] for t in tables.tables}
    for results, group in ((apart, other), (again, second)):
        want = look_up(tables, state, group)
        torch.testing.assert_close(results["a.sum"], want["a.sum"], rtol=1e-6, atol=1e-6)


def test_an_id_outside_its_table_names_the_feature():
    tables = toy_tables()
    module = SPECS["gem-2d"].build(tables, ONE, Gem2dConfig())
    for wrong in (64, -1):
        group = random_group(tables, 3, 1)
        values = {k: group[k] for k in group.keys}
        values["c.events"] = Jagged(torch.tensor([1, wrong]), torch.tensor([0, 2, 2, 2]))
        with pytest.raises(DataError, match=rf"id {wrong} is outside \[0, 64\), the rows of table 'c'(.|\n)*features.c.events"):
            module(SparseGroup.from_jagged(values))


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_sixteen_bit_tables_follow_fp32_training(dtype):
    """Stochastic rounding leaves an error of a few units in the last place, not a drift."""
    tables = toy_tables()
    made = {}
    for kind in ("fp32", dtype):
        torch.manual_seed(0)
        module = SPECS["gem-2d"].build(tables, ONE, Gem2dConfig(dtype=kind))
        module.configure_optimizer(TableOptimizer(lr=0.02))
        for step in range(60):
            toy_loss(module(random_group(tables, 6, step)), step).backward()
        made[kind] = dict(module.state_items())
    unit = 2.0**-11 if dtype == "fp16" else 2.0**-8
    for name, state in made[dtype].items():
        got, want = state.parts[0][1], made["fp32"][name].parts[0][1]
        if name.endswith("weight"):
            assert state.dtype == got.dtype == {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
            error = got.float() - want
            assert float(error.abs().max()) < 60 * unit
            assert abs(float(error.mean())) < 4 * unit
        else:
            assert got.dtype == torch.float32


def test_the_plan_is_told():
    lines = SPECS["gem-2d"].build(toy_tables(), ONE, Gem2dConfig()).describe()
    text = "\n".join(lines)
    assert "kernel torch" in text
    assert "  c: whole on model rank 0, 64 rows a replica" in text
    assert "not pipelined" in text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_one_after_another(dtype: torch.dtype) -> None:
    """Whole tensors, columns of wider ones, of whole words or not, turned ones, empty ones, in any order."""
    wide, other = torch.arange(96.0).view(4, 24).to(dtype), torch.arange(6.0).view(3, 2).to(dtype)
    cases = [other, wide[:, :2], wide[:, 2:], wide[0], other[:0]], [wide[:, 1:3]], [other[:0], wide], [wide[:0, 1:3], other]
    for pieces in (*cases, [wide[:, :8], wide[:, 8:16], wide[:, 16:]], [other, wide[:, 8:16]], [wide.t()]):
        assert torch.equal(_one_after_another(list(pieces)), torch.cat([p.flatten() for p in pieces]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_that_a_flag_makes_zeros(dtype: torch.dtype) -> None:
    """Whatever they hold, whole tensors and columns, of whole words or not, turned ones; the pieces stay as they are."""
    wide, whole = torch.full((4, 24), float("nan"), dtype=dtype), torch.tensor([[1.0, float("inf")], [-0.0, 2.0]], dtype=dtype)
    wide[1] = 3.0
    pieces = [whole, wide[:, :8], wide[:, 8:11], wide[:3, :5].t()]
    expected = torch.cat([p.flatten() for p in pieces])
    for ok in (True, False):
        found = _one_after_another(list(pieces), torch.tensor(ok))
        torch.testing.assert_close(found, expected if ok else torch.zeros_like(expected), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(whole.isinf(), torch.tensor([[False, True], [False, False]]))
    assert wide.isnan().sum() == 72
