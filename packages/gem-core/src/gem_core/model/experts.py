"""The interaction layer: summed experts (DHEN) with one shortcut and one norm."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from gem_core.model.config import InteractionConfig, NormKind
from gem_core.model.interaction import Cross, Dot, Wukong
from gem_core.model.layers import Norm, TokenMix
from gem_core.model.wukongs import summed, together


class SummedExperts(nn.Module):
    """``X' = norm(sum_e expert_e(X) + shortcut(X))``, ``[B, n, d] -> [B, tokens, d]``.

    The shortcut is the identity where n = tokens and a linear map over the token axis elsewhere. With one "wukong" expert this is
    Wukong's layer. ``experts`` is a list of modules with the same shapes, so that they can be spread over processes: ``spread(x)``, where a
    strategy has set it, gives the sum over all experts, and those of other processes are `Elsewhere` here.
    """

    def __init__(
        self, n: int, dim: int, config: InteractionConfig | None = None, *, norm: NormKind = "layer", dropout: float = 0.0
    ) -> None:
        super().__init__()
        c = config or InteractionConfig()
        self.tokens = c.tokens

        def build(name: str) -> nn.Module:
            if name == "wukong":
                return Wukong(n, c.tokens, dim, c.wukong, norm=norm, dropout=dropout)
            return Cross(n, c.tokens, dim, c.dcnv2) if name == "dcnv2" else Dot(n, c.tokens, dim, c.dot, dropout=dropout)

        self.experts = nn.ModuleList(build(name) for name in c.experts)
        self.shortcut = nn.Identity() if n == c.tokens else TokenMix(n, c.tokens)
        self.norm = Norm(dim, norm, affine=True)
        self.spread: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.spread is None and (wukongs := together([*self.experts], self.shortcut, x)) is not None:
            return self.norm(summed(wukongs, x))
        y = self.shortcut(x)
        if self.spread is not None:
            return self.norm(y + self.spread(x))
        for expert in self.experts:
            y = y + expert(x)
        return self.norm(y)


class Elsewhere(nn.Module):
    """Stands for an expert that another process holds: no parameters, and ``like`` (on the meta device) to count its FLOPs by."""

    def __init__(self, expert: nn.Module) -> None:
        super().__init__()
        self.like = (expert.to("meta"),)  # in a tuple, so that its parameters are not this module's

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("this expert is computed by another process")
