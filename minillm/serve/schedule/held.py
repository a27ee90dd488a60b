"""The blocks that a sequence holds of each pool: one table, or two where only some layers have a sliding window.

    layers that see everything      `pool`             all blocks of the sequence
    layers with a sliding window    `pool.windowed`    from the first block on that its next token sees

Both tables count the same blocks of tokens, so they are equally long; what is hit or swapped is so in both. A prefix is
a hit if the first pool has all of its blocks and the second those that its next token sees.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Chain

from minillm.predict.model import windowed_blocks
from minillm.serve.schedule.blocks import BlockPool, Prefix
from minillm.serve.schedule.sequence import Held, Sequence


def most_held(window: int, block_size: int, piece: int) -> int:
    """Blocks with a window that one sequence holds at most. piece: of its tokens that it wants blocks for at a time
    (`Sequence.wanted`); the one before them may be taken back, so what that one sees is held, too."""
    return windowed_blocks(window, block_size, piece + 1)


class Holdings:
    """What is done to the tables of a sequence. pool: with `BlockPool.windowed`, if there is one. slides: whether any
    layer has a window."""

    def __init__(self, pool: BlockPool):
        self.pool, self.pools = pool, pool.kinds
        self.slides = any(each.window is not None for each in pool.kinds)

    def tables(self, sequence: Sequence) -> Iterator[tuple[BlockPool, Held]]:
        """Each pool with what the sequence holds of it."""
        return zip(self.pools, (sequence, sequence.windowed), strict=False)

    def hits(self, chain: Chain[Prefix]) -> list[list[int]]:
        """The blocks of the longest cached beginning of a chain in each pool, as of `lookup` and `lookup_seen`."""
        found: list[list[int]] = []
        for pool in self.pools:
            found.append(pool.lookup(chain) if pool.window is None else pool.lookup_seen(chain))
            chain = chain[: len(found[-1])]
        return [blocks[: len(chain)] for blocks in found]

    @property
    def available(self) -> int:
        """Blocks that can be allocated in each pool."""
        return min([pool.available for pool in self.pools])

    def allocate(self, sequence: Sequence, count: int) -> None:
        """Blocks for its next tokens."""
        for pool, held in self.tables(sequence):
            held.blocks += pool.allocate(count)

    def share(self, sequence: Sequence, other: Sequence) -> None:
        """The other, a new one, holds what the sequence holds."""
        for (pool, held), (_, copy) in zip(self.tables(sequence), self.tables(other), strict=True):
            copy.blocks, copy.first_block = held.blocks.copy(), held.first_block
            pool.share(held.held_blocks)

    def cache(self, sequence: Sequence, start: int, end: int) -> None:
        """The blocks that its tokens from `start` to `end` filled can be hit, also by others of this very step: a layer
        writes all its keys before it reads any. Not those that end in a placeholder."""
        size = self.pool.block_size
        start, end = start // size, min(end, sequence.num_tokens - sequence.num_pending) // size
        if self.pool.prefix_cache and start < end:
            chain = sequence.prefixes(end, size)
            for pool, held in self.tables(sequence):
                first = max(start, held.first_block)
                for block, prefix in zip(held.blocks[first:end], chain[first:], strict=True):
                    pool.cache_block(block, prefix)

    def invalidate(self, sequence: Sequence, first: int = 0) -> None:
        """Its blocks from the first on are wrong: see `BlockPool.invalidate`."""
        for pool, held in self.tables(sequence):
            pool.invalidate(held.blocks[first:], sequence.block_hashes[first:])

    def trim(self, sequence: Sequence, length: int) -> None:
        """Releases the blocks that none of its next tokens sees, and all behind the first `length`. Those that are
        cached can be hit until they are evicted."""
        for pool, held in self.tables(sequence):
            pool.release(held.blocks[length:])
            del held.blocks[length:]
            first, seen = held.first_block, min(pool.first_needed(sequence.num_certain), len(held.blocks))
            pool.release(held.blocks[first:seen])
            held.first_block = max(first, seen)

    def release_all(self, sequence: Sequence) -> None:
        """All that it holds, wherever it is."""
        for pool, held in self.tables(sequence):
            pool.release(held.held_blocks)
            pool.drop(held.host_blocks)
            held.blocks, held.first_block, held.host_blocks = [], 0, []

    def swap_out(self, sequence: Sequence) -> bool:
        """Its computed blocks go to the host. False, and nothing is done, if there is no room for them."""
        end = self.pool.blocks_for(sequence.num_computed)
        if not all(0 < end - held.first_block <= pool.free_host for pool, held in self.tables(sequence)):
            return False
        for pool, held in self.tables(sequence):
            held.host_blocks = pool.swap_out(held.blocks[held.first_block : end])
            pool.release(held.blocks[end:])
            held.blocks = []
        return True
