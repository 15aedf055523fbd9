"""Conformance kit for strategies: several processes on this machine must train as one process does on the joined batch.

    from gem_core.testing.strategies import StrategyConformance

    class TestMine(StrategyConformance):
        parallel = {"dense": "mine", "mine": {"option": 1}}
        worlds = (2, 4)

The processes speak gloo on the CPU. What is compared after a few steps: the losses, every dense parameter, every table with its
accumulators, and the ranks with each other.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import accumulate, pairwise
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from gem_core.config import ResolvedConfig, config_from_dict, dense_config, model_config, recipe_config, sparse_config
from gem_core.errors import CheckpointError
from gem_core.model.loss import batch_total
from gem_core.testing.models import random_batch, sample_features
from gem_core.testing.rules import Rules, named
from gem_core.train.build import build_parts
from gem_core.train.contract import Callback, RunInfo
from gem_core.train.feed import Fed
from gem_core.train.measure import Meter, peak
from gem_core.train.runtime import Runtime, choose_device, leave_group
from gem_core.train.shards import gather
from gem_core.train.step import Outcomes, TrainStep
from gem_core.train.trainer import Trainer

Worker = Callable[[int, int, Any], Any]

LEFT_ALONE = 10.0
"""Seconds that processes have to end after one of them has failed."""


def run_processes(world: int, worker: Worker, argument: Any, folder: Path, timeout: float = 120.0, backend: str = "gloo") -> list[Any]:
    """Run ``worker(rank, world, argument)`` in ``world`` processes joined by ``backend`` ("cpu:gloo,cuda:nccl" for CUDA devices); returns
    what each returned, in rank order.

    ``worker`` is a module-level function; results travel by files in ``folder``. An exception in any process is raised here with its text,
    as are the exit code of a process that was killed and the stacks of those that did not end within ``timeout`` seconds.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("forkserver")  # imports torch once, not once a process
    context.set_forkserver_preload([__name__])
    processes = [
        context.Process(target=_enter, args=(rank, world, port, backend, worker, argument, str(folder)), daemon=True)
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    until = time.monotonic() + timeout
    while any(process.is_alive() for process in processes) and time.monotonic() < until:
        wait([process.sentinel for process in processes if process.is_alive()], until - time.monotonic())
        if any(process.exitcode for process in processes):  # the others may wait for what will not come
            until = min(until, time.monotonic() + LEFT_ALONE)
    hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for pid in [processes[rank].pid for rank in hung]:
        assert pid is not None
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    wait([processes[rank].sentinel for rank in hung], 1.0 if hung else 0.0)
    for rank in hung:
        processes[rank].kill()
        processes[rank].join()
    faults = {rank: path.read_text() for rank in range(world) if (path := folder / f"fault-{rank}.txt").exists()}
    killed = {rank: p.exitcode for rank, p in enumerate(processes) if p.exitcode and rank not in (*hung, *faults)}
    faults |= {rank: f"ended with exit code {code}\n{_stacks(folder, rank)}" for rank, code in killed.items()}
    if faults:
        raise RuntimeError("\n".join(f"rank {rank}: {fault}" for rank, fault in faults.items()))
    if hung:
        stacks = [f"rank {rank}: {_stacks(folder, rank)}" for rank in hung]
        raise RuntimeError("\n".join([f"ranks {hung} did not end within {timeout:.0f} s; where they were:", *stacks]))
    return [torch.load(folder / f"result-{rank}.pt", weights_only=True) for rank in range(world)]


def _stacks(folder: Path, rank: int) -> str:
    """What a rank has written of where its threads are."""
    path = folder / f"stacks-{rank}.txt"
    return path.read_text() if path.exists() else ""


def _enter(rank: int, world: int, port: int, backend: str, worker: Worker, argument: Any, folder: str) -> None:
    torch.set_num_threads(1)
    stacks = (Path(folder) / f"stacks-{rank}.txt").open("w")  # open to the end: it is written by a thread of C
    faulthandler.enable(stacks)
    # Asked for at the end only: a thread that reads the stacks of others while they run can crash the process.
    faulthandler.register(signal.SIGUSR1, stacks)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    try:
        if "cuda" in backend:
            torch.cuda.set_device(rank)
        dist.init_process_group(backend, rank=rank, world_size=world)
        torch.save(worker(rank, world, argument), Path(folder) / f"result-{rank}.pt")
        dist.barrier()
        leave_group()
    except BaseException:
        (Path(folder) / f"fault-{rank}.txt").write_text(traceback.format_exc())
        raise


def run_training(rank: int, world: int, task: Mapping[str, Any]) -> dict[str, Any]:
    """Worker for `run_processes`: ``gem_core.train`` of ``task["config"]`` in ``task["run_dir"]``; how it ended, without its files.

    ``task["stop_at"]``, if given, is the step during which rank 0 alone receives a stop signal.
    """
    trainer = Trainer(config_from_dict(task["config"]), run_dir=task["run_dir"], resume=task.get("resume", False), quiet=True)
    trainer.given_callbacks = [_StopAt(trainer, task["stop_at"])] if rank == 0 and "stop_at" in task else []
    result = trainer.run()
    return {"status": result.status, "steps": result.steps, "samples": result.samples, "tasks": result.tasks}


class _StopAt(Callback):
    def __init__(self, trainer: Trainer, step: int) -> None:
        self.trainer, self.step = trainer, step

    def on_step(self, run: RunInfo, record: Mapping[str, Any] | None) -> None:
        if run.step == self.step - 1:
            self.trainer.stop.requested = "SIGTERM"


def batches_of(features: Any, step: int, sizes: tuple[int, ...]) -> list[Any]:
    """A global batch of ``sum(sizes)`` samples cut into consecutive parts of ``sizes``."""
    whole = random_batch(features, sum(sizes), seed=100 + step)
    return [whole.select_range(a, b) for a, b in pairwise(accumulate(sizes, initial=0))]


def train_rank(rank: int, world: int, task: Mapping[str, Any]) -> dict[str, Any]:
    """One process's part of the scenarios of ``task``: losses and final state by scenario.

    ``task["scenarios"][name][step][micro-batch]`` says how many samples each rank has.
    """
    return {name: _train(rank, world, task["config"], sizes) for name, sizes in task["scenarios"].items()}


def _train(rank: int, world: int, data: Mapping[str, Any], sizes: Any) -> dict[str, Any]:
    config = config_from_dict(data)
    options = (recipe_config(config), dense_config(config), sparse_config(config))
    resolved = ResolvedConfig(config, model_config(config), None, *options, {})
    runtime = Runtime(choose_device(config.run.device, rank), rank, world)
    parts = build_parts(resolved, runtime)
    step = TrainStep(parts, config, runtime, Meter(runtime.device, peak("CPU", {"fp32"})))
    outcomes = Outcomes(runtime.device)
    parts.module.train()
    losses = []
    for number, micro in enumerate(sizes):
        mine = [batches_of(config.features, 10 * number + i, cut)[rank] for i, cut in enumerate(micro)]
        fed = [Fed(b, b.to(runtime.device), float(batch_total(b)), b.tokens, None, {}) for b in mine]
        outcomes.push(number, step(fed, stop=False), fed)
        (outcome,) = outcomes.ready(all=True)
        losses.append([outcome.loss / outcome.weight, outcome.grad_norm, float(outcome.samples)])
    states = {f"model.{name}": state for name, state in parts.dense_state().items()}
    states |= {f"tables.{name}": state for name, state in parts.table_state().items()}
    found: dict[str, Any] = {"losses": losses, "names": sorted(states), "state": {}, "differs": ""}
    try:
        whole = gather(states, runtime)
        found["state"] = whole if rank == 0 else {}
    except CheckpointError as error:
        found["differs"] = error.what
    return found


@named
def _all_ranks_train(world: int, task: Mapping[str, Any], folder: Path) -> list[Any]:
    """Every scenario trains to its end on every rank: even and uneven batches, a rank without samples, accumulation."""
    return run_processes(world, train_rank, task, folder)


class StrategyConformance(Rules):
    """Set ``parallel`` (the section ``[parallel]``) and ``worlds``; ``model`` may be another registered model with options."""

    parallel: ClassVar[Mapping[str, Any]]
    worlds: ClassVar[tuple[int, ...]] = (2,)
    model: ClassVar[Mapping[str, Any]] = {"name": "gem", "layers": 1, "dim": 8, "embedding_dim": 8}
    tolerance: ClassVar[float] = 1e-5

    @classmethod
    def config(cls, parallel: Mapping[str, Any]) -> dict[str, Any]:
        # The optimizers' eps is far above the rounding of gradients, so that a gradient that is zero but for rounding moves nothing.
        train = {"optimizer": {"lr": 1e-2, "eps": 1e-4}, "tables": {"lr": 0.1, "eps": 1e-3}, "clip_norm": 1.0}
        features = sample_features().model_dump(exclude_none=True)
        run = {"device": "cpu", "seed": 5}
        return {"run": run, "features": features, "model": dict(cls.model), "train": train, "parallel": dict(parallel)}

    @staticmethod
    def scenarios(world: int) -> dict[str, Any]:
        even, uneven = (6,) * world, (9, *range(2, world + 1))
        return {
            "even and uneven ranks": [[even], [uneven], [even], [uneven], [even]],
            "a rank without samples": [[(0, *(5,) * (world - 1))], [(5,) * world], [(*(4,) * (world - 1), 0)]],
            "accumulation": [[(4,) * world, (3, *(5,) * (world - 1))] for _ in range(2)],
        }

    @pytest.fixture(scope="class")
    @classmethod
    def found(cls, tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[list[Any], dict[str, Any]]]:
        """World -> (what each rank found, what one process found on the joined batches), by scenario."""
        results = {}
        for world in cls.worlds:
            scenarios = cls.scenarios(world)
            task = {"config": cls.config(cls.parallel), "scenarios": scenarios}
            ranks = _all_ranks_train(world, task, tmp_path_factory.mktemp(f"world-{world}"))
            joined = {name: [[(sum(parts),) for parts in micro] for micro in sizes] for name, sizes in scenarios.items()}
            results[world] = (ranks, train_rank(0, 1, {"config": cls.config({}), "scenarios": joined}))
        return results

    @pytest.mark.parametrize("scenario", ["even and uneven ranks", "a rank without samples", "accumulation"])
    def test_equals_one_process_on_the_joined_batch(self, found: Mapping[int, Any], scenario: str) -> None:
        """Losses, gradient norms, names and the final state are those of one process that trains on all samples of a step."""
        for world, (ranks, alone) in found.items():
            expected = alone[scenario]
            for rank, result in enumerate(ranks):
                at = f"world {world}, rank {rank}"
                for step, (got, want) in enumerate(zip(result[scenario]["losses"], expected["losses"], strict=True)):
                    same = got == pytest.approx(want, rel=self.tolerance)
                    assert same, f"{at}, step {step}: loss, gradient norm, samples are {got}, those of one process {want}"
                assert result[scenario]["names"] == expected["names"], f"{at}: the names of parameters and tables must not change"
            for name, tensor in expected["state"].items():
                got = ranks[0][scenario]["state"][name]
                close = torch.allclose(got, tensor, rtol=self.tolerance, atol=self.tolerance)
                assert close, f"world {world}: {name} is off by {float((got - tensor).abs().max()):.3g} from one process"

    def test_ranks_stay_equal_bit_for_bit(self, found: Mapping[int, Any]) -> None:
        """What several ranks hold, whole or in part, is the same on all of them."""
        for world, (ranks, _) in found.items():
            for scenario in ranks[0]:
                differs = [result[scenario]["differs"] for result in ranks if result[scenario]["differs"]]
                assert not differs, f"world {world}, {scenario}: {differs[0]}"
