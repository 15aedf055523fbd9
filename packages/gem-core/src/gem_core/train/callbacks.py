"""Tells a run's callbacks of what happens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from gem_core.errors import GemError, RunError
from gem_core.train.contract import Callback, RunInfo


def tell(callbacks: Iterable[Callback], event: str, run: RunInfo, *arguments: Any) -> None:
    """Call the method ``event`` of every callback that has one; one that fails ends the run, unless the run is failing already.

    :raises RunError: a callback raised something that is no `GemError`, which is passed on as it is."""
    for callback in callbacks:
        method: Callable[..., None] | None = getattr(callback, event, None)
        if method is None:
            continue
        try:
            method(run, *arguments)
        except GemError:
            if event != "on_error":
                raise
        except Exception as error:
            if event != "on_error":
                message = f"the callback {type(callback).__name__} failed in {event}: {type(error).__name__}: {error}"
                raise RunError(message, where=f"step {run.step}") from error
