"""The plug-in manager: finds, loads and checks plug-ins, and answers "which offers are there" and "give me the one called so".

Loading is guarded: each entry point of the group ``gem`` is imported and checked by itself, and one that fails leaves nothing behind but a
record (`PluginStatus`). What a plug-in offers is collected a kind at a time, when that kind is first asked for, so that a command that
needs no kernels imports none.

Environment: ``GEM_PLUGINS=off`` loads none, ``GEM_PLUGINS=a,b`` loads only these (each of which must then work), ``GEM_PLUGINS_STRICT=1``
makes every failure an error.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from typing import Any, Literal

import pluggy

from gem_core import hookspecs
from gem_core.__about__ import __version__
from gem_core.errors import GemError, PluginError

State = Literal["active", "broken", "conflict", "disabled"]

CORE = "gem-core"
KINDS: dict[str, tuple[str, type[Any]]] = {
    "kernel": ("gem_kernels", hookspecs.KernelSpec),
    "model": ("gem_models", hookspecs.ModelSpec),
    "source": ("gem_sources", hookspecs.SourceSpec),
    "recipe": ("gem_recipes", hookspecs.RecipeSpec),
    "codec": ("gem_codecs", hookspecs.CodecSpec),
    "dense_strategy": ("gem_dense_strategies", hookspecs.StrategySpec),
    "sparse_strategy": ("gem_sparse_strategies", hookspecs.StrategySpec),
    "collective": ("gem_collectives", hookspecs.CollectiveSpec),
    "ladder": ("gem_ladders", hookspecs.LadderSpec),
    "metric": ("gem_metrics", hookspecs.MetricSpec),
    "callback": ("gem_callbacks", hookspecs.CallbackSpec),
}
"""Kind of offer -> (hook, type of its specs)."""


class PluginWarning(UserWarning):
    """A plug-in that nobody asked for by name is broken and was left out."""


@dataclass(frozen=True)
class PluginStatus:
    """One line of `gemrec plugins`. ``offers`` maps a kind to the names offered (kernels: ``op/name``)."""

    name: str
    distribution: str
    version: str
    api: int | None
    hooks: tuple[str, ...]
    offers: dict[str, tuple[str, ...]]
    state: State
    reason: str = ""


@dataclass
class _Plugin:
    """A plug-in as found; ``obj`` is None unless it could be imported."""

    name: str
    version: str
    obj: Any = None
    impls: dict[str, Any] = field(default_factory=dict)
    offers: dict[str, list[Any]] = field(default_factory=dict)
    state: State = "active"
    reason: str = ""
    asked: bool = False

    @property
    def title(self) -> str:
        return f"{self.name} {self.version}"


class _Fault(Exception):
    """Why a plug-in cannot be used, in the words that the user will read; ``fix`` says what mends it."""

    def __init__(self, reason: str, fix: str | None = None) -> None:
        super().__init__(reason)
        self.fix = fix


def offer_name(spec: Any) -> str:
    """The name that selects a spec among its kind: ``name``, or ``op/name`` of a kernel."""
    return f"{spec.op}/{spec.name}" if isinstance(spec, hookspecs.KernelSpec) else spec.name


class PluginManager:
    """All plug-ins of this process. Use `manager()`; construct one directly only to look at a certain set of entry points."""

    def __init__(self, *, disabled: Iterable[str] = (), entry_points: Iterable[metadata.EntryPoint] | None = None) -> None:
        self._lock = threading.RLock()
        self._plugins: dict[str, _Plugin] = {}
        self.strict = os.environ.get("GEM_PLUGINS_STRICT", "") not in ("", "0")
        self._collected: set[str] = set()
        self._collecting: str | None = None
        found = list(metadata.entry_points(group=hookspecs.GROUP) if entry_points is None else entry_points)
        self._load(found, {_normal(n) for n in disabled})

    def offers(self, kind: str) -> list[Any]:
        """Every spec of ``kind``, built-in ones first.

        :raises PluginError: two distributions offer the same name; an unknown kind; a failure that was asked for, or any under
            ``GEM_PLUGINS_STRICT=1``.
        """
        self._collect(kind)
        seen: dict[str, _Plugin] = {}
        for plugin in self._plugins.values():
            for spec in plugin.offers.get(kind, ()):
                name = offer_name(spec)
                if name in seen:
                    raise _conflict(kind, name, seen[name], plugin)
                seen[name] = plugin
        return [spec for plugin in self._plugins.values() for spec in plugin.offers.get(kind, ())]

    def find(self, kind: str, name: str, where: str | None = None) -> Any:
        """The spec of ``kind`` called ``name`` (a kernel: ``op/name``), which is asked for at ``where``.

        :raises PluginError: there is none; the message lists the names there are, the nearest one, and the plug-ins that failed to load.
        """
        offers = {offer_name(spec): spec for spec in self.offers(kind)}
        if name not in offers:
            raise self.missing(f"{kind.replace('_', ' ')} called {name!r}", name, offers, where)
        return offers[name]

    def missing(self, what: str, name: str, there: Iterable[str], where: str | None = None) -> PluginError:
        """The error for ``name`` that nobody offers: what there is, the nearest name, and which plug-ins might have offered it."""
        names = sorted(there)
        near = difflib.get_close_matches(name, names, n=1)
        fixes = [f"did you mean {near[0]!r}?"] if near else []
        for p in self._plugins.values():
            if p.state == "broken":
                fixes.append(f"{p.title} may offer it but is broken ({p.reason}): mend or upgrade it (pip install -U {p.name})")
            elif p.state == "disabled":
                fixes.append(f"{p.name} may offer it but is switched off (--no-plugin or GEM_PLUGINS)")
        if not fixes:
            fixes.append(f"choose one of these, or install the package that offers {name!r}; `gemrec plugins` lists what is installed")
        return PluginError(f"there is no {what}; there are: {', '.join(names) or 'none'}", where=where, fix="; ".join(fixes))

    def distribution_of(self, kind: str, name: str) -> str:
        """Name of the distribution that offers ``name``."""
        spec = self.find(kind, name)
        return next(p.name for p in self._plugins.values() if spec in p.offers.get(kind, ()))

    def status(self) -> list[PluginStatus]:
        """Every plug-in found, loaded or not. Collects all kinds; never raises for a broken plug-in."""
        for kind in KINDS:
            self._collect(kind, tolerate=True)
        conflicts = self._conflicts()
        lines = []
        for p in self._plugins.values():
            offers = {kind: tuple(offer_name(s) for s in specs) for kind, specs in p.offers.items() if specs}
            state: State = "conflict" if p.name in conflicts else p.state
            reason = conflicts.get(p.name, p.reason)
            lines.append(PluginStatus(p.name, p.name, p.version, _api(p.obj), tuple(sorted(p.impls)), offers, state, reason))
        return lines

    def active(self) -> dict[str, str]:
        """Name -> version of the plug-ins in use, for run headers and checkpoints."""
        return {p.name: p.version for p in self._plugins.values() if p.state == "active"}

    def add(self, name: str, obj: Any, version: str = "0") -> None:
        """Register a plug-in object that no entry point publishes: one of a notebook or a test.

        :raises PluginError: the name is taken, or the object is at fault.
        """
        if name in self._plugins:
            raise PluginError(f"there is a plug-in called {name!r} already ({self._plugins[name].title})", fix="choose another name")
        with self._lock:
            collected, self._collected = self._collected, set()
            try:
                self._register(_Plugin(name, version, asked=True), lambda: obj)
                for kind in collected:
                    self._collect(kind)
            except PluginError:
                del self._plugins[name]
                raise

    def call(self, hook: str, *, before: Callable[[str], None], failed: Callable[[str], None], **arguments: Any) -> None:
        """Call ``hook`` on each plug-in that has it, guarded; ``before(name)`` hears whose turn it is, ``failed(name)`` who failed."""
        for plugin in self._plugins.values():
            if plugin.state == "active" and hook in plugin.impls:
                before(plugin.name)
                if not self._guard(plugin, partial(_invoke, plugin, hook, **arguments)):
                    failed(plugin.name)

    def _load(self, found: list[metadata.EntryPoint], disabled: set[str]) -> None:
        only = os.environ.get("GEM_PLUGINS", "").strip()
        wanted = {_normal(n) for n in only.split(",") if n.strip()} if only not in ("", "off") else set()
        names = {_normal(ep.name) for ep in found}
        for origin, given in (("GEM_PLUGINS", wanted), ("--no-plugin", disabled)):
            for name in sorted(given - names):
                raise _unknown_plugin(name, origin, names)
        self._register(_Plugin(CORE, __version__), _builtin)
        for ep in sorted(found, key=lambda ep: ep.name):
            plugin = _Plugin(ep.name, ep.dist.version if ep.dist is not None else "unknown", asked=_normal(ep.name) in wanted)
            if plugin.name in self._plugins:
                other = self._plugins[plugin.name]
                raise PluginError(
                    f"two entry points of the group {hookspecs.GROUP!r} are called {plugin.name!r} (of {_dist(ep)} and {other.title})",
                    fix="uninstall one of them; an entry point must have the name of its distribution",
                )
            if only == "off" or (wanted and _normal(ep.name) not in wanted):
                plugin.state, plugin.reason = "disabled", f"GEM_PLUGINS={only}"
                self._plugins[plugin.name] = plugin
            elif _normal(ep.name) in disabled:
                plugin.state, plugin.reason = "disabled", "--no-plugin"
                self._plugins[plugin.name] = plugin
            else:
                self._register(plugin, partial(_import, ep))

    def _register(self, plugin: _Plugin, load: Callable[[], Any]) -> None:
        self._plugins[plugin.name] = plugin

        def check() -> None:
            plugin.obj = load()
            _check_api(plugin, plugin.obj)
            plugin.impls = _hookimpls(plugin.obj)

        self._guard(plugin, check)

    def _guard(self, plugin: _Plugin, action: Callable[[], Any], *, tolerate: bool = False) -> bool:
        """Run ``action`` and say whether it went well; when it fails, withdraw the plug-in and record why."""
        try:
            action()
            return True
        except KeyboardInterrupt:
            raise
        except BaseException as fault:
            fix = getattr(fault, "fix", None) or (
                f"mend or upgrade it (pip install -U {plugin.name}), uninstall it, or switch it off: --no-plugin {plugin.name}"
            )
            plugin.state = "broken"
            plugin.reason = _reason(fault)
            plugin.offers.clear()
            error = PluginError(f"plug-in {plugin.title} cannot be used: {plugin.reason}", where=_location(fault), fix=fix)
            if not tolerate and (self.strict or plugin.asked or plugin.name == CORE):
                raise error from fault
            warnings.warn(str(error), PluginWarning, stacklevel=3)
            return False

    def _collect(self, kind: str, *, tolerate: bool = False) -> None:
        if kind not in KINDS:
            raise PluginError(f"there is no kind of plug-in offer called {kind!r}; there are: {', '.join(KINDS)}")
        with self._lock:
            if kind in self._collected:
                return
            if self._collecting is not None:
                raise PluginError(
                    f"offers of kind {kind!r} were asked for while plug-ins were telling theirs of kind {self._collecting!r}",
                    fix="a hook must only return specs; look other plug-ins up when the spec is used",
                )
            self._collecting = kind
            try:
                for plugin in self._plugins.values():
                    if plugin.state == "active" and KINDS[kind][0] in plugin.impls and kind not in plugin.offers:
                        self._guard(plugin, partial(_collect, plugin, kind), tolerate=tolerate)
                self._collected.add(kind)
            finally:
                self._collecting = None

    def _conflicts(self) -> dict[str, str]:
        """Plug-in name -> which of its offers another plug-in makes too."""
        found: dict[str, str] = {}
        for kind in KINDS:
            seen: dict[str, _Plugin] = {}
            for plugin in self._plugins.values():
                for name in map(offer_name, plugin.offers.get(kind, ())):
                    if name in seen:
                        found[plugin.name] = f"{kind} {name!r} is offered by {seen[name].name} too"
                        found.setdefault(seen[name].name, f"{kind} {name!r} is offered by {plugin.name} too")
                    seen.setdefault(name, plugin)
        return found


_state_lock = threading.RLock()
_manager: PluginManager | None = None
_loading = False


def manager() -> PluginManager:
    """The plug-in manager of this process, created (and the plug-ins loaded) at the first call."""
    global _manager
    with _state_lock:
        if _manager is None:
            _manager = _create(())
        return _manager


def reset(*, disabled: Iterable[str] = ()) -> None:
    """Forget the manager; the next `manager()` loads afresh, without the plug-ins named in ``disabled`` (what ``--no-plugin`` does)."""
    global _manager
    names = tuple(disabled)
    with _state_lock:
        _manager = _create(names) if names else None


def _create(disabled: Iterable[str]) -> PluginManager:
    global _loading
    if _loading:
        raise _Fault("it asks for the plug-in manager while it is being imported", "look other plug-ins up in functions, not at import")
    _loading = True
    try:
        return PluginManager(disabled=disabled)
    finally:
        _loading = False


def _builtin() -> Any:
    from gem_core.builtin import plugin

    return plugin


def _import(ep: metadata.EntryPoint) -> Any:
    if ep.dist is not None and _normal(ep.dist.name) != _normal(ep.name):
        raise _Fault(
            f"its entry point is called {ep.name!r}, but it belongs to the distribution {ep.dist.name!r}",
            f'in its pyproject.toml write [project.entry-points.{hookspecs.GROUP}] {ep.dist.name} = "{ep.value}"',
        )
    return ep.load()


def _check_api(plugin: _Plugin, obj: Any) -> None:
    if inspect.isclass(obj):
        raise _Fault(
            f"its entry point is the class {obj.__name__!r}, not an object", f"publish an instance of it: plugin = {obj.__name__}()"
        )
    api = getattr(obj, "gem_api", None)
    low, high = hookspecs.SUPPORTED_API[0], hookspecs.SUPPORTED_API[-1]
    speaks = f"{CORE} {__version__} speaks {low}" if low == high else f"{CORE} {__version__} speaks {low} to {high}"
    if not isinstance(api, int) or isinstance(api, bool):
        raise _Fault(f"its plug-in object says gem_api = {api!r}; {speaks}", f"write gem_api = {hookspecs.GEM_API} in it")
    if api < low:
        raise _Fault(f"it was written for plug-in interface {api}; {speaks}", f"upgrade it: pip install -U {plugin.name}")
    if api > high:
        raise _Fault(f"it needs plug-in interface {api}; {speaks}", f"upgrade the core: pip install -U {CORE}")


def _hookimpls(obj: Any) -> dict[str, Any]:
    """Hook name -> implementation. Registered in a manager of its own: what fails there never touches another plug-in."""
    trial = pluggy.PluginManager(hookspecs.GROUP)
    trial.add_hookspecs(hookspecs.GemHooks)
    known = set(vars(trial.hook)) - {"_"}
    try:
        trial.register(obj)
        callers = trial.get_hookcallers(obj) or []
        trial.check_pending()
    except pluggy.PluginValidationError as fault:
        marked = [n for n in dir(obj) if hasattr(getattr(obj, n, None), f"{hookspecs.GROUP}_impl")]
        unknown = [n for n in marked if n not in known]
        if not unknown:
            raise _foreign_arguments(obj, marked) or _Fault(" ".join(str(fault).split())) from fault
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"hooks are: {', '.join(sorted(known))}"
        raise _Fault(f"it implements the unknown hook {unknown[0]!r}", hint) from fault
    unmarked = [n for n in known if callable(getattr(obj, n, None)) and n not in {c.name for c in callers}]
    if unmarked:
        raise _Fault(f"its {unmarked[0]}() is not marked as a hook", "put @gem_core.hookimpl above it")
    return {caller.name: caller.get_hookimpls()[0] for caller in callers}


def _foreign_arguments(obj: Any, hooks: Iterable[str]) -> _Fault | None:
    """The fault of a hook that asks for arguments which its specification does not give."""
    for name in hooks:
        given = [word for word in inspect.signature(getattr(hookspecs.GemHooks, name)).parameters if word != "self"]
        hook = getattr(obj, name)
        asked = [word for word in inspect.signature(hook).parameters if word not in given]
        if asked:
            own = ["self"] if inspect.ismethod(hook) else []
            return _Fault(
                f"its {name}() asks for {', '.join(asked)}, which this hook is not given",
                f"write it as def {name}({', '.join([*own, *given])})",
            )
    return None


def _check_calls(kind: str, spec: Any) -> None:
    """The functions of a spec take what they will be called with, as far as their signatures tell."""
    for function, words in hookspecs.CALLS[kind].items():
        call, of = getattr(spec, function), f"{function} of its {kind.replace('_', ' ')} {offer_name(spec)!r}"
        if call is None and function == "backward":
            continue
        if not callable(call):
            raise _Fault(f"{of} is {call!r}, not a function")
        by_place, _, by_name = words.partition("*, ")
        try:
            signature = inspect.signature(call)
        except (TypeError, ValueError):  # a function of C
            continue
        try:
            signature.bind(*(word for word in by_place.split(", ") if word), **{word: word for word in by_name.split(", ") if word})
        except TypeError as error:
            fix = f"let it take ({words}); {type(spec).__name__} in gem_core.hookspecs says what these are"
            raise _Fault(f"{of} cannot be called with ({words}): {error}", fix) from None


def _invoke(plugin: _Plugin, hook: str, **arguments: Any) -> Any:
    impl = plugin.impls[hook]
    return impl.function(*(arguments[name] for name in impl.argnames))


def _collect(plugin: _Plugin, kind: str) -> None:
    """Ask ``plugin`` for its offers of ``kind`` and check them."""
    hook, spec_type = KINDS[kind]
    specs: Any = _invoke(plugin, hook)
    if not isinstance(specs, (list, tuple)):
        raise _Fault(f"its {hook}() must return a list of {spec_type.__name__}, not {type(specs).__name__}")
    names: set[str] = set()
    for spec in specs:
        if not isinstance(spec, spec_type):
            raise _Fault(f"its {hook}() returned a {type(spec).__name__} where a {spec_type.__name__} must be")
        if not isinstance(spec.name, str) or not spec.name:
            raise _Fault(f"its {hook}() returned a {spec_type.__name__} without a name")
        config_type = getattr(spec, "config_type", None)
        if config_type is not None and not (inspect.isclass(config_type) and hasattr(config_type, "model_validate")):
            raise _Fault(f"config_type of its {kind} {spec.name!r} is not a gem_core.config.FrozenConfig")
        _check_calls(kind, spec)
        if offer_name(spec) in names:
            raise _Fault(f"it offers two {kind.replace('_', ' ')}s called {offer_name(spec)!r}")
        names.add(offer_name(spec))
    plugin.offers[kind] = list(specs)


def _conflict(kind: str, name: str, first: _Plugin, second: _Plugin) -> PluginError:
    off = second if second.name != CORE else first
    return PluginError(
        f"two distributions offer a {kind.replace('_', ' ')} called {name!r}: {first.title} and {second.title}",
        fix=f"uninstall one, or switch one off (--no-plugin {off.name}); their authors should rename one",
    )


def _unknown_plugin(name: str, origin: str, names: set[str]) -> PluginError:
    near = difflib.get_close_matches(name, names, n=1)
    there = ", ".join(sorted(names)) or "none"
    return PluginError(
        f"no plug-in called {name!r} is installed; there are: {there}",
        where=origin,
        fix=f"did you mean {near[0]!r}?" if near else f"install it (pip install {name}), or take it out of {origin}",
    )


def _api(obj: Any) -> int | None:
    api = getattr(obj, "gem_api", None)
    return api if isinstance(api, int) else None


def _dist(ep: metadata.EntryPoint) -> str:
    return f"{ep.dist.name} {ep.dist.version}" if ep.dist is not None else "an unknown distribution"


def _normal(name: str) -> str:
    return name.strip().lower().replace("_", "-").replace(".", "-")


def _reason(fault: BaseException) -> str:
    if isinstance(fault, _Fault):
        return str(fault)
    if isinstance(fault, GemError):
        return fault.what
    text = str(fault).strip()
    return f"{type(fault).__name__}: {text.splitlines()[0] if text else 'no message'}"


def _location(fault: BaseException) -> str | None:
    """File and line where the plug-in's own code failed: the innermost frame outside this package and the import system."""
    if isinstance(fault, _Fault):
        return None
    passing = tuple(os.path.dirname(os.path.realpath(file)) + os.sep for file in (__file__, importlib.__file__))
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(fault.__traceback__)]
    own = [f"{file}:{line}" for file, line in frames if not file.startswith("<") and not os.path.realpath(file).startswith(passing)]
    return own[-1] if own else None
