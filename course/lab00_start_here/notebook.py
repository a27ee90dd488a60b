# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 00 · Start here
#
# **Three measured rates and a latency tell you roughly how fast a program can run on this machine; its bytes and calls
# can be predicted exactly.**
# Stands on nothing before it: Python and a training loop in PyTorch are enough.
#
# 45 minutes with the exercises · no GPU, no network
#
# Training and serving large language models on many devices is mostly arithmetic about a few numbers: how fast the
# cores calculate, how fast memory feeds them, and what a message costs, in latency and in bandwidth. You will measure
# them here, on the machine in front of you, and use them. At the end you can answer:
#
# 1. Before you run a matmul: how fast can it be on this machine at best?
# 2. What does it cost to send a message to another rank?
# 3. How do you tell that a program on four ranks did what it claims, and who is to blame when it stands still?

# %% [markdown]
# ## How the labs work
#
# - **Run a cell** with Shift-Enter. Every lab also runs from top to bottom as it is: *Run → Run All Cells*.
# - **Exercises** are functions whose body is `raise NotImplementedError`. Replace that line and run the cell: the
#   `check(...)` under the function runs it for real. Where the topic is several devices it runs on *ranks*: processes
#   that work together, each for one device.
# - **A check shows a receipt**: formula, measured, verdict. It compares values, and it compares what your code
#   *did*: calls, bytes, messages.
# - **Not passed yet?** The check says what is wrong. `hint("matmul-cost")` opens a hint, and the next one when you call
#   it again; the third gives the answer away. Until yours passes, the course's own version stands in, so every later
#   cell still runs.
# - **Guesses** such as `guess = 10` come before the number appears. You learn most from the gap, so guess first. The
#   guess comes back in a receipt, and nothing judges it.
# - **Stuck cell?** The stop button (■) ends it, and all ranks with it. *Kernel → Restart Kernel* starts afresh.
# - **Solutions** lie next door: [solutions/00_start_here.ipynb](../solutions/00_start_here.ipynb). **Your progress**:
#   `python -m minillm progress` in a terminal (*File → New → Terminal*); `--help` says how to reset it.
#
# The calls of `group`, and what each returns: [docs/group.md](../docs/group.md).
#
# The next cell imports what this lab uses: `minillm` is the package that the course is about, and
# `course.lab00_start_here` holds this lab's measurements, figures and receipts, which you need not read.

# %%
import inspect
import statistics
import time

import torch

from course.kit import check, finish, hint, show, sliders
from course.lab00_start_here import experiments, figures, receipts
from minillm import measure
from minillm.comm import HangError, RankError, launch

# %% [markdown]
# ## 1 · What this machine can do
#
# The next cell measures the machine: about 15 seconds the first time, then the card is kept. Everything below is
# predicted from it. If the card says that the machine was busy, measure again when it is quiet:
# `measure.machine(refresh=True)`.

# %%
card = measure.machine()
card

# %% [markdown]
# *ridge* is the peak of the cores divided by the bandwidth of memory: how many operations each byte from memory must
# allow, or the cores wait. *link* is one message between neighbouring ranks: a fixed part, and a part that grows with
# its bytes; *within* is how far a measured time typically lies from that line. Both get their own section. A processor
# without instructions for bf16 is many times slower in bf16 than in fp32.
#
# **Predict before you measure.** Reading a large array from memory is fast. Sending it to another process of the same
# machine passes through the operating system. How many times slower is that?

# %%
guess = 10  # times; change it before you run the next cell

# %%
receipts.memory_against_link(card, guess)

# %% [markdown]
# In a data centre the gap is wider. An H100 reads its memory at 3,350 GB/s
# ([NVIDIA's data sheet](https://www.nvidia.com/en-us/data-center/h100/)); a 400 Gb/s network port carries 50 GB/s: 67
# times less. Every scheme of parallelism in this course is a way to live with that ratio.

# %% [markdown]
# ## 2 · The roofline
#
# A matmul `[m, k] @ [k, n]` does some number of floating-point operations (FLOP) and moves some number of bytes
# between memory and cores: at least, both inputs are read once and the result is written once. By convention each term
# of a dot product counts as one multiplication and one addition.
#
# ### Exercise 1 · the cost of a matmul (3 minutes)


# %%
def matmul_cost(m, k, n, itemsize):
    """(FLOPs, bytes moved at least) of [m, k] @ [k, n], with `itemsize` bytes per element."""
    # BEGIN SOLUTION
    return 2 * m * k * n, (m * k + k * n + m * n) * itemsize
    # END SOLUTION


matmul_cost = check("matmul-cost", matmul_cost)

# %% [markdown]
# FLOPs per byte is the *arithmetic intensity*. Think of `m` as the tokens that go through a weight matrix together:

# %%
receipts.intensities(matmul_cost)

# %% [markdown]
# With one token, every weight is read for one multiplication and one addition. With 512 tokens, all of them share each
# read.
#
# ### Exercise 2 · the roof (3 minutes)
#
# Given the intensity of some work, and a machine's peak and bandwidth, how many FLOP/s are possible at most?


# %%
def attainable(intensity, peak_flops, bandwidth):
    """FLOP/s at most. intensity: FLOP per byte; peak_flops: FLOP/s; bandwidth: bytes/s."""
    # BEGIN SOLUTION
    return min(peak_flops, intensity * bandwidth)
    # END SOLUTION


attainable = check("roofline", attainable)

# %% [markdown]
# Now measure. The dashed roof is your function applied to the card's two numbers; the points are real matmuls, the best
# of 24 runs each.

# %%
rates = experiments.matmul_rates()


def roofline_view(edge=4096):
    """Measured speed of matmuls over arithmetic intensity, under the predicted roof."""
    return figures.draw_roofline(
        rates,
        edge,
        card.peak_flops,
        card.memory_bandwidth_bytes_per_s,
        attainable,
    )


show(roofline_view)

# %%
sliders(roofline_view, edge=list(experiments.EDGES))

# %% [markdown]
# Make the matrix smaller, and points can climb *over* the slope: the roof was drawn with the bandwidth of main memory,
# and weights that fit into a cache do not come from there. The first points can lie over it even at 4096, if a large
# cache keeps part of the weights from one run to the next. For what does come from memory the roof is an upper bound,
# and points below it do not contradict it: a matmul library leaves part of it unused. The last column of the next table
# says how much.

# %%
receipts.under_the_roof(card, rates[4096], attainable)

# %% [markdown]
# This is why a language model that writes one token at a time leaves the cores idle, and why serving systems batch
# (labs 12 and 14).
#
# ## 3 · Four ranks from one cell
#
# A *rank* is one of N processes that run the same program on different data. `launch(fn, 4)` starts four real
# processes, hands each its `Group`, prints what they print, and returns the list of their results.


# %%
def hello(group):
    print(f"I am rank {group.rank} of {group.world_size}, on {group.device}")
    return group.rank**2


launch(hello, 4)

# %% [markdown]
# The printed lines may come in any order. The results do not: entry r of the list is what rank r returned. The ranks
# share no memory, and their processes end with the call.
#
# ### Exercise 3 · the first rank program (5 minutes)
#
# Each rank has its own tensor `x`. All of them need the mean over the ranks, element by element, as data-parallel
# training does with gradients (lab 03). `group.all_reduce(t)` replaces `t` by its sum over the ranks, in place, on every
# rank, and `group.world_size` is the number of ranks.


# %%
def average(group, x):
    """x: [n], another one on each rank -> [n]: their mean on every rank, by one all_reduce.
    Leave x as it is."""
    # BEGIN SOLUTION
    mean = x.clone()
    group.all_reduce(mean)
    return mean / group.world_size
    # END SOLUTION


average = check("first-rank-program", average)

# %% [markdown]
# ### Read the receipt
#
# The check did not stop at the values. The *ledger* of each rank recorded every operation with its bytes. A ring
# all-reduce of P bytes on N ranks sends 2·P·(N−1)/N bytes per rank if N divides the tensor (you build it in lab 01).
# There is an independent witness, too: the operating system's own counter of the loopback interface.

# %%
print(inspect.getsource(experiments.two_witnesses))
receipts.witnesses(average)

# %% [markdown]
# The ledger is exact. The wire also carries packet headers and the traffic of other programs on this machine, so its
# row is allowed to differ by 3 %.
#
# ### Exercise 4 · four programs, one honest (5 minutes)
#
# Four programs leave the right sum in every rank's tensor of P bytes. One is `"fine"`: a single all-reduce. One is
# `"silent"`: it never communicates, because it happens to know the others' numbers. One is `"chatty"`: it reduces in
# many small pieces. One is `"wasteful"`: it sends more bytes than an all-reduce would, in however many calls. Values
# cannot tell them apart, and the ledger can: `led.calls` counts operations by name (a `collections.Counter`), and
# `led.bytes()` is what the rank sent. Your function is called with ledgers of other numbers of ranks than 4. They divide
# the tensor evenly, so the formula is exact.


# %%
def read_receipt(led, num_bytes, world_size):
    """ "fine", "silent", "chatty" or "wasteful", from one rank's ledger.
    num_bytes: of the tensor, P."""
    # BEGIN SOLUTION
    if not led.calls:
        return "silent"
    if led.bytes() > 2 * num_bytes * (world_size - 1) / world_size:
        return "wasteful"
    return "chatty" if led.calls.total() > 1 else "fine"
    # END SOLUTION


read_receipt = check("read-a-receipt", read_receipt)

# %% [markdown]
# ## 4 · What a message costs
#
# Time a message of growing size and two regimes appear: small ones all cost the same, large ones cost by the byte. One
# line says both: **t = α + bytes/β**, latency α in seconds and bandwidth β in bytes per second.
#
# ### Exercise 5 · α and β (5 minutes)
#
# Find the line through a list of sizes and a list of seconds. Measured points lie beside it: use all of them (least
# squares), or choose two that are far apart, the smallest and the largest message.


# %%
def fit_link(sizes, seconds):
    """(latency in s, bandwidth in bytes/s) of the line seconds = latency + sizes / bandwidth."""
    # BEGIN SOLUTION
    n, mean_size, mean_time = len(sizes), sum(sizes) / len(sizes), sum(seconds) / len(seconds)
    slope = sum(size * time for size, time in zip(sizes, seconds, strict=True))
    slope -= n * mean_size * mean_time
    slope /= sum(size * size for size in sizes) - n * mean_size**2
    return mean_time - slope * mean_size, 1 / slope
    # END SOLUTION


fit_link = check("alpha-beta", fit_link)

# %% [markdown]
# Your line on the samples that the machine card kept: one round of a ring, in which every rank sends one message to
# its neighbour at the same time.

# %%
receipts.links(card, fit_link)

# %% [markdown]
# The two need not agree on α, although both use the same samples. Least squares minimises errors in *seconds*, so the
# largest messages decide; the card's fit divides every error by the sample's own time, and small messages count as well.


# %%
def link_view(world_size=4):
    """Time of one ring round over message size: measured points and the line α + bytes/β."""
    return figures.draw_link(card.links, world_size)


show(link_view, world_size=max(card.links))

# %%
sliders(link_view, world_size=(min(card.links), max(card.links)))

# %% [markdown]
# Add ranks and the line moves up: the ranks share the same few cores and the same memory. Below α·β bytes (where the
# two thin lines cross) a message is mostly latency.
#
# **Predict before you measure.** An all-reduce of 1 MiB on 4 ranks takes 2·(4−1) = 6 rounds of a quarter of a MiB
# each. How long is that, in milliseconds?

# %%
guess_ms = 1.0  # change it before you run the next cell

# %%
receipts.all_reduce_time(guess_ms)

# %% [markdown]
# Bytes are predicted exactly, seconds only to a factor: the verdict above allows four, either way. With more ranks than
# cores, α is mostly the time until the scheduler wakes a rank, and that was different when the card was made. The
# distance between the best and the worst run says how far a single timing can be trusted. In these labs bytes and calls
# are proof; seconds are evidence and are measured several times.
#
# ## 5 · Break it: one rank raises
#
# Below, rank 2 reads past the end of its list. The others are inside an all-reduce at that moment. Whose error do you
# want to see?


# %%
def fails_on_rank_2(group):
    shares = [0.5, 0.5]
    x = torch.full((4,), float(group.rank))
    if group.rank == 2:
        x *= shares[group.rank]
    return group.all_reduce(x)


try:
    launch(fails_on_rank_2, 4)
except RankError as error:
    print(error)

# %% [markdown]
# You see one rank, its own traceback and the line of the cell. The other three only saw a neighbour disappear; such
# echoes are not shown as the cause, and no process is left.
#
# ## 6 · Break it: one rank never enters
#
# The worst kind of bug raises no error. Each rank gets some batches, sums their losses and meets the others in an
# all-reduce. One rank never arrives. Read the code, find the injected bug, and name the rank before you run it.


# %%
def sum_losses(group, batches_of_rank):
    batches = batches_of_rank[group.rank]
    if not batches:
        return None
    loss = torch.zeros(1)
    for batch in batches:
        loss += sum(batch)
    return group.all_reduce(loss).item()


batches_of_rank = [[[1.0, 2.0]], [[3.0]], [], [[4.0], [5.0, 6.0]]]
culprit = 0  # which rank is to blame? Change it before you run the next cell

# %%
try:
    launch(sum_losses, 4, batches_of_rank, timeout=3)
except HangError as hang:
    print(hang)

# %% [markdown]
# *Who waits for whom* names the operation each rank is in, since when, and the ranks without which it cannot go on. Start
# at any row and go to a rank that it waits for, until you reach the rank that waits for nobody.

# %%
empty = [rank for rank, batches in enumerate(batches_of_rank) if not batches]
print(f"You blamed rank {culprit}. The culprit is rank {empty[0]}: its list of batches is empty,")
print("so it returned before the all-reduce that the other three are in.")

# %% [markdown]
# The fix: a rank with nothing to add still takes part, and adds zero. **Every rank of a group enters every collective
# of it, in the same order.** Many hangs in real training jobs come from breaking this rule: a rank skips an empty
# batch, an `if rank == 0:` stands around a save that communicates, or one rank swallows an exception.


# %%
def sum_losses_fixed(group, batches_of_rank):
    loss = torch.zeros(1)
    for batch in batches_of_rank[group.rank]:
        loss += sum(batch)
    return group.all_reduce(loss).item()


launch(sum_losses_fixed, 4, batches_of_rank, timeout=10)

# %% [markdown]
# ## 7 · A network you do not have
#
# Inside a node of H100s NVLink carries 450 GB/s each way; between nodes a 400 Gb/s port carries 50 GB/s, and latency is
# higher, too. They are the lower rungs of a ladder that begins in the registers. A thread has few of those, but the
# registers of all threads together hold more than all shared memory of the card.

# %%
show(figures.ladder)

# %% [markdown]
# To feel a network on a laptop, a `Link` paces every message: `send` does not return before latency +
# bytes/bandwidth have passed since its call. Times measured this way are always labelled *emulated*; they show the
# shape of a problem, not the speed of any network.

# %%
print(inspect.getsource(experiments.one_message))
receipts.emulated_link()

# %% [markdown]
# ## 8 · Where the numbers mislead
#
# **Measure twice.** The same matmul, timed in ten groups of ten runs. Anything smaller than the spread between the
# groups is not a result.

# %%
x = torch.randn(384, 384)
groups = []
for _ in range(10):
    start = time.perf_counter()
    for _ in range(10):
        x @ x
    groups.append((time.perf_counter() - start) / 10)
low, middle, high = min(groups), statistics.median(groups), max(groups)
print(f"fastest group {low * 1e3:.2f} ms, slowest {high * 1e3:.2f} ms")
print(f"median {middle * 1e3:.2f} ms, spread {(high - low) / middle:.0%} of the median")

# %% [markdown]
# **Count threads × ranks.** Ranks of one machine share its cores. `launch` gives each rank cores / ranks threads; with
# more they compete for the same cores. The formula below counts cores only: each core in use adds one thread's speed.
# Where will it be wrong?

# %%
cores = card.cores
layouts = [(1, cores), (2, max(1, cores // 2)), (4, max(1, cores // 4)), (4, cores)]
together = experiments.best_together(launch(experiments.crowd, 4, layouts))
naive = [min(cores, ranks * threads) * card.peak_flops_one_thread for ranks, threads in layouts]


def crowd_view():
    """Matmul speed of all ranks together, by ranks × threads: counting cores, and measured."""
    return figures.draw_crowd(layouts, naive, together)


show(crowd_view)

# %%
for (ranks, threads), speed, hoped in zip(layouts, together, naive, strict=True):
    print(f"{ranks} × {threads} threads on {cores} cores: ", end="")
    print(f"{speed / 1e9:6.1f} GFLOP/s together, {speed / hoped:.0%}")

# %% [markdown]
# Four ranks on your machine are not four machines. What is true of *bytes, calls and memory* on four ranks is true on
# four GPUs; speed-ups are not, and no lab claims them.
#
# ## 9 · The same in production
#
# PyTorch counts FLOPs for you (`torch.utils.flop_counter.FlopCounterMode`):

# %%
receipts.counted_by_torch(matmul_cost)

# %% [markdown]
# | here | on a GPU cluster |
# |---|---|
# | `measure.machine()`, α and β | [nccl-tests](https://github.com/NVIDIA/nccl-tests): `all_reduce_perf -b 8 -e 1G -f 2`, small and large sizes |
# | `group.all_reduce(x)` | `torch.distributed.all_reduce(x)`, over NCCL |
# | the ledger | `torch.profiler`; NCCL's log with `NCCL_DEBUG=INFO` |
# | *who waits for whom* | [flight recorder](https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html): `TORCH_FR_BUFFER_SIZE=2000` (the default in torch 2.13; once `TORCH_NCCL_TRACE_BUFFER_SIZE`) and `TORCH_NCCL_DUMP_ON_TIMEOUT=1`; `torchfrtrace` |
#
# In the package: `minillm/measure/machine.py` is the card, `minillm/comm/launch/launcher.py` starts the ranks,
# `minillm/comm/diagnostics/` knows who waits for whom, and `minillm/predict/roofline.py` and `comms.py` hold the
# formulas.
#
# ## 10 · On a cluster
#
# A rank program does not care who starts it. `labs/torchrun/00_start_here.py` holds exercise 3 as a script; in a
# terminal, in the course's folder:
#
# ```bash
# python labs/torchrun/00_start_here.py                             # starts 4 ranks itself
# torchrun --nproc-per-node 4 labs/torchrun/00_start_here.py        # the same, as a cluster would
# torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
#     labs/torchrun/00_start_here.py
# ```
#
# Run the last command unchanged on both nodes; HOST is one of them. With a GPU per rank the messages go over NCCL, and
# the receipt is the same. The script is solved in `solutions/torchrun/00_start_here.py`. What a rank knows:
#
# | | set by torchrun | by `launch` |
# |---|---|---|
# | its number among all ranks, and how many there are | `RANK`, `WORLD_SIZE` | `group.rank`, `group.world_size` |
# | its number in its node, which is the GPU that it takes | `LOCAL_RANK` | the same as its rank: there is one node |
# | where they meet: a *store* over TCP, in which ranks leave their addresses before they can talk | `MASTER_ADDR`, `MASTER_PORT` | a port of this machine |
# | what carries tensors (*backend*) | NCCL on GPUs, else gloo | gloo; `launch(device=None)` takes NCCL where every rank has a GPU |
#
# ## 11 · Common claims
#
# | Claim | What is true |
# |---|---|
# | "NVLink on an H100 is 900 GB/s" | That is the sum of both directions ([NVIDIA's data sheet](https://www.nvidia.com/en-us/data-center/h100/)); a message in one direction gets half, 450 GB/s. (An *H100 NVL* is a card for PCIe, not a link.) |
# | "InfiniBand is 400 GB/s" | Ports are sold in *bits*: NDR is 400 Gb/s, which is 50 GB/s. The factor of 8 is a common mistake. |
# | "An H100 does 1,979 TFLOP/s in bf16" | With 2:4 sparsity, which dense models do not have. Dense is half of it, 989 TFLOP/s ([the same data sheet](https://www.nvidia.com/en-us/data-center/h100/)). |
# | "A GPU at half of its peak waits for memory" | Or for other ranks, an empty pipeline, launches of small kernels, data: split the step before you say which (labs 02 and 22). |
# | "`torchrun -nproc_per_node=4`", "`--master_port = 29500`" | Two dashes and no blanks; argparse refuses both. The nodes need no SSH between them ([torchrun](https://docs.pytorch.org/docs/stable/elastic/run.html)), but TCP to that port and between all ranks, on ports that [NCCL](https://github.com/NVIDIA/nccl/issues/388) or [gloo](https://github.com/pytorch/pytorch/issues/44544) chooses, and a driver that is new enough for the CUDA inside torch's wheel. |
# | "BLOOM's weights are 330 GB" | 176.2 billion parameters of 2 bytes are 352 GB, which is 328 GiB. Say which one you mean ([BLOOM](https://huggingface.co/bigscience/bloom)). |

# %% [markdown]
# ## 12 · Interview corner
#
# The numbers for the answers, by formula from your own machine's card:

# %%
receipts.interview()

# %% [markdown]
# <details><summary><b>1. A matmul reaches 10 % of peak. Is the code bad?</b></summary>
#
# Ask for its intensity first. Left of the ridge (row 1), 10 % of peak may be all that memory can feed. Compare with
# the roof at that intensity, not with the peak
# ([Williams, Waterman and Patterson, 2009](https://doi.org/10.1145/1498765.1498785)).
# </details>
#
# <details><summary><b>2. Why is generating one token at a time slow on a device with enormous FLOP/s?</b></summary>
#
# One token does about 1 FLOP per byte of bf16 weights (row 2), and the ridge of an H100 is near 295. This
# machine's ridge is lower, and still above 1. The cores wait for memory. More tokens per pass share each weight
# read: batching, or speculative decoding.
# </details>
#
# <details><summary><b>3. Your gradients are 64 tensors of 16 KiB. What do you change, and why?</b></summary>
#
# Send them as one. The bytes stay the same, but 64 times the rounds means 64 times the latency: compare the two rows
# under 3. This is why DDP has buckets (lab 03).
# </details>
#
# <details><summary><b>4. When is a message "small"?</b></summary>
#
# When α exceeds bytes/β, that is below α·β bytes (row 4). Below it, save messages; above it, save bytes.
# </details>
#
# <details><summary><b>5. A ring all-reduce sends 2P(N−1)/N per rank. So is its time independent of N?</b></summary>
#
# Its bandwidth term nearly is (it tends to 2P/β). Its latency term is 2(N−1)·α and grows with N: row 5
# ([Patarasuk and Yuan, 2009](https://doi.org/10.1016/j.jpdc.2008.09.002)).
# On this machine β also falls as ranks share the cores.
# </details>
#
# <details><summary><b>6. A job on 64 ranks shows no error and no progress. What do you look for?</b></summary>
#
# Which collective each rank is in, and the first rank that is *not* in it: it waits for nobody (section 6). Then its
# stack. Usual causes: a branch on the rank or on the data around a collective, a rank that died quietly, collectives
# in another order.
# </details>
#
# <details><summary><b>7. All outputs are right. Did the ranks communicate as designed?</b></summary>
#
# Only receipts can tell: number and kind of collectives, bytes per rank against the formula, and an independent
# witness, such as the interface's counters (section 3).
# </details>
#
# <details><summary><b>8. Four ranks on this laptop are no faster than one. Is data parallelism useless?</b></summary>
#
# Four ranks share the same cores (section 8), so total FLOP/s cannot grow. Ranks help when each brings its own cores,
# memory and link.
# </details>

# %% [markdown]
# ## 13 · Design questions
#
# Work these out on paper first, then run the cell and compare.
#
# **A.** A server decodes with bf16 weights on an H100 (989 TFLOP/s, 3.35 TB/s). How many sequences must share each pass
# before the cores, and not memory, limit a 4096 × 4096 layer?
#
# **B.** 7 billion bf16 gradients are all-reduced over 64 GPUs once per step. What do 50 GB/s per GPU and α = 10 µs cost
# if everything goes in one call, and if it goes in 4,000 calls of equal size? What would 450 GB/s change?

# %%
receipts.design()

# %% [markdown]
# <details><summary><b>What a strong answer says</b></summary>
#
# **A.** The intensity of the layer is close to the number of tokens in the pass, so about as many sequences as the
# ridge point has FLOP per byte (under 2 in section 12). The receipt asks for more, because inputs and outputs are moved
# as well. With less, adding sequences is nearly free: that is the argument for batching in serving. The KV cache
# changes it, because it is read per sequence (lab 12).
#
# **B.** The bandwidth term is 2P·63/64 over β whatever the number of calls; each call adds 126 latencies. 4,000 calls
# of 3.5 MB spend nine times as long on latency as on bytes, which is why gradients travel in buckets (lab 03). Nine
# times the bandwidth divides only the bandwidth term, so the more calls there are, the less it helps.
# </details>
#
# **Open task.** Write down, for a machine you know (a laptop, a rented node), the numbers of its card with their
# sources. Predict the time of one training step of a 100 M parameter model on 4,096 tokens (6 FLOPs per parameter and
# token), then measure it in lab 02. Explain the gap.

# %% [markdown]
# ## You can now answer
#
# 1. **How fast can a matmul run on this machine at best?** min(peak, bandwidth × intensity).
# 2. **What does it cost to send a message to another rank?** α + bytes/β; an all-reduce is 2(N−1) such rounds.
# 3. **Did it do what it claims, and who is to blame?** Calls and bytes against the formula; the rank that waits for
#    nobody.
#
# Next: [01 · Collectives](01_collectives.ipynb), where you write the ring all-reduce from messages alone.

# %%
finish("00_start_here")
