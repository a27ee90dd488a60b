"""Spoilers of lab 13, sharing: keys, hits, copies and evictions as people get them wrong, and right ones that look
different."""

import hashlib
from array import array

from course.kit.answers import answers_of
from course.kit.exercises import KnownAnswers

right = answers_of("13_paged_attention")

# Keys.

block_keys = KnownAnswers("block-keys")

block_keys.mistake(
    "one byte of each token",
    {"list(tokens[start : start + block_size])": "[t & 0xFF for t in tokens[start : start + block_size]]"},
    expect="hash whole ids",
)
block_keys.mistake(
    "two bytes of each token",
    {"list(tokens[start : start + block_size])": "[t & 0xFFFF for t in tokens[start : start + block_size]]"},
    expect="not their last two bytes",
)
block_keys.mistake(
    "a block and its place",
    {
        (
            "parent = hashlib.sha256(parent + block).digest()\n        keys.append(parent)"
        ): 'keys.append(hashlib.sha256(parent + b"%d" % start + block).digest())'
    },
    expect="chain in the key of the block before",
)
block_keys.mistake(
    "a key for the last block too, full or not",
    {"len(tokens) - block_size + 1": "len(tokens)"},
    expect="can still be written to",
)
block_keys.mistake(
    "no adapter in it", {'("root", adapter, salt)': '("root", salt)'}, expect="an adapter changes the weights"
)
block_keys.mistake(
    "no salt in it", {'("root", adapter, salt)': '("root", adapter)'}, expect="tenants with different salts"
)
block_keys.mistake(
    "adapter and salt in one list of strings",
    {'("root", adapter, salt)': "[name for name in (adapter, salt) if name]"},
    expect="keep the two apart",
)
block_keys.mistake(
    "adapter and salt with a sign between them",
    {'repr(("root", adapter, salt))': 'f"{adapter}|{salt}"'},
    expect="where the adapter ends",
)
block_keys.mistake(
    "each name with its label, joined by a sign",
    {
        'repr(("root", adapter, salt)).encode()': (
            '"|".join(\n        f"{label}={name}"\n'
            '        for label, name in (("adapter", adapter), ("salt", salt))\n'
            "        if name is not None\n    ).encode()"
        )
    },
    expect="where the adapter ends",
)
block_keys.mistake(
    "a letter before each name, and a sign between them",
    {'repr(("root", adapter, salt))': 'f"A{adapter}|S{salt}"'},
    expect="where the adapter ends",
)
block_keys.mistake(
    "a sign doubled between the names",
    {'repr(("root", adapter, salt))': 'f"{adapter}||{salt}"'},
    expect="where the adapter ends",
)
block_keys.mistake(
    "a checksum of 61 bits",
    {"keys.append(parent)": "keys.append(int.from_bytes(parent) % (2**61 - 1))"},
    expect="these keys have 61 bits",
)
block_keys.mistake(
    "no adapter is the adapter called None",
    {'repr(("root", adapter, salt))': 'f"{len(str(adapter))}:{adapter}{salt}"'},
    expect="must not be the same as no adapter",
)
block_keys.mistake(
    "a checksum of 32 bits",
    {"(parent + block).digest()": "(parent + block).digest()[:4]"},
    expect="these keys have 32 bits",
)
block_keys.mistake(
    "token ids as digits in a row",
    {"repr(list(tokens[start : start + block_size]))": '"".join(map(str, tokens[start : start + block_size]))'},
    expect="digits run together",
)
block_keys.mistake(
    "hashes the whole beginning for every block",
    {"tokens[start : start + block_size]": "tokens[: start + block_size]"},
    expect="all before again for every block",
)
block_keys.mistake(
    "an empty name for none",
    {'("root", adapter, salt)': '("root", adapter or "", salt or "")'},
    expect="and another one than no",
)
block_keys.mistake(
    "a block as a set of tokens",
    {"list(tokens[start : start + block_size])": "sorted(set(tokens[start : start + block_size]))"},
    expect="the order of the tokens in a block",
)


@block_keys.mistake("a sum over the blocks before", expect="the order of the blocks before counts")
def summed(tokens, block_size, adapter=None, salt=None):
    total, keys = hash(("root", adapter, salt)), []
    for at in range(0, len(tokens) - block_size + 1, block_size):
        total += hash(tuple(tokens[at : at + block_size]))
        keys.append(total)
    return keys


@block_keys.alternative("nested tuples")
def nested(tokens, block_size, adapter=None, salt=None):
    parent, keys = (adapter, salt), []
    for at in range(0, len(tokens) - block_size + 1, block_size):
        parent = (parent, tuple(tokens[at : at + block_size]))
        keys.append(parent)
    return keys


@block_keys.alternative("Python's own hash of (parent, tokens)")
def own_hash(tokens, block_size, adapter=None, salt=None):
    parent, keys = hash((("adapter", adapter), ("salt", salt))), []
    for at in range(0, len(tokens) // block_size * block_size, block_size):
        parent = hash((parent, tuple(tokens[at : at + block_size])))
        keys.append(parent)
    return keys


@block_keys.alternative("eight bytes a token, one running hash")
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

find_prefix = KnownAnswers("find-prefix")

find_prefix.mistake(
    "believes the hash", {" or entry.tokens != mine or entry.parent != parent": ""}, expect="compare the tokens"
)
find_prefix.mistake("compares the block's tokens only", {" or entry.parent != parent": ""}, expect="compare its parent")
find_prefix.mistake(
    "compares the tokens in any order",
    {"entry.tokens != mine": "sorted(entry.tokens) != sorted(mine)"},
    expect="in another order",
)
find_prefix.mistake(
    "compares the last token", {"entry.tokens != mine": "entry.tokens[-1] != mine[-1]"}, expect="compare all of them"
)
find_prefix.mistake(
    "takes block 0 for no parent",
    {"entry.parent != parent": "(entry.parent and entry.parent != parent)"},
    expect="compare its parent",
)
find_prefix.mistake(
    "does not look at the first block's parent",
    {"entry.parent != parent": "(blocks and entry.parent != parent)"},
    expect="no first block",
)
find_prefix.mistake(
    "goes on after a hole", {" or entry.parent != parent": "", "break": "continue"}, expect="what comes after a hole"
)
find_prefix.mistake(
    "takes a fully cached prompt as it is",
    {"(len(tokens) - 1) // block_size": "len(tokens) // block_size"},
    expect="query of length 0",
)
find_prefix.mistake(
    "never uses the last full block",
    {"(len(tokens) - 1) // block_size": "len(tokens) // block_size - 1"},
    expect="one token is left to compute|all three blocks",
)


@find_prefix.alternative("finds all, then cuts")
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

copy_on_write = KnownAnswers("copy-on-write")

copy_on_write.mistake(
    "writes into the shared block",
    {"elif pool.references[table[index]] > 1": "elif False"},
    expect="the others would find its token",
)
copy_on_write.mistake(
    "a block's first place is taken to be unshared",
    {"elif pool": "elif position % block_size and pool"},
    expect="the others would find its token",
)
copy_on_write.mistake(
    "allocates at every first place",
    {"index == len(table)": "position % block_size == 0"},
    expect="look whether the block is there already",
)
copy_on_write.mistake(
    "copies before every write", {"elif pool.references[table[index]] > 1:": "else:"}, expect="written in place"
)
copy_on_write.mistake(
    "keeps its share of the old block",
    {"        pool.release(table[index])\n": ""},
    expect="about to write|give back your share",
)
copy_on_write.mistake(
    "a new block with nothing in it", {"        copy(table[index], mine)\n": ""}, expect="a new block is empty"
)


@copy_on_write.alternative("lets go first, then takes another")
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

lru_eviction = KnownAnswers("lru-eviction")

lru_eviction.mistake("evicts what was used last", {"popitem(last=False)": "popitem()"}, expect="unused for longest")
lru_eviction.mistake(
    "lets go of the first block first", {"reversed(blocks)": "blocks"}, expect="lost its first block before its last"
)
lru_eviction.mistake(
    "an evicted block can still be found",
    {"del self.block_of[self.key_of.pop(block)]": "pass"},
    expect="its key can still be found",
)
lru_eviction.mistake(
    "key_of is never forgotten",
    {"del self.block_of[self.key_of.pop(block)]": "self.block_of.pop(self.key_of[block], None)"},
    expect="key_of still holds the key of block",
)
lru_eviction.mistake(
    "a hit leaves the block in the queue",
    {"        self.idle.pop(block, None)\n": ""},
    expect="what is held cannot be evicted",
)
lru_eviction.mistake(
    "keeps nothing without a holder",
    {
        "self.idle[block] = None": (
            "del self.block_of[self.key_of.pop(block)]\n                    self.free.append(block)"
        )
    },
    expect="keep what can still be found",
)
lru_eviction.mistake(
    "evicts although blocks are free", {"if self.free:": "if not self.idle:"}, expect="although .* blocks are free"
)

lru_eviction.mistake(
    "the second of two equal blocks takes the key",
    {"        if key not in self.block_of:\n            self.block_of": "        self.block_of"},
    expect="cached under one key, as two equal prompts",
)
lru_eviction.mistake(
    "a block without a key stays idle",
    {"if block in self.key_of:": "if block in self.key_of or self.block_of:"},
    expect="is free once its sequence has left",
)


@lru_eviction.alternative("a plain dictionary keeps the order")
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
