"""What the kits share: whatever fails in a check is told with the rule that it breaks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def named(check: Callable[..., Any]) -> Callable[..., Any]:
    """``check``, whose failures begin with its name and end with its docstring's first paragraph.

    An assertion keeps its text; any other exception becomes an AssertionError that is caused by it. Skips pass through.
    """
    name = check.__name__.removeprefix("test").strip("_").replace("_", " ")
    meaning = " ".join((check.__doc__ or "").partition("\n\n")[0].split())

    @functools.wraps(check)
    def told(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        try:
            return check(*args, **kwargs)
        except AssertionError as fault:
            fault.args = (_words(name, meaning, str(fault)),)
            raise
        except Exception as fault:
            raise AssertionError(_words(name, meaning, f"{type(fault).__name__}: {fault}")) from fault

    return told


class Rules:
    """Base of the kits that are classes: each ``test_`` method is a rule."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, value in list(vars(cls).items()):
            if name.startswith("test_") and callable(value):
                setattr(cls, name, named(value))


def _words(name: str, meaning: str, fault: str) -> str:
    return f"rule '{name}' is broken: {fault}" + (f"\n  the rule: {meaning}" if meaning else "")
