"""Measurements of whole training steps (`step`, `ladder`) and of a model's parts alone (`local`)."""

from __future__ import annotations


def of_preset(preset: str) -> tuple[str, ...]:
    """Overrides: the model of a preset of gem on the random log that goes with it."""
    return ("data.source=random", f"data.random.preset={preset}", f"model.preset={preset}")
