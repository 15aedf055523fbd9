"""gemrec report and gemrec export-embeddings: what the page says against the run's own files, and what it must not need."""

from __future__ import annotations

import json
import re
import shutil
import struct
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from gem_core.batch import Batch
from gem_core.cli.app import build
from gem_core.config import load_config
from gem_core.errors import CheckpointError
from gem_core.metrics.curve import CalibrationCurve
from gem_core.report.charts import Line, lines, shares
from gem_core.report.page import page
from gem_core.report.run import Inspection, read
from gem_core.report.sections import SECTIONS
from gem_core.train import quickstart_path, train
from gem_core.train.offline import loaded_run
from gem_core.train.tensorfile import read_tensors

VOID = {"meta", "link", "br", "img"}


class Structure(HTMLParser):
    """Checks that every tag is closed in order; collects text by section, and every address that the page names."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.section, self.text, self.addresses, self.tags = "", {}, [], []

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.tags.append(tag)
        if tag == "section":
            self.section = found["id"]
        self.addresses += [v for k, v in attrs if k in ("href", "src", "action", "data", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [v for k, v in attrs if k in ("href", "src", "xlink:href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes another tag"

    def handle_data(self, data):
        self.text[self.section] = self.text.get(self.section, "") + data + " "


def parsed(text: str) -> Structure:
    found = Structure()
    found.feed(text)
    assert not found.open
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report") / "run"
    options = [
        "train.steps=12", "train.log_every=2", "data.batch_size=64", "data.eval_batch_size=500", "eval.every=4", "eval.max_batches=2",
        "data.synthetic.rows=2000", "data.synthetic.eval_rows=1000", "run.name=<b>mine</b> & more", "data.synthetic.length.law=lognormal",
        "data.synthetic.length.mean=4",
    ]  # fmt: skip
    train(load_config(quickstart_path(), options), run_dir=folder, quiet=True)
    return folder


def gemrec(*words: object) -> str:
    result = CliRunner().invoke(build(), [str(w) for w in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_page_holds_the_run_and_needs_nothing_else(run):
    assert "report.html" in gemrec("report", run)
    text = (run / "report.html").read_text()
    found = parsed(text)
    assert len(text) < 5 * 2**20
    assert not {"script", "link", "img", "iframe", "object"} & set(found.tags)
    assert all(a.startswith("#") for a in found.addresses)
    assert not re.search(r"https?://|@import|url\(", text), "nothing is fetched"
    assert "name='viewport'" in text
    want = ["overview", "results", "losses", "evaluations", "calibration", "speed", "model", "software", "configuration"]
    assert [s for s in found.text if s] == want
    assert {a.removeprefix("#") for a in found.addresses} == set(want)
    summary = json.loads((run / "summary.json").read_text())
    for task in ("ctr", "cvr"):
        for name in ("ne", "auc", "logloss", "bayes_ne"):
            value = summary["tasks"][task][name]
            assert ("undefined" if value is None else f"{value:.5f}") in found.text["results"]
    header = json.loads((run / "run.json").read_text())
    for name, version in {**header["versions"], **header["plugins"]}.items():
        assert name in found.text["software"]
        assert version in found.text["software"]
    assert f"{header['parameters']['sparse']:,}" in found.text["model"]
    assert "pffn" in found.text["model"], "FLOPs by part"
    assert "entries" in found.text["model"], "parameters by module"
    assert (run / "config.toml").read_text().strip() in found.text["configuration"]
    assert "12 steps" not in found.text["overview"]
    assert "<b>mine" not in text.split("<pre>")[0], "names are escaped"
    assert "NE" in found.text["results"]
    assert found.tags.count("svg") >= 8


def test_calibration_is_that_of_the_predictions(run):
    found = read(run).inspection
    assert isinstance(found, Inspection)
    with loaded_run(run) as loaded:
        from gem_core.train.build import build_source

        with torch.no_grad():
            pairs = [(b, loaded.parts.module(b).logits) for b in build_source(loaded.resolved, "eval", loaded.runtime)]
    p = torch.sigmoid(torch.cat([logits[:, 0] for _, logits in pairs]).double())
    y = torch.cat([b.labels[:, 0] for b, _ in pairs]).double()
    points = found.calibration["ctr"]
    assert 10 <= len(points) <= 15
    assert sum(q.rows for q in points) == found.samples == len(y) == 1000
    assert sum(q.rows * q.predicted for q in points) == pytest.approx(float(p.sum()), rel=1e-6)
    assert sum(q.rows * q.observed for q in points) == pytest.approx(float(y.sum()), rel=1e-9)
    order, at = p.sort().values, 0
    for q in points:
        assert q.predicted == pytest.approx(float(order[at : at + q.rows].mean()), rel=1e-4)
        assert q.low <= q.observed <= q.high
        at += q.rows


def test_curve_weights_masks_ties_and_ranks():
    batch = Batch(
        6,
        labels=torch.tensor([[1.0], [0], [1], [0], [1], [1]]),
        label_names=("ctr",),
        label_mask=torch.tensor([[True]] * 5 + [[False]]),
        weights=torch.tensor([1.0, 1, 2, 0, 1, 9]),
    )
    logits = torch.tensor([[0.0], [0.0], [3.0], [3.0], [40.0], [0.0]])
    whole, a, b = (CalibrationCurve(("ctr",)) for _ in range(3))
    whole.update(batch, logits, ("ctr",))
    (first, second, third) = whole.points()["ctr"]
    assert (first.rows, first.observed, round(first.predicted, 9)) == (2, 0.5, 0.5)
    assert (second.rows, second.observed) == (1, 1.0)
    assert second.predicted == pytest.approx(1 / (1 + 2.718281828459045**-3))
    assert third.rows == 1
    z = 1.96
    assert first.low == pytest.approx((0.5 + z * z / 4 - z * (0.125 + z * z / 16) ** 0.5) / (1 + z * z / 2))
    a.update(batch.select_range(0, 2), logits[:2], ("ctr",))
    b.update(batch.select_range(2, 6), logits[2:], ("ctr",))
    states = iter([torch.tensor([4]), torch.zeros(1, 1, dtype=torch.int64), *(m.state()["sums"] for m in b._set.metrics["ctr"].values())])
    a.merge(lambda _: [next(states)])
    assert a.points() == whole.points()
    assert CalibrationCurve(("ctr",)).points() == {"ctr": []}


def test_unfinished_and_moved_runs_are_told_about(run, tmp_path):
    """Without checkpoints, results or log lines the page still stands, and says what is not there."""
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(run / "config.toml", bare)
    found = parsed(page(read(bare)))
    assert "no usable checkpoint" in found.text["calibration"]
    assert "not finished" in found.text["overview"]
    assert "losses" not in found.text
    assert "--no-eval was given" in parsed(page(read(run, inspect=False))).text["calibration"]
    with pytest.raises(CheckpointError, match="no run folder"):
        read(tmp_path)
    (bare / "summary.json").write_text("{")
    with pytest.raises(CheckpointError, match="damaged"):
        read(bare)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        gemrec("report", run, "--no-eval", "--out", tmp_path / "file" / "x.html")


def test_a_million_steps_still_fit(run):
    whole = read(run, inspect=False)
    many = [{**whole.steps[0], "step": i} for i in range(200_000)]
    object.__setattr__(whole, "steps", many)
    assert len(page(whole)) < 2**20


def test_sections_are_a_list_that_grows(run, monkeypatch):
    monkeypatch.setattr("gem_core.report.page.SECTIONS", (*SECTIONS, lambda r: ("More", f"<p>{r.path.name}</p>"), lambda r: None))
    assert parsed(page(read(run, inspect=False))).text["more"].split() == ["More", "run"]


def test_charts_put_values_where_they_belong():
    chart = parsed(lines([Line("a", [(0, 1), (10, 3)], marks=True), Line("b", [(0, 2), (5, float("nan")), (10, 2)])], x="step", y="loss"))
    assert chart.tags.count("circle") == 2
    text = lines([Line("a", [(0, 1), (10, 3)])], x="step", y="loss")
    (path,) = re.findall(r"<path d='([^']*)'", text)
    (x0, y0), (x1, y1) = re.findall(r"[ML]([\d.]+) ([\d.]+)", path)
    assert float(x0) < float(x1)
    assert float(y0) > float(y1), "larger values are higher up"
    assert lines([], x="x", y="y") == lines([Line("a", [])], x="x", y="y")
    log = lines([Line("a", [(0.0, 1.0), (0.001, 0.002), (0.1, 0.1)], [(0, 0), (0.0, 0.01), (0.05, 0.2)])], x="p", y="rate", log=True)
    assert "nan" not in log
    assert parsed(log).tags.count("path") == 1
    assert "75.0%" in shares({"a": 3, "b": 1})
    assert "Nothing was recorded" in shares({"a": 0})


def test_embeddings_are_the_tables(run, tmp_path):
    out = tmp_path / "deep" / "tables.safetensors"
    text = gemrec("export-embeddings", run, "--out", out)
    found = read_tensors(out)
    with loaded_run(run) as loaded:
        features = loaded.resolved.config.features
        want = {n.removesuffix(".weight"): t for n, t in loaded.parts.tables.state_items() if n.endswith(".weight")}
        assert set(found) == set(want)
        for name, tensor in want.items():
            assert torch.equal(found[name], tensor.detach())
            assert f"{name}: {tensor.shape[0]:,} x {tensor.shape[1]}" in text
        raw = out.read_bytes()
        header = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
        reads = json.loads(header["__metadata__"]["features"])
        assert header["__metadata__"]["step"] == "12"
        assert reads == {path: features.table_of(path) for path in features.id_features()}
        assert set(reads.values()) == set(found)
    assert [p.name for p in out.parent.iterdir()] == [out.name], "no temporary file is left"
    with pytest.raises(CheckpointError, match="no checkpoint of step 3"):
        gemrec("export-embeddings", run, "--out", out, "--step", 3)
    with pytest.raises(CheckpointError, match="no run folder"):
        gemrec("export-embeddings", tmp_path, "--out", out)


def test_exported_files_open_in_safetensors(run, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    gemrec("export-embeddings", run, "--out", tmp_path / "t.safetensors")
    other = safetensors.load_file(str(tmp_path / "t.safetensors"))
    ours = read_tensors(Path(tmp_path / "t.safetensors"))
    assert all(torch.equal(other[name], ours[name]) for name in ours)
