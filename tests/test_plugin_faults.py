"""Broken third-party plug-ins as a user meets them: installed beside the real ones, told by the real command."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

KERNEL = """
    from gem_core import KernelSpec, hookimpl

    def nothing(*arguments):
        raise AssertionError("never called")

    def supports(problem):
        {supports}

    class Plugin:
        gem_api = {api}

        @hookimpl
        def {hook}(self):
            return [KernelSpec("gdpa", "{name}", nothing, None, supports)]

    plugin = Plugin()
"""

FAULTS = {
    "raises at import": ("raise OSError('libacme.so: cannot open shared object file')", r"OSError: libacme\.so: cannot open shared object"),
    "unknown hook": (
        KERNEL.format(api=1, hook="gem_kernelz", name="bolt", supports="return None"),
        "it implements the unknown hook 'gem_kernelz'",
    ),
    "old api": (
        KERNEL.format(api=0, hook="gem_kernels", name="bolt", supports="return None"),
        "it was written for plug-in interface 0",
    ),
}


@pytest.fixture
def install(tmp_path: Path) -> Callable[[str, str], str]:
    """Put a distribution with one module and one entry point into a folder; gives the folder, for PYTHONPATH."""

    def write(name: str, source: str) -> str:
        site = tmp_path / "site"
        site.mkdir(exist_ok=True)
        module = name.replace("-", "_")
        (site / f"{module}.py").write_text(textwrap.dedent(source))
        info = site / f"{module}-2.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.0\n")
        (info / "entry_points.txt").write_text(f"[gem]\n{name} = {module}:plugin\n")
        return str(site)

    return write


def gemrec(run: Callable, *arguments: str, **environment: str):
    return run(sys.executable, "-c", "import sys; from gem_core.cli import main; sys.exit(main())", *arguments, **environment)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_plugin_nobody_asked_for_is_a_warning(install: Callable, run: Callable, fault: str):
    source, reason = FAULTS[fault]
    site = install("gem-bolt", source)
    done = gemrec(run, "plugins", "--json", PYTHONPATH=site)
    assert done.returncode == 0
    assert done.stderr.count("warning: plug-in gem-bolt 2.0 cannot be used: ") == 1
    assert re.search(reason, done.stderr)
    status = {p["name"]: p for p in json.loads(done.stdout)}
    assert status["gem-bolt"]["state"] == "broken"
    assert {p["state"] for name, p in status.items() if name != "gem-bolt"} == {"active"}


@pytest.mark.parametrize("fault", FAULTS)
def test_strict_makes_it_an_error(install: Callable, run: Callable, fault: str):
    source, reason = FAULTS[fault]
    done = gemrec(run, "plugins", PYTHONPATH=install("gem-bolt", source), GEM_PLUGINS_STRICT="1")
    assert re.search(reason, done.stderr)
    assert done.returncode == 2
    assert "error: plug-in gem-bolt 2.0 cannot be used: " in done.stderr
    assert "Traceback" not in done.stderr


def test_a_name_of_a_broken_plugin_in_the_configuration_is_an_error(install: Callable, run: Callable):
    site = install("gem-bolt", FAULTS["raises at import"][0])
    done = gemrec(run, "train", "--set", "precision.recipe=bolt", PYTHONPATH=site)
    assert done.returncode == 2
    assert "error: there is no recipe called 'bolt'; there are: " in done.stderr
    assert "gem-bolt 2.0 may offer it but is broken (OSError: libacme.so" in done.stderr
    assert "pip install -U gem-bolt" in done.stderr


def test_two_plugins_with_one_offer(install: Callable, run: Callable):
    source = KERNEL.format(api=1, hook="gem_kernels", name="fast", supports="return None")
    install("gem-acme", source)
    site = install("gem-bolt", source)
    done = gemrec(run, "plugins", "--ops", PYTHONPATH=site)
    assert done.returncode == 2
    assert "error: two distributions offer a kernel called 'gdpa/fast': gem-acme 2.0 and gem-bolt 2.0" in done.stderr
    done = gemrec(run, "plugins", "--json", PYTHONPATH=site)
    assert {p["name"] for p in json.loads(done.stdout) if p["state"] == "conflict"} == {"gem-acme", "gem-bolt"}
    done = gemrec(run, "plugins", "--json", "--no-plugin", "gem-bolt", PYTHONPATH=site)
    status = {p["name"]: p for p in json.loads(done.stdout)}
    assert status["gem-bolt"]["state"] == "disabled"
    assert status["gem-acme"]["offers"] == {"kernel": ["gdpa/fast"]}


def test_a_supports_that_raises_is_passed_over_and_told(install: Callable, run: Callable):
    site = install("gem-bolt", KERNEL.format(api=1, hook="gem_kernels", name="bolt", supports="raise KeyError('head_dim')"))
    done = gemrec(run, "plugins", "--ops", "--json", PYTHONPATH=site)
    assert done.returncode == 0, done.stderr
    rows = [row for row in json.loads(done.stdout) if row["op"] == "gdpa"]
    for row in rows:
        assert row["chosen"] != "bolt"
        ((_, supported, reason),) = [entry for entry in row["implementations"] if entry[0] == "bolt"]
        assert not supported
        assert "KeyError: 'head_dim'" in reason


def test_a_supports_that_raises_is_an_error_where_it_was_named(install: Callable, run: Callable):
    site = install("gem-bolt", KERNEL.format(api=1, hook="gem_kernels", name="bolt", supports="raise KeyError('head_dim')"))
    code = (
        "import torch; from gem_core import ops; x = torch.ones(2, 1, 16); o = torch.tensor([0, 2]);"
        "\ntry: ops.gdpa(x, x, x, o, backend='bolt')\nexcept Exception as error: print(type(error).__name__, error)"
    )
    done = run(sys.executable, "-c", code, PYTHONPATH=site)
    assert done.stdout.startswith("PluginError implementation 'bolt' of gdpa broke while it was asked whether it supports this problem")
