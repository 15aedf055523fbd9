"""Random bits for stochastic rounding: a counter-based hash of (seed, element index), the same in PyTorch and in the kernels.

Counter-based, so that a kernel needs no state and the result does not depend on how a tensor is cut into tiles. Two rounds of a 32-bit
finaliser (xor-shift and multiply; constants of the "lowbias32" search by C. Wellons) mix index and seed. One seed is drawn from a
`torch.Generator` a call, so two calls are independent and a run repeats from the generator's state.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

MULTIPLIER_1 = 0x7FEB352D
MULTIPLIER_2 = 0x846CA68B - (1 << 32)
BITS = 24
"""Random bits an element: as many as fp32 holds exactly."""


def rank_generator(seed: int, rank: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator for one rank: same seed, different rank give independent streams."""
    digest = hashlib.sha256(f"gem stochastic rounding {seed} {rank}".encode()).digest()
    generator = torch.Generator(device=device)
    generator.manual_seed(int.from_bytes(digest[:7], "little"))
    return generator


def draw_seed(generator: torch.Generator | None, device: torch.device) -> Tensor:
    """``[2]`` int32 on ``device``, drawn from ``generator`` (None: the default CPU generator); does not wait for the device."""
    source = torch.device("cpu") if generator is None else generator.device
    seed = torch.randint(-(2**31), 2**31, (2,), generator=generator, device=source, dtype=torch.int64).to(torch.int32)
    return seed.to(device, non_blocking=True)


def _mix(x: Tensor) -> Tensor:
    x ^= (x >> 16) & 0xFFFF
    x *= MULTIPLIER_1
    x ^= (x >> 15) & 0x1FFFF
    x *= MULTIPLIER_2
    x ^= (x >> 16) & 0xFFFF
    return x


def random_bits(seed: Tensor, shape: tuple[int, ...], offset: int = 0) -> Tensor:
    """int32 in [0, 2^24) for the elements ``offset ...`` of a contiguous tensor of ``shape``; ``seed [2]`` int32."""
    count = math.prod(shape)
    index = torch.arange(offset, offset + count, dtype=torch.int64, device=seed.device)
    high = (index >> 32).to(torch.int32) if offset + count > 1 << 32 else 0
    low = index.to(torch.int32)  # wraps
    bits = _mix(low ^ seed[0])
    bits += seed[1]
    bits ^= high
    return ((_mix(bits) >> (32 - BITS)) & ((1 << BITS) - 1)).view(shape)
