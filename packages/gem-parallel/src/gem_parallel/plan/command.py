"""``gemrec plan``: mesh, placement, memory and time of a step on a cluster, before anything is launched."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from gem_core.cli.groups import CommandGroups
    from gem_core.config import Config
    from gem_parallel.plan.workload import Lengths, Workload

File = Annotated[str, typer.Argument(metavar="CONFIG", help="TOML or JSON file, or the name of a preset, planned on its reference log.")]
ClusterFile = Annotated[Path, typer.Option("--cluster", metavar="FILE", help="Cluster file; see docs/examples/clusters.")]
World = Annotated[int, typer.Option("--world", metavar="N", min=1, help="GPUs, one process each.")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, as in data.batch_size=256.")]
Law = Annotated[
    str | None,
    typer.Option(
        "--lengths", metavar="LAW", help="Law of history lengths, as in 'law=\"lognormal\", mean=500, max=4096'; else read from data."
    ),
]
Only = Annotated[list[str] | None, typer.Option("--sparse", metavar="NAME", help="Consider this table strategy only; may be repeated.")]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the planned configuration, which gemrec train takes.")]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a picture of axes, timeline and memory.")]
Ranks = Annotated[Path | None, typer.Option("--ranks", metavar="FILE", help="Write a CSV line for every rank.")]
Explain = Annotated[bool, typer.Option("--explain", help="Say why each neighbour of the plan lost.")]
Free = Annotated[
    list[str] | None,
    typer.Option("--free", metavar="KEY", help="Plan this key (or section, as in parallel) although the file sets it; may be repeated."),
]
Given = Annotated[bool, typer.Option("--given", help="Predict the file's own [parallel] section, search nothing.")]
Measured = Annotated[Path | None, typer.Option("--measured", metavar="FILE", help="Compare with measured steps (JSON list).")]
Local = Annotated[
    Path | None, typer.Option("--local", metavar="FILE", help="Local MFU by part from `gemrec bench local`, instead of the cluster file's.")
]
Check = Annotated[bool, typer.Option("--torchrec", help="Also ask TorchRec's planner where it would put the tables.")]
Samples = Annotated[int, typer.Option("--samples", min=1, help="Samples read from the data for lengths and numbers of ids.")]


def register(app: CommandGroups) -> None:
    app.command()(plan)


def plan(
    config: File,
    cluster: ClusterFile,
    world: World,
    overrides: Set = None,
    lengths: Law = None,
    sparse: Only = None,
    json_file: Json = None,
    html: Html = None,
    ranks: Ranks = None,
    explain: Explain = False,
    free: Free = None,
    given: Given = False,
    measured: Measured = None,
    local: Local = None,
    torchrec: Check = False,
    samples: Samples = 4096,
) -> None:
    """Find the fastest mesh and sharding that fits, with memory and time of a step; needs no GPU.

    Example: gemrec plan my.toml --cluster cluster.toml --world 4096 --json plan.json --html plan.html --explain
    """
    from gem_core.config.load import plain
    from gem_core.errors import ConfigError
    from gem_parallel.plan import report
    from gem_parallel.plan.answer import as_it_is, found
    from gem_parallel.plan.cluster import load_cluster
    from gem_parallel.plan.explain import baselines, neighbours
    from gem_parallel.plan.fixed import Fixed
    from gem_parallel.plan.measured import compare, comparison_table, load_measurements, local_rates, rates_note
    from gem_parallel.plan.picture import page
    from gem_parallel.plan.simulate import simulate

    if given and (free or sparse):
        raise ConfigError("--given plans nothing anew", where="--free" if free else "--sparse", fix="leave one of them out")
    place = load_cluster(cluster)
    place.check_world(world)
    loaded = configuration(config, overrides or [])
    workload = workload_of(loaded, config, lengths, samples)
    if local is not None:
        place, note = local_rates(local, workload, place)
    else:
        note = rates_note(workload, place)
    if note:
        report.show(note)
    if measured is not None:
        report.show(comparison_table(compare(loaded, workload, place, load_measurements(measured))))
        return
    if given:
        answer = as_it_is(workload, place, world, loaded)
    else:
        anew = [*(free or ()), *(["parallel.sparse"] if sparse else [])]
        kept = Fixed.of(loaded, free=anew, now={text.partition("=")[0].strip() for text in overrides or ()})
        answer = found(workload, place, world, loaded, kept, _strategies(sparse))
    space, chosen = answer.space, answer.chosen
    simulation = simulate(space.levels[chosen.level].workload, place, chosen.dense, chosen.sparse)
    compared = baselines(space, chosen)
    report.show(report.render(answer, simulation, compared))
    if uncounted := report.left_out(plain(loaded), space, chosen, searched=answer.searched):
        report.show(uncounted)
    if (unset := answer.anew()) is not None:
        report.show(report.kept(space, chosen, unset, config))
    if explain:
        report.show(report.explain_table(neighbours(space, chosen)))
        if without := answer.without_each():
            report.show(report.freed_table(space, chosen, without))
    if torchrec:
        from gem_parallel.plan.torchrec_check import cross_check

        report.show(cross_check(space, chosen))
    if json_file is not None:
        predicted = report.prediction(space, chosen, simulation, compared)
        text = json.dumps(report.configuration(plain(loaded), space, chosen, predicted, searched=answer.searched), indent=2)
        _write(json_file, text + "\n")
        print(f"wrote {json_file}; start it with: torchrun ... gemrec train {json_file}")
    if html is not None:
        _write(html, page(space, chosen))
        print(f"wrote {html}")
    if ranks is not None:
        report.write_ranks(ranks, space, chosen, simulation)
        print(f"wrote {ranks}")


def _strategies(asked: list[str] | None) -> list[str]:
    """The table strategies to consider: those that are asked for, else all that are installed."""
    from gem_core.errors import ConfigError
    from gem_core.plugins import manager

    offered = [spec.name for spec in manager().offers("sparse_strategy")]
    unknown = [name for name in asked or () if name not in offered]
    if unknown:
        raise ConfigError(
            f"there is no table strategy {unknown[0]!r}", where="--sparse", fix=f"the installed ones are: {', '.join(offered)}"
        )
    return asked or offered


def configuration(name: str, overrides: list[str]) -> Config:
    """The file, or for the name of a preset its reference log in bf16 (where that recipe is installed), with the overrides."""
    from gem_core.config import load_config
    from gem_core.errors import ConfigError
    from gem_core.model.presets import PRESETS

    if name not in PRESETS or Path(name).exists():
        if not Path(name).exists() and not Path(name).suffix:
            fix = f"name a TOML file, or one of the presets: {', '.join(PRESETS)}"
            raise ConfigError("there is no such file, and no preset of that name", where=name, fix=fix)
        return load_config(name, overrides)
    from gem_core.plugins import manager

    base = [
        'data.source="random"',
        f'data.random.preset="{name}"',
        f'model.preset="{name}"',
        f"data.batch_size={PRESETS[name].batch_size}",
    ]
    if any(spec.name == "bf16" for spec in manager().offers("recipe")):
        base.append('precision.recipe="bf16"')
    return load_config(None, [*base, *overrides])


def workload_of(config: Config, name: str, law: str | None, samples: int) -> Workload:
    """Measure the configured model; lengths and ids come from the data, or the lengths from ``law`` and one id a feature."""
    from gem_core.config import resolve, source_features
    from gem_parallel.plan.workload import measure, sample

    resolved = resolve(config)
    features = source_features(config)
    if law is None:
        lengths, ids = sample(resolved.config, resolved, features, samples)
    else:
        lengths, ids = _drawn(law, features.sequences, samples), {}
    title = config.model.preset or Path(name).stem
    return measure(title, resolved, features, lengths, ids)


def _drawn(law: str, histories: Any, samples: int) -> Lengths:
    from pydantic import BaseModel

    from gem_core.config.explain import Origin, validate
    from gem_core.errors import ConfigError
    from gem_core.sources.laws import LengthLaw

    class Option(BaseModel):
        lengths: LengthLaw

    try:
        data = tomllib.loads(f"lengths = {{ {law} }}")
    except tomllib.TOMLDecodeError as fault:
        raise ConfigError(
            f"the law is not valid TOML: {fault}", where=f"--lengths {law}", fix='law="lognormal", mean=500, max=4096'
        ) from None
    chosen = validate(Option, data, (), Origin("--lengths")).lengths
    return {name: chosen.draw(samples, seed) for seed, name in enumerate(histories)}


def _write(path: Path, text: str) -> None:
    from gem_core.errors import ConfigError

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as fault:
        raise ConfigError(f"the file cannot be written: {fault.strerror}", where=str(path), fix="name another file") from None
