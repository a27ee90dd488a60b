"""Spoilers of lab 13, slots, pools and attention: wrong answers that people write, and right ones that look
different."""

import functools
import math
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


# Attention over blocks.

paged_attention = KnownAnswers("paged-attention")

paged_attention.mistake(
    "keeps sums under an old maximum as they are",
    {"total * shrink": "total", "weighted * shrink": "weighted"},
    says="When a block raises the maximum, multiply both sums by exp(old - new) before you add to them.",
)


@paged_attention.mistake(
    "averages the softmaxes of the blocks",
    says="This is the average of the blocks' own softmaxes. Keep both sums over all blocks and divide once.",
)
def average_of_blocks(q, k_pool, v_pool, table, context):
    size = k_pool.shape[1]
    filled = [min(size, context - index * size) for index in range(-(-context // size))]
    parts = [right.paged_attention(q, k_pool, v_pool, table[i : i + 1], n) for i, n in enumerate(filled)]
    return torch.stack(parts).mean(0)


paged_attention.mistake("a maximum that begins at 0", {'float("-inf")': "0.0"}, expect="begin at -inf")
paged_attention.mistake(
    "one maximum for all heads", {"scores.amax(-1, keepdim=True)": "scores.max()"}, expect="a maximum of its own"
)
paged_attention.mistake(
    "only the sum shrinks",
    {"weighted * shrink": "weighted"},
    says="Both sums stand under the old maximum: shrink the weighted values, too, not the sum of weights alone.",
)
paged_attention.mistake(
    "only the values shrink",
    {"total * shrink": "total"},
    says="Both sums stand under the old maximum: shrink the sum of weights, too, not the weighted values alone.",
)
paged_attention.mistake(
    "never divides",
    {"(weighted / total)": "weighted"},
    says="These are weighted values: divide by the sum of the weights at the end.",
)
paged_attention.mistake(
    "reads the unused slots of the last block",
    {"min(block_size, context - index * block_size)": "block_size"},
    expect="read filled slots only",
)
paged_attention.mistake(
    "goes through all blocks of the table",
    {"range(-(-context // block_size))": "range(len(table))"},
    expect="more blocks than",
)
paged_attention.mistake(
    "forgets the root of head_dim",
    {" / math.sqrt(head_dim)": ""},
    says="Every score is √head_dim times too large: divide the query by √head_dim.",
)
paged_attention.mistake(
    "reads block i for logical block i",
    {"k_pool[table[index]": "k_pool[index", "v_pool[table[index]": "v_pool[index"},
    expect="not finite",
)
paged_attention.mistake(
    "deals the query heads out to the kv heads in turn",
    {
        "q.view(kv_heads, heads // kv_heads, head_dim)": "q.view(-1, kv_heads, head_dim).transpose(0, 1)",
        "(weighted / total)": "(weighted / total).transpose(0, 1)",
    },
    says="Query heads meet the wrong kv heads: heads 0 to group-1 share kv head 0, the next group kv head 1.",
)


@paged_attention.mistake("puts all blocks together first", expect="Do not put the blocks together")
def gathers_all(q, k_pool, v_pool, table, context):
    keys, values = (pool[table].flatten(0, 1)[:context] for pool in (k_pool, v_pool))
    group = q.shape[0] // keys.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
    weights = torch.softmax(torch.einsum("hd,khd->hk", q, keys) / math.sqrt(q.shape[1]), -1)
    return torch.einsum("hk,khd->hd", weights, values)


@paged_attention.mistake("keeps all scores, block by block", expect="kept for a second pass")
def keeps_scores(q, k_pool, v_pool, table, context):
    heads, head_dim = q.shape
    _, size, kv_heads, _ = k_pool.shape
    rows = q.view(kv_heads, -1, head_dim) / math.sqrt(head_dim)
    used = table[: -(-context // size)]
    ends = [(block, min(size, context - index * size)) for index, block in enumerate(used)]
    scores = [torch.einsum("hgd,khd->hgk", rows, k_pool[block, :filled]) for block, filled in ends]
    largest = functools.reduce(torch.maximum, (part.amax(-1, keepdim=True) for part in scores))
    total, weighted = 0, 0
    for part, (block, filled) in zip(scores, ends, strict=True):
        weights = (part - largest).exp()
        total = total + weights.sum(-1, keepdim=True)
        weighted = weighted + torch.einsum("hgk,khd->hgd", weights, v_pool[block, :filled])
    return (weighted / total).reshape(heads, head_dim)


@paged_attention.alternative("joins blocks by their log-sum-exp, from the last to the first")
def by_logsumexp(q, k_pool, v_pool, table, context):
    heads, head_dim = q.shape
    _, size, kv_heads, _ = k_pool.shape
    rows = q.view(kv_heads, -1, head_dim) / math.sqrt(head_dim)
    y, known = torch.zeros_like(rows), rows.new_full((*rows.shape[:2], 1), float("-inf"))
    for index in reversed(range(-(-context // size))):
        filled = min(size, context - index * size)
        scores = torch.einsum("hgd,khd->hgk", rows, k_pool[table[index], :filled])
        mine = scores.logsumexp(-1, keepdim=True)
        part = torch.einsum("hgk,khd->hgd", (scores - mine).exp(), v_pool[table[index], :filled])
        both = torch.logaddexp(known, mine)
        y, known = y * (known - both).exp() + part * (mine - both).exp(), both
    return y.reshape(heads, head_dim)


@paged_attention.alternative("two passes: the maximum first, head by head")
def two_passes(q, k_pool, v_pool, table, context):
    heads, head_dim = q.shape
    _, size, kv_heads, _ = k_pool.shape
    out = []
    for head in range(heads):
        kv = head // (heads // kv_heads)
        pieces = [
            (k_pool[table[i], : context - i * size, kv], v_pool[table[i], : context - i * size, kv])
            for i in range(-(-context // size))
        ]
        largest = max(float((k @ q[head]).max()) for k, _ in pieces) / math.sqrt(head_dim)
        total, weighted = 0.0, 0.0
        for keys, values in pieces:  # scores again: twice the work, but nothing is kept
            weights = (keys @ q[head] / math.sqrt(head_dim) - largest).exp()
            total, weighted = total + float(weights.sum()), weighted + weights @ values
        out.append(weighted / total)
    return torch.stack(out)
