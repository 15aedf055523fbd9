"""The command: exit codes, messages, options that stand anywhere, commands of plug-ins, start-up."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gem_core import plugins
from gem_core.cli import main
from gem_core.cli.app import split_globals
from gem_core.cli.groups import CommandGroups
from gem_core.config import load_config, resolve
from gem_core.errors import ConfigError, RunError
from gem_core.hookspecs import hookimpl


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Only the core's own plug-in, whatever else is installed."""
    monkeypatch.setenv("GEM_PLUGINS", "off")
    monkeypatch.delenv("GEM_PLUGINS_STRICT", raising=False)
    plugins.reset()
    yield
    plugins.reset()


def add(name: str, register) -> None:
    class Commands:
        gem_api = 1

        @hookimpl
        def gem_commands(self, app):
            register(app)

    plugins.manager().add(name, Commands())


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("gemrec ")


COMMANDS = [["plugins"], ["doctor"], ["config", "show"], ["config", "schema"], ["config", "init"], ["train"], ["eval"]]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example(command: list[str], capsys):
    assert main([*command, "--help"]) == 0
    assert f"Example: gemrec {' '.join(command)}" in " ".join(capsys.readouterr().out.split())


def test_user_errors_are_printed_without_a_traceback(capsys, tmp_path: Path):
    assert main(["config", "show", str(tmp_path / "gone.toml")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: the configuration file does not exist\n  where: ")
    assert "\n  fix:   " in err
    assert "Traceback" not in err


@pytest.mark.parametrize("argv", [["--debug", "config", "show", "gone.toml"], ["config", "show", "gone.toml", "--debug"]])
def test_debug_shows_the_traceback(argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        main(argv)


def test_usage_errors_exit_with_2(capsys):
    assert main(["trian"]) == 2
    assert "No such command" in capsys.readouterr().err
    assert main(["config", "show", "--nope"]) == 2


def test_a_failed_run_exits_with_1(capsys):
    def register(app):
        @app.command()
        def fail() -> None:
            raise RunError("the loss is not finite")

    add("acme", register)
    assert main(["fail"]) == 1
    assert capsys.readouterr().err == "error: the loss is not finite\n"


def test_a_fault_of_the_program_is_not_dressed_up():
    def register(app):
        @app.command()
        def fail() -> None:
            raise ZeroDivisionError

    add("acme", register)
    with pytest.raises(ZeroDivisionError):
        main(["fail"])


def test_what_the_system_refuses_is_told(tmp_path: Path, capsys):
    def register(app):
        @app.command()
        def fail() -> None:
            (tmp_path / "gone" / "x.csv").write_text("")

    add("acme", register)
    assert main(["fail"]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: the system refused: No such file or directory\n  where: {tmp_path}/gone/x.csv\n  fix:   ")
    with pytest.raises(FileNotFoundError):
        main(["fail", "--debug"])


@pytest.mark.parametrize("what", ["tables", "list"])
def test_memory_that_cannot_be_had_is_told(what: str, capsys):
    def register(app):
        @app.command()
        def fail() -> None:
            if what == "list":
                raise MemoryError
            import torch

            torch.empty(2**50)

    add("acme", register)
    assert main(["fail"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("error: there is too little memory: ")
    assert "gemrec doctor CONFIG" in told


def test_globals_stand_anywhere():
    assert split_globals(["--debug", "train", "x"]) == (["train", "x"], True, ())
    assert split_globals(["train", "--no-plugin", "a", "x", "--no-plugin=b"]) == (["train", "x"], False, ("a", "b"))
    assert split_globals(["train", "--", "--debug"]) == (["train", "--", "--debug"], False, ())
    with pytest.raises(ConfigError, match="--no-plugin needs a name"):
        split_globals(["train", "--no-plugin"])


def test_plugins_as_json(capsys):
    assert main(["plugins"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("  kernel reference: "))
    assert "gdpa" in line.removeprefix("  kernel reference: ").split(", ")
    assert main(["plugins", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    core = next(p for p in listed if p["name"] == "gem-core")
    assert {"name", "distribution", "version", "api", "hooks", "offers", "state", "reason"} == set(core)
    assert {"ne", "auc"} <= set(core["offers"]["metric"])
    assert "gdpa/reference" in core["offers"]["kernel"]


def test_ops_table(capsys):
    assert main(["plugins", "--ops", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"jagged_attention", "gdpa", "block_attention", "norm", "norm_linear", "linear_norm", "mlp", "norm_gdpa"} == {
        r["op"] for r in rows
    }
    assert all(["reference", True, ""] in r["implementations"] for r in rows)


def test_config_init_writes_what_it_loads(tmp_path: Path, capsys):
    path = tmp_path / "my.toml"
    assert main(["config", "init", str(path), "--set", "train.steps=7"]) == 0
    assert load_config(path).train.steps == 7
    assert resolve(load_config(path)) == resolve(load_config(None, ["train.steps=7"]))
    assert main(["config", "init", str(path)]) == 2
    assert "the file exists already" in capsys.readouterr().err
    assert main(["config", "init", str(path), "--force"]) == 0
    assert load_config(path).train.steps is None


def test_config_show_and_schema(capsys):
    assert main(["config", "show", "--set", "run.seed=5"]) == 0
    assert "seed = 5" in capsys.readouterr().out
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "gem configuration"


def test_commands_of_plugins(capsys):
    def register(app):
        @app.group("data").command()
        def inspect(path: str) -> None:
            print(f"inspecting {path}")

        @app.command("plan")
        def plan_it() -> None:
            print("planning")

    add("acme", register)
    assert main(["data", "inspect", "x"]) == 0
    assert main(["plan"]) == 0
    assert capsys.readouterr().out == "inspecting x\nplanning\n"


def test_a_group_without_commands_says_so(capsys):
    assert main(["data", "inspect", "--rows", "3"]) == 2
    assert "no installed plug-in adds commands to 'gemrec data'" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "data" not in capsys.readouterr().out.split()


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (lambda app: app.command("plan")(print), r"the command 'gemrec plan' is offered by acme and by bolt"),
        (lambda app: app.command("data")(print), r"the command 'gemrec data' is offered by gem-core and by bolt"),
        (lambda app: app.group("config").command("show")(print), r"the command 'gemrec config show' is offered by gem-core and by bolt"),
        (lambda app: app.group("dat"), r"there is no command group 'dat'; there are: bench, data, kernels, precision, config"),
    ],
)
def test_a_plugin_whose_commands_clash_is_withdrawn_whole(second, words: str, capsys):
    def half(app):
        app.command("other")(lambda: print("other"))
        second(app)

    add("acme", lambda app: app.command("plan")(lambda: print("planning")))
    add("bolt", half)
    assert main(["plan"]) == 2
    assert re.match(f"error: plug-in bolt 0 cannot be used: {words}", capsys.readouterr().err)

    plugins.reset()
    add("acme", lambda app: app.command("plan")(lambda: print("planning")))
    add("bolt", half)
    plugins.manager()._plugins["bolt"].asked = False  # as if found among the installed ones
    assert main(["plan"]) == 0
    said = capsys.readouterr()
    assert re.match(f"warning: plug-in bolt 0 cannot be used: {words}", said.err)
    assert said.out == "planning\n"
    assert main(["other"]) == 2


def test_withdrawing_takes_back_commands_and_groups():
    import typer

    groups = CommandGroups()
    groups.owner = "acme"
    groups.command()(main)
    groups.group("data").add_typer(typer.Typer(), name="sub")
    groups.owner = "bolt"
    groups.group("data").command("keep")(main)
    groups.withdraw("acme")
    assert groups.top.registered_commands == []
    assert groups.group("data").registered_groups == []
    assert [c.name for c in groups.group("data").registered_commands] == ["keep"]


def test_start_up_is_light(monkeypatch: pytest.MonkeyPatch):
    """Help loads every installed plug-in's commands, and yet neither torch nor anything built on it."""
    monkeypatch.delenv("GEM_PLUGINS")
    code = (
        "import sys; from gem_core.cli import main; main(['--help']);"
        "print([m for m in ('torch', 'triton', 'torchrec', 'numpy', 'pyarrow') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"


def test_importing_the_core_loads_no_plugin():
    code = "import gem_core, gem_core.config, gem_core.plugins as p, sys; assert p._manager is None; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_help_prints_brackets_as_they_are(capsys):
    from typer.testing import CliRunner

    groups = CommandGroups()

    @groups.command()
    def first() -> None:
        """Checks the [features] table."""

    @groups.command()
    def second() -> None:
        """Another."""

    result = CliRunner().invoke(groups.assemble(), ["first", "--help"])
    assert "Checks the [features] table." in result.output
