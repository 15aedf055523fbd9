"""Turns a failed validation into words: which key, which value, what is allowed, and in which line it was written."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from gem_core.errors import ConfigError

Path = tuple[str, ...]

_HEADER = re.compile(r"^\s*\[\[?(?P<key>[^\[\]#]+)\]\]?\s*(#.*)?$")
_KEY = re.compile(r"""^\s*(?P<key>(?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=(?!=)""")


class Origin:
    """Where each key of a configuration was written: a line of its file, or an override.

    Says nothing about the values, so any two are equal: configurations compare by what they hold.
    """

    def __init__(self, file: str | None = None, lines: dict[Path, int] | None = None) -> None:
        self.file = file
        self._places: dict[Path, str] = {path: f"{file}:{line}" for path, line in (lines or {}).items()}

    @classmethod
    def of_text(cls, text: str, file: str) -> Origin:
        return cls(file, key_lines(text))

    def override(self, path: Path, label: str) -> None:
        self._places[path] = label

    def where(self, path: Path) -> str:
        """The place of ``path``, else of something inside it, else of the nearest table above it."""
        inside = [place for written, place in self._places.items() if written[: len(path)] == path]
        above = [self._places[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self._places]
        place = next(iter(inside + above), self.file)
        return f"{'.'.join(path)} ({place})" if place else ".".join(path)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Origin)

    def __hash__(self) -> int:
        return 0


def key_lines(text: str) -> dict[Path, int]:
    """Key path -> line (from 1) of each table header and each key at the start of a line. Keys in inline tables are not listed."""
    lines: dict[Path, int] = {}
    table: Path = ()
    closing: str | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        if closing is not None:
            closing = None if closing in line else closing
            continue
        if header := _HEADER.match(line):
            table = _split(header["key"])
            lines.setdefault(table, number)
        elif key := _KEY.match(line):
            lines.setdefault(table + _split(key["key"]), number)
            for quote in ('"""', "'''"):
                if line.count(quote) == 1:
                    closing = quote
    return lines


def _split(key: str) -> Path:
    try:
        node: Any = tomllib.loads(f"{key} = 0")
    except tomllib.TOMLDecodeError:
        return (key.strip(),)
    path = []
    while isinstance(node, dict):
        part, node = next(iter(node.items()))
        path.append(part)
    return tuple(path)


def validate(config_type: type[BaseModel], data: Mapping[str, Any], at: Path, origin: Origin) -> Any:
    """``data`` (the content of section ``at``) as ``config_type``; no text becomes a number, no number a truth value.

    :raises ConfigError: with every fault found.
    """
    try:
        config = config_type.model_validate(data)
        errors: list[dict[str, Any]] = list(_coerced(data, config, ()))
    except ValidationError as error:
        errors = _of_one_branch(config_type, error.errors(include_url=False))
    else:
        if not errors:
            return config
    faults = [_Fault(config_type, at, origin, e) for e in errors]
    if len(faults) == 1:
        raise ConfigError(faults[0].what, where=faults[0].where, fix=faults[0].fix)
    listing = "\n".join(f"  {i}. {f.what}\n     at {f.where}" + (f"; {f.fix}" if f.fix else "") for i, f in enumerate(faults, start=1))
    raise ConfigError(f"{len(faults)} faults in the configuration:\n{listing}")


_SCALARS: dict[type, str] = {bool: "boolean", int: "integer", float: "number"}


def _coerced(given: Any, taken: Any, loc: Path) -> Iterator[dict[str, Any]]:
    """Where validation turned a value into one of another type. (Pydantic's strict mode would refuse arrays for tuples as well.)"""
    if isinstance(given, Mapping):
        below = {name: getattr(taken, name) for name in type(taken).model_fields} if isinstance(taken, BaseModel) else taken
        if isinstance(below, Mapping):
            for key in given.keys() & below.keys():
                yield from _coerced(given[key], below[key], (*loc, str(key)))
    elif isinstance(given, (list, tuple)):
        if isinstance(taken, (list, tuple)) and len(given) == len(taken):
            for i, (a, b) in enumerate(zip(given, taken)):
                yield from _coerced(a, b, (*loc, str(i)))
    elif type(taken) in _SCALARS and type(given) is not type(taken) and (type(given), type(taken)) != (int, float):
        yield {"type": "coerced", "loc": loc, "msg": f"Input should be a valid {_SCALARS[type(taken)]}", "input": given}


def _of_one_branch(config_type: type[BaseModel], errors: Iterable[Any]) -> list[dict[str, Any]]:
    """``errors`` with the paths that a person wrote, and for a key that may hold several types only what concerns the likeliest one.

    Pydantic reports every type of a union and puts its name into the path; the likeliest is the one that got deepest. Where none got
    into the value, the messages are joined.
    """
    plain: list[dict[str, Any]] = []
    unions: dict[Path, dict[str, list[dict[str, Any]]]] = {}
    for error in errors:
        loc, union, branch = _written_loc(config_type, tuple(map(str, error["loc"])))
        told = {**error, "loc": loc}
        if union is None:
            plain.append(told)
        else:
            unions.setdefault(union, {}).setdefault(branch, []).append(told)
    for union, branches in unions.items():
        deepest = max(branches.values(), key=lambda found: max(len(e["loc"]) for e in found))
        # A check of a branch's own runs only where its types fit: then the value was meant for that branch.
        checked = [e for found in branches.values() for e in found if e["type"] == "value_error"]
        if checked or max(len(e["loc"]) for e in deepest) > len(union):
            plain += checked or deepest
        else:
            messages = [e["msg"] if i == 0 else _lower(e["msg"]) for i, found in enumerate(branches.values()) for e in found]
            plain.append({**deepest[0], "type": "union", "msg": " or ".join(messages)})
    return plain


def _written_loc(annotation: Any, loc: Path) -> tuple[Path, Path | None, str]:
    """``loc`` without names of union members; path of the first union on the way, if any, and the member's name there."""
    written: list[str] = []
    union: Path | None = None
    branch = ""
    for part in loc:
        members = [m for m in typing.get_args(annotation) if m is not type(None)] if _is_union(annotation) else []
        if len(members) == 1:
            annotation = members[0]
        elif members:
            if union is None:
                union, branch = tuple(written), part
            annotation = next((m for m in members if getattr(m, "__name__", None) == part), None)
            continue
        written.append(part)
        arguments = typing.get_args(annotation)
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            annotation = annotation.model_fields[part].annotation if part in annotation.model_fields else None
        elif typing.get_origin(annotation) is dict:
            annotation = arguments[1]
        else:
            annotation = arguments[0] if arguments else None
    return tuple(written), union, branch


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


class _Fault:
    """One of pydantic's errors, in the words of a person who wrote TOML."""

    def __init__(self, config_type: type[BaseModel], at: Path, origin: Origin, error: Any) -> None:
        loc: Path = error["loc"]
        path = at + loc
        dotted = ".".join(path)
        self.where = origin.where(_written(path))
        self.fix: str | None = None
        kind = error["type"]
        if kind == "extra_forbidden" or (kind == "dict_type" and loc[-1] not in fields_at(config_type, loc[:-1])):
            valid = sorted(fields_at(config_type, loc[:-1]))
            near = difflib.get_close_matches(loc[-1], valid, n=1)
            elsewhere = [".".join(at + p) for p in all_keys(config_type) if p[-1] == loc[-1]]
            self.what = f"unknown key {dotted}"
            if near:
                self.fix = f"did you mean {'.'.join((*path[:-1], near[0]))}?"
            elif elsewhere:
                self.fix = f"there is {' and '.join(elsewhere[:4])}; keys here are: {', '.join(valid) or 'none'}"
            else:
                self.fix = f"keys here are: {', '.join(valid) or 'none'}"
        elif kind == "missing" and loc[-1].isdigit():
            self.what = f"{'.'.join(path[:-1])} has too few elements: element {loc[-1]} is missing"
        elif kind == "missing":
            self.what = f"{dotted} is needed and is not given"
            self.fix = f"add {path[-1]} = ... to [{'.'.join(path[:-1])}]" if path[:-1] else f"add {path[-1]} = ..."
        elif kind == "value_error":
            self.what = error["msg"].removeprefix("Value error, ")
        elif kind == "union_tag_not_found":
            key = error["ctx"]["discriminator"].strip("'")
            self.what = f"{dotted} = {_show(error['input'])} lacks {key}, which says what the other keys mean"
            self.fix = f"set {dotted}.{key} as well"
        elif kind == "union_tag_invalid":
            key, tag = error["ctx"]["discriminator"].strip("'"), str(error["ctx"]["tag"])
            self.what = f"{dotted}.{key} = {_show(tag)}: there is {error['ctx']['expected_tags']}"
            near = difflib.get_close_matches(tag, error["ctx"]["expected_tags"].replace("'", "").split(", "), n=1)
            self.fix = f"did you mean {near[0]!r}?" if near else "choose one of these"
        else:
            allowed = re.sub(r"a valid dictionary( or instance of \w+)?", "a table", error["msg"])
            self.what = f"{dotted} = {_show(error['input'])}: {_lower(allowed).partition(', unable to parse')[0]}"


def fields_at(config_type: type[BaseModel], loc: Path) -> set[str]:
    """Names of the fields of the model that ``loc`` leads to; empty when it leads to none."""
    models = _models(config_type)
    for part in loc:
        below: list[type[BaseModel]] = []
        for model in models:
            if part in model.model_fields:
                below += _models(model.model_fields[part].annotation)
        # A part that is no field is a key of a dict or an index: the annotation was already looked through.
        models = below or models
    return {name for model in models for name in model.model_fields}


def all_keys(config_type: type[BaseModel], seen: tuple[type[BaseModel], ...] = ()) -> Iterator[Path]:
    """Paths of every fixed key below ``config_type`` (not those inside tables with free names)."""
    for name, field in config_type.model_fields.items():
        yield (name,)
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel) and annotation not in seen:
            yield from ((name, *rest) for rest in all_keys(annotation, (*seen, annotation)))


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for arg in typing.get_args(annotation) for model in _models(arg)]


def _written(path: Path) -> Path:
    """``path`` up to the first list index: the part that stands in the file as a key."""
    for i, part in enumerate(path):
        if part.isdigit():
            return path[:i]
    return path


def _show(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
