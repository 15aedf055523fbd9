"""PTX of `bias_codes`: (text, constraints) of blocks for 64 x 64 pairs in the registers of a warpgroup, as `inline_asm_elementwise` packs
them.

Register n of a thread has row 8 (n / 2 % 2) + lane / 4 of its warp's 16 and column 8 (n / 4) + 2 (lane % 4) + n % 2. Codes are bytes, four
to a register, or masks (`find_codes`). Operands count from the results on; of one that is the same for all pairs the first is used.
"""

from __future__ import annotations

from gem_kernels.triton.attention import warp_sums

Block = tuple[str, str]

_CODES = 8
_PAIRS = 32
# Codes of a warpgroup: thread t has bytes 16 t .. 16 t + 15 of either half of 4096.
_OWN = ".reg .b32 t; .reg .b64 a; mov.u32 t, %tid.x; and.b32 t, t, 127; mad.wide.u32 a, t, 16, {};"


def _block(lines: list[str], *kinds: tuple[str, int]) -> Block:
    return "\n".join(["{", *lines, "}"]), ",".join(kind for kind, count in kinds for _ in range(count))


def _zeros() -> list[str]:
    return [f"mov.b32 ${n}, 0;" for n in range(_CODES)]


def load_codes() -> Block:
    """(address): codes."""
    load = "ld.global.nc.v4.b32"
    lines = [_OWN.format("$8"), f"{load} {{$0, $1, $2, $3}}, [a];", f"{load} {{$4, $5, $6, $7}}, [a+2048];"]
    return _block(lines, ("=&r", _CODES), ("l", _PAIRS))


def bucket_of(difference: str, name: str) -> list[str]:
    """Lines that set ``name`` to the bucket of a difference, by its cell (`gem_kernels.triton.attention.bias_tables`). The addresses k and
    o are those of the edges of the cells, and of the buckets at their beginnings, of a cell whose number would be the bits of a float."""
    return [
        f"cvt.rn.f32.s32 f, {difference};", "max.f32 f, f, 0f3F000000;", f"mov.b32 {name}, f;", f"shr.u32 {name}, {name}, 17;",
        f"and.b32 {name}, {name}, 0xFFFFFFFC;", f"cvt.u64.u32 a, {name};", "add.s64 b, a, k;", "ld.global.nc.b32 e, [b];",
        f"setp.ge.s32 p, {difference}, e;", "add.s64 a, a, o;", "@p add.s64 a, a, 4;", f"ld.global.nc.b32 {name}, [a];",
    ]  # fmt: skip


def find_codes(later: bool, masks: bool, cells: int, first_cell: int) -> Block:
    """(time of a row, time of a column, least and most time of the warp's rows, of the tile's columns, address of the edges, of the cells'
    edges): codes. With ``masks`` those of up to four buckets in a tile whose rows are all ``later`` than its columns, or all earlier: for
    each of three edges a bit a pair, whether its times are as far apart, and a word with the sign set, the number of edges (bits 8 and 9)
    and the lowest bucket; else a byte a pair, its bucket."""
    row, column = [f"${_CODES + n}" for n in range(_PAIRS)], [f"${_CODES + _PAIRS + n}" for n in range(_PAIRS)]
    low, high, column_low, column_high, edges, at_cells = (f"${_CODES + k * _PAIRS}" for k in range(2, 8))
    lines = [
        ".reg .b32 d, near, far, lo, n, e, c<4>, x0, x1;", ".reg .b64 a, b, k, o;", ".reg .f32 f;", ".reg .pred p, q;",
        f"sub.s64 k, {at_cells}, {4 * first_cell};", f"add.s64 o, k, {4 * (cells + 1)};",
        f"sub.s32 near, {low}, {column_high};", f"sub.s32 d, {column_low}, {high};", "max.s32 near, near, d;", "max.s32 near, near, 0;",
        f"sub.s32 far, {high}, {column_low};", f"sub.s32 d, {column_high}, {low};", "max.s32 far, far, d;", "max.s32 far, far, near;",
        *bucket_of("near", "lo"), *bucket_of("far", "n"), "sub.s32 n, n, lo;",
        f"setp.lt.s32 q, {low if later else column_low}, {column_high if later else high};",
        "setp.gt.and.s32 p, n, 0, q;", "@p bra.uni BYTES;", "setp.gt.s32 p, n, 3;", "@p bra.uni BYTES;",
    ]  # fmt: skip
    if masks:
        lines += [f"mov.b32 ${k}, 0;" for k in range(_CODES)]
        lines += ["shl.b32 d, n, 8;", "or.b32 d, d, lo;", "or.b32 $3, d, 0x80000000;"]
    else:
        lines += ["mul.lo.u32 d, lo, 0x01010101;", *(f"mov.b32 ${k}, d;" for k in range(_CODES))]
    lines += ["mul.wide.u32 a, lo, 4;", f"add.s64 a, a, {edges};"]
    for edge in range(3):
        lines += [f"setp.le.s32 p, n, {edge};", "@p bra.uni DONE;", f"ld.global.nc.b32 e, [a+{4 * edge}];"]
        lines += [f"{'sub' if later else 'add'}.s32 x{half}, {row[2 * half]}, e;" for half in range(2)]
        for n in range(_PAIRS):
            lines.append(f"setp.{'le' if later else 'ge'}.s32 p, {column[n]}, x{n // 2 % 2};")
            lines.append(f"@p or.b32 ${edge}, ${edge}, {1 << n};" if masks else f"@p add.u32 ${n // 4}, ${n // 4}, {1 << 8 * (n % 4)};")
    lines += ["bra.uni DONE;", "BYTES:"]
    for word in range(_CODES):
        for n in range(4):
            pair = 4 * word + n
            lines += [f"sub.s32 d, {row[pair]}, {column[pair]};", "abs.s32 d, d;", *bucket_of("d", f"c{n}")]
        lines += ["prmt.b32 c0, c0, c1, 0x0040;", "prmt.b32 c2, c2, c3, 0x0040;", f"prmt.b32 ${word}, c0, c2, 0x5410;"]
    return _block([*lines, "DONE:"], ("=&r", _CODES), ("r", 6 * _PAIRS), ("l", 2 * _PAIRS))


def store_codes() -> Block:
    """(codes, address): zeros."""
    lines = [
        _OWN.format("$16"), "st.global.v4.b32 [a], {$8, $9, $10, $11};", "st.global.v4.b32 [a+2048], {$12, $13, $14, $15};",
    ]  # fmt: skip
    return _block([*lines, *_zeros()], ("=r", _CODES), ("r", _CODES), ("l", _PAIRS))


def _each_bit(mask: str) -> list[tuple[int, list[str]]]:
    """For each pair lines that set q to whether its bit is set."""
    return [(n, [f"and.b32 t, {mask}, {1 << n};", "setp.ne.u32 q, t, 0;"]) for n in range(_PAIRS)]


def _with_time(following: bool, codes: list[str], table: str, gain: str | None) -> list[str]:
    """Lines that add the entry of each code to the results: from the lane of that number of ``table``, or from that address and times
    ``gain``. ``following``: of row g + 8 only the first two are there, the others are those of row g before the addition."""
    lines = []
    for n, source in _sources(following):
        lines.append(f"prmt.b32 t, {codes[n // 4]}, 0, 0x444{n % 4};")
        if gain is None:
            lines += [f"shfl.sync.idx.b32 w, {table}, t, 31, 0xffffffff;", f"add.f32 ${n}, ${source}, w;"]
        else:
            lines += [f"mad.wide.u32 at, t, 4, {table};", "ld.global.nc.f32 w, [at];", f"fma.rn.f32 ${n}, w, {gain}, ${source};"]
    return [*lines, "bra.uni DONE;"]


def _sources(following: bool) -> list[tuple[int, int]]:
    """(result, what it is added to), in an order in which nothing is overwritten that is yet to be read."""
    order = sorted(range(_PAIRS), key=lambda n: n % 4 < 2)
    return [(n, n - 6 if following and n % 4 >= 2 and n > 3 else n) for n in order]


def biased(by_lanes: bool, keys: bool, masks: bool) -> Block:
    """(codes, distance of a row to the tile's first column, whether all rows follow each other, address of distance 0, table): the sum of
    the position's entry and the time's of each pair. The entry of a code comes from the lane of that number, or from an address and times
    another operand. With ``keys`` distances fall from column to column, and not below a further operand, the row's least. The position
    table has each entry's successor beside it, with ``keys`` its predecessor, 8 bytes an entry.

    Where rows follow each other, row g + 8 has at columns 8 k + 8 .. what row g has at 8 k .. : nine loads of a pair. Rows that do not are
    candidates (queries), or see some (keys). What most tiles take comes first, and without branches for up to two buckets.
    """
    codes = [f"${_PAIRS + n}" for n in range(_CODES)]
    first = _PAIRS + _CODES
    distance, straight, at = f"${first}", f"${first + _PAIRS}", f"${first + 2 * _PAIRS}"
    distance_8 = f"${first + 2}"
    table, more = f"${first + 3 * _PAIRS}", f"${first + 4 * _PAIRS}"
    gain, least = (None, more) if by_lanes else (more, f"${first + 5 * _PAIRS}")
    least_8 = f"${int(least[1:]) + 2}"
    lines = [
        ".reg .b32 c, x, y, d, t, h, n;", ".reg .b64 a, b, at;", ".reg .pred p, q, bytes;", ".reg .f32 v, w;",
        "mov.u32 c, %laneid;", "and.b32 c, c, 3;", "shl.b32 c, c, 1;",
    ]  # fmt: skip
    move, sign = ("sub", -1) if keys else ("add", 1)
    lines += [f"{move}.s32 x, {distance}, c;", f"setp.eq.s32 p, {straight}, 0;", f"mad.wide.s32 a, x, 8, {at};", "@p bra.uni APART;"]
    lines.append(f"ld.global.nc.v2.f32 {{$2, $3}}, [a+{-64 * sign}];")
    lines += [f"ld.global.nc.v2.f32 {{${4 * k}, ${4 * k + 1}}}, [a+{64 * sign * k}];" for k in range(_PAIRS // 4)]
    if masks:
        lowest = [
            f"mov.b32 h, {codes[3]};", "setp.ge.s32 bytes, h, 0;", f"shfl.sync.idx.b32 v, {table}, h, 31, 0xffffffff;",
            "add.u32 h, h, 1;", f"shfl.sync.idx.b32 w, {table}, h, 31, 0xffffffff;", "and.b32 n, h, 0x300;",
        ]  # fmt: skip
        lines += [*lowest, "@bytes bra.uni FOLLOWING;", *(f"add.f32 ${n}, ${source}, v;" for n, source in _sources(True)), "EDGES:"]
        for edge in range(3):
            if edge:
                lines += [f"setp.le.u32 p, n, {edge << 8};", "@p bra.uni DONE;", "add.u32 h, h, 1;", "mov.f32 v, w;"]
                lines.append(f"shfl.sync.idx.b32 w, {table}, h, 31, 0xffffffff;")
            lines.append("sub.f32 v, w, v;")
            lines += [x for n, test in _each_bit(codes[edge]) for x in (*test, f"@q add.f32 ${n}, ${n}, v;")]
        lines += ["bra.uni DONE;", "FOLLOWING:"]
    lines += [*_with_time(True, codes, table, gain), "APART:"]
    if keys:
        lines.append(f"sub.s32 y, {distance_8}, c;")
        for k in range(_PAIRS // 4):
            for half, of, low in ((0, "x", least), (2, "y", least_8)):
                n = 4 * k + half
                lines += [
                    f"max.s32 d, {of}, {low};", f"mad.wide.s32 b, d, 8, {at};", f"ld.global.nc.v2.f32 {{${n}, ${n + 1}}}, [b];",
                    f"setp.le.s32 p, {of}, {low};", f"selp.f32 ${n + 1}, ${n}, ${n + 1}, p;", f"add.s32 {of}, {of}, -8;",
                ]  # fmt: skip
    else:
        lines += [f"add.s32 y, {distance_8}, c;", f"mad.wide.s32 b, y, 8, {at};"]
        for k in range(_PAIRS // 4):
            lines += [f"ld.global.nc.v2.f32 {{${4 * k + m}, ${4 * k + m + 1}}}, [{r}+{64 * k}];" for m, r in ((0, "a"), (2, "b"))]
    if masks:
        lines += [*lowest, "@bytes bra.uni BYTES;", *(f"add.f32 ${n}, ${n}, v;" for n in range(_PAIRS)), "bra.uni EDGES;", "BYTES:"]
    lines += [*_with_time(False, codes, table, gain), "DONE:"]
    kinds = [("=&f", _PAIRS), ("r", _CODES), ("r", 2 * _PAIRS), ("l", _PAIRS)]
    kinds += [("f", _PAIRS)] if by_lanes else [("l", _PAIRS), ("f", _PAIRS)]
    return _block(lines, *kinds, *([("r", _PAIRS)] if keys else []))


def add_to_bins(stride: int = 0) -> Block:
    """(values, codes, address of the bins, with ``stride`` another): adds each value to the thread's bin of its code. A bin is 512 bytes on
    from the one before, and a thread's 4 from those of the thread before. A tile with masks has a sum for each of its buckets; else
    neighbours with one bin are added first, so that two loads are under way at a time. With ``stride`` the sums along diagonals are
    meanwhile added to the warp's row of that many floats, see `warp_sums.add_diagonals`."""
    then = ["{", *warp_sums.diagonals_added([f"${8 + n}" for n in range(_PAIRS)], "$80", stride), "}"] if stride else []
    values, codes = [f"${8 + n}" for n in range(_PAIRS)], [f"${40 + n}" for n in range(_CODES)]
    lines = [
        ".reg .b32 t, x, y, b, c, h, n, bin;", ".reg .f32 v, w, z, above, s<4>;", ".reg .pred p, q;",
        "mov.u32 bin, %tid.x;", "mad.lo.u32 bin, bin, 4, $48;", f"mov.b32 h, {codes[3]};", "setp.ge.s32 p, h, 0;", "@p bra.uni MANY;",
        "and.b32 n, h, 0x300;", "and.b32 t, h, 31;", "mad.lo.u32 bin, t, 512, bin;",
        *(f"mov.f32 s{k}, {values[k]};" for k in range(4)),
        *(f"add.f32 s{k % 4}, s{k % 4}, {values[k]};" for k in range(4, _PAIRS)),
        "add.f32 s0, s0, s1;", "add.f32 s2, s2, s3;", "add.f32 w, s0, s2;",
    ]  # fmt: skip
    for edge in range(3):
        lines += [f"setp.le.u32 p, n, {edge << 8};", "@p bra.uni LAST;", *(f"mov.f32 s{k}, 0f00000000;" for k in range(4))]
        for k, test in _each_bit(codes[edge]):
            lines += [*test, f"@q add.f32 s{k % 4}, s{k % 4}, {values[k]};"]
        lines += ["add.f32 s0, s0, s1;", "add.f32 s2, s2, s3;", "add.f32 above, s0, s2;", "sub.f32 w, w, above;"]
        lines += ["ld.shared.f32 v, [bin];", "add.f32 v, v, w;", "st.shared.f32 [bin], v;", "add.u32 bin, bin, 512;", "mov.f32 w, above;"]
    lines += ["LAST:", "ld.shared.f32 v, [bin];", "add.f32 v, v, w;", "st.shared.f32 [bin], v;", *then, "bra.uni DONE;", "MANY:"]
    for n in range(0, _PAIRS, 2):
        code, byte = codes[n // 4], n % 4
        lines += [
            f"prmt.b32 b, {code}, 0, 0x444{byte};", f"prmt.b32 c, {code}, 0, 0x444{byte + 1};",
            "mad.lo.u32 x, b, 512, bin;", "mad.lo.u32 y, c, 512, bin;", "ld.shared.f32 v, [x];", "ld.shared.f32 w, [y];",
            "setp.eq.u32 p, b, c;", f"add.f32 v, v, ${8 + n};", "selp.f32 z, v, w, p;", f"add.f32 z, z, ${9 + n};",
            "st.shared.f32 [x], v;", "st.shared.f32 [y], z;",
        ]  # fmt: skip
    kinds = [("=r", _CODES), ("f", _PAIRS), ("r", _CODES), ("r", _PAIRS), *([("l", _PAIRS)] if stride else [])]
    return _block([*lines, *then, "DONE:", *_zeros()], *kinds)


_GIVEN = ".reg .b32 t; mov.u32 t, %tid.x; and.b32 t, t, 127; mad.lo.u32 t, t, 16, {};"


def give(wide: bool) -> Block:
    """(values, address in shared memory): what `take` gives the same thread of another warpgroup; in bf16 but for ``wide``."""
    values = [f"${_CODES + n}" for n in range(_PAIRS)]
    lines = [_GIVEN.format(f"${_CODES + _PAIRS}")]
    if not wide:
        lines += [f".reg .b32 h<{_PAIRS // 2}>;"]
        lines += [f"cvt.rn.bf16x2.f32 h{n}, {values[2 * n + 1]}, {values[2 * n]};" for n in range(_PAIRS // 2)]
        values = [f"h{n}" for n in range(_PAIRS // 2)]
    lines += [f"st.shared.v4.b32 [t+{512 * n}], {{{', '.join(values[n : n + 4])}}};" for n in range(0, len(values), 4)]
    return _block([*lines, *_zeros()], ("=r", _CODES), ("f", _PAIRS), ("r", _PAIRS))


def take(wide: bool) -> Block:
    """(address in shared memory): values that were given."""
    lines = [_GIVEN.format(f"${_PAIRS}")]
    if wide:
        lines += [f"ld.shared.v4.f32 {{{', '.join(f'${n + k}' for k in range(4))}}}, [t+{512 * n}];" for n in range(0, _PAIRS, 4)]
    else:
        lines += [f".reg .b32 h<{_PAIRS // 2}>;"]
        lines += [f"ld.shared.v4.b32 {{{', '.join(f'h{n + k}' for k in range(4))}}}, [t+{512 * n}];" for n in range(0, _PAIRS // 2, 4)]
        for n in range(_PAIRS // 2):
            lines += [f"shl.b32 t, h{n}, 16;", f"mov.b32 ${2 * n}, t;", f"and.b32 h{n}, h{n}, 0xffff0000;", f"mov.b32 ${2 * n + 1}, h{n};"]
    return _block(lines, ("=&f", _PAIRS), ("r", _PAIRS))


def add_entries(by_lanes: bool) -> Block:
    """Of four pairs (S, codes, table): S and the entry of each code, from the lane of that number, or from an address and times a fourth
    operand."""
    lines = [".reg .b32 b; .reg .b64 a; .reg .f32 v;"]
    for n in range(4):
        lines.append(f"prmt.b32 b, $8, 0, 0x444{n};")
        lines += ["shfl.sync.idx.b32 v, $9, b, 31, 0xffffffff;"] if by_lanes else ["mad.wide.u32 a, b, 4, $9;", "ld.global.nc.f32 v, [a];"]
        lines.append(f"add.f32 ${n}, ${4 + n}, v;" if by_lanes else f"fma.rn.f32 ${n}, v, $13, ${4 + n};")
    return _block(lines, ("=&f", 4), ("f", 4), ("r", 1), *([("f", 4)] if by_lanes else [("l", 4), ("f", 4)]))


def row_entries() -> Block:
    """(distance of a row to the tile's first column, address): the entry at each pair's distance. The table has each entry's successor
    beside it, 8 bytes an entry; the address is that of distance 0."""
    lines = [
        ".reg .b32 c, x, y;", ".reg .b64 a, b;",
        "mov.u32 c, %laneid;", "and.b32 c, c, 3;", "shl.b32 c, c, 1;", "add.s32 x, c, $32;", "add.s32 y, c, $34;",
        "mad.wide.s32 a, x, 8, $64;", "mad.wide.s32 b, y, 8, $64;",
    ]  # fmt: skip
    for k in range(_PAIRS // 4):
        for half, at in ((0, "a"), (2, "b")):
            n = 4 * k + half
            lines.append(f"ld.global.nc.v2.f32 {{${n}, ${n + 1}}}, [{at}+{64 * k}];")
    return _block(lines, ("=&f", _PAIRS), ("r", _PAIRS), ("l", _PAIRS))
