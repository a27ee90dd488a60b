"""Attacks on the engine: failures anywhere, interrupts at every line, abandoned streams, many threads at once.

Whatever happens: no wrong token, no block, output or state of a proposer left behind, no thread that waits for ever.
About a minute by default, ten with MINILLM_PROOF=all.
"""

import dis
import gc
import os
import random
import sys
import threading
import time
from functools import lru_cache
from itertools import count as counting_from
from itertools import cycle, product
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import minillm.serve
from minillm.model.draw import Draw, sample_seed
from minillm.model.generate import generate
from minillm.model.paged import cache as paged
from minillm.model.paged import tables as block_tables
from minillm.serve import LLM, SamplingParams
from minillm.serve.run import optimise
from minillm.serve.sample.reference import sample
from minillm.serve.speculate import DraftModel, NGram
from minillm.serve.speculate.proposers.eagle import Eagle
from minillm.serve.speculate.proposers.early_exit import EarlyExit
from minillm.serve.speculate.proposers.lookahead import Lookahead
from minillm.serve.speculate.proposers.medusa import Medusa
from tests.engine.serve.test_sampler import take_samples

WHOLE = os.environ.get("MINILLM_PROOF") == "all"
ORDER_S, THREADS_S = (300, 300) if WHOLE else (0, 0)  # in which rounds begin; there is always one
MAKE = {
    "none": lambda target, make, trained: None,
    "draft": lambda target, make, trained: DraftModel(make(seed=1), block_size=4, num_blocks=40),
    "ngram": lambda target, make, trained: NGram(shortest=1),
    "medusa": lambda target, make, trained: Medusa(target, trained["medusa"]),
    "eagle": lambda target, make, trained: Eagle(target, trained["eagle"]),
    "early-exit": lambda target, make, trained: EarlyExit(target, trained["early_exit"]),
    "lookahead": lambda target, make, trained: Lookahead(3),
}
AHEAD = {  # asynchronous scheduling, which takes no proposer
    "async": {"async_scheduling": True},
    "async-graphs": {"async_scheduling": True, "graphs": True},
}
KINDS = [*MAKE, *AHEAD]
WAYS = ["recompute", "swap"]
PREEMPTED = list(product(KINDS, WAYS) if WHOLE else zip(KINDS, cycle(WAYS), strict=False))
WARM = {"temperature": 1.2, "top_p": 0.7}
SHARED = [1, 2, 3, 4, 0, 0, 1, 2, 4]
PROMPTS = [SHARED + tail for tail in ([1], [2, 2], [], [3, 1, 0])] + [[0], [3, 1]]


class Flaky:
    """Anything of which each call may raise, with a probability, before or after the call was carried out."""

    def __init__(self, inner, names, rate, seed):
        self.rate, self.random, self.raised = rate, random.Random(seed), 0
        for name in names:
            if hasattr(inner, name):
                setattr(inner, name, self.spoilt(getattr(inner, name)))

    def spoilt(self, method):
        def call(*args, **kwargs):
            if (number := self.random.random()) < self.rate:
                self.raised += 1
                if number < self.rate / 2:
                    method(*args, **kwargs)
                raise RuntimeError("injected")
            return method(*args, **kwargs)

        return call


def attacked(make, trained, kind, rate, seed, **options):
    """An engine of its own model. rate: of failures, in the forward pass, its logits and all the proposer does."""
    target = make()
    proposer = MAKE[kind](target, make, trained) if kind in MAKE else None
    flaky = Flaky(proposer, ("propose", "observe", "on_verified", "forget"), rate, seed)
    right, faults = target.forward, random.Random(seed + 1)

    def forward(*args, **kwargs):
        logits = right(*args, **kwargs)
        number = faults.random()
        if number < rate / 4:
            raise RuntimeError("injected")
        if number < rate and logits.shape[1]:
            logits[:, faults.randrange(logits.shape[1])] = float("nan")
        return logits

    target.forward = forward
    options = {"block_size": 4, "num_blocks": 17, "chunk": 5, "token_budget": 16, "max_num_seqs": 6} | options
    options |= AHEAD.get(kind, {})
    if proposer is not None:
        options |= {"proposer": proposer, "k": 3}
    return LLM(target, reserve=0, **options), flaky


def nothing_left(llm):
    """After a last step, which carries out what was only marked."""
    llm.step()
    pool = llm.pool
    assert llm.unfinished == llm.scheduler.num_waiting == llm.scheduler.num_seqs == 0
    assert pool.used == 0 and pool.references == [0] * pool.total and pool.free_host == pool.num_host_blocks
    assert pool.free + pool.cached == pool.total
    assert not llm.requests.live and not llm.scheduler.running and not llm.requests.ended
    assert not llm.requests.cancelled and not llm.stepping.locked()
    assert not pool.withheld and getattr(llm.core, "launched", None) is None
    assert not llm.model.blocks[-1]._forward_hooks
    if llm.speculation is not None:
        proposer = llm.speculation.proposer
        if isinstance(proposer, DraftModel):
            assert proposer.pool.used == sum(len(kept.blocks) for kept in proposer._kept.values())


def forgot(llm):
    """The proposer keeps nothing: true unless its own `forget` raised."""
    names = ("_newest", "_memories", "_kept", "_traces", "_indexes")
    assert not [key for name in names for key in getattr(llm.speculation and llm.speculation.proposer, name, {})]


@pytest.fixture(scope="module")
def naive(make_target):
    """The answer to a prompt by the naive loop; `WARM` and sample `index` of this seed, or greedy."""
    model = make_target()

    @lru_cache(None)
    @torch.no_grad()
    def answer(number, count, stop=None, seed=None, index=0):
        if seed is None:
            return list(generate(model, PROMPTS[number], count, stop=stop))
        tokens, draw, start = list(PROMPTS[number]), Draw(sample_seed(seed, index)), len(PROMPTS[number])
        while len(tokens) < start + count:
            token = sample(model(torch.tensor([tokens]))[0, -1], SamplingParams(**WARM), tokens, draw).id
            if token == stop:
                break
            tokens.append(token)
        return tokens[start:]

    return answer


def right(output, expected):
    """Is what was answered right, and has what was cut short a reason? expected: of sample i."""
    for index, answer in enumerate(output.answers):
        full, complete = expected(index), answer.reason in ("length", "stop")
        assert answer.ids == full[: None if complete else len(answer.ids)], "a wrong token"
        assert complete or (answer.reason == "failed") == (output.error is not None)


# One thread, any order of events.


class Attack(RuleBasedStateMachine):
    make = trained = naive = None  # set by the test, from its fixtures

    @initialize(
        kind=st.sampled_from(KINDS),
        preemption=st.sampled_from(["recompute", "swap"]),
        rate=st.sampled_from([0.0, 0.1, 0.3]),
        seed=st.integers(0, 1000),
    )
    def start(self, kind, preemption, rate, seed):
        self.now, self.expected, self.outputs, self.streams, self.abandoned = 0, {}, {}, [], []
        options = {"preemption": preemption, "clock": self.clock}
        self.llm, self.flaky = attacked(self.make, self.trained, kind, rate, seed, **options)

    def clock(self):
        """Closes abandoned streams amid a step. The garbage collector would do so, too, but at another moment each time
        that Hypothesis repeats an example, and which rules may follow depends on it."""
        self.now += 1
        self.abandoned = [(due, stream) for due, stream in self.abandoned if due > self.now]
        return self.now

    @rule(
        number=st.integers(0, 5),
        count=st.integers(1, 20),
        n=st.sampled_from([1, 1, 3]),
        stop=st.sampled_from([None, None, 3]),
        seed=st.sampled_from([None, 1, 2]),
        more=st.integers(-1, 1),
        timeout_s=st.sampled_from([None, None, 30]),
    )
    def add(self, number, count, n, stop, seed, more, timeout_s):
        """Draws have the tokens of the naive loop only without a proposer."""
        if len(self.expected) - len(self.outputs) < 8:
            seed = seed if self.llm.speculation is None else None
            drawn = {} if seed is None else WARM | {"seed": seed}
            params = SamplingParams(max_tokens=count, n=n, stop_tokens=[] if stop is None else [stop], **drawn)
            name = self.llm.add(PROMPTS[number], params, priority=more, timeout_s=timeout_s)
            self.expected[name] = lambda index: self.naive(number, count, stop, seed, index)

    @rule(times=st.integers(1, 6))
    def step(self, times):
        for _ in range(times):
            for output in self.llm.step():
                assert output.request_id not in self.outputs, "an output came twice"
                self.outputs[output.request_id] = output
                right(output, self.expected[output.request_id])

    @rule(pick=st.randoms(use_true_random=False))
    def cancel(self, pick):
        if names := sorted(self.expected.keys() - self.outputs.keys()):
            try:
                self.llm.cancel(pick.choice(names))
            except ValueError as error:
                assert "cannot be cancelled" in str(error)

    @rule(number=st.integers(0, 5), count=st.integers(2, 20))
    def stream(self, number, count):
        if len(self.streams) < 3:
            self.streams.append((self.llm.stream(PROMPTS[number], SamplingParams(max_tokens=count)), number, count, []))

    @precondition(lambda self: self.streams)
    @rule(place=st.integers(0, 2))
    def listen(self, place):
        stream, number, count, found = self.streams[place % len(self.streams)]
        try:
            found += [token.id for token in next(stream).tokens]
            assert found == self.naive(number, count)[: len(found)]
        except StopIteration:
            assert found == self.naive(number, count)
            self.streams.pop(place % len(self.streams))
        except RuntimeError as error:
            assert "failed: " in str(error)
            self.streams.pop(place % len(self.streams))

    @precondition(lambda self: self.streams)
    @rule(calls=st.integers(0, 20))
    def abandon(self, calls):
        """calls: of the clock until nothing refers to the stream; 0 = at once."""
        stream, *_ = self.streams.pop()
        if calls:
            self.abandoned.append((self.now + calls, stream))

    @rule(place=st.sampled_from(["advance", "finish"]))
    def interrupt(self, place):
        def broken(*args):
            delattr(self.llm.core.next_tokens, place)
            raise KeyboardInterrupt

        setattr(self.llm.core.next_tokens, place, broken)
        try:
            for output in self.llm.step():  # nothing to do, or the pass itself had failed before
                self.outputs[output.request_id] = output
        except KeyboardInterrupt:
            pass
        self.llm.core.next_tokens.__dict__.pop(place, None)

    @invariant()
    def books_balance(self):
        if hasattr(self, "llm") and not self.llm.interrupted:
            pool, running = self.llm.pool, self.llm.scheduler.running
            held = [block for sequence in running for block in sequence.blocks]
            assert pool.free + pool.cached + pool.used == pool.total
            assert sum(pool.references) == len(held) and len(set(held)) == pool.used
            assert all(token >= 0 for prefix in pool._cache for token in prefix.tokens), "a placeholder was published"

    def teardown(self):
        if hasattr(self, "llm"):
            self.streams.clear()
            self.abandoned.clear()
            for _ in range(2000):
                if not self.llm.unfinished:
                    break
                self.step(1)
            self.step(1)
            assert self.outputs.keys() == self.expected.keys(), "an output was lost"
            nothing_left(self.llm)
            if not self.flaky.raised:
                forgot(self.llm)


@pytest.mark.full
def test_any_order_of_events(make_target, trained, naive, monkeypatch):
    take_samples(monkeypatch)  # so that rows are sampled again
    machine = type("Attacked", (Attack,), {"make": staticmethod(make_target), "trained": trained})
    machine.naive = staticmethod(naive)
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    case = machine.TestCase
    few = {"max_examples": 30, "stateful_step_count": 30, "deadline": None, "suppress_health_check": checks}
    case.settings = settings(derandomize=False, **few)  # each round another
    for _ in rounds(ORDER_S):
        case().runTest()


def rounds(seconds):
    """0, 1, 2, ...: as many as begin within the seconds, and one at least. Tells how many there were."""
    due = time.monotonic() + seconds
    for number in counting_from():
        yield number
        if time.monotonic() >= due:
            print(f"{number + 1} rounds in {seconds:.0f} s", file=sys.stderr)
            return


# Many threads.


@pytest.mark.full
@pytest.mark.parametrize(("kind", "preemption"), PREEMPTED)
def test_many_threads_with_failures_and_abandoned_streams(kind, preemption, make_target, trained, naive):
    for seed in rounds(THREADS_S / len(KINDS) / 2):
        llm, flaky = attacked(make_target, trained, kind, 0.04, seed, preemption=preemption)
        wrong = []

        def user(number, llm=llm, seed=seed, wrong=wrong):
            rng = random.Random(100 * seed + number)
            try:
                for _ in range(6):
                    act(llm, rng, naive)
            except BaseException as failure:  # told by the test's own thread
                wrong.append(failure)

        threads = [threading.Thread(target=user, args=[number], daemon=True) for number in range(6)]
        before, due = gc.get_threshold(), time.monotonic() + 120
        gc.set_threshold(20, 2, 2)  # so that cycles are collected amid everything
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(timeout=max(0.0, due - time.monotonic()))
        finally:
            gc.set_threshold(*before)
        assert not any(thread.is_alive() for thread in threads), "a thread waits for ever"
        assert not wrong, wrong
        gc.collect()
        while llm.unfinished:
            llm.step()
        nothing_left(llm)
        if not flaky.raised:
            forgot(llm)


def act(llm, rng, naive):
    """One thing that a user does."""
    number, count = rng.randrange(len(PROMPTS)), rng.randrange(1, 18)
    params = SamplingParams(max_tokens=count)
    kind = rng.choice(["generate", "generate", "stream", "abandon", "cancel", "timeout"])
    if kind == "generate":
        for output in llm.generate([PROMPTS[number]] * 2, params):
            right(output, lambda _: naive(number, count))
    elif kind in ("stream", "abandon"):
        stream, found = llm.stream(PROMPTS[number], params), []
        try:
            for delta in stream:
                found += [token.id for token in delta.tokens]
                if kind == "abandon" and len(found) > count // 2:
                    cycle = [stream]
                    cycle.append(cycle)
                    break
            assert found == naive(number, count)[: len(found)] and (kind == "abandon" or len(found) == count)
        except RuntimeError as error:
            assert "failed: " in str(error), error
    else:
        timeout_s = 0.01 if kind == "timeout" else None
        name = llm.add(PROMPTS[number], params, timeout_s=timeout_s)
        if kind == "cancel":
            try:
                llm.cancel(name)
            except ValueError as error:  # another thread stepped to its end
                assert "cannot be cancelled" in str(error)


# An interrupt at every line.


@lru_cache(None)
def without_signals(code):
    """Where a trace can raise and no signal does: they are handled in calls and jumps back, not at the bare `try` of a
    line and not between a `with` block and its `__exit__`."""
    instructions = list(dis.get_instructions(code))
    lines = {i.positions.lineno for i in instructions if i.opname in ("BEFORE_WITH", "LOAD_SPECIAL")}
    first = {}
    for each in instructions:
        first.setdefault(each.positions.lineno, each.offset)
    left = {i.offset for i in instructions if i.positions.lineno in lines and i.offset != first[i.positions.lineno]}
    return left | {i.offset for i in instructions if i.opname == "NOP"}


class Interrupt:
    """Raises KeyboardInterrupt at one line: the (line, occurrence) given. Without one, it collects them."""

    def __init__(self, wanted=None, most=2):
        self.wanted, self.most, self.counts, self.found = wanted, most, {}, []
        self.folders = (str(Path(minillm.serve.__file__).parent), *(each.__file__ for each in (paged, block_tables)))

    def __enter__(self):
        sys.settrace(self.enter)

    def __exit__(self, *_):
        sys.settrace(None)

    def enter(self, frame, event, arg):
        return self.line if frame.f_code.co_filename.startswith(self.folders) else None

    def line(self, frame, event, arg):
        if event == "line" and frame.f_lasti not in without_signals(frame.f_code):
            where = (frame.f_code.co_filename, frame.f_lineno)
            count = self.counts[where] = self.counts.get(where, 0) + 1
            if self.wanted == (where, count):
                sys.settrace(None)
                raise KeyboardInterrupt
            if count <= self.most:
                self.found.append((where, count))
        return self.line


@pytest.mark.full
@pytest.mark.parametrize("kind", ["none", "async-graphs", *(["draft", "medusa", "lookahead", "compiled"] * WHOLE)])
def test_an_interrupt_at_any_line_leaves_the_engine_whole(kind, make_target, trained, naive, monkeypatch):
    """Lines of `generate`, `stream` and `step`, over requests that preempt and fork: by default a third, drawn anew.
    Compiled: its own. Asynchronous: by default its own, and every twentieth of those that are tried without it.
    """
    take_samples(monkeypatch)  # so that rows are sampled again

    def engine(kind=kind):
        options = {"compile": "eager"} if kind == "compiled" else {}
        options |= {"preemption": "swap", "num_blocks": 9, "max_num_seqs": 4}
        return attacked(make_target, trained, kind, 0.0, 0, **options)[0]

    def use(llm):
        llm.add(PROMPTS[4], SamplingParams(max_tokens=3, logprobs=1, seed=1, **WARM), request_id="added")
        llm.generate(PROMPTS[:3], SamplingParams(max_tokens=9))
        for _ in llm.stream(PROMPTS[3], SamplingParams(max_tokens=4, n=2), timeout_s=1e9):
            pass
        llm.step()

    def lines(kind):
        counting, llm = Interrupt(most=9 if WHOLE else 1), engine(kind)
        with counting:
            use(llm)
        assert len(counting.found) > 300
        return counting.found

    found = lines(kind)
    if kind == "compiled":
        found = [each for each in found if each[0][0] == optimise.__file__]
    elif kind == "async-graphs" and not WHOLE:
        known = set(lines("none"))
        found = [each for place, each in enumerate(found) if each not in known or place % 20 == 0]
    elif not WHOLE:
        found = random.Random(os.environ["MINILLM_SEED"]).sample(found, len(found) // 3)
    reached = 0
    for wanted in found:
        llm = engine()
        try:
            with Interrupt(wanted):
                use(llm)
        except KeyboardInterrupt:
            reached += 1
        assert not llm.stepping.locked() and not llm.requests.submitting.locked(), wanted
        [output] = llm.generate([PROMPTS[1]], SamplingParams(max_tokens=6))
        assert output.answers[0].ids == naive(1, 6) and output.error is None, wanted
        while llm.unfinished:
            llm.step()
        nothing_left(llm)
        forgot(llm)
    assert reached > len(found) - 5  # all but what is kept from one engine to the next


# Each fault that was found, alone.


def test_a_draft_that_spoils_its_logits_is_not_observed(make_target, trained):
    """Its position was not verified; a gap before it (a hit, a swap) made `observe` take an empty slice."""
    target = make_target()
    llm = LLM(target, proposer=Medusa(target, trained["medusa"]), k=2, block_size=4)
    right, calls = target.forward, []

    def forward(*args, **kwargs):
        logits = right(*args, **kwargs)
        calls.append(1)
        return logits * float("nan") if len(calls) == 4 else logits

    target.forward = forward
    observe = llm.speculation.observe

    def forgetful(step):
        """As if every position before had been found in the prefix cache."""
        for each, _ in step.plan.batch:
            if each.drafting is not None:
                each.drafting.observed = 0
        observe(step)

    llm.speculation.observe = forgetful
    [output] = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=8))
    assert output.error is None and output.answers[0].ids == list(generate(make_target(), PROMPTS[0], 8))


def test_a_stream_closed_by_the_collector_while_drafts_are_made_only_marks(make_target):
    """It used to wait for a lock that its own thread held: all threads stood still."""
    target = make_target()
    draft = DraftModel(make_target(seed=1), block_size=4)
    llm = LLM(target, proposer=draft, k=2, block_size=4)
    streams, right = [llm.stream(PROMPTS[1], SamplingParams(max_tokens=20))], draft.propose

    def propose(asked):
        if streams:
            streams.pop().close()
        return right(asked)

    draft.propose = propose
    found = []
    thread = threading.Thread(target=lambda: found.extend(llm.generate([PROMPTS[0]])), daemon=True)
    thread.start()
    thread.join(timeout=300)
    assert not thread.is_alive(), "the engine stands still"
    assert found[0].answers[0].ids == list(generate(make_target(), PROMPTS[0], 16))
    nothing_left(llm)


@torch.no_grad()
def test_a_proposers_failure_costs_other_requests_nothing(make_target, trained):
    """Not their draws, not their drafts."""
    params = [SamplingParams(max_tokens=12, temperature=0.9, seed=i) for i in range(3)]
    found = []
    for fails in (False, True):
        target = make_target()
        medusa = Medusa(target, trained["medusa"])
        right = medusa.propose

        def propose(asked, fails=fails, right=right):
            if fails and any(len(each.params.stop_tokens) for each in asked):
                right(asked)
                raise RuntimeError("injected")
            return right(asked)

        medusa.propose = propose
        llm = LLM(target, proposer=medusa, k=2, block_size=4)
        last = SamplingParams(max_tokens=12, temperature=0.9, seed=9, stop_tokens=[4])
        found.append(llm.generate(PROMPTS[:4], [*params, last]))
    for sound, after in zip(found[0][:3], found[1][:3], strict=True):
        assert sound.answers[0].ids == after.answers[0].ids and sound.drafted == after.drafted > 0
    assert found[1][3].error is None and found[1][3].drafted == 0
