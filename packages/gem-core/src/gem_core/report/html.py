"""Pieces of HTML that sections are made of; everything that is put in is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any


def table(head: Sequence[str] | None, rows: Iterable[Sequence[str]]) -> str:
    """A table; without a head its rows are pairs of a name and a text."""
    top = "" if head is None else "<tr>" + "".join(f"<th>{escape(h)}</th>" for h in head) + "</tr>"
    kind = "pairs" if head is None else "grid"
    body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    return f"<div class='wide'><table class='{kind}'>{top}{body}</table></div>"


def pairs(rows: Iterable[tuple[Any, Any]]) -> str:
    return table(None, [[str(k), str(v)] for k, v in rows])


def part(title: str, text: str) -> str:
    return f"<h3>{escape(title)}</h3>{text}"


def note(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def nothing(text: str) -> str:
    """A sentence in place of what is not there."""
    return f"<p class='none'>{escape(text)}</p>"


def folded(title: str, text: str) -> str:
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"


def value(found: Any) -> str:
    return "undefined" if found is None else f"{found:.5f}" if isinstance(found, int | float) else str(found)


def count(found: Any) -> str:
    return "unknown" if found is None else f"{found:,}"


def clock(seconds: Any) -> str:
    if seconds is None:
        return "unknown"
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def gib(found: Any) -> str:
    return "unknown" if not found else f"{found / 2**30:,.2f} GiB"
