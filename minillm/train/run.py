"""A run: steps under a progress bar, metrics and checkpoints in a folder, and Ctrl-C that loses nothing.

    runs/NAME/checkpoints/     the last saves; `resume` goes on from the latest with the same bits
    runs/NAME/metrics.jsonl    a line per step and per validation
    runs/NAME/time.jsonl       where the time went, over all attempts (fault_tolerance/goodput.py)
    runs/NAME/tensorboard/     the metrics again, when TensorBoard is installed
    runs/NAME/stop             made by anybody: the run saves and ends, as after Ctrl-C
    runs/NAME/lock             held while the run goes on

Ctrl-C (or a cluster's SIGTERM) lets the step finish, saves and returns; a second Ctrl-C stops at once. With several
ranks all of them call `fit`: rank 0 writes and shows, and all stop at the same step.
"""

import contextlib
import functools
import multiprocessing
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm as plain_tqdm
from tqdm.auto import tqdm

from minillm.measure.memory_tracker import Bytes, memory
from minillm.train.checkpoint.reader import has_checkpoint, restore
from minillm.train.checkpoint.writer import Checkpointer
from minillm.train.fault_tolerance.elastic import job_id
from minillm.train.fault_tolerance.goodput import TimeLog
from minillm.train.fault_tolerance.heartbeat import HealthMonitor
from minillm.train.metrics import Metrics
from minillm.train.run_folder import locked
from minillm.train.steptime import Step
from minillm.train.strategies.single_device import SingleDevice
from minillm.train.trainer import Trainer
from minillm.train.validation import Validation

STOP = "stop"
VOTE_EVERY_S, VOTE_AT_LEAST_EVERY = 0.5, 20  # seconds, steps: how often ranks ask each other whether to stop


@dataclass
class RunResult:
    """How a run ended. losses: of the steps made now; peak: bytes by kind, if memory was asked for."""

    folder: Path
    steps_done: int = 0
    interrupted: bool = False
    validation: Validation | None = None
    losses: list[float] = field(default_factory=list)
    peak: Bytes | None = None


def fit(
    trainer: Trainer,
    folder: str | Path,
    *,
    resume: bool = False,
    save_every: int = 200,
    keep: int = 2,
    save_in_background: bool = False,
    tokenizer: str | None = None,
    validate_every: int = 100,
    validation_tokens: int | None = 32768,
    track_memory: bool = False,
    tensorboard: bool = True,
    progress: bool = True,
    lock: bool = True,
    on_step: Callable[[Trainer, Step], None] | None = None,
) -> RunResult:
    """Trains to the configuration's last step, or to Ctrl-C, and saves.

    resume: go on from the folder's latest checkpoint, of which `keep` stay; tokenizer: its fingerprint, if it is to be
    checked. save_in_background: train on while a checkpoint is written. validation_tokens: how many to validate on
    during the run (all, at its end). track_memory: follow memory by kind through the first step. on_step: called after
    each step.
    lock: False where the caller holds the folder's lock (`run_folder.locked`) and has removed an old request to stop.
    ValueError if the folder holds a run and resume is not set, if another process uses it, or if replicas differ when
    they are to be saved; OSError if the last save fails (one on the way that fails costs a warning: the checkpoint
    before it still loads).
    """
    folder = Path(folder)
    with contextlib.ExitStack() as stack:
        if lock:
            _lock(trainer.parallel, folder, stack)
        if resume:
            restore(trainer, folder, tokenizer=tokenizer)
        elif has_checkpoint(folder):
            raise ValueError(f"{folder} holds a run already: go on with --resume, or name another --run.")
        how = {"keep": keep, "background": save_in_background, "tokenizer": tokenizer}
        saver = Checkpointer(folder, trainer.parallel.group, **how)
        steps, ranks = trainer.config.steps, trainer.parallel.group.world_size if trainer.parallel.group else 1
        run = RunResult(folder, trainer.steps_done)
        first = trainer.parallel.is_root
        if first:
            position = trainer.loader.position
            metrics = stack.enter_context(Metrics(folder, run.steps_done, tensorboard, position))
            is_restart = resume and job_id() is not None
            spent = stack.enter_context(TimeLog(folder, run.steps_done, is_restart))
            if lock:
                (folder / STOP).unlink(missing_ok=True)  # of a run that was killed
        bar = stack.enter_context(_progress_bar(folder, steps, run.steps_done, shown=progress and first))
        interrupt = stack.enter_context(interrupts())
        stack.enter_context(trainer)
        health = stack.enter_context(HealthMonitor(trainer.parallel, folder))

        @contextmanager
        def timing(event: str) -> Iterator[None]:
            with health.long_work(), spent.timing(event, trainer.steps_done) if first else nullcontext():
                yield

        def log(row: dict[str, Any]) -> None:
            if first:
                metrics.log(row)

        vote = _Vote(trainer.parallel, lambda: interrupt.is_set() or (first and (folder / STOP).exists()))

        def validate(max_tokens: int | None) -> None:
            with timing("validate"):
                run.validation = trainer.validate(max_tokens)
            log({"step": trainer.steps_done, **run.validation.to_json()})
            if max_tokens is not None and first:
                bar.write(f"step {trainer.steps_done}: validation loss {run.validation.loss:.3f}")

        recent: deque[Step] = deque(maxlen=10)
        stop = vote.to_stop()
        while trainer.steps_done < steps and not stop:
            if track_memory and run.peak is None:
                with memory(trainer.module, trainer.optimizer) as seen:
                    step = trainer.step()
                run.peak = seen.peak
                peak = {f"peak_{kind}_bytes": size for kind, size in seen.peak.items()}
            else:
                step, peak = trainer.step(), {}
            recent.append(step)
            run.losses.append(step.loss)
            log(step.to_json() | {"ranks": ranks} | peak)
            if first:
                spent.step(step.step, step.time.total, trainer.steps_done if step.rollback else None)
            for problem in filter(None, [step.rollback, *health.after_step(step.time)]):
                bar.write(f"step {step.step}: {problem}") if first else None
            bar.set_postfix_str(_postfix(recent), refresh=False)
            bar.update(trainer.steps_done - bar.n)
            if on_step:
                on_step(trainer, step)
            done, stop = trainer.steps_done, vote.to_stop(step.time.total)
            if step.applied and done < steps:
                if trainer.held_out is not None and done % validate_every == 0:
                    validate(validation_tokens)  # also if it stops here: the resumed run begins after this step
                if done % save_every == 0 and not stop:
                    with timing("save"):
                        health.check_replicas(trainer)
                        _save_on_the_way(saver, trainer)
        run.steps_done, run.interrupted = trainer.steps_done, trainer.steps_done < steps
        if run.losses:
            with timing("save"):
                health.check_replicas(trainer)
                _warn_of_a_failed_save(saver.finish, first)
                saver.save(trainer)
                saver.finish()
        if first:
            (folder / STOP).unlink(missing_ok=True)
        if trainer.held_out is not None and not run.interrupted:
            validate(None)
        if first:
            spent.ended_at = run.steps_done
    return run


def _lock(parallel: SingleDevice, folder: Path, held: contextlib.ExitStack) -> None:
    """Rank 0 takes the folder's lock; all ranks learn if it cannot."""
    problem = None
    if parallel.is_root:
        try:
            held.enter_context(locked(folder))
        except ValueError as error:
            problem = str(error)
    if parallel.group:
        problem = next(filter(None, parallel.group.gather_objects(problem)), None)
    if problem:
        raise ValueError(problem)


class _Vote:
    """Whether any rank was asked to stop, which all of them have to know at the same step.

    An answer costs an all-reduce that every rank's host waits for. So short steps pass without one: the ranks agree on
    how many, as part of the vote before, by what the slowest of them takes for `VOTE_EVERY_S`.
    """

    def __init__(self, parallel: SingleDevice, asked: Callable[[], bool]) -> None:
        self.parallel, self.asked, self.left = parallel, asked, 0

    def to_stop(self, step_s: float = VOTE_EVERY_S) -> bool:
        """After a step of step_s seconds: True if it was the last one."""
        if self.left:
            self.left -= 1
            return False
        steps = min(VOTE_AT_LEAST_EVERY, max(1, int(VOTE_EVERY_S / max(step_s, 1e-6))))
        go_on, steps = self.parallel.least([not self.asked(), steps])
        self.left = steps - 1 if self.parallel.group else 0
        return not go_on


class _Lines(plain_tqdm):
    """Progress where nothing can be written over, as on a rank whose output another process prints: a line at times."""

    def display(self, *_: object, **__: object) -> None:
        print(self, file=self.fp, flush=True)

    def clear(self, *_: object, **__: object) -> None:
        """What is printed stays."""


def _progress_bar(folder: Path, steps: int, done: int, shown: bool) -> tqdm:
    plain_tqdm.set_lock(threading.RLock())  # one process writes; its lock between processes would outlive a rank
    about = {"total": steps, "initial": done, "unit": "step", "desc": folder.name, "disable": not shown}
    is_rank = multiprocessing.parent_process() is not None
    return _Lines(**about, mininterval=5) if is_rank else tqdm(**about)


def _save_on_the_way(saver: Checkpointer, trainer: Trainer) -> None:
    for action in (saver.finish, functools.partial(saver.save, trainer)):
        _warn_of_a_failed_save(action, trainer.parallel.is_root)


def _warn_of_a_failed_save(action: Callable[[], None], is_root: bool) -> None:
    try:
        action()
    except OSError as error:
        if is_root:
            print(f"minillm: {error} Training goes on.", file=sys.stderr)


def _postfix(recent: deque[Step]) -> str:
    seconds, tokens = sum(step.time.total for step in recent), sum(step.tokens for step in recent)
    parts = [f"loss {recent[-1].loss:.3f}", f"{tokens / seconds:,.0f} tokens/s"]
    if all(step.mfu is not None for step in recent):
        share = sum(step.mfu * step.time.total for step in recent) / seconds
        parts.append(f"MFU {share:.0%}")
    return ", ".join(parts)


@contextmanager
def interrupts(then: Callable[[], None] = lambda: None) -> Iterator[threading.Event]:
    """An event that the first SIGINT or SIGTERM sets; the second SIGINT is Python's KeyboardInterrupt again.
    then: called on the first one."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # only it may handle signals
        yield asked
        return

    def handle(number: int, frame: object) -> None:
        if asked.is_set() and number == signal.SIGINT:  # a cluster may send SIGTERM again while the run saves
            raise KeyboardInterrupt
        asked.set()
        then()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
