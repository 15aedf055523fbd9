"""Interaction sequences as text, for retrieval of the next item: one Parquet row a user and split, by leave-one-out.

Lines are ``user item`` (one interaction, in the order of time) or ``user item item ...`` (a user's items, oldest first), fields apart by
blanks or tabs, plain or gzip. A byte-order mark is dropped. Ids that are integers in [0, 2^31) stay as they are, and the Parquet form of
an id that is not is its place by first appearance, from 1; the names (UTF-8, or Latin-1 where they are no UTF-8) are then in
``users.parquet`` or ``items.parquet``. Item 0 at the front of sequences only is padding and is dropped; where 0 stands elsewhere it is an
item. Users with fewer than ``min_length`` items are left out; the result counts them.

A row holds ``user_id``, ``item_ids`` (the items before) and ``next_item``. The last item of each user is the test split's, the
second-last the valid split's; a user's training row ends before what is held out of that user. Attributes of items become
``item_attributes``, a list for each item of ``item_ids``; attributes of users become columns.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from gem_core.config.features import EventField, Features, NextItem, Sequence, Sparse, Table
from gem_core.errors import ConfigError, DataError
from gem_data.arrow import lists, plain
from gem_data.writer import config_toml, write_config, write_parquet

Ints = NDArray[np.int64]
ROW_GROUP = 8_192
HASHED = 1_024
"""Rows of the table of a user attribute that is text."""


@dataclass(frozen=True)
class Converted:
    """Rows of each file by its name; ``users`` and ``items`` there are; ``short``: users left out; ``padding``: items 0 dropped."""

    rows: dict[str, int]
    users: int
    items: int
    short: int
    padding: int


@dataclass(frozen=True)
class Users:
    """All users' items, one user after another: ``ids [U]``, ``items [N]``, ``offsets [U+1]``. Names where ids are places."""

    ids: Ints
    items: Ints
    offsets: Ints
    user_names: list[str] | None = None
    item_names: list[str] | None = None


def convert(
    path: Path, out: Path, *, valid: str = "all", seed: int = 42, min_length: int = 3, attributes: tuple[Path, ...] = ()
) -> Converted:
    """Write ``train.parquet``, ``valid.parquet``, ``test.parquet`` and ``config.toml`` to ``out``; the same bytes every time.

    :param valid: users whose second-last item is held out: "all"; "none" (no valid file: the configuration evaluates on the test split);
        or a number N: ``numpy.random.RandomState(seed).choice(users, N, replace=False)`` of the users in their order.
    :param attributes: JSON files ``{item: [attribute, ...]}`` or Parquet files with ``item_id`` or ``user_id`` and attribute columns.
    :raises DataError: a file is damaged, or no user is left.
    """
    users, padding = _without_padding(_read(path))
    least = 2 if valid == "none" else 3
    if min_length < least:
        raise ConfigError(f"a user needs {least} items for these splits", where="--min-length", fix=f"use {least} or more")
    kept, short = _long_enough(users, min_length)
    if not kept.ids.size:
        raise DataError(f"no user has {min_length} items", where=str(path), fix="lower --min-length, or check the form of the file")
    held = _held_out(kept.ids.size, valid, seed)
    about = [_attributes(p) for p in attributes]
    item_attributes = next((a.items for a in about if a.items is not None), None)
    people = [a.users for a in about if a.users is not None]
    ends = kept.offsets[1:]
    last = ends - 2 - held
    trained = np.flatnonzero(last > kept.offsets[:-1])
    splits = {"train": (trained, last[trained])}
    if held.any():
        splits["valid"] = np.flatnonzero(held), ends[held] - 2
    splits["test"] = np.arange(held.size), ends - 1
    pad = None if bool((kept.items == 0).any()) else 0
    rows, tables = {}, {}
    for split, (user, position) in splits.items():
        tables[split] = _table(kept, user, position, item_attributes, people)
        rows[split] = write_parquet(out / f"{split}.parquet", tables[split].schema, _row_groups(tables[split]))
    for name, names in (("users", kept.user_names), ("items", kept.item_names)):
        if names is not None:
            named = pa.table({f"{name[:-1]}_id": pa.array(np.arange(1, len(names) + 1, dtype=np.int32)), "name": pa.array(names)})
            rows[name] = write_parquet(out / f"{name}.parquet", named.schema, _row_groups(named))
    features = _features(kept, tables["test"], pad)
    held_names = {"train": "train.parquet", "eval": "valid.parquet" if "valid" in rows else "test.parquet", "test": "test.parquet"}
    write_config(out, config_toml("next-item", features, held_names, None, model={"name": "sasrec"}))
    return Converted(rows, kept.ids.size, int(np.unique(kept.items).size), short, padding)


def _held_out(users: int, valid: str, seed: int) -> NDArray[np.bool_]:
    """Whose second-last item is held out."""
    if valid in ("all", "none"):
        return np.full(users, valid == "all")
    if not valid.isdigit() or not 0 < int(valid) <= users:
        raise ConfigError(f"{valid!r} says not whom to validate on", where="--valid", fix=f'use "all", "none" or a number up to {users}')
    chosen = np.zeros(users, dtype=bool)
    chosen[np.random.RandomState(seed).choice(users, int(valid), replace=False)] = True
    return chosen


# --- reading ----------------------------------------------------------------------------------------------------------------------------


def _read(path: Path) -> Users:
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"the file cannot be read: {error}", where=str(path), fix="name the text file itself, plain or .gz") from error
    if b"\0" in data:
        raise DataError("the file is not text: it holds zero bytes", where=str(path), fix="name the text file itself, plain or .gz")
    lines = [line.split() for line in data.removeprefix(b"\xef\xbb\xbf").splitlines()]
    lines = [line for line in lines if line]
    if not lines:
        raise DataError("the file has no lines", where=str(path), fix="it needs lines `user item` or `user item item ...`")
    counts = np.array([len(line) - 1 for line in lines])
    names, user_names = _ids([line[0] for line in lines])
    items, item_names = _ids([item for line in lines for item in line[1:]])
    ids, first, code = np.unique(names, return_index=True, return_inverse=True)
    by_appearance = np.argsort(first)
    rank = np.empty_like(by_appearance)
    rank[by_appearance] = np.arange(rank.size)
    user = np.repeat(rank[code], counts)
    order = np.argsort(user, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(user, minlength=ids.size))])
    return Users(ids[by_appearance], items[order], offsets, user_names, item_names)


def _ids(tokens: list[bytes]) -> tuple[Ints, list[str] | None]:
    """Integers as they are; anything else by first appearance, from 1, with the names."""
    array = np.array(tokens, dtype=bytes)
    if all(token.isdigit() for token in set(tokens)) and array.dtype.itemsize <= 18:
        found = array.astype(np.int64)
        if not found.size or int(found.max()) < 2**31:
            return found, None
    place: dict[bytes, int] = {}
    found = np.array([place.setdefault(token, len(place) + 1) for token in tokens], dtype=np.int64)
    return found, [_text(token) for token in place]


def _text(token: bytes) -> str:
    try:
        return token.decode("utf-8")
    except UnicodeDecodeError:
        return token.decode("latin-1")


def _without_padding(users: Users) -> tuple[Users, int]:
    """Drops item 0 where it stands at the front of sequences and nowhere else."""
    zero = users.items == 0
    if not zero.any() or users.item_names is not None:
        return users, 0
    owner = np.repeat(np.arange(users.ids.size), np.diff(users.offsets))
    real = np.concatenate([[0], np.cumsum(~zero)])
    if bool((zero & (real[:-1] > real[users.offsets[owner]])).any()):
        return users, 0
    offsets = real[users.offsets]
    return Users(users.ids, users.items[~zero], offsets, users.user_names, users.item_names), int(zero.sum())


def _long_enough(users: Users, minimum: int) -> tuple[Users, int]:
    lengths = np.diff(users.offsets)
    keep = lengths >= minimum
    if keep.all():
        return users, 0
    items = users.items[np.repeat(keep, lengths)]
    offsets = np.concatenate([[0], np.cumsum(lengths[keep])])
    return Users(users.ids[keep], items, offsets, users.user_names, users.item_names), int((~keep).sum())


# --- attributes -------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _About:
    """Attributes of items as (values, offsets by item id), or of users as a table with ``user_id``."""

    items: tuple[Ints, Ints] | None = None
    users: pa.Table | None = None


def _attributes(path: Path) -> _About:
    if path.suffix == ".json":
        try:
            found = {int(item): [int(a) for a in values] for item, values in json.loads(path.read_bytes()).items()}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise DataError(
                f"the attributes cannot be read: {error}", where=str(path), fix='use {"item": [attribute, ...]} with integers'
            ) from error
        return _About(items=_by_item(found))
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"the attributes cannot be read: {error}", where=str(path), fix="give a .json or a Parquet file") from error
    if "item_id" in table.schema.names:
        return _About(items=_item_columns(table, path))
    if "user_id" in table.schema.names:
        scalar = [
            f.name for f in table.schema if pa.types.is_integer(f.type) or pa.types.is_string(f.type) or pa.types.is_large_string(f.type)
        ]
        return _About(users=table.select(scalar))
    raise DataError("there is neither a column item_id nor user_id", where=str(path), fix="rename the column of ids")


def _item_columns(table: pa.Table, path: Path) -> tuple[Ints, Ints]:
    """Every list column's values, numbered by their sorted names from 1, all columns together."""
    columns = [f.name for f in table.schema if pa.types.is_list(f.type) or pa.types.is_large_list(f.type)]
    if not columns:
        raise DataError("the items' table has no list column", where=str(path), fix="give attributes as lists")
    kept = table.filter(table["item_id"].is_valid())
    found: dict[int, list[int]] = {int(i): [] for i in kept["item_id"].to_pylist()}
    base = 1
    for column in columns:
        values = kept[column].to_pylist()
        number = {name: base + i for i, name in enumerate(sorted({v for row in values for v in row or ()}))}
        for item, row in zip(kept["item_id"].to_pylist(), values):
            found[int(item)] += [number[v] for v in row or ()]
        base += len(number)
    return _by_item(found)


def _by_item(found: dict[int, list[int]]) -> tuple[Ints, Ints]:
    top = max(found, default=0) + 1
    rows = [found.get(i, []) for i in range(top)]
    offsets = np.concatenate([[0], np.cumsum([len(r) for r in rows])]).astype(np.int64)
    return np.array([a for r in rows for a in r], dtype=np.int64), offsets


# --- writing ----------------------------------------------------------------------------------------------------------------------------


def _table(users: Users, user: Ints, position: Ints, attributes: tuple[Ints, Ints] | None, people: list[pa.Table]) -> pa.Table:
    starts = users.offsets[:-1][user]
    lengths = position - starts
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    index = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
    history = users.items[index]
    columns: dict[str, Any] = {
        "user_id": pa.array(users.ids[user].astype(np.int32)),
        "item_ids": pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(history.astype(np.int32))),
        "next_item": pa.array(users.items[position].astype(np.int32)),
    }
    if attributes is not None:
        columns["item_attributes"] = _nested(history, offsets, *attributes)
    for table in people:
        at = pc.index_in(columns["user_id"].cast(pa.int64()), value_set=table["user_id"].combine_chunks().cast(pa.int64()))
        columns |= {name: table[name].combine_chunks().take(at) for name in table.schema.names if name not in columns}
    return pa.table(columns)


def _nested(history: Ints, offsets: Ints, values: Ints, bounds: Ints) -> pa.Array:
    """A list of attributes for each item of each history; an item without attributes has an empty list."""
    known = np.minimum(history, bounds.size - 2)
    lengths = np.where(history < bounds.size - 1, bounds[known + 1] - bounds[known], 0)
    inner = np.concatenate([[0], np.cumsum(lengths)])
    index = np.arange(inner[-1]) + np.repeat(bounds[known] - inner[:-1], lengths)
    each = pa.ListArray.from_arrays(pa.array(inner, pa.int32()), pa.array(values[index].astype(np.int32)))
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), each)


def _features(users: Users, table: pa.Table, pad: int | None) -> Features:
    fields = {"item": EventField(column="item_ids", table="item")}
    if "item_attributes" in table.schema.names:
        inner = lists(plain(lists(plain(table["item_attributes"])).values)).values
        fields["attributes"] = EventField(column="item_attributes", rows=int(np.max(inner.to_numpy(), initial=0)) + 1, pooling="mean")
    sparse = {"next_item": Sparse(table="item"), "seen": Sparse(column="item_ids", table="item")}
    for field in table.schema:
        if field.name in ("user_id", "item_ids", "next_item", "item_attributes"):
            continue
        if pa.types.is_integer(field.type):
            sparse[field.name] = Sparse(rows=int(pc.max(table[field.name]).as_py() or 0) + 1)
        else:
            sparse[field.name] = Sparse(rows=HASHED, hash=True)
    return Features(
        columns=("user_id",),
        tables={"item": Table(rows=int(users.items.max()) + 1)},
        sparse=sparse,
        sequences={"history": Sequence(fields=fields, max_length=200, target={"item": "next_item"})},
        next_item=NextItem(item="next_item", seen="seen", pad=pad),
    )


def _row_groups(table: pa.Table) -> Iterator[pa.Table]:
    for start in range(0, table.num_rows, ROW_GROUP):
        yield table.slice(start, ROW_GROUP)
