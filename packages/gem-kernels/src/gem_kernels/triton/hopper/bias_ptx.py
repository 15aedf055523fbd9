"""PTX of `bias_codes`: (text, constraints) of blocks for 64 x 64 pairs in the registers of a warpgroup, as `inline_asm_elementwise` packs
them.

Register n of a thread has row 8 (n / 2 % 2) + lane / 4 of its warp's 16 and column 8 (n / 4) + 2 (lane % 4) + n % 2. Codes are bytes, four
to a register. Operands count from the results on; of one that is the same for all pairs the first is used.
"""

from __future__ import annotations

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
    load = "ld.global.nc.L1::no_allocate.v4.b32"
    lines = [_OWN.format("$8"), f"{load} {{$0, $1, $2, $3}}, [a];", f"{load} {{$4, $5, $6, $7}}, [a+2048];"]
    return _block(lines, ("=&r", _CODES), ("l", _PAIRS))


def store_codes() -> Block:
    """(codes, address): zeros."""
    lines = [_OWN.format("$16"), "st.global.v4.b32 [a], {$8, $9, $10, $11};", "st.global.v4.b32 [a+2048], {$12, $13, $14, $15};"]
    return _block([*lines, *_zeros()], ("=r", _CODES), ("r", _CODES), ("l", _PAIRS))


def add_entries(by_lanes: bool) -> Block:
    """Of four pairs (S, codes, table): S and the entry of each code, from the lane of that number or from an address."""
    lines = [".reg .b32 b; .reg .b64 a; .reg .f32 v;"]
    for n in range(4):
        lines.append(f"prmt.b32 b, $8, 0, 0x444{n};")
        lines += ["shfl.sync.idx.b32 v, $9, b, 31, 0xffffffff;"] if by_lanes else ["mad.wide.u32 a, b, 4, $9;", "ld.global.nc.f32 v, [a];"]
        lines.append(f"add.f32 ${n}, ${4 + n}, v;")
    return _block(lines, ("=&f", 4), ("f", 4), ("r", 1), ("f" if by_lanes else "l", 4))


def add_to_bins() -> Block:
    """(values, codes, address): adds each value to the thread's bin of its code. A bin is 1024 bytes on from the one before, and a thread's
    4 from those of the thread before. Neighbours with one bin are added first, so that two loads are under way at a time."""
    values, codes = [f"${8 + n}" for n in range(_PAIRS)], [f"${40 + n}" for n in range(_CODES)]
    lines = [
        ".reg .b32 t, f, m, x, y, b, c;", f".reg .f32 v, w, z, s<{_PAIRS}>;", ".reg .pred p, q;",
        "mov.u32 t, %tid.x;", "mad.lo.u32 t, t, 4, $48;", f"prmt.b32 f, {codes[0]}, 0, 0x0000;", "mov.b32 m, 0;",
    ]  # fmt: skip
    for code in codes:
        lines += [f"xor.b32 x, f, {code};", "or.b32 m, m, x;"]
    lines += ["setp.ne.s32 p, m, 0;", "vote.sync.any.pred q, p, 0xffffffff;", "@q bra MANY;"]
    sums = 0
    while len(values) > 1:
        lines += [f"add.f32 s{sums + n}, {a}, {b};" for n, (a, b) in enumerate(zip(values[::2], values[1::2]))]
        values = [f"s{sums + n}" for n in range(len(values) // 2)]
        sums += len(values)
    lines += [
        "and.b32 f, f, 255;", "mad.lo.u32 x, f, 1024, t;", "ld.shared.f32 v, [x];", f"add.f32 v, v, {values[0]};", "st.shared.f32 [x], v;",
        "bra DONE;", "MANY:",
    ]  # fmt: skip
    for n in range(0, _PAIRS, 2):
        code, byte = codes[n // 4], n % 4
        lines += [
            f"prmt.b32 b, {code}, 0, 0x444{byte};", f"prmt.b32 c, {code}, 0, 0x444{byte + 1};",
            "mad.lo.u32 x, b, 1024, t;", "mad.lo.u32 y, c, 1024, t;", "ld.shared.f32 v, [x];", "ld.shared.f32 w, [y];",
            "setp.eq.u32 p, b, c;", f"add.f32 v, v, ${8 + n};", "selp.f32 z, v, w, p;", f"add.f32 z, z, ${9 + n};",
            "st.shared.f32 [x], v;", "st.shared.f32 [y], z;",
        ]  # fmt: skip
    return _block([*lines, "DONE:", *_zeros()], ("=r", _CODES), ("f", _PAIRS), ("r", _CODES), ("r", _PAIRS))


def add_rows() -> Block:
    """(S, scale, distance of a row to the tile's first column, address): scale S and the entry at each pair's distance. The table has each
    entry's successor beside it, 8 bytes an entry; the address is that of distance 0."""
    lines = [
        ".reg .b32 c, x, y;", ".reg .b64 a, b;", ".reg .f32 v, w;",
        "mov.u32 c, %laneid;", "and.b32 c, c, 3;", "shl.b32 c, c, 1;", "add.s32 x, c, $96;", "add.s32 y, c, $98;",
        "mad.wide.s32 a, x, 8, $128;", "mad.wide.s32 b, y, 8, $128;",
    ]  # fmt: skip
    for k in range(_PAIRS // 4):
        for half, at in ((0, "a"), (2, "b")):
            n = 4 * k + half
            lines.append(f"ld.global.nc.v2.f32 {{v, w}}, [{at}+{64 * k}];")
            lines += [f"fma.rn.f32 ${n}, ${32 + n}, $64, v;", f"fma.rn.f32 ${n + 1}, ${33 + n}, $64, w;"]
    return _block(lines, ("=&f", _PAIRS), ("f", 2 * _PAIRS), ("r", _PAIRS), ("l", _PAIRS))


def add_columns() -> Block:
    """(S, scale, distance of a row to the tile's second column, least distance of a row, address): `add_rows` where distances fall from
    column to column, but not below the row's least."""
    lines = [
        ".reg .b32 c, x, y, d;", ".reg .b64 a;", ".reg .f32 v, w;", ".reg .pred p;",
        "mov.u32 c, %laneid;", "and.b32 c, c, 3;", "shl.b32 c, c, 1;", "sub.s32 x, $96, c;", "sub.s32 y, $98, c;",
    ]  # fmt: skip
    for k in range(_PAIRS // 4):
        for half, at, least in ((0, "x", "$128"), (2, "y", "$130")):
            n = 4 * k + half
            lines += [
                f"setp.lt.s32 p, {at}, {least};", f"max.s32 d, {at}, {least};", "mad.wide.s32 a, d, 8, $160;",
                "ld.global.nc.v2.f32 {v, w}, [a];", "selp.f32 w, v, w, p;", f"add.s32 {at}, {at}, -8;",
                f"fma.rn.f32 ${n}, ${32 + n}, $64, w;", f"fma.rn.f32 ${n + 1}, ${33 + n}, $64, v;",
            ]  # fmt: skip
    return _block(lines, ("=&f", _PAIRS), ("f", 2 * _PAIRS), ("r", 2 * _PAIRS), ("l", _PAIRS))
