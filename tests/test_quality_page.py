"""The page of all quality results is what its script makes of the stored results."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "docs" / "benchmarks"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("quality_page", FOLDER / "quality_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(script):
    assert (FOLDER / "quality.md").read_text() == script.page(FOLDER), "run python docs/benchmarks/quality_page.py"


def test_every_stored_result_is_on_the_page(script):
    text = (FOLDER / "quality.md").read_text()
    for path in FOLDER.glob("retrieval-*.json"):
        for run in json.loads(path.read_text())["runs"]:
            if path.stem != "retrieval-tune":
                assert f"`{run['command']}`" in text
    for name in ("popneg", "popneg-lengths", "ctr", "planted"):
        for values in (row["auc"] for row in json.loads((FOLDER / f"{name}.json").read_text())["test"].values()):
            assert f"{sum(values) / len(values):.4f}" in text


def test_a_row_and_its_spread(script, tmp_path):
    run = {
        "row": "sasrec",
        "command": "c",
        "device": "d",
        "versions": {"torch": "1"},
        "commit": "abc",
        "standard_error": {"hr@10": 0.01, "ndcg@10": 0.02},
    }
    runs = [{**run, "seed": s, "test": {"hr@10": hr, "ndcg@10": hr / 2}} for s, hr in ((0, 0.2), (1, 0.3))]
    stored = {"suite": "retrieval-ml-1m", "published": {"sasrec": {"SASRec": [0.25, 0.125]}}, "runs": runs}
    (tmp_path / "retrieval-ml-1m.json").write_text(json.dumps(stored))
    text = script.page(tmp_path)
    assert "| sasrec | 0.2500 (0.2000-0.3000) | 0.1250 (0.1000-0.1500) | 0, 1 | 1 |" in text
    assert "| *SASRec* | *0.2500* | *0.1250* |  |  |" in text
    assert text.endswith("1. `c` on d; torch 1; commit abc\n")
    (tmp_path / "retrieval-ml-1m.json").write_text(json.dumps({**stored, "runs": runs[:1]}))
    assert "| sasrec | 0.2000 ± 0.0100 | 0.1000 ± 0.0200 | 0 | 1 |" in script.page(tmp_path)
