"""The pool as a state machine over real contents: whoever reads through a block table finds his own tokens."""

import os
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from minillm.serve.schedule import blocks as blocks_module
from minillm.serve.schedule.blocks import FROM_HOST, TO_HOST, BlockPool, Prefix, cache_namespace

SIZE, TOTAL, HOST = 3, 8, 4


class Contents:
    """The tokens in blocks on the device and on the host, moved as a runner moves them: not before they are used."""

    def __init__(self, pool):
        self.pool = pool
        self.on_device = {block: [] for block in range(TOTAL)}
        self.host = {slot: [] for slot in range(HOST)}

    @property
    def device(self):
        for kind, source, target in self.pool.take_moves():
            read = self.host if kind == FROM_HOST else self.on_device
            written = self.host if kind == TO_HOST else self.on_device
            written[target] = list(read[source])
        return self.on_device


class Reader:
    def __init__(self, tokens, tenant):
        self.tokens, self.tenant, self.blocks, self.host_blocks = list(tokens), tenant, [], []

    @property
    def chain(self):
        chain = [cache_namespace(None, self.tenant)]
        for start in range(0, len(self.tokens) - SIZE + 1, SIZE):
            chain.append(Prefix(chain[-1], tuple(self.tokens[start : start + SIZE])))
        return chain[1:]


class Pool(RuleBasedStateMachine):
    readers = Bundle("readers")

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(TOTAL, SIZE, num_host_blocks=HOST)
        self.contents = Contents(self.pool)
        self.alive = []

    def write(self, reader, start):
        for place in range(start, len(reader.tokens)):
            cells = self.contents.device[reader.blocks[place // SIZE]]
            cells[place % SIZE :] = [reader.tokens[place]]
        for block, prefix in zip(reader.blocks, reader.chain, strict=False):
            self.pool.cache_block(block, prefix)

    @rule(
        target=readers, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12), tenant=st.sampled_from([None, "a"])
    )
    def arrive(self, tokens, tenant):
        reader = Reader(tokens, tenant)
        hits = self.pool.lookup(reader.chain)
        fresh = self.pool.blocks_for(len(tokens)) - len(hits)
        if fresh + self.pool.idle(hits) <= self.pool.available:
            reader.blocks = self.pool.share(hits) + self.pool.allocate(fresh)
            self.write(reader, len(hits) * SIZE)
            self.alive.append(reader)
        return reader

    @rule(reader=readers, token=st.integers(0, 1))
    def append(self, reader, token):
        index, here = len(reader.tokens) // SIZE, self.pool.available > 0
        if reader in self.alive and not reader.host_blocks and here:
            if index == len(reader.blocks):
                reader.blocks += self.pool.allocate(1)
            self.pool.copy_on_write(reader.blocks, index)
            reader.tokens.append(token)
            self.write(reader, len(reader.tokens) - 1)

    @rule(target=readers, reader=readers)
    def fork(self, reader):
        child = Reader(reader.tokens, reader.tenant)
        if reader in self.alive and not reader.host_blocks:
            child.blocks = self.pool.share(reader.blocks)
            self.alive.append(child)
        return child

    @rule(reader=readers)
    def leave(self, reader):
        if reader in self.alive:
            self.alive.remove(reader)
            self.pool.release(reader.blocks)
            self.pool.drop(reader.host_blocks)

    @rule(reader=readers)
    def swap_out(self, reader):
        if reader in self.alive and reader.blocks and len(reader.blocks) <= self.pool.free_host:
            reader.host_blocks, reader.blocks = self.pool.swap_out(reader.blocks), []

    @rule(reader=readers)
    def swap_in(self, reader):
        hits = self.pool.lookup(reader.chain)
        fresh = len(reader.host_blocks) - len(hits)
        if reader in self.alive and reader.host_blocks and fresh + self.pool.idle(hits) <= self.pool.available:
            reader.blocks = self.pool.share(hits) + self.pool.allocate(fresh)
            self.pool.swap_in(reader.host_blocks, reader.blocks, skip=len(hits))
            reader.host_blocks = []

    @precondition(lambda self: self.pool._cache)
    @rule(data=st.data())
    def forget(self, data):
        block = data.draw(st.sampled_from(sorted(self.pool._cache.values())))
        self.pool.invalidate([block], [self.pool._prefix[block]])

    @invariant()
    def counts_agree(self):
        pool = self.pool
        holders = Counter(block for reader in self.alive for block in reader.blocks)
        assert [holders[block] for block in range(TOTAL)] == pool.references
        assert pool.free + pool.cached + pool.used == TOTAL and pool.used == len(holders)
        assert pool.free_host + sum(len(reader.host_blocks) for reader in self.alive) == HOST
        assert set(pool._free).isdisjoint(pool._idle) and len(set(pool._free)) == pool.free
        assert {block: prefix for prefix, block in pool._cache.items()} == {
            block: prefix for block, prefix in enumerate(pool._prefix) if prefix is not None
        }

    @invariant()
    def everyone_reads_his_own_tokens(self):
        for reader in self.alive:
            if not reader.host_blocks:
                read = [token for block in reader.blocks for token in self.contents.device[block]]
                assert read[: len(reader.tokens)] == reader.tokens

    def teardown(self):
        while self.alive:
            self.leave(self.alive[0])
        assert self.pool.references == [0] * TOTAL and self.pool.used == 0 and self.pool.free_host == HOST
        assert len(self.pool.allocate(TOTAL)) == TOTAL and not self.pool._cache


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40)


class TestPoolWhereAllHashesCollide(Pool.TestCase):
    """One hash for every prefix: only the comparison of tokens keeps readers apart."""

    settings = settings(max_examples=15, stateful_step_count=30)

    @pytest.fixture(autouse=True)
    def collide(self, monkeypatch):
        monkeypatch.setattr(blocks_module, "hash", lambda value: 7, raising=False)
        assert hash(cache_namespace()) == hash(Prefix(cache_namespace(), (1,)))


def chain_of(tokens, **key):
    chain = [cache_namespace(**key)]
    for start in range(0, len(tokens), 2):
        chain.append(Prefix(chain[-1], tuple(tokens[start : start + 2])))
    return chain[1:]


@pytest.mark.parametrize("collide", [False, True])
def test_a_hit_needs_the_same_tokens_before_it_and_the_same_owner(collide, monkeypatch):
    if collide:
        monkeypatch.setattr(blocks_module, "hash", lambda value: 7, raising=False)
    pool = BlockPool(8, 2)
    blocks = pool.allocate(2)
    for block, prefix in zip(blocks, chain_of([1, 2, 3, 4], adapter="poet", salt="x"), strict=True):
        pool.cache_block(block, prefix)
    assert pool.lookup(chain_of([1, 2, 3, 4, 5, 6], adapter="poet", salt="x")) == blocks
    assert pool.lookup(chain_of([1, 2, 9, 9, 3, 4], adapter="poet", salt="x")) == blocks[:1]
    assert pool.lookup(chain_of([3, 4], adapter="poet", salt="x")) == []  # same tokens, another position
    assert pool.lookup(chain_of([1, 258], adapter="poet", salt="x")) == []  # 258 is 2 in its last byte
    for other in ({}, {"adapter": "poet"}, {"salt": "x"}, {"adapter": "x", "salt": "poet"}):
        assert pool.lookup(chain_of([1, 2, 3, 4], **other)) == []


def test_the_least_recently_used_goes_first_and_from_its_end():
    pool = BlockPool(4, 2)
    old, new = pool.allocate(2), pool.allocate(2)
    chains = chain_of([1, 1, 1, 1]), chain_of([2, 2, 2, 2])
    for blocks, chain in zip((old, new), chains, strict=True):
        for block, prefix in zip(blocks, chain, strict=True):
            pool.cache_block(block, prefix)
    pool.release(old)
    pool.release(new)
    assert (pool.free, pool.cached, pool.used) == (0, 4, 0)
    pool.release(pool.share(pool.lookup(chains[0])))  # used again: now the other one is older
    pool.allocate(1)
    assert pool.lookup(chains[1]) == new[:1] and pool.lookup(chains[0]) == old
    pool.allocate(1)
    assert pool.lookup(chains[1]) == [] and pool.evicted == 2


def test_copy_on_write_copies_one_block_per_fork():
    pool = BlockPool(TOTAL, SIZE)
    contents = Contents(pool)
    tables = [pool.allocate(2)]
    contents.device[tables[0][1]] = [5]
    tables += [pool.share(tables[0]) for _ in range(2)]
    for table in tables:
        pool.copy_on_write(table, 1)
    assert pool.copied == 2 and len({table[1] for table in tables}) == 3 and pool.used == 4
    assert all(contents.device[table[1]] == [5] for table in tables)


def test_what_is_still_cached_is_not_copied_back():
    pool = BlockPool(4, 2, num_host_blocks=4)
    blocks, chain = pool.allocate(3), chain_of([1, 2, 3, 4, 5, 6])
    for block, prefix in zip(blocks[:2], chain, strict=False):
        pool.cache_block(block, prefix)
    slots = pool.swap_out(blocks)
    assert pool.take_moves() == [(TO_HOST, block, slot) for block, slot in zip(blocks, slots, strict=True)]
    back = pool.share(pool.lookup(chain)) + pool.allocate(1)
    pool.swap_in(slots, back, skip=2)
    assert back[:2] == blocks[:2] and pool.moves == [(FROM_HOST, slots[2], back[2])] and pool.free_host == 4


def test_misuse_is_told():
    for name, value in (("num_blocks", 0), ("block_size", 1.5), ("num_host_blocks", -1)):
        with pytest.raises(ValueError, match=f"{name} {value} must be a whole number"):
            BlockPool(**{"num_blocks": 1, "block_size": 1} | {name: value})
    pool = BlockPool(2, 4, num_host_blocks=1)
    blocks = pool.allocate(2)
    with pytest.raises(RuntimeError, match="1 blocks asked of a pool with 0 available"):
        pool.allocate(1)
    with pytest.raises(RuntimeError, match="2 blocks do not fit the host's 1"):
        pool.swap_out(blocks)
    pool.release(blocks)
    with pytest.raises(ValueError, match="released twice"):
        pool.release(blocks)
    with pytest.raises(ValueError, match="only a held or cached block"):
        pool.share(blocks)


class CountedTokens(tuple):
    compared = 0

    def __ne__(self, other):
        CountedTokens.compared += 1
        return tuple.__ne__(self, other)


def counted_chain(blocks):
    prefixes = [cache_namespace()]
    for number in range(blocks):
        prefixes.append(Prefix(prefixes[-1], CountedTokens((number, number))))
    return prefixes[1:]


def test_a_lookup_compares_each_cached_block_once():
    blocks = 400
    pool = BlockPool(blocks, 2)
    held = pool.allocate(blocks)
    for block, prefix in zip(held, counted_chain(blocks), strict=True):
        pool.cache_block(block, prefix)
    CountedTokens.compared, mine = 0, counted_chain(blocks)
    assert pool.lookup(mine) == held
    assert CountedTokens.compared <= 2 * blocks
    CountedTokens.compared = 0
    assert pool.lookup(mine) == held  # again, as a request that waits for blocks does at every step
    assert CountedTokens.compared <= 2 * blocks


def test_so_does_one_that_asks_for_the_last_blocks_only():
    """`lookup_seen`, for a window, and after an eviction: the chain is walked once, not once for each block."""
    blocks = 400
    pool = BlockPool(blocks, 2, window=600)
    for block, prefix in zip(pool.allocate(blocks), counted_chain(blocks), strict=True):
        pool.cache_block(block, prefix)
    CountedTokens.compared = 0
    assert len(pool.lookup_seen(counted_chain(blocks))) == blocks
    assert CountedTokens.compared <= 2 * blocks


def test_the_hash_of_a_prefix_is_the_same_in_every_process():
    code = (
        "from minillm.serve.schedule.blocks import Prefix, cache_namespace as root\n"
        "said = hash(Prefix(Prefix(root('adapter', 'tenant'), (1, 2, 3)), (4,))), hash(root()), hash(root('a', 'b'))"
    )
    here = {}
    exec(code, here)
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    command = [sys.executable, "-c", f"{code}\nprint(*said)"]
    there = subprocess.run(command, env=environment, capture_output=True, text=True).stdout
    assert there.split() == [str(each) for each in here["said"]]
    assert len(set(here["said"])) == 3
