"""Packages meet only through gem_core: nobody imports a plug-in package but itself, and gem_core names none."""

from __future__ import annotations

import ast
import importlib
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest


def modules(root: Path) -> dict[str, str]:
    """Distribution -> import name."""
    return {path.parents[1].name: path.name for path in root.glob("packages/*/src/*") if (path / "__init__.py").exists()}


def imported(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(top-level module, line) of every import, written as a statement or as a text given to an import function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0], node.lineno
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in ("import_module", "__import__", "find_spec", "version", "distribution"):
                yield node.args[0].value.partition(".")[0].replace("-", "_"), node.lineno


def test_no_package_imports_a_plugin_package(root: Path):
    names = modules(root)
    plugins = set(names.values()) - {"gem_core"}
    wrong = [
        f"{path.relative_to(root)}:{line} imports {module}"
        for own in names.values()
        for path in root.glob(f"packages/*/src/{own}/**/*.py")
        for module, line in imported(ast.parse(path.read_text()))
        if module in plugins - {own}
    ]
    assert wrong == []


def test_tests_of_a_package_import_no_other(root: Path):
    names = modules(root)
    plugins = set(names.values()) - {"gem_core"}
    wrong = [
        f"{path.relative_to(root)}:{line} imports {module}"
        for distribution, own in names.items()
        for path in root.glob(f"packages/{distribution}/tests/**/*.py")
        for module, line in imported(ast.parse(path.read_text()))
        if module in plugins - {own}
    ]
    assert wrong == []


def test_the_core_names_no_plugin_package(root: Path):
    """In code, texts and comments alike. The hook gem_kernels has the name of a package: as a bare word it is the hook."""
    plugins = {name: module for name, module in modules(root).items() if module != "gem_core"}
    hooks = {"gem_kernels"}
    words = [re.escape(name) for name in plugins]
    words += [rf"{module}(?=\.)" if module in hooks else rf"{module}\b" for module in plugins.values()]
    pattern = re.compile("|".join(words))
    wrong = []
    for path in root.glob("packages/gem-core/src/**/*"):
        if path.suffix == ".py":
            tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
            wrong += [f"{path.relative_to(root)}:{t.start[0]}: {t.string[:60]}" for t in tokens if pattern.search(t.string)]
        elif path.is_file() and path.suffix in (".toml", ".json", ".md", ".txt"):
            wrong += [f"{path.relative_to(root)}: {found[0]}" for found in pattern.finditer(path.read_text())]
    assert wrong == []


def test_tests_on_a_gpu_are_marked(root: Path):
    """A file whose tests take a GPU where there is one carries the marker there: else `nox -s gpu` leaves them out."""
    takes = re.compile(r"[\"']cuda[\"'] if torch\.cuda\.is_available\(\)")
    found = [path for path in root.glob("packages/*/tests/test_*.py") if takes.search(path.read_text())]
    assert found
    assert [path.name for path in found if "pytest.mark.gpu" not in path.read_text()] == []


def test_errors_that_a_user_can_cause_say_what_to_do(root: Path):
    """Of those whose messages a person reads; the errors of ops and batches name the argument that is wrong."""
    kinds = {"ConfigError", "DataError", "CheckpointError"}
    found = [
        (f"{path.relative_to(root)}:{node.lineno}", {word.arg for word in node.keywords})
        for path in root.glob("packages/*/src/**/*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in kinds
    ]
    assert len(found) > 200
    assert [place for place, words in found if "fix" not in words and "config/explain.py" not in place] == []


def test_versions_are_ranges(root: Path):
    """A plug-in asks for a range of the core, never for one version, and nothing pins anything in its package metadata."""
    import tomllib

    for path in root.glob("packages/*/pyproject.toml"):
        project = tomllib.loads(path.read_text())["project"]
        wanted = [*project["dependencies"], *(r for extra in project.get("optional-dependencies", {}).values() for r in extra)]
        assert not [r for r in wanted if "==" in r], path
        if path.parent.name != "gem-core":
            assert any(re.fullmatch(r"gem-core>=\d+\.\d+,<\d+", r) for r in wanted), path
            assert list(project["entry-points"]["gem"]) == [path.parent.name]
        assert project["dynamic"] == ["version"]


def test_type_checkers_see_the_public_names(package: str, root: Path):
    """They are loaded when asked for; a type checker reads the imports that stand beside."""
    module = importlib.import_module(modules(root)[package])
    tree = ast.parse(Path(str(module.__file__)).read_text())
    branches = [node for node in tree.body if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"]
    names = {alias.name for branch in branches for node in branch.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert names == set(module.__all__) - {"__version__"}
    assert all(hasattr(module, name) for name in names)


HEAVY = ("triton", "torchrec", "fbgemm_gpu", "pyarrow")
REPORT = (
    "import sys; torch = sys.modules.get('torch');"
    f"print([m for m in {HEAVY!r} if m in sys.modules], torch is not None and torch.cuda.is_initialized())"
)


@pytest.mark.parametrize("then", ["", "from gem_core.plugins import KINDS, manager; [manager().offers(kind) for kind in KINDS];"])
def test_importing_a_package_is_light(root: Path, package: str, then: str):
    """Neither triton nor torchrec nor CUDA: not at import, and not for telling what there is."""
    module = modules(root)[package]
    code = f"import {module}; {'' if package == 'gem-core' else f'import {module}.plugin;'} {then} {REPORT}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "[] False\n", done.stderr


def test_public_names_of_the_kernels_import_no_triton():
    code = f"from gem_kernels import jagged_attention, gdpa, block_attention, available; {REPORT}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "[] False\n", done.stderr
