"""Spoilers of lab 13, slots, pools and attention: wrong answers that people write, and right ones that look
different."""

import functools
import math
from collections import Counter, deque

import torch

from course.kit.answers import answers_of
from course.kit.exercises import alternative, mistake

right = answers_of("13_paged_attention")

# Slots.


@mistake(
    "slot-mapping",
    "positions for slots",
    says="These are positions. Where they lie is in the table: position p is in block table[p // block_size].",
)
def positions(table, start, count, block_size):
    return list(range(start, start + count))


@mistake(
    "slot-mapping",
    "forgets where the piece begins",
    says="These are the slots of the sequence's first tokens, but this piece of it begins at position `start`.",
)
def from_the_beginning(table, start, count, block_size):
    return right.slot_mapping(table, 0, count, block_size)


@mistake(
    "slot-mapping", "gives blocks", says="These are blocks, not slots: the first slot of block b is b · block_size."
)
def only_blocks(table, start, count, block_size):
    return [table[p // block_size] for p in range(start, start + count)]


@mistake(
    "slot-mapping",
    "does not multiply by the block size",
    says="A place in the block was added to the block's number. Multiply the number by block_size first.",
)
def not_multiplied(table, start, count, block_size):
    return [table[p // block_size] + p % block_size for p in range(start, start + count)]


@mistake(
    "slot-mapping",
    "count taken for the end",
    says="The piece ends before position start + count; you stop at position `count`.",
)
def count_is_end(table, start, count, block_size):
    return [table[p // block_size] * block_size + p % block_size for p in range(start, count)]


@mistake(
    "slot-mapping",
    "the place in the block counted from the piece's beginning",
    says="The place in a block is that of the position in the whole sequence, p % block_size, not of the place in the "
    "piece.",
)
def place_in_piece(table, start, count, block_size):
    return [table[(start + i) // block_size] * block_size + i % block_size for i in range(count)]


@alternative("slot-mapping", "all slots of the table, then a slice")
def sliced(table, start, count, block_size):
    slots = torch.tensor(table)[:, None] * block_size + torch.arange(block_size)
    return slots.flatten()[start : start + count].tolist()


# The pool.


@mistake("block-pool", "a released block is free, even if others hold it", expect="tables still hold")
class FreesShared(right.Pool):
    def release(self, block):
        if self.references[block] == 0:
            raise ValueError("free")
        self.references[block] -= 1
        self.free.append(block)


@mistake("block-pool", "does not count sharers", expect="after share of block")
class CountsNobody(right.Pool):
    def share(self, block):
        if self.references[block] == 0:
            raise ValueError("free")


@mistake("block-pool", "a block may be released twice", expect="release a block twice")
class FreesTwice(right.Pool):
    def release(self, block):
        self.references[block] = max(0, self.references[block] - 1)
        if self.references[block] == 0:
            self.free.append(block)


@mistake("block-pool", "searches for a free block", expect="it searches")
class Searches(right.Pool):
    def allocate(self):
        for block, count in enumerate(self.references):
            if count == 0:
                self.references[block] = 1
                return block
        raise RuntimeError("full")

    def release(self, block):
        if self.references[block] == 0:
            raise ValueError("free")
        self.references[block] -= 1


@mistake("block-pool", "searches with a built-in", expect="it searches")
class SearchesInC(Searches):
    def allocate(self):
        if min(self.references):
            raise RuntimeError("full")
        block = self.references.index(0)
        self.references[block] = 1
        return block


@mistake("block-pool", "no word when it is empty", expect="allocate from a pool with no free block")
class ReturnsNone(right.Pool):
    def allocate(self):
        return super().allocate() if self.free else None


@mistake("block-pool", "looks for a released block in the list of free ones", expect="it searches.*all free")
class LooksItUp(right.Pool):
    def release(self, block):
        if block in self.free:
            raise ValueError("free")
        super().release(block)


@mistake("block-pool", "takes from the front of a list", expect="it searches.*all free")
class TakesFromTheFront(right.Pool):
    def allocate(self):
        if not self.free:
            raise RuntimeError("full")
        block = self.free.pop(0)
        self.references[block] = 1
        return block


@mistake("block-pool", "puts back at the front", expect="it searches.*all free")
class PutsBackInFront(right.Pool):
    def release(self, block):
        super().release(block)
        if self.references[block] == 0:
            self.free.insert(0, self.free.pop())


@mistake("block-pool", "searches with torch", expect="it searches")
class SearchesInTorch(right.Pool):
    def __init__(self, num_blocks):
        self.references = torch.zeros(num_blocks, dtype=torch.int)

    def allocate(self):
        free = (self.references == 0).nonzero()
        if not len(free):
            raise RuntimeError("full")
        self.references[free[0]] = 1
        return int(free[0])

    def release(self, block):
        if not self.references[block]:
            raise ValueError("free")
        self.references[block] -= 1


@alternative("block-pool", "counts holders in a Counter")
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


@alternative("block-pool", "a queue, first freed first used")
class FirstFreed(right.Pool):
    def __init__(self, num_blocks):
        self.references, self.free = [0] * num_blocks, deque(range(num_blocks))

    def allocate(self):
        if not self.free:
            raise RuntimeError("full")
        block = self.free.popleft()
        self.references[block] += 1
        return block


@alternative("block-pool", "free blocks linked through an array")
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


def online(
    q,
    k_pool,
    v_pool,
    table,
    context,
    *,
    shrinks="both",
    filled_only=True,
    scale=None,
    by_table=True,
    over=-1,
    divides=True,
):
    """The reference with one thing to leave out. shrinks: "both" sums, "sum", "values" or "none"; over: None takes one
    maximum for all heads."""
    heads, head_dim = q.shape
    _, size, kv_heads, _ = k_pool.shape
    rows = q.view(kv_heads, heads // kv_heads, head_dim) * (scale or 1 / math.sqrt(head_dim))
    largest = rows.new_full((kv_heads, heads // kv_heads, 1), float("-inf"))
    total, weighted = torch.zeros_like(largest), torch.zeros_like(rows)
    for index in range(-(-context // size)):
        filled = min(size, context - index * size) if filled_only else size
        block = table[index] if by_table else index
        scores = torch.einsum("hgd,khd->hgk", rows, k_pool[block, :filled])
        higher = torch.maximum(largest, scores.max() if over is None else scores.amax(over, keepdim=True))
        weights, shrink = (scores - higher).exp(), (largest - higher).exp()
        total = total * (shrink if shrinks in ("both", "sum") else 1) + weights.sum(-1, keepdim=True)
        mine = torch.einsum("hgk,khd->hgd", weights, v_pool[block, :filled])
        weighted = weighted * (shrink if shrinks in ("both", "values") else 1) + mine
        largest = higher
    return (weighted / total if divides else weighted).reshape(heads, head_dim)


@mistake(
    "paged-attention",
    "keeps sums under an old maximum as they are",
    says="When a block raises the maximum, multiply both sums by exp(old - new) before you add to them.",
)
def no_shrink(q, k_pool, v_pool, table, context):
    return online(q, k_pool, v_pool, table, context, shrinks="none")


@mistake(
    "paged-attention",
    "averages the softmaxes of the blocks",
    says="This is the average of the blocks' own softmaxes. Keep both sums over all blocks and divide once.",
)
def average_of_blocks(q, k_pool, v_pool, table, context):
    size = k_pool.shape[1]
    filled = [min(size, context - index * size) for index in range(-(-context // size))]
    parts = [online(q, k_pool, v_pool, table[i : i + 1], n) for i, n in enumerate(filled)]
    return torch.stack(parts).mean(0)


@mistake("paged-attention", "one maximum for all heads", expect="a maximum of its own")
def one_maximum(q, k_pool, v_pool, table, context):
    return online(q, k_pool, v_pool, table, context, over=None)


@mistake(
    "paged-attention",
    "only the sum shrinks",
    says="Both sums stand under the old maximum: shrink the weighted values, too, not the sum of weights alone.",
)
def only_the_sum(q, k_pool, v_pool, table, context):
    return online(q, k_pool, v_pool, table, context, shrinks="sum")


@mistake(
    "paged-attention",
    "only the values shrink",
    says="Both sums stand under the old maximum: shrink the sum of weights, too, not the weighted values alone.",
)
def only_the_values(q, k_pool, v_pool, table, context):
    return online(q, k_pool, v_pool, table, context, shrinks="values")


@mistake(
    "paged-attention", "never divides", says="These are weighted values: divide by the sum of the weights at the end."
)
def never_divides(q, k_pool, v_pool, table, context):
    return online(q, k_pool, v_pool, table, context, divides=False)


@mistake("paged-attention", "reads the unused slots of the last block", expect="read filled slots only")
def whole_last_block(q, k_pool, v_pool, table, context):
    return online(q, k_pool, v_pool, table, context, filled_only=False)


@mistake(
    "paged-attention",
    "forgets the root of head_dim",
    says="Every score is √head_dim times too large: divide the query by √head_dim.",
)
def unscaled(q, k_pool, v_pool, table, context):
    return online(q, k_pool, v_pool, table, context, scale=1.0)


@mistake("paged-attention", "reads block i for logical block i", expect="not finite")
def no_table(q, k_pool, v_pool, table, context):
    return online(q, k_pool, v_pool, table, context, by_table=False)


@mistake(
    "paged-attention",
    "deals the query heads out to the kv heads in turn",
    says="Query heads meet the wrong kv heads: heads 0 to group-1 share kv head 0, the next group kv head 1.",
)
def heads_in_turn(q, k_pool, v_pool, table, context):
    heads, head_dim = q.shape
    kv_heads = k_pool.shape[2]
    turned = q.view(-1, kv_heads, head_dim).transpose(0, 1).reshape(heads, head_dim)
    y = online(turned, k_pool, v_pool, table, context)
    return y.view(kv_heads, -1, head_dim).transpose(0, 1).reshape(heads, head_dim)


@mistake("paged-attention", "puts all blocks together first", expect="Do not put the blocks together")
def gathers_all(q, k_pool, v_pool, table, context):
    keys, values = (pool[table].flatten(0, 1)[:context] for pool in (k_pool, v_pool))
    group = q.shape[0] // keys.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
    weights = torch.softmax(torch.einsum("hd,khd->hk", q, keys) / math.sqrt(q.shape[1]), -1)
    return torch.einsum("hk,khd->hd", weights, values)


@mistake("paged-attention", "keeps all scores, block by block", expect="kept for a second pass")
def keeps_scores(q, k_pool, v_pool, table, context):
    heads, head_dim = q.shape
    _, size, kv_heads, _ = k_pool.shape
    rows = q.view(kv_heads, -1, head_dim) / math.sqrt(head_dim)
    ends = [(block, min(size, context - index * size)) for index, block in enumerate(table)]
    scores = [torch.einsum("hgd,khd->hgk", rows, k_pool[block, :filled]) for block, filled in ends]
    largest = functools.reduce(torch.maximum, (part.amax(-1, keepdim=True) for part in scores))
    total, weighted = 0, 0
    for part, (block, filled) in zip(scores, ends, strict=True):
        weights = (part - largest).exp()
        total = total + weights.sum(-1, keepdim=True)
        weighted = weighted + torch.einsum("hgk,khd->hgd", weights, v_pool[block, :filled])
    return (weighted / total).reshape(heads, head_dim)


@alternative("paged-attention", "joins blocks by their log-sum-exp, from the last to the first")
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


@alternative("paged-attention", "two passes: the maximum first, head by head")
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
