"""Measurements of whole training steps (`step`, `ladder`) and of a model's parts alone (`local`)."""
