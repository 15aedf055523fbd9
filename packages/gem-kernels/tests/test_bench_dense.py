"""The dense benchmark refuses wrong results and times right ones: its checks, on every row at a small size, without a GPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from gem_core import ops
from gem_kernels.bench import _dense_rows, dense

REFERENCES = {spec.op: spec for spec in ops.builtin_specs()}


@pytest.fixture(params=[r.name for r in _dense_rows.ROWS])
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> _dense_rows.Case:
    monkeypatch.setattr(_dense_rows, "_draw", partial(_dense_rows._draw, dtype=torch.float32))
    return next(r for r in _dense_rows.ROWS if r.name == request.param).build("cpu")


def _results(case: _dense_rows.Case) -> tuple:
    spec, problem = REFERENCES[case.op], case.problem()
    result, saved = spec.forward(problem, *case.tensors())
    douts = dense._douts(case, result, seed=3)
    return dense._first(result), spec.backward(problem, saved, douts, dense._needs(case)), dense._first(douts)


def test_right_results_pass_and_wrong_ones_do_not(case: _dense_rows.Case) -> None:
    """The plain form of every row is the op, forward and backward; a result off by 1 % and a missing factor are seen."""
    out, grads, dout = _results(case)
    for pass_, got in (("forward", out), ("backward", grads)):
        error, yardstick = dense.check(case, pass_, got, dout)
        assert error < 1e-5
        assert error <= 3 * yardstick + 1e-6
    wrong, _ = dense.check(case, "forward", out * 1.01, dout)
    assert wrong == pytest.approx(0.01, rel=0.01)
    halved = tuple(None if g is None else g / 2 for g in grads)
    assert dense.check(case, "backward", halved, dout)[0] == pytest.approx(0.5, rel=0.01)
    assert dense.check(case, "forward", out * float("nan"), dout)[0] == float("inf")


def test_rates_and_targets() -> None:
    row = next(r for r in _dense_rows.ROWS if r.name == "mlp-64")
    case = row.build("cpu")
    limits = dense.Ceilings(gemm=700.0, best_gemm=800.0, copy=4.0)
    line = dense._line(row, case, "forward", "triton", 0.5, {"triton": 0.5, "compile": 1.0}, limits)
    assert line["speedup"] == 2.0
    assert line["target"] == "compile >= 1.4: met"
    assert line["tflops"] == pytest.approx(16 * 256 * 64 * 64 / 0.5e-3 * 1e-12)
    assert line["of_copy"] == pytest.approx(2 * 256 * 64 * 2 / 0.5e-3 * 1e-12 / 4.0)
    slow = dense._line(row, case, "forward", "triton", 0.8, {"triton": 0.8, "compile": 1.0}, limits)
    assert slow["target"] == "compile >= 1.4: 1.25"
