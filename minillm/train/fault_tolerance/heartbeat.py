"""Heartbeats, which tell dead, hung, slow and silent ranks apart.

    what is seen of a rank                                          it is
    its process has gone                                            dead
    beats come, steps do not, and it waits for nobody               hung     (so is one that a signal has stopped)
    beats come, steps do not, and it waits for others               waiting  (another rank is to blame)
    steps come, but its own work takes longer than its peers'       slow     (straggler.py)
    no beats, and its machine is another one                        silent   (dead, or cut off: nobody here can know)

A thread of each rank writes a small file at times, whatever the main thread does. Each rank reads that of its right
neighbour, and the one after it where the neighbour does not answer, so no rank reads them all and every rank is
watched. Only the reader's clock counts: how long ago it saw a number change.
"""

import contextlib
import enum
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from minillm.files import write_whole

FOLDER = "heartbeats"


class Health(enum.Enum):
    HEALTHY, WAITING, SLOW, HUNG, SILENT, DEAD = "healthy", "waiting", "slow", "hung", "silent", "dead"


class Process(enum.Enum):
    """What a machine knows about a process of its own."""

    RUNNING, STOPPED, GONE = "running", "stopped", "gone"


@dataclass(frozen=True)
class Beat:
    """One sign of life. count: of beats; progress: steps, saves and validations done; waiting: in a collective."""

    rank: int
    pid: int
    host: str
    count: int
    progress: int
    waiting: bool


@dataclass(frozen=True)
class Limits:
    """Seconds: between beats, without beats until a rank is silent, without progress until it is hung."""

    every_s: float = 5.0
    silent_s: float = 30.0
    hung_s: float = 600.0

    def __post_init__(self) -> None:
        if not 0 < self.every_s < self.silent_s <= self.hung_s:
            raise ValueError(f"{self}: beats must come faster than a rank counts as silent, and that before hung.")


def look(beat: Beat) -> Process | None:
    """What has become of the rank's process; None where another machine runs it."""
    if beat.host != socket.gethostname():
        return None
    try:
        status = psutil.Process(beat.pid).status()
    except psutil.NoSuchProcess:
        return Process.GONE
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return Process.GONE
    return Process.STOPPED if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else Process.RUNNING


class Watcher:
    """Judges other ranks by their beats. look: at a process, see above."""

    def __init__(self, limits: Limits, look: Callable[[Beat], Process | None] = look) -> None:
        self.limits, self._look = limits, look
        self._beats: dict[int, Beat] = {}
        self._beaten_at: dict[int, float] = {}  # when the count was last seen to change
        self._moved_at: dict[int, float] = {}  # and the progress, or that it waited

    def see(self, beat: Beat, now: float) -> None:
        """now: seconds of the reader's clock."""
        before = self._beats.get(beat.rank)
        if before is None or before.pid != beat.pid or before.count != beat.count:
            self._beaten_at[beat.rank] = now
        if before is None or before.pid != beat.pid or before.progress != beat.progress or beat.waiting:
            self._moved_at[beat.rank] = now
        self._beats[beat.rank] = beat

    def forget(self, rank: int) -> None:
        self._beats.pop(rank, None)

    def judge(self, rank: int, now: float, slow: Collection[int] = ()) -> Health | None:
        """None for a rank that has not been seen yet. slow: what the straggler test says."""
        if rank not in self._beats:
            return None
        beat, quiet_s = self._beats[rank], now - self._beaten_at[rank]
        process = self._look(beat) if quiet_s > 2 * self.limits.every_s else Process.RUNNING
        if process is Process.GONE:
            return Health.DEAD
        if quiet_s > self.limits.silent_s:
            return Health.SILENT if process is None else Health.HUNG
        if process is Process.STOPPED or now - self._moved_at[rank] > self.limits.hung_s:
            return Health.HUNG
        if beat.waiting:
            return Health.WAITING
        return Health.SLOW if rank in slow else Health.HEALTHY

    def sentence(self, rank: int, health: Health, now: float) -> str:
        """What to tell a person."""
        beat, quiet_s = self._beats[rank], now - self._beaten_at[rank]
        who, where = f"rank {rank} is {health.value}", f"process {beat.pid} on {beat.host}"
        if health is Health.DEAD:
            return f"{who}: {where} has gone"
        if health is Health.SILENT:
            return f"{who}: no sign of {where} for {quiet_s:.0f} s"
        if health is Health.HUNG and self._look(beat) is Process.STOPPED:
            return f"{who}: a signal has stopped {where}"
        if health is Health.HUNG and quiet_s > self.limits.silent_s:
            return f"{who}: {where} runs, but has given no sign for {quiet_s:.0f} s"
        if health is Health.HUNG:
            still = now - self._moved_at[rank]
            return f"{who}: {where} has made no progress for {still:.0f} s and waits for no other rank"
        return f"{who}: {where}"


class Heart:
    """The thread of one rank: beats, and watches its neighbours while the block runs.

    is_waiting: whether the rank is in a collective. on_hung: called in the thread of a rank that is hung itself, once.
    say: told a sentence whenever a neighbour's health turns bad.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        world_size: int,
        limits: Limits = Limits(),
        is_waiting: Callable[[], bool] = lambda: False,
        on_hung: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = lambda text: print(f"minillm: {text}.", file=sys.stderr, flush=True),
    ) -> None:
        self.folder, self.rank, self.world_size, self.limits = folder / FOLDER, rank, world_size, limits
        self.is_waiting, self.on_hung, self.say = is_waiting, on_hung, say
        self.watcher, self.progress = Watcher(limits), 0
        self._pauses = 0
        self._told: dict[int, Health] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> "Heart":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._path(self.rank).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.folder.rmdir()  # of the last one

    def tick(self) -> None:
        """The rank has made progress."""
        self.progress += 1

    @contextlib.contextmanager
    def long_work(self) -> Iterator[None]:
        """Around a save or a validation, of which nobody can say how long it takes."""
        self._pauses += 1
        yield
        self._pauses -= 1
        self.tick()

    def _run(self) -> None:
        count, own, told = 0, Watcher(self.limits, lambda beat: Process.RUNNING), False
        while not self._over.wait(self.limits.every_s):
            count, now = count + 1, time.monotonic()
            waiting = self.is_waiting() or self._pauses > 0
            beat = Beat(self.rank, os.getpid(), socket.gethostname(), count, self.progress, waiting)
            with contextlib.suppress(OSError):  # a full disk must not end the run; the neighbour will notice
                self.folder.mkdir(exist_ok=True)
                write_whole(self._path(self.rank), json.dumps(asdict(beat)))
            own.see(beat, now)
            is_hung = own.judge(self.rank, now) is Health.HUNG
            if is_hung and not told:
                self.on_hung()
            told = is_hung
            self._watch(now)

    def _watch(self, now: float) -> None:
        """The neighbour, and whoever comes after it as long as they are not well."""
        for distance in range(1, self.world_size):
            rank = (self.rank + distance) % self.world_size
            try:
                self.watcher.see(Beat(**json.loads(self._path(rank).read_text(encoding="utf-8"))), now)
            except FileNotFoundError:
                self.watcher.forget(rank)  # it has not begun, or has left as it should
            except (OSError, ValueError, TypeError):
                pass  # the storage does not answer: no beat
            health = self.watcher.judge(rank, now)
            if health in (None, Health.HEALTHY, Health.WAITING):
                self._told.pop(rank, None)
                return
            if self._told.get(rank) is not health:
                self._told[rank] = health
                self.say(self.watcher.sentence(rank, health, now))

    def _path(self, rank: int) -> Path:
        return self.folder / str(rank)
