# %% [markdown]
# # 06 · Pipeline parallelism
#
# **Equal stages idle for $(n-1)/(M+n-1)$ of a step; 1F1B changes the memory and, while messages take no time, not the
# bubble.** You build both, run them on real ranks and compare them with these formulas.
# Stands on labs 01 (messages) and 02 (the step, accumulation).
#
# About 4 hours; the core path of two is the exercises (105 minutes) with the figures beside them. Run All takes about a
# minute. At the end you can answer:
#
# 1. For which share of a step do stages idle, and what does, and does not, change it?
# 2. What does each stage hold at most under GPipe, 1F1B, interleaving, zero bubble and DualPipe, and what do they send?
# 3. Which mistakes at the cut between two stages leave the loss looking right?
#
# ZeRO gathers a layer's weights where they are needed. In a pipeline the weights stay where they are and the
# *activations* travel. Each of $n$ ranks is a *stage* and holds neighbouring layers. A batch is cut into $M$
# *microbatches*, which pass through the stages forward (F) and back (B). A batch of 10 samples, cut into 5
# microbatches, has 2 *samples* in each. The pipeline-parallel size is the number of stages.
#
# The calls of `group`, and what each returns: [docs/group.md](../docs/group.md).

# %%
import inspect
import itertools

import torch

from course.kit import check, finish, hint, show, sliders
from course.lab06_pipeline_parallel import (
    experiments,
    experiments_breaks,
    experiments_torch,
    figures,
    receipts,
)
from course.lab06_pipeline_parallel.experiments import PRINTED_CHART, Job
from minillm.comm import launch
from minillm.parallel.pipeline_parallel.schedule import schedules
from minillm.parallel.pipeline_parallel.schedule.schedules import Durations, ScheduleError, simulate

# %% [markdown]
# ## Predict
#
# **4 stages, 8 microbatches, every stage equally fast. For which share of the step does a stage compute nothing?**
# Write down your guess before you run the next cell.

# %%
guess_idle = 0.5  # your guess

# %%
receipts.idle_share(guess_idle)

# %% [markdown]
# If stages are equal and messages take no time, stage $s$ works for $M(F+B)$ and idles for $(n-1)(F+B)$: $sF$ at the
# start, $sB$ at the end, the rest while it waits for gradients. The share of the step is therefore $(n-1)/(M+n-1)$.
# $(n-1)/M$ is another quantity, idle time over *useful* time, which can exceed 1.
#
# ### Common claims
#
# - *The bubble is $(n-1)/M$.* [Narayanan et al. 2021](https://arxiv.org/abs/2104.04473), §2.2, define it so, as idle
#   over *ideal* time. As a share of the step it is $(n-1)/(M+n-1)$: 43 %, not 75 %, for $n = M = 4$.
# - *1F1B shrinks the bubble.* By itself it idles as long as GPipe, or longer if messages take time. It holds fewer
#   activations, so you can afford more microbatches, and those shrink the bubble.
# - *The bubble is negligible if $M \ge 4n$* ([Huang et al. 2019](https://arxiv.org/abs/1811.06965), §2.3). At $M = 4n$
#   up to 20 % of the step is idle. For at most 25 %, $M = 3(n-1)$ is enough.
# - *Pipelines train with stale gradients and several weight versions.* That is true of asynchronous ones such as
#   [PipeDream, Narayanan et al. 2019](https://doi.org/10.1145/3341301.3359646). With a flush per step they are exact.
# - *Microbatches cost activation memory.* At a fixed batch GPipe without recomputation holds as much in all, however
#   you cut it; 1F1B holds less.
# - *Interleaving is memory-efficient.* Compared with GPipe, for $M$ well above $n$. It holds *more* activations than
#   plain 1F1B.
# - *An MFU below 50 % is a sign of bubbles.* Llama 3 405B ran at 38 to 43 % ([Llama team
#   2024](https://arxiv.org/abs/2407.21783), table 4). A bubble is a gap on a timeline.
#
# ## Build it
#
# ### 1. GPipe (5 minutes)
#
# A schedule is *data*: for each stage, the order of its actions. Waiting is not written down. A stage starts its next
# action as soon as the inputs are there, so the times follow from the orders. Between its F and its B a microbatch is
# *in flight* on a stage, which keeps its activations that long. GPipe
# ([Huang et al. 2019](https://arxiv.org/abs/1811.06965)) runs all forwards, then all backwards. Which microbatch goes
# first is free, if all stages agree.


# %%
def gpipe_order(stage, stages, microbatches):
    """-> what this stage does, in order:
    a list such as ["F0", "F1", "B0", "B1"] (microbatches count from 0)."""
    # BEGIN SOLUTION
    return [f"F{m}" for m in range(microbatches)] + [f"B{m}" for m in range(microbatches)]
    # END SOLUTION


gpipe_order = check("gpipe-order", gpipe_order)

# %% [markdown]
# When the first backward begins, every stage holds the activations of *all* microbatches. That is GPipe's real cost
# (the paper keeps only each stage's inputs and recomputes).
#
# ### 2. 1F1B (15 minutes)
#
# The last stage can start each microbatch's backward right after its forward: F0 B0 F1 B1 ... The stage before it needs
# one more forward until B0 comes back, the one before that two more
# ([Narayanan et al. 2021](https://arxiv.org/abs/2104.04473)). So the stages *differ*. Each begins with just enough
# forwards to stay busy, then alternates one forward and one backward, then finishes the backwards that are left.


# %%
def one_f_one_b_order(stage, stages, microbatches):
    """-> what this stage does, in order.
    It holds min(stages - stage, microbatches) microbatches at most."""
    # BEGIN SOLUTION
    to_fill = min(stages - 1 - stage, microbatches)
    order = [f"F{m}" for m in range(to_fill)]
    for m in range(microbatches - to_fill):
        order += [f"F{to_fill + m}", f"B{m}"]
    return order + [f"B{m}" for m in range(microbatches - to_fill, microbatches)]
    # END SOLUTION


one_f_one_b_order = check("one-f-one-b-order", one_f_one_b_order)

# %%
show(figures.schedule_on_a_clock)

# %%
sliders(
    figures.schedule_on_a_clock,
    schedule=[
        "gpipe",
        "1f1b",
        "interleaved",
        "zero_bubble",
        "zero_bubble_v",
        "dualpipe",
        "pipedream",
    ],
    stages=(1, 8),
    microbatches=(1, 24),
    backward=(0.5, 4.0, 0.5),
    message=(0.0, 2.0, 0.25),
)

# %% [markdown]
# Switch between `gpipe` and `1f1b`. With `message` at 0 the step takes exactly as long; the number of microbatches in
# flight falls from 8, 8, 8, 8 to 4, 3, 2, 1. Above 0, 1F1B waits for round trips and is slower. How the idle share
# falls with $M$:

# %%
show(figures.idle_by_microbatches)

# %% [markdown]
# At a fixed global batch, more microbatches are smaller ones, which make slower kernels.
#
# ### A chart that is impossible
#
# 1F1B is often printed like this. Before you read on: which dependency does the fifth slot violate?

# %%
print(PRINTED_CHART)
print(simulate(schedules.one_f_one_b(4, 8), Durations(F=1, B=1, W=0)))
receipts.printed_chart()

# %% [markdown]
# The orders are right, the times impossible. B0 runs on all four stages in the same slot, although stage 0 needs the
# gradient that stage 1's B0 computes. Drawn like this, the bubble is 16 % instead of 27 %.
#
# ### 3. Which layers go where (15 minutes)
#
# The slowest stage sets the pace, so stages should cost the same, and layers do not: the first stage also has the
# embedding, the last one the final norm and the head.


# %%
def balance(costs, parts):
    """costs: of each layer -> a list of ranges, one per stage: neighbouring layers, every layer
    once, at least one each, so that the most expensive stage is as cheap as possible."""

    # BEGIN SOLUTION
    def slowest(cuts):
        return max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cuts, len(costs))))

    cuts = min(itertools.combinations(range(1, len(costs)), parts - 1), key=slowest)
    return [range(a, b) for a, b in itertools.pairwise((0, *cuts, len(costs)))]
    # END SOLUTION


balance = check("balance-stages", balance)

# %% [markdown]
# ### 4. A stage at work (25 minutes)
#
# Now on real ranks. Between two stages the autograd graph is cut: autograd does not know that `x` came from another
# rank. So let the `x` that you receive require a gradient. On the way back, receive the gradient of `y`, run backward
# from there, and send `x.grad` on. The gradient asked for is that of the whole batch's *mean* loss.
#
# `group.recv(x, src)` fills `x` in place and returns when it has arrived. `group.send(x, dst, async_op=True)` returns a
# handle at once; at the end of the step the caller waits for those in `self.sent`.


# %%
class Stage:
    """One stage of a pipeline. The caller says what to do next."""

    def __init__(self, module, group, like, loss, microbatches):
        """module: this stage's layers; like: a tensor of the shape and dtype that travels between
        stages; loss(y, m): mean loss of microbatch m, to be called on the last stage with what its
        module returned."""
        self.module, self.group, self.like, self.loss, self.microbatches = (
            module,
            group,
            like,
            loss,
            microbatches,
        )
        self.first, self.last = group.rank == 0, group.rank == group.world_size - 1
        self.kept = {}  # what backward needs, by microbatch
        self.sent = []  # handles of sends that nobody waits for yet

    def forward(self, m, x=None):
        """Microbatch m through this stage. x: on the first stage its input, which may be integers
        (token ids), else None. Sends with async_op=True."""
        # BEGIN SOLUTION
        if not self.first:
            x = torch.empty_like(self.like)
            self.group.recv(x, self.group.rank - 1)
            x.requires_grad_()
        y = self.module(x)
        if self.last:
            y = self.loss(y, m) / self.microbatches
        else:
            self.sent.append(self.group.send(y, self.group.rank + 1, async_op=True))
        self.kept[m] = x, y
        # END SOLUTION

    def backward(self, m):
        """Adds microbatch m's gradient to the module's parameters,
        and lets go of what was kept for it, inputs included."""
        # BEGIN SOLUTION
        x, y = self.kept.pop(m)
        if self.last:
            y.backward()
        else:
            gradient = torch.empty_like(y)
            self.group.recv(gradient, self.group.rank + 1)
            y.backward(gradient)
        if not self.first:
            self.sent.append(self.group.send(x.grad, self.group.rank - 1, async_op=True))
        # END SOLUTION


Stage = check("stage-step", Stage)

# %% [markdown]
# The gradients are those of one process, up to rounding in float64. That holds for every schedule that ends with a
# flush, as all schedules in this lab do except PipeDream.
#
# ### 5. Messages that cannot deadlock (20 minutes)
#
# Your sends did not wait. On GPUs, NCCL carries out the unbatched messages of a communicator in the order in which they
# were posted, and each may have to wait until its partner posts the other half: a *rendezvous*. (`wait()` on an NCCL
# handle makes the current *stream* wait; the host goes on.) Then a wrong order alone can deadlock:
#
#     stage 0   F1   send F1 to 1    recv B0 from 1   B0       stage 0 offers F1, while stage 1 first wants
#     stage 1   B0   send B0 to 0    recv F1 from 0   F1       to deliver B0, which stage 0 does not take yet


# %%
def place_messages(order, stage, stages):
    """order: ["F0", "F1", "B0", ...] of this stage
    -> the same with its messages: lists such as ["send F0", "recv B0"].

    "recv F0": its activation comes from stage - 1; "send F0": the output of F0 goes to stage + 1;
    "recv B0": the gradient that B0 needs comes from stage + 1; "send B0": the gradient that B0 made
    goes to stage - 1. Messages in one list are posted at once; the stage goes on when all of them
    have been delivered.
    """
    # BEGIN SOLUTION
    steps = [[]]
    for action in order:
        source, target = (stage - 1, stage + 1) if action[0] == "F" else (stage + 1, stage - 1)
        if 0 <= source < stages:
            steps[-1].append(f"recv {action}")
        steps += [action, [f"send {action}"] if 0 <= target < stages else []]
    return [step for step in steps if step]
    # END SOLUTION


place_messages = check("rendezvous-messages", place_messages)

# %% [markdown]
# ### 6. A backward in two halves (15 minutes)
#
# The stage before you waits for the gradient of your *input*. Nobody waits for the gradient of your *weights*. Zero
# bubble ([Qi et al. 2023](https://arxiv.org/abs/2401.10241)) therefore splits B into I, the input gradient, computed at
# once, and W, the weight gradient, computed when the stage would otherwise idle. (The paper calls the first half B;
# torch says I and W, as this lab does.) Autograd records nothing during a backward, but it does record what you put
# off: `weight.grad` must not carry a graph, which would keep the activations alive.


# %%
class SplitLinear(torch.autograd.Function):
    """x @ weight.T with a backward in two halves."""

    @staticmethod
    def forward(ctx, x, weight, later):
        """x: [tokens, inputs], weight: [outputs, inputs], a leaf;
        later: a list, each microbatch's own -> [tokens, outputs]."""
        # BEGIN SOLUTION
        ctx.save_for_backward(x, weight)
        ctx.later = later
        return x @ weight.T
        # END SOLUTION

    @staticmethod
    def backward(ctx, gradient):
        """The gradient of x (None for the two others).
        Appends to later a function that adds weight's to its .grad."""
        # BEGIN SOLUTION
        x, weight = ctx.saved_tensors

        def weight_gradient():
            found = gradient.T @ x.detach()
            weight.grad = found if weight.grad is None else weight.grad + found

        ctx.later.append(weight_gradient)
        return gradient @ weight, None, None
        # END SOLUTION


SplitLinear = check("split-backward", SplitLinear)

# %% [markdown]
# For a linear layer I and W take as many FLOPs as F each, so the whole backward takes twice as long as the forward.
# Moving W into idle slots:

# %%
print(simulate(schedules.zero_bubble(4, 8)))
receipts.splitting()

# %% [markdown]
# ### 7. One embedding on two stages (10 minutes)
#
# With tied embeddings the *same* matrix embeds tokens on the first stage and is the head on the last. Each of the two
# stages has a copy, and each copy's gradient is one part of the whole.
#
# `group.exchange(send=(x, peer), recv=(y, peer))` posts a send and a receive together and fills `y` in place.


# %%
def sum_tied(weight, group):
    """weight: the embedding (a parameter with .grad) on the first and the last stage, None on those
    between. Afterwards both have the gradient that the one embedding would have. Stages between the
    ends send nothing."""
    # BEGIN SOLUTION
    if weight is None or group.world_size == 1:
        return
    other, theirs = group.world_size - 1 - group.rank, torch.empty_like(weight.grad)
    group.exchange(send=(weight.grad, other), recv=(theirs, other))
    weight.grad += theirs
    # END SOLUTION


sum_tied = check("tied-embedding", sum_tied)

# %% [markdown]
# ## Your code under a transformer
#
# Your balance, order, stage and sum train a small transformer with tied embeddings on 4 stages, and on one.

# %%
losses = experiments_breaks.four_stages_and_one(balance, one_f_one_b_order, Stage, sum_tied)
receipts.trained(*losses)

# %% [markdown]
# ## Measure: every schedule on a clock
#
# From here on you use minillm's own `Pipeline` (`minillm/parallel/pipeline_parallel/runtime.py`), one interpreter for
# every schedule in `schedules.py`. To see *times* on two cores, devices are **emulated**: the computation is real, and
# each action then sleeps until it has lasted as long as on a device of known speed (a stage's forward takes 40 ms, I
# and W as long each). So four ranks overlap like four devices, which two cores cannot. The quicker of two steps counts
# if something else disturbed this machine. This is the rank program:

# %%
print(inspect.getsource(experiments.step))

# %%
EVERY = [Job(name) for name in figures.EVERY]
# half as many microbatches, twice as large
SAME_BATCH = Job("1f1b", microbatches=4, speed=None, rows=2)
UNEVEN = {cut: Job("gpipe", speed=speed) for cut, speed in experiments.uneven_stages().items()}
found = experiments.run([*EVERY, SAME_BATCH, *UNEVEN.values()])
show(figures.draw_bars, job=Job("1f1b"), ranks=found[Job("1f1b")])

# %%
every = {job: found[job] for job in EVERY}
show(figures.draw_idle, rows=experiments.rows_of(every), stages=4, microbatches=8)

# %%
receipts.step_times(every)

# %% [markdown]
# - **GPipe and 1F1B idle alike.** What is measured above the prediction is the cost of messages, Python and other
#   programs.
# - **Interleaved** ([Narayanan et al. 2021](https://arxiv.org/abs/2104.04473)), also called *virtual pipeline stages*:
#   $v = 2$ *chunks* per rank, so filling takes half as long: $(n-1)/(vM+n-1)$.
# - **Zero bubble**: idle for $(n-1)(F+I-W)$ instead of $(n-1)(F+I+W)$, a third if the three are equal. This holds for
#   $M \ge n$ and $W \le F, I$.
# - **Zero bubble V** ([Qi et al. 2023](https://arxiv.org/abs/2401.10241)): two chunks per rank, on a path down the
#   ranks and back up, so the first rank has the loss.
# - **DualPipe** ([DeepSeek-AI 2024](https://arxiv.org/abs/2412.19437)): microbatches enter at both ends, and every rank
#   holds two stages, its own and its mirror image's.
#
# Why from both ends (*skip on a first reading*)? With experts on other ranks (lab 08) a layer is attention, dispatch,
# MLP and combine, and dispatch and combine are all-to-alls. Alone, a rank waits for them. DualPipe pairs a forward with
# a backward of the other direction, so that one's messages travel while the other computes. Let messages take as long
# as attention or MLP, and backward twice as long to compute:

# %%
receipts.all_to_alls()

# %% [markdown]
# *Asynchronous communication* (sends that do not wait, like yours) has nothing to do with *asynchronous pipelines*.
#
# ## Measure: what they hold and what they send

# %%
receipts.held(every)

# %% [markdown]
# Interleaving holds 5.5 stages' worth on the first stage where plain 1F1B holds 4, a factor $1 + (n-1)/(nv)$, and it
# sends $2M(nv-1)$ messages, 112 instead of 48. No schedule that keeps the pipeline full divides the first stage's
# activations by $n$: under 1F1B it holds $n$ microbatches of $1/n$ of the layers, as much as one process that
# accumulates gradients.
#
# The same in bytes, from every tensor that autograd saves (*skip on a first reading*), and the bytes of the messages:

# %%
receipts.activation_bytes()

# %%
receipts.sent(found, Job("1f1b"), Job("dualpipe"), SAME_BATCH)

# %% [markdown]
# Neither the number of layers nor that of microbatches appears in the bytes: a pipeline sends the activations at its
# borders once in each direction. A *middle* stage sends $2BSHb$ bytes whatever $n$ is; the factor $n-1$ belongs to the
# total over all stages.
#
# ## Asynchronous pipelines
#
# PipeDream ([Narayanan et al. 2019](https://doi.org/10.1145/3341301.3359646)) never flushes: a stage updates its
# weights after *every* backward. There is no bubble, but gradients are late and each stage keeps several versions of
# its weights. Simulated in one process, in the order in which 4 stages would work:

# %%
receipts.asynchronous()

# %% [markdown]
# ## Break it
#
# Four accidents at the cut; only the last one raises an error. And one bug to find.
#
# ### The loss is divided by $M$ twice, or not at all
#
# Losses of microbatches *add up*. If you pass mean losses, divide by $M$; if the runtime divides as well,
# the gradient is divided twice. Real cases: [pytorch#144352](https://github.com/pytorch/pytorch/issues/144352),
# [torchtitan#800](https://github.com/pytorch/torchtitan/issues/800),
# [DeepSpeed#8154](https://github.com/deepspeedai/DeepSpeed/issues/8154).

# %%
accidents = launch(experiments_breaks.all_accidents, 2, device="cpu")
receipts.scaled(accidents[0]["scale"])

# %% [markdown]
# AdamW divides by the gradient's own size, so its losses agree to several digits and the bug goes unnoticed. SGD shows
# it, and so do clipping and every logged gradient norm. Test *gradients*, not losses, beside one process.
#
# ### The tied embedding is not summed

# %%
receipts.tied(accidents[0]["tied"])

# %% [markdown]
# After one step the "one" embedding is two different matrices
# ([piper#13](https://github.com/uw-syfi/piper/issues/13)). The loss falls all the same, and the checkpoint stores
# whichever copy is written last.
#
# ### A norm that misses the other stages
#
# Clipping needs the norm of the whole gradient. Each stage has a part of it, and the tied embedding is in two parts.

# %%
receipts.norms([rank["norm"] for rank in accidents])

# %% [markdown]
# There are two ways to get it wrong: every stage clips by its own norm
# ([torchtitan#596](https://github.com/pytorch/torchtitan/issues/596)), or all squares are added up and the tied matrix
# counts twice.
#
# ### Sends that wait
#
# The naive program receives, computes and sends, and waits for each. First the checker's verdict, then two real ranks,
# stopped after two seconds.

# %%
try:
    schedules.check(schedules.messages_as_used(schedules.one_f_one_b(2, 4)), batched=False)
except ScheduleError as error:
    print("the checker:", error)
print("\nthe ranks:")
print(experiments_breaks.deadlock())

# %% [markdown]
# ### Find the bug
#
# A colleague's stage saves allocations. Its gradients, measured beside one process:

# %%
print(inspect.getsource(experiments_breaks.Suspect))
receipts.bug_hunt(experiments_breaks.bug_hunt(experiments_breaks.Suspect))

# %% [markdown]
# Which line is wrong? Why is only stage 1 wrong under 1F1B, and why is stage 0 right even under GPipe? Then check your
# own stage the same way.
#
# <details><summary>Answer</summary>
#
# `self.inputs[m % 2]`: two buffers hold two microbatches. Autograd saves the received activation for the weight
# gradient, and a third receive overwrites it before its backward has run. Under 1F1B stage $s$ of 4 has $4-s$
# microbatches in flight, so stage 1 (three) is wrong and stages 2 and 3 (two and one) are right. Stage 0 receives no
# activations. Autograd raises no error, since it does not see what `recv` writes. Mend it with as many buffers as
# microbatches in flight, or a new tensor for each.
# </details>

# %%
receipts.without_the_bug(experiments_breaks.bug_hunt(Stage))

# %% [markdown]
# ## Where it loses
#
# **Few microbatches**: with $M = 1$ a pipeline of 4 idles for 75 % of the step. **Uneven stages**: here the head costs
# as much as 1.8 layers. Once with as many layers on each stage, once balanced:

# %%
receipts.uneven(found, UNEVEN)

# %% [markdown]
# Even the best cut is uneven, because layers are not divisible. A GPipe step takes the sum of the stage times plus
# $M-1$ times the slowest, so *more microbatches do not help against a slow stage*. A pipeline also loses when the
# global batch cannot be cut into $M \gg n$ pieces, and when the first stage's activations do not fit.
#
# ## The same in production
#
# torch's own pipeline with the same parts of the same model and the same tokens, on 2 ranks:

# %%
receipts.peers(experiments_torch.peers())

# %% [markdown]
# `scale_grads=False` is right for a loss that is a *sum* over the batch; for a mean it is 4 times too large, which is
# the first accident again.
#
# | torch, Megatron-LM, DeepSpeed | here |
# |---|---|
# | [`PipelineStage`](https://docs.pytorch.org/docs/stable/distributed.pipelining.html) | `ModelPart`, `build_parts` |
# | `ScheduleGPipe`, `Schedule1F1B`, `ScheduleInterleaved1F1B` | `gpipe`, `one_f_one_b`, `interleaved` |
# | `ScheduleInterleavedZeroBubble` (the split, with several chunks) | `zero_bubble` (with one) |
# | `ScheduleZBVZeroBubble`, `ScheduleDualPipeV` (one copy of the parameters) | `zero_bubble_v`, `dualpipe` (two) |
# | `scale_grads=True` (the default) | divide each loss yourself |
# | Megatron `--num-layers-per-virtual-pipeline-stage 2` | `interleaved(4, M, chunks)`: 2 layers per chunk |
# | DeepSpeed `PipelineModule(..., partition_method="parameters")` | `balance(layer_costs(config), n)` |
#
# ## On a cluster
#
# `labs/torchrun/06_pipeline_parallel.py` runs the 1F1B order, the stage and the tied embedding on any number of
# processes. After solving it:
# `torchrun --nproc-per-node 8 labs/torchrun/06_pipeline_parallel.py`.
#
# ## Design questions
#
# Work each one out on paper, then run the cell below it.
#
# **A. 70B parameters (80 layers, hidden 8,192, 64 heads) train on 64 GPUs of 80 GB, 8 per node, with tensor parallelism
# and sequence parallelism over 8. The global batch is 1,024 sequences of 4,096 tokens, one per microbatch. Which
# pipeline depth: 2, 4 or 8?** 16 bytes of state per parameter, 12 of which ZeRO-1 can shard; attention scores are not
# stored (FlashAttention).

# %%
receipts.design_depth()

# %% [markdown]
# <details><summary>Answer</summary>
#
# The idle share decides nothing here: $M$ is large in all three cases. Activations of stage 0 do not depend on the
# depth. Without ZeRO-1 memory decides: depth 2 needs 81 GB and does not fit, depth 4 needs 46 GB. With ZeRO-1 all fit,
# and depth 2 (42 GB) has the fewest stages to balance and the fewest messages: take it. The price is a gradient
# reduction of 4.4 billion parameters per rank over 4 replicas.
# </details>
#
# **B. 16 stages and 64 microbatches idle too much, and the global batch is fixed. Interleave with 2 or 4 chunks, or
# split the backward?** One activation at a border is 4,096 x 8,192 in bf16; the network gives 50 GB/s per rank.

# %%
receipts.design_bubble()

# %% [markdown]
# <details><summary>Answer</summary>
#
# Four chunks bring 19.0 % down to 5.5 %, at 19.75 instead of 16 stages' worth of activations and 4.2 times the messages
# of 1.34 ms each, which have to hide behind chunks that are four times shorter. Two chunks hold *more* (23.5) and gain
# less. Zero bubble reaches 7.2 % with 16 in flight and no additional message, but keeps inputs and output gradients of
# every layer until W. If memory is tight, split the backward; if it is not and the network is fast, interleave.
# </details>
#
# ## Capstone (*open*)
#
# Design a schedule of your own for 6 stages and 12 microbatches with F = I = W = 1 and messages that take a quarter. A
# schedule is one order per stage, of F, I, W or B; `schedules.check` proves that it can run, `simulate` draws it. Idle
# less than zero bubble while no stage holds more than 8 microbatches, and defend the trade. The starting point:

# %%
clock = Durations(F=1, B=2, W=1, message=0.25)
for make in (schedules.one_f_one_b, schedules.zero_bubble):
    line = simulate(make(6, 12), clock)
    print(f"{line.schedule.name}: idle {line.idle_share:.1%}, in flight {line.peak_in_flight}")
print("stage 0 of zero bubble:", *schedules.zero_bubble(6, 12).actions(0))

# %% [markdown]
# ## Interview corner
#
# Say your answer aloud before you open one.
#
# **1. What does 1F1B gain over GPipe, and interleaving over 1F1B?**
# <details><summary>Answer</summary>
#
# 1F1B saves memory, not time: stage $s$ holds $\min(n-s, M)$ microbatches instead of $M$. Interleaving saves time and
# costs memory and messages: with 8 stages, 32 microbatches and 4 chunks 5.2 % idle instead of 17.9 %, 9.75 stages'
# worth in flight instead of 8, 4.4 times the messages.
# </details>
#
# **2. Where do zero-bubble schedules find their time?**
# <details><summary>Answer</summary>
#
# In the weight gradients, which nobody waits for: 7 idle slots instead of 21 at $n = 8$. The price: inputs and output
# gradients of every layer are kept until W. Where no gap is left (zero bubble V), ranks reach the optimizer at
# different times, so a step cannot wait for the global gradient norm; the paper steps at once and may roll back.
# DualPipe costs twice the parameters and $n + 1$ microbatches in flight; in return one direction's all-to-alls hide
# behind the other's compute.
# </details>
#
# **3. Pipeline or tensor parallelism across nodes?**
# <details><summary>Answer</summary>
#
# Pipeline. A border carries $BSH$ numbers in each direction per step, whatever the number of layers; tensor parallelism
# all-reduces as many four times per *layer*. And a pipeline's messages can travel while the stage computes.
# </details>
#
# **4. Gradients of your pipeline are 8 times those of one process. Why did nobody notice?**
# <details><summary>Answer</summary>
#
# Mean losses of 8 microbatches were added up undivided, and AdamW is invariant to the scale. The symptoms: gradient
# norms 8 times too large, clipping at every step.
# </details>
#
# ## Can you answer them now?
#
# 1. For which share of a step do stages idle, and what does, and does not, change it?
# 2. What does each stage hold at most under GPipe, 1F1B, interleaving, zero bubble and DualPipe, and what do they send?
# 3. Which mistakes at the cut between two stages leave the loss looking right?
#
# Next: [07 · Long context](07_long_context.ipynb) cuts the one dimension that is still whole, the sequence.

# %%
finish("06_pipeline_parallel")
