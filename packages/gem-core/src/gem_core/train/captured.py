"""``train.capture``: a training step recorded as a CUDA graph and replayed, one launch a step instead of thousands.

A graph is fixed in shapes and addresses, and batches of histories are not. So a batch is copied into tensors that stay where they are and
have room for more events and ids than it holds (`Room`); what is beyond is slack, which no result depends on. For each such room the first
step is computed as usual, which also compiles and allocates what it needs, the second is recorded, and from then on it is replayed.
Learning rates, the sample total and the random state are read from the device, so that a replayed step computes what the step would.

A recipe may change what a step computes. Its guard's ``recording()`` names that (`gem_core.Guard`): a recording serves while the name is
the one it was made under, and a step without a name is computed as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gem_core.batch import Batch, SequenceGroup, SparseGroup
from gem_core.config import Config, Features
from gem_core.errors import ConfigError, RunError
from gem_core.jagged import Jagged
from gem_core.model.tables import LocalTables
from gem_core.train.build import Parts
from gem_core.train.runtime import Runtime

MOST = 24
"""Recorded steps a run; more mean that the batches' shapes do not repeat."""

SPARE = 1.5
"""A batch goes into a room that exists if this has at most so many times the rows that the batch needs."""

LARGE, TIGHT, ENOUGH = 16_384, 1.05, 12
"""Slack rows are computed: counts from `LARGE` on may be only `TIGHT` times what is needed, until there are `ENOUGH` rooms."""


def check_capture(parts: Parts, config: Config, runtime: Runtime) -> None:
    """:raises ConfigError: this run's steps cannot be recorded; says why."""
    train = config.train
    reasons = {
        f"the run is on {runtime.device.type}, and only CUDA devices record steps": runtime.device.type != "cuda",
        f"{runtime.world} processes take part, and their collectives are not recorded": runtime.world > 1,
        "train.accumulate > 1": train.accumulate > 1,
        "train.compile = true": train.compile,
        f"the tables of parallel.sparse = {config.parallel.sparse!r} are not the core's": parts.tables is not None
        and not isinstance(parts.tables, LocalTables),
        f"the model {config.model.name!r} does not say that it takes slack rows": not getattr(parts.model, "takes_slack", False),
        f"the recipe {config.precision.recipe!r} counts steps on the host": not getattr(parts.guard, "capturable", False),
    }
    for reason, met in reasons.items():
        if met:
            raise ConfigError(f"steps cannot be captured: {reason}", where="train.capture", fix="set train.capture = false")


@dataclass(frozen=True)
class Room:
    """What a recorded step is for: ``size`` samples, at most ``events`` rows a history and ``ids`` a sparse feature."""

    size: int
    events: Mapping[str, int]
    ids: Mapping[str, int]

    @classmethod
    def of(cls, batch: Batch) -> Room:
        sparse = batch.sparse
        bounds = () if sparse is None else sparse.key_bounds()
        ids = {} if sparse is None else {key: b - a for key, a, b in zip(sparse.keys, bounds, bounds[1:])}
        return cls(batch.size, {name: _rows(name, group) for name, group in batch.sequences.items()}, ids)

    def takes(self, other: Room, spare: float = SPARE) -> bool:
        """Whether a batch that needs ``other`` goes in here without too much slack: ``spare`` times its rows where these are many."""
        if self.size != other.size or self.events.keys() != other.events.keys() or self.ids.keys() != other.ids.keys():
            return False
        pairs = [*zip(self.events.values(), other.events.values()), *zip(self.ids.values(), other.ids.values())]
        return all(need <= have <= max(need * (spare if need >= LARGE else SPARE), need + 64) for have, need in pairs)

    def rounded(self) -> Room:
        """A sixteenth more, then up to a multiple of an eighth of the power of two below; large counts: a 64th, and a 32nd. Features of one
        id a sample stay as they are."""
        return Room(
            self.size,
            {name: _larger(n) for name, n in self.events.items()},
            {key: n if n == self.size else _larger(n) for key, n in self.ids.items()},
        )


class FixedBatch:
    """``batch``, a batch with room for ``room`` in tensors that stay where they are; `fill` copies another batch into them.

    :param like: gives the members, dtypes and widths.
    :param history: whose events ``targets`` are of.
    """

    def __init__(self, like: Batch, room: Room, features: Features, history: str | None) -> None:
        self.room, self.history = room, history
        self._own = {path: _zeros(t, self._count(path, t)) for path, t in self._tensors(like).items() if not path.startswith("ids.")}
        sparse, keys = None, () if like.sparse is None else like.sparse.keys
        if like.sparse is not None:
            bounds = [0]
            for key in keys:
                bounds.append(bounds[-1] + room.ids[key])
            flat = {n: _zeros(t, bounds[-1]) for n in ("values", "weights") if (t := getattr(like.sparse, n)) is not None}
            for name, whole in flat.items():
                self._own |= {f"ids.{key}.{name}": whole[a:b] for key, a, b in zip(keys, bounds, bounds[1:])}
            slack = any(n != room.size for n in room.ids.values())
            sparse = SparseGroup(keys, flat["values"], self._own["sparse.lengths"], flat.get("weights"), tuple(bounds), slack)
        own = self._own
        plain: dict[str, Any] = {name: own.get(name) for name in _PLAIN}
        self.batch = replace(
            like,
            **plain,
            vectors={name: own[f"vectors.{name}"] for name in like.vectors},
            sparse=sparse,
            sequences={name: self._sequence(name, group, features) for name, group in like.sequences.items()},
            targets=own.get("targets"),
            target_mask=own.get("target_mask"),
            columns={},
            sample_ids=None,
        )

    def _sequence(self, name: str, group: SequenceGroup, features: Features) -> SequenceGroup:
        longest = features.sequences[name].max_length if name in features.sequences else group.max_length
        fields = {f: self._own[f"events.{name}.{f}"] for f in group.fields}
        return SequenceGroup(self._own[f"offsets.{name}"], fields, self._own.get(f"times.{name}"), longest, slack=True)

    def fill(self, batch: Batch) -> None:
        """Take the values of a batch that fits; masked positions are all that need be cleared of what was there before."""
        given = self._tensors(batch)
        torch._foreach_copy_([self._own[path][: t.shape[0]] for path, t in given.items()], list(given.values()))
        if batch.targets is not None:
            self._own["target_mask"][batch.targets.shape[0] :].zero_()

    def _count(self, path: str, tensor: Tensor) -> int:
        kind, _, rest = path.partition(".")
        if kind in ("targets", "target_mask"):
            assert self.history is not None
            return self.room.events[self.history]
        return self.room.events[rest.split(".")[0]] if kind in ("events", "times") else tensor.shape[0]

    def _tensors(self, batch: Batch) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {name: t for name in _PLAIN if (t := getattr(batch, name)) is not None}
        found |= {f"vectors.{name}": t for name, t in batch.vectors.items()}
        if batch.targets is not None:
            mask = batch.target_mask
            found |= {"targets": batch.targets, "target_mask": torch.ones_like(batch.targets, dtype=torch.bool) if mask is None else mask}
        if batch.sparse is not None:
            found["sparse.lengths"] = batch.sparse.lengths
            bounds = batch.sparse.key_bounds()
            for key, a, b in zip(batch.sparse.keys, bounds, bounds[1:]):
                found[f"ids.{key}.values"] = batch.sparse.values[a:b]
                if batch.sparse.weights is not None:
                    found[f"ids.{key}.weights"] = batch.sparse.weights[a:b]
        for name, group in batch.sequences.items():
            found[f"offsets.{name}"] = group.offsets
            found |= {f"events.{name}.{f}": t for f, t in group.fields.items() if isinstance(t, Tensor)}
            if group.timestamps is not None:
                found[f"times.{name}"] = group.timestamps
        return found


_PLAIN = ("dense", "labels", "label_mask", "weights", "num_targets", "timestamps")


class Captured:
    """Callable on a batch and the host's three totals. ``compute(batch, totals [3]) -> outcome``: the step itself; ``state()``: the name of
    what it computes now, None for a step that is not to be replayed."""

    def __init__(
        self,
        compute: Callable[[Batch, Tensor], Tensor],
        features: Features,
        device: torch.device,
        state: Callable[[], Hashable | None] = tuple,
    ) -> None:
        self.compute, self.features, self.device, self.state = compute, features, device, state
        self.history = features.next_item_field()[0] if features.next_item is not None else None
        self._recorded: list[_Recorded] = []
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, batch: Batch, totals: list[float]) -> Tensor:
        found, state = self._of(batch), self.state()
        if state is not None and state != found.state:
            found.state, found.graph, found.ran = state, None, False
        found.fixed.fill(batch)
        for place, value in zip(found.totals, totals):
            place.fill_(value)
        if found.ran and found.graph is None and state is not None:
            self._record(found)
        if found.graph is None or state is None:
            found.ran = True
            return self.compute(found.fixed.batch, found.totals)
        found.graph.replay()
        assert found.outcome is not None
        return found.outcome.clone()

    def _of(self, batch: Batch) -> _Recorded:
        need = Room.of(batch)
        spare = TIGHT if len(self._recorded) < ENOUGH else SPARE
        fitting = [r for r in self._recorded if r.fixed.room.takes(need, spare)]
        if fitting:
            return min(fitting, key=lambda r: sum(r.fixed.room.events.values()) + sum(r.fixed.room.ids.values()))
        if len(self._recorded) == MOST:
            raise RunError(
                f"the batches of this run have more than {MOST} kinds of shapes ({need.size} samples, events {dict(need.events)}, ids "
                f"{dict(need.ids)} is one more), and each needs a recording of its own",
                where="train.capture",
                fix="set data.drop_last = true or a larger data.batch_size, which makes batches more alike, or train.capture = false",
            )
        fixed = FixedBatch(batch, need.rounded(), self.features, self.history)
        self._recorded.append(_Recorded(fixed, torch.zeros(3, dtype=torch.float64, device=self.device)))
        return self._recorded[-1]

    def _record(self, recorded: _Recorded) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            # other threads read data and pin memory meanwhile
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                recorded.outcome = self.compute(recorded.fixed.batch, recorded.totals)
        except RuntimeError as error:
            raise RunError(
                f"the step cannot be recorded: {str(error).splitlines()[0]}",
                where="train.capture",
                fix="something in it waits for the device; choose other kernels ([kernels]), or set train.capture = false",
            ) from error
        recorded.graph = graph


@dataclass
class _Recorded:
    fixed: FixedBatch
    totals: Tensor
    state: Hashable = None
    ran: bool = False
    graph: torch.cuda.CUDAGraph | None = None
    outcome: Tensor | None = None


def _rows(name: str, group: SequenceGroup) -> int:
    inner = [f for f, value in group.fields.items() if isinstance(value, Jagged)]
    if inner:
        raise RunError(
            f"the field {inner[0]!r} has several values an event, and steps of such batches are not captured",
            where=f"features.sequences.{name}.fields.{inner[0]}",
            fix="set train.capture = false",
        )
    tensors = [t for t in (*group.fields.values(), group.timestamps) if isinstance(t, Tensor)]
    return tensors[0].shape[0] if tensors else 0


def _larger(n: int) -> int:
    part, bits = (64, 6) if n >= LARGE else (16, 4)
    n = max(64, n + n // part)
    step = max(1, 1 << (n.bit_length() - bits))
    return -(-n // step) * step


def _zeros(like: Tensor, rows: int) -> Tensor:
    return torch.zeros((rows, *like.shape[1:]), dtype=like.dtype, device=like.device)
