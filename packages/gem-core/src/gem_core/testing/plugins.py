"""Conformance kit for a plug-in package as a whole: subclass `PluginConformance` in a test file of the package, which must be installed.

from gem_core.testing.plugins import PluginConformance

class TestPackage(PluginConformance):
    distribution = "gem-acme"
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from importlib import metadata
from typing import Any, ClassVar

from gem_core import hookspecs
from gem_core.config import FrozenConfig
from gem_core.config.schema import Data, Parallel, Precision
from gem_core.plugins import CORE, KINDS, PluginManager, PluginStatus
from gem_core.testing.rules import Rules

HEAVY = ("triton", "torchrec", "fbgemm_gpu", "pyarrow")
_SECTIONS: dict[str, type[FrozenConfig]] = {"source": Data, "recipe": Precision, "dense_strategy": Parallel, "sparse_strategy": Parallel}
_PROBE = """
import importlib, json, sys, warnings
from gem_core.plugins import KINDS, manager
importlib.import_module(sys.argv[1])
loaded = {'at import': [m for m in json.loads(sys.argv[2]) if m in sys.modules]}
for kind in KINDS:
    manager().offers(kind)
loaded['when it tells what it offers'] = [m for m in json.loads(sys.argv[2]) if m in sys.modules]
torch = sys.modules.get('torch')
print(json.dumps([loaded, torch is not None and torch.cuda.is_initialized()]))
"""


class PluginConformance(Rules):
    """Set ``distribution``, the name under which the package is installed."""

    distribution: ClassVar[str]

    def test_it_is_active(self) -> None:
        """The entry point has the distribution's name, its object speaks this core's `gem_api`, every hook is known, no offer clashes."""
        status = self.status()
        assert status.state == "active", f"{self.distribution} is {status.state}: {status.reason}"
        assert status.hooks, "it implements no hook"
        assert status.offers or "gem_commands" in status.hooks, f"its hooks {', '.join(status.hooks)} offer nothing"

    def test_importing_it_is_light(self) -> None:
        """Neither importing the plug-in nor asking what it offers loads triton, TorchRec, FBGEMM or pyarrow, or starts CUDA."""
        point = next(iter(metadata.distribution(self.distribution).entry_points.select(group=hookspecs.GROUP)))
        command = [sys.executable, "-c", _PROBE, point.module, json.dumps(HEAVY)]
        environment = {**os.environ, "GEM_PLUGINS": self.distribution}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, f"importing it fails: {done.stderr.strip().splitlines()[-1:]}"
        loaded, cuda = json.loads(done.stdout.strip().splitlines()[-1])
        for when, modules in loaded.items():
            assert not modules, f"it loads {', '.join(modules)} {when}: import them where the spec is used"
        assert not cuda, "it starts CUDA: ask for devices where the spec is used"

    def test_it_asks_for_a_range_of_the_core(self) -> None:
        """The package depends on `gem-core>=x.y,<z`: bounded below by what it was tested with, above by the next major version."""
        needs = [n for n in metadata.requires(self.distribution) or () if re.match(rf"{CORE}\b(?!-)", n.replace("_", "-"))]
        assert needs, f"it does not depend on {CORE}"
        text = needs[0].partition(";")[0]
        assert "==" not in text, f"{text!r} pins one version: two plug-ins could not be installed together"
        assert ">=" in text, f"{text!r} has no lower bound"
        assert "<" in text.replace("<=", "<"), f"{text!r} has no upper bound"

    def test_options_are_strict(self) -> None:
        """Every `config_type` is frozen, hashable, and refuses unknown keys: a misspelt option must not be ignored."""
        for kind, name, spec in self.specs():
            config_type = getattr(spec, "config_type", None)
            if config_type is None:
                continue
            what = f"options of the {kind} {name!r}"
            assert config_type.model_config.get("frozen"), f"{what}: not frozen; derive {config_type.__name__} from gem_core.FrozenConfig"
            assert config_type.model_config.get("extra") == "forbid", f"{what}: unknown keys are accepted"
            if not any(field.is_required() for field in config_type.model_fields.values()):
                hash(config_type())

    def test_no_name_hides_a_key(self) -> None:
        """No offer is called like a key of the section that holds its options: `[precision.recipe]` could not be told from `recipe`."""
        for kind, section in _SECTIONS.items():
            hidden = set(self.status().offers.get(kind, ())) & set(section.model_fields)
            assert not hidden, f"the {kind.replace('_', ' ')} {', '.join(sorted(hidden))}: choose another name"

    def test_kernels_implement_ops_that_exist(self) -> None:
        """Every kernel names an op of `gem_core.ops`: one of a misspelt op is never asked."""
        from gem_core.ops import adamw, add_linear, expert_tokens, pool_rows, program
        from gem_core.ops.contracts import contracts

        known = {*contracts(), program.OP, adamw.OP, add_linear.OP, expert_tokens.OP, pool_rows.OP}
        unknown = sorted({spec.op for kind, _, spec in self.specs() if kind == "kernel"} - known)
        assert not unknown, f"there is no op called {', '.join(unknown)}; there are: {', '.join(sorted(known))}"

    @classmethod
    def status(cls) -> PluginStatus:
        found = {s.name: s for s in _manager(cls.distribution).status()}
        assert cls.distribution in found, f"no installed distribution called {cls.distribution!r} has an entry point in the group 'gem'"
        return found[cls.distribution]

    @classmethod
    def specs(cls) -> list[tuple[str, str, Any]]:
        """(kind, name, spec) of everything that the package offers."""
        manager, offers = _manager(cls.distribution), cls.status().offers
        return [(kind, name, manager.find(kind, name)) for kind in KINDS for name in offers.get(kind, ())]


@cache
def _manager(distribution: str) -> PluginManager:
    """Plug-ins as they are installed, read once a distribution."""
    return PluginManager()
