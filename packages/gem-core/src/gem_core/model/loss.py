"""The training loss: masked, weighted binary cross-entropy over tasks, normalised by a count given from outside."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from gem_core.batch import Batch
from gem_core.errors import BatchError
from gem_core.model.contract import ModelOutput
from gem_core.model.rows import samples_of


def sample_weights(batch: Batch) -> Tensor:
    """``[B, T]`` fp32: the weight of each sample for each label, whether that counts or not."""
    assert batch.labels is not None
    weights = torch.ones_like(batch.labels, dtype=torch.float32)
    if batch.weights is not None:
        weights = weights * (batch.weights if batch.weights.dim() == 2 else batch.weights.unsqueeze(1))
    return weights


def label_weights(batch: Batch) -> Tensor:
    """``[B, T]`` fp32: the weight of each label, 0 where the mask excludes it. Sum over samples and ranks it to normalise the loss.

    :raises BatchError: a batch without labels.
    """
    if batch.labels is None:
        raise BatchError("the batch has no labels", where="features.labels", fix="declare them, and let the source deliver them")
    weights = sample_weights(batch)
    if batch.label_mask is not None:
        weights = weights * batch.label_mask
    return weights


def task_loss(
    output: ModelOutput,
    batch: Batch,
    *,
    task_weights: Sequence[float] | Tensor | None = None,
    total: Tensor | float | None = None,
    aux: bool = True,
) -> Tensor:
    """Scalar fp32 loss ``sum_t task_weight_t * sum_b w_bt * BCE(logit_bt, label_bt) / total`` plus the auxiliary losses.

    A label that the mask excludes has weight 0, whatever its value (NaN included). ``total`` is the number (or total weight) of samples
    over all ranks and micro-batches that make one optimizer step; None: this batch's samples (the sum of ``weights [B]`` where given). One
    total for all tasks keeps a rarely labelled task, such as CVR, from being blown up. Auxiliary losses are means over this batch, and
    count by the batch's share of ``total``. An output with a ``loss`` of its own (retrieval, or a model of yours) gives that over ``total``
    in place of the sum over tasks, whose weights do not apply then.

    :raises BatchError: the labels are not those of the output's tasks.
    """
    own = batch_total(batch)
    total = own if total is None else total
    summed = _over_tasks(output, batch, task_weights) if output.loss is None else output.loss.float()
    tiny = torch.finfo(summed.dtype).tiny
    share = 1.0 / (total.to(summed.dtype).clamp(min=tiny) if isinstance(total, Tensor) else max(total, tiny))
    loss = summed * share
    if aux and output.aux_losses:
        loss = loss + sum(output.aux_losses.values()) * (own * share)
    return loss


def _over_tasks(output: ModelOutput, batch: Batch, task_weights: Sequence[float] | Tensor | None) -> Tensor:
    weights = label_weights(batch)
    labels = batch.labels
    assert labels is not None
    if tuple(batch.label_names) != output.task_names:
        raise BatchError(
            f"the batch's labels are {', '.join(batch.label_names) or 'none'}",
            where="features.labels",
            fix=f"the model predicts: {', '.join(output.task_names)}",
        )
    target = torch.where(weights > 0, labels.to(output.logits.dtype), torch.zeros((), dtype=output.logits.dtype, device=labels.device))
    losses = F.binary_cross_entropy_with_logits(output.logits, target, reduction="none") * weights
    if task_weights is not None:
        losses = losses * torch.as_tensor(task_weights, dtype=losses.dtype, device=losses.device)
    return losses.sum()


def batch_total(batch: Batch) -> Tensor | float:
    """What this batch adds to ``total``: its sample count, or the sum of ``weights [B]`` (of ``weights [B, T]``: of their means over T).

    With ``targets`` it is the number of supervised positions, each with the weight of its sample.
    """
    if batch.targets is not None:
        return target_weights(batch).sum()
    if batch.weights is None:
        return float(batch.size)
    weights = batch.weights if batch.weights.dim() == 1 else batch.weights.mean(1)
    return weights.sum(dtype=torch.float32)


def target_weights(batch: Batch) -> Tensor:
    """``[N]`` fp32: the weight of each position that ``batch.targets`` supervises, 0 where ``target_mask`` excludes it."""
    assert batch.targets is not None
    ones = torch.ones(batch.targets.shape, device=batch.targets.device)
    weights = ones if batch.target_mask is None else batch.target_mask.float()
    if batch.weights is None:
        return weights
    offsets = next(iter(batch.sequences.values())).offsets
    return weights * batch.weights[samples_of(offsets, torch.arange(weights.shape[0], device=offsets.device, dtype=offsets.dtype))]
