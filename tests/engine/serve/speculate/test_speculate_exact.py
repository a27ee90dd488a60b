"""Exact enumeration on tiny vocabularies: what comes out is distributed as the target says, to 1e-6, always."""

from collections import Counter
from itertools import product

import pytest
import torch

from course.shared.enumeration import Script, outcomes
from course.shared.faults.verification import first_unverified, reseeded
from minillm.serve import SamplingParams
from minillm.serve.speculate import Draft, DraftModel, DraftRequest, verify
from minillm.serve.speculate.verify import acceptance, choose, distribution, residual, uniform, verify_greedy

VOCAB = 4
WARPINGS = [
    {"temperature": 0.0},
    {"temperature": 0.5},
    {"temperature": 1.0},
    {"temperature": 1.7},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 0.8, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 1.3, "top_k": 3, "top_p": 0.8},
    {"temperature": 0.9, "min_p": 0.3},
    {"temperature": 1.0, "repetition_penalty": 1.6},
]


class Table:
    """A language model over VOCAB tokens: logits that depend on the two last tokens, drawn once."""

    def __init__(self, seed, scale=1.5):
        generator = torch.Generator().manual_seed(seed)
        self.logits = scale * torch.randn(VOCAB, VOCAB, VOCAB, generator=generator, dtype=torch.float64)

        self.known = {}

    def __call__(self, tokens, params):
        key = (*tokens, params)
        if key not in self.known:
            self.known[key] = distribution(self.logits[tokens[-2], tokens[-1]], params, tokens)
        return self.known[key]


TARGET, DRAFT = Table(0), Table(1)
PROMPT = [1, 2]


def drawn(params, k, draw):
    tokens, rows = [], []
    for _ in range(k):
        rows.append(DRAFT(PROMPT + tokens, params))
        tokens.append(choose(rows[-1], draw))
    return Draft(tokens, torch.stack(rows))


def fixed(params, k, draw):
    return Draft([3, 0, 2][:k])


def rows_after(params, draft):
    return torch.stack([TARGET(PROMPT + draft.tokens[:i], params) for i in range(len(draft.tokens) + 1)])


def true_distribution(params, length):
    """{tokens: probability} of `length` tokens from the target alone."""
    found = {}
    for tokens in product(range(VOCAB), repeat=length):
        probability = 1.0
        for place, token in enumerate(tokens):
            probability *= float(TARGET([*PROMPT, *tokens[:place]], params)[token])
        if probability:
            found[tokens] = probability
    return found


def produced(checker, proposer, params, k):
    """The distribution of the first k + 1 tokens: what a pass does not yield is drawn from the target."""

    def run(draw):
        draft = proposer(params, k, draw)
        tokens = checker(rows_after(params, draft), draft, draw)
        while len(tokens) < k + 1:
            tokens = [*tokens, choose(TARGET(PROMPT + tokens, params), draw)]
        return tuple(tokens)

    return outcomes(run)


def distance(found, expected):
    """Total variation."""
    return sum(abs(found.get(each, 0) - expected.get(each, 0)) for each in found.keys() | expected.keys()) / 2


@pytest.mark.parametrize("proposer", [drawn, fixed])
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("warping", WARPINGS, ids=str)
def test_the_output_is_distributed_as_the_target(proposer, k, warping):
    params = SamplingParams(**warping)
    found, expected = produced(verify, proposer, params, k), true_distribution(params, k + 1)
    assert abs(sum(found.values()) - 1) < 1e-9 and found.keys() <= expected.keys()
    assert max(abs(found.get(each, 0) - expected[each]) for each in expected) < 1e-6


@pytest.mark.parametrize("proposer", [drawn, fixed])
def test_checked_in_pieces_the_same_numbers_give_the_same_tokens(proposer):
    """A pass that has room for fewer guesses; the rest is checked later."""
    params = SamplingParams(temperature=1.0)
    for seed, rows in product(range(40), range(1, 4)):
        whole, pieces = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed)
        draft = proposer(params, 3, whole)
        expected = verify(rows_after(params, draft), draft, whole)
        rest, tokens = proposer(params, 3, pieces), []
        target = rows_after(params, rest)
        while True:
            fewer = target[len(tokens) : len(tokens) + rows]
            got = verify(fewer, rest, pieces)
            tokens += got
            if got != rest.tokens[: len(fewer)]:
                break
            left = None if rest.probabilities is None else rest.probabilities[len(got) :]
            rest = Draft(rest.tokens[len(got) :], left)
        assert tokens == expected


def test_greedy_is_the_same_rule():
    params = SamplingParams(temperature=0)
    for guesses in product(range(VOCAB), repeat=3):
        draft = Draft(list(guesses))
        target = rows_after(params, draft)
        [(tokens, probability)] = outcomes(lambda draw, d=draft, t=target: tuple(verify(t, d, draw))).items()
        assert probability == 1 and list(tokens) == verify_greedy(target.argmax(-1).tolist(), draft)
        for rows in (1, 2, 3):
            assert verify_greedy(target.argmax(-1).tolist()[:rows], draft) == list(tokens[:rows])


def test_accepted_share_is_the_overlap():
    params = SamplingParams(temperature=1)
    p, q = TARGET(PROMPT, params), DRAFT(PROMPT, params)
    accepted = sum(float(q[x]) * acceptance(p, q, x) for x in range(VOCAB))
    assert abs(accepted - float(torch.minimum(p, q).sum())) < 1e-12
    assert acceptance(p, None, 2) == float(p[2]) and float(residual(p, None, 2)[2]) == 0
    assert torch.equal(residual(p, p, 0), p)  # by rounding only: nothing is left to draw from


# What others got wrong. Each is `verify` with one difference.


def greedy_as_sampled(target, draft, draw):
    """The draft took the likeliest token, the check divides by its probability as if it had drawn it."""
    return verify(target, draft, draw)


def likeliest_with_probabilities(params, k, draw):
    tokens, rows = [], []
    for _ in range(k):
        rows.append(DRAFT(PROMPT + tokens, params))
        tokens.append(int(rows[-1].argmax()))
    return Draft(tokens, torch.stack(rows))


def before_top_k(params, k, draw):
    draft = drawn(params, k, draw)
    free = SamplingParams(temperature=params.temperature)
    return Draft(draft.tokens, torch.stack([DRAFT(PROMPT + draft.tokens[:i], free) for i in range(k)]))


def drawn_but_q_is_one(params, k, draw):
    return Draft(drawn(params, k, draw).tokens)


@pytest.mark.parametrize(
    ("checker", "proposer"),
    [
        (greedy_as_sampled, likeliest_with_probabilities),
        (verify, before_top_k),
        (first_unverified, drawn),
        (reseeded, drawn),
    ],
    ids=["greedy as sampled", "before top-k", "first unchecked", "re-seeded"],
)
def test_wrong_ones_are_seen(checker, proposer):
    params = SamplingParams(temperature=1.0, top_k=2)
    assert distance(produced(checker, proposer, params, 2), true_distribution(params, 3)) > 0.01


def test_a_drawn_guess_checked_as_if_it_were_certain_is_lossless_and_accepted_less():
    params = SamplingParams(temperature=1.0)
    found = produced(verify, drawn_but_q_is_one, params, 2)
    assert distance(found, true_distribution(params, 3)) < 1e-9
    p, q = TARGET(PROMPT, params), DRAFT(PROMPT, params)
    assert float((p * q).sum()) < float(torch.minimum(p, q).sum()) - 0.05


def test_the_draw_of_a_generator_follows_what_the_script_assumes():
    generator, p = torch.Generator().manual_seed(1), torch.tensor([0.1, 0.0, 0.6, 0.3])
    numbers = [uniform(generator) for _ in range(4000)]
    assert 0 <= min(numbers) < 0.01 and 0.99 < max(numbers) < 1 and abs(sum(numbers) / 4000 - 0.5) < 0.02
    counts = Counter(choose(p, generator) for _ in range(4000))
    assert all(abs(counts[token] / 4000 - float(p[token])) < 0.03 for token in range(4)) and not counts[1]


def test_the_script_knows_a_number_that_is_compared_twice():
    def run(draw):
        number = uniform(draw)
        return (number < 0.5, number < 0.25, uniform(draw) >= 0.75)

    found = outcomes(run)
    assert found == {
        (True, True, True): 0.0625,
        (True, True, False): 0.1875,
        (True, False, True): 0.0625,
        (True, False, False): 0.1875,
        (False, False, True): 0.125,
        (False, False, False): 0.375,
    }
    same = outcomes(lambda draw: (uniform(draw.manual_seed(3)) < 0.3, uniform(draw.manual_seed(3)) < 0.3))
    assert same == {(True, True): 0.3, (False, False): 0.7}


@torch.no_grad()
@pytest.mark.parametrize(
    "warping", [{"temperature": 0.8}, {"temperature": 1.0, "top_k": 3}, {"temperature": 0.0}], ids=str
)
def test_the_draft_model_says_what_it_drew_from(warping):
    """All that the proposer and the verifier can do together, enumerated: two real (tiny) models."""
    from minillm.model import ModelConfig, Transformer

    config = ModelConfig(4, 8, 16, 1, 2, 1, max_seq_len=16, init_std=0.6)
    target, draft = (Transformer(config, seed=seed).double() for seed in (0, 1))
    params, prompt, k = SamplingParams(**warping), [1, 2, 3], 2
    proposer = DraftModel(draft, block_size=2)

    def after(model, tokens):
        return distribution(model(torch.tensor([tokens]))[0, -1].float().double(), params, tokens)

    cached = {}

    def p_after(tokens):
        if (key := tuple(tokens)) not in cached:
            cached[key] = after(target, tokens)
        return cached[key]

    def run(draw: Script):
        [guess] = proposer.propose([DraftRequest("x", prompt, params, k, draw)])
        for place in range(k) if guess.probabilities is not None else ():
            expected = after(draft, prompt + guess.tokens[:place])
            torch.testing.assert_close(guess.probabilities[place].double(), expected, atol=1e-5, rtol=0)
        rows = torch.stack([p_after(prompt + guess.tokens[:place]) for place in range(k + 1)])
        tokens = verify(rows, guess, draw)
        while len(tokens) < k + 1:
            tokens = [*tokens, choose(p_after(prompt + tokens), draw)]
        return tuple(tokens)

    found = outcomes(run)
    for tokens in product(range(VOCAB), repeat=k + 1):
        probability = 1.0
        for place, token in enumerate(tokens):
            probability *= float(p_after([*prompt, *tokens[:place]])[token])
        assert abs(found.get(tokens, 0.0) - probability) < 1e-6
