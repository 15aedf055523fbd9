"""Four faults, each into the same small CTR model: the guard names the site and demotes it within its window, and the run ends within 0.2 %
of the NE that bf16 reaches under the same fault. Without the guard it does not."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor, nn

import gem_precision
import gem_precision.linear_op as linear_module
from gem_precision.guard import GuardConfig, NumericsGuard
from gem_precision.recipe import RecipeConfig

WIDTH, STEPS, BATCH, BEGIN = 64, 300, 512, 160
PRUNED, RARE = 0, [1, 33]
"""A feature whose weights are zero and stay so, and features (one a block) that are almost always absent: 10^-8 in size."""

SAMPLE_EVERY, PATIENCE = 5, 2
FAULTS = {
    # fault: (site, GEMM operand that shows it, steps until the guard has moved the site)
    "outlier": ("a", "fprop.x", SAMPLE_EVERY * PATIENCE + 1),
    "nan": ("b", "fprop.w", 1 + SAMPLE_EVERY),
    "dead": ("b", "fprop.w", 1 + SAMPLE_EVERY),
    "lr_spike": ("a", "fprop.w", SAMPLE_EVERY * PATIENCE + 6),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.heads = nn.Linear(WIDTH, 96), nn.Linear(96, 64), nn.Linear(64, 1)
        with torch.no_grad():
            self.a.weight[:, [PRUNED, *RARE]] = 0
        self.a.weight.register_hook(self._stay_pruned)

    @staticmethod
    def _stay_pruned(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad[:, PRUNED] = 0
        return grad

    def forward(self, x: Tensor) -> Tensor:
        return self.heads(torch.relu(self.b(torch.relu(self.a(x))))).squeeze(-1)


@functools.cache
def planted(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Features like embeddings (deviation 0.05), one raw feature (deviation 1) that the label does not depend on, a smooth planted law."""
    generator, law = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(7)
    x = torch.randn(rows, WIDTH, generator=generator) * 0.05
    x[:, PRUNED] *= 20
    x[:, RARE] *= 2e-7
    w = torch.randn(WIDTH, 32, generator=law) * 10 / WIDTH**0.5
    w[[PRUNED, *RARE]] = 0
    p = torch.sigmoid(0.7 * torch.tanh(x @ w) @ torch.randn(32, generator=law) - 1.2)
    return x, (torch.rand(rows, generator=generator) < p).float()


def corrupt(monkeypatch: pytest.MonkeyPatch, fault: str) -> dict[str, bool]:
    """From then on the forward weight of site b is damaged after quantising: one scale is NaN, or one block of 64 x 32 is zero."""
    state, real = {"on": False}, linear_module.quantise

    def quantise(x, operand, **options):
        q = real(x, operand, **options)
        if state["on"] and tuple(x.shape) == (64, 96) and options.get("along", 1) == 1:
            if fault == "nan":
                q.scales[3, 1] = 255
            else:
                q.data.view(torch.uint8)[:, 32:64] = 0
        return q

    monkeypatch.setattr(linear_module, "quantise", quantise)
    return state


def train(recipe: str, fault: str, guarded: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[float, NumericsGuard]:
    """NE on held-out rows at the end, under the fault. Steps without finite loss and gradients are skipped, as the trainer does."""
    with monkeypatch.context() as patch:
        damage = corrupt(patch, fault) if fault in ("nan", "dead") else {}
        torch.manual_seed(0)
        net = Net()
        guard_config = GuardConfig(enabled=guarded, sample_every=SAMPLE_EVERY, patience=PATIENCE, quiet=8)
        guard = gem_precision.apply(net, recipe, config=RecipeConfig(guard=guard_config))
        assert isinstance(guard, NumericsGuard)
        lr = 2e-3
        optimizer = torch.optim.Adam(net.parameters(), lr=lr, betas=(0.9, 0.98), eps=1e-16)
        all_x, all_y = planted(64 * BATCH, 1)
        for step in range(1, STEPS + 1):
            at = step * BATCH % (len(all_x) - BATCH)
            x, y = all_x[at : at + BATCH].clone(), all_y[at : at + BATCH]
            if step >= BEGIN:
                damage["on"] = True
                if fault == "outlier":
                    x[:, PRUNED] *= 1e4
            optimizer.param_groups[0]["lr"] = lr * min(1.0, (STEPS - step + 1) / (STEPS * 0.4))
            loss = nn.functional.binary_cross_entropy_with_logits(net(x).float(), y)
            optimizer.zero_grad()
            loss.backward()
            before = net.a.weight.detach().clone()
            if math.isfinite(loss.item()) and all(bool(p.grad.isfinite().all()) for p in net.parameters()):
                optimizer.step()
            if fault == "lr_spike" and BEGIN <= step < BEGIN + 5:
                # the learning rate of the rare features' slots; Adam moves them whatever the size of their gradients
                with torch.no_grad():
                    net.a.weight[:, RARE] += 2e8 * (net.a.weight - before)[:, RARE]
            guard.on_step(step, loss.detach())
        x, y = planted(40_000, 2)
        if fault == "outlier":
            x = x.clone()
            x[:, PRUNED] *= 1e4
        with torch.no_grad():
            entropy = nn.functional.binary_cross_entropy_with_logits(net(x).float(), y)
        p = y.mean()
        return float(entropy / -(p * p.log() + (1 - p) * (1 - p).log())), guard


@pytest.mark.slow
@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_guard_saves_the_run(fault, monkeypatch):
    site, operand, window = FAULTS[fault]
    reference, _ = train("bf16", fault, True, monkeypatch)
    guarded, guard = train("mxfp8", fault, True, monkeypatch)
    unguarded, watched = train("mxfp8", fault, False, monkeypatch)
    first = guard.decisions[0]
    assert first.site == site
    assert first.reason.startswith(operand)
    assert BEGIN <= first.step <= BEGIN + window
    assert first.evidence
    assert guard.sites[site].precision == "bf16"
    assert {n: p for n, p, _ in guard.describe()}[site] == "bf16"
    assert abs(guarded / reference - 1) <= 0.002
    assert not abs(unguarded / reference - 1) <= 0.002
    assert watched.decisions == []
