"""Which implementation does an op: explicit choice, policy of the configuration, or the fastest that supports the problem.

Order: the ``backend=`` argument, then the policy (`set_policy`, from ``[kernels]``), then the supported one of highest priority. An
explicit choice is honoured or refused with the reason. What was chosen automatically, and why faster ones were not, is logged once.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from gem_core import plugins
from gem_core.errors import OpError, PluginError
from gem_core.hookspecs import KernelSpec
from gem_core.ops.contract import Problem, Supported, no
from gem_core.ops.contracts import contracts

AUTO = "auto"
log = logging.getLogger("gem_core.ops")


@dataclass(frozen=True)
class Policy:
    """``default`` applies to every op that has an implementation of that name (the others stay automatic), ``ops`` to single ops."""

    default: str = AUTO
    ops: Mapping[str, str] = field(default_factory=dict)

    def backend(self, op: str) -> str:
        """Choice for ``op``: "auto", a name, or "~name" where the name is only the default of all ops."""
        if op in self.ops:
            return self.ops[op]
        return self.default if self.default == AUTO else f"~{self.default}"


_policy = Policy()

probing: ContextVar[bool] = ContextVar("probing", default=False)
"""While true, `choose` raises `Probed` with the problem: how a call is asked about without being run."""


class Probed(Exception):
    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.op)
        self.problem = problem


def policy() -> Policy:
    """The policy in force."""
    return _policy


def set_policy(default: str = AUTO, ops: Mapping[str, str] | None = None) -> None:
    """Choose implementations for the whole process; ``[kernels]`` of the configuration does this.

    :raises PluginError: an op or an implementation that nobody offers.
    """
    global _policy
    chosen = Policy(default, dict(ops or {}))
    _check_policy(chosen)
    _policy = chosen


@contextmanager
def use_policy(default: str = AUTO, ops: Mapping[str, str] | None = None) -> Iterator[None]:
    """`set_policy` for a with-block. Backward passes keep the choice of their forward."""
    global _policy
    before = _policy
    set_policy(default, ops)
    try:
        yield
    finally:
        _policy = before


def _check_policy(chosen: Policy) -> None:
    known = contracts()
    for op, name in chosen.ops.items():
        if op not in known:
            near = difflib.get_close_matches(op, known, n=1)
            raise PluginError(
                f"there is no op called {op!r}",
                where=f"kernels.ops.{op}",
                fix=(f"did you mean {near[0]!r}? " if near else "") + f"ops are: {', '.join(known)}",
            )
        if name != AUTO:
            _find(op, name)
    if chosen.default != AUTO:
        names = sorted({s.name for op in known for s in kernel_specs(op)})
        if chosen.default not in names:
            what = f"op with an implementation called {chosen.default!r}"
            raise plugins.manager().missing(what, chosen.default, names, "kernels.default")


def kernel_specs(op: str) -> list[KernelSpec]:
    """Implementations of ``op``, highest priority first."""
    _refresh()
    if op not in _specs:
        extra = [s for s in _extra if s.op == op]
        names = {s.name for s in extra}
        offered = [s for s in plugins.manager().offers("kernel") if s.op == op and s.name not in names]
        _specs[op] = sorted([*extra, *offered], key=lambda s: -s.priority)
    return _specs[op]


@contextmanager
def offering(*specs: KernelSpec) -> Iterator[None]:
    """For a with-block, offer ``specs`` beside what plug-ins offer, in place of offers of the same op and name: for tests of a spec."""
    global _extra
    before = _extra
    _extra = (*specs, *(s for s in before if (s.op, s.name) not in {(n.op, n.name) for n in specs}))
    _forget()
    try:
        yield
    finally:
        _extra = before
        _forget()


def candidates(problem: Problem) -> list[tuple[KernelSpec, Supported]]:
    """Every implementation of the problem's op, highest priority first, with its answer; one that raises is out, with the exception."""
    return [(spec, _ask(spec, problem)) for spec in kernel_specs(problem.op)]


def choose(problem: Problem, backend: str = AUTO) -> KernelSpec:
    """The implementation that does ``problem``.

    :raises OpError: the named one refuses the problem, or none supports it; with every reason.
    :raises PluginError: the named one does not exist, or its ``supports`` raises.
    """
    _refresh()
    if probing.get():
        raise Probed(problem)
    key = (problem, backend)
    if key not in _chosen:
        if len(_chosen) > 10_000:
            _chosen.clear()
        _chosen[key] = _choose(problem, backend)
    return _chosen[key]


def fastest(problem: Problem) -> KernelSpec | None:
    """The automatic choice for an op that need not have an implementation; None without one that supports the problem, or where the
    configuration's choice for all ops is not the fastest."""
    _refresh()
    if _policy.default != AUTO:
        return None
    if problem not in _fastest:
        if len(_fastest) > 10_000:
            _fastest.clear()
        _fastest[problem] = _choose(problem, AUTO) if any(answer for _, answer in candidates(problem)) else None
    return _fastest[problem]


def choose_backward(problem: Problem, backend: str) -> KernelSpec:
    """The implementation whose backward is used: that of the forward, or the default backward where it has none."""
    spec = choose(problem, backend)
    if spec.backward is not None:
        return spec
    key = (problem, f"backward of {backend}")
    if key not in _chosen:
        usable = [s for s, answer in candidates(problem) if answer and s.backward is not None]
        if not usable:
            raise OpError(f"{problem.op}: {spec.name!r} has no backward and no other implementation supports this problem")
        _once(f"{problem.op}: {spec.name!r} has no backward; gradients come from {usable[0].name!r}", logging.WARNING)
        _chosen[key] = usable[0]
    return _chosen[key]


def table(problem: Problem) -> list[tuple[str, bool, str]]:
    """(name, supported, reason) of every implementation, highest priority first."""
    return [(spec.name, bool(answer), answer.reason) for spec, answer in candidates(problem)]


def _choose(problem: Problem, backend: str) -> KernelSpec:
    name = backend
    if backend.startswith("~"):
        name = backend[1:]
        if name not in {s.name for s in kernel_specs(problem.op)}:
            _once(f"{problem.op}: no implementation called {name!r}, chosen automatically", logging.INFO)
            name = AUTO
    if name != AUTO:
        return _explicit(problem, name)
    passed: list[str] = []
    for spec, answer in candidates(problem):
        if answer:
            why = f" (passed over: {'; '.join(passed)})" if passed else ""
            _once(f"{problem.op}: {spec.name}{why}", logging.INFO)
            return spec
        passed.append(f"{spec.name}: {answer.reason}")
    raise OpError(
        f"{problem.op}: no implementation supports this problem ({'; '.join(passed)})", fix="`gemrec plugins --ops` shows the table"
    )


def _explicit(problem: Problem, name: str) -> KernelSpec:
    spec = _find(problem.op, name)
    try:
        answer = spec.supports(problem)
    except Exception as fault:
        raise PluginError(
            f"implementation {name!r} of {problem.op} broke while it was asked whether it supports this problem: {_say(fault)}",
            fix=f"report it to the package that offers {name!r}, or choose another one",
        ) from fault
    if not answer:
        others = [s.name for s, a in candidates(problem) if a]
        raise OpError(
            f"implementation {name!r} of {problem.op} was asked for, but cannot do this problem: {answer.reason}",
            where=_asked(problem.op, name),
            fix=f'choose {others[0]!r}, or leave it to "auto"' if others else None,
        )
    return spec


def _asked(op: str, name: str) -> str:
    """Who named the implementation: a key of the configuration, or the call."""
    if _policy.ops.get(op) == name:
        return f"kernels.ops.{op}"
    return "kernels.default" if op not in _policy.ops and _policy.default == name else f"backend={name!r}"


def _find(op: str, name: str) -> KernelSpec:
    specs = {s.name: s for s in kernel_specs(op)}
    if name not in specs:
        wanted = f"{op}/{name}"
        raise plugins.manager().missing(
            f"kernel called {wanted!r}", wanted, (f"{op}/{known}" for known in specs), "kernels.ops, or backend"
        )
    return specs[name]


def _ask(spec: KernelSpec, problem: Problem) -> Supported:
    try:
        return spec.supports(problem)
    except Exception as fault:
        return no(f"broke when asked: {_say(fault)}")


def _say(fault: Exception) -> str:
    return f"{type(fault).__name__}: {fault}"


_owner: object = None
_specs: dict[str, list[KernelSpec]] = {}
_chosen: dict[tuple[Problem, str], KernelSpec] = {}
_fastest: dict[Problem, KernelSpec | None] = {}
_said: set[str] = set()
_extra: tuple[KernelSpec, ...] = ()


def _refresh() -> None:
    """Forget cached choices when the plug-in manager was replaced."""
    global _owner
    current = plugins.manager()
    if current is not _owner:
        _owner = current
        _forget()


def begin_anew() -> None:
    """Choose anew from now on, and say again what was said before: what follows is another run."""
    _forget()
    _said.clear()


def _forget() -> None:
    _specs.clear()
    _chosen.clear()
    _fastest.clear()


def _once(message: str, level: int) -> None:
    if message not in _said:
        _said.add(message)
        log.log(level, message)
