"""A process that dies, hangs or fails in the middle of a step; and what the others and the next run make of it."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time

import pytest
import tomli_w

from gem_core.train.checkpoint import CheckpointStore
from gem_core.train.offline import evaluate_run

TIMEOUT_S = 12.0

CONFIG = {
    "run": {"device": "cpu", "seed": 1, "threads": 1},
    "data": {
        "batch_size": 8,
        "synthetic": {
            "rows": 480, "eval_rows": 64, "test_rows": 10, "users": 50, "length": {"law": "lognormal", "mean": 4.0, "max": 16},
        },
    },
    "model": {"name": "gem", "layers": 1, "dim": 8, "embedding_dim": 8, "interaction": {"experts": ["wukong", "wukong"]}},
    "train": {"epochs": 1, "log_every": 1, "tensorboard": False, "checkpoint_every": 5},
    "eval": {"metrics": ["ne"]},
    "parallel": {"dense": "hsdp", "expert": 2, "sparse": "gem-2d", "replica": 2, "timeout_s": TIMEOUT_S},
}  # fmt: skip

PROCESS = """
import os, signal, sys, time
from gem_core.cli import main
from gem_core.train import trainer
from gem_core.train.contract import Callback

rank, what, at = int(os.environ["RANK"]), sys.argv.pop(1), int(sys.argv.pop(1))

class Trouble(Callback):
    def on_start(self, run):
        self.calls = 0
        for layer in run.model.layers:
            layer.register_forward_hook(self.strike)

    def strike(self, *_):
        self.calls += 1
        if self.calls == at:
            if what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "hang":
                time.sleep(1000)
            raise ValueError("struck down")

if rank == int(os.environ["WORLD_SIZE"]) // 2 and what != "none":
    before = trainer.Trainer._build_callbacks
    trainer.Trainer._build_callbacks = lambda self: [*before(self), Trouble()]
sys.exit(main())
"""


def start(folder, world, what, at, *arguments):
    """``world`` processes of ``gemrec train`` as a launcher starts them; (exit codes, stderr of each, seconds)."""
    (folder / "config.toml").write_text(tomli_w.dumps(CONFIG))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-c",
        PROCESS,
        what,
        str(at),
        "train",
        str(folder / "config.toml"),
        "--run-dir",
        str(folder / "run"),
        *arguments,
    ]
    processes = []
    for rank in range(world):
        names = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": world,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": 1,
        }
        environment = {**os.environ, **{k: str(v) for k, v in names.items()}}
        with open(folder / f"err-{what}-{rank}", "w") as err:
            processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=err))
    try:
        until = time.monotonic() + 150
        codes = [p.wait(timeout=max(0.1, until - time.monotonic())) for p in processes]
    finally:
        for p in processes:
            p.kill()
            p.wait()
    return codes, [(folder / f"err-{what}-{rank}").read_text() for rank in range(world)]


def steps_of(folder):
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    return folder, start(folder, 4, "kill", 8)


def test_when_one_of_four_is_killed_in_a_step_the_others_end_with_a_clear_error(killed):
    _, (codes, errors) = killed
    assert codes[2] == -9
    for rank in (0, 1, 3):
        assert codes[rank] == 1, errors[rank]
        assert "rank 2 gives no sign of life" in errors[rank], errors[rank]
        # told is its own step, or where the lost one was last seen: signs come at intervals
        assert re.search(r"step 8 \(training step\)|its last sign was of step [1-8] \(", errors[rank]), errors[rank]
        assert "--resume" in errors[rank] or "ends: " in errors[rank]


def test_two_processes_continue_from_the_last_checkpoint_at_the_right_sample(killed):
    folder, _ = killed
    stored = CheckpointStore(folder / "run" / "checkpoints").latest()[0]
    assert (stored.step, stored.meta["world"], stored.meta["samples"]) == (5, 4, 5 * 4 * 8)
    codes, errors = start(folder, 2, "none", 0, "--resume")
    assert codes == [0, 0], errors
    records = steps_of(folder)
    assert [r["samples"] for r in records[:5]] == [32 * (i + 1) for i in range(5)]
    left = (480 - 160) // 16
    assert [r["samples"] for r in records[5:]] == [160 + 16 * (i + 1) for i in range(left)]
    last = CheckpointStore(folder / "run" / "checkpoints").latest()[0]
    assert (last.step, last.meta["world"], last.meta["samples"]) == (5 + left, 2, 480)
    alone = evaluate_run(folder / "run")
    summary = json.loads((folder / "run" / "summary.json").read_text())
    for task, metrics in alone.results.items():
        assert metrics["ne"].value == pytest.approx(summary["tasks"][task]["ne"], rel=1e-5), "one process evaluates what many trained"


def test_a_hang_is_named_with_rank_collective_step_and_stacks(tmp_path):
    started = time.monotonic()
    codes, errors = start(tmp_path, 2, "hang", 3)
    assert time.monotonic() - started < 100
    assert codes == [1, 1]
    whole = "".join(errors)
    assert f"(parallel.timeout_s = {TIMEOUT_S:g})" in whole
    (stuck,) = {line for line in whole.splitlines() if line.startswith("  rank 1: step 3 (training step)")}
    assert "in strike (" in stuck
    (waits,) = {line for line in whole.splitlines() if line.startswith("  rank 0: step 3 (training step)")}
    assert any(name in waits for name in ("all_gather", "reduce_scatter", "all_reduce")), waits
    assert "stacks of rank 1:" in errors[1]
    assert "strike" in (tmp_path / "run" / "hang-rank-1.txt").read_text()
    flights = [json.loads((tmp_path / "run" / f"flight-rank-{rank}.json").read_text())["entries"] for rank in range(2)]
    assert all(any("all_reduce" in entry["profiling_name"] for entry in entries) for entries in flights)
    assert flights[0][-1]["record_id"] > flights[1][-1]["record_id"], "the waiting rank has called a collective that the stuck one has not"


def test_a_rank_that_fails_is_named_by_the_others(tmp_path):
    codes, errors = start(tmp_path, 2, "fail", 3)
    assert codes == [1, 1]
    assert "rank 1 failed in step 3 (training step): ValueError: struck down" in errors[0], errors[0]
