"""Copies and means that take a handful of SMs, for running beside products.

Both are bound by memory, and a few SMs with enough loads in flight move most of what all of them do. What products lose is SMs, not
bytes: a product is computed in waves of a tile an SM, so that one SM less can cost a whole wave, and where clusters
of two SMs compute it, a pair goes with either. So programs are pairs there too, and the loads of the next block are under way while one is
stored. What they touch leaves the L2 first, for the products' sake. This module needs Triton; import it where a kernel starts.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 16384
"""Numbers a program takes at a time."""
WARPS = 32
BULK = False
"""Whether whole rows are moved by the kernels of `bulk` where the GPU has them."""


@triton.jit
def mean_kernel(own, sent, out, size, stride, scale, PEERS: tl.constexpr, BLOCK: tl.constexpr):
    """``out = (own + sent[0] + sent[1] ...) * scale``; ``sent[i]`` begins i ``stride`` numbers behind ``sent``. Programs take turns."""
    step = tl.cast(tl.num_programs(0), tl.int64) * BLOCK
    place = tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mine = tl.load(own + place, mask=place < size, eviction_policy="evict_first")
    theirs = tl.load(sent + place, mask=place < size, eviction_policy="evict_first")
    for _ in tl.range(tl.program_id(0), tl.cdiv(size, BLOCK), tl.num_programs(0)):
        total = mine + theirs
        for peer in tl.static_range(1, PEERS):
            total += tl.load(sent + (peer * tl.cast(stride, tl.int64) + place), mask=place < size, eviction_policy="evict_first")
        ahead = place + step
        mine = tl.load(own + ahead, mask=ahead < size, eviction_policy="evict_first")
        theirs = tl.load(sent + ahead, mask=ahead < size, eviction_policy="evict_first")
        tl.store(out + place, total * scale, mask=place < size, eviction_policy="evict_first")
        place = ahead


@triton.jit
def copy_kernel(source, target, size, BLOCK: tl.constexpr):
    step = tl.cast(tl.num_programs(0), tl.int64) * BLOCK
    place = tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.load(source + place, mask=place < size, eviction_policy="evict_first")
    following = tl.load(source + place + step, mask=place + step < size, eviction_policy="evict_first")
    for _ in tl.range(tl.program_id(0), tl.cdiv(size, BLOCK), tl.num_programs(0)):
        now, rows, ahead = rows, following, place + 2 * step
        following = tl.load(source + ahead, mask=ahead < size, eviction_policy="evict_first")
        tl.store(target + place, now, mask=place < size, eviction_policy="evict_first")
        place += step


def mean(own: Tensor, sent: Tensor, peers: int, stride: int, out: Tensor, sms: int) -> None:
    """Mean of ``own [n]`` and of the ``peers`` parts ``sent[i * stride : i * stride + n]``, fp32, into ``out [n]``."""
    n = own.numel()
    with torch.cuda.device_of(own):
        done = _bulk().mean(own, sent, peers, stride, out, sms) if BULK and _hopper(own) else 0
        if done < n:
            grid, ctas = _programs(own[done:], sms)
            rest = (own[done:], sent[done:], out[done:], n - done, stride, 1.0 / (peers + 1))
            mean_kernel[grid](*rest, PEERS=peers, BLOCK=BLOCK, num_warps=WARPS, num_ctas=ctas)


def copy(source: Tensor, target: Tensor, sms: int) -> None:
    """``source`` to ``target``, both contiguous uint8 of one size that is a multiple of 4."""
    given, taken = source.view(torch.int32), target.view(torch.int32)
    with torch.cuda.device_of(source):
        done = _bulk().copy(given, taken, sms) if BULK and _hopper(source) else 0
        if done < given.numel():
            grid, ctas = _programs(given[done:], sms)
            copy_kernel[grid](given[done:], taken[done:], given.numel() - done, BLOCK=BLOCK, num_warps=WARPS, num_ctas=ctas)


def _programs(data: Tensor, sms: int) -> tuple[tuple[int], int]:
    """Programs for ``data`` on at most ``sms`` SMs, and SMs of each."""
    ctas = 2 if sms > 1 and _hopper(data) else 1
    return (max(1, min(sms // ctas, triton.cdiv(data.numel(), BLOCK))),), ctas


def _hopper(data: Tensor) -> bool:
    return data.is_cuda and _capability(data.device.index) >= (9, 0)


@lru_cache
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _bulk() -> Any:
    from gem_parallel.collectives import bulk

    return bulk
