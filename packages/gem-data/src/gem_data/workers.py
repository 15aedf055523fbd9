"""Windows decoded in processes of their own, handed over through memory that has no name and so cannot be left behind.

Window i is the work of process i modulo n, and a process is at most one window ahead, so what is held is n windows beside the one in use,
and the order is that of one process. The files' state, features and filters travel once; positions stay with the source: no process knows
where an epoch stands, so the number of processes is no part of a stored state.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import pickle
import signal
import tempfile
from collections import deque
from collections.abc import Callable, Generator, Iterator
from itertools import count, islice
from multiprocessing import reduction
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import pyarrow as pa

from gem_core.errors import DataError
from gem_data.block import Block
from gem_data.files import Reader
from gem_data.rows import RowReader
from gem_data.units import Window


class Workers:
    """``processes`` that decode windows with ``rows``."""

    def __init__(self, rows: RowReader, processes: int) -> None:
        context = multiprocessing.get_context("spawn")
        threads = max(1, pa.cpu_count() // processes)
        self._rows = rows
        self._held: list[tuple[BaseProcess, Connection]] = []
        for number in range(processes):
            ours, theirs = context.Pipe(duplex=True)
            process = context.Process(target=_serve, args=(theirs, rows, threads), name=f"gem-data reader {number}", daemon=True)
            process.start()
            theirs.close()
            self._held.append((process, ours))

    def windows(self, todo: Iterator[Window], enter: Callable[[int], bool]) -> Generator[list[Block], None, None]:
        """The rows of each window's units, in order. ``enter(rows)`` is called before they are taken over; False: nothing more is wanted.

        :raises DataError: what a process met in the files, or that it has died.
        """
        sent: deque[Window] = deque()
        for i, window in enumerate(islice(todo, len(self._held))):
            self._send(i, window)
            sent.append(window)
        for i in count():
            if not sent:
                return
            window = sent.popleft()
            if not enter(window.stop - window.start):
                return
            blocks = self._received(i, window)
            more = next(todo, None)
            if more is not None:
                self._send(i, more)
                sent.append(more)
            yield blocks
            del blocks

    def close(self) -> None:
        for process, connection in self._held:
            connection.close()
            process.terminate()
        for process, _ in self._held:
            process.join()

    def _send(self, i: int, window: Window) -> None:
        process, connection = self._held[i % len(self._held)]
        try:
            connection.send(window)
        except OSError as error:
            raise self._died(process, window) from error

    def _received(self, i: int, window: Window) -> list[Block]:
        process, connection = self._held[i % len(self._held)]
        try:
            said = connection.recv()
            if isinstance(said, BaseException):
                raise said
            head, sizes, refused = said
            handle = reduction.recv_handle(connection)
        except (EOFError, ConnectionError) as error:
            raise self._died(process, window) from error
        self._rows.refused += refused
        try:
            memory = mmap.mmap(handle, max(1, sum(sizes)))
        finally:
            os.close(handle)
        view, buffers, at = memoryview(memory), [], 0
        for size in sizes:
            buffers.append(view[at : at + size])
            at += size
        blocks: list[Block] = pickle.loads(head, buffers=buffers)
        return blocks

    @staticmethod
    def _died(process: BaseProcess, window: Window) -> DataError:
        process.join(5)
        code = process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with code {code}"
        return DataError(
            f"a reader process (pid {process.pid}) {how}",
            where=", ".join(dict.fromkeys(unit.file.path for unit in window.units)),
            fix="the system kills processes when memory runs out: lower workers or window of the source; then resume, nothing is lost",
        )


def _serve(connection: Connection, rows: RowReader, threads: int) -> None:
    """A reader process: windows in, rows out, until the other side is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that reads from this one
    pa.set_cpu_count(threads)
    reader = Reader()
    while True:
        try:
            window = connection.recv()
        except (EOFError, OSError):
            return
        rows.refused = 0
        try:
            said: Any
            buffers: list[pickle.PickleBuffer] = []
            head = pickle.dumps(rows.window(window, reader), protocol=5, buffer_callback=buffers.append)
            parts = [buffer.raw() for buffer in buffers]
            handle = _memory(parts)
            said = head, [part.nbytes for part in parts], rows.refused
        except BaseException as error:
            handle, said = -1, error
        try:
            connection.send(said)
            if handle >= 0:
                reduction.send_handle(connection, handle, os.getppid())
        except OSError:
            return
        finally:
            if handle >= 0:
                os.close(handle)


def _memory(parts: list[memoryview]) -> int:
    """A file descriptor of memory that holds ``parts``: not of /dev/shm, which containers keep small, and nothing is left behind."""
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create("gem-data")
    else:
        with tempfile.TemporaryFile() as file:
            handle = os.dup(file.fileno())
    os.ftruncate(handle, max(1, sum(part.nbytes for part in parts)))
    for part in parts:
        while part.nbytes:
            part = part[os.write(handle, part) :]
    return handle
