"""The synthetic source: conformance, and that the planted structure is what the quick start promises."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from gem_core.config.features import Dense, Features, Label, Sparse
from gem_core.errors import ConfigError, DataError
from gem_core.sources.laws import LognormalLaw, UniformLaw
from gem_core.sources.planted import MEMORY, PlantedLog
from gem_core.sources.synthetic import SPEC, SyntheticConfig, SyntheticSource, synthetic_features
from gem_core.testing.sources import assert_same_batch, source_checks

SMALL = SyntheticConfig(rows=211, eval_rows=60, test_rows=51, users=40)


def build(config=SMALL, features=None, **how):
    how = {"split": "train", "batch_size": 64, **how}
    return SPEC.build(config, features or Features(), **how)


@pytest.mark.parametrize("check", source_checks(synthetic_features(SMALL)), ids=lambda c: c.__name__)
def test_conformance(check):
    check(build)


@pytest.fixture(scope="module")
def log():
    return PlantedLog(SyntheticConfig())


@pytest.fixture(scope="module")
def held_out(log):
    config = SyntheticConfig()
    return log.samples(np.arange(config.rows, config.total))


def normalized_entropy(truth, predicted):
    """Expected NE of a prediction when the click probabilities are known."""
    rate = truth.mean()
    cross = -(truth * np.log(predicted) + (1 - truth) * np.log(1 - predicted)).mean()
    return cross / -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))


def explained(held_out, predicted):
    """Share of the explainable entropy that a prediction explains."""
    truth = held_out.p_click
    return (1 - normalized_entropy(truth, predicted)) / (1 - normalized_entropy(truth, truth))


def test_bayes_ne_of_the_held_out_part(held_out):
    assert normalized_entropy(held_out.p_click, held_out.p_click) <= 0.78
    y = held_out.click.astype(float)
    rate = y.mean()
    base = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    drawn = -(y * np.log(held_out.p_click) + (1 - y) * np.log(1 - held_out.p_click)).mean() / base
    assert drawn <= 0.80


def test_rates_are_those_asked_for(held_out):
    assert 0.03 <= held_out.p_click.mean() <= 0.10
    assert abs(held_out.click.mean() - held_out.p_click.mean()) < 4 * (0.08 / held_out.click.size) ** 0.5
    clicked = held_out.click
    assert abs(held_out.p_conversion[clicked].mean() - 0.15) < 0.03
    assert abs(held_out.conversion[clicked].mean() - held_out.p_conversion[clicked].mean()) < 4 * (0.15 / clicked.sum()) ** 0.5
    assert not held_out.conversion[~clicked].any()


@pytest.mark.parametrize("ctr", [0.03, 0.10])
def test_click_rate_follows_the_option(ctr):
    config = SyntheticConfig(ctr=ctr, length=UniformLaw(max=40, sparsity=0.5))
    assert abs(PlantedLog(config).samples(np.arange(0, config.total, 16)).p_click.mean() - ctr) < 0.15 * ctr


def test_most_of_the_signal_is_in_the_history(held_out):
    """Even the best function of the whole context logit explains little; the history is needed for the rest."""
    order = np.argsort(held_out.context_logit)
    best = np.empty_like(held_out.p_click)
    for part in np.array_split(order, 400):
        best[part] = held_out.p_click[part].mean()
    assert 0.2 < explained(held_out, best) <= 0.45


def test_logistic_regression_without_the_history(log, held_out):
    """One-hot ids and dense features, trained on 100,000 samples by L-BFGS, explain at most half."""
    train = log.samples(np.arange(0, 400_000, 4))
    features = synthetic_features(SyntheticConfig())

    def model(samples):
        z = torch.stack([torch.from_numpy(samples.dense[n]).float() for n in features.dense], 1) @ weights[1:] + weights[0]
        return z + sum(table[torch.from_numpy(samples.sparse[name])] for table, name in zip(tables, features.sparse))

    tables = [torch.zeros(features.rows_of(f"sparse.{n}"), requires_grad=True) for n in features.sparse]
    weights = torch.zeros(1 + len(features.dense), requires_grad=True)
    optimizer = torch.optim.LBFGS([weights, *tables], max_iter=60, line_search_fn="strong_wolfe")
    target = torch.from_numpy(train.click).float()

    def closure():
        optimizer.zero_grad()
        penalty = sum((t**2).sum() for t in tables) / (2 * target.numel())
        loss = binary_cross_entropy_with_logits(model(train), target) + penalty
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        predicted = torch.sigmoid(model(held_out)).double().numpy()
    assert 0.15 < explained(held_out, predicted) <= 0.5


def test_history_lengths(log):
    lengths = np.diff(log.samples(np.arange(0, 480_000, 4)).events.offsets)
    assert 0.05 < (lengths == 0).mean() < 0.12
    assert 15 < lengths.mean() < 60
    assert lengths.max() > 1000
    assert lengths.max() <= 4096


def test_histories_are_those_of_a_log(log):
    """Times never decrease, lie before the impression, and a later history of a user continues an earlier one."""
    samples = log.samples(np.arange(0, 400_000, 40))
    events = samples.events
    row = np.repeat(np.arange(samples.index.size), np.diff(events.offsets))
    assert (events.time <= samples.time[row]).all()
    inside = row[1:] == row[:-1]
    assert (np.diff(events.time)[inside] >= 0).all()
    assert (np.diff(samples.time) >= 0).all()
    user = np.bincount(samples.user).argmax()
    mine = np.flatnonzero(samples.user == user)
    first, last = ([(i, t) for i, t in zip(events.item[a:b], events.time[a:b])] for a, b in
                   ((events.offsets[r], events.offsets[r + 1]) for r in (mine[0], mine[-1])))  # fmt: skip
    assert len(last) >= len(first) > 0
    assert last[: len(first)] == first


def test_planted_logit_reads_the_newest_events_only(log):
    """The documented window: the history logit recomputed from the last MEMORY events alone is the same."""
    samples = log.samples(np.arange(0, 300_000, 300))
    cut = SyntheticConfig(length=LognormalLaw(max=4096))
    assert (np.diff(samples.events.offsets) > MEMORY).any()
    n, events = samples.index.size, samples.events
    kept = np.minimum(np.diff(events.offsets), MEMORY)
    at = np.concatenate([np.arange(b - k, b) for b, k in zip(events.offsets[1:], kept)])
    short = type(events)(np.concatenate([[0], np.cumsum(kept)]), *(getattr(events, f)[at] for f in ("item", "category", "action", "time")))
    a = PlantedLog(cut)._read_history(events, samples.sparse["item"], samples.sparse["category"])
    b = PlantedLog(cut)._read_history(short, samples.sparse["item"], samples.sparse["category"])
    assert all(x.shape == (n,) and np.array_equal(x, y) for x, y in zip(a, b))


def test_any_sample_can_be_made_alone(log):
    whole = log.samples(np.arange(1000, 1050))
    for i in (0, 17, 49):
        one = log.samples(np.array([1000 + i]))
        assert one.p_click[0] == whole.p_click[i]
        a, b = whole.events.offsets[i : i + 2]
        assert np.array_equal(one.events.item, whole.events.item[a:b])


def test_the_log_is_pinned():
    """The same bytes on every machine: ids and labels of the first samples of seed 7."""
    samples = PlantedLog(SyntheticConfig()).samples(np.arange(2000))
    assert samples.sparse["item"][:8].tolist() == PINNED_ITEMS
    assert int(samples.click.sum()) == PINNED_CLICKS
    assert int(samples.events.offsets[-1]) == PINNED_EVENTS


PINNED_ITEMS = [131, 178, 591, 584, 450, 614, 6, 728]
PINNED_CLICKS, PINNED_EVENTS = 181, 48_837


def test_another_seed_is_another_log():
    a, b = (next(iter(build(SMALL.model_copy(update={"seed": s}), split="eval"))) for s in (7, 8))
    assert not torch.equal(a.sparse.values, b.sparse.values)


def test_truth_is_carried_and_labels_are_masked():
    batch = next(iter(build()))
    assert batch.label_names == ("ctr", "cvr")
    assert batch.label_mask[:, 0].all()
    assert torch.equal(batch.label_mask[:, 1], batch.labels[:, 0].bool())
    p = batch.columns["true_probability.ctr"]
    assert p.dtype == torch.float64
    assert ((p > 0) & (p < 1)).all()


def test_features_may_be_a_part_of_the_logs_own():
    own = synthetic_features(SMALL)
    part = Features(
        dense={"price": Dense(mean=1.0, std=2.0)},
        sparse={"which": Sparse(column="advertiser", rows=200)},
        labels={"ctr": Label(column="click")},
    )
    full, cut = next(iter(build())), next(iter(build(features=part)))
    assert torch.equal(cut.sparse["which"].values, full.sparse["advertiser"].values)
    assert torch.allclose(cut.dense[:, 0], (full.dense[:, 0] - 1) / 2)
    assert not cut.sequences
    assert cut.label_names == ("ctr",)
    assert_same_batch(full, next(iter(build(features=own))))


def test_a_shorter_history_keeps_the_newest_events():
    own = synthetic_features(SMALL)
    short = own.model_copy(update={"sequences": {"history": own.sequences["history"].model_copy(update={"max_length": 5})}})
    full, cut = (next(iter(build(features=f))).sequences["history"] for f in (own, short))
    assert int(cut.lengths.max()) == 5
    for whole, kept in zip(full.jagged("item").to_list(), cut.jagged("item").to_list()):
        assert torch.equal(whole[-5:], kept)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (Features(sparse={"colour": Sparse(rows=3)}), "no 'colour'"),
        (Features(sparse={"item": Sparse(rows=3)}), "rows = 768"),
        (Features(filter="position == 0", sparse={"item": Sparse(rows=768)}), "no filter"),
        (Features(columns=("zip",), sparse={"item": Sparse(rows=768)}), "no 'zip'"),
    ],
)
def test_features_that_the_log_lacks(features, message):
    with pytest.raises(ConfigError, match=message):
        build(features=features)


def test_unknown_split():
    with pytest.raises(ConfigError, match="train, eval, test"):
        build(split="valid")


def test_state_of_another_log_is_refused():
    source = build()
    next(iter(source))
    other = build(SMALL.model_copy(update={"seed": 8}))
    with pytest.raises(ConfigError, match="another synthetic log"):
        other.load_state_dict(source.state_dict())
    state = source.state_dict()
    state["total"] = 99
    with pytest.raises(DataError, match="99 samples"):
        build().load_state_dict(state)


def test_speed():
    """At least 50,000 samples a second on one core, in CPU time so that a busy machine does not matter."""
    source = SyntheticSource(SyntheticConfig(), batch_size=512)
    iterator = iter(source)
    next(iterator)
    start, rows = time.process_time(), 0
    for batch in iterator:
        rows += len(batch)
        if rows > 40_000:
            break
    assert rows / (time.process_time() - start) > 50_000
