"""Everything that a contributor or CI runs: ``nox -s quickstart | tests | lint | tests_package | isolated | dist``.

Environments are reused and hold the packages editable. On a machine without a GPU the CPU builds are pinned first, so that nothing
pulls CUDA; on one with a GPU the interpreter's own CUDA torch is used where there is one, else the CUDA builds are installed.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nox
from nox.command import CommandFailed

nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["tests"]

TORCH, TRITON, FBGEMM, TORCHREC = "2.13.0", "3.6.0", "1.8.0", "1.8.0"
TORCHREC_NEEDS = ("tensordict", "torchmetrics==1.0.3", "tqdm", "iopath", "pyre-extensions", "orjson", "pyvers", "importlib_metadata")
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"

GPU = shutil.which("nvidia-smi") is not None


def _own_cuda_torch() -> str | None:
    """Version of the CUDA torch of the interpreter that nox's environments are made from, if it has one."""
    python = getattr(sys, "_base_executable", sys.executable)
    code = "import torch; print(torch.__version__ if torch.version.cuda else '')"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


OWN_TORCH = _own_cuda_torch() if GPU else None
VENV = ["--system-site-packages"] if OWN_TORCH else []

PACKAGES = ("gem-core", "gem-data", "gem-kernels", "gem-parallel", "gem-precision")
EXTRAS = {"gem-core": "[log]"}
TEST_TOOLS = ("pytest", "pytest-xdist", "hypothesis")
TEST_NEEDS = {
    "gem-core": ("tensorboard", "safetensors"),
    "gem-precision": ("triton", "torchao"),
    "gem-parallel": () if OWN_TORCH else ("torchrec", *TORCHREC_NEEDS),
}
"""Package -> extras and peers that its tests compare with; they skip where these are missing."""
PEERS = ("safetensors", "torchao")
BUILD_TOOLS = ("hatchling", "editables")
QUIET_THREADS = {"OMP_NUM_THREADS": "1", "GEM_PLUGINS_STRICT": "1"}
"""Two test processes with a thread each are faster than one with two; in tests every plug-in failure is an error."""

TYPED = ("plugins.py", "doctor.py", "hookspecs.py", "errors.py", "config", "cli")
TYPED_NEEDS = ("pluggy", "pydantic", "typer", "rich", "tomli-w")


def _install_torch(session: nox.Session) -> list[str]:
    """Install torch before anything can ask for it; returns the pins that hold it in place."""
    if OWN_TORCH:
        return [f"torch=={OWN_TORCH}"]
    if GPU or platform.system() != "Linux":
        session.install(f"torch=={TORCH}")
        return [f"torch=={TORCH}"]
    cpu = f"torch=={TORCH}+cpu"
    try:
        session.install(cpu)
    except CommandFailed:
        session.install(cpu, "--extra-index-url", CPU_WHEELS)
    return [cpu, f"triton=={TRITON}"]


def _install(session: nox.Session, packages: tuple[str, ...], *tools: str) -> None:
    """The packages, editable, with their needs and ``tools``."""
    pins = _install_torch(session)
    session.install(*BUILD_TOOLS)
    editable = [word for name in packages for word in ("-e", f"packages/{name}{EXTRAS.get(name, '')}")]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join(pins))
        constraints.flush()
        session.install("--no-build-isolation", "-c", constraints.name, *editable, *tools)


def _install_torchrec(session: nox.Session) -> None:
    """TorchRec's metadata asks for the CUDA build of FBGEMM under any circumstances, hence --no-deps and its needs by hand."""
    if OWN_TORCH:
        return
    session.install("--no-deps", f"fbgemm-gpu{'' if GPU else '-cpu'}=={FBGEMM}", f"torchrec=={TORCHREC}")
    session.install(*TORCHREC_NEEDS)


@nox.session(venv_params=VENV)
def quickstart(session: nox.Session) -> None:
    """Install everything, generate a log, train `tiny` on it and evaluate. Replaces the run of an earlier quick start."""
    _install(session, PACKAGES)
    session.run("gemrec", "train", *(session.posargs or ["--overwrite"]))


@nox.session(venv_params=VENV)
def tests(session: nox.Session) -> None:
    """Every test: each package's own in a clean environment that holds only that package, then those that cross packages.

    With arguments: pytest with these, everything installed.
    """
    _install(session, PACKAGES, *TEST_TOOLS, *PEERS)
    _install_torchrec(session)
    if session.posargs:
        session.run("pytest", *session.posargs, env=QUIET_THREADS)
        return
    failed = [name for name in PACKAGES if not _passes_alone(session, name)]
    try:
        session.run("pytest", "-n", "2", "tests", env=QUIET_THREADS)
    except CommandFailed:
        failed.append("tests/")
    if failed:
        session.error(f"failed: {', '.join(failed)}")


@nox.session(venv_params=VENV)
@nox.parametrize("package", PACKAGES)
def tests_package(session: nox.Session, package: str) -> None:
    """Tests of one package, editable, with only the core beside it."""
    if package == "gem-parallel":
        _install(session, ("gem-core", package), *TEST_TOOLS)
        _install_torchrec(session)
    else:
        _install(session, tuple(dict.fromkeys(("gem-core", package))), *TEST_TOOLS, *TEST_NEEDS.get(package, ()))
    session.run("pytest", f"packages/{package}/tests", *session.posargs, env=QUIET_THREADS)


@nox.session(venv_params=VENV)
@nox.parametrize("package", PACKAGES)
def isolated(session: nox.Session, package: str) -> None:
    """The wheel of one package, installed with its declared needs into a fresh environment: imports, lists itself, passes its tests."""
    pins = _install_torch(session)
    session.install("build", *BUILD_TOOLS)
    with tempfile.TemporaryDirectory() as folder:
        for name in dict.fromkeys(("gem-core", package)):
            session.run("python", "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, f"packages/{name}", silent=True)
        wheels = [str(w) for w in Path(folder).glob("*.whl")]
        constraints = Path(folder, "constraints.txt")
        constraints.write_text("\n".join(pins))
        session.install("--force-reinstall", "--no-deps", *wheels)
        session.install("-c", str(constraints), *wheels, *TEST_TOOLS)
        if package == "gem-parallel":
            _install_torchrec(session)
        else:
            session.install("-c", str(constraints), *TEST_NEEDS.get(package, ()), "pytest")
    session.run("gemrec", "plugins")
    session.run("pytest", f"packages/{package}/tests", *session.posargs, env=QUIET_THREADS)


@nox.session
@nox.parametrize("package", PACKAGES)
def dist(session: nox.Session, package: str) -> None:
    """Source archive and wheel of one package into dist/, contents listed and checked."""
    session.install("build", "twine", *BUILD_TOOLS)
    out = Path("dist", package)
    shutil.rmtree(out, ignore_errors=True)
    session.run("python", "-m", "build", "--no-isolation", "--outdir", str(out), f"packages/{package}", silent=True)
    session.run("python", "-m", "twine", "check", "--strict", *map(str, out.iterdir()))
    for wheel in out.glob("*.whl"):
        session.run("python", "-m", "zipfile", "--list", str(wheel))


@nox.session
def lint(session: nox.Session) -> None:
    """ruff (rules and format), and mypy in strict mode on the modules that users and plug-ins build on."""
    session.install("ruff", "mypy", *TYPED_NEEDS)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy", *(f"packages/gem-core/src/gem_core/{name}" for name in TYPED))


def _passes_alone(session: nox.Session, package: str) -> bool:
    """Whether the tests of ``package`` pass in an environment of its wheel, the core's, and what these declare."""
    where = Path(session.create_tmp(), f"alone-{package}")
    also = [need.partition("==")[0] for need in (*TEST_TOOLS, *TEST_NEEDS.get(package, ()))]
    folders = [f"packages/{name}" for name in dict.fromkeys(("gem-core", package))]
    try:
        session.run("python", "tests/isolate.py", str(where), *folders, "--with", *also)
        python = str(where / "bin" / "python")
        session.run(python, "-m", "pytest", "-n", "2", f"packages/{package}/tests", env=QUIET_THREADS, external=True)
    except CommandFailed:
        return False
    return True
