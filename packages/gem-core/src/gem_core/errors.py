"""Every error a user can cause: what is wrong, where it is, and what to do about it.

The command prints ``str(error)`` without a traceback and exits with ``exit_code`` (2: the user can mend it, 1: the run failed).
"""

from __future__ import annotations

from typing import Any


class GemError(Exception):
    """Base class. ``what`` is one sentence; ``where`` names file, row, column, feature or configuration key; ``fix`` says what to do."""

    exit_code = 2

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        self.what, self.where, self.fix = what, where, fix
        lines = [what]
        if where:
            lines.append(f"  where: {where}")
        if fix:
            lines.append(f"  fix:   {fix}")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.what, self.where, self.fix)


def _rebuild(cls: type[GemError], what: str, where: str | None, fix: str | None) -> GemError:
    return cls(what, where=where, fix=fix)


class RunWarning(UserWarning):
    """What a run does without; the command prints the sentence alone."""


class ConfigError(GemError):
    """A configuration file or override that cannot be used."""


class PluginError(GemError):
    """A plug-in that is missing, broken, too old, or offers what another one offers already."""


class OpError(GemError):
    """Arguments that an op's contract refuses, or an explicitly chosen implementation that cannot do the problem."""


class DataError(GemError):
    """Input data that is missing, unreadable or violates its declaration."""


class BatchError(DataError):
    """A batch whose tensors do not fit each other; the message names the feature."""


class CheckpointError(GemError):
    """A checkpoint or run folder that cannot be written, read or matched to the model."""


class DeviceError(GemError):
    """A device, driver or library combination that cannot do what was asked."""


class RunError(GemError):
    """A run that started and failed."""

    exit_code = 1


class PeerError(RunError):
    """Another process of the run failed, was lost or hangs."""


class NumericsError(RunError):
    """A non-finite loss or gradient, or a numerics guard that stopped the run."""
