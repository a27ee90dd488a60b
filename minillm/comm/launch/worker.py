"""The rank's side of `launch`: join the group, run the function as one rank, report how it ended."""

import contextlib
import ctypes
import datetime
import faulthandler
import itertools
import linecache
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a process group: its default arguments would hold on to one

from minillm.comm.diagnostics.flight_recorder import FINISHED, RAISED, RUNNING, STARTING, FlightRecorder, describe
from minillm.comm.emulation import Egress, Link, Topology
from minillm.comm.errors import HangError, PeerLostError
from minillm.comm.group import Group
from minillm.comm.launch.device import agree, candidate
from minillm.comm.launch.forkserver import socket_folder
from minillm.comm.launch.meeting import meeting_place
from minillm.comm.launch.payload import to_bytes
from minillm.comm.world import World, joined_world
from minillm.files import write_whole
from minillm.measure.wire import loopback

WORLD_NAME = "world"
LOOK_S = 1.0  # between two looks at whether the launch goes on
STORE_S = 10.0  # for how long a store that should be there may not answer
POLL_S = 0.1


@dataclass(frozen=True)
class Job:
    """What `launch` sends to its ranks. sources: the text of notebook cells, for the lines in tracebacks."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    nproc: int
    timeout_s: float
    link: Link | Topology | None
    device: str | None
    threads: int
    sources: dict[str, tuple]


@dataclass(frozen=True)
class Report:
    """How a rank ended: its pickled result or its error. echo: the error only says that another rank has gone."""

    result: bytes | None = None
    error: str = ""
    text: str = ""
    exception: bytes | None = None
    echo: bool = False
    at: float = 0.0


def main(folder: str, rank: int, nproc: int, port: int, environ: dict[str, str]) -> None:
    """Entry point of one rank started by `launch`. Never raises: the report file says how it ended.

    environ: the launcher's environment now; this process has that of the time when the fork server started.
    """
    os.environ.clear()
    os.environ.update(environ)
    _settle(Path(folder), rank)
    recorder = FlightRecorder(Path(folder, "recorder"), range(nproc))
    recorder.set_state(rank, STARTING)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc, "MINILLM_RANK": rank}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME=loopback())
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store that ranks meet in is the launcher's
    try:
        job: Job = cloudpickle.loads(Path(folder, "job").read_bytes())
        linecache.cache.update(job.sources)
        with world_group(job, recorder, rank, wait_s=2 * job.timeout_s + 30) as group:
            recorder.set_state(rank, RUNNING)
            result = job.function(group, *job.args)
            report = Report(result=_packed(result, rank))
            recorder.set_state(rank, FINISHED)
            leave_together(group)
    except BaseException as error:
        recorder.set_state(rank, RAISED)
        report = failure(error)
    write_whole(Path(folder, f"report{rank}"), cloudpickle.dumps(report))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError):  # the function may have closed it
            stream.flush()
    ctypes.CDLL(None).fflush(None)
    os._exit(0 if report.result is not None else 1)  # threads the function left behind shall not keep the rank


def leave_together(group: Group) -> None:
    """Wait for all ranks, however long they work, so that none closes a connection that another still needs.
    PeerLostError if one of them ends before it is done."""
    options = dist.BarrierOptions()
    options.timeout = datetime.timedelta(days=365)
    if group.world_size > 1:
        try:
            group.process_group.barrier(options).wait(options.timeout)
        except RuntimeError as error:
            raise PeerLostError(f"rank {group.rank} was done, and another rank ended before it was") from error


def _packed(result: Any, rank: int) -> bytes:
    try:
        return to_bytes(result)
    except Exception as error:
        raise ValueError(f"the result of rank {rank} cannot be sent back: {error}") from error


@contextlib.contextmanager
def world_group(job: Job, recorder: FlightRecorder | None, rank: int, wait_s: float) -> Iterator[Group]:
    """Join the process group of all ranks and leave it in the end. recorder: None if the ranks make one together."""
    candidate(job.device)
    torch.set_num_threads(job.threads)
    if recorder:
        recorder.post(rank, 0, 1, describe("join the group", [0], "", list(range(job.nproc)), WORLD_NAME))
    timeout = datetime.timedelta(seconds=wait_s)
    reach_store(rank, wait_s)
    store, world_size = dist.PrefixStore(f"world{next(_worlds)}", meeting_place()), int(os.environ["WORLD_SIZE"])
    store.set_timeout(timeout)
    device, backend = agree(store, rank, world_size, job.device, job.link is not None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    options = {"device_id": device} if backend == "nccl" else {}
    dist.init_process_group(backend, store=store, timeout=timeout, rank=rank, world_size=world_size, **options)
    egress = Egress(job.link) if job.link else None
    if recorder:
        recorder.clear(rank, 0)
        world = World(rank, device, recorder, range(job.nproc), wait_s, egress)
    else:
        world = joined_world(dist.group.WORLD, device, wait_s, egress)
    yield Group(world, dist.group.WORLD, range(dist.get_world_size()), WORLD_NAME)
    dist.destroy_process_group()  # not after an error: the others must not see us go before our report is written
    world.close()


_worlds = itertools.count()  # a script under torchrun may launch again: the next world needs names of its own


def reach_store(rank: int, wait_s: float) -> None:
    """PeerLostError if the store cannot be reached: torch would try for minutes and print every attempt.

    The store belongs to the process that started the ranks, or to rank 0, which may start later."""
    is_there = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if rank == 0 and not is_there:
        return  # it makes it
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    limit_s = min(wait_s, STORE_S) if is_there else wait_s
    give_up_at = time.monotonic() + limit_s
    while True:
        try:
            socket.create_connection((host, int(port)), max(0.1, give_up_at - time.monotonic())).close()
            return
        except (OSError, ValueError) as error:
            if time.monotonic() + POLL_S > give_up_at or isinstance(error, ValueError):
                raise PeerLostError(
                    f"rank {rank} could not reach the store of all ranks at {host}:{port} for {limit_s:g} s ({error}): "
                    "its process has gone, or MASTER_ADDR and MASTER_PORT name another place"
                ) from None
        time.sleep(POLL_S)


def failure(error: BaseException) -> Report:
    """The error as its rank saw it, its traceback beginning at the caller's own function."""
    frames = list(traceback.extract_tb(error.__traceback__))
    kept = traceback.TracebackException.from_exception(error)
    kept.stack = traceback.StackSummary.from_list(_relevant(frames, error))
    try:
        exception = to_bytes(error)
    except Exception:
        exception = None
    text = "".join(kept.format()).rstrip()
    return Report(None, f"{type(error).__name__}: {_said(error)}", text, exception, is_echo(error), time.monotonic())


def is_echo(error: BaseException | None) -> bool:
    """Whether the error, or the one it was raised from, only says that another rank has gone."""
    if error is None:
        return False
    lost = isinstance(error, (PeerLostError, dist.DistNetworkError, ConnectionError)) or _is_torchs(error)
    return lost or is_echo(error.__cause__ or error.__context__)


def _is_torchs(error: BaseException) -> bool:
    """Whether torch.distributed itself raised it: called directly, it has no type of its own for a lost peer."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = bool(frames) and frames[-1].filename.startswith(os.path.dirname(dist.__file__))
    return isinstance(error, RuntimeError) and inside


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its __str__ fails)"


def _relevant(frames: list[traceback.FrameSummary], error: BaseException) -> list[traceback.FrameSummary]:
    """The frames from the caller's own function on; of an error that `comm` itself raised, only the caller's frames."""
    here = os.path.dirname(os.path.dirname(__file__))  # minillm/comm
    ours = [i for i, frame in enumerate(frames) if frame.filename == __file__]
    frames = frames[ours[-1] + 1 :] if ours and ours[-1] + 1 < len(frames) else frames
    if isinstance(error, (ValueError, HangError, PeerLostError)) and frames[-1].filename.startswith(here):
        hidden = (here, os.path.dirname(torch.__file__), os.path.dirname(threading.__file__))
        frames = [frame for frame in frames if not frame.filename.startswith(hidden)] or frames
    return frames


def _settle(folder: Path, rank: int) -> None:
    """Output goes into this rank's file, SIGUSR1 dumps the stack, Ctrl-C is ignored, a rank ends with its launcher."""
    output = os.open(folder / f"output{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    with contextlib.suppress(
        ValueError, AttributeError
    ):  # C's own stdout by lines as well: a crash would lose the rest
        libc = ctypes.CDLL(None)
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, 1, 0)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")
    stack = open(folder / f"stack{rank}", "w")  # noqa: SIM115 (open as long as the process lives)
    faulthandler.register(signal.SIGUSR1, stack, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_die_with_launcher, args=[folder], daemon=True).start()


def _die_with_launcher(folder: Path) -> None:
    """The fork server outlives a killed launcher as long as it has children, so each rank has to notice itself; so does
    a rank whose launch ended before the rank had started: its folder has gone."""
    launcher, server = multiprocessing.parent_process(), os.getppid()
    while launcher.is_alive() and folder.exists():
        launcher.join(LOOK_S)
    if not launcher.is_alive() and (sockets := socket_folder()):
        shutil.rmtree(sockets, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    if server not in (launcher.pid, 1):
        end_stopped_children(server)
    os.kill(os.getpid(), signal.SIGKILL)


def end_stopped_children(server: int) -> None:
    """Ends the other ranks that this server has forked and that are stopped (SIGSTOP, a debugger): those cannot notice
    that their launcher has gone, and would keep the server."""
    with contextlib.suppress(psutil.Error):
        for other in psutil.Process(server).children() if os.getppid() == server else ():
            with contextlib.suppress(psutil.Error):
                if other.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                    other.kill()
