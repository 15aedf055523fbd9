"""The example plug-ins as a stranger uses them: built, installed from wheels beside the core alone, chosen by a line, trained through."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.isolation

EXAMPLES = "docs/examples"
EXAMPLE = f"{EXAMPLES}/gem-kernels-acme"
SMALL = ("train.steps=3", "train.log_every=1", "data.batch_size=32", "eval.max_batches=2", "run.device=cpu")


def test_chosen_by_one_line_and_trained_through(root: Path, environment: Callable[..., Path], run: Callable, tmp_path: Path):
    bin_folder = environment("gem-core", "gem-kernels-acme")
    here = tmp_path / "here"
    shutil.copy(root / EXAMPLE / "acme.toml", here)
    listed = json.loads(run(bin_folder / "gemrec", "plugins", "--json").stdout)
    acme = next(p for p in listed if p["name"] == "gem-kernels-acme")
    assert (acme["version"], acme["state"], acme["offers"]) == ("1.0.0", "active", {"kernel": ["gdpa/acme"]})

    settings = [word for key in SMALL for word in ("--set", key)]
    done = run(bin_folder / "gemrec", "train", "acme.toml", *settings)
    assert done.returncode == 0, done.stderr
    (run_folder,) = (here / "runs").iterdir()
    assert json.loads((run_folder / "run.json").read_text())["plugins"]["gem-kernels-acme"] == "1.0.0"
    losses = [json.loads(line)["loss"] for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 3

    # The same run by the reference agrees, so the plug-in's gradients are right all the way through the model.
    same = ("--set", "kernels.ops.gdpa=reference", "--set", "run.name=reference")
    assert run(bin_folder / "gemrec", "train", "acme.toml", *settings, *same).returncode == 0
    reference = [json.loads(line)["loss"] for line in (here / "runs/reference/metrics.jsonl").read_text().splitlines()]
    assert losses == pytest.approx(reference, rel=1e-5)

    # Without the plug-in the line names something that is not there: that is an error, not a fall-back.
    done = run(bin_folder / "gemrec", "train", "acme.toml", "--no-plugin", "gem-kernels-acme", "--set", "run.name=without", *settings)
    assert done.returncode == 2
    assert "there is no kernel called 'gdpa/acme'" in done.stderr
    assert "gem-kernels-acme may offer it but is switched off" in done.stderr


def test_a_source_is_chosen_by_one_line_and_trained_from(root: Path, environment: Callable[..., Path], run: Callable, tmp_path: Path):
    bin_folder = environment("gem-core", "gem-data-acme")
    here, example = tmp_path / "here", root / EXAMPLES / "gem-data-acme"
    shutil.copy(example / "acme.toml", here)
    made = run(bin_folder / "python", example / "make_log.py", "log.sqlite")
    assert made.returncode == 0, made.stderr
    listed = json.loads(run(bin_folder / "gemrec", "plugins", "--json").stdout)
    assert next(p for p in listed if p["name"] == "gem-data-acme")["offers"] == {"source": ["sqlite"]}
    done = run(bin_folder / "gemrec", "train", "acme.toml", "--set", "run.device=cpu", "--set", "train.steps=6")
    assert done.returncode == 0, done.stderr
    summary = json.loads((here / "runs/acme-sqlite/summary.json").read_text())
    assert summary["samples"] == 6 * 64
    assert summary["tasks"]["ctr"]["ne"] is not None

    (here / "log.sqlite").unlink()
    done = run(bin_folder / "gemrec", "train", "acme.toml", "--set", "run.name=without")
    assert done.returncode == 2
    assert "the database does not exist" in done.stderr


@pytest.mark.parametrize("name", ["gem-kernels-acme", "gem-data-acme"])
def test_its_own_tests_pass(root: Path, environment: Callable[..., Path], run: Callable, isolate, name: str):
    bin_folder = environment("gem-core", name, also=isolate.TEST_TOOLS)
    done = run(bin_folder / "python", "-m", "pytest", "-p", "no:cacheprovider", root / EXAMPLES / name / "tests")
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
