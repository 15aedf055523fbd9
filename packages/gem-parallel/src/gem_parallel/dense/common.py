"""What the dense strategies share."""

from __future__ import annotations

from torch import nn


def tables_of(model: nn.Module) -> tuple[str, nn.Module] | None:
    """Name and module of the embedding tables, which the sparse strategy keeps."""
    tables = getattr(model, "tables", None)
    if not isinstance(tables, nn.Module):
        return None
    return next(name for name, part in model.named_modules() if part is tables), tables


def table_names(model: nn.Module) -> list[str]:
    """Names of the tables' parameters and buffers in the model."""
    found = tables_of(model)
    if found is None:
        return []
    at, tables = found
    return [f"{at}.{name}" for name, _ in (*tables.named_parameters(), *tables.named_buffers())]
