"""Compiles the C of this folder with the machine's own compiler, once, and loads it.

The library goes to ``$GEM_CACHE_DIR/native`` (``~/.cache/gem`` without the variable), under a name made of the sources, the compiler and
the processor. ``CC`` names another compiler than the first of cc, gcc and clang.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from functools import lru_cache
from pathlib import Path

log = logging.getLogger("gem_kernels.native")
FLAGS = ("-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
FOLDER = Path(__file__).parent


def load() -> ctypes.CDLL:
    """The compiled kernels.

    :raises OSError: there is no C compiler, or it fails; with the reason.
    """
    found = _loaded()
    if isinstance(found, str):
        raise OSError(found)
    return found


def reason() -> str:
    """Why `load` fails; empty where it does not. The first call compiles (a second or two), later processes find the file."""
    found = _loaded()
    return found if isinstance(found, str) else ""


@lru_cache(maxsize=1)
def _loaded() -> ctypes.CDLL | str:
    compiler = _compiler()
    if compiler is None:
        return "no C compiler (set CC, or install gcc or clang)"
    try:
        return ctypes.CDLL(str(_library(compiler)))
    except subprocess.CalledProcessError as error:
        return f"{shlex.join(compiler)} failed: {error.stderr.strip()[-500:]}"
    except OSError as error:
        return f"the compiled kernels cannot be kept or loaded: {error}"


def _compiler() -> list[str] | None:
    named = os.environ.get("CC")
    for command in [named] if named else ["cc", "gcc", "clang"]:
        words = shlex.split(command)
        if words and shutil.which(words[0]):
            return words
    return None


def _library(compiler: list[str]) -> Path:
    sources = sorted(FOLDER.glob("*.c"))
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout
    key = hashlib.sha256("\n".join([version, _processor(), *FLAGS]).encode())
    for path in (*sources, *FOLDER.glob("*.h")):
        key.update(path.read_bytes())
    cache = Path(os.environ.get("GEM_CACHE_DIR") or Path.home() / ".cache" / "gem") / "native"
    wanted = cache / f"native-{key.hexdigest()[:16]}.so"
    if wanted.is_file():
        return wanted
    cache.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        made = Path(folder) / wanted.name
        tail = [*FLAGS, *map(str, sources), "-o", str(made), "-lm"]
        tuned = subprocess.run([*compiler, "-march=native", *tail], capture_output=True, text=True)
        if tuned.returncode:  # compilers for some processors do not know that flag
            subprocess.run([*compiler, *tail], capture_output=True, text=True, check=True)
        made.replace(wanted)  # at once, so that another process never loads half a file
    log.info("compiled %s with %s in %.1f s", wanted, compiler[0], time.monotonic() - began)
    return wanted


def _processor() -> str:
    """What ``-march=native`` depends on: home folders are shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name", "CPU part"))}))
