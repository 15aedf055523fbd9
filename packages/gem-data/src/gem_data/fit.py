"""``gemrec data vocab``: vocabularies and bucket edges from the training rows, for ``features.fitted``."""

from __future__ import annotations

import datetime
from contextlib import closing
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from gem_core.config.features import Features
from gem_core.errors import ConfigError, DataError
from gem_core.sources.fitted import Fitted, needs_fitted
from gem_data import arrow
from gem_data.columns import Chunk
from gem_data.config import ParquetConfig
from gem_data.decode import Decoder
from gem_data.files import Reader
from gem_data.parquet import ParquetSource

SAMPLED = 4_000_000
"""Numbers of a feature that its quantiles are taken from; of more, an even share of every row group."""


def fit(
    config: ParquetConfig,
    features: Features,
    *,
    split: str = "train",
    least: int = 1,
    most: int | None = None,
    extend: Fitted | None = None,
) -> Fitted:
    """Read the columns of the features that need it, over the rows of ``split`` that pass the filters.

    :param least: values that come less often are left out. :param most: the most frequent values that a vocabulary keeps.
    :param extend: what was fitted before: its values keep their places and new ones follow them, and its edges stay as they are.
    :raises ConfigError: no feature needs fitted state; DataError: what is wrong with the files.
    """
    paths = needs_fitted(features)
    if not paths:
        raise ConfigError(
            "no feature has a vocabulary or buckets", where="[features]", fix="set vocabulary = true, or buckets = N, in an id feature"
        )
    plain = _unfitted(features, paths)
    how: dict[str, Any] = {"filter": config.filter(split), "root": config.root, "section": config.section}
    rows = ParquetSource(config.paths(split), plain, batch_size=1, prefetch=0, quarantine=".", **how)
    words, numbers = _Words(), {path: _Numbers(rows.rows) for path in paths if features.id_features()[path].buckets}
    decoder = Decoder(plain)
    with closing(Reader()) as reader:
        for unit in rows.units:
            chunk = rows.chunk(unit, reader)
            for path in paths:
                spec = features.id_features()[path]
                array = _values(chunk, features, decoder, path)
                if spec.vocabulary:
                    words.add(features.table_of(path), array, chunk, path)
                else:
                    numbers[path].add(array, chunk.size)
    edges = {path: found.edges(features.id_features()[path].buckets or 2, path) for path, found in numbers.items()}
    made_of = {
        "paths": list(config.paths(split)), "rows": rows.rows, "least": least, "most": most,
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    if extend is None:
        return Fitted(words.kept(least, most), edges, made_of)
    found = {table: _appended(extend.vocabularies.get(table, []), new, most) for table, new in words.kept(least, None).items()}
    return Fitted({**extend.vocabularies, **found}, {**edges, **extend.edges}, made_of)


def _appended(old: list[Any], new: list[Any], most: int | None) -> list[Any]:
    """``old`` and the values of ``new`` that are not in it, up to ``most`` in all; ``old`` is never cut."""
    known = set(old)
    fresh = [value for value in new if value not in known]
    return [*old, *(fresh if most is None else fresh[: max(0, most - len(old))])]


class _Words:
    """Counts of the values by table."""

    def __init__(self) -> None:
        self._counts: dict[str, pa.Table] = {}

    def add(self, table: str, array: pa.Array, chunk: Chunk, path: str) -> None:
        if pa.types.is_integer(array.type):
            try:
                array = array.cast(pa.int64())
            except pa.ArrowInvalid:
                fix = "set hash = true instead of a vocabulary, or store the column as text"
                chunk.fail(f"an id is larger than {arrow.LARGEST}, the largest of a vocabulary", fix, path, feature=path)
        elif pa.types.is_string(array.type) or pa.types.is_large_string(array.type) or pa.types.is_string_view(array.type):
            array = array.cast(pa.large_string())
        elif not pa.types.is_null(array.type):
            chunk.fail(f"a vocabulary is of integers or text, the column is {array.type}", "store one of these", path, feature=path)
        found = pc.value_counts(array.drop_null())
        more = pa.table({"value": found.field("values"), "count": found.field("counts")})
        held = self._counts.get(table)
        if held is not None and more.num_rows and held.schema != more.schema:
            fix = "features that share a table must have columns of one kind"
            chunk.fail(f"the table {table!r} would hold integers and text", fix, path, feature=path)
        if held is None or more.num_rows:
            joined = more if held is None else pa.concat_tables([held, more]).group_by("value").aggregate([("count", "sum")])
            self._counts[table] = joined.rename_columns(["value", "count"])

    def kept(self, least: int, most: int | None) -> dict[str, list[int | str]]:
        """The values by falling count, then in their own order."""
        found = {}
        for table, counts in self._counts.items():
            often = counts.filter(pc.greater_equal(counts["count"], least)).sort_by([("count", "descending"), ("value", "ascending")])
            found[table] = often["value"].slice(0, most).to_pylist()
        return found


class _Numbers:
    """A share of the numbers of a feature."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._kept: list[NDArray[np.float64]] = []

    def add(self, array: pa.Array, rows: int) -> None:
        numbers, missing = arrow.floats(array)
        numbers = numbers.astype(np.float64) if missing is None else numbers[~missing].astype(np.float64)
        room = max(1, SAMPLED * rows // self._rows)
        if numbers.size > room:
            numbers = numbers[np.linspace(0, numbers.size - 1, room).astype(np.int64)]
        self._kept.append(np.asarray(numbers, dtype=np.float64))

    def edges(self, buckets: int, path: str) -> list[float]:
        numbers = np.concatenate(self._kept)
        if not numbers.size:
            raise DataError("there is no number to take quantiles of", where=f"features.{path}", fix="check the column, or give edges")
        return [float(e) for e in np.unique(np.quantile(numbers, np.arange(1, buckets) / buckets))]


def _values(chunk: Chunk, features: Features, decoder: Decoder, path: str) -> pa.Array:
    """All values of a feature in the chunk, one after another."""
    kind, name, *rest = path.split(".", 1 if path.startswith("sparse.") else 3)
    if kind == "sparse":
        column = features.sparse[name].column or name
        return chunk.lists(column).values if chunk.is_list(column) else chunk.scalar(column)
    group, key = features.sequences[name], rest[1]
    field = group.fields[key]
    if field.gap is not None:
        return pa.array(decoder.decode(chunk).bags[f"sequences.{name}"].array(key))
    values = chunk.lists(field.column or key).values
    return arrow.lists(values).values if arrow.is_list(values.type) else values


def _unfitted(features: Features, paths: list[str]) -> Features:
    """The features in question, as ones that need no fitted state: any value goes, and gaps are numbers."""
    table = features.model_dump(exclude_unset=True)
    kept: dict[str, Any] = {key: table[key] for key in ("filter", "timestamp", "timestamp_unit") if key in table} | {
        "sparse": {},
        "sequences": {},
    }
    for path in paths:
        kind, name, *rest = path.split(".", 1 if path.startswith("sparse.") else 3)
        if kind == "sparse":
            spec = table["sparse"][name]
            column = {"column": spec["column"]} if spec.get("column") else {}
            kept["sparse"][name] = (
                {**column, "rows": 2, "edges": (0.0,), "default": 0}
                if spec.get("buckets")
                else {**column, "rows": 2, "hash": True, "default": 0}
            )
            continue
        group = table["sequences"][name]
        held = kept["sequences"].setdefault(name, {k: v for k, v in group.items() if k not in ("fields", "target")} | {"fields": {}})
        spec = group["fields"][rest[1]]
        keep = {k: spec[k] for k in ("column", "gap") if spec.get(k) is not None}
        held["fields"][rest[1]] = keep | ({"kind": "float"} if spec.get("gap") else {"rows": 2, "hash": True, "default": 0})
    return Features.model_validate(kept)
