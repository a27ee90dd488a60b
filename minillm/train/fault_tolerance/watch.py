"""What ranks tell each other about their health while a run goes on: one object for the loop to call.

after every step     own work of the step is noted; every few steps all exchange it: who is slow?
before every save    hashes of all that is saved: does a replica differ? A checkpoint never holds corrupted weights.
all the time         heartbeats, in a thread
"""

import contextlib
import faulthandler
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from minillm.train.checkpoint.shares import catalogue_of
from minillm.train.checkpoint.state import held
from minillm.train.fault_tolerance.elastic import may_restart
from minillm.train.fault_tolerance.heartbeat import FOLDER, Heart, Limits
from minillm.train.fault_tolerance.replica_check import check_replicas
from minillm.train.fault_tolerance.straggler import Straggler, StragglerDetector, own_work
from minillm.train.steptime import StepTime
from minillm.train.strategies.single_device import SingleDevice
from minillm.train.trainer import Trainer

EXCHANGE_EVERY = 10  # steps between two comparisons of ranks, so that a slow one is named within twice as many
HUNG_STATUS = 75  # exit status of a rank that ends itself (EX_TEMPFAIL: try again)


class Watch:
    """All ranks of a run make one. With one process there is nobody to compare with, and nothing is done."""

    def __init__(self, parallel: SingleDevice, folder: Path, limits: Limits | None = None) -> None:
        self.parallel, self.group, self.folder = parallel, parallel.group, folder
        self.slow: list[Straggler] = []
        self._own: list[tuple[float, ...]] = []
        self._heart: Heart | None = None
        if self.group:
            line = {"stride": parallel.stride, "count": parallel.world_size}
            self.detector = StragglerDetector(self.group.world_size, window=EXCHANGE_EVERY, **line)
            how = {"is_waiting": self._is_waiting, "on_hung": _give_up}
            self._heart = Heart(folder, self.group.rank, self.group.world_size, limits or Limits(), **how)

    def __enter__(self) -> "Watch":
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
        """Ranks that have just become slow; the same on all ranks."""
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
        """ValueError, on every rank, that names the rank whose weights, or what its optimizer keeps of them, are not
        those of its replicas: of the ranks that hold the same part along any axis."""
        if self.group is None:
            return
        parts = held(trainer)
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
        """Around what may take long without a step: a save, a validation."""
        with self._heart.long_work() if self._heart else contextlib.nullcontext():
            yield

    def _is_waiting(self) -> bool:
        """In an operation or, on a GPU, where that is only launched, for what was queued there."""
        recorder, device = self.group.world.recorder, self.group.device
        if recorder is not None and recorder.signs(self.group.world.rank)[1] is not None:
            return True
        return device.type == "cuda" and not torch.cuda.default_stream(device).query()


def _give_up() -> None:
    """A hung rank says where it is, and ends if torchrun will start it again."""
    print("minillm: this rank has made no progress for too long and waits for no other; it is here:", file=sys.stderr)
    faulthandler.dump_traceback(all_threads=True)
    if may_restart():
        os._exit(HUNG_STATUS)
