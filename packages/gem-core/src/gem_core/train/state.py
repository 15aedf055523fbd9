"""What a checkpoint puts back: parameters, tables, random number generators, the data position."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import torch

from gem_core.errors import CheckpointError
from gem_core.plugins import manager
from gem_core.train.build import Parts
from gem_core.train.checkpoint import Checkpoint, CheckpointStore
from gem_core.train.optim import DenseAdamW
from gem_core.train.runtime import Runtime

_log = logging.getLogger(__name__)


def newest(store: CheckpointStore, runtime: Runtime) -> tuple[Checkpoint, dict[int, str]]:
    """The newest checkpoint whose files all have the content that was written, and what is wrong with newer ones, by step.

    The ranks share the reading of a checkpoint's files and agree on what is good.

    :raises CheckpointError: there is no good one.
    """
    problems = runtime.on_main(store.gone)
    for step in runtime.on_main(store.order):
        found = runtime.gather_objects(store.problem(step, (runtime.rank, runtime.world), runtime.progress))
        wrong = next((p for p in found if p is not None), None)
        if wrong is None:
            return store.load(step), problems
        problems[step] = wrong
    raise store.unusable(problems)


def opened(store: CheckpointStore, step: int | None, runtime: Runtime) -> Checkpoint:
    """The checkpoint of ``step``, or the newest good one: what is evaluated, exported or started from. Its files are held against their
    checksums; newer ones that are passed over are said.

    :raises CheckpointError: there is no such checkpoint, or it is damaged.
    """
    if step is None:
        checkpoint, damaged = newest(store, runtime)
        for other, problem in damaged.items():
            if runtime.main:
                _log.warning("checkpoint of step %d not usable: %s; step %d is taken", other, problem, checkpoint.step)
        return checkpoint
    checkpoint = store.load(step)
    found = runtime.gather_objects(store.problem(step, (runtime.rank, runtime.world), runtime.progress))
    wrong = next((p for p in found if p is not None), None)
    if wrong is not None:
        raise CheckpointError(wrong, where=str(checkpoint.path), fix=f"use another step; there are: {', '.join(map(str, store.steps()))}")
    return checkpoint


def load_parameters(parts: Parts, checkpoint: Checkpoint) -> None:
    """Parameters and buffers of the dense part, and the tables with their accumulators.

    :raises CheckpointError: the checkpoint is of another model or other tables.
    """
    checkpoint.fill("model", parts.dense_state(), "model")
    checkpoint.fill("tables", parts.table_state(), "embedding tables")
    tables_loaded(parts)


def tables_loaded(parts: Parts) -> None:
    """Tell the tables that what `Parts.table_state` gave was written to."""
    loaded = getattr(parts.tables, "state_loaded", None)
    if loaded is not None:
        loaded()


def load_optimizer(parts: Parts, dense: DenseAdamW, checkpoint: Checkpoint) -> None:
    """State of the dense optimizer.

    :raises CheckpointError: state of a parameter that the model does not have, or of another shape.
    """
    stored, known = checkpoint.shapes("optimizer"), {*parts.dense_state(), *dense.parameters}
    strange = [key for key in stored if key.rpartition(".")[0] not in known]
    if strange:
        raise CheckpointError(
            f"the optimizer state {strange[0]!r} fits no parameter of this model",
            where=str(checkpoint.path),
            fix="use the configuration that it was written with (config.toml of its run folder)",
        )
    checkpoint.fill("optimizer", dense.targets(stored), "optimizer state", partial=True)


def load_guard(parts: Parts, checkpoint: Checkpoint) -> None:
    """What the guard had decided when the checkpoint was written: a demoted site stays demoted, in evaluation too."""
    parts.guard.load_state_dict(checkpoint.state("shared")["guard"])


def rng_state(device: torch.device) -> dict[str, Any]:
    """The state of every generator that training may draw from."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }


def load_rank(checkpoint: Checkpoint, parts: Parts, runtime: Runtime) -> dict[str, Any] | None:
    """Put this rank's generators and what its guard has of its own back, and return its data position.

    With another number of ranks than before, the generators go on from new seeds, and every rank gets rank 0's position: sources tell their
    position for the whole data set, not for a rank.
    """
    same = checkpoint.meta["world"] == runtime.world
    stored = checkpoint.state(f"rank-{runtime.rank if same else 0}")
    if same:
        rng = stored["rng"]
        torch.set_rng_state(rng["torch"].clone())
        np.random.set_state(rng["numpy"])
        random.setstate(rng["python"])
        if rng["cuda"] is not None and runtime.device.type == "cuda":
            torch.cuda.set_rng_state(rng["cuda"].clone(), runtime.device)
        if stored.get("guard"):
            parts.guard.load_rank_state(stored["guard"])  # type: ignore[attr-defined]
    else:
        torch.manual_seed(torch.initial_seed() + checkpoint.step)
    position: dict[str, Any] | None = stored["feed"]
    return position


def version_changes(checkpoint: Checkpoint) -> list[str]:
    """Plug-ins that are missing, new or of another version than when the checkpoint was written."""
    before, now = checkpoint.meta.get("plugins", {}), manager().active()
    return [
        f"plug-in {name}: the checkpoint was written with {before.get(name, 'none')}, now there is {now.get(name, 'none')}"
        for name in sorted(set(before) | set(now))
        if before.get(name) != now.get(name)
    ]
