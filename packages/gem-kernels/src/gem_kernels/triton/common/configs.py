"""Which tile configuration a kernel runs with.

Committed tables, ``gem_kernels/triton/configs/<architecture>/<family>.json``, hold rules in order of preference (the family is the
kernel's name up to the first dot)::

    {"kernel": "attention.forward", "when": {"d": [65, 128], "dtype": ["bf16", "fp16"], "k": [0, 256]}, "use": {"BLOCK_M": 128, ...}}

``when`` maps a fact of the problem to a value, a list of values, or (two integers) an inclusive range; a fact that is not named may be
anything. The first rule that matches wins. Facts never hold exact lengths, only the rounded bounds, so that a new length neither
recompiles nor retunes. What `tune` measured on this machine goes before the committed table.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any

from gem_kernels.triton.common import tune
from gem_kernels.triton.common.device import DeviceInfo, assumed
from gem_kernels.triton.common.launch import compiling_every_candidate

Config = dict[str, Any]
Facts = tuple[tuple[str, Any], ...]


@functools.lru_cache(maxsize=64)
def committed_rules(arch: str, family: str) -> tuple[dict[str, Any], ...] | None:
    """The committed rules of a kernel family for ``arch`` in order, None where no table is committed."""
    file = resources.files("gem_kernels.triton").joinpath("configs", arch, f"{family}.json")
    return tuple(json.loads(file.read_text())["rules"]) if file.is_file() else None


def matches(when: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    """Whether every condition of a rule holds. An unknown fact name is an error: a misspelt rule must not apply to everything."""
    for name, wanted in when.items():
        value = facts[name]
        if isinstance(wanted, list) and len(wanted) == 2 and all(type(w) is int for w in wanted):
            if not wanted[0] <= value <= wanted[1]:
                return False
        elif isinstance(wanted, list):
            if value not in wanted:
                return False
        elif value != wanted:
            return False
    return True


@functools.lru_cache(maxsize=4096)
def _committed(arch: str, kernel: str, facts: Facts) -> Config | None:
    known = dict(facts)
    for rule in committed_rules(arch, kernel.partition(".")[0]) or ():
        if rule["kernel"] == kernel and matches(rule["when"], known):
            return dict(rule["use"])
    return None


def choose(
    kernel: str,
    facts: Facts,
    info: DeviceInfo,
    candidates: Callable[[], list[Config]],
    run: Callable[[Config], None],
) -> Config:
    """The configuration to launch ``kernel`` with.

    ``facts`` are sorted (name, value) pairs. ``candidates()`` lists what the analytic model proposes, best guess first; ``run(config)``
    launches the kernel on the tensors at hand and may be repeated. Order: measured on this machine, committed table, measured now (on a
    chip without a table, or inside `tune.tuning`), best guess.
    """
    if compiling_every_candidate():
        for config in candidates():
            run(config)
    elif tune.forced():
        return tune.measured(kernel, facts, info, candidates, run)
    key = (kernel, facts, info, tune.sessions)
    found = _chosen.get(key)
    if found is None:
        found = tune.remembered(kernel, facts, info)
        if found is not None and found not in candidates():
            found = None  # another version's, whose kernels had other keys
        found = found or _committed(info.key, kernel, facts)
        if found is None and (assumed() or committed_rules(info.key, kernel.partition(".")[0]) is not None):
            found = candidates()[0]
        if found is None:
            found = tune.measured(kernel, facts, info, candidates, run)
        if not assumed():
            _chosen[key] = found
    return found


_chosen: dict[tuple[str, Facts, DeviceInfo, int], Config] = {}
