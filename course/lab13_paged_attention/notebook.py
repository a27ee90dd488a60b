# %% [markdown]
# # 13 · Paged attention
#
# **Waste is under one block per sequence, and a prefix is stored once.** Both follow from one table per sequence, and
# both are counted below, on real requests.
#
# Three to four hours if you solve every exercise and read the measurements (the exercises alone take about 100 minutes);
# running it top to bottom takes under a minute. At the end you can answer:
#
# 1. How much of the memory for keys and values is wasted by reservations, and how much by blocks, of which size?
# 2. When may two sequences share a block, how is that recognised, and what may happen to a shared block?
# 3. Which bugs of a paged cache leave the answers looking right, and which receipt shows them?

# %%
import hashlib
import inspect
import math
from collections import OrderedDict

import torch

from course.lab13_paged_attention import experiments, receipts
from course.lab13_paged_attention import experiments_breaks as breaks
from course.lab13_paged_attention import experiments_engine as small
from course.lab13_paged_attention import experiments_peer as peer
from course.lab13_paged_attention import experiments_sharing as sharing
from course.lab13_paged_attention import experiments_sizes as sizes
from course.lab13_paged_attention import figures as pictures
from minillm.labkit import check, finish, show, sliders
from minillm.model import paged_triton
from minillm.serve import blocks

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
# blocks of 16 tokens, on demand?** Two guesses; they come back with the measurement.

# %%
guess_reserved = 0.5  # unused share if every request reserves the whole context
guess_blocks = 0.2  # unused share with blocks of 16

# %% [markdown]
# ## The idea
#
# Memory is cut into *blocks* of a few tokens each, all alike ([Kwon et al. 2023](https://arxiv.org/abs/2309.06180)). A sequence holds some of them, from
# anywhere, in a *block table*: its logical block 0, 1, 2, ... Attention looks every key up through the table. An
# operating system does the same with pages, and with the same result: nothing needs to be contiguous, *any* free block
# will do, and there is nothing to defragment.
#
# Numbers in the cells are positions; crossed cells are held and unused.

# %%
show(pictures.tables_and_memory)

# %%
sliders(pictures.tables_and_memory, a=(1, 16), b=(1, 16), c=(1, 16), block_size=[1, 2, 4, 8])

# %% [markdown]
# Fill some tables by hand. Blocks hold 4 tokens; blocks 6, 2, 0, 7, 5, 3, 1, 4 are free and are taken in this order. Three
# sequences arrive one after the other: A with 6 tokens, B with 3, C with 9. Then A writes 4 more tokens.

# %%
my_tables = {"A": [0, 1, 2], "B": [3], "C": [4, 5, 6]}  # as if memory were given out in order: put yours in
my_place = (1, 1)  # block and place in it of C's token at position 5

# %%
receipts.tables_by_hand(my_tables, my_place)

# %% [markdown]
# ## Build it
#
# ### 1. Where a token lies
#
# All blocks of a layer are one tensor `[num_blocks, block_size, kv_heads, head_dim]`. Flattened over the first two,
# each place in it is a *slot*: the slot of a token says where its key and value are written.


# %%
def slot_mapping(table, start, count, block_size):
    """Slots of the `count` tokens from position `start` on, a list. Block b's first slot is b·block_size."""
    # BEGIN SOLUTION
    return [table[p // block_size] * block_size + p % block_size for p in range(start, start + count)]
    # END SOLUTION


slot_mapping = check("slot-mapping", slot_mapping)

# %% [markdown]
# ### 2. A pool that counts
#
# A block may be in several tables, so the pool keeps a *reference count*: how many tables hold it. A block is free when
# the count is 0. Releasing a free block is a bug of the caller and must raise, or two tables would get the same block.
# Each operation must cost the same however large the pool is (a real GPU has hundreds of thousands of blocks): no search.


# %%
class Pool:
    """`num_blocks` blocks, numbered from 0. references[b]: how many tables hold block b."""

    def __init__(self, num_blocks):
        # BEGIN SOLUTION
        self.references = [0] * num_blocks
        self.free = list(range(num_blocks))
        # END SOLUTION

    def allocate(self):
        """A block that nobody held, with one holder now. RuntimeError if there is none."""
        # BEGIN SOLUTION
        if not self.free:
            raise RuntimeError(f"all {len(self.references)} blocks are held")
        block = self.free.pop()
        self.references[block] = 1
        return block
        # END SOLUTION

    def share(self, block):
        """One holder more. ValueError if nobody holds it."""
        # BEGIN SOLUTION
        if self.references[block] == 0:
            raise ValueError(f"block {block} is free")
        self.references[block] += 1
        # END SOLUTION

    def release(self, block):
        """One holder less; after the last one the block is free. ValueError if nobody holds it."""
        # BEGIN SOLUTION
        if self.references[block] == 0:
            raise ValueError(f"block {block} is released twice")
        self.references[block] -= 1
        if self.references[block] == 0:
            self.free.append(block)
        # END SOLUTION


Pool = check("block-pool", Pool)

# %% [markdown]
# ### 3. Attention, block by block
#
# Keys lie in blocks all over the pool, and copying them together would need a second cache. But softmax does not need
# all scores at once. Keep the largest score so far $m$, the sum $\sum e^{s-m}$ and the weighted values
# $\sum e^{s-m} v$. When a block raises $m$ to $m'$, multiply both sums by $e^{m-m'}$ ([Milakov and Gimelshein 2018](https://arxiv.org/abs/1805.02867); the
# same idea carries lab 07's long contexts). Query heads `0 .. group-1` share kv head 0, and so on. Memory must
# not grow with the context, so keep neither all scores nor all values, not even in a list. The check fills every slot that
# does not belong to the sequence with NaN.


# %%
def paged_attention(q, k_pool, v_pool, table, context):
    """One query over its first `context` keys. q: [heads, head_dim]; k_pool, v_pool: [num_blocks, block_size, kv_heads,
    head_dim]; table: list of blocks -> [heads, head_dim]. No tensor that grows with the context."""
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
# ## Who may share a block?
#
# Two requests begin with the same system prompt: compute it once, hold it once. Which blocks may they share? Suppose two
# tables want to share a block that is logical block 0 in one sequence and logical block 2 in the other, with equal tokens
# in it. Are the keys and values equal, too? Ask the model: 32 tokens of code after two different beginnings of equal
# length, and after a longer beginning.

# %%
elsewhere = sharing.same_tokens_elsewhere()
layers = len(elsewhere["keys, there"])
print(f"{'relative difference by layer':32}" + "".join(f"{layer:8}" for layer in range(layers)))
for kind in ("keys, there", "values, there", "keys, later", "values, later"):
    what, where = kind.split(", ")
    said = f"{what}, {'other beginning' if where == 'there' else 'later position'}"
    print(f"{said:32}" + "".join(f"{difference:8.3f}" for difference in elsewhere[kind]))
receipts.same_tokens_elsewhere(elsewhere)

# %% [markdown]
# In layer 0 a key depends on its own token and position only. From layer 1 on it depends on everything before it. So a
# block can be shared only by sequences that agree in *all* tokens up to its end, and then it has the same logical index in
# both. Sharing any other block raises no error; the answers are just wrong.
#
# ### 4. A key for every full block
#
# Chain it: the key of a block is a hash of the key before it and of the block's tokens. The chain begins with what else
# changes keys and values (an adapter: different weights for some requests, lab 17) and with what must keep tenants apart
# (a salt). Both are names that anybody may choose: `"x"`, `"x|y"`, `"None"`. No two different pairs may give the same
# start, and a key has 64 bits at least.


# %%
def block_keys(tokens, block_size, adapter=None, salt=None):
    """-> a list of hashes, one per full block: equal only if the block, all before it, adapter and salt are equal."""
    # BEGIN SOLUTION
    parent, keys = hashlib.sha256(repr(("root", adapter, salt)).encode()).digest(), []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = hashlib.sha256(parent + repr(list(tokens[start : start + block_size])).encode()).digest()
        keys.append(parent)
    return keys
    # END SOLUTION


block_keys = check("block-keys", block_keys)

# %% [markdown]
# ### 5. A hit is compared
#
# Hashes collide, by chance or because somebody constructs a collision, and a hit on the wrong block raises no error. So an
# entry of the cache also holds the block's `tokens` and its `parent` (the block before it, None for a first one).


# %%
def find_prefix(tokens, keys, cache, block_size):
    """keys: of the full blocks of tokens. cache: {key: entry} with entry.block, entry.tokens (a tuple), entry.parent.
    -> blocks of the longest cached beginning, first to last; at least one token must be left to compute."""
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
# ### 6. Copy on write
#
# Several answers to one prompt (n samples, the beams of a beam search) share all its blocks. The prompt's last block
# usually has room, and each sample's first token belongs there. A sequence must copy a block before it writes into it if
# other tables hold it. That may be a block's first place, too: a table may have been forked just after its next block was
# reserved.


# %%
def prepare_write(table, position, pool, copy, block_size):
    """Before the token at `position` (the table's last block, or the first place behind it) is written: afterwards its
    block is held by this table alone. pool: as yours; copy(source, target) copies keys and values of a block."""
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
# ### 7. Evict what no table holds
#
# A system prompt may be needed again in a second, so its blocks stay findable after their last holder has left. They are
# evicted only when room is needed, the least recently used first (LRU), and their keys are forgotten in both dictionaries.
# A block with holders is never touched.
#
# LRU chooses among blocks that *no* running sequence holds. It cannot choose a running sequence to preempt: all of those
# are used in every step (lab 14 has policies for that).


# %%
class CachingPool:
    """A pool in which a cached block stays findable after its last holder has left."""

    def __init__(self, num_blocks):
        self.references = [0] * num_blocks
        self.free = list(range(num_blocks))
        self.idle = OrderedDict()  # cached blocks without a holder, the longest unused first
        self.block_of, self.key_of = {}, {}  # by key; by block

    def cache_block(self, block, key):
        self.block_of[key], self.key_of[block] = block, key

    def allocate(self):
        """A block with one holder: a free one, else the idle one unused for longest, whose key is forgotten."""
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
        """A sequence lets go of its blocks (a list, in its order): those nobody holds become idle, or free."""
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
# ## Yours under a transformer
#
# `SmallEngine` (in `course/lab13_paged_attention/experiments_engine.py`) puts your parts under the course's target model: your
# slots, your pool, your attention in every layer, your keys and hits, your copies. Its memory is NaN until a slot is
# written. Three requests: a prompt, another with the same beginning, and a fork of the first one.

# %%
parts = small.Parts(slot_mapping, Pool, paged_attention, block_keys, find_prefix, prepare_write)
engine = small.SmallEngine(parts, num_blocks=24, block_size=8)
prompt = experiments.cut(27, 1)
sibling = prompt[:18] + experiments.cut(6, 5)
table, logits = engine.prefill(prompt)
first, second = logits.topk(2).indices.tolist()
fork = engine.fork(table)
found = {
    "prompt": engine.answer(prompt, 4, first, table),
    "fork": engine.answer(prompt, 4, second, fork),
    "sibling": engine.answer(sibling, 4),
}
expected = {
    "prompt": experiments.naive(prompt, 4),
    "fork": [second, *experiments.naive([*prompt, second], 3)],
    "sibling": experiments.naive(sibling, 4),
}
receipts.your_engine(engine, prompt, sibling, table, found, expected)

# %% [markdown]
# ## Measure: waste
#
# From here on `minillm.serve` does the work (`blocks.py` is your pool, keys and hits in one file). 24 requests of code,
# in the memory that four reservations of 512 would take; after every step, every table is read.

# %%
wasted = experiments.waste(16)


def waste_view():
    """A sequence never leaves a whole block unused; reservations leave most of what they hold unused."""
    return pictures.draw_waste(wasted, experiments.target().config.max_seq_len)


show(waste_view)

# %%
receipts.waste(wasted, guess_reserved, guess_blocks)

# %% [markdown]
# Without sharing, this is all that paging gains: more sequences in the same memory, so a larger batch (lab 12 shows what
# that is worth in decode). The block size decides how much is still wasted:

# %%
show(pictures.waste_by_block_size)

# %%
sliders(
    pictures.waste_by_block_size, mean_length=(20, 2000, 20), block_size=[1, 4, 16, 64, 256], reserved=(512, 4096, 512)
)

# %% [markdown]
# Numbers that are often quoted about this, computed again:

# %%
receipts.claims_about_memory()

# %% [markdown]
# Less than 5 % waste is no property of paging; less than *one block per sequence* is.
#
# ## Measure: a prefix, once
#
# Six requests of 100 shared tokens and 20 of their own, the first a step before the others.

# %%
with_cache = sharing.share(receipts.PREFIX, receipts.OWN, receipts.REQUESTS)
without = sharing.share(receipts.PREFIX, receipts.OWN, receipts.REQUESTS, cache=False)
receipts.shared_prefix(with_cache, without)

# %% [markdown]
# How much sharing saves depends on the lengths of prefix and rest and on the number of requests. Move them:

# %%
show(pictures.sharing)

# %%
sliders(pictures.sharing, prefix=(0, 4000, 100), own=(10, 2000, 10), requests=(1, 32), block_size=[1, 16, 64, 256])

# %%
receipts.saved_shares()

# %% [markdown]
# ## Watch: copy on write
#
# Three samples of a prompt of 22 tokens, blocks of 4. The prompt is computed once. Yellow blocks are held by all three;
# numbers are logical places.

# %%
show(pictures.forks_before_and_after)

# %%
sliders(pictures.forks_over_time, step=(1, 14))

# %%
receipts.forks(pictures.forks())

# %% [markdown]
# ## Watch: eviction
#
# Three users take turns; each turn sends everything said so far, and a little more. Move the time. No table holds the pale
# blocks now, but they can still be found, until another user's turn needs the room. Then give the pool 40 blocks.

# %%
show(pictures.evictions_over_time)

# %%
sliders(pictures.evictions_over_time, num_blocks=[20, 24, 32, 40], step=(1, 108))

# %%
receipts.chats(pictures.chats(40), pictures.chats(20))

# %% [markdown]
# With 20 blocks, users take turns and their contexts do not all fit, so LRU evicts each block just before it is needed. A
# cache that is a little too small may be worth nothing at all.
#
# ## Break it
#
# Four engines, each with a bug that a real engine had, serve the same seven requests: some share a beginning of 40
# tokens; two prompts are equal; one has other tokens whose last bytes are the same; one comes from another tenant; two
# large ones come late and need room. The first line is the engine without a bug. Find the bug of each of the others.

# %%
engines = {"A": breaks.BUGS[1], "B": breaks.BUGS[3], "C": breaks.BUGS[0], "D": breaks.BUGS[2]}
findings = {"sound": breaks.run(), **{name: breaks.run(bug) for name, bug in engines.items()}}
columns = ("wrong", "hit", "hit_expected", "uncounted", "empty_steps", "unfinished")
print(f"{'engine':8}" + "".join(f"{column:>14}" for column in columns))
for name, found in findings.items():
    print(f"{name:8}" + "".join(f"{getattr(found, column):14}" for column in columns))

# %% [markdown]
# `wrong`: requests whose tokens are not the plain loop's. `hit`: tokens from the cache, beside what is right by hand.
# `uncounted`: most blocks that were in more tables than their count says. `empty_steps`: steps that computed nothing
# although sequences were running. Which engine has which bug? Choose from: frees shared blocks · one byte per token · whole prompt from
# the cache · no salt in the key.

# %%
diagnosis = {"A": "no salt in the key", "B": "one byte per token", "C": "?", "D": "?"}  # yours

# %%
receipts.traces_of_bugs(findings, diagnosis, engines)

# %% [markdown]
# - **A, one byte per token** ([vllm-mlx pull request 444](https://github.com/waybarrios/vllm-mlx/pull/444)): `bytes(t & 0xFF for t in tokens)` went into the hash, so token
#   65 equals token 321. One request of seven is answered from another text's keys. *More hits than the closed form* show
#   it; comparing whole tokens on a hit, as yours does, prevents it.
# - **B, no salt** (similar: [vLLM issue 44701](https://github.com/vllm-project/vllm/issues/44701), where an adapter's name
#   and a salt gave the same hash): every answer is right. But a hit tells one tenant that another has sent the same prompt.
#   The leak shows in the time to first token, and in the count of hits.
# - **C, frees shared blocks** ([mini-sglang pull request 142](https://github.com/sgl-project/mini-sglang/pull/142)): a
#   sequence ends, its blocks are freed, and another table still points at them. Answers become wrong only when memory is
#   short and the block is given away. *Tables against counts*, compared after every step, show it at once.
# - **D, whole prompt from the cache** ([nano-vllm pull request 199](https://github.com/GeeeekExplorer/nano-vllm/pull/199)):
#   nothing is left to compute, the query has length 0, and there are no logits to sample from. Others crash; this one
#   schedules the sequence forever.
#
# ## Where it loses
#
# A large block wastes more and shares less, since only *full* blocks of a prefix are found. A small block means more table
# entries, more keys to hash, and more work for attention that goes block by block. Five sizes, measured:

# %%
swept = sizes.sweep()


def sweep_view():
    """Unused share by block size, and attention's CPU time: block by block it falls, copied together it hardly changes."""
    return pictures.draw_sweep(swept)


show(sweep_view)

# %%
receipts.block_sizes(swept)

# %% [markdown]
# The right panel has two answers. Block by block, with Python work for each block, small blocks are expensive. Copied
# together first, the block size hardly matters: the same number of keys is gathered, whatever the blocks. A GPU kernel lies
# between the two: it wants a tile of keys in one piece, and beyond that gains little. The memory of the tables is *not* a
# reason for large blocks: an entry is tiny beside a token's keys and values. vLLM's default is 16, that of transformers 256;
# the last two rows show what 256 wastes on sequences of 100 tokens.
#
# Paging also loses where there is nothing to gain: one sequence of known length needs no table, and contiguous keys are
# read several times faster than keys that are first copied together (compare the rows; a kernel that follows the table
# itself copies nothing). A prefix cache gains nothing on prompts that never repeat, and still costs the hashing.
#
# ## The same thing in production
#
# `minillm.serve.blocks` holds these exercises in one file. Its keys are objects that compare whole chains, so a collision
# cannot cause a wrong hit; their hash only finds the entry in the dictionary.

# %%
print(inspect.getsource(blocks.Prefix))

# %% [markdown]
# Attention has several *backends* behind one signature: `block_by_block`, which is your exercise for a whole batch; and
# quicker ones for the CPU, which copy a sequence's blocks together and call torch's fused kernel. On a GPU a kernel
# does what you did: it looks up slots through the table, keeps a maximum and two sums on chip, and never writes scores
# to memory. With one query per sequence there is too little work to fill a GPU, so the *keys* are split, too, and the
# parts are joined by their sums ([Flash-Decoding, Dao et al. 2023](https://crfm.stanford.edu/2023/10/12/flashdecoding.html)). `minillm/model/paged_triton.py` is such a kernel; this
# is its last step. *Optional, where Triton is installed:* write the kernel for one split yourself, run it on the CPU with
# `TRITON_INTERPRET=1` set before Python starts, and hold it to the check of exercise 3.

# %%
print(inspect.getsource(getattr(paged_triton.combine, "fn", paged_triton.combine)))

# %% [markdown]
# Hugging Face `transformers` (version 5) has a paged cache, too. Four requests with 70 shared tokens, if it is installed:

# %%
try:
    theirs = peer.transformers_pages()
except ImportError:
    compared = "transformers is not installed: pip install 'transformers>=5,<6' to compare"
else:
    compared = receipts.transformers_pages(theirs)
compared

# %% [markdown]
# It finds blocks by a chained 64-bit hash, without comparing tokens. How likely is it that two blocks share a key?

# %%
receipts.collisions()

# %% [markdown]
# | here | in vLLM (options of `vllm serve`, version 0.29) |
# |---|---|
# | `block_size` | `--block-size` (default 16) |
# | `num_blocks` | `--gpu-memory-utilization` (default 0.92): what weights and activations leave becomes blocks |
# | | or explicitly: `--kv-cache-memory-bytes`, `--num-gpu-blocks-override` |
# | `prefix_cache` | on by default; `--no-enable-prefix-caching` |
# | `Prefix` | `--prefix-caching-hash-algo` (default `sha256`; `xxhash` is faster, but collisions can be constructed) |
# | `salt=` of a request | `cache_salt` in the request |
# | copy on write | none: n samples are n requests that hit the prompt's full blocks |
# | swap to the host | `--kv-offloading-size` (GiB). `--swap-space`, which many texts name, is gone since 0.18 |
#
# ## Common claims
#
# | as claimed | what is true | where to read it |
# |---|---|---|
# | "Blocks are free but not contiguous, so the cache needs defragmentation." | Any free block will do; only the unused end of a last block is wasted. | [Kwon et al. 2023](https://arxiv.org/abs/2309.06180), section 4 |
# | "Paging wastes under 5 %." | Under one block per sequence: little for long sequences, 13 % for 56 tokens in blocks of 16. | the receipt on quoted numbers |
# | "The KV cache takes 60–80 % of GPU memory." | 62–80 % of the *cache's own* memory was wasted by reservations. Of a 40 GB GPU, a 13B model's weights took 65 %, the cache about 30 %. | [Kwon et al. 2023](https://arxiv.org/abs/2309.06180), figures 1 and 2 |
# | "Equal tokens mean equal keys, so the block can be shared." | Only after equal beginnings, at the same positions. | the table of differences by layer |
# | "LRU picks the running sequence to preempt." | All running sequences are used in every step; LRU picks among blocks that no table holds. | [vLLM, prefix caching](https://docs.vllm.ai/en/latest/design/prefix_caching/) |
# | "Prefix caching saves 10–30 % in chats." | (R − 1) · P of R · (P + U) tokens: 10 % to 81 % in the receipt of saved shares. | the formula and your sliders |
#
# ## On a cluster
#
# Nothing of this lab needs several ranks, so it has no script for torchrun. Under tensor parallelism every rank holds `kv_heads / t` heads of *every* block, so block tables are equal on all
# ranks and one scheduler decides for all; under pipeline parallelism a rank holds its layers of every block. A prefix
# cache is per replica: a router has to send requests with one prefix to one replica (lab 19). The same engine on a GPU,
# where it takes the Triton kernel by itself:
#
# ```bash
# python -c "
# import torch
# from minillm.model import load_hf
# from minillm.model.generate import folder_of
# from minillm.serve import LLM, SamplingParams
# llm = LLM(load_hf(folder_of('target'), device='cuda', dtype=torch.bfloat16))
# print(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8))[0].answers[0].ids)"
#
# vllm serve MODEL --tensor-parallel-size 8 --block-size 16 --gpu-memory-utilization 0.9
# ```

# %% [markdown]
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
#
# *Follow-up: does it remove fragmentation?* External fragmentation, entirely: all blocks are alike. Internal remains,
# (b − 1)/2 per sequence on average.
# </details>
#
# **2. 100 users share a system prompt of 2,000 tokens. What is saved?**
# <details><summary>Answer</summary>
#
# 99 · 125 blocks and 99 · 2,000 prompt tokens: 825 blocks instead of 13,200, and 12,000 tokens computed instead of
# 210,000. Only full blocks count: of 2,010 shared tokens, 2,000.
#
# *Follow-up: all 100 arrive in the same step, nothing is cached yet?* A good scheduler lets the later ones use blocks
# that the first fills in this very step (every layer writes all keys before it reads any), or lets them wait a step.
# </details>
#
# **3. n samples of one prompt: what is copied, and when?**
# <details><summary>Answer</summary>
#
# At the first write into the shared last block, all samples but one copy it: 7 copies for 8 samples of 1,000 tokens,
# none for 1,008 (a multiple of 16). The last one writes in place, its count has fallen to 1.
#
# *Follow-up: and beam search?* The same, at every step at which beams fork; a beam that is dropped releases its blocks.
# </details>
#
# **4. How do you choose the block size?**
# <details><summary>Answer</summary>
#
# Waste grows with b, and a hit covers multiples of b only. Kernels want a tile of keys in one piece, the bookkeeping
# fewer entries, transfers larger pieces (2 MB per block of 16 here). 16 to 64 for short chats, more for long contexts.
# </details>
#
# **5. What belongs into the key of a cached block?**
# <details><summary>Answer</summary>
#
# All tokens up to its end, in full (chained); everything else that changes keys and values: adapter, images in place of
# tokens; and the tenant's salt, tagged so that an adapter called x is not a salt x. Not the sampling parameters. On a
# hit, compare, or use a hash that nobody can attack.
#
# *Follow-up: the weights are updated while serving?* Flush the cache, or put a version into the chain's root.
# </details>
#
# **6. The whole prompt is cached. What is left to do?**
# <details><summary>Answer</summary>
#
# One token at least: logits come from a forward pass, and the cache holds none. So a hit is cut to at most
# (prompt − 1) // b blocks.
# </details>
#
# **7. Which blocks may be evicted, in which order?**
# <details><summary>Answer</summary>
#
# Those with no holder, unused for longest first, and of one sequence the last block first, since a prefix is found from
# its beginning. Preempting a *running* sequence is another matter (lab 14): all of them are used in every step.
#
# *Follow-up: the hit rate fell to zero though traffic grew by a tenth only?* The working set no longer fits; LRU over a
# cycle evicts each block just before its turn.
# </details>
#
# **8. Answers are sometimes about another user's text. Where do you look?**
# <details><summary>Answer</summary>
#
# At receipts before code: hits against the closed form (wrong keys), tables against reference counts (a shared block
# freed), tokens against a plain loop with the cache off. Then: hash of truncated tokens, no comparison, a missing copy
# on write, a block cached before it was computed and never invalidated after a failure.
# </details>
#
# **9. Two tenants notice that some prompts answer faster. Is that a bug?**
# <details><summary>Answer</summary>
#
# A side channel: a shared prefix cache tells who asked what. A salt per tenant closes it, at the price of computing the
# common system prompt once per tenant.
# </details>
#
# ## You can now answer
#
# 1. **How much is wasted?** 1 − mean/reserved in one piece; less than a block per sequence, (b−1)/2 on average, in
#    blocks.
# 2. **When may two sequences share a block?** When all tokens up to its end, adapter and salt agree: recognised by a
#    chained key, compared on a hit. It is counted, copied before it is written, and evicted only when nobody holds it.
# 3. **Which bugs leave answers looking right?** A missing salt always, a truncated hash and a freed shared block nearly
#    always. Hits against the closed form, and tables against counts, show all three.
#
# ## Design questions
#
# Decide and compute first; the next cell has the numbers.
#
# **A.** The model above on one 80 GB GPU. Requests have 1,500 tokens of system prompt in common, 300 of their own and
# answers of 200. How many run at once, in blocks of 16, without a prefix cache and with one?
#
# **B.** The same GPU serves chats of 600 tokens. Transfers to the host are efficient from 16 MB on, so a colleague proposes
# blocks of 128. What does that cost in sequences, and what would you do instead?

# %%
receipts.design_numbers()

# %% [markdown]
# <details><summary>Answer A</summary>
#
# 427,000 tokens fit. Each request needs 2,000 tokens, 125 blocks: 213 at once. With the prefix held once (93 full blocks,
# since 1,500 is no multiple of 16), each further request needs 32 blocks: 831 at once, 3.9 times as many. Prompt compute
# falls from 1,800 to 312 tokens per request. Check next that decode at that batch still meets the latency target.
# </details>
#
# <details><summary>Answer B</summary>
#
# Blocks of 16 hold 702 sequences of 600 tokens, blocks of 128 hold 667 (5 blocks of 128 for 600 tokens): 5 % fewer, and
# prefix hits are rounded down to 128 tokens. A block of 128 is 16.8 MB. Instead, keep blocks of 16 and transfer several
# blocks per call, or store the layers of one block next to each other.
# </details>
#
# **Capstone (open).** 70B in bf16 over 8 GPUs of 80 GB, agents with 6,000 shared tokens and contexts that grow to 30,000. Choose
# the block size, the room for idle blocks and the salt policy, and defend them with numbers from
# `course/lab13_paged_attention/formulas.py` and `minillm.predict`.
#
# Next: **14 · continuous batching**, where sequences join and leave at every step.

# %%
finish("13_paged_attention")
