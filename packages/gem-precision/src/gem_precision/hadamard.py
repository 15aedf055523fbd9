"""Random Hadamard transform along the contraction of a GEMM: spreads an outlier over a tile before quantising.

Tiles of d along the last dim are multiplied by ``R = diag(signs) H_d / sqrt(d)``, H_d Sylvester's matrix. R is orthogonal, so with the
same R on both operands ``(A R)(B R)^T = A B^T``: it cancels and nothing has to be undone.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from gem_core.errors import OpError

SIZES = (16, 32)


@lru_cache(maxsize=64)
def _matrix(d: int, seed: int) -> Tensor:
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < d:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (d,), generator=generator, dtype=torch.int64) * 2 - 1
    return signs[:, None] * h / d**0.5


def hadamard_matrix(d: int, seed: int = 0, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
    """R ``[d, d]`` for tiles of d = 16 or 32; the signs come from ``seed``.

    :raises OpError: another d.
    """
    if d not in SIZES:
        raise OpError(f"no Hadamard tile of {d}", where="hadamard", fix=f"choose one of {SIZES}")
    return _matrix(d, seed).to(device=device, dtype=dtype)


def random_hadamard(x: Tensor, d: int = 16, seed: int = 0) -> Tensor:
    """``x [..., K]`` times R in tiles of d along K, in fp32 (float64 for float64): ``[..., ceil(K/d)*d]``, a last partial tile filled up
    with zeros first. The result has x's dtype."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    tiles = F.pad(x, (0, -x.shape[-1] % d)).unflatten(-1, (-1, d)).to(wide)
    return (tiles @ hadamard_matrix(d, seed, dtype=wide, device=x.device)).flatten(-2).to(x.dtype)
