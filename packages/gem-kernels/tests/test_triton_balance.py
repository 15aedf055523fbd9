"""Samples dealt to groups of programs: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from gem_core.jagged import lengths_to_offsets
from gem_core.model.presets import find
from gem_kernels.triton.attention import balance
from gem_kernels.triton.attention.schedule import tile_list
from gem_kernels.triton.common.device import on_cpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


@pytest.fixture(autouse=True)
def _where_it_runs() -> Iterator[None]:
    with nullcontext() if DEVICE == "cuda" else on_cpu():
        yield


def _dealt(lengths: torch.Tensor, groups: int) -> tuple[torch.Tensor, list[int]]:
    """The dealt table and where groups begin."""
    offsets, keys = (lengths_to_offsets(n).to(DEVICE) for n in (lengths, torch.full_like(lengths, 3)))
    batch = len(lengths)
    tiles = tile_list(batch, 1, torch.device(DEVICE), rows=batch, length=1, work_offsets=offsets, sides=(keys, offsets))
    found = balance.shares(tiles, groups, 64, offsets)
    assert found is not None
    assert balance.shares(tiles, groups, 64, offsets) is found
    return found.table.cpu(), found.starts.tolist()


@pytest.mark.parametrize(("lengths", "groups"), [([300, 0, 70, 4096, 5, 64, 65, 1, 0], 3), ([7], 5), ([0, 0], 1)])
def test_every_sample_once_heaviest_first(lengths: list[int], groups: int) -> None:
    """As the host deals them: half as many as groups at a time, the heaviest to the group that has least, tiles of 64 rows and one more."""
    table, starts = _dealt(torch.tensor(lengths), groups)
    loads, wanted, step = [0] * groups, [[] for _ in range(groups)], max(1, groups // 2)
    order = sorted(range(len(lengths)), key=lambda s: (-((lengths[s] + 63) // 64), s))  # as the list is sorted
    for first in range(0, len(order), step):
        least = sorted(range(groups), key=lambda g: loads[g])
        for group, sample in zip(least, order[first : first + step]):
            wanted[group].append(lengths[sample])
            loads[group] += -(-lengths[sample] // 64) + 1
    assert [table[a:b, 3].tolist() for a, b in zip(starts, starts[1:])] == wanted
    rows = lengths_to_offsets(torch.tensor(lengths)).tolist()
    taken = table[: len(lengths)]
    assert sorted(taken[:, 0].tolist()) == [3 * i for i in range(len(lengths))]
    assert all(rows[i // 3] == row and lengths[i // 3] == n for i, row, n in taken[:, [0, 2, 3]].tolist())


def test_histories_of_base_leave_no_group_behind() -> None:
    lengths = find("base").lengths(512)
    table, starts = _dealt(lengths[torch.randperm(512, generator=torch.Generator().manual_seed(0))], 33)
    work = -(-table[:, 3] // 64) + 1
    loads = torch.tensor([float(work[a:b].sum()) for a, b in zip(starts, starts[1:])])
    assert float(loads.max() / loads.mean()) < 1.02


def test_too_many_samples_or_groups_are_not_dealt() -> None:
    offsets = lengths_to_offsets(torch.ones(balance.MOST_SAMPLES + 1, dtype=torch.int64)).to(DEVICE)
    batch = balance.MOST_SAMPLES + 1
    tiles = tile_list(batch, 1, torch.device(DEVICE), rows=batch, length=1, work_offsets=offsets, sides=(offsets, offsets))
    assert balance.shares(tiles, 33, 64, offsets) is None
    few = tile_list(3, 1, torch.device(DEVICE), rows=3, length=1, work_offsets=offsets[:4], sides=(offsets[:4], offsets[:4]))
    assert balance.shares(few, 128, 64, offsets) is None
