"""Lab 14's flights: what is played is what the engine flies, receipts are exact, each fault shows and is told apart."""

import pytest

from course.kit.answers import answers_of
from course.kit.interact import render
from course.lab14_continuous_batching import checks_flight, experiments, experiments_ahead, experiments_loads
from course.lab14_continuous_batching import experiments_breaks as breaks
from course.lab14_continuous_batching import experiments_engines as engines
from course.lab14_continuous_batching import figures as pictures
from course.lab14_continuous_batching import figures_flight as lab_14_flight
from course.lab14_continuous_batching import formulas as predict
from course.lab14_continuous_batching.baselines import StaticBatches, TimerBatches
from minillm.model import Transformer
from minillm.serve import POLICIES

ANSWERS = answers_of("14_continuous_batching")


TIGHT = {"num_blocks": 16, "block_size": 4, "token_budget": 16, "max_num_seqs": 5, "reserve": 0}


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_played_trace_is_the_flown_one(policy, preemption):
    options = {**TIGHT, "policy": policy, "preemption": preemption, "chunk": 6 if policy == "longest" else None}
    arrivals = experiments.requests([(6 + 5 * i % 17, 4 + 7 * i % 15) for i in range(7)])
    llm, outputs = experiments.fly(arrivals, Transformer(experiments.TINY, seed=1), **options)
    flight = experiments.play(arrivals, **options)
    assert experiments.same_flight(flight.records, llm.records) and not flight.stuck
    assert flight.preemptions == sum(output.preemptions for output in outputs) > 0
    assert flight.computed == sum(output.computed for output in outputs)
    assert [history.hit for history in flight.histories.values()] == [output.hit for output in outputs]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_recomputed_or_moved_is_what_victims_had(policy):
    recomputed, swapped = engines.crowd(policy, "recompute"), engines.crowd(policy, "swap")
    assert recomputed.computed - recomputed.needed == sum(engines.given_up(recomputed)) > 0
    assert recomputed.swapped == 0 and swapped.computed == swapped.needed
    assert swapped.swapped == 2 * sum(-(-tokens // 16) for tokens in engines.given_up(swapped)) > 0


def test_latencies_read_from_records_are_those_that_happened():
    flight = engines.crowd("longest", "recompute")
    found = ANSWERS.latencies(
        flight.records, flight.prompts, {name: history.arrived for name, history in flight.histories.items()}
    )
    for name, history in flight.histories.items():
        assert found[name] == pytest.approx((history.ttft, history.tpot, history.worst_gap))


def test_a_plan_ahead_changes_no_answer_though_victims_are_under_way():
    found = experiments_ahead.asynchronous()
    assert found.equal and found.used == 0
    assert 0 < found.under_way <= found.preempted and found.steps // 2 < found.ahead < found.steps


def test_one_buffer_for_two_plans_is_overwritten_and_two_are_not():
    assert experiments_ahead.overwritten([[0], [0, 1], [0, 1], [1]], 1) == 2
    assert all(experiments_ahead.overwritten([[step] for step in range(9)], buffers) == 0 for buffers in (2, 3))


@pytest.mark.parametrize("name", experiments_loads.LOADS)
def test_means_have_as_many_tokens_and_a_shorter_tail(name):
    load = experiments_loads.LOADS[name]
    lengths = experiments_loads.drawn(load)
    alike = experiments_loads.means(lengths)
    for one, other in zip(zip(*lengths, strict=True), zip(*alike, strict=True), strict=True):
        assert sum(one) == pytest.approx(sum(other), rel=0.01)
    drawn, even = (experiments_loads.played(load, each) for each in (lengths, alike))
    assert not drawn.stuck and drawn.computed == drawn.needed  # the pool is large enough
    assert drawn.spread("worst_gap").p99 >= even.spread("worst_gap").p99 or load.rate is None


@pytest.mark.parametrize("fault", breaks.FAULTS)
def test_every_fault_shows_and_is_told_apart(fault):
    for seed in range(12):
        flight = breaks.case(fault, seed)
        assert ANSWERS.diagnose(flight.records, flight.prompts) == fault
        assert flight.stuck == (fault == "livelock")


def test_the_check_draws_flights_in_which_the_fault_shows():
    """The one of seed 99 goes on as if there were no fault."""
    fault = "tokens that do not exist"
    assert ANSWERS.diagnose((hidden := breaks.case(fault, 99)).records, hidden.prompts) == breaks.HEALTHY
    assert {ANSWERS.diagnose(each.records, each.prompts) for each in checks_flight._flights(fault, 99)} == {fault}


def test_gaps_are_predicted_and_unmixed_phases_stall_for_the_whole_prompt():
    for numbers in engines.stalls((512, 2048, None)):
        assert numbers["gap"] == pytest.approx(numbers["predicted"], rel=0.01)
        assert numbers["ttft"] == pytest.approx(numbers["predicted_ttft"], rel=0.05)
    assert engines.unmixed(512)["gap"] > 10 * engines.stall(512)["gap"]


def test_baselines_take_the_steps_of_the_formula():
    model, lengths = Transformer(experiments.TINY, seed=1), [5, 2, 9, 1, 3, 3, 8]
    arrivals = experiments.requests([(4, n) for n in lengths])
    each = [a.prompt for a in arrivals], [a.params for a in arrivals]
    for llm in (StaticBatches(model, 3), TimerBatches(model, 3, 0.0)):
        llm.generate(*each)
        assert len(llm.records) == predict.static_steps(lengths, 3)


def test_the_recorder_draws_any_step_of_any_flight():
    for options in ({"step": 1}, {"step": 10_000, "policy": "longest", "preemption": "swap", "chunk": 24}):
        assert render(lab_14_flight.view, **options).startswith(b"\x89PNG")
    flight = lab_14_flight.flight()
    assert flight.preemptions and max(max(each.references) for each in flight.records) > 1


def test_batches_are_drawn_as_they_are_counted():
    lengths = pictures._lengths(24, 1.0, 48)
    for bars, steps in (
        (pictures._static(lengths, 6), predict.static_steps(lengths, 6)),
        (pictures._continuous(lengths, 6), predict.continuous_steps(lengths, 6)),
    ):
        taken = [(place, start + step) for (place, start), n in zip(bars, lengths, strict=True) for step in range(n)]
        assert len(set(taken)) == len(taken) and max(step for _, step in taken) == steps - 1
