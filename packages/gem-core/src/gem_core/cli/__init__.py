"""The ``gemrec`` command: parsing, errors and exit codes. Start-up imports no torch.

Exit codes: 0 done, 1 the run failed, 2 something that the user can mend.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from gem_core.errors import GemError, RunError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    from gem_core.cli.app import build, split_globals

    # OpenMP threads that wait would spin: on a machine that does anything else, the reader's thread included, each of the many small
    # operations of a CPU step then waits for a thread that cannot run. Read when torch loads, so it is set before.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    debug = False
    with warnings.catch_warnings():
        _show_own_warnings()
        try:
            rest, debug, disabled = split_globals(list(sys.argv[1:] if argv is None else argv))
            build(disabled)(args=rest, prog_name="gemrec")
        except SystemExit as done:
            return done.code if isinstance(done.code, int) else int(done.code is not None)
        except GemError as error:
            if debug:
                raise
            _print_error(error)
            return error.exit_code
        except Exception as error:
            told = _machine(error)
            if debug or told is None:
                raise
            _print_error(told)
            return told.exit_code
    return 0


def _machine(error: Exception) -> GemError | None:
    """What the machine refused, wherever it was met: paths, space and memory are the user's to mend. None for a fault of the program."""
    if isinstance(error, OSError):
        return GemError(
            f"the system refused: {error.strerror or error}",
            where=None if error.filename is None else str(error.filename),
            fix="check that the path is there, is yours to write, and has space; --debug shows what was being done",
        )
    # The CPU's allocator of torch raises a RuntimeError; torch itself is not imported for asking.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error):
        return RunError(
            f"there is too little memory: {str(error).splitlines()[0] if str(error) else 'no more could be had'}",
            fix="`gemrec doctor CONFIG` weighs tables and parameters; take fewer table rows, a smaller data.batch_size or more devices",
        )
    return None


def _print_error(error: GemError) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(Text.assemble(("error: ", "bold red"), str(error)))


def _show_own_warnings() -> None:
    """Print warnings of this package as the sentences they are; others as Python does."""
    from gem_core.errors import RunWarning
    from gem_core.plugins import PluginWarning

    usual = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, PluginWarning | RunWarning):
            print(f"warning: {message}", file=sys.stderr)
        else:
            usual(message, category, *place, **more)

    warnings.showwarning = show
