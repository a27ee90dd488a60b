# %% [markdown]
# # 12 · Decoding
#
# **Prefill is compute, decode is memory.** A model reads a prompt in one pass and writes its answer in many. Here you
# build both, with the cache that makes the second possible, and see why they are slow for different reasons.
#
# About 100 minutes with the exercises; running it top to bottom takes under a minute. At the end you can answer:
#
# 1. How many bytes and how many FLOPs does one more token take, and which of the two decides how long it takes?
# 2. What does the cache hold after n tokens, what does that weigh, and what do grouped heads save of it?
# 3. Up to which batch do further sequences come almost for free, and what ends it?

# %%
import inspect
import time
from dataclasses import replace

import torch

from course.lab12_decoding import experiments
from course.lab12_decoding import experiments_breaks as breaks
from course.lab12_decoding import experiments_peers as peers
from course.lab12_decoding import figures as pictures
from course.lab12_decoding import formulas as predict
from course.lab12_decoding.decoders import Cache
from course.lab12_decoding.experiments import GPUS, MODELS, WIDE
from minillm.labkit import check, receipt, row, show, sliders
from minillm.labkit.receipts import format_value
from minillm.model import generate as decoder
from minillm.predict import roofline
from minillm.predict.model import kv_bytes_per_token, parameters

torch.set_num_threads(1)  # the device of this lab is one core, as in lab 02

# %% [markdown]
# ## Two kinds of passes
#
# In a causal model the keys and values of a token depend on what stands before it, never on what follows. Once
# computed, they stay right. So they are kept, and each token goes through the model once. The prompt goes in as a whole
# (*prefill*), which gives the first token of the answer. From then on each pass takes one token in and gives one
# (*decode*).

# %%
show(pictures.a_sequence)

# %%
sliders(pictures.a_sequence, prompt=(1, 10), answer=(1, 10))

# %% [markdown]
# Look at the last column: it stays white. A token's keys are written in the pass that *it goes into*, before attention
# in every layer, since it attends to itself. The token drawn last goes into none. ("Run attention, then append the new
# keys" is the wrong order, and the new token's keys appear a pass later.)
#
# ## Predict
#
# **A model of 70 billion parameters in 16 bits, 3.35 TB/s of memory bandwidth (H100 SXM, NVIDIA's datasheet). How many
# tokens per second can one sequence get at most?** A pass has to read the weights. Write down your guess. (The one
# below reads them twice: "2 · parameters · bytes".)

# %%
guess = 12  # tokens per second: your guess

# %%
weights, kv, h100 = 70e9 * 2, kv_bytes_per_token(MODELS["Llama 3 70B"]), GPUS["H100 SXM"].bandwidth
rows = [row("your guess: tokens per second", None, guess)]
for batch, context, said in (
    (1, 0, ""),
    (8, 0, ""),
    (64, 0, ""),
    (64, 4096, ", with each one's cache of 4,096 tokens"),
):
    limit = predict.decode_tokens_per_s(weights, kv, batch, context, h100)
    rows.append(row(f"batch {batch}{said}: B · BW / (P·b + B·ctx·KV)", None, limit))
receipt("70B in 16 bits at 3.35 TB/s", rows)

# %% [markdown]
# (P parameters of b bytes each; B sequences of ctx tokens, KV bytes of cache for each token; BW the bandwidth.)
#
# A weight is read *once* per pass: P·b = 140 GB, 42 ms. (The 2 of "2 · parameters" belongs to FLOPs: a multiplication
# and an addition.) And once per pass means once for the whole batch: 8 sequences get nearly 8 times as much together.
# (140 GB do not fit on one 80 GB card: it takes two or more. Two read in half the time.)
#
# ## Build it
#
# ### 1. Attention that keeps
#
# Your attention gets the queries, keys and values of `n` new tokens and one layer's cache. In prefill `n` is the
# prompt's length, in decode 1, and in lab 14 anything between. Positions are in already: keys come rotated.


# %%
def attend(q, k, v, keys, values, start):
    """q: [heads, n, d]; k, v: [kv_heads, n, d]: n new tokens -> [heads, n, d].

    keys, values: [kv_heads, room, d], this layer's cache; places 0 .. start - 1 are filled. Writes k and v into it.
    Query head j reads kv head j // (heads / kv_heads).
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
# The last two rows are what a decode step costs in every layer: one entry written, *all* read. You will meet them
# again.
#
# ### 2. Prefill, then decode
#
# A query's rotation says where it stands (RoPE, `minillm/model/rope.py`). So you tell the model the position of each
# token that goes in. Greedy: always the likeliest token.


# %%
def generate(model, prompt, count, cache):
    """prompt: list of ids -> list of the `count` likeliest ids after it. cache: empty, with room for all.

    model(tokens [1, n], positions [n], attention=cache) -> logits [1, n, vocab]; whatever goes in is kept.
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
# prompt + answer - 1 entries: the rule you saw in the picture. Now your two pieces under the course's own small model,
# which was trained on Python code:

# %%
model, tokenizer = experiments.target(), experiments.tokenizer()
prompt = tokenizer.encode("import os\n\ndef read(path):\n    with open(path")
cache = Cache(model.config, 128, attend)
with torch.no_grad():
    mine = generate(model, prompt, 48, cache)
print(tokenizer.decode(prompt + mine))

# %%
theirs = list(decoder.generate(model, prompt, 48))
receipt(
    "yours on the small model",
    [
        row("tokens equal to minillm.model.generate's", 48, sum(a == b for a, b in zip(mine, theirs, strict=True))),
        row("entries in the cache", predict.kv_entries(len(prompt), 48), cache.entries),
    ],
)

# %% [markdown]
# ### 3. What it weighs


# %%
def kv_bytes(config, prompt, answer, itemsize):
    """Bytes in the cache when the last token of the answer has been drawn. prompt, answer: numbers of tokens.

    config: num_layers, num_heads, num_kv_heads, head_dim. itemsize: bytes of a number.
    """
    # BEGIN SOLUTION
    entries = prompt + answer - 1
    return entries * 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize
    # END SOLUTION


kv_bytes = check("kv-bytes", kv_bytes)

# %%
rows = []
for name, shape in MODELS.items():
    rows.append(
        row(
            f"{name}: per token, {shape.num_kv_heads} kv heads",
            kv_bytes(shape, 1, 1, 2),
            kv_bytes_per_token(shape),
            "B",
        )
    )
    full = replace(shape, num_kv_heads=shape.num_heads)
    rows.append(row(f"    with all {shape.num_heads} heads", kv_bytes(full, 1, 1, 2), kv_bytes_per_token(full), "B"))
    rows.append(row("    4,096 tokens, as it is", None, kv_bytes(shape, 4096, 1, 2) / 1e9, "GB"))
receipt("the cache in 16 bits: yours, and minillm.predict's", rows)

# %% [markdown]
# Grouped-query attention (Ainslie et al. 2023) saves H / H_kv: 8 times here, and multi-query attention (Shazeer 2019)
# saves H times, 64 for the 70B model: not "4 to 8 times" for both. Some numbers that go round, beside these:
#
# - "5.2 MB per token" for a 70B model: 2 · 80 · 64 · 128 · 2 bytes are 2.62 MB, and 0.33 MB with its 8 kv heads.
# - "21 GB for 4K tokens": 10.7 GB with all heads in 16 bits (21.5 is 32 bits); 1.34 GB as the model is.
# - "A token is about 1 MB": from 0.13 MB (8B) to 0.52 MB (Llama 2 7B, no grouping). Compute it.
# - "80 - 70 - 5 = 5 GB stay for the cache": 70 GB are *8-bit* weights. And what stays is for all requests together.

# %%
show(pictures.caches)

# %%
sliders(pictures.caches, context=(512, 32768, 512), batch=(1, 128))

# %% [markdown]
# ### 4. A nucleus by hand
#
# From logits to a token. Drawing from the whole distribution now and then hits its long tail, and one odd token spoils
# what follows. Top-p (Holtzman et al. 2020) keeps the *nucleus*: the fewest likeliest tokens whose probabilities sum to
# p or more. By hand first. Five tokens have 0.42, 0.23, 0.17, 0.11 and 0.07. **How many stay at top_p = 0.8? And at
# temperature 0.5, which squares them (and divides by their sum)?**

# %%
guess_warm, guess_cold = 2, 3  # your guess


# %%
def nucleus(probabilities, top_p):
    """[vocab] -> [vocab] of bool: which tokens stay. The likeliest always does; 1 keeps all."""
    # BEGIN SOLUTION
    ordered, order = probabilities.sort(descending=True, stable=True)
    likelier = ordered.cumsum(-1) - ordered
    return torch.zeros_like(probabilities, dtype=torch.bool).index_fill(0, order[likelier < top_p], True)
    # END SOLUTION


nucleus = check("nucleus", nucleus)

# %%
five = torch.tensor([0.42, 0.23, 0.17, 0.11, 0.07])
cold = five**2 / (five**2).sum()
receipt(
    "by hand",
    [
        row("your guess for temperature 1", None, guess_warm),
        row("kept: 0.42 + 0.23 = 0.65, + 0.17 = 0.82", 3, int(nucleus(five, 0.8).sum())),
        row("your guess for temperature 0.5", None, guess_cold),
        row(f"kept: {cold[0]:.2f} + {cold[1]:.2f} = {cold[:2].sum():.2f}", 2, int(nucleus(cold, 0.8).sum())),
    ],
)

# %% [markdown]
# ### 5. The distribution
#
# So the order matters: temperature, then top-k, then top-p, then the rest is scaled to 1 again.


# %%
def distribution(logits, temperature, top_k, top_p):
    """logits: [vocab] -> probabilities [vocab] that the next token is drawn with.

    temperature: divides the logits; 0 = the likeliest token for certain. top_k: only the k likeliest (None: all).
    top_p: only the nucleus of what these have left.
    """
    # BEGIN SOLUTION
    if temperature == 0:
        return torch.zeros_like(logits).index_fill(0, logits.argmax(), 1.0)
    logits = logits / temperature
    if top_k is not None:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], float("-inf"))
    probabilities = logits.softmax(-1)
    kept = probabilities.masked_fill(~nucleus(probabilities, top_p), 0.0)
    return kept / kept.sum()
    # END SOLUTION


distribution = check("sampling-distribution", distribution)

# %%
with torch.no_grad():
    logits = model(torch.tensor([prompt]))[0, -1]
rows = []
for temperature, top_k, top_p in (
    (1.0, None, 1.0),
    (1.0, None, 0.9),
    (0.7, None, 0.9),
    (1.5, None, 0.9),
    (1.5, 20, 0.9),
):
    shares = distribution(logits, temperature, top_k, top_p)
    drawn = torch.multinomial(shares, 6, replacement=True, generator=torch.Generator().manual_seed(0)).tolist()
    setting = f"temperature {temperature}, top_k {top_k}, top_p {top_p}"
    rows.append(row(f"{setting}: tokens that can come", None, int((shares > 0).sum())))
    rows.append(row("    six draws", None, " ".join(repr(tokenizer.decode([token])) for token in drawn)))
receipt(f"what may follow {tokenizer.decode(prompt)[-15:]!r}, of {len(logits):,} tokens", rows)

# %% [markdown]
# The nucleus breathes: a flat distribution keeps many tokens, a sharp one few. Top-k keeps as many in either. (Serving
# engines draw with a generator per request, so that a seed gives the same answer whoever else is in the batch:
# `minillm/serve/sampling.py`.)
#
# ### 6. What a step costs
#
# A step gives one token to each of `batch` sequences, each with `context` tokens in its cache. Count what it reads and
# what it computes. Then the roofline of lab 00: it takes at least as long as the slower of the two.


# %%
def decode_step(weights, kv_bytes, batch, context, itemsize, peak_flops, bandwidth):
    """-> (bytes read, FLOPs, tokens per second at most).

    weights: how many numbers multiply every token; itemsize: bytes of each; kv_bytes: of a cached token, all layers.
    (Scores are few FLOPs beside the weights' while the context is short: leave them out.)
    """
    # BEGIN SOLUTION
    read = weights * itemsize + batch * context * kv_bytes
    flops = 2 * weights * batch
    return read, flops, batch / max(read / bandwidth, flops / peak_flops)
    # END SOLUTION


decode_step = check("decode-step", decode_step)

# %% [markdown]
# ### 7. What a user feels
#
# Two latencies: *time to first token* (TTFT), which has the wait in the queue and the prefill in it, and *time per
# output token* after that (TPOT). A log of a serving engine has both.


# %%
def latencies(log):
    """log: [(seconds, request, "arrived" or "token"), ...] in order of time -> {request: (TTFT, TPOT)}.

    TPOT is None for an answer of one token.
    """
    # BEGIN SOLUTION
    arrived = {request: at for at, request, event in log if event == "arrived"}
    times = {request: [at for at, who, event in log if who == request and event == "token"] for request in arrived}
    return {
        request: (at[0] - arrived[request], (at[-1] - at[0]) / (len(at) - 1) if len(at) > 1 else None)
        for request, at in times.items()
    }
    # END SOLUTION


latencies = check("ttft-and-tpot", latencies)

# %% [markdown]
# End to end is queue + prefill + (n - 1) · TPOT. Three prompts on the small model, one after the other. Which of the
# two latencies grows with the prompt?

# %%
log = []
for length in (16, 128, 448):
    ids = experiments.windows(1, length)[0].tolist()
    log.append((time.perf_counter(), f"prompt of {length}", "arrived"))
    for _ in decoder.generate(model, ids, 12):
        log.append((time.perf_counter(), f"prompt of {length}", "token"))
rows = []
for request, (ttft, tpot) in latencies(log).items():
    rows += [row(f"{request}: TTFT", None, ttft, "s"), row("    TPOT", None, tpot, "s")]
receipt("measured here", rows)

# %% [markdown]
# ## Measure: with a cache and without
#
# One more token, when there are n: with a cache, n keys are read and one token is computed. Without, all n are computed
# again. Counted by torch:

# %%
more = experiments.one_more_token()
rows = []
for size, ways in more.items():
    for way, found in ways.items():
        rows.append(row(f"{size} tokens, {way}: FLOPs of the next", found["predicted"], found["flops"]))
    rows.append(row("    largest difference of a logit below 1e-3", True, ways["cached"]["apart"] < 1e-3))
receipt("the small model, float32", rows)


# %%
def one_more_token():
    """FLOPs and time of the next token, with a cache and recomputing everything, by the tokens there are."""
    return pictures.draw_one_more(more)


show(one_more_token)

# %% [markdown]
# Exact. n times the FLOPs, and the same logits. (With the cache a token's FLOPs still grow, by 4·L·H·d for each token
# before it; that is the attention itself.) Over a whole answer the difference is a factor of its length:

# %%
shape = MODELS["Llama 3 8B"]
kept, again = (predict.answer_flops(shape, 1000, 200, cached=cached) for cached in (True, False))
receipt(
    "Llama 3 8B, a prompt of 1,000 and an answer of 200",
    [
        row("TFLOP with a cache", None, kept / 1e12),
        row("TFLOP without", None, again / 1e12),
        row("    times as many", None, again / kept),
        row("    what the cache holds for it", None, predict.kv_bytes(shape, 1199) / 1e6, "MB"),
    ],
)

# %% [markdown]
# ## Measure: two passes under one roof
#
# Now time. The device is one core of this machine and its roof is measured here and now, as lab 00's card does it. All
# is processor time of one thread, so that other work on the machine is not in it. The weights are random and larger
# than the processor's caches, so that they really come from memory. Same weights, same code, two kinds of passes:

# %%
roof = experiments.roof()
points = experiments.sweep()
decode_points = [point for point in points if point.kind == "decode"]
prefills = [point for point in points if point.kind == "prefill"]
rows = [row(f"ridge of one core, {str(roof.dtype).split('.')[1]}: peak / bandwidth", None, roof.ridge, "FLOP/B")]
for point in (decode_points[0], decode_points[4], prefills[-1]):
    name = f"decode, batch {point.batch}" if point.kind == "decode" else f"prefill, {point.new} tokens"
    bound = point.work.bound(roof.peak_flops, roof.bandwidth)
    rows.append(row(f"{name}: FLOP per byte, so the bound is {bound}", None, point.work.intensity))
    rows.append(row("    at least", None, point.work.seconds(roof.peak_flops, roof.bandwidth), "s"))
    rows.append(row("    measured", None, point.seconds, "s"))
    rows.append(row("    tokens per second", None, point.tokens_per_s))
receipt(f"{parameters(WIDE).total / 1e6:.0f} million random weights", rows)


# %%
def passes_under_a_roof():
    """Decode steps by batch and prefills by prompt under one core's measured roof."""
    return pictures.draw_roofline(points, roof)


show(passes_under_a_roof)

# %% [markdown]
# Intensity is about 2/b FLOP per byte and *token in the pass*, whether these are tokens of one prompt or of many
# sequences: to the weights a batch of 16 and a prompt of 16 are the same. So "most LLM operations hit the slanted roof"
# is true of decoding and false of prefill and training: a product [2048, 8192] · [8192, 32768] in 16 bits has

# %%
receipt(
    "one layer's product, 16 bits",
    [
        row("2,048 tokens: FLOP/byte", 1560, roofline.matmul_intensity(2048, 8192, 32768, 2), tolerance=0.001),
        row("1 token", 1.0, roofline.matmul_intensity(1, 8192, 32768, 2), tolerance=0.001),
        row("ridge of an H100 SXM: 989 TFLOP/s over 3.35 TB/s", 295, 989e12 / 3.35e12, tolerance=0.001),
    ],
)

# %% [markdown]
# Points lie *below* the roof, as the seconds above say: it counts compulsory traffic only, and torch's products of few
# rows leave bandwidth unused. (Of float32 and bfloat16 the lab takes the one whose products are faster on this core.)
#
# ## Measure: one against many


# %%
def one_against_many():
    """Decoding by batch on one core: tokens per second of all sequences, and the time that each waits for a token."""
    return pictures.draw_batch(points, roof)


show(one_against_many)

# %%
one = decode_points[0]
turn = predict.turning_batch(WIDE, experiments.CONTEXT, roof.peak_flops, roof.bandwidth, roof.dtype.itemsize)
rows = [row("batch at which compute takes over, by the roof", None, turn)]
for point in decode_points:
    speedup = point.tokens_per_s / one.tokens_per_s
    rows.append(row(f"batch {point.batch}: times the tokens per second of one", None, speedup))
receipt("measured", rows)

# %% [markdown]
# Left of the turn a step takes hardly longer for 4 sequences than for one: the weights come once. Right of it each
# further sequence costs its share. (The bend is softer than the roof's: products of few rows reach neither line.) So
# "throughput does not improve with batch size beyond a point" is no sign of a memory bound. It is the sign that you
# have left it (or that caches outweigh weights, see below).
#
# Does prefill gain from batching, too? Predict, then look:

# %%
together = experiments.prefill_together()
rows = []
for point in together:
    rows.append(row(f"{point.batch} × {point.new} tokens in one pass: tokens per second", None, point.tokens_per_s))
    rows.append(row("    time to first token, for each", None, point.seconds, "s"))
receipt("prefill together", rows)

# %% [markdown]
# One prompt saturates the core already. Four together give about the same tokens per second and each waits four times
# as long for its first. It is decode that "benefits from large batches".
#
# ### And the caches
#
# A batch shares weights, never caches. Counted on a real step of the small model, operation by operation:

# %%
rows = []
for batch, context in ((1, 64), (8, 64), (8, 512)):
    for what, (predicted, counted) in experiments.bytes_of_a_step(batch, context).items():
        rows.append(row(f"batch {batch}, context {context}: {what} read", predicted, counted, "B"))
receipt("bytes of a decode step, float32", rows)

# %% [markdown]
# ## On a GPU
#
# The same arithmetic with datasheet numbers (dense 16-bit FLOP/s, bytes per second):

# %%
for name, gpu in GPUS.items():
    ridge = gpu.peak_flops / gpu.bandwidth
    rates = f"{gpu.peak_flops / 1e12:>4.0f} TFLOP/s {gpu.bandwidth / 1e12:.2f} TB/s  ridge {ridge:.0f}"
    print(f"{name:<14}{rates}  {gpu.source}")

# %%
show(pictures.on_a_roof)

# %%
sliders(
    pictures.on_a_roof,
    gpu=list(GPUS),
    model=list(MODELS),
    batch=(1, 512),
    prompt=(1, 4096),
    context=(64, 32768, 64),
)

# %%
show(pictures.decode_by_batch)

# %%
sliders(
    pictures.decode_by_batch,
    gpu=list(GPUS),
    model=list(MODELS),
    context=(128, 32768, 128),
    kv_heads=[1, 2, 4, 8, 16, 32],
    weight_bits=[4, 8, 16],
)

# %% [markdown]
# Three limits: weights (rising), compute (flat) and caches (flat, BW / (ctx · KV)). At a context of 2,048 decoding
# never becomes compute-bound: each further sequence brings its own bytes, and then the card is full. Move the context
# to 128, and compute takes over beyond a batch of about 440 (a ridge of 295 FLOP/byte, and a few caches on the way).
# Back at 2,048, try 32 kv heads: the caches' limit falls to a quarter. And, with 8 of them again, 4-bit weights: nearly
# 4 times as fast at batch 1, a fifth faster at 200, where most of what is read is caches.
#
# What changes on a GPU beside the numbers: a pass is hundreds of kernels of microseconds each, so at batch 1 their
# launches count (CUDA graphs replay them as one), and a decode kernel must split the *keys* of one sequence over the
# processors (Flash-Decoding), as there is only one query to split. The card is measured, not believed:
# `python -m minillm machine` puts its own peak and bandwidth beside the datasheet's.
#
# ## Break it
#
# Four decoders read the same text token by token, beside the right one. "Mask without offset" hit gpt-fast (#233), and
# torch's `is_causal=True` does just that when one query meets many keys. One of the four is no bug at all. **Predict
# which loss moves most, and which not at all.**

# %%
found = breaks.all_symptoms()
rows = []
for name, seen in found.items():
    rows.append(row(f"{name}: loss, nats per token", None, seen.nll))
    rows.append(row("    largest difference of a logit", None, seen.apart))
    rows.append(row("    greedy tokens that are the same", None, f"{seen.agree:.0%}"))
receipt(f"{breaks.LENGTH - breaks.PROMPT} tokens of text after a prompt of {breaks.PROMPT}", rows)

# %% [markdown]
# - *Every position + 100* changes nothing: rotations only know distances. (Near the end of the context it would.)
# - *Position + 1 in decode* shifts the answer against the prompt and not against itself. The loss hardly knows.
# - *Appended after attention*: a token does not see itself. The residual stream still carries it, so the text stays
#   plausible, and the loss moves in the third digit, perhaps even down. Losses do not find this. Logits beside those
#   of a loop that keeps nothing do: `apart` should be some 1e-5.
# - *Mask without offset*: everybody sees the first key alone. At least this one is loud.
#
# ### Diagnose
#
# Three patients. Each has one bug; the curves say how far its distribution is from the right one, token by token, with
# two sizes of the cache. **Which one attends to places that nothing was written to? Which is off by one position? Which
# appends too late?**

# %%
patients = breaks.patients()


def three_patients():
    """KL of three broken decoders from the right one by position, for two sizes of the cache."""
    return pictures.draw_patients(patients)


show(three_patients)

# %%
diagnosis = {"A": "?", "B": "?", "C": "?"}  # your diagnosis

# %% [markdown]
# <details><summary>Answer</summary>
#
# Only A depends on how much room the cache has, and it heals as the room fills: it attends to empty places, whose zeros
# get weight in the softmax (exp(0) = 1 each). B falls all the time, at any room: only the distances to the *prompt* are
# wrong, and the longer the answer, the less of what it attends to is prompt. C stays: every token misses itself, early
# and late.
# </details>

# %%
rooms, rows = list(patients["A"]), []
for name, by_room in patients.items():
    near, far = (sum(by_room[room].kl) / len(by_room[room].kl) for room in rooms)
    rows.append(row(f"patient {name}: mean KL with {rooms[0]} places", None, near))
    rows.append(row(f"    the same with {rooms[1]}", name != "A", abs(far - near) < 0.05 * near))
    rows.append(row(f"    your diagnosis; it {breaks.DISEASES[name]}", None, diagnosis[name]))
receipt("what tells them apart", rows)

# %% [markdown]
# ### When other tokens are no bug
#
# "My greedy output changes with what else is in the batch" (vLLM#9567, #11658). Here are 8 sequences, once in one pass
# and once in pieces of 7 tokens, as they would come if they shared a token budget with others:

# %%
rows = []
for dtype in (torch.bfloat16, torch.float32, torch.float64):
    other = breaks.in_other_passes(dtype)
    name = str(dtype).split(".")[1]
    rows.append(row(f"{name}: largest difference of a logit", None, other.apart))
    rows.append(row(f"    greedy tokens that became others, of {other.tokens}", None, other.changed))
    rows.append(row("    the lead they had lost at most", None, other.gap))
    rows.append(row("    places where two tokens share the lead exactly", None, other.ties))
receipt("the same tokens in other passes", rows)

# %% [markdown]
# Products of another shape add in another order, and each precision rounds on its own scale. In bfloat16 logits of 8 to
# 16 lie on a grid of 0.0625: two tokens can tie, and a rounding decides. A rule to tell this from a bug: **run it in
# float64.** Rounding shrinks to 1e-13 and the tokens agree. A wrong mask, a stale cache or another request's block does
# not shrink. (And the lead lost must be of the size of the rounding.) Whoever needs the same tokens whatever the batch,
# for tests or reinforcement learning, pays for kernels that always add in the same order: `VLLM_BATCH_INVARIANT=1`.
#
# ## Where it loses: a batch of one

# %%
rows = []
for point in (decode_points[0], decode_points[-1], prefills[-1]):
    name = f"decode, batch {point.batch}" if point.kind == "decode" else f"prefill, {point.new} tokens"
    rows.append(row(f"{name}: share of the peak FLOP/s", None, f"{point.flops_per_s / roof.peak_flops:.1%}"))
    moved = point.work.bytes / point.seconds / roof.bandwidth
    rows.append(row("    share of the memory bandwidth", None, f"{moved:.0%}"))
    rows.append(row("    time per token", None, point.seconds / (point.batch * point.new), "s"))
receipt("one core, measured", rows)

# %% [markdown]
# Alone, a sequence leaves nearly all arithmetic unused; on an H100, more than 99 % of it. A chat at home, an agent
# that waits for itself, the last request of the night: no batch to share with. What helps then reads *fewer bytes per
# token*: smaller weights (lab 16), several tokens per pass of the weights (speculation, lab 15), more memories side by
# side (tensor parallelism halves the time of a read, lab 18; replicas raise throughput, not this). What does not: more
# FLOP/s.
#
# With many requests the question becomes how to keep the batch full, and where to put all those caches: labs 14 and 13.
#
# ## The same in production
#
# `transformers` generates with a `DynamicCache`: the same weights, the same prompt, live. This is all that minillm's
# cache does around your attention:

# %%
print(inspect.getsource(Cache.__call__))

# %%
both = peers.beside_transformers()
rows = []
if both is None:
    print("transformers is not installed here: pip install 'minillm[test]'")
else:
    theirs, yours = both["transformers, DynamicCache"], both["exercise 2"]
    same = sum(a == b for a, b in zip(theirs["tokens"], yours["tokens"], strict=True))
    rows = [row("the same tokens", len(theirs["tokens"]), same)]
    rows += [row(f"{what}, theirs and here", theirs[what], yours[what]) for what in ("passes", "entries", "bytes")]
    rows += [row(f"{name}: seconds", None, found["seconds"], "s") for name, found in both.items()]
receipt("transformers with a DynamicCache, and the loop of exercise 2", rows)

# %% [markdown]
# | vLLM | here |
# |---|---|
# | `--dtype bfloat16`, `--quantization` | bytes of a weight: what batch 1 waits for |
# | `--kv-cache-dtype fp8` | bytes of a cache entry: half the bytes, twice the sequences |
# | `--max-model-len` | the longest cache a sequence may have |
# | `--gpu-memory-utilization 0.9` | what stays for caches beside the weights |
# | `--max-num-seqs` | the largest batch of decode |
# | `--max-num-batched-tokens` | tokens per pass, prefill and decode together (lab 14) |
# | `SamplingParams(temperature, top_k, top_p, min_p, seed)` | exercises 4 and 5; `minillm.serve.SamplingParams` |
# | `VLLM_BATCH_INVARIANT=1` | the same tokens whatever the batch |
# | metrics `vllm:time_to_first_token_seconds`, `vllm:inter_token_latency_seconds` (each gap) | exercise 7 |
#
# Ask of every latency where its clock starts: vLLM's `--enable-per-request-metrics` begins a request's time to first
# token when it is *scheduled*, and gives the wait in the queue apart.
#
# `transformers`: `cache_implementation="static"` takes the room at once, as `Cache` does (so that shapes stay the same
# and CUDA graphs can be replayed), and masks what is not filled yet: patient A, done right.
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
# Divide the weights' bytes by the time per token of the first: that is the share of the bandwidth you get.
#
# ## Interview corner
#
# The numbers first, by the formulas you have just checked:


# %%
def number(name, value, unit=""):
    print(f"{name:<76}{format_value(value, unit):>14}")


card = GPUS["H100 SXM"]
large, small = MODELS["Llama 3 70B"], MODELS["Llama 3 8B"]
number(
    "1. Llama 3 8B in bf16 on an H100: tokens/s of one sequence at most",
    predict.decode_rate(small, 1, 1024, card.peak_flops, card.bandwidth),
)
number(
    "   prefill of 1,024 tokens at the peak",
    predict.work(small, 1, 1024, 0).seconds(card.peak_flops, card.bandwidth),
    "s",
)
number("2. 70B: KV per token, 8 kv heads", kv_bytes_per_token(large) / 1e6, "MB")
number("   with all 64", kv_bytes_per_token(replace(large, num_kv_heads=64)) / 1e6, "MB")
number("   with one", kv_bytes_per_token(replace(large, num_kv_heads=1)) / 1e6, "MB")
number("3. 8B, 80 GB: tokens of cache beside 16-bit weights", predict.tokens_that_fit(small, 80e9))
number("   sequences of 4,096", predict.tokens_that_fit(small, 80e9) // 4096)
for context in (128, 512, 1024):
    turning = predict.turning_batch(small, context, card.peak_flops, card.bandwidth)
    number(f"4. 8B on an H100, context {context}: batch at which decode is compute-bound", turning or "never")
number(
    "5. 8B, context 4,096: tokens/s that no batch exceeds, BW / (ctx · KV)",
    predict.kv_ceiling(kv_bytes_per_token(small), 4096, card.bandwidth),
)
number(
    "6. 20 ms queue, 80 ms prefill, 300 tokens at 25 ms: end to end",
    predict.request_seconds(0.02, 0.08, 300, 0.025),
    "s",
)

# %% [markdown]
# **1. Why is decode memory-bound and prefill not?**
# <details><summary>Answer</summary>
#
# Both read every weight once per pass. Prefill uses each for all tokens of the prompt, decode for one token of each
# sequence: about 2/b FLOPs per byte and token in the pass. 1 FLOP/byte at batch 1 in 16 bits, against a ridge of 295 on
# an H100.
# </details>
#
# **2. What is in the cache after a prompt of p and an answer of n tokens?**
# <details><summary>Answer</summary>
#
# p + n - 1 tokens, each 2·L·H_kv·d numbers: the last token drawn never went in. Per layer the new key is written before
# attention, because a token sees itself.
# </details>
#
# **3. How much memory do you plan for caches?**
# <details><summary>Answer</summary>
#
# What stays beside weights and workspace, divided by bytes per token: tokens for all requests together. Then by the
# mean length, not the maximum, if memory is paged (lab 13). Ask for kv heads before you compute: 8 instead of 64 is 8
# times.
# </details>
#
# **4. Throughput stops growing with the batch. What now?**
# <details><summary>Answer</summary>
#
# Not memory-bound by weights any more. Either compute (short contexts, batch beyond the ridge): more FLOP/s, fewer bits
# in compute. Or caches (long contexts): ctx · KV bytes per token; GQA, 8-bit caches, windows, shorter contexts. Compare
# bytes per step with bandwidth to see which.
# </details>
#
# **5. Does a larger batch raise latency?**
# <details><summary>Answer</summary>
#
# TPOT hardly, up to the turn; after it, in proportion. TTFT through the queue and through prefills that share passes
# with decodes (lab 14).
# </details>
#
# **6. Would a GPU with twice the FLOP/s and the same memory speed up a chat?**
# <details><summary>Answer</summary>
#
# Its first token perhaps, the others not. Twice the bandwidth would halve TPOT.
# </details>
#
# **7. Does batching prompts help?**
# <details><summary>Answer</summary>
#
# Only short ones, below the ridge in tokens together. A long prompt saturates compute alone; batching it with others
# makes all of them wait for the sum.
# </details>
#
# **8. Someone reports other greedy tokens in a larger batch. Bug?**
# <details><summary>Answer</summary>
#
# Look at the lead of the lost token and at the precision: within rounding it is the order of additions. Run both in
# float64 (or float32): if the difference does not shrink with the precision, it is a bug.
# </details>
#
# **9. The decoder's text looks fine. How do you know that its cache is right?**
# <details><summary>Answer</summary>
#
# Not by the loss. Compare logits with one pass over the whole text, in high precision, at every place. Change what must
# not matter: room in the cache, all positions by a constant, chunks of the prompt.
# </details>
#
# **10. Temperature 0.7, top_p 0.9: in which order, and why does it matter?**
# <details><summary>Answer</summary>
#
# Temperature first, then the nucleus of the result, scaled to 1. The nucleus of a colder distribution has fewer tokens.
# (Libraries differ: read which order yours takes before comparing two.)
# </details>
#
# **11. Is top_p = 1, temperature = 0 deterministic?**
# <details><summary>Answer</summary>
#
# Given the same logits, yes, up to ties. The logits are what may change: see 8.
# </details>
#
# ## Can you answer them now?
#
# 1. How many bytes and how many FLOPs does one more token take, and which of the two decides how long it takes?
# 2. What does the cache hold after n tokens, what does that weigh, and what do grouped heads save of it?
# 3. Up to which batch do further sequences come almost for free, and what ends it?
#
# Next: lab 13 gives the caches of many sequences one memory, in blocks.
