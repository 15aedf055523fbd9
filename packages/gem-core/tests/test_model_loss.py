"""The masked, weighted loss and its normaliser."""

from dataclasses import replace

import pytest
import torch

from gem_core.batch import Batch
from gem_core.errors import BatchError
from gem_core.model.contract import ModelOutput
from gem_core.model.loss import batch_total, label_weights, task_loss

LOGITS = torch.tensor([[0.3, -1.0], [2.0, 0.5], [-0.7, 1.5]])
LABELS = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
MASK = torch.tensor([[True, False], [True, True], [True, True]])


def output(logits=LOGITS, **aux):
    return ModelOutput(logits, ("ctr", "cvr"), aux)


def batch(**changes):
    return Batch(**{"size": 3, "labels": LABELS, "label_names": ("ctr", "cvr"), "label_mask": MASK, **changes})


def bce(logit, label):
    return -(label * torch.sigmoid(logit).log() + (1 - label) * torch.sigmoid(-logit).log())


def test_masked_mean_over_samples():
    expected = (bce(LOGITS, LABELS) * MASK).sum() / 3
    assert torch.allclose(task_loss(output(), batch()), expected)


def test_weights_by_sample_and_by_label_and_task():
    w = torch.tensor([2.0, 0.5, 1.0])
    expected = (bce(LOGITS, LABELS) * MASK * w.unsqueeze(1) * torch.tensor([1.0, 0.25])).sum() / w.sum()
    assert torch.allclose(task_loss(output(), batch(weights=w), task_weights=[1.0, 0.25]), expected)
    per_label = torch.tensor([[1.0, 5.0], [0.5, 2.0], [1.0, 0.0]])
    expected = (bce(LOGITS, LABELS) * MASK * per_label).sum() / per_label.mean(1).sum()
    assert torch.allclose(task_loss(output(), batch(weights=per_label)), expected)


def test_parts_with_the_global_total_add_up_to_the_whole():
    whole, w = batch(weights=torch.tensor([2.0, 0.5, 1.0])), 3.5
    parts = [
        task_loss(output(LOGITS[a:b]), part, total=w) for part, a, b in ((whole.select_range(0, 1), 0, 1), (whole.select_range(1, 3), 1, 3))
    ]
    assert torch.allclose(sum(parts), task_loss(output(), whole))


def test_a_masked_label_counts_nothing_whatever_it_holds():
    labels = LABELS.clone()
    labels[0, 1] = float("nan")
    logits = LOGITS.clone().requires_grad_()
    loss = task_loss(output(logits), batch(labels=labels))
    assert torch.allclose(loss, task_loss(output(), batch()))
    loss.backward()
    assert logits.grad[0, 1] == 0
    assert torch.isfinite(logits.grad).all()
    assert label_weights(batch())[0, 1] == 0


def test_auxiliary_losses_count_by_the_batchs_share():
    extra = {"a": torch.tensor(2.0), "b": torch.tensor(0.5)}
    plain = task_loss(output(), batch())
    assert torch.allclose(task_loss(output(**extra), batch()), plain + 2.5)
    assert torch.allclose(task_loss(output(**extra), batch(), aux=False), plain)
    assert torch.allclose(task_loss(output(**extra), batch(), total=12.0), (plain + 2.5) * 3 / 12)


def test_a_loss_of_the_models_own_stands_for_the_tasks_and_keeps_auxiliary_ones():
    own = replace(output(), loss=torch.tensor(6.0))
    assert float(task_loss(own, batch(), task_weights=[9.0, 9.0])) == 6.0 / 3
    assert float(task_loss(own, batch(), total=torch.tensor(12.0))) == 6.0 / 12
    with_aux = replace(own, aux_losses={"distill": torch.tensor(2.0)})
    assert float(task_loss(with_aux, batch(), total=12.0)) == 6.0 / 12 + 2.0 * 3 / 12
    assert float(task_loss(with_aux, batch(), aux=False)) == 6.0 / 3


def test_empty_and_weightless_batches_give_zero():
    empty = Batch(size=0, labels=LABELS[:0], label_names=("ctr", "cvr"))
    assert float(task_loss(output(LOGITS[:0]), empty)) == 0
    assert float(task_loss(output(), batch(weights=torch.zeros(3)))) == 0
    assert batch_total(empty) == 0


def test_labels_that_do_not_fit_are_refused():
    with pytest.raises(BatchError, match="the batch's labels are cvr, ctr"):
        task_loss(output(), batch(label_names=("cvr", "ctr")))
    with pytest.raises(BatchError, match="has no labels"):
        task_loss(output(), Batch(size=3))
