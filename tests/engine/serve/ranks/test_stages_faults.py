"""What goes wrong in a stage, or between two: one sentence, nothing that waits, and no other request that is harmed."""

import asyncio
import os
import signal
import time

import psutil
import pytest
import torch

from minillm.comm import HangError, RankError, launch
from minillm.model.generate import generate
from minillm.serve import AsyncLLM, SamplingParams, over_ranks
from minillm.serve.ranks import runner as module
from minillm.serve.ranks.reply import Replies
from minillm.serve.sample import isolate
from tests.engine.serve.ranks.programs import TIGHT, model_of
from tests.engine.serve.ranks.test_ranks_faults import GREEDY, killed, leaving, raising

pytestmark = pytest.mark.drawn(2)

PROMPT = list(range(1, 13))


def over_stages(program):
    """A program of `test_ranks_faults`, with as many stages as ranks."""

    def run(group, *args):
        over = program.__globals__["over_ranks"]
        program.__globals__["over_ranks"] = lambda *given, **options: over(*given, pp=group.world_size, **options)
        return program(group, *args)

    return run


@pytest.mark.parametrize("rank", [0, 1])
def test_a_pass_that_raises_names_its_rank(rank, capfd):
    with pytest.raises(RankError, match=f"rank {rank} of 2 raised .*no room for this pass"):
        launch(over_stages(raising), 2, rank, 4)


def test_a_rank_that_is_killed_is_named():
    with pytest.raises(RankError, match="rank 1 of 2 was killed by SIGKILL"):
        launch(over_stages(killed), 2)
    assert not [each for each in psutil.Process().children(recursive=True) if each.ppid() != os.getpid()]


def test_an_error_of_the_program_s_own_is_told_as_it_is():
    with pytest.raises(RankError, match="rank 0 of 2 raised KeyError"):
        launch(over_stages(leaving), 2)


def hanging(group):
    """A rank that stops amid a step and says nothing."""

    def use(llm):
        for number, _ in enumerate(llm.stream([1, 2, 3], SamplingParams(40))):
            if number == 3:
                os.kill(others[0], signal.SIGSTOP)

    others = [pid for pid in group.gather_objects(os.getpid()) if pid != os.getpid()]
    return over_ranks(group, model_of("plain"), use, pp=2, **TIGHT)


def test_a_rank_that_hangs_ends_all():
    with pytest.raises((HangError, RankError), match="rank 1"):
        launch(hanging, 2, timeout=2)
    assert not [each for each in psutil.Process().children(recursive=True) if each.ppid() != os.getpid()]


def idle(group, seconds):
    module.RankRunner.beat_s = module.BEAT_S = 0.2

    async def serve(llm):
        async with AsyncLLM(llm) as server:
            first = await server.generate([1, 2, 3], GREEDY)
            await asyncio.sleep(seconds)
            again = await server.generate([1, 2, 3], GREEDY)
            return first.answers[0].ids == again.answers[0].ids

    return over_ranks(group, model_of("plain"), lambda llm: asyncio.run(serve(llm)), pp=2, prefix_cache=False)


def test_stages_hear_of_an_idle_engine():
    assert launch(idle, 2, 2.5, timeout=1.5)[0]


def broken_off(group):
    """Steps under way when `use` returns, when a request is cancelled, and when a step is interrupted."""
    found = []

    def leave(llm):
        llm.add([1, 2, 3], SamplingParams(40))
        llm.step()
        return len(llm.core.launched)

    def cancel(llm):
        for name in "ab":
            llm.add([1, 2, 3], SamplingParams(40), request_id=name)
        llm.step()
        llm.cancel("a")
        outputs = {}
        while llm.unfinished:
            outputs |= {output.request_id: output.answers[0] for output in llm.step()}
        outputs |= {output.request_id: output.answers[0] for output in llm.step()}
        return outputs["a"].ids, outputs["a"].reason, outputs["b"].ids, llm.pool.used

    def cancel_amid_a_step(llm):
        read = llm.runner.read
        llm.runner.read = lambda outputs: (read(outputs), llm.cancel("a"))
        llm.add([1, 2, 3], SamplingParams(40), request_id="a")
        [output] = llm.step() + llm.step()
        return output.answers[0].ids, output.answers[0].reason

    def interrupt(llm):
        finish, calls = llm.core.finish, []

        def once(step):
            calls.append(step)
            if len(calls) == 3:
                raise KeyboardInterrupt
            finish(step)

        llm.core.finish = once
        try:
            llm.generate([[5], [6]], GREEDY)
        except KeyboardInterrupt:
            found.append("interrupted")
        return [output.answers[0].ids for output in llm.generate([[1, 2, 3]], SamplingParams(40))]

    for use in (leave, cancel, cancel_amid_a_step, interrupt):
        found.append(over_ranks(group, model_of("plain"), use, pp=2, **TIGHT))
    return found


def test_steps_that_nobody_waits_for_are_read_before_anything_else():
    left, (none, reason, whole, used), amid, interrupted, [again] = launch(broken_off, 2)[0]
    assert amid == ([], "cancelled")
    assert (left, none, reason, used, interrupted) == (1, [], "cancelled", 0, "interrupted")
    assert len(whole) == 40 and again == whole


def sampling_that_raises(group):
    """Of one row, on the rank that samples; and logits that are not finite, of one prompt."""
    sample = isolate.sample_on_device

    def broken(logits, inputs, *more):
        if inputs.temperature is not None and (inputs.temperature == 0.77).any():
            raise ZeroDivisionError("a row that nobody can sample")
        return sample(logits, inputs, *more)

    isolate.sample_on_device = broken
    model = model_of("plain")
    with torch.no_grad():
        model.embedding.weight[60] = float("nan")

    def use(llm):
        params = [GREEDY, SamplingParams(6, temperature=0.77, seed=1), SamplingParams(6, temperature=0.5, seed=2)]
        names = [llm.add([number + 1, 2, 3], each) for number, each in enumerate(params)]
        names.append(llm.add([4, 60, 5], GREEDY))
        outputs = {}
        while llm.unfinished:
            outputs |= {output.request_id: output for output in llm.step()}
        return [(outputs[name].error, len(outputs[name].answers[0].ids)) for name in names], llm.pool.used

    return over_ranks(group, model, use, pp=2, **TIGHT)


def test_a_request_fails_alone():
    (greedy, faulty, sampled, nan), used = launch(sampling_that_raises, 2)[0]
    assert greedy == (None, 20) and sampled == (None, 6) and used == 0
    assert faulty == ("sampling its token 1 raised ZeroDivisionError: a row that nobody can sample", 0)
    assert nan[0].startswith("its logits are not finite after 3 tokens")


def spoilt(group):
    """A pass of one stage that spoils what it writes, while a request of the same prefix arrives."""

    def broken(runner):
        compute, passes = runner._compute, []

        def once(*given):
            logits = compute(*given)
            passes.append(1)
            if group.rank == 1 and len(passes) == 1:
                pool = runner.cache.pool
                pool[pool != 0] = float("nan")
                logits.fill_(float("nan"))
            return logits

        runner._compute = once

    made = module.RankRunner.__init__

    def make(self, *given, **options):
        made(self, *given, **options)
        broken(self)

    module.RankRunner.__init__ = make

    def use(llm):
        names = [llm.add(PROMPT, GREEDY)]
        llm.step()
        names.append(llm.add(PROMPT, GREEDY))
        outputs = {}
        while llm.unfinished:
            outputs |= {output.request_id: output for output in llm.step()}
        return [outputs[name].error for name in names], outputs[names[1]].answers[0].ids

    return over_ranks(group, model_of("plain"), use, pp=2, **TIGHT)


def test_nobody_takes_over_blocks_before_it_is_known_that_they_are_good():
    (first, second), ids = launch(spoilt, 2)[0]
    assert "its logits are not finite" in first and second is None
    assert ids == list(generate(model_of("plain"), PROMPT, 20))


def slow_reply(group, seconds):
    """The last stage takes its time: rank 0 waits for it, and says how long."""
    send = Replies.send

    def late(self, step, outputs):
        time.sleep(seconds)
        send(self, step, outputs)

    Replies.send = late

    def use(llm):
        llm.generate([[1, 2, 3]], SamplingParams(5, ignore_eos=True))
        return len(llm.records), llm.runner.waited()

    return over_ranks(group, model_of("plain"), use, pp=2)


def test_what_a_stage_waits_is_counted():
    steps, (first, second) = launch(slow_reply, 2, 0.1)[0]
    assert steps == 5 and first >= 0.1 * steps and second > 0


REFUSED = [
    ({"pp": 3}, "3 stages do not divide 2 ranks"),
    ({"pp": 0}, "pp 0"),
    ({"pp": 2, "async_scheduling": True}, "async_scheduling with 2 stages"),
    ({"pp": 2, "graphs": True}, "graphs with 2 stages"),
    ({"pp": 2, "compile": True}, "compile with an engine over ranks"),
    ({"pp": 2, "proposer": "eagle"}, "proposer 'eagle' reads the target, which is cut over 2 ranks"),
]


def refusals(group):
    said = []
    for options, _ in REFUSED:
        try:
            over_ranks(group, model_of("plain"), lambda llm: None, **options)
        except ValueError as error:
            said.append(str(error))
    return said


def test_what_stages_cannot_do_is_one_sentence():
    said = launch(refusals, 2)[1]
    assert len(said) == len(REFUSED)
    assert all(expected in sentence for sentence, (_, expected) in zip(said, REFUSED, strict=True)), said


def test_more_stages_than_layers_are_refused():
    with pytest.raises(RankError, match="3 parts need 3 layers, but the model has 2"):
        launch(lambda group: over_ranks(group, model_of("plain"), lambda llm: None, pp=3), 3)
