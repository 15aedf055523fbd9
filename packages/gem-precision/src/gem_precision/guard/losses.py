"""Is a loss out of the ordinary?"""

from __future__ import annotations

import math
import statistics
from collections import deque

from gem_precision.guard.config import GuardConfig


class LossWatch:
    """Keeps the last finite losses and tells a spike from them: ``median + k · 1.4826 · MAD``."""

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self.history: deque[float] = deque(maxlen=config.spike_window)
        self.nonfinite_in_a_row = 0

    def see(self, loss: float) -> str | None:
        """None, or what is wrong: "nonfinite", or "spike" (which does not enter the history)."""
        if not math.isfinite(loss):
            self.nonfinite_in_a_row += 1
            return "nonfinite"
        self.nonfinite_in_a_row = 0
        spikes = len(self.history) >= self.config.spike_window // 2 and loss > self.limit()
        if spikes:
            return "spike"
        self.history.append(loss)
        return None

    def limit(self) -> float:
        median = statistics.median(self.history)
        mad = statistics.median(abs(x - median) for x in self.history)
        return max(median + self.config.spike_mads * 1.4826 * mad, median + self.config.spike_relative * abs(median))
