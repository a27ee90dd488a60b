# %% [markdown]
# # 04 · ZeRO
#
# **Optimizer state, gradients and parameters can each be divided by $N$, at $2P$, $2P$ and $3P$ bytes per rank and step,
# times $(N-1)/N$.** You divide them. ($N$ ranks; the parameters take $P$ bytes.)
# Stands on labs 01 (reduce-scatter and all-gather), 02 (16 bytes per parameter) and 03 (replicas).
#
# About 4 hours; the core path of two is exercises 1 to 6, the first two measurements and *Break it*. Offload, marked
# *skip on a first reading*, takes another half hour. Run All takes about a minute. At the end you can answer:
#
# 1. What does a rank hold, and what does it send, in each of the three stages?
# 2. When do stages 1 and 2 send no more than plain data parallelism, and what makes stage 3 expensive?
# 3. Which four things break *silently* once a rank has only a part of the state?
#
# Data parallelism gives every rank the same weights, gradients and optimizer state. ZeRO
# ([Rajbhandari et al. 2020](https://arxiv.org/abs/1910.02054)) removes the copies.
#
# The calls of `group`, and what each returns: [docs/group.md](../docs/group.md).

# %%
import inspect

import torch
import torch.nn.functional as F
from torch import nn

from course.kit import check, finish, hint, show, sliders
from course.lab04_zero import (
    experiments,
    experiments_breaks,
    experiments_hybrid,
    experiments_torch,
    figures,
    receipts,
)
from course.lab04_zero import experiments_links as links
from course.lab04_zero.experiments import PSI, Setup
from minillm.comm import launch
from minillm.predict.model import ADAM_FP32, ADAM_MIXED

# %% [markdown]
# ## What can be divided?
#
# Ψ parameters, trained with Adam. In mixed precision the weights and gradients take 2 bytes each, and the optimizer
# keeps a float32 copy of the weights and two moments:

# %%
print("bytes per parameter       weights  gradients  masters  moments   all")
for name, state in (("bf16 with masters", ADAM_MIXED), ("fp32", ADAM_FP32)):
    each = state.parameter, state.gradient, state.master, state.moments, state.total
    print(f"{name:<24}" + "{:>9}{:>11}{:>9}{:>9}{:>6}".format(*each))

# %% [markdown]
# Both take 16 bytes: mixed precision saves activations, traffic and time, but no state. 12 of its 16 bytes belong to the
# optimizer, which is why stage 1 begins there.
#
# ## Predict
#
# **A 7B model in mixed precision takes 112 GB of state. On 8 ranks, ZeRO-1 divides the optimizer by 8. How many GB does
# each rank hold?** Write down your guess. (The default divides everything.)

# %%
guess_gb = 112 / 8  # your guess

# %%
receipts.memory_7b(guess_gb)

# %%
show(figures.memory_by_stage)

# %%
sliders(figures.memory_by_stage, billions=(0.5, 70.0, 0.5), ranks=(1, 64), mixed=True)

# %% [markdown]
# ### Common claims
#
# | Claim | What is true |
# |---|---|
# | "ZeRO saves 4, 8 and $N$ times." ([Rajbhandari et al. 2020](https://arxiv.org/abs/1910.02054), §5, often quoted without its condition on $N$) | 4 and 8 are limits for large $N$: at $N = 8$ it is 2.9, 4.3 and 8 times. Stages 1 and 2 cannot go below 4Ψ and 2Ψ. |
# | "Mixed precision halves the memory." | Not the state: 16 bytes per parameter either way. |
# | "Training takes 16Ψ bytes per parameter." | 16Ψ bytes in all for Ψ parameters, 16 bytes for each. |
# | "Stage 3 divides the largest part, the parameters." | They are 2 of 16 bytes. The optimizer's 12 are divided from stage 1 on. |
# | "10B parameters train on 4 cards of 40 GB with stage 3." | 16 bytes · 10B / 4 are the whole 40 GB, and activations come on top. With the optimizer's 12 bytes per parameter offloaded, each card holds 10 GB of state. |
# | "ZeRO trades memory for communication." | With one microbatch stages 1 and 2 send what data parallelism sends, stage 3 1.5 times as much. |
# | "Each rank contributes its shard to an all-reduce." | Its *whole* gradient goes into a reduce-scatter. In a step optimizer state never travels. |
# | "Shards of gradients are fetched when they are needed." | In a step only weights are gathered. A gradient travels once, to the rank that keeps its sum, and what happens next is local. |
# | "Sharding synchronises gradients more often." | Once per backward, as data parallelism does, in pieces. What comes on top are gathers of weights. |
# | "FSDP costs 1.5 times the communication of DDP." | Without accumulation. With $K$ microbatches 1.5 $K$ times. |
#
# ## Build it
#
# ### 1. Who holds what (10 minutes)
#
# All parameters are laid end to end in one flat buffer, which is cut into $N$ equal shards. A cut may go through a
# matrix: Adam works element by element. (Optimizers that need whole matrices, such as Muon or Shampoo, cannot be cut like
# this.)

# %%
show(figures.who_holds_what)

# %%
sliders(figures.who_holds_what, ranks=(1, 6), layers=(1, 4))


# %%
def partition(sizes, world_size, rank):
    """sizes: elements of each parameter
    -> (length of every shard, list with the slice of each parameter that rank holds).

    Slices count from the parameter's own first element. An empty slice, such as slice(0, 0), where
    rank holds nothing of it.
    The flat buffer is padded at its end, by as little as makes the shards equal.
    """
    # BEGIN SOLUTION
    length = -(-sum(sizes) // world_size)
    slices, start = [], 0
    for size in sizes:
        low = min(max(rank * length - start, 0), size)
        high = min(max((rank + 1) * length - start, 0), size)
        slices.append(slice(low, high))
        start += size
    return length, slices
    # END SOLUTION


partition = check("shard-partition", partition)

# %% [markdown]
# ### 2. Stage 1: the optimizer (15 minutes)
#
# Each rank keeps moments for its own shard only, so it can step its own shard only. Which part of the averaged gradient
# does it need, and what do the others need from it? The check counts bytes. You have
#
# - `group.broadcast(x)`: rank 0's `x` into everyone's, in place; `group.all_reduce(x, op="avg")`: in place, too;
# - `group.reduce_scatter(x, op="avg")` -> this rank's `[n/N]` of the mean; `group.all_gather(x, out=None)` -> `[N·n]`.


# %%
class ZeroOne:
    """An optimizer over this rank's part of `weights`:
    [P], flat, the same size on every rank, divisible by N."""

    def __init__(self, weights, group, make):
        """make([parameter, ...]) gives a torch optimizer.
        Ranks may come with different weights: rank 0's count, and are in everyone's `weights`
        from here on."""
        # BEGIN SOLUTION
        self.weights, self.group = group.broadcast(weights), group
        self.shard = nn.Parameter(weights.chunk(group.world_size)[group.rank].clone())
        self.optimizer = make([self.shard])
        # END SOLUTION

    def step(self, gradient):
        """gradient: [P], of this rank's batch, left alone.
        Afterwards `weights` are the updated ones, on every rank."""
        # BEGIN SOLUTION
        self.shard.grad = self.group.reduce_scatter(gradient, op="avg")
        self.optimizer.step()
        self.group.all_gather(self.shard.data, out=self.weights)
        # END SOLUTION


ZeroOne = check("zero-one-step", ZeroOne)

# %% [markdown]
# A reduce-scatter and an all-gather send together exactly what an all-reduce sends (lab 01), so ZeRO-1 costs no
# additional bytes.
#
# ### 3. Stage 2: gradients (20 minutes)
#
# If a rank needs 1/N of the averaged gradient, why keep the rest? Backward makes gradients from the last layer to the
# first. Reduce-scatter each *bucket* of them as soon as it is full, and free it while backward goes on
# (`parameter.register_post_accumulate_grad_hook(f)` calls `f(parameter)` when its gradient is complete).


# %%
def shard_gradients(buckets, group):
    """Hooks that reduce-scatter each bucket in backward as soon as all its gradients are there,
    and free those.

    buckets: lists of parameters. Returns a list: after every backward it holds this rank's averaged
    shard of each bucket (its parameters' gradients flattened, in the bucket's order, zeros at the
    end to make it divisible). Nothing else of the gradients stays, one reused buffer apart.
    """
    # BEGIN SOLUTION
    shards = [None] * len(buckets)

    def watch(index, bucket):
        missing = set(bucket)

        def ready(parameter):
            missing.discard(parameter)
            if missing:
                return
            flat = torch.cat([p.grad.flatten() for p in bucket])
            for p in bucket:
                p.grad = None
            flat = F.pad(flat, (0, -len(flat) % group.world_size))
            shards[index] = group.reduce_scatter(flat, op="avg")
            missing.update(bucket)  # for the next backward

        for parameter in bucket:
            parameter.register_post_accumulate_grad_hook(ready)

    for index, bucket in enumerate(buckets):
        watch(index, bucket)
    return shards
    # END SOLUTION


shard_gradients = check("reduce-scatter-hooks", shard_gradients)

# %% [markdown]
# ### 4. Stage 3: parameters (20 minutes)
#
# Now a rank keeps 1/N of the weights, too. A block needs all of its weights to compute, so it gathers them, computes and
# frees them, in forward and once more in backward. Here backward computes the block again, so that nothing of it has to
# stay; FSDP keeps the activations and frees only the memory of the weights.


# %%
class GatheredBlock(torch.autograd.Function):
    """compute(x, weights) of one block whose weights are spread over the group."""

    @staticmethod
    def forward(ctx, x, shard, compute, group):
        """x: this rank's activations, which need no gradient after a frozen layer; shard: [P/N]
        -> compute(x, weights), weights: [P] from all ranks."""
        # BEGIN SOLUTION
        ctx.save_for_backward(x, shard)
        ctx.compute, ctx.group = compute, group
        return compute(x, group.all_gather(shard))
        # END SOLUTION

    @staticmethod
    def backward(ctx, output_gradient):
        """Gradients of x and of the shard (averaged over the ranks); None for the two others."""
        # BEGIN SOLUTION
        x, shard = ctx.saved_tensors
        with torch.enable_grad():
            x, weights = x.detach().requires_grad_(), ctx.group.all_gather(shard).requires_grad_()
            output = ctx.compute(x, weights)
        x_gradient, gradient = torch.autograd.grad(output, (x, weights), output_gradient)
        return x_gradient, ctx.group.reduce_scatter(gradient, op="avg"), None, None
        # END SOLUTION


GatheredBlock = check("gather-compute-free", GatheredBlock)

# %% [markdown]
# Two all-gathers and a reduce-scatter per block make $3P$. (Descriptions of FSDP that forget the second gather arrive at
# $2P$.)
#
# ### 5. Clip across shards (10 minutes)
#
# Clipping needs the norm of the *whole* gradient. How many bytes does that take?


# %%
def clip(gradient, numel, max_norm, group):
    """gradient: [n], this rank's shard of the flat gradient of numel elements; what follows
    them is padding and may hold anything. Scales the shard in place so that the whole gradient's
    norm is max_norm at most; returns that norm (before scaling)."""
    # BEGIN SOLUTION
    mine = gradient[: max(0, numel - group.rank * len(gradient))]
    norm = group.all_reduce(mine.square().sum()).sqrt()
    gradient *= (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return norm
    # END SOLUTION


clip = check("clip-across-shards", clip)

# %% [markdown]
# One number is enough. It has a second use: if any rank's gradient holds an infinity or NaN, *no* rank sees a finite
# norm, and all of them skip the step.
#
# ### 6. Save it whole (5 minutes)
#
# A checkpoint should load on any number of ranks, on one too.


# %%
def whole_state(state, numel, group):
    """state: {"step": number, "exp_avg": [n], "exp_avg_sq": [n]} of this rank's shard
    -> the same for all numel elements, on every rank."""
    # BEGIN SOLUTION
    return {name: group.all_gather(x)[:numel] if x.dim() else x for name, x in state.items()}
    # END SOLUTION


whole_state = check("whole-state", whole_state)

# %% [markdown]
# ### 7. Offload (15 minutes, *skip on a first reading*)
#
# Adam treats every element alone, so if the state is still too large, its moments can lie in slow memory (the host's, or
# a file on an NVMe disk) and be streamed through fast memory chunk by chunk. `store.read(name, part)` gives a copy of a
# slice, `store.write(name, part, tensor)` puts one back.


# %%
def stream_adam(weights, gradient, store, step, chunk, lr, betas, eps):
    """One Adam step on weights: [n], in place. Both moments, "m" and "v", lie in store; only chunk
    elements of each fit into memory. step counts from 1 (for the bias correction); there is no
    weight decay."""
    # BEGIN SOLUTION
    for start in range(0, len(weights), chunk):
        part = slice(start, start + chunk)
        g, m, v = gradient[part], store.read("m", part), store.read("v", part)
        m.mul_(betas[0]).add_(g, alpha=1 - betas[0])
        v.mul_(betas[1]).addcmul_(g, g, value=1 - betas[1])
        store.write("m", part, m)
        store.write("v", part, v)
        m, v = m / (1 - betas[0] ** step), v / (1 - betas[1] ** step)
        weights[part] -= lr * m / (v.sqrt() + eps)
    # END SOLUTION


stream_adam = check("offload-adam", stream_adam)

# %% [markdown]
# ## Your code under a transformer
#
# Your partition and your stage 1 train a small model on 4 ranks, each starting from *another seed*, and then on one. The
# global batch is the same, so the losses must be, too.

# %%
receipts.trained(*experiments.four_ranks_and_one(partition, ZeroOne))

# %% [markdown]
# ## Measure: what a rank holds
#
# From here on you use minillm's own, in `minillm/parallel`: `BucketedDDP` (stage 0), `ZeroOptimizer` (stages 1 and 2) and
# `FullyShard` (stage 3) train the same transformer on the same tokens. In the middle of each step, between backward and
# update, `measure.memory` looks at every tensor and says what it is for. This is the rank program:

# %%
print(inspect.getsource(experiments.train))

# %%
kinds = [(n, mixed) for n in (2, 4) for mixed in (True, False)]
setups = [Setup(stage, n, mixed=mixed) for n, mixed in kinds for stage in experiments.STAGES]
setups += [Setup(stage, 4, accumulate=4) for stage in experiments.STAGES]
found = experiments.compare(setups)
receipts.state(found)

# %%
show(
    figures.draw_memory,
    found={setup: ranks for setup, ranks in found.items() if setup.accumulate == 1},
)

# %% [markdown]
# In stage 3 with mixed precision `FullyShard` divides the 16 bytes otherwise than the textbook: it keeps its shard in
# float32, which *is* the master copy, and gathers it as bf16, so it holds $4 + 4 + 8$ instead of $2 + 2 + 12$.
#
# ## Measure: what a rank sends

# %%
receipts.sent(found)

# %% [markdown]
# $2P$, $2P$, $2P$ and $3P$ for one microbatch. With 4 accumulated microbatches the picture changes. DDP and stage 1 add
# gradients up locally and reduce once (`no_sync`). Stage 2 has no full gradient to add to, so it reduces every time:
# $(K+1)P$. Stage 3 gathers twice and reduces once per *microbatch*: $3KP$, six times DDP's bytes at $K = 4$.
#
# And in which precision do gradients travel? Large runs compute in bf16 and reduce in fp32, because a sum over many ranks
# loses digits in bf16 (FSDP2:
# [`MixedPrecisionPolicy(reduce_dtype=torch.float32)`](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html);
# here `reduce_dtype`). Weights still travel in bf16, so stage 3 sends only a third more for it:

# %%
receipts.reduction()

# %% [markdown]
# Since all of this is the same algorithm, the losses are the same, whatever the stage, the number of ranks or of
# microbatches:

# %%
receipts.same_losses(found)

# %% [markdown]
# ## Measure: stage 3 on a clock
#
# A block waits for its weights unless they were gathered while the block before it computed. Here five blocks compute for
# 24 ms each (48 ms backward) and a gather takes 21 ms on an *emulated* link; above without prefetch, below with one block
# gathered ahead. (On a GPU the gathers run on a stream of their own and compete with the block's kernels for memory
# bandwidth and a few SMs.)

# %%
clocks = links.stage3_on_a_clock((0, 1))
show(figures.draw_prefetch, found=clocks)

# %%
receipts.prefetch(clocks)

# %% [markdown]
# The price of prefetching is memory: two blocks are whole at once instead of one. Move the sliders: what if compute is
# shorter than the gather? (A second block ahead gains little: either one block hides a gather, or the link is the
# bottleneck.)

# %%
show(figures.stage3_timeline)

# %%
sliders(
    figures.stage3_timeline,
    blocks=(2, 8),
    prefetch=(0, 3),
    gather_ms=(1, 80),
    forward_ms=(1, 80),
)

# %% [markdown]
# ## Measure: offload (*skip on a first reading*)
#
# The optimizer moves to where its state is (host memory or files; `minillm/parallel/sharding/offload.py`), so the state
# never crosses the link to the accelerator. The gradient shard goes down to the host and the updated weights come back
# up: in 16 bits $2Ψ + 2Ψ$ bytes per step over all ranks ([Ren et al. 2021](https://arxiv.org/abs/2101.06840)).

# %%
receipts.offload(experiments.offloaded(found))

# %% [markdown]
# (On a machine without an accelerator, host memory *is* the process's memory; the files are not.)
#
# ## Break it
#
# Once each rank has only a part of the state, four habits that were fine become bugs. None of them raises an error.
# A hang is the lucky case.

# %%
bad_rank = int(torch.randint(0, 4, ()))
accidents = launch(experiments_breaks.all_accidents, 4, bad_rank, device="cpu")

# %% [markdown]
# ### Clip by your own norm
#
# `torch.nn.utils.clip_grad_norm_` on a shard sees a part of the gradient. How large is the typical local norm, as a share
# of the global one?

# %%
receipts.clipping([rank["clip"] for rank in accidents])

# %% [markdown]
# The result is too long by a factor of √N and points elsewhere, because each shard is scaled by a different factor.
#
# ### Every rank its own seed
#
# Sharding takes rank $r$'s part of rank $r$'s weights. torch's `fully_shard` does not compare them with the other ranks';
# minillm's stages broadcast rank 0's first.

# %%
receipts.seeds(accidents[0]["seeds"])

# %% [markdown]
# The first model is a patchwork of four. All ranks agree on it, but it is not the model you meant. With loaded weights on
# one rank and random ones on the others it is garbage.
#
# ### Rank 0 saves

# %%
receipts.saving(accidents[0]["save"])

# %% [markdown]
# Rank 0 alone saves a quarter. And where gathering is part of `state_dict`, *every* rank has to call it:
# `if rank == 0: save(...)` hangs.
#
# ### A plain loss scaler
#
# With fp16 an overflow must skip the step. A `GradScaler` decides by the gradients it sees: those of one shard.

# %%
receipts.scaler([rank["scaler"] for rank in accidents], bad_rank)

# %% [markdown]
# Three ranks step and one does not: the model is now partly old and partly new, and the next losses are scaled by two
# different numbers. The decision has to be made from a number that every rank has, as in your `clip`
# (`ShardedGradScaler` in torch reduces the flag). bf16 needs no scaler.
#
# ## Hybrid sharding, and a bug to find
#
# Between nodes links are slow, so large runs often shard *inside* a node and replicate *across* nodes (`HYBRID_SHARD`,
# [Zhao et al. 2023](https://arxiv.org/abs/2304.11277)): gathers stay on fast links, and only shards of gradients are
# averaged across. Two nodes with 2 ranks each; minillm's `FullyShard(model, inside, replicate_group=across)` beside plain
# stage 3:

# %%
sent, crossing = experiments_hybrid.on_two_nodes()
receipts.hybrid(sent)

# %% [markdown]
# A colleague wrote hybrid sharding by hand. The losses fall:

# %%
print(inspect.getsource(experiments_hybrid.hybrid_step))
receipts.bug_hunt(crossing)

# %% [markdown]
# Which ranks agree and which do not? What is missing, where does it belong, and how many bytes does it cost per rank?
#
# <details><summary>Answer</summary>
#
# Ranks 0 and 1 agree, ranks 2 and 3 have drifted away: gradients are averaged inside each node and never across. After
# the reduce-scatter belongs `across.all_reduce(mine, op="avg")`: it reduces only this rank's shard, so it costs
# $2(P/2)(m-1)/m = P/2$ bytes for $m = 2$ nodes. The losses alone never tell, because each node trains properly on half
# the batch.
# </details>
#
# ## Where it loses
#
# Slow links, and accumulation. Every stage on 2 ranks over an *emulated* link of 8 MB/s, so slow that bytes decide. The
# formula has communication only (bytes / bandwidth + rounds · latency, as if nothing were hidden). What a step computes
# comes on top, so the measured ratios are smaller.

# %%
slow = links.over_a_slow_link()
show(figures.draw_slow_link, numbers=slow)

# %%
receipts.slow_link(slow)

# %% [markdown]
# With accumulation stage 3 takes several times as long as DDP on such a link. So use stage 3 or hybrid sharding where
# links are fast, stage 1 across nodes, and stage 1 with pipelines, which always have many microbatches.
#
# ## The same in production
#
# torch's own, on the same ranks, with the same model and tokens. They know nothing of minillm's ledger, so the bytes come
# from the loopback counter.

# %%
theirs = experiments_torch.peers()
receipts.peers(theirs, found[Setup(0, 4)][0].losses[1])

# %% [markdown]
# - **DDP + [`ZeroRedundancyOptimizer`](https://docs.pytorch.org/docs/stable/distributed.optim.html)** is ZeRO-1 at $3P$:
#   DDP all-reduces the *whole* gradient ($2P$), then each rank broadcasts what it has stepped ($P$). Yours needs $2P$.
# - **[FSDP2](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html)** (`fully_shard` per block) is stage
#   3. Its root stays gathered between forward and backward, which saves one gather. This gloo carries out a
#   reduce-scatter as an all-reduce, so here it moves nearly $4P$ where NCCL and minillm's ring move $3P$. It makes 2
#   all-gathers and 1 reduce-scatter per block, and 1 of each for the root: 290 for 96 blocks.
# - **[accelerate](https://huggingface.co/docs/accelerate/usage_guides/fsdp)** was asked for FSDP2 as well. What does the
#   receipt of its memory say?

# %%
receipts.held_by_peers(found[Setup(3, 4)][0].memory, theirs[0])

# %% [markdown]
# On a CPU this accelerate falls back to DDP without a word: 16 Ψ, nothing sharded, right losses. On GPUs the same lines
# shard. A ZeRO that shards nothing has right numbers, which is why your checks counted bytes.
#
# | torch / accelerate / DeepSpeed | here |
# |---|---|
# | `ZeroRedundancyOptimizer`, DeepSpeed `"stage": 1` | `ZeroOptimizer(stage=1)` |
# | FSDP2 `reshard_after_forward=False`: gathers once, $2P$; weights stay whole until their backward is done | between 2 and 3 |
# | DeepSpeed `"stage": 2` | `ZeroOptimizer(stage=2)` |
# | `fully_shard(block)`, FSDP `FULL_SHARD`, DeepSpeed `"stage": 3` | `FullyShard` |
# | `HYBRID_SHARD`, a 2-D mesh given to `fully_shard` | `FullyShard(replicate_group=...)` |
# | `CPUOffloadPolicy`, DeepSpeed `offload_optimizer` | `offload="cpu"`, `offload=Path(...)` |
#
# ## On a cluster
#
# `labs/torchrun/04_zero.py` runs stage 1, clipping and the gathered block on any number of processes. After solving it:
# `torchrun --nproc-per-node 8 labs/torchrun/04_zero.py`.
#
# ## Design questions
#
# Work each one out on paper, then run the cell below it.
#
# **A. 13B parameters, mixed-precision Adam, 64 GPUs of 80 GB in nodes of 8, 8 microbatches per step. Activations need 30
# GB. Inside a node a GPU sends 400 GB/s, across nodes 50 GB/s. Which stage, or hybrid?**

# %%
receipts.design_sharding()

# %% [markdown]
# <details><summary>Answer</summary>
#
# ZeRO-1 sends least (1.0 s) but holds 54.4 GB beside 30 GB of activations: it does not fit. Hybrid (ZeRO-3
# inside the node, replicas across) holds 26 GB and needs 1.5 s, nearly all of it on fast links. ZeRO-2 over 64 fits too
# (28.8 GB) and sends for 4.6 s; ZeRO-3 over 64 for 12.3 s. Take hybrid, or free activations by recomputation and take
# ZeRO-1.
# </details>
#
# **B. 7B in 32 blocks of 218M parameters, stage 3 over 8 GPUs at 400 TFLOP/s. How many tokens per GPU hide the gathers
# and reduce-scatters at 50 and at 400 GB/s?**

# %%
receipts.design_hiding()

# %% [markdown]
# <details><summary>Answer</summary>
#
# At 50 GB/s a block's communication takes 23 ms: 8,192 tokens per GPU (27 ms of compute) hide it, 4,096 (13 ms) do not.
# At 400 GB/s 3 ms hide behind 4,096 tokens easily. Parameters cancel: more tokens per GPU hide it, a bigger model does
# not.
# </details>
#
# ## Capstone (*open*)
#
# 70B on 256 GPUs of 80 GB with 8 per node: choose sharding (stage, group size, replicas), microbatches and what is
# recomputed. Defend it with `ADAM_MIXED.per_rank`, `minillm.predict.training.sharding` and two bandwidths, and name the
# number you would measure first.
#
# ## Interview corner
#
# Say your answer aloud before you open one.
#
# **1. What does each stage hold and send per step?**
# <details><summary>Answer</summary>
#
# Hold: 4Ψ + 12Ψ/N, 2Ψ + 14Ψ/N, 16Ψ/N bytes in mixed precision. Send, with one microbatch: P(N-1)/N times 2, 2 and 3.
# Not included: activations, gathered blocks, buckets, the allocator's gaps.
# </details>
#
# **2. Is ZeRO-3 1.5 times slower than DDP?**
# <details><summary>Answer</summary>
#
# Its communication is, without accumulation. A step is compute plus *exposed* communication, and gathers can be
# prefetched. With K microbatches it is 1.5 K times the bytes, because every microbatch gathers the weights twice and,
# having no full gradient to add to, reduces once.
# </details>
#
# **3. Does stage 3 divide peak memory by N?**
# <details><summary>Answer</summary>
#
# The state, yes. Not the activations, nor the blocks that are whole while they compute: two with one block of prefetch. A
# model wrapped as a single unit gathers everything at once.
# </details>
#
# **4. What crosses PCIe when the optimizer is offloaded?**
# <details><summary>Answer</summary>
#
# Gradients down and weights up, 2Ψ + 2Ψ bytes in 16 bits per step; never the moments, because the optimizer runs on the
# host. For 13B: 52 GB, 2.1 s at 25 GB/s on one GPU, and 156 GB of host memory.
# </details>
#
# **5. How do you clip gradients on 1,024 ranks?**
# <details><summary>Answer</summary>
#
# Each rank adds up the squares of its shard (without padding, replicated parameters once), one all-reduce of one number,
# one root. Local norms would be √1024 = 32 times too small and each shard scaled differently.
# </details>
#
# **6. A run with FSDP starts with a strange loss; every rank loaded the model its own way. What do you check?**
# <details><summary>Answer</summary>
#
# Whether all shards come from one model: compare the gathered parameters with rank 0's. Repairs: the same seed
# everywhere, `sync_module_states=True` (FSDP1), or the meta device and one load that broadcasts.
# </details>
#
# ## Can you answer them now?
#
# 1. What does a rank hold, and what does it send, in each of the three stages?
# 2. When do stages 1 and 2 send no more than plain data parallelism, and what makes stage 3 expensive?
# 3. Which four things break *silently* once a rank has only a part of the state?
#
# Next: [05 · Tensor parallelism](05_tensor_parallel.ipynb) divides the matrices themselves, so that a block's weights never have to be gathered at all.

# %%
finish("04_zero")
