"""What metrics, logs and reading Parquet cost beside a preset's training step: writes a Parquet log of the preset's features, then runs
`gem_core.bench.overheads` on it.

    python docs/benchmarks/train_overheads.py base --set precision.recipe=bf16 --set train.capture=true --rows 122880 --out docs/benchmarks

The first row groups are drawn and then repeated, since drawing takes long.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import pyarrow as pa

from gem_core.batch import Batch
from gem_core.bench import overheads
from gem_core.config import load_config
from gem_core.config.features import Features
from gem_core.model.presets import find
from gem_core.sources.drawn import RandomConfig, RandomSource
from gem_data.writer import config_toml, write_parquet, write_text

GROUP, DRAWN = 10_240, 2
"""Rows of a row group, and how many groups are drawn."""


def table(batch: Batch, features: Features) -> pa.Table:
    """The batch's samples under the features' column names."""
    columns: dict[str, pa.Array] = {str(features.timestamp): pa.array(batch.timestamps.numpy())}
    assert batch.sparse is not None
    columns |= {key: pa.array(batch.sparse[key].values.numpy()) for key in batch.sparse.keys}
    columns |= {name: pa.array(batch.dense[:, i].numpy()) for i, name in enumerate(batch.dense_names)}
    columns |= {name: pa.array(batch.labels[:, i].numpy()) for i, name in enumerate(batch.label_names)}
    columns |= {str(c.mask): pa.array(batch.label_mask[:, i].numpy()) for i, c in enumerate(features.labels.values()) if c.mask}
    for name, group in batch.sequences.items():
        offsets, spec = pa.array(group.offsets.numpy().astype("int32")), features.sequences[name]
        values = {field: group.fields[field] for field in spec.fields} | {str(spec.timestamps): group.timestamps}
        columns |= {key: pa.ListArray.from_arrays(offsets, pa.array(v.numpy())) for key, v in values.items()}
    return pa.table(columns)


def tables(preset: str, split: str, rows: int) -> Iterator[pa.Table]:
    features = find(preset).features()
    config = RandomConfig(preset=preset, rows=min(rows, DRAWN * GROUP), eval_rows=1024)
    drawn = [table(batch, features) for batch in RandomSource(config, features, split=split, batch_size=GROUP)]
    left = rows if split == "train" else config.eval_rows
    for group in cycle(drawn):
        if left <= 0:
            return
        yield group.slice(0, left)
        left -= group.num_rows


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("preset", nargs="?", default="base")
    options.add_argument("--rows", type=int, default=12 * GROUP)
    options.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--warmup", type=int, default=30)
    options.add_argument("--out", type=Path, default=Path("bench-overheads"))
    args = options.parse_args()
    chosen = find(args.preset)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for split in ("train", "eval"):
            written = iter(tables(args.preset, split, args.rows))
            first = next(written)
            write_parquet(folder / f"{split}.parquet", first.schema, (t for part in ([first], written) for t in part))
        files = {"train": "train.parquet", "eval": "eval.parquet"}
        text = config_toml(args.preset, chosen.features(), files, None, model={"name": "gem", "preset": args.preset})
        write_text(folder / "config.toml", text)
        print(f"{args.rows} rows in {(folder / 'train.parquet').stat().st_size / 1e6:.0f} MB written", flush=True)
        settings = [*overheads.FIXED, f"data.parquet.root={folder}", f"data.batch_size={chosen.batch_size}", *args.overrides]
        config = load_config(folder / "config.toml", settings)
        result = overheads.measure(config, folder / "run", steps=args.steps, rounds=args.rounds, warmup=args.warmup)
    command = shlex.join(["python", "docs/benchmarks/train_overheads.py", *sys.argv[1:]])
    overheads.write({**result, "command": command}, args.out, args.preset)
    print(overheads.table(result), flush=True)


if __name__ == "__main__":
    main()
