"""The synthetic ads log as Parquet files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gem_core.config.features import Features
from gem_core.errors import ConfigError
from gem_core.sources.contract import TRUE_PROBABILITY
from gem_core.sources.laws import histogram
from gem_core.sources.planted import DENSE, PlantedLog, Samples
from gem_core.sources.synthetic import HISTORY, SyntheticConfig, synthetic_features
from gem_data.writer import config_toml, write_config, write_parquet, write_text

ROW_GROUP = 16_384
_SPARSE = ("item", "category", "advertiser", "position", "device", "hour", "age", "country")
_EVENTS = ("item", "category", "action", "time")


def parquet_features(config: SyntheticConfig) -> Features:
    """The log's features with the column names of the files: event columns are called ``history_<field>``."""
    own = synthetic_features(config)
    group = own.sequences[HISTORY]
    fields = {name: field.model_copy(update={"column": f"{HISTORY}_{name}"}) for name, field in group.fields.items()}
    columns = group.model_copy(update={"fields": fields, "timestamps": f"{HISTORY}_time"})
    return own.model_copy(update={"sequences": {HISTORY: columns}})


def write_synthetic(out: Path, config: SyntheticConfig) -> dict[str, int]:
    """Write ``train.parquet``, ``eval.parquet``, ``test.parquet``, ``config.toml`` and ``lengths.json`` (law, seed and histogram of the
    history lengths of each split); returns the rows of each split."""
    log = PlantedLog(config)
    rows: dict[str, int] = {}
    lengths: dict[str, Any] = {"law": config.length.model_dump(mode="json"), "seed": config.seed}
    for split in ("train", "eval", "test"):
        start, stop = config.split(split)
        drawn: list[NDArray[np.int64]] = []
        rows[split] = write_parquet(out / f"{split}.parquet", _schema(), _tables(log, start, stop, drawn))
        lengths[split] = histogram(np.concatenate(drawn))
    write_text(out / "lengths.json", json.dumps(lengths, indent=1) + "\n")
    splits = {split: f"{split}.parquet" for split in rows}
    write_config(out, config_toml("synthetic", parquet_features(config), splits, "user_id"))
    return rows


def write_partitions(out: Path, config: SyntheticConfig, partitions: int) -> dict[str, int]:
    """Write the training samples in time order as ``partitions`` folders ``log/part-NNN`` of equally many rows, each with a ``_SUCCESS``
    marker, and ``config.toml``, which follows them: each is evaluated, then trained on, and the last one, only evaluated, ends the run.
    Returns the rows of each.

    :raises ConfigError: fewer than two partitions.
    """
    if partitions < 2:
        raise ConfigError(f"{partitions} partition is no log to follow", where="--partitions", fix="use 2 or more")
    log = PlantedLog(config)
    edges = [config.rows * i // partitions for i in range(partitions + 1)]
    rows = {}
    for i, (start, stop) in enumerate(zip(edges, edges[1:])):
        name = f"part-{i:03d}"
        rows[name] = write_parquet(out / "log" / name / "rows.parquet", _schema(), _tables(log, start, stop, []))
        write_text(out / "log" / name / "_SUCCESS", "")
    last, before = f"log/part-{partitions - 1:03d}", f"part-{partitions - 2:03d}"
    how = {"train": "log", "eval": last, "stop": before, "idle_s": 0.0}
    text = config_toml(
        "synthetic",
        parquet_features(config),
        how,
        "user_id",
        source="parquet-follow",
        evaluation={"before_training": True},
    )
    write_config(out, text)
    return rows


def _schema() -> pa.Schema:
    return pa.schema(
        [("sample_id", pa.int64()), ("user_id", pa.int64()), ("timestamp", pa.timestamp("s", "UTC"))]
        + [(name, pa.int32()) for name in _SPARSE]
        + [(name, pa.float32()) for name in DENSE]
        + [(f"{HISTORY}_{name}", pa.list_(pa.int64() if name == "time" else pa.int32())) for name in _EVENTS]
        + [("click", pa.int8()), ("conversion", pa.int8())]
        + [(f"{TRUE_PROBABILITY}{task}", pa.float64()) for task in ("ctr", "cvr")]
    )


def _tables(log: PlantedLog, start: int, stop: int, drawn: list[NDArray[np.int64]]) -> Iterator[pa.Table]:
    for first in range(start, stop, ROW_GROUP):
        samples = log.samples(np.arange(first, min(first + ROW_GROUP, stop)))
        drawn.append(np.diff(samples.events.offsets))
        yield _table(samples)


def _table(s: Samples) -> pa.Table:
    offsets = pa.array(s.events.offsets, pa.int32())
    columns = {
        "sample_id": s.index,
        "user_id": s.user,
        "timestamp": s.time,
        **s.sparse,
        **s.dense,
        **{f"{HISTORY}_{name}": getattr(s.events, name) for name in _EVENTS},
        "click": s.click,
        "conversion": s.conversion,
        TRUE_PROBABILITY + "ctr": s.p_click,
        TRUE_PROBABILITY + "cvr": s.p_conversion,
    }
    arrays = []
    for field in _schema():
        values = pa.array(columns[field.name])
        if pa.types.is_list(field.type):
            arrays.append(pa.ListArray.from_arrays(offsets, values.cast(field.type.value_type)))
        elif pa.types.is_boolean(values.type):
            arrays.append(values.cast(field.type))
        else:
            arrays.append(values.cast(field.type, safe=not pa.types.is_floating(field.type)))
    return pa.table(arrays, schema=_schema())
