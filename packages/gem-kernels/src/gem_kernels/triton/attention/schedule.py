"""The tile list: every valid tile once, heaviest samples first, built on the device in one launch with no host sync.

    lengths   300, 0, 70, 130  (BLOCK 128)        tiles    (0,2) (0,1) (0,0) (3,1) (3,0) (2,0)
    work of a sample = rows of the other side     count    6

A tile is ``sample << 32 | block``. Samples are sorted by their work in tiles of 64 rows, descending, which is longest-processing-time-first
for a one-tile-a-program grid and, with a persistent grid that takes tiles to and fro, gives every program nearly the same work: counted
for 256 rows at s 0.5, the longest of 132 programs has 1 % more than the mean, and 2 to 4 % more with classes of a factor of sqrt(2), which
more than 8,192 samples have. Samples with as many tiles keep their order, so that programs work near one another in memory: sorted by rows,
the backward pass of 256 rows was 4 % slower on an H200. Inside a sample blocks run from the last to the first when ``REVERSE`` (a causal
row block sees more keys the later it is).

Every program of a builder owns some samples and recounts all of them to find where its own tiles begin, so that one launch suffices and
the order does not depend on timing. Up to 8,192 samples every own one is compared with every sample (`tile_rank_kernel`): a few own samples
a program, one sum, no scans. More samples are counted class by class (`tile_list_kernel`), O(B² / CHUNK) loads in all: 100,000 samples cost
about 400 × 400 small vectors.

In place of ``sample << 32 | block`` a kernel may want a tile's entry spelt out, ``[bound, 8]`` int32: first row, rows of the sample, first
row and rows of it on the other side, first row within the sample.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_core.ops.remember import remembered
from gem_kernels.triton.common.launch import compiling, launch

CHUNK = 256
_CLASSES = 32
_OWN = 16
_WIDE = 2048
_MOST_RANKED = 8192


@triton.jit
def _counts(sample, batch, tile_offsets, work_offsets, tile_len, tile_sub, work_map, BLOCK: tl.constexpr):
    """Tiles and work of a vector of samples; zero tiles past the batch."""
    live = sample < batch
    if tile_offsets is not None:
        length = (tl.load(tile_offsets + sample + 1, live, 0) - tl.load(tile_offsets + sample, live, 0)).to(tl.int32)
    else:
        length = tl.zeros_like(sample) + tile_len
    if tile_sub is not None:
        length -= tl.load(tile_sub + sample, live, 0).to(tl.int32)
    tiles = tl.where(live, (length + BLOCK - 1) // BLOCK, 0)
    work = length
    if work_offsets is not None:
        other = sample
        if work_map is not None:
            other = tl.load(work_map + sample, live, 0).to(tl.int32)
        work = (tl.load(work_offsets + other + 1, live, 0) - tl.load(work_offsets + other, live, 0)).to(tl.int32)
    return tiles, work


@triton.jit
def _class_of(work):
    """2·log2(work), in steps of a factor of sqrt(2): heavy samples get small class numbers."""
    return 31 - tl.minimum(tl.maximum((2.0 * tl.log2(tl.maximum(work, 1).to(tl.float32)) - 6.0).to(tl.int32), 0), 31)


@triton.jit
def _place(work, sample):
    """What sorts up to 8,192 samples by tiles of work, descending, then by number; 2¹⁸ tiles and more count alike."""
    most = (1 << 18) - 1
    return ((most - tl.minimum((work + 63) // 64, most)) << 13) + sample


@triton.jit
def _rows_of(sample, live, offsets, length):
    """First row and number of rows of samples, which have ``length`` rows each without offsets."""
    if offsets is None:
        row = sample * length
        return row, row * 0 + length
    else:
        row = tl.load(offsets + sample, live, 0).to(tl.int32)
        return row, tl.load(offsets + sample + 1, live, 0).to(tl.int32) - row


@triton.jit
def _write(
    tiles_out, table_out, at, sample, tiles, batch, row_offsets, other_offsets, tile_len, BLOCK: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """The tiles of a vector of samples, from place ``at`` on: into ``tiles_out``, or where that is None spelt out into ``table_out``."""
    if tiles_out is None:
        row, rows = _rows_of(sample, sample < batch, row_offsets, tile_len)
        other, others = _rows_of(sample, sample < batch, other_offsets, tile_len)
    for block in range(0, tl.max(tiles)):
        live = block < tiles
        shown = tiles - 1 - block if REVERSE else tl.zeros_like(tiles) + block
        if tiles_out is not None:
            tl.store(tiles_out + at + block, (sample.to(tl.int64) << 32) | shown.to(tl.int64), live)
        else:
            to = table_out + (at + block) * 8
            tl.store(to, row, live)
            tl.store(to + 1, rows, live)
            tl.store(to + 2, other, live)
            tl.store(to + 3, others, live)
            tl.store(to + 4, shown * BLOCK, live)


@triton.jit(do_not_specialize=["batch", "tile_len"])
def tile_rank_kernel(
    tiles_out, table_out, count_out, tile_offsets, work_offsets, tile_sub, work_map, row_offsets, other_offsets, batch, tile_len,
    BLOCK: tl.constexpr, REVERSE: tl.constexpr, OWN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0) * OWN + tl.arange(0, OWN)
    own_tiles, own_work = _counts(sample, batch, tile_offsets, work_offsets, tile_len, tile_sub, work_map, BLOCK)
    own_place = _place(own_work, sample)
    at = tl.zeros([OWN], tl.int32)
    total = tl.zeros([WIDE], tl.int32)
    for start in range(0, batch, WIDE):
        every = start + tl.arange(0, WIDE)
        tiles, work = _counts(every, batch, tile_offsets, work_offsets, tile_len, tile_sub, work_map, BLOCK)
        at += tl.sum(tl.where(_place(work, every)[None, :] < own_place[:, None], tiles[None, :], 0), 1)
        total += tiles
    if tl.program_id(0) == 0:
        tl.store(count_out, tl.sum(total))
    _write(tiles_out, table_out, at, sample, own_tiles, batch, row_offsets, other_offsets, tile_len, BLOCK, REVERSE)


@triton.jit(do_not_specialize=["batch", "tile_len"])
def tile_list_kernel(
    tiles_out, table_out, count_out, tile_offsets, work_offsets, tile_sub, work_map, row_offsets, other_offsets, batch, tile_len,
    BLOCK: tl.constexpr, REVERSE: tl.constexpr, CHUNK: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    own = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    classes = tl.arange(0, CLASSES)
    before = tl.zeros([CLASSES], tl.int32)
    total = tl.zeros([CLASSES], tl.int32)
    for chunk in range(0, tl.num_programs(0)):
        tiles, work = _counts(chunk * CHUNK + lane, batch, tile_offsets, work_offsets, tile_len, tile_sub, work_map, BLOCK)
        summed = tl.sum(tl.where(_class_of(work)[:, None] == classes[None, :], tiles[:, None], 0), 0)
        total += summed
        if chunk < own:
            before += summed
    if own == 0:
        tl.store(count_out, tl.sum(total))
    start = tl.cumsum(total, 0) - total + before
    sample = own * CHUNK + lane
    tiles, work = _counts(sample, batch, tile_offsets, work_offsets, tile_len, tile_sub, work_map, BLOCK)
    same = _class_of(work)[:, None] == classes[None, :]
    ours = tl.where(same, tiles[:, None], 0)
    at = tl.sum(tl.where(same, tl.cumsum(ours, 0) - ours + start[None, :], 0), 1)
    _write(tiles_out, table_out, at, sample, tiles, batch, row_offsets, other_offsets, tile_len, BLOCK, REVERSE)


class TileList:
    """``tiles [bound]`` int64 on the device, of which the first ``count[0]`` are set, and the host's ``bound`` on them; or in place of the
    tiles their entries spelt out, ``table [bound, 8]`` int32."""

    __slots__ = ("bound", "count", "table", "tiles")

    def __init__(self, bound: int, device: torch.device, spelt_out: bool) -> None:
        self.bound = bound
        self.count = torch.empty(1, dtype=torch.int32, device=device)
        self.tiles = None if spelt_out else torch.empty(bound, dtype=torch.int64, device=device)
        self.table = torch.empty(bound, 8, dtype=torch.int32, device=device) if spelt_out else None


def tile_list(
    batch: int,
    block: int,
    device: torch.device,
    *,
    rows: int,
    offsets: Tensor | None = None,
    length: int = 0,
    longest: int | None = None,
    work_offsets: Tensor | None = None,
    work_map: Tensor | None = None,
    subtract: Tensor | None = None,
    reverse: bool = False,
    sides: tuple[Tensor | None, Tensor | None] | None = None,
) -> TileList:
    """Cut every sample's rows into tiles of ``block`` rows.

    A sample has ``offsets[b+1] - offsets[b]`` rows, or ``length`` where offsets is None, less ``subtract[b]``. ``rows`` is the row count of
    the packed tensor and ``longest`` a bound on a sample's rows: together they bound the number of tiles without reading the device.
    ``work_offsets`` gives the work of sample b as the length of its row range ``work_map[b]`` (b without a map). ``sides``: the entries
    are spelt out, by the offsets of this side and of the other one; without them a sample has ``length`` rows there.

    A list is kept for the offsets it was built from (`gem_core.ops.remember`), for the other layers of a model and for the backward pass.
    """
    bound = rows // block + batch
    if offsets is None:
        bound = batch * -(-length // block)
    elif longest is not None:
        bound = min(bound, batch * -(-longest // block))
    sources = (offsets, work_offsets, work_map, subtract, *(sides or ()))

    def build() -> TileList:
        made = TileList(bound, device, sides is not None)
        tensors = (made.tiles, made.table, made.count, offsets, work_offsets, subtract, work_map, *(sides or (None, None)))
        if batch <= _MOST_RANKED:
            launch(
                tile_rank_kernel, (-(-batch // _OWN),), device, *tensors, batch, length,
                BLOCK=block, REVERSE=reverse, OWN=_OWN, WIDE=_WIDE, num_warps=8,
            )  # fmt: skip
        else:
            launch(
                tile_list_kernel, (-(-batch // CHUNK),), device, *tensors, batch, length,
                BLOCK=block, REVERSE=reverse, CHUNK=CHUNK, CLASSES=_CLASSES, num_warps=4,
            )  # fmt: skip
        return made

    if compiling() or all(t is None for t in sources):
        return build()
    # a list is ready for those on the stream that it was built on
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    given = tuple(t is not None for t in sources)
    return remembered(sources, ("tile list", batch, block, bound, length, reverse, given, stream), build)
