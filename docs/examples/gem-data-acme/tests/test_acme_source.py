"""The conformance kit pointed at the source, and its errors. Run with the package installed: ``pytest tests``."""

from __future__ import annotations

import importlib.util
import sqlite3
import tomllib
from contextlib import closing
from pathlib import Path

import pytest

from gem_core.config import Features
from gem_core.errors import ConfigError
from gem_core.plugins import manager
from gem_core.testing.plugins import PluginConformance
from gem_core.testing.sources import check_bad_input, source_checks

HERE = Path(__file__).parents[1]
SPEC = manager().find("source", "sqlite")
FEATURES = Features.model_validate(tomllib.loads((HERE / "acme.toml").read_text())["features"])


class TestPackage(PluginConformance):
    distribution = "gem-data-acme"


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    found = importlib.util.spec_from_file_location("make_log", HERE / "make_log.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    path = tmp_path_factory.mktemp("log") / "log.sqlite"
    module.make(path, samples=150)
    return path


def build(path, features=FEATURES, **how):
    return SPEC.build(SPEC.config_type(path=str(path)), features, **{"split": "train", "batch_size": 16, **how})


@pytest.mark.parametrize("check", source_checks(FEATURES), ids=lambda c: c.__name__)
def test_conformance(check, database):
    check(lambda **how: build(database, **how))


def test_the_newest_events_are_kept(database):
    with closing(sqlite3.connect(database)) as base:
        number, length = base.execute("SELECT sample, COUNT(*) FROM history GROUP BY sample ORDER BY 2 DESC LIMIT 1").fetchone()
        events = [row[0] for row in base.execute("SELECT item FROM history WHERE sample = ? ORDER BY place", (number,))]
    assert length > 3
    short = FEATURES.model_copy(update={"sequences": {"history": FEATURES.sequences["history"].model_copy(update={"max_length": 3})}})
    source = build(database, short)
    batch = source.fetch(source.ids[source.ids == number]) if number in source.ids else None
    if batch is not None:
        assert batch.sequences["history"].fields["item"].tolist() == events[-3:]


def test_a_missing_database_is_named(tmp_path):
    check_bad_input(lambda: build(tmp_path / "nowhere.sqlite"), "does not exist", "nowhere.sqlite")


def test_a_missing_column_is_named(database):
    features = Features.model_validate({"dense": {"colour": {}}, "labels": {"ctr": {"column": "click"}}})
    check_bad_input(lambda: build(database, features), "no such column: colour", "table train")


def test_an_id_that_does_not_fit_is_named(database):
    features = Features.model_validate({"sparse": {"item": {"rows": 7}}, "labels": {"ctr": {"column": "click"}}})
    check_bad_input(lambda: build(database, features), "does not fit a table of 7 rows", "features.sparse.item")


def test_what_it_cannot_read_is_refused(database):
    features = Features.model_validate({"columns": ["user"], "labels": {"ctr": {"column": "click"}}})
    with pytest.raises(ConfigError, match="remove vectors, columns"):
        build(database, features)
