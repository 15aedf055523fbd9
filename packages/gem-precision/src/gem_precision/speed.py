"""Is a quantised linear faster than bf16 here? Measurements of ``speed/<architecture>.json``, made by ``gemrec bench precision``.

The file: ``{"hardware", "command", "date", "rules": [{"family", "k", "n", "ratio"}]}``; ``ratio`` is bf16 time over quantised time of
forward and backward, quantising included, at M = 262,144.
"""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any

import torch

from gem_core.ops.contract import YES, Supported, no
from gem_precision.policy import LinearPolicy

NARROW = 1024
"""Without a measurement, real FP8 is refused where in or out features are below this."""


@functools.lru_cache(maxsize=8)
def table(arch: str) -> dict[str, Any] | None:
    file = resources.files("gem_precision").joinpath("speed", f"{arch}.json")
    return json.loads(file.read_text()) if file.is_file() else None


def pays(policy: LinearPolicy, k: int, n: int, device: torch.device) -> Supported:
    """Whether a linear of ``k`` in and ``n`` out features is at least as fast as in bf16 on ``device``; the measurement where it is not.

    Emulation (MX below sm_100, anything on a CPU) is never faster and is not what this is about: it is there for its numbers.
    """
    if device.type != "cuda" or policy.fprop.a is None or policy.backend == "emulated":
        return YES
    major, minor = torch.cuda.get_device_capability(device)
    if policy.fprop.a.format == "mx" and major < 10:
        return YES
    family, arch = f"{policy.fprop.a.format}{policy.fprop.a.block[1]}", f"sm_{major}{minor}"
    measured = table(arch)
    nearest = None
    if measured is not None:
        rules = [r for r in measured["rules"] if r["family"] == family and r["k"] <= k and r["n"] <= n]
        nearest = max(rules, key=lambda r: (r["k"] * r["n"], r["k"]), default=None)
    if nearest is None:
        if min(k, n) < NARROW:
            return no(f"{k} -> {n} is narrower than {NARROW} and not measured to be faster than bf16 on {arch}")
        return YES
    if nearest["ratio"] < 1:
        return no(f"{nearest['ratio']:.2f} x bf16 measured at {nearest['k']} -> {nearest['n']} on {arch}")
    return YES
