"""Work done ahead in a background thread, with a bound on how much of it waits."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
_END = object()


class Ahead(Generic[T]):
    """Iterates ``make()`` in a thread, at most ``depth`` results ahead of the consumer, counting the one in the making; None: as far as
    ``make`` lets itself go (see `Room`).

    An exception in the thread is raised where the result was due. ``close`` stops the thread and waits for it.
    """

    def __init__(self, make: Callable[[], Iterator[T]], depth: int | None, name: str) -> None:
        self._make = make
        self._room = None if depth is None else threading.Semaphore(depth)
        self._ready: deque[object] = deque()
        self._filled = threading.Semaphore(0)
        self._stop = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        while True:
            self._filled.acquire()
            item = self._ready.popleft()
            if item is _END:
                return
            if isinstance(item, BaseException):
                raise item
            # Room is given back as the result is handed out: with a depth of 1 the next one is made while this one is used.
            if self._room is not None:
                self._room.release()
            yield item  # type: ignore[misc]
            del item

    def close(self) -> None:
        self._stop = True
        if self._room is not None:
            self._room.release()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._ready.clear()

    def _work(self) -> None:
        last: object = _END
        made = None
        try:
            made = self._make()
            while not self._stop:
                if self._room is not None:
                    self._room.acquire()
                if self._stop:
                    return
                item = next(made, _END)
                if item is _END:
                    break
                self._put(item)
                del item
        except BaseException as error:
            last = error
        finally:
            close = getattr(made, "close", None)
            if close is not None:
                close()
            self._put(last)

    def _put(self, item: object) -> None:
        self._ready.append(item)
        self._filled.release()


class Room:
    """How many rows one thread may hold ready for another: at most ``most``."""

    def __init__(self) -> None:
        self.most = 0
        self._held = 0
        self._open = True
        self._changed = threading.Condition()

    def enter(self, rows: int) -> bool:
        """Wait until there is room for ``rows`` more; False once `close` was called."""
        with self._changed:
            self._changed.wait_for(lambda: not self._open or self._held + rows <= self.most)
            self._held += rows
            return self._open

    def leave(self, rows: int) -> None:
        with self._changed:
            self._held -= rows
            self._changed.notify_all()

    def close(self) -> None:
        """Let the thread that waits go."""
        with self._changed:
            self._open = False
            self._changed.notify_all()
