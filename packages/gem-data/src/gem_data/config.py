"""``[data.parquet]``: where the files are and how they are read."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from gem_core.config.base import FrozenConfig
from gem_core.errors import ConfigError
from gem_data.balance import Batching, Fixed

Paths = Annotated[tuple[str, ...], BeforeValidator(lambda v: (v,) if isinstance(v, str) else v)]


class ParquetConfig(FrozenConfig):
    """Files, folders (read recursively, in the order of their names) or patterns of each split, relative to ``root``."""

    root: str = Field(".", description="folder or fsspec URL that relative paths start from")
    train: Paths = ()
    eval: Paths = ()
    test: Paths = ()
    train_filter: str | None = Field(None, description='row filter of this split, such as "day < 12"; with features.filter, both must hold')
    eval_filter: str | None = None
    test_filter: str | None = None
    shuffle: bool = Field(True, description="shuffle the training split: order of row groups, and rows within a window of them")
    window: int = Field(
        65_536, gt=0, description="rows shuffled together, at least; made of whole row groups, and memory holds two windows"
    )
    prefetch: int = Field(2, ge=0, description="batches kept ready by background threads; 0: no threads")
    workers: int = Field(
        0, ge=0, description="processes that decode, each at most one window ahead; 0: only threads, enough unless text is hashed or sorted"
    )
    batching: Batching = Field(Fixed(), description="fixed, bbs (balanced), bucket (by length), tokens (a budget) or global")
    quarantine: str | None = Field(None, description='folder for the rows that features with policy = "quarantine" refuse')

    @property
    def section(self) -> str:
        return "data.parquet"

    def paths(self, split: str) -> tuple[str, ...]:
        """Paths of "train", "eval" or "test", as written."""
        if split not in ("train", "eval", "test"):
            raise ConfigError(f"there is no split {split!r}", where=f"[{self.section}]", fix="use train, eval or test")
        found: tuple[str, ...] = getattr(self, split)
        if not found:
            raise ConfigError(
                f"no files are declared for the split {split!r}",
                where=f"[{self.section}]",
                fix=f'add {split} = ["path/to/{split}.parquet"], or --set \'{self.section}.{split}=["..."]\'',
            )
        return found

    def filter(self, split: str) -> str | None:
        found: str | None = getattr(self, f"{split}_filter")
        return found


class FollowConfig(ParquetConfig):
    """``[data.parquet-follow]``: as ``[data.parquet]``, but ``train`` is one folder that is followed."""

    marker: str | None = Field(
        "_SUCCESS", description="file that a complete partition's folder holds; None: it is complete when it is there"
    )
    lag: int = Field(0, ge=0, description="newest partitions that are left alone until later ones are there")
    poll_s: float = Field(10.0, gt=0, description="seconds between looks at the folder")
    idle_s: float | None = Field(None, ge=0, description="end when no partition has come for so many seconds; None: wait for ever")
    start: str | None = Field(None, description="name of the first partition to read")
    stop: str | None = Field(None, description="name of the last partition to read")

    @property
    def section(self) -> str:
        return "data.parquet-follow"
