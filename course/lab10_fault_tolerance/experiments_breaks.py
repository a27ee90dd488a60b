"""Lab 10, broken on purpose: orders of commit that tear, a rank that goes its own way, dead ones, state not saved."""

import copy
import math
import os
import random
import re
import signal
import socket
import subprocess
from dataclasses import dataclass

import torch

from course.kit.answers import answers_of
from course.lab10_fault_tolerance import checks
from course.lab10_fault_tolerance.disk import CUTS, Disk
from course.lab10_fault_tolerance.loop import Loop
from minillm.comm import Group, HangError, launch
from minillm.model import ModelConfig
from minillm.parallel.zero.optimizer import ZeroOptimizer
from minillm.train import TrainConfig
from minillm.train.fault_tolerance.heartbeat import Beat, Health, Limits, Watcher
from minillm.train.optimizer import learning_rate

ANSWERS = answers_of("10_fault_tolerance")
WORLD = 3
TINY = ModelConfig(16, 8, 16, 1, 1, 1, max_seq_len=8)


# Orders of commit.


def metadata_first(step, shard, group, disk):
    """The order of many handouts: shards, then the metadata by rank 0, then a barrier."""
    folder = f"step-{step}"
    disk.write(f"{folder}/{group.rank}", shard)
    disk.flush(f"{folder}/{group.rank}")
    if group.rank == 0:
        disk.write(f"{folder}/manifest", str(group.world_size).encode())
        disk.flush(f"{folder}/manifest")
    group.barrier()


def newest_with_a_manifest(disk):
    """Its reader, with every benefit of the doubt: folders without metadata are ignored."""
    steps = [int(name.removeprefix("step-")) for name in disk.list() if disk.exists(f"{name}/manifest")]
    if not steps:
        return None
    folder = f"step-{max(steps)}"
    return max(steps), [disk.read(f"{folder}/{rank}") for rank in range(int(disk.read(f"{folder}/manifest")))]


def torn(save, load, order) -> dict[str, int]:
    """How many of all kills leave a folder that is taken for a whole checkpoint and is not."""
    before = Disk()
    shards = checks.new_shards(1, WORLD)
    before, _ = checks.play_save(save, before, 1, shards, order)
    new = checks.new_shards(2, WORLD)
    operations = len(checks.play_save(save, before, 2, new, order)[1].operations)
    found = {"kills": 0, "torn": 0}
    for stop in range(operations + 1):
        disk, _ = checks.play_save(save, before, 2, new, order, stop_after=stop)
        for cut in CUTS:
            found["kills"] += 1
            try:
                checks.judge_load(load, disk.after_a_cut(cut), [(1, shards), (2, new)], "")
            except checks.CheckFailed:
                found["torn"] += 1
    return found


# One rank takes another branch.


def skip_bad_batch(loss, gradient, group):
    """The mean gradient of the ranks, or None where this batch is to be skipped."""
    if not torch.isfinite(loss):
        return None  # this batch would spoil the weights
    return group.all_reduce(gradient) / group.world_size


def own_branch(group: Group) -> None:
    loss = torch.tensor(math.nan if group.rank == 1 else 2.0)
    skip_bad_batch(loss, torch.ones(10), group)


def hang(timeout_s: float = 1.5) -> tuple[str, float]:
    """Who waits for whom, and for how many seconds nothing had moved when that was said."""
    try:
        launch(own_branch, WORLD, timeout=timeout_s, device="cpu")
    except HangError as error:
        return error.table, float(re.search(r"no progress for ([\d.]+) s", str(error))[1])
    raise AssertionError("one rank left the collective, and nobody hung")


def waiting(table: str) -> int:
    """Ranks of the table that wait in the all-reduce."""
    return sum("all_reduce" in line for line in table.splitlines())


# What a neighbour makes of a rank.


@dataclass(frozen=True)
class InjectedFault:
    """What befalls a rank, and what its neighbour should say. sent: a signal to its process; is_slow: by the
    straggler test."""

    what: str
    health: Health
    sent: signal.Signals | None = None
    host: str = socket.gethostname()
    beats: bool = True
    moves: bool = False
    waits: bool = False
    is_slow: bool = False


FAULTS = (
    InjectedFault("its process is killed", Health.DEAD, sent=signal.SIGKILL, beats=False),
    InjectedFault("its process is stopped", Health.HUNG, sent=signal.SIGSTOP, beats=False),
    InjectedFault("it makes no steps, and waits for nobody", Health.HUNG),
    InjectedFault("it makes no steps, and waits for others", Health.WAITING, waits=True),
    InjectedFault("it makes steps, but its own work takes longer", Health.SLOW, moves=True, is_slow=True),
    InjectedFault("on another machine: it makes no sign", Health.SILENT, host="another machine", beats=False),
    InjectedFault("it makes steps", Health.HEALTHY, moves=True),
)


def health(seconds: int = 30) -> list[Health]:
    """What a neighbour says of real processes after `FAULTS`, so many seconds later by a clock that is set forward."""
    watcher = Watcher(Limits(every_s=1.0, silent_s=5.0, hung_s=20.0))
    processes = [subprocess.Popen(["sleep", "60"]) for _ in FAULTS]
    ranks = list(enumerate(zip(FAULTS, processes, strict=True)))
    try:
        for _, (fault, process) in ranks:
            if fault.sent:
                process.send_signal(fault.sent)
                os.waitpid(process.pid, os.WUNTRACED)
        for now in range(seconds):
            for rank, (fault, process) in ranks:
                if fault.beats or now == 0:
                    watcher.see(Beat(rank, process.pid, fault.host, now, fault.moves * now, fault.waits), now)
        slow = [rank for rank, (fault, _) in ranks if fault.is_slow]
        return [watcher.judge(rank, seconds, slow) for rank, _ in ranks]
    finally:
        for process in processes:
            process.kill()
            process.wait()


# State that was not saved.


def only_rank_0(group: Group) -> dict[str, int]:
    """Elements of Adam's first moment: of the model, and in what rank 0 alone would write."""
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.Linear(20, 4))
    optimizer = ZeroOptimizer(model, group, 1, make=torch.optim.Adam)
    model(torch.ones(2, 30)).sum().backward()
    optimizer.step()
    written = optimizer.inner.state_dict()["state"].values()
    return {
        "model": sum(p.numel() for p in model.parameters()),
        "rank 0": sum(entry["exp_avg"].numel() for entry in written),
    }


def rank_0_saves() -> dict[str, int]:
    return launch(only_rank_0, 4, device="cpu")[0]


def schedules(steps: int = 400, accumulate: int = 4, resumed_at: int = 200) -> dict[str, list[float]]:
    """Learning rate by step: as meant, stepped once per microbatch, and resumed without the scheduler's state."""
    config = TrainConfig(TINY, seq_len=8, steps=steps, warmup_steps=40, lr=1.0)
    right = [learning_rate(step, config) for step in range(steps)]
    per_microbatch = [learning_rate(min(step * accumulate, steps), config) for step in range(steps)]
    forgotten = [right[step if step < resumed_at else step - resumed_at] for step in range(steps)]
    return {"once per step": right, "once per microbatch": per_microbatch, "resumed without its state": forgotten}


def left_out(part: str | None, steps: int = 20) -> tuple[int | None, float]:
    """A resume without one part of the state: the first step whose loss differs, and the largest difference."""
    saved_python, saved_torch = random.getstate(), torch.get_rng_state()
    try:
        torch.manual_seed(0)
        random.seed(0)
        loop = Loop()
        for _ in range(7):
            loop.step()
        state = copy.deepcopy(ANSWERS.capture(loop))
        expected = [loop.step() for _ in range(steps)]
        torch.manual_seed(1)
        random.seed(1)
        resumed = Loop()
        ANSWERS.restore(resumed, state)
        if part:
            _forget(resumed, part)
        found = [resumed.step() for _ in range(steps)]
    finally:
        random.setstate(saved_python)
        torch.set_rng_state(saved_torch)
    apart = [abs(mine - theirs) for mine, theirs in zip(found, expected, strict=True)]
    return next((step for step, each in enumerate(apart) if each), None), max(apart)


def _forget(loop: Loop, part: str) -> None:
    fresh = Loop()
    if part == "weights":
        loop.model.load_state_dict(fresh.model.state_dict())
    elif part == "optimizer":
        loop.optimizer.load_state_dict(fresh.optimizer.state_dict())
        loop.scheduler.optimizer = loop.optimizer
    elif part == "scheduler":
        loop.scheduler.load_state_dict(fresh.scheduler.state_dict())
    elif part == "order of the data":
        loop.order = fresh.order
    elif part == "torch's generator":
        torch.manual_seed(1)
    else:
        random.seed(1)
