"""Every Arrow type that the reader takes, against plain Python: sliced, chunked, nullable, empty, all null."""

from __future__ import annotations

import datetime
import decimal
import math
import struct

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_core.config.features import EventField, Features, Sequence, Sparse
from gem_core.sources.hashing import hash_integers, mix64, salt_of, to_rows
from gem_data import ParquetSource, arrow
from gem_data.block import Bag, flat_index

INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64(), pa.bool_()]
FLOATS = [pa.float16(), pa.float32(), pa.float64(), pa.decimal128(9, 3), pa.decimal256(20, 2)]
TEXTS = [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(3)]
UNITS = ("s", "ms", "us", "ns")
M64 = (1 << 64) - 1


def values_of(kind):
    if pa.types.is_boolean(kind):
        return st.booleans()
    if pa.types.is_integer(kind):
        low = 0 if pa.types.is_unsigned_integer(kind) else -(2 ** (kind.bit_width - 1))
        return st.integers(low, low + 2**kind.bit_width - 1)
    if pa.types.is_decimal(kind):
        return st.integers(-(10**6), 10**6).map(lambda i: decimal.Decimal(i).scaleb(-kind.scale))
    if pa.types.is_floating(kind):
        return st.floats(width=kind.bit_width, allow_nan=True, allow_infinity=True)
    if kind == pa.binary(3):
        return st.binary(min_size=3, max_size=3)
    return st.text(max_size=20) if "string" in str(kind) else st.binary(max_size=20)


@st.composite
def arrays(draw, kinds, wrap=lambda kind: kind, element=None):
    """(array, Python values): nulls, several chunks, a slice of something larger, or a dictionary."""
    kind = draw(st.sampled_from(kinds))
    whole = wrap(kind)
    item = values_of(kind) if element is None else element(values_of(kind))
    data = draw(st.lists(st.none() | item, max_size=12) | st.lists(st.none(), max_size=3))
    given = [None if v is None else np.float16(v) for v in data] if kind == pa.float16() and whole == kind else data
    array = pa.array(given, whole)
    if whole == kind and draw(st.booleans()) and not pa.types.is_null(kind) and "view" not in str(kind) and kind != pa.float16():
        array = array.dictionary_encode()
    a = draw(st.integers(0, len(data)))
    b = draw(st.integers(a, len(data)))
    if draw(st.booleans()):
        return array.slice(a, b - a), data[a:b]
    return pa.chunked_array([array.slice(0, a), array.slice(a, b - a), array.slice(b)]), data


def same(got, want, ulps=0):
    assert len(got) == len(want)
    for g, w in zip(got, want):
        assert g == w or (math.isnan(g) and math.isnan(w)) or abs(g - w) <= ulps * math.ulp(w), (got, want)


@given(arrays(INTEGERS))
@settings(deadline=None, max_examples=200)
def test_integers(case):
    array, data = case
    values, missing = arrow.integers(arrow.plain(array))
    assert values.dtype == np.int64
    assert (missing.tolist() if missing is not None else [False] * len(data)) == [d is None for d in data]
    assert values.tolist() == [0 if d is None else min(int(d), 2**63 - 1) for d in data]


@given(arrays(INTEGERS + FLOATS))
@settings(deadline=None, max_examples=200)
def test_floats(case):
    array, data = case
    plain = arrow.plain(array)
    values, missing = arrow.floats(plain)
    narrow = plain.type in (pa.float16(), pa.float32())
    assert values.dtype == (np.float32 if narrow else np.float64)
    none = [d is None or (isinstance(d, float) and math.isnan(d)) for d in data]
    assert (missing.tolist() if missing is not None else [False] * len(data)) == none
    want = [0.0 if d is None else float(np.float32(d)) if narrow else float(d) for d in data]
    same(values.tolist(), want, ulps=4 if pa.types.is_decimal(plain.type) else 0)  # Arrow divides by the power of ten in two steps


def slow_hash(value, salt):
    key = mix64((salt + 0x9E3779B97F4A7C15) & M64)
    if isinstance(value, int):
        return mix64(key ^ (value & M64))
    data = value.encode() if isinstance(value, str) else value
    h = mix64(key ^ (~len(data) & M64))
    for i in range(0, len(data), 8):
        h = mix64(h ^ struct.unpack("<Q", data[i : i + 8].ljust(8, b"\0"))[0])
    return h


@given(arrays(INTEGERS + TEXTS), st.integers(0, 99))
@settings(deadline=None, max_examples=200)
def test_hashes(case, salt):
    array, data = case
    values, missing = arrow.hashes(arrow.plain(array), salt)
    assert (missing.tolist() if missing is not None else [False] * len(data)) == [d is None for d in data]
    assert [v for v, d in zip(values.tolist(), data) if d is not None] == [slow_hash(d, salt) for d in data if d is not None]


@pytest.mark.parametrize("zone", [None, "UTC", "America/New_York"])
@given(data=st.lists(st.none() | st.integers(-(2**33), 2**33), max_size=8), have=st.sampled_from(UNITS), want=st.sampled_from(UNITS))
@settings(deadline=None, max_examples=60)
def test_times(zone, data, have, want):
    array = pa.array(data, pa.int64()).cast(pa.timestamp(have, zone))
    values, missing = arrow.times(array, want)
    scale = arrow.UNITS[have], arrow.UNITS[want]
    assert [v for v, d in zip(values.tolist(), data) if d is not None] == [d * scale[1] // scale[0] for d in data if d is not None]
    assert (missing is None) == (None not in data)


def test_dates_are_midnight():
    days = [datetime.date(1970, 1, 2), datetime.date(1969, 12, 31), None]
    for kind in (pa.date32(), pa.date64()):
        values, missing = arrow.times(pa.array(days, kind), "s")
        assert values[:2].tolist() == [86400, -86400]
        assert missing.tolist() == [False, False, True]


WRAPS = {
    "list": pa.list_,
    "large_list": pa.large_list,
    "list_view": pa.list_view,
    "large_list_view": pa.large_list_view,
    "fixed": lambda kind: pa.list_(kind, 2),
}


@pytest.mark.parametrize("wrap", WRAPS)
@given(data=st.data())
@settings(deadline=None, max_examples=120)
def test_lists(wrap, data):
    sizes = {"min_size": 2, "max_size": 2} if wrap == "fixed" else {"max_size": 4}
    array, rows = data.draw(arrays([pa.int32(), pa.int64(), pa.float64()], WRAPS[wrap], lambda item: st.lists(st.none() | item, **sizes)))
    found = arrow.lists(array)
    assert found.offsets.dtype == np.int64
    assert found.offsets[0] == 0
    want = [[] if row is None else row for row in rows]
    assert found.lengths.tolist() == [len(w) for w in want]
    same([x if x is not None else 0 for x in found.values.to_pylist()], [x if x is not None else 0 for w in want for x in w])
    assert [x is None for x in found.values.to_pylist()] == [x is None for w in want for x in w]


@given(st.lists(st.none() | st.lists(st.none() | st.lists(st.integers(0, 9), max_size=3), max_size=3), max_size=6))
@settings(deadline=None, max_examples=80)
def test_lists_in_lists(rows):
    outer = arrow.lists(pa.array(rows, pa.list_(pa.large_list(pa.int8()))))
    inner = arrow.lists(outer.values)
    flat = [e for row in rows for e in (row or [])]
    assert outer.lengths.tolist() == [len(r or []) for r in rows]
    assert inner.lengths.tolist() == [len(e or []) for e in flat]
    assert inner.values.to_pylist() == [x for e in flat for x in (e or [])]


def test_null_lists_that_hide_values():
    """The format lets a null list cover values; they belong to nobody."""
    array = pa.ListArray.from_arrays(pa.array([0, 2, 4, 5], pa.int32()), pa.array([1, 2, 3, 4, 5]), mask=pa.array([False, True, False]))
    found = arrow.lists(array)
    assert found.lengths.tolist() == [2, 0, 1]
    assert found.values.to_pylist() == [1, 2, 5]


def test_views_may_overlap_and_go_backwards():
    array = pa.ListViewArray.from_arrays(pa.array([2, 0, 1], pa.int32()), pa.array([2, 3, 0], pa.int32()), pa.array([1, 2, 3, 4]))
    found = arrow.lists(array)
    assert found.values.to_pylist() == [3, 4, 1, 2, 3]
    assert found.lengths.tolist() == [2, 3, 0]


@pytest.mark.parametrize(
    ("convert", "array", "part"),
    [
        (arrow.integers, pa.array([1.5]), "whole numbers"),
        (arrow.integers, pa.array(["a"]), "whole numbers"),
        (arrow.integers, pa.array([[1]]), "whole numbers"),
        (arrow.floats, pa.array(["a"]), "a number"),
        (arrow.floats, pa.array([datetime.datetime(2020, 1, 1)]), "a number"),
        (arrow.lists, pa.array([1]), "a list"),
        (lambda a: arrow.hashes(a, 0), pa.array([1.5]), "hash"),
        (lambda a: arrow.times(a, "s"), pa.array(["noon"]), "timestamps"),
        (lambda a: arrow.hashes(a, 0), pa.array([{"a": 1}]), "hash"),
    ],
)
def test_types_that_do_not_fit(convert, array, part):
    with pytest.raises(arrow.WrongType, match=part) as caught:
        convert(array)
    assert caught.value.fix


@given(data=st.data())
@settings(deadline=None, max_examples=40)
def test_through_a_file(tmp_path_factory, data):
    """Random tables through Parquet, with row groups cut anywhere, dictionary pages on and off, both list layouts, any batch size."""
    n = data.draw(st.integers(1, 20))
    kind = data.draw(st.sampled_from([pa.int8(), pa.int32(), pa.uint16(), pa.int64()]))
    wrap = data.draw(st.sampled_from([pa.list_, pa.large_list]))
    rows = data.draw(st.lists(st.none() | st.lists(st.integers(0, 99), max_size=5), min_size=n, max_size=n))
    ids = data.draw(st.lists(st.integers(0, 99), min_size=n, max_size=n))
    table = pa.table({"id": pa.array(range(n)), "x": pa.array(ids, kind), "h": pa.array(rows, wrap(kind))})
    path = tmp_path_factory.mktemp("t") / "a.parquet"
    pq.write_table(
        table,
        path,
        row_group_size=data.draw(st.integers(1, n)),
        use_dictionary=data.draw(st.booleans()),
        use_compliant_nested_type=data.draw(st.booleans()),
        data_page_version=data.draw(st.sampled_from(["1.0", "2.0"])),
    )
    features = Features(
        sample_id="id", sparse={"x": Sparse(rows=100)}, sequences={"s": Sequence(fields={"h": EventField(rows=100)}, max_length=3)}
    )
    shuffle, size = data.draw(st.booleans()), data.draw(st.integers(1, n + 1))
    seen = {}
    for batch in ParquetSource(path, features, batch_size=size, shuffle=shuffle, window=data.draw(st.integers(1, n)), prefetch=0):
        batch.validate()
        histories = batch.sequences["s"].jagged("h").to_list()
        seen |= {i: (x, h.tolist()) for i, x, h in zip(batch.sample_ids.tolist(), batch.sparse["x"].values.tolist(), histories)}
    assert seen == {i: (ids[i], (rows[i] or [])[-3:]) for i in range(n)}


@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_every_type_through_a_file(tmp_path_factory, data):
    """Numbers as a dense feature and text as a hashed one, alone and in histories of structs, with nulls, against plain Python."""
    n = data.draw(st.integers(1, 12))
    number, text = data.draw(st.sampled_from(INTEGERS + FLOATS)), data.draw(st.sampled_from([k for k in TEXTS if "view" not in str(k)]))
    finite = values_of(number).filter(lambda x: isinstance(x, bool | int | decimal.Decimal) or abs(x) < 3e38)
    event = st.fixed_dictionaries(
        {
            "x": st.none() | finite,
            "s": st.none() | values_of(text),
            "t": st.integers(0, 2**40),
            "m": st.lists(st.integers(0, 9), max_size=2),
        }
    )
    unit, zone = data.draw(st.sampled_from(UNITS)), data.draw(st.sampled_from([None, "Asia/Tokyo"]))
    row = st.fixed_dictionaries({"x": st.none() | finite, "s": st.none() | values_of(text), "h": st.none() | st.lists(event, max_size=3)})
    rows = data.draw(st.lists(row, min_size=n, max_size=n))
    struct = pa.struct({"x": number, "s": text, "t": pa.timestamp(unit, zone), "m": pa.list_(pa.uint8())})
    schema = pa.schema({"id": pa.int64(), "x": number, "s": text, "h": data.draw(st.sampled_from([pa.list_, pa.large_list]))(struct)})

    def stored(x):  # before pyarrow 21 float16 is made of numpy's only
        return np.float16(x) if number == pa.float16() and x is not None else x

    given = [{**row, "x": stored(row["x"]), "h": row["h"] and [{**e, "x": stored(e["x"])} for e in row["h"]]} for row in rows]
    table = pa.Table.from_pylist([{"id": i, **row} for i, row in enumerate(given)], schema)
    path = tmp_path_factory.mktemp("t") / "a.parquet"
    pq.write_table(table, path, row_group_size=data.draw(st.integers(1, n)), use_dictionary=data.draw(st.booleans()))

    fields = {
        "x": {"column": "h.x", "kind": "float", "default": -1.0},
        "s": {"column": "h.s", "rows": 50, "hash": True, "salt": 7, "default": 49},
        "m": {"column": "h.m", "rows": 10},
    }
    features = Features.model_validate(
        {
            "sample_id": "id",
            "dense": {"d": {"column": "x", "default": -1.0}},
            "sparse": {"s0": {"column": "s", "rows": 50, "hash": True, "salt": 7, "default": 49}},
            "sequences": {"h": {"fields": fields, "timestamps": "h.t", "time_unit": unit, "order": "trust"}},
        }
    )

    def number_of(x):
        return -1.0 if x is None else float(np.float32(float(x)))

    def row_of(value):
        return 49 if value is None else slow_hash(value, 7) % 50

    for batch in ParquetSource(path, features, batch_size=data.draw(st.integers(1, n + 1)), shuffle=data.draw(st.booleans()), window=5):
        group = batch.validate().sequences["h"]
        columns = {k: group.jagged(k).to_list() for k in ("x", "s")}
        starts, times, inner = group.offsets.tolist(), group.timestamps.tolist(), group.fields["m"].to_list()
        for at, i in enumerate(batch.sample_ids.tolist()):
            events = rows[i]["h"] or []
            same([batch.dense[at, 0].item()], [number_of(rows[i]["x"])])
            assert batch.sparse["s0"].values[at].item() == row_of(rows[i]["s"])
            same(columns["x"][at].tolist(), [number_of(e["x"]) for e in events])
            assert columns["s"][at].tolist() == [row_of(e["s"]) for e in events]
            assert times[starts[at] : starts[at + 1]] == [e["t"] for e in events]
            assert [m.tolist() for m in inner[starts[at] : starts[at + 1]]] == [e["m"] for e in events]


def test_large_unsigned_numbers_stay_apart(tmp_path):
    """Two users, or two samples, must never become one for being numbered above 2^63."""
    users = [2**64 - 1, 2**63, 2**63 - 1, 5]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"user": pa.array(users, pa.uint64()), "x": [1, 2, 3, 4]}), path)
    features = Features(sample_id="user", columns=("user",), sparse={"x": Sparse(rows=10)})
    (batch,) = ParquetSource(path, features, batch_size=9)
    assert batch.columns["user"].tolist() == batch.sample_ids.tolist() == [-1, -(2**63), 2**63 - 1, 5]


def test_folders_of_large_numbers_are_read(tmp_path):
    values = ["7", "-7", str(2**64 - 1), str(2**64), "--7"]
    for i, value in enumerate(values):
        (tmp_path / f"u={value}").mkdir()
        pq.write_table(pa.table({"id": [i]}), tmp_path / f"u={value}" / "a.parquet")
    features = Features(sample_id="id", sparse={"u": Sparse(rows=1 << 20, hash=True)})
    (batch,) = ParquetSource(tmp_path, features, batch_size=9)
    salt = salt_of("sparse.u")
    want = [hash_integers(np.array([x]), salt) for x in (np.int64(7), np.int64(-7), np.uint64(2**64 - 1))]
    found = dict(zip(batch.sample_ids.tolist(), batch.sparse["u"].values.tolist()))
    assert [found[i] for i in range(3)] == [int(to_rows(x, 1 << 20)[0]) for x in want]


@given(
    lengths=st.lists(st.integers(0, 130), min_size=1, max_size=20),
    order=st.randoms(use_true_random=False),
    dtype=st.sampled_from([np.int64, np.float32, np.uint8]),
)
@settings(deadline=None, max_examples=100)
def test_rows_are_copied_like_a_gather(lengths, order, dtype):
    """The copy of whole rows gives what the plain gather gives: one width or several, one part or many, rows twice or not at all."""
    offsets = np.cumsum([0, *lengths])
    values = (np.arange(offsets[-1]) % 251).astype(dtype)
    wide = np.stack([values, values + 1], 1)
    parts = [np.array([order.randrange(len(lengths)) for _ in range(order.randrange(0, 30))], dtype=np.int64) for _ in range(3)]
    bag = Bag(offsets, {"x": values, "wide": wide, "inner": Bag(np.arange(offsets[-1] + 1), {"ids": values})})
    for consume in (False, True):
        for picked, taken in zip(parts, bag.split(parts, consume=consume)):
            want_offsets, index = flat_index(offsets, picked)
            assert np.array_equal(taken.offsets, want_offsets)
            assert np.array_equal(taken.array("x"), values[index])
            assert np.array_equal(taken.array("wide"), wide[index])
            assert np.array_equal(taken.values["inner"].array("ids"), values[index])
            assert taken.array("x").dtype == dtype
    assert not bag.values
