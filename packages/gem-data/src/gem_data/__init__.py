"""Jagged data loading without padding: Parquet source, converters, balanced and resumable batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gem_data.__about__ import __version__

if TYPE_CHECKING:
    from gem_data.parquet import ParquetSource

__all__ = ["ParquetSource", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "ParquetSource":
        from gem_data.parquet import ParquetSource

        return ParquetSource
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
