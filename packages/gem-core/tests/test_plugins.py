"""The plug-in manager on real (if tiny) distributions: a module and a dist-info folder each, read through importlib.metadata."""

from __future__ import annotations

import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest

from gem_core import hookspecs, plugins
from gem_core.errors import PluginError
from gem_core.hookspecs import MetricSpec, hookimpl
from gem_core.plugins import PluginManager, PluginWarning

CORE = ["mlflow", "wandb"]
"""Callbacks that the core offers."""

GOOD = """
    from gem_core import CallbackSpec, FrozenConfig, hookimpl

    class Options(FrozenConfig):
        size: int = 3

    class Plugin:
        gem_api = 1

        @hookimpl
        def gem_callbacks(self):
            return [CallbackSpec("{name}", Options, build=lambda config: None)]

    plugin = Plugin()
"""

Install = Callable[..., None]
Load = Callable[..., PluginManager]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty site folder; modules imported from it are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for variable in ("GEM_PLUGINS", "GEM_PLUGINS_STRICT"):
        monkeypatch.delenv(variable, raising=False)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def install(site: Path) -> Install:
    def write(name: str, source: str, *, version: str = "1.2", entry: str | None = None) -> None:
        module = name.replace("-", "_")
        (site / f"{module}.py").write_text(textwrap.dedent(source))
        info = site / f"{module}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[gem]\n{entry or f'{name} = {module}:plugin'}\n")

    return write


@pytest.fixture
def load(site: Path) -> Load:
    def create(**settings: object) -> PluginManager:
        found = [ep for dist in metadata.distributions(path=[str(site)]) for ep in dist.entry_points if ep.group == "gem"]
        return PluginManager(entry_points=found, **settings)

    return create


def test_offers_and_status_of_a_sound_plugin(install: Install, load: Load):
    install("acme", GOOD.format(name="bell"))
    manager = load()
    assert [spec.name for spec in manager.offers("callback")] == [*CORE, "bell"]
    assert manager.find("callback", "bell").config_type().size == 3
    assert manager.distribution_of("callback", "bell") == "acme"
    assert manager.active() == {"gem-core": metadata.version("gem-core"), "acme": "1.2"}
    status = {s.name: s for s in manager.status()}["acme"]
    assert (status.version, status.api, status.hooks, status.offers) == ("1.2", 1, ("gem_callbacks",), {"callback": ("bell",)})
    assert (status.state, status.reason) == ("active", "")


def test_builtins_come_by_the_same_path_and_first(install: Install, load: Load):
    install("aaa", GOOD.format(name="bell"))
    manager = load()
    assert next(iter(manager.active())) == "gem-core"
    assert {s.name: s for s in manager.status()}["gem-core"].api == 1


def test_nothing_is_collected_before_it_is_asked_for(install: Install, load: Load):
    install("acme", GOOD.format(name="bell").replace("return [", "import acme_heavy; return ["))
    (Path(sys.path[0]) / "acme_heavy.py").write_text("")
    manager = load()
    assert "acme_heavy" not in sys.modules
    manager.offers("callback")
    assert "acme_heavy" in sys.modules


def test_unknown_name_lists_what_there_is_and_the_nearest(install: Install, load: Load):
    install("acme", GOOD.format(name="bell"))
    with pytest.raises(PluginError, match=r"no callback called 'bel'; there are: bell, mlflow, wandb\n.*did you mean 'bell'\?"):
        load().find("callback", "bel")


def test_unknown_kind(load: Load):
    with pytest.raises(PluginError, match="no kind of plug-in offer called 'colour'; there are: kernel, model"):
        load().offers("colour")


def test_an_object_can_be_added(load: Load):
    class Bells:
        gem_api = 1

        @hookimpl
        def gem_metrics(self):
            return [MetricSpec("bells", build=lambda config: None)]

    manager = load()
    before = [spec.name for spec in manager.offers("metric")]
    manager.add("notebook", Bells())
    assert [spec.name for spec in manager.offers("metric")] == [*before, "bells"]
    with pytest.raises(PluginError, match="there is a plug-in called 'notebook' already"):
        manager.add("notebook", Bells())
    with pytest.raises(PluginError, match="is the class 'Bells'"):
        manager.add("other", Bells)
    assert "other" not in {s.name for s in manager.status()}
    assert [spec.name for spec in manager.offers("metric")] == [*before, "bells"]


def faults() -> dict[str, tuple[str, str]]:
    """What is wrong -> (source of the plug-in, the words in which it is told)."""
    good = GOOD.format(name="bell")
    return {
        "raises at import": ("raise OSError('no such library')\nplugin = 1", r"OSError: no such library\n  where: .*broken\.py:1"),
        "misses a module": ("import not_there_at_all", "No module named 'not_there_at_all'"),
        "ends the process": ("raise SystemExit(3)", "SystemExit: 3"),
        "has no such object": ("other = 1", "has no attribute 'plugin'"),
        "is a class": (
            good.replace("plugin = Plugin()", "plugin = Plugin"),
            r"is the class 'Plugin', not an object\n.*plugin = Plugin\(\)",
        ),
        "declares no api": (good.replace("gem_api = 1", ""), r"gem_api = None; gem-core \S+ speaks 1\n.*write gem_api = 1"),
        "is too old": (good.replace("gem_api = 1", "gem_api = 0"), r"interface 0; gem-core \S+ speaks 1\n.*pip install -U broken"),
        "is too new": (good.replace("gem_api = 1", "gem_api = 7"), r"needs plug-in interface 7; .*\n.*pip install -U gem-core"),
        "has an unknown hook": (
            good.replace("gem_callbacks", "gem_callbackz"),
            r"unknown hook 'gem_callbackz'\n.*did you mean 'gem_callbacks'",
        ),
        "forgot the marker": (good.replace("@hookimpl", ""), r"gem_callbacks\(\) is not marked as a hook\n.*@gem_core\.hookimpl"),
        "wants other arguments": (
            good.replace("gem_callbacks(self)", "gem_callbacks(self, colour)"),
            r"its gem_callbacks\(\) asks for colour, which this hook is not given\n.*def gem_callbacks\(self\)",
        ),
        "is a module whose function asks for itself": (
            "from gem_core import hookimpl\n\ngem_api = 1\n\n\n@hookimpl\ndef gem_commands(self, app):\n    pass\n\n\n"
            "import sys\n\nplugin = sys.modules[__name__]\n",
            r"its gem_commands\(\) asks for self, which this hook is not given\n.*def gem_commands\(app\)",
        ),
        "builds without the options": (
            good.replace("lambda config: None", "lambda: None"),
            r"build of its callback 'bell' cannot be called with \(config\): too many positional arguments\n.*CallbackSpec in gem_core",
        ),
        "builds from what nobody gives": (
            good.replace("lambda config: None", "lambda config, colour: None"),
            r"build of its callback 'bell' cannot be called with \(config\): missing a required argument: 'colour'",
        ),
        "has nothing to build": (good.replace("lambda config: None", "3"), "build of its callback 'bell' is 3, not a function"),
        "returns no list": (
            good.replace("return [", "return tuple, [", 1),
            r"gem_callbacks\(\) returned a type where a CallbackSpec must be",
        ),
        "returns None": (good.replace("return [", "[", 1), r"gem_callbacks\(\) must return a list of CallbackSpec, not NoneType"),
        "has a bad config_type": (good.replace(", Options,", ", dict,"), "config_type of its callback 'bell' is not a"),
        "raises in its hook": (
            good.replace("return [", "1 / 0; return ["),
            r"ZeroDivisionError: division by zero\n  where: .*broken\.py:12",
        ),
        "offers one name twice": (good.replace("return [", "return 2 * ["), "two callbacks called 'bell'"),
    }


def test_a_source_must_take_what_every_source_is_given(install: Install, load: Load):
    """Arguments by name too, which a class takes in its constructor."""
    source = GOOD.format(name="bell").replace("Callback", "Source").replace("gem_callbacks", "gem_sources")
    whole = source.replace("lambda config: None", "lambda config, features, *, split, batch_size, shard, seed, drop_last: None")
    install("acme", whole.replace('"bell"', '"whole"'))
    install("bolt", source.replace("lambda config: None", "lambda config, features, **options: None").replace('"bell"', '"any"'))
    install("coil", whole.replace(", drop_last: None", ": None"))
    with pytest.warns(PluginWarning, match="(?s)coil 1.2 cannot be used: .*unexpected keyword argument 'drop_last'"):
        assert {"whole", "any"} < {spec.name for spec in load().offers("source")}


@pytest.mark.parametrize("fault", faults())
def test_a_broken_plugin_is_told_once_and_leaves_the_others_alone(install: Install, load: Load, fault: str):
    source, words = faults()[fault]
    install("broken", source)
    install("sound", GOOD.format(name="gong"))
    with warnings.catch_warnings(record=True, action="always") as told:
        manager = load()
        assert [spec.name for spec in manager.offers("callback")] == [*CORE, "gong"]
        manager.status()
    assert [w.category for w in told] == [PluginWarning]
    assert re.search(f"(?s)plug-in broken 1.2 cannot be used: .*{words}", str(told[0].message))
    status = {s.name: s for s in manager.status()}
    assert status["broken"].state == "broken"
    assert status["broken"].offers == {}
    assert status["broken"].reason
    assert status["sound"].state == "active"
    assert "broken" not in manager.active()


def test_the_api_of_a_plugin_that_is_too_new_is_told(install: Install, load: Load):
    install("broken", GOOD.format(name="bell").replace("gem_api = 1", "gem_api = 7"))
    with pytest.warns(PluginWarning):
        manager = load()
    assert {s.name: s.api for s in manager.status()}["broken"] == 7


def test_a_broken_plugin_is_an_error_under_strict(install: Install, load: Load, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GEM_PLUGINS_STRICT", "1")
    install("broken", "raise OSError('no such library')")
    with pytest.raises(PluginError, match=r"plug-in broken 1\.2 cannot be used: OSError: no such library"):
        load()


def test_a_hook_that_raises_is_an_error_under_strict(install: Install, load: Load, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GEM_PLUGINS_STRICT", "1")
    install("broken", GOOD.format(name="bell").replace("return [", "1 / 0; return ["))
    manager = load()
    with pytest.raises(PluginError, match="ZeroDivisionError"):
        manager.offers("callback")
    assert {s.name: s.state for s in manager.status()}["broken"] == "broken"


def test_a_broken_plugin_that_is_named_is_an_error(install: Install, load: Load, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GEM_PLUGINS", "broken")
    install("broken", "raise OSError('no such library')")
    with pytest.raises(PluginError, match=r"plug-in broken 1\.2 cannot be used"):
        load()


def test_a_name_that_only_a_broken_plugin_may_offer_points_to_it(install: Install, load: Load):
    install("broken", "raise OSError('no such library')")
    with pytest.warns(PluginWarning):
        manager = load()
    with pytest.raises(
        PluginError, match=r"(?s)no callback called 'bell'.*broken 1.2 may offer it but is broken \(OSError: no such library\)"
    ):
        manager.find("callback", "bell")


def test_two_distributions_with_one_offer(install: Install, load: Load):
    install("acme", GOOD.format(name="bell"), version="1.0")
    install("bolt", GOOD.format(name="bell"), version="3.1")
    manager = load()
    with pytest.raises(PluginError, match=r"two distributions offer a callback called 'bell': acme 1\.0 and bolt 3\.1\n.*--no-plugin bolt"):
        manager.offers("callback")
    status = {s.name: s for s in manager.status()}
    assert (status["acme"].state, status["bolt"].state) == ("conflict", "conflict")
    assert "offered by acme too" in status["bolt"].reason
    assert [spec.name for spec in load(disabled=["bolt"]).offers("callback")] == [*CORE, "bell"]


def test_an_offer_with_the_name_of_a_builtin(install: Install, load: Load):
    install(
        "acme",
        GOOD.replace("CallbackSpec", "MetricSpec").replace("gem_callbacks", "gem_metrics").replace("Options, ", "").format(name="ne"),
    )
    with pytest.raises(PluginError, match=r"offer a metric called 'ne': gem-core \S+ and acme 1\.2\n.*--no-plugin acme"):
        load().offers("metric")


def test_an_entry_point_must_have_its_distributions_name(install: Install, load: Load):
    install("acme", GOOD.format(name="bell"), entry="bell = acme:plugin")
    with pytest.warns(PluginWarning, match=r"called 'bell', but it belongs to the distribution 'acme'\n.*acme = \"acme:plugin\""):
        load()


@pytest.mark.parametrize(("value", "active"), [("off", set()), ("acme", {"acme"}), ("Acme, bolt", {"acme", "bolt"})])
def test_environment_selects(install: Install, load: Load, monkeypatch: pytest.MonkeyPatch, value: str, active: set[str]):
    install("acme", GOOD.format(name="bell"))
    install("bolt", GOOD.format(name="gong"))
    monkeypatch.setenv("GEM_PLUGINS", value)
    manager = load()
    assert set(manager.active()) == {"gem-core", *active}
    assert {s.name for s in manager.status() if s.state == "disabled"} == {"acme", "bolt"} - active


def test_a_disabled_plugin_is_not_imported_and_is_pointed_to(install: Install, load: Load):
    install("acme", "raise OSError")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        manager = load(disabled=["acme"])
    with pytest.raises(PluginError, match="acme may offer it but is switched off"):
        manager.find("callback", "bell")


def test_switching_off_what_is_not_there(install: Install, load: Load):
    install("acme", GOOD.format(name="bell"))
    with pytest.raises(
        PluginError, match=r"no plug-in called 'acmee' is installed; there are: acme\n  where: --no-plugin\n.*did you mean 'acme'"
    ):
        load(disabled=["acmee"])


def test_hooks_must_not_look_up_other_plugins(install: Install, load: Load):
    install("acme", GOOD.format(name="bell").replace("return [", "self.manager.offers('metric'); return ["))
    manager = load()
    sys.modules["acme"].Plugin.manager = manager
    with pytest.warns(PluginWarning, match="offers of kind 'metric' were asked for while plug-ins were telling theirs"):
        manager.offers("callback")


def test_imports_must_not_ask_for_the_manager(install: Install, site: Path, monkeypatch: pytest.MonkeyPatch):
    install("acme", "from gem_core.plugins import manager\nmanager()\n")
    found = [ep for dist in metadata.distributions(path=[str(site)]) for ep in dist.entry_points]
    monkeypatch.setattr(metadata, "entry_points", lambda group: found)
    plugins.reset()
    try:
        with pytest.warns(PluginWarning, match="asks for the plug-in manager while it is being imported"):
            plugins.manager()
    finally:
        plugins.reset()


def test_a_retiring_hook_works_and_its_implementation_is_told(install: Install, load: Load, monkeypatch: pytest.MonkeyPatch):
    """The warning points at the plug-in's own line and says what to do instead; nothing else changes."""

    class Older(hookspecs.GemHooks):
        @hookspecs.retiring(since="0.4", gone="0.6", instead="offer a CallbackSpec by gem_callbacks")
        def gem_bells(self):
            """Offer bells."""

    monkeypatch.setattr(hookspecs, "GemHooks", Older)
    install(
        "acme",
        GOOD.format(name="bell").replace(
            "    plugin = ", "        @hookimpl\n        def gem_bells(self):\n            return []\n\n    plugin = "
        ),
    )
    install("other", GOOD.format(name="gong"))
    with pytest.warns(DeprecationWarning, match="gem_bells") as told:
        manager = load()
    (warning,) = told
    assert Path(warning.filename).name == "acme.py"
    assert str(warning.message) == (
        "gem_bells: this hook of gem-core is deprecated since 0.4 and goes in 0.6: offer a CallbackSpec by gem_callbacks"
    )
    assert {s.name: s.state for s in manager.status()}["acme"] == "active"
    assert [spec.name for spec in manager.offers("callback")][-2:] == ["bell", "gong"]


def test_an_argument_that_a_newer_core_adds_may_be_left_out(install: Install, load: Load, monkeypatch: pytest.MonkeyPatch):
    class Newer(hookspecs.GemHooks):
        @hookspecs.hookspec
        def gem_callbacks(self, device):
            """Offer callbacks; ``device`` is new."""

    monkeypatch.setattr(hookspecs, "GemHooks", Newer)
    install("acme", GOOD.format(name="bell"))
    assert load().offers("callback")[-1].name == "bell"
