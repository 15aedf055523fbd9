"""Time buckets of pairs, worked out once a call and kept as bytes in the order of a wgmma's registers, and what is done with them.

A pair's bucket is the same for all heads, so that the passes only read it: eight registers for 64 x 64 pairs. A block of 4096 bytes belongs
to 64 rows and 64 columns (`bias_ptx`), a unit is the two blocks that both warpgroups have for 64 columns. A tile of 128 rows has units for
the columns that it sees, one after the other, from unit ``entry[7]`` on:

    rows 128 b ..   | units of columns c, c + 64, c + 128, ...        causal: as many as the tile sees, `bias_table_kernel`

The passes add the entry of a code with a shuffle where a table of up to 32 buckets is held by the lanes of a warp, and from memory
otherwise. Tiles whose pairs have few buckets are compared with the edges between them, others look a pair's cell up, and those with times
that do not fit in 32 bits or several edges in a cell search (`gem_kernels.triton.attention.bias_tables`).

The work list is ``table [tiles, 8]`` int32: first query row, query rows, first key row, history keys h, first row within the sample,
shift (position less row), candidates, first unit.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gem_kernels.triton.attention.bias import bucket_range, uncut
from gem_kernels.triton.attention.bias_tables import CELLS, FAR, FIRST_CELL
from gem_kernels.triton.attention.masks import sample_geometry
from gem_kernels.triton.hopper import bias_ptx
from gem_kernels.triton.hopper.common import prefetch

UNIT = gl.constexpr(8192)
# Buckets of a tile up to which a comparison a bucket and pair is cheaper than two look-ups.
_FEW = gl.constexpr(4)
_LOAD, _LOAD_TYPES = (gl.constexpr(x) for x in bias_ptx.load_codes())
_STORE, _STORE_TYPES = (gl.constexpr(x) for x in bias_ptx.store_codes())
_FROM_LANES, _FROM_LANES_TYPES = (gl.constexpr(x) for x in bias_ptx.add_entries(True))
_FROM_MEMORY, _FROM_MEMORY_TYPES = (gl.constexpr(x) for x in bias_ptx.add_entries(False))
_BINS, _BINS_TYPES = (gl.constexpr(x) for x in bias_ptx.add_to_bins())
_ROWS, _ROWS_TYPES = (gl.constexpr(x) for x in bias_ptx.add_rows())
_COLUMNS, _COLUMNS_TYPES = (gl.constexpr(x) for x in bias_ptx.add_columns())


@triton.jit
def bias_table_kernel(
    table, tiles, count, q_offsets, k_offsets, num_targets, units, ROWS: tl.constexpr, KEYS: tl.constexpr, PACKED: tl.constexpr
):  # fmt: skip
    """Spells out the entries of a tile list, of keys with KEYS, one a program. Every 128 rows of a tensor have room for ``units`` units.
    PACKED (self-attention with a causal mask): tile b takes those of 2 b + 2 blocks of keys, or of all but the first 2 b of queries."""
    item = tl.program_id(0)
    if item < tl.load(count):
        entry = tl.load(tiles + item)
        sample = (entry >> 32).to(tl.int32)
        b = (entry & 0xFFFFFFFF).to(tl.int32)
        q_row, _out_row, lq, k_row, h, t, _c = sample_geometry(sample, q_offsets, k_offsets, num_targets, None, None, 0)
        to = table + item * 8
        tl.store(to, q_row.to(tl.int32))
        tl.store(to + 1, lq)
        tl.store(to + 2, k_row.to(tl.int32))
        tl.store(to + 3, h)
        tl.store(to + 4, b * ROWS)
        tl.store(to + 5, h + t - lq)
        tl.store(to + 6, t)
        own_row = k_row if KEYS else q_row
        before = b * units
        if PACKED:
            before = b * ((lq + 63) // 64 + 1 - b) if KEYS else b * (b + 1)
        tl.store(to + 7, (own_row.to(tl.int32) // ROWS + sample) * units + before)


@gluon.jit
def read_entry(table, item, total, H: gl.constexpr):
    """(first row, rows, first key row, history keys, start, shift, candidates) of an item; anything past the end."""
    at = table + gl.maximum(gl.minimum(item, total - 1), 0) // H * 8
    return gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3), gl.load(at + 4), gl.load(at + 5), gl.load(at + 6)


@gluon.jit
def codes_of(codes, table, item, H: gl.constexpr, WHO: gl.constexpr):
    """Address of a warpgroup's codes for the first columns of an item; those of 64 columns on are UNIT on."""
    return codes.to(gl.int64, bitcast=True) + gl.load(table + item // H * 8 + 7).to(gl.int64) * UNIT + WHO * (UNIT // 2)


@gluon.jit
def prefetch_entry(table, item, total, H: gl.constexpr):
    """Bring the entry that `read_entry` will read closer."""
    at = table + gl.maximum(gl.minimum(item, total - 1), 0) // H * 8
    gl.inline_asm_elementwise(
        "prefetch.global.L1 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(gl.int64, bitcast=True)], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def prefetch_codes(at, COLUMNS: gl.constexpr):
    """Bring the codes of both warpgroups for COLUMNS columns into the L2 cache, by one warp."""
    line = gl.arange(0, COLUMNS // 64 * UNIT // 128, layout=gl.BlockedLayout([1], [32], [1], [0]))
    prefetch(at + line.to(gl.int64) * 128)


@gluon.jit
def key_blocks(m1, h, shift, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """Blocks of history keys that rows below m1 see."""
    end = h
    if CAUSAL:
        end = gl.minimum(h, gl.maximum(gl.minimum(m1 - 1 + shift, h) + 1, 0))
    return (end + BLOCK_N - 1) // BLOCK_N


@gluon.jit
def query_blocks(n0, lq, shift, CAUSAL: gl.constexpr):
    """First block of 64 query rows that see keys from n0 on, and one past the last."""
    last = (lq + 63) // 64
    first = n0 * 0
    if CAUSAL:
        first = gl.minimum(gl.maximum(n0 - shift, 0) // 64, last)
    return first, last


@gluon.jit
def load_codes(at, like: gl.constexpr):
    """int8 codes ``[64, columns]`` from address ``at`` on, in the wgmma layout ``like``."""
    column = gl.arange(0, like.instr_shape[1], layout=gl.SliceLayout(0, like))
    block = gl.full([64, like.instr_shape[1]], 0, gl.int64, like) + (column // 64 * UNIT).to(gl.int64)[None, :]
    return gl.inline_asm_elementwise(_LOAD, _LOAD_TYPES, [at + block], dtype=gl.int8, is_pure=False, pack=32)


@gluon.jit
def lane_entry(table, edges, layout: gl.constexpr):
    """Of a table of up to 32 entries the lane's own, as every element ``[64]``."""
    asm: gl.constexpr = """
        {
        .reg .b32 l;
        .reg .b64 a;
        mov.u32 l, %laneid;
        min.u32 l, l, $2;
        mad.wide.u32 a, l, 4, $1;
        ld.global.nc.f32 $0, [a];
        }
        """
    zero = gl.full([64], 0, gl.int64, layout)
    return gl.inline_asm_elementwise(
        asm, "=f,l,r", [table.to(gl.int64, bitcast=True) + zero, edges + zero.to(gl.int32)], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def add_entries(s, codes, table, entry, LANES: gl.constexpr):
    """``s`` and the table's entry for each code; ``entry`` of `lane_entry` with LANES."""
    if LANES:
        return gl.inline_asm_elementwise(
            _FROM_LANES, _FROM_LANES_TYPES, [s, codes, entry[:, None]], dtype=gl.float32, is_pure=False, pack=4
        )  # fmt: skip
    else:
        at = table.to(gl.int64, bitcast=True)
        return gl.inline_asm_elementwise(_FROM_MEMORY, _FROM_MEMORY_TYPES, [s, codes, at], dtype=gl.float32, is_pure=True, pack=4)


@gluon.jit
def add_rows(s, scale, p, n0, pairs, radius):
    """``scale * s`` and the position table's entry, for keys from n0 on and rows at positions ``p [64]``."""
    column = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))
    distance = gl.maximum(gl.minimum((n0 + column // 64 * 64)[None, :] - p[:, None], radius), -radius - 64)
    at = (pairs + 2 * radius).to(gl.int64, bitcast=True)
    return gl.inline_asm_elementwise(_ROWS, _ROWS_TYPES, [s, scale, distance, at], dtype=gl.float32, is_pure=True, pack=32)


@gluon.jit
def add_columns(s, scale, j, first, h, pairs, radius):
    """`add_rows` of a tile whose rows are keys ``j [64]``, and whose columns are at positions from ``first`` on up to h."""
    distance = gl.minimum(j - first - 1, radius + 64)
    least = gl.maximum(j - h, -radius - 1)
    at = (pairs + 2 * radius).to(gl.int64, bitcast=True)
    return gl.inline_asm_elementwise(
        _COLUMNS, _COLUMNS_TYPES, [s, scale, distance[:, None], least[:, None], at], dtype=gl.float32, is_pure=True, pack=32
    )


@gluon.jit
def add_to_bins(ds, codes, bins):
    """Add a tile's values to the bins of their codes, of which each thread has its own (`backward_dq_bias`)."""
    gl.inline_asm_elementwise(_BINS, _BINS_TYPES, [ds, codes, bins], dtype=gl.int8, is_pure=False, pack=32)


@gluon.jit
def _range_of(t, live):
    return gl.min(gl.where(live, t, FAR), 0), gl.max(gl.where(live, t, -FAR), 0)


@gluon.jit
def _by_cell(difference, index, edges):
    first: gl.constexpr = FIRST_CELL
    cell = (gl.maximum(difference.to(gl.float32), 0.5).to(gl.int32, bitcast=True) >> 19) - first
    cell += (difference >= gl.load(index + edges + cell)).to(gl.int32)
    return gl.load(index + (edges + CELLS + 1) + cell)


@gluon.jit(do_not_specialize=["edges"])
def bias_codes_kernel(
    codes, table, count, row_relative, column_relative, row_times, column_times, index, time_edges, edges,
    CAUSAL: gl.constexpr, KEYS: gl.constexpr, STEPS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Codes of one warpgroup's half of an item a program. KEYS: rows are keys, columns queries."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    item = gl.program_id(0)
    who = gl.program_id(1)
    if item < gl.load(count):
        q_row, lq, k_row, h, start, shift, _t = read_entry(table, item, item + 1, 1)
        own = start + who * 64
        if KEYS:
            row, rows, column, columns = k_row, h, q_row, lq
            first, _last = query_blocks(start, lq, shift, CAUSAL)
            begin, end = query_blocks(own, lq, shift, CAUSAL)
        else:
            row, rows, column, columns = q_row, lq, k_row, h
            begin = own * 0
            first = begin
            end = key_blocks(gl.minimum(own + 64, lq), h, shift, 64, CAUSAL)
        to = codes_of(codes, table, item, 1, 0) + who * (UNIT // 2)
        if own < rows:
            i = own + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
            ti = gl.load(row_relative + row + i, i < rows, 0)
            row_low, row_high = _range_of(ti, i < rows)
            crowded = gl.load(index + edges + CELLS) != 0
            for x in range(begin, end):
                j = x * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
                tj = gl.load(column_relative + column + j, j < columns, 0)
                low, high = _range_of(tj, j < columns)
                difference = gl.abs(ti[:, None] - tj[None, :])
                if uncut(row_low, row_high, low, high):
                    lowest, highest = bucket_range(row_low, row_high, low, high, index, edges, STEPS)
                    code = difference * 0 + lowest
                    if (highest - lowest <= _FEW) | crowded:
                        for edge in range(lowest, highest):
                            code += (difference >= gl.load(index + edge)).to(gl.int32)
                    else:
                        code = _by_cell(difference, index, edges)
                else:
                    wide_i = gl.load(row_times + row + i, i < rows, 0).to(gl.int64)[:, None]
                    wide_j = gl.load(column_times + column + j, j < columns, 0).to(gl.int64)[None, :]
                    code = difference * 0
                    for edge in range(edges):
                        reach = gl.maximum(gl.load(time_edges + edge).to(gl.int64), 0)
                        code += ((wide_j <= wide_i - reach) | (wide_j >= wide_i + reach)).to(gl.int32)
                at = to + (x - first).to(gl.int64) * UNIT + gl.full([64, 64], 0, gl.int64, layout)
                gl.inline_asm_elementwise(_STORE, _STORE_TYPES, [code.to(gl.int8), at], dtype=gl.int8, is_pure=False, pack=32)
