"""What `gemrec plan` answers: the arrangement that a search found, or that a configuration has, and what it is told beside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from gem_core.config import Config
from gem_core.errors import ConfigError
from gem_parallel.plan.cluster import Cluster
from gem_parallel.plan.fixed import Fixed
from gem_parallel.plan.measured import given
from gem_parallel.plan.search import Estimate, Plan, Space, plan
from gem_parallel.plan.settings import widths
from gem_parallel.plan.workload import Workload


@dataclass(frozen=True)
class Answer:
    """``chosen`` is told, ``fastest`` may be an order of ranks that the mesh lacks. ``captured``: what a captured step would be, where the
    host bounds the step and steps can be captured. ``kept``: what the configuration sets; ``search`` plans with other settings."""

    space: Space
    chosen: Estimate
    fastest: Estimate
    captured: Estimate | None = None
    kept: Fixed = field(default_factory=Fixed)
    search: Callable[[Fixed], Plan] | None = None

    @property
    def searched(self) -> bool:
        return self.search is not None

    def anew(self) -> Estimate | None:
        """The plan if nothing were set; None where nothing is."""
        return self.search(Fixed()).runnable if self.search and self.kept else None

    def without_each(self) -> dict[str, Estimate]:
        """The plan if one key were not set, by key."""
        return {key: self.search(self.kept.without(key)).runnable for key in self.kept.values} if self.search else {}


def host_bounds(chosen: Estimate) -> bool:
    """Whether a step takes as long as the host needs to start it."""
    return chosen.host_seconds > 0.95 * chosen.seconds


def _capturable(workload: Workload, world: int, config: Config) -> bool:
    """Whether training would record such steps on so many processes, as far as a configuration tells."""
    return workload.capturable and (world == 1 or config.train.tables.kind != "adamw")


def found(workload: Workload, place: Cluster, world: int, config: Config, kept: Fixed, strategies: Sequence[str]) -> Answer:
    """The best arrangement that agrees with ``kept``, with tables by one of ``strategies``.

    :raises ConfigError: nothing agrees, or nothing fits.
    """
    types = widths(config, workload)

    def search(fixed: Fixed, work: Workload = workload) -> Plan:
        return plan(Space.build(work, place, world, sparse=strategies, widths=types, fixed=fixed))

    best, captured = search(kept), None
    if _capturable(workload, world, config) and host_bounds(best.runnable):
        with suppress(ConfigError):  # layers that must be sharded cannot be captured
            captured = search(kept, replace(workload, captured=True)).runnable
    return Answer(best.space, best.runnable, best.best, captured, kept, search)


def as_it_is(workload: Workload, place: Cluster, world: int, config: Config) -> Answer:
    """The arrangement of ``config`` itself."""
    space, chosen = given(config, workload, place, world)
    captured = None
    if _capturable(workload, world, config) and host_bounds(chosen) and chosen.dense.averages:
        captured = given(config, replace(workload, captured=True), place, world)[1]
    return Answer(space, chosen, chosen, captured)
