"""Questions about the choice of an implementation: which ones could do this call, which one would, and why not the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gem_core.errors import OpError, PluginError
from gem_core.ops import dispatch
from gem_core.ops.contract import Problem
from gem_core.ops.contracts import contracts


def problem_of(op: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Problem:
    """The Problem of the call ``op(*args, **kwargs)``, which is checked but not run.

    :raises OpError: arguments that the op refuses.
    """
    from gem_core import ops

    name = op if isinstance(op, str) else op.__name__
    if name not in contracts():
        raise PluginError(f"there is no op called {name!r}", fix=f"ops are: {', '.join(contracts())}")
    kwargs.pop("backend", None)
    token = dispatch.probing.set(True)
    try:
        getattr(ops, name)(*args, **kwargs)
    except dispatch.Probed as found:
        return found.problem
    finally:
        dispatch.probing.reset(token)
    raise AssertionError(f"{name} returned without choosing an implementation")


def available(op: str | Callable[..., Any], *args: Any, **kwargs: Any) -> list[tuple[str, bool, str]]:
    """(name, supported, reason) of every implementation for the call ``op(*args, **kwargs)``, in the order of automatic choice.

    :raises OpError: arguments that the op refuses.
    """
    return dispatch.table(problem_of(op, *args, **kwargs))


def explain(op: str | Callable[..., Any], *args: Any, backend: str | None = None, **kwargs: Any) -> str:
    """Which implementation the call would use under the policy in force, and what became of the others, as lines of text.

    :raises OpError: arguments that the op refuses.
    """
    problem = problem_of(op, *args, **kwargs)
    choice = dispatch.policy().backend(problem.op) if backend is None else backend
    try:
        chosen: str | None = dispatch.choose(problem, choice).name
        verdict = f"{problem.op}: {chosen} ({'automatic' if choice == dispatch.AUTO else 'asked for: ' + choice.lstrip('~')})"
    except (OpError, PluginError) as refusal:
        chosen, verdict = None, str(refusal)
    lines = [verdict]
    for name, ok, reason in dispatch.table(problem):
        mark = "*" if name == chosen else " "
        lines.append(f"  {mark} {name}: {'supported' if ok else reason}")
    return "\n".join(lines)
