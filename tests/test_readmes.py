"""Every package's README holds a runnable example, and it runs."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from gem_core.hookspecs import MetricSpec
from gem_core.plugins import PluginManager

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_the_example_runs(package: str, root: Path, run: Callable):
    blocks = BLOCK.findall((root / "packages" / package / "README.md").read_text())
    assert blocks, f"the README of {package} has no python example"
    done = run(sys.executable, "-c", "\n".join(blocks))
    assert done.returncode == 0, done.stderr[-4000:]


def test_the_plugin_of_the_front_page_is_one(root: Path):
    """Loads, passes every check of the manager, and offers its metric."""
    (block,) = BLOCK.findall((root / "README.md").read_text())
    scope: dict = {}
    exec(block, scope)
    acme = types.ModuleType("acme.metrics")
    acme.Lift = object  # what the reader's own package holds
    sys.modules |= {"acme": types.ModuleType("acme"), "acme.metrics": acme}
    try:
        manager = PluginManager(entry_points=())
        manager.add("acme", scope["plugin"])
        assert manager.find("metric", "lift") == MetricSpec("lift", object)
    finally:
        del sys.modules["acme"], sys.modules["acme.metrics"]


def test_links_lead_somewhere(root: Path):
    for page in (*root.glob("*.md"), *root.glob("packages/*/README.md"), *root.glob("docs/**/*.md")):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.relative_to(root)} links to {target}"


def test_changelogs_tell_what_is_in_the_version(package: str, root: Path):
    """An entry below the version of `__about__.py`, or below Unreleased for the next one."""
    about = (root / "packages" / package / "src" / package.replace("-", "_") / "__about__.py").read_text()
    version = re.search(r'__version__ = "([^"]+)"', about)
    assert version is not None
    changelog = (root / "packages" / package / "CHANGELOG.md").read_text()
    assert re.search(rf"^## (\[?{re.escape(version[1])}\b.*|Unreleased)\n+- \S", changelog, re.MULTILINE)
