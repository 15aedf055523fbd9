"""Each package installs alone, from its wheel, into an environment that holds only it, the core and what they declare.

The packages' own tests run in such environments too: `nox -s tests`.
"""

from __future__ import annotations

import importlib.util
import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.isolation


def installs(package: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(("gem-core", package)))


def test_a_package_alone(package: str, environment: Callable[..., Path], run: Callable, wheels: dict[str, Path]):
    bin_folder = environment(*installs(package))
    module = package.replace("-", "_")
    others = [name.replace("-", "_") for name in wheels if name not in installs(package)]
    code = (
        f"import importlib.util as u, sys, {module}; print({module}.__file__.startswith(sys.prefix));"
        f"print([m for m in {others!r} if u.find_spec(m) is not None])"
    )
    done = run(bin_folder / "python", "-c", code)
    assert done.stdout == "True\n[]\n", done.stderr

    done = run(bin_folder / "gemrec", "plugins", "--json", GEM_PLUGINS_STRICT="1")
    assert done.returncode == 0, done.stderr
    listed = json.loads(done.stdout)
    assert [p["name"] for p in listed] == list(installs(package))
    assert {p["state"] for p in listed} == {"active"}
    assert all(p["offers"] or p["hooks"] for p in listed), "a plug-in that offers nothing"


def test_needs_of_a_package_are_few(package: str, wheels: dict[str, Path], isolate):
    """Installing one package pulls the core, torch and what that package is about, and none of the others' needs."""
    needs = isolate.requirements_of([wheels[name] for name in installs(package)])
    core = isolate.requirements_of([wheels["gem-core"]])
    own = {"gem-data": {"pyarrow"}, "gem-kernels": {"triton"}}
    assert needs - core == own.get(package, set())
    assert not core & {"triton", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "pyarrow", "tensorboard"}


def test_wheels_hold_the_package_and_nothing_else(package: str, wheels: dict[str, Path], root: Path):
    module = package.replace("-", "_")
    with zipfile.ZipFile(wheels[package]) as archive:
        names = archive.namelist()
        (licence,) = (archive.read(name).decode() for name in names if name.endswith(".dist-info/licenses/LICENSE"))
    assert licence == (root / "LICENSE").read_text()
    assert {name.split("/")[0].partition("-")[0] for name in names} == {module}
    assert f"{module}/py.typed" in names
    assert not [name for name in names if "/tests/" in name or name.endswith((".pyc", ".so"))]


def test_data_files_of_the_core_are_in_its_wheel(root: Path, wheels: dict[str, Path]):
    source = root / "packages/gem-core/src"
    files = {str(p.relative_to(source)) for p in source.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    with zipfile.ZipFile(wheels["gem-core"]) as archive:
        assert files <= set(archive.namelist())


def test_an_undeclared_import_fails_in_a_clean_environment(environment: Callable[..., Path], run: Callable):
    """What makes the tests above worth something: pyarrow is installed here, but the core does not declare it."""
    assert importlib.util.find_spec("pyarrow") is not None
    done = run(environment("gem-core") / "python", "-c", "import pyarrow")
    assert "No module named 'pyarrow'" in done.stderr
