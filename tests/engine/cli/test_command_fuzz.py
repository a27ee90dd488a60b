"""Every option of every command with values that it cannot take: exit status 2 and one line, no traceback, no file.

Commands, options and their types are read from the application, so that a new one is attacked from its first day. What
a command does once it has accepted its input is cut off (`cut`). By default two values for each option, all of them
with MINILLM_PROOF=all.
"""

import contextlib
import io
import os
import random
import re
import resource
import shutil
import signal
import socket
import sys
import types
import typing
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import psutil
import pytest

from course.kit import course
from minillm import __main__ as main_module
from minillm.__main__ import COMMANDS, run
from minillm.bench import BENCHES
from minillm.cli.plot import PARTS
from minillm.comm.launch import launcher
from minillm.data import Tokenizer
from minillm.model import ModelConfig, Transformer, save_hf
from minillm.train.metrics import Metrics

WHOLE = os.environ.get("MINILLM_PROOF") == "all"
ROOM_BYTES = 2 << 30  # that a command may take: a number as large as it asks for must not take the machine
LIMIT_S = 120  # for a command that waits for ever

# What no option of a type takes, and what some do: those may be accepted, and must not end in a traceback.
NUMBERS = ["", " ", "x", "nan", "-nan", "inf", "-inf", "1,5", "²", "☃", "\udcff", "None", "1e999", "0x10"]
NEVER = {
    int: [*NUMBERS, "1.5", "1e3", str(10**30), str(-(10**30)), str(10**400), "9" * 5000],
    float: NUMBERS,
    bool: ["=", "=x", "=1", "=nan", "=☃", "=-1", "=true", "=0", "=None", "=folder"],
    str: ["☃ \u202enonsense", "\udcff", "nan;x", "no/such/thing", "x" * 300, "x" * 100_000, "-1", "%s{0}"],
    Path: ["file/below", "x" * 5000, "socket", f"/proc/{os.getpid()}/mem"],
}
SOME = {
    int: ["0", "-1", "1", "64", str(2**31), str(2**63), str(2**63 - 1), str(-(2**63)), "1_000", "+3"],
    float: ["0", "-0.0", "-1", "1", "1e308", "-1e308", "1e-320", "1e30", "1_0"],
    bool: [""],
    str: ["", " ", ",", "0", "1", "1,2", ",1", "0,0", str(10**30), "nan", "inf", "folder", "file", "fifo", "bytes"],
    Path: [
        "",
        " ",
        "missing/deep/er",
        "folder",
        "file",
        "fifo",
        "bytes",
        "locked",
        "/dev/full",
        "/dev/null",
        "/proc/nope",
        "☃",
        "\udcff",
    ],
}
NOT_NEGATIVE = ("-1", "-1e308", str(-(2**63)))  # which only a seed may be
FREE = {  # options that take any text, any folder, or any number
    ("generate", "prompt"), ("generate", "system"), ("train", "run"), ("generate", "seed"), ("interview", "seed"),
    ("serve", "name"), ("serve", "api_key"), ("route", "api_key"),
    ("autoscale", "admin_key"), ("autoscale", "api_key"), ("load", "api_key"), ("load", "model"),
}  # fmt: skip


class Accepted(BaseException):
    """The command took its input; what it would do now was cut off."""


def accept(*_, **__):
    raise Accepted


@dataclass(frozen=True)
class Parameter:
    """An option or argument of a command, as the application declares it."""

    command: str
    name: str
    type: type
    flag: str  # "" for an argument

    def given(self, value: str) -> list[str]:
        if not self.flag:
            return ["--", value]
        return [f"{self.flag}{value}" if self.type is bool else f"{self.flag}={value}"]

    def is_named_by(self, line: str, value: str) -> bool:
        said = line.replace("-", "_").lower()
        names = {self.name, self.flag.lstrip("-").replace("-", "_"), self.name.rstrip("s"), self.name.split("_")[0]}
        shown = value.encode("utf-8", "backslashreplace").decode()
        return any(name and name in said for name in names) or (bool(shown.strip()) and shown in line)


def parameters(command: str) -> list[Parameter]:
    hints = typing.get_type_hints(import_module(COMMANDS[command][0]).command)
    found = []
    for each in main_module.parser_of(command).params:
        if each.name in hints:
            flags = [flag for flag in (*each.opts, *each.secondary_opts) if flag.startswith("--")]
            found.append(Parameter(command, each.name, plain(hints[each.name]), flags[0] if flags else ""))
    return found


def plain(hint) -> type:
    """int of `int | None`, str of `list[str] | None`."""
    inner = [each for each in typing.get_args(hint) if each is not type(None)]
    return hint if hint in NEVER else plain(inner[0])


EVERY = [each for command in COMMANDS for each in parameters(command)]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder to run in, with things that are not what a command asks for, and one small model and run that are."""
    folder = tmp_path_factory.mktemp("f")
    folder.joinpath("folder").mkdir()
    folder.joinpath("runs").mkdir()
    folder.joinpath("file").write_text("a text\n" * 200)
    folder.joinpath("bytes").write_bytes(bytes(range(256)))
    folder.joinpath("locked").write_text("")
    folder.joinpath("locked").chmod(0)
    os.mkfifo(folder / "fifo")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.path.relpath(folder / "socket"))
    with Metrics(folder / "runs" / "small", tensorboard=False) as metrics:
        parts = dict.fromkeys((f"{part}_s" for part in PARTS), 0.1)
        for step in range(3):
            metrics.log({"step": step, "loss": 1.0, "seconds": 0.6, **parts})
    tokenizer = Tokenizer.load()
    save_hf(Transformer(ModelConfig(tokenizer.vocab_size, 32, 64, 1, 2, max_seq_len=64)), folder / "model")
    tokenizer.save(folder / "model")
    return folder


@pytest.fixture
def cut(place, monkeypatch):
    """Past its validation every command ends at once."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("MINILLM_PROGRESS", str(place / "home" / "progress.json"))
    monkeypatch.setattr(launcher.Run, "__init__", accept)
    monkeypatch.setattr(course, "load", lambda *_: types.SimpleNamespace(CLAIMS=(), FIGURES={}))
    monkeypatch.setattr("builtins.input", lambda _: "q")
    for module, names in {
        "minillm.cli.doctor": {"CHECKS": (), "course_checks": tuple},
        "course.commands.lab": {"serve": accept},
        "minillm.cli.machine": {"machine": lambda **_: types.SimpleNamespace(to_json=dict)},
        "course.commands.notebooks": {"build": accept, "stale": lambda *_: []},
        "minillm.cli.oracle": {"compare": accept},
        "minillm.cli.train": {"_run": accept},
        "minillm.cli.train_heads": {"train": accept},
        "minillm.cli.quantize": {"save_quantized": accept},
        "minillm.api.run": {"serve": accept},
        "minillm.api.autoscale.controller.Controller": {"run": accept},
        "minillm.cli.load": {"_load": accept},
    }.items():
        for name, instead in names.items():
            monkeypatch.setattr(f"{module}.{name}", instead)
    monkeypatch.setattr("minillm.serve.run.optimise.compile_blocks", accept)
    monkeypatch.setattr("minillm.equivalence.scaling.this_machine", accept)  # after it has refused what cannot be
    for module, _ in BENCHES.values():
        for name in ("compare", "contestants", "side_by_side", "load_hf", "tokenize"):
            if hasattr(import_module(module), name):
                monkeypatch.setattr(f"{module}.{name}", accept)
    return place


CHEAP = {  # what makes each command whole and quick; several ways for one that holds several
    "bench": [[name] for name in BENCHES],
    "generate": [["--model=model", "--max-new-tokens=2"], ["--model=model", "--max-new-tokens=2", "--speculate=ngram"]],
    "plan": [["--gpus=8", "--batch=8"], ["--gpus=8", "--serve", "--per-node=4"]],
    "plot": [["small"]],
    "quantize": [
        ["--model=model", "--data=file", "--seq-len=16", "--method=gptq", "--bits=8", "--windows=1", "--out=new"]
    ],
    "train": [
        ["--data=file", "--seq-len=16", "--batch-size=8"],
        ["--data=file", "--seq-len=16", "--pp=2", "--cp=2"],
        ["--data=file", "--seq-len=16", "--model-size=tiny", "--lora=2"],
    ],
    "serve": [["--model=model", "--port=0", "--speculate=none"]],
    "route": [["--port=0", "--replicas=http://127.0.0.1:9"], ["--port=0", "--spawn=2"]],
    "autoscale": [["http://127.0.0.1:9"]],
    "load": [["http://127.0.0.1:9", "--requests=3"]],
    "train-heads": [["--kind=medusa", "--model=model", "--data=file", "--seq-len=16"]],
}


def attack(argv: list[str], place: Path) -> tuple[int | None, str]:
    """(exit status, what was said on standard error); None: the input was accepted. A traceback is an error here."""
    before = seen(place)
    said = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace")
    out = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace")
    old = signal.signal(signal.SIGALRM, waits_for_ever)
    signal.alarm(LIMIT_S)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + ROOM_BYTES, limits[1]))
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(out):
            status = run(argv)
    except Accepted:
        status = None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
    new = seen(place) - before
    for path in sorted(new):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    said.flush()
    assert status != 2 or not new, f"{sorted(new)} left behind"
    return status, said.buffer.getvalue().decode()


def seen(place: Path) -> set[Path]:
    return {path for path in place.rglob("*") if "home" not in path.parts}


class WaitsForEver(BaseException):
    pass


def waits_for_ever(*_):
    raise WaitsForEver


def judge(each: Parameter, base: list[str], value: str, place: Path) -> None:
    if not each.flag:
        base = [part for part in base if part.startswith("--")]
    status, said = attack([each.command, *base, *each.given(value)], place)
    refused = value in NEVER[each.type] or (each.type in (int, float) and value in NOT_NEGATIVE)
    assert status in (None, 0, 1, 2), status
    if refused and (each.command, each.name) not in FREE:
        assert status == 2, "was accepted"
    if status == 2:
        assert said.count("\n") == 1 and said.startswith("minillm: "), said
        assert not refused or each.is_named_by(said, value), said


def values_of(each: Parameter) -> list[str]:
    every = NEVER[each.type] + SOME[each.type]
    draw = random.Random(f"{each.command} {each.name}")
    return every if WHOLE else [draw.choice(NEVER[each.type]), draw.choice(SOME[each.type])]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_of_the_help_page_is_attacked(command, capsys, monkeypatch):
    """However it is declared, none is left out unseen."""
    monkeypatch.setenv("COLUMNS", "200")
    assert run([command, "--help"]) == 0
    shown = re.findall(r"^\W+(--[a-z][a-z0-9-]*)", capsys.readouterr().out, re.MULTILINE)
    assert {*shown} - {"--help"} == {each.flag for each in parameters(command) if each.flag}


@pytest.mark.drawn(6)
@pytest.mark.parametrize("command", COMMANDS)
def test_no_value_of_any_option_is_a_traceback(command, cut):
    tried, wrong = 0, {}
    for each in parameters(command):
        for base in CHEAP.get(command, [[]])[: None if WHOLE else 1]:
            for value in values_of(each):
                tried += 1
                try:
                    judge(each, base, value, cut)
                except BaseException as failure:
                    if isinstance(failure, KeyboardInterrupt):
                        raise
                    wrong[(*base, *each.given(value))] = f"{type(failure).__name__}: {str(failure)[:300]}"
    print(f"{command}: {tried} tried, {len(wrong)} wrong", file=sys.stderr)
    assert not wrong, "\n".join(f"{' '.join(argv)[:200]!r}\n      {what}" for argv, what in wrong.items())


@pytest.mark.drawn(3)
@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_said_twice_without_a_value_too_much_or_unknown(command, cut):
    """Of an option given twice the last one counts, as with every other program."""
    base = CHEAP.get(command, [[]])[0]
    for argv in ([*base, "--frobnicate"], [*base, "--☃"], [*base, *["one too many"] * 9], [*base, "--json"]):
        status, said = attack([command, *argv], cut)
        assert (status, said.count("\n")) == (2, 1), (argv, status, said)
    for each in parameters(command):
        bad = NEVER[each.type][1]
        if not each.flag or (command, each.name) in FREE:
            continue
        status, said = attack([command, *base, *each.given(bad), *each.given(bad)], cut)
        assert (status, said.count("\n")) == (2, 1) and each.is_named_by(said, bad), (each, status, said)
        if each.type is not bool:
            status, said = attack([command, *base, each.flag], cut)
            assert (status, said.count("\n")) == (2, 1) and each.flag in said, (each, status, said)
