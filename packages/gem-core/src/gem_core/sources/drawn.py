"""The random source: samples drawn for any ``[features]`` table, for load and scaling measurements. There is nothing in it to learn."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from gem_core.batch import Batch, SequenceGroup, SparseGroup
from gem_core.config.base import FrozenConfig
from gem_core.config.features import EventField, Features, Label, Sequence
from gem_core.errors import ConfigError
from gem_core.hookspecs import SourceSpec
from gem_core.sources.hashing import U64, hash_integers, salt_of, uniform
from gem_core.sources.laws import Bools, Floats, Ints, LengthLaw, LognormalLaw
from gem_core.sources.order import Cursor, indices
from gem_core.sources.shuffle import Shuffle

START, GAP = 1_704_067_200, 3600
"""Time of the first sample, and the mean time between two events of a history; in seconds."""


class RandomConfig(FrozenConfig):
    """``[data.random]``. A value is a hash of the seed, the feature and the sample's number: the same whatever the batches and ranks."""

    preset: str | None = Field(None, description="take the features and the length law of this preset's reference log")
    rows: int = Field(1_000_000, gt=0, description="samples of an epoch")
    eval_rows: int = Field(4096, gt=0, description="samples of the splits eval and test")
    seed: int = Field(7, ge=0)
    length: LengthLaw | None = Field(None, description="law of history lengths; None: the preset's, or log-normal")
    repeats: float = Field(0.0, ge=0, description="skew of the ids: id = rows x u^(1 + repeats) with u uniform; 0: all ids alike")
    rate: float = Field(0.05, gt=0, lt=1, description="share of positive labels")
    window: int = Field(1, gt=0, description="training batches among which samples are sorted by history length; 1: as drawn")
    balanced: bool = Field(False, description="deal the samples of a window to its batches by length, so that all cost about the same")
    padded: bool = Field(False, description="lengthen every history to the longest of its batch: what padding would cost")

    @property
    def law(self) -> LengthLaw:
        if self.length is not None:
            return self.length
        if self.preset is None:
            return LognormalLaw()
        from gem_core.model.presets import find

        chosen = find(self.preset)
        return LognormalLaw(mean=chosen.mean_length, sigma=1.0, zero=0.0, max=chosen.max_length)


def random_features(config: RandomConfig) -> Features:
    """:raises ConfigError: neither ``[features]`` nor a preset says what to draw."""
    if config.preset is None:
        raise ConfigError(
            "the random source does not know what to draw",
            where="data.random",
            fix='declare [features], or set preset = "base" (or another) to draw the log of a preset',
        )
    from gem_core.model.presets import find

    return find(config.preset).features()


class RandomSource:
    """Implements `gem_core.sources.contract.Source`; ``len()`` is the number of batches of an epoch.

    With ``padded``, ``true_lengths`` of a history is the column ``length.<history>`` of the batch: FLOPs and throughput of real events
    are counted from it.
    """

    def __init__(
        self,
        config: RandomConfig,
        features: Features,
        *,
        split: str = "train",
        batch_size: int = 512,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if features.columns or features.filter or features.weight:
            raise ConfigError(
                "the random source draws no columns, filters or weights", where="features", fix="remove columns, filter and weight"
            )
        if config.balanced and config.window == 1:
            raise ConfigError(
                "balanced deals the samples of several batches, and window = 1 is one", where="data.random.balanced", fix="set window = 16"
            )
        self.config, self.features = config, features
        self.shuffled, self.seed = split == "train", seed
        self._window = config.window if self.shuffled else 1
        rows = config.rows if split == "train" else config.eval_rows
        self._first = {"train": 0, "eval": config.rows, "test": config.rows + config.eval_rows}.get(split, -1)
        if self._first < 0:
            raise ConfigError(f"the random source has no split {split!r}", fix="use one of train, eval, test")
        self._cursor = Cursor(rows, batch_size, rank, world_size, drop_last, group=self._window, arranged=self._by_length)

    def __len__(self) -> int:
        return self._cursor.steps_per_epoch

    @property
    def left(self) -> int:
        """Batches that the next iteration gives."""
        return self._cursor.left

    def __iter__(self) -> Iterator[Batch]:
        # One batch is drawn ahead in a thread, so that drawing is not what a measured step waits for.
        with ThreadPoolExecutor(1) as pool:
            ahead: Future[Batch] | None = None
            for numbers in self._steps():
                ready, ahead = ahead, pool.submit(self.draw, numbers)
                if ready is not None:
                    self._cursor.advance()
                    yield ready.result()
            if ahead is not None:
                self._cursor.advance()
                yield ahead.result()
        self._cursor.finish()

    def _steps(self) -> Iterator[Ints]:
        """The sample numbers of each batch to come."""
        epoch, plan, first = self._cursor.begin()
        rank, group = self._cursor.rank, self._window
        for start in range(first // group * group, plan.steps, group):
            order = self._by_length(epoch, plan, rank, start, min(start + group, plan.steps))
            before = plan.taken(rank, start)
            for step in range(max(start, first), min(start + group, plan.steps)):
                yield self._numbers(order[plan.taken(rank, step) - before : plan.taken(rank, step + 1) - before], epoch)

    def draw(self, numbers: Ints) -> Batch:
        """The samples called ``numbers [B]``."""
        f, n = self.features, len(numbers)
        sample = hash_integers(numbers, self.config.seed)
        bags = {name: torch.from_numpy(self._ids(sample, name, f.rows_of(f"sparse.{name}"))) for name in f.sparse}
        values = list(bags.values())
        sequences, lengths = {}, {}
        for name, spec in f.sequences.items():
            sequences[name], lengths[f"length.{name}"] = self._history(sample, numbers, name, spec)
        clicks = {name: _uniform(sample, name) < self.config.rate for name in f.labels}
        return Batch(
            size=n,
            dense=torch.from_numpy(np.stack([_normal(sample, name) for name in f.dense], 1).astype(np.float32)) if f.dense else None,
            dense_names=tuple(f.dense),
            vectors={name: _vectors(sample, name, v.dim) for name, v in f.vectors.items()},
            sparse=SparseGroup(tuple(bags), torch.cat(values), torch.ones(n * len(bags), dtype=torch.int64), None, _bounds(values))
            if bags
            else None,
            sequences=sequences,
            labels=torch.from_numpy(np.stack(list(clicks.values()), 1).astype(np.float32)) if clicks else None,
            label_names=tuple(clicks),
            label_mask=torch.from_numpy(np.stack([_mask(sample, spec, self.config.rate) for spec in f.labels.values()], 1))
            if clicks
            else None,
            timestamps=torch.from_numpy(START + numbers),
            columns=lengths if self.config.padded else {},
            sample_ids=torch.from_numpy(numbers),
        )

    def state_dict(self) -> dict[str, Any]:
        return {"random": self.config.model_dump(mode="json"), "seed": self.seed, **self._cursor.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if (state["random"], state["seed"]) != (self.config.model_dump(mode="json"), self.seed):
            raise ConfigError(
                "the stored position belongs to another random log or order",
                where="[data.random], [run] seed",
                fix="resume with the options of the stored run, or start a new run",
            )
        self._cursor.load_state_dict(state)

    def _numbers(self, positions: Ints, epoch: int) -> Ints:
        """Sample numbers at positions of an epoch's order."""
        return (Shuffle(self._cursor.total, self.seed, epoch)(positions) if self.shuffled else positions) + self._first

    def _by_length(self, epoch: int, plan: Any, rank: int, first: int, stop: int) -> Ints:
        """The rank's samples of some steps; with ``window``, sorted by length, and cut into batches that change places at random, or dealt
        to them."""
        spans = plan.read(rank, first, stop)
        numbers = indices(spans)
        name = next(iter(self.features.sequences), None)
        if self._window == 1 or name is None:
            return numbers
        sample = hash_integers(self._numbers(numbers, epoch), self.config.seed)
        ordered = numbers[np.argsort(self._lengths(sample, name, self.features.sequences[name]), kind="stable")]
        sizes = [plan.taken(rank, s + 1) - plan.taken(rank, s) for s in range(first, stop)]
        if self.config.balanced:
            dealt = ordered[::-1]
            return np.concatenate([dealt[batch] for batch in _dealt(sizes)])
        batches = np.split(ordered, np.cumsum(sizes)[:-1])
        turns = np.argsort(hash_integers(np.arange(first, stop), epoch), kind="stable")
        # Batches of one size may change places; the shorter last one stays where the plan has it.
        places = [int(i) for i in turns if sizes[i] == sizes[0]]
        full = [i for i, size in enumerate(sizes) if size == sizes[0]]
        arranged = list(batches)
        for to, source in zip(full, places):
            arranged[to] = batches[source]
        return np.concatenate(arranged) if arranged else ordered

    def _lengths(self, sample: U64, name: str, spec: Sequence) -> Ints:
        return np.minimum(self.config.law.quantile(_uniform(sample, f"{name}/length")), spec.max_length)

    def _history(self, sample: U64, numbers: Ints, name: str, spec: Sequence) -> tuple[SequenceGroup, Tensor]:
        true = self._lengths(sample, name, spec)
        lengths = np.full_like(true, true.max(initial=0)) if self.config.padded else true
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        at = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
        event = hash_integers(np.repeat(sample, lengths) + at.astype(np.uint64), 1)
        fields = {key: self._field(event, f"{name}.{key}", spec, field) for key, field in spec.fields.items()}
        times = None
        if spec.timestamps is not None:
            age = np.repeat(lengths, lengths) - at
            wobble = (event % np.uint64(GAP)).astype(np.int64)
            times = torch.from_numpy(START + np.repeat(numbers, lengths) - age * GAP + wobble)
        return SequenceGroup(torch.from_numpy(offsets), fields, times, spec.max_length), torch.from_numpy(true)

    def _field(self, event: U64, key: str, spec: Sequence, field: EventField) -> Tensor:
        if field.kind == "id":
            name = key.split(".", 1)
            return torch.from_numpy(self._ids(event, key, self.features.rows_of(f"sequences.{name[0]}.fields.{name[1]}")))
        if field.kind == "float":
            return torch.from_numpy(_normal(event, key).astype(np.float32))
        raise ConfigError("the random source draws no vectors inside events", where=f"features.sequences.{key}", fix="leave the field out")

    def _ids(self, counters: U64, key: str, rows: int) -> Ints:
        u = _uniform(counters, key)
        return np.minimum((rows * u ** (1 + self.config.repeats)).astype(np.int64), rows - 1)


def _dealt(sizes: list[int]) -> list[Ints]:
    """Places of each batch when sorted samples are dealt to batches of these sizes to and fro."""
    turns = [[i for i, size in enumerate(sizes) if size > turn] for turn in range(max(sizes))]
    owner = np.array([i for turn, batches in enumerate(turns) for i in (batches[::-1] if turn % 2 else batches)], dtype=np.int64)
    return [np.flatnonzero(owner == i) for i in range(len(sizes))]


def _uniform(counters: U64, key: str) -> Floats:
    return uniform(hash_integers(counters, salt_of(key)))


def _normal(counters: U64, key: str) -> Floats:
    normal: Floats = torch.special.ndtri(torch.from_numpy(_uniform(counters, key))).numpy()
    return normal


def _vectors(sample: U64, name: str, dim: int) -> Tensor:
    flat: U64 = np.add.outer(sample, np.arange(dim, dtype=np.uint64)).ravel()
    return torch.from_numpy(_normal(flat, name).reshape(len(sample), dim).astype(np.float32))


def _mask(sample: U64, label: Label, rate: float) -> Bools:
    return np.ones(len(sample), dtype=bool) if label.mask is None else _uniform(sample, label.mask) < rate


def _bounds(values: list[Tensor]) -> tuple[int, ...]:
    return tuple(int(x) for x in np.cumsum([0, *(v.numel() for v in values)]))


def build_random(
    config: RandomConfig,
    features: Features,
    *,
    split: str,
    batch_size: int,
    shard: tuple[int, int] = (0, 1),
    seed: int = 0,
    drop_last: bool = False,
) -> RandomSource:
    """``seed`` (of the run) orders the training samples; the log's own seed says what is drawn."""
    chosen = random_features(config) if features == Features() else features
    rank, world_size = shard
    return RandomSource(
        config, chosen, split=split, batch_size=batch_size, rank=rank, world_size=world_size, seed=seed, drop_last=drop_last
    )


SPEC = SourceSpec("random", RandomConfig, build_random, random_features)
