"""The exchange of the next batch's ids beside the backward pass, by the parts of TorchRec's sharded modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from gem_core.batch import SparseGroup


@dataclass
class Prepared:
    """A batch as the sharded modules want it; ``contexts`` and ``inputs`` by module, once they were exchanged."""

    group: SparseGroup
    samples: int
    parts: Mapping[str, SparseGroup]
    features: Mapping[str, Any]
    contexts: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)


class IdsAhead:
    """One batch on its way: `begin` exchanges sizes, `go_on` waits for them and exchanges ids, `take` hands the ids over.

    Without it every look-up would wait on the host until the device has done all that was queued before.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._batch: Prepared | None = None
        self._sizes: dict[str, Any] = {}
        self._ids: dict[str, Any] = {}

    def begin(self, modules: Mapping[str, Any], batch: Prepared) -> None:
        self._batch, self._ids = batch, {}
        with self.beside(wait=False):
            for name, module in modules.items():
                batch.contexts[name] = module.create_context()
                self._sizes[name] = module.input_dist(batch.contexts[name], batch.features[name])

    def go_on(self) -> None:
        """Collective; waits on the host for the sizes, while the device still works on the backward pass."""
        if self._batch is not None and not self._ids:
            with self.beside(wait=False):
                self._ids = {name: sizes.wait() for name, sizes in self._sizes.items()}

    def take(self, group: SparseGroup) -> Prepared | None:
        """The batch of ``group``, if it is the one on its way."""
        batch = self._batch
        if batch is None or batch.group is not group:
            return None
        self.go_on()
        with self.beside(wait=False):
            batch.inputs = {name: ids.wait() for name, ids in self._ids.items()}
        if self._side is not None:
            main = torch.cuda.current_stream(self.device)
            main.wait_stream(self._side)
            for made in (*batch.inputs.values(), *batch.contexts.values()):
                made.record_stream(main)
        self._batch, self._sizes, self._ids = None, {}, {}
        return batch

    @contextmanager
    def beside(self, *, wait: bool) -> Iterator[None]:
        """On the side stream; ``wait``: after what the current stream holds now."""
        if self._side is None:
            yield
            return
        if wait:
            self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            yield
