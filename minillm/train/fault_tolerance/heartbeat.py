"""What ranks tell each other about their health while a run goes on.

    all the time         heartbeats, in a thread: is a rank dead, hung or silent?
    after every step     each rank notes the seconds of its own work; every few steps all exchange them: who is slow?
    before every save    hashes of all that is saved: does a replica differ? No checkpoint holds corrupted weights.

    what a neighbour sees of a rank                                 the rank is
    its process has gone                                            dead
    beats come, steps do not, and it waits for no other rank        hung     (so is one that a signal has stopped)
    beats come, steps do not, and it waits for others               waiting  (another rank is to blame)
    steps come, but its own work takes longer than its peers'       slow     (straggler.py)
    no beats, and it runs on another machine                        silent   (dead, or cut off from the network)

A thread of each rank writes a small file every few seconds, whatever the main thread does. Each rank reads the file of
its right neighbour, and the next one's if the neighbour is not well: so every rank is watched, and none reads all
files. Only the reader's clock counts: how long ago it saw a number change.
"""

import contextlib
import enum
import faulthandler
import json
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil
import torch

from minillm.files import write_whole
from minillm.train.checkpoint.shares import catalogue_of
from minillm.train.fault_tolerance.elastic import may_restart
from minillm.train.fault_tolerance.replica_check import check_replicas
from minillm.train.fault_tolerance.straggler import Straggler, StragglerDetector, own_work
from minillm.train.steptime import StepTime
from minillm.train.strategies.single_device import SingleDevice
from minillm.train.trainer import Trainer

FOLDER = "heartbeats"
EXCHANGE_EVERY = 10  # steps between two comparisons of ranks, so that a slow one is named within twice as many
HUNG_STATUS = 75  # exit status of a rank that ends itself (EX_TEMPFAIL: try again)


class Health(enum.Enum):
    HEALTHY, WAITING, SLOW, HUNG, SILENT, DEAD = "healthy", "waiting", "slow", "hung", "silent", "dead"


class Process(enum.Enum):
    """What a machine can tell about one of its own processes."""

    RUNNING, STOPPED, GONE = "running", "stopped", "gone"


@dataclass(frozen=True)
class Beat:
    """One heartbeat. count: of beats; progress: steps, saves and validations done; waiting: in a collective."""

    rank: int
    pid: int
    host: str
    count: int
    progress: int
    waiting: bool


@dataclass(frozen=True)
class Limits:
    """Seconds between beats; without beats until a rank is silent; without progress until it is hung."""

    every_s: float = 5.0
    silent_s: float = 30.0
    hung_s: float = 600.0

    def __post_init__(self) -> None:
        if not 0 < self.every_s < self.silent_s <= self.hung_s:
            raise ValueError(f"{self}: beats must come faster than a rank counts as silent, and that before hung.")


def look(beat: Beat) -> Process | None:
    """The state of the rank's process; None if it runs on another machine."""
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
    """Judges other ranks by their beats. look: returns the state of a beat's process."""

    def __init__(self, limits: Limits, look: Callable[[Beat], Process | None] = look) -> None:
        self.limits, self._look = limits, look
        self._beats: dict[int, Beat] = {}
        self._beaten_at: dict[int, float] = {}  # when the count was last seen to change
        self._moved_at: dict[int, float] = {}  # and the progress, or that it waited

    def see(self, beat: Beat, now: float) -> None:
        """Records a beat. now: seconds of the reader's clock."""
        before = self._beats.get(beat.rank)
        if before is None or before.pid != beat.pid or before.count != beat.count:
            self._beaten_at[beat.rank] = now
        if before is None or before.pid != beat.pid or before.progress != beat.progress or beat.waiting:
            self._moved_at[beat.rank] = now
        self._beats[beat.rank] = beat

    def forget(self, rank: int) -> None:
        self._beats.pop(rank, None)

    def judge(self, rank: int, now: float, slow: Collection[int] = ()) -> Health | None:
        """The rank's health; None if no beat of it was seen yet. slow: the ranks that the straggler test names."""
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
        """The health of the rank and the evidence, as one sentence."""
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
    """The heartbeat thread of one rank: writes its beats and watches its neighbours while the block runs.

    is_waiting: whether the rank is in a collective. on_hung: called once, in the thread, when this rank itself hangs.
    say: called with a sentence whenever a neighbour's health turns bad.
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
        self._reported: dict[int, Health] = {}
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
        """Notes that the rank has made progress."""
        self.progress += 1

    @contextlib.contextmanager
    def long_work(self) -> Iterator[None]:
        """A context for a save or a validation, which may take any time without a step."""
        self._pauses += 1
        yield
        self._pauses -= 1
        self.tick()

    def _run(self) -> None:
        own = Watcher(self.limits, lambda beat: Process.RUNNING)  # of this rank itself
        count, was_hung = 0, False
        while not self._over.wait(self.limits.every_s):
            count, now = count + 1, time.monotonic()
            waiting = self.is_waiting() or self._pauses > 0
            beat = Beat(self.rank, os.getpid(), socket.gethostname(), count, self.progress, waiting)
            with contextlib.suppress(OSError):  # a full disk must not end the run; the neighbour will notice
                self.folder.mkdir(exist_ok=True)
                write_whole(self._path(self.rank), json.dumps(asdict(beat)))
            own.see(beat, now)
            is_hung = own.judge(self.rank, now) is Health.HUNG
            if is_hung and not was_hung:
                self.on_hung()
            was_hung = is_hung
            self._watch(now)

    def _watch(self, now: float) -> None:
        """Reports the right neighbour if it is not well, and then looks at the next one."""
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
                self._reported.pop(rank, None)
                return
            if self._reported.get(rank) is not health:
                self._reported[rank] = health
                self.say(self.watcher.sentence(rank, health, now))

    def _path(self, rank: int) -> Path:
        return self.folder / str(rank)


class HealthMonitor:
    """What the training loop calls; every rank of a run makes one. A single process has no peers: it does nothing."""

    def __init__(self, parallel: SingleDevice, folder: Path, limits: Limits | None = None) -> None:
        self.parallel, self.group, self.folder = parallel, parallel.group, folder
        self.slow: list[Straggler] = []
        self._own: list[tuple[float, ...]] = []
        self._heart: Heart | None = None
        if self.group:
            line = {"stride": parallel.stride, "count": parallel.world_size}
            self.detector = StragglerDetector(self.group.world_size, window=EXCHANGE_EVERY, **line)
            rank, world_size, limits = self.group.rank, self.group.world_size, limits or Limits()
            self._heart = Heart(folder, rank, world_size, limits, is_waiting=self._is_waiting, on_hung=_give_up)

    def __enter__(self) -> "HealthMonitor":
        if self._heart:
            if self.group.rank == 0:
                shutil.rmtree(self.folder / FOLDER, ignore_errors=True)  # the beats of ranks that were killed
            self.group.barrier()
            self._heart.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._heart:
            self._heart.__exit__(*error)

    def after_step(self, time: StepTime) -> list[Straggler]:
        """Returns the ranks that have just become slow, the same on all ranks."""
        if self.group is None:
            return []
        self._heart.tick()
        self._own.append(own_work(time))
        if len(self._own) < EXCHANGE_EVERY:
            return []
        for rank, steps in enumerate(self.group.gather_objects(self._own)):
            for phases in steps:
                self.detector.add(rank, phases)
        self._own = []
        known = {each.rank for each in self.slow}
        self.slow = self.detector.stragglers()
        return [each for each in self.slow if each.rank not in known]

    def check_replicas(self, trainer: Trainer) -> None:
        """Compares weights and optimizer state of the ranks that hold the same part, along any axis. ValueError, on
        every rank, names a rank that differs and the tensor."""
        if self.group is None:
            return
        parts = trainer.local_state().parts()
        catalogue = catalogue_of({name: placement for name, (_, placement) in parts.items()})
        owned = [(key, part) for (key, _), (part, _) in zip(catalogue, parts.values(), strict=True)]
        if found := check_replicas(owned, self.group):
            name, _ = found.name
            raise ValueError(
                f"{replace(found, name=name)}: go on with --resume from the last checkpoint, whose replicas agreed, "
                "without that rank's machine"
            )

    @contextlib.contextmanager
    def long_work(self) -> Iterator[None]:
        """A context for a save or a validation, which may take any time without a step."""
        with self._heart.long_work() if self._heart else contextlib.nullcontext():
            yield

    def _is_waiting(self) -> bool:
        """Whether this rank is in a collective or, as a GPU's are only launched, waits for the GPU's queue."""
        recorder, device = self.group.world.recorder, self.group.device
        if recorder.signs(self.group.world.rank)[1] is not None:
            return True
        return device.type == "cuda" and not torch.cuda.default_stream(device).query()


def _give_up() -> None:
    """Prints where this hung rank is, and ends it if torchrun will start it again."""
    print(
        "minillm: this rank has made no progress for too long and waits for no other rank; it is here:", file=sys.stderr
    )
    faulthandler.dump_traceback(all_threads=True)
    if may_restart():
        os._exit(HUNG_STATUS)
