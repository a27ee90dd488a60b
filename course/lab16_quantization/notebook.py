# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 16 · Quantization
#
# **Bytes, then error, then speed, in that order: bytes follow from arithmetic, error has to be measured on text, and
# speed appears only where memory was the limit.**
# Stands on lab 12 (prefill is compute, decode is memory) and lab 13 (the paged cache).
#
# The core path, exercises 1 to 5 and 8 with *When it ends*, takes two hours; with the questions plan three to four. Running
# the notebook from top to bottom takes about a minute. At the end you can answer:
#
# 1. How many bits does a weight really take, scales included, and what stays in 16 bits?
# 2. What does rounding cost, by which formula, and how do AWQ and GPTQ lower it with the same bytes?
# 3. At which batch does the speedup end, and which quantization still pays beyond it?
#
# > **Common claims**
# >
# > - *"A 4-bit model takes a quarter of the bytes."* The scales add 16/group bits to each weight, and embeddings, head
# >   and norms usually stay in 16 bits. Section 1 counts both.
# > - *"NF4 is information theoretically optimal for normally distributed weights"*
# >   ([Dettmers et al. 2023](https://arxiv.org/abs/2305.14314), abstract). Each weight is first divided by the largest of
# >   its block, so what is rounded ends at ±1 and depends on the block size
# >   ([Yoshida 2023](https://arxiv.org/abs/2306.06965)).
# > - *"Pruning half of the weights halves the model."* Only in a format that leaves the zeros out (section 5).

# %%
import inspect

import torch

from course.kit import check, finish, hint, show, sliders
from course.lab16_quantization import experiments, figures, receipts
from course.lab16_quantization import receipts_speed as speed
from minillm.quantize import formats

# %% [markdown]
# ## Predict
#
# Write down four guesses; they come back beside the answers.

# %%
guess_bits = 4.0  # bits per weight: 4-bit codes, one 16-bit scale for each group of 32
guess_bit_db = 3.0  # decibels by which the rounding error falls with every further bit
guess_full_batch = 295  # largest batch with the full speedup of 4-bit weights on an H100
guess_sequences = 4  # sequences of 32,768 tokens beside a 4-bit 70B model on one 80 GB card

# %% [markdown]
# ## 1 · Bytes
#
# A weight becomes a small whole number, its **code**, and a **scale** turns codes back into weights. Weights that share
# a scale are a **group**: all inputs of one output, or so many of them in a row.
#
#     weights of one output    w0 w1 w2 ... | ... ... ... | ... ... w(in - 1)
#     one scale per group         scale 0   |   scale 1   |   scale 2
#     code                     round(w / scale)       and back: code · scale
#
# A smaller group follows its weights more closely and costs more scales. Move the three sliders: the dots are 128
# weights, the lines the values that a code can stand for. One weight is an outlier.

# %%
show(figures.grid_of_a_row)

# %%
sliders(figures.grid_of_a_row, bits=(2, 8), group=[8, 16, 32, 64, 128], outlier=(2.5, 12.0))

# %% [markdown]
# ### Exercise 1 · groups of four bits, two codes to a byte (20 minutes)
#
# Symmetric int4: 16 codes, from -8 to 7, have 15 steps between them, and these span -m to m, where m is the group's
# largest |w|. So the scale is 2m/15, and ±m divided by it is ±7.5, halfway between two codes: `torch.round` takes -7.5 to
# -8 and 7.5 to 8, which is cut to 7. Each is half a step off. (A scale that bfloat16 rounds up takes -m to -7 instead.)
#
# Memory has no half bytes: two codes share one, the first in its low half, each stored as code + 8. Choose codes for the
# scale *as it is kept*, in bfloat16.


# %%
def quantize_int4(weight, group):
    """weight: [out, in], float32; group: even -> (bytes, uint8 [out, in / 2]; scales, bfloat16
    [out, in / group]).

    A group of zeros has the scale 1."""
    # BEGIN SOLUTION
    groups = weight.unflatten(1, (-1, group))
    scale = (2 * groups.abs().amax(-1) / 15).bfloat16()
    scale = torch.where(scale == 0, 1, scale)
    codes = torch.round(groups / scale.float()[..., None]).clamp(-8, 7).flatten(1)
    halves = (codes + 8).to(torch.uint8)
    return halves[:, 0::2] | (halves[:, 1::2] << 4), scale
    # END SOLUTION


def dequantize_int4(packed, scale):
    """What `quantize_int4` returned -> weights, float32 [out, in]."""
    # BEGIN SOLUTION
    halves = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
    groups = (halves.float() - 8).unflatten(1, (scale.shape[1], -1))
    return (groups * scale.float()[..., None]).flatten(1)
    # END SOLUTION


quantize_int4, dequantize_int4 = check("int4-groups", (quantize_int4, dequantize_int4))

# %% [markdown]
# Many formats add a **zero point** to each group, the code that stands for 0.0: weight = (code - zero) · scale. So a group
# of nearly all positive weights wastes no codes. minillm's class for both:

# %%
print(inspect.getsource(formats.Int.fit))

# %% [markdown]
# What these formats do to the size of `target`, the model that comes with the course (5.8 million parameters). Its
# embedding, which is the output head as well, stays as it is.

# %%
receipts.bytes_of_formats(guess_bits)

# %% [markdown]
# The embedding is almost a fifth of this model's parameters, so the model shrinks by less than the layers do. In Llama 3
# 70B embedding and head are 3 % of the parameters, and a tenth of the bytes once the rest has 4 bits.
#
# ## 2 · Error
#
# If the steps Δ are small beside the spread of the weights, the rounding error is nearly uniform between -Δ/2 and Δ/2, and
# its mean square Δ²/12 ([Bennett 1948](https://doi.org/10.1002/j.1538-7305.1948.tb01340.x)). A further bit halves Δ: 6.02
# dB less noise. An outlier that doubles a group's range costs as much.

# %%
receipts.error_of_rounding(guess_bit_db)

# %% [markdown]
# Smaller groups lower the error and raise the bits. Is a bit better spent on codes or on scales?

# %%
measured_noise = experiments.noise_by_group(figures.GROUPS)


def noise_by_group():
    """Signal to noise of the target's weights by bits per weight, for int4 and int8 in groups."""
    return figures.draw_noise(measured_noise)


show(noise_by_group)

# %% [markdown]
# Each halving of the groups gains less for each bit that it adds: from 128 to 64 about as much as a bit of the codes, 6.02
# dB, from 64 to 32 half of it.
#
# ### Exercise 2 · levels that are not evenly spaced (20 minutes)
#
# Trained weights look normally distributed: many small ones, few large ones. NF4
# ([Dettmers et al. 2023](https://arxiv.org/abs/2305.14314), §3 and appendix E) puts its 16 levels where a normal
# distribution puts equally many weights. With p running in equal steps from 0.9677083 down to 1/2 and Q the quantile
# function of the standard normal distribution:
#
# - above 0: Q(p) for 9 values of p, without the last (Q(1/2) = 0): 8 levels
# - below 0: -Q(p) for 8 values of p, without the last: 7 levels
# - 0 itself; and all of them divided by the largest
#
# Compute in float64: `torch.linspace` and `torch.special.ndtri` (Q) accept it.


# %%
def nf4_levels():
    """-> the 16 levels in ascending order from -1 to 1, float32."""
    # BEGIN SOLUTION
    positive = torch.special.ndtri(torch.linspace(0.9677083, 0.5, 9, dtype=torch.float64)[:-1])
    negative = -torch.special.ndtri(torch.linspace(0.9677083, 0.5, 8, dtype=torch.float64)[:-1])
    levels = torch.cat((negative, torch.zeros(1, dtype=torch.float64), positive.flip(0)))
    return (levels / levels.max()).float()
    # END SOLUTION


def quantize_nf4(weight, block):
    """weight: [n], float32, n a multiple of block -> (codes 0 .. 15, uint8 [n]; the largest |w| of
    each block, float32 [n / block]). Each weight / largest gets the code of the nearest level; in
    a block of zeros any code will do."""
    # BEGIN SOLUTION
    levels = nf4_levels()
    blocks = weight.view(-1, block)
    largest = blocks.abs().amax(-1)
    relative = blocks / torch.where(largest == 0, 1, largest)[:, None]
    codes = (relative[..., None] - levels).abs().argmin(-1)
    return codes.flatten().to(torch.uint8), largest
    # END SOLUTION


nf4_levels, quantize_nf4 = check("nf4", (nf4_levels, quantize_nf4))

# %% [markdown]
# *Double quantization* keeps the scales in 8 bits themselves, in blocks of 256 that share a 32-bit scale: 4 + 8/64 +
# 32/(64 · 256) = 4.127 bits instead of 4.5.
#
# ## 3 · The same bytes, less harm
#
# Rounding to nearest treats every weight alike. But the output is W x, and some inputs x are larger than others.
#
# ### Exercise 3 · AWQ's search (20 minutes)
#
# AWQ ([Lin et al. 2023](https://arxiv.org/abs/2306.00978), §3.2) multiplies the columns of W by factors s before rounding
# and divides the inputs by them: W x = (W · diag(s)) (diag(1/s) x). Nothing changes but the rounding, which hurts a
# column less the larger its factor is. In use, 1/s is folded into whatever makes x, so it costs nothing. Candidates are
# s = mean|x|^α for α = 0, 1/steps, 2/steps ... 1. Which one leaves the least error *of the output*?
#
# A channel whose inputs were all 0 would get s = 0, and 0/0: keep mean|x| above 0, as with `clamp_min(1e-4)`.


# %%
def round_int4(weight, group):
    """Every weight rounded to what its code stands for."""
    return dequantize_int4(*quantize_int4(weight, group))


def awq_factors(weight, x, group, steps=20):
    """weight: [out, in]; x: [rows, in], inputs of the layer, in float32 -> s, [in].

    Of the candidates the one whose rounded weights, round_int4(weight * s, group), give the outputs
    nearest to x @ weight.T (sum of squares)."""
    # BEGIN SOLUTION
    size = x.abs().mean(0).clamp_min(1e-4)
    best, least = None, float("inf")
    for step in range(steps + 1):
        factors = size ** (step / steps)
        rounded = round_int4(weight * factors, group)
        error = ((x / factors) @ rounded.T - x @ weight.T).square().sum()
        if error < least:
            best, least = factors, error
    return best
    # END SOLUTION


awq_factors = check("awq-search", awq_factors)

# %% [markdown]
# ### Exercise 4 · GPTQ's columns (20 minutes)
#
# GPTQ ([Frantar et al. 2022](https://arxiv.org/abs/2210.17323), algorithm 1) rounds one column after the other and lets
# the columns still to come make good for the error. With U, the upper Cholesky factor of (Σ x xᵀ)⁻¹ = H⁻¹ = Uᵀ U, for
# column j:
#
#     error = (column - rounded column) / U[j, j]
#     every column k > j:  -= error · U[j, k]


# %%
def gptq_columns(weight, upper, nearest):
    """weight: [out, in]; upper: U, [in, in]; nearest(column, j) -> column j rounded, [out].

    -> the rounded weights, [out, in]. `weight` itself stays as it is."""
    # BEGIN SOLUTION
    left, rounded = weight.clone(), torch.empty_like(weight)
    for j in range(weight.shape[1]):
        rounded[:, j] = nearest(left[:, j], j)
        error = (left[:, j] - rounded[:, j]) / upper[j, j]
        left[:, j + 1 :] -= error[:, None] * upper[j, j + 1 :]
    return rounded
    # END SOLUTION


gptq_columns = check("gptq-columns", gptq_columns)

# %% [markdown]
# How much is that worth? Column j adds ((w - ŵ) / U[j, j])² to the squared error of an output, so with steps Δ the mean
# is Δ²/12 · Σ 1/U[j, j]². Rounding to nearest gives Δ²/12 · Σ H[j, j], and 1/U[j, j]² is the part of H[j, j] that the
# inputs still to come do not explain. GPTQ gains as much as the inputs are correlated:

# %%
receipts.gptq_by_formula()

# %% [markdown]
# Both methods on the committed target, with groups of 128. On the right it has **planted outliers**: one channel in 16 is
# 30 times larger and the weights that meet it 30 times smaller, so the model computes the same. Large models grow such
# channels by themselves ([Dettmers et al. 2022](https://arxiv.org/abs/2208.07339)). *Outputs* is the error of the layers'
# outputs, Σ ‖(W - Ŵ) x‖² / Σ ‖W x‖², *text* that of the bits per byte of held-out text.

# %%
methods = experiments.methods()
receipts.methods(methods)

# %% [markdown]
# - **Both lower the error of outputs**, which is what they minimise. (GPTQ's is measured on its own calibration text,
#   which flatters it.) **The text need not follow**: as trained, AWQ's outputs are nearer to the original than those of
#   rounding to nearest, and its text is worse.
# - **With outliers rounding to nearest loses many times as much.** Weights 30 times smaller than their group's scale
#   suggests become 0, and they meet the largest inputs. AWQ undoes most of the planted factors; GPTQ keeps the grid and
#   can only make good elsewhere.
# - **Without outliers the text hardly notices.** A few tenths of a percent between 4-bit methods are less than between
#   two texts: measure on yours.
#
# ## 4 · Keys and values
#
# With long contexts and many sequences a server reads more of the cache than of the weights. The cache's numbers come
# one token at a time, so each token's row gets its own scale when it is written; nothing is calibrated.
#
# ### Exercise 5 · int8 keys, one scale per token and head (10 minutes)


# %%
def quantize_kv(keys):
    """keys: [tokens, heads, head_dim], float32 -> (codes, int8, of the same shape; scales, float32
    [tokens, heads]).

    255 steps span -m .. m, m the largest |key| of that token and head; codes are -128 .. 127. A row
    of zeros has the scale 1. A token's codes depend on no other token: it is written once."""
    # BEGIN SOLUTION
    scale = 2 * keys.abs().amax(-1) / 255
    scale = torch.where(scale == 0, 1, scale)
    codes = torch.round(keys / scale[..., None]).clamp(-128, 127)
    return codes.to(torch.int8), scale
    # END SOLUTION


quantize_kv = check("int8-kv", quantize_kv)

# %% [markdown]
# What that buys in tokens, measured in the engine's own pool (`LLM(model, kv_dtype="int8")`), and what it costs in bits
# per byte when every key and value that the target's attention reads has gone through your function:

# %%
receipts.cache(quantize_kv)

# %% [markdown]
# Grouped-query attention ([Ainslie et al. 2023](https://arxiv.org/abs/2305.13245)) saves more, and it multiplies: keys of 8
# instead of 64 heads are an eighth of the bytes.
#
# ## 5 · Leaving out instead of rounding
#
# ### Exercise 6 · two of four (10 minutes, skip on a first reading)
#
# A pruned weight that is kept as 0 saves nothing. *2:4 sparsity*
# ([Mishra et al. 2021](https://arxiv.org/abs/2104.08378)) keeps exactly two of every four inputs, so they can be packed:
# two values and two places of two bits each. In 16 bits that is (2 · 16 + 2 · 2) / 4 = 9 bits per weight, and the
# GPU's sparse units skip the rest.


# %%
def two_of_four(weight):
    """weight: [out, in], in a multiple of 4 -> (values, [out, in / 2]; places 0 .. 3, uint8
    [out, in / 2]): of every four inputs in a row the two with the largest |w| (of equal ones
    any), in the order of their places."""
    # BEGIN SOLUTION
    fours = weight.unflatten(1, (-1, 4))
    places = fours.abs().topk(2, dim=-1).indices.sort(dim=-1).values
    return fours.gather(-1, places).flatten(1), places.flatten(1).to(torch.uint8)
    # END SOLUTION


two_of_four = check("two-of-four", two_of_four)

# %% [markdown]
# ### Exercise 7 · low rank (15 minutes, skip on a first reading)
#
# W ≈ A B with A: [out, r] and B: [r, in]. The best such pair comes from the singular value decomposition, and its error is
# known before it is built: ‖W - A B‖² is the sum of the squares of the singular values left out
# ([Eckart and Young 1936](https://doi.org/10.1007/BF02288367)).


# %%
def low_rank(weight, error):
    """-> (A, [out, r]; B, [r, in]) with the smallest r for which ‖weight - A B‖ <= error · ‖weight‖
    (Frobenius). `torch.linalg.svd` is allowed; 0 < error < 1."""
    # BEGIN SOLUTION
    u, values, v = torch.linalg.svd(weight, full_matrices=False)
    left_out = values.square().flip(0).cumsum(0).flip(0)  # by rank: what is left out of it
    rank = int((left_out > error**2 * left_out[0]).sum())
    return u[:, :rank] * values[:rank], v[:rank]
    # END SOLUTION


low_rank = check("low-rank", low_rank)

# %%
spectrum = experiments.spectrum()


def tail_of_singular_values():
    """Error of each rank's best matrix, of int8 and of int4, for a layer of the target, by bits."""
    return figures.draw_spectrum(spectrum)


show(tail_of_singular_values)

# %% [markdown]
# The singular values of trained weights fall slowly, so cutting the rank is expensive. What can often be kept at low rank
# is the *update* in fine-tuning (LoRA). The same target by every method, without training afterwards:

# %%
receipts.leaving_out()

# %% [markdown]
# Zeros that are kept in 16 bits (the fourth row) save nothing. And the comparison is unfair: pruned and low-rank models are
# usually trained on afterwards and recover a good part.
#
# The third way is a smaller model that learns the large one's distributions: *distillation*
# ([Hinton et al. 2015](https://arxiv.org/abs/1503.02531); `minillm train --teacher target`). The committed draft, a tenth
# of the target and trained on text alone, is at the far left of the next figure: the fewest bytes, the most speed, and more
# error than any format costs.
#
# ## 6 · Speed
#
# Bytes, error and speed of the target in each format, with one sequence being decoded on one thread:

# %%
formats_measured = experiments.formats()


def bytes_error_speed():
    """KL to the original and tokens per second of the target in each format, by its bytes, and the
    draft."""
    return figures.draw_formats(formats_measured)


show(bytes_error_speed)

# %%
speed.formats(formats_measured)

# %% [markdown]
# (Bits per byte of 8 windows of 256 tokens, harder than most: `docs/models.md` gives 1.265 over all held-out files.)
#
# The order in the claim is the order of certainty. Bytes are arithmetic, the error depends on weights and text, and speed
# on a kernel that reads the codes as they are. Where the last column says *dequantize*, codes become float32 before every
# product, which moves *more* bytes than before.
#
# ### When it ends
#
# A decode step takes max(bytes / bandwidth, 2 · batch · weights / FLOP/s) at least. Quantizing weights shrinks the first.
# As the batch grows the second takes over, for quantized weights at batch bits/16 · FLOP/s / bandwidth, and at last for
# those of 16 bits: then nothing is left to gain.

# %%
show(figures.speedup_by_batch)

# %%
sliders(figures.speedup_by_batch, bits=(3.0, 16.0), batch=(1, 512), context=[0, 512, 2048, 8192])

# %%
speed.when_it_ends(guess_full_batch)

# %% [markdown]
# This table counts every weight in 4.125 bits. The figure above, and the table of large batches below, keep the 8B model's
# output head in 16 bits, as most 4-bit models do: 3.23 times, up to 91 sequences.
#
# ## Break it
#
# ### Exercise 8 · what went wrong? (20 minutes)
#
# Six programs, A to F, each meant to round a layer with int4 codes in groups of `group` inputs, symmetric or with a zero
# point. You get the weights before and after, nothing else. Write the judge. Three of the programs contain a bug:
#
# - one scale for the whole tensor
# - groups along the outputs instead of the inputs
# - a zero point that is one too large or too small when codes are turned back
#
# How would you tell? A group has at most 16 different values. And rounding errors of a right program have a mean
# near 0 in every group.


# %%
def verdict(weight, rounded, group):
    """weight, rounded: [out, in]; out and in are multiples of group, group >= 32.

    -> "right", "one scale for the tensor", "groups along the outputs", "zero point off by one"."""
    # BEGIN SOLUTION
    if len(rounded.unique()) <= 16:
        return "one scale for the tensor"
    groups = rounded.unflatten(1, (-1, group))
    if max(len(values.unique()) for values in groups.flatten(0, 1)) > 16:
        return "groups along the outputs"
    error = groups - weight.unflatten(1, (-1, group))
    shifted = error.mean(-1).abs() > error.std(-1)
    return "zero point off by one" if shifted.float().mean() > 0.5 else "right"
    # END SOLUTION


verdict = check("what-went-wrong", verdict)

# %%
receipts.programs(verdict)

# %% [markdown]
# Why does the size of the error not suffice?
#
# <details><summary>Answer</summary>
#
# - **A: one scale for the tensor.** The largest weight of all sets every step. At most 16 different
#   values in the whole matrix.
# - **B** is right, but three weights are outliers: its error is larger than that of C. A smaller group, AWQ, or outliers
#   kept in 16 bits ([Dettmers et al. 2023](https://arxiv.org/abs/2306.03078), SpQR) help.
# - **C: groups along the outputs.** Each column's groups have 16 values, each row's have many. Where weights are alike in
#   all directions no test of quality finds it; a kernel that expects groups along the inputs gives wrong outputs.
# - **D** is right: with a zero point.
# - **E: the zero point off by one.** All weights of a group move by one step in the same direction. GPTQ's first file
#   layout stores zero points minus one ([AutoGPTQ#325](https://github.com/AutoGPTQ/AutoGPTQ/pull/325)), its second does
#   not; a 27B model read the wrong way writes one token for ever
#   ([vLLM#38966](https://github.com/vllm-project/vllm/pull/38966)).
# - **F** is right: NF4, whose levels are not evenly spaced.
# </details>
#
# What each bug does to the target's text, all layers in int4 with groups of 32, as trained and with the outliers of
# section 3:

# %%
receipts.what_bugs_cost()

# %% [markdown]
# One scale for a whole tensor is a small bug without outliers and a large one with them: test with weights like those that
# you will serve.
#
# ## Where it loses
#
# ### Large batches and prompts, measured here
#
# One layer of 2,048 x 2,048 on one thread, int8 weights against float32, by the number of rows that go through it at
# once. One row is a decode step, hundreds are a prompt.

# %%
speed.batches_here()

# %% [markdown]
# By formula, the 8B model on one H100. With 4-bit weights arithmetic stays in 16 bits. In the columns *8 bits both* inputs
# are rounded as well (W8A8, fp8), and the layers' products run twice as fast: that pays at any batch.

# %%
speed.batches_h100()

# %% [markdown]
# At a context of 2,048 every sequence's cache is read as well, which smaller weights cannot shorten.
#
# Small models gain less: in section 6's table the target's bytes shrink by a larger factor than its time.
#
# ## The same in production
#
# `python -m minillm quantize --method awq --bits 4 --group 128 --model DIR --out NEW` writes a folder in the
# [compressed-tensors](https://github.com/vllm-project/compressed-tensors) layout, which transformers and vLLM load. Here is
# its peer on a random matrix, where it is installed:

# %%
receipts.peer()

# %% [markdown]
# | what | here | elsewhere |
# |---|---|---|
# | int4, groups of 128, to nearest | `Int(bits=4, group=128)` | torchao `Int4WeightOnlyConfig(group_size=128)`; llm-compressor scheme `W4A16` |
# | NF4, double quantization | `NF4()` | bitsandbytes `BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)` |
# | AWQ, GPTQ | `--method awq`, `--method gptq` | llm-compressor `AWQModifier`, `GPTQModifier` |
# | int8 weights and inputs | `--method smoothquant` | llm-compressor `SmoothQuantModifier` with scheme `W8A8` |
# | a cache in 8 bits | `LLM(model, kv_dtype="int8")` | vLLM `--kv-cache-dtype fp8` |
# | 2:4 | `minillm/quantize/prune.py` | torch `to_sparse_semi_structured` |
#
# Sources: [vLLM](https://docs.vllm.ai/en/latest/features/quantization/),
# [transformers 5](https://huggingface.co/docs/transformers/quantization/overview),
# [torchao](https://github.com/pytorch/ao), [llm-compressor](https://github.com/vllm-project/llm-compressor).
#
# ## On a GPU
#
# ```bash
# python -m minillm quantize --model $DIR --method awq --bits 4 --group 128 --out $NEW
# python -m minillm generate "def parse(" --model $NEW     # here
# vllm serve $NEW                                          # reads the same folder
# ```
#
# ## Interview corner
#
# The numbers behind the answers, computed by formula:

# %%
speed.interview()

# %% [markdown]
# Say your answer aloud before you open one.
#
# **1. Weights go from 16 to 4 bits. What becomes faster, and by how much?**
# <details><summary>Answer</summary>
#
# Decoding at small batches, by 16 / (4 + 16/group), 3.9 times with groups of 128. Prefill gains nothing, since its
# products take as long as before, and reading the cache does not change.
#
# *Follow-up: up to which batch?* On an H100 the full factor holds up to 76 sequences, and from 296 on it is 1.
# </details>
#
# **2. Why groups, and why along the inputs?**
# <details><summary>Answer</summary>
#
# An outlier coarsens all that share its scale. Along the inputs, because one output is a sum over inputs: a scale that is
# constant over a stretch of that sum comes out of it, and a kernel multiplies by it once per group.
# </details>
#
# **3. AWQ or GPTQ?**
# <details><summary>Answer</summary>
#
# AWQ rescales channels before it rounds: robust with little calibration text, and it repairs outliers of inputs. GPTQ
# chooses codes so that errors cancel in the output: often better without outliers, and it can overfit its calibration
# text. Both cost nothing when the model runs.
# </details>
#
# **4. Why are inputs harder to quantize than weights?**
# <details><summary>Answer</summary>
#
# A few channels are far larger than the rest in every token and set the scale of its row. SmoothQuant
# ([Xiao et al. 2022](https://arxiv.org/abs/2211.10438)) moves the difficulty into the weights, as AWQ does.
# </details>
#
# **5. How would you decide that a quantized model is good enough?**
# <details><summary>Answer</summary>
#
# Bits per byte on text of the product, KL to the original, then the tasks that matter, with enough samples to tell a
# percent from noise. And bytes and tokens per second on the machine that will serve it.
# </details>
#
# ### Design questions
#
# **D1. Llama 3 70B is to run on one 80 GB card, for contexts of 32,768 tokens. 10 % of the memory is kept free, and 2 GB
# go to activations. Which weights, which cache, and how many sequences fit? How long does a token take at least?**
#
# **D2. The 8B model on one H100 serves a chat (8 sequences at a time, contexts of 2,048) by day and reads documents
# by night (prompts of 2,048 tokens, one token of answer each). Which format for each: 16 bits, 4-bit weights, or
# 8 bits for weights and inputs?**

# %%
speed.design_card(guess_sequences)

# %%
speed.design_day_and_night()

# %% [markdown]
# <details><summary>D1 and D2: a worked answer</summary>
#
# D1: 70 GB are left. Weights in 16 bits (141 GB) and in 8 bits (73 GB) do not fit. With 4-bit layers in groups of 128,
# embedding and head in 16 bits, they take 39.5 GB, and the cache gets 30.5 GB. A token's keys and values are 328 kB in 16
# bits: two sequences. In 8 bits, with a 32-bit scale per token and head, they are 169 kB: five. A step reads the weights
# and five full caches: 19.4 ms at 3.35 TB/s, 51 tokens per second for each. The caches are 43 % of that traffic, so a
# smaller cache saves time as well as room.
#
# D2: by day 4-bit weights make the step 2.5 times shorter, 8 bits 1.7 times (the cache stays). By night a prompt of 2,048
# tokens is compute-bound: 4-bit weights gain nothing, 8 bits for weights and inputs almost halve the time. One format for
# both: 8 bits. With a replica for each, 4 bits by day and 8 by night.
# </details>
#
# ### Capstone (open)
#
# Give every layer of `target` its own format: choose among 4 and 8 bits so that the whole model takes no more bytes than
# int4 in groups of 128 with two layers in 8 bits, and loses the fewest bits per byte (`Settings(skip=...)` leaves layers
# out of a first pass). By what do you rank layers?
#
# ## Can you answer them now?
#
# 1. How many bits does a weight really take, scales included, and what stays in 16 bits?
# 2. What does rounding cost, by which formula, and how do AWQ and GPTQ lower it with the same bytes?
# 3. At which batch does the speedup end, and which quantization still pays beyond it?
#
# Next: in [17 · Adapters](17_adapters.ipynb) the 4-bit weights of this lab stay frozen, and thin matrices beside them learn.

# %%
finish("16_quantization")
