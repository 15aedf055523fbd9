"""Hours of a drifting truth, followed: NE on each before training on it, beside training from scratch on all hours before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gem_core import load_config, train
from gem_core.cli import main
from gem_core.errors import ConfigError
from gem_core.sources.synthetic import SyntheticConfig
from gem_data.synth import write_partitions

HOURS, ROWS = 5, 2500
OPTIONS = ["run.device=cpu", "data.batch_size=100", "data.eval_batch_size=500", "train.tensorboard=false"]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hours")
    words = {"rows": HOURS * ROWS, "days": 1, "partitions": HOURS, "drift": 1.5, "mean": 4, "users": 2000}
    given = [w for name, value in words.items() for w in (f"--{name}", str(value))]
    assert main(["data", "synth", *given, "--out", str(folder)]) == 0
    text = (folder / "config.toml").read_text().replace('preset = "tiny"\n', "").replace('name = "gem"', 'name = "dlrm"')
    (folder / "config.toml").write_text(text)
    return folder


def test_the_files_are_hours_that_can_be_followed(log: Path):
    names = sorted(p.name for p in (log / "log").iterdir())
    assert names == [f"part-{i:03d}" for i in range(HOURS)]
    assert all((log / "log" / name / "_SUCCESS").is_file() for name in names)
    with pytest.raises(ConfigError, match="no log to follow"):
        write_partitions(log / "one", SyntheticConfig(rows=10), 1)


def test_following_is_as_good_as_training_from_scratch_on_all_hours_before(log: Path, tmp_path: Path):
    root = f"data.parquet-follow.root={json.dumps(str(log))}"
    train(load_config(log / "config.toml", [*OPTIONS, root]), run_dir=tmp_path / "followed", quiet=True)
    lines = [json.loads(line) for line in (tmp_path / "followed" / "eval.jsonl").read_text().splitlines()]
    followed = [line["tasks"]["ctr"]["ne"] for line in lines]
    assert [line.get("partition") for line in lines] == [*(f"part-{i:03d}" for i in range(HOURS - 1)), None]
    ratios = []
    for t in range(1, HOURS):
        past = [str(log / "log" / f"part-{i:03d}") for i in range(t)]
        changes = [
            *OPTIONS,
            "data.source=parquet",
            "eval.before_training=false",
            f"data.parquet.train={json.dumps(past)}",
            f"data.parquet.eval={json.dumps(str(log / 'log' / f'part-{t:03d}'))}",
        ]
        scratch = train(load_config(log / "config.toml", changes), run_dir=tmp_path / f"scratch-{t}", quiet=True)
        ratios.append(followed[t] / scratch.tasks["ctr"]["ne"])
    assert sum(ratios) / len(ratios) < 1.05
    assert max(ratios) < 1.1
    assert followed[-1] < followed[0]
