"""What models, embedding tables and the trainer promise each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor, nn

from gem_core.batch import SparseGroup


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


@runtime_checkable
class Tables(Protocol):
    """A module that holds the tables: the built-in local one, or what a sparse strategy built.

    ``optimizer_in_backward`` tells the trainer that backward already updates the tables (FBGEMM's fused optimizers). Where it is False
    the module has ``table_states() -> Mapping[str, TableState]``, table name to parameter and accumulator, for the trainer to update; where
    it is True it has ``configure_optimizer(config: TableOptimizer)``, called once before training, and ``set_learning_rate(lr)``, called
    before every step. Their gradients arrive as means over the ranks (each rank's loss is multiplied by the world), and as exact zeros in
    a step that is skipped: an optimizer in backward must leave rows with zero gradients unchanged.
    """

    table_set: TableSet
    optimizer_in_backward: bool

    def __call__(self, group: SparseGroup) -> Mapping[str, Tensor | tuple[Tensor, Tensor]]: ...

    def state_items(self) -> Iterable[tuple[str, Tensor]]:
        """(canonical name, tensor) of weights and optimizer state: ``<table>.weight``, ``<table>.accumulator``."""


@dataclass(frozen=True)
class ModelOutput:
    """``logits [B, T]`` float in the order of ``task_names``; ``aux_losses``: further scalar losses to add, by name."""

    logits: Tensor
    task_names: tuple[str, ...]
    aux_losses: Mapping[str, Tensor] = field(default_factory=dict)
