"""Bad input: every case ends in an error that says file, row, column and cure, and good rows beside it still read."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from gem_core.config.features import Dense, EventField, Features, Label, Sequence, Sparse, Vector
from gem_core.errors import ConfigError, DataError
from gem_data import ParquetSource

CLICK = Features(sparse={"x": Sparse(rows=10)}, labels={"ctr": Label(column="click")})


def write(path, columns, row_group_size=2, **how):
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    pq.write_table(table, path, row_group_size=row_group_size, **how)
    return str(path)


def read(path, features=CLICK, **how):
    return list(ParquetSource(path, features, **{"batch_size": 100, **how}))


def refused(path, features=CLICK, **how):
    """The message of the DataError, which always says what to do."""
    with pytest.raises(DataError) as caught:
        read(path, features, **how)
    assert caught.value.fix, "the message must say what to do"
    assert caught.value.exit_code == 2
    return str(caught.value)


def says(message, *parts):
    for part in parts:
        assert str(part) in message, f"{part!r} is not in: {message}"


def good(folder, name="good.parquet"):
    return write(folder / name, {"x": [1, 2, 3], "click": [0, 1, 0]})


def test_missing_file(tmp_path):
    says(refused(tmp_path / "nowhere.parquet"), "no such file", tmp_path / "nowhere.parquet", "check the path")


def test_pattern_without_a_match(tmp_path):
    says(refused(tmp_path / "day-*.parquet"), "no file matches", "day-*.parquet")


def test_folder_without_parquet(tmp_path):
    (tmp_path / "a.csv").write_text("x")
    says(refused(tmp_path), "no Parquet file", tmp_path)


def test_no_paths():
    says(refused([]), "no paths")


def test_not_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_text("x,click\n1,0\n")
    says(refused(path), "not a Parquet file", path, "gemrec data import")


@pytest.mark.parametrize("keep", [0.3, 0.9, -3, 5])
def test_truncated(tmp_path, keep):
    whole = good(tmp_path)
    size = os.path.getsize(whole)
    path = tmp_path / "cut.parquet"
    shutil.copy(whole, path)
    os.truncate(path, int(size * keep) if isinstance(keep, float) else size + keep if keep < 0 else keep)
    says(refused(path), "cut off", path, "again")


def test_damaged_footer(tmp_path):
    path = good(tmp_path)
    data = bytearray(Path(path).read_bytes())
    data[-30:-10] = b"\xff" * 20
    Path(path).write_bytes(data)
    says(refused(path), "damaged", path)


def test_damaged_page(tmp_path):
    path = write(
        tmp_path / "a.parquet",
        {"x": list(range(10)) * 100, "click": [0, 1] * 500},
        1000,
        write_page_checksum=True,
        use_dictionary=False,
        compression="none",
    )
    data = bytearray(Path(path).read_bytes())
    data[2000] ^= 0x10
    Path(path).write_bytes(data)
    says(refused(path), "damaged", path, "row group 0")


def test_column_missing(tmp_path):
    message = refused(good(tmp_path), Features(sparse={"y": Sparse(rows=3, column="klick")}))
    says(message, "'klick' is missing", "good.parquet", "did you mean 'click'", "'x'")


def test_column_missing_in_one_of_many(tmp_path):
    good(tmp_path)
    write(tmp_path / "later.parquet", {"x": [1]})
    says(refused(tmp_path), "'click' is missing", "later.parquet")


@pytest.mark.parametrize(
    ("values", "feature", "parts"),
    [
        (["a"], Features(sparse={"x": Sparse(rows=3)}), ("string", "whole numbers", "hash = true")),
        ([1.0], Features(sparse={"x": Sparse(rows=3)}), ("double", "whole numbers", "int64")),
        (["a"], Features(dense={"x": Dense()}), ("string", "a number")),
        ([[1]], Features(dense={"x": Dense()}), ("list", "one value a row")),
        ([1.5], Features(sparse={"x": Sparse(rows=3, hash=True)}), ("double", "hash")),
        ([1], Features(vectors={"x": Vector(dim=2)}), ("int64", "a list")),
        ([1], Features(sequences={"s": Sequence(fields={"x": EventField(rows=3)})}), ("int64", "a list")),
        (["a"], Features(labels={"x": Label()}), ("string", "a number", "labels as 0 and 1")),
        (["noon"], Features(timestamp="x"), ("string", "timestamps")),
        ([[1]], Features(sample_id="x"), ("list", "one value a row")),
        ([{"a": 1}], Features(columns=("x",)), ("struct",)),
    ],
)
def test_wrong_type(tmp_path, values, feature, parts):
    """Found from the schema alone, before any row is read."""
    path = write(tmp_path / "a.parquet", {"x": values})
    with pytest.raises(DataError) as caught:
        ParquetSource(path, feature, batch_size=1)
    says(str(caught.value), "a.parquet", "column 'x'", "fix:", *parts)


def test_wrong_type_in_a_later_file(tmp_path):
    good(tmp_path, "a.parquet")
    write(tmp_path / "b.parquet", {"x": ["text"], "click": [0]})
    says(refused(tmp_path), "b.parquet", "column 'x'", "string")


def test_null_label(tmp_path):
    path = write(tmp_path / "a.parquet", {"x": [1, 2, 3, 4], "click": [0, 1, 1, None]})
    says(refused(path), "label is null", "a.parquet", "row group 1, row 1 (row 3 of the file)", "'click'", "labels.ctr", "mask")


def test_nan_label(tmp_path):
    path = write(tmp_path / "a.parquet", {"x": [1, 2, 3], "click": [0.0, math.nan, 1.0]})
    says(refused(path), "label is NaN", "row group 0, row 1", "'click'")


def test_label_that_is_no_label(tmp_path):
    path = write(tmp_path / "a.parquet", {"x": [1, 2], "click": [0, 5]})
    says(refused(path), "5", "between 0 and 1", "row 1", "threshold")


def test_null_label_is_fine_where_it_does_not_count(tmp_path):
    path = write(tmp_path / "a.parquet", {"click": [0, 1], "buy": [None, 1]})
    batch = read(path, Features(labels={"cvr": Label(column="buy", mask="click")}))[0]
    assert batch.labels.tolist() == [[0.0], [1.0]]
    assert batch.label_mask.tolist() == [[False], [True]]


def test_mask_that_is_no_mask(tmp_path):
    path = write(tmp_path / "a.parquet", {"click": [2, 1], "buy": [1, 1]})
    says(refused(path, Features(labels={"cvr": Label(column="buy", mask="click")})), "0 and 1", "'click'")


def test_negative_id(tmp_path):
    path = write(tmp_path / "a.parquet", {"x": [1, 2, 3, -7], "click": [0, 1, 1, 0]})
    says(refused(path), "id -7 is negative", "row group 1, row 1 (row 3 of the file)", "'x'", "sparse.x", "hash = true")


def test_id_beyond_the_table(tmp_path):
    path = write(tmp_path / "a.parquet", {"x": [1, 2, 10, 3], "click": [0, 1, 1, 0]})
    says(refused(path), "id 10 does not fit", "10 rows (0 to 9)", "row group 1, row 0 (row 2 of the file)", "'x'", "rows = 11")


def test_huge_unsigned_id(tmp_path):
    path = write(tmp_path / "a.parquet", {"x": pa.array([2**64 - 1], pa.uint64()), "click": [0]})
    message = refused(path)
    says(message, "id 9223372036854775807 or more does not fit", "'x'", "set hash = true")
    assert "rows =" not in message, "no table has so many"


def test_columns_that_hold_nothing_at_all(tmp_path):
    """Written without a value they have the type null, which any feature may read: the message is that of a null."""
    path = write(tmp_path / "a.parquet", {"x": pa.nulls(2), "click": [0, 1]})
    says(refused(path), "id is null", "row 0", "'x'", "default")
    says(refused(path, Features(dense={"x": Dense()})), "null or NaN", "row 0", "default")
    says(refused(path, Features(sparse={"x": Sparse(rows=9, vocabulary=False, hash=True)})), "id is null", "row 0")
    path = write(tmp_path / "b.parquet", {"h": [[None], []]})
    says(refused(path, Features(sequences={"s": Sequence(fields={"h": EventField(rows=9)})})), "id is null", "row 0", "'h'")
    (batch,) = read(write(tmp_path / "c.parquet", {"x": pa.nulls(2)}), Features(sparse={"x": Sparse(rows=10, default=3)}))
    assert batch.sparse["x"].values.tolist() == [3, 3]


def test_bad_id_inside_a_history(tmp_path):
    path = write(tmp_path / "a.parquet", {"h": [[1, 2], [], [3, 4, 99]]}, 3)
    says(refused(path, Features(sequences={"s": Sequence(fields={"h": EventField(rows=9)})})), "id 99", "row 2", "sequences.s.fields.h")


def test_null_id(tmp_path):
    path = write(tmp_path / "a.parquet", {"x": [1, None], "click": [0, 1]})
    says(refused(path), "id is null", "row 1", "default")


def test_null_inside_a_list(tmp_path):
    path = write(tmp_path / "a.parquet", {"h": [[1], [2, None]]})
    says(refused(path, Features(sequences={"s": Sequence(fields={"h": EventField(rows=9)})})), "id is null", "row 1", "'h'")


def test_null_number(tmp_path):
    path = write(tmp_path / "a.parquet", {"x": [1.0, math.nan]})
    says(refused(path, Features(dense={"x": Dense()})), "null or NaN", "row 1", "default")


def test_number_outside_log1p(tmp_path):
    path = write(tmp_path / "a.parquet", {"x": [1.0, -2.0]})
    says(refused(path, Features(dense={"x": Dense(transform="log1p")})), "-2.0", "log1p", "row 1", "clip")


def test_number_beyond_float32(tmp_path):
    path = write(tmp_path / "a.parquet", {"x": [1.0, 1e300]})
    says(refused(path, Features(dense={"x": Dense()})), "1e+300", "float32", "row 1", "clip")
    for spec, want in ((Dense(policy="clip"), float(np.finfo(np.float32).max)), (Dense(policy="default", default=2.0), 2.0)):
        (batch,) = ParquetSource(path, Features(dense={"x": spec}), batch_size=4)
        assert batch.dense[:, 0].tolist() == [1.0, want]


def test_vector_of_another_width(tmp_path):
    path = write(tmp_path / "a.parquet", {"v": [[1.0, 2.0], [1.0]]})
    says(refused(path, Features(vectors={"v": Vector(dim=2)})), "1 numbers", "dim = 2", "row 1")
    path = write(tmp_path / "b.parquet", {"v": [[1.0, 2.0], [math.nan, 1.0]]})
    says(refused(path, Features(vectors={"v": Vector(dim=2)})), "NaN", "row 1")


def test_lists_of_one_group_with_different_lengths(tmp_path):
    path = write(tmp_path / "a.parquet", {"h": [[1], [2, 3], [4]], "t": [[1], [2], [4]]}, 3)
    features = Features(sequences={"s": Sequence(fields={"h": EventField(rows=9)}, timestamps="t")})
    says(refused(path, features), "different lengths: 2 in 'h', 1 in 't'", "row 1", "sequences.s", "write them together")


def test_weights_of_another_length(tmp_path):
    path = write(tmp_path / "a.parquet", {"h": [[1], [2, 3]], "w": [[1.0], [2.0]]})
    says(refused(path, Features(sparse={"h": Sparse(rows=9, weights="w")})), "different lengths", "'w'", "row 1")


def test_times_out_of_order(tmp_path):
    path = write(tmp_path / "a.parquet", {"h": [[1, 2], [2, 3]], "t": [[5, 6], [8, 7]]})
    features = Features(sequences={"s": Sequence(fields={"h": EventField(rows=9)}, timestamps="t")})
    says(refused(path, features), "decrease: 8, then 7", "row 1", "'t'", 'order = "sort"')


def test_null_time(tmp_path):
    path = write(tmp_path / "a.parquet", {"h": [[1, 2]], "t": [[5, None]]})
    says(
        refused(path, Features(sequences={"s": Sequence(fields={"h": EventField(rows=9)}, timestamps="t")})),
        "time of an event is null",
        "'t'",
    )


def test_bad_weight(tmp_path):
    path = write(tmp_path / "a.parquet", {"x": [1, 2], "w": [1.0, -1.0]})
    says(refused(path, Features(weight="w", sparse={"x": Sparse(rows=9)})), "weight -1.0", "row 1", "not negative")


def test_unicode_column_names(tmp_path):
    path = write(tmp_path / "ünï.parquet", {"größe": [1.5, 2.5], "カテゴリ": [1, 2], "нажал 🖱": [0, 1]})
    features = Features(
        dense={"größe": Dense()}, sparse={"kind": Sparse(rows=3, column="カテゴリ")}, labels={"ctr": Label(column="нажал 🖱")}
    )
    batch = read(path, features)[0]
    assert batch.dense.tolist() == [[1.5], [2.5]]
    assert batch.sparse["kind"].values.tolist() == [1, 2]
    says(refused(path, Features(sparse={"x": Sparse(rows=2, column="カテゴリ")})), "カテゴリ", "ünï.parquet", "id 2")


@pytest.mark.parametrize("column", ["name", "index", "keys", "list", "element", "a.b", "", "__class__"])
def test_awkward_column_names(tmp_path, column):
    path = write(tmp_path / "a.parquet", {column: [1, 2], "a": [[7], [8]]})
    batch = read(path, Features(sparse={"s": Sparse(rows=3, column=column), "a": Sparse(rows=9)}, columns=(column,)))[0]
    assert batch.sparse["s"].values.tolist() == [1, 2]
    assert batch.sparse["a"].values.tolist() == [7, 8]
    assert batch.columns[column].tolist() == [1, 2]


def test_two_columns_with_one_name(tmp_path):
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
    says(refused(write(tmp_path / "a.parquet", table), Features(sparse={"x": Sparse(rows=9)})), "2 columns have the name 'x'", "rename")


def test_empty_file_beside_good_ones(tmp_path):
    good(tmp_path, "a.parquet")
    write(tmp_path / "b.parquet", pa.table({"x": pa.array([], pa.int64()), "click": pa.array([], pa.int8())}))
    good(tmp_path, "c.parquet")
    assert sum(len(b) for b in read(tmp_path)) == 6


def test_file_of_no_bytes_beside_good_ones(tmp_path):
    good(tmp_path, "a.parquet")
    (tmp_path / "b.parquet").touch()
    says(refused(tmp_path), "0 bytes", "b.parquet", "remove it")


def test_no_rows_at_all(tmp_path):
    path = write(tmp_path / "b.parquet", pa.table({"x": pa.array([], pa.int64()), "click": pa.array([], pa.int8())}))
    says(refused(path), "no rows", "b.parquet")


def test_no_rows_after_filtering(tmp_path):
    says(refused(good(tmp_path), filter="x > 99"), "none of the 3 rows passes", "'x > 99'", "good.parquet")


def test_filter_of_another_type(tmp_path):
    says(refused(good(tmp_path), filter="x > 'a'"), "cannot be applied", "x > 'a'", "good.parquet")


def test_filter_on_a_missing_column(tmp_path):
    says(refused(good(tmp_path), filter="z > 1"), "'z' is missing")


def test_two_features_with_one_name():
    with pytest.raises(ValidationError, match=r"two features have the name 'x': features.dense.x and features.sparse.x; rename one"):
        Features(dense={"x": Dense()}, sparse={"x": Sparse(rows=3)})


@pytest.mark.parametrize(
    "features",
    [
        Features(sparse={"x": Sparse(rows=5, policy="default")}),
        Features(sparse={"x": Sparse(rows=5, default=5)}),
        Features(dense={"x": Dense(policy="default")}),
        Features(),
    ],
)
def test_declarations_that_cannot_work(tmp_path, features):
    with pytest.raises(ConfigError):
        read(good(tmp_path), features)


def test_replaced_while_being_read(tmp_path):
    path = write(tmp_path / "a.parquet", {"x": [1] * 50, "click": [0] * 50})
    source = ParquetSource(path, CLICK, batch_size=5)
    write(tmp_path / "a.parquet", {"x": [2] * 40, "click": [1] * 40})
    with pytest.raises(DataError, match="replaced"):
        list(source)


def test_vanished_while_being_read(tmp_path):
    path = write(tmp_path / "a.parquet", {"x": [1] * 50, "click": [0] * 50})
    source = ParquetSource(path, CLICK, batch_size=5)
    os.remove(path)
    with pytest.raises(DataError, match="vanished"):
        list(source)


def test_error_comes_where_the_bad_row_is_due(tmp_path):
    """Batches before the bad row group are handed out, and the run can resume after the file is mended."""
    path = write(tmp_path / "a.parquet", {"x": [1] * 6 + [99], "click": [0] * 7})
    for prefetch in (0, 2):
        source = ParquetSource(path, CLICK, batch_size=2, prefetch=prefetch)
        iterator = iter(source)
        assert [len(next(iterator)) for _ in range(3)] == [2, 2, 2]
        with pytest.raises(DataError, match="id 99"):
            next(iterator)
        state = source.state_dict()
        mended = ParquetSource(write(tmp_path / "a.parquet", {"x": [1] * 7, "click": [0] * 7}), CLICK, batch_size=2)
        mended.load_state_dict(state)
        assert [len(b) for b in mended] == [1]
        write(tmp_path / "a.parquet", {"x": [1] * 6 + [99], "click": [0] * 7})
