"""``gemrec bench kernels`` and ``gemrec kernels tune`` as far as they go without a GPU: options, refusals, tables and plots."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from gem_core.errors import GemError
from gem_kernels import commands
from gem_kernels.bench import report
from gem_kernels.bench.attention_rows import ROWS


def invoke(function: object, *arguments: str) -> object:
    app = typer.Typer()
    app.command()(function)  # type: ignore[type-var]
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize("function", [commands.bench_kernels, commands.kernels_tune])
def test_refusals(function: object, monkeypatch: pytest.MonkeyPatch) -> None:
    found = invoke(function, "nothing")
    assert isinstance(found.exception, GemError)
    assert "attention, dense, all" in str(found.exception)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = invoke(function, "attention")
    assert isinstance(found.exception, GemError)
    assert "none" in str(found.exception)


def test_unknown_rows_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = invoke(commands.bench_kernels, "attention", "--rows", f"{ROWS[0].name},self-1025")
    assert isinstance(found.exception, GemError)
    assert "self-1025" in str(found.exception)
    assert ROWS[0].name not in str(found.exception).splitlines()[0]


@pytest.mark.parametrize(("option", "name", "known"), [("--impls", "tritn", "hopper"), ("--ops", "norm_liner", "norm_linear")])
def test_unknown_implementations_and_ops_are_named(option: str, name: str, known: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be passed over, and a benchmark of nothing written."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = invoke(commands.bench_kernels, "all", option, f"{known},{name}")
    assert isinstance(found.exception, GemError)
    told, where, fix = str(found.exception).splitlines()
    assert told == f"there is no {name}"
    assert option in where
    assert known in fix


@pytest.mark.parametrize("wrong", [("--rounds", "0"), ("--workers", "-1"), ("--budget-seconds", "0")])
def test_numbers_that_measure_nothing_are_refused(wrong: tuple[str, str]) -> None:
    assert invoke(commands.bench_kernels, *wrong).exit_code == 2


def test_settings_reach_the_family(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from gem_kernels.bench import attention, dense

    seen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(attention, "run", seen.append)
    monkeypatch.setattr(dense, "run", seen.append)
    done = invoke(commands.bench_kernels, "--rows", "self-1024-s1,mlp-64", "--no-peers", "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert len(seen) == 2
    assert (seen[0].rows, seen[0].peers, seen[0].eager, seen[0].tune, seen[0].out) == (
        ("self-1024-s1", "mlp-64"), False, True, False, str(tmp_path),
    )  # fmt: skip
    invoke(commands.kernels_tune, "dense")
    assert len(seen) == 3
    assert seen[2].tune
    assert not seen[2].peers


def test_results_are_written(tmp_path: Path) -> None:
    """JSON with the numbers, a table with every row, and a plot whose bars have the lengths of the rates."""
    results = [
        {"row": "a", "pass": "forward", "op": "gdpa", "impl": "triton", "ms": 1.0, "tflops": 400.0},
        {"row": "a", "pass": "forward", "op": "jagged_attention", "impl": "varlen_attn", "ms": 2.0, "tflops": 100.0},
        {"row": "b", "pass": "backward", "op": "gdpa", "impl": "triton", "ms": 1.0, "gbs": 3000.0},
    ]
    data = {"environment": {"device": "none"}, "results": results}
    report.write(str(tmp_path), "attention", data, ["row", "pass", "impl", "ms"])
    assert json.loads((tmp_path / "attention.json").read_text())["results"] == results
    table = (tmp_path / "attention.md").read_text()
    assert table.count("| a ") == 2
    assert "varlen_attn" in table
    svg = ET.fromstring((tmp_path / "attention.svg").read_text())
    bars = [float(r.get("width")) for r in svg.iter("{http://www.w3.org/2000/svg}rect") if r.get("height") == "11"]
    assert bars == [500, 125, 500]
    report.write(None, "attention", data, [])
