"""Every code block of the site runs: bash in one folder a page, in order; TOML is loaded; Python runs in the page's folder.

A block after ``<!-- needs: ... -->`` or ``<!-- not run here: ... -->`` is skipped. TOML whose first comment is a file name is written to
that file for the blocks after it; ``# excerpt`` is a part of a file and is only parsed.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
import typing
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from pydantic import BaseModel

from gem_core.config.schema import Config
from gem_core.plugins import manager

PAGES = Path(__file__).resolve().parents[1] / "docs" / "pages"
BLOCK = re.compile(r"^(<!-- (?:needs|not run here): [^\n]* -->\n)?```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
WITH_CODE = sorted(
    p.relative_to(PAGES).as_posix() for p in PAGES.rglob("*.md") if re.search(r"^```(bash|python|toml)$", p.read_text(), re.M)
)


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_CODE)
def test_the_code_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for variable in ("GEM_PLUGINS", "GEM_PLUGINS_STRICT", "PYTHONPATH"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "docs").symlink_to(PAGES.parent)
    # `python`, `gemrec` and `torchrun` are those of the environment that runs the tests.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for skipped, language, code in BLOCK.findall((PAGES / page).read_text()):
        if skipped:
            continue
        if language == "toml":
            tomllib.loads(code)
            named = re.match(r"# (\w[\w.-]*\.toml)\n", code)
            if named:
                (tmp_path / named[1]).write_text(code)
        elif language in ("bash", "python"):
            command = ["bash", "-euo", "pipefail", "-c", code] if language == "bash" else [sys.executable, "-c", code]
            done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False)
            assert done.returncode in (0, 141), f"{code}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"


def test_every_other_block_runs():
    """Left out are those that need a GPU, and the two commands of the front page, which CI runs itself."""
    skipped = [block[0] for page in WITH_CODE for block in BLOCK.findall((PAGES / page).read_text()) if block[0]]
    assert [words for words in skipped if "GPU" not in words and "CUDA device" not in words] == [
        "<!-- not run here: needs a checkout and ten minutes; CI runs the second -->\n"
    ]
    languages = {block[1] for page in PAGES.rglob("*.md") for block in BLOCK.findall(page.read_text())}
    assert languages == {"bash", "python", "toml", "text"}, "a block that nothing runs; text is for drawings"


def test_every_page_is_in_the_navigation():
    navigation = (PAGES.parent / "mkdocs.yml").read_text()
    for page in PAGES.rglob("*.md"):
        assert page.relative_to(PAGES).as_posix() in navigation


def test_the_reference_has_every_public_name(package: str):
    """By itself or with its module; a name that another package made is documented there."""
    shown = re.findall(r"^::: ([\w.]+)$", "\n".join(page.read_text() for page in (PAGES / "reference").glob("*.md")), re.MULTILINE)
    own = package.replace("-", "_")
    module = importlib.import_module(own)
    for name in set(module.__all__) - {"__version__"}:
        thing = getattr(module, name)
        home = getattr(thing, "__module__", own)  # a package that is exported is its own home
        assert not home.startswith("gem_") or {home, f"{home}.{name}", f"{own}.{name}.{name}"} & set(shown), f"{home}.{name}"


def test_the_reference_has_every_key_of_the_configuration(load):
    """Of the core and of every installed package."""
    hooks = load(PAGES.parent / "hooks.py")
    tables: dict[str, str] = {}
    for module in hooks.KEYS.findall((PAGES / "reference" / "configuration.md").read_text()):
        for name, table in re.findall(r"^### (\w+)\n(.*?)(?=^### |\Z)", hooks.keys(module), re.DOTALL | re.MULTILINE):
            tables[name] = tables.get(name, "") + table

    def shown(name: str) -> str:
        """With what it takes from other tables."""
        found = tables.get(name, "")
        return found + "".join(shown(base) for bases in re.findall(r"^And the keys of (.*)\.$", found, re.M) for base in bases.split(", "))

    def types(annotation: object) -> set[type[BaseModel]]:
        """The tables below a type."""
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return {annotation}.union(*(types(field.annotation) for field in annotation.model_fields.values()))
        return set().union(*(types(part) for part in typing.get_args(annotation)))

    kinds = ("model", "source", "recipe", "dense_strategy", "sparse_strategy", "callback")
    every = types(Config).union(*(types(spec.config_type) for kind in kinds for spec in manager().offers(kind)))
    missing = [f"{of.__name__}.{key}" for of in every for key in of.model_fields if f"| `{key}` |" not in shown(of.__name__)]
    assert missing == []
    assert "| `betas` | `tuple[float, float]` | `[0.9, 0.98]` |" in shown("DenseOptimizer")
    assert "| `rows` | `int` | needed | number of ids; an id must lie in [0, rows); above 0 |" in shown("Table")
    assert "| `policy` | `Literal['error', 'clip', 'default', 'quarantine']` |" in shown("Sparse")


def test_every_concept_has_a_drawing_that_is_there():
    drawings = {path.stem for path in (PAGES.parent / "drawings").glob("*.svg")}
    used: set[str] = set()
    for page in PAGES.rglob("*.md"):
        names = re.findall(r"^<!-- drawing: ([\w-]+) -->$", page.read_text(), re.MULTILINE)
        assert names or page.parent.name != "concepts", f"{page.name} has no drawing"
        used |= set(names)
    assert used == drawings


@pytest.mark.parametrize("drawing", sorted(path.name for path in (PAGES.parent / "drawings").glob("*.svg")))
def test_a_drawing_needs_nothing_and_stays_inside(drawing: str):
    """Well-formed, titled, nothing from elsewhere; boxes inside the picture; a blank line would end it as HTML inside Markdown."""
    text = (PAGES.parent / "drawings" / drawing).read_text()
    assert "\n\n" not in text.strip()
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    picture = ET.fromstring(text)
    name = "{http://www.w3.org/2000/svg}"
    assert picture.findtext(f"{name}title")
    _, _, width, height = map(float, picture.get("viewBox", "").split())
    boxes = list(picture.iter(f"{name}rect"))
    assert boxes
    for box in boxes:
        x, y, w, h = (float(box.get(key, "")) for key in ("x", "y", "width", "height"))
        assert x >= 0
        assert y >= 0
        assert x + w <= width
        assert y + h <= height


def test_the_benchmarks_page_holds_every_result(load):
    """A result that no Markdown was written for is shown from its JSON."""
    hooks = load(PAGES.parent / "hooks.py")
    page = hooks.tables()
    for result in (PAGES.parent / "benchmarks").rglob("*.json"):
        data = json.loads(result.read_text())
        command = data.get("command") or data.get("environment", {}).get("command") if isinstance(data, dict) else None
        if command and not result.with_suffix(".md").exists():
            assert command in page, f"{result.name} is not on the page"
    plots = {path.stem for path in (PAGES.parent / "benchmarks").rglob("*.svg")}
    assert {name for name in plots if f"](results/{name}.svg)" in page} == plots
    table = hooks.table_of(PAGES.parent / "benchmarks" / "precision.json")
    assert "| recipe | before | k | n | graph_ms | eager_ms | ratio |" in table
