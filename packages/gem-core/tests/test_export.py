"""Exported packages: the example script, which knows no gem, gives the live model's predictions."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gem_core
from gem_core import ops, plugins
from gem_core.cli import main
from gem_core.config import config_from_dict
from gem_core.config.features import Dense, Features, Label, Sparse
from gem_core.errors import CheckpointError, ConfigError, RunError
from gem_core.export import traceable
from gem_core.export.graph import trace
from gem_core.export.package import _evaluation, export_run
from gem_core.model.base import RankingModel
from gem_core.model.tables import sparse_group
from gem_core.ops.contracts import contracts
from gem_core.plugins import manager
from gem_core.sources.planted import DENSE
from gem_core.sources.synthetic import SyntheticConfig, SyntheticSource, synthetic_features
from gem_core.testing.kernel_cases import Draw, cases
from gem_core.testing.kernels import bound, compare, flat
from gem_core.train.offline import loaded_run
from gem_core.train.predict import predictor
from gem_core.train.runfolder import RunFolder

SERVE = Path(__file__).parents[3] / "docs" / "examples" / "serving" / "serve.py"
WORLD = {"rows": 2000, "eval_rows": 10_000, "test_rows": 64, "users": 5000, "length": {"law": "lognormal", "mean": 12, "max": 96}}

SHUT_OUT = """
import importlib.abc, runpy, sys

class NoGem(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0].startswith(("gem", "safetensors")):
            raise ModuleNotFoundError(f"{name} is not there")

sys.meta_path.insert(0, NoGem())
sys.path += sys.argv[1].split(":")
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
assert not [name for name in sys.modules if name.partition(".")[0].startswith(("gem", "safetensors"))]
"""


def serve(package: Path, rows: list[dict]) -> list[dict]:
    """What the script prints in a process that does not even see the packages' editable installations."""
    found = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    found += [str(Path(module.__file__).parents[1]) for module in (torch, np)]
    command = [sys.executable, "-I", "-S", "-c", SHUT_OUT, ":".join(dict.fromkeys(found)), str(SERVE), str(package)]
    given = "\n".join(json.dumps(row) for row in rows)
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def columns(source: SyntheticSource, first: int, n: int) -> list[dict]:
    """Rows of the planted log as a service would be asked: column -> value."""
    s = source.log.samples(np.arange(first, first + n))
    bounds = s.events.offsets
    rows = []
    for i in range(n):
        row = {name: int(v[i]) for name, v in s.sparse.items()} | {name: float(s.dense[name][i]) for name in DENSE}
        events = slice(bounds[i], bounds[i + 1])
        row |= {name: getattr(s.events, name)[events].tolist() for name in ("item", "category", "action", "time")}
        rows.append({**row, "item": int(s.sparse["item"][i]), "category": int(s.sparse["category"][i]), "timestamp": int(s.time[i]),
                     **{f"history_{n}": row[n] for n in ("item", "category", "action", "time")}})  # fmt: skip
    return rows


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "run"
    config = {
        "run": {"device": "cpu"},
        "data": {"source": "synthetic", "batch_size": 200, "synthetic": WORLD},
        "model": {"name": "gem", "preset": "tiny"},
        "train": {"steps": 10, "tensorboard": False, "checkpoint_every": 4, "keep_checkpoints": 3},
        "eval": {"max_batches": 2, "every": 8},
    }
    gem_core.train(config_from_dict(config), run_dir=folder, quiet=True)
    return folder


def test_a_script_without_gem_gives_the_live_predictions_of_ten_thousand_samples(trained: Path, tmp_path: Path):
    assert main(["export", str(trained), "--out", str(tmp_path / "package")]) == 0
    manifest = json.loads((tmp_path / "package" / "manifest.json").read_text())
    # The synthetic source names events' columns like the sample's own; a service has one name for each.
    group = manifest["features"]["sequences"]["history"]
    for name, field in group["fields"].items():
        field["column"] = f"history_{name}"
    group["timestamps"] = "history_time"
    (tmp_path / "package" / "manifest.json").write_text(json.dumps(manifest))
    with predictor(trained) as live:
        config = live.run.resolved.source
        source = SyntheticSource(config, live.run.resolved.config.features, split="eval", batch_size=1000)
        want = torch.cat([live(batch) for batch in source]).double().sigmoid()
    rows = columns(source, config.rows, 10_000)
    lengths = [len(row["history_item"]) for row in rows]
    assert 0 in lengths
    assert max(lengths) > 80
    found = serve(tmp_path / "package", rows)
    got = torch.tensor([[line["ctr"], line["cvr"]] for line in found], dtype=torch.float64)
    assert float((got - want).abs().max()) < 1e-5
    assert float(want.std(0).min()) > 1e-4  # predictions differ between samples, so that equal ones say something


def test_the_manifest_says_what_made_it(trained: Path, tmp_path: Path):
    export_run(trained, tmp_path / "package")
    found = json.loads((tmp_path / "package" / "manifest.json").read_text())
    assert (found["format"], found["kind"], found["outputs"], found["step"]) == (1, "ranking", ["ctr", "cvr"], 10)
    assert found["trained_with"]["versions"]["torch"] == torch.__version__
    evaluations = {r["step"]: r["tasks"] for r in map(json.loads, (trained / "eval.jsonl").read_text().splitlines())}
    told = {step: _evaluation(RunFolder(trained), step) for step in (4, 8)} | {10: found["evaluation"]}
    assert told == {4: {}, **evaluations}, "the metrics are those of the exported step"
    assert told[10]["ctr"]["calibration"] > 0
    assert found["features"]["ids"]["sparse.item"] == {
        "way": "id", "table": "item", "rows": 768, "salt": None, "edges": None, "default": None, "policy": "error", "holds": None,
        "lists": None,
    }  # fmt: skip
    assert str(tmp_path) not in (tmp_path / "package" / "manifest.json").read_text()


def test_tables_as_parquet_hold_the_checkpoints_rows(trained: Path, tmp_path: Path):
    pq = pytest.importorskip("pyarrow.parquet")
    export_run(trained, tmp_path / "package", tables="parquet")
    found = pq.read_table(tmp_path / "package" / "tables" / "item.parquet")
    with predictor(trained) as live:
        weight = live.run.parts.tables.weight("item").detach().numpy()
    assert found["id"].to_pylist() == list(range(768))
    assert np.array_equal(np.stack(found["embedding"].to_numpy()), weight)


def test_a_folder_that_holds_something_is_left_alone(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "kept").write_text("mine")
    assert main(["export", str(trained), "--out", str(tmp_path)]) == 2
    assert "not empty" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]
    with pytest.raises(CheckpointError, match="no run folder"):
        export_run(tmp_path, tmp_path / "out")


# --- the program alone: every model, every size ---

BLOCKS = {"attention": ["block", "window"], "rotary": "time", "candidate": False, "cls": 0, "pooling": {"seeds": 2}}
MODELS = {
    "gem": {"preset": "tiny", "layers": 1},
    "gem-block": {"preset": "tiny", "layers": 2, "sequence": BLOCKS},
    "dcnv2": {}, "wukong": {"layers": 1}, "din": {}, "interformer": {"layers": 1}, "hstu": {"layers": 1, "time_bias": 8},
}  # fmt: skip


def built(name: str, features: Features) -> RankingModel:
    from gem_core.config import resolve

    options = {"name": name.partition("-")[0], **MODELS[name]}
    resolved = resolve(config_from_dict({"model": options, "features": features.model_dump()}))
    torch.manual_seed(3)
    return manager().find("model", options["name"]).build(resolved.model, features).eval()


def given(batch, model, inputs) -> dict[str, torch.Tensor]:
    rows = model.tables(sparse_group(batch, model.table_set.lookups))
    found = {}
    for i in inputs:
        key = i.name.rsplit(".", 1)[-1]
        if i.table is not None:
            found[i.name] = rows[i.name] if i.history is None else rows[i.name][0]
        elif i.history is None:
            found[i.name] = getattr(batch, i.name)
        else:
            group = batch.sequences[i.history]
            longest = torch.arange(max(group.lengths.tolist(), default=0), device=group.offsets.device)
            found[i.name] = {"offsets": group.offsets, "longest": longest, "timestamps": group.timestamps}[key]
    return found


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_any_number_of_samples_and_events(name: str):
    config = SyntheticConfig(rows=10, eval_rows=60, test_rows=10, users=50, length={"law": "lognormal", "mean": 20, "max": 150})
    features = synthetic_features(config)
    model = built(name, features)
    program, inputs = trace(model, features, torch.device("cpu"))
    run = program.module()
    events = next((i for i, item in enumerate(inputs) if item.rows == "events"), None)
    if events is not None:
        placeholders = [node for node in program.graph.nodes if node.op == "placeholder"][-len(inputs) :]
        symbol = placeholders[events].meta["val"].shape[0].node.expr
        shapes = [v.shape for node in program.graph.nodes if isinstance(v := node.meta.get("val"), torch.Tensor) and v.dim() == 4]
        # Padding is to the longest history, never to all events.
        assert not [
            s for s in shapes if any(symbol in getattr(getattr(n, "node", None), "expr", symbol - symbol).free_symbols for n in s[1:])
        ]
    batch = next(iter(SyntheticSource(config, features, split="eval", batch_size=60)))
    lengths = batch.sequences["history"].lengths
    empty, one = torch.nonzero(lengths == 0).flatten(), int(lengths.argmax())
    if not empty.numel():
        batch = batch.select_range(0, 1)
        pytest.fail("the log has no empty history")
    for part in (batch, batch.take(torch.tensor([one])), batch.take(empty[:1]), batch.take(empty[:1].repeat(3)), batch.select_range(0, 0)):
        want = model(part).logits
        torch.testing.assert_close(run(given(part, model, inputs)), want, atol=2e-6, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@torch.no_grad()
def test_a_program_for_a_gpu_gives_what_the_cpu_gives():
    config = SyntheticConfig(rows=10, eval_rows=60, test_rows=10, users=50, length={"law": "lognormal", "mean": 20, "max": 150})
    features = synthetic_features(config)
    model = built("gem", features)
    batch = next(iter(SyntheticSource(config, features, split="eval", batch_size=60)))
    want = model(batch).logits
    program, inputs = trace(model.to("cuda"), features, torch.device("cuda"))
    found = program.module()(given(batch.to("cuda"), model, inputs))
    assert found.device.type == "cuda"
    torch.testing.assert_close(found.cpu(), want, atol=1e-5, rtol=1e-4)


def test_every_op_has_a_plain_form():
    assert {str(op).split(".")[1] for op in traceable.table()} == set(contracts())


class Plain(TorchDispatchMode):
    """Every op of the core by its plain form."""

    forms = traceable.table()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.forms.get(func, func)(*args, **(kwargs or {}))


# Models repeat requests, and the graph adds rows: neither sharing nor batches without rows come up.
FORMS = [(op, case) for op in contracts() for case in cases(op) if not any(w in case for w in ("sharing", "no rows", "empty batch"))]


@pytest.mark.parametrize(("op", "case"), FORMS)
def test_plain_forms_give_the_references_results(op: str, case: str):
    call = cases(op)[case](Draw(torch.float32, "cpu"))
    plain = {"return_lse": False} if op == "jagged_attention" else {}
    public = getattr(ops, op)
    double = {n: t.double() for n, t in call.tensors.items()}
    with torch.no_grad():
        want = flat(public(**{**call.arguments(double), **plain}, backend=ops.REFERENCE))
        with Plain():
            found = flat(public(**{**call.arguments(call.tensors), **plain}))
    assert len(found) == len(want)
    for got, expected in zip(found, want):
        compare(got, expected, bound(torch.float32, False), op)
    if call.out_slack is not None:
        assert not found[0][call.out_slack :].any()


def test_what_cannot_be_exported_is_refused():
    class Branching(torch.nn.Module):
        table_set = built("dcnv2", synthetic_features(SyntheticConfig())).table_set

        def serve(self, batch, embedded):
            return batch.dense if float(batch.dense.sum()) > 0 else -batch.dense

    with pytest.raises(RunError, match=r"torch\.export cannot follow"):
        trace(Branching(), synthetic_features(SyntheticConfig()), torch.device("cpu"))


def test_a_name_that_cannot_be_exported_is_told():
    features = Features(sparse={"it's": Sparse(rows=9)}, dense={"x": Dense()}, labels={"ctr": Label()})
    with pytest.raises(ConfigError, match=r"(?s)no names with quotes.*features\.sparse\.it's.*column ="):
        trace(built("dcnv2", features), features, torch.device("cpu"))


def test_a_model_without_serve_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    spec = importlib.util.spec_from_file_location("trainer_toys", Path(__file__).with_name("trainer_toys.py"))
    toys = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "trainer_toys", toys)
    monkeypatch.setattr(plugins, "_manager", None)
    spec.loader.exec_module(toys)
    toys.install()
    gem_core.train(toys.config(train={"steps": 1}), run_dir=tmp_path / "run", quiet=True)
    with pytest.raises(ConfigError, match="cannot be exported"):
        export_run(tmp_path / "run", tmp_path / "package")


# --- retrieval ---


@pytest.mark.parametrize("model", [{"name": "sasrec", "layers": 1}, {"name": "hstu", "layers": 1, "dim": 32, "embedding_dim": 16}])
def test_retrieval_gives_queries_and_items(model: dict, tmp_path: Path):
    features = synthetic_features(SyntheticConfig(**WORLD)).model_dump()
    config = {
        "run": {"device": "cpu"},
        "data": {"source": "synthetic", "batch_size": 100, "synthetic": {**WORLD, "eval_rows": 200}},
        "features": {**features, "labels": {}, "columns": [], "next_item": {"item": "item", "pad": 762}},
        "model": {**model, "retrieval": {"normalize": True}},
        "train": {"steps": 5, "tensorboard": False},
        "eval": {"max_batches": 1},
    }
    gem_core.train(config_from_dict(config), run_dir=tmp_path / "run", quiet=True)
    export_run(tmp_path / "run", tmp_path / "package")
    manifest = json.loads((tmp_path / "package" / "manifest.json").read_text())
    assert manifest["kind"] == "retrieval"
    group = manifest["features"]["sequences"]["history"]
    for name, field in group["fields"].items():
        field["column"] = f"history_{name}"
    group["timestamps"] = "history_time"
    (tmp_path / "package" / "manifest.json").write_text(json.dumps(manifest))
    with loaded_run(tmp_path / "run") as live, torch.no_grad():
        live.parts.model.eval()
        source = SyntheticSource(live.resolved.source, live.resolved.config.features, split="eval", batch_size=200)
        scores = live.parts.model(next(iter(source))).query @ live.parts.model.item_vectors(torch.arange(768)).T
    scores[:, 762] = -torch.inf
    found = torch.tensor([line["items"] for line in serve(tmp_path / "package", columns(source, WORLD["rows"], 200))])
    torch.testing.assert_close(scores.gather(1, found), scores.topk(10).values, atol=1e-5, rtol=1e-5)
