"""Who holds which block of keys and values: reference counts, a cache of prefixes, eviction, copies on write, swapping.

    free ──allocate──▶ used (1 or more holders) ──release──▶ free, or cached if its prefix is cached
      ▲                  ▲                                     │
      └─── evicted ──────┴──────── share, on a hit ────────────┘      free + cached + used = total, always

Numbers only: what has to be copied or swapped is noted in `moves`, and whoever executes the next step moves the keys
and values before its pass reads or writes any.
Paging: Kwon et al. 2023, §4.2-4.4. Every operation costs O(1) per block, whatever the size of the pool. The pool is not
locked: the engine that owns it takes one lock around everything that schedules.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from minillm.serve.numbers import check_whole

COPY, TO_HOST, FROM_HOST, RECEIVE, CLOSE = range(5)  # kinds of `BlockPool.moves`
OF_WINDOWED = 8  # added to the kind of a move: of a block of `BlockPool.windowed`


class Prefix:
    """The tokens from the start of a sequence to the end of one full block, as a chain of blocks: the key of the cache.

    The hash covers the whole chain and is the same in every process, for a router to compare. Equality compares every
    token; chains that were found equal share their objects from then on, where the next comparison ends.
    """

    __slots__ = ("hash", "parent", "tokens")

    def __init__(self, parent: "Prefix | None", tokens: tuple):
        self.parent, self.tokens = parent, tokens
        self.hash = hash((0 if parent is None else parent.hash, tokens))

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        mine, theirs, equal = self, other, []
        while mine is not theirs:
            if not isinstance(mine, Prefix) or not isinstance(theirs, Prefix):
                return False
            if mine.hash != theirs.hash or mine.tokens != theirs.tokens:
                return False
            equal.append((mine, theirs))
            mine, theirs = mine.parent, theirs.parent
        for one, another in equal:
            one.parent = another.parent
        return True


def cache_namespace(adapter: str | None = None, salt: str | None = None) -> Prefix:
    """Where chains begin. Keys and values depend on the adapter; a tenant's salt keeps its prefixes to itself. Both are
    digested, because Python's own hash of a text differs from process to process."""
    digest = blake2b(repr((adapter, salt)).encode(), digest_size=32).digest()
    return Prefix(None, (int.from_bytes(digest),))


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens on the device, `num_host_blocks` on the host to swap to.

    window: the sliding window of all layers whose keys are in its blocks; sequences give back the blocks before it,
    which stay cached until they are evicted. windowed: where some layers see everything and others have a window, the
    pool of the latter, so that their blocks can go; a sequence has a table in each (`held.py`), as in vLLM
    (https://github.com/vllm-project/vllm/blob/main/docs/design/hybrid_kv_cache_manager.md), and this pool's moves are
    those of both.

    moves: (COPY, TO_HOST or FROM_HOST, source, target) of blocks whose contents have to move, in this order, because a
    later one may overwrite what an earlier one reads. Among them (RECEIVE, ticket, block), which waits for keys from
    elsewhere, and (CLOSE, ticket, 0), when none of that ticket waits any more, see `transfer/receive.py`.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        num_host_blocks: int = 0,
        prefix_cache: bool = True,
        window: int | None = None,
        windowed: "BlockPool | None" = None,
    ):
        check_whole("num_blocks", num_blocks, 1)
        check_whole("block_size", block_size, 1)
        check_whole("num_host_blocks", num_host_blocks, 0)
        self.total, self.block_size, self.prefix_cache = num_blocks, block_size, prefix_cache
        self.num_host_blocks, self.window, self.windowed = num_host_blocks, window, windowed
        self.kinds = (self,) if windowed is None else (self, windowed)
        self.evicted = self.copied = 0
        self.reset()

    def reset(self) -> None:
        """All blocks are free and nothing is cached, whatever was before."""
        self.references = [0] * self.total
        self._free = list(reversed(range(self.total)))
        self._free_host = list(reversed(range(self.num_host_blocks)))
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached without a holder, the least recently used first
        self._cache: dict[Prefix, int] = {}
        self._prefix: list[Prefix | None] = [None] * self.total
        self.moves: list[tuple[int, int, int]] = []
        self.withheld: frozenset[int] = frozenset()  # cached, and no lookup finds them for now
        if self.windowed is not None:
            self.windowed.reset()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        """Blocks that nobody holds and a hit could still revive."""
        return len(self._idle)

    @property
    def available(self) -> int:
        """What can be allocated: free blocks, and cached ones by eviction."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        return self.total - self.available

    @property
    def free_host(self) -> int:
        return len(self._free_host)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def first_needed(self, computed: int) -> int:
        """The first block that tokens from place `computed` on see, as its place in the sequence."""
        return 0 if self.window is None else max(0, computed - self.window + 1) // self.block_size

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one holder each; free ones first, then the cached one that was unused for longest."""
        if count > self.available:
            raise RuntimeError(f"{count} blocks asked of a pool with {self.available} available: check `available`.")
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in blocks:
            self.references[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> list[int]:
        """One more holder of each: of a fork's blocks, or of a hit's, which leave the queue of eviction."""
        for block in blocks:
            if self.references[block] == 0:
                if block not in self._idle:
                    raise ValueError(f"block {block} is free: only a held or cached block can be shared.")
                del self._idle[block]
            self.references[block] += 1
        return list(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        """One holder of each less. The last of a sequence goes first, so that a prefix is evicted from its end."""
        for block in reversed(blocks):
            if self.references[block] == 0:
                raise ValueError(f"block {block} is released twice: nobody holds it.")
            self.references[block] -= 1
            if self.references[block] == 0:
                if self._prefix[block] is None:
                    self._free.append(block)
                else:
                    self._idle[block] = None

    def copy_on_write(self, blocks: list[int], index: int) -> None:
        """After this blocks[index] has one holder, which may write into it: a shared block is replaced by a copy."""
        shared = blocks[index]
        if self.references[shared] == 1:
            return
        [blocks[index]] = self.allocate(1)
        self.moves.append((COPY, shared, blocks[index]))
        self.release([shared])
        self.copied += 1

    def lookup(self, chain: Iterable[Prefix]) -> list[int]:
        """The blocks of the longest cached beginning of a chain; not yet held: `share` them before anything else."""
        hits: list[int] = []
        for prefix in chain:
            block = self._cache.get(prefix)
            if block is None or block in self.withheld:
                break
            hits.append(block)
        return hits

    def lookup_seen(self, chain: Sequence[Prefix]) -> list[int]:
        """`lookup` for a window: of a beginning only the blocks that its next token sees have to be cached; any number
        stands for the others."""
        seen: list[int] = []  # from the end
        for place in reversed(range(len(chain))):
            found = self.lookup(chain[place : place + 1])
            seen = [] if not found else seen
            seen += found
            if found and place <= self.first_needed((place + len(seen)) * self.block_size):
                break
        return [0] * place + seen[::-1] if seen else []

    def idle(self, blocks: Iterable[int]) -> int:
        """How many of the blocks nobody holds: sharing them takes them out of `available`."""
        return sum(self.references[block] == 0 for block in blocks)

    def cache_block(self, block: int, prefix: Prefix) -> None:
        """The held block contains (or will, when this step is computed) the last block of `prefix`: others may share.

        Does nothing if the prefix is cached in another block already.
        """
        if self.prefix_cache and self._prefix[block] is None and prefix not in self._cache:
            self._cache[prefix], self._prefix[block] = block, prefix

    def invalidate(self, blocks: Iterable[int], chain: Iterable[Prefix]) -> None:
        """A sequence's blocks turned out to be wrong: no lookup finds them. chain: its prefixes, as far as any of the
        blocks is cached. A block that it gave back, and that holds another prefix by now, is left alone."""
        for block, prefix in zip(blocks, chain, strict=False):
            if self._prefix[block] == prefix:
                del self._cache[prefix]
                self._prefix[block] = None
                if block in self._idle:
                    del self._idle[block]
                    self._free.append(block)

    def swap_out(self, blocks: Sequence[int]) -> list[int]:
        """Moves the blocks to the host and releases them; returns the host blocks. Needs as many in `free_host`."""
        if len(blocks) > len(self._free_host):
            raise RuntimeError(f"{len(blocks)} blocks do not fit the host's {len(self._free_host)} free ones.")
        host_blocks = [self._free_host.pop() for _ in blocks]
        self.moves += [(TO_HOST, block, host) for block, host in zip(blocks, host_blocks, strict=True)]
        self.release(blocks)
        return host_blocks

    def swap_in(self, host_blocks: Sequence[int], blocks: Sequence[int], *, skip: int = 0) -> None:
        """Moves host_blocks[i] back into blocks[i], but for the first `skip` (cache hits); frees the host_blocks."""
        back = list(zip(host_blocks, blocks, strict=False))[skip:]
        self.moves += [(FROM_HOST, host, block) for host, block in back]
        self.drop(host_blocks)

    def drop(self, host_blocks: Sequence[int]) -> None:
        """Gives host_blocks on the host back unread."""
        self._free_host.extend(host_blocks)

    def take_moves(self) -> list[tuple[int, int, int]]:
        """The moves so far, for whoever carries them out."""
        moves, self.moves = self.moves, []
        if self.windowed is not None:
            moves += [(kind + OF_WINDOWED, *blocks) for kind, *blocks in self.windowed.take_moves()]
        return moves

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        del self._cache[self._prefix[block]]
        self._prefix[block] = None
        self.evicted += 1
        return block
