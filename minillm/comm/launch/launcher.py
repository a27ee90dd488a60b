"""launch: run a function as N ranks, from a notebook cell, a script or under torchrun.

    def hello(group):
        return group.all_reduce(torch.ones(1)).item()

    launch(hello, nproc=4)        # [4.0, 4.0, 4.0, 4.0]

Ranks are processes forked from a server that has loaded torch and what this process has of minillm, so they start in a
fraction of a second; they meet in a store that listens on loopback. The function is pickled by value, so it may come
from a notebook cell. While the ranks run, this process prints what they print, watches the flight recorder for ranks
that wait too long, and ends all of them when one fails.
"""

import atexit
import contextlib
import linecache
import math
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import cloudpickle
import torch.distributed as dist

from minillm.comm.diagnostics.flight_recorder import FINISHED, STARTING, FlightRecorder
from minillm.comm.diagnostics.hang_report import hang_report
from minillm.comm.emulation import Link, Topology
from minillm.comm.errors import HangError
from minillm.comm.launch import worker
from minillm.comm.launch.forkserver import interrupts_held, start_context, start_server, without_main
from minillm.comm.launch.outcome import cause, has_report, is_stopped, place_of, report_of
from minillm.comm.launch.payload import to_bytes
from minillm.comm.launch.torchrun import in_place

MAX_RANKS = 64  # processes that are started here; torchrun may start more
MAX_TIMEOUT_S = 1e7
START_S = 180.0  # ranks may take this long to start, however short the timeout: they import what the caller imports
POLL_S = 0.02
LOOK_S = 1.0  # between two looks at whether ranks are stopped
GRACE_S = 0.4  # after the first failure, time for the others to say how they ended


def launch(
    fn: Callable[..., Any],
    nproc: int,
    *args: Any,
    timeout: float = 60.0,
    link: Link | Topology | None = None,
    device: str | None = "cpu",
) -> list[Any]:
    """Run `fn(group, *args)` as `nproc` ranks; group is the Group of all of them. Returns their results by rank.

    timeout: seconds a rank may wait in one operation (or all ranks may be silent) before it counts as a hang.
    link: paces messages as an emulated network would. device: "cpu", also where there are GPUs; "cuda" (ranks may share
    GPUs); or None for a GPU per rank if there are enough, else the CPU: `fn` is then to make its tensors on
    `group.device` (see device.py). Under torchrun (RANK is set) fn runs in place, in torchrun's world.

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
            (folder / "job").write_bytes(to_bytes(job))
        except Exception as error:
            name = getattr(fn, "__name__", repr(fn))
            raise ValueError(f"cannot send {name} and its arguments to the ranks: {error}") from error
        return Run(folder, job).results()


class Run:
    """One launch: starts the ranks' processes and watches them."""

    def __init__(self, folder: Path, job: worker.Job) -> None:
        self.folder, self.job, self.nproc = folder, job, job.nproc
        self.recorder = FlightRecorder(folder / "recorder", range(job.nproc))
        self.store = _store()
        context = start_context()
        arguments = [(str(folder), rank, job.nproc, self.store.port, dict(os.environ)) for rank in range(job.nproc)]
        self.ranks = [context.Process(target=worker.main, args=args, name=f"rank{args[1]}") for args in arguments]
        self.read = [0] * job.nproc  # bytes of each rank's output shown so far
        self.last_output = self.looked = time.monotonic()
        self.awake: dict[int, float] = {}  # rank -> when it was last seen not to be stopped
        self.failed: dict[int, int] = {}  # rank -> exit code of those that ended badly, in order

    def results(self) -> list[Any]:
        atexit.register(self._end_ranks)  # before multiprocessing's own, which would wait for them
        with interrupts_held() as let_through:
            try:
                with without_main():
                    start_server()
                    for rank in self.ranks:
                        rank.start()
                        let_through()
                hang = self._watch(let_through)
            finally:  # also when this cell is interrupted
                self._end_ranks()
                self._forget_ranks()
                self._show_output(last=True)
                self.recorder.close()
                self.store = None  # an error's traceback may keep this object for long, but not the open port
        if hang:
            raise hang
        reports = [report_of(self.folder, rank) for rank in range(self.nproc)]
        if all(report and report.result is not None for report in reports):
            return [cloudpickle.loads(report.result) for report in reports]
        raise cause(self.folder, reports, self.failed)

    def _watch(self, let_through: Callable[[], None]) -> HangError | None:
        """Show output until all ranks have ended. After a failure the others get a moment to write their reports."""
        running, give_up_at = dict(enumerate(self.ranks)), None
        while running and (give_up_at is None or time.monotonic() < give_up_at):
            wait_for_any([process.sentinel for process in running.values()], timeout=POLL_S)
            let_through()
            self._show_output()
            for rank in [rank for rank, process in running.items() if process.exitcode is not None]:
                code = running.pop(rank).exitcode
                if code or not has_report(self.folder, rank):
                    self.failed[rank] = code
                    give_up_at = give_up_at or time.monotonic() + GRACE_S
            if not self.failed and running and (waited := self._stuck(running)):
                return self._hang(waited)
        return None

    def _stuck(self, running: Iterable[int]) -> float | None:
        """How many seconds a rank has waited in one operation or been stopped, or all have been silent; None while that
        is within the timeout."""
        now, signs, waits, limit = time.monotonic(), [self.last_output], [], self.job.timeout_s
        for rank in range(self.nproc):
            state = self.recorder.state(rank)[1]
            sign, wait = self.recorder.signs(rank)
            signs.append(sign)
            if state == STARTING:  # also where there is no process yet: pid 0, all zeros
                limit = max(limit, START_S)
            elif wait is not None and state != FINISHED:
                waits.append(wait)
        if not self.awake or now - self.looked > min(LOOK_S, self.job.timeout_s / 4):
            self.looked = now
            self.awake |= {rank: now for rank in running if not is_stopped(self.ranks[rank].pid)}
        waits += [self.awake.get(rank, now) for rank in running]
        longest = max(now - min(waits), now - max(signs))
        return longest if longest > limit else None

    def _hang(self, waited: float) -> HangError:
        seen = self.recorder.copy()  # before the signal, which ends some waits
        for process in self.ranks:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)  # write your stack
        time.sleep(0.1)
        places = {rank: place_of(self.folder, rank) for rank in range(self.nproc)}
        stopped = [rank for rank, process in enumerate(self.ranks) if is_stopped(process.pid)]
        table = hang_report(seen, places, stopped)
        limit = f"{self.job.timeout_s:g} s"
        return HangError(f"no progress for {waited:.1f} s (timeout {limit}). Who waits for whom:\n\n{table}\n", table)

    def _end_ranks(self) -> None:
        for process in self._started():
            process.kill()

    def _forget_ranks(self) -> None:
        for process in self._started():
            process.join()
            process.close()
        atexit.unregister(self._end_ranks)

    def _started(self) -> list[BaseProcess]:
        return [process for process in self.ranks if process.pid is not None]

    def _show_output(self, last: bool = False) -> None:
        """Print the whole lines that ranks have written since the last call, each with its rank."""
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
    """A private folder for one launch: flight recorder, output, reports."""
    path = Path(tempfile.mkdtemp(prefix="minillm-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _store() -> dist.TCPStore:
    """The store in which ranks meet. torch's own would listen on every interface; this one listens on loopback."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _cell_sources() -> dict[str, tuple]:
    """The sources that exist in memory only, such as notebook cells."""
    return {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and not os.path.exists(name)}
