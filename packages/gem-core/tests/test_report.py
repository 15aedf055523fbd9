"""gemrec report and gemrec export-embeddings: what the page says against the run's own files, and what it must not need."""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from gem_core.batch import Batch, SequenceGroup
from gem_core.cli.app import build
from gem_core.config import dump_toml, load_config
from gem_core.errors import CheckpointError, ConfigError
from gem_core.jagged import lengths_to_offsets
from gem_core.metrics.curve import CalibrationCurve
from gem_core.report.charts import COLOURS, Line, bars, lines, shares
from gem_core.report.page import page
from gem_core.report.run import Inspection, Lengths, count_lengths, labels, read
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
    want = ["overview", "results", "losses", "evaluations", "calibration", "speed", "memory", "data", "model", "software", "configuration"]
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
    assert "Learning rate" in found.text["losses"]
    assert "The training waited" in found.text["data"]
    assert "Events in history" in found.text["data"]
    assert "12 steps" not in found.text["overview"]
    assert "<b>mine" not in text.split("<pre>")[0], "names are escaped"
    assert "NE" in found.text["results"]
    assert found.tags.count("svg") >= 10


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


@pytest.mark.parametrize("wrong", ["eval.max_batches=-1", "eval.maxbatches=3"])
def test_a_wrong_override_is_an_error_and_no_gap_in_the_page(run, wrong):
    with pytest.raises(ConfigError, match=r"eval\.max"):
        read(run, overrides=[wrong])


def test_a_million_steps_still_fit(run):
    whole = read(run, inspect=False)
    many = [{**whole.steps[0], "step": i} for i in range(200_000)]
    object.__setattr__(whole, "steps", many)
    assert len(page(whole)) < 2**20


def test_sections_are_a_list_that_grows(run, monkeypatch):
    monkeypatch.setattr("gem_core.report.page.SECTIONS", (*SECTIONS, lambda r: ("More", f"<p>{r[0].path.name}</p>"), lambda r: None))
    assert parsed(page(read(run, inspect=False))).text["more"].split() == ["More", "run"]


@pytest.fixture(scope="module")
def others(run, tmp_path_factory):
    """A second training with another learning rate; and the first one dressed as a quantised run of eight ranks that was planned and
    profiled."""
    folder = tmp_path_factory.mktemp("others")
    second, eight = folder / "second", folder / "eight"
    config = load_config(run / "config.toml", ["train.optimizer.lr=0.004", "run.name=second"])
    train(config, run_dir=second, quiet=True)
    shutil.copytree(run, eight)
    header = json.loads((eight / "run.json").read_text())
    degrees = {"replicate": 1, "shard": 4, "expert": 2, "model": 4, "replica": 2}
    header |= {
        "name": "eight",
        "world": 8,
        "parallel": {"dense": "cut", "sparse": "spread", **degrees},
        "plan": ["tables: <whole> on rank 0"],
    }
    header["precision"] = {"recipe": "mxfp8", "sites": {"mxfp8": 3}}
    (eight / "run.json").write_text(json.dumps(header))
    steps = [{**r, "mfu": 0.25, "imbalance": 1.1, "imbalance_max": 1.4} for r in read(run, inspect=False).steps]
    (eight / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in steps))
    (eight / "guard.jsonl").write_text(
        json.dumps({"step": 4, "site": "layers.0.ffn", "before": "mxfp8", "after": "bf16", "why": "a<b"}) + "\n"
    )
    top = [{"name": "a_kernel", "calls": 2, "ms": 3.5, "share": 0.5}]
    times = {"wall_ms": 10.0, "busy_ms": 9.0, "idle_ms": 1.0, "communication_ms": 4.0, "exposed_ms": 1.5}
    for rank in range(2):
        (eight / "profile" / f"rank-{rank}").mkdir(parents=True)
        (eight / "profile" / f"rank-{rank}" / "summary.json").write_text(json.dumps({"steps": 5, **times, "top": top}))
    plan = {
        "world": 8, "gpu": "H200", "step_s": 0.085, "mfu": 0.3, "samples_per_s": 48000.0, "breakdown_s": {"work": 0.07, "host": 0.015},
        "collectives": {"ids": {"network_s": 0.004, "exposed_s": 0.001}}, "memory_bytes": {"activations": 2**34, "total": 2**35, "at": "x"},
    }  # fmt: skip
    (eight / "config.toml").write_text(dump_toml(load_config(eight / "config.toml").model_copy(update={"plan": plan})))
    return second, eight


def test_machines_are_told_about(run, others):
    text = page(read(others[1], inspect=False))
    found = parsed(text)
    assert "1.50" in found.text["profile"], "exposed communication"
    assert "2.50 ms of communication a step are hidden" in found.text["profile"]
    assert "a_kernel" in found.text["profile"]
    assert "worst step" in found.text["ranks"]
    assert "a<b" in found.text["guard"]
    assert "mxfp8" in found.text["guard"]
    assert "Dense part: cut, shard 4 x expert 2" in found.text["plan"]
    assert "Tables: spread, model 4 x replica 2" in found.text["plan"]
    assert "tables: <whole> on rank 0" in found.text["plan"]
    assert re.search(r"step, ms\s+85", found.text["plan"])
    assert re.search(r"MFU, %\s+30\s+25", found.text["plan"])
    drawn = text[text.index("id='plan'") :]
    squares = re.findall(r"fill='(#\w+)'/><text class='in'[^>]*>(\d+)<", drawn)
    assert [int(rank) for _, rank in squares] == [*range(8), *range(8)]
    assert len({colour for colour, _ in squares[:8]}) == 4, "a colour a place on the axis shard"
    assert squares[0][0] == squares[1][0] != squares[2][0]
    assert "Model FLOPs utilisation" in found.text["speed"]
    assert "ranks" not in parsed(page(read(run, inspect=False))).text


def test_runs_are_compared_with_a_table_of_differences(run, others, tmp_path):
    out = tmp_path / "both.html"
    gemrec("report", run, "--compare", others[0], others[1], "--out", out, "--no-eval")
    text = out.read_text()
    found = parsed(text)
    assert all(a.startswith("#") for a in found.addresses)
    assert labels([run, *others]) == ["<b>mine</b> & more", "second", "eight"]
    summaries = [json.loads((p / "summary.json").read_text())["tasks"]["ctr"]["ne"] for p in (run, others[0])]
    assert f"{summaries[1]:.5g} ({summaries[1] / summaries[0] - 1:+.2%})" in found.text["differences"]
    assert re.search(r"train.optimizer.lr\s+0.002\s+0.004", found.text["differences"])
    assert "data.batch_size" not in found.text["differences"], "only what differs is told"
    legend = text[text.index("Training loss") : text.index("Learning rate")]
    assert legend.count("<path") == 3
    for name in ("&lt;b&gt;mine", "second", "eight"):
        assert name in legend
    assert labels([run, run.parent / "run"]) == [str(run), str(run)]


def test_lengths_are_counted_by_powers_of_two():
    lengths = torch.tensor([0, 1, 2, 3, 4, 7, 8, 1000])
    batch = Batch(8, sequences={"h": SequenceGroup(lengths_to_offsets(lengths), {"x": torch.zeros(1025)})})
    assert count_lengths([batch, batch], most=8)["h"] == Lengths([1, 1, 2, 2, 1, 0, 0, 0, 0, 0, 1], 8, 1025 / 8, 1000)
    chart = bars({"0": 1, "1": 4}, x="events", y="samples")
    small, large = (float(h) for h in re.findall(r"<rect [^>]*height='([\d.]+)'", chart))
    assert large == pytest.approx(4 * small, rel=0.01)
    assert "Nothing was recorded" in bars({"0": 0}, x="x", y="y")


CHROMIUM = next((p for name in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(name))), None)

MEASURE = """<script>addEventListener("load", () => {
  const late = [...document.querySelectorAll("svg text")].filter(t => { const b = t.getBoundingClientRect(),
    s = t.closest("svg").getBoundingClientRect(); return b.right > s.right + 1 || b.left < s.left - 1 || b.bottom > s.bottom + 1 });
  const small = [...document.querySelectorAll("svg text")].filter(t => t.getBoundingClientRect().height < 9);
  const empty = [...document.querySelectorAll("section")].filter(s => s.getBoundingClientRect().height < 60);
  document.title = JSON.stringify({wide: document.documentElement.scrollWidth, inner: innerWidth, late: late.map(t => t.textContent),
    small: small.length, empty: empty.map(s => s.id)});
  parent.postMessage(document.title, "*") })</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits_a_phone_and_a_laptop(run, others, tmp_path, width):
    """In a browser, inside a frame of the width of the screen: nothing sticks out of the page or its chart, all labels can be read, no
    section is empty; and the screenshot is not blank."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--allow-file-access-from-files"]
    for name, runs in (("one", [read(others[1])]), ("three", [read(p, inspect=False) for p in (run, *others)])):
        text = page(*runs)
        (tmp_path / f"{name}.html").write_text(text.replace("</body>", MEASURE + "</body>"))
        frame = tmp_path / f"{name}-frame.html"
        frame.write_text(
            "<body style='margin:0'><script>onmessage = e => { document.body.dataset.found = e.data }</script>"
            f"<iframe src='{name}.html' width={width} height=900 frameborder=0></iframe>"
        )
        done = subprocess.run(
            [*command, "--virtual-time-budget=5000", "--dump-dom", frame.as_uri()], capture_output=True, text=True, timeout=90
        )
        (found,) = re.findall(r'data-found="([^"]*)"', done.stdout)
        measured = json.loads(found.replace("&quot;", '"').replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
        assert measured["inner"] == width
        assert measured["wide"] <= width, "the page is wider than the screen"
        assert measured["late"] == [], "labels stick out of their charts"
        assert measured["small"] == 0, "labels are too small to read"
        assert measured["empty"] == []
    shot = tmp_path / "shot.png"
    subprocess.run(
        [*command, f"--window-size={width},900", f"--screenshot={shot}", (tmp_path / "one.html").as_uri()], capture_output=True, timeout=90
    )
    assert struct.unpack(">II", shot.read_bytes()[16:24]) == (width, 900)
    assert shot.stat().st_size > 10_000, "a blank page compresses to less"


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
    gap = lines([Line("none", []), Line("b", [(0, 1), (1, 2)])], x="x", y="y")
    assert COLOURS[1] in gap, "a line keeps its colour where another has nothing"
    assert COLOURS[0] not in gap
    assert "<figcaption>" in gap
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
