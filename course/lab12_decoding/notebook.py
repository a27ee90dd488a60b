# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 12 · Decoding
#
# **Prefill is bound by compute, decode by memory.** A model reads a prompt in one pass and writes its answer in many.
# Here you build both, with the cache that makes the second possible, and measure why they are slow for different
# reasons.
# Stands on labs 00 (the roofline) and 02 (the model).
#
# The seven exercises take an hour and three quarters, the core path of two hours with *Break it*; with the rest plan
# three. Running the notebook from top to bottom takes about a minute. At the end you can answer:
#
# 1. How many bytes and how many FLOPs does one more token take, and which of the two decides how long it takes?
# 2. What does the cache hold after n tokens, how large is that, and what do grouped heads save of it?
# 3. Up to which batch do further sequences cost almost nothing, and what ends it?
#
# > **Common claims**
# >
# > - *"A decode step reads 2 · parameters · bytes."* It reads each weight once. The 2 belongs to FLOPs, a
# >   multiplication and an addition per weight and token ([Pope et al. 2022](https://arxiv.org/abs/2211.05102), §2).
# > - *"The cache of a 70B model takes 5.2 MB per token"*, or *"21 GB for 4K tokens"*. 2 · 80 layers · 64 heads · 128 ·
# >   2 bytes are 2.62 MB; with its 8 kv heads the model needs 0.33 MB, 1.34 GB for 4,096 tokens.
# > - *"Grouped and multi-query attention save 4 to 8 times."* They save heads / kv heads: 4 for Llama 3 8B, 8 for 70B
# >   ([Ainslie et al. 2023](https://arxiv.org/abs/2305.13245)); multi-query attention saves as many times as there are
# >   heads ([Shazeer 2019](https://arxiv.org/abs/1911.02150)).
# > - *"Throughput that stops growing with the batch shows a memory bound."* It shows that reading the weights is no
# >   longer the limit. Reading the caches may be, which is a memory bound, or arithmetic, which is none.

# %%
import inspect

import torch

from course.kit import check, finish, hint, show, sliders
from course.lab12_decoding import experiments, figures, receipts
from course.lab12_decoding.decoders import Cache
from course.lab12_decoding.experiments import GPUS, MODELS

torch.set_num_threads(1)  # the device of this lab is one core, as in lab 02

# %% [markdown]
# ## Two kinds of passes
#
# In a causal model the keys and values of a token depend on what stands before it, never on what follows. Once
# computed, they stay right. So they are kept, and each token goes through the model once. The prompt goes in as a whole
# (*prefill*), which yields the first token of the answer. From then on each pass takes one token in and yields one
# (*decode*).

# %%
show(figures.a_sequence)

# %%
sliders(figures.a_sequence, prompt=(1, 10), answer=(1, 10))

# %% [markdown]
# Look at the last column: it stays white. The keys of a token are written in the pass that *it goes into*, in each
# layer before attention, since a token attends to itself. The last token of the answer goes into no pass.
#
# ## Predict
#
# **A model of 70 billion parameters in 16 bits on a device with 3.35 TB/s of memory bandwidth (the data sheet of one
# H100 SXM). How many tokens per second can one sequence get at most?** A pass has to read the weights. Write down your
# guess.

# %%
guess = 12  # tokens per second: your guess

# %%
receipts.first_guess(guess)

# %% [markdown]
# The formula is B · BW / (P·b + B·ctx·KV): B sequences of ctx tokens, P parameters of b bytes, KV bytes of cache per
# token, bandwidth BW. A weight is read *once* per pass: P·b = 140 GB, which takes 42 ms. Once per pass means once for
# the whole batch, so 8 sequences get nearly 8 times as many tokens together. (140 GB do not fit on one card of 80 GB.
# With the weights cut over two cards, each reads half of them in half the time.)
#
# ## Build it
#
# ### Exercise 1 · attention with a cache (20 minutes)
#
# Your attention gets the queries, keys and values of `n` new tokens and one layer's cache. In prefill `n` is the length
# of the prompt, in decode 1, and in lab 14 anything between. Keys and queries are rotated already, so positions are
# done. As in lab 02 scores are divided by √d, and no token sees those after it.


# %%
def attend(q, k, v, keys, values, start):
    """q: [heads, n, d]; k, v: [kv_heads, n, d]: n new tokens -> [heads, n, d], in q's dtype.

    keys, values: [kv_heads, room, d], this layer's cache; places 0 .. start - 1 are filled. Writes
    k and v into it and reads filled places only. Query head j reads kv head j // (heads /
    kv_heads).
    """
    # BEGIN SOLUTION
    end = start + k.shape[1]
    keys[:, start:end], values[:, start:end] = k, v
    group = q.shape[0] // k.shape[0]
    seen_k, seen_v = (kept[:, :end].repeat_interleave(group, dim=0) for kept in (keys, values))
    scores = q @ seen_k.mT * q.shape[-1] ** -0.5
    visible = torch.arange(end) <= torch.arange(start, end)[:, None]
    return torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1) @ seen_v
    # END SOLUTION


attend = check("cached-attention", attend)

# %% [markdown]
# *Bytes written* and *read* are what a decode step costs in every layer: one entry written, *all* entries read.
#
# ### Exercise 2 · prefill, then decode (15 minutes)
#
# The rotation of a query says at which position it stands (RoPE, `minillm/model/rope.py`). So you pass the position of
# each token that goes in. Greedy: always take the likeliest token.


# %%
def generate(model, prompt, count, cache):
    """prompt: list of ids -> list of the `count` likeliest ids after it.
    cache: empty, with room for all.

    model(tokens [1, n], positions [n], attention=cache) -> logits [1, n, vocab];
    whatever goes in is kept.
    """
    # BEGIN SOLUTION
    answer, tokens, start = [], prompt, 0
    while True:
        positions = torch.arange(start, start + len(tokens))
        logits = model(torch.tensor([tokens]), positions, attention=cache)
        answer.append(int(logits[0, -1].argmax()))
        if len(answer) == count:
            return answer
        start, tokens = start + len(tokens), answer[-1:]
    # END SOLUTION


generate = check("decode-loop", generate)

# %% [markdown]
# prompt + answer - 1 entries: the rule from the picture. Now your two pieces with the course's small model, which was
# trained on Python code:

# %%
model, tokenizer = experiments.target(), experiments.tokenizer()
prompt = tokenizer.encode("import os\n\ndef read(path):\n    with open(path")
cache = Cache(model.config, 128, attend)
with torch.no_grad():
    answer = generate(model, prompt, 48, cache)
print(tokenizer.decode(prompt + answer))
receipts.yours(model, prompt, answer, cache)

# %% [markdown]
# ### Exercise 3 · the size of the cache (10 minutes)


# %%
def kv_bytes(config, prompt, answer, itemsize):
    """Bytes in the cache once the last token of the answer is known.
    prompt, answer: numbers of tokens.

    config: num_layers, num_heads, num_kv_heads, head_dim. itemsize: bytes of a number.
    """
    # BEGIN SOLUTION
    entries = prompt + answer - 1
    return entries * 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize
    # END SOLUTION


kv_bytes = check("kv-bytes", kv_bytes)

# %%
receipts.cache_weights(kv_bytes)

# %% [markdown]
# What is left beside the weights is room for the caches of *all* requests together:

# %%
show(figures.caches)

# %%
sliders(figures.caches, context=(512, 32768, 512), batch=(1, 128))

# %% [markdown]
# ### Exercise 4 · a nucleus by hand (15 minutes)
#
# Now from logits to a token. Sampling from the whole distribution occasionally picks from its long tail, and one odd
# token spoils what follows. Top-p ([Holtzman et al. 2020](https://arxiv.org/abs/1904.09751)) keeps the *nucleus*: the
# smallest set of likeliest tokens whose probabilities sum to p or more. By hand first. Five tokens have 0.42, 0.23,
# 0.17, 0.11 and 0.07. **How many stay at top_p = 0.8? And at temperature 0.5, which squares them and divides by their
# sum?**

# %%
guess_warm, guess_cold = 2, 3  # your guess


# %%
def nucleus(probabilities, top_p):
    """[vocab] -> [vocab] of bool: which tokens stay. 0 < top_p <= 1: the likeliest always does, and
    1 keeps all. Of equally likely tokens at the border only as many stay as are needed."""
    # BEGIN SOLUTION
    if top_p >= 1:  # a running sum in float32 reaches 1 before its end
        return torch.ones_like(probabilities, dtype=torch.bool)
    ordered, order = probabilities.sort(descending=True, stable=True)
    likelier = ordered.cumsum(-1) - ordered
    stays = torch.zeros_like(probabilities, dtype=torch.bool)
    return stays.index_fill(0, order[likelier < top_p], True)
    # END SOLUTION


nucleus = check("nucleus", nucleus)

# %%
receipts.by_hand(nucleus, guess_warm, guess_cold)

# %% [markdown]
# ### Exercise 5 · the distribution (15 minutes)
#
# The order matters: temperature, then top-k and renormalize, then top-p on the result, then renormalize again.


# %%
def distribution(logits, temperature, top_k, top_p):
    """logits: [vocab] -> [vocab], the probabilities that the next token is sampled with.

    temperature >= 0: divides the logits, however small; 0 = the likeliest token for certain.
    top_k >= 1: only the k likeliest (None, or more than there are: all). Of equals any one is
    taken. top_p > 0: only the nucleus of what these leave, renormalized.
    """
    # BEGIN SOLUTION
    if temperature == 0:
        return torch.zeros_like(logits).index_fill(0, logits.argmax(), 1.0)
    logits = logits / temperature
    if top_k is not None:
        best = logits.topk(min(top_k, len(logits)))
        logits = torch.full_like(logits, float("-inf"))
        logits[best.indices] = best.values
    probabilities = logits.softmax(-1)
    kept = probabilities.masked_fill(~nucleus(probabilities, top_p), 0.0)
    return kept / kept.sum()
    # END SOLUTION


distribution = check("sampling-distribution", distribution)

# %%
receipts.samples(distribution, model, prompt)

# %% [markdown]
# The size of the nucleus adapts: a flat distribution keeps many tokens, a sharp one few. Top-k keeps equally many of
# both. (Serving engines sample with one generator per request, so that a seed gives the same answer whatever else is in
# the batch: `minillm/serve/sample/reference.py`.)
#
# ### Exercise 6 · what a step costs (15 minutes)
#
# A step yields one token for each of `batch` sequences, each with `context` tokens in its cache. Count what it reads
# and what it computes. Then, as on the roofline of lab 00, it takes at least as long as the slower of the two.


# %%
def decode_step(weights, kv_bytes, batch, context, itemsize, peak_flops, bandwidth):
    """-> (bytes read, FLOPs, tokens per second at most).

    weights: how many numbers multiply every token; itemsize: bytes of each; kv_bytes: of a cached
    token, all layers. (Scores are few FLOPs beside the weights' while the context is short: leave
    them out.)
    """
    # BEGIN SOLUTION
    read = weights * itemsize + batch * context * kv_bytes
    flops = 2 * weights * batch
    return read, flops, batch / max(read / bandwidth, flops / peak_flops)
    # END SOLUTION


decode_step = check("decode-step", decode_step)

# %% [markdown]
# ### Exercise 7 · what a user feels (15 minutes)
#
# Two latencies: *time to first token* (TTFT), which includes the wait in the queue and the prefill, and *time per
# output token* after that (TPOT). The log of a serving engine holds both.


# %%
def latencies(log):
    """log: [(seconds, request, "arrived" or "token"), ...] in order of time
    -> {request: (TTFT, TPOT)}.

    TPOT is None for an answer of one token. Every request has a token; a pass may yield several at
    one time (lab 15).
    """
    # BEGIN SOLUTION
    arrived = {request: at for at, request, event in log if event == "arrived"}
    times = {request: [] for request in arrived}
    for at, request, event in log:
        if event == "token":
            times[request].append(at)
    return {
        request: (
            at[0] - arrived[request],
            (at[-1] - at[0]) / (len(at) - 1) if len(at) > 1 else None,
        )
        for request, at in times.items()
    }
    # END SOLUTION


latencies = check("ttft-and-tpot", latencies)

# %% [markdown]
# The end-to-end latency is queue + prefill + (n - 1) · TPOT. Three prompts on the small model, one after the other.
# Which of the two latencies grows with the prompt?

# %%
receipts.two_latencies(latencies)

# %% [markdown]
# ## Measure: with a cache and without
#
# The next token when there are n: with a cache, n keys are read and one token is computed. Without, all n are computed
# again. The FLOPs are counted by torch:

# %%
receipts.one_more_token()

# %%
show(figures.next_token)

# %% [markdown]
# The formula is exact: n times the FLOPs without a cache, for the same logits up to rounding. With the cache the FLOPs
# of a token still grow, by 4·L·H·d for each token before it; that is attention itself. Over a whole answer:

# %%
receipts.whole_answer()

# %% [markdown]
# ## Measure: two kinds of passes under one roof
#
# Now time. The device is one core of this machine, and its roof is measured here and now, as in lab 00. All times are
# processor time of one thread. The weights are random and larger than the processor's caches, so that they really come
# from memory. Same weights, same code, two kinds of passes:

# %%
points = experiments.sweep()
receipts.under_the_roof(points)

# %%
show(figures.passes_under_a_roof)

# %% [markdown]
# But for noise a core stays at or below the roof: products of few rows reach neither of its lines. The claim of this
# lab is about *ratios*: a decode step for 4 sequences takes clearly less than four steps for one, because it reads the
# weights once; a prompt four times as long takes several times as long. On a GPU, whose arithmetic is far ahead of its
# memory, 4 take hardly longer than 1.

# %%
receipts.thesis(points)

# %% [markdown]
# Intensity is about 2/b FLOP per byte for each *token in the pass*, whether these are tokens of one prompt or of many
# sequences: to the weights a batch of 16 and a prompt of 16 are the same. With thousands of tokens activations count
# beside the weights (the figures leave them out). A layer's product with its activations:

# %%
receipts.intensities()

# %% [markdown]
# ## Measure: one against many

# %%
receipts.by_batch(points)

# %%
show(figures.one_against_many)

# %% [markdown]
# The weights are read once for all sequences, so by the roof a step takes hardly longer until compute takes over, at
# the batch in the table's title. Beyond it each further sequence costs its share of arithmetic. The measured bend is
# softer, as most passes fall short of the roof: in float32 a step of two can even take as long as two steps.
#
# Does prefill gain from batching, too? Predict, then look:

# %%
receipts.prefill_together()

# %% [markdown]
# One prompt already comes close to what the core can do. Four together get somewhat more tokens per second, but each
# waits nearly four times as long for its first token. It is decode that benefits from large batches.
#
# ### And the caches
#
# A batch shares weights, but no caches. Counted on a real step of the small model, operation by operation:

# %%
receipts.bytes_of_a_step()

# %% [markdown]
# ## On a GPU
#
# The same arithmetic with datasheet numbers (dense 16-bit FLOP/s, bytes per second; sources in `experiments.GPUS`):

# %%
show(figures.on_a_roof)

# %%
sliders(figures.on_a_roof, gpu=list(GPUS), model=list(MODELS), batch=(1, 512), prompt=(1, 4096))

# %%
show(figures.decode_by_batch)

# %%
sliders(
    figures.decode_by_batch,
    model=list(MODELS),
    context=(128, 32768, 128),
    kv_heads=[1, 8, 32],
    weight_bits=[4, 16],
)

# %% [markdown]
# There are three limits: reading weights (rising), compute (flat) and reading caches (flat, BW / (ctx · KV)). At a
# context of 2,048 decoding never becomes compute-bound, because each further sequence brings bytes of its own, and then
# the card is full. Move the context to 128, and compute takes over beyond a batch of about 440. Back at 2,048, try 32
# kv heads: the limit of the caches falls to a quarter. With 8 kv heads and 4-bit weights decoding is nearly 4 times as
# fast at batch 1 and a fifth faster at batch 200, where most of what is read is caches.
#
# And on a GPU a pass is hundreds of kernels of microseconds each, so at batch 1 their launches count; CUDA graphs
# replay them as one.
#
# ## Break it
#
# Four decoders read the same text token by token, beside the right one. The mask without offset is a bug that
# [gpt-fast#233](https://github.com/meta-pytorch/gpt-fast/issues/233) describes; torch's `is_causal=True` does the same
# when one query meets many keys. One of the four is no bug at all. **Predict which loss moves most, and which not at
# all.**

# %%
receipts.broken_decoders()

# %% [markdown]
# - *Every position + 100* changes nothing but rounding: rotations encode only distances. (The model refuses positions
#   beyond its context.)
# - *Position + 1 in decode* shifts the answer against the prompt but not against itself.
# - *Appended after attention*: a token does not see itself. The residual stream still carries it, so the text stays
#   plausible. Both bugs move the loss in the third digit, here even down, so a loss does not find them. Logits beside
#   those of a loop without a cache do: the difference should be about 1e-5.
# - *Mask without offset*: every decoded token sees the first key alone.
#
# ### Find the bug
#
# Three decoders with one bug each. The curves say how far the distribution of each is from the right one along the
# text, smoothed, with two sizes of the cache. **Which one attends to places that nothing was written to? Which is off
# by one position? Which appends too late?**

# %%
show(figures.three_decoders)

# %%
diagnosis = {"A": "?", "B": "?", "C": "?"}  # your diagnosis

# %% [markdown]
# <details><summary>Answer</summary>
#
# Only A depends on how much room the cache has: it attends to empty places, whose zeros get weight in the softmax
# (exp(0) = 1 each). Where the room fills up, its error shrinks. The error of B falls a hundredfold, at any room: only
# distances to the *prompt* are wrong, and the longer the answer, the less of what it attends to is prompt. The error of
# C goes up and down, but stays: every token misses itself, early and late.
# </details>

# %%
receipts.diagnosis(diagnosis)

# %% [markdown]
# ### When other tokens are no bug (skip on a first reading)
#
# "My greedy output changes with what else is in the batch"
# ([vLLM#9567](https://github.com/vllm-project/vllm/issues/9567),
# [vLLM#11658](https://github.com/vllm-project/vllm/issues/11658)). Here are 8 sequences, once in one pass and once in
# pieces of 7 tokens, as if they shared a token budget with other requests:

# %%
receipts.other_passes(8)

# %% [markdown]
# Products of another shape add in another order, and each precision rounds on its own scale. In bfloat16, logits
# between 8 and 16 lie on a grid of 0.0625: two tokens can tie, and a rounding decides. To tell this from a bug, **run
# it in float64.** Rounding shrinks to 1e-13 and the tokens agree; the effect of a wrong mask does not shrink. For the
# same tokens whatever the batch, use kernels that always add in the same order (`VLLM_BATCH_INVARIANT=1` in vLLM).
#
# ## Where it loses: a batch of one
#
# At batch 1 a decode step uses only a small part of the core's arithmetic, and of an H100's even less. What helps is to
# read *fewer bytes per token*: smaller weights (lab 16), several tokens per pass (lab 15), or
# more memories side by side (tensor parallelism halves the time of a read, lab 05; replicas do not).
#
# ## The same in production
#
# `transformers` generates with a `DynamicCache`: the same weights and the same prompt. This is all that the lab's cache
# does around your attention:

# %%
print(inspect.getsource(Cache.__call__))

# %%
receipts.transformers()

# %% [markdown]
# | vLLM | here |
# |---|---|
# | `--dtype bfloat16`, `--quantization` | bytes of a weight: what batch 1 waits for |
# | `--kv-cache-dtype fp8` | bytes of a cache entry: half the bytes, twice the sequences |
# | `--max-model-len` | the longest cache a sequence may have |
# | `--gpu-memory-utilization 0.9` | the share of the card for weights, workspace and caches |
# | `--max-num-seqs` | the largest batch of decode |
# | `--max-num-batched-tokens` | tokens per pass, prefill and decode together (lab 14) |
# | `SamplingParams(temperature, top_k, top_p, min_p, seed)` | exercises 4 and 5; `minillm.serve.SamplingParams` |
# | metrics `vllm:time_to_first_token_seconds`, `vllm:inter_token_latency_seconds` (each gap) | exercise 7 |
#
# Source: vLLM's [engine arguments](https://docs.vllm.ai/en/latest/configuration/engine_args.html) and
# [metrics](https://docs.vllm.ai/en/latest/design/metrics.html). Ask of every latency where its clock starts: at
# arrival, or when the request is scheduled.
#
# ## On a GPU machine
#
# ```bash
# python -m minillm machine                                   # peak and bandwidth of the card, measured
# python -m minillm generate "def main" --device cuda         # one sequence, as in exercise 2
# vllm bench latency --model $MODEL --batch-size 1 --input-len 32 --output-len 128
# vllm bench latency --model $MODEL --batch-size 64 --input-len 32 --output-len 128
# ```
#
# Each prints the latency of a whole batch. The first one's, divided by its 128 passes, is about the time per token.
# Divide the bytes of the weights by it: that is the bandwidth you get.
#
# ## Interview corner
#
# The numbers behind the answers, by formula:

# %%
receipts.interview()

# %% [markdown]
# Say your answer aloud before you open one.
#
# **1. Why is decode memory-bound and prefill not?**
# <details><summary>Answer</summary>
#
# Both read every weight once per pass. Prefill uses each weight for all tokens of the prompt, decode for one token of
# each sequence: about 2/b FLOPs per byte for each token in the pass. That is 1 FLOP/byte at batch 1 in 16 bits, against
# a ridge of 295 on an H100.
# </details>
#
# **2. What is in the cache after a prompt of p and an answer of n tokens?**
# <details><summary>Answer</summary>
#
# p + n - 1 tokens, each 2·L·H_kv·d numbers: the last token of the answer never went in. In each layer the new key is
# written before attention, because a token attends to itself.
# </details>
#
# **3. How much memory do you plan for caches?**
# <details><summary>Answer</summary>
#
# What is left beside weights and workspace, divided by bytes per token, gives tokens for all requests together. Divide
# by the mean length, not the maximum, if memory is paged (lab 13). Ask for the number of kv heads before you compute.
# </details>
#
# **4. Throughput stops growing with the batch. What now?**
# <details><summary>Answer</summary>
#
# Reading weights is no longer the limit. Either compute is (short contexts, batch beyond the ridge): more FLOP/s, fewer
# bits in compute. Or reading caches is (long contexts): GQA, 8-bit caches, windows, shorter contexts. Compare bytes per
# step with the bandwidth to see which.
# </details>
#
# **5. Does a larger batch raise latency?**
# <details><summary>Answer</summary>
#
# TPOT hardly, while the caches that a step reads are small beside the weights; then by what each further cache, or its
# arithmetic, costs. TTFT rises through the queue and through prefills that share passes with decodes (lab 14).
# </details>
#
# **6. Would a GPU with twice the FLOP/s and the same memory speed up a chat?**
# <details><summary>Answer</summary>
#
# Its first token perhaps, the others not. Twice the bandwidth would halve TPOT.
# </details>
#
# **7. A user reports other greedy tokens in a larger batch. Is that a bug?**
# <details><summary>Answer</summary>
#
# Look at the lead of the lost token and at the precision: within rounding it is the order of additions. Run both in
# float64: if the difference does not shrink with the precision, it is a bug.
# </details>
#
# **8. The text of a decoder looks fine. How do you know that its cache is right?**
# <details><summary>Answer</summary>
#
# Not by the loss. Compare logits with one pass over the whole text, in high precision, at every position. Change what
# must not matter: room in the cache, all positions by a constant, the chunks of the prompt.
# </details>
#
# ### Design questions
#
# **D1. Serve Llama 3 70B in 16 bits on two H200s with contexts of 32,768 tokens. How many sequences fit, which TPOT do
# they get, and what does an 8-bit cache change?**

# %%
receipts.design_contexts()

# %% [markdown]
# **D2. A chat with Llama 3 8B in 16 bits and contexts of 4,096 tokens needs a TPOT of at most 20 ms and a prefill of at
# most 250 ms. Which batch does each card carry, and which would you rent if an H100 costs twice an A100?**

# %%
receipts.design_card()

# %% [markdown]
# <details><summary>D1 and D2: a worked answer</summary>
#
# D1: 90 % of 282 GB minus 141 GB of weights leaves 113 GB for caches of 10.7 GB each: 10 sequences, at 25.7 ms per
# token and 390 tokens per second. An 8-bit cache halves both the room and the reads of a sequence: 20 sequences at
# the same TPOT, twice the throughput. It does little for one sequence alone (15.6 to 15.0 ms), because the
# weights dominate there.
#
# D2: all three meet the prefill limit at peak rates, the A100 with the least margin (197 ms; at half of its peak it
# fails). TPOT allows 47 sequences on the A100 and 96 on the H100: 2.0 times the tokens for 2 times the price, so the
# price does not decide. Prefill does: the H100 has three times the FLOP/s. Batches are limited by bandwidth here, not
# by memory.
# </details>
#
# ### Capstone (open)
#
# Make decoding at batch 1 faster on *your* machine without changing a single greedy token in float64: fewer and larger
# products, bfloat16 weights, `torch.compile`, a preallocated cache, anything. Before each change predict the time per
# token from the roof; after it, measure. How much of the bandwidth do you reach, and what takes the rest? Defend the
# order of your changes in half a page.
#
# ## Can you answer them now?
#
# 1. How many bytes and how many FLOPs does one more token take, and which of the two decides how long it takes?
# 2. What does the cache hold after n tokens, how large is that, and what do grouped heads save of it?
# 3. Up to which batch do further sequences cost almost nothing, and what ends it?
#
# Next: [13 · Paged attention](13_paged_attention.ipynb) gives the caches of many sequences one memory, in blocks.

# %%
finish("12_decoding")
