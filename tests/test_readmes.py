"""Every package's README holds a runnable example, and it runs."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer

from gem_core.cli.app import build
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
    acme.Lift = type("Lift", (), {"__init__": lambda self, config: None})  # what the reader's own package holds
    sys.modules |= {"acme": types.ModuleType("acme"), "acme.metrics": acme}
    try:
        manager = PluginManager(entry_points=())
        manager.add("acme", scope["plugin"])
        assert manager.find("metric", "lift") == MetricSpec("lift", acme.Lift)
    finally:
        del sys.modules["acme"], sys.modules["acme.metrics"]


def test_links_lead_somewhere(root: Path):
    for page in (*root.glob("*.md"), *root.glob("packages/*/README.md"), *root.glob("docs/**/*.md")):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.relative_to(root)} links to {target}"


def commands(text: str) -> Iterator[list[str]]:
    """The words of every ``gemrec`` command in code blocks and between backticks."""
    code = [*re.findall(r"^```\w*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE), *re.findall(r"`([^`\n]+)`", text)]
    for part in code:
        for found in re.findall(r"(?:^|[ ;/])gemrec ([^|;<>&()#\n]+)", part.replace("\\\n", " "), re.MULTILINE):
            yield found.split()


@pytest.fixture(scope="module")
def application() -> typer.core.TyperGroup:
    return typer.main.get_command(build())


def fault(words: list[str], application: typer.core.TyperGroup) -> str:
    """What is wrong with a command; empty if nothing is. Only names are looked at: of commands, and of options."""
    command, rest = application, words
    while rest and rest[0] in getattr(command, "commands", {}):
        command, rest = command.commands[rest[0]], rest[1:]
    if getattr(command, "commands", None) and rest and rest[0] not in ("...", "COMMAND", "--help", "--version"):
        return f"there is no command {rest[0]}"
    known = {option for p in command.params for option in (*p.opts, *p.secondary_opts)} | {"--help", "--debug", "--no-plugin"}
    given = {word.partition("=")[0] for word in rest if word.startswith("--")}
    return f"there is no {', '.join(sorted(given - known))}" if given - known else ""


def test_commands_are_there_with_their_options(root: Path, application: typer.core.TyperGroup):
    """Also of those that no test runs."""
    pages = [*root.glob("*.md"), *root.glob("packages/*/README.md"), *root.glob("docs/examples/**/*.md"), *root.glob("docs/pages/**/*.md")]
    found = [(page, words) for page in pages for words in commands(page.read_text())]
    wrong = [f"{page.relative_to(root)}: gemrec {' '.join(w)}: {fault(w, application)}" for page, w in found if fault(w, application)]
    assert not wrong
    assert len(found) > 60
    assert fault(["train", "my.toml", "--stes=3"], application) == "there is no --stes"
    assert fault(["data", "inspct", "logs"], application) == "there is no command inspct"


def test_changelogs_tell_what_is_in_the_version(package: str, root: Path):
    """An entry below the version of `__about__.py`, or below Unreleased for the next one."""
    about = (root / "packages" / package / "src" / package.replace("-", "_") / "__about__.py").read_text()
    version = re.search(r'__version__ = "([^"]+)"', about)
    assert version is not None
    changelog = (root / "packages" / package / "CHANGELOG.md").read_text()
    assert re.search(rf"^## (\[?{re.escape(version[1])}\b.*|Unreleased)\n+- \S", changelog, re.MULTILINE)
