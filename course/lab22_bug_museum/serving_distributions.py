"""Answers that are sampled, many of them, beside the distribution that they should have.

A vocabulary of five words, so that the distribution of two tokens is a table that five passes of the model fill, and
some hundred requests say whether the engine follows it.
"""

import random
from collections import Counter
from functools import cache, partial
from itertools import product

import torch

from course.kit.receipts import Row, row
from course.lab22_bug_museum.exhibit import Measurement
from course.lab22_bug_museum.serving_runs import Asked, Served, Traffic
from course.shared.measuring import one_thread
from course.shared.table import Table, table
from minillm.model import ModelConfig, Transformer
from minillm.serve import SamplingParams
from minillm.serve.speculate import DraftModel

WORDS = 5
CONFIG = ModelConfig(WORDS, 16, 32, 1, 2, 1, max_seq_len=64, init_std=0.4)
PROMPT = (1, 2, 3)
SAMPLED, GREEDY = 360, 4  # requests
LIMIT = 3.0  # of chi-square per degree of freedom; with 18 of them chance passes it once in some 50,000 runs
ENGINE = {"num_blocks": 1024, "max_num_seqs": 512, "token_budget": 4096, "k": 3}


@cache
def target() -> Transformer:
    return Transformer(CONFIG, seed=2)


@cache
def draft() -> Transformer:
    return Transformer(CONFIG, seed=3)


def drafts_of(model: Transformer) -> DraftModel:
    return DraftModel(model, num_blocks=4096, block_size=8)


def sampled(draw: random.Random) -> Traffic:
    """Requests that sample at temperature 1, each with its own seed, and some greedy ones."""
    seeds = [draw.randrange(2**31) for _ in range(SAMPLED)]
    asked = [Asked(PROMPT, SamplingParams(5, temperature=1.0, seed=seed)) for seed in seeds]
    asked += [Asked((*PROMPT, number % WORDS), SamplingParams(12)) for number in range(GREEDY)]
    return Traffic(tuple(asked), ENGINE, target(), lambda: drafts_of(draft()))


def of_two_tokens() -> dict[tuple[int, int], float]:
    """The target's probability of each pair of tokens after the prompt."""
    first = _after(target(), PROMPT)
    return {(a, b): first[a] * _after(target(), (*PROMPT, a))[b] for a, b in product(range(WORDS), repeat=2)}


def pairs(served: Served) -> Counter:
    return Counter(tuple(served.answers(number)[0][:2]) for number in range(SAMPLED) if served.outputs[number])


def chi_square(served: Served) -> float:
    """Of the pairs, per degree of freedom; cells that expect fewer than two are taken together."""
    found, count = pairs(served), SAMPLED
    cells, rest = [], [0.0, 0.0]
    for pair, probability in of_two_tokens().items():
        if probability * count < 2:
            rest = [rest[0] + probability * count, rest[1] + found[pair]]
        else:
            cells.append((probability * count, found[pair]))
    cells += [tuple(rest)] if rest[0] > 0 else []
    return sum((seen - expected) ** 2 / expected for expected, seen in cells) / (len(cells) - 1)


def follows(served: Served) -> Row:
    name = f"pairs of tokens follow the target's distribution (chi-square per degree below {LIMIT})"
    return row(name, True, chi_square(served) < LIMIT)


def first_tokens_follow(served: Served) -> Row:
    """The first token of an answer, which no draft precedes."""
    count, found = SAMPLED, Counter(pair[0] for pair in pairs(served).elements())
    cells = [(probability * count, found[token]) for token, probability in enumerate(_after(target(), PROMPT))]
    cells = [(expected, seen) for expected, seen in cells if expected >= 2]
    value = sum((seen - expected) ** 2 / expected for expected, seen in cells) / (len(cells) - 1)
    return row("first tokens follow the target's distribution (chi-square per degree below 6)", True, value < 6)


def greedy_wrong(served: Served) -> Row:
    return row("tokens of greedy answers that are not the naive loop's", 0, sum(served.wrong_of(range(*_GREEDY))))


def dashboard(served: Served) -> list[Row]:
    ended = sum(each is not None for each in served.ended)
    return [
        row("requests that got their answer", len(served.traffic.asked), ended),
        row("errors in outputs and records", 0, served.errors),
    ]


def acceptance(served: Served) -> float:
    """Draft tokens accepted, of those that were checked; sampled requests only."""
    outputs = [output for output in served.outputs[:SAMPLED] if output is not None]
    return sum(output.accepted for output in outputs) / max(1, sum(output.drafted for output in outputs))


def possible() -> float:
    """Share of first draft tokens that an exact rule can accept: the mean of Σ min(p, q)."""
    first = _after(target(), PROMPT)
    overlap = [sum(map(min, _after(target(), (*PROMPT, a)), _after(draft(), (*PROMPT, a)))) for a in range(WORDS)]
    return sum(p * each for p, each in zip(first, overlap, strict=True))


_GREEDY = (SAMPLED, SAMPLED + GREEDY)


@cache
def _after(model: Transformer, prompt: tuple[int, ...]) -> tuple[float, ...]:
    with one_thread(), torch.inference_mode():
        return tuple(model(torch.tensor([prompt]))[0, -1].double().softmax(-1).tolist())


def _firsts(served: Served) -> Table:
    found = Counter(pair[0] for pair in pairs(served).elements())
    rows = [
        (str(token), probability * SAMPLED, found[token]) for token, probability in enumerate(_after(target(), PROMPT))
    ]
    return table(f"first tokens of {SAMPLED} answers", ("token", "expected", "found"), rows)


def _pairs(served: Served) -> Table:
    found, expected = pairs(served), of_two_tokens()
    worst = sorted(expected, key=lambda pair: -abs(found[pair] - SAMPLED * expected[pair]))[:8]
    rows = [(f"{a} {b}", SAMPLED * expected[a, b], found[a, b]) for a, b in worst]
    rows.append(("chi-square per degree", 1.0, chi_square(served)))
    return table(f"first two tokens of {SAMPLED} answers, the largest differences", ("pair", "expected", "found"), rows)


def _acceptance(served: Served) -> Table:
    tried, kept = Counter(), Counter()
    for output in served.outputs[:SAMPLED]:
        if output is not None:
            tried["sampled"] += output.drafted
            kept["sampled"] += output.accepted
    for output in served.outputs[SAMPLED:]:
        if output is not None:
            tried["greedy"] += output.drafted
            kept["greedy"] += output.accepted
    rows = [(kind, tried[kind], kept[kind], kept[kind] / max(1, tried[kind])) for kind in tried]
    rows.append(("first draft token, at best by an exact rule", "", "", possible()))
    return table("draft tokens", ("requests", "checked", "accepted", "rate"), rows)


def _other_drafts(title: str, proposer) -> "Measurement.show":
    def show(served: Served) -> Table:
        traffic = served.traffic
        again = served.again(Traffic(traffic.asked, traffic.engine, traffic.model, proposer))
        texts = Counter(tuple(again.answers(number)[0]) for number in range(SAMPLED))
        rows = [
            ("draft tokens accepted", acceptance(served), acceptance(again)),
            ("chi-square of pairs, per degree", chi_square(served), chi_square(again)),
            ("different answers", _different(served), len(texts)),
        ]
        return table(title, ("", "as it was", "now"), rows)

    return show


def _different(served: Served) -> int:
    return len({tuple(served.answers(number)[0]) for number in range(SAMPLED)})


def _greedy(served: Served) -> Table:
    numbers = range(*_GREEDY)
    rows = [
        (str(number), len(served.right(number)[0]), wrong)
        for number, wrong in zip(numbers, served.wrong_of(numbers), strict=True)
    ]
    return table("greedy answers beside the naive loop's", ("request", "tokens", "differ"), rows)


FIRSTS = Measurement("first-tokens", 10, "the first token of every answer, counted", _firsts)
PAIRS = Measurement("pairs-of-tokens", 20, "the first two tokens of every answer, counted", _pairs)
GREEDY_ANSWERS = Measurement("greedy-answers", 10, "the greedy requests beside the naive loop", _greedy)
RATE = Measurement("acceptance", 5, "draft tokens that were accepted, and the most that can be", _acceptance)
NO_DRAFTS = Measurement(
    "without-drafts", 10, "the same requests without speculation", _other_drafts("without a proposer", None)
)
OWN_DRAFT = Measurement(
    "target-drafts", 10, "the target as its own draft model: p = q",
    _other_drafts("the target drafts for itself", partial(lambda: drafts_of(target()))),
)  # fmt: skip
USUAL = (GREEDY_ANSWERS, RATE, FIRSTS, PAIRS, NO_DRAFTS, OWN_DRAFT)
