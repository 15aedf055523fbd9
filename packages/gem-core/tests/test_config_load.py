"""Configuration files, overrides, round trips, the options of plug-ins, and the words in which faults are told."""

from __future__ import annotations

import json
import math
import pickle
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field, model_validator

from gem_core import plugins
from gem_core.config import FrozenConfig, callback_configs, config_from_dict, dump_toml, load_config, model_config, resolve, source_features
from gem_core.config.describe import json_schema, starter_toml
from gem_core.config.explain import key_lines
from gem_core.config.features import Features, Label
from gem_core.errors import ConfigError, PluginError
from gem_core.hookspecs import CallbackSpec, ModelSpec, RecipeSpec, SourceSpec, StrategySpec, hookimpl


class Tower(FrozenConfig):
    """Options of the tower."""

    depth: int = 1
    kind: str = "plain"

    @model_validator(mode="after")
    def _check(self) -> Tower:
        if self.kind == "none" and self.depth:
            raise ValueError("a tower of no kind has depth 0")
        return self


class ToyModel(FrozenConfig):
    """Options of the toy model."""

    layers: int = Field(2, gt=0, description="number of layers")
    widths: tuple[int, ...] = (8, 4)
    dropout: float | None = None
    tower: Tower = Tower()
    side: Tower | Literal[False] = False
    kinds: Literal["full", "window"] | tuple[Literal["full", "window"], ...] = "full"


class Rows(FrozenConfig):
    """Options of the row source."""

    rows: int
    path: str | None = None


class Nothing(FrozenConfig):
    """No options."""


class Clock(FrozenConfig):
    """Options of the clock."""

    every: int = 10


class Toys:
    """A plug-in with one offer of each kind that a configuration chooses."""

    gem_api = 1

    @hookimpl
    def gem_models(self):
        return [ModelSpec("toy", ToyModel, build=lambda *a: None)]

    @hookimpl
    def gem_sources(self):
        declared = Features(labels={"click": Label()})
        return [
            SourceSpec("rows", Rows, build=lambda *a, **options: None, features=lambda config: declared),
            SourceSpec("other-rows", Rows, build=lambda *a, **options: None),
        ]

    @hookimpl
    def gem_recipes(self):
        return [RecipeSpec("plain", Nothing, apply=lambda *a: None)]

    @hookimpl
    def gem_dense_strategies(self):
        return [StrategySpec("solo", Nothing, build=lambda *a: None)]

    @hookimpl
    def gem_sparse_strategies(self):
        return [StrategySpec("here", Clock, build=lambda *a: None)]

    @hookimpl
    def gem_callbacks(self):
        return [CallbackSpec("clock", Clock, build=lambda *a: None)]


CHOICES = """
[data]
source = "rows"
rows.rows = 100
[model]
name = "toy"
[precision]
recipe = "plain"
[parallel]
dense = "solo"
sparse = "here"
"""


@pytest.fixture(autouse=True)
def toys(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GEM_PLUGINS", "off")
    plugins.reset()
    plugins.manager().add("toys", Toys())
    yield
    plugins.reset()


@pytest.fixture
def write(tmp_path: Path):
    def to_file(text: str) -> Path:
        path = tmp_path / "my.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return to_file


def fault_of(text: str, tmp_path: Path) -> str:
    path = tmp_path / "my.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    return str(caught.value).replace(str(tmp_path) + "/", "")


def test_defaults_need_no_file():
    config = load_config()
    assert (config.data.source, config.model.name, config.precision.recipe) == ("synthetic", "gem", "fp32")
    assert config == config_from_dict({})


def test_overrides_are_typed_as_toml(write):
    path = write("[train]\nsteps = 7\n")
    texts = ["train.steps=100", "run.name=plain words", "train.optimizer.betas=[0.5, 0.6]", "train.compile=true", 'run.dir="quo ted"']
    config = load_config(path, [*texts, "features.labels.click.weight=2.0"])
    assert config.train.steps == 100
    assert config.run.name == "plain words"
    assert config.run.dir == "quo ted"
    assert config.train.optimizer.betas == (0.5, 0.6)
    assert config.train.compile is True
    assert config.features.labels["click"].weight == 2.0
    assert load_config(path, {"train.steps": 100}).train.steps == 100


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.steps", r"must be KEY=VALUE.*\n.*--set train\.steps\n"),
        ("train.steps=many", r'train\.steps = "many": input should be a valid integer\n.*--set train\.steps=many'),
        ("train.steps=true", r"train\.steps = true: input should be a valid integer"),
        ("train.steps=[1", "the value is not valid TOML"),
        ("trian.steps=1", r"unknown key trian\n.*--set trian\.steps=1.*\n.*did you mean train\?"),
        ("train steps=1", r"'train steps' is not a configuration key\n.*\n.*features\.sparse\.\"my id\"\.rows=9"),
        ("run.threads=100000", r"run\.threads = 100000: input should be less than or equal to 1024"),
        ("=1", "'' is not a configuration key"),
        ("run.seed.x=1", r"run\.seed = \{\"x\": 1\}"),
        ("train.clip_norm=-1", r"train\.clip_norm = -1: input should be greater than 0"),
        (f"run.seed={2**63}", r"run\.seed = 9223372036854775808: input should be less than or equal to 4611686018427387904"),
        ("run.device=gpu", r"run\.device = \"gpu\": input should be 'auto', 'cpu' or 'cuda'"),
    ],
)
def test_bad_overrides(override: str, words: str):
    for asked in ([override], override):
        with pytest.raises(ConfigError, match=words):
            load_config(None, asked)


def test_override_below_a_value(write):
    with pytest.raises(ConfigError, match=r"run\.seed is a value, not a section"):
        load_config(write("[run]\nseed = 1\n"), ["run.seed.x=1"])


FAULTS = {
    "[train]\nstepz = 1\n": "unknown key train.stepz\n  where: train.stepz (my.toml:2)\n  fix:   did you mean train.steps?",
    "[train]\n\n# a comment\nlr = 1\n": "unknown key train.lr\n  where: train.lr (my.toml:4)\n"
    "  fix:   there is train.optimizer.lr and train.tables.lr",
    "[trian]\nsteps = 1\n": "unknown key trian\n  where: trian (my.toml:1)\n  fix:   did you mean train?",
    "[data]\nbatch_sise = 4\n": "unknown key data.batch_sise\n  where: data.batch_sise (my.toml:2)\n  fix:   did you mean data.batch_size?",
    '[train]\nsteps = "4"\n': 'train.steps = "4": input should be a valid integer\n  where: train.steps (my.toml:2)',
    "train = 3\n": "train = 3: input should be a table\n  where: train (my.toml:1)",
    "[train]\noptimizer.betas = [1]\n": "train.optimizer.betas has too few elements: element 1 is missing\n"
    "  where: train.optimizer.betas (my.toml:2)",
    "[features.dense.age]\nclip = [0.0, 'x']\n": 'features.dense.age.clip.1 = "x": input should be a valid number\n'
    "  where: features.dense.age.clip (my.toml:2)",
    "[features.sparse.user]\nrows = 5\npool = 'sum'\n": "unknown key features.sparse.user.pool\n"
    "  where: features.sparse.user.pool (my.toml:3)\n  fix:   did you mean features.sparse.user.pooling?",
    "[features.vectors.image]\n": "features.vectors.image.dim is needed and is not given\n"
    "  where: features.vectors.image.dim (my.toml:1)\n  fix:   add dim = ... to [features.vectors.image]",
    "[run]\nseed = 1\nseed = 2\n": "a key or table is defined twice: Cannot overwrite a value\n  where: my.toml:3 (line 3, column 9)",
    "[run]\nseed = 1\n[run]\n": "a key or table is defined twice: Cannot declare ('run',) twice\n  where: my.toml:3",
    "[run]\nname = train\n": "not valid TOML: Invalid value\n  where: my.toml:2",
    "[features.dense.a]\n[features.labels.a]\n": "two features have the name 'a': features.dense.a and features.labels.a; rename one",
    "[features.sparse.ad]\ntable = 'ads'\n": "features.sparse.ad: table 'ads' is not declared; add [features.tables.ads] with rows = ...",
}


@pytest.mark.parametrize("text", FAULTS)
def test_faults_are_told_with_place_and_cure(text: str, tmp_path: Path):
    assert fault_of(text, tmp_path).startswith(FAULTS[text])


def test_all_faults_are_told_at_once(tmp_path: Path):
    told = fault_of('[run]\nsed = 1\n[train]\nsteps = "four"\n', tmp_path)
    assert told.startswith("2 faults in the configuration:")
    assert "unknown key run.sed" in told
    assert "run.sed (my.toml:2); did you mean run.seed?" in told
    assert "train.steps (my.toml:4)" in told


def test_unreadable_files(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"does not exist\n.*gone\.toml"):
        load_config(tmp_path / "gone.toml")
    (tmp_path / "config.toml").touch()  # a run folder
    with pytest.raises(ConfigError, match=r"(?s)cannot be read: Is a directory.*name the file: .*config\.toml"):
        load_config(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"[run]\nname = 'caf\xe9'\n")
    with pytest.raises(ConfigError, match=r"not UTF-8 text\n.*byte 17"):
        load_config(tmp_path / "latin.toml")


def test_lines_of_keys():
    text = 'top = 1\n[a."b c".d] # note\nx = 1\n"y z" = """\nq = 1\n"""\n[[e]]\nf.g = {h = 1}\n'
    found = {"top": 1, "a/b c/d": 2, "a/b c/d/x": 3, "a/b c/d/y z": 4, "e": 7, "e/f/g": 8}
    assert {"/".join(path): line for path, line in key_lines(text).items()} == found


def test_options_of_plugins_are_typed(write):
    config = load_config(write(CHOICES + "[train.callbacks.clock]\nevery = 3\n"), ["model.tower.depth=4", "parallel.here.every=2"])
    assert model_config(config) == ToyModel(tower=Tower(depth=4))
    assert callback_configs(config) == {"clock": Clock(every=3)}
    resolved = resolve(config)
    assert resolved.source == Rows(rows=100)
    assert resolved.sparse == Clock(every=2)
    assert resolved.config.model.options() == {
        "layers": 2, "widths": [8, 4], "tower": {"depth": 4, "kind": "plain"}, "side": False, "kinds": "full",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ("model.layerz=1", r"unknown key model\.layerz\n.*did you mean model\.layers\?"),
        ("model.depth=1", r"unknown key model\.depth\n.*\n.*there is model\.tower\.depth; keys here are: .*, layers, .*widths"),
        ("model.layers=0", r"model\.layers = 0: input should be greater than 0"),
        ("model.side.dept=1", r"^unknown key model\.side\.dept\n.*\n.*did you mean model\.side\.depth\?$"),
        ("model.side.depth=x", r'^model\.side\.depth = "x": input should be a valid integer'),
        ("model.side=3", r"^model\.side = 3: input should be a table or input should be False\n"),
        ("model.side.kind=none", r"^a tower of no kind has depth 0\n  where: model\.side "),
        ("model.kinds=ful", r"^model\.kinds = \"ful\": input should be 'full' or 'window' or input should be a valid (array|tuple)\n"),
        ("model.kinds=['full', 'windo']", r"^model\.kinds\.1 = \"windo\": input should be 'full' or 'window'"),
        ("model.sequence.dim=8", r"^model\.sequence is no key of the model 'toy'\n.*\n.*take it out, or choose a model that has it: gem"),
        ("model.preset=tiny", r"^the model 'toy' has no presets\n.*model\.preset"),
        ("data.rows.rows=x", r'data\.rows\.rows = "x": input should be a valid integer'),
        ("train.callbacks.clock.evry=1", r"unknown key train\.callbacks\.clock\.evry"),
        ("parallel.here.every=1.5", r"parallel\.here\.every = 1\.5"),
        ("data.other-rows.rowz=1", r"unknown key data\.other-rows\.rowz"),
        ("data.parkay.path=x", r"unknown table \[data\.parkay\]: no installed plug-in offers a source called 'parkay'; there are: .*rows"),
    ],
)
def test_bad_options_of_plugins(write, extra: str, words: str):
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        resolve(load_config(write(CHOICES), [extra]))


def test_place_of_a_bad_option(write):
    with pytest.raises(ConfigError, match=r"where: model\.tower\.depth \(.*my\.toml:13\)"):
        resolve(load_config(write(CHOICES + "[model.tower]\ndepth = 'deep'\n")))


def test_a_needed_option_that_is_missing(write):
    with pytest.raises(ConfigError, match=r"data\.other-rows\.rows is needed and is not given"):
        resolve(load_config(write(CHOICES), ["data.source=other-rows"]))


def test_a_choice_that_is_not_there(write):
    with pytest.raises(PluginError, match=r"(?s)no recipe called 'plian'.*did you mean 'plain'"):
        resolve(load_config(write(CHOICES), ["precision.recipe=plian"]))


def test_a_source_declares_its_features_unless_the_file_does(write):
    config = load_config(write(CHOICES))
    assert list(source_features(config).labels) == ["click"]
    assert list(resolve(config).config.features.labels) == ["click"]
    assert list(resolve(load_config(write(CHOICES), ["features.labels.sale.weight=1.0"])).config.features.labels) == ["sale"]


def test_resolving_is_idempotent_and_survives_a_file(write):
    once = resolve(load_config(write(CHOICES), ["model.dropout=0.5", "train.callbacks.clock.every=3"]))
    again = resolve(load_config(write(dump_toml(once.config))))
    assert again == once
    assert tomllib.loads(dump_toml(once.config))["data"]["rows"] == {"rows": 100}


def test_equality_ignores_where_it_was_written(write):
    from_file, from_override = load_config(write("[run]\nseed = 3\n")), load_config(None, ["run.seed=3"])
    assert from_file == from_override
    assert hash(from_file) == hash(from_override)
    assert from_file != load_config(None, ["run.seed=4"])
    copy = pickle.loads(pickle.dumps(from_file))
    assert copy == from_file
    assert copy.origin.where(("run", "seed")) == from_file.origin.where(("run", "seed"))


NAMES = st.text(min_size=1, max_size=6).filter(lambda s: "\x00" not in s)
FLOATS = st.floats(allow_nan=False)


@settings(max_examples=60, deadline=None)
@given(
    run=st.fixed_dictionaries({"name": NAMES, "seed": st.integers(0, 2**62)}),
    labels=st.dictionaries(NAMES, st.fixed_dictionaries({"weight": st.floats(0, 1e9), "threshold": st.none() | FLOATS}), max_size=3),
    callbacks=st.dictionaries(NAMES, st.dictionaries(NAMES, st.booleans() | st.integers(-(2**62), 2**62) | FLOATS | NAMES), max_size=2),
    betas=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_dump_and_load_round_trip(run, labels, callbacks, betas):
    data = {"run": run, "features": {"labels": labels}, "train": {"optimizer": {"betas": betas}, "callbacks": callbacks}}
    config = config_from_dict(data)
    assert config_from_dict(tomllib.loads(dump_toml(config))) == config


def test_infinity_survives():
    config = config_from_dict({"train": {"clip_norm": math.inf}})
    assert config_from_dict(tomllib.loads(dump_toml(config))).train.clip_norm == math.inf


def test_the_starter_file_loads_to_what_it_describes(write):
    config = load_config(write(CHOICES), ["train.callbacks.clock.every=3"])
    text = starter_toml(config)
    assert resolve(load_config(write(text))) == resolve(config)
    assert "# number of layers\nlayers = 2" in text
    assert "# Options of the tower.\n[model.tower]" in text
    assert "# dropout =\n" in text


def test_the_schema_knows_installed_plugins():
    schema = json_schema()
    text = json.dumps(schema)
    definitions = schema["$defs"]
    assert definitions["Data"]["properties"]["rows"] == {"$ref": "#/$defs/Rows"}
    assert definitions["Data"]["additionalProperties"] is False
    assert definitions["Train"]["properties"]["callbacks"]["properties"]["clock"] == {"$ref": "#/$defs/Clock"}
    toy = next(v for v in definitions["Model"]["anyOf"] if v["properties"]["name"] == {"const": "toy"})
    assert {"layers", "widths", "tower", "preset"} <= set(toy["properties"])
    references = {part.partition('"')[0] for part in text.split('"#/$defs/')[1:]}
    assert references <= set(definitions)
