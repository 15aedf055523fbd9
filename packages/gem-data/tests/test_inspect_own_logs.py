"""gemrec data inspect on logs as companies export them, and filters on their times."""

import datetime
import tomllib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gem_core.cli import main
from gem_core.config.features import Features
from gem_core.errors import DataError
from gem_data import ParquetSource
from gem_data.filters import Filter
from gem_data.flat import import_log
from gem_data.inspect import propose

N = 1200
START = datetime.datetime(2025, 10, 9, tzinfo=datetime.UTC)


def exported(folder, **columns):
    """A day a folder, zoned times in milliseconds, ids as text, a purchase that is null where nobody clicked."""
    clicked = [int(i % 3 == 0) for i in range(N)]
    table = {
        "event_id": list(range(N)),
        "ts": pa.array([START + datetime.timedelta(minutes=10 * i) for i in range(N)], pa.timestamp("ms", "UTC")),
        "user": [f"{i % 150:08x}-0000-4000-8000-000000000000" for i in range(N)],
        "sku": [f"sku-{i % 40}" for i in range(N)],
        "clicked": clicked,
        "purchased": pa.array([int(i % 6 == 0) if c else None for i, c in enumerate(clicked)], pa.int64()),
        **columns,
    }
    days = pa.table(table)
    for day in range(3):
        (folder / f"day=2025-10-{9 + day:02}").mkdir(parents=True)
        pq.write_table(days.slice(day * N // 3, N // 3), folder / f"day=2025-10-{9 + day:02}" / "a.parquet")
    return tomllib.loads(propose(folder)), propose(folder)


def rows_of(folder, proposed, split):
    options = proposed["data"]["parquet"]
    features = Features.model_validate(proposed["features"])
    source = ParquetSource(str(folder), features, batch_size=256, filter=options[f"{split}_filter"])
    return sum(len(batch) for batch in source)


def test_the_proposal_reads_a_log_with_zoned_times(tmp_path):
    proposed, _ = exported(tmp_path)
    counts = [rows_of(tmp_path, proposed, split) for split in ("train", "eval")]
    assert sum(counts) == N
    assert counts[1] == pytest.approx(N / 10, abs=2)


def test_what_is_known_after_the_impression_is_no_feature(tmp_path):
    proposed, text = exported(tmp_path)
    features = proposed["features"]
    assert features["labels"] == {"ctr": {"column": "clicked"}, "cvr": {"column": "purchased", "mask": "clicked"}}
    assert set(features["sparse"]) == {"user", "sku"}
    assert "as a feature it leaks" in text


def test_rows_numbers_and_days_are_no_features(tmp_path):
    proposed, text = exported(tmp_path, digest=[f"{i:040x}" for i in range(N)])
    assert proposed["features"]["sample_id"] == "event_id"
    assert "# left out: digest: has another value in every row" in text
    assert "# left out: day: a folder's name that tells the time" in text
    assert proposed["eval"] == {"group": "user"}  # a UUID is an id, not free text; text cannot be a column of the batch
    assert "columns" not in proposed["features"]


def test_amounts_in_whole_numbers_are_no_ids(tmp_path):
    proposed, _ = exported(tmp_path, price=[5 + i % 50 for i in range(N)], slot=[i % 3 for i in range(N)])
    assert set(proposed["features"]["dense"]) == {"price"}
    assert "slot" in proposed["features"]["sparse"]


def test_a_purchase_missing_at_a_click_is_no_label(tmp_path):
    proposed, _ = exported(tmp_path, purchased=pa.array([None] * (N - 1) + [1], pa.int64()))
    assert set(proposed["features"]["labels"]) == {"ctr"}


def test_times_as_text_are_left_out(tmp_path):
    seen = [["2025-10-01", "2025-10-02"]] * N
    _, text = exported(tmp_path, shown=["2025-10-09T10:00:00Z"] * N, hist_sku=[["sku-1", "sku-2"]] * N, hist_time=seen)
    assert "# left out: shown: times as text; store them as timestamps" in text
    assert "# left out: hist_time: times as text; store them as timestamps" in text


@pytest.mark.parametrize(
    ("column", "words"),
    [
        ([0, 1, 2] * 4, "it holds 0 to 2"),
        (["yes", "no"] * 6, "it is of type string"),
        ([0, None, 1] * 4, "4 of 12 rows miss it"),
        ([[1], [0]] * 6, "it holds lists"),
    ],
)
def test_a_column_called_like_a_label_is_told_apart(tmp_path, column, words):
    pq.write_table(pa.table({"item": [0, 1, 2] * 4, "click": column}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=f"no column looks like a label; 'click' is called like one, but {words}"):
        propose(tmp_path / "a.parquet")


ZONED = pa.timestamp("ns", "Europe/Berlin")


@pytest.mark.parametrize(
    ("kind", "text", "keep"),
    [
        (pa.timestamp("s"), "t < '2025-10-09 02:00:00'", [1, 1, 0, 0]),
        (pa.timestamp("s"), "t == '2025-10-09 01:00:00.5'", [0, 0, 0, 0]),
        (pa.timestamp("ms", "UTC"), "t >= '2025-10-09 02:00:00'", [0, 0, 1, 1]),
        (ZONED, "t >= '2025-10-09 02:00:00'", [0, 0, 1, 1]),
        (ZONED, "t >= '2025-10-09 04:00:00+02:00'", [0, 0, 1, 1]),
        (ZONED, "t not in ['2025-10-09 01:00:00Z']", [1, 0, 1, 1]),
        (pa.date32(), "t >= '2025-10-09 00:00:00'", [1, 1, 1, 1]),
        (pa.date32(), "t in ['2025-10-09 01:00:00']", [0, 0, 0, 0]),
        (pa.date64(), "t in ['2025-10-09', '2020-01-01']", [1, 1, 1, 1]),
    ],
)
def test_times_compare_with_text(kind, text, keep):
    times = pa.array([datetime.datetime(2025, 10, 9, hour) for hour in range(4)], pa.timestamp("us")).cast(kind, safe=False)
    assert Filter(text).mask(pa.table({"t": times}), "here").to_pylist() == [bool(k) for k in keep]


@pytest.mark.parametrize(("factor", "unit"), [(1000, "ms"), (10**9, "ns")])
@pytest.mark.parametrize("column", ["ts", "history_ts"])
def test_times_in_a_finer_unit_than_declared_stop_the_reader(tmp_path, factor, unit, column):
    """They trained, with gaps a thousand times as long."""
    table = {"ts": [1_760_000_000 + i for i in range(8)], "history_ts": [[1_750_000_000]] * 8, "history_item": [[1]] * 8}
    table[column] = [[t * factor for t in x] if isinstance(x, list) else x * factor for x in table[column]]
    pq.write_table(pa.table({**table, "click": [0, 1] * 4}), tmp_path / "a.parquet")
    history = {"timestamps": "history_ts", "fields": {"item": {"column": "history_item", "rows": 9}}}
    features = {"timestamp": "ts", "sequences": {"history": history}, "labels": {"ctr": {"column": "click"}}}
    key = "timestamp_unit" if column == "ts" else "time_unit"

    def read():
        return sum(map(len, ParquetSource(str(tmp_path), Features.model_validate(features), batch_size=8, prefetch=0)))

    with pytest.raises(DataError, match=rf'lies after the year 2200 in {key} = "s"') as caught:
        read()
    assert f'set {key} = "{unit}"' in caught.value.fix
    assert "row 0" in caught.value.where
    (features if column == "ts" else history)[key] = unit
    assert read() == 8


def test_names_of_all_kinds(tmp_path):
    """Whatever a column is called, what is proposed can be read."""
    names = ["a\nb", "a\tb", 'quo"te', "back\\slash", "", "# no comment", "[br]", "a.b", "\x1b[1m", "two\u2028lines", "label"]
    columns = {name: [i % (2 if name == "label" else 9) for i in range(40)] for name in names}
    pq.write_table(pa.table({**columns, "null\nnull": pa.nulls(40)}), tmp_path / "a.parquet")
    features = tomllib.loads(propose(tmp_path / "a.parquet"))["features"]
    assert set(features["sparse"]) == set(names) - {"label"}


def proposed_of(folder, columns, **options):
    pq.write_table(pa.table(columns), folder / "log.parquet")
    text = propose(folder / "log.parquet", **options)
    return tomllib.loads(text), text


@pytest.mark.parametrize("name", ["from", "class", "a b", "it's", 'quo"te', "ﬁeld", "ts"])
def test_filters_name_times_of_all_kinds_of_names(tmp_path, name):
    """Words that Python keeps, and letters that it writes in another way, cannot stand in a filter as they are."""
    proposed, _ = proposed_of(
        tmp_path, {name: [START + datetime.timedelta(hours=i) for i in range(40)], "x": [*range(40)], "click": [0, 1] * 20}
    )
    assert [rows_of(tmp_path, proposed, split) for split in ("train", "eval")] == [36, 4]


def test_fields_of_structs_are_columns(tmp_path):
    history = [[{"item": (i + k) % 9, "at": START - datetime.timedelta(hours=9 - k)} for k in range(i % 4)] for i in range(40)]
    device = [None if i == 3 else {"os": f"os-{i % 3}", "seen": {"deep": i}, "price": i * 1.5} for i in range(40)]
    proposed, text = proposed_of(tmp_path, {"item": [i % 9 for i in range(40)], "events": history, "device": device, "click": [0, 1] * 20})
    features = proposed["features"]
    assert set(features["sparse"]) == {"item", "device.os"}
    assert set(features["dense"]) == {"device.price"}
    assert features["sequences"]["history"]["fields"] == {"item": {"column": "events.item", "table": "item"}}
    assert features["sequences"]["history"]["timestamps"] == "events.at"
    assert "# left out: device.seen: type struct<deep: int64>" in text
    (batch,) = ParquetSource(str(tmp_path), Features.model_validate(features), batch_size=40)
    assert batch.sequences["history"].fields["item"].tolist() == [event["item"] for events in history for event in events]
    assert batch.validate() is batch


def test_structs_as_events_are_what_the_sample_has(tmp_path):
    device = [{"os": f"os-{i % 3}"} for i in range(40)]
    pq.write_table(
        pa.table({"user": [i % 4 for i in range(40)], "at": [*range(40)], "device": device, "click": [0, 1] * 20}), tmp_path / "a.parquet"
    )
    import_log([tmp_path / "a.parquet"], tmp_path / "out", user="user", time="at", events=["device"])
    history = tomllib.loads(propose(tmp_path / "out"))["features"]["sequences"]["history"]
    assert history["fields"]["device_os"]["column"] == "history_device.os"
    assert history["target"] == {"device_os": "device.os"}


def test_rows_without_a_label_are_left_out_by_a_filter_that_says_so(tmp_path):
    columns = {"ts": [1_760_000_000 + i for i in range(40)], "x": [*range(40)], "y": [0.0, None, 1.0, 0.0] * 10}
    with pytest.raises(DataError, match=r"(?s)'y' is called like one, but 10 of 40 rows miss it.*left out by a filter"):
        proposed_of(tmp_path, columns)
    proposed, text = proposed_of(tmp_path, columns, label="y")
    assert proposed["features"]["labels"]["ctr"] == {"column": "y"}
    assert "# y: mean 0.3333 of 40 rows; 10 without it are left out by the filters" in text
    assert sum(rows_of(tmp_path, proposed, split) for split in ("train", "eval")) == 30
    proposed, _ = proposed_of(tmp_path, {name: columns[name] for name in ("x", "y")}, label="y")
    assert rows_of(tmp_path, proposed, "eval") == 30
    with pytest.raises(DataError, match="the column 'y' holds no value"):
        proposed_of(tmp_path, {**columns, "y": pa.nulls(40, pa.int64())}, label="y")
    with pytest.raises(DataError, match="the label is NaN in 10 of 40 rows"):
        proposed_of(tmp_path, {**columns, "y": [0.0, float("nan"), 1.0, 0.0] * 10}, label="y")


def test_what_the_presets_ask_of_a_history_and_it_lacks_is_switched_off(tmp_path):
    columns = {"item": [i % 9 for i in range(40)], "click": [0, 1] * 20, "hist_item": [[1, 2][: i % 3] for i in range(40)]}
    both = {**columns, "hist_ts": [[1_760_000_000, 1_760_000_001][: i % 3] for i in range(40)]}
    other = {"x": columns["item"], **{name: both[name] for name in ("click", "hist_item", "hist_ts")}}
    event = {"columns": {"time_buckets": 0}, "both": None, "other": {"compare": False}}
    for name, table in {"columns": columns, "both": both, "other": other}.items():
        proposed, text = proposed_of(tmp_path, table)
        assert proposed.get("model", {}).get("sequence", {}).get("event") == event[name]
        (tmp_path / "my.toml").write_text(text)
        options = ["train.steps=1", "train.tensorboard=false", "model.preset=tiny"]
        options = [word for option in options for word in ("--set", option)]
        assert main(["train", str(tmp_path / "my.toml"), *options, "--run-dir", str(tmp_path / name)]) == 0


def test_what_one_history_lacks_and_another_has_is_told(tmp_path):
    """The model has one setting for all of them."""
    columns = {"item": [i % 9 for i in range(40)], "click": [0, 1] * 20, "hist_item": [[1, 2][: i % 3] for i in range(40)]}
    columns |= {
        "hist_ts": [[1_760_000_000, 1_760_000_001][: i % 3] for i in range(40)],
        "hist_shop": [[1, 2, 3][: i % 4] for i in range(40)],
    }
    proposed, text = proposed_of(tmp_path, columns)
    assert proposed["model"]["sequence"]["event"] == {"compare": False, "time_buckets": 0}
    assert "# history2: its events have no times; one setting for all, so history goes without too" in text


def test_a_log_without_a_feature_is_refused(tmp_path):
    with pytest.raises(DataError, match="no column could be a feature of the sample itself: 'x' holds one value only"):
        proposed_of(tmp_path, {"x": [1] * 40, "click": [0, 1] * 20})


def test_numbers_written_as_text_are_told(tmp_path):
    price, plain = [f"1,{i:03}.50" for i in range(40)], [f"{i:05}" for i in range(40)]
    _, text = proposed_of(tmp_path, {"price": price, "share": [f"{i},5 %" for i in range(40)], "zip": plain, "click": [0, 1] * 20})
    assert "# price: about 40 values in 40 rows, 0 missing; numbers as text, such as '1,000.50': as ids they have no order" in text
    assert "such as '0,5 %'" in text
    assert text.count("numbers as text") == 2


def test_ids_that_will_grow_are_told(tmp_path):
    """A table has a row for each number up to the largest seen; the next user is beyond it."""
    columns = {"user_id": [i % 9 for i in range(40)], "slot": [i % 3 for i in range(40)], "click": [0, 1] * 20}
    _, text = proposed_of(tmp_path, columns)
    assert "# user_id: a larger id than any here will be refused; where new ones come, set hash = true." in text
    _, text = proposed_of(tmp_path, {**columns, "user_id": [f"u{i % 9}" for i in range(40)]})
    assert "a larger id" not in text


def test_columns_called_like_what_is_proposed(tmp_path):
    """A rate of clicks may be a feature, and a column may be called history: names of features, histories and tasks are apart."""
    columns = {"ctr": [0.1 * (i % 7) for i in range(40)], "history": [i % 9 for i in range(40)], "clicked": [0, 1] * 20}
    proposed, _ = proposed_of(tmp_path, {**columns, "hist_item": [[1, 2][: i % 3] for i in range(40)]})
    features = proposed["features"]
    assert (list(features["dense"]), list(features["sparse"])) == (["ctr"], ["history"])
    assert (list(features["sequences"]), features["labels"]) == (["history2"], {"clicked": {}})


def test_a_history_belongs_to_the_column_that_it_was_made_of(tmp_path):
    """Not to another one whose name says the same."""
    columns = {"user": [i % 4 for i in range(40)], "at": [*range(40)], "item": [f"i{i % 9}" for i in range(40)], "click": [0, 1] * 20}
    pq.write_table(pa.table({**columns, "item_id": [f"x{i % 5}" for i in range(40)]}), tmp_path / "a.parquet")
    import_log([tmp_path / "a.parquet"], tmp_path / "out", user="user", time="at", events=["item", "item_id"])
    history = tomllib.loads(propose(tmp_path / "out"))["features"]["sequences"]["history"]
    asked = {field["column"]: history["target"][name] for name, field in history["fields"].items()}
    assert asked == {"history_item": "item", "history_item_id": "item_id"}


def test_ids_that_are_floats_are_told(tmp_path):
    """As pandas writes a column of whole numbers in which one is missing."""
    columns = {
        "item_id": [float(i % 9) if i else None for i in range(40)],
        "device": [i % 2 + 0.5 for i in range(40)],
        "click": [0, 1] * 20,
    }
    _, text = proposed_of(tmp_path, columns)
    assert text.count("whole numbers that are stored as floats: if they are ids, store them as integers") == 1


def test_another_label_is_no_feature(tmp_path):
    """It is known when the label is, and may be the same."""
    label = [0, 1] * 20
    columns = {"x": [*range(40)], "click": label, "target": label, "buy": [0, None, 1, 0] * 10, "y": [i % 3 for i in range(40)]}
    columns["outcome"] = [{"Clicked": one} for one in label]
    proposed, text = proposed_of(tmp_path, columns)
    assert proposed["features"]["labels"] == {"ctr": {"column": "click"}}
    assert set(proposed["features"]["sparse"]) == {"x", "y"}
    assert "# left out: target: called like a label too" in text
    assert "--label buy takes it" in text
    assert "--label outcome.Clicked takes it" in text
    proposed, _ = proposed_of(tmp_path, columns, label="target")
    assert proposed["features"]["labels"] == {"ctr": {"column": "target"}}
    assert set(proposed["features"]["sparse"]) == {"x", "y"}
