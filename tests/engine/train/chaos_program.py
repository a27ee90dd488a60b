"""A run that is killed at random instants until it has been killed often enough: python chaos_program.py FOLDER KILLS
RANK_KILLS SEED. Prints JSON: how often it was killed, and in which state it was found.

The program loads torch once and forks the processes that train, so that a kill costs a fraction of a second.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import torch
import torch._dynamo  # which every optimizer loads: once, here

from minillm.comm import RankError, launch
from minillm.data import Tokens
from minillm.model import ModelConfig
from minillm.train import ParallelConfig, TrainConfig, Trainer, fit
from minillm.train.checkpoint.manifest import committed
from minillm.train.checkpoint.reader import has_checkpoint, read_whole
from minillm.train.metrics import read_metrics
from minillm.train.strategies.hybrid import make_strategy

STEPS, SAVE_EVERY = 40, 3
MODEL = ModelConfig(50, 16, 32, 2, 4, 2, max_seq_len=16)
WINDOWS = 499  # of the text: 40 steps of 12 see each at most once


def trainer(dp=1, parallel=None):
    tokens = Tokens((torch.arange(WINDOWS * 16 + 1) * 7 % 50).numpy().astype("uint16"), 50, 0, 1, 3 * WINDOWS * 16)
    config = TrainConfig(MODEL, seq_len=16, batch_size=2, accumulate=6 // dp, steps=STEPS, warmup_steps=2)
    return Trainer(config, tokens, workers=1, parallel=parallel)


def attempt(folder, group=None, zero=0):
    """Goes on from what there is."""
    torch.set_num_threads(1)
    parallel = make_strategy(group, ParallelConfig(dp=group.world_size, zero=zero)) if group else None
    run = trainer(group.world_size if group else 1, parallel)
    how = {"save_every": SAVE_EVERY, "progress": False, "tensorboard": False}
    how["save_in_background"] = group is None or zero > 0
    return fit(run, folder, resume=has_checkpoint(folder), **how).steps_done


def rank(group, folder, zero):
    return attempt(folder, group, zero)


def at_a_random_instant(draw, folder, is_over):
    """Returns some steps and saves from now, and a moment later: inside a step, a save, a start or whatever it is."""
    seen = size_of(folder)
    for _ in range(draw.randrange(1, 16) if draw.random() < 0.9 else 0):
        while size_of(folder) == seen and not is_over():
            time.sleep(0.0005)
        seen = size_of(folder)
    time.sleep(draw.random() * draw.choice([0.001, 0.01, 0.05]))


def size_of(folder):
    return sum(path.stat().st_size for path in folder.glob("*.jsonl"))


def kill_processes(folder, kills, draw):
    """Kills a process that trains alone, and starts it again."""
    found, finished = [], 0
    while len(found) < kills:
        if (child := os.fork()) == 0:
            attempt(folder)
            os._exit(0)
        at_a_random_instant(draw, folder, lambda child=child: gone(child))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            found.append(what_is_left(folder))
        else:  # it was done before it could be killed: the next one begins again
            assert os.WEXITSTATUS(status) == 0
            finished += 1
            keep(folder, finished)
    attempt(folder)
    keep(folder, finished + 1)
    return found


def gone(child):
    return psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def kill_ranks(folder, kills, draw, zero):
    """Kills one of two ranks, and starts both again."""
    found, number = [], 0
    while len(found) < kills:
        over = threading.Event()

        def kill(over=over):
            mine = psutil.Process()
            ranks = []
            while len(ranks) < 2 and not over.is_set():
                ranks = [each for each in mine.children(recursive=True) if holds_output(each)]
            at_a_random_instant(draw, folder, over.is_set)
            if ranks and not over.is_set():
                draw.choice(ranks).kill()

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            launch(rank, 2, folder, zero)
            number += 1
            keep(folder, number)
        except RankError as error:
            assert "SIGKILL" in str(error), error
            found.append(what_is_left(folder))
        over.set()
        killer.join()
    launch(rank, 2, folder, zero)
    keep(folder, number + 1)
    return found


def holds_output(process):
    """Whether it is a rank: those write into a file of the launch."""
    try:
        return "minillm-" in os.readlink(f"/proc/{process.pid}/fd/1")
    except OSError:
        return False


def what_is_left(folder):
    """The step of the checkpoint, which must load whatever happened; None before the first."""
    return read_whole(committed(folder)[-1])[0].step if has_checkpoint(folder) else None


def keep(folder, number):
    """Puts a finished run aside."""
    rows = [row for row in read_metrics(folder) if "loss" in row]
    aside = folder.with_name(f"{folder.name}-done-{number}")
    folder.rename(aside)
    (aside / "rows.json").write_text(json.dumps([[row["position"], row["loss"]] for row in rows]))


if __name__ == "__main__":
    place, kills, rank_kills, seed = Path(sys.argv[1]), *map(int, sys.argv[2:])
    draw = random.Random(seed)
    if (child := os.fork()) == 0:  # as all runs of one process: nothing here has computed before it forks
        attempt(place / "whole")
        keep(place / "whole", 0)
        os._exit(0)
    os.waitpid(child, 0)
    left = kill_processes(place / "alone", kills, draw)
    for zero in (0, 2) if rank_kills else ():
        launch(rank, 2, place / f"pair{zero}-whole", zero)
        keep(place / f"pair{zero}-whole", 0)
        left += kill_ranks(place / f"pair{zero}", rank_kills // 2, draw, zero)
    print(json.dumps({"kills": len(left), "left": left}))
