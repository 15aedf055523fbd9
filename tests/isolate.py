"""Makes a clean environment that holds given wheels and what their metadata asks for, and nothing else. Quick, and without an index.

The wheels are installed by pip. Each third-party distribution that they declare, and that these declare in turn, is linked in from the
environment which runs this; a distribution that is not declared is not there, so an undeclared import fails as it would for a stranger.

As a script: ``python tests/isolate.py ENV PROJECT_FOLDER... [--with DISTRIBUTION...]``
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from email.parser import Parser
from functools import cache
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

TEST_TOOLS = ("pytest", "pytest-xdist", "hypothesis")
SUBSTITUTES = {"fbgemm-gpu": "fbgemm-gpu-cpu"}
"""Distributions that stand in for each other when the declared one is not installed."""


def build_wheels(folders: Iterable[Path], out: Path) -> list[Path]:
    """Build a wheel of each project folder into ``out``."""
    before = set(out.glob("*.whl"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(out)]
    subprocess.run([*command, *map(str, folders)], check=True)
    return sorted(set(out.glob("*.whl")) - before)


def make_environment(where: Path, wheels: Sequence[Path], *, also: Iterable[str] = ()) -> Path:
    """Create the environment ``where``; returns its Python. ``also``: further distributions (with their needs), such as a test runner.

    :raises LookupError: a declared distribution is installed neither from ``wheels`` nor in the running environment.
    """
    venv.create(where, with_pip=False, clear=True, symlinks=True)
    python = where / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, *map(str, wheels)], check=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(where), "platbase": str(where)}))
    for name in sorted(requirements_of(wheels, also=also)):
        _link(metadata.distribution(name), site)
    return python


def requirements_of(wheels: Sequence[Path], *, also: Iterable[str] = ()) -> set[str]:
    """Canonical names of all distributions that ``wheels`` need, directly or not, other than themselves."""
    own = {canonicalize_name(w.name.split("-")[0]): w for w in wheels}
    todo = [r for wheel in wheels for r in wheel_metadata(wheel).get_all("Requires-Dist") or ()]
    todo += also
    found: set[str] = set()
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        requirement = Requirement(todo.pop())
        name = canonicalize_name(requirement.name)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if (name, frozenset(requirement.extras)) in seen:
            continue
        seen.add((name, frozenset(requirement.extras)))
        if name in own:
            continue
        name = _installed(name)
        found.add(name)
        for below in metadata.requires(name) or ():
            needed = Requirement(below)
            if needed.marker is None or any(needed.marker.evaluate({"extra": e}) for e in ("", *requirement.extras)):
                todo.append(str(needed).partition(";")[0])
    return found


def wheel_metadata(wheel: Path) -> Mapping[str, str]:
    """The METADATA of a wheel file."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def _installed(name: str) -> str:
    for candidate in (name, SUBSTITUTES.get(name, name)):
        try:
            metadata.distribution(candidate)
        except metadata.PackageNotFoundError:
            continue
        return candidate
    raise LookupError(f"{name} is declared as a requirement but is not installed here")


@cache
def _owners() -> Counter[str]:
    """Top-level entry of site-packages -> how many distributions have files in it."""
    return Counter(top for dist in metadata.distributions() for top in _tops(dist))


def _tops(dist: metadata.Distribution) -> set[str]:
    return {f.parts[0] for f in dist.files or () if f.parts[0] not in ("..", "__pycache__")}


def _link(dist: metadata.Distribution, site: Path) -> None:
    """Link the files of ``dist`` into ``site``: whole folders where it is their only owner."""
    source = Path(str(dist.locate_file("")))
    shared = {top for top in _tops(dist) if _owners()[top] > 1}
    for top in _tops(dist) - shared:
        if not top.endswith(".pth"):
            (site / top).symlink_to(source / top)
    for file in dist.files or ():
        if file.parts[0] in shared and "__pycache__" not in file.parts:
            target = site.joinpath(*file.parts)
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                os.symlink(source.joinpath(*file.parts), target)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("env", type=Path)
    parser.add_argument("projects", type=Path, nargs="+")
    parser.add_argument("--with", dest="also", nargs="*", default=[])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(make_environment(arguments.env, build_wheels(arguments.projects, Path(folder)), also=arguments.also))
