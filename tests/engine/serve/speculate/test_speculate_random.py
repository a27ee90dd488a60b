"""Random steps: accepted and rejected guesses, preemption, cancelling, forks, hits, draws, on a pool that is too small.

After every step the books balance; now and then every block that others could hit is computed again and compared; every
answer is the naive loop's (greedy) or the one the request gets when it is alone (drawn). Some hundred steps by default,
10,000 with MINILLM_PROOF=all.
"""

import os
import random
from dataclasses import dataclass

import pytest
import torch

from minillm.model import ModelConfig, Transformer
from minillm.model.generate import KVCache, generate
from minillm.serve import LLM, SamplingParams, State
from minillm.serve.speculate import Draft
from minillm.serve.speculate.verify import choose

CONFIG = ModelConfig(31, 16, 32, 2, 4, 2, max_seq_len=40, init_std=0.3)
MODEL = Transformer(CONFIG, seed=2)
STEPS = 10_000 if os.environ.get("MINILLM_PROOF") == "all" else 300


@dataclass
class Kind:
    """A request that comes again and again; right: what the naive loop answers; answers: what each sample has to be."""

    prompt: list[int]
    params: SamplingParams
    right: list[int]
    answers: list[list[int]]


class Moody:
    """Guesses that are right, wrong, too few or drawn from anything: a function of the request and of its tokens."""

    wants_hidden = True

    def __init__(self, kinds):
        self.kinds, self.known, self.observed = kinds, set(), {}

    def propose(self, asked):
        return [self.guess(each) for each in asked]

    def guess(self, each):
        self.known.add(each.key)
        kind = self.kinds[int(each.key.split(".")[0])]
        rng = random.Random(len(each.tokens) * 1009 + len(kind.prompt))
        if each.params.temperature > 0 and rng.random() < 0.5:
            noise = torch.Generator().manual_seed(len(each.tokens))
            q = torch.softmax(2 * torch.randn(CONFIG.vocab_size, generator=noise), -1)
            tokens = [choose(q, each.draw) for _ in range(each.k)]
            return Draft(tokens, q.expand(each.k, -1))
        right = kind.right[len(each.tokens) - len(kind.prompt) :]
        tokens = [t if rng.random() < 0.8 else rng.randrange(CONFIG.vocab_size) for t in right[: each.k]]
        return Draft(tokens[: rng.choice([each.k, each.k, 1, 0])])

    def observe(self, key, start, hidden):
        """Each position once, in order: rejected ones never."""
        assert len(hidden) > 0 and hidden.shape[1] == CONFIG.hidden_size
        assert start >= self.observed.get(key, 0)
        self.observed[key] = start + len(hidden)

    def forget(self, key):
        self.known.discard(key)
        self.observed.pop(key, None)


def kinds_of(rng):
    prefix = [rng.randrange(CONFIG.vocab_size) for _ in range(20)]
    kinds = []
    for number in range(24):
        own = [rng.randrange(CONFIG.vocab_size) for _ in range(rng.randrange(1, 8))]
        prompt = prefix[: rng.choice([0, 8, 20])] + own
        drawn = {"temperature": 0.9, "top_k": 12, "seed": number} if number % 3 == 0 else {}
        stops = [rng.randrange(CONFIG.vocab_size)] if number % 4 == 1 else []
        params = SamplingParams(max_tokens=rng.randrange(2, 16), n=1 + number % 2, stop_tokens=stops, **drawn)
        right = list(generate(MODEL, prompt, params.max_tokens))
        until = next((place for place, token in enumerate(right) if token in stops), None)
        kinds.append(Kind(prompt, params, right, [right[:until]] * params.n))
    for number, kind in enumerate(kinds):
        if kind.params.temperature > 0:
            alone = engine(kinds)
            alone.add(kind.prompt, kind.params, request_id=f"{number}.")
            [output] = [output for _ in range(20) for output in alone.step()]
            kind.answers = [answer.ids for answer in output.answers]
    return kinds


def engine(kinds, **options):
    return LLM(MODEL, block_size=4, proposer=Moody(kinds), k=4, **options)


@torch.no_grad()
def check_contents(llm):
    """Every block that a hit could find holds the keys and values of its tokens."""
    for prefix, block in llm.pool._cache.items():
        tokens, link = [], prefix
        while link.parent is not None:
            tokens, link = [*link.tokens, *tokens], link.parent
        cache = KVCache(CONFIG, len(tokens))
        MODEL(torch.tensor([tokens]), torch.arange(len(tokens)), attention=cache)
        for kept, computed in zip(llm.cache.pool[:, :, block], (cache.keys, cache.values), strict=True):
            torch.testing.assert_close(kept, computed[:, 0, :, -4:].transpose(1, 2), atol=1e-4, rtol=1e-4)


def check_books(llm):
    pool, running = llm.pool, llm.scheduler.running
    assert pool.free + pool.cached + pool.used == pool.total
    held = [block for sequence in running for block in sequence.blocks]
    assert sum(pool.references) == len(held) and len(set(held)) == pool.used
    for sequence in running:
        assert sequence.state is State.RUNNING and sequence.num_computed < sequence.num_tokens
        amid = pool.blocks_for(sequence.num_tokens)
        assert pool.blocks_for(sequence.num_computed) <= len(sequence.blocks) <= amid


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_random_steps_lose_nothing_and_change_nothing(preemption):
    rng = random.Random(7)
    kinds = kinds_of(rng)
    options = {"num_blocks": 18, "max_num_seqs": 8, "token_budget": 24, "reserve": 0, "preemption": preemption}
    llm = engine(kinds, chunk=9, **options)
    live, ended, cancelled, totals = [], 0, 0, [0, 0, 0, 0]
    for step in range(STEPS // 2):
        while len(live) < 10:
            number = rng.randrange(len(kinds))
            priority = rng.randrange(-1, 2)
            live.append(
                llm.add(
                    kinds[number].prompt,
                    kinds[number].params,
                    request_id=f"{number}.{step}.{len(live)}.{ended}",
                    priority=priority,
                )
            )
        if rng.random() < 0.05:
            llm.cancel(rng.choice(live))
        for output in llm.step():
            live.remove(output.request_id)
            ended += 1
            kind = kinds[int(output.request_id.split(".")[0])]
            assert output.error is None
            for answer, ids in zip(output.answers, kind.answers, strict=False):
                if answer.reason == "cancelled":
                    assert answer.ids == ids[: len(answer.ids)]
                    cancelled += 1
                else:
                    assert answer.ids == ids
            for i, name in enumerate(("drafted", "accepted", "preemptions", "hit")):
                totals[i] += getattr(output, name)
        check_books(llm)
        if step % 100 == 99:
            check_contents(llm)
    check_contents(llm)
    for name in live:
        llm.cancel(name)
    llm.step()
    pool, proposer = llm.pool, llm.speculation.proposer
    assert pool.used == 0 and pool.references == [0] * pool.total and pool.free_host == pool.num_host_blocks
    assert not llm.requests.live and not proposer.known and not proposer.observed
    drafted, accepted, preemptions, hit = totals
    assert ended > STEPS // 8 and cancelled and preemptions > STEPS // 20 and hit and llm.pool.copied
    assert 0.2 * drafted < accepted < 0.9 * drafted
    print(f"\n{preemption}: {STEPS // 2} steps, {ended} requests, {drafted=} {accepted=} {preemptions=} {hit=}")
