"""Spoilers of lab 13, sharing: copies and evictions as people get them wrong, and right ones that look different."""

from collections import Counter

from course.kit.answers import answers_of
from course.kit.exercises import KnownAnswers

right = answers_of("13_paged_attention")

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


copy_on_write.mistake(
    "expects a block in every table",
    {"index = position // block_size": "index, last = position // block_size, table[-1]"},
    expect="it stopped with IndexError",
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
lru_eviction.mistake(
    "stops at a block that others hold",
    {
        "self.references[block] -= 1\n            if self.references[block] == 0:": (
            "self.references[block] -= 1\n            if self.references[block]:\n"
            "                break\n            else:"
        )
    },
    expect="a sequence let go of .* references is",
)
lru_eviction.mistake(
    "the first block decides for all",
    {"if block in self.key_of:": "if blocks[0] in self.key_of:"},
    expect="a sequence let go of .* idle is",
)


@lru_eviction.alternative("a plain dictionary keeps the order")
class PlainDictionary(right.CachingPool):
    def __init__(self, num_blocks):
        super().__init__(num_blocks)
        self.idle, self.references = {}, Counter()

    def allocate(self):
        if self.free:
            block = self.free.pop(0)
        else:
            block = next(iter(self.idle))
            del self.idle[block]
            del self.block_of[self.key_of.pop(block)]
        self.references[block] = 1
        return block
