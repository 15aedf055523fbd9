"""Criteo's display-advertising logs (Kaggle challenge, and the terabyte log of the same layout) as Parquet.

A file has no header and 40 tab-separated fields: the label, 13 counts ``I1`` ... ``I13`` and 26 categories ``C1`` ... ``C26``, each 8
hexadecimal digits; rows are in time order, times are not told. What is odd about it:

- Any count or category may be empty: null in the Parquet file. The configuration gives missing counts 0 and missing categories the id 0.
- Counts may be negative (``I2`` down to -3): kept as they are; the configuration clips them to 0 before ``log1p``, as DLRM does.
- Categories are stored as the unsigned number that their digits say.
- The challenge's ``test.txt`` has no label, so 39 fields: it becomes a Parquet file without a label, for ``gemrec predict``.

``train*``, ``valid*``, ``test*`` and ``day_N`` in any compression become a Parquet file each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gem_core.config.features import Dense, Features, Label, Sparse
from gem_core.errors import DataError
from gem_data.lines import BadLines, Distinct, first_line, read_rows, regrouped, splits_of, stem_of, text_files
from gem_data.writer import config_toml, write_config, write_parquet

COUNTS = tuple(f"I{i}" for i in range(1, 14))
CATEGORIES = tuple(f"C{i}" for i in range(1, 27))
SCHEMA = pa.schema(
    [("label", pa.int8()), *((name, pa.int64()) for name in COUNTS), *((name, pa.uint32()) for name in CATEGORIES), ("row", pa.int64())]
)
MODEL: dict[str, Any] = {"name": "wukong"}


def convert(path: Path, out: Path, *, bad_lines: str = "error") -> dict[str, int]:
    """Write a Parquet file for each text file, and ``config.toml``; returns the rows of each.

    :raises DataError: no such files, or a line that cannot be used (unless ``bad_lines`` is "quarantine").
    """
    files = text_files(path, lambda s: bool(re.match(r"(train|valid|val|eval|test|day)(\W|_|\d|$)", s)), "Criteo file (train, test, day_N)")
    sizes = {name: Distinct() for name in CATEGORIES}
    rows: dict[str, int] = {}
    labelled: dict[str, int] = {}
    with BadLines(bad_lines, out) as bad:
        for file in files:
            stem = stem_of(file)
            has_label = len(first_line(file, "\t")) != len(COUNTS) + len(CATEGORIES)
            schema = SCHEMA if has_label else SCHEMA.remove(0)
            rows[stem] = write_parquet(out / f"{stem}.parquet", schema, regrouped(_tables(file, has_label, sizes, bad)))
            if has_label:
                labelled[stem] = rows[stem]
    if not labelled:
        raise DataError("no file has labels", where=str(path), fix="add the training file; its lines have 40 fields")
    features = Features(
        dense={name: Dense(transform="log1p", clip=(0.0, 1e12), default=0.0) for name in COUNTS},
        sparse={name: Sparse(rows=sizes[name].rows(), hash=True, default=0) for name in CATEGORIES},
        labels={"ctr": Label(column="label")},
    )
    write_config(out, config_toml("criteo", features, splits_of(labelled), None, model=MODEL))
    return rows


def _tables(file: Path, has_label: bool, sizes: dict[str, Distinct], bad: BadLines) -> Iterator[pa.Table]:
    names = [*(("label",) if has_label else ()), *COUNTS, *CATEGORIES]
    done = 0
    for rows in read_rows(file, "\t", names):
        columns = {"label": rows.binary("label")} if has_label else {}
        columns |= {name: rows.integers(name, pa.int64(), required=False) for name in COUNTS}
        columns |= {name: rows.hexadecimal(name, required=False) for name in CATEGORIES}
        table = rows.table(columns, bad)
        for name, size in sizes.items():
            size.add(table[name].combine_chunks())
        yield table.append_column("row", pa.array(np.arange(done, done + table.num_rows)))
        done += table.num_rows
