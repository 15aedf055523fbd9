"""Check a dataset against its ``[features]`` table, all rows, collecting what is wrong instead of stopping at the first.

Every feature is decoded on its own by the reader's own code (`decode.Decoder`), so what passes here passes in training.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gem_core.config.features import Features
from gem_core.errors import DataError
from gem_core.sources.hashing import hash_integers
from gem_data import arrow
from gem_data.block import TIMES, Bag, Block
from gem_data.columns import Chunk
from gem_data.config import ParquetConfig
from gem_data.decode import Decoder, event_columns, late, meant
from gem_data.files import Reader
from gem_data.parquet import ParquetSource

DISTINCT_LIMIT = 5_000_000
"""Distinct values of a column are counted exactly up to here."""
_SECONDS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_DAY = 86_400


@dataclass
class Violation:
    """``count`` rows (or row groups, where one error stops the decoding of a group) of ``feature``; ``example``: the first one."""

    feature: str
    what: str
    count: int
    example: str


@dataclass
class Column:
    """What a feature's values look like; ``distinct`` is None above `DISTINCT_LIMIT`."""

    feature: str
    rows: int = 0
    missing: int = 0
    low: float = np.inf
    high: float = -np.inf
    seen: NDArray[np.uint64] | None = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))

    @property
    def distinct(self) -> int | None:
        return None if self.seen is None else int(self.seen.size)

    def add(self, values: NDArray[Any], rows: int, missing: int, *, ordered: bool = True) -> None:
        """``ordered``: the values have a least and a greatest one; hashes have none that says anything."""
        self.rows, self.missing = self.rows + rows, self.missing + missing
        if not values.size:
            return
        if ordered:
            self.low, self.high = min(self.low, float(values.min())), max(self.high, float(values.max()))
        if self.seen is not None and values.dtype.kind in "iu":
            self.seen = np.union1d(self.seen, hash_integers(values, 0))
            self.seen = self.seen if self.seen.size <= DISTINCT_LIMIT else None


@dataclass
class Report:
    """All that was found in one split."""

    split: str
    files: int
    rows: int = 0
    violations: list[Violation] = field(default_factory=list)
    columns: list[Column] = field(default_factory=list)
    lengths: dict[str, Counter[int]] = field(default_factory=dict)
    label_rates: dict[str, dict[int, tuple[float, int]]] = field(default_factory=dict)
    """Task -> day since 1970 -> (sum of labels, samples that count); day 0 for all where there is no timestamp."""

    def quantiles(self, history: str) -> dict[str, float]:
        """mean, p50, p90, p99, max of a history's lengths before they are cut."""
        counts = self.lengths[history]
        lengths = np.array(sorted(counts))
        ends = np.cumsum([counts[int(n)] for n in lengths])
        at = {f"p{q}": float(lengths[np.searchsorted(ends, ends[-1] * q / 100)]) for q in (50, 90, 99)}
        mean = float(sum(n * c for n, c in counts.items()) / ends[-1])
        return {"mean": mean, **at, "max": float(lengths[-1])}


def validate(config: ParquetConfig, features: Features, split: str) -> Report:
    """Read all rows of ``split``.

    :raises DataError: files that cannot be read at all, or a schema that does not fit (a column missing, a wrong type).
    """
    return _Validator(config, features, split).run()


class _Validator:
    def __init__(self, config: ParquetConfig, features: Features, split: str) -> None:
        self.features = _lenient(features)
        how: dict[str, Any] = {"filter": config.filter(split), "root": config.root, "section": config.section}
        self.source = ParquetSource(config.paths(split), self.features, batch_size=1, prefetch=0, quarantine=".", **how)
        self.report = Report(split, len(self.source.files))
        self.decoders = {name: Decoder(part, check_units=False) for name, part in _parts(self.features).items()}
        self.found: dict[tuple[str, str], Violation] = {}
        self.columns: dict[str, Column] = {}
        self.sample_ids: list[NDArray[np.uint64]] = []
        self.days: dict[str, dict[int, list[float]]] = {name: defaultdict(lambda: [0.0, 0.0]) for name in features.labels}

    def run(self) -> Report:
        report = self.report
        with closing(Reader()) as reader:
            for unit in self.source.units:
                chunk = self.source.chunk(unit, reader)
                report.rows += chunk.size
                blocks = {
                    name: block for name, decoder in self.decoders.items() if (block := self._decoded(name, decoder, chunk)) is not None
                }
                self._look(chunk, blocks)
        self._duplicates()
        self._labels_as_features()
        report.violations = sorted(self.found.values(), key=lambda v: -v.count)
        report.columns = list(self.columns.values())
        report.label_rates = {task: {d: (s, int(n)) for d, (s, n) in sorted(days.items())} for task, days in self.days.items() if days}
        return report

    def _decoded(self, name: str, decoder: Decoder, chunk: Chunk) -> Block | None:
        """The feature's values, or None after noting why there are none."""
        own = Chunk(chunk.file, chunk.row_group, chunk.table, chunk.size, chunk.kept)
        try:
            block = decoder.decode(own)
        except DataError as error:
            self._note(name, _kind_of(error.what), 1, f"{error.what} ({error.where})")
            return None
        for kind, rows in _grouped(own.reasons).items():
            self._note(name, kind, len(rows), f"{own.reasons[rows[0]]} ({own.where((), rows[0])})")
        return block

    def _note(self, feature: str, what: str, count: int, example: str) -> None:
        held = self.found.setdefault((feature, what), Violation(feature, what, 0, example))
        held.count += count

    def _look(self, chunk: Chunk, blocks: dict[str, Block]) -> None:
        f = self.features
        times = blocks["timestamp"].fixed["timestamps"] if "timestamp" in blocks else None
        if times is not None:
            self._in_the_unit(chunk, "timestamp", "timestamp_unit", f.timestamp_unit, times, np.arange(chunk.size))
        for name in (*f.dense, *f.sparse):
            spec = f.dense.get(name) or f.sparse[name]
            if getattr(spec, "cross", None) is None:
                self._column(chunk, f"{'dense' if name in f.dense else 'sparse'}.{name}", name if spec.column is None else spec.column)
        for name, group in f.sequences.items():
            if f"sequences.{name}" in blocks:
                self._history(chunk, name, blocks[f"sequences.{name}"].bags[f"sequences.{name}"], times)
            column = event_columns(group)[0]
            counts = self.report.lengths.setdefault(name, Counter())
            for n, c in zip(*np.unique(chunk.lists(column).lengths, return_counts=True)):
                counts[int(n)] += int(c)
        for task in f.labels:
            if f"labels.{task}" in blocks:
                block = blocks[f"labels.{task}"]
                day = np.zeros(chunk.size, np.int64) if times is None else times // (_DAY * _SECONDS[f.timestamp_unit])
                counted = block.fixed["label_mask"][:, 0]
                for d in np.unique(day[counted]).tolist():
                    rows = counted & (day == d)
                    held = self.days[task][d]
                    held[0], held[1] = held[0] + float(block.fixed["labels"][rows, 0].sum()), held[1] + int(rows.sum())
        if f.sample_id is not None:
            hashed, missing = arrow.hashes(chunk.scalar(f.sample_id), 0)
            self.sample_ids.append(hashed if missing is None else hashed[~missing])

    def _column(self, chunk: Chunk, feature: str, name: str) -> None:
        array = chunk.lists(name).values if chunk.is_list(name) else chunk.scalar(name)
        kind = array.type
        values: NDArray[Any]
        ordered = True
        if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
            values, missing = arrow.keys(array)
            values = values.view(np.uint64) if kind == pa.uint64() else values
        elif pa.types.is_floating(kind) or pa.types.is_decimal(kind):
            values, missing = arrow.floats(array)
        else:
            hashed, missing = arrow.hashes(array, 0)
            values, ordered = hashed.view(np.int64), False
        values = values if missing is None else values[~missing]
        nulls = 0 if missing is None else int(missing.sum())
        self.columns.setdefault(feature, Column(feature)).add(values, len(array), nulls, ordered=ordered)

    def _history(self, chunk: Chunk, name: str, bag: Bag, times: NDArray[np.int64] | None) -> None:
        spec = self.features.sequences[name]
        if spec.timestamps is None:
            return
        stamps = bag.array(TIMES)
        row = np.repeat(np.arange(chunk.size), np.diff(bag.offsets))
        self._in_the_unit(chunk, f"sequences.{name}", "time_unit", spec.time_unit, stamps, row)
        falls = np.flatnonzero((np.diff(stamps) < 0) & (row[1:] == row[:-1])) + 1
        if falls.size:
            rows = np.unique(row[falls])
            self._note(f"sequences.{name}", "the times of a history decrease", rows.size, chunk.where(spec.timestamps, int(rows[0])))
        if times is not None:
            have, want = _SECONDS[spec.time_unit], _SECONDS[self.features.timestamp_unit]
            # Each side divided, never multiplied: nanoseconds of a wrong unit do not fit 64 bits.
            late = -(-stamps // (have // want)) > times[row] if have >= want else stamps > times[row] // (want // have)
            if late.any():
                rows = np.unique(row[late])
                what = "a history holds events later than its sample (a leak of the future)"
                self._note(f"sequences.{name}", what, rows.size, chunk.where(spec.timestamps, int(rows[0])))

    def _in_the_unit(self, chunk: Chunk, feature: str, key: str, unit: str, stamps: NDArray[np.int64], row: NDArray[np.int64]) -> None:
        """``stamps`` of the rows ``row``, both ``[N]``: none may lie so late that another unit is meant."""
        wrong = late(stamps, unit)
        if wrong.any():
            value = int(stamps[wrong].max())
            rows = np.unique(row[wrong])
            what = f'times lie after the year 2200: {key} = "{unit}" and "{meant(stamps)}" seems meant'
            self._note(feature, what, rows.size, f"{value}, {chunk.where((), int(rows[0]))}")

    def _labels_as_features(self) -> None:
        """A feature that reads a label's column shows the model what it is to predict."""
        f = self.features
        tasks = {spec.column or name: name for name, spec in f.labels.items()}
        for kind in ("dense", "vectors", "sparse"):
            for name, spec in getattr(f, kind).items():
                for column in getattr(spec, "cross", None) or (spec.column or name,):
                    if column in tasks:
                        what = f"the feature reads the column of the label {tasks[column]}, which is not known when a prediction is made"
                        self._note(f"{kind}.{name}", what, self.report.rows, f"column {column!r}")

    def _duplicates(self) -> None:
        if self.sample_ids:
            ids = np.concatenate(self.sample_ids)
            again = ids.size - np.unique(ids).size
            if again:
                self._note("sample_id", "a sample id comes more than once", again, f"column {self.features.sample_id!r}")


def _lenient(features: Features) -> Features:
    """The declaration with every policy set to collect instead of stop, and no order demanded: order is checked apart."""
    table = features.model_dump(exclude_unset=True)

    def collect(spec: dict[str, Any]) -> None:
        if spec.get("policy", "error") == "error":
            spec["policy"] = "quarantine"

    for kind in ("dense", "sparse"):
        for spec in table.get(kind, {}).values():
            collect(spec)
    for group in table.get("sequences", {}).values():
        group["order"] = "trust"
        for spec in group["fields"].values():
            collect(spec)
    return Features.model_validate(table)


def _parts(features: Features) -> dict[str, Features]:
    """One declaration a feature, so that an error in one hides nothing in another."""
    whole = features.model_dump(exclude_unset=True)
    parts = {}
    for kind in ("dense", "vectors", "sparse", "sequences", "labels"):
        for name, spec in whole.get(kind, {}).items():
            spec.pop("target", None)
            gaps = any(field.get("gap") == "sample" for field in spec.get("fields", {}).values())
            more = _shared(whole) | ({"timestamp": whole["timestamp"]} if gaps else {})
            parts[f"{kind}.{name}"] = Features.model_validate({"tables": whole.get("tables", {}), kind: {name: spec}, **more})
    for key in ("timestamp", "weight", "sample_id", "request"):
        if whole.get(key) is not None:
            parts[key] = Features.model_validate({key: whole[key], **_shared(whole)})
    for name in whole.get("columns", ()):
        parts[f"columns.{name}"] = Features.model_validate({"columns": [name], **_shared(whole)})
    return parts


def _shared(whole: dict[str, Any]) -> dict[str, Any]:
    return {key: whole[key] for key in ("timestamp_unit", "fitted") if key in whole}


def _grouped(reasons: dict[int, str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for row, reason in sorted(reasons.items()):
        found.setdefault(_kind_of(reason.split(": ", 1)[-1]), []).append(row)
    return found


def _kind_of(text: str) -> str:
    """The message without its numbers, so that like violations are counted together."""
    return " ".join("..." if any(c.isdigit() for c in word) else word for word in text.split())
