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
# Stands on labs 00 to 15 (their mechanisms and formulas).
#
# Three whiteboard tasks of its own (35 minutes), and a deck, drills and tasks from all labs that you come back to:
# about an hour the first time. In the terminal the same interview runs under a clock:
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
# >   look. Cards come back at growing intervals, chosen by
# >   [FSRS](https://doi.org/10.1145/3534678.3539081) from how well each one went.

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
# Every number in an answer is computed from the course's formulas when you see it, and every answer names the lab or the
# formula that proves it. What is free text you grade yourself; the program does not pretend to understand it.
#
# ## Drills
#
# A number in your head, with its unit if you like (`"4.2 GB"`, `"18 days"`). No calculator. How close it must be depends on the
# question: estimates pass within 10 or 15 %, shares and counts of rounds must be nearer.

# %%
print(receipts.drill("cache_bytes", seed=5))
guess_bytes = 1e9  # your number

# %%
receipts.answer("cache_bytes", 5, guess_bytes)

# %%
print(receipts.drill("train_days", seed=2))
guess_days = 10  # your number

# %%
receipts.answer("train_days", 2, guess_days)

# %% [markdown]
# ## Whiteboard tasks
#
# In the terminal a task is drawn from all labs: a ring all-gather, 1F1B's order, a block pool, rejection sampling. Three more
# stand here. Set a timer before you start.
#
# ### Task 1 · a token bucket (10 minutes)
#
# A tenant may use `rate` tokens per second and burst up to `capacity`. The bucket is full at the first request.


# %%
def token_bucket(requests, rate, capacity):
    """requests: list of (time in seconds, cost in tokens), in order of time
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
interview.answer("1e9")
interview.ask()

# %%
interview.answer()
interview.grade(3)
interview.ask()

# %% [markdown]
# Companies interview in rounds: `round="coding"`, `"debugging"` (programs with one mistake), `"design"` (a problem of labs 20
# and 21), `"concepts"`, or all of them as a `"loop"`. `level="junior"`, `"senior"` or `"staff"` chooses what is asked.

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
# This was the last lab. `python -m minillm progress` shows which exercises are left, and the [course map](../README.md)
# what each lab is about.

# %%
finish("24_interview")
