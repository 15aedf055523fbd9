"""What a configuration sets holds in a search, and the plan says so."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from plan_cases import cluster, workload
from pydantic import Field
from rich.console import Console

from gem_core.cli import main
from gem_core.config import FrozenConfig, config_from_dict
from gem_core.plugins import manager
from gem_core.sources.drawn import RandomConfig
from gem_parallel.plan.candidates import Dense, sparse_candidates
from gem_parallel.plan.fixed import CORE, OPTIONS, Fixed
from gem_parallel.plan.grid import Table
from gem_parallel.plan.report import left_out
from gem_parallel.plan.search import Space, plan
from gem_parallel.plan.settings import to_parallel
from gem_parallel.plan.workload import Table as Table_
from gem_parallel.plan.workload import _balancing

CLUSTERS = Path(__file__).parents[3] / "docs/examples/clusters"
LAW = ["--lengths", 'law="lognormal", mean=20, max=64']
CONFIG = """
[run]
device = "cpu"
[data]
batch_size = 32
[data.synthetic]
rows = 256
eval_rows = 64
test_rows = 64
[model]
preset = "tiny"
"""
RECIPES, STRATEGIES = ({spec.name for spec in manager().offers(kind)} for kind in ("recipe", "sparse_strategy"))


@pytest.fixture
def search(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Plan ``keys`` over the configuration (or ``file``): exit status, what was printed, what was written."""

    monkeypatch.chdir(tmp_path)

    def run(*keys: str, world: int = 8, more: tuple[str, ...] = (), file: Path | None = None, given: bool = False) -> Any:
        own, out = tmp_path / "my.toml", tmp_path / "plan.json"
        own.write_text(CONFIG)
        out.unlink(missing_ok=True)
        sets = [text for key in keys for text in ("--set", key)]
        base = ["plan", str(file or own), "--cluster", str(CLUSTERS / "h200-x8-host.toml"), "--world", str(world), *LAW]
        code = main([*base, *sets, *more, *(["--given"] if given else []), "--json", str(out)])
        text = "".join(capsys.readouterr())
        return code, " ".join(text.split()), json.loads(out.read_text()) if out.exists() else {}

    return run


def test_a_type_that_is_set_is_not_written_over(search: Any) -> None:
    if "bf16" not in RECIPES:
        pytest.skip("no bf16 recipe")
    keys = ["precision.recipe=bf16", "parallel.dense=fsdp"]
    found = {}
    for kind in ("fp32", "bf16", None):
        code, text, plan = search(*keys, *([f"parallel.fsdp.param_dtype={kind}"] if kind else []))
        assert code == 0
        found[kind] = plan["parallel"]["fsdp"]["param_dtype"], plan["plan"]["collectives"]["parameter gather"]["network_s"]
        assert ("parallel.fsdp.param_dtype" in text.partition("and kept:")[2]) == (kind is not None)
        assert ("parallel.fsdp.param_dtype" in plan["plan"]["decided"]) == (kind is None)
    assert found["fp32"][0] == "fp32"
    assert found["bf16"] == found[None] == ("bf16", found["bf16"][1])
    assert found["fp32"][1] > found["bf16"][1]
    code, _, plan = search("precision.recipe=fp32", "parallel.dense=fsdp", "parallel.fsdp.param_dtype=bf16")
    assert (code, plan["parallel"]["fsdp"]["param_dtype"]) == (0, "bf16")


SETTINGS = [
    *(f"parallel.dense={name}" for name in ("ddp", "fsdp", "hsdp")),
    *(f"parallel.sparse={name}" for name in ("local", "torchrec", "torchrec-2d", "gem-2d")),
    *(f"parallel.{axis}=2" for axis in ("replicate", "shard", "model", "replica")),
    *(f"parallel.fsdp.{text}" for text in ("reshard_after_forward=true", "reshard_after_forward=false", "collective=low-cta")),
    *(f"parallel.gem-2d.{text}" for text in ("exchange=touched", "exchange=whole", "schedule=torchrec", "collective=low-cta")),
    *(f"parallel.gem-2d.{text}" for text in ("sharding=table", "tables.item.sharding=row")),
    *(f"parallel.torchrec.sharding={cut}" for cut in ("row", "table", "column")),
    *(f"parallel.torchrec-2d.{text}" for text in ("fully_sharded=true", "fully_sharded=false", "inter_host=true", "sharding=column")),
]


@pytest.mark.parametrize("text", SETTINGS)
def test_what_is_set_holds(search: Any, text: str) -> None:
    """Alone, with only the strategy chosen that has the option."""
    key, _, value = text.partition("=")
    section, *rest = key.split(".")[1:]
    keys = [text]
    if section in OPTIONS:
        keys.append(f"parallel.{'dense' if section == 'fsdp' else 'sparse'}={section}")
    if rest and rest[0] in ("sharding", "tables"):
        keys.append("parallel.model=" + ("8" if section == "torchrec" else "2"))
    for name in (section, value):
        if name.startswith("torchrec") and name not in STRATEGIES:
            pytest.skip(f"the strategy {name} is not offered here")
    code, printed, plan = search(*keys)
    assert code == 0, printed
    at: Any = plan
    for part in key.split("."):
        at = at[part]
    assert json.dumps(at).strip('"') == value
    assert f"{key} = " in printed.partition("and kept:")[2]
    assert key not in plan["plan"]["decided"]


@pytest.mark.parametrize(("sparse", "world"), [("gem-2d", 1), ("torchrec", 1), ("gem-2d", 8)])
def test_a_strategy_without_its_use_is_kept_too(search: Any, sparse: str, world: int) -> None:
    """One copy of the tables: what is planned is the file's all the same, as `--given` predicts it."""
    if sparse not in STRATEGIES:
        pytest.skip(f"the strategy {sparse} is not offered here")
    keys = [f"parallel.sparse={sparse}", f"parallel.model={world}", *(["parallel.dense=ddp"] if world > 1 else [])]
    code, printed, plan = search(*keys, world=world)
    assert code == 0, printed
    assert (plan["parallel"]["sparse"], plan["parallel"]["model"], plan["parallel"]["replica"]) == (sparse, world, 1)
    file = Path("given.json")
    file.write_text(json.dumps(plan))
    code, _, given = search(world=world, given=True, file=file)
    assert code == 0
    assert given["plan"]["step_s"] == pytest.approx(plan["plan"]["step_s"])


def test_what_cannot_be_is_refused_with_its_keys(search: Any) -> None:
    code, text, _ = search("parallel.replicate=3")
    assert code == 2
    assert "no arrangement of 8 GPUs" in text
    assert "parallel.replicate = 3" in text
    assert "--free" in text
    code, text, plan = search("parallel.replicate=3", more=("--free", "parallel.replicate"))
    assert code == 0
    assert plan["parallel"]["replicate"] * plan["parallel"]["shard"] * plan["parallel"]["expert"] == 8
    for keys in (("parallel.dense=fsdp",), ("parallel.dense=hsdp", "parallel.shard=1")):
        code, text, _ = search(*keys, "train.capture=true")
        assert code == 2
        assert f'captured steps keep the dense part whole (ddp) where: parallel.dense = "{keys[0][-4:]}"' in text
        assert "train.capture = true" in text
    for key in ("paralel", "paralel.torchrec.tables.item.sharding"):
        code, text, _ = search(more=("--free", key))
        assert (code, f"'{key}' is nothing that a search decides" in text) == (2, True)
    code, text, _ = search(more=("--free", "parallel"), given=True)
    assert (code, "--given plans nothing anew" in text) == (2, True)


def test_a_plan_may_be_planned_again(search: Any, tmp_path: Path) -> None:
    """What the first search decided is open again, but for what was changed since or is set now."""
    code, _, plan = search("parallel.dense=ddp", world=4)
    assert (code, plan["parallel"]["replicate"]) == (0, 4)
    again = tmp_path / "again.json"
    again.write_text(json.dumps(plan))
    code, text, wider = search(world=8, file=again)
    assert (code, wider["parallel"]["replicate"]) == (0, 8)
    assert text.partition("and kept: ")[2].startswith('parallel.dense = "ddp". ')
    plan["parallel"]["replica"] = 2
    again.write_text(json.dumps(plan))
    code, text, edited = search(world=8, file=again)
    assert code == 0
    assert edited["parallel"]["replica"] == 2
    assert "parallel.replica = 2" in text
    replicate = f"replicate={plan['parallel']['replicate']}"
    code, text, _ = search(f"parallel.{replicate}", world=8, file=again)
    assert code == 2
    assert "parallel.replicate = 4" in text
    code, text, section = search(f"parallel={{{replicate}}}", world=8, file=again)
    assert (code, section["parallel"]["replicate"], section["parallel"]["shard"]) == (0, 4, 2)
    assert text.partition("and kept: ")[2].startswith("parallel.replicate = 4. ")


def test_options_of_fsdp_hold_for_its_copies(search: Any) -> None:
    keys = ("parallel.fsdp.reduce_dtype=bf16", "parallel.fsdp.reshard_after_forward=true", "parallel.dense=hsdp")
    code, text, plan = search(*keys)
    assert code == 0
    assert plan["parallel"]["hsdp"]["reduce_dtype"] == "bf16"
    assert plan["parallel"]["hsdp"]["reshard_after_forward"] is True
    assert "parallel.fsdp.reshard_after_forward = true" in text


@pytest.mark.parametrize("value", ["true", "false"])
def test_options_of_copies_that_share_nothing_hold_too(search: Any, value: str) -> None:
    code, text, plan = search("parallel.dense=hsdp", "parallel.shard=1", f"parallel.hsdp.reshard_after_forward={value}")
    assert code == 0, text
    assert json.dumps(plan["parallel"]["hsdp"]["reshard_after_forward"]) == value
    assert (plan["parallel"]["dense"], plan["parallel"]["replicate"]) == ("hsdp", 8)


def test_recomputation_that_is_set_is_kept_and_counted(search: Any) -> None:
    modules = ["layers.*.blocks.*.attention", "layers.*.pools.*"]
    key = f"train.callbacks.recompute.modules={json.dumps(modules)}"
    code, text, plan = search(key)
    assert code == 0
    assert plan["train"]["callbacks"]["recompute"]["modules"] == modules
    assert "train.callbacks.recompute.modules = " in text
    _, _, without = search()
    assert "recompute" not in without["train"].get("callbacks", {})
    assert plan["plan"]["memory_bytes"]["activations"] < without["plan"]["memory_bytes"]["activations"]
    assert all(name.startswith("layers.") for name in plan["plan"]["recomputed"])
    code, text, given = search(key, "parallel.dense=ddp", given=True)
    assert code == 0
    assert given["train"]["callbacks"]["recompute"]["modules"] == modules
    assert given["plan"]["recomputed"] == plan["plan"]["recomputed"]
    for other in ('["layers.0"]', '["layers.*.blocks.0"]'):
        code, text, _ = search(f"train.callbacks.recompute.modules={other}")
        assert (code, "--free train.callbacks.recompute" in text) == (2, True)
        code, text, _ = search(f"train.callbacks.recompute.modules={other}", "parallel.dense=ddp", given=True)
        assert (code, "not counted in time or memory: train.callbacks.recompute" in text) == (0, True)


def test_an_open_value_is_not_a_setting() -> None:
    open_ = {"shard": -1, "model": -1, "gem-2d": {"sharding": "auto"}, "torchrec": {"sharding": "planner"}}
    assert not Fixed.of(config_from_dict({"parallel": open_}))
    assert set(Fixed.of(config_from_dict({"parallel": {"shard": 2, "gem-2d": {"sharding": "row"}}})).values) == {
        "parallel.shard", "parallel.gem-2d.sharding",
    }  # fmt: skip
    assert set(CORE) == {"dense", "sparse", "replicate", "shard", "expert", "model", "replica"}


TABLES = (Table_("large", 10_000_000, 64, 4, 4.0), Table_("small", 1_000, 16, 1, 1.0))


def cuts(fixed: Fixed) -> set[tuple[str, ...]]:
    """How gem-2d may cut the large and the small table over two ranks."""
    place, work = cluster((4, 300, 1, 1)), workload(tables=TABLES)
    return {one.cuts for one in sparse_candidates(work, 4, place, ["gem-2d"], fixed=fixed) if one.model == 2}


@pytest.mark.parametrize("free", [(), ("parallel.gem-2d.tables.large.sharding",)])
def test_a_table_may_be_left_open_where_all_others_are_set(free: tuple[str, ...]) -> None:
    own = {"sharding": "row" if free else "auto"}
    options = {"sharding": "row", "tables": {"large": own}}
    config = config_from_dict({"parallel": {"sparse": "gem-2d", "gem-2d": options}})
    fixed = Fixed.of(config, free=free)
    assert cuts(fixed) == {("row", "row"), ("table", "row")}
    assert cuts(Fixed.of(config_from_dict({"parallel": {"gem-2d": {**options, "tables": {}}}}))) == {("row", "row")}
    assert "parallel.gem-2d.tables.large.sharding" not in fixed.values
    one = next(
        one
        for one in sparse_candidates(workload(tables=TABLES), 4, cluster((4, 300, 1, 1)), fixed=fixed)
        if one.cuts == ("table", "row") and one.model == 2
    )
    section = to_parallel(Dense(4, 1, 1), one, workload(tables=TABLES), fixed.section, fixed=fixed)["gem-2d"]
    assert section["sharding"] == "row"
    assert section["tables"] == {"large": {"sharding": "table"}, "small": {"sharding": "row"}}


def test_what_one_table_costs_is_told_of_that_table_alone() -> None:
    options = {"sharding": "row", "tables": {"large": {"sharding": "table"}}}
    fixed = Fixed.of(config_from_dict({"parallel": {"gem-2d": options}}))
    assert cuts(fixed) == {("table", "row")}
    assert cuts(fixed.without("parallel.gem-2d.tables.large.sharding")) == {("row", "row"), ("table", "row")}
    assert cuts(fixed.without("parallel.gem-2d.sharding")) == {("table", "row"), ("table", "table")}


def test_brackets_in_names_are_told_as_they_are(search: Any, tmp_path: Path) -> None:
    file = tmp_path / "my[bold][" / "b]:key:.toml"
    file.parent.mkdir()
    file.write_text(CONFIG)
    code, text, _ = search("parallel.dense=ddp", file=file, more=("--explain",))
    assert code == 0
    assert "".join(f"Set by {file} and kept: ".split()) in "".join(text.split())  # a long path is broken where the console ends


def test_what_settings_cost_is_told(search: Any) -> None:
    keys = (
        "parallel.dense=fsdp",
        "parallel.sparse=gem-2d",
        "parallel.gem-2d.exchange=whole",
        "parallel.replica=8",
        "parallel.timeout_s=77",
    )
    code, text, _ = search(*keys, more=("--explain",))
    assert code == 0
    kept = text.partition("and kept:")[2]
    for key in ("parallel.sparse", "parallel.gem-2d.exchange", "parallel.replica"):
        assert f"{key} = " in kept
    assert "timeout_s" not in kept
    assert re.search(r"Planned anew \(--free KEY\), a step would take [\d.,]+ ms, [\d.]+% less: ddp, local", text)
    assert "What settings cost" in text
    _, text, _ = search("parallel.gem-2d.exchange=whole")
    assert 'for strategies that this plan does not use: parallel.gem-2d.exchange = "whole"' in text


def test_balanced_batches_are_named_where_the_source_has_them() -> None:
    class Options(FrozenConfig):
        batching: str = Field("fixed", description="fixed or even")

    assert _balancing("logs", Options()) == "data.logs.batching chooses: fixed or even"
    assert _balancing("random", RandomConfig()) == "data.random.balanced = true deals them"
    assert _balancing("other", FrozenConfig()) == ""
    space = Space.build(workload(), cluster((4, 300, 1, 1)), 4)
    chosen = plan(space).runnable
    for kind, said in (("even", "Kept as configured, not counted in time or memory: data.logs.batching."), ("fixed", "")):
        assert left_out({"data": {"source": "logs", "logs": {"batching": {"kind": kind}}}}, space, chosen) == said


@pytest.mark.parametrize("columns", ["80", None])
def test_words_stay_whole_in_a_pipe(
    search: Any, columns: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    file = tmp_path / "own.toml"
    file.write_text(CONFIG)
    base = ["plan", str(file), "--cluster", str(CLUSTERS / "b200-3-tier.toml"), "--world", "16", *LAW, "--explain"]
    assert main([*base, "--set", "parallel.dense=hsdp", "--set", "parallel.sparse=gem-2d", "--set", "parallel.model=4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= int(columns or 140)
    text = "\n".join(lines)
    assert "…" not in text
    for word in ("reduce-scatter", "all-to-all", "collectives", "replicate"):
        assert word in text
    assert all(line.rstrip().endswith(tuple("┓┃┩│┤┘")) for line in lines if line.startswith(tuple("┏┃┡│├└")))


def test_a_table_shrinks_its_widest_columns_to_their_words() -> None:
    table = Table("first column", "b")
    table.add_row("some words and reduce-scatter", "x")
    console = Console(file=io.StringIO(), width=24)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert {len(line) for line in lines} == {24}
    assert "reduce-scatter" in lines[-2]
