"""Where a number comes from: hardware, versions, date and command. Every JSON file of results starts with it."""

import datetime
import json
import os
import platform
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch
import typer

from minillm.files import check_writable, opened, refusing
from minillm.measure.machine import cpu_name

PACKAGES = ("minillm", "torch", "numpy")


def provenance(command: str | None = None) -> dict[str, Any]:
    """Hardware, cores, memory in bytes, operating system, versions, date (UTC) and command.

    command: what to type to get the numbers again; by default how this process was started.
    """
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "hardware": ", ".join([cpu_name(), *gpus]),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "os": f"{platform.system()} {platform.release().split('-')[0]}",  # without what the host's builder adds
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command or _this_command(),
    }


def summary(origin: dict[str, Any]) -> str:
    """One line for the top of a table."""
    torch_version, date = origin["versions"]["torch"], origin["date"][:10]
    return f"{origin['hardware']}, {origin['cores']} cores, torch {torch_version}, {date}: {origin['command']}"


def write_json(path: Path | None, results: Any) -> None:
    """Write the results of a command to the file of its --json option, if one was given."""
    if path is not None:
        with refusing("--json", path), opened(path, "w") as file:
            file.write(json.dumps(results, indent=1) + "\n")


def writable(param: typer.CallbackParam, path: Path | None) -> Path | None:
    """`path`, if a file can be written there: checked before the work whose results it is for. Leaves no file."""
    if path is not None:
        check_writable(param.opts[0], path)
    return path


JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", callback=writable, help="Also write the results as JSON.")
]


def _version(package: str) -> str | None:
    if package == "torch":
        return torch.__version__  # says which build: 2.13.0+cpu
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _this_command() -> str:
    interpreter, *rest = sys.orig_argv or [sys.executable]
    return shlex.join([Path(interpreter).name, *rest])
