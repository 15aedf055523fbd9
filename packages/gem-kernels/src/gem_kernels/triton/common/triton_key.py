"""The hash of Triton's own files, which is part of the name of whatever it compiles, kept on disk.

Triton 3.6 works it out before the first kernel of every process, from more than 400 MB: a quarter of a second, most of a first call whose
kernels are all in the cache.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from pathlib import Path

from gem_kernels.triton.common.tune import cache_folder


@functools.cache
def keep() -> None:
    """From now on Triton's `triton_key` is what an earlier process worked out for the same files: by place, sizes and times of change."""
    from triton.runtime import cache

    work_out = getattr(cache, "triton_key", None)
    found = files(Path(cache.__file__).parents[1])
    if work_out is None or not any(name.startswith("_C") for name, *_ in found):
        return  # another Triton, whose key may be of other files
    path = cache_folder() / f"triton-{hashlib.sha256(repr((cache.__file__, found)).encode()).hexdigest()[:32]}.txt"

    @functools.cache
    def kept() -> str:
        with contextlib.suppress(OSError):
            return path.read_text()
        key = work_out()
        with contextlib.suppress(OSError):  # a folder that cannot be written to costs the next process time, and nothing else
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(f".{os.getpid()}.part")
            part.write_text(key)
            os.replace(part, path)
        return key

    cache.triton_key = kept


def files(root: Path) -> list[tuple[str, int, int]]:
    """(name, bytes, time of the last change in ns) of what the key is of, and its place."""
    every = [p for folder in ("compiler", "backends", "language") for p in (root / folder).rglob("*.py")]
    every += [root / "runtime" / "cache.py", *(root / "_C").glob("libtriton.*")]
    return sorted((str(p.relative_to(root)), (s := p.stat()).st_size, s.st_ctime_ns) for p in every)
