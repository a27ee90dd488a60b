# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 21 · Design a serving system
#
# **Capacity is bytes, speed is bandwidth, and the tail is a queue: three small models answer most serving questions.**
# Stands on labs 12 to 18 and 20 (their formulas).
#
# Twelve problems as they are asked in interviews, about ten minutes each, and two short exercises: two and a half hours
# in all; the core path of two leaves out problems 10 to 12. As in lab 20 you commit to a number before the cell computes it. Running the notebook from top to bottom takes
# seconds. At the end you can answer:
#
# 1. How many sequences does a GPU carry, and what ends that: bytes, bandwidth or arithmetic?
# 2. What does a limit on latency cost in throughput, and which layout buys it back?
# 3. Why is the 99th percentile too long at a load where the mean looks harmless, and what bounds it?
#
# > **Common claims**
# >
# > - *"4-bit weights are four times faster."* At batch one nearly, as scales count too; at a large batch arithmetic is the limit
# >   ([Frantar et al. 2022](https://arxiv.org/abs/2210.17323), §5, measure batch one).
# > - *"A 70B model does not fit on one card."* In 16 bits, 141 GB, it does not. With 4.5 bits per weight 40 of 80 GB are
# >   taken, so choose the precision before the degree of tensor parallelism.
# > - *"Autoscaling on GPU utilisation absorbs bursts."* A replica of a large model starts in minutes; utilisation is at its
# >   ceiling by then.
# > - *"Speculative decoding makes serving 2 to 3 times faster."* For one stream; at large batches it can slow down
# >   ([Leviathan et al. 2023](https://arxiv.org/abs/2211.17192), §3.3 and 3.4, name the assumption of spare arithmetic).

# %%
from course.kit import check, finish, hint, show, sliders
from course.lab21_design_serving import figures, receipts

# %% [markdown]
# ## The three models
#
# **Bytes.** What is left beside the weights is room for caches, and that decides how many sequences run at a time.
#
# ### Exercise 1 · sequences that fit (10 minutes)


# %%
def sequences_that_fit(memory, parameters, tp, layers, kv_heads, head_dim, context):
    """Sequences of `context` tokens whose caches fit on each of tp GPUs with `memory` bytes,
    beside 16-bit weights.

    Weights and kv heads are divided over the tp ranks; tp divides kv_heads, or kv_heads divides
    tp and a rank holds one. Keys and values in 16 bits. 0 where not one sequence fits.
    """
    # BEGIN SOLUTION
    room = memory - 2 * parameters / tp
    per_token = 2 * layers * max(kv_heads / tp, 1) * head_dim * 2
    return max(0, int(room // (per_token * context)))
    # END SOLUTION


sequences_that_fit = check("sequences-that-fit", sequences_that_fit)

# %% [markdown]
# **Bandwidth.** A decode step reads all weights once and every running sequence's cache. So tokens per second grow
# nearly in step with the batch until caches or arithmetic take longer than the weights (lab 12), or the prompts of new
# sequences do, which are computed between the steps: under the limit of 50 ms they take most of the time. A limit on the
# time per token is a limit on the batch. The planner for one node:

# %%
receipts.capacity()

# %%
show(figures.frontier)

# %%
sliders(
    figures.frontier,
    model=["llama-3-8b", "llama-3-70b", "mixtral-8x7b"],
    device=["l4", "a100-80", "h100", "h200"],
    gpus=[1, 2, 4, 8],
    prompt=(200, 8000, 200),
    output=(50, 1000, 50),
)

# %% [markdown]
# **A queue.** Requests come when they like. Request i waits for what is left of its predecessor's wait and service.
#
# ### Exercise 2 · how long each one waits (15 minutes)


# %%
def waits(gaps, services):
    """A new list, not rounded (empty if there are no requests): the seconds each request waits
    before its service begins, on one server, first come first served.

    gaps[i]: seconds between the arrivals of request i - 1 and i (the first: since the server was
    started, idle). services[i]: seconds request i takes.
    """
    # BEGIN SOLUTION
    seconds, wait, service = [], 0.0, 0.0
    for gap, own in zip(gaps, services, strict=True):
        wait = max(0.0, wait + service - gap)
        seconds.append(wait)
        service = own
    return seconds
    # END SOLUTION


waits = check("queue-waits", waits)

# %% [markdown]
# With random arrivals and exponential services the mean wait is ρ / (1 - ρ) service times at load ρ, and the tail is far above it
# ([Lindley 1952](https://doi.org/10.1017/S0305004100027638) has the recursion you wrote):

# %%
receipts.queue_at_loads()

# %%
show(figures.wall)

# %%
sliders(figures.wall, percentile=(90, 99))


# %% [markdown]
# ## Problem 1 · 70B chat at 200 requests per second
#
# *"Serve a 70B model as a chat: 200 requests per second, 1,000 tokens in and 300 out, 50 ms per token at the 99th
# percentile. How many GPUs?"* H100, 8 per node.
#
# **How many output tokens per second in all?**

# %%
guess_demand = 260e3  # your number

# %%
receipts.decide("chat_70b", "demand", guess_demand)

# %% [markdown]
# **How many requests are in flight at any moment?**

# %%
guess_inside = 200  # your number

# %%
receipts.decide("chat_70b", "inside", guess_inside)

# %% [markdown]
# **How many GPUs?**

# %%
guess_gpus = 64  # your number

# %%
receipts.decide("chat_70b", "gpus", guess_gpus)

# %%
receipts.answer("chat_70b")

# %% [markdown]
# ## Problem 2 · 8B on one card of 24 GB
#
# *"We have cards with 24 GB and 300 GB/s. Can one serve Llama 3 8B?"*
#
# **How many tokens of cache fit beside 16-bit weights**, if 3 of 24 GiB are reserved and 5 % of the rest is lost?

# %%
guess_tokens = 160e3  # your number

# %%
receipts.decide("eight_on_24gb", "tokens", guess_tokens)

# %% [markdown]
# **How many seconds per token does one sequence alone see?**

# %%
guess_tpot = 0.107  # your number

# %%
receipts.decide("eight_on_24gb", "tpot", guess_tpot)

# %%
receipts.answer("eight_on_24gb")

# %% [markdown]
# ## Problem 3 · Long prompts from retrieval
#
# *"Our application puts 32,000 tokens of documents before every question. Users wait too long."* 70B on a node of 8 H100.
#
# **How many bytes of cache does one prompt take?**

# %%
guess_cache = 84e9  # your number

# %%
receipts.decide("rag_32k", "cache", guess_cache)

# %% [markdown]
# **How many seconds until the first token?**

# %%
guess_ttft = 16  # your number

# %%
receipts.decide("rag_32k", "ttft", guess_ttft)

# %%
receipts.answer("rag_32k")

# %% [markdown]
# ## Problem 4 · A billion tokens over night
#
# *"We want to label a corpus: a billion output tokens with a 70B model, 500 in and 500 out, by tomorrow."*
#
# **How many hours does one node of 8 H100 take?**

# %%
guess_hours = 100  # your number

# %%
receipts.decide("offline_batch", "hours", guess_hours)

# %%
receipts.answer("offline_batch")

# %% [markdown]
# ## Problem 5 · A thousand customers with adapters
#
# *"Each of our 1,000 customers has a fine-tuned 8B model. How do we serve them?"*
#
# **How many bytes does one LoRA adapter of rank 16 on all seven matrices of a layer take**, in 16 bits?

# %%
guess_adapter = 2.6e6  # your number

# %%
receipts.decide("many_adapters", "adapter", guess_adapter)

# %%
receipts.answer("many_adapters")

# %% [markdown]
# ## Problem 6 · At the edge
#
# *"A 3B model on a phone with 60 GB/s of memory bandwidth and 30 TOPS. How fast can it write?"*
#
# **How many tokens per second at most, with 4.5 bits per weight?**

# %%
guess_speed = 10  # your number

# %%
receipts.decide("at_the_edge", "speed", guess_speed)

# %%
receipts.answer("at_the_edge")

# %% [markdown]
# ## Problem 7 · p99 at 85 % load
#
# *"p99 of the wait has gone from 17 service times to 30, while the mean looks harmless. Nothing was deployed; traffic grew by
# 13 %."*
#
# **What is the mean wait at 85 % load, in service times?**

# %%
guess_mean = 0.85  # your number

# %%
receipts.decide("tail_at_85", "mean", guess_mean)

# %% [markdown]
# **What is p99 of the wait?**

# %%
guess_tail = 8  # your number

# %%
receipts.decide("tail_at_85", "tail", guess_tail)

# %%
receipts.answer("tail_at_85")

# %% [markdown]
# What a bound does, in the same simulation:

# %%
receipts.bounded_queue()

# %% [markdown]
# ## Problem 8 · A burst and a cold start
#
# *"At nine o'clock traffic doubles within a minute. The autoscaler starts a replica, and still users see errors."* 70B weights,
# storage of 2 GB/s, 40 requests per second against 25 that one replica serves.
#
# **How many seconds does reading the weights take?**

# %%
guess_load = 35  # your number

# %%
receipts.decide("bursts", "load", guess_load)

# %% [markdown]
# **How many requests wait when the replica is ready**, 60 s of scheduling and warm-up included?

# %%
guess_backlog = 5000  # your number

# %%
receipts.decide("bursts", "backlog", guess_backlog)

# %%
receipts.answer("bursts")

# %% [markdown]
# ## Problem 9 · Blocked by somebody else's prompt
#
# *"Sometimes all streams freeze for a second or two, then go on."* 8B on one H100; somebody sends prompts of 32,000 tokens.
#
# **How many seconds do the others stand still?**

# %%
guess_stall = 0.1  # your number

# %%
receipts.decide("blocked_by_a_prompt", "stall", guess_stall)

# %%
receipts.answer("blocked_by_a_prompt")

# %% [markdown]
# ## Problem 10 · Does speculation pay?
#
# *"Marketing wants the threefold speedup from the paper. Do we switch speculation on?"*
#
# **What is the speedup of one stream** with an acceptance of 0.7, K = 4 and a draft that costs a tenth?

# %%
guess_alone = 2.8  # your number

# %%
receipts.decide("does_speculation_pay", "alone", guess_alone)

# %% [markdown]
# **At how many sequences per step does reading weights stop being the limit?**

# %%
guess_ridge = 64  # your number

# %%
receipts.decide("does_speculation_pay", "ridge", guess_ridge)

# %%
receipts.answer("does_speculation_pay")

# %% [markdown]
# ## Problem 11 · Does quantization pay?
#
# *"4-bit weights make it four times faster, so we need a quarter of the GPUs."*
#
# **What is the speedup of decoding at batch 1, with scales counted (4.5 bits)?**

# %%
guess_one = 4  # your number

# %%
receipts.decide("does_quantization_pay", "one", guess_one)

# %%
receipts.answer("does_quantization_pay")

# %% [markdown]
# ## Problem 12 · Split prefill and decode
#
# *"Should we run prefill and decode on different machines?"* 70B, prompts of 2,000 tokens, 50 GB/s per GPU.
#
# **How many bytes of cache move per request?**

# %%
guess_moved = 5.2e9  # your number

# %%
receipts.decide("split_prefill_decode", "moved", guess_moved)

# %%
receipts.answer("split_prefill_decode")

# %% [markdown]
# ## Where did the time go? (skip on a first reading)
#
# A request takes $t_{queue} + t_{prefill} + t_{decode} + t_{network}$. *"It is slow"* is no question before you know which of
# them is. Ask in this order, since each answer ends the search:
#
# 1. **Queue**: is the wait long before anything is computed? Then admission, the limits of the batch, replicas (problem 7).
# 2. **Memory**: are blocks near their limit, are sequences preempted? Then lengths, prefixes, 8-bit keys (labs 13, 14, 16).
# 3. **Between devices**: which share of a pass is collectives? Then the degree of tensor parallelism, placement (lab 18).
# 4. **Kernels and host**: is a pass far above its roofline (lab 25), are there gaps between passes? Then kernels, graphs,
#    tokenizing, the scheduler's own time (lab 14).
#
# Whatever you change, repeat it with the real mix of lengths. Lab 19's last exercise reads such a page of metrics.
#
# Five habits: name the parts of a latency before you improve one; compare one node with two; reproduce with fixed lengths and a
# fixed batch; keep the first request apart from the hundredth; check the arithmetic of the layout before you blame a kernel.
# The fourth, on this machine:

# %%
receipts.first_requests()

# %% [markdown]
# On a CPU a first request touches memory and loads code. On a GPU it also loads or compiles kernels and captures graphs, so warm a replica up before it takes traffic, and leave the first out of the percentiles. The last row
# had its prompt before: a benchmark that repeats one prompt measures the prefix cache.
#
# ## Two pages to keep
#
# **Before you design**: Is the load interactive, offline or both? How are the lengths of prompts and answers distributed, in real
# traffic? How much memory is left for keys and values? What is the policy of the queue? How long does a start take? Which metric
# is success: latency, throughput or cost?
#
# **While it runs**: p50, p95 and p99, with the queue apart; a budget for keys and values, not for weights alone; continuous
# batches where requests differ; hot models and adapters kept warm; the simplest placement that keeps talkative groups on fast
# links; admission that refuses before the tail explodes.
#
# Five ideas carry both design labs. Every optimisation trades compute, memory, communication and the work of running it. A fast
# link and a slow one are not interchangeable. Serving is scheduling and memory as much as arithmetic. The load decides, not
# somebody else's benchmark. And take a time apart before you try to shorten it.
#
# ## Where these estimates break down
#
# - One server with exponential services is a caricature of an engine that serves a batch. It has the right wall, not the right
#   constant: measure with your traffic, as lab 14 does.
# - Lengths are means here. Real answers have long tails, and the longest running sequence holds its blocks to the end.
# - Rates are those of large matrix products; a step of a small batch has launch overhead that no roofline knows.
#
# ## On a cluster
#
# `python -m minillm plan --serve --model llama-3-70b --cluster h100 --gpus 16 --prompt 1000 --output 300 --tpot-ms 50` prints
# the table for other models, cards and limits. The same questions for an engine that runs are `max_num_seqs`,
# `max_num_batched_tokens`, `gpu_memory_utilization` and `tensor_parallel_size` in
# [vLLM's arguments](https://docs.vllm.ai/en/latest/configuration/engine_args.html).
#
# ## Can you answer them now?
#
# 1. How many sequences does a GPU carry, and what ends that: bytes, bandwidth or arithmetic?
# 2. What does a limit on latency cost in throughput, and which layout buys it back?
# 3. Why is the 99th percentile too long at a load where the mean looks harmless, and what bounds it?
#
# **Capstone (open).** Take a service you use. Estimate its traffic, choose model and cards, and write one page: capacity, cost
# per million tokens, what happens in a burst, and the three metrics you would page on.
#
# Next: [22 · The bug museum](22_bug_museum.ipynb), where you find bugs that raise no error, from the traces they leave.

# %%
finish("21_design_serving")
