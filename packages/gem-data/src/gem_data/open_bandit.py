"""The Open Bandit data set (ZOZO; logs of a uniformly random and of a Thompson-sampling recommender) as Parquet.

A log has a header: time with microseconds and zone, item, position 1 to 3, click, the propensity (the chance that the policy showed this
item there), four hashed user features, and an affinity of the user to every item. A second file describes the items. What is odd about it:

- The click rate is 0.4 to 0.7 %: a few thousand rows hold a handful of clicks, so metrics of small slices are undefined or uncertain.
- The item's features live in ``item_context.csv``: they are joined to every row. So is ``affinity``, the entry of the item shown;
  ``affinities`` keeps all of them as a vector.
- Original files begin with an unnamed index column, which is left out.
- ``propensity_score`` and ``inverse_propensity`` are carried; ``weight = "inverse_propensity"`` in ``[features]`` trains and evaluates as
  under the uniform policy's own choice (inverse propensity weighting).

Folders are read as distributed (``random/all/all.csv``, ``bts/men/men.csv``, ... each beside its ``item_context.csv``) or flat
(``random_all.csv``, ``random_all_item_context.csv``). Each log becomes a Parquet file; splits are by time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gem_core.config.features import Dense, Features, Label, Sparse, Vector
from gem_core.errors import DataError
from gem_data.lines import BadLines, Distinct, Rows, need, read_rows, regrouped
from gem_data.writer import config_toml, write_config, write_parquet

USER = tuple(f"user_feature_{i}" for i in range(4))
ITEM = tuple(f"item_feature_{i}" for i in range(1, 4))
LOG = ("timestamp", "item_id", "position", "click", "propensity_score", *USER)
_AFFINITY = "user-item_affinity_"
MODEL: dict[str, Any] = {"name": "wukong"}


@dataclass
class _Seen:
    """What the configuration must know of all logs."""

    low: int = 2**62
    high: int = -(2**62)
    items: int = 0
    affinities: int = 0
    sizes: dict[str, Distinct] = field(default_factory=lambda: {name: Distinct() for name in (*USER, *ITEM)})


def convert(path: Path, out: Path, *, bad_lines: str = "error") -> dict[str, int]:
    """Write a Parquet file for each log, and ``config.toml``; returns the rows of each.

    :raises DataError: no logs, no item context, or a line that cannot be used (unless ``bad_lines`` is "quarantine").
    """
    logs = find_logs(path)
    seen, rows = _Seen(), {}
    with BadLines(bad_lines, out) as bad:
        for name, (log, context) in logs.items():
            tables = _tables(log, _items(context), name, seen, bad)
            first = next(tables, None)
            if first is None:
                raise DataError("the log holds no sample", where=str(log), fix="use the file as it was distributed")
            rows[name] = write_parquet(out / f"{name}.parquet", first.schema, regrouped(chain([first], tables)))
    write_config(out, config_toml("open-bandit", _features(seen), _splits(seen, list(rows)), None, model=MODEL))
    return rows


def find_logs(path: Path) -> dict[str, tuple[Path, Path]]:
    """Name of each log (``random_all``) -> its file and that of its items.

    :raises DataError: there are none, or an item context is missing.
    """
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*.csv*") if p.is_file())
    contexts = [p for p in files if "item_context" in p.name] or sorted(path.parent.glob("*item_context.csv*"))
    logs = [p for p in files if "item_context" not in p.name]
    if not logs:
        raise DataError("no log was found", where=str(path), fix="name the folder of the data set, with its *.csv files")
    found: dict[str, tuple[Path, Path]] = {}
    for log in logs:
        parts = [*log.relative_to(path).parts[:-1], log.name.split(".")[0]] if log != path else [log.name.split(".")[0]]
        name = "_".join(dict.fromkeys(word for part in parts for word in part.split("_")))
        words = set(name.split("_"))
        beside = [c for c in contexts if c.parent == log.parent]
        if not beside:
            raise DataError("the log has no item context beside it", where=str(log), fix="put its item_context.csv into the same folder")
        # Flat folders hold the contexts of several campaigns; that of another policy on the same campaign describes the same items.
        found[name] = log, max(beside, key=lambda c: len(words & set(c.name.split(".")[0].split("_"))))
    return found


def _items(path: Path) -> pa.Table:
    """The item context, row i for item i."""
    tables = []
    for rows in read_rows(path, ","):
        need(path, rows.names, ("item_id", "item_feature_0", *ITEM))
        columns = {"item_id": rows.integers("item_id", pa.int64()), "item_feature_0": rows.floats("item_feature_0")}
        tables.append(rows.table(columns | {name: rows.text(name) for name in ITEM}))
    table = pa.concat_tables(tables).sort_by("item_id").combine_chunks() if tables else pa.table({"item_id": pa.array([], pa.int64())})
    ids = table["item_id"].to_numpy()
    if not ids.size or not np.array_equal(ids, np.arange(ids.size)):
        raise DataError("the items are not numbered 0, 1, 2, ...", where=str(path), fix="use the file as it was distributed")
    return table


def _tables(log: Path, items: pa.Table, name: str, seen: _Seen, bad: BadLines) -> Iterator[pa.Table]:
    done = 0
    seen.items = max(seen.items, items.num_rows)
    for rows in read_rows(log, ","):
        need(log, rows.names, LOG)
        table = rows.table(_columns(rows, items, name, seen, log), bad)
        if table.num_rows:
            times = table["timestamp"].to_numpy()
            seen.low, seen.high = min(seen.low, int(times.min())), max(seen.high, int(times.max()))
            for column, size in seen.sizes.items():
                size.add(table[column].combine_chunks())
        yield table.append_column("row", pa.array(np.arange(done, done + table.num_rows)))
        done += table.num_rows


def _columns(rows: Rows, items: pa.Table, name: str, seen: _Seen, log: Path) -> dict[str, pa.Array]:
    item = rows.integers("item_id", pa.int64())
    ids = item.fill_null(0).to_numpy()
    known = (ids >= 0) & (ids < items.num_rows)
    rows.refuse(~known, lambda row: f"item_id = {item[row].as_py()} is not in the item context of {items.num_rows} items")
    ids = np.where(known, ids, 0)
    propensity = rows.floats("propensity_score")
    chance = propensity.fill_null(1.0).to_numpy()
    real = (chance > 0) & (chance <= 1)
    rows.refuse(~real, lambda row: f"propensity_score = {propensity[row].as_py()} is no probability above 0")
    affinity = [n for n in rows.names if n.startswith(_AFFINITY)]
    if len(affinity) < items.num_rows or (seen.affinities and len(affinity) != seen.affinities):
        raise DataError(
            f"the log has {len(affinity)} affinities; {seen.affinities or items.num_rows} were expected",
            where=f"{log}, line 1",
            fix="convert each campaign (all, men, women) on its own, beside its item context",
        )
    seen.affinities = len(affinity)
    matrix = np.stack([rows.floats(f"{_AFFINITY}{i}").fill_null(0.0).to_numpy() for i in range(len(affinity))], 1).astype(np.float32)
    described = items.take(pa.array(ids))
    offsets = np.arange(rows.size + 1, dtype=np.int32) * len(affinity)
    return {
        "timestamp": rows.column("timestamp", "a time with its zone", _microseconds),
        "policy": pa.array([name.split("_")[0]] * rows.size, pa.string()),
        "item_id": item,
        "position": rows.integers("position", pa.int8()),
        "click": rows.binary("click"),
        "propensity_score": propensity,
        "inverse_propensity": pa.array((1 / np.where(real, chance, 1.0)).astype(np.float32)),
        **{column: rows.text(column) for column in USER},
        "affinity": pa.array(matrix[np.arange(rows.size), ids]),
        "affinities": pa.ListArray.from_arrays(pa.array(offsets), pa.array(matrix.ravel())),
        "item_feature_0": described["item_feature_0"].combine_chunks(),
        **{column: described[column].combine_chunks() for column in ITEM},
    }


def _microseconds(raw: pa.Array) -> pa.Array:
    return raw.cast(pa.string()).cast(pa.timestamp("us", "UTC")).cast(pa.int64())


def _features(seen: _Seen) -> Features:
    return Features(
        timestamp="timestamp",
        timestamp_unit="us",
        columns=("position", "propensity_score", "policy"),
        dense={"affinity": Dense(transform="log1p"), "item_feature_0": Dense()},
        vectors={"affinities": Vector(dim=seen.affinities)},
        sparse={
            "item_id": Sparse(rows=seen.items),
            "position": Sparse(rows=4),
            **{name: Sparse(rows=size.rows(), hash=True) for name, size in seen.sizes.items()},
        },
        labels={"ctr": Label(column="click")},
    )


def _splits(seen: _Seen, names: list[str]) -> dict[str, Any]:
    """The last tenth of the logs' time is test, the tenth before it evaluation."""
    cuts = [seen.low + (seen.high - seen.low) * part // 10 for part in (8, 9)]
    paths = [f"{name}.parquet" for name in names]
    return {
        **dict.fromkeys(("train", "eval", "test"), paths),
        "train_filter": f"timestamp < {cuts[0]}",
        "eval_filter": f"timestamp >= {cuts[0]} and timestamp < {cuts[1]}",
        "test_filter": f"timestamp >= {cuts[1]}",
    }
