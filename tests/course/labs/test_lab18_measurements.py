"""Lab 18's numbers agree: what its text says with the formulas, what its programs log with their bugs."""

import random

import pytest

from course.kit.answers import answers_of
from course.lab18_distributed_serving import experiments, formulas, receipts
from course.lab18_distributed_serving import experiments_breaks as breaks
from course.lab18_distributed_serving import figures as pictures
from course.lab18_distributed_serving.pipeline import Trace, play
from minillm.predict.planner.architectures import architecture
from minillm.predict.planner.clusters import cluster
from minillm.predict.planner.serving import rank_serving
from tests.course.labs.lab_text import numbers_of

ANSWERS, said = answers_of("18_distributed_serving"), numbers_of("18_distributed_serving")


def test_the_design_question_has_the_numbers_of_its_answer():
    model, (wide, levels, deep, _) = architecture("llama-3-405b"), formulas.two_nodes()
    weights, node, card = said(
        r"Weights are (\d+) GB, more than the (\d+) GB of a node, so both .*? and (\d+) GB of each"
    )
    assert (weights, card) == (round(2 * model.parameters / 1e9), round(deep.weights / 1e9))
    assert node == 8 * 80 < weights
    assert levels.tpot < deep.tpot < 0.2 * wide.tpot and deep.crossing < levels.crossing < wide.crossing
    waits, latency = said(r"speak (\d+) waits"), said(r"such a message takes (\d+) µs")
    assert waits == (2 * model.num_layers,) and latency == (round(1e6 * cluster("h100", 16).latency[1]),)
    assert levels.tokens * 2 == deep.tokens and said(r"405B has (\d+) kv heads") == (model.num_kv_heads,)
    held, usable = formulas.fits_a_node(8)
    assert held < usable, "in 8 bits it fits into one node"
    plans = rank_serving(model, cluster("h100", 16), 1000, 100, keep=30)
    assert {(plan.tp, plan.pp) for plan in plans} >= {(8, 2), (4, 4)}


def test_exercise_2_speaks_of_the_weights_of_70b():
    (gigabytes,) = said(r"read the whole file read (\d+) GB of")
    assert gigabytes == round(2 * architecture("llama-3-70b").parameters / 1e9)


def test_programs_show_their_own_bug_and_no_other():
    for bug, forms in breaks.FORMS.items():
        for seed in range(60):
            random.seed(seed)
            seen = breaks.run(bug, random.choice((2, 3, 4)), seed % forms)
            assert ANSWERS.verdict(seen) == bug, (bug, seed)
    assert breaks.all_programs() == breaks.all_programs()


def test_the_text_names_the_bugs_of_the_programs():
    answers = {"A": breaks.FREED, "C": breaks.PHASES, "D": breaks.SAMPLES, "F": breaks.PHASES}
    assert {name: bug for name, bug in breaks.BUGS.items() if bug != breaks.RIGHT} == answers


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_a_pipeline_writes_a_token_of_everybody_in_as_many_ticks_as_stages(stages):
    found = play(Trace.at_once(3 * stages, 7), stages, lambda r, f: ANSWERS.next_batch(r, f, stages))
    assert (found.tokens, found.ticks) == (21 * stages, 7 * stages + stages - 1)


def test_interference_computes_the_same_prompts_in_each_way():
    for played in experiments.interference():
        assert len(played.first) == len(experiments.ARRIVALS), played.name
        ends: dict[str, float] = {}
        for cards, begin, stop, _ in played.boxes:
            assert ends.get(cards, 0.0) <= begin < stop
            ends[cards] = stop
    whole, chunks, apart = (sum(played.first) for played in experiments.interference())
    assert whole < apart < chunks


def test_a_hit_shortens_both_ways_to_get_keys():
    for model in ("8B", "70B"):
        full, half = (formulas.recompute_seconds(model, 4096, hit, 4) for hit in (0.0, 0.5))
        assert half < full
        full, half = (formulas.handed_seconds(model, 4096, hit, 4, 40e9) for hit in (0.0, 0.5))
        assert half == pytest.approx(full / 2)


def test_the_figures_say_what_they_show():
    by_prompt = formulas.by_prompt(1000.0, 40.0)
    apart_wins = [plans[True].rate > plans[False].rate for plans in by_prompt.values()]
    assert apart_wins == sorted(apart_wins, reverse=True) and True in apart_wins and False in apart_wins
    slow = pictures.hand_over_or_recompute("8B", 1).axes[0]
    assert slow.lines and formulas.handed_seconds("8B", 4096, 0, 1, 1.25e9) > formulas.recompute_seconds(
        "8B", 4096, 0, 1
    )
    assert formulas.handed_seconds("70B", 4096, 0, 4, 1.25e9) < formulas.recompute_seconds("70B", 4096, 0, 4)


def test_the_split_that_the_text_asks_for_is_that_of_the_receipt():
    rows = {row.name: row.predicted for row in receipts.splits().rows}
    plans = formulas.best_pools(4000, 1.5, 0.04)
    assert (plans[True].decode, plans[False].decode, plans[True].prefill + 1) == (1, 4, 4)
    loose, free = formulas.best_pools(8000, 2.0, 0.04), formulas.best_pools(8000, None, None)
    assert loose[True].rate > loose[False].rate and free[True].rate < free[False].rate
    assert rows["apart: cards that prefill"] < formulas.CARDS
    assert said(r"prompts of ([\d,]+) tokens arrive") == (experiments.LONG,)
