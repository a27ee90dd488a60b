# %% [markdown]
# # 01 · Collectives
#
# **A ring all-reduce sends $2P(N-1)/N$ bytes per rank, whoever writes it.** Here you write it.
# Stands on lab 00 (ranks, links, the ledger).
#
# Two to three hours; the core path of two is the exercises (70 minutes), the measurements and *Break it*. Running it top to
# bottom takes under a minute. At the end you can answer:
#
# 1. How many bytes does each rank send when $N$ ranks all-reduce $P$ bytes, and when can it be fewer?
# 2. When does the ring lose, and to what? Where do the lines cross on your link?
# 3. A job hangs. Which rank is to blame, and how do you see it?
#
# Every rank below is a real process, and every number is either computed in the cell above it or carries its source.
# The calls of `group`, and what each returns: [docs/group.md](../docs/group.md).

# %%
import inspect
import time

import torch

from course.kit import check, finish, hint, show, sliders
from course.lab01_collectives import experiments, figures, receipts
from minillm import comm, measure
from minillm.comm import HangError, launch

# %% [markdown]
# ## What a collective is
#
# A *collective* is an operation that all ranks of a group enter together. Rank $r$ starts here with the four numbers
# $(1, 2, 3, 4) \cdot 10^r$, so every digit of a result tells you which rank it came from.


# %%
def before_and_after(group):
    x = torch.tensor([1, 2, 3, 4]) * 10**group.rank
    return {
        "before": x.tolist(),
        "broadcast from 0": group.broadcast(x.clone()).tolist(),
        "all-reduce": group.all_reduce(x.clone()).tolist(),
        "reduce-scatter": group.reduce_scatter(x).tolist(),
        "all-gather of the first": group.all_gather(x[:1]).tolist(),
        "all-to-all": group.all_to_all(x).tolist(),
    }


ranks = launch(before_and_after, 4)
print(f"{'':27}" + "".join(f"rank {r:<21}" for r in range(4)))
for operation in ranks[0]:
    print(f"{operation:<27}" + "".join(f"{found[operation]!s:<26}" for found in ranks))

# %% [markdown]
# Training uses all of them: *broadcast* gives every replica the same first weights, *all-reduce* adds up gradients,
# *reduce-scatter* does so for sharded gradients, *all-gather* brings sharded weights together, *send* and *receive*
# carry activations from stage to stage, and *all-to-all* takes tokens to their experts.
#
# ## Predict
#
# Before you run anything: **4 ranks all-reduce 8 MB. How many MB does each rank send?** Write down your guess; it comes
# back in the receipt. (Below is a common one.)

# %%
guess_mb = 8.0 * 3  # your guess: to each of the other three ranks, the whole tensor?

# %% [markdown]
# ## Build it
#
# You have point-to-point messages, nothing else:
#
# ```python
# group.send(x, dst)                              # returns when rank dst has received
# group.recv(buffer, src)                         # into a tensor of the same size
# group.exchange(send=(x, dst), recv=(buffer, src))   # both at once
# ```
#
# `group.rank` is this rank's number, `group.world_size` the number of ranks. Every check runs your function on groups of 1
# to 5 real ranks and on larger ones (two levels on 2 to 8), and looks at the values, the messages that carried them and
# their bytes. A message costs a latency: cut no chunk into more than two.
#
# ### 1. Ring reduce-scatter (15 minutes)
#
# The ranks form a ring, and each sends to its neighbours only, here to the right-hand one, $(r + 1) \bmod N$.
# The tensor is cut into $N$ chunks. In each of $N-1$ rounds every rank sends one chunk and adds the chunk that arrives to
# its own copy. In the picture a cell shows which ranks' contributions that chunk on that rank holds.

# %%
show(figures.ring_rounds, ranks=4, rounds_done=2)

# %%
sliders(figures.ring_rounds, ranks=(2, 8), rounds_done=(0, 7))


# %%
def reduce_scatter(x, group):
    """x: [N * n] on each rank -> [n]: chunk number group.rank of the sum over the ranks.
    x is left alone."""
    # BEGIN SOLUTION
    n, r = group.world_size, group.rank
    chunks = list(x.clone().chunk(n))
    arriving = torch.empty_like(chunks[0])
    for s in range(n - 1):
        group.exchange(send=(chunks[(r - s - 1) % n], (r + 1) % n), recv=(arriving, (r - 1) % n))
        chunks[(r - s - 2) % n] += arriving
    return chunks[r]
    # END SOLUTION


reduce_scatter = check("ring-reduce-scatter", reduce_scatter)

# %% [markdown]
# ### 2. Ring all-gather (10 minutes)
#
# Each rank now has one chunk and needs all of them. In every round it passes on the chunk that it received last.


# %%
def all_gather(x, group):
    """x: [n] on each rank -> [N * n] on every rank: the ranks' tensors in rank order.
    x is left alone."""
    # BEGIN SOLUTION
    n, r = group.world_size, group.rank
    out = x.new_empty(n * x.numel())
    chunks = out.chunk(n)
    chunks[r].copy_(x)
    for s in range(n - 1):
        group.exchange(
            send=(chunks[(r - s) % n], (r + 1) % n),
            recv=(chunks[(r - s - 1) % n], (r - 1) % n),
        )
    return out
    # END SOLUTION


all_gather = check("ring-all-gather", all_gather)

# %% [markdown]
# ### 3. Ring all-reduce (5 minutes)
#
# Join your two functions. Data-parallel training needs the *mean* of the gradients, so `op="avg"` divides, once.


# %%
def all_reduce(x, group, op="sum"):
    """x: [N * n], replaced in place by its sum (op="avg": its mean) over the ranks, with the same
    bits on every rank; returns x."""
    # BEGIN SOLUTION
    mine = reduce_scatter(x, group)
    if op == "avg":
        mine /= group.world_size
    return x.copy_(all_gather(mine, group))
    # END SOLUTION


all_reduce = check("ring-all-reduce", all_reduce)

# %% [markdown]
# ### 4. Tree broadcast (15 minutes)
#
# The root could send $x$ to every rank itself: $N-1$ messages, one after the other. But after the first message two ranks
# have $x$, and both can send. In a *binomial tree* every rank that has $x$ sends it on in every round, so the same $N-1$
# messages take only $\lceil \log_2 N \rceil$ rounds. (With at most two children per rank, 8 ranks need 4 rounds instead
# of 3.)


# %%
def broadcast(x, group, root=0):
    """x: [n], replaced in place by root's x on every rank; returns x."""
    # BEGIN SOLUTION
    n = group.world_size
    place = (group.rank - root) % n  # 0 at the root
    distance = 1
    while distance < n:
        if place < distance and place + distance < n:
            group.send(x, (group.rank + distance) % n)
        elif distance <= place < 2 * distance:
            group.recv(x, (group.rank - distance) % n)
        distance *= 2
    return x
    # END SOLUTION


broadcast = check("tree-broadcast", broadcast)

# %% [markdown]
# ### 5. All-reduce over two levels (10 minutes)
#
# Links inside a node are fast, links between nodes are slow. You get three groups: `group` (all ranks), `node` (the ranks
# of this node) and `across` (the ranks with the same place on every node). The ranks of a node can share the traffic
# between nodes. Your functions take any group, so use them.


# %%
def hierarchical_all_reduce(x, group, node, across):
    """x, replaced in place by its sum over all ranks, as little as possible of it across nodes;
    returns x."""
    # BEGIN SOLUTION
    mine = reduce_scatter(x, node)
    all_reduce(mine, across)
    return x.copy_(all_gather(mine, node))
    # END SOLUTION


hierarchical_all_reduce = check("hierarchical-all-reduce", hierarchical_all_reduce)

# %% [markdown]
# ### 6. All-to-all (10 minutes)
#
# Each rank has a different part for each other rank. This is a transposition, not a sum, so passing parts along a ring
# would only add traffic. Expert parallelism sends tokens this way, twice per layer in the forward and in the backward pass.


# %%
def all_to_all(x, group):
    """x: [N * n], part j is for rank j -> [N * n], part j is from rank j. x is left alone."""
    # BEGIN SOLUTION
    n, r = group.world_size, group.rank
    out = torch.empty_like(x)
    outgoing, incoming = x.chunk(n), out.chunk(n)
    incoming[r].copy_(outgoing[r])
    for s in range(1, n):
        to, source = (r + s) % n, (r - s) % n
        group.exchange(send=(outgoing[to], to), recv=(incoming[source], source))
    return out
    # END SOLUTION


all_to_all = check("all-to-all", all_to_all)

# %% [markdown]
# ## Measure: bytes
#
# Now 8 MB on 4 ranks, seen by two witnesses. The *ledger* counts what your code hands to the group. The *wire* is the
# operating system's own counter of the loopback interface, which sees your messages, their headers and all other traffic
# of this machine. This is the rank program that reads both:

# %%
print(inspect.getsource(experiments.bytes_moved))

# %%
programs = {
    "all-reduce": all_reduce,
    "reduce-scatter": reduce_scatter,
    "all-gather": lambda x, group: all_gather(x.chunk(group.world_size)[group.rank], group),
    "broadcast": broadcast,
    "all-to-all": all_to_all,
    "parameter server": comm.parameter_server_all_reduce,
}
moved = experiments.bytes_of(programs)
receipts.bytes_moved(moved, guess_mb)


# %%
def bytes_by_witness():
    """Bytes sent by all ranks and by the busiest rank, predicted, by ledger and on the wire."""
    return figures.draw_bytes(moved)


show(bytes_by_witness)

# %% [markdown]
# An all-reduce is a reduce-scatter and an all-gather: $6P = 3P + 3P$ for all ranks, $1.5P$
# for each. And the parameter server sends *as many bytes in all* as the ring; it loses because half of them leave through
# one rank, and the other half enter through it.
#
# Is the sum the same as on one process? Not to the last bit: a ring adds the ranks in another order for every chunk, and
# floating-point addition depends on the order. But all ranks must end with *the same* bits, or replicas drift apart.

# %%
receipts.same_bits(*launch(experiments.bits_of_ring, 4, all_reduce)[0])

# %% [markdown]
# ## Measure: rounds
#
# Bytes are half of the cost. The other half is *rounds*: each costs a latency, however little it carries. Below is your
# ring all-reduce of 400 kB on a clock common to all ranks. The link is *emulated* with 10 ms and 10 MB/s, so that single
# messages are visible. Every bar is one `exchange`: there are $2(N-1) = 6$ on each rank, and all ranks send at once.

# %%
ledgers = launch(experiments.one_all_reduce, 4, all_reduce, link=experiments.SLOW)


def ring_on_a_clock():
    """Timeline of a ring all-reduce on 4 ranks over an emulated link:
    six exchanges on every rank."""
    return measure.timeline(ledgers)


show(ring_on_a_clock)

# %%
receipts.messages(ledgers)

# %% [markdown]
# The α–β model ([Hockney 1994](https://doi.org/10.1016/S0167-8191(06)80021-9)) puts both together: a round that carries $b$ bytes takes $\alpha + b/\beta$. So
#
# | all-reduce | rounds | bytes on the critical path |
# |---|---|---|
# | ring | $2(N-1)$ | $2P(N-1)/N$ |
# | tree (reduce, then broadcast) | $2\lceil\log_2 N\rceil$ | $2P\lceil\log_2 N\rceil$ |
# | recursive doubling, $N$ a power of two | $\log_2 N$ | $P\log_2 N$ |
# | recursive halving and doubling, $N$ a power of two ([Thakur, Rabenseifner and Gropp 2005](https://doi.org/10.1177/1094342005051521)) | $2\log_2 N$ | $2P(N-1)/N$ |
#
# By this model the last row beats the ring at every size if $N > 2$. But its partners are up to $N/2$ ranks apart, so
# messages share links, which the model leaves out; the ring needs neighbours only, with any $N$.
#
# The tree here sends each tensor in one piece. Two ways of production change the table:
#
# - *Pipelined double binary tree* ([Sanders, Speck and Träff 2009](https://doi.org/10.1016/j.parco.2009.09.001); in NCCL
#   [since 2.4](https://developer.nvidia.com/blog/massively-scale-deep-learning-training-nccl-2-4/)): the tensor travels in
#   small pieces through two trees, and a rank that is a leaf in one is an inner node in the other. Each rank sends $2P$ in
#   all, nearly the ring's bytes, with about $2\log_2 N$ latencies. It beats the ring up to much larger tensors than the
#   tree of this lab: **a crossover you compute or measure here is not NCCL's.**
# - *In-network reduction* ([Graham et al. 2016](https://doi.org/10.1109/COMHPC.2016.006), SHARP; NVLS inside NVLink
#   switches): the switch adds. Each rank sends $P$ and receives $P$, half of the ring's bytes, in two latencies.
#
# Beside tree and recursive doubling the ring sends fewer bytes in more rounds, so it loses where tensors are small. Move
# the sliders: what happens to the crossover with more ranks? With a faster link?

# %%
show(figures.times_by_size)

# %%
sliders(
    figures.times_by_size,
    world_size=(2, 512),
    latency_us=(1.0, 100.0, 1.0),
    bandwidth_gb_per_s=(1.0, 400.0, 1.0),
)

# %% [markdown]
# ## Where the ring loses, measured
#
# All three on this machine. α and β are fitted to the rounds of the *ring* alone, so the dashed lines of the other two
# are real predictions. On the right the same over an *emulated* link with α = 10 ms and β = 10 MB/s, so slow that
# scheduling and copies weigh little: there the model should come close.

# %%
loopback = experiments.ring_against_tree()
emulated = experiments.ring_against_tree(experiments.SLOW)


def ring_against_tree():
    """Time of ring, tree and recursive doubling by tensor size, measured and predicted,
    on loopback and emulated."""
    return figures.draw_ring_against_tree(loopback, emulated)


show(ring_against_tree)

# %%
receipts.crossovers(loopback, emulated)

# %% [markdown]
# On the emulated link no time can fall below its line. Each round adds a wake-up by the scheduler to α, most in the ring,
# which has the most rounds: so it passes the others at a larger size than predicted. (The row allows half as much again.)
# On loopback, read the error of the fit before you believe the crossover: four ranks share few cores and one memory, and
# the tree goes through gloo, with a longer latency. What carries over to a cluster is the *shape*: few rounds win for
# small tensors, few bytes for large ones. So gradients travel in buckets of megabytes, and NCCL chooses by size.
#
# ## Where two levels win
#
# Two nodes of two ranks, with an emulated link of 5 ms and 10 MB/s between them. In the flat ring every round waits
# for the slow link. Over two levels, on $n$ nodes of $g$ ranks, only $2(n-1)$ rounds cross, and all ranks of a node
# cross at the same time with $1/g$ of the tensor each. The prediction charges the slow link alone, so the receipt allows
# half as much again. Your functions, both ways:

# %%
levels = experiments.flat_against_two_level(all_reduce, hierarchical_all_reduce)


def flat_against_two_levels():
    """Time of a flat ring and of two levels, predicted and measured,
    over an emulated slow link between two nodes."""
    return figures.draw_flat_against_two_level(levels)


show(flat_against_two_levels)

# %%
receipts.two_nodes(levels)

# %% [markdown]
# Why do two levels win? The numbers for 8 nodes of 8 ranks:

# %%
receipts.leaving_a_node(nodes=8, per_node=8)

# %% [markdown]
# The bytes that leave a node hardly change (1.97 P to 1.75 P). What changes is that they leave through *all* cards of
# the node at once, and that fewer rounds pay the slow link's latency. With one leader per node all bytes leave through one
# card. (NCCL builds several rings, and each leaves the node through another card.)
#
# ## Break it
#
# ### A chunk index off by one
#
# A common bug in the reduce-scatter: every rank ends with the finished sum of its *neighbour's* chunk. The cell gathers
# these chunks as an all-reduce would. A training loop logs three things of the result: the gradient's sum, its norm, and
# whether all ranks hold the same. Before you run the cell: which of the three will show the bug?

# %%
print(inspect.getsource(experiments.off_by_one))
receipts.logged(all_gather)

# %% [markdown]
# Every number is added correctly and lands in the wrong place. The gradient norm, which training dashboards show, is
# right up to rounding. Only a comparison of *values* with a reference, place by place, finds this bug.
#
# ### Sends that wait for each other
#
# `send` returns when the other side receives. What if everybody sends first?


# %%
def everybody_sends_first(group):
    x, arriving = torch.ones(1000), torch.empty(1000)
    group.send(x, (group.rank + 1) % group.world_size)
    group.recv(arriving, (group.rank - 1) % group.world_size)


try:
    launch(everybody_sends_first, 4, timeout=1.5)
except HangError as hang:
    circle = hang.table
print(circle)

# %% [markdown]
# A circle: each rank waits for the next. No single rank is to blame; the *order* is wrong. Post both at once (`exchange`;
# `batch_isend_irecv` in torch), or let even ranks send first and odd ranks receive first.
#
# ### Which rank holds up the others? (5 minutes)
#
# Another frequent hang: *one rank takes another branch*. In torchaudio's HuBERT recipe a rank whose loss was not a number
# returned before an `all_gather` that the others had entered
# ([audio issue 3749](https://github.com/pytorch/audio/issues/3749)). Follow "waits for" until you come to a rank that waits for nobody. (A rank that has finished waits for nobody
# either, but perhaps nobody waits for it.) Write that down as a function; then a rank chosen at random gets the bug, and
# your function has to find it.


# %%
def culprit(waits_for):
    """waits_for: rank -> list of ranks it waits for.
    -> the rank that holds up others and waits for nobody; None if there is none, as in a circle."""
    # BEGIN SOLUTION
    awaited = {rank for others in waits_for.values() for rank in others}
    for rank, others in waits_for.items():
        if not others and rank in awaited:
            return rank
    return None
    # END SOLUTION


culprit = check("find-the-culprit", culprit)


# %%
def next_batch():
    time.sleep(60)  # a slow disk, perhaps


def training_steps(group, bad_rank):
    for step in range(3):
        gradient = torch.ones(1000)
        loss = float("nan") if step == 1 and group.rank == bad_rank else 0.5
        if loss != loss:  # "skip the step if the loss is not a number"
            next_batch()
            continue
        group.all_reduce(gradient)


bad_rank = int(torch.randint(0, 4, ()))  # you do not know which; the table does
try:
    launch(training_steps, 4, bad_rank, timeout=1.5)
except HangError as hang:
    table = hang.table
print(table)

# %%
receipts.diagnosis(bad_rank, culprit, table, circle)

# %% [markdown]
# The table even names the line in which the missing rank is. On a GPU cluster torch's
# [flight recorder](https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html) gives the same facts
# (`TORCH_FR_BUFFER_SIZE`, formerly `TORCH_NCCL_TRACE_BUFFER_SIZE`, and `TORCH_NCCL_DUMP_ON_TIMEOUT`): look for the rank
# that has entered one collective fewer than the others, then dump its stack. The fix here: all ranks decide *together*
# whether to skip the step, by reducing the flag.
#
# Another way to disagree is in *shape*: NCCL does not check, so a mismatch hangs or corrupts data
# ([nccl issue 1417](https://github.com/NVIDIA/nccl/issues/1417) shows both). minillm compares shapes first and raises a
# `MismatchError`.

# %% [markdown]
# ## The same in production
#
# The same five operations in `torch.distributed` on the same wire, with gloo (the CPU backend).

# %%
print(inspect.getsource(experiments.torch_wire))
receipts.torch_on_the_wire(launch(experiments.torch_wire, 4, device="cpu")[0])

# %% [markdown]
# One row is off, and the formula is not to blame: on gloo torch implements `reduce_scatter_tensor` as an all-reduce and
# discards most of the result ([pytorch PR 118911](https://github.com/pytorch/pytorch/pull/118911)). NCCL does not.
# Sharded training on a CPU needs a ring of its own, as minillm's groups have.
#
# NCCL chooses ring, tree or in-network reduction by size and topology. `NCCL_DEBUG=INFO` prints the rings it built,
# [`NCCL_ALGO=Ring`](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-algo), `Tree` or `NVLS` forces
# one, and [nccl-tests](https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md) reports *bus bandwidth*:
# for an all-reduce $P$ / time times $2(N-1)/N$, what a ring's link carries, to compare with the link's speed. For a
# reduce-scatter or an all-gather the factor is $(N-1)/N$.
#
# ## Common claims
#
# | as claimed | what is true | where to read it |
# |---|---|---|
# | No all-reduce sends less than $2P(N-1)/N$ per rank. | True of the average over ranks, if ranks exchange messages and do all the adding (the leaves of a tree send $P$). A switch that adds halves it. | [Patarasuk and Yuan 2009](https://doi.org/10.1016/j.jpdc.2008.09.002), [Graham et al. 2016](https://doi.org/10.1109/COMHPC.2016.006) |
# | Communication of data parallelism grows linearly with the GPUs (or: does not depend on them). | Bytes per rank saturate at $2P$; the ring's rounds grow linearly. | the numbers for question 1 |
# | A parameter server moves more bytes than a ring. | It moves as many, but one rank sends half of them and receives the other half. | the bars above; [Li et al. 2014](https://www.usenix.org/conference/osdi14/technical-sessions/presentation/li_mu) |
# | A hierarchical all-reduce sends far fewer bytes between nodes. | 1.75 P instead of 1.97 P leave a node at 8 × 8; it saves rounds and uses all cards. | the table for 8 nodes above |
# | Trees are for small messages only. | Of unpipelined trees. NCCL's double binary trees have full bandwidth. | [Sanders, Speck and Träff 2009](https://doi.org/10.1016/j.parco.2009.09.001) |
#
# ## On a cluster
#
# The same exercises as a script, for any number of processes and with a GPU for each where there are some. Put your
# functions into it, then:
#
# ```bash
# torchrun --nproc-per-node 8 labs/torchrun/01_collectives.py
# torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
#          labs/torchrun/01_collectives.py                                      # on each of two nodes
# ```
#
# ## Interview corner
#
# The numbers first. Say your answer aloud before you open one.

# %%
receipts.interview_numbers()

# %% [markdown]
# **1. Does the cost of data parallelism grow linearly with the number of GPUs?**
# <details><summary>Answer</summary>
#
# The bytes per rank do not: 1.75 P at 8 ranks, 1.97 P at 64, 1.998 P at 1024. What grows linearly is the *rounds*, 2(N-1),
# and the traffic of all ranks together, which a switch must carry between its halves (*bisection bandwidth*). At 5 µs per
# round the latency is 0.07 ms at 8 ranks and 10.2 ms at 1024, for each all-reduce.
#
# *Follow-up: then why does anybody bucket gradients?* Because every all-reduce pays the rounds again.
# </details>
#
# **2. 70B parameters, bf16 gradients, 64 GPUs, 400 Gb/s each: how long is the all-reduce, beside 10 s of compute?**
# <details><summary>Answer</summary>
#
# 140 GB · 2 · 63/64 = 275.6 GB sent per rank; at 50 GB/s 5.5 s: if nothing hides it, over a third of the step.
# Then doubt the question: pure data parallelism cannot
# hold 70B on one GPU. Split 16 ways by tensor and pipeline parallelism, 4 replicas remain: each rank reduces 8.75 GB
# over 4 ranks, 0.26 s, and most of that hides behind the backward pass.
# </details>
#
# **3. Why can no all-reduce by messages between ranks send less than 2P(N-1)/N per rank on average? What can?**
# <details><summary>Answer</summary>
#
# Somewhere each of the P numbers must be added up from N contributions: N-1 of them, at least, have to travel, already
# added or not. Then the result must reach N-1 other ranks. That is 2P(N-1) over all ranks; shared evenly, 2P(N-1)/N
# each. The ring reaches it, so it is optimal in bytes, not in rounds ([Patarasuk and Yuan 2009](https://doi.org/10.1016/j.jpdc.2008.09.002)).
#
# *Follow-up: and if the switch adds?* Then each rank sends its P once and receives the result once: P instead of nearly
# 2P (SHARP on InfiniBand, NVLS on NVLink).
# </details>
#
# **4. All-reduce and parameter server move the same bytes in all. So what is wrong with the server?**
# <details><summary>Answer</summary>
#
# At 4 ranks the server sends 3 P and receives 3 P, a ring rank 1.5 P each way.
# The server's 2(N-1)P grow with N; the ring's stay below 2P.
#
# *Follow-up: how does one rescue the server?* Shard it: N servers with 1/N of the parameters each. That *is*
# reduce-scatter and all-gather.
# </details>
#
# **5. When is a tree faster than a ring?**
# <details><summary>Answer</summary>
#
# When α·rounds outweighs bytes/β. With 5 µs and 50 GB/s the ring passes an *unpipelined* tree at 0.47 MB on 8 ranks, at
# 2.8 MB on 64 and at 28 MB on 1024. NCCL's tree is pipelined and double: 2P bytes in about 2 log2 N latencies, so by the
# same model the ring passes it at 8 MB on 8 ranks and only at 0.9 GB on 64.
# </details>
#
# **6. What does expert parallelism send, and how often?**
# <details><summary>Answer</summary>
#
# An all-to-all of tokens · k · hidden · bytes · (N-1)/N per rank: 58.7 MB here for 4,096 tokens, top-2, hidden 4,096,
# bf16, 8 ranks. Two in the forward pass (dispatch and combine) and two in the backward pass, in every MoE layer.
# </details>
#
# **7. nccl-tests says "busbw 370 GB/s, algbw 211 GB/s". What are they?**
# <details><summary>Answer</summary>
#
# algbw is P / time. busbw multiplies it by 2(N-1)/N, 1.75 for 8 ranks: what a link carried if the algorithm was a ring.
# Compare it with the data sheet for any N. With in-network reduction a link carries P only, so busbw may exceed its speed.
# </details>
#
# **8. A 512-GPU job stands still. What do you do in the first five minutes?**
# <details><summary>Answer</summary>
#
# Find the rank that has entered fewer collectives than the others (flight recorder; here the table of who waits for
# whom), then its stack. All waiting for one: that rank took another branch, crashed or loads data. A circle: the order
# of sends. All in the same collective, nobody missing: shapes differ, or the network.
# </details>
#
# ## Design questions
#
# Decide, compute, then open the answer. The numbers are computed in the next cell.
#
# **A.** 8B parameters, plain data parallelism, 64 GPUs in nodes of 8, one 400 Gb/s card per GPU. The backward pass takes
# 1.2 s. Can an fp32 all-reduce of the gradients hide behind it? And if a node has only four 100 Gb/s cards in all?
#
# **B.** 70B served with tensor parallelism over 8 GPUs of one node (450 GB/s each way, 2 µs a round), hidden 8,192, 80
# layers, 2 all-reduces per layer, 32 sequences decoding in bf16. Which all-reduce do you choose, and what does it cost
# per token?

# %%
receipts.design_numbers()

# %% [markdown]
# <details><summary>Answer A</summary>
#
# 32 GB of gradients, 63 GB sent per GPU: 1.26 s at 50 GB/s. It does not hide in 1.2 s; in bf16 it takes 0.63 s and does.
# With 50 GB/s per *node*, every byte that leaves the node counts: 1.97 P or 63 GB in a flat ring spread over all cards,
# 1.75 P or 56 GB over two levels, so at least 1.1 s plus 0.12 s inside the node in fp32, and about 0.62 s in bf16. A flat
# ring through one 100 Gb/s card takes 5 s. Choose bf16 on the wire, or ZeRO so that the second half is gathered later.
# </details>
#
# <details><summary>Answer B</summary>
#
# One all-reduce carries 0.52 MB and there are 160 per token. The ring spends 28 µs on latency and 2 µs on bytes: 4.8 ms per
# token. A one-shot exchange (each rank sends everything to all and adds locally) sends 7 P, but in one round: 10 µs, 1.6 ms
# per token. In-network reduction needs two rounds and P bytes: about 5 µs, 0.8 ms per token. The ring loses by its rounds.
# Between the other two bytes decide: 8 of the 10 µs of a one-shot exchange are its 7 P.
# </details>
#
# **Capstone (open).** 70B parameters, 256 GPUs in 32 nodes of 8, 450 GB/s inside a node, 50 GB/s per GPU between nodes, 5 µs
# a round. Choose which collectives run where and in which precision, so that communication that cannot hide stays under
# 10 % of a 6 s step. Defend it with `minillm.predict.comms`: bytes per rank, per card and rounds for two alternatives.
#
# ## Can you answer them now?
#
# 1. How many bytes does each rank send when $N$ ranks all-reduce $P$ bytes, and when can it be fewer?
# 2. When does the ring lose, and to what? Where do the lines cross on your link?
# 3. A job hangs. Which rank is to blame, and how do you see it?
#
# Next: [02 · One device](02_one_device.ipynb) looks at one device alone; lab 03 puts your all-reduce under a training step.

# %%
finish("01_collectives")
