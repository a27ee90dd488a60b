"""Proposers of their own weights in the engine: greedy tokens stay the naive loop's, draws stay a seed's."""

import pytest

from minillm.model.generate import generate
from minillm.serve import LLM, SamplingParams
from minillm.serve.speculate.proposers.eagle import Eagle
from minillm.serve.speculate.proposers.early_exit import EarlyExit
from minillm.serve.speculate.proposers.lookahead import Lookahead
from minillm.serve.speculate.proposers.medusa import Medusa
from minillm.serve.speculate.proposers.ngram import NGram

pytestmark = pytest.mark.drawn(2)

MAKE = {
    "medusa": lambda target, trained: Medusa(target, trained["medusa"]),
    "eagle": lambda target, trained: Eagle(target, trained["eagle"]),
    "early_exit": lambda target, trained: EarlyExit(target, trained["early_exit"]),
    "lookahead": lambda target, trained: Lookahead(3),
}
SHARED = [1, 2, 3, 4, 0, 0, 1, 2, 4]
PROMPTS = [SHARED + tail for tail in ([1], [2, 2], [], [3, 1, 0], [4])] + [[0], [3, 1]]


@pytest.mark.parametrize("kind", MAKE)
def test_greedy_tokens_are_the_naive_loops(kind, target, trained):
    """With shared prefixes (gaps in what is observed), pieces of prompts and preemptions."""
    proposer = MAKE[kind](target, trained)
    llm = LLM(target, proposer=proposer, k=3, block_size=4, num_blocks=22, chunk=5, token_budget=16, max_num_seqs=8)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert ids(output) == list(generate(target, prompt, 24))
    assert sum(output.hit for output in outputs) > 0 and sum(output.preemptions for output in outputs) > 0
    assert sum(output.drafted for output in outputs) > sum(output.accepted for output in outputs) > 0
    assert llm.pool.available == 22 and not kept(proposer)


@pytest.mark.parametrize("kind", MAKE)
def test_a_requests_draws_are_its_seeds_alone_and_in_a_crowd(kind, target, trained):
    params = [SamplingParams(max_tokens=20, temperature=0.9, top_p=0.9, seed=i) for i in range(len(PROMPTS))]
    llm = LLM(target, proposer=MAKE[kind](target, trained), k=2, block_size=4, prefix_cache=False)
    crowd = [output.answers[0].tokens for output in llm.generate(PROMPTS, params)]
    for prompt, wanted, tokens in list(zip(PROMPTS, params, crowd, strict=True))[:3]:
        llm = LLM(target, proposer=MAKE[kind](target, trained), k=2, block_size=4, prefix_cache=False)
        assert llm.generate([prompt], wanted)[0].answers[0].tokens == tokens


CROWDED = {
    "recompute": {"num_blocks": 22, "max_num_seqs": 8},
    "swap": {"num_blocks": 22, "max_num_seqs": 8, "preemption": "swap"},
    "small budget": {"token_budget": 8, "max_num_seqs": 8, "chunk": 3},
    "both": {"num_blocks": 22, "max_num_seqs": 8, "token_budget": 9},
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("k", "crowd"), [(3, "recompute"), (3, "swap"), ("adaptive", "both"), (3, "small budget")])
@pytest.mark.parametrize("kind", MAKE)
def test_draws_survive_preemption_and_budgets_that_cut_drafts(kind, k, crowd, target, trained):
    params = [SamplingParams(max_tokens=24, temperature=0.9, seed=i, ignore_eos=True) for i in range(len(PROMPTS))]
    common = {"k": k, "block_size": 4, "prefix_cache": False}
    llm = LLM(target, proposer=MAKE[kind](target, trained), **common, **CROWDED[crowd])
    outputs = llm.generate(PROMPTS, params)
    for prompt, wanted, output in zip(PROMPTS, params, outputs, strict=True):
        alone = LLM(target, proposer=MAKE[kind](target, trained), **common)
        assert ids(alone.generate([prompt], wanted)[0]) == ids(output)
    assert sum(output.preemptions for output in outputs) > 0 or crowd == "small budget"


@pytest.mark.parametrize("kind", sorted(MAKE.keys() - {"eagle"}))
def test_draws_survive_cached_prefixes_too(kind, target, trained):
    """Of all but EAGLE, whose features of a cached prefix are missing."""
    params = [SamplingParams(max_tokens=24, temperature=0.9, seed=i, ignore_eos=True) for i in range(len(PROMPTS))]
    llm = LLM(target, proposer=MAKE[kind](target, trained), k=3, block_size=4, **CROWDED["both"])
    outputs = llm.generate(PROMPTS, params)
    for prompt, wanted, output in zip(PROMPTS, params, outputs, strict=True):
        alone = LLM(target, proposer=MAKE[kind](target, trained), k=3, block_size=4, prefix_cache=False)
        assert ids(alone.generate([prompt], wanted)[0]) == ids(output)
    assert sum(output.hit for output in outputs) > 0 and sum(output.preemptions for output in outputs) > 0


def test_guesses_that_are_not_drawn_leave_the_draws_as_they_are(target):
    """Of n-grams and lookahead: the very tokens of an engine without speculation."""
    params = [SamplingParams(max_tokens=24, temperature=0.9, seed=i, ignore_eos=True) for i in range(len(PROMPTS))]
    plain = [ids(output) for output in LLM(target).generate(PROMPTS, params)]
    for proposer in (NGram(shortest=1), Lookahead(3)):
        outputs = LLM(target, proposer=proposer, k=3).generate(PROMPTS, params)
        assert [ids(output) for output in outputs] == plain
        assert sum(output.accepted for output in outputs) > 0


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_samples_of_one_prompt_go_on_after_the_fork(kind, target, trained):
    """A fork has no hidden state yet: its first draft is empty, the next ones are not."""
    proposer = MAKE[kind](target, trained)
    output = LLM(target, proposer=proposer, k=2).generate(
        [SHARED], SamplingParams(max_tokens=12, n=3, temperature=1.0)
    )[0]
    assert [len(answer.tokens) for answer in output.answers] == [12] * 3
    assert output.drafted > 12 and not kept(proposer)


def test_lookahead_saves_passes_where_the_target_repeats_itself(target):
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    output = LLM(target, proposer=Lookahead(3), k=3).generate([[1, 2]], params)[0]
    tokens = ids(output)
    assert tokens == list(generate(target, [1, 2], 50))
    assert output.passes + output.accepted == 49 and output.accepted > 5


def ids(output):
    return [token.id for token in output.answers[0].tokens]


def kept(proposer):
    names = ("_newest", "_memories", "_kept", "_traces")
    return [key for name in names for key in getattr(proposer, name, {})]


def test_lookahead_pools_the_diagonals(ask):
    """Worked by hand, n-grams of 3: an answer stands after its pass's guess, and that after the guess of a pass ago."""
    lookahead = Lookahead(3)
    lookahead.on_verified("a", [4, 5], [6, 7], [8, 9, 1])  # 8 comes after 5, 9 after 6, 1 after 7; nothing was right
    pool = {(5,): 8, (4, 5): 8, (6,): 9, (5, 6): 9, (7,): 1}  # there was no pass before, so nothing before 7
    assert lookahead._traces["a"].pool == pool
    lookahead.on_verified("a", [4, 5, 8], [9, 1], [9, 3, 2])  # what was answered became the guesses
    pool |= {(8,): 9, (5, 8): 9, (9,): 3, (8, 9): 3, (1,): 2, (7, 1): 2}  # 7 was read, 1 answered, 2 answered to it
    assert lookahead._traces["a"].pool == pool
    assert lookahead.propose([ask([4, 5, 8, 9], k=4)])[0].tokens == [3, 2, 8, 9]  # pool, iterate, any, pool


def test_lookahead_iterates_to_the_fixed_point(ask):
    """Jacobi: with each pass at least one more guess is the target's, here a chain where every next token is known."""
    step, truth, lookahead = {i: (3 * i + 1) % 7 for i in range(7)}, [1], Lookahead(2)
    while len(truth) < 5:
        truth.append(step[truth[-1]])
    guesses = lookahead.propose([ask([1], k=4)])[0].tokens
    for passes in range(1, 5):
        lookahead.on_verified("a", [1], guesses, [step[token] for token in [1, *guesses]])
        guesses = lookahead.propose([ask([1], k=4)])[0].tokens
        assert guesses[:passes] == truth[1 : 1 + passes]


def test_lookahead_can_read_the_prompt(ask):
    assert Lookahead(3, prompt=True).propose([ask([7, 8, 9, 1, 7, 8], k=3)])[0].tokens == [9, 1, 7]


def test_lookahead_refuses_an_ngram_of_nothing():
    with pytest.raises(ValueError, match="ngram 1 must be at least 2"):
        Lookahead(1)
