"""For which GPUs a shared library holds CUDA code, read from the file: neither a GPU nor CUDA's tools are needed.

nvcc puts code into "fat binaries": a header of 16 bytes (magic number, version 1, header size, size of what follows), then entries, each a
header (kind 1: PTX, 2: machine code; sizes; at byte 28 the architecture; at byte 40 flags) and the code, which may be compressed.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

MAGIC = struct.pack("<I", 0xBA55ED50)
PTX, MACHINE_CODE = 1, 2
SPECIFIC = 0x100000
"""Flag of code that runs on its own architecture only ("sm_90a")."""


def archs_of(folder: Path) -> tuple[str, ...]:
    """The architectures ("sm_90a", "compute_120") of the smallest library in ``folder`` that holds CUDA code; empty if none does."""
    for path in sorted(folder.glob("*.so"), key=lambda path: path.stat().st_size):
        found = set(_entries(path))
        if found:
            return tuple(f"{'compute' if kind == PTX else 'sm'}_{arch}{'a' if specific else ''}" for kind, arch, specific in sorted(found))
    return ()


def _entries(path: Path) -> Iterator[tuple[int, int, bool]]:
    """(kind, architecture, whether it runs there only) of every entry."""
    if path.stat().st_size == 0:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = data.find(MAGIC)
        while at >= 0 and at + 16 <= len(data):
            version, header, size = struct.unpack_from("<HHQ", data, at + 4)
            end = at + header + size
            if version != 1 or header != 16 or end > len(data):
                at = data.find(MAGIC, at + 4)  # these bytes happen to be elsewhere as well
                continue
            entry = at + header
            while entry + 48 <= end:
                kind, _, entry_header, code = struct.unpack_from("<HHIQ", data, entry)
                (arch,) = struct.unpack_from("<I", data, entry + 28)
                (flags,) = struct.unpack_from("<Q", data, entry + 40)
                if kind not in (PTX, MACHINE_CODE) or entry_header < 48:
                    break
                yield kind, arch, bool(flags & SPECIFIC)
                entry += entry_header + code
            at = data.find(MAGIC, end)
