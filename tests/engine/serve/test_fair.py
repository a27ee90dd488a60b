"""The virtual token counter against its paper: shares are respected, idleness is not saved up, everybody ends."""

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.model.generate import folder_of
from minillm.serve import LLM, BlockPool, SamplingParams, Scheduler, Sequence, State
from minillm.serve.schedule.fair import ANSWER, PROMPT, FairScheduler, Share


class Run:
    """Steps of a scheduler whose model computes nothing, on a clock that counts them. Names are tenants."""

    def __init__(self, fair=True, blocks=64, size=4, shares=None, **options):
        self.pool, self.time = BlockPool(blocks, size, num_host_blocks=8), 0
        options = {"token_budget": 32, "max_num_seqs": 4} | options
        if fair:
            more = {"shares": shares, "clock": lambda: float(self.time), "tenant_of": lambda each: each.name}
            self.scheduler = FairScheduler(self.pool, **more, **options)
        else:
            self.scheduler = Scheduler(self.pool, **options)
        self.served: dict[str, int] = {}  # tokens of answers by tenant
        self.waits: dict[str, list[int]] = {}  # steps until admission
        self.held: dict[str, int] = {}  # block-steps
        self._arrived: dict[Sequence, int] = {}

    def add(self, tenant, prompt=4, answer=8, **options):
        start = len(self._arrived) * 1000  # no prefix is shared
        sequence = Sequence(list(range(start, start + prompt)), prompt + answer, name=tenant, **options)
        self.scheduler.add(sequence)
        self._arrived[sequence] = self.time
        return sequence

    def step(self):
        plan = self.scheduler.schedule()
        for sequence in plan.admitted:
            if not sequence.preemptions:
                self.waits.setdefault(sequence.name, []).append(self.time - self._arrived[sequence])
        for sequence in self.scheduler.advance(plan):
            children = [
                Sequence(list(sequence.tokens), sequence.limit, name=sequence.name)
                for _ in range(sequence.num_seqs - 1)
            ]
            self.scheduler.fork(sequence, children)
            for member in (sequence, *children):
                member.tokens.append(-1 - member.num_tokens)
                self.served[sequence.name] = self.served.get(sequence.name, 0) + 1
                if member.num_tokens == member.limit:
                    self.scheduler.finish(member)
        for sequence in self.scheduler.running:
            self.held[sequence.name] = self.held.get(sequence.name, 0) + len(sequence.held_blocks)
        self.time += 1
        return plan


def overloaded(fair: bool, steps: int = 900) -> Run:
    """A sequence takes 8 steps and 4 run, so a request fits in every other step. Beside a tenant that sends one every
    four, half of that, stands one that sends ten times as many."""
    run = Run(fair)
    for step in range(steps):
        for _ in range(10 if step % 4 == 0 else 0):
            run.add("greedy")
        if step % 4 == 0:
            run.add("modest")
        run.step()
    return run


def test_a_tenant_that_sends_ten_times_its_share_takes_nothing_from_the_other():
    fair, first_come = overloaded(fair=True), overloaded(fair=False)
    sent = 900 // 4 * 8
    assert fair.served["modest"] > 0.95 * sent
    assert max(fair.waits["modest"]) <= 16  # as long as two requests run
    assert first_come.served["modest"] < 0.25 * sent
    assert max(first_come.waits["modest"]) > 400
    whole = [sum(run.served.values()) for run in (fair, first_come)]
    assert abs(whole[0] - whole[1]) < 0.02 * whole[1], "fairness costs no throughput"


def test_weights_are_shares_of_the_service():
    run = Run(shares={"gold": Share(weight=3.0)})
    for _ in range(400):
        for tenant in ("gold", "plain"):
            run.add(tenant)
        run.step()
    assert abs(run.served["gold"] / run.served["plain"] - 3) < 0.1


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_counters_of_tenants_that_wait_stay_within_the_papers_bound(data):
    """Section 4: they differ by at most max(PROMPT · longest prompt, ANSWER · tokens that fit), here with weights."""
    blocks = data.draw(st.sampled_from([(16, 4), (64, 4), (12, 8)]))
    run = Run(blocks=blocks[0], size=blocks[1], max_num_seqs=data.draw(st.integers(1, 6)))
    weights = data.draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=2, max_size=4))
    names = [f"tenant-{number}" for number in range(len(weights))]
    for name, weight in zip(names, weights, strict=True):
        run.scheduler.shares[name] = Share(weight)
    shape = st.tuples(st.integers(1, 20), st.integers(1, 12))
    sizes = data.draw(st.lists(shape, min_size=len(names), max_size=len(names)))
    longest = max(prompt for prompt, _ in sizes)
    for _ in range(120):
        for name, (prompt, answer) in zip(names, sizes, strict=True):
            if run.scheduler.share_of(Sequence([0], 1, name=name)).head is None:
                for _ in range(3):
                    run.add(name, prompt, answer)
        run.step()
        counters = [share.counter for share in run.scheduler.shares.values() if share.head is not None]
        bound = max(PROMPT * longest, ANSWER * blocks[0] * blocks[1]) / min(weights)
        assert not counters or max(counters) - min(counters) <= bound


def test_idleness_is_not_saved_up():
    run = Run(max_num_seqs=1)
    for _ in range(40):
        run.add("always")
    run.add("sometimes")
    for _ in range(200):
        run.step()
    before = dict(run.served)
    for _ in range(20):
        run.add("sometimes")
    for _ in range(80):
        run.step()
    gained = {name: run.served[name] - before[name] for name in before}
    assert abs(gained["always"] - gained["sometimes"]) <= 16, "it had been idle and gets no more than half now"


def test_a_cap_on_running_sequences_holds_and_leaves_places_to_others():
    run = Run(max_num_seqs=6, shares={"capped": Share(most_running=2)})
    for _ in range(12):
        run.add("capped")
    run.add("other", answer=4)
    for _ in range(12):
        plan = run.step()
        assert plan.batch
        assert sum(each.name == "capped" for each in run.scheduler.running) <= 2
    with pytest.raises(ValueError, match="n 3 is more than the 2 sequences"):
        run.add("capped", num_seqs=3)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_everybody_ends_and_nothing_is_held(data):
    options = {
        "policy": data.draw(st.sampled_from(["latest", "longest", "least recently used"])),
        "preemption": data.draw(st.sampled_from(["recompute", "swap"])),
        "max_num_seqs": data.draw(st.integers(3, 6)),
    }
    run, living = Run(blocks=10, **options), []
    for _ in range(data.draw(st.integers(1, 25))):
        for _ in range(data.draw(st.integers(0, 3))):
            shape = {"prompt": data.draw(st.integers(1, 16)), "answer": data.draw(st.integers(1, 12))}
            living.append(run.add(data.draw(st.sampled_from("abc")), num_seqs=data.draw(st.integers(1, 3)), **shape))
        if living and data.draw(st.booleans()):
            cancelled = living.pop(data.draw(st.integers(0, len(living) - 1)))
            if cancelled.state is not State.FINISHED:
                run.scheduler.finish(cancelled)
        run.step()
    for _ in range(3000):
        if not run.scheduler.running and not run.scheduler.num_waiting:
            break
        run.step()
    scheduler = run.scheduler
    assert not scheduler.running and not scheduler.num_waiting and run.pool.used == 0
    assert all(share.running == 0 and share.head is None for share in scheduler.shares.values())
    assert not scheduler._paid
    assert {name: share.answered for name, share in scheduler.shares.items() if share.answered} == run.served
    held = {name: share.block_seconds for name, share in scheduler.shares.items() if share.block_seconds}
    assert held == {name: count for name, count in run.held.items() if count}


def test_tokens_are_the_same_as_without_it():
    options, prompts = {"max_num_seqs": 2}, [[5, 6, 7], [8] * 20, [9, 9]]
    params = SamplingParams(max_tokens=9, n=2, temperature=1, seed=3, ignore_eos=True)
    plain = LLM.load(folder_of("draft"), **options).generate(prompts, params)
    fair = LLM.load(folder_of("draft"), scheduler=partial(FairScheduler, shares={"a": Share()}), **options)
    told = fair.generate(prompts, params)
    assert [each.answers for each in told] == [each.answers for each in plain]
    assert fair.scheduler.shares[""].answered == 3 * 2 * 9 and fair.pool.used == 0
