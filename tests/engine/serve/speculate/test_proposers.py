"""What every proposer owes: declared probabilities that are those of its draws, so that the target's are kept."""

from itertools import product

import pytest
import torch

from course.shared.enumeration import outcomes
from minillm.serve.speculate import verify
from minillm.serve.speculate.proposers.eagle import Eagle
from minillm.serve.speculate.proposers.early_exit import EarlyExit, exiting
from minillm.serve.speculate.proposers.lookahead import Lookahead
from minillm.serve.speculate.proposers.medusa import Medusa, MedusaHeads
from minillm.serve.speculate.verify import distribution

PROMPT = [1, 4, 2, 0, 3]
WARPINGS = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 3},
    {"temperature": 1.2, "top_p": 0.8, "repetition_penalty": 1.4},
]


def drafting(kind, target, trained, features):
    """A proposer that has seen the target compute the prompt but for its last token."""
    if kind in ("medusa", "medusa likeliest"):
        proposer = Medusa(target, trained["medusa"], drawn=kind == "medusa")
    elif kind == "eagle":
        proposer = Eagle(target, trained["eagle"])
    elif kind == "early_exit":
        proposer = EarlyExit(target, trained["early_exit"])
    else:
        proposer = Lookahead(3)
        proposer.on_verified("a", PROMPT[:-1], [0, 3], [2, 3, 1])
    proposer.observe("a", 0, features(PROMPT[:-1]))
    return proposer


KINDS = ["medusa", "medusa likeliest", "eagle", "early_exit", "lookahead"]


@pytest.mark.parametrize("warping", WARPINGS, ids=lambda w: "-".join(w))
@pytest.mark.parametrize("kind", KINDS)
def test_the_declared_probabilities_are_those_of_the_draws(kind, warping, target, trained, ask, features):
    proposer, declared = drafting(kind, target, trained, features), {}

    def run(draw):
        draft = proposer.propose([ask(PROMPT, k=2, draw=draw, **warping)])[0]
        shares = (
            [1.0, 1.0] if draft.probabilities is None else draft.probabilities.gather(1, torch.tensor([draft.tokens]).T)
        )
        declared[tuple(draft.tokens)] = float(shares[0] * shares[1])
        return tuple(draft.tokens)

    found = outcomes(run)
    assert found.keys() == declared.keys() and sum(found.values()) == pytest.approx(1, abs=1e-6)
    for tokens, probability in found.items():
        assert len(tokens) == 2 and probability == pytest.approx(declared[tokens], abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_answer_is_distributed_as_the_targets(kind, target, trained, ask, features):
    """Three tokens by drafting two and verifying; what a pass does not yield is drawn from the target."""
    params = {"temperature": 0.9, "top_k": 4}
    proposer, known, one = drafting(kind, target, trained, features), {}, ask(PROMPT, **params)

    def after(tokens):
        if tokens not in known:
            logits = target(torch.tensor([[*PROMPT, *tokens]]))[0, -1]
            known[tokens] = distribution(logits, one.params, [*PROMPT, *tokens]).double()
        return known[tokens]

    def true(tokens):
        return float(after(())[tokens[0]] * after(tokens[:1])[tokens[1]])

    def run(draw):
        draft = proposer.propose([ask(PROMPT, k=2, draw=draw, **params)])[0]
        rows = torch.stack([after(tuple(draft.tokens[:i])) for i in range(3)])
        return tuple(verify(rows, draft, draw))

    found = outcomes(run)
    pairs = dict.fromkeys(product(range(5), repeat=2), 0.0)
    for tokens, probability in found.items():
        for last in range(5) if len(tokens) == 1 else (tokens[1],):
            share = float(after(tokens)[last]) if len(tokens) == 1 else 1.0
            pairs[tokens[0], last] += probability * share
    for tokens, probability in pairs.items():
        assert probability == pytest.approx(true(tokens), abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_k_bounds_the_draft_and_0_is_none(kind, target, trained, ask, features):
    proposer = drafting(kind, target, trained, features)
    for k in (0, 1, 3):
        if k or kind != "early_exit":  # the engine asks nobody for 0; a draft model takes it as at least 1
            assert len(proposer.propose([ask(PROMPT, k=k, temperature=0.5)])[0].tokens) == k


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_drafts_are_repeatable_and_not_drawn(kind, target, trained, ask, features):
    drafts = [drafting(kind, target, trained, features).propose([ask(PROMPT)])[0] for _ in range(2)]
    assert drafts[0].tokens == drafts[1].tokens and len(drafts[0].tokens) == 3
    assert all(draft.probabilities is None for draft in drafts)


def test_medusa_heads_start_as_the_targets_own_guess(target, features):
    hidden = features(PROMPT)
    logits = MedusaHeads(target.config, heads=2).logits(hidden, target)
    assert logits.shape == (len(PROMPT), 2, 5)
    torch.testing.assert_close(logits[:, 1], target.logits(hidden[None])[0])


def test_medusa_drafts_each_heads_likeliest(target, trained, ask, features):
    hidden = features(PROMPT[:-1])[-1]
    expected = trained["medusa"].logits(hidden, target).argmax(-1).tolist()
    assert drafting("medusa", target, trained, features).propose([ask(PROMPT, k=5)])[0].tokens == expected
    assert Medusa(target, trained["medusa"]).propose([ask(PROMPT)])[0].tokens == []


def test_an_early_exit_shares_the_targets_weights(target, trained):
    draft = exiting(target, trained["early_exit"])
    assert draft.blocks[0] is target.blocks[0] and draft.embedding is target.embedding and len(draft.blocks) == 1
    tokens = torch.tensor([PROMPT])
    x = target.blocks[0](target.embedding(tokens), target.rope(torch.arange(5), torch.float32))
    torch.testing.assert_close(draft(tokens), trained["early_exit"](x) @ target.embedding.weight.T)
