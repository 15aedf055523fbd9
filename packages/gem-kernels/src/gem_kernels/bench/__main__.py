"""``python -m gem_kernels.bench <family> [options]``: runs ``gem_kernels.bench.<family>.main``."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys

import gem_kernels.bench as package

_SHARED = {"__main__", "timing", "report", "attention_rows", "attention_peers"}


def main(argv: list[str]) -> int:
    families = sorted(m.name for m in pkgutil.iter_modules(package.__path__) if m.name not in _SHARED and not m.name.startswith("_"))
    if not argv or argv[0] not in families:
        print(f"usage: python -m gem_kernels.bench {{{','.join(families)}}} [--help]", file=sys.stderr)
        return 0 if argv[:1] in (["-h"], ["--help"]) else 2
    return importlib.import_module(f"gem_kernels.bench.{argv[0]}").main(argv[1:])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
