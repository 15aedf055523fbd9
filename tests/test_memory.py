"""Peak memory of ``gemrec train`` on Parquet does not depend on the number of rows."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from gem_core.config import load_config, source_config
from gem_data.synth import write_synthetic

GEMREC = (sys.executable, "-c", "import sys; from gem_core.cli import main; sys.exit(main())")
ROWS = 8_000
LOG = {
    "data.synthetic.eval_rows": 500,
    "data.synthetic.users": 2000,
    "data.synthetic.length": {"law": "lognormal", "mean": 160.0, "max": 800},
}
TRAIN = """
[model]
name = "din"
embedding_dim = 4
attention_hidden = [4]
hidden = [8]

[train]
epochs = 1
log_every = 20
tensorboard = false
"""


def write(folder: Path, rows: int) -> Path:
    """The planted log with long histories as a file of ``rows`` rows in small row groups; gives the configuration to train on it."""
    write_synthetic(folder, source_config(load_config(overrides={**LOG, "data.synthetic.rows": rows})))
    pq.write_table(pq.read_table(folder / "train.parquet"), folder / "train.parquet", row_group_size=1000)
    config = folder / "config.toml"
    config.write_text(config.read_text().partition("[model]")[0] + TRAIN)
    return config


def peak(run: Callable, config: Path, folder: Path, window: int) -> int:
    """Bytes, as summary.json tells them."""
    options = {"run.device": "cpu", "data.batch_size": 256, "data.parquet.root": config.parent, "data.parquet.window": window}
    overrides = [word for key, value in options.items() for word in ("--set", f"{key}={value}")]
    done = run(*GEMREC, "train", config, "--run-dir", folder, "--quiet", *overrides, timeout=900)
    assert done.returncode == 0, done.stderr
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["samples"] in (ROWS, 10 * ROWS)
    memory: int = summary["peak_memory_bytes"]
    return memory


@pytest.mark.slow
def test_peak_memory_is_flat_in_the_number_of_rows(run: Callable, tmp_path: Path):
    """A shuffle window of the whole file holds the whole file: that run shows that the measure would see growth."""
    small, large = write(tmp_path / "small", ROWS), write(tmp_path / "large", 10 * ROWS)
    few, many, held = (
        peak(run, small, tmp_path / "a", 2000),
        peak(run, large, tmp_path / "b", 2000),
        peak(run, large, tmp_path / "c", 10**6),
    )
    print(f"peak memory: {few / 2**20:.0f} MiB, ten times the rows {many / 2**20:.0f} MiB, all rows in one window {held / 2**20:.0f} MiB")
    assert many < 1.1 * few
    assert held > 1.1 * few
