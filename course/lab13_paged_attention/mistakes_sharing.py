"""Spoilers of lab 13, sharing: keys, hits, copies and evictions as people get them wrong, and right ones that look
different."""

import hashlib
import zlib
from array import array

from course.kit.answers import answers_of
from course.kit.exercises import alternative, mistake

right = answers_of("13_paged_attention")

# Keys.


def chained(tokens, block_size, start, encode):
    parent, keys = start, []
    for at in range(0, len(tokens) - block_size + 1, block_size):
        parent = hashlib.sha256(parent + encode(tokens[at : at + block_size])).digest()
        keys.append(parent)
    return keys


def plain(block):
    return repr(list(block)).encode()


def beginning(adapter, salt):
    return repr((adapter, salt)).encode()


@mistake("block-keys", "one byte of each token", expect="hash whole ids")
def one_byte(tokens, block_size, adapter=None, salt=None):
    return chained(tokens, block_size, beginning(adapter, salt), lambda block: bytes(t & 0xFF for t in block))


@mistake("block-keys", "two bytes of each token", expect="not their last two bytes")
def two_bytes(tokens, block_size, adapter=None, salt=None):
    return chained(
        tokens,
        block_size,
        beginning(adapter, salt),
        lambda block: b"".join((t & 0xFFFF).to_bytes(2, "big") for t in block),
    )


@mistake("block-keys", "a block and its place", expect="chain in the key of the block before")
def with_its_place(tokens, block_size, adapter=None, salt=None):
    starts = range(0, len(tokens) - block_size + 1, block_size)
    return [hash((adapter, "and", salt, at, tuple(tokens[at : at + block_size]))) for at in starts]


@mistake("block-keys", "a key for the last block too, full or not", expect="can still be written to")
def partial_too(tokens, block_size, adapter=None, salt=None):
    padded = [*tokens, *[-1] * (-len(tokens) % block_size)]
    return right.block_keys(padded, block_size, adapter, salt)


@mistake("block-keys", "no adapter in it", expect="an adapter changes the weights")
def no_adapter(tokens, block_size, adapter=None, salt=None):
    return right.block_keys(tokens, block_size, None, salt)


@mistake("block-keys", "no salt in it", expect="tenants with different salts")
def no_salt(tokens, block_size, adapter=None, salt=None):
    return right.block_keys(tokens, block_size, adapter, None)


@mistake("block-keys", "adapter and salt in one list of strings", expect="keep the two apart")
def run_together(tokens, block_size, adapter=None, salt=None):
    extra = [value for value in (adapter, salt) if value]
    return chained(tokens, block_size, repr(extra).encode(), plain)


@mistake("block-keys", "adapter and salt joined as text", expect="where the adapter ends|keep the two apart")
def joined(tokens, block_size, adapter=None, salt=None):
    return chained(tokens, block_size, f"{adapter}{salt}".encode(), plain)


@mistake("block-keys", "adapter and salt with a sign between them", expect="where the adapter ends")
def joined_by_a_sign(tokens, block_size, adapter=None, salt=None):
    return chained(tokens, block_size, f"{adapter}|{salt}".encode(), plain)


@mistake("block-keys", "no adapter is the adapter called None", expect="must not be the same as no adapter")
def none_as_text(tokens, block_size, adapter=None, salt=None):
    return chained(tokens, block_size, f"{len(str(adapter))}:{adapter}{salt}".encode(), plain)


@mistake("block-keys", "a checksum of 32 bits", expect="these keys have 32 bits")
def checksums(tokens, block_size, adapter=None, salt=None):
    parent, keys = zlib.crc32(beginning(adapter, salt)), []
    for at in range(0, len(tokens) - block_size + 1, block_size):
        parent = zlib.crc32(plain(tokens[at : at + block_size]), parent)
        keys.append(parent)
    return keys


@mistake("block-keys", "token ids as digits in a row", expect="digits run together")
def digits(tokens, block_size, adapter=None, salt=None):
    return chained(tokens, block_size, beginning(adapter, salt), lambda block: "".join(map(str, block)).encode())


@mistake("block-keys", "hashes the whole beginning for every block", expect="all before again for every block")
def quadratic(tokens, block_size, adapter=None, salt=None):
    ends = range(block_size, len(tokens) + 1, block_size)
    return [hashlib.sha256(repr((adapter, salt, list(tokens[:end]))).encode()).digest() for end in ends]


@mistake("block-keys", "an empty name for none", expect="and another one than no")
def empty_for_none(tokens, block_size, adapter=None, salt=None):
    return chained(tokens, block_size, beginning(adapter or "", salt or ""), plain)


@mistake("block-keys", "a block as a set of tokens", expect="the order of the tokens in a block")
def set_of_tokens(tokens, block_size, adapter=None, salt=None):
    return chained(tokens, block_size, beginning(adapter, salt), lambda block: plain(sorted(set(block))))


@mistake("block-keys", "a sum over the blocks before", expect="the order of the blocks before counts")
def summed(tokens, block_size, adapter=None, salt=None):
    total, keys = hash(("root", adapter, salt)), []
    for at in range(0, len(tokens) - block_size + 1, block_size):
        total += hash(tuple(tokens[at : at + block_size]))
        keys.append(total)
    return keys


@alternative("block-keys", "nested tuples")
def nested(tokens, block_size, adapter=None, salt=None):
    parent, keys = (adapter, salt), []
    for at in range(0, len(tokens) - block_size + 1, block_size):
        parent = (parent, tuple(tokens[at : at + block_size]))
        keys.append(parent)
    return keys


@alternative("block-keys", "Python's own hash of (parent, tokens)")
def own_hash(tokens, block_size, adapter=None, salt=None):
    parent, keys = hash((("adapter", adapter), ("salt", salt))), []
    for at in range(0, len(tokens) // block_size * block_size, block_size):
        parent = hash((parent, tuple(tokens[at : at + block_size])))
        keys.append(parent)
    return keys


@alternative("block-keys", "eight bytes a token, one running hash")
def running(tokens, block_size, adapter=None, salt=None):
    state, keys, block = hashlib.blake2b(repr({"adapter": adapter, "salt": salt}).encode()), [], []
    for token in tokens:
        block.append(token)
        if len(block) == block_size:
            state.update(array("q", block).tobytes())
            keys.append(state.hexdigest())
            block = []
    return keys


# Hits.


@mistake("find-prefix", "believes the hash", expect="compare the tokens")
def believes(tokens, keys, cache, block_size):
    blocks = []
    for key in keys[: (len(tokens) - 1) // block_size]:
        if key not in cache:
            break
        blocks.append(cache[key].block)
    return blocks


@mistake("find-prefix", "compares the block's tokens only", expect="compare its parent")
def own_tokens_only(tokens, keys, cache, block_size):
    blocks = []
    for index in range((len(tokens) - 1) // block_size):
        entry = cache.get(keys[index])
        if entry is None or list(entry.tokens) != list(tokens[index * block_size : (index + 1) * block_size]):
            break
        blocks.append(entry.block)
    return blocks


def with_parents(differs):
    def find(tokens, keys, cache, block_size):
        blocks = []
        for index in range((len(tokens) - 1) // block_size):
            entry = cache.get(keys[index])
            if entry is None or entry.tokens != tuple(tokens[index * block_size : (index + 1) * block_size]):
                break
            if differs(entry.parent, blocks):
                break
            blocks.append(entry.block)
        return blocks

    return find


mistake("find-prefix", "takes block 0 for no parent", expect="compare its parent")(
    with_parents(lambda parent, blocks: parent and parent != (blocks[-1] if blocks else None))
)
mistake("find-prefix", "does not look at the first block's parent", expect="no first block")(
    with_parents(lambda parent, blocks: blocks and parent != blocks[-1])
)


@mistake("find-prefix", "goes on after a hole", expect="what comes after a hole")
def over_holes(tokens, keys, cache, block_size):
    found = [cache.get(key) for key in keys[: (len(tokens) - 1) // block_size]]
    return [
        entry.block
        for index, entry in enumerate(found)
        if entry and entry.tokens == tuple(tokens[index * block_size : (index + 1) * block_size])
    ]


@mistake("find-prefix", "takes a fully cached prompt as it is", expect="query of length 0")
def nothing_left(tokens, keys, cache, block_size):
    return right.find_prefix([*tokens, -1], keys, cache, block_size)


@mistake("find-prefix", "never uses the last full block", expect="one token is left to compute|all three blocks")
def one_too_few(tokens, keys, cache, block_size):
    return right.find_prefix(tokens[: len(tokens) // block_size * block_size], keys, cache, block_size)


@alternative("find-prefix", "finds all, then cuts")
def finds_then_cuts(tokens, keys, cache, block_size):
    chain = []
    for at, key in enumerate(keys):
        entry = cache.get(key)
        if not entry or list(entry.tokens) != tokens[at * block_size : (at + 1) * block_size]:
            break
        if (entry.parent is None) != (at == 0) or (at and entry.parent != chain[-1]):
            break
        chain.append(entry.block)
    if len(chain) * block_size == len(tokens):
        chain.pop()
    return chain


# Copy on write.


@mistake("copy-on-write", "writes into the shared block", expect="the others would find its token")
def no_copy(table, position, pool, copy, block_size):
    if position // block_size == len(table):
        table.append(pool.allocate())


@mistake("copy-on-write", "a block's first place is taken to be unshared", expect="the others would find its token")
def trusts_first_places(table, position, pool, copy, block_size):
    if position // block_size == len(table):
        table.append(pool.allocate())
    elif position % block_size:
        right.prepare_write(table, position, pool, copy, block_size)


@mistake("copy-on-write", "allocates at every first place", expect="look whether the block is there already")
def at_first_places(table, position, pool, copy, block_size):
    if position % block_size == 0:
        table.append(pool.allocate())
    else:
        right.prepare_write(table, position, pool, copy, block_size)


@mistake("copy-on-write", "copies before every write", expect="written in place")
def always_copies(table, position, pool, copy, block_size):
    index = position // block_size
    if index == len(table):
        table.append(pool.allocate())
        return
    mine = pool.allocate()
    copy(table[index], mine)
    pool.release(table[index])
    table[index] = mine


@mistake("copy-on-write", "keeps its share of the old block", expect="about to write|give back your share")
def keeps_the_old(table, position, pool, copy, block_size):
    index = position // block_size
    if index == len(table):
        table.append(pool.allocate())
    elif pool.references[table[index]] > 1:
        mine = pool.allocate()
        copy(table[index], mine)
        table[index] = mine


@mistake("copy-on-write", "a new block with nothing in it", expect="a new block is empty")
def empty_block(table, position, pool, copy, block_size):
    right.prepare_write(table, position, pool, lambda source, target: None, block_size)


@alternative("copy-on-write", "lets go first, then takes another")
def lets_go_first(table, position, pool, copy, block_size):
    index = position // block_size
    if index < len(table):
        old = table[index]
        if pool.references[old] == 1:
            return
        pool.release(old)
        table[index] = pool.allocate()
        copy(old, table[index])
    else:
        table += [pool.allocate()]


# Eviction.


@mistake("lru-eviction", "evicts what was used last", expect="unused for longest")
class UsedLast(right.CachingPool):
    def allocate(self):
        if not self.free and self.idle:
            self.idle.move_to_end(next(reversed(self.idle)), last=False)
        return super().allocate()


@mistake("lru-eviction", "lets go of the first block first", expect="lost its first block before its last")
class FirstGoesFirst(right.CachingPool):
    def release(self, blocks):
        super().release(list(reversed(blocks)))


@mistake("lru-eviction", "an evicted block can still be found", expect="its key can still be found")
class StaleKey(right.CachingPool):
    def allocate(self):
        if self.free or not self.idle:
            return super().allocate()
        block, _ = self.idle.popitem(last=False)
        self.references[block] = 1
        return block


@mistake("lru-eviction", "key_of is never forgotten", expect="key_of still holds the key of block")
class StaleKeyOf(right.CachingPool):
    def allocate(self):
        if self.free or not self.idle:
            return super().allocate()
        block, _ = self.idle.popitem(last=False)
        self.block_of.pop(self.key_of[block], None)
        self.references[block] = 1
        return block


@mistake("lru-eviction", "a hit leaves the block in the queue", expect="what is held cannot be evicted")
class StillQueued(right.CachingPool):
    def share(self, block):
        self.references[block] += 1


@mistake("lru-eviction", "keeps nothing without a holder", expect="keep what can still be found")
class KeepsNothing(right.CachingPool):
    def release(self, blocks):
        for block in blocks:
            self.references[block] -= 1
            if not self.references[block]:
                self.block_of.pop(self.key_of.pop(block, None), None)
                self.free.append(block)


@mistake("lru-eviction", "evicts although blocks are free", expect="although .* blocks are free")
class EvictsFirst(right.CachingPool):
    def allocate(self):
        if not self.idle:
            return super().allocate()
        held, self.free = self.free, []
        block = super().allocate()
        self.free = held
        return block


@alternative("lru-eviction", "a plain dictionary keeps the order")
class PlainDictionary(right.CachingPool):
    def __init__(self, num_blocks):
        super().__init__(num_blocks)
        self.idle = {}

    def allocate(self):
        if self.free:
            block = self.free.pop(0)
        else:
            block = next(iter(self.idle))
            del self.idle[block]
            del self.block_of[self.key_of.pop(block)]
        self.references[block] = 1
        return block
