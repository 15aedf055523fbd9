"""``gemrec report`` and ``gemrec export-embeddings``: what leaves a run folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from gem_core.cli.eval import Run, Set, Step
from gem_core.cli.groups import CommandGroups
from gem_core.errors import CheckpointError

Runs = Annotated[list[Path], typer.Argument(help="The run folder, and those that it is compared with.", show_default=False)]
Compare = Annotated[list[Path] | None, typer.Option("--compare", metavar="RUN", help="Compare with this run; may be repeated.")]
Out = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="HTML file to write; otherwise report.html in the run folder.")]
NoEval = Annotated[bool, typer.Option("--no-eval", help="Do not load the model nor read data: no calibration curve, no FLOPs by part.")]
File = Annotated[Path, typer.Option("--out", metavar="FILE", help="The .safetensors file to write.", show_default=False)]


def register(app: CommandGroups) -> None:
    app.command()(report)
    app.command("export-embeddings")(export_embeddings)


def report(runs: Runs, compare: Compare = None, out: Out = None, no_eval: NoEval = False, overrides: Set = None) -> None:
    """Write one HTML page about a run, alone or beside others: losses, metrics, calibration, speed, memory, data, ranks, plan, model,
    versions, configuration. It needs no network.

    Example: gemrec report runs/mine

    Example: gemrec report runs/mine --compare runs/before runs/other --out both.html

    Example: gemrec report runs/mine --out mine.html --set eval.max_batches=50
    """
    from gem_core.report.page import page
    from gem_core.report.run import labels, read
    from gem_core.train.checkpoint import replace_file

    # `--compare A B` gives A to the option and B to the argument.
    paths = list(dict.fromkeys([runs[0], *(compare or ()), *runs[1:]]))
    target = out or paths[0] / "report.html"
    text = page(*(read(path, inspect=not no_eval, overrides=overrides or (), label=name) for path, name in zip(paths, labels(paths))))
    _writable(target, lambda: replace_file(target, text))
    print(f"{target}: {target.stat().st_size / 1024:,.0f} KiB")


def export_embeddings(run: Run, out: File, step: Step = None) -> None:
    """Write the embedding tables of a run as one safetensors file, a tensor [rows, dim] fp32 a table; tables of any size.

    Row i is id i (with hash = true, the hash's row). The file's metadata tells the table of each feature and the step.

    Example: gemrec export-embeddings runs/mine --out tables.safetensors
    """
    from gem_core.train.export import write_embeddings

    written = {}
    _writable(out, lambda: written.update(write_embeddings(run, out, step=step)))
    for name, (rows, dim) in written.items():
        print(f"{name}: {rows:,} x {dim}")
    print(f"{out}: {out.stat().st_size / 2**20:,.1f} MiB")


def _writable(path: Path, write: Callable[[], None]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write()
    except OSError as error:
        raise CheckpointError(
            f"the file cannot be written: {error.strerror or error}", where=str(path), fix="choose another --out"
        ) from error
