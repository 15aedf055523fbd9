"""Folders and files as they should not be: links in circles, files that change, files that do not fit together."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gem_core.config.features import Features
from gem_core.errors import DataError
from gem_data import ParquetSource

X = {"sparse": {"x": {"rows": 100}}}
NULL = "__HIVE_DEFAULT_PARTITION__"


def write(path: Path, columns, **how):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), path, **how)
    return path


def read(paths, features=X, **how):
    return list(ParquetSource(paths, Features.model_validate(features), **{"batch_size": 100, **how}))


def ids(batches):
    return [i for batch in batches for i in batch.sparse["x"].values.tolist()]


# --- folders --------------------------------------------------------------------------------------------------------------------------


def test_links_in_circles_are_walked_once(tmp_path):
    """Two links to the folder above would otherwise be 2^40 paths, and one is every row forty times."""
    write(tmp_path / "a.parquet", {"x": [1, 2]})
    (tmp_path / "sub").mkdir()
    for name in ("one", "two"):
        (tmp_path / "sub" / name).symlink_to(tmp_path)
    assert ids(read(tmp_path)) == [1, 2]


def test_a_file_with_several_paths_is_read_once_and_that_is_said(tmp_path, caplog):
    path = write(tmp_path / "day=5" / "a.parquet", {"x": [1, 2]})
    (tmp_path / "again.parquet").symlink_to(path)
    (tmp_path / "latest").symlink_to(tmp_path / "day=5")
    assert ids(read([tmp_path, f"{tmp_path}//day=5/./a.parquet"])) == [1, 2]
    assert "2 paths lead to files that are read already; each is read once: " in caplog.text
    features = {"sparse": {"x": {"rows": 100, "column": "day"}}}
    assert ids(read(tmp_path / "latest", X)) == [1, 2]
    assert ids(read([path.parent.parent / "day=5", path], X)) == [1, 2]
    (tmp_path / "again.parquet").unlink()
    assert ids(read(tmp_path, features)) == [5, 5], "the folder itself goes before the link to it"


@pytest.mark.parametrize("kind", ["fifo", "a fifo in a folder", "a link that leads nowhere"])
def test_what_is_no_file_is_said(tmp_path, kind):
    write(tmp_path / "a.parquet", {"x": [1]})
    if kind == "a link that leads nowhere":
        (tmp_path / "b.parquet").symlink_to(tmp_path / "nothing")
    else:
        os.mkfifo(tmp_path / "b.parquet")
    what = "the link leads nowhere" if "link" in kind else "neither a file nor a folder"
    with pytest.raises(DataError, match=rf"(?s){what}.*b\.parquet"):
        read(tmp_path / "b.parquet" if kind == "fifo" else tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every folder")
def test_a_folder_that_may_not_be_read(tmp_path):
    write(tmp_path / "sub" / "a.parquet", {"x": [1]})
    (tmp_path / "sub").chmod(0)
    with pytest.raises(DataError, match="cannot be read: Permission denied"):
        read(tmp_path)
    (tmp_path / "sub").chmod(0o700)


# --- folders as columns ---------------------------------------------------------------------------------------------------------------


def test_folder_names_are_read_as_hive_writes_them(tmp_path):
    for i, value in enumerate(("1", NULL)):
        write(tmp_path / "n" / f"k={value}" / "a.parquet", {"y": [i]})
    column = {"rows": 100, "column": "k"}
    assert ids(read(tmp_path / "n", {"sparse": {"x": {**column, "default": 7}}})) == [1, 7]
    with pytest.raises(DataError, match="an id is null"):
        read(tmp_path / "n", {"sparse": {"x": column}})
    assert [b.dense.tolist() for b in read(tmp_path / "n", {"dense": {"k": {"default": 5.0}}})] == [[[1.0], [5.0]]]
    own = {"sparse": {"x": {"rows": 100, "column": "y"}}}
    assert ids(read(tmp_path / "n", own, filter="k == 1")) == [0]
    assert ids(read(tmp_path / "n", own, filter="k is None")) == [1]
    hashed = {"sparse": {"x": {"rows": 10_000, "column": "k", "hash": True, "salt": 1}}}
    write(tmp_path / "escaped" / "k=a%20b%3D" / "a.parquet", {"y": [1]})
    write(tmp_path / "plain.parquet", {"k": ["a b="]})
    assert ids(read(tmp_path / "escaped", hashed)) == ids(read(tmp_path / "plain.parquet", hashed))


# --- files that do not fit together -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "more", "said"),
    [
        ({"x": [1]}, {"x": [[1, 2]]}, {}, "single values, and lists in"),
        ({"h": [[1]]}, {"h": [[[1]]]}, {"sparse": {}, "sequences": {"s": {"fields": {"h": {"rows": 9}}}}}, "lists, and lists of lists in"),
        ({"x": [1], "i": [1]}, {"x": [1], "i": ["1"]}, {"sample_id": "i"}, "integers, and text in"),
        ({"x": [1], "i": [1]}, {"x": [1], "i": ["1"]}, {"columns": ["i"]}, "integers, and text in"),
        ({"x": [1], "i": [1]}, {"x": [1], "i": [1.5]}, {"columns": ["i"]}, "integers, and numbers in"),
    ],
    ids=["lists", "lists of lists", "sample ids", "carried", "carried numbers"],
)  # fmt: skip
def test_files_that_hold_a_column_in_different_ways_are_refused(tmp_path, a, b, more, said):
    """Also where no batch would hold rows of both: what works may not depend on the batch size."""
    write(tmp_path / "a.parquet", a)
    write(tmp_path / "b.parquet", b)
    with pytest.raises(DataError, match=rf"(?s){said}.*b\.parquet.*a\.parquet.*store it in one type"):
        read(tmp_path, {**X, **more}, batch_size=1)


def test_widths_and_signs_may_differ(tmp_path):
    write(tmp_path / "a.parquet", {"x": [1], "i": pa.array([1], pa.int8())})
    write(tmp_path / "b.parquet", {"x": pa.array([2]).dictionary_encode(), "i": pa.array([2], pa.uint64())})
    write(tmp_path / "i=3" / "c.parquet", {"x": pa.array([3], pa.uint8())})
    (batch,) = read(tmp_path, {**X, "columns": ["i"]})
    assert batch.sparse["x"].values.tolist() == batch.columns["i"].tolist() == [1, 2, 3]


def test_two_fields_of_a_struct_with_one_name(tmp_path):
    struct = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=["b", "b"])
    with pytest.raises(DataError, match="several fields of 'a' have the name 'b'"):
        read(write(tmp_path / "a.parquet", {"a": struct}), {"sparse": {"x": {"rows": 9, "column": "a.b"}}})


# --- files that change ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["written over in place", "another one under its name"])
def test_a_file_that_is_replaced_while_it_is_open_is_never_read_as_the_old_one(tmp_path, how):
    """It has the same size and layout, so that its row groups decode without an error."""
    plain = {"row_group_size": 10, "compression": "none", "use_dictionary": False, "write_statistics": False}
    path = write(tmp_path / "a.parquet", {"x": list(range(40))}, **plain)
    other = write(tmp_path / "other", {"x": list(range(40, 80))}, **plain)
    assert path.stat().st_size == other.stat().st_size
    batches = iter(ParquetSource(path, Features.model_validate(X), batch_size=10, prefetch=0))
    assert ids([next(batches)]) == list(range(10))
    if how == "written over in place":
        with open(path, "r+b") as file:
            file.write(other.read_bytes())
    else:
        other.replace(path)
    with pytest.raises(DataError, match="the file was replaced while it was in use"):
        next(batches)


def test_a_file_that_is_removed_while_it_is_open_is_read_to_its_end(tmp_path):
    path = write(tmp_path / "a.parquet", {"x": list(range(40))}, row_group_size=10)
    batches = iter(ParquetSource(path, Features.model_validate(X), batch_size=10, prefetch=0))
    first = next(batches)
    path.unlink()
    assert ids([first, *batches]) == list(range(40))
