"""A data file that vanishes while a training reads it: the run ends with its name, and goes on exactly once the file is back."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gem_core import load_config, train
from gem_core.errors import DataError
from gem_core.train.checkpoint import CheckpointStore

FILES, ROWS = 12, 40

CONFIG = """
[run]
device = "cpu"
threads = 1
[data]
source = "parquet"
batch_size = 16
[data.parquet]
train = "{log}"
eval = "{log}"
window = 20
[features.sparse.item]
rows = 20
[features.dense.x]
[features.labels.click]
[model]
name = "dcnv2"
[train]
checkpoint_every = 5
log_every = 1
tensorboard = false
[eval]
max_batches = 1
metrics = ["ne"]
"""


@pytest.fixture
def log(tmp_path):
    folder, rng = tmp_path / "log", np.random.default_rng(0)
    folder.mkdir()
    for i in range(FILES):
        columns = {"item": rng.integers(0, 20, ROWS), "x": rng.normal(size=ROWS).astype("float32"), "click": rng.integers(0, 2, ROWS)}
        pq.write_table(pa.table(columns), folder / f"{i:02}.parquet", row_group_size=20)
    return folder


class Vanish:
    """After a step the log is moved elsewhere."""

    def __init__(self, log, at):
        self.log, self.at = log, at

    def on_step(self, run, record):
        if run.step == self.at:
            for path in self.log.iterdir():
                shutil.move(path, self.log.parent / f"moved-{path.name}")


def test_a_vanished_file_is_named_and_its_return_mends_the_run(tmp_path, log):
    (tmp_path / "config.toml").write_text(CONFIG.format(log=log))
    config = load_config(tmp_path / "config.toml")
    whole = train(config, run_dir=tmp_path / "whole", quiet=True)
    with pytest.raises(DataError, match=r"(?s)cannot be opened|vanished|changed") as caught:
        train(config, run_dir=tmp_path / "run", quiet=True, callbacks=[Vanish(log, 7)])
    assert ".parquet" in caught.value.where
    assert caught.value.exit_code == 2
    stored = CheckpointStore(tmp_path / "run" / "checkpoints").latest()[0]
    assert stored.step >= 5
    with pytest.raises(DataError):
        train(config, run_dir=tmp_path / "run", quiet=True, resume=True)
    for path in tmp_path.glob("moved-*"):
        shutil.move(path, log / path.name.removeprefix("moved-"))
    again = train(config, run_dir=tmp_path / "run", quiet=True, resume=True)
    assert again.steps == whole.steps == FILES * ROWS // 16
    assert again.tasks == whole.tasks
    losses = [[json.loads(x)["loss"] for x in (tmp_path / n / "metrics.jsonl").read_text().splitlines()] for n in ("run", "whole")]
    assert losses[0] == losses[1]
