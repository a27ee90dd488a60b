"""`python -m minillm COMMAND`: one line per command below; a command's module is imported when it is asked for.

A command's module has a function `command` with typer's annotations that returns an exit status (or None). Bad input
raises ValueError anywhere below and ends here as one line on standard error with exit status 2; MINILLM_DEBUG=1 shows
the traceback instead.
"""

import difflib
import functools
import math
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

COMMANDS = {
    "train": ("minillm.cli.train", "train a model on Python's source, or on your text"),
    "train-heads": ("minillm.cli.train_heads", "train Medusa, EAGLE or early-exit heads on a model"),
    "generate": ("minillm.cli.generate", "write on from a prompt, or from a file of prompts"),
    "plot": ("minillm.cli.plot", "draw a run's loss and step times"),
    "tour": ("minillm.cli.tour", "run every mechanism once: predicted beside measured"),
    "plan": ("minillm.cli.plan", "layouts that train or serve a model on a cluster, ranked"),
    "scaling": ("minillm.cli.scaling", "weak and strong scaling: measured on ranks, extended by arithmetic"),
    "oracle": ("minillm.cli.oracle", "any layout against one process, every gradient compared"),
    "doctor": ("minillm.cli.doctor", "can this machine run the course, and what to repair"),
    "bench": ("minillm.bench", "side by side with a peer"),
    "machine": ("minillm.cli.machine", "measure this machine: matmul, memory, links"),
    "lab": ("minillm.cli.lab", "open a lab in JupyterLab"),
    "notebooks": ("minillm.cli.notebooks", "build the labs and execute their solutions"),
    "figures": ("minillm.cli.figures", "measure and draw the committed figures"),
    "interview": ("minillm.cli.interview", "a mock interview that asks, times and checks"),
    "progress": ("minillm.cli.progress", "show or reset your progress"),
}


LARGEST = 1 << 63  # what torch takes for a seed


def main(argv: list[str] | None = None) -> None:
    """Run one command and exit with its status."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None where it was closed
        stream.reconfigure(errors="backslashreplace")  # a terminal without a letter we print shall not end the command
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: list[str]) -> int:
    """Exit status of `argv`: 0 fine, 1 a verdict failed, 2 bad input."""
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


def _is_about(path: str | None, argv: list[str]) -> bool:
    """Whether an error's path is one that was given, or lies in one."""
    given = (Path(part.partition("=")[2] or part).name for part in argv)
    return isinstance(path, str) and bool(set(Path(path).parts) & set(given))


def parser_of(name: str) -> Any:
    """The command `name` as typer parses it; its `params` are the options and arguments."""
    import typer

    app = typer.Typer(add_completion=False)
    app.command()(_with_usable_numbers(import_module(COMMANDS[name][0]).command))
    return typer.main.get_command(app)


def _call(name: str, arguments: list[str]) -> int:
    return parser_of(name)(arguments, prog_name=f"minillm {name}", standalone_mode=False) or 0


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


def _refuse(error: ValueError | str) -> int:
    if os.environ.get("MINILLM_DEBUG") == "1" and isinstance(error, ValueError):
        raise error
    print(f"minillm: {' '.join(str(error).split())}", file=sys.stderr)
    return 2


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {about}" for name, (_, about) in COMMANDS.items()]
    return "\n".join(["usage: python -m minillm COMMAND [--help]", "", *lines])


if __name__ == "__main__":
    main()
