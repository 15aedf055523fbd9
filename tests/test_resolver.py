"""What pip would install with each package, told by its resolver: the core, torch, what the package is about, and nothing of the others."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.isolation

OWN = {"gem-data": {"pyarrow"}, "gem-kernels": {"triton"}}
"""What a package may bring beside what the core brings."""
DIRECT = {
    "gem-core": {"torch", "pluggy", "pydantic", "typer", "rich", "numpy", "torchmetrics", "tomli-w"},
    "gem-kernels": {"gem-core", "torch", "triton"},
    "gem-precision": {"gem-core", "torch"},
    "gem-parallel": {"gem-core", "torch"},
    "gem-data": {"gem-core", "torch", "numpy", "pyarrow", "pydantic", "tomli-w", "typer"},
}
"""What a package's metadata may ask for."""


def resolved(wheels: list[Path], folder: Path) -> dict[str, list[Requirement]]:
    """Distribution -> its needs here, of everything that pip would install into an empty environment; skips where no index can be asked."""
    constraints = folder / "constraints.txt"
    constraints.write_text(f"torch=={metadata.version('torch')}\n")  # the build that is here: nothing else may be fetched
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--only-binary", ":all:", "--quiet"]
    command += ["--report", str(folder / "report.json"), "--constraint", str(constraints), *map(str, wheels)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        words = ("No matching distribution", "Connection", "Could not find a version", "Temporary failure", "timed out")
        if any(word in done.stderr for word in words):
            pytest.skip(f"no index with all that is declared: {done.stderr.strip().splitlines()[-1]}")
        raise AssertionError(done.stderr)
    found = {}
    for item in json.loads((folder / "report.json").read_text())["install"]:
        needs = [Requirement(need) for need in item["metadata"].get("requires_dist", ())]
        extras = ("", *item.get("requested_extras", ()))
        asked = [n for n in needs if n.marker is None or any(n.marker.evaluate({"extra": extra}) for extra in extras)]
        found[canonicalize_name(item["metadata"]["name"])] = asked
    return found


@pytest.fixture(scope="module")
def core(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Requirement]]:
    return resolved([wheels["gem-core"]], tmp_path_factory.mktemp("core"))


def test_a_package_pulls_only_what_it_is_about(package: str, core: dict, wheels: dict[str, Path], tmp_path: Path):
    found = core if package == "gem-core" else resolved([wheels["gem-core"], wheels[package]], tmp_path)
    assert {canonicalize_name(need.name) for need in found[package]} == DIRECT[package]
    # A CUDA build of torch asks for triton itself.
    assert found.keys() - core.keys() - {package} == OWN.get(package, set()) - core.keys()
    assert not core.keys() & {"torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "pyarrow", "tensorboard"}
    # Each of the others is there because something that is there asks for it.
    reached, todo = set(), [package]
    while todo:
        name = todo.pop()
        if name not in reached:
            reached.add(name)
            todo += [canonicalize_name(need.name) for need in found[name]]
    assert reached == found.keys()
