"""launch: run a function as N ranks, from a notebook cell, a script or under torchrun.

    def hello(group):
        return group.all_reduce(torch.ones(1)).item()

    launch(hello, nproc=4)        # [4.0, 4.0, 4.0, 4.0]

Ranks are processes started by torch's elastic agent, which is what torchrun uses; `fork server` makes that cheap. The
function travels by value, so it may come from a notebook cell. While the ranks run, this process prints what they
print, watches the notice board for ranks that wait too long, and takes everything down when one fails.
"""

import contextlib
import functools
import linecache
import logging
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from minillm.comm import worker
from minillm.comm.board import FINISHED, RAISED, Board
from minillm.comm.errors import HangError, RankError
from minillm.comm.links import Link, Topology
from minillm.comm.table import waiting_table
from minillm.comm.torchrun import in_place

MAX_RANKS = 64
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
    _check(fn, nproc, timeout, link, device)
    threads = max(1, (os.cpu_count() or 1) // nproc)
    job = worker.Job(fn, args, nproc, timeout, link, device, threads, _cell_sources())
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return in_place(job)
    with _folder() as folder, _quiet_torch(), _without_main():
        try:
            (folder / "job").write_bytes(cloudpickle.dumps(job))
        except Exception as error:
            raise ValueError(f"cannot send {fn.__name__} and its arguments to the ranks: {error}") from error
        return Run(folder, job).results()


class Run:
    """One launch: the agent in a thread, and this thread watching over the ranks."""

    def __init__(self, folder: Path, job: worker.Job) -> None:
        self.folder, self.job, self.nproc = folder, job, job.nproc
        self.board = Board(folder / "board", job.nproc)
        self.read = [0] * job.nproc  # bytes of each rank's output shown so far
        self.last_output = time.monotonic()
        self.failures: dict[int, int] = {}  # rank -> exit code, as the agent reports it
        self.gone: list[int] = []  # ranks that died without a report, in order
        self.agent_error: BaseException | None = None

    def results(self) -> list[Any]:
        agent = threading.Thread(target=self._run_agent, name="minillm-agent", daemon=True)
        agent.start()
        hang = None
        try:
            hang = self._watch(agent)
        finally:  # also when this cell is interrupted
            self._kill(agent)
            self._show_output(last=True)
            self.board.close()
        if hang:
            raise hang
        reports = [self._report(rank) for rank in range(self.nproc)]
        if all(report and report.result is not None for report in reports):
            return [cloudpickle.loads(report.result) for report in reports]
        raise self._cause(reports)

    def _run_agent(self) -> None:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=self.nproc,
            run_id=self.folder.name,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=POLL_S,
            start_method=_start_method(),
            shutdown_timeout=5,
            logs_specs=DefaultLogsSpecs(log_dir=str(self.folder / "agent")),
        )
        try:
            elastic_launch(config, worker.main)(str(self.folder))
        except ChildFailedError as error:
            self.failures = {rank: failure.exitcode for rank, failure in error.failures.items()}
        except BaseException as error:
            self.agent_error = error

    def _watch(self, agent: threading.Thread) -> HangError | None:
        """Show output until the agent is done; end the run on the first failure or a hang."""
        failed_at = None
        while agent.is_alive():
            self._show_output()
            states = [self.board.state(rank) for rank in range(self.nproc)]
            for rank, (pid, _, _) in enumerate(states):
                if pid and rank not in self.gone and not _alive(pid):
                    if self.board.state(rank)[1] in (FINISHED, RAISED):  # read last: it says so before it goes
                        continue
                    self.gone.append(rank)
            failed_at = failed_at or (time.monotonic() if self.gone or any(s == RAISED for _, s, _ in states) else None)
            if failed_at and time.monotonic() > failed_at + GRACE_S:
                self._kill(agent)
            if not failed_at and (waited := self._stuck(states)):
                return self._hang(waited)
            agent.join(POLL_S)
        return None

    def _stuck(self, states: list[tuple[int, int, float]]) -> float | None:
        """Seconds that a rank has waited in one operation, or all have been silent, if that is too long."""
        now, signs, waits = time.monotonic(), [self.last_output], []
        for rank, (pid, state, since) in enumerate(states):
            sign, wait = self.board.signs(rank)
            signs.append(sign)
            if pid and state == FINISHED:
                waits.append(since)
            elif pid and wait is not None:
                waits.append(wait)
        longest = max(now - min(waits, default=now), now - max(signs))
        return longest if longest > self.job.timeout_s else None

    def _hang(self, waited: float) -> HangError:
        for rank in range(self.nproc):
            _signal(self.board.state(rank)[0], signal.SIGUSR1)
        time.sleep(0.1)
        table = waiting_table(self.board, {rank: self._place(rank) for rank in range(self.nproc)})
        return HangError(
            f"no progress for {waited:.1f} s (timeout {self.job.timeout_s:g} s). Who waits for whom:\n\n{table}\n",
            table,
        )

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

    def _kill(self, agent: threading.Thread) -> None:
        """Take down every rank that still runs, and wait for the agent to notice."""
        deadline = time.monotonic() + 10
        while agent.is_alive() and time.monotonic() < deadline:
            for rank in range(self.nproc):
                _signal(self.board.state(rank)[0], signal.SIGKILL)
            agent.join(POLL_S)

    def _report(self, rank: int) -> worker.Report | None:
        path = self.folder / f"report{rank}"
        return cloudpickle.loads(path.read_bytes()) if path.exists() else None

    def _cause(self, reports: list[worker.Report | None]) -> BaseException:
        """The first failure that is not an echo of another one."""
        raised = sorted((r.at, rank) for rank, r in enumerate(reports) if r and r.result is None and not r.echo)
        if raised and not self.gone:
            rank = raised[0][1]
            report = reports[rank]
            error = RankError(f"rank {rank} of {self.nproc} raised {report.error}\n\n{report.text}\n", rank)
            error.__cause__ = _original(report)
            return error
        if self.gone:
            rank, code = self.gone[0], self.failures.get(self.gone[0])
            return RankError(f"rank {rank} of {self.nproc} {_death(code)} before it finished", rank, code)
        echoes = [(r.at, rank) for rank, r in enumerate(reports) if r and r.echo]
        if echoes:
            rank = min(echoes)[1]
            return RankError(
                f"rank {rank} of {self.nproc} raised {reports[rank].error}\n\n{reports[rank].text}\n", rank
            )
        return RankError(f"the ranks could not be started: {self.agent_error or 'no reason given'}", -1)

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


def _check(fn: Any, nproc: int, timeout: float, link: Any, device: str | None) -> None:
    if not callable(fn):
        raise ValueError(f"fn={fn!r} is not a function: pass the function itself, launch(fn, nproc=4)")
    if isinstance(nproc, bool) or not isinstance(nproc, int) or not 1 <= nproc <= MAX_RANKS:
        raise ValueError(f"nproc={nproc} must be a whole number from 1 to {MAX_RANKS}")
    if not timeout > 0:
        raise ValueError(f"timeout={timeout} must be a positive number of seconds")
    if link is not None and not isinstance(link, (Link, Topology)):
        raise ValueError(f"link={link!r} must be a Link or a Topology")
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"device={device!r} must be 'cpu', 'cuda' or None")


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A private folder for this run: board, output, reports. Memory-backed where there is room."""
    path = Path(tempfile.mkdtemp(prefix="minillm-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@functools.cache
def _start_method() -> str:
    """A fork server that has loaded torch once, but not minillm, so that edits are seen."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    multiprocessing.set_forkserver_preload(["torch", "torch.distributed", "numpy", "cloudpickle", "psutil"])
    return "forkserver"


@contextlib.contextmanager
def _quiet_torch() -> Iterator[None]:
    """Keep the agent's own log lines ("Closing process ... via signal SIGTERM") out of the reader's sight."""
    loggers = [logging.getLogger(name) for name in ("torch.distributed.elastic", "torch.multiprocessing")]
    before = [logger.propagate for logger in loggers]
    handler = logging.NullHandler()
    for logger in loggers:
        logger.propagate = False
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, before, strict=True):
            logger.propagate = propagate
            logger.removeHandler(handler)
        os.environ.pop("TORCHELASTIC_SIGNALS_TO_HANDLE", None)


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Ranks get their function by value, so they need not run the caller's script again."""
    main = sys.modules["__main__"]
    kept = {name: main.__dict__.pop(name) for name in ("__file__", "__spec__") if name in main.__dict__}
    main.__spec__ = None
    try:
        yield
    finally:
        main.__dict__.pop("__spec__", None)
        main.__dict__.update(kept)


def _cell_sources() -> dict[str, tuple]:
    """Sources that exist in memory only, as notebook cells do."""
    return {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and not os.path.exists(name)}


def _original(report: worker.Report) -> BaseException | None:
    try:
        return cloudpickle.loads(report.exception) if report.exception else None
    except Exception:
        return None


def _death(code: int | None) -> str:
    if code is None:
        return "died"
    if code < 0:
        hint = " (out of memory, perhaps)" if -code == signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{hint}"
    return f"ended its process with exit code {code}"


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def _signal(pid: int, number: int) -> None:
    if pid and _alive(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
