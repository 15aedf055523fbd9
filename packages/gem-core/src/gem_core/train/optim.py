"""The two optimizers of a step (AdamW for the dense part, row-wise AdaGrad for the tables), their schedule, and clipping.

Neither waits for the device: whether a step counts is a device flag (``ok``, a bool scalar) that both obey.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from gem_core import ops
from gem_core.config.schema import DenseOptimizer, Schedule, TableOptimizer
from gem_core.errors import ConfigError
from gem_core.model.contract import Shards, TableState
from gem_core.ops.adamw import Update, implementation
from gem_core.train.runtime import Runtime
from gem_core.train.shards import copies, here, like


class RowwiseAdagrad:
    """Row-wise AdaGrad over tables ``[rows, dim]`` with one accumulator a row, from sparse or dense gradients.

    With ``g_r`` the sum of the gradients of all reads of row r since the last step: ``v_r += mean_d(g_r^2)``, then
    ``w_r -= lr * g_r / (sqrt(v_r) + eps)``. Rows that were not read stay as they are, bit for bit. Sums are fp32 for every table dtype.
    Over several ranks ``g_r`` is the mean over the ranks: each sends its (row, gradient) pairs to all, so that replicas stay equal.
    ``lr_on_device``: the learning rate is a tensor there, so that a recorded step reads it anew each time.
    """

    def __init__(self, states: Mapping[str, TableState], config: TableOptimizer, runtime: Runtime, *, lr_on_device: bool = False) -> None:
        self.states, self.eps, self.runtime = states, config.eps, runtime
        self.lr: Tensor | float = torch.tensor(config.lr, device=runtime.device) if lr_on_device else config.lr
        if config.initial_accumulator:
            for state in states.values():
                state.accumulator.fill_(config.initial_accumulator)

    def set_lr(self, lr: float) -> None:
        if isinstance(self.lr, Tensor):
            self.lr.fill_(lr)
        else:
            self.lr = lr

    @torch.no_grad()
    def step(self, ok: Tensor) -> Tensor:
        """Update all tables from their gradients, which are then dropped; where ``ok`` is false nothing changes.

        Returns the squared norm of all table gradients (fp32 scalar); tables whose gradients are not finite do not change.
        """
        total = torch.zeros((), device=ok.device)
        for state in self.states.values():
            grad, state.weight.grad = state.weight.grad, None
            if grad is None and self.runtime.world == 1:
                continue
            if grad is not None and not grad.is_sparse:
                total += _dense_update(state, self.runtime.all_reduce(grad.float()) / self.runtime.world, ok, self.lr, self.eps)
            else:
                rows, values = self._exchanged(state, grad)
                if rows.numel():
                    total += _sparse_update(state, rows, values, ok, self.lr, self.eps)
        return total

    def _exchanged(self, state: TableState, grad: Tensor | None) -> tuple[Tensor, Tensor]:
        """(rows [N] int64, gradients [N, dim] fp32), of all ranks; a rank that read nothing takes part with none."""
        weight = state.weight
        if grad is None:
            rows, values = weight.new_empty(0, dtype=torch.int64), weight.new_empty(0, weight.shape[1], dtype=torch.float32)
        else:
            rows, values = grad._indices()[0], grad._values().float()
        if self.runtime.world > 1:
            rows, values = (torch.cat(self.runtime.all_gather(t)) for t in (rows, values / self.runtime.world))
        return rows, values


def _sparse_update(state: TableState, rows: Tensor, values: Tensor, ok: Tensor, lr: Tensor | float, eps: float) -> Tensor:
    weight, accumulator = state.weight, state.accumulator
    if weight.shape[0] <= rows.numel():  # a small table: summing into a copy of its shape is cheaper than finding duplicates
        return _dense_update(state, _add_rows(torch.zeros_like(weight, dtype=torch.float32), rows, values), ok, lr, eps)
    if rows.is_cuda:
        rows, summed, norm = sums_without_waiting(rows, values, ok)
        read = accumulator[rows] + summed.square().mean(1)
        written = weight[rows] - summed * (lr / (read.sqrt() + eps)).unsqueeze(1)
        accumulator[rows], weight[rows] = read, written.to(weight.dtype)
        return norm
    rows, slot = torch.unique(rows, return_inverse=True)
    summed = _add_rows(values.new_zeros(rows.numel(), values.shape[1]), slot, values)
    summed, norm = _gated(summed, ok)
    _add_rows(accumulator, rows, summed.square().mean(1))
    _add_rows(weight, rows, (summed * (-lr / (accumulator[rows].sqrt() + eps)).unsqueeze(1)).to(weight.dtype))
    return norm


def sums_without_waiting(rows: Tensor, values: Tensor, ok: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of ``values [N, dim]`` over equal ``rows [N]``, gated by ``ok``, and their squared norm; in the same order on every run.

    How many distinct rows there are is not known without waiting for the device, so all N places are returned: the distinct rows in
    ascending order, then the last of them again and again, with the same sum. Writing what follows from them in any order is exact.
    """
    ordered, order = rows.sort(stable=True)
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[1:] = ordered[1:] != ordered[:-1]
    slot = first.cumsum(0) - 1
    places = torch.arange(rows.numel() + 1, device=rows.device)
    starts = torch.searchsorted(slot, places)
    summed, norm = _gated(ops.jagged_sum(values[order], starts), ok)
    kept = torch.minimum(places[:-1], slot[-1])
    return ordered[starts[kept]], summed[kept], norm


def _dense_update(state: TableState, grad: Tensor, ok: Tensor, lr: Tensor | float, eps: float) -> Tensor:
    grad, norm = _gated(grad, ok)
    state.accumulator.add_(grad.square().mean(1))
    state.weight.add_((grad * (-lr / (state.accumulator.sqrt() + eps)).unsqueeze(1)).to(state.weight.dtype))
    return norm


def _gated(grad: Tensor, ok: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients, all zero unless ``ok`` and they are finite, and their squared norm as it was."""
    norm = grad.square().sum()
    return torch.where(ok & torch.isfinite(norm), grad, 0.0), norm


def _add_rows(target: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """``target[rows] += values``, repeated rows included, in an order that is the same on every run and rank."""
    if target.is_cuda:  # index_put_ would wait to look for rows out of range; these have been looked up already
        return torch._index_put_impl_(target, (rows,), values, accumulate=True, unsafe=True)
    return target.index_add_(0, rows, values)


class DenseAdamW:
    """AdamW on fp32 parameters; weight decay on matrices only, not on vectors and scalars (norms, biases, gates).

    Parameters that a strategy has sharded (DTensors) are updated shard by shard: every rank updates what it holds, and the state is
    sharded as the parameter is. ``lr_on_device``: the learning rate is a tensor there, so that a recorded step reads it anew each time.

    :param copies: by name, copies of parameters in lower precision that the products of a pass read and that have the gradients, for one
        process with an implementation of the op "adamw": it updates parameter and copy in one pass.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: DenseOptimizer,
        runtime: Runtime | None = None,
        *,
        lr_on_device: bool = False,
        copies: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.parameters = dict(parameters)
        self.runtime, self.config = runtime, config
        # The optimizer sees this rank's values as plain tensors: its fused kernel takes no mixture of meshes.
        self.local = {name: p if here(p) is p else nn.Parameter(here(p)) for name, p in self.parameters.items()}
        matrices = [p for p in self.local.values() if p.dim() > 1]
        vectors = [p for p in self.local.values() if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.adamw = (
            torch.optim.AdamW(
                [g for g in groups if g["params"]] or [{"params": []}],
                lr=torch.tensor(config.lr, device=next(iter(self.local.values())).device) if lr_on_device else config.lr,
                betas=config.betas,
                eps=config.eps,
                fused=True,
                capturable=lr_on_device,
            )
            if self.parameters
            else None
        )
        self.copies = dict(copies or {})
        device = next(iter(self.copies.values())).device if self.copies else None
        self._update = None if device is None else implementation(device.type)
        if self.copies and self._update is None:
            raise ValueError("copies need an implementation of the op adamw")
        self._lr = torch.full((), config.lr, device=device)
        self._steps = torch.zeros(len(self.copies), device=device)
        self._step_of = dict(zip(self.copies, self._steps.unbind()))

    def set_lr(self, lr: float) -> None:
        self._lr.fill_(lr)
        for group in self.adamw.param_groups if self.adamw else ():
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    @torch.no_grad()
    def grad_norm(self) -> Tensor | None:
        """Global norm of the gradients there are, the same on every rank."""
        if self.copies:
            kept = [g for g in map(self._gradient, self.copies) if g is not None]
            others = [p.grad for name, p in self.parameters.items() if name not in self.copies and p.grad is not None]
            norms = [n for grads in (kept, others) if grads for n in torch._foreach_norm(grads, 2, dtype=torch.float32)]
            return torch.linalg.vector_norm(torch.stack(norms)) if norms else None
        if all(here(p) is p for p in self.parameters.values()):
            grads = [p.grad for p in self.parameters.values() if p.grad is not None]
            return torch.nn.utils.get_total_norm(grads, foreach=True) if grads else None
        assert self.runtime is not None
        world = self.runtime.world
        total = torch.zeros((), device=self.runtime.device)
        by_copies: dict[int, list[Tensor]] = {}
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                by_copies.setdefault(copies(parameter, world), []).append(here(parameter.grad))
        for count, grads in sorted(by_copies.items()):
            total += torch.nn.utils.get_total_norm(grads, foreach=True).square() / count
        return self.runtime.all_reduce(total).sqrt()

    @torch.no_grad()
    def step(self, ok: Tensor, clip: float | None, norm: Tensor | None) -> None:
        """Clip to the global norm ``clip`` and update, unless the device flag ``ok`` is false; drops the gradients."""
        if self.adamw is None:
            return
        if self.copies:
            self._step_with_copies(ok, clip, norm)
        for name, parameter in self.parameters.items():
            local = self.local[name]
            if local is not parameter:
                local.grad = None if parameter.grad is None else here(parameter.grad)
                parameter.grad = None
        if clip is not None and norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self.local.values(), clip, norm, foreach=True)
        # The fused kernel skips a step whose found_inf is 1, moments and step count included; GradScaler uses the same door.
        self.adamw.found_inf = (~ok).float()  # type: ignore[attr-defined]
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)

    def _gradient(self, name: str) -> Tensor | None:
        """Of a parameter with a copy: the copy's; fp32 where the parameter was read as it is, too."""
        own, at_copy = self.parameters[name].grad, self.copies[name].grad
        return own if at_copy is None else at_copy if own is None else own + at_copy

    def _step_with_copies(self, ok: Tensor, clip: float | None, norm: Tensor | None) -> None:
        assert self.adamw is not None
        assert self._update is not None
        given = {name: g.contiguous() for name in self.copies if (g := self._gradient(name)) is not None}
        if not given:
            return
        scale = None if clip is None or norm is None else (clip / (norm + 1e-6)).clamp(max=1.0)  # as clip_grads_with_norm_
        for steps in [self._steps] if len(given) == len(self.copies) else [self._step_of[name] for name in given]:
            steps.add_(ok)
        corrections = torch.stack([1 - beta ** self._steps.double() for beta in self.config.betas], 1).float()
        for (name, copy), correction in zip(self.copies.items(), corrections):
            parameter = self.parameters[name]
            if name in given:
                state = self.adamw.state[parameter]
                if not state:
                    zeros = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
                    state.update({"step": self._step_of[name], **zeros})
                decay = self.config.weight_decay if parameter.dim() > 1 else 0.0
                moments = state["exp_avg"], state["exp_avg_sq"]
                own, low = parameter.detach(), copy.detach()
                betas, eps = self.config.betas, self.config.eps
                self._update(Update(own, given[name], *moments, low, self._lr, correction, scale, ok, betas, eps, decay))
            parameter.grad = copy.grad = None

    def state_items(self) -> Iterable[tuple[str, Tensor | Shards]]:
        """``<parameter>.exp_avg``, ``<parameter>.exp_avg_sq``, ``<parameter>.step`` of the parameters that were ever updated."""
        for name, parameter in self.parameters.items():
            for key, value in (self.adamw.state.get(self.local[name], {}) if self.adamw else {}).items():
                yield f"{name}.{key}", value if value.dim() == 0 or here(parameter) is parameter else like(parameter, value)

    def targets(self, names: Iterable[str]) -> dict[str, Tensor | Shards]:
        """Fresh state for ``names`` (as `state_items` gives them), to be filled from a checkpoint; those of parameters that are not in
        this process are left out."""
        found: dict[str, Tensor | Shards] = {}
        for key in names:
            name, _, part = key.rpartition(".")
            if name not in self.parameters or self.adamw is None:
                continue
            parameter, local = self.parameters[name], self.local[name]
            value = torch.zeros((), device=local.device) if part == "step" else torch.zeros_like(local)
            if part == "step" and name in self._step_of:
                value = self._step_of[name]
            self.adamw.state[local][part] = value
            found[key] = value if part == "step" or local is parameter else like(parameter, value)
        return found


def schedule_factor(config: Schedule, step: int, total: int | None) -> float:
    """Factor on the learning rate of the step that follows ``step`` finished ones.

    ``(step + 1) / warmup`` while warming up, then the decay from 1 at the end of the warm-up to ``final`` at ``total`` steps.

    :raises ConfigError: a decay, and ``total`` is not known.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.decay == "none":
        return 1.0
    if total is None:
        raise ConfigError(
            f"decay = {config.decay!r} needs to know the number of steps, and this data source does not tell its length",
            where="train.schedule.decay",
            fix="set train.steps",
        )
    progress = min(1.0, (step - config.warmup_steps) / max(1, total - config.warmup_steps))
    left = 1 - progress if config.decay == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.final + (1 - config.final) * left
