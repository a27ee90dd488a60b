"""Speculation inside the engine: the naive loop's tokens, answers that depend on nobody else, books, refusals."""

import re
from copy import deepcopy
from dataclasses import replace
from itertools import product

import pytest
import torch

from minillm.data import Tokenizer
from minillm.model import ModelConfig, Transformer
from minillm.model.generate import generate
from minillm.predict.serving.speculation import best_k
from minillm.serve import LLM, SamplingParams
from minillm.serve.speculate import AdaptiveK, Counts, Draft, DraftModel, DraftRequest, NGram

pytestmark = pytest.mark.drawn(2)

CONFIG = ModelConfig(61, 32, 64, 2, 4, 2, max_seq_len=64, init_std=0.2)
MODEL = Transformer(CONFIG, seed=2)
PROMPTS = [[(7 * i + j * j) % 61 for j in range(2 + 5 * i % 37)] for i in range(10)]


def near(model, size=0.03):
    """A draft that agrees now and then."""
    draft, noise = deepcopy(model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=noise))
    return draft


DRAFT = near(MODEL)


class Fixed:
    """Guesses read from a list: right ones up to `wrong_from`, then others."""

    wants_hidden = False

    def __init__(self, answers, wrong_from=99):
        self.answers, self.wrong_from, self.forgotten, self.asked = answers, wrong_from, [], []

    def propose(self, asked):
        self.asked += asked
        drafts = []
        for each in asked:
            prompt, answer = self.answers
            rest = answer[len(each.tokens) - len(prompt) :][: each.k]
            drafts.append(Draft([t if i < self.wrong_from else (t + 1) % 61 for i, t in enumerate(rest)]))
        return drafts

    def observe(self, key, start, hidden):
        raise AssertionError("not wanted")

    def forget(self, key):
        self.forgotten.append(key)


def naive(prompt, count, **options):
    return list(generate(MODEL, prompt, count, **options))


def nothing_left(llm):
    assert llm.pool.used == 0 and llm.pool.references == [0] * llm.pool.total
    if isinstance(llm.speculation.proposer, DraftModel):
        assert llm.speculation.proposer.pool.used == 0


TIGHT = {"block_size": 4, "num_blocks": 28, "reserve": 0, "token_budget": 40, "max_num_seqs": 24}
ENGINES = [{}, {"token_budget": 24, "max_num_seqs": 24}, TIGHT, {**TIGHT, "preemption": "swap", "chunk": 6}]


@pytest.mark.parametrize("k", [3, "adaptive"])
@pytest.mark.parametrize(
    "make", [lambda: DraftModel(DRAFT, block_size=4), lambda: NGram(shortest=1)], ids=["draft", "ngram"]
)
def test_greedy_tokens_are_those_of_the_naive_loop(make, k):
    expected = [naive(prompt, 12) for prompt in PROMPTS]
    for options in ENGINES:
        llm = LLM(MODEL, proposer=make(), k=k, **options)
        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=12))
        assert [output.answers[0].ids for output in outputs] == expected
        assert sum(output.accepted for output in outputs) > 0
        nothing_left(llm)


@pytest.mark.parametrize(
    "make", [lambda: DraftModel(DRAFT, block_size=4), lambda: NGram(shortest=1)], ids=["draft", "ngram"]
)
def test_drawn_answers_do_not_depend_on_what_else_runs(make):
    """Budgets that cut drafts short, preemption by both ways, forks: the same draws, the same tokens."""
    wanted = [SamplingParams(max_tokens=10, temperature=0.8, top_k=25, top_p=0.95, seed=i, n=2) for i in range(10)]
    alone = [LLM(MODEL, proposer=make()).generate([p], [w])[0] for p, w in zip(PROMPTS, wanted, strict=True)]
    preempted = 0
    for options in ENGINES:
        llm = LLM(MODEL, proposer=make(), **options)
        outputs = llm.generate(PROMPTS, wanted)
        preempted += sum(output.preemptions for output in outputs)
        for output, expected in zip(outputs, alone, strict=True):
            assert [answer.ids for answer in output.answers] == [answer.ids for answer in expected.answers]
        nothing_left(llm)
    assert preempted > 10


def test_a_perfect_draft_and_a_wrong_one_in_numbers():
    prompt, answer = PROMPTS[3], naive(PROMPTS[3], 16)
    right = LLM(MODEL, proposer=Fixed((prompt, answer)), k=4)
    [output] = right.generate([prompt], SamplingParams(max_tokens=16))
    assert output.answers[0].ids == answer
    assert (output.passes, output.drafted, output.accepted) == (3, 12, 12)  # 1 + 3 · (4 + 1) tokens
    assert right.speculation.counts.alpha == [1.0] * 4 and output.computed == len(prompt) + 15
    wrong = LLM(MODEL, proposer=Fixed((prompt, answer), wrong_from=0), k=4)
    [output] = wrong.generate([prompt], SamplingParams(max_tokens=16))
    assert output.answers[0].ids == answer and (output.passes, output.accepted) == (15, 0)
    half = LLM(MODEL, proposer=Fixed((prompt, answer), wrong_from=2), k=4)
    [output] = half.generate([prompt], SamplingParams(max_tokens=16))
    assert output.answers[0].ids == answer and output.passes == 5 and half.speculation.counts.alpha[:3] == [1, 1, 0]
    assert sum(record.sampled for record in half.records) == 16
    [plain] = LLM(MODEL).generate([prompt], SamplingParams(max_tokens=16))
    assert (plain.passes, plain.drafted, plain.accepted) == (15, 0, 0)


def test_rejected_guesses_give_their_blocks_back_and_are_never_hit():
    prompt, answer = PROMPTS[5][:9], naive(PROMPTS[5][:9], 20)
    llm = LLM(MODEL, proposer=Fixed((prompt, answer), wrong_from=0), k=8, block_size=2)
    llm.add(prompt, SamplingParams(max_tokens=20))
    while llm.unfinished:
        llm.step()
        for sequence in llm.scheduler.running:
            assert len(sequence.blocks) == llm.pool.blocks_for(sequence.num_computed)
    known = [*prompt, *answer]
    for prefix in llm.pool._cache:
        tokens, link = [], prefix
        while link.parent is not None:
            tokens, link = [*link.tokens, *tokens], link.parent
        assert tokens == known[: len(tokens)]
    assert llm.pool.cached == 14  # of 28 tokens that were computed, as without guesses
    [again] = llm.generate([known[:-1]], SamplingParams(max_tokens=1))
    assert again.answers[0].ids == naive(known[:-1], 1) and again.hit == 26


def test_guesses_take_what_is_left_and_delay_nobody():
    """Budget 8: two decoding tokens and a prompt's piece first."""
    prompt, answer = PROMPTS[2], naive(PROMPTS[2], 24)
    llm = LLM(MODEL, proposer=Fixed((prompt, answer)), k=6, token_budget=8, max_num_seqs=4, prefix_cache=False)
    llm.add(prompt, SamplingParams(max_tokens=24), request_id="a")
    while not llm.records or llm.records[-1].sampled < 7:
        llm.step()
    assert llm.records[-1].batch[0][2] == 7
    llm.add([1] * 20, SamplingParams(max_tokens=2), request_id="b")
    found = []
    for _ in range(3):
        llm.step()
        found.append([tokens for _, _, tokens in llm.records[-1].batch])
    assert found == [[1, 7], [1, 7], [2, 6]]
    while llm.unfinished:
        llm.step()


def test_stops_limits_and_the_context_cut_a_draft():
    prompt, answer = PROMPTS[4], naive(PROMPTS[4], 99)
    for params in (
        SamplingParams(max_tokens=7),
        SamplingParams(max_tokens=30, stop_tokens=[answer[6]]),
        SamplingParams(max_tokens=99),
        SamplingParams(max_tokens=1),
        SamplingParams(max_tokens=2),
    ):
        [plain] = LLM(MODEL).generate([prompt], params)
        for wrong_from in (0, 2, 99):
            llm = LLM(MODEL, proposer=Fixed((prompt, answer), wrong_from), k=5)
            [output] = llm.generate([prompt], params)
            assert output.answers == plain.answers
            nothing_left(llm)


def test_stop_strings_and_text():
    tokenizer = Tokenizer.load()
    model = Transformer(ModelConfig(tokenizer.vocab_size, 32, 64, 2, 4, 2, max_seq_len=64, init_std=0.2), seed=1)
    [free] = LLM(model, tokenizer=tokenizer).generate(["def hello"], SamplingParams(max_tokens=16, ignore_eos=True))
    middle = len(tokenizer.decode(free.answers[0].ids[:7]))
    params = SamplingParams(max_tokens=16, ignore_eos=True, stop=free.answers[0].text[middle - 1 : middle + 2])
    [plain] = LLM(model, tokenizer=tokenizer).generate(["def hello"], params)
    llm = LLM(model, tokenizer=tokenizer, proposer=DraftModel(near(model, 0.001)), k=6)
    [output] = llm.generate(["def hello"], params)
    assert output.answers == plain.answers and output.accepted > 2 and plain.answers[0].reason == "stop"


def test_penalty_and_logprobs_are_those_without_guesses():
    params = SamplingParams(max_tokens=20, repetition_penalty=1.3, logprobs=2)
    plain = LLM(MODEL).generate(PROMPTS, params)
    outputs = LLM(MODEL, proposer=DraftModel(DRAFT), k=3).generate(PROMPTS, params)
    assert sum(output.accepted for output in outputs) > 5
    for mine, theirs in zip(outputs, plain, strict=True):
        for a, b in zip(mine.answers[0].tokens, theirs.answers[0].tokens, strict=True):
            assert a.id == b.id and abs(a.logprob - b.logprob) < 1e-4 and [i for i, _ in a.top] == [i for i, _ in b.top]


def test_preempted_and_cancelled_sequences_are_forgotten():
    proposer = DraftModel(DRAFT, block_size=4)
    llm = LLM(MODEL, proposer=proposer, **TIGHT)
    names = [llm.add(prompt, SamplingParams(max_tokens=20)) for prompt in PROMPTS]
    while not any(record.preempted for record in llm.records):
        llm.step()
    out = llm.records[-1].preempted[0]
    assert out not in proposer._kept and proposer._kept
    for name in names:
        llm.cancel(name)
    llm.step()  # which carries the cancelling out
    assert proposer.pool.used == 0 and not proposer._kept
    nothing_left(llm)


def test_a_small_cache_of_the_draft_changes_no_guess():
    few, many = (DraftModel(DRAFT, block_size=4, num_blocks=blocks) for blocks in (16, 400))
    params = SamplingParams(max_tokens=12, temperature=0.9, seed=0)
    answers = [
        [output.answers[0].ids for output in LLM(MODEL, proposer=proposer).generate(PROMPTS, params)]
        for proposer in (few, many)
    ]
    assert answers[0] == answers[1] and few.passes > many.passes and few.pool.used == many.pool.used == 0


def test_the_draft_models_passes():
    """One a place, all sequences together, and none for what it has seen."""
    proposer = DraftModel(DRAFT)
    asked = [
        DraftRequest(i, list(prompt), SamplingParams(), 3, torch.Generator()) for i, prompt in enumerate(PROMPTS[1:])
    ]
    drafts = proposer.propose(asked)
    expected = [list(generate(DRAFT, prompt, 3)) for prompt in PROMPTS[1:]]
    assert [draft.tokens for draft in drafts] == expected and proposer.passes == 3
    longer = [replace(each, tokens=each.tokens + ids[:2] + [5]) for each, ids in zip(asked, expected, strict=True)]
    counted, forward = [], DRAFT.forward
    DRAFT.forward = lambda tokens, *args, **options: (
        counted.append(tokens.shape[1]) or forward(tokens, *args, **options)
    )
    try:
        again = proposer.propose(longer)
    finally:
        del DRAFT.forward
    assert counted == [9, 9, 9]  # the new token of each, then its guesses
    assert [draft.tokens for draft in again] == [list(generate(DRAFT, each.tokens, 3)) for each in longer]


def test_a_draft_with_a_shorter_context_stops_guessing():
    short = Transformer(replace(CONFIG, max_seq_len=32), seed=2)
    llm = LLM(MODEL, proposer=DraftModel(short), k=4)
    [output] = llm.generate([PROMPTS[4]], SamplingParams(max_tokens=99))
    assert output.answers[0].ids == naive(PROMPTS[4], 99)
    assert output.passes == pytest.approx(32 + (32 - len(PROMPTS[4])) / 5, abs=3)


def test_lookups_of_the_ngram():
    def guess(tokens, k=4, key="x", proposer=None):
        return (
            (proposer or NGram(3, 1))
            .propose([DraftRequest(key, tokens, SamplingParams(), k, torch.Generator())])[0]
            .tokens
        )

    assert guess([1, 2, 3, 4, 9, 2, 3]) == [4, 9, 2, 3]
    assert guess([1, 2, 7, 5, 2, 8, 1, 2]) == [7, 5, 2, 8]  # two tokens that match before one that is nearer
    assert guess([1, 2, 7, 1, 2, 8, 1, 2]) == [8, 1, 2, 8]  # the most recent of two; goes on with its own guesses
    assert guess([5, 5]) == [5, 5, 5, 5] and guess([1, 2, 3]) == [] and guess([1]) == []
    proposer, tokens, rng = NGram(3, 1), [], torch.Generator().manual_seed(0)
    for _ in range(60):
        tokens = tokens + torch.randint(4, (int(torch.randint(1, 4, (), generator=rng)),), generator=rng).tolist()
        assert guess(tokens, proposer=proposer) == guess(tokens, key="fresh")  # whether it grew or came at once
    proposer.forget("x")
    assert not proposer._indexes


def test_adaptive_k_follows_what_is_accepted():
    rule = AdaptiveK(cost=0.1, most=8)
    assert rule.k(4, 2.8, 0) == best_k(0.7, 0.1, 8)
    assert rule.k(1000, 990, 5) == 8 and rule.k(100, 2, 5) == 0 and rule.k(100, 2, 16) == 1
    ks = [rule.k(100, kept, 1) for kept in range(0, 101, 5)]
    assert ks == sorted(ks) and len(set(ks)) > 4
    assert AdaptiveK(cost=0.5).k(100, 60, 1) < AdaptiveK(cost=0.02).k(100, 60, 1)
    prompt, answer = PROMPTS[3], naive(PROMPTS[3], 40)
    for wrong_from, expected in ((99, 8), (0, 1)):
        proposer = Fixed((prompt, answer), wrong_from)
        LLM(MODEL, proposer=proposer, k=rule).generate([prompt], SamplingParams(max_tokens=40))
        ks = [each.k for each in proposer.asked]
        assert ks[0] == rule.k(4, 2.8, 0) and (max(ks) if wrong_from else ks[-1]) == expected
        assert wrong_from or len(ks) < 18  # it stopped asking, but for a probe


def test_counts_by_place():
    counts = Counts()
    counts.add(checked=4, accepted=2)
    counts.add(checked=2, accepted=2)
    counts.add(checked=2, accepted=0, first=2)  # the rest of a draft of four
    assert counts.tried == [2, 2, 2, 0][:3] and counts.kept == [2, 2, 0]
    assert counts.alpha == [1, 1, 0] and counts.accepted == 4 / 6 and Counts().accepted == 0


def test_logits_after_a_wrong_guess_do_not_matter_if_they_are_not_finite():
    prompt, answer = PROMPTS[3], naive(PROMPTS[3], 12)
    bad = next(token for token in range(61) if token not in prompt + answer)
    model = Transformer(CONFIG, seed=2)
    with torch.no_grad():
        model.embedding.weight[bad] = float("nan")

    class Poison(Fixed):
        def propose(self, asked):
            drafts = super().propose(asked)
            return [
                Draft([*d.tokens[:2], bad] if len(each.tokens) % 4 == 0 else d.tokens)
                for each, d in zip(asked, drafts, strict=True)
            ]

    llm = LLM(model, proposer=Poison((prompt, answer)), k=4)
    [output] = llm.generate([prompt], SamplingParams(max_tokens=12))
    assert output.accepted > 3 and output.answers[0].ids == answer and output.error is None


@pytest.mark.parametrize(
    ("guess", "message"),
    [
        (lambda each: Draft([1] * (each.k + 1)), "must be at most 4 ids below 61"),
        (lambda each: Draft([61]), "must be at most 4 ids below 61"),
        (lambda each: Draft([1, 2], torch.ones(1, 61)), r"shape \[1, 61\]: they must be \[2, 61\]"),
        (lambda each: 1 / 0, "the proposer's `propose` raised ZeroDivisionError"),
    ],
)
def test_a_proposer_that_is_wrong_costs_its_draft_and_nothing_else(guess, message):
    proposer = Fixed((PROMPTS[3], []))
    proposer.propose = lambda asked: [guess(each) if len(each.tokens) % 2 else Draft([]) for each in asked]
    llm = LLM(MODEL, proposer=proposer)
    [output] = llm.generate([PROMPTS[3]], SamplingParams(max_tokens=12))
    assert output.answers[0].ids == naive(PROMPTS[3], 12) and output.error is None and output.drafted == 0
    errors = [record.error for record in llm.records if record.error]
    assert len(errors) == 5 and re.search(message, errors[0])
    nothing_left(llm)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LLM(MODEL, proposer=NGram(), k=0), "k 0 guesses do not fit: use 1 to 62"),
        (lambda: LLM(MODEL, proposer=NGram(), k=-3), "k -3 guesses do not fit"),
        (lambda: LLM(MODEL, proposer=NGram(), k=63), "k 63 guesses do not fit: use 1 to 62"),
        (lambda: LLM(MODEL, proposer=NGram(), k="many"), "k 'many' must be a whole number, 'adaptive' or an AdaptiveK"),
        (lambda: LLM(MODEL, proposer=NGram(), k=2.5), "k 2.5 must be a whole number"),
        (lambda: LLM(MODEL, proposer=NGram(), k=True), "k True must be a whole number"),
        (
            lambda: LLM(MODEL, proposer=DraftModel(Transformer(replace(CONFIG, vocab_size=60)))),
            "the proposer has a vocabulary of 60 tokens and the target one of 61",
        ),
        (lambda: DraftModel(DRAFT, num_blocks=3), "num_blocks 3 is too few: one sequence"),
        (lambda: NGram(2, 3), "shortest 3 must be at least 1, longest 2"),
        (lambda: AdaptiveK(cost=-1), "cost -1 must be at least 0"),
        (lambda: AdaptiveK(most=0), "most 0 and probe 16"),
        (lambda: AdaptiveK(prior=2), "prior 2"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


def test_forks_and_copies_on_write_with_guesses():
    for seed, size in product(range(3), (2, 5, 16)):
        params = SamplingParams(max_tokens=12, n=3)
        llm = LLM(MODEL, proposer=DraftModel(DRAFT), block_size=size, num_blocks=96)
        [output] = llm.generate([PROMPTS[seed + 3]], params)
        assert [answer.ids for answer in output.answers] == [naive(PROMPTS[seed + 3], 12)] * 3
        nothing_left(llm)
