"""Blocks that say what is in them: a storage for checks of preemption, and pools drawn around a sequence."""

import random
from collections.abc import Sequence

from minillm.serve import BlockPool, Prefix
from minillm.serve import Sequence as Seq
from minillm.serve.schedule.blocks import cache_namespace


class LabelledBlocks:
    """A `Storage` whose blocks hold lists of token ids. out, back: blocks moved to the host, and from it.

    A block that only one sequence held is empty once it was moved; those in `shared` keep what they have.
    """

    def __init__(self):
        self.device: dict[int, list] = {}
        self.host: dict[int, list] = {}
        self.out = self.back = 0
        self.shared: frozenset[int] = frozenset()

    def copy(self, source: int, target: int) -> None:
        self.device[target] = list(self.device.get(source, []))

    def to_host(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        self.out += len(blocks)
        for block, slot in zip(blocks, slots, strict=True):
            self.host[slot] = self.device.pop(block, []) if block not in self.shared else self.device[block]

    def from_host(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        self.back += len(blocks)
        for slot, block in zip(slots, blocks, strict=True):
            self.device[block] = self.host.pop(slot, [])


def draw_pool(
    host: int | None, shared: int, *, spare: int = 6, release_other: bool = False
) -> tuple[BlockPool, LabelledBlocks, Seq, Seq]:
    """(pool, its storage, a running sequence, another that shares its first blocks): some tokens computed, not all.

    host: blocks of the host; None: as many as the sequence fills.
    shared: full first blocks that both hold, cached. release_other: the other one has ended since.
    """
    size, blocks = 4, random.randint(5, 8)
    tokens = [random.randrange(1000) for _ in range(blocks * size - random.randrange(size))]
    computed = random.randint(max(1, shared) * size + 1, len(tokens) - 1)
    computed = min(computed, (blocks - 1) * size)  # the last block is still empty
    host = -(-computed // size) if host is None else host
    pool, storage = BlockPool(blocks + 2 + spare, size, num_host_blocks=host), LabelledBlocks()
    pool.storage = storage
    pool.release(drawn := pool.allocate(pool.total))
    random.shuffle(drawn)
    sequence = Seq(tokens, len(tokens) + 8, name="q", num_computed=computed)
    sequence.blocks = pool.allocate(blocks)
    for place, block in enumerate(sequence.blocks):
        storage.device[block] = tokens[place * size : min((place + 1) * size, computed)]
    prefix = cache_namespace()
    for place in range(shared):
        prefix = Prefix(prefix, tuple(tokens[place * size : (place + 1) * size]))
        pool.cache_block(sequence.blocks[place], prefix)
    other = Seq([*tokens[: shared * size], 0], 40, name="other", num_computed=shared * size)
    other.blocks = pool.share(sequence.blocks[:shared]) + pool.allocate(1)
    storage.shared = frozenset(sequence.blocks[:shared])
    if release_other:
        pool.release(other.blocks)
        other.blocks = []
    return pool, storage, sequence, other


def contents(storage: LabelledBlocks, sequence: Seq, size: int) -> list:
    """What the blocks of a sequence hold, token by token, as far as each is filled."""
    found: list = []
    for block in sequence.blocks:
        held = storage.device.get(block, [])
        found += held + [None] * (size - len(held))
    return found
