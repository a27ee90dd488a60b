"""The blocks that a sequence holds of each pool: one table, or two where only some layers have a sliding window.

    layers that see everything      `pool`             all blocks of the sequence
    layers with a sliding window    `pool.windowed`    from the first block on that its next token sees

Both tables count the same blocks of tokens, so they are equally long; what is hit or swapped is so in both. A prefix is
a hit if the first pool has all of its blocks and the second those that its next token sees.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Chain

from minillm.serve.schedule.blocks import BlockPool, Prefix
from minillm.serve.schedule.sequence import Held, Sequence


def tables(pool: BlockPool, sequence: Sequence) -> Iterator[tuple[BlockPool, Held]]:
    """Each pool with what the sequence holds of it."""
    return zip(pool.kinds, (sequence, sequence.windowed), strict=False)


def hits(pool: BlockPool, chain: Chain[Prefix]) -> list[list[int]]:
    """The blocks of the longest cached beginning of a chain in each pool, as `BlockPool.lookup` and `lookup_seen`."""
    found: list[list[int]] = []
    for each in pool.kinds:
        found.append(each.lookup(chain) if each.window is None else each.lookup_seen(chain))
        chain = chain[: len(found[-1])]
    return [blocks[: len(chain)] for blocks in found]


def available(pool: BlockPool) -> int:
    """Blocks that can be allocated in each pool."""
    return min([each.available for each in pool.kinds])


def allocate(pool: BlockPool, sequence: Sequence, count: int) -> None:
    """Blocks for its next tokens."""
    for each, held in tables(pool, sequence):
        held.blocks += each.allocate(count)


def share(pool: BlockPool, sequence: Sequence, other: Sequence) -> None:
    """The other, a new one, holds what the sequence holds."""
    for (each, held), (_, copy) in zip(tables(pool, sequence), tables(pool, other), strict=True):
        copy.blocks, copy.first_block = held.blocks.copy(), held.first_block
        each.share(held.held_blocks)


def cache(pool: BlockPool, sequence: Sequence, start: int, end: int) -> None:
    """Its blocks from `start` to `end` can be hit."""
    chain = sequence.prefixes(end, pool.block_size)
    for each, held in tables(pool, sequence):
        first = max(start, held.first_block)
        for block, prefix in zip(held.blocks[first:end], chain[first:], strict=True):
            each.cache_block(block, prefix)


def invalidate(pool: BlockPool, sequence: Sequence, first: int = 0) -> None:
    """Its blocks from the first on are wrong: see `BlockPool.invalidate`."""
    for each, held in tables(pool, sequence):
        each.invalidate(held.blocks[first:], sequence.block_hashes[first:])


def release_behind(pool: BlockPool, sequence: Sequence) -> None:
    """Blocks of draft tokens that were not accepted."""
    end = pool.blocks_for(sequence.num_tokens - 1)
    for each, held in tables(pool, sequence):
        each.release(held.blocks[end:])
        del held.blocks[end:]


def release_unseen(pool: BlockPool, sequence: Sequence) -> None:
    """Blocks that none of its next tokens sees. Those that are cached can be hit until they are evicted."""
    for each, held in tables(pool, sequence):
        first, end = held.first_block, min(each.first_needed(sequence.num_certain), len(held.blocks))
        each.release(held.blocks[first:end])
        held.first_block = max(first, end)


def release_all(pool: BlockPool, sequence: Sequence) -> None:
    """All that it holds, wherever it is."""
    for each, held in tables(pool, sequence):
        each.release(held.held_blocks)
        each.drop(held.host_blocks)
        held.blocks, held.host_blocks = [], []


def swap_out(pool: BlockPool, sequence: Sequence) -> bool:
    """Its computed blocks go to the host. False, and nothing is done, if there is no room for them."""
    end = pool.blocks_for(sequence.num_computed)
    if not all(0 < end - held.first_block <= each.free_host for each, held in tables(pool, sequence)):
        return False
    for each, held in tables(pool, sequence):
        held.host_blocks = each.swap_out(held.blocks[held.first_block : end])
        each.release(held.blocks[end:])
        held.blocks = []
    return True
