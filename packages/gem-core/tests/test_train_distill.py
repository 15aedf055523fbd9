"""Distillation: which gradient reaches what, the losses by hand, and training with a teacher's column."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import gem_core
from gem_core.config import Features, config_from_dict
from gem_core.errors import ConfigError, DataError
from gem_core.export.package import export_run
from gem_core.model.loss import label_weights, task_loss
from gem_core.model.retrieval import NextItems
from gem_core.plugins import manager
from gem_core.sources.contract import TRUE_PROBABILITY
from gem_core.sources.synthetic import SyntheticConfig, SyntheticSource, synthetic_features
from gem_core.train.distill import Taught, attach
from gem_core.train.predict import predictor

TEACHER = {task: f"{TRUE_PROBABILITY}{task}" for task in ("ctr", "cvr")}
WORLD = {"rows": 400, "eval_rows": 200, "test_rows": 10, "users": 50, "length": {"law": "lognormal", "mean": 5, "max": 30}}


def config(distill: dict | None, **sections):
    train = {"steps": 4, "tensorboard": False, "log_every": 1, **({} if distill is None else {"distill": distill})}
    data = {
        "run": {"device": "cpu", "seed": 5},
        "data": {"source": "synthetic", "batch_size": 50, "synthetic": WORLD},
        "model": {"name": "din"},
        "train": train,
        **sections,
    }
    return config_from_dict(data)


def batch_of(n: int = 64):
    world = SyntheticConfig(**WORLD)
    return next(iter(SyntheticSource(world, split="train", batch_size=n)))


def model_with(distill: dict, name: str = "din"):
    from gem_core.config import resolve

    features = synthetic_features(SyntheticConfig(**WORLD))
    made = config(
        distill, features=features.model_dump(), model={"name": name, **({"preset": "tiny", "layers": 1} if name == "gem" else {})}
    )
    torch.manual_seed(1)
    model = manager().find("model", name).build(resolve(made).model, features)
    attach(model, made)
    return model.train()


def gradients(model, batch, *, aux: bool, labels: bool = True):
    """Dense gradients by name."""
    model.zero_grad()
    output = model(batch)
    loss = task_loss(output, batch, aux=aux) if labels else sum(output.aux_losses.values())
    loss.backward()
    return {n: p.grad.to_dense().clone() for n, p in model.named_parameters() if p.grad is not None}


def split(grads):
    heads = {n for n in grads if n.startswith("heads.")}
    own = {n for n in grads if n.startswith("distillation.")}
    return heads, own, set(grads) - heads - own


@pytest.mark.parametrize("name", ["din", "gem"])
def test_the_auxiliary_gradient_reaches_the_trunk_times_beta_and_never_the_serving_heads(name: str):
    batch, found = batch_of(), {}
    for beta in (0.0, 1.0, 20.0):
        model = model_with({"teacher": TEACHER, "beta": beta, "weight": 2.0}, name)
        found[beta] = gradients(model, batch, aux=True, labels=False)
    heads, own, trunk = split(found[1.0])
    assert own
    assert trunk
    assert all(not found[beta][n].any() for beta in found for n in heads & set(found[beta]))
    assert all(not found[0.0][n].any() for n in trunk & set(found[0.0]))
    for n in trunk:
        torch.testing.assert_close(found[20.0][n], 20 * found[1.0][n], rtol=1e-4, atol=1e-7)
    for n in own:  # beta is of the trunk alone
        assert found[0.0][n].any() or n.endswith("adapter.layers.0.weight") or n.endswith("adapter.layers.0.bias")
        torch.testing.assert_close(found[20.0][n], found[1.0][n])


def test_labels_reach_the_serving_heads_as_without_a_teacher():
    batch = batch_of()
    taught = gradients(model_with({"teacher": TEACHER, "beta": 0.0}), batch, aux=True)
    alone = gradients(model_with({"teacher": TEACHER, "beta": 0.0}), batch, aux=False)
    heads, _, trunk = split(alone)
    for n in heads | trunk:
        assert torch.equal(taught[n], alone[n])
    assert not {n for n in alone if n.startswith("distillation.")}  # labels alone reach nothing of the auxiliary part


def test_what_reaches_the_adapter_is_its_own_loss():
    batch = batch_of()
    model = model_with({"teacher": TEACHER, "weight": 3.0})
    found = gradients(model, batch, aux=True, labels=False)
    part = model.distillation
    weights = label_weights(batch)
    y = torch.logit(torch.stack([batch.columns[c] for c in TEACHER.values()], 1).float(), eps=1e-6)
    model.zero_grad()
    own = F.binary_cross_entropy_with_logits(y + part.adapter(y), torch.where(weights > 0, batch.labels, 0.0), reduction="none")
    ((own * weights).sum() / batch.size).backward()
    for n, p in part.adapter.named_parameters():
        torch.testing.assert_close(found[f"distillation.adapter.{n}"], p.grad)


def test_the_losses_are_those_of_the_formulas():
    batch = batch_of()
    model = model_with({"teacher": {"ctr": TEACHER["ctr"]}, "weight": 3.0, "alpha": 5.0})
    seen = {}
    model.distillation.heads.register_forward_hook(lambda module, inputs, output: seen.update(z=output))
    loss = model(batch).aux_losses["distill"]
    y = batch.columns[TEACHER["ctr"]].float()
    label = batch.labels[:, batch.label_names.index("ctr")]
    z1, z2 = seen["z"].unbind(1)
    bce = F.binary_cross_entropy_with_logits
    adapted = torch.logit(y, eps=1e-6)  # the adapter begins as the identity
    want = 3 * bce(z1, (5 * y).clamp(0, 1)) + 3 * bce(z2, torch.sigmoid(adapted)) + bce(adapted, label)
    torch.testing.assert_close(loss, want)
    assert (5 * y > 1).any()


def test_a_rank_without_samples_adds_nothing():
    model = model_with({"teacher": TEACHER})
    found = gradients(model, batch_of().select_range(0, 0), aux=True)
    assert found
    assert not any(g.any() for g in found.values())


def test_a_masked_label_is_taught_too():
    batch = batch_of()
    model = model_with({"teacher": {"cvr": TEACHER["cvr"]}, "adapter": False})
    seen = {}
    model.distillation.heads.register_forward_hook(lambda module, inputs, output: seen.update(z=output))
    loss = model(batch).aux_losses["distill"]
    assert not batch.label_mask[:, 1].all()
    torch.testing.assert_close(loss, F.binary_cross_entropy_with_logits(seen["z"].squeeze(1), batch.columns[TEACHER["cvr"]].float()))


def test_evaluation_knows_nothing_of_the_teacher():
    batch = batch_of()
    model = model_with({"teacher": TEACHER}).eval()
    bare = gem_core.batch.replace(batch, columns={})
    output = model(bare)
    assert not output.aux_losses
    assert torch.equal(output.logits, model(batch).logits)


def test_a_run_with_a_teacher_trains_resumes_predicts_and_exports(tmp_path: Path):
    told = config({"teacher": TEACHER})
    whole = gem_core.train(told, run_dir=tmp_path / "whole", quiet=True)
    half = config({"teacher": TEACHER}).model_copy(update={"train": told.train.model_copy(update={"steps": 2})})
    gem_core.train(half, run_dir=tmp_path / "parts", quiet=True)
    resumed = gem_core.train(told, run_dir=tmp_path / "parts", resume=True, quiet=True)
    assert resumed.tasks == whole.tasks
    alone = gem_core.train(config(None), run_dir=tmp_path / "alone", quiet=True)
    assert alone.tasks != whole.tasks
    with predictor(tmp_path / "whole") as live:
        assert all(logits.isfinite().all() for _, logits in live.source("eval"))
    export_run(tmp_path / "whole", tmp_path / "package")
    assert json.loads((tmp_path / "package" / "manifest.json").read_text())["outputs"] == ["ctr", "cvr"]


@pytest.mark.parametrize(
    ("distill", "model", "what"),
    [
        ({}, "din", "nothing says where"),
        ({"teacher": {"sales": "x"}}, "din", "no task 'sales'"),
        ({"teacher": {"ctr": "absent"}}, "din", "has no 'absent'"),
    ],
)
def test_what_cannot_be_taught_is_refused(distill: dict, model: str, what: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=what):
        gem_core.train(config(distill, model={"name": model}), run_dir=tmp_path / "run", quiet=True)


@pytest.mark.parametrize("value", [float("nan"), -0.1, 1.5])
def test_a_prediction_that_is_no_probability_ends_the_run(value: float):
    batch = batch_of(8)
    batch.columns[TEACHER["ctr"]][3] = value
    with pytest.raises(DataError, match="is no probability"):
        list(Taught([batch], TEACHER))


def test_what_the_trainer_tells_a_source_reaches_the_one_inside():
    class Log:
        following, progress, on_main, partitions = 0, None, None, ("a", "b")

        def __iter__(self):
            return iter(())

    inner = Log()
    for source in (Taught(inner, TEACHER), NextItems(Taught(inner, TEACHER), Features())):
        source.following, source.progress, source.on_main = 3, len, max
        assert (inner.following, inner.progress, inner.on_main, source.following, source.partitions) == (3, len, max, 3, ("a", "b"))
        assert not hasattr(source, "hashed")
        inner.following = 0
