# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 11 · The data pipeline
#
# **The input pipeline is part of the step.** Text becomes tokens, tokens become batches, and batches reach the ranks in
# time, or the step waits.
#
# About 2 hours with the exercises; running it top to bottom takes under a minute. At the end you can answer:
#
# 1. How does text become tokens without losing a byte, and in which unit do models of different vocabularies compare?
# 2. Which rank sees which sample in which epoch, and how does a run resume at the exact one on another number of ranks?
# 3. When does loading cost time, and how much of it can prefetching take away?
#
# A mistake in the data pipeline raises no error. The loss still falls, only later, or less far, or towards the wrong
# target. So everything below is counted.
#
# The calls of `group`, and what each returns: [docs/group.md](../docs/group.md).

# %%
import hashlib
import math
import queue
import threading
import time
from collections import Counter
from itertools import pairwise

import numpy as np
import torch

from course.lab11_data_pipeline import bpe, experiments
from course.lab11_data_pipeline import figures as pictures
from course.lab11_data_pipeline import formulas as predict
from course.lab11_data_pipeline.baselines import character_tokenizer, word_tokenizer
from course.lab11_data_pipeline.ngram import KneserNey
from course.lab11_data_pipeline.padding import length_batches
from minillm import data
from minillm.comm import launch
from minillm.data.sampler import permutation
from minillm.labkit import check, finish, receipt, row, show, sliders

# %% [markdown]
# ## The text
#
# No download: the corpus is the source code of the Python that runs this notebook, its standard library. Tests and
# generated tables are left out, and a twentieth of the files is held out, chosen by a hash of their names.

# %%
text = data.corpus()
for split in ("train", "validation"):
    size = text.statistics(split)
    print(f"{split:11}{size.files:5} files{size.lines:10,} lines{size.bytes:12,} bytes")

# %% [markdown]
# ## Predict
#
# Make three guesses before anything runs. They come back beside the answers.

# %%
guess_tokens = 0.5  # tokens per character of Python code, with a vocabulary of 4,096
guess_padding = 0.2  # share of a random batch of 8 files that is padding, if each is padded to the longest
guess_step = 40  # ms per step, if a batch takes 32 ms to load and 20 ms to compute on, and is loaded ahead

# %% [markdown]
# ## 1 · Bytes, pairs, tokens
#
# Byte-pair encoding ([Sennrich, Haddow and Birch, 2016](https://arxiv.org/abs/1508.07909)) starts with the 256 bytes, which can spell any text. Then, again
# and again, it finds the pair of neighbours that occurs most often and glues it into a new token. Each different word
# is kept once, with how often it occurs:

# %%
small = "low low low low low lower lower newest newest newest newest newest newest widest widest widest"
pieces = Counter(bpe.split(small))
words = {tuple(bytes([byte]) for byte in piece.encode()): times for piece, times in pieces.items()}
for word, times in words.items():
    print(times, "×", b"|".join(word).decode())

# %% [markdown]
# ### Exercise 1 · one merge (15 minutes)
#
# Ties are real: two pairs occur equally often, and another choice gives another tokenizer. The rule of the `tokenizers`
# library: the smallest (id of left, id of right) goes first. `ids` holds each token's id.


# %%
def merge_step(words, ids):
    """words: {tuple of tokens: how often} -> (most frequent pair, the words with each occurrence of it glued)."""
    # BEGIN SOLUTION
    counts = Counter()
    for word, times in words.items():
        for pair in pairwise(word):
            counts[pair] += times
    best = min(counts, key=lambda pair: (-counts[pair], ids[pair[0]], ids[pair[1]]))
    merged = {}
    for word, times in words.items():
        glued, at = [], 0
        while at < len(word):
            found = word[at : at + 2] == best
            glued.append(best[0] + best[1] if found else word[at])
            at += 2 if found else 1
        merged[tuple(glued)] = times
    return best, merged
    # END SOLUTION


merge_step = check("bpe-merge-step", merge_step)

# %% [markdown]
# That is all of training; `bpe.py`, beside this lab's master, does the same and recounts less. Eight rounds on the small text:

# %%
ids, state = bpe.initial_vocabulary(), words
for rank in range(8):
    (left, right), state = merge_step(state, ids)
    ids.setdefault(left + right, len(ids))
    left_over = sum(len(word) * times for word, times in state.items())
    print(f"rank {rank}: {left!r:7} + {right!r:6} -> {left + right!r:10} {left_over:3} tokens left")

# %% [markdown]
# ### Exercise 2 · use the merges (10 minutes)
#
# A new piece of text must be cut as the training text was: merges happen in the order in which they were *learnt*
# (their rank), not in the order of the text.


# %%
def encode(piece, ranks):
    """piece: bytes, ranks: {(left, right): rank} -> list of tokens (bytes); lowest rank first, until none is left."""
    # BEGIN SOLUTION
    word = [bytes([byte]) for byte in piece]
    while True:
        known = [(ranks[pair], at) for at, pair in enumerate(pairwise(word)) if pair in ranks]
        if not known:
            return word
        at = min(known)[1]
        word[at : at + 2] = [word[at] + word[at + 1]]
    # END SOLUTION


encode = check("bpe-encode", encode)

# %% [markdown]
# Now on real code: your merges against the library's, one by one, and a line that was not in the training text.

# %%
sample = experiments.held_out_text()[:30_000].encode("ascii", "ignore").decode()
pieces = Counter(bpe.split(sample))
words = {tuple(bytes([byte]) for byte in piece.encode()): times for piece, times in pieces.items()}
ids, merges = bpe.initial_vocabulary(), []
for _ in range(60):
    pair, words = merge_step(words, ids)
    ids.setdefault(pair[0] + pair[1], len(ids))
    merges.append(pair)
ranks = {pair: rank for rank, pair in enumerate(merges)}
line = "    return self.step  # naïve, 恢复"
mine = [token for piece in bpe.split(line) for token in encode(piece.encode(), ranks)]
print("|".join(token.decode(errors="backslashreplace") for token in mine))
theirs = experiments.library_merges(sample, 256 + 60)
receipt(
    "60 merges on 30 kB of code",
    [
        row("merges equal to the library's", 60, sum(a == b for a, b in zip(merges, theirs, strict=True))),
        row("bytes of the line that come back", len(line.encode()), len(b"".join(mine))),
        row("the line comes back", True, b"".join(mine).decode() == line),
        row("its tokens", None, len(mine)),
    ],
)

# %% [markdown]
# Two Chinese characters, never seen in training, cost six tokens and lose nothing, because every text is made of bytes.
# Here is what byte pairs replaced, on the held-out files:

# %%
train_text, held_out = "".join(experiments.documents("train")[::8]), experiments.held_out_text()
committed = data.Tokenizer.load()
names = word_tokenizer(train_text, 4096)
print(f"{'':12}{'vocabulary':>12}{'tokens':>10}   text comes back")
for name, tokenizer in (("characters", character_tokenizer(train_text)), ("words", names), ("BPE", committed)):
    spelled = tokenizer.encode(held_out)
    print(f"{name:12}{tokenizer.vocab_size:12,}{len(spelled):10,}   {tokenizer.decode(spelled) == held_out}")
noise = np.random.default_rng(0).bytes(10_000)
receipt(
    "what comes back",
    [
        row("BPE: the held-out text", True, committed.decode(committed.encode(held_out)) == held_out),
        row("BPE: 10,000 random bytes", True, committed.decode_bytes(committed.encode_bytes(noise)) == noise),
        row("words: some are unknown", True, names.unknown_share(held_out) > 0),
        row("words: share that became <unk>", None, f"{names.unknown_share(held_out):.1%}"),
    ],
)

# %% [markdown]
# Characters lose nothing, unless one never occurred in training; what they cost is length. *Words* do lose information:
# a name that is not in the vocabulary is gone.
#
# How many merges should it be? They are learnt one after the other, so a smaller vocabulary is the beginning of a larger
# one, and a single training gives the whole curve.

# %%
found = experiments.vocabularies()
curve = experiments.tokens_by_vocabulary(found)


def tokens_by_vocabulary():
    """Tokens per character of held-out code fall ever slower with the vocabulary; the embedding grows in proportion."""
    return pictures.draw_tokens(curve)


show(tokens_by_vocabulary)

# %%
counts, sizes = curve["tokens"], curve["vocab_size"]
at_4096 = counts[sizes.index(4096)] / curve["characters"]
receipt(
    "more merges",
    [
        row("your guess: tokens per character at 4,096", None, guess_tokens),
        row("measured", None, at_4096),
        row("each doubling gives fewer tokens", True, counts == sorted(counts, reverse=True)),
        row("every vocabulary gives the text back", True, all(curve["lossless"])),
        row("tokens saved by the first doubling (257 to 512)", None, f"{1 - counts[1] / counts[0]:.0%}"),
        row("tokens saved by the last (4,096 to 8,192)", None, f"{1 - counts[-1] / counts[-2]:.0%}"),
    ],
)

# %% [markdown]
# ## 2 · Which unit?
#
# Cross-entropy is measured in nats per token, and another tokenizer makes other tokens. A loss of 2 with one tokenizer and
# of 5 with another does not say which model predicts the text better. The bytes of a text are the same for both.
#
# ### Exercise 3 · bits per byte (3 minutes)


# %%
def bits_per_byte(nats_per_token, tokens, text_bytes):
    """Loss of a text of `text_bytes` bytes in `tokens` tokens, in bits per byte."""
    # BEGIN SOLUTION
    return nats_per_token / math.log(2) * tokens / text_bytes
    # END SOLUTION


bits_per_byte = check("bits-per-byte", bits_per_byte)

# %% [markdown]
# The same kind of model, a 2-gram (Kneser–Ney), on three vocabularies:

# %%
in_bytes = {}
print("vocabulary   nats/token   perplexity   bits/byte")
for size in (257, 1024, 8192):
    nats, used = experiments.ngram_loss(found[size], order=2)
    in_bytes[size] = bits_per_byte(nats, used, curve["bytes"])
    print(f"{size:10,}{nats:13.3f}{predict.perplexity(nats):13.1f}{in_bytes[size]:12.3f}")

# %% [markdown]
# Perplexity gets worse from line to line while the model gets better, because a 2-gram of longer tokens sees further.
# Compare losses of different tokenizers in bits per byte, and in nothing else. The next table is the bar for every model
# trained in this course, with the committed vocabulary. Its second witness does not use tokens at all: it adds up
# −log₂ p over the whole text.

# %%
train, validation = (data.tokenize(text, committed, split) for split in ("train", "validation"))
rows = []
for order in (1, 2, 3):
    model = KneserNey(np.asarray(train.array), committed.vocab_size, order)
    chances = model.probabilities(np.asarray(validation.array))
    nats, direct = float(-np.log(chances).mean()), float(-np.log2(chances).sum() / validation.text_bytes)
    converted = bits_per_byte(nats, len(validation), validation.text_bytes)
    rows.append(row(f"{order}-gram, {nats:.3f} nats/token: bits per byte", converted, direct, "bit/B", 1e-9))
    perplexity = float(np.exp2(direct * validation.text_bytes / len(validation)))
    rows.append(row("    perplexity, exp(nats) and back from bits", predict.perplexity(nats), perplexity, "", 1e-9))
receipt("what a model has to beat on the held-out files", rows)

# %% [markdown]
# ## 3 · Batches: pad, sort or pack
#
# Files differ in length, and a batch is a rectangle. Padding each row to the longest wastes 1 − mean/max of the batch: the
# padding is computed like everything else and thrown away.

# %%
lengths = pictures.corpus_lengths()


def padding_view(batch_size=8):
    """A random and a length-sorted batch of files with their padding, and the padding of all batches by batch size."""
    return pictures.draw_padding(lengths, batch_size)


show(padding_view)

# %%
sliders(padding_view, batch_size=[2, 4, 8, 16, 32])

# %% [markdown]
# The formula beside padding that is counted, position by position, in padded tensors; and 8,000 lengths drawn evenly
# from 1 to 2,048, for which the expected padding of B rows is (B−1)/2B.

# %%
files = np.split(train.array.astype(np.int64), np.flatnonzero(train.array == train.separator))
files = [tokens for tokens in files if len(tokens) > 2]
targets_of = [len(tokens) - 1 for tokens in files]
uniform = np.random.default_rng(0).integers(1, 2049, 8000).tolist()
rows = [row("your guess: padding of random batches of 8 files", None, f"{guess_padding:.0%}")]
for name, by_length in (("random", False), ("sorted", True)):
    batches = length_batches(targets_of, 8, 0, by_length)
    positions, padding = experiments.count_padding(files, batches)
    predicted = predict.padding_waste([[targets_of[i] for i in batch] for batch in batches])
    rows.append(row(f"{len(files)} files, {name}: 1 − mean/max", predicted, padding / positions, tolerance=1e-9))
for name, by_length in (("random", False), ("sorted", True)):
    batches = length_batches(uniform, 8, 0, by_length)
    waste = predict.padding_waste([[uniform[i] for i in batch] for batch in batches])
    predicted = None if by_length else predict.uniform_padding_waste(8)
    rows.append(row(f"even lengths, {name}" + ("" if by_length else ": (B−1)/2B"), predicted, waste, tolerance=0.02))
receipt("padding in batches of 8", rows)

# %% [markdown]
# Even lengths waste 44 %. Real files waste far more, because a few of them are very long. Sorting by length helps and has
# its price: a batch then holds files of one kind. Pretraining *packs* instead: all text is one row of tokens, cut into
# windows:
#
#     tokens    a b c d e <sep> f g h ...
#     window 0  inputs  a b c      targets  b c d
#     window 1  inputs  d e <sep>  targets  e <sep> f
#
# ### Exercise 4 · windows (10 minutes)
#
# Every token but the first is to be a target exactly once; what does not fill the last window is left out.


# %%
def windows(tokens, seq_len):
    """tokens: [T] -> (inputs, targets), each [n, seq_len]."""
    # BEGIN SOLUTION
    n = (len(tokens) - 1) // seq_len
    return tokens[: n * seq_len].view(n, seq_len), tokens[1 : n * seq_len + 1].view(n, seq_len)
    # END SOLUTION


windows = check("pack-windows", windows)

# %%
SEQ_LEN = 256
stream = torch.from_numpy(train.array.astype(np.int64))
inputs, targets = windows(stream, SEQ_LEN)
unused = 1 - targets.numel() / len(stream)
crossed = (inputs == train.separator).any(1).double().mean().item()
receipt(
    f"the training files in windows of {SEQ_LEN}",
    [
        row("windows", (len(stream) - 1) // SEQ_LEN, len(inputs)),
        row("share of the tokens that is no target", predict.packing_waste(len(stream), SEQ_LEN), unused, "", 1e-9),
        row("targets that are not the next input", 0, int((inputs[:, 1:] != targets[:, :-1]).sum())),
        row("windows in which a file ends", None, f"{crossed:.1%}"),
    ],
)

# %% [markdown]
# ## 4 · Which rank gets which sample
#
# Write all epochs one after the other, each in its own order. All ranks together take the next
# `world_size · batch_size` samples and deal them out like cards:
#
#     stream    |------- epoch 0 -------|------- epoch 1 -------| ...     10 samples, 4 ranks, batch 2
#     step 0     0 1 2 3 0 1 2 3                                          (the number is the rank that gets it)
#     step 1                     0 1     2 3 0 1 2 3
#
# The *position* in this stream is all there is to save. It knows nothing of ranks.
#
# ### Exercise 5 · deal (15 minutes)
#
# `order(epoch)` is the permutation of an epoch, the same on every rank because it is drawn from (seed, epoch).


# %%
def deal(position, order, num_samples, batch_size, rank, world_size):
    """This rank's `batch_size` samples of the step that begins at `position` of the stream, a list of ints."""
    # BEGIN SOLUTION
    places = [position + rank + world_size * i for i in range(batch_size)]
    return [int(order(place // num_samples)[place % num_samples]) for place in places]
    # END SOLUTION


deal = check("deal-samples", deal)

# %% [markdown]
# On real ranks: 4 of them for 3 steps, then the job starts again on 2, from the position alone.

# %%
SAMPLES, BATCH, STEPS = 30, 3, 3
position = STEPS * 4 * BATCH
before = launch(experiments.dealt, 4, deal, SAMPLES, BATCH, STEPS)
after = launch(experiments.dealt, 2, deal, SAMPLES, BATCH, 4, position)
for step, shares in enumerate([*zip(*before, strict=True), *zip(*after, strict=True)]):
    print(f"step {step}: " + "".join(f"{share!s:14}" for share in shares))
seen = Counter(sample for rank in before + after for share in rank for sample in share)
receipt(
    f"{SAMPLES} samples: {position} dealt to 4 ranks, {2 * SAMPLES - position} to 2, two epochs in all",
    [
        row("samples dealt", 2 * SAMPLES, seen.total()),
        row("times the rarest and the most frequent were shown", (2, 2), (min(seen.values()), max(seen.values()))),
        row("different samples", SAMPLES, len(seen)),
    ],
)

# %% [markdown]
# ## 5 · In time
#
# A step is input, forward, backward and optimizer (and, between ranks, communication). Where does its time go when batches
# come from a slow place? Below, loading takes as long as an *emulated* remote read; the model and its step are real.
#
# ### Exercise 6 · prefetch (20 minutes)
#
# Make the next batches in a thread while the current one is computed: in order, about `depth` ahead and no further.
# And if the loader fails, its error must arrive where the batch was due. The check looks at the order of events, not at
# a clock.


# %%
def prefetch(make, total, depth):
    """Iterates make(0), ..., make(total - 1), made by a thread that runs about `depth` batches ahead."""
    # BEGIN SOLUTION
    ready = queue.Queue(maxsize=depth)

    def produce():
        for k in range(total):
            try:
                ready.put((make(k), None))
            except Exception as error:
                ready.put((None, error))
                return

    threading.Thread(target=produce, daemon=True).start()
    for _ in range(total):
        batch, error = ready.get()
        if error is not None:
            raise error
        yield batch
    # END SOLUTION


prefetch = check("prefetch", prefetch)

# %%
trainer = experiments.Trainer(validation, committed.vocab_size)
runs = experiments.starve(trainer, prefetch)


def starvation():
    """Timeline of the same twelve steps: batches loaded on demand, and made ahead by a thread."""
    return pictures.draw_starvation(runs)


show(starvation)

# %%
parts = ("input", "forward", "backward", "optimizer")
print(f"{'mean ms':12}" + "".join(f"{part:>11}" for part in (*parts, "waited", "step")))
rows = [row("your guess for 32 and 20 ms", predict.step_seconds(32, 20, prefetch=True), guess_step, "ms", 0.05)]
for name, run in runs.items():
    times = [run["parts"][part] for part in parts] + [run["waited_s"], run["step_s"]]
    print(f"{name:12}" + "".join(f"{seconds * 1e3:11.1f}" for seconds in times))
    ahead = name == "prefetched"
    expected = predict.step_seconds(run["load_s"], run["compute_s"], prefetch=ahead)
    rows.append(
        row(f"{name}: {'max(load, compute)' if ahead else 'load + compute'}", expected, run["step_s"], "s", 0.25)
    )
receipt("time of a step", rows)

# %% [markdown]
# The sum became the larger of the two. "Step time = input + compute + communication" holds for a loop that does one thing
# after the other; once things overlap, only the *exposed* part adds. This step is still starved: it waits for as long as
# loading takes longer than computing. A quicker loader or more workers would help:

# %%
show(pictures.step_time)

# %%
sliders(pictures.step_time, load_ms=(0.0, 100.0, 1.0), compute_ms=(5.0, 60.0, 1.0), workers=(1, 8))

# %% [markdown]
# *Depth* solves another problem. It does nothing for a loader that is slow on average, but it bridges the gaps of one
# that is slow now and then (a cold shard, a busy disk). How deep must the queue be until the waits are gone?

# %%
show(pictures.ride_out)

# %%
sliders(pictures.ride_out, depth=(0, 10), slow_ms=(20.0, 120.0, 5.0), every=(4, 20))

# %% [markdown]
# ## 6 · Break it: two jobs, one is wrong
#
# Two data-parallel jobs run one step on 4 ranks, 8 windows on each. Each rank computes gradients on its samples and
# all-reduces them. One of the jobs has the most common bug of data pipelines. Look at the loss and the ledger first:


# %%
def job_a(group):
    return deal(0, lambda epoch: permutation(64, 0, epoch), 64, 8, group.rank, group.world_size)


def job_b(group):
    return deal(0, lambda epoch: permutation(64, 0, epoch), 64, 8, 0, group.world_size)


jobs = {name: launch(experiments.train_step, 4, job) for name, job in (("A", job_a), ("B", job_b))}
for name, (one, *_) in jobs.items():
    print(
        f"job {name}, rank 0: loss {one['loss']:.3f}, {one['calls']['all_reduce']} all-reduce, {one['bytes']:,} B sent"
    )

# %%
broken = "A"  # your diagnosis; change it before you run the next cell

# %%
print(
    "You said", broken, "which is", "right." if broken == "B" else "wrong: in job B every rank takes rank 0's samples."
)
rows = []
for name, everyone in jobs.items():
    rows.append(row(f"job {name}: bytes sent by rank 0", jobs["A"][0]["bytes"], everyone[0]["bytes"], "B"))
    rows.append(row("    different samples in the step", 4 * 8, len({i for one in everyone for i in one["samples"]})))
    rows.append(row("    change of rank 0's gradient by the all-reduce", None, everyone[0]["change"]))
receipt("what the ranks saw", rows)

# %% [markdown]
# The calls, the bytes and the loss look right: communication was correct, and it averaged four equal gradients. Four ranks
# did the work of one. One line finds the bug: **gather the sample numbers of a step and count the different ones.** An
# all-reduce that changes nothing is a second symptom.
#
# ## 7 · Break it: order lost on resume
#
# A run saves the position of its *loader*, but the loader runs ahead of training. Which samples are never trained on?

# %%
GLOBAL, DEPTH, TAKEN, LAST, NUM = 8, 4, 5, 25, 200  # 25 steps of 8 samples are one epoch of 200


def step_samples(step):
    """The samples of all ranks in a step."""
    return deal(step * GLOBAL, lambda epoch: permutation(NUM, 0, epoch), NUM, GLOBAL, 0, 1)


made = []
with data.Prefetcher(lambda k: made.append(k) or step_samples(k), workers=1, depth=DEPTH) as batches:
    shown = {sample for _ in range(TAKEN) for sample in next(batches)}
    while len(made) < TAKEN + DEPTH:  # the thread fills its queue while the last batch is computed
        time.sleep(0.001)
rows = []
for saved_by, resume_at, lost in (("loader", len(made), DEPTH * GLOBAL), ("training", TAKEN, 0)):
    later = {sample for step in range(resume_at, LAST) for sample in step_samples(step)}
    rows.append(row(f"position saved by the {saved_by}: samples lost", lost, NUM - len(shown | later)))
receipt(f"stopped after {TAKEN} steps of {GLOBAL} samples, {DEPTH} batches ahead", rows)

# %% [markdown]
# `minillm.data.Loader` counts a batch when it is handed out, so its state is right however far its threads have run:

# %%
dataset = data.TokenDataset(train, SEQ_LEN)
with data.Loader(dataset, batch_size=8, workers=2, depth=4) as loader:
    for _ in range(5):
        next(loader)
    saved = loader.state_dict()
    uninterrupted = next(loader).indices.tolist()
with data.Loader(dataset, batch_size=8, workers=0) as resumed:
    resumed.load_state_dict(saved)
    continued = next(resumed).indices.tolist()
print(saved)
receipt(
    "resuming minillm's loader",
    [
        row("position after 5 steps of 8", 40, saved["position"]),
        row("the batch after resuming is the one that was due", True, continued == uninterrupted),
    ],
)

# %% [markdown]
# ## 8 · Where it loses
#
# **Threads do not help pure Python.** Your `encode` holds the interpreter's lock, so two threads take turns on one
# core. PyTorch, numpy, file reads, `hashlib` and the `tokenizers` library release it; everything else needs processes.
# CPU time per second of wall time shows it: pure Python cannot exceed 1, while SHA-256 comes near 2 if two cores are
# free. (Where other programs use the cores, both stay below 1, and the rows say nothing about the lock.)

# %%
snippets = [piece.encode() for piece in bpe.split(sample)]
block = np.random.default_rng(0).bytes(16 << 20)
pure_python = experiments.cores_busy(lambda k: [encode(piece, ranks) for piece in snippets], workers=2)
without_lock = experiments.cores_busy(lambda k: hashlib.sha256(block).digest(), workers=2)
receipt(
    "2 threads: cores in use at a time",
    [
        row("pure Python uses more than one", False, pure_python > 1.2),
        row("    cores", None, pure_python),
        row("SHA-256, which lets go of the lock: cores", None, without_lock),
    ],
)

# %% [markdown]
# **Sorting by length** loses randomness: tokens per step, and with them the noise of the gradient and the time of the
# step, swing with the kind of file. **Packing** puts strangers into one window: tokens can attend to the file before
# theirs, unless the mask forbids it. **A large vocabulary** saves little at the end and pays in rows of the embedding.

# %%
rows = []
for name, by_length in (("random", False), ("sorted", True)):
    batches = [batch for batch in length_batches(lengths, 8, 0, by_length) if len(batch) == 8]
    totals = [sum(lengths[i] for i in batch) for batch in batches]
    rows.append(row(f"{name} batches of 8 files: most tokens / fewest", None, max(totals) / min(totals)))
rows.append(row(f"windows of {SEQ_LEN} in which a file ends", None, f"{crossed:.1%}"))
rows.append(row("from 4,096 to 8,192: tokens", None, f"{counts[-1] / counts[-2] - 1:+.1%}"))
rows.append(row("    parameters of embedding and head", None, f"{sizes[-1] / sizes[-2] - 1:+.1%}"))
receipt("the price", rows)

# %% [markdown]
# ## 9 · The same in production
#
# Here is torch's `DataLoader` with a `DistributedSampler` on 4 real ranks: 10 samples, two epochs. Does each rank get a
# subset of its own? Count:

# %%
plain = launch(experiments.torch_loader, 4, 10, 2, False)
fresh = launch(experiments.torch_loader, 4, 10, 2, True)
for name, everyone in (("without set_epoch", plain), ("with set_epoch", fresh)):
    for epoch in range(2):
        print(f"{name:18} epoch {epoch}: " + "  ".join(f"{one[epoch]!s:10}" for one in everyone))
shown = Counter(sample for one in plain for sample in one[0])
again = predict.sampler_duplicates(10, 4)
receipt(
    "DistributedSampler, 10 samples on 4 ranks",
    [
        row("samples shown again in an epoch: N·ceil(D/N) − D", again, shown.total() - len(shown)),
        row("without set_epoch: epoch 1 in the order of epoch 0", True, all(one[0] == one[1] for one in plain)),
        row("with set_epoch: epoch 1 in the order of epoch 0", False, all(one[0] == one[1] for one in fresh)),
    ],
)

# %% [markdown]
# It **repeats** samples so that all ranks make equally many steps (with `drop_last=True` it drops some instead), which
# spoils an evaluation that counts each sample once. **Without `sampler.set_epoch(epoch)` every epoch has the same
# order.** Neither raises an error. And it knows no position: to resume inside an epoch one skips batches, or uses
# torchdata's `StatefulDataLoader`.
#
# The committed tokenizer is a Hugging Face file, and `transformers` reads it:

# %%
try:
    from transformers import PreTrainedTokenizerFast
except ImportError:
    compared = "transformers is not installed: pip install 'transformers>=5,<6' to compare"
else:
    from minillm.data.tokenizer import COMMITTED

    ours, theirs = committed.encode(held_out), PreTrainedTokenizerFast(tokenizer_file=str(COMMITTED)).encode(held_out)
    compared = receipt(
        "transformers' fast tokenizer on the held-out files",
        [row("ids", len(ours), len(theirs)), row("the same ids", True, ours == theirs)],
    )
compared

# %% [markdown]
# | here | in production |
# |---|---|
# | `merge_step`, `encode` | `tokenizers` (in Rust), tiktoken; SentencePiece is a toolkit that trains BPE or Unigram |
# | `windows` over a mapped token file | Megatron's `.bin` and `.idx`, nanoGPT's `train.bin` |
# | `deal` and a position | Megatron's `consumed_samples`, `StatefulDataLoader`, MosaicML Streaming |
# | `prefetch` | `DataLoader(num_workers=…, prefetch_factor=…, pin_memory=True)`: processes and shared memory |
# | the split of the step | `torch.profiler`: the wait is the time in the DataLoader's `__next__` |
#
# With `num_workers > 0` there is one more trap: an `IterableDataset` is *copied* into every worker, so W workers on
# each of N ranks show every sample W·N times, unless it shards itself (`torch.utils.data.get_worker_info`).
#
# ## 10 · On a cluster
#
# `labs/torchrun/11_data_pipeline.py` deals and counts on any number of processes (after solving it there):
#
# ```bash
# python labs/torchrun/11_data_pipeline.py                                    # starts 4 ranks itself
# torchrun --nproc-per-node 4 labs/torchrun/11_data_pipeline.py               # the same, under torchrun
# torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d \
#          --rdzv-endpoint $HEAD_NODE:29500 labs/torchrun/11_data_pipeline.py    # on each of two nodes
# ```
#
# No rank has to ask another which samples are its own: they follow from the seed and the position. The token file lies on
# a shared disk or is copied to local ones first; a rank's samples are then random reads in it.
#
# ## 11 · Common claims
#
# | Claim | What is true |
# |---|---|
# | "Character tokens come with a major loss of information" | They lose nothing that occurred in training; they make sequences longer. Word vocabularies lose what they do not hold ([Sennrich, Haddow and Birch, 2016](https://arxiv.org/abs/1508.07909)). |
# | "Tokenization produces vectors" | It produces integer ids. The model's embedding matrix makes vectors of them. |
# | "Perplexity and bits per character are the same metric" | exp(nats per token) depends on the tokenizer; bits per byte = nats per token / ln 2 · tokens / bytes does not. |
# | "DistributedSampler gives each process a unique subset" | Only if the ranks divide the samples: otherwise it repeats some, or drops some with `drop_last=True` ([PyTorch documentation](https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler)). |
# | "Pretraining a large model needs an enormously fast disk" | A 7B model on one H100 reads about 19 kB/s of tokens: question 7. |

# %% [markdown]
# ## 12 · Interview corner
#
# The numbers first. An H100's dense bf16 peak, 989 TFLOP/s, is from
# [NVIDIA's data sheet](https://www.nvidia.com/en-us/data-center/h100/); 6 FLOPs per parameter and token are from lab 02.

# %%
draws = np.random.default_rng(0).integers(0, 100_000, 100_000)
at_random = length_batches(targets_of, 8, 0, False)
corpus_padding = predict.padding_waste([[targets_of[i] for i in batch] for batch in at_random])
tokens_per_s = 0.4 * 989e12 / (6 * 7e9)
receipt(
    "numbers for the answers",
    [
        row("1. characters per token at 4,096", None, 1 / at_4096),
        row("   4,096 words: share of held-out pieces that is unknown", None, f"{names.unknown_share(held_out):.1%}"),
        row("2. byte 2-gram, bits per byte", None, in_bytes[257]),
        row("   2-gram of 8,192 tokens, bits per byte", None, in_bytes[8192]),
        row("3. padding, even lengths, batches of 8", None, f"{predict.uniform_padding_waste(8):.1%}"),
        row("   batches of 32", None, f"{predict.uniform_padding_waste(32):.1%}"),
        row("   files of this corpus, random batches of 8", None, f"{corpus_padding:.1%}"),
        row("4. 1,000,003 samples on 64 ranks: repeated", None, predict.sampler_duplicates(1_000_003, 64)),
        row("   1,000 samples on 512 ranks: repeated", None, predict.sampler_duplicates(1_000, 512)),
        row(
            "5. 100,000 windows drawn 100,000 times: never seen", None, f"{1 - len(set(draws.tolist())) / 100_000:.1%}"
        ),
        row("6. load 50 ms, compute 20 ms: 1 worker", None, predict.step_seconds(50e-3, 20e-3, prefetch=True), "s"),
        row("   3 workers", None, predict.step_seconds(50e-3, 20e-3, prefetch=True, workers=3), "s"),
        row("7. 7B model on one H100 at 40 % of peak: tokens", None, tokens_per_s, "token/s"),
        row("   as uint16", None, 2 * tokens_per_s, "B/s"),
        row("8. position saved by a loader 4 batches of 8 ahead: lost", None, DEPTH * GLOBAL),
        row("9. different samples per step, job A", None, len({i for one in jobs["A"] for i in one["samples"]})),
        row("   job B", None, len({i for one in jobs["B"] for i in one["samples"]})),
    ],
)

# %% [markdown]
# Say your answer aloud before you open each one.
#
# **1. Why byte-level BPE, and not words or characters?**
# <details><summary>Answer</summary>
#
# Bytes spell anything, so nothing is unknown and every text comes back, even 10,000 random bytes. With a vocabulary
# of 4,096 words a good part of the held-out code was unknown (second row). Characters lose nothing, but a sequence is
# several times as long (first row), and attention pays for length.
#
# *Follow-up: why cut into words before merging?* Otherwise the most frequent pairs glue words to punctuation and the
# vocabulary fills with phrases. The cut is part of the tokenizer: another cut, other tokens.
# </details>
#
# **2. Model A has perplexity 12, model B has 190. Which is better?**
# <details><summary>Answer</summary>
#
# Not known: ask for bits per byte = nats per token / ln 2 · tokens / bytes. The byte 2-gram above has by far the better
# perplexity, and by far the worse bits per byte.
#
# *Follow-up: does the tokenizer make the vectors?* No. It yields integer ids; the model's embedding matrix makes
# vectors of them.
# </details>
#
# **3. Your fine-tuning batches are padded. What do you lose?**
# <details><summary>Answer</summary>
#
# 1 − mean/max of each batch: 44 % with even lengths in batches of 8, 48 % in batches of 32, and more where a few files
# are very long, as in this corpus (the row says how much). Pack, with a mask per document where it matters; or sort
# into buckets and shuffle the order of the batches.
#
# *Follow-up: what do you divide the loss by?* By the targets that count, over all ranks. Padding is no target.
# </details>
#
# **4. "DistributedSampler gives every process a unique subset." True?**
# <details><summary>Answer</summary>
#
# Only if N divides D. Otherwise it repeats N·ceil(D/N) − D samples: 2 for 10 on 4 ranks, 61 for 1,000,003 on 64, 24 for
# 1,000 on 512. Harmless in training, wrong in an evaluation on 1,000 questions. And without `set_epoch` the order
# repeats.
# </details>
#
# **5. nanoGPT draws random windows, with replacement. What is an epoch there?**
# <details><summary>Answer</summary>
#
# There is none. After as many draws as there are windows, 1/e = 37 % of them have never been drawn and others several
# times. Fine for less than one pass over very much text; but "exactly once" cannot be said, and only the generator's
# state resumes it.
# </details>
#
# **6. The GPUs are 40 % busy. Is it the input, and what do you do?**
# <details><summary>Answer</summary>
#
# Train on one batch kept in memory: if the step gets quicker, it was the input. Or split the step and look at the wait
# before forward. If load exceeds compute, depth does not help; 50 ms against 20 ms makes 50 ms steps with one worker
# and 20 ms with three. If the mean is fine and some batches come late, depth does help. And do the work once: tokenize
# beforehand.
#
# *Follow-up: symptoms without a profiler?* Step times that vary, busy CPUs beside idle GPUs, epochs that start slowly.
# </details>
#
# **7. Does pretraining need a fast disk?**
# <details><summary>Answer</summary>
#
# A 7B model on an H100 at 40 % of peak eats 9,400 tokens per second, 19 kB/s as uint16. Text pretraining starves for
# other reasons: tokenizing on the fly, many small remote files, a shuffle made of random seeks, more workers than
# cores. Images and video are another matter.
# </details>
#
# **8. After a crash and a resume the loss curve is slightly different. What do you check in the data pipeline?**
# <details><summary>Answer</summary>
#
# Was the position saved that training had *taken*, or the one the loader had *made* (depth · global batch samples are
# then never shown: 32 above)? Does the order follow from (seed, epoch), or from a generator whose state is gone? Does
# the position count samples, or steps of what was then the batch size?
# </details>
#
# **9. All ranks log a sensible loss. How do you know that they see different data?**
# <details><summary>Answer</summary>
#
# Gather the sample ids (or a hash of the batch) of one step and count: 32 different ones, not 8. Bytes and calls cannot
# tell. Equal losses on all ranks are a symptom, and so is an all-reduce that leaves the gradient as it was.
# </details>
#
# **10. How large is the web, as data?**
# <details><summary>Answer</summary>
#
# One monthly Common Crawl is about 377 TiB uncompressed (May 2024, its own statistics). The "300 GB" in many tables is
# C4, one cleaned extract of it (305 GB). For language models "preparing data" means deduplicating, filtering, mixing
# and packing; scaling features is advice for tables.
# </details>

# %% [markdown]
# ## 13 · Design questions
#
# Work them out on paper first, then run the cell.
#
# **A.** A 70B model is trained on 2,048 H100s at 40 % of peak. How many tokens per second does the cluster read, how many
# bytes per second is that as uint32, and how long does a corpus of 15 trillion tokens last? What does the answer say
# about streaming the tokens from one object store?
#
# **B.** Fine-tuning examples have lengths spread evenly between 1 and 2,048 tokens. What share of the GPU time does
# padding to the longest of a batch of 16 cost, and how much more throughput would perfect packing give?

# %%
cluster_tokens_per_s = 2048 * 0.4 * 989e12 / (6 * 70e9)
waste = predict.uniform_padding_waste(16)
print(f"A. {cluster_tokens_per_s:,.0f} tokens/s, {4 * cluster_tokens_per_s / 1e6:.1f} MB/s")
print(f"   15 trillion tokens last {15e12 / cluster_tokens_per_s / 86400:.0f} days")
print(f"B. padding takes {waste:.0%} of the positions; packing gives {1 / (1 - waste):.2f} times the throughput")

# %% [markdown]
# <details><summary><b>What a strong answer says</b></summary>
#
# **A.** A few megabytes per second for the whole cluster: bandwidth is not the problem. Latency, request rate and restarts
# are. So read large sequential pieces ahead, keep the tokens tokenized, and make the order a function of seed and
# position, so that 2,048 processes agree without talking and a restart costs no replay.
#
# **B.** Nearly half. Packing needs a mask, or at least positions, per document, and the loss has to be divided by the
# targets that count. Sorting into buckets gets most of the gain without packing, if the order of the buckets is shuffled.
# </details>
#
# **Open task.** Give the committed token file a second epoch that differs from the first, resume it at step 1,000 on half
# as many ranks, and prove with counts (not by reading the code) that no sample was repeated or lost.
#
# ## You can now answer
#
# 1. **How does text become tokens without losing a byte, and in which unit do models compare?** Byte pairs, merged by
#    rank; bits per byte.
# 2. **Which rank sees which sample, and how does a run go on?** Place p of one endless stream, dealt like cards; the
#    position that training has *taken* is the whole state.
# 3. **When does loading cost time?** On demand always: load + compute. Prefetched, only if load / workers exceeds
#    compute.
#
# Next: **12 · decoding**, where the batch grows by one token at a time.

# %%
finish("11_data_pipeline")
