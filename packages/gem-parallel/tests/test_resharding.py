"""Checkpoints of sharded state: written on one mesh and plan, read on another, bit for bit."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from gem_core.config import ResolvedConfig, config_from_dict, dense_config, model_config, recipe_config, sparse_config
from gem_core.errors import CheckpointError
from gem_core.model.loss import batch_total
from gem_core.testing.strategies import StrategyConformance, batches_of, run_processes
from gem_core.train import state
from gem_core.train.build import build_parts
from gem_core.train.checkpoint import CheckpointStore
from gem_core.train.feed import Fed
from gem_core.train.measure import Meter, peak
from gem_core.train.runtime import Runtime
from gem_core.train.saving import Saver
from gem_core.train.shards import gather
from gem_core.train.step import TrainStep

MODEL = {"name": "gem", "layers": 2, "dim": 8, "embedding_dim": 8, "interaction": {"experts": ["wukong", "dcnv2"]}}
PLAN_A = {"dense": "hsdp", "replicate": 2, "expert": 2, "sparse": "gem-2d", "model": 2, "replica": 2}
PLANS_B = [
    {"dense": "fsdp", "sparse": "gem-2d", "model": 2, "gem-2d": {"sharding": "table", "exchange": "touched"}},
    {"dense": "ddp", "sparse": "local"},
    {"dense": "hsdp", "expert": 2, "sparse": "torchrec", "torchrec": {"sharding": "row"}},
]


def work(rank, world, task):
    """Load a checkpoint if one is named, train, save if a place is named (and train on while it is written); the whole state as it was
    when it was saved, on rank 0."""
    config = config_from_dict({**StrategyConformance.config(task["parallel"]), "model": MODEL, **task.get("change", {})})
    options = (recipe_config(config), dense_config(config), sparse_config(config))
    resolved = ResolvedConfig(config, model_config(config), None, *options, {})
    runtime = Runtime(torch.device("cpu"), rank, world)
    parts = build_parts(resolved, runtime)
    step = TrainStep(parts, config, runtime, Meter(runtime.device, peak("CPU", {"fp32"})))

    def train(numbers):
        for number in numbers:
            batch = batches_of(config.features, number, (4,) * world)[rank]
            step([Fed(batch, batch, float(batch_total(batch)), batch.tokens, None, {})], stop=False)

    def held():
        return {"model": parts.dense_state(), "optimizer": dict(step.dense.state_items()), "tables": parts.table_state()}

    if "load" in task:
        try:
            checkpoint = CheckpointStore(Path(task["load"])).latest()[0]
            state.load_parameters(parts, checkpoint)
            state.load_optimizer(parts, step.dense, checkpoint)
        except CheckpointError as error:
            return {"error": error.what}
    train(range(task.get("steps", 0)))
    whole = {f"{part}.{name}": t for part, states in held().items() for name, t in gather(states, runtime).items()}
    if "save" in task:
        saver = Saver(CheckpointStore(Path(task["save"])), runtime, background=task.get("background", False))
        saver.save(3, meta={"samples": 0}, parts=held(), shared={"guard": {"level": 2}}, ranks=[{}] * world)
        train(range(100, 100 + task.get("meanwhile", 0)))
        path = saver.wait()
        assert not task.get("background") or path is not None
    return whole if rank == 0 else {}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Plan A on four ranks, saved behind the back of two more steps."""
    folder = tmp_path_factory.mktemp("first")
    task = {"parallel": PLAN_A, "steps": 3, "save": str(folder / "a"), "background": True, "meanwhile": 2}
    return folder / "a", run_processes(4, work, task, tmp_path_factory.mktemp("results"))[0]


@pytest.mark.parametrize("plan", PLANS_B, ids=lambda p: f"{p['dense']}-{p['sparse']}")
def test_four_ranks_two_one_and_four_again(plan, written, tmp_path):
    if plan["sparse"] == "torchrec" and importlib.util.find_spec("torchrec") is None:
        pytest.skip("torchrec is not installed")
    first, before = written
    assert {key.split(".")[0] for key in before} == {"model", "optimizer", "tables"}

    def through(world, parallel, source, place):
        results = tmp_path / f"results-{place}"
        results.mkdir()
        task = {"parallel": parallel, "load": str(source), "save": str(tmp_path / place)}
        return tmp_path / place, run_processes(world, work, task, results)[0]

    second, on_two = through(2, plan, first, "b")
    third, on_one = through(1, {}, second, "c")
    _, on_four = through(4, PLAN_A, third, "d")
    for label, found in (("two", on_two), ("one", on_one), ("four", on_four)):
        assert found.keys() == before.keys(), label
        for name, tensor in before.items():
            assert found[name].dtype == tensor.dtype, (label, name)
            assert torch.equal(found[name], tensor), (label, name)


def test_the_files_are_plain(written):
    folder, before = written
    checkpoint = CheckpointStore(folder).latest()[0]
    assert checkpoint.meta["format"] == 2
    assert checkpoint.state("shared") == {"guard": {"level": 2}}
    index = json.loads((checkpoint.path / "index.json").read_text())["tensors"]
    for part in ("model", "optimizer", "tables"):
        whole = checkpoint.tensors(part)
        assert {f"{part}.{name}" for name in whole} == {name for name in before if name.startswith(f"{part}.")}
        for name, tensor in whole.items():
            assert torch.equal(tensor, before[f"{part}.{name}"]), name
            assert tuple(index[f"{part}/{name}"]["shape"]) == tensor.shape
    written_by = {chunk["file"] for entry in index.values() for chunk in entry["chunks"]}
    assert len(written_by) == 4, "every rank writes its share"
    assert not any(b"pickle" in path.read_bytes()[:200] for path in checkpoint.path.iterdir())


def test_another_model_is_refused_on_every_rank(written, tmp_path):
    folder, _ = written
    change = {"model": {**MODEL, "dim": 16}}
    for found in run_processes(2, work, {"parallel": {"dense": "fsdp"}, "load": str(folder), "change": change}, tmp_path):
        assert "of another shape" in found["error"]


def test_a_rank_that_cannot_write_fails_the_save_everywhere(tmp_path):
    for said in run_processes(2, full_disk, str(tmp_path / "c"), tmp_path):
        assert "rank 1" in said
        assert "No space left" in said
    assert CheckpointStore(tmp_path / "c").steps() == []


def full_disk(rank, world, place):
    from gem_core.model.contract import Shards
    from gem_core.train import storage

    if rank == 1:

        def refuse(*_, **__):
            raise OSError(28, "No space left on device")

        storage.write_tensors = refuse
    saver = Saver(CheckpointStore(Path(place)), Runtime(torch.device("cpu"), rank, world))
    half = Shards((2, 3), torch.float32, (((rank, 0), torch.ones(1, 3)),))
    try:
        saver.save(1, meta={}, parts={"model": {"w": half}}, shared={}, ranks=[{}] * world)
    except CheckpointError as error:
        return str(error)
    return "saved"
