"""Which program has which samples, where programs take whole ones: each sample goes to those that have least so far, heaviest sample first.

    lengths   4096 1300 900 700 600 500 ...      group 0   4096 ...            starts   0, 3, 9, 15, ...
                                                 group 1   1300 600 ...        table    entries group by group

A group is a program for every head. Taken to and fro in the order of the list (`gem_kernels.triton.attention.schedule`), histories as they
are leave the program with the longest sample 19 % more than the mean (512 samples of 500 rows in the mean and 4,096 at most, 33 groups);
here it is 1 %. Samples are dealt to half of the groups at a time, the heaviest of them to the group that has least: by count as even as one
by one. More samples even themselves out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_core.ops.remember import remembered
from gem_kernels.triton.attention.schedule import TileList
from gem_kernels.triton.common.launch import compiling, launch

MOST_SAMPLES, _MOST_GROUPS, _OWN = 1024, 128, 16


@dataclass(frozen=True)
class Shares:
    """``table [bound, 8]`` int32 as that of a list, group by group; those of group g are ``starts[g]`` to ``starts[g + 1]``."""

    table: Tensor
    starts: Tensor


@triton.jit(do_not_specialize=["groups"])
def deal_kernel(table, count, group_of, starts, groups, BLOCK: tl.constexpr, GROUPS: tl.constexpr):
    """The group of each entry, and where the groups begin. An entry's work is its tiles of BLOCK rows on the other side, and one more."""
    entries = tl.load(count)
    g = tl.arange(0, GROUPS)
    loads = tl.where(g < groups, 0, 1 << 30)
    number = tl.zeros([GROUPS], tl.int32)
    step = tl.maximum(groups // 2, 1)
    for start in range(0, entries, step):
        least = loads[None, :] < loads[:, None]
        place = tl.sum((least | ((loads[None, :] == loads[:, None]) & (g[None, :] < g[:, None]))).to(tl.int32), 1)
        i = start + place
        taken = (place < step) & (i < entries)
        rows = tl.load(table + i * 8 + 3, taken, 0)
        loads += tl.where(taken, (rows + BLOCK - 1) // BLOCK + 1, 0)
        number += taken.to(tl.int32)
        tl.store(group_of + i, g, taken)
    after = tl.cumsum(number, 0)
    tl.store(starts + g + 1, after, g < groups)
    tl.store(starts + g, after - number, g < 1)


@triton.jit(do_not_specialize=["groups"])
def regroup_kernel(table, count, group_of, to, groups, OWN: tl.constexpr, MOST: tl.constexpr):
    """Every program puts OWN entries in their places, those of a group in the order of the list."""
    entries = tl.load(count)
    every = tl.arange(0, MOST)
    keys = tl.load(group_of + every, every < entries, groups) * MOST + every
    own = tl.program_id(0) * OWN + tl.arange(0, OWN)
    live = own < entries
    key = tl.load(group_of + own, live, groups) * MOST + own
    place = tl.sum((keys[None, :] < key[:, None]).to(tl.int32), 1)
    column = tl.arange(0, 8)
    entry = tl.load(table + own[:, None] * 8 + column[None, :], live[:, None] & (column < 5)[None, :], 0)
    tl.store(to + place[:, None] * 8 + column[None, :], entry, live[:, None] & (column < 5)[None, :])


def shares(tiles: TileList, groups: int, block: int, offsets: Tensor) -> Shares | None:
    """``tiles``, one of every sample, spelt out, dealt to ``groups``; kept with ``offsets``, which they were made of. None where there are
    too many of either."""
    table = tiles.table
    if table is None or tiles.bound > MOST_SAMPLES or groups >= _MOST_GROUPS:
        return None

    def build() -> Shares:
        device = table.device
        group_of = torch.empty(tiles.bound, dtype=torch.int32, device=device)
        made = Shares(torch.empty_like(table), torch.empty(groups + 1, dtype=torch.int32, device=device))
        sizes = {"BLOCK": block, "GROUPS": max(16, 1 << (groups - 1).bit_length()), "num_warps": 4}
        launch(deal_kernel, (1,), device, table, tiles.count, group_of, made.starts, groups, **sizes)
        programs = -(-tiles.bound // _OWN)
        sizes = {"OWN": _OWN, "MOST": MOST_SAMPLES, "num_warps": 4}
        launch(regroup_kernel, (programs,), device, table, tiles.count, group_of, made.table, groups, **sizes)
        return made

    if compiling():
        return build()
    stream = torch.cuda.current_stream(table.device).cuda_stream if table.is_cuda else 0
    return remembered((offsets, table), ("shares", groups, block, stream), build)
