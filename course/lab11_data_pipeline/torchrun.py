"""Deals the samples of several epochs to any number of ranks and counts that none got one twice.

python 11_data_pipeline.py                                 4 ranks on this machine
torchrun --nproc-per-node 4 11_data_pipeline.py            the same under torchrun
torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d \\
    --rdzv-endpoint HOST:29500 11_data_pipeline.py         on each of two nodes
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from course.kit import Row, row
from course.kit.torchrun import attempt, run
from minillm import measure
from minillm.comm import Group
from minillm.data.sampler import permutation

NUM_SAMPLES, BATCH_SIZE, SEED = 1000, 8, 0


def deal(position, order, num_samples, batch_size, rank, world_size) -> list[int]:
    """This rank's `batch_size` samples of the step that begins at `position` of the stream of all
    epochs."""
    # BEGIN SOLUTION
    places = [position + rank + world_size * i for i in range(batch_size)]
    return [int(order(place // num_samples)[place % num_samples]) for place in places]
    # END SOLUTION


def rank_program(group: Group) -> dict[str, Any]:
    return attempt({"deal": deal_two_epochs}, group)


def deal_two_epochs(group: Group) -> tuple[list[int], int]:
    """This rank's samples of at least two epochs, and the messages it sent to know them."""
    samples, position = [], 0
    with measure.ledger() as led:
        while position < 2 * NUM_SAMPLES:
            samples += deal(position, order, NUM_SAMPLES, BATCH_SIZE, group.rank, group.world_size)
            position += BATCH_SIZE * group.world_size
    return samples, led.messages


def order(epoch: int):
    """The same on every rank: drawn from (seed, epoch)."""
    return permutation(NUM_SAMPLES, SEED, epoch)


def judge(name: str, ranks: list[tuple[list[int], int]]) -> Iterator[Row]:
    times_shown = Counter(sample for samples, _ in ranks for sample in samples)
    dealt = times_shown.total()
    yield row(f"samples dealt, {NUM_SAMPLES} per epoch", None, dealt)
    yield row("times the rarest sample was shown", dealt // NUM_SAMPLES, min(times_shown.values()))
    yield row("times the most frequent was", -(-dealt // NUM_SAMPLES), max(times_shown.values()))
    yield row("messages between the ranks", 0, sum(messages for _, messages in ranks))


if __name__ == "__main__":
    run("lab 11", rank_program, judge)
