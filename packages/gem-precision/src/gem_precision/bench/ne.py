"""NE parity of recipes: train the same run in several precisions and compare the held-out rows pairwise.

Every (recipe, seed) is trained by itself, ``jobs`` of them side by side in processes of their own, and predicts the held-out rows as soon
as it is trained. Logits stay in the run folders: a benchmark that was cut goes on from what is there.

With a_i and b_i the losses of row i by a recipe and by the reference, each the mean over the seeds, the NE ratio is ``r = sum a / sum b``:
the entropy of the labels, which NE is normalised with, cancels. By the delta method its standard error is
``sqrt(sum_g (sum_{i in g} a_i - r b_i)^2) / sum b`` over the groups g of rows that belong together (``eval.group``: the rows of a user;
every row by itself without one). The rows' own noise cancels because they are paired; what is left of the noise of training is told by
the spread between the seeds.

The AUC ratio is that of the mean AUCs over the seeds, with a standard error from the rows' placements (DeLong et al. 1988): a positive i
adds ``(share of negatives below i - AUC) / positives`` to an AUC's deviation, a negative likewise, summed over the groups.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from gem_core.config import config_from_dict, load_config, resolve
from gem_core.config.load import plain
from gem_core.config.schema import Config
from gem_core.errors import ConfigError, DataError, RunError
from gem_core.metrics.collect import group_key
from gem_core.ops import use_policy
from gem_core.plugins import manager
from gem_core.train import train
from gem_core.train.build import build_parts
from gem_core.train.feed import Feed
from gem_core.train.offline import run_config
from gem_core.train.runfolder import RunFolder
from gem_core.train.runtime import runtime
from gem_core.train.state import load_guard, load_parameters

T = TypeVar("T")

NAIVE: Mapping[str, Any] = {
    "keep": [], "last_layers": 0, "min_features": 1, "scale_rule": "floor", "allow_slow": True, "guard": {"enabled": False},
}  # fmt: skip
"""What a recipe without exceptions and guard looks like: OCP's floor rule everywhere."""

Variant = tuple[str, str, Mapping[str, Any]]
"""(label, recipe, its options)."""

VARIANTS: tuple[Variant, ...] = (
    ("mxfp8", "mxfp8", {"allow_slow": True}),
    ("fp8-block", "fp8-block", {"allow_slow": True}),
    ("naive mxfp8", "mxfp8", NAIVE),
)


@dataclass(frozen=True)
class Parity:
    """One variant against the reference; ``low`` and ``high`` bound the 95 % interval of the NE ratio, ``auc_low`` and ``auc_high`` that of
    the AUC ratio.

    ``ne``, ``reference_ne`` and ``seeds`` (ratios) have one entry a seed. ``groups``: independent groups of rows. ``decisions``: what the
    guards of the variant's runs decided. ``train_s``: wall time of each training.
    """

    variant: str
    rows: int
    groups: int
    ratio: float
    low: float
    high: float
    seeds: tuple[float, ...]
    ne: tuple[float, ...]
    reference_ne: tuple[float, ...]
    auc_ratio: float
    auc_low: float
    auc_high: float
    auc: tuple[float, ...]
    reference_auc: tuple[float, ...]
    decisions: int
    train_s: tuple[float, ...]


@dataclass(frozen=True)
class Held:
    """Held-out rows: ``logits [runs, n]`` float32, ``labels [n]`` float32, ``groups [n]`` int64 or None."""

    logits: Tensor
    labels: Tensor
    groups: Tensor | None

    @classmethod
    def of_runs(cls, runs: Sequence[Held]) -> Held:
        """The logits of several runs on the same rows.

        :raises DataError: the rows are not the same.
        """
        first = runs[0]
        for other in runs[1:]:
            if not torch.equal(first.labels, other.labels):
                raise DataError(
                    f"runs predicted different rows ({len(first.labels)} and {len(other.labels)})",
                    where="--runs",
                    fix="the data changed between the runs: give another folder",
                )
        return cls(torch.cat([run.logits for run in runs]), first.labels, first.groups)


@dataclass(frozen=True)
class Done:
    """A trained run: its predictions, wall time of the training in seconds, and what its guard decided. ``how``: what was done now."""

    held: Held
    train_s: float
    decisions: int
    how: str


def ratio_interval(losses: Tensor, reference: Tensor, groups: Tensor | None = None) -> tuple[float, float]:
    """(NE ratio, standard error) of paired per-row losses ``[n]``; ``groups [n]`` int64: rows of one group are not independent."""
    a, b = losses.double(), reference.double()
    ratio = float(a.sum() / b.sum())
    return ratio, _error((a - ratio * b) / b.sum(), groups)


def auc_ratio_interval(logits: Tensor, reference: Tensor, labels: Tensor, groups: Tensor | None = None) -> tuple[float, float]:
    """(ratio of the mean AUCs over the runs, standard error) of ``logits [runs, n]`` of the same rows, ``labels [n]`` 0 or 1."""
    (a, moved), (b, other) = _mean_auc(logits, labels), _mean_auc(reference, labels)
    return a / b, _error((moved - a / b * other) / b, groups)


def auc_placements(logits: Tensor, labels: Tensor) -> tuple[float, Tensor]:
    """AUC with ties counted half, and by how much each row ``[n]`` moves it away from its mean over samples of rows."""
    _, at = logits.unique(return_inverse=True)
    positive = labels.double()
    sums = [torch.zeros(int(at.max()) + 1, dtype=torch.float64).index_add_(0, at, w) for w in (positive, 1 - positive)]
    (n_positive, n_negative), (pos, neg) = (float(s.sum()) for s in sums), sums
    beaten = (neg.cumsum(0) - neg / 2) / n_negative
    beating = 1 - (pos.cumsum(0) - pos / 2) / n_positive
    auc = float(beaten[at] @ positive) / n_positive
    return auc, torch.where(labels > 0.5, (beaten[at] - auc) / n_positive, (beating[at] - auc) / n_negative)


def _mean_auc(logits: Tensor, labels: Tensor) -> tuple[float, Tensor]:
    each = [auc_placements(run, labels) for run in logits]
    return sum(auc for auc, _ in each) / len(each), torch.stack([moved for _, moved in each]).mean(0)


def _error(deviations: Tensor, groups: Tensor | None) -> float:
    """Root of the summed squares of the groups' deviations ``[n]``."""
    if groups is not None:
        _, at = groups.unique(return_inverse=True)
        deviations = deviations.new_zeros(int(at.max()) + 1).index_add_(0, at, deviations)
    return float(deviations.square().sum().sqrt())


def normalised_entropy(losses: Tensor, labels: Tensor) -> float:
    """Mean log loss over the entropy of the mean label; both ``[n]``."""
    rate = float(labels.double().mean())
    return float(losses.double().mean()) / -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))


def held_out(folder: Path, split: str) -> Held:
    """The logits of the first task for the labelled rows of ``split``, by the newest checkpoint of a run folder. Its guard is restored
    too: a demoted site stays demoted.

    :raises ConfigError: the split has no labelled rows.
    """
    resolved = resolve(run_config(folder))
    config = resolved.config
    found: list[tuple[Tensor, Tensor, Tensor | None]] = []
    with runtime(config) as rt, use_policy(config.kernels.default, config.kernels.ops), torch.no_grad():
        parts = build_parts(resolved, rt, trains=False)
        checkpoint = RunFolder(folder).checkpoints.latest()[0]
        load_parameters(parts, checkpoint)
        load_guard(parts, checkpoint)
        parts.model.eval()
        data, group = config.data, config.eval.group
        source = manager().find("source", data.source).build(
            resolved.source, config.features, split=split, batch_size=data.eval_batch_size or data.batch_size, shard=(0, 1), seed=0
        )  # fmt: skip
        for fed in Feed(source, rt.device):
            host = fed.host
            assert host.labels is not None
            kept = slice(None) if host.label_mask is None else host.label_mask[:, 0]
            logits = parts.module(fed.batch).logits[:, 0].float().cpu()
            found.append((logits[kept], host.labels[:, 0].float()[kept], None if group is None else group_key(host, group)[kept]))
    if not sum(len(logits) for logits, _, _ in found):
        raise ConfigError(f"the split {split!r} has no labelled rows", where="data", fix="choose a source with a held-out part")
    groups = [g for _, _, g in found if g is not None]
    return Held(torch.cat([x for x, _, _ in found])[None], torch.cat([y for _, y, _ in found]), torch.cat(groups) if groups else None)


def parity(
    config: Config,
    folder: Path,
    *,
    variants: Sequence[Variant] = VARIANTS,
    reference: str = "bf16",
    seeds: Iterable[int] = (0,),
    jobs: int = 1,
    split: str = "eval",
    tell: Callable[[str], None] | None = None,
) -> list[Parity]:
    """Train ``config`` with the recipe ``reference`` and every variant, each seed below ``folder``, and compare on ``split``.

    With ``jobs`` > 1 that many processes work side by side, spread over the visible GPUs. Unless ``eval.restore_best`` asks for them, the
    trainings evaluate nothing on the way: the held-out rows are read at the end of each. Runs that ``folder`` holds, of the same
    configuration, are continued or taken as they are. ``tell`` gets a line as each run is done.

    :raises GemError: what training raises, after the other runs are done; the split has no rows; runs that predicted other rows.
    """
    seeds = tuple(seeds)
    runs = [(label, seed) for seed in seeds for label in (reference, *(v[0] for v in variants))]
    chosen = {label: (recipe, options) for label, recipe, options in ((reference, reference, {}), *variants)}
    folders = [folder / f"{label.replace(' ', '-')}-{seed}" for label, seed in runs]
    tasks = [partial(_run, _with(config, *chosen[label], seed, jobs), path, split) for (label, seed), path in zip(runs, folders)]

    def done(i: int, run: Done) -> None:
        if tell is not None:
            tell(f"{runs[i][0]}, seed {runs[i][1]}: {run.how}; training took {run.train_s:.0f} s")

    finished = _side_by_side(tasks, jobs, done)
    held = Held.of_runs([run.held for run in finished])
    at = {run: i for i, run in enumerate(runs)}

    def of(label: str) -> tuple[Tensor, Tensor]:
        """Logits and losses, a row a seed."""
        logits = held.logits[[at[label, seed] for seed in seeds]]
        return logits, F.binary_cross_entropy_with_logits(logits, held.labels.expand_as(logits), reduction="none").double()

    scores, base = of(reference)
    found = []
    for label, _, _ in variants:
        logits, losses = of(label)
        ratio, error = ratio_interval(losses.mean(0), base.mean(0), held.groups)
        auc, auc_error = auc_ratio_interval(logits, scores, held.labels, held.groups)
        found.append(
            Parity(
                label,
                held.labels.numel(),
                held.labels.numel() if held.groups is None else held.groups.unique().numel(),
                ratio,
                ratio - 1.96 * error,
                ratio + 1.96 * error,
                tuple(ratio_interval(a, b)[0] for a, b in zip(losses, base)),
                tuple(normalised_entropy(a, held.labels) for a in losses),
                tuple(normalised_entropy(b, held.labels) for b in base),
                auc,
                auc - 1.96 * auc_error,
                auc + 1.96 * auc_error,
                tuple(auc_placements(run, held.labels)[0] for run in logits),
                tuple(auc_placements(run, held.labels)[0] for run in scores),
                sum(finished[at[label, seed]].decisions for seed in seeds),
                tuple(finished[at[label, seed]].train_s for seed in seeds),
            )
        )
    return found


def _run(config: Config, folder: Path, split: str) -> Done:
    """What is still to be done of one run: training, from its newest checkpoint if there is one, and predicting. Predictions, or a whole
    training, of the same configuration are taken as they are; anything else in the folder is overwritten."""
    run, file = RunFolder(folder), folder / f"held-out-{split}.pt"
    mine = run.config.is_file() and _said(load_config(run.config)) == _said(resolve(config).config)
    trained = mine and run.summary.is_file() and json.loads(run.summary.read_text())["status"] != "interrupted"
    if trained and file.is_file():
        stored = torch.load(file, weights_only=True)
        return Done(Held(stored["logits"], stored["labels"], stored["groups"]), stored["train_s"], stored["decisions"], "was there")
    if not trained and train(config, run_dir=folder, resume=mine, overwrite=not mine, quiet=True).status == "interrupted":
        raise RunError("the training was interrupted", where=str(folder), fix="the same command goes on from its checkpoint")
    began = time.perf_counter()
    held = held_out(folder, split)
    guard = run.checkpoints.latest()[0].state("shared")["guard"]
    summary = json.loads(run.summary.read_text())
    done = {"train_s": summary["wall_s"], "decisions": len(guard.get("decisions", ()))}
    # whole or not there: the benchmark may be killed while it writes
    new = file.with_suffix(".new")
    torch.save({**vars(held), **done}, new)
    new.replace(file)
    steps = "was trained" if trained else f"{summary['steps']} steps"
    return Done(held, how=f"{steps}, {len(held.labels)} rows in {time.perf_counter() - began:.0f} s", **done)


def _said(config: Config) -> Any:
    """What two configurations must agree in to be of the same run."""
    said = config.model_dump(mode="json")
    said["run"] = said["run"]["seed"]
    return said


def _side_by_side(tasks: Sequence[Callable[[], T]], jobs: int, done: Callable[[int, T], None]) -> list[T]:
    """The results of ``tasks`` in order, ``done(i, result)`` as each comes; in this process for one job, else in fresh processes that take
    turns over the GPUs. A task that fails does not keep the others from being done; its error is raised after them."""
    if jobs == 1:
        found = {}
        for i, task in enumerate(tasks):
            found[i] = task()
            done(i, found[i])
        return [found[i] for i in range(len(tasks))]
    context = multiprocessing.get_context("spawn")
    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")[:count]
    with ProcessPoolExecutor(min(jobs, len(tasks)), context, initializer=_place, initargs=(context.Value("i", 0), visible)) as pool:
        futures = {pool.submit(task): i for i, task in enumerate(tasks)}
        for future in as_completed(futures):
            if future.exception() is None:
                done(futures[future], future.result())
    return [future.result() for future in futures]


def _place(counter: Any, visible: Sequence[str]) -> None:
    with counter.get_lock():
        index, counter.value = counter.value, counter.value + 1
    if visible:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[index % len(visible)]


def write(results: Sequence[Parity], folder: Path, command: str) -> None:
    """``ne.json`` and ``ne.md`` in ``folder``, with hardware, versions and the command."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    header = {"device": device, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "command": command}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ne.json").write_text(json.dumps(header | {"results": [asdict(r) for r in results]}, indent=1) + "\n")
    (folder / "ne.md").write_text(markdown(results, header))


def markdown(results: Sequence[Parity], header: Mapping[str, str]) -> str:
    """A table of ``results``; differences in percent."""
    lines = ["# NE parity", "", f"`{header['command']}`", "", f"{header['device']}, torch {header['torch']}, {header['date']}", ""]
    columns = (
        "recipe", "NE ratio - 1", "95 % interval", "by seed", "NE of bf16 by seed", "AUC ratio - 1", "95 % interval",
        "AUC of bf16 by seed", "rows (groups)", "guard decisions",
    )  # fmt: skip
    lines += [f"| {' | '.join(columns)} |"]
    lines += ["|" + "---|" * len(columns)]
    for r in results:
        ratio, low, high, *single = (f"{100 * (v - 1):+.4f} %" for v in (r.ratio, r.low, r.high, *r.seeds))
        bases = ", ".join(f"{v:.4f}" for v in r.reference_ne)
        auc, auc_low, auc_high = (f"{100 * (v - 1):+.4f} %" for v in (r.auc_ratio, r.auc_low, r.auc_high))
        aucs = ", ".join(f"{v:.4f}" for v in r.reference_auc)
        lines.append(
            f"| {r.variant} | {ratio} | {low} to {high} | {', '.join(single)} | {bases} | {auc} | {auc_low} to {auc_high} | {aucs} | "
            f"{r.rows} ({r.groups}) | {r.decisions} |"
        )
    return "\n".join(lines) + "\n"


def _with(config: Config, recipe: str, options: Mapping[str, Any], seed: int, jobs: int) -> Config:
    data = plain(config)
    data["precision"] = {"recipe": recipe, recipe: dict(options)} if options else {"recipe": recipe}
    run = {**data.get("run", {}), "seed": seed}
    if jobs > 1:
        run.setdefault("threads", max(1, len(os.sched_getaffinity(0)) // jobs))
    data["run"] = run
    data["train"] = {**data.get("train", {}), "tensorboard": False}
    if not config.eval.restore_best:
        rest = {k: v for k, v in data.get("eval", {}).items() if k not in ("every", "patience")}
        data["eval"] = {**rest, "max_batches": 1}
    return config_from_dict(data)
