"""From a TOML file and ``--set`` overrides to a validated `Config`, and from there to the options of the chosen plug-ins.

Validation has two steps, so that a file can be read without loading plug-ins: `load_config` checks everything the core knows;
`resolve` (or `model_config`, `source_config`, ...) checks the tables of plug-ins by the ``config_type`` that each registered. Values
are typed as TOML types them: nothing is converted from text.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from gem_core.config.base import merged
from gem_core.config.explain import Origin, validate
from gem_core.config.features import Features
from gem_core.config.schema import Config, Model, PluginSection
from gem_core.errors import ConfigError
from gem_core.plugins import manager

Overrides = Mapping[str, Any] | Iterable[str]

SECTION_PLUGINS = {
    "data": {"source": "source"},
    "precision": {"recipe": "recipe"},
    "parallel": {"dense": "dense_strategy", "sparse": "sparse_strategy"},
}
"""Section -> {key that chooses: kind of plug-in}. The section's further tables are the options of plug-ins of these kinds."""


@dataclass(frozen=True)
class ResolvedConfig:
    """A configuration with everything spelled out.

    ``config`` holds every option of the chosen plug-ins with its default, the preset expanded and the features of a source that declares
    its own; the other fields are the typed options (instances of each plug-in's ``config_type``).
    """

    config: Config
    model: Any
    source: Any
    recipe: Any
    dense: Any
    sparse: Any
    callbacks: dict[str, Any]


def load_config(path: str | Path | None = None, overrides: Overrides = ()) -> Config:
    """Read ``path`` (TOML, or JSON where its name ends so; None: all defaults) and apply ``overrides``.

    :param overrides: ``{"train.steps": 100}``, or one or several texts ``"train.steps=100"`` whose value is written as in TOML; a value
        that is no TOML is taken as a string.
    :raises ConfigError: unreadable file, bad TOML, unknown key, wrong type or value; the message names key, value, file and line.
    """
    data: dict[str, Any] = {}
    origin = Origin()
    if path is not None:
        text = _read(Path(path))
        if Path(path).suffix == ".json":
            data, origin = _parse_json(text, str(path)), Origin(str(path))
        else:
            data, origin = _parse(text, str(path)), Origin.of_text(text, str(path))
        if not data:  # what made it may have failed: defaults would train on a generated log
            fix = "write the file anew; `gemrec config init` writes one to start from"
            raise ConfigError("the configuration file holds no section", where=str(path), fix=fix)
    for key, value, label in _overrides(overrides):
        _assign(data, key, value, label)
        origin.override(key, label)
    return config_from_dict(data, origin)


def config_from_dict(data: Mapping[str, Any], origin: Origin | None = None) -> Config:
    """Validate a nested mapping as if it had been read from a file."""
    origin = origin or Origin()
    config: Config = validate(Config, data, (), origin)
    return config.with_origin(origin)


def resolve(config: Config) -> ResolvedConfig:
    """Second step: validate the options of every plug-in that the file mentions, and spell the whole configuration out.

    :raises ConfigError: an option that a plug-in does not know or accept, or a table that belongs to no installed plug-in.
    :raises PluginError: a chosen plug-in that is not there.
    """
    model, source, recipe = model_config(config), source_config(config), recipe_config(config)
    dense, sparse, callbacks = dense_config(config), sparse_config(config), callback_configs(config)
    for metric in config.eval.metrics:
        manager().find("metric", metric, config.origin.where(("eval", "metrics")))
    tables = {section: _other_tables(config, section) for section in SECTION_PLUGINS}
    tables["data"][config.data.source] = source
    tables["precision"][config.precision.recipe] = recipe
    tables["parallel"][config.parallel.dense] = dense
    tables["parallel"][config.parallel.sparse] = sparse
    data = plain(config)
    for section, options in tables.items():
        data[section] |= {name: plain(value) for name, value in options.items() if value.__class__.model_fields}
    data["model"] = {"name": config.model.name, **plain(model)}
    data["features"] = plain(source_features(config))
    data["train"]["callbacks"] = {name: plain(value) for name, value in callbacks.items()}
    return ResolvedConfig(config_from_dict(data, config.origin), model, source, recipe, dense, sparse, callbacks)


def model_config(config: Config) -> Any:
    """Typed options of the chosen model: the preset's, overridden by the file's."""
    spec = manager().find("model", config.model.name, config.origin.where(("model", "name")))
    options = config.model.options()
    if config.model.preset is not None:
        if config.model.name != Model.model_fields["name"].default:
            raise ConfigError(
                f"the model {config.model.name!r} has no presets",
                where=config.origin.where(("model", "preset")),
                fix=f"remove preset, or choose the model {Model.model_fields['name'].default!r}",
            )
        from gem_core.model.presets import preset

        options = merged(preset(config.model.preset), options)
    for key in options:
        if key not in spec.config_type.model_fields:
            others = [other.name for other in manager().offers("model") if key in other.config_type.model_fields]
            if others:  # the file was written for another model
                raise ConfigError(
                    f"model.{key} is no key of the model {config.model.name!r}",
                    where=config.origin.where(("model", key)),
                    fix=f"take it out, or choose a model that has it: {', '.join(sorted(others))}",
                )
    return validate(spec.config_type, options, ("model",), config.origin)


def source_config(config: Config) -> Any:
    """Typed options of the chosen data source."""
    return _section_config(config, "data", "source")


def recipe_config(config: Config) -> Any:
    """Typed options of the chosen precision recipe."""
    return _section_config(config, "precision", "recipe")


def dense_config(config: Config) -> Any:
    """Typed options of the chosen dense strategy."""
    return _section_config(config, "parallel", "dense")


def sparse_config(config: Config) -> Any:
    """Typed options of the chosen sparse strategy."""
    return _section_config(config, "parallel", "sparse")


def callback_configs(config: Config) -> dict[str, Any]:
    """Typed options of each callback in ``[train.callbacks]``, by name."""
    return {
        name: validate(manager().find("callback", name, config.origin.where(key)).config_type, options, key, config.origin)
        for name, options in config.train.callbacks.items()
        for key in [("train", "callbacks", name)]
    }


def source_features(config: Config) -> Features:
    """``[features]``, or what the source declares itself when the section is empty."""
    spec = manager().find("source", config.data.source, config.origin.where(("data", "source")))
    if config.features == Features() and spec.features is not None:
        declared: Features = spec.features(source_config(config))
        return declared
    return config.features


def dump_toml(config: Config) -> str:
    """The configuration as TOML with every default written out; `load_config` of it gives an equal configuration."""
    return tomli_w.dumps(plain(config))


def _section_config(config: Config, section: str, chooser: str) -> Any:
    settings: PluginSection = getattr(config, section)
    name = getattr(settings, chooser)
    spec = manager().find(SECTION_PLUGINS[section][chooser], name, config.origin.where((section, chooser)))
    return validate(spec.config_type, settings.options().get(name, {}), (section, name), config.origin)


def _other_tables(config: Config, section: str) -> dict[str, Any]:
    """Validated tables of a section that belong to plug-ins which are not chosen."""
    settings: PluginSection = getattr(config, section)
    chosen = {getattr(settings, chooser) for chooser in SECTION_PLUGINS[section]}
    known = {spec.name: spec for kind in SECTION_PLUGINS[section].values() for spec in manager().offers(kind)}
    found = {}
    for name, options in settings.options().items():
        if name in chosen:
            continue
        if name not in known:
            kinds = " or ".join(kind.replace("_", " ") for kind in SECTION_PLUGINS[section].values())
            raise ConfigError(
                f"unknown table [{section}.{name}]: no installed plug-in offers a {kinds} called {name!r}; "
                f"there are: {', '.join(sorted(known)) or 'none'}",
                where=config.origin.where((section, name)),
                fix="correct the name, remove the table, or install the package that offers it",
            )
        found[name] = validate(known[name].config_type, options, (section, name), config.origin)
    return found


def plain(model: BaseModel, *, nones: bool = False) -> dict[str, Any]:
    """Nested dicts, lists and scalars that TOML can hold. TOML has no null: None is written by leaving the key out, but for ``nones``."""
    values: dict[str, Any] = _tomlable(model.model_dump(exclude_none=not nones))
    return values


def _tomlable(value: Any) -> Any:
    # Pydantic's own JSON mode would turn an infinity in an untyped table into null.
    if isinstance(value, Mapping):
        return {str(key): _tomlable(below) for key, below in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_tomlable(below) for below in value]
    return value if isinstance(value, (str, int, float)) else to_jsonable_python(value)


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(
            "the configuration file does not exist", where=str(path), fix="check the path; `gemrec config init` writes one"
        ) from None
    except UnicodeDecodeError as fault:
        raise ConfigError("the configuration file is not UTF-8 text", where=f"{path}, byte {fault.start}", fix="save it as UTF-8") from None
    except OSError as fault:
        inside = path / "config.toml"
        fix = f"name the file: {inside}" if inside.is_file() else "name a TOML file"
        raise ConfigError(f"the configuration file cannot be read: {fault.strerror}", where=str(path), fix=fix) from None


def _parse(text: str, name: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as fault:
        message, _, place = str(fault).partition(" (at ")
        place = place.rstrip(")")
        line = place.removeprefix("line ").split(",")[0]
        where = f"{name}:{line} ({place})" if line.isdigit() else name
        duplicate = "overwrite" in message or "declare" in message
        what = f"a key or table is defined twice: {message}" if duplicate else f"not valid TOML: {message}"
        fix = "keep one of the two" if duplicate else "strings need quotes, true and false are lower case, a table header is [a.b]"
        raise ConfigError(what, where=where, fix=fix) from None


def _parse_json(text: str, name: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as fault:
        where = f"{name}:{fault.lineno} (column {fault.colno})"
        raise ConfigError(f"not valid JSON: {fault.msg}", where=where, fix="correct the line; a TOML file ends in .toml") from None
    if not isinstance(data, dict):
        raise ConfigError("a configuration is a JSON object", where=name, fix='write {"section": {"key": value, ...}, ...}')
    return data


def _overrides(overrides: Overrides) -> Iterable[tuple[tuple[str, ...], Any, str]]:
    """(key path, value, how the user wrote it) of each override."""
    if isinstance(overrides, Mapping):
        for key, value in overrides.items():
            yield _key_path(key, f"override {key!r}"), value, f"override {key!r}"
        return
    for text in (overrides,) if isinstance(overrides, str) else overrides:
        label = f"--set {text}"
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"an override must be KEY=VALUE, got {text!r}", where=label, fix="for example --set train.steps=100")
        yield _key_path(key, label), _value(value.strip(), label), label


def _key_path(key: str, label: str) -> tuple[str, ...]:
    fix = "write the sections with dots: train.optimizer.lr; names with blanks or dots in quotes: 'features.sparse.\"my id\".rows=9'"
    fault = ConfigError(f"{key!r} is not a configuration key", where=label, fix=fix)
    if "\n" in key or "=" in key or "#" in key:
        raise fault
    try:
        node: Any = tomllib.loads(f"{key} = 0")
    except tomllib.TOMLDecodeError:
        raise fault from None
    path = []
    while isinstance(node, dict):
        if len(node) != 1:
            raise fault
        (part, node) = next(iter(node.items()))
        path.append(part)
    return tuple(path)


def _value(text: str, label: str) -> Any:
    try:
        parsed = tomllib.loads(f"v = {text}")
    except tomllib.TOMLDecodeError as fault:
        if text[:1] in ("[", "{", '"', "'"):
            raise ConfigError(
                f"the value is not valid TOML: {fault}", where=label, fix="mind the shell's own quotes: --set 'a.b=[1, 2]'"
            ) from None
        return text
    return parsed["v"] if set(parsed) == {"v"} else text


def _assign(data: dict[str, Any], path: tuple[str, ...], value: Any, label: str) -> None:
    node = data
    for i, part in enumerate(path[:-1]):
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise ConfigError(f"{'.'.join(path[: i + 1])} is a value, not a section", where=label, fix="remove the part after it")
    node[path[-1]] = value
