"""Multi-task prediction heads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gem_core.model.config import HeadConfig
from gem_core.model.layers import Mlp, TokenMix, activate


class Heads(nn.Module):
    """Tokens ``[B, n, d]`` to logits ``[B, T]`` fp32: (compression,) flatten, (shared layer,) one MLP a task."""

    def __init__(self, n: int, dim: int, tasks: Sequence[str], config: HeadConfig | None = None, *, dropout: float = 0.0) -> None:
        super().__init__()
        config = config or HeadConfig()
        self.tasks = tuple(tasks)
        self.mix = TokenMix(n, config.tokens) if config.tokens is not None else None
        width = (config.tokens or n) * dim
        self.shared = nn.Linear(width, config.shared) if config.shared else None
        self.dropout = nn.Dropout(dropout)
        self.mlps = nn.ModuleList(Mlp(config.shared or width, (*config.hidden, 1), dropout=dropout) for _ in self.tasks)

    def forward(self, x: Tensor) -> Tensor:
        y = (x if self.mix is None else self.mix(x)).flatten(1)
        if self.shared is not None:
            y = self.dropout(activate(self.shared(y), "relu"))
        return torch.cat([mlp(y) for mlp in self.mlps], 1).float()
