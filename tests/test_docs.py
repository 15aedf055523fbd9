"""Every code block of the site runs: bash in one folder a page, in order; TOML is loaded; Python runs in the page's folder.

A block after ``<!-- needs: ... -->`` or ``<!-- not run here: ... -->`` is skipped. TOML whose first comment is a file name is written to
that file for the blocks after it; ``# excerpt`` is a part of a file and is only parsed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

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


def test_every_page_is_in_the_navigation():
    navigation = (PAGES.parent / "mkdocs.yml").read_text()
    for page in PAGES.rglob("*.md"):
        assert page.relative_to(PAGES).as_posix() in navigation
