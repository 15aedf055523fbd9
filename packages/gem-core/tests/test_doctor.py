"""The judgement of installations, on faked ones: one sound, and each fault with its cure."""

from __future__ import annotations

import json
import struct
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gem_core import doctor
from gem_core.config import load_config
from gem_core.doctor import WITHOUT_FBGEMM, Environment, Finding, Gpu, Report, Torch, diagnose
from gem_core.doctor_archs import archs_of
from gem_core.doctor_run import Demand, judge, weigh

PY = "/venv/bin/python"
H100 = Gpu("NVIDIA H100 80GB HBM3", "sm_90", "580.65.06")
CUDA13 = ("sm_80", "sm_90", "sm_100", "compute_120")

FBGEMM_ARCHS = ("sm_80", "sm_90a", "sm_100a")
"""What the published CUDA wheels of 1.6.0, 1.7.0 and 1.8.0 hold: no PTX, and B200's code does not run on a B300."""

CPU = Environment(
    python=(3, 11, 9),
    executable=PY,
    system="Linux x86_64",
    packages={"torch": "2.13.0+cpu", "triton": "3.6.0", "fbgemm-gpu-cpu": "1.8.0", "torchrec": "1.8.0"},
    torch=Torch("2.13.0+cpu", None),
)
GPU = Environment(
    python=(3, 12, 4),
    executable=PY,
    system="Linux x86_64",
    packages={"torch": "2.11.0+cu130", "triton": "3.6.0", "fbgemm-gpu": "1.6.0", "torchrec": "1.6.1"},
    torch=Torch("2.11.0+cu130", "13.0", CUDA13, sees_gpu=True, nccl="2.28.9", wants_triton="3.6.0"),
    gpus=(H100,),
    fbgemm_archs=FBGEMM_ARCHS,
)


def packages(env: Environment, **changed: str | None) -> Environment:
    merged = {**env.packages, **{name.replace("_", "-"): version for name, version in changed.items()}}
    return replace(env, packages={name: version for name, version in merged.items() if version is not None})


def torch(env: Environment, **changed) -> Environment:
    assert env.torch is not None
    return replace(env, torch=replace(env.torch, **changed))


FBGEMM_CPU_CURE = (f"{PY} -m pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu", f"{PY} -m pip install --no-deps fbgemm-gpu-cpu==1.8.0")
FBGEMM_CUDA_CURE = (f"{PY} -m pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu", f"{PY} -m pip install --no-deps fbgemm-gpu==1.6.0")
TORCHREC_NEEDS = (
    f"{PY} -m pip install tensordict torchmetrics==1.0.3 tqdm iopath pyre-extensions orjson pyvers importlib_metadata"
)  # fmt: skip


@pytest.mark.parametrize("env", [CPU, GPU, packages(CPU, fbgemm_gpu_cpu=None, torchrec=None), packages(CPU, triton=None)])
def test_a_sound_installation_has_no_findings(env: Environment):
    assert list(diagnose(env)) == []


FAULTS: dict[str, tuple[Environment, str, str, str, tuple[str, ...]]] = {
    "CUDA build of fbgemm on a CPU machine": (
        packages(CPU, fbgemm_gpu="1.8.0", fbgemm_gpu_cpu=None),
        "error",
        "fbgemm",
        "fbgemm-gpu 1.8.0 is a CUDA build, but torch is a CPU build",
        FBGEMM_CPU_CURE,
    ),
    "the CUDA build over the CPU build": (
        packages(CPU, fbgemm_gpu="1.8.0"),
        "error",
        "fbgemm",
        "fbgemm-gpu 1.8.0 and fbgemm-gpu-cpu 1.8.0 are both installed",
        FBGEMM_CPU_CURE,
    ),
    "CPU build of fbgemm on a GPU machine": (
        packages(GPU, fbgemm_gpu=None, fbgemm_gpu_cpu="1.6.0"),
        "error",
        "fbgemm",
        "fbgemm-gpu-cpu 1.6.0 is a CPU build, but torch is built for CUDA",
        FBGEMM_CUDA_CURE,
    ),
    "fbgemm of another torch": (
        packages(GPU, fbgemm_gpu="1.8.0"),
        "error",
        "fbgemm",
        "fbgemm-gpu 1.8.0 was not built for torch 2.11.0+cu130, which needs fbgemm-gpu 1.6.0",
        FBGEMM_CUDA_CURE,
    ),
    "torchrec of another torch": (
        packages(CPU, torchrec="1.6.1"),
        "error",
        "torchrec",
        "torchrec 1.6.1 does not belong to torch 2.13.0+cpu, which wants torchrec 1.8.0",
        (f"{PY} -m pip install --no-deps torchrec==1.8.0", TORCHREC_NEEDS),
    ),
    "torchrec without fbgemm": (packages(CPU, fbgemm_gpu_cpu=None), "error", "torchrec", "is installed without FBGEMM", FBGEMM_CPU_CURE),
    "torchrec without its needs": (
        replace(CPU, broken_imports={"torchrec": "ModuleNotFoundError: No module named 'tensordict'"}),
        "error",
        "torchrec",
        "importing it fails: ModuleNotFoundError: No module named 'tensordict'",
        (TORCHREC_NEEDS,),
    ),
    "a GPU for which FBGEMM has no code": (
        replace(GPU, gpus=(Gpu("NVIDIA B300", "sm_103", "590.10"),), fbgemm_archs=FBGEMM_ARCHS),
        "error",
        "fbgemm",
        "fbgemm-gpu 1.6.0 holds no code that runs on sm_103 (sm_80, sm_90a, sm_100a): every operator fails",
        (WITHOUT_FBGEMM,),
    ),
    "fbgemm that does not load": (
        replace(CPU, broken_imports={"fbgemm-gpu-cpu": "ImportError: undefined symbol: _ZN2at"}),
        "error",
        "fbgemm-gpu-cpu",
        "undefined symbol",
        FBGEMM_CPU_CURE,
    ),
    "torch that does not load": (
        replace(CPU, broken_imports={"torch": "OSError: libgomp.so.1"}),
        "error",
        "torch",
        "importing it fails: OSError: libgomp.so.1",
        (f"{PY} -m pip install --force-reinstall --no-deps torch==2.13.0",),
    ),
    "no torch": (
        replace(packages(CPU, torch=None, fbgemm_gpu_cpu=None, torchrec=None), torch=None),
        "error",
        "torch",
        "torch is not installed",
        (f"{PY} -m pip install torch==2.13.0",),
    ),
    "an untested torch": (
        torch(packages(CPU, fbgemm_gpu_cpu=None, torchrec=None), version="2.14.0"),
        "warning",
        "torch",
        "torch 2.14.0 is not among the tested releases (2.11 and 2.13)",
        (),
    ),
    "a CPU torch on a GPU machine": (
        replace(packages(CPU, fbgemm_gpu_cpu=None, torchrec=None), gpus=(H100,)),
        "error",
        "torch",
        "torch 2.13.0+cpu is a CPU build, but this machine has a GPU (NVIDIA H100 80GB HBM3)",
        (f"{PY} -m pip install --force-reinstall --no-deps torch==2.13.0 --index-url https://download.pytorch.org/whl/cu130",),
    ),
    "a driver that is too old": (
        replace(GPU, gpus=(replace(H100, driver="570.12"),)),
        "error",
        "driver",
        "was built for CUDA 13.0, which needs driver 580 or newer; the driver is 570.12",
        ("apt-get install -y nvidia-driver-580-server", "reboot"),
    ),
    "a GPU that torch cannot use": (
        torch(GPU, sees_gpu=False),
        "error",
        "driver",
        "cannot use it",
        ("nvidia-smi", "unset CUDA_VISIBLE_DEVICES"),
    ),
    "a GPU for which torch has no code": (
        replace(GPU, gpus=(Gpu("Tesla V100", "sm_70", "580.1"),), fbgemm_archs=()),
        "error",
        "torch",
        "torch 2.11.0+cu130 holds no code for sm_70",
        (f"{PY} -m pip install --upgrade torch==2.13.0 --index-url https://download.pytorch.org/whl/cu130",),
    ),
    "triton of another torch": (
        packages(GPU, triton="3.5.1"),
        "error",
        "triton",
        "triton 3.5.1 does not belong to torch 2.11.0+cu130, which wants triton 3.6.0",
        (f"{PY} -m pip install triton==3.6.0",),
    ),
    "an old Python": (replace(CPU, python=(3, 10, 1)), "error", "python", "Python 3.10.1: FBGEMM", ("python3.13 -m venv .venv",)),
    "a new Python": (replace(CPU, python=(3, 14, 0)), "warning", "python", "wheels for 3.11 to 3.13 only", ("python3.13 -m venv .venv",)),
    "a broken plug-in": (
        replace(CPU, plugins=({"name": "acme", "version": "1.0", "state": "broken", "reason": "OSError: gone"},)),
        "error",
        "acme",
        "plug-in acme 1.0 cannot be used: OSError: gone",
        (f"{PY} -m pip install --upgrade acme",),
    ),
    "a plug-in for a newer core": (
        replace(CPU, plugins=({"name": "acme", "version": "1.0", "state": "broken", "reason": "it needs plug-in interface 9", "api": 9},)),
        "error",
        "acme",
        "plug-in acme 1.0 cannot be used: it needs plug-in interface 9",
        (f"{PY} -m pip install --upgrade gem-core",),
    ),
    "a plug-in in conflict with the core": (
        replace(
            CPU,
            plugins=(
                {"name": "gem-core", "version": "1.0", "state": "conflict", "reason": "metric 'ne' is offered by acme too"},
                {"name": "acme", "version": "1.0", "state": "conflict", "reason": "metric 'ne' is offered by gem-core too"},
            ),
        ),
        "error",
        "acme",
        "metric 'ne' is offered by gem-core too",
        (f"{PY} -m pip uninstall -y acme",),
    ),
    "plug-ins in conflict": (
        replace(CPU, plugins=({"name": "acme", "version": "1.0", "state": "conflict", "reason": "metric 'ne' is offered by bolt too"},)),
        "error",
        "acme",
        "metric 'ne' is offered by bolt too",
        (f"{PY} -m pip uninstall -y acme",),
    ),
    "plug-ins that cannot be listed": (replace(CPU, plugin_error="two entry points"), "error", "plugins", "two entry points", ()),
    "a nightly torch": (
        torch(packages(CPU, fbgemm_gpu_cpu=None, torchrec=None), version="2.14.0.dev20260901+cpu"),
        "warning",
        "torch",
        "torch 2.14.0.dev20260901+cpu is a nightly build, which is deleted from its index after some weeks; tested are 2.11 and 2.13",
        (f"{PY} -m pip install torch==2.13.0",),
    ),
    "several GPUs without NCCL": (
        torch(replace(GPU, gpus=(H100, H100)), nccl=None),
        "error",
        "nccl",
        "torch 2.11.0+cu130 has no NCCL: 2 GPUs of this machine cannot talk to each other",
        (f"{PY} -m pip install --force-reinstall torch==2.11.0",),
    ),
    "FBGEMM on a Grace host": (
        replace(packages(GPU, fbgemm_gpu=None, fbgemm_gpu_cpu="1.6.0"), system="Linux aarch64"),
        "warning",
        "fbgemm",
        "FBGEMM has no CUDA wheel for aarch64; fbgemm-gpu-cpu 1.6.0 has no CUDA kernels",
        (WITHOUT_FBGEMM,),
    ),
    "a library built from source": (
        replace(GPU, built={"fbgemm-gpu": "https://github.com/pytorch/FBGEMM"}),
        "warning",
        "fbgemm-gpu",
        "fbgemm-gpu 1.6.0 was built from https://github.com/pytorch/FBGEMM; only published wheels are tested together",
        (f"{PY} -m pip install --force-reinstall --no-deps --only-binary :all: fbgemm-gpu==1.6.0",),
    ),
    "a package whose needs are missing": (
        replace(CPU, conflicts=(("gem-kernels", "gem-kernels 0.1.0 requires triton, which is not installed."),)),
        "error",
        "gem-kernels",
        "gem-kernels 0.1.0 requires triton, which is not installed",
        (f"{PY} -m pip install triton",),
    ),
    "a package whose needs are too old": (
        replace(CPU, conflicts=(("gem-data", "gem-data 0.1.0 has requirement pyarrow>=18, but you have pyarrow 17.0.0."),)),
        "error",
        "gem-data",
        "gem-data 0.1.0 has requirement pyarrow>=18, but you have pyarrow 17.0.0",
        (f"{PY} -m pip install 'pyarrow>=18'",),
    ),
    "two pins of the CUTLASS DSL": (
        replace(
            GPU,
            conflicts=(
                ("quack-kernels", "quack-kernels 0.2 has requirement nvidia-cutlass-dsl==4.3.0, but you have nvidia-cutlass-dsl 4.2.1."),
            ),
        ),
        "warning",
        "quack-kernels",
        "libraries pin different releases of the CUTLASS DSL, and one environment holds one",
        ("python3 -m venv .venv-cutlass", ".venv-cutlass/bin/python -m pip install quack-kernels"),
    ),
    "little shared memory": (
        replace(GPU, gpus=(H100, H100), shm_bytes=64 << 20),
        "warning",
        "shared memory",
        "/dev/shm holds 64 MiB",
        ("mount -o remount,size=8G /dev/shm",),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_found_alone_with_its_cure(name: str):
    env, level, subject, words, cure = FAULTS[name]
    (finding,) = diagnose(env)
    assert (finding.level, finding.subject, finding.cure) == (level, subject, cure)
    assert words in finding.message


def fat_binary(*entries: tuple[int, int, int, bytes]) -> bytes:
    """What nvcc puts into a library: (kind, architecture, flags, code) each."""
    body = b""
    for kind, arch, flags, code in entries:
        body += struct.pack("<HHIQIIHHIIIQ", kind, 0x101, 64, len(code), 0, 0, 8, 1, arch, 0, 0, flags).ljust(64, b"\0") + code
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_the_code_of_a_library_is_read(tmp_path: Path):
    magic = fat_binary()[:4]
    (tmp_path / "a_empty.so").touch()
    (tmp_path / "b_host.so").write_bytes(b"\x7fELF" + bytes(50) + magic + b"just these bytes")
    first = fat_binary((2, 80, 0x8011, b"code"), (1, 80, 0x8011, b"ptx, longer"))
    both = first + bytes(24) + fat_binary((2, 90, 0x108011, magic + bytes(90)))
    (tmp_path / "c_small.so").write_bytes(b"\x7fELF" + bytes(100) + both + bytes(9))
    (tmp_path / "d_large.so").write_bytes(bytes(9999) + fat_binary((2, 120, 0, b"")))
    assert archs_of(tmp_path) == ("compute_80", "sm_80", "sm_90a")
    (tmp_path / "c_small.so").write_bytes(both[: len(first) + 60])
    assert archs_of(tmp_path) == ("compute_80", "sm_80")
    (tmp_path / "c_small.so").unlink()
    assert archs_of(tmp_path) == ("sm_120",)


PAINS = {
    1: ("fbgemm of another torch", "torchrec of another torch", "fbgemm that does not load", "the CUDA build over the CPU build"),
    2: ("a GPU for which FBGEMM has no code", "a GPU for which torch has no code"),
    3: ("a library built from source",),
    4: ("FBGEMM on a Grace host",),
    5: ("a nightly torch", "an untested torch"),
    6: ("a package whose needs are missing", "a package whose needs are too old"),
    7: ("triton of another torch", "a broken plug-in"),
    8: ("two pins of the CUTLASS DSL",),
    9: ("a library built from source",),
}
"""What users of the neighbouring projects complain about most when installing, by number -> the faults above that are it."""


def test_every_pain_of_installing_is_a_fault_that_is_found():
    assert all(name in FAULTS for names in PAINS.values() for name in names)
    assert sorted(PAINS) == list(range(1, 10))


def test_a_newer_torch_is_told_and_not_refused():
    (finding,) = diagnose(torch(packages(CPU, fbgemm_gpu_cpu=None, torchrec=None), version="2.20.1"))
    assert finding.level == "warning"


SMALL = Demand(
    "/runs",
    "ext4",
    free=10 << 30,
    memory=8 << 30,
    device_memory=None,
    dense_parameters=1_000_000,
    table_bytes=1 << 30,
    checkpoints=3,
)
RUNS = {
    "fits": (SMALL, None, "", ()),
    "tables larger than the memory": (
        replace(SMALL, table_bytes=9 << 30, free=99 << 30),
        "memory",
        "parameters, tables and optimizer state take 9.0 GiB (tables 9.0 GiB), the memory is 8.0 GiB",
        (
            "gemrec plan CONFIG --cluster CLUSTER.toml --world N",
            "gemrec train CONFIG --set parallel.dense=fsdp --set parallel.sparse=gem-2d",
        ),
    ),
    "tables larger than the GPU": (
        replace(SMALL, device_memory=512 << 20),
        "GPU memory",
        "the GPU memory is 0.5 GiB",
        (
            "gemrec plan CONFIG --cluster CLUSTER.toml --world N",
            "gemrec train CONFIG --set parallel.dense=fsdp --set parallel.sparse=gem-2d",
        ),
    ),
    "sharded": (replace(SMALL, device_memory=512 << 20, sharded=True), None, "", ()),
    "checkpoints larger than the disk": (
        replace(SMALL, free=int(2.5 * (1 << 30))),
        "disk",
        "3 checkpoints (one while it is written) take 3.0 GiB, /runs has 2.5 GiB free",
        ("gemrec train CONFIG --set train.keep_checkpoints=1", "gemrec train CONFIG --set run.dir=FOLDER_ON_A_LARGER_DISK"),
    ),
    "a folder in memory": (
        replace(SMALL, file_system="tmpfs"),
        "disk",
        "/runs is on tmpfs: checkpoints are gone when the machine or container is",
        ("gemrec train CONFIG --set run.dir=FOLDER_ON_A_DISK",),
    ),
    "a folder of the network": (
        replace(SMALL, file_system="nfs4"),
        "disk",
        "training waits while 1.0 GiB are written over the network",
        ("gemrec train CONFIG --set train.checkpoint_async=true",),
    ),
    "few open files": (
        replace(SMALL, open_files=256),
        "open files",
        "this shell allows 256 open files",
        ("ulimit -n 65536",),
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_whether_a_run_fits(name: str):
    demand, subject, words, cure = RUNS[name]
    found = list(judge(demand))
    if subject is None:
        assert found == []
        return
    (finding,) = found
    assert (finding.subject, finding.cure) == (subject, cure)
    assert words in finding.message


def test_a_configuration_is_weighed(tmp_path):
    config = load_config(None, {"model.preset": "tiny", "run.dir": str(tmp_path / "not" / "there")})
    demand = weigh(config)
    assert demand.free > 0
    assert demand.memory is not None
    assert demand.folder == str(tmp_path / "not" / "there")
    assert demand.checkpoints == config.train.keep_checkpoints + 1
    import torch as installed

    from gem_core.config import resolve
    from gem_core.plugins import manager

    resolved = resolve(config)
    installed.manual_seed(0)
    model = manager().find("model", config.model.name).build(resolved.model, resolved.config.features)
    names = {n: p.numel() for n, p in model.named_parameters()}
    assert demand.dense_parameters == sum(size for n, size in names.items() if not n.startswith("tables."))
    tables = model.table_set.tables
    assert demand.table_bytes == sum(4 * t.rows * t.dim + 4 * t.rows for t in tables) > 0
    # A GPU that is too small is the one that counts, unless the run asks for the CPU.
    small = (replace(H100, memory=1 << 20), replace(H100, memory=1 << 30))
    assert weigh(config, small).device_memory == 1 << 20
    assert weigh(load_config(None, {"run.device": "cpu"}), small).device_memory is None


@pytest.mark.parametrize(
    ("arch", "archs", "covered"),
    [
        ("sm_90", ("sm_90",), True),
        ("sm_89", ("sm_80",), True),
        ("sm_80", ("sm_89",), False),
        ("sm_90", ("sm_80",), False),
        ("sm_90", ("compute_80",), True),
        ("sm_103", ("sm_100",), True),
        ("sm_103", ("sm_100a",), False),
        ("sm_90", ("sm_90a",), True),
        ("sm_120", ("sm_100", "compute_120"), True),
    ],
)
def test_which_code_runs_where(arch: str, archs: tuple[str, ...], covered: bool):
    assert doctor._covered(arch, archs) is covered


def test_this_installation_is_read(monkeypatch: pytest.MonkeyPatch):
    report = doctor.examine()
    env = report.environment
    assert env.python == sys.version_info[:3]
    assert env.torch is not None
    assert env.torch.version == __import__("torch").__version__
    assert env.packages["torch"].partition("+")[0] == env.torch.version.partition("+")[0]
    assert "gem-core" in {p["name"] for p in env.plugins}
    assert not [f for f in report.findings if f.subject == "torch" and f.level == "error"]


def test_report_as_json():
    report = Report(CPU, (Finding("warning", "x", "y", ("z",)),))
    assert report.ok
    read = json.loads(report.as_json())
    assert read["ok"] is True
    assert read["findings"] == [{"level": "warning", "subject": "x", "message": "y", "cure": ["z"]}]
    assert read["packages"]["torchrec"] == "1.8.0"
    assert not Report(CPU, (Finding("error", "x", "y"),)).ok
