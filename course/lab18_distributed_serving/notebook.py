# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 18 · Distributed serving
#
# **Split a model over ranks for latency, replicate it for throughput, and hand keys and values over where prompts and
# answers disturb each other.**
# Stands on lab 05 (a layer cut over ranks), lab 06 (pipelines), lab 13 (blocks) and lab 14 (the scheduler).
#
# The core path, the six exercises, takes two hours; with the measurements and the questions at the end plan three.
# Running the notebook from top to bottom takes about a minute. At the end you can answer:
#
# 1. What does a decode step send under tensor and under pipeline parallelism, and when is a second rank slower than one?
# 2. What does a hand-over cost, how is it hidden, and who allocates first?
# 3. How many of N cards prefill, and when should none do only that?
#
# > **Common claims**
# >
# > - *"Disaggregated prefill DOES NOT improve throughput"*
# >   ([vLLM 0.9.0](https://docs.vllm.ai/en/v0.9.0/features/disagg_prefill.html)). Without limits on latency. Within them
# >   it often does, by larger decode batches, and for long prompts it can do the opposite: *Where it loses* counts both.
# > - *"DistServe can serve 7.4x more requests or 12.6x tighter SLO"*
# >   ([Zhong et al. 2024](https://arxiv.org/abs/2401.09670), abstract). At most, and with both limits kept for more than
# >   90 % of requests. For your lengths and links it is another number; *Where it loses* computes it for limits on means.

# %%
import torch
import torch.nn.functional as F

from course.kit import check, finish, hint, show, sliders
from course.lab18_distributed_serving import experiments, figures, receipts
from course.lab18_distributed_serving import receipts_design as design

# %% [markdown]
# ## Predict
#
# Write down five guesses; they come back beside the answers. (The last one: at most 1.5 s to the first token and 40 ms
# between two, in the mean.)

# %%
guess_reduces = 80  # all-reduces of a decoded token in the 80 layers of Llama 3 70B
guess_slower = 1.0  # ms of latency from which two ranks lose to one that reads 100 ms a layer
guess_megabytes = 100.0  # MB that a prompt of 2,000 tokens of Llama 3 70B hands over
guess_hidden = 0.5  # share that 8 layers hide, if the link takes half as long as prefill
guess_prefill = 4  # of 16 H100 with 70B, those that prefill: prompts of 4,000, answers of 250

# %% [markdown]
# ## 1 · One token, two ranks
#
# Training cuts a layer so that a large batch fits (lab 05). Serving cuts it because a decode step *reads* every weight:
# with 1/t of them on a rank, it reads for 1/t of the time. Two all-reduces a layer are the price, of a message so small
# that its latency is nearly all of it.
#
#     x ──▶ q, k, v: rows ──▶ own heads, own keys and values ──▶ o: columns ──▶ Σ ──(+)──▶ gate, up ──▶ down ──▶ Σ ──(+)──▶ y
#
# ### Exercise 1 · a row of a decode layer (20 minutes)
#
# Norms (alike on every rank) and rotations (of each rank's own heads) are left out: they send nothing. Scores are divided by
# √d, and the MLP is SwiGLU: silu(gate x) · up x, then down. Query heads are in the order of the kv heads that they read.


# %%
def decode_layer(x, keys, values, part, group):
    """x: [h], the newest token of a sequence, the same on every rank; keys, values:
    [kv heads, tokens, d], cached by this rank; part: its rows of q, k, v, gate and up, its
    columns of o and down, and head_dim, d. All are float32, or all float64, and so is y.

    -> (y [h], keys, values), the latter with the new token behind: [kv heads, tokens + 1, d]."""
    # BEGIN SOLUTION
    d = part.head_dim
    keys = torch.cat((keys, (part.k @ x).view(-1, 1, d)), dim=1)
    values = torch.cat((values, (part.v @ x).view(-1, 1, d)), dim=1)
    query = (part.q @ x).view(len(keys), -1, d)  # the heads that read each kv head
    weights = (query @ keys.transpose(1, 2) / d**0.5).softmax(dim=-1)
    x = x + group.all_reduce(part.o @ (weights @ values).flatten())
    inner = F.silu(part.gate @ x) * (part.up @ x)
    return x + group.all_reduce(part.down @ inner), keys, values
    # END SOLUTION


decode_layer = check("decode-layer", decode_layer)

# %% [markdown]
# minillm's engine is made of the same layers as training: `over_ranks(group, FOLDER, use)` gives rank 0 an `LLM` and the
# others the steps that it decides. Each step is announced in one message. No token travels: every rank samples from the
# same gathered logits with the same random numbers, or, where decoding is greedy, compares each rank's likeliest token.
# Here it serves the committed target on two ranks:

# %%
served = experiments.two_ranks()
receipts.decode_step(served, guess_reduces)

# %% [markdown]
# ### Exercise 2 · a rank reads its own bytes (15 minutes)
#
# Eight ranks that each read the whole file read 141 GB of Llama 3 70B eight times from the same disk. Cut what you *ask*
# for.


# %%
def load_part(file, cuts, kv_heads, rank, world_size):
    """file.shape(name) -> (rows, columns); file.read(name, rows=slice, columns=slice) -> that part.
    cuts: {name: kind}; of a matrix of kind "rows" or "columns" this rank holds its equal share of
    them; "whole": all; "kv": rows of its kv heads, and of the same one as its neighbours where
    there are fewer heads than ranks; "words": ⌈rows / world_size⌉ rows, zeros behind the last word.

    -> {name: tensor}. Only what this rank holds is read, once."""
    # BEGIN SOLUTION
    part = {}
    for name, kind in cuts.items():
        rows, columns = file.shape(name)
        share, place = world_size, rank
        if kind == "kv":
            share = min(world_size, kv_heads)
            place = rank * share // world_size
        if kind == "whole":
            part[name] = file.read(name)
        elif kind == "columns":
            width = columns // world_size
            part[name] = file.read(name, columns=slice(rank * width, (rank + 1) * width))
        else:
            count = -(-rows // share)
            part[name] = file.read(name, rows=slice(place * count, (place + 1) * count))
            missing = count - len(part[name])
            part[name] = F.pad(part[name], (0, 0, 0, missing))
    return part
    # END SOLUTION


load_part = check("sharded-load", load_part)

# %% [markdown]
# ## 2 · Stages
#
# Pipeline parallelism needs no all-reduce: each rank of a stage sends h numbers over the boundary, which slow links bear.
# But a token passes all stages, one after the other: it is not sooner. While one batch is in the second stage the first
# could take another, but never a sequence of that same batch: its next input is the token that is still on its way.
#
# ### Exercise 3 · which batch may start? (15 minutes)


# %%
def next_batch(running, in_flight, stages):
    """The first stage is free. running: sequences that have tokens to write, the one that has
    waited longest first, those in flight included; in_flight: batches (lists of sequences) inside
    the pipeline; at most as many as stages.

    -> the list of sequences that start now, longest wait first: as many as may, up to an equal
    share of running for each stage, rounded up. [] if none may."""
    # BEGIN SOLUTION
    if len(in_flight) >= stages:
        return []
    busy = {name for batch in in_flight for name in batch}
    share = -(-len(running) // stages)
    return [name for name in running if name not in busy][:share]
    # END SOLUTION


next_batch = check("next-batch", next_batch)

# %% [markdown]
# A stage takes a + c·b seconds for b sequences: a to read its weights, c for each. Where reading is all (c = 0), one batch
# of everybody is as fast as many. With prompts in the batches, c decides:

# %%
receipts.stages(next_batch)

# %% [markdown]
# The engine takes `pp=2` as well. Beside the message that announces a step, which tp sends too, two stages send only h
# numbers, and no collective runs:

# %%
receipts.engine_of_stages(served)

# %% [markdown]
# ## 3 · Where a second rank is slower
#
# Your decode layer, four times over, on emulated links. Reading a layer's weights is slept, 100 ms on one rank and 50 on
# each of two. Two all-reduces a layer have two rounds each, and every round waits for the link's latency.

# %%
linked = experiments.over_links(decode_layer)


def tpot_by_latency():
    """Seconds per token on two ranks by the link's latency, beside one rank."""
    return figures.draw_links(linked)


show(tpot_by_latency)

# %%
receipts.over_links(linked, guess_slower)

# %% [markdown]
# A token's sums are kilobytes, so the rounds decide; a prompt's are megabytes, and bytes decide. Links between nodes are
# the slower ones in both, so tensor parallelism stays inside a node, and pipelines cross nodes. Throughput has a simpler
# answer. Two replicas of one rank share nothing and write twice the tokens, as long as the model fits on one: *split for
# latency, replicate for throughput*.
#
# ## 4 · Hand keys over
#
# A prompt of thousands of tokens is one long step, and every answer waits behind it. Chunks (lab 14) shorten the wait and
# repeat it. DistServe and Splitwise ([Patel et al. 2023](https://arxiv.org/abs/2311.18677)) let other cards prefill, which
# then send keys and values to those that decode: tokens · 2·L·H_kv·d·b bytes.

# %%
receipts.bytes_handed(guess_megabytes)

# %% [markdown]
# ### Exercise 4 · a hand-over, allocation first (25 minutes)
#
# The side that decodes sets blocks aside *before* anything is sent. If it is full it says so, holds nothing, and the prompt
# waits where it is. If a message does not come in time it gives up, frees, and asks again. So a message may arrive when its
# blocks belong to somebody else.


# %%
class DecodeSide:
    """self.free: a list of the blocks that nobody holds; self.cache: {block: content}."""

    def __init__(self, num_blocks):
        # BEGIN SOLUTION
        self.free = list(range(num_blocks))
        self.cache = {}
        self.held = {}  # request -> blocks
        self.missing = {}  # request -> (attempt, indices that have not arrived)
        # END SOLUTION

    def allocate(self, request, attempt, count):
        """-> a list of count blocks for an attempt to hand the request over; None, and nothing is
        held, if fewer are free. What an older attempt of the request holds is free first; a whole
        request is not allocated again."""
        # BEGIN SOLUTION
        self.give_up(request)
        if count > len(self.free):
            return None
        blocks = [self.free.pop() for _ in range(count)]
        self.held[request] = blocks
        self.missing[request] = (attempt, set(range(count)))
        return list(blocks)
        # END SOLUTION

    def arrive(self, request, attempt, index, content):
        """A message: what the index-th block of the request holds. -> whether the request is whole
        with it. A message of another attempt, or one that came before, changes nothing."""
        # BEGIN SOLUTION
        expected, missing = self.missing.get(request, (None, ()))
        if expected != attempt or index not in missing:
            return False
        self.cache[self.held[request][index]] = content
        missing.remove(index)
        if not missing:
            del self.missing[request]
        return not missing
        # END SOLUTION

    def give_up(self, request):
        """Frees what a request that is not whole holds, if anything."""
        # BEGIN SOLUTION
        if request in self.missing:
            del self.missing[request]
            self.release(request)
        # END SOLUTION

    def release(self, request):
        """A request that was whole has ended: its blocks are free."""
        # BEGIN SOLUTION
        self.free += self.held.pop(request)
        # END SOLUTION


DecodeSide = check("hand-over", DecodeSide)

# %% [markdown]
# In minillm's engine `PrefillPool.spawn(FOLDER)` starts ranks that prefill, and `LLM(model, prefill=pool)` allocates, asks, and
# goes on as after a hit in the prefix cache. The prompt's last token is computed where it decodes, which samples. From a
# shell: `serve --prefill 1 --decode 1`.

# %%
receipts.from_a_pool()

# %% [markdown]
# ### Behind the layers
#
# The first layer's keys are final when the second layer begins. Sent then, they travel while the rest is computed. Two ranks,
# eight layers that take 20 ms each (slept), on an emulated link that takes half as long:

# %%
handed = experiments.handover_on_a_clock()


def behind_layers():
    """Prefill and hand-over of eight layers: sent at the end, and each when it is computed."""
    return figures.draw_handover(handed)


show(behind_layers)

# %%
receipts.hidden(handed, guess_hidden)

# %% [markdown]
# Slower cores hide less: each layer also pays for starting its message.
#
# Computing the prompt again on the other side costs no link. Which is sooner depends on the link, the model and tp; move
# the sliders:

# %%
show(figures.hand_over_or_recompute)

# %%
sliders(figures.hand_over_or_recompute, model=["8B", "70B"], tp=[1, 2, 4, 8], hit=[0.0, 0.5, 0.9])

# %% [markdown]
# ## 5 · Split or together
#
# 32 sequences of Llama 3 70B decode on four H100, and three prompts of 8,000 tokens arrive (the figure shows the first
# two). The same requests with whole prompts, with chunks of 512, and with four more cards that prefill, so twice the cards;
# the next section keeps their number. This is simulated: a step's time is the roofline's at data-sheet peaks. The planner
# below counts what matrix products reach, and a prompt takes longer there.

# %%
played = experiments.interference()


def interference():
    """Steps of the cards that decode: tokens, and prompts between them."""
    return figures.draw_interference(played)


show(interference)

# %%
receipts.interference(played)

# %% [markdown]
# Cards of their own keep the gaps as they were. They do not bring the first token sooner than a whole prompt: after the
# last layer's hand-over it waits for the next decode step and for that step. Chunks cost more.
#
# ### Exercise 5 · choose the split (20 minutes)
#
# One card computes a prompt in prompt_s, and prompts arrive at random, so one waits for r·prompt_s² / 2(1 - r·prompt_s) in
# the mean at r per second (M/D/1, lab 19). A card that decodes b sequences takes step_s(b) for a token of each.


# %%
def choose_split(cards, prompt_s, step_s, most, output, ttft, tpot):
    """cards: to divide, at least one to each side; most: sequences that fit on a card that decodes;
    output: tokens of an answer; ttft, tpot: limits in seconds, of the mean; a card of each kind can
    meet them.

    -> (cards that prefill, requests per second that all sustain)."""
    # BEGIN SOLUTION
    spare = ttft - prompt_s
    prompts = 2 * spare / (prompt_s**2 + 2 * prompt_s * spare)  # the wait takes all that is spare
    running = max(b for b in range(1, most + 1) if step_s(b) <= tpot)
    answers = running / (output * step_s(running))

    def sustained(count):
        return min(count * prompts, (cards - count) * answers)

    best = max(range(1, cards), key=sustained)
    return best, sustained(best)
    # END SOLUTION


choose_split = check("choose-split", choose_split)

# %% [markdown]
# `python -m minillm plan --serve` does the same over all tp and pp of both sides, beside the same cards doing both:

# %%
receipts.splits(guess_prefill)

# %% [markdown]
# Apart, one replica decodes everybody's tokens in large batches, as many as it has stages, which take turns. Together, each
# of four replicas reads all weights for a small batch, but no card waits for the other kind of work. Both ways hold the
# weights four times here. A mean TPOT hides what a whole prompt between two steps does to it: the *longest gap* shows it.
# If that is your limit, as for speech, split, or use small chunks.
#
# ## Break it
#
# ### Exercise 6 · which bug? (20 minutes)
#
# Six programs, A to F, logged what they did. Four have a bug:
#
# - phases confused after preemption (two forms)
# - blocks freed before they are sent
# - rank 1 samples for itself
#
# A preempted request has lost its blocks and computes prompt *and* answer again before it goes on. A token is sampled when
# all that is known has been computed, and not before.


# %%
def verdict(seen):
    """seen.prompts: {request: tokens}; seen.events, in order: ("step", request, first, count,
    sampled), tokens first to first + count - 1 were computed and perhaps one sampled; ("preempted",
    request); ("sending", block), ("sent", block), the link begins and ends to read it; ("freed",
    block). seen.tokens: by rank, what it appended; the ranks stopped within two steps of
    each other.

    -> "right", "phases confused after preemption", "blocks freed before they are sent",
       "rank 1 samples for itself"."""
    # BEGIN SOLUTION
    known, computed, reading = dict(seen.prompts), dict.fromkeys(seen.prompts, 0), set()
    for what, *details in seen.events:
        if what == "step":
            request, first, count, sampled = details
            if first != computed[request] or sampled != (first + count == known[request]):
                return "phases confused after preemption"
            computed[request] = first + count
            known[request] += sampled
        elif what == "preempted":
            computed[details[0]] = 0
        elif what == "sending":
            reading.add(details[0])
        elif what == "sent":
            reading.discard(details[0])
        elif details[0] in reading:
            return "blocks freed before they are sent"
    if any(len(set(tokens)) > 1 for tokens in zip(*seen.tokens, strict=False)):
        return "rank 1 samples for itself"
    return "right"
    # END SOLUTION


verdict = check("which-bug-ranks", verdict)

# %%
receipts.programs(verdict)

# %% [markdown]
# Before you open this: which of them does a test with greedy decoding and one request at a time find?
#
# <details><summary>Answer</summary>
#
# None. Greedy tokens agree on all ranks without a common random number; one request is never preempted; and its freed block
# has no other request to overwrite it.
#
# - **B** and **E** are right.
# - **A: blocks freed before they are sent.** The sender counted "posted" as "sent". Whoever reads the cache later gets
#   keys of another prompt.
# - **C** and **F: phases confused after preemption.** C's request decodes on as if its cache were there, or F's answers when
#   its prompt ends, in the middle of its own text. "Has it written a token?" is the wrong question; *computed < known* is the
#   right one (lab 14).
# - **D: rank 1 samples for itself.** From then on the ranks compute different sequences and add their shares up: the
#   output is nonsense, and no error is raised.
# </details>
#
# ## Where it loses
#
# Section 3: two ranks over a slow link are slower than one. Section 2: stages do not make a token sooner. And the split, in
# requests per second within the same limits on TTFT and the mean TPOT, by the shape of the traffic, and without limits:

# %%
show(figures.split_or_together)

# %%
receipts.where_the_split_loses()

# %% [markdown]
# Cards of two kinds come in whole numbers, and the cache of the cards that prefill holds prompts only. A rate that changes
# from hour to hour wants another division each time. And a prompt that alone takes most of the limit on TTFT leaves no time
# to wait, so the cards that prefill are idle for much of the time: at 8,000 tokens the split loses, and with a TTFT of 2 s
# it wins. Without limits the same cards do more together. The split earns its keep with many cards, a tight limit on TPOT
# or on the longest gap, and prompts that are quick beside their limit.
#
# ## The same in production
#
# | what | here | elsewhere |
# |---|---|---|
# | tensor parallelism | `serve --tp 2` | vLLM `--tensor-parallel-size 2`, SGLang `--tp-size 2` |
# | stages | `serve --pp 2` | vLLM `--pipeline-parallel-size 2` |
# | prefill and decode apart | `serve --prefill 1 --decode 1` | vLLM: two instances and a KV connector, [experimental in 0.9.0](https://docs.vllm.ai/en/v0.9.0/features/disagg_prefill.html); SGLang `--disaggregation-mode prefill`, and `decode` |
# | who carries keys | `Group`, point to point | [NIXL](https://github.com/ai-dynamo/nixl), [Mooncake's transfer engine](https://github.com/kvcache-ai/Mooncake); [SGLang has both](https://docs.sglang.io/docs/advanced_features/pd_disaggregation) |
# | who allocates first | the side that decodes | the same in [Dynamo 0.7.1](https://docs.nvidia.com/dynamo/v-0-7-1/design-docs/architecture-flow), which then queues the prefill with the blocks' ids; in [0.9.1](https://docs.nvidia.com/dynamo/v-0-9-1/design-docs/architecture-flow) prefill goes first and the decode worker fetches, so the side that prefills holds blocks until then |
# | which cards | `plan --serve --rate R` | profiled beforehand, as DistServe's placement is |
#
# Pages as of 2026. Mooncake is described by [Qin et al. 2024](https://arxiv.org/abs/2407.00079).
#
# ## On a cluster
#
# Exercise 1 is a script as well, on one node or two:
#
# ```bash
# torchrun --nproc-per-node 4 labs/torchrun/18_distributed_serving.py
# torchrun --nproc-per-node 8 -m -- minillm serve --model $DIR --tp 8
# ```
#
# ## Interview corner
#
# The numbers behind the answers, by formula:

# %%
design.interview()

# %% [markdown]
# Say your answer aloud before you open one.
#
# **1. Why does tensor parallelism speed up decoding, and why not by t?**
# <details><summary>Answer</summary>
#
# A step reads weights and cache, and each rank has 1/t of both (of the cache only up to as many ranks as kv heads). Two
# all-reduces a layer and the small kernels do not shrink. At some t what does not shrink is most of the step.
# </details>
#
# **2. tp 8 or eight replicas?**
# <details><summary>Answer</summary>
#
# If the model fits on one card: replicas for throughput, as nothing is sent. tp where one card's TPOT is too long, or where
# the weights leave too little for the cache: with tp 8 they are stored once, not eight times.
# </details>
#
# **3. What does a pipeline do for a server?**
# <details><summary>Answer</summary>
#
# It makes a model fit over a slow link: a token sends h numbers over a boundary from each rank of a stage. A token takes
# all stages' time. With as many batches as stages no stage idles, and a sequence is in one batch only.
# </details>
#
# **4. What is handed over, and how is it hidden?**
# <details><summary>Answer</summary>
#
# Keys and values of the prompt, less the blocks that the other side has cached; and the first token, if it is sampled where
# the prompt was computed (here the decoding side computes the last token of the prompt and samples). Layer by layer, so
# that only the last layer's transfer is seen, if the link takes no longer than prefill.
# </details>
#
# **5. Why must the side that decodes allocate first?**
# <details><summary>Answer</summary>
#
# What has been sent must be put somewhere. If it is full, messages fill buffers, senders hold blocks, new prompts find none:
# each side waits for the other. With blocks set aside first, whoever waits holds nothing on the other side.
# </details>
#
# **6. A card that prefills dies. What happens to its requests?**
# <details><summary>Answer</summary>
#
# The side that decodes gives up after a time, frees the blocks, and asks another card: the prompt is computed again. Attempts
# are numbered, so that nothing of the first one is written into blocks that are somebody else's now.
# </details>
#
# ### Design question
#
# **D1. Llama 3 405B on two nodes of 8 H100 (80 GB each, 16-bit weights). Which tp and pp? What are TPOT and cache, what
# crosses the network for a token, and what would fewer bits change?**

# %%
design.two_nodes()

# %% [markdown]
# <details><summary>D1: a worked answer</summary>
#
# Weights are 812 GB, more than the 640 GB of a node, so both are needed, and 51 GB of each card are weights. tp 16 adds up
# over the network twice a layer. By a flat ring these sums are nearly all of a token's time. By an exchange in each node,
# one message across and another exchange, tp 16 is quicker than tp 8, pp 2, where such a message takes 25 µs. Against it
# speak 252 waits for the network in every token, and half of the cache: 405B has 8 kv heads, so 16 ranks keep each twice.
# tp 8 in each node and pp 2 crosses the network once a token, where each of 8 ranks sends its copy of the h numbers. Its
# TPOT is the sum of both stages. With weights in 8 bits the model fits into *one* node with tp 8: then two nodes are two
# replicas, or one that prefills and one that decodes, and the network carries hand-overs.
# </details>
#
# ### Capstone (open)
#
# A conversation's second turn finds its keys on the card that *decoded* the first, and its new prompt is prefilled elsewhere.
# Hand them back, compute them again, or prefill there? Extend `choose_split` by a share of prompt that is cached on the other
# side, and find the link from which handing back wins.
#
# ## Can you answer them now?
#
# 1. What does a decode step send under tensor and under pipeline parallelism, and when is a second rank slower than one?
# 2. What does a hand-over cost, how is it hidden, and who allocates first?
# 3. How many of N cards prefill, and when should none do only that?
#
# Next: [19 · A serving fleet](19_serving_fleet.ipynb) puts several such servers behind one address, where queues decide.

# %%
finish("18_distributed_serving")
