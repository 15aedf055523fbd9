"""Time buckets of pairs, worked out once a call and kept as bytes in the order of a wgmma's registers, and what is done with them.

A pair's bucket is the same for all heads, so that the passes only read it: eight registers for 64 x 64 pairs. A block of 4096 bytes belongs
to 64 rows and 64 columns (`bias_ptx`), a unit is the two blocks that both warpgroups have for 64 columns. A tile of 128 rows has units for
the columns that it sees, one after the other, from unit ``entry[7]`` on:

    rows 128 b ..   | units of columns c, c + 64, c + 128, ...        causal: as many as the tile sees, `bias_table_kernel`

The passes add the entry of a code with a shuffle where a table of up to 32 buckets is held by the lanes of a warp, and from memory
otherwise. dQ and the summing warps beside it read another form (MASKS): where a warp's 16 rows and 64 columns have at most four buckets,
which four in five do, the block holds for each edge between them a bit a pair, whether its times are that far apart.

A warp with up to four buckets compares its pairs with the edges between them, others look a pair's cell up, and tiles with times that do
not fit in 32 bits or several edges in a cell search (`gem_kernels.triton.attention.bias_tables`).

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
_LOAD, _LOAD_TYPES = (gl.constexpr(x) for x in bias_ptx.load_codes())
_STORE, _STORE_TYPES = (gl.constexpr(x) for x in bias_ptx.store_codes())
# By whether rows are keys, and whether a byte a pair.
_FIND = gl.constexpr([[bias_ptx.find_codes(not keys, masks, CELLS.value, FIRST_CELL.value) for masks in (False, True)] for keys in (0, 1)])
_BIASED = gl.constexpr(
    [[bias_ptx.biased(lanes, bool(keys), masks) for lanes, masks in ((False, False), (True, False), (True, True))] for keys in (0, 1)]
)
_FROM_LANES, _FROM_LANES_TYPES = (gl.constexpr(x) for x in bias_ptx.add_entries(True))
_FROM_MEMORY, _FROM_MEMORY_TYPES = (gl.constexpr(x) for x in bias_ptx.add_entries(False))
_ROWS, _ROWS_TYPES = (gl.constexpr(x) for x in bias_ptx.row_entries())
_BINS, _BINS_TYPES = (gl.constexpr(x) for x in bias_ptx.add_to_bins())
_GIVE, _GIVE_TYPES = (gl.constexpr(x) for x in bias_ptx.give(False))
_GIVE_WIDE = gl.constexpr(bias_ptx.give(True)[0])
_TAKE, _TAKE_TYPES = (gl.constexpr(x) for x in bias_ptx.take(False))
_TAKE_WIDE = gl.constexpr(bias_ptx.take(True)[0])


@triton.jit
def _steps(b, lq, h, shift, ROWS: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr):
    """Blocks of 64 columns that tile b of a sample sees."""
    if KEYS:
        last = (lq + 63) // 64
        steps = last
        if CAUSAL:
            steps = last - tl.minimum(tl.maximum(b * ROWS - shift, 0) // 64, last)
    else:
        end = h
        if CAUSAL:
            end = tl.minimum(h, tl.maximum(tl.minimum(b * ROWS + ROWS, lq) + shift, 0))
        steps = (end + 63) // 64
    return steps


@triton.jit(do_not_specialize=["units", "slots"])
def bias_table_kernel(
    table, tiles, count, q_offsets, k_offsets, num_targets, units, slots,
    ROWS: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr, WAVES: tl.constexpr, MATES: tl.constexpr,
):  # fmt: skip
    """Spells out the entries of a tile list, of keys with KEYS, one a program. Every 128 rows of a tensor have room for ``units`` units.
    PACKED (self-attention with a causal mask): tile b takes those of 2 b + 2 blocks of keys, or of all but the first 2 b of queries.

    WAVES times as many tiles as are worked on at a time, ``slots``, are dealt to and fro by their size, at most MATES: their samples' keys
    are still in the L2 cache then, and all programs have as much to do."""
    item = tl.program_id(0)
    total = tl.load(count)
    if item < total:
        entry = tl.load(tiles + item)
        sample = (entry >> 32).to(tl.int32)
        b = (entry & 0xFFFFFFFF).to(tl.int32)
        q_row, _out_row, lq, k_row, h, t, _c = sample_geometry(sample, q_offsets, k_offsets, num_targets, None, None, 0)
        place = item
        if WAVES:
            group = item // (WAVES * slots)
            start = group * WAVES * slots
            if start + WAVES * slots <= total:
                lane = tl.arange(0, MATES)
                live = lane < WAVES * slots
                others = tl.load(tiles + start + lane, live, 0)
                their_sample = (others >> 32).to(tl.int32)
                their_b = (others & 0xFFFFFFFF).to(tl.int32)
                _q, _o, their_lq, _k, their_h, their_t, _c = sample_geometry(
                    their_sample, q_offsets, k_offsets, num_targets, None, None, 0
                )  # fmt: skip
                theirs = _steps(their_b, their_lq, their_h, their_h + their_t - their_lq, ROWS, KEYS, CAUSAL)
                own = _steps(b, lq, h, h + t - lq, ROWS, KEYS, CAUSAL)
                before = live & ((theirs > own) | ((theirs == own) & (start + lane < item)))
                rank = tl.sum(before.to(tl.int32), 0)
                wave = rank // slots
                place = start + wave * slots + tl.where((wave + group) % 2 == 1, slots - 1 - rank % slots, rank % slots)
        to = table + place * 8
        tl.store(to, q_row.to(tl.int32))
        tl.store(to + 1, lq)
        tl.store(to + 2, k_row.to(tl.int32))
        tl.store(to + 3, h)
        tl.store(to + 4, b * ROWS)
        tl.store(to + 5, h + t - lq)
        tl.store(to + 6, t)
        own_row = k_row if KEYS else q_row
        before_b = b * units
        if PACKED:
            before_b = b * ((lq + 63) // 64 + 1 - b) if KEYS else b * (b + 1)
        tl.store(to + 7, (own_row.to(tl.int32) // ROWS + sample) * units + before_b)


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
    """Of a table of up to 32 entries the one that has the lane's number, as every element ``[64]``."""
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
def biased_rows(code, p, n0, straight, pairs, radius, table, entry, gain, LANES: gl.constexpr, MASKS: gl.constexpr):
    """The bias ``[64, 64]`` over the scale of the scores, of keys from n0 on and rows at positions ``p [64]``, with ``straight`` one after
    the other: entries of the position table, and of the time's ``table`` times ``gain``, with LANES of `lane_entry`, times gain."""
    like = gl.full([64, 64], 0, gl.int32, code.type.layout)
    distance = gl.maximum(gl.minimum(n0 - p, radius + 8), -radius - 64)[:, None] + like
    at = (pairs + 2 * radius).to(gl.int64, bitcast=True)
    asm: gl.constexpr = _BIASED[0][LANES + MASKS][0]
    types: gl.constexpr = _BIASED[0][LANES + MASKS][1]
    if LANES:
        s = gl.inline_asm_elementwise(asm, types, [code, distance, straight, at, entry[:, None]], dtype=gl.float32, is_pure=False, pack=32)
    else:
        where = table.to(gl.int64, bitcast=True)
        s = gl.inline_asm_elementwise(asm, types, [code, distance, straight, at, where, gain], dtype=gl.float32, is_pure=False, pack=32)
    return s


@gluon.jit
def biased_columns(code, j, first, h, pairs, radius, table, entry, gain, LANES: gl.constexpr):
    """`biased_rows` of a tile whose rows are keys ``j [64]``, and whose columns are at positions from ``first`` on up to h."""
    like = gl.full([64, 64], 0, gl.int32, code.type.layout)
    distance = gl.maximum(gl.minimum(j - first, radius + 64), -radius - 8)[:, None] + like
    least = gl.maximum(j - h, -radius)[:, None] + like
    straight = (first + 63 <= h).to(gl.int32)
    at = (pairs + 2 * radius).to(gl.int64, bitcast=True)
    asm: gl.constexpr = _BIASED[1][LANES][0]
    types: gl.constexpr = _BIASED[1][LANES][1]
    if LANES:
        s = gl.inline_asm_elementwise(
            asm, types, [code, distance, straight, at, entry[:, None], least], dtype=gl.float32, is_pure=False, pack=32
        )  # fmt: skip
    else:
        where = table.to(gl.int64, bitcast=True)
        s = gl.inline_asm_elementwise(
            asm, types, [code, distance, straight, at, where, gain, least], dtype=gl.float32, is_pure=False, pack=32
        )  # fmt: skip
    return s


@gluon.jit
def add_entries(s, codes, table, entry, gain, LANES: gl.constexpr):
    """``s`` and the table's entry for each code times ``gain``; ``entry`` of `lane_entry`, times gain, with LANES."""
    if LANES:
        return gl.inline_asm_elementwise(
            _FROM_LANES, _FROM_LANES_TYPES, [s, codes, entry[:, None]], dtype=gl.float32, is_pure=False, pack=4
        )  # fmt: skip
    else:
        at = table.to(gl.int64, bitcast=True)
        return gl.inline_asm_elementwise(_FROM_MEMORY, _FROM_MEMORY_TYPES, [s, codes, at, gain], dtype=gl.float32, is_pure=True, pack=4)


@gluon.jit
def row_entries(p, n0, pairs, radius, layout: gl.constexpr):
    """The position table's entries ``[64, columns]`` for keys from n0 on and rows at positions ``p [64]``."""
    columns: gl.constexpr = layout.instr_shape[1]
    column = gl.arange(0, columns, layout=gl.SliceLayout(0, layout))
    distance = gl.maximum(gl.minimum((n0 + column // 64 * 64)[None, :] - p[:, None], radius), -radius - 64)
    at = (pairs + 2 * radius).to(gl.int64, bitcast=True)
    return gl.inline_asm_elementwise(_ROWS, _ROWS_TYPES, [distance, at], dtype=gl.float32, is_pure=True, pack=32)


@gluon.jit
def add_to_bins(ds, codes, bins):
    """Add a tile's values to the bins of their codes, of which each thread has its own (`backward_dq_bias`)."""
    gl.inline_asm_elementwise(_BINS, _BINS_TYPES, [ds, codes, bins], dtype=gl.int8, is_pure=False, pack=32)


@gluon.jit
def give(x, to, WIDE: gl.constexpr):
    """Put a wgmma's result ``[64, 64]`` to address ``to`` in shared memory, for `take`; in bf16 but for WIDE."""
    gl.inline_asm_elementwise(_GIVE_WIDE if WIDE else _GIVE, _GIVE_TYPES, [x, to], dtype=gl.int8, is_pure=False, pack=32)


@gluon.jit
def take(at, WIDE: gl.constexpr, layout: gl.constexpr):
    """What another warpgroup has given, which had it in the same registers."""
    return gl.inline_asm_elementwise(
        _TAKE_WIDE if WIDE else _TAKE, _TAKE_TYPES, [gl.full([64, 64], 0, gl.int32, layout) + at], dtype=gl.float32, is_pure=False, pack=32
    )  # fmt: skip


@gluon.jit
def _range_of(t, live):
    return gl.min(gl.where(live, t, FAR), 0), gl.max(gl.where(live, t, -FAR), 0)


@gluon.jit
def _of_warp(low, high):
    """Least and greatest of a warp's 16 rows, as every row of it."""
    least: gl.constexpr = "min.s32 $0, $2, $3; redux.sync.min.s32 $0, $0, 0xffffffff; mov.b32 $1, $0;"
    most: gl.constexpr = "max.s32 $0, $2, $3; redux.sync.max.s32 $0, $0, 0xffffffff; mov.b32 $1, $0;"
    return (
        gl.inline_asm_elementwise(least, "=&r,=&r,r,r", [low], dtype=gl.int32, is_pure=False, pack=2),
        gl.inline_asm_elementwise(most, "=&r,=&r,r,r", [high], dtype=gl.int32, is_pure=False, pack=2),
    )


@gluon.jit(do_not_specialize=["edges"])
def bias_codes_kernel(
    codes, table, count, row_relative, column_relative, row_times, column_times, index, time_edges, edges,
    CAUSAL: gl.constexpr, KEYS: gl.constexpr, STEPS: gl.constexpr, MASKS: gl.constexpr, num_warps: gl.constexpr,
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
            warp_low, warp_high = _of_warp(gl.where(i < rows, ti, FAR), gl.where(i < rows, ti, -FAR))
            crowded = gl.load(index + edges + CELLS) != 0
            zeros = gl.full([64, 64], 0, gl.int32, layout)
            by_lane = gl.arange(0, 64, layout=gl.BlockedLayout([2], [32], [4], [0]))
            for x in range(begin, end):
                t_x = gl.load(column_relative + column + x * 64 + by_lane, x * 64 + by_lane < columns, 0)
                low, high = _range_of(t_x, x * 64 + by_lane < columns)
                j = x * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
                tj = gl.load(column_relative + column + j, j < columns, 0)
                if uncut(row_low, row_high, low, high):
                    if crowded:
                        lowest, highest = bucket_range(row_low, row_high, low, high, index, edges, STEPS)
                        difference = gl.abs(ti[:, None] - tj[None, :])
                        counted = zeros + lowest
                        for edge in range(lowest, highest):
                            counted += (difference >= gl.load(index + edge)).to(gl.int32)
                        code = counted.to(gl.int8)
                    else:
                        asm: gl.constexpr = _FIND[KEYS][MASKS][0]
                        types: gl.constexpr = _FIND[KEYS][MASKS][1]
                        at_edges = index.to(gl.int64, bitcast=True)
                        code = gl.inline_asm_elementwise(
                            asm, types,
                            [ti[:, None], tj[None, :], warp_low[:, None], warp_high[:, None], low, high, at_edges, at_edges + edges * 4],
                            dtype=gl.int8, is_pure=False, pack=32,
                        )  # fmt: skip
                else:
                    wide_i = gl.load(row_times + row + i, i < rows, 0).to(gl.int64)[:, None]
                    wide_j = gl.load(column_times + column + j, j < columns, 0).to(gl.int64)[None, :]
                    counted = zeros
                    for edge in range(edges):
                        reach = gl.maximum(gl.load(time_edges + edge).to(gl.int64), 0)
                        counted += ((wide_j <= wide_i - reach) | (wide_j >= wide_i + reach)).to(gl.int32)
                    code = counted.to(gl.int8)
                at = to + (x - first).to(gl.int64) * UNIT + gl.full([64, 64], 0, gl.int64, layout)
                gl.inline_asm_elementwise(_STORE, _STORE_TYPES, [code, at], dtype=gl.int8, is_pure=False, pack=32)
