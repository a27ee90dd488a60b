"""`python -m minillm doctor`: can this machine run the course? One line per question, and how to repair what is off.

    ok    python          3.11.7
    off   widgets         ipywidgets is not installed
          repair: python -m pip install "ipywidgets>=8.1,<9"
    info  gpu             none: everything runs on the CPU with gloo

A check is a function that returns a `Line`; what it looks at is its argument, so that a test can show it a broken
machine. Nothing but the standard library and typer is imported before the check that asks for it.
"""

import os
import platform
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from minillm.files import check_writable

PYTHON, TORCH = ">=3.11,<3.13", ">=2.11,<2.14"  # as in pyproject.toml
MEMORY_BYTES = 2 << 30  # a notebook and four ranks
SHARED_BYTES = 32 << 20  # what data loaders and NCCL pass tensors through
DISK_BYTES = 256 << 20  # boards, outputs and checkpoints of a lab
PIP = "python -m pip install"


@dataclass(frozen=True)
class Line:
    """The answer of one check. repair: what to do, for a line that is off."""

    name: str
    verdict: Literal["ok", "off", "info"]
    found: str
    repair: str = ""

    def __str__(self) -> str:
        repair = f"\n      repair: {self.repair}" if self.repair else ""
        return f"{self.verdict:<4}  {self.name:<14}  {self.found}{repair}"


def command(
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the results as JSON.")
    ] = None,
) -> int:
    """Check this machine, line by line. Exit status 1 if a line is off."""
    if json_file:
        check_writable("--json", json_file)
    lines = []
    for line in examine([*CHECKS, *course_checks()]):
        print(line, flush=True)
        lines.append(line)
    off = [line.name for line in lines if line.verdict == "off"]
    print(f"\nTo repair: {', '.join(off)}" if off else "\nEverything that is needed is here.")
    if json_file:
        from minillm.measure.provenance import provenance, write_json  # imports torch, which may be what is missing

        write_json(json_file, {"provenance": provenance(), "rows": [asdict(line) for line in lines]})
    return 1 if off else 0


def examine(checks: Iterable[Callable[[], Line]]) -> Iterator[Line]:
    """Run the checks one after the other; one that breaks is a line that is off, and the others still run."""
    for check in checks:
        try:
            yield check()
        except Exception as error:
            name = check.__name__.replace("_", " ")
            yield Line(name, "off", f"{type(error).__name__}: {error}", f"{PIP} --force-reinstall -r requirements.txt")


def python(version: str = platform.python_version()) -> Line:
    if _within(version, PYTHON):
        return Line("python", "ok", version)
    return Line("python", "off", f"{version}, the course needs {PYTHON}", "make clean lab PYTHON=/path/to/python3.12")


def torch(version: Callable[[str], str] = metadata.version) -> Line:
    found = version_of("torch", version)
    if found and _within(found, TORCH):
        return Line("torch", "ok", found)
    return Line("torch", "off", _needs("torch", found, TORCH), f'{PIP} "torch{TORCH}"')


def gpu(cuda: Any = None, nccl: Callable[[], bool] | None = None) -> Line:
    """Information only: every lab runs without a GPU."""
    import torch
    import torch.distributed as dist

    cuda, nccl = cuda or torch.cuda, nccl or dist.is_nccl_available
    if not cuda.is_available() or not cuda.device_count():
        built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is built without CUDA"
        return Line("gpu", "info", f"none ({built}): ranks run on the CPU with gloo")
    names = ", ".join(cuda.get_device_name(i) for i in range(cuda.device_count()))
    return Line("gpu", "info", f"{names}; {'NCCL is available' if nccl() else 'NCCL is missing: ranks use gloo'}")


def packed_kernels(found: Callable[[], dict[str, str]] | None = None) -> Line:
    """Information only: without them quantized weights are smaller, but not faster."""
    from minillm.quantize.kernels import available

    if names := (found or available)():
        by = ", ".join(f"{what} by {kernel}" for what, kernel in names.items())
        return Line("quantized", "info", f"{by}, others dequantized first")
    return Line("quantized", "info", "no packed kernels here: weights are dequantized first, and decode slower")


def decode_kernel(missing: Callable[[], str] | None = None) -> Line:
    """Information only: without it the keys of a step are copied together first."""
    if missing is None:
        from minillm.model.paged.cpp import missing
    if why := missing():
        return Line("decode kernel", "info", f"{why} Serving on the CPU copies keys together, and decodes slower")
    return Line("decode kernel", "info", "compiled for this CPU: serving reads keys where they lie")


def gloo(all_reduce: Callable[[], list[float]] | None = None) -> Line:
    """Start two ranks and let them add up."""
    from minillm.comm import HangError, RankError

    start = time.monotonic()
    try:
        sums = (all_reduce or _all_reduce_on_two_ranks)()
    except (RankError, HangError, ValueError, OSError) as error:
        return Line("gloo", "off", first_line(error), "allow processes to connect to 127.0.0.1, then try again")
    if sums != [3.0, 3.0]:
        return Line("gloo", "off", f"two ranks added 1 + 2 and got {sums}", f'{PIP} --force-reinstall "torch{TORCH}"')
    return Line("gloo", "ok", f"all-reduce on 2 ranks, {time.monotonic() - start:.1f} s with their start")


def memory(available: Callable[[], int] | None = None) -> Line:
    import psutil

    free = (available or (lambda: psutil.virtual_memory().available))()
    if free >= MEMORY_BYTES:
        return Line("memory", "ok", f"{_gib(free)} free")
    repair = "close other programs or notebook kernels, or give the container more memory"
    return Line("memory", "off", f"{_gib(free)} free, a notebook with four ranks takes {_gib(MEMORY_BYTES)}", repair)


def cores(count: int | None = None) -> Line:
    """Information only: fewer cores make ranks slower, not wrong."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = count or usable
    if count > 1:
        return Line("cores", "ok", f"{count}")
    return Line("cores", "info", "1: ranks take turns on it, so timings of overlap show nothing")


def shared_memory(folder: Path = Path("/dev/shm"), free: Callable[[Path], int] | None = None) -> Line:
    if not folder.is_dir():
        return Line("shared memory", "info", f"no {folder} on this system")
    size = (free or _free_bytes)(folder)
    if size >= SHARED_BYTES:
        return Line("shared memory", "ok", f"{_gib(size)} free in {folder}")
    repair = f"start the container with --shm-size=1g, or delete what fills {folder}"
    return Line("shared memory", "off", f"only {_mib(size)} free in {folder}, {_mib(SHARED_BYTES)} needed", repair)


def temporary(folder: Callable[[], str] = tempfile.gettempdir, free: Callable[[Path], int] | None = None) -> Line:
    repair = "export TMPDIR=/path/to/a/folder with room that you can write to"
    try:
        path = Path(folder())
        size = (free or _free_bytes)(path)
    except OSError as error:
        return Line("temp folder", "off", first_line(error), repair)
    if size >= DISK_BYTES:
        return Line("temp folder", "ok", f"{_gib(size)} free in {path}")
    return Line("temp folder", "off", f"only {_mib(size)} free in {path}, {_mib(DISK_BYTES)} needed", repair)


def loopback(bind: Callable[[], int] | None = None) -> Line:
    """Ranks and the notebook server listen on 127.0.0.1."""
    try:
        return Line("loopback", "ok", f"127.0.0.1, port {(bind or _bind_any_port)()} could be taken")
    except OSError as error:
        repair = "allow listening on 127.0.0.1: `ip link set lo up`, or loosen the sandbox or firewall"
        return Line("loopback", "off", f"no port on 127.0.0.1 can be opened ({first_line(error)})", repair)


def cache_folder(environment: dict[str, str] | None = None) -> Line:
    """Where the machine card and the tokens are kept."""
    home = (os.environ if environment is None else environment).get("XDG_CACHE_HOME") or "~/.cache"
    return writable("cache folder", Path(home).expanduser() / "minillm", "XDG_CACHE_HOME")


def peers(version: Callable[[str], str] = metadata.version, which: Callable[[str], str | None] = shutil.which) -> Line:
    """Information only: what some comparisons and the browser test use if it is there."""
    found = [(name, version_of(name, version)) for name in ("transformers", "accelerate")]
    browser = next((name for name in ("chromium", "chromium-browser", "google-chrome") if which(name)), None)
    there = [f"{name} {version}" for name, version in found if version] + ([browser] if browser else [])
    missing = [name for name, version in found if not version] + ([] if browser else ["chromium"])
    without = [f"without {', '.join(missing)}"] if missing else []
    return Line("optional", "info", "; ".join([", ".join(there) or "nothing", *without]))


CHECKS = (
    python, torch, gpu, packed_kernels, decode_kernel, gloo, memory, cores, shared_memory, temporary, loopback,
    cache_folder, peers,
)  # fmt: skip


def course_checks() -> tuple[Callable[[], Line], ...]:
    """What the course asks besides, or where to get it."""
    from minillm.clone import ABSENT, course_module, find_clone

    try:
        find_clone()
    except ValueError:
        return (lambda: Line("course", "info", ABSENT),)
    return course_module("commands.doctor").CHECKS


def _within(version: str, wanted: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(wanted).contains(version.partition("+")[0], prereleases=True)


def version_of(package: str, version: Callable[[str], str]) -> str | None:
    try:
        return version(package)
    except metadata.PackageNotFoundError:
        return None


def _needs(package: str, found: str | None, wanted: str) -> str:
    return f"{package} {found} is installed, the course needs {wanted}" if found else f"{package} is not installed"


def _all_reduce_on_two_ranks() -> list[float]:
    import torch

    from minillm.comm import launch

    return launch(lambda group: group.all_reduce(torch.tensor([group.rank + 1.0])).item(), 2, timeout=30, device="cpu")


def _bind_any_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        return listener.getsockname()[1]


def writable(name: str, folder: Path, variable: str) -> Line:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return Line(name, "ok", f"{folder} can be written")
    except OSError as error:
        repair = f"export {variable}=/path/to/a/folder that you can write to"
        return Line(name, "off", f"{folder} cannot be written ({error.strerror})", repair)


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"
