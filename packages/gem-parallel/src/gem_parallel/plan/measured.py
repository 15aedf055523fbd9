"""Predictions beside measured steps: a JSON list with one object a measurement, or a result of `gemrec bench train`.

Each has ``world``, ``step_s`` and, where known, ``peak_memory_bytes``; ``parallel`` is the ``[parallel]`` section it ran with,
``batch_size`` its samples a GPU, ``capture`` says whether the step was a graph, and ``dealt`` to how many batches samples were dealt by
length (1: none), where they differ from the configuration's. Rows of a ladder ran with the configuration, the ladder's own settings and
theirs, one over the other.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import Field

from gem_core.config import Config, FrozenConfig, config_from_dict, load_config, resolve
from gem_core.config.base import merged
from gem_core.config.explain import Origin, validate
from gem_core.config.load import plain
from gem_core.errors import ConfigError
from gem_parallel.plan.budget import matching
from gem_parallel.plan.cluster import Cluster
from gem_parallel.plan.fixed import RECOMPUTE, Fixed
from gem_parallel.plan.grid import Table
from gem_parallel.plan.search import Estimate, Space
from gem_parallel.plan.settings import from_parallel, widths
from gem_parallel.plan.workload import Workload, dealt


class Measurement(FrozenConfig):
    """One measured run."""

    world: int = Field(gt=0)
    step_s: float = Field(gt=0, description="median step")
    peak_memory_bytes: float | None = Field(None, gt=0)
    batch_size: int | None = Field(None, gt=0)
    capture: bool | None = None
    dealt: int | None = Field(None, gt=0)
    parallel: dict[str, Any] = Field(default_factory=dict)
    settings: dict[str, Any] = Field(default_factory=dict, description="what was set over the configuration, section by section")


@dataclass(frozen=True)
class Comparison:
    measured: Measurement
    predicted: Estimate
    captured: bool = False

    @property
    def time_error(self) -> float:
        """Predicted over measured step, less 1."""
        return self.predicted.seconds / self.measured.step_s - 1

    @property
    def predicted_bytes(self) -> float:
        """Without what the allocator does not count: what the context and the communication library hold, and memory that peers read."""
        memory = self.predicted.memory
        return memory.bytes - memory.at_peak["buffers"] - memory.outside

    @property
    def memory_error(self) -> float | None:
        peak = self.measured.peak_memory_bytes
        return None if peak is None else self.predicted_bytes / peak - 1


def load_measurements(path: Path) -> list[Measurement]:
    """A list of measurements, or the rows without errors of what `gemrec bench train` wrote.

    :raises ConfigError: no such file, no JSON list, or a row with a wrong key or value.
    """
    fix = 'write [{"world": 4, "step_s": 0.12, "parallel": {...}}], or name the JSON file of gemrec bench train'
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except OSError as fault:
        raise ConfigError(f"the measurements cannot be read: {fault.strerror}", where=str(path), fix=fix) from None
    except ValueError as fault:
        raise ConfigError(f"the measurements are not valid JSON: {fault}", where=str(path), fix=fix) from None
    if isinstance(rows, dict) and "ladder" in rows:
        try:
            rows = [_of_ladder(row, rows.get("overrides", [])) for row in rows["rows"] if "error" not in row]
        except (KeyError, TypeError):
            rows = None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ConfigError("measurements are a JSON list of objects", where=str(path), fix=fix)
    return [validate(Measurement, row, (str(i),), Origin(str(path))) for i, row in enumerate(rows)]


def _of_ladder(row: dict[str, Any], common: list[str]) -> dict[str, Any]:
    peak = row["peak_memory_bytes"]
    if row.get("repeated_windows") == 0 and "train.capture=true" in row["overrides"]:
        # every timed step was replayed, and what graphs use is not counted as allocated then, but as reserved
        peak = row.get("reserved_memory_bytes", peak)
    return {
        "world": row["gpus"],
        "step_s": row["step_ms"] * 1e-3,
        "peak_memory_bytes": peak - row.get("held_before_bytes", 0),
        "batch_size": row["batch_size"],
        "settings": load_config(None, [*common, *row["overrides"]]).model_dump(exclude_unset=True),
    }


def local_rates(path: Path, workload: Workload, cluster: Cluster) -> tuple[Cluster, str]:
    """``cluster`` with the local MFU of each part that ``gemrec bench local`` measured (its JSON file), which a step is taken to keep
    (``in_step`` of 1); other parts are as fast as before. And what to tell the user: that the measured parts did other work than the
    workload's, or nothing.

    :raises ConfigError: no such result, or one of another kind of GPU.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        rows = {str(row["part"]): (row["forward_ms"] * 1e-3, row["total_ms"] * 1e-3, row["tflops"] * 1e12) for row in result["parts"]}
        device = str(result["device"])
        samples = int(result["samples"])
    except (OSError, ValueError, KeyError, TypeError) as fault:
        what = fault.strerror if isinstance(fault, OSError) else "not its JSON"
        raise ConfigError(f"no result of `gemrec bench local`: {what}", where=str(path), fix="pass its local-PRESET.json") from None
    if cluster.gpu.name not in device.replace("-", " ").split():
        raise ConfigError(
            f"the parts were measured on {device!r}, and the cluster file describes {cluster.gpu.name!r}",
            where=str(path),
            fix="measure on the GPU of the cluster file, or correct gpu.name",
        )
    peak, flops = cluster.flops(workload.recipe), workload.part_flops()
    mfu, in_step = cluster.gpu.mfu, cluster.gpu.in_step
    forward, backward = ({part: rate * in_step for part, rate in rates.items()} for rates in (mfu.forward, mfu.backward))
    did = dict.fromkeys(rows, 0.0)
    for part, (ahead, whole, rate) in rows.items():
        there, back = flops.get(part, (0.0, 0.0))
        if there and back and whole > ahead > 0:
            # as the file's rates are: at the reference width
            share = cluster.local_mfu(part, workload.width) / mfu.of(part)
            forward[part] = min(1.0, rate * whole * there / (there + back) / ahead / peak) / share
            backward[part] = min(1.0, rate * whole * back / (there + back) / (whole - ahead) / peak) / share
            did[part] = rate * whole / samples / ((there + back) / workload.batch)
    rates = mfu.model_copy(update={"forward": forward, "backward": backward})
    other = [part for part, ratio in did.items() if ratio and not 0.67 < ratio < 1.5]
    note = f"{path} was measured on another model: a sample of it has {did[other[0]]:.2g} x the FLOPs in {other[0]!r}." if other else ""
    return cluster.model_copy(update={"gpu": cluster.gpu.model_copy(update={"mfu": rates, "in_step": 1.0})}), note


def rates_note(workload: Workload, cluster: Cluster) -> str:
    """That the rates of the parts are taken at a width at which nobody measured them, with what to do; empty where they are known."""
    width = cluster.gpu.width
    if width is None or not width.beyond(workload.width):
        return ""
    return (
        f"Rates of parts are those of events {width.reference} wide, and this model's are {workload.width} wide"
        + (f" (measured up to {width.at[-1]})" if width.speed and workload.width > width.reference else "")
        + ": the step may be predicted by a third too slow or too fast. Measure `gemrec bench local` on one GPU and pass --local."
    )


def compare(config: Config, workload: Workload, cluster: Cluster, measurements: list[Measurement]) -> list[Comparison]:
    """Predict every measured run as it was configured.

    :raises ConfigError: a row that ran under another recipe than the workload was measured with.
    """
    found = []
    for i, row in enumerate(measurements):
        data = merged(plain(config), row.settings)
        if row.parallel:
            data["parallel"] = row.parallel
        ran = config_from_dict(data)
        if ran.precision.recipe != config.precision.recipe:
            raise ConfigError(
                f"row {i + 1} ran under the recipe {ran.precision.recipe!r}, the plan is made under {config.precision.recipe!r}",
                where="--measured",
                fix=f"pass --set precision.recipe={ran.precision.recipe}",
            )
        own = replace(workload, captured=ran.train.capture if row.capture is None else row.capture)
        if row.batch_size is not None:
            own = own.with_batch(row.batch_size)
        if row.dealt is not None or row.settings.get("data"):
            own = replace(own, dealt=row.dealt or dealt(resolve(ran).source))
        found.append(Comparison(row, given(ran, own, cluster, row.world)[1], own.captured))
    return found


def given(config: Config, workload: Workload, cluster: Cluster, world: int) -> tuple[Space, Estimate]:
    """The estimate of a configuration's own ``[parallel]`` section; where it leaves the cut of tables open, the fastest one's."""
    resolved = resolve(config)
    dense, choices = from_parallel(config, resolved.dense, resolved.sparse, workload, world)
    same: dict[str, Any] = {}
    if (kind := getattr(resolved.dense, "param_dtype", None)) is not None:
        same[f"parallel.{config.parallel.dense}.param_dtype"] = kind
    modules = config.train.callbacks.get("recompute", {}).get("modules", ())
    if modules and matching(workload.units, modules) is not None:
        same[RECOMPUTE] = modules
    space = Space.build(workload, cluster, world, widths=widths(config, workload), fixed=Fixed(same))
    return space, min((space.estimate(dense, sparse) for sparse in choices), key=lambda e: e.seconds)


def comparison_table(rows: list[Comparison]) -> Table:
    table = Table(
        "GPUs",
        "arrangement",
        "measured ms",
        "predicted ms",
        "error",
        "measured GB",
        "predicted GB",
        "error",
        title="Against measured steps",
    )
    for row in rows:
        dense, sparse = row.predicted.dense, row.predicted.sparse
        axes = ", ".join(f"{a} {d}" for a, d in (*dense.degrees().items(), *sparse.degrees().items()) if d > 1)
        peak, error = row.measured.peak_memory_bytes, row.memory_error
        graph = ", captured" if row.captured else ""
        table.add_row(
            str(row.measured.world), f"{dense.strategy}, {sparse.strategy}: {axes or 'one GPU'}{graph}", f"{row.measured.step_s * 1e3:.1f}",
            f"{row.predicted.seconds * 1e3:.1f}", f"{row.time_error:+.1%}", "-" if peak is None else f"{peak / 1e9:.1f}",
            f"{row.predicted_bytes / 1e9:.1f}", "-" if error is None else f"{error:+.1%}",
        )  # fmt: skip
    return table
