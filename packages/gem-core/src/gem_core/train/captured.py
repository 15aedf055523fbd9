"""``train.capture``: a training step recorded as CUDA graphs and replayed, one or two launches a step instead of thousands.

A graph is fixed in shapes and addresses, and batches of histories are not. So a batch is copied into tensors that stay where they are and
have room for more events and ids than it holds (`Room`); what is beyond is slack, which no result depends on. For each such room the first
step is computed as usual, which also compiles and allocates what it needs, the second is recorded, and from then on it is replayed.
Learning rates, the sample total and the random state are read from the device, so that a replayed step computes what the step would.

All graphs share one pool of memory, which holds what the largest of them needs. A step computed as usual needs as much beside it. Where
that is not there, a room's first step is recorded at once: what it calls was compiled for rooms before, or is while it is recorded.

With the core's own tables in one process the whole step is one graph. Other tables exchange ids, wait for sizes or call collectives, which
graphs do not hold: then the step is cut where they are read. What they give goes into fixed tensors too (`FixedRows`), graphs hold the
dense part, and the tables get the gradients of those tensors, slack left out.

A recipe may change what a step computes. Its guard's ``recording()`` names that (`gem_core.Guard`): a recording serves while the name is
the one it was made under, and a step without a name is computed as usual.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gem_core.batch import Batch, SequenceGroup, SparseGroup
from gem_core.config import Config, Features
from gem_core.errors import ConfigError, RunError
from gem_core.jagged import Jagged
from gem_core.model.base import RankingModel
from gem_core.model.embedding import Embedded
from gem_core.model.tables import LocalTables
from gem_core.ops import siblings
from gem_core.ops.remember import recording
from gem_core.train.build import Parts
from gem_core.train.runtime import Runtime

T = TypeVar("T")

_log = logging.getLogger(__name__)

MOST = 24
"""Rooms that a run keeps; one more takes the place of that which was not used for longest."""

SPARE = 1.5
"""A batch goes into a room that exists if this has at most so many times the rows that the batch needs."""

MARGIN = 1.1
"""A step computed as usual is expected to need at most so many times the memory of graphs of as many rows."""

LARGE, TIGHT, ENOUGH = 16_384, 1.02, 16
"""Slack rows are computed: counts from `LARGE` on may be only `TIGHT` times what is needed, until there are `ENOUGH` rooms."""


def check_capture(parts: Parts, config: Config, runtime: Runtime) -> None:
    """:raises ConfigError: this run's steps cannot be recorded; says why."""
    train, several = config.train, runtime.world > 1
    reasons = {
        f"the run is on {runtime.device.type}, and only CUDA devices record steps": runtime.device.type != "cuda",
        "train.accumulate > 1": train.accumulate > 1,
        "train.compile = true": train.compile,
        f"parallel.dense = {config.parallel.dense!r} does more than average the gradients of whole copies": several
        and parts.module is not parts.model,
        "several processes share running statistics": several and bool(parts.buffers()),
        "several processes update the tables by AdamW": several and train.tables.kind == "adamw",
        f"the model {config.model.name!r} chooses the rows it reads in its forward pass, and they are read outside of the recording": cuts(
            parts, runtime
        )
        and not reads_what_the_batch_says(parts.model),
        f"the model {config.model.name!r} does not say that it takes slack rows": not getattr(parts.model, "takes_slack", False),
        f"the recipe {config.precision.recipe!r} counts steps on the host": not getattr(parts.guard, "capturable", False),
    }
    for reason, met in reasons.items():
        if met:
            raise ConfigError(f"steps cannot be captured: {reason}", where="train.capture", fix="set train.capture = false")


def cuts(parts: Parts, runtime: Runtime) -> bool:
    """Whether a captured step is cut at the look-ups: anything but the core's own tables in one process."""
    return runtime.world > 1 or not (parts.tables is None or isinstance(parts.tables, LocalTables))


def reads_what_the_batch_says(model: nn.Module) -> bool:
    """Whether the ids that the model looks up are known before its forward pass: those of the batch."""
    return type(model).forward is RankingModel.forward


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

    @property
    def rows(self) -> int:
        return sum(self.events.values()) + sum(self.ids.values())

    def takes(self, other: Room, spare: float = SPARE) -> bool:
        """Whether a batch that needs ``other`` goes in here without too much slack: ``spare`` times its rows where these are many."""
        if self.size != other.size or self.events.keys() != other.events.keys() or self.ids.keys() != other.ids.keys():
            return False
        pairs = [*zip(self.events.values(), other.events.values()), *zip(self.ids.values(), other.ids.values())]
        return all(need <= have <= max(need * (spare if need >= LARGE else SPARE), need + 64) for have, need in pairs)

    def rounded(self) -> Room:
        """A sixteenth more, then up to a multiple of an eighth of the power of two below; large counts: of a 64th of that. Features of one
        id a sample stay as they are, and so does all of a batch without samples: slack belongs to the last of them."""
        if not self.size:
            return self
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
        _copy([self._own[path][: t.shape[0]] for path, t in given.items()], list(given.values()))
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


class FixedRows:
    """What tables gave for a batch (``like``: by look-up pooled rows, or rows and offsets), in tensors that stay where they are, with the
    slack of ``room``. These are leaves of the backward pass of what comes after; the fields of a history's events are columns of one.

    :param memory: rows that all rooms share, since one batch is in one room at a time.
    """

    def __init__(self, like: Embedded, room: Room, memory: dict[str, Tensor]) -> None:
        self._offsets: dict[str, Tensor] = {}
        self._leaves: dict[tuple[str, ...], Tensor] = {}
        self._widths: dict[tuple[str, ...], list[int]] = {}
        together: dict[str, list[tuple[str, Tensor]]] = {}
        for key, value in like.items():
            rows, offsets = value if isinstance(value, tuple) else (value, None)
            name = key
            if offsets is not None:
                self._offsets[key] = torch.zeros_like(offsets)
                name = f"{key.split('.')[1]}, {rows.dtype}, {rows.requires_grad}, events"
            together.setdefault(name, []).append((key, rows))
        for name, members in together.items():
            keys, (first, rows) = tuple(key for key, _ in members), members[0]
            events = first in self._offsets
            count, widths = room.events[first.split(".")[1]] if events else rows.shape[0], [r.shape[1] for _, r in members]
            if name not in memory or memory[name].shape[0] < count:
                later = count // 8 if events else 0  # later rooms may be a little larger
                memory[name] = rows.new_zeros(count + later, sum(widths))
            self._leaves[keys] = memory[name][:count].detach().requires_grad_(rows.requires_grad)
            self._widths[keys] = widths

    def embedded(self) -> dict[str, Tensor | tuple[Tensor, Tensor]]:
        """What the tables gave, for a forward pass."""
        found: dict[str, Tensor | tuple[Tensor, Tensor]] = {}
        for keys, leaf in self._leaves.items():
            parts = siblings.columns(leaf, self._widths[keys]) if len(keys) > 1 else (leaf,)
            found |= {key: (part, self._offsets[key]) if key in self._offsets else part for key, part in zip(keys, parts)}
        return found

    @torch.no_grad()
    def fill(self, looked_up: Embedded) -> None:
        """Take the rows of a batch that fits. What slack holds are rows of batches before, or zeros."""
        rows = _rows_of(looked_up)
        own = list(self._offsets.values())
        given = [looked_up[key][1] for key in self._offsets]
        for keys, leaf in self._leaves.items():
            place = leaf.detach()[: rows[keys[0]].shape[0]]
            if len(keys) > 1 and place.numel():
                torch.cat([rows[key].detach() for key in keys], 1, out=place)
            else:
                own.append(place)
                given.append(rows[keys[0]].detach())
        _copy(own, given)

    def take_gradients(self) -> dict[tuple[str, ...], Tensor]:
        """Of look-ups side by side, where there are any, slack included; the leaves are left without."""
        found = {}
        for keys, leaf in self._leaves.items():
            if leaf.grad is not None:
                found[keys], leaf.grad = leaf.grad, None
        return found


def give_back(
    looked_up: Embedded, gradients: Mapping[tuple[str, ...], Tensor], ok: Tensor, gate: Callable[[Tensor], None] | None = None
) -> None:
    """The tables' backward pass, from gradients of `FixedRows`; where the flag ``ok`` is false they are zeros, whatever they hold. Tables
    that make them zeros themselves have a ``gate``, which is given the flag."""
    rows = _rows_of(looked_up)
    reached = {keys: g[: rows[keys[0]].shape[0]] for keys, g in gradients.items() if rows[keys[0]].requires_grad}
    if reached:
        if gate is None:
            _zero_unless(ok, list(reached.values()))
        else:
            gate(ok)
        parts = {key: part for keys, g in reached.items() for key, part in zip(keys, g.split([rows[k].shape[1] for k in keys], 1))}
        torch.autograd.backward([rows[key] for key in parts], list(parts.values()))


def _rows_of(looked_up: Embedded) -> dict[str, Tensor]:
    return {key: value[0] if isinstance(value, tuple) else value for key, value in looked_up.items()}


def _zero_unless(ok: Tensor, tensors: Sequence[Tensor]) -> None:
    """In place, whatever contiguous tensors hold: as integers, of which any times 0 is 0, of 8 bytes where that many are there. Small ones
    share a launch for each width."""
    small: dict[torch.dtype, list[Tensor]] = {}
    for t in tensors:
        width = 8 if t.numel() * t.element_size() % 8 == 0 and t.data_ptr() % 8 == 0 else t.element_size()
        words = t.view(-1).view(_INTEGERS[width])
        if words.numel() >= ALONE:
            words.mul_(ok.to(words.dtype))
        elif words.numel():
            small.setdefault(words.dtype, []).append(words)
    for dtype, alike in small.items():
        torch._foreach_mul_(alike, ok.to(dtype))


ALONE = 1 << 20
"""Words from which on a tensor has a launch of its own."""
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Captured:
    """The rooms of a run and what is recorded for each. ``state()``: the name of what a step computes now, None for a step that is not to
    be replayed."""

    def __init__(self, features: Features, device: torch.device, state: Callable[[], Hashable | None] = tuple) -> None:
        self.features, self.device, self.state = features, device, state
        self.history = features.next_item_field()[0] if features.next_item is not None else None
        self._recorded: list[Recorded] = []
        self._memory: dict[str, Tensor] = {}
        self.news = 0
        """Steps so far that were the first of a room or recorded something."""
        self.given_up = 0
        """Rooms so far whose place another one took."""
        self._entered = 0
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._computed: set[Hashable] = set()
        """Names that a step was computed under as usual."""

    def enter(self, batch: Batch, totals: list[float]) -> Recorded:
        """A room that holds ``batch`` and the host's three totals from now on."""
        found, state = self._of(batch), self.state()
        self._entered += 1
        found.used = self._entered
        if state is not None and state != found.state:
            found.forget(state)
        found.fixed.fill(batch)
        for place, value in zip(found.totals, totals):
            place.fill_(value)
        recordable = not found.records and state is not None and self._pool is not None and batch.size > 0
        if recordable and (found.ran or (state in self._computed and self._short_of_memory(found.fixed.room))):
            found.loads = not found.ran
            self._record(found)
        found.replays = found.records and state is not None
        if batch.size and not found.replays:
            self._computed.add(state)
        self.news += not found.ran or (found.replays and not found.graphs)
        found.ran = True
        return found

    def _record(self, found: Recorded) -> None:
        found.records = True

    def _short_of_memory(self, room: Room) -> bool:
        """Whether a step computed as usual may not find the memory that it needs: what graphs hold, for as many rows as ``room`` has."""
        recorded = max((r.fixed.room.rows for r in self._recorded if r.graphs), default=0)
        if not recorded:
            return False
        torch.cuda.empty_cache()
        held = sum(segment["total_size"] for segment in torch.cuda.memory_snapshot(self._pool))
        return bool(torch.cuda.mem_get_info(self.device)[0] < MARGIN * held * room.rows / recorded)

    def _of(self, batch: Batch) -> Recorded:
        need = Room.of(batch)
        spare = TIGHT if len(self._recorded) < ENOUGH else SPARE
        fitting = [r for r in self._recorded if r.fixed.room.takes(need, spare)]
        if fitting:
            return min(fitting, key=lambda r: r.fixed.room.rows)
        if len(self._recorded) == MOST:
            self._give_up(min(self._recorded, key=lambda r: r.used), need)
        fixed = FixedBatch(batch, need.rounded(), self.features, self.history)
        self._recorded.append(Recorded(fixed, torch.zeros(3, dtype=torch.float64, device=self.device), self._memory, self._pool))
        return self._recorded[-1]

    def _give_up(self, room: Recorded, need: Room) -> None:
        if not self.given_up:
            _log.warning(
                "train.capture: batches of more than %d kinds of shapes (now %d samples, events %s, ids %s); from now on a new kind takes "
                "the place of the one not used for longest, at the cost of two steps that are not replayed; data.drop_last = true or a "
                "larger data.batch_size makes batches more alike",
                MOST, need.size, dict(need.events), dict(need.ids),
            )  # fmt: skip
        self.given_up += 1
        room.graphs.clear()
        self._recorded.remove(room)


@dataclass
class Recorded:
    """One room: its tensors and the recorded parts of a step in it. ``totals [3]`` fp64: weight, samples and the wish to stop."""

    fixed: FixedBatch
    totals: Tensor
    memory: dict[str, Tensor]
    pool: Any = None
    state: Hashable = None
    used: int = 0
    """The number of the step that was here last."""
    ran: bool = False
    records: bool = False
    replays: bool = False
    """Whether the parts of the current step are replayed, those not recorded yet after they were."""
    loads: bool = False
    """Whether what is recorded may be compiled meanwhile, since no step was computed in this room."""
    rows: FixedRows | None = None
    graphs: dict[str, tuple[torch.cuda.CUDAGraph, Any]] = field(default_factory=dict)

    def part(self, name: str, compute: Callable[[], T]) -> T:
        """The result of ``compute``, which reads and gives tensors that stay where they are."""
        if not self.replays:
            return compute()
        if name not in self.graphs:
            self.graphs[name] = recorded(compute, self.pool, loads=self.loads)
        graph, result = self.graphs[name]
        graph.replay()
        return result  # type: ignore[no-any-return]

    def look_up(self, looked_up: Embedded) -> FixedRows:
        """What the tables gave, in this room."""
        if self.rows is None:
            self.rows = FixedRows(looked_up, self.fixed.room, self.memory)
        self.rows.fill(looked_up)
        return self.rows

    def forget(self, state: Hashable) -> None:
        """What was recorded is of no use: steps compute ``state`` now."""
        self.state, self.ran, self.records = state, False, False
        self.graphs.clear()


def recorded(compute: Callable[[], T], pool: Any, *, loads: bool = False) -> tuple[torch.cuda.CUDAGraph, T]:
    """``compute`` as a graph, and its result, which the graph's replays fill. ``loads``: kernels may be compiled and loaded in it.

    :raises RunError: something in it cannot be recorded. The process can go on computing, and record into another pool.
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        # other threads read data and pin memory meanwhile, and loading a kernel allocates memory behind the recording
        with recording(), torch.cuda.graph(graph, pool=pool, capture_error_mode="relaxed" if loads else "thread_local"):
            result = compute()
    except RuntimeError as error:
        _leave_recording(stream, pool)
        raise RunError(
            f"the step cannot be recorded: {str(error.__context__ or error).splitlines()[0]}",
            where="train.capture",
            fix="something in it waits for the device; choose other kernels ([kernels]), or set train.capture = false",
        ) from error
    return graph, result


def _leave_recording(stream: torch.cuda.Stream, pool: Any) -> None:
    """What torch leaves undone when a recording fails: its stream stays the current one, the allocator's pool stays open, and the random
    generator believes that it is recorded."""
    torch.cuda.set_stream(stream)
    index = stream.device.index
    with suppress(RuntimeError):  # it was closed already
        torch._C._cuda_endAllocateToPool(index, pool)
    generator = torch.cuda.default_generators[index]
    generator.graphsafe_set_state(generator.clone_state())


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
    n, bits = (n, 7) if n >= LARGE else (max(64, n + n // 16), 4)
    step = max(1, 1 << (n.bit_length() - bits))
    return -(-n // step) * step


def _copy(own: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """``given`` into ``own``; a launch for each dtype, since torch takes lists of mixed ones tensor by tensor."""
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(own, given):
        if source.numel():
            targets, sources = by_dtype.setdefault(source.dtype, ([], []))
            targets.append(target)
            sources.append(source)
    for targets, sources in by_dtype.values():
        torch._foreach_copy_(targets, sources)


def _zeros(like: Tensor, rows: int) -> Tensor:
    return torch.zeros((rows, *like.shape[1:]), dtype=like.dtype, device=like.device)
