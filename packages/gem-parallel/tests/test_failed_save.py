"""A run of several processes that fails while its checkpoint is being written."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from gem_core.config import config_from_dict
from gem_core.errors import CheckpointError, RunError
from gem_core.testing.strategies import run_processes
from gem_core.train import runlock, tensorfile, train, trainer
from gem_core.train.checkpoint import CheckpointStore
from gem_core.train.contract import Callback
from gem_core.train.runfolder import RunFolder

CONFIG = {
    "run": {"device": "cpu", "threads": 1},
    "data": {"batch_size": 8, "synthetic": {"rows": 480, "eval_rows": 16, "test_rows": 8}},
    "model": {"name": "dlrm", "embedding_dim": 4},
    "train": {"steps": 8, "tensorboard": False, "checkpoint_every": 4, "checkpoint_async": True},
    "eval": {"metrics": ["ne"]},
    "parallel": {"dense": "ddp"},
}


class Ends(Callback):
    """Fails once a checkpoint is being written, on all ranks alike."""

    def on_step(self, run, record):
        if run.step == 5:
            raise RunError("as it happens", fix="none")


def _fail_while_writing(rank: int, world: int, folder: Path) -> None:
    runlock.PATIENCE_S = 0.1
    real, gate = CheckpointStore.publish, threading.Event()

    def publish(self, *arguments, **how):
        assert gate.wait(60)
        return real(self, *arguments, **how)

    CheckpointStore.publish = publish
    for run, patience, opens_after in (("long", 0.3, None), ("short", 60.0, 1.0)):
        trainer.SETTLE_S = patience
        gate.clear()
        if opens_after is not None:
            threading.Timer(opens_after, gate.set).start()
        with pytest.raises(RunError, match="as it happens"):
            train(config_from_dict(CONFIG), run_dir=folder / run, callbacks=[Ends()], quiet=True)
        if rank:
            gate.set()
            continue
        other = RunFolder(folder / run)
        if opens_after is None:
            with pytest.raises(CheckpointError, match="another process trains"):
                other.hold()
            assert other.checkpoints.steps() == []
            gate.set()
            runlock.PATIENCE_S = 60.0
        other.hold()
        assert other.checkpoints.steps() == [4]
        other.release()
        runlock.PATIENCE_S = 0.1


def test_a_failed_run_of_two_processes_keeps_its_folder_while_a_checkpoint_is_written(tmp_path):
    run_processes(2, _fail_while_writing, tmp_path, tmp_path, timeout=120)


TIMEOUT_S = 4.0


def _slowly(rank: int, world: int, task: tuple[Path, dict, bool, int | None]) -> None:
    """Rank 0 writes a checkpoint for much longer than the timeout, piece by piece; it stands still at piece ``stops_at``."""
    folder, how, background, stops_at = task
    tensorfile._CHUNK = 4096
    real, pieces = tensorfile.Summed.write, []

    def write(self, data):
        if rank == 0 and len(data) == 4096:
            pieces.append(len(data))
            time.sleep(60 if len(pieces) == stops_at else TIMEOUT_S / 6 if len(pieces) <= 12 else 0)
        real(self, data)

    tensorfile.Summed.write = write
    steps = {"steps": 2, "checkpoint_every": 2, "checkpoint_async": background}
    config = {**CONFIG, "train": {**CONFIG["train"], **steps}, "parallel": {**how, "timeout_s": TIMEOUT_S}}
    started = time.monotonic()
    assert train(config_from_dict(config), run_dir=folder, quiet=True).status == "finished"
    assert time.monotonic() - started > 1.9 * TIMEOUT_S
    assert CheckpointStore(folder / "checkpoints").problem(2) is None


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
@pytest.mark.parametrize("how", [{"dense": "ddp"}, {"dense": "fsdp", "sparse": "gem-2d"}], ids=["whole", "sharded"])
def test_a_checkpoint_that_takes_longer_than_the_timeout_is_no_hang(tmp_path, how, background):
    run_processes(2, _slowly, (tmp_path / "run", how, background, None), tmp_path, timeout=120)


def test_a_checkpoint_whose_writing_stands_still_is_a_hang(tmp_path):
    with pytest.raises(RuntimeError, match=r"rank 1: (?s:.*)(PeerError|ended with exit code 1)"):
        run_processes(2, _slowly, (tmp_path / "run", {"dense": "ddp"}, False, 4), tmp_path, timeout=120)
    told = (tmp_path / "run" / "hang-rank-0.txt").read_text()
    assert "rank 0: step 2 (checkpoint)" in told
    assert "rank 1: step 2 (checkpoint)" in told
