"""Data sources: the contract, the synthetic log, and what other sources share (order and resume, hash, length laws)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gem_core.sources.contract import TRUE_PROBABILITY, Source

if TYPE_CHECKING:
    from gem_core.hookspecs import SourceSpec

__all__ = ["TRUE_PROBABILITY", "Source", "builtin_specs"]


def builtin_specs() -> list[SourceSpec]:
    """The sources that the core offers."""
    from gem_core.sources import drawn, synthetic

    return [synthetic.SPEC, drawn.SPEC]
