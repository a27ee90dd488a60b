"""Cards divided between prefill and decode: waits against a simulated queue, the division against all of them."""

import random
from itertools import product

import pytest

from minillm.__main__ import run
from minillm.predict.planner.architectures import architecture
from minillm.predict.planner.clusters import cluster
from minillm.predict.planner.pools import BUSY, SIZES, most_within, rank_pools, rate_for_wait, wait
from minillm.predict.planner.serving import Replica, rank_serving
from minillm.predict.serving.queueing import waits

MODEL = architecture("llama-3-8b")


@pytest.mark.parametrize("load", [0.3, 0.8])
def test_the_wait_is_that_of_a_simulated_queue(load):
    draw = random.Random(1)
    gaps = [draw.expovariate(load / 0.2) for _ in range(100_000)]
    simulated = sum(waits(gaps, [0.2] * len(gaps))) / len(gaps)
    assert wait(load / 0.2, 0.2) == pytest.approx(simulated, rel=0.06)
    assert rate_for_wait(wait(load / 0.2, 0.2), 0.2) == pytest.approx(load / 0.2)


def test_the_most_within_a_limit_is_found_by_halving_as_by_trying():
    for most, limit in product(range(1, 20), (0, 1, 7.5, 11, 100)):
        tried = max((n for n in range(1, most + 1) if 2 * n <= limit), default=0)
        assert most_within(most, lambda n: 2 * n, limit) == tried


@pytest.mark.parametrize(("prompt", "output"), [(4000, 200), (500, 800)])
def test_the_best_split_is_the_best_of_all(prompt, output):
    """Every pair of sizes and every number of prefill replicas, each pool's rate by hand."""
    ttft, tpot, machine = 0.8, 0.03, cluster("h100", 8)
    best = 0.0
    for (tp, pp), (other_tp, other_pp) in product([each for each in SIZES if each[0] * each[1] <= 8], repeat=2):
        one = Replica(MODEL, machine, tp, pp, prompt, output)
        other = Replica(MODEL, machine, other_tp, other_pp, prompt, output)
        seconds = one.time_to_first()
        rates = [rate / 1000 * BUSY * pp / seconds for rate in range(1001)]
        within = max((rate for rate in rates if seconds + wait(rate, seconds / pp) <= ttft), default=0.0)
        batches = range(1, other.most_sequences(None) + 1, 1)
        running = max((b for b in batches if other.step(b) * other_pp <= tpot), default=0)
        decoded = running / other.step(max(running, 1)) / output
        for count in range(1, 8):
            decode = (8 - count * tp * pp) // (other_tp * other_pp)
            best = max(best, min(count * within, decode * decoded)) if decode > 0 else best
    plan = next(plan for plan in rank_pools(MODEL, machine, prompt, output, ttft=ttft, tpot=tpot) if plan.split)
    assert plan.rate == pytest.approx(best, rel=2e-3)
    assert plan.ttft <= ttft * 1.001 and plan.tpot <= tpot * 1.001 and plan.cards <= 8


def test_together_is_what_a_serving_plan_counts():
    """Without a limit that prompts would exceed, the rate is the plan's tokens/s over the tokens of an answer."""
    machine = cluster("h100", 8)
    plan = max(rank_serving(MODEL, machine, 500, 800, tpot=0.03, keep=30), key=lambda plan: plan.tokens_per_s)
    together = next(each for each in rank_pools(MODEL, machine, 500, 800, tpot=0.03) if not each.split)
    assert together.rate == pytest.approx(plan.tokens_per_s / 800, rel=1e-6)
    assert together.tpot == pytest.approx(plan.tpot, rel=1e-6)


def test_at_a_rate_the_requests_that_run_are_those_of_littles_law():
    machine = cluster("h100", 8)
    for plan in rank_pools(MODEL, machine, 2000, 400, rate=6.0):
        decoder = Replica(MODEL, machine, plan.decode_tp, plan.decode_pp, 2000, 400)
        busy = 0.0 if plan.split else 6.0 / plan.decode * decoder.time_to_first() / plan.decode_pp
        running = 6.0 / plan.decode * 400 * plan.tpot / plan.decode_pp
        assert plan.tpot == pytest.approx(decoder.step(max(running, 1.0)) * plan.decode_pp / (1 - busy), rel=1e-3)
        assert plan.rate == 6.0
    first = rank_pools(MODEL, machine, 2000, 400, rate=6.0, keep=3)
    seconds = [plan.ttft + plan.handover + 399 * plan.tpot for plan in first]
    assert seconds[:3] == sorted(seconds[:3])


def test_the_best_of_either_kind_is_always_there():
    for prompt, output in ((8000, 50), (200, 1000)):
        plans = rank_pools(MODEL, cluster("h100", 8), prompt, output, ttft=1.0, tpot=0.02, keep=1)
        assert {plan.split for plan in plans} == {True, False} and len(plans) == 2


def test_what_cannot_be_is_said_in_a_sentence(capsys):
    machine = cluster("h100", 8)
    with pytest.raises(ValueError, match=r"1000 requests per second are more than 8 cards sustain"):
        rank_pools(MODEL, machine, 2000, 400, rate=1000.0)
    with pytest.raises(ValueError, match="relax one"):
        rank_pools(MODEL, machine, 2000, 400, tpot=1e-5)
    with pytest.raises(ValueError, match="fit on no layout"):
        rank_pools(architecture("llama-3-405b"), cluster("h100", 1), 2000, 400)
    for rate, said in (("-1", "--rate -1"), ("1e6", "more than 8 cards sustain"), ("nan", "finite")):
        assert run(["plan", "--serve", "--rate", rate]) == 2
        assert said in capsys.readouterr().err


def test_the_plan_shows_bytes_on_the_wire_and_the_split(capsys):
    assert run(["plan", "--serve", "--gpus", "4", "--rate", "2", "--top", "2"]) == 0
    printed = capsys.readouterr().out
    assert "wire KB/token" in printed and "together" in printed and "hand-over ms" in printed


def test_bytes_of_a_token_are_those_of_its_collectives():
    """tp 2: a ring and an exchange send the same; a boundary is crossed by every rank of a stage."""
    machine, hidden = cluster("h100", 8), 2 * MODEL.hidden_size
    assert Replica(MODEL, machine, 2, 1, 100, 1).token_bytes(1) == 2 * MODEL.num_layers * 2 * hidden
    assert Replica(MODEL, machine, 1, 4, 100, 1).token_bytes(1) == 3 * hidden
    assert Replica(MODEL, machine, 4, 1, 100, 1).token_bytes(1) == 2 * MODEL.num_layers * 12 * hidden
    assert Replica(MODEL, machine, 4, 1, 100, 1).token_bytes(10**6) == 2 * MODEL.num_layers * 6 * hidden
