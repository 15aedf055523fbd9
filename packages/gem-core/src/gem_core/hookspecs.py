"""The hooks of the entry-point group ``gem`` and the named specs that they offer.

A plug-in is an object (usually an instance, see below) with ``gem_api = 1`` and hooks, published as
``[project.entry-points.gem]  <distribution> = "<module>:<object>"``. Hooks *offer* lists of specs; the configuration *selects* by name::

    from gem_core import KernelSpec, hookimpl

    class Plugin:
        gem_api = 1

        @hookimpl
        def gem_kernels(self):
            return [KernelSpec(op="gdpa", name="acme", forward=..., backward=..., supports=..., priority=10)]

    plugin = Plugin()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import pluggy

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gem_core.bench.ladder import Row
    from gem_core.cli.groups import CommandGroups
    from gem_core.config import Config
    from gem_core.ops.contract import Problem, Supported
    from gem_core.train.collective import Gatherer, GatherOptions, Topology
    from gem_core.train.mesh import Mesh

GEM_API = 1
"""Version of the plug-in interface that this core speaks."""

SUPPORTED_API = range(1, 2)
"""The ``gem_api`` values that this core accepts."""

GROUP = "gem"
hookspec = pluggy.HookspecMarker(GROUP)
hookimpl = pluggy.HookimplMarker(GROUP)


def retiring(since: str, gone: str, instead: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Mark a hook of `GemHooks` that is to go, in the place of ``@hookspec``: it works, and implementing it is a DeprecationWarning.

    :param since: version of gem-core that first warns; ``gone``: the later minor or major version that is without the hook.
    :param instead: what a plug-in does in its place, as an imperative: "offer a MetricSpec".
    """
    words = f"this hook of gem-core is deprecated since {since} and goes in {gone}: {instead}"

    def mark(hook: Callable[..., Any]) -> Callable[..., Any]:
        marked: Callable[..., Any] = hookspec(hook, warn_on_impl=DeprecationWarning(f"{hook.__name__}: {words}"))
        return marked

    return mark


@dataclass(frozen=True)
class KernelSpec:
    """One implementation of an op.

    ``forward(problem, *tensors) -> (out, saved)`` and ``backward(problem, saved, dout, needs) -> grads``: tensors, saved tensors and
    gradients are in the order of the op's contract (`gem_core.ops.contracts()`); ``needs`` is a bool for each differentiable tensor and
    the gradient of one that is not needed is None. ``backward=None`` means the default backward of the op. ``supports(problem)`` must not
    touch the device. Automatic choice takes the supported one of the highest priority (the reference has 0).
    """

    kind: ClassVar[str] = "kernel"
    op: str
    name: str
    forward: Callable[..., tuple[Any, tuple[Tensor | None, ...]]]
    backward: Callable[[Problem, tuple[Tensor | None, ...], Any, tuple[bool, ...]], tuple[Tensor | None, ...]] | None
    supports: Callable[[Problem], Supported]
    priority: int = 10


@dataclass(frozen=True)
class ModelSpec:
    """A model: ``build(config, features) -> Module`` whose ``forward(batch) -> gem_core.model.ModelOutput``."""

    kind: ClassVar[str] = "model"
    name: str
    config_type: type
    build: Callable[..., nn.Module]


@dataclass(frozen=True)
class SourceSpec:
    """A data source: ``build(config, features, *, split, batch_size, shard=(rank, world), seed, drop_last) -> gem_core.sources.Source``.

    ``features(config) -> Features``, where given, declares the features of a source that knows its own (used when ``[features]`` is empty).
    ``free``: options that may be others when a run is resumed: what they change, the source's stored position does not depend on, or it
    refuses the position itself.
    """

    kind: ClassVar[str] = "source"
    name: str
    config_type: type
    build: Callable[..., Any]
    features: Callable[..., Any] | None = None
    free: tuple[str, ...] = ()


@dataclass(frozen=True)
class RecipeSpec:
    """A precision recipe: ``apply(module, config, context) -> Guard``."""

    kind: ClassVar[str] = "recipe"
    name: str
    config_type: type
    apply: Callable[..., Guard]


@dataclass(frozen=True)
class CodecSpec:
    """A tensor codec for gathers and saved activations: ``encode(shard) -> (payload, scales)``, ``decode(payload, scales, dtype)``.

    ``alignment``: shard borders must be multiples of this many elements for decode(gather(encode)) to equal encode(gather).
    """

    kind: ClassVar[str] = "codec"
    name: str
    alignment: int
    encode: Callable[..., tuple[Tensor, Tensor]]
    decode: Callable[..., Tensor]


@dataclass(frozen=True)
class StrategySpec:
    """A dense strategy ``build(model, mesh, config) -> Module`` or a sparse one ``build(tables, mesh, config) -> Module``.

    A sparse strategy's ``forward(group: SparseGroup)`` gives ``{lookup name: pooled [B, d] or (values [N, d], offsets [B+1])}`` and its
    ``state_items()`` gives ``(canonical name, tensor or Shards)`` pairs; see ``gem_core.model.contract.Tables``.

    ``averages(mesh)``, of a dense strategy that does nothing but average the gradients of whole copies over all processes: called in place
    of ``build`` where steps are captured, which do that themselves; raises what ``build`` would for the mesh.
    """

    kind: ClassVar[str] = "strategy"
    name: str
    config_type: type
    build: Callable[..., nn.Module]
    averages: Callable[[Mesh], None] | None = None


@dataclass(frozen=True)
class CollectiveSpec:
    """An all-gather back end: ``supports(topology) -> Supported``, ``build(group, options) -> Gatherer``.

    See `gem_core.train.collective` for ``Topology``, ``GatherOptions`` and what a ``Gatherer`` does. ``build`` is collective over the group
    and raises where the machine refuses what ``supports`` could not know.
    """

    kind: ClassVar[str] = "collective"
    name: str
    supports: Callable[[Topology], Supported]
    build: Callable[[Any, GatherOptions], Gatherer]


@dataclass(frozen=True)
class LadderSpec:
    """Rows of ``gemrec bench train``: ``rows(config, devices) -> Sequence[gem_core.bench.ladder.Row]`` for so many devices.

    ``predict(config, gpus, cluster) -> {"step_ms": ..., "memory_bytes": ...}``, where it exists, is told beside each row when the user
    names a cluster file. ``profile``: three more steps of each row run under the profiler, for the columns that it gives.
    """

    kind: ClassVar[str] = "ladder"
    name: str
    rows: Callable[[Config, int], Sequence[Row]]
    predict: Callable[[Config, int, Path], Mapping[str, float]] | None = None
    profile: bool = False


@dataclass(frozen=True)
class MetricSpec:
    """A metric: ``build(config)`` gets the ``[eval]`` section and returns a fresh `gem_core.metrics.contract.Metric`, one a task."""

    kind: ClassVar[str] = "metric"
    name: str
    build: Callable[..., Any]


@dataclass(frozen=True)
class CallbackSpec:
    """A trainer callback: ``build(config) -> object`` with any of on_start, on_step, on_eval, on_checkpoint, on_error, on_end."""

    kind: ClassVar[str] = "callback"
    name: str
    config_type: type
    build: Callable[..., Any]


CALLS: dict[str, dict[str, str]] = {
    "kernel": {"supports": "problem", "backward": "problem, saved, dout, needs"},
    "model": {"build": "config, features"},
    "source": {"build": "config, features, *, split, batch_size, shard, seed, drop_last"},
    "recipe": {"apply": "module, config, context"},
    "codec": {"encode": "shard", "decode": "payload, scales, dtype"},
    "dense_strategy": {"build": "model, mesh, config"},
    "sparse_strategy": {"build": "tables, mesh, config"},
    "collective": {"supports": "topology", "build": "group, options"},
    "ladder": {"rows": "config, devices"},
    "metric": {"build": "config"},
    "callback": {"build": "config"},
}
"""Kind of offer -> function of its spec -> what it is called with: by place before the star, by name behind it."""


@runtime_checkable
class Guard(Protocol):
    """What a recipe leaves behind: tells the precision of each site and watches the numbers.

    Some members may be left out. ``watch(evaluate)`` is called once before training: ``evaluate(rows)`` gives the NE of the first task over
    the first ``rows`` held-out samples as the model computes at that moment, the same on all ranks, so a guard may call it inside
    ``on_step`` at steps that are the same on all ranks. ``take_decisions()`` returns what the guard decided since the last call, as
    records with ``step`` and JSON values; the trainer writes them to ``guard.jsonl`` of the run folder.

    An attribute ``capturable``, true: a step may be recorded and replayed, since the recipe's modules compute the same in every step or
    since ``recording()`` tells when they do not: it returns a hashable that names what the coming step computes, or None if that step
    must not be replayed (the guard samples in it). Steps recorded under another name are recorded anew.

    ``state_dict`` is the same on every rank, and rank 0's is stored. A guard with state of each rank, as random generators are, may have
    ``rank_state()`` and ``load_rank_state(state)``, which gives a rank back its own where there are as many ranks as before.
    """

    def describe(self) -> Sequence[tuple[str, str, str]]:
        """(module name, precision, why) for every site."""

    def on_step(self, step: int, loss: Tensor) -> Mapping[str, Any]:
        """Called after each optimizer step; returns scalars to log. Must not wait for the device except when it samples."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class GemHooks:
    """Hook specifications. Every hook returns a list of specs and may return an empty one.

    They are promises: an argument is added at the end only (implementations may leave it out), and a hook that is to go is `retiring` for
    at least one minor version before `GEM_API` is raised and it is removed.
    """

    @hookspec
    def gem_kernels(self) -> list[KernelSpec]:  # type: ignore[empty-body]
        """Offer implementations of ops."""

    @hookspec
    def gem_models(self) -> list[ModelSpec]:  # type: ignore[empty-body]
        """Offer models."""

    @hookspec
    def gem_sources(self) -> list[SourceSpec]:  # type: ignore[empty-body]
        """Offer data sources."""

    @hookspec
    def gem_recipes(self) -> list[RecipeSpec]:  # type: ignore[empty-body]
        """Offer precision recipes."""

    @hookspec
    def gem_codecs(self) -> list[CodecSpec]:  # type: ignore[empty-body]
        """Offer tensor codecs."""

    @hookspec
    def gem_dense_strategies(self) -> list[StrategySpec]:  # type: ignore[empty-body]
        """Offer ways to parallelise the dense part."""

    @hookspec
    def gem_sparse_strategies(self) -> list[StrategySpec]:  # type: ignore[empty-body]
        """Offer ways to shard the embedding tables."""

    @hookspec
    def gem_collectives(self) -> list[CollectiveSpec]:  # type: ignore[empty-body]
        """Offer collective back ends."""

    @hookspec
    def gem_ladders(self) -> list[LadderSpec]:  # type: ignore[empty-body]
        """Offer lists of configurations that `gemrec bench train` measures."""

    @hookspec
    def gem_metrics(self) -> list[MetricSpec]:  # type: ignore[empty-body]
        """Offer evaluation metrics."""

    @hookspec
    def gem_callbacks(self) -> list[CallbackSpec]:  # type: ignore[empty-body]
        """Offer trainer callbacks."""

    @hookspec
    def gem_commands(self, app: CommandGroups) -> None:
        """Add commands to the groups that the core owns: bench, data, kernels, precision, config; or at the top level."""
