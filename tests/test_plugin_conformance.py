"""The repository's own plug-in packages keep the rules that the kit holds strangers to."""

from __future__ import annotations

import pytest

from gem_core.testing.plugins import PluginConformance

RULES = [name for name in vars(PluginConformance) if name.startswith("test_")]


@pytest.mark.parametrize("rule", RULES)
def test_a_package_of_the_repository(plugin: str, rule: str):
    kit = type("Kit", (PluginConformance,), {"distribution": plugin})
    getattr(kit(), rule)()
