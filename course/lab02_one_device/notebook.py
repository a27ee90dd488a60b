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
# **A training step holds 16 bytes per parameter beside its activations, and takes 6 FLOPs per parameter and token.**
# With these two numbers you can size any training run.
# Stands on lab 00 (the roofline).
#
# The core path, sections 1 to 5 and 7, takes two hours (its exercises 68 minutes); with the questions at the end plan three
# to four. Run All takes about a minute. At the end you can answer:
#
# 1. What fills the memory of a step, and which part do mixed precision, accumulation and recomputation shrink?
# 2. How many FLOPs does a step need, and what share of the machine does it really use?
# 3. Which silent mistakes of a training loop leave the loss falling, and which measurement shows each?
#
# Every later lab divides what you count here: data parallelism divides tokens, ZeRO the 16 bytes, tensor and pipeline
# parallelism the FLOPs.
#
# > **Common claims**
# >
# > - *"Mixed precision halves memory"*, or *"adds communication."* It saves nothing of what is held when backward is
# >   done: 4 + 4 + 8 = 16 bytes per parameter in float32 and 2 + 2 + 4 + 8 = 16 with masters ([Rajbhandari et al.
# >   2020](https://arxiv.org/abs/1910.02054), §3.1). Activations and messages shrink.
# > - *"Adam needs 8 bytes per parameter."* That is its two moments. With 16-bit weights a float32 copy of the weights
# >   comes on top: 12.
# > - *"Selective checkpointing keeps the matmuls."* The term is used for two things. In
# >   [Korthikanti et al. 2022](https://arxiv.org/abs/2205.05198) it recomputes the core of attention; in
# >   [torch](https://pytorch.org/blog/activation-checkpointing-techniques/) it is any choice by operation (section 5).
# > - *"Accumulating the mean losses of microbatches gives the big batch's gradient."* Only if all microbatches count
# >   equally many tokens ([transformers#34191](https://github.com/huggingface/transformers/pull/34191)).

# %%
import torch

from course.kit import check, finish, hint, show, sliders
from course.lab02_one_device import experiments, figures, receipts

# %% [markdown]
# ## Predict
#
# Three guesses before anything runs. They come back with the answers.

# %%
guess_bytes = 8  # bytes per parameter that stay between two steps with bf16 weights and masters
guess_saved = 0.5  # share of the peak memory of a step that autocast to bf16 saves
guess_again = 1.1  # FLOPs of a step in which every block is recomputed, as a multiple

# %% [markdown]
# ## 1 · Memory by kind
#
# A step holds four kinds of bytes: **parameters**, their **gradients**, the **optimizer's** state, and **activations**,
# which are the tensors that the backward pass will need again. The first three follow from the number of parameters.
# The fourth follows from what each operation keeps: a matmul keeps its input (for the weight's gradient), ReLU its
# output, an addition nothing.
#
# ### Exercise 1 · the ledger of a step (15 minutes)
#
# The model: `layers` residual blocks `x + down(relu(up(x)))`, without biases, for `tokens` rows of `hidden` numbers;
# `up` is hidden × intermediate. The optimizer is Adam. `mixed`: weights, gradients and activations in 16 bits, and an
# optimizer that keeps its own float32 copy of the weights beside its float32 moments. The check runs the step and
# counts (Adam's step numbers apart).


# %%
def memory_ledger(hidden, intermediate, layers, tokens, mixed):
    """The most bytes of each kind until backward is done:
    {"parameter", "gradient", "optimizer", "activation"}."""
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
receipts.bytes_per_parameter(memory_ledger, guess_bytes)

# %% [markdown]
# **Sixteen in both.** The two bytes saved on weights and the two saved on gradients are the four bytes of the master
# copy. When the masters are stepped with float32 gradients, it is 18 for a moment; between steps there are no gradients.
# What shrinks are activations, memory traffic and time.
#
# Now the whole transformer of this course (`minillm/model/transformer.py`; Llama's shape: RMSNorm, rotary positions and
# SwiGLU, an MLP with a gate), from embedding to loss. `predict.training.memory` does the same arithmetic for it,
# `measure.memory` watches every tensor of a real step. Three ways to train it:
#
# | | weights | matmuls in | optimizer holds |
# |---|---|---|---|
# | fp32 | float32 | float32 | two moments |
# | autocast bf16 | float32 | bfloat16, by casts | two moments |
# | bf16 + masters | bfloat16 | bfloat16 | float32 masters, two moments |

# %%
measured, predicted = figures.memories()


def memory_by_kind():
    """Bytes by kind of one training step of the target model in three precisions,
    formula and measured."""
    return figures.draw_memory(measured, predicted)


show(memory_by_kind)

# %%
receipts.memory_by_kind((measured, predicted))

# %%
receipts.saved_by_16_bits(measured, guess_saved)

# %% [markdown]
# Autocast does not even halve the activations. Norms and the residual stream stay in float32; the output of a norm is
# cast once for each matmul that reads it, and the casts are kept until backward. The lowest bar is the peak of
# everything together, not the sum of the others: activations peak at the loss, gradients at the end of backward.
# Temporaries such as the logits come on top.
#
# What does your model need? This figure measures nothing: it applies the formula.

# %%
show(figures.memory_plan)

# %%
sliders(
    figures.memory_plan,
    model=list(figures.MODELS),
    batch=(1, 8),
    seq=[256, 1024, 4096, 16384],
)

# %% [markdown]
# ## 2 · Six FLOPs per parameter and token
#
# In the forward pass a weight is multiplied and added once per token: 2 FLOPs. The backward pass needs two products of
# the same size, one for the gradient of the input and one for that of the weight: 4. Torch counts those that really
# happen:

# %%
receipts.six_flops()

# %% [markdown]
# (Torch counts no FLOPs for the fused attention kernel on a CPU; the second row uses `dense` attention, which writes
# its scores as matmuls.)
#
# ### Exercise 2 · MFU (8 minutes)
#
# *Model FLOPs utilization* ([Chowdhery et al. 2022](https://arxiv.org/abs/2204.02311), appendix B) is the useful FLOP/s
# over what the machine could do. The useful FLOPs are 6 per weight and token, plus what *causal* attention must compute:
# a query of `width` = heads · head dimension numbers meets (seq + 1) / 2 keys on average, in each layer (that appendix
# counts all seq); scores and values cost 2 FLOPs per number and key each, and backward twice as much again.


# %%
def mfu(weights, layers, width, seq, tokens_per_s, peak_flops):
    """Share of the peak that goes into useful FLOPs.
    weights: parameters in matmuls; peak_flops: FLOP/s."""
    # BEGIN SOLUTION
    forward = 2 * weights + 4 * layers * width * (seq + 1) / 2
    return 3 * forward * tokens_per_s / peak_flops
    # END SOLUTION


mfu = check("mfu", mfu)

# %% [markdown]
# Where does the time of a step go? The device of this lab is one core, and the peak is what that core *reached* on a
# large matmul (lab 00), not the number of a data sheet.

# %%
splits = figures.splits()


def step_split():
    """Time of a step of the target model: forward, backward, optimizer;
    with and without recomputation."""
    return figures.draw_split(splits)


show(step_split)

# %%
receipts.step(splits, mfu)

# %% [markdown]
# Backward has twice the FLOPs of forward, but not twice the time here: the head's part of it is computed with the loss,
# 512 tokens at a time (here all), while their logits are at hand.
#
# ### Read a trace
#
# The same step as torch's profiler saw it. **Which row would shrink in bfloat16, which by fusing kernels, and which as
# the batch grows?**

# %%
show(figures.a_trace)

# %%
receipts.trace()

# %% [markdown]
# <details><summary>Answer</summary>
#
# *Matmul* and *attention* shrink with faster arithmetic. *All else* (norms, SwiGLU's products, casts, the softmax of the
# loss) is thousands of calls. Most move no data; the others read and write memory and compute little: fusing them saves
# reads and launches. *Optimizer* reads and writes 28 bytes per parameter once per step, whatever the batch, so its
# *share* falls as the batch grows.
# </details>
#
# On a GPU a trace has more rows, and they mean something else. The CPU row only *launches* kernels and runs ahead;
# kernels execute in order within a **stream**, and different streams overlap. When you read one:
#
# - Gaps in the compute stream while the CPU row is busy mean that launching is the bottleneck (small kernels: larger
#   batch, `torch.compile`, CUDA graphs). Gaps while the CPU row waits in `cudaStreamSynchronize` or `aten::item` mean
#   that the program asked for a value: a host read stops the launching, not just the logging.
# - Input copies (`Memcpy HtoD`) overlap only if they come from pinned memory on another stream, with
#   `non_blocking=True`.
# - NCCL kernels have a stream of their own (lab 03).
# - Never time a GPU with the host's clock around an enqueue. Use `torch.cuda.Event`, or synchronize first.
#
# `torch.profiler.profile(...).export_chrome_trace("trace.json")` writes such a file for
# [Perfetto](https://ui.perfetto.dev); lab 03 reads one in which all-reduces overlap with backward.
#
# ## 3 · Accumulation: a big batch in small pieces
#
# Gradients add up in `.grad`. So a batch can be processed in microbatches, each freed before the next: the activations of
# one microbatch, the gradient of all.
#
# ### Exercise 3 · accumulate (10 minutes)
#
# `model(inputs, targets=targets)` returns (sum of the token losses, number of tokens that count); a target of −100 does
# not count. Microbatches hold different numbers of counted tokens, some none. The result must be the gradient of the mean
# over *all* tokens.


# %%
def accumulate(model, microbatches):
    """microbatches: list of (inputs, targets); each runs forward once.
    Leaves the gradients in .grad, which is empty before; returns the mean loss, a float."""
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
receipts.accumulation(accumulate)

# %% [markdown]
# The mean of means looks harmless, and its error is nearly as large as the gradient. Hugging Face's Trainer had this
# bug until October 2024 ([transformers#34191](https://github.com/huggingface/transformers/pull/34191)): with
# microbatches of equal lengths the two agree, so nothing showed.
#
# ## 4 · Fewer bits
#
# bfloat16 (from Ampere on; a V100 has float16 alone) has the range of float32 and 8 bits of precision. float16 has 11 bits, and a range that ends at 65,504 above
# and 6e-8 below. Both lose something, in different places.

# %%
receipts.sixteen_bits()

# %% [markdown]
# Above 1.0 the next bfloat16 is 2⁻⁷ away: adding a thousandth rounds back to 1, a thousand times. That is why masters
# exist. float16 rounds small *gradients* to zero. How small are they? Backward carries these between the blocks of the
# untrained target model on text. They are scaled from 512 tokens, where they were measured, to a batch of 4 M, since a
# mean over more divides by more:

# %%
gradients = experiments.text_gradients()


def underflow(scale_log2=0):
    """Share of the gradients by magnitude, and where float16 ends below and above,
    at a given loss scale."""
    return figures.draw_underflow(gradients, scale_log2)


show(underflow)

# %%
sliders(underflow, scale_log2=(0, 40))

# %% [markdown]
# Multiply the loss, and every gradient is multiplied: the histogram moves to the right. Multiply too much, and
# gradients overflow. So the scale is found by trying.
#
# ### Exercise 4 · dynamic loss scaling (15 minutes)
#
# One step. Run backward on the scaled loss; the optimizer must see unscaled gradients. If one of them is not finite: no
# step, half the scale, and count good steps from 0 again. After `interval` good steps in a row: double the scale, and
# count from 0 again. The loop has cleared the gradients before it calls you.


# %%
def scaled_step(loss, optimizer, scale, good_steps, interval):
    """Calls optimizer.step(), or does not; returns (scale, good_steps) for the next one.

    The weights are in optimizer.param_groups[i]["params"]. The scale has no limits.
    """
    # BEGIN SOLUTION
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
# Skipped steps are part of the design: one in a few thousand, when the scale was doubled too far. bfloat16 needs none
# of this.
#
# ## 5 · Recompute
#
# Activations grow with depth, batch and length. Instead of keeping those of a block, keep its input and run the block
# again in the backward pass ([Chen et al. 2016](https://arxiv.org/abs/1604.06174)): one more forward, so 4 units of
# FLOPs instead of 3.
#
# ### Exercise 5 · a block that keeps only its input (20 minutes)
#
# An autograd function. `forward` runs without autograd, so nothing is kept but what you keep. `backward` is given the
# gradient of the output and returns one value per argument of `forward`: None for the block, then the gradients of x
# and of each parameter. They must be *returned*: one that is only written into `.grad` is lost to `torch.autograd.grad`,
# and the hooks that lab 03 hangs on parameters run twice.


# %%
class Recompute(torch.autograd.Function):
    """Recompute.apply(block, x, *block.parameters()) is block(x), keeping x only.

    No parameter is frozen. Other runs of the block may come before this one's
    backward, and .grad may hold an earlier microbatch's gradient, which stays.
    """

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
# torch's `checkpoint` save the state of the generator, and of autocast, for that.)
#
# Which blocks, and all of each block? Torch lets you choose by operation what is kept. minillm's `"selective"` keeps
# the results of matmuls and attention and recomputes the rest (norms, rotations, SwiGLU's products), so no large FLOPs
# are spent twice:

# %%
ways = experiments.recompute_tradeoff()


def recompute_tradeoff():
    """Activations over FLOPs and over time:
    nothing, every 2nd block, all but matmuls and attention, every block."""
    return figures.draw_recompute(ways)


show(recompute_tradeoff)

# %%
receipts.recomputation(ways, guess_again)

# %% [markdown]
# What [Korthikanti et al. 2022](https://arxiv.org/abs/2205.05198) call *selective activation recomputation* is the
# opposite choice: keep the large matmuls' inputs and recompute the **core of attention** (scores, softmax, product with
# the values), which has many bytes and few FLOPs. A layer keeps s·b·h·(34 + 5·a·s/h) bytes, for a heads and sequences
# of s tokens:

# %%
receipts.core_attention()

# %% [markdown]
# FlashAttention ([Dao et al. 2022](https://arxiv.org/abs/2205.14135)) does this inside its kernel: it never stores the
# scores and recomputes them in its backward pass. With it, as here, the term 5·a·s/h is gone from the start, and only
# the 34 (for Llama's shape another number) is left to argue about.

# %%
show(figures.recompute_plan)

# %%
sliders(figures.recompute_plan, seq=[1024, 4096, 16384], batch=(1, 8), layers=(8, 80, 8))

# %% [markdown]
# ## 6 · Clip by the global norm (skip on a first reading)
#
# Clipping keeps the direction of the gradient: *all* of it is multiplied by one factor. When gradients lie in shards
# (lab 04), each rank sees only its own, and its local norm is about 1/√N of the global one.
#
# ### Exercise 6 · clip across shards (8 minutes)


# %%
def clip(shards, max_norm):
    """shards: [[gradient, ...], ...], together one gradient: tensors of any shape,
    at least one in each shard, not all zero. Scales all in place to a norm of
    max_norm at most. Returns the norm before, a float.
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
receipts.clipping(clip)

# %% [markdown]
# ## 7 · Find the bugs: three fine-tunings, two are broken
#
# The same weights, the same four windows of text, Adam with a learning rate of 2e-5. One run stores its weights in
# bfloat16 and has no masters. One never clears its gradients. One is healthy. **Which is which?**

# %%
show(figures.three_losses)

# %%
stands_still, never_zeroes = "A", "C"  # your diagnosis; change it before you run the next cell

# %%
receipts.witnesses(stands_still, never_zeroes)

# %% [markdown]
# **A** rounds most of its updates away: the neighbours of a weight of 0.02 are 1.2e-4 apart, and an update of 2e-5 is
# less than half of that. At the large learning rates of pretraining it would have looked fine until the rate decays.
# What shows it is *the share of weights that change.*
#
# **B** is worse, because it looks better. Adam divides by the size of the gradient, so a sum of all gradients so far
# acts as a very long momentum; clipping would hide even its norm. What shows it: *the gradient norm grows with the
# number of steps.* While steps are small it does little harm on four windows. At a higher rate it falls behind:

# %%
receipts.higher_rate()

# %% [markdown]
# ## 8 · Where it loses
#
# **Recomputation** buys nothing if the activations fit: the time is lost. It pays when the freed memory allows a larger
# batch that fills the device better, or saves a collective. **Selective** recomputation repeats no matmul, but Python
# overhead can make it slower than recomputing every 2nd block. **Accumulation** costs no FLOPs, but small microbatches use
# the device less well, and gradients are read and written once per microbatch. **bf16** gains time only where the
# device has units for it.

# %%
receipts.price(ways, splits)

# %% [markdown]
# ## 9 · The same in production (skip on a first reading)
#
# **torch.utils.checkpoint** stops recomputing as soon as backward has what it needs. The *output* of a block's last
# matmul is not needed again, so a block of two matmuls costs 7/6 and not 4/3. The old "reentrant" form fails if no
# input of the first block requires a gradient, as with frozen embeddings:

# %%
receipts.torch_checkpoint()

# %% [markdown]
# **torch.amp.GradScaler** beside minillm's `LossScaler` (`minillm/train/precision.py`), with random overflows, and the
# loop of accelerate's documentation on the three unequal microbatches of section 3:

# %%
receipts.torch_and_accelerate()

# %% [markdown]
# `accelerator.backward` divides by the number of microbatches, so a loss that is already a mean becomes the mean of
# means. Its [documentation](https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation) shows the
# repair: count the items of all microbatches first, as your `accumulate` does.
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
# ## 10 · On a GPU
#
# The same command line runs on a GPU, where the loop takes its times from device events:
#
# ```bash
# python -m minillm train --precision bf16 --activation-checkpointing full --accumulate 4 --memory   # bytes by kind
# python -m minillm plot RUN                                                          # loss, and the step's parts
# ```
#
# ## 11 · Interview corner
#
# The numbers behind the answers:

# %%
receipts.interview()

# %% [markdown]
# Say your answer aloud before you open one.
#
# **1. Does a 7B model train on one 80 GB GPU with Adam?**
# <details><summary>Answer</summary>
#
# No: 16 bytes per parameter, 8 times what serving in 16 bits takes, are 112 GB before the first activation. LoRA, an 8-bit optimizer, offload, or ZeRO over
# several GPUs; not "mixed precision", which is 16 bytes as well.
#
# *Follow-up: which part is largest?* The optimizer: 8 of 16 in float32, 12 of 16 in mixed precision. So ZeRO-1, which
# divides only that, already saves most.
# </details>
#
# **2. How long does an 8B model take for 1 T tokens on 64 H100s?**
# <details><summary>Answer</summary>
#
# 6·N·T = 4.8e22 FLOPs. At 40 % of 989 TFLOP/s on 64 GPUs: 22 days.
#
# *Follow-up: why 6?* 2 forward, 4 backward: one product for the gradient of the input, one for that of the weight.
# *What is left out?* The scores of attention: 7 % here at 4,096 tokens, and growing with length.
# </details>
#
# **3. Out of memory at step one. What do you do, in which order?**
# <details><summary>Answer</summary>
#
# Ask which kind it is. *Activations*: smaller microbatch and accumulation (no more FLOPs), then recomputation.
# *Logits*: a fused or chunked loss. *State*: no microbatch helps; shard it, offload it, or train fewer parameters.
# A run that fails at its first *optimizer* step lacks room for the moments, which are made only then.
# </details>
#
# **4. Why does fp16 need loss scaling and bf16 not? What if the scaled gradients overflow?**
# <details><summary>Answer</summary>
#
# Range: below 3e-8 fp16 is zero, bf16 reaches as far down as float32. On overflow the step is skipped and the scale
# halved; that is normal now and then. Unscale *before* clipping, and agree over all ranks whether to skip.
# </details>
#
# **5. A fine-tuning in pure bf16 does not learn, with the learning rate that works in float32. Why?**
# <details><summary>Answer</summary>
#
# An update below half a step of the weight's last bit rounds away: relative 2⁻⁹. Adam's update is about the learning
# rate, so weights above some 2⁹ · lr stand still. Keep float32 masters, or round stochastically.
# </details>
#
# **6. The loss with accumulation differs slightly from the big batch's. Is that a bug?**
# <details><summary>Answer</summary>
#
# Rounding gives 1e-7 in float32 and up to 1e-5 in bfloat16, not percents. Check the denominator, then the scheduler
# (one step per update, not per microbatch), clipping and `zero_grad` (once per update), dropout, batch statistics.
# </details>
#
# **7. MFU is 55 % in one report and 42 % in another, for the same job. How?**
# <details><summary>Answer</summary>
#
# Different numerators (attention counted as if not causal, recomputation or embedding counted) or denominators (a peak with
# sparsity, a measured peak). Ask for tokens per second and the formula.
# </details>
#
# ### Design questions
#
# **D1. You have one H200 (141 GB). Up to which sequence length can you train Llama 3 8B with Adam, and what helps?**

# %%
receipts.design_memory()

# %% [markdown]
# **D2. Pretrain 3B parameters on 400 B tokens with 32 H100s. How long does it take, and what does recomputing every
# block cost in GPU-hours?**

# %%
receipts.design_time()

# %% [markdown]
# <details><summary>D1 and D2: a worked answer</summary>
#
# D1: that depends on the recipe. Masters stepped all at once fit at no length: 18 · 8.03e9 = 145 GB, recomputed or not.
# With float32 weights, state and gradients are 16 · 8.03e9 = 128 GB: some 3,000 tokens fit plainly, and 40,000 with
# autocast and every block recomputed, if the allocator wastes nothing. What helps masters has to cut the *state*: an
# 8-bit optimizer (moments of 2 instead of 8 bytes: 6 · 8.03 = 48 GB less), or a second GPU with ZeRO-1 (half of 12
# bytes: 48 GB less on each). *Then* 16,384 tokens need 189 GB plain and 97 GB recomputed.
#
# D2: 6·N·T = 7.2e21 FLOPs. At 40 % that is 6.6 days and 5,100 GPU-hours. Recomputing every block keeps the device as
# busy, but one quarter of its work is not useful: MFU falls to 30 %, and the run costs 1,700 GPU-hours more. Before
# paying that, try smaller microbatches with accumulation, selective recomputation, and ZeRO.
# </details>
#
# ### Capstone (open)
#
# Choose a GPU you have or want and find the largest Llama-shaped model that trains on it at 8,192 tokens with at least
# 35 % MFU. Use `predict.training.memory.training_step` for every choice of precision, microbatch, accumulation and
# recomputation; then shrink the plan to your machine and check the peak with `measure.memory`. Defend the order in
# which you used them, and name the one that you would give up first if the GPU had 20 % more memory.
#
# ## Can you answer them now?
#
# 1. What fills the memory of a step, and which part do mixed precision, accumulation and recomputation shrink?
# 2. How many FLOPs does a step need, and what share of the machine does it really use?
# 3. Which silent mistakes of a training loop leave the loss falling, and which measurement shows each?
#
# Next: [03 · Data parallel](03_data_parallel.ipynb), where N devices take a share of the tokens each and average while backward still runs.

# %%
finish("02_one_device")
