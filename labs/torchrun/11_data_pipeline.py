"""Deals the samples of several epochs to any number of ranks and counts that none got one twice.

python 11_data_pipeline.py                                 4 ranks on this machine
torchrun --nproc-per-node 4 11_data_pipeline.py            the same under torchrun
torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d \\
    --rdzv-endpoint HOST:29500 11_data_pipeline.py         on each of two nodes
"""

from collections import Counter

from course.kit import receipt, row
from minillm import measure
from minillm.comm import Group, is_root, launch
from minillm.data.sampler import permutation

NUM_SAMPLES, BATCH_SIZE, SEED = 1000, 8, 0


def deal(position, order, num_samples, batch_size, rank, world_size) -> list[int]:
    """This rank's `batch_size` samples of the step that begins at `position` of the stream of all
    epochs."""
    raise NotImplementedError


def program(group: Group) -> tuple[list[int], int] | None:
    """What one rank does: (the samples of at least two epochs that it got,
    messages it sent to know them).

    None while `deal` is not written yet.
    """
    samples, position = [], 0
    try:
        with measure.ledger() as led:
            while position < 2 * NUM_SAMPLES:
                place = group.rank, group.world_size
                samples += deal(position, order, NUM_SAMPLES, BATCH_SIZE, *place)
                position += BATCH_SIZE * group.world_size
    except NotImplementedError:
        return None
    return samples, led.messages


def order(epoch: int):
    """The same on every rank: drawn from (seed, epoch)."""
    return permutation(NUM_SAMPLES, SEED, epoch)


if __name__ == "__main__":
    results = launch(program, 4)
    if is_root() and None in results:
        print("deal: not written yet")
    elif is_root():
        seen = Counter(sample for samples, _ in results for sample in samples)
        dealt = sum(seen.values())
        rows = [
            row("times the rarest sample was shown", dealt // NUM_SAMPLES, min(seen.values())),
            row("times the most frequent was", -(-dealt // NUM_SAMPLES), max(seen.values())),
            row("messages between the ranks", 0, sum(messages for _, messages in results)),
        ]
        print(receipt(f"{dealt} of {NUM_SAMPLES} samples on {len(results)} ranks", rows))
