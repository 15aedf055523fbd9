"""Serves a folder of ``gemrec export`` with torch, nothing else: rows of columns in, probabilities or items out.

    python serve.py PACKAGE < rows.jsonl > scores.jsonl

A row is an object with the columns that training read: numbers, text, lists; times as integers in the units that manifest.json states.
A list without values is [], since null is a missing value: its default, or refused.
Everything that training decided about columns (hashes, vocabularies, scaling, longest histories) is read from manifest.json.
"""

from __future__ import annotations

import bisect
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

Row = dict[str, Any]
MASK, GOLDEN = (1 << 64) - 1, 0x9E3779B97F4A7C15
BATCH = 256
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
KINDS = {"edges": (int, float), "hash": (int, str, bytes), "cross": tuple, "vocabulary": (int, str), "id": int}
LATEST = 7_258_118_400  # seconds until 2200
UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


class Refused(ValueError):
    """A value that the features do not allow."""


class Package:
    """The exported model. ``predict`` for ranking, ``retrieve`` for retrieval."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.manifest = json.loads((self.folder / "manifest.json").read_text(encoding="utf-8"))
        if self.manifest["format"] != 1:
            raise ValueError(f"{folder}: format {self.manifest['format']}, this script reads 1")
        self.program = torch.export.load(self.folder / self.manifest["program"]["file"]).module()
        self.device = torch.device(self.manifest["program"]["device"])
        self.inputs = self.manifest["program"]["inputs"]
        self.tables = {name: self._tensor(t["file"], t["tensor"]) for name, t in self.manifest["tables"].items()}
        self.items = self._tensor(self.manifest["items"]["file"], "items") if self.manifest["items"] else None
        words = json.loads((self.folder / "vocabularies.json").read_text(encoding="utf-8")) if self.manifest["vocabularies"] else {}
        self.places = {table: {value: 1 + i for i, value in enumerate(values)} for table, values in words.items()}
        self.features = self.manifest["features"]

    def _tensor(self, file: str, name: str) -> torch.Tensor:
        if not file.endswith(".safetensors"):
            raise ValueError(f"{file}: this script reads safetensors; export with --tables safetensors")
        path = self.folder / file
        with open(path, "rb") as opened:  # safetensors: the length of a JSON header, the header, the values
            length = int.from_bytes(opened.read(8), "little")
            entry = json.loads(opened.read(length))[name]
        start, end = (8 + length + at for at in entry["data_offsets"])
        raw = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)[start:end]
        return raw.clone().view(DTYPES[entry["dtype"]]).reshape(entry["shape"]).float().to(self.device)

    @torch.no_grad()
    def run(self, rows: list[Row]) -> torch.Tensor:
        """The program's output, a line a row. Rows with histories of like lengths are computed together: the program pads them."""
        if not rows:
            return torch.empty(0, len(self.manifest["outputs"]))
        columns = [next(f["column"] or n for n, f in s["fields"].items() if f["gap"] is None) for s in self.features["sequences"].values()]
        order = sorted(range(len(rows)), key=lambda i: sum(len(_list(rows[i], c)) for c in columns))
        parts = [self.program(self.tensors([rows[i] for i in order[at : at + BATCH]])).cpu() for at in range(0, len(rows), BATCH)]
        found = torch.cat(parts)
        return torch.empty_like(found).index_copy_(0, torch.tensor(order), found)

    def predict(self, rows: list[Row]) -> list[dict[str, float]]:
        """Probability of each task, a dictionary a row."""
        return [dict(zip(self.manifest["outputs"], p)) for p in torch.sigmoid(self.run(rows).double()).tolist()]

    def retrieve(self, rows: list[Row], k: int = 10) -> list[list[int]]:
        """Ids of the ``k`` items with the highest scores, a list a row."""
        scores = self.run(rows).to(self.device) @ self.items.T
        if self.manifest["items"]["pad"] is not None:
            scores[:, self.manifest["items"]["pad"]] = -torch.inf
        return scores.topk(k).indices.tolist()

    # --- rows to the program's inputs ---

    def tensors(self, rows: list[Row]) -> dict[str, torch.Tensor]:
        """The dictionary that the program takes."""
        f = self.features
        histories = {name: [self._events(row, spec) for row in rows] for name, spec in f["sequences"].items()}
        made: dict[str, torch.Tensor] = {}
        for i in self.inputs:
            name, history = i["name"], i["history"]
            kind, _, rest = name.partition(".")
            if kind == "dense":
                made[name] = torch.tensor([[_number(row, n, s) for n, s in f["dense"].items()] for row in rows])
            elif kind == "timestamps":
                made[name] = torch.tensor([self._time(row) for row in rows])
            elif kind == "vectors":
                spec = f["vectors"][rest]
                made[name] = torch.tensor([_vector(row, spec["column"] or rest, spec["dim"]) for row in rows], dtype=torch.float32)
            elif kind == "sparse":
                made[name] = self._bags(name, [self._bag(row, rest) for row in rows], i["table"], i["pooling"])
            elif i["rows"] == "offsets":
                made[name] = torch.tensor([0, *(len(events) for events in histories[history])]).cumsum(0)
            elif i["rows"] == "longest":
                made[name] = torch.arange(max((len(events) for events in histories[history]), default=0))
            elif name.endswith(".timestamps"):
                made[name] = torch.tensor(
                    [event[f["sequences"][history]["timestamps"]] for events in histories[history] for event in events]
                )
                made[name] = made[name].long()
            else:
                made[name] = self._field(i, [event for events in histories[history] for event in events])
        return {name: tensor.to(self.device) for name, tensor in made.items()}

    def _events(self, row: Row, spec: dict[str, Any]) -> list[Row]:
        """The events of a history that training would keep, oldest first, each with its columns and time gaps."""
        fields = spec["fields"]
        columns = [f["column"] or n for n, f in fields.items() if f["gap"] is None] + ([spec["timestamps"]] if spec["timestamps"] else [])
        lists = [_list(row, c) for c in columns]
        if len({len(values) for values in lists}) > 1:
            raise Refused(f"the lists of one history have different lengths: {dict(zip(columns, map(len, lists)))}")
        events = [dict(zip(columns, values)) for values in zip(*lists)][spec["drop_first"] :]
        times = spec["timestamps"]
        for event in events if times else ():
            _moment(times, event[times], spec["time_unit"])
        if times and any(a[times] > b[times] for a, b in zip(events, events[1:])) and spec["order"] != "trust":
            if spec["order"] == "error":
                raise Refused("the times of a history decrease")
            events.sort(key=lambda event: event[times])
        gaps = {f["gap"] for f in fields.values()}
        for before, event in zip([None, *events], events):
            if "previous" in gaps:
                event["gap.previous"] = 0 if before is None else event[times] - before[times]
            if "sample" in gaps:
                have, want = UNITS[self.features["timestamp_unit"]], UNITS[spec["time_unit"]]
                event["gap.sample"] = self._time(row) * want // have - event[times]
        return events[-spec["max_length"] :]

    def _field(self, i: dict[str, Any], events: list[Row]) -> torch.Tensor:
        name = i["name"].rsplit(".", 1)[-1]
        spec = self.features["sequences"][i["history"]]["fields"][name]
        column = f"gap.{spec['gap']}" if spec["gap"] else spec["column"] or name
        if spec["kind"] == "float":
            return torch.tensor([_number(event, column, {**spec, "column": None}) for event in events], dtype=torch.float32)
        if spec["kind"] == "vector":
            found = [_vector(event, column, i["shape"][0]) for event in events]
            return torch.tensor(found, dtype=torch.float32).reshape(len(events), *i["shape"])
        lists = self.features["ids"][i["name"]].get("lists")
        if lists or (lists is None and any(isinstance(event[column], list) for event in events)):
            return self._bags(i["name"], [(_list(event, column), None) for event in events], i["table"], i["pooling"])
        return F.embedding(self._ids(i["name"], [event[column] for event in events]), self.tables[i["table"]])

    def _bag(self, row: Row, name: str) -> tuple[list[Any], list[float] | None]:
        """The values of a sparse feature and their weights. In a column of lists a missing one is an empty one."""
        spec, lists = self.features["sparse"][name], self.features["ids"][f"sparse.{name}"].get("lists")
        if spec["cross"]:
            return [tuple(row.get(c) for c in spec["cross"])], None
        values = row.get(spec["column"] or name)
        weights = row.get(spec["weights"]) if spec["weights"] else None
        if lists and values is None:
            values = []
        single = not isinstance(values, list)
        if lists is not None and lists == single:
            raise Refused(f"{name}: {values!r}, where training read {'lists' if lists else 'single values'}")
        values, weights = ([values], [weights]) if single else (values, weights or [])
        last = slice(-spec["max_length"] if spec["max_length"] else None, None)
        if not spec["weights"]:
            return values[last], None
        if not isinstance(weights, list) or len(weights) != len(values):
            raise Refused(f"{spec['weights']}: not one weight for each value of {name}")
        if any(not isinstance(w, (int, float)) or not 0 <= w < math.inf for w in weights[last]):
            raise Refused(f"{spec['weights']}: a weight is missing, negative or not finite")
        return values[last], weights[last]

    def _bags(self, path: str, bags: list[tuple[list[Any], list[float] | None]], table: str, pooling: str) -> torch.Tensor:
        """One row a bag: the sum or (weighted) mean of its embeddings, zeros for an empty one."""
        ids = self._ids(path, [value for values, _ in bags for value in values])
        offsets = torch.tensor([0, *(len(values) for values, _ in bags)], device=self.device).cumsum(0)
        if all(weights is None for _, weights in bags):
            return F.embedding_bag(ids, self.tables[table], offsets, mode=pooling, include_last_offset=True)
        flat = [w for values, weights in bags for w in (weights if weights is not None else [1.0] * len(values))]
        weights = torch.tensor(flat, dtype=torch.float32, device=self.device)
        pooled = F.embedding_bag(ids, self.tables[table], offsets, mode="sum", per_sample_weights=weights, include_last_offset=True)
        if pooling == "sum":
            return pooled
        owner = torch.repeat_interleave(torch.arange(len(bags), device=self.device), offsets.diff())
        total = torch.zeros(len(bags), device=self.device).index_add_(0, owner, weights).unsqueeze(1)
        return pooled / total.where(total != 0, torch.ones_like(total))

    def _time(self, row: Row) -> int:
        name = self.features["timestamp"]
        return _moment(name, row.get(name), self.features["timestamp_unit"])

    # --- values to rows of tables ---

    def _ids(self, path: str, values: list[Any]) -> torch.Tensor:
        way = self.features["ids"][path]
        return torch.tensor([self._id(path, way, value) for value in values], dtype=torch.int64, device=self.device)

    def _id(self, path: str, way: dict[str, Any], value: Any) -> int:
        missing = any(v is None for v in value) if isinstance(value, tuple) else value is None
        if missing or (isinstance(value, float) and math.isnan(value)):
            if way["default"] is None:
                raise Refused(f"{path}: an id is missing, and the feature has no default")
            return int(way["default"])
        kind = way["way"]
        if not isinstance(value, KINDS[kind]):
            raise Refused(f"{path}: {value!r} is of a type that training did not read there")
        for one, holds in zip(value if kind == "cross" else (value,), way.get("holds") or ()):
            if isinstance(one, int) != (holds == "integers"):
                raise Refused(f"{path}: {one!r}, where training read {holds}: it would be another id")
        if kind == "edges":
            return bisect.bisect_right(way["edges"], value)
        if kind == "hash":
            return hash64(value, way["salt"]) % way["rows"]
        if kind == "cross":
            return mix(hash64(value[0], way["salt"]) ^ mix((hash64(value[1], way["salt"]) + GOLDEN) & MASK)) % way["rows"]
        if kind == "vocabulary":
            place = self.places[way["table"]].get(value)
            if place is not None:
                return place
            if way["policy"] == "default":
                return int(way["default"])
            raise Refused(f"{path}: {value!r} is not in the vocabulary")
        if 0 <= value < way["rows"]:
            return int(value)
        if way["policy"] == "clip":
            return int(min(max(value, 0), way["rows"] - 1))
        if way["policy"] == "default":
            return int(way["default"])
        raise Refused(f"{path}: the id {value} is outside [0, {way['rows']})")


def _number(row: Row, name: str, spec: dict[str, Any]) -> float:
    x = row.get(spec["column"] or name)
    default, policy, largest = spec["default"], spec["policy"], torch.finfo(torch.float32).max
    if not isinstance(x, (int, float, type(None))):
        raise Refused(f"{name}: {x!r} is no number")
    if x is None or math.isnan(x):
        if default is None:
            raise Refused(f"{name}: a value is missing, and the feature has no default")
        x = default
    if spec["clip"]:
        x = min(max(x, spec["clip"][0]), spec["clip"][1])
    low = -1.0 if spec["transform"] == "log1p" else -math.inf
    if not (math.isfinite(x) and x > low):
        if policy == "clip":
            x = min(max(x, 0.0 if low == -1.0 else -largest), largest)
        elif policy == "default" and default is not None:
            x = default
        else:
            raise Refused(f"{name}: the value {x} cannot be used")
    found = _scaled(x, spec)
    if abs(found) > largest:
        if policy == "clip":
            return math.copysign(largest, found)
        if policy != "default" or default is None:
            raise Refused(f"{name}: the value {x} is too large for float32")
        found = _scaled(default, spec)
    return found


def _scaled(x: float, spec: dict[str, Any]) -> float:
    return ((math.log1p(x) if spec["transform"] == "log1p" else x) - spec["mean"]) / spec["std"]


def _vector(row: Row, column: str, dim: int) -> list[float]:
    x = row.get(column)
    if not isinstance(x, list) or len(x) != dim or not all(isinstance(v, (int, float)) and math.isfinite(v) for v in x):
        raise Refused(f"{column}: no list of {dim} finite numbers")
    return x


def mix(x: int) -> int:
    """The finaliser of SplitMix64."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def hash64(value: int | str | bytes, salt: int) -> int:
    """The hash of training: integers in two's complement, text as UTF-8."""
    key = mix((salt + GOLDEN) & MASK)
    if isinstance(value, int):
        return mix(key ^ (value & MASK))
    data = value.encode() if isinstance(value, str) else value
    h = mix(key ^ (~len(data) & MASK))
    for i in range(0, len(data), 8):
        h = mix(h ^ int.from_bytes(data[i : i + 8], "little"))
    return h


def _moment(column: str, value: Any, unit: str) -> int:
    """A time as training counts it: another unit or text would make gaps of nonsense."""
    if not isinstance(value, int):
        raise Refused(f"{column}: {value!r} is no time in whole {unit}")
    if value > LATEST * UNITS[unit]:
        raise Refused(f"{column}: {value} lies after the year 2200; times are in whole {unit}")
    return value


def _list(row: Row, column: str) -> list[Any]:
    """Values of a history, empty where there is none."""
    values = row.get(column) or []
    if not isinstance(values, list):
        raise Refused(f"{column}: {values!r} is no list")
    return values


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python serve.py PACKAGE < rows.jsonl > scores.jsonl")
    try:
        package = Package(sys.argv[1])
    except OSError as error:
        sys.exit(f"this is no folder of gemrec export: {error}")
    rows = []
    for number, line in enumerate(sys.stdin, 1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                sys.exit(f"line {number} is no JSON: {error}")
            if not isinstance(row, dict):
                sys.exit(f"line {number} is no JSON object")
            rows.append((number, row))
    try:
        asked = [row for _, row in rows]
        found = package.predict(asked) if package.items is None else [{"items": items} for items in package.retrieve(asked)]
    except Refused:
        for number, row in rows:  # rows are computed together: this finds the one
            try:
                package.tensors([row])
            except Refused as error:
                sys.exit(f"line {number}: {error}")
        raise
    for scores in found:
        print(json.dumps(scores))


if __name__ == "__main__":
    main()
