"""Plug-ins of strangers, each wrong in one way: the conformance kit finds it and says which rule is broken.

Each starts as what `gemrec plugin new` writes (which passes, see test_plugin_template.py), gets one fault, and is installed beside the
others; then their own tests run, as their authors would run them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from gem_core.cli.plugin import write

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("wrong plug-ins")]  # one process: what they have in common takes long

# what is wrong -> kind, {text: text in its place}, the rule, words of the message
FAULTS: dict[str, tuple[str, dict[str, str], str, str]] = {
    "kernel-inexact": ("kernel", {"* rstd[:, None]).to(x.dtype), None)": "* rstd[:, None] * 1.001).to(x.dtype), None)"},
                       "matches reference", "result 0: relative error 1.0"),
    "kernel-gradient": ("kernel", {"(g - hat * (g * hat).mean(1, keepdim=True))": "g"},
                        "matches reference", "gradient of x: relative error"),
    "kernel-unwritten": ("kernel", {"return ((wide * rstd[:, None]).to(x.dtype), None)": "y = torch.empty_like(x)\n    y[1:] = (wide * "
                                    "rstd[:, None]).to(x.dtype)[1:]\n    return (y, None)"}, "matches reference", "elements are NaN"),
    "kernel-writes": ("kernel", {"wide = _wide(x)\n    rstd": "wide = _wide(x.mul_(1.0).add_(1e-3))\n    rstd"},
                      "inputs are left alone", "x was changed"),
    "kernel-saves": ("kernel", {"(x, None, None, None, rstd)": "(x, None, None, None, 1 / rstd)",
                                "x, _, _, _, rstd = saved": "x, _, _, _, rstd = saved\n    rstd = 1 / rstd if rstd is not None else None"},
                     "pairs with reference", "gradient of x"),
    "kernel-random": ("kernel", {"(wide * rstd[:, None])": "(wide * rstd[:, None] * (1 + 1e-7 * torch.rand(()).item()))"},
                      "deterministic", "results differ between runs"),
    "kernel-mute": ("kernel", {'no("RMSNorm only")': 'no("")'}, "supports something", "a refusal must give its reason"),
    "kernel-alias": ("kernel", {"((wide * rstd[:, None]).to(x.dtype), None)": "(x.copy_(wide * rstd[:, None]), None)"}, "opcheck", ""),
    "kernel-result": ("kernel", {"((wide * rstd[:, None]).to(x.dtype), None)": "(wide * rstd[:, None]).to(x.dtype)"},
                      "matches reference", "the result of forward is a tensor; the contract wants a tuple (y, residual_out)"),
    "kernel-dtype": ("kernel", {"((wide * rstd[:, None]).to(x.dtype), None)": "(wide * rstd[:, None], None)"},
                     "matches reference", "result 0 has dtype torch.float32, the tensors torch.bfloat16"),
    "source-overlap": ("source", {"yield self.fetch(places + self.first)": "yield self.fetch(places % 150 + self.first)"},
                       "samples come once an epoch", "a sample came twice in one epoch"),
    "source-shards": ("source", {"self.cursor = Cursor(sizes[split], batch_size, rank, world, drop_last)":
                                 "self.cursor = Cursor(sizes[split], batch_size, 0, world, drop_last)"},
                      "shards are disjoint and of one length", "samples handed out twice"),
    "source-resume": ("source", {"self.cursor.load_state_dict(state)": 'self.cursor.load_state_dict(state | {"steps": []})'},
                      "resuming twice changes nothing", "52 and 50 batches"),
    "source-length": ("source", {"return self.cursor.steps_per_epoch": "return 3"},
                      "a length is the batches of an epoch", "the length is 3, 10 batches came"),
    "source-order": ("source", {"Shuffle(self.cursor.total, self.seed, epoch)": "Shuffle(self.cursor.total, self.seed, 0)"},
                     "training is shuffled by seed and epoch", "the second epoch has the order of the first"),
    "source-label": ("source", {"(ids % 3 == 0).float()": "(ids % 3).float()"}, "labels are 0 or 1", "labels of click hold 2.0"),
    "source-id": ("source", {"torch.from_numpy(numbers % 100)": "torch.from_numpy(numbers % 100) + 1"},
                  "batches are what features declare", "sparse.item: the id 100 is outside its table, [0, 100)"),
    "source-split": ("source", {"        if split not in sizes:\n": '        split = split if split in sizes else "test"\n        if 0:\n'},
                     "misuse is refused", "{'split': 'trian'} gives"),
    "recipe-coarse": ("recipe", {"x.to(torch.bfloat16), self.weight.to(torch.bfloat16)":
                                 "x, self.weight.sign() * self.weight.abs().mean()"},
                      "outputs and gradients are near those of fp32", "promised are 40.0"),
    "recipe-amax": ("recipe", {"y = F.linear(x.to(": "x = x / x.abs().amax() * x.abs().amax()\n        y = F.linear(x.to("},
                    "zeros and outliers stay finite", "zeros: not finite: the result"),
    "recipe-master": ("recipe", {"self.weight, self.bias = linear.weight, linear.bias":
                                 "self.weight, self.bias = nn.Parameter(linear.weight.detach().bfloat16()), linear.bias"},
                      "master weights stay fp32 under their names", "not fp32"),
    "recipe-writes": ("recipe", {"        y = F.linear(": "        self.weight.data.mul_(1 + 2**-20)\n        y = F.linear("},
                      "master weights stay fp32 under their names", "changed by a forward and backward pass: up.weight, down.weight"),
    "recipe-guard": ("recipe", {'self.largest = state["largest"]': "pass"},
                     "the guard state can be stored and put back", "tensors of the state came back different"),
    "strategy-sum": ("strategy", {"            parameter.grad /= self.world\n": ""},
                     "equals one process on the joined batch", "loss, gradient norm, samples are"),
    "strategy-alone": ("strategy", {"dist.all_reduce(parameter.grad)": "pass", "parameter.grad /= self.world": "pass"},
                       "ranks stay equal bit for bit", ""),
    "strategy-broken": ("strategy", {"return self.model(batch)": "return self.model(batch) if batch.size else 1 / 0"},
                        "all ranks train", "ZeroDivisionError"),
    "model-leak": ("model", {"self.mlp(self.flat(batch, embedded))": "self.mlp(self.flat(batch, embedded)).sub(self.mlp(self.flat(batch, "
                             "embedded)).mean(0))"}, "samples do not see each other", "must not change the others"),
    "model-unused": ("model", {"        self.mlp = ": "        self.spare = Mlp(4, (4,))\n        self.mlp = "},
                     "gradients reach every parameter", "no gradient reaches spare.layers.0.weight"),
    "model-writes": ("model", {"        return self.mlp(self.flat(batch, embedded)), {}": "        if batch.labels is not None:\n"
                               "            batch.labels.zero_()\n        return self.mlp(self.flat(batch, embedded)), {}"},
                     "the batch is left alone", "batch.labels differs"),
    "model-waits": ("model", {"        return self.mlp(self.flat(batch, embedded)), {}":
                              "        x = self.flat(batch, embedded)\n        return self.mlp(x / max(1.0, float(x.abs().max()))), {}"},
                    "forward reads nothing from the device", "stalls a GPU"),
    "model-half": ("model", {"ModelFlops:": "ModelFlops:\n        # half of it is what its author measured", "class Model(RankingModel):":
                             "class Model(RankingModel):\n    def forward(self, batch):\n        import dataclasses\n        out = super()."
                             "forward(batch)\n        return dataclasses.replace(out, logits=out.logits.half())\n"},
                   "output", "logits must be float32"),
    "package-heavy": ("model", {"from gem_core import ModelSpec, hookimpl": "import pyarrow\nfrom gem_core import ModelSpec, hookimpl"},
                      "importing it is light", "it loads pyarrow at import"),
    "package-pinned": ("recipe", {'"gem-core>=0.1,<1"': '"gem-core==0.1.0"'}, "it asks for a range of the core", "pins one version"),
    "package-loose": ("recipe", {"class Config(FrozenConfig):": "import pydantic\n\n\nclass Config(pydantic.BaseModel, frozen=True):"},
                      "options are strict", "unknown keys are accepted"),
    "package-hook": ("recipe", {"def gem_recipes(": "def gem_recipies("}, "it is active", "unknown hook 'gem_recipies'"),
    "package-key": ("recipe", {'"key"': '"recipe"'}, "no name hides a key", "the recipe recipe: choose another name"),
    "package-op": ("kernel", {'KernelSpec("norm"': 'KernelSpec("norn"'}, "kernels implement ops that exist", "no op called norn"),
    "package-old": ("source", {"gem_api = 1": "gem_api = 0"}, "it is active", "plug-in interface 0"),
}  # fmt: skip


LISTENER = """
import json, pathlib

failures = {}


def pytest_runtest_logreport(report):
    if report.failed:
        failures[report.nodeid] = report.longreprtext


def pytest_sessionfinish(session):
    if not hasattr(session.config, "workerinput"):
        pathlib.Path("failures.json").write_text(json.dumps(failures))
"""


def install(project: Path, site: Path) -> None:
    """What pip makes of the project: its module and its metadata."""
    declared = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    (module,) = (project / "src").iterdir()
    module.rename(site / module.name)
    info = site / f"{module.name}-{declared['version']}.dist-info"
    info.mkdir()
    needs = "".join(f"Requires-Dist: {need}\n" for need in declared["dependencies"])
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {declared['name']}\nVersion: {declared['version']}\n{needs}")
    points = declared["entry-points"]["gem"].items()
    (info / "entry_points.txt").write_text("[gem]\n" + "".join(f"{name} = {where}\n" for name, where in points))


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Fault -> test that failed -> what pytest printed."""
    here = tmp_path_factory.mktemp("strangers")
    site = here / "site"
    site.mkdir()
    for name, (kind, changes, _, _) in FAULTS.items():
        write(name, kind, here)
        files = [*(here / name).rglob("*.py"), here / name / "pyproject.toml"]
        for old, new in changes.items():
            holders = [path for path in files if old in path.read_text()]
            assert holders, f"{name}: the template has no {old!r} any more"
            for path in holders:
                path.write_text(path.read_text().replace(old, new))
        install(here / name, site)
    command = [sys.executable, "-m", "pytest", "-n", "2", "-p", "listener", "-p", "no:cacheprovider"]
    command += [f"--rootdir={here}", "--import-mode=importlib", *(f"{name}/tests" for name in FAULTS)]
    (site / "listener.py").write_text(LISTENER)
    environment = {**_environment(), "PYTHONPATH": str(site)}
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1, done.stdout[-4000:] + done.stderr[-2000:]
    found: dict[str, dict[str, str]] = {name: {} for name in FAULTS}
    for test, text in json.loads((here / "failures.json").read_text()).items():
        found[test.partition("/")[0]][test] = text
    return found


def _environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(("GEM_PLUGINS", "PYTEST_"))} | {"OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_kit_names_the_rule(fault: str, verdicts: dict[str, dict[str, str]]):
    _, _, rule, words = FAULTS[fault]
    told = [text for text in verdicts[fault].values() if f"rule '{rule}' is broken: " in text]
    assert told, f"failed: {list(verdicts[fault])}"
    assert any(words in text for text in told), told[0]
    assert "  the rule: " in told[0]
