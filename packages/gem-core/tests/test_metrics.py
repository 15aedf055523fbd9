"""Metrics against loops over pairs and sums written independently of them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_core.batch import Batch, SparseGroup
from gem_core.errors import DataError, PluginError
from gem_core.jagged import Jagged
from gem_core.metrics import Metric, Predictions, Value, builtin_specs
from gem_core.metrics.collect import MetricSet, group_key
from gem_core.metrics.rank import Auc, BinnedAuc

SPECS = {s.name: s for s in builtin_specs()}


def rows(logit, label, weight=None, group=None, truth=None, task="ctr"):
    logit = torch.tensor(logit, dtype=torch.float64)
    return Predictions(
        task,
        logit,
        torch.sigmoid(logit),
        torch.tensor(label, dtype=torch.float64),
        torch.ones_like(logit) if weight is None else torch.tensor(weight, dtype=torch.float64),
        None if group is None else torch.tensor(group),
        None if truth is None else torch.tensor(truth, dtype=torch.float64),
    )


def value(name, *parts):
    metric = SPECS[name].build(None)
    for part in parts:
        metric.update(part)
    return metric.compute()


def pair_auc(logit, label, weight):
    won = total = 0.0
    for si, yi, wi in zip(logit, label, weight):
        for sj, yj, wj in zip(logit, label, weight):
            pair = wi * yi * wj * (1 - yj)
            total += pair
            won += pair * (1.0 if si > sj else 0.5 if si == sj else 0.0)
    return won / total if total else None


samples = st.lists(
    st.tuples(
        st.sampled_from([-3.0, -1.5, -0.5, 0.0, 0.25, 2.0]),  # few values: many ties
        st.sampled_from([0.0, 1.0]),
        st.floats(0.1, 5.0),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=30,
)


@given(samples)
@settings(max_examples=60, deadline=None)
def test_auc_and_gauc_equal_the_loop_over_pairs(data):
    logit, label, weight, group = map(list, zip(*data))
    part = rows(logit, label, weight, group)
    expected = pair_auc(logit, label, weight)
    got = value("auc", part)
    if expected is None:
        assert got.value is None
        assert "no evaluated row has a" in got.reason
    else:
        assert got.value == pytest.approx(expected, abs=1e-12)

    per_group = {}
    for g in set(group):
        pick = [i for i, k in enumerate(group) if k == g]
        auc = pair_auc([logit[i] for i in pick], [label[i] for i in pick], [weight[i] for i in pick])
        if auc is not None:
            per_group[g] = (sum(weight[i] for i in pick), auc)
    got = value("gauc", part)
    if per_group:
        expected = sum(w * a for w, a in per_group.values()) / sum(w for w, _ in per_group.values())
        assert got.value == pytest.approx(expected, abs=1e-12)
        assert got.details == {"groups": len(per_group), "one_class_groups": len(set(group)) - len(per_group)}
    else:
        assert got.value is None
        assert "groups" in got.reason


@given(samples, st.integers(0, 30))
@settings(max_examples=60, deadline=None)
def test_sums_equal_their_definitions_and_merging_equals_pooling(data, cut):
    logit, label, weight, group = map(list, zip(*data))
    truth = [0.05 + 0.9 * (i % 7) / 7 for i in range(len(logit))]
    p = [1 / (1 + math.exp(-z)) for z in logit]
    entropy = [-(y * math.log(q) + (1 - y) * math.log(1 - q)) for y, q in zip(label, p)]
    bayes = [-(y * math.log(q) + (1 - y) * math.log(1 - q)) for y, q in zip(label, truth)]
    w, wy = sum(weight), sum(a * y for a, y in zip(weight, label))
    wce, wbayes = (sum(a * e for a, e in zip(weight, es)) for es in (entropy, bayes))
    expected = {"logloss": wce / w}
    if wy > 0:
        expected["calibration"] = sum(a * q for a, q in zip(weight, p)) / wy
    if 0 < wy < w:
        r = wy / w
        base = -(wy * math.log(r) + (w - wy) * math.log(1 - r))
        expected |= {"ne": wce / base, "bayes_ne": wbayes / base}
    for name in ("logloss", "calibration", "ne", "bayes_ne"):
        got = value(name, rows(logit, label, weight, truth=truth)).value
        assert got == (pytest.approx(expected[name], rel=1e-10) if name in expected else None)

    cut = min(cut, len(logit))
    for name, spec in SPECS.items():
        whole, merged, other = (spec.build(None) for _ in range(3))
        whole.update(rows(logit, label, weight, group, truth))
        for metric, part in ((merged, slice(0, cut)), (other, slice(cut, None))):
            if logit[part]:
                metric.update(rows(logit[part], label[part], weight[part], group[part], truth[part]))
        merged.merge(other.state())
        a, b = whole.compute(), merged.compute()
        assert (a.value is None) == (b.value is None), name
        if a.value is not None:
            assert b.value == pytest.approx(a.value, rel=1e-9), name
        assert a.reason == b.reason


def test_predicting_the_base_rate_gives_one_and_logits_beyond_double_stay_finite():
    labels = [1.0, 0.0, 0.0, 0.0]
    z = math.log(0.25 / 0.75)
    assert value("ne", rows([z] * 4, labels)).value == pytest.approx(1.0, abs=1e-12)
    got = value("ne", rows([-1e4, 1e4, 0.0, 0.0], labels)).value
    assert math.isfinite(got)
    assert got > 1


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_one_class_is_undefined_with_the_reason(label):
    part = rows([0.3, -0.2], [label, label], group=[1, 1], truth=[0.2, 0.3])
    for name in ("ne", "bayes_ne", "auc", "auc_binned", "gauc", "average_precision"):
        got = value(name, part)
        assert got.value is None, name
        assert got.reason, name
    assert value("logloss", part).value is not None
    assert (value("calibration", part).value is None) == (label == 0.0)


def test_no_rows_is_undefined():
    for name in SPECS:
        got = value(name)
        assert got.value is None, name
        assert got.reason, name


def test_auc_separates_logits_whose_probabilities_round_to_one():
    part = rows([40.0, 50.0], [0.0, 1.0])
    assert part.probability[0] == part.probability[1]
    assert value("auc", part).value == 1.0


def test_soft_labels_count_as_both_classes():
    assert value("auc", rows([0.0, 1.0], [0.25, 0.75])).value == pytest.approx(pair_auc([0.0, 1.0], [0.25, 0.75], [1.0, 1.0]))


def test_binned_auc_is_within_its_own_error_bound():
    torch.manual_seed(0)
    logit = torch.randn(4000)
    label = (torch.rand(4000) < torch.sigmoid(logit)).double()
    part = Predictions("ctr", logit, torch.sigmoid(logit.double()), label, torch.rand(4000).double() + 0.1)
    exact, fine, coarse = Auc(), BinnedAuc(), BinnedAuc(bins=32)
    for metric in (exact, fine, coarse):
        metric.update(part)
    truth = exact.compute().value
    for metric in (fine, coarse):
        got = metric.compute()
        assert abs(got.value - truth) <= got.details["error_bound"] + 1e-12
    assert abs(fine.compute().value - truth) < 1e-5


def test_auc_equals_torchmetrics_where_it_has_no_weights():
    from torchmetrics.functional.classification import binary_auroc, binary_average_precision

    torch.manual_seed(1)
    logit = torch.randn(500).double().round(decimals=1)
    label = (torch.rand(500) < 0.3).double()
    part = Predictions("ctr", logit, torch.sigmoid(logit), label, torch.ones(500).double())
    assert value("auc", part).value == pytest.approx(float(binary_auroc(torch.sigmoid(logit), label.long())), abs=1e-7)
    assert value("average_precision", part).value == pytest.approx(float(binary_average_precision(torch.sigmoid(logit), label.long())))


def test_torchmetrics_metrics_refuse_weights_instead_of_dropping_them():
    got = value("average_precision", rows([0.0, 1.0], [0.0, 1.0], [1.0, 2.0]))
    assert got.value is None
    assert "weights" in got.reason


def batch(labels, mask=None, weights=None, **columns):
    labels = torch.tensor(labels)
    return Batch(
        size=len(labels),
        labels=labels,
        label_names=("ctr", "cvr"),
        label_mask=None if mask is None else torch.tensor(mask),
        weights=None if weights is None else torch.tensor(weights),
        columns={k: torch.tensor(v) for k, v in columns.items()},
    )


def metric_set(*names, group=None, tasks=("ctr", "cvr")):
    return MetricSet(tasks, {n: (lambda n=n: SPECS[n].build(None)) for n in names}, group)


def test_masked_rows_zero_weights_and_task_order():
    b = batch(
        [[1.0, 1.0], [0.0, 0.0], [1.0, 0.0], [0.0, 1.0]],
        mask=[[True, True], [True, False], [True, True], [True, True]],
        weights=[[1.0, 1.0], [2.0, 9.0], [0.0, 1.0], [1.0, 0.0]],
    )
    logits = torch.tensor([[5.0, 1.0], [float("nan"), 2.0], [5.0, 3.0], [5.0, 4.0]])  # columns: cvr, ctr
    found = metric_set("auc", "logloss")
    found.update(b, logits, ("cvr", "ctr"))
    results = found.compute()
    ctr = pair_auc([1.0, 2.0, 4.0], [1.0, 0.0, 0.0], [1.0, 2.0, 1.0])
    assert results["ctr"]["auc"].value == pytest.approx(ctr)
    # the NaN is in a masked row of cvr, and the rows of weight 0 are no rows: two cvr rows stay, equal logits
    assert results["cvr"]["auc"].value == 0.5
    assert found.samples == 4


def test_a_non_finite_prediction_makes_the_task_undefined_and_says_how_many():
    found = metric_set("ne", "auc")
    found.update(batch([[1.0, 1.0], [0.0, 0.0]]), torch.tensor([[1.0, 1.0], [float("inf"), 0.0]]), ("ctr", "cvr"))
    results = found.compute()
    assert results["ctr"]["ne"].value is None
    assert results["ctr"]["ne"].reason == "1 of the predictions are not finite"
    assert results["cvr"]["auc"].value == 1.0


def test_a_task_without_label_or_prediction_is_named():
    with pytest.raises(DataError, match="'like' has no label"):
        metric_set("auc", tasks=("ctr", "like")).update(batch([[1.0, 1.0]]), torch.zeros(1, 2), ("ctr", "like"))
    with pytest.raises(DataError, match="'cvr' has no prediction"):
        metric_set("auc").update(batch([[1.0, 1.0]]), torch.zeros(1, 1), ("ctr",))


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_a_sample_that_cannot_count_is_refused_instead_of_left_out(bad):
    logits = torch.zeros(2, 2)
    with pytest.raises(DataError, match="weight that is negative or not finite"):
        metric_set("logloss").update(batch([[1.0, 1.0], [0.0, 0.0]], weights=[1.0, bad]), logits, ("ctr", "cvr"))
    unknown = [[1.0, bad], [0.0, 0.0]]
    with pytest.raises(DataError, match=r"label outside \[0, 1\]\n.*features.labels.cvr"):
        metric_set("logloss").update(batch(unknown), logits, ("ctr", "cvr"))
    masked = metric_set("logloss")
    masked.update(batch(unknown, mask=[[True, False], [True, True]]), logits, ("ctr", "cvr"))
    assert masked.compute()["cvr"]["logloss"].value == pytest.approx(math.log(2))


def test_merge_adds_other_ranks():
    parts = [batch([[1.0, 1.0], [0.0, 0.0]], user=[1, 1]), batch([[0.0, 1.0], [1.0, 0.0]], user=[2, 2])]
    logits = [torch.tensor([[0.1, 0.2], [0.4, 0.3]]), torch.tensor([[0.2, 0.5], [0.3, 0.1]])]
    ranks = [metric_set(*SPECS, group="user") for _ in parts]
    whole = metric_set(*SPECS, group="user")
    for r, b, z in zip(ranks, parts, logits):
        r.update(b, z, ("ctr", "cvr"))
        whole.update(b, z, ("ctr", "cvr"))
    sent = []  # what rank 1 would send, in the order of rank 0's questions
    ranks[1].merge(lambda t: sent.append(t.clone()) or [])
    answers = iter(sent)
    ranks[0].merge(lambda t: [next(answers)])
    assert ranks[0].samples == 4
    for task, metrics in whole.compute().items():
        for name, expected in metrics.items():
            got = ranks[0].compute()[task][name]
            assert got.value == (None if expected.value is None else pytest.approx(expected.value)), (task, name)


def test_group_key_takes_a_column_or_a_single_valued_feature():
    sparse = SparseGroup.from_jagged(
        {
            "user": Jagged.from_lengths(torch.tensor([7, 8]), torch.tensor([1, 1])),
            "tags": Jagged.from_lengths(torch.tensor([1, 2, 3]), torch.tensor([2, 1])),
        }
    )
    b = Batch(size=2, sparse=sparse, columns={"day": torch.tensor([3, 4]), "user": torch.tensor([7, 8])})
    assert group_key(b, "day").tolist() == [3, 4]
    assert group_key(b, "user").tolist() == [7, 8]
    with pytest.raises(DataError, match="no or several ids"):
        group_key(b, "tags")
    for bad in (1.5, math.nan):
        odd = Batch(size=2, columns={"price": torch.tensor([1.0, bad])})
        with pytest.raises(DataError, match=r"'price' holds numbers that are not whole or missing(.|\n)*eval\.group"):
            group_key(odd, "price")
    with pytest.raises(DataError, match=r"it has: day, user, tags$"):
        group_key(b, "nobody")


def test_built_in_metrics_follow_the_contract():
    for spec in builtin_specs():
        metric = spec.build(None)
        assert isinstance(metric, Metric)
        assert metric.better in ("lower", "higher", "one")
        empty = {k: (v.dtype, v.shape[1:]) for k, v in metric.state().items()}
        metric.update(rows([0.0, 1.0], [0.0, 1.0], group=[0, 0], truth=[0.5, 0.5]))
        assert {k: (v.dtype, v.shape[1:]) for k, v in metric.state().items()} == empty


class Stranger:
    """What a plug-in's author may write; each test takes something away."""

    better = "higher"

    def update(self, rows):
        self.mean = float(rows.label.mean())

    def state(self):
        return {}

    def merge(self, state):
        pass

    def compute(self):
        return Value(self.mean)


def strange(**members):
    return type("Strange", (Stranger,), members)


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        (strange(better=None), "'lift' says better = None, which is none of 'lower', 'higher', 'one'"),
        (type("Half", (), {"better": "higher", "update": Stranger.update}), "'lift' lacks state, merge, compute"),
        (strange(compute=lambda self: 0.5), "'lift' computes a float, not a gem_core.metrics.Value"),
        (strange(compute=lambda self: Value(torch.ones(()))), "'lift' computes a Value of a Tensor, not of a float or None"),
    ],
)
def test_a_metric_that_breaks_the_contract_is_named(metric, words):
    with pytest.raises(PluginError, match=words) as caught:
        fed(metric)
    assert "gemrec plugins" in caught.value.fix


def fed(metric):
    metrics = MetricSet(["ctr"], {"lift": metric})
    metrics.update(batch([[0.0, 0.0], [1.0, 0.0]]), torch.zeros(2, 1), ("ctr",))
    return metrics.compute()["ctr"]["lift"].value


def test_a_fault_inside_a_metric_stays_its_own_and_names_it():
    def update(self, rows):
        raise ZeroDivisionError("mine")

    assert fed(Stranger) == 0.5
    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        fed(strange(update=update))
    assert caught.value.__notes__ == ["while the metric 'lift' of eval.metrics was computed"]
