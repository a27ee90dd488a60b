# %% [markdown]
# # 05 · Tensor parallelism
#
# **A column layer and then a row layer need one all-reduce.** Here you cut a transformer along its matrices, and see
# that this is all it sends.
#
# About 115 minutes with the exercises; running it top to bottom takes under a minute. At the end you can answer:
#
# 1. Why does a layer need exactly 2 all-reduces forward and 2 backward, and what do they grow with?
# 2. What does sequence parallelism divide that tensor parallelism does not, and why does it send nothing more?
# 3. Which gradients are only shares once a model is cut this way, and what happens if nobody adds them up?
#
# Data parallelism and ZeRO give each rank other *tokens* and, when it computes, the whole model. Tensor parallelism
# (Shoeybi et al. 2019, Megatron-LM) gives every rank the same tokens and a part of every *weight*. ("To distribute the
# model across GPUs" is this lab's idea. It is sometimes said of data parallelism, which distributes the data.) No rank
# ever has a whole matrix, not even for a moment.
#
# The calls of `group`, and what each returns: [docs/group.md](../docs/group.md).

# %%
import inspect

import torch
import torch.nn.functional as F

from course.lab05_tensor_parallel import experiments
from course.lab05_tensor_parallel import experiments_breaks as breaks
from course.lab05_tensor_parallel import experiments_links as links
from course.lab05_tensor_parallel import experiments_torch as peers
from course.lab05_tensor_parallel import figures as pictures
from course.lab05_tensor_parallel.experiments import FORMS, MODEL, SEQ, Setup
from course.lab05_tensor_parallel.splitting_order import normalise
from minillm.comm import launch
from minillm.labkit import check, receipt, row, show, sliders
from minillm.labkit.receipts import format_value
from minillm.model import Transformer
from minillm.predict import comms
from minillm.predict import tensor as predict

# %% [markdown]
# ## What is there to cut?
#
# A linear layer is $Y = XW$. Cut $W$ by *columns*, and rank $r$ can make its columns of $Y$ from the whole $X$, asking
# nobody. Cut it by *rows*, and a rank that has the matching columns of $X$ makes a $Y$ of full size that is only one
# share of a sum. (torch stores $W^\top$: columns of $W$ are the first dimension of `weight`, rows the second.)
#
# Alone, each is expensive: after a column layer the ranks would have to gather $Y$, after a row layer to all-reduce it,
# which sends twice as much as a gather. The trick is the *pair*. A column layer leaves its output cut exactly the way
# the row layer behind it wants its input. Nothing is gathered in between.

# %%
show(pictures.who_holds_what)

# %%
sliders(pictures.who_holds_what, ranks=(1, 6), sequence=False)

# %% [markdown]
# What is cut are the weights, and with them the activations *inside* the pairs. (That TP "splits the activations" is
# only half true: what lies between the pairs is whole on every rank. Later in this lab you cut that, too.)
#
# ## Predict
#
# **GPT-3 has 96 layers and a hidden size of 12,288. It trains on 32 sequences of 2,048 tokens in 16 bits, with tensor
# parallelism over 8 GPUs. How many GB does each GPU send per step?** Write down your guess. (The one below says: as
# much as it has weights.)

# %%
guess_gb = 175 * 2  # your guess

# %%
per_layer = predict.layer_bytes(32, 2048, 12288, 2, 8)
receipt(
    "GPT-3, tensor parallelism over 8 GPUs",
    [
        row("your guess: sent per GPU and step", None, guess_gb, "GB"),
        row("one activation [32, 2048, 12288] in 16 bits", None, 32 * 2048 * 12288 * 2 / 1e9, "GB"),
        row("4 all-reduces of it in each of 96 layers: 4·L·2(t-1)/t·BSH·b", None, 96 * per_layer / 1e9, "GB"),
        row("the same for 64 sequences", None, 96 * predict.layer_bytes(64, 2048, 12288, 2, 8) / 1e9, "GB"),
        row("data parallelism over 8 GPUs would send, whatever the batch", None, 2 * 7 / 8 * 350, "GB"),
    ],
)

# %% [markdown]
# The traffic grows with the batch and not with the weights: that TP were "good for large batches" is the wrong way
# round. (These are bytes *sent*; as many are received. Tables that add both up, or that put a total over all devices
# beside numbers per device, mislead by a factor.)
#
# ## Build it
#
# ### 1. Into the region and out of it
#
# A pair begins where the column layer reads $X$, which all ranks have, and ends where the row layer's shares are added
# up. Megatron calls the two ends $f$ and $g$. Each is the identity in one direction and an all-reduce in the other.
# Which?


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
        """gradient: of what this rank's column layers read -> the gradient of x, and None for the group."""
        # BEGIN SOLUTION
        return ctx.group.all_reduce(gradient.clone()), None
        # END SOLUTION


class Leave(torch.autograd.Function):
    """g: shares of a sum leave the parallel region."""

    @staticmethod
    def forward(ctx, share, group):
        """share: [...], this rank's -> their sum, on every rank."""
        # BEGIN SOLUTION
        return group.all_reduce(share.clone())
        # END SOLUTION

    @staticmethod
    def backward(ctx, gradient):
        """gradient: of the sum, the same on every rank -> the gradient of this rank's share, and None."""
        # BEGIN SOLUTION
        return gradient, None
        # END SOLUTION


Enter, Leave = check("conjugate-operators", (Enter, Leave))

# %% [markdown]
# So a row layer's backward pass communicates *nothing*: $dX_r = dY\,W_r^\top$, and every rank has $dY$. It does not
# "mirror" the forward pass. The all-reduce of the backward pass belongs to the column layer: each rank's $dX$ went
# through its own columns only. $dW$ is local in both.
#
# ### 2. The MLP
#
# $\text{down}\big(\text{silu}(\text{gate}\,x)\cdot\text{up}\,x\big)$. How do you cut three matrices so that there is
# one all-reduce forward and one backward?


# %%
def cut_mlp(gate, up, down, rank, world_size):
    """gate, up: [f, h], down: [h, f] -> this rank's part of each; f is divisible by world_size."""
    # BEGIN SOLUTION
    return gate.chunk(world_size)[rank], up.chunk(world_size)[rank], down.chunk(world_size, dim=1)[rank]
    # END SOLUTION


def mlp(x, shards, group):
    """x: [n, h], the same on every rank -> [n, h], the same on every rank. shards: what cut_mlp gave this rank."""
    # BEGIN SOLUTION
    gate, up, down = shards
    x = Enter.apply(x, group)
    return Leave.apply((F.silu(x @ gate.T) * (x @ up.T)) @ down.T, group)
    # END SOLUTION


cut_mlp, mlp = check("parallel-mlp", (cut_mlp, mlp))

# %% [markdown]
# It works because silu looks at single numbers. Cut gate and up by rows first, and silu of a *share* would be wrong:
# it would have to wait for an all-reduce.
#
# ### 3. Attention
#
# Heads are to attention what inner numbers are to the MLP. One thing is new: with grouped-query attention there are
# fewer kv heads than query heads, and perhaps fewer than ranks. Query head $j$ reads kv head
# $\lfloor j\,H_{kv}/H \rfloor$.


# %%
def local_heads(num_heads, num_kv_heads, rank, world_size):
    """-> (query heads, kv heads) of this rank, as ranges. Ranks take query heads in order, each as many, and the kv
    heads that these read, no others. Fewer kv heads than ranks: several ranks hold the same one."""
    # BEGIN SOLUTION
    queries = range(rank * num_heads // world_size, (rank + 1) * num_heads // world_size)
    served = num_heads // num_kv_heads
    return queries, range(queries.start // served, (queries.stop - 1) // served + 1)
    # END SOLUTION


def attention(x, shards, attend, group):
    """x: [n, h] -> [n, h]. shards: this rank's q, k, v (rows of its heads) and o (columns of them);
    attend(q, k, v) computes softmax(q kᵀ) v of the heads it is given."""
    # BEGIN SOLUTION
    q, k, v, o = shards
    x = Enter.apply(x, group)
    return Leave.apply(attend(x @ q.T, x @ k.T, x @ v.T) @ o.T, group)
    # END SOLUTION


local_heads, attention = check("parallel-attention", (local_heads, attention))

# %% [markdown]
# A kv head that two ranks hold answers only half of its queries on each, so its gradient there is a *share*: somebody
# has to add the two up. (The check did it for you. You will meet such shares again.)
#
# ### 4. The embedding
#
# The vocabulary is cut by rows. A token's row lies on one rank; the others must not guess.


# %%
def embed(tokens, rows, group):
    """tokens: [n] of ids; rows: [V/t, h], this rank's: ids from rank·V/t on -> [n, h], the same on every rank."""
    # BEGIN SOLUTION
    local = tokens - group.rank * len(rows)
    outside = (local < 0) | (local >= len(rows))
    found = F.embedding(local.masked_fill(outside, 0), rows)
    return Leave.apply(found.masked_fill(outside[:, None], 0.0), group)
    # END SOLUTION


embed = check("vocabulary-embedding", embed)

# %% [markdown]
# ### 5. The loss
#
# The head is a column layer: each rank has the logits of its part of the vocabulary. Gathering them would send $V$
# numbers per token, the largest tensor of all. How few are enough?


# %%
def vocabulary_cross_entropy(logits, targets, group):
    """logits: [n, V/t], this rank's part of the vocabulary; targets: [n] of ids -> -log p(target): [n].

    Logits may be large. The gradient of `logits` must come out right, without communication.
    """
    # BEGIN SOLUTION
    highest = group.all_reduce(logits.detach().amax(dim=1), op="max")
    logits = logits - highest[:, None]
    local = targets - group.rank * logits.shape[1]
    outside = (local < 0) | (local >= logits.shape[1])
    picked = logits.gather(1, local.masked_fill(outside, 0)[:, None])[:, 0].masked_fill(outside, 0.0)
    total, target = Leave.apply(torch.stack([logits.exp().sum(dim=1), picked]), group)
    return total.log() - target
    # END SOLUTION


vocabulary_cross_entropy = check("vocabulary-cross-entropy", vocabulary_cross_entropy)

# %% [markdown]
# ### 6. Sequence parallelism
#
# Between the pairs every rank still holds, and computes, the same norms and the same residual stream. An all-reduce is
# a reduce-scatter and then an all-gather (lab 01). Put the first half where a region ends and the second where the next
# one begins, and what lies between is cut along the *sequence* (Korthikanti et al. 2022). A norm looks at one token at
# a time: it needs no communication. One thing of it does: what?


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
    """parameters: of norms; each .grad comes from this rank's tokens. Afterwards, from all. In place."""
    # BEGIN SOLUTION
    flat = group.all_reduce(torch.cat([p.grad.flatten() for p in parameters]))
    for p, total in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad.copy_(total.view_as(p.grad))
    # END SOLUTION


GatherIn, ScatterOut, sum_norm_gradients = check("sequence-parallel", (GatherIn, ScatterOut, sum_norm_gradients))

# %% [markdown]
# That "layer normalization requires communication across sequence shards" is wrong for its activations, forward and
# backward, and right for its weight gradients. And Megatron's sequence parallelism uses an all-gather *and* a
# reduce-scatter; context parallelism (lab 07), which cuts attention as well, uses others.
#
# ### 7. Hide it
#
# A column layer's backward has two products, $dX$ and $dW$. Only one of them travels.


# %%
class ColumnLinear(torch.autograd.Function):
    """x Wᵀ with this rank's rows of W, and f in it."""

    @staticmethod
    def forward(ctx, x, weight, group):
        """x: [n, h], the same on every rank; weight: [f/t, h] -> this rank's columns of the output: [n, f/t]."""
        # BEGIN SOLUTION
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return x @ weight.T
        # END SOLUTION

    @staticmethod
    def backward(ctx, gradient):
        """-> gradients of x (summed over the ranks) and of weight, and None. The sum travels while dW is computed."""
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
# ## Yours under a transformer
#
# Your pieces, put together: a small transformer cut over 4 ranks, trained beside minillm's in one process. Every weight
# of it is cut except the norms. The losses must be the same.


# %%
def train_with_mine(group, steps, lr):
    c, n, rank = MODEL, group.world_size, group.rank
    whole = {name: p.detach() for name, p in Transformer(c, seed=0).named_parameters()}
    queries, keys = local_heads(c.num_heads, c.num_kv_heads, rank, n)
    q, kv = (slice(r.start * c.head_dim, r.stop * c.head_dim) for r in (queries, keys))

    def own(part):
        return part.clone().requires_grad_()

    ends = [own(whole[name].chunk(n)[rank]) for name in ("embedding.weight", "head.weight")]
    last, layers = own(whole["norm.weight"]), []
    for i in range(c.num_layers):
        w = {name.split(".", 2)[2]: part for name, part in whole.items() if name.startswith(f"blocks.{i}.")}
        heads = [w["attention.q_proj.weight"][q], w["attention.k_proj.weight"][kv], w["attention.v_proj.weight"][kv]]
        heads.append(w["attention.o_proj.weight"][:, q])
        inner = cut_mlp(*(w[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down")), rank, n)
        norms = w["attention_norm.weight"], w["mlp_norm.weight"]
        layers.append(([own(part) for part in heads], [own(part) for part in inner], [own(part) for part in norms]))
    optimizer = torch.optim.AdamW([*ends, last, *(part for layer in layers for kind in layer for part in kind)], lr=lr)
    losses = []
    for step in range(steps):
        batch = experiments.tokens(4, step)
        x = embed(batch[:, :-1].flatten(), ends[0], group)
        for heads, inner, norms in layers:
            x = x + attention(normalise(x, norms[0]), heads, experiments.attend, group)
            x = x + mlp(normalise(x, norms[1]), inner, group)
        logits = Enter.apply(normalise(x, last), group) @ ends[1].T
        loss = vocabulary_cross_entropy(logits, batch[:, 1:].flatten(), group).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


alone = experiments.train_alone(3, 3e-3)
mine = launch(train_with_mine, 4, 3, 3e-3, device="cpu")[0]
receipt(
    "loss with your pieces on 4 ranks, beside minillm's model in one process",
    [row(f"step {step}", *both, tolerance=1e-4) for step, both in enumerate(zip(alone, mine, strict=True))],
)

# %% [markdown]
# ## Measure: what a layer sends and keeps
#
# From here on, minillm's own (`minillm/parallel/tensor_parallel/layers.py`; `regions.py`, `vocab.py` and `sequence.py`
# beside it are your exercises): `tensor_parallel` cuts a `Transformer` in place, in three forms. *Tensor* is what you
# have built; *sequence* cuts what lies between; *regather* does too, and keeps of a region's input only 1/t, so that
# backward has to gather it once more for $dW$ (Megatron does that). This is the rank program:

# %%
print(inspect.getsource(experiments.step))

# %% [markdown]
# One layer's part of it is a model of four layers minus a model of three.

# %%
setups = [Setup(n, form) for n in (2, 4) for form in FORMS]
lines = experiments.per_layer(setups)
expected = {
    "tensor": ("2 all_reduce", "2 all_reduce"),
    "sequence": ("2 all_gather, 2 reduce_scatter", "2 all_gather, 2 reduce_scatter"),
    "regather": ("2 all_gather, 2 reduce_scatter", "4 all_gather, 2 reduce_scatter"),
}
rows = []
for setup, line in lines.items():
    name = f"{FORMS[setup.form]}, t={setup.world_size}"
    forward, backward = expected[setup.form]
    rows.append(row(f"{name}: forward", forward, experiments.listed(line["forward"])))
    rows.append(row("    backward", backward, experiments.listed(line["backward"])))
    rows.append(row("    bytes sent per rank", experiments.layer_bytes(setup), line["sent"], "B"))
    rows.append(row("    bytes kept for backward", experiments.layer_activation_bytes(setup), line["activation"], "B"))
receipt(f"one layer, {4 * SEQ} tokens", rows)


# %%
def one_layer():
    """What one layer sends and keeps per rank in three forms, on 2 and 4 ranks: predicted and measured."""
    return pictures.draw_layer(lines, experiments.layer_activation_bytes(Setup(1)))


show(one_layer)

# %% [markdown]
# Exact, to the byte. 4 collectives per layer; $4\cdot 2\frac{t-1}{t}\,BSH\,b$ bytes, with sequence parallelism too.
# From 4 to 8 ranks they grow from 1.5 to 1.75, "unchanged" only in the sense of a limit, while compute halves.
#
# Tensor parallelism does *not* divide activations by $t$: norms, residuals and the regions' inputs stay whole. For a
# layer of GPT-3 in 16 bits, by the paper's formulas:

# %%
gpt3 = {"batch": 1, "seq": 2048, "hidden": 12288, "heads": 96}
rows = [
    row("one GPU: sbh(34 + 5as/h)", None, predict.activation_bytes(**gpt3) / 1e9, "GB"),
    row("TP over 8: sbh(10 + 24/t + 5as/(ht))", None, predict.activation_bytes(**gpt3, world_size=8) / 1e9, "GB"),
    row("    an eighth would be", None, predict.activation_bytes(**gpt3) / 8e9, "GB"),
    row("with sequence parallelism", None, predict.activation_bytes(**gpt3, world_size=8, sequence=True) / 1e9, "GB"),
]
receipt("activations of one layer of GPT-3, one sequence", rows)

# %% [markdown]
# ## Measure: the whole step

# %%
wider = Setup(4, config=experiments.replace(MODEL, intermediate_size=320))
others = {"4 ranks": Setup(4), "twice the batch": Setup(4, rows=8), "twice the MLP": wider}
exact = [Setup(n, form, exact=True) for n in (1, 2, 4) for form in FORMS if n > 1 or form == "tensor"]
found = experiments.compare([*others.values(), *exact])
rows = []
for name, setup in others.items():
    ranks = found[setup]
    rows.append(row(f"{name}: sent per rank and step", experiments.step_bytes(setup), ranks[0].sent, "B"))
    rows.append(row("    weights per rank", experiments.parameter_bytes(setup), ranks[0].parameter, "B"))
first = found[Setup(4)][0]
activation = (Setup(4).rows, SEQ, MODEL.hidden_size)
rows += [
    row(
        "all-reduces of [batch, seq, hidden] forward: 2L and the embedding's",
        7,
        first.forward.shapes["all_reduce", activation],
    ),
    row("    backward: 2L and the head's", 7, first.backward.shapes["all_reduce", activation]),
]
receipt(f"a step of {MODEL.num_layers} layers", rows)

# %% [markdown]
# Twice the batch, twice the bytes; twice the weights in the MLP, not one byte more.
#
# The loss has two small collectives of its own. Per token:

# %%
small = [shape for _, shape in first.forward.shapes if shape != activation]
numbers = sum(torch.Size(shape).numel() for shape in small) / Setup(4).tokens
gathered = predict.gathered_logits_bytes_per_token(MODEL.vocab_size, 4)
receipt(
    "the loss, per token",
    [
        row("numbers in its all-reduces: maximum, sum, target's logit", 3, numbers),
        row(
            "bytes sent per rank",
            predict.loss_bytes_per_token(4),
            experiments.step_bytes(Setup(4), "loss") / Setup(4).tokens,
            "B",
        ),
        row("    gathering the logits would send, at V = 256", None, gathered, "B"),
        row("    at V = 128,000", None, predict.gathered_logits_bytes_per_token(128_000, 4), "B"),
    ],
)

# %% [markdown]
# And is it the same function? In float64, gradients put together from the ranks' parts, beside one process:

# %%
one = found[exact[0]][0]
rows = []
for setup in exact[1:]:
    ranks, name = found[setup], f"{FORMS[setup.form]}, t={setup.world_size}"
    error = experiments.gradient_error(setup, ranks, one)
    rows.append(row(f"{name}: loss", one.loss, ranks[0].loss, "", 1e-12))
    rows.append(row("    largest relative error of a gradient below 1e-10", True, error < 1e-10))
    rows.append(row("    collectives for norm gradients", int(setup.sequence), ranks[0].sums.calls.total()))
receipt("float64", rows)

# %% [markdown]
# ## Measure: layers alone

# %%
single = launch(experiments.single_layers, 4, device="cpu")[0]
rows = []
for name, (forward, backward) in {
    "column layer": ("none", "1 all_reduce"),
    "row layer": ("1 all_reduce", "none"),
    "norm on 1/t of the tokens": ("none", "none"),
}.items():
    rows.append(row(f"{name}: forward", forward, single[name][0]))
    rows.append(row("    backward", backward, single[name][1]))
receipt("collectives", rows)

# %% [markdown]
# ## Measure: the overlap on a clock
#
# Exercise 7, four column layers deep. Both products take 20 ms and the all-reduce 18 ms on an *emulated* link.

# %%
clocks = links.overlap_on_a_clock()


def backward_with_and_without_overlap():
    """Timeline of rank 0's backward pass: all-reduces waited for at once, and under way while dW is computed."""
    return pictures.draw_overlap(clocks)


show(backward_with_and_without_overlap)

# %%
receipt(
    "backward of four column layers, emulated",
    [row(name, n["predicted_s"], n["measured_s"], "s", tolerance=0.3) for name, n in clocks.items()],
)

# %% [markdown]
# Forward has no such luck: the next layer needs the sum. So at least half of what a layer sends is waited for. Put
# together for a GPU that reaches 400 TFLOP/s, with one sequence of 4,096 tokens:

# %%
show(pictures.time_per_layer)

# %%
sliders(pictures.time_per_layer, tp=[2, 4, 8, 16, 32, 64], hidden=(1024, 16384, 1024), gb_per_s=(10, 900, 10))

# %% [markdown]
# Move the bandwidth to 50 GB/s, a good network between nodes. Then hidden to 2,048. Both ruin it.
#
# ## Break it
#
# Three accidents. None raises an error. One launch commits them all.

# %%
accidents = launch(breaks.all_accidents, 4, device="cpu")

# %% [markdown]
# ### Norm gradients not summed
#
# Under sequence parallelism each rank's norm weights saw other tokens. Leave the sum out, as several real code bases
# did (gpt-neox#1257, PaddleNLP#7610, Megatron-LM#1446). Predict: does the loss show it?

# %%
norms = [rank["norms"] for rank in accidents]
losses = {name: norms[0][name]["losses"] for name in ("summed", "forgotten")}
receipt(
    f"{breaks.STEPS} steps with sequence parallelism on 4 ranks",
    [
        row("norm weights, summed: furthest from rank 0's", 0.0, max(rank["summed"]["apart"] for rank in norms)),
        row("norm weights, forgotten: furthest from rank 0's", 0.0, max(rank["forgotten"]["apart"] for rank in norms)),
        row("last loss, summed", None, losses["summed"][-1]),
        row("last loss, forgotten", None, losses["forgotten"][-1]),
        row("a rank's own gradient of the last norm: cosine with the sum", None, norms[1]["forgotten"]["cosine"]),
    ],
)

# %% [markdown]
# The loss differs in the third decimal place. What are called replicas are now four different vectors; whichever rank
# writes the checkpoint wins. (One verdict is off; that is the point.) The same holds for kv heads with copies, for the
# biases of row layers if added before the sum, and for norms on heads.
#
# ### Rows not masked
#
# An embedding that clamps foreign ids into its own rows, instead of putting zeros:

# %%
rows_added = accidents[0]["embedding"]
masked, unmasked = rows_added["masked"], rows_added["unmasked"]
receipt(
    "the vocabulary's rows on 4 ranks",
    [
        row("rows added up per token", 1, rows_added["rows added per token"]),
        row("relative error of the embeddings", None, rows_added["relative error"]),
        row("first loss, beside the right one", masked[0], unmasked[0], "", 1e-5),
        row(f"loss after {breaks.STEPS} steps", masked[-1], unmasked[-1], "", 1e-5),
    ],
)

# %% [markdown]
# Three foreign rows on top of the right one, and it still learns: which foreign rows they are depends only on the rank
# that holds the token, so they act like a bias. A fresh model hides this bug behind a loss that falls. A *loaded* one
# gets embeddings whose error is larger than they are.
#
# ### Counted once per rank
#
# The norm of the whole gradient, for clipping: add all ranks' squares up, as in lab 04? Here some parameters are cut
# and some are on every rank.

# %%
ways = [rank["norm"] for rank in accidents]
whole, copies = ways[0]["whole"], ways[0]["replicated"]
receipt(
    "gradient norm on 4 ranks",
    [
        row("one process", (one_norm := sum(g.square().sum() for g in one.gradients.values()) ** 0.5), whole, "", 1e-9),
        row("by every rank's own parts", (whole,) * 4, tuple(way["local"] for way in ways)),
        row("all squares added up", whole, ways[0]["naive"], "", 1e-9),
        row(
            "    replicated parameters counted t times: √(norm² + (t-1)·replicated²)",
            (whole**2 + 3 * copies**2) ** 0.5,
            ways[0]["naive"],
            "",
            1e-9,
        ),
    ],
)

# %% [markdown]
# The first mistake lets every rank clip by another factor, so replicas drift. The second is off by a hair here, where
# only the norms are replicated, and by more the more is (a whole embedding, kv copies): NeMo-RL#3788, Megatron-LM#5916.
# Count each part once (minillm's `grad_norm` divides a square by the number of ranks that hold the same part).
#
# ## Where it loses
#
# ### A pair that is none
#
# Layers used alone: the column layer gathers its output, the row layer cuts it again. Same values.

# %%
pairs = launch(links.pairs, 4, device="cpu")[0]
reduce = comms.ring_all_reduce(32 * 16, 4, 4).sent_per_rank[0]
extra = int(predict.unpaired_bytes(1, 32, 64, 4, 4))
receipt(
    "column, GELU, row; 32 tokens, h = 16, f = 64",
    [
        row("paired: forward", reduce, pairs["paired"][0], "B"),
        row("    backward", reduce, pairs["paired"][1], "B"),
        row("gathered in between: forward, one all-gather of [BS, f] more", reduce + extra, pairs["gathered"][0], "B"),
        row("    backward", reduce + extra, pairs["gathered"][1], "B"),
        row("    times as much", None, sum(pairs["gathered"]) / sum(pairs["paired"])),
    ],
)

# %% [markdown]
# A row layer alone does not "avoid an all-gather": it needs an all-reduce, twice as many bytes. The saving is in the
# pairing.
#
# ### A slow link
#
# The same batch on 2 ranks, once divided by weights and once by rows, over an *emulated* link of 6 MB/s.

# %%
slow = links.over_a_slow_link()


def steps_over_a_slow_link():
    """Step time over a slow emulated link by tokens in the batch: tensor parallel grows, data parallel does not."""
    return pictures.draw_slow_link(slow)


show(steps_over_a_slow_link)

# %%
rows = []
for line in slow["rows"]:
    both = tuple(format_value(line[key], "s") for key in ("predicted_s", "measured_s"))
    rows.append(row(f"{line['kind']}, {line['tokens']} tokens: communication by the formula; whole step", None, both))
first, *_, last = (line for line in slow["rows"] if line["kind"] == "tensor")
slopes = [(last[key] - first[key]) / (last["tokens"] - first["tokens"]) for key in ("predicted_s", "measured_s")]
rows.append(row("tensor: what each further token adds", *slopes, "s", tolerance=0.4))
rows.append(row("tokens at which both would send the same", None, links.equal_tokens(MODEL)))
receipt("emulated slow link, 2 ranks: weights divided (tensor), rows divided (data)", rows)

# %% [markdown]
# (The formula is communication alone; compute comes on top.) Data parallelism's line is flat: one all-reduce of the
# gradients. Tensor parallelism's is a rising one, and little of it can be hidden. In layers of $12h^2$ weights the
# bytes cross at $T = 3h$ tokens, and against FSDP's $3 \cdot 12h^2$ at $4.5h$.
#
# ### Small layers
#
# FLOPs per byte sent grow with $h$ (and fall with more ranks); the number of tokens cancels. One block, 256 tokens, on
# the real wires of this machine:

# %%
widths = (64, 512)
seconds = launch(links.small_blocks, 2, widths, device="cpu")[0]
rows = []
for width in widths:
    one_rank, two_ranks = seconds[width]
    rows.append(row(f"h = {width}: FLOPs per byte sent, t=2", 3 * width, links.Small(width).flops_per_byte(2)))
    rows.append(row("    forward and backward on 1 rank", None, one_rank, "s"))
    rows.append(row("    on 2 ranks", None, two_ranks, "s"))
    rows.append(row("    speedup, at best 2", None, one_rank / two_ranks))
receipt("one block, two ranks", rows)

# %% [markdown]
# ## The same in production
#
# torch's DTensor: weights become tensors that know how they are cut, and `parallelize_module` takes a plan of
# `ColwiseParallel` and `RowwiseParallel`. The same model and tokens on 2 ranks. DTensor knows nothing of minillm's
# ledger, so the bytes come from the loopback counter.

# %%
print(inspect.getsource(peers.separate))

# %%
found_by = peers.peers()
ours = found_by.pop(peers.OURS)
expected = experiments.step_bytes(Setup(2, rows=peers.ROWS))
rows = [
    row("minillm: by the ledger", expected, ours["ledger"], "B"),
    row("    on the wire", expected, ours["wire"], "B", tolerance=0.1),
]
for name, peer in found_by.items():
    calls = ", ".join(f"{count} {op}" for op, count in sorted(peer["calls"].items()))
    rows.append(row(f"DTensor, {name}: on the wire", peers.predicted_bytes(name, 2), peer["wire"], "B", tolerance=0.1))
    rows.append(row("    beside minillm's", None, peer["wire"] / ours["wire"]))
    rows.append(row("    collectives", None, calls))
    rows.append(row("    loss", ours["loss"], peer["loss"], "", 1e-5))
receipt(f"sent per rank and step, {peers.ROWS * SEQ} tokens, 2 ranks", rows)

# %% [markdown]
# - **Each layer for itself**, as tutorials write the plan: q, k and v each all-reduce their own $dX$, and so do gate
#   and up. 7 all-reduces per layer instead of 4. Your `Enter` is shared; so is `PrepareModuleInput` in the second plan.
# - **Sequence parallel**: gloo carries out a reduce-scatter as an all-reduce, so it sends half as much again here. With
#   NCCL, and with minillm's rings, it sends what the second plan does.
# - Right losses everywhere. Only the bytes tell the plans apart.
#
# | torch / Megatron / vLLM | here |
# |---|---|
# | `ColwiseParallel`, `RowwiseParallel`; `--tensor-model-parallel-size`; `--tensor-parallel-size` | `tensor_parallel` |
# | `SequenceParallel()`, Megatron `--sequence-parallel` | `tensor_parallel(sequence=True)` |
# | `loss_parallel()`, Megatron `vocab_parallel_cross_entropy` | `vocab_parallel_cross_entropy` |
# | `PrepareModuleInput`, Megatron's fused `linear_qkv` | one `Enter` for q, k, v |
# | Megatron's asynchronous all-reduce of the input gradient (on by default) | `ColumnLinear` of exercise 7 |
# | Megatron `_allreduce_non_tensor_model_parallel_grads` (once `_allreduce_layernorm_grads`) | `sum_partial` |
#
# ## On a cluster
#
# `labs/torchrun/05_tensor_parallel.py` holds the MLP, the embedding, the loss and sequence parallelism for any number
# of processes:
#
# ```bash
# python course/lab05_tensor_parallel/torchrun.py                                   # 4 ranks here
# torchrun --nproc-per-node 4 course/lab05_tensor_parallel/torchrun.py              # the same, under torchrun
# torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d \
#          --rdzv-endpoint $HEAD_NODE:29500 course/lab05_tensor_parallel/torchrun.py   # on each of two nodes
# ```
#
# ## Interview corner
#
# The numbers first, by the formulas you have just checked:


# %%
def number(name, value, unit=""):
    print(f"{name:<72}{format_value(value, unit):>14}")


GB = 1e9
for t in (2, 4, 8):
    number(f"1. all-reduces as multiples of the activation, t = {t}: 2(t-1)/t", 2 * (t - 1) / t)
number(
    "   GPT-3, 32 x 2048 tokens, TP over 8: sent per GPU and step",
    96 * predict.layer_bytes(32, 2048, 12288, 2, 8) / GB,
    "GB",
)
number(
    "2. 70B, 80 layers, h = 8192, one sequence of 4096, TP 8: per layer",
    predict.layer_bytes(1, 4096, 8192, 2, 8) / GB,
    "GB",
)
for bandwidth in (400, 50):
    parts = pictures.layer_seconds(8, 8192, bandwidth)
    waited, compute = parts["all-reduce, waited for"], parts["compute"]
    number(f"   at {bandwidth} GB/s: waited for, of the layer's time", waited / (waited + compute))
number("3. tokens at which FSDP sends less than TP, h = 8192: 4.5 h", 4.5 * 8192)
number("4. logits of 4096 tokens, V = 128,256, bf16", 4096 * 128_256 * 2 / GB, "GB")
number("   numbers per token that have to travel", 3)
one_gpu = predict.activation_bytes(**gpt3)
number("5. activations of a GPT-3 layer: TP 8 / one GPU", predict.activation_bytes(**gpt3, world_size=8) / one_gpu)
number(
    "   with sequence parallelism",
    predict.activation_bytes(**gpt3, world_size=8, sequence=True) / one_gpu,
)
copies = sum(len(local_heads(64, 8, rank, 16)[1]) for rank in range(16))
number("6. Llama-3-70B has 8 kv heads. On 16 ranks, kv heads held in all", copies)
number("7. 70B in bf16, decode, batch 1, 3.35 TB/s: weights read per token", 140 / 3350 * 1e3, "ms")
number("   with TP 8: an eighth, and 160 all-reduces of 16 kB, 10 us each", 140 / 3350 / 8 * 1e3 + 1.6, "ms")

# %% [markdown]
# Say your answer aloud before you open one.
#
# **1. Where exactly does tensor parallelism communicate?**
# <details><summary>Answer</summary>
#
# Forward: behind o_proj and behind down_proj. Backward: behind q, k, v together and behind gate and up together, where
# $dX$ leaves. 4 all-reduces of [B, S, H] per layer and microbatch, each 2(t-1)/t of it per rank. One more forward for
# the embedding, one more backward for the head, three numbers per token for the loss.
#
# *Follow-up: and a row layer's backward?* Nothing. $dY$ is on every rank, $dX_r = dY W_r^\top$ and $dW_r = X_r^\top dY$
# are local.
# </details>
#
# **2. Why not cut the first matrix by rows and the second by columns?**
# <details><summary>Answer</summary>
#
# The first product would be a share of a sum, and silu of a share is not a share of silu: an all-reduce (of f numbers
# per token) before the activation function, and the output cut by columns behind it, to be gathered.
# </details>
#
# **3. TP or FSDP within a node?**
# <details><summary>Answer</summary>
#
# Per layer FSDP moves $3 \cdot 12h^2$ elements whatever the tokens, TP $4 \cdot 2 \cdot T h$: equal at $T = 4.5h$
# tokens per group, 36,864 at h = 8192. Above that FSDP sends less, and it hides better, since gathers do not depend on
# what is computed. TP wins with few tokens, and it divides activations and the gathered layer, too.
# </details>
#
# **4. Why does everybody say "TP inside the node"?**
# <details><summary>Answer</summary>
#
# Its all-reduces sit in the critical path, twice forward in every layer; only the backward ones hide. At 400 GB/s and
# h = 8192 about a tenth of a layer is waiting on 8 GPUs; at 50 GB/s more than half is. So "its cost often outweighs
# its benefits" depends on link and width; and "TP cannot leave the node" is too strong: with large h, or racks that are
# one NVLink domain of 72 GPUs, larger groups work.
#
# *Follow-up: TP 4 to TP 8, what changes?* Compute halves, bytes grow from 1.5 to 1.75 per activation, so the share of
# waiting more than doubles.
# </details>
#
# **5. What does sequence parallelism change?**
# <details><summary>Answer</summary>
#
# Each all-reduce becomes a reduce-scatter at a region's end and an all-gather at the next one's beginning: the same
# bytes. Norms, residuals and dropout are computed and kept 1/t. Activations go from sbh(10 + 24/t + ...) to all of it
# over t. Price: norm gradients are shares, to be summed (one small all-reduce a step); and, if the region's input is
# kept cut as well, one more gather per region.
# </details>
#
# **6. Does LayerNorm need communication then?**
# <details><summary>Answer</summary>
#
# Not for activations: it looks at one token at a time. Its weight's gradient is summed over the group.
# </details>
#
# **7. Your TP run trains fine, but evaluating the checkpoint gives a slightly other loss than training said. Ideas?**
# <details><summary>Answer</summary>
#
# Replicas that drifted: norm gradients not summed, kv copies not summed, dropout with different seeds where it must be
# equal (or equal where it must differ, inside the regions), clipping by local norms. Compare replicated parameters
# across ranks bit by bit: a one-line receipt.
# </details>
#
# **8. How do you compute cross-entropy with a vocabulary cut over 8 ranks?**
# <details><summary>Answer</summary>
#
# All-reduce the maximum, then the sum of exponentials and the target's logit (zero on ranks without it): three numbers
# per token instead of V/t logits to each. Backward is softmax minus one-hot on the own part, no communication. The
# logits of 4,096 tokens at V = 128,256 would be 1.05 GB in bf16.
# </details>
#
# **9. 8 kv heads on 16 ranks?**
# <details><summary>Answer</summary>
#
# Two ranks hold copies of each kv head. Their gradients are shares: each saw only its query heads; sum them within
# the pair. In serving the KV cache no longer shrinks beyond t = 8.
# </details>
#
# **10. Does TP raise throughput or lower latency?**
# <details><summary>Answer</summary>
#
# In decoding it lowers latency on fast links: each rank reads 1/t of the weights (42 ms to about 7 ms for 70B at batch
# 1). Throughput per GPU falls, because of the all-reduces. Pipelines do not lower latency at all.
# </details>
#
# **11. The vocabulary is 50,257 and t = 8. What now?**
# <details><summary>Answer</summary>
#
# Pad the table to a multiple of t (Megatron: of 128·t). Padded logits must be -inf, or they take a share of the
# softmax; padded rows must get no gradient and be cut off in the checkpoint.
# </details>
#
# **12. Dropout in a tensor-parallel model: same or different random numbers on the ranks?**
# <details><summary>Answer</summary>
#
# Both. Outside the regions all ranks compute the same thing, so the same mask; inside, each rank has other columns, so
# different masks (one generator per rank). With sequence parallelism the outside differs, too: other tokens.
# </details>
#
# ## Can you answer them now?
#
# 1. Why does a layer need exactly 2 all-reduces forward and 2 backward, and what do they grow with?
# 2. What does sequence parallelism divide that tensor parallelism does not, and why does it send nothing more?
# 3. Which gradients are only shares once a model is cut this way, and what happens if nobody adds them up?
#
# Next: lab 06 cuts the model across its layers, where almost nothing is sent and somebody always waits.
