"""What goes wrong with a prefill pool: no wrong token, no lost request, nothing left."""

import os
import random
import signal
import threading

import psutil
import pytest

from minillm.serve import LLM, SamplingParams
from minillm.serve.transfer import PrefillAt, PrefillPool
from tests.engine.serve.ranks.programs import TIGHT, alone, drive, model_of, requests_of
from tests.engine.serve.transfer.pools import is_idle, pool_of, until

GREEDY = SamplingParams(8)


def kill_at(receiver, pool, frame, rank):
    """Kills a rank of the pool once so many frames have been written."""
    write, written = type(receiver)._write, []

    def counted(*given):
        written.append(1)
        if len(written) == frame:
            pool.kill(rank)
        return write(receiver, *given)

    receiver._write = counted


def killed(times, ranks=1):
    requests = requests_of(9, 4, 8)
    right, rng, model = alone(model_of("plain"), requests), random.Random(ranks), model_of("plain")
    cut_short = 0
    with pool_of(ranks=ranks) as pool:
        llm = LLM(model, **TIGHT, prefill=pool)
        for number in range(times):
            until(lambda: llm.handovers.ready, "the pool has not come back")
            kill_at(llm.handovers.receiver, pool, rng.randrange(1, 40), rng.randrange(ranks))
            before = llm.handovers.outcomes["gone"]
            llm.pool.reset()  # with nothing in its cache, every prompt is asked for
            found, _ = drive(llm, requests, number)  # which holds it to leaking no block
            assert [[ids for ids, _ in each] for each in found] == right
            cut_short += llm.handovers.outcomes["gone"] - before
            pool.kill()
            until(lambda number=number: pool.starts >= number + 2, "it was not started anew")
        until(lambda: llm.handovers.ready, "the pool has not come back")
        assert is_idle(pool, llm.handovers.layout)
    assert cut_short >= times / 5
    assert llm.generate([requests[0][0]], requests[0][1])[0].answers[0].ids == right[0][0]


def test_a_pool_that_is_killed_costs_no_token():
    killed(5)


@pytest.mark.full
@pytest.mark.parametrize(("times", "ranks"), [(40, 1), (10, 2)])
def test_a_pool_that_is_killed_50_times_costs_no_token(times, ranks):
    killed(times, ranks)


def test_nothing_is_left_of_a_pool():
    children, threads = set(psutil.Process().children(recursive=True)), set(threading.enumerate())
    with pool_of() as pool:
        llm = LLM(model_of("plain"), prefill=pool)
        llm.generate([[1, 2, 3, 4, 5, 6, 7]], GREEDY)
        assert llm.handovers.outcomes == {"whole": 1}
        ranks = [psutil.Process(each) for each in pool.processes]
    left = {each for each in psutil.Process().children(recursive=True) if each.pid in pool.processes} - children
    assert not left and not any(each.is_running() for each in ranks)
    assert set(threading.enumerate()) <= threads
    assert not [
        each for each in psutil.Process().net_connections("tcp") if each.laddr.port == int(pool.at.address[-5:])
    ]


def test_a_pool_that_hangs_is_waited_for_once():
    with pool_of(timeout_s=0.3) as pool:
        model, prompt = model_of("plain"), [1, 2, 3, 4, 5, 6, 7, 8]
        llm = LLM(model, **TIGHT, prefix_cache=False, prefill=pool)
        right = LLM(model).generate([prompt], GREEDY)[0].answers[0].ids
        os.kill(pool.processes[0], signal.SIGSTOP)
        assert llm.generate([prompt], GREEDY)[0].answers[0].ids == right
        assert llm.handovers.outcomes == {"timed out": 1} and llm.handovers.recomputed == 7
        until(lambda: not llm.handovers.ready, "it is asked again")
        assert llm.generate([prompt], GREEDY)[0].answers[0].ids == right
        assert llm.handovers.outcomes.total() == 1
        os.kill(pool.processes[0], signal.SIGCONT)
        until(lambda: llm.handovers.ready, "it is not found again")
        assert llm.generate([prompt], GREEDY)[0].answers[0].ids == right
        assert llm.handovers.outcomes == {"timed out": 1, "whole": 1}


def test_a_full_decode_side_asks_for_nothing():
    """Blocks come first: a request that has none waits here, and no pool computes for it."""
    prompts = [[number] * 30 for number in range(1, 5)]
    with pool_of() as pool:
        llm = LLM(model_of("plain"), block_size=4, num_blocks=10, max_num_seqs=4, token_budget=32, prefill=pool)
        for prompt in prompts:
            llm.add(prompt, GREEDY)
        outputs = []
        while llm.unfinished:
            outputs += llm.step()
            waiting = sum(bool(each.ticket) for each in llm.scheduler.running)
            assert waiting <= 1
    right = alone(model_of("plain"), [(prompt, GREEDY) for prompt in prompts])
    assert sorted([answer.ids for answer in each.answers] for each in outputs) == sorted(right)
    assert llm.handovers.outcomes["whole"] == 4


def test_a_prompt_that_the_pool_cannot_take_is_computed_here():
    with pool_of(num_blocks=3) as pool:
        llm = LLM(model_of("plain"), prefill=pool)
        prompt = list(range(20))
        answer = llm.generate([prompt], GREEDY)[0].answers[0].ids
        assert answer == alone(model_of("plain"), [(prompt, GREEDY)])[0][0]
        assert llm.handovers.outcomes == {"refused": 1}
        assert "20 tokens need 5 blocks" in llm.handovers.handed_over[0].reason


def test_cancelled_while_it_waits():
    with pool_of() as pool:
        llm = LLM(model_of("plain"), **TIGHT, prefill=pool)
        os.kill(pool.processes[0], signal.SIGSTOP)
        name = llm.add([1, 2, 3, 4, 5, 6, 7], GREEDY)
        llm.step()
        assert llm.pool.used and llm.scheduler.running[0].ticket
        llm.cancel(name)
        [output] = llm.step()
        assert output.answers[0].reason == "cancelled" and llm.pool.used == 0
        os.kill(pool.processes[0], signal.SIGCONT)
        until(lambda: is_idle(pool, llm.handovers.layout), "the pool goes on with it")
        assert llm.handovers.outcomes == {"given up": 1}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kv_dtype": "int8"}, "different formats of keys and values: 8 int8, 1 float32 that decodes, 8 float32"),
        ({"seed": 3}, "different models"),
    ],
)
def test_sides_that_differ_are_refused(options, said):
    from minillm.model import Transformer
    from tests.engine.serve.ranks.programs import CONFIG

    with pool_of() as pool:
        model = Transformer(CONFIG, seed=options.pop("seed", 2))
        with pytest.raises(ValueError, match=said):
            LLM(model, prefill=pool, **options)


def test_what_is_no_pool_is_refused():
    model = model_of("plain")
    for address, said in (("127.0.0.1:1", "no prefill pool can be reached at 127.0.0.1:1"), ("9000", "HOST:PORT")):
        with pytest.raises(ValueError, match=said):
            LLM(model, prefill=PrefillAt(address))
    with pytest.raises(ValueError, match="prefill '9000' must be a PrefillPool"):
        LLM(model, prefill="9000")
    with pytest.raises(ValueError, match="sliding window"):
        LLM(model_of("window"), prefill=PrefillAt("127.0.0.1:1"))
    with pytest.raises(ValueError, match=r"3 tensor-parallel ranks"):
        PrefillPool.spawn(model, 3)
