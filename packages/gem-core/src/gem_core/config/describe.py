"""The configuration described: as a JSON schema for editors, and as an annotated TOML file to start from."""

from __future__ import annotations

from typing import Any

import tomli_w
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from gem_core.config.explain import Path
from gem_core.config.load import SECTION_PLUGINS, plain, resolve
from gem_core.config.schema import Config, Model, Train
from gem_core.plugins import manager

Schema = dict[str, Any]
Types = tuple[type[BaseModel], ...]


def json_schema() -> Schema:
    """JSON schema of the TOML file, with the tables of every installed plug-in."""
    tables = {
        section: [spec for kind in choosers.values() for spec in manager().offers(kind)] for section, choosers in SECTION_PLUGINS.items()
    }
    models, callbacks = manager().offers("model"), manager().offers("callback")
    specs = [spec for found in (*tables.values(), models, callbacks) for spec in found]
    types = dict.fromkeys([Config, *(spec.config_type for spec in specs)])
    refs, schema = models_json_schema([(t, "validation") for t in types], title="gem configuration")
    definitions = schema["$defs"]

    def ref(config_type: type[BaseModel]) -> Schema:
        return dict(refs[config_type, "validation"])

    def definition(config_type: type[BaseModel]) -> Schema:
        found: Schema = definitions[ref(config_type)["$ref"].rpartition("/")[2]]
        return found

    for section, found in tables.items():
        of_section = definitions[Config.model_fields[section].annotation.__name__]  # type: ignore[union-attr]
        of_section["additionalProperties"] = False
        of_section["properties"] |= {spec.name: ref(spec.config_type) for spec in found}
    definitions[Train.__name__]["properties"]["callbacks"] = {
        "type": "object",
        "properties": {spec.name: ref(spec.config_type) for spec in callbacks},
        "additionalProperties": False,
    }
    definitions[Model.__name__] = {"anyOf": [_model_variant(spec.name, definition(spec.config_type)) for spec in models]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **ref(Config), **schema}


def starter_toml(config: Config) -> str:
    """The whole configuration as TOML with a comment above each key: what it is, and what unset means."""
    resolved = resolve(config)
    chosen = resolved.config
    of_plugins: dict[Path, BaseModel] = {
        ("model",): resolved.model,
        ("data", chosen.data.source): resolved.source,
        ("precision", chosen.precision.recipe): resolved.recipe,
        ("parallel", chosen.parallel.dense): resolved.dense,
        ("parallel", chosen.parallel.sparse): resolved.sparse,
        **{("train", "callbacks", name): options for name, options in resolved.callbacks.items()},
    }
    lines: list[str] = []
    _write(lines, (Config,), plain(chosen, nones=True), (), of_plugins)
    return "\n".join(lines).strip() + "\n"


def _model_variant(name: str, options: Schema) -> Schema:
    """``[model]`` for one registered model: its options beside ``name`` and ``preset``."""
    fixed = Model.model_json_schema()["properties"]
    default = Model.model_fields["name"].default
    return {
        **{key: value for key, value in options.items() if key != "required"},
        "properties": {**options.get("properties", {}), "preset": fixed["preset"], "name": {"const": name}},
        "required": [] if name == default else ["name"],
    }


def _write(lines: list[str], types: Types, values: dict[str, Any], path: Path, of_plugins: dict[Path, BaseModel]) -> None:
    """One table, described by ``types``: its own keys, then the tables in it."""
    fields = {name: field for config_type in types for name, field in config_type.model_fields.items()}
    if path:
        doc = [(vars(t).get("__doc__") or "").strip().partition("\n")[0].replace("``", "") for t in types]
        lines += ["", *(f"# {line}" for line in doc if line), f"[{'.'.join(map(_key, path))}]"]
    below = {}
    for name, value in values.items():
        if isinstance(value, dict):
            below[name] = value
            continue
        if name in fields and fields[name].description:
            lines.append(f"# {fields[name].description}")
        lines.append(f"# {_key(name)} =" if value is None else tomli_w.dumps({name: value}).rstrip("\n"))
    for name, value in below.items():
        here = (*path, name)
        types_below = _table_types(fields[name].annotation if name in fields else None)
        if here in of_plugins:
            types_below += (type(of_plugins[here]),)
            value |= plain(of_plugins[here], nones=True)
        if value:
            _write(lines, types_below, value, here, of_plugins)


def _table_types(annotation: Any) -> Types:
    return (annotation,) if isinstance(annotation, type) and issubclass(annotation, BaseModel) else ()


def _key(name: str) -> str:
    return tomli_w.dumps({name: 0}).partition(" = ")[0]
