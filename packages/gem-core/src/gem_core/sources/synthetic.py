"""The synthetic source: an ads log with planted structure and known click probability, made on the fly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from gem_core.batch import Batch, SequenceGroup, SparseGroup
from gem_core.config.base import FrozenConfig
from gem_core.config.features import Dense, EventField, Features, Label, Sequence, Sparse, Table
from gem_core.errors import ConfigError
from gem_core.hookspecs import SourceSpec
from gem_core.sources import planted
from gem_core.sources.contract import TRUE_PROBABILITY
from gem_core.sources.laws import Bools, Floats, Ints, LengthLaw, LognormalLaw
from gem_core.sources.order import Cursor, indices
from gem_core.sources.planted import PlantedLog, Samples
from gem_core.sources.shuffle import Shuffle
from gem_core.sources.transform import scaled

HISTORY = "history"
_EVENT_FIELDS = ("item", "category", "action")
_DENSE = {
    "price": Dense(),
    "creative_quality": Dense(),
    "session_depth": Dense(transform="log1p", mean=0.76, std=0.37),
    "tenure": Dense(),
    "account_activity": Dense(mean=2.7, std=1.4),
}


class SyntheticConfig(FrozenConfig):
    """``[data.synthetic]``. ``seed`` makes another log; the order of training samples follows ``[run] seed``."""

    rows: int = Field(400_000, gt=0, description="training samples")
    eval_rows: int = Field(40_000, gt=0)
    test_rows: int = Field(40_000, gt=0)
    seed: int = Field(7, ge=0)
    length: LengthLaw = Field(LognormalLaw(), description="law of the users' history lengths")
    users: int = Field(50_000, gt=0)
    categories: int = Field(12, gt=1, le=4096)
    items_per_category: int = Field(64, gt=0, le=65_536)
    advertisers: int = Field(200, gt=0)
    days: int = Field(14, gt=0, description="days that the log spans; train, eval and test follow one another")
    start: int = Field(1_704_067_200, description="unix time of the first sample")
    ctr: float = Field(0.09, gt=0, lt=1, description="mean click rate")
    cvr: float = Field(0.15, gt=0, lt=1, description="mean conversion rate of the clicked")

    drift: float = Field(0.0, ge=0, description="radians a day by which the planted effects on clicks turn towards others; 0: they stay")

    @property
    def max_history(self) -> int:
        return self.length.max

    @property
    def total(self) -> int:
        return self.rows + self.eval_rows + self.test_rows

    def user_lengths(self, u: Floats) -> Ints:
        return self.length.quantile(u)

    def split(self, name: str) -> tuple[int, int]:
        """First and one-past-last sample number of "train", "eval" or "test"."""
        edges = {"train": (0, self.rows), "eval": (self.rows, self.rows + self.eval_rows), "test": (self.rows + self.eval_rows, self.total)}
        if name not in edges:
            raise ConfigError(f"the synthetic source has no split {name!r}", fix=f"use one of {', '.join(edges)}")
        return edges[name]


def synthetic_features(config: SyntheticConfig) -> Features:
    """The ``[features]`` table of the synthetic log. User ids are carried as a column for GAUC, not offered as a feature."""
    item = Table(rows=config.categories * config.items_per_category)
    return Features(
        sample_id="sample_id",
        timestamp="timestamp",
        columns=("user_id", TRUE_PROBABILITY + "ctr", TRUE_PROBABILITY + "cvr"),
        tables={"item": item, "category": Table(rows=config.categories)},
        dense=_DENSE,
        sparse={
            "item": Sparse(table="item"),
            "category": Sparse(table="category"),
            "advertiser": Sparse(rows=config.advertisers),
            "position": Sparse(rows=planted.POSITIONS),
            "device": Sparse(rows=planted.DEVICES),
            "hour": Sparse(rows=planted.HOURS),
            "age": Sparse(rows=planted.AGES),
            "country": Sparse(rows=planted.COUNTRIES),
        },
        sequences={
            HISTORY: Sequence(
                fields={"item": EventField(table="item"), "category": EventField(table="category"), "action": EventField(rows=3)},
                timestamps="time",
                max_length=config.max_history,
                target={"item": "item", "category": "category"},
            )
        },
        labels={"ctr": Label(column="click"), "cvr": Label(column="conversion", mask="click")},
    )


class SyntheticSource:
    """Implements `gem_core.sources.contract.Source`; ``len()`` is the number of batches of an epoch.

    ``features`` may leave out features of `synthetic_features`, add tables' ``dim`` and the like, or shorten the history; it may not
    declare others. A shorter history is cut, but the planted probability still reads what was cut off (at most 64 events are read).
    """

    def __init__(
        self,
        config: SyntheticConfig,
        features: Features | None = None,
        *,
        split: str = "train",
        batch_size: int = 512,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.config = config
        self.features = _checked(features, synthetic_features(config))
        self.log = PlantedLog(config)
        self._identity = {"seed": seed, "log": config.model_dump(mode="json")}
        self.seed = seed
        self.shuffled = split == "train"
        self._first, stop = config.split(split)
        self._cursor = Cursor(stop - self._first, batch_size, rank, world_size, drop_last)

    def __len__(self) -> int:
        return self._cursor.steps_per_epoch

    @property
    def left(self) -> int:
        """Batches that the next iteration gives."""
        return self._cursor.left

    def __iter__(self) -> Iterator[Batch]:
        for epoch, spans in self._cursor.steps():
            positions = indices(spans)
            if self.shuffled:
                positions = Shuffle(self._cursor.total, self.seed, epoch)(positions)
            yield to_batch(self.log.samples(positions + self._first), self.features)

    def state_dict(self) -> dict[str, Any]:
        return {**self._identity, **self._cursor.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # options that came after the position was stored had their defaults then
        state = {**state, "log": SyntheticConfig.model_validate(state["log"]).model_dump(mode="json")}
        for key, where in {"seed": "[run] seed", "log": "[data.synthetic]"}.items():
            if state[key] != self._identity[key]:
                raise ConfigError(
                    "the stored position belongs to another synthetic log",
                    where=f"{where}: stored {state[key]}, now {self._identity[key]}",
                    fix="resume with the options of the stored run, or start a new run",
                )
        self._cursor.load_state_dict(state)


def to_batch(samples: Samples, features: Features) -> Batch:
    """Samples of the planted log as a Batch of the declared features."""
    n = samples.index.size
    dense = [scaled(samples.dense[spec.column or name], spec, spec.clip) for name, spec in features.dense.items()]
    sparse = [samples.sparse[spec.column or name] for name, spec in features.sparse.items()]
    labels = {"click": samples.click, "conversion": samples.conversion}
    columns = {
        "user_id": samples.user,
        TRUE_PROBABILITY + "ctr": samples.p_click,
        TRUE_PROBABILITY + "cvr": samples.p_conversion,
    }
    names = tuple(features.labels)
    return Batch(
        size=n,
        dense=torch.from_numpy(np.stack(dense, 1)) if dense else None,
        dense_names=tuple(features.dense),
        sparse=SparseGroup(
            tuple(features.sparse),
            torch.from_numpy(np.concatenate(sparse)),
            torch.ones(n * len(sparse), dtype=torch.int64),
            None,
            tuple(n * i for i in range(len(sparse) + 1)),
        )
        if sparse
        else None,
        sequences={name: _history(samples, spec) for name, spec in features.sequences.items()},
        labels=torch.from_numpy(np.stack([labels[features.labels[t].column or t] for t in names], 1).astype(np.float32)) if names else None,
        label_names=names,
        label_mask=torch.from_numpy(np.stack([_mask(samples, features.labels[t]) for t in names], 1)) if names else None,
        timestamps=torch.from_numpy(samples.time),
        columns={name: torch.from_numpy(columns[name]) for name in features.columns},
        sample_ids=torch.from_numpy(samples.index),
    )


def _mask(samples: Samples, label: Label) -> np.ndarray:
    return np.ones(samples.index.size, dtype=bool) if label.mask is None else samples.click


def _history(samples: Samples, spec: Sequence) -> SequenceGroup:
    events = samples.events
    offsets = events.offsets
    keep: slice | Bools = slice(None)
    lengths = np.diff(offsets)
    if lengths.size and int(lengths.max()) > spec.max_length:
        kept = np.minimum(lengths, spec.max_length)
        keep = np.arange(offsets[-1]) >= np.repeat(offsets[1:] - kept, lengths)
        offsets = np.concatenate([[0], np.cumsum(kept)])
    fields: dict[str, Tensor] = {name: torch.from_numpy(getattr(events, f.column or name)[keep]) for name, f in spec.fields.items()}
    times = None if spec.timestamps is None else torch.from_numpy(events.time[keep])
    return SequenceGroup(torch.from_numpy(offsets), fields, times, spec.max_length)


def _checked(asked: Features | None, own: Features) -> Features:
    """``asked`` if every feature in it is one of the synthetic log's, with tables large enough."""
    if asked is None or asked == Features():
        return own

    def unknown(where: str, names: Any, known: Any) -> None:
        for name in names:
            if name not in known:
                raise ConfigError(
                    f"the synthetic log has no {name!r}",
                    where=f"features.{where}",
                    fix=f"it has: {', '.join(known)}; or leave [features] out",
                )

    for kind, known in (("dense", planted.DENSE), ("sparse", own.sparse), ("labels", ("click", "conversion"))):
        unknown(kind, [spec.column or name for name, spec in getattr(asked, kind).items()], known)
    unknown("vectors", asked.vectors, ())
    unknown("columns", asked.columns, own.columns)
    for name, group in asked.sequences.items():
        unknown(f"sequences.{name}.fields", [f.column or n for n, f in group.fields.items()], _EVENT_FIELDS)
    for name, label in asked.labels.items():
        unknown(f"labels.{name}.mask", [label.mask] if label.mask else [], ("click",))
    for what in ("filter", "weight"):
        if getattr(asked, what) is not None:
            raise ConfigError(f"the synthetic source has no {what}", where=f"features.{what}", fix=f"remove {what}")
    rows = {"item": own.tables["item"].rows, "category": own.tables["category"].rows, "action": 3}
    rows |= {name: own.rows_of(f"sparse.{name}") for name in own.sparse}
    for path, ids in asked.id_features().items():
        need = rows[ids.column or path.rsplit(".", 1)[-1]]
        if asked.rows_of(path) < need or ids.hash:
            raise ConfigError(
                f"ids of the synthetic log go up to {need - 1} and are not hashed",
                where=f"features.{path}",
                fix=f"give the table rows = {need} or more",
            )
    return asked


def build_synthetic(
    config: SyntheticConfig,
    features: Features,
    *,
    split: str,
    batch_size: int,
    shard: tuple[int, int] = (0, 1),
    seed: int = 0,
    drop_last: bool = False,
) -> SyntheticSource:
    rank, world_size = shard
    return SyntheticSource(
        config, features, split=split, batch_size=batch_size, rank=rank, world_size=world_size, seed=seed, drop_last=drop_last
    )


SPEC = SourceSpec("synthetic", SyntheticConfig, build_synthetic, synthetic_features)
