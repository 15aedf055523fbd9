"""Propose a ``[features]`` table for Parquet files, as TOML that works as it is.

Names and statistics decide; the comments say what was seen, so that a wrong guess is found by reading. Nothing is guessed silently: a
column that is left out is named with the reason.
"""

from __future__ import annotations

import keyword
import re
import unicodedata
from collections.abc import Sequence as Items
from copy import deepcopy
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tomli_w
from numpy.typing import NDArray

from gem_core.config.features import Features
from gem_core.errors import DataError
from gem_core.sources.contract import TRUE_PROBABILITY
from gem_data.arrow import times, unit_of
from gem_data.files import DataFile, find_files
from gem_data.flat import PREFIX, TIME, USER
from gem_data.profile import Column, profile

_LABELS = ("label", "click", "clicked", "is_click", "is_clicked", "clk", "target", "y", "ctr")
_SECOND = (
    *("conversion", "converted", "is_conversion", "cvr", "purchase", "purchased", "is_purchase", "buy", "bought", "is_buy"),
    *("order", "ordered", "is_order", "install", "installed", "is_install"),
)
_GRADED = ("rating", "stars", "score")
_TIME = re.compile(r"(^|_)(timestamp|time|ts|datetime|date|event_time)s?$")
_SAMPLE = ("sample_id", "row_id", "impression_id", "request_id", "record_id")
_ROW = ("id", "uuid", "guid", "event_id", "log_id", "auction_id", "bid_id", "trace_id")
"""May number the rows; only statistics tell."""
_GROUP = ("user_id", "user", "uid", "userid", "member_id", "customer_id", "visitor_id")
_FOLDER_TIME = re.compile(r"(^|_)(day|date|dt|ds|hour|month|year|week|time|ts)(_|$)")
_SPLIT = ("split", "fold", "is_train", "is_test")
_HISTORY = re.compile(r"(^|_)(hist|history|seq|sequence|past|behaviou?r|events?|clicked|viewed|recent)(_|s?$)")
_NOISE = re.compile(
    r"^(hist|history|seq|sequence|past|user|clicked|viewed|recent|target|cand|candidate|ad)_|_(id|ids|list|hist|history|seq|sequence)$"
)
_ID = re.compile(
    r"(^|_)(id|ids|code|type|category|cat|cate|brand|zip|gender|os|device|country|city|region|hour|day|weekday|position|slot)s?$"
)
_GROWS = re.compile(r"(^|_)ids?$")
_AMOUNT = re.compile(r"(^|_)(price|cost|bid|amount|count|cnt|duration|dwell|budget|revenue|spend|balance)(_|s?$)")
_LONG_TEXT = 20
_HASHES = 2**53
"""Integers from here on are hashes, not amounts: a float64 does not tell them apart."""
_NUMBER = r"^[-+]?[$€£]?\s?\d{1,3}([,. ]\d{3})*([.,]\d+)?\s?[%$€£]?$"


def propose(path: Path, *, label: str | None = None, sample_rows: int = 100_000) -> str:
    """The text of a configuration with ``[data]``, ``[features]`` and the group of AUCs for the Parquet file or folder ``path``.

    :param label: the label column, where its name does not tell.
    :raises DataError: unreadable files or no rows, a ``label`` that is not there or holds no numbers, nothing that could be a label, or
        nothing that could be a feature.
    """
    files = find_files(path)
    if not any(sum(f.rows) for f in files):
        raise DataError("the files hold no rows", where=str(path), fix="check the path and how the files were written")
    proposal = _Proposal(files, profile(files, sample_rows), label)
    features = Features.model_validate(proposal.table())
    assert features.labels  # _find_labels
    if not (features.sparse or features.dense or features.vectors):
        why = "; ".join(f"{name!r} {reason}" for name, reason in proposal.left_out.items()) or "there is only the label"
        raise DataError(
            f"no column could be a feature of the sample itself: {why}",
            where=str(path),
            fix="write columns that say what was shown, to whom and where",
        )
    splits = _splits(path, files, features, proposal)
    head = [
        f"# Proposed by 'gemrec data inspect': {len(files)} file(s), {sum(sum(f.rows) for f in files):,} rows. Read it before you train.",
        "# A column that is known only after the impression (a purchase, a time of watching) must be a label or go: as a feature it leaks.",
        *(_comment(f"left out: {name}: {why}") for name, why in proposal.left_out.items()),
        *proposal.growing(),
        "",
    ]
    evaluation = {"eval": {"group": proposal.group}} if proposal.group else {}
    body = tomli_w.dumps({"data": {"source": "parquet", "parquet": splits}, **evaluation})
    return "\n".join([*head, body, proposal.text(), *_model(features)])


def _model(features: Features) -> list[str]:
    """What the presets' models ask of histories and these do not have."""
    event: dict[str, Any] = {}
    without = [
        ("target", "compare", False, "no list of its events is of a thing that the sample has too, so there is nothing to compare"),
        ("timestamps", "time_buckets", 0, "its events have no times"),
    ]
    notes = []
    for name, sequence in features.sequences.items():
        for asked, key, value, why in without:
            if not getattr(sequence, asked):
                event[key] = value
                others = [other for other, spec in features.sequences.items() if getattr(spec, asked)]
                notes.append(
                    _comment(f"{name}: {why}" + (f"; one setting for all, so {', '.join(others)} goes without too" if others else ""))
                )
    return ["\n".join(notes), tomli_w.dumps({"model": {"sequence": {"event": event}}})] if event else []


def _comment(text: str) -> str:
    """A line of TOML, whatever characters the names of columns have."""
    return "# " + re.sub(r"[\x00-\x1f\x7f\u0085\u2028\u2029]", " ", text)


class _Proposal:
    def __init__(self, files: list[DataFile], columns: list[Column], label: str | None) -> None:
        self.columns = {c.name: c for c in columns}
        self.left_out: dict[str, str] = {}
        self.top: dict[str, Any] = {}
        self.sections: list[tuple[str, dict[str, Any]]] = []
        self._free = {name: c for name, c in self.columns.items() if c.kind == "other" or c.nulls < len(c.sample)}
        self.left_out |= dict.fromkeys(self.columns.keys() - self._free.keys(), "holds no value")
        self._shared: dict[str, int] = {}
        self._folders = {name for name, _ in files[0].partition}
        self.keep: str | None = None
        self.time: Column | None = None
        told = (files[0].schema.metadata or {}).get(TIME, b"").decode()
        self._times = {told, PREFIX + told} if told else set()
        self.group: str | None = None
        self._find_labels(label, files)
        self._find_special(files)
        histories = self._find_histories()
        events = {key for _, part in histories for g in part["sequences"].values() for key, f in g["fields"].items() if "rows" in f}
        scalars = self._scalars(events)
        bags = self._bags()
        self._tables(scalars, histories)
        if self.group not in (*self.top.get("columns", ()), *(name for _, part in scalars for name in part.get("sparse", {}))):
            self.group = None
        for comment, part in [*scalars, *bags, *histories]:
            self.sections.append((comment, part))
        self.sections += self.label_sections

    def growing(self) -> list[str]:
        """A line about ids that tomorrow's log may exceed: their tables have a row for each number up to the largest seen."""
        names = [
            name for name, spec in self._specs() if "hash" not in spec and self.columns[name].kind == "int" and _GROWS.search(_words(name))
        ]
        if not names:
            return []
        return [_comment(f"{', '.join(names)}: a larger id than any here will be refused; where new ones come, set hash = true.")]

    def _specs(self) -> list[tuple[str, dict[str, Any]]]:
        return [pair for _, part in self.sections for pair in part.get("sparse", {}).items()]

    def table(self) -> dict[str, Any]:
        merged: dict[str, Any] = dict(self.top)
        for _, part in self.sections:
            _merge(merged, deepcopy(part))
        return merged

    def text(self) -> str:
        parts = [tomli_w.dumps({"features": self.top})] if self.top else []
        for comment, part in self.sections:
            parts.append(f"{_comment(comment)}\n" + tomli_w.dumps({"features": part}))
        return "\n".join(parts)

    def _take(self, name: str) -> Column:
        return self._free.pop(name)

    # --- labels, times, ids ---------------------------------------------------------------------------------------------------------

    def _find_labels(self, asked: str | None, files: list[DataFile]) -> None:
        where = files[0].path
        if asked is not None and asked not in self._free:
            why = f"the column {asked!r} {self.left_out[asked]}" if asked in self.left_out else f"there is no column {asked!r}"
            raise DataError(why, where=where, fix=f"--label must be one of {', '.join(self._free)}")
        if asked is not None and (self._free[asked].depth or self._free[asked].kind not in ("int", "float", "bool")):
            raise DataError(
                f"the column {asked!r} has the type {self._free[asked].type}, a label is one number a row",
                where=where,
                fix="name a column of 0 and 1, or of graded numbers",
            )
        binary = [c.name for c in self._free.values() if _binary(c)]
        first = asked or next((n for wanted in _LABELS for n in binary if n.lower() == wanted), None)
        second = next((n for wanted in _SECOND for n in binary if n.lower() == wanted and n != first), None)
        if second is None and first is not None and _binary(self._free[first]):
            second = next((c.name for c in self._free.values() if c.name.lower() in _SECOND and _binary_where(c, self._free[first])), None)
        graded = next(
            (c for n in _GRADED for c in self._free.values() if c.name.lower() == n and c.kind in ("int", "float") and not c.depth), None
        )
        if first is None:
            first, second = second, None
        self.label_sections: list[tuple[str, dict[str, Any]]] = []
        if first is None and graded is not None:
            at = float(np.ceil(graded.mean))
            self._label("ctr", self._take(graded.name), {"threshold": at}, f"{graded.low} to {graded.high}, mean {graded.mean:.2f}")
            return
        if first is None:
            called = [
                f"{c.name!r} is called like one, but {_unlike(c)}" for c in self._free.values() if c.name.lower() in (*_LABELS, *_SECOND)
            ]
            raise DataError(
                "; ".join(["no column looks like a label", *called]),
                where=where,
                fix="write the label as 0 and 1, or name it: --label COLUMN (a column of 0 and 1, or of graded numbers; rows without it "
                "are then left out by a filter)",
            )
        column = self._take(first)
        seen = f"mean {_mean(column):.4f} of {column.rows:,} rows"
        if column.nulls:
            if column.sample.null_count < column.nulls:
                what = f"the label is NaN in {column.nulls - column.sample.null_count:,} of {column.rows:,} rows"
                raise DataError(what, where=f"{where}, column {first!r}", fix="write null for what is not known, or remove these rows")
            self.keep = f"{_in_filter(first)} is not None"
            seen += f"; {column.nulls:,} without it are left out by the filters of [data.parquet]"
        extra: dict[str, Any] = {} if _binary(replace(column, nulls=0)) else {"threshold": float(np.ceil(column.mean))}
        self._label("ctr", column, extra, seen)
        if second is not None:
            self._label("cvr", self._take(second), {"mask": first}, f"mean {_mean(self.columns[second]):.4f}; counts where {first} is 1")

    def _label(self, task: str, column: Column, extra: dict[str, Any], seen: str) -> None:
        task = column.name if task in self.columns else task  # a column of that name may be a feature
        spec: dict[str, Any] = {**({} if column.name == task else {"column": column.name}), **extra}
        self.label_sections.append((f"{column.name}: {seen}", {"labels": {task: spec}}))

    def _find_special(self, files: list[DataFile]) -> None:
        for column in list(self._free.values()):
            name = column.name.lower()
            if name in _SPLIT and not column.depth:
                self._take(column.name)
                self.left_out[column.name] = "looks like a split; use it in train_filter, eval_filter and test_filter"
            elif "sample_id" not in self.top and (
                (name in _SAMPLE and column.kind in ("int", "text") and not column.depth and not column.nulls)
                or (name in _ROW and _numbers_rows(column))
            ):
                self.top["sample_id"] = self._take(column.name).name
            elif column.name in self._folders and (_FOLDER_TIME.search(name) or _iso(column)):
                self._take(column.name)
                self.left_out[column.name] = "a folder's name that tells the time; tomorrow's is another, so use it in filters only"
            elif _iso(column) and not column.depth:
                self._take(column.name)
                self.left_out[column.name] = "times as text; store them as timestamps (pyarrow: column.cast('timestamp[us]'))"
            elif (column.child or name).lower() in (*_LABELS, *_SECOND) and _binary(replace(column, nulls=0)):
                self._take(column.name)
                self.left_out[column.name] = (
                    f"called like a label too, so it would tell the answer; --label {column.name} takes it for the label"
                )
            elif name in _GRADED and column.kind in ("int", "float"):
                self._take(column.name)
                self.left_out[column.name] = "looks like another form of the label"
            elif self.time is None and not column.depth and not column.nulls and column.child is None and self._is_time(column):
                self.time = self._take(column.name)
                self.top["timestamp"] = column.name
                if column.kind == "int" and _unit(column) != "s":
                    self.top["timestamp_unit"] = _unit(column)
        known = [self._take(n).name for n in list(self._free) if n.startswith(TRUE_PROBABILITY)]
        told = (files[0].schema.metadata or {}).get(USER, b"").decode()
        scalar = [name for name, column in self._free.items() if column.depth == 0]
        named = [name for wanted in _GROUP for name in scalar if name.lower() == wanted]
        self.group = next((name for name in (told, *named) if name in scalar), None)
        numbers = [self.group] if self.group and self._free[self.group].kind == "int" else []
        if numbers or known:
            self.top["columns"] = [*numbers, *known]

    def _is_time(self, column: Column) -> bool:
        return (column.name in self._times and column.kind in ("int", "time")) or _is_time(column)

    # --- features ---------------------------------------------------------------------------------------------------------------------

    def _scalars(self, events: set[str]) -> list[tuple[str, dict[str, Any]]]:
        found = []
        for column in [c for c in self._free.values() if c.depth == 0]:
            self._take(column.name)
            part = self._scalar(column, _core(column.name) in events)
            if part is not None:
                found.append(part)
        return found

    def _scalar(self, c: Column, event: bool) -> tuple[str, dict[str, Any]] | None:
        if c.kind in ("other", "time"):
            self.left_out[c.name] = f"type {c.type}" if c.kind == "other" else "a second time column"
            return None
        if c.kind == "text":
            widths = pc.mean(pc.binary_length(c.sample)).as_py() or 0
            if widths > _LONG_TEXT and c.distinct > 100 and _spaced(c):
                self.left_out[c.name] = f"free text ({widths:.0f} bytes on average)"
                return None
        if c.distinct <= 1:
            self.left_out[c.name] = "holds one value only"
            return None
        if c.kind == "float" and c.low is None:
            self.left_out[c.name] = "holds no finite number"
            return None
        if c.kind == "float" or (c.kind == "int" and not event and not _id_like(c)):
            seen = f"{c.name}: {c.low:g} to {c.high:g}, {c.nulls:,} missing of {c.rows:,}"
            if c.kind == "float" and _ID.search(_words(c.name)) and _whole(c):
                seen += "; whole numbers that are stored as floats: if they are ids, store them as integers"
            return seen, {"dense": {c.name: _dense(c)}}
        if _numbers_rows(c) and not event:
            self.left_out[c.name] = "has another value in every row: nothing can be learned from it"
            return None
        seen = f"{c.name}: about {c.distinct:,} values in {c.rows:,} rows, {c.nulls:,} missing"
        if _written_numbers(c):
            seen += f"; numbers as text, such as {c.sample.drop_null()[0].as_py()!r}: as ids they have no order, so store them as numbers"
        return seen, {"sparse": {c.name: _ids(c)}}

    def _find_histories(self) -> list[tuple[str, dict[str, Any]]]:
        """Groups of list columns with the same lengths; a group is a history by its name or its lengths."""
        groups: list[list[Column]] = []
        found: list[tuple[str, dict[str, Any]]] = []
        for column in [c for c in self._free.values() if c.depth and c.offsets is not None]:
            if column.depth == 1 and column.kind == "float" and column.width is not None:
                continue
            same = next((g for g in groups if np.array_equal(g[0].ends, column.ends)), None)
            groups.append([column]) if same is None else same.append(column)
        for group in groups:
            ids = [c for c in group if c.kind in ("int", "text", "bool") and not self._is_time(c)]
            named = any(_HISTORY.search(_words(c.name)) for c in group)
            if ids and (named or len(group) > 1 or group[0].lengths.mean() > 20):
                names = ("history" if i == 1 else f"history{i}" for i in count(len(found) + 1))
                taken = {*self.columns, *(name for _, part in found for name in part["sequences"])}
                found.append(self._history(group, next(name for name in names if name not in taken)))
        return found

    def _history(self, group: list[Column], name: str) -> tuple[str, dict[str, Any]]:
        spec: dict[str, Any] = {"fields": {}}
        notes = [f"{', '.join(c.name for c in group)}: {group[0].quantiles()}"]
        singles = {_core(c.name) for c in self._free.values() if not c.depth}
        offsets = group[0].ends
        first = offsets[:-1][np.diff(offsets) > 0]
        for column in group:
            self._take(column.name)
            if self._is_time(column) and "timestamps" not in spec and column.depth == 1:
                spec["timestamps"] = column.name
                unit, stamps = _unit(column), times(column.sample, _unit(column))[0]
                if unit != "s":
                    spec["time_unit"] = unit
                falls = np.flatnonzero(np.diff(stamps) < 0) + 1
                if not np.isin(falls, offsets).all():
                    spec["order"] = "sort"
                    notes.append("some are out of order and will be sorted")
                continue
            if column.kind in ("other", "time") or (column.kind == "float" and column.depth == 2 and column.width is None):
                self.left_out[column.name] = f"type {column.type}"
                continue
            if _iso(column):
                self.left_out[column.name] = "times as text; store them as timestamps (pyarrow: column.cast(pa.list_(pa.timestamp('us'))))"
                continue
            field: dict[str, Any] = {"column": column.name}
            if column.kind == "float":
                field |= {"kind": "vector", "dim": column.width} if column.depth == 2 else {"kind": "float", **_scale(column)}
                if column.nulls:
                    field["default"] = 0
            else:
                field |= _ids(column)
            key = _core(column.name) if column.child is None or _core(column.name) in singles else _core(column.child)
            spec["fields"][column.name if key in spec["fields"] else key] = field
            zeros = column.kind == "int" and column.depth == 1 and first.size
            if zeros and bool((_values(column)[first] == 0).all()) and int((_values(column) == 0).sum()) == first.size:
                spec["drop_first"] = 1
                notes.append("the first event is always 0, a pad, and is dropped")
        longest = int(group[0].lengths.max(initial=1))
        spec["max_length"] = min(4096, 1 << max(4, int(np.ceil(np.log2(longest + 1)))))
        return "; ".join(notes), {"sequences": {name: spec}}

    def _bags(self) -> list[tuple[str, dict[str, Any]]]:
        found: list[tuple[str, dict[str, Any]]] = []
        for c in list(self._free.values()):
            self._take(c.name)
            if c.depth == 1 and c.kind == "float" and c.infinite:
                self.left_out[c.name] = "holds infinite numbers"
            elif c.depth == 1 and c.kind == "float" and c.width is not None and not c.nulls:
                found.append((f"{c.name}: vectors of {c.width} numbers", {"vectors": {c.name: {"dim": c.width}}}))
            elif c.depth == 1 and c.kind in ("int", "text", "bool"):
                found.append((f"{c.name}: {c.quantiles()}", {"sparse": {c.name: {**_ids(c), "pooling": "mean"}}}))
            else:
                self.left_out[c.name] = f"type {c.type}"
        return found

    def _tables(self, scalars: Items[tuple[str, dict[str, Any]]], histories: Items[tuple[str, dict[str, Any]]]) -> None:
        """Event fields and sparse features of one kind of thing share a table, and the field's target is the feature."""
        named = {n: spec for _, part in scalars for n, spec in part.get("sparse", {}).items()}
        single = {_core(n): (n, spec) for n, spec in named.items()}
        for _, part in histories:
            for group in part["sequences"].values():
                for key, field in group["fields"].items():
                    own = field["column"].removeprefix(PREFIX)  # as `gemrec data import` names the column's history
                    name, spec = (own, named[own]) if own in named else single.get(key, ("", {}))
                    if not name or "rows" not in field or "table" in spec or spec.get("hash") != field.get("hash"):
                        continue
                    rows = max(spec.pop("rows", self._shared.get(key, 0)), field.pop("rows"))
                    self._shared[key] = max(rows, self._shared.get(key, 0))
                    spec["table"] = field["table"] = key
                    group.setdefault("target", {})[key] = name
        if self._shared:
            tables: dict[str, Any] = {"tables": {k: {"rows": r} for k, r in self._shared.items()}}
            self.sections.append(("tables that a feature and a history share", tables))


def _splits(path: Path, files: list[DataFile], features: Features, proposal: _Proposal) -> dict[str, Any]:
    """Train, eval and test: by the files' names, else by time, else the same rows for all."""
    named: dict[str, list[str]] = {}
    for split, words in {"train": ("train",), "eval": ("valid", "validation", "val", "eval", "dev"), "test": ("test",)}.items():
        exact = sorted(f.path for f in files if Path(f.path).stem.lower() in words)
        named[split] = exact or sorted(f.path for f in files if Path(f.path).name.lower().startswith(words))
    keep = [proposal.keep] if proposal.keep else []
    if named["train"] and named["eval"]:
        found = {split: paths for split, paths in named.items() if paths}
        return {**found, **{f"{split}_filter": text for split in found for text in keep}}
    whole = str(path)
    both = {"train": [whole], "eval": [whole], **{f"{split}_filter": text for split in ("train", "eval") for text in keep}}
    if proposal.time is None:
        return both
    column = proposal.time
    stamps = times(column.sample, features.timestamp_unit)[0]
    cut = int(np.quantile(stamps, 0.9))
    if cut <= stamps.min():  # nothing would be left to train on
        return both
    name = _in_filter(column.name)
    value = str(cut) if column.kind == "int" else repr(str(pa.scalar(cut, pa.timestamp(features.timestamp_unit)).as_py()))
    cuts = {"train_filter": f"{name} < {value}", "eval_filter": f"{name} >= {value}"}
    return {**both, **{key: " and ".join([*keep, text]) for key, text in cuts.items()}}


def _in_filter(name: str) -> str:
    """A column as a filter names it; Python, which parses filters, keeps some words and writes some letters in another way."""
    plain = name.isidentifier() and not keyword.iskeyword(name) and unicodedata.normalize("NFKC", name) == name
    return name if plain else f"col({name!r})"


# --- what a column looks like -------------------------------------------------------------------------------------------------------------


def _binary(c: Column) -> bool:
    return not c.depth and not c.nulls and (c.kind == "bool" or (c.kind in ("int", "float") and c.low in (0, 1) and c.high in (0, 1)))


def _binary_where(c: Column, first: Column) -> bool:
    """0 and 1 where ``first`` is 1, null or the same elsewhere."""
    if (
        c.depth
        or not c.nulls
        or c.kind not in ("int", "float", "bool")
        or (c.kind != "bool" and (c.low not in (0, 1) or c.high not in (0, 1)))
    ):
        return False
    clicked = pc.equal(first.sample.cast(pa.float64()), 1.0) if first.kind != "bool" else first.sample
    return bool(c.sample.filter(clicked).null_count == 0)


def _unlike(c: Column) -> str:
    """Why a column is no label."""
    if c.depth:
        return "it holds lists"
    if c.nulls:
        return f"{c.nulls:,} of {c.rows:,} rows miss it"
    return f"it holds {c.low:g} to {c.high:g}" if c.kind in ("int", "float") and c.low is not None else f"it is of type {c.type}"


def _spaced(c: Column) -> bool:
    """Words: identifiers (UUIDs, digests, URLs) have no spaces, however long they are."""
    return bool((pc.mean(pc.match_substring(c.sample.cast(pa.large_binary()), b" ").cast(pa.float64())).as_py() or 0) > 0.5)


def _whole(c: Column) -> bool:
    """Ids become floats where a program (pandas) has no integers with gaps."""
    some = c.sample.cast(pa.float64()).drop_null()
    return bool(pc.all(pc.equal(some, pc.floor(some))).as_py())


def _written_numbers(c: Column) -> bool:
    """Text such as 1,250.00 or 7,5, which no reader takes for a number."""
    if c.kind != "text" or not (pa.types.is_string(c.sample.type) or pa.types.is_large_string(c.sample.type)):
        return False
    some = c.sample.drop_null().slice(0, 1000)
    digits = pc.match_substring_regex(some, r"^\d+$")
    return bool(len(some)) and bool(pc.all(pc.match_substring_regex(some, _NUMBER)).as_py()) and not pc.any(digits).as_py()


def _numbers_rows(c: Column) -> bool:
    return c.kind in ("int", "text") and not c.depth and not c.nulls and c.rows >= 1000 and c.distinct == c.rows


def _iso(c: Column) -> bool:
    """Text that says times."""
    if c.kind != "text" or not (pa.types.is_string(c.sample.type) or pa.types.is_large_string(c.sample.type)):
        return False
    some = c.sample.drop_null().slice(0, 100)
    for kind in (pa.timestamp("us"), pa.timestamp("us", "UTC")):
        try:
            return bool(len(some.cast(kind)))
        except pa.ArrowInvalid:
            continue
    return False


def _mean(c: Column) -> float:
    return c.mean if c.kind != "bool" else float(pc.mean(c.sample.cast(pa.uint8())).as_py())


def _is_time(c: Column) -> bool:
    return c.kind == "time" or (c.kind == "int" and bool(_TIME.search(_words(c.name))) and (c.low or 0) > 1e8)


def _unit(c: Column) -> str:
    return "s" if c.kind == "time" else unit_of(c.high or 0)


def _id_like(c: Column) -> bool:
    if max(abs(c.low or 0), abs(c.high or 0)) >= _HASHES:
        return True
    if (c.low is not None and c.low < 0) or _AMOUNT.search(c.name.lower()):
        return False
    if _ID.search(c.name.lower()) or c.distinct <= min(1000, max(20, c.rows // 10)):
        return True
    # Counts and amounts crowd near zero; ids fill their range.
    return bool(c.distinct > 0.3 * (c.high - c.low + 1) and c.mean > 0.25 * c.high)


def _ids(c: Column) -> dict[str, Any]:
    if c.kind == "bool":
        return {"rows": 2}
    spread = c.kind == "int" and c.low is not None and (c.low < 0 or c.high >= max(10_000_000, 1000 * c.distinct))
    if c.kind == "text" or spread:
        spec: dict[str, Any] = {"rows": 1 << int(np.ceil(np.log2(max(1024, 8 * c.distinct)))), "hash": True}
    else:
        spec = {"rows": int(c.high) + 1}
    return {**spec, **({"default": 0} if c.nulls else {})}


def _dense(c: Column) -> dict[str, Any]:
    return {**_scale(c), **({"default": 0.0 if c.low == c.high else round(c.mean, 6)} if c.nulls else {})}


def _scale(c: Column) -> dict[str, Any]:
    if c.infinite:
        return {"clip": [c.low or 0.0, c.high or 0.0], **_scale(replace(c, infinite=False))}
    if c.low is not None and c.low >= 0 and c.mean and c.high > 50 * c.mean:
        return {"transform": "log1p"}
    return {"mean": round(c.mean, 6), "std": round(c.std, 6)} if c.std > 1e-6 else {}


def _core(name: str) -> str:
    """The name without what marks a history or an id: hist_item_ids and item_id are both item."""
    core, before = _words(name), ""
    while core != before:
        before, core = core, _NOISE.sub("", core)
    several = core.endswith("s") and not core.endswith(("ss", "_os")) and len(core) > 3
    return (core[:-1] if several else core) or name.lower()


def _words(name: str) -> str:
    return name.lower().replace(".", "_")


def _values(c: Column) -> NDArray[Any]:
    values: NDArray[Any] = pc.fill_null(c.sample, 0).to_numpy(zero_copy_only=False)
    return values


def _merge(into: dict[str, Any], part: dict[str, Any]) -> None:
    for key, value in part.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value
