"""SIGKILL while a process saves after every step: the last checkpoint loads, and the run goes on bit by bit."""

import multiprocessing
import random
import time

import checkpoint_programs as programs
import pytest
import torch

from minillm.train.checkpoint.manifest import committed, step_of
from minillm.train.checkpoint.reader import read_whole

LOG = "losses"


def losses(folder) -> list[tuple[int, str]]:
    """Whole lines of what all attempts have logged: step, loss."""
    lines = (folder / LOG).read_text().split("\n")[:-1] if (folder / LOG).exists() else []
    return [(int(step), loss) for step, loss in (line.split() for line in lines)]


@pytest.mark.parametrize("kills", [4, pytest.param(15, marks=pytest.mark.full)])
def test_nothing_that_was_saved_is_lost(kills, tmp_path):
    draw, context, before = random.Random(kills), multiprocessing.get_context("fork"), -1
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for number in range(kills):
        process = context.Process(target=programs.train_and_save, args=(tmp_path, number % 2 == 1))
        process.start()
        lines, deadline = len(losses(tmp_path)), time.monotonic() + 60
        while (len(losses(tmp_path)) == lines or not committed(tmp_path)) and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.1))
        process.kill()
        process.join()
        if saved := committed(tmp_path):
            read_whole(saved[-1])
            assert step_of(saved[-1]) >= before, "a kill has lost a checkpoint"
            before = step_of(saved[-1])
    found = losses(tmp_path)
    uninterrupted = programs.losses(max(step for step, _ in found) + 1)
    torch.set_num_threads(threads)
    assert before > 0 and all(loss == uninterrupted[step] for step, loss in found)
