"""NE parity of recipes: train the same run in several precisions and compare the held-out rows pairwise.

With per-row losses a_i (recipe) and b_i (reference) of the same rows, the NE ratio is ``r = sum a / sum b``, and by the delta method its
standard error is ``sqrt(mean((a - r b)^2) / n) / mean(b)``: the rows' own noise cancels because they are paired. Over several seeds the
rows of all are pooled, and the spread of the ratios between seeds is reported beside it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gem_core.config import config_from_dict, resolve
from gem_core.config.load import plain
from gem_core.config.schema import Config
from gem_core.errors import ConfigError
from gem_core.ops import use_policy
from gem_core.train import train
from gem_core.train.build import build_parts, build_source
from gem_core.train.feed import Feed
from gem_core.train.runfolder import RunFolder
from gem_core.train.runtime import runtime
from gem_core.train.state import load_parameters

NAIVE: Mapping[str, Any] = {
    "keep": [], "last_layers": 0, "min_features": 1, "scale_rule": "floor", "allow_slow": True, "guard": {"enabled": False},
}  # fmt: skip
"""What a recipe without exceptions and guard looks like: OCP's floor rule everywhere."""

Variant = tuple[str, str, Mapping[str, Any]]
"""(label, recipe, its options)."""

VARIANTS: tuple[Variant, ...] = (("mxfp8", "mxfp8", {"allow_slow": True}), ("naive mxfp8", "mxfp8", NAIVE))


@dataclass(frozen=True)
class Parity:
    """One variant against the reference, rows of all seeds pooled; ``low`` and ``high`` bound the 95 % interval of the NE ratio."""

    variant: str
    rows: int
    reference_loss: float
    ratio: float
    low: float
    high: float
    seeds: tuple[float, ...]


def ratio_interval(losses: Tensor, reference: Tensor) -> tuple[float, float]:
    """(NE ratio, standard error) of paired per-row losses ``[n]``."""
    a, b = losses.double(), reference.double()
    ratio = float(a.sum() / b.sum())
    error = float((a - ratio * b).square().mean().sqrt() / math.sqrt(len(a)) / b.mean())
    return ratio, error


def row_losses(config: Config, run: Path) -> Tensor:
    """Weighted log loss of the first task for every labelled row of the evaluation split, by the newest checkpoint of ``run``, on CPU."""
    resolved = resolve(config)
    found: list[Tensor] = []
    with runtime(resolved.config) as rt, use_policy(config.kernels.default, config.kernels.ops), torch.no_grad():
        parts = build_parts(resolved, rt, trains=False)
        load_parameters(parts, RunFolder(run).checkpoints.latest()[0])
        parts.model.eval()
        for index, fed in enumerate(Feed(build_source(resolved, "eval", rt), rt.device)):
            if config.eval.max_batches is not None and index >= config.eval.max_batches:
                break
            logits = parts.module(fed.batch).logits[:, 0].float()
            labels = fed.batch.labels[:, 0].float()
            loss = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
            if fed.batch.label_mask is not None:
                loss = loss[fed.batch.label_mask[:, 0]]
            found.append(loss.cpu())
    return torch.cat(found)


def parity(
    config: Config, folder: Path, *, variants: Sequence[Variant] = VARIANTS, reference: str = "bf16", seeds: Iterable[int] = (0,)
) -> list[Parity]:
    """Train ``config`` with the recipe ``reference`` and every variant, each seed below ``folder``, and compare.

    :raises ConfigError: the evaluation split has no rows.
    """
    losses: dict[str, list[Tensor]] = {}
    for seed in seeds:
        for label, recipe, options in ((reference, reference, {}), *variants):
            run = folder / f"{label.replace(' ', '-')}-{seed}"
            chosen = _with(config, recipe, options, seed)
            train(chosen, run_dir=run, overwrite=True, quiet=True)
            losses.setdefault(label, []).append(row_losses(chosen, run))
    base = torch.cat(losses[reference])
    if base.numel() == 0:
        raise ConfigError("the evaluation split has no labelled rows", where="data", fix="choose a source with a held-out part")
    found = []
    for label, _, _ in variants:
        ratio, error = ratio_interval(torch.cat(losses[label]), base)
        single = tuple(ratio_interval(a, b)[0] for a, b in zip(losses[label], losses[reference]))
        found.append(Parity(label, base.numel(), float(base.mean()), ratio, ratio - 1.96 * error, ratio + 1.96 * error, single))
    return found


def write(results: Sequence[Parity], path: Path, command: str) -> None:
    """JSON with hardware, versions and the command."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    header = {"device": device, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "command": command}
    path.write_text(json.dumps(header | {"results": [asdict(r) for r in results]}, indent=1) + "\n")


def _with(config: Config, recipe: str, options: Mapping[str, Any], seed: int) -> Config:
    data = plain(config)
    data["precision"] = {"recipe": recipe, recipe: dict(options)} if options else {"recipe": recipe}
    data["run"] = {**data.get("run", {}), "seed": seed}
    return config_from_dict(data)
