"""What a benchmark leaves: its result as JSON, and a page of Markdown beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write(folder: Path, name: str, result: Mapping[str, Any], page: str) -> None:
    """``NAME.json`` and ``NAME.md`` in ``folder``, which is made where it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1, default=str) + "\n")
    (folder / f"{name}.md").write_text(page)


def machine(result: Mapping[str, Any]) -> str:
    """Device and versions, as `gem_core.train.runfolder.environment` tells them."""
    return "; ".join([str(result.get("device", "")), ", ".join(f"{k} {v}" for k, v in result.get("versions", {}).items())])


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """An aligned Markdown table of all columns that some row has. Floats have three significant digits; absent values are empty."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [columns, *([_cell(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = ["| " + " | ".join(text.ljust(w) for text, w in zip(line, widths)) + " |" for line in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) and abs(value) < 1000 else str(value)
