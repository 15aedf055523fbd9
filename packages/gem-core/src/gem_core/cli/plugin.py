"""``gemrec plugin new``: a package that plugs in, passes the conformance kit, and waits for its content."""

from __future__ import annotations

import keyword
import re
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

import typer

from gem_core.__about__ import __version__
from gem_core.cli.groups import CommandGroups
from gem_core.errors import ConfigError

KINDS = {
    "kernel": ("kernel", "norm/{short}", '[kernels.ops]\nnorm = "{short}"', ""),
    "source": ("source", "{short}", '[data]\nsource = "{short}"', ', "numpy>=1.26", "pydantic>=2.9"'),
    "model": ("model", "{short}", '[model]\nname = "{short}"', ""),
    "recipe": ("recipe", "{short}", '[precision]\nrecipe = "{short}"', ""),
    "strategy": ("strategy", "{short}", '[parallel]\ndense = "{short}"', ""),
}
"""Kind -> module of the part, name of the offer, lines of a configuration that choose it, further needs."""


def register(app: CommandGroups) -> None:
    app.group("plugin").command("new")(new)


def new(
    name: Annotated[str, typer.Argument(help="Name of the distribution, as in acme-kernels.")],
    kind: Annotated[
        Literal["kernel", "source", "model", "recipe", "strategy"],
        typer.Option("--kind", help="What it offers; a strategy is one of the dense part."),
    ] = "kernel",
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The package's folder is made in this one.")] = Path(),
) -> None:
    """Make the folder of a plug-in package: pyproject, plug-in object, a working implementation to replace, its conformance test.

    Example: gemrec plugin new acme-kernels --kind kernel
    """
    for path in write(name, kind, out):
        print(path)
    print(f"next: cd {out / name} && pip install . pytest && pytest tests")


def write(name: str, kind: str, out: Path) -> list[Path]:
    """Write the package's files; returns their paths.

    :raises ConfigError: a name that no distribution or module can have, or a folder that is there already.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name) or keyword.iskeyword(name):
        raise ConfigError(f"{name!r} cannot be the name of a package", fix="use lower-case letters, digits and single hyphens")
    folder = out / name
    if folder.exists():
        raise ConfigError("the folder is there already", where=str(folder), fix="choose another name or --out")
    module, short = name.replace("-", "_"), name.rsplit("-", 1)[-1]
    part, offer, choice, more = KINDS[kind]
    major = int(__version__.split(".")[0])
    values = {
        "name": name,
        "module": module,
        "short": short,
        "kind": kind,
        "core": ".".join(__version__.split(".")[:2]),
        "next": str(major + 1),
        "more": more,
        "offer": offer.format(short=short),
        "choice": choice.format(short=short),
    }
    pages = {
        "pyproject.toml": "pyproject.txt",
        "README.md": "readme.txt",
        f"src/{module}/plugin.py": f"{kind}/plugin.txt",
        f"src/{module}/{part}.py": f"{kind}/part.txt",
        "tests/test_package.py": "package.txt",
        f"tests/test_{part}.py": f"{kind}/test.txt",
    }
    template = files("gem_core.cli").joinpath("template")
    texts = {target: template.joinpath(*page.split("/")).read_text() for target, page in pages.items()}
    texts[f"src/{module}/__init__.py"] = '"""{{name}}: a gem plug-in."""\n'
    written = []
    for target, text in texts.items():
        path = folder / target
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(re.sub(r"\{\{(\w+)\}\}", lambda m: values[m[1]], text))
        written.append(path)
    return written
