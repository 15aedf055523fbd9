"""Conformance kit for precision recipes: subclass `RecipeConformance` in a test file, and pytest runs what every recipe must keep.

from gem_core.testing.recipes import RecipeConformance

class TestMine(RecipeConformance):
    spec = RecipeSpec("mine", MineConfig, apply_mine)
    min_sqnr_db = 20.0
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from gem_core.hookspecs import Guard, RecipeSpec
from gem_core.testing.rules import Rules
from gem_core.train.contract import RecipeContext
from gem_core.train.pack import pack, unpack


class _Net(nn.Module):
    """Linear, norm, activation, linear and a head, so that a recipe finds the usual sites."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(width, 2 * width), nn.LayerNorm(2 * width), nn.Linear(2 * width, width)
        self.heads = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.heads(gelu(self.down(gelu(self.norm(self.up(x))))))
        return logits


def sqnr_db(reference: Tensor, value: Tensor) -> float:
    """Signal to quantisation noise ratio ``10 log10(|ref|^2 / |ref - value|^2)`` in dB; infinite for equal tensors."""
    noise = (reference.double() - value.double()).square().sum()
    return math.inf if noise == 0 else float(10 * torch.log10(reference.double().square().sum() / noise))


class RecipeConformance(Rules):
    """Set ``spec``; override ``config`` for other options than the defaults, ``width`` (a multiple of 32) or ``rows`` for other shapes.

    ``min_sqnr_db`` and ``min_grad_sqnr_db``: what the recipe promises of results and gradients, against fp32.
    """

    spec: RecipeSpec
    config: Any = None
    width = 64
    rows = 96
    min_sqnr_db = 20.0
    min_grad_sqnr_db = 15.0

    def options(self) -> Any:
        return self.spec.config_type() if self.config is None else self.config

    def applied(self, net: nn.Module, compiled: bool = False) -> Guard:
        return self.spec.apply(net, self.options(), RecipeContext(torch.device("cpu"), compile=compiled))

    def nets(self) -> tuple[nn.Module, nn.Module, Tensor]:
        torch.manual_seed(0)
        plain = _Net(self.width)
        return plain, copy.deepcopy(plain), torch.randn(self.rows, self.width)

    def test_the_options_are_frozen_and_hashable(self) -> None:
        """The configuration has defaults, can be hashed, and its fields cannot be set."""
        options = self.options()
        assert hash(options) == hash(self.options()), "two equal configurations have different hashes"
        for name in type(options).model_fields:
            try:
                setattr(options, name, getattr(options, name))
            except Exception:
                continue
            raise AssertionError(f"the option {name} can be set: derive the configuration from gem_core.FrozenConfig")

    def test_outputs_and_gradients_are_near_those_of_fp32(self) -> None:
        """Results are fp32, finite, and their signal-to-noise ratio and that of all gradients is at least what the recipe promises."""
        plain, net, x = self.nets()
        self.applied(net)
        out, dx, grads = _pass(plain, x)
        out_r, dx_r, grads_r = _pass(net, x)
        assert out_r.dtype == torch.float32, f"the head gives {out_r.dtype}"
        assert torch.isfinite(out_r).all(), "results are not finite"
        found = sqnr_db(out, out_r)
        assert found >= self.min_sqnr_db, f"SQNR of the results is {found:.1f} dB, promised are {self.min_sqnr_db}"
        pairs = {"the input": (dx, dx_r)} | {name: (grad, grads_r[name]) for name, grad in grads.items()}
        for name, (want, got) in pairs.items():
            found = sqnr_db(want, got)
            assert found >= self.min_grad_sqnr_db, f"SQNR of the gradient of {name} is {found:.1f} dB, promised are {self.min_grad_sqnr_db}"

    def test_zeros_and_outliers_stay_finite(self) -> None:
        """Blocks of zeros (no amax to scale by), a dead gradient and values far from the others give finite results and gradients."""
        for what, change in _EXTREMES.items():
            _, net, x = self.nets()
            self.applied(net)
            out, dx, grads = _pass(net, change(x))
            broken = [n for n, t in {"the result": out, "the input's gradient": dx, **grads}.items() if not bool(torch.isfinite(t).all())]
            assert not broken, f"{what}: not finite: {', '.join(broken)}"
        _, net, x = self.nets()
        self.applied(net)
        (net(x).float() * 0.0).sum().backward()
        broken = [n for n, p in net.named_parameters() if p.grad is not None and not bool(torch.isfinite(p.grad).all())]
        assert not broken, f"a gradient of zeros: not finite: {', '.join(broken)}"

    def test_master_weights_stay_fp32_under_their_names(self) -> None:
        """Parameters keep names and shapes; they and their gradients are fp32; neither pass writes to them."""
        plain, net, x = self.nets()
        self.applied(net)
        before = {n: p.detach().clone() for n, p in net.named_parameters()}
        net(x).float().sum().backward()
        names, now = ({n: tuple(p.shape) for n, p in model.named_parameters()} for model in (plain, net))
        assert now == names, f"parameters changed: {sorted(set(now.items()) ^ set(names.items()))}"
        wrong = [n for n, p in net.named_parameters() if p.dtype != torch.float32 or p.grad is None or p.grad.dtype != torch.float32]
        assert not wrong, f"not fp32, or without an fp32 gradient: {', '.join(wrong)}"
        written = [n for n, p in net.named_parameters() if not torch.equal(p, before[n])]
        assert not written, f"changed by a forward and backward pass: {', '.join(written)}"

    def test_small_updates_are_not_lost(self) -> None:
        """An update of 2^-12 of a weight vanishes in bf16; master weights must keep it."""
        _, net, _ = self.nets()
        self.applied(net)
        weight = next(net.parameters())
        before = weight.detach().clone()
        with torch.no_grad():
            weight.mul_(1 + 2**-12)
        kept = float((weight != before).float().mean())
        assert kept > 0.99, f"{1 - kept:.0%} of the weights did not move"

    def test_every_site_is_described(self) -> None:
        """The guard tells the precision of every module with parameters, and why."""
        plain, net, _ = self.nets()
        guard = self.applied(net)
        assert isinstance(guard, Guard), f"apply returned {type(guard).__name__}, not a gem_core.Guard"
        owners = {n for n, m in plain.named_modules() if next(m.parameters(recurse=False), None) is not None}
        described = guard.describe()
        missing = owners - {name for name, _, _ in described}
        assert not missing, f"not described: {', '.join(sorted(missing))}"
        mute = [name for name, precision, why in described if not precision or not why]
        assert not mute, f"without a precision or a reason: {', '.join(mute)}"

    def test_the_guard_state_can_be_stored_and_put_back(self) -> None:
        """`on_step` gives finite scalars; the guard's state is JSON and tensors, and a fresh guard that loads it has the same state."""
        _, net, x = self.nets()
        guard = self.applied(net)
        for step in range(1, 4):
            values = guard.on_step(step, net(x).float().square().mean().detach())
            bad = [name for name, value in values.items() if not math.isfinite(float(value))]
            assert not bad, f"on_step({step}): not finite: {', '.join(bad)}"
        described, tensors = pack(guard.state_dict())
        _, fresh, _ = self.nets()
        other = self.applied(fresh)
        other.load_state_dict(unpack(json.loads(json.dumps(described)), tensors))
        again, tensors_again = pack(other.state_dict())
        assert again == described, f"the state came back as {again}, stored was {described}"
        differs = [name for name, tensor in tensors.items() if not torch.equal(tensor, tensors_again[name])]
        assert not differs, f"tensors of the state came back different: {', '.join(differs)}"

    def test_the_guard_may_watch_the_ne_and_tells_its_decisions(self) -> None:
        """`watch` and `take_decisions`, where there, take held-out NE and give JSON records with `step`, each once."""
        _, net, x = self.nets()
        guard = self.applied(net)
        if hasattr(guard, "watch"):
            guard.watch(lambda rows: 0.9)
        for step in range(1, 4):
            guard.on_step(step, net(x).float().square().mean().detach())
        if hasattr(guard, "take_decisions"):
            records = list(guard.take_decisions())
            assert all(isinstance(r.get("step"), int) for r in records), f"a decision without its step: {records}"
            assert json.loads(json.dumps(records)) == records, f"a decision that is not JSON: {records}"
            assert not list(guard.take_decisions()), "decisions are told twice"

    def test_empty_and_single_row_batches(self) -> None:
        """Batches of no row and of one row run forward and backward."""
        _, net, x = self.nets()
        self.applied(net)
        for rows in (0, 1):
            out = net(x[:rows])
            assert out.shape == (rows, 2), f"{rows} rows give {tuple(out.shape)}"
            out.float().sum().backward()

    def test_training_with_it_follows_fp32(self) -> None:
        """60 steps of AdamW lower the loss by at least nine tenths of what fp32 does."""
        losses = []
        plain, net, x = self.nets()
        y = torch.stack([x[:, 0], x[:, 1] * x[:, 2]], 1)
        self.applied(net)
        for model in (plain, net):
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
            for _ in range(60):
                loss = (model(x).float() - y).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            losses.append((float(y.square().mean()), float(loss.detach())))
        (start, reference), (_, found) = losses
        assert start - found > 0.9 * (start - reference), f"the loss went from {start:.3f} to {found:.3f}, in fp32 to {reference:.3f}"


def _pass(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Result, gradient of the input and gradients of the parameters, of the mean square of the result."""
    inputs = x.clone().requires_grad_()
    out = net(inputs).float()
    out.square().mean().backward()
    assert inputs.grad is not None, "no gradient reaches the input"
    missing = [n for n, p in net.named_parameters() if p.grad is None]
    assert not missing, f"no gradient reaches {', '.join(missing)}"
    return out.detach(), inputs.grad, {n: p.grad for n, p in net.named_parameters() if p.grad is not None}


def _with_outlier(x: Tensor) -> Tensor:
    x = x.clone()
    x[0, 0] = 1e4
    return x


def _with_zero_blocks(x: Tensor) -> Tensor:
    x = x.clone()
    x[: x.shape[0] // 2] = 0.0
    x[:, :32] = 0.0
    return x


_EXTREMES: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": torch.zeros_like,
    "half of the rows and a block of columns zero": _with_zero_blocks,
    "one value of 10,000": _with_outlier,
    "values around 1e-20": lambda x: x * 1e-20,
}
