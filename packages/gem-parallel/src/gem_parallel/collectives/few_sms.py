"""Copies and means that take a handful of SMs, for running beside products.

Both are bound by memory, and a few SMs with enough loads in flight move most of what all of them do: a copy by 16 of 132 SMs takes about
four times as long and holds a third of the SM time, which the products keep. What they touch leaves the L2 first, for the products' sake.
This module needs Triton; import it where a kernel starts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 16384
WARPS = 16


@triton.jit
def mean_kernel(own, sent, out, size, stride, scale, PEERS: tl.constexpr, BLOCK: tl.constexpr):
    """``out = (own + sent[0] + sent[1] ...) * scale``; ``sent[i]`` begins i ``stride`` numbers behind ``sent``. Programs take turns."""
    for block in tl.range(tl.program_id(0), tl.cdiv(size, BLOCK), tl.num_programs(0)):
        place = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = place < size
        total = tl.load(own + place, mask=inside, eviction_policy="evict_first")
        for peer in tl.static_range(PEERS):
            total += tl.load(sent + (peer * tl.cast(stride, tl.int64) + place), mask=inside, eviction_policy="evict_first")
        tl.store(out + place, total * scale, mask=inside, eviction_policy="evict_first")


@triton.jit
def copy_kernel(source, target, size, BLOCK: tl.constexpr):
    for block in tl.range(tl.program_id(0), tl.cdiv(size, BLOCK), tl.num_programs(0)):
        place = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = place < size
        rows = tl.load(source + place, mask=inside, eviction_policy="evict_first")
        tl.store(target + place, rows, mask=inside, eviction_policy="evict_first")


def mean(own: Tensor, sent: Tensor, peers: int, stride: int, out: Tensor, sms: int) -> None:
    """Mean of ``own [n]`` and of the ``peers`` parts ``sent[i * stride : i * stride + n]``, fp32, into ``out [n]``."""
    n = own.numel()
    with torch.cuda.device_of(own):
        mean_kernel[(min(sms, triton.cdiv(n, BLOCK)),)](
            own, sent, out, n, stride, 1.0 / (peers + 1), PEERS=peers, BLOCK=BLOCK, num_warps=WARPS
        )


def copy(source: Tensor, target: Tensor, sms: int) -> None:
    """``source`` to ``target``, both contiguous uint8 of one size that is a multiple of 4."""
    given, taken = source.view(torch.int32), target.view(torch.int32)
    n = given.numel()
    with torch.cuda.device_of(source):
        copy_kernel[(min(sms, triton.cdiv(n, BLOCK)),)](given, taken, n, BLOCK=BLOCK, num_warps=WARPS)
