"""Lab 15's numbers agree: closed forms with enumeration, the engine's receipts with the formulas, the peer's tokens."""

import pytest
import torch

from course.kit.answers import answers_of
from course.lab15_speculative_decoding import checks_gain as gain
from course.lab15_speculative_decoding import experiments, tiny_models
from course.lab15_speculative_decoding import experiments_breaks as breaks
from course.lab15_speculative_decoding import experiments_runs as runs
from course.lab15_speculative_decoding import figures as pictures
from course.lab15_speculative_decoding.tiny_models import Tiny
from minillm.predict.serving import speculation as predict
from minillm.serve.speculate import NGram
from minillm.serve.speculate.verify import choose

ANSWERS = answers_of("15_speculative_decoding")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_the_most_that_can_be_accepted_is_what_the_verifier_accepts():
    target, draft = Tiny(generator(1)), Tiny(generator(2))

    def run(draw):
        guesses, q = tiny_models.drawn_draft(draft, choose, [0, 1], 2, draw)
        return len(ANSWERS.verify_draft(target.rows([0, 1], guesses), guesses, q, draw)) - 1

    found = tiny_models.enumerated(run)
    mean = sum(count * chance for count, chance in found.items())
    assert mean == pytest.approx(tiny_models.accepted(target, draft, [0, 1], 2))


def test_written_is_a_distribution():
    found = tiny_models.written(Tiny(generator()), [1, 0], 3)
    assert len(found) == 27 and sum(found.values()) == pytest.approx(1)
    assert sum(tiny_models.first(found, 2).values()) == pytest.approx(1) and len(tiny_models.first(found, 2)) == 9


def test_one_draft_token_in_closed_form_is_what_enumeration_says():
    target, draft = Tiny(generator(3), 4), Tiny(generator(4), 4)
    p, q = target([0, 1]), draft([0, 1])
    exact, from_q, from_p, inverted = breaks.one_draft_token(p[None], q[None]).values()

    def run(draw, after):
        guess = choose(q, draw)
        return (guess,) if draw.uniform() < p[guess] / q[guess] else (choose(after, draw),)

    for after, closed in ((ANSWERS.residual(p, q), exact), (q, from_q), (p, from_p)):
        found = tiny_models.enumerated(lambda draw, after=after: run(draw, after))
        assert [found.get((token,), 0.0) for token in range(4)] == pytest.approx(closed[0].tolist())
    assert float(breaks.total_variation(exact, p)) < 1e-12 < float(breaks.total_variation(inverted, p))


def test_typical_acceptance_by_hand():
    p, q = torch.tensor([[0.7, 0.2, 0.1]]).double(), torch.tensor([[0.2, 0.5, 0.3]]).double()
    entropy = float(-(p * p.log()).sum())
    assert 0.3 * torch.exp(torch.tensor(-entropy)) > 0.1  # so the third token is refused, the second passes
    share, off = breaks.typical(p, q, 0.11)
    assert share == pytest.approx(0.7)
    assert off == pytest.approx(float(breaks.total_variation(torch.tensor([[0.2 + 0.21, 0.5 + 0.06, 0.03]]), p)))


def test_verdicts_of_the_lab_are_the_usual_ones():
    found = {name: ANSWERS.verdict(*each) for name, each in breaks.all_evidence().items()}
    assert found == gain.USUAL


@pytest.mark.parametrize("kind", experiments.KINDS)
def test_texts_are_long_enough_and_always_the_same(kind):
    assert {len(ids) for ids in experiments.texts(kind)} == {experiments.PROMPT + experiments.NEW}
    assert experiments.prompts(kind, 2) == [ids[: experiments.PROMPT] for ids in experiments.texts(kind)[:2]]
    with pytest.raises(ValueError, match="'poetry'"):
        experiments.texts("poetry")


def test_replay_counts_passes():
    text = [1, 2, 3, 4, 1, 2, 3, 4]
    assert runs.replay(text, lambda tokens, k, longest: [], 3, start=2) == 6
    right = lambda tokens, k, longest: text[len(tokens) : len(tokens) + k]  # noqa: E731
    assert runs.replay(text, right, 2, start=2) == 2


def test_the_engine_with_guesses_writes_the_same_in_the_passes_that_the_formula_says():
    asked = experiments.prompts("code", 2)
    plain = experiments.generate(None, 1, asked, new=16)
    found = experiments.compare(NGram(), 4, plain, asked, new=16)
    assert found.same and found.run.passes < plain.passes == 2 * 15
    assert experiments.formula(found.run) == pytest.approx(found.run.tokens_per_pass, rel=0.25)  # last passes are cut
    assert plain.counts.alpha == [] and plain.tokens_per_pass == 1


def test_a_loop_without_cache_writes_what_the_engine_writes():
    pair = experiments.pair()
    target, draft = runs.Uncached(pair.target), runs.Uncached(pair.draft)
    [prompt] = experiments.prompts("code", 1)
    found = ANSWERS.speculate(target, draft, prompt, 12, 3, generator())
    assert found == experiments.generate(None, 1, [prompt], new=12).answers[0] and target.passes < 12


def test_preempted_sequences_write_the_same():
    found = runs.preempted()
    plain = experiments.generate(None, 1, experiments.prompts("code", 4))
    assert found["preemptions"] > 0 and found["answers"] == plain.answers and found["used"] == 0


def test_a_drawn_guess_gains_by_heat_what_a_certain_one_loses():
    shares = experiments.alpha_by_temperature((0.5, 2.0), ("code",))
    assert shares["code, sampled"][1] > shares["code, sampled"][0] and shares["code, likeliest"][1] < 0.1


def test_memory_counts_nothing_that_belongs_to_the_target():
    for name, proposer in runs.available():
        if proposer is not None:
            found = runs.memory(name, proposer)
            assert 0 <= found["weights"] < sum(p.nbytes for p in experiments.pair().target.parameters())
    draft = dict(runs.available())["draft"]
    assert runs.memory("draft", draft)["weights"] == sum(p.nbytes for p in draft.model.parameters())


def test_transformers_writes_the_same_tokens_in_fewer_passes():
    pytest.importorskip("transformers")
    from course.lab15_speculative_decoding import experiments_peers as peers

    asked = experiments.prompts("code", 1)
    found = peers.peers(asked, 3, 6)
    plain, passes = found.pop(peers.PLAIN)
    assert plain == experiments.generate(None, 1, asked).answers and passes == experiments.NEW
    assert all(same == plain and fewer < passes for same, fewer in found.values())


def test_pictures_of_parameters():
    for figure in (pictures.overlap(0.9, 0.5), pictures.speedup_by_k(0.6, 0.3, 1.2)):
        assert figure.axes[0].get_title(loc="left")
    shown = pictures.speedup_by_k(0.8, 0.1).axes[0].texts[0].get_text()
    assert shown == f"best: K = 6, {predict.speedup(0.8, 0.1, 6):.2f} times"
