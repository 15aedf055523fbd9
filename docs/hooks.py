"""mkdocs hook: drawings are put into pages, the benchmarks page shows every result, the compatibility page the versions that are pinned.

The results themselves and their plots go into results/ of the site. ``<!-- drawing: NAME -->`` in a page becomes docs/drawings/NAME.svg,
inline, so that it takes the page's colours and needs no network.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
DRAWING = re.compile(r"^<!-- drawing: ([\w-]+) -->$", re.MULTILINE)


def on_files(files: Any, config: Any, **_: Any) -> Any:
    from mkdocs.structure.files import File

    for path in sorted(DOCS.glob("benchmarks/**/*")):
        if path.suffix in (".json", ".svg"):
            files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    markdown = DRAWING.sub(lambda found: drawing(found[1]), markdown)
    if page.file.src_uri == "benchmarks.md":
        return markdown + "\n" + tables()
    if page.file.src_uri == "compatibility.md":
        return markdown.replace("<!-- versions -->", versions())
    return markdown


def drawing(name: str) -> str:
    """The SVG as a block of HTML."""
    return f'<figure class="drawing">\n{(DOCS / "drawings" / f"{name}.svg").read_text()}</figure>'


def tables() -> str:
    """All results, headings one level down: what a benchmark wrote as Markdown, and tables of the JSON of those that wrote none."""
    folder, inputs = DOCS / "benchmarks", {"measured-h200"}
    written = sorted(folder.rglob("*.md"))
    stems = {path.stem for path in written} | inputs
    pages = [shown(path) for path in written] + [table_of(path) for path in sorted(folder.rglob("*.json")) if path.stem not in stems]
    return "\n".join(re.sub(r"^#", "##", text, flags=re.MULTILINE) for text in pages)


def shown(path: Path) -> str:
    """What a benchmark wrote, its plot behind it; its heading has the file's name as anchor, for links from one result to another."""
    plot = f"\n![{path.stem}](results/{path.stem}.svg)\n" if path.with_suffix(".svg").exists() else ""
    text = re.sub(r"\]\((?=[\w-]+\.(?:json|svg)\))", "](results/", path.read_text())
    text = re.sub(r"\]\(([\w-]+)\.md\)", r"](#\1)", text)
    text = re.sub(r"\[([^\]]+)\]\((?!results/|#|https?:)[^)]+\)", r"\1", text)  # what is not part of the site
    return re.sub(r"^(# .*)$", rf"\1 {{#{path.stem}}}", text, count=1, flags=re.MULTILINE) + plot


def table_of(path: Path) -> str:
    """The Markdown of a result file: the facts of its head, then a table for each list of rows."""
    data = json.loads(path.read_text())
    facts = {key: value for key, value in data.items() if isinstance(value, str | int | float)}
    parts = [f"# {path.stem.capitalize()}\n", "; ".join(f"{key}: `{value}`" for key, value in facts.items()) + "\n"]
    for key, rows in data.items():
        if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
            columns = list(dict.fromkeys(name for row in rows for name, value in row.items() if not isinstance(value, dict | list)))
            lines = ["| " + " | ".join(_cell(row.get(name)) for name in columns) + " |" for row in rows]
            parts.append("\n".join([f"## {key.capitalize()}\n", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *lines]) + "\n")
    return "\n".join(parts)


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:,.4g}" if isinstance(value, float) else str(value)


def versions() -> str:
    """Declared needs of each package as a table."""
    import tomllib

    rows = []
    for path in sorted(DOCS.parent.glob("packages/*/pyproject.toml")):
        project = tomllib.loads(path.read_text())["project"]
        extras = [f"{need} (extra `{name}`)" for name, needs in project.get("optional-dependencies", {}).items() for need in needs]
        rows.append(f"| {project['name']} | {project['requires-python']} | {', '.join([*project['dependencies'], *extras])} |")
    return "\n".join(["| package | Python | needs |", "|---|---|---|", *rows])
