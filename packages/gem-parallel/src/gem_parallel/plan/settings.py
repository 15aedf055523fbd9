"""From a candidate to the ``[parallel]`` section that runs it, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gem_core.config import Config
from gem_core.config.explain import validate
from gem_core.errors import ConfigError
from gem_core.plugins import manager
from gem_core.train.mesh import Mesh
from gem_parallel.plan.candidates import Dense, Sharding, Sparse, Widths, table_classes, typed
from gem_parallel.plan.fixed import Fixed, options_of
from gem_parallel.plan.workload import Workload
from gem_parallel.sparse.layout import BYTES

_OUTPUTS = ("fbgemm", "gem-2d")
"""Strategies whose looked-up rows may be bf16."""
_COUNTED = {
    "fsdp": {"reshard_after_forward", "param_dtype", "collective"},
    "hsdp": {"reshard_after_forward", "param_dtype", "collective"},
    "fbgemm": {"output", "dtype"},
    "torchrec": {"sharding", "dtype"},
    "torchrec-2d": {"fully_sharded", "inter_host", "sharding", "dtype"},
    "gem-2d": {"exchange", "schedule", "output", "collective", "sharding", "dtype"},
}
"""Options that the model of a step knows, by strategy; of a table: ``sharding`` and ``dtype``."""


def to_parallel(
    dense: Dense, sparse: Sparse, workload: Workload, asked: Mapping[str, Any] | None = None, *, fixed: Fixed | None = None
) -> dict[str, Any]:
    """The section as nested dicts that TOML and JSON can hold: what the candidate decides, over what the configuration asked for.

    :param fixed: what a search kept; None: nothing was searched, the candidate is what ``asked`` describes.
    """
    asked = asked or {}
    wanted = asked.get("dense") if fixed is None else fixed.values.get("parallel.dense")
    alike = dense.world == 1 or {wanted, dense.strategy} == {"fsdp", "hsdp"}
    name = wanted if wanted and alike else dense.strategy
    section: dict[str, Any] = {**asked, "dense": name, "sparse": sparse.strategy}
    section |= {axis: getattr(dense, axis) for axis in ("replicate", "shard", "expert")}
    section |= {"model": sparse.model, "replica": sparse.replica}
    if dense.strategy in ("fsdp", "hsdp"):
        options = {**(asked.get(name, {}) if fixed is None else options_of(asked, name)), "reshard_after_forward": dense.reshard}
        _set(options, "param_dtype", dense.param_dtype or workload.computes_in, "fp32")
        _set(options, "collective", dense.collective, "default")
        section[name] = options
    options = dict(asked.get(sparse.strategy, {}))
    if sparse.strategy == "gem-2d":
        options |= {"exchange": sparse.exchange, "schedule": sparse.schedule}
        _set(options, "collective", sparse.collective, "default")
    elif sparse.strategy == "torchrec-2d":
        options |= {"fully_sharded": sparse.exchange == "whole", "inter_host": sparse.order[0] == "model"}
    if sparse.strategy in _OUTPUTS:
        _set(options, "output", "bf16" if sparse.element == 2 else "fp32", "fp32")
    if sparse.cuts and sparse.model > 1:
        tables = {name: dict(own) for name, own in options.get("tables", {}).items()}
        alike = len(set(sparse.cuts)) == 1
        if alike:
            options["sharding"] = sparse.cuts[0]
        for group, cut in zip(table_classes(workload.tables), sparse.cuts):
            for name in group.names:
                if not alike or "sharding" in tables.get(name, {}):
                    tables[name] = {**tables.get(name, {}), "sharding": cut}
        if tables:
            options["tables"] = tables
    if options:
        section[sparse.strategy] = options
    return section


def _set(options: dict[str, Any], key: str, value: Any, default: Any) -> None:
    """Write ``value`` unless it is the default and nothing else was asked for."""
    if value != default or key in options:
        options[key] = value


def not_counted(section: Mapping[str, Any]) -> list[str]:
    """Keys of a ``[parallel]`` section's chosen strategies that a run obeys and the model of a step does not know."""
    found = []
    for name in (section["dense"], section["sparse"]):
        for key, value in section.get(name, {}).items():
            if key == "tables":
                found += [f"{name}.tables.{t}.{k}" for t, own in value.items() for k in own if k not in ("sharding", "dtype")]
            elif key not in _COUNTED.get(name, ()):
                found.append(f"{name}.{key}")
    return [f"parallel.{key}" for key in found]


def widths(config: Config, workload: Workload) -> dict[str, Widths]:
    """Types of rows and tables that the configuration sets for the table strategies of this package.

    :raises ConfigError: an option that a strategy does not know or accept.
    """
    known = {spec.name: spec for spec in manager().offers("sparse_strategy") if spec.name in _COUNTED}
    asked = config.parallel.options()
    found = {
        name: _widths(validate(spec.config_type, asked[name], ("parallel", name), config.origin), workload)
        for name, spec in known.items()
        if name in asked
    }
    return {name: both for name, both in found.items() if both != Widths()}


def _widths(options: Any, workload: Workload) -> Widths:
    kinds = [own.dtype if (own := options.tables.get(t.name)) is not None and own.dtype else options.dtype for t in workload.tables]
    stored = tuple(BYTES[kind] if kind else table.element for kind, table in zip(kinds, workload.tables))
    same = stored == tuple(t.element for t in workload.tables)
    return Widths(2 if getattr(options, "output", "fp32") == "bf16" else 4, () if same else stored)


def from_parallel(config: Config, dense_options: Any, sparse_options: Any, workload: Workload, world: int) -> tuple[Dense, list[Sparse]]:
    """The candidate that a configuration describes; several sparse ones where it leaves the cut of the tables to the strategy.

    :raises ConfigError: a strategy that the planner does not know.
    """
    p = config.parallel
    mesh = Mesh(world, p.replicate, p.shard, p.expert, p.model, p.replica)
    if p.dense in ("single", "ddp"):
        dense = Dense(world, 1, 1)
    elif p.dense in ("fsdp", "hsdp"):
        dense = Dense(
            mesh.replicate, mesh.shard, mesh.expert, reshard=dense_options.reshard_after_forward, collective=dense_options.collective,
            hooked=mesh.shard * mesh.expert == 1, param_dtype=dense_options.param_dtype,
        )  # fmt: skip
        dense = typed(dense, workload)
    else:
        raise _unknown("dense", p.dense)
    classes = table_classes(workload.tables)
    types = _widths(sparse_options, workload) if p.sparse in _COUNTED else Widths()
    kinds: dict[str, Any] = {"element": types.element, "stored": types.stored}

    def cuts(choices: tuple[Sharding, ...]) -> list[tuple[Sharding, ...]]:
        asked = [_asked(sparse_options, group.names[0]) for group in classes]
        found: list[tuple[Sharding, ...]] = [()]
        for cut in asked:
            found = [(*some, c) for some in found for c in (choices if cut in ("auto", "planner", None) else (cut,))]
        return found

    known: dict[str, Callable[[], list[Sparse]]] = {
        "local": lambda: [Sparse("local", 1, world)],
        "fbgemm": lambda: [Sparse("fbgemm", 1, world, **kinds)],
        "torchrec": lambda: [Sparse("torchrec", world, 1, cuts=c, **kinds) for c in cuts(("row", "table", "column"))],
        "torchrec-2d": lambda: [
            Sparse(
                "torchrec-2d", mesh.model, mesh.replica, ("model", "replica") if sparse_options.inter_host else ("replica", "model"),
                "whole" if sparse_options.fully_sharded else "average", "torchrec" if sparse_options.fully_sharded else "article", c,
                **kinds,
            )
            for c in cuts(("row", "table", "column"))
        ],
        "gem-2d": lambda: [
            Sparse(
                "gem-2d", mesh.model, mesh.replica, exchange=sparse_options.exchange, schedule=sparse_options.schedule, cuts=c,
                collective=sparse_options.collective, **kinds,
            )
            for c in cuts(("row", "table"))
        ],
    }  # fmt: skip
    if p.sparse not in known:
        raise _unknown("sparse", p.sparse)
    return dense, known[p.sparse]()


def _asked(options: Any, table: str) -> Any:
    own = options.tables.get(table)
    return own.sharding if own is not None and own.sharding is not None else options.sharding


def _unknown(side: str, name: str) -> ConfigError:
    return ConfigError(
        f"the planner has no model of the {side} strategy {name!r}",
        where=f"parallel.{side}",
        fix="leave --given out to plan with the strategies of gem-parallel",
    )
