"""Every package's README holds a runnable example, and it runs."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_the_example_runs(package: str, root: Path, run: Callable):
    blocks = BLOCK.findall((root / "packages" / package / "README.md").read_text())
    assert blocks, f"the README of {package} has no python example"
    done = run(sys.executable, "-c", "\n".join(blocks))
    assert done.returncode == 0, done.stderr[-4000:]


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
