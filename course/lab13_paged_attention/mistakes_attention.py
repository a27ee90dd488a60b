"""Spoilers of lab 13's attention over blocks: wrong answers that people write, and right ones that look different."""

import functools
import math

import torch

from course.kit.answers import answers_of
from course.kit.exercises import KnownAnswers

right = answers_of("13_paged_attention")

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


paged_attention.mistake(
    "takes the pool's dimensions in another order",
    {"_, block_size, kv_heads, _ = k_pool.shape": "_, kv_heads, block_size, _ = k_pool.shape"},
    expect="it stopped with RuntimeError",
)
paged_attention.mistake(
    "takes NaN for unused and never looks at context",
    {
        "range(-(-context // block_size))": "range(len(table))",
        "k_pool[table[index], :filled], v_pool[table[index], :filled]": (
            "k_pool[table[index]], v_pool[table[index]].nan_to_num(0)"
        ),
        'torch.einsum("hgd,khd->hgk", rows, keys)': (
            'torch.einsum("hgd,khd->hgk", rows, keys).nan_to_num(float("-inf"))'
        ),
    },
    expect="where they held NaN before",
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


@paged_attention.mistake("keeps all scores in lists", expect="the lists, floats and arrays alive at once")
def lists_of_scores(q, k_pool, v_pool, table, context):
    heads, head_dim = q.shape
    _, size, kv_heads, _ = k_pool.shape
    out = []
    for head in range(heads):
        kv, places = head // (heads // kv_heads), [(table[p // size], p % size) for p in range(context)]
        scores = [float(q[head] @ k_pool[block, place, kv]) / math.sqrt(head_dim) for block, place in places]
        weights = [math.exp(score - max(scores)) for score in scores]
        values = sum(w * v_pool[block, place, kv] for w, (block, place) in zip(weights, places, strict=True))
        out.append(values / sum(weights))
    return torch.stack(out)


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
