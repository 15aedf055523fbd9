"""``gemrec bench kernels`` and ``gemrec kernels tune``."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from gem_core.cli.groups import CommandGroups

FAMILIES = ("attention", "dense")
Family = Annotated[str, typer.Argument(help="attention, dense (block_attention, norms, mlp, norm_gdpa) or all.")]
Rows = Annotated[str, typer.Option("--rows", help="Comma-separated names of rows; none: all.")]
Impls = Annotated[str, typer.Option("--impls", help="Comma-separated implementations, for attention; auto: what a call gets.")]
Ops = Annotated[str, typer.Option("--ops", help="Comma-separated ops; none: all.")]
Budget = Annotated[float, typer.Option("--budget-seconds", min=1, help="Start no row of a family after this time.")]
Peers = Annotated[bool, typer.Option("--peers/--no-peers", help="Time what a user would run instead, where it can be imported.")]
Eager = Annotated[bool, typer.Option("--eager/--no-eager", help="Also the time launched from Python, and the peak memory.")]
Tune = Annotated[bool, typer.Option("--tune", help="Measure all candidate configurations first; they are in the JSON.")]
Workers = Annotated[
    int | None, typer.Option("--workers", min=0, help="Processes that compile ahead, 0 for none.", show_default="one a core, up to 16")
]
Rounds = Annotated[int, typer.Option("--rounds", min=1, help="Timings of each variant, all in one shuffled order a round.")]
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Folder of the JSON, the table and the plot.")]


def register(app: CommandGroups) -> None:
    app.group("bench").command("kernels")(bench_kernels)
    app.group("kernels").command("tune")(kernels_tune)


def bench_kernels(
    family: Family = "all",
    rows: Rows = "",
    impls: Impls = "triton",
    ops: Ops = "",
    budget: Budget = 540.0,
    peers: Peers = True,
    eager: Eager = True,
    tune: Tune = False,
    workers: Workers = None,
    rounds: Rounds = 7,
    out: Out = None,
) -> None:
    """Time the kernels beside their peers, after a check against float64; print the table, write JSON, Markdown and a plot.

    Columns: ms (median of CUDA-graph replays), eager_ms, tflops and gbs (of the least arithmetic and the least bytes), of_gemm, of_copy and
    of_floor (shares of the rates of this run, and of the nearer floor), error (largest relative error against float64), peak_mib.

    Example: gemrec bench kernels attention --rows self-1024-s0.5,cross-1024x32-s0.5 --out results
    """
    _run(family, rows, impls, ops, budget, peers, eager, tune, workers, rounds, out)


def kernels_tune(
    family: Family = "all", rows: Rows = "", impls: Impls = "triton", ops: Ops = "", budget: Budget = 3600.0,
    workers: Workers = None, out: Out = None,
) -> None:  # fmt: skip
    """Measure every candidate configuration of the benchmark's problems on this GPU and remember the best for later runs on this machine.

    They are kept under $GEM_CACHE_DIR (~/.cache/gem) and go before the tables that come with the package.

    Example: gemrec kernels tune attention --rows self-1024-s0.5
    """
    _run(family, rows, impls, ops, budget, False, False, True, workers, 1, out)


def _run(
    family: str, rows: str, impls: str, ops: str, budget: float, peers: bool, eager: bool, tune: bool, workers: int | None, rounds: int,
    out: Path | None,
) -> None:  # fmt: skip
    import torch

    from gem_core.errors import ConfigError, DeviceError

    if family not in (*FAMILIES, "all"):
        raise ConfigError(f"no family {family!r}", where="family", fix=f"one of {', '.join(FAMILIES)}, all")
    if not torch.cuda.is_available():
        raise DeviceError("kernels are timed on a GPU, and there is none", where="this machine", fix="run it where one is visible")
    from gem_kernels.bench import attention, dense
    from gem_kernels.bench.settings import Settings
    from gem_kernels.triton import specs

    modules = {"attention": attention, "dense": dense}
    chosen = [modules[name] for name in FAMILIES if family in (name, "all")]
    wanted = _names(rows)
    kernels = specs()
    for option, given, known in (
        ("rows", wanted, [row.name for module in chosen for row in module.ROWS]),
        ("impls", _names(impls), sorted({kernel.name for kernel in kernels} | {"auto"})),
        ("ops", _names(ops), sorted({kernel.op for kernel in kernels})),
    ):
        unknown = [name for name in given if name not in known]
        if unknown:
            raise ConfigError(f"there is no {', '.join(unknown)}", where=f"--{option}", fix=f"some of {', '.join(known)}")
    folder = str(out) if out is not None else os.environ.get("OUT")
    settings = Settings(
        "gemrec " + shlex.join(sys.argv[1:]), wanted, _names(impls), _names(ops), budget, peers, eager, tune,
        min(16, os.cpu_count() or 1) if workers is None else workers, rounds, folder,
    )  # fmt: skip
    for module in chosen:
        module.run(settings)
    if folder:
        print(f"written to {folder}")


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))
