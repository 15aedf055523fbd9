"""Nested states to JSON plus named tensors, and back, so that anything a run saves can be read without unpickling.

Holds None, bool, int, float, str, lists, tuples, dicts with string or integer keys, tensors, numpy arrays and scalars, and batches.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gem_core.batch import Batch, Requests, SequenceGroup, SparseGroup
from gem_core.errors import CheckpointError
from gem_core.jagged import Jagged
from gem_core.train.tensorfile import Summed, Written, read_tensors, write_tensors

_CLASSES = {cls.__name__: cls for cls in (Batch, SparseGroup, SequenceGroup, Requests, Jagged)}
_TAG = "$"


def pack(value: Any, where: str = "state") -> tuple[Any, dict[str, Tensor]]:
    """(JSON value, tensors by name). ``where`` begins the tensors' names and locates what cannot be stored."""
    tensors: dict[str, Tensor] = {}
    return _pack(value, where, tensors), tensors


def _pack(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor | np.ndarray):
        tensors[path] = torch.as_tensor(value)
        return {_TAG: "tensor" if isinstance(value, Tensor) else "array", "name": path}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list | tuple):
        items = [_pack(v, f"{path}.{i}", tensors) for i, v in enumerate(value)]
        return items if isinstance(value, list) else {_TAG: "tuple", "items": items}
    if isinstance(value, Mapping):
        if all(isinstance(k, str) for k in value) and _TAG not in value:
            return {k: _pack(v, f"{path}.{k}", tensors) for k, v in value.items()}
        if all(isinstance(k, str | int) and not isinstance(k, bool) for k in value):
            return {_TAG: "dict", "items": [[k, _pack(v, f"{path}.{k!r}", tensors)] for k, v in value.items()]}
    if type(value).__name__ in _CLASSES and type(value) is _CLASSES[type(value).__name__]:
        return {_TAG: type(value).__name__, **{f.name: _pack(getattr(value, f.name), f"{path}.{f.name}", tensors) for f in fields(value)}}
    raise CheckpointError(
        f"a {type(value).__name__} cannot be stored in a checkpoint", where=path, fix="give state as JSON values, tensors and arrays"
    )


def save_packed(stem: Path, value: Any) -> dict[str, Written]:
    """Write ``stem.json`` and ``stem.safetensors`` to the disk; returns what was written by file name."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    described, tensors = pack(value, stem.name)
    return {
        f"{stem.name}.safetensors": write_tensors(stem.with_name(f"{stem.name}.safetensors"), tensors),
        f"{stem.name}.json": write_json(stem.with_name(f"{stem.name}.json"), described),
    }


def load_packed(stem: Path) -> Any:
    """Read what `save_packed` wrote: states of checkpoints, batches that a failed run left behind."""
    return unpack(read_json(stem.with_name(f"{stem.name}.json")), read_tensors(stem.with_name(f"{stem.name}.safetensors")))


def write_json(path: Path, value: Any) -> Written:
    """Write and flush to the disk."""
    with open(path, "wb") as opened:
        file = Summed(opened)
        file.write(json.dumps(value, indent=1).encode())
        file.flush()
    return file.written


_FIX = "put it back from a copy, or use an older checkpoint"


def read_json(path: Path) -> Any:
    """:raises CheckpointError: missing, or not JSON."""
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}", where=str(path.parent), fix=_FIX) from error
    except ValueError as error:
        raise CheckpointError(f"{path.name} is damaged: {error}", where=str(path.parent), fix=_FIX) from error


def unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Reverse of `pack`."""
    if isinstance(value, list):
        return [unpack(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    if kind is None:
        return {k: unpack(v, tensors) for k, v in value.items()}
    if kind in ("tensor", "array"):
        if value["name"] not in tensors:
            raise CheckpointError("a stored state lacks one of its tensors", where=value["name"], fix=_FIX)
        tensor = tensors[value["name"]]
        return tensor if kind == "tensor" else tensor.numpy()
    if kind == "tuple":
        return tuple(unpack(v, tensors) for v in value["items"])
    if kind == "dict":
        return {k: unpack(v, tensors) for k, v in value["items"]}
    if kind in _CLASSES:
        return _CLASSES[kind](**{k: unpack(v, tensors) for k, v in value.items() if k != _TAG})
    raise CheckpointError(f"a stored state holds the unknown kind {kind!r}", fix="it was written by a newer version; upgrade this package")
