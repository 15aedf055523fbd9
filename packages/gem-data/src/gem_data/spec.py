"""The source that gem-data offers; pyarrow is imported when one is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gem_core.config.features import Features
from gem_core.hookspecs import SourceSpec
from gem_data.config import FollowConfig, ParquetConfig

if TYPE_CHECKING:
    from gem_core.sources.contract import Source
    from gem_data.parquet import ParquetSource


def build_parquet(
    config: ParquetConfig,
    features: Features,
    *,
    split: str,
    batch_size: int,
    shard: tuple[int, int] = (0, 1),
    seed: int = 0,
    drop_last: bool = False,
) -> ParquetSource:
    from gem_data.parquet import ParquetSource

    rank, world_size = shard
    return ParquetSource(
        config.paths(split),
        features,
        batch_size=batch_size,
        rank=rank,
        world_size=world_size,
        seed=seed,
        shuffle=config.shuffle and split == "train",
        drop_last=drop_last,
        window=config.window,
        filter=config.filter(split),
        prefetch=config.prefetch,
        workers=config.workers,
        quarantine=config.quarantine,
        batching=config.batching,
        root=config.root,
        section=config.section,
    )


def build_follow(
    config: FollowConfig,
    features: Features,
    *,
    split: str,
    batch_size: int,
    shard: tuple[int, int] = (0, 1),
    seed: int = 0,
    drop_last: bool = False,
) -> Source:
    """The followed folder for "train"; "eval" and "test" are fixed files, as in ``[data.parquet]``."""
    if split != "train":
        return build_parquet(config, features, split=split, batch_size=batch_size, shard=shard, seed=seed, drop_last=drop_last)
    from gem_data.follow import Following

    return Following(config, features, batch_size=batch_size, shard=shard, seed=seed, drop_last=drop_last)


_FREE = ("root", "train", "eval", "test", "eval_filter", "test_filter", "prefetch", "workers", "quarantine")
"""Training files that are others have another digest, which a stored position holds."""

SPEC = SourceSpec("parquet", ParquetConfig, build_parquet, free=_FREE)
FOLLOW = SourceSpec("parquet-follow", FollowConfig, build_follow, free=(*_FREE, "lag", "poll_s", "idle_s", "stop"))
