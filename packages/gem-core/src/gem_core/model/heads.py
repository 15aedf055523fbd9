"""Multi-task prediction heads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from gem_core.model.config import HeadConfig
from gem_core.model.layers import Mlp, TokenMix, activate


class TaskHeads(nn.Module):
    """One module a task on the same input, ``[B, width] -> [B, T]``. Models call theirs ``heads``: recipes keep that name in fp32."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        self.tasks = nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([head(x) for head in self.tasks], 1)


class Heads(nn.Module):
    """Tokens ``[B, n, d]`` to logits ``[B, T]``: (compression,) flatten, (shared layer,) one MLP a task."""

    def __init__(self, n: int, dim: int, tasks: Sequence[str], config: HeadConfig | None = None, *, dropout: float = 0.0) -> None:
        super().__init__()
        config = config or HeadConfig()
        self.mix = TokenMix(n, config.tokens) if config.tokens is not None else None
        self.input_width = n * dim
        width = (config.tokens or n) * dim
        self.shared = nn.Linear(width, config.shared) if config.shared else None
        self.dropout = nn.Dropout(dropout)
        self.mlps = TaskHeads(Mlp(config.shared or width, (*config.hidden, 1), activation="silu", dropout=dropout) for _ in tasks)

    def forward(self, x: Tensor) -> Tensor:
        y = (x if self.mix is None else self.mix(x)).flatten(1)
        if self.shared is not None:
            y = self.dropout(activate(self.shared(y), "silu"))
        return self.mlps(y)
