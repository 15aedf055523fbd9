"""``python -m gem_kernels.bench``: the command ``gemrec bench kernels`` where only this package is on the path."""

import typer

from gem_kernels.commands import bench_kernels

if __name__ == "__main__":
    typer.run(bench_kernels)
