"""The ``gemrec data`` commands."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from gem_core.cli.groups import CommandGroups

Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write; made if it is not there.", show_default=False)]


def register(app: CommandGroups) -> None:
    group = app.group("data")
    group.command()(synth)


def synth(
    out: Out,
    rows: Annotated[int, typer.Option(min=1, help="Training samples.")] = 400_000,
    eval_rows: Annotated[int | None, typer.Option(min=1, help="Evaluation samples; a tenth of --rows if not given.")] = None,
    test_rows: Annotated[int | None, typer.Option(min=1, help="Test samples; as --eval-rows if not given.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Another seed is another log.")] = 7,
    users: Annotated[int, typer.Option(min=1, help="Users of the log.")] = 50_000,
    law: Annotated[str, typer.Option(help="Law of history lengths: lognormal, uniform, zipf or pareto.")] = "lognormal",
    mean: Annotated[float, typer.Option(min=0.5, help="Mean history length of the log-normal law.")] = 32.0,
    max_history: Annotated[int, typer.Option(min=1, help="Longest history.")] = 4096,
) -> None:
    """Write the synthetic ads log as Parquet, with a configuration that trains on it.

    Example: gemrec data synth --rows 100000 --out logs && cd logs && gemrec train config.toml
    """
    from gem_core.errors import ConfigError
    from gem_core.sources.synthetic import SyntheticConfig
    from gem_data.synth import write_synthetic

    laws = ("lognormal", "uniform", "zipf", "pareto")
    if law not in laws:
        raise ConfigError(f"there is no law {law!r}", where="--law", fix=f"use {', '.join(laws)}")
    length: dict[str, object] = {"law": law, "max": max_history}
    if law == "lognormal":
        length["mean"] = mean
    held = eval_rows or max(1, rows // 10)
    config = SyntheticConfig(rows=rows, eval_rows=held, test_rows=test_rows or held, seed=seed, users=users, length=length)
    for split, count in write_synthetic(out, config).items():
        print(f"{out / split}.parquet: {count:,} rows")
    print(f"{out / 'config.toml'}: gemrec train config.toml, in this folder")
