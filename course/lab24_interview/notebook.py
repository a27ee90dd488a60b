# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 24 · The mock interview
#
# **You know a thing when you can say it in a minute, compute it in another, and write it in ten.**
# Stands on labs 00 to 23 (mechanisms and formulas of 00 to 16 at its core).
#
# Seven whiteboard tasks of its own (95 minutes), and a deck, drills and tasks from all labs that you come back to:
# two hours the first time; a core path in itself. In the terminal the same interview runs under a clock:
# `python -m minillm interview --minutes 45`. At the end you can answer:
#
# 1. Which topics do you answer well, and which come back because you did not?
# 2. Which mistakes do you make in mental arithmetic: units, prefixes, one GPU for all?
# 3. Can you write the small mechanisms without looking?
#
# > **Common claims**
# >
# > - *"Reading the answers once is preparation."* Retrieval beats rereading
# >   ([Roediger and Karpicke 2006](https://doi.org/10.1111/j.1467-9280.2006.01693.x)): say the answer aloud before you
# >   look. A card comes back later each time that it went well, and soon when it did not: when, is chosen by
# >   [py-fsrs 6](https://github.com/open-spaced-repetition/py-fsrs).

# %%
import torch

from course.kit import check, finish, hint
from course.lab24_interview import receipts
from course.lab24_interview.in_notebook import Interview

# %%
receipts.the_deck()

# %% [markdown]
# ## Cards
#
# Say your answer aloud, then run the second cell. Another seed is another card; `topic="pipeline"` draws from one topic.

# %%
print(receipts.question(seed=3))

# %%
print(receipts.reply(seed=3))

# %% [markdown]
# Numbers that follow from a formula are computed when you see them; others are definitions or published values. Every
# answer names the lab or the formula behind it. You grade free-text answers yourself: the program does not pretend to
# understand them.
#
# ## Drills
#
# A number in your head, with its unit if you like (`"4.2 GB"`, `"18 days"`). No calculator. How close it must be depends on the
# question: most estimates pass within 3 to 15 %; rounds, ranks and blocks must be exact. A number that is off is told the
# accepted range.

# %%
print(receipts.drill("cache_bytes", seed=5))
guess_bytes = 2.1e9  # your number

# %%
receipts.answer("cache_bytes", 5, guess_bytes)

# %%
print(receipts.drill("train_days", seed=2))
guess_days = 5.1  # your number

# %%
receipts.answer("train_days", 2, guess_days)

# %% [markdown]
# ## Whiteboard tasks
#
# In the terminal a task is drawn from all labs: a ring all-gather, 1F1B's order, attention in tiles, a block pool, rejection
# sampling. Seven more stand here: one of serving, one of attention, one of routing, and four parts of a transformer and
# its optimizer that are asked for "from scratch". Set a timer before you start.
#
# ### Task 1 · a token bucket (10 minutes)
#
# A tenant may use `rate` tokens per second and burst up to `capacity`. The bucket is full at the first request.


# %%
def token_bucket(requests, rate, capacity):
    """requests: at least one (time in seconds, cost in tokens), in order of time
    -> list of bool: admitted or refused."""
    # BEGIN SOLUTION
    level, last, admitted = float(capacity), requests[0][0], []
    for time, cost in requests:
        level, last = min(capacity, level + (time - last) * rate), time
        admitted.append(cost <= level)
        level -= cost if admitted[-1] else 0
    return admitted
    # END SOLUTION


token_bucket = check("token-bucket", token_bucket)

# %% [markdown]
# ### Task 2 · merge two parts of a softmax (10 minutes)
#
# Attention was computed over two sets of keys. Each part has its output and the logarithm of its sum of exponentials.
# Every query sees a key in each part.


# %%
def merge(out_a, lse_a, out_b, lse_b):
    """out: [heads, queries, d], normalised within their part;
    lse: [heads, queries] -> (output, lse) over both parts."""
    # BEGIN SOLUTION
    lse = torch.logaddexp(lse_a, lse_b)
    return out_a * (lse_a - lse).exp()[..., None] + out_b * (lse_b - lse).exp()[..., None], lse
    # END SOLUTION


merge = check("merge-softmax", merge)

# %% [markdown]
# ### Task 3 · the order of a dispatch (15 minutes)
#
# Every token has chosen k experts. Before the all-to-all its copies stand sorted by expert, so that each rank's rows are
# contiguous. Rank r holds experts r · n to r · n + n - 1, with n experts per rank.


# %%
def dispatch(experts, ranks, experts_per_rank):
    """experts: [tokens, k] -> (order, counts).

    order: [tokens · k], which (token, choice) pair of the flattened table stands where; pairs of
    one expert in their own order. counts: rows for each rank, as a list of `ranks` numbers.
    """
    # BEGIN SOLUTION
    flat = experts.reshape(-1)
    counts = torch.bincount(flat // experts_per_rank, minlength=ranks)
    return flat.argsort(stable=True), counts.tolist()
    # END SOLUTION


dispatch = check("dispatch-order", dispatch)

# %% [markdown]
# ### Task 4 · RMSNorm, forward and backward (15 minutes)
#
# RMSNorm ([Zhang and Sennrich 2019](https://arxiv.org/abs/1910.07467)) divides each token by the root of the mean of
# its squares, over the last axis, and multiplies by a weight per channel: y = x / sqrt(mean(x²) + eps) · weight. Write
# both passes by hand, without autograd and without a library's norm. x and weight may have 16 bits: compute in 32 bits,
# and return each result in the dtype of what it belongs to.


# %%
def rms_norm(x, weight, dy, eps):
    """x, dy: [..., tokens, hidden], the input and the gradient of the output; weight: [hidden]
    -> (y, dx, dweight): output, gradient of x, gradient of weight over all tokens."""
    # BEGIN SOLUTION
    wide, upper = x.float(), dy.float()
    inverse = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    normed = wide * inverse
    scaled = upper * weight.float()
    along = (scaled * normed).mean(-1, keepdim=True)  # of the norm's own dependence on x
    dx = inverse * (scaled - normed * along)
    dweight = (upper * normed).flatten(0, -2).sum(0)
    return (normed * weight.float()).to(x.dtype), dx.to(x.dtype), dweight.to(weight.dtype)
    # END SOLUTION


rms_norm = check("rms-norm", rms_norm)

# %% [markdown]
# ### Task 5 · rotary embedding (15 minutes)
#
# Rotary embedding ([Su et al. 2021](https://arxiv.org/abs/2104.09864)) turns pair i of a head's channels by the angle
# position · base^(-2i / head_dim), for i from 0 to head_dim/2 - 1: (a, b) becomes (a cos - b sin, a sin + b cos). Which
# channels are pair i depends on the checkpoint. With `interleaved=True` they are 2i and 2i + 1, as in the paper and in
# Meta's Llama; with `interleaved=False` they are i and i + head_dim/2, as in GPT-NeoX and in Hugging Face's Llama.
# Every channel stays in its place. Compute angles, their cosines and sines, and the products in 32 bits, whatever dtype x
# has: round once, at the end. Leave x as it is.


# %%
def rotate(x, positions, base, interleaved):
    """x: [tokens, heads, head_dim]; positions: [tokens], whole numbers, in any order
    -> x rotated, of its shape and dtype."""
    # BEGIN SOLUTION
    half = x.shape[-1] // 2
    frequencies = base ** (-torch.arange(half, dtype=torch.float32) * 2 / x.shape[-1])
    angles = positions.float()[:, None, None] * frequencies  # [tokens, 1, half]
    cos, sin = angles.cos(), angles.sin()
    wide = x.float()
    halves = wide[..., :half], wide[..., half:]
    a, b = (wide[..., 0::2], wide[..., 1::2]) if interleaved else halves
    turned = a * cos - b * sin, a * sin + b * cos
    together = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return together.to(x.dtype)
    # END SOLUTION


rotate = check("rotary", rotate)

# %% [markdown]
# ### Task 6 · AdamW (15 minutes)
#
# One step of AdamW ([Loshchilov and Hutter 2019](https://arxiv.org/abs/1711.05101), algorithm 2) for one parameter
# tensor, equal to `torch.optim.AdamW`'s and written without it: running means m of the gradient and v of its square, with
# the factors `betas`, both divided by 1 - beta^t in step t = 1, 2, ...; then param ← param - lr · m̂ / (sqrt(v̂) + eps) - lr ·
# weight_decay · param. The decay takes param as it was before the step, and stays out of the gradient. `lr` may differ
# from step to step. Whatever must survive until the next step belongs in `state`, which is an empty dictionary in the
# first one; each tensor has its own.


# %%
def adamw_step(param, grad, state, lr, betas, eps, weight_decay):
    """param and grad: tensors of one shape; changes param in place and returns nothing.

    state: this tensor's dictionary, empty at first; grad stays as it is."""
    # BEGIN SOLUTION
    if not state:
        state.update(step=0, m=torch.zeros_like(param), v=torch.zeros_like(param))
    state["step"] += 1
    beta1, beta2 = betas
    state["m"].mul_(beta1).add_(grad, alpha=1 - beta1)
    state["v"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    m = state["m"] / (1 - beta1 ** state["step"])
    v = state["v"] / (1 - beta2 ** state["step"])
    param.mul_(1 - lr * weight_decay)
    param.sub_(lr * m / (v.sqrt() + eps))
    # END SOLUTION


adamw_step = check("adamw", adamw_step)

# %% [markdown]
# ### Task 7 · Muon's Newton–Schulz iteration (15 minutes)
#
# Muon ([Jordan et al. 2024](https://kellerjordan.github.io/posts/muon/)) replaces the momentum of a weight matrix by a
# matrix with the same singular vectors whose singular values lie between about 0.7 and 1.2 after 5 steps, except those
# below about 0.0015 of its norm, which need more. It needs no decomposition: scale X = g / ‖g‖ with the Frobenius norm,
# then repeat `steps` times X ← a·X + (b·A + c·A·A)·X with A = X·Xᵀ and (a, b, c) = (3.4445, -4.7750, 2.0315), which
# maps each singular value s to a·s + b·s³ + c·s⁵. Use matrix products only, and no matrix larger than g: where g has
# more rows than columns, iterate on its transpose.


# %%
def orthogonalize(g, steps):
    """g: [rows, columns], not zero -> the matrix after `steps` iterations, of g's dtype."""
    # BEGIN SOLUTION
    tall = g.shape[0] > g.shape[1]
    x = g.T if tall else g
    x = x / x.norm()
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if tall else x
    # END SOLUTION


orthogonalize = check("newton-schulz", orthogonalize)

# %% [markdown]
# ## A session
#
# The clock runs from the first question. `ask` shows what is open; a drill takes `answer(number)`, a claim
# `answer("depends")`, a card or a design `answer()` and then `grade(1 to 4)`, a whiteboard task or a bug
# `run(your_function)`. `skip()` leaves one out. The session below is a trial, of which nothing is kept. Without
# `trial=True` your answers are kept, here and in the terminal alike: `Interview()` goes on where you stopped.

# %%
interview = Interview(minutes=45, topic="collectives", seed=7, trial=True)
interview.ask()

# %%
interview.skip()  # write the function in a cell and hand it in with interview.run(...) instead
interview.ask()

# %%
interview.answer("0.5")
interview.ask()

# %%
interview.answer()
interview.grade(3)
interview.ask()

# %% [markdown]
# Companies interview in rounds: `round="coding"`, `"debugging"` (programs with one mistake, and reports to read), `"design"`
# (a problem of labs 20 and 21), `"concepts"`, or all of them as a `"loop"`. `level="junior"`, `"senior"` or `"staff"` chooses what is asked.

# %% [markdown]
# ## What comes next
#
# Sessions in the terminal and here share one record:

# %%
receipts.due()

# %% [markdown]
# `python -m minillm progress` and `interview --due` show the same with your weakest topics, and
# `interview --sheet page.html --topic pipeline` writes a page to print. Preparing in a day, a week or a month: [docs/interview.md](../docs/interview.md).
#
# ## Can you answer them now?
#
# 1. Which topics do you answer well, and which come back because you did not?
# 2. Which mistakes do you make in mental arithmetic: units, prefixes, one GPU for all?
# 3. Can you write the small mechanisms without looking?
#
# Next: [25 · Kernels and compilation](25_kernels.ipynb), for those who want to know what a GPU does in all these steps.
# `python -m minillm progress` shows which exercises are left, and the [course map](../README.md) what each lab is about.

# %%
finish("24_interview")
