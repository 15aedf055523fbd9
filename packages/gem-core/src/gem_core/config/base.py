"""Base of all configuration models: frozen, hashable, unknown keys refused."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class FrozenConfig(BaseModel):
    """A validated section. Plug-ins derive their ``config_type`` from it."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    def __hash__(self) -> int:
        return hash(self.model_dump_json())
