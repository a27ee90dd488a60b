# %% [markdown]
# # 03 · Data parallel
#
# **Gradients of shards, averaged while backward still runs, are the big batch's gradient.** Here you build that, from
# one all-reduce per tensor to buckets that travel while earlier layers still compute.
#
# About 120 minutes with the exercises; running it top to bottom takes about a minute. At the end you can answer:
#
# 1. Which bytes does a data-parallel step send, and what do they *not* depend on?
# 2. How much of the communication can hide behind backward, and what is left over in the best case?
# 3. Training runs, the loss falls, and it is still wrong. Which three numbers tell you?
#
# Every rank below is a real process. Times that are *emulated* say so: backward sleeps for a known time and the link is
# paced, because two cores cannot compute and communicate at once.
#
# The calls of `group`, and what each returns: [docs/group.md](../docs/group.md).

# %%
import contextlib
import inspect

import torch
from torch import nn

from course.lab03_data_parallel import experiments, replicas
from course.lab03_data_parallel import experiments_overlap as clock
from course.lab03_data_parallel import experiments_production as production
from course.lab03_data_parallel import figures as pictures
from course.lab03_data_parallel.replicas import Bucket
from minillm.comm import launch
from minillm.labkit import check, receipt, row, show, sliders
from minillm.labkit.receipts import format_value
from minillm.measure import timeline
from minillm.parallel.data_parallel import reducer as minillm_buckets
from minillm.predict import comms
from minillm.predict import data_parallel as predict

# %% [markdown]
# ## Why it works
#
# The loss of a batch is a mean over its samples, so its gradient is a mean, too. Split the batch into equal shards: the
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
    print(f"rank {rank}: own {own:+.4f}, averaged {averaged:+.4f}, largest difference to the whole batch {error:.0e}")

# %% [markdown]
# Everything else follows: if replicas start equal and make the same step with the same gradients, they stay equal, and
# nobody ever has to send a weight. What is divided is the *data*. Every rank holds the whole model, its gradients and
# its optimizer, so a model that does not fit on one device does not fit on a thousand this way (lab 04 divides those).
#
# ## Predict
#
# A model has P bytes of gradients and trains on 4 ranks. Now every rank gets **eight times as many samples**. By what
# factor do the bytes grow that each rank sends per step? And: when communication takes exactly as long as backward, and
# buckets of 1/8 of the model travel during backward, **which share of the communication is hidden**?

# %%
guess_factor = 8.0  # your guess: eight times the work, eight times the bytes?
guess_hidden = 1.0  # your guess: both take equally long, so all of it?

# %% [markdown]
# ## Build it
#
# Each check trains small replicas for a few steps on 2 or 3 real ranks and compares every gradient with that of one
# process on the whole batch. It also counts all-reduces and bytes, and looks at the *order* of what happened. The model
# has a weight that is used twice, a frozen parameter and, where it can, one that no loss reaches.
#
# ### 1. One all-reduce per tensor (10 minutes)
#
# `backward` is over, each rank has its own gradients. Make them the mean over the ranks.
# `group.all_reduce(x)` replaces `x` by its sum. (picotron#39 reduced `parameter` instead of `parameter.grad`: it
# ran, and the gradients never met.)


# %%
def average_gradients(model, group):
    """After backward: every gradient becomes its mean over the ranks. Parameters without one are left alone."""
    # BEGIN SOLUTION
    for parameter in model.parameters():
        if parameter.grad is not None:
            group.all_reduce(parameter.grad)
            parameter.grad /= group.world_size
    # END SOLUTION


average_gradients = check("naive-ddp", average_gradients)

# %% [markdown]
# Right, and slow in two ways: each tensor pays the latency of its own all-reduce, and the wire idles during backward
# while the cores idle during communication.
#
# ### 2. Buckets (20 minutes)
#
# Pack gradients into a few *flat* tensors, and let each `parameter.grad` be a **view** into its bucket: backward then
# writes straight into what will be sent, nothing is copied. Backward runs from the last layer to the first, so the last
# parameter goes into the first bucket. A bucket is closed by the tensor that fills it to the cap. One flat tensor has
# one dtype.

# %%
print(inspect.getsource(Bucket))


# %%
def make_buckets(parameters, cap_bytes):
    """Pack the trainable parameters, last one first, into a list of Bucket; each .grad becomes a view of its bucket.

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
        flat = torch.zeros(sum(p.numel() for p in members), dtype=members[0].dtype)
        for parameter, part in zip(members, flat.split([p.numel() for p in members]), strict=True):
            parameter.grad = part.view_as(parameter)
        buckets.append(Bucket(flat, members))
    return buckets
    # END SOLUTION


make_buckets = check("gradient-buckets", make_buckets)

# %% [markdown]
# (From now on gradients are cleared with `flat.zero_()`. `zero_grad(set_to_none=True)` would tear them out of their
# buckets; torch's DDP and minillm's put them back.)
#
# ### 3. Overlap (25 minutes)
#
# A bucket's gradients are final long before backward is over. Start its all-reduce right then, *asynchronously*, and go
# on with the next layer. This is what you win, by arithmetic; move the sliders and find out when the hidden share
# collapses:

# %%
show(pictures.step_on_a_clock)

# %%
sliders(
    pictures.step_on_a_clock,
    blocks=(2, 16),
    blocks_per_bucket=(1, 16),
    backward_ms=(1.0, 100.0, 1.0),
    mb_per_block=(0.01, 2.0, 0.01),
    mb_per_s=(1.0, 100.0, 1.0),
    latency_ms=(0.0, 10.0, 0.1),
    ranks=(2, 16),
)

# %% [markdown]
# It is one mechanism, and the result is the same to the bit: nothing here is *asynchronous SGD*, which would step with
# old gradients.
#
# `parameter.register_post_accumulate_grad_hook(f)` calls `f(parameter)` when its gradient is complete.
# `group.all_reduce(flat, op="avg", async_op=True)` returns a handle at once; `handle.wait()` waits. One trap: all ranks
# must start the same buckets in the same order, and on odd ranks of the check two branches become ready the other way
# round.


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
# If a batch does not fit, its gradient is added up over K microbatches: `backward` adds to `.grad` anyway. Averaging
# over ranks and adding over microbatches may be swapped, so it is enough to reduce once, with the last one.
# `ddp` is minillm's `BucketedDDP`, your last two functions in one wrapper: its backward reduces, except under
# `with ddp.no_sync():`, where it only accumulates.


# %%
def accumulate(ddp, microbatches, loss_of):
    """Leave in .grad the mean over all ranks and microbatches. loss_of(ddp, x, y): the mean over one microbatch.

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
# "Equal shards" was the fine print. Texts differ in length, padding does not count, and so ranks have unequal numbers
# of tokens. The mean of the ranks' means then weighs a short rank's tokens more. What you want is *one* mean over all
# tokens, out of a loop that averages gradients over ranks. Some rank may have no token at all.


# %%
def weighted_loss(nll, counts, group):
    """What this rank calls backward on, so that gradients averaged over ranks are those of the mean over all tokens.

    nll: [tokens], losses with a graph; counts: [tokens], 1 where a token counts and 0 where not.
    """
    # BEGIN SOLUTION
    total = group.all_reduce(counts.sum())
    return (nll * counts).sum() * group.world_size / total
    # END SOLUTION


weighted_loss = check("token-weighted-loss", weighted_loss)

# %% [markdown]
# With accumulation the same holds for microbatches: `total` is then the tokens of the whole step, known before its
# first backward.
#
# ### 6. Sending less (20 minutes)
#
# The wire is slow and most entries of a gradient are small. Send the k largest of each rank with their places, and
# remember the rest: it is added to the next gradient before choosing (*error feedback*), so nothing is lost, only late.
# Places on different ranks differ, so this is an all-gather, not an all-reduce.


# %%
def top_k_all_reduce(gradient, residual, k, group):
    """gradient: [n], becomes the mean over ranks of each rank's k largest entries of gradient + residual, in place.

    residual: [n], what this rank still owes; updated in place. Values travel as float32, places as int32.
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
# of these changes what a rank sends? The rank program:

# %%
print(inspect.getsource(experiments.bytes_by_setting))


# %%
N, K = 4, 4
P = experiments.gradient_bytes()


def on_four_ranks(group):
    return {
        "sent": experiments.bytes_by_setting(group),
        "same": experiments.same_as_alone(group),
        "samples": experiments.seen_in_a_step(group, microbatch=4, microbatches=8),
    }


ranks = launch(on_four_ranks, N)
sent, same = ranks[0]["sent"], ranks[0]["same"]
order = experiments.sizes(experiments.model())
small, large = (
    len(predict.bucket_sizes([4 * n for n in order], cap * 2**20))
    for cap in (experiments.CAP_MB, 4 * experiments.CAP_MB)
)
calls = {"batch 1": small, "batch 8": small, "buckets four times as large": large}
calls |= {f"{K} microbatches, no_sync": small, f"{K} microbatches, plain": K * small}
rows = [row("your guess: eight times the batch, times the bytes", None, guess_factor)]
for name, found in sent.items():
    times = K if name.endswith("plain") else 1
    rows.append(row(f"{name}: bytes per rank", times * predict.gradient_bytes(P, N), found["bytes"], "B"))
    rows.append(row(f"{name}: all-reduces", calls[name], found["all_reduces"]))
receipt(f"P = {P:,} bytes of gradients on {N} ranks", rows)

# %% [markdown]
# $2P(N-1)/N$, whatever the batch. Data parallelism sends *gradients*, and their size is that of the model. So a larger
# batch per rank is the cheapest way to make communication matter less: more compute for the same bytes. Accumulation
# does the same without the memory, provided it does not reduce each time.
#
# ## Measure: is it the big batch?

# %%
peaks = experiments.activation_peaks(batch=128, microbatches=4)
one, several, whole = peaks.values()
receipt(
    "the same as one process",
    [
        row("gradient: largest relative error, fp32", None, same["gradient_error"]),
        row("    below 1e-5", True, same["gradient_error"] < 1e-5),
        row("replicas: largest difference of weights after 3 AdamW steps", 0, same["replicas_apart"]),
        row("samples per optimizer step: 4 per microbatch · 8 · 4 ranks", 4 * 8 * N, ranks[0]["samples"]),
        row("a small network's peak activations, 4 microbatches: those of one", one, several, "B", tolerance=0.01),
        row("    the whole batch at once", None, whole, "B"),
    ],
)

# %% [markdown]
# The gradient differs in the seventh digit, because sums run in another order. The replicas differ by *exactly* zero,
# because all ranks hold the same bits after an all-reduce. Keep these two apart: the first is rounding, the second is
# an invariant, and the moment it breaks something is broken.
#
# ## Measure: time
#
# Backward of 8 blocks, 30 ms each, and an emulated link on which a block's gradients take about as long (27 ms). First
# your functions, then minillm's, all on real processes with real messages. One step of each on a clock:


# %%
def yours_naive(model, group):
    return lambda: average_gradients(model, group)


def yours_overlapped(model, group):
    return overlap(make_buckets(model.parameters(), clock.Slow().block_bytes), group)


forms = {"naive": yours_naive, "overlapped": yours_overlapped, "BucketedDDP": clock.OURS["bucketed"]}
recorded = launch(clock.steps, clock.WORLD, forms, dict.fromkeys(forms, clock.Slow()), link=clock.LINK)
steps = clock.beside_prediction(recorded[0], clock.Slow(), clock.LINK)


def naive_on_a_clock():
    """Timeline of your naive step on two ranks: all communication comes after backward."""
    return timeline([clock.without_frame(rank["naive"]) for rank in recorded])


show(naive_on_a_clock)


# %%
def overlapped_on_a_clock():
    """Timeline of your overlapped step on two ranks: all-reduces run below backward, only the last one sticks out."""
    return timeline([clock.without_frame(rank["overlapped"]) for rank in recorded])


show(overlapped_on_a_clock)


# %%
def steps_on_a_clock():
    """One step of each form on rank 0, measured, and its predicted end: naive adds up, overlap hides nearly all."""
    return pictures.draw_steps(steps)


show(steps_on_a_clock)

# %%
naive, *overlapped = steps["forms"].items()
backward_s, comm_s = clock.Slow().backward_s, clock.Slow().comm_s(clock.LINK, 1)
rows = [
    row("your guess: hidden share", None, guess_hidden),
    row("backward, emulated", backward_s, naive[1]["backward_s"], "s", tolerance=0.2),
    row("communication, emulated", sum(comm_s), naive[1]["comm_s"], "s", tolerance=0.3),
    row("naive: backward + communication", naive[1]["predicted_s"], naive[1]["step_s"], "s", tolerance=0.25),
    row("naive: hides nothing (below 5 %)", True, naive[1]["hidden"] < 0.05),
]
for name, form in overlapped:
    rows += [
        row(f"{name}: max(backward, comm.) + last bucket", form["predicted_s"], form["step_s"], "s", tolerance=0.25),
        row(f"{name}: hides at least 70 %", True, form["hidden"] >= 0.7),
        row("    hidden share", None, form["hidden"]),
    ]
receipt("a step over an emulated link", rows)

# %% [markdown]
# (Hidden share: 1 − (step − backward) / communication. It is 0 if the two add up and 1 if communication costs no time.)
#
# The last bucket can never hide: its gradients are ready when backward ends. With 8 equal buckets that is 1/8 of the
# communication, so 7/8 = 87.5 % is the best there is. Smaller buckets would leave less over. So why not one per tensor?
#
# ### How large a bucket?
#
# The same over a link with a *latency*, 4 ms per message, and 16 blocks of 10 ms. On the same link: what a second rank
# is worth for three kinds of models, and a rank that is late.

# %%
far = clock.far_away()
sweep = far["sweep"]


def bucket_sizes():
    """Step time by bucket size, measured and predicted: too small pays latency, too large hides nothing."""
    return pictures.draw_bucket_sweep(sweep)


show(bucket_sizes)

# %%
best = min(range(len(sweep["predicted_s"])), key=sweep["predicted_s"].__getitem__)
receipt(
    "bucket sizes, emulated link with 4 ms latency",
    [
        row("all-reduces per step, by bucket size", tuple(sweep["buckets"]), tuple(sweep["reductions"])),
        row("bytes per rank, the same for all", sweep["bytes"][0], max(sweep["bytes"]), "B"),
        row("best bucket, predicted", None, sweep["bucket_bytes"][best], "B"),
        row("step with it, emulated", sweep["predicted_s"][best], sweep["measured_s"][best], "s", tolerance=0.35),
        row("one bucket for all, emulated", sweep["predicted_s"][-1], sweep["measured_s"][-1], "s", tolerance=0.35),
    ],
)

# %% [markdown]
# Between the two there is a flat valley; torch's 25 MB lies in it for most models and links. The first bucket may be
# smaller (1 MB), so that the wire is busy early.
#
# ### One is late
#
# All-reduce is a meeting. Rank 1's backward now takes 120 ms longer; rank 0 does its work as before.

# %%
even_s, late_s = far["straggler"]["predicted_s"]
rows = []
for rank, (usual, delayed) in enumerate(far["straggler"]["measured_s"]):
    rows.append(row(f"rank {rank}: step, nobody late, emulated", even_s, usual, "s", tolerance=0.35))
    rows.append(row(f"rank {rank}: step, rank 1 late, emulated", late_s, delayed, "s", tolerance=0.35))
receipt("the step takes as long as the slowest rank", rows)

# %% [markdown]
# From rank 0's own clock you cannot tell who is late: *its* step became slower, and its time went into waiting. Compare
# the compute spans of all ranks, not the step times (lab 10 turns this into a straggler test).
#
# ### With a real backward
#
# A transformer's own backward, and a link made as slow as that. Only the link is emulated, and the cores that compute
# also carry the messages, so the shares below are this machine's and nothing was predicted. A share below zero says
# that the step took longer than its backward and its communication, each timed by itself.

# %%
real = clock.real()
receipt(
    "a transformer's backward over a link as slow as it",
    [
        row("backward", None, real["backward_s"], "s"),
        row("naive: hidden share", None, real["naive"]),
        row("BucketedDDP: hidden share", None, real["bucketed"]),
    ],
)

# %% [markdown]
# ## Measure: compression
#
# minillm's hooks (`BucketedDDP(model, group, hook=...)`) on a small network, and your top-k beside them, 1 % of the
# entries. Compare the dotted line and the dash-dotted one, on which your circles lie: they send the same bytes.

# %%
SHARE = 0.01


def with_yours(group):
    residuals = {}

    def yours(flat, group):
        residual = residuals.setdefault("owed", torch.zeros_like(flat))
        top_k_all_reduce(flat, residual, -(-flat.numel() // round(1 / SHARE)), group)

    return experiments.losses(group, experiments.compressors(SHARE) | {f"yours, top {SHARE:.0%}": yours})


trained = launch(with_yours, 2)[0]
elements = sum(p.numel() for p in experiments.student().parameters())
compressed = {"world_size": 2, "elements": elements, "forms": trained}


def losses_by_compression():
    """Loss curves of dense and compressed gradients: error feedback brings a hundredth of the entries close to all."""
    return pictures.draw_losses(compressed)


show(losses_by_compression)

# %%
kept = f"top {SHARE:.0%}, error feedback"
expected = {
    "dense": predict.all_reduce([elements], 4, 2),
    "int8, error feedback": predict.int8([elements], 2),
    kept: predict.top_k([elements], SHARE, 4, 2),
    f"yours, top {SHARE:.0%}": predict.top_k([elements], SHARE, 4, 2),
}
last = {name: sum(form["losses"][-10:]) / 10 for name, form in trained.items()}
receipt(
    f"{elements:,} elements, 2 ranks, per step",
    [
        *(row(f"{name}: bytes", cost.sent_per_rank[0], trained[name]["bytes"], "B") for name, cost in expected.items()),
        *(row(f"{name}: loss in the end", None, value) for name, value in last.items()),
        row("feedback beats none", True, last[kept] < last[f"top {SHARE:.0%}, no feedback"]),
        row("top 1 % on 64 ranks / dense", None, predict.top_k([elements], SHARE, 4, 64).sent_per_rank[0]
            / predict.all_reduce([elements], 4, 64).sent_per_rank[0]),
    ],
)  # fmt: skip

# %% [markdown]
# int8 sends a quarter and its curve lies on the dense one. Top-k sends $2k/n$ of the dense bytes on two ranks (a value
# *and* a place), but it is an all-gather: its bytes grow with $N-1$ while an all-reduce's saturate. On 64 ranks the
# advantage has shrunk to what the last row says, and beyond $N = n/k$ it is a loss.
#
# ## Break it
#
# ### No division
#
# Somebody forgot `/= world_size`. Two ranks, same data, AdamW on the left and SGD on the right:

# %%
undivided = launch(experiments.division, 2)[0]


def sum_or_mean():
    """Losses with gradients averaged and with gradients only added up: the same under AdamW, not under SGD."""
    return pictures.draw_division(undivided)


show(sum_or_mean)

# %%
worst = max(
    abs(a - b) / a for a, b in zip(undivided["AdamW, avg"]["losses"], undivided["AdamW, sum"]["losses"], strict=True)
)
receipt(
    "what a training loop would log",
    [
        row("AdamW: losses agree within 1 %", True, worst < 0.01),
        row("    largest difference", None, f"{worst:.2%}"),
        row(
            "norm of the first gradient, sum / mean",
            1,
            undivided["AdamW, sum"]["norm"] / undivided["AdamW, avg"]["norm"],
        ),
    ],
)

# %% [markdown]
# The row that is off is the only trace. Adam divides by the gradient's own size, so a factor of 2 cancels; the loss
# says nothing. Real frameworks have shipped this (pytorch#144352, torchtitan#800: a pipeline's gradients too large by
# the number of microbatches). It bites later: in gradient clipping, which now clips sooner, and on the day
# somebody changes N. *Compare gradients with one process, in one SGD step*; that is what minillm's oracle does.
#
# ### Buckets in another order
#
# Start each bucket as soon as it is ready, whatever its place: it sounds reasonable. Two branches of the same size, and
# rank 1 computes them in the other order (a data-dependent branch, a dictionary, another version).


# %%
class TwoBranches(nn.Module):
    def __init__(self, flip):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8, bias=False).double(), nn.Linear(8, 8, bias=False).double()
        self.flip = flip

    def forward(self, x):
        first, second = (self.b, self.a) if self.flip else (self.a, self.b)
        one = first(x)
        return torch.tanh(one) + torch.tanh(second(x))


def as_they_become_ready(group):
    model = TwoBranches(flip=group.rank == 1)
    torch.manual_seed(1 + group.rank)
    loss = model(torch.randn(4, 8).double()).square().mean()
    own = dict(zip("ab", torch.autograd.grad(loss, [model.a.weight, model.b.weight], retain_graph=True), strict=True))
    handles = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p: handles.append(group.all_reduce(p.grad, op="avg", async_op=True))
        )
    loss.backward()
    for handle in handles:
        handle.wait()
    return {"a": model.a.weight.grad, "own a": own["a"], "own b": own["b"], "loss": loss.item()}


zero, one = launch(as_they_become_ready, 2)
right, crossed = (zero["own a"] + one["own a"]) / 2, (zero["own a"] + one["own b"]) / 2
receipt(
    "gradient of a on rank 0",
    [
        row("is the mean of both ranks' gradients of a", True, torch.allclose(zero["a"], right)),
        row("is the mean of rank 0's a and rank 1's b", False, torch.allclose(zero["a"], crossed)),
        row("is the same on both ranks", True, torch.equal(zero["a"], one["a"])),
    ],
)

# %% [markdown]
# No hang, no error: the shapes agree, so an all-reduce takes what comes next on each rank. The losses look healthy, and
# the replicas drift apart from the first step. (With buckets of different sizes minillm stops with a `MismatchError`;
# NCCL would hang or sum garbage.) Two defences: a fixed order, as in your `overlap`; and a checksum of the weights,
# compared between ranks now and then, which costs one all-reduce of one number.
#
# So three numbers, none of them the loss, tell a right step from a wrong one: the gradient's distance to one process on
# the whole batch, the distance between replicas (zero, exactly), and the bytes or all-reduces per step.
#
# ## Where it loses

# %%
losing = far["losing"]


def what_a_second_machine_is_worth():
    """Throughput of two ranks over that of one, for a large batch, a tiny model and a slow link."""
    return pictures.draw_losing(losing)


show(what_a_second_machine_is_worth)

# %%
receipt(
    "throughput of 2 ranks / of 1, emulated",
    [
        row(name, losing["predicted"][name], losing["measured"][name], tolerance=0.35 if name != "tiny model" else 0.6)
        for name in losing["measured"]
    ],
)

# %% [markdown]
# - **Tiny models** send almost no bytes, but pay the latency of a bucket in a backward that takes milliseconds. (The
#   measured bar is lower than predicted: handing a message to another process costs time that the model does not know.)
# - **Slow links** are limited by $2P(N-1)/N$ bytes over the bandwidth, whatever hides: two machines can be slower than
#   one. More samples per step (a larger batch, accumulation) is the first remedy, compression the second.
# - **Unequal shards** make the step as long as the longest, and the mean wrong unless tokens are weighed. How wrong?


# %%
def unequal(group, tokens):
    case = replicas.Case(world_size=2, batch=sum(tokens), unused=False, seed=3)
    x, y = case.data(0, 0)  # one batch, dealt out unevenly
    mine = slice(0, tokens[0]) if group.rank == 0 else slice(tokens[0], None)
    found = {}
    for name in ("mean of means", "weighted"):
        model = case.model()
        nll = (model(x[mine]) - y[mine]).square().mean(1)
        loss = nll.mean() if name == "mean of means" else weighted_loss(nll, torch.ones_like(nll), group)
        loss.backward()
        average_gradients(model, group)
        found[name] = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    alone = case.model()
    replicas.loss_of(alone, x, y).backward()
    right = torch.cat([p.grad.flatten() for p in alone.parameters() if p.grad is not None])
    return {name: experiments.relative(gradient, right) for name, gradient in found.items()}


error = launch(unequal, 2, (12, 4))[0]
receipt(
    "12 samples on rank 0, 4 on rank 1",
    [
        row("mean of means: relative error of the gradient", None, error["mean of means"]),
        row("weighted by tokens: below 1e-9", True, error["weighted"] < 1e-9),
    ],
)

# %% [markdown]
# Shuffling lowers the error but does not remove it, and it grows where a rank's samples have something in common, such
# as one rank that always gets the long documents. Weigh: it costs one number.
#
# ## The same in production
#
# torch's `DistributedDataParallel` is what you have built, in C++. It packs buckets twice: when it is made it knows
# only the order of the parameters and uses **one** bucket; after the first backward it knows the real order and packs
# anew. So the first iteration overlaps nothing, and whoever counts all-reduces must count from the second. Twelve
# tensors of 1 MiB, and then one step of a transformer with each library, on the same ranks and the same wire:


# %%
def libraries(group):
    return production.torch_buckets(group), production.side_by_side(group)


packed, libs = launch(libraries, 2, device="cpu")[0]
MIB = 2**20
rows = []
for cap in (1, 5):
    first, second = packed[str(cap)]
    rows.append(row(f"bucket_cap_mb={cap}: all-reduces in iteration 1", 1, len(first)))
    expected_mib = tuple(predict.bucket_sizes([1] * 12, cap, first_cap=1 if cap == 1 else None))
    rows.append(row(f"bucket_cap_mb={cap}: buckets in iteration 2, MiB", expected_mib, tuple(b // MIB for b in second)))
receipt("torch DDP, 12 tensors of 1 MiB", rows)

# %%
dense, half = (2 * predict.gradient_bytes(experiments.gradient_bytes(itemsize), 2) for itemsize in (4, 2))
rows = []
for name, found in libs.items():
    wire = None if "ower" in name else half if "fp16" in name else dense
    rows.append(row(f"{name}: bytes of both ranks, wire", wire, found["wire"], "B", tolerance=0.03))
    rows.append(row("    relative error of the gradient", None, found["error"]))
receipt(f"one step, P = {P:,} B, 2 ranks", rows)

# %% [markdown]
# Same gradients, same bytes. What to write in a real job:
#
# ```python
# model = DistributedDataParallel(model, device_ids=[local_rank], bucket_cap_mb=25, gradient_as_bucket_view=True)
# with model.no_sync(): ...                               # all microbatches but the last, the forward pass included
# model.register_comm_hook(None, default_hooks.bf16_compress_hook)      # half the bytes; on NCCL only, fp16 anywhere
# state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=1000)
# model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
#
# accelerator = Accelerator(gradient_accumulation_steps=4)              # accelerate: no_sync and the division for you
# with accelerator.accumulate(model): accelerator.backward(loss)
# ```
#
# PowerSGD's large error is that of one step on random tokens, whose gradient is nothing like low-rank; what it leaves
# out is owed, as in your top-k. It runs with one bucket here because on gloo its two rounds of several buckets can
# overtake each other, differently on each rank: the bug of two cells ago, in production. `find_unused_parameters=True`
# is for models in which a rank may skip a layer, and costs a walk over the graph in every step.
#
# One more habit from production. The sampler that goes with it pads, and repeats its order unless told the epoch:

# %%
sampler = experiments.torch_sampler(num_samples=10, world_size=4)
receipt(
    "torch's DistributedSampler, 10 samples on 4 ranks",
    [
        row("samples dealt out twice: N·ceil(D/N) - D", sampler["predicted"], sampler["duplicates"]),
        row("second epoch without set_epoch: same order", True, sampler["same_without_set_epoch"]),
        row("with set_epoch(1): same order", False, sampler["same_with_set_epoch"]),
    ],
)

# %% [markdown]
# minillm's own reducer (`minillm/parallel/data_parallel/reducer.py`) adds to yours: it packs anew after the first step
# in rank 0's order, joins in with zeros for parameters that got no gradient, puts gradients back into their buckets
# after `set_to_none`, and names what is wrong. This is the part you wrote:

# %%
print(inspect.getsource(minillm_buckets.Reducer._on_gradient))

# %% [markdown]
# ## On a cluster
#
# `labs/torchrun/03_data_parallel.py` holds the exercises for any number of processes. One file, three worlds:
#
# ```bash
# python course/lab03_data_parallel/torchrun.py                                   # 4 ranks here
# torchrun --nproc-per-node 4 course/lab03_data_parallel/torchrun.py              # the same, under torchrun
# torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d \
#          --rdzv-endpoint $HEAD_NODE:29500 course/lab03_data_parallel/torchrun.py   # on each of two nodes
# ```
#
# ## Interview corner
#
# The numbers first:


# %%
def number(name, value, unit=""):
    print(f"{name:<64}{format_value(value, unit):>14}")


GB = 1e9
for n in (2, 4, 8, 64, 1024):
    number(f"1. bytes per rank / P, {n} ranks", predict.gradient_bytes(1.0, n))
    number(f"   latency of its 2(N-1) rounds at 5 µs, {n} ranks", comms.ring_all_reduce(n, 1, n).rounds * 5e-6, "s")
whole, part = predict.gradient_bytes(140 * GB, 64), predict.gradient_bytes(140 * GB / 16, 4)
number("2. 70B in bf16, 64 replicas: sent per rank", whole / GB, "GB")
number("   at 50 GB/s", whole / (50 * GB), "s")
number("   split 16 ways, 4 replicas, at 50 GB/s", part / (50 * GB), "s")
number("3. hidden share here: yours", overlapped[0][1]["hidden"])
number("   best case, 8 equal buckets: 7/8", 7 / 8)
number("4. global batch: 4 per microbatch · 8 · 16 ranks", 4 * 8 * 16)
number("   bytes with no_sync, 8 microbatches, 16 ranks / P", predict.gradient_bytes(1.0, 16))
number("   without it / P", 8 * predict.gradient_bytes(1.0, 16))
number("5. mean of means here, 12 and 4 samples: error", error["mean of means"])
number("6. no division here: gradient norm times", undivided["AdamW, sum"]["norm"] / undivided["AdamW, avg"]["norm"])
number("   and the loss under AdamW changes by at most", f"{worst:.2%}")
number("8. top 1 %, 2 ranks: bytes / dense", 2 * SHARE)
number("   64 ranks: bytes / dense", SHARE * 64)
for stage, (fixed, shared) in {"1": (4, 12), "2": (2, 14), "3": (0, 16)}.items():
    number(f"10. ZeRO-{stage}, 8 ranks: bytes per parameter", fixed + shared / 8)
    number("    times less than 16", 16 / (fixed + shared / 8))

# %% [markdown]
# Say your answer aloud before you open one.
#
# **1. Does the communication of data parallelism grow linearly with the number of GPUs?**
# <details><summary>Answer</summary>
#
# Per rank it saturates: 1.0 P at 2, 1.5 P at 4, 1.75 P at 8, 1.97 P at 64, 2.0 P at 1024. Linear are the rounds (and so
# the latency: 0.07 ms at 8 ranks, 10 ms at 1024, at 5 µs each) and the traffic of all ranks together. "Linear" and "it
# does not matter" are both wrong.
#
# *Follow-up: and with the batch?* Not at all, as you measured: 8 times the batch, the same bytes.
# </details>
#
# **2. 70B parameters, bf16, 64 GPUs with 400 Gb/s each. How long is the gradient all-reduce?**
# <details><summary>Answer</summary>
#
# 140 GB · 2 · 63/64 = 275.6 GB per rank, 5.5 s at 50 GB/s. But 64 *replicas* of 70B fit nowhere. Split 16 ways (tensor
# and pipeline), 4 replicas remain, each rank reduces 8.75 GB over 4: 0.26 s, 21 times less, and most of it hides.
# </details>
#
# **3. How much of the all-reduce can hide behind backward?**
# <details><summary>Answer</summary>
#
# All but the last bucket, if communication is no longer than backward: step = max(backward, communication) + last
# bucket. With 8 equal buckets 87.5 %; you measured about that, and 0 for the naive form. If communication is longer
# than backward, the rest of it sticks out too, and no trick but fewer bytes or more compute per step helps.
#
# *Follow-up: does DDP wait after every layer?* No: it waits once, at the end of backward.
#
# *Follow-up: the GPUs show 100 % utilization, so nothing sticks out?* That number counts the time in which any kernel
# runs, and NCCL's kernels run while they wait. Look at exposed communication on a timeline, or at MFU (lab 02).
# </details>
#
# **4. Batch 4 per GPU, 16 GPUs, 8 accumulation steps: global batch, and bytes per step?**
# <details><summary>Answer</summary>
#
# 4 · 8 · 16 = 512 samples. 1.875 P per rank with `no_sync`, 15 P without: each backward would reduce. The gradients are
# the same either way, so only the byte counter tells.
#
# *Follow-up: you double the GPUs. What else changes?* The global batch. Learning rate and warm-up belong to a batch
# size, not to a GPU count: halve the accumulation or retune.
# </details>
#
# **5. Is averaging over ranks always right?**
# <details><summary>Answer</summary>
#
# Only if every rank has the same number of samples or tokens. With 12 and 4 samples the error above is what you get.
# Divide each rank's *sum* by the global count and multiply by N, because DDP divides by N afterwards.
#
# *Follow-up: a rank without any token?* Its own mean is 0/0. Its loss must be 0 with a graph, and it must still take
# part in the all-reduces.
# </details>
#
# **6. The loss curve of the new 64-GPU job lies on the old one. Are the gradients right?**
# <details><summary>Answer</summary>
#
# No evidence. With AdamW a wrong scale cancels: twice the gradient, and the loss moved by less than a percent.
# Compare the gradient norm with one process on the same batch, or one SGD step's weights.
# </details>
#
# **7. Why buckets, and why 25 MB?**
# <details><summary>Answer</summary>
#
# One all-reduce per tensor pays 2(N-1) latencies each; one for all hides nothing. In between is a flat valley, as in
# your sweep: same bytes, 16 buckets too slow, 1 bucket too slow. 25 MB keeps the bandwidth term above the latency term
# on usual links; the first bucket is 1 MB so that the wire starts early.
# </details>
#
# **8. Would you compress gradients?**
# <details><summary>Answer</summary>
#
# bf16 nearly always: half the bytes, and the backward was in bf16 anyway. int8 with error feedback: a quarter. Top-k
# and PowerSGD on slow links only: top 1 % is 2 % of the bytes on 2 ranks, 64 % on 64, because it is an all-gather.
# Without error feedback what is small is never sent, and training stalls, as the dotted curve shows.
# </details>
#
# **9. "AllReduce while computing the next layer" and "asynchronous AllReduce": two strategies?**
# <details><summary>Answer</summary>
#
# One: a non-blocking all-reduce of finished gradients while *earlier* layers run backward. Results are the same to the
# bit. Asynchronous SGD, which steps with stale gradients, is another thing, and nobody trains LLMs with it.
# </details>
#
# **10. Somebody suggests ZeRO-3 to save communication, "it scales memory and traffic linearly".**
# <details><summary>Answer</summary>
#
# ZeRO-3 *raises* traffic, 3P(N-1)/N instead of 2P(N-1)/N, and it is stage 2 that shards gradients, at DDP's volume:
# each rank puts its *whole* gradient into a reduce-scatter and gets one reduced shard back; optimizer states never
# travel, gradients are never fetched. What ZeRO saves is memory, and "4x, 8x, Nx" are limits: at 8 ranks 2.9x, 4.3x and
# 8x, because 4 and 2 bytes per parameter stay. The largest part of the 16 bytes are the optimizer's 12, not the
# parameters' 2. Lab 04 measures all of it.
# </details>
#
# **11. A DDP job hangs in the first step after a model change. Where do you look?**
# <details><summary>Answer</summary>
#
# A parameter without a gradient on some rank (a skipped layer, a frozen head): its bucket never fills, so that rank
# starts fewer all-reduces. Name the parameter (`TORCH_DISTRIBUTED_DEBUG=DETAIL`), then use find_unused or make it take
# part. Silent cousin: ranks that start buckets in another order.
# </details>
#
# **12. One of 512 GPUs is 10 % slow. What does the job lose?**
# <details><summary>Answer</summary>
#
# 10 %: a step takes as long as the slowest rank, everybody else waits in the all-reduce. Every rank's step time looks
# the same, so look at compute time, or at who waits least.
# </details>
#
# ## Can you answer them now?
#
# 1. Which bytes does a data-parallel step send, and what do they *not* depend on?
# 2. How much of the communication can hide behind backward, and what is left over in the best case?
# 3. Training runs, the loss falls, and it is still wrong. Which three numbers tell you?
#
# Next: every replica holds the same optimizer state. Lab 04 stops paying for that.
