"""From a configuration to the parts of a run: mesh, model with its tables, recipe, strategy, data sources, optimizers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gem_core.batch import Batch
from gem_core.config import Config, Features, ResolvedConfig
from gem_core.config.schema import Parallel
from gem_core.doctor_run import machine_memory
from gem_core.errors import ConfigError, DataError, DeviceError
from gem_core.hookspecs import Guard
from gem_core.model.contract import Retrieval, Shards, Tables, TableSet
from gem_core.model.experts import Elsewhere
from gem_core.model.retrieval import TASK, NextItems
from gem_core.model.tables import deferred_tables
from gem_core.ops.library import tag_compiled_graphs
from gem_core.plugins import manager
from gem_core.sources.contract import Source
from gem_core.train.contract import RecipeContext
from gem_core.train.distill import Taught, attach, taught
from gem_core.train.mesh import Mesh
from gem_core.train.runtime import Runtime
from gem_core.train.shards import State


@dataclass(frozen=True)
class Parts:
    """``model`` owns the parameters; ``module`` is what is called (the model, or what the dense strategy made of it)."""

    model: nn.Module
    module: nn.Module
    tables: Tables | None
    guard: Guard
    mesh: Mesh
    dense_count: int = 0
    """Parameters of the whole dense part."""

    def dense_parameters(self) -> dict[str, nn.Parameter]:
        """Trainable parameters that belong to no table, by canonical name."""
        ours = self._table_names()
        return {name: p for name, p in self.model.named_parameters() if name not in ours and p.requires_grad}

    def dense_state(self) -> dict[str, State]:
        """Parameters and persistent buffers that belong to no table, by canonical name: the same names on every rank, without values
        where another rank holds them."""
        ours = self._table_names()
        state: dict[str, State] = {name: t for name, t in self.model.state_dict().items() if name not in ours}
        for at, part in self.model.named_modules():
            if isinstance(part, Elsewhere):
                state |= {f"{at}.{name}": Shards(tuple(t.shape), t.dtype) for name, t in part.like[0].state_dict().items()}
        return state

    def table_state(self) -> dict[str, State]:
        if self.tables is None:
            return {}
        return {name: state.detach() if isinstance(state, Tensor) else state for name, state in self.tables.state_items()}

    def buffers(self) -> list[Tensor]:
        """Persistent buffers of the dense part, which a forward pass may change (running statistics)."""
        kept = self.dense_state()
        return [b for name, b in self.model.named_buffers() if name in kept]

    def _table_names(self) -> set[str]:
        if not isinstance(self.tables, nn.Module):
            return set()
        at = next(name for name, part in self.model.named_modules() if part is self.tables)
        return {f"{at}.{name}" for name, _ in (*self.tables.named_parameters(), *self.tables.named_buffers())}

    def precisions(self) -> set[str]:
        return {precision for _, precision, _ in self.guard.describe()}

    def parameter_counts(self) -> dict[str, int]:
        table_set: TableSet | None = getattr(self.tables, "table_set", None)
        return {"dense": self.dense_count, "sparse": table_set.parameters if table_set else 0}


def build_parts(resolved: ResolvedConfig, runtime: Runtime, *, trains: bool = True) -> Parts:
    """Build the model on the device, its tables by the sparse strategy, and apply recipe, compilation and dense strategy, in this order.

    Every rank draws the same initial parameters from ``run.seed``. ``trains`` False leaves compilation and the dense strategy out.
    """
    config, find = resolved.config, manager().find
    p = config.parallel
    # A file that was written for many processes also runs in one, where every degree is 1.
    degrees = (p.replicate, p.shard, p.expert, p.model, p.replica) if runtime.world > 1 else ()
    mesh = Mesh(runtime.world, *degrees, rank=runtime.rank)  # type: ignore[misc]
    torch.manual_seed(config.run.seed)
    with torch.device(runtime.device):
        with deferred_tables():
            model = find("model", config.model.name).build(resolved.model, config.features)
            attach(model, config)
        table_set: TableSet | None = getattr(model, "table_set", None)
        if table_set is not None and table_set.tables:
            if runtime.device.type == "cpu" and (runtime.world == 1 or p.sparse == Parallel.model_fields["sparse"].default):
                check_room(table_set, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
            model.tables = find("sparse_strategy", p.sparse).build(table_set, mesh, resolved.sparse)
    if config.features.next_item is not None and not isinstance(model, Retrieval):
        raise ConfigError(
            f"the model {config.model.name!r} does not predict the next item",
            where=config.origin.where(("model", "name")),
            fix="choose one that does (gem, hstu, sasrec), or remove [features.next_item]",
        )
    model.to(runtime.device)
    tables = model.tables if table_set is not None and table_set.tables else None
    context = RecipeContext(runtime.device, compile=config.train.compile)
    guard = find("recipe", config.precision.recipe).apply(model, resolved.recipe, context)
    whole = Parts(model, model, tables, guard, mesh)
    output = str(getattr(tables, "output", torch.float32)).removeprefix("torch.")
    if output != "float32" and whole.precisions() <= {"fp32"}:
        raise ConfigError(
            f"the tables give rows in {output}, and the recipe {config.precision.recipe!r} computes in fp32",
            where=f"parallel.{p.sparse}",
            fix='choose a recipe that computes in lower precision (precision.recipe = "bf16", say), or fp32 rows',
        )
    count = sum(p.numel() for name, p in model.named_parameters() if name not in whole._table_names())
    module = model
    if trains:
        if config.train.compile:
            if isinstance(tables, nn.Module):
                # look-ups stay eager: sparse gradients and fused table optimizers do not go through the compiler
                tables.forward = torch.compiler.disable(tables.forward)  # type: ignore[no-untyped-call]
            tag_compiled_graphs()
            for unit in compiled_units(model):
                unit.compile(dynamic=True)
        dense = find("dense_strategy", p.dense)
        if config.train.capture and dense.averages is not None:
            dense.averages(mesh)
        else:
            module = dense.build(model, mesh, resolved.dense)
    return replace(whole, module=module, dense_count=count)


def check_room(tables: TableSet, copies: int) -> None:
    """A CPU's memory is given out before it is there, and a process that then takes it is killed without a word.

    :param copies: processes of this machine that hold all tables.
    :raises DeviceError: the tables alone are larger than the machine's memory.
    """
    room = machine_memory()
    size = copies * sum(t.rows * t.dim * (4 if t.dtype == "fp32" else 2) for t in tables.tables)
    if room is None or size <= room:
        return
    widest = max(tables.tables, key=lambda t: t.rows * t.dim)
    each = f" in {copies} processes" if copies > 1 else ""
    raise DeviceError(
        f"the tables{each} take {size / 2**30:.1f} GiB, and there are {room / 2**30:.1f} GiB of memory",
        where=f"features, whose largest table is {widest.name!r} of {widest.rows:,} x {widest.dim}",
        fix="take fewer rows or a smaller dim, or spread them: `gemrec plan` says over how many devices",
    )


def compiled_units(model: nn.Module) -> list[nn.Module]:
    """What ``train.compile`` compiles: each of ``model.layers`` where a model has them, since layers alike share what is compiled, so that
    the first step of a deep model takes as long as that of a shallow one; else the whole model."""
    layers = getattr(model, "layers", None)
    return list(layers) if isinstance(layers, nn.ModuleList) and len(layers) else [model]


def build_source(resolved: ResolvedConfig, split: str, runtime: Runtime) -> Source:
    """The source of ``split`` for this rank."""
    data = resolved.config.data
    spec = manager().find("source", data.source)
    training = split == "train"
    distill = resolved.config.train.distill if training else None
    source: Source = spec.build(
        resolved.source,
        taught(resolved.config) if training else resolved.config.features,
        split=split,
        batch_size=data.batch_size if training else data.eval_batch_size or data.batch_size,
        shard=(runtime.rank, runtime.world),
        seed=resolved.config.run.seed,
        drop_last=training and data.drop_last,
    )
    if distill is not None:
        source = Taught(source, distill.teacher)
    return NextItems(source, resolved.config.features) if training and resolved.config.features.next_item else source


def present(source: Source) -> Source:
    """The source with what there is now: it ends where it would wait for more."""
    if hasattr(source, "progress"):
        source.progress = lambda: True
    return source


def hashed_of(source: Source) -> dict[str, list[str]]:
    """What the source tells of its columns of hashed ids; see `Source`."""
    return dict(getattr(source, "hashed", {}))


def tells(source: Source) -> dict[str, Any]:
    """What the source tells of its columns, as run.json keeps it."""
    return {"hashed": hashed_of(source), "lists": dict(getattr(source, "lists", {}))}


def check_hashed(source: Source, trained: Mapping[str, list[str]]) -> None:
    """:raises DataError: a column of hashed ids holds numbers where training read text, or the other way round."""
    for path, kinds in hashed_of(source).items():
        if path in trained and trained[path] != kinds:
            raise DataError(
                f"the column holds {' and '.join(kinds)}, in training {' and '.join(trained[path])}: the same id has another hash",
                where=f"features.{path}",
                fix="store it in the type of the training files",
            )


def task_names(features: Features) -> tuple[str, ...]:
    """:raises ConfigError: there is nothing to learn."""
    if features.next_item is not None:
        return (TASK,)
    if not features.labels:
        raise ConfigError("no label is declared", where="features.labels", fix="add [features.labels.NAME] for each task")
    return tuple(features.labels)


def total_steps(config: Config, source: Source, step: int = 0, epoch: int = 0) -> int | None:
    """``train.steps``, or the step that ``train.epochs`` end with where the source tells its length; else None. ``step``: of a run that
    goes on in ``epoch`` from the position that ``source`` has."""
    if config.train.steps is not None:
        return config.train.steps
    try:
        batches = len(source)  # type: ignore[arg-type]
    except TypeError:
        return None
    batches = getattr(source, "left", batches) + (config.train.epochs - epoch - 1) * batches
    return step + -(-batches // config.train.accumulate)


def agreed_total(runtime: Runtime, total: int | None) -> int | None:
    """The steps of the rank with the longest source: all ranks take equally many."""
    totals = runtime.gather_objects(total)
    return None if None in totals else max(totals)


def flops_of(model: nn.Module) -> Callable[[Batch], float] | None:
    """Model FLOPs of a training step on a host batch, where the model tells them."""
    counted: Callable[[Batch], Mapping[str, Any]] | None = getattr(model, "flops", None)
    return None if counted is None else lambda batch: float(sum(counted(batch).values()))
