"""mkdocs hook: the benchmarks page shows every table under docs/benchmarks, the compatibility page the versions that the project pins."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri == "benchmarks.md":
        return markdown + "\n" + tables()
    if page.file.src_uri == "compatibility.md":
        return markdown.replace("<!-- versions -->", versions())
    return markdown


def tables() -> str:
    """The Markdown of all results, headings one level down."""
    pages = [path.read_text() for path in sorted((DOCS / "benchmarks").glob("*.md"))]
    return "\n".join(re.sub(r"^#", "##", text, flags=re.MULTILINE) for text in pages)


def versions() -> str:
    """Declared needs of each package as a table."""
    import tomllib

    rows = []
    for path in sorted(DOCS.parent.glob("packages/*/pyproject.toml")):
        project = tomllib.loads(path.read_text())["project"]
        extras = [f"{need} (extra `{name}`)" for name, needs in project.get("optional-dependencies", {}).items() for need in needs]
        rows.append(f"| {project['name']} | {project['requires-python']} | {', '.join([*project['dependencies'], *extras])} |")
    return "\n".join(["| package | Python | needs |", "|---|---|---|", *rows])
