"""Parity statistics, one small parity run end to end, and the refusals of the GPU benchmark."""

from __future__ import annotations

import json
import weakref

import pytest
import torch

from gem_core.config import load_config
from gem_core.errors import ConfigError, DataError, DeviceError, NumericsError
from gem_core.train import quickstart_path
from gem_core.train.offline import evaluate_run
from gem_precision.bench import gpu, ne, steps
from gem_precision.policy import fp8_linear, mx_linear
from gem_precision.speed import pays


def test_interval_covers_the_truth():
    """1000 experiments of paired rows whose true ratio is 1.003: 95 % intervals cover it in 93.3 to 96.7 % (five sigma)."""
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for _ in range(1000):
        b = -torch.rand(2000, generator=generator).log()
        a = b * 1.003 + 0.05 * torch.randn(2000, generator=generator)
        ratio, error = ne.ratio_interval(a, b)
        covered += abs(ratio - 1.003) <= 1.96 * error
    assert 915 <= covered <= 985


def test_rows_of_a_group_are_not_independent():
    """Each row eight times over in one group: the interval of the distinct rows, not the narrower one of eight times as many."""
    generator = torch.Generator().manual_seed(1)
    b = -torch.rand(500, generator=generator).log()
    a = b + 0.05 * torch.randn(500, generator=generator)
    alone = ne.ratio_interval(a, b)
    again = ne.ratio_interval(a.repeat_interleave(8), b.repeat_interleave(8), torch.arange(500).repeat_interleave(8))
    assert again == pytest.approx(alone)
    assert ne.ratio_interval(a.repeat_interleave(8), b.repeat_interleave(8))[1] < 0.4 * alone[1]


def test_auc_interval_covers_the_truth():
    """1000 experiments of paired scores whose true AUC ratio is known from two million rows; ties included, groups of two rows."""
    generator = torch.Generator().manual_seed(2)

    def rows(n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        labels = (torch.rand(n, generator=generator) < 0.3).float()
        b = labels + torch.randn(n, generator=generator)
        a = (8 * (b + 0.3 * torch.randn(n, generator=generator))).round()
        return a, b, labels

    a, b, labels = rows(2_000_000)
    truth = ne.auc_placements(a, labels)[0] / ne.auc_placements(b, labels)[0]
    assert truth < 0.99
    covered = 0
    for _ in range(1000):
        a, b, labels = (t.repeat_interleave(2) for t in rows(400))
        ratio, error = ne.auc_ratio_interval(a[None], b[None], labels, torch.arange(800) // 2)
        covered += abs(ratio - truth) <= 1.96 * error
    assert 915 <= covered <= 985


def test_auc_of_placements():
    """Against the definition: pairs in the right order, equal ones one half."""
    logits, labels = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0]), torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0])
    pairs = [(p > n) + 0.5 * (p == n) for p in (1.0, 2.0) for n in (0.0, 1.0, 2.0)]
    auc, moved = ne.auc_placements(logits, labels)
    assert auc == pytest.approx(sum(pairs) / 6)
    assert float(moved.sum()) == pytest.approx(0, abs=1e-12)
    assert moved[1] == pytest.approx(((1 + 0.5) / 3 - auc) / 2)
    assert moved[0] == pytest.approx((1 - auc) / 3)


@pytest.mark.parametrize("jobs", [1, 2])
def test_parity_run(tmp_path, jobs):
    """A few steps of the quick start; the recipes start from the same parameters and see the same batches, whatever the processes."""
    config = load_config(
        quickstart_path(),
        {
            "train.steps": 12,
            "data.batch_size": 64,
            "data.synthetic.eval_rows": 300,
            "data.synthetic.users": 100,
            "data.eval_batch_size": 64,
            "run.threads": 1,
        },
    )
    variants = ne.VARIANTS[:1] if jobs > 1 else ne.VARIANTS
    results = ne.parity(config, tmp_path / "runs", variants=variants, jobs=jobs)
    assert [r.variant for r in results] == [v[0] for v in variants]
    for r in results:
        assert r.low < r.ratio < r.high
        assert 0.97 < r.ratio < 1.03
        assert r.rows == 300
        assert r.groups < 300
        assert r.ratio == pytest.approx(r.ne[0] / r.reference_ne[0])
        assert r.auc_low < r.auc_ratio < r.auc_high
        assert r.auc_ratio == pytest.approx(r.auc[0] / r.reference_auc[0])
    # the shares of the rows are the whole split: the trainer's own evaluation of it gives the same NE
    reference = evaluate_run(tmp_path / "runs" / "bf16-0", overrides=["eval.max_batches=100"])
    assert results[0].reference_ne[0] == pytest.approx(reference.results["ctr"]["ne"].value, rel=1e-5)
    assert results[0].reference_auc[0] == pytest.approx(reference.results["ctr"]["auc"].value, rel=1e-5)
    ne.write(results, tmp_path, "test")
    stored = json.loads((tmp_path / "ne.json").read_text())
    assert stored["results"][0]["ratio"] == results[0].ratio
    assert "| mxfp8 |" in (tmp_path / "ne.md").read_text()


def test_a_cut_parity_run_goes_on(tmp_path, monkeypatch):
    """What was trained or predicted is taken as it is and gives the same numbers; another configuration is trained anew; a run that was
    interrupted is not taken for a trained one."""
    options = {"train.steps": 4, "data.batch_size": 32, "data.synthetic.users": 100, "data.eval_batch_size": 64, "run.threads": 1}
    config = load_config(quickstart_path(), options | {"data.synthetic.eval_rows": 200})
    trained = []
    real = ne.train

    def counted(config, run_dir, resume, overwrite, quiet):
        trained.append((run_dir.name, resume))
        return real(config, run_dir=run_dir, resume=resume, overwrite=overwrite, quiet=quiet)

    monkeypatch.setattr(ne, "train", counted)
    told = []

    def parity(config) -> list[ne.Parity]:
        trained.clear()
        told.clear()
        return ne.parity(config, tmp_path, variants=ne.VARIANTS[:1], tell=told.append)

    first = parity(config)
    assert trained == [("bf16-0", False), ("mxfp8-0", False)]
    assert "4 steps, 200 rows" in told[1]
    assert parity(config) == first
    assert not trained
    assert all("was there" in line for line in told)
    (tmp_path / "mxfp8-0" / "held-out-eval.pt").unlink()
    assert parity(config) == first
    assert not trained
    assert "was trained, 200 rows" in told[1]
    summary = tmp_path / "mxfp8-0" / "summary.json"
    summary.write_text(summary.read_text().replace('"finished"', '"interrupted"'))
    assert parity(config)[0].ratio == first[0].ratio
    assert trained == [("mxfp8-0", True)]
    other = parity(load_config(quickstart_path(), options | {"data.synthetic.eval_rows": 100}))
    assert trained == [("bf16-0", False), ("mxfp8-0", False)]
    assert other[0].rows == 100
    stored = torch.load(tmp_path / "bf16-0" / "held-out-eval.pt", weights_only=True)
    torch.save(stored | {"labels": 1 - stored["labels"]}, tmp_path / "bf16-0" / "held-out-eval.pt")
    with pytest.raises(DataError, match="different rows"):
        parity(load_config(quickstart_path(), options | {"data.synthetic.eval_rows": 100}))


def test_a_run_that_fails_does_not_stop_the_others(tmp_path, monkeypatch):
    """In processes of their own; the error is raised at the end, and what was done is there."""
    options = {"train.steps": 2, "data.batch_size": 32, "data.synthetic.users": 100, "data.eval_batch_size": 64, "run.threads": 1}
    config = load_config(quickstart_path(), options | {"data.synthetic.eval_rows": 64})
    broken = ("broken", "mxfp8", {"overrides": {"nothing": "bf16"}})
    with pytest.raises(ConfigError, match="matches no linear"):
        ne.parity(config, tmp_path, variants=[broken], jobs=2)
    assert (tmp_path / "bf16-0" / "held-out-eval.pt").is_file()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_gpu_benchmark_refuses_without_a_gpu(tmp_path):
    with pytest.raises(DeviceError, match="CUDA"):
        gpu.run(tmp_path)


def test_benchmark_refuses_a_wrong_result():
    x = torch.randn(64, 64)
    with pytest.raises(NumericsError, match="dB"):
        gpu._check((x, x, x), (x, x, torch.randn(64, 64)), "here")


def test_emulation_is_never_refused_as_slow():
    assert pays(fp8_linear("block"), 64, 64, torch.device("cpu"))
    assert pays(mx_linear(), 64, 64, torch.device("cpu"))


def test_measured_slow_shapes_are_refused(monkeypatch):
    """With the measurement in the reason; a wider shape than any measured one follows the widest below it."""
    rules = [{"family": "fp8128", "k": 1024, "n": 1024, "ratio": 0.91}, {"family": "fp8128", "k": 2048, "n": 2048, "ratio": 1.12}]
    monkeypatch.setattr("gem_precision.speed.table", lambda arch: {"rules": rules})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    cuda = torch.device("cuda")
    refused = pays(fp8_linear("block"), 1024, 1536, cuda)
    assert not refused
    assert "0.91 x bf16" in refused.reason
    assert pays(fp8_linear("block"), 4096, 2048, cuda)
    narrow = pays(fp8_linear("block"), 512, 4096, cuda)
    assert "narrower" in narrow.reason
    assert pays(mx_linear(), 64, 64, cuda)


def test_steps_of_two_precisions_and_of_the_guard(tmp_path):
    """Ratios are of the recorded windows, the parts of the overhead add up, and the page tells all of it."""
    config = load_config(quickstart_path(), {"data.batch_size": 16, "run.threads": 1, "train.steps": 1000})
    result = steps.measure(config, steps=1, rounds=2, warmup=1)
    assert list(result["step_ms"]) == ["bf16", "fp8-block", "all", "watched"]
    pairs = [a / b for a, b in zip(result["seconds"]["bf16"], result["seconds"]["fp8-block"])]
    assert result["ratios"]["speed-up"] == (pytest.approx(sum(pairs) / 2), min(pairs), max(pairs))
    parts = result["overhead_parts"]
    assert result["overhead"] == pytest.approx(sum(parts.values()))
    assert parts["watching"] == result["ratios"]["watched"][0] - 1
    assert 0 < result["watched_sites"] == result["sites"]["fp8-block"]
    assert result["losses"]["watched"] != result["losses"]["bf16"]
    steps.write(result, tmp_path, "tiny", "the command")
    page = (tmp_path / "precision-step-tiny.md").read_text()
    assert all(word in page for word in ("the command", "| watched |", "guard of", "captured" if result["captured"] else "eager"))
    assert json.loads((tmp_path / "precision-step-tiny.json").read_text())["overhead"] == result["overhead"]


def test_steps_of_models_that_do_not_fit_together(monkeypatch):
    """Built one after the other in the order 1, 2, 2, 1, never two at once; the windows of both visits are told."""
    config = load_config(quickstart_path(), {"data.batch_size": 16, "run.threads": 1, "train.steps": 1000})
    built, alive, most = [], [], []
    real = steps._build

    def counted(config, rt):
        run = real(config, rt)
        built.append(config.precision.recipe)
        alive.append(weakref.ref(run))
        most.append(sum(r() is not None for r in alive))
        return run

    monkeypatch.setattr(steps, "_build", counted)
    result = steps.measure(config, steps=1, rounds=2, warmup=1, guard=False, apart=True)
    assert built == ["bf16", "fp8-block", "fp8-block", "bf16"]
    assert most == [1, 1, 1, 1]
    assert {name: len(s) for name, s in result["seconds"].items()} == {"bf16": 4, "fp8-block": 4}
    assert "overhead" not in result
    assert "one model in memory" in steps.markdown(result, "the command")
