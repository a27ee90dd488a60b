"""Lab 11's claims: text to tokens to batches, nothing lost, nothing repeated, made ahead. Each is one line in a cell.

Without arguments a claim measures the course's own answers. Times are shown and not asserted.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from course.kit.answers import answers_of
from course.kit.receipts import Receipt, formula, receipt, row
from course.lab11_data_pipeline import bpe, experiments, experiments_breaks
from course.lab11_data_pipeline import formulas as predict
from course.lab11_data_pipeline.padding import length_batches
from course.lab11_data_pipeline.receipts_text import word_baseline
from course.shared.table import Table, table
from minillm.comm import launch
from minillm.data import Tokenizer

answers = answers_of("11_data_pipeline")
H100_BF16 = 989e12  # FLOP/s, dense; NVIDIA's data sheet
WORLD, SAMPLES = 4, 10
SEQ_LEN = 256
PARTS = ("input", "forward", "backward", "optimizer")


# Text to tokens.


def sample_text() -> str:
    """30 kB of held-out code, ASCII."""
    return experiments.held_out_text()[:30_000].encode("ascii", "ignore").decode()


def merged(merges: Sequence | None = None, encode: Callable | None = None, line: str = "naïve, 恢复") -> Receipt:
    """The learner's merges beside the library's, and a line that no training text held."""
    merges = merges or bpe.train(sample_text(), 256 + 60)
    theirs = experiments.library_merges(sample_text(), 256 + len(merges))
    back = b"".join(bpe.encode(line, merges, encode)).decode()
    return receipt(
        f"{len(merges)} merges on 30 kB of code",
        [
            row("merges equal to the library's", len(merges), sum(map(lambda a, b: a == b, merges, theirs))),
            row("the line that nobody trained on comes back", True, back == line),
        ],
    )


def lossless() -> Receipt:
    """Byte pairs give every text back; a vocabulary of words does not."""
    tokenizer, noise, text = Tokenizer.load(), os.urandom(10_000), experiments.held_out_text()
    return receipt(
        "what comes back",
        [
            row("byte pairs: 10,000 random bytes", True,
                tokenizer.decode_bytes(tokenizer.encode_bytes(noise)) == noise),
            row("byte pairs: the held-out files", True, tokenizer.decode(tokenizer.encode(text)) == text),
            row("words: some of the text is unknown", True, word_baseline().unknown_share(text) > 0),
        ],
        open_rows=1,
    )  # fmt: skip


def more_merges(guess: float | None = None) -> Receipt:
    """Tokens per character, and what each doubling of the vocabulary saves."""
    curve = experiments.tokens_by_vocabulary()
    counts, at = curve["tokens"], curve["vocab_size"].index(4096)
    return receipt(
        "more merges, learnt on an eighth of the files",
        [
            row("tokens per character at 4,096", None, counts[at] / curve["characters"], guess=guess),
            row("each doubling gives fewer tokens", True, counts == sorted(counts, reverse=True)),
            row("tokens saved by the first (257 to 512)", None, f"{1 - counts[1] / counts[0]:.0%}"),
            row("tokens saved by the last (4,096 to 8,192)", None, f"{1 - counts[-1] / counts[-2]:.0%}"),
        ],
        open_rows=1,
        show="tokens saved",
    )


# Units of loss.


def units_disagree() -> Receipt:
    """From 257 to 8,192 tokens a 2-gram gets worse in perplexity and better in bits per byte."""
    found, text_bytes = (
        [experiments.ngram_loss(size) for size in (257, 8192)],
        len(experiments.held_out_text().encode()),
    )
    small, large = (answers.bits_per_byte(*each, text_bytes) for each in found)
    return receipt(
        "a larger vocabulary",
        [
            row("its 2-gram has the worse perplexity", True, found[1][0] > found[0][0]),
            row("its 2-gram has the better bits per byte", True, large < small),
        ],
    )


def ngram_baseline(bits_per_byte: Callable | None = None) -> Receipt:
    """n-grams on the held-out files: bits per byte from nats per token, and summed over the text without tokens."""
    held_out, rows = experiments.tokens_of("validation"), []
    for order in (3, 2, 1):
        chances = experiments.chances(order)
        nats, direct = float(-np.log(chances).mean()), float(-np.log2(chances).sum() / held_out.text_bytes)
        bits = (bits_per_byte or answers.bits_per_byte)(nats, len(held_out), held_out.text_bytes)
        rows.append(row(f"{order}-gram, {nats:.3f} nats/token", bits, direct, "bit/B", 1e-6))
    return receipt("what a model has to beat", rows, open_rows=1)


# Batches.


def padding(guess: float | None = None) -> Receipt:
    """Padding by the formula beside padding that is counted, position by position."""
    files, lengths, rows = experiments.files(), experiments.lengths(), []
    for name, by_length in (("random", False), ("sorted by length", True)):
        batches = length_batches(lengths, 8, 0, by_length)
        positions, padded = experiments.count_padding(files, batches)
        waste = predict.padding_waste([[lengths[i] for i in batch] for batch in batches])
        own = guess if not by_length else None
        rows.append(row(f"files, {name}: 1 - mean/max", waste, padded / positions, "", 1e-9, guess=own))
    even = np.random.default_rng(0).integers(1, 2049, 8000).tolist()
    waste = predict.padding_waste([[even[i] for i in batch] for batch in length_batches(even, 8, 0)])
    rows.append(row("8,000 even lengths, random: (B-1)/2B", predict.uniform_padding_waste(8), waste, "", 0.02))
    return receipt("share of the positions that is padding, batches of 8", rows)


def packed(windows: Callable | None = None) -> Receipt:
    """The training files in windows."""
    tokens = experiments.tokens_of("train")
    inputs, targets = (windows or answers.windows)(torch.from_numpy(tokens.array.astype(np.int64)), SEQ_LEN)
    crossed = (inputs == tokens.separator).any(1).double().mean().item()
    unused = 1 - targets.numel() / len(tokens)
    return receipt(
        f"the training files in {len(inputs):,} windows of {SEQ_LEN}",
        [
            row("tokens that are no target", predict.packing_waste(len(tokens), SEQ_LEN), unused, "", 1e-9),
            row("windows in which a file ends", None, f"{crossed:.1%}"),
        ],
    )


def dealt(before: Sequence | None = None, after: Sequence | None = None, samples: int = 30) -> Receipt:
    """Samples that ranks got before and after a change of their number. before, after: [rank][step] -> samples."""
    before = before or launch(experiments.dealt, 4, answers.deal, samples, 3, 3, device="cpu")
    after = after or launch(experiments.dealt, 2, answers.deal, samples, 3, 4, 36, device="cpu")
    seen = Counter(sample for rank in (*before, *after) for share in rank for sample in share)
    return receipt(
        f"{samples} samples, two epochs: 36 dealt to 4 ranks, 24 to 2",
        [
            row("times that a sample was shown, fewest and most", (2, 2), (min(seen.values()), max(seen.values()))),
            row("samples that were shown", samples, len(seen)),
        ],
        open_rows=1,
    )


# In time.


def step_times(runs: dict[str, dict[str, Any]] | None = None, guess_ms: float | None = None) -> Receipt:
    """Load + compute on demand, the larger of the two when prefetched."""
    runs = runs or experiments.starve(answers.prefetch, total=8)
    rows = [formula("load 32 ms, compute 20 ms, prefetched", predict.step_seconds(32, 20, True), "ms", guess=guess_ms)]
    for name, run in runs.items():
        ahead = name == "prefetched"
        expected = predict.step_seconds(run["load_s"], run["compute_s"], ahead)
        said = "max(load, compute)" if ahead else "load + compute"
        rows.append(row(f"{name}: {said}", expected, run["step_s"], "s", 0.25, noisy=True))
    return receipt("time of a step", rows)


def step_parts(runs: dict[str, dict[str, Any]]) -> Table:
    """Where the time of a step goes, in ms."""
    rows = []
    for name, run in runs.items():
        times = [run["parts"][part] for part in PARTS] + [run["waited_s"], run["step_s"]]
        rows.append((name, *(f"{seconds * 1e3:.1f}" for seconds in times)))
    return table("mean ms of a step", ("batches", *PARTS, "waited for input", "step"), rows)


def two_jobs(jobs: dict[str, list[dict[str, Any]]] | None = None) -> Receipt:
    """A step in which every rank has samples of its own, and one in which all have the same."""
    jobs = jobs or experiments_breaks.two_jobs(answers.deal)
    different = tuple(len({sample for one in ranks for sample in one["samples"]}) for ranks in jobs.values())
    changes = tuple(ranks[0]["change"] for ranks in jobs.values())
    rows = [
        row("different samples in the step: job A, job B", (32, 8), different),
        row("change of the gradient by the all-reduce: job A, job B", None, changes),
        row("bytes sent by rank 0, job B as job A", jobs["A"][0]["bytes"], jobs["B"][0]["bytes"], "B"),
    ]
    return receipt("what the ranks saw", rows)


def lost(deal: Callable | None = None, taken: int = 5, batch: int = 8, depth: int = 4) -> Receipt:
    """What is never trained on, by whose position was saved."""
    ahead, rows = experiments_breaks.made_ahead(taken, depth), []
    for saved_by, resume_at, predicted in (("the loader", ahead, depth * batch), ("training", taken, 0)):
        found = experiments_breaks.lost_on_resume(deal or answers.deal, taken, resume_at, batch, 200)
        rows.append(row(f"position saved by {saved_by}: samples lost", predicted, found))
    return receipt(f"stopped after {taken} steps of {batch} samples, {depth} batches ahead", rows)


def loader_resumes() -> Receipt:
    """minillm's own loader, whose threads have run ahead when its state is saved."""
    state, due, resumed = experiments.resumed_batch(5, 8)
    return receipt(
        f"minillm.data.Loader, resumed from {state}",
        [
            row("position after 5 steps of 8", 40, state["position"]),
            row("the next batch is the one that was due", True, due == resumed),
        ],
        open_rows=1,
    )


def threads(encode: Callable, merges: Sequence) -> Table:
    """Cores that two threads keep busy: in pure Python, and in a function that releases the interpreter's lock."""
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    snippets = [piece.encode() for piece in bpe.split(sample_text())]
    block = np.random.default_rng(0).bytes(16 << 20)
    python = experiments.cores_busy(lambda k: [encode(piece, ranks) for piece in snippets], workers=2)
    hashed = experiments.cores_busy(lambda k: hashlib.sha256(block).digest(), workers=2)
    return table(
        "2 threads: CPU seconds per second",
        ("work", "cores in use"),
        [("your encode (pure Python)", f"{python:.2f}"), ("SHA-256 (releases the lock)", f"{hashed:.2f}")],
    )


def price() -> Table:
    """What sorting, packing and a large vocabulary cost."""
    lengths, curve, rows = experiments.lengths(), experiments.tokens_by_vocabulary(), []
    for name, by_length in (("random", False), ("sorted by length", True)):
        batches = [batch for batch in length_batches(lengths, 8, 0, by_length) if len(batch) == 8]
        totals = [sum(lengths[i] for i in batch) for batch in batches]
        rows.append((f"{name}, 8 files a batch: most tokens of a batch / fewest", f"{max(totals) / min(totals):,.0f}"))
    tokens, sizes = curve["tokens"], curve["vocab_size"]
    rows.append(("from 4,096 to 8,192: tokens", f"{tokens[-1] / tokens[-2] - 1:+.0%}"))
    rows.append(("from 4,096 to 8,192: parameters of embedding and head", f"{sizes[-1] / sizes[-2] - 1:+.0%}"))
    return table("the price", ("", "measured"), rows)


# In production.


def torch_sampler(plain: Sequence | None = None, fresh: Sequence | None = None) -> Receipt:
    """torch's DistributedSampler with 10 samples on 4 ranks. plain, fresh: without and with set_epoch."""
    plain = plain or launch(experiments.torch_loader, WORLD, SAMPLES, 2, False, device="cpu")
    fresh = fresh or launch(experiments.torch_loader, WORLD, SAMPLES, 2, True, device="cpu")
    shown = Counter(sample for one in plain for sample in one[0])
    again = predict.sampler_duplicates(SAMPLES, WORLD)
    return receipt(
        "DistributedSampler, 10 samples on 4 ranks",
        [
            row("samples shown twice in an epoch: N·ceil(D/N) - D", again, shown.total() - len(shown)),
            row("without set_epoch epoch 1 repeats the order", True, all(one[0] == one[1] for one in plain)),
            row("with set_epoch epoch 1 repeats the order", False, all(one[0] == one[1] for one in fresh)),
        ],
        open_rows=2,
    )


def fast_tokenizer() -> Receipt | str:
    """The committed tokenizer read by transformers, where that is installed."""
    try:
        from transformers import PreTrainedTokenizerFast
    except ImportError:
        return "transformers is not installed: pip install 'transformers>=5.18,<6' to compare"
    from minillm.data.tokenizer import COMMITTED

    text = experiments.held_out_text()
    ours, theirs = Tokenizer.load().encode(text), PreTrainedTokenizerFast(tokenizer_file=str(COMMITTED)).encode(text)
    return receipt("transformers' fast tokenizer on the held-out files", [row("the same ids", True, ours == theirs)])


# Numbers for answers.


def numbers() -> Table:
    """What the answers of the interview corner quote, computed."""
    seen = np.zeros(10_000_000, bool)
    for start in np.random.default_rng(0).integers(0, len(seen) - 100, 100_000):
        seen[start : start + 100] = True
    lengths = experiments.lengths()
    files = predict.padding_waste([[lengths[i] for i in batch] for batch in length_batches(lengths, 8, 0)])
    eaten = 0.4 * H100_BF16 / (6 * 7e9)
    text = experiments.held_out_text()
    length, unknown = len(text) / len(Tokenizer.load().encode(text)), word_baseline().unknown_share(text)
    rows = [
        ("1", "characters per token at 4,096; unknown share with 4,096 words", f"{length:.1f}; {unknown:.0%}"),
        ("3", "padding, even lengths, batches of 8 and of 32",
         " and ".join(f"{predict.uniform_padding_waste(b):.0%}" for b in (8, 32))),
        ("3", "padding, this corpus, random batches of 8", f"{files:.0%}"),
        ("4", "repeated: 1,000,003 samples on 64 ranks, 1,000 on 512",
         " and ".join(str(predict.sampler_duplicates(*each)) for each in ((1_000_003, 64), (1_000, 512)))),
        ("5", "of 10,000,000 tokens, 100,000 windows of 100 drawn: never seen", f"{1 - seen.mean():.1%}"),
        ("6", "load 50 ms, compute 20 ms: 1 and 3 workers",
         " and ".join(f"{predict.step_seconds(50, 20, True, workers):.0f} ms" for workers in (1, 3))),
        ("7", "7B on one H100 at 40 % of peak; as uint16", f"{eaten:,.0f} tokens/s; {2 * eaten / 1e3:.0f} kB/s"),
    ]  # fmt: skip
    return table("numbers for the answers", ("question", "", "computed"), rows)


def design() -> Table:
    """A: how fast a cluster reads. B: what padding costs."""
    rate, waste = 2048 * 0.4 * H100_BF16 / (6 * 70e9), predict.uniform_padding_waste(16)
    rows = [
        ("A", "tokens per second, all 2,048 GPUs", f"{rate:,.0f}"),
        ("A", "as uint32", f"{4 * rate / 1e6:.1f} MB/s"),
        ("A", "15 trillion tokens last", f"{15e12 / rate / 86400:.0f} days"),
        ("B", "share of the positions that is padding", f"{waste:.0%}"),
        ("B", "throughput with perfect packing", f"{1 / (1 - waste):.2f} times"),
    ]
    return table("design questions", ("question", "", "computed"), rows)


CLAIMS = (
    merged,
    lossless,
    more_merges,
    units_disagree,
    ngram_baseline,
    padding,
    packed,
    dealt,
    step_times,
    two_jobs,
    lost,
    loader_resumes,
    torch_sampler,
)
