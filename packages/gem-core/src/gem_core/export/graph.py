"""The dense part of a model as a `torch.export` program: embedding rows, numbers and offsets in, logits or query vectors out."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from gem_core.batch import Batch, SequenceGroup
from gem_core.config.features import Features
from gem_core.errors import ConfigError, RunError
from gem_core.export import traceable
from gem_core.model.contract import TableSet

SPARE = 2
"""Samples of one event that the graph adds to every batch, and rows to the longest history: export gives sizes of 0 and 1 a meaning of
their own, so inside no size may be below 2, and a request of one sample without any event is as good as another."""


@runtime_checkable
class Servable(Protocol):
    """A model that can be exported: built-in models are. ``serve`` is what the model does after the look-ups, in evaluation mode: logits
    ``[B, T]`` of ``task_names``, or for retrieval the query ``[B, width]``. Its ops are torch's own and ``gem_core.ops``."""

    table_set: TableSet

    def serve(self, batch: Batch, embedded: Mapping[str, Any]) -> Tensor: ...


@dataclass(frozen=True)
class Input:
    """One tensor of the graph's input dictionary.

    ``rows``: what its first dimension counts: "samples" B, "offsets" B + 1, "events" of ``history``, or "longest", whose only content is
    its length, at least that of the longest history of the batch. ``shape``: the other dimensions. ``feature``: the path below
    ``features``.
    """

    name: str
    rows: Literal["samples", "offsets", "events", "longest"]
    dtype: Literal["float32", "int64"]
    shape: tuple[int, ...] = ()
    history: str | None = None
    feature: str | None = None
    table: str | None = None
    pooling: str | None = None


def inputs_of(features: Features, tables: TableSet) -> list[Input]:
    """What a model with these features and look-ups may read, in a fixed order."""
    looked_up = {k.key: k for k in tables.lookups}
    found: list[Input] = []
    if features.dense:
        found.append(Input("dense", "samples", "float32", (len(features.dense),)))
    found += [Input(f"vectors.{n}", "samples", "float32", (v.dim,), feature=f"vectors.{n}") for n, v in features.vectors.items()]
    for path in (f"sparse.{n}" for n in features.sparse):
        if path in looked_up:
            k = looked_up[path]
            found.append(Input(path, "samples", "float32", (tables.table(k.table).dim,), None, path, k.table, k.pooling))
    for name, group in features.sequences.items():
        found += [Input(f"sequences.{name}.offsets", "offsets", "int64", (), name)]
        found += [Input(f"sequences.{name}.longest", "longest", "int64", (), name)]
        for field, spec in group.fields.items():
            path = f"sequences.{name}.fields.{field}"
            if spec.kind == "id":
                if path in looked_up:
                    k = looked_up[path]
                    found.append(Input(path, "events", "float32", (tables.table(k.table).dim,), name, path, k.table, spec.pooling))
            else:
                found.append(Input(path, "events", "float32", (spec.dim or 0,) if spec.kind == "vector" else (), name, path))
        if group.timestamps is not None:
            found.append(Input(f"sequences.{name}.timestamps", "events", "int64", (), name))
    if features.timestamp is not None:
        found.append(Input("timestamps", "samples", "int64"))
    return found


class Serving(nn.Module):
    """``model`` as a function of the dictionary that ``inputs`` describes; see `SPARE`."""

    def __init__(self, model: Any, features: Features, inputs: list[Input]) -> None:
        super().__init__()
        self.model, self.features, self.inputs = model, features, inputs

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        given = {i.name: self._with_spare(i, inputs[i.name]) for i in self.inputs}
        sequences, embedded = {}, {}
        for i in self.inputs:
            if i.table is not None:
                rows = given[i.name]
                embedded[i.name] = rows if i.history is None else (rows, given[f"sequences.{i.history}.offsets"])
        for name in dict.fromkeys(i.history for i in self.inputs if i.history is not None):
            own = [i for i in self.inputs if i.history == name and i.feature is not None]
            sequences[name] = SequenceGroup(
                given[f"sequences.{name}.offsets"],
                {i.name.rsplit(".", 1)[-1]: given[i.name] for i in own},
                given.get(f"sequences.{name}.timestamps"),
                given[f"sequences.{name}.longest"].shape[0] if f"sequences.{name}.longest" in given else None,
            )
        size = next(iter(inputs[i.name].shape[0] - int(i.rows == "offsets") for i in self.inputs if i.rows in ("samples", "offsets")))
        batch = Batch(
            size=size + SPARE,
            dense=given.get("dense"),
            dense_names=tuple(self.features.dense),
            vectors={n: given[f"vectors.{n}"] for n in self.features.vectors if f"vectors.{n}" in given},
            sequences=sequences,
            timestamps=given.get("timestamps"),
        )
        return self.model.serve(batch, embedded)[:size]  # type: ignore[no-any-return]

    @staticmethod
    def _with_spare(i: Input, x: Tensor) -> Tensor:
        if i.rows == "offsets":
            return torch.cat([x, x[-1:] + 1, x[-1:] + 2])
        # Times of the spare events are 0, and so are their samples'.
        return torch.cat([x, x.new_zeros(SPARE, *x.shape[1:])])


def trace(model: Servable, features: Features, device: torch.device) -> tuple[Any, list[Input]]:
    """The exported program, in plain torch ops, and the inputs that it reads (of `inputs_of`, those that it does not are left out).

    :raises RunError: `torch.export` cannot follow the model, or an op of a plug-in is left in it.
    :raises ConfigError: a feature whose name `torch.export` cannot write.
    """
    inputs = inputs_of(features, model.table_set)
    quoted = next((i.name for i in inputs if "'" in i.name or '"' in i.name), None)
    if quoted is not None:
        raise ConfigError(
            "torch.export takes no names with quotes",
            where=f"features.{quoted}",
            fix='call the feature something else, with column = "..." for the name in the data, and train again',
        )
    program = _traced(Serving(model, features, inputs), device)
    user = program.graph_signature.user_inputs
    read = {node.name for node in program.graph.nodes if node.op == "placeholder" and node.users}
    used = [i for i, name in zip(inputs, user) if name in read]
    # A history's offsets and length belong to each other, and tell how many events there are.
    wanted = [i for i in inputs if i in used or (i.rows in ("offsets", "longest") and any(u.history == i.history for u in used))]
    if wanted != inputs:
        program = _traced(Serving(model, features, wanted), device)
    left = sorted({str(n.target) for n in program.graph.nodes if n.op == "call_function" and not _plain(n.target)})
    if left:
        raise RunError(
            f"the model cannot be exported: {', '.join(left)} is not an op of torch", where="model", fix="build the model from gem_core.ops"
        )
    return program, wanted


def _plain(target: Any) -> bool:
    return not isinstance(target, torch._ops.OpOverload) or target.namespace in ("aten", "prim", "prims")


def _traced(serving: Serving, device: torch.device) -> Any:
    example = _example(serving.inputs, device)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's own, of its own pytrees
            program = torch.export.export(serving, (example,), dynamic_shapes=(_dynamic(serving.inputs),), strict=False)
            return program.run_decompositions(traceable.table())
    except MemoryError:
        raise
    except Exception as error:
        raise RunError(
            f"torch.export cannot follow the model: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            where=f"torch {torch.__version__}",
            fix="--debug shows where; a model must not branch on values or sizes after its look-ups",
        ) from error


def _dynamic(inputs: list[Input]) -> dict[str, Any]:
    samples = torch.export.Dim("samples", min=0)
    sizes: dict[tuple[str, str | None], Any] = {}
    for i in inputs:
        key = (i.rows, i.history)
        if i.rows == "samples":
            sizes[key] = samples
        elif i.rows == "offsets":
            sizes[key] = samples + 1
        elif key not in sizes:
            # Names of dimensions are identifiers; histories may be called anything.
            sizes[key] = torch.export.Dim(f"{i.rows}_{len(sizes)}", min=0)
    return {i.name: {0: sizes[i.rows, i.history]} for i in inputs}


def _example(inputs: list[Input], device: torch.device) -> dict[str, Tensor]:
    """Four samples, one of them without events; no two sizes alike, since export takes equal ones for one."""
    made: dict[str, Tensor] = {}
    lengths: dict[str, list[int]] = {}
    for i in inputs:
        if i.history is not None and i.history not in lengths:
            lengths[i.history] = [3, 0, 4 + len(lengths), 7 + 3 * len(lengths)]
    for i in inputs:
        own = lengths.get(i.history or "", [])
        n = {"samples": 4, "offsets": 5, "events": sum(own), "longest": max(own, default=0) + 2}[i.rows]
        if i.rows == "offsets":
            made[i.name] = torch.tensor([0, *own], device=device).cumsum(0)
        elif i.dtype == "int64":
            made[i.name] = torch.arange(n, device=device)
        else:
            made[i.name] = torch.randn(n, *i.shape, device=device)
    return made
