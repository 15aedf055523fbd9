"""gemrec data convert sequences: both text forms, odd ids and encodings, splits by hand, attributes, the same bytes again, training."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import gem_core.train
from gem_core.cli.groups import CommandGroups
from gem_core.config import load_config
from gem_core.errors import ConfigError, DataError
from gem_data.commands import register
from gem_data.sequences import convert

DATA = Path(os.environ.get("GEM_TEST_DATA") or Path(__file__).parents[4] / "shared" / "data")
LINES = "1 10 11 12 13\n2 14 10 15\n3 11 12\n4 16 17 18 10 11\n"


def text(folder, content, name="data.txt"):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def rows(folder, split):
    return [(r["user_id"], r["item_ids"], r["next_item"]) for r in pq.read_table(folder / f"{split}.parquet").to_pylist()]


TRAIN = [(1, [10], 11), (4, [16, 17], 18)]
VALID = [(1, [10, 11], 12), (2, [14], 10), (4, [16, 17, 18], 10)]
TEST = [(1, [10, 11, 12], 13), (2, [14, 10], 15), (4, [16, 17, 18, 10], 11)]


def test_splits_by_hand(tmp_path):
    found = convert(text(tmp_path, LINES), tmp_path / "out")
    assert rows(tmp_path / "out", "train") == TRAIN
    assert rows(tmp_path / "out", "valid") == VALID
    assert rows(tmp_path / "out", "test") == TEST
    assert (found.users, found.items, found.short, found.padding) == (3, 9, 1, 0)
    assert found.rows == {"train": 2, "valid": 3, "test": 3}


@pytest.mark.parametrize("form", ["pairs", "mixed", "gzip", "bom", "tabs"])
def test_the_same_interactions_in_other_forms(tmp_path, form):
    sequences = [line.split() for line in LINES.splitlines()]
    pairs = [(s[0], item) for s in sequences for item in s[1:]]
    if form == "pairs":  # users take turns; the order of each one's items is what counts
        by_turn = sorted(range(len(pairs)), key=lambda i: (sum(p[0] == pairs[i][0] for p in pairs[:i]), i))
        content = "".join(f"{pairs[i][0]} {pairs[i][1]}\n" for i in by_turn).encode()
    elif form == "mixed":  # a user's items go on in another line
        content = b"1 10 11\r\n2 14\r\n\r\n3 11 12\r\n1 12 13\r\n2 10 15\r\n4 16 17 18 10 11\r\n"
    elif form == "gzip":
        content = gzip.compress(LINES.encode())
    elif form == "bom":
        content = b"\xef\xbb\xbf" + LINES.encode()
    else:
        content = LINES.replace(" ", "\t").encode()
    convert(text(tmp_path, content), tmp_path / "out")
    assert [rows(tmp_path / "out", s) for s in ("train", "valid", "test")] == [TRAIN, VALID, TEST]


def test_ids_that_are_no_small_integers_are_named(tmp_path):
    content = "9007199254740993 Amélie Brazil Amélie Heat\n-5 Heat Brazil Ran\n".encode("latin-1")
    found = convert(text(tmp_path, content), tmp_path / "out")
    assert rows(tmp_path / "out", "test") == [(1, [1, 2, 1], 3), (2, [3, 2], 4)]
    assert pq.read_table(tmp_path / "out" / "items.parquet").to_pydict() == {
        "item_id": [1, 2, 3, 4],
        "name": ["Amélie", "Brazil", "Heat", "Ran"],
    }
    assert pq.read_table(tmp_path / "out" / "users.parquet")["name"].to_pylist() == ["9007199254740993", "-5"]
    assert found.rows["items"] == 4


@pytest.mark.parametrize(
    ("content", "padding", "first", "pad"),
    [
        ("1 0 0 5 6 7\n2 0 6 5 7\n", 3, [5, 6], 0),
        ("1 0 0 5 6 7\n2 6 0 5 7\n", 0, [0, 0, 5, 6], None),
        ("1 5 6 7\n2 6 5 7\n", 0, [5, 6], 0),
    ],
)
def test_item_0_is_padding_only_at_the_front(tmp_path, content, padding, first, pad):
    found = convert(text(tmp_path, content), tmp_path / "out")
    assert found.padding == padding
    assert rows(tmp_path / "out", "test")[0] == (1, first, 7)
    features = load_config(tmp_path / "out" / "config.toml").features
    assert features.next_item.pad == pad
    assert features.tables["item"].rows == 8


def test_who_is_validated_on(tmp_path):
    source = text(tmp_path, "".join(f"{u} {u + 1} {u + 2} {u + 3} {u + 4}\n" for u in range(50)))
    none = convert(source, tmp_path / "none", valid="none")
    assert "valid" not in none.rows
    assert rows(tmp_path / "none", "train")[7] == (7, [8, 9], 10)
    assert load_config(tmp_path / "none" / "config.toml").data.options()["parquet"]["eval"] == "test.parquet"
    convert(source, tmp_path / "some", valid="5", seed=3)
    chosen = sorted(np.random.RandomState(3).choice(50, 5, replace=False).tolist())
    assert [r[0] for r in rows(tmp_path / "some", "valid")] == chosen
    assert [r[0] for r in rows(tmp_path / "some", "train") if len(r[1]) == 1] == chosen
    with pytest.raises(ConfigError, match="says not whom"):
        convert(source, tmp_path / "bad", valid="51")


def test_attributes_of_items_and_users(tmp_path):
    source = text(tmp_path, LINES)
    (tmp_path / "a.json").write_text(json.dumps({"10": [1, 2], "12": [], "13": [7]}))
    people = {"user_id": [4, 1, 2], "age": [40, 10, 20], "sex": ["F", "M", "F"], "item_ids": [[1], [2], [3]]}
    pq.write_table(pa.table(people), tmp_path / "people.parquet")
    convert(source, tmp_path / "out", attributes=(tmp_path / "a.json", tmp_path / "people.parquet"))
    table = pq.read_table(tmp_path / "out" / "test.parquet").to_pydict()
    assert table["item_attributes"] == [[[1, 2], [], []], [[], [1, 2]], [[], [], [], [1, 2]]]
    assert (table["age"], table["sex"]) == ([10, 20, 40], ["M", "F", "F"])
    features = load_config(tmp_path / "out" / "config.toml").features
    assert features.sequences["history"].fields["attributes"].rows == 3
    assert features.sparse["age"].rows == 41
    assert features.sparse["sex"].hash
    films = {"item_id": [10, 13, None], "genres": [["War", "Drama"], ["Art"], ["x"]], "title": ["a", "b", "c"]}
    pq.write_table(pa.table(films), tmp_path / "films.parquet")
    convert(source, tmp_path / "films", attributes=(tmp_path / "films.parquet",))
    assert pq.read_table(tmp_path / "films" / "test.parquet")["item_attributes"].to_pylist()[0] == [[3, 2], [], []]


def test_what_cannot_be_read_is_said(tmp_path):
    for content, message in (
        (b"", "no lines"),
        (b"\x1f\x8b\x08broken", "cannot be read"),
        (b"1 2\n3 4\n", "no user has 3 items"),
        (b"PAR1\0", "not text"),
    ):
        with pytest.raises(DataError, match=message):
            convert(text(tmp_path, content), tmp_path / "out")
    with pytest.raises(DataError, match="cannot be read"):
        convert(tmp_path / "nothing.txt", tmp_path / "out")
    source = text(tmp_path, LINES)
    with pytest.raises(ConfigError, match="needs 3 items"):
        convert(source, tmp_path / "out", min_length=2)
    for name, content in (("a.json", b"[1]"), ("b.json", b'{"x": ["y"]}'), ("c.parquet", b"no")):
        with pytest.raises(DataError, match="attributes cannot be read"):
            convert(source, tmp_path / "out", attributes=(text(tmp_path, content, name),))


def test_the_command_says_what_was_left_out(tmp_path):
    app = CommandGroups()
    app.owner = "gem-data"
    register(app)
    source = text(tmp_path, LINES.replace("10 11 12 13", "0 0 10 11 12 13"))
    words = ["convert", "sequences", str(source), "--out", str(tmp_path / "out"), "--min-length", "4"]
    result = CliRunner().invoke(app.group("data"), words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "2 users, 7 items; 2 users with fewer than 4 items were left out" in result.output
    assert "2 were dropped as padding" in result.output
    assert "test.parquet: 2 rows" in result.output


def test_beauty_from_file_to_hit_rate_and_the_same_bytes_again(tmp_path):
    """The converted file trains; what it reaches is a benchmark's matter."""
    source = DATA / "s3rec" / "Beauty.txt"
    if not source.is_file():
        pytest.skip(f"{source} is not there (set GEM_TEST_DATA)")
    attributes = DATA / "s3rec" / "Beauty_item2attributes.json"
    first = convert(source, tmp_path / "a", attributes=(attributes,))
    assert (first.users, first.items, first.rows) == (22_363, 12_101, {"train": 22_363, "valid": 22_363, "test": 22_363})
    convert(source, tmp_path / "b", attributes=(attributes,))
    for file in sorted((tmp_path / "a").iterdir()):
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name
    changes = [
        f"data.parquet.root={tmp_path / 'a'}", "run.device=cpu", "train.steps=12", "data.batch_size=64", "train.tensorboard=false",
        "model.dim=32", "model.embedding_dim=32", "model.retrieval.negatives=20", "eval.max_batches=1",
        "features.sequences.history.max_length=20", "train.log_every=4",
    ]  # fmt: skip
    result = gem_core.train(load_config(tmp_path / "a" / "config.toml", changes), run_dir=tmp_path / "run", quiet=True)
    assert 0 <= result.tasks["next_item"]["hr@50"] <= 1
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0]


def test_movielens_file_gives_the_published_protocols(tmp_path):
    source = DATA / "ml-1m" / "ml-1m.txt.gz"
    if not source.is_file():
        pytest.skip(f"{source} is not there (set GEM_TEST_DATA)")
    found = convert(source, tmp_path / "out", valid="512")
    assert (found.users, found.items, found.rows) == (6_040, 3_416, {"train": 6_040, "valid": 512, "test": 6_040})
    train, test = rows(tmp_path / "out", "train"), rows(tmp_path / "out", "test")
    assert sum(len(history) + 1 for _, history, _ in test) == 999_611
    held = {user for user, _, _ in rows(tmp_path / "out", "valid")}
    assert all(len(a[1]) == len(b[1]) - (2 if a[0] in held else 1) for a, b in zip(train, test))
