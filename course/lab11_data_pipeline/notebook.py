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
# Stands on labs 02 (the step) and 03 (one shard of the batch per rank).
#
# The core path, the six exercises (73 minutes) and sections 6 and 7, takes two hours; with the questions at the end plan
# three. Run All takes under a minute. At the end you can answer:
#
# 1. How does text become tokens without losing a byte, and in which unit do models of different vocabularies compare?
# 2. Which rank sees which sample in which epoch, and how does a run resume at the exact one on another number of ranks?
# 3. When does loading cost time, and how much of it can prefetching take away?
#
# A mistake in the data pipeline raises no error. The loss still falls, only later, or less far, or towards the wrong
# target. So everything below is counted. The calls of `group`, and what each returns:
# [docs/group.md](../docs/group.md).
#
# > **Common claims**
# >
# > - *"Character tokens lose information."* They lose nothing that occurred in training; they make sequences longer.
# >   Vocabularies of words lose every word that they do not hold
# >   ([Sennrich, Haddow and Birch 2016](https://arxiv.org/abs/1508.07909)).
# > - *"Perplexity and bits per character are the same metric."* exp(nats per token) counts in the tokenizer's own unit;
# >   bits per byte count in the text's, so they compare (section 2).
# > - *"DistributedSampler gives each process a unique subset."* Only if the number of ranks divides the number of
# >   samples: otherwise it repeats some, or drops some with `drop_last=True`
# >   ([PyTorch documentation](https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler)).
# > - *"Pretraining a large model needs an enormously fast disk."* A 7B model on one H100 reads tens of kilobytes of
# >   tokens per second (question 7).

# %%
import math
import queue
import threading
from collections import Counter
from itertools import pairwise

from course.kit import check, finish, hint, show, sliders
from course.lab11_data_pipeline import bpe, experiments, experiments_breaks, figures, receipts
from course.lab11_data_pipeline import receipts_text as text_tables
from minillm import data
from minillm.comm import launch

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
# Make three guesses. They come back beside the answers.

# %%
guess_tokens = 0.5  # tokens per character of Python code, with a vocabulary of 4,096
guess_padding = 0.2  # share of padding in a random batch of 8 files, padded to the longest
guess_step_ms = 40  # if a batch takes 32 ms to load, 20 ms to compute on, and is loaded ahead

# %% [markdown]
# ## 1 · Bytes, pairs, tokens
#
# Byte-pair encoding, made to compress files, came to language as merges of *characters* ([Sennrich, Haddow and Birch
# 2016, section 3.2, after Gage 1994](https://arxiv.org/abs/1508.07909)). GPT-2 starts from the 256 bytes, which can
# spell any text ([Radford et al. 2019](https://openai.com/index/better-language-models)). Training repeats one step:
# find the pair of neighbouring tokens that occurs most often, and merge it into a new token wherever it stands. Text is
# first cut into words, and no token crosses a cut. Each different word is kept once, with how often it occurs:

# %%
sample = "low " * 5 + "lower " * 2 + "newest " * 6 + "widest widest widest"
words = bpe.words_of(sample)
for word, times in words.items():
    print(times, "×", b"|".join(word).decode())

# %% [markdown]
# ### Exercise 1 · one merge (15 minutes)
#
# A token is a `bytes` object, and merging `left` and `right` gives `left + right`. Occurrences are merged from the left,
# and a merged token is used up: `a a a` becomes `aa a`. Two pairs may occur equally often, and another choice gives
# another tokenizer. The rule of the `tokenizers` library: the pair with the smallest (id of left, id of right) goes
# first. `ids` holds each token's id. Leave the arguments unchanged.


# %%
def merge_step(words, ids):
    """words: {tuple of tokens: how often}
    -> (most frequent pair, the words with each occurrence of it merged)."""
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
# That is all of training: `bpe.train` calls your function until the vocabulary is full. Eight merges on the small text:

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
# New text has to be cut as the training text was: merges happen in the order in which they were *learnt* (their rank),
# not in the order of the text.


# %%
def encode(piece, ranks):
    """piece: any bytes, ranks: {(left, right): rank}, in any order -> list of tokens (bytes);
    lowest rank first, until none is left."""
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
# Now on real code: your merges beside the library's, and a line that was not in the training text.

# %%
merges = bpe.train(receipts.sample_text(), 256 + 60, merge_step)
line = "    return self.step  # naïve, 恢复"
tokens = bpe.encode(line, merges, encode)
print("|".join(token.decode(errors="backslashreplace") for token in tokens))
receipts.merged(merges, encode, line)

# %% [markdown]
# Two Chinese characters, never seen in training, cost six tokens and lose nothing, because every text is made of bytes.
# Byte pairs replaced two older choices, characters and words. All three on the held-out files:

# %%
text_tables.tokenizers()

# %%
receipts.lossless()

# %% [markdown]
# Two rivals of BPE are in wide use: *WordPiece* (BERT) merges the pair that is most frequent *beside its parts* and
# encodes the longest token first; *Unigram* (T5, in SentencePiece) gives pieces probabilities (below, pieces of up to 6
# bytes) and takes the likeliest split.

# %%
text_tables.three_methods(sample)

# %% [markdown]
# How many merges should it be? They are learnt one after the other, so a smaller vocabulary is the beginning of a larger
# one, and a single training gives the whole curve. It reads an eighth of the files, so its 4,096 tokens are not quite
# the committed ones.


# %%
def tokens_by_vocabulary():
    """Tokens per character of held-out code fall ever slower with the vocabulary;
    the embedding grows in proportion."""
    return figures.draw_tokens(experiments.tokens_by_vocabulary())


show(tokens_by_vocabulary)

# %%
receipts.more_merges(guess_tokens)

# %% [markdown]
# Before any of this, copies are dropped, and sources are mixed by weight: a source of n tokens with share w of a run of T is
# read wT/n times. Up to about four reads are nearly as good as new text; the value of further ones decays to nothing
# ([Muennighoff et al. 2023](https://arxiv.org/abs/2305.16264)). Hashes of rows of words find copies that equality misses:

# %%
text_tables.copies()

# %% [markdown]
# The stages before and after pretraining: a table in lab 17.
#
# ## 2 · Which unit?
#
# Cross-entropy is measured in nats per token, and another tokenizer makes other tokens. A loss of 2 with one tokenizer
# and of 5 with another does not say which model predicts the text better. The bytes of a text are the same for both.
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
# The same kind of model, a 2-gram with the smoothing of Kneser and Ney
# ([Chen and Goodman 1999](https://doi.org/10.1006/csla.1999.0128)), on four vocabularies of that curve:

# %%
text_tables.units(bits_per_byte)

# %% [markdown]
# Perplexity rises from line to line because each token stands for more bytes. Bits per byte fall because two longer
# tokens are more context, until their pairs are too rare to learn. Compare losses of different tokenizers in bits per
# byte, and in nothing else.
#
# The next table is the bar for every model trained in this course: the committed vocabulary, and all files to learn from
# instead of an eighth. *Formula* converts the loss with your function; *measured* adds up −log₂ p over the whole text and
# never asks how many tokens there are.

# %%
receipts.ngram_baseline(bits_per_byte)

# %% [markdown]
# ## 3 · Batches: pad, sort or pack
#
# Files differ in length, and a batch is a rectangle. Padding each row to the longest wastes 1 − mean/max of the batch:
# it is computed and thrown away.


# %%
def padding_view(batch_size=8):
    """A random and a length-sorted batch of files with their padding,
    and the padding of all batches by batch size."""
    return figures.draw_padding(experiments.lengths(), batch_size)


show(padding_view)

# %%
sliders(padding_view, batch_size=[2, 4, 8, 16, 32])

# %% [markdown]
# The formula beside padding counted in padded tensors. The last row has 8,000 lengths
# drawn evenly from 1 to 2,048, for which the expected padding of B rows is (B−1)/2B.

# %%
receipts.padding(guess_padding)

# %% [markdown]
# Real files waste more than even lengths do, because a few of them are very long. Sorting by length helps and has its
# price: a batch then holds files of one kind. Pretraining *packs* instead: all text is one row of tokens, cut into
# windows:
#
#     tokens    a b c d e <sep> f g h ...
#     window 0  inputs  a b c      targets  b c d
#     window 1  inputs  d e <sep>  targets  e <sep> f
#
# ### Exercise 4 · windows (10 minutes)
#
# Make as many whole windows as the tokens fill. Within them every token but the first is a target exactly once, so the
# last target of a window is the first input of the next. What does not fill another window is left out.


# %%
def windows(tokens, seq_len):
    """tokens: [T], T > seq_len -> (inputs, targets), each [n, seq_len] of the same dtype."""
    # BEGIN SOLUTION
    n = (len(tokens) - 1) // seq_len
    return tokens[: n * seq_len].view(n, seq_len), tokens[1 : n * seq_len + 1].view(n, seq_len)
    # END SOLUTION


windows = check("pack-windows", windows)

# %%
receipts.packed(windows)

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
# The *position* in this stream, counted in samples, is all there is to save. It knows nothing of ranks.
#
# ### Exercise 5 · deal (15 minutes)
#
# `order(epoch)` is the permutation of an epoch, an array of sample numbers; it is the same on every rank because it is
# drawn from (seed, epoch). A step may reach into the next epochs. Another way to deal passes, too, if the
# ranks' shares together are the step's samples.


# %%
def deal(position, order, num_samples, batch_size, rank, world_size):
    """This rank's `batch_size` samples of the step that begins at `position` of the stream,
    a list of ints."""
    # BEGIN SOLUTION
    places = [position + rank + world_size * i for i in range(batch_size)]
    return [int(order(place // num_samples)[place % num_samples]) for place in places]
    # END SOLUTION


deal = check("deal-samples", deal)

# %% [markdown]
# On real ranks: 4 of them for 3 steps of 3 samples each, then the job starts again on 2, from the position alone.

# %%
before = launch(experiments.dealt, 4, deal, 30, 3, 3)
after = launch(experiments.dealt, 2, deal, 30, 3, 4, 3 * 4 * 3)
for step, shares in enumerate([*zip(*before, strict=True), *zip(*after, strict=True)]):
    print(f"step {step}: " + "".join(f"{share!s:14}" for share in shares))
receipts.dealt(before, after)

# %% [markdown]
# ## 5 · In time
#
# A step is input, forward, backward and optimizer. Where does its time go when batches come from a slow place? Below,
# loading takes as long as an *emulated* remote read; the model and its step are real.
#
# ### Exercise 6 · prefetch (20 minutes)
#
# While a batch is computed on, a thread makes the next `depth`, in order, and at most one more (in the making, or waiting
# for room). An exception of `make` must arrive where its batch was due, itself or as another's `__cause__`. A reader may
# stop early, and the program must be able to end then: make the thread a daemon, or submit one task per batch to a pool.
# The check looks at the order of events, not at a clock.


# %%
def prefetch(make, total, depth):
    """Iterates make(0), ..., make(total - 1), none of them None,
    made `depth` batches ahead; total and depth are 1 or more."""
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
runs = experiments.starve(prefetch)


def starvation():
    """Timeline of the same twelve steps: batches loaded on demand, and made ahead by a thread."""
    return figures.draw_starvation(runs)


show(starvation)

# %%
receipts.step_parts(runs)

# %%
receipts.step_times(runs, guess_step_ms)

# %% [markdown]
# The sum became the larger of the two. "Step time = input + compute + communication" holds for a loop that does one thing
# after the other; once things overlap, only the *exposed* part adds. This step is still starved: it waits for as long as
# loading takes longer than computing. A quicker loader or more workers would help (drag `workers`):

# %%
show(figures.step_time)

# %%
sliders(figures.step_time, load_ms=(0.0, 100.0, 1.0), compute_ms=(5.0, 60.0, 1.0), workers=(1, 8))

# %% [markdown]
# *Depth* solves another problem. It does nothing for a loader that is slow on average, but it bridges the gaps of one
# that is slow now and then (a cold shard, a busy disk). How deep must the queue be until only the first step waits?

# %%
show(figures.ride_out)

# %%
sliders(figures.ride_out, depth=(0, 10), slow_ms=(20.0, 120.0, 5.0), every=(4, 20))

# %% [markdown]
# ## 6 · Break it: two jobs, one is wrong
#
# Two data-parallel jobs run one step on 4 ranks, 8 windows on each. Each rank computes gradients on its samples and
# all-reduces them. One of the jobs has the most common bug of data pipelines. Look at the ledger and the losses first:

# %%
jobs = experiments_breaks.two_jobs(deal)
for name, ranks in jobs.items():
    print(f"job {name}: calls {dict(ranks[0]['calls'])}, {ranks[0]['bytes']:,} B sent by rank 0")
    print("   losses of ranks 0 to 3: " + ", ".join(f"{one['loss']:.3f}" for one in ranks))

# %%
broken = "A"  # your diagnosis; change it before you run the next cell

# %%
print(
    f"You said {broken}:",
    "right." if broken == "B" else "wrong: in job B every rank takes rank 0's samples.",
)
receipts.two_jobs(jobs)

# %% [markdown]
# Calls, bytes and each single loss look right; only that all four are equal gives the job away: four ranks did the work
# of one. One line finds the bug: **gather the sample numbers of a step and count the different ones.** An all-reduce
# that changes nothing is a second symptom.
#
# ## 7 · Break it: samples lost on resume
#
# A run saves the position of its *loader*, which runs 4 batches of 8 samples ahead of training. It is stopped after 5
# steps. How many samples of the epoch are never trained on?

# %%
receipts.lost(deal)

# %% [markdown]
# `minillm.data.Loader` counts a batch when it is handed out, so its state is right however far its threads have run:

# %%
receipts.loader_resumes()

# %% [markdown]
# ## 8 · Where it loses
#
# **Threads do not help pure Python.** Your `encode` holds the interpreter's lock, so two threads take turns on one core.
# PyTorch, numpy, file reads, `hashlib` and the `tokenizers` library release it; everything else needs processes (or a
# CPython without that lock, as its free-threaded build has been since 3.13). CPU
# time per second of wall time shows it: pure Python cannot exceed 1, while SHA-256 comes near 2 if two cores are free.
# (Where other programs use the cores, both fall, and the rows say nothing about the lock.)

# %%
receipts.threads(encode, merges)

# %% [markdown]
# **Sorting by length** loses randomness: tokens per step, and with them the noise of the gradient and the time of the
# step, swing with the kind of file. **Packing** puts unrelated files into one window: tokens can attend to the file
# before theirs, unless the mask forbids it. **A large vocabulary** saves little at the end and pays in rows of the
# embedding.

# %%
receipts.price()

# %% [markdown]
# ## 9 · The same in production
#
# torch's `DataLoader` with a `DistributedSampler` on 4 real ranks: 10 samples, two epochs. Does each rank get a subset
# of its own? Count:

# %%
plain = launch(experiments.torch_loader, 4, 10, 2, False)
fresh = launch(experiments.torch_loader, 4, 10, 2, True)
for name, everyone in (("without set_epoch", plain), ("with set_epoch", fresh)):
    for epoch in range(2):
        print(f"{name:18} epoch {epoch}: " + "  ".join(f"{one[epoch]!s:10}" for one in everyone))
receipts.torch_sampler(plain, fresh)

# %% [markdown]
# It **repeats** samples so that all ranks make equally many steps, which spoils an evaluation that counts each sample
# once. **Without `sampler.set_epoch(epoch)` every epoch has the same order.** And it knows no position: to resume inside
# an epoch one skips batches, or uses torchdata's `StatefulDataLoader`.
#
# The committed tokenizer is a Hugging Face file, and `transformers` reads it:

# %%
receipts.fast_tokenizer()

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
# `labs/torchrun/11_data_pipeline.py` deals and counts on any number of processes; fill in `deal` there first. On each of
# two nodes: `torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500
# labs/torchrun/11_data_pipeline.py`; on one machine `python labs/torchrun/11_data_pipeline.py` starts 4 ranks itself.
# The token file lies on a shared disk or is copied to local ones first; a rank's samples are then random reads in it.
#
# ## 11 · Interview corner
#
# The numbers first. An H100's dense bf16 peak, 989 TFLOP/s, is from
# [NVIDIA's data sheet](https://www.nvidia.com/en-us/data-center/h100/); 6 FLOPs per parameter and token are from lab 02.

# %%
receipts.numbers()

# %% [markdown]
# Say your answer aloud before you open each one.
#
# **1. Why byte-level BPE, and not words or characters?**
# <details><summary>Answer</summary>
#
# Bytes spell anything, so nothing is unknown and every text comes back, even 10,000 random bytes. Characters lose nothing,
# but a sequence is several times as long.
#
# *Follow-up: why cut into words before merging?* Otherwise the most frequent pairs join words to punctuation.
# </details>
#
# **2. Model A has perplexity 12, model B has 190. Which is better?**
# <details><summary>Answer</summary>
#
# Not known: ask for bits per byte = nats per token / ln 2 · tokens / bytes. In section 2 the 2-gram on bytes has by far
# the better perplexity, and by far the worse bits per byte.
# </details>
#
# **3. Your fine-tuning batches are padded. What do you lose?**
# <details><summary>Answer</summary>
#
# 1 − mean/max of each batch: 44 % with even lengths in batches of 8, 48 % in batches of 32, and more where a few
# examples are very long. Pack, with a mask per document where it matters; or sort into buckets and shuffle the order of
# the batches.
#
# *Follow-up: what do you divide the loss by?* By the targets that count, over all ranks. Padding is no target.
# </details>
#
# **4. "DistributedSampler gives every process a unique subset." True?**
# <details><summary>Answer</summary>
#
# Only if N divides D. Otherwise it repeats N·ceil(D/N) − D samples: 61 for 1,000,003 on 64 ranks, 24 for 1,000 on 512.
# Harmless in training, wrong in an evaluation on 1,000 questions.
# </details>
#
# **5. nanoGPT draws random windows, with replacement. What is an epoch there?**
# <details><summary>Answer</summary>
#
# There is none: windows start anywhere. After T / seq_len draws, one pass worth of tokens, 1/e = 37 % of the tokens have
# not been seen. That is fine for less than one pass over very much text; but only the generator's state resumes it.
# </details>
#
# **6. The GPUs are 40 % busy. Is it the input, and what do you do?**
# <details><summary>Answer</summary>
#
# Train on one batch kept in memory: if the step gets quicker, it was the input. If load exceeds compute, depth does not
# help; 50 ms against 20 ms makes 50 ms steps with one worker and 20 ms with three. If some batches come late, depth does
# help.
# </details>
#
# **7. Does pretraining need a fast disk?**
# <details><summary>Answer</summary>
#
# A 7B model on an H100 at 40 % of peak reads 9,400 tokens per second, 19 kB/s as uint16. Text pretraining starves for
# other reasons: tokenizing on the fly, many small remote files, random seeks, more workers than cores.
# </details>
#
# **8. After a crash and a resume the loss curve is slightly different. What do you check in the data pipeline?**
# <details><summary>Answer</summary>
#
# Was the position saved that training had *taken*, or the one the loader had *made*? The second loses all batches made
# ahead, 4 · 8 samples in section 7 (and a fifth batch, if a thread holds it while it waits for room). Does the order
# follow from (seed, epoch), or from a generator whose state is gone? Does the position count samples, or steps of what
# was then the batch size?
# </details>
#
# **9. All ranks log a sensible loss. How do you know that they see different data?**
# <details><summary>Answer</summary>
#
# Gather the sample ids of one step and count: 32 different ones in job A, 8 in job B. Bytes and calls cannot tell.
# </details>
#
# ## 12 · Design questions
#
# Work them out on paper first, then run the cell.
#
# **A.** A 70B model is trained on 2,048 H100s at 40 % of peak. How many tokens per second does the cluster read, how many
# bytes per second is that as uint32, and how long does a corpus of 15 trillion tokens last? What does the answer say
# about streaming the tokens from one object store?
#
# **B.** Fine-tuning examples have lengths spread evenly between 1 and 2,048 tokens. What share of the positions is padding
# to the longest of a batch of 16, and how much more throughput would perfect packing give, at equal cost per position?

# %%
receipts.design()

# %% [markdown]
# <details><summary><b>What a strong answer says</b></summary>
#
# **A.** A few megabytes per second for the whole cluster: not bandwidth but latency, request rate and restarts are the
# problem. Read large sequential pieces ahead, keep the text tokenized, and make the order a function of seed and position.
#
# **B.** Nearly half. Packing needs a mask, or at least positions, per document, and the loss has to be divided by the
# targets that count. Buckets by length get most of the gain, if the order of the batches is shuffled.
# </details>
#
# **Open task.** Give the committed token file a second epoch that differs from the first, resume it at step 1,000 on half
# as many ranks, and prove with counts that no sample was repeated or lost.
#
# ## You can now answer
#
# 1. **How does text become tokens without losing a byte, and in which unit do models compare?** Byte pairs, merged by
#    rank; bits per byte.
# 2. **Which rank sees which sample, and how does a run go on?** Place p of one endless stream, dealt like cards; the
#    position that training has *taken* is the whole state.
# 3. **When does loading cost time?** On demand always: load + compute. Prefetched, only if load / workers exceeds
#    compute on average, or one slow batch outlasts the queue.
#
# Next: [12 · Decoding](12_decoding.ipynb), where the batch grows by one token at a time.

# %%
finish("11_data_pipeline")
