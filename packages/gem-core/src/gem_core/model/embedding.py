"""From a batch and its embedding rows to feature tokens ``[B, n, d]`` and event tokens ``[N, d]``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gem_core import ops
from gem_core.batch import Batch, SequenceGroup
from gem_core.config.features import EventField, Features
from gem_core.config.features import Sequence as SequenceFeature
from gem_core.errors import BatchError, ConfigError
from gem_core.jagged import Jagged
from gem_core.model.config import EventConfig
from gem_core.model.contract import TableSet
from gem_core.model.layers import MaskNet, Mlp, TokenMix, added_linear, product_dtype, rows_linear, side_by_side
from gem_core.model.rows import Rows
from gem_core.model.tables import sequence_of

Embedded = Mapping[str, Any]
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


class TokenProjection(nn.Module):
    """F features of one width, each mapped by its own matrix to ``each`` tokens: ``[B, F, width] -> [B, F * each, dim]``."""

    def __init__(self, features: int, width: int, each: int, dim: int) -> None:
        super().__init__()
        self.each, self.dim = each, dim
        self.weight = nn.Parameter(torch.empty(features, width, each * dim))
        self.bias = nn.Parameter(torch.empty(features, 1, each * dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.baddbmm(self.bias.to(x.dtype), x.transpose(0, 1), self.weight.to(x.dtype))
        return y.transpose(0, 1).reshape(x.shape[0], x.shape[1] * self.each, self.dim)


class FeatureTokens(nn.Module):
    """Sample-level features to ``count`` tokens ``[B, count, dim]``.

    One token a sparse feature (its pooled embedding), a vector feature, and one for all dense features together (by an MLP). With a
    larger ``count`` every feature gives several tokens, shared out as evenly as possible; with a smaller one the tokens are compressed
    linearly. A pooled embedding whose width is ``dim`` and that gives one token is taken as it is. The dense features' tokens come last.
    """

    def __init__(
        self, features: Features, tables: TableSet, dim: int, *, count: int | None = None, dense_hidden: Sequence[int] = (64,)
    ) -> None:
        super().__init__()
        self.dense_names = tuple(features.dense)
        widths = {f"sparse.{n}": tables.table(features.table_of(f"sparse.{n}")).dim for n in features.sparse}
        widths |= {f"vectors.{n}": v.dim for n, v in features.vectors.items()}
        sources = [*widths, *(["dense"] if self.dense_names else [])]
        if not sources:
            raise ConfigError(
                "there is no feature of the sample itself, only histories",
                where="features",
                fix="declare the candidate's or the context's features in [features.sparse], [features.dense] or [features.vectors]",
            )
        wanted = count or len(sources)
        each, more = divmod(max(wanted, len(sources)), len(sources))
        shares = {s: each + (i < more) for i, s in enumerate(sources)}
        self.blocks: list[tuple[tuple[str, ...], int]] = []
        self.projections = nn.ModuleList()
        for key in dict.fromkeys((widths[s], shares[s]) for s in widths):
            names = tuple(s for s in widths if (widths[s], shares[s]) == key)
            width, share = key
            plain = width == dim and share == 1 and all(n.startswith("sparse.") for n in names)
            self.blocks.append((names, width))
            self.projections.append(nn.Identity() if plain else TokenProjection(len(names), width, share, dim))
        self.dense = Mlp(len(self.dense_names), (*dense_hidden, shares["dense"] * dim)) if self.dense_names else None
        self.dim = dim
        self.mix = TokenMix(len(sources), wanted) if wanted < len(sources) else None
        self.count = wanted

    def forward(self, batch: Batch, embedded: Embedded) -> Tensor:
        tokens = [
            projection(torch.stack([self._vector(batch, embedded, n, width) for n in names], 1))
            for (names, width), projection in zip(self.blocks, self.projections)
        ]
        if self.dense is not None:
            tokens.append(self.dense(dense_columns(batch, self.dense_names)).unflatten(1, (-1, self.dim)))
        x = tokens[0] if len(tokens) == 1 else torch.cat([t.to(tokens[-1].dtype) for t in tokens], 1)
        return x if self.mix is None else self.mix(x)

    def _vector(self, batch: Batch, embedded: Embedded, name: str, width: int) -> Tensor:
        return embedded[name] if name.startswith("sparse.") else sample_vector(batch, name.removeprefix("vectors."), width)


def dense_columns(batch: Batch, names: tuple[str, ...]) -> Tensor:
    """``batch.dense [B, F]``, whose columns must be ``names``.

    :raises BatchError: they are not.
    """
    if batch.dense is None or tuple(batch.dense_names) != names:
        raise BatchError(
            f"the batch's dense columns are {', '.join(batch.dense_names) or 'none'}",
            where="features.dense",
            fix=f"the model was built for: {', '.join(names)}",
        )
    return batch.dense


def sample_vector(batch: Batch, name: str, width: int) -> Tensor:
    """``[B, width]`` of a vector feature.

    :raises BatchError: it is not there, or has another width.
    """
    value = batch.vectors.get(name)
    if value is None or value.shape[1:] != (width,):
        shape = "nothing" if value is None else tuple(value.shape)
        raise BatchError(
            f"the batch has {shape} for the vector feature {name!r}", where=f"features.vectors.{name}", fix=f"deliver [B, {width}]"
        )
    return value


class EventFields(nn.Module):
    """The fields of a history's events as vectors, and those of the candidate seen as such an event.

    On the candidate a field is the sparse feature that ``target`` names; a field without one is a learned vector (``candidate`` False:
    there are none, and `candidate` is not called). ``widths`` are the fields' widths in their declared order.

    :raises ConfigError: a target feature that reads another table than its event field.
    """

    def __init__(self, name: str, features: Features, tables: TableSet, *, candidate: bool = True) -> None:
        super().__init__()
        sequence = features.sequences[name]
        self.name, self.fields = name, dict(sequence.fields)
        self.target = _targets(name, features, sequence)
        self.widths = {f: _width(f"sequences.{name}.fields.{f}", c, features, tables) for f, c in self.fields.items()}
        unknown = [w for f, w in self.widths.items() if f not in self.target] if candidate else []
        self.missing = nn.ParameterList(nn.Parameter(torch.empty(1, w)) for w in unknown)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for vector in self.missing:
            nn.init.normal_(vector, std=vector.shape[1] ** -0.5)

    def forward(self, batch: Batch, embedded: Embedded) -> list[Tensor]:
        """``[N, width]`` of each field."""
        group = sequence_of(batch, self.name)
        return [self._field(group, embedded, f) for f in self.fields]

    def candidate(self, embedded: Embedded, batch_size: int) -> list[Tensor]:
        """``[B, width]`` of each field."""
        missing = iter(self.missing)
        return [embedded[f"sparse.{self.target[f]}"] if f in self.target else next(missing).expand(batch_size, -1) for f in self.fields]

    def products(self, batch: Batch, embedded: Embedded, rows: Rows, scales: list[float]) -> Tensor:
        """``scale e * c`` of each target field, side by side: ``[N, sum of widths]``."""
        group = sequence_of(batch, self.name)
        own = torch.cat([self._field(group, embedded, f) for f in self.target], 1)
        asked = torch.cat([embedded[f"sparse.{t}"] * scale for t, scale in zip(self.target.values(), scales)], 1)
        return own * ops.jagged_expand(asked, rows.offsets, rows=rows.count)

    def _field(self, group: SequenceGroup, embedded: Embedded, name: str) -> Tensor:
        field, value = self.fields[name], group.fields.get(name)
        if value is None:
            raise BatchError(f"the history {self.name!r} has no field {name!r}", where=f"features.sequences.{self.name}.fields.{name}")
        if field.kind == "id":
            rows = embedded[f"sequences.{self.name}.fields.{name}"][0]
            if isinstance(value, Jagged):
                return (ops.jagged_sum if field.pooling == "sum" else ops.jagged_mean)(rows, value.offsets)
            return rows
        value = group.jagged(name).values.float()
        return value.unsqueeze(1) if value.dim() == 1 else value


COUNTED = 256
"""Largest learned table that is read, and whose gradient is made, by a product with one in each row's place, on a device: its rows come in
half the time of a gather."""


class _RowsIn(torch.autograd.Function):
    """Rows of a small table in another dtype; the gradient sums in the table's own."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, places: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.like = table.shape[0], table.dtype
        if table.is_cuda and table.shape[0] <= COUNTED and dtype in (torch.bfloat16, torch.float16) and table.dtype == torch.float32:
            ones = table.new_zeros((places.numel(), table.shape[0]), dtype=dtype).scatter_(1, places.view(-1, 1), 1.0)
            ctx.save_for_backward(ones)
            return (ones @ table.to(dtype)).view(*places.shape, -1)
        ctx.save_for_backward(places)
        return F.embedding(places, table.to(dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (places,), (rows, dtype) = ctx.saved_tensors, ctx.like
        if places.is_floating_point():  # ones
            return torch.mm(places.t(), grad.flatten(0, -2), out_dtype=torch.float32), None, None
        return torch.ops.aten.embedding_dense_backward(grad.to(dtype), places, rows, -1, False), None, None


def rows_in(table: nn.Embedding, places: Tensor, dtype: torch.dtype) -> Tensor:
    """``table(places)`` in ``dtype``: rows that are added to others of a lower precision, which would all become fp32 otherwise."""
    if dtype == table.weight.dtype or torch.compiler.is_compiling():
        return table(places).to(dtype)
    return _RowsIn.apply(table.weight, places, dtype)


class EventTokens(nn.Module):
    """The fields of each event to one token, ``[N, dim]``; and the candidate as such an event, ``[B, dim]``.

    "concat" maps all fields, one after another, by one matrix, "masknet" by a `MaskNet`; "sum" adds them, each by its own matrix unless it
    is an embedding of width ``dim``. `placed` scales it and adds learned embeddings of the place and of the log age; the
    candidate's age is 0. With ``compare`` it also adds a linear map of ``sqrt(width) e * c``, e the event's and c the candidate's embedding
    of each target field: what DIN's activation unit reads.

    :raises ConfigError: time buckets for a history without times; see also `EventFields`.
    """

    def __init__(
        self, name: str, features: Features, tables: TableSet, dim: int, config: EventConfig | None = None, *, candidate: bool = True
    ) -> None:
        super().__init__()
        config = config or EventConfig()
        sequence = features.sequences[name]
        self.name, self.dim, self.config = name, dim, config
        self.event_second, self.sample_second = SECONDS[sequence.time_unit], SECONDS[features.timestamp_unit]
        self.timed = sequence.timestamps is not None
        if config.time_buckets and not self.timed:
            raise ConfigError(
                f"time_buckets needs the events' times, and the history {name!r} declares none",
                where="model.sequence.event.time_buckets",
                fix=f"set features.sequences.{name}.timestamps, or time_buckets = 0",
            )
        self.fields = EventFields(name, features, tables, candidate=candidate)
        widths = self.fields.widths
        if config.combine != "sum":
            whole = nn.Linear if config.combine == "concat" else MaskNet
            self.maps = nn.ModuleList([whole(sum(widths.values()), dim)])
        else:
            plain = [c.kind == "id" and widths[f] == dim for f, c in sequence.fields.items()]
            self.maps = nn.ModuleList(nn.Identity() if p else nn.Linear(w, dim) for p, w in zip(plain, widths.values()))
        compared = [widths[f] for f in self.fields.target] if config.compare else []
        self.scales = [w**0.5 for w in compared]
        self.match = nn.Linear(sum(compared), dim, bias=False) if compared else None
        self.place = nn.Embedding(config.positions + 1, dim) if config.positions else None
        self.age = nn.Embedding(config.time_buckets, dim) if config.time_buckets else None
        if self.place is not None and config.place_std != 1:
            nn.init.normal_(self.place.weight, std=config.place_std)

    def forward(self, batch: Batch, embedded: Embedded) -> Tensor:
        """``[N, dim]`` of the history's events, without place and age."""
        return self._combine(self.fields(batch, embedded))

    def placed(self, token: Tensor, batch: Batch, embedded: Embedded, rows: Rows) -> Tensor:
        """Scale ``token [N, dim]``, and add place, age and comparison; ``rows`` is the layout that `rows` gave."""
        token = self._scaled(token)
        if self.match is not None:
            token = token + self.match(self.fields.products(batch, embedded, rows, self.scales))
        for more in self._learned(rows, token.dtype):
            token = token + more
        return token

    def at_once(self, batch: Batch, embedded: Embedded, rows: Rows) -> Tensor:
        """``placed`` of `forward`'s tokens, where nothing else reads those: a learned row is added beside the product."""
        plain = self.config.combine != "sum" and type(self.maps[0]) is nn.Linear and self.config.scale == 1 and self.match is None
        if not plain or (self.place is None and self.age is None):
            return self.placed(self(batch, embedded), batch, embedded, rows)
        fields = side_by_side(self.fields(batch, embedded))
        first, *others = self._learned(rows, product_dtype(fields))
        token = added_linear(self.maps[0], fields, first)
        for more in others:
            token = token + more
        return token

    def _learned(self, rows: Rows, dtype: torch.dtype) -> Iterator[Tensor]:
        """Rows ``[N, dim]`` of the learned places and ages there are."""
        if self.place is not None:
            place = rows.recency if self.config.count_from == "newest" else rows.position
            yield rows_in(self.place, (place + 1).clamp(max=self.config.positions), dtype)
        if self.age is not None:
            assert rows.ages is not None
            yield rows_in(self.age, self._bucket(rows.ages), dtype)

    def candidate(self, embedded: Embedded, batch_size: int) -> Tensor:
        """``[B, dim]``: the candidate as an event that happens now."""
        token = self._scaled(self._combine(self.fields.candidate(embedded, batch_size)))
        if self.match is not None:
            own = [embedded[f"sparse.{t}"] for t in self.fields.target.values()]
            token = token + self.match(torch.cat([c * c * scale for c, scale in zip(own, self.scales)], 1))
        if self.place is not None:
            token = token + self.place.weight[0]
        if self.age is not None:
            token = token + self.age.weight[0]
        return token

    def _scaled(self, token: Tensor) -> Tensor:
        return token if self.config.scale == 1 else token * self.config.scale

    def _combine(self, fields: list[Tensor]) -> Tensor:
        if self.config.combine != "sum":
            return rows_linear(self.maps[0], side_by_side(fields))
        parts = [m(f) for m, f in zip(self.maps, fields)]
        return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]

    def rows(self, batch: Batch) -> Rows:
        """The layout of the history's events, with log ages ``log(1 + age / time_scale)`` where it has times.

        The age is counted from the sample's own time, or from its newest event where the batch has none, and is never below 0.
        """
        group = sequence_of(batch, self.name)
        first = next(iter(group.fields.values()))
        count = first.batch_size if isinstance(first, Jagged) else first.shape[0]
        rows = Rows(group.offsets, count, group.max_length)
        if self.timed and group.timestamps is not None and count:
            times = group.timestamps.double() * self.event_second
            now = (
                times[(group.offsets[1:] - 1).clamp(min=0)] if batch.timestamps is None else batch.timestamps.double() * self.sample_second
            )
            rows.ages = torch.log1p((now[rows.sample] - times).clamp(min=0) / self.config.time_scale).float()
        elif self.timed:
            if count:
                raise BatchError(f"the batch has no event times for {self.name!r}", where=f"features.sequences.{self.name}.timestamps")
            rows.ages = torch.zeros(0, device=group.offsets.device)
        return rows

    def _bucket(self, ages: Tensor) -> Tensor:
        last = math.log1p(self.config.time_max / self.config.time_scale)
        return (ages * (self.config.time_buckets / last)).long().clamp(max=self.config.time_buckets - 1)


def _targets(name: str, features: Features, sequence: SequenceFeature) -> dict[str, str]:
    for field, target in sequence.target.items():
        own, other = features.table_of(f"sequences.{name}.fields.{field}"), features.table_of(f"sparse.{target}")
        if own != other:
            raise ConfigError(
                f"the event field {field!r} reads table {own!r}, its target feature {target!r} reads {other!r}",
                where=f"features.sequences.{name}.target.{field}",
                fix="declare one table in [features.tables] and give it to both",
            )
    return dict(sequence.target)


def _width(path: str, field: EventField, features: Features, tables: TableSet) -> int:
    if field.kind == "id":
        return tables.table(features.table_of(path)).dim
    return 1 if field.kind == "float" else int(field.dim or 0)
