"""Health of an installation: reads what is installed (`probe`), then judges it (`diagnose`, a pure function), each fault with its cure.

The pairs of versions that belong together are in `RELEASES`; FBGEMM's CPU and CUDA builds share one import name, so that installing one
over the other leaves a mixture that fails to load or, worse, loads the wrong half.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gem_core.doctor_archs import archs_of
from gem_core.errors import GemError
from gem_core.hookspecs import SUPPORTED_API
from gem_core.plugins import CORE

if TYPE_CHECKING:
    from gem_core.doctor_run import Demand

FBGEMM_CPU, FBGEMM_CUDA = "fbgemm-gpu-cpu", "fbgemm-gpu"
TORCHREC_NEEDS = ("tensordict", "torchmetrics==1.0.3", "tqdm", "iopath", "pyre-extensions", "orjson", "pyvers", "importlib_metadata")
"""What TorchRec needs beside FBGEMM; it is installed with --no-deps because its metadata would pull the CUDA build of FBGEMM."""


@dataclass(frozen=True)
class Release:
    """Versions that were built for each other."""

    triton: str | None
    fbgemm: str
    torchrec: str


RELEASES = {"2.11": Release("3.6", "1.6.0", "1.6.1"), "2.13": Release(None, "1.8.0", "1.8.0")}
"""torch major.minor -> what belongs to it; triton None: the one that torch's own metadata names."""

PYTHONS = ((3, 11), (3, 13))
"""First and last Python for which FBGEMM and TorchRec publish wheels."""

DRIVERS = {"12": 525, "13": 580}
"""CUDA major -> oldest driver branch that runs it."""

LISTED = (
    "torch", "triton", "torchrec", FBGEMM_CUDA, FBGEMM_CPU, "torchmetrics", "tensordict", "numpy", "pyarrow", "pydantic", "pluggy",
    "tensorboard", "nvidia-cutlass-dsl",
)  # fmt: skip
IMPORTED = {"torch": "torch", "triton": "triton", FBGEMM_CUDA: "fbgemm_gpu", FBGEMM_CPU: "fbgemm_gpu", "torchrec": "torchrec"}


WITHOUT_FBGEMM = "gemrec train CONFIG --set parallel.sparse=gem-2d --set parallel.gem-2d.kernel=torch"
"""Sharded tables on a GPU for which there is no FBGEMM."""


@dataclass(frozen=True)
class Gpu:
    """One device as its driver tells it; ``arch`` is "sm_90"."""

    name: str
    arch: str
    driver: str
    memory: int | None = None
    """Bytes."""


@dataclass(frozen=True)
class Torch:
    """What the installed torch says of itself; ``cuda`` None: a CPU build."""

    version: str
    cuda: str | None
    archs: tuple[str, ...] = ()
    sees_gpu: bool = False
    nccl: str | None = None
    wants_triton: str | None = None


@dataclass(frozen=True)
class Environment:
    """Everything that `diagnose` looks at.

    ``fbgemm_archs``: what FBGEMM's CUDA build holds code for. ``broken_imports``: distribution -> why importing it fails. ``conflicts``:
    (distribution, what pip's check says of it) of installed distributions that miss a need or have it in a wrong version. ``built``:
    distribution -> where it was built from, of those that did not come as a published wheel.
    """

    python: tuple[int, int, int]
    executable: str
    system: str
    packages: dict[str, str]
    torch: Torch | None
    gpus: tuple[Gpu, ...] = ()
    fbgemm_archs: tuple[str, ...] = ()
    broken_imports: dict[str, str] = field(default_factory=dict)
    conflicts: tuple[tuple[str, str], ...] = ()
    built: dict[str, str] = field(default_factory=dict)
    plugins: tuple[dict[str, Any], ...] = ()
    plugin_error: str | None = None
    shm_bytes: int | None = None


@dataclass(frozen=True)
class Finding:
    """One fault: ``cure`` are the exact commands that mend it."""

    level: Literal["error", "warning"]
    subject: str
    message: str
    cure: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    environment: Environment
    findings: tuple[Finding, ...]
    demand: Demand | None = None

    @property
    def ok(self) -> bool:
        return not any(f.level == "error" for f in self.findings)

    def as_json(self) -> str:
        run = {} if self.demand is None else {"run": asdict(self.demand)}
        return json.dumps({"ok": self.ok, "findings": [asdict(f) for f in self.findings], **asdict(self.environment), **run}, indent=2)


def examine() -> Report:
    """Look at this process's installation."""
    environment = probe()
    return Report(environment, tuple(diagnose(environment)))


def diagnose(env: Environment) -> Iterator[Finding]:
    """Every fault of ``env``, the ones that cause others first."""
    yield from _python(env)
    yield from _torch(env)
    yield from _triton(env)
    yield from _fbgemm(env)
    yield from _torchrec(env)
    yield from _imports(env)
    yield from _built(env)
    yield from _needs(env)
    yield from _plugins(env)
    yield from _shared_memory(env)


def _python(env: Environment) -> Iterator[Finding]:
    first, last = PYTHONS
    if not first <= env.python[:2] <= last:
        span = f"{_dots(first)} to {_dots(last)}"
        yield Finding(
            "error" if env.python[:2] < first else "warning",
            "python",
            f"Python {_dots(env.python)}: FBGEMM and TorchRec publish wheels for {span} only",
            (f"python{_dots(last)} -m venv .venv",),
        )


def _torch(env: Environment) -> Iterator[Finding]:
    torch = env.torch
    if torch is None:
        yield Finding("error", "torch", "torch is not installed", (_pip(env, "install torch==2.13.0"),))
        return
    tested = " and ".join(RELEASES)
    if ".dev" in torch.version:
        newest = list(RELEASES)[-1]
        message = f"torch {torch.version} is a nightly build, which is deleted from its index after some weeks; tested are {tested}"
        yield Finding("warning", "torch", message, (_pip(env, f"install torch=={newest}.0"),))
    elif _minor(torch.version) not in RELEASES:
        yield Finding("warning", "torch", f"torch {torch.version} is not among the tested releases ({tested})")
    if not env.gpus:
        return
    if torch.cuda is None:
        version = torch.version.partition("+")[0]
        yield Finding(
            "error",
            "torch",
            f"torch {torch.version} is a CPU build, but this machine has a GPU ({env.gpus[0].name})",
            (_pip(env, f"install --force-reinstall --no-deps torch=={version} --index-url https://download.pytorch.org/whl/cu130"),),
        )
        return
    needed = DRIVERS.get(torch.cuda.partition(".")[0])
    driver = env.gpus[0].driver
    if needed is not None and _number(driver) < needed:
        yield Finding(
            "error",
            "driver",
            f"torch {torch.version} was built for CUDA {torch.cuda}, which needs driver {needed} or newer; the driver is {driver}",
            (f"apt-get install -y nvidia-driver-{needed}-server", "reboot"),
        )
    elif torch.sees_gpu and torch.nccl is None and len(env.gpus) > 1:
        yield Finding(
            "error",
            "nccl",
            f"torch {torch.version} has no NCCL: {len(env.gpus)} GPUs of this machine cannot talk to each other",
            (_pip(env, f"install --force-reinstall torch=={torch.version.partition('+')[0]}"),),
        )
    elif not torch.sees_gpu:
        yield Finding(
            "error",
            "driver",
            f"the driver ({driver}) lists a GPU, but torch {torch.version} cannot use it",
            ("nvidia-smi", "unset CUDA_VISIBLE_DEVICES"),
        )
    for arch in sorted({g.arch for g in env.gpus}):
        if torch.archs and not _covered(arch, torch.archs):
            yield Finding(
                "error",
                "torch",
                f"torch {torch.version} holds no code for {arch} ({', '.join(torch.archs)})",
                (_pip(env, "install --upgrade torch==2.13.0 --index-url https://download.pytorch.org/whl/cu130"),),
            )


def _triton(env: Environment) -> Iterator[Finding]:
    found = env.packages.get("triton")
    if found is None or env.torch is None:
        return
    release = RELEASES.get(_minor(env.torch.version))
    wanted = env.torch.wants_triton or (release.triton if release is not None else None)
    if wanted is not None and not _starts(found, wanted):
        yield Finding(
            "error" if env.torch.cuda is not None else "warning",
            "triton",
            f"triton {found} does not belong to torch {env.torch.version}, which wants triton {wanted}",
            (_pip(env, f"install triton=={wanted if wanted.count('.') > 1 else wanted + '.*'}"),),
        )


def _fbgemm(env: Environment) -> Iterator[Finding]:
    cuda, cpu = env.packages.get(FBGEMM_CUDA), env.packages.get(FBGEMM_CPU)
    if cuda is None and cpu is None:
        return
    cpu_machine = env.torch is None or env.torch.cuda is None
    cure = _fbgemm_cure(env)
    if cuda is not None and cpu is not None:
        message = f"{FBGEMM_CUDA} {cuda} and {FBGEMM_CPU} {cpu} are both installed: they use one import name and overwrite each other"
        yield Finding("error", "fbgemm", message, cure)
        return
    build, found = (FBGEMM_CUDA, cuda) if cuda is not None else (FBGEMM_CPU, cpu)
    assert found is not None  # one of the two is there
    if cuda is not None and cpu_machine:
        message = f"{FBGEMM_CUDA} {cuda} is a CUDA build, but torch is a CPU build: it cannot be imported (libtorch_cuda.so is missing)"
        yield Finding("error", "fbgemm", message, cure)
    elif cpu is not None and not cpu_machine and env.system.endswith("aarch64"):
        message = f"FBGEMM has no CUDA wheel for aarch64; {FBGEMM_CPU} {cpu} has no CUDA kernels: tables need a strategy without FBGEMM"
        yield Finding("warning", "fbgemm", message, (WITHOUT_FBGEMM,))
    elif cpu is not None and not cpu_machine:
        message = f"{FBGEMM_CPU} {cpu} is a CPU build, but torch is built for CUDA: embedding tables would have no CUDA kernels"
        yield Finding("error", "fbgemm", message, cure)
    elif env.torch is not None and (release := RELEASES.get(_minor(env.torch.version))) and not _starts(found, release.fbgemm):
        message = f"{build} {found} was not built for torch {env.torch.version}, which needs {build} {release.fbgemm}: undefined symbols"
        yield Finding("error", "fbgemm", message, cure)
    for arch in sorted({g.arch for g in env.gpus}):
        if env.fbgemm_archs and not _covered(arch, env.fbgemm_archs):
            message = f"{build} {found} holds no code that runs on {arch} ({', '.join(env.fbgemm_archs)}): every operator fails on this GPU"
            yield Finding("error", "fbgemm", message, (WITHOUT_FBGEMM,))


def _torchrec(env: Environment) -> Iterator[Finding]:
    found = env.packages.get("torchrec")
    if found is None or env.torch is None:
        return
    release = RELEASES.get(_minor(env.torch.version))
    if release is not None and not _starts(found, release.torchrec):
        message = f"torchrec {found} does not belong to torch {env.torch.version}, which wants torchrec {release.torchrec}"
        yield Finding("error", "torchrec", message, _torchrec_cure(env, release))
    elif FBGEMM_CUDA not in env.packages and FBGEMM_CPU not in env.packages:
        yield Finding("error", "torchrec", f"torchrec {found} is installed without FBGEMM", _fbgemm_cure(env))


def _imports(env: Environment) -> Iterator[Finding]:
    for name, why in env.broken_imports.items():
        missing = re.search(r"No module named '([\w.]+)'", why)
        cure: tuple[str, ...]
        if name == "torchrec" and missing:
            cure = (_pip(env, "install " + " ".join(TORCHREC_NEEDS)),)
        elif name in (FBGEMM_CPU, FBGEMM_CUDA):
            cure = _fbgemm_cure(env)
        else:
            cure = (_pip(env, f"install --force-reinstall --no-deps {name}=={env.packages.get(name, '').partition('+')[0]}"),)
        yield Finding("error", name, f"importing it fails: {why}", cure)


def _built(env: Environment) -> Iterator[Finding]:
    for name, where in env.built.items():
        release = env.packages.get(name, "").partition("+")[0].partition(".dev")[0].partition("a")[0]
        message = f"{name} {env.packages.get(name, '')} was built from {where}; only published wheels are tested together"
        yield Finding("warning", name, message, (_pip(env, f"install --force-reinstall --no-deps --only-binary :all: {name}=={release}"),))


def _needs(env: Environment) -> Iterator[Finding]:
    for name, words in env.conflicts:
        missing = re.search(r" requires ([\w.-]+), which is not installed", words)
        wrong = re.search(r" has requirement ([^,;]+(?:,[<>=!~][^,;]+)*)(?:;.*)?, but you have (\S+) (\S+?)\.?$", words)
        if missing:
            yield Finding("error", name, words, (_pip(env, f"install {missing[1]}"),))
        elif wrong and wrong[2].startswith("nvidia-cutlass-dsl"):
            message = f"{words}: libraries pin different releases of the CUTLASS DSL, and one environment holds one"
            yield Finding("warning", name, message, ("python3 -m venv .venv-cutlass", f".venv-cutlass/bin/python -m pip install {name}"))
        elif wrong:
            yield Finding("error", name, words, (_pip(env, f"install '{wrong[1].strip()}'"),))


def _plugins(env: Environment) -> Iterator[Finding]:
    if env.plugin_error is not None:
        yield Finding("error", "plugins", env.plugin_error)
    for p in env.plugins:
        title = f"{p['name']} {p['version']}"
        if p["state"] == "broken":
            behind = CORE if (p.get("api") or 0) > SUPPORTED_API[-1] else p["name"]
            yield Finding("error", p["name"], f"plug-in {title} cannot be used: {p['reason']}", (_pip(env, f"install --upgrade {behind}"),))
        elif p["state"] == "conflict" and p["name"] != CORE:  # the other one is told
            yield Finding("error", p["name"], f"plug-in {title}: {p['reason']}", (_pip(env, f"uninstall -y {p['name']}"),))


def _shared_memory(env: Environment) -> Iterator[Finding]:
    limit = 1 << 30
    if len(env.gpus) > 1 and env.shm_bytes is not None and env.shm_bytes < limit:
        message = f"/dev/shm holds {env.shm_bytes >> 20} MiB; NCCL between {len(env.gpus)} GPUs of one host may need 1 GiB"
        yield Finding("warning", "shared memory", message, ("mount -o remount,size=8G /dev/shm",))


def _fbgemm_cure(env: Environment) -> tuple[str, ...]:
    """Both builds out first: uninstalling either removes files of the other."""
    release = RELEASES.get(_minor(env.torch.version)) if env.torch is not None else None
    version = (release or list(RELEASES.values())[-1]).fbgemm
    build = FBGEMM_CPU if env.torch is None or env.torch.cuda is None else FBGEMM_CUDA
    return (
        _pip(env, f"uninstall -y {FBGEMM_CUDA} {FBGEMM_CPU}"),
        _pip(env, f"install --no-deps {build}=={version}"),
    )


def _torchrec_cure(env: Environment, release: Release) -> tuple[str, ...]:
    return (
        _pip(env, f"install --no-deps torchrec=={release.torchrec}"),
        _pip(env, "install " + " ".join(TORCHREC_NEEDS)),
    )


def probe() -> Environment:
    """Read the versions, the devices, the plug-ins; import the compiled packages in processes of their own."""
    packages = {name: version for name in LISTED if (version := _version(name)) is not None}
    plugins, plugin_error = _read_plugins()
    return Environment(
        python=sys.version_info[:3],
        executable=sys.executable,
        system=f"{platform.system()} {platform.machine()}",
        packages=packages,
        torch=_read_torch(packages),
        gpus=_read_gpus(),
        fbgemm_archs=_read_fbgemm() if FBGEMM_CUDA in packages else (),
        broken_imports=_try_imports(packages),
        conflicts=_read_conflicts({p["name"] for p in plugins}),
        built=_read_built(),
        plugins=plugins,
        plugin_error=plugin_error,
        shm_bytes=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None,
    )


def _read_torch(packages: dict[str, str]) -> Torch | None:
    if "torch" not in packages:
        return None
    code = (
        "import json, torch; cuda = torch.cuda.is_available();"
        "nccl = torch.cuda.nccl.version() if cuda else None;"
        "print(json.dumps([torch.__version__, torch.version.cuda, torch.cuda.get_arch_list(), cuda, nccl]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    wants = next((m[1] for r in metadata.requires("torch") or () if (m := re.match(r"triton\s*==\s*([\d.]+)", r))), None)
    if done.returncode:
        return Torch(packages["torch"], None, wants_triton=wants)
    version, cuda, archs, sees, nccl = json.loads(done.stdout.strip().splitlines()[-1])
    return Torch(version, cuda, tuple(archs), sees, _dots(nccl) if nccl else None, wants)


def _read_gpus() -> tuple[Gpu, ...]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    query = [tool, "--query-gpu=name,compute_cap,driver_version,memory.total", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.count(",") == 3]
    return tuple(
        Gpu(name, "sm_" + capability.replace(".", ""), driver, int(mib) << 20 if mib.isdigit() else None)
        for name, capability, driver, mib in rows
    )


def _read_fbgemm() -> tuple[str, ...]:
    folder = Path(str(metadata.distribution(FBGEMM_CUDA).locate_file("fbgemm_gpu")))
    return archs_of(folder) if folder.is_dir() else ()


def _read_conflicts(plugins: set[str]) -> tuple[tuple[str, str], ...]:
    """What ``pip check`` says of gem's distributions and of whoever pins the CUTLASS DSL; nothing where there is no pip."""
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    lines = [
        (line.split(" ", 1)[0], line.strip()) for line in done.stdout.splitlines() if " requires " in line or " has requirement " in line
    ]
    return tuple((name, line) for name, line in lines if name in plugins or "nvidia-cutlass-dsl" in line)


def _read_built() -> dict[str, str]:
    """The compiled distributions among `IMPORTED` that pip built or took from somewhere else than an index."""
    found = {}
    for name in IMPORTED:
        try:
            text = metadata.distribution(name).read_text("direct_url.json")
        except metadata.PackageNotFoundError:
            continue
        url = json.loads(text) if text else {}
        if "vcs_info" in url or "dir_info" in url:
            found[name] = url["url"]
    return found


def _try_imports(packages: dict[str, str]) -> dict[str, str]:
    """Distribution -> last line of the error, for each that is installed and cannot be imported."""
    running = {
        name: subprocess.Popen([sys.executable, "-c", f"import {module}"], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        for name, module in IMPORTED.items()
        if name in packages
    }
    broken = {}
    for name, process in running.items():
        _, stderr = process.communicate()
        if process.returncode:
            lines = stderr.strip().splitlines()
            broken[name] = lines[-1] if lines else f"the process ended with {process.returncode}"
    return broken


def _read_plugins() -> tuple[tuple[dict[str, Any], ...], str | None]:
    from gem_core.plugins import manager

    try:
        return tuple(asdict(s) for s in manager().status()), None
    except GemError as error:
        return (), str(error)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _covered(arch: str, archs: tuple[str, ...]) -> bool:
    """Whether code for ``archs`` runs on ``arch``: machine code of the same major and no newer minor, or PTX of any older one.

    Architecture-specific code ("sm_90a") runs on that one only.
    """
    have = _number(arch)
    for entry in archs:
        kind, _, number = entry.partition("_")
        if number.endswith(("a", "f")):
            if entry == f"{arch}a":
                return True
        elif (kind == "compute" and _number(number) <= have) or (_number(number) // 10 == have // 10 and _number(number) <= have):
            return True
    return False


def _pip(env: Environment, arguments: str) -> str:
    return f"{env.executable} -m pip {arguments}"


def _starts(version: str, prefix: str) -> bool:
    """Whether the release ``version`` (local part left out) is ``prefix`` or a refinement of it."""
    parts = version.partition("+")[0].split(".")
    return parts[: prefix.count(".") + 1] == prefix.split(".")


def _minor(version: str) -> str:
    return ".".join(version.partition("+")[0].split(".")[:2])


def _number(text: str) -> int:
    digits = re.search(r"\d+", text)
    return int(digits[0]) if digits else 0


def _dots(version: tuple[int, ...] | list[int]) -> str:
    return ".".join(map(str, version))
