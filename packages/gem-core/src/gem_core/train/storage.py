"""torch.distributed.checkpoint over the files of a checkpoint folder, in place of its pickled metadata.

Every process writes the boxes that the plan gives it to ``shard-<rank>.safetensors``; ``index.json`` says of each tensor ("model/<name>",
"optimizer/<name>", "tables/<name>") its dtype, its whole shape, and which file holds which box. The planner of
torch.distributed.checkpoint decides who writes a box that several processes hold, checks that the boxes cover the whole, and at loading
finds the overlaps with what a process wants, whatever mesh or plan wrote it. Checkpoints of one process (a file a part) are read too.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from gem_core.errors import CheckpointError
from gem_core.model.contract import Shards
from gem_core.train.pack import read_json, write_json
from gem_core.train.shards import State, box_of, shards_of
from gem_core.train.tensorfile import Written, dtype_name, dtype_of, nothing, read_tensors, write_tensors

INDEX = "index.json"


def write(
    folder: Path,
    parts: Mapping[str, Mapping[str, Shards]],
    rank: int,
    group: ProcessGroup | None,
    progress: Callable[[], None] = nothing,
) -> dict[str, Written]:
    """Called by all ranks alike; returns what was written by file name on the coordinator (rank 0), nothing elsewhere. ``progress``: see
    `write_tensors`.

    :raises CheckpointError: a process could not write, or the boxes do not cover their tensors.
    """
    writer = Writer(folder, rank, progress)
    state = {f"{part}/{name}": _Held(shards) for part, states in parts.items() for name, shards in states.items()}
    try:
        save(state, storage_writer=writer, planner=_Save(flatten_state_dict=False, flatten_sharded_tensors=False), process_group=group)
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "CheckpointException":
            raise
        raise CheckpointError(
            f"the sharded state could not be written: {_first(error)}",
            where=str(folder),
            fix="free space or mend the file system, then resume; the previous checkpoint is untouched",
        ) from error
    return writer.files


def read(folder: Path, part: str, targets: Mapping[str, State]) -> None:
    """Fill ``targets``, each process for itself.

    :raises CheckpointError: a file is missing or damaged.
    """
    state = {f"{part}/{name}": _Held(shards_of(target)) for name, target in targets.items()}
    if not state:
        return
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # each process reads alone, on purpose
            load(state, storage_reader=Reader(folder), planner=_Load(), no_dist=True)
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "CheckpointException":
            raise
        raise CheckpointError(f"the {part} cannot be read: {_first(error)}", where=str(folder), fix="use an older checkpoint") from error


def describe(folder: Path) -> dict[str, dict[str, Any]]:
    """``{"<part>/<name>": {"dtype", "shape", "chunks": [{"file", "key", "offsets", "sizes"}]}}`` of either kind of checkpoint."""
    if (folder / INDEX).is_file():
        index: dict[str, dict[str, Any]] = read_json(folder / INDEX)["tensors"]
        return index
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        if path.stem in ("model", "optimizer", "tables"):
            for name, tensor in read_tensors(path).items():
                shape = list(tensor.shape)
                chunk = {"file": path.name, "key": name, "offsets": [0] * len(shape), "sizes": shape}
                found[f"{path.stem}/{name}"] = {"dtype": dtype_name(tensor.dtype), "shape": shape, "chunks": [chunk]}
    return found


def whole(folder: Path, part: str) -> dict[str, Tensor]:
    """Every tensor of ``part``, put together in memory."""
    files: dict[str, dict[str, Tensor]] = {}
    found = {}
    for key, entry in describe(folder).items():
        kind, _, name = key.partition("/")
        if kind == part:
            found[name] = torch.empty(entry["shape"], dtype=dtype_of(entry["dtype"]))
            for chunk in entry["chunks"]:
                if chunk["file"] not in files:
                    files[chunk["file"]] = read_tensors(folder / chunk["file"])
                found[name][box_of(chunk["offsets"], chunk["sizes"])] = files[chunk["file"]][chunk["key"]]
    return found


class _Held:
    """`Shards` as the planners of torch.distributed.checkpoint ask for them."""

    def __init__(self, shards: Shards) -> None:
        self.shards = shards

    def chunks(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(at), tensor.shape) for at, tensor in self.shards.parts]

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        properties, size = TensorProperties(dtype=self.shards.dtype), torch.Size(self.shards.shape)
        return [
            WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, properties, size))
            for chunk in self.chunks()
        ]

    def at(self, offsets: torch.Size | None) -> Tensor:
        return next(tensor for at, tensor in self.shards.parts if at == tuple(offsets or ()))


class _Save(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn].at(index.offset)


class _Load(DefaultLoadPlanner):
    def set_up_planner(self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata
        items = [create_read_items_for_chunk_list(n, stored[n], held.chunks()) for n, held in self.state_dict.items()]  # type: ignore[arg-type]
        return LoadPlan([item for found in items for item in found])

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].at(index.offset)  # type: ignore[no-any-return]


class Writer(StorageWriter):
    """Writes this process's share of a plan to ``shard-<rank>.safetensors`` of a folder that exists, rank 0 also the index."""

    def __init__(self, folder: Path, rank: int, progress: Callable[[], None] = nothing) -> None:
        self.folder, self.name, self.progress = folder, f"shard-{rank:05d}.safetensors", progress
        self.files: dict[str, Written] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        tensors: dict[str, Any] = {_key(item.index): planner.resolve_data(item) for item in plan.items}
        written = write_tensors(self.folder / self.name, tensors, progress=self.progress) if tensors else Written(0, 0)
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(item.index, written.bytes, (self.name, written)) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        where = {_key(r.index): r for rank in results for r in rank}
        index: dict[str, Any] = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            chunks = []
            for chunk in entry.chunks:
                key = _key(MetadataIndex(name, chunk.offsets))
                chunks.append({"file": where[key].storage_data[0], "key": key, "offsets": list(chunk.offsets), "sizes": list(chunk.sizes)})
            index[name] = {"dtype": dtype_name(entry.properties.dtype), "shape": list(entry.size), "chunks": chunks}
        self.files = dict(r.storage_data for rank in results for r in rank)
        self.files[INDEX] = write_json(self.folder / INDEX, {"tensors": index})

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class Reader(StorageReader):
    """Reads the folder of either kind of checkpoint; only the pages of wanted boxes are touched."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = describe(folder)
        self.files: dict[str, dict[str, Tensor]] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors: dict[str, Any] = {}
        for name, entry in self.index.items():
            chunks = [ChunkStorageMetadata(torch.Size(c["offsets"]), torch.Size(c["sizes"])) for c in entry["chunks"]]
            tensors[name] = TensorStorageMetadata(TensorProperties(dtype=dtype_of(entry["dtype"])), torch.Size(entry["shape"]), chunks)
        return Metadata(tensors)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.places = {(n, tuple(c["offsets"])): (c["file"], c["key"]) for n, entry in self.index.items() for c in entry["chunks"]}

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            file, key = self.places[item.storage_index.fqn, tuple(item.storage_index.offset or ())]
            if file not in self.files:
                self.files[file] = read_tensors(self.folder / file)
            stored = self.files[file][key][box_of(item.storage_offsets, item.lengths)]
            target = planner.resolve_tensor(item)
            with torch.no_grad():
                target.copy_(stored)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _key(index: MetadataIndex) -> str:
    return f"{index.fqn}@{','.join(map(str, index.offset or ()))}"


def _first(error: BaseException) -> str:
    """What a failed rank said; torch.distributed.checkpoint wraps it by rank."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (inner, _) = next(iter(sorted(failures.items())))
        return f"rank {rank}: {inner.what if isinstance(inner, CheckpointError) else inner}"
    return error.what if isinstance(error, CheckpointError) else str(error)
