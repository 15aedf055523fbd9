"""Thresholds and periods of the guard: ``[precision.<recipe>.guard]``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gem_core.config import FrozenConfig


class GuardConfig(FrozenConfig):
    """``[precision.<recipe>.guard]``. Defaults suit E4M3 in blocks of 32: mean relative error about 0.025, SQNR about 31 dB."""

    enabled: bool = True
    sample_every: int = Field(500, gt=0, description="steps between samples of all sites")
    patience: int = Field(2, gt=0, description="bad samples in a row before a site is demoted; one is enough after an alarm")
    quiet: int = Field(10, gt=0, description="clean samples in a row before a site is promoted by one level; doubles with each demotion")
    max_demotions: int = Field(3, gt=0, description="a site demoted this often stays where it is")
    max_saturation: float = Field(1e-3, ge=0, description="share of elements cut off at the format's largest value")
    max_underflow: float = Field(0.2, ge=0, description="share of non-zero elements that became zero")
    max_relative_error: float = Field(0.15, ge=0, description="mean of |x - q| / |x| (MERE)")
    min_sqnr_db: float = 15.0
    min_cosine: float = Field(0.98, le=1)
    spike_window: int = Field(64, gt=3, description="losses that the median and the MAD are taken of")
    spike_mads: float = Field(10.0, gt=0, description="a loss above median + this x 1.4826 MAD is a spike")
    spike_relative: float = Field(0.5, ge=0, description="and it must exceed the median by this share")
    alarm_steps: int = Field(8, gt=0, description="steps sampled one by one after a spike or a loss that is not finite")
    on_spike: Literal["shelter", "sample"] = Field(
        "shelter", description="shelter: all sites to their safest level until it is quiet; sample: only look more closely"
    )
    stop_after: int = Field(
        0, ge=0, description="losses in a row that are not finite, with every site at its safest level, before the run is stopped; 0: never"
    )
    drift_every: int = Field(6000, gt=0, description="steps between comparisons of the model's NE on held-out rows with the same in bf16")
    drift_rows: int = Field(
        8192, gt=0, description="held-out rows of such a comparison; both together: 0.4 % of the time of a step of 512 samples"
    )
    max_drift: float = Field(0.002, gt=0, description="NE ratio above 1 + this demotes the site of the largest error")
