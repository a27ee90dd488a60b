"""`python -m minillm COMMAND`: one line per command below; a command's module is imported when it is asked for.

A command's module has a function `command` with typer's annotations that returns an exit status (or None). Bad input
raises ValueError anywhere below and ends here as one line on standard error with exit status 2; MINILLM_DEBUG=1 shows
the traceback instead. This file stays readable to older Pythons, so that it can say that they are too old.
"""

from __future__ import annotations

import difflib
import functools
import math
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

GROUPS = {  # in the order in which a newcomer meets them: name -> (module, what it does)
    "Start": {
        "lab": ("course.commands.lab", "open a lab in JupyterLab"),
        "doctor": ("minillm.cli.doctor", "can this machine run the course, and what to repair"),
        "progress": ("course.commands.progress", "show or reset your progress"),
        "tour": ("course.commands.tour", "run every mechanism once: predicted beside measured"),
    },
    "Learn and measure": {
        "machine": ("minillm.cli.machine", "measure this machine: matmul, memory, links"),
        "oracle": ("minillm.cli.oracle", "any layout against one process, every gradient compared"),
        "plan": ("minillm.cli.plan", "layouts that train or serve a model on a cluster, ranked"),
        "scaling": ("minillm.cli.scaling", "weak and strong scaling: measured on ranks, extended by arithmetic"),
        "bench": ("minillm.bench", "side by side with a peer"),
        "interview": ("course.commands.interview", "a mock interview that asks, times and checks"),
        "museum": ("course.commands.museum", "real bugs to find: symptoms, measurements, a culprit, a repair"),
    },
    "Use": {
        "train": ("minillm.cli.train", "train a model on Python's source, or on your text"),
        "plot": ("minillm.cli.plot", "draw a run's loss and step times"),
        "train-heads": ("minillm.cli.train_heads", "train Medusa, EAGLE or early-exit heads on a model"),
        "quantize": ("minillm.cli.quantize", "weights in 8 or 4 bits, written for others to load, and what it cost"),
        "generate": ("minillm.cli.generate", "write on from a prompt, or from a file of prompts"),
        "serve": ("minillm.cli.serve", "answer OpenAI's clients over HTTP"),
    },
    "Maintain": {
        "notebooks": ("course.commands.notebooks", "build the labs and execute their solutions"),
        "figures": ("course.commands.figures", "measure and draw the committed figures"),
    },
}
COMMANDS = {name: entry for group in GROUPS.values() for name, entry in group.items()}

OLDEST_PYTHON = (3, 11)
DEPENDENCIES = {  # what requirements.txt installs and minillm and the course use, by the names that are imported
    "IPython", "PIL", "accelerate", "cloudpickle", "cycler", "fastapi", "fsrs", "ipykernel", "ipywidgets", "isal",
    "jinja2", "jupyter_client", "jupyterlab", "jupytext", "matplotlib", "nbclient", "nbformat", "numpy", "packaging",
    "prometheus_client", "psutil", "pydantic", "safetensors", "starlette", "tokenizers", "torch", "tqdm",
    "transformers", "typer", "uvicorn",
}  # fmt: skip

LARGEST = 1 << 63  # what torch takes for a seed


def main(argv: list[str] | None = None) -> None:
    """Run one command and exit with its status."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None where it was closed
        stream.reconfigure(errors="backslashreplace")  # a terminal without a letter we print shall not end the command
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: list[str]) -> int:
    """Exit status of `argv`: 0 fine, 1 a verdict failed, 2 bad input."""
    if sys.version_info < OLDEST_PYTHON:
        return _refuse(f"Python {sys.version.split()[0]} ({sys.executable}) is too old: {_environment(argv)}")
    if not argv or argv[0] in ("--help", "-h", "help"):
        print(_overview())
        return 0
    if argv[0] == "--version":
        print(import_module("minillm").__version__)
        return 0
    try:
        if argv[0] not in COMMANDS:
            close = difflib.get_close_matches(argv[0], COMMANDS, n=1)
            raise ValueError(f"no command '{argv[0]}'; " + (f"did you mean '{close[0]}'?" if close else "see --help"))
        return _call(argv[0], argv[1:])
    except KeyboardInterrupt:
        return 130
    except ValueError as error:
        return _refuse(error)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in DEPENDENCIES or _wants_traceback():
            raise
        return _refuse(f"{sys.executable} lacks the package {missing}: {_environment(argv)}")
    except OSError as error:
        if not _is_about(error.filename, argv):
            raise
        return _refuse(f"{error.filename}: {error.strerror}; name another file or folder")
    except Exception as error:
        if hasattr(error, "format_message"):  # typer's own: an unknown option, a missing or malformed argument
            return _refuse(error.format_message())
        if hasattr(error, "rank") and isinstance(error.__cause__, ValueError):  # a rank found the bad input
            return _refuse(error.__cause__)
        raise


def _environment(argv: list[str]) -> str:
    """How to get a Python with all that the course needs: the clone's own, or one that is still to be made."""
    clone = Path(__file__).resolve().parents[1]
    own, command = clone / ".venv" / "bin" / "python", " ".join(["-m minillm", *argv[:1]])
    if Path(sys.prefix).resolve() == (clone / ".venv").resolve():
        return f"repair the environment with {own} -m pip install -r {clone / 'requirements.txt'}"
    if own.is_file():
        return f"use the environment of the course, {own} {command}"
    return (
        f"`make lab` in {clone} makes an environment that has all, and so does `pip install -r requirements.txt` with "
        "Python 3.11 or 3.12"
    )


def _is_about(path: str | None, argv: list[str]) -> bool:
    """Whether an error's path is one that was given, or lies in one."""
    given = (Path(part.partition("=")[2] or part).name for part in argv)
    return isinstance(path, str) and bool(set(Path(path).parts) & set(given))


def parser_of(name: str) -> Any:
    """The command `name` as typer parses it; its `params` are the options and arguments."""
    import typer

    from minillm.cli.examples import examples_of

    app = typer.Typer(add_completion=False)
    command = _with_usable_numbers(_module(COMMANDS[name][0]).command)
    app.command(epilog="\n\n".join(["Examples:", *examples_of(name)]))(command)
    return typer.main.get_command(app)


def _module(name: str) -> Any:
    """A command's module. The course's are found where the course is."""
    if not name.startswith("course."):
        return import_module(name)
    from minillm.clone import course_module

    return course_module(name.removeprefix("course."))


def _call(name: str, arguments: list[str]) -> int:
    return parser_of(name)(arguments, prog_name=f"python -m minillm {name}", standalone_mode=False) or 0


def _with_usable_numbers(command: Callable[..., int | None]) -> Callable[..., int | None]:
    """The command, and ValueError for nan, inf and whole numbers of more than 64 bits, which no option means."""

    @functools.wraps(command)  # typer reads the signature of the command itself
    def checked(**options: Any) -> int | None:
        for name, value in options.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"--{name.replace('_', '-')} {value} is not a finite number: give one")
            if isinstance(value, int) and not -LARGEST <= value < LARGEST:
                raise ValueError(f"--{name.replace('_', '-')} {value} must be below 2**63 and at least -(2**63)")
        return command(**options)

    return checked


def _wants_traceback() -> bool:
    return os.environ.get("MINILLM_DEBUG") == "1"


def _refuse(error: ValueError | str) -> int:
    if isinstance(error, ValueError) and _wants_traceback():
        raise error
    print(f"minillm: {' '.join(str(error).split())}", file=sys.stderr)
    return 2


def _overview() -> str:
    width, lines = max(map(len, COMMANDS)), ["usage: python -m minillm COMMAND [--help]"]
    for title, commands in GROUPS.items():
        lines += ["", f"{title}:", *(f"  {name:<{width}}  {about}" for name, (_, about) in commands.items())]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
