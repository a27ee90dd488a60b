"""The scheduler with a model that computes nothing: who runs when, who waits how long, and that everybody ends."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.serve import POLICIES, BlockPool, Scheduler, Sequence, State


class Run:
    """Steps a scheduler; token t of a sequence is a function of its place, so that equal prompts stay equal."""

    def __init__(self, blocks=8, size=4, host=0, prefix_cache=True, window=None, windowed=None, **options):
        """windowed: of the layers with a window, beside others that see everything, how many blocks."""
        how = {"num_host_blocks": host, "prefix_cache": prefix_cache}
        how |= {"window": window} if windowed is None else {"windowed": BlockPool(windowed, size, window=window, **how)}
        self.pool = BlockPool(blocks, size, **how)
        options = {"token_budget": 16, "max_num_seqs": 4} | options
        self.scheduler = Scheduler(self.pool, **options)
        self.family, self.admitted, self.plans = [], [], []

    def add(self, prompt, limit, **options):
        tokens = list(range(prompt)) if isinstance(prompt, int) else list(prompt)
        sequence = Sequence(tokens, limit, **options)
        self.scheduler.add(sequence)
        self.family.append(sequence)
        return sequence

    def step(self):
        scheduler, top = self.scheduler, self.first()
        plan = scheduler.schedule()
        assert sum(tokens for _, tokens in plan.batch) <= scheduler.token_budget
        assert all(0 < tokens <= max(1, scheduler.chunk) for _, tokens in plan.batch)
        assert len({id(sequence) for sequence, _ in plan.batch}) == len(plan.batch)
        assert scheduler.num_seqs == sum(s.num_seqs for s in scheduler.running) <= scheduler.max_num_seqs
        assert scheduler.running == sorted(scheduler.running, key=lambda s: s.rank)
        assert top not in plan.preempted
        if top in scheduler.running:
            assert top in [sequence for sequence, _ in plan.batch]  # whoever is first of all goes on, whatever happens
        for sequence in scheduler.running:  # blocks for its tokens and not one more, but for who waits for one
            assert len(sequence.blocks) <= self.pool.blocks_for(sequence.num_tokens)
        assert self.pool.free + self.pool.cached + self.pool.used == self.pool.total
        self.admitted += [s for s in plan.admitted if not s.preemptions]
        self.plans.append(plan)
        for sequence in scheduler.advance(plan):
            options = {"priority": sequence.priority}
            children = [
                Sequence(list(sequence.tokens), sequence.limit, **options) for _ in range(sequence.num_seqs - 1)
            ]
            scheduler.fork(sequence, children)
            self.family += children
            for member in (sequence, *children):
                member.tokens.append(member.num_tokens)
                if member.num_tokens == member.limit:
                    scheduler.finish(member)
        return plan

    def first(self):
        living = [s for s in self.family if s.state is not State.FINISHED]
        return min(living, key=lambda s: s.rank, default=None)

    def finish(self, most=5000):
        steps = 0
        while any(s.state is not State.FINISHED for s in self.family):
            assert self.step().batch, "a step with nothing to compute while requests wait: they would wait for ever"
            steps += 1
            assert steps <= most
        assert self.pool.references == [0] * self.pool.total and self.pool.used == 0
        assert self.pool.free_host == self.pool.num_host_blocks
        assert self.scheduler.num_waiting == self.scheduler.num_seqs == len(self.scheduler.running) == 0
        return steps


REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 20),  # prompt
        st.integers(1, 12),  # new tokens
        st.integers(-1, 2),  # priority
        st.integers(1, 3),  # samples
        st.integers(0, 12),  # arrives after so many steps
        st.booleans(),  # is cancelled at some time
        st.integers(0, 1),  # which prefix
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=150)
@given(
    requests=REQUESTS,
    policy=st.sampled_from(sorted(POLICIES)),
    preemption=st.sampled_from(["recompute", "swap"]),
    size=st.sampled_from([1, 4, 16]),
    chunk=st.sampled_from([None, 1, 5]),
    host=st.sampled_from([0, 3, 64]),
    reserve=st.integers(0, 1),
    patience=st.sampled_from([0, 2, 64]),
    prefix_cache=st.booleans(),
)
def test_every_request_ends_in_bounded_time_and_nothing_is_left(
    requests, policy, preemption, size, chunk, host, reserve, patience, prefix_cache
):
    """The pool holds the largest request and little more. Bound: no later-ranked request can take work away from the
    first in order, so at worst they run one after the other, each computing prompt and answer once more alone."""
    blocks = -(-31 // size) + 2
    options = {"policy": policy, "preemption": preemption, "chunk": chunk, "reserve": reserve, "patience": patience}
    run = Run(blocks, size, host, prefix_cache, **options)
    bound, time = 0, 0
    for prompt, new, priority, num_seqs, after, cancelled, prefix in requests:
        for _ in range(after):
            run.step()
            time += 1
        tokens = [1000 * prefix + place for place in range(prompt)]
        victim = run.add(tokens, prompt + new, priority=priority, num_seqs=num_seqs)
        bound += num_seqs * (prompt + new) + num_seqs
        if cancelled and run.family[0].state is not State.FINISHED:
            run.scheduler.finish(run.family[0])
        if cancelled and len(requests) % 2:
            run.scheduler.finish(victim)
    run.finish(most=bound)


@settings(max_examples=60)
@given(priorities=st.lists(st.integers(-2, 2), min_size=2, max_size=40), patience=st.integers(0, 6))
def test_overtaken_by_a_bounded_number_of_later_arrivals(priorities, patience):
    """Work arrives faster than it is done, most of it more urgent than the poorest."""
    run = Run(blocks=4, size=4, max_num_seqs=1, patience=patience)
    for priority in priorities:
        run.add(3, 6, priority=priority)
        run.step()
    run.finish()
    place = {id(sequence): index for index, sequence in enumerate(run.admitted)}
    for index, sequence in enumerate(run.family):
        later = [s for s in run.family[index + 1 :] if place[id(s)] < place[id(sequence)]]
        most = patience * max(sequence.priority - priority for priority in priorities)
        assert len(later) <= most
        assert all(s.priority < sequence.priority for s in later)


def test_a_prompt_does_not_stall_those_that_decode():
    """Bug of phases that are not mixed: a long prompt takes whole steps for itself."""
    run = Run(blocks=64, size=4, token_budget=8, chunk=8, prefix_cache=False)
    decoding = [run.add([place, 7], 40) for place in range(2)]
    run.step()
    late = run.add(60, 70)
    for _ in range(10):
        plan = run.step()
        assert [tokens for sequence, tokens in plan.batch if sequence in decoding] == [1, 1]
        assert [tokens for sequence, tokens in plan.batch if sequence is late] == [6]


def test_chunk_bounds_each_and_the_budget_bounds_all():
    run = Run(blocks=64, token_budget=12, chunk=5, prefix_cache=False)
    for _ in range(4):
        run.add(11, 13)
    assert [tokens for _, tokens in run.step().batch] == [5, 5, 2]
    assert [tokens for _, tokens in run.step().batch] == [5, 5, 2]
    assert [tokens for _, tokens in run.step().batch] == [1, 1, 5, 5]


@pytest.mark.parametrize(
    ("policy", "victim"), [("latest", 3), ("longest", 1), ("lowest priority", 2), ("least recently used", 3)]
)
def test_policies_choose_among_the_later_ranked(policy, victim):
    run = Run(blocks=9, size=4, token_budget=64, policy=policy, prefix_cache=False, reserve=0)
    sequences = [run.add(*shape) for shape in ((4, 30), (14, 20), (5, 20), (5, 20))]
    sequences[2].priority = 5  # its place is that of its arrival, only the policy sees this
    assert len(run.step().batch) == 4
    plan = run.step()  # the first needs its second block, and none is left
    assert plan.preempted == [sequences[victim]] and not plan.admitted


def test_the_least_recently_used_is_who_was_left_out_of_steps():
    run = Run(
        blocks=9, size=4, policy="least recently used", token_budget=4, max_num_seqs=3, prefix_cache=False, reserve=0
    )
    run.add(4, 20)
    run.step()
    middle, last = run.add(14, 20), run.add(2, 20)
    run.step()
    assert middle in run.scheduler.running
    middle.last_step = -1
    while not (plan := run.step()).preempted:
        middle.last_step = -1
    assert plan.preempted[0] is (middle if last in run.scheduler.running else last)


def test_a_preempted_request_keeps_its_place():
    run = Run(blocks=4, size=4, max_num_seqs=2, reserve=0, prefix_cache=False)
    first, second = run.add(7, 15), run.add(7, 15)
    third = run.add(1, 2)
    while not run.step().preempted:
        pass
    assert second.state is State.WAITING and second.preemptions == 1 and second.num_computed == 0
    while not (plan := run.step()).admitted:
        assert third.state is State.WAITING
    assert first.state is State.FINISHED and plan.admitted[0] is second
    run.finish()


def test_swapping_loses_no_work_and_recomputing_all_of_it():
    computed = {}
    for preemption in ("swap", "recompute"):
        run = Run(blocks=6, size=4, host=6, prefix_cache=False, reserve=0, preemption=preemption)
        for _ in range(3):
            run.add(6, 18)
        run.finish()
        assert sum(s.preemptions for s in run.family) > 0
        computed[preemption] = sum(tokens for plan in run.plans for _, tokens in plan.batch)
    assert computed["swap"] == 3 * 17 < computed["recompute"]


def test_cancelled_while_on_the_host():
    run = Run(blocks=6, size=4, host=6, prefix_cache=False, reserve=0, preemption="swap")
    for _ in range(3):
        run.add(6, 18)
    while not (plan := run.step()).preempted:
        pass
    [away] = plan.preempted
    assert away.host_blocks and run.pool.free_host == 6 - len(away.host_blocks)
    run.scheduler.finish(away)
    assert run.pool.free_host == 6
    run.finish()


def test_a_full_host_falls_back_to_recomputing():
    run = Run(blocks=6, size=4, host=1, prefix_cache=False, reserve=0, preemption="swap")
    for _ in range(3):
        run.add(6, 18)
    run.finish()
    assert sum(tokens for plan in run.plans for _, tokens in plan.batch) > 3 * 17


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("chunk", [None, 5])
def test_a_shared_prefix_is_stored_and_computed_once(together, chunk):
    """Also by requests that arrive at the same time: each takes over what the others computed a moment ago."""
    run = Run(blocks=64, size=4, token_budget=64, chunk=chunk)
    prefix, requests = list(range(24)), 4
    for number in range(requests):
        run.add([*prefix, 100 + number], 30)
        if not together:
            for _ in range(10):
                run.step()
    run.finish()
    assert sum(s.hit_tokens for s in run.family) == (requests - 1) * len(prefix)
    computed = sum(tokens for plan in run.plans for _, tokens in plan.batch)
    assert computed == requests * 29 - (requests - 1) * len(prefix)
    shared = [prefix for prefix in run.pool._cache if prefix.tokens[-1] < 24]
    assert len(shared) == len(prefix) // 4


def test_of_a_fully_cached_prompt_the_last_token_is_computed():
    run = Run(blocks=16, size=4)
    run.add(8, 10)
    run.finish()
    again = run.add(8, 10)
    [(sequence, tokens)] = run.step().batch
    assert sequence is again and tokens == 4 and again.hit_tokens == 4


def test_waste_is_less_than_a_block_per_sequence():
    run = Run(blocks=64, size=4, max_num_seqs=8, token_budget=64, prefix_cache=False)
    for length in range(1, 9):
        run.add(length, length + 9)
    while run.first() is not None:
        plan = run.scheduler.schedule()
        for sequence in run.scheduler.running:
            assert 0 <= len(sequence.blocks) * 4 - sequence.num_tokens <= 3
        for sequence in run.scheduler.advance(plan):
            sequence.tokens.append(0)
            if sequence.num_tokens == sequence.limit:
                run.scheduler.finish(sequence)


def test_forks_share_the_prompt_and_copy_one_block_each():
    run = Run(blocks=32, size=4, max_num_seqs=4)
    run.add(10, 20, num_seqs=4)
    run.step()
    assert run.pool.used == 3 and run.scheduler.num_seqs == 4
    run.step()
    assert run.pool.copied == 3 and run.pool.used == 2 + 4
    run.finish()


def test_what_can_never_run_is_refused_at_once():
    run = Run(blocks=4, size=4, max_num_seqs=2, max_waiting=2)
    with pytest.raises(ValueError, match="18 tokens need 5 blocks of 4 and the pool has 4"):
        run.add(10, 18)
    with pytest.raises(ValueError, match="n 3 is more than max_num_seqs 2"):
        run.add(1, 2, num_seqs=3)
    run.add(10, 17)
    run.add(1, 2)
    with pytest.raises(RuntimeError, match="the queue is full \\(2 wait, max_waiting 2\\)"):
        run.add(1, 2)
    run.finish()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "newest"}, "policy 'newest' is unknown: use one of 'latest'"),
        ({"preemption": "drop"}, "preemption 'drop' is unknown"),
        ({"token_budget": 3}, "token_budget 3 must be at least max_num_seqs 4"),
        ({"max_num_seqs": 0}, "max_num_seqs 0 must be a whole number of at least 1"),
        ({"chunk": 0}, "chunk 0 must be a whole number of at least 1, or None"),
        ({"max_waiting": 0}, "max_waiting 0 must be a whole number of at least 1, or None"),
        ({"patience": -1}, "patience -1 must be a whole number of at least 0"),
    ],
)
def test_wrong_options_are_told(options, message):
    with pytest.raises(ValueError, match=message):
        Run(**options)
