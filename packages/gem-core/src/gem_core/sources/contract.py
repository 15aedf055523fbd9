"""What a data source promises the trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

from gem_core.batch import Batch

TRUE_PROBABILITY = "true_probability."
"""A ``Batch.columns`` entry ``true_probability.<task>`` holds the planted probability: evaluation then reports the Bayes-optimal NE."""


@runtime_checkable
class Source(Protocol):
    """Built by ``SourceSpec.build(config, features, *, split, batch_size, shard=(rank, world), seed, drop_last)``.

    ``iter(source)`` yields one epoch of this shard of ``split`` ("train", "eval" or "test"). ``state_dict()`` taken between two batches and
    loaded into a fresh source makes its next ``iter`` continue with the following batch (an iterator of the finished epoch yields nothing,
    the next one begins the next epoch): every sample exactly once an epoch. The training split is shuffled by (seed, epoch); others keep
    their order. Two ranks yield the same number of batches. An iterator abandoned on the way ends its epoch: the next ``iter`` begins the
    next one. The state is plain JSON, the same on every rank, and fits another world size or batch size (`order.Cursor` does all this).
    A source may have ``__len__``: the batches of an epoch, and ``left``: those that the next iteration gives, fewer than an epoch's after
    ``load_state_dict``. It may have ``hashed``: path of a feature below ``features`` -> "integers" or
    "text", what the column of its hashed ids holds (both columns of a cross), since the integer 7 and the text "7" become different ids:
    the run keeps that, and evaluation, prediction and serving refuse the other; and ``lists``: path of an id feature -> whether its column
    holds a list for each sample or event, where a missing one is an empty one. It may have ``following: int | None``, which the trainer
    sets before an iteration begins: how many will come after it, None without end; the source may then read ahead into them, and
    ``close()`` ends that. What it reads ahead changes neither its state nor its batches. One that waits for data may have ``progress``
    and ``on_main``, which the trainer sets. ``progress()`` it calls once a second or so while it waits: the run's watchdog does not take it
    for stuck then, and where the answer is True, it ends the iteration: the next one goes on from there, in this run (which first does what
    it has) or when it is resumed. ``on_main(action)`` gives what ``action()`` returns on rank 0, so that all ranks see the same data to
    come. Both are exchanges between the ranks, which must call them alike.
    """

    def __iter__(self) -> Iterator[Batch]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Wrapped:
    """A source whose batches are changed on their way, in ``__iter__`` of a subclass; all else is that of ``source``."""

    source: Source
    progress: Callable[[], bool]
    on_main: Callable[[Callable[[], Any]], Any]
    following: int | None

    def __init__(self, source: Source) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "source":  # not set yet, as in a copy that is being made
            raise AttributeError(name)
        return getattr(self.source, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """What the trainer sets is meant for the source."""
        if name in ("following", "progress", "on_main"):
            setattr(self.source, name, value)
        else:
            object.__setattr__(self, name, value)

    def state_dict(self) -> dict[str, Any]:
        return self.source.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.source.load_state_dict(state)
