"""The machine card: what this machine can do, measured once and kept.

    card = machine()                       # some seconds the first time, then read from the cache
    card.peak_flops                        # fp32 matmul on all cores, FLOP/s   } the two lines of its roofline
    card.memory_bandwidth_bytes_per_s      # triad on all cores, bytes/s        }
    card.link(4).latency_s                 # alpha and beta of a ring round of 4 ranks on this machine

The cache is `minillm/machine.json` in the user's cache folder, one card for each host, torch version and core count.
"""

from __future__ import annotations

import dataclasses
import datetime
import html
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from minillm.files import cache_folder, write_whole
from minillm.measure import rates
from minillm.measure.rates import LinkFit

WORLD_SIZES = (2, 3, 4)
PROBE_TIMEOUT_S = 120


@dataclass(frozen=True)
class Gpu:
    """The first CUDA device; FLOP/s and bytes/s as measured."""

    name: str
    memory_bytes: int
    peak_flops_bf16: float
    peak_flops_fp32: float
    memory_bandwidth_bytes_per_s: float


@dataclass(frozen=True)
class Machine:
    """What one machine can do. Rates are FLOP/s and bytes/s; `peak_flops` is fp32 on all cores."""

    cpu: str
    cores: int
    memory_bytes: int
    python: str
    torch: str
    measured: str  # date and time, UTC
    load: float  # runnable processes per core just before measuring; the rates suffer when it is not small
    peak_flops: float
    peak_flops_one_thread: float
    peak_flops_bf16: float
    memory_bandwidth_bytes_per_s: float
    links: dict[int, LinkFit]
    gpu: Gpu | None = None

    def link(self, world_size: int) -> LinkFit:
        """The fitted link for `world_size` ranks, or for the nearest world size that was measured."""
        if not self.links:
            raise ValueError("no link was measured on this machine; `python -m minillm machine --refresh` tries again")
        return self.links[min(self.links, key=lambda measured: (abs(measured - world_size), measured))]

    def to_json(self) -> dict:
        """Plain dicts, lists, strings and numbers."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_json(cls, data: dict) -> Machine:
        """The inverse of `to_json`. Raises KeyError, TypeError, ValueError or AttributeError for anything else."""
        links = {
            int(n): LinkFit(**fit | {"samples": tuple(map(tuple, fit["samples"]))}) for n, fit in data["links"].items()
        }
        return cls(**data | {"links": links, "gpu": Gpu(**data["gpu"]) if data["gpu"] else None})

    def rows(self) -> list[tuple[str, str]]:
        """(what, value with unit) for people."""
        rows = [
            ("processor", f"{self.cpu}, {self.cores} cores, {_si(self.memory_bytes)}B memory"),
            ("software", f"Python {self.python}, torch {self.torch}"),
            ("matmul fp32", f"{_si(self.peak_flops)}FLOP/s, one thread {_si(self.peak_flops_one_thread)}FLOP/s"),
            ("matmul bf16", f"{_si(self.peak_flops_bf16)}FLOP/s"),
            ("memory", f"{_si(self.memory_bandwidth_bytes_per_s)}B/s"),
            ("ridge fp32", f"{self.peak_flops / self.memory_bandwidth_bytes_per_s:.1f} FLOP/byte"),
        ]
        for n, fit in sorted(self.links.items()):
            line = f"{_si(fit.latency_s)}s + bytes / {_si(fit.bandwidth_bytes_per_s)}B/s, within {fit.error:.0%}"
            rows.append((f"link, {n} ranks", line))
        if self.gpu:
            peaks = f"bf16 {_si(self.gpu.peak_flops_bf16)}FLOP/s, fp32 {_si(self.gpu.peak_flops_fp32)}FLOP/s"
            rows += [
                ("GPU", f"{self.gpu.name}, {_si(self.gpu.memory_bytes)}B"),
                ("GPU matmul", peaks),
                ("GPU memory", f"{_si(self.gpu.memory_bandwidth_bytes_per_s)}B/s"),
            ]
        when = f"{self.measured} UTC"
        if self.load > 0.5:
            when += f", while other work kept it busy (load {self.load:.1f} per core); measure again when it is quiet"
        return [*rows, ("measured", when)]

    def __str__(self) -> str:
        return "\n".join(f"{what:<14} {value}" for what, value in self.rows())

    def _repr_html_(self) -> str:
        left = 'style="text-align:left"'
        rows = ((html.escape(what), html.escape(value)) for what, value in self.rows())
        cells = "".join(f"<tr><th {left}>{what}</th><td {left}>{value}</td></tr>" for what, value in rows)
        return f"<table>{cells}</table>"


def machine(refresh: bool = False) -> Machine:
    """This machine's card, from the cache if it is there; `refresh` measures again (about 15 s when it is quiet).

    A cache that cannot be read is replaced. A cache that cannot be written, or ranks that cannot be started, cause a
    warning on standard error; without ranks the card has no links and is not kept.
    """
    cache = _Cache()
    card = None if refresh else cache.read()
    if card is None:
        card = _measure()
        if card.links:
            cache.write(card)
    return card


class _Cache:
    """Cards by host, torch version and cores, in one JSON file. One that cannot be kept there lasts as long as this
    process."""

    unkept: ClassVar[dict[tuple[Path, str], Machine]] = {}

    def __init__(self) -> None:
        self.path = cache_folder() / "machine.json"
        self.key = f"{platform.node()}, torch {_torch_version()}, {_cores()} cores"

    def read(self) -> Machine | None:
        try:
            return self.unkept.get((self.path, self.key)) or Machine.from_json(self._cards()[self.key])
        except (KeyError, TypeError, ValueError, AttributeError):  # absent, cut short, or of another version
            return None

    def write(self, card: Machine) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, json.dumps(self._cards() | {self.key: card.to_json()}, indent=1))
            self.unkept.pop((self.path, self.key), None)
        except OSError as error:
            reason, self.unkept[self.path, self.key] = error.strerror or error, card
            _warn(f"cannot keep the machine card in {self.path} ({reason}); set XDG_CACHE_HOME to a writable folder")

    def _cards(self) -> dict:
        try:
            cards = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        return cards if isinstance(cards, dict) else {}


def _measure() -> Machine:
    import psutil

    cores = _cores()
    load = psutil.getloadavg()[0] / cores
    one_thread = rates.matmul_flops("float32", 1)
    scratch = min(128 * 2**20, psutil.virtual_memory().available // 16)
    return Machine(
        cpu=cpu_name(),
        cores=cores,
        memory_bytes=psutil.virtual_memory().total,
        python=platform.python_version(),
        torch=_torch_version(),
        measured=f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M}",
        load=load,
        peak_flops=max(one_thread, rates.matmul_flops("float32", cores)),  # threads that wait can be slower than one
        peak_flops_one_thread=one_thread,
        peak_flops_bf16=rates.matmul_flops("bfloat16", cores, sizes=(512,)),
        memory_bandwidth_bytes_per_s=rates.memory_bandwidth(cores, scratch),
        links=_links(),
        gpu=_gpu(),
    )


def _links() -> dict[int, LinkFit]:
    """A link fit per world size; without links, and with a warning, if the ranks cannot be started."""
    try:
        samples = json.loads(_probe_output().strip().splitlines()[-1])
        return {int(n): rates.fit_link(int(n), rows) for n, rows in samples.items()}
    except (ValueError, IndexError, OSError, subprocess.TimeoutExpired) as error:
        _warn(f"the links between ranks could not be measured: {error}")
        return {}


def _probe_output() -> str:
    """What `minillm.comm.probe` prints; it has its own session and scratch folder, so nothing outlives it."""
    command = [sys.executable, "-m", "minillm.comm.probe", "--world-sizes", ",".join(map(str, WORLD_SIZES))]
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory(prefix="minillm-") as scratch:
        probe = subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": path, "TMPDIR": scratch},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, err = probe.communicate(timeout=PROBE_TIMEOUT_S)
        except BaseException:  # too slow, or interrupted
            os.killpg(probe.pid, signal.SIGKILL)
            probe.communicate()
            raise
    if probe.returncode:
        raise ValueError((err.strip().splitlines() or [f"exit status {probe.returncode}"])[-1])
    return out


def _gpu() -> Gpu | None:
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return Gpu(
        name=torch.cuda.get_device_name(),
        memory_bytes=total,
        peak_flops_bf16=rates.gpu_matmul_flops("bfloat16", 8192),
        peak_flops_fp32=rates.gpu_matmul_flops("float32", 4096),
        memory_bandwidth_bytes_per_s=rates.gpu_memory_bandwidth(min(2**30, free // 4)),
    )


def _torch_version() -> str:
    from importlib.metadata import version

    return version("torch")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    """The processor's name as the operating system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _si(value: float) -> str:
    """`value` with three digits and the prefix of its unit: 1.23e-5 -> "12.3 µ"."""
    value = float(f"{value:.3g}")  # first, or 999.9999 M would not become 1 G
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1), ("m", 1e-3)):
        if abs(value) >= size:
            return f"{value / size:.3g} {prefix}"
    return f"{value * 1e6:.3g} µ"


def _warn(text: str) -> None:
    print(f"minillm: {text}", file=sys.stderr)
