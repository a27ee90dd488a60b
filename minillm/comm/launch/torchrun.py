"""`launch` under torchrun: this process is a rank already, in a world that torchrun made.

A rank that loses others names them in one sentence. Its traceback, which only shows where it was waiting, is not
printed: the reason is in the output of the ranks that ended. Whatever torch prints about a store that has gone comes
after that sentence.
"""

import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import psutil
import torch.distributed as dist

from minillm.comm.errors import HangError, PeerLostError
from minillm.comm.group import Group
from minillm.comm.launch import worker
from minillm.comm.launch.meeting import meeting_place

SETTLE_S = 0.2  # until the end of a machine, and of the store if that was there, is complete
LAST_WORDS_S = 0.8  # for other ranks that have lost somebody, too, to say so


def in_place(job: worker.Job) -> list[Any]:
    """Run the job's function as this rank; returns the results of all. PeerLostError names the ranks that were lost."""
    if "MINILLM_RANK" in os.environ or dist.is_initialized():
        raise ValueError("launch was called inside a rank: call it once, outside, and use group.subgroup inside")
    rank, local_world = int(os.environ["RANK"]), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    world = int(os.environ["WORLD_SIZE"])
    job = worker.Job(**{**vars(job), "nproc": world, "threads": max(1, (os.cpu_count() or 1) // local_world)})
    sys.excepthook = _say_it_in_one_sentence
    group = None
    try:
        with worker.world_group(job, None, rank, wait_s=job.timeout_s) as group:
            return group.gather_objects(job.function(group, *job.args))
    except Exception as error:
        if group is None or isinstance(error, HangError) or not worker.is_echo(error):
            raise  # a hang is a report of its own, whatever error it was found by
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of torchrun, which ends all ranks of its machine now
        with _held_back() as said:
            lost = ", ".join(map(str, _silent(group))) or "that have since answered"
        lost_error = PeerLostError(f"rank {rank} of {world} lost ranks {lost}: they ended or their machine did")
        lost_error.__notes__ = said
        raise lost_error from None


def is_root() -> bool:
    """True in the process that should print: outside torchrun, or torchrun's rank 0."""
    return os.environ.get("RANK", "0") == "0"


def _silent(group: Group) -> list[int]:
    """The ranks that do not report in the store, as this one does now, that they have lost others. Ranks of another
    machine that still compute are among them; without a store, no rank of another machine is."""
    others = {rank for rank in group.ranks if rank != group.world.rank}
    try:
        for pause_s in (SETTLE_S, LAST_WORDS_S):
            time.sleep(pause_s)
            worker.reach_store(group.world.rank, worker.POLL_S)  # torch would print a page about one that has gone
            store = meeting_place()
            store.set(_word(group.world.rank), "")
        others = {rank for rank in others if not store.check([_word(rank)])}
        others = others - _alive_here() or others  # if all are, one of them is about to end
    except RuntimeError:
        others -= group.world.local_ranks
    return sorted(others)


def _alive_here() -> set[int]:
    """The ranks that the same agent has started and that run. One may be waiting for this rank and not know yet that
    others are lost."""
    found = set()
    for process in psutil.Process(os.getppid()).children():
        with contextlib.suppress(psutil.Error, KeyError, ValueError):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.add(int(process.environ()["RANK"]))
    return found


@contextlib.contextmanager
def _held_back() -> Iterator[list[str]]:
    """Collects the lines that this process, C++ included, writes to standard error in the block."""
    said: list[str] = []
    with tempfile.TemporaryFile() as file:
        stderr = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield said
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            file.seek(0)
            said += file.read().decode(errors="replace").splitlines()


def _word(rank: int) -> str:
    """The key in the store by which a rank reports that it has lost others."""
    return f"lost others {rank}"


def _say_it_in_one_sentence(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, (PeerLostError, HangError)):
        print(f"{kind.__name__}: {error}", *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)
