# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 14 · Continuous batching
#
# **Sequences join and leave the batch at every step.** That one change takes a server from waiting for its longest
# answer to a batch in which no place stays free while a request waits. The price is a scheduler, and all that can go
# wrong in one.
# Stands on labs 12 (prefill and decode) and 13 (blocks).
#
# The core path, exercises 1 to 4 and 7 with the pictures beside them, takes two hours; with the rest plan four. Run All
# takes under a minute. At the end you can answer:
#
# 1. How many forward passes do static and continuous batching need for the same answers, and when equally many?
# 2. What happens to decoding sequences while a long prompt is computed, and what when the blocks run out?
# 3. How do you read from an engine's own records what is wrong with its scheduler?
#
# Here you decide, step by step, which sequences compute. A *step* is one
# forward pass; its batch holds at most `max_num_seqs` sequences. TTFT is the time from arrival to the first token, TPOT
# the time per output token after it. A table column called *simulated* comes from a clock on which each pass takes what
# a roofline says (8B model, one H100); *measured* is this machine.
#
# > **Common claims**
# >
# > - *"Prefill benefits from large batches."* A single prompt of a few hundred tokens already saturates the arithmetic.
# >   Decoding is what needs a batch ([Pope et al. 2022](https://arxiv.org/abs/2211.05102), §2).
# > - *"Chunked prefill removes stalls."* Only if chunks and decodes share a step
# >   ([Agrawal et al. 2024](https://arxiv.org/abs/2403.02310), Sarathi-Serve; *A long prompt arrives*).
# > - *"Preempt the least recently used sequence."* Nearly every running sequence ran in the step before. The rule is
# >   right for cached blocks that no sequence holds (*Four policies*).
# > - *"Batches should be powers of two."* What counts are a matrix's *dimensions*, as multiples of 8 in 16 bits, better
# >   of 64
# >   ([NVIDIA](https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/index.html)).
# >   Tokens of a step come in any number.

# %%
import heapq
import inspect
import itertools

from course.kit import check, finish, hint, show, sliders
from course.lab14_continuous_batching import experiments_engines as engines
from course.lab14_continuous_batching import figures, figures_flight, receipts, receipts_loads
from minillm.serve import POLICIES
from minillm.serve.tiny import TinyLLM

# %% [markdown]
# ## One page first
#
# `minillm/serve/tiny.py` is a whole serving engine in about 230 lines. This lab is about its `schedule` and `allocate`:

# %%
print(*map(inspect.getsource, (TinyLLM.schedule, TinyLLM.allocate)), sep="\n")

# %% [markdown]
# You build both with what they leave out: chunks, policies, swapping, priorities.
#
# ## Predict
#
# 32 requests wait; at most 8 run at once. The longest answer has 64 tokens, the mean is about 12. **How many forward
# passes do static batches of 8 need, and how many does continuous batching?** And: 16 sequences decode, one token
# every 5 ms, when a prompt of 8,192 tokens arrives. Alone it would take 142 ms; the scheduler computes it in chunks
# of 512 tokens, one per step, together with the decodes. **How long is the longest pause of one of the 16?**

# %%
guess_static = 4 * 64  # your guess: forward passes
guess_continuous = 4 * 12  # your guess
guess_gap_ms = 5  # your guess: ms

# %%
receipts.passes(guess_static, guess_continuous)

# %% [markdown]
# The longest answer alone needs 64 passes, so a larger batch would not help.
#
# ## Build it
#
# ### Exercise 1 · join and leave (15 minutes)
#
# A static batch runs until its longest answer is done. Iteration-level scheduling
# ([Yu et al. 2022](https://www.usenix.org/conference/osdi22/presentation/yu), Orca) decides after *every* step which
# requests are in the batch.


# %%
def continuous_batches(lengths, max_num_seqs):
    """lengths: tokens that each request needs, in order of arrival -> one list per step: the
    requests (0, 1, ...) in its batch. First come, first served; no place in the batch stays free
    while a request waits."""
    # BEGIN SOLUTION
    left, waiting, running, steps = list(lengths), list(range(len(lengths))), [], []
    while waiting or running:
        while waiting and len(running) < max_num_seqs:
            running.append(waiting.pop(0))
        steps.append(list(running))
        for request in running:
            left[request] -= 1
        running = [request for request in running if left[request]]
    return steps
    # END SOLUTION


continuous_batches = check("join-and-leave", continuous_batches)

# %%
show(figures.batches_over_time)

# %%
sliders(
    figures.batches_over_time,
    requests=(4, 64),
    max_num_seqs=(1, 12),
    sigma=(0.0, 2.0, 0.25),
    longest=(8, 96),
)

# %% [markdown]
# Set `sigma` to 0: all answers become equally long, and the two pictures are the same. In the long run static batching
# of B takes $E[\max \text{ of } B] / E[n]$ times as many steps, where n is the length of an answer. Counted with your
# function:

# %%
receipts.gain(continuous_batches)

# %% [markdown]
# ### Exercise 2 · a step under a token budget (20 minutes)
#
# A new request brings a prompt, which is many tokens at once. Engines used to have two phases, *prefill* and *decode*,
# and had to alternate. There is no need to. Every sequence has `num_tokens` tokens, of which `num_computed` are
# computed. A decoding sequence lacks one token, a new one its prompt, a preempted one everything, unless it was
# swapped out or hits cached blocks. Four sequences, as exercises 2 to 4 will see them (blocks of 16 tokens):
#
#                num_tokens  num_computed   lacks                 rank    last_step   blocks
#     running  a     41           40        1, it decodes         (0, 0)     17       [3, 8, 5]
#              b    900          512        388 of its prompt     (2, 2)     17       57, 32 of them filled
#     waiting  c    300            0        all, it is new        (5, 5)      -       none yet
#              d     70            0        all, it was preempted (9, 1)     12       none any more
#
# A step has a *budget* of tokens and hands it out:
#
# 1. one token to each running sequence that lacks one,
# 2. then to running sequences that lack more (their prompt is under way), in order, at most a `chunk` each,
# 3. then to waiting sequences, strictly in order, at most a `chunk` each, until `max_num_seqs` sequences run.


# %%
def plan_step(running, waiting, budget, chunk, max_num_seqs):
    """-> a list of (sequence, tokens). running, waiting: sequences in order, each with num_tokens
    and num_computed. The budget is at least max_num_seqs. Changes nothing, neither the sequences
    nor the lists: a plan says what the step will compute."""
    # BEGIN SOLUTION
    decoding = [s for s in running if s.num_tokens - s.num_computed == 1]
    prompts = [s for s in running if s.num_tokens - s.num_computed > 1]
    plan = []
    for sequence in [*decoding, *prompts, *waiting[: max(0, max_num_seqs - len(running))]]:
        tokens = min(sequence.num_tokens - sequence.num_computed, chunk, budget)
        if tokens:
            plan.append((sequence, tokens))
            budget -= tokens
    return plan
    # END SOLUTION


plan_step = check("token-budget-step", plan_step)

# %% [markdown]
# What does a pass cost? It has to read all weights and the cached keys and values, and to multiply; on a roofline it
# takes the larger of the two times. The 8B model, one H100, data-sheet peaks (as in lab 12):

# %%
receipts.pass_cost()

# %% [markdown]
# A prompt of 512 tokens already saturates the arithmetic; a second one in the same pass makes both wait longer.
# Decoding needs the batch: 64 sequences take 2.1 times the time of one, because the weights are read once for all of
# them while each reads its own keys and values. At 200 sequences of 2,000 tokens those reads dominate.
#
# ### Exercise 3 · which sequence to preempt (15 minutes)
#
# The length of an answer is not known when it begins, so a full pool is normal. When no block is left, some sequence
# has to give up its blocks. Four policies are common: most recently arrived, longest, lowest priority, least recently
# used. Each is a number per sequence, and the largest gives way. But from which sequences may one take a block at all?
# Think of what the preempted sequence does next.


# %%
def victim(running, needy, policy):
    """-> the sequence of running (which is in any order) that gives up its blocks for needy;
    None if needy has to wait for a block.

    rank: a tuple, smaller is earlier (served first). policy: "latest" (largest arrival: rank[1]),
    "longest" (num_tokens), "lowest priority" (largest priority: lower is sooner) or "least recently
    used" (smallest last_step). Among equals the one of the largest rank."""
    # BEGIN SOLUTION
    number = {
        "latest": lambda s: s.rank[1],
        "longest": lambda s: s.num_tokens,
        "lowest priority": lambda s: s.priority,
        "least recently used": lambda s: -s.last_step,
    }[policy]
    behind = [s for s in running if s.rank > needy.rank]
    return max(behind, key=lambda s: (number(s), s.rank), default=None)
    # END SOLUTION


victim = check("preemption-victim", victim)

# %% [markdown]
# *Only later sequences give way to earlier ones.* That alone excludes livelock: the first in rank is never preempted,
# so it ends and makes the next one first. Which of the allowed ones to choose is a question of cost.
#
# ### Exercise 4 · preempt and resume (30 minutes)
#
# There are two ways to give blocks up. *Recompute*: drop them; the tokens are known, so a prompt-like pass brings the
# keys and values back. *Swap*: copy them to the host, and back later. Here the bookkeeping is where bugs are.


# %%
class Preemption:
    """Gives the blocks of a sequence up and gets them back. A sequence has tokens, num_computed,
    blocks (on the device, one per pool.block_size tokens) and host_blocks (copies on the host,
    empty while it runs).

    The pool: blocks_for(tokens), available, free_host, allocate(count) -> blocks, share(blocks) ->
    blocks, release(blocks), idle(blocks) -> how many of them no sequence holds (they count in
    available), swap_out(blocks) -> host_blocks (copies, then releases), swap_in(host_blocks,
    blocks, skip=n) (copies all but the first n back, frees the host blocks)."""

    def preempt(self, sequence, pool, swap):
        """Takes all blocks from the sequence. swap: copies those that hold computed tokens to the
        host, if all of these fit there (free_host blocks); otherwise what was computed is lost.
        Sampled tokens stay."""
        # BEGIN SOLUTION
        held = pool.blocks_for(sequence.num_computed)
        if swap and held <= pool.free_host:
            sequence.host_blocks = pool.swap_out(sequence.blocks[:held])
            pool.release(sequence.blocks[held:])
        else:
            sequence.num_computed = 0
            pool.release(sequence.blocks)
        sequence.blocks = []
        # END SOLUTION

    def resume(self, sequence, pool, hits):
        """Blocks for all its tokens again, those of the prefix cache first (hits: full blocks,
        not held yet).
        -> True; or False, with nothing taken, if there are too few."""
        # BEGIN SOLUTION
        fresh = pool.blocks_for(sequence.num_tokens) - len(hits)
        if fresh + pool.idle(hits) > pool.available:
            return False
        sequence.blocks = pool.share(hits) + pool.allocate(fresh)
        pool.swap_in(sequence.host_blocks, sequence.blocks, skip=len(hits))
        sequence.host_blocks = []
        sequence.num_computed = max(sequence.num_computed, len(hits) * pool.block_size)
        return True
        # END SOLUTION


Preemption = check("preempt-and-return", Preemption)

# %% [markdown]
# The rows *recompute* and *swap* are an engine that preempts and resumes with your class; its answers equal those of a
# loop without blocks. Which way is cheaper? Recomputing costs FLOPs, $2P$ per token and a share that grows with length.
# Swapping costs bytes, twice over the link:

# %%
show(figures.recompute_or_swap)

# %%
sliders(
    figures.recompute_or_swap,
    link_gb_per_s=(4.0, 64.0, 4.0),
    kv_heads=[8, 32],
    block_size=[1, 4, 16, 64],
    copy_us=(0.0, 4.0, 0.5),
)

# %% [markdown]
# Swapping is a straight line; recomputing bends upwards, as each token attends to more before it. So the length decides
# only where the two are close. The link does, the number of kv heads and, with small blocks, what it costs to *start*
# a copy ([Kwon et al. 2023](https://arxiv.org/abs/2309.06180), §7.3: `copy_us`). Beside decoding
# sequences, which leave arithmetic units idle, part of a recomputation costs nothing.

# %% [markdown]
# ### Exercise 5 · patience (15 minutes, skip on a first reading)
#
# With strict priorities an endless stream of important requests starves the others. Let a level of priority be worth a
# *bounded* head start instead: `patience` places in the queue.


# %%
class PatientQueue:
    """The smallest arrival + patience * priority goes first; equal ones in order of arrival.
    Arrivals count pushes."""

    def __init__(self, patience):
        # BEGIN SOLUTION
        self.patience, self.heap, self.arrivals = patience, [], itertools.count()
        # END SOLUTION

    def push(self, name, priority):
        """priority: a whole number, lower is sooner."""
        # BEGIN SOLUTION
        arrival = next(self.arrivals)
        heapq.heappush(self.heap, (arrival + self.patience * priority, arrival, name))
        # END SOLUTION

    def pop(self):
        """-> the name whose turn it is."""
        # BEGIN SOLUTION
        return heapq.heappop(self.heap)[-1]
        # END SOLUTION


PatientQueue = check("patient-queue", PatientQueue)

# %% [markdown]
# The number is given once, so a preempted request goes back to its old place.
#
# ## The flight recorder
#
# The engine records every step: which sequences were in the batch with which tokens, which were admitted or preempted,
# how many blocks were free. Below, 12 requests share a pool of 48 blocks of 4 tokens. The upper panel shows which
# sequence holds which block *after* the step (×2: two sequences share it). The lower panel shows what each step
# computed.

# %%
show(figures_flight.view)

# %%
sliders(figures_flight.view, step=(1, 80), policy=list(POLICIES), preemption=["recompute", "swap"])

# %% [markdown]
# Move `step`. Prompt tokens are hatched; each decoding sequence adds one plain token per step. In step 14, the one
# shown, no free block was left and sequence 5 was preempted; its full blocks stay cached (grey, like free ones) until
# they are needed. Two steps later it is back and finds 20 of its 32 tokens still in the prefix cache: a hatched piece
# of 12, then it decodes. With `swap` it comes back with a single plain token.
#
# This run was *played* without a model, because a schedule depends on lengths and not on what the tokens say. The same
# trace through the engine, with a model:

# %%
receipts.two_recordings()

# %% [markdown]
# ### Exercise 6 · when did each token come? (20 minutes, skip on a first reading)
#
# What users feel is in the records, too. Beware: a sequence that is in a batch does not always get a token.


# %%
def latencies(records, prompts, arrived):
    """-> {name: (ttft, tpot, worst gap)} in seconds. records: one per step, each with batch: (name,
    first position, tokens), started and seconds. prompts: {name: tokens of its prompt}; arrived:
    {name: seconds}. A step's tokens are there when the step is over. Every request here gets two
    tokens or more."""
    # BEGIN SOLUTION
    held, times = dict(prompts), {name: [] for name in prompts}
    for each in records:
        for name, first, tokens in each.batch:
            if first + tokens == held[name]:  # it computes the last token that the sequence has
                held[name] += 1
                times[name].append(each.started + each.seconds)
    found = {}
    for name, at in times.items():
        gaps = [b - a for a, b in itertools.pairwise(at)]
        found[name] = (at[0] - arrived[name], sum(gaps) / len(gaps), max(gaps))
    return found
    # END SOLUTION


latencies = check("latencies-from-a-flight", latencies)

# %% [markdown]
# An engine that counts TTFT from admission leaves the queue out and looks good under overload. A mean TPOT hides
# pauses, so look at the worst gap as well, and at percentiles over *requests*: p99 of 32 requests is the worst one.
#
# ## Measure: three engines, one model
#
# The same 32 requests and the same model. *Timer* batching collects requests for up to 50 ms, then runs them as a
# static batch. Passes and padding rows (rows computed for answers that had already ended) are counted; tokens per
# second are useful tokens on the simulated clock.

# %%
at_once = engines.compare()
receipts.three_engines(at_once)

# %% [markdown]
# Now 60 requests arrive per second:

# %%
receipts.trickling()

# %% [markdown]
# With arrivals spread over time continuous batching wins on *uniform* lengths as well, above all in TTFT, since no
# request waits for the end of another batch. There the timer needs a few passes less.
#
# ### A long prompt arrives

# %%
show(figures.chunk_sizes)

# %%
receipts.chunks(guess_gap_ms)

# %% [markdown]
# The gap is the time of *one chunk* with the decodes in it ([Agrawal et al. 2024](https://arxiv.org/abs/2403.02310)).
# From 512 tokens up the prompt itself loses little; below, its passes are memory-bound. The last row computes the same
# chunks *without* decodes in between, and the 16 sequences wait as long as for the whole prompt.
#
# By this machine's wall clock, with the target model:

# %%
receipts.measured_stall()

# %% [markdown]
# Computed whole, the prompt stops the four sequences for as long as many of their steps. In chunks the pause is a few
# steps, and the prompt's first token comes later: on this CPU small passes are much less efficient.
#
# ### Four policies, two ways back
#
# 120 requests, 60 per second, every fourth less important, in a pool that is too small for them:

# %%
show(figures.worst_gaps)

# %%
receipts.policies()

# %% [markdown]
# On this trace the longest
# sequence frees most, so there are fewest preemptions, and throws most away. One trace does not rank policies: change
# `crowded()` in `experiments_engines.py` and look again. What does not depend on the trace is the column *used in the
# step before*: even of the sequences chosen as *least recently used*, nearly all had computed tokens in that step.
#
# The best way to avoid preemption is to admit less: let the next sequence in only if those that run have room to grow.

# %%
receipts.reserve()

# %% [markdown]
# A quarter of the preemptions are left, and p99 of the worst gap falls to a third. The trace takes as long as before:
# much of the recomputation hides beside decodes, so preemption is felt as a *pause*, hardly as lost throughput.
#
# ## Break it
#
# Four schedulers, each with a bug known from real engines, beside a sound one. None raises an exception, and the last
# shows in no column:

# %%
receipts.faults()

# %% [markdown]
# ### Exercise 7 · find the fault (30 minutes)
#
# An engine you do not know hands you its records. Find out what is wrong with its scheduler, from records and prompt
# lengths only. Be right about sound schedulers, too: preemption is no fault, nor is a wait for a block. First think
# what each fault must leave in the records; the fold names the mechanisms.
#
# <details><summary>What each of the four does</summary>
#
# - **Phases never mixed**: while any prompt has tokens left, no sequence decodes. The log says "chunked prefill
#   enabled".
# - **Place in the queue lost** ([SGLang#37260](https://github.com/sgl-project/sglang/pull/37260)): a preempted request
#   queues up again like a new one. All requests that came since go first, and it is the first candidate for the next
#   preemption.
# - **Livelock** ([nano-vllm#277](https://github.com/GeeeekExplorer/nano-vllm/pull/277)): a request that does not fit
#   preempts a running one, and does not fit in the next step either. Utilization is 100 %.
# - **Tokens that do not exist** ([nano-vllm#211](https://github.com/GeeeekExplorer/nano-vllm/pull/211)): after a
#   preemption some blocks are still in the prefix cache, but the number of tokens to compute was taken *before* the
#   hits were counted. The pass is asked for positions that hold no token yet.
# </details>


# %%
def diagnose(records, prompts):
    """-> "healthy", "phases never mixed", "place in the queue lost",
    "livelock" or "tokens that do not exist".

    records: one per step, each with batch: (name, first position, tokens), admitted, preempted,
    ended: names, sampled: how many tokens came out, and free and cached: blocks without a holder
    after the step. prompts: {name: tokens of its prompt}. Names are "0", "1", ... in order of
    arrival, priorities equal. In a step preemptions come first, then admissions, then the batch.
    The recording may stop before all requests have ended. It is a livelock if the last 100 steps
    gave no token and made no progress, which a long prompt in chunks does."""
    # BEGIN SOLUTION
    held, away, decoding = dict(prompts), set(), set()
    last = records[-100:]
    silent = len(last) == 100 and not any(each.sampled for each in last)
    if silent and (any(each.preempted for each in last) or not any(each.batch for each in last)):
        return "livelock"
    for each in records:
        away |= set(each.preempted)
        decoding -= set(each.preempted)
        for name in each.admitted:
            away.discard(name)
            if any(int(other) < int(name) for other in away):
                return "place in the queue lost"
        stalled = decoding and not decoding & {name for name, _, _ in each.batch}
        if stalled and each.free + each.cached > 0 and not each.ended:  # not for want of a block
            return "phases never mixed"
        for name, first, tokens in each.batch:
            if first + tokens > held[name]:
                return "tokens that do not exist"
            if first + tokens == held[name]:
                held[name] += 1
                decoding.add(name)
        decoding -= set(each.ended)
    return "healthy"
    # END SOLUTION


diagnose = check("diagnose-a-flight", diagnose)

# %% [markdown]
# ## Where it loses (skip on a first reading)
#
# **Uniform lengths, all there at once**: you counted 64 passes for each engine. Continuous batching then adds only its
# scheduler. What that costs on this machine, beside a pass:

# %%
receipts.overhead()

# %% [markdown]
# `LLM(async_scheduling=True)` hides it: the host plans a step while the device computes the one before. Two plans then
# need two buffers, or the device reads the wrong batch. And a victim's pass may be under way. No lock per sequence is
# needed, only order: its token is kept, and only later passes write into its blocks.

# %%
receipts_loads.ahead()

# %% [markdown]
# **Mean lengths** hide what a schedule has to bear, most of all in latency under random arrivals. Four loads, each with
# lengths as drawn and with the mean lengths for all:

# %%
receipts_loads.loads()

# %% [markdown]
# Test with traffic as it is. Offline work has no latency to keep, so its batch may be as large as memory allows.
#
# Besides, a batch whose shape changes in every step is hard to capture in CUDA graphs (engines pad to a few sizes), and
# each sequence in the batch makes the step of all others longer.
#
# ## The same in production
#
# transformers has continuous batching built in. The same weights, requests, `max_num_seqs` and budget:

# %%
receipts.transformers(at_once["skewed", "continuous"])

# %% [markdown]
# ### One page: the serving path here and in vLLM
#
# | step | minillm (one process, one thread steps) | vLLM V1: process | vLLM V1: files below `vllm/v1/` |
# |---|---|---|---|
# | accept a request, tokenize | `serve/engine.py`, `requests/table.py` | API server | `engine/async_llm.py`, `input_processor.py` |
# | loop over steps | `serve/engine.py`: `step` | engine core (ZeroMQ to the API) | `engine/core.py`, `core_client.py` |
# | schedule | `serve/schedule/scheduler.py` | engine core | `core/sched/scheduler.py` |
# | blocks, prefix cache | `serve/schedule/blocks.py` | engine core | `core/kv_cache_manager.py`, `block_pool.py` |
# | the next step, prepared while this one computes | `serve/run/async_scheduling.py` | engine core | `core/sched/async_scheduler.py` |
# | forward pass | `serve/run/model_runner.py`, `model/paged/cache.py` | one worker per GPU | `worker/gpu/model_runner.py`, `attention/backends/` |
# | sample | `serve/sample/reference.py` | worker | `worker/gpu/sample/sampler.py` |
# | stop strings, text, stream | `serve/requests/request.py` | API server | `engine/output_processor.py`, `detokenizer.py` |
#
# Both schedulers do the same arithmetic on `num_computed_tokens`. vLLM separates processes so that tokenizing, HTTP and
# detokenizing never hold up the next forward pass. (vLLM's [architecture
# overview](https://docs.vllm.ai/en/latest/design/arch_overview.html); file names since v0.25, whose model runner V2 is
# the default.)
#
# | vLLM option | here |
# |---|---|
# | `--max-num-seqs` | `max_num_seqs`: sequences in the batch |
# | `--max-num-batched-tokens` | `token_budget`; smaller: shorter gaps, larger: shorter TTFT |
# | `--enable-chunked-prefill` (on by default in V1) | always on; decodes first, prompts share what is left |
# | `--long-prefill-token-threshold` | `chunk` |
# | `--scheduling-policy fcfs` or `priority` (lower is earlier) | `priority`, bounded by `patience`; theirs is strict |
# | preemption by recomputation (V1's default; V0 could also swap) | `preemption="recompute"` or `"swap"` |
# | `--kv-offloading-size` (keys and values to the host, as a cache) | `num_host_blocks` |
# | the last of the running, or of the lowest priority | `policy="latest"`, `"lowest priority"` |
#
# Source: vLLM's [optimization and tuning](https://docs.vllm.ai/en/latest/configuration/optimization.html). Its advice
# against frequent preemption is more blocks, or a smaller `max_num_seqs`.
#
# ## On a GPU
#
# This lab has no ranks, so no torchrun script. A scheduler is one process per replica; more GPUs
# mean more replicas behind a router, or a model cut by tensor parallelism (lab 05) under one scheduler:
#
# ```bash
# python -m minillm generate --batch prompts.txt                      # this engine, from the command line
# vllm serve $MODEL --tensor-parallel-size 4 --max-num-seqs 256 \
#      --max-num-batched-tokens 8192 --scheduling-policy priority      # the same ideas on a node
# ```
#
# ## Interview corner

# %%
receipts.interview()

# %% [markdown]
# Say your answer aloud before you open one.
#
# **1. Chunked prefill: what does it improve, what does it cost?**
# <details><summary>Answer</summary>
#
# It shortens the worst gap of decoding sequences to one chunk instead of one prompt, if chunks and decodes share a
# step. It costs the long prompt's TTFT a little, a lot if chunks are so small that passes become memory-bound.
# </details>
#
# **2. The pool is full. What now?**
# <details><summary>Answer</summary>
#
# First evict cached blocks that no sequence holds, least recently used first. Then preempt a *later* sequence: drop or
# swap its blocks, keep its tokens, put it back at its own place. If there is no later one, wait a step. A request that
# can never fit is refused on arrival.
# </details>
#
# **3. Recompute or swap?**
# <details><summary>Answer</summary>
#
# Recompute: $2P$ FLOPs per token, compute-bound, partly hidden beside decodes, needs no host memory, and hits the
# prefix cache if its blocks were not evicted yet. Swap: twice the KV bytes over the link, in many small copies unless
# blocks are large. For the 8B model, at peak rates, 65 ms against 16 ms for 4,000 tokens; at a quarter of the link they
# are about equal. vLLM V1 recomputes.
# </details>
#
# **4. How do you exclude starvation and livelock?**
# <details><summary>Answer</summary>
#
# One fixed rank per request, given at arrival, with priority as a bounded head start. Admission strictly in rank order;
# preemption only of later ranks. Then the first in rank always makes progress.
# </details>
#
# ### Design questions
#
# **D1. Serve a 70B model at a p99 TPOT of 50 ms and 200 requests per second, 1,000 prompt tokens and 200 answer tokens
# each. A replica is four H100s. How many replicas, and with how many sequences decoding in each?**

# %%
receipts.design_fleet()

# %% [markdown]
# **D2. The 8B model on one H100 decodes 32 sequences of 2,000 tokens. Documents of 32,768 tokens arrive. No gap may
# exceed 20 ms. Which chunk, and what does the document wait for its first token?**

# %%
receipts.design_chunk()

# %% [markdown]
# <details><summary>D1 and D2: a worked answer</summary>
#
# D1: in the steady state each answer token brings 5 prompt tokens with it. From about 64 sequences on the step is bound
# by arithmetic: TPOT grows in proportion and throughput stays at 4,700 answer tokens per second, so 64 to 96 sequences
# are enough and memory (378) is not the limit. 200 · 200 tokens per second / 4,700 = 9 replicas at *peak* rates. Plan
# with half of the peak (step 27 ms at 64 sequences, 18 replicas) and, so that queues stay short at p99, a utilization
# of 70 %: about 25 replicas, 100 GPUs. TPOT then has room for chunks of nearly twice the mean size before a step takes
# 50 ms.
#
# D2: 512: 17 ms per gap and 0.82 s to the first token, only 4 % later than computed whole. 1,024 breaks the limit. With
# real kernels at half of the peak the same chunk takes 34 ms, so the limit forces 256, which at peak is close to
# memory-bound.
# </details>
#
# ### Capstone (open)
#
# Two tenants share the fleet of D1: a chat with short prompts and a p99 gap limit of 50 ms, and a document service with
# prompts of 30,000 tokens that may wait 5 s for the first token. Choose budget, chunk, priorities, patience, reserve
# and the preemption mode, play your choice and two others with `experiments.play` on a trace of your own, and defend it
# in half a page: worst gap and TTFT per tenant, and what breaks first at 1.5 times the load.
#
# ## Can you answer them now?
#
# 1. How many forward passes do static and continuous batching need for the same answers, and when equally many?
# 2. What happens to decoding sequences while a long prompt is computed, and what when the blocks run out?
# 3. How do you read from an engine's own records what is wrong with its scheduler?
#
# Next: in [15 · Speculative decoding](15_speculative_decoding.ipynb) a small model drafts several tokens, and the large
# one checks them in a single pass.

# %%
finish("14_continuous_batching")
