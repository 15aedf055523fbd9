"""Named recipes: which modules compute in which precision, and why.

A recipe works on any module tree: exact `torch.nn.Linear` modules, `GroupedLinear` modules, and modules with an attribute
``attention_precision`` are its sites. Everything else (norms, softmax statistics, embeddings and their optimizer) is not touched.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn

from gem_core.config import FrozenConfig
from gem_core.errors import ConfigError
from gem_core.hookspecs import Guard, RecipeSpec
from gem_core.ops.contract import OpPrecision
from gem_core.train.contract import RecipeContext
from gem_precision.attention_site import watch_attention
from gem_precision.bf16 import Bf16Config, apply_bf16
from gem_precision.formats import rank_generator
from gem_precision.guard import GuardConfig, NumericsGuard
from gem_precision.linear import GroupedLinear, convert_linear
from gem_precision.policy import Gemm, LinearPolicy, fp8_linear, mx_linear
from gem_precision.saved import SavedActivations, wrap_forward
from gem_precision.site import Site, linear_levels
from gem_precision.speed import pays

log = logging.getLogger("gem_precision")


@dataclass(frozen=True)
class Recipe:
    """``linear``: policy of linears, None: bf16. ``attention``: precision of attention ops. ``saved``: elements of saved activations."""

    name: str
    linear: LinearPolicy | None = None
    attention: OpPrecision | None = None
    saved: str | None = None


RECIPES = {
    r.name: r
    for r in (
        Recipe("bf16"),
        # one scale over all tokens of a batch is too coarse for wgrad
        Recipe("fp8-rowwise", fp8_linear("rowwise", wgrad=False)),
        Recipe("fp8-block", fp8_linear("block")),
        Recipe("mxfp8", mx_linear()),
        Recipe("mxfp8-wgrad-bf16", mx_linear(wgrad=False)),
        Recipe("mxfp8-attention", mx_linear(), OpPrecision()),
        Recipe("fp8-attention", fp8_linear("block"), OpPrecision(block=(128, 128))),
        Recipe("mx4-saved", saved="e2m1"),
    )
}


def recipes() -> dict[str, Recipe]:
    """Every recipe of this package by name."""
    return dict(RECIPES)


class RecipeConfig(FrozenConfig):
    """``[precision.<recipe>]``. Patterns are matched against module names as a shell matches file names; later overrides win."""

    keep: tuple[str, ...] = Field(("heads", "heads.*"), description="modules computed in fp32: the prediction heads")
    last_layers: int = Field(1, ge=0, description="this many last entries of each outermost list called layers or blocks stay in bf16")
    min_features: int = Field(32, ge=0, description="linears with fewer in or out features stay in bf16: a block would not be full")
    overrides: dict[str, str] = Field(default_factory=dict, description="pattern of module names -> name of a recipe, for its linears")
    scale_rule: Literal["rceil", "floor", "ceil", "even"] | None = Field(None, description="None: the recipe's (rceil)")
    stochastic_gradients: bool = Field(False, description="round gradients stochastically (MX)")
    hadamard: Literal[16, 32] | None = Field(None, description="random Hadamard transform of the wgrad operands, tile along K (MX)")
    backend: Literal["auto", "emulated", "torch", "triton"] = "auto"
    seed: int = Field(0, ge=0, description="of stochastic rounding and of the Hadamard signs")
    allow_slow: bool = Field(False, description="quantise also shapes that were measured, or must be expected, to be slower than bf16")
    min_rows: int = Field(
        8192, ge=0, description="FP8 linears compute calls of fewer rows in bf16: quantising the weights does not pay (unless allow_slow)"
    )
    per_sample: tuple[str, ...] = Field(
        ("*.interaction.*",),
        description="FP8 leaves linears in bf16 that have one row a sample: patterns of module names (unless allow_slow)",
    )
    guard: GuardConfig = GuardConfig()


@dataclass(frozen=True)
class Choice:
    """What a recipe decides for one module."""

    module: str
    precision: str
    why: str
    policy: Any = None


def choices(module: nn.Module, recipe: Recipe, config: RecipeConfig, device: torch.device) -> list[Choice]:
    """The decision for every possible site, in module order. Nothing is changed."""
    _check_overrides(module, config)
    last, last_linear = _last_layers(module, config), _prediction_head(module, config)
    found = []
    for name, part in module.named_modules():
        attends = hasattr(part, "attention_precision")
        if attends:
            found.append(_attention_choice(name, recipe, config, last))
        if type(part) is not nn.Linear and not isinstance(part, GroupedLinear):
            continue
        chosen, why = recipe, f"recipe {recipe.name}"
        forced = False
        for pattern, other in config.overrides.items():
            if fnmatchcase(name, pattern):
                chosen, why, forced = RECIPES[other], f"overrides: {pattern!r} -> {other}", True
        policy = _policy(chosen, config)
        if isinstance(part, nn.Linear):
            n, k = part.weight.shape
        else:
            _, n, k = part.weight.shape
        verdict = _exception(name, k, n, config, last, last_linear) if not forced else None
        if kept(name, config):
            found.append(Choice(name, "fp32", "keep: always in high precision"))
        elif verdict is not None:
            found.append(Choice(name, "bf16", verdict))
        elif policy is None:
            found.append(Choice(name, "bf16", why))
        elif isinstance(part, GroupedLinear) and policy.fprop.a is not None and policy.fprop.a.format != "mx":
            found.append(Choice(name, "bf16", "grouped linears take MX or bf16"))
        elif not forced and not config.allow_slow and not _is_emulated(policy, device) and _has_few_rows(name, config):
            found.append(Choice(name, "bf16", "slower: one row a sample does not pay for quantised weights"))
        elif not config.allow_slow and not (answer := pays(policy, k, n, device)):
            found.append(Choice(name, "bf16", f"slower: {answer.reason}"))
        else:
            found.append(Choice(name, _linear_name(chosen), why + _note(policy, config, device), policy))
    return found


def apply(module: nn.Module, recipe: str | Recipe, *, config: RecipeConfig | None = None, context: RecipeContext | None = None) -> Guard:
    """Make ``module`` compute by ``recipe``, in place, and return the guard that watches it.

    Parameters stay fp32 under their names. Call ``guard.on_step(step, loss)`` after each optimizer step; without it nothing is watched.

    :param recipe: a name of `recipes`, or a `Recipe`.
    :raises ConfigError: no such recipe, an override that matches nothing, or parameters that are not fp32.
    """
    chosen = _find(recipe) if isinstance(recipe, str) else recipe
    options = config or RecipeConfig()
    if context is None:
        parameter = next(module.parameters(), None)
        context = RecipeContext(torch.device("cpu") if parameter is None else parameter.device)
    plan = {} if chosen.linear is None and chosen.attention is None else {
        (c.module, isinstance(c.policy, OpPrecision)): c for c in choices(module, chosen, options, context.device)
    }  # fmt: skip
    base = apply_bf16(module, Bf16Config(keep=options.keep), context)
    sites: list[Site] = []
    parts = dict(module.named_modules())
    for (name, is_attention), choice in plan.items():
        if choice.policy is not None:
            sites.append(
                _attention(name, parts[name], choice) if is_attention else _linear(name, parts[name], choice, options, context.device)
            )
    if chosen.saved is not None:
        wrap_forward(module, SavedActivations(chosen.saved))
    mine = {s.name for s in sites}
    whys = {c.module: (c.precision, c.why) for c in plan.values()}
    saved = "" if chosen.saved is None else f"; saved activations in MX {chosen.saved}"
    others = []
    for name, precision, why in base.describe():
        if name not in mine:
            precision, why = whys.get(name, (precision, why))
            others.append((name, precision, why + (saved if precision == "bf16" else "")))
    guard = NumericsGuard(sites, options.guard, others=others)
    module.precision_guard = guard  # type: ignore[assignment]
    return guard


def specs() -> list[RecipeSpec]:
    """All recipes but bf16, whose options are its own."""
    return [RecipeSpec(name, RecipeConfig, _Apply(name)) for name in RECIPES if name != "bf16"]


@dataclass(frozen=True)
class _Apply:
    name: str

    def __call__(self, module: nn.Module, config: RecipeConfig, context: RecipeContext) -> Guard:
        return apply(module, self.name, config=config, context=context)


def _find(name: str) -> Recipe:
    if name not in RECIPES:
        raise ConfigError(f"there is no recipe called {name!r}", where="precision.recipe", fix=f"choose one of {', '.join(RECIPES)}")
    return RECIPES[name]


def _check_overrides(module: nn.Module, config: RecipeConfig) -> None:
    names = [name for name, part in module.named_modules() if isinstance(part, nn.Linear | GroupedLinear)]
    for pattern, recipe in config.overrides.items():
        _find(recipe)
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"the pattern {pattern!r} matches no linear of the model",
                where="precision.<recipe>.overrides",
                fix="`gemrec precision explain` lists the modules",
            )


def _policy(recipe: Recipe, config: RecipeConfig) -> LinearPolicy | None:
    policy = recipe.linear
    if policy is None:
        return None
    policy = replace(policy, backend=config.backend, hadamard_seed=config.seed)

    def edited(how: Gemm, *, a: bool, rht: bool) -> Gemm:
        if how.a is None or how.b is None or how.a.format != "mx":
            return how
        rule = {} if config.scale_rule is None else {"scale_rule": config.scale_rule}
        rounding = {"rounding": "stochastic"} if a and config.stochastic_gradients else {}
        return Gemm(replace(how.a, **rule, **rounding), replace(how.b, **rule), config.hadamard if rht else how.hadamard)  # type: ignore[arg-type]

    return replace(
        policy,
        fprop=edited(policy.fprop, a=False, rht=False),
        dgrad=edited(policy.dgrad, a=True, rht=False),
        wgrad=edited(policy.wgrad, a=True, rht=config.hadamard is not None),
    )


def _has_few_rows(name: str, config: RecipeConfig) -> bool:
    return config.min_rows > 0 and any(fnmatchcase(name, pattern) for pattern in config.per_sample)


def _linear_name(recipe: Recipe) -> str:
    return {"mxfp8-attention": "mxfp8", "fp8-attention": "fp8-block"}.get(recipe.name, recipe.name)


def _note(policy: LinearPolicy, config: RecipeConfig, device: torch.device) -> str:
    if _is_emulated(policy, device):
        return " (emulated here)"
    return "" if config.allow_slow else f" (calls of fewer than {config.min_rows} rows: bf16)"


def _is_emulated(policy: LinearPolicy, device: torch.device) -> bool:
    assert policy.fprop.a is not None
    if device.type != "cuda" or policy.backend == "emulated":
        return True
    return policy.fprop.a.format == "mx" and torch.cuda.get_device_capability(device)[0] < 10


def kept(name: str, config: RecipeConfig) -> bool:
    """Whether ``keep`` names the module or one that it is inside of."""
    return any(fnmatchcase(name, p) or any(fnmatchcase(parent, p) for parent in _parents(name)) for p in config.keep)


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def _exception(name: str, k: int, n: int, config: RecipeConfig, last: set[str], last_linear: str | None) -> str | None:
    if any(name == top or name.startswith(f"{top}.") for top in last):
        return f"one of the last {config.last_layers} layers"
    if name == last_linear:
        return "the last linear is taken for the prediction head: no module matches keep"
    if min(k, n) < config.min_features:
        return f"{k} -> {n} is narrower than {config.min_features}"
    return None


def _last_layers(module: nn.Module, config: RecipeConfig) -> set[str]:
    outermost: list[str] = []
    last: set[str] = set()
    for name, part in module.named_modules():
        if not isinstance(part, nn.ModuleList) or name.rpartition(".")[2] not in ("layers", "blocks"):
            continue
        # the linears of an MLP are not layers of the model
        if any(name.startswith(f"{top}.") for top in outermost) or all(isinstance(entry, nn.Linear) for entry in part):
            continue
        outermost.append(name)
        count = len(part)
        if count > config.last_layers:
            last |= {f"{name}.{i}" for i in range(count - config.last_layers, count)}
    return last


def _prediction_head(module: nn.Module, config: RecipeConfig) -> str | None:
    names = [name for name, part in module.named_modules() if type(part) is nn.Linear]
    if not names or not config.keep or any(kept(name, config) for name, _ in module.named_modules()):
        return None
    return names[-1]


def _attention_choice(name: str, recipe: Recipe, config: RecipeConfig, last: set[str]) -> Choice:
    if recipe.attention is None:
        return Choice(name, "bf16", f"recipe {recipe.name} leaves attention in bf16")
    if any(name == top or name.startswith(f"{top}.") for top in last):
        return Choice(name, "bf16", f"one of the last {config.last_layers} layers")
    precision = recipe.attention if config.scale_rule is None else replace(recipe.attention, scale_rule=config.scale_rule)
    return Choice(name, recipe.name, f"recipe {recipe.name}", precision)


def _linear(name: str, part: nn.Module, choice: Choice, config: RecipeConfig, device: torch.device) -> Site:
    kind = "linear" if type(part) is nn.Linear else "grouped"
    rank = torch.distributed.get_rank() if torch.distributed.is_available() and torch.distributed.is_initialized() else 0
    generator = rank_generator(config.seed, rank) if config.stochastic_gradients else None
    site = Site(name, kind, linear_levels(choice.precision, choice.policy), choice.why, generator=generator)
    if not config.allow_slow and not _is_emulated(choice.policy, device):
        site.min_rows = config.min_rows
    if isinstance(part, GroupedLinear):
        part.site = site
    else:
        convert_linear(part, site)  # type: ignore[arg-type]
    return site


def _attention(name: str, part: nn.Module, choice: Choice) -> Site:
    site = Site(name, "attention", [(choice.precision, choice.policy), ("bf16", None)], choice.why)
    watch_attention(part, site)
    return site
