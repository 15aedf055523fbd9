"""PTX of `bias_codes`: (text, constraints) of blocks for 64 x 64 pairs in the registers of a warpgroup, as `inline_asm_elementwise` packs
them.

Register n of a thread has row 8 (n / 2 % 2) + lane / 4 of its warp's 16 and column 8 (n / 4) + 2 (lane % 4) + n % 2. Codes are bytes, four
to a register. Operands count from the results on; of one that is the same for all pairs the first is used.
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


def count_reached(later: bool, edges: int) -> Block:
    """(time of a row, time of a column, bucket, ``edges`` edges): codes, the bucket and one more for each edge that the times, of which the
    row's is the ``later`` one or the earlier, are at least apart."""
    lines = [".reg .b32 c;", *(f".reg .b32 a{e}, b{e};" for e in range(edges)), ".reg .pred p;", "mul.lo.u32 c, $72, 0x01010101;"]
    for e in range(edges):
        lines += [f"{'sub' if later else 'add'}.s32 {name}{e}, ${8 + row}, ${104 + 32 * e};" for name, row in (("a", 0), ("b", 2))]
    lines += [f"mov.b32 ${n}, c;" for n in range(_CODES)]
    for n in range(_PAIRS):
        for e in range(edges):
            reached = f"setp.{'le' if later else 'ge'}.s32 p, ${40 + n}, {'ab'[n // 2 % 2]}{e};"
            lines += [reached, f"@p add.u32 ${n // 4}, ${n // 4}, {1 << 8 * (n % 4)};"]
    return _block(lines, ("=&r", _CODES), ("r", (3 + edges) * _PAIRS))


def count_by_cell() -> Block:
    """Of four pairs (time of a row, time of a column, edges of the cells, buckets at their beginnings): codes. The addresses are those of a
    cell whose number would be the bits of a float (`gem_kernels.triton.attention.bias_tables`)."""
    lines = [".reg .b32 d, c, e, b<4>;", ".reg .b64 a, o;", ".reg .f32 f;", ".reg .pred p;"]
    for n in range(4):
        lines += [
            f"sub.s32 d, ${1 + n}, ${5 + n};", "abs.s32 d, d;", "cvt.rn.f32.s32 f, d;", "max.f32 f, f, 0f3F000000;", "mov.b32 c, f;",
            "shr.u32 c, c, 17;", "and.b32 c, c, 0xFFFFFFFC;", "cvt.u64.u32 o, c;", "add.s64 a, o, $9;", "ld.global.nc.b32 e, [a];",
            "setp.ge.s32 p, d, e;", "@p add.s32 c, c, 4;", "cvt.u64.u32 o, c;", "add.s64 a, o, $13;", f"ld.global.nc.b32 b{n}, [a];",
        ]  # fmt: skip
    lines += ["prmt.b32 b0, b0, b1, 0x0040;", "prmt.b32 b2, b2, b3, 0x0040;", "prmt.b32 $0, b0, b2, 0x5410;"]
    return _block(lines, ("=r", 1), ("r", 8), ("l", 8))


def store_codes(gray: bool) -> Block:
    """(codes, address): zeros. With ``gray`` buckets that follow each other get codes that differ in one bit."""
    shifted = [
        line for n in range(8, 16) for line in (f"shr.u32 t, ${n}, 1;", "and.b32 t, t, 0x7f7f7f7f;", f"xor.b32 ${n}, ${n}, t;") if gray
    ]  # fmt: skip
    lines = [
        _OWN.format("$16"), *shifted, "st.global.v4.b32 [a], {$8, $9, $10, $11};", "st.global.v4.b32 [a+2048], {$12, $13, $14, $15};",
    ]  # fmt: skip
    return _block([*lines, *_zeros()], ("=r", _CODES), ("r", _CODES), ("l", _PAIRS))


def add_entries(by_lanes: bool) -> Block:
    """Of four pairs (S, codes, table): S and the entry of each code, from the lane of that number, or from an address and times a fourth
    operand."""
    lines = [".reg .b32 b; .reg .b64 a; .reg .f32 v;"]
    for n in range(4):
        lines.append(f"prmt.b32 b, $8, 0, 0x444{n};")
        lines += ["shfl.sync.idx.b32 v, $9, b, 31, 0xffffffff;"] if by_lanes else ["mad.wide.u32 a, b, 4, $9;", "ld.global.nc.f32 v, [a];"]
        lines.append(f"add.f32 ${n}, ${4 + n}, v;" if by_lanes else f"fma.rn.f32 ${n}, v, $13, ${4 + n};")
    return _block(lines, ("=&f", 4), ("f", 4), ("r", 1), *([("f", 4)] if by_lanes else [("l", 4), ("f", 4)]))


def add_to_bins(stride: int = 0) -> Block:
    """(values, codes, address of the bins, with ``stride`` another): adds each value to the thread's bin of its code. A bin is 512 bytes on
    from the one before, and a thread's 4 from those of the thread before. A warp whose codes are two that differ in a bit adds two sums;
    otherwise neighbours with one bin are added first, so that two loads are under way at a time. With ``stride`` the sums along diagonals
    are meanwhile added to the warp's row of that many floats, see `warp_sums.add_diagonals`."""
    then = ["{", *warp_sums.diagonals_added([f"${8 + n}" for n in range(_PAIRS)], "$80", stride), "}"] if stride else []
    values, codes = [f"${8 + n}" for n in range(_PAIRS)], [f"${40 + n}" for n in range(_CODES)]
    lines = [
        ".reg .b32 t, x, y, b, c, m<4>;", ".reg .f32 v, w, z, s<8>;", ".reg .pred p;",
        "mov.u32 t, %tid.x;", "mad.lo.u32 t, t, 4, $48;", f"mov.b32 x, {codes[0]};", f"mov.b32 y, {codes[0]};",
    ]  # fmt: skip
    for code in codes[1:]:
        lines += [f"or.b32 x, x, {code};", f"and.b32 y, y, {code};"]
    for bits in (16, 8):
        lines += [f"shr.u32 b, x, {bits};", "or.b32 x, x, b;", f"shr.u32 b, y, {bits};", "and.b32 y, y, b;"]
    lines += [
        "redux.sync.or.b32 x, x, 0xffffffff;", "redux.sync.and.b32 y, y, 0xffffffff;", "and.b32 x, x, 255;", "and.b32 y, y, 255;",
        "xor.b32 m0, x, y;", "add.s32 b, m0, -1;", "and.b32 b, b, m0;", "setp.ne.s32 p, b, 0;", "@p bra MANY;",
        *(f"shl.b32 m{n}, m0, {8 * n};" for n in range(1, 4)), *(f"mov.f32 s{n}, 0f00000000;" for n in range(8)),
    ]  # fmt: skip
    for n, value in enumerate(values):
        lines += [
            f"and.b32 b, {codes[n // 4]}, m{n % 4};", "setp.ne.s32 p, b, 0;",
            f"@p add.f32 s{n % 4}, s{n % 4}, {value};", f"@!p add.f32 s{4 + n % 4}, s{4 + n % 4}, {value};",
        ]  # fmt: skip
    lines += [f"add.f32 s{n}, s{n}, s{n + step};" for step in (2, 1) for first in (0, 4) for n in range(first, first + step)]
    lines += [
        "mad.lo.u32 y, y, 512, t;", "ld.shared.f32 v, [y];", "add.f32 v, v, s4;", "st.shared.f32 [y], v;",
        "mad.lo.u32 x, x, 512, t;", "ld.shared.f32 v, [x];", "add.f32 v, v, s0;", "st.shared.f32 [x], v;",
        *then, "bra DONE;", "MANY:",
    ]  # fmt: skip
    for n in range(0, _PAIRS, 2):
        code, byte = codes[n // 4], n % 4
        lines += [
            f"prmt.b32 b, {code}, 0, 0x444{byte};", f"prmt.b32 c, {code}, 0, 0x444{byte + 1};",
            "mad.lo.u32 x, b, 512, t;", "mad.lo.u32 y, c, 512, t;", "ld.shared.f32 v, [x];", "ld.shared.f32 w, [y];",
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


def column_entries(cut: bool) -> Block:
    """(distance of a row to the tile's first column, least distance of a row, address): `row_entries` where distances fall from column to
    column, with ``cut`` not below the row's least. The table has each entry's predecessor beside it."""
    lines = [
        ".reg .b32 c, x, y, d;", ".reg .b64 a, b;", ".reg .pred p;",
        "mov.u32 c, %laneid;", "and.b32 c, c, 3;", "shl.b32 c, c, 1;", "sub.s32 x, $32, c;", "sub.s32 y, $34, c;",
    ]  # fmt: skip
    if not cut:
        lines += ["mad.wide.s32 a, x, 8, $96;", "mad.wide.s32 b, y, 8, $96;"]
    for k in range(_PAIRS // 4):
        for half, at, to, least in ((0, "x", "a", "$64"), (2, "y", "b", "$66")):
            n = 4 * k + half
            if cut:
                lines += [
                    f"max.s32 d, {at}, {least};", "mad.wide.s32 a, d, 8, $96;", f"ld.global.nc.v2.f32 {{${n}, ${n + 1}}}, [a];",
                    f"setp.le.s32 p, {at}, {least};", f"selp.f32 ${n + 1}, ${n}, ${n + 1}, p;", f"add.s32 {at}, {at}, -8;",
                ]  # fmt: skip
            else:
                lines.append(f"ld.global.nc.v2.f32 {{${n}, ${n + 1}}}, [{to}+{-64 * k}];")
    return _block(lines, ("=&f", _PAIRS), ("r", 2 * _PAIRS), ("l", _PAIRS))
