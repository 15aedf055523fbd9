"""The ``[features]`` table applied to the rows of a row group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gem_core.config.features import Features, Ids, Sequence, Sparse
from gem_core.errors import ConfigError
from gem_core.sources.fitted import load_fitted
from gem_core.sources.hashing import salt_of
from gem_data import arrow, values
from gem_data.arrow import Ints
from gem_data.block import TIMES, Array, Bag, Block, Values
from gem_data.columns import Chunk, locate
from gem_data.files import DataFile
from gem_data.values import Site, Way, vocabulary

_LATEST = 7_258_118_400
"""Seconds until 2200: a time after it was written in a finer unit than the declared one."""


def late(stamps: Ints, unit: str) -> NDArray[np.bool_]:
    """Which times ``[N]`` lie after the year 2200, if they are in ``unit``."""
    return stamps > _LATEST * arrow.UNITS[unit]


def meant(stamps: Ints) -> str:
    """The unit in which times ``[N]`` that are `late` lie before the year 2200."""
    return next((unit for unit, n in arrow.UNITS.items() if stamps.max() <= _LATEST * n), "ns")


class Decoder:
    """Turns chunks into blocks. ``columns``: all columns that the features read.

    :param hashed: what the columns of hashed ids must hold, as `hashed` tells it of another decoder.
    :param check_units: refuse times that can only be of a finer unit than the declared one.
    """

    def __init__(self, features: Features, hashed: Mapping[str, list[str]] | None = None, *, check_units: bool = True) -> None:
        self.features, self._check_units = features, check_units
        self.lists: dict[str, bool] = {}
        """Path of an id feature -> whether its column holds a list for each sample or event; of what was decoded so far."""
        self._ways: dict[str, Way] = {}
        fitted = load_fitted(features)
        for path, ids in features.id_features().items():
            rows, table = features.rows_of(path), features.table_of(path)
            _check_ids(path, ids, rows)
            edges = ids.edges if ids.buckets is None else fitted.edges_of(path)
            if edges is not None and len(edges) >= rows:
                raise ConfigError(
                    f"{len(edges)} edges make {len(edges) + 1} buckets, the table has {rows} rows",
                    where=f"features.{path}",
                    fix=f"set rows = {len(edges) + 1} or more",
                )
            words = fitted.vocabulary(table, path, rows) if ids.vocabulary else None
            self._ways[path] = Way(
                rows,
                salt_of(table) if ids.salt is None else ids.salt,
                None if edges is None else np.asarray(edges, dtype=np.float64),
                None if words is None else vocabulary(words),
                dict(zip(_hashed_columns(path, ids), (hashed or {}).get(path, ()))),
            )
        for name, spec in features.dense.items():
            if spec.policy == "default" and spec.default is None:
                raise _needs_default(f"dense.{name}")
        self.columns = tuple(dict.fromkeys(self._columns()))
        if not self.columns:
            raise ConfigError("[features] declares nothing to read", fix="run 'gemrec data inspect PATH' for a table that fits a file")

    @property
    def hashed(self) -> dict[str, list[str]]:
        """Path of a feature with hashed ids -> "integers" or "text", what its column holds, or both columns of a cross; what was not seen
        yet, or is a folder of the path, is left out."""
        columns = {path: _hashed_columns(path, ids) for path, ids in self.features.id_features().items()}
        kinds = {path: self._ways[path].kinds for path in columns}
        return {path: [kinds[path][c] for c in names] for path, names in columns.items() if names and kinds[path].keys() >= set(names)}

    def leaves(self, file: DataFile, more: tuple[str, ...] = ()) -> tuple[str, ...]:
        """Leaf columns of ``file`` to read for the features and for ``more`` columns.

        :raises DataError: a column is missing.
        """
        return tuple(dict.fromkeys(leaf for name in (*self.columns, *more) for leaf in locate(file, name).leaves))

    @property
    def length_columns(self) -> tuple[str, ...]:
        """One column of each history: enough to know its lengths."""
        return tuple(event_columns(spec)[0] for spec in self.features.sequences.values())

    def events(self, chunk: Chunk) -> Ints:
        """Events of each row ``[n]`` over all histories, as `decode` keeps them, from ``length_columns`` alone."""
        total = np.zeros(chunk.size, dtype=np.int64)
        for column, spec in zip(self.length_columns, self.features.sequences.values()):
            total += np.clip(chunk.lists(column).lengths - spec.drop_first, 0, spec.max_length)
        return total

    def check(self, file: DataFile) -> None:
        """Raise what the file's schema alone shows to be wrong: missing columns and wrong types."""
        self.leaves(file)
        self.decode(Chunk(file, 0, file.schema.empty_table(), 0))

    def decode(self, chunk: Chunk) -> Block:
        """All features of the chunk's rows.

        :raises DataError: a value that the declaration refuses; the message names file, row, column, feature and cure.
        """
        f, n = self.features, chunk.size
        fixed: dict[str, Array] = {}
        bags: dict[str, Bag] = {}
        if f.dense:
            matrix = np.empty((n, len(f.dense)), dtype=np.float32)
            for i, (name, dense) in enumerate(f.dense.items()):
                site = Site(chunk, _column(dense, name), f"dense.{name}")
                matrix[:, i] = values.dense(site, chunk.scalar(site.column), dense)
            fixed["dense"] = matrix
        for name, vector in f.vectors.items():
            site = Site(chunk, _column(vector, name), f"vectors.{name}")
            fixed[f"vectors.{name}"] = values.vectors(site, chunk.array(site.column), vector.dim)
        for name in f.sparse:
            self._sparse(chunk, name, fixed, bags)
        for name in f.sequences:
            bags[f"sequences.{name}"] = self._sequence(chunk, name)
        if f.labels:
            fixed["labels"], fixed["label_mask"] = self._labels(chunk)
        if f.weight is not None:
            fixed["weights"] = self._weights(chunk, f.weight)
        if f.timestamp is not None:
            site = Site(chunk, f.timestamp, "timestamp")
            fixed["timestamps"] = self._read_times(site, chunk.scalar(f.timestamp), "timestamp_unit", f.timestamp_unit, "a timestamp")
        for name in f.columns:
            fixed[f"columns.{name}"] = values.carried(Site(chunk, name, "columns"), chunk.scalar(name))
        if f.request is not None:
            site = Site(chunk, f.request, "request")
            found = site.read(arrow.hashes, chunk.scalar(f.request), 0)
            fixed["request"] = values.complete(site, found, "a request")
        if f.sample_id is not None:
            fixed["sample_ids"] = values.sample_ids(Site(chunk, f.sample_id, "sample_id"), chunk.scalar(f.sample_id))
        return Block(n, fixed, bags, chunk.good)

    def _columns(self) -> list[str]:
        f = self.features
        found = [_column(spec, name) for kind in (f.dense, f.vectors) for name, spec in kind.items()]
        found += [column for name, spec in f.sparse.items() for column in spec.cross or (_column(spec, name),)]
        found += [_column(spec, name) for name, spec in f.labels.items()]
        found += [spec.weights for spec in f.sparse.values() if spec.weights]
        found += [label.mask for label in f.labels.values() if label.mask]
        for group in f.sequences.values():
            found += event_columns(group)
        return found + [c for c in (f.sample_id, f.timestamp, f.weight, f.request) if c] + list(f.columns)

    def _note_lists(self, path: str, kind: pa.DataType) -> None:
        """A column without any value, as writers make of one that is empty in all rows, does not tell."""
        if not pa.types.is_null(kind):
            self.lists[path] = arrow.is_list(kind)

    def _sparse(self, chunk: Chunk, name: str, fixed: dict[str, Array], bags: dict[str, Bag]) -> None:
        spec, path = self.features.sparse[name], f"sparse.{name}"
        column, way = _column(spec, name), self._ways[path]
        if spec.cross is not None:
            self.lists[path] = False
            sites = [Site(chunk, own, path) for own in spec.cross]
            fixed[path] = values.crossed(sites, [chunk.scalar(own) for own in spec.cross], spec, way)
            return
        if not chunk.is_list(column):
            single = chunk.scalar(column)
            self._note_lists(path, single.type)
            fixed[path] = values.ids(Site(chunk, column, path), single, spec, way)
            if spec.weights is not None:
                fixed[f"{path}.weights"] = self._weights(chunk, spec.weights)
            return
        self.lists[path] = True
        found = chunk.lists(column)
        parts: dict[str, pa.Array] = {column: found.values}
        if spec.weights is not None:
            weights = chunk.lists(spec.weights)
            _check_lengths(chunk, {column: found.offsets, spec.weights: weights.offsets}, path)
            parts[spec.weights] = weights.values
        offsets, keep = _newest(found.offsets, 0, spec.max_length)
        site = Site(chunk, column, path, (offsets,))
        bag: dict[str, Values] = {"ids": values.ids(site, _kept(parts[column], keep), spec, way)}
        if spec.weights is not None:
            at = Site(chunk, spec.weights, path, (offsets,))
            bag["weights"] = _usable_weights(at, *at.read(arrow.floats, _kept(parts[spec.weights], keep)))
        bags[path] = Bag(offsets, bag)

    def _sequence(self, chunk: Chunk, name: str) -> Bag:
        spec, path = self.features.sequences[name], f"sequences.{name}"
        found = {column: chunk.lists(column) for column in event_columns(spec)}
        _check_lengths(chunk, {column: lists.offsets for column, lists in found.items()}, path)
        offsets, keep = _newest(next(iter(found.values())).offsets, spec.drop_first, None)
        times = self._times(chunk, spec, path, _kept(found[spec.timestamps].values, keep), offsets) if spec.timestamps else None
        order: Ints | None = None
        if times is not None and spec.order != "trust":
            order = self._order(chunk, spec, path, offsets, times)
        newest, last = _newest(offsets, 0, spec.max_length)
        bag: dict[str, Values] = {}
        gaps: dict[str, Ints] = {}
        if times is not None:
            times = times if order is None else times[order]
            gaps = self._gaps(chunk, spec, times, offsets)

        def arranged(items: pa.Array) -> pa.Array:
            items = _kept(items, keep)
            return _kept(items if order is None else items.take(pa.array(order)), last)

        for key, field in spec.fields.items():
            column = _column(field, key) if field.gap is None else spec.timestamps or ""
            site = Site(chunk, column, f"{path}.fields.{key}", (newest,))
            if field.gap is None:
                items = arranged(found[column].values)
            else:
                items = pa.array(gaps[field.gap] if last is None else gaps[field.gap][last])
            if field.kind == "float":
                bag[key] = values.event_floats(site, items, field)
            elif field.kind == "vector":
                assert field.dim is not None  # Features._check
                bag[key] = values.vectors(site, items, field.dim)
            else:
                way = self._ways[site.feature]
                self._note_lists(site.feature, items.type)
                if arrow.is_list(items.type):
                    inner = arrow.lists(items)
                    nested = Site(chunk, column, site.feature, (newest, inner.offsets))
                    bag[key] = Bag(inner.offsets, {"ids": values.ids(nested, inner.values, field, way)})
                else:
                    bag[key] = values.ids(site, items, field, way)
        if times is not None:
            bag[TIMES] = times if last is None else times[last]
        return Bag(newest, bag)

    def _gaps(self, chunk: Chunk, spec: Sequence, times: Ints, offsets: Ints) -> dict[str, Ints]:
        """Time gaps of the events ``[N]`` by kind, as far as the group's fields ask for them."""
        f, found = self.features, {}
        kinds = {field.gap for field in spec.fields.values()}
        if "previous" in kinds:
            found["previous"] = np.diff(times, prepend=times[:1])
            found["previous"][offsets[:-1][np.diff(offsets) > 0]] = 0
        if "sample" in kinds:
            assert f.timestamp is not None  # Features._check
            site = Site(chunk, f.timestamp, "timestamp")
            now = values.complete(site, site.read(arrow.times, chunk.scalar(f.timestamp), f.timestamp_unit), "a timestamp")
            have, want = arrow.UNITS[f.timestamp_unit], arrow.UNITS[spec.time_unit]
            now = now // (have // want) if have >= want else now * (want // have)
            found["sample"] = np.repeat(now, np.diff(offsets)) - times
        return found

    def _times(self, chunk: Chunk, spec: Sequence, path: str, items: pa.Array, offsets: Ints) -> Ints:
        site = Site(chunk, spec.timestamps or "", path, (offsets,))
        return self._read_times(site, items, "time_unit", spec.time_unit, "the time of an event")

    def _read_times(self, site: Site, items: pa.Array, key: str, unit: str, what: str) -> Ints:
        stamps: Ints = values.complete(site, site.read(arrow.times, items, unit), what)
        # Arrow's timestamps know their unit; whole numbers do not.
        if self._check_units and stamps.size and pa.types.is_integer(items.type) and late(stamps[[stamps.argmax()]], unit)[0]:
            position = int(np.flatnonzero(late(stamps, unit))[0])
            site.fail(
                f'the time {int(stamps[position])} lies after the year 2200 in {key} = "{unit}"',
                f'set {key} = "{meant(stamps)}", or mend the times',
                position,
            )
        return stamps

    @staticmethod
    def _order(chunk: Chunk, spec: Sequence, path: str, offsets: Ints, times: Ints) -> Ints | None:
        """Positions in time order where some history is out of order (order = "sort"), None if all are in order."""
        falls = np.flatnonzero(times[1:] < times[:-1]) + 1
        falls = falls[~np.isin(falls, offsets)]
        if not falls.size:
            return None
        if spec.order == "error":
            position = int(falls[0])
            Site(chunk, spec.timestamps or "", path, (offsets,)).fail(
                f"the times of a history decrease: {int(times[position - 1])}, then {int(times[position])}",
                'sort the events, or set order = "sort" (sorted on reading) or "trust" (left as they are)',
                position,
            )
        row = np.repeat(np.arange(offsets.size - 1), np.diff(offsets))
        return np.lexsort((times, row))

    def _labels(self, chunk: Chunk) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        specs = self.features.labels
        found = np.empty((chunk.size, len(specs)), dtype=np.float32)
        masks = np.ones((chunk.size, len(specs)), dtype=bool)
        for i, (name, spec) in enumerate(specs.items()):
            if spec.mask is not None:
                at = Site(chunk, spec.mask, f"labels.{name}.mask")
                masks[:, i] = values.complete(at, at.read(arrow.booleans, chunk.scalar(spec.mask)), "a mask")
            site = Site(chunk, _column(spec, name), f"labels.{name}")
            found[:, i] = values.labels(site, chunk.scalar(site.column), spec.threshold, masks[:, i])
        return found, masks

    @staticmethod
    def _weights(chunk: Chunk, column: str) -> NDArray[np.float32]:
        site = Site(chunk, column, "weight")
        return _usable_weights(site, *site.read(arrow.floats, chunk.scalar(column)))


def _hashed_columns(path: str, ids: Ids) -> tuple[str, ...]:
    """Columns whose values are hashed."""
    if isinstance(ids, Sparse) and ids.cross is not None:
        return ids.cross
    return (_column(ids, path.rpartition(".")[2]),) if ids.hash else ()


def _column(spec: Any, name: str) -> str:
    return name if spec.column is None else str(spec.column)


def event_columns(spec: Sequence) -> list[str]:
    """Columns of a history, a field's first; its timestamps last."""
    found = [_column(field, name) for name, field in spec.fields.items() if field.gap is None]
    return found + ([spec.timestamps] if spec.timestamps else [])


def _usable_weights(site: Site, found: Array, missing: NDArray[np.bool_] | None) -> NDArray[np.float32]:
    found = values.complete(site, (found, missing), "a weight")
    bad = ~(np.isfinite(found) & (found >= 0))
    if bad.any():
        position = int(np.flatnonzero(bad)[0])
        site.fail(f"the weight {found[position]} cannot be used", "weights must be finite and not negative", position)
    return found.astype(np.float32)


def _newest(offsets: Ints, drop: int, limit: int | None) -> tuple[Ints, Ints | None]:
    """(new offsets, positions kept; None: all) after dropping the first ``drop`` items of each row and all but the last ``limit``."""
    lengths = np.diff(offsets)
    kept = np.maximum(lengths - drop, 0) if drop else lengths
    if limit is not None:
        kept = np.minimum(kept, limit)
    if np.array_equal(kept, lengths):
        return offsets, None
    fresh = np.zeros_like(offsets)
    np.cumsum(kept, out=fresh[1:])
    index = np.repeat(offsets[1:] - kept - fresh[:-1], kept)
    index += np.arange(fresh[-1])
    return fresh, index


def _kept(items: pa.Array, index: Ints | None) -> pa.Array:
    return items if index is None else items.take(pa.array(index))


def _check_lengths(chunk: Chunk, offsets: dict[str, Ints], feature: str) -> None:
    (first, want), *others = offsets.items()
    for column, have in others:
        if have is want or np.array_equal(have, want):
            continue
        row = int(np.flatnonzero(np.diff(have) != np.diff(want))[0])
        lengths = f"{int(want[row + 1] - want[row])} in {first!r}, {int(have[row + 1] - have[row])} in {column!r}"
        chunk.fail(
            f"the lists of one group have different lengths: {lengths}",
            "all list columns of a group must hold one entry an event; write them together, or declare two groups",
            (first, column),
            row,
            feature,
        )


def _check_ids(path: str, ids: Ids, rows: int) -> None:
    if ids.policy == "default" and ids.default is None:
        raise _needs_default(path)
    if ids.default is not None and not 0 <= ids.default < rows:
        raise ConfigError(
            f"default = {ids.default} does not fit the table of {rows} rows", where=f"features.{path}", fix=f"use 0 to {rows - 1}"
        )


def _needs_default(path: str) -> ConfigError:
    return ConfigError('policy = "default" needs a default', where=f"features.{path}", fix="add default = ...")
