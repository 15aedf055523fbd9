"""The tile list: every valid tile once, heaviest samples first, built on the device in one launch with no host sync.

    lengths   300, 0, 70, 130  (BLOCK 128)        tiles    (0,2) (0,1) (0,0) (3,1) (3,0) (2,0)
    work of a sample = rows of the other side     count    6

A tile is ``sample << 32 | block``. Samples are grouped by the logarithm of their work, descending, which is longest-processing-time-first
for a one-tile-a-program grid and, with the strided walk of a persistent grid (program p takes p, p + P, ...), deals heavy and light tiles
evenly. Inside a sample blocks run from the last to the first when ``REVERSE`` (a causal row block sees more keys the later it is).

Every program of the builder owns CHUNK samples. It recounts all samples to find where its own tiles begin, class by class, so that one
launch suffices and the order does not depend on timing. O(B² / CHUNK) loads in all: 100,000 samples cost about 400 × 400 small vectors.
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


@triton.jit
def _counts(sample, batch, tile_offsets, work_offsets, tile_len, tile_sub, work_map, BLOCK: tl.constexpr):
    """Tiles and work class of a vector of samples; zero tiles past the batch."""
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
    # 2·log2(work), in steps of a factor of sqrt(2): heavy samples get small class numbers.
    klass = 31 - tl.minimum(tl.maximum((2.0 * tl.log2(tl.maximum(work, 1).to(tl.float32)) - 6.0).to(tl.int32), 0), 31)
    return tiles, klass


@triton.jit(do_not_specialize=["batch", "tile_len"])
def tile_list_kernel(
    tiles_out, count_out, tile_offsets, work_offsets, tile_sub, work_map, batch, tile_len,
    BLOCK: tl.constexpr, REVERSE: tl.constexpr, CHUNK: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    own = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    classes = tl.arange(0, CLASSES)
    before = tl.zeros([CLASSES], tl.int32)
    total = tl.zeros([CLASSES], tl.int32)
    for chunk in range(0, tl.num_programs(0)):
        tiles, klass = _counts(chunk * CHUNK + lane, batch, tile_offsets, work_offsets, tile_len, tile_sub, work_map, BLOCK)
        summed = tl.sum(tl.where(klass[:, None] == classes[None, :], tiles[:, None], 0), 0)
        total += summed
        if chunk < own:
            before += summed
    if own == 0:
        tl.store(count_out, tl.sum(total))
    start = tl.cumsum(total, 0) - total + before
    sample = own * CHUNK + lane
    tiles, klass = _counts(sample, batch, tile_offsets, work_offsets, tile_len, tile_sub, work_map, BLOCK)
    same = klass[:, None] == classes[None, :]
    ours = tl.where(same, tiles[:, None], 0)
    at = tl.sum(tl.where(same, tl.cumsum(ours, 0) - ours + start[None, :], 0), 1)
    for block in range(0, tl.max(tiles)):
        shown = tiles - 1 - block if REVERSE else tl.zeros_like(tiles) + block
        tl.store(tiles_out + at + block, (sample.to(tl.int64) << 32) | shown.to(tl.int64), block < tiles)


class TileList:
    """``tiles [bound]`` int64 on the device, of which the first ``count[0]`` are set, and the host's ``bound`` on them."""

    __slots__ = ("bound", "count", "table", "tiles")

    def __init__(self, tiles: Tensor, count: Tensor, bound: int) -> None:
        self.tiles, self.count, self.bound = tiles, count, bound
        self.table: Tensor | None = None
        """The entries spelt out, where a kernel wants them so (`gem_kernels.triton.hopper.common`)."""


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
) -> TileList:
    """Cut every sample's rows into tiles of ``block`` rows.

    A sample has ``offsets[b+1] - offsets[b]`` rows, or ``length`` where offsets is None, less ``subtract[b]``. ``rows`` is the row count of
    the packed tensor and ``longest`` a bound on a sample's rows: together they bound the number of tiles without reading the device.
    ``work_offsets`` gives the work of sample b as the length of its row range ``work_map[b]`` (b without a map).

    A list is kept for the offsets it was built from (`gem_core.ops.remember`), for the other layers of a model and for the backward pass.
    """
    bound = rows // block + batch
    if offsets is None:
        bound = batch * -(-length // block)
    elif longest is not None:
        bound = min(bound, batch * -(-longest // block))
    sources = (offsets, work_offsets, work_map, subtract)

    def build() -> TileList:
        made = TileList(torch.empty(bound, dtype=torch.int64, device=device), torch.empty(1, dtype=torch.int32, device=device), bound)
        launch(
            tile_list_kernel, (-(-batch // CHUNK),), device,
            made.tiles, made.count, offsets, work_offsets, subtract, work_map, batch, length,
            BLOCK=block, REVERSE=reverse, CHUNK=CHUNK, CLASSES=_CLASSES, num_warps=4,
        )  # fmt: skip
        return made

    if compiling() or all(t is None for t in sources):
        return build()
    # a list is ready for those on the stream that it was built on
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    given = tuple(t is not None for t in sources)
    return remembered(sources, ("tile list", batch, block, bound, length, reverse, given, stream), build)
