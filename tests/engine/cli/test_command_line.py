import ast
import os
import re
import shlex
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest

import minillm
from minillm import __main__ as main_module
from minillm.__main__ import COMMANDS, run
from minillm.cli.examples import EXAMPLES
from minillm.predict.planner.architectures import ARCHITECTURES

ROOT = Path(minillm.__file__).parents[1]


def test_overview_lists_every_command(capsys):
    for argv in ([], ["--help"], ["-h"]):
        assert run(argv) == 0
        out = capsys.readouterr().out
        assert all(name in out and about in out for name, (_, about) in COMMANDS.items())


def test_overview_is_in_the_order_of_a_newcomer(capsys):
    run([])
    names = re.findall(r"^  ([a-z-]+)  ", capsys.readouterr().out, re.MULTILINE)
    assert names == list(COMMANDS) and names[:4] == ["lab", "doctor", "progress", "tour"]
    assert [*main_module.GROUPS] == ["Start", "Learn and measure", "Use", "Maintain"]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples_that_parse_and_defaults_of_one_form(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    parser = main_module.parser_of(name)
    for example in EXAMPLES[name]:
        command, *words = shlex.split(example)
        assert command == name
        parser.make_context(name, words)  # raises for an option that is not there, or a value it cannot take
    assert list(tmp_path.iterdir()) == []
    for param in parser.params:
        said = "" if name == "lab" else getattr(param, "help", "")
        assert not re.search("default[: ]", (said or "").lower()), f"{param.name}: say it with show_default="
        assert not re.fullmatch(r"[-\d.]+", str(param.show_default)), f"{param.name}: make it the default itself"
    assert run([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"python -m minillm {example}" in out for example in EXAMPLES[name])


def test_options_of_a_large_command_stand_in_panels(capsys):
    for name in ("train", "generate", "plan", "oracle"):
        panels = {getattr(param, "rich_help_panel", None) for param in main_module.parser_of(name).params}
        assert len(panels) > 3, name


def test_models_and_topics_are_listed(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert run(["plan", "--help"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in ARCHITECTURES)
    assert run(["plan", "--model", "lama-3-70b"]) == 2
    said = capsys.readouterr().err
    assert "the nearest: llama-3-70b" in said and "`python -m minillm plan --help` lists all" in said
    assert run(["interview", "--topic", "astrology", "--sheet", "x.html"]) == 2
    said = capsys.readouterr().err
    assert all(topic in said for topic in ("data", "collectives", "serving"))


@pytest.mark.parametrize("name", ["doctor", "machine", "progress"])
def test_a_folder_that_is_missing_is_not_made(name, tmp_path, capsys, monkeypatch):
    """Before the work, and by the same sentence for every command."""
    monkeypatch.setattr("minillm.cli.doctor.CHECKS", None)
    monkeypatch.setattr("minillm.cli.machine.machine", None)
    file = tmp_path / "missing" / "x.json"
    assert run([name, "--json", str(file)]) == 2
    said = f"--json {file} cannot be written (there is no folder {file.parent}): make it, or name another file"
    assert capsys.readouterr().err == f"minillm: {said}\n" and not file.parent.exists()


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory):
    """An interpreter without any package."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return folder / "bin" / "python"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_python_without_the_packages_is_one_sentence(bare_python, name):
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run([bare_python, "-m", "minillm", name], cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout
    assert re.fullmatch(rf"minillm: {bare_python} lacks the package \w+: .*\n", done.stderr)


def test_the_sentence_names_the_environment_that_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(main_module, "__file__", str(tmp_path / "minillm" / "__main__.py"))
    advice = main_module._environment(["doctor"])
    assert "`make lab`" in advice and "pip install -r requirements.txt" in advice
    own = tmp_path / ".venv" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.touch()
    assert f"{own} -m minillm doctor" in main_module._environment(["doctor"])
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    assert f"{own} -m pip install" in main_module._environment(["doctor"])


def test_another_missing_module_is_a_bug_and_passes_through(command, monkeypatch, capsys):
    def imports(name):
        def broken() -> None:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)

        return broken

    command(imports("my_own_module"))
    with pytest.raises(ModuleNotFoundError, match="my_own_module"):
        run(["probe"])
    command(imports("torch.distributed"))
    assert run(["probe"]) == 2 and "lacks the package torch" in capsys.readouterr().err
    monkeypatch.setenv("MINILLM_DEBUG", "1")
    with pytest.raises(ModuleNotFoundError):
        run(["probe"])


OPTIONAL = {  # used where they are installed
    "compressed_tensors",
    "docutils",
    "flashinfer",
    "gguf",
    "latex2mathml",
    "llama_cpp",
    "nanovllm",
    "peft",
    "sphinx",
    "torchao",
    "triton",
    "vllm",
}


def test_dependencies_are_what_is_imported_and_what_pyproject_declares():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = [*project["dependencies"], *extras["lab"], *extras["serve"]]
    files = [*ROOT.glob("minillm/**/*.py"), *ROOT.glob("course/**/*.py")]
    imported = set().union(*(imports(ast.parse(path.read_text(encoding="utf-8"))) for path in files))
    started = {"jupyterlab"}  # a program of its own
    assert imported - sys.stdlib_module_names - {"minillm", "course"} - OPTIONAL | started == main_module.DEPENDENCIES
    assert {re.match(r"[\w-]+", each)[0].replace("-", "_") for each in declared} <= main_module.DEPENDENCIES
    assert project["requires-python"].startswith(f">={'.'.join(map(str, main_module.OLDEST_PYTHON))},")


def imports(tree: ast.AST) -> set[str]:
    """First parts of the names of all modules that a file imports, relative imports left out."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def test_an_old_python_reads_the_file_and_says_so(monkeypatch, capsys):
    for module in (main_module, minillm):
        tree = ast.parse(Path(module.__file__).read_text(), feature_version=(3, 8))
    source = ast.parse(Path(main_module.__file__).read_text())
    assert any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in source.body) and tree
    monkeypatch.setattr(sys, "version_info", (3, 10, 4))
    monkeypatch.setattr(sys, "version", "3.10.4 (main)")
    assert run(["doctor"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"minillm: Python 3.10.4 ({sys.executable}) is too old: ") and said.count("\n") == 1


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
        ("import course.kit", {"torch", "matplotlib", "typer", "IPython"}),
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
