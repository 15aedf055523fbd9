"""``gemrec plan`` as its users meet it."""

from __future__ import annotations

import csv
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from plan_cases import workload

from gem_core.cli import main
from gem_core.config import config_from_dict, load_config, resolve
from gem_core.plugins import manager
from gem_parallel.plan.candidates import Dense, Sparse
from gem_parallel.plan.cluster import load_cluster
from gem_parallel.plan.command import configuration, workload_of
from gem_parallel.plan.measured import given, load_measurements, local_rates
from gem_parallel.plan.settings import from_parallel, to_parallel
from gem_parallel.plan.workload import Table

CLUSTERS = Path(__file__).parents[3] / "docs/examples/clusters"
H200, B200 = str(CLUSTERS / "h200-x8-host.toml"), str(CLUSTERS / "b200-3-tier.toml")

CONFIG = """
[run]
device = "cpu"
[data]
batch_size = 32
[data.synthetic]
rows = 256
eval_rows = 64
test_rows = 64
[model]
preset = "tiny"
[train]
steps = 2
tensorboard = false
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "my.toml"
    file.write_text(CONFIG)
    return file


def test_the_json_is_a_configuration_that_trains(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    assert main(["plan", str(config), "--cluster", H200, "--world", "1", "--sparse", "local", "--json", str(out)]) == 0
    text = capsys.readouterr().out
    for word in ("Axes on tiers", "Time of a step", "Memory of the fullest rank", "Efficiency", "scaling ratio"):
        assert word in text
    planned = json.loads(out.read_text())
    assert planned["parallel"]["dense"] == "single"
    assert planned["plan"]["step_s"] > 0
    assert main(["train", str(out), "--run-dir", str(tmp_path / "run"), "--quiet"]) == 0
    kept = load_config(tmp_path / "run" / "config.toml")
    assert kept.plan["step_s"] == pytest.approx(planned["plan"]["step_s"])
    assert load_config(out).train.steps == 2


def test_plan_of_eight_gpus_with_picture_ranks_and_reasons(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture, ranks = tmp_path / "plan.json", tmp_path / "plan.html", tmp_path / "ranks.csv"
    files = ["--json", str(out), "--html", str(picture), "--ranks", str(ranks)]
    assert main(["plan", str(config), "--cluster", H200, "--world", "8", *files, "--explain"]) == 0
    text = capsys.readouterr().out
    assert "Neighbours of the plan" in text
    assert re.search(r"ms\s+slower|as fast|does not fit", text)
    resolved = resolve(load_config(out)).config.parallel
    assert resolved.replicate * resolved.shard * resolved.expert == 8 == resolved.model * resolved.replica
    predicted = json.loads(out.read_text())["plan"]
    assert sum(predicted["breakdown_s"].values()) == pytest.approx(predicted["step_s"])
    assert predicted["memory_bytes"]["total"] < 150.1e9
    rows = list(csv.DictReader(ranks.open()))
    assert [int(r["rank"]) for r in rows] == list(range(8))
    assert max(float(r["compute_s"]) for r in rows) == pytest.approx(predicted["ranks"]["compute_s"]["max"], rel=1e-4)
    page = picture.read_text()
    parser = _Tags()
    parser.feed(page)
    assert parser.open == []
    assert parser.seen.count("svg") == 3
    assert page.count("<rect") > 50
    assert page.count(">peak ") == page.count(">the GPU: ") == 1
    lanes = re.findall(r"<b>(\w+)</b>:", page)
    assert "compute" in lanes
    assert all(f">{lane}<title>" in page for lane in lanes)
    assert len(re.findall(r">\d+\.\d [GM]B</text>", page)) >= 3
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")


class _Tags(HTMLParser):
    """Checks that every element is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)


TABLES = (*(Table(f"e{i}", 400_000, 64, 1, 1.0, 30.0) for i in range(2)), *(Table(f"t{i}", 200_000, 64, 1, 2.0) for i in range(6)))


@pytest.mark.parametrize(
    ("dense", "sparse"),
    [
        (Dense(8, 1, 1), Sparse("local", 1, 8)),
        (Dense(1, 8, 1, reshard=False), Sparse("torchrec", 8, 1, cuts=("row", "table"))),
        (Dense(2, 2, 2), Sparse("gem-2d", 4, 2, exchange="touched", cuts=("table", "row"), element=2)),
        (Dense(2, 4, 1), Sparse("gem-2d", 2, 4, exchange="whole", schedule="torchrec", cuts=("row", "row"))),
        (
            Dense(2, 4, 1, collective="copy-engine"),
            Sparse("gem-2d", 2, 4, exchange="whole", cuts=("row", "row"), collective="copy-engine"),
        ),
        (Dense(1, 1, 1), Sparse("fbgemm", 1, 1, element=2)),
        (Dense(2, 4, 1), Sparse("torchrec-2d", 4, 2, exchange="whole", schedule="torchrec", cuts=("column", "table"))),
        (Dense(2, 4, 1), Sparse("torchrec-2d", 4, 2, ("model", "replica"), "average", cuts=("row", "table"))),
    ],
)
def test_settings_describe_the_candidate(dense: Dense, sparse: Sparse) -> None:
    if sparse.strategy not in {spec.name for spec in manager().offers("sparse_strategy")}:
        pytest.skip(f"the strategy {sparse.strategy} is not offered here")
    work = workload(tables=TABLES)
    config = config_from_dict({"parallel": to_parallel(dense, sparse, work), "model": {"preset": "tiny"}})
    resolved = resolve(config)
    assert from_parallel(config, resolved.dense, resolved.sparse, work, dense.world) == (dense, [sparse])


GIVEN = """
[parallel]
timeout_s = 77
[parallel.fsdp]
prefetch = 2
[parallel.gem-2d]
output = "bf16"
dtype = "fp16"
unit_mb = 64
collective = "low-cta"
schedule = "torchrec"
"""


def test_options_of_the_user_are_counted_and_written(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is written is what was planned: its own prediction is the plan's, and nothing that was set gets lost."""
    monkeypatch.setattr("gem_parallel.plan.report.size_text", lambda size: f"{size:.0f} B")
    file, out, again = tmp_path / "own.toml", tmp_path / "plan.json", tmp_path / "again.json"
    file.write_text(config.read_text() + GIVEN)
    base = ["--cluster", H200, "--world", "4", "--lengths", 'law="lognormal", mean=20, max=64']
    assert main(["plan", str(file), *base, "--sparse", "gem-2d", "--json", str(out)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "not counted in time or memory: parallel.gem-2d.unit_mb." in text
    planned = json.loads(out.read_text())
    section = planned["parallel"]
    assert section["timeout_s"] == 77
    assert section["fsdp"]["prefetch"] == 2
    options = section["gem-2d"]
    assert (options["output"], options["dtype"], options["unit_mb"]) == ("bf16", "fp16", 64)
    assert (options["collective"], options["schedule"], options["exchange"]) == ("low-cta", "torchrec", "whole")
    trained = resolve(load_config(out)).sparse
    assert (trained.output, trained.dtype, trained.unit_mb) == ("bf16", "fp16", 64)
    assert main(["plan", str(out), *base, "--given", "--json", str(again)]) == 0
    both = [json.loads(f.read_text()) for f in (out, again)]
    assert both[0]["parallel"] == both[1]["parallel"]
    assert both[0]["plan"]["step_s"] == pytest.approx(both[1]["plan"]["step_s"])
    assert both[0]["plan"]["memory_bytes"] == pytest.approx(both[1]["plan"]["memory_bytes"])
    plainly = tmp_path / "plain.json"
    capsys.readouterr()
    assert main(["plan", str(config), *base, "--sparse", "gem-2d", "--json", str(plainly)]) == 0
    without = json.loads(plainly.read_text())["plan"]
    assert sum(both[0]["plan"]["ranks"]["table_bytes"].values()) < 0.6 * sum(without["ranks"]["table_bytes"].values())
    sizes = [float(re.search(r"tables (\d+) B by", t)[1]) for t in (text, " ".join(capsys.readouterr().out.split()))]
    assert sizes[0] < 0.6 * sizes[1]


def test_rows_of_one_gpu_are_planned_in_the_type_they_have(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    base = ["plan", str(config), "--cluster", H200, "--world", "1", "--sparse", "fbgemm", "--set", "train.capture=true"]
    sizes = []
    for more in ([], ["--set", "parallel.fbgemm.output=bf16"]):
        assert main([*base, *more, "--json", str(out)]) == 0
        found = json.loads(out.read_text())
        sizes.append(found["plan"]["memory_bytes"]["embeddings"])
    assert found["parallel"]["fbgemm"] == {"output": "bf16"}
    assert sizes[1] < sizes[0]


def test_a_captured_row_without_recordings_is_held_against_what_was_reserved(tmp_path: Path) -> None:
    """Its allocated peak leaves out what replayed graphs use."""
    row = {
        "row": "a",
        "gpus": 1,
        "step_ms": 10.0,
        "batch_size": 32,
        "peak_memory_bytes": 5e8,
        "reserved_memory_bytes": 8e8,
        "overrides": [],
    }
    graph, file = ["train.capture=true"], tmp_path / "ladder.json"
    rows = [row, {**row, "overrides": graph, "repeated_windows": 2}, {**row, "overrides": graph, "repeated_windows": 0}]
    file.write_text(json.dumps({"ladder": "x", "overrides": [], "rows": rows}))
    assert [m.peak_memory_bytes for m in load_measurements(file)] == [5e8, 5e8, 8e8]


def test_a_ladder_ran_with_its_settings_over_the_configuration(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A captured step has no launches, whoever set it: the configuration, the ladder or the row."""
    base = ["plan", str(config), "--cluster", H200, "--world", "1", "--lengths", 'law="lognormal", mean=20, max=64']
    row = {"row": "a", "gpus": 1, "step_ms": 10.0, "batch_size": 32, "peak_memory_bytes": 5e8, "overrides": []}
    graph = ["train.capture=true"]
    found = []
    for common, own, more in (
        ([], [], []),
        ([], graph, []),
        (graph, [], []),
        ([], [], ["--set", *graph]),
        (graph, ["train.capture=false"], []),
    ):
        file = tmp_path / "ladder.json"
        file.write_text(json.dumps({"ladder": "x", "overrides": common, "rows": [{**row, "overrides": own}]}))
        assert main([*base, *more, "--measured", str(file)]) == 0
        found.append(re.sub(r"\W+", " ", capsys.readouterr().out))
    assert found[1] == found[2] == found[3] != found[0] == found[4]
    file.write_text(json.dumps({"ladder": "x", "overrides": ['precision.recipe="bf16"'], "rows": [row]}))
    if "bf16" in {spec.name for spec in manager().offers("recipe")}:
        assert main([*base, "--measured", str(file)]) == 2
        assert "--set precision.recipe=bf16" in " ".join(capsys.readouterr().err.split())


@pytest.mark.skipif("bf16" not in {spec.name for spec in manager().offers("recipe")}, reason="no bf16 recipe")
def test_given_gathers_parameters_as_they_are_configured(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    base = ["plan", str(config), "--cluster", H200, "--world", "2", "--given", "--json", str(out)]
    for key in ("precision.recipe=bf16", "parallel.dense=fsdp", "parallel.sparse=gem-2d", "parallel.model=2"):
        base += ["--set", key]
    found = []
    for kind in ("fp32", "bf16"):
        assert main([*base, "--set", f"parallel.fsdp.param_dtype={kind}"]) == 0
        planned = json.loads(out.read_text())
        assert planned["parallel"]["fsdp"]["param_dtype"] == kind
        found.append(planned["plan"]["memory_bytes"])
    assert found[0]["gathered copies"] > found[1]["gathered copies"]
    assert found[0]["activations"] > found[1]["activations"]


def test_a_given_plan_is_compared_with_others_of_its_types(config: Path) -> None:
    keys = ["parallel.sparse=gem-2d", "parallel.model=4", "parallel.gem-2d.dtype=fp16", "parallel.gem-2d.output=bf16"]
    loaded = configuration(str(config), keys)
    work = workload_of(loaded, "my", None, 4096)
    space, chosen = given(loaded, work, load_cluster(H200), 4)
    others = {(s.element, s.stored) for s in space.sparse if s.strategy == "gem-2d"}
    assert others == {(chosen.sparse.element, chosen.sparse.stored)} == {(2, (2,) * len(work.tables))}


def test_given_and_measured(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["plan", str(config), "--cluster", H200, "--world", "4", "--lengths", 'law="lognormal", mean=20, max=64']
    out = tmp_path / "plan.json"
    set_to = ["--set", "parallel.dense=fsdp", "--set", "parallel.sparse=gem-2d", "--set", "parallel.replica=2"]
    assert main([*base, *set_to, "--given", "--json", str(out)]) == 0
    section = json.loads(out.read_text())
    assert section["parallel"]["dense"] == "fsdp"
    assert (section["parallel"]["model"], section["parallel"]["replica"]) == (2, 2)
    rows = [
        {"world": 1, "step_s": 0.01},
        {"world": 4, "step_s": 2 * section["plan"]["step_s"], "peak_memory_bytes": 5e8, "parallel": section["parallel"]},
    ]
    measured = tmp_path / "measured.json"
    measured.write_text(json.dumps(rows))
    capsys.readouterr()
    assert main([*base, "--measured", str(measured)]) == 0
    assert "-50.0%" in capsys.readouterr().out
    ran = {"overrides": set_to[1::2], "batch_size": load_config(config).data.batch_size, "peak_memory_bytes": 5e8}
    ladder = [{"row": "a", "gpus": 4, "step_ms": 2e3 * section["plan"]["step_s"], **ran}, {"row": "b", "gpus": 4, "error": "out of memory"}]
    measured.write_text(json.dumps({"ladder": "scaling", "rows": ladder}))
    assert main([*base, "--measured", str(measured)]) == 0
    assert "-50.0%" in capsys.readouterr().out


def test_local_rates_replace_those_of_the_file(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step of parts that were measured takes as long as the parts; what was measured on another model is said."""
    out, local = tmp_path / "plan.json", tmp_path / "local-tiny.json"
    base = ["plan", str(config), "--cluster", H200, "--world", "1", "--set", "train.capture=true"]  # the host bounds it otherwise
    assert main([*base, "--json", str(out)]) == 0
    before = json.loads(out.read_text())["plan"]
    work = workload_of(configuration(str(config), []), "my", None, 4096)
    parts = [
        {"part": part, "forward_ms": 40.0, "total_ms": 100.0, "tflops": (there + back) / 0.1 / 1e12}
        for part, (there, back) in work.part_flops().items()
        if there
    ]

    def planned(parts: list[dict[str, object]], samples: int, device: str = "NVIDIA H200") -> tuple[int, str]:
        local.write_text(json.dumps({"device": device, "samples": samples, "parts": parts}))
        capsys.readouterr()
        code = main([*base, "--local", str(local), "--json", str(out)])
        return code, " ".join("".join(capsys.readouterr()).split())

    code, text = planned(parts, work.batch)
    assert (code, "another model" in text) == (0, False)
    after = json.loads(out.read_text())["plan"]
    computed = after["breakdown_s"]["computation"]
    assert computed == pytest.approx(0.1 * len(parts), rel=0.1)  # of a drawn batch, not of the mean one
    assert computed > 10 * before["breakdown_s"]["computation"]
    code, text = planned(parts, work.batch // 2)
    assert code == 0
    assert "was measured on another model: a sample of it has 2 x the FLOPs" in text
    code, text = planned(parts, work.batch, "NVIDIA B200")
    assert code == 2
    assert "measured on 'NVIDIA B200'" in text


def test_local_rates_hold_at_the_width_that_they_were_measured_at(config: Path, tmp_path: Path) -> None:
    """Also of a part that the file holds to be slow there."""
    file, local = tmp_path / "cluster.toml", tmp_path / "local-tiny.json"
    file.write_text(Path(B200).read_text() + "[gpu.width]\nreference = 512\nat = [32, 512]\n[gpu.width.speed]\nheads = [0.5, 1.0]\n")
    work, place = workload_of(configuration(str(config), []), "my", None, 4096), load_cluster(file)
    there, back = work.part_flops()["heads"]
    rate = 0.8 * place.flops(work.recipe) / 1e12
    part = {"part": "heads", "forward_ms": there, "total_ms": there + back, "tflops": rate}
    local.write_text(json.dumps({"device": "NVIDIA B200", "samples": work.batch, "parts": [part]}))
    found, _ = local_rates(local, work, place)
    for backward in (False, True):
        assert found.local_mfu("heads", work.width, backward=backward) == pytest.approx(0.8)


def test_what_could_be_saved_is_said(config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In whole words, also where the output is a pipe."""
    monkeypatch.delenv("COLUMNS", raising=False)
    base = ["plan", str(config), "--cluster", H200, "--world", "8", "--lengths", 'law="lognormal", mean=200, max=2048']
    told = []
    for more in ([], ["--set", "train.capture=true", "--set", "data.batch_size=2048"]):
        assert main([*base, *more]) == 0
        told.append(capsys.readouterr().out)
    assert "what is exposed most" in told[0]
    assert re.search(r"Launches cost [\d.,]+ ms of the step: train\.capture = true .* would take [\d.,]+ ms", " ".join(told[0].split()))
    assert re.search(r"tables [\d.]+ MB by", told[0])
    assert "Launches" not in told[1]
    ddp, refused = "parallel.dense=ddp", ("train.accumulate=2", "train.tables.kind=adamw", "parallel.dense=hsdp")
    for more, hinted in (([ddp], True), *(([ddp, key], False) for key in refused)):
        assert main([*base, "--given", *(text for key in more for text in ("--set", key))]) == 0
        assert ("Launches cost" in capsys.readouterr().out) == hinted


def test_a_name_that_is_neither_file_nor_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "bse", "--cluster", H200, "--world", "8"]) == 2
    assert re.search(r"(?s)no preset of that name.*tiny, small, base", capsys.readouterr().err)


def test_rates_of_other_widths_are_told(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cluster.toml"
    told = []
    for curve in ("", "[gpu.width]\nreference = 512\n", "[gpu.width]\nreference = 32\n"):
        file.write_text(Path(B200).read_text() + curve)
        assert main(["plan", str(config), "--cluster", str(file), "--world", "1"]) == 0
        told.append(" ".join(capsys.readouterr().out.split()))
    assert "Rates of parts are those of events 512 wide, and this model's are 32 wide" in told[1]
    assert "--local" in told[1]
    assert not any("Rates of parts" in text for text in (told[0], told[2]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--world", "64"], "does not fit on 8 GPUs"),
        (["--world", "2", "--sparse", "nothing"], "no table strategy 'nothing'"),
        (["--world", "2", "--lengths", "law=normal"], "the law is not valid TOML"),
        (["--world", "2", "--lengths", 'law="normal"'], "lengths"),
        (["--world", "2", "--measured", "none.json"], "measurements cannot be read"),
        (["--world", "2", "--measured", "numbers.json"], "a JSON list of objects"),
        (["--world", "2", "--measured", "ladder.json"], "a JSON list of objects"),
        (["--world", "2", "--measured", "bytes.json"], "not valid JSON"),
        (["--world", "2", "--local", "bytes.json"], "no result of `gemrec bench local`: not its JSON"),
        (["--world", "2", "--ranks", "no/such/folder/ranks.csv"], "No such file or directory"),
        (["--world", "2", "--json", "no/such/folder/plan.json"], "cannot be written"),
        (["--world", "1", "--set", "data.batch_size=3000000"], "nothing fits"),
    ],
)
def test_faults_of_the_user(
    config: Path, arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content in (("numbers.json", b"[1]"), ("ladder.json", b'{"ladder": "x", "rows": [{"a": 1}]}'), ("bytes.json", b"\xff")):
        (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    assert main(["plan", str(config), "--cluster", H200, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_torchrec_planner_is_asked_where_it_is_installed(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torchrec")
    assert main(["plan", str(config), "--cluster", H200, "--world", "4", "--sparse", "gem-2d", "--torchrec"]) == 0
    assert "TorchRec's planner" in capsys.readouterr().out
