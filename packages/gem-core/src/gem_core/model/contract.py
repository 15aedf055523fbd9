"""What models, embedding tables and the trainer promise each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from gem_core.batch import SparseGroup
from gem_core.config.features import Features


@dataclass(frozen=True)
class TableSpec:
    """One embedding table ``[rows, dim]``."""

    name: str
    rows: int
    dim: int
    init_std: float
    dtype: Literal["fp32", "fp16", "bf16"] = "fp32"


@dataclass(frozen=True)
class Lookup:
    """One feature's read of a table. ``key`` is the key in the SparseGroup and in the result.

    ``pooling`` "sum" or "mean" gives ``[B, d]`` (zeros for an empty bag); "none" gives ``(values [N, d], offsets [B+1])``, one row an id.
    """

    key: str
    table: str
    pooling: Literal["sum", "mean", "none"]


@dataclass(frozen=True)
class TableSet:
    """All tables of a model and all reads of them: what a sparse strategy builds from."""

    tables: tuple[TableSpec, ...]
    lookups: tuple[Lookup, ...]

    def table(self, name: str) -> TableSpec:
        return next(t for t in self.tables if t.name == name)

    @property
    def parameters(self) -> int:
        return sum(t.rows * t.dim for t in self.tables)


@dataclass(frozen=True)
class TableState:
    """One table as the trainer's row-wise AdaGrad updates it: ``weight [rows, dim]``, whose ``.grad`` may be sparse (COO over the rows) or
    dense, and ``accumulator [rows]`` fp32 (a buffer)."""

    weight: nn.Parameter
    accumulator: Tensor


@dataclass(frozen=True)
class Shards:
    """What this process holds of a tensor of ``shape`` and ``dtype`` that is spread over processes.

    ``parts``: (offsets, tensor) of each box of the whole that is here; none where this process holds nothing. Two processes may hold the
    same box with equal values (one of them saves it); boxes that differ do not overlap; all boxes together cover the whole. The tensors are
    the live ones: loading a checkpoint writes into them.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[tuple[tuple[int, ...], Tensor], ...] = ()


@runtime_checkable
class Tables(Protocol):
    """A module that holds the tables: the built-in local one, or what a sparse strategy built.

    ``optimizer_in_backward`` tells the trainer that backward already updates the tables (FBGEMM's fused optimizers). Where it is False
    the module has ``table_states() -> Mapping[str, TableState]``, table name to parameter and accumulator, for the trainer to update; where
    it is True it has ``configure_optimizer(config: TableOptimizer)``, called once before training, and ``set_learning_rate(lr)``, called
    before every step. Their gradients arrive as means over the ranks (each rank's loss is multiplied by the world), and as exact zeros in
    a step that is skipped: an optimizer in backward must leave rows with zero gradients unchanged. In a captured step the look-up and its
    backward pass run outside of what is recorded, the one before it and the other after it, so that they may wait for the device.

    Methods that a strategy may have, all called on every rank alike:

    - ``prefetch(group)``: the ids of the next training batch, given after the forward pass of the current one, so that their exchange can
      overlap its backward pass (in a captured step after its look-up, before the dense part). The same object comes back as the argument
      of a later forward call; forward calls on other groups (evaluation) may come in between, and a run may end without the awaited one.
    - ``after_backward(ok) -> Tensor | None``, only where ``optimizer_in_backward``: called after the backward pass of every micro-batch
      for updates that are not part of autograd; ``ok`` is a bool scalar on the device, and where it is false nothing may change. Returns
      the squared norm of the mean gradients of all tables over all ranks (fp32 scalar), or None if it does not know.
    - ``output``, an attribute: the dtype of looked-up rows and of their gradients where it is not fp32.
    - ``state_loaded()``: called after a checkpoint, or new rows, were written into the tensors of ``state_items()``.
    - ``describe() -> Sequence[str]``: lines for the head of the run (plan, bytes a rank, what is and is not pipelined).
    """

    table_set: TableSet
    optimizer_in_backward: bool

    def __call__(self, group: SparseGroup) -> Mapping[str, Tensor | tuple[Tensor, Tensor]]: ...

    def state_items(self) -> Iterable[tuple[str, Tensor | Shards]]:
        """(canonical name, state) of weights and optimizer state: ``<table>.weight [rows, dim]``, ``<table>.accumulator [rows]`` fp32.

        Names and whole shapes do not depend on plan, mesh or world. A plain tensor is whole and equal on all ranks; a DTensor or `Shards`
        tells what is here. Every rank yields every name, a rank that holds nothing of it with `Shards` without parts.
        """


@dataclass(frozen=True)
class ModelOutput:
    """``logits [B, T]`` float in the order of ``task_names``; ``aux_losses``: further scalar losses to add, by name.

    ``loss``, in training: the sum over the batch's samples of a loss of the model's own, with the weights of `label_weights`, in place of
    the cross-entropy of the logits; the trainer divides it by the samples of all processes.

    A model of `Retrieval` has no logits (T = 0). In training it gives ``loss``, the weighted sum of its loss over the positions that
    ``Batch.targets`` supervises; in evaluation ``query [B, width]`` fp32, the state that scores the items to follow each history.
    """

    logits: Tensor
    task_names: tuple[str, ...]
    aux_losses: Mapping[str, Tensor] = field(default_factory=dict)
    loss: Tensor | None = None
    query: Tensor | None = None


@runtime_checkable
class Retrieval(Protocol):
    """What a model is beside being a module where ``[features.next_item]`` is declared: it ranks all items for each history.

    A score is ``query . item_vectors(ids)``. ``items`` is the number of ids, [0, items); ``features``: as declared.
    """

    items: int
    features: Features

    def item_vectors(self, ids: Tensor) -> Tensor:
        """``[n, width]`` fp32 of ``ids [n]`` int64. Every rank calls it with the same ids, equally often."""
