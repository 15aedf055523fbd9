"""Tables for the terminal whose words stay whole."""

from __future__ import annotations

from typing import Any

from rich import table
from rich.console import Console, ConsoleOptions, RenderResult


class Table(table.Table):
    """A table of texts. Where it is wider than the terminal, its widest columns shrink, none below its longest word."""

    def __init__(self, *headers: str, **options: Any) -> None:
        super().__init__(*headers, **options)
        self._words = [_longest(text.split()) for text in headers]
        self._lines = [len(text) for text in headers]

    def add_row(self, *cells: Any, **options: Any) -> None:
        super().add_row(*cells, **options)
        self._words = [max(a, _longest(text.split())) for a, text in zip(self._words, cells)]
        self._lines = [max(a, _longest(text.splitlines())) for a, text in zip(self._lines, cells)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths, frame = list(self._lines), 3 * len(self._lines) + 1
        while sum(widths) + frame > options.max_width and widths != self._words:
            widths[max(range(len(widths)), key=lambda i: (widths[i] > self._words[i], widths[i]))] -= 1
        for column, width in zip(self.columns, widths):
            column.width = width
        return super().__rich_console__(console, options.update(max_width=max(options.max_width, sum(widths) + frame)))


def _longest(texts: list[str]) -> int:
    return max(map(len, texts), default=0)


def size_text(size: float) -> str:
    """Bytes in GB, in MB below 0.1 GB."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"
