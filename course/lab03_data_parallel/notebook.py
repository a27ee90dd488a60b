# %% [markdown]
# # 03 · Data parallel
#
# **Gradients of shards, averaged while backward still runs, are the big batch's gradient.** You build that, from one
# all-reduce per tensor to buckets that travel while earlier layers still compute.
# Stands on labs 01 (the ring all-reduce) and 02 (the training step).
#
# About 4 hours; the core path of two is exercises 1 to 5 (75 minutes), the measurements and *Break it*. Parts marked *skip
# on a first reading* take 40 minutes. Run All takes about a minute. At the end you can answer:
#
# 1. Which bytes does a data-parallel step send, and what do they *not* depend on?
# 2. How much of the communication can hide behind backward, and what is left over in the best case?
# 3. Training runs, the loss falls, and the gradients are still wrong. Which three numbers tell you?
#
# Every rank below is a real process. Where times are *emulated*, backward sleeps for a known time and the link is paced.
#
# The calls of `group`, and what each returns: [docs/group.md](../docs/group.md).

# %%
import contextlib
import inspect

import torch
from torch import nn

from course.kit import check, finish, hint, show, sliders
from course.lab03_data_parallel import (
    experiments,
    experiments_breaks,
    experiments_overlap,
    figures,
    receipts,
)
from course.lab03_data_parallel import experiments_production as production
from course.lab03_data_parallel.rank_programs import Bucket
from minillm.comm import launch

# %% [markdown]
# ## Why it works
#
# The loss of a batch is a mean over its samples, so its gradient is a mean, too. Split the batch into equal shards (10 samples on 5 ranks: 2 each): the
# mean over the shards' gradients *is* the batch's gradient. Four ranks, four samples each, one linear layer:


# %%
def shards_and_batch(group):
    torch.manual_seed(0)  # the same model and the same 16 samples everywhere
    model, x, y = nn.Linear(5, 3).double(), torch.randn(16, 5).double(), torch.randn(16, 3).double()
    mine = slice(4 * group.rank, 4 * group.rank + 4)
    (of_shard,) = torch.autograd.grad((model(x[mine]) - y[mine]).square().mean(), model.weight)
    (of_batch,) = torch.autograd.grad((model(x) - y).square().mean(), model.weight)
    averaged = group.all_reduce(of_shard.clone(), op="avg")
    return of_shard[0, 0].item(), averaged[0, 0].item(), (averaged - of_batch).abs().max().item()


for rank, (own, averaged, error) in enumerate(launch(shards_and_batch, 4)):
    print(f"rank {rank}: own {own:+.4f}, averaged {averaged:+.4f}, ", end="")
    print(f"largest difference to the whole batch {error:.0e}")

# %% [markdown]
# Replicas that start equal and take the same step with the same gradients stay equal, so no weight ever has to be sent.
# Only the *data* is divided: a model that does not fit on one device does not fit on a thousand this way (lab 04).
#
# ## Predict
#
# A model has P bytes of gradients and trains on 4 ranks. Now every rank gets **eight times as many samples**. By what
# factor do the bytes that each rank sends per step grow? And if communication takes exactly as long as backward, and
# buckets of 1/8 of the model travel during backward, **which share of the communication is hidden**?

# %%
guess_factor = 8.0  # your guess: eight times the work, eight times the bytes?
guess_hidden = 1.0  # your guess: both take equally long, so all of it?

# %% [markdown]
# ### Common claims
#
# | Claim | What is true |
# |---|---|
# | "The communication of data parallelism grows linearly with the number of GPUs." | Bytes per rank saturate at $2P$ ([Patarasuk and Yuan 2009](https://doi.org/10.1016/j.jpdc.2008.09.002)). The number of rounds grows linearly, and so does the latency of a ring. |
# | "It does not matter whether there are 8 or 1,024 GPUs." | 1.75 P become 2.0 P, and 14 rounds become 2,046. |
# | "DDP synchronises after backward." | During backward, bucket by bucket, from the second iteration on ([Li et al. 2020](https://arxiv.org/abs/2006.15704)). |
# | "With accumulation, gradients are synchronised once per K steps." | Only inside `no_sync()`; otherwise in each of the K backward passes. |
# | "Data parallelism helps when the model does not fit." | Every rank holds a full copy. |
# | "100 % GPU utilization means that nothing is exposed." | It counts the time in which any kernel runs, and NCCL's kernels run while they wait. |
#
# ## Build it
#
# Each check runs on 2 to 6 real ranks. Those of exercises 1 to 4 train small replicas for a few steps and compare every
# gradient with one process's on the whole batch. They count all-reduces and bytes and look at the *order* of
# events. The model has a weight that is used twice, a frozen parameter and, in exercise 1, one that no loss reaches.
#
# ### 1. One all-reduce per tensor (10 minutes)
#
# `backward` is over and each rank has its own gradients. Make them the mean over the ranks, with one all-reduce for each
# tensor (the next exercise joins them). `group.all_reduce(x)` replaces `x` by its sum over the ranks. A real project
# reduced `parameter` instead of `parameter.grad` ([picotron#39](https://github.com/huggingface/picotron/issues/39)): it
# ran, and the gradients were never averaged.


# %%
def average_gradients(model, group):
    """After backward: every gradient becomes its mean over the ranks.
    Parameters without one are left alone."""
    # BEGIN SOLUTION
    for parameter in model.parameters():
        if parameter.grad is not None:
            group.all_reduce(parameter.grad)
            parameter.grad /= group.world_size
    # END SOLUTION


average_gradients = check("naive-ddp", average_gradients)

# %% [markdown]
# This is right, and slow in two ways: each tensor pays the latency of its own all-reduce, and the link idles during
# backward while the cores idle during communication.
#
# ### 2. Buckets (20 minutes)
#
# Pack gradients into a few *flat* tensors and make each `parameter.grad` a **view** into its bucket, so that backward
# writes straight into what will be sent. Backward runs from the last layer to the first, so the last parameter goes into
# the first bucket. A bucket is closed by the tensor that fills it to the cap. One flat tensor has one dtype, and
# parameters of two dtypes may alternate: keep one bucket open for each.

# %%
print(inspect.getsource(Bucket))


# %%
def make_buckets(parameters, cap_bytes):
    """Pack the trainable parameters, last one first, into a list of Bucket;
    each .grad becomes a view of its bucket.

    flat: [sum of numel], zeros, of the parameters' dtype. Buckets that never fill up come last.
    """
    # BEGIN SOLUTION
    closed, filling = [], {}
    for parameter in reversed([p for p in parameters if p.requires_grad]):
        filling.setdefault(parameter.dtype, []).append(parameter)
        if sum(p.nbytes for p in filling[parameter.dtype]) >= cap_bytes:
            closed.append(filling.pop(parameter.dtype))
    buckets = []
    for members in [*closed, *filling.values()]:
        flat = members[0].new_zeros(sum(p.numel() for p in members))
        for parameter, part in zip(members, flat.split([p.numel() for p in members]), strict=True):
            parameter.grad = part.view_as(parameter)
        buckets.append(Bucket(flat, members))
    return buckets
    # END SOLUTION


make_buckets = check("gradient-buckets", make_buckets)

# %% [markdown]
# From now on the caller clears gradients with `flat.zero_()`. `zero_grad(set_to_none=True)` would detach them from their
# buckets; torch's DDP and minillm's attach them again.
#
# ### 3. Overlap (25 minutes)
#
# A bucket's gradients are final long before backward is over. Start its all-reduce right then, *asynchronously*, and go
# on with the next layer. The figure shows the gain by arithmetic. Move the sliders: when does the hidden share collapse?

# %%
show(figures.step_on_a_clock)

# %%
sliders(
    figures.step_on_a_clock,
    blocks=(2, 16),
    blocks_per_bucket=(1, 16),
    backward_ms=(1.0, 100.0, 1.0),
    mb_per_block=(0.01, 2.0, 0.01),
    mb_per_s=(1.0, 100.0, 1.0),
    latency_ms=(0.0, 10.0, 0.1),
    ranks=(2, 16),
)


# %% [markdown]
# Starting early changes no bit; packing into buckets changes the order of additions. (*Asynchronous SGD*, which steps with stale gradients, is something else.)
#
# `parameter.register_post_accumulate_grad_hook(f)` calls `f(parameter)` when its gradient is complete.
# `group.all_reduce(flat, op="avg", async_op=True)` returns a handle at once; `handle.wait()` returns when the result is
# in `flat`. All ranks must start the same buckets in the same order, but gradients may become ready in different orders
# on different ranks; the check swaps two branches on odd ranks.
#
# %%
def overlap(buckets, group):
    """Start each bucket's all-reduce during backward, in the order of the list.

    Returns finish(): waits until all are reduced, and gets ready for the next step.
    """
    # BEGIN SOLUTION
    missing = [len(bucket.parameters) for bucket in buckets]
    handles = []

    def arrived(index):
        missing[index] -= 1
        while len(handles) < len(buckets) and missing[len(handles)] == 0:
            handles.append(group.all_reduce(buckets[len(handles)].flat, op="avg", async_op=True))

    for index, bucket in enumerate(buckets):
        for parameter in bucket.parameters:
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: arrived(index))

    def finish():
        for handle in handles:
            handle.wait()
        handles.clear()
        missing[:] = [len(bucket.parameters) for bucket in buckets]

    return finish
    # END SOLUTION


overlap = check("overlap-hooks", overlap)

# %% [markdown]
# ### 4. Several microbatches, one reduction (10 minutes)
#
# If a batch does not fit, its gradient is added up over K microbatches, since `backward` adds to `.grad` anyway. Only one
# microbatch's activations are held at a time. Averaging over ranks and adding over microbatches commute, so one reduction
# with the last microbatch is enough. `ddp` is minillm's `BucketedDDP`, your last two functions in one wrapper: its
# backward reduces, except under `with ddp.no_sync():`, where it only accumulates. As in torch, the *forward* pass belongs
# inside `no_sync` as well.


# %%
def accumulate(ddp, microbatches, loss_of):
    """Leave in .grad the mean over all ranks and microbatches.
    loss_of(ddp, x, y): the mean over one microbatch.

    microbatches: list of (x, y), all of the same size.
    """
    # BEGIN SOLUTION
    for index, (x, y) in enumerate(microbatches):
        last = index == len(microbatches) - 1
        with contextlib.nullcontext() if last else ddp.no_sync():
            (loss_of(ddp, x, y) / len(microbatches)).backward()
    # END SOLUTION


accumulate = check("accumulate-no-sync", accumulate)

# %% [markdown]
# ### 5. Tokens, not ranks (10 minutes)
#
# So far all shards were equal. Texts differ in length and padding does not count, so ranks have unequal numbers of
# tokens, and a mean of the ranks' means weighs the tokens of a short rank more. What you want is *one* mean over all
# tokens, from a loop that averages gradients over ranks. A rank may have no token at all; its loss is 0 then, but backward
# must still reach the model, or its hooks never run and the other ranks wait.


# %%
def weighted_loss(nll, counts, group):
    """What this rank calls backward on,
    so that gradients averaged over ranks are those of the mean over all tokens.

    nll: [tokens], losses with a graph; counts: [tokens], 1 where a token counts and 0 where not.
    """
    # BEGIN SOLUTION
    total = group.all_reduce(counts.sum())
    return (nll * counts).sum() * group.world_size / total
    # END SOLUTION


weighted_loss = check("token-weighted-loss", weighted_loss)

# %% [markdown]
# With accumulation the same holds for microbatches: divide by the tokens of the whole step, a number known before its
# first backward.
#
# ### 6. Sending less (20 minutes, *skip on a first reading*)
#
# If the link is slow, send only the k largest entries of each rank with their indices, and remember the rest: it is added
# to the next gradient before choosing ([error feedback, Karimireddy et al. 2019](https://arxiv.org/abs/1901.09847)), so
# nothing is lost, only late. The indices differ between ranks, so this is an all-gather, not an all-reduce.
# `group.all_gather(x)` returns the ranks' `x` joined along dimension 0.


# %%
def top_k_all_reduce(gradient, residual, k, group):
    """gradient: float32 [n], becomes the mean over ranks of each rank's k largest entries of
    gradient + residual, in place.

    residual: float32 [n], what this rank still owes; updated in place. Indices travel as int32.
    """
    # BEGIN SOLUTION
    owed = gradient + residual
    indices = owed.abs().topk(k).indices
    values = owed[indices]
    residual.copy_(owed)
    residual[indices] = 0
    everyones_values, everyones_indices = group.all_gather(values), group.all_gather(indices.int())
    gradient.zero_()
    gradient.index_add_(0, everyones_indices.long(), everyones_values / group.world_size)
    # END SOLUTION


top_k_all_reduce = check("top-k-error-feedback", top_k_all_reduce)

# %% [markdown]
# ## Measure: bytes
#
# A small transformer now, 0.14 M parameters, on 4 ranks. The batch grows, the buckets grow, microbatches come: which
# of these changes what a rank sends? (`bytes_by_setting` in `course/lab03_data_parallel/experiments.py` counts them.)

# %%
N = 4
ranks = launch(receipts.on_ranks, N)
receipts.sent(ranks, guess_factor)

# %% [markdown]
# $2P(N-1)/N$, whatever the batch: a larger batch per rank is the cheapest way to make communication matter less.
# Accumulation does the same without the memory, provided it does not reduce each time. torch's older `nn.DataParallel` has one process for all devices: weights go out through device 0 and gradients come
# in, $(N-1)P$ each way on one link where a ring has at most $2P$ on every one.
#
# ## Measure: is it the big batch?

# %%
receipts.same_as_one_process(ranks)

# %% [markdown]
# The gradient differs in the seventh digit, because sums run in another order. The replicas differ by *exactly* zero,
# because all ranks hold the same bits after an all-reduce. The first is rounding; the second is an invariant.
#
# And does the big batch learn as much? More ranks make it larger and the steps fewer. The same samples, eight times the
# batch:

# %%
receipts.batch_and_rate()

# %% [markdown]
# With the learning rate unchanged, an eighth of the steps learns less. Scaled with the batch it nearly catches up. Warm-up
# does not help a model this small; larger ones need it ([Goyal et al. 2017](https://arxiv.org/abs/1706.02677)). Beyond a *critical batch* no rate makes up
# for missing steps ([McCandlish et al. 2018](https://arxiv.org/abs/1812.06162)).
#
# ## Measure: time
#
# Backward of 8 blocks, 30 ms each, and an emulated link on which a block's gradients take about as long (27 ms). First
# your functions, then minillm's, all on real processes with real messages. One step of each on a clock:


# %%
def yours_naive(model, group):
    return lambda: average_gradients(model, group)


def yours_overlapped(model, group):
    return overlap(make_buckets(model.parameters(), experiments_overlap.Slow().block_bytes), group)


forms = {
    "naive": yours_naive,
    "overlapped": yours_overlapped,
    "BucketedDDP": experiments_overlap.OURS["bucketed"],
}
slow, link = experiments_overlap.Slow(), experiments_overlap.LINK
computing = dict.fromkeys(forms, slow)
recorded = launch(experiments_overlap.steps, experiments_overlap.WORLD, forms, computing, link=link)
steps = experiments_overlap.beside_prediction(recorded[0], slow, link)
show(figures.draw_steps, numbers=steps)

# %%
receipts.overlap(steps["forms"], guess_hidden)

# %% [markdown]
# The hidden share is 1 − (step − backward) / communication: 0 if the two add up, 1 if communication costs no time.
#
# The last bucket can never hide: with 8 equal ones 87.5 % is the best there is. Smaller buckets would leave less over. So
# why not one per tensor?
#
# ### How large a bucket?
#
# The same over a link with a *latency* of 4 ms per message, and 16 blocks of 10 ms:

# %%
far = experiments_overlap.far_away()
show(figures.draw_bucket_sweep, numbers=far["sweep"])

# %%
receipts.bucket_sizes(far["sweep"])

# %% [markdown]
# The smallest buckets take longer than predicted: handing each message to another process costs time that the formula
# leaves out. Between too many buckets and one there is a flat valley; torch's default of [25 MB](https://arxiv.org/abs/2006.15704) was chosen to lie in it. Its first
# bucket is smaller (1 MB), so that the link is busy early, unless you give `bucket_cap_mb`.
#
# ### One rank is late
#
# Rank 1's backward now takes 120 ms longer; rank 0 does its work as before.

# %%
receipts.straggler(far["straggler"])

# %% [markdown]
# From the steps you cannot tell which rank is late: all became slower, rank 0 by waiting.
# Compare the backward times of all ranks, not the step times (lab 10 turns this into a straggler test).
#
# ### Read a real trace
#
# No clock is emulated here: `torch.profiler` recorded one step of torch's `DistributedDataParallel`, with 8 layers and one
# bucket for each, on two CPU ranks with gloo. `profile.export_chrome_trace("trace.json")` writes what
# [Perfetto](https://ui.perfetto.dev) shows; the picture is drawn from the same events. **Which all-reduce cannot
# overlap? Why is every all-reduce issued right after a matmul?**

# %%
events = launch(production.traced_step, 2, device="cpu")[0]
show(figures.draw_trace, events=events)

# %%
receipts.trace(events)

# %% [markdown]
# A layer's backward is two matmuls, for its weight and for its input. Then its bucket is full: the main thread *issues* the
# all-reduce (black line) and goes on, while a thread of gloo executes it. The first layer's bucket is issued last, with
# nothing left to hide behind.
#
# On a GPU the CPU's row only *launches* kernels. All-reduces are NCCL kernels on a stream of their own, which waits for an
# *event* that the compute stream records when the bucket is full; `wait()` makes the compute stream wait, not the host.
# NCCL's kernels occupy a few SMs and memory bandwidth, so matmuls beside them slow down there, too. Exposed communication
# is a gap in the compute stream before the optimizer's kernels, not a long `ncclAllReduce` row: that includes the time
# until the slowest rank arrives.
#
# ## Measure: compression (*skip on a first reading*)
#
# minillm's hooks (`BucketedDDP(model, group, hook=...)`) on a small network, and your top-k beside them with 1 % of the
# entries. The dotted line has no error feedback and sends the same bytes.

# %%
trained = launch(experiments.with_yours, 2, top_k_all_reduce)[0]
show(figures.draw_losses, numbers=trained)

# %%
receipts.compression(trained)

# %% [markdown]
# int8 sends a quarter of the bytes; its curve lies on the dense one. Top-k sends $2k/n$ of the dense bytes on two
# ranks (a value *and* an index), but it is an all-gather: its bytes grow with $N-1$ while an all-reduce's saturate. On 64
# ranks 1 % of the entries costs 64 % of the dense bytes, and beyond $N = n/k$ it is a loss.
#
# ### Which precision for the reduction?
#
# Reducing in bf16 halves the bytes. The sum of many ranks' gradients then loses low bits at every hop, so large runs often
# reduce in **fp32** although they compute in bf16: Megatron-LM's [`--accumulate-allreduce-grads-in-fp32`](https://github.com/NVIDIA/Megatron-LM/blob/000c4ac24f61159c138b0975def722c65245983c/megatron/training/arguments.py) and FSDP2's
# [`MixedPrecisionPolicy(reduce_dtype=torch.float32)`](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html).
# What adding up the gradients of 64 ranks in each precision, in ring order, does to their mean:

# %%
receipts.reduce_precision()

# %% [markdown]
# ## Break it
#
# Two accidents that raise no error; the second is for you to find.
#
# ### No division
#
# Somebody forgot `/= world_size`. Two ranks, same data, AdamW on the left and SGD on the right:

# %%
undivided = launch(experiments.division, 2)[0]
show(figures.draw_division, numbers=undivided)

# %%
receipts.division(undivided)

# %% [markdown]
# The norm is the only trace: Adam divides by the gradient's own size. Real frameworks have shipped this ([pytorch#144352](https://github.com/pytorch/pytorch/issues/144352),
# [torchtitan#800](https://github.com/pytorch/torchtitan/issues/800): a pipeline's gradients too large by the number of
# microbatches). It shows later: gradient clipping sets in sooner, and the behaviour changes when somebody changes $N$.
# *Compare gradients with one process, in one SGD step*; minillm's oracle does that.
#
# ### Find the bug
#
# A colleague starts each all-reduce as soon as its gradient is ready. The model has two branches of the same size, and
# rank 1 happens to compute them in the other order. The losses look healthy:

# %%
print(inspect.getsource(experiments_breaks.as_they_become_ready))
receipts.crossed(launch(experiments_breaks.as_they_become_ready, 2))

# %% [markdown]
# Which gradients were averaged with which? Why is there neither a hang nor an error, and what would change with branches
# of different sizes? Name a receipt that would have caught it in production.
#
# <details><summary>Answer</summary>
#
# Rank 0's gradient of b was averaged with rank 1's gradient of a: shapes agree, so the all-reduce takes whatever comes next
# on each rank, and each stores the result under another name. Replicas drift apart from the first step. With different sizes minillm
# raises a `MismatchError`, and NCCL would hang or sum garbage. Start buckets in one fixed order, as your `overlap` does,
# and compare a checksum of the weights between ranks now and then: one all-reduce of one number.
# </details>
#
# So three numbers, none of them the loss, tell a right step from a wrong one: the gradient's distance to one process on
# the whole batch, the distance between replicas (exactly zero), and the bytes or all-reduces per step.
#
# ## Where it loses

# %%
show(figures.draw_losing, numbers=far["losing"])

# %%
receipts.losing(far["losing"])

# %% [markdown]
# - **Tiny models** send almost no bytes but pay the latency of a bucket in a backward that takes milliseconds.
# - **Many bytes** beside a short backward: the limit is $2P(N-1)/N$ bytes over the bandwidth, whatever hides. Two
#   machines can be slower than one. More samples per step is the first remedy, compression the second.
# - **Unequal shards** make the step as long as the longest, and the mean wrong unless tokens are weighted:

# %%
error = experiments_breaks.unequal_shards(average_gradients, weighted_loss)
receipts.unequal(error)

# %% [markdown]
# Shuffling lowers the error but does not remove it. Weighting costs one number.
#
# ## The same in production
#
# torch's [`DistributedDataParallel`](https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html)
# is what you have built, in C++ ([Li et al. 2020](https://arxiv.org/abs/2006.15704)). It packs buckets twice. When it is
# made it knows only the order of the parameters and uses **one** bucket (unless `find_unused_parameters=True`); after the
# first backward it knows the real order and packs anew. So the first iteration overlaps nothing, and all-reduces must be
# counted from the second on. Twelve tensors of 1 MiB, and then one step of a transformer with each library on the same
# ranks:

# %%
packed, libs = launch(production.libraries, 2, device="cpu")[0]
receipts.torch_buckets(packed)

# %%
receipts.libraries(libs)

# %% [markdown]
# In a real job:
#
# ```python
# model = DistributedDataParallel(model, device_ids=[local_rank], gradient_as_bucket_view=True)  # default bucket sizes
# with model.no_sync(): ...                               # all microbatches but the last, the forward pass included
# model.register_comm_hook(None, default_hooks.bf16_compress_hook)      # half the bytes; on NCCL only, fp16 anywhere
#
# accelerator = Accelerator(gradient_accumulation_steps=4)              # accelerate: no_sync and the division for you
# with accelerator.accumulate(model): accelerator.backward(loss)
# ```
#
# `find_unused_parameters=True` is for models in which a rank may skip a layer; it walks the graph in every step.
# [PowerSGD (Vogels et al. 2019)](https://arxiv.org/abs/1905.13727) has a large error here because a gradient of random
# tokens is not low-rank; error feedback sends the rest later.
#
# ## On a cluster
#
# `labs/torchrun/03_data_parallel.py` runs the exercises on any number of processes. Put your functions into it, then:
#
# ```bash
# torchrun --nproc-per-node 8 labs/torchrun/03_data_parallel.py
# ```
#
# ## Design questions
#
# Work each one out on paper, then run the cell below it.
#
# **A. 7B parameters in bf16 train on 64 GPUs of 400 TFLOP/s (reached), 8 per node; every GPU has a network port of 50
# GB/s. How many tokens per GPU and step make the all-reduce hide behind backward? And if gradients are reduced in fp32?**

# %%
receipts.design_tokens()

# %% [markdown]
# <details><summary>Answer</summary>
#
# 0.55 s in bf16, so about 7,900 tokens per GPU: two sequences of 4,096. In fp32 it is twice that. The number of parameters
# cancels, so the answer is the same for 70B. With fewer tokens per GPU, accumulate under `no_sync`, or reduce hierarchically
# (lab 01). 112 GB of weights, gradients and optimizer state per GPU, however, rule out plain data parallelism; ZeRO-1
# (lab 04) sends the same bytes.
# </details>
#
# **B. A job runs on 16 GPUs with 4 samples per GPU and 8 accumulation steps. You get 64 GPUs. Keep the global batch of
# 512: what happens to the steps per second if a microbatch takes 0.5 s and the (unhidden part of the) reduction 0.2 s?**

# %%
receipts.design_scaling()

# %% [markdown]
# <details><summary>Answer</summary>
#
# 4.2 s become 1.2 s: 3.5 times as fast on 4 times the GPUs, and at 128 the exposed reduction is 29 % of the step. At a
# fixed global batch scaling ends where accumulation does. Beyond that, either the batch grows (and learning rate and
# warm-up have to be tuned again), or the model itself is cut (labs 05 and 06).
# </details>
#
# ## Capstone (*open*)
#
# 70B parameters, 256 GPUs, 8 per node: you may choose the degree of model splitting $m$ (labs 05 and 06) and so $256/m$
# replicas. With `predict.training.sharding.gradient_bytes` and the bandwidth of a network you know, plot exposed
# communication per step over $m$, bucket size and tokens per GPU. Choose, and say which measurement would change your
# mind.
#
# ## Interview corner
#
# Say your answer aloud before you open one. (Lab 01 asks how bytes and rounds grow with the number of GPUs.)
#
# **1. How much of the all-reduce can hide behind backward?**
# <details><summary>Answer</summary>
#
# All but the last bucket, as long as communication fits behind backward: step = backward + last bucket. If it does not
# fit: backward up to the first bucket, then all of the communication, and only fewer bytes or more compute per step help.
# </details>
#
# **2. Is averaging over ranks always right?**
# <details><summary>Answer</summary>
#
# Only if every rank has the same number of tokens. Divide each rank's *sum* by the global count and multiply by N, because
# DDP divides by N afterwards. A rank without a token needs a loss of 0 with a graph, to take part in the all-reduces.
# </details>
#
# **3. Would you compress gradients?**
# <details><summary>Answer</summary>
#
# bf16 halves the bytes and often does no harm; large runs nevertheless reduce in fp32, because rounding at every hop adds
# up and their links can afford it. Top-k and PowerSGD are for slow links and few ranks.
# </details>
#
# **4. A DDP job hangs in the first step after a model change. Where do you look?**
# <details><summary>Answer</summary>
#
# A parameter without a gradient on some rank (a skipped layer, a frozen head): its bucket never fills, so that rank starts
# fewer all-reduces. Name the parameter (`TORCH_DISTRIBUTED_DEBUG=DETAIL`), then use `find_unused_parameters` or make it
# take part.
# </details>
#
# ## Can you answer them now?
#
# 1. Which bytes does a data-parallel step send, and what do they *not* depend on?
# 2. How much of the communication can hide behind backward, and what is left over in the best case?
# 3. Training runs, the loss falls, and the gradients are still wrong. Which three numbers tell you?
#
# Next: every replica holds the same optimizer state, and [04 · ZeRO](04_zero.ipynb) stops paying for that.

# %%
finish("03_data_parallel")
