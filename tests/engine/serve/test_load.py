"""A thousand queued requests: all end, in order, none waits longer than it must, and nothing is left; what it costs."""

import random
from collections import Counter

import pytest

from minillm.bench import scheduler
from minillm.bench.load import VirtualClock, replay, skewed
from minillm.bench.scheduler import Steady, rows, same_plans
from minillm.model import ModelConfig, Transformer
from minillm.model.generate import generate
from minillm.serve import LLM, SamplingParams
from tests.engine.serve.test_proof import nothing_left

MODEL = Transformer(ModelConfig(40, 16, 32, 1, 2, 1, max_seq_len=64, init_std=0.3), seed=4)
COUNT = 1000


def test_a_thousand_in_order_and_nobody_waits_longer_than_those_before_take():
    clock, seats, most = VirtualClock(lambda tokens: 1.0), 64, 12
    llm = LLM(MODEL, clock=clock, num_blocks=seats * 5, block_size=8, max_num_seqs=seats, token_budget=2048)
    trace = skewed(COUNT, prompt_tokens=(2, 20), max_tokens=most, vocab_size=40)
    with clock.of(MODEL):
        outputs = replay(llm, trace)
    nothing_left(llm)
    assert all(len(o.answers[0].ids) == e.params.max_tokens for o, e in zip(outputs, trace, strict=True))
    for output, each in list(zip(outputs, trace, strict=True))[:: COUNT // 20]:
        assert output.answers[0].ids == list(generate(MODEL, each.prompt, each.params.max_tokens))
    queues = [output.timing.queue for output in outputs]
    assert queues == sorted(queues)  # first come, first served
    assert sum(output.preemptions for output in outputs) == 0
    for place, queue in enumerate(queues):  # in passes: a seat is taken for as many as its answer has tokens
        work = sum(each.params.max_tokens for each in trace[:place])
        assert queue <= work / seats + most
    assert clock() < 2 * sum(each.params.max_tokens for each in trace) / seats


@pytest.mark.parametrize(("preemption", "count"), [("recompute", COUNT), ("swap", COUNT // 4)])
def test_requests_of_every_kind_end_with_a_reason_and_nothing_is_left(preemption, count):
    rng = random.Random(8)
    llm = LLM(MODEL, num_blocks=40, block_size=4, max_num_seqs=32, token_budget=256, reserve=0, preemption=preemption)
    prefix = [rng.randrange(40) for _ in range(12)]
    for number in range(count):
        prompt = prefix[: rng.choice([0, 8, 12])] + [rng.randrange(40) for _ in range(rng.randrange(1, 9))]
        params = SamplingParams(
            max_tokens=rng.choice([1, 2, 3, 12]),
            n=rng.choice([1, 1, 1, 3]),
            temperature=rng.choice([0.0, 0.9]),
            seed=number,
            stop_tokens=[rng.randrange(40)],
        )
        llm.add(prompt, params, priority=rng.randrange(-1, 2), request_id=str(number))
    alive, ended, steps = set(range(count)), {}, 0
    while llm.unfinished:
        for output in llm.step():
            assert output.request_id not in ended
            ended[output.request_id] = output
            alive.discard(int(output.request_id))
        pool = llm.pool
        assert pool.free + pool.cached + pool.used == pool.total
        if steps % 4 == 3 and alive:
            llm.cancel(str(victim := rng.choice(sorted(alive))))
            alive.discard(victim)
        steps += 1
        assert steps < 20 * count
    ended |= {output.request_id: output for output in llm.step()}
    nothing_left(llm)
    assert len(ended) == count and all(output.timing.ended is not None for output in ended.values())
    reasons = Counter(answer.reason for output in ended.values() for answer in output.answers)
    assert reasons.keys() == {"stop", "length", "cancelled"} and min(reasons.values()) > 9
    assert sum(output.preemptions for output in ended.values()) > 9 and sum(o.hit for o in ended.values()) > 200


def test_a_full_queue_refuses_and_goes_on():
    llm = LLM(MODEL, max_waiting=10)
    names = [llm.add([1, 2]) for _ in range(10)]
    with pytest.raises(RuntimeError, match="the queue is full \\(10 wait, max_waiting 10\\): try later"):
        llm.add([1, 2])
    ended = []
    while llm.unfinished:
        ended += llm.step()
    assert sorted(output.request_id for output in ended) == sorted(names) and llm.add([1, 2])


def test_the_cost_of_scheduling_is_measured_on_work_that_is_the_same(monkeypatch):
    monkeypatch.setattr(scheduler, "SCHEDULED", 200)
    assert same_plans(Steady(4, waiting=30, cached=50), Steady(4))
    found = rows(repeats=5, running=(4,), many=40)
    assert [row.name for row in found] == [
        "scheduler, 4 running, 40 waiting",
        "scheduler, 4 running, 40 cached",
        "scheduler, 4 running, 40 waiting and 40 cached",
    ]
    assert all(row.correct and row.ours > 0 and row.unit == "µs per sequence" for row in found)
    steady = Steady(4, waiting=30, cached=50)
    assert steady.scheduler.num_waiting == 30 and steady.pool.cached >= 50 and len(steady.scheduler.running) == 4
    assert steady.pool.evicted > 0
