"""Work done ahead in a background thread, with a bound on how much of it waits."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
_END = object()


class Ahead(Generic[T]):
    """Iterates ``make()`` in a thread, at most ``depth`` results ahead of the consumer, counting the one in the making.

    Room for another one is given back as a result is handed out, or, with ``manual``, when `more` is called.
    An exception in the thread is raised where the result was due. ``close`` stops the thread and waits for it.
    """

    def __init__(self, make: Callable[[], Iterator[T]], depth: int, name: str, *, manual: bool = False) -> None:
        self._make, self._manual = make, manual
        self._room = threading.Semaphore(depth)
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
            if not self._manual:
                self._room.release()
            yield item  # type: ignore[misc]
            del item

    def more(self) -> None:
        """Room for one more result."""
        self._room.release()

    def close(self) -> None:
        self._stop = True
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
