"""The blocks of PTX that find time buckets, add the bias and sum its gradients, carried out for the lanes of a warp."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gem_kernels.triton.attention.bias_tables import CELLS, FIRST_CELL, PAD
from gem_kernels.triton.hopper import bias_ptx

_SPEC = importlib.util.spec_from_file_location("ptx_warp", Path(__file__).with_name("ptx_warp.py"))
ptx_warp = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(ptx_warp)
Warp = ptx_warp.Warp

LANE, REGISTER = np.arange(32), np.arange(32)[:, None]
ROW = LANE // 4 + 8 * (REGISTER // 2 % 2)
COLUMN = 8 * (REGISTER // 4) + 2 * (LANE % 4) + REGISTER % 2
EDGES = np.unique(torch.logspace(0, 20, 31, base=2.0).long().numpy())
AT, TABLE = 1 << 33, 1 << 35


def operands(first: int, *values: Any) -> dict[str, Any]:
    """Each value, one for all pairs or ``[32 registers, 32 lanes]``, as 32 operands from number ``first`` on."""
    named = {}
    for k, value in enumerate(values):
        each = np.broadcast_to(value, (32, 32))
        named |= {f"${first + 32 * k + n}": each[n] for n in range(32)}
    return named


def index_table() -> np.ndarray:
    """Edges, edges of the cells, and buckets at their beginnings, as `bias_tables` lays them."""

    def cell(difference: np.ndarray) -> np.ndarray:
        return (np.maximum(difference.astype(np.float32), np.float32(0.5)).view(np.int32) >> 19) - FIRST_CELL.value

    cells = cell(EDGES)
    assert len(set(cells.tolist())) == len(EDGES)
    own = np.full(CELLS.value, 1 << 30)
    own[cells] = EDGES
    return np.concatenate([EDGES, own, [0], [(cells < k).sum() for k in range(CELLS.value + 1)]])


def buckets(words: list[np.ndarray]) -> np.ndarray:
    """What codes say, ``[32 registers, 32 lanes]``."""
    if (words[3] < 0).all():
        lowest, edges = words[3] & 31, words[3] >> 8 & 3
        assert all((words[n] == 0).all() for n in range(3) if n >= edges[0])
        return lowest + sum(words[n] >> REGISTER & 1 for n in range(3))
    return np.stack([words[n // 4] >> 8 * (n % 4) & 255 for n in range(32)])


def tile(draw: np.random.Generator, later: bool, kind: int) -> tuple[np.ndarray, np.ndarray]:
    """Times of 16 rows and 64 columns: apart, or among one another."""
    spread_rows, spread_columns, gap = 2 ** draw.integers(0, 16), 2 ** draw.integers(0, 17), 2 ** draw.integers(0, 19)
    row_times, column_times = np.sort(draw.integers(0, spread_rows + 1, 16)), np.sort(draw.integers(0, spread_columns + 1, 64))
    if kind:
        return row_times, column_times
    return (row_times + column_times.max() + gap, column_times) if later else (row_times, column_times + row_times.max() + gap)


def found(later: bool, masks: bool, row_times: np.ndarray, column_times: np.ndarray) -> list[np.ndarray]:
    """Codes of a tile."""
    bounds = (row_times.min(), row_times.max(), column_times.min(), column_times.max())
    index = index_table()
    known = operands(8, row_times[ROW], column_times[COLUMN], *bounds, AT, AT + 4 * len(EDGES))
    text, _ = bias_ptx.find_codes(later, masks, CELLS.value, FIRST_CELL.value)
    warp = Warp(known, load=lambda _space, address: index[(address - AT) // 4]).run(text)
    return [warp.registers[f"${n}"] for n in range(8)]


def tiles(later: bool) -> list[tuple[list[np.ndarray], np.ndarray]]:
    """Codes and buckets of tiles of every kind."""
    draw = np.random.default_rng(later)
    drawn = [tile(draw, later, n % 10 == 9) for n in range(40)]
    return [(found(later, True, *times), wanted(*times)) for times in drawn]


def wanted(row_times: np.ndarray, column_times: np.ndarray) -> np.ndarray:
    return np.searchsorted(EDGES, np.abs(row_times[ROW] - column_times[COLUMN]), side="right")


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("later", [False, True])
def test_codes(later: bool, masks: bool) -> None:
    draw = np.random.default_rng(later)
    forms = set()
    for n in range(60):
        times = tile(draw, later, n % 10 == 9)
        words = found(later, masks, *times)
        assert (buckets(words) == wanted(*times)).all()
        forms.add(int(words[3][0]) >> 8 & 3 if (words[3] < 0).all() else -1)
    assert forms == ({-1, 0, 1, 2, 3} if masks else {-1})


@pytest.mark.parametrize(("by_lanes", "masks"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("keys", [False, True])
def test_bias(keys: bool, by_lanes: bool, masks: bool) -> None:
    """Every pair gets the sum of its two entries: rows are queries, of which some may be candidates, at the history's end, or keys."""
    draw = np.random.default_rng(7)
    radius = 100
    position, time = draw.standard_normal(2 * radius + 1).astype(np.float32), draw.standard_normal(32).astype(np.float32)

    def load(_space: str, address: np.ndarray) -> np.ndarray:
        if (address >= TABLE).all():
            return time[(address - TABLE) // 4]
        entry, second = (address - AT) // 8, (address - AT) // 4 % 2
        assert (np.abs(entry) < radius + PAD).all()
        return position[np.clip(entry + (-second if keys else second), -radius, radius) + radius]

    for n, (words, bucket) in enumerate(tiles(not keys)):
        start, straight = int(draw.integers(-300, 300)), n % 2
        if keys:
            j, last = start + np.arange(16), 1000 if straight else int(draw.integers(0, 64))
            distance = j[ROW] - np.minimum(COLUMN, last)
            first = np.maximum(np.minimum(j, radius + 64), -radius - 8)[ROW]
            more = [np.maximum(j - last, -radius)[ROW]]
        else:
            p = 100 + np.minimum(np.arange(16), 16 if straight else int(draw.integers(0, 16)))
            distance = start + COLUMN - p[ROW]
            first, more = np.maximum(np.minimum(start - p, radius + 8), -radius - 64)[ROW], []
        if not masks:
            words = [sum(bucket[4 * w + k] << 8 * k for k in range(4)) for w in range(8)]
        known = {f"${32 + w}": word for w, word in enumerate(words)}
        table = [time] if by_lanes else [TABLE, np.float32(2.0)]
        known |= operands(40, first, straight, AT, *table, *more)
        warp = Warp(known, load=load).run(bias_ptx.biased(by_lanes, keys, masks)[0])
        got = np.stack([warp.registers[f"${k}"] for k in range(32)])
        want = position[np.clip(distance, -radius, radius) + radius] + time[bucket] * (1 if by_lanes else 2)
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("later", [False, True])
def test_bins(later: bool) -> None:
    """Every thread's bins get the sums of its values."""
    draw = np.random.default_rng(3)
    for words, bucket in tiles(later):
        bins = np.zeros((32, 32), np.float32)
        values = draw.standard_normal((32, 32)).astype(np.float32)

        def load(_space: str, address: np.ndarray, bins: np.ndarray = bins) -> np.ndarray:
            return bins[address // 512, address % 512 // 4]

        def store(_space: str, address: np.ndarray, value: np.ndarray, live: np.ndarray, bins: np.ndarray = bins) -> None:
            assert live.all()
            bins[address // 512, address % 512 // 4] = value

        known = operands(8, values) | {f"${40 + w}": word for w, word in enumerate(words)} | operands(48, 0)
        Warp(known, load, store).run(bias_ptx.add_to_bins()[0])
        sums = np.zeros((32, 32))
        np.add.at(sums, (bucket, np.broadcast_to(LANE, (32, 32))), values)
        np.testing.assert_allclose(bins, sums, rtol=0, atol=1e-5)


@pytest.mark.parametrize("last", [20, 200])
def test_entries_without_branches(last: int) -> None:
    """Every pair gets the entry of its distance, and that of its code from the lane of that number."""
    p = np.minimum(np.arange(16) + 7, last)[ROW]
    table, values = np.arange(32, dtype=np.float32), np.ones((4, 32), np.float32)
    warp = Warp(operands(32, -p, AT), load=lambda _space, at: ((at - AT) // 8 + (at - AT) // 4 % 2).astype(np.float32))
    warp.run(bias_ptx.row_entries()[0])
    for n in range(32):
        assert (warp.registers[f"${n}"] == COLUMN[n] - p[n]).all()
    code = sum((LANE + 3 * n) % 32 << 8 * n for n in range(4))
    warp = Warp({f"${4 + n}": values[n] for n in range(4)} | {"$8": code, "$9": table}).run(bias_ptx.add_entries(True)[0])
    for n in range(4):
        assert (warp.registers[f"${n}"] == 1 + (LANE + 3 * n) % 32).all()
