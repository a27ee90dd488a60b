"""The pipeline runtime against one process in double precision, against its schedule, and against its receipts."""

from dataclasses import replace

import pipeline_programs as programs
import pytest
import torch
from torch import nn

from minillm.comm import RankError, launch
from minillm.parallel.pipeline_parallel import runtime
from minillm.parallel.pipeline_parallel.runtime import Pipeline
from minillm.parallel.pipeline_parallel.schedule import messages, schedules
from minillm.parallel.pipeline_parallel.stages import build_parts
from minillm.predict.training import pipeline as predict

BYTES = programs.SEQ_LEN * programs.HIDDEN * 8  # of one row of hidden states


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.full
def test_every_schedule_gives_the_gradients_of_one_process_and_sends_what_was_predicted(stages):
    seen = set()
    for row in zip(*launch(programs.every_schedule, stages), strict=True):
        schedule, tied = row[0]["schedule"], row[0]["tied"]
        case = schedule.name, schedule.microbatches, tied
        seen.add(schedule.name)
        assert max(rank["error"] for rank in row) <= 1e-10, case
        assert max(rank["loss error"] for rank in row) <= 1e-10, case

        borders = sum(a.rank != b.rank for a, b in zip(schedule.routes[0], schedule.routes[0][1:], strict=False))
        total_rows = sum(map(programs.rows, range(schedule.microbatches)))
        assert sum(rank["messages"] for rank in row) == 2 * schedule.microbatches * borders == len(schedule.messages)
        assert sum(rank["bytes"] for rank in row) == 2 * borders * total_rows * BYTES
        if schedule.name in ("gpipe", "1f1b", "interleaved"):
            chunks = schedule.num_parts // stages
            sends = predict.sends(stages, schedule.microbatches, chunks)
            sent_bytes = predict.sent_bytes(stages, total_rows, programs.SEQ_LEN, programs.HIDDEN, 8, chunks)
            assert (sends, sent_bytes) == (sum(r["messages"] for r in row), sum(r["bytes"] for r in row)), case

        assert [rank["peak"] for rank in row] == schedules.peak_in_flight(schedule), case
        if schedule.name == "gpipe":
            assert [rank["peak"] for rank in row] == [schedule.microbatches] * stages
        if schedule.name == "1f1b":
            assert [rank["peak"] for rank in row] == [min(stages - s, schedule.microbatches) for s in range(stages)]

        timeline = schedules.observed(schedule, [rank["ledger"] for rank in row])
        assert schedules.violations(timeline) == [], case
        orders = tuple(tuple(bar.action for bar in bars) for bars in timeline.bars)
        assert orders == tuple(tuple(schedule.actions(rank)) for rank in range(stages))

        names = [name for rank in row for name in rank["owned"]]
        layers = max(2 * stages, 3)
        assert sorted(names) == sorted(programs.alone(layers, schedule.microbatches, tied)[1]), case
        shares = stages > 1 and (schedule.name == "dualpipe" or (tied and schedule.name != "zero_bubble_v"))
        assert any(rank["finish"][1] for rank in row) == shares, case
        assert all(sum(rank["finish"][0].values()) <= 1 for rank in row), case
    due = set(schedules.SCHEDULES) - (set() if stages % 2 == 0 else {"dualpipe"})
    assert seen == due


def test_with_data_parallelism_each_part_is_reduced_once():
    for rank in launch(programs.replicas, 4):
        for name, found in rank.items():
            assert found["error"] <= 1e-10 and found["zero"] <= 1e-10, name
            assert found["reductions"] == found["parts"] and all(found["inside"]), name
            assert found["quiet"] == 0 and found["zero calls"]["reduce_scatter"] == 1, name


def test_any_modules_frozen_ones_and_evaluation():
    for rank, result in enumerate(launch(programs.other_modules, 3)):
        for found in result.values():
            assert found["same"] and found["untouched"]
            assert found["losses"] == pytest.approx([found["losses"][2]] * 3, rel=1e-12)
            assert found["spans"] == ["F0", "F1", "F2"], rank


class OneRank:
    """Stands in for a group: nobody may be asked before bad input is refused."""

    name, rank, world_size, device = "world", 0, 2, torch.device("cpu")


def test_what_does_not_fit_is_one_sentence_before_anyone_waits():
    part, layer = nn.Linear(2, 2), programs.config(4)
    cases = [
        (lambda: Pipeline([part], schedules.gpipe(3, 2), OneRank), "made for 3 stages, but group 'world' has 2"),
        (
            lambda: Pipeline([part], schedules.interleaved(2, 2), OneRank),
            "1 parts, but interleaved gives each rank 2",
        ),
        (lambda: Pipeline([part], schedules.pipedream(2, 2), OneRank), "pipedream updates weights while"),
        (lambda: schedules.interleaved(2, 3), "multiple of 2 microbatches for 2 stages, not 3"),
        (lambda: build_parts(layer, schedules.interleaved(2, 2, 3), 0), "6 parts need 6 layers, but the model has 4"),
    ]
    broken = schedules.gpipe(2, 1)
    broken = replace(broken, orders=(broken.orders[0][::-1], broken.orders[1]))
    cases.append((lambda: Pipeline([part], broken, OneRank), "rank 0 does B0 before F0, which it needs"))
    nowhere = schedules.gpipe(2, 2)
    nowhere = replace(nowhere, routes=(nowhere.routes[0], nowhere.routes[1][:1]))
    cases.append(
        (lambda: Pipeline([part], nowhere, OneRank), "microbatch 1 visits 1 places, that of microbatch 0 visi")
    )
    for make, sentence in cases:
        with pytest.raises(ValueError, match=sentence) as refused:
            make()
        assert "\n" not in str(refused.value)


def test_the_schedule_that_runs_is_the_one_that_was_checked(monkeypatch):
    """Messages are added after the first check: an order that breaks with them is refused too."""

    def broken(schedule, early=False):
        full = messages.with_messages(schedule, early=early)
        first, *others = full.orders
        return replace(full, orders=([step for step in first if isinstance(step, schedules.Action)], *others))

    monkeypatch.setattr(runtime, "with_messages", broken)
    with pytest.raises(schedules.ScheduleError, match="rank 0 never receives B0 from rank 1 to rank 0"):
        Pipeline([nn.Linear(2, 2)], schedules.gpipe(2, 2), OneRank)


def trouble(group, kind):
    torch.set_num_threads(1)
    microbatches = 3 if kind == "schedule" and group.rank else 4

    class Part(nn.Linear):
        def forward(self, x):
            if kind == "raises" and group.rank == 1 and x.sum() == 6:
                raise RuntimeError("the third microbatch is bad")
            y = super().forward(x)
            if kind == "two outputs" and group.rank == 0:
                return y, y
            return y[:1] if kind == "shape" and group.rank == 1 else y

    part = Part(2, 2) if kind != "tied" else nn.Linear(2, 2 + group.rank, bias=False)
    part.tied = ("weight",) if kind == "tied" else ()
    pipeline = Pipeline([part], schedules.one_f_one_b(group.world_size, microbatches), group)
    inputs = [torch.ones(2, 2) * (m - 0.5) for m in range(microbatches)]
    if kind == "inputs":
        inputs.pop()
    if kind == "raises":
        nn.init.eye_(part.weight)
        nn.init.zeros_(part.bias)
    pipeline.step(inputs, lambda m: (torch.Size((2, 2)), torch.float32), lambda part, y, m: y.sum())


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (
            "shape",
            r"rank 1: part 1 returned \[1, 2\] torch.float32 for microbatch 0, but \[2, 2\] torch.float32 tra",
        ),
        ("two outputs", "rank 0: part 0 returned a tuple, but one tensor travels from part to part"),
        ("raises", "the third microbatch is bad"),
        ("inputs", "3 inputs for the 4 microbatches of 1f1b"),
        ("schedule", "rank 1 runs 1f1b with 3 microbatches, but rank 0 runs 1f1b with 4 microbatches"),
        ("tied", r"weight is \[3, 2\] torch.float32 on rank 1, but \[2, 2\] torch.float32 on rank 0"),
    ],
)
def test_a_rank_in_trouble_ends_the_launch_with_its_own_error(kind, sentence):
    with pytest.raises(RankError, match=sentence):
        launch(trouble, 3, kind, timeout=30)
