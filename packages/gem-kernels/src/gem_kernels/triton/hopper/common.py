"""What the Gluon kernels of this family share: tiles of a sample, shared-memory layouts, the order of a kernel's work.

A kernel is persistent, one program an SM: two consumer warpgroups, each with nearly half of the registers, one producer warp that fills
rings of shared-memory slots by TMA and, in the backward pass, one warp that writes a tile's results while the consumers are at the next.
A ring has a pair of barriers a slot: ``full`` (the bytes have landed) and ``empty`` (whoever reads them has done with them).

Rows outside a sample never reach a product: the descriptors are ragged (`gem_kernels.triton.attention.tiles.descriptor`), so the hardware
reads zeros there and leaves rows outside alone when it writes.

The work list is that of `gem_kernels.triton.attention.schedule`, spelt out. With BROADCAST the rows of the query side are those of the
output, dO, lse and delta, and every sample's Q begins at row 0. Entry and head of a program's n-th item are known ahead, so the next entry
is read a tile early.
"""

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

_BILLION = gl.constexpr(1 << 30)
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def items(total):
    """How many of ``total`` items this program has; `item_at` tells which."""
    programs = gl.num_programs(0)
    full = total // programs
    return full + (item_at(full) < total).to(gl.int32)


@gluon.jit
def item_at(n):
    """The program's n-th item. The programs take the items in order and every second time in reverse order: lists begin with the heavy
    tiles of a sample, and where a sample has as many tiles as there are programs, one would get the heaviest of every sample."""
    programs = gl.num_programs(0)
    own = gl.program_id(0)
    return n * programs + gl.where(n % 2 == 0, own, programs - 1 - own)


@gluon.jit
def read_tile(table, item, total, H: gl.constexpr):
    """(first row, rows, first row of the other side, rows there, start) of an item; anything past the end."""
    at = table + gl.maximum(gl.minimum(item, total - 1), 0) // H * 8
    return gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3), gl.load(at + 4)


@gluon.jit
def read_first(table, total, H: gl.constexpr):
    """Like `read_tile`, of the program's first item, for what is read from memory before it is known that there is any: where there is none
    at all, of a list that nobody wrote, zeros."""
    row, rows, other_row, other_rows, start = read_tile(table, item_at(0), total, H)
    some = (total > 0).to(gl.int32)
    return row * some, rows * some, other_row * some, other_rows * some, start * some


@gluon.jit
def own_run(tiles, H: gl.constexpr):
    """(first, one past the last) of the tiles that a walking program has of ``tiles`` of every head, which are numbered head by head: as
    many as any other has. Where whole programs belong to a head, neighbours among these have the same rows of different heads."""
    programs = gl.num_programs(0)
    own = gl.program_id(0)
    if programs % H == 0:
        own = own % H * (programs // H) + own // H
    total = (tiles * H).to(gl.int64)
    return (own * total // programs).to(gl.int32), ((own + 1) * total // programs).to(gl.int32)


@gluon.jit
def read_run(table, at, until, tiles):
    """(first row, rows, first row of the other side, rows there, start, tiles) of the item of a walking program that begins at tile ``at``:
    what its run, which ends before ``until``, has of a sample and head."""
    row, rows, other_row, other_rows, start = read_tile(table, at % tiles, tiles, 1)
    return row, rows, other_row, other_rows, start, gl.minimum((rows - start + 127) // 128, until - at)


@gluon.jit
def parts_of(rows, PARTS: gl.constexpr):
    """Tiles of an item of up to PARTS tiles that has ``rows`` rows from its first tile on."""
    return gl.minimum((rows + 127) // 128, PARTS) if PARTS > 1 else 1


@gluon.jit
def alive(x):
    """``x`` itself. Triton 3.6 takes a value that a loop carries for dead where all it does is bound a loop inside, and drops its new
    value: the inner loop then runs as often as for the first item. An operand of an instruction with effects is not dropped.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_box(box, row0, rows, start, column, bar, slot, ROWS: gl.constexpr, D: gl.constexpr):
    """Start the copy of rows start .. start + ROWS of a sample of ``rows`` rows from ``row0`` on into ``slot [ROWS, D]``."""
    to = slot._reinterpret(slot.dtype, [1, 1, ROWS, D], box.layout)
    tma.async_copy_global_to_shared(box, [_BILLION, row0 + rows, _BILLION - rows + start, column], bar, to)


@gluon.jit
def store_box(box, row0, rows, start, column, slot, ROWS: gl.constexpr, D: gl.constexpr):
    """The converse of `load_box`; rows outside the sample are left alone."""
    source = slot._reinterpret(slot.dtype, [1, 1, ROWS, D], box.layout)
    tma.async_copy_shared_to_global(box, [_BILLION, row0 + rows, _BILLION - rows + start, column], source)


@builtin
def _copy_add(box, coord, source, _semantic=None):
    """`tma.async_copy_shared_to_global` that adds to what is there; the dialect has no name for it."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, box.handle, coord, source.handle)


@gluon.jit
def add_box(box, row0, rows, start, column, slot, ROWS: gl.constexpr, D: gl.constexpr):
    """`store_box` that adds, rounding to the tensor's dtype."""
    source = slot._reinterpret(slot.dtype, [1, 1, ROWS, D], box.layout)
    _copy_add(box, [_BILLION, row0 + rows, _BILLION - rows + start, column], source)


@gluon.jit
def finish_stores(x):
    """``x`` itself, once this warpgroup's stores have reached memory (`tma.store_wait` waits until their source has been read)."""
    asm: gl.constexpr = "cp.async.bulk.wait_group 0; mov.b32 $0, $1;"
    return gl.inline_asm_elementwise(asm, "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def prefetch(at):
    """Bring the lines of 128 bytes that hold the addresses ``at`` (int64) into the L2 cache."""
    gl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def prefetch_rows(base, row0, rows, start, stride, column, ROWS: gl.constexpr, D: gl.constexpr):
    """`prefetch` of ``D`` columns of half precision of rows start .. start + ROWS of a sample of ``rows`` rows, by one warp."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    r = gl.minimum(start + gl.arange(0, ROWS, layout=layout), rows - 1)
    at = (base + (row0 + r).to(gl.int64) * stride + column).to(gl.int64, bitcast=True)
    for line in gl.static_range(D // 64):
        prefetch(at + line * 128)


@gluon.jit
def make_barriers(SLOTS: gl.constexpr, COUNT: gl.constexpr):
    """``SLOTS`` barriers that complete a phase after ``COUNT`` arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars


@gluon.jit
def fill_flat(to, begin, end, value, PROGRAM_WARPS: gl.constexpr):
    """Elements begin .. end of a contiguous tensor become ``value``; the grid's programs share them."""
    BLOCK: gl.constexpr = 1024
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [PROGRAM_WARPS], [0])
    at = gl.arange(0, BLOCK, layout=layout)
    for start in range(begin + gl.program_id(0).to(gl.int64) * BLOCK, end, gl.num_programs(0) * BLOCK):
        gl.store(to + start + at, gl.full([BLOCK], value, to.dtype.element_ty, layout), start + at < end)


@gluon.jit
def fill_rows(to, begin, end, stride, value, WIDTH: gl.constexpr, PROGRAM_WARPS: gl.constexpr):
    """Rows begin .. end of WIDTH elements, ``stride`` apart, become ``value``; the grid's programs share them."""
    BLOCK: gl.constexpr = 1024
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [PROGRAM_WARPS], [0])
    at = gl.arange(0, BLOCK, layout=layout)
    for row in range(begin + gl.program_id(0).to(gl.int64), end, gl.num_programs(0)):
        for start in range(0, WIDTH, BLOCK):
            gl.store(to + row * stride + start + at, gl.full([BLOCK], value, to.dtype.element_ty, layout), start + at < WIDTH)


@gluon.jit
def add_column_sums(sums, tile, rows, WIDTH: gl.constexpr):
    """Adds the sums of the columns of the first ``rows`` rows of ``tile [64, D]``, in shared memory, to ``sums``, four rows of [WIDTH] fp32
    of which a warp has one. Nobody else adds there, so that the order is always the same."""
    D: gl.constexpr = tile.shape[1]
    AT_ONCE: gl.constexpr = 256 // D
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [AT_ONCE, D // 8], [4, 1], [1, 0])
    x = tile.load(layout).to(gl.float32)
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    x = gl.where((i < rows)[:, None], x, 0.0)
    # rows of a thread, then of a warp
    x = gl.sum(gl.reshape(x, [16 // AT_ONCE, 4, AT_ONCE, D]), 0)
    x = gl.sum(x, 1)
    found: gl.constexpr = x.type.layout
    warp = gl.arange(0, 4, layout=gl.SliceLayout(1, found))
    column = gl.arange(0, D, layout=gl.SliceLayout(0, found))
    gl.atomic_add(sums + warp[:, None] * WIDTH + column[None, :], x, sem="relaxed")


@gluon.jit
def column_range(
    m0, m1, lq, lk, left, right, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """Of query rows m0 .. m1: (first key block, one past the last, keys free0 .. free1 that all of the rows see).

    With TRANSPOSED the rows are ``lq`` keys and the columns ``lk`` queries.
    """
    lo = m0 * 0
    hi = lk
    free0 = lo
    free1 = lk
    if TRANSPOSED:
        shift = lq - lk
        if CAUSAL:
            lo = gl.maximum(lo, m0 - shift)
            free0 = gl.maximum(free0, m1 - 1 - shift)
        if WINDOW:
            lo = gl.maximum(lo, m0 - right - shift)
            hi = gl.minimum(hi, m1 + left - shift)
            free0 = gl.maximum(free0, m1 - 1 - right - shift)
            free1 = gl.minimum(free1, m0 + left - shift + 1)
    else:
        shift = lk - lq
        if CAUSAL:
            hi = gl.minimum(hi, m1 + shift)
            free1 = gl.minimum(free1, m0 + shift + 1)
        if WINDOW:
            lo = gl.maximum(lo, m0 + shift - left)
            hi = gl.minimum(hi, m1 + shift + right)
            free0 = gl.maximum(free0, m1 - 1 + shift - left)
            free1 = gl.minimum(free1, m0 + shift + right + 1)
    first = lo // BLOCK_N
    return first, gl.maximum((gl.maximum(hi, 0) + BLOCK_N - 1) // BLOCK_N, first), free0, free1


@gluon.jit
def near(keys, positions, left, right, CAUSAL: gl.constexpr, WINDOW: gl.constexpr):
    """Which keys the query rows at ``positions`` see, bounds of the sample apart; a window is one unsigned comparison."""
    if WINDOW:
        behind = keys - positions + left
        return behind.to(gl.uint32) <= (left + (0 if CAUSAL else right)).to(gl.uint32)
    else:
        return keys <= positions


@gluon.jit
def seen_by(i, j, lq, lk, left, right, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, TRANSPOSED: gl.constexpr, BOUNDED: gl.constexpr):
    """Which of the pairs of rows ``i`` and columns ``j`` of a tile see each other, see `column_range`; BOUNDED: no columns past the end."""
    rows = i[:, None]
    columns = j[None, :]
    if CAUSAL or WINDOW:
        if TRANSPOSED:
            seen = near(rows, columns + (lq - lk), left, right, CAUSAL, WINDOW)
        else:
            seen = near(columns, rows + (lk - lq), left, right, CAUSAL, WINDOW)
        if BOUNDED:
            seen = seen & (columns < lk)
    else:
        seen = (rows >= 0) & (columns < lk)
    return seen


@gluon.jit
def query_range(n0, n1, lq, lk, left, right, BLOCK_M: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr):
    """Of keys n0 .. n1: (first block of query rows that see one of them, one past the last)."""
    shift = lk - lq
    lo = n0 * 0
    hi = lq
    if CAUSAL:
        lo = gl.maximum(lo, n0 - shift)
    if WINDOW:
        lo = gl.maximum(lo, n0 - right - shift)
        hi = gl.minimum(hi, n1 + left - shift)
    first = lo // BLOCK_M
    return first, gl.maximum((gl.maximum(hi, 0) + BLOCK_M - 1) // BLOCK_M, first)


@gluon.jit
def first_rows(slot, N: gl.constexpr):
    """The first ``N`` rows of a slot."""
    if slot.shape[0] == N:
        return slot
    else:
        return slot.slice(0, N)


@gluon.jit
def whole_tiles(begin, end, rows, BLOCK: gl.constexpr):
    """One past the last of the tiles begin .. end of ``rows`` rows that are worked on as a whole: all but a last one that has rows in its
    first half alone. It is never the only one: ptxas prepares addresses for both loops where the first one is entered."""
    return gl.where(((rows - 1) % BLOCK < BLOCK // 2) & (end - begin > 1), end - 1, end)


@gluon.jit
def ring_slot(step, second: gl.constexpr, STAGES: gl.constexpr, SHARED: gl.constexpr):
    """Slot and phase of a step's tile of K, or of V (``second``): in a ring of its own, or SHARED by both in turn."""
    n = 2 * step + second if SHARED else step
    return n % STAGES, n // STAGES & 1


@gluon.jit
def pass_over(count, step, k_full, k_empty, v_full, v_empty, STAGES: gl.constexpr, SHARED: gl.constexpr):
    """Give back ``count`` tiles of K and V that the other consumer works on and this one does not need; the next step."""
    for _x in range(count):
        stage, phase = ring_slot(step, 0, STAGES, SHARED)
        mbarrier.wait(k_full.index(stage), phase)
        mbarrier.arrive(k_empty.index(stage), count=1)
        stage, phase = ring_slot(step, 1, STAGES, SHARED)
        mbarrier.wait(v_full.index(stage), phase)
        mbarrier.arrive(v_empty.index(stage), count=1)
        step += 1
    return step


@gluon.jit
def pass_over_rows(count, step, q_full, q_empty, STAGES: gl.constexpr):
    """`pass_over` of the key side: tiles of Q and dO, which share a barrier."""
    for _x in range(count):
        stage = step % STAGES
        mbarrier.wait(q_full.index(stage), step // STAGES & 1)
        mbarrier.arrive(q_empty.index(stage), count=1)
        step += 1
    return step


@gluon.jit
def _tanh(x):
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def folded_value(s, scale, FOLDED: gl.constexpr):
    """2 · f(x) / scale of x = scale · s by the hardware tanh, f GELU (FOLDED 1) or SiLU (2): the constants are left to the epilogue."""
    if FOLDED == 1:
        return s + s * _tanh(s * (0.7978845608 * scale + 0.0356774081 * (scale * scale * scale) * (s * s)))
    else:
        return s + s * _tanh(s * (0.5 * scale))


@gluon.jit
def folded_value_and_slope(s, scale, FOLDED: gl.constexpr):
    """`folded_value`, and 2 · f'(x), of GELU a third of it: that has a third of the derivative of tanh's argument r, which is 3 r / x less
    twice r's linear part."""
    if FOLDED == 1:
        slope_1 = 0.7978845608 * scale
        r = s * (slope_1 + 0.0356774081 * (scale * scale * scale) * (s * s))
        t = _tanh(r)
        third = r - (2.0 / 3.0) * slope_1 * s
        return s + s * t, (1.0 / 3.0 + t * (1.0 / 3.0)) + third * (1.0 - t * t)
    else:
        half = s * (0.5 * scale)
        t = _tanh(half)
        return s + s * t, (1.0 + t) + half * (1.0 - t * t)


@gluon.jit
def wait_for_former():
    """Until the kernel before this one in the stream is complete, where this one was launched early (`launch_pdl`); nothing otherwise."""
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_next_begin():
    """The next kernel, where it is launched early, may have the SMs that this one's programs leave."""
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _fill_statistics(
    lse, delta, lse_slots, delta_slots, q_full, q_empty, step, head, rows, q_row, lq, first, last, STAGES: gl.constexpr,
):  # fmt: skip
    """`statistics` of tiles ``first`` .. ``last`` of a sample; the step after them."""
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    for x in range(first, last):
        i = x * 64 + gl.arange(0, 64, layout=layout)
        at = head.to(gl.int64) * rows + q_row + i
        lse_i = gl.load(lse + at, i < lq, float("-inf"))
        delta_i = gl.load(delta + at, i < lq, 0.0)
        # Rows outside the sample and rows that see no key must give P = 2^(S - inf) = 0.
        lse_i = gl.where(lse_i == float("-inf"), float("inf"), lse_i * LOG2E)
        stage = step % STAGES
        mbarrier.wait(q_empty.index(stage), (step // STAGES & 1) ^ 1)
        lse_slots.index(stage).store(lse_i)
        delta_slots.index(stage).store(delta_i)
        mbarrier.arrive(q_full.index(stage), count=1)
        step += 1
    return step


@gluon.jit
def statistics(
    lse, delta, table, tiles, lse_slots, delta_slots, q_full, q_empty, rows, left, right,
    HKV: gl.constexpr, GROUP: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, STAGES: gl.constexpr, WALK: gl.constexpr,
):  # fmt: skip
    """lse in powers of two and delta of every query tile, into shared memory beside Q. The kernel before this one writes delta."""
    wait_for_former()
    step = 0
    if WALK:
        at, until = own_run(tiles, HKV)
        while at < until:
            _row, lk, q_row, lq, start, parts = read_run(table, at, until, tiles)
            first, last = query_range(start, gl.minimum(start + 128 * parts, lk), lq, lk, left, right, 64, CAUSAL, WINDOW)
            step = _fill_statistics(
                lse, delta, lse_slots, delta_slots, q_full, q_empty, step, at // tiles, rows, q_row, lq, first, last, STAGES,
            )  # fmt: skip
            at += parts
    else:
        total = tiles * HKV
        for n in range(items(total)):
            item = item_at(n)
            kv_head = item % HKV
            _row, lk, q_row, lq, n0 = read_tile(table, item, total, HKV)
            first, last = query_range(n0, gl.minimum(n0 + 128, lk), lq, lk, left, right, 64, CAUSAL, WINDOW)
            for head in range(kv_head * GROUP, kv_head * GROUP + GROUP):
                step = _fill_statistics(
                    lse, delta, lse_slots, delta_slots, q_full, q_empty, step, head, rows, q_row, lq, first, last, STAGES,
                )  # fmt: skip
