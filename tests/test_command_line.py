import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

import minillm
from minillm import __main__ as main_module
from minillm.__main__ import COMMANDS, run


def test_overview_lists_every_command(capsys):
    for argv in ([], ["--help"], ["-h"]):
        assert run(argv) == 0
        out = capsys.readouterr().out
        assert all(name in out and about in out for name, (_, about) in COMMANDS.items())


def test_version(capsys):
    assert run(["--version"]) == 0 and capsys.readouterr().out.strip() == minillm.__version__


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, capsys):
    assert run([name, "--help"]) == 0
    assert "--help" in capsys.readouterr().out


def test_unknown_command_suggests_the_nearest(capsys):
    assert run(["notebook"]) == 2
    assert capsys.readouterr().err == "minillm: no command 'notebook'; did you mean 'notebooks'?\n"
    assert run(["xyz"]) == 2
    assert capsys.readouterr().err == "minillm: no command 'xyz'; see --help\n"


def test_unknown_option_is_one_line(capsys):
    assert run(["progress", "--frobnicate"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "--frobnicate" in error


@pytest.fixture
def command(monkeypatch):
    """Install a function as the command `probe`."""

    def install(function):
        module = types.ModuleType("probe_command")
        module.command = function
        monkeypatch.setitem(sys.modules, "probe_command", module)
        monkeypatch.setitem(main_module.COMMANDS, "probe", ("probe_command", "a probe"))

    return install


def test_bad_input_is_one_line_whatever_subclass(command, capsys, monkeypatch):
    class Mismatch(ValueError):
        pass

    def refuse(nproc: int = 0) -> None:
        raise Mismatch(f"--nproc {nproc} must be\n   1 or more")

    command(refuse)
    assert run(["probe"]) == 2
    assert capsys.readouterr().err == "minillm: --nproc 0 must be 1 or more\n"
    assert run(["probe", "--nproc", "two"]) == 2
    assert "--nproc" in capsys.readouterr().err
    monkeypatch.setenv("MINILLM_DEBUG", "1")
    with pytest.raises(Mismatch):
        run(["probe"])


def test_status_and_other_errors_pass_through(command):
    command(lambda: 1)
    assert run(["probe"]) == 1

    def crash() -> None:
        raise RuntimeError("a bug")

    command(crash)
    with pytest.raises(RuntimeError, match="a bug"):
        run(["probe"])

    def interrupt() -> None:
        raise KeyboardInterrupt

    command(interrupt)
    assert run(["probe"]) == 130


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("from minillm.__main__ import run; run([])", {"torch", "matplotlib", "typer", "IPython"}),
        ("import minillm.labkit", {"torch", "matplotlib", "typer", "IPython"}),
    ],
)
def test_imports_stay_light(code, heavy):
    """The overview appears at once, and ranks that unpickle a lab's function start quickly."""
    script = f"{code}; import sys; print('heavy:', *sorted({heavy} & set(sys.modules)))"
    root = Path(minillm.__file__).parents[1]
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=root, check=True)
    assert result.stdout.splitlines()[-1] == "heavy:"


def test_a_terminal_that_knows_ascii_only_shows_everything(tmp_path):
    """A table's letters (µ, —) are written as escapes there; closed streams do not matter either."""
    code = "import minillm.__main__ as m; m._overview = lambda: 'µs — done'; m.main([])"
    root = Path(minillm.__file__).parents[1]
    for encoding, shown in (("ascii", "\\xb5s \\u2014 done"), ("utf-8", "µs — done")):
        environ = os.environ | {"PYTHONIOENCODING": encoding}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=root, env=environ)
        assert done.returncode == 0 and done.stdout.decode().strip() == shown and not done.stderr
