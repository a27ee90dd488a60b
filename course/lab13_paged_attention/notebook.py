# %% [markdown]
# # 13 · Paged attention
#
# **Waste is under one block per sequence, and a prefix is stored once.** Both follow from one table per sequence, and
# both are counted below, on real requests.
# Stands on lab 12 (the cache).
#
# The core path, exercises 1 to 7 and *Break it*, takes two hours; with the measurements and the questions at the end
# plan three to four. Running the notebook from top to bottom takes about a minute. At the end you can answer:
#
# 1. How much of the memory for keys and values is wasted by reservations, and how much by blocks, of which size?
# 2. When may two sequences share a block, how is that recognised, and what may happen to a shared block?
# 3. Which bugs of a paged cache leave the answers looking right, and which receipt shows them?
#
# > **Common claims**
# >
# > - *"Blocks are free but not contiguous, so the cache needs defragmentation."* Any free block will do; only the
# >   unused end of a last block is wasted ([Kwon et al. 2023](https://arxiv.org/abs/2309.06180), §4).
# > - *"Paging wastes under 5 %."* It wastes under one block per sequence: little for long sequences, 13 % for 56 tokens
# >   in blocks of 16.
# > - *"The KV cache takes 60–80 % of GPU memory."* 62–80 % of the *cache's own* memory was wasted by reservations. Of a
# >   40 GB GPU a 13B model's weights took 65 %, the cache about 30 % (the same paper, figures 1 and 2).
# > - *"Equal tokens mean equal keys, so the block can be shared."* Only after equal beginnings, at the same positions.
# > - *"Prefix caching saves 10–30 % in chats."* It saves (R − 1) · P of R · (P + U) tokens, 10 % to 81 % in the
# >   examples below.

# %%
import hashlib
import inspect
import math
from collections import OrderedDict

import torch

from course.kit import check, finish, hint, show, sliders
from course.lab13_paged_attention import (
    experiments,
    experiments_breaks,
    experiments_engine,
    figures,
    receipts,
)
from course.shared.kernels import INSTALLED, left_out
from minillm.model.kernels import tl  # triton.language; None where Triton is not installed
from minillm.serve.schedule import blocks
from minillm.serve.tiny import TinyLLM

# %% [markdown]
# ## One page first
#
# `minillm/serve/tiny.py` is a whole serving engine in about 230 lines. Its
# `forward` puts tokens of several sequences through the model; where their keys and values lie is decided here:

# %%
print(
    *map(inspect.getsource, (TinyLLM.slot, TinyLLM.blocks_for, TinyLLM.release, TinyLLM.allocate)),
    sep="\n",
)

# %% [markdown]
# A sequence holds blocks in its `block_table`; `slot` says where a token lies (exercise 1), `allocate` and `release`
# are a pool (exercise 2). Two things are missing: `forward` copies the keys of each sequence together before it attends
# (exercise 3 does without), and no two sequences share a block (exercises 4 to 7).

# %% [markdown]
# ## Why reserving does not work
#
# A sequence grows by one key and one value per layer with every token, and its final length is unknown. A cache in one
# contiguous piece must therefore be as long as the longest answer allowed. Contexts here are at most 512 tokens; the
# requests (Python code) bring prompts of 8 to 160 tokens and generate 4 to 48 more.
#
# ## Predict
#
# **Reserve 512 places for each of these requests. Which share of them is never used? And if memory is handed out in
# blocks of 16 tokens, on demand?** Two guesses.

# %%
guess_reserved = 0.5  # unused share if every request reserves the whole context
guess_blocks = 0.2  # unused share with blocks of 16

# %% [markdown]
# ## The idea
#
# Memory is cut into *blocks* of a few tokens each, all alike ([Kwon et al. 2023](https://arxiv.org/abs/2309.06180)).
# A sequence holds some of them, from anywhere, in a *block table*: its logical block 0, 1, 2, ... Attention looks
# every key up through the table. An operating system does the same with pages. (Numbers in the cells are
# positions; crossed cells are held and unused.)

# %%
show(figures.tables_and_memory)

# %%
sliders(figures.tables_and_memory, a=(1, 16), b=(1, 16), c=(1, 16), block_size=[1, 2, 4, 8])

# %% [markdown]
# ## Build it
#
# ### Exercise 1 · where a token lies (5 minutes)
#
# All blocks of a layer are one tensor `[num_blocks, block_size, kv_heads, head_dim]`. Flattened over the first two,
# each place in it is a *slot*: the slot of a token says where its key and value are written.


# %%
def slot_mapping(table, start, count, block_size):
    """Slots of the `count` tokens from position `start` on, a list of integers.
    Block b's first slot is b·block_size."""
    # BEGIN SOLUTION
    positions = range(start, start + count)
    return [table[p // block_size] * block_size + p % block_size for p in positions]
    # END SOLUTION


slot_mapping = check("slot-mapping", slot_mapping)

# %% [markdown]
# ### Exercise 2 · a pool that counts (15 minutes)
#
# A block may be in several tables, so the pool keeps a *reference count*: how many tables hold it. A block is free
# when the count is 0. Releasing a free block is a bug of the caller and must raise, or two tables would get the same
# block. Each operation must cost the same however large the pool is (a real GPU has tens of thousands of blocks): no
# search.


# %%
class Pool:
    """`num_blocks` blocks, numbered from 0. references[b]: how many tables hold block b."""

    def __init__(self, num_blocks):
        # BEGIN SOLUTION
        self.references = [0] * num_blocks
        self.free = list(range(num_blocks))
        # END SOLUTION

    def allocate(self):
        """A block without a holder, with one from now on. RuntimeError if there is none."""
        # BEGIN SOLUTION
        if not self.free:
            raise RuntimeError(f"all {len(self.references)} blocks are held")
        block = self.free.pop()
        self.references[block] = 1
        return block
        # END SOLUTION

    def share(self, block):
        """One holder more. ValueError if it has none."""
        # BEGIN SOLUTION
        if self.references[block] == 0:
            raise ValueError(f"block {block} is free")
        self.references[block] += 1
        # END SOLUTION

    def release(self, block):
        """One holder less; after the last one the block is free. ValueError if it has none."""
        # BEGIN SOLUTION
        if self.references[block] == 0:
            raise ValueError(f"block {block} is released twice")
        self.references[block] -= 1
        if self.references[block] == 0:
            self.free.append(block)
        # END SOLUTION


Pool = check("block-pool", Pool)

# %% [markdown]
# ### Exercise 3 · attention, block by block (25 minutes)
#
# Keys lie in blocks all over the pool, and copying them together would need a second cache. But softmax does not need
# all scores at once. Keep the largest score so far $m$, the sum $\sum e^{s-m}$ and the weighted values $\sum e^{s-m}
# v$. When a block raises $m$ to $m'$, multiply both sums by $e^{m-m'}$ ([Milakov and Gimelshein
# 2018](https://arxiv.org/abs/1805.02867); the same idea carries lab 07's long contexts). Query heads `0 .. group-1`
# share kv head 0, and so on. Memory must not grow with the context, so keep neither all scores nor all values, not
# even in a list. The check fills all slots that do not belong to the sequence, with NaN or with other numbers.


# %%
def paged_attention(q, k_pool, v_pool, table, context):
    """One query over its first `context` keys. q: [heads, head_dim]; k_pool, v_pool: [num_blocks,
    block_size, kv_heads, head_dim]; table: list of blocks, some of which may be reserved ahead
    -> [heads, head_dim]. No tensor that grows with the context."""
    # BEGIN SOLUTION
    heads, head_dim = q.shape
    _, block_size, kv_heads, _ = k_pool.shape
    rows = q.view(kv_heads, heads // kv_heads, head_dim) / math.sqrt(head_dim)
    largest = rows.new_full((kv_heads, heads // kv_heads, 1), float("-inf"))
    total, weighted = torch.zeros_like(largest), torch.zeros_like(rows)
    for index in range(-(-context // block_size)):
        filled = min(block_size, context - index * block_size)
        keys, values = k_pool[table[index], :filled], v_pool[table[index], :filled]
        scores = torch.einsum("hgd,khd->hgk", rows, keys)
        higher = torch.maximum(largest, scores.amax(-1, keepdim=True))
        weights, shrink = (scores - higher).exp(), (largest - higher).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        weighted = weighted * shrink + torch.einsum("hgk,khd->hgd", weights, values)
        largest = higher
    return (weighted / total).reshape(heads, head_dim)
    # END SOLUTION


paged_attention = check("paged-attention", paged_attention)

# %% [markdown]
# ## Which sequences may share a block?
#
# Two requests begin with the same system prompt: compute it once, hold it once. Which blocks may they share? Suppose
# two tables want to share a block that is logical block 0 in one sequence and logical block 2 in the other, with
# equal tokens in it. Are the keys and values equal, too? Ask the model: 32 tokens of code after two different
# beginnings of equal length, and after a longer beginning.

# %%
receipts.by_layer()

# %%
receipts.same_tokens_elsewhere()

# %% [markdown]
# In layer 0 a key depends on its own token and position only. From layer 1 on it depends on everything before it. So
# a block can be shared only by sequences that agree in *all* tokens up to its end, and then it has the same logical
# index in both. Sharing any other block raises no error; the answers are just wrong.
#
# ### Exercise 4 · a key for every full block (15 minutes)
#
# Chain it: the key of a block is a hash of the key before it and of the block's tokens. The chain begins with what
# else changes keys and values (an adapter: different weights for some requests) and with what must keep
# tenants apart (a salt). Both are names that anybody may choose: `"x"`, `"x|y"`, `"None"`. No two different pairs may
# give the same start, and a hash has 64 bits at least.


# %%
def block_keys(tokens, block_size, adapter=None, salt=None):
    """-> a list of keys, one per full block: equal only if the block, all before it, adapter and
    salt are equal. Hashes, or what holds all of it and is compared, such as nested tuples."""
    # BEGIN SOLUTION
    parent, keys = hashlib.sha256(repr(("root", adapter, salt)).encode()).digest(), []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        block = repr(list(tokens[start : start + block_size])).encode()
        parent = hashlib.sha256(parent + block).digest()
        keys.append(parent)
    return keys
    # END SOLUTION


block_keys = check("block-keys", block_keys)

# %% [markdown]
# ### Exercise 5 · a hit is compared (10 minutes)
#
# Hashes collide, by chance or because somebody constructs a collision, and a hit on the wrong block raises no error. So
# an entry of the cache also holds the block's `tokens` and its `parent` (the block before it, None for a first one).


# %%
def find_prefix(tokens, keys, cache, block_size):
    """keys: of the full blocks of tokens.
    cache: {key: entry} with entry.block, entry.tokens (a tuple), entry.parent.
    -> blocks of the longest cached beginning, first to last;
    at least one token must be left to compute."""
    # BEGIN SOLUTION
    blocks = []
    for index in range((len(tokens) - 1) // block_size):
        entry = cache.get(keys[index])
        mine = tuple(tokens[index * block_size : (index + 1) * block_size])
        parent = blocks[-1] if blocks else None
        if entry is None or entry.tokens != mine or entry.parent != parent:
            break
        blocks.append(entry.block)
    return blocks
    # END SOLUTION


find_prefix = check("find-prefix", find_prefix)

# %% [markdown]
# ### Exercise 6 · copy on write (10 minutes)
#
# Several answers to one prompt (n samples, the beams of a beam search) share all its blocks. The prompt's last block
# usually has room, and each sample's first token belongs there. A sequence must copy a block before it writes into it
# if other tables hold it. That may be a block's first place, too: a table may have been forked just after its next
# block was reserved.


# %%
def prepare_write(table, position, pool, copy, block_size):
    """Before the token at `position` (the table's last block, or the first place behind it; an
    empty table's first place is 0) is written: afterwards its block is held by this table alone.
    pool: as yours; copy(source, target) copies keys and values of a block."""
    # BEGIN SOLUTION
    index = position // block_size
    if index == len(table):
        table.append(pool.allocate())
    elif pool.references[table[index]] > 1:
        mine = pool.allocate()
        copy(table[index], mine)
        pool.release(table[index])
        table[index] = mine
    # END SOLUTION


prepare_write = check("copy-on-write", prepare_write)

# %% [markdown]
# ### Exercise 7 · evict what no table holds (15 minutes)
#
# A system prompt may be needed again in a second, so its blocks stay findable after their last holder has left. They
# are evicted only when room is needed, the least recently used first (LRU), and their keys are forgotten in both
# dictionaries. A block with holders is never touched. Of the blocks that a sequence leaves together, its last one goes
# first: a prefix is found from its first block on.
#
# LRU cannot choose a *running* sequence to preempt: all of those are used in every step (lab 14).


# %%
class CachingPool:
    """A pool in which a cached block stays findable after its last holder has left."""

    def __init__(self, num_blocks):
        self.references = [0] * num_blocks
        self.free = list(range(num_blocks))
        self.idle = OrderedDict()  # cached blocks without a holder, the longest unused first
        self.block_of, self.key_of = {}, {}  # by key; by block

    def cache_block(self, block, key):
        """Two equal prompts of one step give two blocks one key: the first is the one to find."""
        if key not in self.block_of:
            self.block_of[key], self.key_of[block] = block, key

    def allocate(self):
        """A block with one holder: a free one, else the idle one unused for longest,
        whose key is forgotten."""
        # BEGIN SOLUTION
        if self.free:
            block = self.free.pop()
        else:
            block, _ = self.idle.popitem(last=False)
            del self.block_of[self.key_of.pop(block)]
        self.references[block] = 1
        return block
        # END SOLUTION

    def share(self, block):
        """One holder more; an idle block is idle no longer."""
        # BEGIN SOLUTION
        self.idle.pop(block, None)
        self.references[block] += 1
        # END SOLUTION

    def release(self, blocks):
        """A sequence lets go of its blocks (a list, in its order):
        those without a holder become idle, or free."""
        # BEGIN SOLUTION
        for block in reversed(blocks):
            self.references[block] -= 1
            if self.references[block] == 0:
                if block in self.key_of:
                    self.idle[block] = None
                else:
                    self.free.append(block)
        # END SOLUTION


CachingPool = check("lru-eviction", CachingPool)

# %% [markdown]
# ## Your parts under a transformer
#
# `SmallEngine` (in `course/lab13_paged_attention/experiments_engine.py`) puts your parts under the course's target
# model. Its memory is NaN until a slot is written. Three requests: a prompt, another with the same beginning, and a
# fork of the first one.

# %%
yours = (slot_mapping, Pool, paged_attention, block_keys, find_prefix, prepare_write)
receipts.your_engine(experiments_engine.Parts(*yours))

# %% [markdown]
# ## Measure: waste
#
# From here on `minillm.serve` does the work (`blocks.py` is your pool, keys and hits in one file). 24 requests of code,
# in the memory that four reservations of 512 would take; after every step, every table is read.

# %%
wasted = experiments.waste(16)
show(figures.waste_of(wasted))

# %%
receipts.waste(wasted, guess_reserved, guess_blocks)

# %% [markdown]
# Without sharing, this is all that paging gains: more sequences in the same memory, so a larger batch (lab 12). Where
# every layer has a *sliding window*, blocks behind it are given back, too: a sequence holds no more than its window and
# one block, however long it gets.

# %%
receipts.windows()

# %% [markdown]
# ## Measure: a prefix, once
#
# Six requests of 100 shared tokens and 20 of their own, the first a step before the others.

# %%
receipts.shared_prefix()

# %% [markdown]
# What sharing saves depends on both lengths and on the number of requests. Move them:

# %%
show(figures.sharing)

# %%
sliders(
    figures.sharing,
    prefix=(0, 4000, 100),
    own=(10, 2000, 10),
    requests=(1, 32),
    block_size=[1, 16, 64, 256],
)

# %%
receipts.saved_shares()

# %% [markdown]
# ## Watch: copy on write
#
# Three samples of a prompt of 22 tokens, blocks of 4. The prompt is computed once. Yellow blocks are held by all three;
# on the others, numbers are logical places.

# %%
show(figures.forks_before_and_after)

# %%
sliders(figures.forks_over_time, step=(1, 14))

# %%
receipts.forks(figures.forks())

# %% [markdown]
# ## Watch: eviction
#
# Three users take turns; each turn sends everything said so far, and a little more. Move the time. No table holds the
# pale blocks now, but full ones can still be found until another user's turn needs the room. Then give the pool 40
# blocks.

# %%
show(figures.evictions_over_time)

# %%
sliders(figures.evictions_over_time, num_blocks=[20, 24, 32, 40], step=(1, 108))

# %%
receipts.chats(figures.chats(40), figures.chats(20))

# %% [markdown]
# With 20 blocks, the growing contexts soon do not all fit. As users take turns, LRU then evicts nearly every block
# before it is needed. Half of the blocks save far less than half of the work.
#
# ## Break it
#
# Four engines, each with a bug that a real engine had, serve the same seven requests: some share a beginning of 40
# tokens; two prompts are equal; one has other tokens whose last bytes are the same; one comes from another tenant; two
# large ones come late and need room. The first line is the engine without a bug. Find the bug of each of the others.

# %%
findings = experiments_breaks.findings()
receipts.broken_engines(findings)

# %% [markdown]
# `wrong`: requests whose tokens are not the plain loop's. `hit`: tokens from the cache, beside what is right by hand.
# `uncounted`: most blocks that were in more tables than their count says. `empty_steps`: steps that computed nothing
# although sequences were running. Which engine has which bug? Choose from: frees shared blocks · one byte per token ·
# whole prompt from the cache · no salt in the key.

# %%
diagnosis = {"A": "no salt in the key", "B": "one byte per token", "C": "?", "D": "?"}  # yours

# %%
receipts.traces_of_bugs(findings, diagnosis)

# %% [markdown]
# - **A, one byte per token** ([vllm-mlx pull request 444](https://github.com/waybarrios/vllm-mlx/pull/444)): `bytes(t
#   & 0xFF for t in tokens)` went into the hash, so token 65 equals token 321. One request of seven is answered from
#   another text's keys. *More hits than the closed form* show it; comparing whole tokens on a hit, as yours does,
#   prevents it.
# - **B, no salt** (similar: [vLLM issue 44701](https://github.com/vllm-project/vllm/issues/44701), where an adapter's
#   name and a salt gave the same hash): every answer is right. But a hit tells one tenant that another has sent the
#   same prompt. The leak shows in the time to first token, and in the count of hits.
# - **C, frees shared blocks** ([mini-sglang pull request 142](https://github.com/sgl-project/mini-sglang/pull/142)):
#   a sequence ends, its blocks are freed, and another table still points at them. Answers become wrong only when
#   memory is short and the block is given away. *Tables against counts*, compared after every step, show it at once.
# - **D, whole prompt from the cache** ([nano-vllm pull request
#   199](https://github.com/GeeeekExplorer/nano-vllm/pull/199)): nothing is left to compute, the query has length 0,
#   and there are no logits to sample from. Others crash; this one schedules the sequence forever.
#
# Three more, staged. *New weights under a warm cache* (a training step, a new release): tokens are the same, so old
# keys are served. Empty the cache, or put the version into the salt. *A flipped bit* in a cached key: most answers stay
# the same, so nobody notices. A checksum names the block. Compared on a hit it reads the prefix once more, compared in
# each step it would read every key twice. *Two threads in one pool*: both read a count before either writes, and a
# holder is lost. A lock around `allocate` alone does not help, `share` and `release` need the same one; minillm's
# engine takes one around all that schedules.

# %%
receipts.stale_and_raced()

# %% [markdown]
# ## Where it loses
#
# A large block wastes more and shares less, since only *full* blocks of a prefix are found. A small block means more
# table entries, more keys to hash, and more work for attention that goes block by block. Five sizes, measured:

# %%
show(figures.by_block_size)

# %%
receipts.block_sizes()

# %% [markdown]
# In the right panel, small blocks are expensive block by block, with Python work for each. Copied together first, the
# block size hardly matters. A GPU kernel lies between the two: it wants a tile of keys in one piece, and beyond that
# gains little. vLLM's default is 16, that of transformers 256.
#
# Paging also loses where there is nothing to gain: one sequence of known length needs no table, and contiguous keys are
# read several times faster than keys that are first copied together. A prefix cache gains nothing on prompts that never
# repeat, and still costs the hashing.
#
# ## The same thing in production
#
# `minillm.serve.schedule.blocks` holds these exercises in one file. Its keys are objects that compare whole chains, so
# a collision cannot cause a wrong hit; their hash only finds the entry in the dictionary.

# %%
print(inspect.getsource(blocks.Prefix))

# %% [markdown]
# On a GPU a kernel does what you did: it looks up slots through the table, keeps a maximum and two sums on chip, and
# never writes scores to memory. With one query per sequence there is too little work to fill a GPU, so the *keys* are
# split, too, and the parts are joined by their sums ([Flash-Decoding, Dao et al.
# 2023](https://crfm.stanford.edu/2023/10/12/flashdecoding.html)). `minillm/model/paged/triton.py` is such a kernel.
# (vLLM's own PagedAttention kernel is gone: each attention backend reads block tables,
# [#54737](https://github.com/vllm-project/vllm/pull/54737).)
#
# ### Exercise 8 · a kernel of your own (30 minutes, skip on a first reading)
#
# Write exercise 3 in [Triton](https://triton-lang.org/main/getting-started/tutorials/index.html), one program per query
# head. A program sees no tensors but addresses: `tl.load(q + offsets)` reads the numbers at these offsets from the
# first one, `tl.store` writes. Offsets are tiles made of `tl.arange` (with a power of two); `mask=` leaves places out,
# and `other=0.0` says what is read there. You need `tl.program_id(0)`, `tl.sum`, `tl.max(x, 0)`, `tl.maximum`,
# `tl.exp`, `tl.where` and `tl.zeros([DIM], tl.float32)`. The check runs it in Triton's interpreter, which works without
# a GPU, and traces every load and store.


# %%
def attend_kernel(q, k_pool, v_pool, table, y, context, scale, GROUP, KV_HEADS, SIZE, DIM):
    """Program h: y[h] = attention of query head h over the first `context` keys. Contiguous arrays,
    float32: q, y [heads, DIM]; k_pool, v_pool [blocks, SIZE, KV_HEADS, DIM]; table: blocks (int64).
    Head h reads kv head h // GROUP. Names in capitals are compile-time constants, SIZE and DIM
    powers of two; scores are multiplied by `scale`."""
    # BEGIN SOLUTION
    head, dims, places = tl.program_id(0), tl.arange(0, DIM), tl.arange(0, SIZE)
    query = tl.load(q + head * DIM + dims) * scale
    largest, total, weighted = float("-inf"), 0.0, tl.zeros([DIM], tl.float32)
    for first in range(0, context, SIZE):
        rows = (tl.load(table + first // SIZE) * SIZE + places) * KV_HEADS + head // GROUP
        at, filled = rows[:, None] * DIM + dims, first + places < context
        keys = tl.load(k_pool + at, mask=filled[:, None], other=0.0)
        values = tl.load(v_pool + at, mask=filled[:, None], other=0.0)
        scores = tl.where(filled, tl.sum(keys * query, 1), float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, 0))
        weights, shrink = tl.exp(scores - higher), tl.exp(largest - higher)
        total = total * shrink + tl.sum(weights, 0)
        weighted = weighted * shrink + tl.sum(weights[:, None] * values, 0)
        largest = higher
    tl.store(y + head * DIM + dims, weighted / total)
    # END SOLUTION


attend_kernel = check("triton-kernel", attend_kernel) if INSTALLED else left_out()

# %% [markdown]
# Hugging Face `transformers` (version 5) has a paged cache, too. Four requests with 70 shared tokens, if it is
# installed:

# %%
receipts.transformers_pages()

# %% [markdown]
# It finds blocks by a chained 64-bit hash, without comparing tokens (the chances are among the numbers below).
#
# | here | in vLLM (options of `vllm serve`, version 0.29) |
# |---|---|
# | `block_size` | `--block-size` (default 16) |
# | `num_blocks` | `--gpu-memory-utilization` (default 0.92): what weights and activations leave becomes blocks |
# | `prefix_cache` | on by default; `--no-enable-prefix-caching` |
# | `Prefix` | `--prefix-caching-hash-algo` (default `sha256`; `xxhash` is faster, but collisions can be constructed) |
# | `salt=` of a request | `cache_salt` in the request |
# | copy on write | none: n samples are n requests that hit the prompt's full blocks |
# | swap to the host | `--kv-offloading-size` (GiB). `--swap-space`, which many texts name, is gone since 0.18 |
#
# ## On a cluster
#
# Under tensor parallelism every rank holds `kv_heads / t` heads of *every* block, so block tables are equal on all
# ranks and one scheduler decides for all; under pipeline parallelism a rank holds its layers of every block. A prefix
# cache is per replica (lab 19). The same engine on a GPU:
#
# ```bash
# python -m minillm generate "def main" --device cuda
# vllm serve MODEL --tensor-parallel-size 8 --block-size 16 --gpu-memory-utilization 0.9
# ```
#
# ## Interview corner
#
# Numbers first: 80 GB of GPU memory, a model of 8 billion parameters in 16 bits, 32 layers, 8 kv heads of 128.

# %%
receipts.interview_numbers()

# %% [markdown]
# Say your answer aloud before you open one.
#
# **1. What does paging gain, and what does it not?**
# <details><summary>Answer</summary>
#
# Memory: the waste falls from 1 − mean/reserved to less than one block per sequence. Memory becomes batch: here 52
# reservations of 8,192 tokens, or 700 requests of 600 in blocks of 16. It makes no single request quicker; attention
# through a table is at best as quick as over one piece.
# </details>
#
# **2. What belongs in the key of a cached block?**
# <details><summary>Answer</summary>
#
# All tokens up to its end, in full (chained); everything else that changes keys and values: adapter, images in place of
# tokens; and the tenant's salt, tagged so that an adapter called x is not a salt x. Not the sampling parameters. On a
# hit, compare, or use a hash for which collisions cannot be constructed.
# </details>
#
# **3. Answers are sometimes about another user's text. Where do you look?**
# <details><summary>Answer</summary>
#
# At receipts before code: hits against the closed form (wrong keys), tables against reference counts (a shared block
# freed), tokens against a plain loop with the cache off. Then: hash of truncated tokens, no comparison, a missing copy
# on write, a block cached before it was computed and never invalidated after a failure.
# </details>
#
# ### Design questions
#
# **A.** The model above on one 80 GB GPU. Requests have 1,500 tokens of system prompt in common, 300 of their own and
# answers of 200. How many run at once, in blocks of 16, without a prefix cache and with one?
#
# **B.** The same GPU serves chats of 600 tokens. Transfers to the host are efficient from 16 MB on, so a colleague
# proposes blocks of 128. What does that cost in sequences, and what would you do instead?

# %%
receipts.design_numbers()

# %% [markdown]
# <details><summary>A and B: a worked answer</summary>
#
# A: 427,000 tokens fit. Each request needs 2,000 tokens, 125 blocks: 213 at once. With the prefix held once (93 full
# blocks, since 1,500 is no multiple of 16), each further request needs 32 blocks: 831 at once, 3.9 times as many.
# Prompt compute falls from 1,800 to 312 tokens per request. Check next that decode at that batch still meets the
# latency target.
#
# B: Blocks of 16 hold 702 sequences of 600 tokens, blocks of 128 hold 667: 5 % fewer, and prefix hits are rounded
# down to 128 tokens. A block of 128 is 16.8 MB if its layers lie next to each other. Store blocks of 16 in this way,
# and transfer eight per call.
# </details>
#
# ### Capstone (open)
#
# 70B in bf16 over 8 GPUs of 80 GB, agents with 6,000 shared tokens and contexts that grow to 30,000. Choose
# the block size, the room for idle blocks and the salt policy, and defend them with numbers from
# `course/lab13_paged_attention/formulas.py` and `minillm.predict`.
#
# ## Can you answer them now?
#
# 1. How much of the memory for keys and values is wasted by reservations, and how much by blocks, of which size?
# 2. When may two sequences share a block, how is that recognised, and what may happen to a shared block?
# 3. Which bugs of a paged cache leave the answers looking right, and which receipt shows them?
#
# Next: [14 · Continuous batching](14_continuous_batching.ipynb), where sequences join and leave at every step.

# %%
finish("13_paged_attention")
