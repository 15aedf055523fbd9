"""Recomputation: same gradients, less saved; and the knapsack that chooses what is recomputed."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_core.cli import main
from gem_core.config import config_from_dict, load_config, resolve, source_features
from gem_core.errors import ConfigError
from gem_core.model import presets
from gem_core.model.casts import WeightCasts
from gem_core.model.config import GemConfig
from gem_core.model.gem import Gem
from gem_core.model.loss import task_loss
from gem_core.testing.models import random_batch
from gem_parallel.bench import recompute as bench
from gem_parallel.plan.budget import Option, best_uniform, choose
from gem_parallel.plan.cluster import load_cluster
from gem_parallel.plan.command import workload_of
from gem_parallel.plan.search import Space, plan
from gem_parallel.plan.simulate import simulate
from gem_parallel.plan.workload import Workload, measure, sample
from gem_parallel.recompute import recompute

H200 = Path(__file__).parents[3] / "docs/examples/clusters/h200-x8-host.toml"
FEATURES = presets.find("tiny").features()


def tiny(dropout: float = 0.0) -> Gem:
    torch.manual_seed(0)
    options = presets.preset("tiny")
    return Gem(GemConfig.model_validate({**options, "dropout": dropout, "sequence": {**options["sequence"], "dropout": dropout}}), FEATURES)


def gradients(model: Gem, autocast: bool = False) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients of one batch, and bytes saved by its forward."""
    batch = random_batch(FEATURES, 16, lengths=[0, 1, 30, 7] * 4)
    kept: dict[int, torch.Tensor] = {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    model.train()
    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = task_loss(model(batch), batch)
    size = sum(t.untyped_storage().nbytes() for t in kept.values())
    loss.backward()
    found = {n: p.grad.to_dense() if p.grad.is_sparse else p.grad for n, p in model.named_parameters() if p.grad is not None}
    return found, size


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    "patterns", [("layers.*.blocks.*.attention",), ("layers.*.blocks.*.pffn", "layers.1.pools.*"), ("layers.*",), ("layers.0.interaction",)]
)
def test_gradients_are_the_same_and_less_is_saved(patterns: tuple[str, ...], autocast: bool, dropout: float) -> None:
    plain, size = gradients(tiny(dropout), autocast)
    model = tiny(dropout)
    names = recompute(model, patterns)
    again, less = gradients(model, autocast)
    assert names
    assert plain.keys() == again.keys()
    for name in plain:
        assert torch.equal(plain[name], again[name]), name
    assert less < size


def test_inner_modules_of_a_recomputed_one_are_left_alone() -> None:
    assert recompute(tiny(), ("layers.0", "layers.0.blocks.*", "layers.1.pools.*")) == ["layers.0", "layers.1.pools.history"]


def test_evaluation_recomputes_nothing() -> None:
    model = tiny().eval()
    batch = random_batch(FEATURES, 4)

    def logits() -> list[torch.Tensor]:
        with torch.no_grad():
            plain = model(batch).logits
        return [plain, model(batch).logits.detach()]

    before = logits()
    recompute(model, ("layers.*",))
    assert all(torch.equal(a, b) for a, b in zip(logits(), before))


def test_a_pattern_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"no module is called 'layer\.0'"):
        recompute(tiny(), ("layer.0",))


groups_of_options = st.lists(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), min_size=1, max_size=4), min_size=1, max_size=5
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(groups_of_options, st.integers(1, 200))
def test_the_knapsack_is_optimal_and_never_worse_than_uniform(groups: list[list[Option]], budget: int) -> None:
    picks = choose(groups, budget)
    answers = [
        sum(g[i][1] for g, i in zip(groups, some))
        for some in itertools.product(*(range(len(g)) for g in groups))
        if sum(g[i][0] for g, i in zip(groups, some)) <= budget * (1 - len(groups) / 4096)
    ]
    uniform = best_uniform(groups, budget)
    if picks is None:
        assert uniform is None
        assert not answers
        return
    ours = sum(g[i][1] for g, i in zip(groups, picks))
    assert sum(g[i][0] for g, i in zip(groups, picks)) <= budget
    if answers:
        assert ours <= min(answers)
    if uniform is not None:
        assert ours <= sum(g[i][1] for g, i in zip(groups, uniform))


def workload(batch: int) -> Workload:
    config = config_from_dict({"data": {"batch_size": batch}, "model": {"preset": "tiny"}})
    resolved, features = resolve(config), source_features(config)
    pool, ids = sample(resolved.config, resolved, features, 64)
    return measure("tiny", resolved, features, pool, ids)


def test_choices_of_a_layer_save_what_a_real_pass_saves() -> None:
    config = config_from_dict({"data": {"batch_size": 16}, "model": {"preset": "tiny"}})
    resolved, features = resolve(config), source_features(config)
    pool, ids = sample(resolved.config, resolved, features, 64)
    unit = measure("tiny", resolved, features, pool, ids).units[1]
    options = {choice.regions: choice for choice in unit.choices}
    assert len(options) == 7
    batch, length = 32, 40

    def saved(patterns: tuple[str, ...]) -> int:
        torch.manual_seed(0)
        model = Gem(GemConfig.model_validate(presets.preset("tiny")), features)
        if patterns:
            recompute(model, patterns)
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        kept: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.untyped_storage().data_ptr() not in own:
                kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model.train()(random_batch(features, batch, lengths=[length] * batch))
        return sum(t.untyped_storage().nbytes() for t in kept.values())

    whole = saved(())
    for regions, choice in options.items():
        real = whole - saved(tuple(f"layers.0.{region}" for region in regions))
        ours = (unit.saved - choice.saved).bytes(batch, batch * length)
        # The hooks do not see the inputs that a recomputed region keeps, which the plan counts.
        assert ours <= real * 1.02
        assert ours >= 0.5 * real


def test_levels_trade_memory_for_time_and_are_used_where_nothing_else_fits() -> None:
    work = workload(1024)
    place = load_cluster(H200)
    space = Space.build(work, place, 1)
    sizes = [sum(u.saved.bytes(work.batch, space.events) for u in level.workload.units) for level in space.levels]
    times = [sum(t.forward + t.backward for t in level.times) for level in space.levels]
    assert len(space.levels) > 2
    assert sizes == sorted(sizes, reverse=True)
    assert times == sorted(times)
    assert space.levels[0].modules == ()
    # what the last layer makes again is there at the peak
    last = max(name.split(".")[1] for level in space.levels for name in level.modules)
    assert int(last) < len(work.units) - 3
    free = plan(space).runnable
    assert free.recomputed == ()
    least = min(space.memory(free.dense, free.sparse, i).bytes for i in range(len(space.levels)))
    memory_gb = (free.memory.bytes + least) / 2e9
    tight = place.model_copy(update={"gpu": place.gpu.model_copy(update={"memory_gb": memory_gb})})
    found = plan(Space.build(work, tight, 1)).runnable
    assert found.recomputed
    assert found.memory.bytes <= memory_gb * 1e9
    assert found.seconds > free.seconds
    level = space.levels[found.level].workload
    simulated = simulate(level, place, found.dense, found.sparse, lengths=space.lengths)
    assert simulated.seconds == pytest.approx(found.seconds, rel=1e-6)


def test_bounds_of_the_search_count_what_is_recomputed() -> None:
    work, place = workload(1024), load_cluster(H200)
    roomy = Space.build(work, place, 2)
    sizes = [roomy.peaks(level).max() for level in (0, len(roomy.levels) - 1)]
    memory_gb = float(sum(sizes)) / 2e9
    space = Space.build(work, place.model_copy(update={"gpu": place.gpu.model_copy(update={"memory_gb": memory_gb})}), 2)
    first = space.first_level()
    assert (first > 0).sum() > 0.3 * first.size
    bounds = space.bounds(first)
    quick, spared = plan(space), space.evaluated
    space.evaluated = 0
    full = plan(space, exhaustive=True)
    assert quick.best.seconds == full.best.seconds
    assert quick.best.recomputed == full.best.recomputed
    assert spared < space.evaluated
    for i, j in itertools.product(range(0, first.shape[0], 2), range(0, first.shape[1], 3)):
        if first[i, j] >= 0:
            found = space.estimate(space.dense[i], space.sparse[j], int(first[i, j])).seconds
            assert bounds[0, i, j] <= found
            if first[i, j] > 0:
                assert bounds[1, i, j] > space.compute  # which is the time without recomputation


def test_a_planned_run_recomputes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "my.toml"
    file.write_text(
        '[run]\ndevice = "cpu"\n[data]\nbatch_size = 32\n[data.synthetic]\nrows = 128\neval_rows = 32\ntest_rows = 32\n'
        '[model]\npreset = "tiny"\n[train]\nsteps = 2\ntensorboard = false\n'
    )
    space = Space.build(workload_of(load_config(file), "my", None, 4096), load_cluster(H200), 1, sparse=["local"])
    free = plan(space).runnable
    least = min(space.memory(free.dense, free.sparse, i).bytes for i in range(len(space.levels)))
    memory_gb = (free.memory.bytes + least) / 2e9
    cluster = tmp_path / "small.toml"
    cluster.write_text(H200.read_text().replace("memory_gb = 150.1", f"memory_gb = {memory_gb}"))
    out = tmp_path / "plan.json"
    assert main(["plan", str(file), "--cluster", str(cluster), "--world", "1", "--sparse", "local", "--json", str(out)]) == 0
    assert json.loads(out.read_text())["train"]["callbacks"]["recompute"]["modules"]
    assert "recomputed in backward" in capsys.readouterr().out
    assert main(["train", str(out), "--run-dir", str(tmp_path / "run"), "--quiet"]) == 0


class Costs:
    """Stands in for a GPU: a step's time and peak follow from the modules that recompute; pooling costs nearly nothing and frees a lot, and
    what the last layer makes again is there at the peak. ``uneven``: what it costs that layers differ, which no profile shows."""

    gain: ClassVar = {"attention": 4 << 30, "pffn": 2 << 30, "pools": 3 << 30}
    cost: ClassVar = {"attention": 8.0, "pffn": 6.0, "pools": 0.5}
    uneven = 0.0

    def __init__(self) -> None:
        self.parts = SimpleNamespace(model=tiny())
        self.modules: list[str] = []

    def apply(self, modules: list[str]) -> None:
        self.modules = modules

    def gradients(self) -> dict[str, torch.Tensor]:
        return {"w": torch.ones(3)}

    def measure(self, steps: int, warmup: int) -> tuple[float, int]:
        kinds = [(next(k for k in self.gain if k in name), name.startswith("layers.1")) for name in self.modules]
        first, second = ({k for k, last in kinds if last == which} for which in (False, True))
        ms = 100.0 + sum(self.cost[k] for k, _ in kinds) + self.uneven * (first != second)
        return ms, (60 << 30) - sum(self.gain[k] for k, last in kinds if not last)


def test_what_is_picked_by_return_is_never_worse_than_a_uniform_budget() -> None:
    """The last layer recomputes nothing, which frees as much and costs half."""
    (found,) = bench.run(Costs(), 1, 0, 1, lambda line: None)  # type: ignore[arg-type]
    assert found["gradients"] == [{"parameters": "same", "off when repeated": 0.0, "off recomputed": 0.0}]
    assert len(found["uniform"]) == 8
    for row in found["uniform"]:
        assert row["picked GiB"] <= row["peak GiB"]
        assert row["picked ms"] <= 100 + (row["step ms"] - 100) / 2, row
    assert any(row["on the front"] for row in found["proposed"])
    assert not any(row["on the front"] for row in found["uniform"] if row["recomputed"] != "nothing")


def test_a_uniform_budget_is_picked_where_proposals_are_slower() -> None:
    costs = Costs()
    costs.uneven = 40.0
    (found,) = bench.run(costs, 1, 0, 1, lambda line: None)  # type: ignore[arg-type]
    for row in found["uniform"]:
        assert row["picked ms"] == row["step ms"] or "x 2" in row["picked at that peak"], row
        assert row["picked ms"] <= row["step ms"], row
    assert any(row["picked at that peak"] == row["recomputed"] for row in found["uniform"][1:])


def test_the_benchmark_leaves_what_a_recipe_put_in_the_place_of_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "TrainStep", lambda *_: SimpleNamespace(set_lr=lambda factor: None))
    model, asked = tiny(), []
    own = model.forward
    model.forward = lambda batch: (asked.append(1), own(batch))[1]  # type: ignore[method-assign]
    built = bench.Bench(SimpleNamespace(model=model, module=model), None, SimpleNamespace(device=torch.device("cpu")), [])  # type: ignore[arg-type]
    for modules in (["layers.0.interaction"], []):
        built.apply(modules)
        model(random_batch(FEATURES, 4))
        assert ("forward" in model.layers[0].interaction.__dict__) == bool(modules)
    assert len(asked) == 2


class Rounded(torch.nn.Module):
    """Reads its weight in whatever dtype it is there."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight.float()).sin()


@pytest.mark.parametrize("kept", [0, 1 << 30])
def test_weights_that_were_cast_are_cast_when_made_again(kept: int) -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(Rounded(), Rounded()), torch.randn(4, 8)
    model.train()
    casts = WeightCasts(lambda: [(part, "weight") for part in model], torch.bfloat16)
    copies = [k.copy for k in casts.keep(kept)]
    found = []
    for patterns in ((), ("0", "1")):
        if patterns:
            recompute(model, patterns)
        with casts.swapped():
            loss = model(x).square().sum()
        loss.backward()
        read = copies or list(model.parameters())
        found.append([p.grad.clone() for p in read])
        for p in (*read, *model.parameters()):
            p.grad = None
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert all(isinstance(part.weight, torch.nn.Parameter) for part in model)
