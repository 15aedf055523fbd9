"""MovieLens-1M in any of its usual forms, as a click log with histories.

- *Ratings*: the original ``ratings.dat``, ``users.dat``, ``movies.dat`` (``::`` between fields, Latin-1). One sample a rating: label
  ``rating >= 4``, history = the user's earlier ratings. Splits by time: the last tenth of all samples is test, the tenth before it valid.
- *Sequences*: ``ml1m_sequences.parquet``, a row a user. Next-item samples: the item that follows a prefix (label 1) and one item that the
  user never saw, drawn by its popularity in training (label 0). The last item of each user is test, the second-last valid, ``positions``
  random earlier ones train.
- *CTR*: ``train.parquet``, ``valid.parquet``, ``test.parquet`` with ``label`` and ``hist_item_ids``; a pad id 0 at the front of every
  history is removed.

MovieLens may be used for research and not be redistributed: see the GroupLens README beside the data.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from gem_core.config.features import EventField, Features, Label, Sequence, Sparse, Table
from gem_core.errors import DataError
from gem_data.arrow import lists, plain
from gem_data.block import flat_index
from gem_data.writer import config_toml, write_config, write_parquet

Array = NDArray[Any]
SPLITS = ("train", "valid", "test")
ROW_GROUP = 8_192
LIKED = 4
"""A rating from here on is a positive label."""
FIRST = 5
"""Events a user must have had before a sample is made."""


def convert(path: Path, out: Path, *, positions: int = 10, max_history: int = 512, seed: int = 7) -> dict[str, int]:
    """Write ``train.parquet``, ``valid.parquet``, ``test.parquet`` and ``config.toml`` to ``out``; returns the rows of each split.

    :param positions: training samples a user (sequences form).
    :param max_history: newest events kept of a history (ratings form; the other forms keep all).
    :raises DataError: none of the three forms is there, or a file is damaged.
    """
    if (path / "ratings.dat").is_file():
        name, made = "movielens", _ratings(path, max_history)
    elif (path / "ml1m_sequences.parquet").is_file():
        name, made = "movielens-next", _sequences(path, positions, seed)
    elif (path / "train.parquet").is_file():
        name, made = "movielens-ctr", _ctr(path)
    else:
        raise DataError(
            "no MovieLens data was recognised",
            where=str(path),
            fix="name a folder with ratings.dat, with ml1m_sequences.parquet, or with train.parquet, valid.parquet and test.parquet",
        )
    rows = {split: write_parquet(out / f"{split}.parquet", table.schema, _row_groups(table)) for split, table in made.items()}
    splits = {"train": "train.parquet", "eval": "valid.parquet", "test": "test.parquet"}
    write_config(out, config_toml(name, features_of(made), splits, "user_id"))
    return rows


def features_of(tables: dict[str, pa.Table]) -> Features:
    """What the converted columns are; table sizes cover all splits."""
    schema = tables["train"].schema
    top = {name: max(_top(t[name]) for t in tables.values()) for name in schema.names if _is_ids(schema.field(name).type)}
    items = max(top["item_id"], top["hist_item_ids"]) + 1
    sparse = {"item": Sparse(column="item_id", table="item")}
    for name in ("user_id", "gender", "age", "occupation"):
        if name in schema.names:
            sparse[name] = Sparse(rows=top[name] + 1)
    if "genre_ids" in schema.names:
        sparse["genres"] = Sparse(column="genre_ids", rows=top["genre_ids"] + 1, pooling="mean")
    fields = {"item": EventField(column="hist_item_ids", table="item")}
    if "hist_ratings" in schema.names:
        fields["rating"] = EventField(column="hist_ratings", rows=top["hist_ratings"] + 1)
    timed = "hist_timestamps" in schema.names
    longest = max(1, *(int(lists(plain(t["hist_item_ids"])).lengths.max(initial=0)) for t in tables.values()))
    return Features(
        timestamp="timestamp" if "timestamp" in schema.names else None,
        columns=("user_id",),
        tables={"item": Table(rows=items)},
        sparse=sparse,
        sequences={
            "history": Sequence(fields=fields, timestamps="hist_timestamps" if timed else None, max_length=longest, target={"item": "item"})
        },
        labels={"ctr": Label(column="label")},
    )


# --- the three forms --------------------------------------------------------------------------------------------------------------------


def _ratings(path: Path, max_history: int) -> dict[str, pa.Table]:
    ratings = _dat(path / "ratings.dat", {"user_id": pa.int32(), "item_id": pa.int32(), "rating": pa.int8(), "timestamp": pa.int64()})
    order = np.lexsort((ratings["timestamp"].to_numpy(), ratings["user_id"].to_numpy()))
    ratings = ratings.take(pa.array(order)).combine_chunks()
    user, time = ratings["user_id"].to_numpy(), ratings["timestamp"].to_numpy()
    begins = np.flatnonzero(np.r_[True, user[1:] != user[:-1]])
    before = np.arange(user.size) - np.repeat(begins, np.diff(np.r_[begins, user.size]))
    samples = np.flatnonzero(before >= FIRST)
    samples = samples[np.argsort(time[samples], kind="stable")]
    cuts = [0, samples.size * 8 // 10, samples.size * 9 // 10, samples.size]
    people = _users(path / "users.dat")
    genres = _genres(_movies(path / "movies.dat"), "item_id")
    made = {}
    for split, a, b in zip(SPLITS, cuts, cuts[1:]):
        at = samples[a:b]
        chosen = ratings.take(pa.array(at))
        kept = np.minimum(before[at], max_history)
        histories = {f"hist_{to}": _slices(ratings[of].to_numpy(), at - kept, kept) for of, to in _HISTORY.items()}
        made[split] = pa.table(
            {
                "user_id": chosen["user_id"],
                **{name: _looked_up(people, chosen["user_id"], name) for name in ("gender", "age", "occupation", "zip")},
                "item_id": chosen["item_id"],
                "genre_ids": _genres_of(genres, chosen["item_id"]),
                **histories,
                "timestamp": chosen["timestamp"],
                "rating": chosen["rating"],
                "label": pc.greater_equal(chosen["rating"], LIKED).cast(pa.int8()),
            }
        )
    return made


_HISTORY = {"item_id": "item_ids", "rating": "ratings", "timestamp": "timestamps"}


def _sequences(path: Path, positions: int, seed: int) -> dict[str, pa.Table]:
    table = _parquet(path / "ml1m_sequences.parquet", ("user_id", "gender", "age", "occupation", "item_ids"))
    found = lists(plain(table["item_ids"]))
    items, offsets, lengths = found.values.to_numpy(), found.offsets, found.lengths
    if int(lengths.min(initial=FIRST + 3)) < FIRST + 3:
        raise DataError(f"a user has fewer than {FIRST + 3} events", where=str(path / "ml1m_sequences.parquet"), fix="remove such users")
    rng = np.random.default_rng(seed)
    n = lengths.size
    chosen = {
        "train": _random_positions(rng, lengths - 2, positions),
        "valid": (np.arange(n), lengths - 2),
        "test": (np.arange(n), lengths - 1),
    }
    row = np.repeat(np.arange(n), lengths)
    within = np.arange(items.size) - np.repeat(offsets[:-1], lengths)
    top = int(items.max()) + 1
    popularity = np.cumsum(np.bincount(items[within < lengths[row] - 2], minlength=top))
    seen = np.unique(row * top + items)
    genres = _item_genres(path)
    made = {}
    for split, (user, position) in chosen.items():
        negative = _unseen(rng, user, popularity, seen, top)
        both = np.stack([items[offsets[user] + position], negative], 1).ravel().astype(np.int32)
        twice = np.repeat(np.arange(user.size), 2)
        people = table.take(pa.array(user[twice]))
        made[split] = pa.table(
            {
                "user_id": people["user_id"].cast(pa.int32()),
                "gender": _gender(people["gender"]),
                "age": people["age"].cast(pa.int8()),
                "occupation": people["occupation"].cast(pa.int8()),
                "item_id": pa.array(both),
                **({"genre_ids": _genres_of(genres, pa.array(both))} if genres else {}),
                "hist_item_ids": _slices(items.astype(np.int32), offsets[user][twice], position[twice]),
                "position": pa.array(position[twice].astype(np.int32)),
                "label": pa.array(np.tile(np.array([1, 0], dtype=np.int8), user.size)),
            }
        )
    return made


def _ctr(path: Path) -> dict[str, pa.Table]:
    tables = {split: _parquet(path / f"{split}.parquet", ("user_id", "item_id", "label", "hist_item_ids")) for split in SPLITS}
    histories = {split: lists(plain(table["hist_item_ids"])) for split, table in tables.items()}
    pad = all(_padded(h.values.to_numpy(), h.offsets) for h in histories.values())
    for split, table in tables.items():
        found = histories[split]
        start, kept = found.offsets[:-1], found.lengths
        if pad:
            start, kept = start + np.minimum(kept, 1), np.maximum(kept - 1, 0)
        at = table.schema.get_field_index("hist_item_ids")
        table = table.set_column(at, "hist_item_ids", _slices(found.values.to_numpy(), start, kept))
        if "gender" in table.schema.names and pa.types.is_string(table.schema.field("gender").type):
            table = table.set_column(table.schema.get_field_index("gender"), "gender", _gender(table["gender"]))
        tables[split] = table.replace_schema_metadata(None)
    return tables


# --- reading ----------------------------------------------------------------------------------------------------------------------------


def _dat(path: Path, types: dict[str, pa.DataType]) -> pa.Table:
    """An original ``::`` file."""
    try:
        text = path.read_bytes().replace(b"::", b"\t")
        return csv.read_csv(
            io.BytesIO(text),
            read_options=csv.ReadOptions(column_names=list(types), encoding="latin1"),
            parse_options=csv.ParseOptions(delimiter="\t", quote_char=False),
            convert_options=csv.ConvertOptions(column_types=types, strings_can_be_null=False),
        )
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"the file cannot be read: {error}", where=str(path), fix="use the files of ml-1m.zip as they are") from error


def _users(path: Path) -> pa.Table:
    kinds = {"user_id": pa.int32(), "gender": pa.string(), "age": pa.int8(), "occupation": pa.int8(), "zip": pa.string()}
    table = _dat(path, kinds)
    return table.set_column(1, "gender", _gender(table["gender"]))


def _movies(path: Path) -> pa.Table:
    table = _dat(path, {"item_id": pa.int32(), "title": pa.string(), "genres": pa.string()})
    return table.set_column(2, "genres", pc.split_pattern(table["genres"], "|"))


def _item_genres(path: Path) -> dict[int, list[int]] | None:
    if (path / "ml1m_items.parquet").is_file():
        return _genres(_parquet(path / "ml1m_items.parquet", ("item_id", "genres")), "item_id")
    return None


def _parquet(path: Path, columns: tuple[str, ...]) -> pa.Table:
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"the file cannot be read: {error}", where=str(path), fix="copy it again") from error
    missing = [c for c in columns if c not in table.schema.names]
    if missing:
        raise DataError(f"the column {missing[0]!r} is missing", where=str(path), fix=f"the file needs {', '.join(columns)}")
    return table


# --- pieces -----------------------------------------------------------------------------------------------------------------------------


def _gender(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.equal(column, "M").cast(pa.int8())


def _genres(movies: pa.Table, key: str) -> dict[int, list[int]]:
    """Item -> genre ids; 1, 2, ... in the order of the names, 0 stands for an item without a genre."""
    known = movies.filter(pc.is_valid(movies[key]))
    names = sorted(set(known["genres"].combine_chunks().flatten().to_pylist()))
    number = {name: i + 1 for i, name in enumerate(names)}
    return {item: [number[g] for g in genres] for item, genres in zip(known[key].to_pylist(), known["genres"].to_pylist())}


def _genres_of(genres: dict[int, list[int]], items: Any) -> pa.Array:
    top = max([*genres, int(pc.max(items).as_py())]) + 1
    table = pa.array([genres.get(i, [0]) for i in range(top)], pa.list_(pa.int8()))
    return table.take(items.combine_chunks() if isinstance(items, pa.ChunkedArray) else items)


def _looked_up(people: pa.Table, user_ids: pa.ChunkedArray, column: str) -> pa.Array:
    at = pc.index_in(user_ids, value_set=people["user_id"].combine_chunks())
    if at.null_count:
        raise DataError("a rating names a user that users.dat lacks", where=column, fix="use the files of ml-1m.zip as they are")
    return people[column].combine_chunks().take(at.combine_chunks())


def _slices(values: Array, starts: Array, lengths: Array) -> pa.Array:
    """A list array of ``values[start:start + length]``."""
    borders = np.stack([starts, starts + lengths], 1).ravel()
    taken, index = flat_index(borders, np.arange(starts.size) * 2)
    return pa.ListArray.from_arrays(pa.array(taken, pa.int32()), pa.array(values[index]))


def _random_positions(rng: np.random.Generator, limits: Array, positions: int) -> tuple[Array, Array]:
    """(user, position): up to ``positions`` different ones with ``FIRST <= position < limit``, ascending."""
    user = np.repeat(np.arange(limits.size), limits - FIRST)
    begins = np.cumsum(limits - FIRST) - (limits - FIRST)
    position = FIRST + np.arange(user.size) - np.repeat(begins, limits - FIRST)
    order = np.lexsort((rng.random(user.size), user))
    rank = np.empty(user.size, dtype=np.int64)
    rank[order] = np.arange(user.size) - begins[user[order]]
    keep = rank < positions
    return user[keep], position[keep]


def _unseen(rng: np.random.Generator, user: Array, popularity: Array, seen: Array, top: int) -> Array:
    """An item for each user, drawn by popularity until it is none of the user's own."""
    drawn = np.zeros(user.size, dtype=np.int64)
    left = np.arange(user.size)
    while left.size:
        drawn[left] = np.searchsorted(popularity, rng.integers(0, popularity[-1], left.size), side="right")
        key = user[left] * top + drawn[left]
        left = left[seen[np.searchsorted(seen, key).clip(max=seen.size - 1)] == key]
    return drawn


def _padded(values: Array, offsets: Array) -> bool:
    first = offsets[:-1][np.diff(offsets) > 0]
    return bool(first.size) and bool((values[first] == 0).all()) and int((values == 0).sum()) == first.size


def _is_ids(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or (pa.types.is_list(kind) and pa.types.is_integer(kind.value_type)))


def _top(column: pa.ChunkedArray) -> int:
    values = column.combine_chunks().flatten() if pa.types.is_list(column.type) else column
    return int(pc.max(values).as_py() or 0)


def _row_groups(table: pa.Table) -> Iterator[pa.Table]:
    for start in range(0, table.num_rows, ROW_GROUP):
        yield table.slice(start, ROW_GROUP)
