"""One training at a time in a run folder.

The system locks the folder (``flock``): the lock ends with the process, however that comes. Where a file system refuses, as NFS does for
folders, a file ``.tmp-lock`` says who trains, and its time of change, renewed every `BEAT_S`, that this one lives. When it has been silent
for `STALE_S` by the file system's own clock, or is of a process of this machine that is gone, it is taken over.
"""

from __future__ import annotations

import fcntl
import logging
import os
import platform
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path

from gem_core.errors import CheckpointError

PATIENCE_S = 15.0
"""Seconds in which a process that was just killed, and the loaders that it leaves behind, may still let go of the run folder."""
BEAT_S, STALE_S = 10.0, 120.0
"""How often a lock file is renewed, and after how long without that it counts for nothing."""
NAME = ".tmp-lock"

_log = logging.getLogger(__name__)


class RunLock:
    """The lock of one folder, held by at most one `RunLock` of all processes between `hold` and `release`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / NAME
        self._folder: int | None = None
        self._mine: str | None = None
        self._ended = threading.Event()

    @property
    def held(self) -> bool:
        return self._folder is not None or self._mine is not None

    def hold(self) -> None:
        """Until `release`, or the end of this process however it comes, nobody else can.

        :raises CheckpointError: another process does, or the folder can neither be locked nor written.
        """
        if self.held:
            return
        self._folder = os.open(self.folder, os.O_RDONLY)
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                fcntl.flock(self._folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return self._sweep()
            except BlockingIOError:
                if time.monotonic() < end:
                    time.sleep(0.1)
                    continue
                self.release()
                raise self._taken() from None
            except OSError as error:
                os.close(self._folder)
                self._folder = None
                _log.info("%s cannot be locked by the system (%s): %s is used instead", self.folder, error.strerror, NAME)
                break
        try:
            self._hold_file()
            self._sweep()
        except OSError as error:
            fix = "look at the folder's permissions and at the file system, or give another one: --run-dir"
            what = f"the run folder cannot be locked against other trainings: {error.strerror}"
            raise CheckpointError(what, where=str(self.folder), fix=fix) from error

    def release(self) -> None:
        """Let others train here."""
        if self._folder is not None:
            with suppress(OSError):  # a process that was forked meanwhile holds it too, and closing would leave it locked
                fcntl.flock(self._folder, fcntl.LOCK_UN)
            os.close(self._folder)
            self._folder = None
        if self._mine is not None:
            self._ended.set()
            mine, self._mine = self._mine, None
            with suppress(OSError):  # a server that is gone ends no run that has ended: the file is silent from now on
                if self._read() == mine:
                    self.file.unlink(missing_ok=True)

    def _taken(self, owner: str = "") -> CheckpointError:
        by = f" ({owner.rpartition(' ')[0]})" if owner else ""
        fix = "wait until it has ended, or give another folder: --run-dir"
        return CheckpointError(f"another process trains in this run folder{by}", where=str(self.folder), fix=fix)

    # --- by a file ----------------------------------------------------------------------------------------------------------------

    def _hold_file(self) -> None:
        mine = f"host {_here()}, pid {os.getpid()} {uuid.uuid4().hex}"
        end, first = time.monotonic() + PATIENCE_S, None
        while not self._make(mine):
            seen = self._seen()
            if seen is None:
                continue
            owner, changed = seen
            if self._is_gone(owner, changed):
                self._take_over(owner)
                continue
            first = first or seen
            # One that has shown a sign of life meanwhile is waited for as long as a system's lock, a silent one until it is stale.
            if seen != first and time.monotonic() > end:
                raise self._taken(owner)
            time.sleep(min(0.1, BEAT_S / 4))
        self._mine, self._ended = mine, threading.Event()
        threading.Thread(target=self._beat, args=(mine, self._ended), name="run folder lock", daemon=True).start()

    def _make(self, mine: str) -> bool:
        """Write the lock file if there is none."""
        own = self.folder / f"{NAME}-{uuid.uuid4().hex}"
        own.write_text(mine)
        try:
            return self._place(own, mine) and self._read() == mine
        finally:
            own.unlink(missing_ok=True)

    def _place(self, own: Path, text: str) -> bool:
        """Make ``own`` the lock file; False if there is one."""
        try:
            os.link(own, self.file)  # with its content or not at all, over NFS too
        except FileExistsError:
            return False
        except OSError:  # a file system without links
            try:
                with open(self.file, "x") as file:
                    file.write(text)
            except FileExistsError:
                return False
        return True

    def _take_over(self, owner: str) -> None:
        """Remove the lock file of ``owner``, and of nobody else who may have come meanwhile.

        One at a time does so: who read a silent owner before another took over would else remove the lock file of that one, which he
        can put back only where a third has not made his own.
        """
        turn = self.folder / f"{NAME}-turn"
        try:
            os.close(os.open(turn, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            with suppress(FileNotFoundError):
                if self._silent(turn.stat().st_mtime):
                    turn.unlink()
            time.sleep(0.05)
            return
        try:
            if self._read() == owner:
                self._remove(owner)
        finally:
            turn.unlink(missing_ok=True)

    def _remove(self, owner: str) -> None:
        aside = self.folder / f"{NAME}-{uuid.uuid4().hex}"
        try:
            self.file.rename(aside)
        except FileNotFoundError:
            return
        try:
            found = aside.read_text()
        except FileNotFoundError:  # silent for so long that somebody's `_sweep` took it
            return
        if found == owner:
            _log.warning("%s was locked by %s, of which there is no sign of life: taken over", self.folder, owner.rpartition(" ")[0])
        else:  # the owner let go after all, and another came
            self._place(aside, found)
        aside.unlink(missing_ok=True)

    def _is_gone(self, owner: str, changed: float) -> bool:
        host, _, rest = owner.removeprefix("host ").partition(", pid ")
        pid = rest.partition(" ")[0]
        if host == _here() and pid.isdigit() and int(pid) != os.getpid():
            try:
                os.kill(int(pid), 0)
            except ProcessLookupError:
                return True
            except OSError:
                pass
        return self._silent(changed)

    def _silent(self, changed: float) -> bool:
        """Whether a file changed at ``changed`` has not been renewed for too long, by the clock that wrote that time."""
        own = self.folder / f"{NAME}-{uuid.uuid4().hex}"
        own.touch()
        now = own.stat().st_mtime
        own.unlink()
        return now - changed > STALE_S

    def _sweep(self) -> None:
        """Remove what processes left that were killed while they looked at the lock: files that live for milliseconds, long silent."""
        for left in list(self.folder.glob(f"{NAME}-*")):
            with suppress(OSError):
                if self._silent(left.stat().st_mtime):
                    left.unlink(missing_ok=True)

    def _seen(self) -> tuple[str, float] | None:
        try:
            with open(self.file) as file:  # opening asks the server of a network file system what is there now
                return file.read(), os.fstat(file.fileno()).st_mtime
        except FileNotFoundError:
            return None

    def _read(self) -> str | None:
        seen = self._seen()
        return None if seen is None else seen[0]

    def _beat(self, mine: str, ended: threading.Event) -> None:
        while not ended.wait(BEAT_S):
            try:
                # Where it is not there, somebody has removed it by hand: it is put back, unless another training has come already.
                found = self._read() or (mine if not ended.is_set() and self._make(mine) else self._read())
                if ended.is_set():
                    if found == mine == self._read():
                        self.file.unlink(missing_ok=True)
                    return
                if found != mine:
                    _log.error("%s: another process has taken the lock of this training, and both write here now", self.folder)
                    return
                os.utime(self.file)
            except OSError as error:
                _log.warning("the lock of %s cannot be renewed: %s", self.folder, error.strerror)


def _here() -> str:
    """This machine, and which processes a process id is looked up among: containers share host names."""
    with suppress(OSError):
        return f"{platform.node()} {os.readlink('/proc/self/ns/pid')}"
    return platform.node()
