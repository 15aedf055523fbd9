"""From a candidate to the ``[parallel]`` section that runs it, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gem_core.config import Config
from gem_core.errors import ConfigError
from gem_core.train.mesh import Mesh
from gem_parallel.plan.candidates import Dense, Sharding, Sparse, table_classes
from gem_parallel.plan.workload import Workload


def to_parallel(dense: Dense, sparse: Sparse, workload: Workload) -> dict[str, Any]:
    """The section as nested dicts that TOML and JSON can hold."""
    section: dict[str, Any] = {"dense": dense.strategy, "sparse": sparse.strategy}
    section |= {axis: getattr(dense, axis) for axis in ("replicate", "shard", "expert")}
    section |= {"model": sparse.model, "replica": sparse.replica}
    if dense.strategy in ("fsdp", "hsdp"):
        section[dense.strategy] = {"reshard_after_forward": dense.reshard}
        if workload.cast_parameters:
            section[dense.strategy]["param_dtype"] = "bf16"
        if dense.collective != "default":
            section[dense.strategy]["collective"] = dense.collective
    options: dict[str, Any] = {}
    if sparse.strategy == "gem-2d":
        options = {"exchange": sparse.exchange, "schedule": sparse.schedule}
        if sparse.element == 2:
            options["output"] = "bf16"
        if sparse.collective != "default":
            options["collective"] = sparse.collective
    elif sparse.strategy == "torchrec-2d":
        options = {"fully_sharded": sparse.exchange == "whole", "inter_host": sparse.order[0] == "model"}
    if sparse.cuts and sparse.model > 1:
        if len(set(sparse.cuts)) == 1:
            options["sharding"] = sparse.cuts[0]
        else:
            groups = table_classes(workload.tables)
            options["tables"] = {name: {"sharding": cut} for group, cut in zip(groups, sparse.cuts) for name in group.names}
    if options:
        section[sparse.strategy] = options
    return section


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
            hooked=mesh.shard * mesh.expert == 1,
        )  # fmt: skip
    else:
        raise _unknown("dense", p.dense)
    classes = table_classes(workload.tables)

    def cuts(choices: tuple[Sharding, ...]) -> list[tuple[Sharding, ...]]:
        asked = [_asked(sparse_options, group.names[0]) for group in classes]
        found: list[tuple[Sharding, ...]] = [()]
        for cut in asked:
            found = [(*some, c) for some in found for c in (choices if cut in ("auto", "planner", None) else (cut,))]
        return found

    known: dict[str, Callable[[], list[Sparse]]] = {
        "local": lambda: [Sparse("local", 1, world)],
        "fbgemm": lambda: [Sparse("fbgemm", 1, world, element=_element(sparse_options))],
        "torchrec": lambda: [Sparse("torchrec", world, 1, cuts=c) for c in cuts(("row", "table", "column"))],
        "torchrec-2d": lambda: [
            Sparse(
                "torchrec-2d", mesh.model, mesh.replica, ("model", "replica") if sparse_options.inter_host else ("replica", "model"),
                "whole" if sparse_options.fully_sharded else "average", "torchrec" if sparse_options.fully_sharded else "article", c,
            )
            for c in cuts(("row", "table", "column"))
        ],
        "gem-2d": lambda: [
            Sparse(
                "gem-2d", mesh.model, mesh.replica, exchange=sparse_options.exchange, schedule=sparse_options.schedule, cuts=c,
                collective=sparse_options.collective, element=_element(sparse_options),
            )
            for c in cuts(("row", "table"))
        ],
    }  # fmt: skip
    if p.sparse not in known:
        raise _unknown("sparse", p.sparse)
    return dense, known[p.sparse]()


def _element(options: Any) -> int:
    return 2 if options.output == "bf16" else 4


def _asked(options: Any, table: str) -> Any:
    own = options.tables.get(table)
    return own.sharding if own is not None and own.sharding is not None else options.sharding


def _unknown(side: str, name: str) -> ConfigError:
    return ConfigError(
        f"the planner has no model of the {side} strategy {name!r}",
        where=f"parallel.{side}",
        fix="leave --given out to plan with the strategies of gem-parallel",
    )
