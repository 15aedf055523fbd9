"""gemrec data convert criteo, avazu, open-bandit: every value against a reading of the text line by line, quirks, bad lines, training."""

from __future__ import annotations

import csv
import datetime
import gzip
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from gem_core.cli.groups import CommandGroups
from gem_core.config.load import load_config, source_config
from gem_core.errors import ConfigError, DataError
from gem_data import avazu, criteo, lines, open_bandit
from gem_data.commands import register
from gem_data.inspect import propose
from gem_data.spec import SPEC

DATA = Path(os.environ.get("GEM_TEST_DATA") or Path(__file__).parents[4] / "shared" / "data")
EXAMPLES = Path(__file__).parents[3] / "docs" / "examples" / "configs"
CONVERTERS = {"criteo": criteo, "avazu": avazu, "open-bandit": open_bandit}
FOLDERS = {"criteo": "criteo-sample", "avazu": "avazu-sample", "open-bandit": "open-bandit"}


def data(name):
    if not (DATA / name).exists():
        pytest.skip(f"{DATA / name} is not there (set GEM_TEST_DATA)")
    return DATA / name


def convert(*arguments):
    app = CommandGroups()
    app.owner = "gem-data"
    register(app)
    result = CliRunner().invoke(app.group("data"), ["convert", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def bytes_of(folder):
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def rows_of(path):
    return pq.read_table(path).to_pylist()


def check_reads(folder, rate=None):
    """The written configuration reads every split, and training never sees what is held out."""
    raw = tomllib.loads((folder / "config.toml").read_text())
    config = load_config(folder / "config.toml", [f"data.parquet.root={folder}"])
    splits = [s for s in ("train", "eval", "test") if s in raw["data"]["parquet"]]
    found = {s: SPEC.build(source_config(config), config.features, split=s, batch_size=4096) for s in splits}
    for source in found.values():
        assert sum(len(b.validate()) for b in source) == source.rows
    return {s: source.rows for s, source in found.items()}


# --- Criteo ---------------------------------------------------------------------------------------------------------------------------


def criteo_line(label="1", count="5", category="68fd1e64", **changes):
    fields = [label] + [count] * 13 + [category] * 26
    for at, value in changes.items():
        fields[int(at[1:])] = value
    return "\t".join(fields)


@pytest.mark.data
def test_criteo_holds_what_the_text_says(tmp_path):
    out = convert("criteo", data("criteo-sample"), "--out", tmp_path)
    assert "train_8000.parquet: 8,000 rows" in out
    for name in ("train_8000", "test_2000"):
        text = (data("criteo-sample") / f"{name}.tsv").read_text().split("\n")
        rows = rows_of(tmp_path / f"{name}.parquet")
        assert len(rows) == len(text) - 1
        for i, (line, row) in enumerate(zip(text, rows)):
            fields = line.split("\t")
            want = [int(fields[0]), *(int(f) if f else None for f in fields[1:14]), *(int(f, 16) if f else None for f in fields[14:]), i]
            assert list(row.values()) == want
    assert min(r["I2"] for r in rows_of(tmp_path / "train_8000.parquet")) == -2
    assert check_reads(tmp_path) == {"train": 7200, "eval": 800, "test": 2000}


def test_criteo_quirks(tmp_path):
    """Byte-order mark, CRLF, empty and negative values, a file without labels, gzip, day_2 before day_10."""
    days = {n: [criteo_line(c1="-3", c2="", c14="", count=str(n)) for _ in range(n)] for n in (1, 2, 10)}
    for n, text in days.items():
        (tmp_path / f"day_{n}.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + "\r\n".join(text).encode()))
    unlabelled = "\t".join(criteo_line().split("\t")[1:])
    (tmp_path / "test.txt").write_text(unlabelled + "\n")
    out = tmp_path / "out"
    assert criteo.convert(tmp_path, out) == {"day_1": 1, "day_2": 2, "day_10": 10, "test": 1}
    row = rows_of(out / "day_10.parquet")[9]
    assert (row["I1"], row["I2"], row["I3"], row["C1"], row["C2"], row["row"]) == (-3, None, 10, None, 0x68FD1E64, 9)
    assert "label" not in pq.read_schema(out / "test.parquet").names
    found = tomllib.loads((out / "config.toml").read_text())["data"]["parquet"]
    assert found["train"] == ["day_1.parquet", "day_2.parquet"], "the newest day is held out, half and half"
    assert found["eval"] == found["test"] == ["day_10.parquet"]
    assert check_reads(out) == {"train": 3, "eval": 5, "test": 5}


def test_criteo_needs_labels_and_files(tmp_path):
    with pytest.raises(DataError, match="no Criteo file"):
        criteo.convert(tmp_path, tmp_path / "out")
    (tmp_path / "test.txt").write_text("\t".join(criteo_line().split("\t")[1:]) + "\n")
    with pytest.raises(DataError, match="no file has labels"):
        criteo.convert(tmp_path, tmp_path / "out")
    (tmp_path / "train.txt").write_text("")
    with pytest.raises(DataError, match="it is empty"):
        criteo.convert(tmp_path, tmp_path / "out")
    (tmp_path / "train.txt").unlink()
    (tmp_path / "train.gz").write_bytes(gzip.compress((criteo_line() + "\n").encode() * 5000)[:-20])
    with pytest.raises(DataError, match=r"cannot be read: Truncated(.|\n)*train.gz"):
        criteo.convert(tmp_path, tmp_path / "out")
    (tmp_path / "train.txt").write_text(criteo_line())
    with pytest.raises(DataError, match="would both become"):
        criteo.convert(tmp_path, tmp_path / "out")


BAD = {
    "it has 3 fields instead of 40": "1\t2\t3",
    "it is empty": "",
    "label = 2 is neither 0 nor 1": criteo_line(label="2"),
    "label = -1 is neither 0 nor 1": criteo_line(label="-1"),
    "label is empty": criteo_line(label=""),
    "I4 = '1.5' is not a whole number (int64)": criteo_line(c4="1.5"),
    "I4 = '99999999999999999999' is not a whole number (int64)": criteo_line(c4="99999999999999999999"),
    "C3 = '68fd1e6' is not 8 hexadecimal digits": criteo_line(c16="68fd1e6"),
    "C3 = '68fd1e6g' is not 8 hexadecimal digits": criteo_line(c16="68fd1e6g"),
}


@pytest.mark.parametrize("why", BAD)
def test_a_bad_line_stops_with_file_and_line(why, tmp_path):
    (tmp_path / "train.txt").write_text("\n".join([criteo_line()] * 6 + [BAD[why]] + [criteo_line()]) + "\n")
    with pytest.raises(DataError) as error:
        criteo.convert(tmp_path, tmp_path / "out")
    assert why in str(error.value)
    assert "train.txt, line 7" in str(error.value)
    assert not (tmp_path / "out" / "train.parquet").exists(), "no half-written file"


def test_bad_lines_are_quarantined_counted_and_kept(tmp_path):
    text = [criteo_line(count=str(i)) for i in range(30)]
    for i, line in enumerate(BAD.values()):
        text.insert(3 * i + 1, line)
    (tmp_path / "train.txt").write_text("\n".join(text) + "\n")
    out = convert("criteo", tmp_path, "--out", tmp_path / "out", "--bad-lines", "quarantine")
    assert f"{len(BAD)} lines refused" in out
    assert [r["I1"] for r in rows_of(tmp_path / "out" / "train.parquet")] == list(range(30))
    kept = (tmp_path / "out" / "bad_lines.tsv").read_text().split("\n")[:-1]
    assert [k.split("\t", 3)[:3] for k in kept] == [["train.txt", str(3 * i + 2), why] for i, why in enumerate(BAD)]
    assert [k.split("\t", 3)[3] for k in kept] == list(BAD.values())
    with pytest.raises(ConfigError, match="no policy 'drop'"):
        criteo.convert(tmp_path, tmp_path / "out", bad_lines="drop")
    (tmp_path / "train.txt").write_text("\n".join(text[:1]))
    criteo.convert(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out" / "bad_lines.tsv").exists(), "that of the earlier conversion is gone"


def test_blocks_and_compression_do_not_change_the_bytes(tmp_path, monkeypatch):
    """However the text is cut into blocks, the same row groups come out; a bad line keeps its number."""
    monkeypatch.setattr(lines, "ROW_GROUP", 64)
    text = "".join(criteo_line(count=str(i), c14="" if i % 3 else f"{i:08x}") + "\n" for i in range(500)).encode()
    written = []
    for name, block, packed in (("a", 1 << 24, False), ("b", 3000, False), ("c", 5000, True)):
        monkeypatch.setattr(lines, "_BLOCK", block)
        folder = tmp_path / name
        folder.mkdir()
        (folder / ("train.gz" if packed else "train.txt")).write_bytes(gzip.compress(text) if packed else text)
        criteo.convert(folder, folder / "out")
        written.append(bytes_of(folder / "out"))
    assert written[0] == written[1] == written[2]
    assert pq.ParquetFile(tmp_path / "a" / "out" / "train.parquet").metadata.num_row_groups == 8
    (tmp_path / "b" / "train.txt").write_bytes(text + b"broken\n")
    with pytest.raises(DataError, match=r"train.txt, line 501"):
        criteo.convert(tmp_path / "b", tmp_path / "b" / "out")


def test_memory_does_not_grow_with_the_file(tmp_path):
    """Peak resident memory of six times as many lines, in blocks and row groups small enough for many of each."""
    script = (
        "import sys; from pathlib import Path; from gem_core.train.measure import peak_resident; from gem_data import criteo, lines\n"
        "lines._BLOCK, lines.ROW_GROUP = 1 << 18, 4096\n"
        "criteo.convert(Path(sys.argv[1]), Path(sys.argv[2]))\n"
        "print(peak_resident())"
    )
    rng = np.random.default_rng(0)
    block = "".join(criteo_line(c14=f"{v:08x}", count=str(v % 999)) + "\n" for v in rng.integers(0, 2**32, 60_000))
    peaks = []
    for copies in (1, 6):
        file = tmp_path / f"train{copies}.txt"
        with open(file, "w") as out:
            out.writelines([block] * copies)
        done = subprocess.run([sys.executable, "-c", script, file, tmp_path / "out"], capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout))
    assert peaks[1] - peaks[0] < file.stat().st_size / 4, peaks


# --- Avazu ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.data
def test_avazu_holds_what_the_text_says(tmp_path):
    convert("avazu", data("avazu-sample"), "--out", tmp_path)
    header = (data("avazu-sample") / "train_9000.csv").open().readline().strip().split(",")
    for name in ("train_9000", "test_1000"):
        text = [line.split(",") for line in (data("avazu-sample") / f"{name}.csv").read_text().split()]
        text = [dict(zip(header, t)) for t in text if t[0] != "id"]
        rows = rows_of(tmp_path / f"{name}.parquet")
        assert len(rows) == len(text)
        for line, row in zip(text, rows):
            time = datetime.datetime.strptime(line["hour"] + "+0000", "%y%m%d%H%z")
            assert (row["timestamp"], row["hour"], row["weekday"]) == (time.timestamp(), time.hour, time.weekday())
            for column in (*avazu.NUMBERED, "click", "id"):
                assert row[column] == int(line[column])
            for column in avazu.HASHED:
                assert row[column] == int(line[column], 16)
    assert max(r["id"] for r in rows_of(tmp_path / "train_9000.parquet")) > 2**63, "past the signed range, and exact"
    assert check_reads(tmp_path) == {"train": 8099, "eval": 900, "test": 1000}


def avazu_file(path, *rows, header=True, click=True):
    names = [n for n in avazu.LAYOUT if click or n != "click"]
    plain = dict.fromkeys(names, "0") | dict.fromkeys(avazu.HASHED, "1fbe01fe") | {"id": "1", "hour": "14102100"}
    text = [",".join(names)] if header else []
    path.write_text("\n".join([*text, *(",".join((plain | row)[n] for n in names) for row in rows)]) + "\n")


def test_avazu_times_and_unlabelled_files(tmp_path):
    avazu_file(
        tmp_path / "train.csv", {"hour": "14022823"}, {"hour": "16022900"}, {"hour": "99123123", "id": str(2**64 - 1)}, {"C20": "-1"}
    )
    avazu_file(tmp_path / "test.csv", {}, {}, header=False, click=False)
    assert avazu.convert(tmp_path, tmp_path / "out") == {"test": 2, "train": 4}
    rows = rows_of(tmp_path / "out" / "train.parquet")
    times = [datetime.datetime.fromtimestamp(r["timestamp"], datetime.UTC) for r in rows]
    assert [f"{t:%Y-%m-%d %H}" for t in times] == ["2014-02-28 23", "2016-02-29 00", "2099-12-31 23", "2014-10-21 00"]
    assert [r["weekday"] for r in rows] == [t.weekday() for t in times]
    assert rows[2]["id"] == 2**64 - 1
    assert rows[3]["C20"] == -1
    assert "click" not in pq.read_schema(tmp_path / "out" / "test.parquet").names


@pytest.mark.parametrize("hour", ["14022900", "14102124", "14130100", "14100000", "141021", "1410210000"])
def test_avazu_refuses_times_that_are_none(hour, tmp_path):
    avazu_file(tmp_path / "train.csv", {}, {"hour": hour})
    with pytest.raises(DataError, match=rf"hour = {int(hour)} is no time YYMMDDHH(.|\n)*train.csv, line 3"):
        avazu.convert(tmp_path, tmp_path / "out")


def test_avazu_header(tmp_path):
    (tmp_path / "train.csv").write_text("id,click,hour\n1,0,14102100\n")
    with pytest.raises(DataError, match=r"the header lacks 'C1'(.|\n)*train.csv, line 1"):
        avazu.convert(tmp_path, tmp_path / "out")
    (tmp_path / "train.csv").write_text("1,2,3\n")
    with pytest.raises(DataError, match="no header and has 3 fields"):
        avazu.convert(tmp_path, tmp_path / "out")


# --- Open Bandit ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.data
def test_open_bandit_holds_what_the_text_says(tmp_path):
    convert("open-bandit", data("open-bandit"), "--out", tmp_path)
    with open(data("open-bandit") / "random_all_item_context.csv") as file:
        items = {int(r["item_id"]): r for r in csv.DictReader(file)}
    for name in ("bts_all", "random_all"):
        with open(data("open-bandit") / f"{name}.csv") as file:
            text = list(csv.DictReader(file))
        rows = rows_of(tmp_path / f"{name}.parquet")
        assert len(rows) == len(text) == 10_000
        for line, row in zip(text, rows):
            item = int(line["item_id"])
            time = datetime.datetime.fromisoformat(line["timestamp"])
            assert row["timestamp"] == (time - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)) // datetime.timedelta(microseconds=1)
            assert (row["item_id"], row["position"], row["click"]) == (item, int(line["position"]), int(line["click"]))
            assert row["policy"] == name.split("_")[0]
            assert row["propensity_score"] == float(line["propensity_score"])
            assert row["inverse_propensity"] == np.float32(1 / row["propensity_score"])
            assert row["affinities"] == [float(line[f"user-item_affinity_{i}"]) for i in range(80)]
            assert row["affinity"] == row["affinities"][item]
            assert row["item_feature_0"] == float(items[item]["item_feature_0"])
            assert all(row[c] == items[item][c] for c in open_bandit.ITEM)
            assert all(row[c] == line[c] for c in open_bandit.USER)
        assert 0.003 < np.mean([r["click"] for r in rows]) < 0.008
    found = check_reads(tmp_path)
    assert sum(found.values()) == 20_000
    assert min(found.values()) > 1500


def bandit_folder(folder, policy="random", campaign="men", rows=20, index=True, **changes):
    """A folder as distributed: the log beside its items, both with an unnamed index column."""
    folder = folder / policy / campaign
    folder.mkdir(parents=True)
    items = [[str(i), str(i), "0.5", "aa", "bb", "cc"] for i in range(3)]
    (folder / "item_context.csv").write_text(
        "\n".join(",".join(r) for r in [["", "item_id", *(f"item_feature_{i}" for i in range(4))], *items]) + "\n"
    )
    names = [
        "timestamp",
        "item_id",
        "position",
        "click",
        "propensity_score",
        *open_bandit.USER,
        *(f"user-item_affinity_{i}" for i in range(3)),
    ]
    values = dict.fromkeys(names, "0") | {"propensity_score": "0.25", "position": "1"}
    text = []
    for i in range(rows):
        row = values | {"timestamp": f"2019-11-24 00:00:{i:02}.5+00:00", "item_id": str(i % 3)} | (changes if i == 7 else {})
        text.append(",".join([str(i)] * index + [row[n] for n in names]))
    (folder / f"{campaign}.csv").write_text("\n".join([",".join([""] * index + names), *text]) + "\n")


def test_open_bandit_folders_as_distributed(tmp_path):
    bandit_folder(tmp_path / "in", "random")
    bandit_folder(tmp_path / "in", "bts")
    assert open_bandit.convert(tmp_path / "in", tmp_path / "out") == {"bts_men": 20, "random_men": 20}
    rows = rows_of(tmp_path / "out" / "random_men.parquet")
    assert [r["item_id"] for r in rows] == [i % 3 for i in range(20)]
    assert rows[3]["timestamp"] == 1574553603_500000
    assert check_reads(tmp_path / "out") == {"train": 32, "eval": 4, "test": 4}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"item_id": "3"}, "item_id = 3 is not in the item context of 3 items"),
        ({"propensity_score": "0"}, "propensity_score = 0.0 is no probability above 0"),
        ({"propensity_score": "1.5"}, "propensity_score = 1.5 is no probability"),
        ({"timestamp": "yesterday"}, "timestamp = 'yesterday' is not a time with its zone"),
        ({"user_feature_2": ""}, "user_feature_2 is empty"),
        ({"user-item_affinity_1": ""}, "user-item_affinity_1 is empty"),
    ],
)
def test_open_bandit_bad_lines(changes, why, tmp_path):
    bandit_folder(tmp_path, **changes)
    with pytest.raises(DataError) as error:
        open_bandit.convert(tmp_path / "random", tmp_path / "out")
    assert why in str(error.value)
    assert "men.csv, line 9" in str(error.value)


def test_open_bandit_needs_its_items(tmp_path):
    bandit_folder(tmp_path)
    context = tmp_path / "random" / "men" / "item_context.csv"
    context.write_text(context.read_text().replace("2,2,", "2,5,"))
    with pytest.raises(DataError, match="not numbered 0, 1, 2"):
        open_bandit.convert(tmp_path / "random", tmp_path / "out")
    context.unlink()
    with pytest.raises(DataError, match="no item context beside it"):
        open_bandit.convert(tmp_path / "random", tmp_path / "out")
    with pytest.raises(DataError, match="no log was found"):
        open_bandit.convert(tmp_path / "nothing", tmp_path / "out")


# --- all three ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.data
@pytest.mark.parametrize("form", CONVERTERS)
def test_end_to_end(form, tmp_path):
    """Convert (twice: the same bytes), inspect, and train the example configuration and the written one with wukong and dcnv2."""
    from gem_core.train import train  # type: ignore[attr-defined]

    for name in ("a", "b"):
        CONVERTERS[form].convert(data(FOLDERS[form]), tmp_path / name)
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b")
    label = {"criteo": "label", "avazu": "click", "open-bandit": "click"}[form]
    assert tomllib.loads(propose(tmp_path / "a"))["features"]["labels"]["ctr"].get("column", "ctr") == label
    for model in ("wukong", "dcnv2"):
        for text in (EXAMPLES / f"{form}.toml", tmp_path / "a" / "config.toml"):
            config = load_config(
                text,
                [
                    f"data.parquet.root={tmp_path / 'a'}",
                    f"model.name={model}",
                    "train.steps=12",
                    "data.batch_size=256",
                    "eval.max_batches=2",
                ],
            )
            result = train(config, run_dir=tmp_path / f"{model}-{text.stem}", quiet=True)
            assert result.status == "finished"
            assert result.samples == 12 * 256
            assert 0 < result.tasks["ctr"]["logloss"] < 1
