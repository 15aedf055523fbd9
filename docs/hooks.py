"""mkdocs hook: drawings are put into pages, the benchmarks page shows every result, the compatibility page the versions that are pinned.

The results themselves and their plots go into results/ of the site. ``<!-- drawing: NAME -->`` in a page becomes docs/drawings/NAME.svg,
inline, so that it takes the page's colours and needs no network. ``<!-- keys: MODULE -->`` becomes a table for each configuration class
of the module, read from its source: the site is built without the packages.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
KEYS = re.compile(r"^<!-- keys: ([\w.]+) -->$", re.MULTILINE)
LIMITS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most", "min_length": "at least this long:"}
BAR = r"\|"
DRAWING = re.compile(r"^<!-- drawing: ([\w-]+) -->$", re.MULTILINE)


def on_files(files: Any, config: Any, **_: Any) -> Any:
    from mkdocs.structure.files import File

    for path in sorted(DOCS.glob("benchmarks/**/*")):
        if path.suffix in (".json", ".svg"):
            files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    markdown = DRAWING.sub(lambda found: drawing(found[1]), markdown)
    markdown = KEYS.sub(lambda found: keys(found[1]), markdown)
    if page.file.src_uri == "benchmarks.md":
        return markdown + "\n" + tables()
    if page.file.src_uri == "compatibility.md":
        return markdown.replace("<!-- versions -->", versions())
    return markdown


def drawing(name: str) -> str:
    """The SVG as a block of HTML."""
    return f'<figure class="drawing">\n{(DOCS / "drawings" / f"{name}.svg").read_text()}</figure>'


def keys(module: str) -> str:
    """Tables of the configuration classes of a module in their order; a private base's keys stand with those that derive from it."""
    (file,) = DOCS.parent.glob(f"packages/*/src/{module.replace('.', '/')}.py")
    tree = ast.parse(file.read_text()).body
    kinds = {ast.unparse(node.targets[0]): ast.unparse(_plain(node.value)) for node in tree if isinstance(node, ast.Assign)}
    classes = {node.name: node for node in tree if isinstance(node, ast.ClassDef) and _is_config(node)}
    found = {name: list(_rows(node, kinds)) for name, node in classes.items()}
    parts = []
    for name, node in classes.items():
        bases = [base for base in map(ast.unparse, node.bases) if base in found]
        hidden = [base for base in bases if base.startswith("_")]
        rows = [*(row for base in hidden for row in found[base]), *found[name]]
        if name.startswith("_") or not rows:
            continue
        about = (ast.get_docstring(node) or "").replace("``", "`")
        bases += [base for of in hidden for base in map(ast.unparse, classes[of].bases)]
        shared = [base for base in bases if found.get(base) and not base.startswith("_")]
        also = f"\n\nAnd the keys of {', '.join(shared)}." if shared else ""
        parts.append("\n".join([f"### {name}\n", f"{about}{also}\n", "| key | type | default | meaning |", "|---|---|---|---|", *rows]))
    return "\n\n".join(parts)


def _is_config(node: ast.ClassDef) -> bool:
    return any(re.search(r"(Config|Section|Options|Law|Ids)$", ast.unparse(base)) for base in node.bases)


def _plain(kind: ast.expr) -> ast.expr:
    """Without what ``Annotated`` adds."""
    if isinstance(kind, ast.Subscript) and ast.unparse(kind.value) == "Annotated" and isinstance(kind.slice, ast.Tuple):
        return kind.slice.elts[0]
    return kind


def _rows(node: ast.ClassDef, kinds: dict[str, str]) -> Iterator[str]:
    """A line a field; ``kinds``: names that the module gives to types."""
    for field in node.body:
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name) or field.target.id.startswith("_"):
            continue
        kind, default, meaning = ast.unparse(field.annotation), field.value, ""
        if isinstance(default, ast.Call) and ast.unparse(default.func) == "Field":
            given = {word.arg: word.value for word in default.keywords}
            limits = [f"{LIMITS[name]} {ast.unparse(value)}" for name, value in given.items() if name in LIMITS]
            told = ast.literal_eval(given["description"]) if "description" in given else ""
            meaning = "; ".join(filter(None, [told, ", ".join(limits)]))
            default = default.args[0] if default.args else given.get("default", given.get("default_factory"))
        kind = re.sub(r"\w+", lambda word: kinds.get(word[0], word[0]), kind)
        cells = (f"`{field.target.id}`", f"`{kind}`", _default(default), meaning)
        yield f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |"


def _default(value: ast.expr | None) -> str:
    """As it is written in TOML, where it can be."""
    if value is None or ast.unparse(value) == "...":
        return "needed"
    try:
        plain = ast.literal_eval(value)
    except ValueError:
        return "none" if ast.unparse(value) in ("dict", "list") else "its own" if isinstance(value, ast.Call) else f"`{ast.unparse(value)}`"
    return "unset" if plain is None else f"`{json.dumps(plain)}`"


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
