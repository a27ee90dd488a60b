"""Blocks that say what is in them, for checks of preemption, and pools drawn around a sequence."""

import random

from minillm.serve import BlockPool, Prefix
from minillm.serve import Sequence as Seq
from minillm.serve.schedule.blocks import COPY, TO_HOST, cache_namespace


class LabelledBlocks:
    """What is in a pool's blocks: lists of token ids. out, back: blocks moved to the host, and from it.

    A block that only one sequence held is empty once it was moved; those in `shared` keep what they have.
    """

    def __init__(self, pool: BlockPool):
        self.pool = pool
        self.device: dict[int, list] = {}
        self.host: dict[int, list] = {}
        self.out = self.back = 0
        self.shared: frozenset[int] = frozenset()

    def settle(self) -> None:
        """Carries out the moves that the pool has noted."""
        for kind, source, target in self.pool.take_moves():
            if kind == COPY:
                self.device[target] = list(self.device.get(source, []))
            elif kind == TO_HOST:
                self.out += 1
                self.host[target] = self.device[source] if source in self.shared else self.device.pop(source, [])
            else:
                self.back += 1
                self.device[target] = self.host.pop(source, [])


def draw_pool(
    host: int | None, shared: int, *, spare: int = 6, release_other: bool = False
) -> tuple[BlockPool, LabelledBlocks, Seq, Seq]:
    """(pool, its contents, a running sequence, another that shares its first blocks): some tokens computed, not all.

    host: blocks of the host; None: as many as the sequence fills.
    shared: full first blocks that both hold, cached. release_other: the other one has ended since.
    """
    size, blocks = random.choice((3, 4, 5)), random.randint(max(5, shared + 2), 8)
    tokens = [random.randrange(1000) for _ in range(blocks * size - random.randrange(size))]
    computed = random.randint(max(1, shared) * size + 1, len(tokens) - 1)
    computed = min(computed, (blocks - 1) * size)  # the last block is still empty
    host = -(-computed // size) if host is None else host
    pool = BlockPool(blocks + 2 + spare, size, num_host_blocks=host)
    labelled = LabelledBlocks(pool)
    pool.release(drawn := pool.allocate(pool.total))
    random.shuffle(drawn)
    sequence = Seq(tokens, len(tokens) + 8, name="q", num_computed=computed)
    sequence.blocks = pool.allocate(blocks)
    for place, block in enumerate(sequence.blocks):
        labelled.device[block] = tokens[place * size : min((place + 1) * size, computed)]
    prefix = cache_namespace()
    for place in range(shared):
        prefix = Prefix(prefix, tuple(tokens[place * size : (place + 1) * size]))
        pool.cache_block(sequence.blocks[place], prefix)
    other = Seq([*tokens[: shared * size], 0], 40, name="other", num_computed=shared * size)
    other.blocks = pool.share(sequence.blocks[:shared]) + pool.allocate(1)
    labelled.shared = frozenset(sequence.blocks[:shared])
    if release_other:
        pool.release(other.blocks)
        other.blocks = []
    return pool, labelled, sequence, other


def contents(labelled: LabelledBlocks, sequence: Seq, size: int) -> list:
    """What the blocks of a sequence hold, token by token, as far as each is filled."""
    found: list = []
    for block in sequence.blocks:
        held = labelled.device.get(block, [])
        found += held + [None] * (size - len(held))
    return found
