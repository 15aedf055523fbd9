"""Configurations that cannot work, told by the command: what, where, what to do, exit code 2, no traceback."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gem_core.cli import main

CASES = {
    "missing file": (None, r"the configuration file does not exist\n  where: my\.toml\n  fix:   check the path"),
    "empty file": ("# left behind\n", r"the configuration file holds no section\n  where: my\.toml\n  fix:   write the file anew"),
    "unknown key": (
        "[train]\nstep = 3\n",
        r"unknown key train\.step\n  where: train\.step \(my\.toml:2\)\n  fix:   did you mean train\.steps\?",
    ),
    "unknown section": ("[trainer]\nsteps = 3\n", r"unknown key trainer\n  where: trainer \(my\.toml:1\)\n  fix:   did you mean train\?"),
    "unknown model option": ("[model]\nlayer = 3\n", r"unknown key model\.layer\n  where: model\.layer \(my\.toml:2\)"),
    "unknown preset": ("[model]\npreset = 'tinny'\n", r"tinny.*\n(.*\n)*.*tiny"),
    "unknown model": (
        "[model]\nname = 'gemm'\n",
        r"there is no model called 'gemm'; there are: .*gem.*\n  where: model\.name \(my\.toml:2\)",
    ),
    "unknown source": ("[data]\nsource = 'synthetik'\n", r"called 'synthetik'.*\n  where: data\.source \(my\.toml:2\)\n.*'synthetic'"),
    "unknown recipe": ("[precision]\nrecipe = 'fp23'\n", r"called 'fp23'.*\n  where: precision\.recipe \(my\.toml:2\)\n.*'fp32'"),
    "unknown callback": ("[train.callbacks.nobody]\n", r"called 'nobody'.*\n  where: train\.callbacks\.nobody \(my\.toml:1\)"),
    "unknown source option": (
        "[data.synthetic]\nrowz = 3\n",
        r"unknown key data\.synthetic\.rowz\n  where: data\.synthetic\.rowz \(my\.toml:2\)",
    ),
    "unknown implementation": ("[kernels.ops]\ngdpa = 'fastest'\n", r"fastest"),
    "unknown op": ("[kernels.ops]\ngpda = 'reference'\n", r"no op called 'gpda'\n.*\n.*did you mean 'gdpa'\?"),
    "unknown metric": (
        "[eval]\nmetrics = ['nee']\n",
        r"there is no metric called 'nee'.*\n  where: eval\.metrics \(my\.toml:2\)\n.*did you mean 'ne'",
    ),
    "wrong type": ("[train]\nsteps = 'many'\n", r"train\.steps = \"many\": input should be a valid integer"),
    "out of range": ("[data]\nbatch_size = 0\n", r"data\.batch_size = 0: input should be greater than 0"),
    "half a law": (
        "[data.synthetic]\nlength = { mean = 3.0 }\n",
        r"data\.synthetic\.length = \{\"mean\": 3\.0\} lacks law, which .*\n  where: .*\n  fix:   set data\.synthetic\.length\.law",
    ),
    "unknown law": (
        "[data.synthetic]\nlength = { law = 'zipff' }\n",
        r"data\.synthetic\.length\.law = \"zipff\": there is 'uniform', 'zipf', .*\n  where: .*\n  fix:   did you mean 'zipf'\?",
    ),
    "implementation of another op": (
        "[kernels.ops]\nnorm = 'varlen'\n",
        r"called 'norm/varlen'; there are: (norm/[\w-]+(, )?)+\n  where: kernels\.ops",
    ),
    "two features with one name": (
        "[features.dense.a]\n[features.sparse.a]\nrows = 3\n",
        r"two features have the name 'a': features\.dense\.a and features\.sparse\.a; rename one",
    ),
    "not TOML": ("[train\n", r"not valid TOML: .*\n  where: my\.toml:1"),
}


@pytest.mark.parametrize("case", CASES)
def test_told_by_train(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    text, words = CASES[case]
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("my.toml").write_text(text)
    assert main(["train", "my.toml"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert re.search(words, said), said
    assert not Path("runs").exists(), "a run folder was made for a configuration that cannot run"
