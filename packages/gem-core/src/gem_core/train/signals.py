"""Turns SIGINT, SIGTERM, SIGUSR1 and SIGUSR2, which schedulers send before they take a machine back, into a request to stop after the
current step."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class Stopped(Exception):
    """What was under way was given up, since the run is to stop."""


class StopRequest:
    """Context manager; ``requested`` holds the signal's name once one has come. A second SIGINT interrupts at once.

    Signals reach only the main thread of a process: elsewhere this does nothing.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = signal.Signals(number).name
