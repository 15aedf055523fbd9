"""Every implementation of this package at small shapes, to be run under compute-sanitizer::

    python packages/gem-kernels/tests/sanitize.py                                     # compiles, without the tool
    compute-sanitizer --tool memcheck  --error-exitcode 1 python packages/gem-kernels/tests/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python packages/gem-kernels/tests/sanitize.py

``--ops`` and ``--impls`` choose among ops and implementations. Processes that are given the same empty folder as ``--share`` divide the
calls among themselves; ``--seconds`` begins no call after that time, so that the tool still reports.
``--control`` runs kernels of a few lines instead, whose order is plain: what racecheck reports of them it cannot see, see
`sanitize_control.py`.
With ``--target-processes application-only --kernel-name-exclude kns=at6native`` the tool leaves compilers and PyTorch's own kernels alone.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from pathlib import Path

import sanitize_control
import torch
from sanitize_calls import entries

from gem_core import plugins


def claim(folder: Path | None, number: int) -> bool:
    """Whether this process is the first to ask for call ``number``."""
    try:
        return folder is None or not (folder / str(number)).touch(exist_ok=False)
    except FileExistsError:
        return False


def main() -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="*", default=[])
    parser.add_argument("--impls", nargs="*", default=[])
    parser.add_argument("--share", type=Path)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--control", action="store_true")
    given = parser.parse_args()
    if given.control:
        sanitize_control.main()
        return
    plugins.manager()
    torch.zeros(1, device="cuda")
    print(f"{time.monotonic() - began:.1f} s: ready", flush=True)
    ran = failed = 0
    for number, entry in enumerate(entries(given.ops, given.impls)):
        if time.monotonic() - began > given.seconds:
            print("out of time")
            break
        if not claim(given.share, number):
            continue
        told = f"{entry.op} {entry.implementation}: {entry.name}"
        try:
            done = entry.run()
            torch.cuda.synchronize()
        except Exception:  # what the tool finds ends a kernel: the other calls still run
            failed += 1
            print(f"failed: {told}\n{traceback.format_exc()}", flush=True)
            continue
        if done:
            ran += 1
            print(f"{time.monotonic() - began:.1f} s: {told}", flush=True)
    print(f"{ran} calls, forward and backward; {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
