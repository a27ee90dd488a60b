# %% [markdown]
# # 05 · Tensor parallelism
#
# **A column layer followed by a row layer needs one all-reduce.** You cut a transformer along its matrices and see that
# this is nearly all it sends.
# Stands on labs 01 (all-reduce and its two halves) and 02 (the model).
#
# About 4 hours; the core path of two is exercises 1 to 6 and *Break it*. Run All takes about a minute. At the end you can
# answer:
#
# 1. Why does a layer need exactly 2 all-reduces forward and 2 backward, and what do they grow with?
# 2. What does sequence parallelism divide that tensor parallelism does not, and why does it send nothing more?
# 3. Which gradients are only partial sums once a model is cut this way, and what happens if nobody adds them up?
#
# Data parallelism and ZeRO give each rank different *tokens* and, while it computes, the whole model. Tensor
# parallelism ([Shoeybi et al. 2019](https://arxiv.org/abs/1909.08053), Megatron-LM) gives every rank the same tokens
# and a part of every *weight*. No rank ever holds a whole matrix.
#
# The calls of `group`, and what each returns: [docs/group.md](../docs/group.md).

# %%
import inspect

import torch
import torch.nn.functional as F

from course.kit import check, finish, hint, show, sliders
from course.lab05_tensor_parallel import (
    experiments,
    experiments_breaks,
    experiments_torch,
    figures,
    receipts,
)
from course.lab05_tensor_parallel import experiments_links as links
from course.lab05_tensor_parallel.experiments import FORMS, MODEL, SEQ, Setup
from minillm.comm import launch

# %% [markdown]
# ## What can be cut?
#
# A linear layer is $Y = XW$. Cut $W$ by *columns*: rank $r$ computes its columns of $Y$ from the whole $X$, without
# communication. Cut $W$ by *rows*: a rank that has the matching columns of $X$ computes a $Y$ of full size that is one
# term of a sum. (torch stores $W^\top$: columns of $W$ are the first dimension of `weight`, rows the second.)
#
# Alone, each is expensive: after a column layer the ranks would gather $Y$, after a row layer they all-reduce it, which
# sends twice as much as a gather. In a *pair* the column layer leaves its output cut exactly as the row layer after it
# wants its input, and nothing is gathered in between. Both cuts of a 4 x 4 product on two ranks, without ranks:

# %%
x, W = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.arange(16.0).view(4, 4)
columns = [x @ part for part in W.chunk(2, dim=1)]
rows = [mine @ part for mine, part in zip(x.chunk(2), W.chunk(2, dim=0), strict=True)]
print(f"whole    {(x @ W).tolist()}")
print(f"columns  {columns[0].tolist()} beside {columns[1].tolist()}")
print(f"rows     {rows[0].tolist()} + {rows[1].tolist()}")

# %%
show(figures.who_holds_what)

# %%
sliders(figures.who_holds_what, ranks=(1, 6), sequence=False)

# %% [markdown]
# ## Predict
#
# **GPT-3 has 96 layers and a hidden size of 12,288. It trains on 32 sequences of 2,048 tokens in 16 bits, with tensor
# parallelism over 8 GPUs. How many GB does each GPU send per step?** Write down your guess. (The default is the size of
# its weights.)

# %%
guess_gb = 175 * 2  # your guess

# %%
receipts.gpt3_traffic(guess_gb)

# %% [markdown]
# The traffic grows with the tokens and not with the weights. These are bytes *sent*; as many are received.
#
# ### Common claims
#
# | Claim | What is true |
# |---|---|
# | "Tensor parallelism splits the activations." | Inside the pairs. Between them every rank holds all of them, until sequence parallelism cuts those as well. |
# | "It suits large batches." | Its traffic is proportional to the tokens; at small batches it lowers latency. |
# | "A row layer's backward mirrors its forward with an all-reduce." | It communicates nothing. The backward all-reduce belongs to the column layer. |
# | "Layer norm needs communication under sequence parallelism." | Not for activations. Its weight gradients are summed once per step. |
# | "An activation costs $sbh(34 + 5as/h)$ per layer." [Korthikanti et al. 2022](https://arxiv.org/abs/2205.05198), §4 | Right for stored attention scores. With [FlashAttention, Dao et al. 2022](https://arxiv.org/abs/2205.14135), the term $5as/h$ disappears. |
# | "Communication in the forward pass cannot be hidden." | It can, by cutting the product into pieces: [torch's async TP](https://discuss.pytorch.org/t/209487), Megatron's `--tp-comm-overlap`. |
# | "Tensor parallelism cannot leave the node." | It depends on link and width; in racks that are one NVLink domain of [72 GPUs](https://www.nvidia.com/en-us/data-center/gb200-nvl72/), larger groups work. |
#
# ## Build it
#
# ### 1. Into the region and out of it (15 minutes)
#
# A pair begins where the column layer reads $X$, which all ranks have, and ends where the row layer's partial results
# are added up. Megatron calls the two ends $f$ and $g$. Each is the identity in one direction and an all-reduce in the
# other. Which is which?
#
# `group.all_reduce(x)` sums *in place* and returns `x`; clone what must not change.


# %%
class Enter(torch.autograd.Function):
    """f: x, the same on every rank, enters the parallel region."""

    @staticmethod
    def forward(ctx, x, group):
        """x: [...] -> what a rank's column layers read."""
        # BEGIN SOLUTION
        ctx.group = group
        return x.view_as(x)
        # END SOLUTION

    @staticmethod
    def backward(ctx, gradient):
        """gradient: of what this rank's column layers read
        -> the gradient of x, and None for the group."""
        # BEGIN SOLUTION
        return ctx.group.all_reduce(gradient.clone()), None
        # END SOLUTION


class Leave(torch.autograd.Function):
    """g: partial sums leave the parallel region."""

    @staticmethod
    def forward(ctx, share, group):
        """share: [...], this rank's -> their sum, on every rank."""
        # BEGIN SOLUTION
        return group.all_reduce(share.clone())
        # END SOLUTION

    @staticmethod
    def backward(ctx, gradient):
        """gradient: of the sum, the same on every rank
        -> the gradient of this rank's share, and None."""
        # BEGIN SOLUTION
        return gradient, None
        # END SOLUTION


Enter, Leave = check("conjugate-operators", (Enter, Leave))

# %% [markdown]
# A row layer's backward communicates *nothing*: $dX_r = dY\,W_r^\top$, and every rank has $dY$. The all-reduce of the
# backward pass belongs to the column layer, because each rank's $dX$ went through its own columns only. $dW$ is local
# in both.
#
# ### 2. The MLP (15 minutes)
#
# $\text{down}\big(\text{silu}(\text{gate}\,x)\cdot\text{up}\,x\big)$. How do you cut three matrices so that there is
# one all-reduce forward and one backward? (`W.chunk(n, dim)[r]` is the $r$-th of $n$ equal pieces.)


# %%
def cut_mlp(gate, up, down, rank, world_size):
    """gate, up: [f, h], down: [h, f] -> this rank's part of each; f is divisible by world_size."""
    # BEGIN SOLUTION
    return (
        gate.chunk(world_size)[rank],
        up.chunk(world_size)[rank],
        down.chunk(world_size, dim=1)[rank],
    )
    # END SOLUTION


def mlp(x, shards, group):
    """x: [n, h], the same on every rank -> [n, h], the same on every rank.
    shards: what cut_mlp gave this rank."""
    # BEGIN SOLUTION
    gate, up, down = shards
    x = Enter.apply(x, group)
    return Leave.apply((F.silu(x @ gate.T) * (x @ up.T)) @ down.T, group)
    # END SOLUTION


cut_mlp, mlp = check("parallel-mlp", (cut_mlp, mlp))

# %% [markdown]
# This works because silu is elementwise. If gate and up were cut by rows, silu would need the whole sum first.
#
# ### 3. Attention (20 minutes)
#
# Attention is cut by heads. With grouped-query attention there are fewer kv heads than query heads, and perhaps fewer
# than ranks. Query head $j$ reads kv head $\lfloor j\,H_{kv}/H \rfloor$.


# %%
def local_heads(num_heads, num_kv_heads, rank, world_size):
    """-> (query heads, kv heads) of this rank, as ranges. Ranks take query heads in order, equally
    many each, and the kv heads that these read, no others. Fewer kv heads than ranks: several ranks
    hold the same one."""
    # BEGIN SOLUTION
    queries = range(rank * num_heads // world_size, (rank + 1) * num_heads // world_size)
    served = num_heads // num_kv_heads
    return queries, range(queries.start // served, (queries.stop - 1) // served + 1)
    # END SOLUTION


def attention(x, shards, attend, group):
    """x: [n, h] -> [n, h]. shards: this rank's q, k, v (rows of its heads) and o (columns of them).
    attend(q, k, v), each [n, its heads · head_dim], computes softmax(q kᵀ) v of the heads it is
    given: [n, query heads · head_dim]."""
    # BEGIN SOLUTION
    q, k, v, o = shards
    x = Enter.apply(x, group)
    return Leave.apply(attend(x @ q.T, x @ k.T, x @ v.T) @ o.T, group)
    # END SOLUTION


local_heads, attention = check("parallel-attention", (local_heads, attention))

# %% [markdown]
# A kv head that two ranks hold serves only half of its queries on each, so its gradient there is a *partial sum*, and
# the two have to be added. (The check did that for you. You will meet partial gradients again.)
#
# ### 4. The embedding (12 minutes)
#
# The vocabulary is cut by rows. A token's row lies on one rank; the others must contribute zeros. Leave `tokens` as it is.


# %%
def embed(tokens, rows, group):
    """tokens: [n] of ids; rows: [V/t, h], this rank's: ids from rank·V/t on
    -> [n, h], the same on every rank."""
    # BEGIN SOLUTION
    local = tokens - group.rank * len(rows)
    outside = (local < 0) | (local >= len(rows))
    found = F.embedding(local.masked_fill(outside, 0), rows)
    return Leave.apply(found.masked_fill(outside[:, None], 0.0), group)
    # END SOLUTION


embed = check("vocabulary-embedding", embed)

# %% [markdown]
# ### 5. The loss (20 minutes)
#
# The head is a column layer: each rank has the logits of its part of the vocabulary. Gathering them would send $V$
# numbers per token, the largest tensor of all. How few are enough? (`group.all_reduce(x, op="max")` takes the maximum.)


# %%
def vocabulary_cross_entropy(logits, targets, group):
    """logits: [n, V/t], this rank's part of the vocabulary;
    targets: [n] of ids -> -log p(target): [n].

    Logits may be large; leave them unchanged.
    The gradient of `logits` must come out right, without communication.
    """
    # BEGIN SOLUTION
    highest = group.all_reduce(logits.detach().amax(dim=1), op="max")
    logits = logits - highest[:, None]
    local = targets - group.rank * logits.shape[1]
    outside = (local < 0) | (local >= logits.shape[1])
    picked = logits.gather(1, local.masked_fill(outside, 0)[:, None])[:, 0]
    picked = picked.masked_fill(outside, 0.0)
    total, target = Leave.apply(torch.stack([logits.exp().sum(dim=1), picked]), group)
    return total.log() - target
    # END SOLUTION


vocabulary_cross_entropy = check("vocabulary-cross-entropy", vocabulary_cross_entropy)

# %% [markdown]
# ### 6. Sequence parallelism (20 minutes)
#
# Between the pairs every rank still holds and computes the same norms and the same residual stream. An all-reduce is
# a reduce-scatter followed by an all-gather (lab 01). Put the first half where a region ends and the second where the
# next one begins, and what lies between is cut along the *sequence*
# ([Korthikanti et al. 2022](https://arxiv.org/abs/2205.05198)). A norm works on one token at a time, so its activations
# need no communication. Something else in a norm does: what?
#
# `group.all_gather(x)` returns the ranks' `x` joined along dimension 0; `group.reduce_scatter(x)` returns this rank's
# part, along dimension 0, of the sum.


# %%
class GatherIn(torch.autograd.Function):
    """f, when x is cut along the sequence."""

    @staticmethod
    def forward(ctx, x, group):
        """x: [s/t, h], this rank's tokens -> [s, h], all."""
        # BEGIN SOLUTION
        ctx.group = group
        return group.all_gather(x)
        # END SOLUTION

    @staticmethod
    def backward(ctx, gradient):
        """gradient: [s, h], through this rank's weights -> of x: [s/t, h], and None."""
        # BEGIN SOLUTION
        return ctx.group.reduce_scatter(gradient.contiguous()), None
        # END SOLUTION


class ScatterOut(torch.autograd.Function):
    """g, when its output is cut along the sequence."""

    @staticmethod
    def forward(ctx, share, group):
        """share: [s, h], of a sum -> this rank's tokens of the sum: [s/t, h]."""
        # BEGIN SOLUTION
        ctx.group = group
        return group.reduce_scatter(share)
        # END SOLUTION

    @staticmethod
    def backward(ctx, gradient):
        """gradient: [s/t, h] -> of the share: [s, h], and None."""
        # BEGIN SOLUTION
        return ctx.group.all_gather(gradient.contiguous()), None
        # END SOLUTION


def sum_norm_gradients(parameters, group):
    """parameters: of norms; each .grad comes from this rank's tokens. Afterwards, from all. In
    place, with one all-reduce for all of them."""
    # BEGIN SOLUTION
    flat = group.all_reduce(torch.cat([p.grad.flatten() for p in parameters]))
    for p, total in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad.copy_(total.view_as(p.grad))
    # END SOLUTION


GatherIn, ScatterOut, sum_norm_gradients = check(
    "sequence-parallel",
    (GatherIn, ScatterOut, sum_norm_gradients),
)

# %% [markdown]
# ### 7. Overlap (15 minutes, *skip on a first reading*)
#
# A column layer's backward has two products, $dX$ and $dW$. Only $dX$ has to be all-reduced, so the other can be
# computed meanwhile. `group.all_reduce(x, async_op=True)` returns a handle at once; `handle.wait()` returns when the sum
# is in `x`. (With NCCL, `wait()` makes the current *stream* wait and does not block the host. The all-reduce runs on a
# stream of its own and takes some SMs away from the product beside it.)


# %%
class ColumnLinear(torch.autograd.Function):
    """x Wᵀ with this rank's rows of W, and f in it."""

    @staticmethod
    def forward(ctx, x, weight, group):
        """x: [n, h], the same on every rank;
        weight: [f/t, h] -> this rank's columns of the output: [n, f/t]."""
        # BEGIN SOLUTION
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return x @ weight.T
        # END SOLUTION

    @staticmethod
    def backward(ctx, gradient):
        """-> gradients of x (summed over the ranks) and of weight, and None.
        The sum travels while dW is computed."""
        # BEGIN SOLUTION
        x, weight = ctx.saved_tensors
        x_gradient = gradient @ weight
        handle = ctx.group.all_reduce(x_gradient, async_op=True)
        weight_gradient = gradient.T @ x
        handle.wait()
        return x_gradient, weight_gradient, None
        # END SOLUTION


ColumnLinear = check("overlapped-input-gradient", ColumnLinear)

# %% [markdown]
# ## Your code under a transformer
#
# Your pieces, put together: a small transformer cut over 4 ranks, trained beside minillm's in one process. Every weight
# of it is cut except the norms.

# %%
losses = experiments.four_ranks_and_one(
    Enter,
    cut_mlp,
    mlp,
    local_heads,
    attention,
    embed,
    vocabulary_cross_entropy,
)
receipts.trained(*losses)

# %% [markdown]
# ## Measure: what a layer sends and keeps
#
# From here on you use minillm's own `tensor_parallel` (in `minillm/parallel/tensor_parallel/`, where `regions.py`,
# `layers.py` and `vocab.py` are your exercises). It cuts a `Transformer` in place, in three forms. *Tensor*
# is what you built; *sequence* cuts what lies between the pairs; *regather* does so as well and keeps only 1/t of each
# region's input, so backward has to gather it once more for $dW$, as Megatron does. This is the rank program:

# %%
print(inspect.getsource(experiments.step))

# %% [markdown]
# One layer's part is the difference between a model of four layers and one of three.

# %%
lines = experiments.per_layer([Setup(n, form) for n in (2, 4) for form in FORMS])
receipts.layers(lines)

# %%
show(figures.draw_layer, lines=lines, alone=experiments.layer_activation_bytes(Setup(1)))

# %% [markdown]
# 4 collectives per layer and $4\cdot 2\frac{t-1}{t}\,BSH\,b$ bytes, with sequence parallelism too. From 4 to 8 ranks
# the bytes rise by 17 % (from 1.5 to 1.75 activations per all-reduce) while compute per rank halves.
#
# Tensor parallelism alone does *not* divide activations by $t$: norms, residuals and the regions' inputs stay whole. One
# layer of GPT-3 in 16 bits, one sequence, by the formulas of
# [Korthikanti et al. 2022](https://arxiv.org/abs/2205.05198), with stored attention scores and without:

# %%
receipts.gpt3_activations()

# %% [markdown]
# At $s = 2048$ the scores $5as/h$ are 70 % of what one GPU keeps. FlashAttention recomputes them in backward from the
# row sums, so what is left grows linearly with the sequence.
#
# ## Measure: the whole step

# %%
wider = Setup(4, config=experiments.replace(MODEL, intermediate_size=320))
setups = {"4 ranks": Setup(4), "twice the batch": Setup(4, rows=8), "twice the MLP": wider}
found = experiments.compare([*setups.values(), *receipts.EXACT])
receipts.step(setups, found)

# %% [markdown]
# Twice the batch sends twice the bytes; an MLP twice as wide sends not one byte more. The loss has two small collectives
# of its own:

# %%
receipts.loss(found[Setup(4)][0])

# %% [markdown]
# In float64, gradients assembled from the ranks' parts equal those of one process:

# %%
receipts.float64(found)

# %% [markdown]
# ## Measure: the overlap on a clock
#
# Backward is exercise 7, four column layers deep: both products take 20 ms and the all-reduce 18 ms on an *emulated*
# link.

# %%
clocks = links.overlap_on_a_clock()
show(figures.draw_overlap, found=clocks)

# %% [markdown]
# In the forward pass the next layer needs the sum, so a row layer as a whole has nothing to overlap with. But its
# *tokens* can be cut into pieces: while the sum of one piece travels, the next is computed. Megatron
# (`--tp-comm-overlap`) and [torch's async TP](https://discuss.pytorch.org/t/209487) do this. Below, the product takes 100
# ms and the all-reduce 82 ms in all.

# %%
receipts.overlap(clocks, links.forward_on_a_clock())

# %% [markdown]
# Each piece costs its own latency and a smaller, slower product. Without this, at least half of what a layer sends is
# exposed. A layer on a GPU that reaches 400 TFLOP/s, 4,096 tokens, backward overlapped and forward not:

# %%
show(figures.time_per_layer)

# %%
sliders(
    figures.time_per_layer,
    tp=[2, 4, 8, 16, 32, 64],
    hidden=(1024, 16384, 1024),
    gb_per_s=(10, 900, 10),
)

# %% [markdown]
# Move the bandwidth to 50 GB/s, a good network between nodes, and then hidden to 2,048: communication dominates.
#
# ## Break it
#
# Three accidents and a bug to find. None raises an error.
#
# ### Norm gradients not summed
#
# Under sequence parallelism each rank's norm weights saw other tokens. Real code bases left the sum out
# ([gpt-neox#1257](https://github.com/EleutherAI/gpt-neox/issues/1257),
# [Megatron-LM#1446](https://github.com/NVIDIA/Megatron-LM/issues/1446)). Does the loss show it?

# %%
accidents = launch(experiments_breaks.all_accidents, 4, device="cpu")
norms = [rank["norms"] for rank in accidents]
receipts.norm_gradients(norms)

# %% [markdown]
# The loss differs in the third decimal place. The supposed replicas are now four different vectors, and the checkpoint
# stores whichever rank writes last. The same holds for kv heads held twice and for norms on heads. (A row layer's bias
# added before the sum is a related bug: it counts $t$ times.)
#
# ### Rows not masked
#
# An embedding that clamps foreign ids into its own rows instead of returning zeros for them adds four rows per token
# instead of one:

# %%
receipts.unmasked(accidents[0]["embedding"])

# %% [markdown]
# It still learns, since the foreign rows act like a bias that depends on the rank holding the token. A *loaded* model
# gets embeddings whose error is larger than they are.
#
# ### Counted once per rank
#
# Clipping needs the norm of the whole gradient. Some parameters are cut and some are on every rank.

# %%
receipts.grad_norm([rank["norm"] for rank in accidents])

# %% [markdown]
# With local norms every rank clips by another factor, and replicas drift. With all squares added, replicated parameters
# count $t$ times: a small error here, where only the norms are replicated, and a large one with a replicated embedding
# ([Megatron-LM#5916](https://github.com/NVIDIA/Megatron-LM/issues/5916)). Count each part once: minillm's
# `grad_norm` divides a square by the number of ranks that hold the same part.
#
# ### Find the bug
#
# A colleague's MLP trains, but worse with more ranks. `copy_to` and `reduce_from` are your `Enter` and
# `Leave`. Beside one process:

# %%
print(inspect.getsource(experiments_breaks.suspect_mlp))
errors = experiments_breaks.bug_hunt(cut_mlp, experiments_breaks.suspect_mlp)
receipts.bug_hunt(errors)

# %% [markdown]
# Output and weight gradients are exact, and something is wrong. Name the line, and say which gradients of a whole
# transformer would be wrong. Then compare your own.
#
# <details><summary>Answer</summary>
#
# `x @ up.T` reads `x` without `copy_to`, so the part of $dX$ that comes through `up` is never summed. Each
# rank hands a different $dX$ to the layers before it: everything *before* the last MLP gets wrong gradients, and
# replicated parameters drift apart, while the last layer's own weights look perfect. Enter once and use the result for
# both products.
# </details>

# %%
receipts.without_the_bug(experiments_breaks.bug_hunt(cut_mlp, mlp))

# %% [markdown]
# ## Where it loses
#
# ### Layers that are not paired
#
# Used alone, the column layer gathers its output and the row layer cuts it again. The values are the same; the bytes for
# 32 tokens, $h = 16$ and $f = 64$:

# %%
receipts.unpaired(launch(links.pairs, 4, device="cpu")[0])

# %% [markdown]
# ### A slow link
#
# The same batch on 2 ranks, divided by weights or by rows, over an *emulated* link of 6 MB/s:

# %%
slow = links.over_a_slow_link()
show(figures.draw_slow_link, numbers=slow)

# %%
receipts.slow_link(slow)

# %% [markdown]
# Data parallelism sends the gradients once, whatever the batch. Tensor parallelism's traffic grows with the tokens, and
# little of it can be hidden. In layers of $12h^2$ weights the bytes are equal at $T = 3h$ tokens, and equal to FSDP's
# $3 \cdot 12h^2$ at $4.5h$.
#
# ## The same in production
#
# torch's [DTensor](https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html): weights become tensors that
# know how they are cut, and `parallelize_module` takes a plan of `ColwiseParallel` and `RowwiseParallel`. The same model
# and tokens on 2 ranks. DTensor knows nothing of minillm's ledger, so the bytes come from the loopback counter.

# %%
print(inspect.getsource(experiments_torch.separate))
receipts.peers(experiments_torch.peers())

# %% [markdown]
# - **Each layer for itself**, as tutorials write the plan: q, k and v each all-reduce their own $dX$, and so do gate
#   and up. 7 all-reduces per layer instead of 4. Your `Enter` is shared; so is `PrepareModuleInput` in the second plan.
# - **Sequence parallel**: gloo carries out a reduce-scatter as an all-reduce, so it sends half as much again here. With
#   NCCL and with minillm's rings it sends what the second plan does.
#
# | torch / Megatron / vLLM | here |
# |---|---|
# | `ColwiseParallel`, `RowwiseParallel`; `--tensor-model-parallel-size`; `--tensor-parallel-size` | `tensor_parallel` |
# | `SequenceParallel()`, Megatron `--sequence-parallel` | `tensor_parallel(sequence=True)` |
# | `loss_parallel()`, Megatron `vocab_parallel_cross_entropy` | `vocab_parallel_cross_entropy` |
# | Megatron `_allreduce_non_tensor_model_parallel_grads` (once `_allreduce_layernorm_grads`) | `sum_partial` |
#
# ## On a cluster
#
# `labs/torchrun/05_tensor_parallel.py` runs the MLP, the embedding, the loss and sequence parallelism on any number of
# processes. After solving it: `torchrun --nproc-per-node 8 labs/torchrun/05_tensor_parallel.py`.
#
# ## Design questions
#
# Work each one out on paper, then run the cell below it.
#
# **A. You train 70B parameters (80 layers, hidden 8,192) on sequences of 4,096. Within a node of 8 GPUs the links give
# 400 GB/s, between nodes 50 GB/s; a GPU reaches 400 TFLOP/s. Tensor parallelism over 4, 8 or 16?**

# %%
receipts.design_degree()

# %% [markdown]
# <details><summary>Answer</summary>
#
# Not 16: the ring crosses the slow link, three quarters of the layer is exposed, and it takes longer than with 4. From 4
# to 8 the layer is nearly twice as fast while the exposed share grows from 4 to 11 %, so 8 is good if latency, the
# activations or the 1,120 GB of states ask for it (with lab 06's stages or lab 04's ZeRO beside it). Otherwise 4 wastes
# less of each GPU.
# </details>
#
# **B. Serve the same model in bf16 (140 GB of weights, 64 heads, 8 kv heads of 128) on GPUs of 80 GB and 3.35 TB/s, at a
# p99 of 50 ms per output token, for 128 sequences of 4,096 tokens at once. TP 4 or TP 8?** An all-reduce of a decoding
# step takes about 10 µs plus its bytes at 400 GB/s.

# %%
receipts.design_serving()

# %% [markdown]
# <details><summary>Answer</summary>
#
# TP 4 has room for 110 of the 128 sequences, so it fails on memory, not on time. TP 8 has room for 325 and takes 15 ms per
# token. TP 16 is only 17 % faster on twice the GPUs: 8 kv heads cannot be divided further, so each is held twice. The
# slack between 15 and 50 ms is what prefills of new requests may use.
# </details>
#
# ## Capstone (*open*)
#
# Take a model and a cluster you know (hidden size, layers, tokens per microbatch, GPUs per node, both bandwidths). Choose
# tensor, sequence and pipeline degrees, defend them with `predict.training.tensor.layer_bytes`, `predict.training.tensor.activation_bytes`
# and `pictures.layer_seconds`, and name the measurement that would prove you wrong first.
#
# ## Interview corner
#
# Say your answer aloud before you open one.
#
# **1. Where exactly does tensor parallelism communicate?**
# <details><summary>Answer</summary>
#
# Forward: after o_proj and after down_proj. Backward: before q, k, v together and before gate and up together, where
# $dX$ leaves. That is 4 all-reduces of [B, S, H] per layer and microbatch, each sending 2(t-1)/t of it per rank. One more
# forward for the embedding, one more backward for the head, three numbers per token for the loss.
# </details>
#
# **2. TP or FSDP within a node?**
# <details><summary>Answer</summary>
#
# Per layer FSDP moves $3 \cdot 12h^2$ elements whatever the tokens, TP $4 \cdot 2 \cdot T h$: equal at $T = 4.5h$ tokens
# per group, 36,864 at h = 8192. Above that FSDP sends less, and it hides better, since gathers do not depend on what is
# computed. TP wins with few tokens, and it also divides activations and the gathered layer.
# </details>
#
# **3. Why is TP usually kept inside the node?**
# <details><summary>Answer</summary>
#
# Its all-reduces are in the critical path, twice forward in every layer. Backward they hide behind $dW$; forward only if
# the products are cut into pieces. At 400 GB/s and h = 8192 about a tenth of a layer is exposed on 8 GPUs, at 50 GB/s more
# than half. Wide models and fast domains of more than 8 GPUs move that limit.
# </details>
#
# **4. Your run trains fine, but the checkpoint evaluates to a slightly different loss than training reported. Ideas?**
# <details><summary>Answer</summary>
#
# Replicas that drifted: norm or kv-head gradients not summed, dropout with different seeds where masks must be equal (or
# equal seeds inside the regions, where they must differ), clipping by local norms. Compare replicated parameters across
# ranks bit by bit.
# </details>
#
# ## Can you answer them now?
#
# 1. Why does a layer need exactly 2 all-reduces forward and 2 backward, and what do they grow with?
# 2. What does sequence parallelism divide that tensor parallelism does not, and why does it send nothing more?
# 3. Which gradients are only partial sums once a model is cut this way, and what happens if nobody adds them up?
#
# Next: [06 · Pipeline parallelism](06_pipeline_parallel.ipynb) cuts the model between its layers, where little is sent and some stage always waits.

# %%
finish("05_tensor_parallel")
