"""Shared by the tests that cross packages: the packages of this repository, their wheels, and clean environments."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))


def load(path: Path) -> ModuleType:
    """A Python file as a module: with importlib mode, tests cannot import the files beside them."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_isolate = load(ROOT / "tests" / "isolate.py")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``package``: each package of the repository; ``plugin``: each one but the core."""
    if "package" in metafunc.fixturenames:
        metafunc.parametrize("package", PACKAGES)
    if "plugin" in metafunc.fixturenames:
        metafunc.parametrize("plugin", [name for name in PACKAGES if name != "gem-core"])


@pytest.fixture(scope="session", name="load")
def _load() -> Callable[[Path], ModuleType]:
    return load


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def isolate() -> ModuleType:
    return _isolate


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Distribution -> its wheel, of the packages and of the example plug-ins."""
    out = tmp_path_factory.mktemp("wheels")
    folders = [*ROOT.glob("packages/*/"), *(path.parent for path in ROOT.glob("docs/examples/*/pyproject.toml"))]
    return {_isolate.wheel_metadata(wheel)["Name"]: wheel for wheel in _isolate.build_wheels(folders, out)}


@pytest.fixture
def environment(wheels: dict[str, Path], tmp_path: Path) -> Callable[..., Path]:
    """Make an environment of some distributions and what they declare; gives its bin folder."""

    def make(*names: str, also: Sequence[str] = ()) -> Path:
        folder: Path = _isolate.make_environment(tmp_path / "env", [wheels[name] for name in names], also=also).parent
        return folder

    return make


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command in an empty folder, as a user would; gives its exit code and what it printed."""
    for variable in ("GEM_PLUGINS", "GEM_PLUGINS_STRICT", "PYTHONPATH"):
        monkeypatch.delenv(variable, raising=False)
    folder = tmp_path / "here"
    folder.mkdir()

    def call(*command: str | Path, timeout: float = 300, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            list(map(str, command)),
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return call
