"""Results that belong to the values of some tensors, such as offsets: kept while these live unwritten, forgotten with them.

Nothing is stored in the tensors themselves, so that they can still be pickled and copied.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

T = TypeVar("T")
_LIMIT = 16
_kept: Any = WeakTensorKeyDictionary()


def remembered(tensors: Sequence[Tensor | None], key: Hashable, build: Callable[[], T]) -> T:
    """``build()``, or its result of an earlier call with the same tensors, unwritten since, and an equal ``key``.

    ``build`` must not hold on to the tensors. Always built anew for inference tensors, whose writes nobody counts, and while a CUDA graph
    is captured, because the graph's inputs will change under it.
    """
    given = [t for t in tensors if t is not None]
    anchor = given[0]
    if any(t.is_inference() for t in given) or (anchor.is_cuda and torch.cuda.is_current_stream_capturing()):
        return build()
    stamp = (key, tuple(t._version for t in given))
    results = _kept.get(anchor)
    if results is None:
        results = _kept[anchor] = {}
    hit = results.get(stamp)
    if hit is not None and len(hit[0]) == len(given) - 1 and all(r() is t for r, t in zip(hit[0], given[1:])):
        return hit[1]
    result = build()
    if len(results) >= _LIMIT:
        results.clear()
    results[stamp] = (tuple(weakref.ref(t) for t in given[1:]), result)
    return result
