"""Interaction experts over tokens, ``[B, n, d] -> [B, tokens, d]``: Wukong, DCNv2, DOT."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gem_core.model.config import CrossConfig, DotConfig, NormKind, WukongConfig
from gem_core.model.layers import Mlp, Norm, TokenMix, with_each


class FactorizationMachine(nn.Module):
    """Wukong's FM block: ``reshape(MLP(LN(flatten(FM(X)))))``, ``[B, n, d] -> [B, out, d]``.

    FM(X) is ``X (X^T Y)`` with a learned ``Y [n, rank]``, or all products ``X X^T`` for ``rank = 0``.
    """

    cast_with_products = ("project",)

    def __init__(self, n: int, out: int, dim: int, *, rank: int = 8, hidden: int = 128, norm: NormKind = "layer", dropout: float = 0.0):
        super().__init__()
        self.tokens, self.out, self.dim = n, out, dim
        self.project = nn.Parameter(torch.empty(n, rank)) if rank else None
        self.norm = Norm(n * (rank or n), norm, affine=True)
        self.mlp = Mlp(n * (rank or n), (hidden, out * dim), dropout=dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.project is not None:
            nn.init.normal_(self.project, std=self.project.shape[0] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        other = x.transpose(1, 2)
        if self.project is not None and x.is_cuda:
            other = with_each(self.project.t(), x).transpose(1, 2)
        elif self.project is not None:
            other = other @ self.project.to(x.dtype)
        return self.mlp(self.norm((x @ other).flatten(1))).view(-1, self.out, self.dim)


class Wukong(nn.Module):
    """``concat(FMB(X), LCB(X))``, ``[B, n, d] -> [B, out, d]``; the residual and the norm are the layer's (`SummedExperts`)."""

    def __init__(self, n: int, out: int, dim: int, config: WukongConfig | None = None, *, norm: NormKind = "layer", dropout: float = 0.0):
        super().__init__()
        config = config or WukongConfig()
        fm = config.fm_tokens or out // 2
        self.fm = FactorizationMachine(n, fm, dim, rank=config.rank, hidden=config.hidden, norm=norm, dropout=dropout)
        self.linear = TokenMix(n, out - fm)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.fm(x), self.linear(x)], 1)


class CrossLayers(nn.Module):
    """DCNv2 cross layers ``x_{l+1} = x_0 * (W_l x_l + b_l) + x_l`` on ``[B, width]``, W full or ``U V^T``."""

    def __init__(self, width: int, config: CrossConfig | None = None) -> None:
        super().__init__()
        config = config or CrossConfig()
        rank = config.rank
        self.layers = nn.ModuleList(
            nn.Linear(width, width) if rank is None else nn.Sequential(nn.Linear(width, rank, bias=False), nn.Linear(rank, width))
            for _ in range(config.layers)
        )

    def forward(self, x0: Tensor) -> Tensor:
        x = x0
        for layer in self.layers:
            x = torch.addcmul(x, x0, layer(x))
        return x


class Cross(nn.Module):
    """DCNv2 over the flattened tokens, then a linear map to ``out`` tokens."""

    def __init__(self, n: int, out: int, dim: int, config: CrossConfig | None = None) -> None:
        super().__init__()
        self.cross = CrossLayers(n * dim, config)
        self.map = nn.Linear(n * dim, out * dim)
        self.out, self.dim = out, dim

    def forward(self, x: Tensor) -> Tensor:
        return self.map(self.cross(x.flatten(1))).view(-1, self.out, self.dim)


class Dot(nn.Module):
    """All pairwise dot products, then an MLP to ``out`` tokens."""

    def __init__(self, n: int, out: int, dim: int, config: DotConfig | None = None, *, dropout: float = 0.0) -> None:
        super().__init__()
        config = config or DotConfig()
        self.out, self.dim, self.n = out, dim, n
        self.mlp = Mlp(n * (n - 1) // 2, (config.hidden, out * dim), dropout=dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(pairwise_dots(x)).view(-1, self.out, self.dim)


def pairwise_dots(x: Tensor) -> Tensor:
    """``<x_i, x_j>`` for i < j in row-major order, ``[B, n, d] -> [B, n (n - 1) / 2]``."""
    i, j = torch.triu_indices(x.shape[1], x.shape[1], 1, device=x.device)
    return (x @ x.transpose(1, 2))[:, i, j]
