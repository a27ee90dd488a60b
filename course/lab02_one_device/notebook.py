# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 02 · One device
#
# **16 bytes per parameter, 6 FLOPs per parameter and token.** Two numbers, and a training step holds no surprise.
#
# About 90 minutes with the exercises; running it top to bottom takes under a minute. At the end you can answer:
#
# 1. What fills the memory of a step, and which part do mixed precision, accumulation and recomputation shrink?
# 2. How many FLOPs does a step need, and what share of the machine does it really use?
# 3. Which silent mistakes of a training loop leave the loss falling, and which receipt shows each?
#
# Every later lab divides what you count here: data parallelism divides tokens, ZeRO the 16 bytes, tensor and pipeline
# parallelism the FLOPs. First, one device.

# %%
import math
import warnings
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from course.lab02_one_device import experiments
from course.lab02_one_device import figures as pictures
from course.lab02_one_device.experiments import flushed_share, repeated_update
from minillm import measure
from minillm.labkit import check, receipt, row, show, sliders
from minillm.model import Transformer, dense
from minillm.predict import memory as predict_memory
from minillm.predict import model as predict
from minillm.train import LossScaler, activation_checkpoint

# %% [markdown]
# ## Predict
#
# Three guesses before anything runs. They come back with the answers.

# %%
guess_bytes = 8  # bytes per parameter that a step holds with bf16 weights (activations apart)
guess_saved = 0.5  # share of the peak memory of a step that autocast to bf16 saves
guess_again = 1.1  # FLOPs of a step in which every block is recomputed, as a multiple

# %% [markdown]
# ## 1 · Memory, by kind, before you see it
#
# A step holds four kinds of bytes: **parameters**, their **gradients**, the **optimizer's** state, and **activations**,
# which are whatever backward will need again. The first three follow from the number of parameters. The fourth follows
# from what each operation keeps: a matmul its input (for the weight's gradient), ReLU its output, an addition nothing.
#
# ### Exercise 1 · the ledger of a step (15 minutes)
#
# The model: `layers` residual blocks `x + down(relu(up(x)))`, without biases, for `tokens` rows of `hidden` numbers;
# `up` is hidden × intermediate. The optimizer is Adam. `mixed`: weights, gradients and activations in 16 bits, and an
# optimizer that keeps its own float32 copy of the weights beside its float32 moments. The check runs the step and
# counts.


# %%
def memory_ledger(hidden, intermediate, layers, tokens, mixed):
    """The most bytes of each kind until backward is done: {"parameter", "gradient", "optimizer", "activation"}."""
    # BEGIN SOLUTION
    weights, width = layers * 2 * hidden * intermediate, 2 if mixed else 4
    return {
        "parameter": width * weights,
        "gradient": width * weights,
        "optimizer": (12 if mixed else 8) * weights,
        "activation": width * tokens * layers * (hidden + intermediate),
    }
    # END SOLUTION


memory_ledger = check("memory-ledger", memory_ledger)

# %%
hidden, intermediate, layers = 1024, 4096, 24
per_weight = {
    mixed: sum(memory_ledger(hidden, intermediate, layers, 0, mixed).values()) / (2 * hidden * intermediate * layers)
    for mixed in (False, True)
}
receipt(
    "bytes per parameter when backward is done",
    [
        row("your guess, 16-bit weights", None, guess_bytes),
        row("float32: 4 + 4 + 8", 16, per_weight[False]),
        row("16 bits with masters: 2 + 2 + 4 + 8", 16, per_weight[True]),
    ],
)

# %% [markdown]
# **Sixteen, twice.** "Mixed precision reduces memory usage", say handbooks. Of what is held between steps it saves
# nothing: the two bytes gained on weights and on gradients are the four bytes of the master copy. And when the masters
# are stepped with float32 gradients, it is 18 for a moment. What shrinks are activations (and traffic, and time).
#
# Now the whole transformer of this course (`minillm/model/transformer.py`; Llama's shape: RMSNorm, rotary positions,
# and SwiGLU, an MLP with a gate), from embedding to loss: `predict.memory` does the same arithmetic for it,
# `measure.memory` watches every tensor of a real step. Three ways to train it:
#
# | | weights | matmuls in | optimizer holds |
# |---|---|---|---|
# | fp32 | float32 | float32 | two moments |
# | autocast bf16 | float32 | bfloat16, by casts | two moments |
# | bf16 + masters | bfloat16 | bfloat16 | float32 masters, two moments |

# %%
measured, predicted = pictures.memories()


def memory_by_kind():
    """Bytes by kind of one training step of the target model, predicted and measured, in three precisions."""
    return pictures.draw_memory(measured, predicted)


show(memory_by_kind)

# %%
rows, psi = [], predict.parameters(experiments.TARGET).total
for name, found in measured.items():
    state = (found.parameter + found.gradient + found.optimizer) / psi
    rows.append(row(f"{name}: bytes per parameter while it steps", 18 if "masters" in name else 16, state, "", 1e-3))
    rows.append(row("    activations", predicted[name].activation, found.activation, "B", 0.02))
    rows.append(row("    peak of the step", predicted[name].total, found.total, "B", 0.02))
receipt(f"{psi:,} parameters, 2 × 256 tokens", rows)

# %%
saved = {name: 1 - found.total / measured["fp32"].total for name, found in measured.items()}
kept = {name: found.activation / measured["fp32"].activation for name, found in measured.items()}
fullest = predict_memory.training_step(experiments.TARGET, 2, 256).fullest
receipt(
    "what 16 bits save",
    [
        row("your guess: peak saved by autocast", None, f"{guess_saved:.0%}"),
        row("autocast: peak saved", None, f"{saved['autocast bf16']:.0%}"),
        row("bf16 + masters: peak saved", None, f"{saved['bf16 + masters']:.0%}"),
        row("autocast: activations left", None, f"{kept['autocast bf16']:.0%}"),
        row("bf16 + masters: activations left", None, f"{kept['bf16 + masters']:.0%}"),
        row("fp32: when the peak comes", "loss", fullest),
    ],
)

# %% [markdown]
# Autocast does not even halve the activations. Norms stay in float32, and so does the residual stream; the output of a
# norm is cast once for each matmul that reads it, and every weight is cast and kept until backward. The black line is
# the peak of everything together. It lies below the sum of the bars, as the kinds peak at different moments:
# activations at the loss, gradients at the end of backward, and temporaries (the logits!) come on top.
#
# What is your model's? Everything below is predicted, with the formulas that were just measured.

# %%
show(pictures.memory_plan)

# %%
sliders(pictures.memory_plan, model=list(pictures.MODELS), batch=(1, 8), seq=[256, 1024, 4096, 16384])

# %% [markdown]
# ## 2 · Six FLOPs per parameter and token
#
# Forward, a weight is multiplied and added once per token: 2 FLOPs. Backward needs two products of the same size, for
# the gradient of the input and for that of the weight: 4. Torch counts the multiplications that really happen:

# %%
config = experiments.SMALL
tokens = torch.randint(0, config.vocab_size, (2, 65), generator=torch.Generator().manual_seed(0))
fused, scores = (
    experiments.count_flops(partial(experiments.train_once, Transformer(config, attention=attention), tokens))
    for attention in (Transformer(config).attention, dense)
)
weights = predict.matmul_parameters(config)
receipt(
    f"one step on 128 tokens, {weights:,} weights in matmuls",
    [
        row("FLOPs per weight and token", 6, fused / (128 * weights)),
        row(
            "with attention's scores and values, all keys",
            128 * predict.training_flops(config, 64).total,
            scores,
            "FLOP",
        ),
        row("share of attention at 64 tokens", None, f"{1 - fused / scores:.1%}"),
        row(
            "    at 256 tokens",
            None,
            f"{predict.training_flops(config, 256).attention / predict.training_flops(config, 256).total:.1%}",
        ),
    ],
)

# %% [markdown]
# (The fused kernel computes the scores too, but torch counts none for it on a CPU; `dense` writes them as matmuls.)
#
# ### Exercise 2 · MFU (8 minutes)
#
# *Model FLOPs utilization* is useful FLOP/s over what the machine could do. Useful: 6 per weight and token, and what
# *causal* attention must compute: a query of `width` = heads · head dimension numbers meets (seq + 1) / 2 keys on
# average, in each layer; scores and values cost 2 FLOPs per number and key each, and backward twice as much again.


# %%
def mfu(weights, layers, width, seq, tokens_per_s, peak_flops):
    """Share of the peak that goes into useful FLOPs. weights: parameters in matmuls; peak_flops: FLOP/s."""
    # BEGIN SOLUTION
    forward = 2 * weights + 4 * layers * width * (seq + 1) / 2
    return 3 * forward * tokens_per_s / peak_flops
    # END SOLUTION


mfu = check("mfu", mfu)

# %% [markdown]
# Where does the time of a step go? The device of this lab is one core, and the peak is what that core *reached* on a
# large matmul (lab 00), not a data sheet's.

# %%
card = measure.machine()
splits = pictures.splits()


def step_split():
    """Time of a step of the target model: input, forward, backward, optimizer; with and without recomputation."""
    return pictures.draw_split(splits)


show(step_split)

# %%
plain, target = splits["nothing recomputed"], experiments.TARGET
width = target.num_heads * target.head_dim
utilization = mfu(
    predict.matmul_parameters(target), target.num_layers, width, 128, plain["tokens_per_s"], card.peak_flops_one_thread
)
receipt(
    "one step of 4 × 128 tokens",
    [
        row("your MFU, and the trainer's", utilization, plain["mfu"], "", 1e-6),
        row("tokens per second", None, plain["tokens_per_s"], "token/s"),
        row("peak of one core, measured", None, card.peak_flops_one_thread, "FLOP/s"),
        row("backward / forward (the head's backward runs with the loss)", None, plain["backward"] / plain["forward"]),
        row("optimizer, share of the step", None, f"{plain['optimizer'] / plain['step']:.1%}"),
        row("input, share of the step", None, f"{plain['input'] / plain['step']:.1%}"),
    ],
)

# %% [markdown]
# Backward has twice the FLOPs of forward, and you may have expected twice the time. But the head's part of it is worked
# out with the loss, a few hundred tokens at a time, so that the logits of all tokens never lie side by side
# (`minillm/model/loss.py`); the clock books it under forward.
#
# The optimizer reads and writes 28 bytes per parameter and computes almost nothing: it is bound by memory, and its
# share falls as the batch grows. Norms, SwiGLU's products and the softmax are bound by memory as well; that, and
# matrices too small to fill the cores, is where the rest of the peak goes.
#
# ## 3 · Accumulation: a big batch in small pieces
#
# Gradients add up in `.grad`. So a batch can come in pieces, each freed before the next: the activations of one
# piece, the gradient of all. If the denominator is right.
#
# ### Exercise 3 · accumulate (10 minutes)
#
# `model(inputs, targets=targets)` returns (sum of the token losses, number of tokens that count); a target of −100 does
# not count. Microbatches hold different numbers of counted tokens. The result must be the gradient of the mean over
# *all* tokens.


# %%
def accumulate(model, microbatches):
    """microbatches: list of (inputs, targets). Leaves the gradients in .grad, returns the mean loss, a float."""
    # BEGIN SOLUTION
    tokens = sum(int((targets != -100).sum()) for _, targets in microbatches)
    loss = 0.0
    for inputs, targets in microbatches:
        nll, _ = model(inputs, targets=targets)
        (nll / tokens).backward()
        loss += nll.item() / tokens
    return loss
    # END SOLUTION


accumulate = check("accumulate", accumulate)

# %%
batches = experiments.unequal_batches(experiments.CONFIG)
whole, pieces, means = (Transformer(experiments.CONFIG, dtype=torch.float64) for _ in range(3))
inputs, targets = (torch.cat(part) for part in zip(*batches, strict=True))
nll, count = whole(inputs, targets=targets)
(nll / count).backward()
accumulate(pieces, batches)
for inputs, targets in batches:
    nll, count = means(inputs, targets=targets)
    (nll / count / len(batches)).backward()
big = experiments.gradient(whole)
off = {name: ((experiments.gradient(m) - big).norm() / big.norm()).item() for name, m in (("a", pieces), ("b", means))}
one, four = (experiments.step_memory(experiments.SMALL, batch=1, accumulate=k) for k in (1, 4))
at_once = experiments.step_memory(experiments.SMALL, batch=4)
receipt(
    "60, 9 and 30 tokens in three pieces; memory of 4 × 256 tokens",
    [
        row("relative error of the gradient, yours: below 1e-12", True, off["a"] < 1e-12),
        row("    mean of means", None, f"{off['b']:.0%}"),
        row("activations of 4 pieces: those of one", one.activation, four.activation, "B", 0.02),
        row("    of 4 rows at once", None, at_once.activation, "B"),
        row("gradients of 4 pieces: those of one", one.gradient, four.gradient, "B"),
    ],
)

# %% [markdown]
# The mean of means looks harmless, and its error is nearly as large as the gradient. Hugging Face's Trainer had this
# bug until October 2024 (transformers, pull request 34191): with equal microbatches both agree, so nothing showed.
#
# ## 4 · Fewer bits
#
# bfloat16 has float32's range and 8 bits of mantissa. float16 has 11, and a range that ends at 65,504 above and at
# 6e-8 below. Both lose something, in different places.

# %%
values = experiments.spread_values()
rows = [
    row("bf16: 1 + 1,000 · 0.001", 1.0, repeated_update(torch.bfloat16)),
    row("fp32: 1 + 1,000 · 0.001", 2.0, repeated_update(torch.float32), "", 1e-4),
    row(
        "fp16: log-uniform 1e-12 .. 1e-2, share that becomes zero",
        math.log10(2**-25 / 1e-12) / 10,
        flushed_share(values, torch.float16),
        "",
        0.02,
    ),
    row("    multiplied by 2^16 before", 0, flushed_share(values, torch.float16, 2.0**16)),
    row("bf16: the same values", 0, flushed_share(values, torch.bfloat16)),
]
receipt("what is lost", rows)

# %% [markdown]
# Next to 1.0, bfloat16's steps are 2⁻⁷: adding a thousandth rounds back to 1, a thousand times. That is why masters
# exist. float16 rounds small *gradients* to zero. How small are real ones? These are the gradients that backward
# carries between the blocks of the target model on text, as small as a batch of 4 M tokens makes them (they were
# measured on 512 tokens; the mean over more divides them by more):

# %%
gradients = experiments.text_gradients()


def underflow(scale_log2=0):
    """Share of real gradients by magnitude, and where float16 ends below and above, at a given loss scale."""
    return pictures.draw_underflow(gradients, scale_log2)


show(underflow)

# %%
sliders(underflow, scale_log2=(0, 40))

# %% [markdown]
# Multiply the loss, and every gradient is multiplied: the histogram moves to the right. Too far, and it overflows. So
# the scale is found by trying.
#
# ### Exercise 4 · dynamic loss scaling (15 minutes)
#
# One step. Backward on the scaled loss; the optimizer must see unscaled gradients. If one is not finite: no step, half
# the scale, start counting good steps anew. After `interval` good steps in a row: double it, and start anew.


# %%
def scaled_step(loss, optimizer, scale, good_steps, interval):
    """Steps, or skips the step; (scale, good_steps) for the next one.

    The weights are in optimizer.param_groups[i]["params"].
    """
    # BEGIN SOLUTION
    optimizer.zero_grad()
    (loss * scale).backward()
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    for weight in weights:
        weight.grad /= scale
    if not all(weight.grad.isfinite().all() for weight in weights):
        return scale / 2, 0
    optimizer.step()
    return (scale * 2, 0) if good_steps + 1 == interval else (scale, good_steps + 1)
    # END SOLUTION


scaled_step = check("loss-scaling", scaled_step)

# %% [markdown]
# Skipped steps are part of the design: one in a few thousand, at the moment the scale was doubled too far. bfloat16
# needs none of this, which is why it won.
#
# ## 5 · Recompute
#
# Activations grow with depth, batch and length. Instead of keeping a block's, keep its input and run the block again
# when backward arrives (Chen et al. 2016): one forward more, so 4 units of FLOPs instead of 3.
#
# ### Exercise 5 · a block that remembers only its input (20 minutes)
#
# An autograd function. `forward` runs without autograd, so nothing is kept but what you keep. `backward` is given the
# gradient of the output and returns one value per argument of `forward`: None for the block, then those of x and of
# each parameter.


# %%
class Recompute(torch.autograd.Function):
    """Recompute.apply(block, x, *block.parameters()) is block(x), keeping x only."""

    @staticmethod
    def forward(ctx, block, x, *parameters):
        # BEGIN SOLUTION
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)
        # END SOLUTION

    @staticmethod
    def backward(ctx, gradient):
        # BEGIN SOLUTION
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        return None, *torch.autograd.grad(y, (x, *ctx.block.parameters()), gradient)
        # END SOLUTION


Recompute = check("recompute-block", Recompute)

# %% [markdown]
# (With dropout inside, the random numbers must be the same the second time; `minillm.train.activation_checkpoint` and
# torch's `checkpoint` save the generator's state, and autocast's, for that.)
#
# Which blocks, and all of each? *Selective* recomputation keeps the results of matmuls and of attention and computes
# the rest again, norms, rotations, SwiGLU's products (after Korthikanti et al. 2022):

# %%
ways = experiments.recompute_tradeoff()


def recompute_tradeoff():
    """Activations over FLOPs and over time: nothing, every 2nd block, all but matmuls, every block recomputed."""
    return pictures.draw_recompute(ways)


show(recompute_tradeoff)

# %%
head = 3 * 2 * 256 * 2 * experiments.SMALL.vocab_size * experiments.SMALL.hidden_size
blocks = {mode: numbers["flops"] - head for mode, numbers in ways.items()}
small = experiments.SMALL
receipt(
    "4 blocks, 2 × 256 tokens",
    [
        row("your guess: FLOPs, every block recomputed", None, guess_again),
        row("FLOPs of the blocks, every one recomputed", 4 / 3, blocks["full"] / blocks["none"], "", 1e-9),
        row("    all but matmuls", 1, blocks["selective"] / blocks["none"]),
        row("FLOPs of the step, the head's included", None, ways["full"]["flops"] / ways["none"]["flops"]),
        row(
            "activations, nothing recomputed",
            experiments.predicted_memory(small, 2, 256).activation,
            ways["none"]["activation"],
            "B",
            0.02,
        ),
        row(
            "    every block: their inputs, and one block",
            experiments.predicted_memory(small, 2, 256, recompute=True).activation,
            ways["full"]["activation"],
            "B",
            0.02,
        ),
        row("time, every block recomputed", None, ways["full"]["seconds"] / ways["none"]["seconds"]),
    ],
)

# %% [markdown]
# "20 to 40 percent overhead" is a time somebody measured. In FLOPs it is exactly one forward of the recomputed blocks,
# a third of what they cost; with the head and the optimizer, which repeat nothing, a little less of the step.

# %%
show(pictures.recompute_plan)

# %%
sliders(pictures.recompute_plan, seq=[1024, 4096, 16384], batch=(1, 8), layers=(8, 80, 8))

# %% [markdown]
# ## 6 · Clip by the global norm
#
# Clipping keeps the direction of the gradient: *all* of it is multiplied by one factor. When gradients lie in shards
# (lab 04), each rank sees only its own. Its local norm is about 1/√N of the global one.
#
# ### Exercise 6 · clip across shards (8 minutes)


# %%
def clip(shards, max_norm):
    """shards: [[gradient, ...], ...], together one gradient. Scales all in place to a norm of max_norm at most.

    Returns the norm before, a float.
    """
    # BEGIN SOLUTION
    squares = [sum(gradient.square().sum() for gradient in shard) for shard in shards]
    norm = torch.stack(squares).sum().sqrt()
    for shard in shards:
        for gradient in shard:
            gradient *= (max_norm / norm).clamp(max=1.0)
    return norm.item()
    # END SOLUTION


clip = check("clip-global-norm", clip)

# %%
draw = torch.Generator().manual_seed(0)
shards = [[torch.randn(20_000, generator=draw)] for _ in range(16)]
local = [shard[0].norm().item() for shard in shards]
norm = clip(shards, 1.0)
wrong = math.sqrt(sum(min(1.0, value) ** 2 for value in local))
receipt(
    "a gradient in 16 shards, clipped to a norm of 1",
    [
        row("norm of one shard: global / √16", norm / 4, sum(local) / 16, "", 0.02),
        row("norm after your clipping", 1.0, torch.cat([shard[0] for shard in shards]).norm(), "", 1e-5),
        row("norm if each shard clips by its own: √16", 4.0, wrong, "", 0.01),
    ],
)

# %% [markdown]
# ## 7 · Break it: three fine-tunings, two are broken
#
# The same weights, the same four windows of text, Adam with a learning rate of 2e-5. One run stores its weights in
# bfloat16 and has no masters. One never calls `zero_grad`. One is healthy.

# %%
runs = {
    "A": experiments.tune("bf16-pure"),
    "B": experiments.tune(zero_grad=False),
    "C": experiments.tune("bf16-master"),
}


def three_losses():
    """Loss and gradient norm of three fine-tunings, two of which are broken."""
    return pictures.draw_runs(runs)


show(three_losses)

# %%
stands_still, never_zeroes = "A", "C"  # your diagnosis; change it before you run the next cell

# %%
right = (stands_still, never_zeroes) == ("A", "B")
print("You said", stands_still, "and", never_zeroes, "which is", "right." if right else "not it:")
print("A has no masters. B never zeroes: its loss falls fastest, and its gradient is the sum of all so far.")
fast = {zero: experiments.tune(zero_grad=zero, lr=1e-3) for zero in (True, False)}
fall = {name: run.loss[0] - run.loss[-1] for name, run in runs.items()}
rows = [row(f"{name}: share of the weights that ever changed", None, f"{run.moved:.0%}") for name, run in runs.items()]
rows.append(row("A: its loss falls less than a third as far as C's", True, fall["A"] < fall["C"] / 3))
rows += [
    row(f"{name}: gradient norm, last over first", None, run.grad_norm[-1] / run.grad_norm[0])
    for name, run in runs.items()
]
rows += [
    row("lr 1e-3 instead: loss after the last step, healthy", None, fast[True].loss[-1], "nats"),
    row("    never zeroed", None, fast[False].loss[-1], "nats"),
    row("    the healthy one is lower", True, fast[True].loss[-1] < fast[False].loss[-1]),
]
receipt(f"the witnesses, after {len(runs['B'].grad_norm)} steps", rows)

# %% [markdown]
# **A** rounds most of its updates away: a weight of 0.02 has neighbours 1.2e-4 apart, and an update of 2e-5 is less
# than half of that. At the large learning rates of pretraining it would have looked fine, until the rate decays.
# Witness: *the share of weights that change.*
#
# **B** is worse, since it looks better. Adam divides by the size of the gradient, so a sum of all gradients so far is
# just a very long momentum; clipping would hide even its norm. On the same four windows that does no harm while steps
# are small; at a higher rate it trails. Witness: *the gradient norm grows with the number of steps.*
#
# ## 8 · Where it loses
#
# **Recomputation where compute is the limit.** If the activations fit, it buys nothing: the time above is lost. It pays
# when the freed memory allows a larger batch that fills the cores better, or spares a collective. **Selective**
# recomputation repeats no matmul, but its book-keeping is Python, called at each operation: of the third that it spares
# something goes there. **Accumulation** costs no FLOP, but small pieces fill the cores less well, and gradients are
# read and written once per piece. **bf16** gains time only where the cores have units for it.

# %%
fixed = {k: experiments.step_split(None, batch=8 // k, seq=64, accumulate=k, steps=2)["step"] for k in (1, 8)}
receipt(
    "the price, on this machine",
    [
        row("every block recomputed: time, as a multiple", None, ways["full"]["seconds"] / ways["none"]["seconds"]),
        row("all but matmuls recomputed", None, ways["selective"]["seconds"] / ways["none"]["seconds"]),
        row("MFU without recomputation", None, f"{splits['nothing recomputed']['mfu']:.1%}"),
        row("    with: the repeated FLOPs are not useful", None, f"{splits['every block recomputed']['mfu']:.1%}"),
        row("8 rows in 8 pieces: time of the step, as a multiple", None, fixed[8] / fixed[1]),
        row("bf16 matmul rate of this machine over fp32's", None, card.peak_flops_bf16 / card.peak_flops),
    ],
)

# %% [markdown]
# ## 9 · The same in production
#
# **torch.utils.checkpoint.** By default its newer form stops as soon as backward has what it needs: the last matmul's
# *output* is not needed again, so a block of two matmuls costs 7/6 and not 4/3. The old "reentrant" form fails if no
# input of the first block requires a gradient, as happens with embeddings that are frozen:

# %%
torchs = experiments.early_stop()
layer, x, outcome = nn.Linear(4, 4), torch.randn(2, 4), {}
for reentrant in (True, False):
    with warnings.catch_warnings(action="ignore"):
        try:
            checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
            outcome[reentrant] = "trains"
        except RuntimeError as error:
            outcome[reentrant] = f"RuntimeError: {str(error)[:43]}"
activation_checkpoint(layer, x, parameters=tuple(layer.parameters())).sum().backward()
receipt(
    "torch.utils.checkpoint",
    [
        row("block of two matmuls, as it comes: FLOPs", 7 / 6, torchs["early stop"], "", 1e-9),
        row("    early_stop=False", 4 / 3, torchs["to the end"], "", 1e-9),
        row("input without gradient, use_reentrant=False", "trains", outcome[False]),
        row("    use_reentrant=True", None, outcome[True]),
    ],
)

# %% [markdown]
# **torch.amp.GradScaler** against minillm's `LossScaler` (`minillm/train/precision.py`): 40 steps with random
# overflows, the same scales. (With bf16, leave it out.) **accelerate**: the loop of its documentation, on the three
# unequal pieces of section 3:

# %%
theirs, ours = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=5), LossScaler(interval=5)
weight, same = nn.Parameter(torch.ones(3)), []
optimizer = torch.optim.SGD([weight], lr=0.0)
for overflow in (torch.rand(40, generator=draw) < 0.2).tolist():
    optimizer.zero_grad()
    theirs.scale((weight * (math.inf if overflow else 1.0)).sum()).backward()
    theirs.step(optimizer)
    theirs.update()
    ours.update(not overflow)
    same.append(ours.value == theirs.get_scale())
rows = [row("GradScaler: steps with the same scale, of 40", 40, sum(same))]
try:
    library = experiments.accelerate_gradient(experiments.CONFIG, batches)
except ImportError:
    rows.append(row("accelerate is not installed: pip install accelerate to compare", None, "—"))
else:
    mean = experiments.gradient(means)
    rows.append(
        row(
            "accelerate: the mean of means, relative difference below 1e-12",
            True,
            ((library - mean).norm() / mean.norm()).item() < 1e-12,
        )
    )
    rows.append(row("    from the big batch", None, f"{((library - big).norm() / big.norm()).item():.0%}"))
receipt("torch and accelerate", rows)

# %% [markdown]
# `accelerator.backward` divides by the number of pieces, so a loss that is already a mean becomes the mean of means.
# Its documentation shows the repair: count the items of all pieces first, as your `accumulate` does.
#
# | here | torch | accelerate, Hugging Face Trainer |
# |---|---|---|
# | `TrainConfig(precision="bf16")` | `torch.autocast(device, torch.bfloat16)` | `mixed_precision="bf16"`, `--bf16` |
# | `precision="fp16"` | autocast and `torch.amp.GradScaler` | `mixed_precision="fp16"`, `--fp16` |
# | `accumulate=K` | divide the sum, `backward()`, K times | `gradient_accumulation_steps=K` in both |
# | `activation_checkpointing="full"` | `torch.utils.checkpoint`, `use_reentrant=False` | `--gradient_checkpointing` |
# | `activation_checkpointing="selective"` | `create_selective_checkpoint_contexts` | — |
# | `max_grad_norm` | `scaler.unscale_`, then `clip_grad_norm_` | `accelerator.clip_grad_norm_`, `--max_grad_norm` |
# | `measure.memory` | `torch.cuda.memory._record_memory_history`, `max_memory_allocated` | — |
#
# ## 10 · On a cluster
#
# This lab has one device, and the same command line everywhere; on a GPU the loop's spans wait for the device:
#
# ```bash
# python -m minillm train --precision bf16 --activation-checkpointing full --memory   # bytes by kind, of the first step
# python -m minillm plot RUN                                                          # loss, and the step's parts
# ```
#
# With N ranks the ledger of section 1 is where each scheme cuts: data parallelism divides the tokens of an activation,
# ZeRO-1, 2 and 3 divide 12, then 14, then all 16 bytes; tensor and pipeline parallelism divide parameters *and* FLOPs.

# %% [markdown]
# ## 11 · Interview corner
#
# The numbers first (nothing is compared here, so nothing has a verdict). An H100's 80 GB and 989 TFLOP/s in bf16 are
# from NVIDIA's data sheet.

# %%
llama8, llama70 = 8.03e9, 70.6e9
eight = pictures.MODELS["Llama 3 8B"]
context = predict.causal_context(4096)
flops8 = predict.training_flops(eight, context)
block16 = predict_memory.block_activation_bytes(eight, 1, 4096, 2)
receipt(
    "numbers for the answers",
    [
        row("1. 7B with Adam, without activations", None, 16 * 7e9, "B"),
        row("   70B", None, 16 * llama70, "B"),
        row("2. target model, autocast: peak saved", None, f"{saved['autocast bf16']:.0%}"),
        row("3. 8B on 1 T tokens, 6·N·T", None, 6 * llama8 * 1e12, "FLOP"),
        row("   days on 64 H100 at 40 % of 989 TFLOP/s", None, 6 * llama8 * 1e12 / (64 * 0.4 * 989e12) / 86400),
        row("   share of attention at 4,096 tokens", None, f"{flops8.attention / flops8.total:.1%}"),
        row("4. one block of it, 4,096 tokens in bf16", None, block16, "B"),
        row("   its input", None, 4096 * eight.hidden_size * 2, "B"),
        row("5. recompute everything: FLOPs of the blocks", None, blocks["full"] / blocks["none"]),
        row("6. fp16: log-uniform gradients that become zero", None, f"{flushed_share(values, torch.float16):.0%}"),
        row("7. bf16 without masters: weights that moved", None, f"{runs['A'].moved:.0%}"),
        row("8. mean of means: error of the gradient", None, f"{off['b']:.0%}"),
        row("9. local norm of 1 of 64 shards over the global", None, 1 / math.sqrt(64)),
        row("10. seconds to step 7B at 3.35 TB/s, 28 B each", None, 28 * 7e9 / 3.35e12, "s"),
    ],
)

# %% [markdown]
# Say your answer aloud before you open one.
#
# **1. Does a 7B model train on one 80 GB GPU with Adam?**
# <details><summary>Answer</summary>
#
# No: 16 bytes per parameter are 112 GB before the first activation. (70B: 1.1 TB.) LoRA, an 8-bit optimizer, offload,
# or ZeRO over several GPUs; not "mixed precision", which is 16 bytes as well.
#
# *Follow-up: which part is largest?* The optimizer: 8 of 16 in float32, 12 of 16 in mixed precision. So ZeRO-1, which
# divides only that, already saves most.
# </details>
#
# **2. "Mixed precision halves memory." True?**
# <details><summary>Answer</summary>
#
# Not of the state: 4+4+8 = 16, and 2+2+4+8 = 16 (18 while float32 gradients are stepped). Activations shrink, by less
# than half under autocast: norms and residual stay float32, and casts are kept. Above, the peak fell by 7 %. What it
# buys is speed and half the traffic.
#
# *Follow-up: and pure bf16?* 8 bytes, and it stands still when updates are small (question 7), unless one rounds
# stochastically or keeps a compensation term.
# </details>
#
# **3. How long does an 8B model take for 1 T tokens on 64 H100s?**
# <details><summary>Answer</summary>
#
# 6·N·T = 4.8e22 FLOPs. At 40 % of 989 TFLOP/s on 64 GPUs: 22 days.
#
# *Follow-up: why 6?* 2 forward, 4 backward: a product for the input's gradient, one for the weight's. *What is left
# out?* Attention's scores, 12·L·H·d·keys per token: under a tenth here at 4,096 tokens, and growing with length.
# *Is the embedding in N?* The look-up multiplies nothing; the head does, also if it is tied.
# </details>
#
# **4. Out of memory at step one. What do you do, in which order?**
# <details><summary>Answer</summary>
#
# Ask which kind it is. *Activations*: smaller microbatch and accumulation (free in FLOPs), then recomputation,
# selective before full. *Logits*: a fused or chunked loss. *State*: no microbatch helps; shard it, offload it, or train
# fewer parameters. Failing at the first *optimizer* step means the moments, which are made only then.
# </details>
#
# **5. What does activation checkpointing cost?**
# <details><summary>Answer</summary>
#
# One forward of what is recomputed: 4/3 of those blocks' FLOPs, exactly. Torch's early stop makes it 7/6 for blocks of
# two matmuls. Time follows FLOPs only if the step was bound by compute. Memory falls to the blocks' inputs and one
# block: for one block of the 8B at 4,096 tokens, 0.9 GB become 34 MB.
#
# *Follow-up: does MFU fall?* Yes, by the repeated work; hardware FLOPs utilization (HFU) counts it.
# </details>
#
# **6. Why does fp16 need loss scaling and bf16 not? What if the scaled gradients overflow?**
# <details><summary>Answer</summary>
#
# Range: below 6e-8 fp16 is zero (45 % of values spread evenly over 1e-12 .. 1e-2), bf16 reaches as far down as
# float32. On overflow the step is skipped and the scale halved; that is normal now and then. Unscale *before* clipping,
# and agree over all ranks whether to skip.
# </details>
#
# **7. A fine-tuning in pure bf16 does not learn, with the learning rate that works in float32. Why?**
# <details><summary>Answer</summary>
#
# An update below half a step of the weight's last bit rounds away: relative 2⁻⁹. Adam's update is about the learning
# rate, so weights above some 2⁹ · lr stand still. Above, few weights moved at all. Keep float32 masters; the forward
# pass may use the rounded copy.
#
# *Follow-up: why did it look fine in pretraining?* Rates of 1e-3 move weights of 0.02 by several steps. Look again when
# the rate has decayed.
# </details>
#
# **8. Loss with accumulation is slightly different from the big batch. Bug?**
# <details><summary>Answer</summary>
#
# Rounding gives 1e-7, not percents. Check the denominator: the mean of means weighs short pieces too much. Then the
# scheduler (one step per update, not per piece), clipping and zero_grad (once per update), dropout, batch statistics.
# </details>
#
# **9. Clipping in sharded training: what goes wrong?**
# <details><summary>Answer</summary>
#
# Each rank clips by its own norm, 1/√N of the global one: clipping happens too late, with different factors, and turns
# the gradient. Add up the squares (one number per rank), then one root and one factor. Replicated parameters must count
# once.
# </details>
#
# **10. What bounds the optimizer step, and how do you speed it up?**
# <details><summary>Answer</summary>
#
# Memory: per parameter it reads weight, gradient and two moments and writes three of them, 28 bytes in float32 for a
# dozen FLOPs. 7B on an H100 is 59 ms at best. One fused kernel over all tensors; fewer bytes (8-bit moments); a larger
# batch, so that it happens less often; shards (ZeRO-1 divides the time too).
# </details>
#
# **11. MFU is 55 % in one report and 42 % in another, same job. How?**
# <details><summary>Answer</summary>
#
# Different numerators (attention counted fully though it is causal, recomputation counted, embedding counted) or
# denominators (a data sheet's peak with sparsity, the boost clock, the measured peak). Ask for tokens per second and
# the formula.
# </details>
#
# ## You can now answer
#
# 1. **What fills memory?** 16 bytes per parameter, whatever the precision; activations by tokens and depth, which
#    microbatches, recomputation and 16 bits shrink.
# 2. **How many FLOPs, and how well used?** 6 per weight and token plus causal attention; over the *measured* peak.
# 3. **Which mistakes stay silent?** Mean of means, no masters, no zero_grad, local norms: seen by a big-batch gradient,
#    the share of moving weights, and the gradient norm.
#
# Next: **03 · data parallel**, where N devices take a share of the tokens each and average while backward still runs.
