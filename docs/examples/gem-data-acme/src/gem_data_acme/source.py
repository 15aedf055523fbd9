"""The source ``sqlite``; see the README for the layout of a database."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field

from gem_core.batch import Batch, SequenceGroup, SparseGroup
from gem_core.config import FrozenConfig
from gem_core.config.features import Features, Sequence
from gem_core.errors import ConfigError, DataError
from gem_core.sources.order import Cursor
from gem_core.sources.shuffle import Shuffle

CHUNK = 900
"""Values in one query: SQLite builds may refuse more than 999."""


class SqliteConfig(FrozenConfig):
    """``[data.sqlite]``"""

    path: str = Field(description="the database file")


class SqliteSource:
    """Implements `gem_core.sources.Source` for dense features, single-valued sparse features, histories of ids, and labels."""

    def __init__(
        self, config: SqliteConfig, features: Features, split: str, batch_size: int, rank: int, world: int, seed: int, drop_last: bool
    ) -> None:
        self.path, self.features, self.split, self.seed = Path(config.path), features, split, seed
        if features.vectors or features.columns or features.filter or features.weight:
            raise ConfigError(
                "the source sqlite reads dense, sparse, history and label columns only",
                where="[features]",
                fix="remove vectors, columns, filter and weight, or convert the log to Parquet",
            )
        if not self.path.is_file():
            raise DataError("the database does not exist", where=str(self.path), fix="check data.sqlite.path")
        self.ids = np.array([row[0] for row in self._rows(split, ("id",), "ORDER BY id")], dtype=np.int64)
        self.cursor = Cursor(len(self.ids), batch_size, rank, world, drop_last)

    def __len__(self) -> int:
        return self.cursor.steps_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        for epoch, spans in self.cursor.steps():
            places = np.concatenate([np.arange(a, b) for a, b in spans]) if spans else np.empty(0, dtype=np.int64)
            if self.split == "train":
                places = Shuffle(len(self.ids), self.seed, epoch)(places)
            yield self.fetch(self.ids[places])

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed, **self.cursor.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["seed"] != self.seed:
            raise ConfigError("the stored position belongs to another order", where="[run] seed", fix=f"resume with seed {state['seed']}")
        self.cursor.load_state_dict(state)

    def fetch(self, ids: np.ndarray) -> Batch:
        """The samples ``ids [B]``, in this order."""
        f = self.features
        kinds: dict[str, Mapping[str, Any]] = {"dense": f.dense, "sparse": f.sparse, "labels": f.labels}
        columns = {(kind, name): spec.column or name for kind, specs in kinds.items() for name, spec in specs.items()}
        found = {row[0]: row[1:] for row in self._rows(self.split, ("id", *columns.values()), "WHERE id IN", ids)}
        table = [found[i] for i in ids.tolist()]
        values = {key: np.array([row[at] for row in table], dtype=object) for at, key in enumerate(columns)}
        for (_, name), column in values.items():
            if None in column:
                raise DataError(
                    f"{name!r} is null", where=f"{self.path}, table {self.split}, id {ids[list(column).index(None)]}", fix="fill it in"
                )
        dense = [values["dense", name].astype(np.float32) for name in f.dense]
        sparse = [self._checked(values["sparse", name].astype(np.int64), f"sparse.{name}") for name in f.sparse]
        labels = [values["labels", name].astype(np.float32) for name in f.labels]
        n = len(ids)
        return Batch(
            size=n,
            dense=torch.from_numpy(np.stack(dense, 1)) if dense else None,
            dense_names=tuple(f.dense),
            sparse=SparseGroup(
                tuple(f.sparse),
                torch.from_numpy(np.concatenate(sparse)),
                torch.ones(n * len(sparse), dtype=torch.int64),
                offsets_per_key=tuple(range(0, n * len(sparse) + 1, n)) if n else (0,) * (len(sparse) + 1),
            )
            if sparse
            else None,
            sequences={name: self._history(ids, name, spec) for name, spec in f.sequences.items()},
            labels=torch.from_numpy(np.stack(labels, 1)) if labels else None,
            label_names=tuple(f.labels),
            sample_ids=torch.from_numpy(ids),
        )

    def _history(self, ids: np.ndarray, name: str, spec: Sequence) -> SequenceGroup:
        fields = {key: field.column or key for key, field in spec.fields.items()}
        events: dict[int, list[tuple[Any, ...]]] = {i: [] for i in ids.tolist()}
        for sample, *event in self._rows(name, ("sample", "place", *fields.values()), "WHERE sample IN", ids):
            events[sample].append(tuple(event))
        kept = [sorted(events[i])[-spec.max_length :] for i in ids.tolist()]
        offsets = np.cumsum([0, *map(len, kept)])
        flat = [event for history in kept for event in history]
        return SequenceGroup(
            torch.from_numpy(offsets),
            {
                key: torch.from_numpy(
                    self._checked(np.array([event[at] for event in flat], dtype=np.int64), f"sequences.{name}.fields.{key}")
                )
                for at, key in enumerate(fields, 1)
            },
            None,
            spec.max_length,
        )

    def _checked(self, values: np.ndarray, path: str) -> np.ndarray:
        rows = self.features.rows_of(path)
        if values.size and not (values.min() >= 0 and values.max() < rows):
            worst = int(values.max() if values.max() >= rows else values.min())
            raise DataError(
                f"the id {worst} does not fit a table of {rows} rows", where=f"{self.path}, features.{path}", fix="raise rows, or mend it"
            )
        return values

    def _rows(self, table: str, columns: tuple[str, ...], rest: str, ids: np.ndarray | None = None) -> list[tuple[Any, ...]]:
        # Backticks: between double quotes SQLite takes the name of a missing column for a text.
        quoted = ", ".join("`" + c.replace("`", "``") + "`" for c in columns)
        query = f"SELECT {quoted} FROM `{table}` {rest}"
        try:
            with closing(sqlite3.connect(f"file:{self.path}?mode=ro", uri=True)) as base:
                if ids is None:
                    return base.execute(query).fetchall()
                found = []
                for start in range(0, len(ids), CHUNK):
                    some = ids[start : start + CHUNK].tolist()
                    found += base.execute(f"{query} ({', '.join('?' * len(some))})", some).fetchall()
                return found
        except sqlite3.Error as error:
            raise DataError(
                f"the database cannot be read: {error}", where=f"{self.path}, table {table}", fix="compare it with the README"
            ) from error


def build(
    config: SqliteConfig, features: Features, *, split: str, batch_size: int, shard: tuple[int, int] = (0, 1), seed: int = 0,
    drop_last: bool = False,
) -> SqliteSource:  # fmt: skip
    return SqliteSource(config, features, split, batch_size, *shard, seed, drop_last)
