"""Lab 11, the data pipeline: byte pairs merged, windows packed, samples dealt to ranks, batches made ahead.

Tokens and windows are compared with the `tokenizers` library and with closed forms, on text drawn anew each time.
Dealing runs on real ranks, so that nothing hides in one process. Prefetching is judged by events (what was begun
before what was asked for), never by a stopwatch: `labkit/feeding.py`.
"""

import math
import queue
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from minillm.comm import launch
from minillm.data import bpe
from minillm.data.sampler import permutation
from minillm.labkit import feeding
from minillm.labkit.exercises import CheckFailed, exercise
from minillm.labkit.experiments import lab_11 as experiments
from minillm.labkit.receipts import Receipt, Row, receipt, row
from minillm.predict import data as predict

LAB = "11_data_pipeline"
Word = tuple[bytes, ...]
Pair = tuple[bytes, bytes]
Order = Callable[[int], np.ndarray]


# The course's own answers.


def merge_step(words: dict[Word, int], ids: dict[bytes, int]) -> tuple[Pair, dict[Word, int]]:
    """(the most frequent adjacent pair, the words with every occurrence of it glued); ties: smallest pair of ids."""
    counts: Counter[Pair] = Counter()
    for word, times in words.items():
        for pair in pairwise(word):
            counts[pair] += times
    best = min(counts, key=lambda pair: (-counts[pair], ids[pair[0]], ids[pair[1]]))
    return best, {_glue(word, best): times for word, times in words.items()}


def encode(piece: bytes, ranks: dict[Pair, int]) -> list[bytes]:
    """Tokens of a piece: of the adjacent pairs that were learnt, the one learnt first is glued, until none is left."""
    word: Word = tuple(bytes([byte]) for byte in piece)
    while known := [pair for pair in pairwise(word) if pair in ranks]:
        word = _glue(word, min(known, key=ranks.__getitem__))
    return list(word)


def _glue(word: Word, pair: Pair) -> Word:
    glued, at = [], 0
    while at < len(word):
        found = word[at : at + 2] == pair
        glued.append(b"".join(pair) if found else word[at])
        at += 2 if found else 1
    return tuple(glued)


def bits_per_byte(nats_per_token: float, tokens: int, text_bytes: int) -> float:
    """Loss in bits per byte of text."""
    return nats_per_token / math.log(2) * tokens / text_bytes


def windows(tokens: torch.Tensor, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """tokens: [count] -> (inputs, targets), each [n, seq_len]: every token but the first is a target once."""
    n = (len(tokens) - 1) // seq_len
    return tokens[: n * seq_len].view(n, seq_len), tokens[1 : n * seq_len + 1].view(n, seq_len)


def deal(position: int, order: Order, num_samples: int, batch_size: int, rank: int, world_size: int) -> list[int]:
    """This rank's samples of the step that begins at `position` of the endless stream of all epochs."""
    places = (position + rank + world_size * i for i in range(batch_size))
    return [int(order(place // num_samples)[place % num_samples]) for place in places]


def prefetch(make: Callable[[int], Any], total: int, depth: int) -> Iterator[Any]:
    """make(0), ..., make(total - 1) in order, made by a thread that runs about `depth` ahead and no further."""
    ready: queue.Queue = queue.Queue(maxsize=depth)

    def produce() -> None:
        for k in range(total):
            try:
                ready.put((make(k), None))
            except Exception as error:
                ready.put((None, error))
                return

    threading.Thread(target=produce, daemon=True).start()
    for _ in range(total):
        item, error = ready.get()
        if error is not None:
            raise error
        yield item


# Byte-pair encoding.


@exercise(
    "bpe-merge-step",
    reference=merge_step,
    minutes=15,
    difficulty=2,
    lab=LAB,
    hints=(
        "Count first, glue second. A word that occurs 50 times brings each of its pairs 50 times.",
        "pairwise(word) gives the adjacent pairs. The best has the largest count and, among equals, the smallest "
        "(ids[left], ids[right]): min over (-count, id, id). Glue from the left; a glued token is used up.",
        "best = min(counts, key=lambda p: (-counts[p], ids[p[0]], ids[p[1]])). Then walk over each word with an index: "
        "if word[at:at + 2] == best, append best[0] + best[1] and go on by 2, else append word[at] and go on by 1.",
    ),
)
def check_merge_step(learner: Callable) -> Receipt:
    for words, ids, lesson in _small_words():
        _judge_merge(learner, words, ids, lesson)
    text = _some_text(20_000)
    pieces = Counter(bpe.split(text))
    words = {tuple(bytes([byte]) for byte in piece.encode()): times for piece, times in pieces.items()}
    ids, found, steps = bpe.initial_vocabulary(), [], 40
    start = sum(len(word) * times for word, times in words.items())
    for _ in range(steps):
        pair, words = _judge_merge(learner, words, ids, "text of the standard library")
        found.append(pair)
        ids.setdefault(pair[0] + pair[1], len(ids))
    end = sum(len(word) * times for word, times in words.items())
    theirs = experiments.library_merges(text, 256 + steps)
    same = sum(ours == other for ours, other in zip(found, theirs, strict=False))
    return receipt(
        f"{steps} merges on {start:,} bytes of text",
        [
            row("merges equal to those of the tokenizers library", steps, same),
            row("bytes in the tokens afterwards", start, sum(len(b"".join(w)) * times for w, times in words.items())),
            row("tokens afterwards", None, end),
        ],
    )


def _small_words() -> Iterator[tuple[dict[Word, int], dict[bytes, int], str]]:
    """Words small enough to see the mistake, letters drawn anew."""
    a, b, c, d, e, f = (bytes([byte]) for byte in random.sample(range(ord("a"), ord("z") + 1), 6))
    ids = bpe.initial_vocabulary()
    yield {(a, b): 9, (c, d): 2, (c, d, e): 2, (f, c, d): 2}, ids, "how often a word occurs"
    yield {(a, b, c): 1, (d, e): 5, (d, e, f): 1}, ids, "the most frequent pair"
    yield {(a, b): 3, (c, d): 3, (e, f): 1}, ids, "equally frequent pairs"
    yield {(a, a, a): 2, (a, a, a, a, a): 1, (b, c): 1}, ids, "a letter in a row"
    yield {(a, b, c, a, b): 4, (c, a): 1}, ids, "a pair twice in a word"
    yield {(c + a, b): 2, (a, b): 7, (a, b + d): 2}, ids | {c + a: 256, b + d: 257}, "tokens of several bytes"


def _judge_merge(learner: Callable, words: dict[Word, int], ids: dict[bytes, int], lesson: str):
    right, after = merge_step(words, ids)
    result = learner(dict(words), dict(ids))
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        raise CheckFailed(f"you returned {type(result).__name__}; asked for are two things: (pair, words)")
    pair, found = result
    pair = tuple(pair)
    if pair != right:
        raise CheckFailed(f"{lesson}: you merged {_show(pair)}, but {_show(right)} is due{_why(pair, words)}")
    by_bytes = {b"".join(word): word for word in found}
    for before, word in zip(words, after, strict=True):
        mine = by_bytes.get(b"".join(word))
        if mine == word:
            if found[mine] != after[word]:
                raise CheckFailed(f"{lesson}: {_show(word)} occurs {after[word]} times, in your words {found[mine]}")
            continue
        if mine is None:
            odd = next((w for w in found if w not in after), ())
            raise CheckFailed(
                f"{lesson}: bytes were lost or doubled: {_show(before)} is now missing, and there is {_show(odd)}. "
                "A token that was glued is used up and cannot be glued again"
            )
        if right in pairwise(mine):
            raise CheckFailed(f"{lesson}: {_show(mine)} still holds {_show(right)}: glue every occurrence, from left")
        raise CheckFailed(
            f"{lesson}: {_show(before)} became {_show(mine)}, not {_show(word)}: only the tokens {_show(right)} "
            "side by side are that pair, not bytes that look like it"
        )
    return pair, found


def _why(pair: Pair, words: dict[Word, int]) -> str:
    counts, kinds = Counter(), Counter()
    for word, times in words.items():
        for each in pairwise(word):
            counts[each] += times
            kinds[each] += 1
    most = max(counts.values())
    if pair not in counts:
        return ": no word has yours"
    if counts[pair] == most:
        return ": equally frequent, but its pair of ids is smaller"
    if kinds[pair] == max(kinds.values()) and max(kinds.values()) > 1:
        return f": yours is in {kinds[pair]} different words, which occur {counts[pair]} times in all, the other {most}"
    first = next(each for word in words for each in pairwise(word))
    return (": the first pair is not the most frequent" if pair == first else "") + f" ({counts[pair]} against {most})"


@exercise(
    "bpe-encode",
    reference=encode,
    minutes=10,
    difficulty=2,
    lab=LAB,
    hints=(
        "New text has to be cut as the training text was: the merges happen in the order in which they were learnt.",
        "While some adjacent pair is in `ranks`: take the one with the smallest rank, wherever it stands, and glue it.",
        "while known := [pair for pair in pairwise(word) if pair in ranks]: best = min(known, key=ranks.get), "
        "then glue best in word as in the exercise before.",
    ),
)
def check_encode(learner: Callable) -> Receipt:
    a, b, c, d = (bytes([byte]) for byte in random.sample(range(ord("a"), ord("z") + 1), 4))
    for ranks, piece in (
        ({}, a + b),
        ({(b, c): 0, (a, b): 1}, a + b + c),
        ({(a, b): 0, (b, c): 1, (a + b, c): 2, (c, d): 3}, a + b + c + d),
        ({(c, d): 0, (a, b): 1, (a + b, c): 2}, a + b + c + d),
        ({(a, b): 0, (a + b, a + b): 1}, (a + b) * 4),
    ):
        _judge_encode(learner, piece, ranks)
    text, other = _some_text(20_000), _some_text(3_000)
    merges = experiments.library_merges(text, 256 + 120)
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    pieces = [piece.encode() for piece in bpe.split(other)]
    found = [token for piece in pieces for token in _judge_encode(learner, piece, ranks)]
    theirs = experiments.library_encode(merges, other)
    return receipt(
        f"{len(pieces)} pieces of text nobody trained on, {len(merges)} merges",
        [
            row("tokens, yours and the tokenizers library's", len(theirs), len(found)),
            row("the same tokens", True, found == theirs),
            row("bytes of the text come back", len(other.encode()), len(b"".join(found)), "B"),
        ],
    )


def _judge_encode(learner: Callable, piece: bytes, ranks: dict[Pair, int]) -> list[bytes]:
    found, right = learner(piece, dict(ranks)), encode(piece, ranks)
    if not isinstance(found, (list, tuple)):
        raise CheckFailed(f"you returned {type(found).__name__}; asked for is a list of tokens, each a bytes object")
    found = list(found)
    if found == right:
        return found
    got = f"{piece!r} became {_show(found)}, not {_show(right)}"
    if b"".join(found) != piece:
        raise CheckFailed(f"{got}: the tokens do not join to the text")
    if left := [pair for pair in pairwise(found) if pair in ranks]:
        raise CheckFailed(f"{got}: {_show(left[0])} was learnt and still stands side by side: go on until none is left")
    singles = [bytes([byte]) for byte in piece]
    first = min((pair for pair in pairwise(singles) if pair in ranks), key=ranks.__getitem__)
    raise CheckFailed(
        f"{got}: of all learnt pairs the one learnt first (lowest rank) is glued first, wherever it stands; "
        f"here that is {_show(first)}, rank {ranks[first]}"
    )


@exercise(
    "bits-per-byte",
    reference=bits_per_byte,
    minutes=3,
    difficulty=1,
    lab=LAB,
    hints=(
        "How many nats does the whole text cost? How many bits is that, and over how many bytes do they spread?",
        "nats_per_token · tokens are the nats of the whole text. A bit is ln 2 nats.",
        "return nats_per_token * tokens / math.log(2) / text_bytes",
    ),
)
def check_bits_per_byte(learner: Callable) -> list[Row]:
    rows = []
    for name in ("long tokens", "single bytes"):
        text_bytes = random.randint(2_000, 9_000)
        tokens = text_bytes if name == "single bytes" else random.randint(text_bytes // 4, text_bytes // 2)
        chances = np.random.default_rng(random.getrandbits(32)).uniform(0.001, 0.9, tokens)
        nats, right = float(-np.log(chances).mean()), float(-np.log2(chances).sum() / text_bytes)
        found = learner(nats, tokens, text_bytes)
        if isinstance(found, bool) or not isinstance(found, (int, float)):
            raise CheckFailed(f"you returned {found!r}; asked for is one number, bits per byte")
        rows.append(row(f"{name}: -Σ log2 p / bytes", right, found, "bit/B", tolerance=1e-9))
        if rows[-1].verdict == "ok":
            continue
        known = {
            nats * tokens / text_bytes: "that is nats per byte: a bit is ln 2 nats, so divide by ln 2",
            nats / math.log(2): "that is bits per token: a token is several bytes",
            nats / math.log(2) * text_bytes / tokens: "upside down: more bytes per token mean fewer bits for each",
            nats * math.log(2) * tokens / text_bytes: "multiplied by ln 2: a nat is 1.44 bits, so divide",
            math.exp(nats): "that is the perplexity",
        }
        said = next((said for wrong, said in known.items() if math.isclose(found, wrong, rel_tol=1e-9)), "see the row")
        raise CheckFailed(f"{name}: you found {found:.4f}, but it is {right:.4f}: {said}", rows)
    return rows


# Windows.


@exercise(
    "pack-windows",
    reference=windows,
    minutes=10,
    difficulty=2,
    lab=LAB,
    hints=(
        "Window i starts at token i · seq_len. Its inputs are seq_len tokens, its targets the same moved on by one.",
        "The last target of a window is the first input of the next: windows share one token. So T tokens hold "
        "(T - 1) // seq_len windows.",
        "n = (len(tokens) - 1) // seq_len; return tokens[: n * seq_len].view(n, seq_len), "
        "tokens[1 : n * seq_len + 1].view(n, seq_len)",
    ),
)
def check_windows(learner: Callable) -> Receipt:
    rows = []
    for seq_len, n, rest in ((random.randint(3, 6), random.randint(3, 6), 1), (4, 3, 4), (random.randint(7, 16), 9, 5)):
        count = seq_len * n + rest
        tokens = torch.arange(count) + 1000
        found = learner(tokens.clone(), seq_len)
        _judge_windows(found, count, seq_len)
        targets = found[1].flatten().tolist()
        rows += [
            row(f"{count} tokens, seq_len {seq_len}: windows", (count - 1) // seq_len, len(found[0])),
            row("    targets, each once", (count - 1) // seq_len * seq_len, len(set(targets))),
            row("    waste", predict.packing_waste(count, seq_len), 1 - len(targets) / count, tolerance=1e-9),
        ]
    return receipt("packing", rows)


def _judge_windows(found: Any, count: int, seq_len: int) -> None:
    who, n = f"{count} tokens with seq_len {seq_len}", (count - 1) // seq_len
    if not (isinstance(found, (tuple, list)) and len(found) == 2 and all(torch.is_tensor(x) for x in found)):
        raise CheckFailed(f"{who}: asked for are two tensors, (inputs, targets)")
    inputs, targets = found
    if inputs.shape != targets.shape or inputs.dim() != 2 or inputs.shape[1] != seq_len:
        raise CheckFailed(
            f"{who}: inputs are {list(inputs.shape)}, targets {list(targets.shape)}; both must be [n, {seq_len}]"
        )
    if inputs.numel() and torch.equal(inputs, targets):
        raise CheckFailed(f"{who}: targets equal inputs: a target is the token after its input, one place on")
    if foreign := set(targets.flatten().tolist()) - set(range(1000, 1000 + count)):
        raise CheckFailed(f"{who}: a target is {foreign.pop()}, which is no token of the text: packing needs no fill")
    seen = Counter((targets - 1000).flatten().tolist())
    if repeated := [place for place, times in seen.items() if times > 1]:
        raise CheckFailed(
            f"{who}: token {min(repeated)} is a target {seen[min(repeated)]} times: windows overlap by one token only"
        )
    if missing := [place for place in range(1, n * seq_len + 1) if place not in seen]:
        whole = missing == list(range((n - 1) * seq_len + 1, n * seq_len + 1))
        why = (
            "the last window is missing, although its tokens are all there"
            if whole
            else f"token {missing[0]} is never a target: the last target of a window is the next one's first input"
        )
        raise CheckFailed(f"{who}: {why}")
    if not torch.equal(targets, inputs + 1):
        raise CheckFailed(f"{who}: a target must be the token right after its input")


# Samples for ranks.


@exercise(
    "deal-samples",
    reference=deal,
    minutes=15,
    difficulty=3,
    lab=LAB,
    hints=(
        "Write all epochs one after the other: a stream without end. All ranks together take the next "
        "world_size · batch_size of it. Which places are yours?",
        "Place p of the stream is sample order(p // num_samples)[p % num_samples]. Deal like cards: rank r takes the "
        "places position + r, position + r + world_size, ... A step may reach into the next epoch.",
        "places = [position + rank + world_size * i for i in range(batch_size)]; "
        "return [int(order(p // num_samples)[p % num_samples]) for p in places]",
    ),
)
def check_deal(learner: Callable) -> Receipt:
    num_samples, seed = random.choice([29, 31, 37]), random.randrange(1000)
    legs = [(4, 3, 4), (3, 3, 4), (2, 5, 6)]  # ranks, batch size, steps: 48, then 36, then 60 samples
    ranks = launch(feeding.deal_on_ranks, 4, learner, num_samples, seed, legs, device="cpu")
    dealt, messages = [found for found, _ in ranks], sum(sent for _, sent in ranks)
    order, position, seen = partial(permutation, num_samples, seed), 0, Counter()
    for leg, (world, batch_size, steps) in enumerate(legs):
        for step in range(steps):
            shares = [dealt[rank][leg][step] for rank in range(world)]
            feeding.judge_step(shares, position, num_samples, batch_size, order, resumed=leg > 0 and step == 0)
            seen.update(sample for share in shares for sample in share)
            position += world * batch_size
    return receipt(
        f"{num_samples} samples, {position} dealt: on 4 ranks, resumed on 3, resumed on 2",
        [
            row("times the rarest sample was shown", position // num_samples, min(seen.values())),
            row("times the most frequent was", -(-position // num_samples), max(seen.values())),
            row("different samples", num_samples, len(seen)),
            row("messages between the ranks", 0, messages),
        ],
    )


@exercise(
    "prefetch",
    reference=prefetch,
    minutes=20,
    difficulty=3,
    lab=LAB,
    hints=(
        "A thread makes batches and puts them into a queue, you take them out. What stops it from filling your memory?",
        "queue.Queue(maxsize=depth): put waits while it is full. One thread keeps the order. An exception inside the "
        "thread reaches nobody by itself: put it into the queue, too, and raise it where the batch was due.",
        "def produce(): for k in range(total): try: ready.put((make(k), None)); except Exception as error: "
        "ready.put((None, error)); return. Start it as a daemon thread; then total times: item, error = ready.get(); "
        "raise the error or yield the item.",
    ),
)
def check_prefetch(learner: Callable) -> Receipt:
    return receipt("prefetching, by events", [*feeding.judge_overlap(learner), *feeding.judge_failure(learner)])


def _some_text(characters: int) -> str:
    """A random stretch of the held-out standard library, ASCII only (beyond it, cuts of other libraries differ)."""
    text = experiments.held_out_text().encode("ascii", "ignore").decode()
    start = random.randrange(len(text) - characters)
    return text[start : start + characters]


def _show(tokens: Sequence[bytes]) -> str:
    return "[" + " ".join(token.decode("utf-8", "backslashreplace") for token in tokens) + "]"
