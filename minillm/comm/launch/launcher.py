"""launch: run a function as N ranks, from a notebook cell, a script or under torchrun.

    def hello(group):
        return group.all_reduce(torch.ones(1)).item()

    launch(hello, nproc=4)        # [4.0, 4.0, 4.0, 4.0]

Ranks are processes forked from a server that has torch loaded, so they start in a fraction of a second; they meet in a
store that listens on loopback. The function travels by value, so it may come from a notebook cell. While the ranks run,
this process prints what they print, watches the flight recorder for ranks that wait too long, and takes all of them
down when one fails.
"""

import contextlib
import linecache
import math
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path
from typing import Any

import cloudpickle
import torch.distributed as dist

from minillm.comm.diagnostics.flight_recorder import FINISHED, STARTING, FlightRecorder
from minillm.comm.diagnostics.hang_report import hang_report
from minillm.comm.emulation import Link, Topology
from minillm.comm.errors import HangError, RankError
from minillm.comm.launch import worker
from minillm.comm.launch.forkserver import start_context, start_server
from minillm.comm.launch.torchrun import in_place

MAX_RANKS = 64  # processes that are started here; torchrun may start more
MAX_TIMEOUT_S = 1e7
START_S = 60.0  # ranks may take this long to start, however short the timeout: they import what the caller imports
POLL_S = 0.02
GRACE_S = 0.4  # after the first failure, time for the others to say how they ended


def launch(
    fn: Callable[..., Any],
    nproc: int,
    *args: Any,
    timeout: float = 60.0,
    link: Link | Topology | None = None,
    device: str | None = None,
) -> list[Any]:
    """Run `fn(group, *args)` as `nproc` ranks; group is the Group of all of them. Returns their results by rank.

    timeout: seconds a rank may wait in one operation (or all ranks may be silent) before it counts as a hang.
    link: paces messages as an emulated network would. device: "cpu", "cuda" (ranks may share GPUs), or None for a
    GPU per rank if there are enough, else the CPU. Under torchrun (RANK is set) fn runs in place, in torchrun's world.

    RankError: a rank raised or died. HangError: ranks waited too long; its text says who waits for whom. ValueError:
    bad arguments. Whatever happens, no process is left.
    """
    under_torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    _check(fn, nproc, timeout, link, device, most_ranks=math.inf if under_torchrun else MAX_RANKS)
    threads = max(1, (os.cpu_count() or 1) // nproc)
    job = worker.Job(fn, args, nproc, timeout, link, device, threads, _cell_sources())
    if under_torchrun:
        return in_place(job)
    with _folder() as folder:
        try:
            (folder / "job").write_bytes(cloudpickle.dumps(job))
        except Exception as error:
            name = getattr(fn, "__name__", repr(fn))
            raise ValueError(f"cannot send {name} and its arguments to the ranks: {error}") from error
        return Run(folder, job).results()


class Run:
    """One launch: the ranks' processes, and this one watching over them."""

    def __init__(self, folder: Path, job: worker.Job) -> None:
        self.folder, self.job, self.nproc = folder, job, job.nproc
        self.recorder = FlightRecorder(folder / "recorder", range(job.nproc))
        self.store = _store()
        context = start_context()
        arguments = [(str(folder), rank, job.nproc, self.store.port, dict(os.environ)) for rank in range(job.nproc)]
        self.ranks = [context.Process(target=worker.main, args=args, name=f"rank{args[1]}") for args in arguments]
        self.read = [0] * job.nproc  # bytes of each rank's output shown so far
        self.last_output = time.monotonic()
        self.failed: dict[int, int] = {}  # rank -> exit code of those that ended badly, in order

    def results(self) -> list[Any]:
        try:
            with _uninterrupted(), _without_main():
                start_server()
                for rank in self.ranks:
                    rank.start()
            hang = self._watch()
        finally:  # also when this cell is interrupted
            with _uninterrupted():
                self._kill()
                self._show_output(last=True)
                self.recorder.close()
                self.store = None  # an error's traceback may keep this object for long, but not the open port
        if hang:
            raise hang
        reports = [self._report(rank) for rank in range(self.nproc)]
        if all(report and report.result is not None for report in reports):
            return [cloudpickle.loads(report.result) for report in reports]
        raise self._cause(reports)

    def _watch(self) -> HangError | None:
        """Show output until all ranks have ended. After a failure the others get a moment to say how they ended."""
        running, give_up_at = dict(enumerate(self.ranks)), None
        while running and (give_up_at is None or time.monotonic() < give_up_at):
            wait_for_any([process.sentinel for process in running.values()], timeout=POLL_S)
            self._show_output()
            for rank in [rank for rank, process in running.items() if process.exitcode is not None]:
                code = running.pop(rank).exitcode
                if code or not self._report_path(rank).exists():
                    self.failed[rank] = code
                    give_up_at = give_up_at or time.monotonic() + GRACE_S
            if not self.failed and running and (waited := self._stuck()):
                return self._hang(waited)
        return None

    def _stuck(self) -> float | None:
        """Seconds that a rank has waited in one operation, or all have been silent, if that is too long."""
        now, signs, waits, limit = time.monotonic(), [self.last_output], [], self.job.timeout_s
        for rank in range(self.nproc):
            state = self.recorder.state(rank)[1]
            sign, wait = self.recorder.signs(rank)
            signs.append(sign)
            if state == STARTING:  # also where there is no process yet: pid 0, all zeros
                limit = max(limit, START_S)
            elif wait is not None and state != FINISHED:
                waits.append(wait)
        longest = max(now - min(waits, default=now), now - max(signs))
        return longest if longest > limit else None

    def _hang(self, waited: float) -> HangError:
        for process in self.ranks:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)  # write your stack
        time.sleep(0.1)
        table = hang_report(self.recorder, {rank: self._place(rank) for rank in range(self.nproc)})
        limit = f"{self.job.timeout_s:g} s"
        return HangError(f"no progress for {waited:.1f} s (timeout {limit}). Who waits for whom:\n\n{table}\n", table)

    def _place(self, rank: int) -> str:
        """The innermost line of the caller's own code that the rank is in, from its stack dump."""
        path = self.folder / f"stack{rank}"
        dump = path.read_text() if path.exists() else ""
        main_thread = dump.split("Current thread")[-1] if "Current thread" in dump else dump
        ours = (os.path.dirname(os.path.dirname(worker.__file__)), "site-packages", os.path.dirname(os.__file__))
        for name, line, function in re.findall(r'File "(.+?)", line (\d+) in (\S+)', main_thread):
            if not any(part in name for part in ours) and not name.startswith("<frozen"):
                code = linecache.getline(name, int(line)).strip()
                return f"{function}, line {line}" + (f": {code}" if code else "")
        return ""

    def _kill(self) -> None:
        """Leave no rank behind."""
        started = [process for process in self.ranks if process.pid is not None]
        for process in started:
            process.kill()
        for process in started:
            process.join()
            process.close()

    def _report_path(self, rank: int) -> Path:
        return self.folder / f"report{rank}"

    def _report(self, rank: int) -> worker.Report | None:
        path = self._report_path(rank)
        return cloudpickle.loads(path.read_bytes()) if path.exists() else None

    def _cause(self, reports: list[worker.Report | None]) -> BaseException:
        """The first failure that is not an echo of another one."""
        raised = sorted((r.echo, r.at, rank) for rank, r in enumerate(reports) if r and r.result is None)
        silent = [rank for rank in self.failed if reports[rank] is None]
        if silent and (not raised or raised[0][0]):
            rank, code = silent[0], self.failed[silent[0]]
            text = f"rank {rank} of {self.nproc} {_death(code)} before it finished{self._last_words(rank)}"
            return RankError(text, rank, code)
        rank = raised[0][2]
        text = f"rank {rank} of {self.nproc} raised {reports[rank].error}\n\n{_name_cells(reports[rank].text)}\n"
        error = RankError(text, rank)
        error.__cause__ = _original(reports[rank])
        return error

    def _last_words(self, rank: int) -> str:
        """What C++ said before it ended the process, if it did."""
        path = self.folder / f"output{rank}"
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        words = [line.strip().removeprefix("what():").strip() for line in lines if "what():" in line]
        return f": {words[-1]}" if words else ""

    def _show_output(self, last: bool = False) -> None:
        """Print what ranks have written since, in whole lines, each with its rank."""
        for rank in range(self.nproc):
            path = self.folder / f"output{rank}"
            if not path.exists():
                continue
            with open(path, "rb") as file:
                file.seek(self.read[rank])
                new = file.read()
            end = len(new) if last else new.rfind(b"\n") + 1
            if end:
                self.read[rank] += end
                self.last_output = time.monotonic()
                lines = new[:end].decode(errors="replace").splitlines()
                sys.stdout.write("".join(f"[rank {rank}] {line}\n" for line in lines))
                sys.stdout.flush()


def _check(fn: Any, nproc: int, timeout: float, link: Any, device: str | None, most_ranks: float) -> None:
    if not callable(fn):
        raise ValueError(f"fn={fn!r} is not a function: pass the function itself, launch(fn, nproc=4)")
    if isinstance(nproc, bool) or not isinstance(nproc, int) or not 1 <= nproc <= most_ranks:
        raise ValueError(f"nproc={nproc} must be a whole number from 1 to {most_ranks}")
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout <= MAX_TIMEOUT_S:
        raise ValueError(f"timeout={timeout!r} must be a number of seconds, more than 0 and at most {MAX_TIMEOUT_S:g}")
    if link is not None and not isinstance(link, (Link, Topology)):
        raise ValueError(f"link={link!r} must be a Link or a Topology")
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"device={device!r} must be 'cpu', 'cuda' or None")


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A private folder for this run: flight recorder, output, reports."""
    path = Path(tempfile.mkdtemp(prefix="minillm-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _store() -> dist.TCPStore:
    """Where ranks meet. torch would listen on every interface; this listens on loopback only."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


_main_lock = threading.Lock()


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Ranks get their function by value, so they need not run the caller's script again."""
    main = sys.modules["__main__"]
    with _main_lock:
        kept = {name: main.__dict__.pop(name) for name in ("__file__", "__spec__") if name in main.__dict__}
        main.__spec__ = None
        try:
            yield
        finally:
            main.__dict__.pop("__spec__", None)
            main.__dict__.update(kept)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until the block is done: half a start or half a clean-up would leave ranks behind."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    missed = []
    signal.signal(signal.SIGINT, lambda *_: missed.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if missed:
            signal.raise_signal(signal.SIGINT)


def _cell_sources() -> dict[str, tuple]:
    """Sources that exist in memory only, as notebook cells do."""
    return {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and not os.path.exists(name)}


def _name_cells(traceback: str) -> str:
    """Notebook cells by their number, as in `Cell In[5]`, instead of IPython's temporary file names."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    cells = getattr(getattr(shell, "compile", None), "_filename_map", {})
    for name, number in cells.items():
        traceback = traceback.replace(f'File "{name}"', f'File "Cell In[{number}]"')
    return traceback


def _original(report: worker.Report) -> BaseException | None:
    try:
        return cloudpickle.loads(report.exception) if report.exception else None
    except Exception:
        return None


def _death(code: int) -> str:
    if code < 0:
        hint = " (out of memory, perhaps)" if -code == signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{hint}"
    return f"ended its process with exit code {code}"
