"""One optimizer step, without waiting for the device, and the outcomes of steps as they become known to the host.

What a step depends on stays on the device: the loss of all ranks is summed before backward, and whether it is finite becomes a flag that
both optimizers obey. A step whose loss is not finite therefore changes no parameter, table or running statistic, and the host learns of
it ``lag`` steps later, the same number on every rank, so that all ranks draw the same conclusion at the same step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gem_core.batch import Batch, SparseGroup
from gem_core.config import Config
from gem_core.errors import ConfigError
from gem_core.model.casts import WeightCasts
from gem_core.model.contract import ModelOutput
from gem_core.model.loss import task_loss
from gem_core.model.tables import LocalTables, sparse_group
from gem_core.ops.adamw import implementation
from gem_core.train.build import Parts
from gem_core.train.captured import Captured, FixedRows, Recorded, check_capture, cuts, give_back, reads_what_the_batch_says
from gem_core.train.feed import Fed
from gem_core.train.measure import Meter
from gem_core.train.optim import DenseAdamW, RowwiseAdagrad
from gem_core.train.replicas import SharedGradients
from gem_core.train.runtime import OnItsWay, Runtime

_FIELDS = ("loss", "weight", "bad_loss", "stop", "samples", "bad_gradient", "grad_norm")


@dataclass(frozen=True)
class Outcome:
    """A finished step: ``loss`` summed over ``weight`` samples of all ranks, whether loss or gradients were not finite, whether some rank
    was asked to stop, ``samples`` of all ranks, the dense gradient norm before clipping, and this rank's batches."""

    step: int
    loss: float
    weight: float
    bad_loss: bool
    bad_gradient: bool
    stop: bool
    samples: int
    grad_norm: float
    batches: Sequence[Fed]


class TrainStep:
    """Callable on the micro-batches of one step; returns the outcome as a device vector for `Outcomes`.

    Under accumulation tables are updated after each micro-batch, as optimizers that run inside backward do; what is skipped is then the
    micro-batch for the tables and the whole step for the dense part.
    """

    def __init__(self, parts: Parts, config: Config, runtime: Runtime, meter: Meter) -> None:
        self.parts, self.config, self.runtime, self.meter = parts, config, runtime, meter
        capture = config.train.capture
        if capture:
            check_capture(parts, config, runtime)
        self._whole_tables = _adamw_tables(parts) if config.train.tables.kind == "adamw" else {}
        self._cuts = capture and cuts(parts, runtime)
        recorded = capture and runtime.device.type == "cuda"
        dense = {**parts.dense_parameters(), **self._whole_tables}
        self._casts = _casts_to_keep(parts, config, runtime)
        kept = {} if self._casts is None else {id(k.parameter): k.copy for k in self._casts.keep(KEPT)}
        copies = {name: kept[id(p)] for name, p in dense.items() if id(p) in kept}
        self.dense = DenseAdamW(dense, config.train.optimizer, runtime, lr_on_device=recorded, copies=copies)
        self.tables: RowwiseAdagrad | None = None
        self._gate = torch.ones((), dtype=torch.bool, device=runtime.device)
        if parts.tables is not None and not self._whole_tables:
            if parts.tables.optimizer_in_backward:
                parts.tables.configure_optimizer(config.train.tables)  # type: ignore[attr-defined]
                if not self._cuts:
                    parts.tables.register_forward_hook(self._gated)  # type: ignore[attr-defined]
            else:
                states = parts.tables.table_states()  # type: ignore[attr-defined]
                self.tables = RowwiseAdagrad(states, config.train.tables, runtime, lr_on_device=recorded)
        self._prefetch = getattr(parts.tables, "prefetch", None) if reads_what_the_batch_says(parts.model) else None
        self._after_backward = getattr(parts.tables, "after_backward", None) if self.tables is None else None
        self._ahead: tuple[Fed, SparseGroup] | None = None
        self._given: SparseGroup | None = None
        if self._prefetch is not None:
            parts.tables.register_forward_pre_hook(self._hand_over)  # type: ignore[union-attr]
        self._buffers = parts.buffers()
        self._weights = torch.tensor([label.weight for label in config.features.labels.values()], device=runtime.device)
        self._mark: Callable[[str | None], None] = meter.mark
        self._captured: Captured | None = None
        self.forget()
        if capture and not self._cuts and parts.tables is not None:
            parts.tables.small_dense = True  # type: ignore[attr-defined]
        self._table_norm = torch.zeros((), device=runtime.device)
        self._shared: SharedGradients | None = None
        if self._cuts and runtime.world > 1:
            if self._casts is not None:
                self._casts.all_at_end = True
            with_gradients = {**dense, **{f"{name}, copy": copy for name, copy in copies.items()}}
            self._shared = SharedGradients(with_gradients, runtime)

    def set_lr(self, factor: float) -> float:
        """Scale both learning rates; returns the dense one."""
        train = self.config.train
        lr = train.optimizer.lr * factor
        self.dense.set_lr(lr)
        table_lr = train.tables.lr * (factor if train.schedule.tables else 1.0)
        if self.tables is not None:
            self.tables.set_lr(table_lr)
        elif self.parts.tables is not None and not self._whole_tables:
            self.parts.tables.set_learning_rate(table_lr)  # type: ignore[attr-defined]
        return lr

    def forget(self) -> None:
        """Give up what was recorded, and its memory: a later step is recorded anew."""
        if self.config.train.capture:
            names = getattr(self.parts.guard, "recording", tuple)
            self._captured = Captured(self.config.features, self.runtime.device, names)

    @property
    def looks_ahead(self) -> bool:
        """Whether the tables want the ids of the batch after the current one."""
        return self._prefetch is not None

    @property
    def news(self) -> int:
        """Captured steps so far that were the first of their kind or were recorded, and so took longer than others."""
        return 0 if self._captured is None else self._captured.news

    def __call__(self, batches: Sequence[Fed], stop: bool, following: Fed | None = None) -> Tensor:
        """``following``: the batch after ``batches``, where it is known and `looks_ahead`."""
        totals = [sum(f.weight for f in batches), float(sum(f.host.size for f in batches)), float(stop)]
        if self._captured is not None:
            if self._casts is not None:
                self._casts.refresh()  # a replayed forward pass does not look
            room = self._captured.enter(batches[0].batch, totals)
            with self._unmarked():
                if self._cuts:
                    vector = self._cut(room, batches[0], following)
                else:
                    vector = room.part("step", lambda: self._compute([room.fixed.batch], room.totals))
            self.meter.mark("captured")
            return vector.clone()
        # torch.full, unlike torch.tensor, brings a host number to the device without waiting.
        there = [torch.full((), value, dtype=torch.float64, device=self.runtime.device) for value in totals]
        return self._compute([fed.batch for fed in batches], torch.stack(there), batches, following)

    @contextmanager
    def _unmarked(self) -> Iterator[None]:
        """A step without times of its phases, whose marks cannot be recorded."""
        self._mark = lambda _phase: None
        try:
            yield
        finally:
            self._mark = self.meter.mark

    def _compute(self, batches: Sequence[Batch], totals: Tensor, feds: Sequence[Fed] = (), following: Fed | None = None) -> Tensor:
        """``totals [3]`` fp64: weight, samples and the wish to stop. ``feds``: where the batches came from."""
        world, device = self.runtime.world, self.runtime.device
        before = self._kept_buffers()
        loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        table_norm = torch.zeros((), device=device)
        ok = torch.ones((), dtype=torch.bool, device=device)
        for i, batch in enumerate(batches):
            with self._no_sync(i + 1 < len(batches)):
                if self._ahead is not None and self._ahead[0] is feds[i]:
                    self._given = self._ahead[1]
                output = self.parts.module(batch)
                self._given = None
                loss = self._loss(output, batch)
                own = _told(loss)
                numbers = self.runtime.all_reduce(torch.cat([own, totals]))
                if i == 0:
                    whole = numbers[2:]
                    scale = _scale(whole[0], world)
                    totals = torch.zeros_like(totals)
                good = numbers[1] == 0
                ok &= good
                self._gate.copy_(good)
                loss_sum += numbers[0]
                self._look_ahead(feds[i + 1] if i + 1 < len(batches) else following)
                self._mark("forward")
                (loss * scale).backward()  # type: ignore[no-untyped-call]
            self._mark("backward")
            squared = self._step_tables(good)
            table_norm += 0.0 if squared is None else squared
        if world > 1:
            for table in self._whole_tables.values():
                table.grad = torch.zeros_like(table) if table.grad is None else table.grad
                self.runtime.all_reduce(table.grad.div_(world))
        norm = self.dense.grad_norm()
        return self._update(ok, norm, self.runtime.all_reduce(_bad_gradient(ok, norm, table_norm)), before, loss_sum, whole)

    def _cut(self, room: Recorded, fed: Fed, following: Fed | None) -> Tensor:
        """The step with its look-ups, its tables' backward pass and its collectives outside of what is recorded.

        Processes choose their rooms by themselves, and which of them record or replay makes no difference to the others.
        """
        runtime, tables = self.runtime, self.parts.tables
        looked_up: Mapping[str, Any] = {}
        if tables is not None:
            ahead = self._ahead is not None and self._ahead[0] is fed
            looked_up = tables(self._ahead[1] if ahead else sparse_group(fed.batch, tables.table_set.lookups))  # type: ignore[index]
        rows = room.look_up(looked_up)
        # Before the dense part, which the exchange of the next ids would wait for otherwise.
        self._look_ahead(following)
        runtime.all_reduce(room.totals)
        own, gradients, before = room.part("dense", lambda: self._dense_part(room, rows))
        if self._shared is not None:
            self._shared.begin()  # before other exchanges, which a communicator would do first and which wait for all of the dense part
        numbers = runtime.all_reduce(own)
        if self._shared is not None:
            self._shared.go_on()
        torch.eq(numbers[1], 0, out=self._gate)
        give_back(looked_up, gradients, self._gate, getattr(tables, "zero_unless", None))
        squared = self._step_tables(self._gate)
        if squared is not None:
            self._table_norm.copy_(squared)
        if self._shared is not None:
            self._shared.finish()
        return room.part("update", lambda: self._cut_update(numbers, before, room.totals))

    def _dense_part(self, room: Recorded, rows: FixedRows) -> tuple[Tensor, dict[tuple[str, ...], Tensor], list[Tensor]]:
        """This process's loss and whether it is not finite ``[2]`` fp64, gradients of ``rows``, and buffers as they were."""
        before = self._kept_buffers()
        loss = self._loss(self.parts.model(room.fixed.batch, rows.embedded()), room.fixed.batch)
        (loss * _scale(room.totals[0], self.runtime.world)).backward()  # type: ignore[no-untyped-call]
        if self._shared is not None:
            self._shared.take()
        return _told(loss), rows.take_gradients(), before

    def _cut_update(self, numbers: Tensor, before: list[Tensor], totals: Tensor) -> Tensor:
        # Averaged gradients are the same everywhere, and so is what follows from them.
        norm = self.dense.grad_norm()
        return self._update(self._gate, norm, _bad_gradient(self._gate, norm, self._table_norm), before, numbers[0], totals)

    def _update(
        self, ok: Tensor, norm: Tensor | None, bad_gradient: Tensor, before: list[Tensor], loss_sum: Tensor, totals: Tensor
    ) -> Tensor:
        """The dense optimizer; ``totals``: of all ranks. Returns the outcome."""
        weight, samples, stops = totals
        self.dense.step(ok & (bad_gradient == 0), self.config.train.clip_norm, norm)
        for buffer, old in zip(self._buffers, before):
            buffer.copy_(torch.where(ok, buffer, old))
        self._mark("optimizer")
        norm = torch.zeros((), device=ok.device) if norm is None else norm
        return torch.stack([loss_sum, weight, (~ok).double(), stops, samples, bad_gradient, norm.double()])

    def _loss(self, output: ModelOutput, batch: Batch) -> Tensor:
        return task_loss(replace(output, logits=output.logits.float()), batch, task_weights=self._weights, total=1.0)

    def _step_tables(self, good: Tensor) -> Tensor | None:
        """What of the tables' update is not part of the backward pass; returns the squared norm of their gradients where it is known."""
        squared: Tensor | None = None
        if self.tables is not None:
            squared = self.tables.step(good)
            self._mark("optimizer")
        elif self._after_backward is not None:
            squared = self._after_backward(good)
            self._mark("optimizer")
        return squared

    def _kept_buffers(self) -> list[Tensor]:
        return [b.clone() for b in self._buffers]

    def _no_sync(self, wanted: bool) -> Any:
        enter = getattr(self.parts.module, "no_sync", None)
        return enter() if wanted and enter is not None else nullcontext()

    def _look_ahead(self, fed: Fed | None) -> None:
        if self._prefetch is not None and fed is not None:
            group = sparse_group(fed.batch, self.parts.tables.table_set.lookups)  # type: ignore[union-attr]
            self._ahead = fed, group
            self._prefetch(group)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _hand_over(self, _tables: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The model makes its group of ids anew; the tables get the one that they have seen."""
        return inputs if self._given is None else (self._given, *inputs[1:])

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _gated(self, _tables: Any, _inputs: Any, looked_up: Mapping[str, Any]) -> dict[str, Any]:
        """Table gradients become zero in a step whose loss is not finite, for optimizers that run inside backward."""

        def gate(rows: Tensor) -> Tensor:
            return _Gate.apply(rows, self._gate) if rows.requires_grad else rows  # type: ignore[no-untyped-call]

        return {key: (gate(v[0]), v[1]) if isinstance(v, tuple) else gate(v) for key, v in looked_up.items()}


KEPT = 1 << 19
"""Values of a parameter from which on its copy for matrix products is kept, and updated with it: a launch of its own costs less."""


def _casts_to_keep(parts: Parts, config: Config, runtime: Runtime) -> WeightCasts | None:
    """The recipe's casts, where the optimizer can write them and nothing but it, or the averages of captured steps, reads gradients: one
    micro-batch a step."""
    casts: WeightCasts | None = getattr(parts.model, "weight_casts", None)
    alone = runtime.world == 1 or config.train.capture
    plain = alone and parts.module is parts.model and config.train.accumulate == 1
    return casts if casts is not None and plain and implementation(runtime.device.type) is not None else None


def _adamw_tables(parts: Parts) -> dict[str, nn.Parameter]:
    """Table weights by name, their gradients dense from now on.

    :raises ConfigError: a process does not hold whole tables.
    """
    if parts.tables is None:
        return {}
    if not isinstance(parts.tables, LocalTables):
        raise ConfigError(
            "AdamW updates tables that each process holds whole, and this sparse strategy spreads them",
            where="train.tables.kind",
            fix='set parallel.sparse = "local", or train.tables.kind = "rowwise_adagrad"',
        )
    parts.tables.sparse = False
    return {f"tables.{name}": state.weight for name, state in parts.tables.table_states().items()}


def _told(loss: Tensor) -> Tensor:
    """``[2]`` fp64: the loss and whether it is not finite."""
    return torch.stack([loss.detach().double(), (~torch.isfinite(loss)).double()])


def _scale(weight: Tensor, world: int) -> Tensor:
    """What the loss summed over samples is multiplied by, so that the mean of the processes' gradients is that of the mean loss."""
    return world / torch.where(weight > 0, weight, 1.0)


def _bad_gradient(ok: Tensor, norm: Tensor | None, table_norm: Tensor) -> Tensor:
    """Fp64 scalar: whether a step with a finite loss has gradients that are not."""
    finite = torch.isfinite(table_norm) if norm is None else torch.isfinite(norm) & torch.isfinite(table_norm)
    return (ok & ~finite).double()


class _Gate(torch.autograd.Function):
    """Identity; in backward the gradient where the flag is true *then*, else zeros (whatever the gradient holds)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, flag: Tensor) -> Tensor:
        ctx.flag = flag
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return torch.where(ctx.flag, grad, 0.0), None


class Outcomes:
    """Outcome vectors on their way to the host. On CUDA the host reads step s when step ``s + lag`` has been launched: late enough not to
    wait, and never later, which also bounds how far the host runs ahead."""

    def __init__(self, device: torch.device, lag: int = 2) -> None:
        self.lag = lag if device.type == "cuda" else 0
        self._waiting: deque[tuple[int, OnItsWay, Sequence[Fed]]] = deque()

    def push(self, step: int, vector: Tensor, batches: Sequence[Fed]) -> None:
        self._waiting.append((step, OnItsWay(vector), batches))

    def ready(self, *, all: bool = False) -> list[Outcome]:
        """Outcomes due by now, oldest first; ``all``: of every step launched."""
        found = []
        while len(self._waiting) > (0 if all else self.lag):
            step, vector, batches = self._waiting.popleft()
            v = dict(zip(_FIELDS, vector.received().tolist()))
            found.append(
                Outcome(
                    step, v["loss"], v["weight"], v["bad_loss"] > 0, v["bad_gradient"] > 0, v["stop"] > 0, int(v["samples"]),
                    v["grad_norm"], batches,
                )
            )  # fmt: skip
        return found
