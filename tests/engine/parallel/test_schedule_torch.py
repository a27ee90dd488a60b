"""The orders against those of torch.distributed.pipelining, and our messages before torch's own referee.

torch makes its orders inside objects that want real stages; the parts used here need only a few numbers of them.
"""

import pytest

from minillm.parallel.pipeline_parallel.schedule.schedules import (
    SCHEDULES,
    Action,
    dualpipe,
    gpipe,
    interleaved,
    one_f_one_b,
    simulate,
    with_messages,
    zero_bubble,
    zero_bubble_v,
)

torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
pytestmark = pytest.mark.skipif(
    not hasattr(torch_schedules.ScheduleGPipe, "_get_pipeline_order"), reason="this torch makes its orders otherwise"
)
KINDS = {"F": "FORWARD", "B": "FULL_BACKWARD", "I": "BACKWARD_INPUT", "W": "BACKWARD_WEIGHT"}


def bare(name, stages, microbatches, chunks=1):
    """One of torch's schedules without stages: only the numbers from which it makes orders."""
    made = object.__new__(getattr(torch_schedules, name))
    made.pp_group_size, made.n_local_stages, made._n_microbatches = stages, chunks, microbatches
    made._num_stages = made.num_stages = stages * chunks
    made.number_of_rounds = max(1, microbatches // stages)
    made.microbatches_per_round = microbatches // made.number_of_rounds
    return made


def orders_of(made, schedule):
    """torch's orders as ours: (kind, microbatch, part of the model) per rank, without idle slots."""
    whole = getattr(made, "_get_pipeline_order", None)
    whole = whole() if isinstance(made, torch_schedules.PipelineScheduleSingle) else None
    for rank in range(schedule.ranks):
        order = whole[rank] if whole else made._calculate_single_rank_operations(rank)
        flat = [step for action in order if action for step in (action.sub_actions or [action])]
        kinds = {getattr(torch_schedules._ComputationType, word): kind for kind, word in KINDS.items()}
        yield [
            (kinds[s.computation_type], s.microbatch_index, s.stage_index) for s in flat if s.computation_type in kinds
        ]


def ours(schedule, rank):
    return [(a.kind, a.microbatch, schedule.part_of[rank, a.chunk]) for a in schedule.actions(rank)]


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_same_orders(stages, rounds):
    microbatches = rounds * stages
    pairs = [
        (gpipe(stages, microbatches), bare("ScheduleGPipe", stages, microbatches)),
        (one_f_one_b(stages, microbatches), bare("Schedule1F1B", stages, microbatches)),
        (zero_bubble(stages, microbatches), bare("ScheduleInterleavedZeroBubble", stages, microbatches)),
    ]
    for chunks in (1, 2, 3):
        theirs = bare("ScheduleInterleaved1F1B", stages, microbatches, chunks)
        pairs.append((interleaved(stages, microbatches, chunks), theirs))
    for schedule, theirs in pairs:
        for rank, order in enumerate(orders_of(theirs, schedule)):
            if schedule.name == "1f1b" and rank == stages - 1 and order[0] == ("F", 1, rank):
                continue  # torch 2.13 lists the last rank's forwards from 1 on; what it runs is right
            assert ours(schedule, rank) == order, (schedule.name, rank)


@pytest.mark.parametrize("stages, microbatches", [(1, 1), (2, 2), (2, 6), (3, 5), (4, 4), (4, 8), (6, 15)])
def test_zb_v_differs_only_in_when_weights_follow(stages, microbatches):
    """The same but for whose weight gradient comes first: ours the oldest, torch's one chunk's before the other's."""
    schedule = zero_bubble_v(stages, microbatches)
    for rank, order in enumerate(orders_of(bare("ScheduleZBVZeroBubble", stages, microbatches, 2), schedule)):
        mine = ours(schedule, rank)
        assert [step for step in mine if step[0] != "W"] == [step for step in order if step[0] != "W"]
        assert sorted(mine) == sorted(order)
        assert [step[0] for step in mine] == [step[0] for step in order]  # so the idle time is the same


@pytest.mark.parametrize("ranks, microbatches", [(1, 2), (2, 4), (3, 7), (4, 10)])
def test_dualpipe_cut_in_half(ranks, microbatches):
    """torch has DualPipeV: the first half of DualPipe's ranks, with the way back through their own second chunk."""
    schedule = dualpipe(2 * ranks, 2 * microbatches)
    for rank, order in enumerate(orders_of(bare("ScheduleDualPipeV", ranks, microbatches, 2), gpipe(ranks, 1))):
        mine = [(a.kind, a.microbatch - microbatches * a.chunk, a.chunk) for a in schedule.actions(rank)]
        assert mine == [(kind, microbatch, int(part >= ranks)) for kind, microbatch, part in order]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - {"dualpipe"}))
def test_torchs_referee_finds_no_deadlock(name, early):
    """torch's dry run of sends, receives and actions gets to the end of our orders."""
    schedule = with_messages(SCHEDULES[name](4, 8), early=early)
    kind_of = torch_schedules._ComputationType

    def theirs(rank, step):
        if isinstance(step, Action):
            return torch_schedules._Action(
                schedule.part_of[rank, step.chunk], getattr(kind_of, KINDS[step.kind]), step.microbatch
            )
        event = step.source if step.source.rank == rank else step.target
        word = ("SEND" if event is step.source else "RECV") + ("_F" if step.target.action.kind == "F" else "_B")
        return torch_schedules._Action(
            schedule.part_of[event.rank, event.action.chunk], getattr(kind_of, word), event.action.microbatch
        )

    orders = {rank: [theirs(rank, step) for step in order] for rank, order in enumerate(schedule.orders)}
    rank_of = {part: place.rank for place, part in schedule.part_of.items()}
    played = torch_schedules._simulate_comms_compute(orders, rank_of.__getitem__, schedule.num_parts)
    for rank, order in orders.items():
        assert [step for step in played[rank] if step is not None] == order
    actions = {rank: [s for s in order if s.computation_type.name in KINDS.values()] for rank, order in orders.items()}
    assert torch_schedules._validate_schedule(actions, 4, schedule.num_parts, 8) == rank_of
    assert simulate(schedule).makespan > 0
