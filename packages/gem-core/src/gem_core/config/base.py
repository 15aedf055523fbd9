"""Base of all configuration models: frozen, hashable, unknown keys refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict


class FrozenConfig(BaseModel):
    """A validated section. Plug-ins derive their ``config_type`` from it."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    def __hash__(self) -> int:
        return hash(self.model_dump_json())


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``over`` on ``base``, table by table; lists are replaced."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        result[key] = merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return result
