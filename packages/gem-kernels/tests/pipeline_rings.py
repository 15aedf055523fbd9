"""Finds tiles that a pipelined load overwrites while a product still reads them, in the intermediate form (TTGIR) of a kernel.

A ring of ``slots`` tiles is filled ``ahead`` steps before its use. A load at the end of a step goes to the slot of the tile ``ahead`` steps
on, which is the slot in use where ``ahead`` reaches ``slots``. Triton 3.6 leaves one slot more for a wgmma under way, but not where
registers read the tile too.
"""

from __future__ import annotations

import re

_RING = re.compile(r"\s*(%\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x")
_VIEW = re.compile(r"\s*(%\w+) = ttg\.memdesc_\w+ (%\w+)")


def overrun(ttgir: str) -> list[str]:
    """``slots/ahead`` of every ring that asynchronous products read and that is filled as many steps ahead as it has slots."""
    slots: dict[str, int] = {}
    ring_of: dict[str, str] = {}
    copies: dict[str, list[int]] = {}
    multiplied: set[str] = set()
    for line in ttgir.splitlines():
        if found := _RING.match(line):
            slots[found[1]] = int(found[2])
            ring_of[found[1]] = found[1]
        elif (found := _VIEW.match(line)) and found[2] in ring_of:
            ring_of[found[1]] = ring_of[found[2]]
        elif "async_tma_copy_global_to_local" in line or "ttg.async_copy_global_to_local" in line:
            for name in re.findall(r"%\w+", line):
                if name in ring_of:
                    copies.setdefault(ring_of[name], []).append(len(line) - len(line.lstrip()))
                    break
        elif "warp_group_dot " in line and "isAsync = true" in line:
            multiplied |= {ring_of[name] for name in re.findall(r"%\w+", line) if name in ring_of}
    found_rings = []
    for ring in multiplied:
        depths = copies.get(ring, [])
        ahead = sum(1 for depth in depths if depth < max(depths, default=0))
        if ahead and ahead >= slots[ring]:
            found_rings.append(f"{slots[ring]} slots, filled {ahead} ahead")
    return found_rings
