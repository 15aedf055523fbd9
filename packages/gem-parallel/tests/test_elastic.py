"""torchrun restarts a training whose processes are killed; it ends as one that nothing happened to."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import tomli_w

CONFIG = {
    "run": {"device": "cpu", "seed": 1, "threads": 1},
    "data": {
        "batch_size": 8,
        "synthetic": {
            "rows": 480, "eval_rows": 64, "test_rows": 10, "users": 50, "length": {"law": "lognormal", "mean": 4.0, "max": 16},
        },
    },
    "model": {"name": "gem", "layers": 1, "dim": 8, "embedding_dim": 8, "interaction": {"experts": ["wukong", "wukong"]}},
    "train": {"steps": 24, "log_every": 1, "tensorboard": False, "checkpoint_every": 5, "checkpoint_async": True},
    "eval": {"metrics": ["ne"]},
    "parallel": {"dense": "hsdp", "expert": 2, "sparse": "gem-2d", "replica": 2, "timeout_s": 60.0},
}  # fmt: skip

KILLED = """
import os, signal, sys, time
from gem_core.cli import main
from gem_core.train import trainer
from gem_core.train.contract import Callback

attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
step, saved = {("0", "1"): (8, 5), ("1", "0"): (14, 10)}.get((attempt, rank), (None, None))
kills = sys.argv.pop(1) == "kill"
print("attempt", attempt, "of rank", rank, flush=True)

class Kill(Callback):
    def on_step(self, run, record):
        if kills and run.step == step:
            latest, end = run.directory / "checkpoints" / "latest", time.monotonic() + 60
            # It is written in the background: what is lost otherwise depends on the disk.
            while not (latest.is_file() and latest.read_text() == f"step-{saved}\\n"):
                assert time.monotonic() < end
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGKILL)

before = trainer.Trainer._build_callbacks
trainer.Trainer._build_callbacks = lambda self: [*before(self), Kill()]
sys.exit(main())
"""


def torchrun(folder, what):
    (folder / "config.toml").write_text(tomli_w.dumps(CONFIG))
    (folder / "process.py").write_text(KILLED)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2", "--monitor-interval",
        "0.1", str(folder / "process.py"), what, "train", str(folder / "config.toml"), "--resume", "--run-dir", str(folder / what),
    ]  # fmt: skip
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in (folder / what / "metrics.jsonl").read_text().splitlines()]
    steps = [{k: r[k] for k in ("step", "samples", "loss", "lr", "grad_norm")} for r in lines]
    return done.stdout, steps, json.loads((folder / what / "summary.json").read_text())["tasks"]


def test_torchrun_brings_killed_processes_back_and_nothing_changes(tmp_path):
    said, steps, tasks = torchrun(tmp_path, "kill")
    # lines of two processes may share one
    assert set(re.findall(r"attempt (\d) of rank (\d)", said)) == {(a, r) for a in "012" for r in "01"}, said
    assert "resumed at step 5" in said
    assert "resumed at step 10" in said
    _, calm_steps, calm_tasks = torchrun(tmp_path, "calm")
    assert len(steps) == 24
    assert steps == calm_steps
    assert tasks == calm_tasks
