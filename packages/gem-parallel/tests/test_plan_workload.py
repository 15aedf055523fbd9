"""What the planner reads off a model, against the model itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

from gem_core.config import config_from_dict, resolve, source_features
from gem_core.errors import ConfigError
from gem_core.model import presets
from gem_core.model.config import GemConfig
from gem_core.model.gem import Gem
from gem_core.plugins import manager
from gem_core.testing.models import random_batch
from gem_core.train.contract import RecipeContext
from gem_parallel.plan.activations import _Launches
from gem_parallel.plan.cluster import load_cluster
from gem_parallel.plan.command import configuration, workload_of
from gem_parallel.plan.program import compute_times, typical
from gem_parallel.plan.workload import Workload, measure, sample, signature

TINY = {"data": {"batch_size": 32}, "model": {"preset": "tiny"}}
CLUSTERS = Path(__file__).parents[3] / "docs/examples/clusters"


def workload(over: dict | None = None, lengths: dict | None = None) -> tuple[Workload, Gem]:
    config = config_from_dict({**TINY, **(over or {})})
    resolved = resolve(config)
    features = source_features(config)
    pool, ids = sample(resolved.config, resolved, features, 128)
    with torch.device("meta"):
        model = Gem(resolved.model, features)
    return measure("tiny", resolved, features, lengths or pool, ids), model


def test_units_hold_all_parameters_and_flops() -> None:
    work, model = workload()
    tables = {id(p) for p in model.tables.parameters()}
    assert work.parameters == sum(p.numel() for p in model.parameters() if id(p) not in tables)
    assert [u.name for u in work.units] == ["front", *(f"layer {i}" for i in range(model.config.layers)), "heads"]
    lengths = {n: torch.from_numpy(v) for n, v in work.lengths.items()}
    size = next(iter(lengths.values())).numel()
    counted = model.count_flops(lengths, size)
    assert work.flops() == pytest.approx(counted.training * work.batch / size, rel=3e-3)
    parts = work.part_flops()
    for part, forward in counted.parts.items():
        assert parts[part][0] == pytest.approx(forward * work.batch / size, rel=3e-3)
        assert sum(parts[part]) == pytest.approx(counted.by_part_training[part] * work.batch / size, rel=3e-3)


def test_experts_are_told_apart_from_the_rest_of_their_layer() -> None:
    work, model = workload({"model": {"preset": "small"}})
    for unit, layer in zip(work.units[1:-1], model.layers):
        assert unit.experts is not None
        assert unit.experts.count == 2 == work.experts
        experts = layer.interaction.experts
        assert unit.experts.parameters * 2 == sum(p.numel() for p in experts.parameters())
        assert unit.total_parameters == sum(p.numel() for p in layer.parameters())
        assert unit.experts.elements_in == (layer.own + layer.pooled) * model.config.dim
        assert unit.experts.elements_out == layer.interaction.tokens * model.config.dim
        assert unit.experts.work["interaction"].gemm.constant > 0


@pytest.mark.parametrize("preset", ["base", "base-window", "large"])
def test_presets_have_their_published_counts(preset: str) -> None:
    work = workload_of(
        configuration(preset, ["data.batch_size=8"]), preset, 'law="lognormal", mean=500, sigma=1.0, zero=0.0, max=4096', 256
    )
    counts = presets.counts(preset, 64)
    assert work.parameters == counts.dense_total
    assert sum(t.rows * t.dim for t in work.tables) == counts.sparse
    assert {t.bags for t in work.tables} == {1}
    assert sum(t.event_ids > 100 for t in work.tables) == 4


@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
def test_saved_bytes_are_those_of_a_real_forward_pass(recipe: str) -> None:
    if recipe not in {spec.name for spec in manager().offers("recipe")}:
        pytest.skip(f"no installed package offers the recipe {recipe}")
    config = config_from_dict({**TINY, "precision": {"recipe": recipe}})
    resolved, features = resolve(config), source_features(config)
    pool, ids = sample(resolved.config, resolved, features, 64)
    work = measure("tiny", resolved, features, pool, ids)
    model = Gem(GemConfig.model_validate(presets.preset("tiny")), features)
    manager().find("recipe", recipe).apply(model, resolved.recipe, RecipeContext(torch.device("cpu"), compile=False))
    batch, length = 48, 30
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(random_batch(features, batch, lengths=[length] * batch))
    real = sum(t.untyped_storage().nbytes() for p, t in kept.items() if p not in parameters)
    ours = sum(u.saved.bytes(batch, batch * length) + u.saved.fixed for u in work.units)
    assert ours == pytest.approx(real, rel=0.03)


def test_launches_are_those_of_real_passes() -> None:
    config = config_from_dict(TINY)
    resolved, features = resolve(config), source_features(config)
    pool, ids = sample(resolved.config, resolved, features, 64)
    work = measure("tiny", resolved, features, pool, ids)
    model = Gem(GemConfig.model_validate(presets.preset("tiny")), features)
    batch, counter = random_batch(features, 48, lengths=[30] * 48), _Launches()
    hook = model.tables.register_forward_pre_hook(lambda *_: counter.place.__setitem__(1, "tables"))
    after = model.tables.register_forward_hook(lambda *_: counter.place.__setitem__(1, ""))
    with counter:
        results = model(batch)
        counter.place[:] = ["backward", ""]
        torch.autograd.backward([t.sum() for t in tree_leaves(vars(results)) if isinstance(t, torch.Tensor) and t.requires_grad])
    hook.remove()
    after.remove()
    forward, tables, backward = (counter.counts[at] for at in (("front", ""), ("front", "tables"), ("backward", "")))
    assert backward > forward
    # layers of one kind are counted once and stand for all, so that shares of the backward pass are not exactly those of the real one
    assert work.launches == pytest.approx(forward * (1 + backward / (forward + tables)), rel=0.05)
    assert work.units[1].launches > work.units[-1].launches > 0


def test_layers_that_differ_are_measured_apart() -> None:
    work, model = workload({"model": {"preset": "tiny", "sequence": {"attention": ["causal", "window"], "window": 4}}})
    assert signature(model.layers[0]) != signature(model.layers[1])
    first, second = work.units[1], work.units[2]
    history = next(iter(work.lengths))
    long = {history: np.full((1, 1), int(work.lengths[history].max()))}
    ratio = first.work["attention"].attention.over(long) / second.work["attention"].attention.over(long)
    assert ratio.item() > 5


def test_times_follow_lengths_and_rates() -> None:
    work, _ = workload()
    place = load_cluster(CLUSTERS / "h200-x8-host.toml")
    history = next(iter(work.lengths))
    lengths = {history: np.full((3, 32), 10)}
    lengths[history][1] = 40
    times = compute_times(work, place, lengths)
    at, worst = typical(times, 3)
    assert at == 1
    assert worst[1].forward == times[1].forward[1] > times[1].forward[0] == times[1].forward[2]
    part = work.units[-1].work["heads"].gemm.constant * 32
    assert times[-1].forward[0] == pytest.approx(part / (67e12 * place.gpu.in_step * place.local_mfu("heads", work.width)))
    assert times[-1].backward[0] == pytest.approx(
        2 * part / (67e12 * place.gpu.in_step * place.local_mfu("heads", work.width, backward=True))
    )


def test_ids_are_counted_from_the_data() -> None:
    config = config_from_dict(TINY)
    resolved, features = resolve(config), source_features(config)
    lengths, ids = sample(resolved.config, resolved, features, 128)
    assert set(lengths) == set(features.sequences)
    assert {key for key in ids if key.startswith("sparse.")} == {f"sparse.{name}" for name in features.sparse}
    work = measure("tiny", resolved, features, lengths, {**ids, "sparse.item": 3.0})
    item = next(t for t in work.tables if t.name == "item")
    assert item.pooled_ids == 3.0
    assert item.event_ids == pytest.approx(lengths["history"].mean())


@pytest.mark.parametrize("name", ["din", "wukong", "dlrm"])
def test_other_models_are_one_unit(name: str) -> None:
    config = config_from_dict({"data": {"batch_size": 16}, "model": {"name": name}})
    resolved, features = resolve(config), source_features(config)
    pool, ids = sample(resolved.config, resolved, features, 32)
    work = measure(name, resolved, features, pool, ids)
    assert work.parameters > 0
    assert work.flops() > 0
    assert sum(u.saved.bytes(16, 16 * 30) for u in work.units) > 0


@pytest.mark.parametrize("path", sorted(CLUSTERS.glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_cluster_files_load(path: Path) -> None:
    place = load_cluster(path)
    assert place.gpus == np.prod([tier.size for tier in place.tiers])
    assert place.gpu.usable > 1e11


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("bandwidth_gbs = 302", "bandwith_gbs = 302", "did you mean"),
        ("memory_gb = 150.1", "memory_gb = -1", "gpu.memory_gb = -1"),
        ("reserved_gb = 3.0", "reserved_gb = 300", "leaves nothing"),
        ("attention = 0.53", "attention = 37", r"share of the peak lies in \(0, 1\]"),
        ("default = 0.14", "other = 0.05", "needs a 'default'"),
        ("[[tiers]]", "[[tires]]", "tiers"),
        ("size = 8", "size = 0", "size"),
        ("[gpu]", "[gpu", "not valid TOML"),
    ],
)
def test_bad_cluster_files_end_in_clear_errors(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = (CLUSTERS / "h200-x8-host.toml").read_text()
    assert old in text
    file = tmp_path / "cluster.toml"
    file.write_text(text.replace(old, new))
    with pytest.raises(ConfigError, match=message) as fault:
        load_cluster(file)
    assert "cluster.toml" in str(fault.value)


def test_missing_peak_and_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_cluster(tmp_path / "none.toml")
    file = tmp_path / "cluster.toml"
    file.write_text((CLUSTERS / "h200-x8-host.toml").read_text().replace("fp32 = 67", ""))
    with pytest.raises(ConfigError, match="states no fp32 peak"):
        load_cluster(file).flops("fp32")


CURVE = """
[gpu.width]
reference = 32
at = [16, 32, 128]
[gpu.width.speed]
heads = [0.5, 1.0, 3.0]
"""


def test_rates_follow_the_width_of_the_model(tmp_path: Path) -> None:
    """In the logarithm of the width, as at the ends beyond them, and no other part's."""
    file = tmp_path / "cluster.toml"
    text = (CLUSTERS / "b200-3-tier.toml").read_text()
    file.write_text(text + CURVE)
    plain, place = load_cluster(CLUSTERS / "b200-3-tier.toml"), load_cluster(file)
    assert place.gpu.width is not None
    for width, factor in ((0, 1), (8, 0.5), (16, 0.5), (32, 1), (64, 2), (128, 3), (512, 3)):
        assert place.local_mfu("heads", width) == pytest.approx(plain.local_mfu("heads") * factor)
        assert place.local_mfu("pffn", width) == plain.local_mfu("pffn")
    assert [place.gpu.width.beyond(w) for w in (0, 8, 16, 32, 64, 512)] == [False, True, False, False, False, True]
    work, _ = workload()
    assert work.width == 32
    lengths = {name: np.full((1, 32), 10) for name in work.lengths}
    for width, factor in ((32, 1), (128, 3)):
        of = [compute_times(replace(work, width=width), c, lengths)[-1] for c in (plain, place)]
        assert of[0].forward / of[1].forward == pytest.approx(factor)
        assert of[0].backward / of[1].backward == pytest.approx(factor)
    for old, new, message in (
        ("at = [16, 32, 128]", "at = [32, 16, 128]", "ascending"),
        ("[0.5, 1.0, 3.0]", "[1.0]", "each of the 3 widths"),
        ("at = [16, 32, 128]\n[gpu.width.speed]\nheads = [0.5, 1.0, 3.0]", "[gpu.width.speed]\nheads = []", "each of the 0 widths"),
    ):
        file.write_text(text + CURVE.replace(old, new))
        with pytest.raises(ConfigError, match=message):
            load_cluster(file)


def test_dealt_batches_cost_alike_and_have_the_same_mean() -> None:
    lengths = np.exp(np.random.default_rng(0).normal(size=4096) + 5).astype(np.int64)
    work = Workload("w", "fp32", 64, (), (), {"h": lengths, "g": 2 * lengths})
    plain, dealt = (replace(work, dealt=n).draw(400, 1) for n in (1, 16))
    assert dealt["h"].shape == plain["h"].shape == (400, 64)
    assert (dealt["g"] == 2 * dealt["h"]).all()
    sums = [d["h"].sum(1) for d in (plain, dealt)]
    assert sums[1].mean() == pytest.approx(sums[0].mean(), rel=0.02)
    assert sums[1].std() < 0.4 * sums[0].std()
