"""What a configuration sets of that which a search decides: it holds, and the search goes round it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gem_core.config import Config
from gem_core.errors import ConfigError
from gem_parallel.plan.candidates import DENSE_ORDER, SPARSE_ORDER, Dense, Sparse, TableClass

_SHARDED = ("reshard_after_forward", "param_dtype", "collective")
OPTIONS: dict[str, tuple[str, ...]] = {
    "fsdp": _SHARDED,
    "hsdp": _SHARDED,
    "torchrec": ("sharding",),
    "torchrec-2d": ("fully_sharded", "inter_host", "sharding"),
    "gem-2d": ("exchange", "schedule", "collective", "sharding"),
}
"""Options that a search decides, by strategy; ``sharding`` of single tables as well."""
CORE = ("dense", "sparse", *DENSE_ORDER, *SPARSE_ORDER)
RECOMPUTE = "train.callbacks.recompute.modules"
_OPEN = (-1, "auto", "planner")
"""Values that leave the choice to somebody else."""
_SIBLINGS = {"fsdp": "hsdp", "hsdp": "fsdp"}


def options_of(section: Mapping[str, Any], strategy: str) -> dict[str, Any]:
    """Options of ``strategy`` in a ``[parallel]`` section. ``fsdp`` and ``hsdp`` are one strategy with or without copies: what is set for
    one of them holds for the other too, unless it is set there."""
    return {**section.get(_SIBLINGS.get(strategy, ""), {}), **section.get(strategy, {})}


def decided(section: Mapping[str, Any]) -> dict[str, Any]:
    """Key of the configuration -> value, of all keys in a ``[parallel]`` section that a search decides."""
    found = {f"parallel.{key}": section[key] for key in CORE if key in section}
    for name, known in OPTIONS.items():
        options = section.get(name, {})
        found |= {f"parallel.{name}.{key}": options[key] for key in known if key in options}
        if "sharding" in known:
            found |= {
                f"parallel.{name}.tables.{table}.sharding": own["sharding"]
                for table, own in options.get("tables", {}).items()
                if "sharding" in own
            }
    return found


@dataclass(frozen=True)
class Fixed:
    """``values``: key of the configuration -> what it is set to. ``section``: the configured ``[parallel]`` section. ``open``: keys that
    leave the choice to the search, whatever holds for all that say nothing."""

    values: Mapping[str, Any] = field(default_factory=dict)
    section: Mapping[str, Any] = field(default_factory=dict)
    open: frozenset[str] = frozenset()

    @classmethod
    def of(cls, config: Config, *, free: Sequence[str] = (), now: Collection[str] = ()) -> Fixed:
        """What ``config`` sets, but for what an earlier plan decided (``plan.decided``) and nobody changed since.

        :param free: keys or whole sections that are decided anew although they are set.
        :param now: keys or whole sections that the command line sets: they hold whatever was planned before.
        :raises ConfigError: ``free`` names nothing that a search decides.
        """
        asked = config.parallel
        section = {key: getattr(asked, key) for key in CORE if key in asked.model_fields_set} | asked.options()
        values = decided(section)
        modules = config.train.callbacks.get("recompute", {}).get("modules")
        if modules:
            values[RECOMPUTE] = list(modules)
        _check(free, values)
        before = config.plan.get("decided", {})
        left = {key for key, value in values.items() if value in _OPEN or any(_inside(key, freed) for freed in free)}
        values = {
            key: value
            for key, value in values.items()
            if key not in left and (any(_inside(key, one) for one in now) or key not in before or before[key] != value)
        }
        return cls(values, section, frozenset(left))

    def __bool__(self) -> bool:
        return bool(self.values)

    @property
    def recomputed(self) -> Sequence[str]:
        """Patterns of modules that recompute."""
        found: Sequence[str] = self.values.get(RECOMPUTE, ())
        return found

    def without(self, key: str) -> Fixed:
        return replace(self, values={k: v for k, v in self.values.items() if k != key}, open=self.open | {key})

    def dense(self, one: Dense) -> Dense | None:
        """``one`` with the options that are set, or None where something else is set."""
        name = self.values.get("parallel.dense")
        if name == "hsdp" and one.spread == 1 and one.world > 1:
            one = replace(one, hooked=True)
        # Shard groups without copies are what hsdp is, too.
        if one.world > 1 and name is not None and name != one.strategy and (name, one.strategy) != ("hsdp", "fsdp"):
            return None
        if not self._axes(one, DENSE_ORDER):
            return None
        if one.strategy not in _SIBLINGS:
            return one
        reshard, dtype, collective = (self._option(one.strategy, key) for key in _SHARDED)
        if reshard is not None and reshard != one.reshard:
            if one.spread > 1:
                return None
            one = replace(one, reshard=reshard)
        return replace(one, param_dtype=dtype, collective=one.collective if collective is None else collective)

    def sparse(self, one: Sparse, classes: Sequence[TableClass]) -> Sparse | None:
        """Likewise; ``classes`` are the tables that ``one.cuts`` cuts."""
        strategy = one.strategy
        if self.values.get("parallel.sparse") not in (None, strategy) or not self._axes(one, SPARSE_ORDER):
            return None
        has: dict[str, Any] = {
            "exchange": one.exchange, "schedule": one.schedule, "fully_sharded": one.exchange == "whole",
            "inter_host": one.order[0] == "model",
        }  # fmt: skip
        if any(self._option(strategy, key) not in (None, value) for key, value in has.items()):
            return None
        if one.model > 1:
            for group, cut in zip(classes, one.cuts):
                own = (self._cut(strategy, name) for name in group.names)
                if any(asked not in (None, cut) for asked in own):
                    return None
        collective = self._option(strategy, "collective")
        return one if collective is None else replace(one, collective=collective)

    def _axes(self, one: Dense | Sparse, axes: Sequence[str]) -> bool:
        return all(self.values.get(f"parallel.{axis}") in (None, getattr(one, axis)) for axis in axes)

    def _cut(self, strategy: str, table: str) -> Any:
        key = f"parallel.{strategy}.tables.{table}.sharding"
        return self.values.get(key, None if key in self.open else self._option(strategy, "sharding"))

    def _option(self, strategy: str, key: str) -> Any:
        if key not in OPTIONS.get(strategy, ()):
            return None
        sibling = _SIBLINGS.get(strategy, strategy)
        return self.values.get(f"parallel.{strategy}.{key}", self.values.get(f"parallel.{sibling}.{key}"))

    def used(self, dense: str, sparse: str) -> Fixed:
        """Those that a plan of these strategies has: options of others are kept in the file and do nothing."""
        names = {dense, _SIBLINGS.get(dense, dense), sparse}
        known = {key for key in self.values if not key.startswith("parallel.") or key.split(".")[1] in names or key.count(".") == 1}
        return replace(self, values={key: value for key, value in self.values.items() if key in known})

    def text(self) -> str:
        return ", ".join(setting(key, value) for key, value in self.values.items())

    def refuse(self, world: int, captured: bool) -> ConfigError:
        """That nothing agrees with what is set."""
        graph = ", and captured steps keep the dense part whole (ddp)" if captured else ""
        return ConfigError(
            f"no arrangement of {world:,} GPUs that the planner knows agrees with all that the configuration sets{graph}",
            where=self.text() + (", train.capture = true" if captured else ""),
            fix="change them, or plan them anew with --free KEY, as in --free parallel for the whole section",
        )


def setting(key: str, value: Any) -> str:
    """As it stands in TOML."""
    return f"{key} = {json.dumps(value)}"


def _inside(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")


def _check(free: Sequence[str], values: Mapping[str, Any]) -> None:
    known = [f"parallel.{key}" for key in CORE] + [f"parallel.{name}.{key}" for name, keys in OPTIONS.items() for key in keys]
    tables = tuple(f"parallel.{name}.tables." for name, keys in OPTIONS.items() if "sharding" in keys)
    for key in free:
        if not any(_inside(one, key) for one in (*known, RECOMPUTE, *values)) and not key.startswith(tables):
            raise ConfigError(
                f"{key!r} is nothing that a search decides", where="--free", fix=f"it decides {', '.join((*known, RECOMPUTE))}"
            )
