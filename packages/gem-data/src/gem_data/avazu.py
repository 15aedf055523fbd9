"""Avazu's click log (Kaggle challenge) as Parquet.

Comma-separated, with a header or in the challenge's order of columns. What is odd about it:

- ``id`` goes past the largest signed 64-bit number: stored as uint64.
- ``hour`` is YYMMDDHH, in a time zone that nobody told: read as UTC. The Parquet file has ``timestamp`` (seconds since 1970), ``hour``
  (0 to 23) and ``weekday`` (0 is Monday).
- Sites, apps and devices are 8 hexadecimal digits, stored as the unsigned number that they say. The other categories are small numbers;
  -1 in ``C20`` says "unknown" and stays -1, a category like the others.
- ``test`` has no column ``click``: it becomes a Parquet file without a label, for ``gemrec predict``.

``train*``, ``valid*`` and ``test*`` in any compression become a Parquet file each; rows are in time order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gem_core.config.features import Features, Label, Sparse
from gem_core.errors import DataError
from gem_data.lines import BadLines, Distinct, Rows, first_line, need, read_rows, regrouped, splits_of, stem_of, text_files
from gem_data.writer import config_toml, write_config, write_parquet

HASHED = (
    "site_id", "site_domain", "site_category", "app_id", "app_domain", "app_category", "device_id", "device_ip", "device_model",
)  # fmt: skip
NUMBERED = ("C1", "banner_pos", "device_type", "device_conn_type", *(f"C{i}" for i in range(14, 22)))
LAYOUT = [
    *("id", "click", "hour", "C1", "banner_pos", "site_id", "site_domain", "site_category", "app_id", "app_domain", "app_category"),
    *("device_id", "device_ip", "device_model", "device_type", "device_conn_type", *(f"C{i}" for i in range(14, 22))),
]
SCHEMA = pa.schema(
    [
        ("id", pa.uint64()),
        ("click", pa.int8()),
        ("timestamp", pa.int64()),
        ("hour", pa.int8()),
        ("weekday", pa.int8()),
        *((name, pa.int32()) for name in NUMBERED),
        *((name, pa.uint32()) for name in HASHED),
        ("row", pa.int64()),
    ]
)
MODEL: dict[str, Any] = {"name": "wukong"}


def convert(path: Path, out: Path, *, bad_lines: str = "error") -> dict[str, int]:
    """Write a Parquet file for each text file, and ``config.toml``; returns the rows of each.

    :raises DataError: no such files, or a line that cannot be used (unless ``bad_lines`` is "quarantine").
    """
    files = text_files(path, lambda s: bool(re.match(r"(train|valid|val|eval|test)(\W|_|\d|$)", s)), "Avazu file (train, test)")
    sizes = {name: Distinct() for name in (*NUMBERED, *HASHED)}
    rows: dict[str, int] = {}
    labelled: dict[str, int] = {}
    with BadLines(bad_lines, out) as bad:
        for file in files:
            stem = stem_of(file)
            names, headed = _names(file)
            has_label = "click" in names
            schema = SCHEMA if has_label else SCHEMA.remove(1)
            rows[stem] = write_parquet(
                out / f"{stem}.parquet", schema, regrouped(_tables(file, None if headed else names, has_label, sizes, bad))
            )
            if has_label:
                labelled[stem] = rows[stem]
    if not labelled:
        raise DataError("no file has labels", where=str(path), fix="add the training file; its header has the column 'click'")
    features = Features(
        sample_id="id",
        timestamp="timestamp",
        sparse={
            "hour": Sparse(rows=24),
            "weekday": Sparse(rows=7),
            **{name: Sparse(rows=sizes[name].rows(), hash=True) for name in (*NUMBERED, *HASHED)},
        },
        labels={"ctr": Label(column="click")},
    )
    write_config(out, config_toml("avazu", features, splits_of(labelled), None, model=MODEL))
    return rows


def _names(file: Path) -> tuple[list[str], bool]:
    """The columns, and whether the first line names them."""
    found = first_line(file, ",")
    if "id" in found:
        need(file, found, (n for n in LAYOUT if n != "click"))
        return found, True
    for names in (LAYOUT, [n for n in LAYOUT if n != "click"]):
        if len(found) == len(names):
            return names, False
    raise DataError(
        f"the first line is no header and has {len(found)} fields",
        where=f"{file}, line 1",
        fix=f"a file without a header has {len(LAYOUT)} columns, or {len(LAYOUT) - 1} without click",
    )


def _tables(file: Path, names: list[str] | None, has_label: bool, sizes: dict[str, Distinct], bad: BadLines) -> Iterator[pa.Table]:
    done = 0
    for rows in read_rows(file, ",", names):
        columns = {"id": rows.integers("id", pa.uint64())}
        if has_label:
            columns["click"] = rows.binary("click")
        columns |= _times(rows)
        columns |= {name: rows.integers(name, pa.int32()) for name in NUMBERED}
        columns |= {name: rows.hexadecimal(name) for name in HASHED}
        table = rows.table(columns, bad)
        for name, size in sizes.items():
            size.add(table[name].combine_chunks())
        yield table.append_column("row", pa.array(np.arange(done, done + table.num_rows)))
        done += table.num_rows


def _times(rows: Rows) -> dict[str, pa.Array]:
    packed = rows.integers("hour", pa.int64())
    text = packed.fill_null(0).to_numpy()
    year, month, day, hour = text // 10**6, text // 10**4 % 100, text // 100 % 100, text % 100
    months = (year + 30) * 12 + month - 1
    date: NDArray[Any] = months.astype("datetime64[M]").astype("datetime64[D]") + (day - 1)
    real = (text >= 10**6) & (text < 10**8) & (month >= 1) & (month <= 12) & (day >= 1) & (hour < 24)
    real &= date.astype("datetime64[M]").astype(np.int64) == months
    rows.refuse(~real, lambda row: f"hour = {packed[row].as_py()} is no time YYMMDDHH")
    days = date.astype(np.int64)
    return {
        "timestamp": pa.array(days * 86_400 + hour * 3_600),
        "hour": pa.array(np.where(real, hour, 0).astype(np.int8)),
        "weekday": pa.array(((days + 3) % 7).astype(np.int8)),
    }
