"""Spoilers of lab 13, slots and pools: wrong answers that people write, and right ones that look different."""

from collections import Counter, deque

import torch

from course.kit.answers import answers_of
from course.kit.exercises import KnownAnswers

right = answers_of("13_paged_attention")

# Slots.

slot_mapping = KnownAnswers("slot-mapping")

slot_mapping.mistake(
    "positions for slots",
    {"[table[p // block_size] * block_size + p % block_size for p in positions]": "list(positions)"},
    says="These are positions. Where they lie is in the table: position p is in block table[p // block_size].",
)
slot_mapping.mistake(
    "forgets where the piece begins",
    {"range(start, start + count)": "range(count)"},
    says="These are the slots of the sequence's first tokens, but this piece of it begins at position `start`.",
)
slot_mapping.mistake(
    "gives blocks",
    {" * block_size + p % block_size": ""},
    says="These are blocks, not slots: the first slot of block b is b · block_size.",
)
slot_mapping.mistake(
    "does not multiply by the block size",
    {"] * block_size": "]"},
    says="A place in the block was added to the block's number. Multiply the number by block_size first.",
)
slot_mapping.mistake(
    "count taken for the end",
    {"start + count": "count"},
    says="The piece ends before position start + count; you stop at position `count`.",
)
slot_mapping.mistake(
    "a piece in two blocks at most",
    {"table[p // block_size]": "table[min(p // block_size, start // block_size + 1)]"},
    says="A piece may lie in more than two blocks, as a long prompt does: look each position's block up in the table.",
)
slot_mapping.mistake(
    "slots as floating-point numbers",
    {"[p // block_size] * block_size": "[p // block_size] * float(block_size)"},
    expect="one whole number per token",
)
slot_mapping.mistake(
    "the place in the block counted from the piece's beginning",
    {"p % block_size": "(p - start) % block_size"},
    says="The place in a block is that of the position in the whole sequence, p % block_size, not of the place in the "
    "piece.",
)


@slot_mapping.alternative("a generator")
def one_after_the_other(table, start, count, block_size):
    return (table[p // block_size] * block_size + p % block_size for p in range(start, start + count))


@slot_mapping.alternative("all slots of the table, then a slice")
def sliced(table, start, count, block_size):
    slots = torch.tensor(table)[:, None] * block_size + torch.arange(block_size)
    return slots.flatten()[start : start + count].tolist()


# The pool.

block_pool = KnownAnswers("block-pool")

block_pool.mistake(
    "a released block is free, even if others hold it",
    {"if self.references[block] == 0:\n            self.free.append(block)": "self.free.append(block)"},
    expect="tables still hold",
)
block_pool.mistake("does not count sharers", {"self.references[block] += 1": "pass"}, expect="after share of block")
block_pool.mistake(
    "a block may be released twice",
    {'raise ValueError(f"block {block} is released twice")': "self.references[block] = 1"},
    expect="release a block twice",
)
block_pool.mistake(
    "searches with a built-in",
    {"not self.free": "min(self.references)", "self.free.pop()": "self.references.index(0)"},
    expect="it searches",
)
block_pool.mistake(
    "searches a dictionary's values",
    {
        "[0] * num_blocks": "dict.fromkeys(range(num_blocks), 0)",
        "not self.free": "min(self.references.values())",
        "self.free.pop()": "list(self.references.values()).index(0)",
    },
    expect="it searches",
)
block_pool.mistake(
    "no word when it is empty",
    {'raise RuntimeError(f"all {len(self.references)} blocks are held")': "return None"},
    expect="allocate from a pool with no free block",
)
block_pool.mistake(
    "looks for a released block in the list of free ones",
    {
        ('if self.references[block] == 0:\n            raise ValueError(f"block {block} is rel'): (
            'if block in self.free:\n            raise ValueError(f"block {block} is rel'
        )
    },
    expect="it searches.*all free",
)
block_pool.mistake(
    "takes from the front of a list", {"self.free.pop()": "self.free.pop(0)"}, expect="it searches.*all free"
)
block_pool.mistake(
    "puts back at the front", {"self.free.append(block)": "self.free.insert(0, block)"}, expect="it searches.*all free"
)


block_pool.mistake(
    "counts down before it refuses",
    {
        ('if self.references[block] == 0:\n            raise ValueError(f"block {block} is rel'): (
            "self.references[block] -= 1\n"
            "        if self.references[block] < 0:\n"
            '            raise ValueError(f"block {block} is rel'
        ),
        'twice")\n        self.references[block] -= 1\n': 'twice")\n',
    },
    expect="a refusal changes nothing",
)


@block_pool.alternative("counts holders in a Counter")
class Counts(right.Pool):
    def __init__(self, num_blocks):
        self.references, self.free, self.size = Counter(), set(range(num_blocks)), num_blocks

    def allocate(self):
        if not self.free:
            raise RuntimeError("full")
        block = self.free.pop()
        self.references[block] += 1
        return block

    def release(self, block):
        if self.references[block] < 1:
            raise ValueError("free")
        self.references[block] -= 1
        if not self.references[block]:
            self.free.add(block)


@block_pool.alternative("a queue, first freed first used")
class FirstFreed(right.Pool):
    def __init__(self, num_blocks):
        self.references, self.free = [0] * num_blocks, deque(range(num_blocks))

    def allocate(self):
        if not self.free:
            raise RuntimeError("full")
        block = self.free.popleft()
        self.references[block] += 1
        return block


@block_pool.alternative("free blocks linked through an array")
class Linked:
    __slots__ = ("after", "first", "references")

    def __init__(self, num_blocks):
        self.references = [0] * num_blocks
        self.after, self.first = [*range(1, num_blocks), None], 0

    def allocate(self):
        if self.first is None:
            raise RuntimeError("full")
        block, self.first = self.first, self.after[self.first]
        self.references[block] = 1
        return block

    def share(self, block):
        if not self.references[block]:
            raise ValueError("free")
        self.references[block] += 1

    def release(self, block):
        if not self.references[block]:
            raise ValueError("free")
        self.references[block] -= 1
        if not self.references[block]:
            self.after[block], self.first = self.first, block
