"""The EAGLE head's cache against recomputation from nothing, with gaps, in batches, after drafts."""

import pytest
import torch

from minillm.model import sdpa
from minillm.serve.speculate.distil import Unrolled
from minillm.serve.speculate.heads import hidden_states
from minillm.serve.speculate.proposers.eagle import Eagle
from minillm.serve.speculate.verify import distribution

TOKENS = [1, 4, 2, 0, 3, 3, 1, 2, 4, 0, 1]


def recomputed(target, head, tokens, known, asked):
    """The chain, every pair of every step computed anew. known: {position: feature}, as far as it was observed."""
    pairs = [(tokens[at + 1], at + 1, feature) for at, feature in sorted(known.items())]
    drafted, rows = [], []
    for _ in range(asked.k):
        ids, positions = (torch.tensor([pair[i] for pair in pairs]) for i in range(2))
        before = torch.stack([pair[2] for pair in pairs])[None]
        feature = head(ids[None], before, positions, target, sdpa)[0, -1]
        rows.append(distribution(target.logits(feature[None, None])[0, 0], asked.params, tokens + drafted))
        drafted.append(int(torch.multinomial(rows[-1], 1, generator=asked.draw)))
        pairs.append((drafted[-1], pairs[-1][1] + 1, feature))
    return drafted, torch.stack(rows)


@pytest.mark.parametrize("holes", [(), (0, 1, 2, 3), (0, 4)], ids=["all", "prefix missing", "holes"])
def test_the_cache_equals_recomputation(target, trained, ask, features, holes):
    eagle, hidden, known = Eagle(target, trained["eagle"]), features(TOKENS), {}
    for start, end in ((0, 4), (4, 6), (6, 7), (7, 9)):  # a prompt in two pieces, then one verified token, then two
        seen = [at for at in range(start, end) if at not in holes]
        if seen:
            eagle.observe("a", seen[0], hidden[seen[0] : end])
            known |= {at: hidden[at] for at in range(seen[0], end)}
        if start:
            asked = ask(TOKENS[: end + 1], temperature=1.0)
            draft = eagle.propose([asked])[0]
            again = ask(TOKENS[: end + 1], temperature=1.0)
            tokens, rows = recomputed(target, trained["eagle"], TOKENS[: end + 1], known, again)
            assert draft.tokens == tokens
            torch.testing.assert_close(draft.probabilities, rows, rtol=1e-4, atol=1e-5)


def test_a_batch_drafts_as_each_alone(target, trained, ask, features):
    lengths = {"a": 3, "b": 9, "c": 6}
    together = Eagle(target, trained["eagle"])
    for rounds in range(2):
        for key, length in lengths.items():
            together.observe(key, length - 1 if rounds else 0, features(TOKENS)[length - 1 if rounds else 0 : length])
            lengths[key] += 1
        asked = [ask(TOKENS[:n], key=key, k=k, temperature=0.7) for k, (key, n) in enumerate(lengths.items(), start=1)]
        drafts = together.propose(asked)
        for one, draft in zip(asked, drafts, strict=True):
            alone = Eagle(target, trained["eagle"])
            alone.observe(one.key, 0, features(TOKENS)[: len(one.tokens) - 1])
            fresh = ask(one.tokens, key=one.key, k=one.k, temperature=0.7)
            expected = alone.propose([fresh])[0]
            assert draft.tokens == expected.tokens and len(draft.tokens) == one.k
            assert torch.equal(one.draw.get_state(), fresh.draw.get_state())
            torch.testing.assert_close(draft.probabilities, expected.probabilities, rtol=1e-4, atol=1e-5)


def test_asked_again_without_a_pass_it_drafts_the_same(target, trained, ask, features):
    eagle = Eagle(target, trained["eagle"])
    eagle.observe("a", 0, features(TOKENS)[:5])
    first, second = (eagle.propose([ask(TOKENS[:6])])[0].tokens for _ in range(2))
    assert first == second and len(first) == 3


def test_without_the_newest_feature_it_says_nothing(target, trained, ask, features):
    eagle = Eagle(target, trained["eagle"])
    assert eagle.propose([ask(TOKENS[:6])])[0].tokens == []
    eagle.observe("a", 0, features(TOKENS)[:4])
    assert eagle.propose([ask(TOKENS[:6])])[0].tokens == []
    assert eagle.propose([ask(TOKENS[:5])])[0].tokens != []


def test_forgetting_frees_the_cache(target, trained, ask, features):
    eagle = Eagle(target, trained["eagle"])
    eagle.observe("a", 0, features(TOKENS)[:4])
    eagle.propose([ask(TOKENS[:5])])
    assert eagle.nbytes == 2 * 4 * target.config.num_kv_heads * target.config.head_dim * 4
    eagle.forget("a")
    eagle.forget("never seen")
    assert eagle.nbytes == 0 and eagle.propose([ask(TOKENS[:5])])[0].tokens == []


def test_training_sees_what_drafting_sees(target, trained):
    """Step j of the unrolled training at place s is the draft's step j, begun at s - j, with these tokens."""
    head, tokens = trained["eagle"], torch.tensor([TOKENS])
    features = hidden_states(target, tokens)[-1]
    positions, before, attention, steps = torch.arange(1, len(TOKENS)), features[:, :-1], Unrolled(), []
    for _ in range(3):
        steps.append(head(tokens[:, 1:], before, positions, target, attention))
        before = torch.cat((features[:, :1], steps[-1][:, :-1]), dim=1)
    for begun in (2, 5, 7):
        chain = list(features[0, :begun])
        for step in range(3):
            end = begun + step
            out = head(tokens[:, 1 : end + 1], torch.stack(chain)[None], positions[:end], target, sdpa)[0, -1]
            torch.testing.assert_close(out, steps[step][0, end - 1], rtol=1e-4, atol=1e-5)
            chain.append(out)
