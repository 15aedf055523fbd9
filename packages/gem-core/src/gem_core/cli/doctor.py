"""``gemrec doctor``: is this installation sound, and if not, which commands mend it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gem_core.cli.groups import CommandGroups


def register(app: CommandGroups) -> None:
    app.command()(doctor)


def doctor(
    config: Annotated[Path | None, typer.Argument(help="TOML file of a run: also check that it fits here.", show_default=False)] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the configuration.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check versions, devices and plug-ins, and print the commands that mend each fault. Exit code 2 when there is an error.

    With a configuration: also whether its parameters, tables and checkpoints fit into memory and on the disk of its run folder.

    Example: gemrec doctor my.toml --json
    """
    from dataclasses import replace

    from gem_core.config import load_config, resolve
    from gem_core.doctor import examine
    from gem_core.doctor_run import judge, weigh

    loaded = load_config(config, overrides or ()) if config is not None else None
    if loaded is not None:
        resolve(loaded)  # what is wrong with it is told at once, not after looking at the machine
    report = examine()
    if loaded is not None:
        demand = weigh(loaded, report.environment.gpus)
        told = (replace(f, cure=tuple(c.replace("CONFIG", str(config)) for c in f.cure)) for f in judge(demand))
        report = replace(report, findings=(*report.findings, *told), demand=demand)
    if as_json:
        print(report.as_json())
    else:
        env = report.environment
        print(f"Python {'.'.join(map(str, env.python))} on {env.system}")
        print("\n".join(f"{name} {version}" for name, version in env.packages.items()))
        if env.torch is not None:
            print(f"CUDA of torch: {env.torch.cuda or 'none (CPU build)'}; NCCL: {env.torch.nccl or 'none'}")
        if env.fbgemm_archs:
            print(f"FBGEMM has code for: {', '.join(env.fbgemm_archs)}")
        print("\n".join(f"{g.name} ({g.arch}), driver {g.driver}" for g in env.gpus) or "no GPU")
        print("\n".join(f"plug-in {p['name']} {p['version']}: {p['state']}" for p in env.plugins))
        if report.demand is not None:
            d = report.demand
            print(f"run: {d.dense_parameters:,} dense parameters, {d.table_bytes / 2**20:,.1f} MiB of tables with their optimizer state")
            print(f"run folder: {d.folder} ({d.file_system or 'unknown file system'}, {d.free / 2**30:.1f} GiB free)")
        for finding in report.findings:
            print(f"\n{finding.level}: {finding.subject}: {finding.message}")
            print("\n".join(f"    {command}" for command in finding.cure))
        print("\nno fault found" if not report.findings else f"\n{len(report.findings)} found")
    if not report.ok:
        raise typer.Exit(2)
