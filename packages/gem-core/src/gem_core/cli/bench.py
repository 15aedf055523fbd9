"""``gemrec bench train`` and ``gemrec bench local``: training steps of a preset, one change a row, and the model's parts alone."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from gem_core.cli.groups import CommandGroups

Preset = Annotated[str, typer.Argument(help="A preset of the gem model.")]
Ladder = Annotated[str, typer.Option("--ladder", help="Which list of rows.")]
RowNames = Annotated[list[str] | None, typer.Option("--row", metavar="NAME", help="Only this row; may be given several times.")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key in every row.")]
Batch = Annotated[int | None, typer.Option("--batch-size", min=1, help="Samples a step and GPU; none: the preset's.", show_default=False)]
Steps = Annotated[int, typer.Option("--steps", min=1, help="Timed steps a row.")]
Warmup = Annotated[int, typer.Option("--warmup", min=0, help="Steps before.")]
Budget = Annotated[float, typer.Option("--budget-seconds", min=1, help="Start no row after this time.")]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of the JSON and the table.")]
Profile = Annotated[bool, typer.Option("--profile", help="Also a trace and the top kernels of every row.")]


def register(app: CommandGroups) -> None:
    app.group("bench").command("train")(bench_train)
    app.group("bench").command("local")(bench_local)


def bench_train(
    preset: Preset = "base",
    ladder: Ladder = "efficiency",
    rows: RowNames = None,
    overrides: Set = None,
    batch_size: Batch = None,
    steps: Steps = 30,
    warmup: Warmup = 10,
    budget: Budget = 540.0,
    out: Out = Path("bench-train"),
    profile: Profile = False,
    devices: Annotated[int | None, typer.Option("--devices", min=1, help="Most devices of a row; none: those of this machine.")] = None,
    cluster: Annotated[
        Path | None,
        typer.Option("--cluster", metavar="FILE", exists=True, dir_okay=False, help="Predict each row for this cluster, where known."),
    ] = None,
    row_limit: Annotated[float, typer.Option("--row-seconds", min=1, help="Stop a row after this time.")] = 240.0,
) -> None:
    """Measure training steps of a preset on its random log: step time, samples/s, MFU, padding, memory.

    Example: gemrec bench train base --set precision.recipe=bf16 --out results

    Example: gemrec bench train base --ladder scaling --cluster cluster.toml --set precision.recipe=bf16
    """
    from gem_core.bench.ladder import climb
    from gem_core.errors import RunError
    from gem_core.model.presets import find

    size = batch_size or find(preset).batch_size
    with TemporaryDirectory() as folder:
        done = climb(
            str(_configuration(folder, preset)),
            ladder,
            preset=preset,
            overrides=overrides or (),
            rows=rows or (),
            batch_size=size,
            steps=steps,
            warmup=warmup,
            budget_s=budget,
            out=out,
            profile=profile,
            devices=devices,
            cluster=cluster,
            row_limit_s=row_limit,
            say=lambda text: print(text, flush=True),
        )
    if all("error" in row for row in done):
        raise RunError("no row was measured", where=str(out / f"train-{preset}.json"), fix="read the reason of each row above")


def bench_local(
    preset: Preset = "base",
    overrides: Set = None,
    batch_size: Batch = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Runs of each part.")] = 10,
    out: Out = Path("bench-local"),
) -> None:
    """Measure the parts of a preset's model alone on one device: time, MFU and floor of each, and the local MFU of all.

    Where --out holds the result of `gemrec bench train` for the preset, the ratio of end-to-end to local MFU is told as well.

    Example: gemrec bench local base --set precision.recipe=bf16 --out results
    """
    import json

    from gem_core.bench import local, of_preset
    from gem_core.config import load_config
    from gem_core.model.presets import find

    size = batch_size or find(preset).batch_size
    config = load_config(None, [*of_preset(preset), *(overrides or ()), f"data.batch_size={size}"])
    result = local.measure(config, repeats=repeats)
    local.write(result, out, preset)
    print(local.table(result))
    products = f"products of {result['gemm_tflops']:.0f} TFLOP/s"
    at_best = f"{result['step_floor_share_at_best']:.2f} with the best one's {result['best_gemm_tflops']:.0f}, "
    at_best += f"{result['step_floor_share_by_definition']:.2f} with the FLOPs of the model's definition"
    print(f"floors {result['floors_s'] * 1e3:.1f} ms = {result['step_floor_share']:.2f} of a step of this batch: {products} ({at_best})")
    ladder = out / f"train-{preset}.json"
    if result["local_mfu"] is not None and ladder.is_file():
        best = max((row for row in json.loads(ladder.read_text())["rows"] if row.get("mfu")), key=lambda row: row["mfu"], default=None)
        if best is not None:
            ratio = best["mfu"] / result["local_mfu"]
            print(f"end to end {best['mfu']:.1%} ({best['row']}) = local {result['local_mfu']:.1%} x {ratio:.2f}")


def _configuration(folder: str, preset: str) -> Path:
    path = Path(folder) / "bench.toml"
    path.write_text(f'[data]\nsource = "random"\n[data.random]\npreset = "{preset}"\n[model]\npreset = "{preset}"\n')
    return path
