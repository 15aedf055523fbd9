"""A history on its way from the batch into the layers of a model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from gem_core import ops
from gem_core.batch import Batch
from gem_core.config.features import Features
from gem_core.errors import ConfigError
from gem_core.model.config import SequenceConfig
from gem_core.model.contract import TableSet
from gem_core.model.embedding import Embedded, EventTokens
from gem_core.model.layers import TokenMix
from gem_core.model.rows import Rows
from gem_core.model.sequence import Rotary, rotary_angles

Part = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class History:
    """One history on its way through the layers.

    ``s [N, dim]`` with its layout and rotary angles; the candidate's token ``[B, dim]``; ``events`` are the event tokens alone, without
    place and age, where next_event predicts them, and ``event_rows`` their layout without CLS and candidate rows.
    ``pooled [B, n, token_dim]`` are the summary tokens of the last layer that pooled.
    """

    s: Tensor
    rows: Rows
    events: Tensor | None
    event_rows: Rows
    rotary: Rotary | None = None
    candidate: Tensor | None = None
    pooled: Tensor | None = None


class HistoryEntry(nn.Module):
    """Makes a `History`: event tokens, the candidate's token, CLS tokens, and the rotary angles of all rows.

    The candidate's token is the candidate as an event, where ``features.sequences.NAME.target`` says which feature is which field, plus
    ``about(x) [B, 1, dim]``; the CLS tokens are ``summary(x) [B, cls, dim]``, with x the sample's feature tokens. The two modules are
    linear maps unless given; ``about = False`` leaves that term out.
    """

    def __init__(
        self, name: str, features: Features, tables: TableSet, tokens: int, token_dim: int, config: SequenceConfig,
        *, summary: nn.Module | None = None, about: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.config = c = config
        target = bool(features.sequences[name].target)
        self.asks = c.candidate or c.pooling.candidate_queries > 0
        self.compares = self.asks and target
        if c.event.compare and not target:
            raise ConfigError(
                f"compare needs to know which feature of the candidate is which field of {name!r}",
                where="model.sequence.event.compare",
                fix=f"set features.sequences.{name}.target, or compare = false",
            )
        self.events = EventTokens(name, features, tables, c.dim, c.event, candidate=self.compares)
        if c.rotary == "time" and not self.events.timed:
            raise ConfigError(
                f'rotary = "time" needs the events\' times, and the history {name!r} declares none',
                where="model.sequence.rotary",
                fix=f'set features.sequences.{name}.timestamps, or rotary = "position"',
            )
        self.summary = (summary or linear_summary(tokens, c.cls, token_dim, c.dim)) if c.cls else None
        self.about = linear_summary(tokens, 1, token_dim, c.dim) if self.asks and about else None

    def forward(self, batch: Batch, embedded: Embedded, x: Tensor) -> History:
        c = self.config
        rows = event_rows = self.events.rows(batch)
        if c.next_event:
            events = self.events(batch, embedded)
            s = self.events.placed(events, batch, embedded, rows)
        else:
            events, s = None, self.events.at_once(batch, embedded, rows)
        candidate = None if self.about is None else self.about(x).squeeze(1)
        if self.compares:
            own = self.events.candidate(embedded, batch.size)
            candidate = own if candidate is None else own + candidate
        before = [] if self.summary is None else [(self.summary(x).flatten(0, 1), rows.uniform(c.cls))]
        after = [(candidate, rows.uniform(1))] if candidate is not None and c.candidate else []
        if before or after:
            s = _concat(before, (s, rows.offsets), after)
            rows = rows.extended(c.cls, c.candidate)
            if c.rotary == "time":
                assert event_rows.ages is not None
                blank = [[(v.new_zeros(v.shape[0], 1), o) for v, o in part] for part in (before, after)]
                rows.ages = _concat(blank[0], (event_rows.ages.unsqueeze(1), event_rows.offsets), blank[1]).squeeze(1)
        rotary = None if c.rotary == "none" else rotary_angles(rows, c.width, c.rotary, c.rotary_base)
        return History(s, rows, events, event_rows, rotary, candidate)


def linear_summary(n: int, out: int, dim: int, out_dim: int) -> nn.Sequential:
    """Linear over the tokens, then over their width: ``[B, n, dim] -> [B, out, out_dim]``."""
    return nn.Sequential(TokenMix(n, out), nn.Linear(dim, out_dim))


def only_history(features: Features, name: str | None, model: str) -> str:
    """The history that a model of one history reads: ``name``, or the only one.

    :raises ConfigError: there is none of that name, or not exactly one.
    """
    names = list(features.sequences)
    if name is None and len(names) == 1:
        return names[0]
    if name in names:
        return str(name)
    raise ConfigError(
        f"{model} reads one history, and there are {len(names)}" if name is None else f"there is no history {name!r}",
        where="model.history",
        fix=f"the histories are: {', '.join(names) or 'none'}",
    )


def _concat(before: list[Part], rows: Part, after: list[Part]) -> Tensor:
    dtype = rows[0].dtype
    return ops.jagged_concat([(v.to(dtype), o) for v, o in (*before, rows, *after)])[0]
