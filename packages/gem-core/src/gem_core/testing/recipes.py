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
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from gem_core.hookspecs import Guard, RecipeSpec
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


class RecipeConformance:
    """Set ``spec``; override ``config`` for other options than the defaults, ``width`` (a multiple of 32) or ``rows`` for other shapes."""

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
        assert hash(self.options()) == hash(self.options())

    def test_outputs_and_gradients_are_near_those_of_fp32(self) -> None:
        plain, net, x = self.nets()
        self.applied(net)
        found = []
        for model in (plain, net):
            inputs = x.clone().requires_grad_()
            out = model(inputs).float()
            out.square().mean().backward()
            assert inputs.grad is not None, "the gradient must reach the input"
            missing = [n for n, p in model.named_parameters() if p.grad is None]
            assert not missing, f"no gradient reaches {', '.join(missing)}"
            found.append((out.detach(), inputs.grad, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
        (out, dx, grads), (out_r, dx_r, grads_r) = found
        assert torch.isfinite(out_r).all()
        assert out_r.dtype == torch.float32
        assert sqnr_db(out, out_r) >= self.min_sqnr_db
        assert sqnr_db(dx, dx_r) >= self.min_grad_sqnr_db
        for name, grad in grads.items():
            assert sqnr_db(grad, grads_r[name]) >= self.min_grad_sqnr_db, name

    def test_master_weights_stay_fp32_under_their_names(self) -> None:
        plain, net, x = self.nets()
        self.applied(net)
        net(x).float().sum().backward()
        names = {n: p.shape for n, p in plain.named_parameters()}
        assert {n: p.shape for n, p in net.named_parameters()} == names
        assert all(p.dtype == torch.float32 and p.grad is not None and p.grad.dtype == torch.float32 for p in net.parameters())

    def test_small_updates_are_not_lost(self) -> None:
        """An update of 2^-12 of a weight vanishes in bf16; master weights must keep it."""
        _, net, _ = self.nets()
        self.applied(net)
        weight = next(net.parameters())
        before = weight.detach().clone()
        with torch.no_grad():
            weight.mul_(1 + 2**-12)
        assert (weight != before).float().mean() > 0.99

    def test_every_site_is_described(self) -> None:
        plain, net, _ = self.nets()
        guard = self.applied(net)
        assert isinstance(guard, Guard)
        owners = {n for n, m in plain.named_modules() if next(m.parameters(recurse=False), None) is not None}
        described = guard.describe()
        assert {name for name, _, _ in described} >= owners
        assert all(precision and why for _, precision, why in described)

    def test_the_guard_state_can_be_stored_and_put_back(self) -> None:
        _, net, x = self.nets()
        guard = self.applied(net)
        for step in range(1, 4):
            values = guard.on_step(step, net(x).float().square().mean().detach())
            assert all(math.isfinite(float(v)) for v in values.values())
        described, tensors = pack(guard.state_dict())
        _, fresh, _ = self.nets()
        other = self.applied(fresh)
        other.load_state_dict(unpack(json.loads(json.dumps(described)), tensors))
        assert pack(other.state_dict())[0] == described

    def test_empty_and_single_row_batches(self) -> None:
        _, net, x = self.nets()
        self.applied(net)
        for rows in (0, 1):
            out = net(x[:rows])
            assert out.shape == (rows, 2)
            out.float().sum().backward()

    def test_training_with_it_follows_fp32(self) -> None:
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
        assert start - found > 0.9 * (start - reference)
