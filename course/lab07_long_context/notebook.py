# %% [markdown]
# # 07 · Long context
#
# **Attention computed tile by tile is still exact, so its memory can grow with the length instead of its square; and
# tiles may lie on different ranks.** You cut it, first on one rank, then over several.
# Stands on labs 01 (ring, all-to-all) and 02 (the memory of a step).
#
# About 4 hours; the core path of two is the exercises (105 minutes) with the figures beside them. Run All takes about a
# minute. At the end you can answer:
#
# 1. What does attention have to remember so that neither forward nor backward ever holds the score matrix?
# 2. Which rank waits for which under a causal mask, and what does the order of the positions change?
# 3. Ring, all-gather or Ulysses: what does each send, what hides it, and when does none of them pay?
#
# Labs 03 to 06 divided the batch, the state, the matrices and the layers. A sequence was always whole on some rank. At
# 128k tokens and more that is what no longer fits.
#
# The calls of `group`, and what each returns: [docs/group.md](../docs/group.md).

# %%
import inspect

import torch

from course.kit import check, finish, hint, show, sliders
from course.lab07_long_context import experiments, experiments_breaks, figures, receipts
from course.lab07_long_context import experiments_links as links

# %% [markdown]
# ## Where the bytes are
#
# Attention of one head over $S$ positions of size $d$ makes $S^2$ scores, takes the softmax of each row and multiplies by
# $V$. With a causal mask the query at position $p$ sees $p + 1$ keys, so half of the scores are thrown away.
#
# ## Predict
#
# **Written as `softmax(q @ k.T) @ v`, one head of one layer keeps its $S \times S$ probabilities for backward. How many
# GB is that at 131,072 tokens, in 16 bits?** Write down your guess. (The default counts what q, k and v take.)

# %%
guess_gb = 3 * 131072 * 128 * 2 / 1e9  # your guess

# %%
receipts.one_head(guess_gb)

# %% [markdown]
# ### Common claims
#
# | Claim | What is true |
# |---|---|
# | "FlashAttention makes attention linear." | Its *memory* is. The FLOPs stay quadratic, and its backward needs a quarter more than one that has stored the scores ([Dao 2023](https://arxiv.org/abs/2307.08691), §2.3). |
# | "FlashAttention approximates attention." | It is exact. Results differ in the last digits, as for any other order of additions. |
# | "Sequence parallelism and context parallelism are the same." | Megatron's *sequence parallelism* cuts norms and dropout inside a tensor-parallel group ([Korthikanti et al. 2022](https://arxiv.org/abs/2205.05198)), and each rank's attention still sees the whole sequence. Context parallelism cuts attention too. |
# | "Each of $N$ ranks does 1/N of the attention." | Not with contiguous parts under a causal mask: rank $r$ does $(2r+1)/N^2$. |
# | "Ring attention sends more than all-gather, so it is slower." | Forward sends the same bytes, backward about twice as many in float32, as gradients travel too ((2N-1)/(N-1); more for 16-bit inputs, whose gradients travel in float32). All but the last hop can hide behind the computation, block by block. |
#
# ## Build it
#
# ### 1. Merge two softmaxes (10 minutes)
#
# Two halves of the keys give two outputs for the same queries, each divided by its own sum of exponentials. To join them
# you need those sums, and nothing else. Their logarithm, the *log-sum-exp*, stays in range where the sums overflow.


# %%
def merge(out, lse, other, other_lse):
    """Two outputs of the same queries over different keys -> (output, lse) over all of these keys.

    out, other: [queries, head_dim]; lse, other_lse: [queries], log Σ exp(score) over the keys of
    each. A query that saw none of them has lse -inf and output 0.
    """
    # BEGIN SOLUTION
    total = torch.logaddexp(lse, other_lse)
    reference = total.masked_fill(total == float("-inf"), 0)  # -inf minus -inf is no number
    weight, other_weight = (lse - reference).exp(), (other_lse - reference).exp()
    return out * weight[:, None] + other * other_weight[:, None], total
    # END SOLUTION


merge = check("softmax-merge", merge)

# %% [markdown]
# ### 2. Forward in tiles (20 minutes)
#
# Take a tile of queries and walk over tiles of keys, merging as you go. This is the *online softmax*
# ([Milakov and Gimelshein 2018](https://arxiv.org/abs/1805.02867)). A kernel keeps the running maximum and sum in
# registers and divides once at the end ([Dao 2023](https://arxiv.org/abs/2307.08691), section 3.1); merging divides every time
# and gives the same. The check watches the size of every tensor you make, and counts the FLOPs.


# %%
def tiled_forward(q, k, v, tile):
    """q, k, v: [seq, head_dim] of one head, causal, scores scaled by head_dim ** -0.5
    -> (output, lse: [seq]).

    No tensor may be larger than q (or than a tile of scores, where that is larger), none of scores
    larger than tile x tile; tiles that no query sees are not computed.
    """
    # BEGIN SOLUTION
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:1], float("-inf"))
    for first in range(0, len(q), tile):
        rows = slice(first, first + tile)
        for start in range(0, first + tile, tile):
            keys = slice(start, start + tile)
            scores = q[rows] @ k[keys].T * q.shape[1] ** -0.5
            if start == first:  # the tile on the diagonal
                scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
            part_lse = scores.logsumexp(1)
            part = (scores - part_lse[:, None]).exp() @ v[keys]
            out[rows], lse[rows] = merge(out[rows], lse[rows], part, part_lse)
    return out, lse
    # END SOLUTION


tiled_forward = check("tiled-forward", tiled_forward)

# %% [markdown]
# ### 3. Backward in tiles (25 minutes)
#
# Forward kept the output $O$ and one number per query, $L$. That is enough to compute each tile's probabilities again:
# $P = e^{S - L}$, already divided by the sum over *all* keys. With $dO$ given,
#
# $$dV = P^\top dO \qquad dP = dO\,V^\top \qquad dS = P \circ (dP - \delta) \qquad \delta_i = dO_i \cdot O_i$$
#
# and $dQ = dS\,K$, $dK = dS^\top Q$, both times the scale of the scores. $\delta$ is softmax's own gradient: one number
# per query again, and it needs no tile.


# %%
def tiled_backward(q, k, v, out, lse, d_out, tile):
    """Gradients (dq, dk, dv) of the attention of exercise 2. All [seq, head_dim], but lse: [seq].
    Same limits."""
    # BEGIN SOLUTION
    scale, delta = q.shape[1] ** -0.5, (d_out * out).sum(1)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for first in range(0, len(q), tile):
        rows = slice(first, first + tile)
        for start in range(0, first + tile, tile):
            keys = slice(start, start + tile)
            p = (q[rows] @ k[keys].T * scale - lse[rows, None]).exp()
            if start == first:
                p = p.tril()
            dv[keys] += p.T @ d_out[rows]
            ds = p * (d_out[rows] @ v[keys].T - delta[rows, None]) * scale
            dq[rows] += ds @ k[keys]
            dk[keys] += ds.T @ q[rows]
    return dq, dk, dv
    # END SOLUTION


tiled_backward = check("tiled-backward", tiled_backward)

# %% [markdown]
# Five products of a tile instead of the four that a stored $P$ would need: a quarter more work for never storing $P$.
#
# ## Measure: memory by length
#
# minillm's own tiles (`minillm/model/attention/tiled.py`) beside attention that stores its scores, forward and backward of one
# layer. `measure.memory` counts every tensor that torch makes.

# %%
peaks = experiments.peaks()
show(figures.draw_memory, found=peaks)

# %%
receipts.memory(peaks)

# %% [markdown]
# Doubling the length doubles the tiles' memory and quadruples that of stored scores. Are the results equal?

# %%
receipts.exact()

# %% [markdown]
# torch's fused kernel returns the same two things for the same reason: an output and a log-sum-exp.
#
# ## Cut the sequence
#
# Now $N$ ranks hold $S/N$ positions each. Everything in a transformer but attention looks at one token at a time, so it
# runs unchanged on a part. Attention needs all keys before a query: $K$ and $V$ have to travel.
#
# ### 4. Which positions? (10 minutes)
#
# A rank with the last part of the sequence has to look at nearly all keys, the rank with the first at few. The slowest
# rank decides when the layer is done.

# %%
show(figures.causal_work)

# %%
sliders(figures.causal_work, ranks=(2, 8))


# %%
def zigzag(seq, rank, world_size):
    """The positions that a rank holds, ascending:
    seq / world_size of them, in at most two stretches without a gap.

    Every position belongs to one rank, and every rank's queries see the same number of keys.
    seq is a multiple of 2 * world_size.
    """
    # BEGIN SOLUTION
    size = seq // (2 * world_size)
    late = 2 * world_size - 1 - rank
    return [*range(rank * size, (rank + 1) * size), *range(late * size, (late + 1) * size)]
    # END SOLUTION


zigzag = check("zigzag-order", zigzag)

# %% [markdown]
# Why in stretches at all? Positions dealt out one by one (*striped*, [Brandon et al.
# 2023](https://arxiv.org/abs/2311.09431)) are nearly as even, but then every tile lies across the diagonal. Two stretches
# keep tiles that are wholly visible, or wholly invisible and never computed.
#
# The FLOPs that each of 4 ranks really makes in a ring over 1,024 tokens, by torch's counter:

# %%
work = experiments.work()
receipts.work(work)

# %% [markdown]
# ### 5. A ring (25 minutes)
#
# Each rank keeps its queries. Blocks of keys and values go round: send yours to the right, receive from the left, and
# attend to what you hold *meanwhile* ([Liu et al. 2023](https://arxiv.org/abs/2310.01889)).
#
#     step 0   q0·k0  q1·k1  q2·k2  q3·k3
#     step 1   q0·k3  q1·k0  q2·k1  q3·k2
#     step 2   q0·k2  q1·k3  q2·k0  q3·k1
#     step 3   q0·k1  q1·k2  q2·k3  q3·k0
#
# `work = group.exchange(send=(x, to), recv=(y, source), async_op=True)` returns at once; `work.wait()` returns when x has
# left and y is there. The check looks at the values, the bytes, the messages, and at whether one was under way while you
# computed.


# %%
def ring_attention(q, k, v, group, attend):
    """q, k, v: [seq / N, head_dim] of this rank -> its output, over the keys of all ranks.

    attend(q, k, v, source) -> (output, lse) of this rank's queries over the block of rank `source`;
    it knows which positions both have. Merge with your `merge`. Own block first, then as they
    arrive, with no more than two received blocks at a time.
    """
    # BEGIN SOLUTION
    n, rank = group.world_size, group.rank
    block, out, lse = torch.stack((k, v)), None, None
    for step in range(n):
        if step < n - 1:
            arriving = torch.empty_like(block)
            right, left = (rank + 1) % n, (rank - 1) % n
            work = group.exchange(send=(block, right), recv=(arriving, left), async_op=True)
        part, part_lse = attend(q, *block, (rank - step) % n)
        out, lse = (part, part_lse) if step == 0 else merge(out, lse, part, part_lse)
        if step < n - 1:
            work.wait()
            block = arriving
    return out
    # END SOLUTION


ring_attention = check("ring-attention", ring_attention)

# %% [markdown]
# Backward goes round once more. A block's gradient travels with it, one step behind, collects every rank's share and is
# home after $N$ steps: `minillm/parallel/context_parallel/ring.py`.
#
# ### 6. Heads for sequence (15 minutes)
#
# Ulysses ([Jacobs et al. 2023](https://arxiv.org/abs/2309.14509)) avoids the question: one all-to-all gives each rank
# *all* positions of *some* heads, ordinary attention runs on them, and a second one brings the output back.
# `group.all_to_all(x)`: x `[N * n, ...]`; part $j$ goes to rank $j$, the result holds this rank's part of every rank's x,
# in rank order.


# %%
def to_heads(x, group):
    """x: [heads, seq / N, head_dim], part `rank` of the sequence
    -> [heads / N, seq, head_dim], group `rank` of heads."""
    # BEGIN SOLUTION
    n = group.world_size
    # heads lie in front: part j is the heads of rank j already
    received = group.all_to_all(x.contiguous())
    return received.unflatten(0, (n, -1)).transpose(0, 1).flatten(1, 2)
    # END SOLUTION


def to_sequence(x, group):
    """The way back: [heads / N, seq, head_dim] -> [heads, seq / N, head_dim]."""
    # BEGIN SOLUTION
    n = group.world_size
    # [N, heads / N, seq / N, head_dim]
    parts = x.unflatten(1, (n, -1)).transpose(0, 1).contiguous()
    return group.all_to_all(parts).flatten(0, 1)
    # END SOLUTION


to_heads, to_sequence = check("ulysses-exchange", (to_heads, to_sequence))

# %% [markdown]
# Each is the other's backward. Two limits: the number of heads must be a multiple of the number of ranks, and kv heads
# are repeated before the exchange where there are fewer of them than ranks.
#
# ## Measure: what each variant sends
#
# From here on minillm's own (`minillm/parallel/context_parallel`): `ring`, `zigzag` (the ring in that order), `ulysses`,
# and `gather`, which collects all keys and values in one all-gather as
# [Llama 3](https://arxiv.org/abs/2407.21783) did (§3.3.2), because documents of any lengths then need nothing but a mask.
# One layer, 8 heads on 8 kv heads, then on 2:

# %%
receipts.traffic()

# %%
show(figures.bytes_by_ranks)

# %%
sliders(figures.bytes_by_ranks, heads=[8, 16, 32, 64], kv_heads=[1, 2, 4, 8])

# %% [markdown]
# The ring's bytes do not fall with $N$: a rank always has to see everybody's keys. Ulysses' do, until the kv heads run
# out. Grouped-query attention makes rings cheap (few kv heads travel) and limits Ulysses.
#
# ## A training step of 32,768 tokens
#
# A small transformer, one sequence of 32k tokens, forward and backward: on one process, and on 4 ranks with the zigzag
# ring. What does each hold? This is the rank program:

# %%
print(inspect.getsource(experiments.long_step))

# %%
long = experiments.one_and_four_ranks()
receipts.long_step(long)

# %% [markdown]
# A quarter of the activations each, and the same loss and gradient. Parameters are not divided by this axis: their
# gradients are summed over it, exactly as in data parallelism.
#
# ## Measure: overlap
#
# On an *emulated* link, with emulated work of 40 ms per block: first a link that is faster than the work (15 ms), then
# one that is slower (80 ms), with and without sending behind the work.

# %%
clocks = links.on_a_clock()
show(figures.draw_overlap, found=clocks)

# %%
receipts.overlap(clocks)

# %% [markdown]
# A faster link disappears behind the work. A slower one sets the pace, and the work disappears behind *it*. So the
# question is whether a block's work takes longer than its journey:
#
# $$\frac{4 H s^2 d / 2}{\text{FLOP/s}} \ge \frac{2 H_{kv}\, s\, d \cdot \text{bytes}}{\text{B/s}}$$
#
# Work grows with $s^2$, bytes with $s$. Neither $d$ nor $N$ matters: what counts is the number of tokens *per rank*.

# %%
show(figures.where_it_hides)

# %%
sliders(
    figures.where_it_hides,
    heads=[8, 16, 32, 64],
    kv_heads=[1, 2, 4, 8],
    tflops=(50, 1000),
    gb_s=(5, 900, 5),
)

# %% [markdown]
# ## Where it loses
#
# Short sequences: dividing them costs messages, and there is little work to divide. Forward attention of one layer on 4
# *emulated* devices, with a link of 10 MB/s and 10 ms per message, beside one device that has it all:

# %%
short = links.short_and_long()
receipts.short(short)

# %% [markdown]
# With 64 tokens per rank four devices take several times as long as one; with 1,024 they take a quarter to a third.
# Ulysses sends fewer bytes in more messages (an all-to-all is one to every other rank), so latency hurts it first.
#
# - *Few heads*: 8 kv heads over 16 ranks of Ulysses travel twice. Rings do not care.
# - *Slow links*: a ring across nodes at 5 GB/s needs tens of thousands of tokens per rank.
# - *Uneven documents*: zigzag balances one causal triangle, not a batch packed with short documents. A rank may get
#   documents of 500 tokens, another a part of one of 100,000. (`train --documents` keeps documents apart in attention.)
#
# ## Break it
#
# Three bugs that real projects shipped. None raises an error.

# %%
broken = experiments_breaks.accidents()

# %% [markdown]
# ### Gradients that never meet
#
# "There is no data parallelism (dp = 1), so skip the gradient reduction." But the cp ranks hold the same weights and have
# seen different tokens ([picotron](https://github.com/huggingface/picotron), [VeOmni
# #1115](https://github.com/ByteDance-Seed/VeOmni/issues/1115)).

# %%
print(inspect.getsource(experiments_breaks.kv_never_exchanged))
receipts.kv_never_exchanged(broken)

# %% [markdown]
# ### A mean of means
#
# Each rank divides its loss by *its own* number of target tokens, then the ranks average. Padding, prompts without a loss
# and documents make these numbers unequal ([Megatron-LM #673](https://github.com/NVIDIA/Megatron-LM/issues/673)).

# %%
print(inspect.getsource(experiments_breaks.mean_of_means))
receipts.mean_of_means(broken)

# %% [markdown]
# ### Positions from zero
#
# A rank masks its block as if it began the sequence
# ([gpt-fast #233](https://github.com/meta-pytorch/gpt-fast/issues/233) in a decoding loop). Which ranks are right?

# %%
print(inspect.getsource(experiments_breaks.from_zero))
receipts.offsets(broken)

# %% [markdown]
# Rank 0 is right, so a test on rank 0 passes.
#
# ## Find the bug
#
# A colleague wrote the ring's backward. Forward is perfect: it was tested. Nothing raises an error.

# %%
print(inspect.getsource(experiments_breaks.ring_backward))
receipts.bug_hunt(broken)

# %% [markdown]
# Which gradients are wrong, and which rank's? Which line? What test would have found it?
#
# <details><summary>Answer</summary>
#
# All three, on every rank. `backward_block(q, k, v, ...)` reads this rank's *own* keys and values in every step, though
# the block that travels is `block`: it should be `backward_block(q, *block, ...)`. Step 0 is right, because the two are
# the same there, and with one rank there is no other step: a test on one rank passes. diffusers' ring had this bug, as its
# backward operations read what forward had saved in step 0
# ([diffusers #14265](https://github.com/huggingface/diffusers/issues/14265)). Compare every gradient with one process, on
# two ranks at least: `python -m minillm oracle --cp 2 --context ring`.
# </details>
#
# ## The same in production
#
# | | ring | Ulysses | gather | both |
# |---|---|---|---|---|
# | here, `train --cp N --context` | `ring`, `zigzag` | `ulysses` | `gather` | `hybrid` |
# | [torch](https://docs.pytorch.org/tutorials/unstable/context_parallel.html) `context_parallel(mesh, buffers=...)` | `set_rotate_method("alltoall")` | | `set_rotate_method("allgather")`, the default | |
# | [Megatron Core](https://docs.nvidia.com/megatron-core/developer-guide/latest/user-guide/features/context_parallel.html) `--context-parallel-size N --cp-comm-type` | `p2p` | `a2a` | `all_gather` | `a2a+p2p` |
# | [DeepSpeed](https://www.deepspeed.ai/tutorials/ds-sequence/) | | `DistributedAttention` | | |
#
# torch patches `scaled_dot_product_attention` inside a `with` and cuts the tensors you name in its own load-balanced
# order, which is zigzag; in torch 2.13 it knows CUDA's flash, memory-efficient and cuDNN kernels, and not the CPU's.
# Megatron always orders zigzag.
#
# Serving is another problem. **vLLM** decodes one query per sequence, so there is nothing to balance and the cache is what
# has to be divided: `--decode-context-parallel-size` ([context parallel
# deployment](https://docs.vllm.ai/en/latest/serving/context_parallel_deployment.html)) spreads the *KV cache* over ranks
# of a tensor-parallel group that would otherwise hold copies of the same kv heads, and merges their partial outputs by
# log-sum-exp: exercise 1. With 8 kv heads on 16 ranks every key is held twice; decode context parallelism of 2 halves it.
#
# ## On a cluster
#
# `labs/torchrun/07_long_context.py` runs the ring and the exchange on any number of processes. After solving it:
# `torchrun --nproc-per-node 8 labs/torchrun/07_long_context.py`. A whole training run:
# `torchrun --nproc-per-node 4 -m minillm train --cp 4 --context zigzag --seq-len 4096`.
#
# ## Design questions
#
# Work each one out on paper, then run the cell below it.
#
# **A. Train an 8B model (32 layers, 32 heads, 8 kv heads of 128) on sequences of 1M tokens with 64 GPUs in nodes of 8:
# 400 TFLOP/s in attention, 400 GB/s inside a node, 50 GB/s across. Ring over 64, gather, Ulysses in the node with a ring
# across, or plain Ulysses?**

# %%
receipts.design_million()

# %% [markdown]
# <details><summary>Answer</summary>
#
# 16,384 tokens per GPU are far above the 4,000 that hide a ring at 50 GB/s, so the zigzag ring over 64 works: its links
# are idle most of the time. Ulysses alone is impossible (32 heads over 64 ranks). The hybrid makes 7 steps of the same
# size across nodes where the ring makes 63, and its all-to-alls stay inside the node; it becomes the choice when sequences
# get shorter. Gather holds K and V of all 1M tokens of a layer on every GPU (4.3 GB, twice while they are put in order),
# and nothing hides it. Attention takes more than nine tenths of the step's FLOPs, so an MFU that counts only $6P$ per token
# means nothing here. Activations of 1M tokens in 32 layers need recomputation beside cp.
# </details>
#
# **B. The same model on 128k tokens with 64 GPUs. One sequence over all 64, or 8 sequences over 8 each (dp 8, cp 8)?**

# %%
receipts.design_layout()

# %% [markdown]
# <details><summary>Answer</summary>
#
# Over 64 ranks each has 2,048 tokens, and a block's journey across nodes takes twice as long as the work on it. Over 8
# inside a node each has 16,384, and the work takes 30 times as long as the journey. Use as little cp as memory allows, and
# the fastest links for it; the rest is dp, whose gradients are reduced once per step. What it costs is memory (16,384
# tokens per GPU, as many as in question A) and batch size: 8 sequences of 128k are 1M tokens per step.
# </details>
#
# ## Capstone (*open*)
#
# A 70B model, documents from 1k to 1M tokens, 512 GPUs. Choose a length to pack to, cp for each bucket of lengths, tp, and
# what is recomputed. Defend it with `minillm.predict.training.context.ranking`, `hiding_length` and `python -m minillm plan`, and
# name the measurement that would change your mind.
#
# ## Interview corner
#
# Say your answer aloud before you open one.
#
# **1. How can softmax be computed without seeing the whole row?**
# <details><summary>Answer</summary>
#
# Keep the running maximum, the running sum and the weighted values; a larger maximum rescales both. Or keep output and
# log-sum-exp per part and merge: weights exp(own - joint). It is exact.
# </details>
#
# **2. What does FlashAttention save for backward?**
# <details><summary>Answer</summary>
#
# q, k, v, the output and one log-sum-exp per query. Probabilities are computed again tile by tile; the row sum in softmax's
# gradient is dO · O, which needs no tile.
# </details>
#
# **3. Rank r of N in a contiguous causal ring: how much work? And the cure?**
# <details><summary>Answer</summary>
#
# (2r+1)/N² of it: on 4 ranks 1, 3, 5 and 7 sixteenths, so the layer takes 7/4 of the balanced time. Zigzag: parts r and
# 2N-1-r of 2N.
# </details>
#
# **4. What does a ring send, forward and backward, and how does that compare with all-gather?**
# <details><summary>Answer</summary>
#
# Forward N-1 blocks of K and V, as all-gather. Backward N-1 blocks and N gradients of blocks, where all-gather has one
# reduce-scatter of N-1: about twice as much in float32, three times if gradients of 16-bit blocks travel in float32. The
# ring needs room for two blocks instead of N.
# </details>
#
# **5. When is a ring's link hidden?**
# <details><summary>Answer</summary>
#
# If tokens per rank ≥ 2 · 2·H_kv·bytes·FLOP/s / (4·H·B/s) (causal). 32 heads on 8 kv heads, bf16, 400 TFLOP/s and 50 GB/s:
# 4,000 tokens per rank. Neither head size nor N matters.
# </details>
#
# **6. What besides attention has to know the order of positions?**
# <details><summary>Answer</summary>
#
# RoPE, the mask, document boundaries, the targets (shifted before cutting, or the last token of a part has none), and
# whoever puts outputs together again.
# </details>
#
# **7. Ulysses on 16 ranks with 8 kv heads?**
# <details><summary>Answer</summary>
#
# Each kv head is repeated twice before the exchange, so its bytes stop falling. Better: Ulysses over 8, a ring over 2.
# </details>
#
# ## Can you answer them now?
#
# 1. What does attention have to remember so that neither forward nor backward ever holds the score matrix?
# 2. Which rank waits for which under a causal mask, and what does the order of the positions change?
# 3. Ring, all-gather or Ulysses: what does each send, what hides it, and when does none of them pay?
#
# Next: [08 · Expert parallelism](08_expert_parallel.ipynb) cuts the layers that are not attention, into experts on different ranks.

# %%
finish("07_long_context")
