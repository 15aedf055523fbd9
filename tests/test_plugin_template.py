"""`gemrec plugin new`: what it writes builds, installs beside the core alone, is listed, and passes the conformance kit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gem_core.cli.plugin import write
from gem_core.errors import ConfigError

pytestmark = pytest.mark.isolation


OFFERS = {
    "kernel": {"kernel": ["norm/zed"]},
    "source": {"source": ["zed"]},
    "model": {"model": ["zed"]},
    "recipe": {"recipe": ["zed"]},
    "strategy": {"dense_strategy": ["zed"]},
}


@pytest.mark.parametrize(("kind", "offers"), OFFERS.items())
def test_a_new_package_is_a_plugin(kind: str, offers: dict, wheels: dict[str, Path], isolate, run: Callable, tmp_path: Path):
    write("acme-zed", kind, tmp_path)
    (wheel,) = isolate.build_wheels([tmp_path / "acme-zed"], tmp_path / "wheels")
    python = isolate.make_environment(tmp_path / "env", [wheels["gem-core"], wheel], also=isolate.TEST_TOOLS)
    listed = json.loads(run(python.parent / "gemrec", "plugins", "--json").stdout)
    assert next(p for p in listed if p["name"] == "acme-zed")["offers"] == offers
    done = run(python, "-m", "pytest", "-p", "no:cacheprovider", tmp_path / "acme-zed" / "tests")
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("name", ["Acme", "acme_x", "acme--x", "9x", "acme-"])
def test_names_that_cannot_be(name: str, tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be the name"):
        write(name, "kernel", tmp_path)


def test_the_name_of_what_is_installed_is_refused(tmp_path: Path):
    for name in ("gem-core", "pluggy"):
        with pytest.raises(ConfigError, match=f"{name} [0-9.]+ is installed"):
            write(name, "kernel", tmp_path)


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("acme-source", "source", r"\[data\] has a key of that name"),
        ("acme-recipe", "recipe", r"\[precision\] has a key of that name"),
        ("acme-shard", "strategy", r"\[parallel\] has a key of that name"),
        ("acme-reference", "kernel", "gem-core offers a kernel called 'norm/reference' already"),
        ("acme-fp32", "recipe", "gem-core offers a recipe called 'fp32' already"),
        ("acme-single", "strategy", "gem-core offers a strategy called 'single' already"),
    ],
)
def test_offers_that_could_not_be_chosen(name: str, kind: str, words: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=words) as refused:
        write(name, kind, tmp_path)
    assert refused.value.fix == "name it by --offer NAME"
    assert not (tmp_path / name).exists()
    write(name, kind, tmp_path, offer="mine")
    assert '"mine"' in (tmp_path / name / "src" / name.replace("-", "_") / "plugin.py").read_text()
    with pytest.raises(ConfigError, match="cannot be the name of a"):
        write("acme-x", kind, tmp_path, offer="Not so")


def test_nothing_is_overwritten(tmp_path: Path):
    write("acme-x", "source", tmp_path)
    with pytest.raises(ConfigError, match="there already"):
        write("acme-x", "kernel", tmp_path)
