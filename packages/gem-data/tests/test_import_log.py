"""gemrec data import: flat logs of several formats to Parquet with histories, against a loop over all pairs of rows."""

import gzip
import json
import tomllib

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest

from gem_core.cli import main
from gem_core.errors import DataError, GemError
from gem_data import flat
from gem_data.flat import import_log
from gem_data.inspect import propose


def log(seed=0, n=400):
    """Few users and few times, so that a user has several rows of one time."""
    rng = np.random.default_rng(seed)
    item = pa.array([None if i % 50 == 7 else f"sku-{int(v):03}" for i, v in enumerate(rng.integers(0, 40, n))])
    return pa.table(
        {
            "row": np.arange(n),
            "ts": pa.array(1_760_000_000 + rng.integers(0, 60, n), pa.timestamp("s", "UTC")),
            "user": [f"u{int(u)}" for u in rng.integers(0, 17, n)],
            "item": item,
            "zip": [f"{int(z):05}" for z in rng.integers(0, 900, n)],
            "clicked": rng.integers(0, 2, n),
        }
    )


def expected(rows, events, where, most):
    """Row number -> its events, oldest first; equal times in the order of the log."""
    known = sorted((r for r in rows if where(r)), key=lambda r: r["ts"])
    return {
        r["row"]: [tuple(e[name] for name in events) for e in known if e["user"] == r["user"] and e["ts"] < r["ts"]][-most:] for r in rows
    }


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("where", "most"), [(None, 512), ("clicked == 1 and item is not None", 3)])
def test_histories_are_what_a_user_did_before(tmp_path, monkeypatch, seed, where, most):
    monkeypatch.setattr(flat, "ROW_GROUP", 64)
    table = log(seed)
    pq.write_table(table, tmp_path / "log.parquet")
    rows, events = import_log(
        [tmp_path / "log.parquet"], tmp_path / "out", user="user", time="ts", events=["item", "clicked"], where=where, max_history=most
    )
    made = pq.read_table(tmp_path / "out" / "log.parquet")
    assert pq.read_metadata(tmp_path / "out" / "log.parquet").num_row_groups == 7
    assert made.column_names == [*table.column_names, "history_item", "history_clicked", "history_ts"]
    found = made.to_pylist()
    assert [r["ts"] for r in found] == sorted(r["ts"] for r in found)
    keep = (lambda r: True) if where is None else (lambda r: r["clicked"] == 1 and r["item"] is not None)
    want = expected(table.to_pylist(), ("item", "clicked", "ts"), keep, most)
    assert {r["row"]: list(zip(r["history_item"], r["history_clicked"], r["history_ts"], strict=True)) for r in found} == want
    assert (rows, events) == (400, sum(map(len, want.values())))
    assert max(map(len, want.values())) == most or where is None


@pytest.mark.parametrize("most_events", [1, 10, 300])
def test_long_histories_make_row_groups_of_fewer_rows(tmp_path, monkeypatch, most_events):
    pq.write_table(log(), tmp_path / "log.parquet")
    call = {"user": "user", "time": "ts", "events": ["item"]}
    import_log([tmp_path / "log.parquet"], tmp_path / "whole", **call)
    monkeypatch.setattr(flat, "EVENTS", most_events)
    import_log([tmp_path / "log.parquet"], tmp_path / "parts", **call)
    file = pq.ParquetFile(tmp_path / "parts" / "log.parquet")
    groups = [file.read_row_group(i) for i in range(file.num_row_groups)]
    counts = [(g.num_rows, sum(map(len, g["history_item"].to_pylist()))) for g in groups]
    assert all(rows == 1 or events <= most_events for rows, events in counts)
    assert all(a[1] + b[1] > most_events for a, b in zip(counts, counts[1:], strict=False))
    assert file.read().equals(pq.read_table(tmp_path / "whole" / "log.parquet"))


def written(folder, form):
    table = log()
    path = folder / f"day.{form}"
    if form == "csv":
        csv.write_csv(table, path)
    elif form == "tsv.gz":
        csv.write_csv(table, folder / "plain", csv.WriteOptions(delimiter="\t"))
        path.write_bytes(gzip.compress((folder / "plain").read_bytes()))
    else:
        lines = [json.dumps({**row, "ts": row["ts"].isoformat()}) for row in table.to_pylist()]
        path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("form", ["csv", "tsv.gz", "jsonl"])
def test_text_files_give_what_parquet_does(tmp_path, form):
    path = written(tmp_path, form)
    import_log([path], tmp_path / "out", user="user", time="ts", events=["item"], text=["zip"])
    pq.write_table(log(), tmp_path / "log.parquet")
    import_log([tmp_path / "log.parquet"], tmp_path / "same", user="user", time="ts", events=["item"])
    naive = pa.timestamp("s")  # JSON's times come without a zone, in UTC
    one, other = (pq.read_table(tmp_path / name / "log.parquet") for name in ("out", "same"))
    assert one.column_names == other.column_names
    for name in one.column_names:
        kind = {"ts": naive, "history_ts": pa.list_(naive)}.get(name, other[name].type)
        assert one[name].cast(kind).to_pylist() == other[name].cast(kind).to_pylist()


def test_a_csv_becomes_a_configuration_that_trains_on_it(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path, "csv")
    assert (
        main(
            [
                "data",
                "import",
                str(path),
                "--out",
                "logs",
                "--user",
                "user",
                "--time",
                "ts",
                "--event",
                "item",
                "--where",
                "item is not None",
            ]
        )
        == 0
    )
    assert "400 rows, histories of" in capsys.readouterr().out
    text = propose(tmp_path / "logs")
    assert 'timestamps = "history_ts"' in text
    assert "[features.sequences.history.target]" in text
    assert main(["data", "import", str(path), "--out", "plain"]) == 0
    assert pq.read_schema("plain/log.parquet").names == log().column_names


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"user": "who"}, "there is no column 'who'"),
        ({"events": ["nothing"]}, "there is no column 'nothing'"),
        ({"time": "zip"}, "the times are of type string"),
        ({"user": "item"}, "8 rows have no 'item'"),
        ({"time": None}, "histories need --time too"),
        ({"user": None, "time": None, "events": (), "where": "clicked == 1"}, "histories need --user, --time, --event too"),
        ({"where": "bought == 1"}, "there is no column 'bought'"),
        ({"where": "clicked == 7"}, "no row matches 'clicked == 7', so that all histories are empty"),
        ({"where": "clicked = 1"}, "(?s)cannot be parsed.*equal is =="),
        ({"events": ["itm"]}, "did you mean 'item'"),
        ({"text": ["zipp"]}, "there is no column 'zipp'"),
    ],
)
def test_what_cannot_be_is_named(tmp_path, options, words):
    pq.write_table(log(), tmp_path / "log.parquet")
    with pytest.raises(GemError, match=words) as caught:
        import_log([tmp_path / "log.parquet"], tmp_path / "out", **{"user": "user", "time": "ts", "events": ["item"], **options})
    assert caught.value.fix
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.csv", "a,b\n1,2\n3\n", "Expected 2 columns"), ("a.txt", "a,b\n", "no log that can be read"),
        ("a.jsonl", "{", "cannot be read"), ("a.csv", "a,b\n", "the log holds no row"),
        ("a.csv", "", "(?s)Empty CSV file.*not even the names of columns"),
        ("a.csv", "a,b\n1,2\n3\n", "(?s)fix: .*stands in quotes"),
        ("a.jsonl", '[{"a": 1}]', r"(?s)jq -c '\.\[\]' a\.jsonl"),
        ("a.jsonl", '{"a": 1}\n{"a": "x"}\n', "(?s)fix: .*values of one type"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_read(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=words):
        import_log([tmp_path / name], tmp_path / "out")
    with pytest.raises(DataError, match=r"(?s)cannot be read: No such file or directory.*check the path"):
        import_log([tmp_path / "none.csv"], tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no log"):
        import_log([tmp_path / "empty"], tmp_path / "out")


@pytest.mark.parametrize(("text", "where"), [("user,city\n1,Köln\n", "column 'city'"), ("user,größe\n1,2\n", "names of columns")])
def test_text_in_another_encoding(tmp_path, text, where):
    (tmp_path / "a.csv").write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=rf"(?s)not UTF-8.*{where}.*iconv"):
        import_log([tmp_path / "a.csv"], tmp_path / "out")


@pytest.mark.parametrize("mark", [";", "\t", "|"])
@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_other_separators(tmp_path, name, mark):
    text = b'user;time;item;note\n1;5;7;"a;b"\n1;9;8;c, d\n'.replace(b";", mark.encode())
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    assert import_log([tmp_path / name], tmp_path / "out", user="user", time="time", events=["item"]) == (2, 1)
    found = pq.read_table(tmp_path / "out" / "log.parquet").to_pydict()
    assert (found["note"], found["history_item"]) == ([f"a{mark}b", "c, d"], [[], [7]])


@pytest.mark.parametrize("harm", [lambda data: data[:-9], lambda data: data[:20] + b"xx" + data[22:]], ids=["cut", "changed"])
def test_a_damaged_compressed_file_is_refused(tmp_path, harm):
    (tmp_path / "a.csv.gz").write_bytes(harm(gzip.compress(b"user,time,item\n1,5,7\n1,9,8\n")))
    with pytest.raises(DataError, match=r"(?s)the file cannot be read.*a\.csv\.gz"):
        import_log([tmp_path / "a.csv.gz"], tmp_path / "out")


def test_files_that_do_not_fit_together_and_columns_that_are_there(tmp_path):
    pq.write_table(log(), tmp_path / "a.parquet")
    pq.write_table(log().set_column(5, "clicked", pa.array(["yes"] * 400)), tmp_path / "b.parquet")
    with pytest.raises(DataError, match="do not fit together"):
        import_log([tmp_path / "a.parquet", tmp_path / "b.parquet"], tmp_path / "out")
    pq.write_table(log().append_column("history_item", pa.array([1] * 400)), tmp_path / "c.parquet")
    with pytest.raises(DataError, match="a column 'history_item' already"):
        import_log([tmp_path / "c.parquet"], tmp_path / "out", user="user", time="ts", events=["item"])


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ("ts,user\n1,u\n", r"(?s)different columns: 'item' of .*a\.csv is not there.*b\.csv"),
        ("ts,user,item,zip\n1,u,2,3\n", r"(?s)different columns: 'zip' of .*b\.csv is not there.*a\.csv"),
        ("ts,user,item,user\n1,u,2,v\n", r"(?s)several columns are called 'user'.*b\.csv"),
    ],
)
def test_a_column_that_a_file_lacks_does_not_become_nulls(tmp_path, other, words):
    (tmp_path / "a.csv").write_text("user,ts,item\nu,2,5\n")
    (tmp_path / "b.csv").write_text("ts,user,item\n1,u,3\n")
    import_log([tmp_path / "a.csv", tmp_path / "b.csv"], tmp_path / "fits")
    assert pq.read_table(tmp_path / "fits" / "log.parquet").to_pylist() == [
        {"user": "u", "ts": 2, "item": 5},
        {"user": "u", "ts": 1, "item": 3},
    ]
    (tmp_path / "b.csv").write_text(other)
    with pytest.raises(DataError, match=words):
        import_log([tmp_path / "a.csv", tmp_path / "b.csv"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_folders_are_columns(tmp_path):
    for day, own in ((9, False), (10, True)):
        folder = tmp_path / "logs" / f"the%20day={day}" / "hour=a"
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"row": [day], "hour": ["own"]} if own else {"row": [day]}), folder / "a.parquet")
    import_log([tmp_path / "logs"], tmp_path / "out")
    assert pq.read_table(tmp_path / "out" / "log.parquet").to_pylist() == [
        {"row": 10, "hour": "own", "the day": 10},
        {"row": 9, "the day": 9, "hour": "a"},
    ]


def test_text_in_json_that_looks_like_times_stays_text(tmp_path):
    """As the message about files that do not fit together says."""
    (tmp_path / "a.jsonl").write_text('{"batch": "2025-10-09", "n": 1}\n')
    (tmp_path / "b.jsonl").write_text('{"batch": "late", "n": 2}\n')
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    with pytest.raises(DataError, match=r"(?s)do not fit together.*--text COLUMN"):
        import_log(files, tmp_path / "out")
    import_log(files, tmp_path / "out", text=["batch"])
    assert pq.read_table(tmp_path / "out" / "log.parquet").to_pylist() == [{"batch": "2025-10-09", "n": 1}, {"batch": "late", "n": 2}]
    with pytest.raises(DataError, match="cannot be read"):
        import_log(files, tmp_path / "other", text=["n"])


def test_whose_rows_they_are_is_known_to_inspect(tmp_path):
    (tmp_path / "a.csv").write_text("Kunde,ts,item,click\n" + "".join(f"k{i % 7},{1_700_000_000 + i},{i % 9},{i % 2}\n" for i in range(80)))
    import_log([tmp_path / "a.csv"], tmp_path / "out", user="Kunde", time="ts", events=["item"])
    proposed = tomllib.loads(propose(tmp_path / "out"))
    assert proposed["eval"] == {"group": "Kunde"}
    assert "Kunde" in proposed["features"]["sparse"]


def clicks(folder, times):
    lines = "".join(f"u{i % 7},{time},{i % 9},{i % 2}\n" for i, time in enumerate(times))
    (folder / "a.csv").write_text(f"user,at,item,click\n{lines}")
    import_log([folder / "a.csv"], folder / "out", user="user", time="at", events=["item"])
    return pq.read_table(folder / "out" / "log.parquet"), tomllib.loads(propose(folder / "out"))["features"]


@pytest.mark.parametrize("first", [0, -1_000_000_000, 1_760_000_000, 1_760_000_000_000])
def test_when_rows_were_is_known_to_inspect(tmp_path, first):
    """Numbers that look like no time too: steps since the start, or times before 1970."""
    _, features = clicks(tmp_path, range(first, first + 80))
    assert features["timestamp"] == "at"
    assert features["sequences"]["history"]["timestamps"] == "history_at"
    assert list(features["sequences"]["history"]["fields"]) == ["item"]


@pytest.mark.parametrize(
    ("scale", "fraction", "kind", "first"),
    [
        (1, ".25", pa.timestamp("us"), 1_760_000_000_250_000), (1, ".0", pa.int64(), 1_760_000_000),
        (1000, ".5", pa.timestamp("us"), 1_760_000_000_000_500), (1000, "e0", pa.int64(), 1_760_000_000_000),
    ],
)  # fmt: skip
def test_times_with_fractions_become_whole(tmp_path, scale, fraction, kind, first):
    table, features = clicks(tmp_path, [f"{(1_760_000_000 + i) * scale}{fraction}" for i in range(80)])
    assert table["at"].type == kind
    assert table["at"][0].cast(pa.int64()).as_py() == first
    assert table["history_at"].type.value_type == kind
    assert (features["timestamp"], features["sequences"]["history"]["timestamps"]) == ("at", "history_at")


def test_times_that_are_none_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"(?s)several units: 1760000001 in row 2 \(s\), 1760000001000 in row 0 \(ms\).*column 'at'"):
        clicks(tmp_path, [1_760_000_001_000, 1_760_000_002_000, 1_760_000_001])
    for times in ([0, 1_760_000_001, 1_760_000_002_000], [1, 2_000_000_000_000]):  # since the start, in a unit that nothing tells
        clicks(tmp_path, times)
        (tmp_path / "out" / "log.parquet").unlink()
        (tmp_path / "out").rmdir()
    for wrong in ("inf", "-4e18"):
        with pytest.raises(DataError, match=rf"(?s){wrong.replace('e', 'e.')} is no time.*column 'at', row 1"):
            clicks(tmp_path, [1.5, wrong, 2.5])


def test_filters_compare_numbers_as_they_are_written(tmp_path):
    """Seconds with fractions are written as timestamps, of which 1760000010 would be one of 1970."""
    (tmp_path / "a.csv").write_text("user,at,item\n" + "".join(f"u{i % 3},{1_760_000_000 + i}.25,{i}\n" for i in range(40)))
    for rows, first in (("at >= 1760000010", 10), ("at > 1760000010.25", 11)):
        out = tmp_path / str(first)
        options = {"user": "user", "time": "at", "events": ["item"], "where": "at < 1760000020", "rows": rows}
        written, _ = import_log([tmp_path / "a.csv"], out, **options)
        found = pq.read_table(out / "log.parquet")
        assert (written, found["item"].to_pylist()) == (40 - first, [*range(first, 40)])
        assert found["history_item"].to_pylist() == [[*range(i % 3, min(i, 20), 3)] for i in range(first, 40)]


@pytest.mark.parametrize("zone", ["", "Z"])
def test_times_that_are_text_are_read(tmp_path, zone):
    text = [f"2025-10-09T08:{i:02}:00{zone}" for i in range(40)]
    columns = {"user": [i % 3 for i in range(40)], "at": text, "item": [*range(40)]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    import_log([tmp_path / "a.parquet"], tmp_path / "out", user="user", time="at", events=["item"])
    found = pq.read_table(tmp_path / "out" / "log.parquet")
    assert found["at"].type == pa.timestamp("us", "UTC" if zone else None)
    assert found["history_item"].to_pylist() == [[*range(i % 3, i, 3)] for i in range(40)]
    pq.write_table(pa.table({**columns, "at": ["8 o'clock", *text[1:]]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="the times are of type string"):
        import_log([tmp_path / "a.parquet"], tmp_path / "other", user="user", time="at", events=["item"])


def test_some_rows_are_written_with_histories_of_all(tmp_path):
    """Today's rows without a label, to be predicted."""
    pq.write_table(log(), tmp_path / "log.parquet")
    options = {"user": "user", "time": "ts", "events": ["item"], "where": "clicked == 1"}
    import_log([tmp_path / "log.parquet"], tmp_path / "all", **options)
    everything = pq.read_table(tmp_path / "all" / "log.parquet")
    written, events = import_log([tmp_path / "log.parquet"], tmp_path / "some", **options, rows="ts >= '2025-10-09T08:53:50'")
    late = everything.filter(pc.greater_equal(everything["ts"].cast(pa.int64()), 1_760_000_030_000))
    found = pq.read_table(tmp_path / "some" / "log.parquet")
    assert found.equals(late)
    assert 0 < written == late.num_rows < 400
    assert events == pc.sum(pc.list_value_length(late["history_item"])).as_py()
    with pytest.raises(DataError, match="no row matches 'row > 400', so that none would be written"):
        import_log([tmp_path / "log.parquet"], tmp_path / "none", **options, rows="row > 400")
    with pytest.raises(DataError, match="histories need --user, --time, --event too"):
        import_log([tmp_path / "log.parquet"], tmp_path / "none", rows="row > 4")
