"""``gemrec doctor``: is this installation sound, and if not, which commands mend it."""

from __future__ import annotations

from typing import Annotated

import typer

from gem_core.cli.groups import CommandGroups


def register(app: CommandGroups) -> None:
    app.command()(doctor)


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Check versions, devices and plug-ins, and print the commands that mend each fault. Exit code 2 when there is an error.

    Example: gemrec doctor --json
    """
    from gem_core.doctor import examine

    report = examine()
    if as_json:
        print(report.as_json())
    else:
        env = report.environment
        print(f"Python {'.'.join(map(str, env.python))} on {env.system}")
        print("\n".join(f"{name} {version}" for name, version in env.packages.items()))
        if env.torch is not None:
            print(f"CUDA of torch: {env.torch.cuda or 'none (CPU build)'}; NCCL: {env.torch.nccl or 'none'}")
        print("\n".join(f"{g.name} ({g.arch}), driver {g.driver}" for g in env.gpus) or "no GPU")
        print("\n".join(f"plug-in {p['name']} {p['version']}: {p['state']}" for p in env.plugins))
        for finding in report.findings:
            print(f"\n{finding.level}: {finding.subject}: {finding.message}")
            print("\n".join(f"    {command}" for command in finding.cure))
        print("\nno fault found" if not report.findings else f"\n{len(report.findings)} found")
    if not report.ok:
        raise typer.Exit(2)
