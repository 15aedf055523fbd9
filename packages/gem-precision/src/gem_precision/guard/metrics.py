"""From the sums that a site keeps on the device to numbers that a person or a threshold understands."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from gem_precision.guard.config import GuardConfig
from gem_precision.site import SUMS

Metrics = Mapping[str, float]


def metrics(sums: Sequence[float]) -> dict[str, float]:
    """amax; shares ``saturation`` and ``underflow``; ``sqnr_db``; ``cosine``; ``relative_error`` (MERE); ``norm`` (root of the sum of
    squares); counts ``dead``, ``spoiled``, ``bad`` as in `SUMS`. Infinite SQNR is given as 200 dB."""
    s = dict(zip(SUMS, sums))
    count = max(s["count"], 1.0)
    signal, error = s["signal"], s["error"]
    both = math.sqrt(signal) * math.sqrt(s["coded"])
    return {
        "amax": s["amax"],
        "saturation": s["saturated"] / count,
        "underflow": s["flushed"] / count,
        "sqnr_db": min(10 * math.log10(signal / error), 200.0) if error > 0 and signal > 0 else 200.0,
        "cosine": s["dot"] / both if both > 0 else 1.0 if signal == 0 else 0.0,
        "relative_error": s["relative"] / count,
        "norm": math.sqrt(signal),
        "dead": s["dead"],
        "spoiled": s["spoiled"],
        "bad": s["bad"],
    }


def violations(m: Metrics, config: GuardConfig) -> list[tuple[str, bool]]:
    """(which threshold is crossed, whether that is a fault rather than a matter of degree)."""
    found: list[tuple[str, bool]] = []
    if m["spoiled"] and not m["bad"]:
        found.append(("spoiled", True))
    if m["dead"]:
        found.append(("dead", True))
    if m["saturation"] > config.max_saturation:
        found.append(("saturation", False))
    if m["underflow"] > config.max_underflow:
        found.append(("underflow", False))
    if m["relative_error"] > config.max_relative_error:
        found.append(("relative_error", False))
    if m["sqnr_db"] < config.min_sqnr_db:
        found.append(("sqnr_db", False))
    if m["cosine"] < config.min_cosine:
        found.append(("cosine", False))
    return found
