"""``gemrec precision``: which module computes in which precision, and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from gem_core.cli.groups import CommandGroups

Config = Annotated[Path | None, typer.Argument(help="TOML file; none: the defaults.", show_default=False)]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, as in precision.recipe=mxfp8.")]
Device = Annotated[Literal["cpu", "cuda"], typer.Option("--device", help="Decide for this device: cpu, or cuda for the one that is here.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: CommandGroups) -> None:
    app.group("precision").command()(explain)
    app.group("bench").command("precision")(bench)
    app.group("bench").command("precision-ne")(bench_ne)
    app.group("bench").command("precision-step")(bench_step)


def explain(config: Config = None, overrides: Set = None, device: Device = "cpu", as_json: Json = False) -> None:
    """Print every module that holds parameters or attention: its precision under the configuration's recipe, and why.

    The model is not built on the device and nothing is trained.

    Example: gemrec precision explain my.toml --set precision.recipe=mxfp8-attention
    """
    import torch

    from gem_core.config import load_config, resolve
    from gem_core.errors import DeviceError
    from gem_precision.explain import decisions

    if device == "cuda" and not torch.cuda.is_available():
        raise DeviceError(
            "there is no GPU here to decide for", where="--device cuda", fix="run it where one is visible, or use --device cpu"
        )
    rows = decisions(resolve(load_config(config, overrides or ())), torch.device(device))
    if as_json:
        print(json.dumps([{"module": m, "precision": p, "why": w} for m, p, w in rows], indent=2))
        return
    widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
    for module, precision, why in rows:
        print(f"{module:<{widths[0]}}  {precision:<{widths[1]}}  {why}")


def bench(out: Annotated[Path, typer.Option("--out", help="Folder for the results.")] = Path("bench-precision")) -> None:
    """Time quantise kernels and FP8 linears on this GPU; write the results and the speed table that recipes refuse slow shapes by.

    Example: gemrec bench precision --out results
    """
    from gem_precision.bench import gpu

    result = gpu.run(out)
    for row in (*result["quantise"], *result["linear"], *result["attention"]):
        print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
    print(f"written to {out}")


def bench_ne(
    config: Config = None,
    overrides: Set = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for ne.json and ne.md.")] = Path("bench-precision-ne"),
    runs: Annotated[Path | None, typer.Option("--runs", help="Folder for the run folders; none: OUT/runs.", show_default=False)] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Runs with this many seeds.")] = 1,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Processes side by side, spread over the GPUs.")] = 1,
    split: Annotated[Literal["eval", "test"], typer.Option("--split", help="Held-out split to compare on.")] = "eval",
    variants: Annotated[str, typer.Option("--variants", help="What to hold against bf16.")] = "mxfp8,fp8-block,naive mxfp8",
) -> None:
    """Train a configuration in bf16, mxfp8, fp8-block and a naive mxfp8; print paired 95 % intervals of the NE and AUC ratios on the
    held-out rows.

    Runs that --runs holds are not made again: a benchmark that was cut goes on, and one more seed is only that.

    Example: gemrec bench precision-ne my.toml --seeds 3 --jobs 12 --out results
    """
    from gem_core.config import load_config
    from gem_core.errors import ConfigError
    from gem_core.train import quickstart_path
    from gem_precision.bench import ne

    loaded = load_config(quickstart_path() if config is None else config, overrides or ())
    known = {label: (label, recipe, options) for label, recipe, options in ne.VARIANTS}
    if unknown := set(variants.split(",")) - set(known):
        raise ConfigError(
            f"there is no variant called {min(unknown)!r}", where="--variants", fix=f"choose of {', '.join(known)}, with commas between"
        )
    chosen = [known[label] for label in variants.split(",")]
    results = ne.parity(loaded, runs or out / "runs", variants=chosen, seeds=range(seeds), jobs=jobs, split=split, tell=print)
    words = ["gemrec bench precision-ne", *([] if config is None else [config.name]), *(f"--set {o}" for o in overrides or ())]
    words += [] if len(chosen) == len(known) else [f'--variants "{variants}"']
    ne.write(results, out, " ".join([*words, f"--seeds {seeds} --jobs {jobs} --split {split}"]))
    for r in results:
        ratio, low, high = (100 * (v - 1) for v in (r.ratio, r.low, r.high))
        auc, auc_low, auc_high = (100 * (v - 1) for v in (r.auc_ratio, r.auc_low, r.auc_high))
        print(
            f"{r.variant:<16} NE ratio - 1 = {ratio:+.4f} %  [{low:+.4f}, {high:+.4f}]  AUC ratio - 1 = {auc:+.4f} %  "
            f"[{auc_low:+.4f}, {auc_high:+.4f}]  rows {r.rows}"
        )


def bench_step(
    config: Config = None,
    overrides: Set = None,
    name: Annotated[str, typer.Option("--name", help="In the names of the files.")] = "run",
    recipe: Annotated[str, typer.Option("--recipe", help="The recipe to hold against bf16.")] = "fp8-block",
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps a window.")] = 10,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Windows of each variant.")] = 7,
    guard: Annotated[bool, typer.Option("--guard/--no-guard", help="Also time the guard.")] = True,
    batches: Annotated[int, typer.Option("--batches", min=1, help="Batches in turn; captured steps of each need memory.")] = 2,
    apart: Annotated[bool, typer.Option("--apart", help="One model in memory at a time, where two do not fit.")] = False,
    out: Annotated[Path, typer.Option("--out", help="Folder for the results.")] = Path("bench-precision-step"),
) -> None:
    """Time training steps of a configuration in bf16 and in a quantised recipe, with and without its guard, in one process.

    Example: gemrec bench precision-step base.toml --set train.capture=true --name base
    """
    from gem_core.config import load_config
    from gem_core.plugins import manager
    from gem_core.train import quickstart_path
    from gem_precision.bench import steps as bench

    manager().find("recipe", recipe)  # told before models are built
    loaded = load_config(quickstart_path() if config is None else config, overrides or ())
    result = bench.measure(loaded, recipe, steps=steps, rounds=rounds, batches=batches, guard=guard, apart=apart, tell=print)
    words = ["gemrec bench precision-step", *([] if config is None else [config.name]), *(f"--set {o}" for o in overrides or ())]
    command = " ".join([*words, f"--recipe {recipe} --steps {steps} --rounds {rounds} --batches {batches}"])
    command += (" --no-guard" if not guard else "") + (" --apart" if apart else "")
    bench.write(result, out, name, command)
    print(bench.markdown(result, command))
