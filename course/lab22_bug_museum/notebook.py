# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 22 · The bug museum
#
# **Every silent bug leaves a trace: the art is to order the measurement that shows it.**
# Stands on labs 03 to 15 (what the exhibits break).
#
# Most exhibits are bugs that shipped in a known project, planted in minillm's own code for one run; in two nothing is
# wrong, and you have to say so. All but one raise no error, and where there is a loss, it usually falls. You get the
# symptom, order measurements for minutes, name the culprit, repair the code, and read how an experienced engineer went
# about it. About three hours with four exercises; the core path of two is sections 1 to 5. Running the notebook from top to bottom takes less than a minute. At
# the end you can answer:
#
# 1. Why is a falling loss no evidence, and which number of the first step is?
# 2. Which measurement do you order first for a given symptom, and which ones mislead?
# 3. How can two bugs satisfy the very check that finds either?

# %%
import contextlib

import numpy as np
import torch

from course.kit import check, finish, hint, show, sliders
from course.lab22_bug_museum import figures, receipts
from course.lab22_bug_museum.desk import desk
from course.lab22_bug_museum.game import visit
from course.lab22_bug_museum.notices import notices
from minillm.adapters.attach import adapted_kinds
from minillm.data.sampler import permutation
from minillm.predict.model import causal_context, training_flops
from minillm.predict.training.adapters import Adapters

# %% [markdown]
# ## 0 Predict
#
# The loss on which `backward` is called is too large by a factor of 4 in every step; the log shows the right one. AdamW
# trains the model. By which factor is the *logged* loss of the last step wrong, and by which the gradient norm? Write your
# guesses before you go on.

# %%
guess_of_loss, guess_of_norm = 1.0, 1.0

# %% [markdown]
# ## 1 A case, played
#
# Watch one before you play. A case begins with what was reported, says what can be ordered and for how many minutes, and
# names the suspects.

# %%
watched = visit("second-replica", seed=1)
watched

# %% [markdown]
# Ranks that hold the same weights and see other tokens have to add up their gradients. Whether they do is in the ledger, for
# five minutes. All gradients together have as many bytes as the model.

# %%
watched.order("ledger")

# %% [markdown]
# There are the messages of the ring and some sums of a few bytes; none carries all gradients. Suspects `a` to `c`
# would compute gradients wrongly, and these are never reduced. Does it matter, and from when on? Ranks that begin apart would
# have shown another first loss, and the symptom says that it is right. Six minutes:

# %%
watched.order("replica-check")

# %% [markdown]
# Every parameter that both ranks hold differs after six steps. So nothing was reduced, and that was decided where the model is
# wrapped for its reduction.

# %%
watched.accuse("e")

# %%
watched.debrief()

# %% [markdown]
# ## 2 Your first case: a pipeline
#
# A wrong accusation costs ten minutes. Your score falls with each minute beyond those of the model investigation.

# %%
case = visit("slow-with-clipping", seed=1)
case

# %% [markdown]
# Which measurement halves the space for the fewest minutes? Put its name into the next cell, or several names. Then accuse a
# suspect by its letter.

# %%
case.order()

# %%
case.accuse()

# %% [markdown]
# The code opens when you have named the culprit. If you would rather see everything, `case.debrief(give_up=True)` opens the
# model investigation, and then `case.code()` shows what runs.

# %%
case.debrief()

# %% [markdown]
# ### Exercise · repair the pipeline's loss (12 minutes)
#
# Write the function as it should be; `case.code()` shows it as it runs in the museum. It belongs to `HeldParts`, cuts a
# batch into as many pieces as the schedule has microbatches and hands `step` a loss for each. `loss` divides by what the
# *whole* batch counts. The check plants your function on real ranks, in a run with another seed and in the oracle with another
# number of microbatches, and asks whether the trace is gone. Annotations may be left out.


# %%
def run(self, step, batch, loss, counted=None):
    """Returns the sum of loss(sum of weight * nll) over the microbatches.

    step: called with the pieces of the tokens, shape and loss_of.
    shape(m): (torch.Size, dtype) of what a rank sends of m; loss_of(last, y, m): its loss,
    where last.loss(y, targets, weights) gives sums of nll and of weights.
    batch: tokens, targets and weights, [rows, seq] each; weights may be None.
    counted: gets each microbatch's sum of weights, without a gradient, where the last part is.
    """
    # BEGIN SOLUTION
    tokens, targets, weights = batch
    count = self.pipeline.schedule.microbatches
    some_tokens, some_targets = tokens.tensor_split(count), targets.tensor_split(count)
    some_weights = [None] * count if weights is None else weights.tensor_split(count)
    part = self.parts[0]
    seq, dtype = tokens.shape[1] // part.sequence_shards, next(part.parameters()).dtype

    def shape(m):
        return torch.Size((len(some_tokens[m]), seq, part.config.hidden_size)), dtype

    def loss_of(last, y, m):
        nll, weight = last.loss(y, some_targets[m], some_weights[m])
        if counted is not None:
            counted.append(weight.detach().double())
        return loss(nll)

    return step(some_tokens, shape, loss_of)
    # END SOLUTION


run = check("slow-with-clipping", run)

# %% [markdown]
# Now your guesses beside what was measured. A constant factor in the gradient cancels in Adam's update, which divides a mean
# of gradients by the root of a mean of their squares.

# %%
receipts.factor_under_adam(guess_of_loss, guess_of_norm)

# %%
show(figures.silent, exhibit="slow-with-clipping")

# %% [markdown]
# On the left is what everybody looks at, on the right what gives most of these bugs away. Move to other exhibits: which
# parameters are wrong, and is it by a common factor? A common factor points at the loss or at the reduction; a class of parameters points
# at how that class is handled; one parameter points at that parameter.

# %%
sliders(figures.silent, exhibit=list(figures.TRAINED))

# %% [markdown]
# ## 3 Two culprits
#
# Four exhibits of the museum hold two bugs that hide each other. Here is one: name both with `accuse("x", "y")`.

# %%
pair = visit("two-gpus-one-run", seed=1)
pair

# %%
pair.order()

# %%
pair.accuse()

# %%
pair.debrief()

# %% [markdown]
# ### Exercise · repair both (15 minutes)
#
# `indices` belongs to the sampler: which windows rank `self.rank` of `self.world_size` reads, `self.batch_size` of them, if
# the step begins at `position` of a stream that is dealt out like cards. `accumulating` belongs to the strategy: the
# context inside which one microbatch is computed. Of a step's microbatches only the last communicates. A layout that reduces
# nothing, `self.module is self.model` without ZeRO, needs no context at all.


# %%
def indices(self, position):
    """NumPy integers, [batch_size]: this rank's windows of the step at `position`."""
    # BEGIN SOLUTION
    mine = position + self.rank + self.world_size * np.arange(self.batch_size)
    epochs, offsets = np.divmod(mine, self.num_samples)
    if not self.shuffle:
        return offsets
    drawn = np.empty_like(offsets)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        drawn[here] = permutation(self.num_samples, self.seed, int(epoch))[offsets[here]]
    return drawn
    # END SOLUTION


def accumulating(self, last):
    """A context for one microbatch; `last`: whether it is the last one of its step."""
    # BEGIN SOLUTION
    if last or (self.layout.zero == 0 and self.module is self.model):
        return contextlib.nullcontext()
    return self.stepped.no_sync() if self.layout.zero in (1, 2) else self.module.no_sync()
    # END SOLUTION


indices, accumulating = check("two-gpus-one-run", (indices, accumulating))

# %% [markdown]
# Repair one of the two alone and look at the trace again: the replica check, which was silent, begins to complain, or
# nothing changes at all. That is how two bugs hide each other.
#
# ## 4 A number that is too good
#
# Not every silent bug is in the gradients. This one is in a slide.

# %%
slide = visit("utilisation", seed=1)
slide

# %%
slide.order()

# %%
slide.accuse()

# %% [markdown]
# ### Exercise · repair the utilisation (8 minutes)
#
# MFU is the useful work of a step per second as a share of the peak. A token looks at itself and at those before it, and
# `model.sliding_window`, where there is one, limits how many these are. Adapters, of which `self.config.lora` is the rank,
# have a formula of their own: `Adapters(model, rank, adapted_kinds(model, self.config.adapter)).training_flops(context)`.


# %%
def mfu(self, tokens, seconds):
    """tokens: of the step; seconds: that it took. None without a peak to compare with."""
    # BEGIN SOLUTION
    if self.peak_flops is None:
        return None
    model = self.config.model
    context = causal_context(self.config.seq_len, model.sliding_window)
    if self.config.lora is None:
        flops = training_flops(model, context).total
    else:
        layers = adapted_kinds(model, self.config.adapter)
        flops = Adapters(model, self.config.lora, layers).training_flops(context).total
    return tokens * flops / seconds / self.peak_flops
    # END SOLUTION


mfu = check("utilisation", mfu)

# %% [markdown]
# ## 5 A server
#
# Serving has silent bugs of its own. Here is a request that never ends on a healthy server. Counts and records are what an
# engine gives you; the naive loop is its oracle.

# %%
waiting = visit("never-ends", seed=1)
waiting

# %%
waiting.order()

# %%
waiting.accuse()

# %% [markdown]
# ### Exercise · repair the look-up (5 minutes)
#
# `prefixes` belongs to the scheduler: the keys of the blocks that a hit in the prefix cache may cover, none without
# `self.pool.prefix_cache`. `sequence.prefixes(count, block_size)` gives those of its first `count` full blocks. The check
# holds your function to the naive loop, and to the keys that prompts of any length may take over, the first block's first.


# %%
def prefixes(self, sequence):
    """The keys of the full blocks of `sequence` that a hit may cover."""
    # BEGIN SOLUTION
    full = (sequence.num_tokens - 1) // self.pool.block_size if self.pool.prefix_cache else 0
    return sequence.prefixes(full, self.pool.block_size)
    # END SOLUTION


prefixes = check("never-ends", prefixes)

# %% [markdown]
# ## 6 Receipts: what looks right, and what does not
#
# The rows that look right with the fault in place are what a review would have checked. The trace is there with the fault and
# not without it, and after each run minillm's code is its own again, by a hash.

# %%
receipts.every_bug_leaves_a_trace()

# %% [markdown]
# Which measurement sees which exhibit? Each that trains on two ranks runs once more with its fault, but for `restart-bump`
# and `fourth-step`, which measure whole runs. The table says how far the last loss, the norm and the worst gradient of the
# first step are from one process's, and how many copies of parameters differ between ranks.

# %%
show(figures.what_sees_it)

# %% [markdown]
# Copies differ in few of them, the loss misses half, the norm misses whole classes of parameters, and a comparison of
# gradients by name sees everything but the norm itself and what happens after the gradients: `half-way` shows in the loss
# alone.
#
# Which of minillm's own checks would have noticed? This was computed by planting each fault and running the check, and a test
# computes it again. A bug whose row says *no* under the check that you rely on is one that you would have shipped; *-* means
# that the check was not run. The *mismatch check* compares the collectives that ranks call, *receipts* are counts of bytes,
# tokens and plans, *empty at the end* says that all blocks and seats were given back.

# %%
notices("training")

# %%
notices("serving")

# %% [markdown]
# In 8 of the 14 serving exhibits the naive loop finds no wrong token: time, isolation and distributions need checks of
# their own.
# [docs/debugging.md](../docs/debugging.md) has the exhibits on one page, from symptom to measurement to culprit.
#
# ## 7 The other exhibits
#
# Choose one, begin, and play. In a terminal, `python -m minillm museum` does the same, and
# `python -m minillm museum NAME --fix FILE.py` judges a repair.

# %%
receipts.hall()

# %%
desk()

# %% [markdown]
# ## 8 Where it loses
#
# - A comparison with one process needs a model that one process can hold. At full size nobody has it: compare a small model
#   under the same layout, with sizes that are all different, before the large run.
# - Bits agree only where sums have the same order. In 16 bits the gradients of two right layouts differ in the third digit,
#   and a small bug hides in that. Compare in float64.
# - A trace has to be written before the run. Gradient norm, tokens, learning rate and a hash of the replicas cost next to
#   nothing; gradients by name cost a gather.
#
# ## In production
#
# The layouts of torchtitan are tested in a like way: a loss curve of each layout is held to that of a reference, with fixed
# seeds
# ([torchtitan on convergence](https://github.com/pytorch/torchtitan/blob/main/docs/converging.md)). `python -m minillm oracle`
# is this course's form of it. To practise with others, `python -m minillm museum --plant 7 --out DIR` writes a copy of minillm
# with a bug in it, a run to find it from, and a sheet for the teacher.
#
# ## Can you answer them now?
#
# 1. Why is a falling loss no evidence, and which number of the first step is?
# 2. Which measurement do you order first for a given symptom, and which ones mislead?
# 3. How can two bugs satisfy the very check that finds either?
#
# **Design questions.** D1: you may log five numbers per step for a run on 1,024 GPUs. Which five, and which exhibits would
# each have found? D2: a test of a new layout may run for one minute on two ranks. Which sizes do you choose for batch, heads,
# microbatches and tokens, and why is none of them 1 and no two of them equal?
#
# **Capstone (open).** Take a bug of your own, write it as an exhibit in the form of
# `course/lab22_bug_museum/exhibits_tensor.py` (a fault as an edit, what looks right, the trace, four suspects, two wrong
# repairs), and give it to somebody.
#
# Next: [23 · Common claims](23_claims.ipynb), where you vote on what is often said about these systems, then compute it.

# %%
finish("22_bug_museum")
