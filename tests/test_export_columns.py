"""An exported package reads columns as training did: every way from values to ids and numbers, beside `gemrec predict` of the same file."""

from __future__ import annotations

import functools
import importlib.util
import io
import itertools
import json
import math
import sys
import types
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from gem_core.cli import main
from gem_core.config.features import Dense
from gem_core.errors import DataError
from gem_data import values

SERVE = Path(__file__).parents[1] / "docs" / "examples" / "serving" / "serve.py"
N = 240
CONFIG = """
[run]
device = "cpu"
[data]
source = "parquet"
batch_size = 80
[data.parquet]
root = "{folder}"
train = ["rows.parquet"]
eval = ["rows.parquet"]
[features]
timestamp = "at"
timestamp_unit = "ms"
fitted = "{folder}/fitted.json"
[features.tables]
item = {{ rows = 50, dim = 8 }}
word = {{ rows = 30, dim = 8 }}
[features.dense.price]
transform = "log1p"
clip = [0.0, 50.0]
mean = 1.5
std = 0.7
default = 2.0
[features.dense.score]
policy = "clip"
[features.vectors.picture]
dim = 3
[features.sparse.item]
table = "item"
default = 0
policy = "clip"
[features.sparse.query]
hash = true
rows = 40
[features.sparse.number]
hash = true
rows = 17
salt = 5
[features.sparse.pair]
cross = ["query", "number"]
rows = 60
[features.sparse.word]
table = "word"
vocabulary = true
default = 0
policy = "default"
[features.sparse.words]
table = "word"
vocabulary = true
default = 0
policy = "default"
pooling = "mean"
max_length = 3
weights = "words_weight"
[features.sparse.price_band]
column = "price"
edges = [1.0, 5.0, 20.0]
rows = 4
default = 0
[features.sparse.score_band]
column = "score"
buckets = 4
rows = 5
[features.sequences.seen]
timestamps = "seen_at"
time_unit = "s"
max_length = 6
drop_first = 1
order = "sort"
target = {{ item = "item" }}
[features.sequences.seen.fields.item]
table = "item"
column = "seen_item"
policy = "clip"
[features.sequences.seen.fields.tags]
column = "seen_tags"
hash = true
rows = 12
pooling = "mean"
[features.sequences.seen.fields.wait]
gap = "previous"
kind = "float"
transform = "log1p"
[features.sequences.seen.fields.age]
gap = "sample"
edges = [10.0, 100.0, 1000.0]
rows = 4
[features.sequences.seen.fields.amount]
column = "seen_amount"
kind = "float"
mean = 1.0
std = 2.0
[features.sequences.read]
max_length = 4
[features.sequences.read.fields.word]
column = "read_word"
table = "word"
vocabulary = true
default = 0
policy = "default"
[features.labels.click]
[model]
name = "gem"
preset = "tiny"
layers = 1
[model.sequence.event]
compare = false
time_buckets = 0
[train]
steps = 6
tensorboard = false
"""


def rows(seed: int = 3) -> list[dict]:
    rng = np.random.default_rng(seed)
    words = ["a", "bé", "a longer word than eight bytes", "日本語"]
    found = []
    for i in range(N):
        n, m, k = (int(rng.integers(0, high)) for high in (10, 5, 4))
        now = 1_700_000_000 + 1000 * i
        found.append(
            {
                "at": now * 1000 + 999,
                "price": None if i % 11 == 0 else float(rng.exponential(20)),
                "score": float(rng.normal()),
                "picture": rng.normal(size=3).astype(np.float32).tolist(),
                "item": None if i % 13 == 0 else int(rng.integers(0, 60)),
                "query": words[int(rng.integers(0, 4))] + str(int(rng.integers(0, 20))),
                "number": int(rng.integers(-50, 50)),
                "word": words[int(rng.integers(0, 4))] if i % 7 else "unheard of",
                "words": [words[j] for j in rng.integers(0, 4, k)] if i % 17 else None,
                "words_weight": rng.uniform(0, 2, k).astype(np.float32).tolist() if i % 17 else None,
                "seen_at": (now - rng.integers(0, 5000, n)).tolist(),
                "seen_item": rng.integers(0, 60, n).tolist(),
                "seen_tags": [[f"t{t}" for t in rng.integers(0, 9, int(rng.integers(0, 3)))] if j % 5 else None for j in range(n)],
                "seen_amount": rng.normal(size=n).astype(np.float32).tolist(),
                "read_word": [words[j] for j in rng.integers(0, 4, m)],
                "click": int(rng.integers(0, 2)),
            }
        )
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("columns")
    kinds = {"seen_tags": pa.list_(pa.list_(pa.string())), "picture": pa.list_(pa.float32()), "words": pa.list_(pa.string())}
    made = rows()
    table = pa.table({name: pa.array([row[name] for row in made], kinds.get(name)) for name in made[0]})
    pq.write_table(table, folder / "rows.parquet", row_group_size=100)
    (folder / "config.toml").write_text(CONFIG.format(folder=folder))
    assert main(["data", "vocab", str(folder / "config.toml"), "--most", "4"]) == 0
    assert main(["train", str(folder / "config.toml"), "--run-dir", str(folder / "run"), "--quiet"]) == 0
    assert main(["predict", str(folder / "run"), str(folder / "rows.parquet"), "--out", str(folder / "live.parquet")]) == 0
    assert main(["export", str(folder / "run"), "--out", str(folder / "package")]) == 0
    return folder


@pytest.fixture(scope="module")
def serve():
    spec = importlib.util.spec_from_file_location("serve", SERVE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["serve"] = module
    spec.loader.exec_module(module)
    return module


def test_columns_become_the_same_predictions(trained: Path, serve):
    # through JSON, as a request comes
    asked = [json.loads(json.dumps(row)) for row in rows()]
    got = torch.tensor([line["click"] for line in serve.Package(trained / "package").predict(asked)])
    live = torch.from_numpy(pq.read_table(trained / "live.parquet")["click_probability"].to_numpy().copy())
    assert float((got - live).abs().max()) < 1e-5
    assert float(live.std()) > 1e-4


def test_a_missing_list_is_an_empty_one_and_a_missing_value_is_not(trained: Path, serve):
    """What a column holds is in the manifest: a request does not tell."""
    package, row = serve.Package(trained / "package"), rows()[1]
    ids = package.manifest["features"]["ids"]
    assert {path for path, way in ids.items() if way["lists"]} == {"sparse.words", "sequences.seen.fields.tags"}
    assert {way["lists"] for way in ids.values()} == {True, False}

    def click(**changed):
        return package.predict([{**row, **changed}])[0]["click"]

    empty = {"words": [], "words_weight": []}
    assert click(words=None, words_weight=None) == click(**empty)
    assert click(word=None) == click(word="unheard of") != click()
    times = len(row["seen_at"])
    assert click(seen_tags=[None] * times) == click(seen_tags=[[]] * times) != click()
    for wrong in ({"word": ["a"]}, {"item": [3]}, {"words": "a", "words_weight": 1.0}):
        with pytest.raises(serve.Refused, match=r"where training read (single values|lists)"):
            click(**wrong)
    for column, value, said in (("seen_tags", "t1", "'t1' is no list"), ("seen_item", [3], r"\[3\] is of a type")):
        with pytest.raises(serve.Refused, match=said):
            click(**{column: [value] * times})


def test_numbers_are_scaled_as_in_training(serve):
    """Also those that a policy must mend, and those that float32 cannot hold."""

    def refuse(*what):
        raise DataError("refused")

    chunk = types.SimpleNamespace(fail=refuse)
    numbers = [0.0, -0.5, -1.0, -3.0, 7.5, 1e30, 1e300, -1e300, math.inf, -math.inf, math.nan, None]
    column = pa.array(numbers, pa.float64())
    for transform, policy, default, clip, std in itertools.product(
        ("none", "log1p"), ("error", "clip", "default"), (None, 2.0), (None, (-2.0, 9.0)), (1.0, 1e-10)
    ):
        if policy == "default" and default is None:
            continue
        spec = Dense(transform=transform, policy=policy, default=default, clip=clip, mean=0.5, std=std)
        for i, x in enumerate(numbers):
            try:
                want = float(values.dense(values.Site(chunk, "x", "dense.x"), column.slice(i, 1), spec)[0])
            except DataError:
                with pytest.raises(serve.Refused):
                    serve._number({"x": x}, "x", spec.model_dump())
            else:
                assert serve._number({"x": x}, "x", spec.model_dump()) == pytest.approx(want, rel=1e-6), (x, spec)


def test_what_training_would_refuse_is_refused(trained: Path, serve):
    package, row = serve.Package(trained / "package"), rows()[1]
    for wrong in ({"query": None}, {"score": float("nan")}, {"seen_item": [1]}, {"number": None}):
        with pytest.raises(serve.Refused):
            package.predict([{**row, **wrong}])
    for weights in (None, [1.0], [1.0, None], [1.0, -1.0], [1.0, float("nan")]):
        with pytest.raises(serve.Refused, match=r"words_weight: (not one weight for each|a weight is missing)"):
            package.predict([{**row, "words": ["a", "a"], "words_weight": weights}])
    for picture in ([1.0, None, 1.0], [1.0, float("inf"), 1.0]):
        with pytest.raises(serve.Refused, match="no list of 3 finite numbers"):
            package.predict([{**row, "picture": picture}])
    for name in ("score", "item", "at"):
        with pytest.raises(serve.Refused, match=r"no number|of a type|no time"):
            package.predict([{**row, name: "text"}])
    seconds = package.manifest["features"]["timestamp_unit"], package.manifest["features"]["sequences"]["seen"]["time_unit"]
    finer = {"at": 10**10 * serve.UNITS[seconds[0]]}, {"seen_at": [10**10 * serve.UNITS[seconds[1]]] * len(row["seen_at"])}
    for wrong in finer:
        with pytest.raises(serve.Refused, match="lies after the year 2200"):
            package.predict([{**row, **wrong}])
    with pytest.raises(serve.Refused, match="no time in whole"):
        package.predict([{**row, "seen_at": ["noon"] * len(row["seen_at"])}])
    for ids in ({"way": "id", "rows": 9, "policy": "clip", "default": None}, {"way": "hash", "rows": 9, "salt": 1, "default": None}):
        with pytest.raises(serve.Refused, match="of a type"):
            package._id("x", ids, 1.5)


def test_an_id_of_another_type_is_refused(trained: Path, serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The integer 7 and the text "7" are other ids: whoever reads the other one is told, instead of predicting from a stranger's row."""
    package, row = serve.Package(trained / "package"), rows()[1]
    ids = package.manifest["features"]["ids"]
    held = {name: ids[f"sparse.{name}"]["holds"] for name in ("number", "query", "pair", "word")}
    assert held == {"number": ["integers"], "query": ["text"], "pair": ["text", "integers"], "word": None}
    for wrong, kind in (({"number": "7"}, "integers"), ({"query": 7}, "text"), ({"seen_tags": [[7]] * len(row["seen_at"])}, "text")):
        with pytest.raises(serve.Refused, match=f"where training read {kind}"):
            package.predict([{**row, **wrong}])
    table = pq.read_table(trained / "rows.parquet")
    at = table.schema.get_field_index("number")
    pq.write_table(table.set_column(at, "number", table["number"].cast(pa.string())), tmp_path / "rows.parquet")
    asked = (
        ["predict", str(trained / "run"), str(tmp_path / "rows.parquet"), "--out", str(tmp_path / "out.parquet")],
        ["eval", str(trained / "run"), "--set", f"data.parquet.root={tmp_path}"],
        ["train", str(trained / "config.toml"), "--run-dir", str(tmp_path / "run"), "--set", f"data.parquet.eval={tmp_path}/rows.parquet"],
    )
    for words in asked:
        capsys.readouterr()
        assert main(words) == 2
        told = capsys.readouterr().err
        assert "the column holds text, " in told
        assert "number" in told


def test_the_script_names_the_line(trained: Path, serve, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serve, "Package", functools.cache(serve.Package))  # loading takes seconds
    good = json.dumps(rows()[1])
    for arguments, lines, words in (
        ([], [], "usage: "),
        ([trained / "nowhere"], [], "no folder of gemrec export: .*manifest.json"),
        ([trained / "package"], [good, "", "{"], "line 3 is no JSON"),
        ([trained / "package"], [good, "[1]"], "line 2 is no JSON object"),
        ([trained / "package"], [good, json.dumps({**rows()[1], "seen_item": 3})], "line 2: seen_item: 3 is no list"),
        ([trained / "package"], [good, json.dumps({**rows()[1], "picture": [1.0]})], "line 2: picture: no list of 3 finite numbers"),
    ):
        monkeypatch.setattr(sys, "argv", ["serve.py", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
        with pytest.raises(SystemExit, match=words):
            serve.main()


def test_a_vocabulary_that_grows_keeps_its_places(trained: Path, tmp_path: Path):
    config, before = str(trained / "config.toml"), json.loads((trained / "fitted.json").read_text())
    assert main(["data", "vocab", config, "--extend", str(trained / "fitted.json"), "--out", str(tmp_path / "more.json")]) == 0
    after = json.loads((tmp_path / "more.json").read_text())
    old, new = before["vocabularies"]["word"], after["vocabularies"]["word"]
    assert new[: len(old)] == old
    assert len(new) > len(old)
    assert after["edges"] == before["edges"]
    changes = [f"features.fitted={tmp_path / 'more.json'}", f"train.warm_start={trained / 'run'}", "features.tables.word.rows=40"]
    words = ["train", config, "--run-dir", str(tmp_path / "run"), "--quiet"]
    assert main([*words, *(w for change in changes for w in ("--set", change))]) == 0
    assert json.loads((tmp_path / "run" / "run.json").read_text())["warm_start"]["grown"] == {"word": [30, 40]}
    (tmp_path / "other.json").write_text(json.dumps({**after, "vocabularies": {"word": new[::-1]}}))
    changes[0] = f"features.fitted={tmp_path / 'other.json'}"
    assert main([*words[:-3], "--run-dir", str(tmp_path / "no"), "--quiet", *(w for c in changes for w in ("--set", c))]) == 2
