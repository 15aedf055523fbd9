"""Losses of next-item prediction, and the negatives that they are computed with.

With a position's target score s, negative scores n_k (k = 1 .. K) and I items:

- "bce": ``-log sigma(s) - sum_k log(1 - sigma(n_k))`` (SASRec, arXiv 1808.09781, with K = 1).
- "gbce": ``-beta log sigma(s) - sum_k log(1 - sigma(n_k))``, ``beta = alpha (t (1 - 1 / alpha) + 1 / alpha) = 1 - t (1 - alpha)``,
  ``alpha = K / (I - 1)`` (gSASRec, arXiv 2308.07192).
- "sampled_softmax": ``log(exp s + sum_k exp n_k) - s``; with log_q each score is lessened by the log of its item's probability of being
  drawn.
- "softmax": the same over all items.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gem_core.model.config import RetrievalConfig


@dataclass(frozen=True)
class Draw:
    """What a batch of N positions is scored against.

    ``targets [N]``; ``negatives [N, K]``, or ``[K]`` for all positions, or None (all items); ``ids``: the items whose vectors are needed:
    with ``whole`` all of them in their order, else the targets and then the negatives. ``left_out``: bool like ``negatives``, ``[N, K]``;
    ``log_q [items]``; ``pad``: the id that is no item; ``candidates``: the number of items without it.
    """

    targets: Tensor
    negatives: Tensor | None
    ids: Tensor
    whole: bool
    candidates: int
    left_out: Tensor | None = None
    log_q: Tensor | None = None
    pad: int | None = None


class NegativeSampler(nn.Module):
    """Draws negatives with replacement among ``items`` ids without ``pad``.

    "popularity" follows ``count + 1``, the count being how often an item was a target in this process's batches so far (a buffer, so
    checkpoints hold it).
    """

    def __init__(self, items: int, pad: int | None, config: RetrievalConfig) -> None:
        super().__init__()
        self.items, self.pad, self.config = items, pad, config
        self.candidates = items - int(pad is not None)
        self.popular = config.sampling == "popularity" and config.loss != "softmax"
        if self.popular:
            self.register_buffer("counts", torch.ones(items))
            if pad is not None:
                self.counts[pad] = 0.0

    counts: Tensor

    def whole(self, width: int) -> bool:
        """Whether one product with all items moves less memory than reading K vectors for every position."""
        return not self.config.shared and self.items <= self.config.negatives * width

    def forward(self, targets: Tensor, weights: Tensor, events: Tensor, offsets: Tensor, width: int) -> Draw:
        """``targets [N]`` and ``weights [N]`` of the positions, which are the ``events [N]`` of samples with ``offsets [B+1]``."""
        c, n, device = self.config, targets.shape[0], targets.device
        every = torch.arange(self.items, device=device)
        if c.loss == "softmax":
            return Draw(targets, None, every, True, self.candidates, pad=self.pad)
        if self.popular:
            with torch.no_grad():
                self.counts.index_add_(0, targets, (weights > 0).to(self.counts.dtype))
        negatives = self._drawn((c.negatives,) if c.shared else (n, c.negatives), device)
        whole = self.whole(width)
        ids = every if whole else torch.cat([targets, negatives.flatten()])
        left_out = self._left_out(targets, negatives, events, offsets)
        return Draw(targets, negatives, ids, whole, self.candidates, left_out, self._log_q())

    def _drawn(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        if self.popular:
            below = self.counts.double().cumsum(0)
            return torch.searchsorted(below, torch.rand(shape, dtype=torch.float64, device=device) * below[-1], right=True)
        drawn = torch.randint(self.candidates, shape, device=device)
        return drawn if self.pad is None else drawn + (drawn >= self.pad)

    def _log_q(self) -> Tensor | None:
        if not self.config.log_q or not self.popular:  # a uniform q shifts all scores alike
            return None
        return (self.counts / self.counts.sum()).clamp(min=1e-12).log()

    def _left_out(self, targets: Tensor, negatives: Tensor, events: Tensor, offsets: Tensor) -> Tensor | None:
        kind = self.config.false_negatives
        if kind == "keep":
            return None
        found = negatives == targets.unsqueeze(1)
        if kind == "history" and events.numel():
            place = torch.arange(events.shape[0], device=events.device, dtype=offsets.dtype)
            sample = torch.searchsorted(offsets[1:], place, right=True)
            own = (sample * self.items + events).sort().values
            asked = sample.unsqueeze(1) * self.items + negatives
            at = torch.searchsorted(own, asked).clamp(max=own.shape[0] - 1)
            found = found | (own[at] == asked)
        return found


def position_losses(states: Tensor, items: Tensor, draw: Draw, config: RetrievalConfig) -> Tensor:
    """``[N]`` fp32: the loss of each position, ``states [N, d]`` fp32 against ``items``, the vectors of ``draw.ids``."""
    if draw.negatives is None:
        scores = states @ items.T
        if draw.pad is not None:
            scores[:, draw.pad] = float("-inf")
        return F.cross_entropy(scores, draw.targets, reduction="none")
    own, others = (s.to(torch.promote_types(s.dtype, torch.float32)) for s in _scores(states, items, draw))  # autocast may have made bf16
    if config.loss == "sampled_softmax":
        if draw.log_q is not None:
            own, others = own - draw.log_q[draw.targets], others - draw.log_q[draw.negatives]
        if draw.left_out is not None:
            others = others.masked_fill(draw.left_out, float("-inf"))
        return torch.logsumexp(torch.cat([own.unsqueeze(1), others], 1), 1) - own
    negative = F.softplus(others)
    if draw.left_out is not None:
        negative = negative.masked_fill(draw.left_out, 0.0)
    beta = 1.0 if config.loss == "bce" else 1.0 - config.t * (1.0 - config.negatives / (draw.candidates - 1))
    return beta * F.softplus(-own) + negative.sum(1)


def _scores(states: Tensor, items: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
    """Scores of the targets ``[N]`` and of the negatives ``[N, K]``."""
    negatives, n = draw.negatives, states.shape[0]
    assert negatives is not None
    if draw.whole:
        scores = states @ items.T
        own = scores.gather(1, draw.targets.unsqueeze(1)).squeeze(1)
        return own, scores.gather(1, negatives)
    own = (states * items[:n]).sum(1)
    others = items[n:]
    if negatives.dim() == 1:
        return own, states @ others.T
    return own, torch.bmm(others.view(*negatives.shape, states.shape[1]), states.unsqueeze(2)).squeeze(2)
