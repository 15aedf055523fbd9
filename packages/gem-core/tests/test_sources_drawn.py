"""The random source: conformance, its laws, and that a preset trains from it with a few lines of TOML."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gem_core.config import load_config, resolve
from gem_core.config.features import Features
from gem_core.errors import ConfigError
from gem_core.model.presets import find
from gem_core.sources.drawn import SPEC, RandomConfig, random_features
from gem_core.sources.laws import LognormalLaw
from gem_core.testing.sources import source_checks
from gem_core.train import train

SMALL = RandomConfig(preset="tiny", rows=211, eval_rows=60, length=LognormalLaw(mean=12.0, max=64))


def build(config=SMALL, features=None, **how):
    return SPEC.build(config, features or Features(), **{"split": "train", "batch_size": 64, **how})


@pytest.mark.parametrize(("window", "balanced"), [(1, False), (3, False), (3, True)])
@pytest.mark.parametrize("check", source_checks(random_features(SMALL)), ids=lambda c: c.__name__)
def test_conformance(check, window, balanced):
    if window > 1 and check.__name__ == "batch_size_does_not_change_the_stream":
        return  # sorting inside windows of batches is what changes it
    check(lambda **how: build(SMALL.model_copy(update={"window": window, "balanced": balanced}), **how))


def test_lengths_and_ids_follow_the_preset():
    chosen = find("base")
    batch = next(iter(build(RandomConfig(preset="base", rows=4096), batch_size=4096)))
    lengths = batch.sequences["history"].lengths.double()
    assert lengths.max() <= chosen.max_length
    assert lengths.mean() == pytest.approx(chosen.lengths(4096).double().mean().item(), rel=0.05)
    ids = batch.sequences["history"].fields["event_f000"]
    assert ids.dtype == torch.int64
    assert ids.min() >= 0
    assert ids.max() < chosen.rows
    assert ids.double().mean() == pytest.approx(chosen.rows / 2, rel=0.01)
    assert batch.labels[:, 0].mean() == pytest.approx(0.05, abs=0.02)
    times = batch.sequences["history"].timestamps
    inside = torch.ones(times.numel() - 1, dtype=torch.bool)
    inside[batch.sequences["history"].offsets[1:-1] - 1] = False
    assert (times.diff()[inside] >= 0).all()


def test_skewed_ids_repeat():
    def distinct(repeats):
        batch = next(iter(build(SMALL.model_copy(update={"repeats": repeats}))))
        return batch.sequences["history"].fields["event_f000"].unique().numel()

    assert distinct(6.0) < 0.6 * distinct(0.0)


def test_padding_adds_events_and_tells_the_true_lengths():
    plain, padded = (next(iter(build(SMALL.model_copy(update={"padded": p})))) for p in (False, True))
    true = plain.sequences["history"].lengths
    assert (padded.sequences["history"].lengths == true.max()).all()
    assert torch.equal(padded.columns["length.history"], true)


def test_sorted_windows_need_less_padding_and_hold_the_same_samples():
    def padding(window):
        config = RandomConfig(preset="tiny", rows=2048, padded=True, window=window)
        batches = list(build(config, batch_size=64))
        real = sum(int(b.columns["length.history"].sum()) for b in batches)
        return sum(b.tokens for b in batches) / real, sorted(i for b in batches for i in b.sample_ids.tolist())

    (drawn, ids), (windowed, same) = padding(1), padding(16)
    assert ids == same == list(range(2048))
    assert windowed < 0.5 * drawn


@pytest.mark.parametrize("batch_size", [64, 60])
def test_balanced_batches_cost_alike_and_hold_the_same_samples(batch_size):
    def drawn(**how):
        config = RandomConfig(preset="tiny", rows=2048, length=LognormalLaw(mean=100.0, sigma=1.0, max=1000), **how)
        batches = list(build(config, batch_size=batch_size))
        work = np.array([float((b.sequences["history"].lengths.double() ** 2).sum()) for b in batches if b.size == batch_size])
        return work.std() / work.mean(), sorted(i for b in batches for i in b.sample_ids.tolist())

    (plain, ids), (dealt, same) = drawn(), drawn(window=16, balanced=True)
    assert ids == same == list(range(2048))
    assert dealt < 0.5 * plain


def test_without_features_or_preset_is_an_error():
    with pytest.raises(ConfigError, match="does not know what to draw"):
        build(RandomConfig())


def test_an_unknown_preset_is_an_error():
    with pytest.raises(ConfigError, match="unknown preset 'bace'"):
        build(RandomConfig(preset="bace"))


def test_a_preset_trains_from_a_few_lines(tmp_path):
    path = tmp_path / "load.toml"
    path.write_text(
        '[data]\nsource = "random"\nbatch_size = 64\n[data.random]\npreset = "tiny"\nrows = 256\neval_rows = 64\n'
        '[model]\npreset = "tiny"\n[train]\ntensorboard = false\n'
    )
    config = load_config(path)
    assert set(resolve(config).config.features.labels) == {"ctr", "cvr"}
    result = train(config, run_dir=tmp_path / "run", quiet=True)
    assert result.steps == 4
    assert np.isfinite(result.summary["tasks"]["ctr"]["ne"])
