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
# **More than one token per pass of the target, the same distribution.** Somebody cheap guesses, the model checks.
#
# About 115 minutes with the exercises; running it top to bottom takes under a minute. At the end you can answer:
#
# 1. Why is the text that comes out distributed exactly as if nobody had guessed, however bad the guesses are?
# 2. How many guesses pay, by which formula, and why is there an optimum?
# 3. Where does it lose, and which of the losses does a test of the text not show?
#
# Leviathan et al. 2023 and Chen et al. 2023 found it at the same time. Their letters differ: here **p is the target's
# distribution and q the draft's**, as in the first paper. In the second it is the other way round, and a rule copied
# from one text with the letters of the other is wrong (you will measure how wrong).

# %%
import inspect

import torch

from course.lab15_speculative_decoding import experiments, formulas
from course.lab15_speculative_decoding import experiments_breaks as breaks
from course.lab15_speculative_decoding import experiments_peers as peers
from course.lab15_speculative_decoding import experiments_runs as runs
from course.lab15_speculative_decoding import figures as pictures
from course.lab15_speculative_decoding.guessing import distance, first
from minillm.labkit import check, receipt, row, show, sliders
from minillm.labkit.receipts import format_value
from minillm.predict import speculation as predict
from minillm.serve.speculate import verify
from minillm.serve.speculate.verify import choose, uniform

# %% [markdown]
# ## Why it can work
#
# In lab 12 a decode step read all weights to make one token. What does a pass over several tokens cost? The committed
# target (5.8 million parameters), CPU seconds of one thread:

# %%
COUNTS = (1, 2, 4, 8, 16, 64)
seconds = runs.pass_seconds(COUNTS)
receipt(
    "one forward pass of the target",
    [row(f"{count} tokens, / the time of one", None, s / seconds[0]) for count, s in zip(COUNTS, seconds, strict=True)],
)

# %% [markdown]
# Checking four tokens costs far less than making four, one after the other. And checking *is* a forward pass: feed the
# last token and K guesses, and row i of the logits says what the target would have said after guess i.
#
#     last  d1  d2  d3      what goes in: one verified token and three guesses
#      p0   p1  p2  p3      what comes out: p0 judges d1, p1 judges d2, p2 judges d3, and p3
#                           comes free: one token more, if all three are right
#
# ## Predict
#
# Three guesses. They come back with the answers.

# %%
guess_tokens = 0.8 * 4  # tokens per pass: 4 guesses, each accepted with probability 0.8
guess_speedup = 4 * 0.8 * (1 - 0.1)  # times faster, if a guess costs a tenth of a pass
guess_hot = "fewer"  # guesses accepted at temperature 1.5, compared with 0.5: "fewer" or "more"

# %% [markdown]
# ## 1 · What to do with a wrong guess
#
# A guess x, drawn from q, is accepted with probability min(1, p(x)/q(x)). So token x comes out *accepted* with
# probability q(x) · min(1, p(x)/q(x)) = min(p(x), q(x)): the blue part. After a rejection another token has to be
# drawn. From what, so that all together gives p?

# %%
show(pictures.overlap)

# %%
sliders(pictures.overlap, agreement=(0.0, 1.0), temperature=(0.3, 3.0), seed=(0, 9))

# %% [markdown]
# ### Exercise 1 · the residual (10 minutes)


# %%
def residual(p, q):
    """p, q: [vocab] -> [vocab], the distribution to draw from after a rejection; p itself where p = q."""
    # BEGIN SOLUTION
    left = (p - q).clamp(min=0)
    total = left.sum()
    return left / total if total > 0 else p
    # END SOLUTION


residual = check("residual", residual)

# %% [markdown]
# The same for real probabilities: what target and draft say after 192 tokens of held-out code. Nothing is sampled
# here; the distribution of one guess and its verification is a formula, for the right rule and for three wrong ones.

# %%
p, q = experiments.distributions(tuple(x.double() for x in experiments.logits_of("code")), 1.0)
rows = [
    row(
        "Σ min(p, q) = 1 - TV(p, q)",
        1 - float(breaks.total_variation(p, q).mean()),
        float(experiments.overlap(p, q).mean()),
        "",
        1e-9,
    )
]
for name, way in breaks.one_guess(p, q).items():
    off = float(breaks.total_variation(way, p).mean())
    rows.append(row(name, True, off < 1e-9) if name.endswith("residual") and "p/q" in name else row(name, None, off))
receipt("distance (total variation) of what comes out from the target's distribution; first rule: none", rows)

# %% [markdown]
# The last line is what becomes of the rule when the letters are swapped: 1 - Σ min(p, q), exactly as far off as the
# draft itself. The target might as well not have been asked, and the text looks fine.
#
# ### Exercise 2 · the verifier (20 minutes)
#
# Now K guesses and the K + 1 rows of one pass. Draw with `uniform(draw)` (a number from [0, 1)) and
# `choose(probabilities, draw)` (a token), and with nothing else: the check runs your function once for every way in
# which these can fall, and adds up probabilities. No sampling, no luck.


# %%
def verify_guesses(target, guesses, q, draw):
    """target: [k + 1, vocab], q: [k, vocab], guesses: k tokens drawn from q -> the accepted ones and one more."""
    # BEGIN SOLUTION
    for i, guess in enumerate(guesses):
        if not uniform(draw) < target[i, guess] / q[i, guess]:
            return [*guesses[:i], choose(residual(target[i], q[i]), draw)]
    return [*guesses, choose(target[len(guesses)], draw)]
    # END SOLUTION


verify_guesses = check("verifier", verify_guesses)

# %% [markdown]
# A pass gives from 1 to K + 1 tokens: never fewer than plain decoding, and one more than there are guesses if all are
# right. minillm's own (`minillm/serve/speculate/verify.py`), for comparison, knows one thing more: a guess that was not
# drawn (the likeliest token, or what stood there last time) has q = 1 at its place.

# %%
print(inspect.getsource(verify))

# %% [markdown]
# ### Exercise 3 · the loop (20 minutes)
#
# `draft(tokens)` gives one row of q, `target.rows(tokens, guesses)` the K + 1 rows of one pass. The check counts the
# passes.


# %%
def speculate(target, draft, prompt, count, k, draw):
    """-> `count` tokens after the prompt, distributed as the target's; at most k guesses per pass of the target."""
    # BEGIN SOLUTION
    tokens = list(prompt)
    while (left := len(prompt) + count - len(tokens)) > 0:
        guesses, rows = [], []
        for _ in range(min(k, left - 1)):
            rows.append(draft([*tokens, *guesses]))
            guesses.append(choose(rows[-1], draw))
        q = torch.stack(rows) if rows else None
        tokens += verify_guesses(target.rows(tokens, guesses), guesses, q, draw)
    return tokens[len(prompt) :]
    # END SOLUTION


speculate = check("speculative-loop", speculate)

# %% [markdown]
# Your loop on the committed pair, greedy. The draft has a tenth of the parameters and was trained on the same text.

# %%
models = experiments.pair()
[prompt] = experiments.prompts("code", 1)
target = runs.Uncached(models.target)
answer = speculate(target, runs.Uncached(models.draft), prompt, 24, 3, torch.Generator().manual_seed(0))
print(models.tokenizer.decode(answer))
plain = experiments.generate(None, 1, [prompt], new=24)
receipt(
    "24 tokens, greedy, K = 3",
    [
        row("tokens equal to plain decoding's", 24, sum(a == b for a, b in zip(answer, plain.answers[0], strict=True))),
        row("passes of the target", None, target.passes),
        row("    without guesses", 24, plain.passes + 1),
    ],
)

# %% [markdown]
# What a real engine adds: keys and values. The pass writes those of all guesses into the cache. Those of rejected ones
# are simply not counted (`num_computed` stays behind) and are overwritten by the next pass. Nothing else has to be
# undone, because in minillm guesses are no tokens of a sequence until they are verified.
#
# ## 2 · Drafts that tell the truth
#
# The verifier divides by q. It believes what it is told, so q has to be what the guess was *really* drawn from: after
# the request's temperature, after its top-k, of the right place.
#
# ### Exercise 4 · an honest draft (15 minutes)


# %%
def honest_draft(scores, tokens, k, temperature, top_k, draw):
    """scores(tokens) -> logits [vocab]. -> (k guesses, [k, vocab] what each was drawn from).

    Warped as the target's are: logits / temperature, all but the top_k largest ruled out, softmax. At temperature 0 the
    guesses are the likeliest tokens, and instead of rows there is None."""
    # BEGIN SOLUTION
    guesses, rows = [], []
    for _ in range(k):
        logits = scores([*tokens, *guesses])
        if temperature == 0:
            guesses.append(int(logits.argmax()))
            continue
        lowest = logits.topk(top_k).values[-1]
        rows.append(torch.softmax((logits / temperature).masked_fill(logits < lowest, float("-inf")), dim=-1))
        guesses.append(choose(rows[-1], draw))
    return guesses, torch.stack(rows) if rows else None
    # END SOLUTION


honest_draft = check("honest-draft", honest_draft)

# %% [markdown]
# So how often is a guess accepted? Σ min(p, q), over the positions of held-out text, for two kinds of text: code, and
# prose (the docstrings in it). Once for guesses drawn at the request's temperature, once for the draft's likeliest
# token, which is accepted with p(x).

# %%
alpha = experiments.alpha_by_temperature(pictures.TEMPERATURES)


def acceptance_by_temperature():
    """Share of the draft's guesses accepted by temperature, for code and prose: drawn guesses and likeliest tokens."""
    return pictures.draw_alpha(alpha)


show(acceptance_by_temperature)

# %%
cold, hot = (pictures.TEMPERATURES.index(t) for t in (0.5, 1.5))
rows = [row("your guess: accepted at 1.5, compared with 0.5", None, guess_hot)]
for name, shares in alpha.items():
    rows.append(row(f"{name}: at 0.5, at 1.5", None, (round(shares[cold], 3), round(shares[hot], 3))))
receipt("does temperature cost acceptance?", rows)

# %% [markdown]
# "High temperature hurts" is half the truth. Heat flattens both distributions, and flat ones overlap; what is drawn at
# the same temperature is accepted *more* often. What is certain (the likeliest token, an n-gram) is accepted with
# p(x), which heat takes away. Rules that compare with a threshold suffer in the same way.
#
# ## 3 · A draft for nothing
#
# Code repeats itself. So do summaries, quotes and edited files. What followed the last time?
#
# ### Exercise 5 · prompt lookup (15 minutes)


# %%
def look_up(tokens, k, longest=3):
    """-> up to k tokens that followed the most recent earlier occurrence of the ending: the last `longest` tokens, or
    else the last longest - 1, ..., or the last one; [] if none occurred before."""
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
# No weights, no pass, and (with an index, as in `minillm/serve/speculate/ngram.py`) no time. It is a proposer like any
# other, with q = 1 at its guess, and just as exact.
#
# ## 4 · How many guesses?
#
# If each guess is accepted with probability α, a pass gives at least i + 1 tokens with probability αⁱ. The mean of
# such a number is the sum of these: 1 + α + α² + ... + αᴷ.
#
# ### Exercise 6 · the best K (15 minutes)


# %%
def speedup(alpha, c, k):
    """-> plain seconds per token / speculative ones. c: seconds of one guess / seconds of one pass of the target."""
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
# Back to your guesses, and to formulas that handbooks print:

# %%
four = predict.tokens_per_pass(0.8, 4)
receipt(
    "α = 0.8",
    [
        row("your guess: tokens per pass, K = 4", None, guess_tokens),
        row("    (1 - α⁵) / (1 - α)", four, sum(0.8**i for i in range(5)), "", 1e-9),
        row('    "Σ P(first i accepted) · i"', None, sum(i * 0.8**i for i in range(1, 5))),
        row("your guess: speedup, c = 0.1", None, guess_speedup),
        row("    (1 - αᴷ⁺¹) / ((1 - α)(cK + 1)), K = 4", predict.speedup(0.8, 0.1, 4), speedup(0.8, 0.1, 4), "", 1e-9),
        row('    "K · acceptance · (1 - overhead)", K = 4', None, 4 * 0.8 * 0.9),
        row('    "K · acceptance · (1 - overhead)", K = 16', None, 16 * 0.8 * 0.9),
        row("    the formula, K = 16", None, speedup(0.8, 0.1, 16)),
        row("    best K, and its speedup", 6, best_k(0.8, 0.1, 64)),
        row("    a draft of 10 % of the target: at best", None, speedup(0.8, 0.1, best_k(0.8, 0.1, 64))),
        row("    a draft of 2 %: at best", None, speedup(0.8, 0.02, best_k(0.8, 0.02, 64))),
    ],
)

# %% [markdown]
# The sum with the factor i gives more accepted tokens than there are guesses. The product grows with K forever, while
# the truth has an optimum, since guess K counts only if all before it were right. And "a draft of a tenth of the size"
# is no sweet spot: at the same α, c = 0.1 caps the gain. Small and fast against accurate is a trade; drafts of 1 to 2 %
# are common.

# %%
show(pictures.speedup_by_k)

# %%
sliders(pictures.speedup_by_k, alpha=(0.0, 0.99), c=(0.0, 0.5), verify=(1.0, 3.0))

# %% [markdown]
# ### Measured
#
# The engine with the draft model, greedy, code, one sequence at a time, K from 1 to 6. The prediction takes α of each
# place and c from the run with K = 6, and the price of a pass over K + 1 tokens from a measurement of its own. (This
# draft is two small layers on a CPU: a call of it costs far more than its tenth of the parameters says.)

# %%
swept = runs.sweep(pictures.KS)


def k_sweep():
    """Tokens per pass and speedup by the number of guesses, measured solid and predicted dashed."""
    return pictures.draw_sweep(swept)


show(k_sweep)

# %%
rows = [
    row("c: a guess / a pass", None, swept.c),
    row("α of each place", None, tuple(round(a, 2) for a in swept.alpha)),
]
for k, each in swept.runs.items():
    rows += [
        row(f"K = {k}: tokens equal to plain decoding's", True, each.same),
        row("    tokens per pass", predict.tokens_per_pass(swept.alpha[:k]), each.run.tokens_per_pass, "", 0.15),
        row("    predicted speedup", None, swept.predicted(k)),
        row("    measured, CPU time", None, each.speedup),
    ]
measured = {0: 1.0} | {k: each.speedup for k, each in swept.runs.items()}
predicted = {0: 1.0} | {k: swept.predicted(k) for k in swept.runs}
rows.append(row("best K: predicted, measured", None, tuple(max(x, key=x.get) for x in (predicted, measured))))
receipt("draft model, greedy, code", rows)

# %% [markdown]
# K = 0, no guesses at all, is a speedup of 1 and may well be the best. Places are not alike, which is why minillm
# counts acceptance by place. And a K that is fixed is wrong for somebody: `k="adaptive"` takes each sequence's own
# recent acceptance and the formula above, down to K = 0 where guessing does not pay.

# %%
following = runs.adaptive(swept)
receipt(
    "K that follows the acceptance, c as measured",
    [
        row("best K for the acceptance on average", None, best_k(following.run.counts.accepted, swept.c, 6)),
        row("guesses per pass, where there were any", None, following.run.places),
        row("tokens equal to plain decoding's", True, following.same),
        row("speedup, CPU time", None, following.speedup),
    ],
)

# %% [markdown]
# ## 5 · All proposers
#
# One interface, one verifier, six ways to guess:
#
# | | guesses come from | trained |
# |---|---|---|
# | draft | a small model with the same vocabulary, its own paged cache | yes |
# | ngram | what followed the last time | no |
# | medusa | four heads on the target's last hidden state, each for a place further on (Cai et al. 2024) | a little |
# | eagle | one block that continues the target's features, token by token (Li et al. 2024) | a little |
# | lookahead | the target's own answers in the verifying passes, kept as n-grams (Fu et al. 2024) | no |
# | early-exit | the target's first two blocks and a small adapter (Kangaroo, Liu et al. 2024) | a little |

# %%
table = {kind: runs.table(kind, count) for kind, count in (("code", 2), ("prose", 1))}


def proposers():
    """Tokens per pass and speedup of every proposer on code, predicted beside measured."""
    return pictures.draw_table(table["code"])


show(proposers)

# %%
extra = {name: runs.memory(name, proposer) for name, proposer in runs.available() if proposer is not None}
for kind, results in table.items():
    rows = []
    for name, each in results.items():
        if each is None:
            rows.append(row(f"{name}: no weights here, train them with train_heads", None, None))
            continue
        formula = experiments.formula(each.run)
        rows += [
            row(f"{name}, K = {runs.K[name]}: tokens equal to plain decoding's", True, each.same),
            row("    tokens per pass", formula, each.run.tokens_per_pass, "", 0.15),
            row("    a guess / a pass of the target", None, each.c),
            row("    speedup: formula, measured", None, (round(each.predicted, 2), round(each.speedup, 2))),
        ]
        if kind == "code":
            rows.append(row("    weights of its own", None, extra[name]["weights"], "B"))
            rows.append(row("    keys and values for one sequence", None, extra[name]["keys and values"], "B"))
    print(receipt(f"{kind}, greedy, one sequence at a time", rows), "\n")

# %% [markdown]
# What to read in it:
#
# - **The text is the target's in every row.** A bad proposer costs time, never quality.
# - **Free guesses win on a small machine.** Here a pass of the target takes a few milliseconds, and a call of any
#   second model is a good part of that. Beside a 70B target, a 1B draft reads one seventieth of the bytes, and
#   model-based proposers win.
# - **"Lookahead needs no memory" is not quite so**: a pool of n-grams, and passes that are wider. Numbers such as "2.5
#   times" belong to a model, a text, a batch and a machine; EAGLE-3's authors report more than that, on theirs.
# - The sample is small, two answers of 32 tokens in code, one in prose;
#   `python -m minillm bench speculate` takes its time.
# - The heads were trained for minutes (`minillm/checkpoints/*/training.json` says how long and what came out), the
#   papers' for days. Both papers verify a *tree* of guesses in one pass; here a draft is a chain.
#
# ## Break it
#
# ### Exercise 7 · which of these are exact? (15 minutes)
#
# Six programs, A to F. Each drafts and verifies with top-k. You get what each writes, as an exact distribution over
# the first three tokens, beside what it should be. Write the judge. `first(d, n)` gives the distribution of the first n
# tokens, `distance(a, b)` the total variation (0 up to rounding, 1e-9, is none).


# %%
def verdict(found, true, accepted, possible):
    """found, true: {(token, token, token): probability}; accepted: guesses accepted in a pass, possible: the most.

    -> "first token off", "later tokens off" (each first token is right, but not the tokens together), "exact", or
    "exact, accepts less" than possible."""
    # BEGIN SOLUTION
    for places in (1, 2, 3):
        if distance(first(found, places), first(true, places)) > 1e-9:
            return "first token off" if places == 1 else "later tokens off"
    return "exact" if accepted > possible - 1e-9 else "exact, accepts less"
    # END SOLUTION


verdict = check("which-is-exact", verdict)

# %%
rows = []
for name, evidence in breaks.all_evidence().items():
    wrong, true, accepted, possible = evidence
    rows += [
        row(f"program {name}: {verdict(*evidence)}", None, distance(wrong, true)),
        row("    first token alone", None, distance(first(wrong, 1), first(true, 1))),
        row("    guesses accepted, of the most possible", None, accepted / possible),
    ]
receipt("six programs: distance of three tokens from the target's distribution", rows)

# %% [markdown]
# Before you read on: what does each of them do wrong? All but one are real bugs, and each passed its project's tests
# for a while.

# %%
for name, program in breaks.PROGRAMS.items():
    print(f"{name}  {program.__doc__}")

# %% [markdown]
# - **The likeliest token, verified as if drawn.** p/q with q < 1 accepts too often. Greedy tests cannot see it.
# - **q from before top-k.** q is too small where guesses are; again they pass too often.
# - **The first guess never verified.** Off by one in the rows. Most visible of all, if anybody looks.
# - **The generator seeded for each guess.** Each token alone is right. Only together they are not: guess 2 is judged
#   with the number that just accepted guess 1. A test that looks at one token at a time passes, for ever.
# - **A drawn guess verified with q = 1** looks just as wrong and is not. Accept with p(x), else draw from p without x:
#   that is the residual of a guess that was certain, whatever it was drawn from. Lossless, only accepted less often.
#
# ### Preempted with guesses under way
#
# A sequence loses its blocks between guessing and checking. If guesses were counted as tokens already, it would come
# back with text that nobody verified (vLLM PR#28558).

# %%
preempted = runs.preempted()
undisturbed = experiments.generate(None, 1, experiments.prompts("code", 4), batch=4)
receipt(
    "4 sequences, 20 blocks where 32 are wanted, draft model",
    [
        row("preemptions", None, preempted["preemptions"]),
        row("answers equal to plain decoding's", True, preempted["answers"] == undisturbed.answers),
        row("blocks still held at the end", 0, preempted["used"]),
    ],
)

# %% [markdown]
# ### Not exact, on purpose
#
# Medusa's *typical acceptance* (§2.3.1) takes a guess if p(x) is above a threshold that falls with the entropy of p,
# whatever q was. More is accepted, and something else is written. How much else, without sampling: below the threshold
# a token is drawn from p, so what comes out is a formula, too.

# %%
typical = [(epsilon, *breaks.typical(p, q, epsilon)) for epsilon in pictures.EPSILONS]
exact_share = float(experiments.overlap(p, q).mean())


def typical_acceptance():
    """Typical acceptance by its threshold: guesses accepted, and the distance from the target's distribution."""
    return pictures.draw_typical(typical, exact_share)


show(typical_acceptance)

# %%
rows = [row("exact rule: accepted", None, exact_share)]
for epsilon, share, off in typical:
    rows.append(row(f"ε = {epsilon}: accepted, total variation", None, (round(share, 3), round(off, 3))))
receipt("one guess on 192 positions of code, temperature 1", rows)

# %% [markdown]
# A loose threshold accepts more than the exact rule. A strict one accepts less *and* stays wrong: it only ever takes
# tokens that are likely, so unlikely ones come too rarely at any threshold. It may be what you want, text that is
# plausible in another way. But it is another distribution, and whoever evaluated the model did not evaluate that one.
#
# ## Where it loses
#
# ### A large batch
#
# Guesses use arithmetic that lies idle while weights are read. In a batch it does not lie idle. Handbooks' lists of
# what hurts leave this one out; in production it is the main one. Here with prompt lookup, the proposer that won above,
# and predicted for an H100 in bf16 by the roofline: arithmetic is busy from 989 TFLOP/s / 3.35 TB/s = 295 tokens per
# pass on (data sheet; lab 12).

# %%
H100 = 989e12 / 3.35e12
loaded, rows = runs.by_batch((1, 4, 12)), []
for batch, each in loaded.items():
    rows += [
        row(f"here, {batch} at a time, prompt lookup, K = 6: tokens equal", True, each.same),
        row("    tokens per pass and sequence", None, each.run.tokens_per_pass),
        row("    a pass with guesses / one without", None, each.verify),
        row("    speedup, CPU time", None, each.speedup),
    ]
rows += [
    row(
        f"H100, α = 0.8, c = 0.05, K = 4, {batch} sequences: predicted",
        None,
        formulas.large_batch_speedup(0.8, 0.05, 4, batch, H100),
    )
    for batch in (1, 32, 64, 128, 256)
]
receipt("speedup by batch", rows)

# %% [markdown]
# (Each batch has other texts, hence other tokens per pass.) What a guess is worth shrinks with the batch. Below 1 the
# same hardware writes *fewer* tokens per second than without guesses, although each pass writes more. An engine should
# turn speculation down as its batch grows.
#
# ### Heat, for guesses that are certain

# %%
warm = runs.by_temperature((0.5, 1.5))
rows = []
for temperature, both in warm.items():
    for name, each in both.items():
        rows.append(row(f"temperature {temperature}, {name}: tokens per pass", None, each.run.tokens_per_pass))
receipt("sampled answers, K = 3", rows)

# %% [markdown]
# ### Short answers, long prompts
#
# The draft has to read the prompt, too, and a few tokens leave few passes to save:

# %%
rows = [row("prompt tokens that the draft has to read first", None, experiments.PROMPT)]
for new, (without, guessing, ratio) in runs.short_answers((3, 32)).items():
    rows += [
        row(f"answer of {new} tokens: passes after the prompt, without and with guesses", None, (without, guessing)),
        row("    whole request, CPU time without / with", None, ratio),
    ]
receipt("draft model, K = 3", rows)

# %% [markdown]
# ## The same in production
#
# transformers with the same two models, one sequence at a time. Its own ways to change the number of guesses are
# switched off. (Left on, it also stops drafting when the draft is less than 40 % sure of a token.)

# %%
asked = experiments.prompts("code", 2)
theirs, rows = peers.peers(asked, 3, 6), []
if theirs is None:
    print("transformers is not installed here: pip install transformers")
else:
    plain_answers, plain_passes = theirs[peers.PLAIN]
    ours = experiments.generate(None, 1, asked).answers
    rows.append(row("greedy: tokens equal to minillm's", True, plain_answers == ours))
    rows.append(row("    passes of the target", len(asked) * experiments.NEW, plain_passes))
    for way in (peers.DRAFT, peers.LOOKUP):
        answers, passes = theirs[way]
        rows.append(row(f"{way}: same tokens", True, answers == plain_answers))
        rows.append(row("    passes of the target", None, passes))
receipt("transformers, assisted generation", rows)

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
# (transformers 5.23's `GenerationConfig`; vLLM's documentation of speculative decoding, 2026. Both change often: look
# before you type.) transformers assists one sequence at a time. `use_mtp` and vLLM's `mtp` run heads that a model such
# as DeepSeek-V3 brings along. vLLM calls its sampler lossless "up to hardware numerics": with other batch shapes,
# logits differ in the last bits, and a greedy tie may fall the other way.
#
# ## On a GPU
#
# There are no ranks in this lab. The same code runs where the models are:
#
# ```bash
# python -m minillm generate "def parse(" --speculate ngram --k 6        # here
# python -m minillm bench speculate                                       # all proposers, against transformers
# vllm serve $MODEL --speculative-config \
#      '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 5}'
# vllm serve $MODEL --speculative-config '{"method": "draft_model", "model": "'$DRAFT'", "num_speculative_tokens": 5}'
# ```
#
# With tensor parallelism the draft is usually not cut, or less (vLLM's `draft_tensor_parallel_size`): it is small, and
# its passes are all latency.
#
# ## Interview corner
#
# The numbers first, by the formulas you have just checked:


# %%
def number(name, value, unit=""):
    print(f"{name:<74}{format_value(value, unit):>12}")


number("1. α = 0.8, K = 4: tokens per pass", predict.tokens_per_pass(0.8, 4))
number("   at most, K without end: 1 / (1 - α)", 1 / (1 - 0.8))
for c in (0.02, 0.1, 0.25):
    best = predict.best_k(0.8, c)
    number(f"2. α = 0.8, c = {c}: best K", best)
    number("   its speedup", predict.speedup(0.8, c, best))
number(
    "3. α = 0.6 at c = 0.02, or 0.8 at c = 0.1? the first, at its best K",
    predict.speedup(0.6, 0.02, predict.best_k(0.6, 0.02)),
)
number("   the second", predict.speedup(0.8, 0.1, predict.best_k(0.8, 0.1)))
number("4. smallest α at which K = 1 pays, c = 0.1: α > c", 0.1)
number("5. H100, K = 4: sequences from which the verifying pass is compute-bound", int(H100 / 5) + 1)
number(
    "6. 70B target (42 ms per pass at batch 1), α = 0.8, c = 0.02, K = 11: ms per token",
    140 / 3.35 / predict.speedup(0.8, 0.02, 11),
)
number("7. p = (0.7, 0.2, 0.1), q = (0.2, 0.5, 0.3): accepted", formulas.acceptance((0.7, 0.2, 0.1), (0.2, 0.5, 0.3)))

# %% [markdown]
# Say your answer aloud before you open one.
#
# **1. Why is the output exactly the target's distribution?**
# <details><summary>Answer</summary>
#
# Token y comes out accepted with q(y) · min(1, p(y)/q(y)) = min(p(y), q(y)). A rejection happens with 1 - Σ min(p, q),
# and then y is drawn from max(p - q, 0) divided by exactly that sum: max(p(y) - q(y), 0). Together p(y). By induction
# over places, conditioned on the tokens before, the whole text.
#
# *Follow-up: and if the draft is terrible?* Exact still. Each pass gives at least one token of the target's own.
# </details>
#
# **2. Which formula gives tokens per pass, and what is assumed?**
# <details><summary>Answer</summary>
#
# (1 - α^(K+1)) / (1 - α): guesses accepted independently, all with probability α. In truth places differ: use
# 1 + α₁ + α₁α₂ + ..., with each place's own acceptance. The 1 is the bonus or the correction; forgetting it, or a
# factor i in the sum, are the usual mistakes.
# </details>
#
# **3. Does it reduce FLOPs?**
# <details><summary>Answer</summary>
#
# No, it spends more: rejected guesses were computed for nothing. It reduces the number of times the weights are read.
# That is why it helps where reading is the bottleneck (batch 1) and hurts where arithmetic is.
# </details>
#
# **4. When would you turn it off?**
# <details><summary>Answer</summary>
#
# Large batches (K + 1 rows per sequence make the pass compute-bound), very short answers, prompts so long that the
# draft's prefill matters, low acceptance (another domain or language than the draft's). By measured acceptance and
# load, not by hand.
# </details>
#
# **5. 7B draft for a 70B target?**
# <details><summary>Answer</summary>
#
# c = 0.1 caps the gain at 2.47 for α = 0.8; at c = 0.02 it is 3.82. A smaller draft loses α and wins c. Compute both,
# at the best K each. Also count the draft's KV cache, and its latency per call, which does not shrink with its size.
# </details>
#
# **6. Is high temperature bad?**
# <details><summary>Answer</summary>
#
# For guesses that are certain (n-grams, likeliest tokens): yes, they are accepted with p(x). For drawn guesses the
# overlap of two flat distributions is large, and acceptance may even rise, as measured above.
# </details>
#
# **7. The request has top-p 0.9 and a repetition penalty. What has to change?**
# <details><summary>Answer</summary>
#
# Nothing in the rule. p and q are the distributions *after* all warping, and the penalty of place i counts the guesses
# before i. An unwarped q that the guesses were really drawn from stays exact but is accepted less; a q that they were
# not drawn from is a bug.
# </details>
#
# **8. How would you test a speculative decoder?**
# <details><summary>Answer</summary>
#
# Greedy equality finds cache bugs and no sampling bug. So: enumerate all outcomes on a tiny vocabulary, several tokens
# together, with every warping; then count passes and accepted tokens, or a decoder that never guesses passes, too.
# </details>
#
# **9. What happens in the KV cache when guess 3 of 5 is rejected?**
# <details><summary>Answer</summary>
#
# Entries of guesses 1 and 2 are right and stay. Those of 3 to 5 belong to tokens that do not exist: the computed length
# stays behind them, they are overwritten, surplus blocks can be given back, and none of them may get into the prefix
# cache.
# </details>
#
# **10. Medusa, EAGLE or a draft model?**
# <details><summary>Answer</summary>
#
# Medusa heads guess places independently of each other: one cheap call, acceptance falls fast with the place. EAGLE
# goes on in the target's features and sees its own guesses: better, one small call per guess. Both need training on the
# target and its hidden states; a draft model needs only the same vocabulary, and a cache of its own.
# </details>
#
# **11. What does tree verification add?**
# <details><summary>Answer</summary>
#
# Several candidates per place in one pass, with a mask by which each node sees its ancestors only: more accepted per
# pass for more rows per pass. Pays while rows are free, at batch 1; costs most at large batches.
# </details>
#
# **12. A colleague accepts a guess if p(x) > 0.3. Comments?**
# <details><summary>Answer</summary>
#
# Not exact: what comes out is biased towards the draft. Its distance can be computed, it need not be guessed (you did,
# for Medusa's rule). If a product accepts that, evaluate the model *with* it.
# </details>
#
# ## Can you answer them now?
#
# 1. Why is the text that comes out distributed exactly as if nobody had guessed, however bad the guesses are?
# 2. How many guesses pay, by which formula, and why is there an optimum?
# 3. Where does it lose, and which of the losses does a test of the text not show?
#
# Next: lab 16 makes the bytes fewer that each pass has to read.
