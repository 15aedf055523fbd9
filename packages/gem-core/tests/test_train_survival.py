"""What a long run must survive: kills at any moment, full disks, damaged checkpoints; and what it says of a process that stands still."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import tomli_w
import torch

from gem_core.cli import main
from gem_core.config import load_config
from gem_core.errors import CheckpointError, RunError
from gem_core.export.package import export_run
from gem_core.testing.strategies import run_processes
from gem_core.train import runlock, train
from gem_core.train.checkpoint import CheckpointStore
from gem_core.train.export import write_embeddings
from gem_core.train.offline import evaluate_run
from gem_core.train.runfolder import RunFolder, read_lines
from gem_core.train.watchdog import Watchdog

STEPS, EVERY = 260, 4

CONFIG = {
    "run": {"device": "cpu", "seed": 1, "threads": 1},
    "data": {
        "batch_size": 16,
        "synthetic": {"rows": 1900, "eval_rows": 200, "test_rows": 10, "users": 60, "length": {"law": "lognormal", "mean": 4.0, "max": 16}},
    },
    "model": {"name": "din", "embedding_dim": 4},
    "train": {"steps": STEPS, "log_every": 1, "tensorboard": False, "checkpoint_every": EVERY},
    "eval": {"every": 50, "metrics": ["ne", "auc"]},
}

SERVER = """
import os, sys, torch
torch.set_num_threads(1)
from gem_core.config import load_config
from gem_core.train.trainer import Trainer
from gem_core.train.contract import Callback

class Tell(Callback):
    def on_step(self, run, record):
        print("step", run.step, flush=True)

for line in sys.stdin:
    config, folder, *overrides = line.split()
    child = os.fork()
    if child:
        print("pid", child, flush=True)
        print("dead", os.waitpid(child, 0)[1], flush=True)
        continue
    Trainer(load_config(config, overrides), run_dir=folder, resume=True, callbacks=[Tell()], quiet=True).run()
    sys.stdout.flush()
    os._exit(0)
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(tomli_w.dumps(CONFIG))
    return path


class Server:
    """Starts trainings as forks of a process that has imported everything already."""

    def __init__(self):
        self.process = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(self, config, folder, *overrides):
        self.process.stdin.write(" ".join(map(str, (config, folder, *overrides))) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline().split()[1])

    def steps(self):
        """Lines of the training until it is dead; then its exit status."""
        for line in self.process.stdout:
            kind, value = line.split()
            if kind == "dead":
                return int(value)
            yield int(value)
        raise AssertionError("the server itself has died")

    def run(self, config, folder, *overrides):
        """A training to its end; returns its exit status."""
        self.start(config, folder, *overrides)
        lines = self.steps()
        while True:
            try:
                next(lines)
            except StopIteration as done:
                return done.value


@pytest.fixture
def server():
    started = Server()
    yield started
    started.process.stdin.close()
    started.process.wait()
    started.process.stdout.close()


def outcome(folder):
    """All that a run says of its training, but for clocks."""
    files = RunFolder(folder)
    summary = json.loads(files.summary.read_text())
    steps = [{k: r[k] for k in ("step", "epoch", "samples", "loss", "lr", "grad_norm", "skipped")} for r in read_lines(files.metrics)]
    evals = [{k: r[k] for k in ("step", "samples", "tasks")} for r in read_lines(files.evals)]
    return {k: summary[k] for k in ("status", "steps", "samples", "tasks", "best_step")}, steps, evals


def tensors(folder):
    stored = CheckpointStore(folder / "checkpoints").latest()[0]
    return {f"{part}.{k}": v for part in ("model", "optimizer", "tables") for k, v in stored.tensors(part).items()}


def test_twenty_kills_at_random_moments_change_nothing(config, tmp_path, server):
    """Each training is killed a random moment after a random number of its steps, start-up included; the next one resumes."""
    rng, folder, whole = random.Random(7), tmp_path / "run", tmp_path / "whole"
    resumed, interrupted = set(), 0
    for life in range(20):
        pid = server.start(config, folder, f"train.checkpoint_async={'true' if life % 2 else 'false'}")
        wanted, seen, lines = rng.choice([0, *[rng.randint(1, 16)] * 2]), 0, server.steps()
        while seen < wanted:
            step = next(lines)
            if not seen:
                resumed.add(step - 1)
            seen += 1
        time.sleep(rng.uniform(0, 0.02 if wanted else 0.4))
        os.kill(pid, signal.SIGKILL)
        for step in lines:
            assert step < STEPS, "the run came to its end before the last kill"
        interrupted += any((folder / "checkpoints").glob(".tmp-step-*"))
    assert server.run(config, folder, "train.checkpoint_every=100") == 0
    assert server.run(config, whole, "train.checkpoint_every=100") == 0
    assert len(resumed) >= 4, f"too few kills came after a checkpoint: resumed from {sorted(resumed)}"
    assert outcome(folder) == outcome(whole)
    assert outcome(folder)[0]["steps"] == STEPS
    a, b = tensors(folder), tensors(whole)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert interrupted, "no kill hit the writing of a checkpoint"


def started(config, *overrides):
    return load_config(config, ["train.steps=12", f"train.checkpoint_every={EVERY}", "eval.every=100", *overrides])


def damage(path, kind):
    if kind == "flipped bit":
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 4
        path.write_bytes(raw)
    elif kind == "cut short":
        os.truncate(path, path.stat().st_size - 100)
    else:
        path.unlink()
        path.mkdir()  # reading it fails, whoever reads


@pytest.mark.parametrize("kind", ["flipped bit", "cut short", "unreadable"])
@pytest.mark.parametrize("file", ["tables.safetensors", "rank-0.safetensors", "meta.json"])
def test_a_damaged_newest_checkpoint_costs_its_steps_and_nothing_else(config, tmp_path, capsys, kind, file):
    folder, whole = tmp_path / "run", tmp_path / "whole"
    train(started(config), run_dir=whole, quiet=True)
    train(started(config, "train.steps=8"), run_dir=folder, quiet=True)
    newest = folder / "checkpoints" / "step-8"
    if kind == "flipped bit" and file == "meta.json":
        (newest / file).write_text((newest / file).read_text().replace('"format": 1', '"format": 7'))
    else:
        damage(newest / file, kind)
    train(started(config), run_dir=folder, resume=True)
    said = capsys.readouterr().out
    assert "checkpoint of step 8 not usable" in said
    assert "goes on from step 4" in said
    assert "resumed at step 4" in said
    assert (folder / "checkpoints" / "damaged-step-8" / file).exists()
    a, b = outcome(folder), outcome(whole)
    assert a[0] == b[0]
    assert a[1] == b[1]


def test_when_every_checkpoint_is_damaged_the_run_says_so_and_touches_none(config, tmp_path):
    train(started(config, "train.steps=8"), run_dir=tmp_path / "run", quiet=True)
    for step in (4, 8):
        damage(tmp_path / "run" / "checkpoints" / f"step-{step}" / "model.safetensors", "flipped bit")
    with pytest.raises(CheckpointError, match=r"(?s)no usable checkpoint: step 8: .*model.safetensors.*step 4: "):
        train(started(config), run_dir=tmp_path / "run", resume=True, quiet=True)
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").glob("step-*")) == ["step-4", "step-8"]


def test_a_deleted_newest_checkpoint_is_said(config, tmp_path, capsys, caplog):
    folder = tmp_path / "run"
    checkpoints, gone = folder / "checkpoints", "the file 'latest' names step-8, which is gone; put it back from a copy"
    train(started(config, "train.steps=8"), run_dir=folder, quiet=True)
    shutil.rmtree(checkpoints / "step-8")
    assert evaluate_run(folder).step == 4
    assert gone in caplog.text
    capsys.readouterr()
    train(started(config, "train.steps=5"), run_dir=folder, resume=True)
    said = capsys.readouterr().out
    assert f"checkpoint of step 8 not usable: {gone}" in said
    assert "the run goes on from step 4\n" in said
    assert CheckpointStore(checkpoints).latest()[1] == []
    for step in CheckpointStore(checkpoints).steps():
        shutil.rmtree(checkpoints / f"step-{step}")
    with pytest.raises(CheckpointError, match="no usable checkpoint: step 5: the file 'latest' names step-5, which is gone"):
        train(started(config), run_dir=folder, resume=True, quiet=True)


def test_what_reads_a_run_passes_over_a_damaged_checkpoint_and_says_so(config, tmp_path, caplog):
    folder = tmp_path / "run"
    train(started(config, "train.steps=8"), run_dir=folder, quiet=True)
    damage(folder / "checkpoints" / "step-8" / "tables.safetensors", "flipped bit")
    said = "checkpoint of step 8 not usable: the checkpoint is damaged: tables.safetensors has not the content that was written; step 4 is"
    readers = {
        "eval": lambda step: evaluate_run(folder, step=step).step,
        "export": lambda step: export_run(folder, tmp_path / "package", step=step).step,
        "tables": lambda step: write_embeddings(folder, tmp_path / "tables.safetensors", step=step) and 4,
    }
    for name, reader in readers.items():
        caplog.clear()
        assert reader(None) == 4, name
        assert said in caplog.text, name
        shutil.rmtree(tmp_path / "package", ignore_errors=True)
        with pytest.raises(CheckpointError, match=r"tables.safetensors has not the content") as caught:
            reader(8)
        assert "4, 8" in caught.value.fix
    train(started(config, "train.steps=1", f"train.warm_start={folder}"), run_dir=tmp_path / "next", quiet=True)
    assert json.loads((tmp_path / "next" / "run.json").read_text())["warm_start"]["step"] == 4


def test_damaged_lines_of_a_log_are_said_and_the_others_kept(tmp_path, caplog):
    log = RunFolder(tmp_path).metrics
    lines = [json.dumps({"step": i}) for i in range(1, 6)]
    log.write_bytes("\n".join([lines[0], lines[1][:4], lines[2], "7", "\0\0", lines[4], '{"ste']).encode() + b"\xff")
    assert [r["step"] for r in read_lines(log)] == [1, 3, 5]
    assert [record.args[1] for record in caplog.records] == [2, 4, 5], "not the last one, which a kill cut short"
    RunFolder(tmp_path).trim(4)
    assert [r["step"] for r in read_lines(log)] == [1, 3]


@contextmanager
def full_disk(folder, size):
    """A file system of ``size`` bytes at ``folder``: a real one where this process may mount it."""
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@contextmanager
def file_limit(size):
    """The operating system refuses to write past ``size`` bytes of any file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Fill:
    """From step ``at`` on, all of the disk but ``left`` bytes is taken."""

    def __init__(self, folder, at, left):
        self.path, self.at, self.left = Path(folder) / "others", at, left

    def on_step(self, run, record):
        if run.step == self.at:
            free = shutil.disk_usage(self.path.parent).free
            self.path.write_bytes(b"x" * max(0, free - self.left))


@pytest.mark.parametrize("background", ["false", "true"])
def test_a_full_disk_ends_the_run_with_the_previous_checkpoint_and_space_mends_it(config, tmp_path, background):
    whole, options = tmp_path / "whole", [f"train.checkpoint_async={background}"]
    train(started(config, *options), run_dir=whole, quiet=True)
    size = sum(f.stat().st_size for f in (whole / "checkpoints" / "step-12").iterdir())
    with full_disk(tmp_path / "disk", 6 * size + 2**20) as disk:
        filled = Fill(disk, 6, size // 2)
        with pytest.raises(CheckpointError, match=r"step 8 could not be written: No space left") as caught:
            train(started(config, *options), run_dir=disk / "run", callbacks=[filled], quiet=True)
        assert "previous checkpoint is untouched" in caught.value.fix
        assert sorted(p.name for p in (disk / "run" / "checkpoints").iterdir()) == ["latest", "step-4"], "no litter is left"
        filled.path.unlink()
        train(started(config, *options), run_dir=disk / "run", resume=True, quiet=True)
        assert outcome(disk / "run") == outcome(whole)


def test_a_full_disk_ends_an_export_and_a_report_with_what_to_do(config, tmp_path, capsys):
    train(started(config, "train.steps=4"), run_dir=tmp_path / "run", quiet=True)
    with full_disk(tmp_path / "disk", 64 * 1024) as disk:
        (disk / "others").write_bytes(b"x" * 56 * 1024)
        for command in ("export", "export-embeddings", "report"):
            assert main([command, str(tmp_path / "run"), "--out", str(disk / "out")]) == 2
            assert "No space left on device" in capsys.readouterr().err
        assert [p.name for p in disk.iterdir()] == ["others"]


def test_logs_that_cannot_be_written_end_the_run_with_what_to_do(config, tmp_path):
    with full_disk(tmp_path / "disk", 2**22) as disk:
        filled = Fill(disk, 6, 0)
        with pytest.raises(RunError, match=r"run folder cannot be written: No space left") as caught:
            train(started(config, "train.checkpoint_every=5", "eval.every=100"), run_dir=disk / "run", callbacks=[filled], quiet=True)
        assert "metrics.jsonl" in caught.value.where
        assert "--resume" in caught.value.fix


def test_a_file_that_may_not_grow_ends_a_save_alike(config, tmp_path):
    """Where nothing can be mounted the limit on file sizes of the operating system stands for a full disk."""

    class Limit:
        def on_step(self, run, record):
            if run.step == 5:
                self.context = file_limit(4096)
                self.context.__enter__()

        def on_error(self, run, error):
            self.context.__exit__(None, None, None)

    with pytest.raises(CheckpointError, match="step 8 could not be written: File too large"):
        train(started(config), run_dir=tmp_path / "run", callbacks=[Limit()], quiet=True)
    assert CheckpointStore(tmp_path / "run" / "checkpoints").latest()[0].step == 4
    train(started(config), run_dir=tmp_path / "run", resume=True, quiet=True)


@pytest.mark.parametrize("left", ["nothing", "half a configuration", "logs without a checkpoint", "a checkpoint set aside"])
def test_what_a_kill_at_the_start_leaves_can_be_resumed(config, tmp_path, left):
    folder, whole = tmp_path / "run", tmp_path / "whole"
    train(started(config), run_dir=whole, quiet=True)
    if left == "nothing":
        folder.mkdir()
    elif left == "half a configuration":
        folder.mkdir()
        (folder / ".tmp-config.toml").write_text("[ru")
    elif left == "logs without a checkpoint":
        shutil.copytree(whole, folder)
        shutil.rmtree(folder / "checkpoints")
    else:
        train(started(config, "train.steps=4"), run_dir=folder, quiet=True)
        (folder / "checkpoints" / "step-4").rename(folder / "checkpoints" / ".old-step-4")
    train(started(config), run_dir=folder, resume=True, quiet=True)
    assert outcome(folder)[:2] == outcome(whole)[:2]


def test_overwriting_that_is_killed_leaves_a_folder_that_can_be_overwritten(config, tmp_path, monkeypatch):
    train(started(config, "train.steps=4"), run_dir=tmp_path / "run", quiet=True)

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        train(started(config, "train.steps=4"), run_dir=tmp_path / "run", overwrite=True, quiet=True)
    monkeypatch.undo()
    train(started(config, "train.steps=4"), run_dir=tmp_path / "run", overwrite=True, quiet=True)


@pytest.mark.parametrize("how", ["resume", "overwrite"])
def test_two_processes_do_not_train_in_one_folder(config, tmp_path, how, monkeypatch):
    """A job that was started twice: the second one ends, and takes nothing from the first."""
    monkeypatch.setattr(runlock, "PATIENCE_S", 0.3)
    train(started(config, "train.steps=4"), run_dir=tmp_path / "run", quiet=True)
    other = RunFolder(tmp_path / "run")
    other.hold()
    unfinished = tmp_path / "run" / "checkpoints" / ".tmp-step-8"
    unfinished.mkdir()
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match="another process trains in this run folder"):
        train(started(config, "train.steps=8"), run_dir=tmp_path / "run", quiet=True, **{how: True})
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before
    other.release()
    assert train(started(config, "train.steps=8"), run_dir=tmp_path / "run", quiet=True, **{how: True}).steps == 8


def test_a_run_folder_is_left_though_a_process_has_inherited_its_lock(tmp_path, monkeypatch):
    """As one does that was forked meanwhile, a callback's, say."""
    monkeypatch.setattr(runlock, "PATIENCE_S", 0.3)
    first, second = RunFolder(tmp_path), RunFolder(tmp_path)
    first.hold()
    assert first.lock._folder is not None
    child = subprocess.Popen(["sleep", "30"], pass_fds=[first.lock._folder])
    try:
        first.release()
        second.hold()
    finally:
        child.kill()
        child.wait()
    second.release()


@pytest.mark.parametrize("resume", [False, True])
def test_what_another_process_trained_meanwhile_is_left_alone(tmp_path, resume):
    """A job that was started twice, and the second one found the folder empty: it must not begin anew over what the first one left."""
    first, second = (RunFolder(tmp_path / "run") for _ in range(2))
    assert not first.check(resume, False)
    assert not second.check(resume, False)
    first.create(load_config(), resume)
    first.append(first.metrics, {"step": 1})
    first.release()
    with pytest.raises(CheckpointError, match="another process has trained in this run folder meanwhile"):
        second.create(load_config(), resume)
    assert first.metrics.read_text()
    first.hold()


def test_a_lone_process_that_stands_still_tells_where_and_goes_on(tmp_path, capfd):
    def stands_still():
        time.sleep(0.9)

    with Watchdog(0, 1, 0.5, tmp_path) as watch:
        watch.note(7, "waiting for data")
        stands_still()
        watch.note(8, "evaluation")
        stands_still()
    err = capfd.readouterr().err
    assert "in step 7 (waiting for data), in stands_still (" in err
    assert "in step 8 (evaluation), in stands_still (" in err
    assert err.count("no progress for") == 2, "once a standstill"
    assert "stands_still" in (tmp_path / "hang-rank-0.txt").read_text()
    with Watchdog(0, 1, 0.5, tmp_path / "none") as watch:
        for step in range(8):
            watch.note(step, "training step")
            time.sleep(0.1)
    assert "no progress" not in capfd.readouterr().err


def _stand_still(rank: int, world: int, argument: None) -> None:
    time.sleep(120)


def test_the_strategy_kit_tells_where_processes_stand_still(tmp_path: Path):
    with pytest.raises(RuntimeError, match=r"(?s)ranks \[0, 1\] did not end within 8 s.*rank 1: .*in _stand_still\n"):
        run_processes(2, _stand_still, None, tmp_path, timeout=8)


def _abort(rank: int, world: int, argument: None) -> None:
    if rank:
        os.abort()


def test_the_strategy_kit_tells_of_a_process_that_was_killed(tmp_path: Path):
    with pytest.raises(RuntimeError, match=r"(?s)rank 1: ended with exit code -6\n.*in _abort\n"):
        run_processes(2, _abort, None, tmp_path, timeout=60)


def test_what_an_old_process_still_writes_is_in_nobodys_way(tmp_path):
    """A process of a run that has failed may write on for a while: into a folder of its own, which never becomes a checkpoint."""
    old, new = CheckpointStore(tmp_path), CheckpointStore(tmp_path)
    parts = {"model": {"w": torch.ones(2)}}
    begun = old.begin(4)
    (begun / "model.safetensors").write_bytes(b"half")
    new.save(4, meta={}, parts=parts, shared={}, ranks=[{}])
    assert not begun.exists()
    with pytest.raises(CheckpointError, match=r"step 4 could not be written: .* was removed meanwhile"):
        old.publish(4, begun, meta={"format": 1}, files={}, shared={}, ranks=[{}])
    assert new.problem(4) is None
    assert torch.equal(new.latest()[0].tensors("model")["w"], torch.ones(2))
