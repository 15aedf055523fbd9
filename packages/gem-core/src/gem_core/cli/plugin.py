"""``gemrec plugin new``: a package that plugs in, passes the conformance kit, and waits for its content."""

from __future__ import annotations

import keyword
import re
from contextlib import suppress
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

import typer

from gem_core.__about__ import __version__
from gem_core.cli.groups import CommandGroups
from gem_core.errors import ConfigError
from gem_core.plugins import manager

KINDS = {
    "kernel": ("kernel", "norm/{short}", '[kernels.ops]\nnorm = "{short}"', ""),
    "source": ("source", "{short}", '[data]\nsource = "{short}"', ', "numpy>=1.26", "pydantic>=2.9"'),
    "model": ("model", "{short}", '[model]\nname = "{short}"', ""),
    "recipe": ("recipe", "{short}", '[precision]\nrecipe = "{short}"', ""),
    "strategy": ("strategy", "{short}", '[parallel]\ndense = "{short}"', ""),
}
"""Kind -> module of the part, name of the offer, lines of a configuration that choose it, further needs."""
_SECTIONS = {"source": "data", "recipe": "precision", "strategy": "parallel"}
"""Kind -> the section that holds its options in a table of the offer's name."""


def register(app: CommandGroups) -> None:
    app.group("plugin").command("new")(new)


def new(
    name: Annotated[str, typer.Argument(help="Name of the distribution, as in acme-kernels.")],
    kind: Annotated[
        Literal["kernel", "source", "model", "recipe", "strategy"],
        typer.Option("--kind", help="What it offers; a strategy is one of the dense part."),
    ] = "kernel",
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The package's folder is made in this one.")] = Path(),
    offer: Annotated[
        str | None, typer.Option("--offer", metavar="NAME", help="What configurations choose it by; otherwise the name's last word.")
    ] = None,
) -> None:
    """Make the folder of a plug-in package: pyproject, plug-in object, a working implementation to replace, its conformance test.

    Example: gemrec plugin new acme-kernels --kind kernel --offer fast
    """
    for path in write(name, kind, out, offer):
        print(path)
    print(f"next: cd {out / name} && pip install . pytest && pytest tests")


def write(name: str, kind: str, out: Path, offer: str | None = None) -> list[Path]:
    """Write the package's files; returns their paths. What it offers is called ``offer``, or like the last word of ``name``.

    :raises ConfigError: a name that no distribution or module can have, an offer that could not be chosen, a folder that is there already.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name) or keyword.iskeyword(name):
        raise ConfigError(f"{name!r} cannot be the name of a package", fix="use lower-case letters, digits and single hyphens")
    with suppress(metadata.PackageNotFoundError):
        installed = metadata.distribution(name)
        raise ConfigError(f"{name} {installed.version} is installed", fix="choose another name, or pip uninstall it first")
    folder = out / name
    if folder.exists():
        raise ConfigError("the folder is there already", where=str(folder), fix="choose another name or --out")
    module, short = name.replace("-", "_"), offer or name.rsplit("-", 1)[-1]
    part, offered, choice, more = KINDS[kind]
    _check_offer(name, kind, short, offered.format(short=short))
    major = int(__version__.split(".")[0])
    values = {
        "name": name,
        "module": module,
        "short": short,
        "kind": kind,
        "core": ".".join(__version__.split(".")[:2]),
        "next": str(major + 1),
        "more": more,
        "offer": offered.format(short=short),
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


def _check_offer(distribution: str, kind: str, short: str, offered: str) -> None:
    """Refuse what would be hidden by a key of its section, or is offered by another installed package.

    :raises ConfigError: the name cannot be chosen.
    """
    from gem_core.config import Config  # a start of the command needs no configuration

    fix = "name it by --offer NAME"
    if not re.fullmatch(r"[a-z][a-z0-9]*([_-][a-z0-9]+)*", short):
        raise ConfigError(f"{short!r} cannot be the name of a {kind}", fix="use lower-case letters, digits, single hyphens and underscores")
    section = _SECTIONS.get(kind)
    if section is not None and short in type(getattr(Config(), section)).model_fields:
        raise ConfigError(f"a {kind} cannot be called {short!r}: [{section}] has a key of that name, which would hide its options", fix=fix)
    kind_of_offer = "dense_strategy" if kind == "strategy" else kind
    for plugin in manager().status():
        if plugin.name != distribution and offered in plugin.offers.get(kind_of_offer, ()):
            raise ConfigError(f"{plugin.name} offers a {kind} called {offered!r} already", fix=fix)
