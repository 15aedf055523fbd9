"""A training step reads nothing from the device: no operation in it has a result whose value or shape the host must know.

On a CPU such operations are recognised by name; on a GPU torch itself refuses them (`test_train_trainer`). What an op of `gem_core.ops`
does inside is its implementation's: those for GPUs are tested there.
"""

from __future__ import annotations

import sys
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gem_core.config import config_from_dict, resolve
from gem_core.train.build import build_parts, build_source
from gem_core.train.feed import Feed
from gem_core.train.measure import Meter, peak
from gem_core.train.optim import sums_without_waiting
from gem_core.train.runtime import runtime
from gem_core.train.step import TrainStep

WAITING = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "equal",
    "is_nonzero",
)
"""Names of operations whose result the host needs at once."""


ON_HOST = ("_sparse_update", "event_ids")
"""Functions with a branch for tensors on the host that waits for nothing there; the other branch of the first is tested below."""


def on_host() -> bool:
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_name not in ON_HOST:
        frame = frame.f_back
    return frame is not None


class Waits(TorchDispatchMode):
    """Counts what would wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_") and any(i is not None and i.dtype == torch.bool for i in args[1])
        counted = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None and isinstance(args[-1], torch.Tensor)
        if (name in WAITING or by_mask or counted) and not on_host():
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def waits(steps: int = 3, *, spoil=None, **model) -> Counter[str]:
    """What ``steps`` steps after the first wait for."""
    law = {"law": "lognormal", "mean": 8.0, "max": 32}
    towers = {"dim": 16, "heads": 2, **model}
    config = config_from_dict(
        {
            "run": {"device": "cpu"},
            "data": {"source": "random", "batch_size": 16, "random": {"preset": "tiny", "length": law}},
            "model": {"layers": 2, "dim": 16, "embedding_dim": 8, "sequence": towers, "interaction": {"tokens": 4}},
        }
    )
    resolved = resolve(config)
    with runtime(config) as rt:
        parts = build_parts(resolved, rt)
        parts.module.train()
        if spoil is not None:
            parts.model.heads.register_forward_hook(spoil)
        step = TrainStep(parts, resolved.config, rt, Meter(rt.device, peak("cpu", {"fp32"})))
        step.set_lr(1.0)
        fed = iter(Feed(build_source(resolved, "train", rt), rt.device, None))
        step([next(fed)], False)
        batches = [next(fed) for _ in range(steps)]
        with Waits() as mode:
            for batch in batches:
                step([batch], False)
    return mode.found


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"attention": "causal", "candidate": True, "event": {"compare": True, "time_buckets": 8, "positions": 8}},
        {"pooling": {"seeds": 2, "candidate_queries": 2, "recent": 2}, "cls": 2, "rotary": "time"},
        {"attention": "causal", "next_event": 0.1, "pffn": {"kind": "norm_gdpa"}},
    ],
    ids=["plain", "candidate", "pooling", "next event"],
)
def test_no_step_waits_for_the_device(model):
    assert waits(**model) == {}


def test_tables_are_updated_without_waiting():
    rows = torch.randint(0, 9, (50,))
    with Waits() as mode:
        sums_without_waiting(rows, torch.randn(50, 4), torch.tensor(True))
    assert mode.found == {}


def test_a_wait_is_seen():
    """The test itself: a hook that reads one value a step, and one that indexes by a mask."""
    assert waits(2, spoil=lambda m, i, o: o * float(o.sum() > 1e9 or 1.0))["_local_scalar_dense"] >= 2
    assert waits(2, spoil=lambda m, i, o: o + o[o > 1e9].sum())["index"] >= 2
