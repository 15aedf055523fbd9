"""docs/benchmarks/quality.py: AUC, paired intervals, and others' predictions, which must be of the same samples in the same order."""

import importlib.util
from itertools import product
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parent.parent / "docs" / "benchmarks" / "quality.py"


@pytest.fixture(scope="module")
def quality():
    spec = importlib.util.spec_from_file_location("quality", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_auc_counts_pairs_with_ties_as_half(quality):
    rng = np.random.default_rng(0)
    label, score = rng.integers(0, 2, 60), rng.integers(0, 9, 60).astype(float)
    pairs = [(p > n) + (p == n) / 2 for p, n in product(score[label == 1], score[label == 0])]
    assert quality.auc(label, score) == pytest.approx(np.mean(pairs), abs=1e-12)


def test_paired_interval_is_narrow_where_predictions_agree(quality):
    rng = np.random.default_rng(1)
    user, label = np.repeat(np.arange(50), 8), rng.integers(0, 2, 400).astype(float)
    good = label + rng.normal(size=400)
    assert quality.paired(user, label, [good], [good]) == (0, 0, 0)
    near = quality.paired(user, label, [good], [good + 0.01 * rng.normal(size=400)])
    far = quality.paired(user, label, [good], [rng.normal(size=400)])
    assert near[2] - near[1] < 0.1 * (far[2] - far[1])
    assert far[1] > 0


def test_peers_are_of_the_same_samples_in_their_order(quality, tmp_path):
    like = {"p": np.array([0.2, 0.4, 0.9]), "label": np.array([0.0, 1, 1]), "user": np.array([3.0, 3, 5])}
    for seed, order in enumerate(([0, 1, 2], [0, 1, 2])):
        rows = np.stack([like[k][order] for k in ("p", "label", "user")], 1)
        np.savetxt(tmp_path / f"a-{seed}.csv", rows, fmt="%.9g", delimiter=",", header="p,label,user", comments="")
    name, found = quality.peer_predictions(f"some = peer={tmp_path}/a-*.csv", like)
    assert name == "some = peer"
    assert [one["p"].tolist() for one in found] == [[0.2, 0.4, 0.9]] * 2
    turned = {key: column[[0, 2, 1]] for key, column in like.items()}
    with pytest.raises(SystemExit, match="not of the test split"):
        quality.peer_predictions(f"peer={tmp_path}/a-*.csv", turned)
    with pytest.raises(SystemExit, match="no predictions"):
        quality.peer_predictions(f"peer={tmp_path}/b-*.csv", like)
