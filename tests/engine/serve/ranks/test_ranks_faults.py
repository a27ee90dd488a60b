"""What goes wrong on one rank: one sentence, and no rank that waits."""

import asyncio
import os
import signal
import time

import psutil
import pytest

from minillm.comm import RankError, launch
from minillm.serve import AsyncLLM, SamplingParams, over_ranks
from minillm.serve.ranks import runner as module
from tests.engine.serve.ranks.programs import TIGHT, model_of

GREEDY = SamplingParams(20)


def raising(group, culprit, at):
    """A pass that raises on one rank."""

    def broken(llm_runner):
        forward, passes = llm_runner._forward, []

        def counted(step, before):
            passes.append(1)
            if group.rank == culprit and len(passes) == at:
                raise MemoryError("no room for this pass")
            return forward(step, before)

        llm_runner._forward = counted

    told = []

    def use(llm):
        llm.add([1, 2, 3], GREEDY)
        while llm.unfinished:
            told.extend(output.error for output in llm.step())
        try:
            llm.generate([[1, 2]], GREEDY)
        except RuntimeError as error:
            told.append(str(error))
        print(*told, sep="\n")

    made = module.RankRunner.__init__

    def make(self, *given, **options):
        made(self, *given, **options)
        broken(self)

    module.RankRunner.__init__ = make
    return over_ranks(group, model_of("plain"), use, **TIGHT)


def test_a_pass_that_raises_on_rank_0_ends_the_engine(capfd):
    with pytest.raises(RankError, match="rank 0 of 2 raised RuntimeError: rank 0 of 2 stopped amid a pass"):
        launch(raising, 2, 0, 4)
    said = capfd.readouterr().out
    assert "the forward pass raised MemoryError: no room for this pass" in said
    assert "rank 0 of 2 stopped amid a pass (MemoryError: no room for this pass), and the other ranks wait" in said


def test_a_pass_that_raises_on_another_rank_names_it():
    with pytest.raises(RankError, match="rank 1 of 2 raised MemoryError: no room for this pass"):
        launch(raising, 2, 1, 4)


def leaving(group):
    def use(llm):
        llm.generate([[1, 2, 3]], GREEDY)
        raise KeyError("the program's own")

    return over_ranks(group, model_of("plain"), use, **TIGHT)


def test_an_error_of_the_program_s_own_is_told_as_it_is():
    with pytest.raises(RankError, match="rank 0 of 2 raised KeyError") as caught:
        launch(leaving, 2)
    assert isinstance(caught.value.__cause__, KeyError)


def killed(group):
    def use(llm):
        for number, _ in enumerate(llm.stream([1, 2, 3], SamplingParams(40))):
            if number == 3:
                os.kill(others[0], signal.SIGKILL)

    others = [pid for pid in group.gather_objects(os.getpid()) if pid != os.getpid()]
    return over_ranks(group, model_of("plain"), use, **TIGHT)


def test_a_rank_that_is_killed_is_named():
    with pytest.raises(RankError, match="rank 1 of 2 was killed by SIGKILL"):
        launch(killed, 2)
    assert not [each for each in psutil.Process().children(recursive=True) if each.ppid() != os.getpid()]


def idle(group, seconds):
    """An engine that has nothing to do for longer than a rank may wait."""
    module.RankRunner.beat_s = module.BEAT_S = 0.2

    async def serve(llm):
        async with AsyncLLM(llm) as server:
            first = await server.generate([1, 2, 3], GREEDY)
            await asyncio.sleep(seconds)
            again = await server.generate([1, 2, 3], GREEDY)
            return first.answers[0].ids == again.answers[0].ids, llm.runner.channel.told, len(llm.records)

    return over_ranks(group, model_of("plain"), lambda llm: asyncio.run(serve(llm)), prefix_cache=False)


def test_ranks_hear_of_an_idle_engine():
    started = time.monotonic()
    same, told, steps = launch(idle, 2, 2.5, timeout=1.5)[0]
    assert same and told >= steps + 6 and time.monotonic() - started > 2.5


def several(group):
    """Engines one after the other, of other sizes, on the same ranks."""
    answers = []
    for blocks in (20, 30):
        use = lambda llm: ([a.ids for a in llm.generate([[1, 2, 3]], GREEDY)[0].answers], llm.pool.total)  # noqa: E731
        answers.append(over_ranks(group, model_of("plain"), use, num_blocks=blocks))
    return answers


def test_an_engine_follows_another():
    (first, one), (second, two) = launch(several, 2)[0]
    assert first == second and (one, two) == (20, 30)


def sizes(group):
    return over_ranks(group, model_of("plain"), lambda llm: (llm.pool.total, tuple(llm.cache.pool.shape)))


def test_blocks_hold_a_rank_s_heads_alone():
    for tp, kv_heads in ((1, 2), (2, 1), (4, 1)):
        total, shape = launch(sizes, tp)[0]
        assert total == 64 * 4 and shape == (2, 2, total, 16, kv_heads, 8)


def too_large(group):
    over_ranks(group, model_of("plain"), lambda llm: None, num_blocks=10**9)


def test_more_blocks_than_the_memory_holds_are_refused():
    with pytest.raises(RankError, match="num_blocks 1000000000 blocks are") as caught:
        launch(too_large, 2)
    assert isinstance(caught.value.__cause__, ValueError)
