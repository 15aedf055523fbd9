"""Everything that a contributor or CI runs; ``nox --list`` tells what there is.

Environments are reused and hold the packages editable. On a machine without a GPU the CPU builds are pinned first, so that nothing
pulls CUDA; on one with a GPU a CUDA torch that is there is used, else the CUDA builds are installed. Without an index pip takes all it
needs from a folder of wheels: ``PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER``.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import nox
from nox.command import CommandFailed

nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["tests"]

TORCH, TRITON, FBGEMM, TORCHREC = "2.13.0", "3.6.0", "1.8.0", "1.8.0"
TORCHREC_OF = {"2.11": ("1.6.0", "1.6.1"), "2.13": (FBGEMM, TORCHREC)}
"""Release of torch -> FBGEMM, TorchRec."""
TORCHREC_NEEDS = ("tensordict", "torchmetrics==1.0.3", "tqdm", "iopath", "pyre-extensions", "orjson", "pyvers", "importlib_metadata")
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"

GPU = shutil.which("nvidia-smi") is not None


_ASK_FOR_TORCH = """
import json, sys
from importlib.metadata import version
import torch
if torch.version.cuda and list(sys.version_info[:2]) == json.loads(sys.argv[1]):
    print(json.dumps([version("torch"), [folder for folder in sys.path if folder.endswith("-packages")]]))
"""


def _own_cuda_torch() -> tuple[str, list[str]] | None:
    """Version and package folders of the CUDA torch that is there: nox's own, that of ``python3``, or of what its environment was made of.

    The version is the distribution's, which pip compares pins with; ``torch.__version__`` may say more (``+cu130``).
    """
    for python in dict.fromkeys((sys.executable, shutil.which("python3"), getattr(sys, "_base_executable", None))):
        if python is not None:
            command = [python, "-c", _ASK_FOR_TORCH, json.dumps(sys.version_info[:2])]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0 and done.stdout.strip():
                version, folders = json.loads(done.stdout.splitlines()[-1])
                return version, folders
    return None


OWN_TORCH = _own_cuda_torch() if GPU else None

PACKAGES = tuple(sorted(path.parent.name for path in Path("packages").glob("*/pyproject.toml")))
EXTRAS = {"gem-core": "[log]"}
TEST_TOOLS = ("pytest", "pytest-xdist", "hypothesis")
TEST_NEEDS = {
    "gem-core": ("tensorboard", "safetensors", "mlflow-skinny", "wandb"),
    "gem-data": ("torchdata", "fsspec"),
    "gem-precision": ("triton", "torchao"),
    "gem-parallel": () if OWN_TORCH else ("torchrec", *TORCHREC_NEEDS),
}
"""Package -> extras and peers that its tests compare with; they skip where these are missing."""
PEERS = ("safetensors", "torchao", "torchdata", "mlflow-skinny", "wandb")
BUILD_TOOLS = ("hatchling", "editables")
QUIET_THREADS = {"OMP_NUM_THREADS": "1", "GEM_PLUGINS_STRICT": "1"}
"""Two test processes with a thread each are faster than one with two; in tests every plug-in failure is an error."""


def _install_torch(session: nox.Session) -> list[str]:
    """Install torch before anything can ask for it; returns the pins that hold it in place."""
    if OWN_TORCH:
        version, folders = OWN_TORCH
        own = session.run_install("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", silent=True)
        # Python 3.11 puts an old setuptools into environments, which would hide the one that torch was installed with
        session.run_install("python", "-m", "pip", "uninstall", "--yes", "--quiet", "setuptools", silent=True)
        # not --system-site-packages: made from the Python of an environment, a new one sees the packages below that, not those in it
        line = f"import site; list(map(site.addsitedir, {folders!r}))\n"
        Path(str(own).strip(), "own_torch.pth").write_text(line)
        return [f"torch=={version}"]
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
    session.install("--no-build-isolation", *_constrained(session, pins), *_editable(packages), *tools)


def _install_torchrec(session: nox.Session, release: str | None = None) -> None:
    """What belongs to a release of torch. TorchRec's metadata asks for the CUDA build of FBGEMM under any circumstances, hence --no-deps
    and its needs by hand. Beside a torch that was there: what is there, else what can be had."""
    if release or not OWN_TORCH:
        fbgemm, torchrec = TORCHREC_OF[release or _release(TORCH)]
        session.install("--no-deps", f"fbgemm-gpu{'' if GPU else '-cpu'}=={fbgemm}", f"torchrec=={torchrec}")
        session.install(*TORCHREC_NEEDS)
        return
    ask = "from importlib.util import find_spec; print(bool(find_spec('torchrec') and find_spec('fbgemm_gpu')))"
    if str(session.run("python", "-c", ask, silent=True)).strip() == "True":
        return
    found = TORCHREC_OF.get(_release(OWN_TORCH[0]))
    try:
        if found is None:
            session.warn(f"no FBGEMM is known to belong to torch {OWN_TORCH[0]}: tests that need it skip")
        else:
            session.install("--no-deps", f"fbgemm-gpu=={found[0]}", f"torchrec=={found[1]}")
            session.install(*TORCHREC_NEEDS)
    except CommandFailed:
        session.warn("FBGEMM and TorchRec cannot be had here: tests that need them skip")


def _release(version: str) -> str:
    return ".".join(version.split(".")[:2])


@nox.session
def quickstart(session: nox.Session) -> None:
    """Install everything, generate a log, train `tiny` on it and evaluate. Replaces the run of an earlier quick start."""
    _install(session, PACKAGES)
    session.run("gemrec", "train", *(session.posargs or ["--overwrite"]))


@nox.session
def tests(session: nox.Session) -> None:
    """Every test: each package's own in a clean environment that holds only that package, then those that cross packages.

    With arguments: pytest with these, everything installed.
    """
    _install(session, PACKAGES, *TEST_TOOLS, *PEERS)
    _install_torchrec(session)
    if session.posargs:
        session.run("python", "-m", "pytest", *session.posargs, env=QUIET_THREADS)
        return
    failed = [name for name in PACKAGES if not _passes_alone(session, name)]
    try:
        session.run("python", "-m", "pytest", "-n", "2", "--dist", "loadgroup", "tests", env=QUIET_THREADS)
    except CommandFailed:
        failed.append("tests/")
    if failed:
        session.error(f"failed: {', '.join(failed)}")


@nox.session
@nox.parametrize("package", PACKAGES)
def tests_package(session: nox.Session, package: str) -> None:
    """Tests of one package, editable, with only the core beside it."""
    if package == "gem-parallel":
        _install(session, ("gem-core", package), *TEST_TOOLS)
        _install_torchrec(session)
    else:
        _install(session, _with_core(package), *TEST_TOOLS, *TEST_NEEDS.get(package, ()))
    session.run("python", "-m", "pytest", f"packages/{package}/tests", *session.posargs, env=QUIET_THREADS)


@nox.session
@nox.parametrize("package", PACKAGES)
def isolated(session: nox.Session, package: str) -> None:
    """The wheel of one package, installed with its declared needs into a fresh environment: imports, lists itself, passes its tests."""
    pins = _install_torch(session)
    session.install("build", *BUILD_TOOLS)
    with tempfile.TemporaryDirectory() as folder:
        for name in _with_core(package):
            session.run("python", "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, f"packages/{name}", silent=True)
        wheels = [str(w) for w in Path(folder).glob("*.whl")]
        constraints = _constrained(session, pins)
        session.install("--force-reinstall", "--no-deps", *wheels)
        session.install(*constraints, *wheels, *TEST_TOOLS)
        if package == "gem-parallel":
            _install_torchrec(session)
        else:
            session.install(*constraints, *TEST_NEEDS.get(package, ()), "pytest")
    session.run("gemrec", "plugins")
    session.run("python", "-m", "pytest", "-n", "2", f"packages/{package}/tests", *session.posargs, env=QUIET_THREADS)


@nox.session
@nox.parametrize("package", PACKAGES)
def dist(session: nox.Session, package: str) -> None:
    """Source archive and wheel of one package into dist/: contents listed and checked, each installed, imported, listed as a plug-in."""
    pins = _install_torch(session)
    session.install("build", "twine", *BUILD_TOOLS)
    out = Path("dist", package)
    shutil.rmtree(out, ignore_errors=True)
    session.run("python", "-m", "build", "--no-isolation", "--outdir", str(out), f"packages/{package}", silent=True)
    session.run("python", "-m", "twine", "check", "--strict", *map(str, out.iterdir()))
    if package != "gem-core":
        session.install("--no-build-isolation", *_constrained(session, pins), "packages/gem-core")
    for archive in sorted(out.iterdir()):
        lister = ("zipfile", "--list") if archive.suffix == ".whl" else ("tarfile", "--list")
        session.run("python", "-m", *lister, str(archive))
        session.install("--no-build-isolation", *_constrained(session, pins), str(archive))
        session.run("python", "-c", f"import {package.replace('-', '_')}")
        listed = session.run("gemrec", "plugins", silent=True, env={"GEM_PLUGINS_STRICT": "1"}) or ""
        if package != "gem-core" and f"{package} " not in listed:
            session.error(f"{archive.name} is installed, but `gemrec plugins` does not list it")
        session.run("python", "-m", "pip", "uninstall", "--yes", "--quiet", package)


@nox.session
@nox.parametrize("package", PACKAGES)
def minimums(session: nox.Session, package: str) -> None:
    """Tests of one package with the lowest version of every dependency that it and the core declare, warnings shown.

    torch stays at the version of the other sessions; `compat` runs the oldest one.
    """
    pins = [*_install_torch(session), *(f"{name}=={version}" for name, version in _lowest(_with_core(package)).items())]
    session.install(*BUILD_TOOLS)
    needs = () if package == "gem-parallel" else TEST_NEEDS.get(package, ())
    session.install("--no-build-isolation", *_constrained(session, pins), *_editable(_with_core(package)), *TEST_TOOLS, *needs)
    session.run("python", "-m", "pytest", "-n", "2", "-W", "default", f"packages/{package}/tests", *session.posargs, env=QUIET_THREADS)


@nox.session
def compat(session: nox.Session) -> None:
    """Every test with the oldest torch that the packages declare (opt in: it is downloaded; without a CPU wheel the CUDA one, 3 GB)."""
    oldest = _lowest(PACKAGES, keep=("torch",))["torch"]
    try:
        session.install(f"torch=={oldest}" if GPU else f"torch=={oldest}+cpu", "--extra-index-url", CPU_WHEELS)
    except CommandFailed:
        session.install(f"torch=={oldest}")  # runs on the CPU as well
    session.install(*BUILD_TOOLS)
    session.install("--no-build-isolation", *_constrained(session, [f"torch=={oldest}"]), *_editable(PACKAGES), *TEST_TOOLS, *PEERS)
    _install_torchrec(session, _release(oldest))
    session.run("python", "-m", "pytest", "-n", "2", *(session.posargs or ["packages"]), env=QUIET_THREADS)


@nox.session
def core_against_released(session: nox.Session) -> None:
    """This core beside the released plug-ins (their last tags, or the commit before): nothing that they use may break."""
    _mixed(session, released=tuple(name for name in PACKAGES if name != "gem-core"))


@nox.session
def plugins_against_released_core(session: nox.Session) -> None:
    """These plug-ins beside the released core (its last tag, or the commit before)."""
    _mixed(session, released=("gem-core",))


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation site into site/, warnings as errors. The code on its pages is run by tests/test_docs.py."""
    session.install("mkdocs-material>=9.7,<10", "mkdocstrings[python]>=0.30")
    # without --quiet: what is not printed is not counted as a warning
    session.run("mkdocs", "build", "--strict", "-f", "docs/mkdocs.yml", env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session
def gpu(session: nox.Session) -> None:
    """The tests that need a GPU, on a machine that has one, four at a time; with arguments: pytest's own."""
    if not GPU:
        session.error("there is no GPU on this machine (no nvidia-smi)")
    _install(session, PACKAGES, *TEST_TOOLS)
    _install_torchrec(session)
    # the longest tests come first: handed out in the usual large portions, one process would get them all
    arguments = session.posargs or ["-n", "4", "--maxschedchunk", "2"]
    session.run("python", "-m", "pytest", "-m", "gpu or multigpu", *arguments, env=QUIET_THREADS)


@nox.session
def changed(session: nox.Session) -> None:
    """Tests of the packages that changed since a commit (argument; origin/main or the commit before) and of those that need them.

    Further arguments are pytest's.
    """
    since = session.posargs[0] if session.posargs else _default_base()
    for name in _affected(since):
        session.notify(f"tests_package(package='{name}')", posargs=session.posargs[1:])
    session.log(f"changed since {since}: {', '.join(_affected(since)) or 'no package'}")


@nox.session
@nox.parametrize("package", PACKAGES)
def api(session: nox.Session, package: str) -> None:
    """Breaks of the public interface since the package's last tag (argument: another commit); a release must explain each of them."""
    session.install("griffe>=1.5")
    since = session.posargs[0] if session.posargs else _last_tag(package) or "HEAD~1"
    session.run("griffe", "check", package.replace("-", "_"), "--search", f"packages/{package}/src", "--against", since)


@nox.session
@nox.parametrize("package", PACKAGES)
def release(session: nox.Session, package: str) -> None:
    """Release one package: ``nox -s "release(package='gem-data')" -- minor`` (or major, patch, a version).

    Moves the changelog's "Unreleased" under the new version, bumps, builds, commits and tags ``<package>-v<version>``; pushes nothing.
    """
    if len(session.posargs) != 1:
        session.error("say what to release: major, minor, patch, or a version")
    if _git("status", "--porcelain"):
        session.error("the tree has changes that are not committed")
    session.install("hatch", "build", *BUILD_TOOLS)
    folder = Path("packages", package)
    changelog = folder / "CHANGELOG.md"
    text = changelog.read_text()
    notes = re.search(r"## Unreleased\n(.*?)(?=\n## |\Z)", text, re.DOTALL)
    if notes is None or not notes[1].strip():
        session.error(f"{changelog} says nothing under '## Unreleased'")
    with session.chdir(folder):
        session.run("hatch", "version", session.posargs[0])
        version = (session.run("hatch", "version", silent=True) or "").strip().splitlines()[-1]
    date = _git("log", "-1", "--format=%cs")
    changelog.write_text(text.replace("## Unreleased\n", f"## Unreleased\n\n## {version} - {date}\n", 1))
    session.run("python", "-m", "build", "--no-isolation", "--outdir", f"dist/{package}", str(folder))
    _git("commit", "--quiet", "--message", f"Release {package} {version}", "--", str(folder))
    _git("tag", f"{package}-v{version}")
    session.log(f"tagged {package}-v{version}; archives are in dist/{package}. Push the commit and the tag, then upload.")


@nox.session
def lint(session: nox.Session) -> None:
    """ruff (rules and format), and mypy in strict mode; what it does not judge is named in pyproject.toml."""
    _install(session, PACKAGES, "ruff", "mypy", "pytest")
    session.run("python", "-m", "ruff", "check", ".")
    session.run("python", "-m", "ruff", "format", "--check", ".")
    session.run("python", "-m", "mypy", *(f"packages/{name}/src" for name in PACKAGES))
    session.run("python", "-m", "mypy", *map(str, Path("docs/examples").glob("*/src")))


def _with_core(package: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(("gem-core", package)))


def _editable(packages: tuple[str, ...]) -> list[str]:
    """pip's words for ``packages`` as they are here."""
    return [word for name in packages for word in ("-e", f"packages/{name}{EXTRAS.get(name, '')}")]


def _constrained(session: nox.Session, pins: list[str]) -> tuple[str, str]:
    """pip's option that holds ``pins``."""
    path = Path(session.create_tmp(), "constraints.txt")
    path.write_text("\n".join(pins))
    return "-c", str(path)


def _project(package: str) -> dict[str, object]:
    project: dict[str, object] = tomllib.loads(Path("packages", package, "pyproject.toml").read_text())["project"]
    return project


def _lowest(packages: tuple[str, ...], keep: tuple[str, ...] = ()) -> dict[str, str]:
    """Distribution -> lowest declared version, of all that ``packages`` declare; torch, triton and our own are left out unless kept."""
    found: dict[str, str] = {}
    for package in packages:
        for need in map(str, _project(package)["dependencies"]):  # type: ignore[call-overload]
            named = re.match(r"([A-Za-z0-9_.-]+)[^>]*>=([0-9][0-9a-z.]*)", need)
            if named and (named[1] in keep or not (named[1].startswith("gem-") or named[1] in ("torch", "triton"))):
                found[named[1]] = max(named[2], found.get(named[1], named[2]), key=lambda v: tuple(map(int, v.split("."))))
    return found


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout.strip()


def _default_base() -> str:
    known = subprocess.run(["git", "rev-parse", "--verify", "--quiet", "origin/main"], capture_output=True, check=False)
    return "origin/main" if known.returncode == 0 and _git("rev-parse", "origin/main") != _git("rev-parse", "HEAD") else "HEAD~1"


def _affected(since: str) -> list[str]:
    """Packages with changed files, and those that depend on them."""
    files = _git("diff", "--name-only", since).splitlines()
    touched = {name for name in PACKAGES if any(f.startswith(f"packages/{name}/") for f in files)}
    needs = {name: {re.split(r"[^A-Za-z0-9_.-]", str(n))[0] for n in _project(name)["dependencies"]} for name in PACKAGES}  # type: ignore[attr-defined]
    return [name for name in PACKAGES if name in touched or needs[name] & touched]


def _last_tag(package: str) -> str:
    """The tag of the package's last release; empty if there is none."""
    command = ["git", "describe", "--tags", "--abbrev=0", "--match", f"{package}-v*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _mixed(session: nox.Session, released: tuple[str, ...]) -> None:
    """The packages ``released`` as they were released, built to wheels, beside the present others; the tests that cross packages run."""
    pins = _install_torch(session)
    session.install(*BUILD_TOOLS)
    with tempfile.TemporaryDirectory() as folder:
        for name in PACKAGES:
            source = Path("packages", name)
            if name in released:
                tag = _last_tag(name)
                source = Path(folder, name)
                source.mkdir()
                archive = Path(folder, f"{name}.tar")
                _git("archive", "--output", str(archive), tag or "HEAD~1", f"packages/{name}")
                shutil.unpack_archive(archive, source)
                source = source / "packages" / name
                session.log(f"{name} of {tag or 'the commit before'}")
            session.run("python", "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, str(source), silent=True)
        wheels = sorted(str(w) for w in Path(folder).glob("*.whl"))
        session.install("--force-reinstall", "--no-deps", *wheels)
        session.install(*_constrained(session, pins), *wheels, *TEST_TOOLS, *PEERS)
    session.run("gemrec", "plugins", env=QUIET_THREADS)
    session.run("python", "-m", "pytest", *(session.posargs or ["tests/test_quickstart.py", "tests/test_readmes.py"]), env=QUIET_THREADS)


def _passes_alone(session: nox.Session, package: str) -> bool:
    """Whether the tests of ``package`` pass in an environment of its wheel, the core's, and what these declare."""
    where = Path(session.create_tmp(), f"alone-{package}")
    also = [need.partition("==")[0] for need in (*TEST_TOOLS, *TEST_NEEDS.get(package, ()))]
    folders = [f"packages/{name}" for name in _with_core(package)]
    try:
        session.run("python", "tests/isolate.py", str(where), *folders, "--with", *also)
        python = str(where / "bin" / "python")
        session.run(python, "-m", "pytest", "-n", "2", f"packages/{package}/tests", env=QUIET_THREADS, external=True)
    except CommandFailed:
        return False
    return True
