"""gemrec data validate: planted violations are all found and counted; clean data has none; the page holds the plots."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tomli_w
from typer.testing import CliRunner

from gem_core.cli.groups import CommandGroups
from gem_core.config.features import Dense, EventField, Features, Label, Sequence, Sparse, Table
from gem_core.errors import ConfigError, DataError
from gem_data.commands import register
from gem_data.config import ParquetConfig
from gem_data.report import page, text
from gem_data.validate import validate

FEATURES = Features(
    sample_id="id",
    timestamp="when",
    tables={"item": Table(rows=100)},
    dense={"price": Dense()},
    sparse={"item": Sparse(table="item"), "country": Sparse(rows=50, hash=True)},
    sequences={
        "history": Sequence(fields={"item": EventField(column="h_item", table="item")}, timestamps="h_time", target={"item": "item"})
    },
    labels={"ctr": Label(column="click"), "cvr": Label(column="buy", mask="click")},
)
N, DAY = 400, 86_400


def clean():
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 9, N)
    when = np.sort(rng.integers(19_000 * DAY, 19_004 * DAY, N))
    return {
        "id": list(range(N)),
        "when": when.tolist(),
        "price": rng.normal(size=N).tolist(),
        "item": rng.integers(0, 100, N).tolist(),
        "country": rng.choice(["DE", "FR", "IT"], N).tolist(),
        "h_item": [rng.integers(0, 100, k).tolist() for k in lengths],
        "h_time": [sorted((w - rng.integers(1, 1000, k)).tolist()) for w, k in zip(when, lengths)],
        "click": (np.arange(N) % 4 == 0).astype(int).tolist(),
        "buy": [1 if i % 8 == 0 else 0 for i in range(N)],
    }


def config(tmp_path, table):
    pq.write_table(pa.table(table), tmp_path / "a.parquet", row_group_size=50)
    return ParquetConfig(root=str(tmp_path), train=("a.parquet",))


def test_clean_data(tmp_path):
    table = clean()
    report = validate(config(tmp_path, table), FEATURES, "train")
    assert report.violations == []
    assert report.rows == N
    columns = {c.feature: c for c in report.columns}
    assert columns["sparse.country"].distinct == 3
    assert columns["sparse.item"].distinct == len(set(table["item"]))
    assert columns["dense.price"].low == min(table["price"])
    lengths = sorted(len(h) for h in table["h_item"])
    q = report.quantiles("history")
    assert q["mean"] == pytest.approx(np.mean(lengths))
    assert (q["p50"], q["max"]) == (lengths[N // 2 - 1], lengths[-1])
    assert sum(s for s, _ in report.label_rates["ctr"].values()) == N / 4
    assert [n for _, n in report.label_rates["ctr"].values()] == np.bincount(np.array(table["when"]) // DAY - 19_000).tolist()
    assert sum(n for _, n in report.label_rates["cvr"].values()) == N / 4
    assert sum(s for s, _ in report.label_rates["cvr"].values()) == N / 8


def test_numbers_that_int64_does_not_hold_are_counted(tmp_path):
    table = {"user": pa.array([None, 7, *range(2**63 - 1, 2**63 + 18)], pa.uint64()), "click": [0] * 21}
    features = Features.model_validate({"sparse": {"user": {"rows": 64, "hash": True, "default": 0}}, "labels": {"click": {}}})
    report = validate(config(tmp_path, table), features, "train")
    (column,) = (c for c in report.columns if c.feature == "sparse.user")
    assert (column.distinct, column.missing, column.low) == (20, 1, 7.0)


def test_every_planted_violation_is_found(tmp_path):
    table = clean()
    table["id"][7] = table["id"][300] = 5
    table["price"][3] = math.nan
    table["price"][60] = None
    for row in (10, 20, 70):
        table["item"][row] = 500
    table["item"][90] = -1
    table["country"][11] = None
    table["h_item"][200], table["h_time"][200] = [1, 2, 101], [1, 2, 3]
    table["h_item"][201], table["h_time"][201] = [1, 2], [9, 8]
    table["h_item"][390], table["h_time"][390] = [1], [table["when"][390] + 1]
    table["click"][350] = None
    report = validate(config(tmp_path, table), FEATURES, "train")
    found = {(v.feature, v.what): v for v in report.violations}
    counts = {key: v.count for key, v in found.items()}
    assert counts == {
        ("sample_id", "a sample id comes more than once"): 2,
        ("dense.price", "a value is null or NaN"): 2,
        ("sparse.item", "the id ... does not fit its table of ... rows ... to ..."): 3,
        ("sparse.item", "the id ... is negative"): 1,
        ("sparse.country", "an id is null"): 1,
        ("sequences.history", "the id ... does not fit its table of ... rows ... to ..."): 1,
        ("sequences.history", "the times of a history decrease"): 1,
        ("sequences.history", "a history holds events later than its sample (a leak of the future)"): 1,
        ("labels.ctr", "a label is null"): 1,
        ("labels.cvr", "a mask is null"): 1,
    }
    assert "row 10 of the file" in found["sparse.item", "the id ... does not fit its table of ... rows ... to ..."].example
    assert "column '-'" not in str(report.violations)
    assert (
        "row 390 of the file" in found["sequences.history", "a history holds events later than its sample (a leak of the future)"].example
    )
    shown = text(report)
    assert "VIOLATION sparse.item: the id ... does not fit" in shown
    assert "(3)" in shown


def test_lists_of_different_lengths_do_not_hide_the_rest(tmp_path):
    table = clean()
    table["h_time"][5] = [*table["h_time"][5], 1]
    table["item"][9] = 500
    report = validate(config(tmp_path, table), FEATURES, "train")
    assert {v.feature for v in report.violations} == {"sequences.history", "sparse.item"}


@pytest.mark.parametrize(("factor", "unit"), [(1000, "ms"), (10**6, "us"), (10**9, "ns")])
def test_times_in_another_unit_are_no_leak_and_the_unit_is_named(tmp_path, factor, unit):
    """In nanoseconds such times do not fit 64 bits: the comparison with the sample's time must not wrap."""
    table = clean()
    table["when"] = [t * factor for t in table["when"]]
    table["h_time"] = [[t * factor for t in times] for times in table["h_time"]]
    report = validate(config(tmp_path, table), FEATURES, "train")
    with_events = sum(bool(h) for h in table["h_time"])
    assert {(v.feature, v.what): v.count for v in report.violations} == {
        ("timestamp", f'times lie after the year 2200: timestamp_unit = "s" and "{unit}" seems meant'): N,
        ("sequences.history", f'times lie after the year 2200: time_unit = "s" and "{unit}" seems meant'): with_events,
    }


@pytest.mark.parametrize(("units", "late"), [(("s", "ms"), 1), (("ms", "s"), 1), (("s", "ns"), 1), (("ns", "s"), 1), (("us", "us"), 1)])
def test_a_leak_is_found_between_times_of_two_units(tmp_path, units, late):
    """An event at the time of its sample is none, one unit of the finer one later is."""
    per = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
    ours, theirs = per[units[0]], per[units[1]]
    events = [[1_700_000_000 * theirs], [1_700_000_000 * theirs + max(1, theirs // ours)], [1_699_999_999 * theirs + theirs - 1]]
    table = {"when": [1_700_000_000 * ours] * 3, "h": [[1], [1], [1]], "t": events, "click": [0, 1, 0]}
    features = Features(
        timestamp="when",
        timestamp_unit=units[0],
        sequences={"s": Sequence(fields={"h": EventField(rows=9)}, timestamps="t", time_unit=units[1])},
        labels={"ctr": Label(column="click")},
    )
    (found,) = validate(config(tmp_path, table), features, "train").violations
    assert "a leak of the future" in found.what
    assert (found.count, "row 1 of the file" in found.example) == (late, True)


def test_a_feature_that_reads_a_label_is_a_leak(tmp_path):
    table = clean()
    told = {**FEATURES.model_dump(exclude_unset=True), "dense": {"price": {}, "clicked": {"column": "click"}}}
    (found,) = validate(config(tmp_path, table), Features.model_validate(told), "train").violations
    assert (found.feature, found.count) == ("dense.clicked", N)
    assert found.what.startswith("the feature reads the column of the label ctr")


def test_columns_that_are_carried_along_and_requests_are_checked(tmp_path):
    table = {**clean(), "shop": [None, *range(1, N)], "request": [None, *range(1, N)]}
    told = {**FEATURES.model_dump(exclude_unset=True), "columns": ["shop"], "request": "request"}
    report = validate(config(tmp_path, table), Features.model_validate(told), "train")
    assert {(v.feature, v.what) for v in report.violations} == {("columns.shop", "a value is null"), ("request", "a request is null")}


def test_the_page_holds_tables_and_plots(tmp_path):
    table = clean()
    table["country"][3] = None
    report = validate(config(tmp_path, table), FEATURES, "train")
    shown = page([report])
    assert shown.count("<svg") == 1 + 2
    assert "Lengths of history" in shown
    assert "2022-01-08" in shown, "19,000 days after the epoch"
    assert "an id is null" in shown
    assert "http" not in shown, "one page without outside parts"


def gemrec(*arguments):
    app = CommandGroups()
    app.owner = "gem-data"
    register(app)
    return CliRunner().invoke(app.group("data"), ["validate", *map(str, arguments)])


def test_the_command(tmp_path):
    table = clean()
    config(tmp_path, table)
    file = {
        "data": {"source": "parquet", "parquet": {"root": str(tmp_path), "train": "a.parquet"}},
        "features": FEATURES.model_dump(exclude_unset=True),
    }
    (tmp_path / "my.toml").write_text(tomli_w.dumps(file))
    result = gemrec(tmp_path / "my.toml", "--html", tmp_path / "report.html")
    assert result.exit_code == 0, result.output
    assert "no violations" in result.output
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    table["item"][0] = 100
    config(tmp_path, table)
    result = gemrec(tmp_path / "my.toml")
    assert isinstance(result.exception, DataError)
    assert result.exception.exit_code == 2
    assert "1 kind of violation in train" in str(result.exception)
    (tmp_path / "other.toml").write_text('[data]\nsource = "synthetic"\n')
    assert isinstance(gemrec(tmp_path / "other.toml").exception, ConfigError)


def test_hashes_have_no_least_and_greatest(tmp_path):
    """Those of text say nothing; how many there are does."""
    features = Features.model_validate(
        {"sparse": {"city": {"rows": 64, "hash": True}, "slot": {"rows": 9}}, "labels": {"ctr": {"column": "click"}}}
    )
    pq.write_table(pa.table({"city": ["a", "b", "c"], "slot": [2, 5, 5], "click": [0, 1, 0]}), tmp_path / "a.parquet")
    lines = {
        line.split()[0]: line.split()
        for line in text(validate(ParquetConfig(root=str(tmp_path), train=["a.parquet"]), features, "train")).splitlines()
        if line.startswith("sparse")
    }
    assert lines["sparse.city"][3:] == ["-", "-", "3"]
    assert lines["sparse.slot"][3:] == ["2", "5", "2"]
