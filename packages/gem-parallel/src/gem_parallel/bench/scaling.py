"""The ladder ``scaling`` of `gemrec bench train`: weak scaling over the GPUs of one host, every arrangement on all of them, and on CUDA
steps captured as graphs where the arrangement allows it.

    gemrec bench train base --ladder scaling --set precision.recipe=bf16 --cluster cluster.toml --out OUT

On fewer GPUs than there are, one arrangement runs for each power of two. Without CUDA all tables are those of ``gem-2d``, because
TorchRec's two-dimensional sharding refuses anything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gem_core.bench.ladder import Row
from gem_core.hookspecs import LadderSpec

if TYPE_CHECKING:
    from gem_core.config import Config
    from gem_parallel.plan.workload import Workload

CAPTURED = "train.capture=true"
WAIT_S = 30
"""``parallel.timeout_s`` of the rows: the process group gives up on a rank after 1.5 times that and 10 s."""


def rows(config: Config, devices: int) -> Sequence[Row]:
    """One process alone, then 2, 4, ... up to ``devices``; of those in between only the first two arrangements."""
    cuda = torch.cuda.is_available() and config.run.device != "cpu"
    alone = ("parallel.sparse=fbgemm", f"parallel.fbgemm.output={_low(config)}")
    found = [Row("1", alone), Row("1, captured", (*alone, CAPTURED))] if cuda else [Row("1")]
    sizes = [n for n in (2, 4, 8, 16) if n <= devices]
    for n in sizes:
        found += _arrangements(config, n, cuda)[: None if n == sizes[-1] else 2]
    return found


def _low(config: Config) -> str:
    """What travels in the precision of the products: rows of tables, and layers that are gathered."""
    return "fp32" if config.precision.recipe == "fp32" else "bf16"


def _arrangements(config: Config, n: int, cuda: bool) -> list[Row]:
    half = n // 2
    gathered = _low(config)
    wait = f"parallel.timeout_s={WAIT_S}"

    def dense(name: str, **axes: int) -> tuple[str, ...]:
        given = [f"parallel.{axis}={degree}" for axis, degree in axes.items()]
        return (wait, f"parallel.dense={name}", f"parallel.{name}.param_dtype={gathered}", *given)

    flat, replicas = dense("fsdp"), dense("hsdp", replicate=2)
    own = ("parallel.sparse=gem-2d", f"parallel.gem-2d.output={gathered}")
    one_d = (*(("parallel.sparse=torchrec",) if cuda else own), f"parallel.model={n}")
    two = (f"parallel.model={half}", "parallel.replica=2")
    torchrec = ("parallel.sparse=torchrec-2d", *two)
    whole = (*own, *two)
    copies = ("parallel.fsdp.collective=copy-engine",)
    replicate = (wait, "parallel.dense=ddp")
    touched = (*whole, "parallel.gem-2d.exchange=touched")
    captured = [
        (f"replicate {n}, tables 1D, captured", (*replicate, *one_d, CAPTURED)),
        (f"replicate {n}, touched rows, captured", (*replicate, *touched, CAPTURED)),
    ]
    wanted = [
        *(captured if cuda else []),
        ("tables 1D", (*flat, *one_d)),
        (f"replicate {n}, touched rows", (*replicate, *touched)),
        ("fully sharded, touched rows", (*flat, *touched)),
        ("tables 1D, copy engine", (*flat, *one_d, *copies)),
        (f"replicate 2 x shard {half}, tables 1D", (*replicas, *one_d)),
        (f"expert 2 x shard {half}, tables 1D", (*dense("fsdp", expert=2), *one_d)),
        *([(f"tables 2D ({half} x 2)", (*flat, *torchrec))] if cuda else []),
        ("fully sharded", (*flat, *whole)),
        ("fully sharded, copy engine", (*flat, *whole, *copies, "parallel.gem-2d.collective=copy-engine")),
        *([("fully sharded by TorchRec", (*flat, *torchrec, "parallel.torchrec-2d.fully_sharded=true"))] if cuda else []),
    ]
    return [Row(f"{n}: {name}", overrides, gpus=n) for name, overrides in wanted]


def predict(config: Config, gpus: int, cluster: Path) -> dict[str, float]:
    """The planner's step and memory of the configuration as it is.

    :raises ConfigError: a cluster file that cannot be used, or an arrangement that the planner does not know.
    """
    from gem_core.config.load import plain
    from gem_parallel.plan.cluster import load_cluster
    from gem_parallel.plan.measured import Comparison, Measurement, given

    data = plain(config)
    workload = _workload(repr({key: value for key, value in data.items() if key != "parallel"}), _Hidden(config))
    estimate = given(config, workload, load_cluster(cluster), gpus)[1]
    told = Comparison(Measurement(world=gpus, step_s=1.0), estimate)
    return {"step_ms": estimate.seconds * 1e3, "memory_bytes": told.predicted_bytes}


class _Hidden:
    """A value that a cache does not look at."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hidden)

    def __hash__(self) -> int:
        return 0


@lru_cache(maxsize=4)
def _workload(key: str, hidden: _Hidden) -> Workload:
    """Measured once for all rows, which differ in ``[parallel]`` only."""
    from gem_parallel.plan.command import workload_of

    return workload_of(hidden.config, hidden.config.model.preset or "model", None, 2048)


SPEC = LadderSpec("scaling", rows, predict, profile=True)
