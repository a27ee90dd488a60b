# %% [markdown]
# # 04 · ZeRO
#
# **Optimizer, gradients, parameters: each can be divided by $N$, at $2P$, $2P$ and $3P$ bytes per rank and step, times
# $(N-1)/N$.** Here you divide them.
#
# About 110 minutes with the exercises; running it top to bottom takes under a minute. At the end you can answer:
#
# 1. What does a rank hold, and what does it send, in each of the three stages?
# 2. Why do stages 1 and 2 send no more than plain data parallelism, and what makes stage 3 expensive?
# 3. Which four things break *silently* once a rank has only a part of the state?
#
# Data parallelism gives every rank the same weights, gradients and optimizer state. ZeRO (Rajbhandari et al. 2020)
# observes that nobody needs $N$ copies.
#
# The calls of `group`, and what each returns: [docs/group.md](../docs/group.md).

# %%
import inspect
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from course.lab04_zero import experiments
from course.lab04_zero import experiments_breaks as breaks
from course.lab04_zero import experiments_links as links
from course.lab04_zero import experiments_torch as peers
from course.lab04_zero import figures as pictures
from course.lab04_zero.experiments import PSI, Setup
from minillm.comm import launch
from minillm.labkit import check, receipt, row, show, sliders
from minillm.labkit.receipts import format_value
from minillm.model import Transformer, cross_entropy
from minillm.predict import comms, fully_shard
from minillm.predict.model import ADAM_FP32, ADAM_MIXED

# %% [markdown]
# ## What is there to divide?
#
# Ψ parameters, trained with Adam. In mixed precision the weights and gradients take 2 bytes each, and the optimizer
# keeps a float32 copy of the weights and two moments:

# %%
print(f"{'bytes per parameter':<24}{'weights':>9}{'gradients':>11}{'masters':>9}{'moments':>9}{'all':>6}")
for name, state in (("bf16 with masters", ADAM_MIXED), ("fp32", ADAM_FP32)):
    print(f"{name:<24}{state.parameter:>9}{state.gradient:>11}{state.master:>9}{state.moments:>9}{state.total:>6}")

# %% [markdown]
# Two things handbooks get wrong are already visible. *Mixed precision saves no state*: 16 bytes either way; what it
# saves is activations, traffic and time. And *the parameters are not the largest part*: 12 of the 16 bytes belong to
# the optimizer, which is why stage 1 begins there.
#
# ## Predict
#
# **A 7B model in mixed precision takes 112 GB of state. On 8 ranks, ZeRO-1 divides the optimizer by 8. How many GB does
# each rank hold?** Write down your guess. (The one below divides everything.)

# %%
guess_gb = 112 / 8  # your guess

# %%
receipt(
    "7B parameters on 8 ranks, bf16 with masters",
    [
        row("your guess: state per rank with ZeRO-1", None, guess_gb, "GB"),
        row("ZeRO-1: 4Ψ + 12Ψ/N", None, ADAM_MIXED.per_rank(7 * 10**9, 8, stage=1) / 1e9, "GB"),
        row("ZeRO-2: 2Ψ + 14Ψ/N", None, ADAM_MIXED.per_rank(7 * 10**9, 8, stage=2) / 1e9, "GB"),
        row("ZeRO-3: 16Ψ/N", None, ADAM_MIXED.per_rank(7 * 10**9, 8, stage=3) / 1e9, "GB"),
    ],
)

# %%
show(pictures.memory_by_stage)

# %%
sliders(pictures.memory_by_stage, billions=(0.5, 70.0, 0.5), ranks=(1, 64), mixed=True)

# %% [markdown]
# "4, 8 and $N$ times less" is what one often reads. Those are limits: at $N = 8$ it is 2.9, 4.3 and 8 times. Stages 1
# and 2 run into a floor (4Ψ and 2Ψ), only stage 3 is linear in $1/N$; and none of this is activations.
#
# ## Build it
#
# ### 1. Who holds what (10 minutes)
#
# All parameters are laid end to end in one flat buffer, which is cut into $N$ equal shards. Cuts fall where they fall,
# also through a matrix: Adam works element by element and does not mind.

# %%
show(pictures.who_holds_what)

# %%
sliders(pictures.who_holds_what, ranks=(1, 6), layers=(1, 4))


# %%
def partition(sizes, world_size, rank):
    """sizes: elements of each parameter -> (length of every shard, for each parameter the slice that rank holds).

    Slices count from the parameter's own first element; slice(0, 0) where rank holds nothing of it. The flat buffer is
    padded at its end, by as little as makes the shards equal.
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
# does it need, and what do the others need from it? You have `group.broadcast`, `.all_reduce`, `.reduce_scatter`
# and `.all_gather`; the check counts their bytes.


# %%
class ZeroOne:
    """An optimizer over this rank's part of `weights`: [P], flat, the same size on every rank, divisible by N."""

    def __init__(self, weights, group, make):
        """make([parameter, ...]) gives a torch optimizer. Ranks may come with different weights: rank 0's count."""
        # BEGIN SOLUTION
        self.weights, self.group = group.broadcast(weights), group
        self.shard = nn.Parameter(weights.chunk(group.world_size)[group.rank].clone())
        self.optimizer = make([self.shard])
        # END SOLUTION

    def step(self, gradient):
        """gradient: [P], of this rank's batch. Afterwards `weights` are the updated ones, on every rank."""
        # BEGIN SOLUTION
        self.shard.grad = self.group.reduce_scatter(gradient, op="avg")
        self.optimizer.step()
        self.group.all_gather(self.shard.data, out=self.weights)
        # END SOLUTION


ZeroOne = check("zero-one-step", ZeroOne)

# %% [markdown]
# A reduce-scatter and an all-gather: together exactly an all-reduce (lab 01). So ZeRO-1 costs *nothing* in bytes. Two
# sentences you will read elsewhere are wrong: "each GPU contributes its shard to a global all-reduce" (it contributes
# its whole gradient to a reduce-scatter), and "the optimizer shards are reduced" (they never travel).
#
# ### 3. Stage 2: gradients (20 minutes)
#
# If a rank needs 1/N of the averaged gradient, why keep the rest? Backward makes gradients from the last layer to the
# first; reduce-scatter each *bucket* of them as soon as it is full, and free it while backward goes on.


# %%
def shard_gradients(buckets, group):
    """Hooks that reduce-scatter each bucket in backward as soon as all its gradients are there, and free those.

    buckets: lists of parameters. Returns a list: after every backward it holds this rank's averaged shard of each
    bucket (its gradients flattened, one after another, zeros at the end to make it divisible).
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
# Now a rank keeps 1/N of the weights, too. A block can only compute with all of its weights, so: *gather, compute,
# free*. And once more in backward. Here backward computes the block again, so that nothing of it has to stay;
# FSDP keeps the activations and frees only the weights' memory.


# %%
class GatheredBlock(torch.autograd.Function):
    """compute(x, weights) of one block whose weights are spread over the group."""

    @staticmethod
    def forward(ctx, x, shard, compute, group):
        """x: this rank's activations; shard: [P/N] -> compute(x, weights), weights: [P] from all ranks."""
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
# Two all-gathers and a reduce-scatter per block: $3P$. Descriptions of FSDP often forget the second gather, and arrive
# at $2P$.
#
# ### 5. Clip across shards (10 minutes)
#
# Clipping needs the norm of the *whole* gradient. How many bytes does that take?


# %%
def clip(gradient, numel, max_norm, group):
    """gradient: [n], this rank's shard of the flat gradient of numel elements; what lies behind them is padding and may
    hold anything. Scales the shard in place so that the whole gradient's norm is max_norm at most; returns that norm
    (before scaling)."""
    # BEGIN SOLUTION
    mine = gradient[: max(0, numel - group.rank * len(gradient))]
    norm = group.all_reduce(mine.square().sum()).sqrt()
    gradient *= (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return norm
    # END SOLUTION


clip = check("clip-across-shards", clip)

# %% [markdown]
# One number. It has a second use: if any rank's gradient is infinite, *every* rank sees an infinite norm, and all of
# them skip the step.
#
# ### 6. Save it whole (5 minutes)
#
# A checkpoint should load on any number of ranks, on one too.


# %%
def whole_state(state, numel, group):
    """state: {"step": number, "exp_avg": [n], "exp_avg_sq": [n]} of this rank's shard -> the same for all numel
    elements, on every rank."""
    # BEGIN SOLUTION
    return {name: group.all_gather(x)[:numel] if x.dim() else x for name, x in state.items()}
    # END SOLUTION


whole_state = check("whole-state", whole_state)

# %% [markdown]
# ### 7. Offload (15 minutes)
#
# Too large even so? Adam treats every element alone, so its moments can lie in slow memory (the host's, or a file on an
# NVMe disk) and stream past. `store.read(name, part)` gives a copy of a slice, `store.write(name, part, tensor)` puts
# one back.


# %%
def stream_adam(weights, gradient, store, step, chunk, lr, betas, eps):
    """One Adam step on weights: [n], in place. Both moments, "m" and "v", lie in store; only chunk elements of each fit
    into memory. step counts from 1 (for the bias correction); there is no weight decay."""
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
# ## Yours under a transformer
#
# Your partition, your stage 1 and your clipping train a small model on 4 ranks, every rank with *another seed*, and
# then on one. The global batch is the same. So must the losses be.


# %%
def train_with_mine(group, steps=3):
    model = Transformer(experiments.MODEL, seed=group.rank)
    parameters = list(model.parameters())
    length, _ = partition([p.numel() for p in parameters], group.world_size, group.rank)
    flat, start = torch.zeros(length * group.world_size), 0
    for p in parameters:  # the model's weights become views into the flat buffer
        view = flat[start : start + p.numel()].view(p.shape)
        p.data, start = view.copy_(p.data), start + p.numel()
    optimizer, losses = ZeroOne(flat, group, lambda shards: torch.optim.AdamW(shards, lr=3e-3)), []
    for step in range(steps):
        batch = experiments.tokens(step, 0, group.rank, group.world_size, 1)
        loss = cross_entropy(model(batch[:, :-1]), batch[:, 1:])
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
        optimizer.step(F.pad(gradient, (0, len(flat) - len(gradient))))
        losses.append(group.all_reduce(loss.detach(), "avg").item())
    return losses


four, one = launch(train_with_mine, 4, device="cpu")[0], launch(train_with_mine, 1, device="cpu")[0]
receipt(
    "loss with your ZeRO-1: 4 ranks beside 1",
    [
        row(f"step {step}", alone, ours, tolerance=1e-4)
        for step, (ours, alone) in enumerate(zip(four, one, strict=True))
    ],
)

# %% [markdown]
# ## Measure: what a rank holds
#
# From here on, minillm's own, in `minillm/train`: `BucketedDDP` (stage 0, `ddp.py`), `ZeroOptimizer` (stages 1 and 2,
# `zero.py`) and `FullyShard` (stage 3, `fully_shard.py`) train the same transformer on the same tokens. In the middle
# of each step, between backward and update, `measure.memory` looks at every tensor and says what it is for. This is
# the rank program:

# %%
print(inspect.getsource(experiments.train))

# %%
setups = [Setup(stage, n, mixed=mixed) for n in (2, 4) for mixed in (True, False) for stage in experiments.STAGES]
setups += [Setup(stage, 4, accumulate=4) for stage in experiments.STAGES]
found = experiments.compare(setups)

FORMULAS = {
    True: ("16Ψ", "4Ψ + 12Ψ/N", "2Ψ + 14Ψ/N", "16Ψ/N"),
    False: ("16Ψ", "8Ψ + 8Ψ/N", "4Ψ + 12Ψ/N", "16Ψ/N"),
}
rows = [
    row(
        f"{setup.name}, N={setup.world_size}, {'bf16 + masters' if setup.mixed else 'fp32'}: "
        f"{FORMULAS[setup.mixed][setup.stage]}",
        experiments.predicted_state(setup),
        max(sum(rank.memory.values()) for rank in ranks),
        "B",
        tolerance=0.02,
    )
    for setup, ranks in found.items()
    if setup.accumulate == 1
]
receipt(f"state per rank, Ψ = {PSI:,}", rows)


# %%
def state_by_kind():
    """Bytes of state per rank by kind, predicted and measured: DDP and the three stages, at 2 and at 4 ranks."""
    return pictures.draw_memory({setup: ranks for setup, ranks in found.items() if setup.accumulate == 1})


show(state_by_kind)

# %% [markdown]
# Look at stage 3 in mixed precision: the kinds are not those of the formula, the sum is. `FullyShard` keeps its shard
# in float32, which *is* the master copy, and gathers it as bf16: $4 + 4 + 8$ instead of $2 + 2 + 12$.
#
# ## Measure: what a rank sends

# %%
unit = 4 * PSI * 3 / 4  # P(N-1)/N at N = 4, fp32
rows = []
for accumulate in (1, 4):
    for stage in experiments.STAGES:
        setup = Setup(stage, 4, accumulate)
        sent = max(rank.sent for rank in found[setup])
        name = f"{setup.name}, {accumulate} microbatch{'es' if accumulate > 1 else ''}"
        rows.append(row(name, experiments.predicted_bytes(setup), sent, "B"))
        rows.append(row("    as multiple of P(N-1)/N", None, sent / unit))
        calls = found[setup][0].calls
        rows.append(row("    collectives", None, ", ".join(f"{count} {op}" for op, count in sorted(calls.items()))))
receipt(f"bytes sent per rank and step, N = 4, P = {4 * PSI:,} B", rows)

# %% [markdown]
# Exact, to the byte. $2P$, $2P$, $2P$ and $3P$ for one microbatch: so *ZeRO-1 and ZeRO-2 are no trade of memory for
# communication*, and ZeRO-3 is no remedy for communication, as some tables list it: it sends half as much again.
#
# With 4 accumulated microbatches the picture changes. DDP and stage 1 add gradients up locally and reduce once
# (`no_sync`). Stage 2 has no full gradient to add to, so it reduces every time: $(K+1)P$. Stage 3 gathers twice and
# reduces once per *microbatch*: $3KP$, six times DDP's bytes at $K = 4$.
#
# ## Measure: what comes out
#
# If all of this is the same algorithm, the losses are the same, whatever the stage, the number of ranks or of
# microbatches.

# %%
baseline = found[Setup(0, 4)][0].losses
rows = [
    row(
        f"{s.name}, N={s.world_size}, K={s.accumulate}: loss after the last step",
        baseline[-1],
        ranks[0].losses[-1],
        "",
        1e-5,
    )
    for s, ranks in found.items()
    if not s.mixed
]
receipt("fp32, beside DDP on 4 ranks", rows)

# %% [markdown]
# ## Measure: stage 3 on a clock
#
# A block waits for its weights, unless they were gathered while the block before it computed. Here five blocks
# compute for 24 ms each (48 ms backward) and a gather takes 21 ms on an *emulated* link. On top without prefetch,
# below with one unit gathered ahead.

# %%
clocks = links.stage3_on_a_clock((0, 1))


def stage3_with_and_without_prefetch():
    """Timeline of rank 0 in stage 3: without prefetch every gather is waited for, with one ahead nearly none."""
    return pictures.draw_prefetch(clocks)


show(stage3_with_and_without_prefetch)

# %%
rows = []
for prefetch, numbers in clocks.items():
    seconds = numbers["predicted_s"], numbers["measured_s"]
    rows.append(row(f"prefetch {prefetch}: one step, emulated link", *seconds, "s", tolerance=0.3))
    rows.append(row("    blocks whole at once", prefetch + 1, numbers["units_held"]))
receipt("what a block ahead buys, and what it costs", rows)

# %% [markdown]
# The price of prefetching is memory: two blocks are whole at once instead of one. Move the sliders: what if compute is
# shorter than the gather? What does a second block ahead buy?

# %%
show(pictures.stage3_timeline)

# %%
sliders(pictures.stage3_timeline, blocks=(2, 8), prefetch=(0, 3), gather_ms=(1, 80), forward_ms=(1, 80))

# %% [markdown]
# ## Measure: offload
#
# The optimizer moves to where its state is (host memory, or files; `minillm/parallel/offload.py`), so the state itself
# never travels. What crosses the link between accelerator and host is the gradient shard down and the updated weights
# up: in 16 bits $2Ψ + 2Ψ$ bytes per step over all ranks (Ren et al. 2021).

# %%
with tempfile.TemporaryDirectory() as folder:
    homes = {"host memory": "cpu", "files": Path(folder)}
    setups = {name: Setup(2, 2, mixed=True, offload=home) for name, home in homes.items()}
    offloaded = experiments.compare(list(setups.values()))
rows = []
for name, setup in setups.items():
    ranks = offloaded[setup]
    down, up = (sum(rank.host[i] for rank in ranks) / setup.steps for i in range(2))
    rows.append(row(f"{name}: gradients down per step, all ranks, 2Ψ", 2 * PSI, down, "B"))
    rows.append(row("    weights up per step, all ranks, 2Ψ", 2 * PSI, up, "B"))
    rows.append(row("    optimizer bytes in this process's memory", None, ranks[0].memory.get("optimizer", 0), "B"))
    same = ranks[0].losses == found[Setup(2, 2, mixed=True)][0].losses
    rows.append(row("    the same losses as without", True, same))
receipt("ZeRO-2 on 2 ranks, bf16 with masters, optimizer offloaded", rows)

# %% [markdown]
# (On a machine without an accelerator host memory *is* the process's memory; the files are not.)
#
# ## Break it
#
# Once each rank has only a part of the state, four habits that were fine become bugs, and none of them raises an error.
# One launch commits all four.

# %%
bad_rank = int(torch.randint(0, 4, ()))
accidents = launch(breaks.all_accidents, 4, bad_rank, device="cpu")

# %% [markdown]
# ### Clip by your own norm
#
# `torch.nn.utils.clip_grad_norm_` on a shard sees a part of the gradient. Predict: what is the typical local norm, as a
# share of the global one?

# %%
clipped = [rank["clip"] for rank in accidents]
local, true = [c["local"] for c in clipped], clipped[0]["global"]
receipt(
    "one gradient, four shards",
    [
        row("global norm: root of the sum of squares", true, sum(norm**2 for norm in local) ** 0.5, "", 1e-4),
        row("local norms", None, tuple(local)),
        row("    root mean square / global = 1/√N", 0.5, (sum(n**2 for n in local) / 4) ** 0.5 / true, "", 1e-4),
        row("clipped to 0.1 by local norms, the whole gradient has", 0.1, clipped[0]["clipped to"], "", 1e-3),
        row("    and points elsewhere, by", 0.0, clipped[0]["degrees"], "degrees", 1e-3),
    ],
)

# %% [markdown]
# Too long by √N, and in a wrong direction, because each shard is scaled by another factor. The loss still goes down.
# Two verdicts are off; that is the point.
#
# ### Every rank its own seed
#
# Sharding takes rank $r$'s part of rank $r$'s weights. torch's `fully_shard` does not look at what the others have;
# minillm's stages broadcast rank 0's first.

# %%
seeds = accidents[0]["seeds"]
receipt(
    f"a model of {seeds['elements'][0]:,} weights: how many are whose first weights?",
    [
        row(
            "fully_shard, seeded by rank: from ranks 0 to 3",
            (seeds["elements"][0], 0, 0, 0),
            tuple(seeds["fully_shard"]),
        ),
        row(
            "FullyShard, seeded by rank: from ranks 0 to 3", (seeds["elements"][0], 0, 0, 0), tuple(seeds["FullyShard"])
        ),
    ],
)

# %% [markdown]
# A patchwork of four models. It trains, since all ranks agree on it; it is only not the model you meant, and with
# loaded weights on one rank and random ones on the others it is garbage.
#
# ### Rank 0 saves

# %%
saved = accidents[0]["save"]
receipt(
    "Adam's first moment in the checkpoint",
    [
        row("rank 0 saves its optimizer.state_dict(): elements", saved["model"], saved["inner"]),
        row("all ranks take part in state_dict(): elements", saved["model"], saved["whole"]),
    ],
)

# %% [markdown]
# A quarter. (And if gathering is part of `state_dict`, then *every* rank has to call it: `if rank == 0: save(...)`
# hangs.)
#
# ### A plain loss scaler
#
# With fp16 an overflow must skip the step. A `GradScaler` decides by the gradients it sees: those of one shard.

# %%
scalers = [rank["scaler"] for rank in accidents]
receipt(
    f"an overflow in the shard of rank {bad_rank}",
    [
        row("ranks that step", 0, sum(scaler["stepped"] for scaler in scalers)),
        row("loss scales afterwards", (512.0,) * 4, tuple(scaler["scale"] for scaler in scalers)),
    ],
)

# %% [markdown]
# Three ranks step and one does not, so the model is now half old and half new; and the next losses are scaled by two
# different numbers. The repair is your `clip`: the decision has to be made from a number that every rank has
# (`ShardedGradScaler` in torch reduces the flag). bf16 needs no scaler at all.
#
# ## Where it loses
#
# Slow links, and accumulation. Every stage on 2 ranks over an *emulated* link of 8 MB/s, so slow that bytes are all
# that counts: prediction = bytes / bandwidth + rounds · latency, as if nothing were hidden. That is communication
# alone; the verdicts are on how the stages compare with DDP.

# %%
slow = links.over_a_slow_link()


def steps_over_a_slow_link():
    """Step time of every stage over a slow emulated link, predicted and measured, for 1 and 4 microbatches."""
    return pictures.draw_slow_link(slow)


show(steps_over_a_slow_link)

# %%
times = {(line["stage"], line["accumulate"]): (line["predicted_s"], line["measured_s"]) for line in slow["rows"]}
rows = []
for (stage, k), both in times.items():
    what = f"{stage}, {k} microbatch{'es' if k > 1 else ''}"
    seconds = tuple(format_value(each, "s") for each in both)
    rows.append(row(f"{what}: communication by the formula; whole step", None, seconds))
    if stage != "DDP":
        shares = (ours / ddp for ours, ddp in zip(both, times["DDP", k], strict=True))
        rows.append(row("    times as long as DDP's", *shares, tolerance=0.5))
receipt("emulated slow link", rows)

# %% [markdown]
# With accumulation stage 3 takes several times as long as DDP on such a link. So: stage 3 inside a node, where links
# are fast (or *hybrid sharding*: shards inside the node, replicas across), stage 1 across nodes, and stage 1 together
# with pipelines, which always have many microbatches.
#
# ## The same in production
#
# torch's own, on the same ranks, with the same model and tokens. They know nothing of minillm's ledger, so the bytes
# come from the loopback counter.

# %%
theirs = peers.peers()
ranks0 = theirs[0]

# %%
textbook = 4 * PSI * 3 / 4
one_step = found[Setup(0, 4)][0].losses[1]
blocks = experiments.MODEL.num_layers
expected = {
    "DDP + ZeroRedundancyOptimizer": "1 allreduce, 40 broadcast",  # one bucket, then a broadcast per parameter
    "FSDP2": f"{2 * blocks + 1} allgather_base, {blocks + 1} reduce_scatter_base",
}
rows = []
for line in peers.byte_rows([{name: rank[name] for name in expected} for rank in theirs]):
    name = f"{line['name']}, {line['accumulate']} microbatch{'es' if line['accumulate'] > 1 else ''}"
    rows.append(row(name, line["predicted"], line["sent"], "B", tolerance=0.05))
    rows.append(row("    as multiple of P(N-1)/N", None, line["sent"] / textbook))
for name, peer in ranks0.items():
    calls = ", ".join(f"{count} {op}" for op, count in sorted(peer["calls"].items()))
    rows.append(row(f"{name}: collectives of a step", expected.get(name), calls))
    rows.append(row("    loss of its second step, beside minillm's DDP", one_step, peer["losses"][1], "", 1e-4))
receipt(f"torch on gloo, bytes sent per rank and step, P = {4 * PSI:,} B", rows)

# %% [markdown]
# - **DDP + `ZeroRedundancyOptimizer`** is ZeRO-1 at $3P$: DDP all-reduces the *whole* gradient ($2P$), then each rank
#   broadcasts what it has stepped ($P$). Yours needs $2P$.
# - **FSDP2** (`fully_shard` per block) is stage 3. Its root stays gathered between forward and backward, which saves
#   one gather; and gloo carries out a reduce-scatter as an all-reduce, so here it moves nearly $4P$ where NCCL, and
#   minillm's ring, move $3P$. Collectives: 2 all-gathers and 1 reduce-scatter per block, 288 for 96 blocks, not "about
#   100".
# - **accelerate** was asked for FSDP2 as well. What does the receipt of its memory say?

# %%
held = [found[Setup(3, 4)][0].memory, *(ranks0[name]["memory"] for name in ranks0)]
rows = []
for name, memory in zip(["minillm FullyShard", *ranks0], held, strict=True):
    rows.append(row(f"{name}: state per rank / Ψ", None, sum(memory.values()) / PSI))
    rows.append(
        row("    of it weights, gradients, optimizer", None, tuple(round(memory[k] / PSI, 2) for k in pictures.KINDS))
    )
receipt("who shards what, fp32, N = 4", rows)

# %% [markdown]
# On a CPU accelerate silently falls back to DDP: 16 Ψ, nothing sharded, right losses. Exactly what your checks looked
# for: *a ZeRO that shards nothing has right numbers*. On GPUs the same lines shard. Trust receipts, not names.
#
# | torch / accelerate / DeepSpeed | here |
# |---|---|
# | `ZeroRedundancyOptimizer`, DeepSpeed `"stage": 1` | `ZeroOptimizer(stage=1)` |
# | FSDP2 `reshard_after_forward=False`: gathers once, $2P$; weights stay whole until backward | between 2 and 3 |
# | DeepSpeed `"stage": 2` | `ZeroOptimizer(stage=2)` |
# | `fully_shard(block)`, FSDP `FULL_SHARD`, DeepSpeed `"stage": 3` | `FullyShard` |
# | `HYBRID_SHARD`, a 2-D mesh given to `fully_shard` | not here: its shards need a second reduction, across nodes |
# | `CPUOffloadPolicy`, DeepSpeed `offload_optimizer` | `offload="cpu"`, `offload=Path(...)` |
#
# ## On a cluster
#
# `labs/torchrun/04_zero.py` holds stage 1, clipping and the gathered block for any number of processes:
#
# ```bash
# python course/lab04_zero/torchrun.py                                   # 4 ranks here
# torchrun --nproc-per-node 4 course/lab04_zero/torchrun.py              # the same, under torchrun
# torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d \
#          --rdzv-endpoint $HEAD_NODE:29500 course/lab04_zero/torchrun.py   # on each of two nodes
# ```
#
# ## Interview corner
#
# The numbers first, all by the formulas you have just checked:


# %%
def number(name, value, unit=""):
    print(f"{name:<66}{format_value(value, unit):>14}")


GB, B = 1e9, 10**9
for stage, n in ((0, 8), (1, 8), (2, 8), (3, 8), (1, 64), (3, 64)):
    number(f"1. 7B, mixed Adam, stage {stage} on {n} ranks", ADAM_MIXED.per_rank(7 * B, n, stage) / GB, "GB")
for n in (4, 8, 64):
    sent = comms.ring_all_gather(7 * B, 2, n).sent_per_rank[0] / GB
    number(f"2. 7B in bf16, {n} ranks: DDP, ZeRO-1 and ZeRO-2 send per rank", 2 * sent, "GB")
    number("   ZeRO-3", 3 * sent, "GB")
number("3. ZeRO-3 / DDP with 8 microbatches", 3 * 8 / 2)
number("   ZeRO-2 / DDP with 8 microbatches", (8 + 1) / 2)
number("4. 10B on 4 x 40 GB: state per GPU in stage 3", ADAM_MIXED.per_rank(10 * B, 4, 3) / GB, "GB")
blocks, rest = [218 * 10**6] * 32, 2 * 32_000 * 4096
whole = fully_shard.held(blocks, rest, 8, itemsize=2, shard_itemsize=4).gathered / GB
number("5. 7B, 32 blocks: weights whole at once in stage 3, prefetch 1", whole, "GB")
number("6. 13B, optimizer in host memory: over PCIe per step, down + up", 4 * 13 * B / GB, "GB")
number("   at 25 GB/s", 4 * 13 * B / 25 / GB, "s")
number("   host memory for masters and moments", 12 * 13 * B / GB, "GB")
step_s, gather_s = 6 * 218e6 * 4096 / 400e12, comms.ring_all_gather(218 * 10**6, 2, 8).time(1e-5, 50 * GB)
number("7. a block of 218M, 4,096 tokens at 400 TFLOP/s: forward and backward", step_s, "s")
number("   its two gathers and one reduce-scatter at 50 GB/s, 8 ranks", 3 * gather_s, "s")
number(
    "8. 1024 ranks: bytes of the clipping all-reduce per rank, fp32",
    comms.ring_all_reduce(1, 4, 1024).sent_per_rank[0],
    "B",
)

# %% [markdown]
# Say your answer aloud before you open one.
#
# **1. A 7B model, mixed-precision Adam, 80 GB GPUs. Which stage, from how many GPUs on?**
# <details><summary>Answer</summary>
#
# 112 GB of state on one. Stage 1 on 8: 38.5 GB, stage 2: 26.25 GB, stage 3: 14 GB. With 80 GB stage 1 is enough and
# sends no more than DDP, so take it, and spend the rest on activations. More ranks do not help stage 1 much: 29.3 GB on
# 64, its floor is 28 GB.
#
# *Follow-up: what is not in these numbers?* Activations, the gathered blocks of stage 3, buckets, the allocator's gaps.
# </details>
#
# **2. What does each stage send per step?**
# <details><summary>Answer</summary>
#
# P(N-1)/N times: DDP 2, ZeRO-1 2, ZeRO-2 2, ZeRO-3 3. You measured all of them to the byte. For 7B in bf16 on 8 ranks:
# 24.5 GB, and 36.75 GB for stage 3.
#
# *Follow-up: is ZeRO-3 then 1.5 times slower?* Its communication is. A step is compute plus what of the communication
# is *exposed*, and gathers can be prefetched.
# </details>
#
# **3. "FSDP costs 1.5 times the communication of DDP." Always?**
# <details><summary>Answer</summary>
#
# Only without accumulation. With K microbatches DDP reduces once and stage 3 gathers twice and reduces once in each:
# 1.5 K, so 12 times at K = 8 (you measured 6 times at K = 4). ZeRO-2 sends (K+1)/2 times as much. That is why
# pipelines, which have many microbatches, are combined with stage 1.
# </details>
#
# **4. 10B parameters on 4 GPUs of 40 GB, says a handbook, need offloading. Do they?**
# <details><summary>Answer</summary>
#
# Stage 3 holds 160 GB / 4 = 40 GB per GPU: exactly full, before a single activation. So yes, but for that reason; on
# 8 GPUs it is 20 GB and they do not. ZeRO-Offload's own claim was another: 13B on *one* GPU of 32 GB.
# </details>
#
# **5. Does stage 3 divide peak memory by N?**
# <details><summary>Answer</summary>
#
# The state, yes. Not the activations, and not the blocks that are whole while they compute: with one block of
# prefetch, two of them (0.96 GB in bf16 for 7B in 32 blocks, where the embeddings count as a block). One module
# wrapped as a single unit would gather everything at once: at the peak its weights are whole, and only the optimizer
# and the gradients are still divided.
# </details>
#
# **6. What crosses PCIe when the optimizer is offloaded?**
# <details><summary>Answer</summary>
#
# Gradients down and weights up, 2Ψ + 2Ψ bytes in 16 bits per step, shared by the ranks; never the moments, because the
# optimizer runs on the host. For 13B: 52 GB, 2.1 s at 25 GB/s on one GPU, and 156 GB of host memory. Large batches or
# many microbatches hide it; small ones do not.
# </details>
#
# **7. Can stage 3's gathers hide behind compute?**
# <details><summary>Answer</summary>
#
# Compare per block: 6·params·tokens FLOPs against 3·params·bytes over the link. 218M parameters, 4,096 tokens per GPU
# at 400 TFLOP/s: 13.4 ms of compute against 23 ms at 50 GB/s. Parameters cancel: more *tokens per GPU* hide it, a
# bigger model does not. 8,192 tokens would. At 400 GB/s inside a node it hides easily.
# </details>
#
# **8. How do you clip gradients on 1,024 ranks?**
# <details><summary>Answer</summary>
#
# Each rank adds up the squares of its shard (without padding, replicated parameters once), one all-reduce of one
# number, one root. A few bytes per rank, 1,023·2 rounds if it were a ring, so a tree. Local norms would be √1024 = 32
# times too small, and each shard would be scaled differently.
# </details>
#
# **9. Is a reduce-scatter of gradients plus an all-gather of weights really the same as an all-reduce of gradients?**
# <details><summary>Answer</summary>
#
# In bytes, exactly. In time not quite: the all-gather comes after the optimizer and cannot hide behind backward; it can
# hide behind the next forward. And the weights travel in their own precision, which may be less than the gradients'.
# </details>
#
# **10. `torch.save(optimizer.state_dict())` on rank 0. What have you saved?**
# <details><summary>Answer</summary>
#
# 1/N of Adam: here 51,344 of 205,376 elements. Use `get_state_dict` of `torch.distributed.checkpoint` (all ranks call
# it), or save shards and a plan how to put them together.
# </details>
#
# **11. A run with FSDP starts with a strange loss. Every rank loaded the model its own way. What do you check?**
# <details><summary>Answer</summary>
#
# Whether shards come from one model: compare the gathered parameters with rank 0's (your seed receipt). Repairs:
# the same seed everywhere, `sync_module_states=True` (FSDP1), or meta device plus one load that broadcasts.
# </details>
#
# **12. Why does nobody shard the optimizer by whole parameters?**
# <details><summary>Answer</summary>
#
# Some did (ZeroRedundancyOptimizer does): the shards are then uneven, the largest matrix sets the size, and ranks send
# broadcasts of different sizes. Flat shards are equal to the element. The price: an optimizer that needs whole matrices
# (Muon, Shampoo, Adafactor) sees slices.
# </details>
#
# ## Can you answer them now?
#
# 1. What does a rank hold, and what does it send, in each of the three stages?
# 2. Why do stages 1 and 2 send no more than plain data parallelism, and what makes stage 3 expensive?
# 3. Which four things break *silently* once a rank has only a part of the state?
#
# Next: lab 05 divides the matrices themselves, so that a block's weights never have to be gathered at all.
