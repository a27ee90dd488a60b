# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 15 · Speculative decoding
#
# **One pass of the target model can yield several tokens, and they follow exactly the target's distribution.**
# A cheap proposer drafts a few tokens; the target checks them all in one pass.
# Stands on labs 12 (the cost of a pass) and 13 (the paged cache).
#
# The core path, sections 1 to 4 and exercise 7 (*Break it*), takes two hours; with the questions at the end plan three to
# four. Running the notebook from top to bottom takes about a minute. At the end you can answer:
#
# 1. Why does the output follow the target's distribution exactly, however bad the draft is?
# 2. How many draft tokens are worth it, by which formula, and why is there an optimum?
# 3. When does speculation lose, and which of its bugs does a test of the text not reveal?
#
# Here, as in [Leviathan et al. 2023](https://arxiv.org/abs/2211.17192), **p is the target's distribution and q the
# draft's**; [Chen et al. 2023](https://arxiv.org/abs/2302.01318), who published the method at the same time, use the
# letters the other way round. Section 1 measures what happens if you mix the two up.
#
# > **Common claims**
# >
# > - *"The speedup is K · acceptance · (1 - overhead)."* That grows without end. It is (1 - αᴷ⁺¹) / ((1 - α)(cK + 1)),
# >   which has an optimum ([Leviathan et al. 2023](https://arxiv.org/abs/2211.17192), Theorem 3.8).
# > - *"A pass yields Σ i · P(first i accepted) tokens."* It yields Σ P(first i accepted), without the factor i, and one
# >   more token from the target (the same paper, equation 1).
# > - *"The best draft has a tenth of the target's size."* With c = 0.1 and α = 0.8 no K gives more than 2.5 times; with
# >   c = 0.02 it is 3.8 (section 4).
# > - *"A high temperature lowers acceptance."* It does for draft tokens chosen without sampling. For sampled ones it
# >   depends on the pair of models: acceptance falls in Table 2 of the paper and rises for the small pair here.
# > - *"Speculation loses at large batches."* It does at short contexts. With long ones the pass still waits for memory
# >   ([Chen et al. 2024](https://arxiv.org/abs/2408.11049), MagicDec; *Where it loses* below).

# %%
import inspect

import torch

from course.kit import check, finish, hint, show, sliders
from course.lab15_speculative_decoding import experiments, figures, receipts
from course.lab15_speculative_decoding import experiments_runs as runs
from course.lab15_speculative_decoding.tiny_models import distance, first
from minillm.serve.speculate import verify
from minillm.serve.speculate.verify import choose, uniform

# %% [markdown]
# ## Why it can work
#
# In lab 12 a decode step read all the weights to make one token. What does a pass over several tokens cost? Measured on
# the committed target (5.8 million parameters), CPU seconds of one thread:

# %%
receipts.pass_cost()

# %% [markdown]
# Checking four tokens costs far less than generating four, one after the other. And checking *is* a forward pass: feed
# it the last verified token and K draft tokens, and row i of the logits says what the target predicts after draft
# token i.
#
#     last  d1  d2  d3      the input: one verified token and three draft tokens
#      p0   p1  p2  p3      the output: p0 judges d1, p1 judges d2, p2 judges d3, and p3
#                           gives one more token if all three are accepted
#
# ## Predict
#
# Write down three guesses; they come back beside the answers.

# %%
guess_tokens = 0.8 * 4  # tokens per pass: 4 draft tokens, each accepted with probability 0.8
guess_speedup = 4 * 0.8 * (1 - 0.1)  # times faster, if a draft token costs a tenth of a pass
guess_hot = "fewer"  # or "more": draft tokens accepted at temperature 1.5, compared with 0.5

# %% [markdown]
# ## 1 · What to do with a rejected token
#
# A draft token x, sampled from q, is accepted with probability min(1, p(x)/q(x)). So token x comes out *accepted* with
# probability q(x) · min(1, p(x)/q(x)) = min(p(x), q(x)): the blue part of the figure. After a rejection another token
# has to be sampled. From which distribution, so that accepted and resampled tokens together follow p?

# %%
show(figures.overlap)

# %%
sliders(figures.overlap, agreement=(0.0, 1.0), temperature=(0.3, 3.0), seed=(0, 9))

# %% [markdown]
# ### Exercise 1 · the residual (10 minutes)


# %%
def residual(p, q):
    """p, q: [vocab], float64 -> [vocab], the distribution to sample from after a rejection;
    p itself where p = q."""
    # BEGIN SOLUTION
    left = (p - q).clamp(min=0)
    total = left.sum()
    return left / total if total > 0 else p
    # END SOLUTION


residual = check("residual", residual)

# %% [markdown]
# The same rule on real probabilities: those of target and draft at 192 positions of held-out code. Nothing is sampled
# here. What one draft token and its verification yield is a formula, for the right rule and for three wrong ones. The
# rows give the total variation between that and the target's distribution, Σ |a - b| / 2.

# %%
receipts.one_draft_token()

# %% [markdown]
# The last row is the rule with the letters swapped. It is off by 1 - Σ min(p, q), exactly as far as the draft itself:
# the target's opinion brings the output no nearer to its distribution, and the text still looks fine.
#
# ### Exercise 2 · the verifier (20 minutes)
#
# Now K draft tokens and the K + 1 rows of one pass. Use `uniform(draw)` (a number from [0, 1)) and
# `choose(probabilities, draw)` (a token) for every random choice, and nothing else: the check then runs your function
# once for each way in which these choices can fall and adds up probabilities. For this, `uniform(draw)` is no float there: only compare it, as in `uniform(draw) < ratio`.


# %%
def verify_draft(target, drafted, q, draw):
    """target: [k + 1, vocab], q: [k, vocab], both float64; drafted: k tokens sampled from q
    -> the accepted ones and one more."""
    # BEGIN SOLUTION
    for i, token in enumerate(drafted):
        if not uniform(draw) < target[i, token] / q[i, token]:
            return [*drafted[:i], choose(residual(target[i], q[i]), draw)]
    return [*drafted, choose(target[len(drafted)], draw)]
    # END SOLUTION


verify_draft = check("verifier", verify_draft)

# %% [markdown]
# A pass yields from 1 to K + 1 tokens: never fewer than plain decoding, and one more than were drafted if all are
# accepted. Compare minillm's own (`minillm/serve/speculate/verify.py`). It handles one more case: a draft token that
# was not sampled (the likeliest token, or one copied from earlier text) has q = 1 at its place.

# %%
print(inspect.getsource(verify))

# %% [markdown]
# ### Exercise 3 · the loop (20 minutes)
#
# `draft(tokens)` returns one row of q; `target.rows(tokens, drafted)` returns the K + 1 rows of one pass. The check
# counts the passes of the target.


# %%
def speculate(target, draft, prompt, count, k, draw):
    """-> `count` tokens after the prompt, distributed as the target's;
    at most k draft tokens per pass."""
    # BEGIN SOLUTION
    tokens = list(prompt)
    while (left := len(prompt) + count - len(tokens)) > 0:
        drafted, rows = [], []
        for _ in range(min(k, left - 1)):
            rows.append(draft([*tokens, *drafted]))
            drafted.append(choose(rows[-1], draw))
        q = torch.stack(rows) if rows else None
        tokens += verify_draft(target.rows(tokens, drafted), drafted, q, draw)
    return tokens[len(prompt) :]
    # END SOLUTION


speculate = check("speculative-loop", speculate)

# %% [markdown]
# Your loop on the committed pair, greedy. The draft has a tenth of the target's parameters and was trained on the same
# text.

# %%
models = experiments.pair()
[prompt] = experiments.prompts("code", 1)
target = runs.Uncached(models.target)
draft, draw = runs.Uncached(models.draft), torch.Generator().manual_seed(0)
answer = speculate(target, draft, prompt, 24, 3, draw)
print(models.tokenizer.decode(answer))
receipts.your_loop(answer, target.passes, prompt)

# %% [markdown]
# A real engine also has to manage keys and values. The pass writes those of all draft tokens into the cache. Those of
# rejected tokens are simply not counted (`num_computed` stays behind them), and the next pass overwrites them. Nothing
# else has to be undone, because in minillm a draft token does not belong to its sequence until it is verified.
#
# ## 2 · The draft must report q truthfully
#
# The verifier divides by q and cannot check it. So q has to be the distribution the token was *really* sampled from:
# after the request's temperature, after its top-k, at the right position.
#
# ### Exercise 4 · an honest draft (15 minutes)


# %%
def honest_draft(scores, tokens, k, temperature, top_k, draw):
    """scores(tokens) -> logits [vocab]. -> (k draft tokens, [k, vocab] what each was sampled from).

    Process the logits as the target's are: divide by the temperature, rule out all but the top_k
    largest, softmax. At temperature 0 the draft tokens are the likeliest ones, and None is returned
    instead of rows."""
    # BEGIN SOLUTION
    drafted, rows = [], []
    for _ in range(k):
        logits = scores([*tokens, *drafted])
        if temperature == 0:
            drafted.append(int(logits.argmax()))
            continue
        lowest = logits.topk(top_k).values[-1]
        kept = (logits / temperature).masked_fill(logits < lowest, float("-inf"))
        rows.append(torch.softmax(kept, dim=-1))
        drafted.append(choose(rows[-1], draw))
    return drafted, torch.stack(rows) if rows else None
    # END SOLUTION


honest_draft = check("honest-draft", honest_draft)

# %% [markdown]
# How often is a draft token accepted? A sampled one with Σ min(p, q) on average. The draft's likeliest token, taken
# without sampling, with p(x). Both computed at 192 positions of held-out code and of prose (the docstrings in the
# code):

# %%
alpha = experiments.alpha_by_temperature(figures.TEMPERATURES)


def acceptance_by_temperature():
    """Share of draft tokens accepted by temperature, for code and prose:
    sampled tokens and likeliest tokens."""
    return figures.draw_alpha(alpha)


show(acceptance_by_temperature)

# %%
receipts.temperature(alpha, guess_hot)

# %% [markdown]
# Two effects compete. A higher temperature flattens both distributions, and two flat distributions overlap more; but
# a draft that agrees with the target mostly on the likeliest token loses that agreement. For this small pair acceptance
# of *sampled* tokens rises with temperature. For the larger pairs in Leviathan et al. (Table 2) it falls: 0.75 at
# temperature 0 and 0.62 at temperature 1 for their smallest translation draft. Measure yours. What holds for every
# pair: a draft token that was *not* sampled is accepted with probability p(x), which falls as temperature rises.
#
# ## 3 · A draft without a model
#
# Code repeats itself. What followed the last time?
# ([Saxena 2023](https://github.com/apoorvumang/prompt-lookup-decoding))
#
# ### Exercise 5 · prompt lookup (15 minutes)


# %%
def look_up(tokens, k, longest=3):
    """-> up to k tokens that followed the most recent earlier occurrence of the ending.

    The ending is the last `longest` tokens; if they did not occur before, the last longest - 1, and
    so on down to the last one. An earlier occurrence may overlap the ending. [] if none is
    found."""
    # BEGIN SOLUTION
    tokens = list(tokens)
    for size in range(min(longest, len(tokens) - 1), 0, -1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[-size:]:
                return tokens[start + size : start + size + k]
    return []
    # END SOLUTION


look_up = check("prompt-lookup", look_up)

# %% [markdown]
# It has no weights and no forward pass, and with an index (`minillm/serve/speculate/proposers/ngram.py`) it takes almost no time.
# To the verifier it is a proposer like any other, with q = 1 at its token, and just as exact.
#
# ## 4 · How many draft tokens?
#
# If each draft token is accepted with probability α, independently, a pass yields at least i + 1 tokens with
# probability αⁱ. The mean is the sum of these probabilities: 1 + α + α² + ... + αᴷ.
#
# ### Exercise 6 · the best K (15 minutes)


# %%
def speedup(alpha, c, k):
    """-> plain seconds per token / speculative ones. c: seconds of one draft token / of one pass of
    the target; a pass over k + 1 tokens is taken to cost as much as one over 1."""
    # BEGIN SOLUTION
    return sum(alpha**i for i in range(k + 1)) / (1 + c * k)
    # END SOLUTION


def best_k(alpha, c, most):
    """-> the k of 0 .. most with the largest speedup; the smallest of equals."""
    # BEGIN SOLUTION
    return max(range(most + 1), key=lambda k: (speedup(alpha, c, k), -k))
    # END SOLUTION


speedup, best_k = check("best-k", (speedup, best_k))

# %% [markdown]
# Your guesses, and your functions beside the closed form:

# %%
receipts.how_many(guess_tokens, guess_speedup, speedup, best_k)

# %% [markdown]
# There is an optimum because draft token K counts only if all those before it were accepted, while each of them costs
# the same time. A smaller draft loses acceptance and gains speed; which matters more is what the formula computes.

# %%
show(figures.speedup_by_k)

# %%
sliders(figures.speedup_by_k, alpha=(0.0, 0.99), c=(0.0, 0.5), verify=(1.0, 3.0))

# %% [markdown]
# ### Measured
#
# The engine with the draft model, greedy, on code, one sequence at a time. The formula is fed with acceptance at each
# place and c from the run with K = 6, and the cost of a pass over K + 1 tokens measured alone.

# %%
swept = runs.sweep(figures.KS, count=4)


def k_sweep():
    """Tokens per pass and speedup by the number of draft tokens,
    measured solid and predicted dashed."""
    return figures.draw_sweep(swept)


show(k_sweep)

# %%
receipts.sweep(swept)

# %% [markdown]
# These are four answers of 32 tokens: acceptance at the later places rests on a handful of tokens (the table's title
# says how many), and speedups move by a tenth from run to run. Quote `python -m minillm bench speculate`.
# A call of this draft costs far more than its tenth of the parameters suggests: most of it is overhead.
#
# K = 0, no draft at all, has speedup 1 and may well be best. And the best K differs between sequences. `k="adaptive"`
# takes each sequence's own recent acceptance and the formula above, down to K = 0:

# %%
receipts.adaptive(swept)

# %% [markdown]
# ## 5 · All proposers (skip on a first reading)
#
# One interface, one verifier, six ways to draft:
#
# | | where draft tokens come from | trained |
# |---|---|---|
# | draft | a small model with the same vocabulary and its own paged cache | yes |
# | ngram | what followed the last time | no |
# | medusa | four heads on the target's last hidden state, one per place ([Cai et al. 2024](https://arxiv.org/abs/2401.10774)) | a little |
# | eagle | one block that continues the target's features ([Li et al. 2024](https://arxiv.org/abs/2401.15077)) | a little |
# | lookahead | n-grams collected from the target's own parallel guesses ([Fu et al. 2024](https://arxiv.org/abs/2402.02057)) | no |
# | early-exit | the target's first two blocks and a small adapter ([Liu et al. 2024](https://arxiv.org/abs/2404.18911), Kangaroo) | a little |
#

# %%
table = runs.table("code", 2)


def proposers():
    """Tokens per pass and speedup of every proposer on code: measured, and by formula from
    the acceptance and costs of the same run."""
    return figures.draw_table(table)


show(proposers)

# %%
receipts.proposers(table)

# %% [markdown]
# - The formulas are fed with the same run's acceptance and costs: they explain it and predict nothing.
# - **The text is the target's in every row.** A bad proposer costs time, never quality.
# - **On a small machine n-gram lookup wins**: a call of any second model costs a good part of the target's pass. Beside a
#   70B target a 1B draft reads one seventieth of the bytes, and proposers with a model win. Lookahead keeps a pool of
#   n-grams and makes each pass wider.
# - A published factor belongs to one model, text, batch size and machine. The heads here were trained for minutes. Medusa
#   and EAGLE also verify a *tree* of draft tokens in one pass; here a draft is a chain.
#
# ## Break it
#
# ### Exercise 7 · which of these are exact? (15 minutes)
#
# Six programs, A to F. Each drafts and verifies with top-k; five contain a bug or an oddity from a real project. You
# get what each writes, as an exact distribution over the next three tokens, beside the target's. Write the judge.
# `first(d, n)` gives the distribution of the first n tokens and `distance(a, b)` the total variation. These are exact
# enumerations in float64: count any difference above 1e-9 as one; what is smaller is rounding.


# %%
def verdict(found, true, accepted, possible):
    """found, true: {(token, token, token): probability}; accepted: mean draft tokens accepted per
    pass, possible: the largest mean that an exact verifier can reach.

    -> "first token off", "later tokens off" (each first token is right, but not the tokens
    together), "exact", or "exact, accepts less" than possible."""
    # BEGIN SOLUTION
    for places in (1, 2, 3):
        if distance(first(found, places), first(true, places)) > 1e-9:
            return "first token off" if places == 1 else "later tokens off"
    return "exact" if accepted > possible - 1e-9 else "exact, accepts less"
    # END SOLUTION


verdict = check("which-is-exact", verdict)

# %%
receipts.programs(verdict)

# %% [markdown]
# What does each of them do wrong?
#
# <details><summary>Answer</summary>
#
# - **A: the first draft token is never verified** ([lattice#243](https://github.com/ohdearquant/lattice/issues/243)):
#   the loop begins at the row after it, so the row that should judge it is never looked at. It has the largest distance
#   of all.
# - **B: a sampled token is verified as if q = 1** ([EAGLE#329](https://github.com/SafeAILab/EAGLE/issues/329)). It
#   looks wrong and is exact: accept with p(x), otherwise sample from p without x. That is the residual of a token that
#   was certain. It only accepts less.
# - **C: q from before top-k**
#   ([transformers#47932](https://github.com/huggingface/transformers/issues/47932)). q is too small at the tokens that
#   are drafted, so they are accepted too often.
# - **D** is right.
# - **E: the generator is seeded again for each draft token**
#   ([LLMSpeculativeSampling](https://github.com/feifeibear/LLMSpeculativeSampling/blob/76117cf/sampling/speculative_sampling.py),
#   if a seed is given). The first token has the right distribution, but draft token 2 is judged with the number that has just accepted draft token 1. A test of the first
#   token only can never find this.
# - **F: the likeliest token, verified as if it had been sampled**
#   ([transformers#32867](https://github.com/huggingface/transformers/issues/32867)). p/q with q < 1 accepts too often,
#   and a greedy test cannot see it.
# </details>
#
# ### Preempted with draft tokens pending
#
# A sequence can lose its blocks between drafting and verification. If draft tokens already counted as its tokens, it
# would come back with text that was never verified ([vLLM#28558](https://github.com/vllm-project/vllm/pull/28558)).

# %%
receipts.preempted()

# %% [markdown]
# ### Not exact, on purpose (skip on a first reading)
#
# Medusa's *typical acceptance* ([Cai et al. 2024](https://arxiv.org/abs/2401.10774), §2.3.1) accepts a draft token if
# p(x) is above a threshold that falls with the entropy of p, whatever q was. Its output follows another distribution,
# and how far off that is can be computed: below the threshold a token is sampled from p.

# %%
show(figures.typical_acceptance)

# %% [markdown]
# A loose threshold accepts more than the exact rule. A strict one accepts *less* and is still off, because unlikely
# tokens come too rarely at any threshold below 1.
#
# ## Where it loses
#
# ### A large batch
#
# Verification uses arithmetic that would lie idle while the weights are read. In a large batch it does not lie idle.
# Measured here with prompt lookup, the proposer that was fastest above (each batch has other texts, hence other
# tokens per pass):

# %%
receipts.batches_here()

# %% [markdown]
# And by formula for an 8B model on one H100 (the roofline of lab 14, `course/shared/step_cost.py`), keys and values included:

# %%
receipts.batches_h100()

# %% [markdown]
# At a context of 0 the pass becomes compute-bound at 295 tokens (989 TFLOP/s / 3.35 TB/s; lab 12), so from 64 sequences
# on the draft tokens start to cost time, and at 256 speculation makes the same hardware *slower*. With longer contexts
# each sequence also reads its own keys and values, once per pass however many tokens are checked: at 1,536 tokens
# speculation gains nearly as much at batch 256 as at batch 1. (At 2,048 the keys and values of 256 sequences would not
# fit beside the weights in 80 GB.) An engine should decide by load *and* context.
#
# *Short answers behind long prompts* lose as well: the draft model reads the prompt, too, and an answer of n tokens has
# only n - 1 decode passes from which that can be won back.
#
# ## The same in production
#
# transformers with the same two models, one sequence at a time, with a constant number of draft tokens. (By default it
# also stops drafting when the draft is less than 40 % sure of a token.)

# %%
receipts.transformers()

# %% [markdown]
# | transformers (`generate`, `GenerationConfig`) | vLLM (`--speculative-config`, JSON; `"method"` first) | here |
# |---|---|---|
# | `assistant_model=` | `"draft_model"`, `"model"` | `DraftModel(draft)` |
# | `prompt_lookup_num_tokens`, `max_matching_ngram_size` | `"ngram"`, `prompt_lookup_max`, `..._min` | `NGram` |
# | `assistant_early_exit` (a model trained for it) | | `exiting(target)` |
# | `use_mtp` (heads that came with the model) | `"mtp"` | `Medusa` is its cousin |
# | | `"eagle3"`, `"model"` | `Eagle` |
# | | `"suffix"` (n-grams of all requests) | |
# | `num_assistant_tokens` | `"num_speculative_tokens"` | `k` |
# | `num_assistant_tokens_schedule`, `assistant_confidence_threshold` | | `AdaptiveK` |
# | | `"num_speculative_tokens_per_batch_size"` (K by load) | |
# | `assistant_ensemble_weight` (not lossless) | `"rejection_sample_method"` | always exact |
#
# Sources: transformers 5.23's
# [`GenerationConfig`](https://huggingface.co/docs/transformers/main_classes/text_generation) and vLLM's
# [speculative decoding](https://docs.vllm.ai/en/v0.17.0/features/speculative_decoding/) (0.17). vLLM calls
# its sampling lossless "up to the precision limits of hardware numerics": with other batch shapes a greedy tie may fall the other way.
#
# ## On a GPU
#
# ```bash
# python -m minillm generate "def parse(" --speculate ngram --k 6        # here
# python -m minillm bench speculate                                       # all proposers, against transformers
# vllm serve $MODEL --speculative-config \
#      '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 5}'
# vllm serve $MODEL --speculative-config '{"method": "draft_model", "model": "'$DRAFT'", "num_speculative_tokens": 5}'
# ```
#
# Under tensor parallelism the draft is usually not cut, or less than the target (vLLM's `draft_tensor_parallel_size`):
# it is small, and its passes are dominated by latency.
#
# ## Interview corner
#
# The numbers behind the answers, computed by formula:

# %%
receipts.interview()

# %% [markdown]
# Say your answer aloud before you open one.
#
# **1. Why is the output exactly the target's distribution?**
# <details><summary>Answer</summary>
#
# Token y comes out accepted with q(y) · min(1, p(y)/q(y)) = min(p(y), q(y)). A rejection happens with probability
# 1 - Σ min(p, q), and then y is sampled from max(p - q, 0) divided by exactly that sum, which contributes
# max(p(y) - q(y), 0). Together that is p(y). By induction over positions it holds for the whole text.
# </details>
#
# **2. Which formula gives tokens per pass, and what does it assume?**
# <details><summary>Answer</summary>
#
# (1 - α^(K+1)) / (1 - α): every draft token accepted independently with probability α. In practice places differ; use
# 1 + α₁ + α₁α₂ + ... with the acceptance of each place. The 1 is the bonus or the correction.
# </details>
#
# **3. Does it reduce FLOPs?**
# <details><summary>Answer</summary>
#
# No, it adds some: rejected tokens were computed for nothing. It reduces how often the weights are read.
# </details>
#
# **4. The request has top-p 0.9 and a repetition penalty. What has to change?**
# <details><summary>Answer</summary>
#
# Nothing in the rule. p and q are the distributions *after* all processing, and the penalty at place i counts the draft
# tokens before i. An unprocessed q that the tokens were really sampled from stays exact but is accepted less; a q that
# they were not sampled from is a bug.
# </details>
#
# **5. How would you test a speculative decoder?**
# <details><summary>Answer</summary>
#
# Greedy equality finds cache bugs and no sampling bug. Enumerate all outcomes on a tiny vocabulary, several tokens
# together, with every kind of logit processing. Then count passes and accepted tokens, because a decoder that never
# drafts would also pass.
# </details>
#
# **6. What happens in the KV cache when draft token 3 of 5 is rejected?**
# <details><summary>Answer</summary>
#
# The entries of tokens 1 and 2 are right and stay. Those of 3 to 5 belong to tokens that are not in the text: the
# computed length stays before them, the next pass overwrites them, surplus blocks can be released, and none of them may
# enter the prefix cache.
# </details>
#
# ### Design questions
#
# **D1. A 70B model in bf16 runs on four H100s (take 4 × 989 TFLOP/s and 4 × 3.35 TB/s). 16 sequences with contexts of
# 4,096 tokens decode together, and TPOT must stay below 8 ms. A 1B draft has c = 0.03 and α = 0.7. Which K?**
#
# **D2. For the 8B model on one H100: a draft with α = 0.65 and c = 0.02, or one with α = 0.8 and c = 0.1? Decide for 8
# and for 128 sequences, at a context of 500.**

# %%
receipts.design_tpot()

# %%
receipts.design_draft()

# %% [markdown]
# <details><summary>D1 and D2: a worked answer</summary>
#
# D1: the pass reads 139 GB of weights and 21 GB of keys and values at 13.4 TB/s. That takes 12 ms, so plain decoding
# misses the limit. Checking K + 1 tokens per sequence stays memory-bound (16 · 8 = 128 tokens are far from 295), so the
# pass hardly grows, and K is limited by cK. From K = 1 on the limit is met, and K = 6 and K = 7 are best, at 4.6 ms. Choose 3 or
# 4: at α = 0.7 they are 12 % and 5 % slower than the best, and less if α is lower than hoped. At α = 0.4 no K meets the
# limit (8.04 ms at best), so the acceptance on *your* traffic decides and has to be monitored.
#
# D2: at 8 sequences verification costs next to nothing and the drafts are equal within 2 %: the better one makes up for
# its price. At 128 a pass over 3 tokens per sequence is still memory-bound and one over 4 no longer is. There the small
# draft stops at K = 2; the larger one, accepted more often, gains a little up to K = 3 and leads by 4 %. Where drafts are
# so close, choose by what the formula leaves out: the larger draft also has a larger cache and prefill.
# </details>
#
# ### Capstone (open)
#
# Write `policy(batch, context, alpha, c) -> K` for an engine that serves the 8B model on one H100, with `H100_8B.step`
# (`course.shared.step_cost`) as your machine. It should never be slower than K = 0 by more than 1 %. Then let α be
# wrong by ± 0.1 and the context grow during an answer: how much of the gain is left, and what would you measure in
# production to keep it? Defend the policy in half a page.
#
# ## Can you answer them now?
#
# 1. Why does the output follow the target's distribution exactly, however bad the draft is?
# 2. How many draft tokens are worth it, by which formula, and why is there an optimum?
# 3. When does speculation lose, and which of its bugs does a test of the text not reveal?
#
# Next: in [16 · Quantization](16_quantization.ipynb) a pass reads fewer bytes, and you measure what that costs.

# %%
finish("15_speculative_decoding")
