"""Results that belong to the values of some tensors, such as offsets: kept while these live unwritten, forgotten with them.

Nothing is stored in the tensors themselves, so that they can still be pickled and copied.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

T = TypeVar("T")
_LIMIT = 32
_kept: Any = WeakTensorKeyDictionary()
_in_graph: Any = None


@contextmanager
def recording() -> Iterator[None]:
    """Around the recording of one CUDA graph: what is built in it on one stream is built once for all of the graph, and forgotten after it.

    Not of a thread, since backward passes run in threads of their own.
    """
    global _in_graph
    before, _in_graph = _in_graph, WeakTensorKeyDictionary()
    try:
        yield
    finally:
        _in_graph = before


def _stream_of_graph(t: Tensor) -> int | None:
    """The current stream where a graph is recorded from it."""
    if not t.is_cuda or not torch.cuda.is_current_stream_capturing():
        return None
    return int(torch.cuda.current_stream(t.device).cuda_stream)


def _place(t: Tensor) -> tuple[Any, int | None]:
    """Where something is kept with ``t``, None where nothing may be; and the stream that a graph is recorded from."""
    stream = _stream_of_graph(t)
    return None if t.is_inference() else _kept if stream is None else _in_graph, stream


def remembered(tensors: Sequence[Tensor | None], key: Hashable, build: Callable[[], T]) -> T:
    """``build()``, or its result of an earlier call with the same tensors, unwritten since, and an equal ``key``.

    ``build`` must not hold on to the tensors. Always built anew for inference tensors, whose writes nobody counts. While a CUDA graph is
    captured, whose inputs will change under it, only what was built in the same graph counts (see `recording`).
    """
    given = [t for t in tensors if t is not None]
    anchor = given[0]
    kept, stream = _place(anchor)
    if kept is None or any(t.is_inference() for t in given[1:]):
        return build()
    stamp = (key, stream, tuple(t._version for t in given))
    results = kept.get(anchor)
    if results is None:
        results = kept[anchor] = {}
    hit = results.get(stamp)
    if hit is not None and len(hit[0]) == len(given) - 1 and all(r() is t for r, t in zip(hit[0], given[1:])):
        return hit[1]
    result = build()
    if len(results) >= _LIMIT:
        results.clear()
    results[stamp] = (tuple(weakref.ref(t) for t in given[1:]), result)
    return result


def note(t: Tensor, key: Hashable, value: Any) -> None:
    """Keep ``value``, which must not hold on to ``t``, under ``key`` for whoever meets the same tensor later (`noted`); in place of what
    was noted before, since who writes a tensor behind PyTorch's back does not count as writing it."""
    kept, stream = _place(t)
    if kept is not None:
        kept.get(t, {}).pop((key, stream, (t._version,)), None)
        remembered([t], key, lambda: value)


def noted(t: Tensor, key: Hashable) -> Any:
    """What was kept with ``t`` under ``key``; None without it, or where ``t`` was written since."""
    kept, stream = _place(t)
    if kept is None:
        return None
    hit = kept.get(t, {}).get((key, stream, (t._version,)))
    return None if hit is None else hit[1]


def hand_on(t: Tensor, view: Tensor) -> None:
    """Note with ``view``, the same values in another shape, what is noted with ``t``."""
    kept, stream = _place(t)
    if kept is not None:
        for (key, of, versions), (others, value) in list(kept.get(t, {}).items()):
            if not others and of == stream and versions == (t._version,):
                note(view, key, value)
