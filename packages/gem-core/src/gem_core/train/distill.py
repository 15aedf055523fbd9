"""Learning from a larger model's predictions (external distillation, ExFM, arXiv 2502.17494): ``[train.distill]``.

A teacher's probability of each task arrives as a column. Beside the serving heads stands an auxiliary head on the same input, the trunk's
state; it exists in training only, and nothing of it is exported or used in prediction. With ``y`` the teacher's probability and ``l`` the
label of a sample::

    head:     z = MLP(scale(trunk, beta)),  w · BCE(z₁, clip(alpha · y, 0, 1))  +  w · BCE(z₂, stop(a))
    adapter:  a = sigmoid(logit(y) + MLP(logit(y) of all tasks)),  BCE(a, l)

The auxiliary head learns from every sample, a masked label's too: the teacher predicts a conversion also where nobody clicked. The adapter
corrects a teacher that was trained on other or older data to the fresh labels that there are; it starts as the identity. What reaches
what:

- the serving heads learn from labels alone, and labels reach the auxiliary head only through the adapter's output;
- the auxiliary head's gradient reaches the trunk times ``beta`` (0: not at all), and never the serving heads or the adapter;
- the adapter's own loss reaches the adapter alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gem_core.batch import Batch
from gem_core.config import Config, Features
from gem_core.config.schema import Distill
from gem_core.errors import ConfigError, DataError
from gem_core.model.base import RankingModel
from gem_core.model.heads import TaskHeads
from gem_core.model.layers import Mlp
from gem_core.model.loss import batch_total, label_weights, sample_weights
from gem_core.sources.contract import Source, Wrapped


class _Scaled(torch.autograd.Function):
    """Identity, whose gradient is multiplied by ``factor``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


class Distillation(nn.Module):
    """The auxiliary head and the adapter, for ``tasks`` in this order on a trunk of ``width``. Called with the batch after the model's
    serving heads were: gives the loss, a mean over the batch's samples as auxiliary losses are."""

    def __init__(self, width: int, tasks: tuple[str, ...], config: Distill) -> None:
        super().__init__()
        self.config = config
        self.tasks = [task for task in tasks if task in config.teacher]
        self.places = [tasks.index(task) for task in self.tasks]
        self.columns = [config.teacher[task] for task in self.tasks]
        self.outputs = 2 if config.adapter else 1
        # "heads": recipes leave modules of this name in fp32
        self.heads = TaskHeads(Mlp(width, (*config.hidden, self.outputs), activation="silu") for _ in self.tasks)
        self.adapter = Mlp(len(self.tasks), (*config.adapter_hidden, len(self.tasks)), activation="silu") if config.adapter else None
        if self.adapter is not None:
            last = [m for m in self.adapter.modules() if isinstance(m, nn.Linear)][-1]
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)
        self._trunk: Tensor | None = None

    def see(self, heads: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Forward pre-hook of the model's serving heads."""
        if heads.training:
            self._trunk = inputs[0]

    def forward(self, batch: Batch) -> Tensor:
        trunk, self._trunk = self._trunk, None
        assert trunk is not None
        c, total = self.config, torch.as_tensor(batch_total(batch), dtype=torch.float32, device=trunk.device)
        weights, labelled = sample_weights(batch)[:, self.places], label_weights(batch)[:, self.places]
        teacher = torch.stack([batch.columns[name] for name in self.columns], 1).float()
        z = self.heads(_Scaled.apply(trunk.flatten(1).float(), c.beta)).view(batch.size, len(self.tasks), self.outputs)  # type: ignore[no-untyped-call]
        loss = (c.weight * _bce(z[:, :, 0], (c.alpha * teacher).clamp(0, 1)) * weights).sum()
        if self.adapter is not None:
            logits = torch.logit(teacher, eps=1e-6)
            adapted = logits + self.adapter(logits)
            assert batch.labels is not None
            labels = torch.where(labelled > 0, batch.labels[:, self.places].float(), 0.0)
            second = c.weight * _bce(z[:, :, 1], torch.sigmoid(adapted.detach()))
            loss = loss + (_bce(adapted, labels) * labelled).sum() + (second * weights).sum()
        return loss / total.clamp(min=torch.finfo(torch.float32).tiny)


def _bce(logits: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits.float(), target, reduction="none")


def attach(model: nn.Module, config: Config) -> None:
    """Give ``model`` the auxiliary head that ``[train.distill]`` asks for, as its part ``distillation``; nothing without the section.

    :raises ConfigError: a teacher for a task that is not there, or a model without serving heads of its own.
    """
    distill = _checked(config)
    if distill is None:
        return
    heads = getattr(model, "heads", None)
    if not isinstance(model, RankingModel) or not isinstance(heads, nn.Module):
        raise ConfigError(
            f"the model {config.model.name!r} has no serving heads for an auxiliary one to stand beside",
            where=config.origin.where(("model", "name")),
            fix="distil into a model that scores samples, or remove [train.distill]",
        )
    # Everything else begins as it would without a teacher.
    with torch.random.fork_rng():
        model.distillation = part = Distillation(_width(heads), model.task_names, distill)
    heads.register_forward_pre_hook(part.see)


def _width(heads: nn.Module) -> int:
    own = getattr(heads, "input_width", None)
    return int(own) if own is not None else next(m.in_features for m in heads.modules() if isinstance(m, nn.Linear))


def taught(config: Config) -> Features:
    """The features of the training split: with the teacher's columns carried along.

    :raises ConfigError: a teacher for a task that is not there.
    """
    distill, features = _checked(config), config.features
    if distill is None:
        return features
    return features.model_copy(update={"columns": tuple(dict.fromkeys((*features.columns, *distill.teacher.values())))})


def _checked(config: Config) -> Distill | None:
    distill = config.train.distill
    if distill is not None and not distill.teacher:
        raise ConfigError(
            "nothing says where the teacher's predictions are",
            where=config.origin.where(("train", "distill")),
            fix='set train.distill.teacher = { TASK = "column" }, or train by gemrec distill, which writes them',
        )
    unknown = sorted(set(distill.teacher) - set(config.features.labels)) if distill is not None else []
    if unknown:
        raise ConfigError(
            f"there is no task {unknown[0]!r} to teach",
            where=config.origin.where(("train", "distill", "teacher")),
            fix=f"the tasks are: {', '.join(config.features.labels) or 'none'}",
        )
    return distill


class Taught(Wrapped):
    """A training source whose batches hold the teacher's probabilities.

    :raises DataError: one is missing, not a number, or outside [0, 1].
    """

    def __init__(self, source: Source, teacher: Mapping[str, str]) -> None:
        super().__init__(source)
        self.teacher = teacher

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.source:
            for task, name in self.teacher.items():
                values = batch.columns[name]
                wrong = ~((values >= 0) & (values <= 1))
                if bool(wrong.any()):
                    raise DataError(
                        f"the teacher's prediction {float(values[wrong][0])} is no probability",
                        where=f"train.distill.teacher.{task}: column {name!r}",
                        fix="write it with 'gemrec predict' (TASK_probability), for every row",
                    )
            yield batch
