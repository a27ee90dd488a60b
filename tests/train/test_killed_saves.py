"""SIGKILL at random instants, most of them inside a save: the last checkpoint loads, and the run goes on bit by bit."""

import multiprocessing
import random
import time

import checkpoint_programs as programs
import pytest
import torch

from minillm.comm import RankError, launch
from minillm.train import SingleDevice
from minillm.train.checkpoint.manifest import committed, step_of
from minillm.train.checkpoint.reader import read_whole
from minillm.train.parallel_config import ParallelConfig

LOG = "losses"


def losses(folder) -> list[tuple[int, str]]:
    """Whole lines of what all attempts have logged: step, loss."""
    lines = (folder / LOG).read_text().split("\n")[:-1] if (folder / LOG).exists() else []
    return [(int(step), loss) for step, loss in (line.split() for line in lines)]


def check_killed(folder, kills, attempt, uninterrupted):
    """attempt(number): starts the run or goes on with it, and kills it; uninterrupted(steps): losses without kills."""
    before = -1
    for number in range(kills):
        attempt(number)
        if saved := committed(folder):
            read_whole(saved[-1])
            assert step_of(saved[-1]) >= before, "a kill has lost a checkpoint"
            before = step_of(saved[-1])
    found = losses(folder)
    expected = uninterrupted(max(step for step, _ in found) + 1)
    assert before > 0 and all(loss == expected[step] for step, loss in found)


@pytest.mark.parametrize("kills", [6, pytest.param(40, marks=pytest.mark.slow)])
def test_one_process(kills, tmp_path):
    draw, context = random.Random(kills), multiprocessing.get_context("fork")
    before = torch.get_num_threads()
    torch.set_num_threads(1)

    def attempt(number):
        process = context.Process(
            target=programs.train_and_save, args=(None, SingleDevice(), tmp_path, number % 2 == 1)
        )
        process.start()
        lines, deadline = len(losses(tmp_path)), time.monotonic() + 30
        while len(losses(tmp_path)) == lines and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.1))
        process.kill()
        process.join()

    check_killed(tmp_path, kills, attempt, lambda steps: programs.losses(None, None, steps))
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [ParallelConfig(dp=2, zero=3), ParallelConfig(tp=2)], ids=str)
def test_ranks_and_whole_jobs(layout, tmp_path):
    draw = random.Random(11)

    def attempt(number):
        victims = draw.choice([[0], [1], [0, 1]])
        after_s = draw.uniform(0.0, 0.3)
        with pytest.raises(RankError):
            launch(programs.train_until_killed, 2, tmp_path, layout, number % 2 == 1, victims, after_s, timeout=60)

    check_killed(tmp_path, 10, attempt, lambda steps: launch(programs.losses, 2, layout, steps)[0])
