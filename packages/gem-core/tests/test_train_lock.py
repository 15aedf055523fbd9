"""A run folder on a file system that refuses locks: kept by a file with a sign of life."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from gem_core.config import config_from_dict
from gem_core.errors import CheckpointError
from gem_core.train import runlock, train
from gem_core.train.runfolder import RunFolder
from gem_core.train.runlock import NAME, RunLock


@pytest.fixture(autouse=True)
def refused(monkeypatch):
    """As NFS refuses to lock a folder; and everything fast."""

    def flock(*_):
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", flock)
    for name, value in (("PATIENCE_S", 0.5), ("BEAT_S", 0.05), ("STALE_S", 60.0)):
        monkeypatch.setattr(runlock, name, value)


def another(folder, host="elsewhere 1", pid=7, age=0.0):
    """What a training of another machine leaves."""
    file = folder / NAME
    file.write_text(f"host {host}, pid {pid} {'0' * 32}")
    os.utime(file, (time.time() - age, time.time() - age))
    return file


def test_one_holds_it_at_a_time(tmp_path, caplog):
    first, second = RunLock(tmp_path), RunLock(tmp_path)
    with caplog.at_level(logging.INFO):
        first.hold()
    assert f"cannot be locked by the system (Bad file descriptor): {NAME} is used instead" in caplog.text
    first.hold()
    with pytest.raises(CheckpointError, match=rf"another process trains in this run folder \(host .*, pid {os.getpid()}\)"):
        second.hold()
    first.release()
    assert list(tmp_path.iterdir()) == []
    second.hold()
    assert second.held
    assert not first.held
    second.release()


def test_one_that_ends_meanwhile_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(runlock, "PATIENCE_S", 30.0)
    first, second = RunLock(tmp_path), RunLock(tmp_path)
    first.hold()
    threading.Timer(0.4, first.release).start()
    second.hold()
    assert not first.held
    second.release()


def test_a_living_one_of_another_machine_is_left_alone(tmp_path):
    file, ended = another(tmp_path), threading.Event()

    def live():
        while not ended.wait(0.02):
            os.utime(file)

    thread = threading.Thread(target=live)
    thread.start()
    before = file.read_text()
    try:
        with pytest.raises(CheckpointError, match=r"another process trains in this run folder \(host elsewhere 1, pid 7\)"):
            RunLock(tmp_path).hold()
    finally:
        ended.set()
        thread.join()
    assert file.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == [NAME]


def test_one_without_a_sign_of_life_is_taken_over(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(runlock, "STALE_S", 2.0)
    another(tmp_path, age=3600.0)
    lock = RunLock(tmp_path)
    lock.hold()
    assert "was locked by host elsewhere 1, pid 7, of which there is no sign of life: taken over" in caplog.text
    lock.release()
    another(tmp_path)  # its machine lost power just now
    began = time.monotonic()
    lock.hold()
    assert time.monotonic() - began > 1.0
    lock.release()


def test_a_dead_process_of_this_machine_does_not_have_to_be_waited_for(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(runlock, "STALE_S", 3600.0)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    another(tmp_path, runlock._here(), gone.pid)
    lock = RunLock(tmp_path)
    lock.hold()
    assert f"pid {gone.pid}, of which there is no sign of life" in caplog.text
    lock.release()


def test_of_many_that_take_over_one_has_it(tmp_path):
    for _ in range(5):
        another(tmp_path, age=3600.0)
        barrier, locks, refused_ = threading.Barrier(8), [RunLock(tmp_path) for _ in range(8)], []

        def take(lock, barrier=barrier, refused_=refused_):
            barrier.wait()
            try:
                lock.hold()
            except CheckpointError as error:
                refused_.append(error)

        threads = [threading.Thread(target=take, args=(lock,)) for lock in locks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        holders = [lock for lock in locks if lock.held]
        assert len(holders) == 1
        assert len(refused_) == 7
        assert (tmp_path / NAME).read_text() == holders[0]._mine
        holders[0].release()
        assert list(tmp_path.iterdir()) == []


def test_one_who_read_the_silent_owner_before_leaves_the_next_one_alone(tmp_path):
    owner = another(tmp_path, age=3600.0).read_text()
    late, lock = RunLock(tmp_path), RunLock(tmp_path)
    lock.hold()
    late._take_over(owner)
    assert (tmp_path / NAME).read_text() == lock._mine
    lock.release()


def test_a_turn_that_nobody_ended_ends_by_itself(tmp_path):
    another(tmp_path, age=3600.0)
    turn = tmp_path / f"{NAME}-turn"
    turn.touch()
    os.utime(turn, (time.time() - 3600.0,) * 2)
    lock = RunLock(tmp_path)
    lock.hold()
    lock.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("by_system", [True, False])
def test_what_killed_processes_left_is_removed(tmp_path, monkeypatch, by_system):
    """By the next one that has the lock; what somebody may be writing right now stays."""
    if by_system:
        monkeypatch.undo()
    code = f"""
import fcntl, os, pathlib, signal
from gem_core.train import runlock
def refuse(*_): raise OSError(9, "Bad file descriptor")
fcntl.flock = refuse
os.link = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
runlock.RunLock(pathlib.Path({str(tmp_path)!r})).hold()
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(f"{NAME}-")
    fresh = tmp_path / f"{NAME}-{'0' * 32}"
    for name in ("", "-turn"):
        (tmp_path / f"{left.name}{name}").touch()
        os.utime(tmp_path / f"{left.name}{name}", (time.time() - 3600.0,) * 2)
    fresh.touch()
    lock = RunLock(tmp_path)
    lock.hold()
    assert {path.name for path in tmp_path.iterdir()} == {fresh.name, *(() if by_system else (NAME,))}
    lock.release()
    assert list(tmp_path.iterdir()) == [fresh]


def test_a_holder_whose_file_is_taken_says_so_and_leaves_it(tmp_path, caplog):
    lock = RunLock(tmp_path)
    lock.hold()
    file = another(tmp_path)
    end = time.monotonic() + 10
    while "another process has taken the lock of this training" not in caplog.text:
        assert time.monotonic() < end
        time.sleep(0.02)
    lock.release()
    assert file.is_file()


def test_a_holder_whose_file_is_removed_puts_it_back(tmp_path, caplog):
    """Else the next one to come would train beside it."""
    lock = RunLock(tmp_path)
    lock.hold()
    (tmp_path / NAME).unlink()
    end = time.monotonic() + 10
    while not (tmp_path / NAME).exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    with pytest.raises(CheckpointError, match="another process trains"):
        RunLock(tmp_path).hold()
    lock.release()
    assert list(tmp_path.iterdir()) == []
    assert "taken the lock" not in caplog.text


def test_a_file_system_that_is_gone_does_not_fail_a_run_that_has_ended(tmp_path, monkeypatch):
    lock = RunLock(tmp_path)
    lock.hold()

    def seen(*_):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(RunLock, "_seen", seen)
    lock.release()
    assert not lock.held


def test_a_file_system_without_links(tmp_path, monkeypatch):
    def link(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    another(tmp_path, age=3600.0)
    first, second = RunLock(tmp_path), RunLock(tmp_path)
    first.hold()
    with pytest.raises(CheckpointError, match="another process trains"):
        second.hold()
    first.release()
    assert list(tmp_path.iterdir()) == []


def test_emptying_a_folder_leaves_what_others_who_wait_have_made(tmp_path):
    """Their files are there for a moment only: to remove them would fail here, or there."""
    config, folder = config_from_dict({"run": {"device": "cpu"}}), RunFolder(tmp_path / "run")
    folder.create(config, resume=False)
    waiting = folder.path / f"{NAME}-{'0' * 32}"
    for path in (waiting, folder.metrics):
        path.touch()
    folder.create(config, resume=False)
    folder.release()
    assert {path.name for path in folder.path.iterdir()} == {waiting.name, folder.config.name}


def test_a_training_and_its_resumption(tmp_path):
    config = {
        "run": {"device": "cpu", "threads": 1},
        "data": {"batch_size": 8, "synthetic": {"rows": 64, "eval_rows": 16, "test_rows": 8}},
        "model": {"name": "dlrm", "embedding_dim": 4},
        "train": {"steps": 4, "tensorboard": False},
        "eval": {"metrics": ["ne"]},
    }
    folder = tmp_path / "run"
    threads = torch.get_num_threads()
    try:
        for how, steps in (({}, 4), ({"resume": True}, 6), ({"overwrite": True}, 4)):
            config["train"]["steps"] = steps
            assert train(config_from_dict(config), run_dir=folder, quiet=True, **how).steps == steps
            assert not (folder / NAME).exists()
        other = RunFolder(folder)
        other.hold()
        with pytest.raises(CheckpointError, match="another process trains"):
            train(config_from_dict(config), run_dir=folder, quiet=True, resume=True)
        other.release()
    finally:
        torch.set_num_threads(threads)
    assert json.loads((folder / "summary.json").read_text())["steps"] == 4
